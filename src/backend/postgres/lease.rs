//! Holdings: how they begin, change and end.

use sqlx::Row as _;
use sqlx::postgres::PgRow;

use super::store::{Query, Session, TRIES, grant, lease_columns, notice, notify, now};
use crate::backend::micros;
use crate::backend::stored::{Stored as _, client_text, holder_now, identity, lease_row};
use crate::name::LockName;
use crate::protocol::{
    Amended, Claim, Extension, Granted, HolderNow, Joined, Keeper, LeaseId, Mode, Release, Released, Withdrawn,
};
use crate::token::FencingToken;

/// Binds a new holder: id, owner, client, ttl, holder and label, in this order.
pub(super) fn bind_holder<'q>(query: Query<'q>, claim: &'q Claim) -> Query<'q> {
    query
        .bind(claim.id.to_string())
        .bind(claim.owner.to_string())
        .bind(client_text(claim.is_kept.then_some(claim.client)))
        .bind(micros(claim.ttl))
        .bind(&*claim.holder)
        .bind(&*claim.label)
}

/// Binds units and permits as well, where it shares the name.
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

// $1 name, $2 id, $3 owner, $4 client, $5 ttl, $6 holder, $7 label. The same request may come again: then nothing gets shorter. A
// refused try finds no row to lock, and so writes nothing.
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
SELECT token AS granted, '' AS id, '' AS owner, '' AS client, token, 0::bigint AS waiting, 0::bigint AS lost, 0::bigint AS remaining,
       false AS is_standing, true AS has_room
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

