//! The fixtures of all tests: databases, clients, and other processes.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

pub mod blocked;
#[cfg(feature = "cli")]
pub mod captured_output;
#[cfg(feature = "cli")]
pub mod command;
#[cfg(feature = "cli")]
pub mod command_fixture;
pub mod critical_section;
pub mod history;
pub mod log;
#[cfg(feature = "cli")]
pub mod process_table;
pub mod proxy;
pub mod server;
#[cfg(feature = "cli")]
pub mod terminal;
pub mod wait;
pub mod worker;

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sqlock::inspect::LeaseInfo;
use sqlock::lease::ExportedLease;
use sqlock::{Locks, LocksBuilder, Owner};
use sqlx::{AssertSqlSafe, Pool};
#[allow(unused_imports, reason = "each test binary uses its part")]
pub use wait::{BRIEF, LONG, SLACK, SOON, soon, times_out, until};

use crate::{DATABASE, Sql};

/// The databases that the conformance suite runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Database {
    Postgres,
    MySql,
    MariaDb,
    Sqlite,
}

impl Database {
    pub fn is_mysql(self) -> bool {
        matches!(self, Self::MySql | Self::MariaDb)
    }

    /// Returns the scheme of its URLs.
    pub fn scheme(self) -> &'static str {
        match self {
            Self::Postgres => "postgres",
            Self::MySql => "mysql",
            Self::MariaDb => "mariadb",
            Self::Sqlite => "sqlite",
        }
    }

    /// Returns the kind of throwaway server for tests that need their own server. SQLite has none.
    pub fn server(self) -> Option<server::Kind> {
        match self {
            Self::Postgres => Some(server::Kind::Postgres),
            Self::MySql => Some(server::Kind::MySql),
            Self::MariaDb => Some(server::Kind::MariaDb),
            Self::Sqlite => None,
        }
    }

    /// Returns the URL of the shared server, or fails with the way to start one.
    pub fn shared_url(self) -> String {
        let variable = match self {
            Self::Postgres => "SQLOCK_TEST_POSTGRES_URL",
            Self::MySql => "SQLOCK_TEST_MYSQL_URL",
            Self::MariaDb => "SQLOCK_TEST_MARIADB_URL",
            Self::Sqlite => unreachable!("SQLite needs no server"),
        };
        std::env::var(variable).unwrap_or_else(|_| {
            panic!(
                "{variable} is not set: run scripts/test, which starts throwaway servers, or point it at one of yours"
            )
        })
    }
}

/// The database of a test: a database, a schema or a file of its own.
pub struct TestDatabase {
    /// The URL of the database.
    pub url: String,
    _file: Option<tempfile::TempDir>,
}

/// Creates a directory, in memory if the system allows, because a commit on a busy disk may take
/// longer than a lease lasts. The throwaway servers do not wait for the disk either.
fn directory() -> tempfile::TempDir {
    const MEMORY: &str = "/dev/shm";
    let free = rustix::fs::statvfs(MEMORY).map_or(0, |memory| memory.f_bavail * memory.f_frsize);
    let directory = if free > 1 << 30 { tempfile::tempdir_in(MEMORY) } else { tempfile::tempdir() };
    directory.expect("a temporary directory")
}

/// Creates a database on the shared server, without tables.
pub async fn empty() -> TestDatabase {
    match DATABASE {
        Database::Sqlite => {
            let dir = directory();
            let url = format!("sqlite://{}?mode=rwc", dir.path().join("test.db").display());
            TestDatabase { url, _file: Some(dir) }
        }
        _ => empty_on(&DATABASE.shared_url()).await,
    }
}

/// Creates a database on a server, without tables.
pub async fn empty_on(server: &str) -> TestDatabase {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    // The name contains the start of the process, because databases outlive their process on a
    // reused server, and process ids are reused.
    static START: LazyLock<u128> =
        LazyLock::new(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis()));
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let name = format!("t{}_{}_{serial}", *START, std::process::id());
    let admin = connect(server, 1).await;
    let url = match DATABASE {
        Database::Postgres => {
            sqlx::query(AssertSqlSafe(format!("CREATE SCHEMA {name}"))).execute(&admin).await.expect("a schema");
            let mark = if server.contains('?') { '&' } else { '?' };
            format!("{server}{mark}options=-csearch_path%3D{name}")
        }
        Database::MySql | Database::MariaDb => {
            sqlx::query(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&admin).await.expect("a database");
            let (server, query) = server.split_once('?').unwrap_or((server, ""));
            let base = server.rsplit_once('/').map_or(server, |(base, _)| base);
            format!("{base}/{name}?{query}")
        }
        Database::Sqlite => unreachable!("SQLite needs no server"),
    };
    admin.close().await;
    TestDatabase { url, _file: None }
}

/// Creates a database with the tables of this crate.
pub async fn fresh() -> TestDatabase {
    let fresh = empty().await;
    fresh.locks().await.migrate().await.expect("migrate");
    fresh
}

