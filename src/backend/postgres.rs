//! PostgreSQL: rows are taken with SKIP LOCKED, in autocommit, at READ COMMITTED, by the clock that goes on.
//!
//! Each verb has a short form for a batch of one, whose plan PostgreSQL keeps, and a form with arrays for more.
//! No session state is set anywhere, so it all works behind a pooler that changes the server between transactions.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use sqlx::postgres::{PgArguments, PgConnectOptions, PgPoolOptions, PgRow};
use sqlx::{ConnectOptions, Connection, Executor, PgConnection, PgPool, Postgres, Row as _};

use super::sealed::{Check, Fence, Verdict};
use super::{Backend, Claim, HandOff, Job, Kind, Release, Renewal, Row, Session};
use super::{found, in_order, micros, token};
use crate::error::Result;
use crate::name::LockName;
use crate::schema;
use crate::token::FencingToken;

/// The statements, laid out to be read.
#[rustfmt::skip]
mod sql {
use super::super::row_columns;

/// Microseconds since the epoch. now() would be the start of the transaction: stale by all the time waited.
macro_rules! now {
    () => {
        "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    };
}

// $1 name, $2 owner, $3 hold, $4 holder, $5 label, $6 ttl.
// The rows are locked first and written second, so that the clock is read when nothing is waited for any more. SKIP LOCKED
// meets two locks: another client about to take the same name, and the fence of somebody's open transaction.
pub(super) const ACQUIRE: &str = concat!("
WITH free AS MATERIALIZED (
    SELECT l.name, CASE WHEN l.holds = $3 THEN l.token ELSE greatest(l.token + 1, f.token + 1, ", now!(), ") END AS token
      FROM sqlock_fence AS f JOIN sqlock_lease AS l ON l.name = f.name
     WHERE f.name = $1
       AND (l.holds = '' OR l.expires_at <= ", now!(), "
            OR l.holds = $3)                      -- our own, sent again because the reply was lost
       FOR UPDATE SKIP LOCKED),
fence AS (
    UPDATE sqlock_fence AS f SET token = free.token FROM free WHERE f.name = free.name)
UPDATE sqlock_lease AS l
   SET owner = $2, holds = $3, holder = $4, label = $5, token = free.token,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + $6
  FROM free
 WHERE l.name = free.name
RETURNING l.name, l.token");

// As above; only for names that have no rows yet. DO NOTHING writes nothing, not even a transaction id, when there are.
pub(super) const CREATE: &str = concat!("
WITH fence AS (
    INSERT INTO sqlock_fence (name, token) VALUES ($1, ", now!(), ")
        ON CONFLICT (name) DO NOTHING
    RETURNING name, token)
INSERT INTO sqlock_lease (name, owner, holds, holder, label, token, acquired_at, expires_at)
SELECT name, $2, $3, $4, $5, token, ", now!(), ", ", now!(), " + $6 FROM fence
RETURNING name, token");

pub(super) const ACQUIRE_MANY: &str = concat!("
WITH claim AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bigint[])
                  AS c (name, owner, hold, holder, label, ttl)),
free AS MATERIALIZED (
    SELECT l.name, claim.owner, claim.hold, claim.holder, claim.label, claim.ttl,
           CASE WHEN l.holds = claim.hold THEN l.token ELSE greatest(l.token + 1, f.token + 1, ", now!(), ") END AS token
      FROM claim JOIN sqlock_fence AS f ON f.name = claim.name JOIN sqlock_lease AS l ON l.name = claim.name
     WHERE l.holds = '' OR l.expires_at <= ", now!(), " OR l.holds = claim.hold
       FOR UPDATE OF f, l SKIP LOCKED),
fence AS (
    UPDATE sqlock_fence AS f SET token = free.token FROM free WHERE f.name = free.name)
UPDATE sqlock_lease AS l
   SET owner = free.owner, holds = free.hold, holder = free.holder, label = free.label, token = free.token,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + free.ttl
  FROM free
 WHERE l.name = free.name
RETURNING l.name, l.token");

// In order of names, so that two clients that create the same names wait for each other in one direction only.
pub(super) const CREATE_MANY: &str = concat!("
WITH claim AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bigint[])
                  AS c (name, owner, hold, holder, label, ttl)),
fence AS (
    INSERT INTO sqlock_fence (name, token) SELECT name, ", now!(), " FROM claim ORDER BY name
        ON CONFLICT (name) DO NOTHING
    RETURNING name, token)
INSERT INTO sqlock_lease (name, owner, holds, holder, label, token, acquired_at, expires_at)
SELECT fence.name, owner, hold, holder, label, fence.token, ", now!(), ", ", now!(), " + ttl
  FROM fence JOIN claim ON claim.name = fence.name
RETURNING name, token");

// $1 name, $2 owner, $3 hold, $4 ttl.
pub(super) const JOIN: &str = concat!("
UPDATE sqlock_lease
   SET holds = CASE WHEN position($3 IN holds) > 0 THEN holds ELSE holds || $3 END,
       expires_at = greatest(expires_at, ", now!(), " + $4)
 WHERE name = $1 AND owner = $2 AND holds NOT IN ('', '-') AND expires_at > ", now!(), "
RETURNING name, token");

// $1 name, $2 owner, $3 hold, $4 token, $5 ttl. With other holds of the same owner beside it, the latest expiry counts.
pub(super) const RENEW: &str = concat!("
UPDATE sqlock_lease
   SET expires_at = greatest(CASE WHEN holds = $3 THEN 0 ELSE expires_at END, ", now!(), " + $5)
 WHERE name = $1 AND owner = $2 AND token = $4 AND position($3 IN holds) > 0");

pub(super) const RENEW_MANY: &str = concat!("
UPDATE sqlock_lease AS l
   SET expires_at = greatest(CASE WHEN l.holds = r.hold THEN 0 ELSE l.expires_at END, ", now!(), " + r.ttl)
  FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[]) AS r (name, owner, hold, token, ttl)
 WHERE l.name = r.name AND l.owner = r.owner AND l.token = r.token AND position(r.hold IN l.holds) > 0
RETURNING l.name");

// $1 name, $2 owner, $3 hold, $4 token or 0 for any, $5 hold_at_least.
// The commit does not wait for the disk: a release that a crash undoes leaves the name to its TTL, and any later grant
// is flushed together with it. set_config(…, true) ends with this statement's transaction.
// https://www.postgresql.org/docs/current/wal-async-commit.html
pub(super) const RELEASE: &str = concat!("
UPDATE sqlock_lease
   SET expires_at = CASE WHEN holds <> $3 THEN expires_at
                         ELSE greatest(", now!(), ", least(acquired_at, ", now!(), ") + $5) END,
       holds = CASE WHEN holds = $3 AND least(acquired_at, ", now!(), ") + $5 > ", now!(), " THEN '-'
                    ELSE replace(holds, $3, '') END
 WHERE name = $1 AND owner = $2 AND ($4 = 0 OR token = $4) AND position($3 IN holds) > 0
   AND set_config('synchronous_commit', 'off', true) IS NOT NULL");

pub(super) const RELEASE_MANY: &str = concat!("
UPDATE sqlock_lease AS l
   SET expires_at = CASE WHEN l.holds <> r.hold THEN l.expires_at
                         ELSE greatest(", now!(), ", least(l.acquired_at, ", now!(), ") + r.least) END,
       holds = CASE WHEN l.holds = r.hold AND least(l.acquired_at, ", now!(), ") + r.least > ", now!(), " THEN '-'
                    ELSE replace(l.holds, r.hold, '') END
  FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[], $5::bigint[]) AS r (name, owner, hold, token, least)
 WHERE l.name = r.name AND l.owner = r.owner AND (r.token = 0 OR l.token = r.token) AND position(r.hold IN l.holds) > 0
   AND set_config('synchronous_commit', 'off', true) IS NOT NULL
RETURNING l.name");

// $1 name, $2 owner, $3 hold, $4 token; the next holder: $5 owner, $6 hold, $7 holder, $8 label, $9 ttl.
pub(super) const HAND_OFF: &str = concat!("
WITH mine AS MATERIALIZED (
    SELECT l.name, CASE WHEN l.holds = $6 THEN l.token ELSE greatest(l.token + 1, f.token + 1, ", now!(), ") END AS token
      FROM sqlock_fence AS f JOIN sqlock_lease AS l ON l.name = f.name
     WHERE f.name = $1
       AND (l.owner = $2 AND l.holds = $3 AND l.token = $4
            OR l.holds = $6)                      -- done already, the reply was lost
       FOR UPDATE SKIP LOCKED),
fence AS (
    UPDATE sqlock_fence AS f SET token = mine.token FROM mine WHERE f.name = mine.name)
UPDATE sqlock_lease AS l
   SET owner = $5, holds = $6, holder = $7, label = $8, token = mine.token,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + $9
  FROM mine
 WHERE l.name = mine.name
RETURNING l.name, l.token");

// The same with arrays, in the same order.
pub(super) const HAND_OFF_MANY: &str = concat!("
WITH pass AS MATERIALIZED (
    SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::bigint[],
                         $5::text[], $6::text[], $7::text[], $8::text[], $9::bigint[])
                  AS p (name, owner, hold, token, next_owner, next_hold, holder, label, ttl)),
mine AS MATERIALIZED (
    SELECT l.name, p.next_owner, p.next_hold, p.holder, p.label, p.ttl,
           CASE WHEN l.holds = p.next_hold THEN l.token ELSE greatest(l.token + 1, f.token + 1, ", now!(), ") END AS token
      FROM pass AS p JOIN sqlock_fence AS f ON f.name = p.name JOIN sqlock_lease AS l ON l.name = p.name
     WHERE l.owner = p.owner AND l.holds = p.hold AND l.token = p.token OR l.holds = p.next_hold
       FOR UPDATE OF f, l SKIP LOCKED),
fence AS (
    UPDATE sqlock_fence AS f SET token = mine.token FROM mine WHERE f.name = mine.name)
UPDATE sqlock_lease AS l
   SET owner = mine.next_owner, holds = mine.next_hold, holder = mine.holder, label = mine.label, token = mine.token,
       acquired_at = ", now!(), ", expires_at = ", now!(), " + mine.ttl
  FROM mine
 WHERE l.name = mine.name
RETURNING l.name, l.token");

// $1 names
pub(super) const LOOK: &str = concat!("
SELECT ", row_columns!(), ", ", now!(), " FROM sqlock_lease WHERE name = ANY($1)");

// $1 prefix
pub(super) const LIST: &str = concat!("
SELECT ", row_columns!(), ", ", now!(), " FROM sqlock_lease
 WHERE starts_with(name, $1) AND holds <> '' AND expires_at > ", now!(), " ORDER BY name");

// $1 name, $2 token. The evicted holder's next fence fails; one that is open now ends in peace.
pub(super) const EVICT: &str = concat!("
WITH evicted AS (
    UPDATE sqlock_lease SET owner = '', holds = '', expires_at = ", now!(), "
     WHERE name = $1 AND token = $2 AND holds <> ''
    RETURNING name),
unfenced AS MATERIALIZED (
    SELECT name FROM sqlock_fence WHERE name = $1 AND token = $2 FOR UPDATE SKIP LOCKED),
fence AS (
    UPDATE sqlock_fence AS f SET token = f.token + 1 FROM unfenced AS u, evicted AS e WHERE f.name = u.name)
SELECT name FROM evicted");

// $1 retention, $2 limit. FOR UPDATE checks the condition again once it has the rows, and from then on nobody changes
// them: a row that was taken in between is not deleted.
pub(super) const SWEEP: &str = concat!("
WITH stale AS MATERIALIZED (
    SELECT l.name FROM sqlock_lease AS l JOIN sqlock_fence AS f ON f.name = l.name
     WHERE l.expires_at < ", now!(), " - $1 AND l.token < ", now!(), " - $1
     LIMIT $2 FOR UPDATE SKIP LOCKED),
fence AS (
    DELETE FROM sqlock_fence AS f USING stale WHERE f.name = stale.name)
DELETE FROM sqlock_lease AS l USING stale WHERE l.name = stale.name");

// $1 name, $2 owner, $3 hold. FOR SHARE keeps the row until the transaction ends: a takeover skips it, other fences of
// the same holding share it. The token comes from the row as it is once it is locked.
// https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS
pub(super) const FENCE: &str = "
SELECT f.token, l.owner = $2 AND position($3 IN l.holds) > 0
  FROM sqlock_fence AS f JOIN sqlock_lease AS l ON l.name = f.name
 WHERE f.name = $1
   FOR SHARE OF f";
}

/// The backend on connections made like those of the caller's pool.
pub(crate) struct PostgresBackend {
    options: Arc<PgConnectOptions>,
}

impl PostgresBackend {
    pub(crate) fn new(pool: &PgPool) -> Self {
        Self { options: pool.connect_options() }
    }
}

impl Backend for PostgresBackend {
    fn connect(&self) -> Job<'_, Box<dyn Session>> {
        Box::pin(async move {
            let mut conn = (*self.options).clone().disable_statement_logging().connect().await?;
            let (isolation, commit, read_only): (String, String, String) = sqlx::query_as(
                "SELECT current_setting('default_transaction_isolation'), current_setting('synchronous_commit'),
                        current_setting('default_transaction_read_only')",
            )
            .fetch_one(&mut conn)
            .await?;
            let transaction = if isolation == "read committed" && commit != "off" && read_only == "off" {
                InTransaction::No
            } else {
                InTransaction::Yes
            };
            Ok(Box::new(PostgresSession { conn, transaction }) as Box<dyn Session>)
        })
    }

    fn useful_connections(&self) -> usize {
        usize::MAX
    }

    fn migrate(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(async move {
            let one = PgPoolOptions::new()
                .max_connections(1)
                .connect_with((*self.options).clone())
                .await
                .map_err(schema::unconnected)?;
            let migrated = schema::migrate(&one, schema::POSTGRES).await;
            one.close().await;
            migrated
        })
    }
}

/// Whether the verbs need a transaction around them. Where the database or the user has other defaults than ours
/// (REPEATABLE READ would end nine of ten attempts on a hot name in 40001; asynchronous commit would lose grants in a
/// crash), each verb says what it needs for itself alone: a SET for the session would leak through a pooler.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InTransaction {
    No,
    Yes,
}

struct PostgresSession {
    conn: PgConnection,
    transaction: InTransaction,
}

type PgQuery<'q> = sqlx::query::Query<'q, Postgres, PgArguments>;

impl PostgresSession {
    async fn rows(&mut self, query: PgQuery<'_>) -> Result<Vec<PgRow>, sqlx::Error> {
        if self.transaction == InTransaction::No {
            return query.fetch_all(&mut self.conn).await;
        }
        self.conn.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL synchronous_commit = on").await?;
        let rows = query.fetch_all(&mut self.conn).await;
        let end = if rows.is_ok() { "COMMIT" } else { "ROLLBACK" };
        self.conn.execute(end).await?;
        rows
    }

    async fn execute(&mut self, query: PgQuery<'_>) -> Result<u64, sqlx::Error> {
        if self.transaction == InTransaction::No {
            return Ok(query.execute(&mut self.conn).await?.rows_affected());
        }
        self.conn.execute("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL synchronous_commit = on").await?;
        let done = query.execute(&mut self.conn).await;
        let end = if done.is_ok() { "COMMIT" } else { "ROLLBACK" };
        self.conn.execute(end).await?;
        Ok(done?.rows_affected())
    }

    async fn claim(
        &mut self,
        one: &'static str,
        many: &'static str,
        claims: &[Claim],
    ) -> Result<Vec<Option<FencingToken>>, sqlx::Error> {
        let rows = match claims {
            [c] => self.rows(bind_claim(sqlx::query(one).bind(c.name.as_str()), c)).await?,
            _ => {
                let query = sqlx::query(many).bind(claims.iter().map(|c| c.name.as_str()).collect::<Vec<_>>());
                self.rows(bind_claims(query, claims.iter())).await?
            }
        };
        Ok(in_order(claims, |c| &c.name, granted(rows)))
    }
}

fn granted(rows: Vec<PgRow>) -> impl Iterator<Item = (String, FencingToken)> {
    rows.into_iter().filter_map(|row| Some((row.get(0), token(row.get(1))?)))
}

/// Binds what a new holder brings along: owner, hold, holder, label, ttl.
fn bind_claim<'q>(query: PgQuery<'q>, c: &'q Claim) -> PgQuery<'q> {
    query.bind(c.owner.to_string()).bind(c.hold.mark()).bind(&*c.holder).bind(&*c.label).bind(micros(c.ttl))
}

/// The same for many, as arrays.
fn bind_claims<'q>(query: PgQuery<'q>, claims: impl Iterator<Item = &'q Claim> + Clone) -> PgQuery<'q> {
    query
        .bind(claims.clone().map(|c| c.owner.to_string()).collect::<Vec<_>>())
        .bind(claims.clone().map(|c| c.hold.mark()).collect::<Vec<_>>())
        .bind(claims.clone().map(|c| &*c.holder).collect::<Vec<_>>())
        .bind(claims.clone().map(|c| &*c.label).collect::<Vec<_>>())
        .bind(claims.map(|c| micros(c.ttl)).collect::<Vec<_>>())
}

impl Session for PostgresSession {
    fn acquire<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            let mut granted = self.claim(sql::ACQUIRE, sql::ACQUIRE_MANY, claims).await?;
            let (missed, missing): (Vec<usize>, Vec<Claim>) = granted
                .iter()
                .enumerate()
                .filter(|(_, granted)| granted.is_none())
                .map(|(i, _)| (i, claims[i].clone()))
                .unzip();
            if !missing.is_empty() {
                let created = self.claim(sql::CREATE, sql::CREATE_MANY, &missing).await?;
                for (i, created) in missed.into_iter().zip(created) {
                    granted[i] = created;
                }
            }
            Ok(granted)
        })
    }

    fn join<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            let mut joined = Vec::with_capacity(claims.len());
            for c in claims {
                let query = sqlx::query(sql::JOIN)
                    .bind(c.name.as_str())
                    .bind(c.owner.to_string())
                    .bind(c.hold.mark())
                    .bind(micros(c.ttl));
                let row = self.rows(query).await?;
                joined.push(granted(row).next().map(|(_, token)| token));
            }
            Ok(joined)
        })
    }

    fn renew<'a>(&'a mut self, renewals: &'a [Renewal]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            if let [Renewal { holding: h, ttl }] = renewals {
                let query = sqlx::query(sql::RENEW)
                    .bind(h.name.as_str())
                    .bind(h.owner.to_string())
                    .bind(h.hold.mark())
                    .bind(h.token.get())
                    .bind(micros(*ttl));
                return Ok(vec![self.execute(query).await? > 0]);
            }
            let all = || renewals.iter().map(|r| &r.holding);
            let query = sqlx::query(sql::RENEW_MANY)
                .bind(all().map(|h| h.name.as_str()).collect::<Vec<_>>())
                .bind(all().map(|h| h.owner.to_string()).collect::<Vec<_>>())
                .bind(all().map(|h| h.hold.mark()).collect::<Vec<_>>())
                .bind(all().map(|h| h.token.get()).collect::<Vec<_>>())
                .bind(renewals.iter().map(|r| micros(r.ttl)).collect::<Vec<_>>());
            let rows = self.rows(query).await?;
            Ok(found(in_order(renewals, |r| &r.holding.name, named(rows))))
        })
    }

    fn release<'a>(&'a mut self, releases: &'a [Release]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let token = |r: &Release| r.token.map_or(0, FencingToken::get);
            if let [r] = releases {
                let query = sqlx::query(sql::RELEASE)
                    .bind(r.name.as_str())
                    .bind(r.owner.to_string())
                    .bind(r.hold.mark())
                    .bind(token(r))
                    .bind(micros(r.hold_at_least));
                return Ok(vec![self.execute(query).await? > 0]);
            }
            let query = sqlx::query(sql::RELEASE_MANY)
                .bind(releases.iter().map(|r| r.name.as_str()).collect::<Vec<_>>())
                .bind(releases.iter().map(|r| r.owner.to_string()).collect::<Vec<_>>())
                .bind(releases.iter().map(|r| r.hold.mark()).collect::<Vec<_>>())
                .bind(releases.iter().map(token).collect::<Vec<_>>())
                .bind(releases.iter().map(|r| micros(r.hold_at_least)).collect::<Vec<_>>());
            let rows = self.rows(query).await?;
            Ok(found(in_order(releases, |r| &r.name, named(rows))))
        })
    }

    fn hand_off<'a>(&'a mut self, hand_offs: &'a [HandOff]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            let rows = match hand_offs {
                [HandOff { from, to }] => {
                    let query = sqlx::query(sql::HAND_OFF)
                        .bind(from.name.as_str())
                        .bind(from.owner.to_string())
                        .bind(from.hold.mark())
                        .bind(from.token.get());
                    self.rows(bind_claim(query, to)).await?
                }
                _ => {
                    let from = || hand_offs.iter().map(|h| &h.from);
                    let query = sqlx::query(sql::HAND_OFF_MANY)
                        .bind(from().map(|h| h.name.as_str()).collect::<Vec<_>>())
                        .bind(from().map(|h| h.owner.to_string()).collect::<Vec<_>>())
                        .bind(from().map(|h| h.hold.mark()).collect::<Vec<_>>())
                        .bind(from().map(|h| h.token.get()).collect::<Vec<_>>());
                    self.rows(bind_claims(query, hand_offs.iter().map(|h| &h.to))).await?
                }
            };
            Ok(in_order(hand_offs, |h| &h.from.name, granted(rows)))
        })
    }

    fn look<'a>(&'a mut self, names: &'a [LockName]) -> Job<'a, Vec<Row>> {
        Box::pin(async move {
            let names: Vec<&str> = names.iter().map(LockName::as_str).collect();
            let rows = self.rows(sqlx::query(sql::LOOK).bind(names)).await?;
            Ok(rows.iter().map(row).collect())
        })
    }

    fn list<'a>(&'a mut self, prefix: &'a str) -> Job<'a, Vec<Row>> {
        Box::pin(async move {
            let rows = self.rows(sqlx::query(sql::LIST).bind(prefix)).await?;
            Ok(rows.iter().map(row).collect())
        })
    }

    fn evict<'a>(&'a mut self, name: &'a LockName, token: FencingToken) -> Job<'a, bool> {
        Box::pin(async move {
            let evicted = self.rows(sqlx::query(sql::EVICT).bind(name.as_str()).bind(token.get())).await?;
            Ok(!evicted.is_empty())
        })
    }

    fn sweep(&mut self, retention: Duration, limit: u32) -> Job<'_, u64> {
        Box::pin(self.execute(sqlx::query(sql::SWEEP).bind(micros(retention)).bind(i64::from(limit))))
    }

    fn close(self: Box<Self>) -> Job<'static, ()> {
        Box::pin(self.conn.close())
    }
}

