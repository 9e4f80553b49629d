//! Deletes expired records and their steps.

use sqlx::QueryBuilder;
use uuid::Uuid;

use super::{RecordDialect, fetch_texts};

/// The condition that a record has expired, without the current time at its end: the key of such a
/// record counts as new. A record that
/// has not ended, or whose outcome is unknown, does not expire. (NOT IN keeps databases from using
/// the index that begins with the state.)
const EXPIRED: &str = "state NOT IN ('started', 'unknown', 'expired') AND expires_at <= ";

/// The expiry of a permanently refused key: the end of the year 9999. A purge by the index on the
/// expiry does not reach it.
const NEVER: i64 = 253_402_300_799_999_999;

/// The most records of a batch: a busy server deletes them before the client gives the answer up.
/// Each id is a parameter, of which a statement has at most 32,766 on SQLite and 65,535 elsewhere,
/// and the ids of orphaned steps may be twice as many.
const MAX_BATCH: u32 = 1_000;

/// Deletes the results of the expired ones among these records, if their keys are refused after
/// expiry.
async fn expire_permanent<DB: RecordDialect>(conn: &mut DB::Connection, ids: &[String]) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem");
    query.push(DB::KEY_INDEX_HINT).push(" SET result = NULL, state = 'expired', expires_at = ");
    query.push(NEVER).push(" WHERE ");
    push_ids::<DB>(&mut query, ids);
    query.push(" AND state = 'done' AND permanent = 1 AND expires_at <= ").push(DB::NOW);
    DB::execute(conn, &mut query).await
}

/// Deletes the expired ones among these records, with their steps. Skips records that are locked,
/// because the transaction that uses a record may be long.
pub(super) async fn delete_expired<DB: RecordDialect>(
    conn: &mut DB::Connection,
    ids: &[String],
) -> Result<u64, sqlx::Error> {
    let mut free = QueryBuilder::new("SELECT id FROM sqlock_idem");
    free.push(DB::KEY_INDEX_HINT).push(" WHERE ");
    push_ids::<DB>(&mut free, ids);
    free.push(" AND permanent = 0 AND ").push(EXPIRED).push(DB::NOW).push(DB::SKIP_LOCKED);
    let ids = if DB::SKIPS_LOCKED_IN_DELETE { ids.to_vec() } else { fetch_texts::<DB>(conn, &mut free).await? };
    if ids.is_empty() {
        return Ok(0);
    }
    let mut query = delete_from::<DB>("sqlock_idem");
    if DB::SKIPS_LOCKED_IN_DELETE {
        // The array is built once. The rows of IN (SELECT ...) would be locked anew for each record
        // while the table has not been analyzed yet.
        query.push("id = ANY (ARRAY(SELECT id FROM sqlock_idem WHERE ");
        push_ids::<DB>(&mut query, &ids);
        query.push(DB::SKIP_LOCKED).push("))");
    } else {
        push_ids::<DB>(&mut query, &ids);
    }
    // The condition is repeated, because another request may have used the key since the SELECT.
    query.push(" AND permanent = 0 AND ").push(EXPIRED).push(DB::NOW);
    let deleted = DB::execute(conn, &mut query).await?;
    if deleted > 0 {
        delete_orphaned_steps::<DB>(conn, &ids).await?;
    }
    Ok(deleted)
}

/// Deletes the steps under these ids that have no record, or whose record is in the state
/// `expired`.
pub(super) async fn delete_orphaned_steps<DB: RecordDialect>(
    conn: &mut DB::Connection,
    ids: &[String],
) -> Result<u64, sqlx::Error> {
    let mut query = delete_from::<DB>("sqlock_idem_step");
    push_ids::<DB>(&mut query, ids);
    query.push(" AND ");
    push_orphaned::<DB>(&mut query, "sqlock_idem_step");
    DB::execute(conn, &mut query).await
}

/// Begins a DELETE that finds its rows by the primary key.
fn delete_from<DB: RecordDialect>(table: &str) -> QueryBuilder<DB> {
    match DB::KEY_INDEX_HINT {
        "" => QueryBuilder::new(format!("DELETE FROM {table} WHERE ")),
        // Only a DELETE with a list of tables takes a hint.
        hint => QueryBuilder::new(format!("DELETE {table} FROM {table}{hint} WHERE ")),
    }
}

