//! The heartbeats of clients.

use std::time::Duration;

use sqlx::SqliteConnection;
use sqlx::sqlite::SqliteRow;
use tokio::time::{Instant, sleep};

use super::BUSY_TIMEOUT;
use super::store::{is_busy, rows};
use crate::backend::stored::TableRow as _;
use crate::protocol::ClientId;

// $1 client
#[rustfmt::skip]
const REGISTER: &str = concat!("
INSERT INTO sqlock_client (id, beat_at, notice) VALUES ($1, ", now!(), ", ", now!(), ")
    ON CONFLICT (id) DO UPDATE SET beat_at = excluded.beat_at
RETURNING notice");

/// Creates the row of a client or writes its heartbeat. Returns its latest notice.
pub(super) async fn register(conn: &mut SqliteConnection, client: ClientId) -> Result<i64, sqlx::Error> {
    write(conn, REGISTER, client).await?.first().ok_or(sqlx::Error::RowNotFound)?.number("notice")
}

// $1 client
#[rustfmt::skip]
const HEARTBEAT: &str = concat!("
UPDATE sqlock_client SET beat_at = ", now!(), " WHERE id = $1
RETURNING notice");

/// Writes the heartbeat of a client. Returns its latest notice, or `None` if it has no row.
pub(super) async fn beat(conn: &mut SqliteConnection, client: ClientId) -> Result<Option<i64>, sqlx::Error> {
    write(conn, HEARTBEAT, client).await?.first().map(|row| row.number("notice")).transpose()
}

/// The busy timeout of the connection for heartbeats, in milliseconds. SQLite's own handler sleeps
/// longer after each attempt, up to 100 ms, and other connections could take the write lock in
/// every pause.
pub(super) const SHORT_BUSY_TIMEOUT: &str = "PRAGMA busy_timeout = 8";

/// The pause between two attempts to take the write lock.
const PAUSE: Duration = Duration::from_millis(1);

/// Writes a heartbeat, at many moments while other connections have the write lock.
async fn write(
    conn: &mut SqliteConnection,
    statement: &'static str,
    client: ClientId,
) -> Result<Vec<SqliteRow>, sqlx::Error> {
    let start = Instant::now();
    loop {
        match rows(conn, sqlx::query(statement).bind(client.to_string())).await {
            Err(error) if is_busy(&error) && start.elapsed() < BUSY_TIMEOUT => sleep(PAUSE).await,
            written => return written,
        }
    }
}
