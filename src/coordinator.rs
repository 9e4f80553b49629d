//! Passes inputs to the engine and carries out its actions; no other part does either.
//!
//! ```text
//! PendingAcquisition, HeldLease ──Input──▶ Engine ──Action──▶ Executor ──▶ database
//!         ▲                                  ▲                   │
//!         └───────────grants, losses─────────┘◀──answers, notifications
//! ```
//!
//! A lock around the engine is held for one input at a time, or for some answers of a batch, and
//! never while anything is awaited or dropped. One task sleeps until the engine is due and calls it
//! then.

mod acquisition;
mod actions;
mod eviction;
mod held;
mod report;
mod state;
mod timer;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tracing::field::Empty;
use uuid::Uuid;

pub(crate) use acquisition::PendingAcquisition;
pub(crate) use eviction::Eviction;
pub(crate) use held::HeldLease;

use crate::clock::Moment;
use crate::engine::{Answer, Engine, Exported, HeartbeatStatus, Input, LeaseSpec, Refusal, SharedError, WaiterId};
use crate::error::{Error, Result};
use crate::events::{self, Events, Publisher, RefusalReason};
use crate::executor::{Executor, OperationAnswer, Receiver};
use crate::health::{Health, Heartbeat};
use crate::measure::{self, Meter};
use crate::name::LockName;
use crate::panics;
use crate::protocol::{AcquisitionId, ClientId, Request, RequestId, Response};
use crate::token::FencingToken;
use state::{AnsweredBeat, HeartbeatReport, Outbox, Phase, Sending, State, WaitingCaller};

/// See the [module](self).
pub(crate) struct Coordinator {
    executor: Executor,
    publisher: Arc<Publisher>,
    /// The client's description for people.
    holder: Arc<str>,
    meter: Meter,
    state: Mutex<State>,
    /// Notified when the engine must be called before the timer wakes.
    rearmed: Notify,
    /// Notified when a draining or closed client holds no more leases.
    drained: Notify,
    /// Whether the client takes no more requests.
    is_closed: watch::Sender<bool>,
}

impl Coordinator {
    /// Creates the coordinator of a new client, which `holder` describes to people.
    pub(crate) fn new(executor: Executor, publisher: Arc<Publisher>, holder: Arc<str>, meter: Meter) -> Arc<Self> {
        let random = || Uuid::new_v4().as_u128();
        // The ids of one client count up from the first.
        let first = AcquisitionId::from_u128(random() & !u128::from(u32::MAX));
        let clock = executor.clock();
        let engine = Engine::new(ClientId::from_u128(random()), Arc::clone(&holder), first);
        Arc::new(Self {
            executor,
            publisher,
            holder,
            meter,
            state: Mutex::new(State::new(engine, clock.now())),
            rearmed: Notify::new(),
            drained: Notify::new(),
            is_closed: watch::Sender::new(false),
        })
    }

    /// Starts the tasks on the current runtime, on the first call.
    pub(crate) fn start(self: &Arc<Self>) {
        if self.state().is_started {
            return;
        }
        // Outside of a runtime this panics, and the next call inside one starts the client.
        let runtime = Handle::current();
        if std::mem::replace(&mut self.state().is_started, true) {
            return;
        }
        runtime.spawn(timer::run_timer(timer::AbandonOnDrop(Arc::downgrade(self))));
        let coordinator = Arc::downgrade(self);
        self.executor.start(move |notification| {
            if let Some(coordinator) = coordinator.upgrade() {
                coordinator.feed(Input::Notified(notification));
            }
        });
        measure::describe();
        tracing::info!(holder = %self.holder, address = self.executor.address(), "started a client for locks");
    }

    /// Subscribes to the events from now on.
    pub(crate) fn events(&self) -> Events {
        self.publisher.subscribe()
    }

