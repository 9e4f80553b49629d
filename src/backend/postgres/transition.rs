//! Transitions: changes of the holder of a name.

use super::acquire::{bind_claim, insert_share, token};
use super::store::{Connection, grant, notice, notify, now};
use crate::backend::micros;
use crate::backend::stored::{TableRow as _, holder_text, parse_id};
use crate::protocol::{AcquisitionId, Granted, HolderChange, Mode, Transition};

/// Changes the holder of a name. $1 name; $2 id, $3 token and $4 waiting of the row that was read;
/// $5 is_last, $6 given_up, $7 expired ids, $8 ids of grantees, $9 their ttls.
///
/// - `$preventing`: which unexpired holding entries prevent it.
/// - `$passes`: whether it passes fences if a share stays.
/// - `$unless`: a further condition on the row `l`.
/// - `$deleted`: which expired entries are deleted.
/// - `$change`: the writes if all conditions hold, that is, if `all_locked` has a row.
///
/// Rows are read from the snapshot, then locked, then compared: the row must be the version of the
/// snapshot, and every expired entry, grantee and losing client must be locked and still meet its
/// condition.
macro_rules! transition {
    ($preventing:literal, $passes:literal, $unless:expr, $deleted:literal, $change:expr) => {
        concat!("
WITH seen AS MATERIALIZED (
    SELECT l.name, l.xmin AS version,
           l.id = 'kept' OR l.id NOT IN ('', 'entries') AND NOT $6 AS must_expire,
           ", $passes, " AND l.id = 'entries'
           AND EXISTS (SELECT FROM sqlock_entry AS s
                        WHERE s.name = l.name AND s.token > 0 AND s.units > 0 AND s.id <> ALL ($7)) AS is_plain
      FROM sqlock_lease AS l
     WHERE l.name = $1 AND l.id = $2 AND l.token = $3 AND (l.waiting = $4 OR NOT $5)
       AND NOT EXISTS (SELECT FROM sqlock_entry AS s
                        WHERE s.name = l.name AND s.token > 0 AND s.id <> ALL ($7) AND ", $preventing, ")", $unless, "),
alone AS MATERIALIZED (
    SELECT l.*, seen.must_expire
      FROM seen JOIN sqlock_lease AS l ON l.name = seen.name
     WHERE l.xmin = seen.version AND NOT seen.is_plain
       FOR UPDATE OF l SKIP LOCKED),
beside AS MATERIALIZED (
    SELECT l.*, seen.must_expire
      FROM seen JOIN sqlock_lease AS l ON l.name = seen.name
     WHERE l.xmin = seen.version AND seen.is_plain
       FOR NO KEY UPDATE OF l SKIP LOCKED),
held AS MATERIALIZED (
    SELECT * FROM alone UNION ALL SELECT * FROM beside),
expired AS MATERIALIZED (
    SELECT e.*
      FROM held JOIN sqlock_entry AS e ON e.name = held.name
     WHERE e.id = ANY ($7)
       AND greatest(e.expires_at, (SELECT c.beat_at FROM sqlock_client AS c WHERE c.id = e.client)
                                  + CASE e.token WHEN 0 THEN ", grant!(), " ELSE e.ttl END) <= ", now!(), "
       FOR UPDATE OF e SKIP LOCKED),
grantee AS MATERIALIZED (
    SELECT e.*, n.lasts, n.place
      FROM held JOIN sqlock_entry AS e ON e.name = held.name
      JOIN unnest($8::text[], $9::bigint[]) WITH ORDINALITY AS n (id, lasts, place) ON n.id = e.id
     WHERE e.token = 0
       FOR UPDATE OF e SKIP LOCKED),
loser AS MATERIALIZED (
    SELECT client, max(ttl) AS ttl
      FROM (SELECT client, ttl FROM held WHERE must_expire
             UNION ALL
            SELECT client, ttl FROM expired WHERE token > 0) AS l
     WHERE client <> ''
     GROUP BY client),
client AS MATERIALIZED (
    SELECT c.id
      FROM loser JOIN sqlock_client AS c ON c.id = loser.client
     WHERE c.beat_at + loser.ttl <= ", now!(), "
       FOR UPDATE OF c SKIP LOCKED),
all_locked AS MATERIALIZED (
    SELECT held.name, greatest(held.token + 1, ", now!(), ") AS token,
           greatest(held.lost, CASE WHEN held.must_expire AND held.id <> 'kept' THEN held.token END, (
               SELECT max(x.token)
                 FROM expired AS x
                WHERE x.owner <> '' AND NOT EXISTS (
                      SELECT FROM sqlock_entry AS o WHERE o.name = x.name AND o.token = x.token AND o.id <> ALL ($7)))) AS lost,
           CASE WHEN $5 THEN 0 ELSE held.waiting END AS waiting
      FROM held
     WHERE (NOT held.must_expire OR held.expires_at <= ", now!(), ")
       AND (SELECT count(*) FROM expired) = cardinality($7)
       AND (SELECT count(*) FROM grantee) = cardinality($8)
       AND (SELECT count(*) FROM client)
           = (SELECT count(*) FROM loser WHERE EXISTS (SELECT FROM sqlock_client AS c WHERE c.id = loser.client))),
notice AS (", notice!(), "),
gone AS (
    DELETE FROM sqlock_entry AS e USING expired AS x, all_locked
     WHERE e.name = x.name AND e.id = x.id AND ", $deleted, "),", $change)
    };
}

#[rustfmt::skip]
const KEEP_HOLDER: &str = transition!("false", "true", "
       AND l.id IN ('', 'entries')", "true", "
changed AS (
    UPDATE sqlock_lease AS l SET lost = a.lost, waiting = a.waiting FROM all_locked AS a WHERE l.name = a.name
    RETURNING l.name)
SELECT '' AS id, 0::bigint AS token FROM changed");

#[rustfmt::skip]
const FREE: &str = transition!("true", "false", "", "true", "
changed AS (
    UPDATE sqlock_lease AS l SET id = '', owner = '', client = '', expires_at = 0, lost = a.lost, waiting = a.waiting
      FROM all_locked AS a WHERE l.name = a.name
    RETURNING l.name)
SELECT '' AS id, 0::bigint AS token FROM changed");

#[rustfmt::skip]
const GRANT_ALONE: &str = transition!("true", "false", "", "true", concat!("
granted AS (
    DELETE FROM sqlock_entry AS e USING grantee AS g, all_locked WHERE e.name = g.name AND e.id = g.id),
changed AS (
    UPDATE sqlock_lease AS l
       SET id = g.id, owner = g.owner, client = CASE WHEN g.is_renewed THEN g.client ELSE '' END, token = a.token,
           ttl = g.lasts, expires_at = ", now!(), " + g.lasts, acquired_at = ", now!(), ", holder = g.holder,
           label = g.label, lost = a.lost, waiting = a.waiting
      FROM all_locked AS a, grantee AS g
     WHERE l.name = a.name
    RETURNING l.id, l.token, ", notify!("l", "g.client", "''"), " AS notified)
SELECT id, token FROM changed"));

#[rustfmt::skip]
const GRANT_SHARES: &str = transition!("s.units = 0", "true", "", "true", concat!("
granted AS (
    UPDATE sqlock_entry AS e
       SET client = CASE WHEN e.is_renewed THEN e.client ELSE '' END, token = a.token + g.place - 1, ttl = g.lasts,
           expires_at = ", now!(), " + g.lasts, acquired_at = ", now!(), "
      FROM all_locked AS a, grantee AS g
     WHERE e.name = g.name AND e.id = g.id
    RETURNING e.id, e.token, ", notify!("e", "g.client", "''"), " AS notified),
changed AS (
    UPDATE sqlock_lease AS l
       SET id = 'entries', owner = '', client = '', token = a.token + cardinality($8) - 1, acquired_at = ", now!(), ",
           holder = '', label = '', lost = a.lost, waiting = a.waiting
      FROM all_locked AS a
     WHERE l.name = a.name)
SELECT id, token FROM granted ORDER BY token"));

/// Whether no unexpired entry waits.
macro_rules! no_waiter {
    () => {
        "
       AND NOT EXISTS (SELECT FROM sqlock_entry AS w WHERE w.name = l.name AND w.token = 0 AND w.id <> ALL ($7))"
    };
}

// $10 id, $11 owner, $12 client, $13 ttl, $14 holder, $15 label
#[rustfmt::skip]
const GRANT_CLAIM: &str = transition!("true", "false", no_waiter!(), "true", concat!("
changed AS (
    UPDATE sqlock_lease AS l
       SET id = $10, owner = $11, client = $12, token = a.token, ttl = $13, expires_at = ", now!(), " + $13,
           acquired_at = ", now!(), ", holder = $14, label = $15, lost = a.lost, waiting = a.waiting
      FROM all_locked AS a
     WHERE l.name = a.name
    RETURNING l.id, l.token)
SELECT id, token FROM changed"));

// And $16 units, $17 permits. An expired entry of the same claim is overwritten.
#[rustfmt::skip]
const GRANT_SHARED_CLAIM: &str = transition!("s.units = 0", "false", no_waiter!(), "e.id <> $10", concat!("
claim AS (
    SELECT $10::text AS id, $11::text AS owner, $12::text AS client, $13::bigint AS ttl, $14::text AS holder,
           $15::text AS label, $16::bigint AS units, $17::bigint AS permits),
granted AS (", insert_share!("all_locked"), "
    RETURNING e.id, e.token),
changed AS (
    UPDATE sqlock_lease AS l
       SET id = 'entries', owner = '', client = '', token = a.token, acquired_at = ", now!(), ", holder = '', label = '',
           lost = a.lost, waiting = a.waiting
      FROM all_locked AS a
     WHERE l.name = a.name)
SELECT id, token FROM granted"));

/// Changes the holder of a name if its row is still the one that was read. Returns the grants.
/// `None`: nothing was changed.
pub(super) async fn transition(
    conn: &mut Connection<'_>,
    transition: &Transition,
) -> Result<Option<Vec<Granted>>, sqlx::Error> {
    let Transition { name, seen, given_up, expired, change, is_last } = transition;
    let sql = match change {
        HolderChange::None => KEEP_HOLDER,
        HolderChange::Free => FREE,
        HolderChange::Exclusive(_) => GRANT_ALONE,
        HolderChange::Shared(_) => GRANT_SHARES,
        HolderChange::Claim(claim) if claim.mode == Mode::Exclusive => GRANT_CLAIM,
        HolderChange::Claim(_) => GRANT_SHARED_CLAIM,
    };
    let grantees = change.grantees();
    let query = sqlx::query(sql)
        .bind(name.as_str())
        .bind(holder_text(seen.holder))
        .bind(seen.token)
        .bind(seen.waiting)
        .bind(*is_last)
        .bind(given_up.is_some())
        .bind(expired.iter().map(AcquisitionId::to_string).collect::<Vec<_>>())
        .bind(grantees.iter().map(|grantee| grantee.id.to_string()).collect::<Vec<_>>())
        .bind(grantees.iter().map(|grantee| micros(grantee.ttl)).collect::<Vec<_>>());
    let rows =
        conn.rows(if let HolderChange::Claim(claim) = change { bind_claim(query, claim) } else { query }).await?;
    if rows.is_empty() {
        return Ok(None);
    }
    let mut granted = Vec::new();
    for row in &rows {
        if let Some(id) = parse_id(&row.text("id")?)? {
            granted.push(Granted { id, token: token(row, "token")? });
        }
    }
    Ok(Some(granted))
}
