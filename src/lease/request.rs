//! A request for a lease.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::handle::{Lease, LeaseTerms};
use super::refusal::refusal_error;
use super::run::{race, unless_lost, while_held};
use crate::backend::Names;
use crate::client::Client;
use crate::clock::{CENTURY, Moment};
use crate::coordinator::{Acquisition, HeldLease};
use crate::engine::{HoldTime, Patience, Refusal, Wish};
use crate::error::{Error, Result};
use crate::inspect::{LeaseInfo, Waiting};
use crate::name::LockName;
use crate::operation::{ListHolders, ListWaiters};
use crate::owner::Owner;
use crate::protocol::Mode;

/// The TTL of a lease unless [`LeaseRequest::ttl`] sets it.
pub(crate) const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// The longest label.
const MAX_LABEL_BYTES: usize = 255;

/// How long a try waits for the database.
pub(super) const TRY_TIMEOUT: Duration = Duration::from_secs(8);

type ProgressCallback = Arc<dyn Fn(&Waiting) + Send + Sync>;

/// A request for a lease, made with [`Locks::lease`](crate::Locks::lease). Nothing is sent until
/// one of [`acquire`](Self::acquire), [`try_acquire`](Self::try_acquire) and [`run`](Self::run) is
/// awaited.
///
/// ```
/// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
/// use std::time::Duration;
///
/// let lease = locks
///     .lease("invoice/42")
///     .ttl(Duration::from_secs(10))
///     .wait(Duration::from_secs(5))
///     .label("send reminder")
///     .acquire()
///     .await?;
/// # lease.release().await
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a request does nothing until acquire, try_acquire or run is awaited"]
pub struct LeaseRequest {
    client: Arc<Client>,
    name: String,
    mode: Mode,
    ttl: Duration,
    wait: Option<Duration>,
    pub(super) terms: LeaseTerms,
    label: String,
    owner: Option<Owner>,
    /// Whether the owner re-enters a lease that it holds already.
    reenters: bool,
    on_progress: Option<ProgressCallback>,
}

impl LeaseRequest {
    pub(crate) fn new(client: Arc<Client>, name: String) -> Self {
        Self {
            client,
            name,
            mode: Mode::Exclusive,
            ttl: DEFAULT_TTL,
            wait: None,
            terms: LeaseTerms { renew: true, max_hold: None, hold_at_least: None },
            label: String::new(),
            owner: Owner::current(),
            reenters: Owner::current().is_some(),
            on_progress: None,
        }
    }

    /// Shares the name with other shared leases: many readers or one writer. Readers and writers
    /// wait in one queue, so later readers wait behind a waiting writer, and later writers behind
    /// waiting readers. Every reader has an expiry and a token of its own.
    ///
    /// Unlike an exclusive lease, a shared lease takes several statements to acquire, also when the
    /// name is free.
    ///
    /// ```
    /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
    /// let reading = locks.lease("catalogue").shared().acquire().await?;
    /// # reading.release().await
    /// # }
    /// ```
    #[doc(alias = "rwlock")]
    pub fn shared(mut self) -> Self {
        self.mode = Mode::READ;
        self
    }

