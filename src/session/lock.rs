//! A session lock in the hands of a user.

use std::fmt;
use std::sync::Arc;

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::liveness::Bond;
use super::message::Message;
use crate::error::{Error, LossCause, Result};
use crate::name::LockName;

/// A lock that the server keeps for as long as our connection lives: an advisory lock on PostgreSQL, `GET_LOCK` on MySQL and
/// MariaDB, a lock on a file beside a SQLite database (in the directory `app.db-sqlock-session`). Leave that directory alone while
/// locks are held: when it is deleted, another process can take a name at once, and its holder learns of it within about a second.
///
/// Beside a [lease](crate::Lease) it is cheap, for nothing is written, and a holder that dies frees it at once. In return it has
/// no token, cannot [fence](crate::Lease::fence), and is gone when the connection is: a restart or failover of the database
/// ends it, and so does a network that is silent for 15 seconds. Take it for short work that may be done twice when something
/// breaks; take a lease where that matters.
///
/// All session locks of a client live on one connection of their own, which is opened for the first and closed some seconds
/// after the last. Its life is confirmed every second. A client may hold thousands, but PostgreSQL has a table of limited size
/// for all locks of all its clients (`max_locks_per_transaction`).
///
/// Names are those of leases, yet a session lock and a lease of one name have nothing to do with each other. On PostgreSQL
/// they belong to the current schema, on MySQL and MariaDB to the current database, on SQLite to the file.
///
/// A lock is not to be had where it would not keep others out, and [`Error::Unsupported`] says why: behind a pooler (which
/// lends one session to many), on a standby or a read-only replica, on Galera and Group Replication (whose nodes do not share
/// such locks), in a SQLite database in memory. Leases are, except on a standby or replica.
///
/// Dropping it releases it in the background. It keeps the client's connection open, but not [`Locks`](crate::Locks) itself.
#[must_use = "dropping a session lock releases it"]
pub struct SessionLock {
    pub(super) name: LockName,
    pub(super) shared: bool,
    pub(super) bond: Arc<Bond>,
    pub(super) desk: UnboundedSender<Message>,
    pub(super) returned: bool,
}

impl SessionLock {
    /// What is locked.
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// Whether the lock is still sure to be ours. No I/O: it looks at a clock. It turns false before the server could give the
    /// name to another because it has not heard from us; when the server ends the connection of its own accord, within about a
    /// second.
    pub fn is_held(&self) -> bool {
        self.bond.loss().is_none()
    }

    /// Completes when the lock is lost: about a second after the server has ended the connection, and 15 seconds after the last
    /// sign of life from a server that fell silent. On SQLite: about a second after the file was deleted (all session locks of this
    /// client are lost with it), and by [`Locks::shutdown`](crate::Locks::shutdown).
    ///
    /// # Cancel safety
    ///
    /// It can be called again.
    pub async fn lost(&self) -> LossCause {
        self.bond.lost().await
    }

    /// Gives the lock back, and tells whether it had been ours to the end. When this returns, others can have it.
    ///
    /// # Errors
    ///
    /// [`Error::SessionLost`]: it had ended before, or the server did not confirm that it had not. Our connection has been closed
    /// then, so that nothing is left of the lock as soon as the server knows.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop the release.
    pub async fn release(mut self) -> Result<()> {
        let (verdict, answer) = oneshot::channel();
        self.give_back(Some(verdict));
        let gone = |_| Err(self.bond.loss().unwrap_or(LossCause::Disconnected));
        let outcome = answer.await.unwrap_or_else(gone);
        outcome.map_err(|cause| Error::SessionLost { name: self.name.clone(), cause })
    }

    fn give_back(&mut self, verdict: Option<oneshot::Sender<Result<(), LossCause>>>) {
        if std::mem::replace(&mut self.returned, true) {
            return;
        }
        match (self.bond.loss(), verdict) {
            (Some(cause), Some(verdict)) => {
                let _ = verdict.send(Err(cause));
            }
            (Some(_), None) => {}
            (None, verdict) => {
                let bond = Arc::clone(&self.bond);
                let _ = self.desk.send(Message::Return { name: self.name.clone(), bond, verdict });
            }
        }
    }
}

impl Drop for SessionLock {
    fn drop(&mut self) {
        self.give_back(None);
    }
}

impl fmt::Debug for SessionLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionLock")
            .field("name", &self.name)
            .field("shared", &self.shared)
            .field("loss", &self.bond.loss())
            .finish_non_exhaustive()
    }
}
