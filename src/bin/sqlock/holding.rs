//! The holding for `renew`, `release` and `unlock`: a name and a token.

use clap::Args;
use sqlock::FencingToken;
use sqlock::inspect::LeaseInfo;

use crate::database::Database;
use crate::describe;
use crate::exit::{self, Failure};
use crate::global::Global;
use crate::majority::Majority;
use crate::parse::parse_token;
use crate::pool::LeaseFilter;
use crate::stderr::quote;

/// The options that name a holding.
#[derive(Args)]
pub struct HoldingArgs {
    /// The name that is held.
    pub name: String,
    /// The token of the holding, as printed by acquire, ls and show.
    #[arg(short, long, value_name = "N", value_parser = parse_token)]
    pub token: FencingToken,
    /// The holding is on a majority of the databases that --database-url or DATABASE_URL names:
    /// those of the "sqlock acquire --quorum" or "sqlock run --quorum" that holds it.
    #[arg(long)]
    pub quorum: bool,
}

impl HoldingArgs {
    pub fn filter(&self) -> LeaseFilter<'_> {
        LeaseFilter::Holding(&self.name, self.token)
    }
}

/// Ends a holding and returns the remaining holders. Fails with 79 if the token does not hold the
/// name.
pub async fn evict(global: &Global, holding: &HoldingArgs) -> Result<Vec<LeaseInfo>, Failure> {
    let HoldingArgs { name, token, quorum } = holding;
    if *quorum {
        return evict_from_majority(global, holding).await;
    }
    let db = Database::open_existing(global, holding.filter()).await?;
    let ended = db.read(async || db.locks.evict(name, *token).await).await?;
    let holders = db.read(async || db.locks.holders(name).await).await;
    let _ = db.locks.shutdown().await;
    // The holding has ended even if the holders cannot be read.
    if ended { Ok(holders.unwrap_or_default()) } else { Err(not_held_failure(holding, &holders?)) }
}

/// Ends a holding on a majority of databases. It leaves no holders.
async fn evict_from_majority(global: &Global, holding: &HoldingArgs) -> Result<Vec<LeaseInfo>, Failure> {
    let majority = Majority::open_existing(global, LeaseFilter::Name(&holding.name)).await?;
    let ended = majority.quorum.evict(&holding.name, holding.token).await;
    majority.shutdown().await;
    if ended? { Ok(Vec::new()) } else { Err(not_held_by_majority_failure(holding)) }
}

/// Makes the failure for a token that does not hold the name on a majority.
pub fn not_held_by_majority_failure(holding: &HoldingArgs) -> Failure {
    let HoldingArgs { name, token, .. } = holding;
    Failure::new(
        exit::LOST,
        format!("token {token} does not hold {} on a majority: see \"sqlock ls --quorum\"", quote(name)),
    )
}

/// Makes the failure for a token that does not hold the name.
pub fn not_held_failure(holding: &HoldingArgs, holders: &[LeaseInfo]) -> Failure {
    let HoldingArgs { name, token, .. } = holding;
    let now = match (describe::describe_holders(holders), holders) {
        (Some(now), [held]) => format!("it is {now} (token {})", held.token),
        (Some(now), _) => format!("it is {now} (for the tokens: \"sqlock show\")"),
        (None, _) => "it is free".into(),
    };
    Failure::new(exit::LOST, format!("token {token} does not hold {}: {now}", quote(name)))
}
