//! Statements on the caller's own tables, in the caller's own transactions.
//!
//! An error aborts a transaction on PostgreSQL. So a statement that may fail runs after a
//! savepoint.

use std::time::Duration;

use sqlx::postgres::{PgRow, PgTypeInfo};
use sqlx::{AssertSqlSafe, Connection as _, Executor, PgConnection, Postgres, QueryBuilder, Row as _, TypeInfo as _};

use crate::backend::StoreFuture;
use crate::backend::dialect::{Clauses, Column, ColumnLookup, Dialect, LockFailure, Locking, Unique, Wait};
use crate::backend::table::Table;

/// The statements.
#[rustfmt::skip]
mod sql {
// Sets the savepoint and the time limit in one round trip. A lower limit stays. {} is in
// milliseconds.
pub(super) const SET_SAVEPOINT: &str = "
SAVEPOINT sqlock_row;
SELECT b.present,
       CASE WHEN b.present::interval BETWEEN '1 ms' AND '{} ms' THEN b.present
            ELSE set_config('statement_timeout', '{}', true) END
  FROM (SELECT current_setting('statement_timeout') AS present OFFSET 0) AS b";

// $1 name
pub(super) const TOUCH_ROW: &str = "UPDATE sqlock_row SET seen_at = seen_at WHERE name = $1";

// $1 table, $2 column, $3 it and the others of its key. Some unique indexes are not usable: a
// partial index leaves rows out, and a deferrable constraint may be violated for a while. The index
// of a table with inheriting tables does not cover their rows, although a SELECT on the table
// returns them; the index of a partitioned table covers all rows.
// https://www.postgresql.org/docs/current/catalog-pg-index.html
pub(super) const COLUMN: &str = "
SELECT format_type(a.atttypid, a.atttypmod),
       (SELECT i.relname::text
          FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid
         WHERE x.indrelid = a.attrelid AND x.indnkeyatts = cardinality($3::text[])
           AND (SELECT count(*) FROM pg_attribute AS k
                 WHERE k.attrelid = x.indrelid AND k.attnum = ANY ((x.indkey::int2[])[0:x.indnkeyatts - 1])
                   AND k.attname = ANY ($3)) = x.indnkeyatts
           AND x.indisunique AND x.indisvalid AND x.indimmediate AND x.indpred IS NULL
         ORDER BY x.indisprimary DESC
         LIMIT 1),
       EXISTS (SELECT 1 FROM pg_inherits AS h JOIN pg_class AS c ON c.oid = h.inhparent
                WHERE h.inhparent = a.attrelid AND c.relkind <> 'p')
  FROM pg_attribute AS a
 WHERE a.attrelid = to_regclass($1) AND a.attname = $2 AND a.attnum > 0 AND NOT a.attisdropped";
}

/// Why a unique index does not lead to one row.
const INHERITED: &str = "it does not cover the tables that inherit from this one";

/// How often a rollback to the savepoint is tried: the time limit may interrupt it as well.
const ROLLBACK_TRIES: usize = 10;

impl Dialect for Postgres {
    const QUOTE: char = '"';
    const INTEGER: &'static str = "bigint";
    const CURRENT_READ: &'static str = "";
    const BEGIN: Option<&'static str> = None;
    const ERRORS_ABORT: bool = true;
    const LOCKS_ROWS: bool = true;
    const LOCKS_LISTED_KEYS_ONLY: bool = true;

    fn fetch<'a>(conn: &'a mut PgConnection, query: &'a mut QueryBuilder<Self>) -> StoreFuture<'a, Vec<Self::Row>> {
        Box::pin(query.build().fetch_all(conn))
    }

