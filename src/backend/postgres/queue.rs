//! The queue of a name: adds and reads entries.

use sqlx::postgres::PgRow;

use super::store::{Connection, commit_lazily, grant, lease_columns, now};
use crate::backend::micros;
use crate::backend::stored::{TableRow as _, current_holder, parse_id, read_entry, read_lease, remaining};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, CurrentHolder, Enqueue, EntryState, LeaseRow, Polled, Presence, Queue, Response};

// $1 name; arrays: $2 id, $3 owner, $4 client, $5 is_renewed, $6 units, $7 permits, $8 ttl, $9 age,
// $10 holder, $11 label; $12 whether the statement need not wait for the disk. If a crash of the
// server undoes it, the client finds its entry gone and adds it again. The mark and the entries
// become visible together, so a release sees both or neither. The result is the row after it was
// locked. The first condition keeps a repeated request from locking the row.
#[rustfmt::skip]
const ENQUEUE: &str = concat!("
WITH new AS MATERIALIZED (
    SELECT n.*
      FROM unnest($2::text[], $3::text[], $4::text[], $5::boolean[], $6::bigint[], $7::bigint[], $8::bigint[],
                  $9::bigint[], $10::text[], $11::text[])
                  AS n (id, owner, client, is_renewed, units, permits, ttl, age, holder, label)
     WHERE NOT EXISTS (SELECT FROM sqlock_entry AS e WHERE e.name = $1 AND e.id = n.id)),
marked AS (
    INSERT INTO sqlock_lease AS l (name, id, owner, client, token, ttl, expires_at, waiting, acquired_at, holder, label)
    SELECT $1, '', '', '', 0, 0, 0, ", now!(), ", 0, '', ''
     WHERE EXISTS (SELECT FROM new WHERE new.id <> ALL (SELECT id FROM sqlock_lease WHERE name = $1))
        ON CONFLICT (name) DO UPDATE SET waiting = greatest(l.waiting + 1, ", now!(), ")
     WHERE EXISTS (SELECT FROM new WHERE new.id <> l.id)
    RETURNING l.*),
entry AS (
    INSERT INTO sqlock_entry (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at,
                              acquired_at, holder, label)
    SELECT marked.name, n.id, n.owner, n.client, n.is_renewed, n.units, n.permits, 0, n.ttl, ", now!(), " - n.age,
           ", now!(), " + ", grant!(), ", 0, n.holder, n.label
      FROM marked JOIN new AS n ON n.id <> marked.id
        ON CONFLICT (name, id) DO NOTHING)
SELECT ", lease_columns!(), "
  FROM (SELECT * FROM marked
         UNION ALL
        SELECT * FROM sqlock_lease WHERE name = $1 AND NOT EXISTS (SELECT FROM marked)) AS l
  LEFT JOIN sqlock_client AS c ON c.id = l.client
 WHERE ", commit_lazily!("$12"));

/// Adds waiting entries to a name. Existing entries stay. Returns the holder.
pub(super) async fn enqueue(conn: &mut Connection<'_>, entries: &[Enqueue]) -> Result<CurrentHolder, sqlx::Error> {
    let Some(Enqueue { claim: first, .. }) = entries.first() else {
        return Ok(CurrentHolder::Unknown);
    };
    let claims = || entries.iter().map(|entry| &entry.claim);
    let query = sqlx::query(ENQUEUE)
        .bind(first.name.as_str())
        .bind(claims().map(|claim| claim.id.to_string()).collect::<Vec<_>>())
        .bind(claims().map(|claim| claim.owner.to_string()).collect::<Vec<_>>())
        .bind(claims().map(|claim| claim.client.to_string()).collect::<Vec<_>>())
        .bind(claims().map(|claim| claim.is_renewed).collect::<Vec<_>>())
        .bind(claims().map(|claim| claim.mode.stored().0).collect::<Vec<_>>())
        .bind(claims().map(|claim| claim.mode.stored().1).collect::<Vec<_>>())
        .bind(claims().map(|claim| micros(claim.ttl)).collect::<Vec<_>>())
        .bind(entries.iter().map(|entry| micros(entry.age)).collect::<Vec<_>>())
        .bind(claims().map(|claim| &*claim.holder).collect::<Vec<_>>())
        .bind(claims().map(|claim| &*claim.label).collect::<Vec<_>>())
        .bind(conn.settings.may_commit_lazily());
    let row = conn.row(query).await?;
    row.map_or(Ok(CurrentHolder::Unknown), |row| Ok(current_holder(&read_lease(&row)?)))
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
    ids: &[AcquisitionId],
) -> Result<Option<Polled>, sqlx::Error> {
    let query = match ids {
        [id] => sqlx::query(POLL).bind(name.as_str()).bind(id.to_string()),
        _ => {
            let ids: Vec<String> = ids.iter().map(AcquisitionId::to_string).collect();
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
        if let Some(id) = parse_id::<AcquisitionId>(&row.text("requested")?)? {
            presences.push(read_presence(row, id, &lease)?);
        }
    }
    Ok(Some(Polled { row: lease, presences }))
}

/// Reads rows of names, each with the state of one acquisition.
pub(super) async fn poll_many(
    conn: &mut Connection<'_>,
    polls: &[(LockName, AcquisitionId)],
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
fn read_presence(row: &PgRow, id: AcquisitionId, lease: &LeaseRow) -> Result<Presence, sqlx::Error> {
    let token = row.number("entry_token")?;
    let state = (token >= 0).then(|| EntryState::from_token(token));
    let left = remaining(row.number("entry_remaining")?);
    let ahead = u32::try_from(row.number("ahead")?).unwrap_or(u32::MAX);
    Ok(Presence::from_rows(id, lease, state.map(|state| (state, left)), ahead))
}

// $1 name, $2 limit
#[rustfmt::skip]
const READ: &str = concat!("
SELECT ", lease_columns!(), ", coalesce(e.id, '') AS entry_id, e.client AS entry_client, e.owner AS entry_owner,
       e.is_renewed::int::bigint AS is_renewed, e.units, e.permits, e.token AS entry_token, e.ttl, e.arrived_at,
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
    let entries = rows.iter().filter_map(|row| read_entry(row).transpose()).collect::<Result<Vec<_>, _>>()?;
    Ok(Some(Queue::limited(row, entries, limit)))
}
