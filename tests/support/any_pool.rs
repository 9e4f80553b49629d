//! A pool on the database of a URL, for the programs that tests start.

#![allow(unreachable_pub, reason = "included by several programs")]

use std::time::Duration;

use sqlock::{Locks, LocksBuilder};
use sqlx::pool::PoolOptions;

/// A pool of one of the databases that this program is built for.
#[derive(Clone)]
pub enum AnyPool {
    #[cfg(feature = "postgres")]
    Postgres(sqlx::PgPool),
    #[cfg(feature = "mysql")]
    MySql(sqlx::MySqlPool),
    #[cfg(feature = "sqlite")]
    Sqlite(sqlx::SqlitePool),
}

/// The same code for each type of pool.
macro_rules! on_pool {
    ($any:expr, $pool:ident => $work:expr) => {
        match $any {
            #[cfg(feature = "postgres")]
            AnyPool::Postgres($pool) => $work,
            #[cfg(feature = "mysql")]
            AnyPool::MySql($pool) => $work,
            #[cfg(feature = "sqlite")]
            AnyPool::Sqlite($pool) => $work,
        }
    };
}
pub(crate) use on_pool;

impl AnyPool {
    /// Opens a pool of at most `connections` connections, which are opened when they are needed.
    pub fn open(url: &str, connections: u32) -> Self {
        match url.split(':').next() {
            #[cfg(feature = "postgres")]
            Some("postgres") => Self::Postgres(options(connections).connect_lazy(url).expect(URL)),
            #[cfg(feature = "mysql")]
            Some("mysql") => Self::MySql(options(connections).connect_lazy(url).expect(URL)),
            #[cfg(feature = "sqlite")]
            Some("sqlite") => {
                let file: sqlx::sqlite::SqliteConnectOptions = url.parse().expect(URL);
                Self::Sqlite(options(connections).connect_lazy_with(file.busy_timeout(POOL_TIMEOUT)))
            }
            _ => panic!("this program was built without the database of {url}"),
        }
    }

    pub fn builder(&self) -> LocksBuilder {
        on_pool!(self, pool => Locks::builder(pool.clone()))
    }
}

const POOL_TIMEOUT: Duration = Duration::from_secs(30);
const URL: &str = "the URL can be parsed";

fn options<DB: sqlx::Database>(connections: u32) -> PoolOptions<DB> {
    PoolOptions::new().max_connections(connections).acquire_timeout(POOL_TIMEOUT)
}
