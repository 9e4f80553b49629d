//! What is held on a majority, by the clocks of the leases on the single databases.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::nodes::Nodes;
use super::round::{Round, Vote};
use crate::clock::CLOCK_CHECK_INTERVAL;
use crate::error::{Error, LossCause, Result};
use crate::lease::handle::Lease;
use crate::lease::run::race;
use crate::name::LockName;
use crate::owner::Owner;
use crate::token::FencingToken;

/// A majority, as its holder may see it.
pub(super) struct Majority {
    pub(super) name: LockName,
    pub(super) token: FencingToken,
    /// One and the same on all databases.
    pub(super) owner: Owner,
    /// How many make a majority.
    pub(super) needed: usize,
    votes: Mutex<Votes>,
    ended: Notify,
}

/// What has become of the majority. It begins held and ends once, in one of the other ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Held,
    Released,
    Lost(LossCause),
}

struct Votes {
    /// For each database: the lease there, if there is one.
    leases: Vec<Option<Lease>>,
    status: Status,
}

impl Majority {
    pub(super) fn new(name: LockName, token: FencingToken, owner: Owner, nodes: &Nodes, votes: Vec<Vote>) -> Arc<Self> {
        let mut leases: Vec<Option<Lease>> = nodes.locks.iter().map(|_| None).collect();
        for (node, lease) in votes {
            leases[node] = Some(lease);
        }
        let votes = Mutex::new(Votes { leases, status: Status::Held });
        Arc::new(Self { name, token, owner, needed: nodes.needed(), votes, ended: Notify::new() })
    }

    pub(super) fn is_held(&self) -> bool {
        self.update().status == Status::Held
    }

    pub(super) fn check(&self) -> Result<()> {
        match self.update().status {
            Status::Held => Ok(()),
            Status::Lost(cause) => Err(self.loss_error(cause)),
            Status::Released => Err(self.loss_error(LossCause::Superseded)),
        }
    }

    pub(super) fn loss_error(&self, cause: LossCause) -> Error {
        Error::Lost { name: self.name.clone(), token: self.token, cause }
    }

    /// On how many databases it is held.
    pub(super) fn votes(&self) -> usize {
        let votes = self.update();
        if votes.status == Status::Held { votes.count() } else { 0 }
    }

    /// Until the first moment at which fewer than a majority are safe.
    pub(super) fn remaining(&self) -> Duration {
        let votes = self.update();
        if votes.status != Status::Held {
            return Duration::ZERO;
        }
        let mut left: Vec<Duration> = votes.leases.iter().flatten().map(Lease::remaining).collect();
        left.sort_unstable_by(|a, b| b.cmp(a));
        left.get(self.needed - 1).copied().unwrap_or_default()
    }

    /// Completes when it is lost.
    pub(super) async fn lost(&self) -> LossCause {
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            // From here on no end is missed.
            ended.as_mut().enable();
            if let Status::Lost(cause) = self.update().status {
                return cause;
            }
            // The task that tends it wakes us. Should that not get to run, a look at the clock now and then does.
            let _ = timeout(self.remaining().min(CLOCK_CHECK_INTERVAL), ended).await;
        }
    }

    /// Extensions of all its leases, on their way.
    pub(super) fn start_extension(
        &self,
        ttl: Duration,
    ) -> Result<Vec<impl Future<Output = Result<()>> + Send + use<>>> {
        self.check()?;
        let votes = self.update();
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

    /// Ends it as given back: these leases go with it.
    pub(super) fn take_leases(&self) -> Result<Vec<Lease>> {
        let mut votes = self.update();
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
            Status::Lost(cause) => {
                let leases = votes.take();
                drop(votes);
                drop(leases);
                Err(self.loss_error(cause))
            }
            Status::Released => Ok(Vec::new()),
        }
    }

    /// Makes a lease on another database part of it. It comes too late for a majority that had been lost without it: in between
    /// somebody else may have had that.
    fn add_vote(&self, (node, lease): Vote) {
        let mut votes = self.update();
        let unused = if votes.status == Status::Held { votes.leases[node].replace(lease) } else { Some(lease) };
        // Never while the votes are locked: giving back is somebody else's business.
        drop(votes);
        drop(unused);
    }

    /// Which databases it is not held on. What has ended there is cleared away.
    fn missing_nodes(&self) -> Vec<usize> {
        let mut votes = self.update();
        let mut ended = Vec::new();
        for lease in &mut votes.leases {
            if lease.as_ref().is_some_and(|lease| !lease.is_held()) {
                ended.extend(lease.take());
            }
        }
        let missing =
            votes.leases.iter().enumerate().filter(|(_, lease)| lease.is_none()).map(|(node, _)| node).collect();
        drop(votes);
        drop(ended);
        missing
    }

    /// Completes when it has ended, or has been lost on one of the databases.
    async fn wait_for_change(&self) {
        let ended = self.ended.notified();
        tokio::pin!(ended);
        ended.as_mut().enable();
        let loss_future: Vec<_> = {
            let votes = self.update();
            if votes.status != Status::Held {
                return;
            }
            votes.leases.iter().flatten().map(Lease::loss_future).collect()
        };
        let mut losses: Vec<Pin<Box<dyn Future<Output = LossCause> + Send>>> = Vec::new();
        for loss in loss_future {
            losses.push(Box::pin(loss));
        }
        std::future::poll_fn(|cx| {
            let ready =
                ended.as_mut().poll(cx).is_ready() || losses.iter_mut().any(|loss| loss.as_mut().poll(cx).is_ready());
            if ready { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// The votes, counted up to this moment.
    fn update(&self) -> MutexGuard<'_, Votes> {
        let mut votes = self.votes.lock().unwrap_or_else(PoisonError::into_inner);
        if votes.status == Status::Held && votes.count() < self.needed {
            let cause = votes.cause();
            tracing::warn!(name = %self.name, token = %self.token, %cause, "lost the majority for a lease");
            votes.status = Status::Lost(cause);
            self.ended.notify_waiters();
        }
        votes
    }
}

impl Votes {
    fn count(&self) -> usize {
        self.leases.iter().flatten().filter(|lease| lease.is_held()).count()
    }

    /// Why there are not enough of them: time, unless there was something else.
    fn cause(&self) -> LossCause {
        let causes = self.leases.iter().flatten().filter(|lease| !lease.is_held()).map(Lease::loss_cause);
        causes.fold(LossCause::Expired, |cause, other| if cause == LossCause::Expired { other } else { cause })
    }

    fn take(&mut self) -> Vec<Lease> {
        self.leases.iter_mut().filter_map(Option::take).collect()
    }
}

/// Looks after it until it ends: takes in the votes that come late, and asks those who did not vote, or have forgotten, again.
pub(super) async fn maintain(majority: Arc<Majority>, mut round: Round) {
    let period = (round.options.ttl / 3).max(Duration::from_millis(1));
    let within = round.options.node_timeout().max(period);
    let mut next = Instant::now() + period;
    while majority.is_held() {
        let missing = majority.missing_nodes();
        if Instant::now() >= next {
            next += period;
            next = next.max(Instant::now());
            for node in missing {
                if round.options.renew {
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
    // What is left of it is nobody's use.
    drop(majority.take_leases());
}
