//! One connection, and the task that sends operations on it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use super::request_error::RequestError;
use super::task::{Answers, Pending, reconnecting};
use super::task_queue::{Gathered, Open, Suspicion, TaskQueue};
use crate::backend::{Backend, BoxFuture, IsWaiting, Store, StoreFuture};
use crate::backoff::{Backoff, OUTAGE_TOLERANCE};
use crate::error::{Error, Fault};
use crate::events::{Event, Publisher};
use crate::measure;
use crate::panics;
use crate::protocol::timing::{ANSWER_TIMEOUT, CONNECT_TIMEOUT};
use crate::protocol::{Batch, Notification};

/// How long an operation is repeated after conflicts with other transactions.
const CONFLICT_TOLERANCE: Duration = Duration::from_secs(10);

/// Receives the notifications of grants by other clients, from the connection for heartbeats.
pub(super) struct NotificationSink {
    pub(super) on_grant: Box<dyn Fn(Notification) + Send + Sync>,
    pub(super) is_waiting: IsWaiting,
}

/// One connection and its task.
pub(super) struct Worker {
    backend: Arc<dyn Backend>,
    queue: Arc<TaskQueue>,
    publisher: Arc<Publisher>,
    connection: Option<Connection>,
    /// Whether the last connection was lost.
    has_lost: bool,
    sink: Option<NotificationSink>,
    /// The connection no longer receives notifications. The next heartbeat on the connection fails.
    is_listener_lost: bool,
    /// Changes when the connection may be dead or lead to a former primary. Seen when the next
    /// connection is opened.
    suspicion: watch::Receiver<Suspicion>,
    /// How long the answer to a heartbeat may take; the value may change while it is in flight.
    heartbeat_timeout: Option<watch::Receiver<Duration>>,
    /// The queue of the workers whose connections become suspect when the heartbeat connection is
    /// lost.
    suspects: Option<Arc<TaskQueue>>,
    /// A connection that is opened before a heartbeat is due, and when that began.
    opening: Option<(Instant, Opening)>,
    /// Whether a connection may be opened ahead: once for each that was opened. After a failure, the
    /// next heartbeat tries again.
    opens_ahead: bool,
    /// Grows while no connection can be opened.
    backoff: Backoff,
    /// The least time limit for opening a connection. It doubles after each attempt that reached
    /// its limit.
    connect_timeout: Duration,
}

/// Opens a connection. Returns it with the suspicions that it is free of.
type Opening = BoxFuture<'static, Result<(Result<Box<dyn Store>, sqlx::Error>, watch::Receiver<Suspicion>), String>>;

/// An open connection.
struct Connection {
    store: Box<dyn Store>,
    _open: Open,
}

impl Worker {
    /// Creates a worker for all operations but heartbeats.
    pub(super) fn new(backend: Arc<dyn Backend>, queue: Arc<TaskQueue>, publisher: Arc<Publisher>) -> Self {
        let suspicion = queue.suspicion.subscribe();
        Self {
            backend,
            queue,
            publisher,
            connection: None,
            has_lost: false,
            sink: None,
            is_listener_lost: false,
            suspicion,
            heartbeat_timeout: None,
            suspects: None,
            opening: None,
            opens_ahead: true,
            backoff: reconnecting(),
            connect_timeout: Duration::ZERO,
        }
    }

    /// Makes this the worker for heartbeats, which have `heartbeat_timeout` for an answer. It
    /// receives the notifications of grants by other clients. When it loses its connection, the
    /// connections of the workers of `suspects` become suspect.
    pub(super) fn for_heartbeats(
        self,
        sink: NotificationSink,
        heartbeat_timeout: watch::Receiver<Duration>,
        suspects: &Arc<TaskQueue>,
    ) -> Self {
        Self {
            sink: Some(sink),
            heartbeat_timeout: Some(heartbeat_timeout),
            suspects: Some(Arc::clone(suspects)),
            ..self
        }
    }

    /// Returns the next task. Meanwhile passes notifications on, gives up a suspect connection, and
    /// opens a connection for heartbeats where that takes long.
    async fn next(&mut self) -> Option<Box<dyn Pending>> {
        loop {
            let has_connection = self.connection.is_some();
            let notified = async {
                match (&mut self.connection, &self.sink) {
                    (Some(connection), Some(_)) if !self.is_listener_lost => connection.store.notified().await,
                    _ => std::future::pending().await,
                }
            };
            tokio::select! {
                task = self.queue.pop(has_connection) => return task,
                notified = notified => match (notified, &self.sink) {
                    (Ok(notification), Some(sink)) => drop(panics::caught(|| (sink.on_grant)(notification))),
                    _ => self.is_listener_lost = true,
                },
                _ = suspected(&mut self.suspicion), if has_connection => self.connection = None,
                () = wanted_ahead(self.suspects.as_deref()), if self.opens_ahead && !has_connection => {
                    self.opens_ahead = false;
                    if !self.backend.is_local() {
                        self.opening = Some((Instant::now(), self.connecting()));
                    }
                }
                opened = opened(self.opening.as_mut()) => {
                    if let Some((since, _)) = self.opening.take() && let Some(opened) = opened {
                        let _ = self.on_opened(since, opened);
                    }
                }
            }
        }
    }

