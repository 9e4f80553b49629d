//! A row lock by name: a row that is there for this and nothing else.

use std::sync::Arc;
use std::time::Duration;

use sqlx::{QueryBuilder, Transaction};

use super::select::{lock_error, no_wait, row_error, row_exists, select, timeout_of_name, wait_mode};
use super::target::{Target, check_transaction};
use crate::backend::Database;
use crate::backend::sealed::{Locking, Wait};
use crate::backend::table::{Identifier, Table};
use crate::client::Client;
use crate::clock::Moment;
use crate::error::{Result, RowError};
use crate::name::LockName;
use crate::operation::Ensure;

/// The table of the rows that stand for names.
const NAMED_ROWS: &str = "sqlock_row";

/// A row lock by name: `SELECT … FOR UPDATE` (on PostgreSQL `FOR NO KEY UPDATE`) on a row that is there for this and nothing else,
/// created when it is missing. Made with [`Locks::row`](crate::Locks::row).
///
/// It is held until the transaction ends, by commit or rollback, and by nothing else: it needs no TTL and no renewal, and the
/// database ends it when it loses the connection. (What is locked inside a savepoint is given back, on PostgreSQL, when that is
/// rolled back.) The same transaction may lock a name again. Rows are given in the order that the database has for those who
/// wait; nothing is promised about it.
///
/// ```
/// # async fn example(pool: sqlx::SqlitePool, locks: sqlock::Locks) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;      // on SQLite; elsewhere pool.begin()
/// locks.row("stock/shirts").lock(&mut tx).await?;
/// // … whoever else locks "stock/shirts" waits …
/// tx.commit().await?;
/// # Ok(())
/// # }
/// ```
///
/// It costs one statement in the transaction, and about once a minute one of the client's own that makes sure of the row. Two
/// transactions that lock two names in opposite order deadlock, as with any rows: the database ends one of them with an error
/// for which [`is_conflict`](crate::Error::is_conflict) holds. Lock in one order, or [run it again](crate::retry::Retry).
///
/// **At isolation levels above READ COMMITTED** a transaction goes on to read as of its first statement. PostgreSQL takes the lock for
/// that statement: whoever has waited for another such transaction is refused with [`RowError::StaleSnapshot`] and is to be run
/// again (the lock writes its row there, which costs one more statement). InnoDB counts from the first plain SELECT, so lock before
/// you read. Use one level for all who lock a name.
///
/// **On SQLite the write lock is the row lock**, and there is one of it: the transaction must have been begun with
/// `BEGIN IMMEDIATE`, which is where it waits. One that was begun otherwise is refused with [`RowError::Deferred`] when it
/// cannot have the write lock, or has read what is not true any more. **On a Galera cluster** a row that is only read is not
/// locked on the other nodes: the loser's commit fails there if both write.
#[derive(Clone)]
#[must_use = "a row is locked when lock or try_lock is called"]
pub struct RowLock {
    client: Arc<Client>,
    name: String,
    shared: bool,
    wait: Option<Duration>,
}

impl RowLock {
    pub(crate) fn new(client: Arc<Client>, name: String) -> Self {
        Self { client, name, shared: false, wait: None }
    }

    /// Together with others who lock it like this: `SELECT … FOR SHARE`. SQLite has nothing of the kind. (On PostgreSQL those
    /// who want it alone may wait for ever while others take turns in sharing it.)
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Wait that long at most. By default [`lock`](Self::lock) waits for as long as the session's own settings allow
    /// (`lock_timeout`, 0 unless set; `innodb_lock_wait_timeout`, 50 s unless set). Those are not touched, or are afterwards
    /// as they were.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = Some(at_most);
        self
    }

    /// Locks the row in this transaction, when it is our turn.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`](crate::Error::Timeout) when the wait ran out: the transaction is as good as before, unless it was a limit of the session's own
    /// on PostgreSQL, which aborts it. [`Error::InvalidName`](crate::Error::InvalidName), [`Error::Unsupported`](crate::Error::Unsupported), and [`Error::Row`](crate::Error::Row) when this transaction
    /// cannot lock anything or, at isolation levels from REPEATABLE READ upwards, began to read before the row was created.
    /// [`Error::Database`](crate::Error::Database) when the database ended the transaction, or cut the statement short for a limit of the session's own on
    /// any statement; [`Error::Unavailable`](crate::Error::Unavailable), [`Error::NotMigrated`](crate::Error::NotMigrated). After any other error than a timeout, roll back.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the transaction as undecided as dropping any of its statements: roll back. The database goes on
    /// waiting for the row, and the connection for its answer, until it has it. So bound a wait with [`wait`](Self::wait), not by
    /// dropping it.
    pub async fn lock<DB: Database>(&self, tx: &mut Transaction<'_, DB>) -> Result<()> {
        let name = LockName::new(&*self.name)?;
        let start = Moment::now();
        if self.lock_row(tx, &name, wait_mode(self.wait)).await? { Ok(()) } else { Err(timeout_of_name(name, start)) }
    }

    /// Locks the row if nobody else has it: `false` when somebody has, and then the transaction is as good as before.
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock), without the timeout.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock<DB: Database>(&self, tx: &mut Transaction<'_, DB>) -> Result<bool> {
        self.lock_row(tx, &LockName::new(&*self.name)?, no_wait::<DB>()).await
    }

    async fn lock_row<DB: Database>(&self, tx: &mut Transaction<'_, DB>, name: &LockName, wait: Wait) -> Result<bool> {
        let table = Table::new(NAMED_ROWS)?;
        check_transaction(&self.client, tx, &table)?;
        if !DB::LOCKS_ROWS {
            // There is no row to look for. Any table will do to take the write lock.
            let any_table = Target { table: Table::new("sqlock_lease")?, column: Identifier::new("name")? };
            any_table.take_write_lock(tx, self.shared, &table).await?;
            return Ok(true);
        }
        // On a connection of ours and before the transaction looks for it: its snapshot may be taken by that look.
        ensure_row(&self.client, name).await?;
        let push_by_name = |query: &mut QueryBuilder<DB>| DB::push_named(query, name.as_str());
        let locking = Locking { shared: self.shared, key_update: false, wait };
        let Some(found) = select(tx, &table, locking, push_by_name).await? else {
            return Ok(false);
        };
        if let Some(locked) = found.first() {
            if !self.shared {
                DB::mark(tx, locked, name.as_str()).await.map_err(|error| lock_error::<DB>(&table, error))?;
            }
            return Ok(true);
        }
        if wait == Wait::Skip && row_exists(tx, push_by_name).await? {
            return Ok(false);
        }
        // It was created, or purged, in between.
        self.client.row_cache.forget(name);
        Err(row_error(&table, RowError::StaleSnapshot))
    }
}

/// Makes sure that the row of a name is there.
async fn ensure_row(client: &Client, name: &LockName) -> Result<()> {
    if client.row_cache.is_ensured(name) {
        return Ok(());
    }
    let answer = client.ask(Ensure(name.clone())).await;
    answer.result?;
    client.row_cache.set_ensured(name, answer.sent_at);
    Ok(())
}
