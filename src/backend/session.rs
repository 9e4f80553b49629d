//! Session locks: what they live on.

use std::pin::Pin;
use std::time::Duration;

use super::store::Job;
use crate::error::Result;
use crate::name::LockName;

/// An [`Anchor`] that is being opened.
pub(crate) type Anchoring<'a> = Pin<Box<dyn Future<Output = Result<Box<dyn Anchor>>> + Send + 'a>>;

/// What session locks live on, and end with: one connection that is used for nothing else, or the open files of this process.
///
/// Nothing waits in the server. A lock of one name is taken once, and given back before it is taken again.
pub(crate) trait Anchor: Send {
    /// For how long it outlives the last statement that the server has received: then, and after any error that is not the
    /// server's own word on one lock, nothing is known of the others. `None`: it ends with this process and no sooner.
    fn outlives_silence(&self) -> Option<Duration>;

    /// Takes a lock that is free. `false`: it is not.
    fn take<'a>(&'a mut self, name: &'a LockName, shared: bool) -> Job<'a, bool>;

    /// Gives a lock back. `false`: it was not held.
    fn give_back<'a>(&'a mut self, name: &'a LockName, shared: bool) -> Job<'a, bool>;

    /// Asks whether it is still what it was; an error says that it is not.
    fn prove(&mut self) -> Job<'_, ()>;

    /// Gives every lock back and ends.
    fn close(self: Box<Self>) -> Job<'static, ()>;
}

/// How long the server keeps a session from which nothing is heard, where it can be told.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const SILENCE: Duration = Duration::from_secs(15);

/// What stands for a name within a place (a schema, a database) where names are numbers, or short, or know no case.
pub(crate) fn session_key(place: &str, name: &LockName) -> [u8; 32] {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    hash.update(b"sqlock/session/1");
    for part in [place, name.as_str()] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// The session is not the one that it was: something between us and the server passes statements on to another.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) fn another_session() -> sqlx::Error {
    sqlx::Error::Protocol("the statement was answered by another session".into())
}
