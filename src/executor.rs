//! Sends operations to the database on a bounded number of connections: one for heartbeats, and one
//! or two for everything else.
//!
//! A connection is opened when all open ones are busy.
//!
//! An operation runs to its end even if the future of its caller is dropped. It is sent again when
//! its connection is lost or the database rolled it back because of a conflict; during the pause
//! before that, its connection serves other operations. A panic ends the operation and its
//! connection.
//!
//! When the heartbeat's connection is lost, or any other one is silent for too long, the others are
//! suspect, because they use the same network: idle ones are closed, and busy ones if their answers
//! take longer than the heartbeat's was allowed to.
//!
//! Operations that are ready together may be sent in one [`Batch`]. Operations that the batch
//! leaves undone are sent alone.
//!
//! The queue is unbounded. It stays short, because a caller submits one operation at a time, and
//! the engine sends one change per name and one lookup of its holdings.

mod failure;
mod worker;

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::backend::{Backend, Notification};
use crate::clock::{Clock, Moment};
use crate::error::{Error, Result};
use crate::events::Publisher;
use crate::operation::Operation;
use crate::protocol::Batch;
use crate::protocol::timing::ANSWER_WITHIN;
use worker::{NotificationSink, Pending, Task, Worker};

/// The answer to an operation.
pub(crate) struct OperationAnswer<T> {
    pub(crate) result: Result<T>,
    /// A moment before the answered request was sent.
    pub(crate) sent_at: Moment,
    /// Whether an unanswered request may take effect later.
    pub(crate) may_linger: bool,
    /// Whether an earlier attempt failed. After a rollback in its last statement, the effect of its
    /// earlier statements is unknown.
    pub(crate) is_repeated: bool,
}

/// See the [module](self).
pub(crate) struct Executor {
    work: Arc<TaskQueue>,
    heartbeats: Arc<TaskQueue>,
    backend: Arc<dyn Backend>,
    connections: usize,
    publisher: Arc<Publisher>,
    /// Whether the client waits for a name that another client may grant it.
    is_waiting: watch::Sender<bool>,
    /// How long the answer to a heartbeat may take.
    heartbeat_timeout: watch::Sender<Duration>,
    workers: Mutex<Vec<JoinHandle<()>>>,
}

/// The next work of a worker.
enum Gathered {
    One(Box<dyn Pending>),
    Several(Batch, Vec<Box<dyn Pending>>),
}

/// The operations that wait for a connection.
#[derive(Default)]
struct TaskQueue {
    state: Mutex<QueueState>,
    /// Wakes workers that have a connection.
    changed: Notify,
    /// Wakes workers without a connection.
    spare: Notify,
    /// Changes when the workers' connections may be dead.
    suspicion: watch::Sender<Suspicion>,
}

/// The suspicion that connections are dead, after another connection to the same server died.
#[derive(Clone, Copy, Default)]
struct Suspicion {
    /// How long the dead connection was without an answer.
    unanswered_for: Duration,
}

#[derive(Default)]
struct QueueState {
    /// Tasks that are sent before the ready ones.
    urgent: VecDeque<Box<dyn Pending>>,
    ready: VecDeque<Box<dyn Pending>>,
    /// Tasks that are sent again at these moments.
    delayed: BTreeMap<(Instant, u64), Box<dyn Pending>>,
    next: u64,
    /// Whether the next task is a ready one, although another is to be sent again.
    prefers_ready: bool,
    /// The number of workers with a connection and without a task.
    idle: usize,
    /// The number of workers with a connection.
    open: usize,
    /// The number of workers with a task.
    busy: usize,
    is_closed: bool,
    /// Tasks submitted after the close, while another task is being dropped.
    refused: Option<VecDeque<Box<dyn Pending>>>,
    /// Why a connection could not be opened or was lost, unless the database has answered since.
    failure: Option<FailureReport>,
    /// When the database last answered.
    answered_at: Option<Instant>,
}

/// When and why a connection could not be opened or was lost.
struct FailureReport {
    at: Instant,
    reason: String,
}

impl Executor {
    /// Creates an executor, which opens connections when they are first needed: `connections` of
    /// them in addition to the one for heartbeats. `publisher` receives an event for each
    /// reconnection.
    pub(crate) fn new(backend: Arc<dyn Backend>, connections: usize, publisher: Arc<Publisher>) -> Self {
        let (work, heartbeats, workers) = (Arc::default(), Arc::default(), Mutex::default());
        let (is_waiting, heartbeat_timeout) = (watch::Sender::new(false), watch::Sender::new(ANSWER_WITHIN));
        Self { work, heartbeats, backend, connections, publisher, is_waiting, heartbeat_timeout, workers }
    }

