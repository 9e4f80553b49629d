//! Statements on the caller's own tables, in the caller's own transactions.
//!
//! An error aborts a transaction here. So what may fail runs behind a savepoint, or is put so that it does not fail.

use std::time::Duration;

use sqlx::postgres::{PgRow, PgTypeInfo};
use sqlx::{AssertSqlSafe, Executor, PgConnection, Postgres, QueryBuilder, Row as _, TypeInfo as _};

use crate::backend::Job;
use crate::backend::sealed::{Catalogued, Clauses, Column, Dialect, Locking, Refusal, Unique, Wait};
use crate::backend::table::Table;

/// The statements, laid out to be read.
#[rustfmt::skip]
mod sql {
// The savepoint, and the bound on what follows, in one round trip. A bound that is lower already stays. {} is in milliseconds.
pub(super) const GUARD: &str = "
SAVEPOINT sqlock_row;
SELECT b.present,
       CASE WHEN b.present::interval BETWEEN '1 ms' AND '{} ms' THEN b.present
            ELSE set_config('statement_timeout', '{}', true) END
  FROM (SELECT current_setting('statement_timeout') AS present OFFSET 0) AS b";

// $1 name
pub(super) const MARK: &str = "UPDATE sqlock_row SET seen_at = seen_at WHERE name = $1";

// $1 table, $2 column. Not every unique index will do: a partial one leaves rows out, a deferrable constraint may be broken for
// a while. https://www.postgresql.org/docs/current/catalog-pg-index.html
pub(super) const COLUMN: &str = "
SELECT format_type(a.atttypid, a.atttypmod),
       (SELECT i.relname::text
          FROM pg_index AS x JOIN pg_class AS i ON i.oid = x.indexrelid
         WHERE x.indrelid = a.attrelid AND x.indnkeyatts = 1 AND x.indkey[0] = a.attnum
           AND x.indisunique AND x.indisvalid AND x.indimmediate AND x.indpred IS NULL
         ORDER BY x.indisprimary DESC
         LIMIT 1)
  FROM pg_attribute AS a
 WHERE a.attrelid = to_regclass($1) AND a.attname = $2 AND a.attnum > 0 AND NOT a.attisdropped";
}

/// How often what was cut short is undone before it is given up: each time may be cut short again.
const UNDONE_WITHIN: usize = 10;

impl Dialect for Postgres {
    const QUOTE: char = '"';
    const INTEGER: &'static str = "bigint";
    const PRESENT: &'static str = "";
    const BEGIN: Option<&'static str> = None;
    const ABORTS: bool = true;
    const LOCKS_ROWS: bool = true;
    const LOOKS_UP_SEVERAL: bool = true;

    fn fetch<'a>(conn: &'a mut PgConnection, query: &'a mut QueryBuilder<Self>) -> Job<'a, Vec<Self::Row>> {
        Box::pin(query.build().fetch_all(conn))
    }

    fn execute<'a>(conn: &'a mut PgConnection, query: &'a mut QueryBuilder<Self>) -> Job<'a, u64> {
        Box::pin(async move { Ok(query.build().execute(conn).await?.rows_affected()) })
    }

    /// The insert of a row that refers to this one takes FOR KEY SHARE here, which FOR UPDATE excludes: two transactions that
    /// insert such a row and then lock this one would deadlock.
    /// https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS
    fn clauses(Locking { shared, key_update, wait }: Locking) -> Clauses {
        let strength = match (shared, key_update) {
            (true, _) => "FOR SHARE",
            (false, true) => "FOR UPDATE",
            (false, false) => "FOR NO KEY UPDATE",
        };
        let wait = match wait {
            Wait::Unbounded | Wait::AtMost(_) => "",
            Wait::Refuse => " NOWAIT",
            Wait::Skip => " SKIP LOCKED",
        };
        let after = format!(" {strength}{wait}");
        Clauses { after, ..Clauses::default() }
    }

