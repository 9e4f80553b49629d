//! The pump: verbs that wait together travel together, on a bounded number of connections of our own.
//!
//! Each connection is a *lane*, a task that takes whatever has gathered while its last batch was in flight, turns it into
//! one statement per kind of verb, and hands every verb its answer. So a dropped future abandons nothing half-done, many
//! locks share one commit, and an idle lane adds no delay: it takes a batch of one at once.
//!
//! With two lanes, one asks for names and the other keeps them: renewals never stand in line behind waiters.
//!
//! The pump knows nothing of who waits for what. A verb carries its [`Reply`].

mod batch;
mod gather;
mod serve;
mod single;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, timeout};

use batch::{Acquires, Batch, Enqueues, HandOffs, Joins, Leaves, Looks, Releases, Renewals, ShareRenewals, Together};
use gather::LineUp;
pub(crate) use gather::{Gather, Hindrance};
pub(crate) use serve::{NEXT, Serve, Served};
pub(crate) use single::{Attend, Attended};
use single::{ColumnOf, Copy, Downgrade, Ensure, Evict, Evicted, Extend, List, Raise, Reach, Sweep, Uptime, Waiters};

use crate::backend::records::{Errand, Findings};
use crate::backend::sealed::Column;
use crate::backend::{
    Backend, Claim, HandOff, Holding, Job, LastEviction, Listed, Mode, Names, Place, Release, Renewal, Row, Session,
    Spot, Standing, Ticket, Watched,
};
use crate::backoff::Backoff;
use crate::clock::Moment;
use crate::error::{Error, Fault, Result};
use crate::name::LockName;
use crate::owner::Hold;
use crate::panics;
use crate::token::FencingToken;

/// The most verbs in one statement: 10 000 renewals travel in ten.
const BATCH: usize = 1000;

/// A statement that takes longer than this is given up together with its connection. No verb waits for another client,
/// so only a frozen server or a broken network takes so long.
const ANSWER_WITHIN: Duration = Duration::from_secs(4);

/// The same for opening a connection.
pub(crate) const CONNECT_WITHIN: Duration = Duration::from_secs(4);

/// How long a lane tries to get through to a database that refuses it, before the verbs fail.
const PATIENCE: Duration = Duration::from_secs(3);

/// How long it repeats statements that the database rolled back on account of others.
const PATIENCE_WITH_CONFLICTS: Duration = Duration::from_secs(10);

/// What came of a verb.
pub(crate) struct Answer<T> {
    pub(crate) outcome: Result<T>,
    /// Taken before the request that was answered went out: what the database granted lasts at least from here.
    pub(crate) sent_at: Moment,
    /// An earlier request may have taken effect although its reply never came.
    pub(crate) resent: bool,
}

impl<T> Answer<T> {
    pub(crate) fn map<U>(self, to: impl FnOnce(T) -> U) -> Answer<U> {
        Answer { outcome: self.outcome.map(to), sent_at: self.sent_at, resent: self.resent }
    }
}

/// Where an answer goes. It is called exactly once: when the pump ends first, with [`Error::Closed`].
pub(crate) struct Reply<T>(Option<Box<dyn FnOnce(Answer<T>) + Send>>);

impl<T> Reply<T> {
    pub(crate) fn to(receiver: impl FnOnce(Answer<T>) + Send + 'static) -> Self {
        Self(Some(Box::new(receiver)))
    }

    fn send(mut self, answer: Answer<T>) {
        self.call(answer);
    }

    /// A panic of the receiver is its own: the lane goes on.
    fn call(&mut self, answer: Answer<T>) {
        if let Some(receiver) = self.0.take() {
            let _ = panics::caught(|| receiver(answer));
        }
    }
}

impl<T> Drop for Reply<T> {
    fn drop(&mut self) {
        self.call(Answer { outcome: Err(Error::Closed), sent_at: Moment::now(), resent: false });
    }
}

