//! Acquires several names, all or none: see [`LeaseAllRequest`].
//!
//! A caller that waits for a name holds only names that come before that name, so callers never
//! wait for each other in a circle: the ordered resources of J. W. Havender, "Avoiding deadlock in
//! multitasking systems", IBM Systems Journal 7(2), 1968.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Transaction;
use tokio::time::{Instant, timeout};

use super::handle::Lease;
use super::options::{LeaseOptions, queue_setters, request_setters};
use super::refusal::refusal_error;
use super::request::{LeaseRequest, TRY_TIMEOUT};
use super::run::{result_unless_lost, while_held};
use super::semaphore::Semaphore;
use crate::backend::Database;
use crate::client::Client;
use crate::engine::{Refusal, WaitMode};
use crate::error::{Error, LossCause, Result};
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::Mode;
use crate::race::{first, race};
use crate::token::FencingToken;

/// How long a failed request waits after its limit for the release of the acquired names: a running
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
/// of the same names do not deadlock, whatever order they give, unless a caller holds some names
/// already and then requests more: request all names at once. The caller receives all leases, or an
/// error and none.
///
/// The options apply to all names together: [`wait`](Self::wait) limits the whole wait, and
/// [`max_hold`](Self::max_hold) and [`hold_at_least`](Self::hold_at_least) count from the last
/// grant. After the limit of the wait, the acquired names are released in the background if the
/// database does not answer at once.
#[derive(Clone, Debug)]
#[must_use = "a request does nothing until acquire, try_acquire or run is awaited"]
pub struct LeaseAllRequest {
    request: LeaseRequest,
    requested: Vec<Requested>,
}

const OTHER_CLIENT: Error = Error::Unsupported {
    what: "a semaphore of another client",
    reason: "all names are acquired in one database: make the semaphore from the same Locks",
};

/// A name in a request, or permits of a semaphore.
#[derive(Clone, Debug)]
enum Requested {
    Lease(String, Mode),
    Permits(Semaphore, u32),
}

impl Requested {
    /// Returns the name and its requested mode.
    fn into_entry(self, client: &Arc<Client>) -> Result<(LockName, Mode)> {
        let (name, mode) = match self {
            Self::Lease(name, mode) => (name, mode),
            Self::Permits(semaphore, count) => {
                let request = semaphore.request(count)?;
                if !Arc::ptr_eq(request.client(), client) {
                    return Err(OTHER_CLIENT);
                }
                (request.name().to_owned(), request.mode())
            }
        };
        Ok((LockName::new(name)?, mode))
    }
}

/// The outcome of a request.
enum Acquired {
    All(LeaseAll),
    /// This name was not free.
    Taken(LockName),
}

request_setters!(LeaseAllRequest);
queue_setters!(LeaseAllRequest);

impl LeaseAllRequest {
    pub(crate) fn new<N: Into<String>>(request: LeaseRequest, names: impl IntoIterator<Item = N>) -> Self {
        Self { request, requested: Vec::new() }.with_names(names, Mode::Exclusive)
    }

    fn with_names<N: Into<String>>(mut self, names: impl IntoIterator<Item = N>, mode: Mode) -> Self {
        self.requested.extend(names.into_iter().map(|name| Requested::Lease(name.into(), mode)));
        self
    }

    fn options_mut(&mut self) -> &mut LeaseOptions {
        self.request.options_mut()
    }

    fn request_mut(&mut self) -> &mut LeaseRequest {
        &mut self.request
    }

    /// Adds names in [shared](LeaseRequest::shared) mode.
    ///
    /// ```
    /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
    /// let uploads = locks.semaphore("uploads", 3);
    /// let all = locks.lease_all(["report"]).shared(["catalogue"]).permits(&uploads, 1).acquire().await?;
    /// # all.release().await
    /// # }
    /// ```
    pub fn shared<N: Into<String>>(self, names: impl IntoIterator<Item = N>) -> Self {
        self.with_names(names, Mode::READ)
    }

