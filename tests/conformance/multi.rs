//! Several names at once: the caller gets all or none, and callers do not wait for each other in a
//! circle, whatever order they give. The names are acquired in the order of their bytes, each in
//! its queue; the request holds the names before the one for which it waits.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use sqlock::lease::LeaseAllRequest;
use sqlock::{Error, FencingToken, LeaseAll, Locks, LossCause, Owner};
use sqlx::{AssertSqlSafe, Pool};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::support::blocked::block_past;
use crate::support::critical_section::Visits;
use crate::support::worker::Worker;
use crate::support::{
    BRIEF, Database, LONG, SOON, TestDatabase, builder, connect, fresh, is_free, renewed_twice, soon, until,
    until_waiters,
};
use crate::{DATABASE, Sql};

fn all(locks: &Locks, names: &[&str]) -> LeaseAllRequest {
    locks.lease_all(names.iter().copied()).ttl(LONG)
}

async fn taken(request: LeaseAllRequest) -> LeaseAll {
    soon("the grants", request.acquire()).await.expect("acquire")
}

/// Waits until another owner can acquire each of the names.
async fn until_free(locks: &Locks, names: &[&str]) {
    for name in names {
        until("the end of the lease", async || is_free(locks, name).await).await;
    }
}

/// Spawns a request for several names, and waits until it has joined the queue of one of them,
/// behind `before` waiters.
async fn enqueue(observer: &Locks, request: LeaseAllRequest, name: &str, before: usize) -> JoinHandle<LeaseAll> {
    let waits = tokio::spawn(async move { request.acquire().await.expect("its turn comes") });
    until_waiters(observer, name, before + 1).await;
    waits
}

async fn granted<T>(waits: JoinHandle<T>) -> T {
    soon("its turn", waits).await.expect("no panic")
}

async fn places(db: &TestDatabase) -> i64 {
    let pool: Pool<Sql> = db.pool_of(1).await;
    sqlx::query_scalar("SELECT count(*) FROM sqlock_entry").fetch_one(&pool).await.expect("places can be counted")
}

async fn until_no_place_is_left(db: &TestDatabase) {
    until("the end of all lines", async || places(db).await == 0).await;
}

#[tokio::test]
async fn all_names_are_taken_or_none() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let b = theirs.lease("b").ttl(LONG).acquire().await.expect("acquire");
    assert!(all(&ours, &["a", "b", "c"]).try_acquire().await.expect("try").is_none());
    assert!(is_free(&theirs, "a").await);
    assert!(is_free(&theirs, "c").await);
    b.release().await.expect("release");

    let held = all(&ours, &["c", "a", "b", "a"]).try_acquire().await.expect("try").expect("all are free");
    let names: Vec<&str> = held.tokens().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a", "b", "c"]);
    assert!(held.is_held() && held.remaining() > LONG / 2);
    for name in names {
        assert!(!is_free(&theirs, name).await);
        let info = theirs.inspect(name).await.expect("inspect").expect("held");
        assert_eq!((info.owner, Some(info.token)), (Some(held.owner()), held.token(name)));
    }
    assert_eq!(held.token("d"), None);
    held.release().await.expect("release");
    for name in ["a", "b", "c"] {
        assert!(is_free(&theirs, name).await);
    }
}

#[tokio::test]
async fn invalid_requests_are_refused_before_any_statement() {
    let db = fresh().await;
    let locks = db.locks().await;
    let none = all(&locks, &[]).try_acquire().await;
    assert!(matches!(none, Err(Error::Names { given: 0, most: 64 })), "{none:?}");
    let many: Vec<String> = (0..65).map(|i| i.to_string()).collect();
    let too_many = locks.lease_all(many.clone()).acquire().await;
    assert!(matches!(too_many, Err(Error::Names { given: 65, .. })), "{too_many:?}");
    let bad = all(&locks, &["a", ""]).acquire().await;
    assert!(matches!(bad, Err(Error::InvalidName { .. })), "{bad:?}");
    let brief = locks.lease_all(["a"]).ttl(Duration::ZERO).acquire().await;
    assert!(matches!(brief, Err(Error::OutOfRange { .. })), "{brief:?}");

    let most = soon("64 names", locks.lease_all(many.into_iter().take(64)).acquire()).await.expect("acquire");
    assert_eq!(most.tokens().len(), 64);
    most.release().await.expect("release");
}

