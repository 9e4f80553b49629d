//! The operations that wait for a connection, and the counts of their workers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::task::Pending;
use crate::protocol::Batch;

/// The next work of a worker.
pub(super) enum Gathered {
    One(Box<dyn Pending>),
    Several(Batch, Vec<Box<dyn Pending>>),
}

/// A connection that takes longer to be opened is opened before the first heartbeat is due: a lease
/// lasts for one second at least.
const SLOW_OPENING: Duration = Duration::from_millis(200);

/// The operations that wait for a connection.
#[derive(Default)]
pub(super) struct TaskQueue {
    state: Mutex<QueueState>,
    /// Wakes workers that have a connection.
    changed: Notify,
    /// Wakes workers without a connection.
    spare: Notify,
    /// Changes when the workers' connections may be dead or lead to a former primary.
    pub(super) suspicion: watch::Sender<Suspicion>,
    /// Whether requests about leases have been submitted.
    has_requests: AtomicBool,
    /// Whether the last connection took long to be opened.
    is_slow: AtomicBool,
    /// Wakes the worker for heartbeats: a connection that is opened when the first heartbeat is due
    /// would be late.
    pub(super) wanted_ahead: Notify,
}

/// The suspicion that connections are dead or lead to a former primary, after another connection of
/// the client was lost.
#[derive(Clone, Copy, Default)]
pub(super) struct Suspicion {
    /// How long the dead connection was without an answer.
    pub(super) unanswered_for: Duration,
}

#[derive(Default)]
pub(super) struct QueueState {
    /// Tasks that are sent before all others.
    urgent: TaskList,
    others: TaskList,
    /// The number of workers with a connection and without a task.
    idle: usize,
    /// The number of workers with a connection.
    pub(super) open: usize,
    /// The number of workers with a task.
    busy: usize,
    is_closed: bool,
    /// Whether the workers have ended with their runtime.
    is_abandoned: bool,
    /// Tasks submitted after the close, while another task is being dropped.
    refused: Option<VecDeque<Box<dyn Pending>>>,
    /// Why a connection could not be opened or was lost, unless the database has answered since.
    pub(super) failure: Option<FailureReport>,
    /// When the database last answered.
    pub(super) answered_at: Option<Instant>,
}

/// The tasks of one urgency.
#[derive(Default)]
struct TaskList {
    ready: VecDeque<Box<dyn Pending>>,
    /// Tasks that are sent again at these moments.
    delayed: BTreeMap<(Instant, u64), Box<dyn Pending>>,
    next: u64,
    /// Whether the next task is a ready one, although another is to be sent again.
    prefers_ready: bool,
}

impl TaskList {
    fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.delayed.is_empty()
    }

    /// Returns when the first task is to be sent again.
    fn next_due(&self) -> Option<Instant> {
        self.delayed.first_key_value().map(|((at, _), _)| *at)
    }

    /// Takes the next task: in turn one that is to be sent again and a ready one.
    fn take_next(&mut self) -> Option<Box<dyn Pending>> {
        let is_due = self.next_due().is_some_and(|at| at <= Instant::now());
        self.prefers_ready = is_due && (!self.prefers_ready || self.ready.is_empty());
        if self.prefers_ready { self.delayed.pop_first().map(|(_, task)| task) } else { self.ready.pop_front() }
    }

    fn delay(&mut self, task: Box<dyn Pending>, pause: Duration) {
        self.delayed.insert((Instant::now() + pause, self.next), task);
        self.next += 1;
    }

    fn take_all(&mut self) -> impl Iterator<Item = Box<dyn Pending>> {
        std::mem::take(&mut self.ready).into_iter().chain(std::mem::take(&mut self.delayed).into_values())
    }

    /// Takes the tasks that have waited for longer than this.
    fn take_overdue(&mut self, tolerance: Duration) -> Vec<Box<dyn Pending>> {
        let is_overdue = |task: &mut Box<dyn Pending>| task.attempts().since.elapsed() >= tolerance;
        let mut ready = Vec::from(std::mem::take(&mut self.ready));
        let mut overdue: Vec<_> = ready.extract_if(.., |task| is_overdue(task)).collect();
        self.ready = ready.into();
        overdue.extend(self.delayed.extract_if(.., |_, task| is_overdue(task)).map(|(_, task)| task));
        overdue
    }
}

