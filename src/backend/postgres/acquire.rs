//! Acquires a name, or joins a holding of the same owner.

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::store::{Connection, Query, TRIES, lease_columns, now};
use crate::backend::micros;
use crate::backend::stored::{TableRow as _, client_text, current_holder, read_lease};
use crate::protocol::{Claim, CurrentHolder, JoinOutcome, Mode};
use crate::token::FencingToken;

/// Binds a new holder: id, owner, client, ttl, holder and label, in this order.
pub(super) fn bind_holder<'q>(query: Query<'q>, claim: &'q Claim) -> Query<'q> {
    query
        .bind(claim.id.to_string())
        .bind(claim.owner.to_string())
        .bind(client_text(claim.is_renewed.then_some(claim.client)))
        .bind(micros(claim.ttl))
        .bind(&*claim.holder)
        .bind(&*claim.label)
}

/// Binds a new holder, and units and permits if the claim shares the name.
pub(super) fn bind_claim<'q>(query: Query<'q>, claim: &'q Claim) -> Query<'q> {
    let query = bind_holder(query, claim);
    let (units, permits) = claim.mode.stored();
    if claim.mode == Mode::Exclusive { query } else { query.bind(units).bind(permits) }
}

/// Reads a token. The tables hold positive ones only.
pub(super) fn token(row: &PgRow, column: &str) -> Result<FencingToken, sqlx::Error> {
    FencingToken::new(row.number(column)?).ok_or_else(|| sqlx::Error::Decode("a token is not positive".into()))
}

// ---- acquire

