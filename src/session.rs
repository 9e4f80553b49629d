//! Locks that live on a connection and die with it: advisory locks, `GET_LOCK`, locks on files.
//!
//! [`SessionLock`] has an example. Which one when: [the table of calls](crate#which-call).

mod bond;
pub(crate) mod desk;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use crate::backend::Kind;
use crate::client::Client;
use crate::error::{Error, LossCause, Result};
use crate::name::LockName;

use bond::Bond;
use desk::{Message, Wanted};

/// How long a database may say nothing to somebody who only tries: longer than it takes to give up a connection, and to find
/// that there is no other.
const TRY_FOR: Duration = Duration::from_secs(10);

/// A wait about as short as a round trip says nothing about the database.
const ROUND_TRIP: Duration = Duration::from_millis(100);

/// A request for a session lock, made with [`Locks::session`](crate::Locks::session). Nothing is sent until
/// [`acquire`](Self::acquire) or [`try_acquire`](Self::try_acquire) is awaited.
///
/// ```
/// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
/// use std::time::Duration;
///
/// let lock = locks.session("cache/rebuild").wait(Duration::from_secs(5)).acquire().await?;
/// // … some short work …
/// lock.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a request does nothing until acquire or try_acquire is awaited"]
pub struct SessionRequest {
    client: Arc<Client>,
    name: String,
    shared: bool,
    wait: Option<Duration>,
}

impl SessionRequest {
    pub(crate) fn new(client: Arc<Client>, name: String) -> Self {
        Self { client, name, shared: false, wait: None }
    }

    /// Shares the name with others who share it. Who wants it alone waits until nobody does, and between clients nobody makes
    /// room for that. MySQL and MariaDB have no such locks: there, acquiring fails with
    /// [`Error::Unsupported`].
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Waits at most this long, then fails with [`Error::Timeout`]. Zero asks once. Without it, [`acquire`](Self::acquire) waits
    /// for as long as it takes.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = Some(at_most);
        self
    }

    /// Waits for the lock.
    ///
    /// Those who wait through one client stand in line, first come, first served, and the first of them asks again and again:
    /// at once when the lock is released here, otherwise after 1 ms at first and every 50 ms at last. Between processes there is
    /// no order: whoever asks next has it.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] when [`wait`](Self::wait) ran out. [`Error::Unavailable`] when the database could not be reached for some
    /// seconds. [`Error::Unsupported`] where such a lock would not keep others out: see [`SessionLock`]. [`Error::InvalidName`],
    /// [`Error::Closed`], or [`Error::Database`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in line. A lock that is on its way is released in the background.
    pub async fn acquire(self) -> Result<SessionLock> {
        let start = Instant::now();
        let wait = self.wait;
        let patient = wait.is_none_or(|wait| !wait.is_zero());
        let mut standing = self.stand(patient)?;
        let name = standing.name.clone();
        let answer = match wait.filter(|_| patient) {
            Some(wait) => match timeout(wait, standing.answer()).await {
                Ok(answer) => answer,
                Err(_) => return Err(standing.timeout(start.elapsed())),
            },
            None if patient => standing.answer().await,
            None => standing.answer_soon().await,
        };
        answer?.ok_or_else(|| Error::Timeout { name, waited: start.elapsed() })
    }

    /// Takes the lock if it is free and nobody waits for it through this client. `Ok(None)`: it is not so.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), but never a timeout, and [`Error::Unavailable`] as soon as no connection is to be had.
    /// [`wait`](Self::wait) has no effect.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: a lock that is on its way is released in the background.
    pub async fn try_acquire(self) -> Result<Option<SessionLock>> {
        self.stand(false)?.answer_soon().await
    }

    fn stand(self, patient: bool) -> Result<Standing> {
        let name = LockName::new(self.name)?;
        if self.shared && self.client.kind == Kind::MySql {
            return Err(Error::Unsupported {
                what: "a shared session lock",
                reason: "GET_LOCK knows no shared locks; take a shared lease",
            });
        }
        let (reply, answer) = oneshot::channel();
        let taken = Arc::new(AtomicBool::new(false));
        let wanted = Wanted { shared: self.shared, patient, taken: Arc::clone(&taken), reply };
        let desk = self.client.desk.open(&self.client.backend)?;
        let _ = desk.send(Message::Want(name.clone(), wanted));
        Ok(Standing { name, desk, taken, answer, answered: false })
    }
}

impl fmt::Debug for SessionRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionRequest").field("name", &self.name).field("shared", &self.shared).finish_non_exhaustive()
    }
}

/// A request under way. Dropping it gives it up.
struct Standing {
    name: LockName,
    desk: UnboundedSender<Message>,
    /// Whether it is known that somebody has the name.
    taken: Arc<AtomicBool>,
    answer: oneshot::Receiver<Result<Option<SessionLock>>>,
    answered: bool,
}

impl Standing {
    async fn answer(&mut self) -> Result<Option<SessionLock>> {
        let answer = (&mut self.answer).await;
        self.answered = true;
        answer.unwrap_or(Err(Error::Closed))
    }

    /// The same for one who does not wait for the name, and should not wait for the database for ever.
    async fn answer_soon(&mut self) -> Result<Option<SessionLock>> {
        timeout(TRY_FOR, self.answer()).await.unwrap_or_else(|_| Err(unanswered(TRY_FOR)))
    }

    /// Why there is no lock when the time is over: a database that could not be asked is not a name that was held.
    fn timeout(&self, waited: Duration) -> Error {
        if self.taken.load(Ordering::Acquire) || waited < ROUND_TRIP {
            return Error::Timeout { name: self.name.clone(), waited };
        }
        unanswered(waited)
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        if !self.answered {
            self.answer.close();
            let _ = self.desk.send(Message::Look(self.name.clone()));
        }
    }
}

fn unanswered(waited: Duration) -> Error {
    Error::Unavailable {
        attempted: "acquire a session lock",
        reason: format!("no answer came within {waited:?}"),
        source: None,
    }
}

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
    name: LockName,
    shared: bool,
    bond: Arc<Bond>,
    desk: UnboundedSender<Message>,
    returned: bool,
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
