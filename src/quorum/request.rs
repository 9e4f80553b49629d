//! A request for a lease on a majority.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use super::lease::QuorumLease;
use super::majority::{Majority, maintain};
use super::nodes::{Nodes, QuorumOptions};
use super::round::{Outcome, Round};
use crate::backoff::{Backoff, OUTAGE_TOLERANCE, ROUND_TRIP};
use crate::error::{Error, Result};
use crate::lease::options::{LeaseOptions, request_setters};
use crate::lease::run::{result_unless_lost, while_held};
use crate::name::LockName;
use crate::owner::Owner;

/// How often a try asks again when the votes are split.
const MAX_REPEATS: u32 = 4;

/// A request for a lease on a majority, made with [`Quorum::lease`](crate::quorum::Quorum::lease).
/// Nothing is sent until one of [`acquire`](Self::acquire), [`try_acquire`](Self::try_acquire) and
/// [`run`](Self::run) is awaited.
///
/// A database that was down and comes back joins the lease unless [`renew`](Self::renew) is off.
/// [`max_hold`](Self::max_hold) and [`hold_at_least`](Self::hold_at_least) count from the
/// completion of the majority.
#[derive(Clone)]
#[must_use = "a request does nothing until acquire, try_acquire or run is awaited"]
pub struct QuorumRequest {
    nodes: Arc<Nodes>,
    name: String,
    options: QuorumOptions,
}

request_setters!(QuorumRequest);

impl QuorumRequest {
    pub(super) fn new(nodes: Arc<Nodes>, name: String) -> Self {
        Self { nodes, name, options: QuorumOptions { lease: LeaseOptions::new(), node_timeout: None } }
    }

    fn options_mut(&mut self) -> &mut LeaseOptions {
        &mut self.options.lease
    }

    /// Sets how long a database may take to answer before it counts as down. By default a sixth of
    /// the TTL, at most one second. A longer limit leaves less of the lease after a slow
    /// acquisition.
    pub fn node_timeout(mut self, at_most: Duration) -> Self {
        self.options.node_timeout = Some(at_most);
        self
    }

    /// Acquires the lease on a majority, and waits while another owner holds it.
    ///
    /// Waiters of this process take turns in the order of their arrival; between processes there is
    /// no order.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] when the limit of [`wait`](Self::wait) was reached;
    /// [`Error::Unavailable`] when too few databases for a majority could be reached (for 3
    /// seconds, or until the limit of the wait); [`Error::Unsupported`] when there are no
    /// databases, or two of them are on one server; an error for bad input or
    /// [`Error::NotMigrated`] when it prevents a majority.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind on any database: all grants, including later ones,
    /// are released in the background.
    pub async fn acquire(self) -> Result<QuorumLease> {
        let start = Instant::now();
        let name = self.check()?;
        let left = || self.options.lease.wait.map(|wait| wait.saturating_sub(start.elapsed()));
        let timed_out = || Error::Timeout { name: name.clone(), waited: start.elapsed() };
        let turn = self.nodes.turns.get(&name);
        let _turn = match left() {
            None => turn.lock.lock().await,
            // A try does not wait for its turn.
            Some(Duration::ZERO) => {
                return self.attempt(&name, None, 0).await?.map_err(|refused| match refused {
                    NotAcquired::Taken { .. } => timed_out(),
                    NotAcquired::Unreachable(error) => error,
                });
            }
            Some(left) => {
                let locked = timeout(left, turn.lock.lock()).await;
                locked.map_err(|_| turn.failure().unwrap_or_else(timed_out))?
            }
        };
        if let Some(error) = turn.failure_throughout(start) {
            return Err(error);
        }
        let mut backoff =
            Backoff::between(Duration::from_millis(10), (self.options.lease.ttl / 10).min(Duration::from_millis(250)));
        let (mut last, mut taken, mut splits) = (None, false, 0);
        loop {
            let begun_at = Instant::now();
            let refused = match self.attempt(&name, left(), splits).await? {
                Ok(lease) => {
                    turn.answered();
                    return Ok(lease);
                }
                Err(refused) => refused,
            };
            // An attempt at the limit of the wait says nothing about the databases, unless they had
            // time to answer.
            let cut_short =
                left().is_some_and(|left| left.is_zero()) && begun_at.elapsed() < self.options.node_timeout();
            splits = if matches!(refused, NotAcquired::Taken { split: true }) { splits + 1 } else { 0 };
            match refused {
                NotAcquired::Taken { .. } => {
                    turn.answered();
                    (last, taken) = (None, true);
                }
                NotAcquired::Unreachable(_) if cut_short && (taken || begun_at.elapsed() < ROUND_TRIP) => {}
                NotAcquired::Unreachable(error) => {
                    let since = turn.failed(begun_at, &error).max(start);
                    if since.elapsed() >= OUTAGE_TOLERANCE {
                        return Err(error);
                    }
                    (last, taken) = (Some(error), false);
                }
            }
            let pause = backoff.step();
            match left() {
                Some(left) if left <= pause => {
                    sleep(left).await;
                    return Err(last.unwrap_or_else(timed_out));
                }
                _ => sleep(pause).await,
            }
        }
    }

