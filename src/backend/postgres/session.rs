//! Session locks: advisory locks, on a connection that is verified to be one session of one server.

use std::pin::pin;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgRow};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, Row as _};
use tokio::time::timeout;

use crate::backend::StoreFuture;
use crate::backend::session::{SESSION_TIMEOUT, SessionHolder, SessionLocks, another_session, session_key};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::name::LockName;

/// The statements.
#[rustfmt::skip]
mod sql {
// Not every role may see the age of the session.
pub(super) const IDENTIFY: &str = "
SELECT pg_backend_pid(), pg_is_in_recovery(), coalesce(current_schema(), ''), current_setting('server_version_num')::int,
       coalesce((SELECT (extract(epoch FROM clock_timestamp() - backend_start) * 1000000)::bigint
                   FROM pg_stat_activity WHERE pid = pg_backend_pid()), 0)";

pub(super) const PID: &str = "SELECT pg_backend_pid()";

// $1 the session, $2 key. CASE: a lock that a pooler requested from another session would stay with
// that session.
pub(super) const TRY_LOCK: &str = "SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_try_advisory_lock($2) END";
pub(super) const TRY_LOCK_SHARED: &str = "SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_try_advisory_lock_shared($2) END";
pub(super) const UNLOCK: &str = "SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_advisory_unlock($2) END";
pub(super) const UNLOCK_SHARED: &str = "SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_advisory_unlock_shared($2) END";
pub(super) const SCOPE: &str = "SELECT coalesce(current_schema(), '')";

// $1 key. Not every role may see the client of another role's session.
pub(super) const HOLDERS: &str = "
SELECT l.pid, l.mode = 'ShareLock', a.usename::text, host(a.client_addr), nullif(a.application_name, '')
  FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
 WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND l.classid::bigint << 32 | l.objid::bigint = $1
 ORDER BY a.backend_start, l.pid";

pub(super) const UNLOCK_ALL: &str = "SELECT CASE WHEN pg_backend_pid() = $1 THEN pg_advisory_unlock_all()::text END";
}

/// How much older than the connection its session may seem: the server's clock is read twice and
/// may be set in between.
const AGE_TOLERANCE: Duration = Duration::from_millis(500);

/// How often the probe checks whether two connections share one session.
const PROBES: usize = 4;

/// How long the second connection keeps its session while the first one gets no answer.
const PROBE_TIMEOUT: Duration = Duration::from_millis(500);

/// Opens a connection and verifies that it has a session of its own, on the primary.
pub(super) async fn open(options: &PgConnectOptions) -> Result<Box<dyn SessionLocks>> {
    let failed = |error| Error::from_sqlx("open a connection for session locks", error);
    let options = options.clone().disable_statement_logging();
    let requested = Moment::now();
    // Both at once: a distant server takes a second for each.
    let (mut conn, other) = tokio::try_join!(options.connect(), options.connect()).map_err(failed)?;
    let row = fetch_row(&mut conn, sql::IDENTIFY).await.map_err(failed)?;
    let read = || Ok((row.try_get(0)?, row.try_get(1)?, row.try_get(2)?, row.try_get(3)?, row.try_get(4)?));
    let (pid, is_standby, schema, version, age): (i32, bool, String, i32, i64) = read().map_err(failed)?;
    let age = Duration::from_micros(u64::try_from(age).unwrap_or(0));
    if is_standby {
        return Err(Error::Unsupported {
            what: "a session lock",
            reason: "this server is a standby: its advisory locks are not those of the primary; connect to the primary",
        });
    }
    if age > Moment::now().since(requested) + AGE_TOLERANCE
        || !is_direct(&mut conn, other, pid).await.map_err(failed)?
    {
        return Err(Error::Unsupported {
            what: "a session lock",
            reason: "a pooler shares one session of the database among many clients; connect to the database directly, \
                     or take a lease, which needs no session",
        });
    }
    set_timeouts(&mut conn, pid, version).await.map_err(failed)?;
    Ok(Box::new(PostgresSessionLocks { conn, pid, schema }))
}

/// Reads which sessions hold the lock.
pub(super) async fn holders(options: &PgConnectOptions, name: &LockName) -> Result<Vec<SessionHolder>> {
    read_holders(options, name).await.map_err(|error| Error::from_sqlx("list the holders of a session lock", error))
}

async fn read_holders(options: &PgConnectOptions, name: &LockName) -> Result<Vec<SessionHolder>, sqlx::Error> {
    let mut conn = options.clone().disable_statement_logging().connect().await?;
    let schema: String = fetch_row(&mut conn, sql::SCOPE).await?.try_get(0)?;
    // A pooler may mix up prepared statements.
    let rows = sqlx::query(sql::HOLDERS).bind(key(&schema, name)).persistent(false).fetch_all(&mut conn).await?;
    let _ = conn.close().await;
    let holder = |row: &PgRow| {
        Ok(SessionHolder {
            id: row.try_get::<i32, _>(0)?.into(),
            shared: row.try_get(1)?,
            user: row.try_get(2)?,
            address: row.try_get(3)?,
            application: row.try_get(4)?,
        })
    };
    rows.iter().map(holder).collect()
}