    /// Starts the tasks on the current runtime, on the first call. `on_grant` receives the
    /// notifications of grants by other clients.
    pub(crate) fn start(&self, on_grant: impl Fn(Notification) + Send + Sync + 'static) {
        let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        if !workers.is_empty() {
            return;
        }
        let worker = |queue| Worker::new(Arc::clone(&self.backend), Arc::clone(queue), Arc::clone(&self.publisher));
        let sink = NotificationSink { on_grant: Box::new(on_grant), is_waiting: self.is_waiting.subscribe() };
        let heartbeats = worker(&self.heartbeats).for_heartbeats(sink, self.heartbeat_timeout.subscribe(), &self.work);
        workers.push(tokio::spawn(heartbeats.run()));
        workers.extend((0..self.connections).map(|_| tokio::spawn(worker(&self.work).run())));
    }

    /// Sends an operation and passes its answer to `reply`. If the executor ends first, the answer
    /// is [`Error::Closed`].
    pub(crate) fn submit<O: Operation>(
        &self,
        operation: O,
        reply: impl FnOnce(OperationAnswer<O::Output>) + Send + 'static,
    ) {
        self.work.push(Box::new(Task::new(operation, ANSWER_WITHIN, self.clock(), reply)), false);
    }

    /// Sends an operation before the queued operations, and passes its answer to `reply`. An
    /// operation without an answer in time is sent again on another connection.
    pub(crate) fn submit_urgent<O: Operation>(
        &self,
        operation: O,
        answer_within: Duration,
        reply: impl FnOnce(OperationAnswer<O::Output>) + Send + 'static,
    ) {
        // A locked file answers late, and its connection does not break: the longer limit applies.
        let within = if self.backend.is_local() { ANSWER_WITHIN } else { answer_within };
        self.work.push(Box::new(Task::new(operation, within, self.clock(), reply)), true);
    }

    /// Sends a heartbeat and passes its answer to `reply`. Without an answer in time, its
    /// connection is closed.
    pub(crate) fn submit_heartbeat<O: Operation>(
        &self,
        operation: O,
        answer_within: Duration,
        reply: impl FnOnce(OperationAnswer<O::Output>) + Send + 'static,
    ) {
        self.heartbeats.push(Box::new(Task::new(operation, answer_within, self.clock(), reply)), false);
    }

    /// Sends an operation and waits for its answer.
    ///
    /// # Cancel safety
    ///
    /// The operation runs to its end when the future is dropped.
    pub(crate) async fn run<O: Operation>(&self, operation: O) -> OperationAnswer<O::Output> {
        let (answer, answered) = oneshot::channel();
        self.submit(operation, |result| {
            let _ = answer.send(result);
        });
        answered.await.unwrap_or_else(|_| OperationAnswer::closed(self.clock().now()))
    }

    /// Sets whether the client waits for a name that another client may grant it.
    pub(crate) fn set_waiting(&self, is_waiting: bool) {
        self.is_waiting.send_if_modified(|before| std::mem::replace(before, is_waiting) != is_waiting);
    }

    /// Sets how long the answer to a heartbeat may take, also to one that is in flight.
    pub(crate) fn set_heartbeat_timeout(&self, heartbeat_timeout: Duration) {
        self.heartbeat_timeout
            .send_if_modified(|before| std::mem::replace(before, heartbeat_timeout) != heartbeat_timeout);
    }

    /// Returns whether a client is notified of grants by other clients, after its first heartbeat.
    pub(crate) fn can_notify(&self) -> bool {
        self.backend.can_notify()
    }

    /// Returns why the database is unavailable. `None`: a request was answered since, or no request
    /// waits for its answer and a heartbeat was answered since.
    pub(crate) fn failure(&self) -> Option<String> {
        let beaten_at = self.heartbeats.state().answered_at;
        let work = self.work.state();
        let is_current = |failure: &&FailureReport| work.has_tasks() || beaten_at.is_none_or(|at| at < failure.at);
        work.failure.as_ref().filter(is_current).map(|failure| failure.reason.clone())
    }

