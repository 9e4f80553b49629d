//! `sqlock sweep`: purges expired rows once.

use std::time::Duration;

use clap::Args;

use crate::database::Database;
use crate::duration;
use crate::exit::Outcome;
use crate::global::Global;
use crate::pool::LeaseFilter;
use crate::stdout;

/// Purge the rows of names that have long been free.
///
/// This only saves space: a free name can be taken without it. Rows that are held are never
/// touched. Expired idempotency records are purged as well. (If the leases of a SQLite file are in
/// a sidecar, "sqlock idem purge" purges the records, which are in the file itself.)
#[derive(Args)]
pub struct Arguments {
    /// How long a name must have been free. Keep this well above a minute and above any backward
    /// step of the database's clock: otherwise fencing tokens could go back.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = duration::parse)]
    retention: Duration,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let db = Database::open_existing(global, LeaseFilter::All).await?;
    let purged = db.read(async || db.locks.sweeper().retention(args.retention).sweep().await).await?;
    let _ = db.locks.shutdown().await;
    stdout::print(&format!("purged {purged} names and requests\n"))?;
    Ok(0)
}
