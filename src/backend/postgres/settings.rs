//! The settings of the server and the user that statements depend on.
//!
//! A SET for the session would stay with a pooled connection. So a statement that needs other
//! settings runs in a transaction of its own.

use sqlx::{Executor as _, PgConnection, Row as _};

use crate::error::not_writable;

/// The transaction that statements need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransactionMode {
    None,
    /// A commit that waits for the disk here and on a synchronous standby.
    Durable,
    /// A commit as configured, whose setting is stricter.
    AsConfigured,
}

/// The settings of a connection, as far as statements depend on them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    transaction: TransactionMode,
    /// A commit must reach a second server.
    is_synchronous: bool,
    /// The server can use TLS. Behind a pooler, that says nothing about the connection.
    pub(super) server_has_tls: bool,
}

const SETTINGS: &str = "
SELECT current_setting('default_transaction_isolation'), current_setting('synchronous_commit'),
       current_setting('default_transaction_read_only'), pg_is_in_recovery(), current_setting('synchronous_standby_names'),
       current_setting('ssl')::boolean";

// $1 whether each transaction sets its own synchronous_commit.
const REPLICATES_SYNCHRONOUSLY: &str = "
SELECT current_setting('synchronous_standby_names') <> ''
       AND ($1 OR current_setting('synchronous_commit') IN ('on', 'remote_apply'))";

/// Begins a transaction of several commands. The server ends one whose client has disappeared
/// between two of them: its locks would keep other clients from taking names over.
/// <https://www.postgresql.org/docs/current/runtime-config-client.html#GUC-IDLE-IN-TRANSACTION-SESSION-TIMEOUT>
macro_rules! begin {
    () => {
        "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL idle_in_transaction_session_timeout = '5s'"
    };
}

impl Settings {
    /// Reads the settings of a connection. Returns an error if the server is read-only, or does not
    /// replicate as required.
    ///
    /// REPEATABLE READ would make most requests on a busy name fail, and an asynchronous commit
    /// would lose grants in a crash.
    pub(super) async fn read(
        connection: &mut PgConnection,
        address: &str,
        is_synchronous: bool,
    ) -> Result<Self, sqlx::Error> {
        let (isolation, commit, read_only, is_standby, standbys, server_has_tls): (
            String,
            String,
            String,
            bool,
            String,
            bool,
        ) = sqlx::query_as(SETTINGS).fetch_one(&mut *connection).await?;
        if is_standby {
            return Err(not_writable(format!("{address} is a standby, which cannot be written")));
        }
        if is_synchronous && let Some(missing) = missing_standby(connection, &standbys).await? {
            return Err(not_writable(format!("{address} does not replicate synchronously, as required: {missing}")));
        }
        let waits = if is_synchronous { matches!(&*commit, "on" | "remote_apply") } else { commit != "off" };
        let transaction = if isolation == "read committed" && waits && read_only == "off" {
            TransactionMode::None
        } else if commit == "remote_apply" {
            TransactionMode::AsConfigured
        } else {
            TransactionMode::Durable
        };
        Ok(Self { transaction, is_synchronous, server_has_tls })
    }

    /// Returns whether a commit may be lost in a crash after which its client repeats it.
    pub(super) fn may_commit_lazily(&self) -> bool {
        !self.is_synchronous
    }

    /// Checks that the server still replicates synchronously. A change of its configuration closes
    /// no connection.
    pub(super) async fn verify(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        if !self.is_synchronous {
            return Ok(());
        }
        let sets_commit = self.transaction == TransactionMode::Durable;
        if sqlx::query_scalar(REPLICATES_SYNCHRONOUSLY).bind(sets_commit).fetch_one(connection).await? {
            return Ok(());
        }
        Err(not_writable("the server does not replicate synchronously any more, as required".into()))
    }

    /// Returns these settings for several statements that take effect together.
    pub(super) fn in_transactions(self) -> Self {
        match self.transaction {
            TransactionMode::None => Self { transaction: TransactionMode::AsConfigured, ..self },
            _ => self,
        }
    }

    /// Begins a transaction, if statements need one.
    pub(super) async fn begin(&self, connection: &mut PgConnection) -> Result<(), sqlx::Error> {
        let begin = match self.transaction {
            TransactionMode::None => return Ok(()),
            TransactionMode::Durable => concat!(begin!(), "; SET LOCAL synchronous_commit = on"),
            TransactionMode::AsConfigured => begin!(),
        };
        match connection.execute(begin).await {
            Ok(_) => Ok(()),
            // feature_not_supported: READ WRITE on a server that has become a standby.
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("0A000") => {
                Err(not_writable("the server has become a standby, which cannot be written".into()))
            }
            Err(error) => {
                // The transaction may have begun before a later statement failed.
                let _ = connection.execute("ROLLBACK").await;
                Err(error)
            }
        }
    }

    /// Ends the transaction that [`begin`](Self::begin) has begun, if any, and returns the result
    /// of its statement, or else the error of its end.
    pub(super) async fn end<T>(
        &self,
        connection: &mut PgConnection,
        result: Result<T, sqlx::Error>,
    ) -> Result<T, sqlx::Error> {
        if self.transaction == TransactionMode::None {
            return result;
        }
        let ended = connection.execute(if result.is_ok() { "COMMIT" } else { "ROLLBACK" }).await;
        let value = result?;
        ended.map(|_| value)
    }
}

/// Reads when the server was started, in microseconds of its clock. Two servers do not start in the
/// same microsecond; a system identifier is the same in copies.
pub(super) async fn started_at(connection: &mut PgConnection) -> Result<i64, sqlx::Error> {
    // One round trip, without a prepared statement.
    let row = connection.fetch_one("SELECT (extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint").await?;
    row.try_get(0)
}

// The consumer of a logical slot cannot be promoted, so it is no standby.
const STANDBYS: &str = "
SELECT count(*) FILTER (WHERE r.sync_state IN ('sync', 'quorum')), count(*) FILTER (WHERE r.sync_state IS NULL)
  FROM pg_stat_replication AS r
 WHERE NOT EXISTS (SELECT 1 FROM pg_replication_slots AS s WHERE s.active_pid = r.pid AND s.slot_type = 'logical')";

/// Returns why no standby confirms commits. `None`: a standby confirms them.
async fn missing_standby(connection: &mut PgConnection, configured: &str) -> Result<Option<&'static str>, sqlx::Error> {
    if configured.trim().is_empty() {
        return Ok(Some("synchronous_standby_names is empty"));
    }
    // A user without the right to see the details of other sessions still sees the sessions.
    let (seen, hidden): (i64, i64) = sqlx::query_as(STANDBYS).fetch_one(connection).await?;
    Ok(match (seen, hidden) {
        (0, 0) => Some("no synchronous standby is connected"),
        (0, _) => Some("this user may not see whether a standby is synchronous: GRANT pg_monitor to it"),
        _ => None,
    })
}
