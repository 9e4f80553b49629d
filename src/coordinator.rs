//! Carries out what the engine decides: the only part that feeds it events and runs its actions.
//!
//! ```text
//! Acquisition, HeldLease ──Event──▶ Engine ──Action──▶ Executor ──▶ database
//!         ▲                           ▲                   │
//!         └────────grants, losses─────┘◀─────answers──────┘
//! ```
//!
//! The engine stands behind a lock that is held for one event at a time, and never while anything is awaited or dropped. Time comes in
//! by one task, which sleeps until the engine wants to be woken.

mod acquisition;
mod held;
mod report;

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;
use tracing::field::Empty;
use uuid::Uuid;

pub(crate) use acquisition::Acquisition;
pub(crate) use held::HeldLease;

use crate::clock::Moment;
use crate::engine::{
    Action, Answer, Engine, Event, Exported, Failure, LeaseKey, NotAmended, Pulse, Refusal, RequestId, Verdict,
    WaiterId, Wish,
};
use crate::error::{Error, LossCause, Result};
use crate::events::{self, Events, Publisher, RefusalReason};
use crate::executor::Executor;
use crate::health::{Health, Heartbeat};
use crate::measure;
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{ClientId, LeaseId, Mode, Request, Response};
use crate::token::FencingToken;
use report::{Report, refusal_reason, takeover};

/// At least so often the clocks are compared: timers stand still while the machine sleeps.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);

/// For how long a client that nobody uses any more goes on giving back when the store does not answer. What is left ends with its TTL.
const GIVES_UP_AFTER: Duration = Duration::from_secs(60);

/// See the [module](self).
pub(crate) struct Coordinator {
    executor: Executor,
    publisher: Arc<Publisher>,
    /// The client in words.
    holder: Arc<str>,
    state: Mutex<State>,
    /// The engine wants to be woken earlier than the timer sleeps.
    rearmed: Notify,
    /// Nothing is held any more, while no request is taken.
    drained: Notify,
}

struct State {
    engine: Engine,
    next_waiter: u64,
    waiters: HashMap<WaiterId, Waiting>,
    leases: HashMap<LeaseKey, Arc<Ending>>,
    /// The leases of which the end was not reported yet.
    holds: HashMap<LeaseKey, Hold>,
    releases: HashMap<LeaseKey, oneshot::Sender<Verdict>>,
    amendments: HashMap<LeaseKey, VecDeque<oneshot::Sender<Result<(), NotAmended>>>>,
    exported: Option<(LeaseKey, Exported)>,
    closed: Vec<oneshot::Sender<()>>,
    phase: Phase,
    /// Until when the timer sleeps.
    asleep_until: Option<Moment>,
    /// When the store last answered a request.
    answered_at: Moment,
    /// The last heartbeat that was answered.
    last_beat: Option<AnsweredBeat>,
    heartbeat: HeartbeatReport,
    is_started: bool,
}

/// Whether the client takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Open,
    /// Every request is refused. What is held stays.
    Draining,
    /// Everything is given back.
    Closed,
}

/// A lease, for what is reported of it.
struct Hold {
    name: LockName,
    token: FencingToken,
    since: Moment,
}

/// What was reported last of the heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeartbeatReport {
    Fine,
    /// The one on its way is late.
    Late,
    /// One has failed, and the one on its way is not late.
    Failed,
}

/// A heartbeat that was answered.
#[derive(Clone, Copy)]
struct AnsweredBeat {
    sent_at: Moment,
    round_trip: Duration,
}

/// A caller that waits.
struct Waiting {
    name: LockName,
    mode: Mode,
    since: Moment,
    owner: Owner,
    resumes: Option<Exported>,
    reply: oneshot::Sender<Result<HeldLease, Refusal>>,
}

/// How a lease ended, if it has ended without being given back.
#[derive(Default)]
struct Ending {
    cause: OnceLock<LossCause>,
    ended: Notify,
}

/// What is to be done when the lock is open again.
#[derive(Default)]
struct Outbox {
    sends: Vec<(RequestId, Request, Duration)>,
    /// Grants that nobody waits for any more. They give themselves back when they are dropped.
    unwanted: Vec<Result<HeldLease, Refusal>>,
    reports: Vec<Report>,
    /// This client has evicted a holder.
    is_eviction: bool,
}

