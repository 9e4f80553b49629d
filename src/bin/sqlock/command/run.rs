//! `sqlock run`: hold the lease, run the command, and have it dead before anyone else can hold.
//!
//! Three processes. This one holds the lease and starts the *command* in a process group of its own (`run/child.rs`), and
//! beside it a *watchdog* (`run/watchdog.rs`), which knows the deadline and kills the command should this process be stopped,
//! killed, or held up by a database. A terminal is shared with the command as a shell would do it (`run/terminal.rs`).

pub mod arguments;
mod child;
mod process_tree;
mod quorum;
mod schedule;
mod supervise;
mod terminal;
pub mod watchdog;

use std::time::Duration;

use tokio::time::timeout;

use crate::database::Database;
use crate::exit::{Failure, Outcome};
use crate::global::Global;
use crate::lease::HeldLease;
use crate::signals::Signals;
use crate::stderr;
use arguments::Arguments;
use supervise::{Completion, supervise};

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    let mut signals = Signals::listen()?;
    if args.quorum {
        return quorum::run(global, &args, &mut signals).await;
    }
    let db = Database::open(global).await?;
    let mut has_led = false;
    let outcome = loop {
        match hold_lease(&args, &db, &mut signals, has_led).await {
            Ok(Completion { stopped: Some(reason), .. }) if args.elect => {
                stderr::print_warning(&format!("{reason}; standing again"));
                has_led = true;
            }
            completion => break completion.and_then(Completion::outcome),
        }
    };
    let _ = timeout(Duration::from_secs(1), db.locks.shutdown()).await;
    outcome
}

/// Gets the lease, runs the command, and gives the lease back.
async fn hold_lease(
    args: &Arguments,
    db: &Database,
    signals: &mut Signals,
    has_led: bool,
) -> Result<Completion, Failure> {
    let mut request = args.lease.request(db)?;
    if let Some(at_least) = args.hold_at_least {
        request = request.hold_at_least(at_least);
    }
    if let Some(at_most) = args.max_hold {
        request = request.max_hold(at_most);
    }
    match args.lease.acquire(db, request, signals, has_led).await? {
        Some(lease) => supervise(args, HeldLease::Single(Box::new(lease)), signals).await,
        None => Ok(Completion::not_obtained(args)),
    }
}
