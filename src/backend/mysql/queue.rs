//! The queue of a name: adds and reads entries.

use foldhash::HashMap;
use serde_json::{Value, json};
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _};

use super::acquire::CREATE_FREE;
use super::script::{filled, id_literal, list, name_literal};
use super::store::{MySqlQuery, is_timeout};
use crate::backend::micros;
use crate::backend::stored::{TableRow as _, current_holder, read_entry, read_lease, remaining};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, CurrentHolder, Enqueue, EntryState, LeaseRow, Polled, Presence, Queue, Response};

// ---- enqueue

// Skips an entry that exists and an acquisition that holds the name already. Bind order: name, id,
// owner, client, is_renewed, units, permits, ttl, age, holder, label, name, id, name, id.
#[rustfmt::skip]
const ENQUEUE: &str = concat!("
INSERT IGNORE INTO sqlock_entry (", entry_columns!(), ")
SELECT ?, ?, ?, ?, ?, ?, ?, 0, ?, ", now!(), " - ?, ", now!(), " + ", grant!(), ", 0, ?, ?
  FROM DUAL
 WHERE NOT EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = ? AND l.id = ?)
   AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = ? AND e.id = ?)");

// The same for several entries, with a temporary table of the server. JSON: id, owner, client,
// is_renewed, units, permits, ttl, age, holder, label. The texts name their character set, since
// MariaDB would use the database's. Bind order: name, JSON, name, name.
#[rustfmt::skip]
const ENQUEUE_MANY: &str = concat!("
INSERT IGNORE INTO sqlock_entry (", entry_columns!(), ")
SELECT ?, t.id, t.owner, t.client, t.is_renewed, t.units, t.permits, 0, t.ttl, ", now!(), " - t.age,
       ", now!(), " + ", grant!(), ", 0, t.holder, t.label
  FROM JSON_TABLE(?, '$[*]' COLUMNS (
       id      VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$[0]',
       owner   VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$[1]',
       client  VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$[2]',
       is_renewed BIGINT PATH '$[3]', units BIGINT PATH '$[4]', permits BIGINT PATH '$[5]', ttl BIGINT PATH '$[6]', age BIGINT PATH '$[7]',
       holder  VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[8]',
       label   VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[9]')) AS t
 WHERE NOT EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = ? AND l.id = t.id)
   AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = ? AND e.id = t.id)");

// A release that has not seen the entries has locked the row, so this statement waits for it and
// reads the result. A release that locks the row later sees the entries. Bind order: name.
#[rustfmt::skip]
const READ_ROW_AFTER_INSERT: &str = concat!("SELECT ", lease_columns!("l"), " FROM sqlock_lease AS l WHERE l.name = ? LOCK IN SHARE MODE");

pub(super) async fn enqueue(conn: &mut MySqlConnection, entries: &[Enqueue]) -> Result<CurrentHolder, sqlx::Error> {
    let Some(first) = entries.first() else {
        return Ok(CurrentHolder::Unknown);
    };
    let name = first.claim.name.as_str().as_bytes();
    match entries {
        [entry] => enqueue_one(entry),
        _ => enqueue_many(name, entries),
    }
    .execute(&mut *conn)
    .await?;
    let row = match sqlx::query(READ_ROW_AFTER_INSERT).bind(name).fetch_optional(&mut *conn).await {
        Err(error) if is_timeout(&error) => return Ok(CurrentHolder::Unknown),
        row => row?,
    };
    if let Some(row) = row {
        return Ok(current_holder(&read_lease(&row)?));
    }
    let created = sqlx::query(CREATE_FREE).bind(name).execute(&mut *conn).await?;
    if created.rows_affected() > 0 {
        return Ok(CurrentHolder::Vacant);
    }
    Ok(read_row(conn, &first.claim.name).await?.map_or(CurrentHolder::Vacant, |row| current_holder(&row)))
}

fn enqueue_one(Enqueue { claim, age }: &Enqueue) -> MySqlQuery<'_> {
    let (name, id) = (claim.name.as_str().as_bytes(), claim.id.to_string());
    let (units, permits) = claim.mode.stored();
    let query = sqlx::query(ENQUEUE).bind(name).bind(id.clone()).bind(claim.owner.to_string());
    let query = query.bind(claim.client.to_string()).bind(claim.is_renewed).bind(units).bind(permits);
    let query = query.bind(micros(claim.ttl)).bind(micros(*age)).bind(&*claim.holder).bind(&*claim.label);
    query.bind(name).bind(id.clone()).bind(name).bind(id)
}

