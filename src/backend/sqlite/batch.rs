//! Carries out requests about several names in one statement. Each has the same effect as alone, or
//! none.

use serde::Serialize;
use sqlx::SqliteConnection;

use super::queue::poll;
use super::store::rows;
use crate::backend::micros;
use crate::backend::stored::{answers_by_name, client_text, tokens_by_id};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, Batch, ChangeOutcome, Claim, Extension, Release, ReleaseOutcome, Response};

// $1 JSON [[name, id, owner, client, ttl, holder, label], …]. A SELECT before ON CONFLICT needs a
// WHERE.
#[rustfmt::skip]
const ACQUIRE: &str = concat!(
grant_vacant!(concat!("
SELECT c.value ->> 0, c.value ->> 1, c.value ->> 2, c.value ->> 3, ", now!(), ", c.value ->> 4, ", now!(), " + (c.value ->> 4),
       ", now!(), ", c.value ->> 5, c.value ->> 6
  FROM json_each($1) AS c WHERE true")), "
RETURNING id, token");

// $1 JSON [[name, id, token], …]. CROSS JOIN keeps the order of the tables: with the statistics of
// a table that was small, an UPDATE … FROM would scan it.
#[rustfmt::skip]
const RELEASE: &str = concat!("
INSERT INTO sqlock_lease (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)
SELECT l.name, l.id, l.owner, l.client, l.token, l.ttl, l.expires_at, l.acquired_at, l.holder, l.label
  FROM json_each($1) AS r CROSS JOIN sqlock_lease AS l
    ON l.name = r.value ->> 0 AND l.id = r.value ->> 1 AND l.token = r.value ->> 2
 WHERE NOT ", is_awaited!("l.name"), "
    ON CONFLICT (name) DO UPDATE ", set_free!(), "
RETURNING name");

// $1 JSON [[name, id, token, lasts], …]
#[rustfmt::skip]
const EXTEND: &str = concat!("
INSERT INTO sqlock_lease (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)
SELECT l.name, l.id, l.owner, l.client, l.token, l.ttl, max(l.expires_at, ", now!(), " + (x.value ->> 3)), l.acquired_at, l.holder,
       l.label
  FROM json_each($1) AS x CROSS JOIN sqlock_lease AS l
    ON l.name = x.value ->> 0 AND l.id = x.value ->> 1 AND l.token = x.value ->> 2
 WHERE ", lease_until!("l"), " > ", now!(), "
    ON CONFLICT (name) DO UPDATE SET expires_at = excluded.expires_at
RETURNING name");

/// Carries out the requests of a batch. `None`: the request changed nothing.
///
/// # Cancel safety
///
/// A dropped batch takes effect completely or not at all.
pub(super) async fn execute(conn: &mut SqliteConnection, batch: &Batch) -> Result<Vec<Option<Response>>, sqlx::Error> {
    match batch {
        Batch::Acquire(claims) => acquire(conn, claims).await,
        Batch::Release(releases) => release(conn, releases).await,
        Batch::Extend(extensions) => extend(conn, extensions).await,
        Batch::Poll(polls) => poll_many(conn, polls).await,
    }
}

async fn acquire(conn: &mut SqliteConnection, claims: &[Claim]) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let batch = json(claims, |claim| {
        (
            claim.name.as_str(),
            claim.id.to_string(),
            claim.owner.to_string(),
            client_text(claim.is_renewed.then_some(claim.client)),
            micros(claim.ttl),
            &*claim.holder,
            &*claim.label,
        )
    })?;
    let tokens = tokens_by_id(&rows(conn, sqlx::query(ACQUIRE).bind(batch)).await?)?;
    let answer = |claim: &Claim| tokens.get(&claim.id).map(|token| Response::Acquired(Ok(*token)));
    Ok(claims.iter().map(answer).collect())
}

async fn release(conn: &mut SqliteConnection, releases: &[Release]) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let batch = json(releases, |release| (release.name.as_str(), release.id.to_string(), release.token.get()))?;
    let rows = rows(conn, sqlx::query(RELEASE).bind(batch)).await?;
    let answer = Response::Released(ReleaseOutcome::Ended { awaited: false });
    answers_by_name(&rows, releases.iter().map(|release| &release.name), &answer)
}

async fn extend(conn: &mut SqliteConnection, extensions: &[Extension]) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let batch = json(extensions, |extension| {
        let id = extension.id.map(|id| id.to_string());
        (extension.name.as_str(), id, extension.token.get(), micros(extension.lasts))
    })?;
    let rows = rows(conn, sqlx::query(EXTEND).bind(batch)).await?;
    let answer = Response::Extended(ChangeOutcome::Done);
    answers_by_name(&rows, extensions.iter().map(|extension| &extension.name), &answer)
}

/// Writes the requests of a batch as JSON.
fn json<'b, R, J: Serialize>(requests: &'b [R], row: impl Fn(&'b R) -> J) -> Result<String, sqlx::Error> {
    let rows: Vec<J> = requests.iter().map(row).collect();
    serde_json::to_string(&rows).map_err(|error| sqlx::Error::Encode(Box::new(error)))
}

/// Polls one name after the other. One statement would save nothing.
async fn poll_many(
    conn: &mut SqliteConnection,
    polls: &[(LockName, AcquisitionId)],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let mut answers = Vec::with_capacity(polls.len());
    for (name, id) in polls {
        answers.push(Some(Response::Polled(poll(conn, name, &[*id]).await?)));
    }
    Ok(answers)
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use sqlx::{Executor as _, Row as _};

    use super::super::differential::open;
    use super::*;

    #[tokio::test]
    async fn batches_use_keys_with_statistics_of_small_table() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut conn = open(&directory.path().join("store.db")).await;
        let statistics = "INSERT INTO sqlite_stat1 VALUES ('sqlock_lease', 'sqlock_lease', '1 1')";
        for sql in ["ANALYZE", statistics, "ANALYZE sqlite_schema"] {
            conn.execute(sql).await.expect("statistics");
        }
        for sql in [RELEASE, EXTEND] {
            let explain = sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}"));
            let plan = sqlx::query(explain).bind("[]").fetch_all(&mut conn).await.expect("a plan");
            let steps: Vec<String> = plan.iter().map(|row| row.try_get("detail").expect("a text")).collect();
            assert!(steps.iter().any(|step| step.starts_with("SEARCH l USING PRIMARY KEY")), "{steps:?}");
        }
    }
}