impl Coordinator {
    /// A coordinator for a new client, which `holder` names for people.
    pub(crate) fn new(executor: Executor, publisher: Arc<Publisher>, holder: Arc<str>) -> Arc<Self> {
        let random = || Uuid::new_v4().as_u128();
        // The identities of one client are counted up from the first.
        let first = LeaseId::from_u128(random() & !u128::from(u32::MAX));
        let (can_notify, clock) = (executor.can_notify(), executor.clock());
        Arc::new(Self {
            executor,
            publisher,
            holder: Arc::clone(&holder),
            state: Mutex::new(State {
                engine: Engine::new(ClientId::from_u128(random()), holder, first, can_notify),
                next_waiter: 0,
                waiters: HashMap::new(),
                leases: HashMap::new(),
                holds: HashMap::new(),
                releases: HashMap::new(),
                amendments: HashMap::new(),
                exported: None,
                closed: Vec::new(),
                phase: Phase::Open,
                asleep_until: None,
                answered_at: clock.now(),
                last_beat: None,
                heartbeat: HeartbeatReport::Fine,
                is_started: false,
            }),
            rearmed: Notify::new(),
            drained: Notify::new(),
        })
    }

    /// Starts the tasks on the present runtime, the first time.
    pub(crate) fn start(self: &Arc<Self>) {
        let mut state = self.state();
        if state.is_started {
            return;
        }
        tokio::spawn(keep_time(Arc::downgrade(self)));
        let coordinator = Arc::downgrade(self);
        self.executor.start(move |name| {
            if let (Some(coordinator), Ok(name)) = (coordinator.upgrade(), LockName::new(name)) {
                coordinator.feed(Event::Notified { name });
            }
        });
        state.is_started = true;
        drop(state);
        measure::describe();
        tracing::info!(holder = %self.holder, place = self.executor.place(), "started a client for locks");
    }

    /// Returns the events from now on.
    pub(crate) fn events(&self) -> Events {
        self.publisher.subscribe()
    }

    /// Returns how the client is. Does no I/O.
    pub(crate) fn health(&self) -> Health {
        let unavailable = self.executor.last_failure();
        let connections = self.executor.open_connections();
        let now = self.now();
        let state = self.state();
        Health {
            held: state.engine.held(),
            waiting: state.waiters.len(),
            connections,
            heartbeat: match state.engine.pulse(now) {
                Pulse::Idle => Heartbeat::Idle,
                Pulse::Answered => Heartbeat::Answered,
                Pulse::Failed | Pulse::Late(_) => Heartbeat::Late,
            },
            last_heartbeat: state.last_beat.map(|beat| now.since(beat.sent_at)),
            round_trip: state.last_beat.map(|beat| beat.round_trip),
            unavailable,
        }
    }

    /// Begins to acquire a lease.
    pub(crate) fn acquire(self: &Arc<Self>, wish: Wish) -> Acquisition {
        self.begin(wish, None, |waiter, wish| Event::Acquire { waiter, wish })
    }

    /// Begins to take over a lease that was exported.
    pub(crate) fn resume(self: &Arc<Self>, wish: Wish, exported: Exported) -> Acquisition {
        let resume = |waiter, wish| Event::Resume { waiter, wish, exported };
        self.begin(wish, Some(exported), resume)
    }

    fn begin(
        self: &Arc<Self>,
        wish: Wish,
        resumes: Option<Exported>,
        event: impl FnOnce(WaiterId, Wish) -> Event,
    ) -> Acquisition {
        self.start();
        let (name, mode) = (&wish.name, wish.mode.as_str());
        let span = tracing::info_span!("acquire", %name, mode, waited = Empty, outcome = Empty);
        measure::requested();
        let (reply, answer) = oneshot::channel();
        let mut refused = None;
        let begin = |state: &mut State| {
            state.next_waiter += 1;
            let waiter = WaiterId(state.next_waiter);
            let (name, since, owner) = (wish.name.clone(), self.now(), wish.owner);
            let waiting = Waiting { name, mode: wish.mode, since, owner, resumes, reply };
            if state.phase == Phase::Draining {
                refused = Some(waiting);
                return Event::Tick;
            }
            state.waiters.insert(waiter, waiting);
            event(waiter, wish)
        };
        let waiter = self.feed_with(begin, |state| WaiterId(state.next_waiter));
        refused.into_iter().for_each(|waiting| self.refuse(waiting));
        Acquisition::new(Arc::clone(self), waiter, span, answer)
    }

