//! MariaDB Galera: a cluster of three nodes, all of which accept writes.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome};
use sqlock::retry::Retry;
use sqlock::{Error, Lease, Locks, Owner};
use sqlx::mysql::MySqlPoolOptions;
use sqlx::{AssertSqlSafe, MySql, MySqlPool, Transaction};
use tokio::task::{JoinSet, yield_now};
use tokio::time::sleep;

use super::server::{Options, Server};
use super::{on, soon, until, urls};

/// How often the counter is raised under one lease.
const EACH: u64 = 10;

/// How many times it is raised: `scripts/soak galera` takes more.
static TIMES: LazyLock<u64> = LazyLock::new(|| {
    let more = std::env::var("SQLOCK_GALERA_TIMES").ok();
    more.map_or(1200, |times| times.parse().expect("SQLOCK_GALERA_TIMES is a number"))
});

/// Three servers are much for a small machine.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

async fn cluster() -> Vec<Server> {
    let nodes = Server::galera(3, Options::default());
    on(&nodes[0].url()).connect().await.expect("a node").migrate().await.expect("migrate");
    nodes
}

/// The nodes' URLs, this one first.
fn beginning_with(nodes: &[Server], first: usize) -> String {
    urls(nodes[first..].iter().chain(&nodes[..first]))
}

async fn locks(nodes: &[Server], first: usize) -> Locks {
    on(&beginning_with(nodes, first)).connect().await.expect("a client")
}

fn pool(node: &Server) -> MySqlPool {
    pool_within(node, Duration::from_secs(20))
}

fn pool_within(node: &Server, acquire_timeout: Duration) -> MySqlPool {
    let options = MySqlPoolOptions::new().max_connections(4).acquire_timeout(acquire_timeout);
    options.connect_lazy(&node.url()).expect("a URL")
}

async fn execute(pool: &MySqlPool, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
}

/// Reads a number after the node has applied the commits of the others.
async fn number(pool: &MySqlPool, sql: &str) -> i64 {
    let sql = format!("SET STATEMENT wsrep_sync_wait = 1 FOR {sql}");
    let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_one(pool).await.expect("an answer");
    sqlx::Row::get(&row, 0)
}

/// Waits for some microseconds: less than a timer can.
async fn delay(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        yield_now().await;
    }
}

/// A process that raises the counter.
struct Clerk {
    locks: Locks,
    pools: Vec<MySqlPool>,
    at: usize,
    done: Arc<AtomicU64>,
    conflicts: Arc<AtomicU64>,
}

