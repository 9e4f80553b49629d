//! MySQL and MariaDB: InnoDB, at READ COMMITTED, on connections made like those of the caller's
//! pool.

// The statements of the modules below use their macros.
#[macro_use]
mod store;
#[macro_use]
mod script;

mod acquire;
mod admin;
mod batch;
mod change;
#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, reason = "tests")]
mod differential;
mod fence;
mod group;
mod heartbeat;
mod note;
mod queue;
mod records;
mod release;
mod rows;
mod session;
mod transition;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions, MySqlSslMode};
use sqlx::{ConnectOptions, Connection, Executor, MySql, MySqlConnection, MySqlPool, Row as _};
use tokio::time::timeout;

use self::script::Sending;
use self::store::Flavor;
use super::connect_options::OptionsSource;
use super::dialect::Column;
use super::fence::{Fence, FenceCheck, FenceOutcome};
use super::note::NoteStore;
use super::records::{RecordCommand, RecordResponse};
use super::store::{AdminStore, LeaseStore, RecordStore, RowStore};
use super::stored::age_from_micros;
use super::{
    Backend, BoxFuture, ClientRange, Kind, ListedHolder, ListedWaiter, Names, Note, Origin, SessionHolder,
    SessionLocks, Store, StoreFuture, SweepRange, Swept,
};
use crate::error::{Result, if_exists, not_writable, unusable};
use crate::name::LockName;
use crate::protocol::timing::CONNECT_TIMEOUT;
use crate::protocol::{Batch, Request, Response};
use crate::schema;

/// The backend on connections made like those of the caller's pool.
pub(crate) struct MySqlBackend {
    options: OptionsSource<MySql>,
    /// Whether the last server was a node of a Galera cluster.
    on_galera: AtomicBool,
    /// Whether the last connection is likely to use TLS. Only speed depends on it.
    is_encrypted: AtomicBool,
}

impl MySqlBackend {
    pub(crate) fn new(pool: MySqlPool) -> Self {
        Self::with_options(OptionsSource::Pool(pool))
    }

    pub(crate) fn from_options(options: Arc<MySqlConnectOptions>) -> Self {
        Self::with_options(OptionsSource::Url(options))
    }

    fn with_options(options: OptionsSource<MySql>) -> Self {
        Self { options, on_galera: AtomicBool::new(false), is_encrypted: AtomicBool::new(false) }
    }
}

