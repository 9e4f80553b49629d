//! A request for a session lock.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use super::lock::SessionLock;
use super::message::{Message, SessionGrant, SessionWaiter};
use crate::backend::{Kind, SessionHolder};
use crate::backoff::ROUND_TRIP;
use crate::client::Client;
use crate::error::{Error, Result, no_answer_within};
use crate::lease::run::while_held;
use crate::name::LockName;

/// How long a try waits for the database: long enough to give up a connection and fail to open
/// another, so that the error has the reason. A try of a lease may end earlier, because its error
/// has the reason of the last lost connection.
const SESSION_TRY_TIMEOUT: Duration = Duration::from_secs(10);

/// The operation of a request, for errors.
const ACQUIRE: &str = "acquire a session lock";

/// A request for a session lock, made with [`Locks::session`](crate::Locks::session). Nothing is
/// sent until [`acquire`](Self::acquire), [`try_acquire`](Self::try_acquire) or [`run`](Self::run)
/// is awaited.
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
#[must_use = "a request does nothing until acquire, try_acquire or run is awaited"]
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

    /// Shares the name with other shared locks. An exclusive request waits until no shared lock is
    /// left; later shared requests of other clients do not wait for the exclusive one. MySQL and
    /// MariaDB have no shared locks: acquiring fails with [`Error::Unsupported`].
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Waits at most this long, then fails with [`Error::Timeout`]. Zero asks once. Without a
    /// limit, [`acquire`](Self::acquire) waits for as long as it takes.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = Some(at_most);
        self
    }

    /// Waits for the lock.
    ///
    /// Requests of one client are served in the order of their arrival. The first of them asks the
    /// server at once when the lock is released by this client, otherwise after pauses that grow
    /// from 1 ms to 50 ms. Between processes there is no order: the next request wins.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] when the limit of [`wait`](Self::wait) was reached.
    /// [`Error::Unavailable`] when the database could not be reached for some seconds.
    /// [`Error::Unsupported`] where a session lock would not exclude others: see [`SessionLock`].
    /// [`Error::InvalidName`], [`Error::Closed`], [`Error::Access`], or [`Error::Database`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future cancels the wait. A lock that is granted meanwhile is released in the
    /// background.
    pub async fn acquire(self) -> Result<SessionLock> {
        let start = Instant::now();
        let wait = self.wait;
        let is_try = wait.is_some_and(|wait| wait.is_zero());
        let mut pending = self.send(is_try)?;
        let name = pending.name.clone();
        let answer = match wait {
            _ if is_try => pending.answer_within_timeout().await,
            None => pending.answer().await,
            Some(wait) => match timeout(wait, pending.answer()).await {
                Ok(answer) => answer,
                Err(_) => return Err(pending.timeout_error(start.elapsed())),
            },
        };
        answer?.ok_or_else(|| Error::Timeout { name, waited: start.elapsed() })
    }

    /// Acquires the lock if it is free and no request of this client waits for it. Returns `None`
    /// otherwise.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), but never a timeout: [`wait`](Self::wait) has no effect.
    /// [`Error::Unavailable`] as soon as no connection can be opened; a database that does not
    /// answer is [`Error::Unavailable`] after 10 seconds at most.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: a lock that is granted meanwhile is released in
    /// the background.
    pub async fn try_acquire(self) -> Result<Option<SessionLock>> {
        self.send(true)?.answer_within_timeout().await
    }

    /// Acquires the lock, runs the work while it is held, and releases it. When the lock is lost,
    /// the work is dropped at its next await point.
    ///
    /// ```
    /// # async fn rebuild() {}
    /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
    /// locks.session("cache/rebuild").run(async |_lock| rebuild().await).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The errors of [`acquire`](Self::acquire). [`Error::SessionLost`] when the lock ended before
    /// the work, or when the server did not confirm the release after the work: see
    /// [`SessionLock::release`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and releases the lock in the background.
    pub async fn run<F, T>(self, work: F) -> Result<T>
    where
        F: AsyncFnOnce(&SessionLock) -> T,
    {
        let lock = self.acquire().await?;
        match while_held(work(&lock), || lock.is_held(), lock.lost()).await {
            Ok(done) => lock.release().await.map(|()| done),
            Err(cause) => Err(Error::SessionLost { name: lock.name().clone(), cause }),
        }
    }

    /// Returns the sessions that hold the name now, shared and exclusive ones, for people and their
    /// tools. Opens a connection for this call.
    ///
    /// The server knows only a hash of each name, so a call asks about one name, and there is no
    /// list of all names. The server does not know the waiting requests, because they ask
    /// repeatedly. To end a session with all its locks: `SELECT pg_terminate_backend(id)`, or `KILL
    /// id`.
    ///
    /// On SQLite the call needs Linux, and returns the processes of this host that are visible to
    /// this process.
    ///
    /// ```
    /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
    /// for holder in locks.session("cache/rebuild").holders().await? {
    ///     println!("held by session {} of {:?}", holder.id, holder.address);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`], [`Error::Unavailable`], [`Error::Access`], [`Error::Database`];
    /// [`Error::Unsupported`] on SQLite elsewhere than on Linux, and in memory.
    ///
    /// # Cancel safety
    ///
    /// The call only reads.
    pub async fn holders(self) -> Result<Vec<SessionHolder>> {
        let name = LockName::new(self.name)?;
        let holders = self.client.backend.session_holders(&name);
        let attempted = "list the holders of a session lock";
        timeout(SESSION_TRY_TIMEOUT, holders)
            .await
            .unwrap_or_else(|_| Err(no_answer_error(attempted, SESSION_TRY_TIMEOUT)))
    }

    fn send(self, is_try: bool) -> Result<PendingRequest> {
        let name = LockName::new(self.name)?;
        if self.shared && self.client.kind == Kind::MySql {
            return Err(Error::Unsupported {
                what: "a shared session lock",
                reason: "GET_LOCK has no shared locks; take a shared lease",
            });
        }
        let (reply, answer) = oneshot::channel();
        let is_contended = Arc::new(AtomicBool::new(false));
        let waiter = SessionWaiter { shared: self.shared, is_try, is_contended: Arc::clone(&is_contended), reply };
        let messages = self.client.sessions.start(&self.client.backend)?;
        let _ = messages.send(Message::Acquire(name.clone(), waiter));
        Ok(PendingRequest { name, messages, is_contended, answer, is_answered: false })
    }
}