fn enqueue_many<'q>(name: &'q [u8], entries: &[Enqueue]) -> MySqlQuery<'q> {
    let lines = entries.iter().map(|Enqueue { claim, age }| {
        let (units, permits) = claim.mode.stored();
        let (id, owner, client) = (claim.id.to_string(), claim.owner.to_string(), claim.client.to_string());
        let is_renewed = i64::from(claim.is_renewed);
        let (ttl, age) = (micros(claim.ttl), micros(*age));
        json!([id, owner, client, is_renewed, units, permits, ttl, age, &*claim.holder, &*claim.label])
    });
    let lines = Value::from_iter(lines).to_string();
    sqlx::query(ENQUEUE_MANY).bind(name).bind(lines).bind(name).bind(name)
}

// ---- poll and read

// Bind order: name.
#[rustfmt::skip]
const READ_ROW: &str = concat!("SELECT ", lease_columns!("l"), " FROM sqlock_lease AS l WHERE l.name = ?");

/// Reads the row of a name without a lock.
pub(super) async fn read_row(conn: &mut MySqlConnection, name: &LockName) -> Result<Option<LeaseRow>, sqlx::Error> {
    let row = sqlx::query(READ_ROW).bind(name.as_str().as_bytes()).fetch_optional(conn).await?;
    row.as_ref().map(read_lease).transpose()
}