/// A verb on its way to the database.
pub(crate) enum Verb {
    Acquire(Claim, Reply<Option<FencingToken>>),
    Join(Claim, Reply<Option<FencingToken>>),
    HandOff(HandOff, Reply<Option<FencingToken>>),
    Release(Release, Reply<Standing>),
    Renew(Renewal, Reply<Standing>),
    Look(LockName, Reply<Option<Row>>),
    List(Names, Reply<Vec<Listed>>),
    Enqueue(Ticket, Reply<Option<Duration>>),
    Serve(Serve, Reply<Served>),
    Leave(Spot, Reply<bool>),
    /// Stands in several lines at one moment.
    LineUp(Vec<Ticket>, Reply<()>),
    /// Takes several names, all or none.
    Gather(Gather, Reply<Result<Vec<FencingToken>, Hindrance>>),
    Attend(Attend, Reply<Attended>),
    Waiters(LockName, Reply<Vec<Place>>),
    Downgrade(Holding, Ticket, Reply<bool>),
    /// Puts a second share beside one.
    Copy {
        from: Holding,
        to: Hold,
        ttl: Duration,
        reply: Reply<bool>,
    },
    /// Raises the token of a holding.
    Raise(Holding, FencingToken, Reply<bool>),
    /// Asks for how long the server has been up.
    Uptime(Reply<Option<Duration>>),
    Evict(LockName, FencingToken, Reply<bool>),
    /// Asks what the row of a name tells of evictions.
    LastEviction(LockName, Reply<Option<LastEviction>>),
    /// Makes a holding last longer.
    Extend {
        name: LockName,
        token: FencingToken,
        ttl: Duration,
        reply: Reply<bool>,
    },
    /// Makes sure that there is a row to be locked.
    Ensure(LockName, Reply<()>),
    /// Looks up a column: schema, table, column.
    Column((String, String, String), Reply<Option<Column>>),
    /// Does something about the records of requests.
    Record(Errand, Reply<Findings>),
    Sweep {
        retention: Duration,
        limit: u32,
        reply: Reply<u64>,
    },
    /// Is answered when there is a connection.
    Reach(Reply<()>),
    /// Is answered when everything before it is done.
    Flush(Reply<()>),
    /// Ends the lane when everything before it is done.
    Close(Reply<()>),
}

/// The lanes of a client.
pub(crate) struct Pump {
    lanes: Vec<UnboundedSender<Verb>>,
    idle: Mutex<Vec<Lane>>,
    trouble: Arc<Trouble>,
}

impl Pump {
    /// Lanes that open their connections when they are first needed.
    pub(crate) fn new(backend: &Arc<dyn Backend>, connections: usize) -> Self {
        let trouble = Arc::new(Trouble::default());
        let (lanes, idle) = (0..connections.min(backend.useful_connections()).max(1))
            .map(|_| {
                let (verbs, inbox) = unbounded_channel();
                let lane = Lane { backend: Arc::clone(backend), session: None, inbox, trouble: Arc::clone(&trouble) };
                (verbs, lane)
            })
            .unzip();
        Self { lanes, idle: Mutex::new(idle), trouble }
    }