impl fmt::Debug for SessionRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionRequest").field("name", &self.name).field("shared", &self.shared).finish_non_exhaustive()
    }
}

/// A sent request. Dropping it cancels it.
struct PendingRequest {
    name: LockName,
    messages: UnboundedSender<Message>,
    /// Whether another holder of the name is known.
    is_contended: Arc<AtomicBool>,
    answer: oneshot::Receiver<Result<Option<SessionGrant>>>,
    is_answered: bool,
}

impl PendingRequest {
    async fn answer(&mut self) -> Result<Option<SessionLock>> {
        let answer = (&mut self.answer).await;
        self.is_answered = true;
        Ok(answer.unwrap_or(Err(Error::Closed))?.map(SessionLock::new))
    }

    /// Waits for the answer to a try, with a limit for the database.
    async fn answer_within_timeout(&mut self) -> Result<Option<SessionLock>> {
        timeout(SESSION_TRY_TIMEOUT, self.answer())
            .await
            .unwrap_or_else(|_| Err(no_answer_error(ACQUIRE, SESSION_TRY_TIMEOUT)))
    }

    /// Makes the error of a wait that reached its limit. Without a known holder, the database did
    /// not answer.
    fn timeout_error(&self, waited: Duration) -> Error {
        if self.is_contended.load(Ordering::Acquire) || waited < ROUND_TRIP {
            return Error::Timeout { name: self.name.clone(), waited };
        }
        no_answer_error(ACQUIRE, waited)
    }
}

impl Drop for PendingRequest {
    fn drop(&mut self) {
        if !self.is_answered {
            self.answer.close();
            let _ = self.messages.send(Message::Cancel(self.name.clone()));
        }
    }
}

fn no_answer_error(attempted: &'static str, waited: Duration) -> Error {
    Error::Unavailable { attempted, reason: no_answer_within(waited), source: None }
}
