//! PostgreSQL: rows are taken with SKIP LOCKED, in autocommit, at READ COMMITTED, by the clock that goes on.
//!
//! Each verb has a short form for a batch of one, whose plan PostgreSQL keeps, and a form with arrays for more.
//! No session state is set anywhere, so it all works behind a pooler that changes the server between transactions.

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
mod records;
mod rows;
mod session;
#[cfg(test)]
#[allow(dead_code, reason = "what the executor will need")]
mod store;

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgArguments, PgConnectOptions, PgListener, PgPoolOptions, PgRow};
use sqlx::{
    AssertSqlSafe, ConnectOptions, Connection, Executor, PgConnection, PgPool, Postgres, Row as _, SqlSafeStr as _,
    SqlStr,
};

use super::sealed::{Check, Fence, Verdict};
use super::{
    Anchoring, Backend, CLAIM, Claim, Granted, HandOff, Holding, Job, Kind, LastEviction, Listed, Listener, Mode,
    NOTED, Names, PLACE, Pass, PassedOn, Place, Queue, Release, Renewal, Row, Session, Spot, Step, Ticket, To, UNSEEN,
    Watched,
};
use super::{by_hold, found, held_for, in_order, micros, readable, token};
use crate::error::{Result, not_writable};
use crate::name::LockName;
use crate::owner::Hold;
use crate::schema;
use crate::token::FencingToken;

