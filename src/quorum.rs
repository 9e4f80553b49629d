//! A lease on a majority of independent databases.
//!
//! [`Quorum`] has an example, and says what it buys and what not. Which one when: [the table of calls](crate#which-call).

// A request asks all databases at once (`Round`). What is held (`Held`) is counted by the clocks of the leases on the single
// databases, and tended by a task as long as it is a majority.

mod held;
mod round;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::backoff::Backoff;
use crate::error::{Error, LossCause, Result};
use crate::lease::request::DEFAULT_TTL;
use crate::lease::run::while_held;
use crate::locks::Locks;
use crate::name::LockName;
use crate::owner::Owner;
use crate::token::FencingToken;
use held::{Held, tend};
use round::{Outcome, Round};

/// How long [`QuorumRequest::acquire`] goes on asking while no majority answers.
const PATIENCE: Duration = Duration::from_secs(3);

/// How often a request that does not wait asks again when it got some votes and others got the rest.
const TRIES: u32 = 4;

/// Several independent databases, a majority of which decides who holds a name: it can be taken, and is kept, while any
/// minority of them is down. Cloning is cheap.
///
/// The databases may be of different kinds. Each is a [`Locks`] client of its own, on a server of its own that shares nothing
/// with the others: no disk, no replication. Everybody who uses a name must use the same ones.
///
/// ```
/// # async fn example(a: sqlock::Locks, b: sqlock::Locks, c: sqlock::Locks) -> sqlock::Result<()> {
/// use sqlock::quorum::Quorum;
/// use std::time::Duration;
///
/// let quorum = Quorum::new([a, b, c]);
/// let lease = quorum.lease("leader").ttl(Duration::from_secs(10)).wait(Duration::from_secs(5)).acquire().await?;
/// println!("token {}", lease.token());
/// lease.release().await
/// # }
/// ```
///
/// # What it buys
///
/// Of three databases one may be down, paused, cut off or restarted, and names are taken, kept and given back as before, with
/// no failover to wait for. One database with a *synchronous* standby survives the loss of a server as well, and for most it is
/// the better choice: it costs one round trip instead of two or three, its queue is fair, and its
/// [fence](crate::Lease::fence) protects data. Choose a quorum where there is no such cluster, or where the time of its failover is too long,
/// or where the lock must not depend on any one kind of database.
///
/// # What it does not
///
/// - **No fence.** A fence keeps others from the name on *one* database until a transaction there has ended, and a majority of
///   the others may grant the name meanwhile. So data is protected by [tokens](QuorumLease::token): whoever receives them must
///   *first* record the token as the highest it has seen (and refuse a lower one), *then* read, then write.
/// - **No queue.** Who waits asks again, at random intervals. Of one process, those who wait with the same quorum (or a clone)
///   come in order; between processes there is no order.
/// - **No re-entrance.** Inside an [`Owner::scope`], too, a second request for a name waits for the first.
/// - **It trusts clocks to run at about the same rate**, as every lease does: one percent of the TTL is held back.
/// - **It costs** two statements on each database to acquire, one after the other, as late as the slowest of the faster half;
///   a renewal on each, and a release on each.
///
/// # The token
///
/// The token is the highest that the majority granted, *T*, and it is written back: each of the databases that granted a lower one has it
/// raised to *T* in the row, and only when a majority has *T* (or more) there, durably, the name counts as held.
///
/// So tokens only rise: two majorities have a database in common. There the row had at least *T* when the earlier holder's
/// lease ended, and a row's token only rises, so the later holder was granted more than *T* there, and its own token is the highest of
/// what it was granted. Without the second round this fails: with *a* far ahead of *b* and *c*, tokens 100 (from *a* and *b*) and then 7 (from
/// *b* and *c*) would be told.
///
/// A database that has *lost* its rows (its disk was replaced, or commits were lost) can break this, as it can break exclusion:
/// what it forgot it may grant again. Rows are durable, so a restart forgets nothing. Where a database runs with relaxed durability,
/// give it time to let all that it may have forgotten run out: [`rejoin_after`](Self::rejoin_after). One that was set up anew must
/// stay away for the longest TTL in use, and its tokens are above all earlier ones if its clock is right.
#[derive(Clone)]
pub struct Quorum {
    nodes: Arc<Nodes>,
}