impl Clerk {
    async fn work(mut self) {
        while self.done.load(Ordering::Relaxed) < *TIMES {
            let Ok(lease) = self.locks.lease("counter").ttl(Duration::from_secs(10)).acquire().await else { continue };
            for _ in 0..EACH {
                if lease.raise(&self.pools[self.at]).await.is_ok() {
                    self.done.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                // A concurrent change is met again on the same node; a node that has gone is not.
                self.conflicts.fetch_add(1, Ordering::Relaxed);
                if self.pools[self.at].acquire().await.is_err() {
                    self.at = (self.at + 1) % self.pools.len();
                }
                if !lease.is_held() {
                    break;
                }
            }
            let _ = lease.release().await;
        }
    }
}

trait Raise {
    async fn raise(&self, pool: &MySqlPool) -> Result<(), Error>;
}

impl Raise for Lease {
    /// Reads the counter and writes the next number: a write in between would be lost.
    async fn raise(&self, pool: &MySqlPool) -> Result<(), Error> {
        let mut tx = pool.begin().await?;
        self.fence(&mut tx).await?;
        let value: i64 = sqlx::query_scalar("SELECT value FROM counter").fetch_one(&mut *tx).await?;
        let raise = format!("UPDATE counter SET value = {}; INSERT INTO audit VALUES ({})", value + 1, value + 1);
        sqlx::raw_sql(AssertSqlSafe(raise)).execute(&mut *tx).await?;
        tx.commit().await?;
        Ok(())
    }
}

/// Waits until this many increments are done, as long as there is progress.
async fn reach(done: &AtomicU64, times: u64) {
    while done.load(Ordering::Relaxed) < times {
        let seen = done.load(Ordering::Relaxed);
        until("the next one", async || done.load(Ordering::Relaxed) > seen).await;
    }
}

/// All three nodes are written concurrently; one node is killed and restarted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counter_stays_exact_while_galera_node_is_killed() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let mut nodes = cluster().await;
    let pools: Vec<MySqlPool> = nodes.iter().map(|node| pool_within(node, Duration::from_secs(2))).collect();
    // Not one row that all agree about by accident: it would be an error to raise it twice from the
    // same value.
    execute(
        &pools[0],
        "CREATE TABLE counter (id INT PRIMARY KEY, value BIGINT NOT NULL); INSERT INTO counter VALUES (1, 0);
                        CREATE TABLE audit (value BIGINT PRIMARY KEY)",
    )
    .await;
    let (done, conflicts) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let start = Instant::now();
    let mut clerks = JoinSet::new();
    for at in 0..nodes.len() {
        let locks = locks(&nodes, at).await;
        for _ in 0..2 {
            let (done, conflicts) = (Arc::clone(&done), Arc::clone(&conflicts));
            clerks.spawn(Clerk { locks: locks.clone(), pools: pools.clone(), at, done, conflicts }.work());
        }
    }
    reach(&done, *TIMES / 3).await;
    nodes[2].kill();
    reach(&done, *TIMES / 2).await;
    nodes[2].restart();
    let back = done.load(Ordering::Relaxed);
    reach(&done, *TIMES).await;
    while let Some(ended) = soon("the end of the workers", clerks.join_next()).await {
        ended.expect("no panic");
    }
    println!(
        "{} times in {:.1?}, {} were tried again; the node was back at {back}",
        done.load(Ordering::Relaxed),
        start.elapsed(),
        conflicts.load(Ordering::Relaxed),
    );
    for pool in &pools {
        let value = number(pool, "SELECT value FROM counter").await;
        // Every confirmed write took effect, and every write is one of the processes'. (Some were
        // not confirmed.)
        assert_eq!(number(pool, "SELECT COUNT(*) FROM audit").await, value);
        assert_eq!(number(pool, "SELECT CAST(MAX(value) AS SIGNED) FROM audit").await, value);
        let done = done.load(Ordering::Relaxed).cast_signed();
        assert!(value >= done && value <= done + conflicts.load(Ordering::Relaxed).cast_signed(), "{value}, {done}");
    }
}

#[tokio::test]
async fn fenced_commit_fails_after_takeover_on_another_node() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let nodes = cluster().await;
    let pools: Vec<MySqlPool> = nodes.iter().map(pool).collect();
    execute(
        &pools[0],
        "CREATE TABLE account (id INT PRIMARY KEY, balance INT NOT NULL); INSERT INTO account VALUES (1, 0)",
    )
    .await;
    let (first, third) = (locks(&nodes, 0).await, locks(&nodes, 2).await);
    number(&pools[1], "SELECT COUNT(*) FROM account").await;

    for level in ["READ COMMITTED", "REPEATABLE READ"] {
        let (lease, mut tx) = soon("a fence", async {
            loop {
                let request = first.lease("a").ttl(Duration::from_secs(2)).renew(false);
                let lease = request.acquire().await.expect("acquired");
                let begin = AssertSqlSafe(format!("SET TRANSACTION ISOLATION LEVEL {level}; BEGIN"));
                let mut tx = pools[1].begin_with(begin).await.expect("a transaction");
                match lease.fence(&mut tx).await {
                    Ok(()) => break (lease, tx),
                    Err(error) if error.is_conflict() || error.is_lost() => tx.rollback().await.expect("rolled back"),
                    Err(error) => panic!("{level}: {error}"),
                }
            }
        })
        .await;
        sqlx::query("UPDATE account SET balance = balance + 100 WHERE id = 1")
            .execute(&mut *tx)
            .await
            .expect("written");
        // The lease expires, and a new holder on another node does not see the transaction.
        let next = soon("the next holder", third.lease("a").acquire()).await.expect("acquired");
        assert!(next.token() > lease.token());
        assert!(tx.commit().await.is_err(), "{level}: committed by a holder that was superseded");
        let mut tx = pools[2].begin().await.expect("a transaction");
        next.fence(&mut tx).await.expect("it is held");
        let balance: i32 = sqlx::query_scalar("SELECT balance FROM account").fetch_one(&mut *tx).await.expect("read");
        assert_eq!(balance, 0, "{level}");
        tx.commit().await.expect("committed");
        next.release().await.expect("held");
    }
}

