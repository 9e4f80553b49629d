//! PostgreSQL: one statement for each request, in autocommit, at READ COMMITTED, by
//! `clock_timestamp()`. (Commands on records are several statements, each committed
//! alone, unless an operator resolves a record.)
//!
//! Only a [`listener`] sets session state, so the backend works behind a pooler that changes the
//! session between transactions.

mod acquire;
mod admin;
mod batch;
mod change;
#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, reason = "tests")]
mod differential;
mod fence;
mod heartbeat;
mod listener;
mod note;
mod queue;
mod records;
mod release;
mod rows;
mod session;
mod settings;
mod store;
mod transition;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{ConnectOptions, PgConnection, PgPool, Postgres};

use self::listener::{StoreConnection, Upgrade, connect_or_plain};
use self::settings::{Settings, started_at};
use super::connect_options::OptionsSource;
use super::fence::{Fence, FenceCheck, FenceOutcome};
use super::note::NoteStore;
use super::store::{AdminStore, LeaseStore, ROW_TOUCH_INTERVAL, RecordStore, RowStore};
use super::stored::age_from_micros;
use super::{
    Backend, BoxFuture, ClientRange, IsWaiting, Kind, ListedHolder, ListedWaiter, Names, Note, Origin, SessionHolder,
    SessionLocks, Store, StoreFuture, SweepRange, Swept, micros,
};
use crate::error::{Result, if_exists};
use crate::name::LockName;
use crate::protocol::timing::CONNECT_TIMEOUT;
use crate::protocol::{Batch, Notification, Request, Response};
use crate::schema;

/// The settings of the client's own sessions. A pooler refuses settings; there the server's apply.
const SETTINGS: [(&str, &str); 5] = [
    // With these, a request is one statement, and locks rows for no longer. Otherwise each request
    // is a transaction of three round trips.
    ("default_transaction_isolation", "read committed"),
    ("default_transaction_read_only", "off"),
    // A statement must not wait for a lock longer than its client waits for the answer, because the
    // statement would take effect after the client has given it up.
    ("lock_timeout", "1s"),
    // A plan that was made while the table was small would read the whole table for each name,
    // until the statistics are collected again.
    ("enable_seqscan", "off"),
    // Without an index, the plan counts as so expensive that the server would compile it.
    ("jit", "off"),
];

/// The backend on connections made like those of the caller's pool.
pub(crate) struct PostgresBackend {
    options: OptionsSource<Postgres>,
    /// A commit must reach a second server.
    synchronous: bool,
    /// `false`: a pooler refused a setting in the startup packet.
    accepts_settings: AtomicBool,
    /// `false`: a connection was found to share its session.
    can_listen: Arc<AtomicBool>,
    /// Whether the last connection is likely to use TLS. Only speed depends on it.
    is_encrypted: AtomicBool,
}

impl PostgresBackend {
    pub(crate) fn new(pool: PgPool) -> Self {
        Self::with_options(OptionsSource::Pool(pool))
    }

    pub(crate) fn from_options(options: Arc<PgConnectOptions>) -> Self {
        Self::with_options(OptionsSource::Url(options))
    }

    fn with_options(options: OptionsSource<Postgres>) -> Self {
        let (accepts_settings, can_listen) = (AtomicBool::new(true), Arc::new(AtomicBool::new(true)));
        Self { options, synchronous: false, accepts_settings, can_listen, is_encrypted: AtomicBool::new(false) }
    }

    /// Returns the options of the connections of this crate.
    fn own_options(&self) -> PgConnectOptions {
        let options = self.options.without_logging();
        if self.accepts_settings.load(Ordering::Relaxed) { options.options(SETTINGS) } else { options }
    }

    async fn open(&self) -> Result<PostgresStore, sqlx::Error> {
        let options = self.own_options();
        let with_settings = || async { options.connect().await.map(StoreConnection::Plain) };
        let plain = self.options.without_logging();
        let mut connection = connect_or_plain(with_settings, &plain, &self.accepts_settings).await?;
        if !self.accepts_settings.load(Ordering::Relaxed) {
            self.can_listen.store(false, Ordering::Relaxed);
        }
        let settings = Settings::read(connection.connection().await?, &self.address(), self.synchronous).await?;
        let is_encrypted = match self.options.current().get_ssl_mode() {
            PgSslMode::Disable | PgSslMode::Allow => false,
            PgSslMode::Prefer => settings.server_has_tls,
            PgSslMode::Require | PgSslMode::VerifyCa | PgSslMode::VerifyFull => true,
        };
        self.is_encrypted.store(is_encrypted, Ordering::Relaxed);
        Ok(PostgresStore { connection, settings, upgrade: None })
    }
}

