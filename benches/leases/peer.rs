//! Peers: the server's own locks, the cheapest statement, and the port of a server.

use std::net::{Ipv4Addr, TcpListener};

use sqlx::mysql::MySqlConnection;
use sqlx::postgres::{PgAdvisoryLock, PgConnection};

use crate::floor::Bare;

/// A lock of the server, on its own connection. It writes nothing, has no token and ends with the
/// connection.
pub(crate) enum ServerLock {
    Postgres(PgConnection, PgAdvisoryLock),
    MySql(MySqlConnection),
}

impl ServerLock {
    /// Returns the lock of the server of this connection. `None`: SQLite has none.
    pub(crate) fn on(bare: Bare) -> Option<Self> {
        match bare {
            Bare::Postgres(conn) => Some(Self::Postgres(conn, PgAdvisoryLock::new("cycle"))),
            Bare::MySql(conn) => Some(Self::MySql(conn)),
            Bare::Sqlite(_) => None,
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Postgres(..) => "PgAdvisoryLock",
            Self::MySql(_) => "GET_LOCK",
        }
    }

    pub(crate) async fn acquire_and_release(&mut self) {
        match self {
            Self::Postgres(conn, lock) => {
                let guard = lock.acquire(&mut *conn).await.expect("acquire");
                guard.release_now().await.expect("release");
            }
            Self::MySql(conn) => {
                let lock = "SELECT CAST(GET_LOCK('cycle', 1) AS SIGNED)";
                let release = "SELECT CAST(RELEASE_LOCK('cycle') AS SIGNED)";
                for sql in [lock, release] {
                    let done: Option<i64> = sqlx::query_scalar(sql).fetch_one(&mut *conn).await.expect("a lock");
                    assert_eq!(done, Some(1), "{sql}");
                }
            }
        }
    }
}

impl Bare {
    /// Makes a round trip to the server that reads and writes nothing.
    pub(crate) async fn ping(&mut self) {
        let sql = "SELECT 1";
        match self {
            Self::Postgres(conn) => drop(sqlx::query(sql).fetch_all(conn).await.expect("a row")),
            Self::MySql(conn) => drop(sqlx::query(sql).fetch_all(conn).await.expect("a row")),
            Self::Sqlite(conn) => drop(sqlx::query(sql).fetch_all(conn).await.expect("a row")),
        }
    }
}

/// Returns a port of this machine that no server uses.
pub(crate) fn free_port() -> u16 {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    free.local_addr().expect("a port").port()
}
