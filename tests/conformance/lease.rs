//! Acquisition, renewal and release of a lease.
//!
//! Promises: 3, 4, 5, 15.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use chrono::TimeDelta;
use sqlock::database::AccessError;
use sqlock::{Error, FencingToken, Lease, Locks, LossCause};
use sqlx::{Executor, QueryBuilder};
use tokio::task::JoinSet;

use super::shared::TRY;
use crate::support::blocked::block_past;
use crate::support::{Database, LONG, SOON, TestDatabase, builder, connect, fresh, is_free, soon, times_out, until};
use crate::{DATABASE, Sql};

/// The TTL of a lease that must expire.
const SHORT: Duration = Duration::from_millis(500);

/// The limit of a wait that must fail: long enough for an answer of the database, because the error
/// would differ without an answer.
const WAIT: Duration = Duration::from_secs(2);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// A client with the limits that an application meets.
async fn ordinary(db: &TestDatabase) -> Locks {
    Locks::new(db.pool_of(1).await)
}

async fn take(locks: &Locks, name: &str) -> Lease {
    let lease = locks.lease(name).ttl(LONG).acquire();
    soon("the grant", lease).await.expect("acquire")
}

#[track_caller]
fn lost_by(error: Error, expected: LossCause) {
    assert!(error.is_lost() && !error.is_timeout(), "{error}");
    let Error::Lost { cause, .. } = error else { panic!("{error}") };
    assert_eq!(cause, expected);
}

// ---- promise 1: exclusion, and the answers to the others

#[tokio::test]
async fn lease_excludes_others_until_released() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").acquire().await.expect("acquire");
    assert!(lease.is_held());
    assert_eq!(lease.name().as_str(), "a");
    assert!(theirs.lease("a").try_acquire().await.expect("try").is_none());
    assert!(theirs.lease("b").try_acquire().await.expect("try").is_some());
    let token = lease.token();
    lease.release().await.expect("release");
    let next = theirs.lease("a").try_acquire().await.expect("try").expect("free");
    assert!(next.token() > token);
    next.release().await.expect("release");
}

#[tokio::test]
async fn contention_within_a_client_is_not_an_error() {
    let db = fresh().await;
    let locks = db.locks().await;
    let lease = take(&locks, "a").await;
    assert!(locks.lease("a").try_acquire().await.expect("try").is_none());
    lease.release().await.expect("release");
    assert!(is_free(&locks, "a").await);
}

#[tokio::test]
async fn refused_request_changes_nothing() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(LONG).renew(false).label("ours").acquire().await.expect("acquire");
    let before = theirs.inspect("a").await.expect("inspect").expect("held");
    assert!(theirs.lease("a").label("theirs").try_acquire().await.expect("try").is_none());
    let error = times_out(theirs.lease("a").label("theirs").wait(WAIT)).await;
    assert!(error.is_timeout());
    let mut after = theirs.inspect("a").await.expect("inspect").expect("held");
    after.remaining = before.remaining;
    assert_eq!(before, after);
    lease.release().await.expect("release");
}

#[tokio::test]
async fn expired_wait_is_a_timeout() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = take(&ours, "a").await;
    for locks in [&ours, &theirs] {
        let start = Instant::now();
        let error = times_out(locks.lease("a").wait(WAIT)).await;
        assert!(start.elapsed() >= WAIT);
        assert!(error.is_timeout() && error.is_retryable() && !error.is_lost(), "{error}");
        let Error::Timeout { name, waited } = error else { panic!("{error}") };
        assert_eq!(name.as_str(), "a");
        assert!(waited >= WAIT);
    }
    assert!(lease.is_held());
    lease.release().await.expect("release");
    assert!(is_free(&theirs, "a").await, "waiters that timed out have left the queue");
}

#[tokio::test]
async fn wait_ends_when_the_name_is_released() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    for waiting in [ours.clone(), theirs] {
        let lease = take(&ours, "a").await;
        let (began, begins) = tokio::sync::oneshot::channel();
        let waiter = tokio::spawn(async move {
            let mut turn = std::pin::pin!(waiting.lease("a").ttl(LONG).wait(SOON).acquire());
            tokio::time::timeout(ms(50), &mut turn).await.expect_err("held");
            began.send(()).expect("the test waits");
            turn.await.expect("acquire").token()
        });
        begins.await.expect("the waiter waits");
        let token = lease.token();
        lease.release().await.expect("release");
        assert!(soon("the turn", waiter).await.expect("no panic") > token);
    }
}