/// What all clones of a quorum have in common.
struct Nodes {
    locks: Vec<Locks>,
    all: bool,
    rejoin_after: Option<Duration>,
    /// Who waits in this process asks in turn.
    turns: Mutex<HashMap<LockName, Weak<tokio::sync::Mutex<()>>>>,
}

impl Quorum {
    /// A majority of these: two of three, three of four or five. With an even number one is as good as with one less.
    pub fn new(nodes: impl IntoIterator<Item = Locks>) -> Self {
        Self::of(nodes, false)
    }

    /// Every one of these: for a name that must be held in several databases at once. It is lost as soon as it is lost in any of them,
    /// and cannot be had while any is out of reach.
    pub fn all(nodes: impl IntoIterator<Item = Locks>) -> Self {
        Self::of(nodes, true)
    }

    fn of(nodes: impl IntoIterator<Item = Locks>, all: bool) -> Self {
        let locks = nodes.into_iter().collect();
        Self { nodes: Arc::new(Nodes { locks, all, rejoin_after: None, turns: Mutex::default() }) }
    }

    /// A database whose server has been up for less than this does not vote: for servers that may forget what they have
    /// granted when they crash (`fsync = off` on PostgreSQL, `innodb_flush_log_at_trx_commit` other than 1 on MySQL and
    /// MariaDB). Make it longer than the longest TTL in use.
    ///
    /// The server is asked for its uptime with each acquisition, which its wall clock tells: a clock that jumps ahead makes it
    /// too long. It says nothing about SQLite, where there is no server: a file with `synchronous = OFF` has no place here.
    pub fn rejoin_after(self, up: Duration) -> Self {
        let Nodes { locks, all, .. } = &*self.nodes;
        let nodes = Nodes { locks: locks.clone(), all: *all, rejoin_after: Some(up), turns: Mutex::default() };
        Self { nodes: Arc::new(nodes) }
    }

    /// A request for the lease on a name: 1 to 255 bytes of UTF-8 without NUL.
    pub fn lease(&self, name: impl Into<String>) -> QuorumRequest {
        QuorumRequest {
            quorum: self.clone(),
            name: name.into(),
            terms: Terms { ttl: DEFAULT_TTL, renew: true, label: String::new(), node_timeout: None },
            wait: None,
        }
    }
}

impl Nodes {
    /// How many must agree.
    fn needed(&self) -> usize {
        if self.all { self.locks.len() } else { self.locks.len() / 2 + 1 }
    }

    fn check(&self) -> Result<()> {
        let refuse = |reason| Err(Error::Unsupported { what: "a quorum", reason });
        if self.locks.is_empty() {
            return refuse("there are no databases in it");
        }
        let twice = |(i, locks): (usize, &Locks)| {
            self.locks.iter().skip(i + 1).any(|other| Arc::ptr_eq(locks.client(), other.client()))
        };
        if self.locks.iter().enumerate().any(twice) {
            return refuse("the same client is in it twice, and would vote twice");
        }
        Ok(())
    }

    /// Waits until nobody of this process who came before is asking for the name.
    async fn turn(&self, name: &LockName) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            turns.retain(|_, turn| turn.strong_count() > 0);
            let turn = turns.get(name).and_then(Weak::upgrade).unwrap_or_default();
            turns.insert(name.clone(), Arc::downgrade(&turn));
            turn
        };
        turn.lock_owned().await
    }
}

impl fmt::Debug for Quorum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Nodes { locks, rejoin_after, .. } = &*self.nodes;
        f.debug_struct("Quorum")
            .field("nodes", locks)
            .field("needed", &self.nodes.needed())
            .field("rejoin_after", rejoin_after)
            .finish()
    }
}

/// What a lease is to be on each database.
#[derive(Clone)]
struct Terms {
    ttl: Duration,
    renew: bool,
    label: String,
    node_timeout: Option<Duration>,
}

