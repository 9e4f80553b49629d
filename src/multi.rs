//! Several names at once: all or none.
//!
//! Whoever wants several names first tries to take them all in one transaction. If that fails it stands in the line of each,
//! at one and the same moment, so of two that want some of the same names the same one is first wherever they meet. It holds
//! nothing while it waits. When it is first in every line and every name is free, it takes them all in one transaction.
//! (With one order for all, somebody is always first everywhere: there is no circle in which each waits for the next. The order
//! of arrival does here what a fixed order of resources does in Havender's standard pattern: J. W. Havender, "Avoiding deadlock
//! in multitasking systems", IBM Systems Journal 7(2), 1968.)
//!
//! Whoever frees a name calls the one that is first in its line, in its own process and wherever the database can tell.
//! Elsewhere it looks, the more often the sooner its turn may come.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::Transaction;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::backend::{CLAIM, Claim, Database, Holding, Mode, SHARED, Spot, Ticket, Watched};
use crate::client::{Client, late};
use crate::clock::{Moment, reliance};
use crate::error::{Error, LossCause, Result};
use crate::lease::renewal::Tenure;
use crate::lease::{FAREWELL, Lease, LeaseRequest, Terms, first, while_held};
use crate::name::LockName;
use crate::owner::{Hold, Owner};
use crate::pump::{Answer, Attend, Gather, Hindrance, Serve, Verb};
use crate::token::FencingToken;

/// The most names that are taken together: the transaction that takes them keeps others from these names while it lasts.
const MOST: usize = 64;

/// How often a try is repeated while all names are free and yet one is locked, by another that is about to take it.
const TRIES: u32 = 5;

/// The time between two such tries.
const BETWEEN_TRIES: Duration = Duration::from_millis(5);

/// How often the places in line give a sign of life.
const KEEP: Duration = CLAIM.checked_div(3).expect("not zero");

/// How soon and how late somebody who is first everywhere looks at its places; the others less often. Who is called when its
/// turn comes looks when somebody may have died.
const SOONEST: Duration = Duration::from_millis(1);
const LATEST: Duration = Duration::from_millis(100);

