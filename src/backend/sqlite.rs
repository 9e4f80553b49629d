//! SQLite: one writer, so an upsert is the whole story and no row is ever locked.
//!
//! Every verb is one statement that begins with the write lock: no deferred transaction that reads first and is then
//! refused with `SQLITE_BUSY_SNAPSHOT`. Batches travel as JSON.

mod records;
mod rows;
mod session;

// Its macros are known to the modules below.
#[cfg(test)]
#[macro_use]
#[rustfmt::skip]
mod clauses;

#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, reason = "tests")]
mod differential;
#[cfg(test)]
#[allow(dead_code, reason = "what the executor will need")]
mod fence;
#[cfg(test)]
#[allow(dead_code, reason = "what the executor will need")]
mod heartbeat;
#[cfg(test)]
#[allow(dead_code, reason = "what the executor will need")]
mod lease;
#[cfg(test)]
#[allow(dead_code, reason = "what the executor will need")]
mod queue;
#[cfg(test)]
#[allow(dead_code, reason = "what the executor will need")]
mod store;

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sqlx::pool::PoolConnection;
use sqlx::sqlite::{SqliteArguments, SqliteConnectOptions, SqlitePoolOptions, SqliteRow, SqliteTransactionManager};
use sqlx::{
    ConnectOptions, Connection, Executor as _, Row as _, SqlSafeStr as _, Sqlite, SqliteConnection, SqlitePool,
    Transaction,
};
use sqlx_core::transaction::{TransactionManager as _, begin_ansi_transaction_sql};
use tokio::time::timeout;

use super::sealed::{Check, Fence, Verdict};
use super::{
    Anchoring, Backend, CLAIM, Claim, Granted, HandOff, Holding, Job, Kind, LastEviction, Listed, Mode, Names, PLACE,
    Pass, Place, Queue, Release, Renewal, Row, Session, Spot, Standing, Step, Ticket, To, Watched,
};
use super::{by_hold, in_order, matched, micros, readable, token};
use crate::error::{Error, Result};
use crate::name::LockName;
use crate::owner::Hold;
use crate::schema;
use crate::token::FencingToken;

