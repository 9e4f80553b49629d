//! Notices the commits of other connections, on the connection of the heartbeat.
//!
//! SQLite has no notifications, but it counts the commits of other connections. Reading the count
//! takes no lock that blocks a writer, and no disk access.
//! <https://www.sqlite.org/pragma.html#pragma_data_version>

use std::ops::RangeInclusive;
use std::time::Duration;

use sqlx::SqliteConnection;
use tokio::time::{Instant, sleep};

use crate::backend::IsWaiting;

/// The shortest and the longest pause between two looks at the count.
const PAUSES: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_millis(50);

/// The pause as a fraction of the time since the last commit: a grant is found late by that
/// fraction of the wait, and a long wait costs little.
const PAUSE_PART: u32 = 8;

/// The state of a connection that notices commits.
pub(super) struct Listener {
    is_waiting: IsWaiting,
    /// The last count. `None`: the client has not waited before.
    version: Option<i64>,
    /// When the wait began, or the last commit was noticed.
    since: Instant,
}

impl Listener {
    pub(super) fn new(is_waiting: IsWaiting) -> Self {
        Self { is_waiting, version: None, since: Instant::now() }
    }

    /// Waits for the next commit of another connection while the client waits for a name.
    ///
    /// # Cancel safety
    ///
    /// No commit is missed when the future is dropped.
    pub(super) async fn notified(&mut self, conn: &mut SqliteConnection) -> Result<(), sqlx::Error> {
        loop {
            let waits_anew = self.is_waiting.has_changed().unwrap_or(true) || !*self.is_waiting.borrow();
            if waits_anew {
                if self.is_waiting.wait_for(|is_waiting| *is_waiting).await.is_err() {
                    return std::future::pending().await;
                }
                self.since = Instant::now();
            }
            let pause = self.since.elapsed() / PAUSE_PART;
            sleep(pause.clamp(*PAUSES.start(), *PAUSES.end())).await;
            let version = match sqlx::query_scalar("PRAGMA data_version").fetch_one(&mut *conn).await {
                Ok(version) => version,
                // Without a write-ahead log, a commit under way locks the file.
                Err(sqlx::Error::Database(_)) => continue,
                Err(error) => return Err(error),
            };
            if self.version.replace(version) != Some(version) {
                self.since = Instant::now();
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, reason = "tests")]
mod tests {
    use sqlx::Executor as _;
    use tokio::sync::watch;
    use tokio::time::timeout;

    use super::super::differential::open;
    use super::*;

    #[tokio::test]
    async fn commit_of_another_connection_is_noticed() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("store.db");
        let (mut own, mut other) = (open(&file).await, open(&file).await);
        let is_waiting = watch::Sender::new(false);
        let mut listener = Listener::new(is_waiting.subscribe());
        let quiet = Duration::from_millis(100);
        timeout(quiet, listener.notified(&mut own)).await.expect_err("the client does not wait");

        is_waiting.send_replace(true);
        // A grant may have preceded the first look.
        listener.notified(&mut own).await.expect("the first count");
        timeout(quiet, listener.notified(&mut own)).await.expect_err("nothing was committed");
        other.execute("INSERT INTO sqlock_client (id, beat_at) VALUES ('other', 0)").await.expect("a commit");
        let noticed = timeout(Duration::from_secs(30), listener.notified(&mut own)).await;
        noticed.expect("a notification").expect("a connection");
    }
}
