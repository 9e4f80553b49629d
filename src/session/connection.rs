//! The connection of all session locks.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::liveness::Liveness;
use crate::backend::{SessionLocks, StoreFuture};
use crate::clock::Moment;
use crate::error::{Fault, LossCause, no_answer_within};
use crate::name::LockName;
use crate::panics;
use crate::protocol::timing::ANSWER_TIMEOUT;

/// How often the connection proves that its session, or its directory of files, still exists.
const KEEP_ALIVE: Duration = Duration::from_secs(1);

/// How long the connection stays open after the last lock: a client often locks again soon.
const LINGER: Duration = Duration::from_secs(5);

pub(super) struct SessionConnection {
    /// Dropped first: the holders learn of the end before another client can get the names.
    guard: DisconnectGuard,
    locks: Box<dyn SessionLocks>,
    /// When the last answered statement was sent.
    confirmed_at: Instant,
    /// The number of locked names.
    locked: usize,
    /// Since when no name is locked.
    idle_since: Instant,
}

/// Why a statement failed.
pub(super) enum StatementError {
    /// The server refused the statement; the connection is usable.
    Refused(sqlx::Error),
    /// The state of the connection is unknown.
    Lost(String),
}

impl SessionConnection {
    /// Wraps a connection that was requested at `requested_at`.
    pub(super) fn new(locks: Box<dyn SessionLocks>, requested_at: Moment) -> Self {
        let now = Instant::now();
        let guard = DisconnectGuard(Liveness::new(locks.session_timeout(), requested_at));
        Self { locks, guard, confirmed_at: now, locked: 0, idle_since: now }
    }

    pub(super) fn liveness(&self) -> &Arc<Liveness> {
        &self.guard.0
    }

    pub(super) fn is_lost(&self) -> bool {
        self.liveness().loss().is_some()
    }

    pub(super) fn locked(&self) -> usize {
        self.locked
    }

    pub(super) fn add_lock(&mut self) {
        self.locked += 1;
    }

    pub(super) fn remove_lock(&mut self) {
        self.locked = self.locked.saturating_sub(1);
        self.idle_since = Instant::now();
    }

    /// Keeps an idle connection open for a waiter.
    pub(super) fn reset_idle(&mut self, now: Instant) {
        self.idle_since = now;
    }

    /// Returns when the connection must prove that it is alive, or close because it is idle.
    pub(super) fn due(&self) -> Instant {
        if self.locked == 0 { self.idle_since + LINGER } else { self.confirmed_at + KEEP_ALIVE }
    }

    /// Takes a lock on a name that this client does not hold, if it is free. Returns whether it
    /// was. Unlocks the name after a refusal: the server may have cancelled the statement after it
    /// granted the lock, which survives a rollback.
    pub(super) async fn try_lock(&mut self, name: &LockName, shared: bool) -> Result<bool, StatementError> {
        let answer = self.send(|locks| locks.try_lock(name, shared)).await;
        if matches!(answer, Err(StatementError::Refused(_))) {
            match self.send(|locks| locks.unlock(name, shared)).await {
                Ok(_) => {}
                Err(StatementError::Refused(error)) => return Err(StatementError::Lost(error.to_string())),
                Err(lost) => return Err(lost),
            }
        }
        answer
    }

    /// Unlocks a name that this client holds. Returns whether it was held. A statement that the
    /// server refused, as when an operator cancelled it, is sent once more: if it finds nothing, the
    /// first one took effect.
    pub(super) async fn unlock(&mut self, name: &LockName, shared: bool) -> Result<bool, StatementError> {
        match self.send(|locks| locks.unlock(name, shared)).await {
            Err(StatementError::Refused(_)) if self.has_session() => {
                self.send(|locks| locks.unlock(name, shared)).await.map(|_| true)
            }
            answer => answer,
        }
    }

    /// Returns whether the locks belong to a session of a server, of which any answer is a proof.
    fn has_session(&self) -> bool {
        self.locks.session_timeout().is_some()
    }

