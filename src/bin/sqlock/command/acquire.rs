//! `sqlock acquire`: takes a lease and leaves it held, for the steps of a script.

use clap::Args;
use sqlock::Lease;
use sqlock::quorum::QuorumLease;
use tokio::time::timeout;

use crate::acquisition::{FREE_TIMEOUT, LeaseArgs, OutageLimit, free_unused};
use crate::database::Database;
use crate::describe;
use crate::exit::{self, Failure, Outcome};
use crate::global::Global;
use crate::majority::Majority;
use crate::pool::LeaseFilter;
use crate::relocation;
use crate::signals::Signals;
use crate::stderr::{self, quote};
use crate::stdout;

/// Acquire a lease and leave it held, for the steps of a CI job or a script.
///
/// Prints the lease as JSON: name, token, owner, expires_at. The lease is not renewed by itself:
/// give a --ttl that covers the step, renew with "sqlock renew NAME --token N", and release with
/// "sqlock release NAME --token N". Prefer "sqlock run" for a single command: it renews the lease,
/// and stops the command when the lease is lost.
#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    lease: LeaseArgs,
    /// Acquire the name on a majority of the databases that --database-url or DATABASE_URL names,
    /// as "sqlock run --quorum" does. Renew and release it with --quorum and the same databases.
    #[arg(long, conflicts_with_all = ["shared", "permits"])]
    quorum: bool,
}

pub async fn run(global: &Global, args: Arguments) -> Outcome {
    if args.quorum {
        return acquire_majority(global, &args.lease).await;
    }
    let mut db = Database::open(global, LeaseFilter::Name(&args.lease.name)).await?;
    let mut signals = Signals::listen()?;
    let options = args.lease.options().renew(false);
    let acquired = relocation::acquire(global, &mut db, &args.lease, options, &mut signals, OutageLimit::Ttl).await;
    let outcome = match acquired {
        Ok(Some(lease)) => print_and_keep(&db, lease, &mut signals).await,
        Ok(None) => Ok(args.lease.exit_code_on_conflict()),
        Err(failure) => Err(failure),
    };
    db.shutdown().await;
    outcome
}

/// Prints the lease and leaves it held, unless a signal comes before.
async fn print_and_keep(db: &Database, lease: Lease, signals: &mut Signals) -> Outcome {
    match signals.unless_terminated(print_lease(db, &lease)).await.and_then(|printed| printed) {
        // The script owns the lease now.
        Ok(()) => lease.export().map(|_| 0).map_err(Failure::from),
        // The token was not printed, so the script could not release the lease.
        Err(failure) => {
            if !matches!(timeout(FREE_TIMEOUT, free_unused(db, &lease)).await, Ok(Ok(()))) {
                let name = quote(lease.name().as_str());
                stderr::print_warning(&format!(
                    "{name} could not be released: it stays taken until its TTL has passed"
                ));
            }
            Err(failure)
        }
    }
}

async fn print_lease(db: &Database, lease: &Lease) -> Result<(), Failure> {
    match db.locks.holders(lease.name().as_str()).await {
        Ok(holders) => match holders.iter().find(|held| held.token == lease.token()) {
            Some(held) => stdout::print_json(&describe::grant_to_json(held)),
            None => Err(Failure::new(
                exit::LOST,
                format!("the lease on {} has ended already", quote(lease.name().as_str())),
            )),
        },
        // The lease is held even if its row cannot be read.
        Err(_) if lease.is_held() => {
            let expires_at = describe::format_expiry(lease.remaining());
            let (name, owner) = (lease.name().as_str(), Some(lease.owner()));
            stdout::print_json(&describe::estimated_grant_to_json(name, lease.token(), owner, &expires_at))
        }
        Err(error) => Err(error.into()),
    }
}

async fn acquire_majority(global: &Global, args: &LeaseArgs) -> Outcome {
    let majority = Majority::open(global, &args.name).await?;
    let mut signals = Signals::listen()?;
    let outcome = tokio::select! {
        outcome = majority.acquire(global, args, args.options().renew(false)) => outcome,
        signal = signals.next_termination() => Err(Failure::interrupted(signal)),
    };
    let outcome = match outcome {
        Ok(Some(lease)) => leave_held(&majority, lease, &mut signals).await,
        Ok(None) => Ok(args.exit_code_on_conflict()),
        Err(failure) => Err(failure),
    };
    majority.shutdown().await;
    outcome
}

/// Prints the lease on a majority and leaves it held, unless a signal comes before.
async fn leave_held(majority: &Majority, lease: QuorumLease, signals: &mut Signals) -> Outcome {
    let (name, owner, token) = (lease.name().clone(), lease.owner(), lease.token());
    // The script cannot release a lease whose token was not printed.
    let free = async |token| timeout(FREE_TIMEOUT, majority.quorum.evict(name.as_str(), token)).await;
    let detached = match signals.unless_terminated(lease.detach()).await {
        Ok(detached) => detached?,
        Err(interrupted) => {
            let _ = free(token).await;
            return Err(interrupted);
        }
    };
    let expires_at = describe::format_expiry(detached.remaining);
    let grant = describe::estimated_grant_to_json(name.as_str(), detached.token, Some(owner), &expires_at);
    let printed = stdout::print_json(&grant);
    if printed.is_err() {
        let _ = free(detached.token).await;
    }
    printed.map(|()| 0)
}
