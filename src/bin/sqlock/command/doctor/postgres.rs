//! What is asked of PostgreSQL. All of it is in views and functions that every user may read, but for the state of standbys.

use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, Error, PgConnection, Postgres};
use tokio::time::timeout;

use super::report::{Check, Report};
use super::tables::{self, Found, HISTORY, Table, is_true};
use super::{Rows, ask, brief, connect, first, in_time, round_trips, version};
use crate::url::Kind;

/// The statements, laid out to be read.
#[rustfmt::skip]
mod sql {
pub(super) const CLOCK: &str = "SELECT extract(epoch FROM clock_timestamp())";

pub(super) const SERVER: &str = "SELECT current_setting('server_version'), version()";

// https://www.postgresql.org/docs/current/functions-admin.html#FUNCTIONS-RECOVERY-CONTROL
pub(super) const ROLE: &str = "
SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only')";

// Who may not read the statistics of others sees that there is a standby, and nothing about it.
// https://www.postgresql.org/docs/current/monitoring-stats.html#MONITORING-PG-STAT-REPLICATION-VIEW
pub(super) const STANDBYS: &str = "
SELECT coalesce(nullif(application_name, ''), 'a standby'), coalesce(state, ''), coalesce(sync_state, '')
  FROM pg_stat_replication
 WHERE state IS NULL OR state <> 'backup'
 ORDER BY 1";

// Those that a server does not have are not among the rows: the name, the value in its unit, the unit.
pub(super) const SETTINGS: &str = "
SELECT name, setting, coalesce(unit, '') FROM pg_settings
 WHERE name IN ('fsync', 'synchronous_commit', 'full_page_writes', 'synchronous_standby_names',
                'default_transaction_isolation', 'statement_timeout', 'transaction_timeout',
                'idle_in_transaction_session_timeout', 'idle_session_timeout')";

pub(super) const SESSION: &str = "
SELECT pg_backend_pid(), coalesce((SELECT extract(epoch FROM clock_timestamp() - backend_start)
                                     FROM pg_stat_activity WHERE pid = pg_backend_pid()), 0)";
pub(super) const PID: &str = "SELECT pg_backend_pid()";

pub(super) const PLACE: &str = "
SELECT coalesce(current_schema(), ''),
       coalesce(has_schema_privilege(current_schema(), 'CREATE'), false)";

// to_regclass finds what the search path leads to, as every statement does, and NULL where there is nothing.
macro_rules! ours {
    () => { "(SELECT to_regclass(name)::oid FROM unnest(ARRAY[{names}]) AS n (name))" };
}
pub(super) const TABLES: &str = concat!("
SELECT c.relname, n.nspname, c.relkind, c.relpersistence,
       has_table_privilege(c.oid, 'SELECT'), has_table_privilege(c.oid, 'INSERT'), has_table_privilege(c.oid, 'UPDATE'),
       has_table_privilege(c.oid, 'DELETE'), row_security_active(c.oid)
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.oid IN ", ours!(), "
 ORDER BY 1");

// A collation that takes different texts to be equal is marked.
pub(super) const COLUMNS: &str = concat!("
SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod),
       CASE WHEN o.collisdeterministic THEN '' ELSE '!' END || o.collname, a.attnotnull, a.atthasdef
  FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
       LEFT JOIN pg_collation AS o ON o.oid = a.attcollation
 WHERE c.oid IN ", ours!());

// Those that ON CONFLICT can use: of all rows, of plain columns, checked at once, and finished.
// https://www.postgresql.org/docs/current/catalog-pg-index.html
pub(super) const INDEXES: &str = concat!("
SELECT c.relname, i.indisunique AND i.indimmediate, string_agg(a.attname, ',' ORDER BY k.n)
  FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indrelid
       CROSS JOIN unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, n)
       JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
 WHERE c.oid IN ", ours!(), "
   AND i.indisvalid AND i.indisready AND i.indpred IS NULL AND i.indexprs IS NULL AND k.n <= i.indnkeyatts
 GROUP BY i.indexrelid, 1, 2");

pub(super) const HISTORY: &str = "SELECT version, success, encode(checksum, 'hex') FROM _sqlock_migrations ORDER BY 1";
}

/// How many times two connections may meet in one session before it is believed that they do not.
const ROUNDS: usize = 3;

/// Shorter time limits of the server's than this can end what sqlock, or a fenced transaction, has not finished: replies of a
/// server that is busy take some tenths of a second.
const SHORT: Duration = Duration::from_secs(1);

/// Sessions that say nothing for this long are not to be ended: sqlock keeps connections that it seldom uses.
const SILENT: Duration = Duration::from_secs(10);

pub async fn examine(options: &PgConnectOptions, may_migrate: bool) -> Report {
    let options = options.clone().disable_statement_logging();
    let place = options.get_socket().map_or_else(
        || format!("{}:{}", options.get_host(), options.get_port()),
        |socket| socket.display().to_string(),
    );
    let database = options.get_database().map(|name| format!(", database {name}")).unwrap_or_default();
    let mut report = Report::of(format!("PostgreSQL at {place}{database}"));
    let mut conn = match connect(options.connect()).await {
        Ok(conn) => conn,
        Err(check) => {
            report.checks.push(check);
            return report;
        }
    };
    in_time(&mut report, async |report| checks(&mut conn, &options, may_migrate, report).await).await;
    let _ = timeout(SHORT, conn.close()).await;
    report
}

async fn checks(
    conn: &mut PgConnection,
    options: &PgConnectOptions,
    may_migrate: bool,
    report: &mut Report,
) -> Result<(), Error> {
    let (trip, clock) = round_trips(async || ask::<Postgres>(&mut *conn, sql::CLOCK).await).await?;
    report.add("reachable", Ok(Check::new("reachable").ok(format!("yes, a round trip takes {}", brief(trip)))))?;
    let settings = Settings(ask::<Postgres>(conn, sql::SETTINGS).await.unwrap_or_default());
    report.add("server", server(conn).await)?;
    let role = ask::<Postgres>(conn, sql::ROLE).await?;
    report.is_standby = is_true(first(&role));
    let read_only = role.first().and_then(|row| row.get(1)).is_some_and(|setting| is_true(setting));
    report.add("role", Ok(self::role(report.is_standby, read_only)))?;
    report.add("replication", replication(conn, &settings, report.is_standby).await)?;
    report.add("durability", Ok(durability(&settings)))?;
    report.add("pooler", pooler(conn, options, report.is_standby).await)?;
    report.add("clock", Ok(clock))?;

    let expected = tables::expected(Kind::Postgres);
    let about = about_tables(conn, &expected).await?;
    let missing = expected.iter().any(|table| !about.iter().any(|row| row[0] == table.name));
    let place = ask::<Postgres>(conn, sql::PLACE).await?;
    match find(conn, &expected, &about, first(&place)).await {
        Ok(found) => {
            let mut presence = tables::presence(Kind::Postgres, &expected, &found, may_migrate);
            if missing && read_only && !report.is_standby {
                let advice = "Run \"sqlock migrate\" as a user whose transactions may write by default.";
                presence = presence.fail("and cannot be created: default_transaction_read_only is on", advice);
            }
            report.add("tables", Ok(presence))?;
            let check = kinds(&about, Check::new("definitions"));
            report.add("definitions", Ok(tables::definitions(Kind::Postgres, &expected, &found.tables, check)))?;
        }
        Err(error) => report.add("tables", Err(error))?,
    }
    report.add("rights", Ok(rights(&about, missing, &place)))?;
    report.add("settings", Ok(hurtful(&settings)))
}

async fn server(conn: &mut PgConnection) -> Result<Check, Error> {
    let told = ask::<Postgres>(conn, sql::SERVER).await?;
    let check = version("PostgreSQL", first(&told), (13, 0));
    let whole = told.first().and_then(|row| row.get(1)).map_or("", String::as_str);
    Ok(match whole.starts_with("PostgreSQL") {
        true => check,
        false => check.warn(format!("it calls itself {whole}"), "sqlock is tested with PostgreSQL itself."),
    })
}

fn role(is_standby: bool, read_only: bool) -> Check {
    let check = Check::new("role");
    if is_standby {
        let advice = "Connect to the primary: nothing can be written here until it is promoted.";
        return check.fail("a standby, which only reads", advice);
    }
    if read_only {
        // Each verb asks for a transaction that may write.
        let advice = "sqlock writes all the same, with two round trips more for each verb. If it means that this server is not to \
                      be written to, connect to the other one.";
        return check.warn("a primary, with default_transaction_read_only on", advice);
    }
    check.ok("a primary")
}

async fn replication(conn: &mut PgConnection, settings: &Settings, is_standby: bool) -> Result<Check, Error> {
    let check = Check::new("replication");
    if is_standby {
        return Ok(check.unknown("this is a standby: ask the primary", ""));
    }
    let standbys = ask::<Postgres>(conn, sql::STANDBYS).await?;
    Ok(replicated(check, &standbys, settings.text("synchronous_standby_names"), settings.text("synchronous_commit")))
}

/// What becomes of grants when this server is lost. `standbys`: name, state, sync_state.
fn replicated(check: Check, standbys: &Rows, wanted: &str, commit: &str) -> Check {
    let named = |of: &[&Vec<String>]| of.iter().map(|row| row[0].clone()).collect::<Vec<_>>().join(", ");
    let all: Vec<&Vec<String>> = standbys.iter().collect();
    if wanted.is_empty() {
        if all.is_empty() {
            return check.ok("none");
        }
        let found = match all.iter().all(|row| row[2].is_empty()) {
            true => format!("asynchronous; standbys: {}", all.len()),
            false => format!("asynchronous: {}", named(&all)),
        };
        let advice = "Set synchronous_standby_names. Until then a failover loses the grants that had not arrived: two may hold a \
                      name until the next renewal. Fenced transactions and tokens protect the data.";
        return check.warn(found, advice);
    }
    let synchronous: Vec<&Vec<String>> =
        standbys.iter().filter(|row| row[1] == "streaming" && matches!(&*row[2], "sync" | "quorum")).collect();
    if synchronous.is_empty() && all.iter().any(|row| row[2].is_empty()) {
        let found =
            format!("synchronous_standby_names is {wanted}; this user may not see which of {} standbys are", all.len());
        return check.unknown(found, "GRANT pg_read_all_stats to this user to have it checked.");
    }
    if synchronous.is_empty() && commit != "local" && commit != "off" {
        let found = format!("synchronous, and no standby of synchronous_standby_names ({wanted}) is connected");
        let advice = "Every commit waits until one is: start it, or change synchronous_standby_names.";
        return check.fail(found, advice);
    }
    match commit {
        "local" => check.warn(
            format!("synchronous: {}; but synchronous_commit is local", named(&synchronous)),
            "Set synchronous_commit to on for this user: now no grant waits for the standby, and a failover loses some.",
        ),
        "remote_write" => check.ok(format!("synchronous: {}; written there, not flushed (remote_write)", named(&synchronous))),
        _ => check.ok(format!("synchronous: {}", named(&synchronous))),
    }
}

fn durability(settings: &Settings) -> Check {
    let check = Check::new("durability");
    if settings.0.is_empty() {
        return check.unknown("the server does not tell its settings", "");
    }
    let mut check = check;
    for (name, harm) in
        [("fsync", "ruin the database, or lose grants"), ("full_page_writes", "leave pages half-written")]
    {
        if settings.text(name) == "off" {
            check = check.warn(format!("{name} is off"), format!("Set {name} to on: a crash of the host can {harm}."));
        }
    }
    match settings.text("synchronous_commit") {
        "off" => check.ok("synchronous_commit is off; sqlock asks for it with each grant, at two round trips more"),
        commit => check.or_ok(format!("fsync and full_page_writes on, synchronous_commit {commit}")),
    }
}

/// Whether this connection is a session of its own, and is told what is said on a channel.
async fn pooler(conn: &mut PgConnection, options: &PgConnectOptions, is_standby: bool) -> Result<Check, Error> {
    let check = Check::new("pooler");
    let session = ask::<Postgres>(conn, sql::SESSION).await?;
    let age: f64 = session.first().and_then(|row| row.get(1)).and_then(|age| age.parse().ok()).unwrap_or(0.0);
    if !is_direct(conn, options, first(&session)).await? {
        return Ok(check.warn(
            "one for transactions: each runs in whichever session of the server is free",
            "Leases work. Who waits is not told but looks by itself, up to 10 times a second, and session locks are refused: \
             connect past the pooler for both.",
        ));
    }
    // The checks so far have taken less.
    let check = match age > (super::PATIENCE * 3).as_secs_f64() {
        true => check.warn(
            "one that hands out sessions that were there before",
            "Leases work. Session locks are refused: connect past the pooler for those.",
        ),
        false => check,
    };
    if is_standby {
        return Ok(check.or_ok("none"));
    }
    Ok(match hears(options).await {
        true => check.or_ok("none; LISTEN is heard"),
        false => check.warn(
            "what is said on a channel is not heard (LISTEN, NOTIFY)",
            "Leases work. Who waits is not told but looks by itself, up to 10 times a second.",
        ),
    })
}

/// Another connection keeps its session while ours is asked which one it is in: a pooler then gives ours another one.
async fn is_direct(conn: &mut PgConnection, options: &PgConnectOptions, pid: &str) -> Result<bool, Error> {
    let mut other = options.connect().await?;
    let mut is_direct = true;
    for _ in 0..ROUNDS {
        let its = ask::<Postgres>(&mut other, "BEGIN; SELECT pg_backend_pid()").await?;
        let ours = timeout(SHORT, ask::<Postgres>(&mut *conn, sql::PID)).await;
        ask::<Postgres>(&mut other, "ROLLBACK").await?;
        is_direct = first(&its) != pid && matches!(&ours, Ok(Ok(rows)) if first(rows) == pid);
        if !is_direct {
            break;
        }
    }
    let _ = timeout(SHORT, other.close()).await;
    Ok(is_direct)
}

/// As waiters do it, on a channel of our own, and without waiting for the disk or a standby. It is all forgotten with the
/// connection.
async fn hears(options: &PgConnectOptions) -> bool {
    let heard = async {
        let one = PgPoolOptions::new().max_connections(1).connect_with(options.clone()).await?;
        let mut listener = PgListener::connect_with(&one).await?;
        let channel = format!("sqlock_doctor_{}", std::process::id());
        listener.listen(&channel).await?;
        sqlx::query("SELECT pg_notify($1, ''), set_config('synchronous_commit', 'off', true)")
            .bind(&channel)
            .execute(&mut listener)
            .await?;
        listener.recv().await?;
        Ok::<_, Error>(())
    };
    matches!(timeout(Duration::from_secs(2), heard).await, Ok(Ok(())))
}

/// With the history, the table, its schema, its kind, whether it is logged, four rights, row-level security.
async fn about_tables(conn: &mut PgConnection, expected: &[Table]) -> Result<Rows, Error> {
    ask::<Postgres>(conn, ours(sql::TABLES, expected)).await
}

fn ours(sql: &str, expected: &[Table]) -> AssertSqlSafe<String> {
    AssertSqlSafe(sql.replace("{names}", &format!("{}, '{HISTORY}'", tables::quoted(expected))))
}

async fn find(conn: &mut PgConnection, expected: &[Table], about: &Rows, place: &str) -> Result<Found, Error> {
    let mut tables = tables::of_rows(about);
    tables::add_columns(&mut tables, &ask::<Postgres>(conn, ours(sql::COLUMNS, expected)).await?);
    tables::add_indexes(&mut tables, &ask::<Postgres>(conn, ours(sql::INDEXES, expected)).await?);
    let history = match about.iter().find(|row| row[0] == HISTORY) {
        // Without the right to read it, what the tables are like has to do.
        Some(row) if is_true(&row[4]) => Some(ask::<Postgres>(conn, sql::HISTORY).await?),
        _ => None,
    };
    // Tables may be further down the search path than new ones would be.
    let schema = about.iter().find(|row| row[0] != HISTORY).map_or(place, |row| &row[1]);
    let place = match schema {
        "" => "in any schema of the search_path".into(),
        schema => format!("in the schema {schema}"),
    };
    Ok(Found { tables, history, place })
}

/// What can be wrong with a table of PostgreSQL as a whole.
fn kinds(about: &Rows, mut check: Check) -> Check {
    for row in about {
        let name = &row[0];
        if !matches!(&*row[2], "r" | "p") {
            check = check.fail(format!("{name} is not a table"), "Rename it, or keep sqlock in a schema of its own.");
        }
        if row[3] == "u" {
            let advice = format!("ALTER TABLE {name} SET LOGGED: a crash of the server empties it.");
            check = check.warn(format!("{name} is UNLOGGED"), advice);
        }
    }
    check
}

/// has_table_privilege knows of roles, owners and superusers, which no list of grants tells.
fn rights(about: &Rows, missing: bool, place: &Rows) -> Check {
    let mut check = Check::new("rights");
    for row in about {
        let name = &row[0];
        let rights = ["SELECT", "INSERT", "UPDATE", "DELETE"].iter().zip(&row[4..8]);
        let denied: Vec<&str> = rights.filter(|(_, granted)| !is_true(granted)).map(|(right, _)| *right).collect();
        if name == HISTORY {
            if denied.contains(&"SELECT") {
                let advice =
                    format!("GRANT SELECT ON {name} to this user: \"sqlock migrate\" reads it, and nothing else does.");
                check = check.warn(format!("no SELECT on {name}"), advice);
            }
            continue;
        }
        if !denied.is_empty() {
            let advice = "GRANT SELECT, INSERT, UPDATE, DELETE on the tables of sqlock to this user.";
            check = check.fail(format!("no {} on {name}", denied.join(", ")), advice);
        }
        if is_true(&row[8]) {
            let advice = format!(
                "ALTER TABLE {name} DISABLE ROW LEVEL SECURITY: who does not see a row takes its name to be free."
            );
            check = check.fail(format!("row-level security hides rows of {name}"), advice);
        }
    }
    if missing {
        let may_create = place.first().and_then(|row| row.get(1)).is_some_and(|granted| is_true(granted));
        let schema = first(place);
        if schema.is_empty() {
            check =
                check.fail("no schema of the search_path can be used", "GRANT USAGE on one, or set the search_path.");
        } else if !may_create {
            let advice = "GRANT CREATE on it, or let somebody who has it run \"sqlock migrate\".";
            check = check.fail(format!("no CREATE on the schema {schema}, where tables are missing"), advice);
        }
    }
    check.or_ok(if missing { "tables can be created" } else { "all that is needed on every table" })
}

/// Name, value, unit.
struct Settings(Rows);

impl Settings {
    fn text(&self, name: &str) -> &str {
        self.0.iter().find(|row| row[0] == name).map_or("", |row| &row[1])
    }

