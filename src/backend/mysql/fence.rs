//! The fence: keeps a holding from ending until the caller's transaction ends.

use std::time::Duration;

use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row as _};

use super::script::filled;
use super::store::number;
use crate::backend::fence::{FenceCheck, FenceOutcome};
use crate::backend::hex;
use crate::backend::stored::ENTRIES;

/// Sends a statement as text, not prepared. A future that is dropped while sqlx prepares leaves a
/// connection that never answers again, with a transaction that never ends.
async fn first_row(conn: &mut MySqlConnection, sql: &str, literals: &[&str]) -> Result<Option<MySqlRow>, sqlx::Error> {
    let rows = sqlx::raw_sql(AssertSqlSafe(filled(sql, literals))).fetch_all(conn).await?;
    Ok(rows.into_iter().next())
}

/// A holding as literals.
struct Literals {
    name: String,
    id: String,
    token: String,
    /// The least text after the name, and after the id.
    name_end: String,
    id_end: String,
}

impl Literals {
    fn new(check: &FenceCheck) -> Self {
        Self {
            name: format!("X'{}'", hex(check.name.as_bytes())),
            id: format!("'{}'", check.id),
            token: check.token.to_string(),
            name_end: format!("X'{}00'", hex(check.name.as_bytes())),
            id_end: format!("'{}0'", check.id),
        }
    }
}

/// Checks that a holding is valid, alone or shared, and keeps it from ending until the transaction
/// on this connection ends.
pub(super) async fn fence(conn: &mut MySqlConnection, check: &FenceCheck) -> Result<FenceOutcome, sqlx::Error> {
    let holding = Literals::new(check);
    let verdict = if check.is_multi_primary {
        fence_by_writing(conn, &holding).await
    } else {
        fence_by_locking(conn, &holding).await
    };
    match verdict {
        // MariaDB with innodb_snapshot_isolation: the row has changed since the snapshot.
        Err(error) if number(&error) == Some(1020) => Ok(FenceOutcome::StaleSnapshot),
        verdict => verdict,
    }
}

// Outside of a transaction, a savepoint ends with its statement, and its release fails with 1305.
// https://dev.mysql.com/doc/refman/8.4/en/savepoint.html
//
// Locks the row of the holding until the transaction ends: that of the name, or the entry of an
// acquisition that shares. A row that is looked up but does not match would stay locked too, and at
// REPEATABLE READ a missing row would lock a gap. So an inner query first reads the snapshot of the
// transaction without locks. At SERIALIZABLE that read locks as well, so entries are read only of a
// name that entries hold: a gap of their table would keep all clients from waiting.
//
// With LIMIT, a derived table is read on its own, before the table that is joined to it. A scalar
// subquery without a row would be NULL, and MariaDB looks that up as an empty text, and locks the
// gap there. In the sql_mode EMPTY_STRING_IS_NULL of MariaDB, which the caller's session may have,
// '' is NULL and differs from nothing. Bind order: name, id, token, id, token, name, id, token, id,
// token.
#[rustfmt::skip]
const FENCE: &str = "
SAVEPOINT sqlock_fence;
RELEASE SAVEPOINT sqlock_fence;
(SELECT 1
   FROM (SELECT name FROM sqlock_lease WHERE name = ? AND id = ? AND token = ? LIMIT 1) AS seen
   STRAIGHT_JOIN sqlock_lease AS l ON l.name = seen.name
  WHERE l.id = ? AND l.token = ?
   LOCK IN SHARE MODE)
 UNION ALL
(SELECT 1
   FROM (SELECT s.name
           FROM (SELECT name FROM sqlock_lease WHERE name = ? AND id = 'entries' LIMIT 1) AS shared
           STRAIGHT_JOIN sqlock_entry AS s ON s.name = shared.name
          WHERE s.id = ? AND s.token = ? AND CHAR_LENGTH(s.owner) > 0 LIMIT 1) AS seen
   STRAIGHT_JOIN sqlock_entry AS e ON e.name = seen.name
  WHERE e.id = ? AND e.token = ? AND CHAR_LENGTH(e.owner) > 0
   LOCK IN SHARE MODE)";

// A locking read returns the latest rows, not the snapshot. Each half reads a range of one key: at
// READ COMMITTED the server then unlocks a row that does not match, so a transaction without a
// fence blocks no other. /*M! … */ is for MariaDB, /*!80001 … */ for MySQL. Bind order: name, its
// end, id, token, name, id, its end, token.
// https://dev.mysql.com/doc/refman/8.4/en/innodb-locking-reads.html
#[rustfmt::skip]
const PRESENT: &str = "
(SELECT 1 FROM sqlock_lease AS l FORCE INDEX (PRIMARY)
  WHERE l.name >= ? AND l.name < ? AND l.id = ? AND l.token = ?
   /*M! LOCK IN SHARE MODE */ /*!80001 FOR SHARE */ NOWAIT)
 UNION ALL
