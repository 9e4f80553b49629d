//! A held majority, counted by the clocks of the leases on the single databases.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use super::nodes::Nodes;
use super::round::{Round, Vote};
use crate::clock::{CLOCK_CHECK_INTERVAL, Moment, pause_after_expiry};
use crate::engine::HoldTime;
use crate::error::{Error, LossCause, Result};
use crate::lease::handle::Lease;
use crate::name::LockName;
use crate::owner::Owner;
use crate::panics;
use crate::race::{first, race};
use crate::token::FencingToken;

/// The longest pause before a database without a lease is asked again, however long the TTL is.
const MAX_ASK_INTERVAL: Duration = Duration::from_secs(5);

/// How long a database is not asked again after it reported the end of the lease there: longer than
/// an operator's eviction takes to become known for all databases, by their heartbeats.
const AFTER_EVICTION: Duration = Duration::from_millis(2500);

pub(super) struct Majority {
    pub(super) name: LockName,
    pub(super) token: FencingToken,
    /// The owner of the leases on all databases.
    pub(super) owner: Owner,
    /// The number of databases that make a majority.
    pub(super) needed: usize,
    /// The limits of the holding, which count from `since`.
    hold_time: HoldTime,
    since: Moment,
    votes: Mutex<Votes>,
    ended: Notify,
    nodes: Arc<Nodes>,
}

/// The status of a majority, which ends once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Held,
    Released,
    Lost(LossCause),
}

struct Votes {
    /// The lease on each database, if any.
    leases: Vec<Option<Lease>>,
    /// The moment before which each database is not asked for a lease.
    ask_at: Vec<Moment>,
    status: Status,
}

impl Majority {
    pub(super) fn new(
        name: LockName,
        token: FencingToken,
        owner: Owner,
        hold_time: HoldTime,
        nodes: &Arc<Nodes>,
        votes: Vec<Vote>,
    ) -> Arc<Self> {
        let mut leases: Vec<Option<Lease>> = nodes.locks.iter().map(|_| None).collect();
        for (node, lease) in votes {
            leases[node] = Some(lease);
        }
        let ask_at = vec![Moment::default(); leases.len()];
        Arc::new(Self {
            name,
            token,
            owner,
            needed: nodes.needed,
            hold_time,
            since: nodes.now(),
            votes: Mutex::new(Votes { leases, ask_at, status: Status::Held }),
            ended: Notify::new(),
            nodes: Arc::clone(nodes),
        })
    }

    /// Sets the limits of the holding on each database. Before this, a dropped lease is not kept.
    pub(super) fn start_hold_time(&self) {
        self.lock_current_state().leases.iter_mut().flatten().for_each(|lease| lease.start_hold_time(self.hold_time));
    }

    pub(super) fn is_held(&self) -> bool {
        self.lock_current_state().status == Status::Held
    }

    pub(super) fn check(&self) -> Result<()> {
        match self.lock_current_state().status {
            Status::Held => Ok(()),
            Status::Lost(cause) => Err(self.loss_error(cause)),
            Status::Released => Err(self.loss_error(LossCause::Superseded)),
        }
    }

    pub(super) fn loss_error(&self, cause: LossCause) -> Error {
        Error::Lost { name: self.name.clone(), token: self.token, cause }
    }

    /// Returns the number of databases on which the lease is held.
    pub(super) fn votes(&self) -> usize {
        let votes = self.lock_current_state();
        if votes.status == Status::Held { votes.count() } else { 0 }
    }

    /// Returns whether the lease is held on all databases.
    pub(super) fn has_all_votes(&self) -> bool {
        let votes = self.lock_current_state();
        votes.count() == votes.leases.len()
    }

    /// Returns the time until fewer leases than a majority are safe.
    pub(super) fn remaining(&self) -> Duration {
        let votes = self.lock_current_state();
        if votes.status != Status::Held {
            return Duration::ZERO;
        }
        let remaining = votes.leases.iter().flatten().map(Lease::remaining).collect();
        remaining_of_majority(remaining, self.needed).unwrap_or_default()
    }