    /// Adds permits of a [semaphore](Semaphore), which must be of the same client. Its options,
    /// owner and callback do not apply: those of this request do.
    pub fn permits(mut self, semaphore: &Semaphore, count: u32) -> Self {
        self.requested.push(Requested::Permits(semaphore.clone(), count));
        self
    }

    /// Acquires all names, and waits in their queues if necessary.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`], with the name that was not free, when the limit of [`wait`](Self::wait)
    /// was reached. [`Error::Names`] when no name was given, or more than 64 different ones;
    /// [`Error::Conversion`] when a name is requested in two modes. [`Error::Permits`] when a
    /// semaphore has fewer permits, [`Error::Unsupported`] when it is one of another client.
    /// [`Error::Lost`] as soon as a lease ends during the wait for another, as one without renewal
    /// does after its TTL. Otherwise the errors of
    /// [`LeaseRequest::acquire`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the queue, and releases the acquired names.
    pub async fn acquire(self) -> Result<LeaseAll> {
        let start = Instant::now();
        let now = self.request.client().now();
        let (wait_mode, limit) = match self.request.lease_options().wait {
            Some(wait) if wait.is_zero() => (WaitMode::Try(now + TRY_TIMEOUT), Some(TRY_TIMEOUT)),
            wait => (WaitMode::Wait(wait.map(|wait| now + wait)), wait),
        };
        match self.acquire_in_order(wait_mode, limit, start).await? {
            Acquired::All(leases) => Ok(leases),
            Acquired::Taken(name) => Err(Error::Timeout { name, waited: start.elapsed() }),
        }
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
    /// Dropping the future leaves nothing behind: all leases are released, including leases that
    /// are granted later.
    pub async fn try_acquire(self) -> Result<Option<LeaseAll>> {
        let wait_mode = WaitMode::Try(self.request.client().now() + TRY_TIMEOUT);
        match self.acquire_in_order(wait_mode, Some(TRY_TIMEOUT), Instant::now()).await? {
            Acquired::All(leases) => Ok(Some(leases)),
            Acquired::Taken(_) => Ok(None),
        }
    }

    /// Acquires the leases, runs the work while all of them are held, and releases them, as
    /// [`LeaseRequest::run`]. When a lease is lost, the work is dropped at its next await point;
    /// after a deadline the work is not polled again.
    ///
    /// # Errors
    ///
    /// The errors of [`acquire`](Self::acquire), and [`Error::Lost`] when a lease ended before the
    /// work. When only a release fails, the result of the work is returned, and the names are free
    /// after the TTL.
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
            Ok(done) => result_unless_lost(done, all.release().await),
            Err(cause) => Err(loss_error(&all.leases, cause)),
        }
    }

    /// Acquires one name after the other, within `limit` from `start`.
    async fn acquire_in_order(self, wait_mode: WaitMode, limit: Option<Duration>, start: Instant) -> Result<Acquired> {
        let Self { request, requested } = self;
        let client = Arc::clone(request.client());
        request.lease_options().check(&client.settings)?;
        let modes = modes_by_name(requested, &client)?;
        let hold_time = request.lease_options().hold_time();
        let options_per_name = request.lease_options().without_limits();
        let request = request.with_one_owner().options(options_per_name);
        let mut leases: Vec<Lease> = Vec::new();
        for (name, mode) in modes {
            let request = request.clone().with_name(&name, mode);
            let answer = {
                let lost = first(leases.iter().map(Lease::lost));
                race(std::pin::pin!(request.request(wait_mode)), std::pin::pin!(lost)).await
            };
            let refusal = match answer {
                Ok(Ok(Ok(lease))) => {
                    leases.push(lease);
                    continue;
                }
                Ok(Ok(Err(refusal))) => refusal,
                Ok(Err(error)) => return Err(error),
                Err(cause) => return Err(loss_error(&leases, cause)),
            };
            // The acquired names are free when the caller receives the error, unless the database
            // takes longer: the release goes on in the background.
            let left = limit.map_or(Duration::MAX, |limit| limit.saturating_sub(start.elapsed()));
            let _ = timeout(left.max(RELEASE_GRACE), LeaseAll { leases }.release()).await;
            return match refusal {
                Refusal::Taken => Ok(Acquired::Taken(name)),
                Refusal::Timeout if matches!(wait_mode, WaitMode::Try(_)) => Ok(Acquired::Taken(name)),
                refusal => Err(refusal_error(&client, refusal, name, start)),
            };
        }
        match leases.iter().find(|lease| !lease.is_held()) {
            Some(lost) => Err(lost.loss_error(lost.loss_cause())),
            None => {
                leases.iter_mut().for_each(|lease| lease.start_hold_time(hold_time));
                Ok(Acquired::All(LeaseAll { leases }))
            }
        }
    }
}

