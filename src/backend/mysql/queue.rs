//! The queue of a name: waiting entries and transitions.

use std::collections::HashMap;

use serde_json::{Value, json};
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _};

use super::acquire::{CREATE_FREE, grant_claim};
use super::listener;
use super::script::{Script, filled, id_literal, list, name_literal, read_flag};
use super::store::{is_timeout, token};
use crate::backend::micros;
use crate::backend::stored::{TableRow as _, holder_now, holder_text, read_entry, read_lease, remaining};
use crate::name::LockName;
use crate::protocol::{
    Enqueue, EntryState, Granted, Grantee, Holder, HolderChange, HolderNow, LeaseId, LeaseRow, Mode, Polled, Presence,
    Queue, Response, Transition,
};

// ---- enqueue

// JSON: id, owner, client, is_kept, units, permits, ttl, age, holder, label. Skips entries that
// exist and acquisitions that hold the name already. The texts name their character set, since
// MariaDB would use the database's. Bind order: name, JSON, name, name.
#[rustfmt::skip]
const ENQUEUE: &str = concat!("
INSERT IGNORE INTO sqlock_entry (", entry_columns!(), ")
SELECT ?, t.id, t.owner, t.client, t.is_kept, t.units, t.permits, 0, t.ttl, ", now!(), " - t.age,
       ", now!(), " + ", grant!(), ", 0, t.holder, t.label
  FROM JSON_TABLE(?, '$[*]' COLUMNS (
       id      VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$[0]',
       owner   VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$[1]',
       client  VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$[2]',
       is_kept BIGINT PATH '$[3]', units BIGINT PATH '$[4]', permits BIGINT PATH '$[5]', ttl BIGINT PATH '$[6]', age BIGINT PATH '$[7]',
       holder  VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[8]',
       label   VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[9]')) AS t
 WHERE NOT EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = ? AND l.id = t.id)
   AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = ? AND e.id = t.id)");

// A release that has not seen the entries has locked the row, so this statement waits for it and
// reads the result. A release that locks the row later sees the entries. Bind order: name.
#[rustfmt::skip]
const READ_ROW_AFTER_INSERT: &str = concat!("SELECT ", lease_columns!("l"), " FROM sqlock_lease AS l WHERE l.name = ? LOCK IN SHARE MODE");

pub(super) async fn enqueue(conn: &mut MySqlConnection, entries: &[Enqueue]) -> Result<HolderNow, sqlx::Error> {
    let Some(first) = entries.first() else {
        return Ok(HolderNow::Unknown);
    };
    let name = first.claim.name.as_str().as_bytes();
    let lines = entries.iter().map(|Enqueue { claim, age }| {
        let (units, permits) = claim.mode.stored();
        let (id, owner, client) = (claim.id.to_string(), claim.owner.to_string(), claim.client.to_string());
        let is_kept = i64::from(claim.is_kept);
        let (ttl, age) = (micros(claim.ttl), micros(*age));
        json!([id, owner, client, is_kept, units, permits, ttl, age, &*claim.holder, &*claim.label])
    });
    let lines = Value::from_iter(lines).to_string();
    sqlx::query(ENQUEUE).bind(name).bind(lines).bind(name).bind(name).execute(&mut *conn).await?;
    let row = match sqlx::query(READ_ROW_AFTER_INSERT).bind(name).fetch_optional(&mut *conn).await {
        Err(error) if is_timeout(&error) => return Ok(HolderNow::Unknown),
        row => row?,
    };
    if let Some(row) = row {
        return Ok(holder_now(&read_lease(&row)?));
    }
    let created = sqlx::query(CREATE_FREE).bind(name).execute(&mut *conn).await?;
    if created.rows_affected() > 0 {
        return Ok(HolderNow::Vacant);
    }
    Ok(read_row(conn, &first.claim.name).await?.map_or(HolderNow::Vacant, |row| holder_now(&row)))
}

// ---- poll and read

// Bind order: name.
#[rustfmt::skip]
const READ_ROW: &str = concat!("SELECT ", lease_columns!("l"), " FROM sqlock_lease AS l WHERE l.name = ?");

/// Reads the row of a name without a lock.
pub(super) async fn read_row(conn: &mut MySqlConnection, name: &LockName) -> Result<Option<LeaseRow>, sqlx::Error> {
    let row = sqlx::query(READ_ROW).bind(name.as_str().as_bytes()).fetch_optional(conn).await?;
    row.as_ref().map(read_lease).transpose()
}

/// Returns one row for each entry of a name, or a single row without entries. `$entries` joins the
/// entries `e`.
#[rustfmt::skip]
macro_rules! poll {
    ($entries:literal, $names:literal) => {
        concat!("
SELECT l.name, ", lease_columns!("l"), ", COALESCE(e.id, '') AS entry_id, COALESCE(e.token, 0) AS entry_token,
       COALESCE(", entry_until!("e"), " - ", now!(), ", 0) AS entry_remaining,
       IF(e.token = 0, (SELECT COUNT(*) FROM sqlock_entry AS w FORCE INDEX (sqlock_entry_in_order)
                         WHERE w.name = e.name AND w.token = 0
                           AND (w.arrived_at < e.arrived_at OR w.arrived_at = e.arrived_at AND w.id < e.id)
                           AND ", entry_until!("w"), " > ", now!(), "), 0) AS ahead
  FROM ", $entries, "
 WHERE ", $names)
    };
}

// Bind order: JSON ids, name.
const POLL: &str = poll!(
    "sqlock_lease AS l
       LEFT JOIN (JSON_TABLE(?, '$[*]' COLUMNS (id VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin PATH '$')) AS i
                  JOIN sqlock_entry AS e ON e.id = i.id) ON e.name = l.name",
    "l.name = ?"
);

// Order of literals: ids, names.
const POLL_NAMES: &str = poll!(
    "sqlock_lease AS l FORCE INDEX (PRIMARY)
       LEFT JOIN sqlock_entry AS e FORCE INDEX (PRIMARY) ON e.name = l.name AND e.id IN (?)",
    "l.name IN (?)"
);

/// Reads the row of a name and the state of some acquisitions.
pub(super) async fn poll(
    conn: &mut MySqlConnection,
    name: &LockName,
    ids: &[LeaseId],
) -> Result<Option<Polled>, sqlx::Error> {
    let wanted = Value::from_iter(ids.iter().map(LeaseId::to_string)).to_string();
    let rows = sqlx::query(POLL).bind(wanted).bind(name.as_str().as_bytes()).fetch_all(conn).await?;
    read_poll(&rows.iter().collect::<Vec<_>>(), ids)
}

/// Reads rows of names, each with the state of one acquisition.
pub(super) async fn poll_many(
    conn: &mut MySqlConnection,
    polls: &[(LockName, LeaseId)],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let ids = list(polls, |(_, id)| id_literal(*id));
    let names = list(polls, |(name, _)| name_literal(name));
    let text = filled(POLL_NAMES, &[&ids, &names]);
    let rows = sqlx::raw_sql(AssertSqlSafe(text)).fetch_all(conn).await?;
    let mut by_name: HashMap<Vec<u8>, Vec<&MySqlRow>> = HashMap::new();
    for row in &rows {
        by_name.entry(row.try_get("name")?).or_default().push(row);
    }
    let answer = |(name, id): &(LockName, LeaseId)| {
        let rows = by_name.get(name.as_str().as_bytes()).map_or(&[][..], Vec::as_slice);
        read_poll(rows, &[*id]).map(|polled| Some(Response::Polled(polled)))
    };
    polls.iter().map(answer).collect()
}

/// Reads the rows of one name that a poll returned.
fn read_poll(rows: &[&MySqlRow], ids: &[LeaseId]) -> Result<Option<Polled>, sqlx::Error> {
    let Some(first) = rows.first() else {
        return Ok(None);
    };
    let row = read_lease(*first)?;
    let mut presences: Vec<Presence> = ids.iter().map(|id| Presence::of(*id, &row, None, 0)).collect();
    for found in rows {
        let id = found.text("entry_id")?;
        let state = match found.number("entry_token")? {
            0 => EntryState::Waiting,
            token => EntryState::Holding(token),
        };
        let entry = Some((state, remaining(found.number("entry_remaining")?)));
        let ahead = u32::try_from(found.number("ahead")?).unwrap_or(u32::MAX);
        for (presence, wanted) in presences.iter_mut().zip(ids).filter(|(_, wanted)| wanted.to_string() == id) {
            *presence = Presence::of(*wanted, &row, entry, ahead);
        }
    }
    Ok(Some(Polled { row, presences }))
}

// Bind order: name, name, limit, name.
#[rustfmt::skip]
const READ: &str = concat!("
SELECT ", lease_columns!("l"), ", COALESCE(e.id, '') AS entry_id, COALESCE(e.client, '') AS entry_client,
       COALESCE(e.owner, '') AS entry_owner, CAST(COALESCE(e.is_kept, 0) AS SIGNED) AS is_kept, COALESCE(e.units, 0) AS units,
       COALESCE(e.permits, 0) AS permits, COALESCE(e.token, 0) AS entry_token, COALESCE(e.ttl, 0) AS ttl,
       COALESCE(e.arrived_at, 0) AS arrived_at, COALESCE(", entry_until!("e"), " - ", now!(), ", 0) AS entry_remaining
  FROM sqlock_lease AS l LEFT JOIN (
       (SELECT * FROM sqlock_entry FORCE INDEX (sqlock_entry_in_order) WHERE name = ? AND token > 0)
        UNION ALL
       (SELECT * FROM sqlock_entry FORCE INDEX (sqlock_entry_in_order) WHERE name = ? AND token = 0
         ORDER BY arrived_at, id LIMIT ?)) AS e ON e.name = l.name
 WHERE l.name = ?
 ORDER BY e.token = 0, e.arrived_at, e.id");

pub(super) async fn read(
    conn: &mut MySqlConnection,
    name: &LockName,
    limit: u32,
) -> Result<Option<Queue>, sqlx::Error> {
    let bytes = name.as_str().as_bytes();
    let query = sqlx::query(READ).bind(bytes).bind(bytes).bind(u64::from(limit) + 1).bind(bytes);
    let rows = query.fetch_all(conn).await?;
    let Some(first) = rows.first() else {
        return Ok(None);
    };
    let row = read_lease(first)?;
    let mut entries = Vec::with_capacity(rows.len());
    for row in &rows {
        entries.extend(read_entry(row)?);
    }
    let mut queue = Queue { row, entries, is_cut_off: false };
    queue.is_cut_off = queue.waiting().count() > limit as usize;
    if queue.is_cut_off {
        queue.entries.pop();
    }
    Ok(Some(queue))
}

// ---- transition

// Bind order: name, holder, token.
#[rustfmt::skip]
const LOCK_LEASE: &str = "
SELECT COUNT(*) INTO @sqlock_leases FROM sqlock_lease AS s WHERE s.name = ? AND s.id = ? AND s.token = ? FOR UPDATE SKIP LOCKED";

// The expired entries and the grantees. Bind order: name, ids.
#[rustfmt::skip]
const LOCK_ENTRIES: &str = "
SELECT COUNT(*) INTO @sqlock_entries FROM sqlock_entry AS s FORCE INDEX (PRIMARY) WHERE s.name = ? AND s.id IN (?) FOR UPDATE SKIP LOCKED";

/// The clients that lose a holding. Bind order: name, whether the holder of the row expires, name,
/// ids of expired entries.
#[rustfmt::skip]
macro_rules! losers {
    () => {
        "(SELECT t.client AS id FROM sqlock_lease AS t WHERE t.name = ? AND ? AND t.client <> ''
         UNION
        SELECT h.client FROM sqlock_entry AS h WHERE h.name = ? AND h.id IN (?) AND h.token > 0 AND h.client <> '') AS n"
    };
}

#[rustfmt::skip]
const LOCK_CLIENTS: &str = concat!("
SELECT COUNT(*) INTO @sqlock_clients FROM ", losers!(), " STRAIGHT_JOIN sqlock_client AS c ON c.id = n.id
   FOR UPDATE SKIP LOCKED");

/// The conditions of a transition, each with its literals.
mod condition {
    // Every row is locked. Bind order: how many entries, losers.
    #[rustfmt::skip]
    pub(super) const IS_LOCKED: &str = concat!("
       @sqlock_leases = 1 AND @sqlock_entries = ?
       AND @sqlock_clients = (SELECT COUNT(*) FROM ", losers!(), " STRAIGHT_JOIN sqlock_client AS c ON c.id = n.id)");

    // Bind order: name.
    #[rustfmt::skip]
    pub(super) const HOLDER_HAS_EXPIRED: &str = concat!("
       EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = ? AND ", lease_until!("l"), " <= ", now!(), ")");

    // Bind order: name, ids, how many.
    #[rustfmt::skip]
    pub(super) const ENTRIES_HAVE_EXPIRED: &str = concat!("
       (SELECT COUNT(*) FROM sqlock_entry AS e WHERE e.name = ? AND e.id IN (?) AND ", entry_until!("e"), " <= ", now!(), ") = ?");

    // Bind order: name, ids, how many.
    #[rustfmt::skip]
    pub(super) const ENTRIES_WAIT: &str = "
       (SELECT COUNT(*) FROM sqlock_entry AS e WHERE e.name = ? AND e.id IN (?) AND e.token = 0) = ?";

    // An acquisition may have joined since the queue was read: joining does not raise the token.
    // Bind order: name, ids of expired entries.
    #[rustfmt::skip]
    pub(super) const NO_HOLDER: &str = "
       NOT EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = ? AND e.id NOT IN (?) AND e.token > 0)";
    #[rustfmt::skip]
    pub(super) const NO_EXCLUSIVE_HOLDER: &str = "
       NOT EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = ? AND e.id NOT IN (?) AND e.token > 0 AND e.units = 0)";
    #[rustfmt::skip]
    pub(super) const NO_WAITER: &str = "
       NOT EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = ? AND e.id NOT IN (?) AND e.token = 0)";
}

// Bind order: conditions, name, token.
#[rustfmt::skip]
const DECIDE: &str = concat!("
SELECT IF(?, ?, NULL), GREATEST(? + 1, ", now!(), ") INTO @sqlock_name, @sqlock_token");

// A client without a row gets one: a registration under way must wait for this transaction and read
// the notice. Bind order: losers.
#[rustfmt::skip]
const NOTICE: &str = concat!("
INSERT INTO sqlock_client (id, beat_at, notice)
SELECT n.id, 0, 1 FROM ", losers!(), " WHERE @sqlock_name IS NOT NULL ORDER BY n.id
    ON DUPLICATE KEY UPDATE notice = sqlock_client.notice + 1");

// A token shared by several acquisitions of one owner is lost with the last of them. Bind order:
// whether the holder of the row expires, ids of expired entries, the same.
#[rustfmt::skip]
const WRITE_LOSS: &str = "
UPDATE sqlock_lease AS l
   SET l.lost = GREATEST(l.lost, IF(?, l.token, 0),
                COALESCE((SELECT MAX(h.token) FROM sqlock_entry AS h
                           WHERE h.name = l.name AND h.id IN (?) AND h.token > 0 AND h.owner <> ''
                             AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS o
                                              WHERE o.name = h.name AND o.token = h.token AND o.id NOT IN (?))), 0))
 WHERE l.name = @sqlock_name";

#[rustfmt::skip]
const FREE: &str = "
UPDATE sqlock_lease SET id = '', owner = '', client = '', expires_at = 0, holder = '', label = '' WHERE name = @sqlock_name";

// Bind order: id, ttl, ttl.
#[rustfmt::skip]
const GRANT_ALONE: &str = concat!("
UPDATE sqlock_lease AS l STRAIGHT_JOIN sqlock_entry AS e ON e.name = l.name AND e.id = ?
   SET l.id = e.id, l.owner = e.owner, l.client = IF(e.is_kept, e.client, ''), l.token = @sqlock_token, l.ttl = ?,
       l.expires_at = ", now!(), " + ?, l.acquired_at = ", now!(), ", l.holder = e.holder, l.label = e.label
 WHERE l.name = @sqlock_name");

// Bind order: the difference between the last and the first token, or NULL to leave the token.
#[rustfmt::skip]
const GRANT_SHARED: &str = "
UPDATE sqlock_lease
   SET id = 'entries', owner = '', client = '', token = COALESCE(@sqlock_token + ?, token), holder = '', label = ''
 WHERE name = @sqlock_name";

// Bind order: number, ttl, ttl, id.
#[rustfmt::skip]
const GRANT_SHARE: &str = concat!("
UPDATE sqlock_entry
   SET client = IF(is_kept, client, ''), token = @sqlock_token + ?, ttl = ?, expires_at = ", now!(), " + ?, acquired_at = ", now!(), "
 WHERE name = @sqlock_name AND id = ?");

// Bind order: id.
const DELETE: &str = "DELETE FROM sqlock_entry WHERE name = @sqlock_name AND id = ?";

// The clients that get the name and listen. Bind order: name, ids of the grantees.
#[rustfmt::skip]
const LISTENERS: &str = "
SELECT GROUP_CONCAT(DISTINCT c.id) INTO @sqlock_listeners
  FROM sqlock_entry AS e STRAIGHT_JOIN sqlock_client AS c ON c.id = e.client
 WHERE e.name = ? AND e.id IN (?) AND c.listens";

#[rustfmt::skip]
const RESULT: &str = "
SELECT CAST(@sqlock_name IS NOT NULL AS SIGNED), CAST(@sqlock_token AS UNSIGNED), CAST(COALESCE(@sqlock_listeners, '') AS CHAR)";

pub(super) async fn transition(
    conn: &mut MySqlConnection,
    transition: &Transition,
) -> Result<Option<Vec<Granted>>, sqlx::Error> {
    let Transition { seen, given_up, expired, change, is_last, .. } = transition;
    let is_alone = matches!(seen.holder, Holder::Lease(_));
    let ends_row = is_alone || seen.holder == Holder::Kept;
    // This store sets no marks, so no queue was read with one.
    if (*is_last && seen.waiting != 0) || (ends_row && matches!(change, HolderChange::None)) {
        return Ok(None);
    }
    let grantees: &[Grantee] = match change {
        HolderChange::Exclusive(grantee) => std::slice::from_ref(grantee),
        HolderChange::Shared(grantees) => grantees,
        HolderChange::None | HolderChange::Free | HolderChange::Claim(_) => &[],
    };
    let names = &*name_literal(&transition.name);
    let gone = &*list_ids(expired.iter().copied());
    let granted = &*list_ids(grantees.iter().map(|grantee| grantee.id));
    let all = &*list_ids(expired.iter().copied().chain(grantees.iter().map(|grantee| grantee.id)));
    let is_taken = is_alone && given_up.is_none();
    let losers = [names, if is_taken { "1" } else { "0" }, names, gone];

    let mut conditions = {
        let count = (expired.len() + grantees.len()).to_string();
        filled(condition::IS_LOCKED, &[&count, losers[0], losers[1], losers[2], losers[3]])
    };
    let mut require = |sql: &str, literals: &[&str]| {
        conditions.push_str(" AND");
        conditions.push_str(&filled(sql, literals));
    };
    if ends_row && (given_up.is_none() || !is_alone) {
        require(condition::HOLDER_HAS_EXPIRED, &[names]);
    }
    require(condition::ENTRIES_HAVE_EXPIRED, &[names, gone, &expired.len().to_string()]);
    require(condition::ENTRIES_WAIT, &[names, granted, &grantees.len().to_string()]);
    match change {
        HolderChange::None => {}
        HolderChange::Free | HolderChange::Exclusive(_) => require(condition::NO_HOLDER, &[names, gone]),
        HolderChange::Shared(_) => require(condition::NO_EXCLUSIVE_HOLDER, &[names, gone]),
        HolderChange::Claim(claim) => {
            let is_exclusive = claim.mode == Mode::Exclusive;
            let free = if is_exclusive { condition::NO_HOLDER } else { condition::NO_EXCLUSIVE_HOLDER };
            require(free, &[names, gone]);
            require(condition::NO_WAITER, &[names, gone]);
        }
    }

    let mut script = Script::new();
    script.add(LOCK_LEASE, &[names, &id_literal(holder_text(seen.holder)), &seen.token.to_string()]);
    script.add(LOCK_ENTRIES, &[names, all]);
    script.add(LOCK_CLIENTS, &losers);
    script.add(DECIDE, &[&conditions, names, &seen.token.to_string()]);
    script.add(NOTICE, &losers);
    script.add(WRITE_LOSS, &[losers[1], gone, gone]);
    script.add(LISTENERS, &[names, granted]);
    for id in expired {
        script.add(DELETE, &[&id_literal(id)]);
    }
    let mut ids: Vec<LeaseId> = Vec::new();
    match change {
        HolderChange::None => {}
        HolderChange::Free => script.add(FREE, &[]),
        HolderChange::Exclusive(Grantee { id, ttl }) => {
            let ttl = &*micros(*ttl).to_string();
            script.add(GRANT_ALONE, &[&id_literal(id), ttl, ttl]);
            script.add(DELETE, &[&id_literal(id)]);
            ids.push(*id);
        }
        HolderChange::Shared(grantees) => {
            let above = grantees.len().checked_sub(1).map_or_else(|| "NULL".into(), |above| above.to_string());
            script.add(GRANT_SHARED, &[&above]);
            for (number, Grantee { id, ttl }) in grantees.iter().enumerate() {
                let ttl = &*micros(*ttl).to_string();
                script.add(GRANT_SHARE, &[&number.to_string(), ttl, ttl, &id_literal(id)]);
                ids.push(*id);
            }
        }
        HolderChange::Claim(claim) => {
            grant_claim(&mut script, claim);
            ids.push(claim.id);
        }
    }
    let row = script.run(&mut *conn, RESULT).await?;
    if !read_flag(&row, 0)? {
        return Ok(None);
    }
    let listeners: String = sqlx::Row::try_get(&row, 2)?;
    listener::wake(conn, &listeners.split_terminator(',').map(str::to_owned).collect::<Vec<_>>()).await;
    let first: u64 = sqlx::Row::try_get(&row, 1)?;
    let grant = |(id, token_of): (LeaseId, u64)| Ok(Granted { id, token: token(token_of)? });
    ids.into_iter().zip(first..).map(grant).collect::<Result<_, sqlx::Error>>().map(Some)
}

/// Joins ids as literals for IN. The list is never empty: it begins with an id that no row has.
fn list_ids(ids: impl Iterator<Item = LeaseId>) -> String {
    ids.fold(String::from("''"), |list, id| format!("{list}, '{id}'"))
}
