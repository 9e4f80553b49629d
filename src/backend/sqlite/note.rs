//! The notes of holders.

use sqlx::SqliteConnection;

use super::store::{rows, transaction};
use crate::backend::Note;
use crate::backend::stored::TableRow as _;
use crate::name::LockName;

// $1 name, $2 id, $3 token, $4 note. The statement deletes the notes of earlier holders, so a name
// has few notes even without a sweeper. A holder may share the name with a later one.
#[rustfmt::skip]
const WRITE: &str = concat!("
BEGIN IMMEDIATE;
INSERT INTO sqlock_note (name, token, note, written_at)
SELECT $1, $3, $4, ", now!(), "
 WHERE EXISTS (SELECT 1 FROM sqlock_lease AS l
                WHERE l.name = $1 AND l.id = $2 AND l.token = $3 AND ", lease_until!("l"), " > ", now!(), ")
    OR EXISTS (SELECT 1 FROM sqlock_entry AS e
                WHERE e.name = $1 AND e.id = $2 AND e.token = $3 AND e.owner <> '' AND ", entry_until!("e"), " > ", now!(), ")
    ON CONFLICT (name, token) DO UPDATE SET note = excluded.note, written_at = excluded.written_at
RETURNING token;
DELETE FROM sqlock_note AS n
 WHERE n.name = $1 AND n.token < $3
   AND NOT EXISTS (SELECT 1 FROM sqlock_lease AS l WHERE l.name = n.name AND l.token = n.token)
   AND NOT EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = n.name AND e.token = n.token);
COMMIT");

pub(super) async fn write(conn: &mut SqliteConnection, note: &Note) -> Result<bool, sqlx::Error> {
    let Note { name, id, token, text } = note;
    let query = sqlx::query(WRITE).bind(name.as_str()).bind(id.to_string()).bind(token.get()).bind(text);
    Ok(!transaction(conn, query).await?.is_empty())
}

// $1 name
#[rustfmt::skip]
const READ: &str = "
SELECT n.note FROM sqlock_lease AS l JOIN sqlock_note AS n ON n.name = l.name AND n.token = l.token WHERE l.name = $1";

pub(super) async fn read(conn: &mut SqliteConnection, name: &LockName) -> Result<Option<String>, sqlx::Error> {
    let found = rows(conn, sqlx::query(READ).bind(name.as_str())).await?;
    found.first().map(|row| row.text("note")).transpose()
}
