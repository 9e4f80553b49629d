//! Notices the commits of other connections, on the connection of the heartbeat.
//!
//! SQLite has no notifications, but it counts what other connections commit. Reading the count
//! takes no lock that a writer waits for, and no disk access.
//! <https://www.sqlite.org/pragma.html#pragma_data_version>

use std::time::Duration;

use sqlx::SqliteConnection;
use tokio::time::sleep;

use crate::backend::IsWaiting;
use crate::backoff::Backoff;

/// The shortest and the longest pause between two looks at the count. It grows while nothing is
/// committed.
const PAUSES: Backoff = Backoff::between(Duration::from_millis(1), Duration::from_millis(10));

/// The state of a connection that notices commits.
pub(super) struct Listener {
    is_waiting: IsWaiting,
    /// The last count. `None`: the client has not waited before.
    version: Option<i64>,
    pauses: Backoff,
}

impl Listener {
    pub(super) fn new(is_waiting: IsWaiting) -> Self {
        Self { is_waiting, version: None, pauses: PAUSES }
    }

    /// Waits for the next commit of another connection while the client waits for a name.
    ///
    /// # Cancel safety
    ///
    /// No commit is missed when the future is dropped.
    pub(super) async fn notified(&mut self, conn: &mut SqliteConnection) -> Result<(), sqlx::Error> {
        loop {
            if self.is_waiting.wait_for(|is_waiting| *is_waiting).await.is_err() {
                return std::future::pending().await;
            }
            sleep(self.pauses.step()).await;
            let version = match sqlx::query_scalar("PRAGMA data_version").fetch_one(&mut *conn).await {
                Ok(version) => version,
                // Without a write-ahead log, a commit under way locks the file.
                Err(sqlx::Error::Database(_)) => continue,
                Err(error) => return Err(error),
            };
            if self.version.replace(version) != Some(version) {
                self.pauses = PAUSES;
                return Ok(());
            }
        }
    }
}
