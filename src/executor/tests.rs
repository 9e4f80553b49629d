//! The connections of an executor when another server becomes the primary. Servers in memory.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use super::task::{Answers, Pending};
use super::*;
use crate::backend::memory::connection::MemoryBackend;
use crate::backend::memory::server::MemoryServer;
use crate::backend::{BoxFuture, IsWaiting, ListedHolder, Names, SessionHolder, SessionLocks, Store, StoreFuture};
use crate::name::LockName;
use crate::operation::{Connect, ListHolders};

/// A name that only the first server lists.
const NAME: &str = "a";

/// Two servers, of which connections are opened to the primary. The former primary keeps its
/// connections, and answers reads.
struct Servers {
    servers: [MemoryBackend; 2],
    primary: AtomicUsize,
    /// Notified when a connection is about to be opened.
    opens: Notify,
    /// Has a permit while connections for work can be opened.
    work: Semaphore,
    /// Has a permit while connections for heartbeats can be opened.
    heartbeats: Semaphore,
}

impl Servers {
    fn new() -> Arc<Self> {
        let servers = [MemoryServer::new(), MemoryServer::new()];
        assert!(servers[0].refuse(&LockName::new(NAME).expect("a name")), "it is free");
        Arc::new(Self {
            servers: servers.map(MemoryBackend),
            primary: AtomicUsize::new(0),
            opens: Notify::new(),
            work: Semaphore::new(1),
            heartbeats: Semaphore::new(1),
        })
    }

    fn primary(&self) -> &MemoryBackend {
        &self.servers[self.primary.load(Ordering::SeqCst)]
    }

    /// Makes the second server the primary.
    fn switch_over(&self) {
        self.primary.store(1, Ordering::SeqCst);
    }
}

impl Backend for Servers {
    /// Chooses the server before the wait for a permit.
    fn connect(&self) -> StoreFuture<'_, Box<dyn Store>> {
        Box::pin(async move {
            let chosen = self.primary();
            self.opens.notify_one();
            drop(self.work.acquire().await.expect("it stays open"));
            chosen.connect().await
        })
    }

    /// Chooses the server after the wait for a permit.
    fn connect_for_heartbeats(&self, _: IsWaiting) -> StoreFuture<'_, Box<dyn Store>> {
        Box::pin(async move {
            self.opens.notify_one();
            drop(self.heartbeats.acquire().await.expect("it stays open"));
            self.primary().connect().await
        })
    }

    fn clock(&self) -> Clock {
        self.servers[0].clock()
    }

    fn max_connections_used(&self) -> usize {
        self.servers[0].max_connections_used()
    }

    fn max_batch_len(&self) -> usize {
        self.servers[0].max_batch_len()
    }

    fn address(&self) -> String {
        self.servers[0].address()
    }

    fn migrate(&self) -> BoxFuture<'_, Result<()>> {
        self.servers[0].migrate()
    }

    fn open_session_locks(&self) -> BoxFuture<'_, Result<Box<dyn SessionLocks>>> {
        self.servers[0].open_session_locks()
    }

    fn session_holders<'a>(&'a self, name: &'a LockName) -> BoxFuture<'a, Result<Vec<SessionHolder>>> {
        self.servers[0].session_holders(name)
    }
}

/// Loses its first connection, as a heartbeat does on a server that has become read-only.
#[derive(Default)]
struct LoseConnection(AtomicBool);

impl Operation for LoseConnection {
    type Output = ();

    fn attempted(&self) -> &'static str {
        "send a heartbeat"
    }

    fn run<'a>(&'a self, _: &'a mut dyn Store) -> StoreFuture<'a, ()> {
        Box::pin(async {
            if self.0.swap(true, Ordering::SeqCst) {
                return Ok(());
            }
            Err(sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into()))
        })
    }
}

/// Is answered when it is sent for the third time.
#[derive(Clone, Default)]
struct SilentTwice {
    sent: Arc<Notify>,
    count: Arc<AtomicUsize>,
}

impl Operation for SilentTwice {
    type Output = ();

    fn attempted(&self) -> &'static str {
        "send a heartbeat"
    }

    fn run<'a>(&'a self, _: &'a mut dyn Store) -> StoreFuture<'a, ()> {
        Box::pin(async {
            self.sent.notify_one();
            if self.count.fetch_add(1, Ordering::SeqCst) < 2 {
                std::future::pending::<()>().await;
            }
            Ok(())
        })
    }
}

