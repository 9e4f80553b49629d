//! Statements for operators and the sweeper.

use serde_json::Value;
use sqlx::SqliteConnection;

use super::store::{rows, transaction};
use crate::backend::admin::{
    ClientRange, LAST_NAMED_CLIENTS, ListedHolder, ListedWaiter, NAMED_CLIENTS, Names, SweepRange, Swept,
    end_of_prefix, skip_unreadable,
};
use crate::backend::micros;
use crate::backend::stored::{TableRow as _, read_holder, read_waiter};
use crate::name::LockName;

/// The latest heartbeat of the client that renews a row, or 0.
#[rustfmt::skip]
macro_rules! beat_at {
    ($row:literal) => {
        concat!("coalesce((SELECT b.beat_at FROM sqlock_client AS b WHERE b.id = ", $row, ".client), 0)")
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
SELECT e.name, max(e.owner), e.token, e.holder, e.label, min(e.acquired_at), max(", entry_until!("e"), "),
       max(", beat_at!("e"), "), e.units, e.permits,
       sum(e.owner <> ''), ", now!(), ", ", waiters!("e"), ", ", note!("e"), "
  FROM sqlock_entry AS e
 WHERE ", $entry, " AND e.token > 0 AND ", entry_until!("e"), " > ", now!(), "
 GROUP BY e.name, e.token
 ORDER BY 1, 3")
    };
}
#[rustfmt::skip]
macro_rules! waiters {
    ($row:literal) => {
        concat!("
       (SELECT count(*) FROM sqlock_entry AS w WHERE w.name = ", $row, ".name AND w.token = 0 AND ", entry_until!("w"), " > ", now!(), ")")
    };
}
#[rustfmt::skip]
macro_rules! note {
    ($row:literal) => {
        concat!("
       (SELECT n.note FROM sqlock_note AS n WHERE n.name = ", $row, ".name AND n.token = ", $row, ".token)")
    };
}
/// Deletes the notes of former holders, except the latest note of each name. A holder may
/// share the name with a later one.
#[rustfmt::skip]
macro_rules! sweep_notes {
    ($names:literal) => {
        concat!("
DELETE FROM sqlock_note AS n
 WHERE ", $names, "
   AND NOT EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = n.name AND l.token = n.token)
   AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = n.name AND e.token = n.token);")
    };
}

// $1 the first name, $2 the end of the names, or nothing. A blob is greater than every text.
const LIST: &str = list!("l.name >= $1 AND l.name < coalesce($2, x'')", "e.name >= $1 AND e.name < coalesce($2, x'')");
const LIST_ONE: &str = list!("l.name = $1", "e.name = $1");

pub(super) async fn list(conn: &mut SqliteConnection, names: &Names) -> Result<Vec<ListedHolder>, sqlx::Error> {
    let query = match names {
        Names::WithPrefix(prefix) => sqlx::query(LIST).bind(prefix).bind(end_of_prefix(prefix)),
        Names::One(name) => sqlx::query(LIST_ONE).bind(name.as_str()),
    };
    Ok(skip_unreadable(rows(conn, query).await?.iter().map(|row| read_holder(row, row.text("name")?))).collect())
}

// $1 name
#[rustfmt::skip]
const WAITERS: &str = concat!("
SELECT e.id, e.units, e.permits, e.holder, e.label, e.arrived_at FROM sqlock_entry AS e
 WHERE e.name = $1 AND e.token = 0 AND ", entry_until!("e"), " > ", now!(), "
 ORDER BY e.arrived_at, e.id");

pub(super) async fn waiters(conn: &mut SqliteConnection, name: &LockName) -> Result<Vec<ListedWaiter>, sqlx::Error> {
    let found = rows(conn, sqlx::query(WAITERS).bind(name.as_str())).await?;
    Ok(skip_unreadable(found.iter().map(read_waiter)).collect())
}

// $1 the name before the first, $2 limit
const RANGE: &str = "
SELECT count(*) AS names, coalesce(max(name), '') AS last
  FROM (SELECT name FROM sqlock_lease WHERE name > $1 ORDER BY name LIMIT $2)";

macro_rules! is_stale_entry {
    () => {
        concat!("e.name > $1 AND e.name <= $2 AND ", entry_until!("e"), " < ", now!(), " - $3")
    };
}
#[rustfmt::skip]
macro_rules! is_stale_lease {
    () => {
        concat!("l.name > $1 AND l.name <= $2 AND l.token < ", now!(), " - $3 AND ", lease_until!("l"), " < ", now!(), " - $3")
    };
}

// The clients of the purged rows, which have been silent for long, get a notice: each learns with its
// next heartbeat that it has lost them. $1 the name before the first, $2 the last name, $3 retention
#[rustfmt::skip]
const SWEEP: &str = concat!("
BEGIN IMMEDIATE;
UPDATE sqlock_client SET notice = notice + 1
 WHERE id IN (SELECT e.client FROM sqlock_entry AS e WHERE ", is_stale_entry!(), "
               UNION
              SELECT l.client FROM sqlock_lease AS l WHERE ", is_stale_lease!(), ");
DELETE FROM sqlock_entry AS e WHERE ", is_stale_entry!(), ";
DELETE FROM sqlock_lease AS l
 WHERE ", is_stale_lease!(), "
   AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = l.name)
RETURNING name;", sweep_notes!("n.name > $1 AND n.name <= $2"), "
COMMIT");

// $1 the last name
const SWEEP_LAST_NOTES: &str = concat!("BEGIN IMMEDIATE;", sweep_notes!("n.name > $1"), "COMMIT");

// $1 the client before the first, $2 retention, $3 limit
#[rustfmt::skip]
const STALE_CLIENTS: &str = concat!("
SELECT id FROM sqlock_client WHERE id > $1 AND beat_at < ", now!(), " - $2 ORDER BY id LIMIT $3");

// A client that has sent a heartbeat meanwhile stays. One that has acquired without a heartbeat
// registers again. $1 retention, $2 ids as JSON
#[rustfmt::skip]
const SWEEP_CLIENTS: &str = concat!("
BEGIN IMMEDIATE;
DELETE FROM sqlock_client WHERE beat_at < ", now!(), " - $1 AND id IN (SELECT value FROM json_each($2));
COMMIT");

pub(super) async fn sweep(conn: &mut SqliteConnection, range: &SweepRange) -> Result<Swept, sqlx::Error> {
    let retention = micros(range.retention);
    let found = rows(conn, sqlx::query(RANGE).bind(&range.after).bind(range.limit)).await?;
    let row = found.first().ok_or(sqlx::Error::RowNotFound)?;
    let (names, last) = (row.number("names")?, row.text("last")?);
    if names == 0 {
        transaction(conn, sqlx::query(SWEEP_LAST_NOTES).bind(&range.after)).await?;
        return Ok(Swept { purged: 0, last: None, clients: named_clients(conn, range, None).await? });
    }
    let purged = transaction(conn, sqlx::query(SWEEP).bind(&range.after).bind(&last).bind(retention)).await?;
    let clients = named_clients(conn, range, Some(&last)).await?;
    Ok(Swept { purged: purged.len() as u64, last: Some(last), clients })
}

/// Returns the clients of the leases and entries in a range.
async fn named_clients(
    conn: &mut SqliteConnection,
    range: &SweepRange,
    last: Option<&str>,
) -> Result<Vec<String>, sqlx::Error> {
    let query = match last {
        Some(last) => sqlx::query(NAMED_CLIENTS).bind(&range.after).bind(last),
        None => sqlx::query(LAST_NAMED_CLIENTS).bind(&range.after),
    };
    rows(conn, query).await?.iter().map(|row| row.text("client")).collect()
}

pub(super) async fn sweep_clients(
    conn: &mut SqliteConnection,
    range: &ClientRange,
) -> Result<Option<String>, sqlx::Error> {
    let retention = micros(range.retention);
    let stale = rows(conn, sqlx::query(STALE_CLIENTS).bind(&range.after).bind(retention).bind(range.limit)).await?;
    let stale = stale.iter().map(|row| row.text("id")).collect::<Result<Vec<_>, _>>()?;
    let unnamed = range.unnamed(&stale);
    if !unnamed.is_empty() {
        let ids = Value::from(unnamed).to_string();
        transaction(conn, sqlx::query(SWEEP_CLIENTS).bind(retention).bind(ids)).await?;
    }
    Ok(stale.into_iter().next_back())
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use sqlx::Row as _;

    use super::super::differential::open;
    use super::*;

    /// Counts the steps of a plan that read a range of names.
    async fn ranges(sql: &'static str) -> usize {
        let directory = tempfile::tempdir().expect("a directory");
        let mut conn = open(&directory.path().join("store.db")).await;
        let explain = sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"));
        let plan = sqlx::query(explain).bind("a/").bind("a0").fetch_all(&mut conn).await.expect("a plan");
        let steps: Vec<String> = plan.iter().map(|row| row.try_get("detail").expect("a text")).collect();
        steps.iter().filter(|step| step.contains("(name>? AND name<?)")).count()
    }

    #[tokio::test]
    async fn lists_and_sweeps_read_ranges_of_names() {
        for sql in [LIST, NAMED_CLIENTS] {
            assert_eq!(ranges(sql).await, 2, "{sql}");
        }
    }
}
