//! Statements on the caller's own tables, in the caller's own transactions.
//!
//! SQLite locks no rows: a transaction with the write lock has locked them all until it ends.

use sqlx::{AssertSqlSafe, QueryBuilder, Row as _, Sqlite, SqliteConnection};

use crate::backend::StoreFuture;
use crate::backend::dialect::{Clauses, Column, ColumnLookup, Dialect, LockFailure, Locking, Unique};
use crate::backend::table::Table;

/// The statements.
#[rustfmt::skip]
mod sql {
// An alias of the rowid is unique without an index. The list of columns has generated columns, and
// leaves out the hidden ones (1) of virtual tables. Bind order: table, schema, column, it and the
// others of its key as JSON.
pub(super) const COLUMN: &str = r#"
SELECT c.type,
       CASE WHEN json_array_length(?4) = 1 AND c.pk = 1 AND upper(c.type) = 'INTEGER'
                 AND (SELECT count(*) FROM pragma_table_info(?1, ?2) AS p WHERE p.pk > 0) = 1 THEN 'rowid'
            ELSE (SELECT x.name
                    FROM pragma_index_list(?1, ?2) AS x
                   WHERE x."unique" = 1 AND x.partial = 0
                     AND (SELECT count(*) FROM pragma_index_info(x.name, ?2)) = json_array_length(?4)
                     AND (SELECT count(*) FROM pragma_index_info(x.name, ?2) AS i
                           WHERE i.name IN (SELECT k.value FROM json_each(?4) AS k)) = json_array_length(?4)
                   LIMIT 1) END
  FROM pragma_table_xinfo(?1, ?2) AS c
 WHERE c.name = ?3 AND c.hidden <> 1"#;
}

impl Dialect for Sqlite {
    const QUOTE: char = '"';
    const INTEGER: &'static str = "INTEGER";
    const CURRENT_READ: &'static str = "";
    const BEGIN: Option<&'static str> = Some("BEGIN IMMEDIATE");
    const ERRORS_ABORT: bool = false;
    const LOCKS_ROWS: bool = false;
    const LOCKS_LISTED_KEYS_ONLY: bool = true;

    fn fetch<'a>(conn: &'a mut SqliteConnection, query: &'a mut QueryBuilder<Self>) -> StoreFuture<'a, Vec<Self::Row>> {
        Box::pin(query.build().fetch_all(conn))
    }

    /// sqlx reads the rows by the columns that the table had when the statement was prepared. At
    /// another column its worker panics, which ends the rows without an error. So the statement is
    /// not cached, and prepared after the connection has read a schema that another one has changed.
    fn fetch_all_columns<'a>(
        conn: &'a mut SqliteConnection,
        query: &'a mut QueryBuilder<Self>,
    ) -> StoreFuture<'a, Vec<Self::Row>> {
        Box::pin(async move {
            sqlx::raw_sql("SELECT 1 FROM sqlite_master LIMIT 0").execute(&mut *conn).await?;
            let rows = query.build().persistent(false).fetch_all(&mut *conn).await?;
            if rows.is_empty() {
                // Fails if the worker has panicked.
                sqlx::raw_sql("SELECT 1").execute(conn).await?;
            }
            Ok(rows)
        })
    }

    fn reset(conn: &mut SqliteConnection) -> StoreFuture<'_, bool> {
        Box::pin(async move {
            super::reset(conn).await?;
            Ok(true)
        })
    }

    fn execute<'a>(conn: &'a mut SqliteConnection, query: &'a mut QueryBuilder<Self>) -> StoreFuture<'a, u64> {
        Box::pin(async move { Ok(query.build().execute(conn).await?.rows_affected()) })
    }

    fn clauses(_: Locking) -> Clauses {
        Clauses::default()
    }

    fn push_named_row(_: &mut QueryBuilder<Self>, _: &str) {}

    fn lock_failure(error: &sqlx::Error) -> Option<LockFailure> {
        let code: u32 = error.as_database_error()?.code()?.parse().ok()?;
        // BUSY and LOCKED with all their kinds. A transaction with the write lock never gets them.
        matches!(code & 0xff, 5 | 6).then_some(LockFailure::Deferred)
    }

    fn lock_database<'a>(conn: &'a mut SqliteConnection, table: &'a str) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            // The statement writes nothing but takes the write lock. (An UPDATE would be ten times
            // as slow.)
            let sql = format!("DELETE FROM {table} WHERE 0");
            sqlx::query(AssertSqlSafe(sql)).execute(conn).await?;
            Ok(())
        })
    }

    fn column<'a>(
        conn: &'a mut SqliteConnection,
        table: &'a Table,
        columns: &'a [String],
    ) -> StoreFuture<'a, ColumnLookup> {
        Box::pin(async move {
            let schema = table.schema().map_or_else(|| "main".to_owned(), str::to_owned);
            let all = serde_json::json!(columns).to_string();
            let query = sqlx::query(sql::COLUMN).bind(table.name()).bind(schema).bind(columns.first()).bind(all);
            let row = query.fetch_optional(conn).await?;
            let Some(row) = row else {
                return Ok(ColumnLookup::NotFound);
            };
            let unique: Option<String> = row.try_get(1)?;
            Ok(ColumnLookup::Found(Column {
                type_name: row.try_get(0)?,
                unique: unique.map(Unique::usable),
                engine_without_row_locks: None,
                collated: None,
            }))
        })
    }

    fn integer(row: &Self::Row, column: usize) -> Result<i64, sqlx::Error> {
        row.try_get(column)
    }

    fn push_integer(query: &mut QueryBuilder<Self>, value: i64) {
        query.push_bind(value);
    }
}
