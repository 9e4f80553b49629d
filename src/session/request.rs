//! A request for a session lock, and waiting for its answer.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use super::lock::SessionLock;
use super::message::{Message, Wanted};
use crate::backend::Kind;
use crate::client::Client;
use crate::error::{Error, Result};
use crate::name::LockName;

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
