//! Carries out requests about several names in one text. Each has the same effect as alone, or
//! none.
//!
//! The UPDATE never waits. On MariaDB it fails if it meets a locked row. On MySQL it is part of a
//! transaction, which locks the rows with SKIP LOCKED first, and continues only if it has locked
//! all of them. The primary key is forced: with the statistics of a table that was empty recently,
//! the servers would scan the whole table.

use std::collections::{HashMap, HashSet};

use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row as _};

use super::acquire::{self, heartbeat_client};
use super::queue::poll_many;
use super::script::{Script, Sending, id_literal, list, name_literal, text_literal};
use super::store::{Flavor, Nowait, is_locked};
use crate::backend::stored::TableRow as _;
use crate::backend::{micros, token};
use crate::name::LockName;
use crate::protocol::{Batch, ChangeOutcome, Claim, Extension, Release, ReleaseOutcome, Response};

// Rows of held names count as well: the UPDATE would wait for a fence on one of them, because it
// locks each row before it reads the id. Bind order: names.
#[rustfmt::skip]
const LOCK_ALL: &str = "
SELECT COUNT(*) INTO @sqlock_locked FROM sqlock_lease AS s FORCE INDEX (PRIMARY)
 WHERE s.name IN (?) FOR UPDATE SKIP LOCKED";
const COUNT_ALL: &str =
    "SELECT COUNT(*) INTO @sqlock_meant FROM sqlock_lease AS s FORCE INDEX (PRIMARY) WHERE s.name IN (?)";

