//! The queue of a name: adds and reads entries.

use std::collections::HashMap;

use serde_json::{Value, json};
use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::store::{rows, transaction};
use crate::backend::micros;
use crate::backend::stored::{TableRow as _, current_holder, parse_id, read_entry, read_lease, remaining};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, CurrentHolder, Enqueue, EntryState, Polled, Presence, Queue};

// $1 name, $2 JSON [[id, owner, client, is_renewed, units, permits, ttl, age, holder, label], …].
// Because the clock has milliseconds, a new entry is placed after all existing ones and after those
// before it in the batch.
#[rustfmt::skip]
const ENQUEUE: &str = concat!("
BEGIN IMMEDIATE;
INSERT INTO sqlock_lease (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)
VALUES ($1, '', '', '', 0, 0, 0, 0, '', '')
    ON CONFLICT (name) DO NOTHING;
INSERT INTO sqlock_entry (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at, acquired_at,
                          holder, label)
SELECT $1, c.value ->> 0, c.value ->> 1, c.value ->> 2, c.value ->> 3, c.value ->> 4, c.value ->> 5, 0, c.value ->> 6,
       CASE WHEN c.value ->> 7 > 0 THEN ", now!(), " - (c.value ->> 7)
            ELSE c.key + max(", now!(), ", coalesce((SELECT max(w.arrived_at) + 1 FROM sqlock_entry AS w
                                                      WHERE w.name = $1 AND w.token = 0), 0)) END,
       ", now!(), " + ", grant!(), ", 0, c.value ->> 8, c.value ->> 9
  FROM json_each($2) AS c
 WHERE NOT EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = $1 AND l.id = c.value ->> 0)
    ON CONFLICT (name, id) DO NOTHING;
SELECT ", lease_columns!(), " FROM sqlock_lease AS l WHERE l.name = $1;
COMMIT");

/// Adds waiting entries to a name. Existing entries stay. Returns the holder.
pub(super) async fn enqueue(conn: &mut SqliteConnection, entries: &[Enqueue]) -> Result<CurrentHolder, sqlx::Error> {
    let Some(first) = entries.first() else {
        return Ok(CurrentHolder::Unknown);
    };
    let batch = Value::from_iter(entries.iter().map(|Enqueue { claim, age }| {
        let (units, permits) = claim.mode.stored();
        json!([
            claim.id.to_string(),
            claim.owner.to_string(),
            claim.client.to_string(),
            i64::from(claim.is_renewed),
            units,
            permits,
            micros(claim.ttl),
            micros(*age),
            &*claim.holder,
            &*claim.label,
        ])
    }));
    let query = sqlx::query(ENQUEUE).bind(first.claim.name.as_str()).bind(batch.to_string());
    let rows = transaction(conn, query).await?;
    Ok(current_holder(&read_lease(rows.first().ok_or(sqlx::Error::RowNotFound)?)?))
}

