//! Statements on the caller's own tables, in the caller's own transactions.
//!
//! An error aborts a transaction here. So what may fail runs behind a savepoint, or is put so that it does not fail.

use std::time::Duration;

use sqlx::postgres::PgTypeInfo;
use sqlx::{AssertSqlSafe, Executor, PgConnection, Postgres, QueryBuilder, Row as _, TypeInfo as _};

use crate::backend::Job;
use crate::backend::sealed::{Catalogued, Clauses, Column, Dialect, Locking, Refusal, Wait};
use crate::table::Table;

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

impl Dialect for Postgres {
    const QUOTE: char = '"';
    const INTEGER: &'static str = "bigint";
    const PRESENT: &'static str = "";
    const BEGIN: Option<&'static str> = None;
    const ABORTS: bool = true;
    const LOCKS_ROWS: bool = true;

    fn fetch<'a>(conn: &'a mut PgConnection, query: &'a mut QueryBuilder<Self>) -> Job<'a, Vec<Self::Row>> {
        Box::pin(query.build().fetch_all(conn))
    }

    fn execute<'a>(conn: &'a mut PgConnection, query: &'a mut QueryBuilder<Self>) -> Job<'a, u64> {
        Box::pin(async move { Ok(query.build().execute(conn).await?.rows_affected()) })
    }

    fn clauses(Locking { shared, wait }: Locking) -> Clauses {
        let after = match (shared, wait) {
            (false, Wait::Unbounded | Wait::AtMost(_)) => " FOR UPDATE",
            (false, Wait::Refuse) => " FOR UPDATE NOWAIT",
            (false, Wait::Skip) => " FOR UPDATE SKIP LOCKED",
            (true, Wait::Unbounded | Wait::AtMost(_)) => " FOR SHARE",
            (true, Wait::Refuse) => " FOR SHARE NOWAIT",
            (true, Wait::Skip) => " FOR SHARE SKIP LOCKED",
        };
        Clauses { after, ..Clauses::default() }
    }

    fn push_name(query: &mut QueryBuilder<Self>, name: &str) {
        query.push_bind(name.to_owned());
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
            let sql = match (succeeded, settings) {
                // This restores the settings, too.
                (false, _) => "ROLLBACK TO SAVEPOINT sqlock_row; RELEASE SAVEPOINT sqlock_row".into(),
                (true, "") => "RELEASE SAVEPOINT sqlock_row".into(),
                (true, was) => {
                    let was = was.replace('\'', "''");
                    format!("RELEASE SAVEPOINT sqlock_row; SELECT set_config('statement_timeout', '{was}', true)")
                }
            };
            conn.execute(AssertSqlSafe(sql)).await?;
            Ok(())
        })
    }

    fn column<'a>(conn: &'a mut PgConnection, table: &'a Table, column: &'a str) -> Job<'a, Catalogued> {
        Box::pin(async move {
            let row = sqlx::query(sql::COLUMN).bind(table.quoted::<Self>()).bind(column).fetch_optional(conn).await?;
            let Some(row) = row else {
                return Ok(Catalogued::Unknown);
            };
            Ok(Catalogued::Known(Column { type_name: row.try_get(0)?, unique: row.try_get(1)?, rowless: None }))
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