    /// Returns why a connection for work could not be opened or was lost, unless work was answered
    /// since. Otherwise the same of the connection for heartbeats, unless anything was answered
    /// since.
    pub(crate) fn last_failure(&self) -> Option<String> {
        let answered_at = self.work.state().answered_at;
        let is_recent = |failure: &&FailureReport| answered_at.is_none_or(|at| at < failure.at);
        let of_heartbeat = || self.heartbeats.state().failure.as_ref().filter(is_recent).map(|f| f.reason.clone());
        self.failure().or_else(of_heartbeat)
    }

    /// Returns the number of open connections.
    pub(crate) fn open_connections(&self) -> usize {
        self.work.state().open + self.heartbeats.state().open
    }

    /// Returns the clock of the client.
    pub(crate) fn clock(&self) -> Clock {
        self.backend.clock()
    }

    /// Returns the address of the database, for messages.
    pub(crate) fn address(&self) -> String {
        self.backend.address()
    }

    /// Ends all operations with [`Error::Closed`], because the workers have ended with their
    /// runtime.
    pub(crate) fn abandon(&self) {
        for queue in [&self.work, &self.heartbeats] {
            queue.close();
            let tasks = queue.take_all();
            // Without the lock: an answer may submit the next operation.
            drop(tasks);
        }
    }

    /// Executes the submitted operations, and closes the connections.
    pub(crate) async fn close(&self) {
        for queue in [&self.work, &self.heartbeats] {
            queue.close();
        }
        let workers = std::mem::take(&mut *self.workers.lock().unwrap_or_else(PoisonError::into_inner));
        for worker in workers {
            let _ = worker.await;
        }
    }
}

impl Drop for Executor {
    /// Lets the tasks end after the submitted operations.
    fn drop(&mut self) {
        for queue in [&self.work, &self.heartbeats] {
            queue.close();
        }
    }
}

impl<T> OperationAnswer<T> {
    fn closed(now: Moment) -> Self {
        Self { result: Err(Error::Closed), sent_at: now, may_linger: false, is_repeated: false }
    }
}

impl QueueState {
    fn has_ready(&self) -> bool {
        !(self.urgent.is_empty() && self.ready.is_empty())
    }

    /// Returns whether a task waits for a worker.
    fn has_waiting(&self) -> bool {
        self.has_ready() || !self.delayed.is_empty()
    }

    /// Returns whether a task waits for a worker or for its answer.
    fn has_tasks(&self) -> bool {
        self.busy > 0 || self.has_waiting()
    }

    fn next_ready(&mut self) -> Option<Box<dyn Pending>> {
        self.urgent.pop_front().or_else(|| self.ready.pop_front())
    }

    /// Takes the next task: an urgent one, or in turn one that is to be sent again and a ready one.
    fn next_task(&mut self) -> Option<Box<dyn Pending>> {
        let is_due = self.delayed.first_key_value().is_some_and(|((at, _), _)| *at <= Instant::now());
        if !is_due || !self.urgent.is_empty() || (self.prefers_ready && !self.ready.is_empty()) {
            self.prefers_ready = false;
            return self.next_ready();
        }
        self.prefers_ready = true;
        self.delayed.pop_first().map(|(_, task)| task)
    }
}

