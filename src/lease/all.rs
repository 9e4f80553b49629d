//! Acquires several names, all or none.
//!
//! The names are acquired one after the other, in the order of their bytes, each in its queue like
//! any other lease. A caller that waits for a name holds only names that come before it, so no
//! circle of callers waits for each other, in any order of names: the ordered resources of J. W.
//! Havender, "Avoiding deadlock in multitasking systems", IBM Systems Journal 7(2), 1968. When one
//! of the names cannot be acquired, those acquired so far are released.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use sqlx::Transaction;
use tokio::time::{Instant, timeout};

use super::handle::Lease;
use super::refusal::refusal_error;
use super::request::{LeaseRequest, TRY_TIMEOUT};
use super::run::{unless_lost, while_held};
use crate::backend::Database;
use crate::engine::{Patience, Refusal};
use crate::error::{Error, LossCause, Result};
use crate::name::LockName;
use crate::owner::Owner;
use crate::token::FencingToken;

/// How long a failed request waits for the release of the acquired names after its limit: a running
/// database answers in this time.
const RELEASE_GRACE: Duration = Duration::from_millis(100);

/// The most names in one request.
const MAX_NAMES: usize = 64;

/// A request for the leases on several names, made with
/// [`Locks::lease_all`](crate::Locks::lease_all). Nothing is sent until one of
/// [`acquire`](Self::acquire), [`try_acquire`](Self::try_acquire) and [`run`](Self::run) is
/// awaited.
///
/// ```
/// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
/// use std::time::Duration;
///
/// let both = locks.lease_all(["account/7", "account/3"]).wait(Duration::from_secs(5)).acquire().await?;
/// assert!(both.token("account/3").is_some());
/// # both.release().await
/// # }
/// ```
///
/// The names are acquired in the order of their bytes, each in its queue like any other lease, and
/// those acquired so far are held while the request waits for the others. So callers that want some
/// of the same names do not deadlock, in whatever order they name them, unless a caller holds some
/// names already and then requests more: request all at once. The caller receives all leases, or an
/// error and none.
#[derive(Clone, Debug)]
#[must_use = "a request does nothing until acquire, try_acquire or run is awaited"]
pub struct LeaseAllRequest {
    request: LeaseRequest,
    names: Vec<String>,
}

impl LeaseAllRequest {
    pub(crate) fn new(request: LeaseRequest, names: Vec<String>) -> Self {
        Self { request, names }
    }

