//! Carries out requests on one connection.
//!
//! SQLite has one writer and no row locks. A request is usually one text of one or several
//! statements, which the thread of the connection runs without returning to the caller in between.
//! There are two kinds of text:
//!
//! - [A transaction](transaction), from BEGIN IMMEDIATE to COMMIT. Its statements depend on each
//!   other by `changes()`, the number of rows that the previous one wrote.
//! - [A text that ends with its first row](until_row). Each statement is a transaction of its own;
//!   the SELECTs between them are the points at which the text may end. So a refusal by a SELECT
//!   takes no write lock.
//!
//! A batch is one statement, except polls, which run one by one.
//!
//! Parameters are called `$1`, not `?1`: with `?7`, SQLite also numbers the six before it in that
//! statement. sqlx treats those as parameters without a name and leaves later ones unbound.
//!
//! In the statements, `''`, `'kept'` and `'entries'` are the constants NO_ID, KEPT and ENTRIES of
//! [`stored`](crate::backend::stored).

use std::task::{Context, Waker};

use sqlx::query::Query;
use sqlx::sqlite::{SqliteArguments, SqliteRow};
use sqlx::{Executor as _, Sqlite, SqliteConnection};

use super::{acquire, change, heartbeat, queue, release, transition};
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{Request, Response};

pub(super) type SqliteQuery<'q> = Query<'q, Sqlite, SqliteArguments>;

const _: () = assert!(GRANT_TTL.as_micros() == 3_000_000, "grant! in clauses.rs says the same");

/// Carries out a request.
///
/// After an error, the request took effect completely or not at all. After SQLITE_BUSY, nothing was
/// acquired and no entry was added. After [`sqlx::Error::WorkerCrashed`], the connection must not
/// be used.
///
/// # Cancel safety
///
/// A dropped request takes effect completely or not at all, and leaves no transaction open.
pub(crate) async fn execute(conn: &mut SqliteConnection, request: &Request) -> Result<Response, sqlx::Error> {
    Ok(match request {
        Request::Register { client } => Response::Registered(heartbeat::register(conn, *client).await?),
        Request::Beat { client } => Response::Beat(heartbeat::beat(conn, *client).await?),
        Request::Acquire(claim) => Response::Acquired(acquire::acquire(conn, claim).await?),
        Request::Join(claim) => Response::Joined(acquire::join(conn, claim).await?),
        Request::Enqueue(entries) => Response::Enqueued(queue::enqueue(conn, entries).await?),
        Request::Release(release) => Response::Released(release::release(conn, release).await?),
        Request::Withdraw { name, id, except } => {
            Response::Withdrawn(release::withdraw(conn, name, *id, *except).await?)
        }
        Request::Poll { name, ids } => Response::Polled(queue::poll(conn, name, ids).await?),
        Request::Read { name, limit } => Response::Read(queue::read(conn, name, *limit).await?),
        Request::Transition(transition) => Response::Transitioned(transition::transition(conn, transition).await?),
        Request::Extend(extension) => Response::Extended(change::extend(conn, extension).await?),
        Request::Downgrade { name, id, token } => {
            Response::Downgraded(change::downgrade(conn, name, *id, *token).await?)
        }
        Request::Raise { name, id, token, to } => Response::Raised(change::raise(conn, name, *id, *token, *to).await?),
        Request::Evict { name, token } => Response::Evicted(release::evict(conn, name, *token).await?),
        Request::Ask { name } => Response::Asked(change::ask(conn, name).await?),
    })
}

/// Sends a text and returns all its rows. The first statement that fails ends it.
pub(super) async fn rows(conn: &mut SqliteConnection, query: SqliteQuery<'_>) -> Result<Vec<SqliteRow>, sqlx::Error> {
    query.fetch_all(conn).await
}

/// Sends a text that ends with its first row: the thread of the connection runs no statement after
/// the one that returned it.
///
/// A statement that writes must return no row here: it would not run to its end after the first
/// row, and an error of its commit would be missed.
pub(super) async fn until_row(
    conn: &mut SqliteConnection,
    query: SqliteQuery<'_>,
) -> Result<Option<SqliteRow>, sqlx::Error> {
    query.fetch_optional(conn).await
}

/// Sends a text from BEGIN IMMEDIATE to COMMIT and returns all its rows.
pub(super) async fn transaction(
    conn: &mut SqliteConnection,
    query: SqliteQuery<'_>,
) -> Result<Vec<SqliteRow>, sqlx::Error> {
    let open = OpenTransaction::new(conn);
    let rows = query.fetch_all(&mut *open.conn).await;
    open.finish(rows).await
}

/// Sends a text that has a transaction in it, and ends with its first row. The transaction must
/// return none.
pub(super) async fn transaction_until_row(
    conn: &mut SqliteConnection,
    query: SqliteQuery<'_>,
) -> Result<Option<SqliteRow>, sqlx::Error> {
    let open = OpenTransaction::new(conn);
    let row = query.fetch_optional(&mut *open.conn).await;
    open.finish(row).await
}

/// Returns whether another connection blocked a statement: SQLITE_BUSY and SQLITE_LOCKED with all
/// their kinds, and SQLITE_PROTOCOL.
pub(super) fn is_busy(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<u32>().ok());
    code.is_some_and(|code| matches!(code & 0xff, 5 | 6 | 15))
}

/// Converts the error of a read after a write that took effect. The request counts as unanswered:
/// when it is repeated, its first effect must not be mistaken for that of another client.
///
/// The error of an unreadable row stays as it is: the executor does not repeat such a request.
pub(super) fn in_doubt(error: sqlx::Error) -> sqlx::Error {
    if is_unreadable(&error) { error } else { sqlx::Error::Io(std::io::Error::other(error)) }
}

/// Returns whether a statement took effect but returned an unreadable value.
fn is_unreadable(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_))
}

/// A connection on which a transaction may be open.
///
/// When a request is dropped, the thread of the connection stops after the current statement, and
/// may leave the transaction open. So a ROLLBACK follows the text before anything else on the
/// connection.
pub(super) struct OpenTransaction<'c> {
    pub(super) conn: &'c mut SqliteConnection,
    is_finished: bool,
}

impl<'c> OpenTransaction<'c> {
    pub(super) fn new(conn: &'c mut SqliteConnection) -> Self {
        Self { conn, is_finished: false }
    }

    /// Ends the transaction if it failed.
    pub(super) async fn finish<T>(mut self, result: Result<T, sqlx::Error>) -> Result<T, sqlx::Error> {
        if result.is_err() {
            roll_back(self.conn).await?;
        }
        self.is_finished = true;
        result
    }
}

impl Drop for OpenTransaction<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            // The first poll sends the statement. SQLite refuses it if no transaction is open.
            let mut rollback = self.conn.execute("ROLLBACK");
            let _ = rollback.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
    }
}

/// Ends the transaction of a text that failed. No transaction is open if BEGIN failed or SQLite
/// ended it on its own.
async fn roll_back(conn: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    if conn.execute("ROLLBACK").await.is_ok() {
        return Ok(());
    }
    // BEGIN is refused within a transaction.
    conn.execute("BEGIN; ROLLBACK").await.map(drop).map_err(|_| sqlx::Error::WorkerCrashed)
}

#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, reason = "tests")]
mod tests;