#[tokio::test]
async fn local_waiters_are_granted_in_order() {
    let db = fresh().await;
    let locks = db.locks().await;
    let first = locks.lease("a").acquire().await.expect("acquire");
    let mut waiters = Vec::new();
    for i in 0..5 {
        let locks = locks.clone();
        waiters.push(tokio::spawn(async move {
            let lease = locks.lease("a").wait(Duration::from_secs(20)).acquire().await.expect("acquire");
            let token = lease.token();
            lease.release().await.expect("release");
            (i, token)
        }));
        tokio::task::yield_now().await;
    }
    first.release().await.expect("release");
    let mut last = None;
    for waiter in waiters {
        let (_, token) = soon("the turn", waiter).await.expect("no panic");
        assert!(Some(token) > last);
        last = Some(token);
    }
}

// ---- renewal and its end

#[tokio::test]
async fn lease_is_renewed_beyond_its_ttl() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let ttl = Duration::from_secs(6);
    let lease = ours.lease("a").ttl(ttl).acquire().await.expect("acquire");
    let token = lease.token();
    tokio::time::sleep(ttl * 2 + ms(100)).await;
    assert!(lease.is_held());
    assert!(lease.remaining() > Duration::ZERO);
    assert!(theirs.lease("a").try_acquire().await.expect("try").is_none());
    let info = theirs.inspect("a").await.expect("inspect").expect("held");
    assert_eq!((info.token, lease.token()), (token, token), "renewals leave the token alone");
    assert!(info.expires_at - info.acquired_at > delta(ttl * 2));
    lease.release().await.expect("release");
}

#[tokio::test]
async fn unrenewed_lease_ends_after_its_ttl() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let start = Instant::now();
    let lease = ours.lease("a").ttl(SHORT).renew(false).acquire().await.expect("acquire");
    assert!(lease.remaining() <= SHORT);
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Expired);
    // One percent and ten milliseconds earlier than the database.
    assert!(start.elapsed() >= SHORT - SHORT / 100 - ms(10));
    assert!(!lease.is_held());
    assert_eq!(lease.remaining(), Duration::ZERO);
    lost_by(lease.extend(LONG).await.expect_err("lost"), LossCause::Expired);
    assert!(!lease.is_held(), "what is lost stays lost");
    lost_by(lease.release().await.expect_err("lost"), LossCause::Expired);
    let next = soon("the turn", theirs.lease("a").acquire()).await.expect("acquire");
    next.release().await.expect("release");
}

#[tokio::test]
async fn extension_replaces_renewals() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(ms(5000)).renew(false).acquire().await.expect("acquire");
    let token = lease.token();
    lease.extend(LONG).await.expect("extend");
    assert!(lease.remaining() > LONG - SOON);
    // The lease lasts at least this long from now, and never shorter than before.
    lease.extend(SHORT).await.expect("extend");
    assert!(lease.remaining() > LONG - SOON * 2);
    tokio::time::sleep(ms(5100)).await;
    assert!(lease.is_held());
    let info = theirs.inspect("a").await.expect("inspect").expect("held");
    assert_eq!((info.token, lease.token()), (token, token), "an extension leaves the token alone");
    assert!(info.remaining > LONG - SOON * 3);
    lease.release().await.expect("release");
}

#[tokio::test]
async fn max_hold_ends_a_renewed_lease() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let start = Instant::now();
    let lease = ours.lease("a").ttl(ms(5000)).max_hold(ms(7000)).acquire().await.expect("acquire");
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::MaxHold);
    assert!(start.elapsed() >= ms(7000));
    // A hanging holder keeps its handle, and the name is granted to the next client.
    let next = soon("the turn", theirs.lease("a").acquire()).await.expect("acquire");
    lost_by(lease.extend(LONG).await.expect_err("lost"), LossCause::MaxHold);
    lost_by(lease.release().await.expect_err("lost"), LossCause::MaxHold);
    assert!(next.is_held());
    next.release().await.expect("release");
}

