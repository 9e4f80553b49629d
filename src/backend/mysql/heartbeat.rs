//! The rows of clients.

use sqlx::MySqlConnection;
use sqlx::mysql::MySqlQueryResult;

use super::listener::{is_woken, lock_of};
use crate::protocol::ClientId;

/// How often a statement is sent that is interrupted, because another client wakes the session at
/// that moment.
const ATTEMPTS: u32 = 5;

// LAST_INSERT_ID is the number of notices plus one, or zero for a new row. Bind order: the user
// lock of the client, client.
#[rustfmt::skip]
const REGISTER: &str = concat!("
INSERT INTO sqlock_client (listens, id, beat_at, notice) VALUES (IS_USED_LOCK(?) <=> CONNECTION_ID(), ?, ", now!(), ", 0)
    ON DUPLICATE KEY UPDATE beat_at = ", now!(), ", listens = VALUES(listens), notice = LAST_INSERT_ID(notice + 1) - 1");

pub(super) async fn register(conn: &mut MySqlConnection, client: ClientId) -> Result<i64, sqlx::Error> {
    let done = send(conn, REGISTER, client).await?;
    Ok(notices(done.last_insert_id()))
}

// Bind order: the user lock of the client, client.
#[rustfmt::skip]
const BEAT: &str = concat!("
UPDATE sqlock_client SET beat_at = ", now!(), ", listens = IS_USED_LOCK(?) <=> CONNECTION_ID(), notice = LAST_INSERT_ID(notice + 1) - 1
 WHERE id = ?");

pub(super) async fn beat(conn: &mut MySqlConnection, client: ClientId) -> Result<Option<i64>, sqlx::Error> {
    let done = send(conn, BEAT, client).await?;
    Ok((done.rows_affected() > 0).then(|| notices(done.last_insert_id())))
}

async fn send(
    conn: &mut MySqlConnection,
    statement: &'static str,
    client: ClientId,
) -> Result<MySqlQueryResult, sqlx::Error> {
    let mut attempt = 1;
    loop {
        match sqlx::query(statement).bind(lock_of(client)).bind(client.to_string()).execute(&mut *conn).await {
            Err(error) if is_woken(&error) && attempt < ATTEMPTS => attempt += 1,
            sent => return sent,
        }
    }
}

fn notices(insert_id: u64) -> i64 {
    i64::try_from(insert_id.saturating_sub(1)).unwrap_or(i64::MAX)
}
