//! `sqlock migrate`: the tables.

use sqlock::Error;

use crate::database::Database;
use crate::exit::Outcome;
use crate::global::Global;
use crate::stderr;

pub async fn run(global: &Global) -> Outcome {
    let db = Database::open(global).await?;
    // The migration gives a server half a minute to come up, and then cannot say why it did not. A verb can, and sooner.
    if let Err(error @ Error::Unavailable { .. }) = db.locks.inspect("migrate").await {
        return Err(error.into());
    }
    db.locks.migrate().await?;
    stderr::print_note("the tables are there and up to date");
    Ok(0)
}
