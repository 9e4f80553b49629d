//! Connections and queries, and the checks common to all databases: connection, clock, version.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use sqlx::{ColumnIndex, Database, Decode, Executor, Row, SqlSafeStr};
use tokio::time::{Instant, timeout};

use super::report::{ANSWERS, Check, REACHABLE, Report};

/// How long a database may take to accept a connection. All checks may take three times as long.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// How long a server may take to close a connection.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// How often two connections are asked for their sessions, to find a pooler that lends one session
/// to both.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub const POOLER_ROUNDS: usize = 3;

/// The clock difference above which people misread the times that sqlock prints. Nothing else
/// depends on this difference.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite is on this host"))]
const MAX_CLOCK_SKEW: f64 = 2.0;

/// The advice for a server that cannot be reached.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub const SERVER_ADVICE: &str =
    "Check the host, port, user and password of the URL, and that the server runs and accepts this host.";

/// Opens a connection, within the timeout.
pub async fn connect<C>(open: impl Future<Output = Result<C, sqlx::Error>>, advice: &str) -> Result<C, Check> {
    let reason = match timeout(TIMEOUT, open).await {
        Ok(Ok(conn)) => return Ok(conn),
        Ok(Err(sqlx::Error::Database(error))) => error.message().to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", TIMEOUT.as_secs()),
    };
    let reason = reason.trim_start_matches("error communicating with database: ");
    Err(Check::new(REACHABLE).fail(format!("no: {reason}"), advice))
}

/// Runs the checks of a database, and reports a connection that is lost meanwhile.
pub async fn run_with_timeout(report: &mut Report, checks: impl AsyncFnOnce(&mut Report) -> Result<(), sqlx::Error>) {
    let advice = "The missing checks were not made: try again.";
    let lost = match timeout(TIMEOUT * 3, checks(&mut *report)).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => format!("connection lost: {error}"),
        Err(_) => format!("no answer within {} s", TIMEOUT.as_secs() * 3),
    };
    report.checks.push(Check::new(ANSWERS).fail(lost, advice));
}

pub type Rows = Vec<Vec<String>>;

/// Queries all rows as text, with NULL as an empty text. The statement is not prepared: a pooler
/// may mix up prepared statements.
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

/// Returns the first cell of the first row.
pub fn first_cell(rows: &Rows) -> &str {
    rows.first().and_then(|row| row.first()).map_or("", String::as_str)
}

/// Formats a duration: `0.4 ms`, `12 ms`, `1.5 s`.
pub fn format_brief(duration: Duration) -> String {
    let ms = duration.as_secs_f64() * 1000.0;
    match ms {
        ..10.0 => format!("{ms:.1} ms"),
        ..1000.0 => format!("{ms:.0} ms"),
        _ => format!("{:.1} s", ms / 1000.0),
    }
}

/// Measures a round trip to a server and the difference of the clocks, each from the quickest of a
/// few trips. `trip` queries the seconds since the Unix epoch, which are the same in every time
/// zone.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite is on this host"))]
pub async fn measure_round_trips(
    report: &mut Report,
    mut trip: impl AsyncFnMut() -> Result<Rows, sqlx::Error>,
) -> Result<(Duration, Check), sqlx::Error> {
    let mut quickest: Option<(Duration, f64)> = None;
    for _ in 0..5 {
        let (sent_at, from) = (SystemTime::now(), Instant::now());
        let rows = trip().await?;
        let took = from.elapsed();
        let own_time = sent_at.duration_since(UNIX_EPOCH).unwrap_or_default() + took / 2;
        let server_time: f64 = first_cell(&rows).parse().unwrap_or(f64::NAN);
        if quickest.is_none_or(|(quickest, _)| took < quickest) {
            quickest = Some((took, server_time - own_time.as_secs_f64()));
        }
    }
    let (took, skew) = quickest.unwrap_or((Duration::ZERO, f64::NAN));
    report.skew = Some((skew, (took / 2).as_secs_f64()));
    Ok((took, check_clock(skew, took / 2)))
}

#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite is on this host"))]
fn check_clock(skew: f64, uncertainty: Duration) -> Check {
    let check = Check::new("clock");
    let Ok(off) = Duration::try_from_secs_f64(skew.abs()) else {
        return check.unknown("the server does not return its time", "");
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
        "Correct one of the clocks. Locks depend on the server's clock only, but the times that sqlock prints are not those of \
         this host, and a step that corrects the server's clock moves the ends of leases.",
    )
}

/// Checks a version: `needed` is the least major and minor version.
pub fn check_version(name: &str, version_text: &str, needed: (u32, u32)) -> Check {
    let check = Check::new("server");
    let mut numbers = version_text.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse().unwrap_or(0));
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    let found = format!("{name} {version_text}");
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
    fn clock_check_allows_for_the_round_trip() {
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
