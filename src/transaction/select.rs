//! The statement that locks rows, and its waits and failures.

use std::time::Duration;

use sqlx::{Decode, QueryBuilder, Row as _, Transaction, Type};

use crate::backend::Database;
use crate::backend::sealed::{Locking, Refusal, Wait};
use crate::backend::table::Table;
use crate::clock::Moment;
use crate::error::{Error, Result, RowError};
use crate::name::LockName;

/// By how much a server may end a wait early, by our clock.
const CLOCK_TOLERANCE: Duration = Duration::from_millis(20);

pub(super) fn wait_mode(wait: Option<Duration>) -> Wait {
    match wait {
        None => Wait::Unbounded,
        Some(Duration::ZERO) => Wait::Refuse,
        Some(at_most) => Wait::AtMost(at_most),
    }
}

/// How a single row is tried: in the way that leaves the transaction usable.
pub(super) fn no_wait<DB: Database>() -> Wait {
    if DB::ABORTS { Wait::Skip } else { Wait::Refuse }
}

pub(super) fn timeout_of_name(name: LockName, start: Moment) -> Error {
    Error::Timeout { name, waited: Moment::now().since(start) }
}

/// What was waited for is a row of a table.
pub(super) fn timeout_of_table(table: &Table, start: Moment) -> Error {
    match LockName::new(table.to_string()) {
        Ok(name) => timeout_of_name(name, start),
        Err(error) => error,
    }
}

/// Runs a SELECT that locks what it finds. `None`: somebody else had it for as long as was to be waited.
pub(super) async fn select<DB: Database>(
    conn: &mut Transaction<'_, DB>,
    table: &Table,
    locking: Locking,
    push_select: impl Fn(&mut QueryBuilder<DB>) + Sync,
) -> Result<Option<Vec<DB::Row>>> {
    let start = Moment::now();
    let mut attempt = locking;
    loop {
        let clauses = DB::clauses(attempt);
        let mut query = QueryBuilder::new(clauses.before);
        query.push("SELECT ").push(clauses.hint);
        push_select(&mut query);
        query.push(clauses.after);
        let error = match fetch_guarded::<DB>(conn, &mut query, attempt.wait).await {
            Ok(found) => return Ok(Some(found)),
            Err(error) => error,
        };
        let left = match locking.wait {
            Wait::AtMost(at_most) => at_most.saturating_sub(Moment::now().since(start)),
            _ => Duration::ZERO,
        };
        match DB::refusal(&error) {
            Some(Refusal::Stale) => return Err(lock_error::<DB>(table, error)),
            Some(Refusal::Taken) if DB::has_rolled_back(conn, &error).await.map_err(statement_error)? => {
                return Err(statement_error(error));
            }
            // The session has a lower limit for each single wait.
            Some(Refusal::Taken) if left > CLOCK_TOLERANCE => attempt.wait = Wait::AtMost(left),
            Some(Refusal::Cut) if left > CLOCK_TOLERANCE || !matches!(locking.wait, Wait::AtMost(_)) => {
                return Err(statement_error(error));
            }
            Some(Refusal::Taken | Refusal::Cut) => {
                tokio::time::sleep(left).await;
                return Ok(None);
            }
            _ => return Err(statement_error(error)),
        }
    }
}

/// Sends a statement that may fail without harm to the transaction.
pub(super) async fn fetch_guarded<DB: Database>(
    conn: &mut DB::Connection,
    query: &mut QueryBuilder<DB>,
    wait: Wait,
) -> Result<Vec<DB::Row>, sqlx::Error> {
    let within = match wait {
        Wait::AtMost(within) => Some(within),
        Wait::Refuse => None,
        Wait::Unbounded | Wait::Skip => return DB::fetch(conn, query).await,
    };
    let settings = DB::guard(conn, within).await?;
    let found = DB::fetch(conn, query).await;
    let unguarded = DB::unguard(conn, &settings, found.is_ok()).await;
    let found = found?;
    unguarded?;
    Ok(found)
}

/// Whether there is anything to lock, whoever has it.
pub(super) async fn row_exists<DB: Database>(
    conn: &mut Transaction<'_, DB>,
    push_select: impl Fn(&mut QueryBuilder<DB>),
) -> Result<bool> {
    let mut query = QueryBuilder::new("SELECT ");
    push_select(&mut query);
    let found = DB::fetch(conn, &mut query).await.map_err(statement_error)?;
    Ok(!found.is_empty())
}

pub(super) fn read_keys<DB, K>(found: &[DB::Row]) -> Result<Vec<K>>
where
    DB: Database,
    K: for<'r> Decode<'r, DB> + Type<DB>,
    usize: sqlx::ColumnIndex<DB::Row>,
{
    let keys: Result<_, sqlx::Error> = found.iter().map(|row| row.try_get(0)).collect();
    keys.map_err(|error| Error::from_sqlx("read the keys of locked rows", error))
}

pub(super) fn lock_error<DB: Database>(table: &Table, error: sqlx::Error) -> Error {
    match DB::refusal(&error) {
        Some(Refusal::Stale) => row_error(table, RowError::StaleSnapshot),
        _ => statement_error(error),
    }
}

pub(super) fn statement_error(error: sqlx::Error) -> Error {
    Error::from_sqlx("lock rows", error)
}

pub(super) fn row_error(table: &Table, cause: RowError) -> Error {
    Error::Row { table: table.to_string(), cause }
}
