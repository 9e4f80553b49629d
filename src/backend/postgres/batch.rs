//! Carries out requests about several names in one statement. Each has the same effect as alone, or
//! none.
//!
//! Every row is locked with SKIP LOCKED, so a batch waits only for another that creates the same
//! rows, in the same order.
//!
//! INSERT … ON CONFLICT writes the rows, because it finds them by key. For the joins of an UPDATE,
//! a plan made when the table was empty would scan the whole table.

use super::queue::poll_many;
use super::store::{Connection, commit_lazily, now};
use crate::backend::micros;
use crate::backend::stored::{answers_by_name, client_text, tokens_by_id};
use crate::protocol::{Batch, ChangeOutcome, Claim, Extension, Release, ReleaseOutcome, Response};

// Names without holder and waiter, and names without a row. $1 names, $2 ids, $3 owners, $4
// clients, $5 ttls, $6 holders, $7 labels.
#[rustfmt::skip]
const ACQUIRE: &str = concat!("
WITH requested AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::text[])
                  AS a (name, id, owner, client, ttl, holder, label)),
free AS MATERIALIZED (
    SELECT requested.name
      FROM requested
     CROSS JOIN LATERAL (SELECT FROM sqlock_lease AS l
                          WHERE l.name = requested.name AND l.id = '' AND l.waiting = 0
                            FOR NO KEY UPDATE SKIP LOCKED) AS l),
new AS MATERIALIZED (
    SELECT requested.name
      FROM requested
      LEFT JOIN LATERAL (SELECT true AS is_there FROM sqlock_lease AS l WHERE l.name = requested.name LIMIT 1) AS l ON true
     WHERE l.is_there IS NULL)
INSERT INTO sqlock_lease AS l (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)
SELECT name, id, owner, client, ", now!(), ", ttl, ", now!(), " + ttl, ", now!(), ", holder, label
  FROM requested
 WHERE name IN (SELECT name FROM free) OR name IN (SELECT name FROM new)
 ORDER BY name
    ON CONFLICT (name) DO UPDATE
   SET id = excluded.id, owner = excluded.owner, client = excluded.client, token = greatest(l.token + 1, excluded.token),
       ttl = excluded.ttl, expires_at = excluded.expires_at, acquired_at = excluded.acquired_at, holder = excluded.holder,
       label = excluded.label
 WHERE l.id = '' AND l.waiting = 0
RETURNING id, token");

// Exclusive holdings without waiters. $1 names, $2 ids, $3 tokens, $4 as in the release of one
// name.
#[rustfmt::skip]
const RELEASE: &str = concat!("
WITH requested AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[]) AS a (name, id, token)),
held AS MATERIALIZED (
    SELECT l.*
      FROM requested
     CROSS JOIN LATERAL (SELECT l.* FROM sqlock_lease AS l
                          WHERE l.name = requested.name AND l.id = requested.id AND l.token = requested.token AND l.waiting = 0
                            FOR UPDATE SKIP LOCKED) AS l)
INSERT INTO sqlock_lease AS l (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)
SELECT name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label FROM held
    ON CONFLICT (name) DO UPDATE
   SET id = '', owner = '', client = '', expires_at = 0
 WHERE l.id = excluded.id AND l.token = excluded.token AND l.waiting = 0 AND (SELECT ", commit_lazily!("$4"), ")
RETURNING name");

// Valid exclusive holdings. $1 names, $2 ids, $3 tokens, $4 how long they last.
#[rustfmt::skip]
const EXTEND: &str = concat!("
WITH requested AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[]) AS a (name, id, token, lasts)),
held AS MATERIALIZED (
    SELECT l.*, requested.lasts
      FROM requested
     CROSS JOIN LATERAL (SELECT l.* FROM sqlock_lease AS l
                          WHERE l.name = requested.name AND l.id = requested.id AND l.token = requested.token
                            AND (l.expires_at > ", now!(), "
                                 OR EXISTS (SELECT FROM sqlock_client AS c WHERE c.id = l.client AND c.beat_at + l.ttl > ", now!(), "))
                            FOR NO KEY UPDATE SKIP LOCKED) AS l)
INSERT INTO sqlock_lease AS l (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)
SELECT name, id, owner, client, token, ttl, greatest(expires_at, ", now!(), " + lasts), acquired_at, holder, label FROM held
    ON CONFLICT (name) DO UPDATE SET expires_at = excluded.expires_at
 WHERE l.id = excluded.id AND l.token = excluded.token
RETURNING name");

/// Carries out the requests of a batch. `None`: the request changed nothing.
pub(super) async fn execute(conn: &mut Connection<'_>, batch: &Batch) -> Result<Vec<Option<Response>>, sqlx::Error> {
    match batch {
        Batch::Acquire(claims) => acquire(conn, claims).await,
        Batch::Release(releases) => release(conn, releases).await,
        Batch::Extend(extensions) => extend(conn, extensions).await,
        Batch::Poll(polls) => poll_many(conn, polls).await,
    }
}

async fn acquire(conn: &mut Connection<'_>, claims: &[Claim]) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let client = |claim: &Claim| client_text(claim.is_renewed.then_some(claim.client));
    let query = sqlx::query(ACQUIRE)
        .bind(claims.iter().map(|claim| claim.name.as_str()).collect::<Vec<_>>())
        .bind(claims.iter().map(|claim| claim.id.to_string()).collect::<Vec<_>>())
        .bind(claims.iter().map(|claim| claim.owner.to_string()).collect::<Vec<_>>())
        .bind(claims.iter().map(client).collect::<Vec<_>>())
        .bind(claims.iter().map(|claim| micros(claim.ttl)).collect::<Vec<_>>())
        .bind(claims.iter().map(|claim| &*claim.holder).collect::<Vec<_>>())
        .bind(claims.iter().map(|claim| &*claim.label).collect::<Vec<_>>());
    let tokens = tokens_by_id(&conn.rows(query).await?)?;
    let answer = |claim: &Claim| tokens.get(&claim.id).map(|token| Response::Acquired(Ok(*token)));
    Ok(claims.iter().map(answer).collect())
}

async fn release(conn: &mut Connection<'_>, releases: &[Release]) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let query = sqlx::query(RELEASE)
        .bind(releases.iter().map(|release| release.name.as_str()).collect::<Vec<_>>())
        .bind(releases.iter().map(|release| release.id.to_string()).collect::<Vec<_>>())
        .bind(releases.iter().map(|release| release.token.get()).collect::<Vec<_>>())
        .bind(conn.settings.may_commit_lazily());
    let answer = Response::Released(ReleaseOutcome::Ended { awaited: false });
    answers_by_name(&conn.rows(query).await?, releases.iter().map(|release| &release.name), &answer)
}

async fn extend(conn: &mut Connection<'_>, extensions: &[Extension]) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let query = sqlx::query(EXTEND)
        .bind(extensions.iter().map(|extension| extension.name.as_str()).collect::<Vec<_>>())
        .bind(extensions.iter().map(|extension| extension.id.map(|id| id.to_string())).collect::<Vec<_>>())
        .bind(extensions.iter().map(|extension| extension.token.get()).collect::<Vec<_>>())
        .bind(extensions.iter().map(|extension| micros(extension.lasts)).collect::<Vec<_>>());
    let answer = Response::Extended(ChangeOutcome::Done);
    answers_by_name(&conn.rows(query).await?, extensions.iter().map(|extension| &extension.name), &answer)
}
