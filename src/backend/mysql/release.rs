//! Ends holdings: by release, withdrawal or eviction.

use std::time::Duration;

use sqlx::MySqlConnection;

use super::acquire::HolderColumns;
use super::queue::read_row;
use super::script::{AMENDED, LOCK_NAME, Script, Sending, amended, filled, id_literal, name_literal, read_flag};
use super::store::{Attempt, Flavor, Nowait, attempt, is_locked, is_timeout, token};
use crate::backend::micros;
use crate::backend::stored::{KEPT, NO_ID, TableRow as _, parse_id};
use crate::name::LockName;
use crate::protocol::{
    AcquisitionId, ChangeOutcome, Granted, Holder, LeaseRow, Release, ReleaseOutcome, WithdrawalOutcome,
};
use crate::token::FencingToken;

// ---- release

// The codes of a release: 1 and 2 end the holding; 5 means that it is not held. From LEAST_ID_END
// on: the last digits of the id of the first live waiting entry, if its mode is exclusive. 15 of the
// 32 digits fit: a CASE over signed and unsigned numbers is a decimal, and LAST_INSERT_ID of a
// decimal has 63 bits.
const ENDED_AWAITED: u64 = 2;
const AWAITED: u64 = 3;
const SHARED: u64 = 4;
const LEAST_ID_END: u64 = 16;

