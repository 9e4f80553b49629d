//! A row lock by name, on a row of a table of this crate.

use std::sync::Arc;
use std::time::Duration;

use sqlx::{QueryBuilder, Transaction};

use super::select::{NAMED_ROWS, lock_error, no_wait, row_error, row_exists, select, timeout_of_name, wait_mode};
use super::target::{check_transaction, take_write_lock};
use crate::backend::Database;
use crate::backend::dialect::{Locking, Wait};
use crate::backend::table::Table;
use crate::client::Client;
use crate::clock::Moment;
use crate::error::{Result, RowError};
use crate::name::LockName;
use crate::operation::Ensure;

/// Locks a name with `SELECT … FOR UPDATE` (on PostgreSQL `FOR NO KEY UPDATE`) on a row of its own,
/// which is created when it is missing. Made with [`Locks::row`](crate::Locks::row).
///
/// The lock is held until the transaction commits or rolls back. It needs no TTL and no renewal,
/// and the database ends it when the connection is lost. (On PostgreSQL, rolling back to a
/// savepoint releases a lock taken inside it.) The same transaction may lock a name again. The
/// database decides the order of waiters.
///
/// ```
/// # async fn example(pool: sqlx::SqlitePool, locks: sqlock::Locks) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;      // on SQLite; elsewhere pool.begin()
/// locks.row("stock/shirts").lock(&mut tx).await?;
/// // … other transactions that lock "stock/shirts" wait …
/// tx.commit().await?;
/// # Ok(())
/// # }
/// ```
///
/// A lock costs one statement in the transaction, and about once a minute a statement of the client
/// that ensures the row. Two transactions that lock two names in opposite order deadlock, as with
/// any rows: the database aborts one of them with an error for which
/// [`is_conflict`](crate::Error::is_conflict) holds. Lock in one order, or [run it
/// again](crate::retry::Retry).
///
/// **At isolation levels above READ COMMITTED** a transaction reads as of its first statement. On
/// PostgreSQL the lock counts as the first statement: a transaction that waited for another one is
/// refused with [`RowError::StaleSnapshot`] and must be run again (the lock writes its row there,
/// which costs one more statement). On InnoDB only the first plain SELECT counts, so lock before
/// reading. Use the same level in all transactions that lock a name.
///
/// **On SQLite the write lock of the database is the row lock**: begin the transaction with `BEGIN
/// IMMEDIATE`, which waits for it. Another transaction is refused with [`RowError::Deferred`] when
/// the write lock is taken, or when it has read an outdated snapshot. **On a Galera cluster** a row
/// that is only read is not locked on the other nodes: if both transactions write, one fails to
/// commit.
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

    /// Shares the lock with other shared locks: `SELECT … FOR SHARE`. SQLite has no shared row
    /// locks. (On PostgreSQL overlapping shared locks can make an exclusive one wait for ever.)
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Limits the wait. By default [`lock`](Self::lock) waits for as long as the session's own
    /// settings allow (`lock_timeout`, 0 unless set; `innodb_lock_wait_timeout`, 50 s unless set).
    /// Those settings are unchanged afterwards.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = Some(at_most);
        self
    }

    /// Locks the row in this transaction, and waits for it if necessary.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`](crate::Error::Timeout) at the limit of the wait: the transaction stays
    /// usable, unless the limit was the session's own on PostgreSQL, which aborts it.
    /// [`Error::InvalidName`](crate::Error::InvalidName),
    /// [`Error::Unsupported`](crate::Error::Unsupported), and [`Error::Row`](crate::Error::Row)
    /// when this transaction cannot lock rows or, at isolation levels from REPEATABLE READ upwards,
    /// began to read before the row was created. [`Error::Database`](crate::Error::Database) when
    /// the database aborted the transaction, or the session's own statement timeout ended the
    /// statement; [`Error::Unavailable`](crate::Error::Unavailable),
    /// [`Error::NotMigrated`](crate::Error::NotMigrated). After any error other than a timeout,
    /// roll back.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the transaction in an unknown state, as with any of its
    /// statements: roll back. The database still waits for the row, and the connection for the
    /// answer. So limit a wait with [`wait`](Self::wait), not by dropping the future.
    pub async fn lock<DB: Database>(&self, tx: &mut Transaction<'_, DB>) -> Result<()> {
        let name = LockName::new(&*self.name)?;
        let start = Moment::now();
        if self.lock_row(tx, &name, wait_mode(self.wait)).await? { Ok(()) } else { Err(timeout_of_name(name, start)) }
    }

    /// Locks the row if it is free. Returns `false`, and leaves the transaction usable, when
    /// another transaction holds it.
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
            // The database has no row locks. Its write lock can be taken on any table.
            take_write_lock(tx, self.shared, &Table::new("sqlock_lease")?, &table).await?;
            return Ok(true);
        }
        // The statement runs on a connection of the client, before the transaction's SELECT, which
        // may take its snapshot.
        ensure_row(&self.client, name).await?;
        let push_by_name = |query: &mut QueryBuilder<DB>| DB::push_named_row(query, name.as_str());
        let locking = Locking { shared: self.shared, key_update: false, wait };
        let Some(found) = select(tx, &table, locking, push_by_name).await? else {
            return Ok(false);
        };
        if let Some(locked) = found.first() {
            if !self.shared {
                DB::touch_row(tx, locked, name.as_str()).await.map_err(|error| lock_error::<DB>(&table, error))?;
            }
            return Ok(true);
        }
        if wait == Wait::SkipLocked && row_exists(tx, &table, push_by_name).await? {
            return Ok(false);
        }
        // The row was created, or purged, in between.
        self.client.row_cache.forget(name);
        Err(row_error(&table, RowError::StaleSnapshot))
    }
}

/// Creates the row of a name if it is missing.
async fn ensure_row(client: &Client, name: &LockName) -> Result<()> {
    if client.row_cache.is_ensured(name) {
        return Ok(());
    }
    let answer = client.run_with_answer(Ensure(name.clone())).await;
    answer.result?;
    client.row_cache.set_ensured(name, answer.sent_at);
    Ok(())
}