impl Backend for PostgresBackend {
    fn address(&self) -> String {
        let options = self.options.current();
        let port = options.get_port();
        match options.get_socket() {
            // The port is a part of the file's name.
            Some(directory) => format!("{}:{port}", directory.display()),
            None => format!("{}:{port}", options.get_host()),
        }
    }

    fn require_synchronous(&mut self) -> bool {
        self.synchronous = true;
        true
    }

    fn connect(&self) -> StoreFuture<'_, Box<dyn Store>> {
        Box::pin(async move { Ok(Box::new(self.open().await?) as Box<dyn Store>) })
    }

    fn can_notify(&self) -> bool {
        self.can_listen.load(Ordering::Relaxed)
    }

    fn connect_for_heartbeats(&self, is_waiting: IsWaiting) -> StoreFuture<'_, Box<dyn Store>> {
        Box::pin(async move {
            let store = self.open().await?;
            let (options, can_listen) = (self.own_options(), Arc::clone(&self.can_listen));
            let upgrade = Some(Upgrade { options, can_listen, is_waiting, client: None });
            Ok(Box::new(PostgresStore { upgrade, ..store }) as Box<dyn Store>)
        })
    }

    fn max_connections_used(&self) -> usize {
        usize::MAX
    }

    fn max_batch_len(&self) -> usize {
        // Names of 100 characters make 64 requests fill a TLS record. Longer ones are rare.
        if self.is_encrypted.load(Ordering::Relaxed) { 64 } else { 256 }
    }

    fn migrate(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            schema::check_connection(&*self.options.current(), CONNECT_TIMEOUT).await?;
            let one = PgPoolOptions::new()
                .max_connections(1)
                .connect_with((*self.options.current()).clone())
                .await
                .map_err(schema::connect_error)?;
            let migrated = schema::migrate_in_transaction(&one, schema::POSTGRES, &MIGRATION_SETTINGS).await;
            one.close().await;
            migrated
        })
    }

    fn open_session_locks(&self) -> BoxFuture<'_, Result<Box<dyn SessionLocks>>> {
        Box::pin(async move { session::open(&self.options.current()).await })
    }

    fn session_holders<'a>(&'a self, name: &'a LockName) -> BoxFuture<'a, Result<Vec<SessionHolder>>> {
        Box::pin(async move { session::holders(&self.options.current(), name).await })
    }
}

struct PostgresStore {
    connection: StoreConnection,
    settings: Settings,
    /// `Some` on a connection for heartbeats.
    upgrade: Option<Upgrade>,
}

impl PostgresStore {
    async fn store(&mut self) -> Result<store::Connection<'_>, sqlx::Error> {
        let (connection, mark) = self.connection.connection_and_mark().await?;
        Ok(store::Connection { connection, settings: self.settings, mark })
    }
}

/// Makes the schema that has the tables the first of the search path, for the transaction.
/// Otherwise tables that are missing there, or a history that this user may not read, would be
/// created in another schema, which hides the tables from this user.
const USE_SCHEMA_OF_TABLES: &str = "
SELECT set_config('search_path', quote_ident(n.nspname), true)
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.oid = coalesce(to_regclass('sqlock_lease'), to_regclass('_sqlock_migrations'))
   AND n.nspname IS DISTINCT FROM current_schema()";

// CREATE INDEX IF NOT EXISTS locks its table before it finds the index, and requests would wait
// behind a migration that waits for an open transaction.
const MIGRATION_SETTINGS: [&str; 2] = [USE_SCHEMA_OF_TABLES, "SET LOCAL lock_timeout = '1s'"];

const UPTIME: &str = "
SELECT (extract(epoch FROM clock_timestamp() - pg_postmaster_start_time()) * 1000000)::bigint";

const AGE: &str = "
SELECT (extract(epoch FROM clock_timestamp() - min(installed_on)) * 1000000)::bigint FROM _sqlock_migrations";

