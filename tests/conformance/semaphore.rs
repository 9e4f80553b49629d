//! Semaphores: holders never exceed the permits, and requests are granted in order.
//!
//! Promises: 7.

use std::time::Duration;

use sqlock::inspect::Mode;
use sqlock::{Error, Lease, Locks, LossCause, Semaphore};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep};

use super::cancel::{CancelFixture, drop_at, everywhere};
use super::shared::{TRY, assert_nothing_is_left, holders};
use crate::DATABASE;
use crate::support::critical_section::{AccessMode, CriticalSection, Visits};
use crate::support::worker::Worker;
use crate::support::{BRIEF, LONG, SOON, fresh, soon, times_out, until, until_waiters};

fn semaphore(locks: &Locks, permits: u32) -> Semaphore {
    locks.semaphore("a", permits).ttl(LONG)
}

async fn taken(semaphore: &Semaphore, permits: u32) -> Lease {
    soon("the grant", semaphore.acquire_many(permits)).await.expect("acquire")
}

/// Spawns a request, and waits until it has joined the queue behind `before` waiters.
async fn enqueue(semaphore: &Semaphore, permits: u32, observer: &Locks, before: usize) -> JoinHandle<Lease> {
    let semaphore = semaphore.clone();
    let waits = tokio::spawn(async move { semaphore.acquire_many(permits).await.expect("its turn comes") });
    until_waiters(observer, "a", before + 1).await;
    waits
}

async fn granted(waits: JoinHandle<Lease>) -> Lease {
    soon("its turn", waits).await.expect("no panic")
}

