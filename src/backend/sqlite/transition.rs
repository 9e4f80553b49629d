//! Transitions: changes of the holder of a name.

use serde_json::{Value, json};
use sqlx::SqliteConnection;

use super::acquire::bind_holder;
use super::store::{SqliteQuery, transaction};
use crate::backend::micros;
use crate::backend::stored::{TableRow as _, holder_text};
use crate::protocol::{AcquisitionId, Claim, Granted, Holder, HolderChange, Mode, Transition};
use crate::token::FencingToken;

/// Whether the entry is one of the expired entries to delete.
macro_rules! expired {
    ($row:literal) => {
        concat!($row, ".id IN (SELECT x.value FROM json_each($5) AS x)")
    };
}

/// A transition: checks the conditions, gives notices to the clients that lose a holding, deletes
/// the expired entries, and writes the new holder with `$then`.
///
/// $1 name; $2 holder and $3 token of the row that was read; $4 whether the holder gives up, $5
/// JSON [expired, …], $6 holding entries with at most this number of units prevent the transition,
/// $7 whether waiting entries prevent it, $8 JSON [[grantee, ttl], …].
///
/// The first statement checks the conditions and marks the row for the others: it negates the token
/// and subtracts one, until the last statement writes the new token, which is at least `-l.token`.
/// No other transaction sees the mark.
#[rustfmt::skip]
macro_rules! transition {
    ($then:expr) => {
        concat!("
BEGIN IMMEDIATE;
UPDATE sqlock_lease AS l
   SET token = -1 - l.token,
       lost = max(l.lost, CASE WHEN $4 OR l.id IN ('', 'kept', 'entries') THEN 0 ELSE l.token END,
                  coalesce((SELECT max(e.token) FROM sqlock_entry AS e
                             WHERE e.name = $1 AND e.token > 0 AND e.owner <> '' AND ", expired!("e"), "
                               AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS o      -- of one owner, with the same token
                                                WHERE o.name = $1 AND o.token = e.token AND NOT ", expired!("o"), ")), 0))
 WHERE l.name = $1 AND l.id = $2 AND l.token = $3
   AND (l.id IN ('', 'entries') OR $4 AND l.id <> 'kept' OR ", lease_until!("l"), " <= ", now!(), ")
   AND json_array_length($5) = (SELECT count(*) FROM json_each($5) AS x CROSS JOIN sqlock_entry AS e ON e.name = $1 AND e.id = x.value
                                 WHERE ", entry_until!("e"), " <= ", now!(), ")
   AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS e
                    WHERE e.name = $1 AND e.token > 0 AND e.units <= $6 AND NOT ", expired!("e"), ")
   AND NOT ($7 AND EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = $1 AND e.token = 0 AND NOT ", expired!("e"), "))
   AND json_array_length($8) = (SELECT count(*)
                                  FROM json_each($8) AS g CROSS JOIN sqlock_entry AS e ON e.name = $1 AND e.id = g.value ->> 0
                                 WHERE e.token = 0 AND NOT ", expired!("e"), ");
INSERT INTO sqlock_client (id, beat_at, notice)
SELECT client, 0, ", now!(), "
  FROM (SELECT l.client FROM sqlock_lease AS l WHERE l.name = $1 AND l.token < 0 AND NOT $4
         UNION
        SELECT e.client FROM sqlock_lease AS l JOIN sqlock_entry AS e ON e.name = l.name
         WHERE l.name = $1 AND l.token < 0 AND e.token > 0 AND ", expired!("e"), ")
 WHERE client <> ''
    ON CONFLICT (id) DO UPDATE SET notice = notice + 1;
DELETE FROM sqlock_entry AS e
 WHERE e.name = $1 AND ", expired!("e"), " AND EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = $1 AND l.token < 0);",
$then, "
COMMIT")
    };
}