#[tokio::test]
async fn max_hold_frees_name_before_longer_ttl() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(LONG).max_hold(ms(3000)).acquire().await.expect("acquire");
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::MaxHold);
    let next = soon("the turn", theirs.lease("a").acquire()).await.expect("acquire");
    drop(lease);
    next.release().await.expect("release");
}

// ---- tries

#[tokio::test]
async fn concurrent_tries_are_answered_at_once() {
    const TRIES: usize = 200;
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let _held = take(&theirs, "held").await;
    for (name, grants) in [("free", 1), ("held", 0)] {
        let tries: JoinSet<_> = (0..TRIES).map(|_| ours.lease(name).ttl(LONG).try_acquire()).collect();
        let answers = soon("the answers", tries.join_all()).await;
        let granted: Vec<Lease> = answers.into_iter().filter_map(|answer| answer.expect("an answer")).collect();
        assert_eq!(granted.len(), grants, "{name}");
    }
}

// ---- hold_at_least

#[tokio::test]
async fn hold_at_least_keeps_name_taken_after_release() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let least = ms(6000);
    let start = Instant::now();
    let lease = ours.lease("a").ttl(LONG).hold_at_least(least).label("job").acquire().await.expect("acquire");
    let token = lease.token();
    lease.release().await.expect("release");
    assert!(ours.lease("a").try_acquire().await.expect("try").is_none());
    assert!(theirs.lease("a").try_acquire().await.expect("try").is_none());
    let info = theirs.inspect("a").await.expect("inspect").expect("taken");
    assert_eq!((info.owner, info.holds, info.token, info.label.as_str()), (None, 0, token, "job"));
    // Two milliseconds are added for the error of SQLite's clock.
    let added = if DATABASE == Database::Sqlite { ms(2) } else { ms(0) };
    assert!(info.remaining <= least + added);
    assert!(info.expires_at - info.acquired_at >= delta(least));
    assert_eq!(theirs.list("").await.expect("list").len(), 1);
    let next = soon("the turn", theirs.lease("a").acquire()).await.expect("acquire");
    assert!(start.elapsed() >= least, "{:?}", start.elapsed());
    assert!(next.token() > token);
    next.release().await.expect("release");
    assert_eq!(theirs.inspect("a").await.expect("inspect"), None);
}

#[tokio::test]
async fn hold_at_least_blocks_local_waiters() {
    let db = fresh().await;
    let locks = db.locks().await;
    let least = ms(800);
    let start = Instant::now();
    let lease = locks.lease("a").ttl(LONG).hold_at_least(least).acquire().await.expect("acquire");
    let mut next = std::pin::pin!(locks.lease("a").acquire());
    tokio::time::timeout(ms(20), &mut next).await.expect_err("held");
    drop(lease);
    let next = soon("the turn", next).await.expect("acquire");
    assert!(start.elapsed() >= least, "{:?}", start.elapsed());
    next.release().await.expect("release");
}

#[tokio::test]
async fn hold_at_least_outlasts_shutdown_and_max_hold() {
    let db = fresh().await;
    let theirs = db.locks().await;
    for end in ["shutdown", "drain", "max_hold"] {
        let ours = db.locks().await;
        let request = ours.lease(end).ttl(LONG).hold_at_least(LONG);
        let request = if end == "max_hold" { request.max_hold(ms(3000)) } else { request };
        let lease = soon("the grant", request.acquire()).await.expect("acquire");
        let cause = match end {
            "drain" => {
                assert!(!soon("the drain", ours.drain(Duration::ZERO)).await.expect("drain"));
                LossCause::Shutdown
            }
            "max_hold" => LossCause::MaxHold,
            _ => LossCause::Shutdown,
        };
        if end == "max_hold" {
            assert_eq!(soon("the loss", lease.lost()).await, cause);
        }
        // The lease has been given back after that.
        soon("the shutdown", ours.shutdown()).await.expect("shutdown");
        assert_eq!(soon("the loss", lease.lost()).await, cause);
        assert!(!is_free(&theirs, end).await, "the name is taken after {end}");
        let info = theirs.inspect(end).await.expect("inspect").expect("taken");
        assert_eq!(info.owner, None, "no owner holds the name after {end}");
        drop(lease);
    }
}

