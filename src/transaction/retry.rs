//! Reruns transactions from their beginning after a concurrent change.
//!
//! [`Retry`] has an example.

use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::{Connection, Pool, SqlSafeStr, SqlStr, Transaction};
use sqlx_core::transaction::TransactionManager as _;
use tokio::time::Instant;

use super::work_error::{RunError, is_conflict_error, is_conflict_of_server, may_end_transaction};
use crate::backend::dialect::{EndOutcome, Ending};
use crate::backend::{Database, Kind, StoreFuture};
use crate::backoff::Backoff;
use crate::error::{Error, Fault, report};

pub use super::work_error::WorkError;

/// The most attempts at a transaction, unless [`Retry::attempts`] sets them.
const MAX_ATTEMPTS: u32 = 10;

/// The time in which new attempts begin, unless [`Retry::within`] sets it.
const MAX_ELAPSED: Duration = Duration::from_secs(10);

/// The pauses between attempts. The first is about as long as the rival's commit takes.
const PAUSE: Backoff = Backoff::between(Duration::from_millis(1), Duration::from_millis(100));

/// Runs a transaction, and runs it again from its beginning after a concurrent change.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE accounts (id INTEGER PRIMARY KEY, version INTEGER, balance INTEGER)").execute(&pool).await?;
/// # sqlx::query("INSERT INTO accounts VALUES (1, 1, 100), (2, 1, 100)").execute(&pool).await?;
/// use sqlock::retry::Retry;
/// use sqlock::version::Versioned;
///
/// let accounts = Versioned::table("accounts");
/// let left = Retry::new()
///     .run(&pool, async |tx| {
///         let from = accounts.read::<_, (i64, i64, i64)>(&mut *tx, 1).await?.expect("an account");
///         let left = from.value.2 - 30;
///         accounts.update(&mut *tx, 1, from.version, |set| {
///             set.push("balance = ").push_bind(left);
///         }).await?;
///         sqlx::query("UPDATE accounts SET balance = balance + 30, version = version + 1 WHERE id = 2")
///             .execute(&mut **tx)
///             .await?;
///         Ok::<_, sqlock::Error>(left)
///     })
///     .await?;
/// assert_eq!(left, 70);
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "sqlite"))]
/// # fn main() {}
/// ```
///
/// # What is rerun
///
/// The closure's error, or one of its [sources](std::error::Error::source), decides, so the error
/// may be of [any type](WorkError) that shows its sources:
///
/// - an error of this crate that [is a conflict](Error::is_conflict): another version, an outdated
///   snapshot;
/// - a deadlock that the database broke by aborting this transaction (PostgreSQL 40P01, MySQL
///   1213);
/// - a serialization failure (40001, MariaDB's 1020), also at the commit;
/// - SQLite's `SQLITE_BUSY`, `SQLITE_LOCKED`, `SQLITE_PROTOCOL` and `SQLITE_SCHEMA`.
///
/// Every other error ends the run at once: a lock wait timeout, a lost connection, a violated
/// constraint. A commit with an unknown outcome ends the run with [`Error::CommitUnknown`].
///
/// # Rules for the closure
///
/// - Read from the database inside the closure; values read before it may be outdated in the next
///   attempt.
/// - Effects elsewhere happen again with each attempt: leave them to the code after the commit.
/// - Return the database's errors. If a closure goes on after a deadlock on MySQL, which has rolled
///   everything back, the run ends with [`Error::CommitUnknown`], and its later statements are
///   rolled back as well. (Begin a savepoint, by `tx.begin()`, before a statement whose error is
///   expected, such as a constraint violation.)
/// - Return the error of `tx.begin()`, and wait for its end: sqlx rolls the whole transaction back
///   when a savepoint fails, as after an error on PostgreSQL, or is dropped. If the closure goes
///   on, the run ends with [`Error::CommitUnknown`], and later statements may have taken effect.
/// - Do not end the transaction inside, by `COMMIT` or, on MySQL, by DDL, which commits. On MySQL
///   the run then ends with [`Error::CommitUnknown`], unless the closure returns an error that is
///   no conflict, or a conflict after which the server has rolled back, such as a deadlock: then the
///   closure is rerun, and the part before the DDL takes effect again. (While the transaction runs,
///   `autocommit` is off in its session there.) PostgreSQL does not report such an end: the part
///   that was committed inside has taken effect.
/// - On SQLite, a full disk, `INSERT OR ROLLBACK` and a trigger's `RAISE(ROLLBACK, …)` end a
///   transaction as well. Later statements of the closure would commit by themselves, so the run
///   ends with [`Error::CommitUnknown`]; only after a full disk, a closure that returns the error
///   at once gets its own error. Use `OR ABORT` and `RAISE(ABORT, …)`.
#[derive(Clone, Debug)]
#[must_use = "a retry does nothing until run is awaited"]
pub struct Retry {
    attempts: u32,
    within: Duration,
    begin: Option<SqlStr>,
}

