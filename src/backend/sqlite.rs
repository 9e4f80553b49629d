//! SQLite: one writer, so an upsert is the whole story and no row is ever locked.
//!
//! Every verb is one statement that begins with the write lock: no deferred transaction that reads first and is then
//! refused with `SQLITE_BUSY_SNAPSHOT`. Batches travel as JSON.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sqlx::pool::PoolConnection;
use sqlx::sqlite::{SqliteArguments, SqliteConnectOptions, SqlitePoolOptions, SqliteRow};
use sqlx::{ConnectOptions, Connection, Row as _, Sqlite, SqliteConnection, SqlitePool};

use super::sealed::{Check, Fence, Verdict};
use super::{Backend, Claim, HandOff, Job, Kind, Release, Renewal, Row, Session, Standing};
use super::{in_order, matched, micros, token};
use crate::error::{Error, Result};
use crate::name::LockName;
use crate::schema;
use crate::token::FencingToken;

/// The statements, laid out to be read.
#[rustfmt::skip]
mod sql {
use super::super::row_columns;

/// Microseconds since the epoch. `unixepoch('subsec')` would need SQLite 3.42. Read after the write lock was waited for.
macro_rules! now {
    () => {
        "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)"
    };
}

// ?1 JSON [[name, owner, hold, ttl, holder, label], …]. Without RETURNING: sqlx passes every row from one thread to
// another, which costs more than asking afterwards for all of them in one (GRANTED).
pub(super) const ACQUIRE: &str = concat!("
INSERT INTO sqlock_lease AS l (name, owner, holds, token, holder, label, acquired_at, expires_at)
SELECT name, owner, hold, now, holder, label, now, now + ttl
  FROM (SELECT value ->> 0 AS name, value ->> 1 AS owner, value ->> 2 AS hold, value ->> 3 AS ttl, value ->> 4 AS holder,
               value ->> 5 AS label, ", now!(), " AS now
          FROM json_each(?1))
 WHERE true                                       -- the parser takes ON for a join without it
    ON CONFLICT (name) DO UPDATE
   SET owner = excluded.owner, holds = excluded.holds, holder = excluded.holder, label = excluded.label,
       token = CASE WHEN l.holds = excluded.holds THEN l.token ELSE max(l.token + 1, excluded.token) END,
       acquired_at = excluded.acquired_at, expires_at = excluded.expires_at
 WHERE l.holds = '' OR l.expires_at <= excluded.acquired_at
    OR l.holds = excluded.holds                   -- our own, sent again because the reply was lost");

// ?1 the JSON of ACQUIRE. The claims that stand in their rows, as one JSON object of tokens by name.
pub(super) const GRANTED: &str = "
SELECT json_group_object(l.name, l.token)
  FROM json_each(?1) AS c JOIN sqlock_lease AS l ON l.name = c.value ->> 0
 WHERE l.holds = c.value ->> 2";

// The same for one claim, three times as fast: ?1 name, ?2 owner, ?3 hold, ?4 ttl, ?5 holder, ?6 label
pub(super) const ACQUIRE_ONE: &str = concat!("
INSERT INTO sqlock_lease AS l (name, owner, holds, token, holder, label, acquired_at, expires_at)
VALUES (?1, ?2, ?3, ", now!(), ", ?5, ?6, ", now!(), ", ", now!(), " + ?4)
    ON CONFLICT (name) DO UPDATE
   SET owner = excluded.owner, holds = excluded.holds, holder = excluded.holder, label = excluded.label,
       token = CASE WHEN l.holds = excluded.holds THEN l.token ELSE max(l.token + 1, excluded.token) END,
       acquired_at = excluded.acquired_at, expires_at = excluded.expires_at
 WHERE l.holds = '' OR l.expires_at <= excluded.acquired_at OR l.holds = excluded.holds
RETURNING name, token");

// ?1 JSON [[name, owner, hold, ttl], …]
pub(super) const JOIN: &str = concat!("
UPDATE sqlock_lease AS l
   SET holds = CASE WHEN instr(l.holds, c.value ->> 2) > 0 THEN l.holds ELSE l.holds || (c.value ->> 2) END,
       expires_at = max(l.expires_at, ", now!(), " + (c.value ->> 3))
  FROM json_each(?1) AS c
 WHERE l.name = c.value ->> 0 AND l.owner = c.value ->> 1
   AND l.holds NOT IN ('', '-') AND l.expires_at > ", now!(), "
RETURNING name, token");

// ?1 JSON [[name, owner, hold, token, ttl], …]
pub(super) const RENEW: &str = concat!("
WITH r AS MATERIALIZED (
    SELECT value ->> 0 AS name, value ->> 1 AS owner, value ->> 2 AS hold, value ->> 3 AS token, value ->> 4 AS ttl,
           ", now!(), " AS now
      FROM json_each(?1))
UPDATE sqlock_lease AS l                          -- with other holds of the same owner beside it, the latest expiry counts
   SET expires_at = max(CASE WHEN l.holds = r.hold THEN 0 ELSE l.expires_at END, r.now + r.ttl)
  FROM r
 WHERE l.name = r.name AND l.owner = r.owner AND l.token = r.token AND instr(l.holds, r.hold) > 0");

// ?1 JSON [[name, owner, hold, token or 0 for any, hold_at_least], …]
pub(super) const RELEASE: &str = concat!("
WITH r AS MATERIALIZED (
    SELECT value ->> 0 AS name, value ->> 1 AS owner, value ->> 2 AS hold, value ->> 3 AS token, value ->> 4 AS least,
           ", now!(), " AS now
      FROM json_each(?1))
UPDATE sqlock_lease AS l
   SET expires_at = CASE WHEN l.holds <> r.hold THEN l.expires_at
                         ELSE max(r.now, min(l.acquired_at, r.now) + r.least) END,
       holds = CASE WHEN l.holds = r.hold AND min(l.acquired_at, r.now) + r.least > r.now THEN '-'
                    ELSE replace(l.holds, r.hold, '') END
  FROM r
 WHERE l.name = r.name AND l.owner = r.owner AND (r.token = 0 OR l.token = r.token) AND instr(l.holds, r.hold) > 0");

// The same for one: ?1 name, ?2 owner, ?3 hold, ?4 token or 0 for any, ?5 hold_at_least
pub(super) const RELEASE_ONE: &str = concat!("
UPDATE sqlock_lease
   SET expires_at = CASE WHEN holds <> ?3 THEN expires_at
                         ELSE max(", now!(), ", min(acquired_at, ", now!(), ") + ?5) END,
       holds = CASE WHEN holds = ?3 AND min(acquired_at, ", now!(), ") + ?5 > ", now!(), " THEN '-'
                    ELSE replace(holds, ?3, '') END
 WHERE name = ?1 AND owner = ?2 AND (?4 = 0 OR token = ?4) AND instr(holds, ?3) > 0");

// The same for one: ?1 name, ?2 owner, ?3 hold, ?4 token; the next holder: ?5 owner, ?6 hold, ?7 ttl, ?8 holder, ?9 label
pub(super) const HAND_OFF_ONE: &str = concat!("
UPDATE sqlock_lease
   SET owner = ?5, holds = ?6, holder = ?8, label = ?9,
       token = CASE WHEN holds = ?6 THEN token ELSE max(token + 1, ", now!(), ") END,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + ?7
 WHERE name = ?1 AND (owner = ?2 AND holds = ?3 AND token = ?4 OR holds = ?6)
RETURNING name, token");

// ?1 JSON [[name, owner, hold, token, owner', hold', ttl', holder', label'], …]
pub(super) const HAND_OFF: &str = concat!("
UPDATE sqlock_lease AS l
   SET owner = c.value ->> 4, holds = c.value ->> 5, holder = c.value ->> 7, label = c.value ->> 8,
       token = CASE WHEN l.holds = c.value ->> 5 THEN l.token ELSE max(l.token + 1, ", now!(), ") END,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + (c.value ->> 6)
  FROM json_each(?1) AS c
 WHERE l.name = c.value ->> 0
   AND (l.owner = c.value ->> 1 AND l.holds = c.value ->> 2 AND l.token = c.value ->> 3
        OR l.holds = c.value ->> 5)               -- done already, the reply was lost
RETURNING name, token");

// ?1 JSON [name, …]
pub(super) const LOOK: &str = concat!("SELECT ", row_columns!(), ", ", now!(), " AS now
  FROM sqlock_lease WHERE name IN (SELECT value FROM json_each(?1))");

// ?1 prefix
pub(super) const LIST: &str = concat!("SELECT ", row_columns!(), ", ", now!(), " AS now
  FROM sqlock_lease WHERE substr(name, 1, length(?1)) = ?1 AND holds <> '' AND expires_at > ", now!(), " ORDER BY name");

// ?1 name, ?2 token
pub(super) const EVICT: &str = concat!("UPDATE sqlock_lease SET owner = '', holds = '', expires_at = ", now!(), "
  WHERE name = ?1 AND token = ?2 AND holds <> ''");

// ?1 retention, ?2 limit. The outer condition repeats the inner one so that the statement is right by itself.
pub(super) const SWEEP: &str = concat!("
DELETE FROM sqlock_lease
 WHERE name IN (SELECT name FROM sqlock_lease
                 WHERE expires_at < ", now!(), " - ?1 AND token < ", now!(), " - ?1 LIMIT ?2)
   AND expires_at < ", now!(), " - ?1 AND token < ", now!(), " - ?1");

// ?1 name, ?2 owner, ?3 hold, ?4 token. A write: it takes SQLite's only write lock, or finds that the transaction reads
// from an older snapshot, which SQLite refuses to turn into a writer.
pub(super) const FENCE: &str = "
UPDATE sqlock_lease SET token = token
 WHERE name = ?1 AND owner = ?2 AND instr(holds, ?3) > 0 AND token = ?4";
}

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
}

impl Backend for SqliteBackend {
    fn connect(&self) -> Job<'_, Box<dyn Session>> {
        Box::pin(async move {
            // Shorter than the pump's patience with one statement: it would rather ask again than give up the connection.
            let options = (*self.options).clone().busy_timeout(Duration::from_secs(2));
            let mut own = options.disable_statement_logging().connect().await?;
            let session = if is_in_memory(&mut own).await? {
                own.close().await?;
                SqliteSession::Lent(self.pool.clone())
            } else {
                SqliteSession::Own(own)
            };
            Ok(Box::new(session) as Box<dyn Session>)
        })
    }

    fn useful_connections(&self) -> usize {
        1
    }

    fn skips_locked_rows(&self) -> bool {
        false
    }

    fn migrate(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(async move {
            let one =
                schema::patiently(|| SqlitePoolOptions::new().max_connections(1).connect_with((*self.options).clone()))
                    .await?;
            let in_memory = match one.acquire().await {
                Ok(mut conn) => is_in_memory(&mut conn).await,
                Err(error) => Err(error),
            };
            let migrated = match in_memory {
                Ok(true) => schema::migrate(&self.pool, schema::SQLITE).await,
                Ok(false) => schema::migrate(&one, schema::SQLITE).await,
                Err(error) => Err(Error::from_sqlx("migrate", error)),
            };
            one.close().await;
            migrated
        })
    }
}

/// A database in memory lives in the caller's own connections and nowhere else.
async fn is_in_memory(conn: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    let file: String = sqlx::query_scalar("SELECT coalesce(file, '') FROM pragma_database_list WHERE name = 'main'")
        .fetch_one(conn)
        .await?;
    Ok(file.is_empty())
}

/// A connection of our own, or for a database in memory the caller's, borrowed verb by verb.
enum SqliteSession {
    Own(SqliteConnection),
    Lent(SqlitePool),
}

impl SqliteSession {
    /// Sends a statement with one JSON argument; the cursor is drained, since an open one keeps the write lock.
    async fn rows(&mut self, sql: &'static str, batch: Vec<Value>) -> Result<Vec<SqliteRow>, sqlx::Error> {
        self.fetch(sqlx::query(sql).bind(Value::Array(batch).to_string())).await
    }

    async fn fetch(&mut self, query: SqliteQuery<'_>) -> Result<Vec<SqliteRow>, sqlx::Error> {
        match self {
            Self::Own(conn) => query.fetch_all(conn).await,
            Self::Lent(pool) => query.fetch_all(&mut *lend(pool).await?).await,
        }
    }

    async fn execute(&mut self, query: SqliteQuery<'_>) -> Result<u64, sqlx::Error> {
        let done = match self {
            Self::Own(conn) => query.execute(conn).await?,
            Self::Lent(pool) => query.execute(&mut *lend(pool).await?).await?,
        };
        Ok(done.rows_affected())
    }
}

/// Borrows a connection, for less time than the pump has patience, so that an exhausted pool is known for what it is.
async fn lend(pool: &SqlitePool) -> Result<PoolConnection<Sqlite>, sqlx::Error> {
    tokio::time::timeout(Duration::from_secs(2), pool.acquire()).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
}

type SqliteQuery<'q> = sqlx::query::Query<'q, Sqlite, SqliteArguments>;

impl Session for SqliteSession {
    fn acquire<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            if let [c] = claims {
                let query = sqlx::query(sql::ACQUIRE_ONE).bind(c.name.as_str());
                let rows = self.fetch(bind_claim(query, c)).await?;
                return Ok(in_order(claims, |c| &c.name, granted(rows)));
            }
            let json = Value::from_iter(claims.iter().map(claim)).to_string();
            self.execute(sqlx::query(sql::ACQUIRE).bind(&json)).await?;
            let rows = self.fetch(sqlx::query(sql::GRANTED).bind(&json)).await?;
            let tokens = rows.first().map_or(Ok(Value::Null), |row| serde_json::from_str(row.get(0)));
            let tokens = tokens.map_err(|e| sqlx::Error::Decode(Box::new(e)))?;
            Ok(claims.iter().map(|c| token(tokens[c.name.as_str()].as_i64()?)).collect())
        })
    }

    fn join<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            let rows = self.rows(sql::JOIN, claims.iter().map(claim).collect()).await?;
            Ok(in_order(claims, |c| &c.name, granted(rows)))
        })
    }

    fn renew<'a>(&'a mut self, renewals: &'a [Renewal]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let batch = renewals
                .iter()
                .map(|Renewal { holding: h, ttl }| {
                    json!([h.name.as_str(), h.owner.to_string(), h.hold.mark(), h.token.get(), micros(*ttl)])
                })
                .collect();
            let affected = self.execute(sqlx::query(sql::RENEW).bind(Value::Array(batch).to_string())).await?;
            let batch: Vec<_> =
                renewals.iter().map(|r| &r.holding).map(|h| (&h.name, h.owner, h.hold, Some(h.token))).collect();
            matched(self, affected, &batch, Standing::Held).await
        })
    }

    fn release<'a>(&'a mut self, releases: &'a [Release]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            if let [r] = releases {
                let query = sqlx::query(sql::RELEASE_ONE)
                    .bind(r.name.as_str())
                    .bind(r.owner.to_string())
                    .bind(r.hold.mark())
                    .bind(r.token.map_or(0, FencingToken::get))
                    .bind(micros(r.hold_at_least));
                return Ok(vec![self.execute(query).await? > 0]);
            }
            let batch = releases
                .iter()
                .map(|r| {
                    let token = r.token.map_or(0, FencingToken::get);
                    json!([r.name.as_str(), r.owner.to_string(), r.hold.mark(), token, micros(r.hold_at_least)])
                })
                .collect();
            let affected = self.execute(sqlx::query(sql::RELEASE).bind(Value::Array(batch).to_string())).await?;
            let batch: Vec<_> = releases.iter().map(|r| (&r.name, r.owner, r.hold, r.token)).collect();
            matched(self, affected, &batch, Standing::Released).await
        })
    }

    fn hand_off<'a>(&'a mut self, hand_offs: &'a [HandOff]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            if let [HandOff { from, to }] = hand_offs {
                let query = sqlx::query(sql::HAND_OFF_ONE)
                    .bind(from.name.as_str())
                    .bind(from.owner.to_string())
                    .bind(from.hold.mark())
                    .bind(from.token.get());
                let rows = self.fetch(bind_claim(query, to)).await?;
                return Ok(in_order(hand_offs, |h| &h.from.name, granted(rows)));
            }
            let batch = hand_offs
                .iter()
                .map(|HandOff { from, to }| {
                    json!([
                        from.name.as_str(),
                        from.owner.to_string(),
                        from.hold.mark(),
                        from.token.get(),
                        to.owner.to_string(),
                        to.hold.mark(),
                        micros(to.ttl),
                        &*to.holder,
                        &*to.label,
                    ])
                })
                .collect();
            let rows = self.rows(sql::HAND_OFF, batch).await?;
            Ok(in_order(hand_offs, |h| &h.from.name, granted(rows)))
        })
    }

    fn look<'a>(&'a mut self, names: &'a [LockName]) -> Job<'a, Vec<Row>> {
        Box::pin(async move {
            let rows = self.rows(sql::LOOK, names.iter().map(|name| json!(name.as_str())).collect()).await?;
            Ok(rows.iter().map(row).collect())
        })
    }

    fn list<'a>(&'a mut self, prefix: &'a str) -> Job<'a, Vec<Row>> {
        Box::pin(async move {
            let rows = self.fetch(sqlx::query(sql::LIST).bind(prefix)).await?;
            Ok(rows.iter().map(row).collect())
        })
    }

    fn evict<'a>(&'a mut self, name: &'a LockName, token: FencingToken) -> Job<'a, bool> {
        Box::pin(async move {
            let evicted = self.execute(sqlx::query(sql::EVICT).bind(name.as_str()).bind(token.get())).await?;
            Ok(evicted > 0)
        })
    }

    fn sweep(&mut self, retention: Duration, limit: u32) -> Job<'_, u64> {
        Box::pin(self.execute(sqlx::query(sql::SWEEP).bind(micros(retention)).bind(limit)))
    }

    fn close(self: Box<Self>) -> Job<'static, ()> {
        Box::pin(async move {
            match *self {
                Self::Own(conn) => conn.close().await,
                Self::Lent(_) => Ok(()),
            }
        })
    }
}

