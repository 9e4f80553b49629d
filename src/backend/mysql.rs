//! MySQL and MariaDB: conditional updates of rows that stay, at READ COMMITTED, with the token in the OK packet.
//!
//! InnoDB has no UPDATE … SKIP LOCKED, but a derived table may lock its rows that way and be joined to the update: one
//! statement that takes a name or leaves it, and never waits for the fence of somebody's open transaction.
//! A row is inserted only when a plain SELECT has shown that it is missing, and never deleted by a release: inserts that
//! meet deletes on one key are what InnoDB answers with deadlocks.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use sqlx::migrate::MigrateError;
use sqlx::mysql::{
    MySqlArguments, MySqlConnectOptions, MySqlDatabaseError, MySqlPoolOptions, MySqlQueryResult, MySqlRow,
};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Executor, MySql, MySqlConnection, MySqlPool, Row as _};

use super::sealed::{Check, Fence, Verdict};
use super::{Backend, Claim, HandOff, Job, Kind, Release, Renewal, Row, Session, Standing};
use super::{matched, micros, token};
use crate::error::{Error, Result};
use crate::name::LockName;
use crate::owner::{Hold, Owner};
use crate::schema;
use crate::token::FencingToken;

/// The statements, laid out to be read.
#[rustfmt::skip]
mod sql {
use super::super::row_columns;

/// Microseconds since the epoch; the session's time zone is UTC. SYSDATE is read when the row is locked, NOW and
/// UTC_TIMESTAMP when the statement began.
/// <https://dev.mysql.com/doc/refman/8.4/en/date-and-time-functions.html#function_sysdate>
macro_rules! now {
    () => {
        "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)"
    };
}

/// One claim a line: hex of name, owner, hold, ttl, holder, label. Names travel as hex because they are bytes; texts have
/// their character set named, since MariaDB would take the database's. The lines stand in a derived table of their own,
/// since MySQL refuses to lock a JSON_TABLE together with the tables that it is joined to (3569).
macro_rules! claims {
    () => {
        "(SELECT * FROM JSON_TABLE(?, '$[*]' COLUMNS (
             name   VARCHAR(510) PATH '$[0]', owner VARCHAR(32) PATH '$[1]', hold VARCHAR(40) PATH '$[2]',
             ttl    BIGINT       PATH '$[3]',
             holder VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[4]',
             label  VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[5]')) AS j LIMIT 100000) AS c"
    };
}

/// One holding a line: hex of name, owner, hold, token, microseconds (ttl, or hold_at_least).
macro_rules! holdings {
    () => {
        "JSON_TABLE(?, '$[*]' COLUMNS (
             name  VARCHAR(510) PATH '$[0]', owner VARCHAR(32) PATH '$[1]', hold VARCHAR(40) PATH '$[2]',
             token BIGINT       PATH '$[3]', time  BIGINT      PATH '$[4]')) AS r"
    };
}