#[rustfmt::skip]
const TO_SAME_HOLDER: &str = transition!("
UPDATE sqlock_lease AS l SET token = -1 - l.token WHERE l.name = $1 AND l.token < 0
RETURNING token;");

#[rustfmt::skip]
const TO_FREE: &str = transition!("
UPDATE sqlock_lease AS l SET token = -1 - l.token, id = '', owner = '', client = '', expires_at = 0
 WHERE l.name = $1 AND l.token < 0
RETURNING token;");

#[rustfmt::skip]
const TO_ENTRY: &str = transition!(concat!("
UPDATE sqlock_lease AS l
   SET id = e.id, owner = e.owner, client = CASE WHEN e.is_renewed THEN e.client ELSE '' END, token = max(-l.token, ", now!(), "),
       ttl = $8 ->> '$[0][1]', expires_at = ", now!(), " + ($8 ->> '$[0][1]'), acquired_at = ", now!(), ",
       holder = e.holder, label = e.label
  FROM sqlock_entry AS e
 WHERE l.name = $1 AND l.token < 0 AND e.name = $1 AND e.id = $8 ->> '$[0][0]'
RETURNING token;
DELETE FROM sqlock_entry WHERE name = $1 AND id = $8 ->> '$[0][0]' AND changes() = 1;"));

// The last grantee has the token of the row, and each of the others one less than the next.
#[rustfmt::skip]
const TO_ENTRIES: &str = transition!(concat!("
UPDATE sqlock_lease AS l
   SET id = 'entries', owner = '', client = '', holder = '', label = '', acquired_at = ", now!(), ",
       token = CASE json_array_length($8) WHEN 0 THEN -1 - l.token
                    ELSE max(-l.token, ", now!(), ") + json_array_length($8) - 1 END
 WHERE l.name = $1 AND l.token < 0
RETURNING token;
INSERT OR REPLACE INTO sqlock_entry (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at,
                                     acquired_at, holder, label)
SELECT e.name, e.id, e.owner, CASE WHEN e.is_renewed THEN e.client ELSE '' END, e.is_renewed, e.units, e.permits,
       l.token - json_array_length($8) + 1 + g.key, g.value ->> 1, e.arrived_at, l.acquired_at + (g.value ->> 1), l.acquired_at,
       e.holder, e.label
  FROM json_each($8) AS g CROSS JOIN sqlock_entry AS e ON e.name = $1 AND e.id = g.value ->> 0
       CROSS JOIN sqlock_lease AS l ON l.name = $1
 WHERE e.token = 0 AND changes() = 1;"));

// $9 id, $10 owner, $11 client, $12 ttl, $13 holder, $14 label
#[rustfmt::skip]
const TO_CLAIM: &str = transition!(concat!("
UPDATE sqlock_lease AS l
   SET id = $9, owner = $10, client = $11, token = max(-l.token, ", now!(), "), ttl = $12, expires_at = ", now!(), " + $12,
       acquired_at = ", now!(), ", holder = $13, label = $14
 WHERE l.name = $1 AND l.token < 0
RETURNING token;"));

// As TO_CLAIM, and $15 units, $16 permits.
#[rustfmt::skip]
const TO_SHARING_CLAIM: &str = transition!(concat!("
UPDATE sqlock_lease AS l
   SET id = 'entries', owner = '', client = '', token = max(-l.token, ", now!(), "), acquired_at = ", now!(), ", holder = '',
       label = ''
 WHERE l.name = $1 AND l.token < 0
RETURNING token;
INSERT OR REPLACE INTO sqlock_entry (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at,
                                     acquired_at, holder, label)
SELECT $1, $9, $10, $11, $11 <> '', $15, $16, l.token, $12, 0, l.acquired_at + $12, l.acquired_at, $13, $14
  FROM sqlock_lease AS l WHERE l.name = $1 AND changes() = 1;"));

/// Changes the holder of a name if its row is still the one that was read. Returns the grants.
/// `None`: nothing was changed.
pub(super) async fn transition(
    conn: &mut SqliteConnection,
    transition: &Transition,
) -> Result<Option<Vec<Granted>>, sqlx::Error> {
    let Transition { name, seen, given_up, expired, change, is_last } = transition;
    let is_held = matches!(seen.holder, Holder::Lease(_) | Holder::Kept);
    // No row has a mark for waiters. A transition that ends a holder must name the next one or free
    // the name.
    if (*is_last && seen.waiting != 0) || (is_held && matches!(change, HolderChange::None)) {
        return Ok(None);
    }
    // The greatest number of units with which a holding entry prevents the change.
    const ALL: i64 = i64::MAX;
    const EXCLUSIVE: i64 = 0;
    const NONE: i64 = -1;
    let (sql, against) = match change {
        HolderChange::None => (TO_SAME_HOLDER, NONE),
        HolderChange::Free => (TO_FREE, ALL),
        HolderChange::Exclusive(_) => (TO_ENTRY, ALL),
        HolderChange::Shared(_) => (TO_ENTRIES, EXCLUSIVE),
        HolderChange::Claim(claim) if claim.mode == Mode::Exclusive => (TO_CLAIM, ALL),
        HolderChange::Claim(_) => (TO_SHARING_CLAIM, EXCLUSIVE),
    };
    let grantees = change.grantees();
    let query = sqlx::query(sql)
        .bind(name.as_str())
        .bind(holder_text(seen.holder))
        .bind(seen.token)
        .bind(given_up.is_some())
        .bind(Value::from_iter(expired.iter().map(AcquisitionId::to_string)).to_string())
        .bind(against)
        .bind(matches!(change, HolderChange::Claim(_)))
        .bind(Value::from_iter(grantees.iter().map(|g| json!([g.id.to_string(), micros(g.ttl)]))).to_string());
    let query = match change {
        HolderChange::Claim(claim) => bind_claim(query, claim),
        _ => query,
    };
    let rows = transaction(conn, query).await?;
    let Some(token) = rows.first().map(|row| row.number("token")).transpose()? else {
        return Ok(None);
    };
    let ids = change.granted_ids();
    let first = token - ids.len() as i64 + 1;
    Ok(Some(
        (first..).zip(ids).filter_map(|(token, id)| Some(Granted { id, token: FencingToken::new(token)? })).collect(),
    ))
}

fn bind_claim<'q>(query: SqliteQuery<'q>, claim: &'q Claim) -> SqliteQuery<'q> {
    let (units, permits) = claim.mode.stored();
    bind_holder(query, claim).bind(units).bind(permits)
}