// $1 name, $2 JSON [id, …]. Returns the holding entries, at least one row, then the waiting ones.
// One pass over the queue, up to the last requested entry, counts the waiters ahead.
#[rustfmt::skip]
const POLL: &str = concat!("
SELECT ", lease_columns!(), ", coalesce(e.id, '') AS entry_id, e.token AS entry_token, 0 AS ahead,
       ", entry_until!("e"), " - ", now!(), " AS entry_remaining
  FROM sqlock_lease AS l
       LEFT JOIN sqlock_entry AS e ON e.name = $1 AND e.token > 0 AND e.id IN (SELECT x.value FROM json_each($2) AS x)
 WHERE l.name = $1
 UNION ALL
SELECT ", lease_columns!(), ", q.id AS entry_id, 0 AS entry_token, q.ahead, q.until - ", now!(), " AS entry_remaining
  FROM sqlock_lease AS l
       JOIN (SELECT w.id, ", entry_until!("w"), " AS until,
                    count(*) FILTER (WHERE ", entry_until!("w"), " > ", now!(), ")
                        OVER (ORDER BY w.arrived_at, w.id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS ahead
               FROM sqlock_entry AS w
              WHERE w.name = $1 AND w.token = 0
                AND w.arrived_at <= (SELECT max(o.arrived_at) FROM json_each($2) AS x CROSS JOIN sqlock_entry AS o
                                         ON o.name = $1 AND o.id = x.value AND o.token = 0)) AS q
 WHERE l.name = $1 AND q.id IN (SELECT x.value FROM json_each($2) AS x)");

/// Reads the row of a name and the state of some acquisitions.
pub(super) async fn poll(
    conn: &mut SqliteConnection,
    name: &LockName,
    ids: &[AcquisitionId],
) -> Result<Option<Polled>, sqlx::Error> {
    let requested = Value::from_iter(ids.iter().map(AcquisitionId::to_string));
    let rows = rows(conn, sqlx::query(POLL).bind(name.as_str()).bind(requested.to_string())).await?;
    let Some(first) = rows.first() else {
        return Ok(None);
    };
    let row = read_lease(first)?;
    let entry = |row: &SqliteRow| -> Result<_, sqlx::Error> {
        let Some(id) = parse_id::<AcquisitionId>(&row.text("entry_id")?)? else {
            return Ok(None);
        };
        let remaining = remaining(row.number("entry_remaining")?);
        let state = EntryState::from_token(row.number("entry_token")?);
        Ok(Some((id, ((state, remaining), u32::try_from(row.number("ahead")?).unwrap_or(u32::MAX)))))
    };
    let entries: HashMap<AcquisitionId, _> =
        rows.iter().filter_map(|row| entry(row).transpose()).collect::<Result<_, _>>()?;
    let presence = |id: &AcquisitionId| {
        let (entry, ahead) = entries.get(id).map_or((None, 0), |(entry, ahead)| (Some(*entry), *ahead));
        Presence::from_rows(*id, &row, entry, ahead)
    };
    let presences = ids.iter().map(presence).collect();
    Ok(Some(Polled { row, presences }))
}

/// Selects the row of a name with the entries `$entry`.
#[rustfmt::skip]
macro_rules! with_entry {
    ($join:literal, $entry:literal) => {
        concat!("
SELECT ", lease_columns!(), ", coalesce(e.id, '') AS entry_id, e.client AS entry_client, e.owner AS entry_owner, e.is_renewed,
       e.units, e.permits, e.token AS entry_token, e.ttl, e.arrived_at, ", entry_until!("e"), " - ", now!(), " AS entry_remaining
  FROM sqlock_lease AS l ", $join, " ", $entry, "
 WHERE l.name = $1")
    };
}

// $1 name, $2 limit. Returns the holding entries, at least one row, then the waiting ones. With a
// bare `LIMIT $2`, SQLite would plan the statement again for every bound value, at six times the
// cost of running it.
#[rustfmt::skip]
const READ: &str = concat!(
with_entry!("LEFT JOIN", "sqlock_entry AS e ON e.name = $1 AND e.token > 0"), "
 UNION ALL",
with_entry!("JOIN", "(SELECT * FROM sqlock_entry WHERE name = $1 AND token = 0 ORDER BY arrived_at, id LIMIT $2 + 0) AS e"));

/// Reads a name and its entries: all holding ones, and the first `limit` waiting ones.
pub(super) async fn read(
    conn: &mut SqliteConnection,
    name: &LockName,
    limit: u32,
) -> Result<Option<Queue>, sqlx::Error> {
    let rows = rows(conn, sqlx::query(READ).bind(name.as_str()).bind(i64::from(limit) + 1)).await?;
    let Some(first) = rows.first() else {
        return Ok(None);
    };
    let row = read_lease(first)?;
    let mut entries = rows.iter().filter_map(|row| read_entry(row).transpose()).collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(|entry| (entry.state == EntryState::Waiting, entry.arrived, entry.id));
    Ok(Some(Queue::limited(row, entries, limit)))
}