/// A commit on one node is not visible on the other nodes at once.
#[tokio::test]
async fn lagging_node_does_not_report_lease_as_lost() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let nodes = cluster().await;
    let pools: Vec<MySqlPool> = nodes.iter().map(pool).collect();
    let (first, second) = (locks(&nodes, 0).await, locks(&nodes, 1).await);
    let mut behind = 0;
    for i in 0..150 {
        let name = format!("name/{}", i % 10);
        let lease = first.lease(&name).acquire().await.unwrap_or_else(|e| panic!("{i}: {e}"));
        let mut tx = pools[2].begin().await.expect("a transaction");
        match lease.fence(&mut tx).await {
            // A grant that is still on its way to this node may undo the transaction at its commit.
            Ok(()) => behind += usize::from(tx.commit().await.is_err()),
            Err(error) if error.is_conflict() => behind += 1,
            Err(error) => panic!("{i}: {error}"),
        }
        let lease = second.resume(lease.export().expect("held")).await.unwrap_or_else(|e| panic!("{i}: resumed: {e}"));
        lease.release().await.unwrap_or_else(|e| panic!("{i}: released: {e}"));
    }
    println!("{behind} of 150 fenced transactions reached a node before the lease did");
}

/// An attempt that begins on another node, while a transaction stores a step, sees the step, or the
/// transaction fails.
#[tokio::test]
async fn attempt_on_another_node_sees_committed_steps() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let nodes = cluster().await;
    let pool = pool(&nodes[0]);
    let (first, second) = (locks(&nodes, 0).await, locks(&nodes, 1).await);
    let (here, there) = (Idempotency::new(&first), Idempotency::new(&second).wait(Duration::from_secs(30)));
    let (mut committed, mut failed) = (0, 0);
    for i in 0..500 {
        let (key, request) = (IdempotencyKey::new("alice", format!("k{i}")), Fingerprint::of(["charge"]));
        let Outcome::New(attempt) = here.attempt(&key, &request).await.expect("attempt") else {
            panic!("{i}: nobody has asked before");
        };
        let mut tx = pool.begin().await.expect("a transaction");
        attempt.record_step(&mut tx, "charge", &1).await.expect("step");
        let name = attempt.lease().name().to_string();
        assert!(second.evict(&name, attempt.token()).await.expect("evict"));
        let commit = async {
            // The commit meets the beginning of the next attempt.
            delay(Duration::from_micros(1000 + i % 100 * 15)).await;
            tx.commit().await
        };
        let next = async {
            let Outcome::New(next) = soon("the next attempt", there.attempt(&key, &request)).await.expect("attempt")
            else {
                panic!("{i}: the first attempt has not ended");
            };
            next.recall::<i64>("charge").await.expect("recall")
        };
        let (commit, seen) = tokio::join!(commit, next);
        assert_eq!(seen, commit.as_ref().ok().map(|()| 1), "{i}: {commit:?}");
        *if commit.is_ok() { &mut committed } else { &mut failed } += 1;
    }
    println!("{committed} steps were seen, {failed} failed");
}

/// Retries on all nodes raise one row: each run that succeeds has taken effect, although other
/// nodes abort its transactions, also at the commit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_successful_retry_counts_on_all_nodes() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let nodes = cluster().await;
    let first = pool(&nodes[0]);
    execute(&first, "CREATE TABLE tally (id INT PRIMARY KEY, value BIGINT NOT NULL); INSERT INTO tally VALUES (1, 0)")
        .await;
    for node in &nodes {
        // A node creates the table some time after the first one has.
        number(&pool(node), "SELECT COUNT(*) FROM tally").await;
    }
    let (done, runs) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut clients = JoinSet::new();
    for client in 0..6 {
        let (pool, done, runs) = (pool(&nodes[client % 3]), Arc::clone(&done), Arc::clone(&runs));
        clients.spawn(async move {
            for _ in 0..*TIMES / 6 {
                let raise = async |tx: &mut Transaction<'_, MySql>| {
                    runs.fetch_add(1, Ordering::Relaxed);
                    sqlx::query("UPDATE tally SET value = value + 1").execute(&mut **tx).await?;
                    Ok::<_, Error>(())
                };
                match Retry::new().run(&pool, raise).await {
                    Ok(()) => _ = done.fetch_add(1, Ordering::Relaxed),
                    // Every attempt was rolled back.
                    Err(error) => assert!(error.is_conflict(), "{error:?}"),
                }
            }
        });
    }
    clients.join_all().await;
    let (done, runs) = (done.load(Ordering::Relaxed), runs.load(Ordering::Relaxed));
    assert_eq!(number(&first, "SELECT value FROM tally").await, done);
    println!("{done} increments in {runs} transactions");
}