    /// Starts the lanes on the runtime that this is called from. Later calls do nothing.
    pub(crate) fn start(&self) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.is_empty() {
            return;
        }
        // Panics outside of a runtime, and then nothing has happened yet.
        let runtime = tokio::runtime::Handle::current();
        for lane in idle.drain(..) {
            runtime.spawn(lane.run());
        }
    }

    pub(crate) fn send(&self, verb: Verb) {
        let keeps = match &verb {
            Verb::HandOff(..) | Verb::Release(..) | Verb::Renew(..) | Verb::Downgrade(..) | Verb::Leave(..) => true,
            Verb::Raise(..) | Verb::LastEviction(..) | Verb::Extend { .. } => true,
            Verb::Serve(serve, _) => serve.from.is_some(),
            _ => false,
        };
        let lane = if keeps { self.lanes.last() } else { self.lanes.first() };
        if let Some(lane) = lane {
            // A lane that has ended drops the verb, and with it the reply says so.
            let _ = lane.send(verb);
        }
    }

    /// Waits until every lane has done what it has been given so far.
    pub(crate) async fn flush(&self) {
        self.pass(Verb::Flush).await;
    }

    /// Lets every lane finish what it has and close its connection.
    pub(crate) async fn close(&self) {
        self.pass(Verb::Close).await;
    }

    /// Sends a verb down every lane, one after the other, and waits for it to arrive.
    async fn pass(&self, verb: fn(Reply<()>) -> Verb) {
        for lane in &self.lanes {
            let (arrived, arrival) = tokio::sync::oneshot::channel();
            let reply = Reply::to(move |_| {
                let _ = arrived.send(());
            });
            let _ = lane.send(verb(reply));
            let _ = arrival.await;
        }
    }

    /// Why the database is out of reach at present, if it is.
    pub(crate) fn trouble(&self) -> Option<String> {
        self.trouble.get()
    }
}

/// The last failure to reach the database, until it is reached again.
#[derive(Default)]
struct Trouble(Mutex<Option<String>>);

impl Trouble {
    fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, trouble: Option<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }
}

/// One connection and the verbs that travel on it.
struct Lane {
    backend: Arc<dyn Backend>,
    session: Option<Box<dyn Session>>,
    inbox: UnboundedReceiver<Verb>,
    trouble: Arc<Trouble>,
}

impl Lane {
    async fn run(mut self) {
        let mut waiting = Vec::new();
        let closing = loop {
            if waiting.is_empty() {
                if self.inbox.recv_many(&mut waiting, BATCH).await == 0 {
                    break None;
                }
            } else {
                while waiting.len() < BATCH
                    && let Ok(verb) = self.inbox.try_recv()
                {
                    waiting.push(verb);
                }
            }
            let round = Round::gather(&mut waiting);
            self.carry::<Releases>(round.releases).await;
            self.carry::<HandOffs>(round.hand_offs).await;
            self.carry::<Renewals>(round.renewals).await;
            self.carry::<ShareRenewals>(round.share_renewals).await;
            self.carry::<Acquires>(round.acquires).await;
            self.carry::<Joins>(round.joins).await;
            self.carry::<Looks>(round.looks).await;
            self.carry::<Leaves>(round.leaves).await;
            self.carry::<Enqueues>(round.enqueues).await;
            self.attend(round.attends).await;
            for verb in round.singles {
                self.answer(verb).await;
            }
            if round.close.is_some() {
                break round.close;
            }
        };
        if let Some(session) = self.session.take() {
            let _ = timeout(CONNECT_WITHIN, session.close()).await;
        }
        drop(closing);
    }

    /// Sends one batch and distributes the answers. An error concerns only the verbs that it concerns: a batch that the
    /// database refuses is sent again one by one.
    async fn carry<B: Batch>(&mut self, mut batch: Items<B>) {
        batch.sort_by(|(a, _), (b, _)| B::name(a).cmp(B::name(b)));
        let (items, mut replies): (Vec<_>, Vec<_>) = batch.into_iter().unzip();
        if items.is_empty() {
            return;
        }
        let attempt = self.attempt(B::ATTEMPTED, &Together::<B>(&items)).await;
        let Answer { outcome, sent_at, resent } = attempt;
        let error = match outcome {
            Ok(outcomes) => {
                for (reply, outcome) in replies.into_iter().zip(outcomes) {
                    reply.send(Answer { outcome: Ok(outcome), sent_at, resent });
                }
                return;
            }
            Err(error) => error,
        };
        if items.len() == 1
            && let Some(reply) = replies.pop()
        {
            return reply.send(Answer { outcome: Err(error), sent_at, resent });
        }
        for (item, reply) in items.iter().zip(replies) {
            let answer = match error.for_another() {
                Some(error) => Answer { outcome: Err(error), sent_at, resent },
                None => self.alone::<B>(item, resent || error.is_unreadable()).await,
            };
            reply.send(answer);
        }
    }

