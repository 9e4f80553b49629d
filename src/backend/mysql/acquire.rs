//! Acquires a name, or joins a holding of the same owner.

use std::time::Duration;

use sqlx::mysql::MySqlQueryResult;
use sqlx::{MySqlConnection, Row as _};

use super::script::{Script, Sending, id_literal, name_literal, read_flag, text_literal};
use super::store::{MySqlQuery, token};
use crate::backend::micros;
use crate::backend::stored::{ENTRIES, NO_ID, client_text};
use crate::protocol::{Claim, CurrentHolder, JoinOutcome, Mode};
use crate::token::FencingToken;

/// The values of the row of a name when a claim is granted. The entry of a share has the details.
pub(super) struct HolderColumns<'a> {
    pub(super) id: String,
    pub(super) owner: String,
    pub(super) client: String,
    pub(super) ttl: i64,
    pub(super) holder: &'a str,
    pub(super) label: &'a str,
}

impl<'a> HolderColumns<'a> {
    pub(super) fn new(claim: &'a Claim) -> Self {
        let ttl = micros(claim.ttl);
        if claim.mode != Mode::Exclusive {
            return Self { ttl, ..Self::none(ENTRIES) };
        }
        let (id, owner, client) = (claim.id.to_string(), claim.owner.to_string(), heartbeat_client(claim));
        Self { id, owner, client, ttl, holder: &claim.holder, label: &claim.label }
    }

    /// No client holds the name.
    pub(super) fn none(id: &str) -> Self {
        Self { id: id.into(), owner: NO_ID.into(), client: NO_ID.into(), ttl: 0, holder: "", label: "" }
    }

    /// Binds the fields in their order.
    pub(super) fn bind<'q>(self, query: MySqlQuery<'q>) -> MySqlQuery<'q>
    where
        'a: 'q,
    {
        query.bind(self.id).bind(self.owner).bind(self.client).bind(self.ttl).bind(self.holder).bind(self.label)
    }
}

/// Returns the client whose heartbeat will renew the lease of a claim.
pub(super) fn heartbeat_client(claim: &Claim) -> String {
    client_text(claim.is_renewed.then_some(claim.client))
}

// The codes of `claim_state!`. From REMAINING on: the remaining time of the holder, 0 if it has
// expired, times two, plus one if its owner is that of the claim. A subquery costs the servers some
// 10 µs even where it is not evaluated, so no condition is written twice.
const MISSING: u64 = 0;
const GRANTABLE: u64 = 1;
const VACANT: u64 = 2;
const SHARED: u64 = 3;
const OWN: u64 = 4;
const OWN_ENTRY: u64 = 5;
const REMAINING: u64 = 16;