impl Retry {
    /// Creates a retry of at most 10 attempts, begun within 10 seconds.
    pub fn new() -> Self {
        Self { attempts: MAX_ATTEMPTS, within: MAX_ELAPSED, begin: None }
    }

    /// Limits how often the transaction is begun. Zero counts as one.
    pub fn attempts(mut self, at_most: u32) -> Self {
        self.attempts = at_most;
        self
    }

    /// Limits the time in which new attempts begin, counted from the first one. A running attempt
    /// is not interrupted.
    pub fn within(mut self, at_most: Duration) -> Self {
        self.within = at_most;
        self
    }

    /// Sets the statement that begins a transaction, for example with an isolation level: `BEGIN
    /// ISOLATION LEVEL SERIALIZABLE` on PostgreSQL.
    ///
    /// By default `BEGIN`, on SQLite `BEGIN IMMEDIATE`: without it, SQLite refuses the write lock
    /// to a transaction that read before another one committed.
    pub fn begin_with(mut self, sql: impl SqlSafeStr) -> Self {
        self.begin = Some(sql.into_sql_str());
        self
    }

    /// Begins a transaction, calls the closure with it, and commits. When the closure returns an
    /// error, `run` rolls back, and begins another attempt if that error is [a concurrent
    /// change](Self#what-is-rerun). Between attempts it pauses for 1 to 100 milliseconds.
    ///
    /// Each attempt calls a clone of the closure. Values captured by reference are shared.
    ///
    /// # Errors
    ///
    /// The closure's own error, unchanged; after the last attempt it is [a concurrent
    /// change](Self#what-is-rerun). An [`Error`] of this crate, in the closure's type, for a
    /// connection that could not be opened or a refused commit; nothing took effect.
    /// [`Error::CommitUnknown`]: the transaction may have taken effect.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rolls the transaction back. During the commit, the transaction may be
    /// committed. The connection of an interrupted transaction is closed (on SQLite it is kept
    /// after its transaction has been ended).
    ///
    /// # Panics
    ///
    /// When the closure panics; the transaction is rolled back.
    pub async fn run<DB, T, E, F, Marker>(self, pool: &Pool<DB>, work: F) -> Result<T, E>
    where
        DB: Database,
        E: From<Error> + WorkError<Marker>,
        Marker: ?Sized,
        // AsyncFnMut does not work: as of Rust 1.95, the compiler cannot prove that the future of a
        // capturing closure is Send.
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<T, E> + Clone,
    {
        let mut attempts = self.start_attempts();
        loop {
            let work = work.clone();
            let work = async |tx: &mut Transaction<'_, DB>| match work(tx).await {
                Ok(value) => check_open::<DB>(tx).await.map(|()| value).map_err(RunError::from),
                Err(error) => Err(RunError::from_work(error)),
            };
            match self.attempt(pool, work).await {
                Ok(value) => return Ok(value),
                Err(AttemptEnd::Final(error)) => return Err(error.into_error()),
                Err(AttemptEnd::EndedByWork(source) | AttemptEnd::CommitUnknown(source)) => {
                    return Err(Error::CommitUnknown { source }.into());
                }
                Err(AttemptEnd::Conflict(last)) => attempts.next_attempt(last).await.map_err(RunError::into_error)?,
            }
        }
    }

    /// Starts counting attempts, with the first one.
    pub(crate) fn start_attempts(&self) -> Attempts<'_> {
        Attempts { retry: self, start: Instant::now(), pauses: PAUSE, begun: 1 }
    }

    /// Runs one attempt: begins a transaction, runs the work, and commits or rolls back.
    pub(crate) async fn attempt<DB, T, E, F>(&self, pool: &Pool<DB>, work: F) -> Result<T, AttemptEnd<E>>
    where
        DB: Database,
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<T, RunError<E>>,
    {
        let mut pooled = PooledConnection {
            connection: Some(pool.acquire().await.map_err(AttemptEnd::from_error)?),
            is_clean: false,
        };
        let Some(connection) = &mut pooled.connection else {
            return Err(AttemptEnd::from_error(sqlx::Error::PoolClosed));
        };
        let mut tx = self.begin::<DB>(connection).await.map_err(AttemptEnd::from_error)?;
        let (outcome, is_clean) = match work(&mut tx).await {
            Ok(value) => {
                let (committed, is_clean) = commit::<DB, E>(tx).await;
                (committed.map(|()| value), is_clean)
            }
            Err(error) => {
                let (end, is_clean) = roll_back::<DB, E>(tx, error).await;
                (Err(end), is_clean)
            }
        };
        pooled.is_clean = is_clean;
        outcome
    }

    fn begin<'c, DB: Database>(&self, conn: &'c mut DB::Connection) -> StoreFuture<'c, Transaction<'c, DB>> {
        match self.begin.clone().or(DB::BEGIN.map(SqlSafeStr::into_sql_str)) {
            Some(sql) => Box::pin(conn.begin_with(DB::begin_sql(sql))),
            None => Box::pin(conn.begin()),
        }
    }
}

