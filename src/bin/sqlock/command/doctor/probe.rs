//! What every database is asked in the same way: to connect, to answer a query, for the time and its version.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sqlx::{ColumnIndex, Database, Decode, Executor, Row, SqlSafeStr};
use tokio::time::{Instant, timeout};

use super::report::{Check, Report};

/// How long a database may take to accept a connection, and then for all of its answers.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// How long a server may take to close a connection, or to answer through a pooler.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub const SHORT_TIMEOUT: Duration = Duration::from_secs(1);

/// A shorter time limit of a server can end a statement of sqlock, or a fenced transaction: a busy server takes some tenths of a
/// second to answer.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub const SHORTEST_LIMIT: Duration = Duration::from_secs(1);

/// How often two connections are asked for their sessions, to find a pooler that lends one session to both.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub const POOLER_ROUNDS: usize = 3;

/// How far the clocks may differ before it is said: people then misread what sqlock shows. Nothing else depends on it.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite is on this host"))]
const MAX_CLOCK_SKEW: f64 = 2.0;

/// Opens a connection, in time.
pub async fn connect<C>(open: impl Future<Output = Result<C, sqlx::Error>>) -> Result<C, Check> {
    let why = match timeout(TIMEOUT, open).await {
        Ok(Ok(conn)) => return Ok(conn),
        Ok(Err(sqlx::Error::Database(error))) => error.message().to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", TIMEOUT.as_secs()),
    };
    let why = why.trim_start_matches("error communicating with database: ");
    let advice =
        "Look at the host, port, user and password of the URL, and whether the server runs and lets this host in.";
    Err(Check::new("reachable").fail(format!("no: {why}"), advice))
}

/// Runs the checks of a database that was reached, and tells if it goes away meanwhile.
pub async fn run_with_timeout(report: &mut Report, checks: impl AsyncFnOnce(&mut Report) -> Result<(), sqlx::Error>) {
    let advice = "The checks that are missing were not made: try again.";
    let lost = match timeout(TIMEOUT * 3, checks(&mut *report)).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => format!("it is gone: {error}"),
        Err(_) => format!("no answer within {} s", TIMEOUT.as_secs() * 3),
    };
    report.checks.push(Check::new("answers").fail(lost, advice));
}

pub type Rows = Vec<Vec<String>>;

/// All rows, as text; NULL is empty. Nothing is prepared: a pooler may not know how to keep prepared statements apart.
pub async fn query<DB>(conn: &mut DB::Connection, sql: impl SqlSafeStr) -> Result<Rows, sqlx::Error>
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
pub fn first_cell(rows: &Rows) -> &str {
    rows.first().and_then(|row| row.first()).map_or("", String::as_str)
}

/// `0.4 ms`, `12 ms`, `1.5 s`.
pub fn format_brief(duration: Duration) -> String {
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
pub async fn measure_round_trips(
    mut trip: impl AsyncFnMut() -> Result<Rows, sqlx::Error>,
) -> Result<(Duration, Check), sqlx::Error> {
    let mut quickest: Option<(Duration, f64)> = None;
    for _ in 0..5 {
        let (asked, from) = (SystemTime::now(), Instant::now());
        let rows = trip().await?;
        let took = from.elapsed();
        let ours = asked.duration_since(UNIX_EPOCH).unwrap_or_default() + took / 2;
        let theirs: f64 = first_cell(&rows).parse().unwrap_or(f64::NAN);
        if quickest.is_none_or(|(quickest, _)| took < quickest) {
            quickest = Some((took, theirs - ours.as_secs_f64()));
        }
    }
    let (took, skew) = quickest.unwrap_or((Duration::ZERO, f64::NAN));
    Ok((took, check_clock(skew, took / 2)))
}

#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite is on this host"))]
fn check_clock(skew: f64, uncertainty: Duration) -> Check {
    let check = Check::new("clock");
    let Ok(off) = Duration::try_from_secs_f64(skew.abs()) else {
        return check.unknown("the server does not tell the time", "");
    };
    if off <= uncertainty {
        return check.ok(format!("that of this host, give or take {}", format_brief(uncertainty)));
    }
    let side = if skew > 0.0 { "ahead of" } else { "behind" };
    let found = format!("{} {side} this host's, give or take {}", format_brief(off), format_brief(uncertainty));
    if off.as_secs_f64() - uncertainty.as_secs_f64() < MAX_CLOCK_SKEW {
        return check.ok(found);
    }
    check.warn(
        found,
        "Set one of them right. Locks do not depend on it, since only the server's clock counts; but who compares times \
         that sqlock shows with this host's is misled, and a step that puts the server's clock right moves the ends of leases.",
    )
}

/// The check of a version: `needed` is the least, major and minor.
pub fn check_version(name: &str, told: &str, needed: (u32, u32)) -> Check {
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
    use super::*;
    use crate::command::doctor::report::Status;

    #[test]
    fn a_clock_that_is_off_is_told_from_one_that_is_only_far_away() {
        assert_eq!(check_clock(0.3, Duration::from_millis(400)).status, Status::Ok);
        assert_eq!(check_clock(-1.5, Duration::ZERO).status, Status::Ok);
        assert_eq!(check_clock(4.0, Duration::from_secs(3)).status, Status::Ok);
        assert_eq!(check_clock(4.0, Duration::from_millis(10)).status, Status::Warn);
        assert_eq!(
            check_clock(-3600.0, Duration::from_millis(10)).found(),
            "3600.0 s behind this host's, give or take 10 ms"
        );
        assert_eq!(check_clock(f64::NAN, Duration::ZERO).status, Status::NotApplicable);
    }

    #[test]
    fn versions_are_compared_as_numbers() {
        assert_eq!(check_version("PostgreSQL", "9.6.24", (13, 0)).status, Status::Fail);
        assert_eq!(check_version("PostgreSQL", "15.18 (Debian 15.18-0)", (13, 0)).status, Status::Ok);
        assert_eq!(check_version("PostgreSQL", "18beta1", (13, 0)).status, Status::Ok);
        assert_eq!(check_version("MySQL", "5.7.44-log", (8, 0)).status, Status::Fail);
        assert_eq!(
            check_version("MariaDB", "10.5.29-MariaDB", (10, 6)).advice(),
            "sqlock needs MariaDB 10.6 or later."
        );
        assert_eq!(check_version("MariaDB", "10.11.19-MariaDB-0+deb12u1", (10, 6)).status, Status::Ok);
    }
}