    /// Sends one verb of a batch that was refused. `resent`: it may have taken effect before.
    async fn alone<B: Batch>(&mut self, item: &B::Item, resent: bool) -> Answer<B::Outcome> {
        let answer = self.attempt(B::ATTEMPTED, &Together::<B>(std::slice::from_ref(item))).await;
        let outcome = answer.outcome.and_then(|outcomes| outcomes.into_iter().next().ok_or(Error::Closed));
        Answer { outcome, sent_at: answer.sent_at, resent: resent || answer.resent }
    }

    /// Looks after all places together, and tells each what became of its own.
    async fn attend(&mut self, attends: Vec<(Attend, Reply<Attended>)>) {
        let Some(bell) = attends.first().map(|(attend, _)| Arc::clone(&attend.bell)) else {
            return;
        };
        let (together, others): (Vec<_>, Vec<_>) = attends.into_iter().partition(|(attend, _)| attend.bell == bell);
        let keep = together.iter().flat_map(|(attend, _)| &attend.keep).cloned().collect();
        let watch = together.iter().flat_map(|(attend, _)| &attend.watch).cloned().collect();
        let all = Attend { keep, bell, watch };
        let Answer { outcome, sent_at, resent } = self.attempt("wait", &all).await;
        match outcome {
            Ok(attended) => {
                let kept: HashSet<Hold> = attended.kept.into_iter().collect();
                let watched: HashMap<Hold, Option<Watched>> =
                    attended.watched.into_iter().map(|(spot, watched)| (spot.hold, watched)).collect();
                for (attend, reply) in together {
                    let (kept, gone): (Vec<Spot>, Vec<Spot>) =
                        attend.keep.into_iter().partition(|spot| kept.contains(&spot.hold));
                    let mut seen = attend.watch;
                    let vanished: Vec<Spot> = gone.iter().filter(|spot| !seen.contains(spot)).cloned().collect();
                    seen.extend(vanished);
                    let watched =
                        seen.into_iter().map(|spot| (spot.clone(), watched.get(&spot.hold).cloned().flatten()));
                    let kept = kept.into_iter().map(|spot| spot.hold).collect();
                    let outcome = Ok(Attended { kept, gone, watched: watched.collect() });
                    reply.send(Answer { outcome, sent_at, resent });
                }
            }
            Err(error) => {
                let mut together = together.into_iter();
                let first = together.next();
                for (attend, reply) in together {
                    let answer = match error.for_another() {
                        Some(error) => Answer { outcome: Err(error), sent_at, resent },
                        None => self.attempt("wait", &attend).await,
                    };
                    reply.send(answer);
                }
                if let Some((_, reply)) = first {
                    reply.send(Answer { outcome: Err(error), sent_at, resent });
                }
            }
        }
        for (attend, reply) in others {
            reply.send(self.attempt("wait", &attend).await);
        }
    }

