//! Changes holdings: expiry, mode and token, and asks for their release.

use sqlx::{MySqlConnection, Row as _};

use super::queue::read_row;
use super::script::{AMENDED, LOCK_NAME, Script, Sending, amended, id_literal, name_literal, read_flag};
use super::store::{Attempt, Flavor, MySqlQuery, Nowait, attempt};
use crate::backend::micros;
use crate::name::LockName;
use crate::protocol::{AcquisitionId, AskOutcome, ChangeOutcome, ClientChange, Extension, Holder, Mode};
use crate::token::FencingToken;

// ---- extend

/// Bind order: renamed, renamed, how the client changes, client, client, ttl, lasts.
#[rustfmt::skip]
macro_rules! extended {
    ($row:literal) => {
        concat!($row, ".id = IF(? = '', ", $row, ".id, ?),
       ", $row, ".client = CASE ? WHEN 1 THEN ? WHEN 2 THEN IF(", $row, ".client = ?, '', ", $row, ".client) ELSE ", $row, ".client END,
       ", $row, ".ttl = GREATEST(", $row, ".ttl, ?), ", $row, ".expires_at = GREATEST(", $row, ".expires_at, ", now!(), " + ?)")
    };
}

// Bind order: extended, name, token, id, id, renamed, the client whose heartbeat no longer renews
// it, or NULL.
#[rustfmt::skip]
const EXTEND: Nowait = update_lease!(
    set: [extended!("l")],
    condition: ["LAST_INSERT_ID(
       CASE WHEN l.id = 'entries' THEN 3
            WHEN l.token = ? AND ", is_held_alone!("l"), " AND (? = '' OR l.id IN (?, ?))
             AND (l.client = ? OR ", lease_until!("l"), " > ", now!(), ") THEN 1
            ELSE 2 END) = 1"]);

// Bind order: extended, name, name, id, renamed, token, the client whose heartbeat no longer renews
// it, or NULL.
#[rustfmt::skip]
const EXTEND_ENTRY: Nowait = update_entry!(
    set: [extended!("e")],
    condition: ["e.token = ? AND e.owner <> '' AND (e.client = ? OR ", entry_until!("e"), " > ", now!(), ")"]);

// Bind order: name, id, renamed, token, the client whose heartbeat no longer renews it, or NULL.
#[rustfmt::skip]
const EXTENDABLE: &str = concat!("
SELECT 1 FROM sqlock_entry AS e
 WHERE e.name = ? AND e.id IN (?, ?) AND e.token = ? AND e.owner <> '' AND (e.client = ? OR ", entry_until!("e"), " > ", now!(), ")");

// Bind order: name, the client whose heartbeat no longer renews it, or NULL.
const RENEWED_BY: &str = "SELECT 1 FROM sqlock_lease AS l WHERE l.name = ? AND l.client = ?";

/// Returns how the client changes, as a number of `extended!`, and the new or the removed client.
fn bound_change(change: ClientChange) -> (i32, String) {
    match change {
        ClientChange::None => (0, String::new()),
        ClientChange::Set(client) => (1, client.to_string()),
        ClientChange::Remove(client) => (2, client.to_string()),
    }
}

/// Binds what `extended!` needs.
fn bind_extended<'q>(query: MySqlQuery<'q>, extension: &Extension, renamed: &str) -> MySqlQuery<'q> {
    let (change, client) = bound_change(extension.client_change);
    let query = query.bind(renamed.to_owned()).bind(renamed.to_owned()).bind(change).bind(client.clone()).bind(client);
    query.bind(extension.ttl.map_or(0, micros)).bind(micros(extension.lasts))
}

pub(super) async fn extend(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    sending: Sending,
    extension: &Extension,
) -> Result<ChangeOutcome, sqlx::Error> {
    let Extension { name, id, renamed, token, .. } = extension;
    let new_id = renamed.map_or_else(String::new, |id| id.to_string());
    let old_id = id.map_or_else(String::new, |id| id.to_string());
    let (_, removed_client) = extension.client_change.clients();
    let removed_client = removed_client.map(|client| client.to_string());
    let bytes = name.as_str().as_bytes();
    let query = bind_extended(sqlx::query(EXTEND.sql(flavor)), extension, &new_id).bind(bytes).bind(token.get());
    let query = query.bind(&old_id).bind(&old_id).bind(&new_id).bind(&removed_client);
    let is_shared = match attempt(conn, flavor, query).await? {
        Attempt::Done(_) => return Ok(ChangeOutcome::Done),
        Attempt::Refused(code) => code == 3,
        Attempt::Locked => {
            let Some(row) = read_row(conn, name).await? else {
                return Ok(ChangeOutcome::NotHeld);
            };
            let is_meant = |holder| id.is_none_or(|id| id == holder || *renamed == Some(holder));
            if matches!(row.holder, Holder::Lease(holder) if is_meant(holder)) && row.token == token.get() {
                let renewed = sqlx::query(RENEWED_BY).bind(bytes).bind(&removed_client);
                let counts = row.remaining.is_some() || renewed.fetch_optional(conn).await?.is_some();
                return Ok(if counts { ChangeOutcome::Locked } else { ChangeOutcome::NotHeld });
            }
            row.holder == Holder::Entries
        }
    };
    if !is_shared {
        return Ok(ChangeOutcome::NotHeld);
    }
    if id.is_none() {
        return extend_entries(conn, sending, extension).await;
    }
    let query = bind_extended(sqlx::query(EXTEND_ENTRY.sql(flavor)), extension, &new_id).bind(bytes).bind(bytes);
    let query = query.bind(&old_id).bind(&new_id).bind(token.get()).bind(&removed_client);
    match attempt(conn, flavor, query).await? {
        Attempt::Done(_) => Ok(ChangeOutcome::Done),
        Attempt::Refused(_) => Ok(ChangeOutcome::NotHeld),
        Attempt::Locked => {
            let query = sqlx::query(EXTENDABLE).bind(bytes).bind(&old_id).bind(&new_id).bind(token.get());
            let row = query.bind(&removed_client).fetch_optional(conn).await?;
            Ok(if row.is_some() { ChangeOutcome::Locked } else { ChangeOutcome::NotHeld })
        }
    }
}

// Acquisitions of one owner from several clients share a token. Bind order: name, token, the client
// whose heartbeat no longer renews it, or NULL.
#[rustfmt::skip]
const EXTEND_LOCK: &str = concat!("
SELECT COUNT(*) INTO @sqlock_locked FROM sqlock_entry AS e FORCE INDEX (sqlock_entry_in_order)
 WHERE e.name = ? AND e.token = ? AND e.owner <> '' AND (e.client = ? OR ", entry_until!("e"), " > ", now!(), ")
   FOR UPDATE SKIP LOCKED");
#[rustfmt::skip]
const EXTEND_CHECK: &str = concat!("
SELECT COUNT(*) INTO @sqlock_held FROM sqlock_entry AS e FORCE INDEX (sqlock_entry_in_order)
 WHERE e.name = ? AND e.token = ? AND e.owner <> '' AND (e.client = ? OR ", entry_until!("e"), " > ", now!(), ")");

// Bind order: name.
#[rustfmt::skip]
const EXTEND_DECIDE: &str = "SELECT IF(@sqlock_held > 0 AND @sqlock_locked >= @sqlock_held, ?, NULL) INTO @sqlock_name";

// Bind order: extended, token, the client whose heartbeat no longer renews it, or NULL.
#[rustfmt::skip]
const EXTEND_ENTRIES: &str = concat!("
UPDATE sqlock_entry AS e FORCE INDEX (sqlock_entry_in_order)
   SET ", extended!("e"), "
 WHERE e.name = @sqlock_name AND e.token = ? AND e.owner <> '' AND (e.client = ? OR ", entry_until!("e"), " > ", now!(), ")");

async fn extend_entries(
    conn: &mut MySqlConnection,
    sending: Sending,
    extension: &Extension,
) -> Result<ChangeOutcome, sqlx::Error> {
    let (name, token) = (&*name_literal(&extension.name), &*extension.token.get().to_string());
    let (change, client) = bound_change(extension.client_change);
    let (change, client) = (&*change.to_string(), &*id_literal(client));
    let (_, removed_client) = extension.client_change.clients();
    let removed_client = &*removed_client.map_or_else(|| "NULL".to_owned(), id_literal);
    let (ttl, lasts) = (extension.ttl.map_or(0, micros).to_string(), micros(extension.lasts).to_string());
    let mut script = Script::new(sending);
    script.add(EXTEND_LOCK, &[name, token, removed_client]);
    script.add(EXTEND_CHECK, &[name, token, removed_client]);
    script.add(EXTEND_DECIDE, &[name]);
    script.add(EXTEND_ENTRIES, &["''", "''", change, client, client, &ttl, &lasts, token, removed_client]);
    amended(&script.run(conn, AMENDED).await?)
}

// ---- downgrade

// Bind order: name, id, token.
#[rustfmt::skip]
const DOWNGRADE_LOCK: &str = "
SELECT COUNT(*) INTO @sqlock_locked FROM sqlock_lease AS s
 WHERE s.name = ? AND (s.id = ? AND s.token = ? OR s.id = 'entries') FOR UPDATE SKIP LOCKED";

// Bind order: name, id, token.
#[rustfmt::skip]
const DOWNGRADE_LOCK_ENTRY: &str = "
SELECT COUNT(*) INTO @sqlock_entry_locked FROM sqlock_entry AS e
 WHERE e.name = ? AND e.id = ? AND e.token = ? FOR UPDATE SKIP LOCKED";

// `@sqlock_only`: the owner had several acquisitions, and this one is the last. Bind order: name,
// id, token, units, permits, name, id, token, name, name, id, token, name, id.
#[rustfmt::skip]
const DOWNGRADE_CHECK: &str = "
SELECT EXISTS (SELECT 1 FROM sqlock_entry AS e
                WHERE e.name = ? AND e.id = ? AND e.token = ? AND e.owner <> '' AND e.units = ? AND e.permits = ?),
       EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = ? AND l.id = ? AND l.token = ?),
       EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = ? AND l.id = 'entries')
       AND EXISTS (SELECT 1 FROM sqlock_entry AS e
                    WHERE e.name = ? AND e.id = ? AND e.token = ? AND e.owner <> '' AND e.units = 0)
       AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS o WHERE o.name = ? AND o.token > 0 AND o.id <> ?)
  INTO @sqlock_shared, @sqlock_held, @sqlock_only";

// Bind order: name, name.
#[rustfmt::skip]
const DOWNGRADE_DECIDE: &str = "
SELECT IF(@sqlock_locked AND @sqlock_held AND NOT @sqlock_shared, ?, NULL),
       IF(@sqlock_locked AND @sqlock_only AND @sqlock_entry_locked, ?, NULL)
  INTO @sqlock_name, @sqlock_joined";

// Bind order: units, permits.
#[rustfmt::skip]
const DOWNGRADE_ENTRY: &str = concat!("
INSERT INTO sqlock_entry (", entry_columns!(), ")
SELECT l.name, l.id, l.owner, l.client, l.client <> '', ?, ?, l.token, l.ttl, 0, l.expires_at, l.acquired_at, l.holder, l.label
  FROM sqlock_lease AS l WHERE l.name = @sqlock_name ", overwrite!());

#[rustfmt::skip]
const DOWNGRADE_LEASE: &str = "
UPDATE sqlock_lease SET id = 'entries', owner = '', client = '', holder = '', label = '' WHERE name = @sqlock_name";

// Bind order: units, permits, id.
const DOWNGRADE_JOINED: &str = "UPDATE sqlock_entry SET units = ?, permits = ? WHERE name = @sqlock_joined AND id = ?";

const DOWNGRADE_OWNER: &str = "UPDATE sqlock_lease SET owner = '' WHERE name = @sqlock_joined";

#[rustfmt::skip]
const DOWNGRADE_RESULT: &str = "
SELECT CAST(@sqlock_held OR @sqlock_only AS SIGNED),
       CAST(@sqlock_name IS NOT NULL OR @sqlock_joined IS NOT NULL OR @sqlock_shared AS SIGNED)";

pub(super) async fn downgrade(
    conn: &mut MySqlConnection,
    sending: Sending,
    name: &LockName,
    id: AcquisitionId,
    token: FencingToken,
) -> Result<ChangeOutcome, sqlx::Error> {
    let (name, id, token) = (&*name_literal(name), &*id_literal(id), &*token.get().to_string());
    let (units, permits) = Mode::READ.stored();
    let (units, permits) = (&*units.to_string(), &*permits.to_string());
    let mut script = Script::new(sending);
    script.add(DOWNGRADE_LOCK, &[name, id, token]);
    script.add(DOWNGRADE_LOCK_ENTRY, &[name, id, token]);
    let (shared, held) = ([name, id, token, units, permits], [name, id, token]);
    script.add(DOWNGRADE_CHECK, &[&shared[..], &held, &[name], &held, &[name, id]].concat());
    script.add(DOWNGRADE_DECIDE, &[name, name]);
    script.add(DOWNGRADE_ENTRY, &[units, permits]);
    script.add(DOWNGRADE_LEASE, &[]);
    script.add(DOWNGRADE_JOINED, &[units, permits, id]);
    script.add(DOWNGRADE_OWNER, &[]);
    amended(&script.run(conn, DOWNGRADE_RESULT).await?)
}

// ---- raise

// Bind order: to, name, id, to, token, to.
#[rustfmt::skip]
const RAISE: Nowait = update_lease!(
    set: ["l.token = ?"],
    condition: ["LAST_INSERT_ID(
       CASE WHEN l.id <> ? THEN 2
            WHEN l.token = ? THEN 3
            WHEN l.token = ? AND l.token < ? THEN 1
            ELSE 2 END) = 1"]);

pub(super) async fn raise(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    name: &LockName,
    id: AcquisitionId,
    token: FencingToken,
    to: FencingToken,
) -> Result<ChangeOutcome, sqlx::Error> {
    let query = sqlx::query(RAISE.sql(flavor)).bind(to.get()).bind(name.as_str().as_bytes()).bind(id.to_string());
    Ok(match attempt(conn, flavor, query.bind(to.get()).bind(token.get()).bind(to.get())).await? {
        Attempt::Done(_) | Attempt::Refused(3) => ChangeOutcome::Done,
        Attempt::Refused(_) => ChangeOutcome::NotHeld,
        Attempt::Locked => match read_row(conn, name).await? {
            Some(row) if row.holder != Holder::Lease(id) => ChangeOutcome::NotHeld,
            Some(row) if row.token == to.get() => ChangeOutcome::Done,
            Some(row) if row.token == token.get() => ChangeOutcome::Locked,
            _ => ChangeOutcome::NotHeld,
        },
    })
}

// ---- ask

/// The valid holders of a name: their tokens and clients. Bind order: name, name.
#[rustfmt::skip]
macro_rules! holders {
    () => {
        concat!("(SELECT l.token, l.client FROM sqlock_lease AS l
         WHERE l.name = ? AND ", is_held_alone!("l"), " AND ", lease_until!("l"), " > ", now!(), "
         UNION ALL
        SELECT e.token, e.client FROM sqlock_entry AS e FORCE INDEX (sqlock_entry_in_order)
         WHERE e.name = ? AND e.token > 0 AND e.owner <> '' AND ", entry_until!("e"), " > ", now!(), ") AS h")
    };
}

/// Their clients. Bind order: name, name.
macro_rules! asked_clients {
    () => {
        concat!("(SELECT DISTINCT h.client AS id FROM ", holders!(), " WHERE h.client <> '') AS n")
    };
}

// Bind order: asked_clients.
const ASK_LOCK_CLIENTS: &str = lock_clients!(asked_clients!());

// Bind order: holders, asked_clients.
#[rustfmt::skip]
const ASK_CHECK: &str = concat!("
SELECT (SELECT COUNT(DISTINCT h.token) FROM ", holders!(), "),
       @sqlock_leases = 1 AND ", are_clients_locked!(asked_clients!()), "
  INTO @sqlock_held, @sqlock_locked");

// Bind order: name.
const ASK_DECIDE: &str = "SELECT IF(@sqlock_held > 0 AND @sqlock_locked, ?, NULL) INTO @sqlock_name";

// Bind order: asked_clients.
const ASK_NOTICE: &str = notice!(asked_clients!());

const ASK_LEASE: &str = "UPDATE sqlock_lease SET asked = token WHERE name = @sqlock_name";

const ASK_RESULT: &str = "SELECT CAST(@sqlock_held AS SIGNED), CAST(@sqlock_name IS NOT NULL AS SIGNED)";

pub(super) async fn ask(
    conn: &mut MySqlConnection,
    sending: Sending,
    name: &LockName,
) -> Result<AskOutcome, sqlx::Error> {
    let name = &*name_literal(name);
    let mut script = Script::new(sending);
    script.add(LOCK_NAME, &[name]);
    script.add(ASK_LOCK_CLIENTS, &[name, name]);
    script.add(ASK_CHECK, &[name; 4]);
    script.add(ASK_DECIDE, &[name]);
    script.add(ASK_NOTICE, &[name, name]);
    script.add(ASK_LEASE, &[]);
    let row = script.run(conn, ASK_RESULT).await?;
    let holders = u32::try_from(row.try_get::<i64, _>(0)?).unwrap_or(u32::MAX);
    Ok(if holders > 0 && !read_flag(&row, 1)? { AskOutcome::Locked } else { AskOutcome::Holders(holders) })
}
