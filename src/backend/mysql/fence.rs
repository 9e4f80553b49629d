//! The statement that makes a transaction of the caller depend on a holding.

use sqlx::{AssertSqlSafe, MySqlConnection};

use super::script::{filled, id_literal, name_literal};
use crate::name::LockName;
use crate::protocol::LeaseId;
use crate::token::FencingToken;

// The row that tells of the holding is locked until the transaction ends: that of the name, or the entry of one that shares. A row that
// does not match would stay locked as well, and at REPEATABLE READ a missing one would lock the gap; so the inner query looks first,
// without locking. Bind order: name, id, token, id, token, name, id, token, id, token.
#[rustfmt::skip]
const FENCE: &str = "
(SELECT 1 FROM sqlock_lease AS l
  WHERE l.name = (SELECT s.name FROM sqlock_lease AS s WHERE s.name = ? AND s.id = ? AND s.token = ?)
    AND l.id = ? AND l.token = ?
   LOCK IN SHARE MODE)
 UNION ALL
(SELECT 1 FROM sqlock_entry AS e
  WHERE e.name = (SELECT s.name FROM sqlock_entry AS s WHERE s.name = ? AND s.id = ? AND s.token = ? AND s.owner <> '')
    AND e.id = ? AND e.token = ? AND e.owner <> ''
   LOCK IN SHARE MODE)";

/// Keeps a holding as it is until the transaction ends, as the first statement of the transaction. `false`: it does not stand, and the
/// transaction is to be rolled back.
pub(crate) async fn fence(
    conn: &mut MySqlConnection,
    name: &LockName,
    id: LeaseId,
    token: FencingToken,
) -> Result<bool, sqlx::Error> {
    let (name, id, token) = (&name_literal(name), &id_literal(id), &token.get().to_string());
    let sql = filled(FENCE, &[name, id, token, id, token, name, id, token, id, token]);
    // As text, not prepared: a future that is dropped while sqlx prepares leaves a connection that never answers again, and with it a
    // transaction that never ends.
    let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_optional(conn).await?;
    Ok(row.is_some())
}
