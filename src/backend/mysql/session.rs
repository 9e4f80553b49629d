//! Session locks: GET_LOCK, on a connection of its own to the only server.

use std::time::Duration;

use sqlx::mysql::MySqlConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, MySqlConnection};
use tokio::time::sleep;

use super::store::number;
use super::{ServerInfo, configure};
use crate::backend::session::{SESSION_TIMEOUT, SessionHolder, SessionLocks, another_session, session_key};
use crate::backend::{StoreFuture, hex};
use crate::error::{Error, Result};
use crate::name::LockName;

/// MySQL: the statement of some session has bytes that are no text, and MySQL cannot list any
/// session until that statement ends.
const CANNOT_CONVERT: u16 = 3854;

/// How often the sessions are read.
const MAX_SESSION_READS: u32 = 50;

/// The statements.
#[rustfmt::skip]
mod sql {
pub(super) const IDENTIFY: &str = "SELECT CAST(CONNECTION_ID() AS SIGNED), COALESCE(DATABASE(), '')";

// Not every server has these variables.
pub(super) const GALERA: &str = "
SHOW GLOBAL VARIABLES WHERE Variable_name = 'wsrep_on' AND Value = 'ON'
                         OR Variable_name = 'wsrep_provider' AND Value NOT IN ('', 'none')";

// Selects a value. Binds the session first. NULL: another session answered, or the server is
// read-only. A primary that becomes a replica keeps its sessions with their locks, while clients of
// the new primary are granted the same names.
macro_rules! select_on_primary {
    ($value:literal) => {
        concat!("SELECT IF(CONNECTION_ID() = ?, IF(@@GLOBAL.read_only IN ('0', 'OFF'), ", $value, ", NULL), NULL)")
    };
}

// Bind order: the session, lock. Does not wait. NULL also when an error occurred in the session.
pub(super) const TRY_LOCK: &str = select_on_primary!("CAST(GET_LOCK(?, 0) AS SIGNED)");
pub(super) const UNLOCK: &str = select_on_primary!("CAST(COALESCE(RELEASE_LOCK(?), 0) AS SIGNED)");
pub(super) const PING: &str = select_on_primary!("CAST(1 AS SIGNED)");
// Bind order: lock. NULL: it is free.
pub(super) const HOLDER: &str = "SELECT CAST(IS_USED_LOCK(?) AS SIGNED)";

// Bind order: the session. Not every user may see the sessions of others.
pub(super) const SESSION: &str = "
SELECT CAST(user AS CHAR), CAST(host AS CHAR) FROM information_schema.processlist WHERE id = ?";

pub(super) const SCOPE: &str = "SELECT COALESCE(DATABASE(), '')";

pub(super) const UNLOCK_ALL: &str = "SELECT IF(CONNECTION_ID() = ?, CAST(RELEASE_ALL_LOCKS() AS SIGNED), NULL)";
}

/// Opens a connection to a server whose locks exclude all clients.
pub(super) async fn open(options: &MySqlConnectOptions) -> Result<Box<dyn SessionLocks>> {
    let failed = |error| Error::from_sqlx("open a connection for session locks", error);
    let mut conn = options.clone().disable_statement_logging().connect().await.map_err(failed)?;
    let server = configure(&mut conn).await.map_err(failed)?;
    if let Some(reason) = unsupported_reason(&mut conn, &server).await.map_err(failed)? {
        return Err(Error::Unsupported { what: "a session lock", reason });
    }
    // The time after which the server ends a silent session.
    let seconds = SESSION_TIMEOUT.as_secs();
    conn.execute(AssertSqlSafe(format!("SET SESSION wait_timeout = {seconds}"))).await.map_err(failed)?;
    let (id, database) = sqlx::query_as(sql::IDENTIFY).fetch_one(&mut conn).await.map_err(failed)?;
    Ok(Box::new(MySqlSessionLocks { conn, id, database }))
}

/// Reads which session holds the lock.
pub(super) async fn holders(options: &MySqlConnectOptions, name: &LockName) -> Result<Vec<SessionHolder>> {
    read_holders(options, name).await.map_err(|error| Error::from_sqlx("list the holders of a session lock", error))
}

