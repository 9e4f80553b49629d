//! `sqlock unlock`: the operator's release.

use clap::Args;

use crate::describe;
use crate::exit::Outcome;
use crate::global::Global;
use crate::holding::{self, HoldingArgs};
use crate::stderr::{self, quote};

/// Take a name away from its holder: for one that is gone for good, or hangs.
///
/// The token, which "sqlock show" tells, says which holding is meant: a newer one is never ended by mistake (exit code 79).
/// The name, or its part of a name that is shared, is free at once. A "sqlock run" that holds it kills its command when it learns of this, at its next renewal
/// after a third of its TTL: until then, two may be at work.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    holding: HoldingArgs,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let left = holding::evict(global, &args.holding).await?;
    let HoldingArgs { name, token } = &args.holding;
    stderr::print_note(&match describe::describe_holders(&left) {
        None => format!("{} is free", quote(name)),
        Some(now) => format!("token {token} does not hold {} any more: it is {now}", quote(name)),
    });
    Ok(0)
}