    /// A time limit; `None`: there is none.
    fn limit(&self, name: &str) -> Option<Duration> {
        let row = self.0.iter().find(|row| row[0] == name)?;
        let number: u64 = row[1].parse().ok().filter(|number| *number > 0)?;
        match &*row[2] {
            "ms" => Some(Duration::from_millis(number)),
            "s" => Some(Duration::from_secs(number)),
            "min" => Some(Duration::from_secs(60 * number)),
            _ => None,
        }
    }
}

fn hurtful(settings: &Settings) -> Check {
    let mut check = Check::new("settings");
    if settings.0.is_empty() {
        return check.unknown("the server does not tell its settings", "");
    }
    for (name, least, what) in [
        (
            "statement_timeout",
            SHORT,
            "a renewal that a busy server answers late is cancelled, and the lease may be lost",
        ),
        ("transaction_timeout", SHORT, "transactions that are fenced are ended"),
        ("idle_in_transaction_session_timeout", SHORT, "fenced transactions that compute meanwhile are ended"),
        ("idle_session_timeout", SILENT, "connections that sqlock keeps are ended, and made anew with each use"),
    ] {
        if let Some(limit) = settings.limit(name).filter(|limit| *limit < least) {
            let advice = format!("Set it to 0 or to {} at least: {what}.", brief(least));
            check = check.warn(format!("{name} is {}", brief(limit)), advice);
        }
    }
    match settings.text("default_transaction_isolation") {
        "read committed" | "" => check.or_ok("nothing that hurts"),
        level => check.ok(format!(
            "default_transaction_isolation is {level}: sqlock asks for READ COMMITTED, at two round trips more"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Status;
    use super::*;

    #[test]
    fn what_a_failover_would_lose_is_told() {
        let told = |standbys: &[[&str; 3]], wanted: &str, commit: &str| {
            let rows: Rows = standbys.iter().map(|row| row.iter().map(|cell| cell.to_string()).collect()).collect();
            let check = replicated(Check::new("replication"), &rows, wanted, commit);
            (check.status, check.found())
        };
        let sync = ["b", "streaming", "sync"];
        assert_eq!(told(&[], "", "on"), (Status::Ok, "none".into()));
        assert_eq!(told(&[sync], "FIRST 1 (b)", "on"), (Status::Ok, "synchronous: b".into()));
        assert_eq!(told(&[["b", "streaming", "async"]], "", "on"), (Status::Warn, "asynchronous: b".into()));
        assert_eq!(told(&[["a standby", "", ""]], "", "on"), (Status::Warn, "asynchronous; standbys: 1".into()));
        assert_eq!(told(&[sync], "b", "local").0, Status::Warn);
        // Every grant would wait.
        assert_eq!(told(&[], "b", "on").0, Status::Fail);
        assert_eq!(told(&[["b", "catchup", "sync"]], "b", "on").0, Status::Fail);
        assert_eq!(told(&[["a standby", "", ""]], "b", "on").0, Status::NotApplicable);
    }
}