/// Returns one row for each entry of a name, or a single row without entries. `$ids` and `$names`
/// are conditions of the entry and of the row.
#[rustfmt::skip]
macro_rules! poll {
    ($ids:literal, $names:literal) => {
        concat!("
SELECT l.name, ", lease_columns!("l"), ", COALESCE(e.id, '') AS entry_id, COALESCE(e.token, 0) AS entry_token,
       COALESCE(", entry_until!("e"), " - ", now!(), ", 0) AS entry_remaining,
       IF(e.token = 0, (SELECT COUNT(*) FROM sqlock_entry AS w FORCE INDEX (sqlock_entry_in_order)
                         WHERE w.name = e.name AND w.token = 0
                           AND (w.arrived_at < e.arrived_at OR w.arrived_at = e.arrived_at AND w.id < e.id)
                           AND ", entry_until!("w"), " > ", now!(), "), 0) AS ahead
  FROM sqlock_lease AS l FORCE INDEX (PRIMARY)
       LEFT JOIN sqlock_entry AS e FORCE INDEX (PRIMARY) ON e.name = l.name AND e.id ", $ids, "
 WHERE l.name ", $names)
    };
}

// Bind order: id, name.
const POLL: &str = poll!("= ?", "= ?");

// Order of literals: ids, names.
const POLL_MANY: &str = poll!("IN (?)", "IN (?)");

/// Reads the row of a name and the state of some acquisitions.
pub(super) async fn poll(
    conn: &mut MySqlConnection,
    name: &LockName,
    ids: &[AcquisitionId],
) -> Result<Option<Polled>, sqlx::Error> {
    let rows = match ids {
        [id] => sqlx::query(POLL).bind(id.to_string()).bind(name.as_str().as_bytes()).fetch_all(conn).await?,
        _ => poll_rows(conn, ids, &name_literal(name)).await?,
    };
    read_poll(&rows.iter().collect::<Vec<_>>(), ids)
}

/// Reads the rows of names with the entries of some acquisitions.
async fn poll_rows(
    conn: &mut MySqlConnection,
    ids: &[AcquisitionId],
    names: &str,
) -> Result<Vec<MySqlRow>, sqlx::Error> {
    // No entry has the empty id.
    let ids = list(ids, |id| id_literal(id));
    let text = filled(POLL_MANY, &[if ids.is_empty() { "''" } else { &ids }, names]);
    sqlx::raw_sql(AssertSqlSafe(text)).fetch_all(conn).await
}

/// Reads rows of names, each with the state of one acquisition.
pub(super) async fn poll_many(
    conn: &mut MySqlConnection,
    polls: &[(LockName, AcquisitionId)],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let ids: Vec<_> = polls.iter().map(|(_, id)| *id).collect();
    let rows = poll_rows(conn, &ids, &list(polls, |(name, _)| name_literal(name))).await?;
    let mut by_name: HashMap<Vec<u8>, Vec<&MySqlRow>> = HashMap::default();
    for row in &rows {
        by_name.entry(row.try_get("name")?).or_default().push(row);
    }
    let answer = |(name, id): &(LockName, AcquisitionId)| {
        let rows = by_name.get(name.as_str().as_bytes()).map_or(&[][..], Vec::as_slice);
        read_poll(rows, &[*id]).map(|polled| Some(Response::Polled(polled)))
    };
    polls.iter().map(answer).collect()
}

/// Reads the rows of one name that a poll returned.
fn read_poll(rows: &[&MySqlRow], ids: &[AcquisitionId]) -> Result<Option<Polled>, sqlx::Error> {
    let Some(first) = rows.first() else {
        return Ok(None);
    };
    let row = read_lease(*first)?;
    let mut presences: Vec<Presence> = ids.iter().map(|id| Presence::from_rows(*id, &row, None, 0)).collect();
    for found in rows {
        let id = found.text("entry_id")?;
        let state = EntryState::from_token(found.number("entry_token")?);
        let entry = Some((state, remaining(found.number("entry_remaining")?)));
        let ahead = u32::try_from(found.number("ahead")?).unwrap_or(u32::MAX);
        for (presence, wanted) in presences.iter_mut().zip(ids).filter(|(_, wanted)| wanted.to_string() == id) {
            *presence = Presence::from_rows(*wanted, &row, entry, ahead);
        }
    }
    Ok(Some(Polled { row, presences }))
}

// Bind order: name, name, limit, name.
#[rustfmt::skip]
const READ: &str = concat!("
SELECT ", lease_columns!("l"), ", COALESCE(e.id, '') AS entry_id, COALESCE(e.client, '') AS entry_client,
       COALESCE(e.owner, '') AS entry_owner, CAST(COALESCE(e.is_renewed, 0) AS SIGNED) AS is_renewed, COALESCE(e.units, 0) AS units,
       COALESCE(e.permits, 0) AS permits, COALESCE(e.token, 0) AS entry_token, COALESCE(e.ttl, 0) AS ttl,
       COALESCE(e.arrived_at, 0) AS arrived_at, COALESCE(", entry_until!("e"), " - ", now!(), ", 0) AS entry_remaining
  FROM sqlock_lease AS l LEFT JOIN (
       (SELECT * FROM sqlock_entry FORCE INDEX (sqlock_entry_in_order) WHERE name = ? AND token > 0)
        UNION ALL
       (SELECT * FROM sqlock_entry FORCE INDEX (sqlock_entry_in_order) WHERE name = ? AND token = 0
         ORDER BY arrived_at, id LIMIT ?)) AS e ON e.name = l.name
 WHERE l.name = ?
 ORDER BY e.token = 0, e.arrived_at, e.id");

pub(super) async fn read(
    conn: &mut MySqlConnection,
    name: &LockName,
    limit: u32,
) -> Result<Option<Queue>, sqlx::Error> {
    let bytes = name.as_str().as_bytes();
    let query = sqlx::query(READ).bind(bytes).bind(bytes).bind(u64::from(limit) + 1).bind(bytes);
    let rows = query.fetch_all(conn).await?;
    let Some(first) = rows.first() else {
        return Ok(None);
    };
    let row = read_lease(first)?;
    let mut entries = Vec::with_capacity(rows.len());
    for row in &rows {
        entries.extend(read_entry(row)?);
    }
    Ok(Some(Queue::limited(row, entries, limit)))
}