/// Checks that a try is refused, and that no waiter is granted: a try serves the queue first.
async fn assert_full(semaphore: &Semaphore, observer: &Locks, waiters: usize) {
    assert!(semaphore.try_acquire().await.expect("try").is_none());
    until_waiters(observer, "a", waiters).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn holders_never_exceed_the_permits() {
    const PERMITS: u32 = 3;
    let db = fresh().await;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let inside = CriticalSection::of(dir.path());
    // Two clients here and two processes, of four tasks each; and one that wants two permits.
    let stay = Duration::from_millis(50);
    let mut here = JoinSet::new();
    for _ in 0..2 {
        let locks = db.locks().await;
        for _ in 0..4 {
            here.spawn(inside.clone().come_and_go(locks.clone(), "a".into(), AccessMode::Permits(1, PERMITS), stay));
        }
    }
    let locks = db.locks().await;
    here.spawn(inside.clone().come_and_go(locks.clone(), "a".into(), AccessMode::Permits(2, PERMITS), stay));
    let mut there = [Worker::start(&db.url), Worker::start(&db.url)];
    for worker in &mut there {
        worker.tell(&format!("visit a 1/{PERMITS} 4 {} {}", stay.as_millis(), dir.path().display()));
    }
    let (mut most, mut most_inside) = (0, 0);
    // For a while, and until all permits were in use at once.
    let until = Instant::now() + Duration::from_secs(3);
    while Instant::now() < until || most < PERMITS || most_inside < PERMITS {
        let taken: u32 = holders(&locks).await.iter().map(permits_of).sum();
        assert!(taken <= PERMITS, "{taken} of {PERMITS}");
        assert!(Instant::now() < until + SOON, "only {most} of {PERMITS} permits taken, {most_inside} in use");
        (most, most_inside) = (most.max(taken), most_inside.max(inside.permits_inside()));
        sleep(Duration::from_millis(5)).await;
    }
    inside.close();
    let mut visits = Visits::default();
    for its in soon("the end", here.join_all()).await {
        visits = visits.and(its.expect("never too many"));
    }
    for worker in &mut there {
        visits = visits.and(Visits::of_line(&worker.answer().await));
    }
    println!("{DATABASE:?}: {visits:.1?} to {PERMITS} permits of which {most} were seen taken");
    assert!(visits.count > 20, "too quiet: {visits:?}");
    assert_nothing_is_left(&db).await;
}

fn permits_of(info: &sqlock::inspect::LeaseInfo) -> u32 {
    match info.mode {
        Mode::Permits(permits) => permits,
        mode => panic!("not a permit: {mode:?}"),
    }
}

#[tokio::test]
async fn free_permit_is_granted_when_nobody_waits() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let (here, there) = (semaphore(&ours, 3), semaphore(&theirs, 3));
    let one = here.try_acquire().await.expect("try").expect("free");
    assert!(there.try_acquire_many(3).await.expect("try").is_none());
    let two = there.try_acquire_many(2).await.expect("try").expect("free");
    assert!(one.token() < two.token());
    assert_eq!(holders(&theirs).await.iter().map(permits_of).collect::<Vec<_>>(), [1, 2]);
    for semaphore in [&here, &there] {
        assert!(semaphore.try_acquire().await.expect("try").is_none());
        let request = semaphore.clone().wait(Duration::from_secs(2)).request(1).expect("one permit");
        let error = times_out(request).await;
        assert!(error.is_timeout(), "{error}");
    }
    two.release().await.expect("ours to the end");
    // One permit is still taken. A request for all permits keeps the others out, although two are
    // free.
    let all = enqueue(&there, 3, &ours, 0).await;
    assert_full(&here, &ours, 1).await;
    drop(one);
    let all = granted(all).await;
    assert_full(&here, &ours, 0).await;
    all.release().await.expect("ours to the end");
    let done = here.run(async |permit| permit.is_held()).await.expect("run");
    assert!(done);
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn request_for_all_permits_keeps_its_turn() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let (here, there) = (semaphore(&ours, 3), semaphore(&theirs, 3));
    let mut first = vec![taken(&here, 1).await, taken(&there, 1).await, taken(&here, 1).await];
    let before = enqueue(&there, 1, &ours, 0).await;
    let all = enqueue(&here, 3, &ours, 1).await;
    let after = [enqueue(&there, 1, &ours, 2).await, enqueue(&here, 1, &ours, 3).await];
    first.pop().expect("three").release().await.expect("ours to the end");
    let before = granted(before).await;
    first.pop().expect("two").release().await.expect("ours to the end");
    first.pop().expect("one").release().await.expect("ours to the end");
    // Two permits are free, and the later requests are for one each.
    assert_full(&there, &ours, 3).await;
    assert!(after.iter().all(|waits| !waits.is_finished()) && !all.is_finished());
    before.release().await.expect("ours to the end");
    let all = granted(all).await;
    assert_full(&there, &ours, 2).await;
    all.release().await.expect("ours to the end");
    for one in after {
        granted(one).await.release().await.expect("ours to the end");
    }
    assert_nothing_is_left(&db).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn single_permit_stream_does_not_starve_larger_request() {
    let db = fresh().await;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let inside = CriticalSection::of(dir.path());
    let mut stream = JoinSet::new();
    for _ in 0..3 {
        let locks = db.locks().await;
        for _ in 0..4 {
            let stay = Duration::from_millis(10);
            stream.spawn(inside.clone().come_and_go(locks.clone(), "a".into(), AccessMode::Permits(1, 3), stay));
        }
    }
    let locks = db.locks().await;
    let mut waits = Vec::new();
    for _ in 0..5 {
        sleep(Duration::from_millis(50)).await;
        let came = std::time::Instant::now();
        let all = taken(&semaphore(&locks, 3), 3).await;
        waits.push(came.elapsed());
        let presence = inside.enter(AccessMode::Permits(3, 3)).expect("nobody else has a permit");
        sleep(Duration::from_millis(10)).await;
        drop(presence);
        all.release().await.expect("ours to the end");
    }
    inside.close();
    let mut visits = Visits::default();
    for its in soon("the end", stream.join_all()).await {
        visits = visits.and(its.expect("never too many"));
    }
    println!("{DATABASE:?}: all permits were had within {waits:.1?}; the others: {visits:.1?}");
    assert!(visits.count > 10, "too quiet: {visits:?}");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn impossible_permit_counts_are_refused() {
    let db = fresh().await;
    let locks = db.locks().await;
    for (asked, permits) in [(0, 3), (4, 3), (1, 0), (0, 0), (u32::MAX, 3), (1, u32::MAX), (u32::MAX, u32::MAX)] {
        let semaphore = semaphore(&locks, permits);
        let refused = |error: Error| match error {
            Error::Permits { name, asked: a, permits: p } => {
                assert_eq!((name.as_str(), a, p), ("a", asked, permits));
            }
            other => panic!("{other:?}"),
        };
        refused(semaphore.acquire_many(asked).await.expect_err("impossible"));
        refused(semaphore.try_acquire_many(asked).await.expect_err("impossible"));
    }
    let error = locks.semaphore("", 3).acquire_many(0).await.expect_err("not a name");
    assert!(matches!(error, Error::InvalidName { .. }), "{error}");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn smaller_permit_count_only_blocks_new_holders() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let four = semaphore(&ours, 4).ttl(BRIEF);
    let mut holding = vec![taken(&four, 1).await, taken(&four, 1).await, taken(&four, 1).await, taken(&four, 1).await];
    let two = semaphore(&theirs, 2);
    let waits = enqueue(&two, 1, &ours, 0).await;
    for left in [3, 2] {
        holding.pop().expect("somebody holds").release().await.expect("ours to the end");
        assert_full(&two, &ours, 1).await;
        assert_eq!(holders(&theirs).await.len(), left);
    }
    assert!(!waits.is_finished());
    // Held permits are renewed.
    let before = holders(&theirs).await;
    until("a renewal", async || holders(&theirs).await[0].expires_at > before[0].expires_at).await;
    assert!(holding.iter().all(Lease::is_held));
    holding.pop().expect("somebody holds").release().await.expect("ours to the end");
    let new = granted(waits).await;
    assert_full(&two, &ours, 0).await;
    new.release().await.expect("ours to the end");
    holding.pop().expect("the last one").release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

/// A try for too many permits is queued for a moment, and must not count as a waiter.
#[tokio::test]
async fn failed_try_does_not_block_concurrent_try() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let two = taken(&semaphore(&ours, 3), 2).await;
    for round in 0..30 {
        let (greedy, modest) = (semaphore(&ours, 3), semaphore(&theirs, 3));
        let begun = Instant::now();
        let (too_many, one) = tokio::join!(greedy.try_acquire_many(2), modest.try_acquire());
        assert!(too_many.expect("try").is_none());
        match one.expect("try") {
            Some(one) => one.release().await.expect("ours to the end"),
            None => assert!(begun.elapsed() > TRY, "refused in round {round}"),
        }
    }
    two.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn larger_permit_count_admits_its_requester() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let one = taken(&semaphore(&ours, 1), 1).await;
    assert!(semaphore(&theirs, 1).try_acquire().await.expect("try").is_none());
    let two = semaphore(&theirs, 2).try_acquire().await.expect("try").expect("there are more now");
    let more = taken(&semaphore(&theirs, 5), 3).await;
    assert_eq!(holders(&ours).await.iter().map(permits_of).sum::<u32>(), 5);
    // In the order of arrival: not past a request with fewer permits.
    let told_of_one = enqueue(&semaphore(&ours, 1), 1, &ours, 0).await;
    let told_of_ten = enqueue(&semaphore(&theirs, 10), 1, &ours, 1).await;
    assert_full(&semaphore(&theirs, 10), &ours, 2).await;
    for lease in [one, two, more] {
        assert!(!told_of_one.is_finished() && !told_of_ten.is_finished());
        lease.release().await.expect("ours to the end");
    }
    let (told_of_one, told_of_ten) = (granted(told_of_one).await, granted(told_of_ten).await);
    assert_eq!(holders(&ours).await.len(), 2);
    told_of_one.release().await.expect("ours to the end");
    told_of_ten.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn exclusive_lease_and_permits_exclude_each_other() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let there = semaphore(&theirs, 3);
    let alone = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert!(there.try_acquire().await.expect("try").is_none());
    let waits = enqueue(&there, 2, &ours, 0).await;
    alone.release().await.expect("ours to the end");
    let two = granted(waits).await;
    for locks in [&ours, &theirs] {
        assert!(locks.lease("a").try_acquire().await.expect("try").is_none());
    }
    let request = ours.lease("a").ttl(LONG);
    let alone = tokio::spawn(request.acquire());
    until_waiters(&theirs, "a", 1).await;
    // One permit is free, but an exclusive request came first.
    assert_full(&there, &theirs, 1).await;
    let waits = enqueue(&there, 1, &theirs, 1).await;
    two.release().await.expect("ours to the end");
    let alone = soon("its turn", alone).await.expect("no panic").expect("acquire");
    assert!(!waits.is_finished());
    alone.release().await.expect("ours to the end");
    granted(waits).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn killed_permit_holder_frees_permits_after_ttl() {
    let db = fresh().await;
    let locks = db.locks().await;
    let three = semaphore(&locks, 3);
    let ours = taken(&three, 1).await;
    let mut dying = Worker::start(&db.url);
    let answer = dying.ask(&format!("as 2/3 a {}", BRIEF.as_millis())).await;
    assert!(answer.starts_with("token "), "{answer}");
    let waits = [enqueue(&three, 1, &locks, 0).await, enqueue(&three, 1, &locks, 1).await];
    dying.kill();
    let last = holders(&locks).await[1].expires_at;
    for one in waits {
        let one = granted(one).await;
        let granted = holders(&locks).await.into_iter().find(|info| info.token == one.token()).expect("it holds");
        assert!(granted.acquired_at >= last, "granted at {}, taken until {last}", granted.acquired_at);
        one.release().await.expect("ours to the end");
    }
    assert!(ours.is_held());
    ours.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn permit_behaves_like_a_lease() {
    let db = fresh().await;
    let pool = db.pool().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let three = semaphore(&ours, 3);
    let mut permit = taken(&three.clone().label("two of three"), 2).await;
    let info = theirs.inspect("a").await.expect("inspect").expect("held");
    assert_eq!((info.mode, info.token, &*info.label), (Mode::Permits(2), permit.token(), "two of three"));
    let mut tx = pool.begin().await.expect("begin");
    permit.fence(&mut tx).await.expect("fence");
    tx.commit().await.expect("commit");
    let error = permit.downgrade().await.expect_err("shared already");
    assert!(matches!(error, Error::Conversion { .. }), "{error}");
    // The exported text has the same permits and limit.
    let exported = permit.export().expect("export").to_string();
    let permit = theirs.resume(exported.parse().expect("it was printed")).await.expect("resume");
    assert!(three.try_acquire_many(2).await.expect("try").is_none());
    assert!(ours.evict("a", permit.token()).await.expect("evict"));
    let all = taken(&three, 3).await;
    assert!(permit.release().await.expect_err("evicted").is_lost());
    assert!(all.is_held());
    all.release().await.expect("ours to the end");

    let brief = three.clone().max_hold(BRIEF).acquire().await.expect("acquire");
    assert_eq!(soon("its end", brief.lost()).await, LossCause::MaxHold);
    let all = taken(&semaphore(&theirs, 3), 3).await;
    all.release().await.expect("ours to the end");
    drop(brief);
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn dropped_permit_request_leaves_nothing_behind() {
    let fixture = CancelFixture::new().await;
    let three = semaphore(&fixture.ours, 3);
    everywhere(async |point| {
        let done = drop_at(point, three.acquire_many(2)).await.map(|lease| lease.expect("acquire")).is_some();
        fixture.is_clean().await;
        done
    })
    .await;
    everywhere(async |point| {
        let taken = taken(&semaphore(&fixture.theirs, 3), 2).await;
        let leaves = tokio::spawn(async move {
            sleep(Duration::from_millis(20)).await;
            taken.release().await
        });
        let done = drop_at(point, three.acquire_many(2)).await.map(|lease| lease.expect("acquire")).is_some();
        leaves.await.expect("no panic").expect("ours to the end");
        fixture.is_clean().await;
        done
    })
    .await;
    assert_nothing_is_left(&fixture.db).await;
}

/// The request for all permits times out while one is taken; the request behind it is then granted.
#[tokio::test]
async fn timed_out_waiter_unblocks_waiters_behind_it() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let one = taken(&semaphore(&ours, 3), 1).await;
    let greedy = semaphore(&theirs, 3).wait(Duration::from_secs(6));
    let greedy = tokio::spawn(async move { greedy.acquire_many(3).await });
    until_waiters(&ours, "a", 1).await;
    let modest = enqueue(&semaphore(&ours, 3).wait(SOON), 1, &ours, 1).await;
    let error = soon("its end", greedy).await.expect("no panic").expect_err("one is taken");
    assert!(error.is_timeout(), "{error}");
    granted(modest).await.release().await.expect("ours to the end");
    assert!(one.is_held());
    one.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

/// The transaction fenced by the expired permit keeps its entry locked. On SQLite it keeps every row
/// locked.
#[cfg(any(feature = "postgres", feature = "mysql"))]
#[tokio::test]
async fn expired_fenced_permit_delays_no_other_permit() {
    if DATABASE == crate::support::Database::Sqlite {
        return;
    }
    let db = fresh().await;
    let (ours, theirs, others) = (db.locks().await, db.locks().await, db.locks().await);
    let fenced = taken(&semaphore(&ours, 2).ttl(BRIEF).renew(false), 1).await;
    let other = taken(&semaphore(&theirs, 2), 1).await;
    let pool = db.pool().await;
    let mut tx = pool.begin().await.expect("begin");
    fenced.fence(&mut tx).await.expect("fence");
    let next = enqueue(&semaphore(&others, 2), 1, &theirs, 0).await;
    soon("its end", fenced.lost()).await;
    sleep(Duration::from_secs(1)).await;
    other.release().await.expect("release");
    let next = granted(next).await;
    tx.commit().await.expect("a fenced transaction commits");
    next.release().await.expect("release");
}