#[tokio::test]
async fn max_hold_counts_from_the_last_grant() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let max_hold = Duration::from_secs(2);
    let b = theirs.lease("b").ttl(LONG).acquire().await.expect("acquire");
    let waits = enqueue(&theirs, all(&ours, &["a", "b"]).max_hold(max_hold), "b", 0).await;
    // The wait for the last name lasts longer than the work may.
    sleep(max_hold + Duration::from_millis(500)).await;
    let released_at = Instant::now();
    b.release().await.expect("release");
    let held = granted(waits).await;
    assert_eq!(soon("the loss", held.lost()).await, LossCause::MaxHold);
    assert!(released_at.elapsed() >= max_hold, "{:?}", released_at.elapsed());
    for name in ["a", "b"] {
        soon("the turn", theirs.lease(name).acquire()).await.expect("acquire").release().await.expect("release");
    }
}

#[tokio::test]
async fn hold_at_least_applies_after_all_grants() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let request = || all(&ours, &["a", "b"]).hold_at_least(LONG);
    let b = theirs.lease("b").ttl(LONG).acquire().await.expect("acquire");
    assert!(request().try_acquire().await.expect("try").is_none());
    // The request held it, and failed.
    assert!(is_free(&theirs, "a").await);
    b.release().await.expect("release");
    taken(request()).await.release().await.expect("release");
    assert!(!is_free(&theirs, "a").await && !is_free(&theirs, "b").await);
}

#[tokio::test]
async fn exclusive_shared_and_permits_are_held_together() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let uploads = |locks: &Locks| locks.semaphore("uploads", 2).ttl(LONG);
    let reading = theirs.lease("catalogue").shared().ttl(LONG).acquire().await.expect("acquire");
    let permit = uploads(&theirs).acquire().await.expect("acquire");
    let request = || all(&ours, &["report"]).shared(["catalogue"]).permits(&uploads(&ours), 1);
    let held = taken(request()).await;
    let names: Vec<&str> = held.tokens().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["catalogue", "report", "uploads"]);
    let pool: Pool<Sql> = db.pool_of(1).await;
    let mut tx = pool.begin().await.expect("begin");
    held.fence(&mut tx).await.expect("all are held");
    tx.rollback().await.expect("rollback");

    // The last permit is taken, and the attempt leaves nothing behind.
    let again = theirs.lease_all(["aside"]).shared(["catalogue"]).permits(&uploads(&theirs), 1);
    assert!(again.try_acquire().await.expect("try").is_none());
    assert!(is_free(&theirs, "aside").await && !is_free(&theirs, "report").await);
    reading.release().await.expect("release");
    // Our own share is left.
    assert!(!is_free(&theirs, "catalogue").await);
    held.release().await.expect("release");
    until_free(&theirs, &["catalogue", "report"]).await;
    let both = uploads(&ours).try_acquire_many(2).await.expect("try");
    assert!(both.is_none());
    permit.release().await.expect("release");
    soon("both", uploads(&ours).acquire_many(2)).await.expect("acquire").release().await.expect("release");
}

#[tokio::test]
async fn name_requested_in_two_ways_is_refused() {
    let db = fresh().await;
    let locks = db.locks().await;
    let two = locks.semaphore("a", 2);
    for request in [
        locks.lease_all(["a"]).shared(["a"]),
        locks.lease_all(["a"]).permits(&two, 1),
        locks.lease_all(["b"]).permits(&two, 1).permits(&locks.semaphore("a", 3), 1),
    ] {
        let refused = request.acquire().await;
        assert!(matches!(&refused, Err(Error::Conversion { name, .. }) if name.as_str() == "a"), "{refused:?}");
    }
    for request in [locks.lease_all(["b"]).permits(&two, 3), locks.lease_all(["b"]).permits(&two, 1).permits(&two, 2)] {
        let refused = request.acquire().await;
        assert!(matches!(refused, Err(Error::Permits { asked: 3, permits: 2, .. })), "{refused:?}");
    }
    let elsewhere = db.locks().await.semaphore("b", 2);
    let refused = locks.lease_all(["a"]).permits(&elsewhere, 1).acquire().await;
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    let repeated = taken(locks.lease_all(["b", "b"]).permits(&two, 1).permits(&two, 1)).await;
    assert_eq!(repeated.tokens().len(), 2);
    assert!(two.try_acquire().await.expect("try").is_none(), "permits add up");
    repeated.release().await.expect("release");
}