    /// Returns the health of the client. Does no I/O.
    pub(crate) fn health(&self) -> Health {
        let unavailable = self.executor.last_failure();
        let connections = self.executor.open_connections();
        let now = self.now();
        let state = self.state();
        Health {
            held: state.engine.held(),
            waiting: state.waiters.len(),
            connections,
            heartbeat: match state.engine.heartbeat_status(now) {
                HeartbeatStatus::Idle => Heartbeat::Idle,
                HeartbeatStatus::Answered => Heartbeat::Answered,
                HeartbeatStatus::Failed | HeartbeatStatus::Late(_) => Heartbeat::Late,
            },
            last_heartbeat: state.last_beat.map(|beat| now.since(beat.sent_at)),
            round_trip: state.last_beat.map(|beat| beat.round_trip),
            unavailable,
        }
    }

    /// Begins to acquire a lease.
    pub(crate) fn acquire(self: &Arc<Self>, spec: LeaseSpec) -> PendingAcquisition {
        self.begin(spec, None, |waiter, spec| Input::Acquire { waiter, spec })
    }

    /// Begins to take over an exported lease.
    pub(crate) fn resume(self: &Arc<Self>, spec: LeaseSpec, exported: Exported) -> PendingAcquisition {
        let resume = |waiter, spec| Input::Resume { waiter, spec, exported };
        self.begin(spec, Some(exported), resume)
    }

    fn begin(
        self: &Arc<Self>,
        spec: LeaseSpec,
        resumes: Option<Exported>,
        input: impl FnOnce(WaiterId, LeaseSpec) -> Input,
    ) -> PendingAcquisition {
        self.start();
        let (name, mode) = (&spec.name, spec.mode.as_str());
        let span = tracing::info_span!("acquire", name = name.as_str(), mode, waited = Empty, outcome = Empty);
        self.meter.count_request(name, mode);
        let (reply, answer) = oneshot::channel();
        let mut refused = None;
        let begin = |state: &mut State, _: &mut Outbox| {
            state.next_waiter += 1;
            let waiter = WaiterId(state.next_waiter);
            let (name, since, owner) = (spec.name.clone(), self.now(), spec.owner);
            let waiting = WaitingCaller { name, mode: spec.mode, since, owner, resumes, reply };
            if state.phase != Phase::Open {
                refused = Some(waiting);
                return Input::Tick;
            }
            state.waiters.insert(waiter, waiting);
            input(waiter, spec)
        };
        let waiter = self.feed_with(begin, |state| WaiterId(state.next_waiter));
        if let Some(waiting) = refused {
            self.refuse(waiting);
        }
        PendingAcquisition::new(Arc::clone(self), waiter, span, answer)
    }

    /// Records that the application evicts the holder with this token, perhaps a holder of this
    /// client.
    pub(crate) fn begin_eviction(self: &Arc<Self>, name: LockName, token: FencingToken) -> Eviction {
        self.state().evictions.push((name.clone(), token));
        Eviction { coordinator: Arc::clone(self), name, token }
    }

    /// Reads a name again, on which this client may have lost its lease.
    pub(crate) fn look_up(self: &Arc<Self>, name: LockName) {
        self.feed(Input::LookUp { name });
    }

    /// Refuses every waiter, and every request from now on. The future completes when no lease is
    /// held.
    pub(crate) fn drain(self: &Arc<Self>) -> impl Future<Output = ()> + Send + use<> {
        self.is_closed.send_replace(true);
        let mut is_waiting = true;
        while is_waiting {
            let mut refused = None;
            // Under one lock for each waiter: a grant in between would have no receiver.
            let drain = |state: &mut State, _: &mut Outbox| {
                if state.phase == Phase::Open {
                    state.phase = Phase::Draining;
                }
                // The first waiters of a name leave its queue first, which moves no other waiter.
                let Some((waiter, waiting)) = state.waiters.pop_first() else {
                    return Input::Tick;
                };
                refused = Some(waiting);
                Input::Cancel { waiter }
            };
            self.feed_with(drain, |_| ());
            is_waiting = refused.is_some();
            if let Some(waiting) = refused {
                self.refuse(waiting);
            }
        }
        let coordinator = Arc::clone(self);
        async move {
            loop {
                let drained = coordinator.drained.notified();
                let mut drained = std::pin::pin!(drained);
                drained.as_mut().enable();
                let is_over = |state: &State| state.is_abandoned || state.engine.held() == 0;
                if is_over(&coordinator.state()) {
                    return;
                }
                drained.await;
            }
        }
    }

