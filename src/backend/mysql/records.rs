//! Claims of keys: an INSERT waits for another one of the same key that is not committed. On
//! MariaDB a setting avoids the wait. On MySQL another connection reads the record first, so an
//! INSERT waits only for a rival of the same moment.

use sqlx::{Executor as _, MySql, MySqlConnection, QueryBuilder, Row as _};

use crate::backend::StoreFuture;
use crate::backend::dialect::{Dialect as _, LockFailure, Locking, Wait};
use crate::backend::records::{
    self, ClaimOutcome, ClaimRequest, INTO, Record, RecordCommand, RecordDialect, RecordResponse, RecordState,
    push_use_token, push_values, read, text_and_bytes,
};

/// https://mariadb.com/kb/en/set-statement/
const WITHOUT_WAITING: &str = "/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */ ";

/// Applies to the next transaction only, which is the next statement.
const READ_UNCOMMITTED: &str = "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED";

impl RecordDialect for MySql {
    // The caller's session may have any time zone, and `now!` is right in UTC only.
    const NOW: &'static str = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))";
    const INSERT_NEW: (&'static str, &'static str) = ("INSERT IGNORE INTO ", "");
    const SKIP_LOCKED: &'static str = " FOR UPDATE SKIP LOCKED";
    const EXPIRY_INDEX_HINT: &'static str = " FORCE INDEX (sqlock_idem_by_expiry)";
    // The server prefers to scan a small table, and would wait for the claims in progress.
    const KEY_INDEX_HINT: &'static str = " FORCE INDEX (PRIMARY)";
    const IGNORES_TRAILING_SPACES: bool = true;
    // The names and numbers of servers differ between the nodes of a cluster, and the case of a
    // database's name may not count.
    const SELECT_IDENTITY: &'static str = "SELECT COALESCE(CAST(LOWER(DATABASE()) AS CHAR), '')";
    const STEP_COLUMN: &'static str = "CONVERT(step USING utf8mb4)";
    const CLAIM_MAY_WAIT: bool = true;
    // These servers do not write a row that stays the same, and the nodes of a Galera cluster
    // compare only what their transactions have written.
    const REWRITE: &'static str = "expires_at = expires_at + 1";
    // DDL, TRUNCATE: https://dev.mysql.com/doc/refman/8.4/en/implicit-commit.html
    const COMMITS_IMPLICITLY: bool = true;

    fn push_step(query: &mut QueryBuilder<Self>, name: &str) {
        query.push_bind(name.as_bytes().to_vec());
    }

    text_and_bytes!();

    fn claim<'a>(conn: &'a mut MySqlConnection, claim: &'a ClaimRequest) -> StoreFuture<'a, ClaimOutcome> {
        Box::pin(async move {
            let state = claim.open_state();
            let mut query = QueryBuilder::new(WITHOUT_WAITING);
            if claim.issued {
                push_use_token::<Self>(&mut query, claim, state, 0);
            } else {
                // Expired records were deleted before: an update after an INSERT that found one
                // would deadlock with rivals.
                query.push("INSERT IGNORE INTO ").push(INTO).push(" VALUES (");
                push_values::<Self>(&mut query, claim, state, 0);
                query.push(")");
            }
            match query.build().execute(&mut *conn).await {
                Ok(done) if done.rows_affected() > 0 => Ok(ClaimOutcome::Claimed),
                Ok(_) => Ok(ClaimOutcome::RecordExists),
                Err(error) if Self::lock_failure(&error) == Some(LockFailure::Locked) => {
                    if Self::has_rolled_back(conn, &error).await? { Err(error) } else { Ok(ClaimOutcome::Locked) }
                }
                Err(error) => Err(error),
            }
        })
    }
}

/// Runs a maintenance command on records of requests.
pub(super) async fn execute_command(
    conn: &mut MySqlConnection,
    command: &RecordCommand,
) -> Result<RecordResponse, sqlx::Error> {
    let key = match command {
        RecordCommand::Peek(key) => key,
        // A transaction keeps the rows that were not locked until they are deleted, and resolves a
        // record together with its resolution.
        RecordCommand::DeleteExpired(_) | RecordCommand::Purge { .. } | RecordCommand::Resolve(_) => {
            conn.execute("START TRANSACTION").await?;
            let found = records::execute_command::<MySql>(&mut *conn, command).await;
            conn.execute(if found.is_ok() { "COMMIT" } else { "ROLLBACK" }).await?;
            return found;
        }
        _ => return records::execute_command::<MySql>(&mut *conn, command).await,
    };
    // A transaction that has written the record and not committed has locked it. A shared lock does
    // not conflict with transactions that have only read it.
    let clauses = MySql::clauses(Locking { shared: true, key_update: false, wait: Wait::Never });
    match read::<MySql>(&mut *conn, &key.id, &clauses.after).await {
        Ok(record) => Ok(RecordResponse { records: record.into_iter().collect(), ..RecordResponse::default() }),
        Err(error) if MySql::lock_failure(&error) == Some(LockFailure::Locked) => {
            sqlx::query(READ_UNCOMMITTED).execute(&mut *conn).await?;
            // Only a claim without a result has the fingerprint of the request in progress.
            let dirty = read::<MySql>(&mut *conn, &key.id, "").await?;
            let is_claimed = |record: &Record| {
                matches!(record.state, RecordState::Done | RecordState::Unknown)
                    && record.result.is_none()
                    && record.attempts == 0
            };
            let dirty = dirty.filter(|record| is_claimed(record) && !record.is_expired());
            Ok(RecordResponse {
                is_locked: true,
                fingerprint: dirty.map(|record| record.fingerprint),
                ..RecordResponse::default()
            })
        }
        Err(error) => Err(error),
    }
}