/// A request for the leases on several names, made with [`Locks::lease_all`](crate::Locks::lease_all). Nothing is sent until one
/// of [`acquire`](Self::acquire), [`try_acquire`](Self::try_acquire) and [`run`](Self::run) is awaited.
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
/// All are granted in one transaction, or none is. While it waits it holds none of them, and it stands in the line of each name
/// like anybody else: whoever comes later to one of them comes after it, also while that name is free and it waits for another
/// one. So it is never overtaken for ever, and a name may be idle meanwhile. Whatever the order in which callers name them, they
/// do not wait for each other in a circle, unless a caller holds some names already and then asks for more: ask for all at
/// once.
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

    /// As [`LeaseRequest::ttl`], for each of them.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.request = self.request.ttl(ttl);
        self
    }

    /// As [`LeaseRequest::wait`]: one deadline for all of them together.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.request = self.request.wait(at_most);
        self
    }

    /// As [`LeaseRequest::renew`].
    pub fn renew(mut self, renew: bool) -> Self {
        self.request = self.request.renew(renew);
        self
    }

    /// As [`LeaseRequest::max_hold`].
    pub fn max_hold(mut self, at_most: Duration) -> Self {
        self.request = self.request.max_hold(at_most);
        self
    }

    /// As [`LeaseRequest::label`].
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.request = self.request.label(label);
        self
    }

    /// As [`LeaseRequest::owner`]: names that this owner holds already are entered again.
    pub fn owner(mut self, owner: Owner) -> Self {
        self.request = self.request.owner(owner);
        self
    }

    /// Waits until all names can be had together, and takes them.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] when [`wait`](Self::wait) ran out: it tells one of the names that were in the way. [`Error::Names`] when
    /// no name was given, or more than 64 different ones. Otherwise those of [`LeaseRequest::acquire`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future gives up the places in line. Grants that are on their way are released in the background.
    pub async fn acquire(self) -> Result<LeaseAll> {
        let start = Instant::now();
        let wait = self.request.patience();
        let mut gathering = self.start(!wait.is_some_and(|wait| wait.is_zero()))?;
        let answer = match wait {
            Some(wait) if !wait.is_zero() => match timeout(wait, &mut gathering.answer).await {
                Ok(answer) => answer,
                Err(_) => return gathering.give_up(start.elapsed()).await,
            },
            _ => (&mut gathering.answer).await,
        };
        match answer.unwrap_or(Err(Error::Closed))? {
            Some(all) => Ok(all),
            None => Err(gathering.timeout(start.elapsed())),
        }
    }

    /// Takes all names if every one of them is free and nobody waits for it. `Ok(None)`: it is not so, and none was taken.
    ///
    /// # Errors
    ///
    /// As [`acquire`](Self::acquire), but never a timeout. [`wait`](Self::wait) has no effect.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind: grants that are on their way are released in the background.
    pub async fn try_acquire(self) -> Result<Option<LeaseAll>> {
        self.start(false)?.answer.await.unwrap_or(Err(Error::Closed))
    }

    /// Acquires the leases, does the work while all of them last, and releases them: as [`LeaseRequest::run`]. The work is
    /// dropped at its next await point when one of them is lost, and not polled again once a deadline has passed.
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire), and [`Error::Lost`] when one of the leases did not last until the work was done.
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
            Ok(done) => match all.release().await {
                Err(error) if error.is_lost() => Err(error),
                _ => Ok(done),
            },
            Err(cause) => {
                let lost = all.leases.iter().find(|lease| !lease.is_held()).or(all.leases.first());
                Err(lost.map_or(Error::Closed, |lease| lease.loss(cause)))
            }
        }
    }

    /// Checks the request and starts the task that sees to it: whatever becomes of our future, the task leaves nothing behind.
    fn start(self, waits: bool) -> Result<Underway> {
        self.request.check()?;
        let names: BTreeSet<LockName> = self.names.into_iter().map(LockName::new).collect::<Result<_>>()?;
        if names.is_empty() || names.len() > MOST {
            return Err(Error::Names { given: names.len(), most: MOST });
        }
        let (client, owner, terms) = self.request.parts();
        let its = owner.unwrap_or_else(Owner::random);
        let claims: Vec<Claim> =
            names.into_iter().zip(Hold::siblings()).map(|(name, hold)| self.request.claim(name, its, hold)).collect();
        let in_the_way = Arc::new(AtomicUsize::new(0));
        let (reply, answer) = oneshot::channel();
        let (at_work, done) = oneshot::channel();
        let names = claims.iter().map(|claim| claim.name.clone()).collect();
        let gathering = Gathering {
            client: Arc::clone(client),
            claims,
            terms,
            reenters: owner.is_some(),
            since: Moment::now(),
            in_the_way: Arc::clone(&in_the_way),
            reply,
            closing: client.gatherings.closing(),
            _at_work: at_work,
        };
        client.start();
        client.gatherings.spawn(gathering.run(waits));
        Ok(Underway { client: Arc::clone(client), names, in_the_way, answer, done })
    }
}

/// What the caller has in hand while the task is at work.
struct Underway {
    client: Arc<Client>,
    names: Vec<LockName>,
    in_the_way: Arc<AtomicUsize>,
    answer: oneshot::Receiver<Result<Option<LeaseAll>>>,
    /// Says that the task has ended.
    done: oneshot::Receiver<()>,
}

impl Underway {
    /// Ends the wait. What is granted in the very last moment counts; otherwise all places have been left when this returns, if
    /// the database can be reached.
    async fn give_up(mut self, waited: Duration) -> Result<LeaseAll> {
        let error = self.timeout(waited);
        // The task hears of this, and leaves.
        self.answer.close();
        let patience = if error.is_timeout() { FAREWELL } else { Duration::ZERO };
        let _ = timeout(patience, self.done).await;
        match self.answer.try_recv() {
            Ok(Ok(Some(all))) => Ok(all),
            _ => Err(error),
        }
    }