    /// Completes when the client takes no more requests.
    pub(crate) async fn closed(&self) {
        // The sender lives as long as this object.
        let _ = self.is_closed.subscribe().wait_for(|is_closed| *is_closed).await;
    }

    /// Refuses a caller because the client takes no more requests.
    fn refuse(&self, waiting: WaitingCaller) {
        self.publish_request(waiting.mode.as_str(), waiting.refused(self.now(), RefusalReason::Closed));
        let _ = waiting.reply.send(Err(Refusal::Closed));
    }

    /// Releases every lease, refuses every waiter, and closes the connections.
    pub(crate) async fn close(self: &Arc<Self>) -> Result<()> {
        self.start();
        self.is_closed.send_replace(true);
        let (reply, closed) = oneshot::channel();
        let mut outcome = Ok(());
        if self.state().phase != Phase::Closed {
            self.state().close_replies.push(reply);
            self.feed(Input::Close);
            outcome = match closed.await {
                Ok(None) => Ok(()),
                Ok(Some(error)) => Err(error.into_error()),
                Err(_) => Err(Error::Closed),
            };
        } else if self.state().is_abandoned {
            outcome = Err(Error::Closed);
        }
        self.executor.close().await;
        self.publisher.close();
        outcome
    }

    /// Ends every request and every wait for the end of a lease, because the runtime of the tasks
    /// has ended and nothing can be sent. Leases end with their TTL.
    fn abandon(&self) {
        self.is_closed.send_replace(true);
        let now = self.now();
        let mut state = self.state();
        (state.phase, state.is_abandoned) = (Phase::Closed, true);
        let waiters = std::mem::take(&mut state.waiters);
        let mut outbox = Outbox::default();
        for waiting in waiters.values() {
            let event = waiting.refused(now, RefusalReason::Closed);
            self.publish_request_locked(&state, &mut outbox, waiting.mode.as_str(), event);
        }
        let ended = (
            waiters,
            std::mem::take(&mut state.release_replies),
            std::mem::take(&mut state.amendment_replies),
            std::mem::take(&mut state.close_replies),
        );
        drop(state);
        self.drained.notify_waiters();
        outbox.reports.iter().for_each(|report| report.write(&self.meter));
        // Dropping the reply channels ends the waits for answers.
        drop(ended);
        self.executor.abandon();
        self.publisher.close();
    }

