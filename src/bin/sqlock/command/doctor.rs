//! `sqlock doctor`: whether the database is set up as sqlock needs it.
//!
//! One file per database knows what to ask it, `tables.rs` what the tables should be like. Everything is read: nothing is
//! made, and nothing is left behind.

#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
mod report;
#[cfg(feature = "sqlite")]
mod sqlite;
mod tables;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::Value;
use sqlx::{ColumnIndex, Database, Decode, Executor, Row, SqlSafeStr};
use tokio::time::{Instant, timeout};

use crate::exit::Outcome;
use crate::global::Global;
use crate::pool::{self, Pool};
use crate::stdout;
use crate::url::Url;
use report::{Check, Report};

/// Check that the database is set up as sqlock needs it.
///
/// Tells, line by line, whether the database can be reached, which server it is, whether it is a primary, how it is replicated,
/// how durable a commit is, whether a pooler stands in between, how far its clock is from this host's, whether the tables are
/// there and as they should be, what this user may do with them, and which settings hurt; and what to do about it. Nothing is
/// written: no table is made, nor a SQLite file. Several databases are checked one after the other: -D URL,URL.
///
/// ok: as it should be. warn: it works, and you should know. fail: something that sqlock needs is missing. n/a: it could not be
/// found out, and why.
///
/// The exit code is 0 when nothing has failed, and 1 otherwise, also when the database cannot be reached: that is an answer
/// here. Of several databases, one must be writable; those that stand by for it need not be. With --no-migrate, tables that
/// are missing are a failure and not a warning.
///
/// With --json an array with an object for each database: database (where it is, without credentials), ok (whether nothing has
/// failed), checks: an array of objects with check, status ("ok", "warn", "fail", "n/a"), found and advice (null if there is
/// none). With --sidecar there are two such objects for a SQLite file that has sqlock's tables itself.
#[derive(Args)]
pub struct Arguments {
    /// As JSON.
    #[arg(long)]
    json: bool,
}

/// How long a database may take to accept a connection, and then for all of its answers.
const PATIENCE: Duration = Duration::from_secs(10);

/// How far the clocks may differ before it is said: people then misread what sqlock shows. Nothing else depends on it.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite is on this host"))]
const SKEW: f64 = 2.0;

/// Something that sqlock needs is missing.
const UNHEALTHY: u8 = 1;

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let mut reports = Vec::new();
    let urls = Url::find_several(global)?.each()?;
    for url in &urls {
        let mut pools = pool::open_to_examine(url, global).await?.into_iter();
        if let Some(pool) = pools.next() {
            reports.push(examine(&pool, !global.no_migrate).await);
        }
        for own in pools {
            reports.extend(examine_if_used(&own).await);
        }
    }
    // In a list for failover the others wait for their turn.
    if urls.len() > 1 && reports.iter().any(|report| !report.is_standby && report.is_ok()) {
        reports.iter_mut().filter(|report| report.is_standby).for_each(Report::stands_by);
    }
    if args.json {
        stdout::json_on_many_lines(&Value::from_iter(reports.iter().map(Report::json)))?;
    } else {
        let texts: Vec<String> = reports.iter().map(Report::text).collect();
        stdout::text(&texts.join("\n"))?;
    }
    Ok(if reports.iter().all(Report::is_ok) { 0 } else { UNHEALTHY })
}

/// Looks into one database.
async fn examine(pool: &Pool, may_migrate: bool) -> Report {
    match pool {
        #[cfg(feature = "postgres")]
        Pool::Postgres(pool) => postgres::examine(&pool.connect_options(), may_migrate).await,
        #[cfg(feature = "mysql")]
        Pool::MySql(pool) => mysql::examine(&pool.connect_options(), may_migrate).await,
        #[cfg(feature = "sqlite")]
        Pool::Sqlite(pool) => sqlite::examine(&pool.connect_options(), may_migrate).await,
    }
}

/// The same for an application's own file, if a program that uses the library keeps its leases there.
async fn examine_if_used(pool: &Pool) -> Option<Report> {
    match pool {
        #[cfg(feature = "sqlite")]
        Pool::Sqlite(pool) => sqlite::examine_if_used(&pool.connect_options()).await,
        #[allow(unreachable_patterns, reason = "not in a binary for SQLite alone")]
        _ => None,
    }
}

/// Opens a connection, in time.
async fn connect<C>(open: impl Future<Output = Result<C, sqlx::Error>>) -> Result<C, Check> {
    let why = match timeout(PATIENCE, open).await {
        Ok(Ok(conn)) => return Ok(conn),
        Ok(Err(sqlx::Error::Database(error))) => error.message().to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", PATIENCE.as_secs()),
    };
    let why = why.trim_start_matches("error communicating with database: ");
    let advice =
        "Look at the host, port, user and password of the URL, and whether the server runs and lets this host in.";
    Err(Check::new("reachable").fail(format!("no: {why}"), advice))
}

/// Runs the checks of a database that was reached, and tells if it goes away meanwhile.
async fn in_time(report: &mut Report, checks: impl AsyncFnOnce(&mut Report) -> Result<(), sqlx::Error>) {
    let advice = "The checks that are missing were not made: try again.";
    let lost = match timeout(PATIENCE * 3, checks(&mut *report)).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => format!("it is gone: {error}"),
        Err(_) => format!("no answer within {} s", PATIENCE.as_secs() * 3),
    };
    report.checks.push(Check::new("answers").fail(lost, advice));
}

