//! The results of checks, as text and as JSON.

use std::time::Duration;

use serde_json::{Value, json};
use sqlx::Error;

use crate::stderr::escape_line;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Status {
    /// The check was not possible.
    NotApplicable,
    Ok,
    /// sqlock works, with a limitation.
    Warn,
    /// Something that sqlock needs is missing.
    Fail,
}

impl Status {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotApplicable => "n/a",
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// The result of a check, with the worst status of its findings.
#[derive(Debug)]
pub struct Check {
    pub name: &'static str,
    pub status: Status,
    found: Vec<String>,
    advice: Vec<String>,
}

impl Check {
    pub fn new(name: &'static str) -> Self {
        Self { name, status: Status::NotApplicable, found: Vec::new(), advice: Vec::new() }
    }

    pub fn ok(self, found: impl Into<String>) -> Self {
        self.add(Status::Ok, found, "")
    }

    pub fn warn(self, found: impl Into<String>, advice: impl Into<String>) -> Self {
        self.add(Status::Warn, found, advice)
    }

    pub fn fail(self, found: impl Into<String>, advice: impl Into<String>) -> Self {
        self.add(Status::Fail, found, advice)
    }

    pub fn unknown(self, reason: impl Into<String>, advice: impl Into<String>) -> Self {
        self.add(Status::NotApplicable, reason, advice)
    }

    pub fn add(mut self, status: Status, found: impl Into<String>, advice: impl Into<String>) -> Self {
        self.status = self.status.max(status);
        self.found.push(escape_line(&found.into()));
        let advice = escape_line(&advice.into());
        if !advice.is_empty() && !self.advice.contains(&advice) {
            self.advice.push(advice);
        }
        self
    }

    /// Adds a finding with the status ok if there is no other finding.
    pub fn or_ok(self, found: impl Into<String>) -> Self {
        if self.found.is_empty() { self.ok(found) } else { self }
    }

    pub fn found(&self) -> String {
        self.found.join("; ")
    }

    pub fn advice(&self) -> String {
        self.advice.join(" ")
    }

    fn json(&self) -> Value {
        let advice = if self.advice.is_empty() { Value::Null } else { self.advice().into() };
        json!({ "check": self.name, "status": self.status.as_str(), "found": self.found(), "advice": advice })
    }
}

/// The check of the connection.
pub const REACHABLE: &str = "reachable";

/// The check that fails if the connection is lost during the others.
pub const ANSWERS: &str = "answers";

/// The checks that fail while a database is out of reach, read-only or without tables, and so
/// grants nothing.
const OUTAGES: [&str; 4] = [REACHABLE, ANSWERS, "role", "tables"];

/// The record of the migrations of a database.
#[derive(Debug)]
pub struct Record {
    /// How long the tables have existed.
    pub age: Duration,
    /// The latest migration that was applied.
    pub version: usize,
    /// The latest migration that this program knows for this kind of database.
    pub latest: usize,
}

impl Record {
    /// Returns how many migrations the tables are ahead of this program. Negative: behind it.
    pub fn distance(&self) -> isize {
        self.version.cast_signed() - self.latest.cast_signed()
    }
}

/// The results of all checks of one database.
pub struct Report {
    /// The location, without credentials.
    pub database: String,
    pub checks: Vec<Check>,
    /// Whether the database replicates another one.
    pub is_standby: bool,
    /// How far its clock is ahead of this host's, and the uncertainty of this lead, in seconds.
    pub skew: Option<(f64, f64)>,
    /// The address of its server, and the name that the server has for itself. Databases with one
    /// in common are on one server.
    servers: Vec<String>,
    /// The identity of its cluster, all of whose nodes may accept writes. Empty: none.
    pub cluster: String,
    /// `None`: the migrations have no record, or it cannot be read.
    pub record: Option<Record>,
    /// The longest TTL of the leases in the tables, held or not.
    pub longest_ttl: Option<Duration>,
}

impl Report {
    pub fn new(database: String) -> Self {
        Self {
            database: escape_line(&database),
            checks: Vec::new(),
            is_standby: false,
            skew: None,
            servers: Vec::new(),
            cluster: String::new(),
            record: None,
            longest_ttl: None,
        }
    }

    /// Adds a check, or why the database refused to answer it. An error means that the connection
    /// is lost.
    pub fn add(&mut self, name: &'static str, check: Result<Check, Error>) -> Result<(), Error> {
        let check = match check {
            Ok(check) => check,
            Err(Error::Database(error)) => Check::new(name).unknown(format!("refused: {}", error.message()), ""),
            Err(error) => return Err(error),
        };
        self.checks.push(check);
        Ok(())
    }

    pub fn count(&self, status: Status) -> usize {
        self.checks.iter().filter(|check| check.status == status).count()
    }

    pub fn is_ok(&self) -> bool {
        self.count(Status::Fail) == 0
    }

    /// Adds an address or a name of its server. Empty: unknown.
    pub fn add_server(&mut self, server: &str) {
        self.servers.extend((!server.is_empty()).then(|| server.to_owned()));
    }

    pub fn shares_server(&self, other: &Self) -> bool {
        self.servers.iter().any(|server| other.servers.contains(server))
    }

    pub fn shares_cluster(&self, other: &Self) -> bool {
        !self.cluster.is_empty() && self.cluster == other.cluster
    }

    pub fn is_reachable(&self) -> bool {
        let mut failed = self.checks.iter().filter(|check| check.status == Status::Fail);
        !failed.any(|check| [REACHABLE, ANSWERS].contains(&check.name))
    }

    /// Accepts that the database has no vote while it is out of reach, read-only or without tables:
    /// others are a majority.
    pub fn accept_outage(&mut self) {
        for check in &mut self.checks {
            if OUTAGES.contains(&check.name) && check.status == Status::Fail {
                check.status = Status::Warn;
            }
        }
    }

    /// Accepts that the database is read-only, because it stands by for a writable one.
    pub fn accept_standby(&mut self) {
        for check in &mut self.checks {
            if check.name == "role" && check.status == Status::Fail {
                check.status = Status::Ok;
                check.advice.clear();
            }
        }
    }

    pub fn text(&self) -> String {
        let width = self.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
        let mut text = format!("{}\n", self.database);
        for check in &self.checks {
            text.push_str(&format!("  {:<4}  {:<width$}  {}\n", check.status.as_str(), check.name, check.found()));
            for advice in &check.advice {
                text.push_str(&format!("        {:<width$}  → {advice}\n", ""));
            }
        }
        text.push_str(&self.verdict());
        text
    }

    fn verdict(&self) -> String {
        let warnings = match self.count(Status::Warn) {
            0 => String::new(),
            1 => " (1 warning)".into(),
            warnings => format!(" ({warnings} warnings)"),
        };
        match self.count(Status::Fail) {
            0 => format!("  everything that sqlock needs is in order{warnings}\n"),
            1 => format!("  1 check failed{warnings}\n"),
            failed => format!("  {failed} checks failed{warnings}\n"),
        }
    }

    pub fn json(&self) -> Value {
        json!({
            "database": self.database,
            "ok": self.is_ok(),
            "checks": Value::from_iter(self.checks.iter().map(Check::json)),
        })
    }
}
