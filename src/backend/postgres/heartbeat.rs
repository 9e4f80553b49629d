//! The heartbeat of a client, which renews the leases and the entries that name the client.

use super::listener::mark;
use super::store::{Connection, now};
use crate::backend::stored::TableRow as _;
use crate::protocol::ClientId;

/// Whether the session is the one that listens for this client.
macro_rules! listens {
    () => {
        concat!("coalesce(", mark!(), " = $2, false)")
    };
}

// $1 client, $2 the mark of its session, if the session listens. Notices start at the clock, as in
// `notice!`.
#[rustfmt::skip]
const REGISTER: &str = concat!("
INSERT INTO sqlock_client AS c (id, beat_at, notice, listens) VALUES ($1, ", now!(), ", ", now!(), ", ", listens!(), ")
    ON CONFLICT (id) DO UPDATE SET beat_at = ", now!(), ", listens = excluded.listens
RETURNING c.notice");

/// Creates the row of a client or writes its heartbeat. Returns its latest notice.
pub(super) async fn register(conn: &mut Connection<'_>, client: ClientId) -> Result<i64, sqlx::Error> {
    let row = conn.row(sqlx::query(REGISTER).bind(client.to_string()).bind(conn.mark)).await?;
    row.ok_or(sqlx::Error::RowNotFound)?.number("notice")
}

// As above.
#[rustfmt::skip]
const HEARTBEAT: &str = concat!("
UPDATE sqlock_client SET beat_at = ", now!(), ", listens = ", listens!(), " WHERE id = $1 RETURNING notice");

/// Writes the heartbeat of a client. Returns its latest notice, or `None` if it has no row.
pub(super) async fn beat(conn: &mut Connection<'_>, client: ClientId) -> Result<Option<i64>, sqlx::Error> {
    let row = conn.row(sqlx::query(HEARTBEAT).bind(client.to_string()).bind(conn.mark)).await?;
    row.map(|row| row.number("notice")).transpose()
}