    /// Waits until the majority is lost.
    pub(super) async fn lost(&self) -> LossCause {
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            // From here on no end is missed.
            ended.as_mut().enable();
            if let Status::Lost(cause) = self.lock_current_state().status {
                return cause;
            }
            // The maintaining task notifies. If it cannot run, the clock check ends the wait.
            let _ = timeout(self.remaining().min(CLOCK_CHECK_INTERVAL), ended).await;
        }
    }

    /// Waits until the holder is asked on one of the databases to release the lease.
    pub(super) async fn revoke_requested(&self) {
        loop {
            let requests: Vec<_> =
                self.lock_current_state().leases.iter().flatten().map(Lease::revoke_request).collect();
            // Databases join the lease later.
            if timeout(CLOCK_CHECK_INTERVAL, first(requests)).await.is_ok() {
                return;
            }
        }
    }

    /// Starts the extension of all leases.
    pub(super) fn start_extension(
        &self,
        ttl: Duration,
    ) -> Result<Vec<impl Future<Output = Result<()>> + Send + use<>>> {
        self.check()?;
        let votes = self.lock_current_state();
        let mut extensions = Vec::new();
        for lease in votes.leases.iter().flatten() {
            match lease.start_extension(ttl) {
                Ok(extension) => extensions.push(extension),
                Err(error) if error.is_lost() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(extensions)
    }

    /// Ends the majority as released, and returns its leases. The leases of a lost majority remain,
    /// and end with [`end_votes`](Self::end_votes).
    pub(super) fn take_leases(&self) -> Result<Vec<Lease>> {
        let mut votes = self.lock_current_state();
        match votes.status {
            Status::Held => {
                votes.status = Status::Released;
                let leases = votes.take();
                drop(votes);
                self.ended.notify_waiters();
                let (held, ended): (Vec<Lease>, Vec<Lease>) = leases.into_iter().partition(Lease::is_held);
                drop(ended);
                Ok(held)
            }
            Status::Lost(cause) => Err(self.loss_error(cause)),
            Status::Released => Ok(Vec::new()),
        }
    }

    /// Ends the remaining leases of a lost majority. After an expiry the holder has the same time
    /// to stop its work as after the expiry of a single lease: until then another owner cannot use
    /// these databases for a majority.
    async fn end_votes(&self, ttl: Duration) {
        let Status::Lost(cause) = self.lock_current_state().status else {
            return;
        };
        if cause == LossCause::Expired {
            sleep(pause_after_expiry(ttl)).await;
        }
        let leases = self.lock_current_state().take();
        for lease in leases {
            end_vote(lease, cause);
        }
    }

    /// Adds the lease on another database. The lease cannot revive a lost majority, because another
    /// owner may have held the name since.
    fn add_vote(&self, (node, mut lease): Vote) {
        let mut votes = self.lock_current_state();
        let unused = if votes.status == Status::Held {
            lease.start_hold_time(self.hold_time.after(self.nodes.now().since(self.since)));
            votes.leases[node].replace(lease)
        } else {
            Some(lease)
        };
        // Leases are dropped without the lock, because their release locks other state.
        drop(votes);
        drop(unused);
    }

    /// Removes ended leases, and returns the databases to ask for a lease.
    fn missing_nodes(&self) -> Vec<usize> {
        let now = self.nodes.now();
        let mut votes = self.lock_current_state();
        let leases = votes.leases.iter_mut().enumerate();
        let ended = leases.filter_map(|(node, lease)| Some((node, lease.take_if(|lease| !lease.is_held())?)));
        let ended: Vec<(usize, Lease)> = ended.collect();
        // The losses are reported, and the leases dropped, without the lock.
        drop(votes);
        let evicted = ended.iter().filter(|(_, lease)| lease.loss_cause() == LossCause::Superseded);
        let evicted: Vec<usize> = evicted.map(|(node, _)| *node).collect();
        drop(ended);
        let mut votes = self.lock_current_state();
        for node in evicted {
            votes.ask_at[node] = now + AFTER_EVICTION;
        }
        let Votes { leases, ask_at, .. } = &*votes;
        let missing = leases.iter().zip(ask_at).enumerate();
        missing.filter(|(_, (lease, ask_at))| lease.is_none() && **ask_at <= now).map(|(node, _)| node).collect()
    }

    /// Waits until the majority has ended, or a lease on one database is lost.
    async fn wait_for_change(&self) {
        let ended = self.ended.notified();
        tokio::pin!(ended);
        ended.as_mut().enable();
        let losses: Vec<_> = {
            let votes = self.lock_current_state();
            if votes.status != Status::Held {
                return;
            }
            votes.leases.iter().flatten().map(Lease::loss_future).collect()
        };
        let _ = race(ended, std::pin::pin!(first(losses))).await;
    }

    /// Locks the votes, and updates the status as of now.
    fn lock_current_state(&self) -> MutexGuard<'_, Votes> {
        let votes = self.lock();
        if votes.status != Status::Held || votes.count() >= self.needed {
            return votes;
        }
        // No vote is added from now on. The losses are reported without the lock: a subscriber of
        // the application may ask for the state of this lease.
        let causes = votes.leases.iter().flatten().filter(|lease| !lease.is_held()).map(Lease::loss_reader);
        let causes: Vec<_> = causes.collect();
        drop(votes);
        let cause = first_cause(causes.into_iter().map(|read| read()));
        let mut votes = self.lock();
        if votes.status == Status::Held {
            votes.status = Status::Lost(cause);
            drop(votes);
            self.ended.notify_waiters();
            self.report_loss(cause);
            votes = self.lock();
        }
        votes
    }

    fn lock(&self) -> MutexGuard<'_, Votes> {
        self.votes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report_loss(&self, cause: LossCause) {
        let _ = panics::caught(|| match cause.is_ordered() {
            true => {
                tracing::info!(name = self.name.as_str(), token = %self.token, %cause, "a lease on a majority has ended")
            }
            false => {
                tracing::warn!(name = self.name.as_str(), token = %self.token, %cause, "lost the majority for a lease")
            }
        });
    }
}

