//! Carries out requests about several names in one statement: each as it would be carried out alone, or not at all.
//!
//! Every row is locked with SKIP LOCKED, so a batch waits for nobody and cannot deadlock with another one.

use std::collections::{HashMap, HashSet};

use super::lease::token;
use super::store::{Session, now};
use crate::backend::micros;
use crate::backend::stored::{Stored as _, client_text};
use crate::protocol::{Batch, Claim, Release, Released, Response};

// Names that nobody holds and nobody waits for. $1 names, $2 ids, $3 owners, $4 clients, $5 ttls, $6 holders, $7 labels.
#[rustfmt::skip]
const ACQUIRE: &str = concat!("
WITH asked AS (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::text[])
                  AS a (name, id, owner, client, ttl, holder, label)),
free AS MATERIALIZED (
    SELECT l.name
      FROM asked JOIN sqlock_lease AS l ON l.name = asked.name
     WHERE l.id = '' AND l.waiting = 0
       FOR NO KEY UPDATE OF l SKIP LOCKED)
UPDATE sqlock_lease AS l
   SET id = asked.id, owner = asked.owner, client = asked.client, token = greatest(l.token + 1, ", now!(), "), ttl = asked.ttl,
       expires_at = ", now!(), " + asked.ttl, acquired_at = ", now!(), ", holder = asked.holder, label = asked.label
  FROM free JOIN asked ON asked.name = free.name
 WHERE l.name = free.name
RETURNING l.id, l.token");

// Exclusive holdings for which nobody waits. $1 names, $2 ids, $3 tokens.
#[rustfmt::skip]
const RELEASE: &str = "
WITH asked AS (
    SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[]) AS a (name, id, token)),
held AS MATERIALIZED (
    SELECT l.name, l.id
      FROM asked JOIN sqlock_lease AS l ON l.name = asked.name
     WHERE l.id = asked.id AND l.token = asked.token AND l.waiting = 0
       FOR UPDATE OF l SKIP LOCKED)
UPDATE sqlock_lease AS l
   SET id = '', owner = '', client = '', expires_at = 0
  FROM held
 WHERE l.name = held.name
RETURNING held.id";

/// Carries out the requests of a batch. `None`: nothing has come of a request.
pub(super) async fn execute(session: &mut Session<'_>, batch: &Batch) -> Result<Vec<Option<Response>>, sqlx::Error> {
    match batch {
        Batch::Acquire(claims) => acquire(session, claims).await,
        Batch::Release(releases) => release(session, releases).await,
    }
}

async fn acquire(session: &mut Session<'_>, claims: &[Claim]) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let texts = |text: fn(&Claim) -> String| claims.iter().map(text).collect::<Vec<_>>();
    let query = sqlx::query(ACQUIRE)
        .bind(texts(|claim| claim.name.to_string()))
        .bind(texts(|claim| claim.id.to_string()))
        .bind(texts(|claim| claim.owner.to_string()))
        .bind(texts(|claim| client_text(claim.is_kept.then_some(claim.client))))
        .bind(claims.iter().map(|claim| micros(claim.ttl)).collect::<Vec<_>>())
        .bind(texts(|claim| claim.holder.to_string()))
        .bind(texts(|claim| claim.label.to_string()));
    let mut granted = HashMap::new();
    for row in session.rows(query).await? {
        granted.insert(row.text("id")?, token(&row, "token")?);
    }
    let answer = |claim: &Claim| granted.get(&claim.id.to_string()).map(|token| Response::Acquired(Ok(*token)));
    Ok(claims.iter().map(answer).collect())
}

async fn release(session: &mut Session<'_>, releases: &[Release]) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let texts = |text: fn(&Release) -> String| releases.iter().map(text).collect::<Vec<_>>();
    let query = sqlx::query(RELEASE)
        .bind(texts(|release| release.name.to_string()))
        .bind(texts(|release| release.id.to_string()))
        .bind(releases.iter().map(|release| release.token.get()).collect::<Vec<_>>());
    let rows = session.rows(query).await?;
    let ended = rows.iter().map(|row| row.text("id")).collect::<Result<HashSet<_>, _>>()?;
    let answer = |release: &Release| {
        let is_ended = ended.contains(&release.id.to_string());
        is_ended.then_some(Response::Released(Released::Ended { awaited: false }))
    };
    Ok(releases.iter().map(answer).collect())
}
