//! Statements for operators and the sweeper.

use super::note;
use super::store::{Connection, grant, now};
use crate::backend::admin::{
    ClientRange, LAST_NAMED_CLIENTS, ListedHolder, ListedWaiter, NAMED_CLIENTS, Names, SweepRange, Swept,
    end_of_prefix, skip_unreadable,
};
use crate::backend::micros;
use crate::backend::store::ROW_RETENTION;
use crate::backend::stored::{TableRow as _, read_holder, read_waiter};
use crate::name::LockName;

/// Selects the holders of some names. Acquisitions of one owner that hold a name together have one
/// token and are one holder.
#[rustfmt::skip]
macro_rules! list {
    ($lease:literal, $entry:literal) => {
        concat!("
SELECT l.name, l.owner, l.token, l.holder, l.label, l.acquired_at, greatest(l.expires_at, c.beat_at + l.ttl) AS expires_at,
       coalesce(c.beat_at, 0) AS beat_at, 0::bigint AS units, 0::bigint AS permits, 1::bigint AS acquisitions, ", now!(), " AS now, ", waiters!("l"), " AS waiters, ", note!("l"), " AS note
  FROM sqlock_lease AS l LEFT JOIN sqlock_client AS c ON c.id = l.client
 WHERE ", $lease, " AND l.id NOT IN ('', 'entries') AND greatest(l.expires_at, c.beat_at + l.ttl) > ", now!(), "
 UNION ALL
SELECT h.*, ", now!(), ", ", waiters!("h"), ", ", note!("h"), "
  FROM (SELECT e.name, max(e.owner) AS owner, e.token, (array_agg(e.holder ORDER BY e.acquired_at, e.id))[1] AS holder,
               (array_agg(e.label ORDER BY e.acquired_at, e.id))[1] AS label, min(e.acquired_at) AS acquired_at,
               max(greatest(e.expires_at, c.beat_at + e.ttl)) AS expires_at, max(coalesce(c.beat_at, 0)) AS beat_at, max(e.units) AS units, max(e.permits) AS permits,
               count(*) FILTER (WHERE e.owner <> '') AS acquisitions
          FROM sqlock_entry AS e LEFT JOIN sqlock_client AS c ON c.id = e.client
         WHERE ", $entry, " AND e.token > 0 AND greatest(e.expires_at, c.beat_at + e.ttl) > ", now!(), "
         GROUP BY e.name, e.token) AS h
 ORDER BY name, token")
    };
}
#[rustfmt::skip]
macro_rules! waiters {
    ($row:literal) => {
        concat!("(
           SELECT count(*)
             FROM sqlock_entry AS w LEFT JOIN sqlock_client AS b ON b.id = w.client
            WHERE w.name = ", $row, ".name AND w.token = 0 AND greatest(w.expires_at, b.beat_at + ", grant!(), ") > ", now!(), ")")
    };
}
#[rustfmt::skip]
macro_rules! note {
    ($row:literal) => {
        concat!("
       (SELECT n.note FROM sqlock_note AS n WHERE n.name = ", $row, ".name AND n.token = ", $row, ".token)")
    };
}

// $1 the first name
const LIST_FROM: &str = list!("l.name >= $1", "e.name >= $1");
// $1 the first name, $2 the end of the names
const LIST_RANGE: &str = list!("l.name >= $1 AND l.name < $2", "e.name >= $1 AND e.name < $2");
// $1 name
const LIST_ONE: &str = list!("l.name = $1", "e.name = $1");

pub(super) async fn list(conn: &mut Connection<'_>, names: &Names) -> Result<Vec<ListedHolder>, sqlx::Error> {
    let query = match names {
        Names::WithPrefix(prefix) => match end_of_prefix(prefix) {
            Some(end) => sqlx::query(LIST_RANGE).bind(prefix).bind(end),
            None => sqlx::query(LIST_FROM).bind(prefix),
        },
        Names::One(name) => sqlx::query(LIST_ONE).bind(name.as_str()),
    };
    Ok(skip_unreadable(conn.rows(query).await?.iter().map(|row| read_holder(row, row.text("name")?))).collect())
}

// $1 name
#[rustfmt::skip]
const WAITERS: &str = concat!("
SELECT e.id, e.units, e.permits, e.holder, e.label, e.arrived_at
  FROM sqlock_entry AS e LEFT JOIN sqlock_client AS c ON c.id = e.client
 WHERE e.name = $1 AND e.token = 0 AND greatest(e.expires_at, c.beat_at + ", grant!(), ") > ", now!(), "
 ORDER BY e.arrived_at, e.id");

pub(super) async fn waiters(conn: &mut Connection<'_>, name: &LockName) -> Result<Vec<ListedWaiter>, sqlx::Error> {
    let found = conn.rows(sqlx::query(WAITERS).bind(name.as_str())).await?;
    Ok(skip_unreadable(found.iter().map(read_waiter)).collect())
}

// $1 the name before the first, $2 limit
const RANGE: &str = "
SELECT count(*) AS names, coalesce(max(name), '') AS last
  FROM ((SELECT name FROM sqlock_lease WHERE name > $1 ORDER BY name LIMIT $2)
         UNION
        (SELECT name FROM sqlock_row WHERE name > $1 ORDER BY name LIMIT $2)
         ORDER BY name LIMIT $2) AS n";

/// Locks the clients of the rows in `held`, and gives them a notice. `purged` are the rows that no
/// client can keep any more: a client that writes its heartbeat later finds the notice. $3
/// retention.
#[rustfmt::skip]
macro_rules! purged {
    () => {
        concat!("
loser AS MATERIALIZED (
    SELECT client, max(ttl) AS ttl FROM held WHERE client <> '' GROUP BY client),
client AS MATERIALIZED (
    SELECT c.id
      FROM loser JOIN sqlock_client AS c ON c.id = loser.client
     WHERE c.beat_at + loser.ttl < ", now!(), " - $3
       FOR UPDATE OF c SKIP LOCKED),
notice AS (
    UPDATE sqlock_client AS c SET notice = c.notice + 1 FROM client WHERE c.id = client.id),
purged AS MATERIALIZED (
    SELECT *
      FROM held
     WHERE client = '' OR client IN (SELECT id FROM client)
        OR NOT EXISTS (SELECT FROM sqlock_client AS c WHERE c.id = held.client))")
    };
}

// $1 the name before the first, $2 the last name, $3 retention
#[rustfmt::skip]
const SWEEP_ENTRIES: &str = concat!("
WITH held AS MATERIALIZED (
    SELECT e.name, e.id, e.client, CASE e.token WHEN 0 THEN ", grant!(), " ELSE e.ttl END AS ttl
      FROM sqlock_entry AS e LEFT JOIN sqlock_client AS c ON c.id = e.client
     WHERE e.name > $1 AND e.name <= $2
       AND greatest(e.expires_at, c.beat_at + CASE e.token WHEN 0 THEN ", grant!(), " ELSE e.ttl END) < ", now!(), " - $3
       FOR UPDATE OF e SKIP LOCKED),", purged!(), "
DELETE FROM sqlock_entry AS e USING purged WHERE e.name = purged.name AND e.id = purged.id");

// The same. The check for entries is valid only for the version of the row that was read with them.
#[rustfmt::skip]
const SWEEP: &str = concat!("
WITH seen AS MATERIALIZED (
    SELECT l.name, l.xmin AS version
      FROM sqlock_lease AS l LEFT JOIN sqlock_client AS c ON c.id = l.client
     WHERE l.name > $1 AND l.name <= $2 AND l.token < ", now!(), " - $3 AND l.waiting < ", now!(), " - $3
       AND greatest(l.expires_at, c.beat_at + l.ttl) < ", now!(), " - $3
       AND NOT EXISTS (SELECT FROM sqlock_entry AS e WHERE e.name = l.name)),
held AS MATERIALIZED (
    SELECT l.name, l.client, l.ttl
      FROM seen JOIN sqlock_lease AS l ON l.name = seen.name
     WHERE l.xmin = seen.version
       FOR UPDATE OF l SKIP LOCKED),", purged!(), "
DELETE FROM sqlock_lease AS l USING purged WHERE l.name = purged.name
RETURNING l.name");

// $1 the name before the first, $2 the last name, $3 for how long a row must not have been seen
#[rustfmt::skip]
const SWEEP_ROWS: &str = concat!("
WITH unseen AS MATERIALIZED (
    SELECT name FROM sqlock_row WHERE name > $1 AND name <= $2 AND seen_at < ", now!(), " - $3 FOR UPDATE SKIP LOCKED)
DELETE FROM sqlock_row AS r USING unseen WHERE r.name = unseen.name");

// $1 the client before the first, $2 retention, $3 limit
#[rustfmt::skip]
const STALE_CLIENTS: &str = concat!("
SELECT id FROM sqlock_client WHERE id > $1 AND beat_at < ", now!(), " - $2 ORDER BY id LIMIT $3");

// A client that has returned meanwhile has a newer heartbeat. $1 ids, $2 retention
#[rustfmt::skip]
const SWEEP_CLIENTS: &str = concat!("
WITH unnamed AS MATERIALIZED (
    SELECT id FROM sqlock_client WHERE id = ANY ($1) AND beat_at < ", now!(), " - $2 FOR UPDATE SKIP LOCKED)
DELETE FROM sqlock_client AS c USING unnamed WHERE c.id = unnamed.id");

pub(super) async fn sweep(conn: &mut Connection<'_>, range: &SweepRange) -> Result<Swept, sqlx::Error> {
    let retention = micros(range.retention);
    let query = sqlx::query(RANGE).bind(&range.after).bind(i64::from(range.limit));
    let row = conn.row(query).await?.ok_or(sqlx::Error::RowNotFound)?;
    let (names, last) = (row.number("names")?, row.text("last")?);
    if names == 0 {
        note::sweep(conn, &range.after, None).await?;
        return Ok(Swept { purged: 0, last: None, clients: named_clients(conn, range, None).await? });
    }
    let within = |sql| sqlx::query(sql).bind(&range.after).bind(&last);
    conn.rows(within(SWEEP_ENTRIES).bind(retention)).await?;
    let purged = conn.rows(within(SWEEP).bind(retention)).await?.len() as u64;
    note::sweep(conn, &range.after, Some(&last)).await?;
    conn.rows(within(SWEEP_ROWS).bind(micros(range.retention.max(ROW_RETENTION)))).await?;
    let clients = named_clients(conn, range, Some(&last)).await?;
    Ok(Swept { purged, last: Some(last), clients })
}

/// Returns the clients of the leases and entries in a range.
async fn named_clients(
    conn: &mut Connection<'_>,
    range: &SweepRange,
    last: Option<&str>,
) -> Result<Vec<String>, sqlx::Error> {
    let query = match last {
        Some(last) => sqlx::query(NAMED_CLIENTS).bind(&range.after).bind(last),
        None => sqlx::query(LAST_NAMED_CLIENTS).bind(&range.after),
    };
    conn.rows(query).await?.iter().map(|row| row.text("client")).collect()
}

pub(super) async fn sweep_clients(
    conn: &mut Connection<'_>,
    range: &ClientRange,
) -> Result<Option<String>, sqlx::Error> {
    let retention = micros(range.retention);
    let query = sqlx::query(STALE_CLIENTS).bind(&range.after).bind(retention).bind(i64::from(range.limit));
    let stale = conn.rows(query).await?;
    let stale = stale.iter().map(|row| row.text("id")).collect::<Result<Vec<_>, _>>()?;
    let unnamed = range.unnamed(&stale);
    if !unnamed.is_empty() {
        conn.rows(sqlx::query(SWEEP_CLIENTS).bind(unnamed).bind(retention)).await?;
    }
    Ok(stale.into_iter().next_back())
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};

    use super::*;

    /// Tables that end with their connection, and the settings of a connection that has executed
    /// its statements often.
    const SESSION: &str = concat!(
        "SET search_path = pg_temp; SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off;",
        include_str!("../../../migrations/postgres/0001_lease.sql"),
        include_str!("../../../migrations/postgres/0002_row.sql"),
    );

    /// Returns the generic plan of a statement, line by line.
    async fn plan(conn: &mut PgConnection, sql: &str, arguments: &str) -> Vec<String> {
        let prepare = format!("DEALLOCATE ALL; PREPARE planned AS {sql}");
        sqlx::raw_sql(AssertSqlSafe(prepare)).execute(&mut *conn).await.expect("a statement");
        let explain = format!("EXPLAIN EXECUTE planned ({arguments})");
        let lines = sqlx::raw_sql(AssertSqlSafe(explain)).fetch_all(conn).await.expect("a plan");
        lines.iter().map(|line| line.try_get(0).expect("a text")).collect()
    }

    #[tokio::test]
    async fn generic_plans_read_ranges_of_names() {
        let url = std::env::var("SQLOCK_TEST_POSTGRES_URL").expect("the tests run by scripts/test");
        let mut conn = PgConnection::connect(&url).await.expect("a connection");
        sqlx::raw_sql(SESSION).execute(&mut conn).await.expect("the tables");
        for (sql, arguments, bounds, ranges) in [
            (LIST_RANGE, "'a/', 'a0'", ["name >= $1", "name < $2"], 2),
            (SWEEP_ENTRIES, "'a/', 'a0', 0", ["name > $1", "name <= $2"], 1),
            (SWEEP, "'a/', 'a0', 0", ["name > $1", "name <= $2"], 1),
            (SWEEP_ROWS, "'a/', 'a0', 0", ["name > $1", "name <= $2"], 1),
            (note::SWEEP, "'a/', 'a0'", ["name > $1", "name <= $2"], 1),
            (NAMED_CLIENTS, "'a/', 'a0'", ["name > $1", "name <= $2"], 2),
        ] {
            let steps = plan(&mut conn, sql, arguments).await;
            let is_range =
                |step: &&String| step.contains("Index Cond: ") && bounds.iter().all(|bound| step.contains(bound));
            assert_eq!(steps.iter().filter(is_range).count(), ranges, "{steps:#?}");
        }
        // The sweeper reads the names in order, up to its limit.
        let steps = plan(&mut conn, RANGE, "'a/', 500").await;
        for index in ["using sqlock_lease_pkey", "using sqlock_row_pkey"] {
            assert!(steps.iter().any(|step| step.contains(index)), "{steps:#?}");
        }
        assert_eq!(steps.iter().filter(|step| step.contains("Index Cond: (name > $1)")).count(), 2, "{steps:#?}");
    }
}
