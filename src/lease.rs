//! A lease: owner and expiry in a row of the database, kept by the heartbeat of its client until it is given back.
//!
//! This module has what goes with a [`Lease`]: [`LeaseAllRequest`] asks for several at once, [`ExportedLease`] takes one
//! to another process, and [`FenceError`] says why a transaction cannot be fenced. Which one when: [the table of
//! calls](crate#which-call).

pub(crate) mod all;
pub(crate) mod export;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Transaction;
use sqlx_core::transaction::TransactionManager;
use tokio::time::Instant;

use crate::backend::sealed::{Check, Verdict};
use crate::backend::{Database, Names};
use crate::client::Client;
use crate::clock::Moment;
use crate::coordinator::{Acquisition, HeldLease};
use crate::engine::{self, Amendment, NotAmended, Patience, Refusal, Wish};
use crate::error::{Error, LossCause, Result};
use crate::inspect::{LeaseInfo, Waiting};
use crate::name::LockName;
use crate::operation::{List, Waiters};
use crate::owner::Owner;
use crate::protocol::Mode;
use crate::token::FencingToken;

pub use crate::error::FenceError;
pub use all::LeaseAllRequest;
pub use export::ExportedLease;

/// The TTL of a lease that asks for none.
pub(crate) const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// A label is for people to read in a list.
const MAX_LABEL_BYTES: usize = 255;

/// How long the database may take to answer a try.
const TRY_WITHIN: Duration = Duration::from_secs(8);

/// What a lease was asked to be, beside its name and TTL.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) renew: bool,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) hold_at_least: Option<Duration>,
}

/// Who is told how far a wait has come.
type Told = Arc<dyn Fn(&Waiting) + Send + Sync>;

/// A request for a lease, made with [`Locks::lease`](crate::Locks::lease). Nothing is sent until one of
/// [`acquire`](Self::acquire), [`try_acquire`](Self::try_acquire) and [`run`](Self::run) is awaited.
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
    terms: Terms,
    label: String,
    owner: Option<Owner>,
    /// Whether that owner enters again where it is inside.
    reenters: bool,
    told: Option<Told>,
}

impl LeaseRequest {
    pub(crate) fn new(client: Arc<Client>, name: String) -> Self {
        Self {
            client,
            name,
            mode: Mode::Exclusive,
            ttl: DEFAULT_TTL,
            wait: None,
            terms: Terms { renew: true, max_hold: None, hold_at_least: None },
            label: String::new(),
            owner: Owner::current(),
            reenters: Owner::current().is_some(),
            told: None,
        }
    }

    /// Shares the name with others who share it: many readers or one writer. Readers and writers stand in one line, so a
    /// writer that waits keeps later readers out, and readers that wait keep later writers out. Every reader has an expiry and
    /// a token of its own.
    ///
    /// Unlike an exclusive lease, it takes several statements to acquire, also when the name is free.
    ///
    /// ```
    /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
    /// let reading = locks.lease("catalogue").shared().acquire().await?;
    /// # reading.release().await
    /// # }
    /// ```
    pub fn shared(mut self) -> Self {
        self.mode = Mode::READ;
        self
    }