impl Backend for MySqlBackend {
    fn address(&self) -> String {
        let options = self.options.current();
        match options.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => format!("{}:{}", options.get_host(), options.get_port()),
        }
    }

    fn is_multi_primary(&self) -> bool {
        self.on_galera.load(Ordering::Relaxed)
    }

    fn connect(&self) -> StoreFuture<'_, Box<dyn Store>> {
        Box::pin(async move {
            let mut conn = self.options.without_logging().connect().await?;
            let ServerInfo { flavor, version, is_read_only, may_be_galera, is_in_group, has_tls } =
                configure(&mut conn).await?;
            // https://github.com/pingcap/tidb/issues/69720
            if version.contains("TiDB") {
                return Err(unusable(format!(
                    "{} is TiDB, which accepts FOR UPDATE SKIP LOCKED and locks nothing: two clients could hold one name",
                    self.address()
                )));
            }
            // This applies even to an account that may write: other servers would not see the
            // writes of a replica.
            if is_read_only {
                return Err(not_writable(format!("{} is read-only, as replicas are", self.address())));
            }
            if is_in_group {
                group::check_member(&mut conn, &self.address()).await?;
            }
            let on_galera = may_be_galera && session::is_on_galera(&mut conn).await?;
            if on_galera {
                if sqlx::raw_sql(IS_READY).fetch_all(&mut conn).await?.is_empty() {
                    return Err(not_writable(format!("{} is a Galera node without a cluster", self.address())));
                }
                conn.execute(SYNC).await?;
            }
            self.on_galera.store(on_galera, Ordering::Relaxed);
            let uses_tls = !matches!(self.options.current().get_ssl_mode(), MySqlSslMode::Disabled);
            self.is_encrypted.store(has_tls && uses_tls, Ordering::Relaxed);
            let sending = if on_galera { Sending::OneByOne } else { Sending::OneText };
            Ok(Box::new(MySqlStore { conn, flavor, sending }) as Box<dyn Store>)
        })
    }

    fn max_connections_used(&self) -> usize {
        usize::MAX
    }

    fn max_batch_len(&self) -> usize {
        // Names of 40 characters make 40 requests fill a TLS record. Without TLS, one locked row still
        // keeps the whole batch from its effect.
        if self.is_encrypted.load(Ordering::Relaxed) { 40 } else { 128 }
    }

    fn migrate(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            schema::check_connection(&*self.options.current(), CONNECT_TIMEOUT).await?;
            // A user with the right to write on a replica must not create tables there alone.
            let checked = self.connect().await.map_err(schema::connect_error)?;
            let _ = timeout(CONNECT_TIMEOUT, checked.close()).await;
            let one = MySqlPoolOptions::new()
                .max_connections(1)
                .after_connect(|conn, _| {
                    Box::pin(async move {
                        configure(conn).await?;
                        // A change of a table waits for the open transactions that use it.
                        conn.execute("SET SESSION lock_wait_timeout = DEFAULT").await.map(drop)
                    })
                })
                .connect_with((*self.options.current()).clone())
                .await
                .map_err(schema::connect_error)?;
            let migrated = schema::migrate(&one, schema::MYSQL, clear_interrupted).await;
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

/// Deletes the record of an interrupted migration. DDL commits implicitly, so a killed migration
/// leaves a record marked as unsuccessful. The migrations of this crate can be repeated, so the
/// record is deleted when it is older than any running migration. Those of a later program may run
/// for longer.
async fn clear_interrupted(one: &MySqlPool) -> Result<(), sqlx::Error> {
    const CLEAR: &str = "DELETE FROM _sqlock_migrations WHERE NOT success AND version <= ? AND installed_on < NOW() - INTERVAL 5 SECOND";
    let latest = schema::MYSQL.iter().map(|(version, ..)| *version).max();
    sqlx::query(CLEAR).bind(latest).execute(one).await?;
    Ok(())
}

// No statement waits for a lock longer than its client waits for the answer: it would take effect
// after the client has given it up. lock_wait_timeout is for locks of whole tables.
//
// Sets the isolation and every other setting of a server, an account or the caller's options that would change the effect of a
// statement: MariaDB's EMPTY_STRING_IS_NULL and SIMULTANEOUS_ASSIGNMENT are parts of sql_mode. sqlx sends texts as UTF-8, whatever
// the character set.
//
// Selects the properties of the server. read_only is a number or one of several words.
// On a reader of Amazon Aurora it is off, and innodb_read_only is on.
// https://repost.aws/knowledge-center/aurora-mysql-db-cluser-read-only-error
// /*M! … */ is for MariaDB only, /*!80000 … */ for MySQL only.
#[rustfmt::skip]
const CONFIGURE: &str = "
SET NAMES utf8mb4;
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
SET SESSION autocommit = 1, innodb_lock_wait_timeout = 1, lock_wait_timeout = 1, completion_type = 0, time_zone = '+00:00',
            sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION',
            sql_safe_updates = 0, sql_select_limit = 18446744073709551615, sql_big_selects = 1, sql_auto_is_null = 0
            /*M! , max_statement_time = 0 */ /*!80000 , max_execution_time = 0 */;
SELECT VERSION() AS version, 0 /*M! + 1 */ AS is_mariadb,
       CAST(@@GLOBAL.read_only NOT IN ('0', 'OFF') OR @@GLOBAL.innodb_read_only AS SIGNED) AS is_read_only,
       CAST(@@version_comment LIKE '%wsrep%' OR @@version_comment LIKE '%XtraDB Cluster%'
            /*M! OR EXISTS (SELECT 1 FROM information_schema.GLOBAL_VARIABLES
                             WHERE VARIABLE_NAME = 'WSREP_ON' AND VARIABLE_VALUE = 'ON') */ AS SIGNED) AS may_be_galera,
       CAST(0 /*!80000 + EXISTS (SELECT 1 FROM performance_schema.global_variables
                                  WHERE VARIABLE_NAME = 'group_replication_group_name' AND VARIABLE_VALUE <> '') */ AS SIGNED) AS is_in_group,
       CAST(1 /*M! - 1 + EXISTS (SELECT 1 FROM information_schema.GLOBAL_VARIABLES
                                  WHERE VARIABLE_NAME = 'HAVE_SSL' AND VARIABLE_VALUE = 'YES') */ AS SIGNED) AS has_tls";

/// The properties of a server.
struct ServerInfo {
    flavor: Flavor,
    version: String,
    is_read_only: bool,
    may_be_galera: bool,
    is_in_group: bool,
    /// The server can use TLS. MySQL always can: it makes a certificate of its own.
    has_tls: bool,
}

/// Configures a new session, and reads the properties of its server.
async fn configure(conn: &mut MySqlConnection) -> Result<ServerInfo, sqlx::Error> {
    let row = sqlx::raw_sql(CONFIGURE).fetch_one(conn).await?;
    let flag = |column: &str| row.try_get::<i64, _>(column).map(|number| number != 0);
    Ok(ServerInfo {
        flavor: if flag("is_mariadb")? { Flavor::MariaDb } else { Flavor::MySql },
        version: row.try_get("version")?,
        is_read_only: flag("is_read_only")?,
        may_be_galera: flag("may_be_galera")?,
        is_in_group: flag("is_in_group")?,
        has_tls: flag("has_tls")?,
    })
}

const IS_READY: &str = "SHOW GLOBAL STATUS WHERE Variable_name = 'wsrep_ready' AND Value = 'ON'";

// The commits of other nodes may not have arrived on this one. Every statement waits for them: 1 is
// for SELECT, SHOW and BEGIN, 2 for UPDATE and DELETE, 4 for INSERT.
// https://mariadb.com/kb/en/galera-cluster-system-variables/#wsrep_sync_wait
//
// A transaction is several commands there. MariaDB can end one whose client has stopped in between.
// https://mariadb.com/kb/en/transaction-timeouts/
const SYNC: &str = "SET SESSION wsrep_sync_wait = 7 /*M! , idle_transaction_timeout = 5 */";

struct MySqlStore {
    conn: MySqlConnection,
    flavor: Flavor,
    sending: Sending,
}

// In whole seconds.
const UPTIME: &str = "SHOW GLOBAL STATUS LIKE 'Uptime'";

const SERVER: &str = "SELECT CONCAT('MySQL ', @@GLOBAL.server_uuid)";

// The record has whole seconds, rounded down.
const AGE: &str = "
SELECT TIMESTAMPDIFF(MICROSECOND, MIN(installed_on), SYSDATE(6)) - 1000000 FROM _sqlock_migrations";

impl LeaseStore for MySqlStore {
    fn execute<'a>(&'a mut self, request: &'a Request) -> StoreFuture<'a, Response> {
        Box::pin(async move {
            let answer = store::execute(&mut self.conn, self.flavor, self.sending, request).await;
            // The server checks rights before it looks for the table.
            // https://dev.mysql.com/doc/mysql-errors/8.4/en/server-error-reference.html
            match answer {
                Err(error) if store::number(&error) == Some(1142) => {
                    let looked = sqlx::query("SELECT 1 FROM sqlock_lease LIMIT 0").execute(&mut self.conn).await;
                    Err(looked.err().filter(|other| store::number(other) == Some(1146)).unwrap_or(error))
                }
                answer => answer,
            }
        })
    }

    fn execute_batch<'a>(&'a mut self, batch: &'a Batch) -> StoreFuture<'a, Vec<Option<Response>>> {
        Box::pin(batch::execute(&mut self.conn, self.flavor, self.sending, batch))
    }
}

impl AdminStore for MySqlStore {
    fn list<'a>(&'a mut self, names: &'a Names) -> StoreFuture<'a, Vec<ListedHolder>> {
        Box::pin(admin::list(&mut self.conn, names))
    }

    fn waiters<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, Vec<ListedWaiter>> {
        Box::pin(admin::waiters(&mut self.conn, name))
    }

    fn sweep<'a>(&'a mut self, range: &'a SweepRange) -> StoreFuture<'a, Swept> {
        Box::pin(admin::sweep(&mut self.conn, self.sending, range))
    }

    fn sweep_clients<'a>(&'a mut self, range: &'a ClientRange) -> StoreFuture<'a, Option<String>> {
        Box::pin(admin::sweep_clients(&mut self.conn, range))
    }

    fn origin(&mut self) -> StoreFuture<'_, Origin> {
        Box::pin(async move {
            let server: Option<String> = match self.flavor {
                Flavor::MySql => Some(sqlx::query_scalar(SERVER).fetch_one(&mut self.conn).await?),
                // MariaDB has no identity of its own: two servers may have the same host name.
                Flavor::MariaDb => None,
            };
            let age: Option<i64> = if_exists(sqlx::query_scalar(AGE).fetch_one(&mut self.conn).await)?.flatten();
            Ok(Origin { server, age: age.map(age_from_micros) })
        })
    }

    fn uptime(&mut self) -> StoreFuture<'_, Option<Duration>> {
        Box::pin(async move {
            let row = sqlx::query(UPTIME).fetch_optional(&mut self.conn).await?;
            let seconds: Option<String> = row.map(|row| row.try_get(1)).transpose()?;
            let seconds = seconds.and_then(|seconds| seconds.parse().ok());
            // For an account that may not read the status, the uptime counts as zero.
            Ok(Some(Duration::from_secs(seconds.unwrap_or(0))))
        })
    }
}