// $1 name, $2 id, $3 owner, $4 client, $5 ttl, $6 holder, $7 label. A repeated request shortens
// nothing. A refused request locks and writes no row.
#[rustfmt::skip]
const ACQUIRE: &str = concat!("
WITH taken AS (
    UPDATE sqlock_lease AS l
       SET id = $2,
           token = CASE WHEN l.id = $2 THEN l.token ELSE greatest(l.token + 1, ", now!(), ") END,
           owner = CASE WHEN l.id = $2 THEN l.owner ELSE $3 END,
           client = CASE WHEN l.id = $2 AND l.client <> '' THEN l.client ELSE $4 END,
           ttl = CASE WHEN l.id = $2 THEN greatest(l.ttl, $5) ELSE $5 END,
           expires_at = CASE WHEN l.id = $2 THEN greatest(l.expires_at, ", now!(), " + $5) ELSE ", now!(), " + $5 END,
           acquired_at = CASE WHEN l.id = $2 THEN l.acquired_at ELSE ", now!(), " END,
           holder = CASE WHEN l.id = $2 THEN l.holder ELSE $6 END,
           label = CASE WHEN l.id = $2 THEN l.label ELSE $7 END
     WHERE l.name = $1 AND (l.id = '' AND l.waiting = 0 OR l.id = $2)
    RETURNING l.token)
SELECT token AS granted, '' AS id, '' AS owner, '' AS client, token, 0::bigint AS waiting, 0::bigint AS lost, 0::bigint AS asked, 0::bigint AS remaining,
       false AS is_held_already, true AS has_room
  FROM taken
 UNION ALL
SELECT 0, ", lease_columns!(), ",
       EXISTS (SELECT FROM sqlock_entry AS e WHERE e.name = l.name AND e.id = $2 AND e.token > 0 AND e.owner <> ''),
       l.id = '' AND l.waiting = 0
  FROM sqlock_lease AS l LEFT JOIN sqlock_client AS c ON c.id = l.client
 WHERE l.name = $1 AND NOT EXISTS (SELECT FROM taken)");

// As above; only for a name that has no row.
#[rustfmt::skip]
const CREATE: &str = concat!("
INSERT INTO sqlock_lease (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)
VALUES ($1, $2, $3, $4, ", now!(), ", $5, ", now!(), " + $5, ", now!(), ", $6, $7)
    ON CONFLICT (name) DO NOTHING
RETURNING token AS granted");

/// Writes the entry of the shared `claim` with the token of the row `$from`. A waiting entry
/// becomes the holding one.
macro_rules! insert_share {
    ($from:literal) => {
        concat!("
    INSERT INTO sqlock_entry AS e (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at,
                                   acquired_at, holder, label)
    SELECT f.name, c.id, c.owner, c.client, c.client <> '', c.units, c.permits, f.token, c.ttl, 0,
           ", $crate::backend::postgres::store::now!(), " + c.ttl, ", $crate::backend::postgres::store::now!(), ",
           c.holder, c.label
      FROM ", $from, " AS f, claim AS c
        ON CONFLICT (name, id) DO UPDATE
       SET owner = excluded.owner, client = excluded.client, is_renewed = excluded.is_renewed, units = excluded.units,
           permits = excluded.permits, token = excluded.token, ttl = excluded.ttl, arrived_at = excluded.arrived_at,
           expires_at = excluded.expires_at, acquired_at = excluded.acquired_at, holder = excluded.holder,
           label = excluded.label")
    };
}
pub(super) use insert_share;

// As above, and $8 units, $9 permits. The check of the entries is valid only for the version of the
// row that was read with them, unless permits are unlimited: then the locked row is enough, since
// its owner marks exclusive entries.
#[rustfmt::skip]
const ACQUIRE_SHARE: &str = concat!("
WITH claim AS (
    SELECT $2::text AS id, $3::text AS owner, $4::text AS client, $5::bigint AS ttl, $6::text AS holder, $7::text AS label,
           $8::bigint AS units, $9::bigint AS permits),
seen AS MATERIALIZED (
    SELECT ", lease_columns!(), ", l.name, l.xmin AS version, s.is_own OR l.id = $2 AS is_held_already,
           l.waiting = 0 AND NOT s.is_known AND (l.id = '' OR l.id = 'entries' AND s.is_shared)
               AND s.taken + $8 <= $9 AS has_room
      FROM sqlock_lease AS l LEFT JOIN sqlock_client AS c ON c.id = l.client
     CROSS JOIN LATERAL (
           SELECT coalesce(sum(e.units), 0) AS taken, coalesce(bool_and(e.units > 0), false) AS is_shared,
                  coalesce(bool_or(e.id = $2), false) AS is_known,
                  coalesce(bool_or(e.id = $2 AND e.owner <> ''), false) AS is_own
             FROM sqlock_entry AS e
            WHERE e.name = l.name AND e.token > 0) AS s
     WHERE l.name = $1),
room AS MATERIALIZED (
    SELECT l.name, greatest(l.token + 1, ", now!(), ") AS token
      FROM seen JOIN sqlock_lease AS l ON l.name = seen.name
     WHERE seen.has_room AND l.waiting = 0 AND l.id IN ('', 'entries')
       AND (l.xmin = seen.version OR $9 = 4294967295 AND l.owner = '')
       FOR NO KEY UPDATE OF l),
share AS (", insert_share!("room"), "
     WHERE e.token = 0
    RETURNING e.name, e.token),
taken AS (
    UPDATE sqlock_lease AS l
       SET id = 'entries', owner = '', client = '', token = share.token, acquired_at = ", now!(), ", holder = '', label = ''
      FROM share
     WHERE l.name = share.name
    RETURNING l.token)
SELECT token AS granted, '' AS id, '' AS owner, '' AS client, token, 0::bigint AS waiting, 0::bigint AS lost, 0::bigint AS asked, 0::bigint AS remaining,
       false AS is_held_already, true AS has_room
  FROM taken
 UNION ALL
SELECT 0, id, owner, client, token, waiting, lost, asked, remaining, is_held_already, has_room
  FROM seen
 WHERE NOT EXISTS (SELECT FROM taken)");

#[rustfmt::skip]
const CREATE_SHARE: &str = concat!("
WITH claim AS (
    SELECT $2::text AS id, $3::text AS owner, $4::text AS client, $5::bigint AS ttl, $6::text AS holder, $7::text AS label,
           $8::bigint AS units, $9::bigint AS permits),
taken AS (
    INSERT INTO sqlock_lease (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)
    VALUES ($1, 'entries', '', '', ", now!(), ", 0, 0, ", now!(), ", '', '')
        ON CONFLICT (name) DO NOTHING
    RETURNING name, token),
share AS (", insert_share!("taken"), ")
SELECT token AS granted FROM taken");

// $1 name, $2 id, $3 client, $4 ttl. For a claim that already holds the name, as a share or in
// another mode.
#[rustfmt::skip]
const PROLONG: &str = concat!("
WITH alone AS (
    UPDATE sqlock_lease AS l
       SET client = CASE l.client WHEN '' THEN $3 ELSE l.client END, ttl = greatest(l.ttl, $4),
           expires_at = greatest(l.expires_at, ", now!(), " + $4)
     WHERE l.name = $1 AND l.id = $2
    RETURNING l.token),
share AS (
    UPDATE sqlock_entry AS e
       SET client = CASE e.client WHEN '' THEN $3 ELSE e.client END, ttl = greatest(e.ttl, $4),
           expires_at = greatest(e.expires_at, ", now!(), " + $4)
     WHERE e.name = $1 AND e.id = $2 AND e.token > 0 AND e.owner <> '' AND NOT EXISTS (SELECT FROM alone)
    RETURNING e.token)
SELECT token AS granted FROM alone UNION ALL SELECT token FROM share");

/// Acquires a name that is free and has no waiter, or shares it.
pub(super) async fn acquire(
    conn: &mut Connection<'_>,
    claim: &Claim,
) -> Result<Result<FencingToken, CurrentHolder>, sqlx::Error> {
    let (acquire, create) = match claim.mode {
        Mode::Exclusive => (ACQUIRE, CREATE),
        Mode::Shared { .. } => (ACQUIRE_SHARE, CREATE_SHARE),
    };
    for tried in 0..TRIES {
        let query = sqlx::query(acquire).bind(claim.name.as_str());
        let row = conn.row(bind_claim(query, claim)).await?;
        let Some(row) = row else {
            if tried > 0 {
                break;
            }
            let query = sqlx::query(create).bind(claim.name.as_str());
            match conn.row(bind_claim(query, claim)).await? {
                Some(row) => return token(&row, "granted").map(Ok),
                // Another client has created the row in the meantime.
                None => continue,
            }
        };
        if row.number("granted")? > 0 {
            return token(&row, "granted").map(Ok);
        }
        if row.try_get("is_held_already")? {
            let query = sqlx::query(PROLONG)
                .bind(claim.name.as_str())
                .bind(claim.id.to_string())
                .bind(client_text(claim.is_renewed.then_some(claim.client)))
                .bind(micros(claim.ttl));
            match conn.row(query).await? {
                Some(row) => return token(&row, "granted").map(Ok),
                None => continue,
            }
        }
        if !row.try_get::<bool, _>("has_room")? {
            return Ok(Err(current_holder(&read_lease(&row)?)));
        }
        // The name was free in the snapshot, but its row had changed when it was locked. A share
        // may still fit.
        if claim.mode == Mode::Exclusive {
            break;
        }
    }
    Ok(Err(CurrentHolder::Unknown))
}

// ---- join

// $1 name, $2 id, $3 owner, $4 client, $5 ttl, $6 holder, $7 label. An acquisition without a label
// gets the one of the holding it joins.
#[rustfmt::skip]
const JOIN: &str = concat!("
WITH seen AS MATERIALIZED (
    SELECT l.name, l.xmin AS version
      FROM sqlock_lease AS l LEFT JOIN sqlock_client AS c ON c.id = l.client
     WHERE l.name = $1 AND l.owner = $3
       AND CASE WHEN l.id = 'entries' THEN EXISTS (
                     SELECT FROM sqlock_entry AS e LEFT JOIN sqlock_client AS k ON k.id = e.client
                      WHERE e.name = l.name AND e.token = l.token AND e.units = 0 AND e.owner = $3
                        AND greatest(e.expires_at, k.beat_at + e.ttl) > ", now!(), ")
                ELSE l.id NOT IN ('', 'kept', $2) AND greatest(l.expires_at, c.beat_at + l.ttl) > ", now!(), " END),
held AS MATERIALIZED (
    SELECT l.*
      FROM seen JOIN sqlock_lease AS l ON l.name = seen.name
     WHERE l.xmin = seen.version
       FOR NO KEY UPDATE OF l SKIP LOCKED),
first AS (
    INSERT INTO sqlock_entry AS e (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at,
                                   acquired_at, holder, label)
    SELECT name, id, owner, client, true, 0, 0, token, ttl, 0, expires_at, acquired_at, holder, label
      FROM held WHERE id <> 'entries'
        ON CONFLICT (name, id) DO UPDATE
       SET owner = excluded.owner, client = excluded.client, is_renewed = true, units = 0, permits = 0,
           token = excluded.token, ttl = excluded.ttl, arrived_at = 0, expires_at = excluded.expires_at,
           acquired_at = excluded.acquired_at, holder = excluded.holder, label = excluded.label),
own AS (
    INSERT INTO sqlock_entry AS e (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at,
                                   acquired_at, holder, label)
    SELECT name, $2, $3, $4, true, 0, 0, token, $5, 0, ", now!(), " + $5, ", now!(), ", $6,
           CASE WHEN $7 <> '' THEN $7 WHEN held.id <> 'entries' THEN held.label
                ELSE (SELECT max(o.label) FROM sqlock_entry AS o WHERE o.name = held.name AND o.token = held.token) END
      FROM held
        ON CONFLICT (name, id) DO UPDATE
       SET (client, ttl, expires_at, acquired_at) = (
               SELECT CASE WHEN is_same AND e.client <> '' THEN e.client ELSE excluded.client END,
                      CASE WHEN is_same THEN greatest(e.ttl, excluded.ttl) ELSE excluded.ttl END,
                      CASE WHEN is_same THEN greatest(e.expires_at, excluded.expires_at) ELSE excluded.expires_at END,
                      CASE WHEN is_same THEN e.acquired_at ELSE excluded.acquired_at END
                 FROM (SELECT e.token = excluded.token AND e.owner <> '' AS is_same) AS s),
           owner = excluded.owner, is_renewed = true, units = 0, permits = 0, token = excluded.token, arrived_at = 0,
           holder = excluded.holder, label = excluded.label),
joined AS (
    UPDATE sqlock_lease AS l SET id = 'entries', client = '', holder = '', label = ''
      FROM held WHERE l.name = held.name
    RETURNING l.token)
SELECT coalesce((SELECT token FROM joined), 0) AS joined FROM seen");

/// Adds an acquisition to an exclusive holding of the same owner.
pub(super) async fn join(conn: &mut Connection<'_>, claim: &Claim) -> Result<JoinOutcome, sqlx::Error> {
    let Some(row) = conn.row(bind_holder(sqlx::query(JOIN).bind(claim.name.as_str()), claim)).await? else {
        return Ok(JoinOutcome::NotHeld);
    };
    Ok(FencingToken::new(row.number("joined")?).map_or(JoinOutcome::Locked, JoinOutcome::Done))
}
