//! Carries out requests about several names in one text. Each has the same effect as alone, or
//! none.
//!
//! The UPDATE never waits. On MariaDB it fails if it meets a locked row. On MySQL it is part of a
//! transaction, which locks the rows with SKIP LOCKED first, and continues only if it has locked
//! all of them. (With NOWAIT instead, 64 concurrent tasks had about half the throughput.) The primary
//! key is forced: with the statistics of a table that was empty recently, the servers would scan the
//! whole table.

use foldhash::HashMap;
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row as _};

use super::acquire::{self, heartbeat_client};
use super::queue::poll_many;
use super::script::{Script, Sending, id_literal, list, name_literal, text_literal};
use super::store::{Flavor, Nowait, is_locked};
use crate::backend::stored::{ENTRIES, TableRow as _};
use crate::backend::{micros, token};
use crate::name::LockName;
use crate::protocol::{Batch, ChangeOutcome, Claim, Extension, Release, ReleaseOutcome, Response};

/// An UPDATE of several rows `l` of `sqlock_lease`.
macro_rules! update_leases {
    (set: [$($set:tt)*], condition: [$($condition:tt)*]) => {
        Nowait {
            mysql: concat!("
UPDATE sqlock_lease AS l FORCE INDEX (PRIMARY) SET ", $($set)*, "
 WHERE @sqlock_locked = @sqlock_meant AND ", $($condition)*),
            mariadb: concat!("SET STATEMENT innodb_lock_wait_timeout = 0 FOR
UPDATE sqlock_lease AS l FORCE INDEX (PRIMARY) SET ", $($set)*, "
 WHERE ", $($condition)*),
        }
    };
}

const START: &str = concat!("SET @sqlock_started = ", now!());

// Rows that the UPDATE will not change count as well: it locks each row before it reads the id, and
// would wait for a fence. COUNT(*) would need no column beside the key: where most rows are named, the
// server would scan the whole index then, and lock the rows of other batches for a moment. Bind
// order: names.
#[rustfmt::skip]
const LOCK: &str = concat!("
SELECT COUNT(l.id), ", now!(), " INTO @sqlock_locked, @sqlock_started
  FROM sqlock_lease AS l FORCE INDEX (PRIMARY) WHERE l.name IN (?) FOR UPDATE SKIP LOCKED");
const COUNT: &str =
    "SELECT COUNT(l.id) INTO @sqlock_meant FROM sqlock_lease AS l FORCE INDEX (PRIMARY) WHERE l.name IN (?)";

// Bind order: names.
const BEFORE: &str = "
SELECT l.name, l.id, l.token, 0 AS is_after FROM sqlock_lease AS l FORCE INDEX (PRIMARY) WHERE l.name IN (?)";

/// The rows after an UPDATE.
#[rustfmt::skip]
macro_rules! after {
    ($($column:tt)*) => {
        concat!("
SELECT l.name, l.id, l.token, ", $($column)*, ", 1 AS is_after FROM sqlock_lease AS l FORCE INDEX (PRIMARY) WHERE l.name IN (?)")
    };
}
// Bind order: names.
const CHANGED: Nowait = Nowait {
    mysql: after!("l.ttl, IF(@sqlock_locked = @sqlock_meant, l.expires_at - @sqlock_started, 0) AS lasts"),
    mariadb: after!("l.ttl, l.expires_at - @sqlock_started AS lasts"),
};

// The snapshot of an UPDATE on MariaDB is older than its locks on all rows but the first: it misses
// an entry that was added meanwhile. Bind order: names.
const RELEASED: &str = after!("ROW_COUNT() AS released, l.lost, ", is_awaited!("l"), " AS is_awaited");

// Assignments run from left to right. Bind order: what each name gets as id, owner, client, ttl,
// holder and label; names.
#[rustfmt::skip]
const ACQUIRE: Nowait = update_leases!(
    set: ["l.token = GREATEST(l.token + 1, ", now!(), "), l.id = ?, l.owner = ?, l.client = ?, l.ttl = ?, l.holder = ?, l.label = ?,
       l.acquired_at = ", now!(), ", l.expires_at = ", now!(), " + l.ttl"],
    condition: ["l.name IN (?) AND l.id = '' AND NOT ", is_awaited!("l")]);

// The identity is that of the acquisition, which holds one name. Bind order: names, ids, tokens.
#[rustfmt::skip]
const RELEASE: Nowait = update_leases!(
    set: ["l.id = '', l.owner = '', l.client = '', l.ttl = 0, l.holder = '', l.label = '', l.acquired_at = ", now!(), ", l.expires_at = 0"],
    condition: ["l.name IN (?) AND l.id IN (?) AND l.token IN (?) AND NOT ", is_awaited!("l")]);

// Bind order: what each name gets as its remaining time; names, ids, tokens.
#[rustfmt::skip]
const EXTEND: Nowait = update_leases!(
    set: ["l.expires_at = GREATEST(l.expires_at, ", now!(), " + ?)"],
    condition: ["l.name IN (?) AND l.id IN (?) AND l.token IN (?) AND ", lease_until!("l"), " > ", now!()]);

/// Carries out the requests of a batch. `None`: the request changed nothing.
pub(super) async fn execute(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    sending: Sending,
    batch: &Batch,
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    match batch {
        Batch::Acquire(claims) => acquire(conn, flavor, sending, claims).await,
        Batch::Release(releases) => release(conn, flavor, sending, releases).await,
        Batch::Extend(extensions) => extend(conn, flavor, sending, extensions).await,
        Batch::Poll(polls) => poll_many(conn, polls).await,
    }
}

/// The rows of the names.
type Rows = HashMap<Vec<u8>, MySqlRow>;

/// Returns the rows that a script reads before and after its UPDATE. `None`: it met a locked row
/// and changed nothing.
async fn run(script: Script, conn: &mut MySqlConnection, flavor: Flavor) -> Result<Option<[Rows; 2]>, sqlx::Error> {
    let read = match script.rows(conn).await {
        Err(error) if is_locked(flavor, &error) => return Ok(None),
        rows => rows?,
    };
    let [mut before, mut after] = [Rows::default(), Rows::default()];
    for row in read {
        let rows = if row.number("is_after")? == 1 { &mut after } else { &mut before };
        rows.insert(row.try_get("name")?, row);
    }
    Ok(Some([before, after]))
}

async fn acquire(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    sending: Sending,
    claims: &[Claim],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let names = &*list(claims, |claim| name_literal(&claim.name));
    let mut sorted: Vec<&Claim> = claims.iter().collect();
    sorted.sort_by_key(|claim| &claim.name);
    let by_name = |literal: fn(&Claim) -> String| {
        value_by_name(&sorted.iter().map(|claim| (&claim.name, literal(claim))).collect::<Vec<_>>())
    };
    let (id, owner) = (by_name(|claim| id_literal(claim.id)), by_name(|claim| id_literal(claim.owner)));
    let (client, ttl) =
        (by_name(|claim| id_literal(heartbeat_client(claim))), by_name(|claim| micros(claim.ttl).to_string()));
    let (holder, label) = (by_name(|claim| text_literal(&claim.holder)), by_name(|claim| text_literal(&claim.label)));
    let mut script = begin(flavor, sending, names);
    script.add(ACQUIRE.sql(flavor), &[&id, &owner, &client, &ttl, &holder, &label, names]);
    script.add(CHANGED.sql(flavor), &[names]);
    let Some([_, rows]) = run(script, conn, flavor).await? else {
        return Ok(vec![None; claims.len()]);
    };
    let mut responses = Vec::with_capacity(claims.len());
    for claim in claims {
        let response = match rows.get(claim.name.as_str().as_bytes()) {
            Some(row) if row.text("id")? == claim.id.to_string() => {
                if row.number("lasts")? >= row.number("ttl")? {
                    token(row.number("token")?).map(|token| Response::Acquired(Ok(token)))
                } else {
                    // It was granted to an earlier request.
                    Some(Response::Acquired(acquire::acquire(conn, sending, claim).await?))
                }
            }
            _ => None,
        };
        responses.push(response);
    }
    Ok(responses)
}

/// An expression for the value that belongs to the name of the row `l`. `values` are in the order
/// of their names, so the server finds one of n with log n comparisons.
fn value_by_name(values: &[(&LockName, String)]) -> String {
    fn write(sql: &mut String, values: &[(&LockName, String)]) {
        match values {
            [] => sql.push_str("NULL"),
            // A value that several names share is written once.
            [(_, first), others @ ..] if others.iter().all(|(_, other)| other == first) => sql.push_str(first),
            _ => {
                let (before, from) = values.split_at(values.len() / 2);
                sql.extend(["IF(l.name < ", &name_literal(from[0].0), ", "]);
                write(sql, before);
                sql.push_str(", ");
                write(sql, from);
                sql.push(')');
            }
        }
    }
    let mut sql = String::new();
    write(&mut sql, values);
    sql
}

async fn release(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    sending: Sending,
    releases: &[Release],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let names = &*list(releases, |release| name_literal(&release.name));
    let ids = &*list(releases, |release| id_literal(release.id));
    let tokens = &*list(releases, |release| release.token.to_string());
    let mut script = begin(flavor, sending, names);
    script.add(BEFORE, &[names]);
    script.add(RELEASE.sql(flavor), &[names, ids, tokens]);
    script.add(RELEASED, &[names]);
    let Some([before, after]) = run(script, conn, flavor).await? else {
        return Ok(vec![None; releases.len()]);
    };
    let answer = |release: &Release| {
        let (name, id, token) = (release.name.as_str().as_bytes(), release.id.to_string(), release.token.get());
        let ended = |awaited| Some(Response::Released(ReleaseOutcome::Ended { awaited }));
        let Some(before) = before.get(name) else {
            return Ok(None);
        };
        if before.text("id")? != id || before.number("token")? != token {
            return Ok(None);
        }
        let Some(after) = after.get(name) else {
            return Ok(ended(false));
        };
        // On MariaDB, an acquisition of the owner may have joined before the UPDATE, or a request to
        // downgrade was late; the holding is an entry then. And another client may have lost the name
        // since the UPDATE.
        let may_hold = [&*id, ENTRIES].contains(&&*after.text("id")?);
        let is_ended = usize::try_from(after.number("released")?) == Ok(releases.len())
            || token > after.number(if may_hold { "token" } else { "lost" })?;
        Ok(if is_ended { ended(after.number("is_awaited")? == 1) } else { None })
    };
    releases.iter().map(answer).collect()
}

async fn extend(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    sending: Sending,
    extensions: &[Extension],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let names = &*list(extensions, |extension| name_literal(&extension.name));
    let ids = &*list(extensions, |extension| id_literal(extension_id(extension)));
    let tokens = &*list(extensions, |extension| extension.token.to_string());
    let mut lasts: Vec<_> =
        extensions.iter().map(|extension| (&extension.name, micros(extension.lasts).to_string())).collect();
    lasts.sort();
    let mut script = begin(flavor, sending, names);
    script.add(EXTEND.sql(flavor), &[&value_by_name(&lasts), names, ids, tokens]);
    script.add(CHANGED.sql(flavor), &[names]);
    let Some([_, rows]) = run(script, conn, flavor).await? else {
        return Ok(vec![None; extensions.len()]);
    };
    // A holding may last long enough although the UPDATE did not change it.
    let answer = |extension: &Extension| {
        let Some(row) = rows.get(extension.name.as_str().as_bytes()) else {
            return Ok(None);
        };
        let is_held = row.text("id")? == extension_id(extension) && row.number("token")? == extension.token.get();
        let is_done = is_held && row.number("lasts")? >= micros(extension.lasts);
        Ok(is_done.then_some(Response::Extended(ChangeOutcome::Done)))
    };
    extensions.iter().map(answer).collect()
}

fn extension_id(extension: &Extension) -> String {
    extension.id.map_or_else(String::new, |id| id.to_string())
}

/// Begins the script of an [`update_leases`]. On MySQL, the rows are locked and counted first.
fn begin(flavor: Flavor, sending: Sending, names: &str) -> Script {
    match flavor {
        Flavor::MySql => {
            let mut script = Script::new(sending);
            script.add(LOCK, &[names]);
            script.add(COUNT, &[names]);
            script
        }
        Flavor::MariaDb => {
            let mut script = Script::in_autocommit(sending);
            script.add(START, &[]);
            script
        }
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use sqlx::{AssertSqlSafe, Connection as _};

    use super::*;

    /// A scan of the index locks the rows of other batches for a moment, which fail then.
    #[tokio::test]
    async fn lock_of_most_rows_scans_no_index() {
        let url = std::env::var("SQLOCK_TEST_MYSQL_URL").expect("the tests run by scripts/test");
        let mut conn = MySqlConnection::connect(&url).await.expect("a connection");
        let table = "CREATE TEMPORARY TABLE sqlock_lease (name VARBINARY(255) PRIMARY KEY, id VARCHAR(40) NOT NULL)";
        let rows = "INSERT INTO sqlock_lease VALUES ('a', ''), ('b', ''), ('c', '')";
        for sql in [table, rows] {
            sqlx::raw_sql(sql).execute(&mut conn).await.expect("a table of its own");
        }
        for statement in [LOCK, COUNT] {
            let explain = format!("EXPLAIN FORMAT=TRADITIONAL {}", statement.replace("(?)", "('a', 'b')"));
            let plan = sqlx::raw_sql(AssertSqlSafe(explain)).fetch_one(&mut conn).await.expect("a plan");
            assert_eq!(plan.text("type").expect("a text"), "range", "{statement}");
        }
    }
}