/// When and why a connection could not be opened or was lost.
pub(super) struct FailureReport {
    pub(super) at: Instant,
    pub(super) reason: String,
}

impl QueueState {
    fn has_ready(&self) -> bool {
        !(self.urgent.ready.is_empty() && self.others.ready.is_empty())
    }

    /// Returns whether a task waits for a worker.
    fn has_waiting(&self) -> bool {
        !(self.urgent.is_empty() && self.others.is_empty())
    }

    /// Returns whether a task waits for a worker or for its answer.
    pub(super) fn has_tasks(&self) -> bool {
        self.busy > 0 || self.has_waiting()
    }

    fn take_ready(&mut self) -> Option<Box<dyn Pending>> {
        self.urgent.ready.pop_front().or_else(|| self.others.ready.pop_front())
    }

    fn take_next(&mut self) -> Option<Box<dyn Pending>> {
        self.urgent.take_next().or_else(|| self.others.take_next())
    }

    /// Returns when the first task is to be sent again.
    fn next_due(&self) -> Option<Instant> {
        self.urgent.next_due().into_iter().chain(self.others.next_due()).min()
    }

    fn list_of(&mut self, task: &mut Box<dyn Pending>) -> &mut TaskList {
        if task.attempts().is_urgent { &mut self.urgent } else { &mut self.others }
    }
}

impl TaskQueue {
    pub(super) fn state(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, task: Box<dyn Pending>) {
        self.insert(task, |state| state.is_closed, |list, task| list.ready.push_back(task));
    }

    /// Adds a task and wakes a worker, or refuses the task.
    fn insert(
        &self,
        mut task: Box<dyn Pending>,
        is_refused: fn(&QueueState) -> bool,
        add: impl FnOnce(&mut TaskList, Box<dyn Pending>),
    ) {
        let mut state = self.state();
        if is_refused(&state) {
            drop(state);
            return self.refuse(task);
        }
        add(state.list_of(&mut task), task);
        self.wake(&state);
    }

    /// Drops a task, which answers [`Error::Closed`](crate::Error::Closed). Each answer may submit
    /// another task: a loop drops these tasks, because thousands of nested drops would overflow the
    /// stack.
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
    pub(super) fn put_back(&self, task: Box<dyn Pending>, pause: Duration) {
        self.insert(task, |state| state.is_abandoned, |list, task| list.delay(task, pause));
    }

    /// Puts a task back, to be sent next.
    pub(super) fn put_first(&self, task: Box<dyn Pending>) {
        self.insert(task, |state| state.is_abandoned, |list, task| list.ready.push_front(task));
    }

