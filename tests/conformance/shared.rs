//! Shared leases: readers hold the name together, a writer holds it alone, and both wait in one
//! queue.
//!
//! Promises: 7.

mod downgrade;
mod dropped;
mod fence;
mod owner;

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use chrono::TimeDelta;
use sqlock::inspect::{LeaseInfo, Mode};
use sqlock::lease::FenceError;
use sqlock::{Error, Lease, LeaseRequest, Locks, LossCause, Owner};
use sqlx::Pool;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::cancel::{CancelFixture, Point, drop_at, everywhere};
use super::fence::{add_one, assert_kept_out, counters, until_expired};
use crate::support::critical_section::{AccessMode, CriticalSection, Visits};
use crate::support::worker::Worker;
use crate::support::{
    ARRIVALS_APART, BRIEF, Database, LONG, SOON, TestDatabase, fresh, soon, times_out, until, until_waiters,
};
use crate::{DATABASE, Sql};

/// How late anything may be on a busy machine.
const SLACK: TimeDelta = TimeDelta::seconds(15);

fn reading(locks: &Locks) -> LeaseRequest {
    locks.lease("a").ttl(LONG).shared()
}

fn writing(locks: &Locks) -> LeaseRequest {
    locks.lease("a").ttl(LONG)
}

/// Acquires a lease that is free.
async fn taken(request: LeaseRequest) -> Lease {
    soon("the grant", request.acquire()).await.expect("acquire")
}

/// Spawns a request, and waits until it has joined the queue behind `before` waiters.
pub(super) async fn enqueue(request: LeaseRequest, observer: &Locks, before: usize) -> JoinHandle<Lease> {
    let waits = tokio::spawn(async move { request.acquire().await.expect("its turn comes") });
    until_waiters(observer, "a", before + 1).await;
    waits
}

/// Spawns a request that waits behind a holder or a writer of its own client, without an entry in
/// the database.
async fn waits_locally(request: LeaseRequest) -> JoinHandle<Lease> {
    let waits = tokio::spawn(async move { request.acquire().await.expect("its turn comes") });
    sleep(ARRIVALS_APART).await;
    assert!(!waits.is_finished(), "it had to wait");
    waits
}

async fn granted(waits: JoinHandle<Lease>) -> Lease {
    soon("its turn", waits).await.expect("no panic")
}

/// Longer than the interval at which a waiter polls the name.
const A_LOOK: Duration = Duration::from_millis(400);

/// Checks that a new reader is refused, and that no waiter is granted.
async fn assert_closed_to_readers(observer: &Locks, waiters: usize) {
    assert!(reading(observer).try_acquire().await.expect("try").is_none());
    until_waiters(observer, "a", waiters).await;
    sleep(A_LOOK).await;
    assert_eq!(observer.waiters("a").await.expect("waiters").len(), waiters, "somebody came in");
}

pub(super) async fn holders(observer: &Locks) -> Vec<LeaseInfo> {
    observer.holders("a").await.expect("holders")
}

/// Waits until the name has no holder, no waiter, and no entry in the table.
pub(super) async fn assert_nothing_is_left(db: &TestDatabase) {
    let pool = db.pool_of(1).await;
    let next = taken(writing(&db.locks().await)).await;
    next.release().await.expect("release");
    // A release that meets a locked row is carried out when the row is free again.
    let observer = db.locks().await;
    until("the end of all places and holdings", async || {
        places(&pool).await == 0 && observer.list("").await.expect("list").is_empty()
    })
    .await;
}

async fn places(pool: &Pool<Sql>) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM sqlock_entry").fetch_one(pool).await.expect("count the places")
}

// ---- holders

