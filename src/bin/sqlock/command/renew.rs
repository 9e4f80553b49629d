//! `sqlock renew`: prolongs a lease from `acquire`.

use std::time::Duration;

use clap::Args;

use crate::database::Database;
use crate::exit::Outcome;
use crate::global::Global;
use crate::holding::{HoldingArgs, not_held_failure};
use crate::{describe, duration, stdout};

/// Prolong a lease from "sqlock acquire".
///
/// The lease lasts at least --ttl from now, and is never shortened. Exit code 79: the token does
/// not hold the name any more, and nothing protects the next steps of the script. Prints the lease
/// as JSON.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    holding: HoldingArgs,
    /// How long the lease lasts from now.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse)]
    ttl: Duration,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let db = Database::open_existing(global).await?;
    let HoldingArgs { name, token } = &args.holding;
    let extended = db.read(async || db.locks.extend(name, *token, args.ttl).await).await?;
    let holders = db.read(async || db.locks.holders(name).await).await?;
    let _ = db.locks.shutdown().await;
    match holders.iter().find(|held| extended && held.token == *token) {
        Some(held) => {
            stdout::print_json(&describe::grant_to_json(held))?;
            Ok(0)
        }
        None => Err(not_held_failure(&args.holding, &holders)),
    }
}
