//! The notes of holders.

use super::store::StoreFuture;
use crate::name::LockName;
use crate::protocol::LeaseId;
use crate::token::FencingToken;

/// What the holder of a name notes.
#[derive(Clone, Debug)]
pub(crate) struct Note {
    pub(crate) name: LockName,
    pub(crate) id: LeaseId,
    pub(crate) token: FencingToken,
    pub(crate) text: String,
}

/// Keeps the notes of holders.
pub(crate) trait NoteStore: Send {
    /// Writes the note of a valid holding, in the place of an earlier one. Returns `false` if the
    /// holding has ended: nothing is written then.
    fn write_note<'a>(&'a mut self, note: &'a Note) -> StoreFuture<'a, bool>;

    /// Reads the note of the latest holder of a name, which may have released the name.
    fn last_note<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, Option<String>>;
}