#[tokio::test]
async fn hold_at_least_adds_nothing_after_longer_hold() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(LONG).hold_at_least(ms(200)).acquire().await.expect("acquire");
    tokio::time::sleep(ms(250)).await;
    lease.release().await.expect("release");
    assert!(is_free(&theirs, "a").await);
}

// ---- label

#[tokio::test]
async fn label_is_visible_to_every_client() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let label = "é".repeat(127) + "x";
    assert_eq!(label.len(), 255);
    let lease = ours.lease("a").label(label.clone()).acquire().await.expect("acquire");
    let listed = theirs.list("a").await.expect("list");
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].label, label);
    lease.release().await.expect("release");
    // The next holder's label is its own.
    let lease = theirs.lease("a").acquire().await.expect("acquire");
    assert_eq!(ours.list("a").await.expect("list")[0].label, "");
    lease.release().await.expect("release");
}

// ---- run

#[tokio::test]
async fn run_returns_the_value_and_releases() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let value = ours
        .lease("a")
        .ttl(LONG)
        .run(async |lease| {
            assert!(lease.is_held());
            assert!(theirs.lease("a").try_acquire().await.expect("try").is_none());
            tokio::task::yield_now().await;
            42
        })
        .await;
    assert_eq!(value.expect("run"), 42);
    assert!(is_free(&theirs, "a").await);
}

#[tokio::test]
async fn run_passes_on_errors_of_the_work() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let outcome = ours.lease("a").ttl(LONG).run(async |_| Err::<(), _>("the work's own")).await;
    assert_eq!(outcome.expect("run"), Err("the work's own"));
    assert!(is_free(&theirs, "a").await);
}

/// Records its drop.
struct Dropped(Arc<AtomicBool>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn run_drops_the_work_on_loss() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let dropped = Arc::new(AtomicBool::new(false));
    let sign = Dropped(Arc::clone(&dropped));
    let work = ours.lease("a").ttl(LONG).max_hold(ms(3000)).run(async move |_| {
        let _sign = sign;
        std::future::pending::<()>().await;
    });
    let error = soon("the loss", work).await.expect_err("lost");
    assert!(dropped.load(Ordering::SeqCst));
    lost_by(error, LossCause::MaxHold);
    let next = soon("the turn", theirs.lease("a").acquire()).await.expect("acquire");
    next.release().await.expect("release");
}

#[tokio::test]
async fn run_polls_no_work_after_the_deadline() {
    let db = fresh().await;
    let (ours, polls) = (db.locks().await, AtomicU32::new(0));
    let work = ours.lease("a").ttl(SHORT * 10).run(async |lease| block_past(|| lease.remaining(), &polls).await);
    lost_by(soon("the loss", work).await.expect_err("lost"), LossCause::Expired);
    assert_eq!(polls.into_inner(), 2);
}

#[tokio::test]
async fn run_fails_when_lease_ended_before_work() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let outcome = ours
        .lease("a")
        .ttl(LONG)
        .run(async |lease| {
            assert!(theirs.evict("a", lease.token()).await.expect("evict"));
            theirs.lease("a").ttl(LONG).try_acquire().await.expect("try").expect("free")
        })
        .await;
    lost_by(outcome.expect_err("lost"), LossCause::Superseded);
}

#[tokio::test]
async fn run_respects_its_wait_limit() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = take(&theirs, "a").await;
    let outcome = ours.lease("a").wait(WAIT).run(async |_| panic!("the name is held")).await;
    let outcome: Result<(), Error> = outcome;
    assert!(outcome.expect_err("held").is_timeout());
    lease.release().await.expect("release");
}

// ---- release and drop

#[tokio::test]
async fn dropped_lease_is_released_in_background() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    drop(take(&ours, "a").await);
    take(&theirs, "a").await.release().await.expect("release");
    // The release also works when nothing else is left of the client.
    drop(take(&ours, "b").await);
    drop(ours);
    take(&theirs, "b").await.release().await.expect("release");
}

