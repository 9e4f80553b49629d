//! `sqlock release`: releases a lease from `acquire`.

use clap::Args;

use crate::exit::Outcome;
use crate::global::Global;
use crate::holding::{self, HoldingArgs};

/// Release a lease from "sqlock acquire".
///
/// Exit code 79: the token did not hold the name any more, and another holder may have worked at
/// the same time. Exit code 75: a fenced transaction of the holder has blocked the change for ten
/// seconds (on SQLite 69, after a few seconds). Inside a "sqlock run" of the same name, the token
/// is that of the run, and ends its lease too.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    holding: HoldingArgs,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    holding::evict(global, &args.holding).await?;
    Ok(0)
}
