//! The fence: keeps a holding from ending until the caller's transaction ends.

use sqlx::{Executor as _, PgConnection, Row as _};

use crate::backend::fence::{FenceCheck, FenceOutcome};

// Outside of a transaction, SAVEPOINT fails with 25P01.
// https://www.postgresql.org/docs/current/sql-savepoint.html
const CHECK_TRANSACTION: &str = "SAVEPOINT sqlock_fence; RELEASE SAVEPOINT sqlock_fence";

// $1 name, $2 id, $3 token. FOR KEY SHARE blocks every statement that ends a holding until the
// transaction ends. Statements that leave the holder unchanged pass.
// https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS
//
// `has_begun`: in the snapshot, the name has reached this token, and no holding has the token under
// another id.
#[rustfmt::skip]
const FENCE: &str = "
WITH alone AS MATERIALIZED (
    SELECT name FROM sqlock_lease WHERE name = $1 AND id = $2 AND token = $3 FOR KEY SHARE),
share AS MATERIALIZED (
    SELECT name FROM sqlock_entry
     WHERE name = $1 AND id = $2 AND token = $3 AND owner <> '' AND NOT EXISTS (SELECT FROM alone)
       FOR KEY SHARE)
SELECT EXISTS (SELECT FROM alone) OR EXISTS (SELECT FROM share) AS is_held,
       current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') AS reads_latest,
       EXISTS (SELECT FROM sqlock_lease AS l
                WHERE l.name = $1 AND l.token >= $3 AND (l.token > $3 OR l.id IN ('', 'kept', 'entries')))
       AND NOT EXISTS (SELECT FROM sqlock_entry AS e WHERE e.name = $1 AND e.token = $3 AND e.owner <> '') AS has_begun";

/// Checks that a holding is valid, alone or shared, and keeps it from ending until the transaction
/// on this connection ends.
pub(super) async fn fence(connection: &mut PgConnection, check: &FenceCheck) -> Result<FenceOutcome, sqlx::Error> {
    match connection.execute(CHECK_TRANSACTION).await {
        Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("25P01") => {
            return Ok(FenceOutcome::NoTransaction);
        }
        checked => checked?,
    };
    // A holding may become a share of its name, with the same token, between the snapshot of a
    // statement and the lock. The next statement sees that.
    for _ in 0..2 {
        let query = sqlx::query(FENCE).bind(&check.name).bind(&check.id).bind(check.token);
        let row = match query.fetch_one(&mut *connection).await {
            Ok(row) => row,
            // The row has changed since the snapshot of a REPEATABLE READ or SERIALIZABLE
            // transaction was taken.
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("40001") => {
                return Ok(FenceOutcome::StaleSnapshot);
            }
            Err(error) => return Err(error),
        };
        if row.try_get("is_held")? {
            return Ok(FenceOutcome::Fenced);
        }
        if !row.try_get::<bool, _>("reads_latest")? {
            let has_begun: bool = row.try_get("has_begun")?;
            return Ok(if has_begun { FenceOutcome::Superseded } else { FenceOutcome::StaleSnapshot });
        }
    }
    Ok(FenceOutcome::Superseded)
}