    /// Requests permits instead of a lease.
    pub(crate) fn permits(mut self, units: u32, permits: u32) -> Self {
        self.mode = Mode::Shared { units, permits };
        self
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns the same request for another name.
    pub(crate) fn with_name(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    pub(crate) fn wait_limit(&self) -> Option<Duration> {
        self.wait
    }

    pub(super) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// Returns the owner that the request names, or that of its scope.
    pub(super) fn requested_owner(&self) -> Option<Owner> {
        self.owner
    }

    /// Calls `callback` while [`acquire`](Self::acquire) waits: when the wait begins, and whenever
    /// its position or the holder changes. It costs two `SELECT`s a second.
    ///
    /// ```
    /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
    /// let lease = locks
    ///     .lease("deploy")
    ///     .while_waiting(|waiting| println!("{} ahead of us", waiting.ahead))
    ///     .acquire()
    ///     .await?;
    /// # lease.release().await
    /// # }
    /// ```
    pub fn while_waiting(mut self, callback: impl Fn(&Waiting) + Send + Sync + 'static) -> Self {
        self.on_progress = Some(Arc::new(callback));
        self
    }

    /// Sets how long the lease outlives the last heartbeat: the longest time for which a crashed
    /// holder blocks others. 30 seconds by default; between 1 second and 24 hours unless the
    /// [builder](crate::LocksBuilder::ttl_range) says otherwise.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Limits the wait; at the limit, [`acquire`](Self::acquire) fails with [`Error::Timeout`].
    /// Zero tries once. Without a limit it waits for as long as it takes.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = Some(at_most);
        self
    }

    /// Sets whether the lease is renewed in the background, by the client's heartbeat. `true` by
    /// default. Otherwise it ends after its TTL unless [`extend`](Lease::extend) is called.
    #[doc(alias = "heartbeat")]
    pub fn renew(mut self, renew: bool) -> Self {
        self.terms.renew = renew;
        self
    }

    /// Ends the lease after this time, also while it is renewed: a worker that hangs does not hold
    /// the name for ever. The lease is then lost with
    /// [`LossCause::MaxHold`](crate::LossCause::MaxHold), and [`run`](Self::run) drops the work.
    pub fn max_hold(mut self, at_most: Duration) -> Self {
        self.terms.max_hold = Some(at_most);
        self
    }

    /// Keeps the name taken for at least this long after it was acquired, also when it is released
    /// earlier, as by a shutdown or at [`max_hold`](Self::max_hold): for jobs that are shorter than
    /// the differences between the clocks that start them. A lease that expires, as when its process
    /// dies, or is evicted frees the name earlier.
    /// Of several acquisitions of one owner, the one that is released last decides.
    pub fn hold_at_least(mut self, at_least: Duration) -> Self {
        self.terms.hold_at_least = Some(at_least);
        self
    }

    /// Sets a note for people, shown by [`Locks::list`](crate::Locks::list). At most 255 bytes.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    /// Sets the owner, and re-enters when this owner holds the name already, in whichever process.
    /// By default the owner is that of the [`Owner::scope`] in which the request was made, or else
    /// a new one.
    pub fn owner(mut self, owner: Owner) -> Self {
        self.owner = Some(owner);
        self.reenters = true;
        self
    }

    /// Sets the owner without re-entrance.
    pub(crate) fn owner_without_reentry(mut self, owner: Owner) -> Self {
        self.owner = Some(owner);
        self.reenters = false;
        self
    }

    /// Acquires the lease, and waits in the queue of the name if necessary.
    ///
    /// Waiters of all tasks, processes and hosts are served in the order of their arrival.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] when the limit of [`wait`](Self::wait) was reached;
    /// [`Error::Unavailable`] when the database could not be reached for some seconds, in which the
    /// client reconnects and repeats its requests; [`Error::Access`], [`Error::NotMigrated`],
    /// [`Error::Closed`], or an error for bad input.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the queue. A grant that arrives later is released in the
    /// background.
    #[doc(alias = "lock")]
    pub async fn acquire(self) -> Result<Lease> {
        let start = Instant::now();
        let Some(wait) = self.wait else {
            return self.wait_until(None, start).await;
        };
        if wait.is_zero() {
            let name = LockName::new(&*self.name)?;
            return self.try_acquire().await?.ok_or(Error::Timeout { name, waited: start.elapsed() });
        }
        let until = self.client.now() + wait;
        self.wait_until(Some(until), start).await
    }

    async fn wait_until(self, deadline: Option<Moment>, start: Instant) -> Result<Lease> {
        let on_progress = self.on_progress.clone();
        let (client, terms) = (Arc::clone(&self.client), self.terms);
        let wish = self.into_wish(Patience::Wait(deadline))?;
        let (name, mode, ttl) = (wish.name.clone(), wish.mode, wish.ttl);
        let acquisition = client.coordinator.acquire(wish);
        let answer = match on_progress {
            None => acquisition.await,
            Some(callback) => wait_reporting(&client, &name, acquisition, &*callback).await,
        };
        match answer {
            Ok(held) => Ok(Lease::new(client, held, mode, ttl, terms)),
            Err(refusal) => Err(refusal_error(&client, refusal, name, start)),
        }
    }

    /// Acquires the lease if the name is free and no waiter is in its queue. Returns `None`
    /// otherwise.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), but never a timeout. [`wait`](Self::wait) has no effect.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: a grant that arrives later is released in the
    /// background.
    #[doc(alias = "try_lock")]
    pub async fn try_acquire(self) -> Result<Option<Lease>> {
        let start = Instant::now();
        let (client, terms) = (Arc::clone(&self.client), self.terms);
        let wish = self.into_wish(Patience::Try(client.now() + TRY_TIMEOUT))?;
        let (name, mode, ttl) = (wish.name.clone(), wish.mode, wish.ttl);
        match client.coordinator.acquire(wish).await {
            Ok(held) => Ok(Some(Lease::new(client, held, mode, ttl, terms))),
            Err(Refusal::Held | Refusal::Timeout) => Ok(None),
            Err(refusal) => Err(refusal_error(&client, refusal, name, start)),
        }
    }

    /// Acquires the lease, runs the work while it is held, and releases it. When the lease is lost,
    /// the work is dropped at its next await point. Work that is delayed past the deadline, as by a
    /// stopped process, is not polled again.
    ///
    /// The result of the work is returned as it is, inside that of the lease, as
    /// [`tokio::time::timeout`] does: work that fails has an error of any type, and the first `?` is
    /// for the lease.
    ///
    /// ```
    /// # async fn build_report() -> anyhow::Result<String> { Ok(String::new()) }
    /// # async fn example(locks: sqlock::Locks) -> anyhow::Result<()> {
    /// let report = locks.lease("report/daily").run(async |_lease| build_report().await).await??;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire), and [`Error::Lost`] when the lease ended before the
    /// work. When only the release failed, the result of the work is returned: the name is free
    /// after its TTL.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future drops the work and releases the lease in the background.
    pub async fn run<F, T>(self, work: F) -> Result<T>
    where
        F: AsyncFnOnce(&Lease) -> T,
    {
        let lease = self.acquire().await?;
        match while_held(work(&lease), || lease.is_held(), lease.lost()).await {
            Ok(done) => unless_lost(done, lease.release().await),
            Err(cause) => Err(lease.loss_error(cause)),
        }
    }

    /// Checks the terms of the request.
    pub(crate) fn check(&self) -> Result<()> {
        let settings = &self.client.settings;
        settings.check_ttl("a TTL", self.ttl)?;
        if let Some(max_hold) = self.terms.max_hold {
            Error::check_range("max_hold", max_hold, settings.min_ttl, Duration::MAX)?;
        }
        if let Some(at_least) = self.terms.hold_at_least {
            Error::check_range("hold_at_least", at_least, Duration::ZERO, settings.max_ttl)?;
        }
        if self.label.len() > MAX_LABEL_BYTES {
            return Err(Error::LabelTooLong { bytes: self.label.len() });
        }
        if self.label.contains('\0') {
            return Err(Error::NulInLabel);
        }
        Ok(())
    }

    /// Turns the request into that of the engine.
    pub(crate) fn into_wish(self, patience: Patience) -> Result<Wish> {
        let name = LockName::new(&*self.name)?;
        self.check()?;
        let (mode, ttl) = if self.client.settings.is_null { (Mode::READ, CENTURY) } else { (self.mode, self.ttl) };
        Ok(Wish {
            name,
            owner: self.owner.unwrap_or_else(Owner::random),
            // Every permit counts, also of the same owner: only a lease can be re-entered.
            reenters: self.reenters && matches!(self.mode, Mode::Exclusive | Mode::READ),
            mode,
            ttl: self.terms.bound(ttl, Duration::ZERO),
            is_kept: self.terms.renew,
            hold_time: HoldTime {
                at_least: self.terms.hold_at_least.unwrap_or_default(),
                at_most: self.terms.max_hold,
            },
            label: self.label.into(),
            patience,
        })
    }
}

impl fmt::Debug for LeaseRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseRequest").field("name", &self.name).field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

/// Waits, and reports the progress of the wait.
async fn wait_reporting(
    client: &Client,
    name: &LockName,
    mut acquisition: Acquisition,
    callback: &(dyn Fn(&Waiting) + Send + Sync),
) -> Result<HeldLease, Refusal> {
    let start = Instant::now();
    let mut reported = None;
    let mut pause = Duration::from_millis(100);
    loop {
        if let Ok(answer) = tokio::time::timeout(pause, &mut acquisition).await {
            return answer;
        }
        pause = Duration::from_secs(1);
        let position = acquisition.position();
        let progress = async {
            // The holder is read after the waiters, so its number of waiters includes them.
            let waiting = client.run(ListWaiters(name.clone())).await?;
            let holders = client.run(ListHolders(Names::One(name.clone()))).await?;
            let place = position.and_then(|(id, _)| waiting.iter().position(|entry| entry.id == id));
            let ahead = place.unwrap_or_else(|| waiting.len() + position.map_or(0, |(_, ahead)| ahead));
            let holder = holders.into_iter().find_map(LeaseInfo::of);
            Ok::<_, Error>(Waiting { ahead, holder, waited: start.elapsed() })
        };
        let progress = match race(std::pin::pin!(&mut acquisition), std::pin::pin!(progress)).await {
            Ok(answer) => return answer,
            Err(progress) => progress,
        };
        // An unavailable database ends the acquisition itself.
        if let Ok(waiting) = progress {
            let now = Some((waiting.ahead, waiting.holder.as_ref().map(|holder| holder.token)));
            if std::mem::replace(&mut reported, now) != now {
                callback(&waiting);
            }
        }
    }
}
