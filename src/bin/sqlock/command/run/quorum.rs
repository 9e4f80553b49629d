//! `sqlock run --quorum`: runs the command under a lease on a majority of independent databases.

use std::time::Duration;

use sqlock::Error;
use sqlock::quorum::{Quorum, QuorumLease};
use tokio::task::JoinSet;
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
    let inspect_timeout =
        args.lease.timeout.map_or(INSPECT_TIMEOUT, |at_most| at_most.clamp(MIN_INSPECT_TIMEOUT, INSPECT_TIMEOUT));
    let enclosing_owners = environment::enclosing_owners();
    let mut inspections = JoinSet::new();
    let count = databases.len();
    for (i, db) in databases.into_iter().enumerate() {
        let name = name.clone();
        let node = format!("database {} of {count} ({})", i + 1, db.location);
        inspections.spawn(async move { (node, timeout(inspect_timeout, db.locks.inspect(&name)).await) });
    }
    while let Some(inspected) = inspections.join_next().await {
        match inspected {
            Ok((_, Ok(Ok(Some(held))))) if held.owner.is_some_and(|owner| enclosing_owners.contains(&owner)) => {
                return Err(Failure::usage(format!(
                    "{} is held by the enclosing sqlock run: this one would wait for ever",
                    quote(&name)
                )));
            }
            // The database may have lost its data, and the votes with them.
            Ok((node, Ok(Err(Error::NotMigrated { .. })))) => {
                return Err(Failure::configuration(format!(
                    "{node} has no sqlock tables: run \"sqlock migrate\" with its URL. If it has lost its data, wait first until \
                     the longest TTL in use has passed: it may have granted names that are still held"
                )));
            }
            // A minority may be down.
            Ok((_, Ok(Err(error)))) if !matches!(error, Error::Unavailable { .. }) => return Err(error.into()),
            _ => {}
        }
    }
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
    stderr::print_note(&format!("{} not obtained{within}: somebody else was at it", quote(&name)));
    Ok(None)
}