/// The statements, laid out to be read.
#[rustfmt::skip]
mod sql {
use super::super::{place_columns, row_columns};

/// Microseconds since the epoch. `unixepoch('subsec')` would need SQLite 3.42. Read after the write lock was waited for.
macro_rules! now {
    () => {
        "CAST((julianday('now') - 2440587.5) * 86400000000.0 AS INTEGER)"
    };
}
pub(super) use now;

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
 WHERE (l.holds = '' OR l.expires_at <= excluded.acquired_at) AND l.waiting = 0
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
 WHERE (l.holds = '' OR l.expires_at <= excluded.acquired_at) AND l.waiting = 0 OR l.holds = excluded.holds
RETURNING name, token");

// ?1 JSON [[name, owner, hold, ttl], …]
pub(super) const JOIN: &str = concat!("
UPDATE sqlock_lease AS l
   SET holds = CASE WHEN instr(l.holds, c.value ->> 2) > 0 THEN l.holds ELSE l.holds || (c.value ->> 2) END,
       expires_at = max(l.expires_at, ", now!(), " + (c.value ->> 3))
  FROM json_each(?1) AS c
 WHERE l.name = c.value ->> 0 AND l.owner = c.value ->> 1
   AND l.holds NOT IN ('', '-', '+') AND l.expires_at > ", now!(), "
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
 WHERE l.name = r.name AND l.owner = r.owner AND (r.token = 0 OR l.token = r.token) AND instr(l.holds, r.hold) > 0
   AND (l.waiting = 0 OR l.holds <> r.hold OR r.least > 0)");

// The same for one: ?1 name, ?2 owner, ?3 hold, ?4 token or 0 for any, ?5 hold_at_least
pub(super) const RELEASE_ONE: &str = concat!("
UPDATE sqlock_lease
   SET expires_at = CASE WHEN holds <> ?3 THEN expires_at
                         ELSE max(", now!(), ", min(acquired_at, ", now!(), ") + ?5) END,
       holds = CASE WHEN holds = ?3 AND min(acquired_at, ", now!(), ") + ?5 > ", now!(), " THEN '-'
                    ELSE replace(holds, ?3, '') END
 WHERE name = ?1 AND owner = ?2 AND (?4 = 0 OR token = ?4) AND instr(holds, ?3) > 0
   AND (waiting = 0 OR holds <> ?3 OR ?5 > 0)");

// ?1 name, ?2 owner, ?3 hold, ?4 token; the next holder: ?5 owner, ?6 hold, ?7 ttl, ?8 holder, ?9 label
pub(super) const HAND_OFF_ONE: &str = concat!("
UPDATE sqlock_lease
   SET owner = ?5, holds = ?6, holder = ?8, label = ?9,
       token = CASE WHEN holds = ?6 THEN token ELSE max(token + 1, ", now!(), ") END,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + ?7
 WHERE name = ?1 AND (owner = ?2 AND holds = ?3 AND token = ?4 AND waiting = 0 OR holds = ?6)
RETURNING name, token");

// ?1 JSON [[name, owner, hold, token, owner', hold', ttl', holder', label'], …]
pub(super) const HAND_OFF: &str = concat!("
UPDATE sqlock_lease AS l
   SET owner = c.value ->> 4, holds = c.value ->> 5, holder = c.value ->> 7, label = c.value ->> 8,
       token = CASE WHEN l.holds = c.value ->> 5 THEN l.token ELSE max(l.token + 1, ", now!(), ") END,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + (c.value ->> 6)
  FROM json_each(?1) AS c
 WHERE l.name = c.value ->> 0
   AND (l.owner = c.value ->> 1 AND l.holds = c.value ->> 2 AND l.token = c.value ->> 3 AND l.waiting = 0
        OR l.holds = c.value ->> 5)               -- done already, the reply was lost
RETURNING name, token");

// ?1 JSON [name, …]
pub(super) const LOOK: &str = concat!("SELECT ", row_columns!(), ", ", now!(), " AS now
  FROM sqlock_lease WHERE name IN (SELECT value FROM json_each(?1))");

// ?1 prefix or name
macro_rules! list {
    ($condition:literal) => {
        concat!("
SELECT ", row_columns!("l"), ", ", now!(), " AS now, 0 AS units, 0 AS permits, ", waiters!(), "
  FROM sqlock_lease AS l
 WHERE ", $condition, " AND l.holds NOT IN ('', '+') AND l.expires_at > ", now!(), "
 UNION ALL
SELECT l.name, p.owner, p.hold, p.token, p.holder, p.label, p.acquired_at, p.expires_at, l.waiting, ", now!(), ",
       p.units, p.permits, ", waiters!(), "
  FROM sqlock_lease AS l JOIN sqlock_place AS p ON p.name = l.name
 WHERE ", $condition, " AND l.holds = '+' AND p.token > 0 AND p.expires_at > ", now!(), "
 ORDER BY 1, 4")
    };
}
macro_rules! waiters {
    () => {
        concat!("
       (SELECT count(*) FROM sqlock_place AS w WHERE w.name = l.name AND w.token = 0 AND w.expires_at > ", now!(), ")")
    };
}
pub(super) const LIST: &str = list!("substr(l.name, 1, length(?1)) = ?1");
pub(super) const LIST_ONE: &str = list!("l.name = ?1");

// ?1 JSON [[name, owner, hold, client, bell, units, permits, waited, holder, label], …], ?2 claim
pub(super) const ENQUEUE: &str = concat!("
BEGIN IMMEDIATE;
INSERT INTO sqlock_place (name, owner, hold, client, bell, units, permits, place, token, holder, label, acquired_at, expires_at)
SELECT value ->> 0, value ->> 1, value ->> 2, value ->> 3, value ->> 4, value ->> 5, value ->> 6,
       ", now!(), " - (value ->> 7), 0, value ->> 8, value ->> 9, 0, ", now!(), " + ?2
  FROM json_each(?1)
 WHERE true
    ON CONFLICT (name, hold) DO NOTHING;
INSERT INTO sqlock_lease AS l (name, owner, holds, token, holder, label, acquired_at, expires_at, waiting)
SELECT DISTINCT value ->> 0, '', '', ", now!(), ", '', '', ", now!(), ", ", now!(), ", ", now!(), "
  FROM json_each(?1)
 WHERE true
    ON CONFLICT (name) DO UPDATE SET waiting = max(l.waiting + 1, excluded.waiting);
COMMIT");

// ?1 name, ?2 limit
pub(super) const QUEUE: &str = concat!("
SELECT ", row_columns!("l"), ", ", now!(), " AS now, ", place_columns!("p"), "
  FROM sqlock_lease AS l LEFT JOIN (
       SELECT * FROM (SELECT * FROM sqlock_place WHERE name = ?1 AND token > 0)
        UNION ALL
       SELECT * FROM (SELECT * FROM sqlock_place WHERE name = ?1 AND token = 0 ORDER BY place LIMIT ?2)) AS p ON true
 WHERE l.name = ?1");

/// The name still stands as it was seen: ?1 name, ?2 token, ?3 holds, ?4 expires_at or -1 for any.
macro_rules! as_seen {
    () => {
        "l.name = ?1 AND l.token = ?2 AND l.holds = ?3 AND (?4 = -1 OR l.expires_at = ?4)"
    };
}
/// ?5 waiting as it was seen, ?6 whether nobody else waits.
macro_rules! still_waiting {
    () => {
        concat!("CASE WHEN l.waiting <> ?5 THEN l.waiting WHEN ?6 THEN 0 WHEN l.waiting = 0 THEN ", now!(), "
                        ELSE l.waiting END")
    };
}

pub(super) const PASS_TO_NOBODY: &str = concat!("
UPDATE sqlock_lease AS l SET waiting = ", still_waiting!(), " WHERE ", as_seen!());

// Whoever has joined the line since has to be let in instead.
pub(super) const PASS_TO_FREE: &str = concat!("
UPDATE sqlock_lease AS l
   SET owner = '', holds = '', expires_at = ", now!(), ", waiting = ", still_waiting!(), "
 WHERE ", as_seen!(), " AND l.waiting = ?5");

/// ?7 hold, ?8 lasts
macro_rules! pass_to_one {
    () => {
        concat!("
UPDATE sqlock_lease AS l
   SET owner = p.owner, holds = p.hold, holder = p.holder, label = p.label, token = max(l.token + 1, ", now!(), "),
       acquired_at = ", now!(), ", expires_at = ", now!(), " + ?8, waiting = ", still_waiting!(), "
  FROM sqlock_place AS p
 WHERE ", as_seen!(), " AND p.name = ?1 AND p.hold = ?7 AND p.token = 0
RETURNING holds, token;
DELETE FROM sqlock_place WHERE name = ?1 AND changes() = 1 AND (hold = ?7 OR token > 0);")
    };
}
pub(super) const PASS_TO_ONE: &str = concat!("BEGIN IMMEDIATE;", pass_to_one!(), "COMMIT");
pub(super) const PASS_TO_ONE_WITHIN: &str = pass_to_one!();

// ?1 JSON [[name, hold], …]
pub(super) const ALIGN: &str = "
WITH mine AS MATERIALIZED (
    SELECT p.name, p.hold, p.place FROM json_each(?1) AS s
      JOIN sqlock_place AS p ON p.name = s.value ->> 0 AND p.hold = s.value ->> 1 AND p.token = 0)
UPDATE sqlock_place AS p SET place = (SELECT max(place) FROM mine)
  FROM mine
 WHERE p.name = mine.name AND p.hold = mine.hold";

// ?7 JSON [[hold, lasts], …]. Whoever has joined the line since may be one of them. What is shared has no expiry of its own.
pub(super) const PASS_TO_MANY: &str = concat!("
BEGIN IMMEDIATE;
UPDATE sqlock_lease AS l
   SET owner = '', holds = '+', holder = '', label = '', token = max(l.token + 1, ", now!(), ") + json_array_length(?7) - 1,
       acquired_at = ", now!(), ", expires_at = 9223372036854775807, waiting = ", still_waiting!(), "
 WHERE ", as_seen!(), " AND l.waiting = ?5
   AND EXISTS (SELECT 1 FROM sqlock_place AS p JOIN json_each(?7) AS c ON p.hold = c.value ->> 0
                WHERE p.name = ?1 AND p.token = 0);
UPDATE sqlock_place
   SET token = (SELECT l.token FROM sqlock_lease AS l WHERE l.name = ?1) - json_array_length(?7) + 1 + c.key,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + (c.value ->> 1)
  FROM json_each(?7) AS c
 WHERE name = ?1 AND hold = c.value ->> 0 AND token = 0 AND changes() = 1
RETURNING hold, token;
COMMIT");

// ?1 name, ?2 JSON [hold, …]
pub(super) const BURY: &str = concat!("
DELETE FROM sqlock_place
 WHERE name = ?1 AND hold IN (SELECT value FROM json_each(?2)) AND expires_at <= ", now!());

// ?1 JSON [[name, hold], …]
pub(super) const LEAVE: &str = "
DELETE FROM sqlock_place WHERE (name, hold) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?1))
RETURNING hold";

// ?1 JSON [[name, hold], …], ?2 claim, ?3 bell
pub(super) const KEEP: &str = concat!("
UPDATE sqlock_place SET expires_at = ", now!(), " + ?2, bell = ?3
 WHERE (name, hold) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?1)) AND token = 0
RETURNING hold");

// ?1 JSON [[name, hold], …]. Where it stands in the line is counted in one pass over the line, however many places are asked for.
pub(super) const WATCH: &str = concat!("
SELECT ", row_columns!("l"), ", ", now!(), " AS now, c.value ->> 1, p.token, coalesce(q.ahead, 0)
  FROM json_each(?1) AS c JOIN sqlock_lease AS l ON l.name = c.value ->> 0
       LEFT JOIN sqlock_place AS p ON p.name = l.name AND p.hold = c.value ->> 1
       LEFT JOIN (SELECT w.name, w.hold, count(*) FILTER (WHERE w.expires_at > ", now!(), ") OVER (PARTITION BY w.name
                                 ORDER BY w.place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS ahead
                    FROM sqlock_place AS w WHERE w.name IN (SELECT value ->> 0 FROM json_each(?1)) AND w.token = 0) AS q
         ON q.name = p.name AND q.hold = p.hold");

// ?1 JSON [[name, owner, hold, token, ttl], …]. What has run out does not count any more, and others may have come in.
pub(super) const RENEW_SHARES: &str = concat!("
UPDATE sqlock_place AS p SET expires_at = ", now!(), " + (c.value ->> 4), owner = c.value ->> 1
  FROM json_each(?1) AS c
 WHERE p.name = c.value ->> 0 AND p.hold = c.value ->> 2 AND p.token = c.value ->> 3 AND p.expires_at > ", now!(), "
RETURNING hold");

// ?1 name, ?2 hold, ?3 token, ?4 the copy's hold, ?5 ttl
pub(super) const COPY: &str = concat!("
INSERT INTO sqlock_place (name, owner, hold, client, bell, units, permits, place, token, holder, label, acquired_at, expires_at)
SELECT name, owner, ?4, client, '', units, permits, place, token, holder, label, acquired_at, ", now!(), " + ?5
  FROM sqlock_place WHERE name = ?1 AND hold = ?2 AND token = ?3 AND expires_at > ", now!(), "
    ON CONFLICT (name, hold) DO UPDATE SET expires_at = excluded.expires_at");

// ?1 name, ?2 owner, ?3 hold, ?4 token; the share: ?5 client, ?6 units, ?7 permits, ?8 ttl, ?9 holder
pub(super) const DOWNGRADE: &str = concat!("
BEGIN IMMEDIATE;
INSERT INTO sqlock_place (name, owner, hold, client, bell, units, permits, place, token, holder, label, acquired_at, expires_at)
SELECT name, owner, ?3, ?5, '', ?6, ?7, ", now!(), ", token, ?9, label, acquired_at, ", now!(), " + ?8
  FROM sqlock_lease WHERE name = ?1 AND owner = ?2 AND holds = ?3 AND token = ?4;
UPDATE sqlock_lease SET owner = '', holds = '+', holder = '', label = '', expires_at = 9223372036854775807
 WHERE name = ?1 AND changes() = 1
RETURNING name;
COMMIT");

// ?1 name, ?2 owner, ?3 hold, ?4 token, ?5 the token that it is raised to. A token never goes down, whatever is asked for.
pub(super) const RAISE: &str = "
UPDATE sqlock_lease SET token = ?5
 WHERE name = ?1 AND owner = ?2 AND holds = ?3
   AND (token = ?4 AND ?4 < ?5 OR token = ?5)     -- done already, the reply was lost";

// ?1 name, ?2 token
pub(super) const NOTE_EVICTED_SHARE: &str = "
UPDATE sqlock_lease SET evicted = max(evicted, ?2)
 WHERE name = ?1 AND EXISTS (SELECT 1 FROM sqlock_place WHERE name = ?1 AND token = ?2 AND token > 0)";

// ?1 name
pub(super) const LAST_EVICTION: &str = "SELECT token, evicted FROM sqlock_lease WHERE name = ?1";

// ?1 name, ?2 token, ?3 ttl
pub(super) const EXTEND: &str = concat!("
UPDATE sqlock_lease SET expires_at = max(expires_at, ", now!(), " + ?3)
 WHERE name = ?1 AND token = ?2 AND holds NOT IN ('', '-', '+') AND expires_at > ", now!());

pub(super) const EXTEND_SHARE: &str = concat!("
UPDATE sqlock_place SET expires_at = max(expires_at, ", now!(), " + ?3)
 WHERE name = ?1 AND token = ?2 AND token > 0 AND owner <> '' AND expires_at > ", now!());

// ?1 name, ?2 token
pub(super) const EVICT_SHARE: &str = "DELETE FROM sqlock_place WHERE name = ?1 AND token = ?2 AND token > 0";

// ?1 name, ?2 token
pub(super) const EVICT: &str = concat!("UPDATE sqlock_lease SET owner = '', holds = '', evicted = max(evicted, token), expires_at = ", now!(), "
  WHERE name = ?1 AND token = ?2 AND holds NOT IN ('', '+')");

// ?1 retention, ?2 limit, ?3 retention or claim, whichever is longer. The outer condition repeats the inner one so that the statement is right by itself.
macro_rules! stale {
    () => {
        concat!("
       l.token < ", now!(), " - ?1 AND l.waiting < ", now!(), " - ?3
   AND (l.expires_at < ", now!(), " - ?1 OR l.holds = '+')
   AND NOT EXISTS (SELECT 1 FROM sqlock_place AS p WHERE p.name = l.name AND p.expires_at >= ", now!(), " - ?1)")
    };
}
pub(super) const SWEEP: &str = concat!("
DELETE FROM sqlock_lease AS l
 WHERE l.name IN (SELECT l.name FROM sqlock_lease AS l WHERE ", stale!(), " LIMIT ?2) AND ", stale!());

// ?1 retention, ?2 limit
pub(super) const SWEEP_PLACES: &str = concat!("
DELETE FROM sqlock_place
 WHERE (name, hold) IN (SELECT name, hold FROM sqlock_place WHERE expires_at < ", now!(), " - ?1 LIMIT ?2)
   AND expires_at < ", now!(), " - ?1");

// ?1 name, ?2 owner, ?3 hold, ?4 token. A write: it takes SQLite's only write lock, or finds that the transaction reads
// from an older snapshot, which SQLite refuses to turn into a writer.
pub(super) const FENCE: &str = "
UPDATE sqlock_lease SET token = token
 WHERE name = ?1 AND owner = ?2 AND instr(holds, ?3) > 0 AND token = ?4";

pub(super) const FENCE_SHARE: &str = "
UPDATE sqlock_lease SET token = token
 WHERE name = ?1 AND holds = '+'
   AND EXISTS (SELECT 1 FROM sqlock_place WHERE name = ?1 AND owner = ?2 AND hold = ?3 AND token = ?4)";
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
    fn place(&self) -> String {
        self.options.get_filename().display().to_string()
    }

    fn connect(&self) -> Job<'_, Box<dyn Session>> {
        Box::pin(async move {
            // Shorter than the pump's patience with one statement: it would rather ask again than give up the connection.
            let options = (*self.options).clone().busy_timeout(Duration::from_secs(2));
            let mut own = options.disable_statement_logging().connect().await?;
            let session = if is_in_memory(&mut own).await? {
                own.close().await?;
                SqliteSession::Lent(self.pool.clone(), None)
            } else {
                SqliteSession::Own(own, false)
            };
            Ok(Box::new(session) as Box<dyn Session>)
        })
    }

    fn useful_connections(&self) -> usize {
        1
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

    fn anchor(&self) -> Anchoring<'_> {
        Box::pin(session::open(&self.options))
    }
}

/// A database in memory lives in the caller's own connections and nowhere else.
async fn is_in_memory(conn: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    Ok(file_of(conn).await?.is_empty())
}

/// The file that the database is in, or nothing. As a table, the pragma would wait for whoever writes.
async fn file_of(conn: &mut SqliteConnection) -> Result<String, sqlx::Error> {
    let all = sqlx::query("PRAGMA database_list").fetch_all(conn).await?;
    let main = all.iter().find(|row| matches!(row.try_get("name"), Ok("main")));
    let file: Option<String> = main.map(|row| row.try_get("file")).transpose()?.flatten();
    Ok(file.unwrap_or_default())
}

/// Ends the transaction of a connection, also one that has ended already. SQLite ends a transaction by itself when the disk is
/// full, for example, and refuses the ROLLBACK that sqlx sends then; sqlx counts the transaction until a ROLLBACK succeeds, and
/// begins no other on this connection.
async fn settle(conn: &mut SqliteConnection) -> Result<(), sqlx::Error> {
    // A rollback may be on its way: that of a transaction that was dropped.
    conn.ping().await?;
    let depth = SqliteTransactionManager::get_transaction_depth(conn);
    if depth == 0 {
        return Ok(());
    }
    // Refused when no transaction is open.
    let _ = conn.execute("ROLLBACK").await;
    for depth in 0..depth {
        conn.execute(begin_ansi_transaction_sql(depth)).await?;
    }
    for _ in 0..depth {
        SqliteTransactionManager::rollback(conn).await?;
    }
    Ok(())
}

/// A connection of our own, or for a database in memory the caller's, borrowed verb by verb.
enum SqliteSession {
    /// And whether a transaction is open.
    Own(SqliteConnection, bool),
    /// And the transaction that is open.
    Lent(SqlitePool, Option<Transaction<'static, Sqlite>>),
}

/// The connection that a statement is sent on.
enum Lent<'s> {
    Ours(&'s mut SqliteConnection),
    Theirs(PoolConnection<Sqlite>),
}

impl Deref for Lent<'_> {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        match self {
            Self::Ours(conn) => conn,
            Self::Theirs(conn) => conn,
        }
    }
}

impl DerefMut for Lent<'_> {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        match self {
            Self::Ours(conn) => conn,
            Self::Theirs(conn) => conn,
        }
    }
}

impl SqliteSession {
    /// Sends a statement with one JSON argument; the cursor is drained, since an open one keeps the write lock.
    async fn rows(&mut self, sql: &'static str, batch: Vec<Value>) -> Result<Vec<SqliteRow>, sqlx::Error> {
        self.fetch(sqlx::query(sql).bind(Value::Array(batch).to_string())).await
    }

    async fn fetch(&mut self, query: SqliteQuery<'_>) -> Result<Vec<SqliteRow>, sqlx::Error> {
        query.fetch_all(&mut *self.conn().await?).await
    }

    /// The connection, borrowed if need be for less time than the pump has patience: an exhausted pool is known for what it is.
    async fn conn(&mut self) -> Result<Lent<'_>, sqlx::Error> {
        Ok(match self {
            Self::Own(conn, _) => Lent::Ours(conn),
            Self::Lent(_, Some(open)) => Lent::Ours(open),
            Self::Lent(pool, None) => Lent::Theirs(lend(pool).await?),
        })
    }

    fn in_transaction(&self) -> bool {
        matches!(self, Self::Own(_, true) | Self::Lent(_, Some(_)))
    }

    /// Sends several statements at once, from BEGIN to COMMIT.
    async fn transaction(&mut self, query: SqliteQuery<'_>) -> Result<Vec<SqliteRow>, sqlx::Error> {
        let mut conn = self.conn().await?;
        let rows = query.fetch_all(&mut *conn).await;
        if rows.is_err() {
            // It may not have begun: then there is nothing to roll back.
            let _ = sqlx::raw_sql("ROLLBACK").execute(&mut *conn).await;
        }
        rows
    }

    async fn execute(&mut self, query: SqliteQuery<'_>) -> Result<u64, sqlx::Error> {
        Ok(query.execute(&mut *self.conn().await?).await?.rows_affected())
    }
}

/// Less than the pump has patience.
const LEND_WITHIN: Duration = Duration::from_secs(2);

async fn lend(pool: &SqlitePool) -> Result<PoolConnection<Sqlite>, sqlx::Error> {
    let lend = async {
        let mut conn = pool.acquire().await?;
        if SqliteTransactionManager::get_transaction_depth(&conn) > 0 {
            settle(&mut conn).await?;
        }
        Ok(conn)
    };
    timeout(LEND_WITHIN, lend).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
}

type SqliteQuery<'q> = sqlx::query::Query<'q, Sqlite, SqliteArguments>;

impl Session for SqliteSession {
    fn acquire<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            if let [c] = claims {
                let query = sqlx::query(sql::ACQUIRE_ONE).bind(c.name.as_str());
                let rows = self.fetch(bind_claim(query, c)).await?;
                return Ok(in_order(claims, |c| &c.name, granted(rows)?));
            }
            let json = Value::from_iter(claims.iter().map(claim)).to_string();
            self.execute(sqlx::query(sql::ACQUIRE).bind(&json)).await?;
            let rows = self.fetch(sqlx::query(sql::GRANTED).bind(&json)).await?;
            let tokens: &str = rows.first().ok_or(sqlx::Error::RowNotFound)?.try_get(0)?;
            let tokens: Value = serde_json::from_str(tokens).map_err(|e| sqlx::Error::Decode(e.into()))?;
            let granted = |c: &Claim| match &tokens[c.name.as_str()] {
                Value::Null => Ok(None),
                granted => match granted.as_i64() {
                    Some(granted) => Ok(token(granted)),
                    None => Err(sqlx::Error::Decode(format!("{granted} is no token").into())),
                },
            };
            claims.iter().map(granted).collect()
        })
    }

    fn join<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            let rows = self.rows(sql::JOIN, claims.iter().map(claim).collect()).await?;
            Ok(in_order(claims, |c| &c.name, granted(rows)?))
        })
    }

    fn renew<'a>(&'a mut self, renewals: &'a [Renewal]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let batch = renewals.iter().map(|r| renewal(r, r.holding.owner.to_string())).collect();
            let affected = self.execute(sqlx::query(sql::RENEW).bind(Value::Array(batch).to_string())).await?;
            let batch: Vec<_> =
                renewals.iter().map(|r| &r.holding).map(|h| (&h.name, h.owner, h.hold, Some(h.token))).collect();
            let matched = matched(self, affected, &batch, Standing::Held).await?;
            Ok(matched.into_iter().map(|matched| matched == Some(true)).collect())
        })
    }

    fn release<'a>(&'a mut self, releases: &'a [Release]) -> Job<'a, Vec<Option<bool>>> {
        Box::pin(async move {
            if let [r] = releases {
                let query = sqlx::query(sql::RELEASE_ONE)
                    .bind(r.name.as_str())
                    .bind(r.owner.to_string())
                    .bind(r.hold.mark())
                    .bind(r.token.map_or(0, FencingToken::get))
                    .bind(micros(r.hold_at_least));
                return Ok(vec![Some(self.execute(query).await? > 0)]);
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
                return Ok(in_order(hand_offs, |h| &h.from.name, granted(rows)?));
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
            Ok(in_order(hand_offs, |h| &h.from.name, granted(rows)?))
        })
    }

    fn look<'a>(&'a mut self, names: &'a [LockName]) -> Job<'a, Vec<Row>> {
        Box::pin(async move {
            let rows = self.rows(sql::LOOK, names.iter().map(|name| json!(name.as_str())).collect()).await?;
            rows.iter().map(row).collect()
        })
    }

    fn list<'a>(&'a mut self, names: &'a Names) -> Job<'a, Vec<Listed>> {
        Box::pin(async move {
            let query = match names {
                Names::BeginningWith(prefix) => sqlx::query(sql::LIST).bind(prefix),
                Names::Just(name) => sqlx::query(sql::LIST_ONE).bind(name.as_str()),
            };
            let rows = self.fetch(query).await?;
            let listed = |r: &SqliteRow| {
                let mode = Mode::of_columns(r.try_get(10)?, r.try_get(11)?);
                Ok(Listed { row: row(r)?, mode, waiters: r.try_get(12)? })
            };
            let listed = rows.iter().map(listed);
            match names {
                Names::BeginningWith(_) => Ok(readable(listed).collect()),
                Names::Just(_) => listed.collect(),
            }
        })
    }

    fn enqueue<'a>(&'a mut self, tickets: &'a [Ticket]) -> Job<'a, Vec<Option<Duration>>> {
        Box::pin(async move {
            let batch = Value::from_iter(tickets.iter().map(|ticket| {
                let Ticket { claim: c, client, bell, .. } = ticket;
                let (units, permits) = c.mode.columns();
                json!([
                    c.name.as_str(),
                    c.owner.to_string(),
                    c.hold.mark(),
                    &**client,
                    &**bell,
                    units,
                    permits,
                    ticket.waited(),
                    &*c.holder,
                    &*c.label,
                ])
            }));
            let query = sqlx::query(sql::ENQUEUE).bind(batch.to_string()).bind(micros(PLACE));
            self.transaction(query).await?;
            // To look is cheap here.
            Ok(vec![None; tickets.len()])
        })
    }

    fn queue<'a>(&'a mut self, name: &'a LockName, limit: u32) -> Job<'a, Option<Queue>> {
        Box::pin(async move {
            let rows = self.fetch(sqlx::query(sql::QUEUE).bind(name.as_str()).bind(limit)).await?;
            let Some(first) = rows.first() else {
                return Ok(None);
            };
            let places: Vec<Place> = rows.iter().filter_map(|row| place(row).transpose()).collect::<Result<_, _>>()?;
            Ok(Some(Queue::of(row(first)?, places.into_iter(), limit)))
        })
    }

    fn pass<'a>(&'a mut self, pass: &'a Pass) -> Job<'a, Option<Vec<Granted>>> {
        Box::pin(async move {
            let bind_seen = |query: SqliteQuery<'a>| {
                query
                    .bind(pass.name.as_str())
                    .bind(pass.seen.token)
                    .bind(&*pass.seen.holds)
                    .bind(pass.seen.expires_at.unwrap_or(-1))
                    .bind(pass.seen.waiting)
                    .bind(pass.last)
            };
            let rows = match &pass.to {
                To::Nobody | To::Free => {
                    let sql = if matches!(pass.to, To::Free) { sql::PASS_TO_FREE } else { sql::PASS_TO_NOBODY };
                    let changed = self.execute(bind_seen(sqlx::query(sql))).await?;
                    return Ok((changed > 0).then(Vec::new));
                }
                To::One(hold, lasts) => {
                    let to_one = |sql| bind_seen(sqlx::query(sql)).bind(hold).bind(micros(*lasts));
                    if self.in_transaction() {
                        self.fetch(to_one(sql::PASS_TO_ONE_WITHIN)).await?
                    } else {
                        self.transaction(to_one(sql::PASS_TO_ONE)).await?
                    }
                }
                To::More(next) | To::Several(next) => {
                    let next = Value::from_iter(next.iter().map(|(hold, lasts)| json!([hold, micros(*lasts)])));
                    self.transaction(bind_seen(sqlx::query(sql::PASS_TO_MANY)).bind(next.to_string())).await?
                }
            };
            let granted: Vec<Granted> =
                granted(rows)?.into_iter().map(|(hold, token)| Granted { hold, token }).collect();
            Ok((!granted.is_empty()).then_some(granted))
        })
    }

    fn bury<'a>(&'a mut self, name: &'a LockName, dead: &'a [String]) -> Job<'a, ()> {
        Box::pin(async move {
            self.execute(sqlx::query(sql::BURY).bind(name.as_str()).bind(json!(dead).to_string())).await?;
            Ok(())
        })
    }

    fn leave<'a>(&'a mut self, places: &'a [Spot]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let rows = self.rows(sql::LEAVE, places.iter().map(spot).collect()).await?;
            by_hold(places.iter().map(|spot| spot.hold), rows.iter().map(|row| row.try_get(0)))
        })
    }

    fn keep<'a>(&'a mut self, places: &'a [Spot], bell: &'a str) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let batch = Value::from_iter(places.iter().map(spot)).to_string();
            let rows = self.fetch(sqlx::query(sql::KEEP).bind(batch).bind(micros(PLACE)).bind(bell)).await?;
            by_hold(places.iter().map(|spot| spot.hold), rows.iter().map(|row| row.try_get(0)))
        })
    }

    fn watch<'a>(&'a mut self, places: &'a [Spot]) -> Job<'a, Vec<Option<Watched>>> {
        Box::pin(async move {
            let rows = self.rows(sql::WATCH, places.iter().map(spot).collect()).await?;
            let watched = |r: &SqliteRow| {
                Ok((r.try_get(10)?, Watched { row: row(r)?, token: r.try_get(11)?, ahead: r.try_get(12)? }))
            };
            let mut watched: HashMap<String, Watched> = readable(rows.iter().map(watched)).collect();
            Ok(places.iter().map(|spot| watched.remove(&spot.hold.mark())).collect())
        })
    }

    fn renew_shares<'a>(&'a mut self, renewals: &'a [Renewal]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let rows = self.rows(sql::RENEW_SHARES, renewals.iter().map(|r| renewal(r, r.owner())).collect()).await?;
            by_hold(renewals.iter().map(|r| r.holding.hold), rows.iter().map(|row| row.try_get(0)))
        })
    }

    fn copy<'a>(&'a mut self, from: &'a Holding, to: Hold, ttl: Duration) -> Job<'a, bool> {
        Box::pin(async move {
            let query = sqlx::query(sql::COPY)
                .bind(from.name.as_str())
                .bind(from.hold.mark())
                .bind(from.token.get())
                .bind(to.mark())
                .bind(micros(ttl));
            Ok(self.execute(query).await? > 0)
        })
    }

    fn downgrade<'a>(&'a mut self, from: &'a Holding, to: &'a Ticket) -> Job<'a, bool> {
        Box::pin(async move {
            let (units, permits) = to.claim.mode.columns();
            let query = sqlx::query(sql::DOWNGRADE)
                .bind(from.name.as_str())
                .bind(from.owner.to_string())
                .bind(from.hold.mark())
                .bind(from.token.get())
                .bind(&*to.client)
                .bind(units)
                .bind(permits)
                .bind(micros(to.claim.ttl))
                .bind(&*to.claim.holder);
            Ok(!self.transaction(query).await?.is_empty())
        })
    }

    fn raise<'a>(&'a mut self, h: &'a Holding, to: FencingToken) -> Job<'a, bool> {
        Box::pin(async move {
            let query = sqlx::query(sql::RAISE)
                .bind(h.name.as_str())
                .bind(h.owner.to_string())
                .bind(h.hold.mark())
                .bind(h.token.get())
                .bind(to.get());
            Ok(self.execute(query).await? > 0)
        })
    }

    fn evict<'a>(&'a mut self, name: &'a LockName, token: FencingToken) -> Job<'a, bool> {
        Box::pin(async move {
            let query = |sql| sqlx::query(sql).bind(name.as_str()).bind(token.get());
            if self.execute(query(sql::EVICT)).await? > 0 {
                return Ok(true);
            }
            self.execute(query(sql::NOTE_EVICTED_SHARE)).await?;
            Ok(self.execute(query(sql::EVICT_SHARE)).await? > 0)
        })
    }

    fn last_eviction<'a>(&'a mut self, name: &'a LockName) -> Job<'a, Option<LastEviction>> {
        Box::pin(async move {
            let rows = self.fetch(sqlx::query(sql::LAST_EVICTION).bind(name.as_str())).await?;
            let Some(row) = rows.first() else {
                return Ok(None);
            };
            Ok(Some(LastEviction { token: row.try_get(0)?, evicted: row.try_get(1)? }))
        })
    }

    fn extend<'a>(&'a mut self, name: &'a LockName, token: FencingToken, ttl: Duration) -> Job<'a, bool> {
        Box::pin(async move {
            for sql in [sql::EXTEND, sql::EXTEND_SHARE] {
                let query = sqlx::query(sql).bind(name.as_str()).bind(token.get()).bind(micros(ttl));
                if self.execute(query).await? > 0 {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }

    fn record<'a>(&'a mut self, errand: &'a super::records::Errand) -> Job<'a, super::records::Findings> {
        Box::pin(self.carry(errand))
    }

    fn sweep(&mut self, retention: Duration, limit: u32) -> Job<'_, u64> {
        Box::pin(async move {
            self.execute(sqlx::query(sql::SWEEP_PLACES).bind(micros(retention)).bind(limit)).await?;
            let longer = micros(retention.max(CLAIM));
            self.execute(sqlx::query(sql::SWEEP).bind(micros(retention)).bind(limit).bind(longer)).await
        })
    }

    fn transact(&mut self, step: Step) -> Job<'_, ()> {
        Box::pin(async move {
            match self {
                Self::Own(conn, open) => match step {
                    Step::Begin => {
                        conn.execute("BEGIN IMMEDIATE").await?;
                        *open = true;
                    }
                    Step::Commit => {
                        conn.execute("COMMIT").await?;
                        *open = false;
                    }
                    Step::RollBack => {
                        *open = false;
                        // Whatever is the matter, this connection must not be used with a transaction open.
                        conn.execute("ROLLBACK").await.map_err(|_| sqlx::Error::WorkerCrashed)?;
                    }
                },
                Self::Lent(pool, open) => match (step, open.take()) {
                    (Step::Begin, _) => {
                        let begin = Transaction::begin(lend(pool).await?, Some("BEGIN IMMEDIATE".into_sql_str()));
                        let begun = timeout(LEND_WITHIN, begin).await;
                        *open = Some(begun.unwrap_or(Err(sqlx::Error::PoolTimedOut))?);
                    }
                    (Step::Commit, Some(begun)) => begun.commit().await?,
                    (Step::RollBack, Some(begun)) => begun.rollback().await?,
                    (_, None) => {}
                },
            }
            Ok(())
        })
    }

    fn align<'a>(&'a mut self, places: &'a [Spot]) -> Job<'a, ()> {
        Box::pin(async move {
            self.execute(sqlx::query(sql::ALIGN).bind(Value::from_iter(places.iter().map(spot)).to_string())).await?;
            Ok(())
        })
    }

    fn close(self: Box<Self>) -> Job<'static, ()> {
        Box::pin(async move {
            match *self {
                Self::Own(conn, _) => conn.close().await,
                Self::Lent(..) => Ok(()),
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

fn renewal(Renewal { holding: h, ttl, .. }: &Renewal, owner: String) -> Value {
    json!([h.name.as_str(), owner, h.hold.mark(), h.token.get(), micros(*ttl)])
}

fn spot(spot: &Spot) -> Value {
    json!([spot.name.as_str(), spot.hold.mark()])
}

fn granted(rows: Vec<SqliteRow>) -> Result<Vec<(String, FencingToken)>, sqlx::Error> {
    let mut granted = Vec::new();
    for row in &rows {
        if let Some(token) = token(row.try_get(1)?) {
            granted.push((row.try_get(0)?, token));
        }
    }
    Ok(granted)
}

fn row(row: &SqliteRow) -> Result<Row, sqlx::Error> {
    Ok(Row {
        name: row.try_get(0)?,
        owner: row.try_get(1)?,
        holds: row.try_get(2)?,
        token: row.try_get(3)?,
        holder: row.try_get(4)?,
        label: row.try_get(5)?,
        acquired_at: row.try_get(6)?,
        expires_at: row.try_get(7)?,
        waiting: row.try_get(8)?,
        now: row.try_get(9)?,
    })
}

/// The place beside a row of QUEUE, if there is one.
fn place(row: &SqliteRow) -> Result<Option<Place>, sqlx::Error> {
    let Some(hold) = row.try_get(10)? else {
        return Ok(None);
    };
    Ok(Some(Place {
        hold,
        owner: row.try_get(11)?,
        bell: row.try_get(12)?,
        mode: Mode::of_columns(row.try_get(13)?, row.try_get(14)?),
        place: row.try_get(15)?,
        token: row.try_get(16)?,
        holder: row.try_get(17)?,
        label: row.try_get(18)?,
        expires_at: row.try_get(19)?,
    }))
}

impl super::Database for Sqlite {}

impl Fence for Sqlite {
    const KIND: Kind = Kind::Sqlite;

    fn fence<'a>(
        conn: &'a mut SqliteConnection,
        check: &'a Check,
    ) -> Pin<Box<dyn Future<Output = Result<Verdict, sqlx::Error>> + Send + 'a>> {
        Box::pin(async move {
            let fenced = sqlx::query(if check.shared { sql::FENCE_SHARE } else { sql::FENCE })
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