    /// Sets the TTL of each lease, as [`LeaseRequest::ttl`].
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.request = self.request.ttl(ttl);
        self
    }

    /// Limits the wait for all names together, as [`LeaseRequest::wait`]. After the limit, the names
    /// that were acquired are released in the background if the database does not answer at once.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.request = self.request.wait(at_most);
        self
    }

    /// Sets whether the leases are renewed, as [`LeaseRequest::renew`].
    pub fn renew(mut self, renew: bool) -> Self {
        self.request = self.request.renew(renew);
        self
    }

    /// Limits the holding of all names together, as [`LeaseRequest::max_hold`]. The time counts from
    /// the last grant: the wait for the other names is no part of it.
    pub fn max_hold(mut self, at_most: Duration) -> Self {
        self.request = self.request.max_hold(at_most);
        self
    }

    /// Sets the label, as [`LeaseRequest::label`] does.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.request = self.request.label(label);
        self
    }

    /// Sets the owner, as [`LeaseRequest::owner`]: names that this owner holds already are
    /// re-entered.
    pub fn owner(mut self, owner: Owner) -> Self {
        self.request = self.request.owner(owner);
        self
    }

    /// Acquires all names, and waits in their queues if necessary.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], with the name that was not free, when the limit of [`wait`](Self::wait)
    /// was reached. [`Error::Names`] when no name was given, or more than 64 different ones.
    /// [`Error::Lost`] when a lease ended during the wait for another. Otherwise those of
    /// [`LeaseRequest::acquire`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the queue, and releases what was acquired.
    pub async fn acquire(self) -> Result<LeaseAll> {
        let start = Instant::now();
        let now = self.request.client().now();
        let (patience, limit) = match self.request.wait_limit() {
            Some(wait) if wait.is_zero() => (Patience::Try(now + TRY_TIMEOUT), Some(TRY_TIMEOUT)),
            wait => (Patience::Wait(wait.map(|wait| now + wait)), wait),
        };
        let acquired = self.acquire_in_order(patience, limit, start).await?;
        acquired.map_err(|name| Error::Timeout { name, waited: start.elapsed() })
    }

    /// Acquires all names if each is free and no waiter is in its queue. Returns `None`, and holds
    /// no name, otherwise.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), but never a timeout. [`wait`](Self::wait) has no effect.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: all leases are released, also those that are
    /// granted later.
    pub async fn try_acquire(self) -> Result<Option<LeaseAll>> {
        let patience = Patience::Try(self.request.client().now() + TRY_TIMEOUT);
        Ok(self.acquire_in_order(patience, Some(TRY_TIMEOUT), Instant::now()).await?.ok())
    }

    /// Acquires the leases, runs the work while all of them are held, and releases them, as
    /// [`LeaseRequest::run`]. When a lease is lost, the work is dropped at its next await point;
    /// after a deadline it is not polled again.
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire), and [`Error::Lost`] when a lease ended before the work.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and releases the leases in the background.
    pub async fn run<F, T>(self, work: F) -> Result<T>
    where
        F: AsyncFnOnce(&LeaseAll) -> T,
    {
        let all = self.acquire().await?;
        match while_held(work(&all), || all.is_held(), all.lost()).await {
            Ok(done) => unless_lost(done, all.release().await),
            Err(cause) => {
                let lost = all.leases.iter().find(|lease| !lease.is_held()).or(all.leases.first());
                Err(lost.map_or(Error::Closed, |lease| lease.loss_error(cause)))
            }
        }
    }

    /// Acquires one name after the other, within `limit` from `start`. The inner error is the name
    /// that was not free.
    async fn acquire_in_order(
        self,
        patience: Patience,
        limit: Option<Duration>,
        start: Instant,
    ) -> Result<Result<LeaseAll, LockName>> {
        self.request.check()?;
        let names: BTreeSet<LockName> = self.names.into_iter().map(LockName::new).collect::<Result<_>>()?;
        if names.is_empty() || names.len() > MAX_NAMES {
            return Err(Error::Names { given: names.len(), most: MAX_NAMES });
        }
        let client = Arc::clone(self.request.client());
        let owner = self.request.requested_owner();
        let (reenters, owner) = (owner.is_some(), owner.unwrap_or_else(Owner::random));
        let mut leases: Vec<Lease> = Vec::new();
        for name in names {
            let request = self.request.clone().with_name(name.as_str());
            let request = if reenters { request.owner(owner) } else { request.owner_without_reentry(owner) };
            let terms = request.terms;
            let mut wish = request.into_wish(patience)?;
            // It begins when all names are held.
            wish.hold_time.at_most = None;
            let (mode, ttl) = (wish.mode, wish.ttl);
            match client.coordinator.acquire(wish).await {
                Ok(held) => leases.push(Lease::new(Arc::clone(&client), held, mode, ttl, terms)),
                Err(refusal) => {
                    // The acquired names are free when the caller receives the error, unless the
                    // database takes longer: the release goes on in the background.
                    let left = limit.map_or(Duration::MAX, |limit| limit.saturating_sub(start.elapsed()));
                    let _ = timeout(left.max(RELEASE_GRACE), LeaseAll { leases }.release()).await;
                    return match refusal {
                        Refusal::Held => Ok(Err(name)),
                        refusal => Err(refusal_error(&client, refusal, name, start)),
                    };
                }
            }
        }
        match leases.iter().find(|lease| !lease.is_held()) {
            Some(lost) => Err(lost.loss_error(lost.loss_cause())),
            None => {
                leases.iter_mut().for_each(Lease::start_max_hold);
                Ok(Ok(LeaseAll { leases }))
            }
        }
    }
}