    /// The database has evicted the holding with this token, which may be one of this client.
    pub(crate) fn evicted(self: &Arc<Self>, name: LockName, token: FencingToken) {
        self.feed(Event::Evicted { name, token });
    }

    /// What this client holds of a name may have been taken away.
    pub(crate) fn doubt(self: &Arc<Self>, name: LockName) {
        self.feed(Event::Doubted { name });
    }

    /// Refuses every waiter, and every request from now on. The future completes when nothing is held.
    pub(crate) fn drain(self: &Arc<Self>) -> impl Future<Output = ()> + Send + use<> {
        let mut is_waiting = true;
        while is_waiting {
            let mut refused = None;
            // In one step for each: a grant in between would reach nobody.
            let drain = |state: &mut State| {
                if state.phase == Phase::Open {
                    state.phase = Phase::Draining;
                }
                let Some(waiter) = state.waiters.keys().next().copied() else {
                    return Event::Tick;
                };
                refused = state.waiters.remove(&waiter);
                Event::Cancel { waiter }
            };
            self.feed_with(drain, |_| ());
            is_waiting = refused.is_some();
            refused.into_iter().for_each(|waiting| self.refuse(waiting));
        }
        let coordinator = Arc::clone(self);
        async move {
            loop {
                let drained = coordinator.drained.notified();
                let mut drained = std::pin::pin!(drained);
                drained.as_mut().enable();
                if coordinator.state().engine.held() == 0 {
                    return;
                }
                drained.await;
            }
        }
    }

    /// Refuses a caller because the client takes no more requests.
    fn refuse(&self, waiting: Waiting) {
        self.tell_of(waiting.mode.as_str(), waiting.refused(self.now(), RefusalReason::Closed));
        let _ = waiting.reply.send(Err(Refusal::Closed));
    }

    /// Gives everything back, refuses every waiter, and closes the connections.
    pub(crate) async fn close(self: &Arc<Self>) -> Result<()> {
        self.start();
        let (closed, is_closed) = oneshot::channel();
        if self.state().phase != Phase::Closed {
            self.state().closed.push(closed);
            self.feed(Event::Close);
            let _ = is_closed.await;
        }
        let trouble = self.executor.trouble();
        self.executor.close().await;
        self.publisher.close();
        match trouble {
            Some(reason) => Err(Error::Unavailable { attempted: "release", reason, source: None }),
            None => Ok(()),
        }
    }

    pub(crate) fn executor(&self) -> &Executor {
        &self.executor
    }