impl Terms {
    /// How long one database may take to answer.
    fn node_timeout(&self) -> Duration {
        self.node_timeout.unwrap_or((self.ttl / 6).min(Duration::from_secs(1)))
    }
}

/// A request for a lease on a majority, made with [`Quorum::lease`]. Nothing is sent until one of
/// [`acquire`](Self::acquire), [`try_acquire`](Self::try_acquire) and [`run`](Self::run) is awaited.
#[derive(Clone)]
#[must_use = "a request does nothing until acquire, try_acquire or run is awaited"]
pub struct QuorumRequest {
    quorum: Quorum,
    name: String,
    terms: Terms,
    wait: Option<Duration>,
}

impl QuorumRequest {
    /// How long the lease outlives its last renewal on each database: see [`LeaseRequest::ttl`](crate::LeaseRequest::ttl). 30 seconds by default.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.terms.ttl = ttl;
        self
    }

    /// Waits at most this long, for everything together, then fails with [`Error::Timeout`]. Zero asks once. Without it,
    /// [`acquire`](Self::acquire) waits for as long as it takes.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = Some(at_most);
        self
    }

    /// Whether the lease is renewed in the background, and taken anew on databases that come back. `true` by default.
    /// Otherwise it ends after its TTL unless [`extend`](QuorumLease::extend) is called.
    pub fn renew(mut self, renew: bool) -> Self {
        self.terms.renew = renew;
        self
    }

    /// A note for people, shown by [`Locks::list`](crate::Locks::list) on each database. At most 255 bytes.
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.terms.label = label.into();
        self
    }

    /// How long one database may take to answer before it is done without. By default a sixth of the TTL, at most one
    /// second. The longer it is, the less is left of the lease when it is had; a database that is slower than this counts as down.
    pub fn node_timeout(mut self, at_most: Duration) -> Self {
        self.terms.node_timeout = Some(at_most);
        self
    }

    /// Acquires the lease on a majority, waiting while somebody else has it.
    ///
    /// Those of this process who wait for a name take turns in the order in which they came; between processes whoever asks at the
    /// right moment gets it.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] when [`wait`](Self::wait) ran out; [`Error::Unavailable`] when so many databases could not be
    /// reached that the others are no majority (for 3 seconds, or until the wait ran out); [`Error::Unsupported`] when there are
    /// no databases, or the same client is there twice; an error for bad input or [`Error::NotMigrated`] when it is one of those that keep a
    /// majority from being had.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind on any database: what was granted, and what is granted by an answer that is still on
    /// its way, is released in the background.
    pub async fn acquire(self) -> Result<QuorumLease> {
        let start = Instant::now();
        let name = self.check()?;
        let left = || self.wait.map(|wait| wait.saturating_sub(start.elapsed()));
        let timed_out = || Error::Timeout { name: name.clone(), waited: start.elapsed() };
        let turn = self.quorum.nodes.turn(&name);
        let _turn = match left() {
            None => turn.await,
            // One who asks once does not wait for others, and still asks.
            Some(Duration::ZERO) => {
                return self.attempt(&name, None).await?.map_err(|refused| match refused {
                    Refused::Taken { .. } => timed_out(),
                    Refused::Unreachable(error) => error,
                });
            }
            Some(left) => timeout(left, turn).await.map_err(|_| timed_out())?,
        };
        let mut backoff =
            Backoff::between(Duration::from_millis(10), (self.terms.ttl / 10).min(Duration::from_millis(250)));
        let mut unreachable: Option<Instant> = None;
        let mut last = None;
        let mut taken = false;
        loop {
            let attempted = Instant::now();
            let refused = match self.attempt(&name, left()).await? {
                Ok(lease) => return Ok(lease),
                Err(refused) => refused,
            };
            // An attempt that was cut short says nothing about the databases, unless they have had time to answer.
            let cut_short =
                left().is_some_and(|left| left.is_zero()) && attempted.elapsed() < self.terms.node_timeout();
            match refused {
                Refused::Taken { .. } => (unreachable, last, taken) = (None, None, true),
                Refused::Unreachable(_) if cut_short && (taken || attempted.elapsed() < Duration::from_millis(100)) => {
                }
                Refused::Unreachable(error) => {
                    let since = *unreachable.get_or_insert(attempted);
                    if since.elapsed() >= PATIENCE {
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

    /// Acquires the lease if a majority grants it now. `Ok(None)`: somebody else has it, or is about to.
    ///
    /// Of several who try a free name at the same moment, each may get the vote of another database. Then they
    /// try again a few times, at random intervals; it may still happen that none gets it.
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
        let mut tries = 1..=TRIES;
        loop {
            let last = tries.next().is_none();
            match self.attempt(&name, None).await? {
                Ok(lease) => return Ok(Some(lease)),
                Err(Refused::Taken { split: true }) if !last => sleep(backoff.step()).await,
                Err(Refused::Taken { .. }) => return Ok(None),
                Err(Refused::Unreachable(error)) => return Err(error),
            }
        }
    }

    /// Acquires the lease, does the work while it lasts, and releases it. The work is dropped at its next await point
    /// when the lease is lost. Work that was held up until after the deadline, as when the process was stopped, is not polled again.
    ///
    /// # Errors
    ///
    /// Those of [`acquire`](Self::acquire), and [`Error::Lost`] when the lease did not last until the work was done.
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
            Ok(done) => match lease.release().await {
                Err(error) if error.is_lost() => Err(error),
                _ => Ok(done),
            },
            Err(cause) => Err(lease.held.loss(cause)),
        }
    }

    fn check(&self) -> Result<LockName> {
        self.quorum.nodes.check()?;
        for locks in &self.quorum.nodes.locks {
            locks.client().settings.check_ttl("a TTL", self.terms.ttl)?;
        }
        LockName::new(&*self.name)
    }

    /// Asks all databases once, each for so long at most. An error is one that asking again will not cure.
    async fn attempt(&self, name: &LockName, within: Option<Duration>) -> Result<Result<QuorumLease, Refused>> {
        let within = within.unwrap_or(Duration::MAX).min(self.terms.node_timeout());
        let owner = Owner::random();
        let mut round = Round::new(Arc::clone(&self.quorum.nodes), name.clone(), owner, self.terms.clone());
        round.ask_all(within);
        let (granted, token) = match round.outcome(within).await {
            Outcome::Granted(granted, token) => (granted, token),
            Outcome::Taken { split } => return Ok(Err(Refused::Taken { split })),
            Outcome::Unreachable(error) if error.is_retryable() => return Ok(Err(Refused::Unreachable(error))),
            Outcome::Unreachable(error) => return Err(error),
        };
        let held = Held::new(name.clone(), token, owner, &self.quorum.nodes, granted);
        if !held.is_held() {
            let reason = "the majority was had when the first of its leases had ended".into();
            let late = Error::Unavailable { attempted: "acquire a majority", reason, source: None };
            return Ok(Err(Refused::Unreachable(late)));
        }
        // Answers that are still on their way are waited for there, and those who were not reached are asked again.
        tokio::spawn(tend(Arc::clone(&held), round));
        Ok(Ok(QuorumLease { held, node_timeout: self.terms.node_timeout() }))
    }
}

/// Why an attempt was in vain.
enum Refused {
    /// `split`: some voted for us, and others for somebody else.
    Taken {
        split: bool,
    },
    Unreachable(Error),
}

impl fmt::Debug for QuorumRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumRequest").field("name", &self.name).field("ttl", &self.terms.ttl).finish_non_exhaustive()
    }
}

