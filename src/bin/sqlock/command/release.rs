//! `sqlock release`: the end of a lease from `acquire`.

use clap::Args;

use crate::exit::Outcome;
use crate::global::Global;
use crate::holding::{self, HoldingArgs};

/// Give back a lease from "sqlock acquire".
///
/// Exit code 79: that token did not hold the name any more. What was done under it may have met somebody else's work.
/// Inside a "sqlock run" of the same name the token is the same, and ends the lease of that too.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    holding: HoldingArgs,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    holding::evict(global, &args.holding).await?;
    Ok(0)
}
