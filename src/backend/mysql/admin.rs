//! Statements for operators and the sweeper.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row as _};

use super::note;
use super::script::{Script, Sending, text_literal};
use crate::backend::admin::{
    ClientRange, ListedHolder, ListedWaiter, Names, SweepRange, Swept, end_of_prefix, skip_unreadable,
};
use crate::backend::store::ROW_RETENTION;
use crate::backend::stored::{TableRow as _, read_holder, read_waiter};
use crate::backend::{hex, micros};
use crate::name::LockName;

/// The latest heartbeat of the client that renews a row, or 0.
#[rustfmt::skip]
macro_rules! beat_at {
    ($row:literal) => {
        concat!("COALESCE((SELECT b.beat_at FROM sqlock_client AS b WHERE b.id = ", $row, ".client), 0)")
    };
}

/// Selects the holders of some names. Acquisitions of one owner that hold a name together have one
/// token and are one holder.
#[rustfmt::skip]
macro_rules! list {
    ($lease:literal, $entry:literal) => {
        concat!("
SELECT l.name, l.owner, l.token, l.holder, l.label, l.acquired_at, ", lease_until!("l"), " AS expires_at, ", beat_at!("l"), " AS beat_at,
       0 AS units, 0 AS permits, 1 AS acquisitions, ", now!(), " AS now, ", waiters!("l"), " AS waiters, ", note!("l"), " AS note
  FROM sqlock_lease AS l
 WHERE ", $lease, " AND l.id NOT IN ('', 'entries') AND ", lease_until!("l"), " > ", now!(), "
 UNION ALL
SELECT h.name, MAX(h.owner), h.token, h.holder, h.label, MIN(h.acquired_at), MAX(h.expires_at), MAX(h.beat_at), h.units, h.permits,
       CAST(SUM(h.owner <> '') AS SIGNED), ", now!(), ", ", waiters!("h"), ", ", note!("h"), "
  FROM (SELECT e.name, e.owner, e.token, e.holder, e.label, e.acquired_at, ", entry_until!("e"), " AS expires_at, ", beat_at!("e"), " AS beat_at, e.units, e.permits
          FROM sqlock_entry AS e
         WHERE ", $entry, " AND e.token > 0
         ORDER BY e.owner = '') AS h
 WHERE h.expires_at > ", now!(), "
 GROUP BY h.name, h.token
 ORDER BY 1, 3")
    };
}
#[rustfmt::skip]
macro_rules! waiters {
    ($row:literal) => {
        concat!("
       (SELECT COUNT(*) FROM sqlock_entry AS w WHERE w.name = ", $row, ".name AND w.token = 0 AND ", entry_until!("w"), " > ", now!(), ")")
    };
}
#[rustfmt::skip]
macro_rules! note {
    ($row:literal) => {
        concat!("
       (SELECT n.note FROM sqlock_note AS n WHERE n.name = ", $row, ".name AND n.token = ", $row, ".token)")
    };
}

// Bind order: the first name, the end of the names, twice.
const LIST: &str = list!("l.name >= ? AND l.name < ?", "e.name >= ? AND e.name < ?");

// Bind order: name, name.
const LIST_ONE: &str = list!("l.name = ?", "e.name = ?");

/// Greater than every name: UTF-8 never contains this byte.
const END_OF_NAMES: &[u8] = &[0xff];

pub(super) async fn list(conn: &mut MySqlConnection, names: &Names) -> Result<Vec<ListedHolder>, sqlx::Error> {
    let query = match names {
        Names::WithPrefix(prefix) => {
            let end = end_of_prefix(prefix).map_or_else(|| END_OF_NAMES.to_vec(), String::into_bytes);
            sqlx::query(LIST).bind(prefix.as_bytes()).bind(end.clone()).bind(prefix.as_bytes()).bind(end)
        }
        Names::One(name) => sqlx::query(LIST_ONE).bind(name.as_str().as_bytes()).bind(name.as_str().as_bytes()),
    };
    let rows = query.fetch_all(conn).await?;
    Ok(skip_unreadable(rows.iter().map(|row| read_holder(row, name_of(row)?))).collect())
}

/// Names are stored as the bytes of valid UTF-8.
pub(super) fn name_of(row: &MySqlRow) -> Result<String, sqlx::Error> {
    let bytes: Vec<u8> = row.try_get("name")?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

// Bind order: name.
#[rustfmt::skip]
const WAITERS: &str = concat!("
SELECT e.id, e.units, e.permits, e.holder, e.label, e.arrived_at FROM sqlock_entry AS e
 WHERE e.name = ? AND e.token = 0 AND ", entry_until!("e"), " > ", now!(), "
 ORDER BY e.arrived_at, e.id");

pub(super) async fn waiters(conn: &mut MySqlConnection, name: &LockName) -> Result<Vec<ListedWaiter>, sqlx::Error> {
    let rows = sqlx::query(WAITERS).bind(name.as_str().as_bytes()).fetch_all(conn).await?;
    Ok(skip_unreadable(rows.iter().map(read_waiter)).collect())
}

// ---- sweep
//
// The rows to purge are found without locks, since a locking scan would block other clients. They
// are then locked by key, if no other connection has locked them, and deleted if the conditions
// still hold. The subqueries of a DELETE lock the rows that they read. The server prefers to scan a
// small table and would wait for locked rows: hence FORCE INDEX.

// Bind order: the name before the first and limit, three times; limit.
#[rustfmt::skip]
const RANGE: &str = "
SELECT r.name
  FROM ((SELECT l.name FROM sqlock_lease AS l WHERE l.name > ? ORDER BY l.name LIMIT ?)
         UNION
        (SELECT DISTINCT e.name FROM sqlock_entry AS e WHERE e.name > ? ORDER BY e.name LIMIT ?)
         UNION
        (SELECT s.name FROM sqlock_row AS s WHERE s.name > ? ORDER BY s.name LIMIT ?)) AS r
 ORDER BY r.name LIMIT ?";

pub(super) async fn sweep(
    conn: &mut MySqlConnection,
    sending: Sending,
    range: &SweepRange,
) -> Result<Swept, sqlx::Error> {
    let (after, limit) = (range.after.as_bytes(), range.limit);
    let query = sqlx::query(RANGE).bind(after).bind(limit).bind(after).bind(limit).bind(after).bind(limit);
    let names = query.bind(limit).fetch_all(&mut *conn).await?;
    let Some(last) = names.last() else {
        note::sweep(conn, &range.after, None).await?;
        return Ok(Swept { purged: 0, last: None, clients: named_clients(conn, range, None).await? });
    };
    let last = name_of(last)?;
    sweep_entries(conn, sending, range, &last).await?;
    sweep_rows(conn, range, &last).await?;
    let purged = sweep_names(conn, sending, range, &last).await?;
    note::sweep(conn, &range.after, Some(&last)).await?;
    let clients = named_clients(conn, range, Some(&last)).await?;
    Ok(Swept { purged, last: Some(last), clients })
}

// Bind order: clients.
const NOTICE: &str = "UPDATE sqlock_client AS c FORCE INDEX (PRIMARY) SET c.notice = c.notice + 1 WHERE c.id IN (?)";

/// Purges rows. Gives their clients, which have been silent for long, a notice: each learns with
/// its next heartbeat that it has lost them. Until the end of the transaction, they send none.
async fn purge(
    conn: &mut MySqlConnection,
    sending: Sending,
    stale: &[MySqlRow],
    (delete, literals): (&str, &[&str]),
) -> Result<u64, sqlx::Error> {
    let client = |row: &MySqlRow| Ok(text_literal(&row.text("client")?));
    let clients = stale.iter().map(client).collect::<Result<BTreeSet<_>, sqlx::Error>>()?;
    let clients = clients.into_iter().collect::<Vec<_>>().join(", ");
    let mut script = Script::new(sending);
    script.add(NOTICE, &[&clients]);
    script.add(delete, literals);
    script.add("SELECT ROW_COUNT() AS purged", &[]);
    let answer = script.rows(conn).await?;
    let purged = answer.first().ok_or(sqlx::Error::RowNotFound)?.number("purged")?;
    Ok(purged.try_into().unwrap_or_default())
}

// Bind order: the name before the first, the last name, retention, limit.
#[rustfmt::skip]
const STALE_ENTRIES: &str = concat!("
SELECT e.name, e.id, e.client FROM sqlock_entry AS e WHERE e.name > ? AND e.name <= ? AND ", entry_until!("e"), " < ", now!(), " - ?
 LIMIT ?");

// Bind order: JSON of names as hex and ids, retention.
#[rustfmt::skip]
const SWEEP_ENTRIES: &str = concat!("
DELETE e
  FROM (SELECT STRAIGHT_JOIN s.name, s.id
          FROM (SELECT UNHEX(j.hex) AS name, j.id
                  FROM JSON_TABLE(?, '$[*]' COLUMNS (
                       hex VARCHAR(510) CHARACTER SET ascii COLLATE ascii_bin PATH '$[0]',
                       id VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$[1]')) AS j LIMIT 1000000) AS n
          JOIN sqlock_entry AS s FORCE INDEX (PRIMARY) ON s.name = n.name AND s.id = n.id
         LIMIT 1000000 FOR UPDATE SKIP LOCKED) AS q
       STRAIGHT_JOIN sqlock_entry AS e FORCE INDEX (PRIMARY) ON e.name = q.name AND e.id = q.id
 WHERE ", entry_until!("e"), " < ", now!(), " - ?");

/// Purges entries in batches, until a batch is not full or none of its entries can be purged.
async fn sweep_entries(
    conn: &mut MySqlConnection,
    sending: Sending,
    range: &SweepRange,
    last: &str,
) -> Result<(), sqlx::Error> {
    let retention = micros(range.retention);
    loop {
        let query = sqlx::query(STALE_ENTRIES).bind(range.after.as_bytes()).bind(last.as_bytes());
        let stale = query.bind(retention).bind(range.limit).fetch_all(&mut *conn).await?;
        if stale.is_empty() {
            return Ok(());
        }
        let line = |row: &MySqlRow| Ok(json!([hex(name_of(row)?.as_bytes()), row.text("id")?]));
        let lines: Value = stale.iter().map(line).collect::<Result<_, sqlx::Error>>()?;
        let literals = [&*text_literal(&lines.to_string()), &*retention.to_string()];
        let purged = purge(&mut *conn, sending, &stale, (SWEEP_ENTRIES, &literals)).await?;
        if purged == 0 || stale.len() < range.limit as usize {
            return Ok(());
        }
    }
}

// Bind order: the name before the first, the last name, age.
#[rustfmt::skip]
const UNSEEN_ROWS: &str = concat!("
SELECT s.name FROM sqlock_row AS s WHERE s.name > ? AND s.name <= ? AND s.seen_at < ", now!(), " - ?");

/// Locks the rows of some names that no other transaction has locked. Bind order: JSON of names as
/// hex.
macro_rules! unlocked {
    ($table:literal) => {
        concat!(
            "
       (SELECT STRAIGHT_JOIN s.name
          FROM (SELECT UNHEX(j.hex) AS name FROM JSON_TABLE(?, '$[*]' COLUMNS (
                       hex VARCHAR(510) CHARACTER SET ascii COLLATE ascii_bin PATH '$')) AS j LIMIT 1000000) AS n
          JOIN ",
            $table,
            " AS s FORCE INDEX (PRIMARY) ON s.name = n.name
         LIMIT 1000000 FOR UPDATE SKIP LOCKED)"
        )
    };
}

// Bind order: JSON of names as hex, age.
#[rustfmt::skip]
const SWEEP_ROWS: &str = concat!("
DELETE r FROM ", unlocked!("sqlock_row"), " AS q STRAIGHT_JOIN sqlock_row AS r FORCE INDEX (PRIMARY) ON r.name = q.name
 WHERE r.seen_at < ", now!(), " - ?");

async fn sweep_rows(conn: &mut MySqlConnection, range: &SweepRange, last: &str) -> Result<(), sqlx::Error> {
    let age = micros(range.retention.max(ROW_RETENTION));
    let query = sqlx::query(UNSEEN_ROWS).bind(range.after.as_bytes()).bind(last.as_bytes()).bind(age);
    let unseen = query.fetch_all(&mut *conn).await?;
    if !unseen.is_empty() {
        sqlx::query(SWEEP_ROWS).bind(names_of(&unseen)?).bind(age).execute(conn).await?;
    }
    Ok(())
}

/// The names of rows, as JSON of hex.
fn names_of(rows: &[MySqlRow]) -> Result<String, sqlx::Error> {
    let name = |row: &MySqlRow| Ok(Value::from(hex(name_of(row)?.as_bytes())));
    Ok(rows.iter().map(name).collect::<Result<Value, sqlx::Error>>()?.to_string())
}

/// Whether a name may be purged. A subquery without an aggregate would be joined, and might lock
/// all entries. Bind order: retention, retention.
#[rustfmt::skip]
macro_rules! is_stale {
    () => {
        concat!("l.token < ", now!(), " - ? AND ", lease_until!("l"), " < ", now!(), " - ?
   AND (SELECT COUNT(*) FROM sqlock_entry AS w WHERE w.name = l.name) = 0")
    };
}

// Bind order: the name before the first, the last name, retention, retention.
#[rustfmt::skip]
const STALE_NAMES: &str = concat!("
SELECT l.name, l.client FROM sqlock_lease AS l WHERE l.name > ? AND l.name <= ? AND ", is_stale!());

// Bind order: JSON of names as hex, retention, retention.
#[rustfmt::skip]
const SWEEP_NAMES: &str = concat!("
DELETE l FROM ", unlocked!("sqlock_lease"), " AS q STRAIGHT_JOIN sqlock_lease AS l FORCE INDEX (PRIMARY) ON l.name = q.name
 WHERE ", is_stale!());

async fn sweep_names(
    conn: &mut MySqlConnection,
    sending: Sending,
    range: &SweepRange,
    last: &str,
) -> Result<u64, sqlx::Error> {
    let retention = micros(range.retention);
    let query = sqlx::query(STALE_NAMES).bind(range.after.as_bytes()).bind(last.as_bytes());
    let stale = query.bind(retention).bind(retention).fetch_all(&mut *conn).await?;
    if stale.is_empty() {
        return Ok(0);
    }
    let (names, age) = (text_literal(&names_of(&stale)?), retention.to_string());
    purge(conn, sending, &stale, (SWEEP_NAMES, &[&names, &age, &age])).await
}

// Bind order: the name before the first, the last name or NULL, twice; the same again.
#[rustfmt::skip]
const NAMED_CLIENTS: &str = "
SELECT l.client FROM sqlock_lease AS l WHERE l.name > ? AND (? IS NULL OR l.name <= ?) AND l.client <> ''
 UNION
SELECT e.client FROM sqlock_entry AS e WHERE e.name > ? AND (? IS NULL OR e.name <= ?) AND e.client <> ''";

/// Returns the clients of the leases and entries in a range.
async fn named_clients(
    conn: &mut MySqlConnection,
    range: &SweepRange,
    last: Option<&str>,
) -> Result<Vec<String>, sqlx::Error> {
    let (after, last) = (range.after.as_bytes(), last.map(str::as_bytes));
    let query = sqlx::query(NAMED_CLIENTS).bind(after).bind(last).bind(last).bind(after).bind(last).bind(last);
    query.fetch_all(conn).await?.iter().map(|row| row.text("client")).collect()
}

// Bind order: the client before the first, retention, limit.
#[rustfmt::skip]
const STALE_CLIENTS: &str = concat!("
SELECT c.id FROM sqlock_client AS c WHERE c.id > ? AND c.beat_at < ", now!(), " - ? ORDER BY c.id LIMIT ?");

// A client that has returned meanwhile has a newer heartbeat. Bind order: JSON of ids, retention.
#[rustfmt::skip]
const SWEEP_CLIENTS: &str = concat!("
DELETE c
  FROM (SELECT STRAIGHT_JOIN s.id
          FROM (SELECT * FROM JSON_TABLE(?, '$[*]' COLUMNS (
                    id VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$')) AS j LIMIT 1000000) AS n
          JOIN sqlock_client AS s FORCE INDEX (PRIMARY) ON s.id = n.id
         LIMIT 1000000 FOR UPDATE SKIP LOCKED) AS q
       STRAIGHT_JOIN sqlock_client AS c FORCE INDEX (PRIMARY) ON c.id = q.id
 WHERE c.beat_at < ", now!(), " - ?");

pub(super) async fn sweep_clients(
    conn: &mut MySqlConnection,
    range: &ClientRange,
) -> Result<Option<String>, sqlx::Error> {
    let retention = micros(range.retention);
    let query = sqlx::query(STALE_CLIENTS).bind(&range.after).bind(retention).bind(range.limit);
    let stale = query.fetch_all(&mut *conn).await?;
    let stale = stale.iter().map(|row| row.text("id")).collect::<Result<Vec<_>, _>>()?;
    let unnamed = range.unnamed(&stale);
    if !unnamed.is_empty() {
        let ids = Value::from(unnamed).to_string();
        sqlx::query(SWEEP_CLIENTS).bind(ids).bind(retention).execute(conn).await?;
    }
    Ok(stale.into_iter().next_back())
}
