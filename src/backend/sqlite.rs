//! SQLite: one writer, and no row locks.

// The modules below use its macros.
#[macro_use]
#[rustfmt::skip]
mod clauses;

mod acquire;
mod admin;
mod batch;
mod change;
#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, reason = "tests")]
mod differential;
mod fence;
mod file;
mod heartbeat;
mod listener;
mod note;
mod queue;
mod records;
mod release;
mod rows;
mod session;
mod store;
mod transition;

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions, SqliteTransactionManager};
use sqlx::{ConnectOptions, Connection, Executor as _, Row as _, Sqlite, SqliteConnection, SqlitePool};
use sqlx_core::transaction::{TransactionManager as _, begin_ansi_transaction_sql};
use tokio::time::timeout;

use self::file::DatabaseFile;
use self::listener::Listener;
use super::fence::{Fence, FenceCheck, FenceOutcome};
use super::note::NoteStore;
use super::store::{AdminStore, LeaseStore, RecordStore, RowStore};
use super::stored::age_from_micros;
use super::{
    Backend, BoxFuture, ClientRange, IsWaiting, Kind, ListedHolder, ListedWaiter, Names, Note, Origin, SessionHolder,
    SessionLocks, Store, StoreFuture, SweepRange, Swept,
};
use crate::error::{Error, Result, if_exists};
use crate::name::LockName;
use crate::protocol::{Batch, Notification, Request, Response};
use crate::schema;

/// The backend on the caller's pool.
pub(crate) struct SqliteBackend {
    pool: SqlitePool,
    options: Arc<SqliteConnectOptions>,
}

impl SqliteBackend {
    pub(crate) fn new(pool: SqlitePool) -> Self {
        let options = pool.connect_options();
        Self { pool, options }
    }

    /// Opens a connection to the file, or borrows those of the pool for a database in memory.
    async fn connect_store(&self) -> Result<SqliteStore, sqlx::Error> {
        let options = (*self.options).clone().busy_timeout(BUSY_TIMEOUT).row_buffer_size(MAX_BATCH_LEN);
        let options = options.disable_statement_logging();
        let named = || DatabaseFile::named(self.options.get_filename());
        let mut before = named();
        loop {
            let mut own = options.connect().await?;
            let path = file_of(&mut own).await?;
            if path.is_empty() {
                own.close().await?;
                return Ok(SqliteStore { connection: StoreConnection::Pooled(self.pool.clone()), listener: None });
            }
            let mut file = named();
            if !file.exists() {
                // The name may be a URI, which SQLite resolves.
                file = DatabaseFile::at(path.into());
            }
            if file == before {
                return Ok(SqliteStore { connection: StoreConnection::Dedicated(own, file), listener: None });
            }
            // The file was created or replaced: which one the connection has open is unknown.
            own.close().await?;
            before = file;
        }
    }
}

/// How long a statement waits for the write lock. Shorter than the executor's limit for a
/// statement: a retry is cheaper than a new connection.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);

/// The greatest number of requests in a batch. The thread of a connection buffers as many rows, so
/// it does not wait for the reader while the transaction is open.
const MAX_BATCH_LEN: usize = 256;

impl Backend for SqliteBackend {
    fn address(&self) -> String {
        self.options.get_filename().display().to_string()
    }