    fn timeout(&self, waited: Duration) -> Error {
        if let Some(reason) = self.client.pump.trouble() {
            return Error::Unavailable { attempted: "acquire", reason, source: None };
        }
        let name = self.names[self.in_the_way.load(Ordering::Relaxed)].clone();
        Error::Timeout { name, waited }
    }
}

/// The leases on several names, held together. Dropping it releases all of them in the background.
///
/// It is lost as soon as one of them is.
#[must_use = "the leases are released when this is dropped"]
pub struct LeaseAll {
    /// In order of names.
    leases: Vec<Lease>,
}

impl LeaseAll {
    /// The names, in order of their bytes, each with the fencing token of its holding.
    pub fn tokens(&self) -> impl ExactSizeIterator<Item = (&LockName, FencingToken)> {
        self.leases.iter().map(|lease| (lease.name(), lease.token()))
    }

    /// The fencing token of the holding of one of the names. `None`: it is not one of them.
    pub fn token(&self, name: &str) -> Option<FencingToken> {
        self.leases.iter().find(|lease| lease.name().as_str() == name).map(Lease::token)
    }

    /// Who holds: one owner for all of them.
    pub fn owner(&self) -> Owner {
        // There is at least one.
        self.leases[0].owner()
    }

    /// Whether all names are certainly still ours, as [`Lease::is_held`]. Local: it reads a clock and does no I/O.
    pub fn is_held(&self) -> bool {
        self.leases.iter().all(Lease::is_held)
    }

    /// For how much longer all of them are safe without a renewal. Zero when one is lost.
    pub fn remaining(&self) -> Duration {
        self.leases.iter().map(Lease::remaining).min().unwrap_or_default()
    }

    /// Completes when one of them is lost, with the reason. Pending for ever while all are held.
    ///
    /// # Cancel safety
    ///
    /// Nothing is lost by dropping the future; call it again as often as you like.
    pub async fn lost(&self) -> LossCause {
        let mut all: Vec<_> = self.leases.iter().map(|lease| Box::pin(lease.lost())).collect();
        std::future::poll_fn(|context| {
            let lost = all.iter_mut().map(|lost| lost.as_mut().poll(context)).find(std::task::Poll::is_ready);
            lost.unwrap_or(std::task::Poll::Pending)
        })
        .await
    }

    /// [`Lease::fence`] for each of them, in order of names: this transaction can commit only while all of them are ours.
    ///
    /// # Errors
    ///
    /// Those of [`Lease::fence`]. After an error, roll back.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the transaction as undecided as dropping any of its statements: roll back.
    pub async fn fence<DB: Database>(&self, tx: &mut Transaction<'_, DB>) -> Result<()> {
        for lease in &self.leases {
            lease.fence(tx).await?;
        }
        Ok(())
    }

    /// [`Lease::extend`] for each of them.
    ///
    /// # Errors
    ///
    /// Those of [`Lease::extend`]: some of them may have been extended then.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does no harm; the extension may or may not take place.
    pub async fn extend(&self, ttl: Duration) -> Result<()> {
        for lease in &self.leases {
            lease.extend(ttl).await?;
        }
        Ok(())
    }

