//! Deletes expired records and their steps.

use sqlx::QueryBuilder;

use super::{Records, texts};

/// What has been done may be done anew once its time has run out: then the key counts as never
/// used. An attempt that has not ended, or nobody knows how, has no such time. (NOT IN, so that no
/// database looks it up in the index that begins with the state.)
const EXPIRED: &str = "state NOT IN ('started', 'unknown', 'expired') AND expires_at <= ";

/// When a key that is refused for ever expires: the last moment of the year 9999. So the index by
/// expiry does not lead to it.
const NEVER: i64 = 253_402_300_799_999_999;

/// Forgets the results, and the steps, of those of these records whose time has run out and whose
/// keys are refused from then on.
async fn entomb<DB: Records>(conn: &mut DB::Connection, ids: &[String]) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET result = NULL, state = 'expired', expires_at = ");
    query.push(NEVER).push(" WHERE ");
    push_ids::<DB>(&mut query, ids);
    query.push(" AND state = 'done' AND permanent = 1 AND expires_at <= ").push(DB::NOW);
    DB::execute(conn, &mut query).await
}

/// Deletes those of these records whose time has run out, with their steps. One that is being used,
/// or used anew, is passed over: its transaction may take its time.
pub(super) async fn bury<DB: Records>(conn: &mut DB::Connection, ids: &[String]) -> Result<u64, sqlx::Error> {
    let mut free = QueryBuilder::new("SELECT id FROM sqlock_idem WHERE ");
    push_ids::<DB>(&mut free, ids);
    free.push(" AND permanent = 0 AND ").push(EXPIRED).push(DB::NOW).push(DB::SKIPPING);
    let ids = if DB::SKIPS_IN_DELETE { ids.to_vec() } else { texts::<DB>(conn, &mut free).await? };
    if ids.is_empty() {
        return Ok(0);
    }
    let mut query = QueryBuilder::new("DELETE FROM sqlock_idem WHERE ");
    push_ids::<DB>(&mut query, &ids);
    if DB::SKIPS_IN_DELETE {
        query.push(" AND id IN (SELECT id FROM sqlock_idem WHERE ");
        push_ids::<DB>(&mut query, &ids);
        query.push(DB::SKIPPING).push(")");
    }
    // Again: somebody may have used the key anew since it was looked up.
    query.push(" AND permanent = 0 AND ").push(EXPIRED).push(DB::NOW);
    let buried = DB::execute(conn, &mut query).await?;
    if buried > 0 {
        bury_steps::<DB>(conn, &ids).await?;
    }
    Ok(buried)
}

/// Deletes the steps of records that are not there any more, or whose results are forgotten.
pub(super) async fn bury_steps<DB: Records>(conn: &mut DB::Connection, ids: &[String]) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new("DELETE FROM sqlock_idem_step WHERE ");
    push_ids::<DB>(&mut query, ids);
    query.push(
        " AND NOT EXISTS (SELECT 1 FROM sqlock_idem AS r
                           WHERE r.id = sqlock_idem_step.id AND r.created_at = sqlock_idem_step.begun
                             AND r.state <> 'expired')",
    );
    DB::execute(conn, &mut query).await
}

fn push_ids<DB: Records>(query: &mut QueryBuilder<DB>, ids: &[String]) {
    query.push("id IN (");
    for (i, id) in ids.iter().enumerate() {
        if i > 0 {
            query.push(", ");
        }
        DB::push_text(query, id);
    }
    query.push(")");
}

pub(super) async fn purge<DB: Records>(conn: &mut DB::Connection, limit: u32) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new("SELECT id FROM sqlock_idem");
    query
        .push(DB::BY_EXPIRY)
        .push(" WHERE ")
        .push(EXPIRED)
        .push(DB::NOW)
        .push(" ORDER BY expires_at LIMIT ")
        .push(limit)
        .push(DB::SKIPPING);
    let ids = texts::<DB>(conn, &mut query).await?;
    if !ids.is_empty() {
        let entombed = entomb::<DB>(conn, &ids).await?;
        if entombed > 0 {
            bury_steps::<DB>(conn, &ids).await?;
        }
        return Ok(entombed + bury::<DB>(conn, &ids).await?);
    }
    // What a process has left that died between the deletion of a record and that of its steps.
    let mut query = QueryBuilder::new(
        "SELECT DISTINCT id FROM sqlock_idem_step
          WHERE NOT EXISTS (SELECT 1 FROM sqlock_idem AS r
                             WHERE r.id = sqlock_idem_step.id AND r.created_at = sqlock_idem_step.begun
                             AND r.state <> 'expired')
          LIMIT ",
    );
    query.push(limit);
    let orphaned = texts::<DB>(conn, &mut query).await?;
    if !orphaned.is_empty() {
        bury_steps::<DB>(conn, &orphaned).await?;
    }
    Ok(0)
}