/// A lease that is held on a majority of databases: proof that nobody else has the name on a majority, for as long as
/// [`is_held`](Self::is_held).
///
/// It is renewed on each of them in the background. One that was down, or has been restarted, is asked again at about every third of the
/// TTL and made part of it. [`release`](Self::release) it to learn whether it lasted; dropping it releases it too, in the
/// background.
#[must_use = "a lease that is dropped is released at once"]
pub struct QuorumLease {
    held: Arc<Held>,
    node_timeout: Duration,
}

impl QuorumLease {
    /// The name that is held.
    pub fn name(&self) -> &LockName {
        &self.held.name
    }

    /// The fencing token of this holding: greater than that of every earlier holding of the name by a majority of the same
    /// databases. How, is told at [`Quorum`]. It stays the same until the lease ends.
    ///
    /// Send it along with every effect, and let the receiver *first* record it as the highest it has seen and refuse a lower one,
    /// *then* read, then write on condition that it is still the highest.
    pub fn token(&self) -> FencingToken {
        self.held.token
    }

    /// Who holds, one and the same on all databases, as [`Locks::inspect`](crate::Locks::inspect) tells it there. It does not enter
    /// again.
    pub fn owner(&self) -> Owner {
        self.held.owner
    }

    /// Whether a majority is certainly still ours. Local: it reads a clock and does no I/O.
    ///
    /// It turns `false` before a majority could be granted to another, also if this process was stopped or the machine slept
    /// in between, and never turns `true` again.
    pub fn is_held(&self) -> bool {
        self.held.is_held()
    }

