//! `sqlock unlock`: the operator's release.

use clap::Args;

use crate::describe;
use crate::exit::Outcome;
use crate::global::Global;
use crate::holding::{self, Holding};
use crate::stderr::{self, quoted};

/// Take a name away from its holder: for one that is gone for good, or hangs.
///
/// The token, which "sqlock show" tells, says which holding is meant: a newer one is never ended by mistake (exit code 79).
/// The name, or its part of a name that is shared, is free at once. A "sqlock run" that holds it kills its command when it learns of this, at its next renewal
/// after a third of its TTL: until then, two may be at work.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    holding: Holding,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let left = holding::end(global, &args.holding).await?;
    let Holding { name, token } = &args.holding;
    stderr::note(&match describe::describe(&left) {
        None => format!("{} is free", quoted(name)),
        Some(now) => format!("token {token} does not hold {} any more: it is {now}", quoted(name)),
    });
    Ok(0)
}