// Bind order: hold, name, hold, owner, hold, holder, label, ttl.
// The derived table locks the fence row and the lease row, or finds them locked and is empty. LIMIT keeps MySQL from
// merging it into the update, which would lose SKIP LOCKED and compute the token twice. The order of the joins is the
// order of the locks, fence row first: in different orders two claims could each skip what the other has locked.
// https://dev.mysql.com/doc/refman/8.4/en/derived-table-optimization.html
pub(super) const ACQUIRE: &str = concat!("
UPDATE (SELECT s.name, IF(s.holds = ?, s.token, GREATEST(s.token + 1, g.token + 1, ", now!(), ")) AS token
          FROM sqlock_fence AS g STRAIGHT_JOIN sqlock_lease AS s ON s.name = g.name
         WHERE g.name = ?
           AND (s.holds = '' OR s.expires_at <= ", now!(), "
                OR s.holds = ?)                   -- our own, sent again because the reply was lost
         LIMIT 1 FOR UPDATE SKIP LOCKED) AS q
  STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name STRAIGHT_JOIN sqlock_fence AS f ON f.name = q.name
   SET l.owner = ?, l.holds = ?, l.holder = ?, l.label = ?,
       l.token = LAST_INSERT_ID(q.token), f.token = q.token,
       l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + ?");

pub(super) const ACQUIRE_MANY: &str = concat!("
UPDATE (SELECT STRAIGHT_JOIN s.name, c.owner, c.hold, c.holder, c.label, c.ttl,
               IF(s.holds = c.hold, s.token, GREATEST(s.token + 1, g.token + 1, ", now!(), ")) AS token
          FROM ", claims!(), "
          JOIN sqlock_fence AS g ON g.name = UNHEX(c.name)
          JOIN sqlock_lease AS s ON s.name = g.name
         WHERE s.holds = '' OR s.expires_at <= ", now!(), " OR s.holds = c.hold
         LIMIT 100000 FOR UPDATE SKIP LOCKED) AS q
  STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name STRAIGHT_JOIN sqlock_fence AS f ON f.name = q.name
   SET l.owner = q.owner, l.holds = q.hold, l.holder = q.holder, l.label = q.label, l.token = q.token, f.token = q.token,
       l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + q.ttl");

// A new name, first half: the fence row, whose token nobody has been granted yet. Bind order: JSON claims.
pub(super) const CREATE_FENCE: &str = concat!("
INSERT IGNORE INTO sqlock_fence (name, token)
SELECT UNHEX(c.name), ", now!(), " FROM ", claims!(), " ORDER BY 1");

// Second half: whoever inserts the lease row is granted the fence row's token. The fence row is locked meanwhile: read
// from a snapshot, it could be one that a sweep is deleting, whose token somebody has had. Bind order: JSON claims.
pub(super) const CREATE_LEASE: &str = concat!("
INSERT IGNORE INTO sqlock_lease (name, owner, holds, token, holder, label, acquired_at, expires_at)
SELECT STRAIGHT_JOIN f.name, c.owner, c.hold, f.token, c.holder, c.label, ", now!(), ", ", now!(), " + c.ttl
  FROM ", claims!(), " JOIN sqlock_fence AS f ON f.name = UNHEX(c.name)
 ORDER BY 1 FOR UPDATE SKIP LOCKED");

// Bind order: hold, hold, ttl, name, owner. Assignments run from left to right.
pub(super) const JOIN: &str = concat!("
UPDATE sqlock_lease
   SET holds = IF(LOCATE(?, holds) > 0, holds, CONCAT(holds, ?)),
       token = LAST_INSERT_ID(token),
       expires_at = GREATEST(expires_at, ", now!(), " + ?)
 WHERE name = ? AND owner = ? AND holds NOT IN ('', '-') AND expires_at > ", now!());

// Bind order: hold, ttl, name, owner, token, hold. With other holds of the same owner beside it, the latest expiry counts.
pub(super) const RENEW: &str = concat!("
UPDATE sqlock_lease
   SET expires_at = GREATEST(IF(holds = ?, 0, expires_at), ", now!(), " + ?)
 WHERE name = ? AND owner = ? AND token = ? AND LOCATE(?, holds) > 0");

pub(super) const RENEW_MANY: &str = concat!("
UPDATE ", holdings!(), " STRAIGHT_JOIN sqlock_lease AS l ON l.name = UNHEX(r.name)
   SET l.expires_at = GREATEST(IF(l.holds = r.hold, 0, l.expires_at), ", now!(), " + r.time)
 WHERE l.owner = r.owner AND l.token = r.token AND LOCATE(r.hold, l.holds) > 0");

// Bind order: hold, hold_at_least, hold, hold_at_least, hold, name, owner, token, token, hold. expires_at goes first,
// while holds still has its old value.
pub(super) const RELEASE: &str = concat!("
UPDATE sqlock_lease
   SET expires_at = IF(holds <> ?, expires_at, GREATEST(", now!(), ", LEAST(acquired_at, ", now!(), ") + ?)),
       holds = IF(holds = ? AND LEAST(acquired_at, ", now!(), ") + ? > ", now!(), ", '-', REPLACE(holds, ?, ''))
 WHERE name = ? AND owner = ? AND (? = 0 OR token = ?) AND LOCATE(?, holds) > 0");

pub(super) const RELEASE_MANY: &str = concat!("
UPDATE ", holdings!(), " STRAIGHT_JOIN sqlock_lease AS l ON l.name = UNHEX(r.name)
   SET l.expires_at = IF(l.holds <> r.hold, l.expires_at,
                         GREATEST(", now!(), ", LEAST(l.acquired_at, ", now!(), ") + r.time)),
       l.holds = IF(l.holds = r.hold AND LEAST(l.acquired_at, ", now!(), ") + r.time > ", now!(), ", '-',
                    REPLACE(l.holds, r.hold, ''))
 WHERE l.owner = r.owner AND (r.token = 0 OR l.token = r.token) AND LOCATE(r.hold, l.holds) > 0");

// Bind order: hold', name, owner, hold, token, hold', owner', hold', holder', label', ttl' (' is the next holder).
pub(super) const HAND_OFF: &str = concat!("
UPDATE (SELECT s.name, IF(s.holds = ?, s.token, GREATEST(s.token + 1, g.token + 1, ", now!(), ")) AS token
          FROM sqlock_fence AS g STRAIGHT_JOIN sqlock_lease AS s ON s.name = g.name
         WHERE g.name = ?
           AND (s.owner = ? AND s.holds = ? AND s.token = ?
                OR s.holds = ?)                   -- done already, the reply was lost
         LIMIT 1 FOR UPDATE SKIP LOCKED) AS q
  STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name STRAIGHT_JOIN sqlock_fence AS f ON f.name = q.name
   SET l.owner = ?, l.holds = ?, l.holder = ?, l.label = ?,
       l.token = LAST_INSERT_ID(q.token), f.token = q.token,
       l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + ?");

// One hand-off a line: hex of name, owner, hold, token; the next holder's owner, hold, ttl, holder, label.
pub(super) const HAND_OFF_MANY: &str = concat!("
UPDATE (SELECT STRAIGHT_JOIN s.name, p.next_owner, p.next_hold, p.ttl, p.holder, p.label,
               IF(s.holds = p.next_hold, s.token, GREATEST(s.token + 1, g.token + 1, ", now!(), ")) AS token
          FROM (SELECT * FROM JSON_TABLE(?, '$[*]' COLUMNS (
                    name VARCHAR(510) PATH '$[0]', owner VARCHAR(32) PATH '$[1]', hold VARCHAR(40) PATH '$[2]',
                    token BIGINT PATH '$[3]', next_owner VARCHAR(32) PATH '$[4]', next_hold VARCHAR(40) PATH '$[5]',
                    ttl BIGINT PATH '$[6]', holder VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[7]',
                    label VARCHAR(255) CHARACTER SET utf8mb4 PATH '$[8]')) AS j LIMIT 100000) AS p
          JOIN sqlock_fence AS g ON g.name = UNHEX(p.name)
          JOIN sqlock_lease AS s ON s.name = g.name
         WHERE s.owner = p.owner AND s.holds = p.hold AND s.token = p.token OR s.holds = p.next_hold
         LIMIT 100000 FOR UPDATE SKIP LOCKED) AS q
  STRAIGHT_JOIN sqlock_lease AS l ON l.name = q.name STRAIGHT_JOIN sqlock_fence AS f ON f.name = q.name
   SET l.owner = q.next_owner, l.holds = q.next_hold, l.holder = q.holder, l.label = q.label,
       l.token = q.token, f.token = q.token,
       l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + q.ttl");

// Bind order: name
pub(super) const LOOK: &str = concat!("SELECT ", row_columns!(), ", ", now!(), " FROM sqlock_lease WHERE name = ?");

// Bind order: JSON names as hex
pub(super) const LOOK_MANY: &str = concat!("
SELECT STRAIGHT_JOIN ", row_columns!(), ", ", now!(), "
  FROM JSON_TABLE(?, '$[*]' COLUMNS (hex VARCHAR(510) PATH '$')) AS n
  JOIN sqlock_lease ON name = UNHEX(n.hex)");

// Bind order: prefix, prefix
pub(super) const LIST: &str = concat!("SELECT ", row_columns!(), ", ", now!(), " FROM sqlock_lease
  WHERE LEFT(name, LENGTH(?)) = ? AND holds <> '' AND expires_at > ", now!(), " ORDER BY name");

// Bind order: name, token
pub(super) const EVICT: &str = concat!("UPDATE sqlock_lease SET owner = '', holds = '', expires_at = ", now!(), "
  WHERE name = ? AND token = ? AND holds <> ''");

// The evicted holder's next fence fails; one that is open now ends in peace. Bind order: name, token.
pub(super) const EVICT_FENCE: &str = "
UPDATE sqlock_fence AS f
  JOIN (SELECT name FROM sqlock_fence WHERE name = ? AND token = ? LIMIT 1 FOR UPDATE SKIP LOCKED) AS q ON q.name = f.name
   SET f.token = f.token + 1";

// Bind order: retention, retention, limit. Reads without locking: a scan that locks would make free names look taken.
pub(super) const STALE: &str =
    concat!("SELECT name FROM sqlock_lease WHERE expires_at < ", now!(), " - ? AND token < ", now!(), " - ? LIMIT ?");

// Bind order: JSON names as hex, retention, retention. The condition is checked again once the rows are locked.
pub(super) const SWEEP: &str = concat!("
DELETE l, f
  FROM (SELECT STRAIGHT_JOIN s.name
          FROM (SELECT UNHEX(hex) AS name FROM JSON_TABLE(?, '$[*]' COLUMNS (hex VARCHAR(510) PATH '$')) AS j
                 LIMIT 100000) AS n
          JOIN sqlock_fence AS g ON g.name = n.name
          JOIN sqlock_lease AS s ON s.name = g.name
         WHERE s.expires_at < ", now!(), " - ? AND s.token < ", now!(), " - ?
         LIMIT 100000 FOR UPDATE SKIP LOCKED) AS q
  JOIN sqlock_lease AS l ON l.name = q.name
  JOIN sqlock_fence AS f ON f.name = q.name");

// Bind order: name. The outer read locks and sees the present; the inner one reads what the transaction's snapshot sees.
// Where they differ, the transaction began to read before this lease was granted.
// https://dev.mysql.com/doc/refman/8.4/en/innodb-locking-reads.html
pub(super) const FENCE: &str = "
SELECT f.token, (SELECT s.token FROM sqlock_fence AS s WHERE s.name = f.name)
  FROM sqlock_fence AS f WHERE f.name = ?
  LOCK IN SHARE MODE";
}

/// The backend on connections made like those of the caller's pool.
pub(crate) struct MySqlBackend {
    options: Arc<MySqlConnectOptions>,
}

impl MySqlBackend {
    pub(crate) fn new(pool: &MySqlPool) -> Self {
        Self { options: pool.connect_options() }
    }
}

impl Backend for MySqlBackend {
    fn connect(&self) -> Job<'_, Box<dyn Session>> {
        Box::pin(async move {
            let options = (*self.options).clone().disable_statement_logging();
            let mut conn = options.timezone(String::from("+00:00")).connect().await?;
            conn.execute(
                "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED, READ WRITE;
                 SET SESSION autocommit = 1, innodb_lock_wait_timeout = 1",
            )
            .await?;
            Ok(Box::new(MySqlSession { conn }) as Box<dyn Session>)
        })
    }

    fn useful_connections(&self) -> usize {
        usize::MAX
    }

    fn migrate(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(async move {
            let one = MySqlPoolOptions::new()
                .max_connections(1)
                .connect_with((*self.options).clone())
                .await
                .map_err(schema::unconnected)?;
            let mut migrated = schema::migrate(&one, schema::MYSQL).await;
            if let Err(Error::Migrate(MigrateError::Dirty(_))) = migrated {
                migrated = match clear_interrupted(&one).await {
                    Ok(()) => schema::migrate(&one, schema::MYSQL).await,
                    Err(error) => Err(Error::from_sqlx("migrate", error)),
                };
            }
            one.close().await;
            migrated
        })
    }
}

/// DDL commits by itself, so a migrator that was killed leaves its record marked as unsuccessful for ever. Ours can be
/// run again: take the mark away, if it is older than any migrator that still lives.
async fn clear_interrupted(one: &MySqlPool) -> Result<(), sqlx::Error> {
    sqlx::query("DELETE FROM _sqlock_migrations WHERE NOT success AND installed_on < NOW() - INTERVAL 3 SECOND")
        .execute(one)
        .await?;
    Ok(())
}

struct MySqlSession {
    conn: MySqlConnection,
}

type MySqlQuery<'q> = sqlx::query::Query<'q, MySql, MySqlArguments>;

impl MySqlSession {
    async fn execute(&mut self, query: MySqlQuery<'_>) -> Result<MySqlQueryResult, sqlx::Error> {
        query.execute(&mut self.conn).await
    }

    /// For statements that leave the new token in LAST_INSERT_ID.
    async fn granted(&mut self, query: MySqlQuery<'_>) -> Result<Option<FencingToken>, sqlx::Error> {
        let done = self.execute(query).await?;
        let id = i64::try_from(done.last_insert_id()).unwrap_or(0);
        Ok(if done.rows_affected() > 0 { token(id) } else { None })
    }

    async fn take(&mut self, claims: &[Claim]) -> Result<Vec<Option<FencingToken>>, sqlx::Error> {
        if let [c] = claims {
            let query =
                sqlx::query(sql::ACQUIRE).bind(c.hold.mark()).bind(c.name.as_str().as_bytes()).bind(c.hold.mark());
            return Ok(vec![self.granted(bind_claim(query, c)).await?]);
        }
        self.execute(sqlx::query(sql::ACQUIRE_MANY).bind(json_claims(claims))).await?;
        Ok(vec![None; claims.len()])
    }

    /// The rows of a batch of names, by name.
    async fn rows<'a>(
        &mut self,
        names: impl ExactSizeIterator<Item = &'a LockName>,
    ) -> Result<HashMap<String, Row>, sqlx::Error> {
        let mut names = names;
        let rows = if names.len() == 1 {
            let name = names.next().map(LockName::as_str).unwrap_or_default();
            sqlx::query(sql::LOOK).bind(name.as_bytes()).fetch_all(&mut self.conn).await?
        } else {
            let names = Value::from_iter(names.map(|name| hex(name.as_str())));
            sqlx::query(sql::LOOK_MANY).bind(names.to_string()).fetch_all(&mut self.conn).await?
        };
        Ok(rows.iter().map(row).map(|row| (row.name.clone(), row)).collect())
    }

    /// Gives rows to names that have none, and grants them to whoever comes first.
    async fn create(&mut self, claims: &[Claim]) -> Result<Vec<Option<FencingToken>>, sqlx::Error> {
        let json = json_claims(claims);
        self.execute(sqlx::query(sql::CREATE_FENCE).bind(&json)).await?;
        self.execute(sqlx::query(sql::CREATE_LEASE).bind(&json)).await?;
        let rows = self.rows(claims.iter().map(|c| &c.name)).await?;
        Ok(claims.iter().map(|c| granted_in(&rows, c)).collect())
    }
}

/// The token of a claim, if it is the one that stands in the row.
fn granted_in(rows: &HashMap<String, Row>, c: &Claim) -> Option<FencingToken> {
    let row = rows.get(c.name.as_str())?;
    (row.holds == c.hold.mark()).then(|| token(row.token))?
}

fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
}

fn json_claims(claims: &[Claim]) -> String {
    let lines = claims.iter().map(|c| {
        let name = hex(c.name.as_str());
        json!([name, c.owner.to_string(), c.hold.mark(), micros(c.ttl), &*c.holder, &*c.label])
    });
    Value::from_iter(lines).to_string()
}

fn json_holding(name: &LockName, owner: Owner, hold: Hold, token: Option<FencingToken>, time: Duration) -> Value {
    let token = token.map_or(0, FencingToken::get);
    json!([hex(name.as_str()), owner.to_string(), hold.mark(), token, micros(time)])
}

/// Binds what a new holder brings along: owner, hold, holder, label, ttl.
fn bind_claim<'q>(query: MySqlQuery<'q>, c: &'q Claim) -> MySqlQuery<'q> {
    query.bind(c.owner.to_string()).bind(c.hold.mark()).bind(&*c.holder).bind(&*c.label).bind(micros(c.ttl))
}

impl Session for MySqlSession {
    fn acquire<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            let mut granted = self.take(claims).await?;
            if granted.iter().all(Option::is_some) {
                return Ok(granted);
            }
            let rows = self.rows(claims.iter().map(|c| &c.name)).await?;
            let mut missing = Vec::new();
            for (granted, c) in granted.iter_mut().zip(claims) {
                *granted = granted.or_else(|| granted_in(&rows, c));
                if granted.is_none() && !rows.contains_key(c.name.as_str()) {
                    missing.push(c.clone());
                }
            }
            if missing.is_empty() {
                return Ok(granted);
            }
            let created = self.create(&missing).await?;
            let mut created: HashMap<Hold, FencingToken> =
                missing.iter().zip(created).filter_map(|(c, token)| Some((c.hold, token?))).collect();
            for (granted, c) in granted.iter_mut().zip(claims) {
                *granted = granted.or_else(|| created.remove(&c.hold));
            }
            Ok(granted)
        })
    }

    fn join<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            let mut joined = Vec::with_capacity(claims.len());
            for c in claims {
                let query = sqlx::query(sql::JOIN)
                    .bind(c.hold.mark())
                    .bind(c.hold.mark())
                    .bind(micros(c.ttl))
                    .bind(c.name.as_str().as_bytes())
                    .bind(c.owner.to_string());
                joined.push(self.granted(query).await?);
            }
            Ok(joined)
        })
    }

    fn renew<'a>(&'a mut self, renewals: &'a [Renewal]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let query = match renewals {
                [Renewal { holding: h, ttl }] => sqlx::query(sql::RENEW)
                    .bind(h.hold.mark())
                    .bind(micros(*ttl))
                    .bind(h.name.as_str().as_bytes())
                    .bind(h.owner.to_string())
                    .bind(h.token.get())
                    .bind(h.hold.mark()),
                _ => {
                    let lines = renewals
                        .iter()
                        .map(|Renewal { holding: h, ttl }| json_holding(&h.name, h.owner, h.hold, Some(h.token), *ttl));
                    sqlx::query(sql::RENEW_MANY).bind(Value::from_iter(lines).to_string())
                }
            };
            let affected = self.execute(query).await?.rows_affected();
            let batch: Vec<_> =
                renewals.iter().map(|Renewal { holding: h, .. }| (&h.name, h.owner, h.hold, Some(h.token))).collect();
            matched(self, affected, &batch, Standing::Held).await
        })
    }

    fn release<'a>(&'a mut self, releases: &'a [Release]) -> Job<'a, Vec<bool>> {
        Box::pin(async move {
            let query = match releases {
                [r] => {
                    let (mark, token) = (r.hold.mark(), r.token.map_or(0, FencingToken::get));
                    let least = micros(r.hold_at_least);
                    sqlx::query(sql::RELEASE)
                        .bind(mark.clone())
                        .bind(least)
                        .bind(mark.clone())
                        .bind(least)
                        .bind(mark.clone())
                        .bind(r.name.as_str().as_bytes())
                        .bind(r.owner.to_string())
                        .bind(token)
                        .bind(token)
                        .bind(mark)
                }
                _ => {
                    let lines =
                        releases.iter().map(|r| json_holding(&r.name, r.owner, r.hold, r.token, r.hold_at_least));
                    sqlx::query(sql::RELEASE_MANY).bind(Value::from_iter(lines).to_string())
                }
            };
            let affected = self.execute(query).await?.rows_affected();
            let batch: Vec<_> = releases.iter().map(|r| (&r.name, r.owner, r.hold, r.token)).collect();
            matched(self, affected, &batch, Standing::Released).await
        })
    }

    fn hand_off<'a>(&'a mut self, hand_offs: &'a [HandOff]) -> Job<'a, Vec<Option<FencingToken>>> {
        Box::pin(async move {
            if let [HandOff { from, to }] = hand_offs {
                let query = sqlx::query(sql::HAND_OFF)
                    .bind(to.hold.mark())
                    .bind(from.name.as_str().as_bytes())
                    .bind(from.owner.to_string())
                    .bind(from.hold.mark())
                    .bind(from.token.get())
                    .bind(to.hold.mark());
                return Ok(vec![self.granted(bind_claim(query, to)).await?]);
            }
            let lines = hand_offs.iter().map(|HandOff { from, to }| {
                let (name, token) = (hex(from.name.as_str()), from.token.get());
                let (owner, hold, ttl) = (to.owner.to_string(), to.hold.mark(), micros(to.ttl));
                json!([
                    name,
                    from.owner.to_string(),
                    from.hold.mark(),
                    token,
                    owner,
                    hold,
                    ttl,
                    &*to.holder,
                    &*to.label
                ])
            });
            self.execute(sqlx::query(sql::HAND_OFF_MANY).bind(Value::from_iter(lines).to_string())).await?;
            let rows = self.rows(hand_offs.iter().map(|h| &h.from.name)).await?;
            Ok(hand_offs.iter().map(|h| granted_in(&rows, &h.to)).collect())
        })
    }

    fn look<'a>(&'a mut self, names: &'a [LockName]) -> Job<'a, Vec<Row>> {
        Box::pin(async move { Ok(self.rows(names.iter()).await?.into_values().collect()) })
    }

    fn list<'a>(&'a mut self, prefix: &'a str) -> Job<'a, Vec<Row>> {
        Box::pin(async move {
            let query = sqlx::query(sql::LIST).bind(prefix.as_bytes()).bind(prefix.as_bytes());
            let rows = query.fetch_all(&mut self.conn).await?;
            Ok(rows.iter().map(row).collect())
        })
    }

    fn evict<'a>(&'a mut self, name: &'a LockName, token: FencingToken) -> Job<'a, bool> {
        Box::pin(async move {
            let name = name.as_str().as_bytes();
            let evicted = self.execute(sqlx::query(sql::EVICT).bind(name).bind(token.get())).await?;
            self.execute(sqlx::query(sql::EVICT_FENCE).bind(name).bind(token.get())).await?;
            Ok(evicted.rows_affected() > 0)
        })
    }

    fn sweep(&mut self, retention: Duration, limit: u32) -> Job<'_, u64> {
        Box::pin(async move {
            let age = micros(retention);
            let stale = sqlx::query(sql::STALE).bind(age).bind(age).bind(limit).fetch_all(&mut self.conn).await?;
            if stale.is_empty() {
                return Ok(0);
            }
            let names = Value::from_iter(stale.iter().map(|row| hex(&text(row.get(0)))));
            let query = sqlx::query(sql::SWEEP).bind(names.to_string()).bind(age).bind(age);
            // Two rows go with each name.
            Ok(self.execute(query).await?.rows_affected() / 2)
        })
    }

    fn close(self: Box<Self>) -> Job<'static, ()> {
        Box::pin(self.conn.close())
    }
}

