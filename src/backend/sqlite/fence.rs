//! The fence: keeps a holding from ending until the caller's transaction ends.

use sqlx::{Executor as _, SqliteConnection};

use crate::backend::fence::{FenceCheck, FenceOutcome};

/// SQLITE_BUSY_SNAPSHOT: another transaction has committed since this one read.
const BUSY_SNAPSHOT: &str = "517";

// $1 name, $2 id, $3 token. The write takes the only write lock, or fails because SQLite does not
// let a transaction with an older snapshot write.
#[rustfmt::skip]
const FENCE: &str = "
UPDATE sqlock_lease SET token = token
 WHERE name = $1
   AND (id = $2 AND token = $3
        OR EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = $1 AND e.id = $2 AND e.token = $3 AND e.owner <> ''))";

/// Checks that a holding is valid, alone or shared, and keeps it from ending until the transaction
/// on this connection ends.
pub(super) async fn fence(conn: &mut SqliteConnection, check: &FenceCheck) -> Result<FenceOutcome, sqlx::Error> {
    // SQLite refuses to begin a transaction inside another one.
    if conn.execute("BEGIN").await.is_ok() {
        conn.execute("ROLLBACK").await?;
        return Ok(FenceOutcome::NoTransaction);
    }
    let query = sqlx::query(FENCE).bind(&check.name).bind(&check.id).bind(check.token);
    match query.execute(conn).await {
        Ok(done) if done.rows_affected() == 1 => Ok(FenceOutcome::Fenced),
        Ok(_) => Ok(FenceOutcome::Superseded),
        Err(sqlx::Error::Database(e)) if e.code().as_deref() == Some(BUSY_SNAPSHOT) => Ok(FenceOutcome::StaleSnapshot),
        Err(error) => Err(error),
    }
}
