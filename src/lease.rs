//! A lease: owner and expiry in a row of the database, renewed until it is given back.

pub(crate) mod export;
pub(crate) mod renewal;

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use sqlx::Transaction;
use sqlx_core::transaction::TransactionManager;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::backend::sealed::{Check, Verdict};
use crate::backend::{CLAIM, Claim, Database, Holding, Mode, Names, Renewal, Standing, Ticket};
use crate::client::Client;
use crate::clock::Moment;
use crate::error::{Error, FenceError, LossCause, Result};
use crate::inspect::{LeaseInfo, Waiting};
use crate::name::LockName;
use crate::owner::{Hold, Owner};
use crate::pump::{Answer, Reply, Verb};
use crate::token::FencingToken;
use crate::waiting::{Patience, Waiter, WaiterId};
use export::ExportedLease;
use renewal::{Fate, Tenure};

/// The TTL of a lease that asks for none.
pub(crate) const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// A label is for people to read in a list.
const MAX_LABEL_BYTES: usize = 255;

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

    pub(crate) fn patience(&self) -> Option<Duration> {
        self.wait
    }

    /// By which client, as whose, and how it is to be held.
    pub(crate) fn parts(&self) -> (&Arc<Client>, Option<Owner>, Terms) {
        (&self.client, self.owner, self.terms)
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

    /// How long the lease outlives its last renewal: the longest time for which a crashed holder blocks others.
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
        let wait = self.wait;
        if wait.is_some_and(|wait| wait.is_zero()) {
            let name = LockName::new(&*self.name)?;
            return self.try_acquire().await?.ok_or(Error::Timeout { name, waited: start.elapsed() });
        }
        let told = self.told.clone();
        let (mut waiting, name) = self.stand_in_line(Patience::Wait)?;
        let answer = match wait {
            None => waiting.answer_telling(told).await,
            Some(wait) => match tokio::time::timeout(wait, waiting.answer_telling(told)).await {
                Ok(answer) => answer,
                Err(_) => {
                    let error = waiting.timeout(name, start.elapsed());
                    return waiting.give_up(error).await;
                }
            },
        };
        match answer? {
            Some(lease) => Ok(lease),
            None => Err(Error::Timeout { name, waited: start.elapsed() }),
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
        let (mut waiting, _) = self.stand_in_line(Patience::TRY)?;
        waiting.answer().await
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

    /// What is asked for.
    pub(crate) fn claim(&self, name: LockName, owner: Owner, hold: Hold) -> Claim {
        Claim {
            name,
            owner,
            hold,
            mode: self.mode,
            // A holder that hangs does not drop its guard: the row must end with max_hold by itself.
            ttl: self.ttl.min(self.terms.max_hold.unwrap_or(Duration::MAX)),
            holder: Arc::clone(&self.client.settings.holder),
            label: self.label.as_str().into(),
        }
    }

    fn stand_in_line(self, patience: Patience) -> Result<(InLine, LockName)> {
        let name = LockName::new(&*self.name)?;
        self.check()?;
        let claim = self.claim(name.clone(), self.owner.unwrap_or_else(Owner::random), Hold::random());
        let (reply, answer) = oneshot::channel();
        let id = WaiterId::next();
        let waiting = InLine { client: self.client, name: name.clone(), id, answer, answered: false };
        // Permits are counted, whoever takes them: only a lease can be entered again.
        let reenters = self.reenters && matches!(self.mode, Mode::Exclusive | Mode::READ);
        let waiter =
            Waiter { id, claim, terms: self.terms, patience, reenters, since: Moment::now(), asks: false, reply };
        waiting.client.start();
        if reenters {
            waiting.client.join(waiter);
        } else {
            waiting.client.enter(waiter);
        }
        Ok((waiting, name))
    }
}

impl fmt::Debug for LeaseRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaseRequest").field("name", &self.name).field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

/// How long one whose patience has run out waits for the database to confirm that it has left the line.
pub(crate) const FAREWELL: Duration = Duration::from_millis(250);

/// A place in line. Dropping it gives the place up.
struct InLine {
    client: Arc<Client>,
    name: LockName,
    id: WaiterId,
    answer: oneshot::Receiver<Result<Option<Lease>>>,
    answered: bool,
}

impl InLine {
    async fn answer(&mut self) -> Result<Option<Lease>> {
        let answer = (&mut self.answer).await;
        self.answered = true;
        answer.unwrap_or(Err(Error::Closed))
    }

    /// The same, telling how far it has come.
    async fn answer_telling(&mut self, told: Option<Told>) -> Result<Option<Lease>> {
        let Some(tell) = told else {
            return self.answer().await;
        };
        let start = Instant::now();
        let (client, name, id) = (Arc::clone(&self.client), self.name.clone(), self.id);
        let mut known = None;
        let mut pause = Duration::from_millis(100);
        loop {
            if let Ok(answer) = tokio::time::timeout(pause, self.answer()).await {
                return answer;
            }
            pause = Duration::from_secs(1);
            let progress = async {
                let holders = client.ask(|reply| Verb::List(Names::Just(name.clone()), reply)).await.outcome?;
                let waiting = client.ask(|reply| Verb::Waiters(name.clone(), reply)).await.outcome?;
                let mark = client.mark_of(&name, id);
                let ahead = waiting.iter().position(|place| Some(&place.hold) == mark.as_ref());
                let ahead = ahead.unwrap_or_else(|| waiting.len() + client.ahead_of(&name, id));
                Ok::<_, Error>(Waiting {
                    ahead,
                    holder: holders.into_iter().find_map(LeaseInfo::of),
                    waited: start.elapsed(),
                })
            };
            let progress = match first(std::pin::pin!(self.answer()), std::pin::pin!(progress)).await {
                Ok(answer) => return answer,
                Err(progress) => progress,
            };
            // Should the database be out of reach, the answer will say so.
            if let Ok(waiting) = progress {
                let now = Some((waiting.ahead, waiting.holder.as_ref().map(|holder| holder.token)));
                if std::mem::replace(&mut known, now) != now {
                    tell(&waiting);
                }
            }
        }
    }

    /// Leaves the line and fails with this error; a database that can be reached has been told then. A grant that comes in
    /// the very last moment counts.
    async fn give_up(mut self, error: Error) -> Result<Lease> {
        self.client.dismiss(&self.name, self.id);
        let patience = if error.is_timeout() { FAREWELL } else { Duration::ZERO };
        match tokio::time::timeout(patience, self.answer()).await {
            Ok(Ok(Some(lease))) => Ok(lease),
            _ => Err(error),
        }
    }

    /// Why there is no lease when the time is over: a database that could not be asked is not a name that was held.
    fn timeout(&self, name: LockName, waited: Duration) -> Error {
        // A wait about as short as a round trip says nothing about the database.
        let unanswered = || {
            let silent = waited >= Duration::from_millis(100) && self.client.is_unanswered(&name);
            silent.then(|| format!("no answer came within {waited:?}"))
        };
        match self.client.pump.trouble().or_else(unanswered) {
            Some(reason) => Error::Unavailable { attempted: "acquire", reason, source: None },
            None => Error::Timeout { name, waited },
        }
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        if !self.answered {
            self.answer.close();
            self.client.forget(&self.name, self.id);
        }
    }
}

/// Ends a holding whose kind is not known any more.
struct Undo {
    client: Arc<Client>,
    holdings: [Holding; 2],
    armed: bool,
}

impl Undo {
    fn disarm(mut self) {
        self.armed = false;
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if self.armed {
            // Those of this process who wait behind it need not wait for its next renewal to find out.
            let [from, _] = &self.holdings;
            self.client.keeper.evicted(&from.name, from.token);
            for holding in &self.holdings {
                self.client.abandon(holding);
            }
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
    tenure: Arc<Tenure>,
}

impl Lease {
    /// `claimed`: its TTL is still to be confirmed.
    pub(crate) fn begin(client: Arc<Client>, tenure: Arc<Tenure>, claimed: bool) -> Self {
        client.keeper.keep(&tenure, claimed);
        Self { client, tenure }
    }

    pub(crate) fn holding(&self) -> &Holding {
        &self.tenure.holding
    }

    /// The name that is held.
    pub fn name(&self) -> &LockName {
        &self.tenure.holding.name
    }

    /// The fencing token of this holding: greater than that of every earlier holding of the name.
    pub fn token(&self) -> FencingToken {
        self.tenure.holding.token
    }

    /// Who holds, for [re-entering](LeaseRequest::owner) from elsewhere.
    pub fn owner(&self) -> Owner {
        self.tenure.holding.owner
    }

    /// Whether the name is certainly still ours. Local: it reads a clock and does no I/O.
    ///
    /// It turns `false` before the database could grant the name to another, also if this process was stopped or the
    /// machine slept in between, and never turns `true` again. Between this check and what you do next, time may pass: use
    /// [`fence`](Self::fence) for data in this database.
    pub fn is_held(&self) -> bool {
        self.tenure.is_held()
    }

    /// For how much longer the lease is safe without a renewal. Zero when it is lost. One that another process has handed over
    /// is safe for up to 3 seconds at first, and for its TTL from its first renewal, some 0.2 seconds later.
    pub fn remaining(&self) -> Duration {
        if self.is_held() { self.tenure.deadline().remaining() } else { Duration::ZERO }
    }

    /// Completes when the lease is lost, with the reason. Pending for ever while it is held.
    ///
    /// # Cancel safety
    ///
    /// It may be dropped and called again; no loss is missed.
    pub async fn lost(&self) -> LossCause {
        self.tenure.lost().await
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
        if let Fate::Lost(cause) = self.tenure.fate() {
            return Err(self.loss(cause));
        }
        let holding = self.holding();
        let check = Check {
            name: holding.name.as_str().to_owned(),
            owner: holding.owner.to_string(),
            mark: holding.hold.mark(),
            token: holding.token.get(),
            shared: holding.mode != Mode::Exclusive,
            by_writing: self.client.backend.is_one_of_many_writers(),
        };
        match DB::fence(tx, &check).await {
            Ok(Verdict::Fenced) => Ok(()),
            Ok(Verdict::Superseded) => Err(self.loss(LossCause::Superseded)),
            Ok(Verdict::StaleSnapshot) => Err(Error::Fence(FenceError::StaleSnapshot)),
            Err(error) => Err(Error::from_sqlx("fence a transaction", error)),
        }
    }

    /// Makes the lease last at least `ttl` from now, without waiting for the next renewal. Should this process die, the name
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
        if let Fate::Lost(cause) = self.tenure.fate() {
            return Err(self.loss(cause));
        }
        let asked = self.tenure.renewal(ttl);
        let renewal = Renewal::new(self.holding().clone(), asked);
        let (extended, answered) = oneshot::channel();
        let (client, tenure) = (Arc::clone(&self.client), Arc::clone(&self.tenure));
        // Noted down in the reply, so that it counts even if this future is dropped.
        let reply = Reply::to(move |answer: Answer<Standing>| {
            let _ = extended.send(match answer.outcome {
                Ok(_) => {
                    client.keeper.renewed(&tenure, asked, answer);
                    Ok(())
                }
                Err(error) => Err(error),
            });
        });
        self.client.pump.send(Verb::Renew(renewal, reply));
        let tenure = Arc::clone(&self.tenure);
        Ok(async move {
            answered.await.unwrap_or(Err(Error::Closed))?;
            match tenure.fate() {
                Fate::Lost(cause) => {
                    let Holding { name, token, .. } = tenure.holding.clone();
                    Err(Error::Lost { name, token, cause })
                }
                _ => Ok(()),
            }
        })
    }

    pub(crate) fn tenure(&self) -> &Arc<Tenure> {
        &self.tenure
    }

    /// Raises the token of an exclusive lease that has been entered once. `Ok(None)`: it could not be raised, and is given back.
    /// Whatever becomes of the future, the lease goes back if nobody receives it.
    pub(crate) async fn raise(self, to: FencingToken) -> Result<Option<Self>> {
        let (client, holding) = (Arc::clone(&self.client), self.holding().clone());
        // Until the answer says which token stands there, no renewal can name it.
        client.keeper.let_go(holding.hold);
        let (raised, answered) = oneshot::channel();
        let reply = Reply::to(move |answer: Answer<bool>| {
            let client = Arc::clone(&self.client);
            // The next tenure keeps the deadline that this one has by now.
            let tenure = self.tenure.raised(to);
            let ours = self.tenure.give_back().is_ok();
            let outcome = match answer.outcome {
                Ok(true) if ours => {
                    // Where the next renewal might come too late it is made soon.
                    let short = tenure.deadline().remaining() < tenure.ttl / 2;
                    let lease = Self::begin(Arc::clone(&client), tenure, short);
                    if client.is_closed() { Err(Error::Closed) } else { Ok(Some(lease)) }
                }
                outcome => {
                    // Whichever token stands in the row by now.
                    let Holding { name, owner, hold, .. } = self.holding();
                    client.withdraw(name, *owner, *hold, None);
                    if ours {
                        client.vacate(self.holding());
                    }
                    outcome.map(|_| None)
                }
            };
            // When nobody listens any more, the lease goes back by being dropped here.
            let _ = raised.send(outcome);
        });
        client.pump.send(Verb::Raise(holding, to, reply));
        answered.await.unwrap_or(Err(Error::Closed))
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
        if let Fate::Lost(cause) = self.tenure.fate() {
            return Err(self.loss(cause));
        }
        let name = self.name().clone();
        match self.holding().mode {
            Mode::READ => return Ok(()),
            Mode::Exclusive | Mode::Joint => {}
            Mode::Shared { .. } => {
                return Err(Error::Conversion { name, reason: "permits of a semaphore are shared already" });
            }
        }
        let from = self.holding().clone();
        let shared = Holding { mode: Mode::READ, ..from.clone() };
        let ttl = self.tenure.renewal(self.tenure.ttl);
        let client = &self.client;
        let claim = Claim {
            name: name.clone(),
            owner: from.owner,
            hold: from.hold,
            mode: Mode::READ,
            ttl,
            holder: Arc::clone(&client.settings.holder),
            label: "".into(),
        };
        let ticket = Ticket { claim, client: Arc::clone(&client.id), bell: "".into(), since: Moment::now() };
        // From here on it is not known which of the two stands, until the answer says so: neither, if nobody hears it.
        let undo = Undo { client: Arc::clone(client), holdings: [from.clone(), shared.clone()], armed: true };
        let answer = client.ask(|reply| Verb::Downgrade(from.clone(), ticket, reply)).await;
        let mut sent_at = answer.sent_at;
        let mut done = answer.outcome;
        if matches!(done, Ok(false)) {
            // It was ours and has been converted already, if the reply to an earlier request was lost.
            let renewal = Renewal::new(shared.clone(), ttl);
            let renewed = client.ask(|reply| Verb::Renew(renewal, reply)).await;
            sent_at = renewed.sent_at;
            done = renewed.outcome.map(|standing| standing == Standing::Held);
        }
        if matches!(done, Ok(false)) {
            let row = client.ask(|reply| Verb::Look(name.clone(), reply)).await.outcome;
            let standing = row.map(|row| row.map(|row| row.standing(from.owner, from.hold, Some(from.token))));
            if matches!(standing, Ok(Some(Standing::Held))) {
                undo.disarm();
                let reason = "its owner has entered more than once; give the other holds back first";
                return Err(Error::Conversion { name, reason });
            }
            return Err(self.loss(LossCause::Superseded));
        }
        done?;
        undo.disarm();
        if let Err(Fate::Lost(cause)) = self.tenure.give_back() {
            client.abandon(&shared);
            return Err(self.loss(cause));
        }
        client.keeper.let_go(from.hold);
        client.vacate(&from);
        self.tenure = self.tenure.converted(shared, sent_at, ttl);
        client.keeper.keep(&self.tenure, false);
        client.serve(&name);
        Ok(())
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
        let (verdict, answer) = oneshot::channel();
        let departed = match self.tenure.give_back() {
            Ok(()) => {
                self.client.keeper.let_go(self.holding().hold);
                self.client.leave(&self.tenure, Some(verdict));
                Ok(())
            }
            Err(Fate::Lost(cause)) => Err(self.loss(cause)),
            Err(_) => Err(self.loss(LossCause::Superseded)),
        };
        async move {
            departed?;
            answer.await.unwrap_or(Err(Error::Closed))
        }
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
        match self.tenure.give_back() {
            Ok(()) => {
                self.client.keeper.let_go(self.holding().hold);
                self.client.vacate(self.holding());
                // It may be a mere claim as yet.
                if self.tenure.deadline().remaining() < CLAIM {
                    let renewal = Renewal::new(self.holding().clone(), self.tenure.ttl);
                    self.client.pump.send(Verb::Renew(renewal, Reply::to(|_| {})));
                }
                Ok(ExportedLease { holding: self.holding().clone(), ttl: self.tenure.ttl })
            }
            Err(Fate::Lost(cause)) => Err(self.loss(cause)),
            Err(_) => Err(self.loss(LossCause::Superseded)),
        }
    }

    /// Takes over a lease that was exported.
    pub(crate) async fn resume(client: &Arc<Client>, exported: ExportedLease) -> Result<Self> {
        let ExportedLease { holding, ttl } = exported;
        client.settings.check_ttl("the TTL of an exported lease", ttl)?;
        if holding.mode != Mode::Exclusive {
            return Self::resume_share(client, holding, ttl).await;
        }
        // Enters once more as the same owner and then ends the exported hold. So a text that is resumed twice makes two
        // holds of one owner, and each of them keeps the name until it is given back.
        let claim = Claim {
            name: holding.name.clone(),
            owner: holding.owner,
            hold: Hold::random(),
            mode: Mode::Exclusive,
            ttl,
            holder: Arc::clone(&client.settings.holder),
            label: "".into(),
        };
        let (resumed, answered) = oneshot::channel();
        let exported = holding.clone();
        let taker = Arc::clone(client);
        let entered = claim.clone();
        // In the reply, so that nothing is left behind when this future is dropped.
        let reply = Reply::to(move |answer: Answer<Option<FencingToken>>| {
            let outcome = match answer.outcome {
                Ok(Some(token)) if token == holding.token && !taker.is_closed() => {
                    let terms = Terms { renew: true, max_hold: None, hold_at_least: None };
                    let holding = Holding { hold: entered.hold, ..holding };
                    taker.adopt(&holding);
                    let tenure = Tenure::begin(holding, ttl, terms, answer.sent_at, ttl);
                    Ok(Self::begin(taker, tenure, false))
                }
                Ok(None) => Err(Error::Lost { name: holding.name, token: holding.token, cause: LossCause::Superseded }),
                answer => {
                    taker.withdraw(&entered.name, entered.owner, entered.hold, None);
                    let lost = Error::Lost { name: holding.name, token: holding.token, cause: LossCause::Superseded };
                    Err(if taker.is_closed() { Error::Closed } else { answer.err().unwrap_or(lost) })
                }
            };
            let _ = resumed.send(outcome);
        });
        client.start();
        client.pump.send(Verb::Join(claim, reply));
        let lease = answered.await.unwrap_or(Err(Error::Closed))?;
        // Only now: until here, the text can be resumed again.
        client.withdraw(&exported.name, exported.owner, exported.hold, Some(exported.token));
        Ok(lease)
    }

    /// The same for one who shares: a second place beside the exported one, which then goes.
    async fn resume_share(client: &Arc<Client>, from: Holding, ttl: Duration) -> Result<Self> {
        client.start();
        let to = Holding { hold: Hold::random(), ..from.clone() };
        let (resumed, answered) = oneshot::channel();
        let (taker, taken, exported) = (Arc::clone(client), to.clone(), from.clone());
        // In the reply, so that nothing is left behind when this future is dropped.
        let reply = Reply::to(move |answer: Answer<bool>| {
            let _ = resumed.send(match answer.outcome {
                Ok(true) => {
                    let terms = Terms { renew: true, max_hold: None, hold_at_least: None };
                    let tenure = Tenure::begin(taken, ttl, terms, answer.sent_at, ttl);
                    Ok(Self::begin(taker, tenure, false))
                }
                Ok(false) => Err(Error::Lost { name: taken.name, token: taken.token, cause: LossCause::Superseded }),
                Err(error) => {
                    taker.abandon(&taken);
                    Err(error)
                }
            });
        });
        client.pump.send(Verb::Copy { from, to: to.hold, ttl, reply });
        let lease = answered.await.unwrap_or(Err(Error::Closed))?;
        // Only now: until here, the text can be resumed again.
        client.abandon(&exported);
        Ok(lease)
    }

    pub(crate) fn loss(&self, cause: LossCause) -> Error {
        Error::Lost { name: self.name().clone(), token: self.token(), cause }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        match self.tenure.give_back() {
            Ok(()) => {
                self.client.keeper.let_go(self.holding().hold);
                self.client.leave(&self.tenure, None);
            }
            // Shutdown has given it back, or its holder has.
            Err(Fate::Returned | Fate::Lost(LossCause::Shutdown)) => {}
            // It should be nobody's by now; if the row still names it, make that so.
            Err(_) => {
                self.client.keeper.let_go(self.holding().hold);
                self.client.vacate(self.holding());
                self.client.abandon(self.holding());
            }
        }
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("name", self.name())
            .field("token", &self.token())
            .field("fate", &self.tenure.fate())
            .finish_non_exhaustive()
    }
}