#[tokio::test]
async fn lost_lease_ends_the_wait_for_others() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let b = theirs.lease("b").ttl(LONG).acquire().await.expect("acquire");
    let waits = tokio::spawn(all(&ours, &["a", "b"]).acquire());
    until_waiters(&theirs, "b", 1).await;
    let token = theirs.inspect("a").await.expect("inspect").expect("held").token;
    assert!(theirs.evict("a", token).await.expect("evict"));
    let lost = soon("the end of the wait", waits).await.expect("no panic");
    assert!(matches!(&lost, Err(Error::Lost { name, .. }) if name.as_str() == "a"), "{lost:?}");
    until_waiters(&theirs, "b", 0).await;
    b.release().await.expect("release");
}

#[tokio::test]
async fn wait_for_several_names_is_reported() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let b = theirs.lease("b").ttl(LONG).label("theirs").acquire().await.expect("acquire");
    let (reports, mut heard) = tokio::sync::mpsc::unbounded_channel();
    let report = move |waiting: &sqlock::inspect::Waiting| {
        let _ = reports.send((waiting.ahead, waiting.holder.as_ref().map(|holder| holder.label.clone())));
    };
    let waits = enqueue(&theirs, all(&ours, &["a", "b"]).while_waiting(report), "b", 0).await;
    let (ahead, label) = soon("a report", heard.recv()).await.expect("the request waits");
    assert_eq!((ahead, label.as_deref()), (0, Some("theirs")));
    b.release().await.expect("release");
    granted(waits).await.release().await.expect("release");
}

#[tokio::test]
async fn waiting_request_holds_only_names_before_it() {
    let db = fresh().await;
    let (ours, theirs, others) = (db.locks().await, db.locks().await, db.locks().await);
    let b = theirs.lease("b").ttl(LONG).acquire().await.expect("acquire");
    let waits = enqueue(&theirs, all(&ours, &["c", "a", "b"]), "b", 0).await;
    // It waits for this name only, and other clients can acquire the last one.
    let a = theirs.inspect("a").await.expect("inspect").expect("held");
    until_waiters(&theirs, "a", 0).await;
    until_waiters(&theirs, "c", 0).await;
    assert!(is_free(&theirs, "c").await);
    let later = tokio::spawn(others.lease("a").ttl(LONG).acquire());
    until_waiters(&theirs, "a", 1).await;

    b.release().await.expect("release");
    let held = granted(waits).await;
    assert!(!later.is_finished());
    let token = held.token("a").expect("a token");
    assert_eq!((token, Some(held.owner())), (a.token, a.owner), "held all the time");
    held.release().await.expect("release");
    let later = granted(later).await.expect("acquire");
    assert!(later.token() > token);
    later.release().await.expect("release");
    until_no_place_is_left(&db).await;
    assert!(is_free(&theirs, "b").await && is_free(&theirs, "c").await);
}

#[tokio::test]
async fn requests_for_several_names_keep_arrival_order() {
    let db = fresh().await;
    let ours = db.locks().await;
    let (one, two, three) = (db.locks().await, db.locks().await, db.locks().await);
    let held = taken(all(&ours, &["a", "b", "c"])).await;
    let first = enqueue(&ours, all(&one, &["c", "b"]), "b", 0).await;
    let second = enqueue(&ours, all(&two, &["b", "a"]), "a", 0).await;
    let third = enqueue(&ours, all(&three, &["c", "a"]), "a", 1).await;
    held.release().await.expect("release");
    // The second gets `a`, and waits for `b`.
    let first = granted(first).await;
    until_waiters(&ours, "b", 1).await;
    until_waiters(&ours, "a", 1).await;
    assert!(!second.is_finished() && !third.is_finished());
    first.release().await.expect("release");
    let second = granted(second).await;
    assert!(!third.is_finished());
    let token = second.token("a").expect("a token");
    second.release().await.expect("release");
    let third = granted(third).await;
    assert!(third.token("a").expect("a token") > token);
    third.release().await.expect("release");
    until_no_place_is_left(&db).await;
}