type Rows = Vec<Vec<String>>;

/// All rows, as text; NULL is empty. Nothing is prepared: a pooler may not know how to keep prepared statements apart.
async fn ask<DB>(conn: &mut DB::Connection, sql: impl SqlSafeStr) -> Result<Rows, sqlx::Error>
where
    DB: Database,
    for<'c> &'c mut DB::Connection: Executor<'c, Database = DB>,
    for<'r> Option<String>: Decode<'r, DB>,
    usize: ColumnIndex<DB::Row>,
{
    let rows = sqlx::raw_sql(sql).fetch_all(conn).await?;
    let text = |row: &DB::Row, i| Ok(row.try_get_unchecked::<Option<String>, _>(i)?.unwrap_or_default());
    rows.iter().map(|row| (0..row.len()).map(|i| text(row, i)).collect()).collect()
}

/// The first cell of the first row.
fn first(rows: &Rows) -> &str {
    rows.first().and_then(|row| row.first()).map_or("", String::as_str)
}

/// `0.4 ms`, `12 ms`, `1.5 s`.
fn brief(duration: Duration) -> String {
    let ms = duration.as_secs_f64() * 1000.0;
    match ms {
        ..10.0 => format!("{ms:.1} ms"),
        ..1000.0 => format!("{ms:.0} ms"),
        _ => format!("{:.1} s", ms / 1000.0),
    }
}

/// How long a round trip to a server takes, and how far the server's clock is from ours: each as the quickest of a few tells.
/// `trip` asks for the seconds since the Unix epoch, which are the same in every time zone.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite is on this host"))]
async fn round_trips(
    mut trip: impl AsyncFnMut() -> Result<Rows, sqlx::Error>,
) -> Result<(Duration, Check), sqlx::Error> {
    let mut quickest: Option<(Duration, f64)> = None;
    for _ in 0..5 {
        let (asked, from) = (SystemTime::now(), Instant::now());
        let rows = trip().await?;
        let took = from.elapsed();
        let ours = asked.duration_since(UNIX_EPOCH).unwrap_or_default() + took / 2;
        let theirs: f64 = first(&rows).parse().unwrap_or(f64::NAN);
        if quickest.is_none_or(|(quickest, _)| took < quickest) {
            quickest = Some((took, theirs - ours.as_secs_f64()));
        }
    }
    let (took, skew) = quickest.unwrap_or((Duration::ZERO, f64::NAN));
    Ok((took, clock(skew, took / 2)))
}

#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite is on this host"))]
fn clock(skew: f64, uncertainty: Duration) -> Check {
    let check = Check::new("clock");
    let Ok(off) = Duration::try_from_secs_f64(skew.abs()) else {
        return check.unknown("the server does not tell the time", "");
    };
    if off <= uncertainty {
        return check.ok(format!("that of this host, give or take {}", brief(uncertainty)));
    }
    let side = if skew > 0.0 { "ahead of" } else { "behind" };
    let found = format!("{} {side} this host's, give or take {}", brief(off), brief(uncertainty));
    if off.as_secs_f64() - uncertainty.as_secs_f64() < SKEW {
        return check.ok(found);
    }
    check.warn(
        found,
        "Set one of them right. Locks do not depend on it, since only the server's clock counts; but who compares times \
         that sqlock shows with this host's is misled, and a step that puts the server's clock right moves the ends of leases.",
    )
}

/// The check of a version: `needed` is the least, major and minor.
fn version(name: &str, told: &str, needed: (u32, u32)) -> Check {
    let check = Check::new("server");
    let mut numbers = told.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let found = format!("{name} {told}");
    let least = if needed.0 >= 13 { needed.0.to_string() } else { format!("{}.{}", needed.0, needed.1) };
    if version < needed {
        return check.fail(found, format!("sqlock needs {name} {least} or later."));
    }
    check.ok(found)
}

#[cfg(test)]
mod tests {
    use super::report::Status;
    use super::*;

    #[test]
    fn a_clock_that_is_off_is_told_from_one_that_is_only_far_away() {
        assert_eq!(clock(0.3, Duration::from_millis(400)).status, Status::Ok);
        assert_eq!(clock(-1.5, Duration::ZERO).status, Status::Ok);
        assert_eq!(clock(4.0, Duration::from_secs(3)).status, Status::Ok);
        assert_eq!(clock(4.0, Duration::from_millis(10)).status, Status::Warn);
        assert_eq!(
            clock(-3600.0, Duration::from_millis(10)).found(),
            "3600.0 s behind this host's, give or take 10 ms"
        );
        assert_eq!(clock(f64::NAN, Duration::ZERO).status, Status::NotApplicable);
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(version("PostgreSQL", "9.6.24", (13, 0)).status, Status::Fail);
        assert_eq!(version("PostgreSQL", "15.18 (Debian 15.18-0)", (13, 0)).status, Status::Ok);
        assert_eq!(version("PostgreSQL", "18beta1", (13, 0)).status, Status::Ok);
        assert_eq!(version("MySQL", "5.7.44-log", (8, 0)).status, Status::Fail);
        assert_eq!(version("MariaDB", "10.5.29-MariaDB", (10, 6)).advice(), "sqlock needs MariaDB 10.6 or later.");
        assert_eq!(version("MariaDB", "10.11.19-MariaDB-0+deb12u1", (10, 6)).status, Status::Ok);
    }
}
