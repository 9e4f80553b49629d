//! The notes of holders.

use serde_json::{Value, json};
use sqlx::MySqlConnection;
use sqlx::mysql::MySqlRow;

use super::admin::name_of;
use crate::backend::stored::TableRow as _;
use crate::backend::{Note, hex};
use crate::name::LockName;

// The note has a row of its own, and its token keeps it apart from those of other holders. At READ
// COMMITTED the subqueries lock nothing, so the statement passes fences. Bind order: note, name,
// id, token, name, id, token.
#[rustfmt::skip]
const WRITE: &str = concat!("
INSERT INTO sqlock_note (name, token, note, written_at)
SELECT h.name, h.token, ?, ", now!(), "
  FROM (SELECT l.name, l.token FROM sqlock_lease AS l
         WHERE l.name = ? AND l.id = ? AND l.token = ? AND ", lease_until!("l"), " > ", now!(), "
         UNION
        SELECT e.name, e.token FROM sqlock_entry AS e FORCE INDEX (PRIMARY)
         WHERE e.name = ? AND e.id = ? AND e.token = ? AND e.owner <> '' AND ", entry_until!("e"), " > ", now!(), ") AS h
    ON DUPLICATE KEY UPDATE note = VALUES(note), written_at = VALUES(written_at)");

pub(super) async fn write(conn: &mut MySqlConnection, note: &Note) -> Result<bool, sqlx::Error> {
    let (name, id, token) = (note.name.as_str().as_bytes(), note.id.to_string(), note.token.get());
    let query = sqlx::query(WRITE).bind(&note.text).bind(name).bind(&id).bind(token).bind(name).bind(&id).bind(token);
    let written = query.execute(&mut *conn).await?.rows_affected();
    // 1: the first note of this holding. Without a sweeper too, a name has few notes.
    if written == 1 {
        let stale = sqlx::query(STALE_BEFORE).bind(name).bind(token).fetch_all(&mut *conn).await?;
        delete(conn, &stale).await?;
    }
    Ok(written > 0)
}

// Bind order: name.
#[rustfmt::skip]
const READ: &str = "
SELECT n.note FROM sqlock_lease AS l JOIN sqlock_note AS n ON n.name = l.name AND n.token = l.token WHERE l.name = ?";

pub(super) async fn read(conn: &mut MySqlConnection, name: &LockName) -> Result<Option<String>, sqlx::Error> {
    let row = sqlx::query(READ).bind(name.as_str().as_bytes()).fetch_optional(conn).await?;
    row.map(|row| row.text("note")).transpose()
}

/// Selects the notes of former holders, except the latest note of each name. A holder may
/// share the name with a later one.
#[rustfmt::skip]
macro_rules! stale {
    ($names:literal) => {
        concat!("
SELECT n.name, n.token FROM sqlock_note AS n
 WHERE ", $names, "
   AND NOT EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = n.name AND l.token = n.token)
   AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS e FORCE INDEX (sqlock_entry_in_order) WHERE e.name = n.name AND e.token = n.token)")
    };
}

// Bind order: the name before the first, the last name or NULL, twice.
const STALE: &str = stale!("n.name > ? AND (? IS NULL OR n.name <= ?)");

// Bind order: name, token.
const STALE_BEFORE: &str = stale!("n.name = ? AND n.token < ?");

// A token without a holder never gets one again, because tokens rise. Bind order: JSON of names as
// hex and tokens.
#[rustfmt::skip]
const DELETE: &str = "
DELETE n
  FROM (SELECT UNHEX(j.hex) AS name, j.token
          FROM JSON_TABLE(?, '$[*]' COLUMNS (
                 hex VARCHAR(510) CHARACTER SET ascii COLLATE ascii_bin PATH '$[0]',
                 token BIGINT PATH '$[1]')) AS j LIMIT 1000000) AS q
       STRAIGHT_JOIN sqlock_note AS n FORCE INDEX (PRIMARY) ON n.name = q.name AND n.token = q.token";

/// Deletes the notes of former holders, except the latest note of each name.
pub(super) async fn sweep(conn: &mut MySqlConnection, after: &str, last: Option<&str>) -> Result<(), sqlx::Error> {
    let last = last.map(str::as_bytes);
    let query = sqlx::query(STALE).bind(after.as_bytes()).bind(last).bind(last);
    let stale = query.fetch_all(&mut *conn).await?;
    delete(conn, &stale).await
}

async fn delete(conn: &mut MySqlConnection, stale: &[MySqlRow]) -> Result<(), sqlx::Error> {
    if stale.is_empty() {
        return Ok(());
    }
    let line = |row: &MySqlRow| Ok(json!([hex(name_of(row)?.as_bytes()), row.number("token")?]));
    let lines: Value = stale.iter().map(line).collect::<Result<_, sqlx::Error>>()?;
    sqlx::query(DELETE).bind(lines.to_string()).execute(conn).await?;
    Ok(())
}