#[tokio::test]
async fn release_reports_whether_the_lease_lasted() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    take(&ours, "a").await.release().await.expect("it was ours to the end");
    // The lease was taken away: the database knows it, but not the holder, without a heartbeat.
    let lease = ours.lease("a").ttl(LONG).renew(false).acquire().await.expect("acquire");
    assert!(theirs.evict("a", lease.token()).await.expect("evict"));
    assert!(lease.is_held());
    lost_by(lease.release().await.expect_err("evicted"), LossCause::Superseded);
    // The lease has expired: the holder knows it without asking.
    let lease = ours.lease("a").ttl(SHORT).renew(false).acquire().await.expect("acquire");
    tokio::time::sleep(SHORT).await;
    lost_by(lease.release().await.expect_err("expired"), LossCause::Expired);
}

/// Promise 5.
#[tokio::test]
async fn stale_holder_cannot_release_the_successor() {
    let db = fresh().await;
    let pool = db.pool().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    // Once the holder knows that it lost …
    let known = ours.lease("a").ttl(SHORT).renew(false).acquire().await.expect("acquire");
    soon("the loss", known.lost()).await;
    let next = soon("the turn", theirs.lease("a").ttl(LONG).acquire()).await.expect("acquire");
    assert!(next.token() > known.token());
    // … and while it does not.
    let unaware = ours.lease("b").ttl(LONG).renew(false).acquire().await.expect("acquire");
    assert!(theirs.evict("b", unaware.token()).await.expect("evict"));
    let successor = take(&theirs, "b").await;
    assert!(unaware.is_held() && successor.token() > unaware.token());

    for stale in [known, unaware] {
        let mut tx = pool.begin().await.expect("begin");
        let error = stale.fence(&mut tx).await.expect_err("lost");
        assert!(error.is_lost(), "{error}");
        tx.rollback().await.expect("rollback");
        let error = stale.release().await.expect_err("lost");
        assert!(error.is_lost(), "{error}");
    }
    for (name, held) in [("a", next), ("b", successor)] {
        let info = ours.inspect(name).await.expect("inspect").expect("held");
        assert_eq!((info.token, info.owner, info.holds), (held.token(), Some(held.owner()), 1));
        assert!(ours.lease(name).try_acquire().await.expect("try").is_none());
        held.extend(LONG).await.expect("still ours");
        held.release().await.expect("ours to the end");
    }
}

#[tokio::test]
async fn dropped_stale_guard_does_not_touch_successor() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let stale = ours.lease("a").ttl(SHORT).renew(false).acquire().await.expect("acquire");
    soon("the loss", stale.lost()).await;
    let next = soon("the turn", theirs.lease("a").ttl(LONG).acquire()).await.expect("acquire");
    drop(stale);
    // This release follows the statements of the drop on the same connection.
    take(&ours, "b").await.release().await.expect("release");
    next.extend(LONG).await.expect("still ours");
    next.release().await.expect("ours to the end");
}

// ---- promise 15: bounds

#[tokio::test]
async fn value_out_of_range_is_refused_not_clamped() {
    let db = fresh().await;
    let locks = ordinary(&db).await;
    let (floor, ceiling) = (Duration::from_secs(1), Duration::from_secs(24 * 3600));
    for ttl in [Duration::ZERO, ms(999), ceiling + ms(1), Duration::MAX] {
        out_of_range(locks.lease("a").ttl(ttl).acquire().await.expect_err("ttl"), ttl, floor, ceiling);
        out_of_range(locks.lease("a").ttl(ttl).try_acquire().await.expect_err("ttl"), ttl, floor, ceiling);
        let run = locks.lease("a").ttl(ttl).run(async |_| panic!("nothing was acquired"));
        let run: Result<(), Error> = run.await;
        out_of_range(run.expect_err("ttl"), ttl, floor, ceiling);
    }
    let error = locks.lease("a").max_hold(ms(999)).acquire().await.expect_err("max_hold");
    assert!(error.to_string().ends_with("it must be at least 1s"), "{error}");
    out_of_range(error, ms(999), floor, Duration::MAX);
    let at_least = ceiling + ms(1);
    let error = locks.lease("a").hold_at_least(at_least).acquire().await.expect_err("hold_at_least");
    out_of_range(error, at_least, Duration::ZERO, ceiling);
    let error = locks.lease("a").label("x".repeat(256)).acquire().await.expect_err("label");
    assert!(matches!(error, Error::LabelTooLong { bytes: 256 }), "{error}");
    assert!(!error.is_retryable());

    for ttl in [floor, ceiling] {
        let lease = locks.lease("a").ttl(ttl).acquire().await.expect("the bounds are allowed");
        for extension in [ms(999), ceiling + ms(1)] {
            out_of_range(lease.extend(extension).await.expect_err("extend"), extension, floor, ceiling);
        }
        let released = lease.release().await;
        // On a machine under load the shortest TTL may have passed by now.
        assert!(released.is_ok() || ttl == floor && released.is_err_and(|error| error.is_lost()), "{ttl:?}");
    }
    let lease = locks.lease("a").max_hold(Duration::MAX).acquire().await.expect("no limit");
    assert!(lease.is_held());
    lease.release().await.expect("release");
}