/// Returns the number of an advisory lock, which has 64 bits and is valid within one database.
fn key(schema: &str, name: &LockName) -> i64 {
    let [a, b, c, d, e, f, g, h, ..] = session_key(schema, name);
    i64::from_be_bytes([a, b, c, d, e, f, g, h])
}

/// Returns whether the connection has a session of its own, and no pooler lends it one for each
/// transaction. If a pooler passes this probe, every later statement detects another session.
async fn is_direct(conn: &mut PgConnection, mut other: PgConnection, pid: i32) -> Result<bool, sqlx::Error> {
    let mut probes = 0;
    while probes < PROBES {
        // A pooler cannot lend the session of this open transaction to the first connection.
        let other_pid: i32 = fetch_row(&mut other, "BEGIN; SELECT pg_backend_pid()").await?.try_get(0)?;
        if other_pid == pid {
            return Ok(false);
        }
        let answer = {
            let mut requested = pin!(fetch_row(&mut *conn, sql::PID));
            match timeout(PROBE_TIMEOUT, &mut requested).await {
                Ok(answer) => {
                    probes += 1;
                    answer
                }
                // A pooler may have no session left while the second connection keeps one.
                Err(_) => {
                    sqlx::raw_sql("ROLLBACK").execute(&mut other).await?;
                    requested.await
                }
            }
        };
        if answer?.try_get::<i32, _>(0)? != pid {
            return Ok(false);
        }
        sqlx::raw_sql("ROLLBACK").execute(&mut other).await?;
        // A pooler that lends the session that was returned last, as PgBouncer does, would lend
        // each connection its former one again; in this order, one that was returned first would.
        if probes % 2 == 1 && fetch_row(&mut *conn, sql::PID).await?.try_get::<i32, _>(0)? != pid {
            return Ok(false);
        }
    }
    // An error on closing does not matter: the probe is complete.
    let _ = other.close().await;
    Ok(true)
}

/// Sets when the server ends a silent session: whatever is configured, not before the time on which
/// holders rely, and not much later. (`client_connection_check_interval` has no effect: it is for
/// running statements, and statements here never wait.)
async fn set_timeouts(conn: &mut PgConnection, pid: i32, version: i32) -> Result<(), sqlx::Error> {
    let limit = SESSION_TIMEOUT.as_millis();
    // The network timeout is a little longer: 10 s and three probes, 2 s apart. 0 would mean the
    // system's default, hours.
    let mut settings = vec![
        ("tcp_keepalives_idle", 10),
        ("tcp_keepalives_interval", 2),
        ("tcp_keepalives_count", 3),
        ("tcp_user_timeout", limit + 1000),
    ];
    // https://www.postgresql.org/docs/current/runtime-config-client.html#GUC-IDLE-SESSION-TIMEOUT
    if version >= 140_000 {
        settings.push(("idle_session_timeout", limit));
    }
    let set = |(name, value)| format!("set_config('{name}', '{value}', false)");
    let set = settings.into_iter().map(set).collect::<Vec<_>>().join(", ");
    fetch_row(conn, AssertSqlSafe(format!("SELECT {set} WHERE pg_backend_pid() = {pid}"))).await?;
    Ok(())
}

/// Sends a statement and returns its only row. The statement is not prepared: a pooler may mix up
/// prepared ones.
async fn fetch_row(conn: &mut PgConnection, sql: impl sqlx::SqlSafeStr) -> Result<PgRow, sqlx::Error> {
    sqlx::raw_sql(sql).fetch_all(conn).await?.pop().ok_or_else(another_session)
}

struct PostgresSessionLocks {
    conn: PgConnection,
    pid: i32,
    schema: String,
}

impl PostgresSessionLocks {
    async fn run(&mut self, sql: &'static str, key: i64) -> Result<bool, sqlx::Error> {
        let answer: Option<bool> = sqlx::query_scalar(sql).bind(self.pid).bind(key).fetch_one(&mut self.conn).await?;
        answer.ok_or_else(another_session)
    }
}

impl SessionLocks for PostgresSessionLocks {
    fn session_timeout(&self) -> Option<Duration> {
        Some(SESSION_TIMEOUT)
    }

    fn try_lock<'a>(&'a mut self, name: &'a LockName, shared: bool) -> StoreFuture<'a, bool> {
        let key = key(&self.schema, name);
        Box::pin(self.run(if shared { sql::TRY_LOCK_SHARED } else { sql::TRY_LOCK }, key))
    }

    fn unlock<'a>(&'a mut self, name: &'a LockName, shared: bool) -> StoreFuture<'a, bool> {
        let key = key(&self.schema, name);
        Box::pin(self.run(if shared { sql::UNLOCK_SHARED } else { sql::UNLOCK }, key))
    }

    fn ping(&mut self) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let pid: i32 = sqlx::query_scalar(sql::PID).fetch_one(&mut self.conn).await?;
            if pid == self.pid { Ok(()) } else { Err(another_session()) }
        })
    }

    fn close(mut self: Box<Self>) -> StoreFuture<'static, ()> {
        Box::pin(async move {
            let all = sqlx::query_scalar(sql::UNLOCK_ALL).bind(self.pid);
            let _: Option<String> = all.fetch_one(&mut self.conn).await?;
            self.conn.close().await
        })
    }
}
