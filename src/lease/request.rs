//! A request for a lease.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::handle::Lease;
use super::options::{LeaseOptions, bounded_ttl, queue_setters, request_setters};
use super::refusal::refusal_error;
use super::run::{result_unless_lost, while_held};
use crate::backend::Names;
use crate::client::Client;
use crate::clock::CENTURY;
use crate::coordinator::{HeldLease, PendingAcquisition};
use crate::engine::{LeaseSpec, Refusal, WaitMode};
use crate::error::{Error, Result};
use crate::inspect::{LeaseInfo, Waiting};
use crate::name::LockName;
use crate::operation::{ListHolders, ListWaiters};
use crate::owner::Owner;
use crate::protocol::Mode;
use crate::race::race;

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
    options: LeaseOptions,
    identity: Identity,
    on_progress: Option<ProgressCallback>,
}

/// The owner of the lease.
#[derive(Clone, Copy)]
enum Identity {
    /// A new owner for each lease.
    New,
    /// This owner, which re-enters a lease that it already holds.
    Reentrant(Owner),
    /// This owner, which waits for itself.
    Once(Owner),
}

request_setters!(LeaseRequest);
queue_setters!(LeaseRequest);

impl LeaseRequest {
    pub(crate) fn new(client: Arc<Client>, name: String) -> Self {
        let identity = Owner::current().map_or(Identity::New, Identity::Reentrant);
        Self { client, name, mode: Mode::Exclusive, options: LeaseOptions::new(), identity, on_progress: None }
    }

    /// Shares the name with other shared leases: many readers or one writer. Readers and writers
    /// wait in one queue, so later readers wait behind a waiting writer, and later writers behind
    /// waiting readers. Every reader has an expiry and a token of its own.
    ///
    /// On SQLite, MySQL and MariaDB, a shared lease takes several statements to acquire, even if
    /// the name is free.
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

    pub(super) fn with_name(mut self, name: &LockName, mode: Mode) -> Self {
        name.as_str().clone_into(&mut self.name);
        self.mode = mode;
        self
    }

    pub(super) fn mode(&self) -> Mode {
        self.mode
    }

    pub(super) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    pub(crate) fn lease_options(&self) -> &LeaseOptions {
        &self.options
    }

    pub(super) fn options_mut(&mut self) -> &mut LeaseOptions {
        &mut self.options
    }

    fn request_mut(&mut self) -> &mut Self {
        self
    }

    pub(super) fn set_owner(&mut self, owner: Owner) {
        self.identity = Identity::Reentrant(owner);
    }

    pub(super) fn set_progress_callback(&mut self, callback: impl Fn(&Waiting) + Send + Sync + 'static) {
        self.on_progress = Some(Arc::new(callback));
    }

    /// Sets the owner without re-entrance.
    pub(crate) fn owner_without_reentry(mut self, owner: Owner) -> Self {
        self.identity = Identity::Once(owner);
        self
    }

    /// Gives all clones of the request one owner.
    pub(super) fn with_one_owner(self) -> Self {
        match self.identity {
            Identity::New => self.owner_without_reentry(Owner::random()),
            _ => self,
        }
    }

    /// Acquires the lease, and waits in the queue of the name if necessary.
    ///
    /// Waiters of all tasks, processes and hosts are served in the order of their arrival.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] when the limit of [`wait`](Self::wait) was reached;
    /// [`Error::Unavailable`] when the database could not be reached for 3 seconds, in which the
    /// client reconnects and repeats its requests (some 12 seconds if connections are not even
    /// refused); [`Error::Database`] when the database refused a statement, or when other programs
    /// kept locks on the tables of sqlock for 10 seconds; [`Error::Conversion`] when an owner that
    /// re-enters shares the name and asks for it alone; [`Error::PoolExhausted`] on a SQLite
    /// database in memory; [`Error::Access`], [`Error::NotMigrated`], [`Error::Closed`], or an
    /// error for bad input.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future removes the request from the queue. A grant that arrives later is
    /// released in the background.
    #[doc(alias = "lock")]
    pub async fn acquire(self) -> Result<Lease> {
        let start = Instant::now();
        let name = LockName::new(&*self.name)?;
        let deadline = match self.options.wait {
            Some(Duration::ZERO) => {
                return self.try_acquire().await?.ok_or(Error::Timeout { name, waited: start.elapsed() });
            }
            wait => wait.map(|wait| self.client.now() + wait),
        };
        let acquired = self.request(WaitMode::Wait(deadline)).await?;
        acquired.map_err(|refusal| refusal_error(&self.client, refusal, name, start))
    }

