//! `sqlock doctor`: whether the database is set up as sqlock needs it.
//!
//! One file per database knows what to ask it, `definitions.rs` what the tables should be like. Everything is read: nothing is
//! made, and nothing is left behind.

mod definitions;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "postgres")]
mod postgres;
mod probe;
mod report;
#[cfg(feature = "sqlite")]
mod sqlite;
mod table;

use clap::Args;
use serde_json::Value;

use crate::exit::Outcome;
use crate::global::Global;
use crate::pool::{self, Pool};
use crate::stdout;
use crate::url::Url;
use report::Report;

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

/// Something that sqlock needs is missing.
const FAILED: u8 = 1;

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let mut reports = Vec::new();
    let urls = Url::find_several(global)?.split()?;
    for url in &urls {
        let mut pools = pool::open_for_checks(url, global).await?.into_iter();
        if let Some(pool) = pools.next() {
            reports.push(examine(&pool, !global.no_migrate).await);
        }
        for application in pools {
            reports.extend(examine_if_used(&application).await);
        }
    }
    // In a list for failover the others wait for their turn.
    if urls.len() > 1 && reports.iter().any(|report| !report.is_standby && report.is_ok()) {
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
