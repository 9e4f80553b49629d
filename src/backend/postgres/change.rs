//! Changes holdings: expiry, mode and token, and asks for their release.

use sqlx::postgres::PgRow;

use super::store::{Connection, notice, now};
use crate::backend::micros;
use crate::backend::stored::{TableRow as _, client_text};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, AskOutcome, ChangeOutcome, Extension, Mode};
use crate::token::FencingToken;

/// Reads the outcome of a statement that changes a holding.
pub(super) fn amended(row: Option<PgRow>) -> Result<ChangeOutcome, sqlx::Error> {
    let Some(row) = row else {
        return Ok(ChangeOutcome::NotHeld);
    };
    Ok(match &*row.text("outcome")? {
        "done" => ChangeOutcome::Done,
        "locked" => ChangeOutcome::Locked,
        _ => ChangeOutcome::NotHeld,
    })
}

/// The new values of a holding `e`.
macro_rules! extended {
    () => {
        concat!("
           client = CASE WHEN $6 <> '' THEN $6 WHEN e.client = $7 THEN '' ELSE e.client END, ttl = greatest(e.ttl, $5),
           expires_at = greatest(e.expires_at, ", now!(), " + $4)")
    };
}

/// A statement that extends holdings. $1 name, $2 id or '' for any, $3 token, $4 lasts, $5 ttl, $6
/// the client whose heartbeat renews it from now on, or '', $7 the client whose heartbeat no longer
/// keeps it, or '', $8 the new id if it is renamed.
///
/// - `$named`: whether the id of a row matches.
/// - `$id`: the new id in the row of the name.
/// - `$share`: locks the valid entries in `meant`, and writes them as `shares` if all of them are
///   locked.
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
            extended!(),
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
    UPDATE sqlock_entry AS e SET", extended!(), "
      FROM share
     WHERE e.name = share.name AND e.id = share.id
       AND (SELECT count(*) FROM share) = (SELECT count(*) FROM meant WHERE is_valid)
    RETURNING e.id)"));

// The id is part of the key of an entry, which a fence locks. So the entry is replaced, unless it
// has the new id already.
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
    UPDATE sqlock_entry AS e SET", extended!(), "
      FROM named, all_locked
     WHERE e.name = named.name AND e.id = named.id AND all_locked.is_true
    RETURNING e.id),
gone AS (
    DELETE FROM sqlock_entry AS e USING unnamed AS u, all_locked
     WHERE e.name = u.name AND e.id = u.id AND all_locked.is_true
    RETURNING e.*),
renamed AS (
    INSERT INTO sqlock_entry AS r (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at,
                                   acquired_at, holder, label)
    SELECT e.name, $8, e.owner, CASE WHEN $6 <> '' THEN $6 WHEN e.client = $7 THEN '' ELSE e.client END, e.is_renewed, e.units,
           e.permits, e.token, greatest(e.ttl, $5), e.arrived_at, greatest(e.expires_at, ", now!(), " + $4), e.acquired_at,
           e.holder, e.label
      FROM gone AS e
     WHERE NOT EXISTS (SELECT FROM named)
        ON CONFLICT (name, id) DO UPDATE
       SET owner = excluded.owner, client = excluded.client, is_renewed = excluded.is_renewed, units = excluded.units,
           permits = excluded.permits, token = excluded.token, ttl = excluded.ttl, arrived_at = excluded.arrived_at,
           expires_at = excluded.expires_at, acquired_at = excluded.acquired_at, holder = excluded.holder,
           label = excluded.label
    RETURNING r.id),
shares AS MATERIALIZED (
    SELECT id FROM extended UNION ALL SELECT id FROM renamed)"));

/// Moves the expiry of a valid holding, and changes the client whose heartbeat renews it, and its
/// id.
pub(super) async fn extend(conn: &mut Connection<'_>, extension: &Extension) -> Result<ChangeOutcome, sqlx::Error> {
    let Extension { name, id, renamed, token, lasts, ttl, client_change } = extension;
    let (new_client, removed_client) = client_change.clients();
    let query = sqlx::query(if renamed.is_some() { EXTEND_AND_RENAME } else { EXTEND })
        .bind(name.as_str())
        .bind(id.map_or_else(String::new, |id| id.to_string()))
        .bind(token.get())
        .bind(micros(*lasts))
        .bind(ttl.map_or(0, micros))
        .bind(client_text(new_client))
        .bind(client_text(removed_client));
    let query = if let Some(renamed) = renamed { query.bind(renamed.to_string()) } else { query };
    amended(conn.row(query).await?)
}

