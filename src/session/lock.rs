//! A held session lock.

use std::fmt;

use tokio::sync::oneshot;

use super::message::SessionGrant;
use crate::error::{Error, LossCause, Result};
use crate::name::LockName;

/// A lock that the server keeps for as long as the client's connection lives: an advisory lock on
/// PostgreSQL, `GET_LOCK` on MySQL and MariaDB, a lock on a file beside a SQLite database (in the
/// directory `app.db-sqlock-session`). Leave that directory alone while locks are held: when it is
/// deleted, another process can take a name at once, and its holder learns of it within about a
/// second.
///
/// Compared with a [lease](crate::Lease), a session lock is cheap, because nothing is written, and
/// the death of its holder frees it at once. In return it has no token, cannot
/// [fence](crate::Lease::fence), and ends with the connection: a restart or failover of the
/// database ends it, and so does a network that is silent for 15 seconds. Take a session lock for
/// short work that may be done twice after a failure, and a lease for all other work.
///
/// All session locks of a client live on one connection of their own, which is opened for the first
/// lock and closed some seconds after the last. The client proves every second that the connection
/// is alive. A client may hold thousands of locks, but PostgreSQL has a table of limited size for
/// all locks of all its clients (`max_locks_per_transaction`).
///
/// Names follow the rules of leases, but a session lock and a lease of one name are independent.
/// Names of session locks belong to the current schema on PostgreSQL, to the current database on
/// MySQL and MariaDB, and to the file on SQLite.
///
/// Acquiring fails with [`Error::Unsupported`] where a session lock would not exclude others:
/// behind a pooler (which lends one session to many clients), on a standby or a read-only replica,
/// on Galera and Group Replication (whose nodes do not share such locks), in a SQLite database in
/// memory. Leases work there, except on a standby or replica.
///
/// Dropping a session lock releases it in the background. A lock keeps the client's connection
/// open, but not [`Locks`](crate::Locks) itself.
#[doc(alias = "guard")]
#[must_use = "dropping a session lock releases it"]
pub struct SessionLock {
    grant: SessionGrant,
}

impl SessionLock {
    pub(super) fn new(grant: SessionGrant) -> Self {
        Self { grant }
    }

    /// Returns the locked name.
    pub fn name(&self) -> &LockName {
        &self.grant.name
    }

    /// Returns whether the lock is certainly still held. Reads a clock and does no I/O.
    ///
    /// The result turns false before the server could give the name to another client because this
    /// one was silent; after the server ends the connection of its own accord, or becomes read-only
    /// (MySQL and MariaDB), within about a second.
    pub fn is_held(&self) -> bool {
        self.grant.liveness.loss().is_none()
    }

    /// Waits until the lock is lost, and returns the cause. Pending for ever while the lock is
    /// held.
    ///
    /// The future completes about a second after the server has ended the connection or become
    /// read-only, and 15 seconds after the last sign of life from a server that fell silent. On
    /// SQLite: about a second after the file was deleted (all session locks of this client are lost
    /// with it), and by [`Locks::shutdown`](crate::Locks::shutdown).
    ///
    /// # Cancel safety
    ///
    /// The call can be repeated.
    pub async fn lost(&self) -> LossCause {
        self.grant.liveness.lost().await
    }

    /// Releases the lock, and returns an error if it was not held to the end. Others can acquire
    /// the name after the return.
    ///
    /// # Errors
    ///
    /// [`Error::SessionLost`]: the lock had already ended, or the server did not confirm the
    /// release. In that case the client has closed its connection, so the lock ends as soon as the
    /// server notices.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop the release.
    pub async fn release(mut self) -> Result<()> {
        let (reply, outcome) = oneshot::channel();
        self.grant.send_release(Some(reply));
        let grant = &self.grant;
        let outcome = outcome.await.unwrap_or_else(|_| Err(grant.liveness.loss().unwrap_or(LossCause::Disconnected)));
        outcome.map_err(|cause| Error::SessionLost { name: grant.name.clone(), cause })
    }
}

impl fmt::Debug for SessionLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SessionGrant { name, shared, liveness, .. } = &self.grant;
        f.debug_struct("SessionLock")
            .field("name", name)
            .field("shared", shared)
            .field("loss", &liveness.loss())
            .finish_non_exhaustive()
    }
}