fn named(rows: Vec<PgRow>) -> impl Iterator<Item = (String, ())> {
    rows.into_iter().map(|row| (row.get(0), ()))
}

fn row(row: &PgRow) -> Row {
    Row {
        name: row.get(0),
        owner: row.get(1),
        holds: row.get(2),
        token: row.get(3),
        holder: row.get(4),
        label: row.get(5),
        acquired_at: row.get(6),
        expires_at: row.get(7),
        now: row.get(8),
    }
}

impl super::Database for Postgres {}

impl Fence for Postgres {
    const KIND: Kind = Kind::Postgres;

    fn fence<'a>(
        conn: &'a mut PgConnection,
        check: &'a Check,
    ) -> Pin<Box<dyn Future<Output = Result<Verdict, sqlx::Error>> + Send + 'a>> {
        Box::pin(async move {
            let row = sqlx::query_as::<_, (i64, bool)>(sql::FENCE)
                .bind(&check.name)
                .bind(&check.owner)
                .bind(&check.mark)
                .fetch_optional(&mut *conn)
                .await;
            match row {
                Ok(Some((token, held))) if token == check.token && held => Ok(Verdict::Fenced),
                Ok(Some(_)) => Ok(Verdict::Superseded),
                // The row changed after the snapshot of a REPEATABLE READ or SERIALIZABLE transaction was taken.
                Err(sqlx::Error::Database(e)) if e.code().as_deref() == Some("40001") => Ok(Verdict::StaleSnapshot),
                Err(error) => Err(error),
                // No row at all: purged, unless the snapshot is older than the row.
                Ok(None) => {
                    let isolation: String =
                        sqlx::query_scalar("SELECT current_setting('transaction_isolation')").fetch_one(conn).await?;
                    let sees_the_present = matches!(&*isolation, "read committed" | "read uncommitted");
                    Ok(if sees_the_present { Verdict::Superseded } else { Verdict::StaleSnapshot })
                }
            }
        })
    }
}
