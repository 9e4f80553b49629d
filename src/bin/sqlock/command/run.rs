//! `sqlock run`: holds a lease while a command runs, and kills the command before the lease ends.
//!
//! There are three processes. This one holds the lease and starts the *command* in a process group
//! of its own (`run/child.rs`). It also starts a *watchdog* (`run/watchdog.rs`), which kills the
//! command at the deadline if this process is stopped, killed, or blocked by a database. The
//! terminal is shared as a shell shares it with a job (`run/terminal.rs`).

pub mod arguments;
mod child;
mod process_tree;
mod quorum;
mod reaper;
mod schedule;
mod supervise;
mod terminal;
pub mod watchdog;

use crate::acquisition::OutageLimit;
use crate::database::Database;
use crate::exit::{Failure, Outcome};
use crate::global::Global;
use crate::lease::HeldLease;
use crate::pool::LeaseFilter;
use crate::relocation;
use crate::signals::Signals;
use crate::stderr;
use arguments::Arguments;
use reaper::Reaper;
use supervise::{Completion, supervise};

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    if args.quorum {
        return quorum::run(global, &args).await;
    }
    // Reading the URL may block, and a signal must end it: until then, signals have no handlers.
    let mut db = Database::open(global, LeaseFilter::Name(&args.lease.name)).await?;
    let mut signals = Signals::listen()?;
    let mut reaper = Reaper::start()?;
    let mut outages = OutageLimit::Ttl;
    let outcome = loop {
        match hold_lease(global, &args, &mut db, &mut signals, &mut reaper, outages).await {
            Ok(Completion { stopped: Some(reason), is_interrupted: false, .. }) if args.elect => {
                stderr::print_warning(&format!("{reason}; acquiring again"));
                outages = OutageLimit::Unlimited;
            }
            completion => break completion.and_then(Completion::outcome),
        }
    };
    db.shutdown().await;
    outcome
}

/// Takes the lease, runs the command, and releases the lease.
async fn hold_lease(
    global: &Global,
    args: &Arguments,
    db: &mut Database,
    signals: &mut Signals,
    reaper: &mut Reaper,
    outages: OutageLimit,
) -> Result<Completion, Failure> {
    match relocation::acquire(global, db, &args.lease, args.options(), signals, outages).await? {
        Some(lease) => {
            let evict = db.locks.evict(&args.lease.name, lease.token());
            supervise(args, HeldLease::Single(Box::new(lease)), evict, signals, reaper).await
        }
        None => Ok(Completion::not_obtained(args)),
    }
}
