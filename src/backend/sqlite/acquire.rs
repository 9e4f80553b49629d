//! Acquires a name, or joins a holding of the same owner.

use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;

use super::store::{SqliteQuery, in_doubt, is_busy, transaction, transaction_until_row, until_row};
use crate::backend::stored::{TableRow as _, client_text, current_holder, read_lease};
use crate::backend::{micros, token as token_from_row};
use crate::protocol::{Claim, CurrentHolder, JoinOutcome, Mode};
use crate::token::FencingToken;

/// Selects the row of a name, with `own`, the token that the claim holds, or 0. `is_first`: the row
/// was read before the claim wrote anything.
#[rustfmt::skip]
macro_rules! claim_state {
    ($is_first:literal) => {
        concat!("
SELECT ", lease_columns!(), ", ", $is_first, " AS is_first,
       CASE WHEN l.id = $2 THEN l.token
            ELSE coalesce((SELECT o.token FROM sqlock_entry AS o WHERE o.name = $1 AND o.id = $2 AND o.owner <> ''), 0)
            END AS own
  FROM sqlock_lease AS l WHERE l.name = $1")
    };
}

// $1 name, $2 id, $3 owner, $4 client, $5 ttl, $6 holder, $7 label. A refused claim only reads. The
// INSERT checks the row again, since another claim may be granted before it. The token is read
// after the INSERT: see `until_row`.
#[rustfmt::skip]
const ACQUIRE: &str = concat!(
claim_state!("1"), " AND NOT ", is_vacant!("$1", "$2"), ";",
grant_vacant!(concat!("
VALUES ($1, $2, $3, $4, ", now!(), ", $5, ", now!(), " + $5, ", now!(), ", $6, $7)")), ";",
claim_state!("0"));

/// Whether the name has enough free permits for the claim and no waiter. The two lookups by key
/// come first.
#[rustfmt::skip]
macro_rules! has_room {
    () => {
        concat!("
       (l.id IN ('', 'entries') AND NOT ", is_awaited!("$1"), "
        AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS o WHERE o.name = $1 AND o.id = $2)
        AND (SELECT coalesce(sum(e.units), 0) + $8 <= $9 AND (l.id = '' OR count(*) > 0 AND min(e.units) > 0)
               FROM sqlock_entry AS e WHERE e.name = $1 AND e.token > 0))")
    };
}

// As ACQUIRE, and $8 units, $9 permits.
#[rustfmt::skip]
const SHARE: &str = concat!(
claim_state!("1"), " AND NOT ", has_room!(), ";
BEGIN IMMEDIATE;
INSERT INTO sqlock_lease AS l (name, id, owner, client, token, ttl, expires_at, acquired_at, holder, label)
SELECT $1, 'entries', '', '', ", now!(), ", 0, 0, ", now!(), ", '', '' WHERE $8 <= $9
    ON CONFLICT (name) DO UPDATE
   SET id = 'entries', owner = '', client = '', token = max(l.token + 1, excluded.token),
       acquired_at = excluded.acquired_at, holder = '', label = ''
 WHERE ", has_room!(), ";
INSERT INTO sqlock_entry (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at, acquired_at,
                          holder, label)
SELECT $1, $2, $3, $4, $4 <> '', $8, $9, l.token, $5, 0, l.acquired_at + $5, l.acquired_at, $6, $7
  FROM sqlock_lease AS l WHERE l.name = $1 AND changes() = 1;
COMMIT;",
claim_state!("0"));

// As ACQUIRE
const CLAIM_STATE: &str = claim_state!("0");

/// Acquires a name that is free, or shares it. Returns the token, or the holder if the claim is
/// refused.
pub(super) async fn acquire(
    conn: &mut SqliteConnection,
    claim: &Claim,
) -> Result<Result<FencingToken, CurrentHolder>, sqlx::Error> {
    let answered = match claim.mode {
        Mode::Exclusive => until_row(conn, bind_claim(ACQUIRE, claim)).await,
        Mode::Shared { .. } => {
            let (units, permits) = claim.mode.stored();
            transaction_until_row(conn, bind_claim(SHARE, claim).bind(units).bind(permits)).await
        }
    };
    match answered {
        Ok(row) => match read_claim_state(row)? {
            (Ok(_), true) => prolong_claim(conn, claim).await,
            (answer, _) => Ok(answer),
        },
        // The error may come from the last SELECT, after the claim was granted.
        Err(busy) if is_busy(&busy) => {
            let row = until_row(conn, bind_claim(CLAIM_STATE, claim)).await.map_err(in_doubt)?;
            if read_claim_state(row)?.0.is_ok() { prolong_claim(conn, claim).await } else { Err(busy) }
        }
        Err(error) => Err(error),
    }
}

/// The change of a repeated claim, for both tables.
#[rustfmt::skip]
macro_rules! prolong_claim {
    () => {
        concat!("
   SET client = CASE WHEN client = '' THEN $4 ELSE client END, ttl = max(ttl, $5), expires_at = max(expires_at, ", now!(), " + $5)
 WHERE name = $1 AND id = $2")
    };
}

// As ACQUIRE, for a claim that was granted before.
#[rustfmt::skip]
const PROLONG_CLAIM: &str = concat!("
UPDATE sqlock_lease", prolong_claim!(), ";",
claim_state!("0"), " AND changes() > 0;
UPDATE sqlock_entry", prolong_claim!(), " AND token > 0 AND owner <> '';",
claim_state!("0"));

/// Prolongs the holding of a claim that was granted before.
async fn prolong_claim(
    conn: &mut SqliteConnection,
    claim: &Claim,
) -> Result<Result<FencingToken, CurrentHolder>, sqlx::Error> {
    // SQLITE_BUSY would mean that nothing was acquired.
    let row = until_row(conn, bind_claim(PROLONG_CLAIM, claim)).await.map_err(in_doubt)?;
    Ok(read_claim_state(row)?.0)
}

/// Reads a row of `claim_state!`: the token or the holder, and `is_first`.
fn read_claim_state(row: Option<SqliteRow>) -> Result<(Result<FencingToken, CurrentHolder>, bool), sqlx::Error> {
    let Some(row) = row else {
        return Ok((Err(CurrentHolder::Vacant), false));
    };
    let own = token_from_row(row.number("own")?);
    Ok((own.ok_or(current_holder(&read_lease(&row)?)), row.number("is_first")? != 0))
}

/// Binds the parameters of [`ACQUIRE`].
pub(super) fn bind_claim<'q>(sql: &'static str, claim: &'q Claim) -> SqliteQuery<'q> {
    bind_holder(sqlx::query(sql).bind(claim.name.as_str()), claim)
}

/// Binds a new holder: id, owner, client, ttl, holder and label, in this order.
pub(super) fn bind_holder<'q>(query: SqliteQuery<'q>, claim: &'q Claim) -> SqliteQuery<'q> {
    query
        .bind(claim.id.to_string())
        .bind(claim.owner.to_string())
        .bind(client_text(claim.is_renewed.then_some(claim.client)))
        .bind(micros(claim.ttl))
        .bind(&*claim.holder)
        .bind(&*claim.label)
}

/// Whether an earlier request of the same acquisition added the entry `o`.
macro_rules! is_repeated {
    () => {
        "o.owner <> '' AND o.token = excluded.token"
    };
}

// As ACQUIRE. Adds an entry for the acquisition if the owner holds the name, then one for the lease
// that has held it alone.
#[rustfmt::skip]
const JOIN: &str = concat!("
BEGIN IMMEDIATE;
INSERT INTO sqlock_entry AS o (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at, acquired_at,
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
   SET client = CASE WHEN ", is_repeated!(), " AND o.client <> '' THEN o.client ELSE excluded.client END,
       ttl = CASE WHEN ", is_repeated!(), " THEN max(o.ttl, excluded.ttl) ELSE excluded.ttl END,
       expires_at = CASE WHEN ", is_repeated!(), " THEN max(o.expires_at, excluded.expires_at) ELSE excluded.expires_at END,
       acquired_at = CASE WHEN ", is_repeated!(), " THEN o.acquired_at ELSE excluded.acquired_at END,
       owner = excluded.owner, is_renewed = 1, units = 0, permits = 0, token = excluded.token, arrived_at = 0,
       holder = excluded.holder, label = excluded.label
RETURNING token;
INSERT OR REPLACE INTO sqlock_entry (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at,
                                     acquired_at, holder, label)
SELECT name, id, owner, client, 1, 0, 0, token, ttl, 0, expires_at, acquired_at, holder, label
  FROM sqlock_lease WHERE name = $1 AND id <> 'entries' AND changes() = 1;
UPDATE sqlock_lease SET id = 'entries', client = '', holder = '', label = '' WHERE name = $1 AND changes() = 1;
COMMIT");

/// Adds an acquisition to an exclusive holding of the same owner.
pub(super) async fn join(conn: &mut SqliteConnection, claim: &Claim) -> Result<JoinOutcome, sqlx::Error> {
    let rows = transaction(conn, bind_claim(JOIN, claim)).await?;
    let token = rows.first().map(|row| row.number("token")).transpose()?;
    Ok(token.and_then(token_from_row).map_or(JoinOutcome::NotHeld, JoinOutcome::Done))
}