/// Evaluates the row of a name for a claim, as a code. Bind order: parameters of `vacant`, id, id,
/// parameters of `shared`, owner.
#[rustfmt::skip]
macro_rules! claim_state {
    (vacant: [$($vacant:tt)*], shared: [$($shared:tt)*]) => {
        concat!("
       CASE WHEN l.id = '' THEN ", $($vacant)*, "
            WHEN l.id = ? THEN 4
            WHEN l.id = 'entries' THEN
                 COALESCE((SELECT IF(o.owner <> '', 5, 3) FROM sqlock_entry AS o WHERE o.name = l.name AND o.id = ? AND o.token > 0), ",
                    $($shared)*, ")
            ELSE 16 + 2 * GREATEST(", lease_until!("l"), " - ", now!(), ", 0) + (l.owner = ?) END")
    };
}

/// How often an acquisition is tried when other clients interfere.
const TRIES: usize = 4;

pub(super) async fn acquire(
    conn: &mut MySqlConnection,
    sending: Sending,
    claim: &Claim,
) -> Result<Result<FencingToken, CurrentHolder>, sqlx::Error> {
    let mut refusal = CurrentHolder::Unknown;
    for _ in 0..TRIES {
        let (code, granted) = match claim.mode {
            Mode::Exclusive => acquire_exclusive(conn, claim).await?,
            Mode::Shared { units, permits } => acquire_share(conn, sending, claim, (units, permits)).await?,
        };
        let granted = match code {
            _ if granted.is_some() => granted,
            OWN => prolong_claim(conn, PROLONG_LEASE, claim).await?,
            OWN_ENTRY => prolong_claim(conn, PROLONG_ENTRY, claim).await?,
            VACANT => return Ok(Err(CurrentHolder::Vacant)),
            SHARED => return Ok(Err(CurrentHolder::Unknown)),
            REMAINING.. => {
                let remaining = Duration::from_micros((code - REMAINING) / 2);
                let owner = (code % 2 == 1).then_some(claim.owner);
                let is_valid = !remaining.is_zero();
                return Ok(Err(if is_valid {
                    CurrentHolder::Valid { owner, remaining }
                } else {
                    CurrentHolder::Vacant
                }));
            }
            // The name had no row. An entry waits, or another client has created the row in the
            // meantime.
            _ => {
                refusal = CurrentHolder::Vacant;
                None
            }
        };
        if let Some(granted) = granted {
            return token(granted).map(Ok);
        }
    }
    Ok(Err(refusal))
}

// A range of one key: InnoDB waits for a locked row that it looks up by key. In a range, it checks
// the last committed version of a locked row and waits only if that matches. Bind order:
// HolderColumns, ttl, name, name, id, id, owner.
#[rustfmt::skip]
const ACQUIRE: &str = concat!("
UPDATE sqlock_lease AS l
   SET l.token = LAST_INSERT_ID(GREATEST(l.token + 1, ", now!(), ")), l.id = ?, l.owner = ?, l.client = ?, l.ttl = ?, l.holder = ?,
       l.label = ?, l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + ?
 WHERE l.name >= ? AND l.name < CONCAT(?, X'00')
   AND LAST_INSERT_ID(", claim_state!(vacant: ["IF(", is_awaited!("l"), ", 2, 1)"], shared: ["3"]), ") = 1
 LIMIT 1");

// Bind order: name, HolderColumns, ttl, name.
#[rustfmt::skip]
const CREATE: &str = concat!("
INSERT IGNORE INTO sqlock_lease (name, token, acquired_at, id, owner, client, ttl, holder, label, expires_at)
SELECT ?, LAST_INSERT_ID(", now!(), "), ", now!(), ", ?, ?, ?, ?, ?, ?, ", now!(), " + ?
  FROM DUAL
 WHERE NOT EXISTS (SELECT 1 FROM sqlock_entry AS w WHERE w.name = ? AND w.token = 0)");

/// Acquires a name exclusively. Returns the code of the row, and the token if it was granted.
async fn acquire_exclusive(conn: &mut MySqlConnection, claim: &Claim) -> Result<(u64, Option<u64>), sqlx::Error> {
    let (name, id) = (claim.name.as_str().as_bytes(), claim.id.to_string());
    let answer = |done: MySqlQueryResult| {
        let code = done.last_insert_id();
        (code, (done.rows_affected() > 0).then_some(code))
    };
    let query = HolderColumns::new(claim).bind(sqlx::query(ACQUIRE)).bind(micros(claim.ttl)).bind(name).bind(name);
    let done = query.bind(&id).bind(&id).bind(claim.owner.to_string()).execute(&mut *conn).await?;
    if done.rows_affected() > 0 || done.last_insert_id() != MISSING {
        return Ok(answer(done));
    }
    let query = HolderColumns::new(claim).bind(sqlx::query(CREATE).bind(name)).bind(micros(claim.ttl)).bind(name);
    let (_, granted) = answer(query.execute(conn).await?);
    Ok((MISSING, granted))
}

/// Evaluates the row of a name for a claim that shares the name and needs free permits. Bind order:
/// units, permits, id, id, units, permits, owner.
#[rustfmt::skip]
macro_rules! share_claim_state {
    () => {
        claim_state!(
            vacant: ["IF(? <= ? AND NOT ", is_awaited!("l"), ", 1, 2)"],
            shared: ["
                    IF((SELECT MIN(e.units) > 0 AND SUM(e.units) + ? <= ? FROM sqlock_entry AS e FORCE INDEX (sqlock_entry_in_order)
                         WHERE e.name = l.name AND e.token > 0)
                       AND NOT ", is_awaited!("l"), ", 1, 3)"])
    };
}

// Bind order: units, permits, id, id, units, permits, owner, name.
#[rustfmt::skip]
const SHARE_STATE: &str = concat!("SELECT CAST(", share_claim_state!(), " AS UNSIGNED) FROM sqlock_lease AS l WHERE l.name = ?");

// Bind order: name.
#[rustfmt::skip]
pub(super) const CREATE_FREE: &str = "
INSERT IGNORE INTO sqlock_lease (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)
VALUES (?, '', '', '', 0, 0, 0, 0, '', '')";

// Every client that acquires a share locks the row briefly, so this statement waits. Bind order:
// name.
#[rustfmt::skip]
const SHARE_LOCK: &str = "
SELECT COALESCE(MAX(s.token), 0) INTO @sqlock_token FROM sqlock_lease AS s WHERE s.name = ? FOR UPDATE";

// Bind order: as SHARE_STATE.
#[rustfmt::skip]
const SHARE_CHECK: &str = concat!("
SELECT COALESCE((SELECT ", share_claim_state!(), " FROM sqlock_lease AS l WHERE l.name = ?), 0),
       GREATEST(@sqlock_token + 1, ", now!(), ")
  INTO @sqlock_state, @sqlock_token");

// Bind order: name.
const SHARE_DECIDE: &str = "SELECT IF(@sqlock_state = 1, ?, NULL) INTO @sqlock_name";

const SHARE_RESULT: &str = "SELECT CAST(@sqlock_state AS UNSIGNED), CAST(@sqlock_token AS UNSIGNED)";

/// Acquires a share. A read without locks finds refusals; only a grant, which writes two rows,
/// needs a transaction. Returns the code of the row, and the token if it was granted.
async fn acquire_share(
    conn: &mut MySqlConnection,
    sending: Sending,
    claim: &Claim,
    (units, permits): (u32, u32),
) -> Result<(u64, Option<u64>), sqlx::Error> {
    let query =
        sqlx::query(SHARE_STATE).bind(units).bind(permits).bind(claim.id.to_string()).bind(claim.id.to_string());
    let query = query.bind(units).bind(permits).bind(claim.owner.to_string()).bind(claim.name.as_str().as_bytes());
    let row = query.fetch_optional(&mut *conn).await?;
    let code: u64 = row.map_or(Ok(MISSING), |row| row.try_get(0))?;
    if code > GRANTABLE {
        return Ok((code, None));
    }
    let (name, id, owner) = (&*name_literal(&claim.name), &*id_literal(claim.id), &*id_literal(claim.owner));
    let (units, permits) = (&*units.to_string(), &*permits.to_string());
    if code == MISSING {
        // Outside the transaction: clients that insert the same row share a lock on it, and would
        // deadlock on upgrading it.
        sqlx::query(CREATE_FREE).bind(claim.name.as_str().as_bytes()).execute(&mut *conn).await?;
    }
    let mut script = Script::new(sending);
    script.add(SHARE_LOCK, &[name]);
    script.add(SHARE_CHECK, &[units, permits, id, id, units, permits, owner, name]);
    script.add(SHARE_DECIDE, &[name]);
    grant_claim(&mut script, claim);
    let row = script.run(conn, SHARE_RESULT).await?;
    let code: u64 = row.try_get(0)?;
    let granted = row.try_get(1)?;
    Ok((code, (code == GRANTABLE).then_some(granted)))
}

// Bind order: HolderColumns, ttl.
#[rustfmt::skip]
const GRANT_CLAIM: &str = concat!("
UPDATE sqlock_lease
   SET token = @sqlock_token, id = ?, owner = ?, client = ?, ttl = ?, holder = ?, label = ?,
       expires_at = ", now!(), " + ?, acquired_at = ", now!(), "
 WHERE name = @sqlock_name");

// Bind order: id, owner, client, is_renewed, units, permits, ttl, ttl, holder, label.
#[rustfmt::skip]
const ADD_SHARE: &str = concat!("
INSERT INTO sqlock_entry (", entry_columns!(), ")
SELECT l.name, ?, ?, ?, ?, ?, ?, @sqlock_token, ?, 0, ", now!(), " + ?, ", now!(), ", ?, ?
  FROM sqlock_lease AS l WHERE l.name = @sqlock_name ", overwrite!());

/// Adds statements to a script that grant the name to a claim without an entry, with the token
/// `@sqlock_token`.
pub(super) fn grant_claim(script: &mut Script, claim: &Claim) {
    let HolderColumns { id, owner, client, ttl, holder, label } = HolderColumns::new(claim);
    let (id, owner, client, ttl) = (id_literal(id), id_literal(owner), id_literal(client), &*ttl.to_string());
    let (holder, label) = (text_literal(holder), text_literal(label));
    script.add(GRANT_CLAIM, &[&id, &owner, &client, ttl, &holder, &label, ttl]);
    if claim.mode != Mode::Exclusive {
        let (units, permits) = claim.mode.stored();
        let (units, permits) = (units.to_string(), permits.to_string());
        let (id, owner, client) = (id_literal(claim.id), id_literal(claim.owner), id_literal(heartbeat_client(claim)));
        let (holder, label) = (text_literal(&claim.holder), text_literal(&claim.label));
        let is_renewed = if claim.is_renewed { "1" } else { "0" };
        script.add(ADD_SHARE, &[&id, &owner, &client, is_renewed, &units, &permits, ttl, ttl, &holder, &label]);
    }
}

// A repeated claim prolongs its holding, and shortens nothing. Bind order: client, ttl, ttl, name,
// id.
#[rustfmt::skip]
const PROLONG_LEASE: &str = concat!("
UPDATE sqlock_lease
   SET token = LAST_INSERT_ID(token), client = IF(client = '', ?, client), ttl = GREATEST(ttl, ?),
       expires_at = GREATEST(expires_at, ", now!(), " + ?)
 WHERE name = ? AND id = ?");

#[rustfmt::skip]
const PROLONG_ENTRY: &str = concat!("
UPDATE sqlock_entry
   SET token = LAST_INSERT_ID(token), client = IF(client = '', ?, client), ttl = GREATEST(ttl, ?),
       expires_at = GREATEST(expires_at, ", now!(), " + ?)
 WHERE name = ? AND id = ? AND token > 0 AND owner <> ''");

async fn prolong_claim(
    conn: &mut MySqlConnection,
    sql: &'static str,
    claim: &Claim,
) -> Result<Option<u64>, sqlx::Error> {
    let ttl = micros(claim.ttl);
    let query = sqlx::query(sql).bind(heartbeat_client(claim)).bind(ttl).bind(ttl);
    let done = query.bind(claim.name.as_str().as_bytes()).bind(claim.id.to_string()).execute(conn).await?;
    Ok((done.rows_affected() > 0).then_some(done.last_insert_id()))
}

// ---- join

// Bind order: name, owner.
#[rustfmt::skip]
const JOIN_LOCK: &str = "
SELECT COUNT(*) INTO @sqlock_locked FROM sqlock_lease AS s WHERE s.name = ? AND s.owner = ? FOR UPDATE SKIP LOCKED";

// Whether the owner holds the name exclusively, by another acquisition. Bind order: id, owner,
// name, owner.
#[rustfmt::skip]
const JOIN_CHECK: &str = concat!("
SELECT COUNT(*), COALESCE(MAX(l.token), 0) INTO @sqlock_held, @sqlock_token
  FROM sqlock_lease AS l
 WHERE (", is_held_alone!("l"), " AND l.id <> ? AND ", lease_until!("l"), " > ", now!(), "
        OR l.id = 'entries' AND EXISTS (SELECT 1 FROM sqlock_entry AS e FORCE INDEX (sqlock_entry_in_order)
                                         WHERE e.name = l.name AND e.token = l.token AND e.units = 0 AND e.owner = ?
                                           AND ", entry_until!("e"), " > ", now!(), "))
   AND l.name = ? AND l.owner = ?");

// Bind order: name.
const JOIN_DECIDE: &str = "SELECT IF(@sqlock_locked AND @sqlock_held, ?, NULL) INTO @sqlock_name";

#[rustfmt::skip]
const JOIN_FIRST: &str = concat!("
INSERT INTO sqlock_entry (", entry_columns!(), ")
SELECT l.name, l.id, l.owner, l.client, 1, 0, 0, l.token, l.ttl, 0, l.expires_at, l.acquired_at, l.holder, l.label
  FROM sqlock_lease AS l WHERE l.name = @sqlock_name AND l.id <> 'entries' ", overwrite!());

// An acquisition without a label gets the one of the holding it joins. Bind order: label, name,
// label.
#[rustfmt::skip]
const JOIN_LABEL: &str = "
SELECT IF(? = '', COALESCE((SELECT IF(l.id <> 'entries', l.label, (SELECT MAX(e.label) FROM sqlock_entry AS e
                                                                    WHERE e.name = l.name AND e.token = l.token))
                              FROM sqlock_lease AS l WHERE l.name = ?), ''), ?) INTO @sqlock_label";

/// Whether an earlier request has added the entry.
macro_rules! joined {
    () => {
        "sqlock_entry.token = VALUES(token) AND sqlock_entry.owner <> ''"
    };
}
// Assignments run from left to right. Bind order: id, client, ttl, ttl, holder.
#[rustfmt::skip]
const JOIN_OWN: &str = concat!("
INSERT INTO sqlock_entry (", entry_columns!(), ")
SELECT l.name, ?, l.owner, ?, 1, 0, 0, l.token, ?, 0, ", now!(), " + ?, ", now!(), ", ?, @sqlock_label
  FROM sqlock_lease AS l WHERE l.name = @sqlock_name
    ON DUPLICATE KEY UPDATE
       client = IF(", joined!(), " AND sqlock_entry.client <> '', sqlock_entry.client, VALUES(client)),
       ttl = GREATEST(VALUES(ttl), IF(", joined!(), ", sqlock_entry.ttl, 0)),
       expires_at = GREATEST(VALUES(expires_at), IF(", joined!(), ", sqlock_entry.expires_at, 0)),
       owner = VALUES(owner), is_renewed = 1, units = 0, permits = 0, token = VALUES(token), arrived_at = 0,
       acquired_at = VALUES(acquired_at), holder = VALUES(holder), label = VALUES(label)");

// The row is written although it may have entries already: on Galera, a hand-over on another node
// conflicts only with what this transaction writes. Entries have an expiry of their own.
const JOIN_SHARE: &str =
    "UPDATE sqlock_lease SET id = 'entries', client = '', expires_at = expires_at + 1 WHERE name = @sqlock_name";

#[rustfmt::skip]
const JOIN_RESULT: &str = "
SELECT CAST(@sqlock_held AS SIGNED), CAST(@sqlock_name IS NOT NULL AS SIGNED), CAST(@sqlock_token AS UNSIGNED)";

pub(super) async fn join(
    conn: &mut MySqlConnection,
    sending: Sending,
    claim: &Claim,
) -> Result<JoinOutcome, sqlx::Error> {
    let (name, id, owner) = (&*name_literal(&claim.name), &*id_literal(claim.id), &*id_literal(claim.owner));
    let ttl = &*micros(claim.ttl).to_string();
    let (holder, label) = (&*text_literal(&claim.holder), &*text_literal(&claim.label));
    let mut script = Script::new(sending);
    script.add(JOIN_LOCK, &[name, owner]);
    script.add(JOIN_CHECK, &[id, owner, name, owner]);
    script.add(JOIN_DECIDE, &[name]);
    script.add(JOIN_LABEL, &[label, name, label]);
    script.add(JOIN_FIRST, &[]);
    script.add(JOIN_OWN, &[id, &id_literal(heartbeat_client(claim)), ttl, ttl, holder]);
    script.add(JOIN_SHARE, &[]);
    let row = script.run(conn, JOIN_RESULT).await?;
    Ok(match (read_flag(&row, 0)?, read_flag(&row, 1)?) {
        (_, true) => JoinOutcome::Done(token(row.try_get(2)?)?),
        (true, false) => JoinOutcome::Locked,
        (false, false) => JoinOutcome::NotHeld,
    })
}
