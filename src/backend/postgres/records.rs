//! Claims of keys: a claim takes an advisory lock of its transaction, so a rival claim fails at
//! once.

use sqlx::{PgConnection, Postgres, QueryBuilder, Row as _};

use super::PostgresStore;
use super::store::now;
use crate::backend::records::{
    ClaimOutcome, ClaimRequest, INTO, RecordCommand, RecordDialect, RecordResponse, Rival, execute_command,
    push_replace_expired, push_use_token, push_values, text_and_bytes,
};
use crate::backend::{StoreFuture, digest};

/// The statements, formatted for readability.
#[rustfmt::skip]
mod sql {
// $1 the lock of the key, $2 the lock of the request. Both are read from one copy of pg_locks, so
// that the locks of a transaction are seen together.
pub(super) const RIVAL: &str = "
WITH held AS MATERIALIZED (
     SELECT pid, mode, (classid::bigint << 32 | objid::bigint) # 'sqlock_idem'::regclass::oid::bigint AS id
       FROM pg_locks
      WHERE locktype = 'advisory' AND objsubid = 1 AND granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
SELECT k.pid::bigint, (SELECT count(*) FROM held AS f WHERE f.pid = k.pid AND f.id = $2)
  FROM held AS k
 WHERE k.id = $1 AND k.mode = 'ExclusiveLock' AND k.pid <> pg_backend_pid()";
}

/// Returns the numbers of the advisory locks of the key and of this request with the key.
fn locks(claim: &ClaimRequest) -> (i64, i64) {
    let number = |parts: &[&[u8]]| {
        let digest = digest(b"sqlock/idem/lock/1", parts.iter().copied());
        i64::from_be_bytes(std::array::from_fn(|i| digest[i]))
    };
    (number(&[claim.key.id.as_bytes()]), number(&[claim.key.id.as_bytes(), &claim.fingerprint]))
}

/// Separates the locks of several schemas with these tables, which share the advisory locks of the
/// database.
const HERE: &str = " # 'sqlock_idem'::regclass::oid::bigint";

/// Adds the condition that takes both locks: a transaction with the lock of the key also has that
/// of its request.
fn push_locks(query: &mut QueryBuilder<Postgres>, claim: &ClaimRequest) {
    let (key, request) = locks(claim);
    query.push("CASE WHEN pg_try_advisory_xact_lock_shared(").push_bind(request).push(HERE);
    query.push(") THEN pg_try_advisory_xact_lock(").push_bind(key).push(HERE).push(") ELSE false END");
}

impl RecordDialect for Postgres {
    const NOW: &'static str = now!();
    const INSERT_NEW: (&'static str, &'static str) = ("INSERT INTO ", " ON CONFLICT DO NOTHING");
    const SKIP_LOCKED: &'static str = " FOR UPDATE SKIP LOCKED";
    const SKIPS_LOCKED_IN_DELETE: bool = true;
    const SELECT_IDENTITY: &'static str = "SELECT concat_ws('/', oid, to_regclass('sqlock_idem')::oid) FROM pg_database
                                     WHERE datname = current_database()";
    const STEP_COLUMN: &'static str = "step";
    const CLAIM_MAY_WAIT: bool = false;

    text_and_bytes!();

    fn claim<'a>(conn: &'a mut PgConnection, claim: &'a ClaimRequest) -> StoreFuture<'a, ClaimOutcome> {
        Box::pin(async move {
            let state = claim.open_state();
            let mut query = QueryBuilder::new("");
            if claim.issued {
                push_use_token::<Self>(&mut query, claim, state, 0);
                query.push(" AND ");
                push_locks(&mut query, claim);
            } else {
                query.push("INSERT INTO ").push(INTO).push(" SELECT ");
                push_values::<Self>(&mut query, claim, state, 0);
                query.push(" WHERE ");
                push_locks(&mut query, claim);
                push_replace_expired::<Self>(&mut query);
            }
            let claimed = query.build().execute(conn).await?.rows_affected();
            Ok(if claimed > 0 { ClaimOutcome::Claimed } else { ClaimOutcome::RecordExists })
        })
    }

    fn rival<'a>(conn: &'a mut PgConnection, claim: &'a ClaimRequest) -> StoreFuture<'a, Option<Rival>> {
        Box::pin(async move {
            let (key, request) = locks(claim);
            let found = sqlx::query(sql::RIVAL).bind(key).bind(request).fetch_optional(conn).await?;
            found
                .map(|row| Ok(Rival { process_id: row.try_get(0)?, is_same_request: row.try_get::<i64, _>(1)? > 0 }))
                .transpose()
        })
    }
}

impl PostgresStore {
    pub(super) async fn execute_command(&mut self, command: &RecordCommand) -> Result<RecordResponse, sqlx::Error> {
        let connection = self.connection.connection().await?;
        self.settings.verify(connection).await?;
        // A record is resolved together with the insertion of its resolution.
        let settings = match command {
            RecordCommand::Resolve(_) => self.settings.in_transactions(),
            _ => self.settings,
        };
        settings.begin(connection).await?;
        let found = execute_command::<Postgres>(connection, command).await;
        settings.end(connection, found).await
    }
}