    /// Gives all of them back in one statement, and tells whether all had been ours to the end.
    ///
    /// # Errors
    ///
    /// As [`Lease::release`]: [`Error::Lost`] when one of them was lost, otherwise the first error there is. The others are given back
    /// all the same.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future after its first poll does not stop the release.
    pub async fn release(self) -> Result<()> {
        let departures: Vec<_> = self.leases.into_iter().map(Lease::depart).collect();
        let mut outcome: Result<()> = Ok(());
        for departure in departures {
            let departed = departure.await;
            let matters = match (&outcome, &departed) {
                (Err(first), Err(error)) => error.is_lost() && !first.is_lost(),
                (Ok(()), _) => true,
                _ => false,
            };
            if matters {
                outcome = departed;
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

/// The tasks of one client that gather names.
pub(crate) struct Gatherings {
    tasks: Mutex<JoinSet<()>>,
    closing: watch::Sender<bool>,
    /// Who is to be called when it is the turn of one of its places, by the marks of their holds.
    calls: Mutex<HashMap<String, Arc<Notify>>>,
}

impl Default for Gatherings {
    fn default() -> Self {
        Self { tasks: Mutex::default(), closing: watch::Sender::new(false), calls: Mutex::default() }
    }
}

impl Gatherings {
    fn spawn(&self, gathering: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(gathering);
    }

    fn closing(&self) -> watch::Receiver<bool> {
        self.closing.subscribe()
    }

    /// It may be the turn of a place, if that is one of ours.
    pub(crate) fn call(&self, mark: &str) {
        if let Some(called) = self.calls().get(mark) {
            called.notify_one();
        }
    }

    /// All are to look for themselves.
    pub(crate) fn call_all(&self) {
        self.calls().values().for_each(|called| called.notify_one());
    }

    /// Whether anybody stands in line.
    pub(crate) fn stand(&self) -> bool {
        !self.calls().is_empty()
    }

    fn calls(&self) -> MutexGuard<'_, HashMap<String, Arc<Notify>>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses all who wait, and returns when they have left.
    pub(crate) async fn close(&self) {
        self.closing.send_replace(true);
        let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        while tasks.join_next().await.is_some() {}
    }
}

/// One request on its way.
struct Gathering {
    client: Arc<Client>,
    /// In order of names.
    claims: Vec<Claim>,
    terms: Terms,
    /// Whether the owner was given: what it holds already is entered again.
    reenters: bool,
    /// When it came.
    since: Moment,
    /// Which claim was in the way when that was last seen.
    in_the_way: Arc<AtomicUsize>,
    reply: oneshot::Sender<Result<Option<LeaseAll>>>,
    closing: watch::Receiver<bool>,
    /// Dropped at the end.
    _at_work: oneshot::Sender<()>,
}

/// Nobody wants an answer any more.
struct Gone;

impl Gathering {
    async fn run(mut self, waits: bool) {
        let gathered = self.gather(waits).await;
        if !matches!(gathered, Ok(Some(_))) {
            if gathered.is_err() {
                self.withdraw();
            }
            if waits {
                self.leave().await;
            }
        }
        // When nobody listens any more, the leases go back by being dropped here.
        let _ = self.reply.send(gathered);
    }

    async fn gather(&mut self, waits: bool) -> Result<Option<LeaseAll>> {
        let mut tries = TRIES;
        loop {
            if let Ok(all) = self.take(false).await? {
                return Ok(Some(all));
            }
            if waits {
                break;
            }
            if tries == 0 || !self.are_free().await? || self.pause(BETWEEN_TRIES, &Notify::new()).await?.is_err() {
                return Ok(None);
            }
            tries -= 1;
        }
        self.wait_in_line().await
    }

    async fn wait_in_line(&mut self) -> Result<Option<LeaseAll>> {
        let client = Arc::clone(&self.client);
        let mut calls = Calls::of(&client, &self.claims);
        client.bell.tend(&client);
        let mut bell = self.line_up().await?;
        let (mut kept, mut since, mut last) = (Moment::now(), Moment::now(), Vec::new());
        let mut pause = SOONEST;
        loop {
            if self.pause(pause, &calls.called).await?.is_err() {
                return Ok(None);
            }
            let spots: Vec<Spot> = self.claims.iter().map(Claim::spot).collect();
            let present = client.bell.channel(&client.id);
            let keeps = bell != present || Moment::now().since(kept) >= KEEP;
            if keeps {
                (bell, kept) = (present, Moment::now());
            }
            let keep = if keeps { spots.clone() } else { Vec::new() };
            let attend = Attend { keep, bell: Arc::clone(&bell), watch: spots };
            let attended = match client.ask(|reply| Verb::Attend(attend, reply)).await.outcome {
                Ok(attended) => attended,
                // It may be otherwise the next time.
                Err(error) if error.is_conflict() || error.is_blocked() => continue,
                Err(error) => return Err(error),
            };
            if !attended.gone.is_empty() {
                // They were not kept alive in time, or what they were granted has run out unheard.
                self.withdraw();
                self.leave().await;
                self.claims.iter_mut().zip(Hold::siblings()).for_each(|(claim, hold)| claim.hold = hold);
                calls = Calls::of(&client, &self.claims);
                bell = self.line_up().await?;
                continue;
            }
            let watched: Vec<_> = attended.watched.into_iter().map(|(_, watched)| watched).collect();
            for (claim, watched) in self.claims.iter().zip(&watched) {
                // Nobody would mind us: whoever serves the name notes down that somebody waits.
                if watched.as_ref().is_some_and(|watched| watched.row.waiting == 0) {
                    client.serve(&claim.name);
                }
            }
            let in_the_way = watched.iter().position(|watched| !watched.as_ref().is_some_and(|w| self.may_have(w)));
            match in_the_way {
                Some(claim) => self.in_the_way.store(claim, Ordering::Relaxed),
                None => match self.take(true).await? {
                    Ok(all) => return Ok(Some(all)),
                    // Whoever serves the name clears the dead away.
                    Err(Hindrance { claim, dead: true, .. }) => client.serve(&self.claims[claim].name),
                    Err(_) => {}
                },
            }
            // The longer nothing has changed, the longer it will take, as far as one can know: an eighth of that is not much.
            let seen: Vec<_> = watched.iter().flatten().map(|w| (w.row.token, w.ahead)).collect();
            let ahead = seen.iter().map(|(_, ahead)| *ahead).max().unwrap_or(0);
            if std::mem::replace(&mut last, seen.clone()) != seen {
                since = Moment::now();
            }
            let patience = u32::try_from(ahead + 1).unwrap_or(u32::MAX);
            let by_wait = (Moment::now().since(since) / 8).clamp(SOONEST, LATEST);
            let told = !bell.is_empty() && in_the_way.is_some();
            pause = if told { KEEP } else { by_wait.saturating_mul(patience).min(KEEP) };
            if let Some(held) = watched.iter().flatten().filter_map(|w| w.row.held_for()).min() {
                pause = pause.min(held.max(SOONEST));
            }
        }
    }

    /// Whether a name could be ours, as far as could be seen.
    fn may_have(&self, watched: &Watched) -> bool {
        let row = &watched.row;
        let entered = self.reenters && row.held_for().is_some() && row.owner == self.claims[0].owner.to_string();
        entered || (watched.ahead == 0 && row.held_for().is_none())
    }

    /// Takes all names, if that is possible now.
    async fn take(&mut self, in_line: bool) -> Result<Result<LeaseAll, Hindrance>> {
        let gather = Gather { claims: self.claims.clone(), in_line, reenters: self.reenters };
        let Answer { outcome, sent_at, .. } = self.client.ask(|reply| Verb::Gather(gather, reply)).await;
        let tokens = match outcome? {
            Ok(tokens) => tokens,
            Err(Hindrance { claim, shared: true, .. }) => {
                let reason = "its owner shares the name, and cannot have it alone before it has given that back";
                return Err(Error::Conversion { name: self.claims[claim].name.clone(), reason });
            }
            Err(hindrance) => {
                self.in_the_way.store(hindrance.claim, Ordering::Relaxed);
                return Ok(Err(hindrance));
            }
        };
        let ttl = self.claims[0].ttl;
        if self.client.is_closed() {
            return Err(Error::Closed);
        }
        if (sent_at + reliance(ttl)).is_past() {
            return Err(late());
        }
        let lease = |(claim, token): (&Claim, FencingToken)| {
            let Claim { name, owner, hold, .. } = claim.clone();
            let holding = Holding { name, owner, hold, mode: Mode::Exclusive, token };
            self.client.adopt(&holding);
            let tenure = Tenure::begin(holding, ttl, self.terms, sent_at, ttl);
            Lease::begin(Arc::clone(&self.client), tenure, false)
        };
        let leases = self.claims.iter().zip(tokens).map(lease).collect();
        if in_line && self.reenters {
            // What was entered again leaves a place behind.
            self.leave().await;
        }
        Ok(Ok(LeaseAll { leases }))
    }

    /// A request that was not answered may have taken effect.
    fn withdraw(&self) {
        for claim in &self.claims {
            self.client.withdraw(&claim.name, claim.owner, claim.hold, None);
        }
    }

    /// Whether all names could be had now, by one who does not wait. Clears away what the dead have left there.
    async fn are_free(&self) -> Result<bool> {
        for claim in &self.claims {
            let name = claim.name.clone();
            let Some(row) = self.client.ask(|reply| Verb::Look(name, reply)).await.outcome? else {
                continue;
            };
            if self.reenters && row.held_for().is_some() && row.owner == claim.owner.to_string() {
                continue;
            }
            if row.held_for().is_some() {
                return Ok(false);
            }
            if row.waiting != 0 || row.holds == SHARED {
                let (name, terms, readers) = (claim.name.clone(), HashMap::new(), Vec::new());
                let serve = Serve { name, from: None, terms, readers, bell: "".into() };
                let served = self.client.ask(|reply| Verb::Serve(serve, reply)).await.outcome?;
                if served.held_for.is_some() || served.others || !served.granted.is_empty() {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Joins all lines, and returns the bell that was left there.
    async fn line_up(&self) -> Result<Arc<str>> {
        let client = &self.client;
        let bell = client.bell.channel(&client.id);
        let ticket = |claim: &Claim| {
            let claim = Claim { mode: Mode::Joint, ..claim.clone() };
            Ticket { claim, client: Arc::clone(&client.id), bell: Arc::clone(&bell), since: self.since }
        };
        let tickets = self.claims.iter().map(ticket).collect();
        client.ask(|reply| Verb::LineUp(tickets, reply)).await.outcome.map(|()| bell)
    }

    /// Leaves all lines.
    async fn leave(&self) {
        let (left, mut all_left) = mpsc::channel::<()>(1);
        for claim in &self.claims {
            let left = left.clone();
            self.client.send_leave(Claim { mode: Mode::Joint, ..claim.clone() }, move || drop(left));
        }
        drop(left);
        all_left.recv().await;
    }

    /// Waits, at most until it is called, unless nobody wants an answer any more.
    async fn pause(&mut self, pause: Duration, called: &Notify) -> Result<Result<(), Gone>> {
        let closing = std::pin::pin!(self.closing.wait_for(|closing| *closing));
        let gone = std::pin::pin!(self.reply.closed());
        let ended = std::pin::pin!(first(gone, closing));
        let called = std::pin::pin!(timeout(pause, called.notified()));
        match first(ended, called).await {
            Err(_) => Ok(Ok(())),
            Ok(Ok(())) => Ok(Err(Gone)),
            Ok(Err(_)) => Err(Error::Closed),
        }
    }
}

/// The places of one gathering that are called when their turn may have come, until this is dropped.
struct Calls {
    client: Arc<Client>,
    marks: Vec<String>,
    called: Arc<Notify>,
}

impl Calls {
    fn of(client: &Arc<Client>, claims: &[Claim]) -> Self {
        let called = Arc::new(Notify::new());
        let marks: Vec<String> = claims.iter().map(|claim| claim.hold.mark()).collect();
        client.gatherings.calls().extend(marks.iter().map(|mark| (mark.clone(), Arc::clone(&called))));
        Self { client: Arc::clone(client), marks, called }
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        let mut calls = self.client.gatherings.calls();
        for mark in &self.marks {
            calls.remove(mark);
        }
    }
}
