//! `sqlock migrate`: the tables.

use crate::database::Database;
use crate::exit::Outcome;
use crate::options::Global;
use crate::say;

pub async fn run(global: &Global) -> Outcome {
    let db = Database::open(global)?;
    db.locks.migrate().await?;
    say::note("the tables are there and up to date");
    Ok(0)
}
