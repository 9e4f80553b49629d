//! Leases: taken, shared with the same owner, changed and given back.

use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::store::{SqliteQuery, is_busy, transaction, transaction_until_row, until_row};
use crate::backend::stored::{Stored as _, client_text, holder, holder_now, lease_row};
use crate::backend::{in_doubt, micros, token as positive};
use crate::name::LockName;
use crate::protocol::{
    Amended, Claim, Extension, Granted, Holder, HolderNow, Joined, Keeper, LeaseId, Mode, Release, Released, Withdrawn,
};
use crate::token::FencingToken;

// ---- acquiring

/// How a claim stands: the row of its name, with `own`, the token that it holds or 0. `is_first`: this was read before anything was
/// written.
#[rustfmt::skip]
macro_rules! standing {
    ($is_first:literal) => {
        concat!("
SELECT ", lease_columns!(), ", ", $is_first, " AS is_first,
       CASE WHEN l.id = $2 THEN l.token
            ELSE coalesce((SELECT o.token FROM sqlock_entry AS o WHERE o.name = $1 AND o.id = $2 AND o.owner <> ''), 0)
            END AS own
  FROM sqlock_lease AS l WHERE l.name = $1")
    };
}

// $1 name, $2 id, $3 owner, $4 client, $5 ttl, $6 holder, $7 label. A refused claim only reads. Another may be faster before the
// INSERT, which looks for itself. The token is read after it: see `until_row`.
#[rustfmt::skip]
const ACQUIRE: &str = concat!(
standing!("1"), " AND NOT ", vacant!(), ";", take!(), ";",
standing!("0"));

/// The claim finds room among those that share the name, and nobody waits. The two lookups by key come first.
#[rustfmt::skip]
macro_rules! room {
    () => {
        concat!("
       (l.id IN ('', 'entries') AND NOT ", awaited!(), "
        AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS o WHERE o.name = $1 AND o.id = $2)
        AND (SELECT coalesce(sum(e.units), 0) + $8 <= $9 AND (l.id = '' OR count(*) > 0 AND min(e.units) > 0)
               FROM sqlock_entry AS e WHERE e.name = $1 AND e.token > 0))")
    };
}

// As ACQUIRE, and $8 units, $9 permits.
#[rustfmt::skip]
const SHARE: &str = concat!(
standing!("1"), " AND NOT ", room!(), ";
BEGIN IMMEDIATE;
INSERT INTO sqlock_lease AS l (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)
SELECT $1, 'entries', '', '', ", now!(), ", 0, 0, ", now!(), ", '', '' WHERE $8 <= $9
    ON CONFLICT (name) DO UPDATE
   SET id = 'entries', owner = '', client = '', token = max(l.token + 1, excluded.token),
       acquired_at = excluded.acquired_at, holder = '', label = ''
 WHERE ", room!(), ";
INSERT INTO sqlock_entry (name, id, owner, client, is_kept, units, permits, token, ttl, arrived_at, expires_at, acquired_at,
                          holder, label)
SELECT $1, $2, $3, $4, $4 <> '', $8, $9, l.token, $5, 0, l.acquired_at + $5, l.acquired_at, $6, $7
  FROM sqlock_lease AS l WHERE l.name = $1 AND changes() = 1;
COMMIT;",
standing!("0"));

// As ACQUIRE
const STANDING: &str = standing!("0");

/// Takes a name that is free, or shares it. Returns the token, or what the refusal tells of the holder.
pub(super) async fn acquire(
    conn: &mut SqliteConnection,
    claim: &Claim,
) -> Result<Result<FencingToken, HolderNow>, sqlx::Error> {
    let answered = match claim.mode {
        Mode::Exclusive => until_row(conn, bind_claim(ACQUIRE, claim)).await,
        Mode::Shared { .. } => {
            let (units, permits) = claim.mode.stored();
            transaction_until_row(conn, bind_claim(SHARE, claim).bind(units).bind(permits)).await
        }
    };
    match answered {
        Ok(row) => match standing(row)? {
            (Ok(_), true) => acquire_again(conn, claim).await,
            (answer, _) => Ok(answer),
        },
        // It may be the last SELECT that was refused, and the claim was granted before it.
        Err(busy) if is_busy(&busy) => {
            let row = until_row(conn, bind_claim(STANDING, claim)).await.map_err(in_doubt)?;
            if standing(row)?.0.is_ok() { acquire_again(conn, claim).await } else { Err(busy) }
        }
        Err(error) => Err(error),
    }
}

/// What a repeated claim changes, in either table.
#[rustfmt::skip]
macro_rules! again {
    () => {
        concat!("
   SET client = CASE WHEN client = '' THEN $4 ELSE client END, ttl = max(ttl, $5), expires_at = max(expires_at, ", now!(), " + $5)
 WHERE name = $1 AND id = $2")
    };
}

// As ACQUIRE: the claim was granted before.
#[rustfmt::skip]
const ACQUIRE_AGAIN: &str = concat!("
UPDATE sqlock_lease", again!(), ";",
standing!("0"), " AND changes() > 0;
UPDATE sqlock_entry", again!(), " AND token > 0 AND owner <> '';",
standing!("0"));

/// Lets a claim that was granted before last anew.
async fn acquire_again(
    conn: &mut SqliteConnection,
    claim: &Claim,
) -> Result<Result<FencingToken, HolderNow>, sqlx::Error> {
    // SQLITE_BUSY would say that nothing has been acquired.
    let row = until_row(conn, bind_claim(ACQUIRE_AGAIN, claim)).await.map_err(in_doubt)?;
    Ok(standing(row)?.0)
}

/// Reads a row of [`standing`]: the token or what a refusal tells, and `is_first`.
fn standing(row: Option<SqliteRow>) -> Result<(Result<FencingToken, HolderNow>, bool), sqlx::Error> {
    let Some(row) = row else {
        return Ok((Err(HolderNow::Vacant), false));
    };
    let own = positive(row.number("own")?);
    Ok((own.ok_or(holder_now(&lease_row(&row)?)), row.number("is_first")? != 0))
}

/// Binds the parameters of [`ACQUIRE`].
pub(super) fn bind_claim<'q>(sql: &'static str, claim: &'q Claim) -> SqliteQuery<'q> {
    sqlx::query(sql)
        .bind(claim.name.as_str())
        .bind(claim.id.to_string())
        .bind(claim.owner.to_string())
        .bind(client_text(claim.is_kept.then_some(claim.client)))
        .bind(micros(claim.ttl))
        .bind(&*claim.holder)
        .bind(&*claim.label)
}

/// The entry `o` is that of the same acquisition, from an earlier request.
macro_rules! joined {
    () => {
        "o.owner <> '' AND o.token = excluded.token"
    };
}

// As ACQUIRE. An entry for the acquisition, if the owner holds the name; then one for the lease that has held it alone.
#[rustfmt::skip]
const JOIN: &str = concat!("
BEGIN IMMEDIATE;
INSERT INTO sqlock_entry AS o (name, id, owner, client, is_kept, units, permits, token, ttl, arrived_at, expires_at, acquired_at,
                               holder, label)
SELECT $1, $2, $3, $4, 1, 0, 0, l.token, $5, 0, ", now!(), " + $5, ", now!(), ", $6,
       CASE WHEN $7 <> '' THEN $7 WHEN l.id <> 'entries' THEN l.label
            ELSE (SELECT max(e.label) FROM sqlock_entry AS e WHERE e.name = $1 AND e.token = l.token) END
  FROM sqlock_lease AS l
 WHERE l.name = $1 AND l.owner = $3 AND l.id NOT IN ('', 'kept', $2)
   AND CASE WHEN l.id <> 'entries' THEN ", lease_until!("l"), " > ", now!(), "
            ELSE EXISTS (SELECT 1 FROM sqlock_entry AS e
                          WHERE e.name = $1 AND e.token = l.token AND e.units = 0 AND e.owner = $3
                            AND ", entry_until!("e"), " > ", now!(), ") END
    ON CONFLICT (name, id) DO UPDATE           -- the same acquisition, sent again, lasts no shorter than before
   SET client = CASE WHEN ", joined!(), " AND o.client <> '' THEN o.client ELSE excluded.client END,
       ttl = CASE WHEN ", joined!(), " THEN max(o.ttl, excluded.ttl) ELSE excluded.ttl END,
       expires_at = CASE WHEN ", joined!(), " THEN max(o.expires_at, excluded.expires_at) ELSE excluded.expires_at END,
       acquired_at = CASE WHEN ", joined!(), " THEN o.acquired_at ELSE excluded.acquired_at END,
       owner = excluded.owner, is_kept = 1, units = 0, permits = 0, token = excluded.token, arrived_at = 0,
       holder = excluded.holder, label = excluded.label
RETURNING token;
INSERT OR REPLACE INTO sqlock_entry (name, id, owner, client, is_kept, units, permits, token, ttl, arrived_at, expires_at,
                                     acquired_at, holder, label)
SELECT name, id, owner, client, 1, 0, 0, token, ttl, 0, expires_at, acquired_at, holder, label
  FROM sqlock_lease WHERE name = $1 AND id <> 'entries' AND changes() = 1;
UPDATE sqlock_lease SET id = 'entries', client = '', holder = '', label = '' WHERE name = $1 AND changes() = 1;
COMMIT");

/// Adds an acquisition to an exclusive holding of the same owner.
pub(super) async fn join(conn: &mut SqliteConnection, claim: &Claim) -> Result<Joined, sqlx::Error> {
    let rows = transaction(conn, bind_claim(JOIN, claim)).await?;
    let token = rows.first().map(|row| row.number("token")).transpose()?;
    Ok(token.and_then(positive).map_or(Joined::NotHeld, Joined::Done))
}

// ---- ending

/// How a name stands after a write. `done`: the write before this has changed a row. `next_token`: what the next holder `$4` holds.
#[rustfmt::skip]
macro_rules! how_it_stands {
    ("next") => {
        concat!("
SELECT changes() AS done, ", awaited!(), " AS awaited, l.id, l.token, l.lost,
       CASE WHEN l.id = $4 THEN l.token
            ELSE coalesce((SELECT o.token FROM sqlock_entry AS o WHERE o.name = $1 AND o.id = $4 AND o.owner <> ''), 0)
            END AS next_token
  FROM sqlock_lease AS l WHERE l.name = $1")
    };
    ("nobody") => {
        concat!("
SELECT changes() AS done, ", awaited!(), " AS awaited, l.id, l.token, l.lost, 0 AS next_token
  FROM sqlock_lease AS l WHERE l.name = $1")
    };
}

/// Changes the row of the name or, where the acquisition shares the name, its entry. The first row returned counts. One transaction:
/// what was released may be swept before another statement reads it.
#[rustfmt::skip]
macro_rules! release {
    ($next:tt, $lease:expr, $entry:expr) => {
        concat!(
            "
BEGIN IMMEDIATE;",
            $lease,
            ";",
            how_it_stands!($next),
            "
   AND (changes() = 1 OR NOT EXISTS (SELECT 1 FROM sqlock_entry AS o
                                      WHERE o.name = $1 AND o.id = $2 AND o.token = $3 AND o.owner <> ''));",
            $entry,
            "
 WHERE name = $1 AND id = $2 AND token = $3 AND owner <> '';",
            how_it_stands!($next),
            ";
COMMIT"
        )
    };
}

// $1 name, $2 id, $3 token
#[rustfmt::skip]
const RELEASE: &str = release!("nobody", free!(), "
DELETE FROM sqlock_entry");

// As RELEASE, and $4 how long the name is kept from others.
#[rustfmt::skip]
const RELEASE_AND_KEEP: &str = release!("nobody", concat!("
UPDATE sqlock_lease SET id = 'kept', owner = '', client = '', expires_at = ", now!(), " + $4
 WHERE name = $1 AND id = $2 AND token = $3"), concat!("
UPDATE sqlock_entry SET owner = '', client = '', expires_at = ", now!(), " + $4"));

// As RELEASE; the next holder: $4 id, $5 owner, $6 client, $7 ttl, $8 holder, $9 label.
#[rustfmt::skip]
const RELEASE_TO_NEXT: &str = release!("next", concat!("
UPDATE sqlock_lease
   SET id = $4, owner = $5, client = $6, token = max(token + 1, ", now!(), "), ttl = $7, expires_at = ", now!(), " + $7,
       acquired_at = ", now!(), ", holder = $8, label = $9
 WHERE name = $1 AND id = $2 AND token = $3 AND NOT ", awaited!()), "
DELETE FROM sqlock_entry");

// $1 name, $2 id, $3 token. To the first of the first 64 that is alive, if it wants the name for itself.
#[rustfmt::skip]
const HAND_OVER: &str = concat!("
BEGIN IMMEDIATE;
UPDATE sqlock_lease AS l
   SET id = e.id, owner = e.owner, client = CASE WHEN e.is_kept THEN e.client ELSE '' END, token = max(l.token + 1, ", now!(), "),
       ttl = min(e.ttl, ", grant!(), "), expires_at = ", now!(), " + min(e.ttl, ", grant!(), "), acquired_at = ", now!(), ",
       holder = e.holder, label = e.label
  FROM (SELECT * FROM (SELECT * FROM sqlock_entry WHERE name = $1 AND token = 0 ORDER BY arrived_at, id LIMIT 64) AS w
         WHERE ", entry_until!("w"), " > ", now!(), " ORDER BY w.arrived_at, w.id LIMIT 1) AS e
 WHERE l.name = $1 AND l.id = $2 AND l.token = $3 AND e.units = 0;
DELETE FROM sqlock_entry
 WHERE name = $1 AND token = 0 AND changes() = 1 AND id = (SELECT l.id FROM sqlock_lease AS l WHERE l.name = $1);",
how_it_stands!("nobody"), ";
COMMIT");

/// Ends a holding: hands the name to the first live entry, to a given claim if nobody waits, or frees it.
pub(super) async fn release(conn: &mut SqliteConnection, release: &Release) -> Result<Released, sqlx::Error> {
    let Release { name, id, token, keep_for, next } = release;
    let bind = |sql| sqlx::query(sql).bind(name.as_str()).bind(id.to_string()).bind(token.get());
    let query = match next {
        _ if !keep_for.is_zero() => bind(RELEASE_AND_KEEP).bind(micros(*keep_for)),
        None => bind(RELEASE),
        Some(next) => bind(RELEASE_TO_NEXT)
            .bind(next.id.to_string())
            .bind(next.owner.to_string())
            .bind(client_text(next.is_kept.then_some(next.client)))
            .bind(micros(next.ttl))
            .bind(&*next.holder)
            .bind(&*next.label),
    };
    let rows = transaction(conn, query).await?;
    let Some(row) = rows.first().map(Standing::of).transpose()? else {
        return Ok(Released::NotHeld { lost: 0, token: 0 });
    };
    let is_meant = |row: &Standing| row.holder == Holder::Lease(*id) && row.token == token.get();
    let not_held = |row: &Standing| Released::NotHeld { lost: row.lost, token: row.token };
    if row.is_done {
        return Ok(row.next.map_or(Released::Ended { awaited: row.is_awaited }, Released::ToNext));
    }
    if !is_meant(&row) {
        return Ok(not_held(&row));
    }
    if next.is_some() {
        return Ok(Released::Awaited);
    }
    let rows = transaction(conn, bind(HAND_OVER)).await?;
    let Some(row) = rows.first().map(Standing::of).transpose()? else {
        return Ok(Released::NotHeld { lost: 0, token: 0 });
    };
    Ok(match (row.holder, positive(row.token)) {
        (Holder::Lease(id), Some(token)) if row.is_done => Released::ToEntry(Granted { id, token }),
        _ if is_meant(&row) => Released::Awaited,
        _ => not_held(&row),
    })
}

/// What [`how_it_stands`] reads.
struct Standing {
    is_done: bool,
    is_awaited: bool,
    holder: Holder,
    token: i64,
    lost: i64,
    next: Option<FencingToken>,
}

impl Standing {
    fn of(row: &SqliteRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            is_done: row.number("done")? != 0,
            is_awaited: row.number("awaited")? != 0,
            holder: holder(&row.text("id")?)?,
            token: row.number("token")?,
            lost: row.number("lost")?,
            next: positive(row.number("next_token")?),
        })
    }
}

// $1 name, $2 id, $3 the token of a holding that stays, or 0
#[rustfmt::skip]
const WITHDRAW: &str = concat!("
BEGIN IMMEDIATE;
DELETE FROM sqlock_entry WHERE name = $1 AND id = $2 AND owner <> '' AND (token = 0 OR token <> $3);
UPDATE sqlock_lease SET id = '', owner = '', client = '', expires_at = 0 WHERE name = $1 AND id = $2 AND token <> $3;
SELECT ", awaited!(), " AS awaited FROM sqlock_lease WHERE name = $1;
COMMIT");

/// Deletes the waiting entry of an acquisition, and ends its holding, unless that has the token `except`.
pub(super) async fn withdraw(
    conn: &mut SqliteConnection,
    name: &LockName,
    id: LeaseId,
    except: Option<FencingToken>,
) -> Result<Withdrawn, sqlx::Error> {
    let query =
        sqlx::query(WITHDRAW).bind(name.as_str()).bind(id.to_string()).bind(except.map_or(0, FencingToken::get));
    let rows = transaction(conn, query).await?;
    let awaited = rows.first().map(|row| row.number("awaited")).transpose()?;
    Ok(Withdrawn::Gone { awaited: awaited.is_some_and(|awaited| awaited != 0) })
}

/// `$2` token. One lease holds the name with it.
macro_rules! held_alone {
    () => {
        "(token = $2 AND id NOT IN ('', 'kept', 'entries'))"
    };
}

/// The same, or it was released with that token and is kept from others.
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
SELECT client, 0, 1
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

/// Ends the holding with this token, and gives its clients a notice.
pub(super) async fn evict(
    conn: &mut SqliteConnection,
    name: &LockName,
    token: FencingToken,
) -> Result<Amended, sqlx::Error> {
    let rows = transaction(conn, sqlx::query(EVICT).bind(name.as_str()).bind(token.get())).await?;
    Ok(if rows.is_empty() { Amended::NotHeld } else { Amended::Done })
}

// ---- changing

/// What an extension changes, in either table.
#[rustfmt::skip]
macro_rules! extended {
    () => {
        concat!("
   SET id = coalesce($8, id), client = CASE WHEN client = $7 THEN '' ELSE coalesce($6, client) END, ttl = max(ttl, $5),
       expires_at = max(expires_at, ", now!(), " + $4)
 WHERE name = $1 AND token = $3 AND ($2 IS NULL OR id IN ($2, $8))")
    };
}

// $1 name, $2 id or NULL for any, $3 token, $4 how long it lasts, $5 ttl, $6 the client that is to keep it or NULL, $7 the client that
// is not to keep it any more or NULL, $8 the new id or NULL. One lease that holds alone; otherwise entries.
#[rustfmt::skip]
const EXTEND: &str = concat!("
UPDATE sqlock_lease AS l", extended!(), " AND id NOT IN ('', 'kept', 'entries') AND (client = $7 OR ", lease_until!("l"), " > ", now!(), ");
SELECT 1 AS done WHERE changes() > 0;
UPDATE OR REPLACE sqlock_entry AS e", extended!(), " AND id IN (SELECT o.id FROM sqlock_entry AS o WHERE o.name = $1 AND o.token = $3)
   AND owner <> '' AND (client = $7 OR ", entry_until!("e"), " > ", now!(), ");
SELECT 1 AS done WHERE changes() > 0");

/// Moves the end of a valid holding, and changes whose heartbeat keeps it.
pub(super) async fn extend(conn: &mut SqliteConnection, extension: &Extension) -> Result<Amended, sqlx::Error> {
    let Extension { name, id, renamed, token, lasts, ttl, keeper } = extension;
    let (kept_by, not_by) = match keeper {
        Keeper::Same => (None, None),
        Keeper::Client(client) => (Some(client.to_string()), None),
        Keeper::NotThisClient(client) => (None, Some(client.to_string())),
    };
    let query = sqlx::query(EXTEND)
        .bind(name.as_str())
        .bind(id.map(|id| id.to_string()))
        .bind(token.get())
        .bind(micros(*lasts))
        .bind(ttl.map_or(0, micros))
        .bind(kept_by)
        .bind(not_by)
        .bind(renamed.map(|id| id.to_string()));
    Ok(if until_row(conn, query).await?.is_some() { Amended::Done } else { Amended::NotHeld })
}

// $1 name, $2 id, $3 token, $4 units, $5 permits. The SELECT finds what was downgraded before as well.
#[rustfmt::skip]
const DOWNGRADE: &str = "
BEGIN IMMEDIATE;
INSERT OR REPLACE INTO sqlock_entry (name, id, owner, client, is_kept, units, permits, token, ttl, arrived_at, expires_at,
                                     acquired_at, holder, label)
SELECT name, id, owner, client, client <> '', $4, $5, token, ttl, 0, expires_at, acquired_at, holder, label
  FROM sqlock_lease WHERE name = $1 AND id = $2 AND token = $3;
UPDATE sqlock_lease SET id = 'entries', owner = '', client = '', holder = '', label = '' WHERE name = $1 AND changes() = 1;
UPDATE sqlock_entry AS e SET units = $4, permits = $5
 WHERE e.name = $1 AND e.id = $2 AND e.token = $3 AND e.owner <> '' AND e.units = 0
   AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS o WHERE o.name = $1 AND o.token > 0 AND o.id <> $2);
UPDATE sqlock_lease SET owner = '' WHERE name = $1 AND id = 'entries' AND changes() = 1;
SELECT 1 AS done FROM sqlock_entry
 WHERE name = $1 AND id = $2 AND token = $3 AND owner <> '' AND units = $4 AND permits = $5;
COMMIT";

/// Turns an exclusive holding of one lease into a shared one, with the same token.
pub(super) async fn downgrade(
    conn: &mut SqliteConnection,
    name: &LockName,
    id: LeaseId,
    token: FencingToken,
) -> Result<Amended, sqlx::Error> {
    let (units, permits) = Mode::READ.stored();
    let query =
        sqlx::query(DOWNGRADE).bind(name.as_str()).bind(id.to_string()).bind(token.get()).bind(units).bind(permits);
    Ok(if transaction(conn, query).await?.is_empty() { Amended::NotHeld } else { Amended::Done })
}

// $1 name, $2 id, $3 token, $4 the token that it is raised to. A repeated request finds that token.
#[rustfmt::skip]
const RAISE: &str = "
UPDATE sqlock_lease SET token = $4
 WHERE name = $1 AND id = $2 AND (token = $3 AND $3 < $4 OR token = $4)";

/// Gives an exclusive holding of one lease a higher token.
pub(super) async fn raise(
    conn: &mut SqliteConnection,
    name: &LockName,
    id: LeaseId,
    token: FencingToken,
    to: FencingToken,
) -> Result<Amended, sqlx::Error> {
    let query = sqlx::query(RAISE).bind(name.as_str()).bind(id.to_string()).bind(token.get()).bind(to.get());
    let done = query.execute(conn).await?;
    Ok(if done.rows_affected() == 1 { Amended::Done } else { Amended::NotHeld })
}