    /// Carries out a verb that does not travel in batches.
    async fn answer(&mut self, verb: Verb) {
        match verb {
            Verb::List(names, reply) => reply.send(self.attempt("list", &List(names)).await),
            Verb::Waiters(name, reply) => reply.send(self.attempt("list those who wait", &Waiters(name)).await),
            Verb::Serve(serve, reply) => {
                let answer = self.attempt("hand over", &serve).await;
                let mut bells = answer.outcome.as_ref().map(|served| served.bells.clone()).unwrap_or_default();
                bells.retain(|(bell, _)| **bell != *serve.bell);
                // The grants stand. Whoever was granted the name owns it already, and being told is only faster.
                reply.send(answer);
                if !bells.is_empty()
                    && let Some(session) = &mut self.session
                    && !matches!(timeout(ANSWER_WITHIN, session.ring(&bells)).await, Ok(Ok(())))
                {
                    self.session = None;
                }
            }
            Verb::LineUp(tickets, reply) => reply.send(self.attempt("wait", &LineUp(tickets)).await),
            Verb::Gather(gather, reply) => reply.send(self.attempt("acquire", &gather).await),
            Verb::Downgrade(from, to, reply) => {
                reply.send(self.attempt("downgrade", &Downgrade { from, to }).await);
            }
            Verb::Raise(holding, to, reply) => reply.send(self.attempt("raise a token", &Raise { holding, to }).await),
            Verb::Uptime(reply) => reply.send(self.attempt("ask for the uptime", &Uptime).await),
            Verb::Evict(name, token, reply) => reply.send(self.attempt("evict", &Evict(name, token)).await),
            Verb::LastEviction(name, reply) => reply.send(self.attempt("release", &Evicted(name)).await),
            Verb::Extend { name, token, ttl, reply } => {
                reply.send(self.attempt("extend", &Extend { name, token, ttl }).await);
            }
            Verb::Ensure(name, reply) => reply.send(self.attempt("create the row of a name", &Ensure(name)).await),
            Verb::Column(of, reply) => reply.send(self.attempt("look a table up", &ColumnOf(of)).await),
            Verb::Record(errand, reply) => reply.send(self.attempt(errand.attempted(), &errand).await),
            Verb::Sweep { retention, limit, reply } => {
                reply.send(self.attempt("sweep", &Sweep { retention, limit }).await);
            }
            Verb::Copy { from, to, ttl, reply } => {
                reply.send(self.attempt("resume", &Copy { from, to, ttl }).await);
            }
            Verb::Reach(reply) => reply.send(self.attempt("connect", &Reach).await),
            // A reply that is dropped is answered.
            Verb::Flush(reply) => drop(reply),
            _ => {}
        }
    }

    /// Sends a request until it is answered, or until there is no sense in it any more. A panic on the way, for one in a
    /// subscriber of `tracing`, costs this request and the connection, and nothing else.
    async fn attempt<R: Request>(&mut self, attempted: &'static str, request: &R) -> Answer<R::Outcome> {
        match panics::caught_in(self.send_until_answered(attempted, request)).await {
            Ok(answer) => answer,
            Err(panic) => {
                self.session = None;
                let source = sqlx::Error::Protocol(format!("a panic on the way: {panic}"));
                Answer { outcome: Err(Error::Database { attempted, source }), sent_at: Moment::now(), resent: true }
            }
        }
    }

    async fn send_until_answered<R: Request>(&mut self, attempted: &'static str, request: &R) -> Answer<R::Outcome> {
        let start = Instant::now();
        let mut backoff = Backoff::between(Duration::from_millis(5), Duration::from_millis(250));
        let mut resent = false;
        let mut severed = 0;
        loop {
            let sent_at = Moment::now();
            let outcome = match self.session().await {
                Ok(session) => match timeout(ANSWER_WITHIN, request.send(session)).await {
                    Ok(Ok(outcome)) => {
                        return Answer { outcome: Ok(outcome), sent_at, resent };
                    }
                    Ok(Err(error)) => Failure::Refused(error),
                    Err(_) => Failure::NoAnswer,
                },
                Err(failure) => failure,
            };
            let fault = outcome.fault();
            if fault == Fault::Severed {
                // Never closed in order: that would wait for the reply that did not come.
                if self.session.take().is_some() {
                    resent = true;
                    severed += 1;
                }
                self.trouble.set(Some(outcome.reason()));
            }
            let patience = match fault {
                Fault::Again | Fault::Blocked => PATIENCE_WITH_CONFLICTS,
                Fault::Severed | Fault::Exhausted => PATIENCE,
                _ => Duration::ZERO,
            };
            // A connection that was lost says nothing about the next one: that one is always tried.
            let try_another = severed == 1 && !matches!(outcome, Failure::Unconnected(_));
            if start.elapsed() >= patience && !try_another {
                let outcome = Err(outcome.into_error(attempted));
                return Answer { outcome, sent_at, resent };
            }
            tracing::debug!(attempted, reason = outcome.reason(), "trying again");
            tokio::time::sleep(backoff.step()).await;
        }
    }