    pub(super) async fn run(mut self) {
        let queue = Arc::clone(&self.queue);
        while let Some(task) = self.next().await {
            let _busy = queue.count_busy();
            let most = if self.connection.is_some() { self.backend.max_batch_len() } else { 1 };
            let gathered = self.queue.gather(task, most);
            // A task may follow from the answer of a new primary. A suspect connection may lead to
            // the former one.
            if self.is_suspect() {
                self.connection = None;
            }
            match gathered {
                Gathered::One(task) => self.run_one(task).await,
                Gathered::Several(batch, tasks) => self.run_batch(batch, tasks).await,
            }
        }
        if let Some(connection) = self.connection.take() {
            let _ = timeout(CONNECT_TIMEOUT, connection.store.close()).await;
        }
    }

    async fn run_one(&mut self, mut task: Box<dyn Pending>) {
        match self.attempt(&mut *task).await {
            Ok(()) => {
                self.queue.record_answer();
                // A task submitted by an answer is sent next on this connection.
                let _idle = self.queue.count_idle();
                task.finish(None, &mut Answers::default());
            }
            Err(failure) => self.on_failed(task, failure).await,
        }
    }

    /// Sends tasks together. A task without a response from the batch is sent alone.
    async fn run_batch(&mut self, batch: Batch, mut tasks: Vec<Box<dyn Pending>>) {
        let Some(connection) = &mut self.connection else {
            return tasks.into_iter().rev().for_each(|task| self.queue.put_first(task));
        };
        measure::count_statement(tasks[0].attempted(), tasks.len());
        let sent_at = self.backend.clock().now();
        tasks.iter_mut().for_each(|task| task.attempts().sent_at = sent_at);
        let within = tasks.iter_mut().map(|task| task.attempts().answer_timeout).min().unwrap_or_default();
        let (answers, failure) =
            match answered(within, self.suspicion.clone(), None, connection.store.execute_batch(&batch)).await {
                Ok(answers) => {
                    self.queue.record_answer();
                    (answers, None)
                }
                Err(failure) => (Vec::new(), Some(failure)),
            };
        if let Some(failure) = &failure {
            self.suspect_others(failure);
            self.drop_broken(failure);
        }
        let answers = answers.into_iter().chain(std::iter::repeat(None));
        let (mut done, mut alone) = (Vec::with_capacity(tasks.len()), Vec::new());
        for (mut task, answer) in tasks.into_iter().zip(answers) {
            if let Some(response) = answer {
                task.set_response(response);
                done.push(task);
                continue;
            }
            let attempts = task.attempts();
            attempts.is_sent_alone = true;
            attempts.is_repeated |= failure.is_some();
            attempts.may_linger |= failure.as_ref().is_some_and(RequestError::may_linger);
            alone.push(task);
        }
        alone.into_iter().rev().for_each(|task| self.queue.put_first(task));
        // The database works on the next batch while the callers of this one are answered.
        tokio::spawn(async {
            let mut answers = Answers::default();
            done.into_iter().for_each(|task| task.finish(None, &mut answers));
        });
    }

    /// Sends an operation once.
    async fn attempt(&mut self, task: &mut dyn Pending) -> Result<(), RequestError> {
        if self.connection.is_none() {
            let within = self.answer_timeout(task).max(self.connect_timeout);
            self.open(CONNECT_TIMEOUT.min(within)).await?;
        }
        let left = self.wait_until_ready(self.answer_timeout(task)).await?;
        let within = self.answer_timeout(task).min(left);
        let Some(connection) = &mut self.connection else {
            return Err(RequestError::Unconnected(None));
        };
        measure::count_statement(task.attempted(), 1);
        task.attempts().sent_at = self.backend.clock().now();
        let (suspicion, heartbeat_timeout) = (self.suspicion.clone(), self.heartbeat_timeout.as_mut());
        answered(within, suspicion, heartbeat_timeout, task.send(&mut *connection.store)).await
    }