/// An UPDATE of several rows `l` of `sqlock_lease`.
#[rustfmt::skip]
macro_rules! update_leases {
    (set: [$($set:tt)*], condition: [$($condition:tt)*]) => {
        Nowait {
            mysql: concat!("
UPDATE sqlock_lease AS l FORCE INDEX (PRIMARY) SET ", $($set)*, "
 WHERE @sqlock_locked = @sqlock_meant AND ", $($condition)*),
            mariadb: concat!("SET STATEMENT innodb_lock_wait_timeout = 0 FOR
UPDATE sqlock_lease AS l FORCE INDEX (PRIMARY) SET ", $($set)*, "
 WHERE ", $($condition)*),
        }
    };
}

// Assignments run from left to right. Bind order: what each name gets as id, owner, client, ttl,
// holder and label; names.
#[rustfmt::skip]
const ACQUIRE: Nowait = update_leases!(
    set: ["l.token = GREATEST(l.token + 1, ", now!(), "), l.id = ?, l.owner = ?, l.client = ?, l.ttl = ?, l.holder = ?, l.label = ?,
       l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + l.ttl"],
    condition: ["l.name IN (?) AND l.id = '' AND NOT ", is_awaited!("l")]);

const START: &str = concat!("SET @sqlock_started = ", now!());

// The claims that hold, and whether their leases last as long as those granted since the start.
// Others were granted by an earlier request. Bind order: names, ids.
#[rustfmt::skip]
const ACQUIRED: &str = "
SELECT l.id, l.token, l.expires_at >= @sqlock_started + l.ttl AS is_new
  FROM sqlock_lease AS l FORCE INDEX (PRIMARY) WHERE l.name IN (?) AND l.id IN (?)";

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
const RELEASE: Nowait = update_leases!(
    set: ["l.id = '', l.owner = '', l.client = '', l.ttl = 0, l.holder = '', l.label = '', l.acquired_at = ", now!(), ", l.expires_at = 0"],
    condition: ["l.name IN (?) AND l.id IN (?) AND l.token IN (?) AND NOT ", is_awaited!("l")]);

// The holdings before the UPDATE. Bind order: names, ids, tokens.
#[rustfmt::skip]
const HELD: &str = "
SELECT l.name, l.token, 0 AS is_after FROM sqlock_lease AS l FORCE INDEX (PRIMARY) WHERE l.name IN (?) AND l.id IN (?) AND l.token IN (?)";

// The names whose holding may not have been released: their token, or the highest one that was
// taken away from its holder. On MariaDB, an acquisition of the owner may have joined before the
// UPDATE; the holding is an entry then. Bind order: ids, names, ids, the lowest token.
#[rustfmt::skip]
const NOT_RELEASED: &str = "
SELECT l.name, IF(l.id IN (?) OR l.id = 'entries', l.token, l.lost) AS token, 1 AS is_after
  FROM sqlock_lease AS l FORCE INDEX (PRIMARY)
 WHERE l.name IN (?) AND (l.id IN (?) OR l.id = 'entries' OR l.lost >= ?)";

// Bind order: what each name gets as its remaining time; names, ids, tokens.
#[rustfmt::skip]
const EXTEND: Nowait = update_leases!(
    set: ["l.expires_at = GREATEST(l.expires_at, ", now!(), " + ?)"],
    condition: ["l.name IN (?) AND l.id IN (?) AND l.token IN (?) AND ", lease_until!("l"), " > ", now!()]);

/// How long the holdings last without a heartbeat.
#[rustfmt::skip]
macro_rules! extended {
    () => {
        "
SELECT l.name, l.token, l.expires_at - @sqlock_started AS lasts
  FROM sqlock_lease AS l FORCE INDEX (PRIMARY) WHERE l.name IN (?) AND l.id IN (?) AND l.token IN (?)"
    };
}

// A holding may last long enough although the UPDATE did not change it. Bind order: names, ids,
// tokens.
const EXTENDED: Nowait =
    Nowait { mysql: concat!(extended!(), " AND @sqlock_locked = @sqlock_meant"), mariadb: extended!() };

/// Carries out the requests of a batch. `None`: the request changed nothing.
pub(super) async fn execute(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    sending: Sending,
    batch: &Batch,
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    match batch {
        Batch::Acquire(claims) => acquire(conn, flavor, sending, claims).await,
        Batch::Release(releases) => release(conn, flavor, sending, releases).await,
        Batch::Extend(extensions) => extend(conn, flavor, sending, extensions).await,
        Batch::Poll(polls) => poll_many(conn, polls).await,
    }
}

/// Runs the script of an [`update_leases`]. `None`: it met a locked row and changed nothing.
async fn run(script: Script, conn: &mut MySqlConnection, flavor: Flavor) -> Result<Option<Vec<MySqlRow>>, sqlx::Error> {
    match script.rows(conn).await {
        Err(error) if is_locked(flavor, &error) => Ok(None),
        rows => rows.map(Some),
    }
}

async fn acquire(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    sending: Sending,
    claims: &[Claim],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let names = &*list(claims, |claim| name_literal(&claim.name));
    let mut sorted: Vec<&Claim> = claims.iter().collect();
    sorted.sort_by_key(|claim| &claim.name);
    let by_name = |literal: fn(&Claim) -> String| {
        value_by_name(&sorted.iter().map(|claim| (&claim.name, literal(claim))).collect::<Vec<_>>())
    };
    let (id, owner) = (by_name(|claim| id_literal(claim.id)), by_name(|claim| id_literal(claim.owner)));
    let (client, ttl) =
        (by_name(|claim| id_literal(heartbeat_client(claim))), by_name(|claim| micros(claim.ttl).to_string()));
    let (holder, label) = (by_name(|claim| text_literal(&claim.holder)), by_name(|claim| text_literal(&claim.label)));
    let ids = &*list(claims, |claim| id_literal(claim.id));
    let mut script = begin(flavor, sending, [LOCK_ALL, COUNT_ALL], &[names]);
    script.add(START, &[]);
    script.add(ACQUIRE.sql(flavor), &[&id, &owner, &client, &ttl, &holder, &label, names]);
    script.add(ACQUIRED, &[names, ids]);
    let Some(rows) = run(script, conn, flavor).await? else {
        return Ok(vec![None; claims.len()]);
    };
    let mut held = HashMap::new();
    for row in rows {
        held.insert(row.text("id")?, (token(row.number("token")?), row.number("is_new")? == 1));
    }
    let mut responses = Vec::with_capacity(claims.len());
    for claim in claims {
        responses.push(match held.get(&claim.id.to_string()) {
            Some((token, true)) => token.map(|token| Response::Acquired(Ok(token))),
            Some((_, false)) => Some(Response::Acquired(acquire::acquire(conn, sending, claim).await?)),
            None => None,
        });
    }
    Ok(responses)
}

/// An expression for the value that belongs to the name of the row `l`. `values` are in the order
/// of their names, so the server finds one of n with log n comparisons.
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
    flavor: Flavor,
    sending: Sending,
    releases: &[Release],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let names = &*list(releases, |release| name_literal(&release.name));
    let ids = &*list(releases, |release| id_literal(release.id));
    let tokens = &*list(releases, |release| release.token.to_string());
    let lowest = releases.iter().map(|release| release.token.get()).min().unwrap_or_default().to_string();
    let mut script = begin(flavor, sending, [LOCK_HELD, COUNT_HELD], &[names, ids, tokens]);
    script.add(HELD, &[names, ids, tokens]);
    script.add(RELEASE.sql(flavor), &[names, ids, tokens]);
    script.add(NOT_RELEASED, &[ids, names, ids, &lowest]);
    let Some(rows) = run(script, conn, flavor).await? else {
        return Ok(vec![None; releases.len()]);
    };
    let (mut held, mut not_released) = (HashSet::new(), HashMap::new());
    for row in rows {
        let (name, token) = (row.try_get::<Vec<u8>, _>("name")?, row.number("token")?);
        if row.number("is_after")? == 1 {
            not_released.insert(name, token);
        } else {
            held.insert((name, token));
        }
    }
    let answer = |release: &Release| {
        let (name, token) = (release.name.as_str().as_bytes().to_vec(), release.token.get());
        let stands = not_released.get(&name).is_some_and(|not_released| *not_released >= token);
        let is_ended = held.contains(&(name, token)) && !stands;
        is_ended.then_some(Response::Released(ReleaseOutcome::Ended { awaited: false }))
    };
    Ok(releases.iter().map(answer).collect())
}

async fn extend(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    sending: Sending,
    extensions: &[Extension],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let names = &*list(extensions, |extension| name_literal(&extension.name));
    let ids = &*list(extensions, |extension| extension.id.map_or_else(|| "''".to_owned(), id_literal));
    let tokens = &*list(extensions, |extension| extension.token.to_string());
    let mut lasts: Vec<_> =
        extensions.iter().map(|extension| (&extension.name, micros(extension.lasts).to_string())).collect();
    lasts.sort();
    let mut script = begin(flavor, sending, [LOCK_HELD, COUNT_HELD], &[names, ids, tokens]);
    script.add(START, &[]);
    script.add(EXTEND.sql(flavor), &[&value_by_name(&lasts), names, ids, tokens]);
    script.add(EXTENDED.sql(flavor), &[names, ids, tokens]);
    let Some(rows) = run(script, conn, flavor).await? else {
        return Ok(vec![None; extensions.len()]);
    };
    let mut held = HashMap::new();
    for row in rows {
        held.insert((row.try_get::<Vec<u8>, _>("name")?, row.number("token")?), row.number("lasts")?);
    }
    let answer = |extension: &Extension| {
        let lasts = held.get(&(extension.name.as_str().as_bytes().to_vec(), extension.token.get()))?;
        (*lasts >= micros(extension.lasts)).then_some(Response::Extended(ChangeOutcome::Done))
    };
    Ok(extensions.iter().map(answer).collect())
}

/// Begins the script of an [`update_leases`]. On MySQL, the rows are locked and counted first.
fn begin(flavor: Flavor, sending: Sending, [lock, count]: [&str; 2], literals: &[&str]) -> Script {
    match flavor {
        Flavor::MySql => {
            let mut script = Script::new(sending);
            script.add(lock, literals);
            script.add(count, literals);
            script
        }
        Flavor::MariaDb => Script::in_autocommit(sending),
    }
}
