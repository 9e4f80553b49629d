//! Promise 7: first come, first served, across tasks, clients and processes, despite waiters that
//! die or cancel.
//!
//! Promises: 7.

mod abandoned;
mod dead;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlock::inspect::LeaseInfo;
use sqlock::{Error, Lease, LeaseRequest, Locks, Owner};
use sqlx::{AssertSqlSafe, Pool};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use super::network::behind_a_proxy;
use crate::support::server::{Kind, PgBouncer, Server};
use crate::support::worker::Worker;
use crate::support::{
    ARRIVALS_APART, Database, LONG, SLACK, SOON, TestDatabase, builder, connect, fresh, query_processes, soon, until,
    until_waiters,
};
use crate::{DATABASE, Sql};

/// How long a grant to another process lasts until its client has confirmed it, and an entry
/// without a heartbeat.
const CLAIM: Duration = Duration::from_secs(3);

/// The queue of the name `a`, with a client that observes it.
struct WaitQueue {
    db: TestDatabase,
    outside: Locks,
    table: Pool<Sql>,
}

type Waiting = JoinHandle<Result<Lease, Error>>;

impl WaitQueue {
    async fn new() -> Self {
        Self::on(fresh().await).await
    }

    async fn on(db: TestDatabase) -> Self {
        let (outside, table) = (db.locks().await, db.pool_of(1).await);
        Self { db, outside, table }
    }

    /// Creates a client, as another process would have one.
    async fn client(&self) -> Locks {
        self.db.locks().await
    }

    /// Spawns a request with a label, and waits until it has joined the queue.
    async fn join(&self, request: LeaseRequest, label: &str) -> Waiting {
        let waiting = tokio::spawn(request.ttl(LONG).label(label).acquire());
        self.until(&format!("{label} in the queue"), |queue| queue.iter().any(|l| l == label)).await;
        waiting
    }

    /// Returns the labels of the waiters, in order.
    async fn labels(&self) -> Vec<String> {
        let waiters = self.outside.waiters("a").await.expect("waiters");
        assert!(waiters.iter().enumerate().all(|(i, waiter)| waiter.ahead == i));
        waiters.into_iter().map(|waiter| waiter.label).collect()
    }

    async fn until(&self, what: &str, like: impl Fn(&[String]) -> bool) {
        until(what, async || like(&self.labels().await)).await;
    }

    async fn held(&self) -> LeaseInfo {
        self.outside.inspect("a").await.expect("inspect").expect("a holder")
    }

    /// Counts the entries in the table, including those of dead clients.
    async fn entries(&self) -> i64 {
        let count = sqlx::query_scalar("SELECT count(*) FROM sqlock_entry").fetch_one(&self.table);
        count.await.expect("the number of entries")
    }

    /// Waits until the name is free and has no entries: some are deleted in the background.
    async fn assert_empty(&self) {
        let is_free = async || self.outside.inspect("a").await.expect("inspect").is_none();
        until("an empty queue", async || self.entries().await == 0 && is_free().await).await;
        let lease = self.outside.lease("a").try_acquire().await.expect("try").expect("free");
        lease.release().await.expect("release");
    }
}

async fn turn(waiting: Waiting) -> Lease {
    soon("the turn", waiting).await.expect("no panic").expect("acquire")
}

/// Checks that the waiters are granted the name in this order, each after the release of the one
/// before.
async fn assert_served(first: Lease, waiting: Vec<Waiting>) {
    let mut held = first;
    for next in waiting {
        assert!(!next.is_finished(), "granted before its turn");
        let token = held.token();
        held.release().await.expect("held to the end");
        held = turn(next).await;
        assert!(held.token() > token);
    }
    held.release().await.expect("held to the end");
}

// ---- clients of one process, each with its own connections

#[tokio::test]
async fn clients_are_granted_in_arrival_order() {
    let queue = WaitQueue::new().await;
    let first = queue.client().await.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let (mut clients, mut waiting) = (Vec::new(), Vec::new());
    for i in 0..8 {
        let client = queue.client().await;
        waiting.push(queue.join(client.lease("a"), &format!("w{i}")).await);
        clients.push(client);
    }
    assert_eq!(queue.labels().await, ["w0", "w1", "w2", "w3", "w4", "w5", "w6", "w7"]);
    assert_served(first, waiting).await;
    queue.assert_empty().await;
}

/// A waiter behind another one of its process has no entry in the database until the order needs
/// it.
#[tokio::test]
async fn local_and_remote_waiters_share_arrival_order() {
    let queue = WaitQueue::new().await;
    let (ours, theirs) = (queue.client().await, queue.client().await);
    let first = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut waiting = Vec::new();
    for i in 0..4 {
        if i > 0 {
            sleep(ARRIVALS_APART).await;
        }
        let client = if i % 2 == 0 { &ours } else { &theirs };
        waiting.push(tokio::spawn(client.lease("a").ttl(LONG).label(format!("w{i}")).acquire()));
    }
    assert_eq!(queue.labels().await, ["w1"], "nobody who cannot be next is known there");
    assert_served(first, waiting).await;
    queue.assert_empty().await;
}