impl Default for Retry {
    fn default() -> Self {
        Self::new()
    }
}

/// Counts the attempts at one transaction.
pub(crate) struct Attempts<'r> {
    retry: &'r Retry,
    start: Instant,
    pauses: Backoff,
    begun: u32,
}

impl Attempts<'_> {
    /// Waits for the next attempt, or returns the last error at the limit.
    pub(crate) async fn next_attempt<E>(&mut self, last: RunError<E>) -> Result<(), RunError<E>> {
        let reason = report(last.as_error());
        if !self.try_next(&reason).await {
            tracing::debug!(attempts = self.begun, reason, "a transaction did not commit; gave up");
            return Err(last);
        }
        Ok(())
    }

    /// Waits for the next attempt. Returns `false` at the limit.
    pub(crate) async fn try_next(&mut self, reason: &str) -> bool {
        let pause = self.pauses.step();
        if self.begun >= self.retry.attempts || self.start.elapsed() + pause > self.retry.within {
            return false;
        }
        tracing::debug!(attempts = self.begun, reason, ?pause, "a transaction did not commit; running it again");
        self.begun += 1;
        tokio::time::sleep(pause).await;
        true
    }
}

/// The end of an attempt without a commit.
pub(crate) enum AttemptEnd<E> {
    /// A concurrent change ended the attempt.
    Conflict(RunError<E>),
    /// A statement of the closure rolled back or committed the transaction.
    EndedByWork(sqlx::Error),
    /// The connection was lost during the commit, or SQLite met an I/O error in it.
    CommitUnknown(sqlx::Error),
    /// Another attempt would fail in the same way.
    Final(RunError<E>),
}

/// The reason in the error of [`AttemptEnd::EndedByWork`].
const ENDED_BY_WORK: &str = "the transaction ended before its COMMIT: a statement of the closure had rolled it back (a deadlock whose \
                            error was not returned) or committed it (DDL, or a COMMIT)";

/// The operation in the error of a refused commit.
pub(crate) const COMMIT: &str = "commit a transaction";

/// Commits the transaction of an attempt. Also returns whether its connection may be used again.
async fn commit<DB: Database, E>(tx: Transaction<'_, DB>) -> (Result<(), AttemptEnd<E>>, bool) {
    match end_transaction::<DB>(tx, Ending::Commit).await {
        Ok(true) => (Ok(()), true),
        Ok(false) => (Err(AttemptEnd::EndedByWork(sqlx::Error::Protocol(ENDED_BY_WORK.into()))), true),
        Err(source) if Fault::is_doubtful_commit(&source) => (Err(AttemptEnd::CommitUnknown(source)), false),
        Err(source) if has_no_transaction::<DB>(&source) => (Err(AttemptEnd::EndedByWork(source)), true),
        // The server answered, so the transaction has ended. (SQLite may leave it open; the drop
        // then resets it.) On MySQL the session's settings are not restored yet.
        Err(error) => {
            let error = RunError::Sqlock(Error::from_caller(COMMIT, error));
            (Err(AttemptEnd::from_error(error)), DB::KIND != Kind::MySql)
        }
    }
}

