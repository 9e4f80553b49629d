//! The heartbeats of clients.

use sqlx::SqliteConnection;

use super::store::rows;
use crate::backend::stored::TableRow as _;
use crate::protocol::ClientId;

// $1 client
#[rustfmt::skip]
const REGISTER: &str = concat!("
INSERT INTO sqlock_client (id, beat_at) VALUES ($1, ", now!(), ")
    ON CONFLICT (id) DO UPDATE SET beat_at = excluded.beat_at
RETURNING notice");

/// Creates the row of a client or writes its heartbeat. Returns the number of its notices.
pub(super) async fn register(conn: &mut SqliteConnection, client: ClientId) -> Result<i64, sqlx::Error> {
    let rows = rows(conn, sqlx::query(REGISTER).bind(client.to_string())).await?;
    rows.first().ok_or(sqlx::Error::RowNotFound)?.number("notice")
}

// $1 client
#[rustfmt::skip]
const BEAT: &str = concat!("
UPDATE sqlock_client SET beat_at = ", now!(), " WHERE id = $1
RETURNING notice");

/// Writes the heartbeat of a client. Returns the number of its notices, if it has a row.
pub(super) async fn beat(conn: &mut SqliteConnection, client: ClientId) -> Result<Option<i64>, sqlx::Error> {
    let rows = rows(conn, sqlx::query(BEAT).bind(client.to_string())).await?;
    rows.first().map(|row| row.number("notice")).transpose()
}
