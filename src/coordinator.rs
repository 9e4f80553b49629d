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

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;
use uuid::Uuid;

pub(crate) use acquisition::Acquisition;
pub(crate) use held::HeldLease;

use crate::clock::Moment;
use crate::engine::{
    Action, Answer, Engine, Event, Exported, Failure, LeaseKey, NotAmended, Refusal, RequestId, Verdict, WaiterId, Wish,
};
use crate::error::{Error, LossCause, Result};
use crate::executor::Executor;
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{ClientId, LeaseId, Request};
use crate::token::FencingToken;

/// At least so often the clocks are compared: timers stand still while the machine sleeps.
const LONGEST_SLEEP: Duration = Duration::from_millis(500);

/// For how long a client that nobody uses any more goes on giving back when the store does not answer. What is left ends with its TTL.
const GIVES_UP_AFTER: Duration = Duration::from_secs(60);

/// See the [module](self).
pub(crate) struct Coordinator {
    executor: Executor,
    state: Mutex<State>,
    /// The engine wants to be woken earlier than the timer sleeps.
    rearmed: Notify,
}

struct State {
    engine: Engine,
    next_waiter: u64,
    waiters: HashMap<WaiterId, Waiting>,
    leases: HashMap<LeaseKey, Arc<Ending>>,
    releases: HashMap<LeaseKey, oneshot::Sender<Verdict>>,
    amendments: HashMap<LeaseKey, VecDeque<oneshot::Sender<Result<(), NotAmended>>>>,
    exported: Option<(LeaseKey, Exported)>,
    closed: Vec<oneshot::Sender<()>>,
    is_closed: bool,
    /// Until when the timer sleeps.
    asleep_until: Option<Moment>,
    /// When the store last answered a request.
    answered_at: Moment,
    is_started: bool,
}

/// A caller that waits.
struct Waiting {
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
}

impl Coordinator {
    /// A coordinator for a new client, which `holder` names for people.
    pub(crate) fn new(executor: Executor, holder: Arc<str>) -> Arc<Self> {
        let random = || Uuid::new_v4().as_u128();
        // The identities of one client are counted up from the first.
        let first = LeaseId::from_u128(random() & !u128::from(u32::MAX));
        let can_notify = executor.can_notify();
        Arc::new(Self {
            executor,
            state: Mutex::new(State {
                engine: Engine::new(ClientId::from_u128(random()), holder, first, can_notify),
                next_waiter: 0,
                waiters: HashMap::new(),
                leases: HashMap::new(),
                releases: HashMap::new(),
                amendments: HashMap::new(),
                exported: None,
                closed: Vec::new(),
                is_closed: false,
                asleep_until: None,
                answered_at: Moment::now(),
                is_started: false,
            }),
            rearmed: Notify::new(),
        })
    }

    /// Starts the tasks on the present runtime, the first time.
    pub(crate) fn start(self: &Arc<Self>) {
        let mut state = self.state();
        if !state.is_started {
            tokio::spawn(keep_time(Arc::downgrade(self)));
            let coordinator = Arc::downgrade(self);
            self.executor.start(move |name| {
                if let (Some(coordinator), Ok(name)) = (coordinator.upgrade(), LockName::new(name)) {
                    coordinator.feed(Event::Notified { name });
                }
            });
            state.is_started = true;
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
        let (reply, answer) = oneshot::channel();
        let begin = |state: &mut State| {
            state.next_waiter += 1;
            let waiter = WaiterId(state.next_waiter);
            state.waiters.insert(waiter, Waiting { owner: wish.owner, resumes, reply });
            event(waiter, wish)
        };
        let waiter = self.feed_with(begin, |state| WaiterId(state.next_waiter));
        Acquisition::new(Arc::clone(self), waiter, answer)
    }

    /// The database has evicted the holding with this token, which may be one of this client.
    pub(crate) fn evicted(self: &Arc<Self>, name: LockName, token: FencingToken) {
        self.feed(Event::Evicted { name, token });
    }

    /// What this client holds of a name may have been taken away.
    pub(crate) fn doubt(self: &Arc<Self>, name: LockName) {
        self.feed(Event::Doubted { name });
    }

    /// Gives everything back, refuses every waiter, and closes the connections.
    pub(crate) async fn close(self: &Arc<Self>) -> Result<()> {
        self.start();
        let (closed, is_closed) = oneshot::channel();
        if !self.state().is_closed {
            self.state().closed.push(closed);
            self.feed(Event::Close);
            let _ = is_closed.await;
        }
        let trouble = self.executor.trouble();
        self.executor.close().await;
        match trouble {
            Some(reason) => Err(Error::Unavailable { attempted: "release", reason, source: None }),
            None => Ok(()),
        }
    }

    pub(crate) fn executor(&self) -> &Executor {
        &self.executor
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
            let actions = state.engine.handle(Moment::now(), event);
            for action in actions {
                self.act(&mut state, &mut outbox, action);
            }
            let wakes_at = state.engine.wakes_at();
            if wakes_at.is_some_and(|at| state.asleep_until.is_some_and(|until| at < until)) {
                self.rearmed.notify_one();
            }
            after(&mut state)
        };
        for (request, body, answer_within) in outbox.sends {
            self.send(request, body, answer_within);
        }
        result
    }

    fn act(self: &Arc<Self>, state: &mut State, outbox: &mut Outbox, action: Action) {
        match action {
            Action::Send { request, body } => {
                let answer_within = state.engine.heartbeat_patience();
                outbox.sends.push((request, body, answer_within));
            }
            Action::Granted { waiter, grant } => {
                let Some(waiting) = state.waiters.remove(&waiter) else {
                    return;
                };
                let ending = Arc::<Ending>::default();
                state.leases.insert(grant.lease, Arc::clone(&ending));
                let lease = HeldLease::new(Arc::clone(self), grant, waiting.owner, ending, waiting.resumes);
                outbox.unwanted.extend(waiting.reply.send(Ok(lease)).err());
            }
            Action::Refused { waiter, refusal } => {
                if let Some(waiting) = state.waiters.remove(&waiter) {
                    let _ = waiting.reply.send(Err(refusal));
                }
            }
            Action::Released { lease, verdict } => {
                if let Some(reply) = state.releases.remove(&lease) {
                    let _ = reply.send(verdict);
                }
            }
            Action::Lost { lease, cause } => {
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
            Action::Exported { lease, exported } => state.exported = exported.map(|exported| (lease, exported)),
            Action::Closed => {
                state.is_closed = true;
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
        let reply = move |answer: crate::executor::Answer<_>| {
            let crate::executor::Answer { result, sent_at, may_linger, is_repeated } = answer;
            let is_answered = result.is_ok();
            let result = result.map_err(|error| Failure(Arc::new(error)));
            let answer = Answer { sent_at, may_linger, is_repeated, result };
            let note = |state: &mut State| {
                if is_answered {
                    state.answered_at = Moment::now();
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

/// Wakes the engine when it wants to be woken, for as long as somebody uses the coordinator, or something is to be given back to a store
/// that answers.
async fn keep_time(coordinator: Weak<Coordinator>) {
    let mut kept = None;
    loop {
        let Some(strong) = kept.take().or_else(|| coordinator.upgrade()) else {
            return;
        };
        let now = Moment::now();
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
            !state.engine.is_settled() && Moment::now() < state.answered_at + GIVES_UP_AFTER
        };
        kept = gives_back.then_some(strong);
    }
}
