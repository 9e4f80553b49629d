//! MySQL and MariaDB: conditional updates of rows that stay, at READ COMMITTED, with the token in the OK packet.
//!
//! InnoDB has no UPDATE … SKIP LOCKED, but a derived table may lock its rows that way and be joined to the update: one
//! statement that takes a name or leaves it, and never waits for the fence of somebody's open transaction.
//! A row is inserted only when a plain SELECT has shown that it is missing, and never deleted by a release: inserts that
//! meet deletes on one key are what InnoDB answers with deadlocks.

mod records;
mod rows;
mod session;

// Their macros are parts of the statements in the modules below.
#[cfg(test)]
#[allow(dead_code, reason = "what the executor will need")]
#[macro_use]
mod store;
#[cfg(test)]
#[allow(dead_code, reason = "what the executor will need")]
#[macro_use]
mod script;

#[cfg(test)]
#[allow(dead_code, reason = "what the executor will need")]
mod acquire;
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
mod release;

use std::collections::{BTreeSet, HashMap};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use sqlx::migrate::MigrateError;
use sqlx::mysql::{
    MySqlArguments, MySqlConnectOptions, MySqlDatabaseError, MySqlPoolOptions, MySqlQueryResult, MySqlRow,
};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, MySql, MySqlConnection, MySqlPool, Row as _};

use super::sealed::{Check, Fence, Verdict};
use super::{
    Anchoring, Backend, CLAIM, Claim, Granted, HandOff, Holding, Job, Kind, LastEviction, Listed, Mode, NOTED, Names,
    PLACE, Pass, Place, Queue, Release, Renewal, Row, Session, Spot, Standing, Step, Ticket, To, UNSEEN, Watched,
};
use super::{by_hold, held_for, matched, micros, readable, token};
use crate::error::{Error, Fault, Result, not_writable};
use crate::name::LockName;
use crate::owner::Hold;
use crate::schema;
use crate::token::FencingToken;

/// The statements, laid out to be read.
#[rustfmt::skip]
mod sql {
use super::super::{place_columns, row_columns};

/// Microseconds since the epoch; the session's time zone is UTC. SYSDATE is read when the row is locked, NOW and
/// UTC_TIMESTAMP when the statement began.
/// <https://dev.mysql.com/doc/refman/8.4/en/date-and-time-functions.html#function_sysdate>
macro_rules! now {
    () => {
        "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)"
    };
}
pub(super) use now;

// For a new session; what the server is follows: whether it can be written (told by a number, or by one of several words), and
// whether it may be a node of a Galera cluster. /*M! … */ is for MariaDB's eyes.
pub(super) const SETTLE: &str = "
SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
SET SESSION autocommit = 1, innodb_lock_wait_timeout = 1;
SELECT CAST(@@GLOBAL.read_only NOT IN ('0', 'OFF') AS SIGNED),
       CAST(@@version_comment LIKE '%wsrep%' OR @@version_comment LIKE '%XtraDB Cluster%'
            /*M! OR EXISTS (SELECT 1 FROM information_schema.GLOBAL_VARIABLES
                             WHERE VARIABLE_NAME = 'WSREP_ON' AND VARIABLE_VALUE = 'ON') */ AS SIGNED)";

// Not before something was read can what was written elsewhere be missing. A causal read: 1 is for SELECT and SHOW.
// https://mariadb.com/kb/en/galera-cluster-system-variables/#wsrep_sync_wait
pub(super) const SYNC_READS: &str = "SET SESSION wsrep_sync_wait = 1";

pub(super) const IS_READY: &str = "SHOW GLOBAL STATUS WHERE Variable_name = 'wsrep_ready' AND Value = 'ON'";

/// One claim a line: hex of name, owner, hold, ttl, holder, label. Names travel as hex because they are bytes; texts have
/// their character set named, since MariaDB would take the database's. The lines stand in a derived table of their own,
/// since MySQL refuses to lock a JSON_TABLE together with the tables that it is joined to (3569).
macro_rules! claims {
    () => {
        "(SELECT * FROM JSON_TABLE(?, '$[*]' COLUMNS (
             name   VARCHAR(510) PATH '$[0]', owner VARCHAR(32) PATH '$[1]', hold VARCHAR(40) PATH '$[2]',
             ttl    BIGINT       PATH '$[3]',
             holder VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[4]',
             label  VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[5]')) AS j LIMIT 100000) AS c"
    };
}

/// One holding a line: hex of name, owner, hold, token, microseconds (ttl, or hold_at_least).
macro_rules! holdings {
    () => {
        "JSON_TABLE(?, '$[*]' COLUMNS (
             name  VARCHAR(510) PATH '$[0]', owner VARCHAR(32) PATH '$[1]',
             hold  VARCHAR(40) CHARACTER SET ascii PATH '$[2]',
             token BIGINT       PATH '$[3]', time  BIGINT      PATH '$[4]')) AS r"
    };
}

