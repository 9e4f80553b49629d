//! `sqlock unlock`: ends a holding, for an operator.

use clap::Args;

use crate::describe;
use crate::exit::Outcome;
use crate::global::Global;
use crate::holding::{self, HoldingArgs};
use crate::stderr::{self, quote};

/// Take a name away from a holder that is gone for good, or hangs.
///
/// The token, which "sqlock show" prints, names the holding: a newer holding is never ended by
/// mistake (exit code 79). The name, or the holder's part of a shared name, is free at once. A
/// "sqlock run" that holds the name kills its command at its next heartbeat, within about a second:
/// until then, two commands may run.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    holding: HoldingArgs,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let left = holding::evict(global, &args.holding).await?;
    let HoldingArgs { name, token, .. } = &args.holding;
    stderr::print_note(&match describe::describe_holders(&left) {
        None => format!("{} is free", quote(name)),
        Some(now) => format!("token {token} does not hold {} any more: it is {now}", quote(name)),
    });
    Ok(0)
}
