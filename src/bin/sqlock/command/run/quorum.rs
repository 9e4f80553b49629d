//! `sqlock run --quorum`: runs the command under a lease on a majority of independent databases.

use std::time::Duration;

use sqlock::Error;
use sqlock::inspect::LeaseInfo;
use sqlock::quorum::{Quorum, QuorumLease};
use tokio::task::JoinSet;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout};

use super::arguments::Arguments;
use super::supervise::{Completion, supervise};
use crate::acquisition::Outage;
use crate::database::Database;
use crate::duration;
use crate::environment;
use crate::exit::{Failure, Outcome};
use crate::global::Global;
use crate::lease::HeldLease;
use crate::signals::Signals;
use crate::stderr::{self, quote};

/// What the inspection of a database has found: its description, and its holder.
type Inspected = (String, Result<sqlock::Result<Option<LeaseInfo>>, Elapsed>);

/// How long a database may take to tell the holder of the name: it may be the one that is down.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(4);

/// The least of that when --timeout is shorter: a running database answers in this time.
const MIN_INSPECT_TIMEOUT: Duration = Duration::from_secs(1);

pub async fn run(global: &Global, args: &Arguments, signals: &mut Signals) -> Outcome {
    let databases = Database::open_each(global).await?;
    let clients: Vec<_> = databases.iter().map(|db| db.locks.clone()).collect();
    let quorum = Quorum::new(clients.clone());
    let outcome = tokio::select! {
        outcome = acquire(args, databases, &quorum) => outcome,
        signal = signals.next_termination() => Err(Failure::interrupted(signal)),
    };
    let outcome = match outcome {
        Ok(Some(lease)) => supervise(args, HeldLease::Quorum(lease), signals).await.and_then(Completion::outcome),
        Ok(None) => Ok(args.exit_code_on_conflict()),
        Err(failure) => Err(failure),
    };
    let mut shutdowns = JoinSet::new();
    for client in clients {
        shutdowns.spawn(async move { timeout(Duration::from_secs(1), client.shutdown()).await });
    }
    shutdowns.join_all().await;
    outcome
}

async fn acquire(args: &Arguments, databases: Vec<Database>, quorum: &Quorum) -> Result<Option<QuorumLease>, Failure> {
    let name = args.lease.name.clone();
    let start = Instant::now();
    inspect_majority(args, databases).await?;
    let request = quorum.lease(&name).ttl(args.lease.ttl).label(&args.lease.label);
    let left = || args.lease.timeout.map(|at_most| at_most.saturating_sub(start.elapsed()));
    let mut outage = Outage::default();
    let acquired = loop {
        let acquired = match left() {
            _ if args.lease.nonblock => request.clone().try_acquire().await,
            Some(left) => request.clone().wait(left).acquire().await.map(Some),
            None => request.clone().acquire().await.map(Some),
        };
        match (acquired, left()) {
            (Err(error @ Error::Unavailable { .. }), Some(left)) if !left.is_zero() => {
                outage.wait_for_retry(error.into(), Some(left)).await?;
            }
            (acquired, _) => break acquired,
        }
    };
    let within = match (&acquired, args.lease.timeout) {
        (Ok(Some(_)), _) => return Ok(acquired?),
        (Ok(None), _) => String::new(),
        (Err(error), Some(at_most)) if error.is_timeout() => format!(" within {}", duration::format_exact(at_most)),
        _ => return Ok(acquired?),
    };
    stderr::print_note(&format!("{} not obtained{within}: another process requested it", quote(&name)));
    Ok(None)
}

/// Asks all databases for the holder of the name, until a majority has answered. Warns about each
/// that cannot vote, also later. Fails if too few can vote, or if an enclosing run holds the name.
async fn inspect_majority(args: &Arguments, databases: Vec<Database>) -> Result<(), Failure> {
    let timeout_of_each =
        args.lease.timeout.map_or(INSPECT_TIMEOUT, |at_most| at_most.clamp(MIN_INSPECT_TIMEOUT, INSPECT_TIMEOUT));
    let (count, needed) = (databases.len(), databases.len() / 2 + 1);
    let mut inspections: JoinSet<Inspected> = JoinSet::new();
    for (i, db) in databases.into_iter().enumerate() {
        let name = args.lease.name.clone();
        let node = format!("database {} of {count} ({})", i + 1, db.location);
        inspections.spawn(async move { (node, timeout(timeout_of_each, db.locks.inspect(&name)).await) });
    }
    let enclosing_owners = environment::enclosing_owners();
    let (mut answered, mut unusable) = (0, 0);
    while answered < needed
        && let Some(inspected) = inspections.join_next().await
    {
        match inspected {
            Ok((_, Ok(Ok(Some(held))))) if held.owner.is_some_and(|owner| enclosing_owners.contains(&owner)) => {
                return Err(Failure::usage(format!(
                    "{} is held by the enclosing sqlock run: this one would wait for ever",
                    quote(&args.lease.name)
                )));
            }
            Ok((_, Ok(Ok(_)))) => answered += 1,
            Ok((node, Ok(Err(error)))) => {
                if let Some(reason) = describe_unusable(&node, error) {
                    unusable += 1;
                    if count - unusable < needed {
                        return Err(Failure::configuration(reason));
                    }
                    stderr::print_warning(&reason);
                }
            }
            // It did not answer. A minority may be down.
            _ => {}
        }
    }
    // The command does not wait for a minority that is down.
    tokio::spawn(async move {
        while let Some(inspected) = inspections.join_next().await {
            if let Ok((node, Ok(Err(error)))) = inspected
                && let Some(reason) = describe_unusable(&node, error)
            {
                stderr::print_warning(&reason);
            }
        }
    });
    Ok(())
}

/// Describes a database that cannot vote until an operator changes it. `None`: it is out of reach.
fn describe_unusable(node: &str, error: Error) -> Option<String> {
    match error {
        Error::Unavailable { .. } => None,
        // It may have lost its data, so the tables are not created in passing.
        Error::NotMigrated { .. } => Some(format!(
            "{node} has no sqlock tables and does not vote: run \"sqlock migrate\" with its URL. It votes when its tables are \
             older than the TTL"
        )),
        error => Some(format!("{node} does not vote: {error}")),
    }
}