/// Is answered when the test allows it.
#[derive(Clone, Default)]
struct Slow {
    sent: Arc<Notify>,
    allowed: Arc<Notify>,
}

impl Operation for Slow {
    type Output = ();

    fn attempted(&self) -> &'static str {
        "wait"
    }

    fn run<'a>(&'a self, _: &'a mut dyn Store) -> StoreFuture<'a, ()> {
        Box::pin(async {
            self.sent.notify_one();
            self.allowed.notified().await;
            Ok(())
        })
    }
}

/// Starts an executor with one connection for work.
fn start(servers: &Arc<Servers>) -> Executor {
    let executor = Executor::new(Arc::<Servers>::clone(servers), 1, Arc::default());
    executor.start(|_| {});
    executor
}

fn submit<O: Operation>(executor: &Executor, operation: O) -> oneshot::Receiver<Result<O::Output>> {
    let (reply, answer) = oneshot::channel();
    executor.submit(operation, |answer| drop(reply.send(answer.result)));
    answer
}

fn submit_heartbeat<O: Operation>(executor: &Executor, operation: O) -> oneshot::Receiver<Result<O::Output>> {
    let (reply, answer) = oneshot::channel();
    executor.submit_heartbeat(operation, ANSWER_TIMEOUT, |answer| drop(reply.send(answer.result)));
    answer
}

async fn answered<T>(answer: oneshot::Receiver<Result<T>>) -> T {
    answer.await.expect("the executor answers").expect("the request succeeds")
}

async fn list(executor: &Executor) -> Vec<ListedHolder> {
    answered(submit(executor, ListHolders(Names::WithPrefix(NAME.into())))).await
}

#[tokio::test(start_paused = true)]
async fn busy_connection_leaves_former_primary_after_its_answer() {
    let servers = Servers::new();
    let executor = start(&servers);
    answered(submit_heartbeat(&executor, Connect)).await;
    let slow = Slow::default();
    let busy = submit(&executor, slow.clone());
    slow.sent.notified().await;
    servers.switch_over();
    answered(submit_heartbeat(&executor, LoseConnection::default())).await;
    let listed = submit(&executor, ListHolders(Names::WithPrefix(NAME.into())));
    slow.allowed.notify_one();
    answered(busy).await;
    assert!(answered(listed).await.is_empty(), "the former primary was asked");
}

#[tokio::test(start_paused = true)]
async fn connection_opened_during_switchover_is_not_used() {
    let servers = Servers::new();
    let executor = start(&servers);
    answered(submit_heartbeat(&executor, Connect)).await;
    servers.opens.notified().await;
    servers.work.forget_permits(1);
    let listed = submit(&executor, ListHolders(Names::WithPrefix(NAME.into())));
    servers.opens.notified().await;
    servers.switch_over();
    answered(submit_heartbeat(&executor, LoseConnection::default())).await;
    servers.work.add_permits(1);
    assert!(answered(listed).await.is_empty(), "the former primary was asked");
}

#[tokio::test(start_paused = true)]
async fn connection_older_than_the_heartbeats_is_not_used() {
    let servers = Servers::new();
    let executor = start(&servers);
    answered(submit_heartbeat(&executor, Connect)).await;
    servers.opens.notified().await;
    servers.heartbeats.forget_permits(1);
    let beat = submit_heartbeat(&executor, LoseConnection::default());
    servers.opens.notified().await;
    assert_eq!(list(&executor).await.len(), 1, "the first server is the primary");
    servers.switch_over();
    servers.heartbeats.add_permits(1);
    answered(beat).await;
    assert!(list(&executor).await.is_empty(), "the former primary was asked");
}

/// Opens a connection for work in this time.
async fn open_in(opening: Duration, servers: &Servers, executor: &Executor) {
    servers.work.forget_permits(1);
    let connected = submit(executor, Connect);
    servers.opens.notified().await;
    tokio::time::advance(opening).await;
    servers.work.add_permits(1);
    answered(connected).await;
}

#[tokio::test(start_paused = true)]
async fn slow_heartbeat_connection_is_opened_with_first_request() {
    for (opening, has_requests, connections) in [(0, true, 1), (1, false, 1), (1, true, 2)] {
        let servers = Servers::new();
        let executor = start(&servers);
        open_in(Duration::from_secs(opening), &servers, &executor).await;
        if has_requests {
            executor.work.record_request();
        }
        tokio::time::advance(Duration::from_secs(60)).await;
        list(&executor).await;
        assert_eq!(executor.open_connections(), connections, "{opening} s, {has_requests}");
    }
}