    fn connect(&self) -> StoreFuture<'_, Box<dyn Store>> {
        Box::pin(async move { Ok(Box::new(self.connect_store().await?) as Box<dyn Store>) })
    }

    fn can_notify(&self) -> bool {
        true
    }

    fn connect_for_heartbeats(&self, is_waiting: IsWaiting) -> StoreFuture<'_, Box<dyn Store>> {
        Box::pin(async move {
            let mut store = self.connect_store().await?;
            if let StoreConnection::Dedicated(own, _) = &mut store.connection {
                own.execute(heartbeat::SHORT_BUSY_TIMEOUT).await?;
                store.listener = Some(Listener::new(is_waiting));
            }
            Ok(Box::new(store) as Box<dyn Store>)
        })
    }

    fn is_local(&self) -> bool {
        true
    }

    fn max_connections_used(&self) -> usize {
        1
    }

    fn max_batch_len(&self) -> usize {
        MAX_BATCH_LEN
    }

    fn migrate(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let one = schema::retry_connect(|| {
                SqlitePoolOptions::new().max_connections(1).connect_with((*self.options).clone())
            })
            .await?;
            let in_memory = match one.acquire().await {
                Ok(mut conn) => is_in_memory(&mut conn).await,
                Err(error) => Err(error),
            };
            // A migration and its record are one transaction.
            let never_interrupted = async |_: &SqlitePool| Ok(());
            let migrated = match in_memory {
                Ok(true) => schema::migrate(&self.pool, schema::SQLITE, never_interrupted).await,
                Ok(false) => schema::migrate(&one, schema::SQLITE, never_interrupted).await,
                Err(error) => Err(Error::from_sqlx("migrate", error)),
            };
            one.close().await;
            migrated
        })
    }

    fn open_session_locks(&self) -> BoxFuture<'_, Result<Box<dyn SessionLocks>>> {
        Box::pin(session::open(&self.options))
    }

    fn session_holders<'a>(&'a self, name: &'a LockName) -> BoxFuture<'a, Result<Vec<SessionHolder>>> {
        Box::pin(session::holders(&self.options, name))
    }
}

/// Returns whether the database is in memory. Such a database exists only in the caller's own
/// connections.
async fn is_in_memory(conn: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    Ok(file_of(conn).await?.is_empty())
}

/// Reads the path of the database file. Empty: there is none. The pragma as a table-valued function
/// would wait for a writer.
async fn file_of(conn: &mut SqliteConnection) -> Result<String, sqlx::Error> {
    let all = sqlx::query("PRAGMA database_list").fetch_all(conn).await?;
    let main = all.iter().find(|row| matches!(row.try_get("name"), Ok("main")));
    let file: Option<String> = main.map(|row| row.try_get("file")).transpose()?.flatten();
    Ok(file.unwrap_or_default())
}

/// Ends the transaction of a connection, even if SQLite has already ended it. SQLite ends a
/// transaction on its own when the disk is full, for example, and then refuses the ROLLBACK of
/// sqlx. sqlx counts the transaction as open until a ROLLBACK succeeds, and begins no other one on
/// the connection.
async fn reset(conn: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    // The rollback of a dropped transaction may still be queued.
    conn.ping().await?;
    let depth = SqliteTransactionManager::get_transaction_depth(conn);
    if depth == 0 {
        return Ok(());
    }
    // SQLite refuses it when no transaction is open.
    let _ = conn.execute("ROLLBACK").await;
    for depth in 0..depth {
        conn.execute(begin_ansi_transaction_sql(depth)).await?;
    }
    for _ in 0..depth {
        SqliteTransactionManager::rollback(conn).await?;
    }
    Ok(())
}

/// A connection of the executor.
struct SqliteStore {
    connection: StoreConnection,
    /// On a connection for heartbeats to a file. In a database in memory, polls find the grants of
    /// other clients.
    listener: Option<Listener>,
}

/// A connection to a file. For a database in memory, the caller's pool, which lends a connection
/// for each operation.
enum StoreConnection {
    Dedicated(SqliteConnection, DatabaseFile),
    Pooled(SqlitePool),
}

/// The connection on which a statement is sent.
enum BorrowedConnection<'s> {
    Dedicated(&'s mut SqliteConnection),
    Pooled(PoolConnection<Sqlite>),
}

impl Deref for BorrowedConnection<'_> {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        match self {
            Self::Dedicated(conn) => conn,
            Self::Pooled(conn) => conn,
        }
    }
}

impl DerefMut for BorrowedConnection<'_> {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        match self {
            Self::Dedicated(conn) => conn,
            Self::Pooled(conn) => conn,
        }
    }
}

impl SqliteStore {
    /// Returns the connection without an open transaction, unless another file has replaced the one
    /// that it has open. A pool must lend a connection within [`ACQUIRE_TIMEOUT`].
    async fn conn(&mut self) -> Result<BorrowedConnection<'_>, sqlx::Error> {
        let mut conn = match &mut self.connection {
            StoreConnection::Dedicated(conn, file) => {
                file.check()?;
                BorrowedConnection::Dedicated(conn)
            }
            StoreConnection::Pooled(pool) => BorrowedConnection::Pooled(acquire_from(pool).await?),
        };
        if SqliteTransactionManager::get_transaction_depth(&conn) > 0 {
            reset(&mut conn).await?;
        }
        Ok(conn)
    }
}