(SELECT 1 FROM sqlock_entry AS e FORCE INDEX (PRIMARY)
  WHERE e.name = ? AND e.id >= ? AND e.id < ? AND e.token = ? AND CHAR_LENGTH(e.owner) > 0
   /*M! LOCK IN SHARE MODE */ /*!80001 FOR SHARE */ NOWAIT)";

/// Fences a transaction where all writers of the row see its lock.
async fn fence_by_locking(
    conn: &mut MySqlConnection,
    Literals { name, id, token, .. }: &Literals,
) -> Result<FenceOutcome, sqlx::Error> {
    match first_row(conn, FENCE, &[name, id, token, id, token, name, id, token, id, token]).await {
        Err(error) if number(&error) == Some(1305) => Ok(FenceOutcome::NoTransaction),
        Err(error) => Err(error),
        Ok(Some(_)) => Ok(FenceOutcome::Fenced),
        Ok(None) => Ok(FenceOutcome::Superseded),
    }
}

/// Returns whether a holding that the database has is newer than the snapshot of the transaction.
/// Without the holding, this would lock a gap that keeps all clients from waiting.
pub(super) async fn is_newer(conn: &mut MySqlConnection, check: &FenceCheck) -> Result<bool, sqlx::Error> {
    let Literals { name, id, token, name_end, id_end } = &Literals::new(check);
    match first_row(conn, PRESENT, &[name, name_end, id, token, name, id, id_end, token]).await {
        Ok(found) => Ok(found.is_some()),
        // The row is locked, so its state is unknown; or, on MariaDB with innodb_snapshot_isolation, it
        // is newer. A new transaction may read it.
        Err(error) if matches!(number(&error), Some(3572 | 1205 | 1020)) => Ok(true),
        Err(error) => Err(error),
    }
}

/// How often a fence checks whether its node has received the holding, and the pause between
/// checks.
const POLLS: u32 = 20;
const POLL_INTERVAL: Duration = Duration::from_millis(10);

// The nodes of a Galera cluster do not see each other's locks. But of two transactions that write a
// row on different nodes, only one can commit. So the fence writes the row: it expires a
// microsecond later. Each statement is a command of its own: see `Sending::OneByOne`. The first one
// selects the holder, whether it is the holding, whether the transaction sees it, and whether a
// later holding, or the loss of this one, is known here. Bind order: id, token, token, token, name.
#[rustfmt::skip]
const LOCK_LEASE: &str = "
SELECT l.id, CAST(l.id = ? AND l.token = ? AS SIGNED),
       CAST(EXISTS (SELECT 1 FROM sqlock_lease AS s WHERE s.name = l.name AND s.id = l.id AND s.token = l.token) AS SIGNED),
       CAST(l.token > ? OR l.lost >= ? AS SIGNED)
  FROM sqlock_lease AS l WHERE l.name = ?
   FOR UPDATE";
// Bind order: name, id, token.
const WRITE_LEASE: &str = "UPDATE sqlock_lease SET expires_at = expires_at + 1 WHERE name = ? AND id = ? AND token = ?";

// The same for an entry; selects whether the transaction sees it. Bind order: name, id, token.
#[rustfmt::skip]
const LOCK_ENTRY: &str = "
SELECT CAST(EXISTS (SELECT 1 FROM sqlock_entry AS s WHERE s.name = e.name AND s.id = e.id AND s.token = e.token) AS SIGNED)
  FROM sqlock_entry AS e WHERE e.name = ? AND e.id = ? AND e.token = ? AND CHAR_LENGTH(e.owner) > 0
   FOR UPDATE";
// Bind order: name, id, token.
const WRITE_ENTRY: &str = "UPDATE sqlock_entry SET expires_at = expires_at + 1 WHERE name = ? AND id = ? AND token = ?";

/// Fences a transaction where several servers accept writes.
async fn fence_by_writing(
    conn: &mut MySqlConnection,
    Literals { name, id, token, .. }: &Literals,
) -> Result<FenceOutcome, sqlx::Error> {
    let verdict = |is_seen: i64| if is_seen != 0 { FenceOutcome::Fenced } else { FenceOutcome::StaleSnapshot };
    for _ in 0..POLLS {
        if let Some(row) = first_row(conn, LOCK_LEASE, &[id, token, token, token, name]).await? {
            let (holder, is_holding): (String, i64) = (row.try_get(0)?, row.try_get(1)?);
            if is_holding != 0 {
                first_row(conn, WRITE_LEASE, &[name, id, token]).await?;
                return Ok(verdict(row.try_get(2)?));
            }
            if holder == ENTRIES
                && let Some(entry) = first_row(conn, LOCK_ENTRY, &[name, id, token]).await?
            {
                first_row(conn, WRITE_ENTRY, &[name, id, token]).await?;
                return Ok(verdict(entry.try_get(0)?));
            }
            if row.try_get::<i64, _>(3)? != 0 {
                return Ok(FenceOutcome::Superseded);
            }
        }
        // This node has not received the holding yet, or the holding was released.
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Ok(FenceOutcome::StaleSnapshot)
}
