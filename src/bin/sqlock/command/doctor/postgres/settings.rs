//! The settings of PostgreSQL, and the check for harmful ones.

use std::time::Duration;

use crate::command::doctor::probe::{Rows, format_brief};
use crate::command::doctor::report::Check;

/// A shorter time limit can end a statement of sqlock, or a fenced transaction: a busy server takes
/// some tenths of a second to answer.
const SHORTEST_LIMIT: Duration = Duration::from_secs(1);

/// A server that ends sessions after a shorter idle time ends connections that sqlock seldom uses.
const SHORTEST_IDLE_LIMIT: Duration = Duration::from_secs(10);

/// Rows with name, value and unit.
pub struct Settings(pub Rows);

impl Settings {
    pub fn text(&self, name: &str) -> &str {
        self.0.iter().find(|row| row[0] == name).map_or("", |row| &row[1])
    }

    /// Returns a time limit. `None`: no limit.
    pub fn limit(&self, name: &str) -> Option<Duration> {
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

pub fn check_settings(settings: &Settings) -> Check {
    let mut check = Check::new("settings");
    if settings.0.is_empty() {
        return check.unknown("the server does not return its settings", "");
    }
    for (name, least, harm) in [
        (
            "statement_timeout",
            SHORTEST_LIMIT,
            "a renewal that a busy server answers late is cancelled, and the lease may be lost",
        ),
        ("transaction_timeout", SHORTEST_LIMIT, "the server ends fenced transactions"),
        (
            "idle_in_transaction_session_timeout",
            SHORTEST_LIMIT,
            "the server ends fenced transactions while the application computes",
        ),
        (
            "idle_session_timeout",
            SHORTEST_IDLE_LIMIT,
            "the server ends idle connections of sqlock, and each use opens a new one",
        ),
    ] {
        if let Some(limit) = settings.limit(name).filter(|limit| *limit < least) {
            let advice = format!("Set it to 0 or to {} at least: {harm}.", format_brief(least));
            check = check.warn(format!("{name} is {}", format_brief(limit)), advice);
        }
    }
    match settings.text("default_transaction_isolation") {
        "read committed" | "" => check.or_ok("no harmful settings"),
        level => check.ok(format!(
            "default_transaction_isolation is {level}: sqlock sets READ COMMITTED, behind a pooler with two more round trips"
        )),
    }
}