/// Rolls back the transaction of an attempt that failed with this error. It does so at once, not at
/// the next use of the connection, because other transactions wait for its locks. Also returns
/// whether its connection may be used again.
async fn roll_back<DB: Database, E>(tx: Transaction<'_, DB>, error: RunError<E>) -> (AttemptEnd<E>, bool) {
    let ended = end_transaction::<DB>(tx, Ending::Rollback).await;
    let (is_clean, cause) = (ended.is_ok(), error.as_error());
    let is_ended_by_work = match ended {
        Ok(true) => false,
        // A statement may have committed the part before it, or elsewhere than on MySQL the part
        // after it, which must not be repeated.
        Ok(false) => is_conflict_error(cause) && !(DB::KIND == Kind::MySql && is_conflict_of_server(cause)),
        // On SQLite, the closure may have gone on after the end: its later statements are
        // committed.
        Err(refusal) => has_no_transaction::<DB>(&refusal) && !may_end_transaction(cause),
    };
    if is_ended_by_work {
        let reason = format!("{ENDED_BY_WORK}. The closure failed: {}", report(cause));
        return (AttemptEnd::EndedByWork(sqlx::Error::Protocol(reason)), is_clean);
    }
    (AttemptEnd::from_error(error), is_clean)
}

/// Ends a transaction. Returns `false` when the transaction had ended before its commit.
async fn end_transaction<DB: Database>(mut tx: Transaction<'_, DB>, ending: Ending) -> Result<bool, sqlx::Error> {
    match (DB::end_transaction(&mut tx, ending).await?, ending) {
        (EndOutcome::StillOpen, _) if !is_open::<DB>(&mut tx).await? => Ok(false),
        (EndOutcome::StillOpen, Ending::Commit) => tx.commit().await.map(|()| true),
        (EndOutcome::StillOpen, Ending::Rollback) => tx.rollback().await.map(|()| true),
        // The driver's ROLLBACK on drop finds no transaction.
        (ended, _) => Ok(ended == EndOutcome::Done),
    }
}

/// Returns whether the driver has not rolled the transaction back. It does so when a savepoint could
/// not begin or was dropped meanwhile; its COMMIT then succeeds without a statement.
async fn is_open<DB: Database>(conn: &mut DB::Connection) -> Result<bool, sqlx::Error> {
    if DB::KIND == Kind::Sqlite {
        // The thread of the connection carries out what was queued.
        conn.ping().await?;
    }
    Ok(DB::TransactionManager::get_transaction_depth(conn) == 1)
}

/// Returns whether SQLite refused to end a transaction that had ended before.
fn has_no_transaction<DB: Database>(error: &sqlx::Error) -> bool {
    let refusal = "no transaction is active";
    DB::KIND == Kind::Sqlite && matches!(error, sqlx::Error::Database(error) if error.message().contains(refusal))
}

impl<E> AttemptEnd<E> {
    fn from_error(error: impl Into<RunError<E>>) -> Self {
        let error = error.into();
        if is_conflict_error(error.as_error()) { Self::Conflict(error) } else { Self::Final(error) }
    }
}

/// Returns an error if a statement of the transaction has failed. PostgreSQL answers the COMMIT of
/// such a transaction with a rollback, which sqlx reports as a success.
async fn check_open<DB: Database>(conn: &mut DB::Connection) -> Result<(), sqlx::Error> {
    if DB::KIND == Kind::Postgres {
        DB::fetch(conn, &mut sqlx::QueryBuilder::new("SELECT 1")).await?;
    }
    Ok(())
}

/// A connection of the pool, which returns to the pool only without an open statement or
/// transaction. sqlx would roll back and reuse the connection, but on MySQL a connection that was
/// interrupted while it prepared a statement answers nothing more, and on PostgreSQL an interrupted
/// BEGIN may leave a transaction open.
///
/// A connection of SQLite is kept, because a database in memory ends with it. Its transaction is
/// ended instead.
struct PooledConnection<DB: Database> {
    /// `None` only during the drop.
    connection: Option<PoolConnection<DB>>,
    is_clean: bool,
}

impl<DB: Database> Drop for PooledConnection<DB> {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take() else {
            return;
        };
        if self.is_clean && DB::TransactionManager::get_transaction_depth(&connection) == 0 {
            return;
        }
        // A task, as sqlx spawns when a connection goes back to its pool.
        tokio::spawn(async move {
            if !matches!(DB::reset(&mut connection).await, Ok(true)) {
                connection.close_on_drop();
            }
        });
    }
}