impl NoteStore for MySqlStore {
    fn write_note<'a>(&'a mut self, note: &'a Note) -> StoreFuture<'a, bool> {
        Box::pin(note::write(&mut self.conn, note))
    }

    fn last_note<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, Option<String>> {
        Box::pin(note::read(&mut self.conn, name))
    }
}

impl RowStore for MySqlStore {
    fn ensure<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, ()> {
        Box::pin(rows::ensure(&mut self.conn, name))
    }

    fn column<'a>(&'a mut self, path: &'a (String, String, Vec<String>)) -> StoreFuture<'a, Option<Column>> {
        Box::pin(rows::column(&mut self.conn, path))
    }
}

impl RecordStore for MySqlStore {
    fn execute_command<'a>(&'a mut self, command: &'a RecordCommand) -> StoreFuture<'a, RecordResponse> {
        Box::pin(records::execute_command(&mut self.conn, command))
    }
}

impl Store for MySqlStore {
    fn close(self: Box<Self>) -> StoreFuture<'static, ()> {
        Box::pin(self.conn.close())
    }
}

impl super::Database for MySql {}

impl Fence for MySql {
    const KIND: Kind = Kind::MySql;

    fn fence<'a>(conn: &'a mut MySqlConnection, check: &'a FenceCheck) -> StoreFuture<'a, FenceOutcome> {
        Box::pin(fence::fence(conn, check))
    }

    fn is_newer<'a>(conn: &'a mut MySqlConnection, check: &'a FenceCheck) -> StoreFuture<'a, bool> {
        Box::pin(fence::is_newer(conn, check))
    }
}