/// Ends a holding if no entry waits, or if `awaited` is 2. The details of the former holder are
/// kept if the name stays unavailable. Assignments run from left to right, so the later ones read
/// the new identity. Bind order: whether a claim follows, HolderColumns, lasts, lasts, name, id,
/// token, parameters of `awaited`.
#[rustfmt::skip]
macro_rules! end_holding {
    (awaited: [$($awaited:tt)*]) => {
        update_lease!(
            set: ["l.token = IF(?, LAST_INSERT_ID(GREATEST(l.token + 1, ", now!(), ")), l.token),
       l.id = ?, l.owner = ?, l.client = ?, l.ttl = ?, l.holder = IF(l.id = 'kept', l.holder, ?), l.label = IF(l.id = 'kept', l.label, ?),
       l.acquired_at = IF(l.id = 'kept', l.acquired_at, ", now!(), "), l.expires_at = IF(? = 0, 0, ", now!(), " + ?)"],
            condition: ["LAST_INSERT_ID(
       CASE WHEN l.id = 'entries' THEN 4
            WHEN l.id <> ? OR l.token <> ? THEN 5
            WHEN NOT ", is_awaited!("l"), " THEN 1
            ELSE ", $($awaited)*, " END) IN (1, 2)"])
    };
}

// Frees the name. The first live entry is to have it next.
#[rustfmt::skip]
const RELEASE: Nowait = end_holding!(awaited: ["
                 COALESCE((SELECT IF(f.units = 0, GREATEST(CAST(CONV(RIGHT(f.id, 15), 16, 10) AS SIGNED), 16), 3)
                             FROM sqlock_entry AS f FORCE INDEX (sqlock_entry_in_order)
                            WHERE f.name = l.name AND f.token = 0 AND ", entry_until!("f"), " > ", now!(), "
                            ORDER BY f.arrived_at, f.id LIMIT 1), 3)"]);

// The name stays unavailable, or a claim follows. Bind order after that of `end_holding!`: whether
// the name stays unavailable.
const RELEASE_TO: Nowait = end_holding!(awaited: ["IF(?, 2, 3)"]);

/// How often a release is sent while the row is locked, and the pause in between. A statement of
/// another client locks the row until its commit, which takes some milliseconds; a fence locks it
/// for longer.
const TRIES: usize = 4;
const TRY_PAUSE: Duration = Duration::from_millis(2);

/// Ends a holding. Grants the name to the first live entry, or to the given claim if no entry
/// waits, or frees it.
pub(super) async fn release(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    release: &Release,
) -> Result<ReleaseOutcome, sqlx::Error> {
    for _ in 1..TRIES {
        match try_release(conn, flavor, release).await? {
            ReleaseOutcome::Locked => tokio::time::sleep(TRY_PAUSE).await,
            outcome => return Ok(outcome),
        }
    }
    try_release(conn, flavor, release).await
}

async fn try_release(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    release: &Release,
) -> Result<ReleaseOutcome, sqlx::Error> {
    let stays_reserved = !release.keep_for.is_zero();
    let next = release.next.as_ref().filter(|_| !stays_reserved);
    let after = next.map_or_else(|| HolderColumns::none(if stays_reserved { KEPT } else { NO_ID }), HolderColumns::new);
    let lasts = micros(next.map_or(release.keep_for, |claim| claim.ttl));
    let frees = next.is_none() && !stays_reserved;
    let sql = if frees { RELEASE } else { RELEASE_TO }.sql(flavor);
    let query = after.bind(sqlx::query(sql).bind(next.is_some())).bind(lasts).bind(lasts);
    let query = query.bind(release.name.as_str().as_bytes()).bind(release.id.to_string()).bind(release.token.get());
    match attempt(conn, flavor, if frees { query } else { query.bind(stays_reserved) }).await? {
        Attempt::Done(code) if next.is_some() => token(code).map(ReleaseOutcome::ToNext),
        Attempt::Done(code) => Ok(ReleaseOutcome::Ended { awaited: code == ENDED_AWAITED }),
        Attempt::Refused(AWAITED) => Ok(ReleaseOutcome::Awaited),
        Attempt::Refused(SHARED) => release_entry(conn, flavor, release).await,
        Attempt::Refused(end @ LEAST_ID_END..) => hand_over(conn, flavor, release, end).await,
        Attempt::Refused(_) => read_not_held(conn, &release.name).await,
        Attempt::Locked => match read_row(conn, &release.name).await? {
            Some(row) if row.holder == Holder::Entries => release_entry(conn, flavor, release).await,
            Some(row) if row.holder == Holder::Lease(release.id) && row.token == release.token.get() => {
                Ok(ReleaseOutcome::Locked)
            }
            row => Ok(not_held(row)),
        },
    }
}

async fn read_not_held(conn: &mut MySqlConnection, name: &LockName) -> Result<ReleaseOutcome, sqlx::Error> {
    read_row(conn, name).await.map(not_held)
}

/// Returns the outcome of a release whose holding does not exist, from the row of its name.
fn not_held(row: Option<LeaseRow>) -> ReleaseOutcome {
    let (lost, token) = row.map_or((0, 0), |row| (row.lost, row.token));
    ReleaseOutcome::NotHeld { lost, token }
}

// One statement cannot both update and delete, so another one deletes the entry. Until then the
// entry is a released and expired one: it does not block other clients, and a later transition
// deletes it if the deletion fails. Bind order: name, id, token, name, end.
#[rustfmt::skip]
const HAND_OVER: &str = concat!("
UPDATE (SELECT s.name, GREATEST(s.token + 1, ", now!(), ") AS token
          FROM sqlock_lease AS s WHERE s.name = ? AND s.id = ? AND s.token = ?
         LIMIT 1 FOR UPDATE SKIP LOCKED) AS q
  STRAIGHT_JOIN
       (SELECT f.id, f.owner, IF(f.is_renewed, f.client, '') AS client, LEAST(f.ttl, ", grant!(), ") AS ttl, f.holder, f.label
          FROM sqlock_entry AS f FORCE INDEX (sqlock_entry_in_order)
         WHERE f.name = ? AND f.token = 0 AND f.units = 0 AND f.id LIKE ?
         ORDER BY f.arrived_at, f.id LIMIT 1 FOR UPDATE SKIP LOCKED) AS n
  STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name
  STRAIGHT_JOIN sqlock_entry AS e ON e.name = q.name AND e.id = n.id
   SET l.token = LAST_INSERT_ID(q.token), l.id = n.id, l.owner = n.owner, l.client = n.client, l.ttl = n.ttl,
       l.holder = n.holder, l.label = n.label, l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + n.ttl,
       e.token = q.token, e.owner = '', e.client = '', e.expires_at = 0");

// A DELETE accepts no index hint: MariaDB may choose the primary key and find other entries locked.
// Bind order: name, token.
#[rustfmt::skip]
const DELETE_GRANTED_RETURNING: &str = "
SET STATEMENT innodb_lock_wait_timeout = 0 FOR
DELETE FROM sqlock_entry WHERE name = ? AND token = ? AND owner = '' AND expires_at = 0 RETURNING id";

// MySQL has no RETURNING. Bind order: name, token.
#[rustfmt::skip]
const READ_GRANTED: &str = "
SELECT e.id FROM sqlock_entry AS e FORCE INDEX (sqlock_entry_in_order)
 WHERE e.name = ? AND e.token = ? AND e.owner = '' AND e.expires_at = 0";

// The lookup uses the primary key: another index would lock the index records in another order than
// transitions do. Bind order: name, id, token.
#[rustfmt::skip]
const DELETE_GRANTED: &str = "DELETE FROM sqlock_entry WHERE name = ? AND id = ? AND token = ? AND owner = ''";

/// Grants the name to the waiting entry whose id ends with `end`.
async fn hand_over(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    release: &Release,
    end: u64,
) -> Result<ReleaseOutcome, sqlx::Error> {
    let name = release.name.as_str().as_bytes();
    let query = sqlx::query(HAND_OVER).bind(name).bind(release.id.to_string()).bind(release.token.get());
    let done = query.bind(name).bind(format!("%{end:015x}")).execute(&mut *conn).await?;
    if done.rows_affected() == 0 {
        // One of the two rows is locked or has changed since the refusal.
        return Ok(ReleaseOutcome::Awaited);
    }
    let token = token(done.last_insert_id())?;
    let taken = match flavor {
        Flavor::MariaDb => {
            sqlx::query(DELETE_GRANTED_RETURNING).bind(name).bind(token.get()).fetch_all(&mut *conn).await
        }
        Flavor::MySql => Ok(Vec::new()),
    };
    let id = match taken {
        // The row may arrive before the error that reverts its deletion.
        Err(error) if is_locked(flavor, &error) => None,
        rows => rows?.first().map(|row| row.text("id")).transpose()?,
    };
    let id = match id {
        Some(id) => id,
        None => read_and_delete_granted(conn, name, token).await?,
    };
    // If another client has deleted the entry already, the row of the name shows the holder.
    Ok(parse_id(&id)?
        .map_or(ReleaseOutcome::Ended { awaited: true }, |id| ReleaseOutcome::ToEntry(Granted { id, token })))
}

async fn read_and_delete_granted(
    conn: &mut MySqlConnection,
    name: &[u8],
    token: FencingToken,
) -> Result<String, sqlx::Error> {
    let query = sqlx::query(READ_GRANTED).bind(name).bind(token.get());
    let Some(row) = query.fetch_optional(&mut *conn).await? else {
        return Ok(NO_ID.into());
    };
    let id = row.text("id")?;
    let query = sqlx::query(DELETE_GRANTED).bind(name).bind(&id).bind(token.get());
    match query.execute(conn).await {
        // The grant is valid. A later transition deletes the entry, which has expired.
        Err(error) if is_timeout(&error) => {}
        done => {
            done?;
        }
    }
    Ok(id)
}

// Bind order: name, name, id, token.
#[rustfmt::skip]
const DELETE_ENTRY: Nowait = Nowait {
    mysql: "
DELETE FROM sqlock_entry
 WHERE name = ?
   AND id = (SELECT q.id FROM (SELECT s.id FROM sqlock_entry AS s WHERE s.name = ? AND s.id = ? LIMIT 1 FOR UPDATE NOWAIT) AS q)
   AND token = ? AND owner <> ''",
    mariadb: "
SET STATEMENT innodb_lock_wait_timeout = 0 FOR
DELETE FROM sqlock_entry WHERE name = ? AND name = ? AND id = ? AND token = ? AND owner <> ''",
};

// Bind order: keep_for, name, name, id, id, token.
#[rustfmt::skip]
const KEEP_ENTRY: Nowait = update_entry!(
    set: ["e.owner = '', e.client = '', e.expires_at = ", now!(), " + ?"],
    condition: ["e.token = ? AND e.owner <> ''"]);

// Bind order: name, id, token.
#[rustfmt::skip]
const HOLDING_ENTRY: &str = "SELECT 1 FROM sqlock_entry WHERE name = ? AND id = ? AND token = ? AND owner <> ''";

// Read after the deletion: a waiter that this statement misses does not see the holding any more.
// Bind order: name.
#[rustfmt::skip]
const IS_AWAITED: &str = "
SELECT CAST(EXISTS (SELECT 1 FROM sqlock_entry AS w FORCE INDEX (sqlock_entry_in_order) WHERE w.name = ? AND w.token = 0) AS SIGNED)";

/// Ends the holding of an entry.
async fn release_entry(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    release: &Release,
) -> Result<ReleaseOutcome, sqlx::Error> {
    let (name, id) = (release.name.as_str().as_bytes(), release.id.to_string());
    let query = if release.keep_for.is_zero() {
        sqlx::query(DELETE_ENTRY.sql(flavor)).bind(name).bind(name).bind(&id)
    } else {
        sqlx::query(KEEP_ENTRY.sql(flavor)).bind(micros(release.keep_for)).bind(name).bind(name).bind(&id).bind(&id)
    };
    match attempt(conn, flavor, query.bind(release.token.get())).await? {
        Attempt::Done(_) => {
            let row = sqlx::query(IS_AWAITED).bind(name).fetch_one(conn).await?;
            Ok(ReleaseOutcome::Ended { awaited: read_flag(&row, 0)? })
        }
        Attempt::Refused(_) => read_not_held(conn, &release.name).await,
        Attempt::Locked => {
            let query = sqlx::query(HOLDING_ENTRY).bind(name).bind(&id).bind(release.token.get());
            match query.fetch_optional(&mut *conn).await? {
                Some(_) => Ok(ReleaseOutcome::Locked),
                None => read_not_held(conn, &release.name).await,
            }
        }
    }
}

// ---- withdraw

/// Bind order: name, id, except.
macro_rules! own_entry {
    () => {
        "sqlock_entry AS s WHERE s.name = ? AND s.id = ? AND s.token <> ? AND s.owner <> ''"
    };
}

/// A range of one key, so that a row with another holder does not stay locked. Bind order: name,
/// name, id, except.
macro_rules! own_lease {
    () => {
        "sqlock_lease AS s WHERE s.name >= ? AND s.name < CONCAT(?, X'00') AND s.id = ? AND s.token <> ?"
    };
}

// The entry is locked first: no client can grant a locked entry the name.
#[rustfmt::skip]
const WITHDRAW_LOCK_ENTRY: &str = concat!("SELECT COUNT(*) INTO @sqlock_entries FROM ", own_entry!(), " FOR UPDATE SKIP LOCKED");
#[rustfmt::skip]
const WITHDRAW_LOCK_LEASE: &str = concat!("SELECT COUNT(*) INTO @sqlock_leases FROM ", own_lease!(), " FOR UPDATE SKIP LOCKED");

// Bind order: own_entry, own_lease.
#[rustfmt::skip]
const WITHDRAW_CHECK: &str = concat!("
SELECT @sqlock_entries = (SELECT COUNT(*) FROM ", own_entry!(), ") AND @sqlock_leases = (SELECT COUNT(*) FROM ", own_lease!(), ")
  INTO @sqlock_done");

// A row that must stay may be locked, so it must not be looked up. Bind order: name, name.
#[rustfmt::skip]
const WITHDRAW_DECIDE: &str = "
SELECT IF(@sqlock_done AND @sqlock_entries, ?, NULL), IF(@sqlock_done AND @sqlock_leases, ?, NULL)
  INTO @sqlock_entry_name, @sqlock_name";

// Bind order: id.
const WITHDRAW_ENTRY: &str = "DELETE FROM sqlock_entry WHERE name = @sqlock_entry_name AND id = ?";

#[rustfmt::skip]
const WITHDRAW_LEASE: &str = "
UPDATE sqlock_lease SET id = '', owner = '', client = '', expires_at = 0, holder = '', label = '' WHERE name = @sqlock_name";

// Read after the commit: a waiter that this statement misses does not see the holding any more.
// Bind order: name, name, id.
#[rustfmt::skip]
const WITHDRAW_RESULT: &str = "
SELECT CAST(@sqlock_done AS SIGNED),
       CAST(EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = ?)
            AND EXISTS (SELECT 1 FROM sqlock_entry AS w FORCE INDEX (sqlock_entry_in_order)
                         WHERE w.name = ? AND w.token = 0 AND w.id <> ?) AS SIGNED)";

pub(super) async fn withdraw(
    conn: &mut MySqlConnection,
    sending: Sending,
    name: &LockName,
    id: AcquisitionId,
    except: Option<FencingToken>,
) -> Result<WithdrawalOutcome, sqlx::Error> {
    let (name, id) = (&*name_literal(name), &*id_literal(id));
    let except = &*except.map_or(-1, FencingToken::get).to_string();
    let mut script = Script::new(sending);
    script.add(WITHDRAW_LOCK_ENTRY, &[name, id, except]);
    script.add(WITHDRAW_LOCK_LEASE, &[name, name, id, except]);
    script.add(WITHDRAW_CHECK, &[name, id, except, name, name, id, except]);
    script.add(WITHDRAW_DECIDE, &[name, name]);
    script.add(WITHDRAW_ENTRY, &[id]);
    script.add(WITHDRAW_LEASE, &[]);
    let row = script.run(conn, &filled(WITHDRAW_RESULT, &[name, name, id])).await?;
    Ok(if read_flag(&row, 0)? {
        WithdrawalOutcome::Gone { awaited: read_flag(&row, 1)? }
    } else {
        WithdrawalOutcome::Locked
    })
}

// ---- evict

/// The entries that hold with a token, or were released and keep the name unavailable. Bind order:
/// name, token.
macro_rules! entries_with_token {
    () => {
        "sqlock_entry AS e FORCE INDEX (sqlock_entry_in_order) WHERE e.name = ? AND e.token = ?"
    };
}

/// The row of a name that one lease holds with a token, or that stays unavailable after it. Bind
/// order: name, token.
macro_rules! lease_with_token {
    () => {
        "sqlock_lease AS l WHERE l.name = ? AND l.token = ? AND l.id NOT IN ('', 'entries')"
    };
}

/// The clients that lose a holding. Bind order: alone, sharing.
#[rustfmt::skip]
macro_rules! evicted_clients {
    () => {
        concat!("(SELECT l.client AS id FROM ", lease_with_token!(), " AND l.client <> ''
        UNION SELECT e.client FROM ", entries_with_token!(), " AND e.client <> '') AS n")
    };
}

// Bind order: sharing.
#[rustfmt::skip]
const EVICT_LOCK_ENTRIES: &str = concat!("SELECT COUNT(*) INTO @sqlock_entries FROM ", entries_with_token!(), " FOR UPDATE SKIP LOCKED");
// Bind order: evicted_clients.
const EVICT_LOCK_CLIENTS: &str = lock_clients!(evicted_clients!());

// A released holding that keeps the name unavailable is not counted as lost. Bind order: alone,
// sharing, alone, sharing, sharing, evicted_clients.
#[rustfmt::skip]
const EVICT_CHECK: &str = concat!("
SELECT EXISTS (SELECT 1 FROM ", lease_with_token!(), " AND l.id <> 'kept') OR EXISTS (SELECT 1 FROM ", entries_with_token!(), " AND e.owner <> ''),
       EXISTS (SELECT 1 FROM ", lease_with_token!(), ") OR EXISTS (SELECT 1 FROM ", entries_with_token!(), "),
       @sqlock_leases = 1 AND @sqlock_entries = (SELECT COUNT(*) FROM ", entries_with_token!(), ")
       AND ", are_clients_locked!(evicted_clients!()), "
  INTO @sqlock_lost, @sqlock_held, @sqlock_locked");

// Bind order: name.
const EVICT_DECIDE: &str = "SELECT IF(@sqlock_held AND @sqlock_locked, ?, NULL) INTO @sqlock_name";

// Bind order: evicted_clients.
const EVICT_NOTICE: &str = notice!(evicted_clients!());

/// Whether the eviction ends the holding in the row of the name. Bind order: token.
macro_rules! ends_row {
    () => {
        "l.token = ? AND l.id NOT IN ('', 'entries')"
    };
}
// Assignments run from left to right, so the identity is the last. Bind order: token, six times,
// and once more.
#[rustfmt::skip]
const EVICT_LEASE: &str = concat!("
UPDATE sqlock_lease AS l
   SET l.lost = IF(@sqlock_lost, GREATEST(l.lost, ?), l.lost),
       l.owner = IF(", ends_row!(), ", '', l.owner), l.client = IF(", ends_row!(), ", '', l.client),
       l.expires_at = IF(", ends_row!(), ", 0, l.expires_at), l.holder = IF(", ends_row!(), ", '', l.holder),
       l.label = IF(", ends_row!(), ", '', l.label), l.id = IF(", ends_row!(), ", '', l.id)
 WHERE l.name = @sqlock_name");

// Bind order: token.
#[rustfmt::skip]
const EVICT_ENTRIES: &str = "
DELETE e FROM sqlock_entry AS e FORCE INDEX (sqlock_entry_in_order)
 WHERE e.name = @sqlock_name AND e.token = ?";

pub(super) async fn evict(
    conn: &mut MySqlConnection,
    sending: Sending,
    name: &LockName,
    token: FencingToken,
) -> Result<ChangeOutcome, sqlx::Error> {
    let (n, t) = (&*name_literal(name), &*token.get().to_string());
    let mut script = Script::new(sending);
    script.add(LOCK_NAME, &[n]);
    script.add(EVICT_LOCK_ENTRIES, &[n, t]);
    script.add(EVICT_LOCK_CLIENTS, &[n, t, n, t]);
    script.add(EVICT_CHECK, &[n, t, n, t, n, t, n, t, n, t, n, t, n, t]);
    script.add(EVICT_DECIDE, &[n]);
    script.add(EVICT_NOTICE, &[n, t, n, t]);
    script.add(EVICT_LEASE, &[t; 7]);
    script.add(EVICT_ENTRIES, &[t]);
    amended(&script.run(conn, AMENDED).await?)
}