/// The condition that a step in this table belongs to no request: its record does not exist, or has
/// no request any more, or none yet.
fn push_orphaned<DB: RecordDialect>(query: &mut QueryBuilder<DB>, steps: &str) {
    query.push(format_args!(
        "NOT EXISTS (SELECT 1 FROM sqlock_idem AS r
                      WHERE r.id = {steps}.id AND r.created_at = {steps}.begun AND r.state NOT IN ('expired', 'issued'))"
    ));
}

fn push_ids<DB: RecordDialect>(query: &mut QueryBuilder<DB>, ids: &[String]) {
    query.push("id IN (");
    for (i, id) in ids.iter().enumerate() {
        if i > 0 {
            query.push(", ");
        }
        DB::push_text(query, id);
    }
    query.push(")");
}

/// Reads the database's clock, in microseconds.
async fn read_clock<DB: RecordDialect>(conn: &mut DB::Connection) -> Result<i64, sqlx::Error> {
    let mut query = QueryBuilder::new("SELECT CAST(");
    query.push(DB::NOW).push(" AS CHAR(20))");
    let now = fetch_texts::<DB>(conn, &mut query).await?;
    let micros = now.first().and_then(|now| now.trim().parse().ok());
    micros.ok_or_else(|| sqlx::Error::Decode("the clock is not a number".into()))
}

/// Purges expired records, at most `limit` and [`MAX_BATCH`], and returns how many. If there are
/// none, looks for orphaned steps.
pub(super) async fn purge<DB: RecordDialect>(conn: &mut DB::Connection, limit: u32) -> Result<u64, sqlx::Error> {
    let limit = limit.min(MAX_BATCH);
    // The time is a literal: a database does not compare an index with a clock that moves during
    // the statement, and would read all records.
    let now = read_clock::<DB>(conn).await?;
    let mut query = QueryBuilder::new("SELECT id FROM sqlock_idem");
    query
        .push(DB::EXPIRY_INDEX_HINT)
        .push(" WHERE ")
        .push(EXPIRED)
        .push(now)
        .push(" ORDER BY expires_at LIMIT ")
        .push(limit)
        .push(DB::SKIP_LOCKED);
    let ids = fetch_texts::<DB>(conn, &mut query).await?;
    if !ids.is_empty() {
        let expired = expire_permanent::<DB>(conn, &ids).await?;
        if expired > 0 {
            delete_orphaned_steps::<DB>(conn, &ids).await?;
        }
        return Ok(expired + delete_expired::<DB>(conn, &ids).await?);
    }
    let orphaned = find_orphaned_steps::<DB>(conn, limit).await?;
    if !orphaned.is_empty() {
        delete_orphaned_steps::<DB>(conn, &orphaned).await?;
    }
    Ok(0)
}

/// Returns the ids of orphaned steps among the `limit` steps after a random place in the table and
/// the `limit` steps before it. The cost does not grow with the table: in a large table, repeated
/// calls find the orphaned steps.
///
/// Steps are orphaned when a process dies between the deletion of a record and that of its steps,
/// or when a step is stored at the moment of that deletion.
async fn find_orphaned_steps<DB: RecordDialect>(
    conn: &mut DB::Connection,
    limit: u32,
) -> Result<Vec<String>, sqlx::Error> {
    // The ids are digests in hexadecimal digits.
    let place = Uuid::new_v4().simple().to_string();
    let push_side = |query: &mut QueryBuilder<DB>, name: &str, condition: &str, order: &str| {
        query.push("SELECT id, begun FROM (SELECT id, begun FROM sqlock_idem_step WHERE id ").push(condition);
        DB::push_text(query, &place);
        query.push(format_args!(" ORDER BY id {order} LIMIT {limit}) AS {name}"));
    };
    let mut query = QueryBuilder::new("SELECT DISTINCT id FROM (");
    push_side(&mut query, "after_it", ">= ", "ASC");
    query.push(" UNION ALL ");
    push_side(&mut query, "before_it", "< ", "DESC");
    query.push(") AS examined WHERE ");
    push_orphaned::<DB>(&mut query, "examined");
    fetch_texts::<DB>(conn, &mut query).await
}