    /// The connection, opened when there is none.
    async fn session(&mut self) -> Result<&mut dyn Session, Failure> {
        let session = match self.session.take() {
            Some(session) => session,
            None => match timeout(CONNECT_WITHIN, self.backend.connect()).await {
                Ok(Ok(session)) => session,
                Ok(Err(error)) => return Err(Failure::Unconnected(Some(error))),
                Err(_) => return Err(Failure::Unconnected(None)),
            },
        };
        self.trouble.set(None);
        Ok(&mut **self.session.insert(session))
    }
}

/// Why a request was not answered.
enum Failure {
    Refused(sqlx::Error),
    NoAnswer,
    /// No connection could be opened; without an error when that took too long.
    Unconnected(Option<sqlx::Error>),
}

impl Failure {
    fn fault(&self) -> Fault {
        match self {
            Self::Refused(error) => match Fault::of(error) {
                // It was another one when we connected: there may be a better one by now, here or elsewhere.
                Fault::ReadOnly => Fault::Severed,
                fault => fault,
            },
            Self::NoAnswer | Self::Unconnected(None) => Fault::Severed,
            Self::Unconnected(Some(error)) => match Fault::of(error) {
                Fault::Final => Fault::Final,
                _ => Fault::Severed,
            },
        }
    }

    fn reason(&self) -> String {
        match self {
            Self::Refused(error) | Self::Unconnected(Some(error)) => crate::error::reason(error),
            Self::NoAnswer => format!("no answer came within {ANSWER_WITHIN:?}"),
            Self::Unconnected(None) => format!("no connection could be opened within {CONNECT_WITHIN:?}"),
        }
    }

    fn into_error(self, attempted: &'static str) -> Error {
        let reason = self.reason();
        match self {
            Self::Refused(error) if Fault::of(&error) == Fault::ReadOnly => {
                Error::Unavailable { attempted, reason, source: Some(error) }
            }
            Self::Refused(error) => Error::from_sqlx(attempted, error),
            Self::NoAnswer => Error::Unavailable { attempted, reason, source: None },
            Self::Unconnected(source) => Error::Unavailable { attempted, reason, source },
        }
    }
}

type Items<B> = Vec<(<B as Batch>::Item, Reply<<B as Batch>::Outcome>)>;

/// What goes out together: of each kind of verb, every name at most once. The rest waits for the next round.
#[derive(Default)]
struct Round {
    releases: Items<Releases>,
    hand_offs: Items<HandOffs>,
    renewals: Items<Renewals>,
    share_renewals: Items<ShareRenewals>,
    acquires: Items<Acquires>,
    joins: Items<Joins>,
    looks: Items<Looks>,
    leaves: Items<Leaves>,
    enqueues: Items<Enqueues>,
    attends: Vec<(Attend, Reply<Attended>)>,
    singles: Vec<Verb>,
    close: Option<Reply<()>>,
}

