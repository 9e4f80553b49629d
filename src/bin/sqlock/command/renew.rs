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
/// not hold the name any more, and nothing protects the next steps of the script. Exit code 75: a
/// fenced transaction of the holder has blocked the change for ten seconds (on SQLite 69, after a
/// few seconds). Prints the lease as JSON.
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
    let start = Instant::now();
    let extended = db.read(async || db.locks.extend(name, *token, args.ttl).await).await?;
    let expires_at = estimate_expiry(args.ttl, start);
    let holders = db.read(async || db.locks.holders(name).await).await;
    let _ = db.locks.shutdown().await;
    let shown = match holders {
        Ok(holders) => match holders.iter().find(|held| extended && held.token == *token) {
            Some(held) => describe::grant_to_json(held),
            None => return Err(not_held_failure(&args.holding, &holders)),
        },
        // The lease is prolonged even if the holders cannot be read.
        Err(_) if extended => describe::estimated_grant_to_json(name, *token, None, &expires_at),
        Err(error) => return Err(error.into()),
    };
    stdout::print_json(&shown)?;
    Ok(0)
}

async fn renew_majority(global: &Global, args: &Arguments) -> Outcome {
    let HoldingArgs { name, token, .. } = &args.holding;
    let majority = Majority::open_existing(global, LeaseFilter::Name(name)).await?;
    let start = Instant::now();
    let extended = majority.quorum.extend(name, *token, args.ttl).await;
    let expires_at = estimate_expiry(args.ttl, start);
    let owner = if matches!(extended, Ok(true)) { majority.find_owner(name, *token).await } else { None };
    majority.shutdown().await;
    if !extended? {
        return Err(not_held_by_majority_failure(&args.holding));
    }
    stdout::print_json(&describe::estimated_grant_to_json(name, *token, owner, &expires_at))?;
    Ok(0)
}

/// Formats when a lease ends at the earliest that was extended since `start`. The clocks of the
/// servers may run faster by one percent.
fn estimate_expiry(ttl: Duration, start: Instant) -> String {
    describe::format_expiry((ttl - ttl / 100).saturating_sub(start.elapsed()))
}
