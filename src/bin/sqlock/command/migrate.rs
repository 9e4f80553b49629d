//! `sqlock migrate`: creates the tables.

use sqlock::Error;

use crate::database::Database;
use crate::exit::Outcome;
use crate::global::Global;
use crate::pool::LeaseFilter;
use crate::stderr;

pub async fn run(global: &Global) -> Outcome {
    let db = Database::open(global, LeaseFilter::All).await?;
    // A migration waits half a minute for a starting server, and then cannot name the cause of the
    // failure. Another operation can name it, and sooner.
    if let Err(error @ Error::Unavailable { .. }) = db.locks.inspect("migrate").await {
        return Err(error.into());
    }
    db.locks.migrate().await?;
    stderr::print_note("the tables are up to date");
    Ok(0)
}
