//! The notes of holders.

use super::store::{Connection, now};
use crate::backend::Note;
use crate::backend::stored::TableRow as _;
use crate::name::LockName;

/// Finds the notes of former holders, except the latest note of each name. A holder may share
/// the name with a later one.
#[rustfmt::skip]
macro_rules! is_former {
    () => {
        "
   AND NOT EXISTS (SELECT FROM sqlock_lease AS l WHERE l.name = n.name AND l.token = n.token)
   AND NOT EXISTS (SELECT FROM sqlock_entry AS e WHERE e.name = n.name AND e.token = n.token)"
    };
}

// $1 name, $2 id, $3 token, $4 note. The note has a row of its own: it passes fences, and its token
// keeps it apart from those of other holders. The statement deletes the notes of earlier holders,
// so a name has few notes even without a sweeper.
#[rustfmt::skip]
const WRITE: &str = concat!("
WITH former AS (
    DELETE FROM sqlock_note AS n WHERE n.name = $1::text AND n.token < $3::bigint", is_former!(), ")
INSERT INTO sqlock_note AS n (name, token, note, written_at)
SELECT $1::text, $3::bigint, $4::text, ", now!(), "
 WHERE EXISTS (SELECT FROM sqlock_lease AS l LEFT JOIN sqlock_client AS c ON c.id = l.client
                WHERE l.name = $1 AND l.id = $2 AND l.token = $3 AND greatest(l.expires_at, c.beat_at + l.ttl) > ", now!(), ")
    OR EXISTS (SELECT FROM sqlock_entry AS e LEFT JOIN sqlock_client AS c ON c.id = e.client
                WHERE e.name = $1 AND e.id = $2 AND e.token = $3 AND e.owner <> ''
                  AND greatest(e.expires_at, c.beat_at + e.ttl) > ", now!(), ")
    ON CONFLICT (name, token) DO UPDATE SET note = excluded.note, written_at = excluded.written_at
RETURNING n.token");

pub(super) async fn write(conn: &mut Connection<'_>, note: &Note) -> Result<bool, sqlx::Error> {
    let Note { name, id, token, text } = note;
    let query = sqlx::query(WRITE).bind(name.as_str()).bind(id.to_string()).bind(token.get()).bind(text);
    Ok(conn.row(query).await?.is_some())
}

// $1 name
#[rustfmt::skip]
const READ: &str = "
SELECT n.note FROM sqlock_lease AS l JOIN sqlock_note AS n ON n.name = l.name AND n.token = l.token WHERE l.name = $1";

pub(super) async fn read(conn: &mut Connection<'_>, name: &LockName) -> Result<Option<String>, sqlx::Error> {
    let row = conn.row(sqlx::query(READ).bind(name.as_str())).await?;
    row.map(|row| row.text("note")).transpose()
}

// $1 the name before the first, $2 the last name.
pub(super) const SWEEP: &str = concat!("DELETE FROM sqlock_note AS n WHERE n.name > $1 AND n.name <= $2", is_former!());

// $1 the name before the first.
const SWEEP_REST: &str = concat!("DELETE FROM sqlock_note AS n WHERE n.name > $1", is_former!());

/// Deletes the notes of former holders, except the latest note of each name.
pub(super) async fn sweep(conn: &mut Connection<'_>, after: &str, last: Option<&str>) -> Result<(), sqlx::Error> {
    let query = match last {
        Some(last) => sqlx::query(SWEEP).bind(after).bind(last),
        None => sqlx::query(SWEEP_REST).bind(after),
    };
    conn.rows(query).await?;
    Ok(())
}