    /// For how much longer a majority is safe without a renewal. Zero when it is lost.
    pub fn remaining(&self) -> Duration {
        self.held.remaining()
    }

    /// On how many of the databases it is held at this moment. Local, as [`is_held`](Self::is_held).
    pub fn votes(&self) -> usize {
        self.held.votes()
    }

    /// Completes when the majority is lost, with the reason. Pending for ever while it is held.
    ///
    /// # Cancel safety
    ///
    /// It may be dropped and called again; no loss is missed.
    pub async fn lost(&self) -> LossCause {
        self.held.lost().await
    }

    /// Makes the lease last at least `ttl` from now on a majority, without waiting for the next renewal.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when it has ended, [`Error::OutOfRange`], or [`Error::Unavailable`] when fewer than a majority could
    /// be extended: the lease is then as good as before, or better.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does no harm; the extension may or may not take place.
    pub async fn extend(&self, ttl: Duration) -> Result<()> {
        let mut extensions = JoinSet::new();
        for extension in self.held.extending(ttl)? {
            let within = self.node_timeout;
            extensions.spawn(async move { timeout(within, extension).await });
        }
        let asked = extensions.len();
        let mut extended = 0;
        while let Some(answer) = extensions.join_next().await {
            extended += usize::from(matches!(answer, Ok(Ok(Ok(())))));
            if extended == self.held.needed {
                return self.held.check();
            }
        }
        self.held.check()?;
        let reason = format!("{extended} of {asked} databases have done so, and {} must", self.held.needed);
        Err(Error::Unavailable { attempted: "extend a lease", reason, source: None })
    }

    /// Gives the lease back everywhere, and tells whether a majority had been ours to the end. It returns when a majority has
    /// confirmed it; the others are told in the background.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: it had ended before. [`Error::Unavailable`]: so many databases could not be told that it is not known; the
    /// name is free after the TTL at the latest.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop the release.
    pub async fn release(self) -> Result<()> {
        let leases = self.held.give_back()?;
        let asked = leases.len();
        let mut releases = JoinSet::new();
        for lease in leases {
            releases.spawn(lease.release());
        }
        let (mut confirmed, mut lost) = (0, 0);
        while let Some(answer) = releases.join_next().await {
            match answer {
                Ok(Ok(())) => confirmed += 1,
                Ok(Err(error)) if error.is_lost() => lost += 1,
                _ => {}
            }
            if confirmed == self.held.needed {
                releases.detach_all();
                return Ok(());
            }
        }
        if asked - lost < self.held.needed {
            return Err(self.held.loss(LossCause::Superseded));
        }
        let reason = format!("{confirmed} of {asked} databases have confirmed it, and {} must", self.held.needed);
        Err(Error::Unavailable { attempted: "release", reason, source: None })
    }
}

impl Drop for QuorumLease {
    fn drop(&mut self) {
        // The leases go back by being dropped.
        drop(self.held.give_back());
    }
}

impl fmt::Debug for QuorumLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumLease")
            .field("name", self.name())
            .field("token", &self.token())
            .field("votes", &self.votes())
            .field("needed", &self.held.needed)
            .finish_non_exhaustive()
    }
}