#[tokio::test]
async fn try_acquire_never_jumps_the_queue() {
    let queue = WaitQueue::new().await;
    let first = queue.outside.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let (mut clients, mut waiting) = (Vec::new(), Vec::new());
    for i in 0..6 {
        let client = queue.client().await;
        waiting.push(queue.join(client.lease("a"), &format!("w{i}")).await);
        clients.push(client);
    }
    // From here on the name has a waiter or a holder, until the last one has the name.
    let over = Arc::new(AtomicBool::new(false));
    let tries: Vec<_> = [queue.client().await, clients[0].clone(), clients[5].clone()]
        .into_iter()
        .map(|locks| {
            let over = Arc::clone(&over);
            tokio::spawn(async move {
                let mut tries = 0;
                while !over.load(Ordering::SeqCst) {
                    assert!(locks.lease("a").try_acquire().await.expect("try").is_none(), "a try overtook the queue");
                    tries += 1;
                }
                tries
            })
        })
        .collect();
    let mut held = first;
    for next in waiting {
        held.release().await.expect("release");
        held = turn(next).await;
        sleep(Duration::from_millis(20)).await;
    }
    over.store(true, Ordering::SeqCst);
    for tries in tries {
        assert!(soon("the tries", tries).await.expect("no try overtook the queue") > 0);
    }
    held.release().await.expect("release");
    queue.assert_empty().await;
}

/// A slow database is not an unreachable one: the answer to the waiter refuses the try.
#[tokio::test]
async fn try_behind_waiter_waits_for_slow_database() {
    const SLOW: Duration = Duration::from_millis(300);
    let db = fresh().await;
    let proxy = (DATABASE != Database::Sqlite).then(|| behind_a_proxy(&db.url));
    let locks = match &proxy {
        Some((_, url)) => builder(connect(url, 1).await).build(),
        None => db.locks().await,
    };
    locks.lease("a").acquire().await.expect("acquire").release().await.expect("release");
    let pool = db.pool_of(1).await;
    let writing = match &proxy {
        Some((proxy, _)) => {
            proxy.delay_replies(SLOW);
            None
        }
        None => Some(pool.begin_with("BEGIN IMMEDIATE").await.expect("begin")),
    };
    let tried = async {
        sleep(SLOW / 2).await; // the waiter comes first, and has waited for long
        locks.lease("a").try_acquire().await
    };
    let written = async {
        sleep(SLOW).await;
        if let Some(writing) = writing {
            writing.rollback().await.expect("rollback");
        }
    };
    let waited = locks.lease("a").acquire();
    let (waited, tried, ()) = soon("two answers", async { tokio::join!(waited, tried, written) }).await;
    assert!(tried.expect("an answer").is_none());
    waited.expect("acquire").release().await.expect("release");
}

/// Covers requests between a release and the following grant, and requests just before the release.
#[tokio::test]
async fn newcomer_during_handover_queues_behind_waiters() {
    let queue = WaitQueue::new().await;
    let (holder, waiter) = (queue.client().await, queue.client().await);
    let mut newcomers = Vec::new();
    for _ in 0..3 {
        newcomers.push(queue.client().await);
    }
    newcomers.push(holder.clone());
    for round in 0..15 {
        let held = holder.lease("a").ttl(LONG).acquire().await.expect("acquire");
        let next = queue.join(waiter.lease("a"), "next").await;
        let came: Vec<Waiting> = newcomers
            .iter()
            .enumerate()
            .map(|(i, locks)| {
                let request = locks.lease("a").ttl(LONG);
                let late = Duration::from_micros((round * i as u64) * 300);
                tokio::spawn(async move {
                    sleep(late).await;
                    request.acquire().await
                })
            })
            .collect();
        sleep(Duration::from_micros(round * 200)).await;
        held.release().await.expect("release");
        let next = turn(next).await;
        assert!(came.iter().all(|waiting| !waiting.is_finished()), "somebody barged in in round {round}");
        let token = next.token();
        next.release().await.expect("release");
        let mut after = came;
        while !after.is_empty() {
            let served = async {
                loop {
                    if let Some(i) = after.iter().position(JoinHandle::is_finished) {
                        return i;
                    }
                    sleep(Duration::from_millis(1)).await;
                }
            };
            let i = soon("the turn of a newcomer", served).await;
            let lease = turn(after.swap_remove(i)).await;
            assert!(lease.token() > token, "before the one who waited, in round {round}");
            lease.release().await.expect("release");
        }
    }
    queue.assert_empty().await;
}