/// An acquisition joins the lease of its owner on one node, while the lease is released on another
/// and handed over.
#[tokio::test]
async fn owner_does_not_join_lease_handed_over_elsewhere() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let nodes = cluster().await;
    let (first, second, third) = (locks(&nodes, 0).await, locks(&nodes, 1).await, locks(&nodes, 2).await);
    let joiner = locks(&nodes, 0).await;
    let mut joined = 0;
    for i in 0..200 {
        let (owner, name) = (Owner::random(), format!("name/{i}"));
        let one = first.lease(&name).owner(owner).acquire().await.expect("acquire");
        let two = second.lease(&name).owner(owner).acquire().await.expect("acquire again");
        one.release().await.expect("release");
        let waiter = tokio::spawn(third.lease(&name).acquire());
        until("a waiter", async || first.waiters(&name).await.expect("waiters").len() == 1).await;
        let release = async {
            delay(Duration::from_micros(i % 100 * 30)).await;
            two.release().await
        };
        let join = joiner.lease(&name).owner(owner).try_acquire();
        let (release, join) = tokio::join!(release, join);
        release.expect("release");
        let holders = second.holders(&name).await.expect("holders");
        let tokens: BTreeSet<_> = holders.iter().map(|holder| holder.token).collect();
        assert!(tokens.len() <= 1, "{i}: {holders:?}");
        if let Some(lease) = join.expect("an answer") {
            joined += 1;
            lease.release().await.expect("release");
        }
        soon("the hand-over", waiter).await.expect("no panic").expect("acquire").release().await.expect("release");
    }
    println!("{joined} of 200 joined");
}

/// Readers and writers on all nodes: each grant is in force until its release.
#[tokio::test]
async fn grants_of_all_nodes_stay_in_force() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let nodes = cluster().await;
    let inside = Arc::new(AtomicI64::new(0));
    let mut clients = JoinSet::new();
    for client in 0..6 {
        let (locks, inside) = (locks(&nodes, client % 3).await, Arc::clone(&inside));
        clients.spawn(async move {
            let mut is_reader = client % 2 == 0;
            for i in 0..*TIMES / 6 {
                is_reader = !is_reader;
                let request = locks.lease("a");
                let request = if is_reader { request.shared() } else { request };
                let lease = soon("a grant", request.acquire()).await.expect("acquire");
                // A writer counts as many readers.
                let (weight, limit) = if is_reader { (1, 1000) } else { (1000, 1) };
                assert!(inside.fetch_add(weight, Ordering::SeqCst) < limit, "{client}, {i}: two holders");
                yield_now().await;
                inside.fetch_sub(weight, Ordering::SeqCst);
                lease.release().await.unwrap_or_else(|e| panic!("{client}, {i}: {e}"));
            }
        });
    }
    clients.join_all().await;
}

#[tokio::test]
async fn galera_refuses_session_locks_and_minority_grants_nothing() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let mut nodes = cluster().await;
    for first in 0..3 {
        let refused = locks(&nodes, first).await.session("a").try_acquire().await;
        assert!(matches!(refused, Err(Error::Unsupported { .. })), "node {first}");
    }
    let held = locks(&nodes, 0).await;
    let lease = held.lease("a").ttl(Duration::from_secs(60)).acquire().await.expect("acquired");
    nodes[0].kill();
    // Its client continues on another node.
    soon("a renewal elsewhere", async {
        while lease.extend(Duration::from_secs(60)).await.is_err() {
            assert!(lease.is_held());
            sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    lease.release().await.expect("it was held all the time");
    nodes[1].kill();
    // The last one has no majority: whatever it says, it must not grant.
    let alone = on(&nodes[2].url()).build();
    let asked = soon("an answer", alone.lease("b").try_acquire()).await;
    assert!(matches!(asked, Err(Error::Unavailable { .. } | Error::Unknown { .. })), "{asked:?}");
}