    /// PostgreSQL refuses a cached statement whose columns have changed (feature_not_supported), and
    /// sqlx does not prepare it again by itself. The next call does.
    fn fetch_all_columns<'a>(
        conn: &'a mut PgConnection,
        query: &'a mut QueryBuilder<Self>,
    ) -> StoreFuture<'a, Vec<Self::Row>> {
        Box::pin(async move {
            let rows = query.build().fetch_all(&mut *conn).await;
            if matches!(&rows, Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("0A000")) {
                conn.clear_cached_statements().await?;
            }
            rows
        })
    }

    fn execute<'a>(conn: &'a mut PgConnection, query: &'a mut QueryBuilder<Self>) -> StoreFuture<'a, u64> {
        Box::pin(async move { Ok(query.build().execute(conn).await?.rows_affected()) })
    }

    /// An insert that references this row locks it FOR KEY SHARE, which FOR UPDATE excludes: two
    /// transactions that insert a reference and then lock the row would deadlock.
    /// https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS
    fn clauses(Locking { shared, key_update, wait }: Locking) -> Clauses {
        let strength = match (shared, key_update) {
            (true, _) => "FOR SHARE",
            (false, true) => "FOR UPDATE",
            (false, false) => "FOR NO KEY UPDATE",
        };
        let wait = match wait {
            Wait::Unbounded | Wait::AtMost(_) => "",
            Wait::Never => " NOWAIT",
            Wait::SkipLocked => " SKIP LOCKED",
        };
        let after = format!(" {strength}{wait}");
        Clauses { after, ..Clauses::default() }
    }

    fn greatest_integer<'a>(
        conn: &'a mut PgConnection,
        table: &'a Table,
        column: &'a str,
    ) -> StoreFuture<'a, Option<i64>> {
        Box::pin(async move {
            let query = sqlx::query(
                "SELECT attlen FROM pg_attribute WHERE attrelid = to_regclass($1) AND attname = $2
                                        AND atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype)",
            );
            let row = query.bind(table.quoted::<Self>()).bind(column).fetch_optional(conn).await?;
            let bytes: Option<i16> = row.map(|row| row.try_get(0)).transpose()?;
            Ok(bytes.map(|bytes| i64::MAX >> (64 - 8 * bytes)))
        })
    }

    fn push_named_row(query: &mut QueryBuilder<Self>, name: &str) {
        query.push("current_setting('transaction_isolation') FROM sqlock_row WHERE name = ").push_bind(name.to_owned());
    }

    /// Above READ COMMITTED, a transaction that has waited keeps its older snapshot, and gets an
    /// error only if the row has changed.
    fn touch_row<'a>(conn: &'a mut PgConnection, locked: &'a PgRow, name: &'a str) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let isolation: String = locked.try_get(0)?;
            if !isolation.starts_with("read ") {
                sqlx::query(sql::TOUCH_ROW).bind(name).execute(conn).await?;
            }
            Ok(())
        })
    }

    fn lock_failure(error: &sqlx::Error) -> Option<LockFailure> {
        match error.as_database_error()?.code().as_deref() {
            // lock_not_available: NOWAIT, or the session's own lock_timeout.
            Some("55P03") => Some(LockFailure::Locked),
            // query_canceled
            Some("57014") => Some(LockFailure::Timeout),
            // serialization_failure: the row has changed since the snapshot of the transaction was
            // taken.
            Some("40001") => Some(LockFailure::StaleSnapshot),
            _ => None,
        }
    }

    fn set_savepoint(conn: &mut PgConnection, within: Option<Duration>) -> StoreFuture<'_, String> {
        Box::pin(async move {
            let Some(within) = within else {
                conn.execute("SAVEPOINT sqlock_row").await?;
                return Ok(String::new());
            };
            // lock_timeout would start again for each transaction that shares a row. The value is
            // rounded up and limited to the range of the setting.
            let milliseconds = within.as_micros().div_ceil(1000).clamp(1, i32::MAX as u128).to_string();
            let sql = sql::SET_SAVEPOINT.replace("{}", &milliseconds);
            let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(conn).await?;
            row.try_get(0)
        })
    }

    fn end_savepoint<'a>(conn: &'a mut PgConnection, settings: &'a str, succeeded: bool) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let Err(error) = (if succeeded { release(conn, settings).await } else { roll_back(conn).await }) else {
                return Ok(());
            };
            // The time limit covers these statements as well. The rollback reverts them and the
            // limit.
            for _ in 0..ROLLBACK_TRIES {
                match roll_back(conn).await {
                    Ok(()) => break,
                    Err(sqlx::Error::Database(_)) => {}
                    Err(error) => return Err(error),
                }
            }
            if succeeded { Err(error) } else { Ok(()) }
        })
    }

    fn column<'a>(
        conn: &'a mut PgConnection,
        table: &'a Table,
        columns: &'a [String],
    ) -> StoreFuture<'a, ColumnLookup> {
        Box::pin(async move {
            let query = sqlx::query(sql::COLUMN).bind(table.quoted::<Self>()).bind(columns.first()).bind(columns);
            let row = query.fetch_optional(conn).await?;
            let Some(row) = row else {
                return Ok(ColumnLookup::NotFound);
            };
            let index: Option<String> = row.try_get(1)?;
            let is_inherited: bool = row.try_get(2)?;
            let obstacle = is_inherited.then(|| INHERITED.to_owned());
            Ok(ColumnLookup::Found(Column {
                type_name: row.try_get(0)?,
                unique: index.map(|name| Unique { name, obstacle }),
                engine_without_row_locks: None,
                collated: None,
            }))
        })
    }

    /// An integer column can be compared with keys of any width, but is read with its own.
    fn push_column(query: &mut QueryBuilder<Self>, column: &str, key: &PgTypeInfo) {
        query.push("CAST(").push(column).push(" AS ").push(key.name()).push(")");
    }

    fn integer(row: &Self::Row, column: usize) -> Result<i64, sqlx::Error> {
        row.try_get(column)
    }

    fn push_integer(query: &mut QueryBuilder<Self>, value: i64) {
        query.push_bind(value);
    }
}

async fn release(conn: &mut PgConnection, settings: &str) -> Result<(), sqlx::Error> {
    if settings.is_empty() {
        conn.execute("RELEASE SAVEPOINT sqlock_row").await?;
        return Ok(());
    }
    let was = settings.replace('\'', "''");
    // The savepoint is released last, so that everything before can be rolled back.
    let sql = format!("SELECT set_config('statement_timeout', '{was}', true); RELEASE SAVEPOINT sqlock_row");
    conn.execute(AssertSqlSafe(sql)).await?;
    Ok(())
}

/// Rolls back to the savepoint and releases it. This restores the settings, too.
async fn roll_back(conn: &mut PgConnection) -> Result<(), sqlx::Error> {
    conn.execute("ROLLBACK TO SAVEPOINT sqlock_row").await?;
    conn.execute("RELEASE SAVEPOINT sqlock_row").await?;
    Ok(())
}
