//! The fence: what keeps a holding as it is until the transaction of a caller ends.

use sqlx::SqliteConnection;

use crate::backend::fence::{Check, Verdict};

/// SQLite's answer when a transaction has read, and another has committed since: SQLITE_BUSY_SNAPSHOT.
const BUSY_SNAPSHOT: &str = "517";

// $1 name, $2 id, $3 token. A write: it takes the only write lock, or finds that the transaction reads from an older snapshot,
// which SQLite does not turn into a writer.
#[rustfmt::skip]
const FENCE: &str = "
UPDATE sqlock_lease SET token = token
 WHERE name = $1
   AND (id = $2 AND token = $3
        OR EXISTS (SELECT 1 FROM sqlock_entry AS e WHERE e.name = $1 AND e.id = $2 AND e.token = $3 AND e.owner <> ''))";

/// Tells whether a holding stands, alone or with others, and keeps it so until the transaction on this connection ends.
pub(super) async fn fence(conn: &mut SqliteConnection, check: &Check) -> Result<Verdict, sqlx::Error> {
    let query = sqlx::query(FENCE).bind(&check.name).bind(&check.id).bind(check.token);
    match query.execute(conn).await {
        Ok(done) if done.rows_affected() == 1 => Ok(Verdict::Fenced),
        Ok(_) => Ok(Verdict::Superseded),
        Err(sqlx::Error::Database(e)) if e.code().as_deref() == Some(BUSY_SNAPSHOT) => Ok(Verdict::StaleSnapshot),
        Err(error) => Err(error),
    }
}