    /// Acquires the lease if the name is free and no waiter is in its queue. Returns `None`
    /// otherwise.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), but never a timeout: [`wait`](Self::wait) has no effect. A
    /// database that does not answer is [`Error::Unavailable`] after 8 seconds at most.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: a grant that arrives later is released in the
    /// background.
    #[doc(alias = "try_lock")]
    pub async fn try_acquire(self) -> Result<Option<Lease>> {
        let start = Instant::now();
        match self.request(WaitMode::Try(self.client.now() + TRY_TIMEOUT)).await? {
            Ok(lease) => Ok(Some(lease)),
            Err(Refusal::Taken | Refusal::Timeout) => Ok(None),
            Err(refusal) => Err(refusal_error(&self.client, refusal, LockName::new(self.name)?, start)),
        }
    }

    /// Requests the lease from the engine.
    pub(super) async fn request(&self, wait_mode: WaitMode) -> Result<Result<Lease, Refusal>> {
        let client = &self.client;
        let spec = self.spec(wait_mode)?;
        let (name, ttl) = (spec.name.clone(), spec.ttl);
        let acquisition = client.coordinator.acquire(spec);
        let answer = match (&self.on_progress, wait_mode) {
            (Some(callback), WaitMode::Wait(_)) => wait_reporting(client, &name, acquisition, &**callback).await,
            _ => acquisition.await,
        };
        Ok(answer.map(|held| Lease::new(Arc::clone(client), held, ttl, self.options.hold_time())))
    }

    /// Acquires the lease, runs the work while it is held, and releases it. When the lease is lost,
    /// the work is dropped at its next await point. Work that is delayed past the deadline, as by a
    /// stopped process, is not polled again.
    ///
    /// The result of the work is returned unchanged, inside the result of the lease, as
    /// [`tokio::time::timeout`] does: failed work has an error of any type, and the first `?` is
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
    /// A function that takes its work as an argument and passes it to `run` cannot always be
    /// spawned: the compiler says that an implementation of `Send` is not general enough. Await
    /// such a function beside other work with `tokio::join!` instead of spawning it.
    ///
    /// # Errors
    ///
    /// The errors of [`acquire`](Self::acquire), and [`Error::Lost`] when the lease ended before
    /// the work. When only the release failed, the result of the work is returned: the name is free
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
            Ok(done) => result_unless_lost(done, lease.release().await),
            Err(cause) => Err(lease.loss_error(cause)),
        }
    }

    /// Checks the name and the options, and returns what the engine is asked for.
    fn spec(&self, wait_mode: WaitMode) -> Result<LeaseSpec> {
        let name = LockName::new(&*self.name)?;
        self.options.check(&self.client.settings)?;
        let options = &self.options;
        let (mode, ttl) = if self.client.settings.is_null { (Mode::READ, CENTURY) } else { (self.mode, options.ttl) };
        let (owner, reenters) = match self.identity {
            Identity::New => (Owner::random(), false),
            Identity::Reentrant(owner) => (owner, true),
            Identity::Once(owner) => (owner, false),
        };
        Ok(LeaseSpec {
            name,
            owner,
            // Every permit counts, even for the same owner: only a lease can be re-entered.
            reenters: reenters && matches!(self.mode, Mode::Exclusive | Mode::READ),
            mode,
            ttl: bounded_ttl(ttl, options.max_hold, Duration::ZERO),
            is_renewed: options.renew,
            hold_time: options.hold_time(),
            label: options.label.as_str().into(),
            wait_mode,
        })
    }
}

impl fmt::Debug for LeaseRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseRequest").field("name", &self.name).field("ttl", &self.options.ttl).finish_non_exhaustive()
    }
}

/// Waits, and reports the progress of the wait.
async fn wait_reporting(
    client: &Client,
    name: &LockName,
    mut acquisition: PendingAcquisition,
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
            let holder = holders.into_iter().find_map(LeaseInfo::from_listed);
            Ok::<_, Error>(Waiting { ahead, holder, waited: start.elapsed() })
        };
        let progress = match race(std::pin::pin!(&mut acquisition), std::pin::pin!(progress)).await {
            Ok(answer) => return answer,
            Err(progress) => progress,
        };
        // An unavailable database ends the acquisition itself, and a free name is granted soon.
        if let Ok(waiting) = progress
            && (waiting.ahead > 0 || waiting.holder.is_some())
        {
            let now = Some((waiting.ahead, waiting.holder.as_ref().map(|holder| holder.token)));
            if std::mem::replace(&mut reported, now) != now {
                callback(&waiting);
            }
        }
    }
}
