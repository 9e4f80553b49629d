//! `sqlock sweep`: purge once.

use std::time::Duration;

use clap::Args;

use crate::database::Database;
use crate::duration;
use crate::exit::Outcome;
use crate::global::Global;
use crate::stdout;

/// Purge the rows of names that have long been free.
///
/// It only tidies: a name that is free, or whose lease has run out, can be taken with or without it. Rows that are held are
/// never touched. Requests whose time has run out go as well. (Where the leases of a SQLite file are in a sidecar, "sqlock idem
/// purge" purges the requests, which are in the file itself.)
#[derive(Args)]
pub struct Arguments {
    /// For how long a name must have been free. Keep it well above any step that the database's clock may make backwards:
    /// fencing tokens could go back by as much as the step exceeds it.
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = duration::parse)]
    retention: Duration,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let db = Database::open_existing(global).await?;
    let purged = db.read(async || db.locks.sweeper().retention(args.retention).sweep().await).await?;
    let _ = db.locks.shutdown().await;
    stdout::print(&format!("purged {purged} names and requests\n"))?;
    Ok(0)
}