/// Names are stored as the bytes of valid UTF-8.
fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

fn row(row: &MySqlRow) -> Row {
    Row {
        name: text(row.get(0)),
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

impl super::Database for MySql {}

impl Fence for MySql {
    const KIND: Kind = Kind::MySql;

    fn fence<'a>(
        conn: &'a mut MySqlConnection,
        check: &'a Check,
    ) -> Pin<Box<dyn Future<Output = Result<Verdict, sqlx::Error>> + Send + 'a>> {
        Box::pin(async move {
            // As text, not prepared: a future that is dropped while sqlx prepares leaves a connection that never answers
            // again, and with it a transaction that never ends.
            let sql = sql::FENCE.replace('?', &format!("X'{}'", hex(&check.name)));
            let row = match sqlx::raw_sql(AssertSqlSafe(sql)).fetch_optional(conn).await {
                Ok(row) => row.map(|row| (row.get::<i64, _>(0), row.get::<Option<i64>, _>(1))),
                // MariaDB with innodb_snapshot_isolation: the row has changed since the snapshot.
                Err(sqlx::Error::Database(e))
                    if e.try_downcast_ref::<MySqlDatabaseError>().is_some_and(|e| e.number() == 1020) =>
                {
                    return Ok(Verdict::StaleSnapshot);
                }
                Err(error) => return Err(error),
            };
            Ok(match row {
                Some((present, _)) if present != check.token => Verdict::Superseded,
                Some((present, seen)) if seen == Some(present) => Verdict::Fenced,
                Some(_) => Verdict::StaleSnapshot,
                None => Verdict::Superseded,
            })
        })
    }
}