    /// Sends a statement. Any answer proves that the session is alive.
    pub(super) async fn send<'a, T>(
        &'a mut self,
        statement: impl FnOnce(&'a mut dyn SessionLocks) -> StoreFuture<'a, T>,
    ) -> Result<T, StatementError> {
        let liveness = &self.guard.0;
        // A shorter limit would abandon locks that the server may still hold for this session.
        let limit = if self.locked == 0 { ANSWER_TIMEOUT } else { liveness.remaining() };
        let (sent_at, sent) = (Moment::now(), Instant::now());
        let has_session = self.has_session();
        let answer = match timeout(limit, panics::caught_in(statement(&mut *self.locks))).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(panic)) => return Err(StatementError::Lost(panics::reason(&panic))),
            Err(_) => return Err(StatementError::Lost(no_answer_within(limit))),
        };
        let answer = match answer {
            Ok(answer) => Ok(answer),
            Err(error) if !has_session => return Err(StatementError::Refused(error)),
            Err(error @ sqlx::Error::Database(_)) if Fault::from_error(&error) != Fault::ConnectionLost => {
                Err(StatementError::Refused(error))
            }
            Err(error) => return Err(StatementError::Lost(error.to_string())),
        };
        liveness.confirm(sent_at);
        self.confirmed_at = sent;
        match liveness.loss() {
            None => answer,
            Some(_) => Err(StatementError::Lost("the answer came too late".into())),
        }
    }

    /// Proves that the session is alive. A statement that the server refused, as when an operator
    /// cancelled it, is sent once more. On SQLite, a refusal means that a lock is lost.
    pub(super) async fn ping(&mut self) -> Result<(), StatementError> {
        match self.send(|locks| locks.ping()).await {
            Err(StatementError::Refused(_)) if self.has_session() => self.send(|locks| locks.ping()).await,
            answer => answer,
        }
    }

    /// Releases all locks and closes the connection.
    pub(super) async fn close(self, cause: LossCause) {
        self.guard.0.end(cause);
        let _ = timeout(ANSWER_TIMEOUT, self.locks.close()).await;
    }
}

/// Marks all locks of a connection as lost when the connection is dropped, including at the end of
/// the runtime.
struct DisconnectGuard(Arc<Liveness>);

impl Drop for DisconnectGuard {
    fn drop(&mut self) {
        self.0.end(LossCause::Disconnected);
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as StdError;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::{Mutex, PoisonError};

    use sqlx::error::{DatabaseError, ErrorKind};

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("out of shared memory")]
    struct Refusal;

    impl DatabaseError for Refusal {
        fn message(&self) -> &str {
            "out of shared memory"
        }

        fn as_error(&self) -> &(dyn StdError + Send + Sync + 'static) {
            self
        }

        fn as_error_mut(&mut self) -> &mut (dyn StdError + Send + Sync + 'static) {
            self
        }

        fn into_error(self: Box<Self>) -> Box<dyn StdError + Send + Sync + 'static> {
            self
        }

