//! The beginning and the end of attempts under a lease.

use sqlx::QueryBuilder;

use super::RecordDialect;
use super::claim::{ClaimRequest, INTO, push_use_token, push_values};
use super::purge::{delete_expired, delete_orphaned_steps};
use super::record::{Record, RecordState, read};

/// Makes the attempt with this token the latest one of a record, which is created if it is missing.
/// Returns the record, which may be that of another attempt or request.
pub(super) async fn start<DB: RecordDialect>(
    conn: &mut DB::Connection,
    claim: &ClaimRequest,
    token: i64,
    resume: bool,
) -> Result<Option<Record>, sqlx::Error> {
    let id = std::slice::from_ref(&claim.key.id);
    let changed = if claim.issued {
        let mut query = QueryBuilder::new("");
        push_use_token::<DB>(&mut query, claim, RecordState::Started, token);
        DB::execute(conn, &mut query).await?
    } else if resume {
        0
    } else {
        delete_expired::<DB>(conn, id).await?;
        let mut query = QueryBuilder::new(DB::INSERT_NEW.0);
        query.push(INTO).push(" VALUES (");
        push_values::<DB>(&mut query, claim, RecordState::Started, token);
        query.push(")").push(DB::INSERT_NEW.1);
        DB::execute(conn, &mut query).await?
    };
    if changed == 0 {
        let mut query =
            QueryBuilder::new("UPDATE sqlock_idem SET state = 'started', attempts = attempts + 1, token = ");
        DB::push_integer(&mut query, token);
        query.push(" WHERE id = ");
        DB::push_text(&mut query, &claim.key.id);
        query.push(" AND token < ");
        DB::push_integer(&mut query, token);
        if resume {
            // A record without attempts is the claim of a transaction.
            query.push(" AND state IN ('started', 'unknown') AND attempts > 0");
        } else {
            query.push(" AND state = 'started' AND fingerprint = ");
            DB::push_bytes(&mut query, &claim.fingerprint);
        }
        DB::execute(conn, &mut query).await?;
    }
    read::<DB>(conn, &claim.key.id, "").await
}

/// The ending of an attempt.
#[derive(Clone)]
pub(crate) enum AttemptEnding {
    /// The result, and its retention from now on, in microseconds. The duration of the attempt does
    /// not count.
    Done {
        result: Vec<u8>,
        retention_micros: i64,
    },
    Unknown,
}

/// Stores the ending of the attempt with this token, if it is the latest and has not ended.
pub(crate) async fn end<DB: RecordDialect>(
    conn: &mut DB::Connection,
    id: &str,
    token: i64,
    ending: &AttemptEnding,
) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET ");
    let state = match ending {
        AttemptEnding::Done { result, retention_micros } => {
            query.push("request = NULL, result = ");
            DB::push_bytes(&mut query, result);
            query.push(", expires_at = ").push(DB::NOW).push(" + ");
            DB::push_integer(&mut query, *retention_micros);
            query.push(", ");
            RecordState::Done
        }
        AttemptEnding::Unknown => RecordState::Unknown,
    };
    query.push("state = '").push(state.as_str()).push("' WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(" AND state = 'started' AND token = ");
    DB::push_integer(&mut query, token);
    DB::execute(conn, &mut query).await
}

/// Adds the condition for the record of the attempt with this token, if it is the latest and its
/// request is not done.
pub(super) fn push_if_unfinished<DB: RecordDialect>(query: &mut QueryBuilder<DB>, id: &str, token: i64) {
    query.push(" WHERE id = ");
    DB::push_text(query, id);
    query.push(" AND state IN ('started', 'unknown') AND token = ");
    DB::push_integer(query, token);
}

/// Deletes the record of the attempt with this token, if its request is not done. An issued token
/// becomes valid again instead.
pub(super) async fn forget<DB: RecordDialect>(
    conn: &mut DB::Connection,
    id: &str,
    token: i64,
) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET state = 'issued', fingerprint = ");
    DB::push_bytes(&mut query, &[]);
    query.push(", token = 0, attempts = 0, permanent = 0, request = NULL, expires_at = issued_until");
    push_if_unfinished(&mut query, id, token);
    query.push(" AND issued_until > ").push(DB::NOW);
    let mut forgotten = DB::execute(conn, &mut query).await?;
    if forgotten == 0 {
        let mut query = QueryBuilder::new("DELETE FROM sqlock_idem");
        push_if_unfinished(&mut query, id, token);
        forgotten = DB::execute(conn, &mut query).await?;
    }
    delete_orphaned_steps::<DB>(conn, &[id.to_owned()]).await?;
    Ok(forgotten)
}

/// Locks the record for this transaction, so that no other attempt begins on this server before it
/// ends. Of this transaction and an attempt that begins on another node of a Galera cluster, one
/// fails: both write the record. Returns `false` if the attempt with this token is not the latest.
pub(crate) async fn lock_attempt<DB: RecordDialect>(
    conn: &mut DB::Connection,
    id: &str,
    token: i64,
) -> Result<bool, sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET ");
    query.push(DB::REWRITE).push(" WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(" AND state = 'started' AND token = ");
    DB::push_integer(&mut query, token);
    Ok(DB::execute(conn, &mut query).await? > 0)
}