/// The row looks free, but the statement that takes a free name must not take it past a waiter.
#[tokio::test]
async fn expired_name_goes_to_the_first_waiter() {
    let queue = WaitQueue::new().await;
    let (ours, theirs, others) = (queue.client().await, queue.client().await, queue.client().await);
    let held = ours.lease("a").ttl(Duration::from_secs(5)).renew(false).acquire().await.expect("acquire");
    let next = queue.join(theirs.lease("a"), "next").await;
    let over = Arc::new(AtomicBool::new(false));
    let trying = tokio::spawn({
        let over = Arc::clone(&over);
        async move {
            while !over.load(Ordering::SeqCst) {
                assert!(others.lease("a").try_acquire().await.expect("try").is_none(), "a try overtook the queue");
            }
        }
    });
    let next = turn(next).await;
    let now = queue.held().await;
    assert_eq!(now.token, next.token());
    // The client of the holder may have released the name between its own deadline and the expiry
    // in the database.
    assert!(!held.is_held(), "two holders");
    over.store(true, Ordering::SeqCst);
    soon("the tries", trying).await.expect("no try overtook the queue");
    assert!(held.release().await.expect_err("it has expired").is_lost());
    next.release().await.expect("release");
    queue.assert_empty().await;
}

// ---- options of holders

#[tokio::test]
async fn hold_at_least_delays_the_next_grant() {
    let queue = WaitQueue::new().await;
    let (ours, theirs, others) = (queue.client().await, queue.client().await, queue.client().await);
    let least = chrono::TimeDelta::seconds(4);
    let held = ours.lease("a").ttl(LONG).hold_at_least(least.to_std().expect("positive")).acquire();
    let held = held.await.expect("acquire");
    let before = queue.held().await;
    let waiting = [queue.join(theirs.lease("a"), "w0").await, queue.join(others.lease("a"), "w1").await];
    held.release().await.expect("release");
    let mut last = before.token;
    for (i, next) in waiting.into_iter().enumerate() {
        let next = turn(next).await;
        let now = queue.held().await;
        assert_eq!(now.label, format!("w{i}"));
        assert!(now.acquired_at >= before.acquired_at + least, "{} after {}", now.acquired_at, before.acquired_at);
        assert!(next.token() > last);
        last = next.token();
        next.release().await.expect("release");
    }
    queue.assert_empty().await;
}

#[tokio::test]
async fn eviction_grants_the_first_waiter_at_once() {
    let queue = WaitQueue::new().await;
    let (ours, theirs, others) = (queue.client().await, queue.client().await, queue.client().await);
    let held = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let waiting = [queue.join(theirs.lease("a"), "w0").await, queue.join(others.lease("a"), "w1").await];
    let [first, second] = waiting;
    // Without the eviction, the waiter would wait for the TTL.
    const { assert!(LONG.as_secs() > SOON.as_secs()) };
    assert!(queue.outside.evict("a", held.token()).await.expect("evict"));
    let first = turn(first).await;
    assert!(!second.is_finished());
    assert!(held.release().await.expect_err("evicted").is_lost());
    assert!(queue.outside.evict("a", first.token()).await.expect("evict"));
    let second = turn(second).await;
    assert!(second.token() > first.token());
    assert!(first.release().await.expect_err("evicted").is_lost());
    second.release().await.expect("release");
    queue.assert_empty().await;
}

#[tokio::test]
async fn owner_reenters_past_waiters_and_last_release_grants() {
    let queue = WaitQueue::new().await;
    let (ours, theirs, others) = (queue.client().await, queue.client().await, queue.client().await);
    let owner = Owner::random();
    let outer = ours.lease("a").ttl(LONG).owner(owner).acquire().await.expect("acquire");
    let stranger = queue.join(others.lease("a"), "stranger").await;
    let mut holds = vec![outer];
    for locks in [&ours, &theirs] {
        let inner = soon("the entry", locks.lease("a").ttl(LONG).owner(owner).acquire()).await.expect("acquire");
        assert_eq!(inner.token(), holds[0].token());
        holds.push(inner);
    }
    for hold in holds.drain(..).rev() {
        assert!(!stranger.is_finished(), "it is still held");
        assert_eq!(queue.held().await.owner, Some(owner));
        hold.release().await.expect("release");
    }
    let stranger = turn(stranger).await;
    assert_ne!(stranger.owner(), owner);
    stranger.release().await.expect("release");
    queue.assert_empty().await;
}

/// Otherwise the second request of the owner would wait behind another waiter, which waits for the
/// owner.
#[tokio::test]
async fn owner_waiting_in_two_processes_enters_in_both() {
    let queue = WaitQueue::new().await;
    let (ours, theirs, others) = (queue.client().await, queue.client().await, queue.client().await);
    let owner = Owner::random();
    let held = queue.client().await.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let first = queue.join(ours.lease("a").owner(owner), "first").await;
    let stranger = queue.join(others.lease("a"), "stranger").await;
    let second = queue.join(theirs.lease("a").owner(owner), "second").await;
    held.release().await.expect("release");
    let (first, second) = (turn(first).await, turn(second).await);
    assert_eq!((first.owner(), first.token()), (second.owner(), second.token()));
    assert!(!stranger.is_finished());
    second.release().await.expect("release");
    first.release().await.expect("release");
    turn(stranger).await.release().await.expect("release");
    queue.assert_empty().await;
}

