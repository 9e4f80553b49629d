//! Purging of names and records whose retention has passed, and of nothing else.
//!
//! Promises: 4.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sqlock::Error;
use sqlock::idempotency::{Attempt, Fingerprint, Idempotency, IdempotencyKey, Outcome};
use sqlx::{AssertSqlSafe, Pool};
use tokio::task::JoinSet;

use super::fence::run;
use crate::support::{BRIEF, Database, LONG, SOON, builder, connect, fresh, soon, until};
use crate::{DATABASE, Sql};

/// Returns the number of names in the table.
async fn rows(pool: &Pool<Sql>) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM sqlock_lease").fetch_one(pool).await.expect("count the rows")
}

#[tokio::test]
async fn sweep_purges_only_names_past_the_retention() {
    let db = fresh().await;
    let pool = db.pool().await;
    let locks = db.locks().await;
    let held = locks.lease("held").ttl(LONG).acquire().await.expect("acquire");
    let kept = locks.lease("kept").hold_at_least(LONG).acquire().await.expect("acquire");
    kept.release().await.expect("release");
    // None of the four is free before this.
    let freed = Instant::now();
    let expired = locks.lease("expired").ttl(Duration::from_millis(100)).renew(false).acquire().await.expect("acquire");
    soon("the loss", expired.lost()).await;
    for name in ["free/1", "free/2", "free/3"] {
        locks.lease(name).ttl(LONG).acquire().await.expect("acquire").release().await.expect("release");
    }
    assert_eq!(rows(&pool).await, 6);
    // By default, an hour.
    assert_eq!(locks.sweeper().sweep().await.expect("sweep"), 0);
    assert_eq!(rows(&pool).await, 6);

    let retention = Duration::from_secs(2);
    let mut purged = 0;
    while purged < 4 {
        let swept = locks.sweeper().retention(retention).sweep().await.expect("sweep");
        assert!(swept == 0 || freed.elapsed() >= retention, "purged after {:?}", freed.elapsed());
        purged += swept;
        assert!(freed.elapsed() < SOON, "only {purged} were purged");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!((purged, rows(&pool).await), (4, 2));
    assert_eq!(locks.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep"), 0);
    let listed = locks.list("").await.expect("list");
    assert_eq!(listed.iter().map(|info| info.name.as_str()).collect::<Vec<_>>(), ["held", "kept"]);
    held.extend(LONG).await.expect("still held");
    held.release().await.expect("ours to the end");
    drop(expired);
}

#[tokio::test]
async fn sweep_purges_only_clients_without_leases() {
    let db = fresh().await;
    let pool = db.pool().await;
    let locks = db.locks().await;
    for id in ["holder", "idle/1", "idle/2", "idle/3", "sharer"] {
        let sql = AssertSqlSafe(format!("INSERT INTO sqlock_client (id, beat_at) VALUES ('{id}', 0)"));
        sqlx::query(sql).execute(&pool).await.expect("insert");
    }
    // The sweep reads each name, and each client, as a range of its own.
    let mut held = Vec::new();
    for name in ["a", "b", "c"] {
        held.push(locks.lease(name).ttl(LONG).acquire().await.expect("acquire"));
    }
    let shared = locks.lease("d").ttl(LONG).shared().acquire().await.expect("acquire");
    sqlx::query("UPDATE sqlock_lease SET client = 'holder' WHERE name = 'b'").execute(&pool).await.expect("update");
    sqlx::query("UPDATE sqlock_entry SET client = 'sharer'").execute(&pool).await.expect("update");

    locks.sweeper().retention(LONG).batch(1).sweep().await.expect("sweep");

    let stale = "SELECT id FROM sqlock_client WHERE beat_at = 0 ORDER BY id";
    let stale: Vec<String> = sqlx::query_scalar(stale).fetch_all(&pool).await.expect("clients");
    assert_eq!(stale, ["holder", "sharer"]);
    drop((held, shared));
}

/// The host of a client was stopped for hours, and its clock with it: the client relies on leases of
/// which the sweeper has purged one. It learns of that although another lease still lasts.
#[tokio::test]
async fn client_is_told_of_purged_leases() {
    let db = fresh().await;
    let pool = db.pool().await;
    let locks = db.locks().await;
    let day = Duration::from_secs(24 * 3600);
    let lasting = locks.lease("lasting").ttl(day).acquire().await.expect("acquire");
    let purged = locks.lease("purged").ttl(BRIEF).acquire().await.expect("acquire");
    let shared = locks.lease("shared").ttl(BRIEF).shared().acquire().await.expect("acquire");
    let registered = async || {
        sqlx::query_scalar::<Sql, i64>("SELECT count(*) FROM sqlock_client").fetch_one(&pool).await.expect("count") == 1
    };
    until("a heartbeat", registered).await;
    let sweeper = locks.sweeper().retention(Duration::from_secs(3600));
    // A heartbeat may come between the statements.
    let is_purged = async || {
        for sql in [
            "UPDATE sqlock_lease SET token = 1, expires_at = 1 WHERE name <> 'lasting'",
            "UPDATE sqlock_entry SET token = 1, expires_at = 1",
            "UPDATE sqlock_client SET beat_at = beat_at - 7200000000",
        ] {
            run(&pool, sql).await;
        }
        sweeper.sweep().await.expect("sweep");
        rows(&pool).await == 1
    };
    until("a purged lease", is_purged).await;
    soon("the loss", purged.lost()).await;
    soon("the loss", shared.lost()).await;
    drop(lasting);
}

#[tokio::test]
async fn sweep_repeats_batches_until_nothing_is_left() {
    let db = fresh().await;
    let pool = db.pool().await;
    let locks = db.locks().await;
    for batch in [0, 1, 3, 10, 500] {
        let mut taken = JoinSet::new();
        for i in 0..10 {
            let request = locks.lease(format!("name/{i}")).ttl(LONG);
            taken.spawn(async move { request.acquire().await.expect("acquire").release().await.expect("release") });
        }
        taken.join_all().await;
        assert_eq!(rows(&pool).await, 10);
        // SQLite's clock counts in milliseconds: a name must have been free for one.
        tokio::time::sleep(Duration::from_millis(5)).await;
        let purged = locks.sweeper().retention(Duration::ZERO).batch(batch).sweep().await.expect("sweep");
        assert_eq!((purged, rows(&pool).await), (10, 0), "in batches of {batch}");
    }
}

/// The state that several sweepers and a storm of holders share.
#[derive(Default)]
struct Record {
    tokens: Mutex<HashMap<String, i64>>,
    over: AtomicBool,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_sweepers_keep_live_names_and_token_order() {
    let db = fresh().await;
    let pool = db.pool().await;
    let record = Arc::new(Record::default());

    let mut sweepers = JoinSet::new();
    for batch in [1, 4, 500] {
        let (locks, record) = (db.locks().await, Arc::clone(&record));
        sweepers.spawn(async move {
            let sweeper = locks.sweeper().retention(Duration::ZERO).batch(batch);
            let mut purged = 0;
            while !record.over.load(Ordering::SeqCst) {
                purged += sweeper.sweep().await.expect("sweep");
            }
            purged
        });
    }

    let mut holders = JoinSet::new();
    for client in 0..3 {
        let locks = db.locks().await;
        for task in 0..4 {
            let (locks, record) = (locks.clone(), Arc::clone(&record));
            holders.spawn(async move {
                for turn in 0..40 {
                    let name = format!("name/{}", (client + task * 3 + turn * 5) % 7);
                    let lease = soon("the turn", locks.lease(&name).ttl(LONG).acquire()).await.expect("acquire");
                    let token = lease.token().get();
                    let last = record.tokens.lock().expect("no panic").insert(name.clone(), token);
                    assert!(last < Some(token), "{name}: {token} after {last:?}");
                    if turn % 4 == 0 {
                        lease.extend(LONG).await.expect("nothing alive is purged");
                    }
                    lease.release().await.expect("ours to the end");
                }
            });
        }
    }
    while let Some(holder) = holders.join_next().await {
        holder.expect("no panic");
    }
    record.over.store(true, Ordering::SeqCst);
    let mut purged = 0;
    while let Some(sweeper) = sweepers.join_next().await {
        purged += sweeper.expect("no panic");
    }
    assert!(purged > 0, "the sweepers and the holders never met");
    assert!(rows(&pool).await <= 7);
}

#[tokio::test]
async fn background_sweeper_runs_until_dropped() {
    let db = fresh().await;
    let pool = db.pool().await;
    // The answer to a list follows a sweep in progress.
    let locks = builder(connect(&db.url, 1).await).connections(1).build();
    let visit = async || {
        locks.lease("a").ttl(LONG).acquire().await.expect("acquire").release().await.expect("release");
    };
    let sweeping = locks.sweeper().every(Duration::from_millis(20)).retention(Duration::ZERO).start();
    for _ in 0..3 {
        visit().await;
        until("the purge", async || rows(&pool).await == 0).await;
    }
    drop(sweeping);
    locks.list("").await.expect("list");
    visit().await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(rows(&pool).await, 1);
}

/// A sweeper alone does not keep its client and the connections alive.
#[tokio::test]
async fn background_sweeper_ends_with_its_client() {
    let mut db = fresh().await;
    let counter = super::connection_counter::ConnectionCounter::of(&mut db).await;
    let locks = db.locks().await;
    locks.lease("a").acquire().await.expect("acquire").release().await.expect("release");
    assert!(counter.connections().await > 0);
    let sweeping = locks.sweeper().every(Duration::from_millis(50)).start();
    drop(locks);
    until("the end of the connections", async || counter.connections().await == 0).await;
    drop(sweeping);
}

/// Requests, each under a key of its own.
struct Requests {
    pool: Pool<Sql>,
    by: Idempotency,
}

impl Requests {
    fn key(number: u32) -> IdempotencyKey {
        IdempotencyKey::new("alice", format!("order-{number}"))
    }

    async fn run(&self, number: u32) -> Outcome<u32> {
        let request = Fingerprint::of(["charge"]);
        self.by.run(&self.pool, &Self::key(number), &request, async |_| Ok::<_, Error>(number)).await.expect("run")
    }

    async fn attempt(&self, number: u32) -> Attempt {
        match self.by.attempt(&Self::key(number), &Fingerprint::of(["charge"])).await.expect("attempt") {
            Outcome::New(attempt) => attempt,
            other => panic!("{other:?}"),
        }
    }

    /// Begins an attempt that has done a step.
    async fn attempt_with_a_step(&self, number: u32) -> Attempt {
        let attempt = self.attempt(number).await;
        attempt.step("reserve", async || Ok::<_, Error>(number)).await.expect("step");
        attempt
    }

    async fn state(&self, number: u32) -> Option<&'static str> {
        self.by.inspect(&Self::key(number)).await.expect("inspect").map(|record| record.state.as_str())
    }

    /// Ages all records beyond their retention.
    async fn grow_old(&self) {
        run(&self.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    }

    /// Returns the number of records and steps.
    async fn rows(&self) -> (i64, i64) {
        let records = sqlx::query_scalar("SELECT count(*) FROM sqlock_idem").fetch_one(&self.pool).await;
        let steps = sqlx::query_scalar("SELECT count(*) FROM sqlock_idem_step").fetch_one(&self.pool).await;
        (records.expect("count the records"), steps.expect("count the steps"))
    }
}

#[tokio::test]
async fn expired_requests_are_purged_with_their_steps() {
    let db = fresh().await;
    let locks = db.locks().await;
    let requests = Requests { pool: db.pool().await, by: Idempotency::new(&locks) };
    for batch in [0, 1, 3, 500] {
        for number in 0..5 {
            assert_eq!(requests.run(number).await, Outcome::New(number));
        }
        for number in 5..8 {
            requests.attempt_with_a_step(number).await.complete(&number).await.expect("complete");
        }
        for _ in 0..2 {
            requests.by.issue("alice", LONG).await.expect("issue");
        }
        // Nor do the leases of the attempts, which have just been free.
        assert_eq!(locks.sweeper().batch(batch).sweep().await.expect("sweep"), 0, "all are still replayed");
        assert_eq!(requests.rows().await, (10, 3));
        assert_eq!(requests.run(0).await, Outcome::Replay(0));
        requests.grow_old().await;
        assert_eq!(locks.sweeper().batch(batch).sweep().await.expect("sweep"), 10, "in batches of {batch}");
        assert_eq!(requests.rows().await, (0, 0));
    }
}

/// Stores this many expired records, at most 100,000.
async fn insert_expired(pool: &Pool<Sql>, count: u32) {
    let digit = (0..10).map(|d| format!("SELECT {d} AS d")).collect::<Vec<_>>().join(" UNION ALL ");
    let tables = ["a", "b", "c", "e", "f"].map(|name| format!("({digit}) AS {name}")).join(" CROSS JOIN ");
    let insert = format!(
        "INSERT INTO sqlock_idem (id, namespace, principal, request_key, fingerprint, state, token, attempts,
                                  permanent, issued_until, created_at, expires_at)
         SELECT CAST(i AS CHAR(20)), 'payments', 'alice', CAST(i AS CHAR(20)), {}, 'done', 0, 0, 0, 0, 1, 1
           FROM (SELECT a.d + 10 * b.d + 100 * c.d + 1000 * e.d + 10000 * f.d AS i FROM {tables}) AS n
          WHERE i < {count}",
        if DATABASE == Database::Postgres { "'\\x00'::bytea" } else { "X'00'" }
    );
    sqlx::raw_sql(AssertSqlSafe(insert)).execute(pool).await.expect("insert");
}

/// On PostgreSQL and SQLite, a statement does not take this many parameters. InnoDB would need half
/// a minute to delete as many records.
const EXPIRED_RECORDS: u32 = match DATABASE {
    Database::Postgres | Database::Sqlite => 66_000,
    Database::MySql | Database::MariaDb => 5_000,
};

#[tokio::test]
async fn large_batch_purges_every_expired_record() {
    let db = fresh().await;
    let locks = db.locks().await;
    let requests = Requests { pool: db.pool().await, by: Idempotency::new(&locks) };
    insert_expired(&requests.pool, EXPIRED_RECORDS).await;
    locks.sweeper().batch(100_000).sweep().await.expect("sweep");
    assert_eq!(requests.rows().await.0, 0);
}

#[tokio::test]
async fn unfinished_requests_are_never_purged() {
    let db = fresh().await;
    let locks = db.locks().await;
    let requests = Requests { pool: db.pool().await, by: Idempotency::new(&locks) };
    let at_work = requests.attempt_with_a_step(1).await;
    drop(requests.attempt_with_a_step(2).await); // as if its process had died
    requests.attempt_with_a_step(3).await.unknown().await.expect("unknown");
    requests.grow_old().await;
    let sweeper = locks.sweeper().batch(1);
    assert_eq!(sweeper.sweep().await.expect("sweep"), 0);
    assert_eq!(requests.rows().await, (3, 3));
    assert_eq!(requests.by.purge().await.expect("purge"), 0);
    for (number, state) in [(1, "started"), (2, "started"), (3, "unknown")] {
        assert_eq!(requests.state(number).await, Some(state));
    }
    // The record is purged after its end.
    at_work.complete(&1).await.expect("complete");
    requests.grow_old().await;
    assert_eq!(sweeper.sweep().await.expect("sweep"), 1);
    assert_eq!(requests.rows().await, (2, 2));
}

#[tokio::test]
async fn reused_keys_are_not_purged() {
    let db = fresh().await;
    let locks = db.locks().await;
    let requests = Requests { pool: db.pool().await, by: Idempotency::new(&locks) };
    for number in 0..2 {
        requests.attempt_with_a_step(number).await.complete(&number).await.expect("complete");
    }
    requests.grow_old().await;
    // The step of the earlier request does not belong to this request.
    let anew = requests.attempt(0).await;
    anew.step("pay", async || Ok::<_, Error>(0)).await.expect("step");
    anew.complete(&0).await.expect("complete");
    assert_eq!(requests.by.purge().await.expect("purge"), 1);
    assert_eq!((requests.state(0).await, requests.state(1).await), (Some("done"), None));
    let record = requests.by.inspect(&Requests::key(0)).await.expect("inspect").expect("a record");
    assert_eq!(record.steps, ["pay"]);
    assert_eq!(requests.rows().await, (1, 1));
}

/// A key may be reused between the SELECT of a sweeper and its DELETE. The new request must not be
/// purged.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sweepers_spare_new_requests_of_purged_keys() {
    let db = fresh().await;
    let pool = db.pool().await;
    // A sweeper may lock an expired record for longer than a request waits by default.
    let by = Idempotency::new(&db.locks().await).wait(LONG);
    let requests = Requests { pool: pool.clone(), by };
    let over = Arc::new(AtomicBool::new(false));
    let mut sweepers = JoinSet::new();
    for batch in [1, 4] {
        let (locks, over) = (db.locks().await, Arc::clone(&over));
        sweepers.spawn(async move {
            let mut purged = 0;
            while !over.load(Ordering::SeqCst) {
                purged += locks.sweeper().batch(batch).sweep().await.expect("sweep");
            }
            purged
        });
    }
    for round in 0..30 {
        for number in 0..4 {
            let answer = soon("the request", requests.run(number)).await;
            assert_eq!(answer, Outcome::New(number), "round {round}: an expired result was replayed");
            assert_eq!(soon("the request", requests.run(number)).await, Outcome::Replay(number), "round {round}");
        }
        requests.grow_old().await;
    }
    until("the purge of the last ones", async || requests.rows().await.0 == 0).await;
    over.store(true, Ordering::SeqCst);
    let purged: u64 = sweepers.join_all().await.into_iter().sum();
    assert!(purged >= 4, "the sweepers and the requests never met");
}