// Bind order: hold, name, hold, owner, hold, holder, label, ttl.
// The derived table locks the fence row and the lease row, or finds them locked and is empty. LIMIT keeps MySQL from
// merging it into the update, which would lose SKIP LOCKED and compute the token twice. The order of the joins is the
// order of the locks, fence row first: in different orders two claims could each skip what the other has locked.
// https://dev.mysql.com/doc/refman/8.4/en/derived-table-optimization.html
pub(super) const ACQUIRE: &str = concat!("
UPDATE (SELECT s.name, IF(s.holds = ?, s.token, GREATEST(s.token + 1, g.token + 1, ", now!(), ")) AS token
          FROM sqlock_fence AS g STRAIGHT_JOIN sqlock_lease AS s ON s.name = g.name
         WHERE g.name = ?
           AND ((s.holds = '' OR s.expires_at <= ", now!(), ") AND s.waiting = 0
                OR s.holds = ?)                   -- our own, sent again because the reply was lost
         LIMIT 1 FOR UPDATE SKIP LOCKED) AS q
  STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name STRAIGHT_JOIN sqlock_fence AS f ON f.name = q.name
   SET l.owner = ?, l.holds = ?, l.holder = ?, l.label = ?,
       l.token = LAST_INSERT_ID(q.token), f.token = q.token,
       l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + ?");

pub(super) const ACQUIRE_MANY: &str = concat!("
UPDATE (SELECT STRAIGHT_JOIN s.name, c.owner, c.hold, c.holder, c.label, c.ttl,
               IF(s.holds = c.hold, s.token, GREATEST(s.token + 1, g.token + 1, ", now!(), ")) AS token
          FROM ", claims!(), "
          JOIN sqlock_fence AS g ON g.name = UNHEX(c.name)
          JOIN sqlock_lease AS s ON s.name = g.name
         WHERE (s.holds = '' OR s.expires_at <= ", now!(), ") AND s.waiting = 0 OR s.holds = c.hold
         LIMIT 100000 FOR UPDATE SKIP LOCKED) AS q
  STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name STRAIGHT_JOIN sqlock_fence AS f ON f.name = q.name
   SET l.owner = q.owner, l.holds = q.hold, l.holder = q.holder, l.label = q.label, l.token = q.token, f.token = q.token,
       l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + q.ttl");

// A new name, first half: the fence row, whose token nobody has been granted yet. Bind order: JSON claims.
pub(super) const CREATE_FENCE: &str = concat!("
INSERT IGNORE INTO sqlock_fence (name, token)
SELECT UNHEX(c.name), ", now!(), " FROM ", claims!(), " ORDER BY 1");

// Second half: whoever inserts the lease row is granted the fence row's token. The fence row is locked meanwhile: read
// from a snapshot, it could be one that a sweep is deleting, whose token somebody has had. Bind order: JSON claims.
pub(super) const CREATE_LEASE: &str = concat!("
INSERT IGNORE INTO sqlock_lease (name, owner, holds, token, holder, label, acquired_at, expires_at)
SELECT STRAIGHT_JOIN f.name, c.owner, c.hold, f.token, c.holder, c.label, ", now!(), ", ", now!(), " + c.ttl
  FROM ", claims!(), " JOIN sqlock_fence AS f ON f.name = UNHEX(c.name)
 ORDER BY 1 FOR UPDATE SKIP LOCKED");

// Bind order: hold, hold, ttl, name, owner. Assignments run from left to right.
pub(super) const JOIN: &str = concat!("
UPDATE sqlock_lease
   SET holds = IF(LOCATE(?, holds) > 0, holds, CONCAT(holds, ?)),
       token = LAST_INSERT_ID(token),
       expires_at = GREATEST(expires_at, ", now!(), " + ?)
 WHERE name = ? AND owner = ? AND holds NOT IN ('', '-', '+') AND expires_at > ", now!());

// Bind order: hold, ttl, name, owner, token, hold. With other holds of the same owner beside it, the latest expiry counts.
pub(super) const RENEW: &str = concat!("
UPDATE sqlock_lease
   SET expires_at = GREATEST(IF(holds = ?, 0, expires_at), ", now!(), " + ?)
 WHERE name = ? AND owner = ? AND token = ? AND LOCATE(?, holds) > 0");

pub(super) const RENEW_MANY: &str = concat!("
UPDATE ", holdings!(), " STRAIGHT_JOIN sqlock_lease AS l ON l.name = UNHEX(r.name)
   SET l.expires_at = GREATEST(IF(l.holds = r.hold, 0, l.expires_at), ", now!(), " + r.time)
 WHERE l.owner = r.owner AND l.token = r.token AND LOCATE(r.hold, l.holds) > 0");

// Bind order: hold, hold_at_least, hold, hold_at_least, hold, name, owner, token, token, hold, hold, hold_at_least.
// expires_at goes first, while holds still has its old value.
pub(super) const RELEASE: &str = concat!("
UPDATE sqlock_lease
   SET expires_at = IF(holds <> ?, expires_at, GREATEST(", now!(), ", LEAST(acquired_at, ", now!(), ") + ?)),
       holds = IF(holds = ? AND LEAST(acquired_at, ", now!(), ") + ? > ", now!(), ", '-', REPLACE(holds, ?, ''))
 WHERE name = ? AND owner = ? AND (? = 0 OR token = ?) AND LOCATE(?, holds) > 0
   AND (waiting = 0 OR holds <> ? OR ? > 0)");

pub(super) const RELEASE_MANY: &str = concat!("
UPDATE ", holdings!(), " STRAIGHT_JOIN sqlock_lease AS l ON l.name = UNHEX(r.name)
   SET l.expires_at = IF(l.holds <> r.hold, l.expires_at,
                         GREATEST(", now!(), ", LEAST(l.acquired_at, ", now!(), ") + r.time)),
       l.holds = IF(l.holds = r.hold AND LEAST(l.acquired_at, ", now!(), ") + r.time > ", now!(), ", '-',
                    REPLACE(l.holds, r.hold, ''))
 WHERE l.owner = r.owner AND (r.token = 0 OR l.token = r.token) AND LOCATE(r.hold, l.holds) > 0
   AND (l.waiting = 0 OR l.holds <> r.hold OR r.time > 0)");

// Bind order: hold', name, owner, hold, token, hold', owner', hold', holder', label', ttl' (' is the next holder).
pub(super) const HAND_OFF: &str = concat!("
UPDATE (SELECT s.name, IF(s.holds = ?, s.token, GREATEST(s.token + 1, g.token + 1, ", now!(), ")) AS token
          FROM sqlock_fence AS g STRAIGHT_JOIN sqlock_lease AS s ON s.name = g.name
         WHERE g.name = ?
           AND (s.owner = ? AND s.holds = ? AND s.token = ? AND s.waiting = 0
                OR s.holds = ?)                   -- done already, the reply was lost
         LIMIT 1 FOR UPDATE SKIP LOCKED) AS q
  STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name STRAIGHT_JOIN sqlock_fence AS f ON f.name = q.name
   SET l.owner = ?, l.holds = ?, l.holder = ?, l.label = ?,
       l.token = LAST_INSERT_ID(q.token), f.token = q.token,
       l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + ?");

// One hand-off a line: hex of name, owner, hold, token; the next holder's owner, hold, ttl, holder, label.
pub(super) const HAND_OFF_MANY: &str = concat!("
UPDATE (SELECT STRAIGHT_JOIN s.name, p.next_owner, p.next_hold, p.ttl, p.holder, p.label,
               IF(s.holds = p.next_hold, s.token, GREATEST(s.token + 1, g.token + 1, ", now!(), ")) AS token
          FROM (SELECT * FROM JSON_TABLE(?, '$[*]' COLUMNS (
                    name VARCHAR(510) PATH '$[0]', owner VARCHAR(32) PATH '$[1]', hold VARCHAR(40) PATH '$[2]',
                    token BIGINT PATH '$[3]', next_owner VARCHAR(32) PATH '$[4]', next_hold VARCHAR(40) PATH '$[5]',
                    ttl BIGINT PATH '$[6]', holder VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[7]',
                    label VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[8]')) AS j LIMIT 100000) AS p
          JOIN sqlock_fence AS g ON g.name = UNHEX(p.name)
          JOIN sqlock_lease AS s ON s.name = g.name
         WHERE s.owner = p.owner AND s.holds = p.hold AND s.token = p.token AND s.waiting = 0
            OR s.holds = p.next_hold
         LIMIT 100000 FOR UPDATE SKIP LOCKED) AS q
  STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name STRAIGHT_JOIN sqlock_fence AS f ON f.name = q.name
   SET l.owner = q.next_owner, l.holds = q.next_hold, l.holder = q.holder, l.label = q.label,
       l.token = q.token, f.token = q.token,
       l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + q.ttl");

// Bind order: name
pub(super) const LOOK: &str = concat!("SELECT ", row_columns!(), ", ", now!(), " FROM sqlock_lease WHERE name = ?");

// Bind order: JSON names as hex
pub(super) const LOOK_MANY: &str = concat!("
SELECT STRAIGHT_JOIN ", row_columns!(), ", ", now!(), "
  FROM JSON_TABLE(?, '$[*]' COLUMNS (hex VARCHAR(510) PATH '$')) AS n
  JOIN sqlock_lease ON name = UNHEX(n.hex)");

/// The condition stands in both halves, with its arguments.
macro_rules! list {
    ($condition:literal) => {
        concat!("
SELECT ", row_columns!("l"), ", ", now!(), ", 0, 0, ", waiters!(), "
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
       (SELECT COUNT(*) FROM sqlock_place AS w WHERE w.name = l.name AND w.token = 0 AND w.expires_at > ", now!(), ")")
    };
}
// Bind order: prefix, prefix, prefix, prefix
pub(super) const LIST: &str = list!("LEFT(l.name, LENGTH(?)) = ?");
// Bind order: name, name
pub(super) const LIST_ONE: &str = list!("l.name = ?");

/// One ticket a line: hex of name, owner, hold, client, bell, units, permits, waited, holder, label.
macro_rules! tickets {
    () => {
        "JSON_TABLE(?, '$[*]' COLUMNS (
             name   VARCHAR(510) PATH '$[0]', owner VARCHAR(32) PATH '$[1]', hold   VARCHAR(40) PATH '$[2]',
             client VARCHAR(32)  PATH '$[3]', bell  VARCHAR(63) PATH '$[4]', units  BIGINT PATH '$[5]',
             permits BIGINT      PATH '$[6]', waited BIGINT     PATH '$[7]',
             holder VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[8]',
             label  VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[9]')) AS t"
    };
}

// The place first, then the mark on the name: whoever gives the name back after that sees both, and whoever gave it back
// before is seen by us, who look next. Bind order: claim, JSON tickets.
pub(super) const ENQUEUE: &str = concat!("
INSERT IGNORE INTO sqlock_place
       (name, owner, hold, client, bell, units, permits, place, token, holder, label, acquired_at, expires_at)
SELECT UNHEX(t.name), t.owner, t.hold, t.client, t.bell, t.units, t.permits, ", now!(), " - t.waited, 0, t.holder, t.label,
       0, ", now!(), " + ?
  FROM ", tickets!());

// Leaves in LAST_INSERT_ID for how long another owner alone holds the name: the row is locked, so that one will see the mark.
// Zero: nobody does. (Of two rows, one would tell.) Bind order: owner, name.
pub(super) const MARK_ONE: &str = concat!("
UPDATE sqlock_lease
   SET waiting = GREATEST(waiting + 1, ", now!(), ")
                 + 0 * LAST_INSERT_ID(IF(holds IN ('', '+') OR owner = ?, 0, GREATEST(expires_at - ", now!(), ", 0)))
 WHERE name = ?");

// Bind order: JSON names as hex, in order
pub(super) const MARK: &str = concat!("
UPDATE JSON_TABLE(?, '$[*]' COLUMNS (hex VARCHAR(510) PATH '$')) AS n STRAIGHT_JOIN sqlock_lease AS l ON l.name = UNHEX(n.hex)
   SET l.waiting = GREATEST(l.waiting + 1, ", now!(), ")");

// Rows for names that have none. Bind order: JSON names as hex, in order
pub(super) const CREATE_FREE_FENCE: &str = concat!("
INSERT IGNORE INTO sqlock_fence (name, token)
SELECT UNHEX(hex), ", now!(), " FROM JSON_TABLE(?, '$[*]' COLUMNS (hex VARCHAR(510) PATH '$')) AS n ORDER BY 1");

pub(super) const CREATE_FREE_LEASE: &str = concat!("
INSERT IGNORE INTO sqlock_lease (name, owner, holds, token, holder, label, acquired_at, expires_at, waiting)
SELECT STRAIGHT_JOIN f.name, '', '', f.token, '', '', ", now!(), ", ", now!(), ", ", now!(), "
  FROM (SELECT * FROM JSON_TABLE(?, '$[*]' COLUMNS (hex VARCHAR(510) PATH '$')) AS j LIMIT 100000) AS n
  JOIN sqlock_fence AS f ON f.name = UNHEX(n.hex)
 ORDER BY 1 FOR UPDATE SKIP LOCKED");

// Bind order: name, name, limit, name
pub(super) const QUEUE: &str = concat!("
SELECT ", row_columns!("l"), ", ", now!(), ", ", place_columns!("p"), "
  FROM sqlock_lease AS l LEFT JOIN (
       (SELECT * FROM sqlock_place WHERE name = ? AND token > 0)
        UNION ALL
       (SELECT * FROM sqlock_place WHERE name = ? AND token = 0 ORDER BY place LIMIT ?)) AS p ON p.name = l.name
 WHERE l.name = ?");

/// The name still stands as it was seen. Bind order: name, token, holds, expires_at or -1 for any, expires_at.
macro_rules! as_seen {
    ($table:literal) => {
        concat!($table, ".name = ? AND ", $table, ".token = ? AND ", $table, ".holds = ? AND (? = -1 OR ", $table,
                ".expires_at = ?)")
    };
}
/// Bind order: waiting as it was seen, whether nobody else waits.
macro_rules! still_waiting {
    () => {
        concat!("CASE WHEN l.waiting <> ? THEN l.waiting WHEN ? THEN 0 WHEN l.waiting = 0 THEN ", now!(), "
                        ELSE l.waiting END")
    };
}

// Bind order: still_waiting, as_seen
pub(super) const PASS_TO_NOBODY: &str = concat!("
UPDATE sqlock_lease AS l SET l.waiting = ", still_waiting!(), " WHERE ", as_seen!("l"));

// Whoever has joined the line since has to be let in instead. Bind order: still_waiting, as_seen, waiting
pub(super) const PASS_TO_FREE: &str = concat!("
UPDATE sqlock_lease AS l
   SET l.waiting = ", still_waiting!(), ", l.owner = '', l.holds = '', l.expires_at = ", now!(), "
 WHERE ", as_seen!("l"), " AND l.waiting = ?");

// The place is marked as granted in the same statement, and deleted when that is done. Its token and its zero expiry say
// that it neither waits nor shares any more. Bind order: as_seen, hold, still_waiting, lasts.
pub(super) const PASS_TO_ONE: &str = concat!("
UPDATE (SELECT s.name, GREATEST(s.token + 1, g.token + 1, ", now!(), ") AS token
          FROM sqlock_fence AS g STRAIGHT_JOIN sqlock_lease AS s ON s.name = g.name
         WHERE ", as_seen!("s"), "
         LIMIT 1 FOR UPDATE SKIP LOCKED) AS q
  STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name STRAIGHT_JOIN sqlock_fence AS f ON f.name = q.name
  STRAIGHT_JOIN sqlock_place AS p ON p.name = q.name AND p.hold = ? AND p.token = 0
   SET l.waiting = ", still_waiting!(), ", l.owner = p.owner, l.holds = p.hold, l.holder = p.holder, l.label = p.label,
       l.token = LAST_INSERT_ID(q.token), f.token = q.token,
       l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + ?,
       p.token = q.token, p.expires_at = 0");

// Bind order: name, hold
pub(super) const UNPLACE: &str = "DELETE FROM sqlock_place WHERE name = ? AND hold = ? AND expires_at = 0";

// The first of those who share it raise the fence's token above all who held it alone; those who come in beside them leave
// it, and so leave the fences of the others. Whoever has joined the line since may be one of them. What is shared has no expiry
// of its own. Bind order: as_seen, waiting, JSON of holds and durations, still_waiting, how many less one.
macro_rules! pass_to_many {
    ($least:literal, $free:literal, $fence:literal, $set:literal) => {
        concat!("
UPDATE (SELECT s.name, GREATEST(", $least, ", ", now!(), ") AS token
          FROM ", $free, "
         WHERE ", as_seen!("s"), " AND s.waiting = ?
         LIMIT 1 FOR UPDATE SKIP LOCKED) AS q
  STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name ", $fence, "
  STRAIGHT_JOIN JSON_TABLE(?, '$[*]' COLUMNS (i FOR ORDINALITY, hold VARCHAR(40) CHARACTER SET ascii PATH '$[0]',
                                          lasts BIGINT PATH '$[1]')) AS n
  STRAIGHT_JOIN sqlock_place AS p ON p.name = q.name AND p.hold = n.hold AND p.token = 0
   SET l.waiting = ", still_waiting!(), ", l.owner = '', l.holds = '+', l.holder = '', l.label = '',
       l.token = q.token + ?, ", $set, "
       l.acquired_at = ", now!(), ", l.expires_at = 9223372036854775807,
       p.token = q.token + n.i - 1, p.acquired_at = ", now!(), ", p.expires_at = ", now!(), " + n.lasts")
    };
}
pub(super) const PASS_TO_SEVERAL: &str = pass_to_many!(
    "s.token + 1, g.token + 1", "sqlock_fence AS g STRAIGHT_JOIN sqlock_lease AS s ON s.name = g.name",
    "STRAIGHT_JOIN sqlock_fence AS f ON f.name = q.name", "f.token = q.token,");
pub(super) const PASS_TO_MORE: &str = pass_to_many!("s.token + 1", "sqlock_lease AS s", "", "");

/// One place a line: hex of name, hold. With another character set than the table's, the hold would not be looked up by the key,
/// but searched among all places of the name, and all of them locked.
macro_rules! spots {
    () => {
        "JSON_TABLE(?, '$[*]' COLUMNS (name VARCHAR(510) PATH '$[0]', hold VARCHAR(40) CHARACTER SET ascii PATH '$[1]')) AS s"
    };
}

// Which of these places have a token as wanted: 1 waits, 2 shares. Bind order: JSON spots
pub(super) const PLACES: &str = concat!("
SELECT STRAIGHT_JOIN p.hold, p.token FROM ", spots!(), " JOIN sqlock_place AS p ON p.name = UNHEX(s.name) AND p.hold = s.hold");

// Bind order: JSON spots
pub(super) const LEAVE: &str = concat!("
DELETE p FROM ", spots!(), " STRAIGHT_JOIN sqlock_place AS p ON p.name = UNHEX(s.name) AND p.hold = s.hold
 WHERE p.token = 0 OR p.units > 0");

// Bind order: JSON spots
pub(super) const BURY: &str = concat!("
DELETE p FROM ", spots!(), " STRAIGHT_JOIN sqlock_place AS p ON p.name = UNHEX(s.name) AND p.hold = s.hold
 WHERE p.expires_at <= ", now!());

// Bind order: JSON spots, claim, bell
pub(super) const KEEP: &str = concat!("
UPDATE ", spots!(), " STRAIGHT_JOIN sqlock_place AS p ON p.name = UNHEX(s.name) AND p.hold = s.hold
   SET p.expires_at = ", now!(), " + ?, p.bell = ?
 WHERE p.token = 0");

// Bind order: JSON spots
pub(super) const LATEST: &str = concat!("
SELECT STRAIGHT_JOIN COALESCE(MAX(p.place), 0)
  FROM ", spots!(), " JOIN sqlock_place AS p ON p.name = UNHEX(s.name) AND p.hold = s.hold
 WHERE p.token = 0");

// Bind order: JSON spots, place
pub(super) const ALIGN: &str = concat!("
UPDATE ", spots!(), " STRAIGHT_JOIN sqlock_place AS p ON p.name = UNHEX(s.name) AND p.hold = s.hold
   SET p.place = ?
 WHERE p.token = 0");

// Where it stands in the line is counted in one pass over the line, however many places are asked for.
// Bind order: JSON spots, JSON spots
pub(super) const WATCH: &str = concat!("
SELECT STRAIGHT_JOIN ", row_columns!("l"), ", ", now!(), ", s.hold, p.token, COALESCE(q.ahead, 0)
  FROM ", spots!(), " JOIN sqlock_lease AS l ON l.name = UNHEX(s.name)
       LEFT JOIN sqlock_place AS p ON p.name = l.name AND p.hold = s.hold
       LEFT JOIN (SELECT w.name, w.hold, COUNT(IF(w.expires_at > ", now!(), ", 1, NULL)) OVER (PARTITION BY w.name
                                 ORDER BY w.place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS ahead
                    FROM (SELECT DISTINCT UNHEX(s.name) AS name FROM ", spots!(), ") AS n
                         JOIN sqlock_place AS w ON w.name = n.name AND w.token = 0) AS q
         ON q.name = p.name AND q.hold = p.hold");

// What has run out does not count any more, and others may have come in. Bind order: JSON holdings
pub(super) const RENEW_SHARES: &str = concat!("
UPDATE ", holdings!(), " STRAIGHT_JOIN sqlock_place AS p ON p.name = UNHEX(r.name) AND p.hold = r.hold
   SET p.expires_at = ", now!(), " + r.time, p.owner = r.owner
 WHERE p.token = r.token AND p.expires_at > ", now!());

// Bind order: JSON holdings
pub(super) const LIVE_SHARES: &str = concat!("
SELECT STRAIGHT_JOIN p.hold FROM ", holdings!(), " JOIN sqlock_place AS p ON p.name = UNHEX(r.name) AND p.hold = r.hold
 WHERE p.token = r.token AND p.expires_at > ", now!());

// Bind order: the copy's hold, ttl, name, hold, token
pub(super) const COPY: &str = concat!("
INSERT INTO sqlock_place
       (name, owner, hold, client, bell, units, permits, place, token, holder, label, acquired_at, expires_at)
SELECT p.name, p.owner, ?, p.client, '', p.units, p.permits, p.place, p.token, p.holder, p.label, p.acquired_at, ", now!(), " + ?
  FROM sqlock_place AS p WHERE p.name = ? AND p.hold = ? AND p.token = ? AND p.expires_at > ", now!(), "
    ON DUPLICATE KEY UPDATE expires_at = VALUES(expires_at)");

// The share goes first. While its name is held by one alone, it counts for nothing. Bind order: client, units, permits,
// holder, ttl, name, owner, hold, token.
pub(super) const DOWNGRADE_PLACE: &str = concat!("
INSERT IGNORE INTO sqlock_place
       (name, owner, hold, client, bell, units, permits, place, token, holder, label, acquired_at, expires_at)
SELECT name, owner, holds, ?, '', ?, ?, ", now!(), ", token, ?, label, acquired_at, ", now!(), " + ?
  FROM sqlock_lease WHERE name = ? AND owner = ? AND holds = ? AND token = ?");

// Bind order: name, owner, hold, token
pub(super) const DOWNGRADE_LEASE: &str = "
UPDATE sqlock_lease SET owner = '', holds = '+', holder = '', label = '', expires_at = 9223372036854775807
 WHERE name = ? AND owner = ? AND holds = ? AND token = ?";

// A token never goes down, whatever is asked for. Bind order: name, owner, hold, token, token, to, to, to, to.
pub(super) const RAISE: &str = "
UPDATE (SELECT s.name
          FROM sqlock_fence AS g STRAIGHT_JOIN sqlock_lease AS s ON s.name = g.name
         WHERE g.name = ? AND s.owner = ? AND s.holds = ?
           AND (s.token = ? AND ? < ?
                OR s.token = ?)                   -- done already, the reply was lost
         LIMIT 1 FOR UPDATE SKIP LOCKED) AS q
  STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name STRAIGHT_JOIN sqlock_fence AS f ON f.name = q.name
   SET l.token = ?, f.token = ?";

// In whole seconds.
pub(super) const UPTIME: &str = "SHOW GLOBAL STATUS LIKE 'Uptime'";

// Bind order: token, name, name, token
pub(super) const NOTE_EVICTED_SHARE: &str = "
UPDATE sqlock_lease SET evicted = greatest(evicted, ?)
 WHERE name = ? AND EXISTS (SELECT 1 FROM sqlock_place WHERE name = ? AND token = ? AND token > 0 AND units > 0)";

// Bind order: name
pub(super) const LAST_EVICTION: &str = "SELECT token, evicted FROM sqlock_lease WHERE name = ?";

// Bind order: ttl, name, token
pub(super) const EXTEND: &str = concat!("
UPDATE sqlock_lease SET expires_at = greatest(expires_at, ", now!(), " + ?)
 WHERE name = ? AND token = ? AND holds NOT IN ('', '-', '+') AND expires_at > ", now!());

pub(super) const EXTEND_SHARE: &str = concat!("
UPDATE sqlock_place SET expires_at = greatest(expires_at, ", now!(), " + ?)
 WHERE name = ? AND token = ? AND token > 0 AND units > 0 AND owner <> '' AND expires_at > ", now!());

// Bind order: name, token
pub(super) const EVICT_SHARE: &str = "DELETE FROM sqlock_place WHERE name = ? AND token = ? AND token > 0 AND units > 0";

// Whether there is a row, and whether it is time to note down that it is in use. Bind order: how old the note may get, name.
pub(super) const SEEN: &str = concat!("SELECT seen_at < ", now!(), " - ? FROM sqlock_row WHERE name = ?");

// Bind order: name
pub(super) const CREATE_ROW: &str = concat!("INSERT IGNORE INTO sqlock_row (name, seen_at) VALUES (?, ", now!(), ")");

// Whoever has locked the row is not waited for. Bind order: name.
pub(super) const NOTE: &str = concat!("
UPDATE (SELECT name FROM sqlock_row WHERE name = ? LIMIT 1 FOR UPDATE SKIP LOCKED) AS q
       STRAIGHT_JOIN sqlock_row AS r ON r.name = q.name
   SET r.seen_at = ", now!());

// Reads without locking. Bind order: retention, limit.
pub(super) const UNSEEN_ROWS: &str = concat!("SELECT name FROM sqlock_row WHERE seen_at < ", now!(), " - ? LIMIT ?");

// Bind order: JSON names as hex, retention
pub(super) const SWEEP_ROWS: &str = concat!("
DELETE r
  FROM (SELECT STRAIGHT_JOIN s.name
          FROM (SELECT UNHEX(hex) AS name FROM JSON_TABLE(?, '$[*]' COLUMNS (hex VARCHAR(510) PATH '$')) AS j
                 LIMIT 100000) AS n
          JOIN sqlock_row AS s ON s.name = n.name
         WHERE s.seen_at < ", now!(), " - ?
         LIMIT 100000 FOR UPDATE SKIP LOCKED) AS q
       STRAIGHT_JOIN sqlock_row AS r ON r.name = q.name");

// Bind order: retention, limit
pub(super) const SWEEP_PLACES: &str = concat!("DELETE FROM sqlock_place WHERE expires_at < ", now!(), " - ? LIMIT ?");

// Bind order: name, token
pub(super) const EVICT: &str = concat!("UPDATE sqlock_lease SET owner = '', holds = '', evicted = greatest(evicted, token), expires_at = ", now!(), "
  WHERE name = ? AND token = ? AND holds NOT IN ('', '+')");

// The evicted holder's next fence fails; one that is open now ends in peace. Bind order: name, token.
pub(super) const EVICT_FENCE: &str = "
UPDATE sqlock_fence AS f
  JOIN (SELECT name FROM sqlock_fence WHERE name = ? AND token = ? LIMIT 1 FOR UPDATE SKIP LOCKED) AS q ON q.name = f.name
   SET f.token = f.token + 1";

// Bind order: retention, retention or claim, retention, retention, limit. Reads without locking: a scan that locks would make free
// names look taken.
pub(super) const STALE: &str = concat!("
SELECT l.name FROM sqlock_lease AS l
 WHERE l.token < ", now!(), " - ? AND l.waiting < ", now!(), " - ? AND (l.expires_at < ", now!(), " - ? OR l.holds = '+')
   AND NOT EXISTS (SELECT 1 FROM sqlock_place AS p WHERE p.name = l.name AND p.expires_at >= ", now!(), " - ?)
 LIMIT ?");

// Bind order: JSON names as hex, retention, retention or claim, retention. The condition is checked again once the rows are locked.
pub(super) const SWEEP: &str = concat!("
DELETE l, f
  FROM (SELECT STRAIGHT_JOIN s.name
          FROM (SELECT UNHEX(hex) AS name FROM JSON_TABLE(?, '$[*]' COLUMNS (hex VARCHAR(510) PATH '$')) AS j
                 LIMIT 100000) AS n
          JOIN sqlock_fence AS g ON g.name = n.name
          JOIN sqlock_lease AS s ON s.name = g.name
         WHERE s.token < ", now!(), " - ? AND s.waiting < ", now!(), " - ?
           AND (s.expires_at < ", now!(), " - ? OR s.holds = '+')
         LIMIT 100000 FOR UPDATE SKIP LOCKED) AS q
       STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name
       STRAIGHT_JOIN sqlock_fence AS f ON f.name = q.name");

// Bind order: name. The outer read locks and sees the present; the inner one reads what the transaction's snapshot sees.
// Where they differ, the transaction began to read before this lease was granted.
// https://dev.mysql.com/doc/refman/8.4/en/innodb-locking-reads.html
pub(super) const FENCE: &str = "
SELECT f.token, (SELECT s.token FROM sqlock_fence AS s WHERE s.name = f.name)
  FROM sqlock_fence AS f WHERE f.name = ?
  LOCK IN SHARE MODE";

// On a Galera cluster, where locks are not seen by other nodes. But of two who have written a row, one cannot commit: so the row
// is written, and is as it was afterwards. (Nothing is written by an update that changes nothing.) A row whose token is below the
// holding's is one of before the holding, which this node has not been told of yet. Bind order: name, least token, name, least
// token, token, name.
pub(super) const FENCE_BY_WRITING: &str = "
SELECT f.token, (SELECT s.token FROM sqlock_fence AS s WHERE s.name = f.name)
  FROM sqlock_fence AS f WHERE f.name = ? AND f.token >= ?
   FOR UPDATE;
UPDATE sqlock_fence SET token = -token WHERE name = ? AND token BETWEEN ? AND ?;
UPDATE sqlock_fence SET token = -token WHERE name = ? AND token < 0";

// Likewise for one of those who share it, if it is seen. Bind order: hold, token, name, name, token, name.
pub(super) const FENCE_SHARE_BY_WRITING: &str = "
SELECT f.token, (SELECT f.token FROM sqlock_place AS p WHERE p.name = f.name AND p.hold = ? AND p.token = ?)
  FROM sqlock_fence AS f WHERE f.name = ?
   FOR UPDATE;
UPDATE sqlock_fence SET token = -token WHERE name = ? AND token BETWEEN 1 AND ?;
UPDATE sqlock_fence SET token = -token WHERE name = ? AND token < 0";

// Likewise for one of those who share it: whether the snapshot sees its place stands in place of what token it sees. Bind
// order: name, hold, token.
pub(super) const FENCE_SHARE: &str = "
SELECT f.token, (SELECT f.token FROM sqlock_place AS p WHERE p.name = f.name AND p.hold = ? AND p.token = ?)
  FROM sqlock_fence AS f WHERE f.name = ?
  LOCK IN SHARE MODE";

// Whether a place that the snapshot does not see is there at present. Bind order: name, hold, token.
pub(super) const SHARE: &str = "
SELECT 1 FROM sqlock_place WHERE name = ? AND hold = ? AND token = ? LOCK IN SHARE MODE";
}

/// The backend on connections made like those of the caller's pool.
pub(crate) struct MySqlBackend {
    options: Arc<MySqlConnectOptions>,
    /// The server we are connected to is, or was, a node of a Galera cluster.
    on_galera: AtomicBool,
}

impl MySqlBackend {
    pub(crate) fn new(pool: &MySqlPool) -> Self {
        Self { options: pool.connect_options(), on_galera: AtomicBool::new(false) }
    }

    pub(crate) fn with(options: MySqlConnectOptions) -> Self {
        Self { options: Arc::new(options), on_galera: AtomicBool::new(false) }
    }
}

impl Backend for MySqlBackend {
    fn place(&self) -> String {
        format!("{}:{}", self.options.get_host(), self.options.get_port())
    }

    fn is_one_of_many_writers(&self) -> bool {
        self.on_galera.load(Ordering::Relaxed)
    }

    fn connect(&self) -> Job<'_, Box<dyn Session>> {
        Box::pin(async move {
            let options = (*self.options).clone().disable_statement_logging();
            let mut conn = options.timezone(String::from("+00:00")).connect().await?;
            let about = sqlx::raw_sql(sql::SETTLE).fetch_one(&mut conn).await?;
            let (is_read_only, may_be_galera): (i64, i64) = (about.try_get(0)?, about.try_get(1)?);
            // Also when we have the right to write all the same: on a replica nobody else would see it.
            if is_read_only != 0 {
                return Err(not_writable(format!("{} is read-only, as replicas are", self.place())));
            }
            let on_galera = may_be_galera != 0 && session::is_on_galera(&mut conn).await?;
            if on_galera {
                if sqlx::raw_sql(sql::IS_READY).fetch_all(&mut conn).await?.is_empty() {
                    return Err(not_writable(format!("{} is a Galera node without a cluster", self.place())));
                }
                conn.execute(sql::SYNC_READS).await?;
            }
            self.on_galera.store(on_galera, Ordering::Relaxed);
            Ok(Box::new(MySqlSession { conn, on_galera, open: false }) as Box<dyn Session>)
        })
    }

    fn useful_connections(&self) -> usize {
        usize::MAX
    }

    fn migrate(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(async move {
            let one = MySqlPoolOptions::new()
                .max_connections(1)
                .connect_with((*self.options).clone())
                .await
                .map_err(schema::unconnected)?;
            let mut migrated = schema::migrate(&one, schema::MYSQL).await;
            if let Err(Error::Migrate(MigrateError::Dirty(_))) = migrated {
                migrated = match clear_interrupted(&one).await {
                    Ok(()) => schema::migrate(&one, schema::MYSQL).await,
                    Err(error) => Err(Error::from_sqlx("migrate", error)),
                };
            }
            one.close().await;
            migrated
        })
    }

    fn anchor(&self) -> Anchoring<'_> {
        Box::pin(session::open(&self.options))
    }
}

/// DDL commits by itself, so a migrator that was killed leaves its record marked as unsuccessful for ever. Ours can be
/// run again: take the mark away, if it is older than any migrator that still lives.
async fn clear_interrupted(one: &MySqlPool) -> Result<(), sqlx::Error> {
    sqlx::query("DELETE FROM _sqlock_migrations WHERE NOT success AND installed_on < NOW() - INTERVAL 3 SECOND")
        .execute(one)
        .await?;
    Ok(())
}

struct MySqlSession {
    conn: MySqlConnection,
    on_galera: bool,
    /// Whether a transaction is open, around several verbs.
    open: bool,
}

type MySqlQuery<'q> = sqlx::query::Query<'q, MySql, MySqlArguments>;

impl MySqlSession {
    async fn execute(&mut self, query: MySqlQuery<'_>) -> Result<MySqlQueryResult, sqlx::Error> {
        query.execute(&mut self.conn).await
    }

    /// Whether it makes sense to repeat what has found nothing: on a Galera node, what another one has written may not have been
    /// there yet. Now it is.
    async fn has_caught_up(&mut self) -> Result<bool, sqlx::Error> {
        if self.on_galera {
            // Any read waits.
            self.conn.execute("SELECT 1").await?;
        }
        Ok(self.on_galera)
    }

    async fn sweep_rows(&mut self, age: i64, limit: u32) -> Result<(), sqlx::Error> {
        let unseen = sqlx::query(sql::UNSEEN_ROWS).bind(age).bind(limit).fetch_all(&mut self.conn).await?;
        if !unseen.is_empty() {
            self.execute(sqlx::query(sql::SWEEP_ROWS).bind(json_names(&unseen)?).bind(age)).await?;
        }
        Ok(())
    }

    /// For statements that leave the new token in LAST_INSERT_ID.
    async fn granted(&mut self, query: MySqlQuery<'_>) -> Result<Option<FencingToken>, sqlx::Error> {
        let done = self.execute(query).await?;
        let id = i64::try_from(done.last_insert_id()).unwrap_or(0);
        Ok(if done.rows_affected() > 0 { token(id) } else { None })
    }

    async fn take(&mut self, claims: &[Claim]) -> Result<Vec<Option<FencingToken>>, sqlx::Error> {
        if let [c] = claims {
            let query =
                sqlx::query(sql::ACQUIRE).bind(c.hold.mark()).bind(c.name.as_str().as_bytes()).bind(c.hold.mark());
            return Ok(vec![self.granted(bind_claim(query, c)).await?]);
        }
        self.execute(sqlx::query(sql::ACQUIRE_MANY).bind(json_claims(claims))).await?;
        Ok(vec![None; claims.len()])
    }

    /// The rows of a batch of names, by name.
    async fn rows<'a>(
        &mut self,
        names: impl ExactSizeIterator<Item = &'a LockName>,
    ) -> Result<HashMap<String, Row>, sqlx::Error> {
        let mut names = names;
        let rows = if names.len() == 1 {
            let name = names.next().map(LockName::as_str).unwrap_or_default();
            sqlx::query(sql::LOOK).bind(name.as_bytes()).fetch_all(&mut self.conn).await?
        } else {
            let names = Value::from_iter(names.map(|name| hex(name.as_str())));
            sqlx::query(sql::LOOK_MANY).bind(names.to_string()).fetch_all(&mut self.conn).await?
        };
        rows.iter().map(|found| row(found).map(|row| (row.name.clone(), row))).collect()
    }

    /// The tokens of places, by the marks of their holds.
    async fn places(&mut self, spots: Value) -> Result<HashMap<String, i64>, sqlx::Error> {
        let rows = sqlx::query(sql::PLACES).bind(spots.to_string()).fetch_all(&mut self.conn).await?;
        rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
    }

    /// Gives rows to names that have none, and grants them to whoever comes first.
    async fn create(&mut self, claims: &[Claim]) -> Result<Vec<Option<FencingToken>>, sqlx::Error> {
        let json = json_claims(claims);
        self.execute(sqlx::query(sql::CREATE_FENCE).bind(&json)).await?;
        self.execute(sqlx::query(sql::CREATE_LEASE).bind(&json)).await?;
        let rows = self.rows(claims.iter().map(|c| &c.name)).await?;
        Ok(claims.iter().map(|c| granted_in(&rows, c)).collect())
    }
}

/// The token of a claim, if it is the one that stands in the row.
fn granted_in(rows: &HashMap<String, Row>, c: &Claim) -> Option<FencingToken> {
    let row = rows.get(c.name.as_str())?;
    (row.holds == c.hold.mark()).then(|| token(row.token))?
}

fn hex(text: &str) -> String {
    super::hex(text.as_bytes())
}

fn json_claims(claims: &[Claim]) -> String {
    let lines = claims.iter().map(|c| {
        let name = hex(c.name.as_str());
        json!([name, c.owner.to_string(), c.hold.mark(), micros(c.ttl), &*c.holder, &*c.label])
    });
    Value::from_iter(lines).to_string()
}

fn spot(spot: &Spot) -> Value {
    json!([hex(spot.name.as_str()), spot.hold.mark()])
}

fn json_release(r: &Release) -> Value {
    let token = r.token.map_or(0, FencingToken::get);
    json!([hex(r.name.as_str()), r.owner.to_string(), r.hold.mark(), token, micros(r.hold_at_least)])
}

fn json_renewal(Renewal { holding: h, ttl, .. }: &Renewal, owner: String) -> Value {
    json!([hex(h.name.as_str()), owner, h.hold.mark(), h.token.get(), micros(*ttl)])
}

/// Binds what a new holder brings along: owner, hold, holder, label, ttl.
fn bind_claim<'q>(query: MySqlQuery<'q>, c: &'q Claim) -> MySqlQuery<'q> {
    query.bind(c.owner.to_string()).bind(c.hold.mark()).bind(&*c.holder).bind(&*c.label).bind(micros(c.ttl))
}

impl Session for MySqlSession {
    fn acquire<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            let mut granted = self.take(claims).await?;
            if granted.iter().all(Option::is_some) {
                return Ok(granted);
            }
            let rows = self.rows(claims.iter().map(|c| &c.name)).await?;
            let mut missing = Vec::new();
            for (granted, c) in granted.iter_mut().zip(claims) {
                *granted = granted.or_else(|| granted_in(&rows, c));
                if granted.is_none() && !rows.contains_key(c.name.as_str()) {
                    missing.push(c.clone());
                }
            }
            if missing.is_empty() {
                return Ok(granted);
            }
            let created = self.create(&missing).await?;
            let mut created: HashMap<Hold, FencingToken> =
                missing.iter().zip(created).filter_map(|(c, token)| Some((c.hold, token?))).collect();
            for (granted, c) in granted.iter_mut().zip(claims) {
                *granted = granted.or_else(|| created.remove(&c.hold));
            }
            Ok(granted)
        })
    }

    fn join<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            let mut joined = Vec::with_capacity(claims.len());
            for c in claims {
                let query = || {
                    sqlx::query(sql::JOIN)
                        .bind(c.hold.mark())
                        .bind(c.hold.mark())
                        .bind(micros(c.ttl))
                        .bind(c.name.as_str().as_bytes())
                        .bind(c.owner.to_string())
                };
                let mut token = self.granted(query()).await?;
                if token.is_none() && self.has_caught_up().await? {
                    token = self.granted(query()).await?;
                }
                joined.push(token);
            }
            Ok(joined)
        })
    }

    fn renew<'a>(&'a mut self, renewals: &'a [Renewal]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let query = || match renewals {
                [Renewal { holding: h, ttl, .. }] => sqlx::query(sql::RENEW)
                    .bind(h.hold.mark())
                    .bind(micros(*ttl))
                    .bind(h.name.as_str().as_bytes())
                    .bind(h.owner.to_string())
                    .bind(h.token.get())
                    .bind(h.hold.mark()),
                _ => {
                    let lines = renewals.iter().map(|r| json_renewal(r, r.holding.owner.to_string()));
                    sqlx::query(sql::RENEW_MANY).bind(Value::from_iter(lines).to_string())
                }
            };
            let mut affected = self.execute(query()).await?.rows_affected();
            // None is taken to be renewed because it is there now.
            if affected < renewals.len() as u64 && self.has_caught_up().await? {
                affected = self.execute(query()).await?.rows_affected();
            }
            let batch: Vec<_> =
                renewals.iter().map(|Renewal { holding: h, .. }| (&h.name, h.owner, h.hold, Some(h.token))).collect();
            let matched = matched(self, affected, &batch, Standing::Held).await?;
            Ok(matched.into_iter().map(|matched| matched == Some(true)).collect())
        })
    }

    fn release<'a>(&'a mut self, releases: &'a [Release]) -> Job<'a, Vec<Option<bool>>> {
        Box::pin(async move {
            let query = || match releases {
                [r] => {
                    let (mark, token) = (r.hold.mark(), r.token.map_or(0, FencingToken::get));
                    let least = micros(r.hold_at_least);
                    sqlx::query(sql::RELEASE)
                        .bind(mark.clone())
                        .bind(least)
                        .bind(mark.clone())
                        .bind(least)
                        .bind(mark.clone())
                        .bind(r.name.as_str().as_bytes())
                        .bind(r.owner.to_string())
                        .bind(token)
                        .bind(token)
                        .bind(mark.clone())
                        .bind(mark)
                        .bind(least)
                }
                _ => {
                    let lines = releases.iter().map(json_release);
                    sqlx::query(sql::RELEASE_MANY).bind(Value::from_iter(lines).to_string())
                }
            };
            let mut affected = self.execute(query()).await?.rows_affected();
            if affected == 0 && self.has_caught_up().await? {
                affected = self.execute(query()).await?.rows_affected();
            }
            let batch: Vec<_> = releases.iter().map(|r| (&r.name, r.owner, r.hold, r.token)).collect();
            matched(self, affected, &batch, Standing::Released).await
        })
    }

    fn hand_off<'a>(&'a mut self, hand_offs: &'a [HandOff]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            if let [HandOff { from, to }] = hand_offs {
                let query = sqlx::query(sql::HAND_OFF)
                    .bind(to.hold.mark())
                    .bind(from.name.as_str().as_bytes())
                    .bind(from.owner.to_string())
                    .bind(from.hold.mark())
                    .bind(from.token.get())
                    .bind(to.hold.mark());
                return Ok(vec![self.granted(bind_claim(query, to)).await?]);
            }
            let lines = hand_offs.iter().map(|HandOff { from, to }| {
                let (name, token) = (hex(from.name.as_str()), from.token.get());
                let (owner, hold, ttl) = (to.owner.to_string(), to.hold.mark(), micros(to.ttl));
                json!([
                    name,
                    from.owner.to_string(),
                    from.hold.mark(),
                    token,
                    owner,
                    hold,
                    ttl,
                    &*to.holder,
                    &*to.label
                ])
            });
            self.execute(sqlx::query(sql::HAND_OFF_MANY).bind(Value::from_iter(lines).to_string())).await?;
            let rows = self.rows(hand_offs.iter().map(|h| &h.from.name)).await?;
            Ok(hand_offs.iter().map(|h| granted_in(&rows, &h.to)).collect())
        })
    }

    fn look<'a>(&'a mut self, names: &'a [LockName]) -> Job<'a, Vec<Row>> {
        Box::pin(async move { Ok(self.rows(names.iter()).await?.into_values().collect()) })
    }

    fn list<'a>(&'a mut self, names: &'a Names) -> Job<'a, Vec<Listed>> {
        Box::pin(async move {
            let query = match names {
                Names::BeginningWith(prefix) => {
                    let prefix = prefix.as_bytes();
                    sqlx::query(sql::LIST).bind(prefix).bind(prefix).bind(prefix).bind(prefix)
                }
                Names::Just(name) => {
                    sqlx::query(sql::LIST_ONE).bind(name.as_str().as_bytes()).bind(name.as_str().as_bytes())
                }
            };
            let rows = query.fetch_all(&mut self.conn).await?;
            let listed = |r: &MySqlRow| {
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
            let lines = tickets.iter().map(|ticket| {
                let Ticket { claim: c, client, bell, .. } = ticket;
                let (units, permits) = c.mode.columns();
                json!([
                    hex(c.name.as_str()),
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
            });
            let lines = Value::from_iter(lines).to_string();
            self.execute(sqlx::query(sql::ENQUEUE).bind(micros(PLACE)).bind(lines)).await?;
            if let [Ticket { claim: c, .. }] = tickets {
                let query = sqlx::query(sql::MARK_ONE).bind(c.owner.to_string()).bind(c.name.as_str().as_bytes());
                match self.execute(query).await {
                    Ok(done) if done.rows_affected() > 0 => {
                        return Ok(vec![held_for(done.last_insert_id().cast_signed())]);
                    }
                    Err(error) if !matches!(Fault::of(&error), Fault::Again | Fault::Blocked) => return Err(error),
                    _ => {}
                }
            }
            let names: BTreeSet<&str> = tickets.iter().map(|ticket| ticket.claim.name.as_str()).collect();
            let json = Value::from_iter(names.iter().map(|name| hex(name))).to_string();
            let mark = async |session: &mut Self| {
                loop {
                    // Not to be begun again from the place: it may have been granted the name, and have gone, since.
                    match session.execute(sqlx::query(sql::MARK).bind(&json)).await {
                        Err(error) if matches!(Fault::of(&error), Fault::Again | Fault::Blocked) => {
                            tokio::task::yield_now().await;
                        }
                        marked => return marked.map(|done| done.rows_affected()),
                    }
                }
            };
            if mark(self).await? < names.len() as u64 {
                self.execute(sqlx::query(sql::CREATE_FREE_FENCE).bind(&json)).await?;
                self.execute(sqlx::query(sql::CREATE_FREE_LEASE).bind(&json)).await?;
                mark(self).await?;
            }
            Ok(vec![None; tickets.len()])
        })
    }

    fn queue<'a>(&'a mut self, name: &'a LockName, limit: u32) -> Job<'a, Option<Queue>> {
        Box::pin(async move {
            let name = name.as_str().as_bytes();
            let query = sqlx::query(sql::QUEUE).bind(name).bind(name).bind(limit).bind(name);
            let rows = query.fetch_all(&mut self.conn).await?;
            let Some(first) = rows.first() else {
                return Ok(None);
            };
            let places: Vec<Place> = rows.iter().filter_map(|row| place(row).transpose()).collect::<Result<_, _>>()?;
            Ok(Some(Queue::of(row(first)?, places.into_iter(), limit)))
        })
    }

    fn pass<'a>(&'a mut self, pass: &'a Pass) -> Job<'a, Option<Vec<Granted>>> {
        Box::pin(async move {
            let as_seen = |query: MySqlQuery<'a>| {
                let expires_at = pass.seen.expires_at.unwrap_or(-1);
                query
                    .bind(pass.name.as_str().as_bytes())
                    .bind(pass.seen.token)
                    .bind(&*pass.seen.holds)
                    .bind(expires_at)
                    .bind(expires_at)
            };
            let waiting = |query: MySqlQuery<'a>| query.bind(pass.seen.waiting).bind(pass.last);
            match &pass.to {
                To::Nobody | To::Free => {
                    let done = if matches!(pass.to, To::Free) {
                        let query = as_seen(waiting(sqlx::query(sql::PASS_TO_FREE)));
                        self.execute(query.bind(pass.seen.waiting)).await?
                    } else {
                        self.execute(as_seen(waiting(sqlx::query(sql::PASS_TO_NOBODY)))).await?
                    };
                    Ok((done.rows_affected() > 0).then(Vec::new))
                }
                To::One(hold, lasts) => {
                    let query = as_seen(sqlx::query(sql::PASS_TO_ONE)).bind(hold);
                    let granted = self.granted(waiting(query).bind(micros(*lasts))).await?;
                    let Some(token) = granted else {
                        return Ok(None);
                    };
                    let name = pass.name.as_str().as_bytes();
                    let unplaced = self.execute(sqlx::query(sql::UNPLACE).bind(name).bind(hold)).await;
                    // By itself the grant stands, whatever becomes of this: what is marked neither waits nor shares, and is
                    // swept. A transaction may have been rolled back by it.
                    if self.open {
                        unplaced?;
                    }
                    Ok(Some(vec![Granted { hold: hold.clone(), token }]))
                }
                To::Several(next) | To::More(next) => {
                    let several = matches!(pass.to, To::Several(_));
                    let sql = if several { sql::PASS_TO_SEVERAL } else { sql::PASS_TO_MORE };
                    let lines = Value::from_iter(next.iter().map(|(hold, lasts)| json!([hold, micros(*lasts)])));
                    let query = as_seen(sqlx::query(sql)).bind(pass.seen.waiting).bind(lines.to_string());
                    let query = waiting(query);
                    let done = self.execute(query.bind(next.len() as i64 - 1)).await?;
                    if done.rows_affected() == 0 {
                        return Ok(None);
                    }
                    let spots = next.iter().map(|(hold, _)| json!([hex(pass.name.as_str()), hold]));
                    let places = self.places(Value::from_iter(spots)).await?;
                    let granted = |(hold, _): &(String, Duration)| {
                        Some(Granted { hold: hold.clone(), token: token(*places.get(hold)?)? })
                    };
                    Ok(Some(next.iter().filter_map(granted).collect()))
                }
            }
        })
    }

    fn bury<'a>(&'a mut self, name: &'a LockName, dead: &'a [String]) -> Job<'a, ()> {
        Box::pin(async move {
            let spots = Value::from_iter(dead.iter().map(|hold| json!([hex(name.as_str()), hold])));
            self.execute(sqlx::query(sql::BURY).bind(spots.to_string())).await?;
            Ok(())
        })
    }

    fn leave<'a>(&'a mut self, places: &'a [Spot]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let spots = Value::from_iter(places.iter().map(spot));
            let there = if places.len() > 1 { self.places(spots.clone()).await? } else { HashMap::new() };
            let left = self.execute(sqlx::query(sql::LEAVE).bind(spots.to_string())).await?.rows_affected();
            if left == 0 || left == places.len() as u64 {
                return Ok(vec![left > 0; places.len()]);
            }
            // Whoever had a place and was granted the name in between is told so, and asks again.
            Ok(places.iter().map(|spot| there.contains_key(&spot.hold.mark())).collect())
        })
    }

    fn keep<'a>(&'a mut self, places: &'a [Spot], bell: &'a str) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let spots = Value::from_iter(places.iter().map(spot));
            let query = sqlx::query(sql::KEEP).bind(spots.to_string()).bind(micros(PLACE)).bind(bell);
            if self.execute(query).await?.rows_affected() == places.len() as u64 {
                return Ok(vec![true; places.len()]);
            }
            let there = self.places(spots).await?;
            Ok(places.iter().map(|spot| there.get(&spot.hold.mark()) == Some(&0)).collect())
        })
    }

    fn watch<'a>(&'a mut self, places: &'a [Spot]) -> Job<'a, Vec<Option<Watched>>> {
        Box::pin(async move {
            let spots = Value::from_iter(places.iter().map(spot)).to_string();
            let rows = sqlx::query(sql::WATCH).bind(&spots).bind(&spots).fetch_all(&mut self.conn).await?;
            let watched = |r: &MySqlRow| {
                Ok((r.try_get(10)?, Watched { row: row(r)?, token: r.try_get(11)?, ahead: r.try_get(12)? }))
            };
            let mut watched: HashMap<String, Watched> = readable(rows.iter().map(watched)).collect();
            Ok(places.iter().map(|spot| watched.remove(&spot.hold.mark())).collect())
        })
    }

    fn renew_shares<'a>(&'a mut self, renewals: &'a [Renewal]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let lines = renewals.iter().map(|r| json_renewal(r, r.owner()));
            let lines = Value::from_iter(lines).to_string();
            let mut affected = self.execute(sqlx::query(sql::RENEW_SHARES).bind(&lines)).await?.rows_affected();
            if affected < renewals.len() as u64 && self.has_caught_up().await? {
                affected = self.execute(sqlx::query(sql::RENEW_SHARES).bind(&lines)).await?.rows_affected();
            }
            if affected == 0 || affected == renewals.len() as u64 {
                return Ok(vec![affected > 0; renewals.len()]);
            }
            let rows = sqlx::query(sql::LIVE_SHARES).bind(&lines).fetch_all(&mut self.conn).await?;
            by_hold(renewals.iter().map(|r| r.holding.hold), rows.iter().map(|row| row.try_get(0)))
        })
    }

    fn copy<'a>(&'a mut self, from: &'a Holding, to: Hold, ttl: Duration) -> Job<'a, bool> {
        Box::pin(async move {
            let query = sqlx::query(sql::COPY)
                .bind(to.mark())
                .bind(micros(ttl))
                .bind(from.name.as_str().as_bytes())
                .bind(from.hold.mark())
                .bind(from.token.get());
            Ok(self.execute(query).await?.rows_affected() > 0)
        })
    }

    fn downgrade<'a>(&'a mut self, from: &'a Holding, to: &'a Ticket) -> Job<'a, bool> {
        Box::pin(async move {
            let (units, permits) = to.claim.mode.columns();
            let bind_from = |query: MySqlQuery<'a>| {
                query
                    .bind(from.name.as_str().as_bytes())
                    .bind(from.owner.to_string())
                    .bind(from.hold.mark())
                    .bind(from.token.get())
            };
            let place = sqlx::query(sql::DOWNGRADE_PLACE)
                .bind(&*to.client)
                .bind(units)
                .bind(permits)
                .bind(&*to.claim.holder)
                .bind(micros(to.claim.ttl));
            self.execute(bind_from(place)).await?;
            let done = self.execute(bind_from(sqlx::query(sql::DOWNGRADE_LEASE))).await?;
            Ok(done.rows_affected() > 0)
        })
    }

    fn raise<'a>(&'a mut self, h: &'a Holding, to: FencingToken) -> Job<'a, bool> {
        Box::pin(async move {
            let query = sqlx::query(sql::RAISE)
                .bind(h.name.as_str().as_bytes())
                .bind(h.owner.to_string())
                .bind(h.hold.mark())
                .bind(h.token.get())
                .bind(h.token.get())
                .bind(to.get())
                .bind(to.get())
                .bind(to.get())
                .bind(to.get());
            Ok(self.execute(query).await?.rows_affected() > 0)
        })
    }

    fn uptime(&mut self) -> Job<'_, Option<Duration>> {
        Box::pin(async move {
            let row = sqlx::query(sql::UPTIME).fetch_optional(&mut self.conn).await?;
            let seconds: Option<String> = row.map(|row| row.try_get(1)).transpose()?;
            let seconds = seconds.and_then(|seconds| seconds.parse().ok());
            // Who is not told does not know it to be up for long.
            Ok(Some(Duration::from_secs(seconds.unwrap_or(0))))
        })
    }

    fn evict<'a>(&'a mut self, name: &'a LockName, token: FencingToken) -> Job<'a, bool> {
        Box::pin(async move {
            let name = name.as_str().as_bytes();
            let evicted = self.execute(sqlx::query(sql::EVICT).bind(name).bind(token.get())).await?;
            if evicted.rows_affected() == 0 {
                let note =
                    sqlx::query(sql::NOTE_EVICTED_SHARE).bind(token.get()).bind(name).bind(name).bind(token.get());
                self.execute(note).await?;
                let evicted = self.execute(sqlx::query(sql::EVICT_SHARE).bind(name).bind(token.get())).await?;
                return Ok(evicted.rows_affected() > 0);
            }
            self.execute(sqlx::query(sql::EVICT_FENCE).bind(name).bind(token.get())).await?;
            Ok(true)
        })
    }

    fn last_eviction<'a>(&'a mut self, name: &'a LockName) -> Job<'a, Option<LastEviction>> {
        Box::pin(async move {
            let query = sqlx::query(sql::LAST_EVICTION).bind(name.as_str().as_bytes());
            let Some(row) = query.fetch_optional(&mut self.conn).await? else {
                return Ok(None);
            };
            Ok(Some(LastEviction { token: row.try_get(0)?, evicted: row.try_get(1)? }))
        })
    }

    fn extend<'a>(&'a mut self, name: &'a LockName, token: FencingToken, ttl: Duration) -> Job<'a, bool> {
        Box::pin(async move {
            for sql in [sql::EXTEND, sql::EXTEND_SHARE] {
                let query = sqlx::query(sql).bind(micros(ttl)).bind(name.as_str().as_bytes()).bind(token.get());
                if self.execute(query).await?.rows_affected() > 0 {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }

    fn ensure<'a>(&'a mut self, name: &'a LockName) -> Job<'a, ()> {
        Box::pin(async move {
            let name = name.as_str().as_bytes();
            let seen = sqlx::query(sql::SEEN).bind(micros(NOTED)).bind(name).fetch_optional(&mut self.conn).await?;
            let done = match seen.map(|row| row.try_get(0)).transpose()? {
                Some(false) => return Ok(()),
                Some(true) => self.execute(sqlx::query(sql::NOTE).bind(name)).await,
                None => self.execute(sqlx::query(sql::CREATE_ROW).bind(name)).await,
            };
            match done {
                // Somebody was faster, and has locked it already: the row is there.
                Err(sqlx::Error::Database(e))
                    if e.try_downcast_ref::<MySqlDatabaseError>().is_some_and(|e| e.number() == 1205) =>
                {
                    Ok(())
                }
                done => done.map(|_| ()),
            }
        })
    }

    fn column<'a>(&'a mut self, of: &'a (String, String, String)) -> Job<'a, Option<super::sealed::Column>> {
        Box::pin(self.column_of(of))
    }

    fn record<'a>(&'a mut self, errand: &'a super::records::Errand) -> Job<'a, super::records::Findings> {
        Box::pin(self.carry(errand))
    }

    fn sweep(&mut self, retention: Duration, limit: u32) -> Job<'_, u64> {
        Box::pin(async move {
            let (age, marked) = (micros(retention), micros(retention.max(CLAIM)));
            self.execute(sqlx::query(sql::SWEEP_PLACES).bind(age).bind(limit)).await?;
            self.sweep_rows(micros(retention.max(UNSEEN)), limit).await?;
            let stale = sqlx::query(sql::STALE).bind(age).bind(marked).bind(age).bind(age).bind(limit);
            let stale = stale.fetch_all(&mut self.conn).await?;
            if stale.is_empty() {
                return Ok(0);
            }
            let query = sqlx::query(sql::SWEEP).bind(json_names(&stale)?).bind(age).bind(marked).bind(age);
            // Two rows go with each name.
            Ok(self.execute(query).await?.rows_affected() / 2)
        })
    }

    fn transact(&mut self, step: Step) -> Job<'_, ()> {
        Box::pin(async move {
            // Should we be cut off or stopped in the middle, others do not wait for long.
            let sql = match step {
                Step::Begin => "SET SESSION wait_timeout = 2; START TRANSACTION",
                Step::Commit => "COMMIT; SET SESSION wait_timeout = @@GLOBAL.wait_timeout",
                Step::RollBack => "ROLLBACK; SET SESSION wait_timeout = @@GLOBAL.wait_timeout",
            };
            self.open &= step != Step::RollBack;
            self.conn.execute(sql).await?;
            self.open = step == Step::Begin;
            Ok(())
        })
    }

    fn align<'a>(&'a mut self, places: &'a [Spot]) -> Job<'a, ()> {
        Box::pin(async move {
            let spots = Value::from_iter(places.iter().map(spot)).to_string();
            let latest: i64 = sqlx::query_scalar(sql::LATEST).bind(&spots).fetch_one(&mut self.conn).await?;
            self.execute(sqlx::query(sql::ALIGN).bind(&spots).bind(latest)).await?;
            Ok(())
        })
    }

    fn close(self: Box<Self>) -> Job<'static, ()> {
        Box::pin(self.conn.close())
    }
}

/// The names that rows begin with, as the statements take them.
fn json_names(rows: &[MySqlRow]) -> Result<String, sqlx::Error> {
    let names: Vec<String> =
        rows.iter().map(|row| Ok(hex(&text(row.try_get(0)?)))).collect::<Result<_, sqlx::Error>>()?;
    Ok(Value::from_iter(names).to_string())
}

/// Names are stored as the bytes of valid UTF-8.
fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

fn row(row: &MySqlRow) -> Result<Row, sqlx::Error> {
    Ok(Row {
        name: text(row.try_get(0)?),
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
fn place(row: &MySqlRow) -> Result<Option<Place>, sqlx::Error> {
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

impl super::Database for MySql {}

impl Fence for MySql {
    const KIND: Kind = Kind::MySql;

    fn fence<'a>(
        conn: &'a mut MySqlConnection,
        check: &'a Check,
    ) -> Pin<Box<dyn Future<Output = Result<Verdict, sqlx::Error>> + Send + 'a>> {
        Box::pin(async move {
            // As text, not prepared: a future that is dropped while sqlx prepares leaves a connection that never answers
            // again, and with it a transaction that never ends.
            let name = format!("X'{}'", hex(&check.name));
            if check.by_writing {
                return fence_by_writing(conn, check, &name).await;
            }
            let sql = if check.shared {
                let hold = format!("'{}'", check.mark);
                let token = check.token.to_string();
                sql::FENCE_SHARE.replacen('?', &hold, 1).replacen('?', &token, 1).replacen('?', &name, 1)
            } else {
                sql::FENCE.replace('?', &name)
            };
            let row = match sqlx::raw_sql(AssertSqlSafe(sql)).fetch_optional(&mut *conn).await {
                Ok(row) => row.as_ref().map(token_and_seen).transpose()?,
                Err(error) if is_stale(&error) => return Ok(Verdict::StaleSnapshot),
                Err(error) => return Err(error),
            };
            Ok(match row {
                // The fence's token is that of whoever had the name alone last, or of the first who shared it since.
                Some((present, Some(_))) if check.shared && present <= check.token => Verdict::Fenced,
                Some((present, None)) if check.shared && present <= check.token => {
                    let hold = format!("'{}'", check.mark);
                    let sql = sql::SHARE.replacen('?', &name, 1).replacen('?', &hold, 1);
                    let sql = sql.replacen('?', &check.token.to_string(), 1);
                    match sqlx::raw_sql(AssertSqlSafe(sql)).fetch_optional(conn).await? {
                        Some(_) => Verdict::StaleSnapshot,
                        None => Verdict::Superseded,
                    }
                }
                Some((present, _)) if present != check.token => Verdict::Superseded,
                Some((present, seen)) if seen == Some(present) => Verdict::Fenced,
                Some(_) => Verdict::StaleSnapshot,
                None => Verdict::Superseded,
            })
        })
    }
}

/// What a fence reads: the token that is there now, and what this transaction sees of it.
fn token_and_seen(row: &MySqlRow) -> Result<(i64, Option<i64>), sqlx::Error> {
    Ok((row.try_get(0)?, row.try_get(1)?))
}

/// How often a fence looks whether its node has been told of its holding, and how long it waits in between.
const LOOKS: u32 = 20;
const BETWEEN_LOOKS: Duration = Duration::from_millis(10);

/// The fence where several servers are written: of this transaction, and of one that takes the name over elsewhere, only one can
/// commit.
async fn fence_by_writing(conn: &mut MySqlConnection, check: &Check, name: &str) -> Result<Verdict, sqlx::Error> {
    let (token, hold) = (check.token.to_string(), format!("'{}'", check.mark));
    let (sql, binds) = if check.shared {
        (sql::FENCE_SHARE_BY_WRITING, vec![&*hold, &*token, name, name, &*token, name])
    } else {
        (sql::FENCE_BY_WRITING, vec![name, &*token, name, &*token, &*token, name])
    };
    let sql = binds.into_iter().fold(sql.to_owned(), |sql, bind| sql.replacen('?', bind, 1));
    for _ in 0..LOOKS {
        let row = match sqlx::raw_sql(AssertSqlSafe(sql.clone())).fetch_all(&mut *conn).await {
            Ok(rows) => rows.first().map(token_and_seen).transpose()?,
            Err(error) if is_stale(&error) => return Ok(Verdict::StaleSnapshot),
            Err(error) => return Err(error),
        };
        match row {
            Some((present, _)) if present > check.token => return Ok(Verdict::Superseded),
            Some((_, Some(_))) if check.shared => return Ok(Verdict::Fenced),
            Some((present, seen)) if !check.shared => {
                return Ok(if seen == Some(present) { Verdict::Fenced } else { Verdict::StaleSnapshot });
            }
            // Here it is still before the holding, or after it, and the name was purged.
            _ => tokio::time::sleep(BETWEEN_LOOKS).await,
        }
    }
    Ok(Verdict::StaleSnapshot)
}

/// MariaDB with innodb_snapshot_isolation: the row has changed since the snapshot.
fn is_stale(error: &sqlx::Error) -> bool {
    let error = error.as_database_error().and_then(|error| error.try_downcast_ref::<MySqlDatabaseError>());
    error.is_some_and(|error| error.number() == 1020)
}