async fn read_holders(options: &MySqlConnectOptions, name: &LockName) -> Result<Vec<SessionHolder>, sqlx::Error> {
    let mut conn = options.clone().disable_statement_logging().connect().await?;
    let database: String = sqlx::query_scalar(sql::SCOPE).fetch_one(&mut conn).await?;
    let holder: Option<i64> = sqlx::query_scalar(sql::HOLDER).bind(key(&database, name)).fetch_one(&mut conn).await?;
    let mut holders = Vec::new();
    if let Some(id) = holder {
        let (user, address) = read_session(&mut conn, id).await?.unzip();
        // The number behind the last colon is the port.
        let address = address.map(|host| host.rsplit_once(':').map_or(host.clone(), |(host, _)| host.to_owned()));
        holders.push(SessionHolder { id, shared: false, user, address, application: None });
    }
    let _ = conn.close().await;
    Ok(holders)
}

/// Reads the user and the address of a session.
async fn read_session(conn: &mut MySqlConnection, id: i64) -> Result<Option<(String, String)>, sqlx::Error> {
    for _ in 0..MAX_SESSION_READS {
        match sqlx::query_as(sql::SESSION).bind(id).fetch_optional(&mut *conn).await {
            Err(error) if number(&error) == Some(CANNOT_CONVERT) => sleep(Duration::from_millis(10)).await,
            read => return read,
        }
    }
    Ok(None)
}

/// Returns the name of the lock. Names are valid on the whole server, ignore case, and have 64
/// characters at most.
fn key(database: &str, name: &LockName) -> String {
    let mut key = format!("sqlock:{}", hex(&session_key(database, name)));
    key.truncate(64);
    key
}

/// Returns why a lock on this server would not exclude other clients. Locks of this kind are not
/// replicated. The state of a member of a group is not asked: a lock would not survive its change.
async fn unsupported_reason(
    conn: &mut MySqlConnection,
    server: &ServerInfo,
) -> Result<Option<&'static str>, sqlx::Error> {
    if server.is_read_only {
        return Ok(Some("this server is read-only, as replicas are: its locks are not those of the primary"));
    }
    if server.may_be_galera && is_on_galera(conn).await? {
        return Ok(Some(
            "GET_LOCK of one node of a Galera cluster does not exclude clients of the others; take a lease",
        ));
    }
    Ok(server.is_in_group.then_some(
        "GET_LOCK of one member of a replication group does not exclude clients of the others; take a lease",
    ))
}

/// Returns whether the server is a node of a Galera cluster, with a provider that is switched on.
pub(super) async fn is_on_galera(conn: &mut MySqlConnection) -> Result<bool, sqlx::Error> {
    Ok(sqlx::raw_sql(sql::GALERA).fetch_all(conn).await?.len() == 2)
}

struct MySqlSessionLocks {
    conn: MySqlConnection,
    id: i64,
    database: String,
}

impl MySqlSessionLocks {
    async fn run(&mut self, sql: &'static str, key: String) -> Result<bool, sqlx::Error> {
        let answer: Option<i64> = sqlx::query_scalar(sql).bind(self.id).bind(key).fetch_one(&mut self.conn).await?;
        Ok(answer.ok_or_else(another_session)? == 1)
    }
}

impl SessionLocks for MySqlSessionLocks {
    fn session_timeout(&self) -> Option<Duration> {
        Some(SESSION_TIMEOUT)
    }

    /// MySQL has no shared locks, and the request for one is refused earlier.
    fn try_lock<'a>(&'a mut self, name: &'a LockName, _shared: bool) -> StoreFuture<'a, bool> {
        let key = key(&self.database, name);
        Box::pin(self.run(sql::TRY_LOCK, key))
    }

    fn unlock<'a>(&'a mut self, name: &'a LockName, _shared: bool) -> StoreFuture<'a, bool> {
        let key = key(&self.database, name);
        Box::pin(self.run(sql::UNLOCK, key))
    }

    fn ping(&mut self) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let answer: Option<i64> = sqlx::query_scalar(sql::PING).bind(self.id).fetch_one(&mut self.conn).await?;
            answer.map(drop).ok_or_else(another_session)
        })
    }

    fn close(mut self: Box<Self>) -> StoreFuture<'static, ()> {
        Box::pin(async move {
            let all = sqlx::query_scalar(sql::UNLOCK_ALL).bind(self.id);
            let _: Option<i64> = all.fetch_one(&mut self.conn).await?;
            self.conn.close().await
        })
    }
}