    /// Waits until the connection can carry out an operation whose answer may take this time. Returns
    /// the time that is left for the answer.
    ///
    /// A third of the shortest TTL does not suffice for the replacement of a connection on a slow
    /// network. Half of it does, and two thirds for both.
    async fn wait_until_ready(&mut self, limit: Duration) -> Result<Duration, RequestError> {
        let since = Instant::now();
        // Only the connection for heartbeats is replaced.
        if let (Some(connection), Some(heartbeat_timeout)) = (&mut self.connection, &mut self.heartbeat_timeout) {
            let (suspicion, ready) = (self.suspicion.clone(), connection.store.wait_until_ready());
            answered(limit + limit / 2, suspicion, Some(heartbeat_timeout), ready).await?;
        }
        Ok((2 * limit).saturating_sub(since.elapsed()))
    }

    /// Opens a connection within this time, unless one is being opened already.
    async fn open(&mut self, within: Duration) -> Result<(), RequestError> {
        let (since, opening) = self.opening.take().unwrap_or_else(|| (Instant::now(), self.connecting()));
        let Ok(opened) = timeout(within, opening).await else {
            self.connect_timeout = within * 2;
            return Err(RequestError::Unconnected(None));
        };
        self.on_opened(since, opened)
    }

    fn connecting(&self) -> Opening {
        let (backend, mut suspicion) = (Arc::clone(&self.backend), self.suspicion.clone());
        let is_waiting = self.sink.as_ref().map(|sink| sink.is_waiting.clone());
        Box::pin(panics::caught_in(async move {
            loop {
                suspicion.mark_unchanged();
                let connected = match &is_waiting {
                    Some(is_waiting) => backend.connect_for_heartbeats(is_waiting.clone()).await,
                    None => backend.connect().await,
                };
                // A suspicion in the meantime concerns the new connection as well.
                if connected.is_err() || !suspicion.has_changed().unwrap_or(false) {
                    return (connected, suspicion);
                }
            }
        }))
    }

    fn on_opened(&mut self, since: Instant, opened: <Opening as Future>::Output) -> Result<(), RequestError> {
        let (connected, suspicion) = opened.map_err(RequestError::Panic)?;
        let store = connected.map_err(|error| RequestError::Unconnected(Some(error)))?;
        (self.suspicion, self.opens_ahead) = (suspicion, true);
        (self.backoff, self.connect_timeout) = (reconnecting(), Duration::ZERO);
        self.queue.record_opening(since.elapsed());
        self.connection = Some(Connection { store, _open: self.queue.count_open() });
        self.is_listener_lost = false;
        if std::mem::take(&mut self.has_lost) {
            if let Some(suspects) = &self.suspects {
                // A connection that was opened in the meantime may lead to another server.
                self.suspect(suspects, ANSWER_TIMEOUT);
            }
            self.publisher.publish(&Event::Reconnected);
            // A subscriber of the application that panics does not end the worker.
            let _ = panics::caught(|| tracing::info!("reconnected to the database"));
        }
        Ok(())
    }

    /// Returns how long the answer to an operation may take. A heartbeat that is sent again has the
    /// current limit.
    fn answer_timeout(&self, task: &mut dyn Pending) -> Duration {
        let within = task.attempts().answer_timeout;
        self.heartbeat_timeout.as_ref().map_or(within, |limit| within.min(*limit.borrow()))
    }

    /// Returns whether the connection may be dead or lead to a former primary.
    fn is_suspect(&self) -> bool {
        self.suspicion.has_changed().unwrap_or(false)
    }

    /// Makes the other connections of the queue suspect if this connection was silent: the next
    /// attempt would wait as long for another silent connection.
    fn suspect_others(&self, failure: &RequestError) {
        if matches!(failure, RequestError::NoAnswer { .. }) {
            self.suspect(&self.queue, ANSWER_TIMEOUT);
        }
    }

    /// Makes the connections of a queue suspect. Connections to a file are exempt, because a locked
    /// file answers late.
    fn suspect(&self, queue: &TaskQueue, unanswered_for: Duration) {
        if !self.backend.is_local() {
            queue.suspect_connections(unanswered_for);
        }
    }

    /// Gives up the connection if the failure shows that it is broken.
    fn drop_broken(&mut self, failure: &RequestError) {
        if failure.fault() == Fault::ConnectionLost || matches!(failure, RequestError::Panic(_)) {
            // An orderly close would wait for the missing answer.
            self.has_lost |= self.connection.take().is_some();
            match failure {
                RequestError::Unconnected(_) => self.queue.record_connect_failure(failure.reason()),
                _ => self.queue.record_failure(failure.reason()),
            }
        }
    }