#[tokio::test]
async fn readers_share_the_name_and_writer_excludes() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let readers = [taken(reading(&ours)).await, taken(reading(&theirs)).await, taken(reading(&ours)).await];
    for locks in [&ours, &theirs] {
        assert!(writing(locks).try_acquire().await.expect("try").is_none());
        let error = times_out(writing(locks).wait(Duration::from_secs(2))).await;
        assert!(error.is_timeout(), "{error}");
    }
    let tried = reading(&theirs).try_acquire().await.expect("try").expect("nobody waits");
    tried.release().await.expect("ours to the end");
    for reader in readers {
        assert!(writing(&theirs).try_acquire().await.expect("try").is_none());
        reader.release().await.expect("ours to the end");
    }
    let writer = writing(&theirs).try_acquire().await.expect("try").expect("free");
    for locks in [&ours, &theirs] {
        assert!(reading(locks).try_acquire().await.expect("try").is_none());
        assert!(writing(locks).try_acquire().await.expect("try").is_none());
        let error = times_out(reading(locks).wait(Duration::from_secs(2))).await;
        assert!(error.is_timeout(), "{error}");
    }
    writer.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn waiting_writer_blocks_later_readers() {
    let db = fresh().await;
    let (ours, theirs, others) = (db.locks().await, db.locks().await, db.locks().await);
    let first = taken(reading(&ours)).await;
    let writer = enqueue(writing(&theirs), &ours, 0).await;
    let mut readers = Vec::new();
    for i in 0..5 {
        // Requests of new clients, and of the one that already shares the name.
        let locks = if i == 0 { ours.clone() } else { db.locks().await };
        readers.push(enqueue(reading(&locks), &ours, i + 1).await);
    }
    let last = enqueue(writing(&db.locks().await), &ours, 6).await;
    assert_closed_to_readers(&others, 7).await;
    assert_eq!(holders(&ours).await.len(), 1);

    first.release().await.expect("ours to the end");
    let writer = granted(writer).await;
    assert_closed_to_readers(&others, 6).await;
    assert_eq!(holders(&ours).await.len(), 1);

    let written = writer.token();
    writer.release().await.expect("ours to the end");
    let mut tokens = BTreeSet::new();
    let mut inside = Vec::new();
    for reader in readers {
        let reader = granted(reader).await;
        assert!(reader.token() > written, "tokens only rise");
        tokens.insert(reader.token().get());
        inside.push(reader);
    }
    // A token is a clock value. The tokens of one grant are consecutive.
    let (least, most) = (tokens.first().expect("five"), tokens.last().expect("five"));
    assert_eq!((tokens.len(), most - least), (5, 4), "not all in one go");
    assert!(!last.is_finished());
    assert_closed_to_readers(&others, 1).await;
    for reader in inside {
        assert!(!last.is_finished());
        reader.release().await.expect("ours to the end");
    }
    granted(last).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn reader_has_its_own_expiry_token_and_renewal() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let steady = taken(locks_label(&ours, BRIEF, "steady")).await;
    let brief = taken(locks_label(&ours, BRIEF, "brief").renew(false)).await;
    let long = taken(locks_label(&theirs, LONG, "long").renew(false)).await;
    assert!(steady.token() < brief.token() && brief.token() < long.token(), "tokens only rise");
    let before = holders(&theirs).await;
    assert_eq!(before.iter().map(|info| &*info.label).collect::<Vec<_>>(), ["steady", "brief", "long"]);
    assert_eq!(
        before.iter().map(|info| (info.mode, info.token, info.owner, info.holds)).collect::<Vec<_>>(),
        [&steady, &brief, &long].map(|lease| (Mode::Shared, lease.token(), Some(lease.owner()), 1)),
    );
    assert!(before[0].remaining <= BRIEF && before[1].remaining <= BRIEF && before[2].remaining > LONG / 2);

    assert_eq!(soon("its end", brief.lost()).await, LossCause::Expired);
    assert!(steady.is_held() && long.is_held());
    until("the end of its part", async || holders(&theirs).await.len() <= 2).await;
    let after = holders(&theirs).await;
    assert_eq!(after.iter().map(|info| &*info.label).collect::<Vec<_>>(), ["steady", "long"]);
    assert!(after[0].expires_at > before[1].expires_at, "it was renewed");
    assert_eq!(after[1].expires_at, before[2].expires_at, "it was not");
    assert!(brief.release().await.expect_err("it was lost").is_lost());
    assert!(writing(&theirs).try_acquire().await.expect("try").is_none());
    steady.release().await.expect("ours to the end");
    long.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

fn locks_label(locks: &Locks, ttl: Duration, label: &str) -> LeaseRequest {
    locks.lease("a").ttl(ttl).shared().label(label)
}

#[tokio::test]
async fn holders_and_waiters_are_listed_individually() {
    let db = fresh().await;
    let ours = db.builder().await.holder("the library").build();
    let theirs = db.locks().await;
    let first = taken(reading(&ours).label("first")).await;
    let second = taken(reading(&theirs).label("second")).await;
    let writer = enqueue(writing(&theirs).label("the writer"), &ours, 0).await;
    let reader = enqueue(reading(&ours).label("late"), &ours, 1).await;
    let listed = theirs.list("").await.expect("list");
    assert_eq!(listed.iter().map(|info| info.token).collect::<Vec<_>>(), [first.token(), second.token()]);
    assert!(listed.iter().all(|info| info.name.as_str() == "a" && info.mode == Mode::Shared && info.waiters == 2));
    assert_eq!((&*listed[0].holder, &*listed[0].label), ("the library", "first"));
    assert!(listed[0].acquired_at <= listed[1].acquired_at);
    let one = theirs.inspect("a").await.expect("inspect").expect("held");
    assert_eq!(one.token, first.token(), "the first of several holders");
    let waiting = theirs.waiters("a").await.expect("waiters");
    assert_eq!(
        waiting.iter().map(|w| (w.ahead, w.mode, &*w.label)).collect::<Vec<_>>(),
        [(0, Mode::Exclusive, "the writer"), (1, Mode::Shared, "late")],
    );
    assert!(waiting[0].since <= waiting[1].since);
    drop((first, second));
    granted(writer).await.release().await.expect("ours to the end");
    granted(reader).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

// ---- many waiters

/// Some occupants in this process, by several clients, and some in two others.
struct Crowd {
    here: JoinSet<Result<Visits, String>>,
    there: Vec<Worker>,
}

impl Crowd {
    async fn gather(
        db: &TestDatabase,
        manner: &str,
        inside: &CriticalSection,
        dir: &str,
        clients: usize,
        tasks: usize,
    ) -> Self {
        let mut here = JoinSet::new();
        let stay = Duration::from_millis(10);
        for _ in 0..clients {
            let locks = db.locks().await;
            for _ in 0..tasks {
                let manner: AccessMode = manner.parse().expect("a manner");
                here.spawn(inside.clone().come_and_go(locks.clone(), "a".into(), manner, stay));
            }
        }
        let mut there = vec![Worker::start(&db.url), Worker::start(&db.url)];
        for worker in &mut there {
            worker.tell(&format!("visit a {manner} {tasks} {} {dir}", stay.as_millis()));
        }
        Self { here, there }
    }

    async fn go_home(mut self) -> Visits {
        let mut visits = Visits::default();
        for its in timeout(SOON * 4, self.here.join_all()).await.expect("they go home") {
            visits = visits.and(its.expect("nobody was there who must not be"));
        }
        for worker in &mut self.there {
            visits = visits.and(Visits::of_line(&worker.answer().await));
        }
        visits
    }
}

/// Acquires the name again and again among busy readers, and returns the waits.
async fn acquire_among_many(alone: AccessMode, many: &str, clients: usize, tasks: usize) {
    let db = fresh().await;
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().to_str().expect("a path of text");
    let inside = CriticalSection::of(dir.path());
    let crowd = Crowd::gather(&db, many, &inside, path, clients, tasks).await;
    let locks = db.locks().await;
    let mut waits = Vec::new();
    for _ in 0..8 {
        sleep(Duration::from_millis(50)).await;
        let came = Instant::now();
        let lease = soon("its turn among so many", alone.acquire(&locks, "a", LONG)).await.expect("acquire");
        waits.push(came.elapsed());
        let presence = inside.enter(alone).expect("nobody is there who must not be");
        sleep(Duration::from_millis(10)).await;
        drop(presence);
        lease.release().await.expect("ours to the end");
    }
    inside.close();
    let visits = crowd.go_home().await;
    println!(
        "{DATABASE:?}: {alone:?} among {} {many} got in within {waits:.1?}; they: {visits:.1?}",
        (clients + 2) * tasks
    );
    assert!(visits.count > 20, "too quiet a crowd: {visits:?}");
    if many == "shared" {
        assert!(visits.together > 1, "they were never inside together");
    }
    assert_nothing_is_left(&db).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writer_is_granted_among_fifty_readers() {
    acquire_among_many(AccessMode::Alone, "shared", 3, 10).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reader_is_granted_among_many_writers() {
    acquire_among_many(AccessMode::Shared, "alone", 3, 2).await;
}

// ---- deaths

#[tokio::test]
async fn killed_reader_frees_only_its_share() {
    let db = fresh().await;
    let locks = db.locks().await;
    let ours = taken(reading(&locks)).await;
    let mut dying = Worker::start(&db.url);
    let answer = dying.ask(&format!("as shared a {}", BRIEF.as_millis())).await;
    assert!(answer.starts_with("token "), "{answer}");
    let writer = enqueue(writing(&db.locks().await), &locks, 0).await;
    dying.kill();
    until("the end of its part", async || holders(&locks).await.len() <= 1).await;
    assert_eq!(holders(&locks).await[0].token, ours.token());
    assert_closed_to_readers(&locks, 1).await;
    assert!(!writer.is_finished() && ours.is_held());
    ours.release().await.expect("ours to the end");
    granted(writer).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn writer_follows_last_killed_reader_after_ttl() {
    let db = fresh().await;
    let locks = db.locks().await;
    let mut dying = Worker::start(&db.url);
    dying.ask(&format!("as shared a {}", BRIEF.as_millis())).await;
    let writer = enqueue(writing(&db.locks().await), &locks, 0).await;
    dying.kill();
    // A renewal in flight may still arrive, so the last expiry seen counts.
    let mut last = None;
    let next = soon("the takeover", async {
        loop {
            match holders(&locks).await.pop() {
                Some(info) if info.mode == Mode::Exclusive => break info,
                Some(info) => last = Some(info.expires_at),
                None => {}
            }
        }
    })
    .await;
    let last = last.expect("it was seen alive");
    assert!(next.acquired_at >= last, "granted at {}, shared until {last}", next.acquired_at);
    assert!(next.acquired_at <= last + SLACK);
    granted(writer).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn unrenewed_reader_knows_before_the_writer_is_granted() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let reader = taken(reading(&ours).ttl(BRIEF).renew(false)).await;
    let until = holders(&theirs).await[0].expires_at;
    let writer = enqueue(writing(&theirs), &ours, 0).await;
    assert_eq!(soon("its end", reader.lost()).await, LossCause::Expired);
    let writer = granted(writer).await;
    assert!(!reader.is_held() && writer.token() > reader.token());
    assert!(holders(&ours).await[0].acquired_at >= until);
    let error = reader.release().await.expect_err("it was lost");
    assert!(matches!(error, Error::Lost { cause: LossCause::Expired, .. }), "{error}");
    assert!(writer.is_held());
    writer.extend(LONG).await.expect("a late release of another's harms nobody");
    writer.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[derive(Clone, Copy, Debug)]
enum End {
    Dropped,
    TimedOut,
}

/// A writer that cancels deletes its entry, so the readers behind it do not wait for the entry to
/// expire. A busy machine can slow the announcement down, but cannot make an expiry this fast.
#[tokio::test]
async fn abandoned_writer_unblocks_readers_at_once() {
    const AT_ONCE: Duration = Duration::from_millis(1500);
    for end in [End::Dropped, End::TimedOut] {
        let mut delays = Vec::new();
        for _ in 0..10 {
            let db = fresh().await;
            let (ours, theirs, others) = (db.locks().await, db.locks().await, db.locks().await);
            let inside = taken(reading(&ours)).await;
            let request = match end {
                End::Dropped => writing(&theirs),
                End::TimedOut => writing(&theirs).wait(Duration::from_secs(6)),
            };
            let writer = tokio::spawn(request.acquire());
            until_waiters(&ours, "a", 1).await;
            let readers = [enqueue(reading(&others), &ours, 1).await, enqueue(reading(&ours), &ours, 2).await];
            if matches!(end, End::Dropped) {
                assert_closed_to_readers(&ours, 3).await;
                writer.abort();
            }
            match soon("the writer's end", writer).await {
                Err(aborted) => assert!(aborted.is_cancelled()),
                Ok(verdict) => assert!(verdict.expect_err("it is shared").is_timeout()),
            }
            let gone = Instant::now();
            for reader in readers {
                granted(reader).await.release().await.expect("ours to the end");
            }
            let delay = gone.elapsed();
            delays.push(delay);
            assert!(inside.is_held());
            inside.release().await.expect("ours to the end");
            assert_nothing_is_left(&db).await;
            if delay < AT_ONCE {
                break;
            }
        }
        println!("{DATABASE:?}: readers behind a writer that was {end:?} came in after {delays:.1?}");
        assert!(delays.iter().any(|delay| *delay < AT_ONCE), "never at once: {delays:?}");
    }
}

#[tokio::test]
async fn killed_waiting_writer_unblocks_readers() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let inside = taken(reading(&ours)).await;
    let mut writer = Worker::start(&db.url);
    writer.tell(&format!("as alone a {}", LONG.as_millis()));
    until_waiters(&ours, "a", 1).await;
    let readers = [enqueue(reading(&theirs), &ours, 1).await, enqueue(reading(&ours), &ours, 2).await];
    assert_closed_to_readers(&ours, 3).await;
    writer.kill();
    let killed = Instant::now();
    for reader in readers {
        granted(reader).await.release().await.expect("ours to the end");
    }
    println!("{DATABASE:?}: readers behind a writer that was killed came in after {:.1?}", killed.elapsed());
    inside.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

// ---- other calls on a lease

#[tokio::test]
async fn exported_share_continues_in_another_process() {
    let db = fresh().await;
    let (ours, theirs, others) = (db.locks().await, db.locks().await, db.locks().await);
    let lease = taken(reading(&ours).ttl(BRIEF).label("on the road")).await;
    let (token, owner) = (lease.token(), lease.owner());
    let text = lease.export().expect("export").to_string();
    assert!(writing(&others).try_acquire().await.expect("try").is_none(), "held by the next client");
    let lease = theirs.resume(text.parse().expect("what was printed can be read")).await.expect("resume");
    assert_eq!((lease.token(), lease.owner()), (token, owner));
    ours.shutdown().await.expect("shutdown");
    let before = holders(&others).await[0].expires_at;
    until("two renewals", async || holders(&others).await[0].expires_at > before + BRIEF).await;
    assert!(lease.is_held());
    let info = holders(&others).await.remove(0);
    assert_eq!((info.mode, info.token, &*info.label), (Mode::Shared, token, "on the road"));
    let beside = taken(reading(&others)).await;
    lease.release().await.expect("ours to the end");
    beside.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;

    // A lease that has ended meanwhile cannot be resumed.
    let lost = taken(reading(&theirs)).await;
    let (token, exported) = (lost.token(), lost.export().expect("export"));
    assert!(others.evict("a", token).await.expect("evict"));
    let error = theirs.resume(exported).await.expect_err("it was evicted");
    assert!(matches!(error, Error::Lost { cause: LossCause::Superseded, .. }), "{error}");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn eviction_by_token_ends_one_share() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let (first, second) = (taken(reading(&ours).ttl(BRIEF)).await, taken(reading(&ours)).await);
    let writer = enqueue(writing(&theirs), &ours, 0).await;
    assert!(theirs.evict("a", first.token()).await.expect("evict"));
    assert!(!theirs.evict("a", first.token()).await.expect("evict"), "it holds no more");
    assert_eq!(soon("it learns of it", first.lost()).await, LossCause::Superseded);
    assert_eq!(holders(&theirs).await.iter().map(|info| info.token).collect::<Vec<_>>(), [second.token()]);
    assert!(second.is_held() && !writer.is_finished());
    assert!(first.release().await.expect_err("it was evicted").is_lost());
    second.extend(LONG).await.expect("still held");
    // Its own client notices at once, and the writer is granted the name.
    assert!(ours.evict("a", second.token()).await.expect("evict"));
    assert!(!second.is_held());
    let writer = granted(writer).await;
    assert!(!theirs.evict("a", second.token()).await.expect("evict"), "an old token ends nobody's holding");
    writer.release().await.expect("ours to the end");
    drop(second);
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn share_is_extended_by_holder_and_by_token() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let (first, second) = (
        taken(reading(&ours).ttl(BRIEF * 8).renew(false)).await,
        taken(reading(&ours).ttl(BRIEF * 8).renew(false)).await,
    );
    let before = holders(&theirs).await;
    first.extend(LONG).await.expect("extend");
    let after = holders(&theirs).await;
    assert!(after[0].remaining > LONG / 2 && first.remaining() > LONG / 2);
    assert_eq!(after[1].expires_at, before[1].expires_at, "the other's is its own");
    assert!(theirs.extend("a", second.token(), LONG).await.expect("extend"));
    assert!(holders(&ours).await[1].remaining > LONG / 2);
    // The extension never shortens a lease.
    assert!(theirs.extend("a", second.token(), BRIEF).await.expect("extend"));
    assert!(holders(&ours).await[1].remaining > LONG / 2);
    let token = second.token();
    second.release().await.expect("ours to the end");
    assert!(!theirs.extend("a", token, LONG).await.expect("extend"), "it has ended");
    assert_eq!(holders(&ours).await.len(), 1);
    first.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn max_hold_ends_a_renewed_share() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let reader = taken(reading(&ours).max_hold(BRIEF)).await;
    let since = holders(&theirs).await[0].acquired_at;
    let writer = enqueue(writing(&theirs), &ours, 0).await;
    // The holder hangs, and the lease is not dropped.
    let writer = granted(writer).await;
    assert_eq!(soon("its end", reader.lost()).await, LossCause::MaxHold);
    let granted = holders(&ours).await[0].acquired_at;
    assert!(granted >= since + BRIEF - Duration::from_millis(500), "{granted} after {since}");
    assert!(granted <= since + BRIEF + SLACK);
    writer.release().await.expect("ours to the end");
    drop(reader);
    assert_nothing_is_left(&db).await;
}

/// A try may give up when another one has not ended for this long: its pauses sum up to 470 ms.
pub(super) const TRY: Duration = Duration::from_millis(450);

/// A try beside another is queued for a moment, and must not count as a waiter.
#[tokio::test]
async fn concurrent_tries_admit_all_readers_or_one_writer() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    for round in 0..30 {
        let begun = Instant::now();
        let (one, other) = tokio::join!(reading(&ours).try_acquire(), reading(&theirs).try_acquire());
        let both = [one.expect("try"), other.expect("try")];
        let is_granted = both.iter().all(Option::is_some) || begun.elapsed() > TRY;
        assert!(is_granted, "a reader was refused in round {round} after {:?}: {both:?}", begun.elapsed());
        for lease in both.into_iter().flatten() {
            lease.release().await.expect("ours to the end");
        }
        let begun = Instant::now();
        let (reader, writer) = tokio::join!(reading(&ours).try_acquire(), writing(&theirs).try_acquire());
        let either = [reader.expect("try"), writer.expect("try")];
        let is_granted = either.iter().any(Option::is_some) || begun.elapsed() > TRY;
        assert!(is_granted, "neither got it in round {round}");
        for lease in either.into_iter().flatten() {
            lease.release().await.expect("ours to the end");
        }
    }
    assert_nothing_is_left(&db).await;
}

/// The test would time out if the readers were granted one by one.
#[tokio::test]
async fn all_waiting_readers_are_granted_after_the_writer() {
    const READERS: usize = 1_200;
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let writer = taken(writing(&ours)).await;
    let mut readers = JoinSet::new();
    for i in 0..READERS {
        let request = reading([&ours, &theirs][i % 2]);
        readers.spawn(async move { request.acquire().await.expect("its turn comes") });
    }
    until("the first in line", async || !ours.waiters("a").await.expect("waiters").is_empty()).await;
    // The database does not know most of them yet.
    sleep(Duration::from_secs(1)).await;
    assert!(readers.try_join_next().is_none(), "in beside a writer");
    writer.release().await.expect("ours to the end");
    let mut inside = Vec::new();
    timeout(SOON * 4, async {
        while let Some(reader) = readers.join_next().await {
            inside.push(reader.expect("no panic"));
        }
    })
    .await
    .expect("all readers come in");
    let tokens: BTreeSet<_> = inside.iter().map(Lease::token).collect();
    // (On a busy machine the claim of one may have run out before it was confirmed among so many.)
    assert_eq!(tokens.len(), READERS);
    drop(inside);
    // On a busy machine, the releases take longer than `assert_nothing_is_left` waits for a grant.
    timeout(SOON * 4, async {
        while !ours.list("a").await.expect("list").is_empty() {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("all readers go out");
    assert_nothing_is_left(&db).await;
}

/// A name kept after its release has no owner.
#[tokio::test]
async fn hold_at_least_blocks_even_the_former_holder() {
    let db = fresh().await;
    let (locks, owner) = (db.locks().await, Owner::random());
    let reader = taken(reading(&locks).owner(owner).hold_at_least(BRIEF)).await;
    let since = holders(&locks).await[0].acquired_at;
    reader.release().await.expect("ours to the end");
    assert!(holders(&locks).await.iter().all(|kept| kept.owner.is_none()));
    let writer = taken(writing(&locks).owner(owner)).await;
    assert!(holders(&locks).await[0].acquired_at >= since + BRIEF);
    writer.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn hold_at_least_of_share_blocks_writers() {
    const LEAST: Duration = Duration::from_secs(2);
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let reader = taken(reading(&ours).hold_at_least(LEAST)).await;
    let since = holders(&theirs).await[0].acquired_at;
    reader.release().await.expect("ours to the end");
    // Another reader is no writer.
    drop(taken(reading(&ours)).await);
    let writer = soon("its turn", writing(&theirs).acquire()).await.expect("acquire");
    let granted = holders(&ours).await[0].acquired_at;
    // The holder counts from when it learned of the grant, the database from when it made the
    // grant, so the name is kept rather too long than too short.
    assert!(granted >= since + LEAST, "{granted}, and not before {}", since + LEAST);
    assert!(granted <= since + LEAST + SLACK);
    writer.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn sweeper_keeps_live_shares_and_purges_dead_ones() {
    let db = fresh().await;
    let pool = db.pool().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let living = taken(reading(&ours)).await;
    // A live client withdraws its expired leases.
    for name in ["a", "b"] {
        let mut dying = Worker::start(&db.url);
        let answer = dying.ask(&format!("as shared {name} 1000")).await;
        assert!(answer.starts_with("token "), "{answer}");
        dying.kill();
    }
    until("their end", async || theirs.list("").await.expect("list").len() <= 1).await;
    let names = async || -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM sqlock_lease").fetch_one(&pool).await.expect("count the names")
    };
    assert_eq!((names().await, places(&pool).await), (2, 3));
    assert_eq!(theirs.sweeper().sweep().await.expect("sweep"), 0, "by default, after an hour");
    assert_eq!((names().await, places(&pool).await), (2, 3));
    soon("the purge", async {
        while (names().await, places(&pool).await) != (1, 1) {
            theirs.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep");
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    theirs.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep");
    assert_eq!((names().await, places(&pool).await), (1, 1));
    living.extend(LONG).await.expect("still held");
    let mut tx = pool.begin().await.expect("begin");
    living.fence(&mut tx).await.expect("fence");
    tx.commit().await.expect("commit");
    // Waiting entries are not swept either.
    let waits = enqueue(writing(&theirs), &ours, 0).await;
    theirs.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep");
    until_waiters(&ours, "a", 1).await;
    living.release().await.expect("ours to the end");
    granted(waits).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn shutdown_releases_shares_and_refuses_waiters() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let shares = [taken(reading(&ours)).await, taken(reading(&ours)).await];
    let writer = enqueue(writing(&theirs), &theirs, 0).await;
    let request = reading(&ours);
    let refused = tokio::spawn(request.acquire());
    until_waiters(&theirs, "a", 2).await;
    soon("the shutdown", ours.shutdown()).await.expect("shutdown");
    for share in shares {
        assert_eq!(soon("the loss", share.lost()).await, LossCause::Shutdown);
    }
    let error = soon("the refusal", refused).await.expect("no panic").expect_err("shut down");
    assert!(matches!(error, Error::Closed), "{error}");
    granted(writer).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}
