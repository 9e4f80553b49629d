//! `sqlock migrate`: creates the tables.

use sqlock::Error;

use crate::database::Database;
use crate::exit::{Failure, Outcome};
use crate::global::Global;
use crate::pool::LeaseFilter;
use crate::stderr;

pub async fn run(global: &Global) -> Outcome {
    if global.no_migrate {
        return Err(Failure::usage("migrate creates the tables, and --no-migrate forbids it: leave out one of them"));
    }
    let db = Database::open(global, LeaseFilter::All).await?;
    // A migration waits half a minute for a starting server, and then cannot name the cause of the
    // failure. Another operation can name it, and sooner.
    if let Err(error @ Error::Unavailable { .. }) = db.locks.inspect("migrate").await {
        return Err(error.into());
    }
    db.locks.migrate().await?;
    // A standby may not have the new tables yet.
    let missing = if db.has_several_servers() { Vec::new() } else { db.missing_tables().await };
    if !missing.is_empty() {
        return Err(Failure::configuration(format!(
            "these tables are missing, although the record of migrations says that they were created: {}. They were \
             dropped, or not restored. Run the SQL that \"sqlock schema\" prints: it keeps existing tables.",
            missing.join(", ")
        )));
    }
    stderr::print_note("the tables are up to date");
    Ok(0)
}