/// The leases on several names, held together. Dropping it releases all of them in the background.
///
/// It is lost as soon as one of the leases is.
#[doc(alias = "guard")]
#[must_use = "the leases are released when this is dropped"]
pub struct LeaseAll {
    /// In order of names.
    leases: Vec<Lease>,
}

impl LeaseAll {
    /// Returns the names, in order of their bytes, with their fencing tokens.
    pub fn tokens(&self) -> impl ExactSizeIterator<Item = (&LockName, FencingToken)> {
        self.leases.iter().map(|lease| (lease.name(), lease.token()))
    }

    /// Returns the fencing token of a name, if it is one of the held names.
    pub fn token(&self, name: &str) -> Option<FencingToken> {
        self.leases.iter().find(|lease| lease.name().as_str() == name).map(Lease::token)
    }

    /// Returns the owner of all leases.
    pub fn owner(&self) -> Owner {
        // A request without names is refused.
        self.leases[0].owner()
    }

    /// Returns whether all leases are certainly still held, as [`Lease::is_held`]. It reads a clock
    /// and does no I/O.
    pub fn is_held(&self) -> bool {
        self.leases.iter().all(Lease::is_held)
    }

    /// Returns how much longer all leases are safe without a heartbeat. Zero when one is lost.
    pub fn remaining(&self) -> Duration {
        self.leases.iter().map(Lease::remaining).min().unwrap_or_default()
    }

    /// Waits until a lease is lost, and returns the cause. Pending for ever while all are held.
    ///
    /// # Cancel safety
    ///
    /// It may be dropped and called again; no loss is missed.
    pub async fn lost(&self) -> LossCause {
        first(self.leases.iter().map(Lease::lost)).await
    }

    /// Waits until the holder is asked to release one of the leases, as [`Lease::revoke_requested`].
    ///
    /// # Cancel safety
    ///
    /// It may be dropped and called again; no request is missed.
    pub async fn revoke_requested(&self) {
        first(self.leases.iter().map(Lease::revoke_requested)).await;
    }

    /// Fences a transaction with each lease, as [`Lease::fence`]: it can commit only while all of
    /// them are held.
    ///
    /// # Errors
    ///
    /// Those of [`Lease::fence`]. After an error, roll back.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the transaction in an unknown state, as with any of its
    /// statements: roll back.
    pub async fn fence<DB: Database>(&self, tx: &mut Transaction<'_, DB>) -> Result<()> {
        for lease in &self.leases {
            lease.fence(tx).await?;
        }
        Ok(())
    }

    /// Extends each lease, as [`Lease::extend`].
    ///
    /// # Errors
    ///
    /// Those of [`Lease::extend`]; some leases may be extended then.
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the extension may take place.
    pub async fn extend(&self, ttl: Duration) -> Result<()> {
        for lease in &self.leases {
            lease.extend(ttl).await?;
        }
        Ok(())
    }

    /// Releases all leases, and returns an error if one was not held to the end.
    ///
    /// # Errors
    ///
    /// As [`Lease::release`]: [`Error::Lost`] when a lease was lost, otherwise the first error. The
    /// others are released in any case.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future after its first poll does not stop the release.
    pub async fn release(self) -> Result<()> {
        let releases: Vec<_> = self.leases.into_iter().map(Lease::start_release).collect();
        let mut outcome: Result<()> = Ok(());
        for release in releases {
            let released = release.await;
            let matters = match (&outcome, &released) {
                (Err(first), Err(error)) => error.is_lost() && !first.is_lost(),
                (Ok(()), _) => true,
                _ => false,
            };
            if matters {
                outcome = released;
            }
        }
        outcome
    }
}

/// Waits for the first of several futures.
async fn first<F: Future>(futures: impl Iterator<Item = F>) -> F::Output {
    let mut all: Vec<_> = futures.map(Box::pin).collect();
    std::future::poll_fn(|context| {
        let ready = all.iter_mut().map(|future| future.as_mut().poll(context)).find(Poll::is_ready);
        ready.unwrap_or(Poll::Pending)
    })
    .await
}

impl fmt::Debug for LeaseAll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.leases).finish()
    }
}