#[track_caller]
fn out_of_range(error: Error, given: Duration, min: Duration, max: Duration) {
    match error {
        Error::OutOfRange { given: g, min: a, max: b, .. } => assert_eq!((g, a, b), (given, min, max)),
        error => panic!("{error}"),
    }
}

#[tokio::test]
async fn builder_sets_the_ttl_range() {
    let db = fresh().await;
    let (min, max) = (ms(1500), ms(25_000));
    let locks = Locks::builder(db.pool_of(1).await).ttl_range(min..=max).build();
    out_of_range(locks.lease("a").ttl(ms(1499)).acquire().await.expect_err("ttl"), ms(1499), min, max);
    out_of_range(locks.lease("a").ttl(ms(25_001)).acquire().await.expect_err("ttl"), ms(25_001), min, max);
    let lease = locks.lease("a").ttl(ms(20_000)).acquire().await.expect("acquire");
    lease.release().await.expect("release");
}

// ---- promise 4: tokens

#[tokio::test]
async fn tokens_rise_after_every_kind_of_end() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let mut last = None;
    let mut rises = |lease: &Lease, after: &str| {
        let token = lease.token();
        assert!(token.get() < 1 << 53, "exact in JSON");
        assert!(Some(token) > last, "after {after}");
        last = Some(token);
        token
    };
    for round in 0..3 {
        let lease = take(if round % 2 == 0 { &ours } else { &theirs }, "a").await;
        rises(&lease, "a sweep");
        lease.release().await.expect("release");

        let lease = take(&theirs, "a").await;
        rises(&lease, "a release");
        drop(lease);

        let lease = soon("the turn", ours.lease("a").ttl(SHORT).renew(false).acquire()).await.expect("acquire");
        rises(&lease, "a drop");
        soon("the loss", lease.lost()).await;

        let lease = take(&theirs, "a").await;
        let token = rises(&lease, "an expiry");
        assert!(ours.evict("a", token).await.expect("evict"));

        let next = take(&ours, "a").await;
        rises(&next, "an eviction");
        drop(lease);
        next.release().await.expect("release");

        // One hand-over inside the process, in one statement.
        let lease = take(&ours, "a").await;
        rises(&lease, "a release");
        let mut next = std::pin::pin!(ours.lease("a").ttl(LONG).acquire());
        tokio::time::timeout(ms(20), &mut next).await.expect_err("held");
        lease.release().await.expect("release");
        let next = soon("the turn", next).await.expect("acquire");
        rises(&next, "a hand-over");
        next.release().await.expect("release");

        sweep_away(&ours, "a").await;
    }
}

/// Purges the row of a name that is free.
async fn sweep_away(locks: &Locks, name: &str) {
    let sweeper = locks.sweeper().retention(Duration::ZERO);
    until(&format!("the purge of {name}"), async || sweeper.clone().sweep().await.expect("sweep") > 0).await;
}