    fn greatest_integer<'a>(conn: &'a mut PgConnection, table: &'a Table, column: &'a str) -> Job<'a, Option<i64>> {
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

    fn push_named(query: &mut QueryBuilder<Self>, name: &str) {
        query.push("current_setting('transaction_isolation') FROM sqlock_row WHERE name = ").push_bind(name.to_owned());
    }

    /// Above READ COMMITTED whoever has waited goes on to read from before the wait, and is not told unless the row has changed.
    fn mark<'a>(conn: &'a mut PgConnection, locked: &'a PgRow, name: &'a str) -> Job<'a, ()> {
        Box::pin(async move {
            let isolation: String = locked.try_get(0)?;
            if !isolation.starts_with("read ") {
                sqlx::query(sql::MARK).bind(name).execute(conn).await?;
            }
            Ok(())
        })
    }

    fn refusal(error: &sqlx::Error) -> Option<Refusal> {
        match error.as_database_error()?.code().as_deref() {
            // lock_not_available: NOWAIT, or the session's own lock_timeout.
            Some("55P03") => Some(Refusal::Taken),
            // query_canceled
            Some("57014") => Some(Refusal::Cut),
            // serialization_failure: the row has changed since the snapshot of the transaction was taken.
            Some("40001") => Some(Refusal::Stale),
            _ => None,
        }
    }

    fn guard(conn: &mut PgConnection, within: Option<Duration>) -> Job<'_, String> {
        Box::pin(async move {
            let Some(within) = within else {
                conn.execute("SAVEPOINT sqlock_row").await?;
                return Ok(String::new());
            };
            // lock_timeout would begin anew for each of those who share a row. Rounded up, and up to what the setting can be.
            let milliseconds = within.as_micros().div_ceil(1000).clamp(1, i32::MAX as u128).to_string();
            let sql = sql::GUARD.replace("{}", &milliseconds);
            let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(conn).await?;
            row.try_get(0)
        })
    }

    fn unguard<'a>(conn: &'a mut PgConnection, settings: &'a str, succeeded: bool) -> Job<'a, ()> {
        Box::pin(async move {
            let Err(error) = (if succeeded { release(conn, settings).await } else { roll_back(conn).await }) else {
                return Ok(());
            };
            // These statements are bounded as well. What they did is undone, and the bound with it.
            for _ in 0..UNDONE_WITHIN {
                match roll_back(conn).await {
                    Ok(()) => break,
                    Err(sqlx::Error::Database(_)) => {}
                    Err(error) => return Err(error),
                }
            }
            if succeeded { Err(error) } else { Ok(()) }
        })
    }

    fn column<'a>(conn: &'a mut PgConnection, table: &'a Table, column: &'a str) -> Job<'a, Catalogued> {
        Box::pin(async move {
            let row = sqlx::query(sql::COLUMN).bind(table.quoted::<Self>()).bind(column).fetch_optional(conn).await?;
            let Some(row) = row else {
                return Ok(Catalogued::Unknown);
            };
            let unique: Option<String> = row.try_get(1)?;
            Ok(Catalogued::Known(Column {
                type_name: row.try_get(0)?,
                unique: unique.map(Unique::usable),
                rowless: None,
                collated: None,
            }))
        })
    }

    /// An integer column is compared with keys of any width, but read as one of its own.
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
    // As long as there is the savepoint, all can be undone.
    let sql = format!("SELECT set_config('statement_timeout', '{was}', true); RELEASE SAVEPOINT sqlock_row");
    conn.execute(AssertSqlSafe(sql)).await?;
    Ok(())
}

/// This restores the settings, too.
async fn roll_back(conn: &mut PgConnection) -> Result<(), sqlx::Error> {
    conn.execute("ROLLBACK TO SAVEPOINT sqlock_row").await?;
    conn.execute("RELEASE SAVEPOINT sqlock_row").await?;
    Ok(())
}