/// The owner holds the name before its waiting process learns of the grant.
#[tokio::test]
async fn reentry_during_the_grant_loses_nothing() {
    let queue = WaitQueue::new().await;
    let (ours, theirs, others) = (queue.client().await, queue.client().await, queue.client().await);
    for _ in 0..4 {
        let owner = Owner::random();
        let held = queue.outside.lease("a").ttl(LONG).acquire().await.expect("acquire");
        let first = queue.join(ours.lease("a").owner(owner), "first").await;
        let stranger = queue.join(others.lease("a"), "stranger").await;
        let entering = tokio::spawn({
            let theirs = theirs.clone();
            async move {
                loop {
                    let entry = theirs.lease("a").ttl(LONG).owner(owner).try_acquire().await;
                    if let Some(second) = entry.expect("try") {
                        return second;
                    }
                }
            }
        });
        held.release().await.expect("release");
        let second = soon("the entry", entering).await.expect("no panic");
        let first = turn(first).await;
        assert_eq!(first.token(), second.token());
        for hold in [first, second] {
            assert!(!stranger.is_finished());
            hold.release().await.expect("release");
        }
        // At once: no holding without a lease is left.
        turn(stranger).await.release().await.expect("release");
    }
    queue.assert_empty().await;
}

#[tokio::test]
async fn shutdown_removes_entries_and_others_move_up() {
    let queue = WaitQueue::new().await;
    let ours = queue.client().await;
    let held = queue.outside.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut leaving = Vec::new();
    let mut staying = Vec::new();
    for i in 0..4 {
        // Readers of one client queue together.
        leaving.push(queue.join(ours.lease("a").shared(), &format!("leaves{i}")).await);
        staying.push(queue.join(queue.client().await.lease("a"), &format!("stays{i}")).await);
    }
    // Behind them a writer, and one more request, without an entry in the database.
    leaving.push(tokio::spawn(ours.lease("a").ttl(LONG).acquire()));
    leaving.push(tokio::spawn(ours.lease("a").ttl(LONG).acquire()));
    queue.until("the writer of the client that leaves", |labels| labels.len() == 9).await;
    soon("the shutdown", ours.shutdown()).await.expect("shutdown");
    assert_eq!(queue.labels().await, ["stays0", "stays1", "stays2", "stays3"]);
    assert_eq!(queue.entries().await, 4);
    for waiting in leaving {
        let answer = soon("an answer", waiting).await.expect("no panic");
        assert!(matches!(answer, Err(Error::Closed)), "{answer:?}");
    }
    assert_served(held, staying).await;
    queue.assert_empty().await;
}

#[tokio::test]
async fn abandoned_wait_leaves_no_entry_or_delay() {
    let queue = WaitQueue::new().await;
    let (ours, theirs) = (queue.client().await, queue.client().await);
    let held = queue.outside.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let dropped =
        [queue.join(ours.lease("a").shared(), "d0").await, queue.join(theirs.lease("a").shared(), "d1").await];
    let wait = Duration::from_secs(6);
    // The waiter queues behind the waiters of its own client.
    let impatient = queue.join(ours.lease("a").wait(wait), "impatient").await;
    let next = queue.join(theirs.lease("a"), "next").await;
    for waiting in dropped {
        waiting.abort();
        assert!(waiting.await.expect_err("aborted").is_cancelled());
    }
    match soon("the timeout", impatient).await.expect("no panic") {
        Err(Error::Timeout { waited, .. }) => assert!(waited >= wait, "{waited:?}"),
        other => panic!("{other:?}"),
    }
    queue.until("the departures", |labels| labels == ["next"]).await;
    until("their deletion", async || queue.entries().await <= 1).await;
    assert_served(held, vec![next]).await;
    queue.assert_empty().await;
}

// ---- inspection