#[tokio::test]
async fn token_survives_printing_and_parsing() {
    let db = fresh().await;
    let locks = db.locks().await;
    let lease = take(&locks, "a").await;
    let printed = lease.token().to_string();
    let read = printed.parse().ok().and_then(FencingToken::new);
    assert_eq!(read, Some(lease.token()));
    lease.release().await.expect("release");
}

#[tokio::test]
async fn token_is_bound_and_read_as_number() {
    let db = fresh().await;
    let pool = db.pool().await;
    let lease = take(&db.locks().await, "a").await;
    pool.execute("CREATE TABLE effect (token BIGINT)").await.expect("create");
    for token in [Some(lease.token()), None] {
        let mut insert = QueryBuilder::<Sql>::new("INSERT INTO effect (token) VALUES (");
        insert.push_bind(token).push(")").build().execute(&pool).await.expect("insert");
    }
    let mut select = QueryBuilder::<Sql>::new("SELECT token FROM effect WHERE token >= ");
    let read: FencingToken = select.push_bind(lease.token()).build_query_scalar().fetch_one(&pool).await.expect("read");
    assert_eq!(read, lease.token());
    let null = sqlx::query_scalar::<_, Option<FencingToken>>("SELECT token FROM effect WHERE token IS NULL");
    assert_eq!(null.fetch_one(&pool).await.expect("read"), None);

    pool.execute("UPDATE effect SET token = 0").await.expect("update");
    let zero = sqlx::query_scalar::<_, FencingToken>("SELECT token FROM effect").fetch_one(&pool).await;
    assert!(matches!(zero, Err(sqlx::Error::ColumnDecode { .. })), "{zero:?}");
    lease.release().await.expect("release");
}

fn delta(duration: Duration) -> TimeDelta {
    TimeDelta::from_std(duration).expect("a short time")
}

#[tokio::test]
async fn zero_wait_asks_once() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").wait(Duration::ZERO).acquire().await.expect("free");
    let error = theirs.lease("a").wait(Duration::ZERO).acquire().await.expect_err("held");
    assert!(error.is_timeout(), "{error}");
    lease.release().await.expect("release");
}

#[tokio::test]
async fn local_deadline_precedes_database_after_long_extension() {
    let db = fresh().await;
    let locks = db.locks().await;
    let lease = locks.lease("a").ttl(Duration::from_secs(3)).acquire().await.expect("acquire");
    lease.extend(Duration::from_secs(3600)).await.expect("extend");
    let info = locks.inspect("a").await.expect("inspect").expect("held");
    // The margin is one percent; what has passed between the two readings makes the difference
    // smaller.
    assert!(info.remaining > lease.remaining() + Duration::from_secs(30), "{info:?}, {:?}", lease.remaining());
    lease.release().await.expect("release");
}

#[tokio::test]
async fn nul_is_refused_in_label_replaced_in_holder() {
    let db = fresh().await;
    let locks = db.builder().await.holder("a\0b").build();
    let error = locks.lease("a").label("x\0y").acquire().await.expect_err("a NUL");
    assert!(matches!(error, Error::NulInLabel), "{error}");
    let lease = locks.lease("a").acquire().await.expect("acquire");
    assert_eq!(locks.inspect("a").await.expect("inspect").expect("held").holder, "a\u{fffd}b");
    lease.release().await.expect("release");
}

#[test]
fn loss_is_reported_after_client_runtime_ended() {
    let runtime =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let first = runtime();
    let (db, lease) = first.block_on(async {
        let db = fresh().await;
        let locks = db.locks().await;
        let lease = locks.lease("a").ttl(Duration::from_secs(1)).acquire().await.expect("acquire");
        (db, lease)
    });
    first.shutdown_background();
    let cause = runtime().block_on(soon("the loss", lease.lost()));
    assert_eq!(cause, LossCause::Expired);
    drop(db);
}

#[test]
fn client_survives_a_call_outside_a_runtime() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let db = runtime.block_on(fresh());
    let locks = runtime.block_on(db.locks());
    let outside = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut acquire = std::pin::pin!(locks.lease("a").acquire());
        let _ = acquire.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    }));
    assert!(outside.is_err());
    runtime.block_on(async { locks.lease("a").acquire().await.expect("acquire").release().await.expect("release") });
}

