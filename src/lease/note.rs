//! The note of a holder.

use super::handle::Lease;
use crate::backend::Note;
use crate::error::{Error, LossCause, Result};
use crate::operation::WriteNote;

/// The greatest length of a note, in bytes.
const MAX_NOTE: usize = 4096;

impl Lease {
    /// Writes a note about the work, replacing an earlier one: its progress, an address, the point
    /// from which a successor continues. [`Locks::inspect`](crate::Locks::inspect) shows the note,
    /// and after the release, until the next holder, [`Locks::last_note`](crate::Locks::last_note).
    /// At most 4096 bytes.
    ///
    /// ```
    /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
    /// let start: u64 = locks.last_note("reindex").await?.and_then(|note| note.parse().ok()).unwrap_or(0);
    /// let lease = locks.lease("reindex").acquire().await?;
    /// for page in start..100 {
    ///     lease.set_note(page.to_string()).await?;
    /// }
    /// # lease.release().await
    /// # }
    /// ```
    ///
    /// Each shared lease and each permit has a note of its own; re-entered leases of one owner have
    /// one together. A note is kept until a later holder of the name writes one, or a
    /// [sweeper](crate::Locks::sweeper) finds a later holder, or purges the name. The note is for
    /// people and their tools: the next holder may acquire the name before a note that this holder
    /// writes at the last moment. Data that must be right belongs in a [fenced](Self::fence)
    /// transaction.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the lease has ended: nothing was written. [`Error::NoteTooLong`],
    /// [`Error::NulInNote`], [`Error::Unavailable`], [`Error::Access`], [`Error::NotMigrated`],
    /// [`Error::Database`], [`Error::Closed`].
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the note may be written.
    pub async fn set_note(&self, text: impl Into<String>) -> Result<()> {
        let text = text.into();
        if text.len() > MAX_NOTE {
            return Err(Error::NoteTooLong { bytes: text.len() });
        }
        if text.contains('\0') {
            return Err(Error::NulInNote);
        }
        let held = self.held()?;
        let note = Note { name: self.name().clone(), id: held.acquisition_id(), token: self.token(), text };
        if self.client.run(WriteNote(note)).await? {
            return Ok(());
        }
        // Looks the lease up at once, so that its other users learn of the loss.
        held.look_up();
        Err(self.loss_error(LossCause::Superseded))
    }
}
