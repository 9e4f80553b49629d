//! The queue of a name: waiting entries and transitions.

use sqlx::postgres::PgRow;

use super::acquire::{bind_claim, insert_share, token};
use super::store::{Connection, grant, lease_columns, notice, notify, now};
use crate::backend::micros;
use crate::backend::stored::{TableRow as _, holder_now, holder_text, parse_id, read_entry, read_lease, remaining};
use crate::name::LockName;
use crate::protocol::{
    Enqueue, EntryState, Granted, Grantee, HolderChange, HolderNow, LeaseId, LeaseRow, Mode, Polled, Presence, Queue,
    Response, Transition,
};

// $1 name; arrays: $2 id, $3 owner, $4 client, $5 is_kept, $6 units, $7 permits, $8 ttl, $9 age,
// $10 holder, $11 label. The mark and the entries become visible together, so a release sees both
// or neither. The result is the row after it was locked. The first condition keeps a repeated
// request from locking the row.
#[rustfmt::skip]
const ENQUEUE: &str = concat!("
WITH new AS MATERIALIZED (
    SELECT n.*
      FROM unnest($2::text[], $3::text[], $4::text[], $5::boolean[], $6::bigint[], $7::bigint[], $8::bigint[],
                  $9::bigint[], $10::text[], $11::text[])
                  AS n (id, owner, client, is_kept, units, permits, ttl, age, holder, label)
     WHERE NOT EXISTS (SELECT FROM sqlock_entry AS e WHERE e.name = $1 AND e.id = n.id)),
marked AS (
    INSERT INTO sqlock_lease AS l (name, id, owner, client, token, ttl, expires_at, waiting, acquired_at, holder, label)
    SELECT $1, '', '', '', 0, 0, 0, ", now!(), ", 0, '', ''
     WHERE EXISTS (SELECT FROM new WHERE new.id <> ALL (SELECT id FROM sqlock_lease WHERE name = $1))
        ON CONFLICT (name) DO UPDATE SET waiting = greatest(l.waiting + 1, ", now!(), ")
     WHERE EXISTS (SELECT FROM new WHERE new.id <> l.id)
    RETURNING l.*),
entry AS (
    INSERT INTO sqlock_entry (name, id, owner, client, is_kept, units, permits, token, ttl, arrived_at, expires_at,
                              acquired_at, holder, label)
    SELECT marked.name, n.id, n.owner, n.client, n.is_kept, n.units, n.permits, 0, n.ttl, ", now!(), " - n.age,
           ", now!(), " + ", grant!(), ", 0, n.holder, n.label
      FROM marked JOIN new AS n ON n.id <> marked.id
        ON CONFLICT (name, id) DO NOTHING)
SELECT ", lease_columns!(), "
  FROM (SELECT * FROM marked
         UNION ALL
        SELECT * FROM sqlock_lease WHERE name = $1 AND NOT EXISTS (SELECT FROM marked)) AS l
  LEFT JOIN sqlock_client AS c ON c.id = l.client");

/// Adds waiting entries to a name. Existing entries stay. Returns the holder.
pub(super) async fn enqueue(conn: &mut Connection<'_>, entries: &[Enqueue]) -> Result<HolderNow, sqlx::Error> {
    let Some(Enqueue { claim: first, .. }) = entries.first() else {
        return Ok(HolderNow::Unknown);
    };
    let claims = || entries.iter().map(|entry| &entry.claim);
    let query = sqlx::query(ENQUEUE)
        .bind(first.name.as_str())
        .bind(claims().map(|claim| claim.id.to_string()).collect::<Vec<_>>())
        .bind(claims().map(|claim| claim.owner.to_string()).collect::<Vec<_>>())
        .bind(claims().map(|claim| claim.client.to_string()).collect::<Vec<_>>())
        .bind(claims().map(|claim| claim.is_kept).collect::<Vec<_>>())
        .bind(claims().map(|claim| claim.mode.stored().0).collect::<Vec<_>>())
        .bind(claims().map(|claim| claim.mode.stored().1).collect::<Vec<_>>())
        .bind(claims().map(|claim| micros(claim.ttl)).collect::<Vec<_>>())
        .bind(entries.iter().map(|entry| micros(entry.age)).collect::<Vec<_>>())
        .bind(claims().map(|claim| &*claim.holder).collect::<Vec<_>>())
        .bind(claims().map(|claim| &*claim.label).collect::<Vec<_>>());
    let row = conn.row(query).await?;
    row.map_or(Ok(HolderNow::Unknown), |row| Ok(holder_now(&read_lease(&row)?)))
}

/// Reads rows of names and the state of acquisitions. `$from` names the rows `l`, and the requested
/// ids `q.id` in the order of `q.place`.
macro_rules! poll {
    ($from:literal) => {
        concat!(
            "
SELECT ",
            lease_columns!(),
            ", q.place, coalesce(q.id, '') AS requested, coalesce(e.token, -1) AS entry_token,
       coalesce(greatest(e.expires_at, k.beat_at + CASE e.token WHEN 0 THEN ",
            grant!(),
            " ELSE e.ttl END)
                - ",
            now!(),
            ", 0) AS entry_remaining,
       CASE e.token WHEN 0 THEN (
            SELECT count(*)
              FROM sqlock_entry AS a LEFT JOIN sqlock_client AS b ON b.id = a.client
             WHERE a.name = e.name AND a.token = 0 AND (a.arrived_at, a.id) < (e.arrived_at, e.id)
               AND greatest(a.expires_at, b.beat_at + ",
            grant!(),
            ") > ",
            now!(),
            ")
            ELSE 0 END AS ahead
  FROM ",
            $from,
            "
  LEFT JOIN sqlock_client AS c ON c.id = l.client
  LEFT JOIN sqlock_client AS k ON k.id = e.client
 ORDER BY q.place"
        )
    };
}

// $1 name, $2 id
const POLL: &str = poll!(
    "(SELECT * FROM sqlock_lease WHERE name = $1) AS l
  LEFT JOIN (SELECT $2::text AS id, 1::bigint AS place) AS q ON true
  LEFT JOIN sqlock_entry AS e ON e.name = l.name AND e.id = q.id"
);

// $1 name, $2 ids. A statement with an array is planned each time, because its plan depends on the
// length.
const POLL_IDS: &str = poll!(
    "(SELECT * FROM sqlock_lease WHERE name = $1) AS l
  LEFT JOIN unnest($2::text[]) WITH ORDINALITY AS q (id, place) ON true
  LEFT JOIN sqlock_entry AS e ON e.name = l.name AND e.id = q.id"
);

// $1 names, $2 ids. LIMIT keeps the plan from joining whole tables.
const POLL_NAMES: &str = poll!(
    "unnest($1::text[], $2::text[]) WITH ORDINALITY AS q (name, id, place)
 CROSS JOIN LATERAL (SELECT * FROM sqlock_lease WHERE name = q.name LIMIT 1) AS l
  LEFT JOIN LATERAL (SELECT * FROM sqlock_entry WHERE name = q.name AND id = q.id LIMIT 1) AS e ON true"
);

/// Reads the row of a name and the state of some acquisitions.
pub(super) async fn poll(
    conn: &mut Connection<'_>,
    name: &LockName,
    ids: &[LeaseId],
) -> Result<Option<Polled>, sqlx::Error> {
    let query = match ids {
        [id] => sqlx::query(POLL).bind(name.as_str()).bind(id.to_string()),
        _ => {
            let ids: Vec<String> = ids.iter().map(LeaseId::to_string).collect();
            sqlx::query(POLL_IDS).bind(name.as_str()).bind(ids)
        }
    };
    let rows = conn.rows(query).await?;
    let Some(first) = rows.first() else {
        return Ok(None);
    };
    let lease = read_lease(first)?;
    let mut presences = Vec::with_capacity(rows.len());
    for row in &rows {
        if let Some(id) = parse_id::<LeaseId>(&row.text("requested")?)? {
            presences.push(read_presence(row, id, &lease)?);
        }
    }
    Ok(Some(Polled { row: lease, presences }))
}

/// Reads rows of names, each with the state of one acquisition.
pub(super) async fn poll_many(
    conn: &mut Connection<'_>,
    polls: &[(LockName, LeaseId)],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let query = sqlx::query(POLL_NAMES)
        .bind(polls.iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>())
        .bind(polls.iter().map(|(_, id)| id.to_string()).collect::<Vec<_>>());
    let mut answers = vec![Some(Response::Polled(None)); polls.len()];
    for row in conn.rows(query).await? {
        let place = usize::try_from(row.number("place")?).unwrap_or_default();
        let Some(((_, id), answer)) = polls.iter().zip(&mut answers).nth(place.wrapping_sub(1)) else {
            continue;
        };
        let lease = read_lease(&row)?;
        let presences = vec![read_presence(&row, *id, &lease)?];
        *answer = Some(Response::Polled(Some(Polled { row: lease, presences })));
    }
    Ok(answers)
}

/// Reads the state of an acquisition from a row of a poll.
fn read_presence(row: &PgRow, id: LeaseId, lease: &LeaseRow) -> Result<Presence, sqlx::Error> {
    let state = match row.number("entry_token")? {
        ..0 => None,
        0 => Some(EntryState::Waiting),
        token => Some(EntryState::Holding(token)),
    };
    let left = remaining(row.number("entry_remaining")?);
    let ahead = u32::try_from(row.number("ahead")?).unwrap_or(u32::MAX);
    Ok(Presence::of(id, lease, state.map(|state| (state, left)), ahead))
}

// $1 name, $2 limit
#[rustfmt::skip]
const READ: &str = concat!("
SELECT ", lease_columns!(), ", coalesce(e.id, '') AS entry_id, e.client AS entry_client, e.owner AS entry_owner,
       e.is_kept::int::bigint AS is_kept, e.units, e.permits, e.token AS entry_token, e.ttl, e.arrived_at,
       greatest(e.expires_at, k.beat_at + CASE e.token WHEN 0 THEN ", grant!(), " ELSE e.ttl END)
       - ", now!(), " AS entry_remaining
  FROM sqlock_lease AS l
  LEFT JOIN sqlock_client AS c ON c.id = l.client
  LEFT JOIN ((SELECT * FROM sqlock_entry WHERE name = $1 AND token > 0)
              UNION ALL
             (SELECT * FROM sqlock_entry WHERE name = $1 AND token = 0 ORDER BY arrived_at, id LIMIT $2)) AS e ON true
  LEFT JOIN sqlock_client AS k ON k.id = e.client
 WHERE l.name = $1
 ORDER BY e.token = 0, e.arrived_at, e.id");

/// Reads a name and its entries: all holding ones, and the first `limit` waiting ones.
pub(super) async fn read(conn: &mut Connection<'_>, name: &LockName, limit: u32) -> Result<Option<Queue>, sqlx::Error> {
    let rows = conn.rows(sqlx::query(READ).bind(name.as_str()).bind(i64::from(limit) + 1)).await?;
    let Some(first) = rows.first() else {
        return Ok(None);
    };
    let row = read_lease(first)?;
    let mut entries = rows.iter().filter_map(|row| read_entry(row).transpose()).collect::<Result<Vec<_>, _>>()?;
    let holding = entries.iter().filter(|entry| entry.state != EntryState::Waiting).count();
    let is_cut_off = entries.len() - holding > limit as usize;
    entries.truncate(holding + limit as usize);
    Ok(Some(Queue { row, entries, is_cut_off }))
}

// ---- transition

/// Changes the holder of a name. $1 name; $2 id, $3 token and $4 waiting of the row that was read;
/// $5 is_last, $6 given_up, $7 expired ids, $8 ids of grantees, $9 their ttls.
///
/// - `$stays`: which unexpired holding entries prevent it.
/// - `$passes`: whether it passes fences if a share stays.
/// - `$unless`: a further condition on the row `l`.
/// - `$kept`: which expired entries are deleted.
/// - `$change`: the writes if all conditions hold, that is, if `all_locked` has a row.
///
/// Rows are read from the snapshot, then locked, then compared: the row must be the version of the
/// snapshot, and every expired entry, grantee and losing client must be locked and still meet its
/// condition.
macro_rules! transition {
    ($stays:literal, $passes:literal, $unless:expr, $kept:literal, $change:expr) => {
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
                        WHERE s.name = l.name AND s.token > 0 AND s.id <> ALL ($7) AND ", $stays, ")", $unless, "),
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
     WHERE e.name = x.name AND e.id = x.id AND ", $kept, "),", $change)
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
       SET id = g.id, owner = g.owner, client = CASE WHEN g.is_kept THEN g.client ELSE '' END, token = a.token,
           ttl = g.lasts, expires_at = ", now!(), " + g.lasts, acquired_at = ", now!(), ", holder = g.holder,
           label = g.label, lost = a.lost, waiting = a.waiting
      FROM all_locked AS a, grantee AS g
     WHERE l.name = a.name
    RETURNING l.id, l.token, ", notify!("g.client", "''"), " AS notified)
SELECT id, token FROM changed"));

#[rustfmt::skip]
const GRANT_SHARES: &str = transition!("s.units = 0", "true", "", "true", concat!("
granted AS (
    UPDATE sqlock_entry AS e
       SET client = CASE WHEN e.is_kept THEN e.client ELSE '' END, token = a.token + g.place - 1, ttl = g.lasts,
           expires_at = ", now!(), " + g.lasts, acquired_at = ", now!(), "
      FROM all_locked AS a, grantee AS g
     WHERE e.name = g.name AND e.id = g.id
    RETURNING e.id, e.token, ", notify!("g.client", "''"), " AS notified),
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
    let (sql, grantees): (_, &[Grantee]) = match change {
        HolderChange::None => (KEEP_HOLDER, &[]),
        HolderChange::Free => (FREE, &[]),
        HolderChange::Exclusive(grantee) => (GRANT_ALONE, std::slice::from_ref(grantee)),
        HolderChange::Shared(grantees) => (GRANT_SHARES, grantees),
        HolderChange::Claim(claim) if claim.mode == Mode::Exclusive => (GRANT_CLAIM, &[]),
        HolderChange::Claim(_) => (GRANT_SHARED_CLAIM, &[]),
    };
    let query = sqlx::query(sql)
        .bind(name.as_str())
        .bind(holder_text(seen.holder))
        .bind(seen.token)
        .bind(seen.waiting)
        .bind(*is_last)
        .bind(given_up.is_some())
        .bind(expired.iter().map(LeaseId::to_string).collect::<Vec<_>>())
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