impl TaskQueue {
    fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, task: Box<dyn Pending>, is_urgent: bool) {
        let mut state = self.state();
        if state.is_closed {
            drop(state);
            return self.refuse(task);
        }
        let list = if is_urgent { &mut state.urgent } else { &mut state.ready };
        list.push_back(task);
        self.wake(&state);
    }

    /// Drops a task, which answers [`Error::Closed`]. Each answer may submit another task: a loop
    /// drops these tasks, because thousands of nested drops would overflow the stack.
    fn refuse(&self, mut task: Box<dyn Pending>) {
        match &mut self.state().refused {
            Some(refused) => return refused.push_back(task),
            none => *none = Some(VecDeque::new()),
        }
        loop {
            drop(task);
            let mut state = self.state();
            let Some(next) = state.refused.as_mut().and_then(VecDeque::pop_front) else {
                state.refused = None;
                return;
            };
            task = next;
        }
    }

    /// Puts a task back, to be sent again after a pause.
    fn put_back(&self, task: Box<dyn Pending>, pause: Duration) {
        let mut state = self.state();
        let key = (Instant::now() + pause, state.next);
        state.next += 1;
        state.delayed.insert(key, task);
        self.wake(&state);
    }

    /// Puts a task back, to be sent next.
    fn put_first(&self, task: Box<dyn Pending>) {
        let mut state = self.state();
        state.ready.push_front(task);
        self.wake(&state);
    }

    /// Takes the ready tasks that can be sent together with this task, at most `most` including it.
    fn gather(&self, task: Box<dyn Pending>, most: usize) -> Gathered {
        let mut state = self.state();
        let mut batch = None;
        if most == 1 || !state.has_ready() || !task.join(&mut batch) {
            return Gathered::One(task);
        }
        let (mut tasks, mut others) = (vec![task], Vec::new());
        while tasks.len().max(others.len()) < most {
            let is_urgent = !state.urgent.is_empty();
            let Some(next) = state.next_ready() else {
                break;
            };
            if next.join(&mut batch) {
                tasks.push(next);
            } else {
                others.push((next, is_urgent));
            }
        }
        for (other, is_urgent) in others.into_iter().rev() {
            let list = if is_urgent { &mut state.urgent } else { &mut state.ready };
            list.push_front(other);
        }
        match (batch, tasks.len()) {
            (Some(batch), 2..) => Gathered::Several(batch, tasks),
            _ => Gathered::One(tasks.remove(0)),
        }
    }

    /// Wakes a worker. Wakes a worker without a connection only if all connected workers are busy.
    fn wake(&self, state: &QueueState) {
        if state.idle > 0 { self.changed.notify_one() } else { self.spare.notify_one() }
    }

    fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_waiters();
        self.spare.notify_waiters();
    }

    fn take_all(&self) -> Vec<Box<dyn Pending>> {
        let mut state = self.state();
        let delayed = std::mem::take(&mut state.delayed).into_values();
        let (urgent, ready) = (std::mem::take(&mut state.urgent), std::mem::take(&mut state.ready));
        urgent.into_iter().chain(ready).chain(delayed).collect()
    }

    /// Counts a worker with a connection as idle until the result is dropped.
    fn idle(&self) -> Idle<'_> {
        self.state().idle += 1;
        Idle(self)
    }

    /// Counts a worker as busy until the result is dropped.
    fn busy(&self) -> Busy<'_> {
        self.state().busy += 1;
        Busy(self)
    }

    /// Counts a worker as connected until the result is dropped.
    fn open(self: &Arc<Self>) -> Open {
        self.state().open += 1;
        Open(Arc::clone(self))
    }

    /// Lets the workers close idle connections, and busy ones without an answer in time.
    fn suspect_connections(&self, unanswered_for: Duration) {
        self.suspicion.send_replace(Suspicion { unanswered_for });
    }

    /// Records an answer of the database.
    fn record_answer(&self) {
        let mut state = self.state();
        (state.failure, state.answered_at) = (None, Some(Instant::now()));
    }

    /// Records why a connection was lost.
    fn record_failure(&self, reason: String) {
        self.state().failure = Some(FailureReport { at: Instant::now(), reason });
    }

    /// Records why no connection could be opened. While another connection is open, the database is
    /// available.
    fn record_connect_failure(&self, reason: String) {
        if self.state().open == 0 {
            self.record_failure(reason);
        }
    }

    /// Waits for the next task of a worker with or without a connection. `None`: the queue is
    /// closed and empty.
    async fn pop(&self, has_connection: bool) -> Option<Box<dyn Pending>> {
        loop {
            let changed = if has_connection { &self.changed } else { &self.spare }.notified();
            let mut changed = std::pin::pin!(changed);
            changed.as_mut().enable();
            let (next_due, _idle) = {
                let mut state = self.state();
                let due = state.delayed.first_key_value().map(|((at, _), _)| *at);
                if (has_connection || state.idle == 0)
                    && let Some(task) = state.next_task()
                {
                    // Another worker may be asleep while more than one task is there.
                    if state.has_waiting() {
                        self.wake(&state);
                    }
                    return Some(task);
                }
                if state.is_closed && !state.has_waiting() {
                    // A worker without a connection may have left the last task to this one.
                    self.spare.notify_waiters();
                    return None;
                }
                state.idle += usize::from(has_connection);
                (due, has_connection.then(|| Idle(self)))
            };
            match next_due {
                Some(at) => drop(tokio::time::timeout_at(at, changed).await),
                None => changed.await,
            }
        }
    }
}

/// Counts a worker that has a connection.
struct Open(Arc<TaskQueue>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.state().open -= 1;
    }
}

/// Counts a worker that has a task.
struct Busy<'q>(&'q TaskQueue);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.state().busy -= 1;
    }
}

/// Counts a worker that has a connection and waits for a task.
struct Idle<'q>(&'q TaskQueue);

impl Drop for Idle<'_> {
    fn drop(&mut self) {
        self.0.state().idle -= 1;
    }
}