    pub(crate) fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Returns the time of the client's clock.
    pub(crate) fn now(&self) -> Moment {
        self.executor.clock().now()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes an input to the engine and carries out its actions.
    fn feed(self: &Arc<Self>, input: Input) {
        self.feed_with(|_, _| input, |_| ());
    }

    /// Makes an input from the state, passes it to the engine, carries out its actions, and reads a
    /// result from the state, all under one lock.
    fn feed_with<T>(
        self: &Arc<Self>,
        before: impl FnOnce(&mut State, &mut Outbox) -> Input,
        after: impl FnOnce(&mut State) -> T,
    ) -> T {
        self.locked(|state, outbox| {
            let input = before(state, outbox);
            self.handle(state, outbox, input);
            after(state)
        })
    }

    /// Passes inputs to the engine under the lock of the state, and then does the work that follows.
    fn locked<T>(self: &Arc<Self>, pass_inputs: impl FnOnce(&mut State, &mut Outbox) -> T) -> T {
        let mut outbox = Outbox::default();
        let result = {
            let mut state = self.state();
            state.engine.set_can_notify(self.executor.can_notify());
            let result = pass_inputs(&mut state, &mut outbox);
            self.update_from_engine(&mut state, &mut outbox);
            result
        };
        for sending in outbox.sends {
            self.send(sending);
        }
        outbox.reports.iter().for_each(|report| report.write(&self.meter));
        result
    }

    /// Passes an input to the engine and carries out its actions.
    fn handle(self: &Arc<Self>, state: &mut State, outbox: &mut Outbox, input: Input) {
        let now = self.now();
        for action in state.engine.handle(now, input) {
            self.act(state, outbox, now, action);
        }
    }

    /// Sets what depends on the state of the engine, after it has handled its inputs.
    fn update_from_engine(&self, state: &mut State, outbox: &mut Outbox) {
        self.publish_late_heartbeat(state, outbox, self.now());
        self.executor.set_waiting(state.engine.is_queued());
        self.executor.set_heartbeat_timeout(state.engine.heartbeat_timeout());
        let wakes_at = state.engine.wakes_at();
        if wakes_at.is_some_and(|at| state.asleep_until.is_some_and(|until| at < until)) {
            self.rearmed.notify_one();
        }
        if state.phase != Phase::Open && state.engine.held() == 0 {
            self.drained.notify_waiters();
        }
    }

    /// Stores and publishes the result of a heartbeat.
    fn record_heartbeat(&self, state: &mut State, outbox: &mut Outbox, sent_at: Moment, result: Result<(), &Error>) {
        let event = match result {
            Ok(()) => {
                let round_trip = self.now().since(sent_at);
                state.last_beat = Some(AnsweredBeat { sent_at, round_trip });
                state.heartbeat_failure = None;
                let before = std::mem::replace(&mut state.heartbeat, HeartbeatReport::Fine);
                (before != HeartbeatReport::Fine).then_some(events::Event::HeartbeatRestored)
            }
            Err(Error::Closed) => None,
            Err(error) => {
                state.heartbeat = HeartbeatReport::Failed;
                let reason = error.report().to_string();
                let before = state.heartbeat_failure.replace(reason.clone());
                (before.as_ref() != Some(&reason)).then_some(events::Event::HeartbeatFailed { reason })
            }
        };
        if let Some(event) = event {
            self.publish_locked(state, outbox, event);
        }
    }

    /// Sends a request, whose answer comes back to this coordinator.
    fn send(self: &Arc<Self>, sending: Sending) {
        let Sending { request, body, answer_timeout, is_urgent } = sending;
        let coordinator = Arc::clone(self);
        match (&*body, is_urgent) {
            (Request::Register { .. } | Request::Beat { .. }, _) => {
                let reply = move |answer| coordinator.receive_heartbeat(request, answer);
                self.executor.submit_heartbeat(body, answer_timeout, reply);
            }
            (_, true) => {
                let reply = move |answer| coordinator.receive(vec![(request, answer)]);
                self.executor.submit_urgent(body, answer_timeout, reply);
            }
            (_, false) => self.executor.submit_request(body, request, coordinator),
        }
    }

    fn receive_heartbeat(self: Arc<Self>, request: RequestId, answer: OperationAnswer<Response>) {
        match &answer.result {
            Ok(_) => measure::record_heartbeat(self.now().since(answer.sent_at)),
            Err(Error::Closed) => {}
            Err(_) => measure::count_failed_heartbeat(),
        }
        let record = |state: &mut State, outbox: &mut Outbox| {
            self.record_heartbeat(state, outbox, answer.sent_at, answer.result.as_ref().map(|_| ()));
            self.record_answer(state, request, answer)
        };
        self.feed_with(record, |_| ());
    }

    /// Records an answer. Returns the input for the engine.
    fn record_answer(&self, state: &mut State, request: RequestId, answer: OperationAnswer<Response>) -> Input {
        let OperationAnswer { result, sent_at, may_linger, is_repeated } = answer;
        if result.is_ok() {
            state.answered_at = self.now();
        }
        let result = result.map_err(|error| SharedError(Arc::new(error)));
        Input::Answer { request, answer: Answer { sent_at, may_linger, is_repeated, result } }
    }
}

impl Receiver for Coordinator {
    fn receive(self: Arc<Self>, answers: Vec<(RequestId, OperationAnswer<Response>)>) {
        self.locked(|state, outbox| {
            for (request, answer) in answers {
                let input = self.record_answer(state, request, answer);
                // A panic must not keep the engine from the other answers.
                let _ = panics::caught(|| self.handle(state, outbox, input));
            }
        });
    }
}