// The record has whole seconds, rounded down.
const AGE: &str = "
SELECT (CAST(strftime('%s', 'now') AS INTEGER) - CAST(strftime('%s', min(installed_on)) AS INTEGER) - 1) * 1000000
  FROM _sqlock_migrations";

impl LeaseStore for SqliteStore {
    fn execute<'a>(&'a mut self, request: &'a Request) -> StoreFuture<'a, Response> {
        Box::pin(async move { store::execute(&mut *self.conn().await?, request).await })
    }

    fn execute_batch<'a>(&'a mut self, batch: &'a Batch) -> StoreFuture<'a, Vec<Option<Response>>> {
        Box::pin(async move { batch::execute(&mut *self.conn().await?, batch).await })
    }

    fn notified(&mut self) -> StoreFuture<'_, Notification> {
        Box::pin(async move {
            match (&mut self.connection, &mut self.listener) {
                (StoreConnection::Dedicated(conn, _), Some(listener)) => {
                    listener.notified(conn).await.map(|()| Notification::AnyName)
                }
                _ => std::future::pending().await,
            }
        })
    }
}

impl AdminStore for SqliteStore {
    fn list<'a>(&'a mut self, names: &'a Names) -> StoreFuture<'a, Vec<ListedHolder>> {
        Box::pin(async move { admin::list(&mut *self.conn().await?, names).await })
    }

    fn waiters<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, Vec<ListedWaiter>> {
        Box::pin(async move { admin::waiters(&mut *self.conn().await?, name).await })
    }

    fn sweep<'a>(&'a mut self, range: &'a SweepRange) -> StoreFuture<'a, Swept> {
        Box::pin(async move { admin::sweep(&mut *self.conn().await?, range).await })
    }

    fn sweep_clients<'a>(&'a mut self, range: &'a ClientRange) -> StoreFuture<'a, Option<String>> {
        Box::pin(async move { admin::sweep_clients(&mut *self.conn().await?, range).await })
    }

    fn origin(&mut self) -> StoreFuture<'_, Origin> {
        Box::pin(async move {
            let mut conn = self.conn().await?;
            let file = file_of(&mut conn).await?;
            let age: Option<i64> = if_exists(sqlx::query_scalar(AGE).fetch_one(&mut *conn).await)?.flatten();
            Ok(Origin { server: (!file.is_empty()).then(|| format!("SQLite {file}")), age: age.map(age_from_micros) })
        })
    }
}

impl NoteStore for SqliteStore {
    fn write_note<'a>(&'a mut self, note: &'a Note) -> StoreFuture<'a, bool> {
        Box::pin(async move { note::write(&mut *self.conn().await?, note).await })
    }

    fn last_note<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, Option<String>> {
        Box::pin(async move { note::read(&mut *self.conn().await?, name).await })
    }
}

impl RowStore for SqliteStore {}

impl RecordStore for SqliteStore {
    fn execute_command<'a>(
        &'a mut self,
        command: &'a super::records::RecordCommand,
    ) -> StoreFuture<'a, super::records::RecordResponse> {
        Box::pin(self.execute_command(command))
    }
}

impl Store for SqliteStore {
    fn close(self: Box<Self>) -> StoreFuture<'static, ()> {
        Box::pin(async move {
            match self.connection {
                StoreConnection::Dedicated(conn, _) => conn.close().await,
                StoreConnection::Pooled(_) => Ok(()),
            }
        })
    }
}

/// Shorter than the executor's limit for a statement, so that the error names the exhausted pool.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(2);

async fn acquire_from(pool: &SqlitePool) -> Result<PoolConnection<Sqlite>, sqlx::Error> {
    timeout(ACQUIRE_TIMEOUT, pool.acquire()).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
}

impl super::Database for Sqlite {}

impl Fence for Sqlite {
    const KIND: Kind = Kind::Sqlite;

    fn fence<'a>(conn: &'a mut SqliteConnection, check: &'a FenceCheck) -> StoreFuture<'a, FenceOutcome> {
        Box::pin(fence::fence(conn, check))
    }
}