/// If names were taken in the given order, each of two callers would have a name that the other
/// wants next.
#[tokio::test]
async fn opposite_name_orders_do_not_deadlock() {
    let db = fresh().await;
    let mut callers = Vec::new();
    for names in [["a", "b", "c"], ["c", "b", "a"], ["b", "c", "a"]] {
        let locks = db.locks().await;
        callers.push(tokio::spawn(async move {
            for _ in 0..20 {
                all(&locks, &names).acquire().await.expect("acquire").release().await.expect("release");
            }
        }));
    }
    for caller in callers {
        granted(caller).await;
    }
    until_no_place_is_left(&db).await;
}

#[tokio::test]
async fn eight_processes_on_twenty_names_never_overlap() {
    const NAMES: usize = 20;
    const TASKS: usize = 2;
    const COUNT: usize = 12;
    let db = fresh().await;
    let locks = db.locks().await;
    let dir = tempfile::tempdir().expect("a temporary directory");
    for i in 0..NAMES {
        std::fs::create_dir(dir.path().join(format!("n{i:02}"))).expect("a directory");
    }
    let mut workers: Vec<Worker> = (0..8).map(|_| Worker::start(&db.url)).collect();
    for worker in &mut workers {
        worker.tell(&format!("gather together {NAMES} {TASKS} {COUNT} {}", dir.path().display()));
    }
    let mut visits = Visits::default();
    for worker in &mut workers {
        let answer = tokio::time::timeout(SOON * 4, worker.answer_some_time()).await.expect("an end");
        assert!(answer.starts_with("visits"), "{answer}");
        visits = visits.and(Visits::of_line(&answer));
    }
    assert_eq!(visits.count, (8 * TASKS * COUNT) as u64);
    assert!(locks.list("").await.expect("list").is_empty());
    until_no_place_is_left(&db).await;
}

#[tokio::test]
async fn deadline_covers_all_names_and_leaves_nothing() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let held = taken(all(&theirs, &["b", "c"])).await;
    let patience = Duration::from_secs(6);
    let start = std::time::Instant::now();
    let error = all(&ours, &["a", "b", "c"]).wait(patience).acquire().await.expect_err("b and c are held");
    assert!(start.elapsed() >= patience);
    assert!(matches!(&error, Error::Timeout { name, .. } if name.as_str() == "b"), "{error}");
    let error = all(&ours, &["a", "b"]).wait(Duration::ZERO).acquire().await.expect_err("b is held");
    assert!(error.is_timeout(), "{error}");
    until_no_place_is_left(&db).await;
    // The errors wait for the release of "a" for a short time only.
    until_free(&theirs, &["a"]).await;
    held.release().await.expect("release");
}

#[tokio::test]
async fn dropped_waiting_request_releases_its_names() {
    let db = fresh().await;
    let (ours, theirs, others) = (db.locks().await, db.locks().await, db.locks().await);
    let held = taken(all(&theirs, &["b"])).await;
    let waits = enqueue(&theirs, all(&ours, &["a", "b"]), "b", 0).await;
    let behind_a = tokio::spawn(others.lease("a").ttl(LONG).acquire());
    until_waiters(&theirs, "a", 1).await;
    let behind_b = tokio::spawn(others.lease("b").ttl(LONG).acquire());
    until_waiters(&theirs, "b", 2).await;
    waits.abort();
    // The request no longer blocks the queue.
    granted(behind_a).await.expect("acquire").release().await.expect("release");
    held.release().await.expect("release");
    granted(behind_b).await.expect("acquire").release().await.expect("release");
    until_no_place_is_left(&db).await;
    assert!(is_free(&theirs, "a").await && is_free(&theirs, "b").await);
}

#[tokio::test]
async fn dropped_futures_leave_no_lease_or_entry() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    for i in 0..60_u64 {
        let request = all(&ours, &["a", "b", "c"]).acquire();
        if let Ok(held) = tokio::time::timeout(Duration::from_micros(i * 150), request).await {
            held.expect("acquire").release().await.expect("release");
        }
    }
    soon("all names", async {
        for name in ["a", "b", "c"] {
            theirs.lease(name).ttl(LONG).acquire().await.expect("acquire").release().await.expect("release");
        }
    })
    .await;
    until_no_place_is_left(&db).await;
}

