//! The notes of holders.

use super::store::StoreFuture;
use crate::name::LockName;
use crate::protocol::AcquisitionId;
use crate::token::FencingToken;

/// A note of the holder of a name.
#[derive(Clone, Debug)]
pub(crate) struct Note {
    pub(crate) name: LockName,
    pub(crate) id: AcquisitionId,
    pub(crate) token: FencingToken,
    pub(crate) text: String,
}

/// Stores the notes of holders.
pub(crate) trait NoteStore: Send {
    /// Writes the note of a valid holding, replacing an earlier one. Returns `false`, and writes
    /// nothing, if the holding has ended.
    fn write_note<'a>(&'a mut self, note: &'a Note) -> StoreFuture<'a, bool>;

    /// Reads the note of the latest holder of a name, which may have released the name.
    fn last_note<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, Option<String>>;
}