/// Binds what a new holder brings along: owner, hold, ttl, holder, label.
fn bind_claim<'q>(query: SqliteQuery<'q>, c: &'q Claim) -> SqliteQuery<'q> {
    query.bind(c.owner.to_string()).bind(c.hold.mark()).bind(micros(c.ttl)).bind(&*c.holder).bind(&*c.label)
}

fn claim(c: &Claim) -> Value {
    json!([c.name.as_str(), c.owner.to_string(), c.hold.mark(), micros(c.ttl), &*c.holder, &*c.label])
}

fn granted(rows: Vec<SqliteRow>) -> impl Iterator<Item = (String, FencingToken)> {
    rows.into_iter().filter_map(|row| Some((row.get(0), token(row.get(1))?)))
}

fn row(row: &SqliteRow) -> Row {
    Row {
        name: row.get(0),
        owner: row.get(1),
        holds: row.get(2),
        token: row.get(3),
        holder: row.get(4),
        label: row.get(5),
        acquired_at: row.get(6),
        expires_at: row.get(7),
        now: row.get(8),
    }
}

impl super::Database for Sqlite {}

impl Fence for Sqlite {
    const KIND: Kind = Kind::Sqlite;

    fn fence<'a>(
        conn: &'a mut SqliteConnection,
        check: &'a Check,
    ) -> Pin<Box<dyn Future<Output = Result<Verdict, sqlx::Error>> + Send + 'a>> {
        Box::pin(async move {
            let fenced = sqlx::query(sql::FENCE)
                .bind(&check.name)
                .bind(&check.owner)
                .bind(&check.mark)
                .bind(check.token)
                .execute(conn)
                .await;
            match fenced {
                Ok(done) if done.rows_affected() == 1 => Ok(Verdict::Fenced),
                Ok(_) => Ok(Verdict::Superseded),
                // SQLITE_BUSY_SNAPSHOT: it has read, and somebody has committed since.
                Err(sqlx::Error::Database(e)) if e.code().as_deref() == Some("517") => Ok(Verdict::StaleSnapshot),
                Err(error) => Err(error),
            }
        })
    }
}