#[tokio::test]
async fn killed_waiting_process_frees_its_names_after_ttl() {
    let db = fresh().await;
    let (locks, others) = (db.locks().await, db.locks().await);
    let b = locks.lease("b").ttl(LONG).acquire().await.expect("acquire");
    let mut worker = Worker::start(&db.url);
    worker.tell("gather a,b,c 6000");
    until_waiters(&locks, "b", 1).await;
    let behind_a = tokio::spawn(all(&others, &["a", "c"]).acquire());
    until_waiters(&locks, "a", 1).await;
    let behind_b = tokio::spawn(others.lease("b").ttl(LONG).acquire());
    until_waiters(&locks, "b", 2).await;
    worker.kill();
    granted(behind_a).await.expect("acquire").release().await.expect("release");
    b.release().await.expect("release");
    granted(behind_b).await.expect("acquire").release().await.expect("release");
    until_no_place_is_left(&db).await;
}

#[tokio::test]
async fn killed_holder_frees_all_names_after_ttl() {
    let db = fresh().await;
    let locks = db.locks().await;
    let mut worker = Worker::start(&db.url);
    assert_eq!(worker.ask("gather a,b 5000").await, "gathered");
    let theirs: BTreeMap<String, FencingToken> =
        locks.list("").await.expect("list").into_iter().map(|info| (info.name.to_string(), info.token)).collect();
    assert_eq!(theirs.len(), 2);
    worker.kill();
    let both = taken(all(&locks, &["b", "a"])).await;
    assert!(both.tokens().all(|(name, token)| token > theirs[name.as_str()]));
    both.release().await.expect("release");
}

#[tokio::test]
async fn loss_of_one_lease_loses_all() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let held = taken(all(&ours, &["a", "b"]).ttl(Duration::from_secs(9))).await;
    assert!(theirs.evict("b", held.token("b").expect("a token")).await.expect("evict"));
    let cause = soon("the loss", held.lost()).await;
    assert_eq!(cause, LossCause::Superseded);
    assert!(!held.is_held() && held.remaining().is_zero());
    let error = held.release().await.expect_err("one was lost");
    assert!(matches!(&error, Error::Lost { name, .. } if name.as_str() == "b"), "{error}");
    assert!(is_free(&theirs, "a").await);

    let error = all(&ours, &["a", "b"]).ttl(Duration::from_secs(9)).run(async |held| {
        assert!(theirs.evict("a", held.token("a").expect("a token")).await.expect("evict"));
        std::future::pending::<()>().await;
    });
    let error = soon("the loss", error).await.expect_err("one was lost");
    assert!(error.is_lost(), "{error}");
    let done = all(&ours, &["a", "b"]).run(async |held| held.tokens().len()).await.expect("the work");
    assert_eq!(done, 2);
}

#[tokio::test]
async fn run_polls_no_work_after_the_deadline() {
    let db = fresh().await;
    let (ours, polls) = (db.locks().await, AtomicU32::new(0));
    let request = all(&ours, &["a", "b"]).ttl(Duration::from_secs(5));
    let work = request.run(async |held| block_past(|| held.remaining(), &polls).await);
    assert!(soon("the loss", work).await.expect_err("lost").is_lost());
    assert_eq!(polls.into_inner(), 2);
}

