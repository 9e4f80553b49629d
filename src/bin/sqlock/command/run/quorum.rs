//! `sqlock run --quorum`: runs the command under a lease on a majority of independent databases.

use super::arguments::Arguments;
use super::reaper::Reaper;
use super::supervise::{Completion, supervise};
use crate::exit::{Failure, Outcome};
use crate::global::Global;
use crate::lease::HeldLease;
use crate::majority::Majority;
use crate::signals::Signals;

pub async fn run(global: &Global, args: &Arguments) -> Outcome {
    let majority = Majority::open(global, &args.lease.name).await?;
    let mut signals = Signals::listen()?;
    let mut reaper = Reaper::start()?;
    let outcome = tokio::select! {
        outcome = majority.acquire(global, &args.lease, args.options()) => outcome,
        signal = signals.next_termination() => Err(Failure::interrupted(signal)),
    };
    let outcome = match outcome {
        Ok(Some(lease)) => {
            let evict = majority.quorum.evict(&args.lease.name, lease.token());
            let completion = supervise(args, HeldLease::Quorum(lease), evict, &mut signals, &mut reaper).await;
            completion.and_then(Completion::outcome)
        }
        Ok(None) => Ok(args.exit_code_on_conflict()),
        Err(failure) => Err(failure),
    };
    majority.shutdown().await;
    outcome
}
