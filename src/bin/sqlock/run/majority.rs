//! `sqlock run --quorum`: the same under a lease on a majority of independent databases.

use std::time::Duration;

use sqlock::Error;
use sqlock::quorum::{Quorum, QuorumLease};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::{Arguments, Ended, child, work};
use crate::database::Database;
use crate::durations;
use crate::exit::{Failure, Outcome};
use crate::held::Held;
use crate::obtain::Outage;
use crate::options::Global;
use crate::say::{self, quoted};
use crate::signals::Signals;

/// How long one of them may take to tell who holds the name: it may be the one that is down.
const PATIENCE: Duration = Duration::from_secs(4);

/// The same with a --timeout that is shorter: one that is there can answer.
const SHORTEST_LOOK: Duration = Duration::from_secs(1);

pub async fn run(global: &Global, args: &Arguments, signals: &mut Signals) -> Outcome {
    let all = Database::open_each(global).await?;
    let clients: Vec<_> = all.iter().map(|db| db.locks.clone()).collect();
    let quorum = Quorum::new(clients.clone());
    let outcome = tokio::select! {
        outcome = obtain(args, all, &quorum) => outcome,
        signal = signals.next_that_ends() => Err(Failure::interrupted(signal)),
    };
    let outcome = match outcome {
        Ok(Some(lease)) => work(args, Held::Majority(lease), signals).await.and_then(Ended::outcome),
        Ok(None) => args.refused().outcome(),
        Err(failure) => Err(failure),
    };
    let mut ends = JoinSet::new();
    for client in clients {
        ends.spawn(async move { timeout(Duration::from_secs(1), client.shutdown()).await });
    }
    ends.join_all().await;
    outcome
}

async fn obtain(args: &Arguments, all: Vec<Database>, quorum: &Quorum) -> Result<Option<QuorumLease>, Failure> {
    let name = args.terms.name.clone();
    let start = Instant::now();
    let patience = args.terms.timeout.map_or(PATIENCE, |at_most| at_most.clamp(SHORTEST_LOOK, PATIENCE));
    let around = child::enclosing_owners();
    let mut ready = JoinSet::new();
    let count = all.len();
    for (i, db) in all.into_iter().enumerate() {
        let name = name.clone();
        let node = format!("database {} of {count} ({})", i + 1, db.place);
        ready.spawn(async move { (node, timeout(patience, db.locks.inspect(&name)).await) });
    }
    while let Some(looked) = ready.join_next().await {
        match looked {
            Ok((_, Ok(Ok(Some(held))))) if held.owner.is_some_and(|owner| around.contains(&owner)) => {
                return Err(Failure::usage(format!(
                    "{}: the sqlock run around this one holds it; in here, this one would wait for ever",
                    quoted(&name)
                )));
            }
            // It may have lost its data, and with them the votes that it has given.
            Ok((node, Ok(Err(Error::NotMigrated { .. })))) => {
                return Err(Failure::configuration(format!(
                    "{node} has no sqlock tables. A new database: run \"sqlock migrate\" with its URL. One that has lost its \
                     data: do so when the longest TTL in use has passed, since it may have granted names that are still held"
                )));
            }
            // One that is down is what the others are for.
            Ok((_, Ok(Err(error)))) if !matches!(error, Error::Unavailable { .. }) => return Err(error.into()),
            _ => {}
        }
    }
    let request = quorum.lease(&name).ttl(args.terms.ttl).label(&args.terms.label);
    let left = || args.terms.timeout.map(|at_most| at_most.saturating_sub(start.elapsed()));
    let mut outage = Outage::default();
    let obtained = loop {
        let obtained = match left() {
            _ if args.terms.nonblock => request.clone().try_acquire().await,
            Some(left) => request.clone().wait(left).acquire().await.map(Some),
            None => request.clone().acquire().await.map(Some),
        };
        match (obtained, left()) {
            (Err(error @ Error::Unavailable { .. }), Some(left)) if !left.is_zero() => {
                outage.pause(error.into(), Some(left)).await?;
            }
            (obtained, _) => break obtained,
        }
    };
    let within = match (&obtained, args.terms.timeout) {
        (Ok(Some(_)), _) => return Ok(obtained?),
        (Ok(None), _) => String::new(),
        (Err(error), Some(at_most)) if error.is_timeout() => format!(" within {}", durations::show_exactly(at_most)),
        _ => return Ok(obtained?),
    };
    say::note(&format!("{} not obtained{within}: somebody else was at it", quoted(&name)));
    Ok(None)
}