    /// The time on the clock of the client.
    pub(crate) fn now(&self) -> Moment {
        self.executor.clock().now()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes an event to the engine and carries out what follows from it.
    fn feed(self: &Arc<Self>, event: Event) {
        self.feed_with(|_| event, |_| ());
    }

    /// The same, with something done to the state before and after, in one step.
    fn feed_with<T>(
        self: &Arc<Self>,
        before: impl FnOnce(&mut State) -> Event,
        after: impl FnOnce(&mut State) -> T,
    ) -> T {
        let mut outbox = Outbox::default();
        let result = {
            let mut state = self.state();
            let event = before(&mut state);
            outbox.is_eviction = matches!(event, Event::Evicted { .. });
            let now = self.now();
            let actions = state.engine.handle(now, event);
            for action in actions {
                self.act(&mut state, &mut outbox, now, action);
            }
            self.look_at_heartbeat(&mut state, &mut outbox, now);
            let wakes_at = state.engine.wakes_at();
            if wakes_at.is_some_and(|at| state.asleep_until.is_some_and(|until| at < until)) {
                self.rearmed.notify_one();
            }
            if state.phase != Phase::Open && state.engine.held() == 0 {
                self.drained.notify_waiters();
            }
            after(&mut state)
        };
        for (request, body, answer_within) in outbox.sends {
            self.send(request, body, answer_within);
        }
        outbox.reports.iter().for_each(Report::write);
        result
    }

    /// Reports something that is no action of the engine.
    fn tell(&self, event: events::Event) {
        self.tell_of("", event);
    }

    /// The same, for an event about a request of this kind.
    fn tell_of(&self, kind: &'static str, event: events::Event) {
        self.publisher.publish(&event);
        Report { event, kind, is_eviction: false }.write();
    }

    /// Tells the readers of events, in the order in which things happen. The log is written when the lock is open again.
    fn report(&self, outbox: &mut Outbox, event: events::Event) {
        self.report_of(outbox, "", event);
    }

    /// The same, for an event about a request of this kind.
    fn report_of(&self, outbox: &mut Outbox, kind: &'static str, event: events::Event) {
        self.publisher.publish(&event);
        outbox.reports.push(Report { event, kind, is_eviction: outbox.is_eviction });
    }

    /// Reports a heartbeat that has become late.
    fn look_at_heartbeat(&self, state: &mut State, outbox: &mut Outbox, now: Moment) {
        if let Pulse::Late(unanswered_for) = state.engine.pulse(now)
            && state.heartbeat != HeartbeatReport::Late
        {
            state.heartbeat = HeartbeatReport::Late;
            self.report(outbox, events::Event::HeartbeatLate { unanswered_for });
        }
    }

    /// Notes and reports what came of a heartbeat.
    fn note_heartbeat(&self, sent_at: Moment, result: Result<(), &Error>) {
        let mut measured = None;
        let mut state = self.state();
        let event = match result {
            Ok(()) => {
                let round_trip = self.now().since(sent_at);
                measured = Some(round_trip);
                state.last_beat = Some(AnsweredBeat { sent_at, round_trip });
                let before = std::mem::replace(&mut state.heartbeat, HeartbeatReport::Fine);
                (before != HeartbeatReport::Fine).then_some(events::Event::HeartbeatRestored)
            }
            Err(Error::Closed) => None,
            Err(error) => {
                state.heartbeat = HeartbeatReport::Failed;
                Some(events::Event::HeartbeatFailed { reason: error.report().to_string() })
            }
        };
        drop(state);
        measured.into_iter().for_each(measure::heartbeat);
        event.into_iter().for_each(|event| self.tell(event));
    }

    fn act(self: &Arc<Self>, state: &mut State, outbox: &mut Outbox, now: Moment, action: Action) {
        match action {
            Action::Send { request, body } => {
                let answer_within = state.engine.heartbeat_patience();
                outbox.sends.push((request, body, answer_within));
            }
            Action::Waits { waiter } => {
                if let Some(Waiting { name, .. }) = state.waiters.get(&waiter) {
                    self.report(outbox, events::Event::Waiting { name: name.clone() });
                }
            }
            Action::Granted { waiter, grant } => {
                let Some(waiting) = state.waiters.remove(&waiter) else {
                    return;
                };
                let (name, token, waited) = (grant.name.clone(), grant.token, now.since(waiting.since));
                state.holds.insert(grant.lease, Hold { name: name.clone(), token, since: now });
                let kind = waiting.mode.as_str();
                self.report_of(outbox, kind, events::Event::Acquired { name, token, waited });
                let ending = Arc::<Ending>::default();
                state.leases.insert(grant.lease, Arc::clone(&ending));
                let lease = HeldLease::new(Arc::clone(self), grant, waiting.owner, ending, waiting.resumes);
                outbox.unwanted.extend(waiting.reply.send(Ok(lease)).err());
            }
            Action::Refused { waiter, refusal } => {
                if let Some(waiting) = state.waiters.remove(&waiter) {
                    let reason = refusal_reason(&refusal, self.executor.trouble().is_some());
                    self.report_of(outbox, waiting.mode.as_str(), waiting.refused(now, reason));
                    let _ = waiting.reply.send(Err(refusal));
                }
            }
            Action::Released { lease, verdict } => {
                if let Some(Hold { name, token, since }) = state.holds.remove(&lease) {
                    let held = now.since(since);
                    let event = match verdict {
                        Verdict::Lost(cause) => events::Event::Lost { name, token, held, cause },
                        _ => {
                            let is_confirmed = matches!(verdict, Verdict::Kept);
                            events::Event::Released { name, token, held, is_confirmed }
                        }
                    };
                    self.report(outbox, event);
                }
                if let Some(reply) = state.releases.remove(&lease) {
                    let _ = reply.send(verdict);
                }
            }
            Action::Lost { lease, cause } => {
                if let Some(Hold { name, token, since }) = state.holds.remove(&lease) {
                    let held = now.since(since);
                    self.report(outbox, events::Event::Lost { name, token, held, cause });
                }
                if let Some(ending) = state.leases.remove(&lease) {
                    let _ = ending.cause.set(cause);
                    ending.ended.notify_waiters();
                }
            }
            Action::Amended { lease, result } => {
                if let Some(reply) = state.amendments.get_mut(&lease).and_then(VecDeque::pop_front) {
                    let _ = reply.send(result);
                }
            }
            Action::Exported { lease, exported } => {
                if exported.is_some()
                    && let Some(Hold { name, token, since }) = state.holds.remove(&lease)
                {
                    let held = now.since(since);
                    self.report(outbox, events::Event::Exported { name, token, held });
                }
                state.exported = exported.map(|exported| (lease, exported));
            }
            Action::Closed => {
                state.phase = Phase::Closed;
                for closed in std::mem::take(&mut state.closed) {
                    let _ = closed.send(());
                }
            }
        }
    }

    /// Sends a request and feeds its answer back.
    fn send(self: &Arc<Self>, request: RequestId, body: Request, heartbeat_within: Duration) {
        let coordinator = Arc::clone(self);
        let is_heartbeat = matches!(body, Request::Register { .. } | Request::Beat { .. });
        let takeover = takeover(&body);
        let reply = move |answer: crate::executor::Answer<Response>| {
            let crate::executor::Answer { result, sent_at, may_linger, is_repeated } = answer;
            if result.as_ref().is_ok_and(Response::is_grant) {
                takeover.into_iter().for_each(|event| coordinator.tell(event));
            }
            if is_heartbeat {
                coordinator.note_heartbeat(sent_at, result.as_ref().map(|_| ()));
            }
            let (is_answered, now) = (result.is_ok(), coordinator.now());
            let result = result.map_err(|error| Failure(Arc::new(error)));
            let answer = Answer { sent_at, may_linger, is_repeated, result };
            let note = |state: &mut State| {
                if is_answered {
                    state.answered_at = now;
                }
                Event::Answer { request, answer }
            };
            coordinator.feed_with(note, |_| ());
        };
        if is_heartbeat {
            self.executor.submit_heartbeat(body, heartbeat_within, reply);
        } else {
            self.executor.submit(body, reply);
        }
    }
}

impl Waiting {
    fn refused(&self, now: Moment, reason: RefusalReason) -> events::Event {
        events::Event::Refused { name: self.name.clone(), reason, waited: now.since(self.since) }
    }
}

/// Wakes the engine when it wants to be woken, for as long as somebody uses the coordinator, or something is to be given back to a store
/// that answers.
async fn keep_time(coordinator: Weak<Coordinator>) {
    let mut kept = None;
    loop {
        let Some(strong) = kept.take().or_else(|| coordinator.upgrade()) else {
            return;
        };
        let now = strong.now();
        let until = {
            let mut state = strong.state();
            let until = state.engine.wakes_at().unwrap_or(now + LONGEST_SLEEP).min(now + LONGEST_SLEEP);
            state.asleep_until = Some(until);
            until
        };
        let pause = until.since(now);
        let _ = timeout(pause, strong.rearmed.notified()).await;
        strong.feed(Event::Tick);
        let gives_back = {
            let state = strong.state();
            !state.engine.is_settled() && strong.now() < state.answered_at + GIVES_UP_AFTER
        };
        kept = gives_back.then_some(strong);
    }
}