#[tokio::test]
async fn waiters_learn_their_position_and_the_holders() {
    let queue = WaitQueue::new().await;
    let held = queue.client().await.lease("a").ttl(LONG).label("h").acquire().await.expect("acquire");
    assert_eq!(queue.held().await.waiters, 0);
    assert!(queue.outside.waiters("a").await.expect("asked").is_empty());
    assert!(queue.outside.waiters("unknown").await.expect("asked").is_empty());
    let reader = queue.db.builder().await.holder("the reader").build();
    let before = database_clock(&queue).await;
    let first = queue.join(queue.client().await.lease("a"), "w0").await;
    let second = queue.join(reader.lease("a").shared(), "w1").await;
    let (reports, mut progress) = tokio::sync::mpsc::unbounded_channel();
    let third = queue.client().await;
    let tell = move |w: &sqlock::inspect::Waiting| {
        let holder = w.holder.as_ref().map(|holder| (holder.token, holder.label.clone(), holder.waiters));
        let _ = reports.send((w.ahead, holder, w.waited));
    };
    let third = queue.join(third.lease("a").while_waiting(tell), "w2").await;

    let waiters = queue.outside.waiters("a").await.expect("asked");
    let seen: Vec<_> = waiters.iter().map(|w| (w.ahead, w.label.as_str(), w.mode)).collect();
    use sqlock::inspect::Mode::{Exclusive, Shared};
    assert_eq!(seen, [(0, "w0", Exclusive), (1, "w1", Shared), (2, "w2", Exclusive)]);
    assert_eq!(waiters[1].holder, "the reader");
    assert!(waiters.is_sorted_by_key(|w| w.since) && waiters[0].since >= before);
    let listed = queue.outside.list("").await.expect("list");
    assert_eq!(listed.iter().map(|info| (info.token, info.waiters)).collect::<Vec<_>>(), [(held.token(), 3)]);
    assert_eq!(queue.held().await.waiters, 3);

    let mut hear = async |what: &str| {
        let (ahead, holder, waited) = soon(what, progress.recv()).await.expect("it goes on");
        let (token, label, waiters) = holder.expect("somebody holds it");
        (ahead, token, label, waiters, waited)
    };
    let (ahead, token, label, waiters, waited) = hear("a word of the place").await;
    assert_eq!((ahead, token, label.as_str()), (2, held.token(), "h"));
    // The report may come before the waiter's own entry.
    assert!((2..=3).contains(&waiters), "{waiters}");
    held.release().await.expect("release");
    let first = turn(first).await;
    // The time between two holders is reported as well, if it is observed.
    let next = async {
        loop {
            let (ahead, token, label, waiters, later) = hear("a word of the next").await;
            if token == first.token() {
                return (ahead, label, waiters, later);
            }
        }
    };
    let (ahead, label, waiters, later) = next.await;
    assert_eq!((ahead, label.as_str(), waiters), (1, "w0", 2));
    assert!(later > waited);
    first.release().await.expect("release");
    turn(second).await.release().await.expect("release");
    turn(third).await.release().await.expect("release");
    queue.assert_empty().await;
}

/// Reads the database's clock.
async fn database_clock(queue: &WaitQueue) -> chrono::DateTime<chrono::Utc> {
    let lease = queue.outside.lease("clock").acquire().await.expect("acquire");
    let now = queue.outside.inspect("clock").await.expect("inspect").expect("held").acquired_at;
    lease.release().await.expect("release");
    now
}

// ---- processes

/// Processes that wait, each behind the one before.
async fn waiting_workers(queue: &WaitQueue, processes: usize) -> Vec<Worker> {
    let mut workers: Vec<Worker> = (0..processes).map(|_| Worker::start(&queue.db.url)).collect();
    for worker in &mut workers {
        // The processes connect first, so that no connection delays them.
        assert_ne!(worker.ask("inspect a").await, "free");
    }
    for worker in &mut workers {
        wait(worker, "").await;
    }
    workers
}

/// Lets a process queue. It answers when its entry exists.
async fn wait(worker: &mut Worker, at_most: &str) {
    assert_eq!(worker.ask(format!("wait a {} {at_most}", LONG.as_millis()).trim_end()).await, "waiting");
}

/// Checks that the processes are granted the name in this order, and returns their tokens.
async fn enter_in_order<'w>(mut token: i64, workers: impl IntoIterator<Item = &'w mut Worker>) -> Vec<i64> {
    let mut tokens = Vec::new();
    // A process that is granted the name out of order keeps it, so the expected one would get none.
    let mut workers: Vec<&mut Worker> = workers.into_iter().collect();
    for worker in &mut workers {
        worker.tell("turn");
    }
    for worker in workers {
        let answer = worker.answer().await;
        let next: i64 =
            answer.strip_prefix("token ").and_then(|t| t.parse().ok()).unwrap_or_else(|| panic!("{answer}"));
        assert!(next > token);
        token = next;
        tokens.push(token);
        assert_eq!(worker.ask("release").await, "released");
    }
    tokens
}