    /// Takes the ready tasks that can be sent together with this task, at most `most` including it.
    pub(super) fn gather(&self, task: Box<dyn Pending>, most: usize) -> Gathered {
        let mut state = self.state();
        let mut batch = None;
        if most == 1 || !state.has_ready() || !task.join(&mut batch) {
            return Gathered::One(task);
        }
        let (mut tasks, mut others) = (vec![task], Vec::new());
        while tasks.len().max(others.len()) < most {
            let Some(next) = state.take_ready() else {
                break;
            };
            if next.join(&mut batch) {
                tasks.push(next);
            } else {
                others.push(next);
            }
        }
        for mut other in others.into_iter().rev() {
            state.list_of(&mut other).ready.push_front(other);
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

    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_waiters();
        self.spare.notify_waiters();
    }

    /// Closes the queue, whose workers have ended, and returns its tasks.
    pub(super) fn abandon(&self) -> Vec<Box<dyn Pending>> {
        self.close();
        let mut state = self.state();
        state.is_abandoned = true;
        let QueueState { urgent, others, .. } = &mut *state;
        urgent.take_all().chain(others.take_all()).collect()
    }

    /// Returns the tasks that have waited for longer than this, if no worker has a connection, and
    /// the database has not answered for as long.
    pub(super) fn take_overdue(&self, tolerance: Duration) -> Vec<Box<dyn Pending>> {
        let mut state = self.state();
        let is_out = state.open == 0 && state.answered_at.is_none_or(|at| at.elapsed() >= tolerance);
        if !is_out {
            return Vec::new();
        }
        let mut overdue = state.urgent.take_overdue(tolerance);
        overdue.extend(state.others.take_overdue(tolerance));
        overdue
    }

    /// Counts a worker with a connection as idle until the result is dropped.
    pub(super) fn count_idle(&self) -> Idle<'_> {
        self.state().idle += 1;
        Idle(self)
    }

    /// Counts a worker as busy until the result is dropped.
    pub(super) fn count_busy(&self) -> Busy<'_> {
        self.state().busy += 1;
        Busy(self)
    }

    /// Counts a worker as connected until the result is dropped.
    pub(super) fn count_open(self: &Arc<Self>) -> Open {
        self.state().open += 1;
        Open(Arc::clone(self))
    }

    /// Lets the workers close their connections: idle ones at once, busy ones after their answers,
    /// for which they wait no longer than this.
    pub(super) fn suspect_connections(&self, unanswered_for: Duration) {
        self.suspicion.send_replace(Suspicion { unanswered_for });
    }

    /// Records a request about leases, which are followed by heartbeats.
    pub(super) fn record_request(&self) {
        self.has_requests.store(true, Ordering::SeqCst);
        self.want_ahead();
    }

    /// Records that a connection was opened, in this time.
    pub(super) fn record_opening(&self, opened_in: Duration) {
        self.record_answer();
        self.is_slow.store(opened_in > SLOW_OPENING, Ordering::SeqCst);
        self.want_ahead();
    }

    fn want_ahead(&self) {
        if self.is_slow.load(Ordering::SeqCst) && self.has_requests.load(Ordering::SeqCst) {
            self.wanted_ahead.notify_one();
        }
    }

    /// Records an answer of the database.
    pub(super) fn record_answer(&self) {
        let mut state = self.state();
        (state.failure, state.answered_at) = (None, Some(Instant::now()));
    }

    /// Records why a connection was lost.
    pub(super) fn record_failure(&self, reason: String) {
        self.state().failure = Some(FailureReport { at: Instant::now(), reason });
    }

    /// Records why no connection could be opened. While another connection is open, the database is
    /// available.
    pub(super) fn record_connect_failure(&self, reason: String) {
        if self.state().open == 0 {
            self.record_failure(reason);
        }
    }

    /// Waits for the next task of a worker with or without a connection. `None`: the queue is
    /// closed and empty.
    pub(super) async fn pop(&self, has_connection: bool) -> Option<Box<dyn Pending>> {
        loop {
            let changed = if has_connection { &self.changed } else { &self.spare }.notified();
            let mut changed = std::pin::pin!(changed);
            changed.as_mut().enable();
            let (next_due, _idle) = {
                let mut state = self.state();
                let due = state.next_due();
                if (has_connection || state.idle == 0)
                    && let Some(task) = state.take_next()
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
pub(super) struct Open(Arc<TaskQueue>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.state().open -= 1;
    }
}

/// Counts a worker that has a task.
pub(super) struct Busy<'q>(&'q TaskQueue);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.state().busy -= 1;
    }
}

/// Counts a worker that has a connection and waits for a task.
pub(super) struct Idle<'q>(&'q TaskQueue);

impl Drop for Idle<'_> {
    fn drop(&mut self) {
        self.0.state().idle -= 1;
    }
}