/// Makes the error of several leases of which one was lost.
fn loss_error(leases: &[Lease], cause: LossCause) -> Error {
    let lost = leases.iter().find(|lease| !lease.is_held()).or(leases.first());
    lost.map_or(Error::Closed, |lease| lease.loss_error(cause))
}

/// Returns the names in order of their bytes, each with its mode.
fn modes_by_name(requested: Vec<Requested>, client: &Arc<Client>) -> Result<BTreeMap<LockName, Mode>> {
    let mut modes = BTreeMap::new();
    for entry in requested {
        let (name, mode) = entry.into_entry(client)?;
        let mode = match modes.get(&name) {
            None => mode,
            Some(other) => joint_mode(*other, mode, &name)?,
        };
        modes.insert(name, mode);
    }
    match modes.len() {
        1..=MAX_NAMES => Ok(modes),
        given => Err(Error::Names { given, most: MAX_NAMES }),
    }
}

/// Returns the mode of a name that a request has twice: permits add up.
fn joint_mode(one: Mode, other: Mode, name: &LockName) -> Result<Mode> {
    let name = || name.clone();
    match (one, other) {
        (Mode::Shared { units, permits }, Mode::Shared { units: more, permits: same })
            if one != Mode::READ && permits == same =>
        {
            let units = units.saturating_add(more);
            match units <= permits {
                true => Ok(Mode::Shared { units, permits }),
                false => Err(Error::Permits { name: name(), asked: units, permits }),
            }
        }
        _ if one == other => Ok(one),
        _ => {
            let reason = "the request names it twice, in different modes";
            Err(Error::Conversion { attempted: "acquire", name: name(), reason })
        }
    }
}

/// The leases on several names, held together. Dropping it releases all of them in the background.
///
/// The leases count as lost as soon as one of them is lost.
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

    /// Returns whether all leases are certainly still held, as [`Lease::is_held`]. Reads a clock
    /// and does no I/O.
    pub fn is_held(&self) -> bool {
        self.leases.iter().all(Lease::is_held)
    }

    /// Returns how much longer all leases are safe without a heartbeat. Zero when a lease is lost.
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

    /// Waits until the holder is asked to release one of the leases, as
    /// [`Lease::revoke_requested`].
    ///
    /// # Cancel safety
    ///
    /// It may be dropped and called again; no request is missed.
    pub async fn revoke_requested(&self) {
        first(self.leases.iter().map(Lease::revoke_requested)).await;
    }

    /// Fences a transaction with each lease, as [`Lease::fence`]: the transaction can commit only
    /// while all leases are held.
    ///
    /// # Errors
    ///
    /// The errors of [`Lease::fence`]. After an error, roll back.
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
    /// The errors of [`Lease::extend`]; some leases may be extended nevertheless.
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

    /// Releases all leases, and returns an error if any was not held to the end.
    ///
    /// # Errors
    ///
    /// As [`Lease::release`]: [`Error::Lost`] when a lease was lost, otherwise the first error. The
    /// other leases are released in any case.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop the release.
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

impl fmt::Debug for LeaseAll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.leases).finish()
    }
}