    /// Takes permits instead.
    pub(crate) fn permits(mut self, units: u32, permits: u32) -> Self {
        self.mode = Mode::Shared { units, permits };
        self
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The same request for another name.
    pub(crate) fn named(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    pub(crate) fn patience(&self) -> Option<Duration> {
        self.wait
    }

    /// By which client, as whose, and how it is to be held.
    pub(crate) fn parts(&self) -> (&Arc<Client>, Option<Owner>) {
        (&self.client, self.owner)
    }

    /// Calls `tell` while [`acquire`](Self::acquire) waits: when it begins to wait, and whenever it comes forward or the holder
    /// changes. It costs two `SELECT`s a second.
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
    pub fn while_waiting(mut self, tell: impl Fn(&Waiting) + Send + Sync + 'static) -> Self {
        self.told = Some(Arc::new(tell));
        self
    }

    /// How long the lease outlives the last heartbeat: the longest time for which a crashed holder blocks others.
    /// 30 seconds by default; between 1 second and 24 hours unless the
    /// [builder](crate::LocksBuilder::ttl_range) says otherwise.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Waits at most this long, then fails with [`Error::Timeout`]. Zero asks once. Without it, [`acquire`](Self::acquire) waits for as
    /// long as it takes.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = Some(at_most);
        self
    }

    /// Whether the lease is renewed in the background, at every third of its TTL. `true` by default. Otherwise it ends
    /// after its TTL unless [`extend`](Lease::extend) is called.
    pub fn renew(mut self, renew: bool) -> Self {
        self.terms.renew = renew;
        self
    }

    /// Ends the lease after this time, however well it is renewed: a worker that hangs does not hold the name for ever.
    /// The lease is then lost with [`LossCause::MaxHold`], and [`run`](Self::run) drops the work.
    pub fn max_hold(mut self, at_most: Duration) -> Self {
        self.terms.max_hold = Some(at_most);
        self
    }

    /// Keeps the name taken for at least this long after it was acquired, also when it is released earlier: for jobs that
    /// are shorter than the differences between the clocks that start them. Of several holds of one owner, the one that is
    /// given back last decides.
    pub fn hold_at_least(mut self, at_least: Duration) -> Self {
        self.terms.hold_at_least = Some(at_least);
        self
    }

    /// A note for people, shown by [`Locks::list`](crate::Locks::list). At most 255 bytes.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    /// Acquires as this owner, and re-enters when this owner holds the name already, in whichever process. Without it the
    /// owner is that of the [`Owner::scope`] in which the request was made, or one that nobody else has.
    pub fn owner(mut self, owner: Owner) -> Self {
        self.owner = Some(owner);
        self.reenters = true;
        self
    }

    /// Acquires as this owner, and never re-enters.
    pub(crate) fn identity(mut self, owner: Owner) -> Self {
        self.owner = Some(owner);
        self.reenters = false;
        self
    }

    /// Waits for its turn and acquires the lease.
    ///
    /// Waiters are served in the order in which they came, from whichever task, process or host.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] when [`wait`](Self::wait) ran out; [`Error::Unavailable`] when the database could not be reached
    /// (for some seconds: connections are made again, and what was sent is sent again); [`Error::NotMigrated`],
    /// [`Error::Closed`], or one of the errors for bad input.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the place in line. A grant that is on its way is released in the background.
    pub async fn acquire(self) -> Result<Lease> {
        let start = Instant::now();
        let Some(wait) = self.wait else {
            return self.wait_until(None, start).await;
        };
        if wait.is_zero() {
            let name = LockName::new(&*self.name)?;
            return self.try_acquire().await?.ok_or(Error::Timeout { name, waited: start.elapsed() });
        }
        self.wait_until(Some(Moment::now() + wait), start).await
    }

    async fn wait_until(self, deadline: Option<Moment>, start: Instant) -> Result<Lease> {
        let told = self.told.clone();
        let (client, terms) = (Arc::clone(&self.client), self.terms);
        let wish = self.wish(Patience::Wait(deadline))?;
        let (name, mode, ttl) = (wish.name.clone(), wish.mode, wish.ttl);
        let acquisition = client.coordinator.acquire(wish);
        let answer = match told {
            None => acquisition.await,
            Some(tell) => answer_telling(&client, &name, acquisition, &*tell).await,
        };
        match answer {
            Ok(held) => Ok(Lease::new(client, held, mode, ttl, terms)),
            Err(refusal) => Err(client.refused(refusal, name, start)),
        }
    }

    /// Acquires the lease if the name is free and nobody waits for it. `Ok(None)`: it is not so.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), but never a timeout. [`wait`](Self::wait) has no effect.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: a grant that is on its way is released in the background.
    pub async fn try_acquire(self) -> Result<Option<Lease>> {
        let start = Instant::now();
        let (client, terms) = (Arc::clone(&self.client), self.terms);
        let wish = self.wish(Patience::Try(Moment::now() + TRY_WITHIN))?;
        let (name, mode, ttl) = (wish.name.clone(), wish.mode, wish.ttl);
        match client.coordinator.acquire(wish).await {
            Ok(held) => Ok(Some(Lease::new(client, held, mode, ttl, terms))),
            Err(Refusal::Held | Refusal::Timeout) => Ok(None),
            Err(refusal) => Err(client.refused(refusal, name, start)),
        }
    }

    /// Acquires the lease, does the work while it lasts, and releases it. The work is dropped at its next await point
    /// when the lease is lost. Work that was held up until after the deadline, as when the process was stopped, is not polled again.
    ///
    /// ```
    /// # async fn build_report() -> String { String::new() }
    /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
    /// let report = locks.lease("report/daily").run(async |_lease| build_report().await).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire), and [`Error::Lost`] when the lease did not last until the work was done.
    /// When the work was done in time and only the release did not get through, its result is returned: the name is free
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
            Ok(done) => match lease.release().await {
                Err(error) if error.is_lost() => Err(error),
                _ => Ok(done),
            },
            Err(cause) => Err(lease.loss(cause)),
        }
    }

    /// Refuses what cannot be asked for.
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

    /// What is asked of the engine.
    pub(crate) fn wish(self, patience: Patience) -> Result<Wish> {
        let name = LockName::new(&*self.name)?;
        self.check()?;
        Ok(Wish {
            name,
            owner: self.owner.unwrap_or_else(Owner::random),
            // Permits are counted, whoever takes them: only a lease can be entered again.
            reenters: self.reenters && matches!(self.mode, Mode::Exclusive | Mode::READ),
            mode: self.mode,
            // After a crash the name is free when max_hold would have been over.
            ttl: self.ttl.min(self.terms.max_hold.unwrap_or(Duration::MAX)),
            is_kept: self.terms.renew,
            max_hold: self.terms.max_hold,
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

/// Waits, and tells how far the wait has come.
async fn answer_telling(
    client: &Client,
    name: &LockName,
    mut acquisition: Acquisition,
    tell: &(dyn Fn(&Waiting) + Send + Sync),
) -> Result<HeldLease, Refusal> {
    let start = Instant::now();
    let mut known = None;
    let mut pause = Duration::from_millis(100);
    loop {
        if let Ok(answer) = tokio::time::timeout(pause, &mut acquisition).await {
            return answer;
        }
        pause = Duration::from_secs(1);
        let position = acquisition.position();
        let progress = async {
            // The holder is read after the waiters, so its number of waiters includes them.
            let waiting = client.run(Waiters(name.clone())).await?;
            let holders = client.run(List(Names::Just(name.clone()))).await?;
            let place = position.and_then(|(id, _)| waiting.iter().position(|entry| entry.id == id));
            let ahead = place.unwrap_or_else(|| waiting.len() + position.map_or(0, |(_, ahead)| ahead));
            let holder = holders.into_iter().find_map(LeaseInfo::of);
            Ok::<_, Error>(Waiting { ahead, holder, waited: start.elapsed() })
        };
        let progress = match first(std::pin::pin!(&mut acquisition), std::pin::pin!(progress)).await {
            Ok(answer) => return answer,
            Err(progress) => progress,
        };
        // When the database is out of reach, the answer tells.
        if let Ok(waiting) = progress {
            let now = Some((waiting.ahead, waiting.holder.as_ref().map(|holder| holder.token)));
            if std::mem::replace(&mut known, now) != now {
                tell(&waiting);
            }
        }
    }
}

impl Client {
    /// The error of a wait that got nothing.
    pub(crate) fn refused(&self, refusal: Refusal, name: LockName, start: Instant) -> Error {
        let waited = start.elapsed();
        match refusal {
            // A database that could not be asked is not a name that was held.
            Refusal::Held | Refusal::Timeout => match self.coordinator.executor().trouble() {
                Some(reason) => Error::Unavailable { attempted: "acquire", reason, source: None },
                None => Error::Timeout { name, waited },
            },
            Refusal::TooLate => {
                let reason = "the grant arrived after the lease had ended".into();
                Error::Unavailable { attempted: "acquire", reason, source: None }
            }
            Refusal::NoAnswer => {
                let reason = format!("no answer came within {waited:?}");
                Error::Unavailable { attempted: "acquire", reason, source: None }
            }
            Refusal::Conversion { name } => {
                let reason = "its owner shares it; give the shared lease back first";
                Error::Conversion { name, reason }
            }
            Refusal::Lost | Refusal::Closed => Error::Closed,
            Refusal::Failed(failure) => failure.into_error(),
        }
    }
}

/// Runs two futures until one of them completes; the first wins a tie.
pub(crate) async fn first<A: Future, B: Future>(
    mut a: std::pin::Pin<&mut A>,
    mut b: std::pin::Pin<&mut B>,
) -> Result<A::Output, B::Output> {
    use std::task::Poll;
    std::future::poll_fn(|cx| {
        if let Poll::Ready(a) = a.as_mut().poll(cx) {
            return Poll::Ready(Ok(a));
        }
        b.as_mut().poll(cx).map(Err)
    })
    .await
}

/// Does the work while a lease is held. `Err`: the lease was lost first, and why.
///
/// The lease is looked at before every poll of the work: when the process was stopped, or its thread blocked, past the deadline,
/// the work is dropped without another poll, even if it could go on at once.
pub(crate) async fn while_held<T>(
    work: impl Future<Output = T>,
    is_held: impl Fn() -> bool,
    lost: impl Future<Output = LossCause>,
) -> Result<T, LossCause> {
    use std::task::Poll;
    let (mut work, mut lost) = (std::pin::pin!(work), std::pin::pin!(lost));
    std::future::poll_fn(|cx| {
        if is_held()
            && let Poll::Ready(done) = work.as_mut().poll(cx)
        {
            return Poll::Ready(Ok(done));
        }
        lost.as_mut().poll(cx).map(Err)
    })
    .await
}

/// A held lease: proof that nobody else was granted the name, for as long as [`is_held`](Self::is_held).
///
/// It is renewed in the background. [`release`](Self::release) it to learn whether it lasted; dropping it releases it too,
/// in the background. If the process dies, the name is free after the TTL.
#[must_use = "a lease that is dropped is released at once"]
pub struct Lease {
    client: Arc<Client>,
    /// `None` only while the lease is being given back.
    held: Option<HeldLease>,
    grant: Granted,
}

/// What a lease is, as long as it is held.
#[derive(Clone, Debug)]
struct Granted {
    name: LockName,
    owner: Owner,
    token: FencingToken,
    mode: Mode,
    ttl: Duration,
    terms: Terms,
    begun: Moment,
}

impl Lease {
    fn new(client: Arc<Client>, held: HeldLease, mode: Mode, ttl: Duration, terms: Terms) -> Self {
        let (name, owner, token) = (held.name().clone(), held.owner(), held.token());
        let grant = Granted { name, owner, token, mode, ttl, terms, begun: Moment::now() };
        Self { client, held: Some(held), grant }
    }

    /// The name that is held.
    pub fn name(&self) -> &LockName {
        &self.grant.name
    }

    /// The fencing token of this holding: greater than that of every earlier holding of the name.
    pub fn token(&self) -> FencingToken {
        self.grant.token
    }

    /// Who holds, for [re-entering](LeaseRequest::owner) from elsewhere.
    pub fn owner(&self) -> Owner {
        self.grant.owner
    }

    /// Whether the name is certainly still ours. Local: it reads a clock and does no I/O.
    ///
    /// It turns `false` before the database could grant the name to another, also if this process was stopped or the
    /// machine slept in between, and never turns `true` again. Between this check and what you do next, time may pass: use
    /// [`fence`](Self::fence) for data in this database.
    pub fn is_held(&self) -> bool {
        self.held.as_ref().is_some_and(HeldLease::is_held)
    }

    /// For how much longer the lease is safe without a heartbeat. Zero when it is lost. One that another process has handed over
    /// is safe for up to 3 seconds at first, and for its TTL some 0.2 seconds later.
    pub fn remaining(&self) -> Duration {
        self.held.as_ref().and_then(HeldLease::deadline).map_or(Duration::ZERO, Moment::remaining)
    }

    /// Completes when the lease is lost, with the reason. Pending for ever while it is held.
    ///
    /// # Cancel safety
    ///
    /// It may be dropped and called again; no loss is missed.
    pub async fn lost(&self) -> LossCause {
        self.losing().await
    }

    /// Makes sure that this transaction can commit only while the lease is ours: until it ends, nobody else can be granted
    /// the name. Renewals go on meanwhile.
    ///
    /// Make it the first statement of the transaction, outside any savepoint. What it costs is one statement (a row lock
    /// that is shared with other fences of this lease; on SQLite the write lock, during which no lease in the same file
    /// can be renewed: keep such transactions shorter than the TTL).
    ///
    /// ```
    /// # async fn example(pool: sqlx::SqlitePool, lease: sqlock::Lease) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut tx = pool.begin().await?;
    /// lease.fence(&mut tx).await?;
    /// sqlx::query("UPDATE invoice SET reminded = 1 WHERE id = 42").execute(&mut *tx).await?;
    /// tx.commit().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// On a Galera cluster, where locks are not seen by other nodes, a fence is a write: whoever takes the name over on another node
    /// is not kept waiting, and this transaction cannot commit any more. See the [guide](crate::guide::cluster#galera).
    ///
    /// A fence of a shared lease or of permits keeps out those who want the name for themselves alone, not others who share it:
    /// when a fenced permit ends before its transaction does, another holder may get it meanwhile.
    ///
    /// For data elsewhere, send [`token`](Self::token) along. There, comparing tokens only when writing loses updates:
    /// the receiver must *first* record the token as the highest it has seen, *then* read, then write on condition that the
    /// recorded token is still this one.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the lease has ended: nothing was written. [`Error::Fence`] when the transaction is of another
    /// kind of database, is not open, is inside a savepoint, or reads from before the lease. After an error, roll back.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the transaction as undecided as dropping any of its statements: roll back.
    pub async fn fence<DB: Database>(&self, tx: &mut Transaction<'_, DB>) -> Result<()> {
        if DB::KIND != self.client.kind {
            return Err(Error::Fence(FenceError::OtherDatabase));
        }
        match DB::TransactionManager::get_transaction_depth(tx) {
            0 => return Err(Error::Fence(FenceError::NoTransaction)),
            1 => {}
            _ => return Err(Error::Fence(FenceError::InSavepoint)),
        }
        let held = self.held()?;
        let check = Check {
            name: self.name().as_str().to_owned(),
            id: held.id().to_string(),
            token: self.token().get(),
            by_writing: self.client.backend.is_one_of_many_writers(),
        };
        match DB::fence(tx, &check).await {
            Ok(Verdict::Fenced) => Ok(()),
            Ok(Verdict::Superseded) => {
                // The lease is looked up at once, so that its other users hear of the loss.
                held.doubt();
                Err(self.loss(LossCause::Superseded))
            }
            Ok(Verdict::StaleSnapshot) => Err(Error::Fence(FenceError::StaleSnapshot)),
            Err(error) => Err(Error::from_sqlx("fence a transaction", error)),
        }
    }

    /// Makes the lease last at least `ttl` from now, whatever the heartbeat does. Should this process die, the name
    /// is blocked for as long. [`max_hold`](LeaseRequest::max_hold) ends it all the same.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when it has ended, [`Error::OutOfRange`], or [`Error::Unavailable`] when the database could not be
    /// reached: the lease is then as good as before.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does no harm; the extension may or may not take place.
    pub async fn extend(&self, ttl: Duration) -> Result<()> {
        self.extending(ttl)?.await
    }

    /// An extension that is on its way, to be awaited apart from the lease.
    pub(crate) fn extending(&self, ttl: Duration) -> Result<impl Future<Output = Result<()>> + Send + use<>> {
        self.client.settings.check_ttl("an extension", ttl)?;
        let lasts = match self.grant.terms.max_hold {
            Some(max_hold) => ttl.min((self.grant.begun + max_hold).remaining()),
            None => ttl,
        };
        let extended = self.held()?.amend(Amendment::Extend(lasts));
        let (name, token) = (self.name().clone(), self.token());
        Ok(async move {
            extended.await.map_err(|reason| match reason {
                NotAmended::Lost(cause) => Error::Lost { name, token, cause },
                NotAmended::Failed(failure) => failure.into_error(),
                NotAmended::EnteredAgain => Error::Closed,
            })
        })
    }

    /// The lease in the hands of the engine. `Err`: it has ended.
    fn held(&self) -> Result<&HeldLease> {
        let held = self.held.as_ref().ok_or(Error::Closed)?;
        if held.is_held() { Ok(held) } else { Err(self.loss(self.cause())) }
    }

    /// Why it has ended.
    pub(crate) fn cause(&self) -> LossCause {
        let told = self.held.as_ref().and_then(HeldLease::loss);
        let max_hold = self.grant.terms.max_hold.filter(|max| (self.grant.begun + *max).is_past());
        told.unwrap_or(if max_hold.is_some() { LossCause::MaxHold } else { LossCause::Expired })
    }

    /// Completes when the lease is lost, also after it was dropped.
    pub(crate) fn losing(&self) -> impl Future<Output = LossCause> + Send + use<> {
        let losing = self.held.as_ref().map(HeldLease::losing);
        async move {
            match losing {
                Some(losing) => losing.await,
                None => std::future::pending().await,
            }
        }
    }

    /// Raises the token of an exclusive lease that has been entered once. `Ok(None)`: it could not be raised, and is given back.
    /// When the future is dropped the lease goes back.
    pub(crate) async fn raise(mut self, to: FencingToken) -> Result<Option<Self>> {
        match self.held()?.amend(Amendment::Raise(to)).await {
            Ok(()) => {
                self.grant.token = to;
                Ok(Some(self))
            }
            Err(NotAmended::Failed(failure)) => Err(failure.into_error()),
            Err(NotAmended::Lost(_) | NotAmended::EnteredAgain) => Ok(None),
        }
    }

    /// Turns the lease into a [shared](LeaseRequest::shared) one, without a gap in which a writer could come in. Readers that
    /// wait next in line come in at once. The token stays the same.
    ///
    /// There is no way back: two readers that both wait to become writers would wait for ever. Release it and acquire again.
    ///
    /// # Errors
    ///
    /// [`Error::Conversion`] when its owner has entered more than once, or it is one of several permits: nothing has changed.
    /// [`Error::Lost`] when it has ended. After any other error the lease is lost, for it is not known what it was turned into.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future after its first poll loses the lease.
    pub async fn downgrade(&mut self) -> Result<()> {
        let name = self.name().clone();
        let held = self.held()?;
        match self.grant.mode {
            Mode::READ => return Ok(()),
            Mode::Exclusive => {}
            Mode::Shared { .. } => {
                return Err(Error::Conversion { name, reason: "permits of a semaphore are shared already" });
            }
        }
        match held.amend(Amendment::Downgrade).await {
            Ok(()) => {
                self.grant.mode = Mode::READ;
                Ok(())
            }
            Err(NotAmended::EnteredAgain) => {
                let reason = "its owner has entered more than once; give the other holds back first";
                Err(Error::Conversion { name, reason })
            }
            Err(NotAmended::Lost(cause)) => Err(self.loss(cause)),
            Err(NotAmended::Failed(failure)) => Err(failure.into_error()),
        }
    }

    /// Gives the lease back, and tells whether it had been ours to the end.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: it had ended before. [`Error::Unavailable`] or [`Error::Unknown`]: the database could not be told,
    /// or it is not known whether it was; the name is free after the TTL at the latest.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future after its first poll does not stop the release.
    pub async fn release(self) -> Result<()> {
        self.depart().await
    }

    /// The same, under way before it is awaited: what is given back together goes in one statement.
    pub(crate) fn depart(self) -> impl Future<Output = Result<()>> {
        let keep_for = self.keep_for();
        let (name, token) = (self.name().clone(), self.token());
        let was_held = self.held().map(|_| ());
        let mut lease = self;
        let verdict = lease.held.take().map(|held| held.release(keep_for));
        async move {
            was_held?;
            let Some(verdict) = verdict else {
                return Err(Error::Closed);
            };
            match verdict.await {
                engine::Verdict::Kept => Ok(()),
                engine::Verdict::Lost(cause) => Err(Error::Lost { name, token, cause }),
                engine::Verdict::Unknown => Err(Error::Unknown { attempted: "release", name }),
                engine::Verdict::NoEffect => {
                    let reason = "the release had no effect: a trigger, a rule or a row-level policy on the sqlock tables undoes it";
                    let source = sqlx::Error::Protocol(reason.into());
                    Err(Error::Database { attempted: "release", source })
                }
                engine::Verdict::Failed(failure) => Err(failure.into_error()),
            }
        }
    }

    /// For how long the name is to be kept from others after the lease.
    fn keep_for(&self) -> Duration {
        let at_least = self.grant.terms.hold_at_least.unwrap_or_default();
        at_least.saturating_sub(Moment::now().since(self.grant.begun))
    }

    /// Turns the lease into a text that another process can [resume](crate::Locks::resume). This process no longer renews
    /// it: it must be resumed within the time that [remains](Self::remaining); [`extend`](Self::extend) it before if that may be
    /// too short. Of the request's terms only the TTL goes along: a resumed lease is renewed, and has no
    /// [`max_hold`](LeaseRequest::max_hold) and no [`hold_at_least`](LeaseRequest::hold_at_least).
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when it has ended.
    pub fn export(self) -> Result<ExportedLease> {
        self.held()?;
        let mut lease = self;
        let Some(held) = lease.held.take() else {
            return Err(Error::Closed);
        };
        match held.export() {
            Ok(exported) => {
                let Granted { name, owner, mode, ttl, .. } = lease.grant.clone();
                Ok(ExportedLease { name, owner, exported, mode, ttl })
            }
            Err(held) => {
                lease.held = Some(held);
                lease.held()?;
                let reason = "its owner has entered more than once; give the other holds back first";
                Err(Error::Conversion { name: lease.name().clone(), reason })
            }
        }
    }

    /// Takes over a lease that was exported.
    pub(crate) async fn resume(client: &Arc<Client>, exported: ExportedLease) -> Result<Self> {
        let ExportedLease { name, owner, exported, mode, ttl } = exported;
        client.settings.check_ttl("the TTL of an exported lease", ttl)?;
        let terms = Terms { renew: true, max_hold: None, hold_at_least: None };
        let wish = Wish {
            name: name.clone(),
            owner,
            reenters: true,
            mode,
            ttl,
            is_kept: true,
            max_hold: None,
            label: "".into(),
            patience: Patience::Try(Moment::now() + TRY_WITHIN),
        };
        let start = Instant::now();
        match client.coordinator.resume(wish, exported).await {
            Ok(mut held) => {
                // Until here, the text can be resumed again.
                held.deliver();
                Ok(Self::new(Arc::clone(client), held, mode, ttl, terms))
            }
            Err(Refusal::Lost) => Err(Error::Lost { name, token: exported.token, cause: LossCause::Superseded }),
            Err(refusal) => Err(client.refused(refusal, name, start)),
        }
    }

    pub(crate) fn loss(&self, cause: LossCause) -> Error {
        Error::Lost { name: self.name().clone(), token: self.token(), cause }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let keep_for = self.keep_for();
        if let Some(held) = self.held.take() {
            drop(held.release(keep_for));
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("name", self.name())
            .field("token", &self.token())
            .field("is_held", &self.is_held())
            .finish_non_exhaustive()
    }
}
