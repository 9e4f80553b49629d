//! `sqlock doctor`: checks that the database is set up as sqlock needs it.
//!
//! Each kind of database has a file with its checks; `definitions.rs` compares the tables. The
//! checks only read.

mod clocks;
mod definitions;
mod failover;
mod hooks;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
mod probe;
mod quorum;
mod report;
#[cfg(feature = "sqlite")]
mod sqlite;
mod table;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod transport;

use clap::Args;
use serde_json::Value;

use crate::exit::{Failure, Outcome};
use crate::global::Global;
use crate::pool::{self, Pool};
use crate::stdout;
#[cfg(feature = "sqlite")]
use crate::url::Kind;
use crate::url::Url;
use definitions::MissingTables;
use report::Report;

/// Check that the database is set up as sqlock needs it.
///
/// Prints a line for each check, with advice: whether the database can be reached, the server and
/// its role, replication, durability of commits, TLS, a pooler in between, the difference of the
/// clocks, the tables and their definitions with triggers and rules, the rights of this user, and
/// harmful settings. Nothing is written: neither a table nor a SQLite file is created. Several
/// servers of one database are checked one after the other, and their clocks compared: -D URL,URL.
///
/// ok: as it should be. warn: sqlock works, with a limitation. fail: something that sqlock needs is
/// missing. n/a: the check was not possible, for the reason given.
///
/// The exit code is 0 if no check has failed, and 1 otherwise, also if the database cannot be
/// reached. Of several servers one must be writable; its standbys need not be. Two primaries of
/// PostgreSQL are a failure: they are not one database (see --quorum). With --no-migrate, missing
/// tables are a failure instead of a warning.
///
/// With --json an array with an object for each database: database (its location, without
/// credentials), ok (whether no check has failed), checks: an array of objects with check, status
/// ("ok", "warn", "fail", "n/a"), found and advice (null: none). With
/// --sidecar there are two such objects for a SQLite file that has sqlock's tables itself.
#[derive(Args)]
pub struct Arguments {
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Check the databases that --database-url or DATABASE_URL names as a quorum: each of them, and
    /// together how many can vote, whether two are on one server, and the age and the versions of
    /// their tables. Tables vote when they are older than the longest TTL in use. If a majority can
    /// vote, it is a warning that another database is out of reach, read-only or without tables. No
    /// majority is a failure, and so are two databases on one server. With --json, the last object
    /// is about the databases together.
    #[arg(long)]
    quorum: bool,
}

/// The exit code if a check has failed.
const FAILED: u8 = 1;

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let missing_tables = match (args.quorum, global.no_migrate) {
        (true, _) => MissingTables::NoVote,
        (false, true) => MissingTables::Forbidden,
        (false, false) => MissingTables::Created,
    };
    let urls = Url::find_several(global)?.split()?;
    let mut databases = Vec::new();
    for url in &urls {
        databases.push(examine_url(url, global, missing_tables).await?);
    }
    let together = args.quorum.then(|| quorum::examine(&mut databases));
    if !args.quorum {
        failover::check_writable(urls.iter().map(Url::kind), &mut databases);
    }
    let mut reports: Vec<Report> = databases.into_iter().flatten().collect();
    clocks::compare(&mut reports);
    if let Some(together) = together {
        reports.push(together);
    } else if urls.len() > 1 && reports.iter().any(|report| !report.is_standby && report.is_ok()) {
        // The other servers of a failover list may be standbys.
        reports.iter_mut().filter(|report| report.is_standby).for_each(Report::accept_standby);
    }
    if args.json {
        stdout::print_json_pretty(&Value::from_iter(reports.iter().map(Report::json)))?;
    } else {
        let texts: Vec<String> = reports.iter().map(Report::text).collect();
        stdout::print(&texts.join("\n"))?;
    }
    Ok(if reports.iter().all(Report::is_ok) { 0 } else { FAILED })
}

/// Checks the database with the leases, and the application's own file if it is a different file
/// with tables of sqlock.
async fn examine_url(url: &Url, global: &Global, missing_tables: MissingTables) -> Result<Vec<Report>, Failure> {
    let mut reports = Vec::new();
    let opened = pool::open_for_checks(url, global).await;
    #[cfg(feature = "sqlite")]
    if let (Kind::Sqlite, Err(failure)) = (url.kind(), &opened) {
        return Ok(vec![sqlite::report_unopened(url, failure)?]);
    }
    let mut pools = opened?.into_iter();
    if let Some(pool) = pools.next() {
        reports.push(examine(&pool, missing_tables).await);
    }
    for application in pools {
        reports.extend(examine_if_used(&application).await);
    }
    Ok(reports)
}

/// Checks one database.
async fn examine(pool: &Pool, missing_tables: MissingTables) -> Report {
    match pool {
        #[cfg(feature = "postgres")]
        Pool::Postgres(pool) => postgres::examine(&pool.connect_options(), missing_tables).await,
        #[cfg(feature = "mysql")]
        Pool::MySql(pool) => mysql::examine(&pool.connect_options(), missing_tables).await,
        #[cfg(feature = "sqlite")]
        Pool::Sqlite(pool) => sqlite::examine(&pool.connect_options(), missing_tables).await,
    }
}

/// Checks an application's own file, if it has tables of sqlock.
async fn examine_if_used(pool: &Pool) -> Option<Report> {
    match pool {
        #[cfg(feature = "sqlite")]
        Pool::Sqlite(pool) => sqlite::examine_if_used(&pool.connect_options()).await,
        #[allow(unreachable_patterns, reason = "not in a binary for SQLite alone")]
        _ => None,
    }
}