/// Starts an executor whose connection for heartbeats is being opened ahead.
async fn opening_ahead() -> (Arc<Servers>, Executor) {
    let servers = Servers::new();
    let executor = start(&servers);
    servers.heartbeats.forget_permits(1);
    executor.work.record_request();
    open_in(Duration::from_secs(2), &servers, &executor).await;
    servers.opens.notified().await;
    (servers, executor)
}

#[tokio::test(start_paused = true)]
async fn heartbeat_has_its_limit_while_its_connection_is_opened() {
    let (servers, executor) = opening_ahead().await;
    let (start, limit) = (Instant::now(), Duration::from_millis(250));
    executor.set_heartbeat_timeout(limit);
    let beat = submit_heartbeat(&executor, Connect);
    servers.opens.notified().await;
    assert!(start.elapsed() <= 2 * limit, "tried again after {:?}", start.elapsed());
    servers.heartbeats.add_permits(1);
    answered(beat).await;
}

#[tokio::test(start_paused = true)]
async fn failed_connection_is_not_opened_ahead_again() {
    let servers = Servers::new();
    let executor = start(&servers);
    servers.heartbeats.close();
    executor.work.record_request();
    open_in(Duration::from_secs(2), &servers, &executor).await;
    servers.opens.notified().await;
    for _ in 0..3 {
        executor.work.record_request();
        let opens = tokio::time::timeout(Duration::from_secs(1), servers.opens.notified()).await;
        assert!(opens.is_err(), "another attempt");
    }
}

#[tokio::test(start_paused = true)]
async fn close_waits_for_no_connection_that_is_opened_ahead() {
    let (_servers, executor) = opening_ahead().await;
    let start = Instant::now();
    executor.close().await;
    assert_eq!(start.elapsed(), Duration::ZERO);
}

/// A lease with a short TTL is granted while a heartbeat is in flight.
#[tokio::test(start_paused = true)]
async fn heartbeat_sent_again_has_the_current_limit() {
    let servers = Servers::new();
    let executor = start(&servers);
    let silent = SilentTwice::default();
    let beat = submit_heartbeat(&executor, silent.clone());
    silent.sent.notified().await;
    let (start, limit) = (Instant::now(), Duration::from_millis(250));
    executor.set_heartbeat_timeout(limit);
    answered(beat).await;
    assert!(start.elapsed() <= 3 * limit, "answered after {:?}", start.elapsed());
}

/// An urgent task that failed comes before the others that failed, whether it is sent again at once
/// or after a pause.
#[tokio::test(start_paused = true)]
async fn repeated_urgent_task_comes_first() {
    fn put_first(queue: &TaskQueue, task: Box<dyn Pending>) {
        queue.put_first(task);
    }
    fn put_back(queue: &TaskQueue, task: Box<dyn Pending>) {
        queue.put_back(task, Duration::ZERO);
    }
    let clock = Servers::new().clock();
    for put in [put_first, put_back] {
        let queue = TaskQueue::default();
        let other = Task::new(Slow::default(), ANSWER_TIMEOUT, clock, drop);
        let urgent = Task::new(LoseConnection::default(), ANSWER_TIMEOUT, clock, drop).urgent();
        put_back(&queue, Box::new(other));
        put(&queue, Box::new(urgent));
        let first = queue.pop(true).await.map(|task| task.attempted());
        assert_eq!(first, Some("send a heartbeat"));
    }
}

/// Panics when it receives its first answers.
#[derive(Default)]
struct PanickingReceiver(Mutex<Vec<RequestId>>);

impl Receiver for PanickingReceiver {
    fn receive(self: Arc<Self>, answers: Vec<(RequestId, OperationAnswer<Response>)>) {
        let mut received = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = received.is_empty();
        received.extend(answers.iter().map(|(request, _)| *request));
        assert!(!is_first, "the first answers");
    }
}

#[test]
fn panic_of_receiver_keeps_no_later_answers_back() {
    let receiver = Arc::new(PanickingReceiver::default());
    let requests: Vec<RequestId> = (0..100).map(RequestId).collect();
    let mut answers = Answers::default();
    for request in &requests {
        let answer = OperationAnswer::closed(Moment::default());
        answers.push(*request, answer, Arc::<PanickingReceiver>::clone(&receiver));
    }
    drop(answers);
    assert_eq!(*receiver.0.lock().unwrap_or_else(PoisonError::into_inner), requests);
}
