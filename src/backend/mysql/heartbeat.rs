//! The rows of clients.

use sqlx::MySqlConnection;

use crate::protocol::ClientId;

// LAST_INSERT_ID is the latest notice plus one. Notices start at the clock, as in `notice!`. Bind
// order: client.
#[rustfmt::skip]
const REGISTER: &str = concat!("
INSERT INTO sqlock_client (id, beat_at, notice) VALUES (?, ", now!(), ", LAST_INSERT_ID(", now!(), " + 1) - 1)
    ON DUPLICATE KEY UPDATE beat_at = ", now!(), ", notice = LAST_INSERT_ID(notice + 1) - 1");

pub(super) async fn register(conn: &mut MySqlConnection, client: ClientId) -> Result<i64, sqlx::Error> {
    let done = sqlx::query(REGISTER).bind(client.to_string()).execute(conn).await?;
    Ok(notice_from(done.last_insert_id()))
}

// Bind order: client.
#[rustfmt::skip]
const HEARTBEAT: &str = concat!("
UPDATE sqlock_client SET beat_at = ", now!(), ", notice = LAST_INSERT_ID(notice + 1) - 1 WHERE id = ?");

pub(super) async fn beat(conn: &mut MySqlConnection, client: ClientId) -> Result<Option<i64>, sqlx::Error> {
    let done = sqlx::query(HEARTBEAT).bind(client.to_string()).execute(conn).await?;
    Ok((done.rows_affected() > 0).then(|| notice_from(done.last_insert_id())))
}

fn notice_from(insert_id: u64) -> i64 {
    i64::try_from(insert_id.saturating_sub(1)).unwrap_or(i64::MAX)
}