/// The statements, laid out to be read.
#[rustfmt::skip]
mod sql {
use super::super::{place_columns, row_columns};

/// Microseconds since the epoch. now() would be the start of the transaction: stale by all the time waited.
macro_rules! now {
    () => {
        "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    };
}
pub(super) use now;

// $1 name, $2 owner, $3 hold, $4 holder, $5 label, $6 ttl.
// The rows are locked first and written second, so that the clock is read when nothing is waited for any more. SKIP LOCKED
// meets two locks: another client about to take the same name, and the fence of somebody's open transaction.
pub(super) const ACQUIRE: &str = concat!("
WITH free AS MATERIALIZED (
    SELECT l.name, CASE WHEN l.holds = $3 THEN l.token ELSE greatest(l.token + 1, f.token + 1, ", now!(), ") END AS token
      FROM sqlock_fence AS f JOIN sqlock_lease AS l ON l.name = f.name
     WHERE f.name = $1
       AND ((l.holds = '' OR l.expires_at <= ", now!(), ") AND l.waiting = 0
            OR l.holds = $3)                      -- our own, sent again because the reply was lost
       FOR UPDATE SKIP LOCKED),
fence AS (
    UPDATE sqlock_fence AS f SET token = free.token FROM free WHERE f.name = free.name)
UPDATE sqlock_lease AS l
   SET owner = $2, holds = $3, holder = $4, label = $5, token = free.token,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + $6
  FROM free
 WHERE l.name = free.name
RETURNING l.name, l.token");

// As above; only for names that have no rows yet. DO NOTHING writes nothing, not even a transaction id, when there are.
pub(super) const CREATE: &str = concat!("
WITH fence AS (
    INSERT INTO sqlock_fence (name, token) VALUES ($1, ", now!(), ")
        ON CONFLICT (name) DO NOTHING
    RETURNING name, token)
INSERT INTO sqlock_lease (name, owner, holds, holder, label, token, acquired_at, expires_at)
SELECT name, $2, $3, $4, $5, token, ", now!(), ", ", now!(), " + $6 FROM fence
RETURNING name, token");

pub(super) const ACQUIRE_MANY: &str = concat!("
WITH claim AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bigint[])
                  AS c (name, owner, hold, holder, label, ttl)),
free AS MATERIALIZED (
    SELECT l.name, claim.owner, claim.hold, claim.holder, claim.label, claim.ttl,
           CASE WHEN l.holds = claim.hold THEN l.token ELSE greatest(l.token + 1, f.token + 1, ", now!(), ") END AS token
      FROM claim JOIN sqlock_fence AS f ON f.name = claim.name JOIN sqlock_lease AS l ON l.name = claim.name
     WHERE (l.holds = '' OR l.expires_at <= ", now!(), ") AND l.waiting = 0 OR l.holds = claim.hold
       FOR UPDATE OF f, l SKIP LOCKED),
fence AS (
    UPDATE sqlock_fence AS f SET token = free.token FROM free WHERE f.name = free.name)
UPDATE sqlock_lease AS l
   SET owner = free.owner, holds = free.hold, holder = free.holder, label = free.label, token = free.token,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + free.ttl
  FROM free
 WHERE l.name = free.name
RETURNING l.name, l.token");

// In order of names, so that two clients that create the same names wait for each other in one direction only.
pub(super) const CREATE_MANY: &str = concat!("
WITH claim AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bigint[])
                  AS c (name, owner, hold, holder, label, ttl)),
fence AS (
    INSERT INTO sqlock_fence (name, token) SELECT name, ", now!(), " FROM claim ORDER BY name
        ON CONFLICT (name) DO NOTHING
    RETURNING name, token)
INSERT INTO sqlock_lease (name, owner, holds, holder, label, token, acquired_at, expires_at)
SELECT fence.name, owner, hold, holder, label, fence.token, ", now!(), ", ", now!(), " + ttl
  FROM fence JOIN claim ON claim.name = fence.name
RETURNING name, token");

// $1 name, $2 owner, $3 hold, $4 ttl.
pub(super) const JOIN: &str = concat!("
UPDATE sqlock_lease
   SET holds = CASE WHEN position($3 IN holds) > 0 THEN holds ELSE holds || $3 END,
       expires_at = greatest(expires_at, ", now!(), " + $4)
 WHERE name = $1 AND owner = $2 AND holds NOT IN ('', '-', '+') AND expires_at > ", now!(), "
RETURNING name, token");

// $1 name, $2 owner, $3 hold, $4 token, $5 ttl. With other holds of the same owner beside it, the latest expiry counts.
pub(super) const RENEW: &str = concat!("
UPDATE sqlock_lease
   SET expires_at = greatest(CASE WHEN holds = $3 THEN 0 ELSE expires_at END, ", now!(), " + $5)
 WHERE name = $1 AND owner = $2 AND token = $4 AND position($3 IN holds) > 0");

pub(super) const RENEW_MANY: &str = concat!("
UPDATE sqlock_lease AS l
   SET expires_at = greatest(CASE WHEN l.holds = r.hold THEN 0 ELSE l.expires_at END, ", now!(), " + r.ttl)
  FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[]) AS r (name, owner, hold, token, ttl)
 WHERE l.name = r.name AND l.owner = r.owner AND l.token = r.token AND position(r.hold IN l.holds) > 0
RETURNING l.name");

// $1 name, $2 owner, $3 hold, $4 token or 0 for any, $5 hold_at_least.
// The commit does not wait for the disk: a release that a crash undoes leaves the name to its TTL, and any later grant
// is flushed together with it. set_config(…, true) ends with this statement's transaction.
// https://www.postgresql.org/docs/current/wal-async-commit.html
pub(super) const RELEASE: &str = concat!("
UPDATE sqlock_lease
   SET expires_at = CASE WHEN holds <> $3 THEN expires_at
                         ELSE greatest(", now!(), ", least(acquired_at, ", now!(), ") + $5) END,
       holds = CASE WHEN holds = $3 AND least(acquired_at, ", now!(), ") + $5 > ", now!(), " THEN '-'
                    ELSE replace(holds, $3, '') END
 WHERE name = $1 AND owner = $2 AND ($4 = 0 OR token = $4) AND position($3 IN holds) > 0
   AND (waiting = 0 OR holds <> $3 OR $5 > 0)
   AND set_config('synchronous_commit', 'off', true) IS NOT NULL");

pub(super) const RELEASE_MANY: &str = concat!("
UPDATE sqlock_lease AS l
   SET expires_at = CASE WHEN l.holds <> r.hold THEN l.expires_at
                         ELSE greatest(", now!(), ", least(l.acquired_at, ", now!(), ") + r.least) END,
       holds = CASE WHEN l.holds = r.hold AND least(l.acquired_at, ", now!(), ") + r.least > ", now!(), " THEN '-'
                    ELSE replace(l.holds, r.hold, '') END
  FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[]) AS r (name, owner, hold, token, least)
 WHERE l.name = r.name AND l.owner = r.owner AND (r.token = 0 OR l.token = r.token) AND position(r.hold IN l.holds) > 0
   AND (l.waiting = 0 OR l.holds <> r.hold OR r.least > 0)
   AND set_config('synchronous_commit', 'off', true) IS NOT NULL
RETURNING l.name");

// $1 name, $2 owner, $3 hold, $4 token; the next holder: $5 owner, $6 hold, $7 holder, $8 label, $9 ttl.
pub(super) const HAND_OFF: &str = concat!("
WITH mine AS MATERIALIZED (
    SELECT l.name, CASE WHEN l.holds = $6 THEN l.token ELSE greatest(l.token + 1, f.token + 1, ", now!(), ") END AS token
      FROM sqlock_fence AS f JOIN sqlock_lease AS l ON l.name = f.name
     WHERE f.name = $1
       AND (l.owner = $2 AND l.holds = $3 AND l.token = $4 AND l.waiting = 0
            OR l.holds = $6)                      -- done already, the reply was lost
       FOR UPDATE SKIP LOCKED),
fence AS (
    UPDATE sqlock_fence AS f SET token = mine.token FROM mine WHERE f.name = mine.name)
UPDATE sqlock_lease AS l
   SET owner = $5, holds = $6, holder = $7, label = $8, token = mine.token,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + $9
  FROM mine
 WHERE l.name = mine.name
RETURNING l.name, l.token");

// The same with arrays, in the same order.
pub(super) const HAND_OFF_MANY: &str = concat!("
WITH pass AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[],
                         $5::text[], $6::text[], $7::text[], $8::text[], $9::bigint[])
                  AS p (name, owner, hold, token, next_owner, next_hold, holder, label, ttl)),
mine AS MATERIALIZED (
    SELECT l.name, p.next_owner, p.next_hold, p.holder, p.label, p.ttl,
           CASE WHEN l.holds = p.next_hold THEN l.token ELSE greatest(l.token + 1, f.token + 1, ", now!(), ") END AS token
      FROM pass AS p JOIN sqlock_fence AS f ON f.name = p.name JOIN sqlock_lease AS l ON l.name = p.name
     WHERE l.owner = p.owner AND l.holds = p.hold AND l.token = p.token AND l.waiting = 0 OR l.holds = p.next_hold
       FOR UPDATE OF f, l SKIP LOCKED),
fence AS (
    UPDATE sqlock_fence AS f SET token = mine.token FROM mine WHERE f.name = mine.name)
UPDATE sqlock_lease AS l
   SET owner = mine.next_owner, holds = mine.next_hold, holder = mine.holder, label = mine.label, token = mine.token,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + mine.ttl
  FROM mine
 WHERE l.name = mine.name
RETURNING l.name, l.token");

// $1 names
pub(super) const LOOK: &str = concat!("
SELECT ", row_columns!(), ", ", now!(), " FROM sqlock_lease WHERE name = ANY($1)");

// $1 prefix or name
macro_rules! list {
    ($condition:literal) => {
        concat!("
SELECT ", row_columns!("l"), ", ", now!(), ", 0::bigint, 0::bigint, ", waiters!(), "
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
pub(super) const LIST: &str = list!("starts_with(l.name, $1)");
pub(super) const LIST_ONE: &str = list!("l.name = $1");

// $1 claim; arrays: $2 name, $3 owner, $4 hold, $5 client, $6 bell, $7 units, $8 permits, $9 waited, $10 holder, $11 label.
// All in one step: whoever gives the name back after this sees that somebody waits, and who. The lease row is as it is once it
// is locked, so that it tells of the holder who will see it.
pub(super) const ENQUEUE: &str = concat!("
WITH ticket AS MATERIALIZED (
    SELECT * FROM unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::bigint[], $8::bigint[], $9::bigint[],
                         $10::text[], $11::text[])
                  AS t (name, owner, hold, client, bell, units, permits, waited, holder, label)),
names AS MATERIALIZED (
    SELECT DISTINCT name FROM ticket ORDER BY name),
fence AS (
    INSERT INTO sqlock_fence (name, token) SELECT name, ", now!(), " FROM names ON CONFLICT (name) DO NOTHING),
lease AS (
    INSERT INTO sqlock_lease AS l (name, owner, holds, token, holder, label, acquired_at, expires_at, waiting)
    SELECT name, '', '', ", now!(), ", '', '', ", now!(), ", ", now!(), ", ", now!(), " FROM names
        ON CONFLICT (name) DO UPDATE SET waiting = greatest(l.waiting + 1, ", now!(), ")
    RETURNING l.name, l.owner, l.holds, l.expires_at),
place AS (
    INSERT INTO sqlock_place (name, owner, hold, client, bell, units, permits, place, token, holder, label, acquired_at,
                              expires_at)
    SELECT name, t.owner, hold, client, bell, units, permits, ", now!(), " - waited, 0, holder, label, 0, ", now!(), " + $1
      FROM ticket AS t JOIN lease USING (name)
        ON CONFLICT (name, hold) DO NOTHING)
SELECT t.hold, l.expires_at - ", now!(), "
  FROM ticket AS t JOIN lease AS l USING (name)
 WHERE l.holds NOT IN ('', '+') AND l.owner <> t.owner");

// $1 name, $2 limit
pub(super) const QUEUE: &str = concat!("
SELECT ", row_columns!("l"), ", ", now!(), ", ", place_columns!("p"), "
  FROM sqlock_lease AS l LEFT JOIN (
       (SELECT * FROM sqlock_place WHERE name = $1 AND token > 0)
        UNION ALL
       (SELECT * FROM sqlock_place WHERE name = $1 AND token = 0 ORDER BY place LIMIT $2)) AS p ON true
 WHERE l.name = $1");

/// The name still stands as it was seen: $1 name, $2 token, $3 holds, $4 expires_at or -1 for any.
macro_rules! as_seen {
    () => {
        "l.name = $1 AND l.token = $2 AND l.holds = $3 AND ($4 = -1 OR l.expires_at = $4)"
    };
}
/// $5 waiting as it was seen, $6 whether nobody else waits.
macro_rules! still_waiting {
    () => {
        concat!("CASE WHEN l.waiting <> $5 THEN l.waiting WHEN $6 THEN 0 WHEN l.waiting = 0 THEN ", now!(), "
                        ELSE l.waiting END")
    };
}

pub(super) const PASS_TO_NOBODY: &str = concat!("
UPDATE sqlock_lease AS l SET waiting = ", still_waiting!(), " WHERE ", as_seen!());

// Whoever has joined the line since has to be let in instead.
pub(super) const PASS_TO_FREE: &str = concat!("
UPDATE sqlock_lease AS l
   SET owner = '', holds = '', expires_at = ", now!(), ", waiting = ", still_waiting!(), "
 WHERE ", as_seen!(), " AND l.waiting = $5
   AND set_config('synchronous_commit', 'off', true) IS NOT NULL");

// $7 hold, $8 lasts
pub(super) const PASS_TO_ONE: &str = concat!("
WITH free AS MATERIALIZED (
    SELECT l.name, greatest(l.token + 1, f.token + 1, ", now!(), ") AS token
      FROM sqlock_fence AS f JOIN sqlock_lease AS l ON l.name = f.name
     WHERE f.name = $1 AND ", as_seen!(), "
       FOR UPDATE SKIP LOCKED),
next AS (
    DELETE FROM sqlock_place AS p USING free WHERE p.name = free.name AND p.hold = $7 AND p.token = 0
    RETURNING p.*, free.token AS granted),
fence AS (
    UPDATE sqlock_fence AS f SET token = next.granted FROM next WHERE f.name = next.name)
UPDATE sqlock_lease AS l
   SET owner = next.owner, holds = next.hold, holder = next.holder, label = next.label, token = next.granted,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + $8, waiting = ", still_waiting!(), "
  FROM next
 WHERE l.name = next.name
RETURNING l.holds, l.token");

// $7 holds, $8 lasts: arrays. Whoever has joined the line since may be one of them. The first of those who share it raise the fence's token above all who held it alone; those who
// come in beside them leave it, and so leave the fences of the others. What is shared has no expiry of its own.
macro_rules! pass_to_many {
    ($least:literal, $free:literal, $fence:literal) => {
        concat!("
WITH free AS MATERIALIZED (
    SELECT l.name, greatest(", $least, ", ", now!(), ") AS token
      FROM ", $free, " WHERE ", as_seen!(), " AND l.waiting = $5
       FOR UPDATE SKIP LOCKED),
next AS (
    UPDATE sqlock_place AS p
       SET token = free.token + n.i - 1, acquired_at = ", now!(), ", expires_at = ", now!(), " + n.lasts
      FROM free, unnest($7::text[], $8::bigint[]) WITH ORDINALITY AS n (hold, lasts, i)
     WHERE p.name = free.name AND p.hold = n.hold AND p.token = 0
    RETURNING p.name, p.hold, p.token),
", $fence, "
lease AS (
    UPDATE sqlock_lease AS l
       SET owner = '', holds = '+', holder = '', label = '', token = free.token + cardinality($7) - 1,
           acquired_at = ", now!(), ", expires_at = 9223372036854775807, waiting = ", still_waiting!(), "
      FROM free
     WHERE l.name = free.name AND EXISTS (SELECT 1 FROM next))
SELECT hold, token FROM next")
    };
}
pub(super) const PASS_TO_SEVERAL: &str = pass_to_many!(
    "l.token + 1, f.token + 1", "sqlock_fence AS f JOIN sqlock_lease AS l ON l.name = f.name", "
fence AS (
    UPDATE sqlock_fence AS f SET token = free.token FROM free WHERE f.name = free.name AND EXISTS (SELECT 1 FROM next)),");
pub(super) const PASS_TO_MORE: &str = pass_to_many!("l.token + 1", "sqlock_lease AS l", "");

// $1 name, $2 owner, $3 hold, $4 token, $5 lasts. The line is read from the statement's snapshot, and the lease row as it is once
// it is locked: who has joined in between has changed `waiting`. A first one who left in between is not there to be deleted.
pub(super) const PASS_ON: &str = concat!("
WITH mine AS MATERIALIZED (
    SELECT l.name, l.waiting, greatest(l.token + 1, f.token + 1, ", now!(), ") AS token
      FROM sqlock_fence AS f JOIN sqlock_lease AS l ON l.name = f.name
     WHERE f.name = $1 AND l.owner = $2 AND l.holds = $3 AND l.token = $4
       FOR UPDATE SKIP LOCKED),
line AS MATERIALIZED (
    SELECT hold FROM sqlock_place WHERE name = $1 AND token = 0 ORDER BY place, hold LIMIT 2),
alone AS MATERIALIZED (
    SELECT waiting FROM sqlock_lease WHERE name = $1 AND (SELECT count(*) FROM line) = 1),
next AS (
    DELETE FROM sqlock_place AS p USING mine
     WHERE p.name = mine.name AND p.hold = (SELECT hold FROM line LIMIT 1)
       AND p.token = 0 AND p.units = 0 AND p.permits = 0 AND p.expires_at > ", now!(), "
    RETURNING p.*, mine.token AS granted, mine.waiting),
fence AS (
    UPDATE sqlock_fence AS f SET token = next.granted FROM next WHERE f.name = next.name)
UPDATE sqlock_lease AS l
   SET owner = next.owner, holds = next.hold, holder = next.holder, label = next.label, token = next.granted,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + $5,
       waiting = CASE WHEN next.waiting = (SELECT waiting FROM alone) THEN 0 ELSE next.waiting END
  FROM next
 WHERE l.name = next.name
RETURNING l.holds, l.token, next.bell, l.waiting > 0");

// $1 name, $2 holds
pub(super) const BURY: &str = concat!("
DELETE FROM sqlock_place WHERE name = $1 AND hold = ANY($2) AND expires_at <= ", now!());

// $1 names, $2 holds
pub(super) const LEAVE: &str = "
DELETE FROM sqlock_place AS p USING unnest($1::text[], $2::text[]) AS s (name, hold)
 WHERE p.name = s.name AND p.hold = s.hold
RETURNING p.hold";

// Should we be cut off or stopped in the middle of a transaction, others do not wait for long. It ends with the transaction.
pub(super) const BEGIN_BRIEFLY: &str = "
BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;
SET LOCAL idle_in_transaction_session_timeout = '2s';
SET LOCAL lock_timeout = '1s'";

// $1 names, $2 holds
pub(super) const ALIGN: &str = "
WITH mine AS MATERIALIZED (
    SELECT p.name, p.hold, p.place
      FROM unnest($1::text[], $2::text[]) AS s (name, hold)
      JOIN sqlock_place AS p ON p.name = s.name AND p.hold = s.hold AND p.token = 0)
UPDATE sqlock_place AS p SET place = (SELECT max(place) FROM mine)
  FROM mine
 WHERE p.name = mine.name AND p.hold = mine.hold";

// $1 names, $2 holds, $3 claim, $4 bell
pub(super) const KEEP: &str = concat!("
UPDATE sqlock_place AS p SET expires_at = ", now!(), " + $3, bell = $4
  FROM unnest($1::text[], $2::text[]) AS s (name, hold)
 WHERE p.name = s.name AND p.hold = s.hold AND p.token = 0
RETURNING p.hold");

// $1 names, $2 holds. Where it stands in the line is counted in one pass over the line, however many places are asked for.
pub(super) const WATCH: &str = concat!("
SELECT ", row_columns!("l"), ", ", now!(), ", s.hold, p.token, coalesce(q.ahead, 0)
  FROM unnest($1::text[], $2::text[]) AS s (name, hold) JOIN sqlock_lease AS l ON l.name = s.name
       LEFT JOIN sqlock_place AS p ON p.name = s.name AND p.hold = s.hold
       LEFT JOIN (SELECT w.name, w.hold, count(*) FILTER (WHERE w.expires_at > ", now!(), ") OVER (PARTITION BY w.name
                                 ORDER BY w.place ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS ahead
                    FROM sqlock_place AS w WHERE w.name = ANY ($1) AND w.token = 0) AS q
         ON q.name = p.name AND q.hold = p.hold");

// $1 names, $2 holds, $3 tokens, $4 ttls, $5 owners. What has run out does not count any more, and others may have come in.
pub(super) const RENEW_SHARES: &str = concat!("
UPDATE sqlock_place AS p SET expires_at = ", now!(), " + s.ttl, owner = s.owner
  FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::text[]) AS s (name, hold, token, ttl, owner)
 WHERE p.name = s.name AND p.hold = s.hold AND p.token = s.token AND p.expires_at > ", now!(), "
RETURNING p.hold");

// $1 name, $2 hold, $3 token, $4 the copy's hold, $5 ttl
pub(super) const COPY: &str = concat!("
INSERT INTO sqlock_place (name, owner, hold, client, bell, units, permits, place, token, holder, label, acquired_at, expires_at)
SELECT name, owner, $4, client, '', units, permits, place, token, holder, label, acquired_at, ", now!(), " + $5
  FROM sqlock_place WHERE name = $1 AND hold = $2 AND token = $3 AND expires_at > ", now!(), "
    ON CONFLICT (name, hold) DO UPDATE SET expires_at = excluded.expires_at");

// $1 name, $2 owner, $3 hold, $4 token; the share: $5 client, $6 units, $7 permits, $8 ttl, $9 holder
pub(super) const DOWNGRADE: &str = concat!("
WITH lease AS (
    UPDATE sqlock_lease SET owner = '', holds = '+', holder = '', expires_at = 9223372036854775807
     WHERE name = $1 AND owner = $2 AND holds = $3 AND token = $4
    RETURNING name, token, label, acquired_at)
INSERT INTO sqlock_place (name, owner, hold, client, bell, units, permits, place, token, holder, label, acquired_at, expires_at)
SELECT name, $2, $3, $5, '', $6, $7, ", now!(), ", token, $9, label, acquired_at, ", now!(), " + $8 FROM lease
RETURNING name");

// $1 name, $2 owner, $3 hold, $4 token, $5 the token that it is raised to. A token never goes down, whatever is asked for.
pub(super) const RAISE: &str = "
WITH mine AS MATERIALIZED (
    SELECT l.name
      FROM sqlock_fence AS f JOIN sqlock_lease AS l ON l.name = f.name
     WHERE f.name = $1 AND l.owner = $2 AND l.holds = $3
       AND (l.token = $4 AND $4 < $5
            OR l.token = $5)                      -- done already, the reply was lost
       FOR UPDATE SKIP LOCKED),
fence AS (
    UPDATE sqlock_fence AS f SET token = $5 FROM mine WHERE f.name = mine.name)
UPDATE sqlock_lease AS l SET token = $5 FROM mine WHERE l.name = mine.name";

pub(super) const UPTIME: &str = "
SELECT (extract(epoch FROM clock_timestamp() - pg_postmaster_start_time()) * 1000000)::bigint";

// $1 name, $2 token. The row of the name first, as in every statement that locks both.
pub(super) const EVICT_SHARE: &str = "
WITH lease AS (
    UPDATE sqlock_lease SET evicted = greatest(evicted, $2)
     WHERE name = $1 AND EXISTS (SELECT 1 FROM sqlock_place WHERE name = $1 AND token = $2 AND token > 0)
    RETURNING name)
DELETE FROM sqlock_place AS p USING lease WHERE p.name = lease.name AND p.token = $2 AND p.token > 0
RETURNING p.name";

// $1 name
pub(super) const LAST_EVICTION: &str = "SELECT token, evicted FROM sqlock_lease WHERE name = $1";

// $1 name, $2 token, $3 ttl
pub(super) const EXTEND: &str = concat!("
UPDATE sqlock_lease SET expires_at = greatest(expires_at, ", now!(), " + $3)
 WHERE name = $1 AND token = $2 AND holds NOT IN ('', '-', '+') AND expires_at > ", now!());

pub(super) const EXTEND_SHARE: &str = concat!("
UPDATE sqlock_place SET expires_at = greatest(expires_at, ", now!(), " + $3)
 WHERE name = $1 AND token = $2 AND token > 0 AND owner <> '' AND expires_at > ", now!());

// pg_notify, and not NOTIFY, takes parameters. $1 channels, $2 what to say.
pub(super) const RING: &str = "SELECT pg_notify(channel, said) FROM unnest($1::text[], $2::text[]) AS b (channel, said)";

// $1 name, $2 token. The evicted holder's next fence fails; one that is open now ends in peace.
pub(super) const EVICT: &str = concat!("
WITH evicted AS (
    UPDATE sqlock_lease SET owner = '', holds = '', evicted = greatest(evicted, token), expires_at = ", now!(), "
     WHERE name = $1 AND token = $2 AND holds NOT IN ('', '+')
    RETURNING name),
unfenced AS MATERIALIZED (
    SELECT name FROM sqlock_fence WHERE name = $1 AND token = $2 FOR UPDATE SKIP LOCKED),
fence AS (
    UPDATE sqlock_fence AS f SET token = f.token + 1 FROM unfenced AS u, evicted AS e WHERE f.name = u.name)
SELECT name FROM evicted");

// $1 retention, $2 limit, $3 retention or claim, whichever is longer. FOR UPDATE checks the condition again once it has the rows, and from then on nobody changes
// them: a row that was taken in between is not deleted.
pub(super) const SWEEP: &str = concat!("
WITH stale AS MATERIALIZED (
    SELECT l.name FROM sqlock_lease AS l JOIN sqlock_fence AS f ON f.name = l.name
     WHERE l.token < ", now!(), " - $1 AND l.waiting < ", now!(), " - $3
       AND (l.expires_at < ", now!(), " - $1 OR l.holds = '+')
       AND NOT EXISTS (SELECT 1 FROM sqlock_place AS p WHERE p.name = l.name AND p.expires_at >= ", now!(), " - $1)
     LIMIT $2 FOR UPDATE SKIP LOCKED),
fence AS (
    DELETE FROM sqlock_fence AS f USING stale WHERE f.name = stale.name)
DELETE FROM sqlock_lease AS l USING stale WHERE l.name = stale.name");

// $1 name, $2 how old the note may get. Nothing is waited for and, most of the time, nothing is written.
pub(super) const ENSURE: &str = concat!("
WITH noted AS MATERIALIZED (
    SELECT name FROM sqlock_row WHERE name = $1 AND seen_at < ", now!(), " - $2 FOR UPDATE SKIP LOCKED),
note AS (
    UPDATE sqlock_row AS r SET seen_at = ", now!(), " FROM noted WHERE r.name = noted.name)
INSERT INTO sqlock_row (name, seen_at)
SELECT $1, ", now!(), " WHERE NOT EXISTS (SELECT 1 FROM sqlock_row WHERE name = $1)
    ON CONFLICT (name) DO NOTHING");

// $1 retention, $2 limit
pub(super) const SWEEP_ROWS: &str = concat!("
WITH unseen AS MATERIALIZED (
    SELECT name FROM sqlock_row WHERE seen_at < ", now!(), " - $1 LIMIT $2 FOR UPDATE SKIP LOCKED)
DELETE FROM sqlock_row AS r USING unseen WHERE r.name = unseen.name");

// $1 retention, $2 limit
pub(super) const SWEEP_PLACES: &str = concat!("
WITH stale AS MATERIALIZED (
    SELECT name, hold FROM sqlock_place WHERE expires_at < ", now!(), " - $1 LIMIT $2 FOR UPDATE SKIP LOCKED)
DELETE FROM sqlock_place AS p USING stale WHERE p.name = stale.name AND p.hold = stale.hold");

// $1 name, $2 owner, $3 hold. FOR SHARE keeps the row until the transaction ends: a takeover skips it, other fences of
// the same holding share it. The token comes from the row as it is once it is locked.
// https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS
pub(super) const FENCE: &str = "
SELECT f.token, l.owner = $2 AND position($3 IN l.holds) > 0
  FROM sqlock_fence AS f JOIN sqlock_lease AS l ON l.name = f.name
 WHERE f.name = $1
   FOR SHARE OF f";

// The same for one of those who share it. $1 name, $2 owner, $3 hold. Since anybody had it alone, the fence's token has risen
// above those of the shares.
pub(super) const FENCE_SHARE: &str = "
SELECT f.token, p.token
  FROM sqlock_fence AS f JOIN sqlock_place AS p ON p.name = f.name
 WHERE f.name = $1 AND p.owner = $2 AND p.hold = $3 AND p.token > 0
   FOR SHARE OF f";
}

/// The backend on connections made like those of the caller's pool.
pub(crate) struct PostgresBackend {
    options: Arc<PgConnectOptions>,
    /// Nothing counts that only one server has.
    synchronous: bool,
}

impl PostgresBackend {
    pub(crate) fn new(pool: &PgPool) -> Self {
        Self { options: pool.connect_options(), synchronous: false }
    }

    pub(crate) fn with(options: PgConnectOptions) -> Self {
        Self { options: Arc::new(options), synchronous: false }
    }
}

impl Backend for PostgresBackend {
    fn place(&self) -> String {
        format!("{}:{}", self.options.get_host(), self.options.get_port())
    }

    fn synchronous(&mut self) -> bool {
        self.synchronous = true;
        true
    }

    fn connect(&self) -> Job<'_, Box<dyn Session>> {
        Box::pin(async move {
            let mut conn = (*self.options).clone().disable_statement_logging().connect().await?;
            let about: (String, String, String, bool, String) = sqlx::query_as(
                "SELECT current_setting('default_transaction_isolation'), current_setting('synchronous_commit'),
                        current_setting('default_transaction_read_only'), pg_is_in_recovery(),
                        current_setting('synchronous_standby_names')",
            )
            .fetch_one(&mut conn)
            .await?;
            let (isolation, commit, read_only, is_standby, standbys) = about;
            if is_standby {
                return Err(not_writable(format!("{} is a standby, which cannot be written", self.place())));
            }
            if self.synchronous
                && let Some(missing) = missing_standby(&mut conn, &standbys).await?
            {
                let missing = format!("{} does not replicate synchronously, as was asked for: {missing}", self.place());
                return Err(not_writable(missing));
            }
            let waits = if self.synchronous { matches!(&*commit, "on" | "remote_apply") } else { commit != "off" };
            let transaction = if isolation == "read committed" && waits && read_only == "off" {
                InTransaction::No
            } else if commit == "remote_apply" {
                InTransaction::AsConfigured
            } else {
                InTransaction::Yes
            };
            let synchronous = self.synchronous;
            Ok(Box::new(PostgresSession { conn, transaction, synchronous, open: false }) as Box<dyn Session>)
        })
    }

    fn useful_connections(&self) -> usize {
        usize::MAX
    }

    fn rings(&self) -> bool {
        true
    }

    fn listen<'a>(&'a self, channel: &'a str) -> Job<'a, Option<Box<dyn Listener>>> {
        Box::pin(async move {
            let options = (*self.options).clone().disable_statement_logging();
            let one = PgPoolOptions::new().max_connections(1).connect_with(options).await?;
            let mut listener = PgListener::connect_with(&one).await?;
            listener.listen(channel).await?;
            // A pooler would take the statement and never pass on a word: say something to ourselves.
            sqlx::query("SELECT pg_notify($1, '')").bind(channel).execute(&mut listener).await?;
            tokio::time::timeout(Duration::from_secs(1), listener.recv())
                .await
                .map_err(|_| sqlx::Error::Protocol("nothing is heard on the channel".into()))??;
            Ok(Some(Box::new(PostgresListener { listener, _one: one }) as Box<dyn Listener>))
        })
    }

    fn migrate(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(async move {
            let one = PgPoolOptions::new()
                .max_connections(1)
                .connect_with((*self.options).clone())
                .await
                .map_err(schema::unconnected)?;
            let migrated = schema::migrate(&one, schema::POSTGRES).await;
            one.close().await;
            migrated
        })
    }

    fn anchor(&self) -> Anchoring<'_> {
        Box::pin(session::open(&self.options))
    }
}

/// Why nobody would confirm our commits. `None`: somebody does, at present.
async fn missing_standby(conn: &mut PgConnection, configured: &str) -> Result<Option<&'static str>, sqlx::Error> {
    if configured.trim().is_empty() {
        return Ok(Some("synchronous_standby_names is empty"));
    }
    // Whoever may not see the others' details sees that they are there.
    let (seen, hidden): (i64, i64) = sqlx::query_as(
        "SELECT count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')), count(*) FILTER (WHERE sync_state IS NULL)
           FROM pg_stat_replication",
    )
    .fetch_one(conn)
    .await?;
    Ok(match (seen, hidden) {
        (0, 0) => Some("no synchronous standby is connected"),
        (0, _) => Some("this user may not see whether a standby is synchronous: GRANT pg_monitor to it"),
        _ => None,
    })
}

struct PostgresListener {
    listener: PgListener,
    /// The pool that it was made from, which closes with it.
    _one: PgPool,
}

impl Listener for PostgresListener {
    fn hear(&mut self) -> Job<'_, String> {
        Box::pin(async move {
            match self.listener.try_recv().await? {
                Some(notification) => Ok(notification.payload().to_owned()),
                // It has connected anew: what was said meanwhile was not heard.
                None => Err(sqlx::Error::WorkerCrashed),
            }
        })
    }
}

/// Whether the verbs need a transaction around them. Where the database or the user has other defaults than ours
/// (REPEATABLE READ would end nine of ten attempts on a hot name in 40001; asynchronous commit would lose grants in a
/// crash), each verb says what it needs for itself alone: a SET for the session would leak through a pooler.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InTransaction {
    No,
    /// With a commit that waits for the disk here, and on a synchronous standby.
    Yes,
    /// With a commit as the server has it, which waits for more than that.
    AsConfigured,
}

struct PostgresSession {
    conn: PgConnection,
    transaction: InTransaction,
    /// Nothing counts that only one server has, not even a release.
    synchronous: bool,
    /// Whether one is open, around several verbs.
    open: bool,
}

type PgQuery<'q> = sqlx::query::Query<'q, Postgres, PgArguments>;

impl PostgresSession {
    async fn rows(&mut self, query: PgQuery<'_>) -> Result<Vec<PgRow>, sqlx::Error> {
        self.insist().await?;
        if self.open || self.transaction == InTransaction::No {
            return query.fetch_all(&mut self.conn).await;
        }
        self.begin().await?;
        let rows = query.fetch_all(&mut self.conn).await;
        self.end(rows.is_ok()).await?;
        rows
    }

    async fn execute(&mut self, query: PgQuery<'_>) -> Result<u64, sqlx::Error> {
        self.insist().await?;
        if self.open || self.transaction == InTransaction::No {
            return Ok(query.execute(&mut self.conn).await?.rows_affected());
        }
        self.begin().await?;
        let done = query.execute(&mut self.conn).await;
        self.end(done.is_ok()).await?;
        Ok(done?.rows_affected())
    }

    /// Where a second server must have what the first has: makes sure that the first still waits for it. Who takes the standby out of
    /// the configuration closes no connection.
    async fn insist(&mut self) -> Result<(), sqlx::Error> {
        if !self.synchronous || self.open {
            return Ok(());
        }
        let waits: bool = sqlx::query_scalar("SELECT current_setting('synchronous_standby_names') <> ''")
            .fetch_one(&mut self.conn)
            .await?;
        if waits {
            return Ok(());
        }
        Err(not_writable("the server does not replicate synchronously any more, as was asked for".into()))
    }

    /// A release, which does not wait for its commit, unless that was asked for.
    fn releasing(&self, sql: &'static str) -> SqlStr {
        if self.synchronous {
            return AssertSqlSafe(sql.replace("'off'", "current_setting('synchronous_commit')")).into_sql_str();
        }
        SqlStr::from_static(sql)
    }

    async fn begin(&mut self) -> Result<(), sqlx::Error> {
        let begin = match self.transaction {
            InTransaction::Yes => "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL synchronous_commit = on",
            InTransaction::No | InTransaction::AsConfigured => "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE",
        };
        self.conn.execute(begin).await?;
        Ok(())
    }

    async fn end(&mut self, well: bool) -> Result<(), sqlx::Error> {
        self.conn.execute(if well { "COMMIT" } else { "ROLLBACK" }).await?;
        Ok(())
    }

    async fn claim(
        &mut self,
        one: &'static str,
        many: &'static str,
        claims: &[Claim],
    ) -> Result<Vec<Option<FencingToken>>, sqlx::Error> {
        let rows = match claims {
            [c] => self.rows(bind_claim(sqlx::query(one).bind(c.name.as_str()), c)).await?,
            _ => {
                let query = sqlx::query(many).bind(claims.iter().map(|c| c.name.as_str()).collect::<Vec<_>>());
                self.rows(bind_claims(query, claims.iter())).await?
            }
        };
        Ok(in_order(claims, |c| &c.name, granted(rows)?))
    }
}

fn granted(rows: Vec<PgRow>) -> Result<Vec<(String, FencingToken)>, sqlx::Error> {
    let mut granted = Vec::new();
    for row in &rows {
        if let Some(token) = token(row.try_get(1)?) {
            granted.push((row.try_get(0)?, token));
        }
    }
    Ok(granted)
}

/// Binds what a new holder brings along: owner, hold, holder, label, ttl.
fn bind_claim<'q>(query: PgQuery<'q>, c: &'q Claim) -> PgQuery<'q> {
    query.bind(c.owner.to_string()).bind(c.hold.mark()).bind(&*c.holder).bind(&*c.label).bind(micros(c.ttl))
}

/// The same for many, as arrays.
fn bind_claims<'q>(query: PgQuery<'q>, claims: impl Iterator<Item = &'q Claim> + Clone) -> PgQuery<'q> {
    query
        .bind(claims.clone().map(|c| c.owner.to_string()).collect::<Vec<_>>())
        .bind(claims.clone().map(|c| c.hold.mark()).collect::<Vec<_>>())
        .bind(claims.clone().map(|c| &*c.holder).collect::<Vec<_>>())
        .bind(claims.clone().map(|c| &*c.label).collect::<Vec<_>>())
        .bind(claims.map(|c| micros(c.ttl)).collect::<Vec<_>>())
}

impl Session for PostgresSession {
    fn acquire<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            let mut granted = self.claim(sql::ACQUIRE, sql::ACQUIRE_MANY, claims).await?;
            let (missed, missing): (Vec<usize>, Vec<Claim>) = granted
                .iter()
                .enumerate()
                .filter(|(_, granted)| granted.is_none())
                .map(|(i, _)| (i, claims[i].clone()))
                .unzip();
            if !missing.is_empty() {
                let created = self.claim(sql::CREATE, sql::CREATE_MANY, &missing).await?;
                for (i, created) in missed.into_iter().zip(created) {
                    granted[i] = created;
                }
            }
            Ok(granted)
        })
    }

    fn join<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            let mut joined = Vec::with_capacity(claims.len());
            for c in claims {
                let query = sqlx::query(sql::JOIN)
                    .bind(c.name.as_str())
                    .bind(c.owner.to_string())
                    .bind(c.hold.mark())
                    .bind(micros(c.ttl));
                let row = self.rows(query).await?;
                joined.push(granted(row)?.into_iter().next().map(|(_, token)| token));
            }
            Ok(joined)
        })
    }

    fn renew<'a>(&'a mut self, renewals: &'a [Renewal]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            if let [Renewal { holding: h, ttl, .. }] = renewals {
                let query = sqlx::query(sql::RENEW)
                    .bind(h.name.as_str())
                    .bind(h.owner.to_string())
                    .bind(h.hold.mark())
                    .bind(h.token.get())
                    .bind(micros(*ttl));
                return Ok(vec![self.execute(query).await? > 0]);
            }
            let all = || renewals.iter().map(|r| &r.holding);
            let query = sqlx::query(sql::RENEW_MANY)
                .bind(all().map(|h| h.name.as_str()).collect::<Vec<_>>())
                .bind(all().map(|h| h.owner.to_string()).collect::<Vec<_>>())
                .bind(all().map(|h| h.hold.mark()).collect::<Vec<_>>())
                .bind(all().map(|h| h.token.get()).collect::<Vec<_>>())
                .bind(renewals.iter().map(|r| micros(r.ttl)).collect::<Vec<_>>());
            let rows = self.rows(query).await?;
            Ok(found(in_order(renewals, |r| &r.holding.name, named(rows)?)))
        })
    }

    fn release<'a>(&'a mut self, releases: &'a [Release]) -> Job<'a, Vec<Option<bool>>> {
        Box::pin(async move {
            let token = |r: &Release| r.token.map_or(0, FencingToken::get);
            if let [r] = releases {
                let query = sqlx::query(self.releasing(sql::RELEASE))
                    .bind(r.name.as_str())
                    .bind(r.owner.to_string())
                    .bind(r.hold.mark())
                    .bind(token(r))
                    .bind(micros(r.hold_at_least));
                return Ok(vec![Some(self.execute(query).await? > 0)]);
            }
            let query = sqlx::query(self.releasing(sql::RELEASE_MANY))
                .bind(releases.iter().map(|r| r.name.as_str()).collect::<Vec<_>>())
                .bind(releases.iter().map(|r| r.owner.to_string()).collect::<Vec<_>>())
                .bind(releases.iter().map(|r| r.hold.mark()).collect::<Vec<_>>())
                .bind(releases.iter().map(token).collect::<Vec<_>>())
                .bind(releases.iter().map(|r| micros(r.hold_at_least)).collect::<Vec<_>>());
            let rows = self.rows(query).await?;
            Ok(found(in_order(releases, |r| &r.name, named(rows)?)).into_iter().map(Some).collect())
        })
    }

    fn hand_off<'a>(&'a mut self, hand_offs: &'a [HandOff]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            let rows = match hand_offs {
                [HandOff { from, to }] => {
                    let query = sqlx::query(sql::HAND_OFF)
                        .bind(from.name.as_str())
                        .bind(from.owner.to_string())
                        .bind(from.hold.mark())
                        .bind(from.token.get());
                    self.rows(bind_claim(query, to)).await?
                }
                _ => {
                    let from = || hand_offs.iter().map(|h| &h.from);
                    let query = sqlx::query(sql::HAND_OFF_MANY)
                        .bind(from().map(|h| h.name.as_str()).collect::<Vec<_>>())
                        .bind(from().map(|h| h.owner.to_string()).collect::<Vec<_>>())
                        .bind(from().map(|h| h.hold.mark()).collect::<Vec<_>>())
                        .bind(from().map(|h| h.token.get()).collect::<Vec<_>>());
                    self.rows(bind_claims(query, hand_offs.iter().map(|h| &h.to))).await?
                }
            };
            Ok(in_order(hand_offs, |h| &h.from.name, granted(rows)?))
        })
    }

    fn look<'a>(&'a mut self, names: &'a [LockName]) -> Job<'a, Vec<Row>> {
        Box::pin(async move {
            let names: Vec<&str> = names.iter().map(LockName::as_str).collect();
            let rows = self.rows(sqlx::query(sql::LOOK).bind(names)).await?;
            rows.iter().map(row).collect()
        })
    }

    fn list<'a>(&'a mut self, names: &'a Names) -> Job<'a, Vec<Listed>> {
        Box::pin(async move {
            let query = match names {
                Names::BeginningWith(prefix) => sqlx::query(sql::LIST).bind(prefix),
                Names::Just(name) => sqlx::query(sql::LIST_ONE).bind(name.as_str()),
            };
            let rows = self.rows(query).await?;
            let listed = |r: &PgRow| {
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
            let claims = || tickets.iter().map(|t| &t.claim);
            let query = sqlx::query(sql::ENQUEUE)
                .bind(micros(PLACE))
                .bind(claims().map(|c| c.name.as_str()).collect::<Vec<_>>())
                .bind(claims().map(|c| c.owner.to_string()).collect::<Vec<_>>())
                .bind(claims().map(|c| c.hold.mark()).collect::<Vec<_>>())
                .bind(tickets.iter().map(|t| &*t.client).collect::<Vec<_>>())
                .bind(tickets.iter().map(|t| &*t.bell).collect::<Vec<_>>())
                .bind(claims().map(|c| c.mode.columns().0).collect::<Vec<_>>())
                .bind(claims().map(|c| c.mode.columns().1).collect::<Vec<_>>())
                .bind(tickets.iter().map(Ticket::waited).collect::<Vec<_>>())
                .bind(claims().map(|c| &*c.holder).collect::<Vec<_>>())
                .bind(claims().map(|c| &*c.label).collect::<Vec<_>>());
            let rows = self.rows(query).await?;
            let left = rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?)));
            let left: HashMap<String, i64> = left.collect::<Result<_, sqlx::Error>>()?;
            Ok(claims().map(|c| held_for(*left.get(&c.hold.mark())?)).collect())
        })
    }

    fn queue<'a>(&'a mut self, name: &'a LockName, limit: u32) -> Job<'a, Option<Queue>> {
        Box::pin(async move {
            let rows = self.rows(sqlx::query(sql::QUEUE).bind(name.as_str()).bind(i64::from(limit))).await?;
            let Some(first) = rows.first() else {
                return Ok(None);
            };
            let places: Vec<Place> = rows.iter().filter_map(|row| place(row).transpose()).collect::<Result<_, _>>()?;
            Ok(Some(Queue::of(row(first)?, places.into_iter(), limit)))
        })
    }

    fn pass<'a>(&'a mut self, pass: &'a Pass) -> Job<'a, Option<Vec<Granted>>> {
        Box::pin(async move {
            let seen = |sql: SqlStr| {
                sqlx::query(sql)
                    .bind(pass.name.as_str())
                    .bind(pass.seen.token)
                    .bind(&*pass.seen.holds)
                    .bind(pass.seen.expires_at.unwrap_or(-1))
                    .bind(pass.seen.waiting)
                    .bind(pass.last)
            };
            let many = |sql, next: &'a [(String, Duration)]| {
                seen(SqlStr::from_static(sql))
                    .bind(next.iter().map(|(hold, _)| &**hold).collect::<Vec<_>>())
                    .bind(next.iter().map(|(_, lasts)| micros(*lasts)).collect::<Vec<_>>())
            };
            let query = match &pass.to {
                To::Nobody | To::Free => {
                    let sql = match pass.to {
                        To::Free => self.releasing(sql::PASS_TO_FREE),
                        _ => SqlStr::from_static(sql::PASS_TO_NOBODY),
                    };
                    return Ok((self.execute(seen(sql)).await? > 0).then(Vec::new));
                }
                To::One(hold, lasts) => seen(SqlStr::from_static(sql::PASS_TO_ONE)).bind(hold).bind(micros(*lasts)),
                To::Several(next) => many(sql::PASS_TO_SEVERAL, next),
                To::More(next) => many(sql::PASS_TO_MORE, next),
            };
            let rows = self.rows(query).await?;
            let granted: Vec<Granted> =
                granted(rows)?.into_iter().map(|(hold, token)| Granted { hold, token }).collect();
            Ok((!granted.is_empty()).then_some(granted))
        })
    }

    fn pass_on<'a>(&'a mut self, from: &'a Release) -> Job<'a, Option<PassedOn>> {
        Box::pin(async move {
            let Some(last) = from.token else {
                return Ok(None);
            };
            let query = sqlx::query(sql::PASS_ON)
                .bind(from.name.as_str())
                .bind(from.owner.to_string())
                .bind(from.hold.mark())
                .bind(last.get())
                .bind(micros(CLAIM));
            let passed_on = |row: &PgRow| {
                let Some(token) = token(row.try_get(1)?) else {
                    return Ok(None);
                };
                let to = Granted { hold: row.try_get(0)?, token };
                Ok(Some(PassedOn { to, bell: row.try_get(2)?, others: row.try_get(3)? }))
            };
            self.rows(query).await?.first().map_or(Ok(None), passed_on)
        })
    }

    fn bury<'a>(&'a mut self, name: &'a LockName, dead: &'a [String]) -> Job<'a, ()> {
        Box::pin(async move {
            self.execute(sqlx::query(sql::BURY).bind(name.as_str()).bind(dead)).await?;
            Ok(())
        })
    }

    fn leave<'a>(&'a mut self, places: &'a [Spot]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let rows = self.rows(bind_spots(sql::LEAVE, places)).await?;
            by_hold(places.iter().map(|spot| spot.hold), rows.iter().map(|row| row.try_get(0)))
        })
    }

    fn keep<'a>(&'a mut self, places: &'a [Spot], bell: &'a str) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let rows = self.rows(bind_spots(sql::KEEP, places).bind(micros(PLACE)).bind(bell)).await?;
            by_hold(places.iter().map(|spot| spot.hold), rows.iter().map(|row| row.try_get(0)))
        })
    }

    fn watch<'a>(&'a mut self, places: &'a [Spot]) -> Job<'a, Vec<Option<Watched>>> {
        Box::pin(async move {
            let rows = self.rows(bind_spots(sql::WATCH, places)).await?;
            let watched = |r: &PgRow| {
                Ok((r.try_get(10)?, Watched { row: row(r)?, token: r.try_get(11)?, ahead: r.try_get(12)? }))
            };
            let mut watched: HashMap<String, Watched> = readable(rows.iter().map(watched)).collect();
            Ok(places.iter().map(|spot| watched.remove(&spot.hold.mark())).collect())
        })
    }

    fn renew_shares<'a>(&'a mut self, renewals: &'a [Renewal]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let all = || renewals.iter().map(|r| &r.holding);
            let query = sqlx::query(sql::RENEW_SHARES)
                .bind(all().map(|h| h.name.as_str()).collect::<Vec<_>>())
                .bind(all().map(|h| h.hold.mark()).collect::<Vec<_>>())
                .bind(all().map(|h| h.token.get()).collect::<Vec<_>>())
                .bind(renewals.iter().map(|r| micros(r.ttl)).collect::<Vec<_>>())
                .bind(renewals.iter().map(Renewal::owner).collect::<Vec<_>>());
            let rows = self.rows(query).await?;
            by_hold(all().map(|h| h.hold), rows.iter().map(|row| row.try_get(0)))
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
            Ok(!self.rows(query).await?.is_empty())
        })
    }

    fn ring<'a>(&'a mut self, bells: &'a [(String, String)]) -> Job<'a, ()> {
        Box::pin(async move {
            let query = sqlx::query(sql::RING)
                .bind(bells.iter().map(|(channel, _)| &**channel).collect::<Vec<_>>())
                .bind(bells.iter().map(|(_, said)| &**said).collect::<Vec<_>>());
            query.execute(&mut self.conn).await?;
            Ok(())
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

    fn uptime(&mut self) -> Job<'_, Option<Duration>> {
        Box::pin(async move {
            let rows = self.rows(sqlx::query(sql::UPTIME)).await?;
            let up: Option<i64> = rows.first().map(|row| row.try_get(0)).transpose()?;
            Ok(up.and_then(|up| u64::try_from(up).ok()).map(Duration::from_micros))
        })
    }

    fn evict<'a>(&'a mut self, name: &'a LockName, token: FencingToken) -> Job<'a, bool> {
        Box::pin(async move {
            for sql in [sql::EVICT, sql::EVICT_SHARE] {
                if !self.rows(sqlx::query(sql).bind(name.as_str()).bind(token.get())).await?.is_empty() {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }

    fn last_eviction<'a>(&'a mut self, name: &'a LockName) -> Job<'a, Option<LastEviction>> {
        Box::pin(async move {
            let rows = self.rows(sqlx::query(sql::LAST_EVICTION).bind(name.as_str())).await?;
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

    fn ensure<'a>(&'a mut self, name: &'a LockName) -> Job<'a, ()> {
        Box::pin(async move {
            self.execute(sqlx::query(sql::ENSURE).bind(name.as_str()).bind(micros(NOTED))).await?;
            Ok(())
        })
    }

    fn record<'a>(&'a mut self, errand: &'a super::records::Errand) -> Job<'a, super::records::Findings> {
        Box::pin(self.carry(errand))
    }

    fn sweep(&mut self, retention: Duration, limit: u32) -> Job<'_, u64> {
        Box::pin(async move {
            let sweep = |sql| sqlx::query(sql).bind(micros(retention)).bind(i64::from(limit));
            self.execute(sweep(sql::SWEEP_PLACES)).await?;
            self.execute(sqlx::query(sql::SWEEP_ROWS).bind(micros(retention.max(UNSEEN))).bind(i64::from(limit)))
                .await?;
            self.execute(sweep(sql::SWEEP).bind(micros(retention.max(CLAIM)))).await
        })
    }

    fn transact(&mut self, step: Step) -> Job<'_, ()> {
        Box::pin(async move {
            match step {
                Step::Begin => {
                    self.insist().await?;
                    self.conn.execute(sql::BEGIN_BRIEFLY).await?;
                    if self.transaction == InTransaction::Yes {
                        self.conn.execute("SET LOCAL synchronous_commit = on").await?;
                    }
                    self.open = true;
                }
                Step::Commit => {
                    self.end(true).await?;
                    self.open = false;
                }
                Step::RollBack => {
                    self.open = false;
                    self.end(false).await?;
                }
            }
            Ok(())
        })
    }

    fn align<'a>(&'a mut self, places: &'a [Spot]) -> Job<'a, ()> {
        Box::pin(async move {
            self.execute(bind_spots(sql::ALIGN, places)).await?;
            Ok(())
        })
    }

    fn close(self: Box<Self>) -> Job<'static, ()> {
        Box::pin(self.conn.close())
    }
}

/// Binds the keys of places: names, holds.
fn bind_spots<'q>(sql: &'static str, places: &'q [Spot]) -> PgQuery<'q> {
    sqlx::query(sql)
        .bind(places.iter().map(|spot| spot.name.as_str()).collect::<Vec<_>>())
        .bind(places.iter().map(|spot| spot.hold.mark()).collect::<Vec<_>>())
}

fn named(rows: Vec<PgRow>) -> Result<Vec<(String, ())>, sqlx::Error> {
    rows.iter().map(|row| Ok((row.try_get(0)?, ()))).collect()
}

fn row(row: &PgRow) -> Result<Row, sqlx::Error> {
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
fn place(row: &PgRow) -> Result<Option<Place>, sqlx::Error> {
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

impl super::Database for Postgres {}

impl Fence for Postgres {
    const KIND: Kind = Kind::Postgres;

    fn fence<'a>(
        conn: &'a mut PgConnection,
        check: &'a Check,
    ) -> Pin<Box<dyn Future<Output = Result<Verdict, sqlx::Error>> + Send + 'a>> {
        Box::pin(async move {
            let fence = |sql| sqlx::query(sql).bind(&check.name).bind(&check.owner).bind(&check.mark);
            let row = fence(if check.shared { sql::FENCE_SHARE } else { sql::FENCE }).fetch_optional(&mut *conn).await;
            match row {
                Ok(Some(row)) => {
                    let (token, held): (i64, bool) = if check.shared {
                        // As if it were the only holder: its token, if nobody has had the name alone since.
                        (row.try_get(1)?, row.try_get::<i64, _>(0)? <= check.token)
                    } else {
                        (row.try_get(0)?, row.try_get(1)?)
                    };
                    Ok(if token == check.token && held { Verdict::Fenced } else { Verdict::Superseded })
                }
                // The row changed after the snapshot of a REPEATABLE READ or SERIALIZABLE transaction was taken.
                Err(sqlx::Error::Database(e)) if e.code().as_deref() == Some("40001") => Ok(Verdict::StaleSnapshot),
                Err(error) => Err(error),
                // No row at all: purged, unless the snapshot is older than the row.
                Ok(None) => {
                    let isolation: String =
                        sqlx::query_scalar("SELECT current_setting('transaction_isolation')").fetch_one(conn).await?;
                    let sees_the_present = matches!(&*isolation, "read committed" | "read uncommitted");
                    Ok(if sees_the_present { Verdict::Superseded } else { Verdict::StaleSnapshot })
                }
            }
        })
    }
}