/// Polls the token of the name `a`, and records it. A grant to a dead waiter lasts three seconds,
/// so that none is missed.
async fn record_tokens(pool: &Pool<Sql>, tokens: &mut BTreeSet<i64>) {
    loop {
        let token = sqlx::query_scalar("SELECT token FROM sqlock_lease WHERE name = 'a'").fetch_one(pool);
        tokens.insert(token.await.expect("the row of the name"));
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn processes_are_granted_in_arrival_order() {
    let queue = WaitQueue::new().await;
    let held = queue.outside.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut workers = waiting_workers(&queue, 6).await;
    let token = held.token().get();
    held.release().await.expect("release");
    enter_in_order(token, &mut workers).await;
    assert_eq!(queue.entries().await, 0);
    queue.assert_empty().await;
}

/// The order of waiters in a process differs from the database's when one of them queued again or
/// was slow to queue.
#[tokio::test]
async fn waiter_is_granted_in_database_order() {
    let queue = WaitQueue::new().await;
    let ours = queue.client().await;
    let mut holder = Worker::start(&queue.db.url);
    holder.hold("a", Duration::from_secs(6)).await;
    // A reader and the writer behind it: both may be next.
    let first = queue.join(ours.lease("a").shared(), "first").await;
    let second = queue.join(ours.lease("a"), "second").await;
    let sql = "UPDATE sqlock_entry SET arrived_at = arrived_at - 60000000 WHERE label = 'second'";
    sqlx::query(sql).execute(&queue.table).await.expect("another order");
    holder.kill();
    turn(second).await.release().await.expect("release");
    turn(first).await.release().await.expect("release");
    queue.assert_empty().await;
}

#[tokio::test]
async fn dead_waiters_delay_others_by_one_claim() {
    let queue = WaitQueue::new().await;
    let held = queue.outside.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut workers = waiting_workers(&queue, 2).await;
    let mut killed = waiting_workers(&queue, 1).await;
    let mut cancelled = waiting_workers(&queue, 1).await;
    let mut impatient = Worker::start(&queue.db.url);
    // The first answer may take longer than the wait: the connection is opened before.
    assert_ne!(impatient.ask("inspect a").await, "free");
    wait(&mut impatient, "4000").await;
    workers.extend(waiting_workers(&queue, 2).await);
    killed.extend(waiting_workers(&queue, 2).await);
    workers.extend(waiting_workers(&queue, 2).await);
    let timeout = impatient.ask("turn").await;
    assert!(timeout.starts_with("timeout"), "{timeout}");
    assert_eq!(cancelled[0].ask("cancel").await, "cancelled");
    for worker in &mut killed {
        worker.kill();
    }
    let mut before = held.token().get();
    held.release().await.expect("release");
    let mut seen = BTreeSet::new();
    let granted = tokio::select! {
        granted = enter_in_order(before, &mut workers) => granted,
        () = record_tokens(&queue.table, &mut seen) => unreachable!("it has no end"),
    };
    for next in granted {
        let to_the_dead = seen.range(before + 1..next).count();
        assert!(to_the_dead <= 1, "{to_the_dead} grants to dead waiters before {next}: {seen:?}");
        before = next;
    }
    assert_eq!(queue.entries().await, 0);
    queue.assert_empty().await;
}

#[tokio::test]
async fn killed_holder_grants_first_waiter_after_ttl() {
    let queue = WaitQueue::new().await;
    let mut holder = Worker::start(&queue.db.url);
    let token = holder.hold("a", Duration::from_secs(5)).await;
    let clients = [queue.client().await, queue.client().await];
    let (first, second) =
        (queue.join(clients[0].lease("a"), "first").await, queue.join(clients[1].lease("a"), "second").await);
    holder.kill();
    // A renewal in flight may still arrive, so the last expiry seen counts.
    let mut last = queue.held().await;
    let next = soon("the grant", async {
        loop {
            match queue.outside.inspect("a").await.expect("inspect") {
                Some(now) if now.token.get() != token => break now,
                Some(now) => last = now,
                None => {}
            }
        }
    })
    .await;
    assert_eq!(next.label, "first");
    assert!(next.acquired_at >= last.expires_at, "granted at {}, held until {}", next.acquired_at, last.expires_at);
    println!("{DATABASE:?}: granted {} after the expiry", next.acquired_at - last.expires_at);
    assert_served(turn(first).await, vec![second]).await;
    queue.assert_empty().await;
}

/// The name is then granted to the next waiter. The paused process does not believe that it holds
/// the name, and keeps its position.
#[tokio::test]
async fn grant_to_paused_process_lasts_one_claim() {
    let queue = WaitQueue::new().await;
    let client = queue.client().await;
    // The entry of a stopped process lasts for a while, which may be over before the grant on a
    // busy machine.
    let tries = 5;
    for _ in 0..tries {
        let held = queue.outside.lease("a").ttl(LONG).acquire().await.expect("acquire");
        let mut sleeper = waiting_workers(&queue, 1).await.remove(0);
        let awake = queue.join(client.lease("a"), "awake").await;
        let last = queue.join(queue.client().await.lease("a"), "last").await;
        sleeper.stop();
        // If it is stopped during a statement on SQLite, no process can write.
        let released = tokio::time::timeout(Duration::from_secs(1), held.release()).await;
        let granted = match released {
            Ok(released) => {
                released.expect("release");
                queue.held().await
            }
            Err(_) => {
                sleeper.kill();
                drop(turn(awake).await);
                drop(turn(last).await);
                continue;
            }
        };
        let awake = turn(awake).await;
        if !granted.holder.ends_with(&format!("/{}", sleeper.pid().as_raw_pid())) {
            drop((awake, last, sleeper));
            continue;
        }
        let now = queue.held().await;
        assert_eq!(now.token, awake.token());
        assert!(now.acquired_at >= granted.expires_at, "not before the claim has run out");
        let lasted = (granted.expires_at - granted.acquired_at).to_std().expect("it goes on");
        assert!(lasted >= CLAIM && lasted < CLAIM + SLACK, "{lasted:?}");
        println!("{DATABASE:?}: the next was let in {} after the grant", now.acquired_at - granted.acquired_at);

        sleeper.resume();
        sleeper.tell("turn");
        // It keeps its position before a later request.
        let pid = sleeper.pid().as_raw_pid();
        soon("its return", async {
            loop {
                let waiters = queue.outside.waiters("a").await.expect("asked");
                let is_back = waiters.len() == 2 && waiters[0].holder.ends_with(&format!("/{pid}"));
                if is_back && waiters[1].label == "last" {
                    return;
                }
                sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        assert!(queue.held().await.token == awake.token() && awake.is_held(), "its successor holds the name");
        let token = awake.token().get();
        awake.release().await.expect("held to the end");
        let answer = sleeper.answer().await;
        let its: i64 = answer.strip_prefix("token ").and_then(|t| t.parse().ok()).unwrap_or_else(|| panic!("{answer}"));
        assert!(its > token && its > granted.token.get(), "the grant that it slept through is over");
        assert!(!last.is_finished());
        assert_eq!(sleeper.ask("release").await, "released");
        turn(last).await.release().await.expect("release");
        queue.assert_empty().await;
        return;
    }
    panic!("in {tries} tries no grant was made to a process that stood still");
}

#[tokio::test]
async fn paused_process_regains_its_deleted_queue_entry() {
    let queue = WaitQueue::new().await;
    let held = queue.outside.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let (one, other) = (queue.client().await, queue.client().await);
    let mut sleeper = loop {
        let sleeper = waiting_workers(&queue, 1).await.remove(0);
        // The pause is longer than its first statements take.
        sleep(Duration::from_millis(300)).await;
        sleeper.stop();
        // If it is stopped during a statement on SQLite, it keeps the file locked.
        let written = queue.client().await.lease("b").wait(Duration::from_secs(1)).acquire().await;
        if written.is_ok() {
            break sleeper;
        }
        drop(sleeper);
        queue.until("its end", |labels| labels.is_empty()).await;
    };
    let second = queue.join(one.lease("a"), "second").await;
    queue.until("the end of its place", |labels| labels == ["second"]).await;
    let third = queue.join(other.lease("a"), "third").await;
    // As clients that hand the name over do, and on SQLite also clients that queue.
    let cleared = sqlx::query("DELETE FROM sqlock_entry WHERE label = ''").execute(&queue.table).await;
    cleared.expect("expired entries can be deleted");
    assert_eq!(queue.entries().await, 2);
    sleeper.resume();
    queue.until("its return", |labels| labels == ["", "second", "third"]).await;
    let token = held.token().get();
    held.release().await.expect("release");
    let answer = sleeper.ask("turn").await;
    let its: i64 = answer.strip_prefix("token ").and_then(|t| t.parse().ok()).unwrap_or_else(|| panic!("{answer}"));
    assert!(its > token);
    assert!(!second.is_finished() && !third.is_finished());
    assert_eq!(sleeper.ask("release").await, "released");
    let second = turn(second).await;
    assert_served(second, vec![third]).await;
    queue.assert_empty().await;
}

// ---- databases and networks

/// The lock outlasts an entry without a heartbeat: the waiters are alive but cannot write one.
#[tokio::test]
async fn database_standstill_preserves_queue_order() {
    let queue = WaitQueue::new().await;
    let held = queue.outside.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let (one, other, late) = (queue.client().await, queue.client().await, queue.client().await);
    let first = queue.join(one.lease("a"), "first").await;
    let second = queue.join(other.lease("a"), "second").await;
    let pool = queue.db.pool_of(1).await;
    let mut standstill = pool.acquire().await.expect("a connection");
    let (begin, end) = match DATABASE {
        Database::Sqlite => ("BEGIN IMMEDIATE", "COMMIT"),
        Database::Postgres => ("BEGIN; LOCK TABLE sqlock_entry IN EXCLUSIVE MODE", "COMMIT"),
        Database::MySql | Database::MariaDb => ("LOCK TABLES sqlock_entry READ", "UNLOCK TABLES"),
    };
    sqlx::raw_sql(begin).execute(&mut *standstill).await.expect("a lock on all entries");
    sleep(CLAIM + Duration::from_millis(500)).await;
    let newcomer = tokio::spawn(late.lease("a").ttl(LONG).acquire());
    sleep(Duration::from_millis(200)).await;
    let releasing = tokio::spawn(held.release());
    sqlx::raw_sql(end).execute(&mut *standstill).await.expect("the end of the lock");
    soon("the release", releasing).await.expect("no panic").expect("held to the end");
    let first = turn(first).await;
    assert!(!second.is_finished() && !newcomer.is_finished(), "a waiter has lost its position");
    let token = first.token();
    first.release().await.expect("held to the end");
    let second = turn(second).await;
    assert!(second.token() > token && !newcomer.is_finished(), "a waiter has lost its position");
    second.release().await.expect("held to the end");
    turn(newcomer).await.release().await.expect("held to the end");
    queue.assert_empty().await;
}

/// On SQLite, which has no network, another process keeps the write lock.
#[tokio::test]
async fn waiter_without_database_fails_as_unavailable() {
    let queue = WaitQueue::new().await;
    let held = queue.outside.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let (proxy, url) = match DATABASE {
        Database::Sqlite => (None, queue.db.url.clone()),
        _ => {
            let (proxy, url) = behind_a_proxy(&queue.db.url);
            (Some(proxy), url)
        }
    };
    let theirs = builder(connect(&url, 1).await).build();
    let patient = queue.join(theirs.lease("a").shared(), "patient").await;
    let impatient = queue.join(theirs.lease("a").wait(Duration::from_secs(6)), "impatient").await;
    let mut blocker = None;
    match &proxy {
        Some(proxy) => {
            proxy.refuse();
            proxy.reset();
        }
        None => {
            let mut worker = Worker::start(&queue.db.url);
            assert_eq!(worker.ask("seize").await, "seized");
            blocker = Some(worker);
        }
    }
    for waiting in [impatient, patient] {
        match soon("an answer", waiting).await.expect("no panic") {
            Err(Error::Unavailable { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    // The database is available again, and the waits have left nothing.
    if let Some(mut worker) = blocker {
        assert_eq!(worker.ask("yield").await, "yielded");
    }
    if let Some(proxy) = &proxy {
        proxy.pass();
    }
    let again = queue.join(theirs.lease("a"), "again").await;
    queue.until("the end of the old places", |labels| labels == ["again"]).await;
    assert_served(held, vec![again]).await;
    queue.assert_empty().await;
}

#[tokio::test]
async fn waiters_behind_pooler_are_granted() {
    if DATABASE != Database::Postgres {
        return; // The pooler speaks the protocol of PostgreSQL alone.
    }
    let server = Server::start(Kind::Postgres);
    let pooler = PgBouncer::start(&server);
    let direct = builder(connect(&server.url(), 2).await).build();
    direct.migrate().await.expect("migrate");
    let pooled = [builder(connect(&pooler.url(), 2).await).build(), builder(connect(&pooler.url(), 2).await).build()];
    let mut held = pooled[1].lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut slowest = Duration::ZERO;
    for i in 0..6 {
        let next = tokio::spawn(pooled[i % 2].lease("a").ttl(LONG).acquire());
        until_waiters(&direct, "a", 1).await;
        // Long enough for it to have tried to listen.
        sleep(Duration::from_millis(700)).await;
        let (token, released) = (held.token(), Instant::now());
        held.release().await.expect("release");
        held = turn(next).await;
        slowest = slowest.max(released.elapsed());
        assert!(held.token() > token);
    }
    held.release().await.expect("release");
    println!("{DATABASE:?}: the slowest hand-over behind a pooler took {slowest:?}");
    assert!(direct.waiters("a").await.expect("asked").is_empty());
    assert!(direct.inspect("a").await.expect("inspect").is_none());
}

/// An operator cancels the statement that adds the entry of a waiter. For PostgreSQL, a test with a
/// time limit does the same; SQLite cancels nothing.
#[tokio::test]
async fn cancelled_statement_ends_no_wait() {
    if !matches!(DATABASE, Database::MySql | Database::MariaDb) {
        return;
    }
    let db = fresh().await;
    let pool = db.pool_of(2).await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").acquire().await.expect("acquire");
    let mut stranger = pool.begin().await.expect("begin");
    let lock = AssertSqlSafe("SELECT name FROM sqlock_entry FOR UPDATE".to_owned());
    sqlx::query(lock).execute(&mut *stranger).await.expect("a lock");
    let waits = tokio::spawn(theirs.lease("a").acquire());
    let find = "SELECT CAST(ID AS SIGNED) FROM information_schema.PROCESSLIST
                 WHERE DB = DATABASE() AND INFO LIKE '%INSERT%sqlock_entry%' AND ID <> CONNECTION_ID()";
    until("the statement", async || {
        let find = || sqlx::query_scalar::<_, i64>(AssertSqlSafe(find.to_owned()));
        match query_processes(async || find().fetch_optional(&pool).await).await {
            Some(id) => sqlx::raw_sql(AssertSqlSafe(format!("KILL QUERY {id}"))).execute(&pool).await.is_ok(),
            None => false,
        }
    })
    .await;
    stranger.rollback().await.expect("rollback");
    lease.release().await.expect("release");
    let granted = soon("the grant", waits).await.expect("no panic").expect("acquire");
    granted.release().await.expect("release");
}