#[tokio::test]
async fn callers_of_one_name_fail_together_without_database() {
    let url = match DATABASE {
        Database::Sqlite => "sqlite:///nowhere/at/all.db",
        Database::Postgres => "postgres://postgres@127.0.0.1:9/postgres",
        Database::MySql | Database::MariaDb => "mysql://root@127.0.0.1:9/test",
    };
    let locks = builder(connect(url, 1).await).build();
    let calls: Vec<_> = (0..40)
        .map(|_| {
            let request = locks.lease("a");
            tokio::spawn(async move { request.try_acquire().await })
        })
        .collect();
    // One after the other they would need more than two minutes.
    soon("the answers", async {
        for call in calls {
            let error = call.await.expect("no panic").expect_err("no database");
            if DATABASE == Database::Sqlite {
                assert!(matches!(error, Error::Access { cause: AccessError::NoDatabase, .. }), "{error}");
            } else {
                assert!(matches!(error, Error::Unavailable { .. }), "{error}");
            }
        }
    })
    .await;
}

#[tokio::test]
async fn callers_of_many_names_fail_together_without_database() {
    if DATABASE == Database::Sqlite {
        // A file that does not exist is no outage.
        return;
    }
    let url = if DATABASE == Database::Postgres {
        "postgres://postgres@127.0.0.1:9/postgres"
    } else {
        "mysql://root@127.0.0.1:9/test"
    };
    let locks = builder(connect(url, 1).await).build();
    let calls: Vec<_> = (0..800)
        .map(|i| {
            let request = locks.lease(format!("n{i}"));
            tokio::spawn(async move { request.try_acquire().await })
        })
        .collect();
    // One after the other they would need more than a minute.
    soon("the answers", async {
        for call in calls {
            let error = call.await.expect("no panic").expect_err("no database");
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        }
    })
    .await;
}

#[tokio::test]
async fn concurrent_tries_grant_a_free_name_once() {
    let db = fresh().await;
    let clients = [db.locks().await, db.locks().await, db.locks().await];
    for round in 0..200 {
        let begun = Instant::now();
        let tries = clients.each_ref().map(|locks| tokio::spawn(locks.lease("n").try_acquire()));
        let mut granted = Vec::new();
        for attempt in tries {
            granted.extend(attempt.await.expect("no panic").expect("it can be asked"));
        }
        let is_slow = granted.is_empty() && begun.elapsed() > TRY;
        assert!(granted.len() == 1 || is_slow, "{} were granted in round {round}", granted.len());
        for lease in granted {
            // Nothing else is in flight when the next round begins.
            lease.release().await.expect("released");
        }
    }
}

/// A trigger of the application that reverts every change of a row, or refuses it where the
/// database has no such triggers.
const SABOTAGE: &[&str] = match DATABASE {
    Database::Postgres => &[
        "CREATE FUNCTION sabotage() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER sabotage BEFORE UPDATE ON sqlock_lease FOR EACH ROW EXECUTE FUNCTION sabotage()",
    ],
    Database::Sqlite => &["CREATE TRIGGER sabotage BEFORE UPDATE ON sqlock_lease BEGIN SELECT RAISE(IGNORE); END"],
    Database::MySql | Database::MariaDb => &["CREATE TRIGGER sabotage BEFORE UPDATE ON sqlock_lease FOR EACH ROW
          SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not here'"],
};

#[tokio::test]
async fn release_undone_by_database_is_an_error() {
    let db = fresh().await;
    let (locks, pool) = (db.locks().await, db.pool_of(1).await);
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    for sql in SABOTAGE {
        pool.execute(*sql).await.expect("a trigger");
    }
    let error = soon("the verdict", lease.release()).await.expect_err("nothing was released");
    assert!(matches!(error, Error::Database { attempted: "release", .. }), "{error}");
    assert!(!error.is_retryable() && !error.is_lost(), "{error}");
    let drop_trigger =
        if DATABASE == Database::Postgres { "DROP TRIGGER sabotage ON sqlock_lease" } else { "DROP TRIGGER sabotage" };
    pool.execute(drop_trigger).await.expect("no trigger");
    locks.lease("b").acquire().await.expect("the client works again").release().await.expect("release");
}