impl Round {
    fn gather(waiting: &mut Vec<Verb>) -> Self {
        let mut round = Self::default();
        let mut taken = HashSet::new();
        let mut converted = HashSet::new();
        let mut later = Vec::new();
        for verb in waiting.drain(..) {
            let once = match &verb {
                Verb::Acquire(c, _) | Verb::Join(c, _) => Some(&c.name),
                Verb::HandOff(h, _) => Some(&h.from.name),
                Verb::Release(r, _) => Some(&r.name),
                Verb::Renew(r, _) if r.holding.mode == Mode::Exclusive => Some(&r.holding.name),
                Verb::Look(name, _) => Some(name),
                _ => None,
            };
            let given_back = match &verb {
                Verb::Release(r, _) => Some(&r.name),
                Verb::Renew(r, _) => Some(&r.holding.name),
                Verb::Leave(spot, _) => Some(&spot.name),
                Verb::Serve(serve, _) => Some(&serve.name),
                _ => None,
            };
            if round.close.is_some()
                || given_back.is_some_and(|name| converted.contains(name))
                || once.is_some_and(|name| !taken.insert((std::mem::discriminant(&verb), name.clone())))
            {
                later.push(verb);
                continue;
            }
            // What is turned into something else must not be given back before.
            if let Verb::Downgrade(holding, ..) | Verb::Raise(holding, ..) | Verb::Copy { from: holding, .. } = &verb {
                converted.insert(holding.name.clone());
            }
            match verb {
                Verb::Acquire(claim, reply) => round.acquires.push((claim, reply)),
                Verb::Join(claim, reply) => round.joins.push((claim, reply)),
                Verb::HandOff(hand_off, reply) => round.hand_offs.push((hand_off, reply)),
                Verb::Release(release, reply) => round.releases.push((release, reply)),
                Verb::Renew(renewal, reply) if renewal.holding.mode == Mode::Exclusive => {
                    round.renewals.push((renewal, reply));
                }
                Verb::Renew(renewal, reply) => round.share_renewals.push((renewal, reply)),
                Verb::Look(name, reply) => round.looks.push((name, reply)),
                Verb::Leave(spot, reply) => round.leaves.push((spot, reply)),
                Verb::Enqueue(ticket, reply) => round.enqueues.push((ticket, reply)),
                Verb::Attend(attend, reply) => round.attends.push((attend, reply)),
                Verb::Close(reply) if later.is_empty() => round.close = Some(reply),
                verb @ Verb::Close(_) => later.push(verb),
                single => round.singles.push(single),
            }
        }
        *waiting = later;
        round
    }
}

/// What a lane can send, and send again.
trait Request: Sync {
    type Outcome: Send;

    fn send<'a>(&'a self, session: &'a mut dyn Session) -> Job<'a, Self::Outcome>;
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::backend::in_doubt;
    use crate::owner::Owner;

    /// Otherwise what was given back would be asked for again, and found gone, as if somebody had taken it.
    #[test]
    fn a_release_counts_as_unanswered_when_it_cannot_be_seen_what_became_of_it() {
        let busy = sqlx::Error::PoolTimedOut;
        assert_ne!(Fault::of(&busy), Fault::Severed);
        assert_eq!(Fault::of(&in_doubt(busy)), Fault::Severed);
    }

    /// They were sent in this order, by a downgrade whose future was dropped while the lane was busy.
    #[test]
    fn what_is_being_converted_is_not_given_back_before() {
        let name = || LockName::new("a").expect("a name");
        let (owner, hold, token) = (Owner::random(), Hold::random(), FencingToken::new(1).expect("positive"));
        let from = Holding { name: name(), owner, hold, mode: Mode::Exclusive, token };
        let (mode, ttl) = (Mode::READ, Duration::from_secs(30));
        let claim = Claim { name: name(), owner, hold, mode, ttl, holder: "".into(), label: "".into() };
        let ticket = Ticket { claim, client: "".into(), bell: "".into(), since: Moment::now() };
        let release = Release { name: name(), owner, hold, token: Some(token), hold_at_least: Duration::ZERO };
        let mut waiting = vec![
            Verb::Downgrade(from.clone(), ticket, Reply(None)),
            Verb::Release(release, Reply(None)),
            Verb::Leave(from.spot(), Reply(None)),
        ];
        let round = Round::gather(&mut waiting);
        assert!(matches!(round.singles[..], [Verb::Downgrade(..)]));
        assert!(round.releases.is_empty() && round.leaves.is_empty());
        assert!(matches!(waiting[..], [Verb::Release(..), Verb::Leave(..)]));
        let round = Round::gather(&mut waiting);
        assert_eq!((round.releases.len(), round.leaves.len()), (1, 1));
    }
}