#[tokio::test]
async fn fence_of_several_leases_needs_all() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let pool = db.pool_of(2).await;
    for sql in ["CREATE TABLE account (id INT PRIMARY KEY, balance INT)", "INSERT INTO account VALUES (1, 10), (2, 10)"]
    {
        sqlx::query(AssertSqlSafe(sql.to_owned())).execute(&pool).await.expect("accounts");
    }
    let balances = || sqlx::query_scalar::<Sql, i32>("SELECT balance FROM account ORDER BY id").fetch_all(&pool);
    let held = taken(all(&ours, &["account/1", "account/2"])).await;
    let mut tx = pool.begin().await.expect("begin");
    held.fence(&mut tx).await.expect("fence");
    for sql in [
        "UPDATE account SET balance = balance - 3 WHERE id = 1",
        "UPDATE account SET balance = balance + 3 WHERE id = 2",
    ] {
        sqlx::query(sql).execute(&mut *tx).await.expect("a transfer");
    }
    tx.commit().await.expect("commit");
    assert_eq!(balances().await.expect("balances"), [7, 13]);

    assert!(theirs.evict("account/2", held.token("account/2").expect("a token")).await.expect("evict"));
    let mut tx = pool.begin().await.expect("begin");
    let error = held.fence(&mut tx).await.expect_err("one was lost");
    assert!(error.is_lost(), "{error}");
    tx.rollback().await.expect("rollback");
    let _ = held.release().await;
}

#[tokio::test]
async fn owner_reenters_held_names_in_joint_request() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    Owner::random()
        .scope(async {
            let a = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
            let both = taken(all(&ours, &["a", "b"])).await;
            assert_eq!(both.token("a"), Some(a.token()));
            assert_eq!(both.owner(), a.owner());
            both.release().await.expect("release");
            assert!(!is_free(&theirs, "a").await);

            // This also holds if the request has to wait for the others.
            let b = theirs.lease("b").ttl(LONG).owner(Owner::random()).acquire().await.expect("acquire");
            let request = all(&ours, &["a", "b"]);
            let waits = enqueue(&theirs, request, "b", 0).await;
            b.release().await.expect("release");
            let both = granted(waits).await;
            assert_eq!(both.token("a"), Some(a.token()));
            a.release().await.expect("release");
            assert!(!is_free(&theirs, "a").await);
            both.release().await.expect("release");
        })
        .await;
    until_no_place_is_left(&db).await;
    assert!(is_free(&theirs, "a").await);
}

#[tokio::test]
async fn several_names_keep_later_readers_out() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let reads = theirs.lease("a").ttl(LONG).shared().acquire().await.expect("acquire");
    let waits = enqueue(&theirs, all(&ours, &["a", "b"]), "a", 0).await;
    assert!(theirs.lease("a").ttl(LONG).shared().try_acquire().await.expect("try").is_none());
    reads.release().await.expect("release");
    granted(waits).await.release().await.expect("release");
    let reads = theirs.lease("a").ttl(LONG).shared().acquire().await.expect("acquire");
    reads.release().await.expect("release");
}

#[tokio::test]
async fn shutdown_refuses_waiting_requests_and_leaves_nothing() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let b = theirs.lease("b").ttl(LONG).acquire().await.expect("acquire");
    let waits = tokio::spawn(all(&ours, &["a", "b"]).acquire());
    until_waiters(&theirs, "b", 1).await;
    ours.shutdown().await.expect("shutdown");
    assert_eq!(places(&db).await, 0);
    let answer = granted(waits).await;
    assert!(matches!(answer, Err(Error::Closed)), "{answer:?}");
    let answer = all(&ours, &["a", "b"]).acquire().await;
    assert!(matches!(answer, Err(Error::Closed)), "{answer:?}");
    assert!(is_free(&theirs, "a").await);
    b.release().await.expect("release");
}

#[tokio::test]
async fn several_leases_are_renewed_until_released() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let held = taken(all(&ours, &["a", "b"]).ttl(Duration::from_secs(6))).await;
    tokio::join!(renewed_twice(&theirs, "a"), renewed_twice(&theirs, "b"));
    assert!(held.is_held());
    held.extend(LONG).await.expect("extend");
    assert!(held.remaining() > LONG / 2);
    assert!(!is_free(&theirs, "a").await && !is_free(&theirs, "b").await);
    drop(held);
    until_free(&theirs, &["a", "b"]).await;
}

