//! The table and column whose rows are locked, with their catalogue entry.

use sqlx::Transaction;
use sqlx_core::transaction::TransactionManager as _;

use super::select::{row_error, statement_error};
use crate::backend::Database;
use crate::backend::dialect::{Column, ColumnLookup, LockFailure};
use crate::backend::table::{Identifier, Table};
use crate::client::Client;
use crate::error::{Error, Result, RowError};
use crate::operation::LookUpColumn;

/// The table and column whose rows are locked.
pub(super) struct Target {
    pub(super) table: Table,
    pub(super) column: Identifier,
}

impl Target {
    /// Checks the transaction, and reads the catalogue entry of the column.
    pub(super) async fn find<DB: Database>(
        client: &Client,
        tx: &mut Transaction<'_, DB>,
        table: &str,
        column: &str,
    ) -> Result<(Self, Column)> {
        let (table, name) = (Table::new(table)?, Identifier::new(column)?);
        check_transaction(client, tx, &table)?;
        let column_info = read_column(client, tx, &table, &[column.to_owned()]).await?;
        Ok((Self { table, column: name }, column_info))
    }
}

/// Takes the write lock of a database without row locks, by a statement on `table`.
pub(super) async fn take_write_lock<DB: Database>(
    tx: &mut Transaction<'_, DB>,
    shared: bool,
    table: &Table,
    meant: &Table,
) -> Result<()> {
    if DB::LOCKS_ROWS {
        return Ok(());
    }
    if shared {
        return Err(Error::Unsupported {
            what: "a shared row lock",
            reason: "SQLite has one write lock and no row locks; take a shared lease, or an exclusive row lock",
        });
    }
    match DB::lock_database(tx, &table.quoted::<DB>()).await {
        Err(error) if DB::lock_failure(&error) == Some(LockFailure::Deferred) => {
            Err(row_error(meant, RowError::Deferred))
        }
        done => done.map_err(|error| statement_error(meant, error)),
    }
}

/// Returns the catalogue entry of the first of these columns, with a unique index on all of them
/// and no others, of a table whose rows can be locked.
pub(super) async fn read_column<DB: Database>(
    client: &Client,
    tx: &mut Transaction<'_, DB>,
    table: &Table,
    columns: &[String],
) -> Result<Column> {
    let key = (table.to_string(), columns.to_vec());
    if let Some(column) = client.row_cache.column(&key) {
        return Ok(column);
    }
    // The lookup runs in the caller's transaction, which resolves names by its own search path and
    // sees tables that it has just created.
    let found = DB::column(tx, table, columns).await.map_err(|e| Error::from_sqlx("look a table up", e))?;
    let found = match found {
        ColumnLookup::Found(column) => Some(column),
        ColumnLookup::NotFound => None,
        ColumnLookup::ElsewhereInSchema(schema) => {
            let of = (schema, table.name().to_owned(), columns.to_vec());
            client.run(LookUpColumn(of)).await?
        }
    };
    let Some(found) = found else {
        let column = columns.first().cloned().unwrap_or_default();
        return Err(row_error(table, RowError::NoSuchColumn { column }));
    };
    if let Some(engine) = found.engine_without_row_locks {
        return Err(row_error(table, RowError::NoRowLocks { engine }));
    }
    client.row_cache.set_column(key, found.clone());
    Ok(found)
}

/// Returns an error if no rows can be locked in the transaction.
pub(crate) fn check_transaction<DB: Database>(client: &Client, tx: &Transaction<'_, DB>, table: &Table) -> Result<()> {
    if DB::KIND != client.kind {
        return Err(row_error(table, RowError::OtherDatabase));
    }
    if DB::TransactionManager::get_transaction_depth(tx) == 0 {
        return Err(row_error(table, RowError::NoTransaction));
    }
    Ok(())
}
