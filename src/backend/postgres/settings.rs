//! What the settings of a server and of a user make necessary.
//!
//! A SET for the session would stay with a pooled connection. So a statement that needs other settings than the defaults is put into a
//! transaction of its own.

use sqlx::{Executor as _, PgConnection};

use crate::error::not_writable;

/// Whether statements need a transaction around them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransactionMode {
    None,
    /// With a commit that waits for the disk here, and on a synchronous standby.
    Durable,
    /// With a commit as the server has it, which waits for more than that.
    AsConfigured,
}

/// The settings of a connection, as far as statements depend on them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    transaction: TransactionMode,
    /// Nothing counts that only one server has.
    is_synchronous: bool,
}

const SETTINGS: &str = "
SELECT current_setting('default_transaction_isolation'), current_setting('synchronous_commit'),
       current_setting('default_transaction_read_only'), pg_is_in_recovery(), current_setting('synchronous_standby_names')";

const REPLICATES_SYNCHRONOUSLY: &str = "SELECT current_setting('synchronous_standby_names') <> ''";

impl Settings {
    /// Reads the settings of a connection. Refuses a server that cannot be written, or that does not replicate as was asked for.
    ///
    /// REPEATABLE READ would end most attempts on a busy name in an error, and an asynchronous commit would lose grants in a crash.
    pub(super) async fn read(
        connection: &mut PgConnection,
        place: &str,
        is_synchronous: bool,
    ) -> Result<Self, sqlx::Error> {
        let (isolation, commit, read_only, is_standby, standbys): (String, String, String, bool, String) =
            sqlx::query_as(SETTINGS).fetch_one(&mut *connection).await?;
        if is_standby {
            return Err(not_writable(format!("{place} is a standby, which cannot be written")));
        }
        if is_synchronous && let Some(missing) = missing_standby(connection, &standbys).await? {
            return Err(not_writable(format!("{place} does not replicate synchronously, as was asked for: {missing}")));
        }
        let waits = if is_synchronous { matches!(&*commit, "on" | "remote_apply") } else { commit != "off" };
        let transaction = if isolation == "read committed" && waits && read_only == "off" {
            TransactionMode::None
        } else if commit == "remote_apply" {
            TransactionMode::AsConfigured
        } else {
            TransactionMode::Durable
        };
        Ok(Self { transaction, is_synchronous })
    }

    /// Makes sure that a server that was synchronous still is. A standby that is taken out of the configuration closes no connection.
    pub(super) async fn verify(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        if !self.is_synchronous || sqlx::query_scalar(REPLICATES_SYNCHRONOUSLY).fetch_one(connection).await? {
            return Ok(());
        }
        Err(not_writable("the server does not replicate synchronously any more, as was asked for".into()))
    }

    /// Begins a transaction, if statements need one.
    pub(super) async fn begin(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        let begin = match self.transaction {
            TransactionMode::None => return Ok(()),
            TransactionMode::Durable => {
                "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL synchronous_commit = on"
            }
            TransactionMode::AsConfigured => "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE",
        };
        connection.execute(begin).await.map(drop)
    }

    /// Ends the transaction that [`begin`](Self::begin) has begun, if any.
    pub(super) async fn end(&self, connection: &mut PgConnection, commits: bool) -> Result<(), sqlx::Error> {
        if self.transaction == TransactionMode::None {
            return Ok(());
        }
        connection.execute(if commits { "COMMIT" } else { "ROLLBACK" }).await.map(drop)
    }
}

/// When the server was started, in microseconds of its clock. Two servers were not started at the same moment.
pub(super) async fn started_at(connection: &mut PgConnection) -> Result<i64, sqlx::Error> {
    sqlx::query_scalar("SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint")
        .fetch_one(connection)
        .await
}

const STANDBYS: &str = "
SELECT count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')), count(*) FILTER (WHERE sync_state IS NULL)
  FROM pg_stat_replication";

/// Why no standby would confirm commits. `None`: one does, at present.
async fn missing_standby(connection: &mut PgConnection, configured: &str) -> Result<Option<&'static str>, sqlx::Error> {
    if configured.trim().is_empty() {
        return Ok(Some("synchronous_standby_names is empty"));
    }
    // A user who may not see the details of other sessions sees that they are there.
    let (seen, hidden): (i64, i64) = sqlx::query_as(STANDBYS).fetch_one(connection).await?;
    Ok(match (seen, hidden) {
        (0, 0) => Some("no synchronous standby is connected"),
        (0, _) => Some("this user may not see whether a standby is synchronous: GRANT pg_monitor to it"),
        _ => None,
    })
}
