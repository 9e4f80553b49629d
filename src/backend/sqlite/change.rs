//! Changes holdings: expiry, mode and token, and asks for their release.

use sqlx::SqliteConnection;

use super::store::{transaction, until_row};
use crate::backend::micros;
use crate::backend::stored::TableRow as _;
use crate::name::LockName;
use crate::protocol::{AcquisitionId, AskOutcome, ChangeOutcome, Extension, Mode};
use crate::token::FencingToken;

/// The change of an extension, for both tables.
#[rustfmt::skip]
macro_rules! extended {
    () => {
        concat!("
   SET id = coalesce($8, id), client = CASE WHEN client = $7 THEN '' ELSE coalesce($6, client) END, ttl = max(ttl, $5),
       expires_at = max(expires_at, ", now!(), " + $4)
 WHERE name = $1 AND token = $3 AND ($2 IS NULL OR id IN ($2, $8))")
    };
}

// $1 name, $2 id or NULL for any, $3 token, $4 how long it lasts, $5 ttl, $6 the client whose
// heartbeat keeps it from now on, or NULL, $7 the client whose heartbeat no longer renews it, or
// NULL, $8 the new id or NULL. Changes the row of a lease that holds alone, otherwise entries.
#[rustfmt::skip]
const EXTEND: &str = concat!("
UPDATE sqlock_lease AS l", extended!(), " AND id NOT IN ('', 'kept', 'entries') AND (client = $7 OR ", lease_until!("l"), " > ", now!(), ");
SELECT 1 AS done WHERE changes() > 0;
UPDATE OR REPLACE sqlock_entry AS e", extended!(), " AND id IN (SELECT o.id FROM sqlock_entry AS o WHERE o.name = $1 AND o.token = $3)
   AND owner <> '' AND (client = $7 OR ", entry_until!("e"), " > ", now!(), ");
SELECT 1 AS done WHERE changes() > 0");

/// Moves the expiry of a valid holding, and changes the client whose heartbeat renews it.
pub(super) async fn extend(conn: &mut SqliteConnection, extension: &Extension) -> Result<ChangeOutcome, sqlx::Error> {
    let Extension { name, id, renamed, token, lasts, ttl, client_change } = extension;
    let (new_client, removed_client) = client_change.clients();
    let query = sqlx::query(EXTEND)
        .bind(name.as_str())
        .bind(id.map(|id| id.to_string()))
        .bind(token.get())
        .bind(micros(*lasts))
        .bind(ttl.map_or(0, micros))
        .bind(new_client.map(|client| client.to_string()))
        .bind(removed_client.map(|client| client.to_string()))
        .bind(renamed.map(|id| id.to_string()));
    Ok(if until_row(conn, query).await?.is_some() { ChangeOutcome::Done } else { ChangeOutcome::NotHeld })
}

// $1 name, $2 id, $3 token, $4 units, $5 permits. The SELECT also finds a holding that an earlier
// request downgraded.
#[rustfmt::skip]
const DOWNGRADE: &str = "
BEGIN IMMEDIATE;
INSERT OR REPLACE INTO sqlock_entry (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at,
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
    id: AcquisitionId,
    token: FencingToken,
) -> Result<ChangeOutcome, sqlx::Error> {
    let (units, permits) = Mode::READ.stored();
    let query =
        sqlx::query(DOWNGRADE).bind(name.as_str()).bind(id.to_string()).bind(token.get()).bind(units).bind(permits);
    Ok(if transaction(conn, query).await?.is_empty() { ChangeOutcome::NotHeld } else { ChangeOutcome::Done })
}

// $1 name, $2 id, $3 token, $4 the higher token, which a repeated request finds.
#[rustfmt::skip]
const RAISE: &str = "
UPDATE sqlock_lease SET token = $4
 WHERE name = $1 AND id = $2 AND (token = $3 AND $3 < $4 OR token = $4)";

/// Gives an exclusive holding of one lease a higher token.
pub(super) async fn raise(
    conn: &mut SqliteConnection,
    name: &LockName,
    id: AcquisitionId,
    token: FencingToken,
    to: FencingToken,
) -> Result<ChangeOutcome, sqlx::Error> {
    let query = sqlx::query(RAISE).bind(name.as_str()).bind(id.to_string()).bind(token.get()).bind(to.get());
    let done = query.execute(conn).await?;
    Ok(if done.rows_affected() == 1 { ChangeOutcome::Done } else { ChangeOutcome::NotHeld })
}

/// The valid holders of the name `$1`: their tokens and clients.
#[rustfmt::skip]
macro_rules! holders {
    () => {
        concat!("
       (SELECT l.token, l.client FROM sqlock_lease AS l
         WHERE l.name = $1 AND l.id NOT IN ('', 'kept', 'entries') AND ", lease_until!("l"), " > ", now!(), "
         UNION ALL
        SELECT e.token, e.client FROM sqlock_entry AS e
         WHERE e.name = $1 AND e.token > 0 AND e.owner <> '' AND ", entry_until!("e"), " > ", now!(), ")")
    };
}

// $1 name
#[rustfmt::skip]
const ASK: &str = concat!("
BEGIN IMMEDIATE;
INSERT INTO sqlock_client (id, beat_at, notice)
SELECT DISTINCT client, 0, ", now!(), " FROM ", holders!(), " WHERE client <> ''
    ON CONFLICT (id) DO UPDATE SET notice = notice + 1;
UPDATE sqlock_lease SET asked = token WHERE name = $1 AND EXISTS (SELECT 1 FROM ", holders!(), ");
SELECT count(DISTINCT token) AS holders FROM ", holders!(), ";
COMMIT");

/// Records that the holders of a name are asked to release it, and gives their clients a notice.
pub(super) async fn ask(conn: &mut SqliteConnection, name: &LockName) -> Result<AskOutcome, sqlx::Error> {
    let rows = transaction(conn, sqlx::query(ASK).bind(name.as_str())).await?;
    let holders = rows.first().ok_or(sqlx::Error::RowNotFound)?.number("holders")?;
    Ok(AskOutcome::Holders(u32::try_from(holders).unwrap_or(u32::MAX)))
}
