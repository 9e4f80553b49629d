//! The seam between the locks and the databases: what a database must be able to do.
//!
//! A [`Backend`] is a database. It opens [`Store`]s, each of which is one connection to the tables,
//! and the connection of [`SessionLocks`]. Every request to a store may be repeated after its
//! answer was lost.

pub(crate) mod admin;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod connect_options;
pub(crate) mod dialect;
#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, clippy::print_stdout, dead_code, reason = "tests")]
pub(crate) mod differential;
pub(crate) mod failover;
pub(crate) mod fence;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod memory;
#[cfg(feature = "mysql")]
pub(crate) mod mysql;
pub(crate) mod note;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
pub(crate) mod records;
pub(crate) mod session;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;
pub(crate) mod store;
pub(crate) mod stored;
pub(crate) mod table;

pub(crate) use self::admin::{ClientRange, ListedHolder, ListedWaiter, Names, Origin, SweepRange, Swept};
pub(crate) use self::note::Note;
pub(crate) use self::session::{SessionHolder, SessionLocks};
pub(crate) use self::store::{BoxFuture, IsWaiting, Store, StoreFuture};
pub(crate) use self::stored::{digest, hex, micros, token};
use crate::clock::Clock;
use crate::error::Result;
use crate::name::LockName;

/// A database with the tables of this crate.
pub(crate) trait Backend: Send + Sync {
    /// Opens a connection that sends requests.
    fn connect(&self) -> StoreFuture<'_, Box<dyn Store>>;

    /// Opens a connection that sends heartbeats. It receives notifications of grants by other
    /// clients if the database supports them, at least while the client waits for one.
    fn connect_for_heartbeats(&self, is_waiting: IsWaiting) -> StoreFuture<'_, Box<dyn Store>> {
        let _ = is_waiting;
        self.connect()
    }

    /// Returns the clock on which its clients keep their deadlines.
    fn clock(&self) -> Clock {
        Clock::Host
    }

    /// Returns whether a client whose heartbeat was answered receives notifications, as far as is
    /// known.
    fn can_notify(&self) -> bool {
        false
    }

    /// Returns whether the database is a file, whose connections do not go silent.
    fn is_local(&self) -> bool {
        false
    }

    /// Returns how many connections can work at a time. SQLite has one writer.
    fn max_connections_used(&self) -> usize;

    /// Returns how many requests a connection carries out together, in a
    /// [`Batch`](crate::protocol::Batch).
    ///
    /// If the connection is encrypted, they should fit into one TLS record, which has 16 KiB. sqlx
    /// writes records one by one, and sqlx 0.9.0 does not set TCP_NODELAY, so TCP may wait 40 ms for
    /// an acknowledgement between two of them. <https://github.com/transact-rs/sqlx/issues/4335>
    fn max_batch_len(&self) -> usize;

    /// Returns the address of the server or the path of the file, without credentials.
    fn address(&self) -> String;

    /// Makes every commit wait for a second server. Returns `false` if the database cannot do so.
    fn require_synchronous(&mut self) -> bool {
        false
    }

    /// Returns whether other servers accept writes and do not see the locks of transactions on this
    /// one.
    fn is_multi_primary(&self) -> bool {
        false
    }

    /// Creates the tables or brings them up to date.
    fn migrate(&self) -> BoxFuture<'_, Result<()>>;

    /// Opens the connection of session locks. Returns an error if the database cannot keep them
    /// exclusive.
    fn open_session_locks(&self) -> BoxFuture<'_, Result<Box<dyn SessionLocks>>>;

    /// Reads which sessions hold a session lock, on a connection for this call alone.
    fn session_holders<'a>(&'a self, name: &'a LockName) -> BoxFuture<'a, Result<Vec<SessionHolder>>>;
}

/// The databases whose transactions can be fenced: `sqlx::Postgres`, `sqlx::MySql` (also MariaDB)
/// and `sqlx::Sqlite`.
///
/// This trait is sealed: no other crate can implement it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a database with locks",
    label = "not `sqlx::Postgres`, `sqlx::MySql` or `sqlx::Sqlite`",
    note = "`sqlx::Any` hides which database it is: use a `Transaction` or `Pool` of the database itself",
    note = "the feature of the database must be enabled: `sqlock = {{ features = [\"postgres\"] }}` (or \"mysql\", \"sqlite\")"
)]
pub trait Database: sqlx::Database + fence::Fence + dialect::Dialect + records::RecordDialect {}

/// A pool of connections to a database with locks: `sqlx::PgPool`, `sqlx::MySqlPool` (also MariaDB)
/// or `sqlx::SqlitePool`, by value. A clone of a pool shares its connections.
///
/// Other types are refused, with a message that says what to pass. Connect options make a pool with
/// `PoolOptions::connect_lazy_with`; URLs are for [`Locks::connect`](crate::Locks::connect).
///
/// ```compile_fail,E0277
/// # fn example(pool: sqlx::AnyPool) {
/// sqlock::Locks::new(pool);           // cannot tell PostgreSQL from MySQL
/// # }
/// ```
///
/// ```compile_fail,E0277
/// # fn example(pool: sqlx::SqlitePool) {
/// sqlock::Locks::new(&pool);          // pool.clone()
/// # }
/// ```
///
/// This trait is sealed: no other crate can implement it.
#[diagnostic::on_unimplemented(
    message = "locks cannot be made from `{Self}`",
    label = "not a `PgPool`, `MySqlPool` or `SqlitePool`",
    note = "pass a pool by value, for example `Locks::new(pool.clone())`: its clones share the connections",
    note = "with connect options: `Locks::new(PgPoolOptions::new().connect_lazy_with(options))`; with a URL, also for `AnyPool`: `Locks::connect(url)`",
    note = "the feature of the database must be enabled: `sqlock = {{ features = [\"postgres\"] }}` (or \"mysql\", \"sqlite\")"
)]
pub trait DatabasePool: IntoBackend {}

/// Makes the backend of a pool.
pub trait IntoBackend {
    #[doc(hidden)]
    fn into_backend(self) -> PoolBackend;
}

/// The backend of a pool.
#[doc(hidden)]
pub struct PoolBackend(pub(crate) Box<dyn Backend>, pub(crate) Kind);

macro_rules! pool {
    ($feature:literal, $pool:ident, $kind:ident, $backend:expr) => {
        #[cfg(feature = $feature)]
        impl IntoBackend for sqlx::$pool {
            fn into_backend(self) -> PoolBackend {
                PoolBackend(Box::new($backend(self)), Kind::$kind)
            }
        }

        #[cfg(feature = $feature)]
        impl DatabasePool for sqlx::$pool {}
    };
}
pool!("postgres", PgPool, Postgres, postgres::PostgresBackend::new);
pool!("mysql", MySqlPool, MySql, mysql::MySqlBackend::new);
pool!("sqlite", SqlitePool, Sqlite, sqlite::SqliteBackend::new);

/// The kinds of database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Kind {
    Postgres,
    MySql,
    Sqlite,
    #[cfg(feature = "testing")]
    Memory,
}
