//! Carries out requests about several names in one [`Script`]. Each has the same effect as alone,
//! or none.
//!
//! The script locks the rows with SKIP LOCKED and continues only if it has locked all of them, so
//! it never waits. The primary key is forced: with the statistics of a table that was empty
//! recently, MySQL would scan the whole table.

use std::collections::{HashMap, HashSet};

use sqlx::{MySqlConnection, Row as _};

use super::acquire::heartbeat_client;
use super::queue::poll_many;
use super::script::{Script, Sending, id_literal, list, name_literal, text_literal};
use crate::backend::stored::TableRow as _;
use crate::backend::{micros, token};
use crate::name::LockName;
use crate::protocol::{Batch, Claim, Release, Released, Response};

// Bind order: names.
#[rustfmt::skip]
const LOCK_FREE: &str = "
SELECT COUNT(*) INTO @sqlock_locked FROM sqlock_lease AS s FORCE INDEX (PRIMARY)
 WHERE s.name IN (?) AND s.id = '' FOR UPDATE SKIP LOCKED";
const COUNT_FREE: &str =
    "SELECT COUNT(*) INTO @sqlock_meant FROM sqlock_lease AS s FORCE INDEX (PRIMARY) WHERE s.name IN (?) AND s.id = ''";

// Assignments run from left to right. Bind order: what each name gets as id, owner, client, ttl,
// holder and label; names.
#[rustfmt::skip]
const ACQUIRE: &str = concat!("
UPDATE sqlock_lease AS l FORCE INDEX (PRIMARY)
   SET l.token = GREATEST(l.token + 1, ", now!(), "), l.id = ?, l.owner = ?, l.client = ?, l.ttl = ?, l.holder = ?, l.label = ?,
       l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + l.ttl
 WHERE @sqlock_locked = @sqlock_meant AND l.name IN (?) AND l.id = '' AND NOT ", is_awaited!("l"));

// The tokens that claims hold: before the update, by an earlier request, and after it. Bind order:
// whether it is after, names, ids.
#[rustfmt::skip]
const SEEN: &str = "
SELECT l.id, l.token, ? AS is_after FROM sqlock_lease AS l FORCE INDEX (PRIMARY) WHERE l.name IN (?) AND l.id IN (?)";

// Bind order: names, ids, tokens.
#[rustfmt::skip]
const LOCK_HELD: &str = "
SELECT COUNT(*) INTO @sqlock_locked FROM sqlock_lease AS s FORCE INDEX (PRIMARY)
 WHERE s.name IN (?) AND s.id IN (?) AND s.token IN (?) FOR UPDATE SKIP LOCKED";
#[rustfmt::skip]
const COUNT_HELD: &str = "
SELECT COUNT(*) INTO @sqlock_meant FROM sqlock_lease AS s FORCE INDEX (PRIMARY) WHERE s.name IN (?) AND s.id IN (?) AND s.token IN (?)";

// The identity is that of the acquisition, which holds one name. Bind order: names, ids, tokens.
#[rustfmt::skip]
const RELEASE: &str = concat!("
UPDATE sqlock_lease AS l FORCE INDEX (PRIMARY)
   SET l.id = '', l.owner = '', l.client = '', l.ttl = 0, l.holder = '', l.label = '', l.acquired_at = ", now!(), ", l.expires_at = 0
 WHERE @sqlock_locked = @sqlock_meant AND l.name IN (?) AND l.id IN (?) AND l.token IN (?) AND NOT ", is_awaited!("l"));

// The names that are held before the update, and those that are free after it. Bind order: names,
// ids, tokens.
#[rustfmt::skip]
const HELD: &str = "
SELECT l.name, l.token, 0 AS is_free FROM sqlock_lease AS l FORCE INDEX (PRIMARY) WHERE l.name IN (?) AND l.id IN (?) AND l.token IN (?)";

// Bind order: names, tokens.
#[rustfmt::skip]
const FREE: &str = "
SELECT l.name, l.token, 1 AS is_free FROM sqlock_lease AS l FORCE INDEX (PRIMARY) WHERE l.name IN (?) AND l.id = '' AND l.token IN (?)";

/// Carries out the requests of a batch. `None`: the request changed nothing.
pub(super) async fn execute(
    conn: &mut MySqlConnection,
    sending: Sending,
    batch: &Batch,
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    match batch {
        Batch::Acquire(claims) => acquire(conn, sending, claims).await,
        Batch::Release(releases) => release(conn, sending, releases).await,
        Batch::Poll(polls) => poll_many(conn, polls).await,
    }
}

async fn acquire(
    conn: &mut MySqlConnection,
    sending: Sending,
    claims: &[Claim],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let names = &*list(claims, |claim| name_literal(&claim.name));
    let mut sorted: Vec<&Claim> = claims.iter().collect();
    sorted.sort_by_key(|claim| &claim.name);
    let by_name = |literal: fn(&Claim) -> String| {
        value_by_name(&sorted.iter().map(|claim| (&claim.name, literal(claim))).collect::<Vec<_>>())
    };
    let mut script = Script::new(sending);
    script.add(LOCK_FREE, &[names]);
    script.add(COUNT_FREE, &[names]);
    let (id, owner) = (by_name(|claim| id_literal(claim.id)), by_name(|claim| id_literal(claim.owner)));
    let (client, ttl) =
        (by_name(|claim| id_literal(heartbeat_client(claim))), by_name(|claim| micros(claim.ttl).to_string()));
    let (holder, label) = (by_name(|claim| text_literal(&claim.holder)), by_name(|claim| text_literal(&claim.label)));
    let ids = &*list(claims, |claim| id_literal(claim.id));
    script.add(SEEN, &["0", names, ids]);
    script.add(ACQUIRE, &[&id, &owner, &client, &ttl, &holder, &label, names]);
    script.add(SEEN, &["1", names, ids]);
    let mut seen = HashMap::new();
    for row in script.rows(conn).await? {
        seen.insert((row.text("id")?, row.number("is_after")? == 1), row.number("token")?);
    }
    let answer = |claim: &Claim| {
        let token_if = |is_after| seen.get(&(claim.id.to_string(), is_after));
        let granted = token_if(true).filter(|_| token_if(false).is_none())?;
        Some(Response::Acquired(Ok(token(*granted)?)))
    };
    Ok(claims.iter().map(answer).collect())
}

/// An expression for the value that belongs to the name of the row `l`. `values` are in the order of
/// their names, so the server finds one of n with log n comparisons.
fn value_by_name(values: &[(&LockName, String)]) -> String {
    match values {
        [] => "NULL".to_owned(),
        // A value that several names share is written once.
        [(_, first), others @ ..] if others.iter().all(|(_, other)| other == first) => first.clone(),
        _ => {
            let (before, from) = values.split_at(values.len() / 2);
            let least = name_literal(from[0].0);
            format!("IF(l.name < {least}, {}, {})", value_by_name(before), value_by_name(from))
        }
    }
}

async fn release(
    conn: &mut MySqlConnection,
    sending: Sending,
    releases: &[Release],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let names = &*list(releases, |release| name_literal(&release.name));
    let ids = &*list(releases, |release| id_literal(release.id));
    let tokens = &*list(releases, |release| release.token.to_string());
    let mut script = Script::new(sending);
    script.add(LOCK_HELD, &[names, ids, tokens]);
    script.add(COUNT_HELD, &[names, ids, tokens]);
    script.add(HELD, &[names, ids, tokens]);
    script.add(RELEASE, &[names, ids, tokens]);
    script.add(FREE, &[names, tokens]);
    let mut seen = HashSet::new();
    for row in script.rows(conn).await? {
        seen.insert((row.try_get::<Vec<u8>, _>("name")?, row.number("token")?, row.number("is_free")? == 1));
    }
    let answer = |release: &Release| {
        let was_seen = |is_free| seen.contains(&(release.name.as_str().into(), release.token.get(), is_free));
        let is_ended = was_seen(false) && was_seen(true);
        is_ended.then_some(Response::Released(Released::Ended { awaited: false }))
    };
    Ok(releases.iter().map(answer).collect())
}
