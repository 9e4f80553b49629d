//! How a key is claimed: whoever is about to holds a lock that ends with its transaction, so that a rival is told at once.

use sqlx::{PgConnection, Postgres, QueryBuilder, Row as _};

use super::PostgresStore;
use super::store::now;
use crate::backend::StoreFuture;
use crate::backend::records::{
    Claimed, Claiming, Errand, Findings, INTO, Records, Rival, State, as_usual, carry, digest, push_consume,
    push_or_anew, push_values,
};

/// The statements, laid out to be read.
#[rustfmt::skip]
mod sql {
// $1 the key's lock, $2 the request's. Looked at once: what one transaction holds is to be seen together.
pub(super) const RIVAL: &str = "
WITH held AS MATERIALIZED (
     SELECT pid, mode, (classid::bigint << 32 | objid::bigint) # 'sqlock_idem'::regclass::oid::bigint AS id
       FROM pg_locks
      WHERE locktype = 'advisory' AND objsubid = 1 AND granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))
SELECT k.pid::bigint, (SELECT count(*) FROM held AS f WHERE f.pid = k.pid AND f.id = $2)
  FROM held AS k
 WHERE k.id = $1 AND k.mode = 'ExclusiveLock'";
}

/// What stands for the key, and for this request under it, among the advisory locks.
fn locks(claim: &Claiming) -> (i64, i64) {
    let number = |parts: &[&[u8]]| {
        let digest = digest(b"sqlock/idem/lock/1", parts.iter().copied());
        i64::from_be_bytes(std::array::from_fn(|i| digest[i]))
    };
    (number(&[claim.key.id.as_bytes()]), number(&[claim.key.id.as_bytes(), &claim.fingerprint]))
}

/// There may be such a table in several schemas of a database, whose advisory locks are the same.
const HERE: &str = " # 'sqlock_idem'::regclass::oid::bigint";

/// Who holds the first lock always holds the second one, too.
fn push_locks(query: &mut QueryBuilder<Postgres>, claim: &Claiming) {
    let (key, request) = locks(claim);
    query.push("CASE WHEN pg_try_advisory_xact_lock_shared(").push_bind(request).push(HERE);
    query.push(") THEN pg_try_advisory_xact_lock(").push_bind(key).push(HERE).push(") ELSE false END");
}

impl Records for Postgres {
    const NOW: &'static str = now!();
    const INSERT_NEW: (&'static str, &'static str) = ("INSERT INTO ", " ON CONFLICT DO NOTHING");
    const SKIPPING: &'static str = " FOR UPDATE SKIP LOCKED";
    const SKIPS_IN_DELETE: bool = true;
    const IDENTITY: &'static str = "SELECT concat_ws('/', oid, to_regclass('sqlock_idem')::oid) FROM pg_database
                                     WHERE datname = current_database()";
    const STEP: &'static str = "step";
    const PEEKS: bool = false;

    as_usual!();

    fn claim<'a>(conn: &'a mut PgConnection, claim: &'a Claiming) -> StoreFuture<'a, Claimed> {
        Box::pin(async move {
            let mut query = QueryBuilder::new("");
            if claim.issued {
                push_consume::<Self>(&mut query, claim, State::Done, 0);
                query.push(" AND ");
                push_locks(&mut query, claim);
            } else {
                query.push("INSERT INTO ").push(INTO).push(" SELECT ");
                push_values::<Self>(&mut query, claim, State::Done, 0);
                query.push(" WHERE ");
                push_locks(&mut query, claim);
                push_or_anew::<Self>(&mut query);
            }
            let claimed = query.build().execute(conn).await?.rows_affected();
            Ok(if claimed > 0 { Claimed::Ours } else { Claimed::Not })
        })
    }

    fn rival<'a>(conn: &'a mut PgConnection, claim: &'a Claiming) -> StoreFuture<'a, Option<Rival>> {
        Box::pin(async move {
            let (key, request) = locks(claim);
            let found = sqlx::query(sql::RIVAL).bind(key).bind(request).fetch_optional(conn).await?;
            found.map(|row| Ok(Rival { who: row.try_get(0)?, same: row.try_get::<i64, _>(1)? > 0 })).transpose()
        })
    }
}

impl PostgresStore {
    pub(super) async fn carry(&mut self, errand: &Errand) -> Result<Findings, sqlx::Error> {
        let connection = self.connection.connection().await?;
        self.settings.begin(connection).await?;
        let found = carry::<Postgres>(connection, errand).await;
        self.settings.end(connection, found.is_ok()).await?;
        found
    }
}