    /// Acquires the lease if a majority grants it now. Returns `None` when another owner holds it
    /// or is acquiring it.
    ///
    /// Several clients that try a free name at the same moment may split the votes. They then try
    /// again a few times, at random intervals; possibly no client acquires the name.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), but never a timeout. [`wait`](Self::wait) has no effect.
    ///
    /// # Cancel safety
    ///
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(self) -> Result<Option<QuorumLease>> {
        let name = self.check()?;
        let mut backoff = Backoff::between(Duration::from_millis(10), Duration::from_millis(80));
        for splits in 0..=MAX_REPEATS {
            match self.attempt(&name, None, splits).await? {
                Ok(lease) => return Ok(Some(lease)),
                Err(NotAcquired::Taken { split: true }) if splits < MAX_REPEATS => sleep(backoff.step()).await,
                Err(NotAcquired::Taken { .. }) => break,
                Err(NotAcquired::Unreachable(error)) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Acquires the lease, runs the work while it is held, and releases it. When the lease is lost,
    /// the work is dropped at its next await point. Work that is delayed past the deadline, as by a
    /// stopped process, is not polled again.
    ///
    /// # Errors
    ///
    /// The errors of [`acquire`](Self::acquire), and [`Error::Lost`] when the lease ended before
    /// the work.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and releases the lease in the background.
    pub async fn run<F, T>(self, work: F) -> Result<T>
    where
        F: AsyncFnOnce(&QuorumLease) -> T,
    {
        let lease = self.acquire().await?;
        match while_held(work(&lease), || lease.is_held(), lease.lost()).await {
            Ok(done) => result_unless_lost(done, lease.release().await),
            Err(cause) => Err(lease.loss_error(cause)),
        }
    }

    fn check(&self) -> Result<LockName> {
        self.nodes.check()?;
        for locks in &self.nodes.locks {
            self.options.lease.check(&locks.client().settings)?;
        }
        LockName::new(&*self.name)
    }

    /// Asks all databases once, with a limit for each, after `splits` rounds in which the votes were
    /// split. Another attempt would not resolve the outer error.
    async fn attempt(
        &self,
        name: &LockName,
        within: Option<Duration>,
        splits: u32,
    ) -> Result<Result<QuorumLease, NotAcquired>> {
        let within = within.unwrap_or(Duration::MAX).min(self.options.node_timeout());
        let owner = Owner::random();
        let mut round = Round::new(Arc::clone(&self.nodes), name.clone(), owner, self.options.clone());
        round.ask_all(within);
        let (granted, token) = match round.outcome(within, splits).await {
            Outcome::Granted(granted, token) => (granted, token),
            Outcome::Taken { split } => return Ok(Err(NotAcquired::Taken { split })),
            Outcome::Unreachable(error) if error.is_retryable() => return Ok(Err(NotAcquired::Unreachable(error))),
            Outcome::Unreachable(error) => return Err(error),
        };
        let majority = Majority::new(name.clone(), token, owner, self.options.lease.hold_time(), &self.nodes, granted);
        if !majority.is_held() {
            let reason = "the first lease of the majority had ended before the last was granted".into();
            let late = Error::Unavailable { attempted: "acquire a majority", reason, source: None };
            return Ok(Err(NotAcquired::Unreachable(late)));
        }
        majority.start_hold_time();
        // The task takes later answers, and asks unreachable databases again.
        tokio::spawn(maintain(Arc::clone(&majority), round));
        Ok(Ok(QuorumLease::new(majority, self.options.node_timeout())))
    }
}

/// Why an attempt did not acquire a majority.
enum NotAcquired {
    /// `split`: the databases voted for different owners.
    Taken {
        split: bool,
    },
    Unreachable(Error),
}

impl fmt::Debug for QuorumRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumRequest")
            .field("name", &self.name)
            .field("ttl", &self.options.lease.ttl)
            .finish_non_exhaustive()
    }
}
