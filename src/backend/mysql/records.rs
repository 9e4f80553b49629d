//! How a key is claimed: an INSERT that meets one which is not committed waits for it. MariaDB can
//! be told not to. For MySQL another connection looks first, and an INSERT waits only for a rival
//! that came in the same moment.

use sqlx::{Executor as _, MySql, MySqlConnection, QueryBuilder, Row as _};

use crate::backend::StoreFuture;
use crate::backend::dialect::{Dialect as _, LockFailure, Locking, Wait};
use crate::backend::records::{
    Claimed, Claiming, Errand, Findings, INTO, Record, Records, State, as_usual, carry, push_consume, push_values, read,
};

/// https://mariadb.com/kb/en/set-statement/
const WITHOUT_WAITING: &str = "/*M! SET STATEMENT innodb_lock_wait_timeout = 0 FOR */ ";

/// For the next transaction only, which is the next statement.
const DIRTY: &str = "SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED";

impl Records for MySql {
    const NOW: &'static str = now!();
    const INSERT_NEW: (&'static str, &'static str) = ("INSERT IGNORE INTO ", "");
    const SKIPPING: &'static str = " FOR UPDATE SKIP LOCKED";
    const BY_EXPIRY: &'static str = " FORCE INDEX (sqlock_idem_by_expiry)";
    // Nodes of a cluster have names and numbers of their own, and the case of a name may not count.
    const IDENTITY: &'static str = "SELECT COALESCE(CAST(LOWER(DATABASE()) AS CHAR), '')";
    const STEP: &'static str = "CONVERT(step USING utf8mb4)";
    const PEEKS: bool = true;

    fn push_step(query: &mut QueryBuilder<Self>, name: &str) {
        query.push_bind(name.as_bytes().to_vec());
    }

    as_usual!();

    fn claim<'a>(conn: &'a mut MySqlConnection, claim: &'a Claiming) -> StoreFuture<'a, Claimed> {
        Box::pin(async move {
            let mut query = QueryBuilder::new(WITHOUT_WAITING);
            if claim.issued {
                push_consume::<Self>(&mut query, claim, State::Done, 0);
            } else {
                // What has expired was deleted before: to change it behind an INSERT that met it
                // would make rivals deadlock.
                query.push("INSERT IGNORE INTO ").push(INTO).push(" VALUES (");
                push_values::<Self>(&mut query, claim, State::Done, 0);
                query.push(")");
            }
            match query.build().execute(&mut *conn).await {
                Ok(done) if done.rows_affected() > 0 => Ok(Claimed::Ours),
                Ok(_) => Ok(Claimed::Not),
                Err(error) if Self::lock_failure(&error) == Some(LockFailure::Locked) => {
                    if Self::has_rolled_back(conn, &error).await? { Err(error) } else { Ok(Claimed::Taken) }
                }
                Err(error) => Err(error),
            }
        })
    }
}

/// Runs a maintenance command on records of requests.
pub(super) async fn record(conn: &mut MySqlConnection, errand: &Errand) -> Result<Findings, sqlx::Error> {
    let key = match errand {
        Errand::Peek(key) => key,
        // What is found not to be locked stays so until it is deleted; a record is not resolved
        // without a word of who did.
        Errand::Bury(_) | Errand::Purge { .. } | Errand::Resolve(_) => {
            conn.execute("START TRANSACTION").await?;
            let found = carry::<MySql>(&mut *conn, errand).await;
            conn.execute(if found.is_ok() { "COMMIT" } else { "ROLLBACK" }).await?;
            return found;
        }
        _ => return carry::<MySql>(&mut *conn, errand).await,
    };
    // Who has written it and not committed has it locked; who has only read it does not mind.
    let clauses = MySql::clauses(Locking { shared: true, key_update: false, wait: Wait::Never });
    match read::<MySql>(&mut *conn, &key.id, &clauses.after).await {
        Ok(record) => Ok(Findings { records: record.into_iter().collect(), ..Findings::default() }),
        Err(error) if MySql::lock_failure(&error) == Some(LockFailure::Locked) => {
            sqlx::query(DIRTY).execute(&mut *conn).await?;
            // Only what has been claimed and has no result yet has the fingerprint of one who is at
            // work.
            let dirty = read::<MySql>(&mut *conn, &key.id, "").await?;
            let is_claimed = |record: &Record| record.state == State::Done && record.result.is_none();
            let dirty = dirty.filter(|record| is_claimed(record) && !record.is_expired());
            Ok(Findings { busy: true, fingerprint: dirty.map(|record| record.fingerprint), ..Findings::default() })
        }
        Err(error) => Err(error),
    }
}