// $1 name, $2 id, $3 token, $4 units, $5 permits. `seen`: the owner had several acquisitions, and
// this one is the last.
#[rustfmt::skip]
const DOWNGRADE: &str = "
WITH held AS MATERIALIZED (
    SELECT l.* FROM sqlock_lease AS l WHERE l.name = $1 AND l.id = $2 AND l.token = $3 FOR UPDATE SKIP LOCKED),
share AS (
    INSERT INTO sqlock_entry AS e (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at,
                                   acquired_at, holder, label)
    SELECT name, id, owner, client, client <> '', $4, $5, token, ttl, 0, expires_at, acquired_at, holder, label FROM held
        ON CONFLICT (name, id) DO UPDATE
       SET owner = excluded.owner, client = excluded.client, is_renewed = excluded.is_renewed, units = excluded.units,
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
    conn: &mut Connection<'_>,
    name: &LockName,
    id: AcquisitionId,
    token: FencingToken,
) -> Result<ChangeOutcome, sqlx::Error> {
    let (units, permits) = Mode::READ.stored();
    let query =
        sqlx::query(DOWNGRADE).bind(name.as_str()).bind(id.to_string()).bind(token.get()).bind(units).bind(permits);
    amended(conn.row(query).await?)
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
    conn: &mut Connection<'_>,
    name: &LockName,
    id: AcquisitionId,
    token: FencingToken,
    to: FencingToken,
) -> Result<ChangeOutcome, sqlx::Error> {
    let query = sqlx::query(RAISE).bind(name.as_str()).bind(id.to_string()).bind(token.get()).bind(to.get());
    amended(conn.row(query).await?)
}

// $1 name. The check of the holders is valid only for the version of the row that was read with
// them. Nothing is written unless the row and the clients are all locked. The statement passes
// fences, since it leaves the holder unchanged.
#[rustfmt::skip]
const ASK: &str = concat!("
WITH holder AS MATERIALIZED (
    SELECT l.token, l.client
      FROM sqlock_lease AS l LEFT JOIN sqlock_client AS c ON c.id = l.client
     WHERE l.name = $1 AND l.id NOT IN ('', 'kept', 'entries') AND greatest(l.expires_at, c.beat_at + l.ttl) > ", now!(), "
     UNION ALL
    SELECT e.token, e.client
      FROM sqlock_entry AS e LEFT JOIN sqlock_client AS c ON c.id = e.client
     WHERE e.name = $1 AND e.token > 0 AND e.owner <> '' AND greatest(e.expires_at, c.beat_at + e.ttl) > ", now!(), "),
seen AS MATERIALIZED (
    SELECT l.name, l.xmin AS version FROM sqlock_lease AS l WHERE l.name = $1 AND EXISTS (SELECT FROM holder)),
held AS MATERIALIZED (
    SELECT l.name
      FROM seen JOIN sqlock_lease AS l ON l.name = seen.name
     WHERE l.xmin = seen.version
       FOR NO KEY UPDATE OF l SKIP LOCKED),
loser AS MATERIALIZED (
    SELECT DISTINCT holder.client FROM held, holder WHERE holder.client <> ''),
client AS MATERIALIZED (
    SELECT c.id FROM loser JOIN sqlock_client AS c ON c.id = loser.client FOR UPDATE OF c SKIP LOCKED),
all_locked AS MATERIALIZED (
    SELECT held.name
      FROM held
     WHERE (SELECT count(*) FROM client)
           = (SELECT count(*) FROM loser WHERE EXISTS (SELECT FROM sqlock_client AS c WHERE c.id = loser.client))),
notice AS (", notice!(), "),
asked AS (
    UPDATE sqlock_lease AS l SET asked = l.token FROM all_locked AS a WHERE l.name = a.name
    RETURNING l.name)
SELECT (SELECT count(DISTINCT token) FROM holder) AS holders, (SELECT count(*) FROM asked) AS asked");

/// Records that the holders of a name are asked to release it, and gives their clients a notice.
pub(super) async fn ask(conn: &mut Connection<'_>, name: &LockName) -> Result<AskOutcome, sqlx::Error> {
    let row = conn.row(sqlx::query(ASK).bind(name.as_str())).await?.ok_or(sqlx::Error::RowNotFound)?;
    let holders = u32::try_from(row.number("holders")?).unwrap_or(u32::MAX);
    Ok(if holders > 0 && row.number("asked")? == 0 { AskOutcome::Locked } else { AskOutcome::Holders(holders) })
}