/// Returns the cause of a lost majority: that of a lease, or else expiry.
fn first_cause(causes: impl Iterator<Item = LossCause>) -> LossCause {
    causes.fold(LossCause::Expired, |cause, other| if cause == LossCause::Expired { other } else { cause })
}

/// Ends the lease on one database after the loss of the majority. The name stays taken for
/// `hold_at_least` only where a single lease would keep it.
fn end_vote(lease: Lease, cause: LossCause) {
    match cause {
        LossCause::MaxHold | LossCause::Shutdown => drop(lease),
        _ => lease.discard(),
    }
}

impl Votes {
    fn count(&self) -> usize {
        self.leases.iter().flatten().filter(|lease| lease.is_held()).count()
    }

    fn take(&mut self) -> Vec<Lease> {
        self.leases.iter_mut().filter_map(Option::take).collect()
    }
}

/// Returns the time until fewer than `needed` of the leases with these times are safe. `None`: they
/// are fewer already.
pub(super) fn remaining_of_majority(mut remaining: Vec<Duration>, needed: usize) -> Option<Duration> {
    remaining.sort_unstable_by(|a, b| b.cmp(a));
    remaining.get(needed - 1).copied()
}

/// Maintains a majority until it ends: adds late votes, and asks databases without a lease again.
pub(super) async fn maintain(majority: Arc<Majority>, mut round: Round) {
    let period = (round.options.lease.ttl / 3).clamp(Duration::from_millis(1), MAX_ASK_INTERVAL);
    let within = round.options.node_timeout().max(period);
    let mut next = Instant::now() + period;
    while majority.is_held() {
        let missing = majority.missing_nodes();
        if Instant::now() >= next {
            next += period;
            next = next.max(Instant::now());
            for node in missing {
                if round.options.lease.renew {
                    round.ask(node, within);
                }
            }
        }
        let pause = next.saturating_duration_since(Instant::now());
        let change = std::pin::pin!(majority.wait_for_change());
        let answer = std::pin::pin!(timeout(pause, round.next_answer(within)));
        if let Err(Ok((node, Ok(Some(lease))))) = race(change, answer).await {
            majority.add_vote((node, lease));
        }
    }
    let ttl = round.options.lease.without_limits().ttl;
    // Releases late votes.
    drop(round);
    majority.end_votes(ttl).await;
}