/// As [`fresh`], on a given server.
pub async fn fresh_on(server: &str) -> TestDatabase {
    let fresh = empty_on(server).await;
    fresh.locks().await.migrate().await.expect("migrate");
    fresh
}

impl TestDatabase {
    /// Wraps the database of a URL. Another part of the test drops the database.
    pub fn at(url: String) -> TestDatabase {
        TestDatabase { url, _file: None }
    }

    /// Creates a pool like an application's.
    pub async fn pool(&self) -> Pool<Sql> {
        connect(&self.url, 10).await
    }

    pub async fn pool_of(&self, connections: u32) -> Pool<Sql> {
        connect(&self.url, connections).await
    }

    /// Creates a client, like that of another process, that also allows the short TTLs of tests.
    pub async fn locks(&self) -> Locks {
        self.builder().await.build()
    }

    pub async fn builder(&self) -> LocksBuilder {
        builder(self.pool_of(2).await)
    }
}

/// Exports a lease that no client renews. On a machine under load, a lease with a short TTL may
/// have ended before.
pub async fn exported(locks: &Locks, name: &str, ttl: Duration) -> ExportedLease {
    let exported = async {
        loop {
            let lease = locks.lease(name).ttl(ttl).renew(false).acquire().await.expect("acquire");
            match lease.export() {
                Ok(exported) => return exported,
                Err(error) => assert!(error.is_lost(), "export: {error}"),
            }
        }
    };
    soon("a lease to export", exported).await
}

pub fn builder(pool: Pool<Sql>) -> LocksBuilder {
    Locks::builder(pool).ttl_range(Duration::from_millis(100)..=Duration::from_secs(86_400))
}

/// Creates a pool on a URL, which opens connections when they are needed.
pub async fn connect(url: &str, connections: u32) -> Pool<Sql> {
    sqlx::pool::PoolOptions::<Sql>::new()
        .max_connections(connections)
        .acquire_timeout(Duration::from_secs(20))
        .connect_lazy_with(options(url))
}

#[allow(clippy::unwrap_used)]
fn options(url: &str) -> <<Sql as sqlx::Database>::Connection as sqlx::Connection>::Options {
    url.parse().unwrap()
}

/// Asks the server about its processes. MySQL also lists running statements, and fails if they
/// contain bytes that are not text: the query is then repeated.
pub async fn query_processes<T>(ask: impl AsyncFn() -> Result<T, sqlx::Error>) -> T {
    let until = tokio::time::Instant::now() + SOON;
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(sqlx::Error::Database(error))
                if error.message().starts_with("Cannot convert string") && tokio::time::Instant::now() < until => {}
            Err(error) => panic!("the server does not tell of its processes: {error}"),
        }
    }
}

/// Returns a query for columns of the row `l` of a name, and for its expiry: the row's own, or the
/// one by the heartbeat of its client.
pub fn held(columns: &str, name: &str) -> String {
    format!(
        "SELECT {columns}, CASE WHEN c.beat_at + l.ttl > l.expires_at THEN c.beat_at + l.ttl ELSE l.expires_at END
           FROM sqlock_lease AS l LEFT JOIN sqlock_client AS c ON c.id = l.client WHERE l.name = '{name}'"
    )
}

/// The time between two arrivals in a queue that are certain to keep their order: longer than a
/// statement takes on a busy machine. The database computes the arrival of a waiter that has waited
/// without an entry from how long it has waited.
pub const ARRIVALS_APART: Duration = Duration::from_secs(3);

/// Returns whether another owner can acquire a name.
pub async fn is_free(locks: &Locks, name: &str) -> bool {
    let lease = locks.lease(name).ttl(LONG).owner(Owner::random()).try_acquire().await.expect("try");
    let is_free = lease.is_some();
    if let Some(lease) = lease {
        lease.release().await.expect("release");
    }
    is_free
}

/// Waits until the holder of a name has renewed its lease.
pub async fn renewed(locks: &Locks, before: &LeaseInfo) -> LeaseInfo {
    let renewed = async {
        loop {
            let now = locks.inspect(before.name.as_str()).await.expect("inspect").expect("held by somebody");
            if now.expires_at > before.expires_at {
                return now;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon("a renewal", renewed).await
}

/// Waits until the holder of a name has renewed its lease twice, so that renewals recur.
pub async fn renewed_twice(locks: &Locks, name: &str) -> LeaseInfo {
    let granted = locks.inspect(name).await.expect("inspect").expect("held by somebody");
    let once = renewed(locks, &granted).await;
    let twice = renewed(locks, &once).await;
    assert_eq!(twice.token, granted.token, "renewals leave the token alone");
    twice
}

/// Waits until a name has this number of waiters.
pub async fn until_waiters(locks: &Locks, name: &str, count: usize) {
    // A call of `until` could not be spawned: the compiler cannot show that its future is Send.
    let queued = async {
        while locks.waiters(name).await.expect("waiters").len() != count {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon(&format!("{count} waiters for {name}"), queued).await;
}
