//! The fence: the first statement of a transaction that a holding protects.

use sqlx::{PgConnection, Row as _};

use crate::backend::sealed::Verdict;
use crate::name::LockName;
use crate::protocol::LeaseId;
use crate::token::FencingToken;

// $1 name, $2 id, $3 token. FOR KEY SHARE keeps the row from everything that ends a holding, until the transaction ends; what leaves
// the holder as it is passes. https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS
#[rustfmt::skip]
const FENCE: &str = "
WITH alone AS MATERIALIZED (
    SELECT name FROM sqlock_lease WHERE name = $1 AND id = $2 AND token = $3 FOR KEY SHARE),
share AS MATERIALIZED (
    SELECT name FROM sqlock_entry
     WHERE name = $1 AND id = $2 AND token = $3 AND owner <> '' AND NOT EXISTS (SELECT FROM alone)
       FOR KEY SHARE)
SELECT EXISTS (SELECT FROM alone) OR EXISTS (SELECT FROM share) AS stands,
       current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') AS sees_the_present";

/// Keeps a holding from ending until the transaction ends, if it stands.
pub(crate) async fn fence(
    connection: &mut PgConnection,
    name: &LockName,
    id: LeaseId,
    token: FencingToken,
) -> Result<Verdict, sqlx::Error> {
    // A holding may become a share of its name, with the same token, between the snapshot of a statement and the lock. The next
    // statement sees that.
    for _ in 0..2 {
        let query = sqlx::query(FENCE).bind(name.as_str()).bind(id.to_string()).bind(token.get());
        let row = match query.fetch_one(&mut *connection).await {
            Ok(row) => row,
            // The row has changed since the snapshot of a REPEATABLE READ or SERIALIZABLE transaction was taken.
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some("40001") => {
                return Ok(Verdict::StaleSnapshot);
            }
            Err(error) => return Err(error),
        };
        if row.try_get("stands")? {
            return Ok(Verdict::Fenced);
        }
        if !row.try_get::<bool, _>("sees_the_present")? {
            return Ok(Verdict::StaleSnapshot);
        }
    }
    Ok(Verdict::Superseded)
}
