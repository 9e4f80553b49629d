//! Sends operations to the database on a bounded number of connections: one for heartbeats, and one
//! or two for everything else.
//!
//! A connection is opened when all open ones are busy.
//!
//! An operation runs to its end even if the future of its caller is dropped. It is sent again when
//! its connection is lost, or when the database rolled it back because of a conflict, ended its
//! wait for a lock, or had no capacity for it; during the pause before that, its connection serves
//! other operations. A panic ends the operation and its connection.
//!
//! When the heartbeat's connection is lost, or any other one is silent for too long, the others are
//! suspect, because they use the same network and may lead to a server that is no longer the
//! primary. They send no more requests: idle ones are closed at once, and busy ones after their
//! answers, or when these take longer than the heartbeat's was allowed to.
//!
//! Operations that are ready together may be sent in one batch. Operations that the batch
//! leaves undone are sent alone.
//!
//! The queue is unbounded: a caller submits one operation at a time, and the engine one change per
//! name and one look for each of its holdings.

mod request_error;
mod task;
mod task_queue;
#[cfg(all(test, feature = "testing"))]
#[allow(clippy::expect_used, reason = "tests")]
mod tests;
mod worker;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use crate::backend::Backend;
use crate::clock::{Clock, Moment};
use crate::error::{Error, Result};
use crate::events::Publisher;
use crate::operation::Operation;
use crate::protocol::timing::ANSWER_TIMEOUT;
use crate::protocol::{Notification, Request, RequestId, Response};
use task::Task;
use task_queue::{FailureReport, TaskQueue};
use worker::{NotificationSink, Worker};

/// The answer to an operation.
pub(crate) struct OperationAnswer<T> {
    pub(crate) result: Result<T>,
    /// A moment before the answered request was sent.
    pub(crate) sent_at: Moment,
    /// Whether an unanswered request may take effect later.
    pub(crate) may_linger: bool,
    /// Whether an earlier attempt was sent and failed: it may have taken effect. (An attempt to
    /// connect does not count.) After a rollback in its last statement, the effect of its earlier
    /// statements is unknown.
    pub(crate) is_repeated: bool,
}

/// Receives the answers to the requests of an engine.
pub(crate) trait Receiver: Send + Sync {
    /// Receives some answers, which came together.
    fn receive(self: Arc<Self>, answers: Vec<(RequestId, OperationAnswer<Response>)>);
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

impl Executor {
    /// Creates an executor, which opens connections when they are first needed: `connections` of
    /// them in addition to the one for heartbeats. `publisher` receives an event for each
    /// reconnection.
    pub(crate) fn new(backend: Arc<dyn Backend>, connections: usize, publisher: Arc<Publisher>) -> Self {
        let (work, heartbeats, workers) = (Arc::default(), Arc::default(), Mutex::default());
        let (is_waiting, heartbeat_timeout) = (watch::Sender::new(false), watch::Sender::new(ANSWER_TIMEOUT));
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
        self.work.push(Box::new(Task::new(operation, ANSWER_TIMEOUT, self.clock(), reply)));
    }

    /// Sends a request and passes its answer to `receiver`, together with other answers of its
    /// batch.
    pub(crate) fn submit_request(&self, body: Arc<Request>, request: RequestId, receiver: Arc<dyn Receiver>) {
        self.work.push(Box::new(Task::of_engine(body, request, ANSWER_TIMEOUT, self.clock(), receiver)));
        self.work.record_request();
    }

    /// Sends an operation before all others, also when it is repeated, and passes its answer to
    /// `reply`. An operation without an answer in time is sent again on another connection.
    pub(crate) fn submit_urgent<O: Operation>(
        &self,
        operation: O,
        answer_timeout: Duration,
        reply: impl FnOnce(OperationAnswer<O::Output>) + Send + 'static,
    ) {
        // A locked file answers late, and its connection does not break: the longer limit applies.
        let within = if self.backend.is_local() { ANSWER_TIMEOUT } else { answer_timeout };
        self.work.push(Box::new(Task::new(operation, within, self.clock(), reply).urgent()));
    }

    /// Sends a heartbeat and passes its answer to `reply`. Without an answer in time, its
    /// connection is closed.
    pub(crate) fn submit_heartbeat<O: Operation>(
        &self,
        operation: O,
        answer_timeout: Duration,
        reply: impl FnOnce(OperationAnswer<O::Output>) + Send + 'static,
    ) {
        self.heartbeats.push(Box::new(Task::new(operation, answer_timeout, self.clock(), reply)));
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

    /// Returns the result of [`failure`](Self::failure), or else why the connection for heartbeats
    /// could not be opened or was lost, unless anything was answered since.
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
            let tasks = queue.abandon();
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
