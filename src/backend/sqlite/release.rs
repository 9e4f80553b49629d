//! Ends holdings: by release, withdrawal or eviction.

use std::time::Duration;

use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::acquire::bind_holder;
use super::store::transaction;
use crate::backend::stored::{TableRow as _, holder};
use crate::backend::{micros, token as token_from_row};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, ChangeOutcome, Granted, Holder, Release, ReleaseOutcome, WithdrawalOutcome};
use crate::token::FencingToken;

/// Selects the row of a name after a write. `done`: the write has changed a row. `next_token`: the
/// token that the next holder `$4` holds, or 0.
#[rustfmt::skip]
macro_rules! lease_state {
    ("next") => {
        concat!("
SELECT changes() AS done, ", is_awaited!("$1"), " AS awaited, l.id, l.token, l.lost,
       CASE WHEN l.id = $4 THEN l.token
            ELSE coalesce((SELECT o.token FROM sqlock_entry AS o WHERE o.name = $1 AND o.id = $4 AND o.owner <> ''), 0)
            END AS next_token
  FROM sqlock_lease AS l WHERE l.name = $1")
    };
    ("no next") => {
        concat!("
SELECT changes() AS done, ", is_awaited!("$1"), " AS awaited, l.id, l.token, l.lost, 0 AS next_token
  FROM sqlock_lease AS l WHERE l.name = $1")
    };
}

/// Changes the row of the name or, if the acquisition shares the name, its entry. The first
/// returned row is the result. The transaction keeps the row from being purged before it is read.
#[rustfmt::skip]
macro_rules! release {
    ($next:tt, $lease:expr, $entry:expr) => {
        concat!(
            "
BEGIN IMMEDIATE;",
            $lease,
            ";",
            lease_state!($next),
            "
   AND (changes() = 1 OR NOT EXISTS (SELECT 1 FROM sqlock_entry AS o
                                      WHERE o.name = $1 AND o.id = $2 AND o.token = $3 AND o.owner <> ''));",
            $entry,
            "
 WHERE name = $1 AND id = $2 AND token = $3 AND owner <> '';",
            lease_state!($next),
            ";
COMMIT"
        )
    };
}

// $1 name, $2 id, $3 token
#[rustfmt::skip]
const RELEASE: &str = release!("no next", concat!("
UPDATE sqlock_lease ", set_free!(), "
 WHERE name = $1 AND id = $2 AND token = $3 AND NOT ", is_awaited!("$1")), "
DELETE FROM sqlock_entry");

/// How far SQLite's clock may be behind: its resolution, and the error of a Julian day in a double.
const CLOCK_ERROR: Duration = Duration::from_millis(2);

// As RELEASE, and $4 how long the name stays unavailable.
#[rustfmt::skip]
const RELEASE_AND_KEEP: &str = release!("no next", concat!("
UPDATE sqlock_lease SET id = 'kept', owner = '', client = '', expires_at = ", now!(), " + $4
 WHERE name = $1 AND id = $2 AND token = $3"), concat!("
UPDATE sqlock_entry SET owner = '', client = '', expires_at = ", now!(), " + $4"));

// As RELEASE; the next holder: $4 id, $5 owner, $6 client, $7 ttl, $8 holder, $9 label.
#[rustfmt::skip]
const RELEASE_TO_NEXT: &str = release!("next", concat!("
UPDATE sqlock_lease
   SET id = $4, owner = $5, client = $6, token = max(token + 1, ", now!(), "), ttl = $7, expires_at = ", now!(), " + $7,
       acquired_at = ", now!(), ", holder = $8, label = $9
 WHERE name = $1 AND id = $2 AND token = $3 AND NOT ", is_awaited!("$1")), "
DELETE FROM sqlock_entry");

// $1 name, $2 id, $3 token. The next holder is the first live one of the first 64 waiting entries,
// if its mode is exclusive.
#[rustfmt::skip]
const HAND_OVER: &str = concat!("
BEGIN IMMEDIATE;
UPDATE sqlock_lease AS l
   SET id = e.id, owner = e.owner, client = CASE WHEN e.is_renewed THEN e.client ELSE '' END, token = max(l.token + 1, ", now!(), "),
       ttl = min(e.ttl, ", grant!(), "), expires_at = ", now!(), " + min(e.ttl, ", grant!(), "), acquired_at = ", now!(), ",
       holder = e.holder, label = e.label
  FROM (SELECT * FROM (SELECT * FROM sqlock_entry WHERE name = $1 AND token = 0 ORDER BY arrived_at, id LIMIT 64) AS w
         WHERE ", entry_until!("w"), " > ", now!(), " ORDER BY w.arrived_at, w.id LIMIT 1) AS e
 WHERE l.name = $1 AND l.id = $2 AND l.token = $3 AND e.units = 0;
DELETE FROM sqlock_entry
 WHERE name = $1 AND token = 0 AND changes() = 1 AND id = (SELECT l.id FROM sqlock_lease AS l WHERE l.name = $1);",
lease_state!("no next"), ";
COMMIT");

/// Ends a holding. Grants the name to the first live entry, or to the given claim if no entry
/// waits, or frees it.
pub(super) async fn release(conn: &mut SqliteConnection, release: &Release) -> Result<ReleaseOutcome, sqlx::Error> {
    let Release { name, id, token, keep_for, next } = release;
    let bind = |sql| sqlx::query(sql).bind(name.as_str()).bind(id.to_string()).bind(token.get());
    let query = match next {
        _ if !keep_for.is_zero() => bind(RELEASE_AND_KEEP).bind(micros(*keep_for + CLOCK_ERROR)),
        None => bind(RELEASE),
        Some(next) => bind_holder(bind(RELEASE_TO_NEXT), next),
    };
    let rows = transaction(conn, query).await?;
    let Some(row) = rows.first().map(LeaseState::from_row).transpose()? else {
        return Ok(ReleaseOutcome::NotHeld { lost: 0, token: 0 });
    };
    let is_meant = |row: &LeaseState| row.holder == Holder::Lease(*id) && row.token == token.get();
    let not_held = |row: &LeaseState| ReleaseOutcome::NotHeld { lost: row.lost, token: row.token };
    if row.is_done {
        return Ok(row.next.map_or(ReleaseOutcome::Ended { awaited: row.is_awaited }, ReleaseOutcome::ToNext));
    }
    if !is_meant(&row) {
        return Ok(not_held(&row));
    }
    if next.is_some() {
        return Ok(ReleaseOutcome::Awaited);
    }
    let rows = transaction(conn, bind(HAND_OVER)).await?;
    let Some(row) = rows.first().map(LeaseState::from_row).transpose()? else {
        return Ok(ReleaseOutcome::NotHeld { lost: 0, token: 0 });
    };
    Ok(match (row.holder, token_from_row(row.token)) {
        (Holder::Lease(id), Some(token)) if row.is_done => ReleaseOutcome::ToEntry(Granted { id, token }),
        _ if is_meant(&row) => ReleaseOutcome::Awaited,
        _ => not_held(&row),
    })
}

/// A row of `lease_state!`.
struct LeaseState {
    is_done: bool,
    is_awaited: bool,
    holder: Holder,
    token: i64,
    lost: i64,
    next: Option<FencingToken>,
}

impl LeaseState {
    fn from_row(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            is_done: row.number("done")? != 0,
            is_awaited: row.number("awaited")? != 0,
            holder: holder(&row.text("id")?)?,
            token: row.number("token")?,
            lost: row.number("lost")?,
            next: token_from_row(row.number("next_token")?),
        })
    }
}

// $1 name, $2 id, $3 the token of a holding that stays, or 0
#[rustfmt::skip]
const WITHDRAW: &str = concat!("
BEGIN IMMEDIATE;
DELETE FROM sqlock_entry WHERE name = $1 AND id = $2 AND owner <> '' AND (token = 0 OR token <> $3);
UPDATE sqlock_lease ", set_free!(), " WHERE name = $1 AND id = $2 AND token <> $3;
SELECT ", is_awaited!("$1"), " AS awaited FROM sqlock_lease WHERE name = $1;
COMMIT");

/// Deletes the entry of an acquisition and ends its holding, unless that has the token `except`.
pub(super) async fn withdraw(
    conn: &mut SqliteConnection,
    name: &LockName,
    id: AcquisitionId,
    except: Option<FencingToken>,
) -> Result<WithdrawalOutcome, sqlx::Error> {
    let query =
        sqlx::query(WITHDRAW).bind(name.as_str()).bind(id.to_string()).bind(except.map_or(0, FencingToken::get));
    let rows = transaction(conn, query).await?;
    let awaited = rows.first().map(|row| row.number("awaited")).transpose()?;
    Ok(WithdrawalOutcome::Gone { awaited: awaited.is_some_and(|awaited| awaited != 0) })
}

/// Whether one lease holds the name with the token `$2`.
macro_rules! held_alone {
    () => {
        "(token = $2 AND id NOT IN ('', 'kept', 'entries'))"
    };
}

/// The same, or the name was released with that token and stays unavailable.
macro_rules! kept_alone {
    () => {
        "(token = $2 AND id NOT IN ('', 'entries'))"
    };
}

// $1 name, $2 token
#[rustfmt::skip]
const EVICT: &str = concat!("
BEGIN IMMEDIATE;
INSERT INTO sqlock_client (id, beat_at, notice)
SELECT client, 0, ", now!(), "
  FROM (SELECT client FROM sqlock_lease WHERE name = $1 AND ", held_alone!(), "
         UNION
        SELECT client FROM sqlock_entry WHERE name = $1 AND token = $2)
 WHERE client <> ''
    ON CONFLICT (id) DO UPDATE SET notice = notice + 1;
UPDATE sqlock_lease
   SET lost = CASE WHEN ", held_alone!(), "
                     OR EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = $1 AND e.token = $2 AND e.owner <> '')
                   THEN max(lost, $2) ELSE lost END,
       id = CASE WHEN ", kept_alone!(), " THEN '' ELSE id END,
       owner = CASE WHEN ", kept_alone!(), " THEN '' ELSE owner END,
       client = CASE WHEN ", kept_alone!(), " THEN '' ELSE client END,
       expires_at = CASE WHEN ", kept_alone!(), " THEN 0 ELSE expires_at END
 WHERE name = $1 AND (", kept_alone!(), " OR EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = $1 AND e.token = $2))
RETURNING name;
DELETE FROM sqlock_entry
 WHERE name = $1 AND id IN (SELECT o.id FROM sqlock_entry AS o WHERE o.name = $1 AND o.token = $2);
COMMIT");

/// Ends the holding with a token, and gives its clients a notice.
pub(super) async fn evict(
    conn: &mut SqliteConnection,
    name: &LockName,
    token: FencingToken,
) -> Result<ChangeOutcome, sqlx::Error> {
    let rows = transaction(conn, sqlx::query(EVICT).bind(name.as_str()).bind(token.get())).await?;
    Ok(if rows.is_empty() { ChangeOutcome::NotHeld } else { ChangeOutcome::Done })
}