// $1 name, $2 how old the time of use may be. The statement never waits for a row and rarely writes
// one.
#[rustfmt::skip]
const ENSURE: &str = concat!("
WITH noted AS MATERIALIZED (
    SELECT name FROM sqlock_row WHERE name = $1 AND seen_at < ", store::now!(), " - $2 FOR UPDATE SKIP LOCKED),
note AS (
    UPDATE sqlock_row AS r SET seen_at = ", store::now!(), " FROM noted WHERE r.name = noted.name)
INSERT INTO sqlock_row (name, seen_at)
SELECT $1, ", store::now!(), " WHERE NOT EXISTS (SELECT 1 FROM sqlock_row WHERE name = $1)
    ON CONFLICT (name) DO NOTHING");

impl LeaseStore for PostgresStore {
    fn execute<'a>(&'a mut self, request: &'a Request) -> StoreFuture<'a, Response> {
        Box::pin(async move {
            let response = store::execute(&mut self.store().await?, request).await?;
            if let (Some(upgrade), Request::Register { client } | Request::Beat { client }) =
                (&mut self.upgrade, request)
            {
                upgrade.client = Some(*client);
            }
            Ok(response)
        })
    }

    fn execute_batch<'a>(&'a mut self, batch: &'a Batch) -> StoreFuture<'a, Vec<Option<Response>>> {
        Box::pin(async move { batch::execute(&mut self.store().await?, batch).await })
    }

    fn wait_until_ready(&mut self) -> StoreFuture<'_, ()> {
        Box::pin(self.connection.finish_replacement())
    }

    fn notified(&mut self) -> StoreFuture<'_, Notification> {
        match &self.upgrade {
            Some(upgrade) => Box::pin(self.connection.notified(upgrade)),
            None => Box::pin(std::future::pending()),
        }
    }
}

impl AdminStore for PostgresStore {
    fn list<'a>(&'a mut self, names: &'a Names) -> StoreFuture<'a, Vec<ListedHolder>> {
        Box::pin(async move { admin::list(&mut self.store().await?, names).await })
    }

    fn waiters<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, Vec<ListedWaiter>> {
        Box::pin(async move { admin::waiters(&mut self.store().await?, name).await })
    }

    fn sweep<'a>(&'a mut self, range: &'a SweepRange) -> StoreFuture<'a, Swept> {
        Box::pin(async move { admin::sweep(&mut self.store().await?, range).await })
    }

    fn sweep_clients<'a>(&'a mut self, range: &'a ClientRange) -> StoreFuture<'a, Option<String>> {
        Box::pin(async move { admin::sweep_clients(&mut self.store().await?, range).await })
    }

    fn origin(&mut self) -> StoreFuture<'_, Origin> {
        Box::pin(async move {
            let conn = self.connection.connection().await?;
            let started = started_at(conn).await?;
            let age: Option<i64> = if_exists(sqlx::query_scalar(AGE).fetch_one(conn).await)?.flatten();
            Ok(Origin { server: Some(format!("PostgreSQL {started}")), age: age.map(age_from_micros) })
        })
    }

    fn uptime(&mut self) -> StoreFuture<'_, Option<Duration>> {
        Box::pin(async move {
            let up: i64 = sqlx::query_scalar(UPTIME).fetch_one(self.connection.connection().await?).await?;
            Ok(u64::try_from(up).ok().map(Duration::from_micros))
        })
    }
}

impl NoteStore for PostgresStore {
    fn write_note<'a>(&'a mut self, note: &'a Note) -> StoreFuture<'a, bool> {
        Box::pin(async move { note::write(&mut self.store().await?, note).await })
    }

    fn last_note<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, Option<String>> {
        Box::pin(async move { note::read(&mut self.store().await?, name).await })
    }
}

impl RowStore for PostgresStore {
    fn ensure<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            self.store().await?.rows(sqlx::query(ENSURE).bind(name.as_str()).bind(micros(ROW_TOUCH_INTERVAL))).await?;
            Ok(())
        })
    }
}

impl RecordStore for PostgresStore {
    fn execute_command<'a>(
        &'a mut self,
        command: &'a super::records::RecordCommand,
    ) -> StoreFuture<'a, super::records::RecordResponse> {
        Box::pin(self.execute_command(command))
    }
}

impl Store for PostgresStore {
    fn close(self: Box<Self>) -> StoreFuture<'static, ()> {
        Box::pin(self.connection.close())
    }
}

impl super::Database for Postgres {}

impl Fence for Postgres {
    const KIND: Kind = Kind::Postgres;

    fn fence<'a>(conn: &'a mut PgConnection, check: &'a FenceCheck) -> StoreFuture<'a, FenceOutcome> {
        Box::pin(fence::fence(conn, check))
    }
}