        fn kind(&self) -> ErrorKind {
            ErrorKind::Other
        }
    }

    /// A server that grants every lock and then refuses the statement.
    #[derive(Default)]
    struct RefusingServer {
        locked: Arc<AtomicUsize>,
        refused_unlocks: u32,
        refused_pings: u32,
        _end: Option<EndProbe>,
    }

    /// Records, when the connection ends, whether its holders have been told.
    struct EndProbe {
        holders: Arc<Mutex<Option<Arc<Liveness>>>>,
        are_told: Arc<AtomicBool>,
    }

    impl Drop for EndProbe {
        fn drop(&mut self) {
            let holders = self.holders.lock().unwrap_or_else(PoisonError::into_inner);
            self.are_told.store(holders.as_ref().is_some_and(|told| told.loss().is_some()), Ordering::Relaxed);
        }
    }

    fn refuse<T>() -> Result<T, sqlx::Error> {
        Err(sqlx::Error::Database(Box::new(Refusal)))
    }

    impl SessionLocks for RefusingServer {
        fn session_timeout(&self) -> Option<Duration> {
            Some(Duration::from_secs(15))
        }

        fn try_lock<'a>(&'a mut self, _: &'a LockName, _: bool) -> StoreFuture<'a, bool> {
            Box::pin(async {
                self.locked.fetch_add(1, Ordering::Relaxed);
                refuse()
            })
        }

        fn unlock<'a>(&'a mut self, _: &'a LockName, _: bool) -> StoreFuture<'a, bool> {
            Box::pin(async {
                if let Some(left) = self.refused_unlocks.checked_sub(1) {
                    self.refused_unlocks = left;
                    return refuse();
                }
                Ok(self.locked.fetch_sub(1, Ordering::Relaxed) > 0)
            })
        }

        fn ping(&mut self) -> StoreFuture<'_, ()> {
            Box::pin(async {
                match self.refused_pings.checked_sub(1) {
                    Some(left) => {
                        self.refused_pings = left;
                        refuse()
                    }
                    None => Ok(()),
                }
            })
        }

        fn close(self: Box<Self>) -> StoreFuture<'static, ()> {
            Box::pin(async { Ok(()) })
        }
    }

    /// Refusals that follow each other faster than the keep-alive leave no other proof.
    #[tokio::test]
    async fn refusal_proves_that_the_session_is_alive() -> Result<(), Box<dyn StdError>> {
        let earlier = Moment::from_nanos(Moment::now().nanos() - 10_000_000_000);
        let mut connection = SessionConnection::new(Box::new(RefusingServer::default()), earlier);
        assert!(connection.liveness().remaining() < Duration::from_secs(6));
        let name = LockName::new("a")?;
        let refused = connection.send(|locks| locks.try_lock(&name, false)).await;
        assert!(matches!(refused, Err(StatementError::Refused(_))));
        assert!(connection.liveness().remaining() > Duration::from_secs(10));
        Ok(())
    }

    #[tokio::test]
    async fn cancelled_unlock_is_repeated_once() -> Result<(), Box<dyn StdError>> {
        for (refused_unlocks, is_alive) in [(1, true), (2, false)] {
            let server = RefusingServer { refused_unlocks, ..RefusingServer::default() };
            let mut connection = SessionConnection::new(Box::new(server), Moment::now());
            let unlocked = connection.unlock(&LockName::new("a")?, false).await;
            assert_eq!(matches!(unlocked, Ok(true)), is_alive, "{refused_unlocks}");
        }
        Ok(())
    }

    #[tokio::test]
    async fn refused_ping_is_repeated_once() {
        for (refused_pings, is_alive) in [(1, true), (2, false)] {
            let server = RefusingServer { refused_pings, ..RefusingServer::default() };
            let mut connection = SessionConnection::new(Box::new(server), Moment::now());
            assert_eq!(connection.ping().await.is_ok(), is_alive, "{refused_pings}");
        }
    }

    #[tokio::test]
    async fn refused_lock_is_unlocked() -> Result<(), Box<dyn StdError>> {
        let server = RefusingServer::default();
        let locked = Arc::clone(&server.locked);
        let mut connection = SessionConnection::new(Box::new(server), Moment::now());
        let refused = connection.try_lock(&LockName::new("a")?, false).await;
        assert!(matches!(refused, Err(StatementError::Refused(_))));
        assert_eq!(locked.load(Ordering::Relaxed), 0);
        Ok(())
    }

    /// Another client can lock the names from the end of the connection on.
    #[tokio::test]
    async fn holders_learn_of_loss_before_connection_ends() {
        let (holders, are_told) = (Arc::<Mutex<_>>::default(), Arc::<AtomicBool>::default());
        let end = EndProbe { holders: Arc::clone(&holders), are_told: Arc::clone(&are_told) };
        let server = RefusingServer { _end: Some(end), ..RefusingServer::default() };
        let connection = SessionConnection::new(Box::new(server), Moment::now());
        *holders.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(connection.liveness()));
        drop(connection);
        assert!(are_told.load(Ordering::Relaxed));
    }

    #[tokio::test]
    async fn refused_unlock_loses_the_connection() -> Result<(), Box<dyn StdError>> {
        let server = RefusingServer { refused_unlocks: 1, ..RefusingServer::default() };
        let mut connection = SessionConnection::new(Box::new(server), Moment::now());
        let lost = connection.try_lock(&LockName::new("a")?, false).await;
        assert!(matches!(lost, Err(StatementError::Lost(_))));
        Ok(())
    }
}