    /// Puts an operation back to be sent again, or ends it.
    async fn on_failed(&mut self, mut task: Box<dyn Pending>, failure: RequestError) {
        let fault = failure.fault();
        let had_connection = !matches!(failure, RequestError::Unconnected(_));
        let attempts = task.attempts();
        let answer_timeout = attempts.answer_timeout;
        if let Some(suspects) = self.suspects.as_ref().filter(|_| had_connection && fault == Fault::ConnectionLost) {
            self.suspect(suspects, answer_timeout);
        }
        self.suspect_others(&failure);
        attempts.may_linger |= failure.may_linger();
        attempts.is_repeated |= had_connection;
        self.drop_broken(&failure);
        let tolerance = match fault {
            Fault::RolledBack | Fault::Blocked => CONFLICT_TOLERANCE,
            Fault::ConnectionLost | Fault::Exhausted => OUTAGE_TOLERANCE,
            _ => Duration::ZERO,
        };
        // A lost connection says nothing about the next one, which is always tried.
        let tries_another = fault == Fault::ConnectionLost && had_connection && !attempts.has_reconnected;
        attempts.has_reconnected |= tries_another;
        let is_over = attempts.since.elapsed() >= tolerance && !tries_another;
        let pause = if tries_another { Duration::ZERO } else { attempts.backoff.step() };
        let (attempted, reason) = (task.attempted(), failure.reason());
        if is_over {
            task.finish(Some(failure.into_error(attempted)), &mut Answers::default());
        } else {
            self.queue.put_back(task, pause);
            // A subscriber of the application that panics does not end the worker.
            let _ = panics::caught(|| tracing::debug!(attempted, reason, "trying again"));
        }
        // A worker without a connection serves no task. Another worker may have a connection.
        if !had_connection {
            if fault == Fault::ConnectionLost {
                self.fail_overdue(&reason);
            }
            sleep(self.backoff.step()).await;
        }
    }

    /// Ends the tasks that have waited for longer than an outage is tolerated: each would wait for a
    /// failed attempt of its own.
    fn fail_overdue(&self, reason: &str) {
        let mut answers = Answers::default();
        for task in self.queue.take_overdue(OUTAGE_TOLERANCE) {
            let attempted = task.attempted();
            task.finish(Some(Error::Unavailable { attempted, reason: reason.into(), source: None }), &mut answers);
        }
    }
}

/// Waits for the answer of a connection for this time; on a suspect connection, for the time that
/// the lost heartbeat had; in any case no longer than the current `heartbeat_timeout`.
async fn answered<T>(
    within: Duration,
    mut suspicion: watch::Receiver<Suspicion>,
    heartbeat_timeout: Option<&mut watch::Receiver<Duration>>,
    job: StoreFuture<'_, T>,
) -> Result<T, RequestError> {
    let sent_at = Instant::now();
    let overdue = async {
        let (mut within, mut heartbeat_timeout) = (within, heartbeat_timeout);
        loop {
            tokio::select! {
                () = sleep_until(sent_at + within) => return within,
                limit = suspected(&mut suspicion) => within = within.min(limit),
                limit = changed(&mut heartbeat_timeout) => within = within.min(limit),
            }
        }
    };
    let answer = tokio::select! {
        biased;
        answer = panics::caught_in(job) => answer,
        within = overdue => return Err(RequestError::NoAnswer { within }),
    };
    match answer {
        Ok(answer) => answer.map_err(RequestError::Refused),
        Err(panic) => Err(RequestError::Panic(panic)),
    }
}

/// Waits until a connection for heartbeats is wanted before one is due: other connections take long
/// to be opened.
async fn wanted_ahead(work: Option<&TaskQueue>) {
    match work {
        Some(work) => work.wanted_ahead.notified().await,
        None => std::future::pending().await,
    }
}

/// Waits for a connection that is being opened. `None`: it takes too long.
async fn opened(opening: Option<&mut (Instant, Opening)>) -> Option<<Opening as Future>::Output> {
    match opening {
        Some((since, opening)) => timeout_at(*since + CONNECT_TIMEOUT, opening).await.ok(),
        None => std::future::pending().await,
    }
}

/// Waits until the connection is suspect. Returns the time that the lost connection had for an
/// answer.
async fn suspected(suspicion: &mut watch::Receiver<Suspicion>) -> Duration {
    match suspicion.changed().await {
        Ok(()) => suspicion.borrow_and_update().unanswered_for,
        Err(_) => std::future::pending().await,
    }
}

/// Waits until the time for an answer changes, and returns it.
async fn changed(heartbeat_timeout: &mut Option<&mut watch::Receiver<Duration>>) -> Duration {
    if let Some(heartbeat_timeout) = heartbeat_timeout
        && heartbeat_timeout.changed().await.is_ok()
    {
        return *heartbeat_timeout.borrow_and_update();
    }
    std::future::pending().await
}
