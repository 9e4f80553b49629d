//! The statements on a table whose rows have versions.

use sqlx::query_builder::Separated;
use sqlx::{Encode, QueryBuilder, Type};

use crate::backend::table::{Identifier, Table, push_key};
use crate::backend::{Database, Kind};
use crate::error::{Error, Result};

/// The quoted names of a table, its key column and its version column.
pub(super) struct QuotedNames {
    table: String,
    key: String,
    version: String,
}

impl QuotedNames {
    pub(super) fn new<DB: Database>(table: &str, key: &str, version: &str) -> Result<Self> {
        Ok(Self {
            table: Table::new(table)?.quoted::<DB>(),
            key: Identifier::new(key)?.quoted::<DB>(),
            version: Identifier::new(version)?.quoted::<DB>(),
        })
    }

    /// Selects all columns of a row, with its version last.
    pub(super) fn select_row<'q, DB, K>(&self, key: K) -> QueryBuilder<DB>
    where
        DB: Database,
        K: Encode<'q, DB> + Type<DB>,
    {
        let Self { table, key: column, version } = self;
        let mut query = QueryBuilder::new(format!(
            "SELECT t.*, CAST(t.{version} AS {}) AS sqlock_version FROM {table} AS t WHERE t.{column} = ",
            DB::INTEGER,
        ));
        push_key(&mut query, key);
        query
    }

    /// Selects the current version of a row, not that of the transaction's snapshot.
    pub(super) fn select_version<'q, DB, K>(&self, key: K) -> QueryBuilder<DB>
    where
        DB: Database,
        K: Encode<'q, DB> + Type<DB>,
    {
        let Self { table, key: column, version } = self;
        let sql = format!("SELECT CAST(t.{version} AS {}) FROM {table} AS t WHERE t.{column} = ", DB::INTEGER);
        let mut query = QueryBuilder::new(sql);
        push_key(&mut query, key);
        query.push(DB::CURRENT_READ);
        query
    }

    /// Updates a row with the expected version: `set` adds the columns, and the version rises.
    pub(super) fn update<'q, DB, K>(
        &self,
        key: &K,
        expected: i64,
        set: impl FnOnce(&mut QueryBuilder<DB>),
    ) -> QueryBuilder<DB>
    where
        DB: Database,
        K: Encode<'q, DB> + Type<DB>,
    {
        let Self { table, key: column, version } = self;
        let mut query = QueryBuilder::new(format!("UPDATE {table} SET "));
        let empty = query.sql().as_str().len();
        set(&mut query);
        // On a new line, because the caller's text may end in a comment. After it, because MySQL
        // assigns from left to right, and the caller may use the old version.
        let comma = if query.sql().as_str().len() > empty { "\n, " } else { "" };
        // Names with the table, because SQLite takes an unknown name in quotes for a text.
        push_key(query.push(format_args!("{comma}{version} = {version} + 1 WHERE {table}.{column} = ")), key);
        DB::push_integer(query.push(format_args!(" AND {table}.{version} = ")), expected);
        query
    }

    /// Deletes a row with the expected version.
    pub(super) fn delete<'q, DB, K>(&self, key: &K, expected: i64) -> QueryBuilder<DB>
    where
        DB: Database,
        K: Encode<'q, DB> + Type<DB>,
    {
        let Self { table, key: column, version } = self;
        let mut query = QueryBuilder::new(format!("DELETE FROM {table} WHERE {table}.{column} = "));
        push_key(&mut query, key);
        DB::push_integer(query.push(format_args!(" AND {table}.{version} = ")), expected);
        query
    }

    /// Inserts a row with version 1. A duplicate of the key is ignored if the database can do so.
    pub(super) fn insert<'q, DB, K>(
        &self,
        key: &K,
        columns: &[&str],
        values: impl FnOnce(&mut Separated<'_, DB, &'static str>),
    ) -> Result<QueryBuilder<DB>>
    where
        DB: Database,
        K: Encode<'q, DB> + Type<DB>,
    {
        let Self { table, key: column, version } = self;
        let mut query = QueryBuilder::new(format!("INSERT INTO {table} ({column}, {version}"));
        for column in columns {
            query.push(format_args!(", {}", Identifier::new(column)?.quoted::<DB>()));
        }
        push_key(query.push(") VALUES ("), key);
        query.push(", 1");
        if !columns.is_empty() {
            query.push(", ");
            values(&mut query.separated(", "));
        }
        query.push(")");
        if DB::KIND != Kind::MySql {
            // On PostgreSQL an error would abort the caller's transaction. (MySQL has INSERT
            // IGNORE, which ignores far more.)
            query.push(format_args!(" ON CONFLICT ({column}) DO NOTHING"));
        }
        Ok(query)
    }
}

/// Runs the statement of [`QuotedNames::select_version`].
pub(super) async fn read_version<DB: Database>(
    conn: &mut DB::Connection,
    mut query: QueryBuilder<DB>,
) -> Result<Option<i64>> {
    let read = DB::fetch(conn, &mut query).await;
    let version = read.and_then(|rows| rows.first().map(|row| DB::integer(row, 0)).transpose());
    version.map_err(|e| Error::from_caller("look for the version of a row", e))
}

pub(super) fn is_duplicate(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::Database(error) if error.is_unique_violation())
}
