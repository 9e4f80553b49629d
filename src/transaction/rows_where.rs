//! Locks on rows of the caller's own table that fulfil a condition.

use std::sync::Arc;
use std::time::Duration;

use sqlx::{Decode, QueryBuilder, Transaction, Type};

use super::select::{read_keys, select, timeout_of_table};
use super::table_rows::RowsOf;
use super::target::{Target, take_write_lock};
use crate::backend::Database;
use crate::client::Client;
use crate::clock::Moment;
use crate::error::Result;

/// Locks rows of the caller's own table that fulfil a condition: a queue of jobs. Made with
/// [`Locks::rows_where`](crate::Locks::rows_where).
///
/// ```
/// # async fn example(pool: sqlx::SqlitePool, locks: sqlock::Locks) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;      // on SQLite; elsewhere pool.begin()
/// let ready = locks.rows_where("job", "id").skip_locked().limit(10);
/// let jobs: Vec<i64> = ready
///     .lock(&mut tx, |sql| {
///         sql.push("state = 'ready' AND tenant = ").push_bind(7).push(" ORDER BY priority");
///     })
///     .await?;
/// // … run them in this transaction: without a commit, another worker finds them again …
/// # Ok(())
/// # }
/// ```
///
/// The database locks the rows that it examines: create an index for the condition, and use READ
/// COMMITTED on MySQL and MariaDB. At REPEATABLE READ, InnoDB also keeps the locks of rows that do
/// not fulfil the condition, and of the gaps between them.
#[derive(Clone)]
#[must_use = "rows are locked when lock is called"]
pub struct RowsWhere {
    rows: RowsOf<()>,
}

impl RowsWhere {
    pub(crate) fn new(client: Arc<Client>, table: String, column: String) -> Self {
        Self { rows: RowsOf::new(client, table, column, Vec::new()) }
    }

    /// As [`RowLock::shared`](crate::row::RowLock::shared).
    pub fn shared(mut self) -> Self {
        self.rows = self.rows.shared();
        self
    }

    /// As [`RowOf::key_update`](crate::row::RowOf::key_update).
    pub fn key_update(mut self) -> Self {
        self.rows = self.rows.key_update();
        self
    }

    /// As [`RowsOf::wait`].
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.rows = self.rows.wait(at_most);
        self
    }

    /// As [`RowsOf::nowait`].
    pub fn nowait(mut self) -> Self {
        self.rows = self.rows.nowait();
        self
    }

    /// As [`RowsOf::skip_locked`].
    pub fn skip_locked(mut self) -> Self {
        self.rows = self.rows.skip_locked();
        self
    }

    /// Limits the number of rows, in the order at the end of the condition.
    pub fn limit(mut self, rows: u32) -> Self {
        self.rows = self.rows.limit(rows);
        self
    }

    /// Locks the rows in this transaction, and returns the value of the column in each locked row.
    ///
    /// The closure writes the text between `WHERE` and `LIMIT`: the condition and, where needed,
    /// the order. It may be called more than once.
    ///
    /// # Errors
    ///
    /// As [`RowsOf::lock`]; no unique index is required.
    ///
    /// # Cancel safety
    ///
    /// As [`RowLock::lock`](crate::row::RowLock::lock).
    pub async fn lock<DB, K>(
        &self,
        tx: &mut Transaction<'_, DB>,
        condition: impl Fn(&mut QueryBuilder<DB>) + Sync,
    ) -> Result<Vec<K>>
    where
        DB: Database,
        K: for<'r> Decode<'r, DB> + Type<DB>,
        usize: sqlx::ColumnIndex<DB::Row>,
    {
        let start = Moment::now();
        let rows = &self.rows;
        let (target, _) = Target::find(&rows.client, tx, &rows.table, &rows.column).await?;
        take_write_lock(tx, rows.shared, &target.table, &target.table).await?;
        let Target { table, column } = &target;
        let push_by_condition = |query: &mut QueryBuilder<DB>| {
            query.push(column.quoted::<DB>()).push(" FROM ").push(table.quoted::<DB>()).push(" WHERE ");
            condition(query);
            // The condition may end in a comment.
            query.push("\n");
            if let Some(limit) = rows.limit {
                query.push(" LIMIT ").push(limit);
            }
        };
        match select(tx, table, rows.locking(rows.wait), push_by_condition).await? {
            Some(found) => read_keys(&found),
            None => Err(timeout_of_table(table, start)),
        }
    }
}