/// Writes the entry of `claim`, which shares a name, with the token of the row `$from`. Its waiting entry becomes the holding one.
macro_rules! insert_share {
    ($from:literal) => {
        concat!("
    INSERT INTO sqlock_entry AS e (name, id, owner, client, is_kept, units, permits, token, ttl, arrived_at, expires_at,
                                   acquired_at, holder, label)
    SELECT f.name, c.id, c.owner, c.client, c.client <> '', c.units, c.permits, f.token, c.ttl, 0,
           ", $crate::backend::postgres::store::now!(), " + c.ttl, ", $crate::backend::postgres::store::now!(), ",
           c.holder, c.label
      FROM ", $from, " AS f, claim AS c
        ON CONFLICT (name, id) DO UPDATE
       SET owner = excluded.owner, client = excluded.client, is_kept = excluded.is_kept, units = excluded.units,
           permits = excluded.permits, token = excluded.token, ttl = excluded.ttl, arrived_at = excluded.arrived_at,
           expires_at = excluded.expires_at, acquired_at = excluded.acquired_at, holder = excluded.holder,
           label = excluded.label")
    };
}
pub(super) use insert_share;

// As above, and $8 units, $9 permits. What the entries say counts only for the version of the row that was read with them, unless the
// permits cannot run out: then the locked row says enough, as an owner in it marks exclusive entries.
#[rustfmt::skip]
const ACQUIRE_SHARE: &str = concat!("
WITH claim AS (
    SELECT $2::text AS id, $3::text AS owner, $4::text AS client, $5::bigint AS ttl, $6::text AS holder, $7::text AS label,
           $8::bigint AS units, $9::bigint AS permits),
seen AS MATERIALIZED (
    SELECT ", lease_columns!(), ", l.name, l.xmin AS version, s.stands OR l.id = $2 AS is_standing,
           l.waiting = 0 AND NOT s.is_known AND (l.id = '' OR l.id = 'entries' AND s.is_shared)
               AND s.taken + $8 <= $9 AS has_room
      FROM sqlock_lease AS l LEFT JOIN sqlock_client AS c ON c.id = l.client
     CROSS JOIN LATERAL (
           SELECT coalesce(sum(e.units), 0) AS taken, coalesce(bool_and(e.units > 0), false) AS is_shared,
                  coalesce(bool_or(e.id = $2), false) AS is_known,
                  coalesce(bool_or(e.id = $2 AND e.owner <> ''), false) AS stands
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
SELECT token AS granted, '' AS id, '' AS owner, '' AS client, token, 0::bigint AS waiting, 0::bigint AS lost, 0::bigint AS remaining,
       false AS is_standing, true AS has_room
  FROM taken
 UNION ALL
SELECT 0, id, owner, client, token, waiting, lost, remaining, is_standing, has_room
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

// $1 name, $2 id, $3 client, $4 ttl. For a claim that holds already, beside others or in another mode than it asks for.
#[rustfmt::skip]
const RESUME: &str = concat!("
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

/// Takes a name if nobody holds it and nobody waits.
pub(super) async fn acquire(
    session: &mut Session<'_>,
    claim: &Claim,
) -> Result<Result<FencingToken, HolderNow>, sqlx::Error> {
    let (acquire, create) = match claim.mode {
        Mode::Exclusive => (ACQUIRE, CREATE),
        Mode::Shared { .. } => (ACQUIRE_SHARE, CREATE_SHARE),
    };
    for is_first in (0..TRIES).map(|tried| tried == 0) {
        let query = sqlx::query(acquire).bind(claim.name.as_str());
        let row = session.row(bind_claim(query, claim)).await?;
        let Some(row) = row else {
            if !is_first {
                break;
            }
            let query = sqlx::query(create).bind(claim.name.as_str());
            match session.row(bind_claim(query, claim)).await? {
                Some(row) => return token(&row, "granted").map(Ok),
                // Another client has created the row meanwhile.
                None => continue,
            }
        };
        if row.number("granted")? > 0 {
            return token(&row, "granted").map(Ok);
        }
        if row.try_get("is_standing")? {
            let query = sqlx::query(RESUME)
                .bind(claim.name.as_str())
                .bind(claim.id.to_string())
                .bind(client_text(claim.is_kept.then_some(claim.client)))
                .bind(micros(claim.ttl));
            match session.row(query).await? {
                Some(row) => return token(&row, "granted").map(Ok),
                None => continue,
            }
        }
        if !row.try_get::<bool, _>("has_room")? {
            return Ok(Err(holder_now(&lease_row(&row)?)));
        }
        // The name was free in the snapshot, and its row another version once it was locked. A share may still have room.
        if claim.mode == Mode::Exclusive {
            break;
        }
    }
    Ok(Err(HolderNow::Unknown))
}

// ---- join

// $1 name, $2 id, $3 owner, $4 client, $5 ttl, $6 holder, $7 label. An acquisition without a label has that of those it joins.
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
    INSERT INTO sqlock_entry AS e (name, id, owner, client, is_kept, units, permits, token, ttl, arrived_at, expires_at,
                                   acquired_at, holder, label)
    SELECT name, id, owner, client, true, 0, 0, token, ttl, 0, expires_at, acquired_at, holder, label
      FROM held WHERE id <> 'entries'
        ON CONFLICT (name, id) DO UPDATE
       SET owner = excluded.owner, client = excluded.client, is_kept = true, units = 0, permits = 0,
           token = excluded.token, ttl = excluded.ttl, arrived_at = 0, expires_at = excluded.expires_at,
           acquired_at = excluded.acquired_at, holder = excluded.holder, label = excluded.label),
own AS (
    INSERT INTO sqlock_entry AS e (name, id, owner, client, is_kept, units, permits, token, ttl, arrived_at, expires_at,
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
           owner = excluded.owner, is_kept = true, units = 0, permits = 0, token = excluded.token, arrived_at = 0,
           holder = excluded.holder, label = excluded.label),
joined AS (
    UPDATE sqlock_lease AS l SET id = 'entries', client = '', holder = '', label = ''
      FROM held WHERE l.name = held.name
    RETURNING l.token)
SELECT coalesce((SELECT token FROM joined), 0) AS joined FROM seen");

/// Adds an acquisition to an exclusive holding of the same owner.
pub(super) async fn join(session: &mut Session<'_>, claim: &Claim) -> Result<Joined, sqlx::Error> {
    let Some(row) = session.row(bind_holder(sqlx::query(JOIN).bind(claim.name.as_str()), claim)).await? else {
        return Ok(Joined::NotHeld);
    };
    Ok(FencingToken::new(row.number("joined")?).map_or(Joined::Locked, Joined::Done))
}

// ---- release

/// A statement that ends a holding. $1 name, $2 id, $3 token. A row that cannot be locked at once stays as it is, and the statement
/// returns no row.
///
/// - `$next`: a statement `next` for the waiting entry that gets the name, or nothing.
/// - `$ended`: what becomes of the locked row `held`, and the columns `id, token, waiting` of the row as it is then.
/// - `$share`: the beginning of the statement that ends the entry `e`, where no row `held` is.
///
/// An entry is written by its `ctid` once it is locked: the version that was locked, if the snapshot has it, or none.
macro_rules! release {
    ($next:expr, $ended:expr, $share:expr) => {
        concat!("
WITH held AS MATERIALIZED (
    SELECT l.name, l.client, l.waiting, greatest(l.token + 1, ", now!(), ") AS token
      FROM sqlock_lease AS l
     WHERE l.name = $1 AND l.id = $2 AND l.token = $3
       FOR UPDATE SKIP LOCKED),", $next, "
ended AS (
    UPDATE sqlock_lease AS l", $ended, "),
share AS (
    ", $share, "
     WHERE e.ctid = (SELECT s.ctid
                       FROM sqlock_entry AS s
                      WHERE s.name = $1 AND s.id = $2 AND s.token = $3 AND s.owner <> '' AND NOT EXISTS (SELECT FROM held)
                        FOR UPDATE SKIP LOCKED)
    RETURNING e.name)
SELECT true AS is_alone, id, token, waiting FROM ended
 UNION ALL
SELECT false, '', 0, l.waiting FROM share JOIN sqlock_lease AS l ON l.name = share.name
 UNION ALL
SELECT true, 'undone', 0, 0 FROM held WHERE waiting = 0 AND NOT EXISTS (SELECT FROM ended)")
    };
}

// It is committed like a grant: the heartbeat of its client would keep for ever what a crash of the server made of a release undone.
#[rustfmt::skip]
const RELEASE: &str = release!(concat!("
next AS (
    DELETE FROM sqlock_entry AS e
     WHERE e.ctid = (
           SELECT n.ctid
             FROM sqlock_entry AS n
            WHERE n.name = $1 AND n.token = 0 AND n.id = (
                  SELECT CASE w.units WHEN 0 THEN w.id END
                    FROM (SELECT * FROM sqlock_entry
                           WHERE name = $1 AND token = 0 AND (SELECT waiting FROM held) <> 0
                           ORDER BY arrived_at, id LIMIT 64) AS w
                    LEFT JOIN sqlock_client AS c ON c.id = w.client
                   WHERE greatest(w.expires_at, c.beat_at + ", grant!(), ") > ", now!(), "
                   ORDER BY w.arrived_at, w.id LIMIT 1)
              FOR UPDATE SKIP LOCKED)
    RETURNING e.id, e.owner, e.client, e.is_kept, least(e.ttl, ", grant!(), ") AS ttl, e.holder, e.label),"), concat!("
       SET id = coalesce(next.id, ''), owner = coalesce(next.owner, ''),
           client = CASE WHEN next.is_kept THEN next.client ELSE '' END,
           token = CASE WHEN next.id IS NULL THEN l.token ELSE held.token END, ttl = coalesce(next.ttl, l.ttl),
           expires_at = coalesce(", now!(), " + next.ttl, 0),
           acquired_at = CASE WHEN next.id IS NULL THEN l.acquired_at ELSE ", now!(), " END,
           holder = coalesce(next.holder, l.holder), label = coalesce(next.label, l.label)
      FROM held LEFT JOIN next ON true
     WHERE l.name = held.name AND (held.waiting = 0 OR next.id IS NOT NULL)
    RETURNING l.id, l.token, l.waiting, ", notify!("next.client", "held.client"), " AS notified"), "
    DELETE FROM sqlock_entry AS e");

// $4 keep_for
#[rustfmt::skip]
const RELEASE_AND_KEEP: &str = release!("", concat!("
       SET id = 'kept', owner = '', client = '', expires_at = ", now!(), " + $4
      FROM held
     WHERE l.name = held.name
    RETURNING l.id, l.token, l.waiting"), concat!("
    UPDATE sqlock_entry AS e SET owner = '', client = '', expires_at = ", now!(), " + $4"));

// The next holder: $4 id, $5 owner, $6 client, $7 ttl, $8 holder, $9 label.
#[rustfmt::skip]
const RELEASE_TO_NEXT: &str = release!("", concat!("
       SET id = $4, owner = $5, client = $6, token = held.token, ttl = $7, expires_at = ", now!(), " + $7,
           acquired_at = ", now!(), ", holder = $8, label = $9
      FROM held
     WHERE l.name = held.name AND held.waiting = 0
    RETURNING l.id, l.token, l.waiting"), "
    DELETE FROM sqlock_entry AS e");

// Why a release has ended nothing. $1 name, $2 id, $3 token. Only a fence passes FOR NO KEY UPDATE and not FOR UPDATE; every other lock
// lasts for a moment, unless a stranger has it.
#[rustfmt::skip]
const FIND_OBSTACLE: &str = "
WITH held AS MATERIALIZED (
    SELECT l.waiting FROM sqlock_lease AS l WHERE l.name = $1 AND l.id = $2 AND l.token = $3 FOR UPDATE SKIP LOCKED),
fenced AS MATERIALIZED (
    SELECT l.name
      FROM sqlock_lease AS l
     WHERE l.name = $1 AND l.id = $2 AND l.token = $3 AND NOT EXISTS (SELECT FROM held)
       FOR NO KEY UPDATE SKIP LOCKED),
share AS MATERIALIZED (
    SELECT e.name
      FROM sqlock_entry AS e
     WHERE e.name = $1 AND e.id = $2 AND e.token = $3 AND e.owner <> ''
       FOR UPDATE SKIP LOCKED)
SELECT CASE WHEN (SELECT waiting FROM held) <> 0 THEN 'awaited'
            WHEN EXISTS (SELECT FROM fenced) THEN 'locked'
            WHEN EXISTS (SELECT FROM share) OR l.id = $2 AND l.token = $3 THEN 'again'
            WHEN EXISTS (SELECT FROM sqlock_entry AS e WHERE e.name = $1 AND e.id = $2 AND e.token = $3 AND e.owner <> '')
            THEN 'locked'
            ELSE 'not held' END AS obstacle,
       l.token, l.lost
  FROM sqlock_lease AS l
 WHERE l.name = $1";

/// What a release says of a row that it has locked and not changed: a trigger of the application has undone the change.
const UNDONE: &str = "undone";

/// Ends a holding: hands the name to the first live entry, to a given claim if nobody waits, or frees it.
pub(super) async fn release(session: &mut Session<'_>, release: &Release) -> Result<Released, sqlx::Error> {
    let Release { name, id, token: held, keep_for, next } = release;
    let is_kept = !keep_for.is_zero();
    // An entry that begins to wait locks the row for the time of one statement.
    for _ in 0..TRIES {
        let sql = match next {
            _ if is_kept => RELEASE_AND_KEEP,
            Some(_) => RELEASE_TO_NEXT,
            None => RELEASE,
        };
        let query = sqlx::query(sql).bind(name.as_str()).bind(id.to_string()).bind(held.get());
        let query = match next {
            _ if is_kept => query.bind(micros(*keep_for)),
            Some(next) => bind_holder(query, next),
            None => query,
        };
        if let Some(row) = session.row(query).await? {
            let holder = row.text("id")?;
            if holder == UNDONE {
                return Err(sqlx::Error::Decode("a trigger has undone the change of a row that was locked".into()));
            }
            let awaited = row.number("waiting")? != 0;
            if is_kept || !row.try_get::<bool, _>("is_alone")? {
                return Ok(Released::Ended { awaited });
            }
            return Ok(match (identity(&holder)?, next) {
                (None, _) => Released::Ended { awaited },
                (Some(_), Some(_)) => Released::ToNext(token(&row, "token")?),
                (Some(id), None) => Released::ToEntry(Granted { id, token: token(&row, "token")? }),
            });
        }
        let query = sqlx::query(FIND_OBSTACLE).bind(name.as_str()).bind(id.to_string()).bind(held.get());
        let Some(row) = session.row(query).await? else {
            return Ok(Released::NotHeld { lost: 0, token: 0 });
        };
        match &*row.text("obstacle")? {
            "awaited" if !is_kept => return Ok(Released::Awaited),
            "locked" => return Ok(Released::Locked),
            "not held" => return Ok(Released::NotHeld { lost: row.number("lost")?, token: row.number("token")? }),
            _ => {}
        }
    }
    Ok(Released::Locked)
}

// ---- withdraw

// $1 name, $2 id, $3 the token whose holding stays, or 0.
#[rustfmt::skip]
const WITHDRAW: &str = "
WITH held AS MATERIALIZED (
    SELECT l.name, l.waiting
      FROM sqlock_lease AS l
     WHERE l.name = $1 AND l.id = $2 AND l.token <> $3
       FOR UPDATE SKIP LOCKED),
entry AS MATERIALIZED (
    SELECT e.name, e.id
      FROM sqlock_entry AS e
     WHERE e.name = $1 AND e.id = $2 AND e.owner <> '' AND (e.token = 0 OR e.token <> $3)
       FOR UPDATE SKIP LOCKED),
seen AS MATERIALIZED (
    SELECT (SELECT count(*) FROM held)
               = (SELECT count(*) FROM sqlock_lease AS l WHERE l.name = $1 AND l.id = $2 AND l.token <> $3)
           AND (SELECT count(*) FROM entry)
               = (SELECT count(*) FROM sqlock_entry AS e
                   WHERE e.name = $1 AND e.id = $2 AND e.owner <> '' AND (e.token = 0 OR e.token <> $3)) AS all_locked),
gone AS (
    DELETE FROM sqlock_entry AS e USING entry, seen WHERE seen.all_locked AND e.name = entry.name AND e.id = entry.id),
ended AS (
    UPDATE sqlock_lease AS l SET id = '', owner = '', client = '', expires_at = 0
      FROM held, seen WHERE seen.all_locked AND l.name = held.name)
SELECT all_locked,
       coalesce((SELECT waiting FROM held), (SELECT waiting FROM sqlock_lease WHERE name = $1), 0) <> 0
       OR EXISTS (SELECT FROM sqlock_entry AS e WHERE e.name = $1 AND e.token = 0 AND e.id <> $2) AS awaited
  FROM seen";

/// Deletes every trace of an acquisition, unless it holds with the token `except`.
pub(super) async fn withdraw(
    session: &mut Session<'_>,
    name: &LockName,
    id: LeaseId,
    except: Option<FencingToken>,
) -> Result<Withdrawn, sqlx::Error> {
    let query =
        sqlx::query(WITHDRAW).bind(name.as_str()).bind(id.to_string()).bind(except.map_or(0, FencingToken::get));
    let row = session.row(query).await?.ok_or(sqlx::Error::RowNotFound)?;
    if row.try_get("all_locked")? {
        return Ok(Withdrawn::Gone { awaited: row.try_get("awaited")? });
    }
    Ok(Withdrawn::Locked)
}

// ---- changes

/// What a statement says that locks what it changes, or finds it locked or otherwise.
fn amended(row: Option<PgRow>) -> Result<Amended, sqlx::Error> {
    let Some(row) = row else {
        return Ok(Amended::NotHeld);
    };
    Ok(match &*row.text("outcome")? {
        "done" => Amended::Done,
        "locked" => Amended::Locked,
        _ => Amended::NotHeld,
    })
}

/// What becomes of a holding `e`.
macro_rules! longer {
    () => {
        concat!("
           client = CASE WHEN $6 <> '' THEN $6 WHEN e.client = $7 THEN '' ELSE e.client END, ttl = greatest(e.ttl, $5),
           expires_at = greatest(e.expires_at, ", now!(), " + $4)")
    };
}

/// A statement that extends holdings. $1 name, $2 id or '' for any, $3 token, $4 lasts, $5 ttl, $6 the client that keeps it or '', $7 the
/// client that keeps it no more or '', and where it is renamed $8 the new id.
///
/// - `$named`: whether the id of a row is meant.
/// - `$id`: what the id of the row of the name becomes.
/// - `$share`: locks the valid ones of the entries `meant`, and writes them as `shares` if all of them are locked.
macro_rules! extend {
    ($named:literal, $id:literal, $share:expr) => {
        concat!(
            "
WITH meant AS MATERIALIZED (
    SELECT e.name, e.id, greatest(e.expires_at, c.beat_at + e.ttl) > ",
            now!(),
            " OR $7 <> '' AND e.client = $7 AS is_valid
      FROM sqlock_entry AS e LEFT JOIN sqlock_client AS c ON c.id = e.client
     WHERE e.name = $1 AND e.token = $3 AND ",
            $named,
            " AND e.owner <> ''),
seen AS MATERIALIZED (
    SELECT e.name, e.id
      FROM sqlock_lease AS e LEFT JOIN sqlock_client AS c ON c.id = e.client
     WHERE e.name = $1 AND e.token = $3 AND e.id NOT IN ('', 'kept', 'entries') AND ",
            $named,
            "
       AND (greatest(e.expires_at, c.beat_at + e.ttl) > ",
            now!(),
            " OR $7 <> '' AND e.client = $7) AND NOT EXISTS (SELECT FROM meant)),
held AS MATERIALIZED (
    SELECT l.name
      FROM seen JOIN sqlock_lease AS l ON l.name = seen.name
     WHERE l.id = seen.id AND l.token = $3
       FOR NO KEY UPDATE OF l SKIP LOCKED),",
            $share,
            ",
alone AS (
    UPDATE sqlock_lease AS e SET id = ",
            $id,
            ",",
            longer!(),
            "
      FROM held
     WHERE e.name = held.name
    RETURNING e.id)
SELECT CASE WHEN EXISTS (SELECT FROM alone) OR EXISTS (SELECT FROM shares) THEN 'done'
            WHEN EXISTS (SELECT FROM seen) OR EXISTS (SELECT FROM meant WHERE is_valid) THEN 'locked'
            ELSE 'not held' END AS outcome"
        )
    };
}

#[rustfmt::skip]
const EXTEND: &str = extend!("($2 = '' OR e.id = $2)", "e.id", concat!("
share AS MATERIALIZED (
    SELECT e.name, e.id
      FROM meant JOIN sqlock_entry AS e ON e.name = meant.name AND e.id = meant.id
     WHERE meant.is_valid AND e.token = $3 AND e.owner <> ''
       FOR NO KEY UPDATE OF e SKIP LOCKED),
shares AS (
    UPDATE sqlock_entry AS e SET", longer!(), "
      FROM share
     WHERE e.name = share.name AND e.id = share.id
       AND (SELECT count(*) FROM share) = (SELECT count(*) FROM meant WHERE is_valid)
    RETURNING e.id)"));

// The id is a part of the key of an entry: a fence keeps it. So the entry is replaced, where it has not the new id already.
#[rustfmt::skip]
const EXTEND_AND_RENAME: &str = extend!("($2 = '' OR e.id IN ($2, $8))", "$8", concat!("
named AS MATERIALIZED (
    SELECT e.name, e.id
      FROM meant JOIN sqlock_entry AS e ON e.name = meant.name AND e.id = meant.id
     WHERE meant.is_valid AND e.token = $3 AND e.owner <> '' AND e.id = $8
       FOR NO KEY UPDATE OF e SKIP LOCKED),
unnamed AS MATERIALIZED (
    SELECT e.name, e.id
      FROM meant JOIN sqlock_entry AS e ON e.name = meant.name AND e.id = meant.id
     WHERE meant.is_valid AND e.token = $3 AND e.owner <> '' AND e.id <> $8
       FOR UPDATE OF e SKIP LOCKED),
all_locked AS MATERIALIZED (
    SELECT (SELECT count(*) FROM named) + (SELECT count(*) FROM unnamed)
           = (SELECT count(*) FROM meant WHERE is_valid) AS is_true),
extended AS (
    UPDATE sqlock_entry AS e SET", longer!(), "
      FROM named, all_locked
     WHERE e.name = named.name AND e.id = named.id AND all_locked.is_true
    RETURNING e.id),
gone AS (
    DELETE FROM sqlock_entry AS e USING unnamed AS u, all_locked
     WHERE e.name = u.name AND e.id = u.id AND all_locked.is_true
    RETURNING e.*),
renamed AS (
    INSERT INTO sqlock_entry AS r (name, id, owner, client, is_kept, units, permits, token, ttl, arrived_at, expires_at,
                                   acquired_at, holder, label)
    SELECT e.name, $8, e.owner, CASE WHEN $6 <> '' THEN $6 WHEN e.client = $7 THEN '' ELSE e.client END, e.is_kept, e.units,
           e.permits, e.token, greatest(e.ttl, $5), e.arrived_at, greatest(e.expires_at, ", now!(), " + $4), e.acquired_at,
           e.holder, e.label
      FROM gone AS e
     WHERE NOT EXISTS (SELECT FROM named)
        ON CONFLICT (name, id) DO UPDATE
       SET owner = excluded.owner, client = excluded.client, is_kept = excluded.is_kept, units = excluded.units,
           permits = excluded.permits, token = excluded.token, ttl = excluded.ttl, arrived_at = excluded.arrived_at,
           expires_at = excluded.expires_at, acquired_at = excluded.acquired_at, holder = excluded.holder,
           label = excluded.label
    RETURNING r.id),
shares AS MATERIALIZED (
    SELECT id FROM extended UNION ALL SELECT id FROM renamed)"));

/// Moves the end of a valid holding, and changes whose heartbeat keeps it, and its identity.
pub(super) async fn extend(session: &mut Session<'_>, extension: &Extension) -> Result<Amended, sqlx::Error> {
    let Extension { name, id, renamed, token, lasts, ttl, keeper } = extension;
    let (keeper, dropped) = match keeper {
        Keeper::Same => (None, None),
        Keeper::Client(client) => (Some(*client), None),
        Keeper::NotThisClient(client) => (None, Some(*client)),
    };
    let query = sqlx::query(if renamed.is_some() { EXTEND_AND_RENAME } else { EXTEND })
        .bind(name.as_str())
        .bind(id.map_or_else(String::new, |id| id.to_string()))
        .bind(token.get())
        .bind(micros(*lasts))
        .bind(ttl.map_or(0, micros))
        .bind(client_text(keeper))
        .bind(client_text(dropped));
    let query = if let Some(renamed) = renamed { query.bind(renamed.to_string()) } else { query };
    amended(session.row(query).await?)
}

// $1 name, $2 id, $3 token, $4 units, $5 permits. `seen`: the owner had entered more than once, and this acquisition is the only one
// left.
#[rustfmt::skip]
const DOWNGRADE: &str = "
WITH held AS MATERIALIZED (
    SELECT l.* FROM sqlock_lease AS l WHERE l.name = $1 AND l.id = $2 AND l.token = $3 FOR UPDATE SKIP LOCKED),
share AS (
    INSERT INTO sqlock_entry AS e (name, id, owner, client, is_kept, units, permits, token, ttl, arrived_at, expires_at,
                                   acquired_at, holder, label)
    SELECT name, id, owner, client, client <> '', $4, $5, token, ttl, 0, expires_at, acquired_at, holder, label FROM held
        ON CONFLICT (name, id) DO UPDATE
       SET owner = excluded.owner, client = excluded.client, is_kept = excluded.is_kept, units = excluded.units,
           permits = excluded.permits, token = excluded.token, ttl = excluded.ttl, arrived_at = 0,
           expires_at = excluded.expires_at, acquired_at = excluded.acquired_at, holder = excluded.holder,
           label = excluded.label),
shared AS (
    UPDATE sqlock_lease AS l SET id = 'entries', owner = '', client = '', holder = '', label = ''
      FROM held WHERE l.name = held.name
    RETURNING l.name),
seen AS MATERIALIZED (
    SELECT l.name, l.xmin AS version FROM sqlock_lease AS l
     WHERE l.name = $1 AND l.id = 'entries'
       AND EXISTS (SELECT FROM sqlock_entry AS e
                    WHERE e.name = $1 AND e.id = $2 AND e.token = $3 AND e.owner <> '' AND e.units = 0)
       AND NOT EXISTS (SELECT FROM sqlock_entry AS o WHERE o.name = $1 AND o.token > 0 AND o.id <> $2)),
sole AS MATERIALIZED (
    SELECT l.name FROM seen JOIN sqlock_lease AS l ON l.name = seen.name
     WHERE l.xmin = seen.version
       FOR UPDATE OF l SKIP LOCKED),
own AS MATERIALIZED (
    SELECT e.name, e.id FROM sole JOIN sqlock_entry AS e ON e.name = sole.name AND e.id = $2
     WHERE e.token = $3 AND e.owner <> ''
       FOR UPDATE OF e SKIP LOCKED),
own_shared AS (
    UPDATE sqlock_entry AS e SET units = $4, permits = $5 FROM own WHERE e.name = own.name AND e.id = own.id),
opened AS (
    UPDATE sqlock_lease AS l SET owner = '' FROM own WHERE l.name = own.name
    RETURNING l.name)
SELECT CASE WHEN EXISTS (SELECT FROM shared) OR EXISTS (SELECT FROM opened) THEN 'done'
            WHEN EXISTS (SELECT FROM sqlock_entry AS e
                          WHERE e.name = l.name AND e.id = $2 AND e.token = $3 AND e.units = $4 AND e.permits = $5
                            AND e.owner <> '')
            THEN 'done'
            WHEN l.id = $2 AND l.token = $3 OR EXISTS (SELECT FROM seen) THEN 'locked'
            ELSE 'not held' END AS outcome
  FROM sqlock_lease AS l
 WHERE l.name = $1";

/// Turns an exclusive holding of one lease into a shared one, with the same token.
pub(super) async fn downgrade(
    session: &mut Session<'_>,
    name: &LockName,
    id: LeaseId,
    token: FencingToken,
) -> Result<Amended, sqlx::Error> {
    let (units, permits) = Mode::READ.stored();
    let query =
        sqlx::query(DOWNGRADE).bind(name.as_str()).bind(id.to_string()).bind(token.get()).bind(units).bind(permits);
    amended(session.row(query).await?)
}

// $1 name, $2 id, $3 token, $4 the higher token.
#[rustfmt::skip]
const RAISE: &str = "
WITH held AS MATERIALIZED (
    SELECT l.name FROM sqlock_lease AS l WHERE l.name = $1 AND l.id = $2 AND l.token = $3 FOR UPDATE SKIP LOCKED),
raised AS (
    UPDATE sqlock_lease AS l SET token = $4 FROM held WHERE l.name = held.name AND $4 > $3
    RETURNING l.name)
SELECT CASE WHEN EXISTS (SELECT FROM raised) OR l.token = $4 THEN 'done'
            WHEN l.token = $3 AND NOT EXISTS (SELECT FROM held) THEN 'locked'
            ELSE 'not held' END AS outcome
  FROM sqlock_lease AS l
 WHERE l.name = $1 AND l.id = $2";

/// Gives an exclusive holding of one lease a higher token.
pub(super) async fn raise(
    session: &mut Session<'_>,
    name: &LockName,
    id: LeaseId,
    token: FencingToken,
    to: FencingToken,
) -> Result<Amended, sqlx::Error> {
    let query = sqlx::query(RAISE).bind(name.as_str()).bind(id.to_string()).bind(token.get()).bind(to.get());
    amended(session.row(query).await?)
}

// $1 name, $2 token. What was released, and is kept from others, is taken away from nobody. Nothing is written unless the row, the entries and the clients of those that lose are all locked.
#[rustfmt::skip]
const EVICT: &str = concat!("
WITH meant AS MATERIALIZED (
    SELECT e.name, e.id, e.owner, e.client FROM sqlock_entry AS e WHERE e.name = $1 AND e.token = $2),
seen AS MATERIALIZED (
    SELECT l.name, l.xmin AS version, l.client,
           l.token = $2 AND l.id NOT IN ('', 'entries') AS is_alone,
           l.token = $2 AND l.id NOT IN ('', 'kept', 'entries') OR EXISTS (SELECT FROM meant WHERE owner <> '') AS is_owned
      FROM sqlock_lease AS l
     WHERE l.name = $1
       AND (l.token = $2 AND l.id NOT IN ('', 'entries') OR EXISTS (SELECT FROM meant))),
held AS MATERIALIZED (
    SELECT l.name, seen.client, seen.is_alone, seen.is_owned
      FROM seen JOIN sqlock_lease AS l ON l.name = seen.name
     WHERE l.xmin = seen.version
       FOR UPDATE OF l SKIP LOCKED),
share AS MATERIALIZED (
    SELECT e.name, e.id, e.client
      FROM held JOIN meant ON meant.name = held.name JOIN sqlock_entry AS e ON e.name = meant.name AND e.id = meant.id
     WHERE e.token = $2
       FOR UPDATE OF e SKIP LOCKED),
loser AS MATERIALIZED (
    SELECT client FROM held WHERE is_alone AND client <> ''
     UNION
    SELECT share.client FROM held, share WHERE NOT held.is_alone AND share.client <> ''),
client AS MATERIALIZED (
    SELECT c.id FROM loser JOIN sqlock_client AS c ON c.id = loser.client FOR UPDATE OF c SKIP LOCKED),
all_locked AS MATERIALIZED (
    SELECT held.*
      FROM held
     WHERE (SELECT count(*) FROM share) = (SELECT count(*) FROM meant)
       AND (SELECT count(*) FROM client)
           = (SELECT count(*) FROM loser WHERE EXISTS (SELECT FROM sqlock_client AS c WHERE c.id = loser.client))),
notice AS (", notice!(), "),
gone AS (
    DELETE FROM sqlock_entry AS e USING share, all_locked WHERE e.name = share.name AND e.id = share.id),
evicted AS (
    UPDATE sqlock_lease AS l
       SET id = CASE WHEN a.is_alone THEN '' ELSE l.id END, owner = CASE WHEN a.is_alone THEN '' ELSE l.owner END,
           client = CASE WHEN a.is_alone THEN '' ELSE l.client END,
           expires_at = CASE WHEN a.is_alone THEN 0 ELSE l.expires_at END,
           lost = CASE WHEN a.is_owned THEN greatest(l.lost, $2) ELSE l.lost END
      FROM all_locked AS a
     WHERE l.name = a.name
    RETURNING l.name)
SELECT CASE WHEN EXISTS (SELECT FROM evicted) THEN 'done' ELSE 'locked' END AS outcome FROM seen");

/// Ends the holding with this token, and tells its client.
pub(super) async fn evict(
    session: &mut Session<'_>,
    name: &LockName,
    token: FencingToken,
) -> Result<Amended, sqlx::Error> {
    amended(session.row(sqlx::query(EVICT).bind(name.as_str()).bind(token.get())).await?)
}
