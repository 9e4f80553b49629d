//! The statement that locks rows, its waits and its failures.

use std::time::Duration;

use sqlx::{Decode, QueryBuilder, Row as _, Transaction, Type};

use crate::backend::dialect::{LockFailure, Locking, Wait};
use crate::backend::table::Table;
use crate::backend::{Database, Kind, hex};
use crate::clock::Moment;
use crate::error::{Error, Result, RowError};
use crate::name::LockName;

/// The table with a row for each name.
pub(super) const NAMED_ROWS: &str = "sqlock_row";

/// How much earlier than the client's clock a server may end a wait.
const CLOCK_TOLERANCE: Duration = Duration::from_millis(20);

pub(super) fn wait_mode(wait: Option<Duration>) -> Wait {
    match wait {
        None => Wait::Unbounded,
        Some(Duration::ZERO) => Wait::Never,
        Some(at_most) => Wait::AtMost(at_most),
    }
}

/// Returns the wait for trying a single row that leaves the transaction usable.
pub(super) fn no_wait<DB: Database>() -> Wait {
    if DB::ERRORS_ABORT { Wait::SkipLocked } else { Wait::Never }
}

pub(super) fn timeout_of_name(name: LockName, start: Moment) -> Error {
    Error::Timeout { name, waited: Moment::now().since(start) }
}

/// Makes the timeout of a wait for a row of a table.
pub(super) fn timeout_of_table(table: &Table, start: Moment) -> Error {
    match LockName::new(table.to_string()) {
        Ok(name) => timeout_of_name(name, start),
        Err(error) => error,
    }
}

/// Runs a SELECT that locks the rows it finds. Returns `None` when the wait for another transaction
/// timed out.
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
        match DB::lock_failure(&error) {
            Some(LockFailure::StaleSnapshot) => return Err(lock_error::<DB>(table, error)),
            Some(LockFailure::Locked)
                if DB::has_rolled_back(conn, &error).await.map_err(|e| statement_error(table, e))? =>
            {
                return Err(statement_error(table, error));
            }
            // The session's own limit for a single wait is lower.
            Some(LockFailure::Locked) if left > CLOCK_TOLERANCE => attempt.wait = Wait::AtMost(left),
            Some(LockFailure::Timeout) if left > CLOCK_TOLERANCE || !matches!(locking.wait, Wait::AtMost(_)) => {
                return Err(statement_error(table, error));
            }
            Some(LockFailure::Locked | LockFailure::Timeout) => {
                tokio::time::sleep(left).await;
                return Ok(None);
            }
            _ => return Err(statement_error(table, error)),
        }
    }
}

/// Sends a statement whose failure leaves the transaction usable.
pub(super) async fn fetch_guarded<DB: Database>(
    conn: &mut DB::Connection,
    query: &mut QueryBuilder<DB>,
    wait: Wait,
) -> Result<Vec<DB::Row>, sqlx::Error> {
    let within = match wait {
        Wait::AtMost(within) => Some(within),
        Wait::Never => None,
        Wait::Unbounded | Wait::SkipLocked => return DB::fetch(conn, query).await,
    };
    let settings = DB::set_savepoint(conn, within).await?;
    let found = DB::fetch(conn, query).await;
    let unguarded = DB::end_savepoint(conn, &settings, found.is_ok()).await;
    let found = found?;
    unguarded?;
    Ok(found)
}

/// Returns whether the rows exist, without locking them.
pub(super) async fn row_exists<DB: Database>(
    conn: &mut Transaction<'_, DB>,
    table: &Table,
    push_select: impl Fn(&mut QueryBuilder<DB>),
) -> Result<bool> {
    let mut query = QueryBuilder::new("SELECT ");
    push_select(&mut query);
    let found = DB::fetch(conn, &mut query).await.map_err(|e| statement_error(table, e))?;
    Ok(!found.is_empty())
}

/// Returns an error if more rows exist than a SELECT has locked.
///
/// PostgreSQL leaves a row out that another transaction has deleted and inserted again during the
/// wait: the deleted version is gone, and the inserted one is not in the snapshot of the statement.
/// <https://www.postgresql.org/docs/current/transaction-iso.html#XACT-READ-COMMITTED>
///
/// Row level security may show a row and not let it be locked, so its tables are not checked.
pub(super) async fn check_missing<DB: Database>(
    conn: &mut Transaction<'_, DB>,
    table: &Table,
    locked: usize,
    push_select: impl Fn(&mut QueryBuilder<DB>),
) -> Result<()> {
    if DB::KIND != Kind::Postgres {
        return Ok(());
    }
    let mut query = QueryBuilder::new("SELECT 1 FROM (SELECT ");
    push_select(&mut query);
    // Not a parameter, because the keys may be as many as a statement can have.
    let name = hex(table.quoted::<DB>().as_bytes());
    query.push(format_args!(") AS r WHERE NOT row_security_active(convert_from(decode('{name}', 'hex'), 'UTF8'))"));
    let found = DB::fetch(conn, &mut query).await.map_err(|e| statement_error(table, e))?;
    if found.len() > locked { Err(row_error(table, RowError::StaleSnapshot)) } else { Ok(()) }
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
    match DB::lock_failure(&error) {
        Some(LockFailure::StaleSnapshot) => row_error(table, RowError::StaleSnapshot),
        _ => statement_error(table, error),
    }
}

/// Makes the error of a statement that locks rows of this table. Any table that is missing then is
/// one of the caller's own, unless the rows are named.
pub(super) fn statement_error(table: &Table, error: sqlx::Error) -> Error {
    match Error::from_sqlx("lock rows", error) {
        Error::NotMigrated { source } if table.name() != NAMED_ROWS => {
            Error::Database { attempted: "lock rows", source }
        }
        error => error,
    }
}

pub(super) fn row_error(table: &Table, cause: RowError) -> Error {
    Error::Row { table: table.to_string(), cause }
}
