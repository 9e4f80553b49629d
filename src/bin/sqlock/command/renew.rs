//! `sqlock renew`: prolongs a lease from `acquire`.

use std::time::{Duration, Instant};

use clap::Args;

use crate::database::Database;
use crate::exit::Outcome;
use crate::global::Global;
use crate::holding::{HoldingArgs, not_held_by_majority_failure, not_held_failure};
use crate::majority::Majority;
use crate::pool::LeaseFilter;
use crate::{describe, duration, stdout};

/// Prolong a lease from "sqlock acquire".
///
/// The lease lasts at least --ttl from now, and is never shortened. Exit code 79: the token does
/// not hold the name any more, and nothing protects the next steps of the script. Prints the lease
/// as JSON.
///
/// With --quorum, give no longer --ttl than to the acquire and run commands for the name: a
/// database that has lost its data votes again after their TTL.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    holding: HoldingArgs,
    /// How long the lease lasts from now.
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration::parse)]
    ttl: Duration,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let HoldingArgs { name, token, quorum } = &args.holding;
    if *quorum {
        return renew_majority(global, &args).await;
    }
    let db = Database::open_existing(global, args.holding.filter()).await?;
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

async fn renew_majority(global: &Global, args: &Arguments) -> Outcome {
    let HoldingArgs { name, token, .. } = &args.holding;
    let majority = Majority::open_existing(global, LeaseFilter::Name(name)).await?;
    let start = Instant::now();
    let extended = majority.quorum.extend(name, *token, args.ttl).await;
    // The clocks of the servers may run faster by one percent.
    let remaining = (args.ttl - args.ttl / 100).saturating_sub(start.elapsed());
    let expires_at = describe::format_expiry(remaining);
    let owner = if matches!(extended, Ok(true)) { majority.find_owner(name, *token).await } else { None };
    majority.shutdown().await;
    if !extended? {
        return Err(not_held_by_majority_failure(&args.holding));
    }
    stdout::print_json(&describe::majority_grant_to_json(name, *token, owner, &expires_at))?;
    Ok(0)
}