/// Entries of a crashed client, which no client serves any more.
#[tokio::test]
async fn try_acquire_clears_entries_of_dead_clients() {
    let db = fresh().await;
    let locks = db.locks().await;
    let mut reader = Worker::start(&db.url);
    reader.ask(&format!("as shared a {}", BRIEF.as_millis())).await;
    let mut holder = Worker::start(&db.url);
    holder.hold("b", BRIEF).await;
    let mut waiter = Worker::start(&db.url);
    waiter.tell(&format!("queue b {}", BRIEF.as_millis()));
    assert_eq!(waiter.answer().await, "waiting");
    for worker in [&mut reader, &mut holder, &mut waiter] {
        worker.kill();
    }
    let tries = async {
        loop {
            if let Some(both) = all(&locks, &["a", "b"]).try_acquire().await.expect("try") {
                break both;
            }
            sleep(Duration::from_millis(100)).await;
        }
    };
    soon("both names", tries).await.release().await.expect("release");
}

#[tokio::test]
async fn shared_holder_is_refused_instead_of_deadlocking() {
    let db = fresh().await;
    let locks = db.locks().await;
    let owner = Owner::random();
    let reads = locks.lease("a").ttl(LONG).owner(owner).shared().acquire().await.expect("acquire");
    for error in [
        soon("an answer", all(&locks, &["a", "b"]).owner(owner).acquire()).await.expect_err("it shares a"),
        all(&locks, &["a", "b"]).owner(owner).try_acquire().await.expect_err("it shares a"),
    ] {
        assert!(matches!(&error, Error::Conversion { name, .. } if name.as_str() == "a"), "{error}");
    }
    reads.release().await.expect("release");
    until_no_place_is_left(&db).await;
    assert!(is_free(&locks, "b").await);
}

/// A reader blocks writes to a SQLite file without a write-ahead log: COMMIT is refused. On other
/// databases readers block no writer.
#[tokio::test]
async fn refused_commit_leaves_no_open_transaction() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let pool = db.pool_of(2).await;
    ours.lease("warm").ttl(LONG).acquire().await.expect("acquire").release().await.expect("release");
    let mut reader = pool.begin().await.expect("begin");
    sqlx::query_scalar::<Sql, i64>("SELECT count(*) FROM sqlock_lease").fetch_one(&mut *reader).await.expect("a count");
    let taking = tokio::spawn(all(&ours, &["a", "b"]).acquire());
    if DATABASE == Database::Sqlite {
        // Longer than the busy timeout of the client.
        sleep(Duration::from_millis(3500)).await;
    }
    reader.rollback().await.expect("rollback");
    match soon("an answer", taking).await.expect("no panic") {
        Ok(both) => {
            assert!(!is_free(&theirs, "a").await);
            both.release().await.expect("release");
        }
        Err(error) => assert!(matches!(error, Error::Unavailable { .. }), "{error}"),
    }
    let both = taken(all(&ours, &["a", "b"])).await;
    assert!(!is_free(&theirs, "b").await);
    sqlx::query("CREATE TABLE mine (id INT)").execute(&pool).await.expect("nobody else is writing");
    both.release().await.expect("release");
}

/// A grant counts from the moment at which the database made it, not from a repeated request.
#[tokio::test]
async fn grants_with_lost_replies_end_on_time() {
    const TTL: Duration = Duration::from_secs(20);
    let db = fresh().await;
    let theirs = db.locks().await;
    // SQLite has no network between.
    let (proxy, url) = match DATABASE {
        Database::Sqlite => (None, db.url.clone()),
        _ => {
            let (proxy, url) = super::network::behind_a_reading_proxy(&db.url);
            (Some(proxy), url)
        }
    };
    let ours = builder(connect(&url, 1).await).build();
    let b = theirs.lease("b").ttl(LONG).acquire().await.expect("acquire");
    let request = all(&ours, &["a", "b"]).ttl(TTL).renew(false);
    let waits = enqueue(&theirs, request, "b", 0).await;
    let cut = proxy.as_ref().map(|proxy| proxy.cut_next_reply());
    b.release().await.expect("release");
    if let (Some(proxy), Some(cut)) = (&proxy, cut) {
        soon("the cut", cut.happened()).await;
        proxy.refuse();
        sleep(Duration::from_millis(1500)).await;
        proxy.pass();
    }
    let both = granted(waits).await;
    for name in ["a", "b"] {
        let info = theirs.inspect(name).await.expect("inspect").expect("held");
        let believed = both.remaining();
        assert_eq!(info.owner, Some(both.owner()));
        assert!(believed <= info.remaining, "{info:?}, {believed:?}");
    }
    both.release().await.expect("release");
}
