//! The database in memory for the tests of applications: its faults, and the clients on it, in
//! virtual time.
#![allow(clippy::expect_used, clippy::panic)]

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use sqlock::events::{Event, Events};
use sqlock::health::Heartbeat;
use sqlock::quorum::{Quorum, QuorumLease};
use sqlock::testing::{Memory, null_locks};
use sqlock::{Error, LossCause};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

const TTL: Duration = Duration::from_secs(30);

/// The next event of this kind. Others before it are passed over.
macro_rules! next {
    ($events:expr, $event:pat) => {
        while !matches!($events.next().await.expect("the stream goes on"), $event) {}
    };
}

async fn is_waiting(events: &mut Events) {
    next!(events, Event::Waiting { .. });
}

#[tokio::test(start_paused = true)]
async fn clients_of_one_memory_exclude_each_other() {
    let memory = Memory::new();
    let clients = [memory.locks(), memory.locks(), memory.locks()];
    let first = clients[0].lease("a").acquire().await.expect("acquire");
    let mut waiters = Vec::new();
    for locks in &clients[1..] {
        let mut events = locks.events();
        waiters.push(tokio::spawn(locks.lease("a").acquire()));
        is_waiting(&mut events).await;
        // The entry is written after the refusal.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let mut token = first.token();
    first.release().await.expect("held to the end");
    for waiter in waiters {
        let lease = waiter.await.expect("no panic").expect("acquire");
        assert!(lease.token() > token);
        token = lease.token();
        lease.release().await.expect("held to the end");
    }
}

#[tokio::test(start_paused = true)]
async fn lease_is_renewed_for_hours_of_virtual_time() {
    let memory = Memory::new();
    let locks = memory.locks();
    let lease = locks.lease("a").ttl(TTL).acquire().await.expect("acquire");
    tokio::time::sleep(Duration::from_secs(2 * 3600)).await;
    assert!(lease.is_held() && lease.remaining() > TTL / 2);
    assert!(memory.locks().lease("a").try_acquire().await.expect("try").is_none());
    lease.release().await.expect("held to the end");
}

#[tokio::test(start_paused = true)]
async fn unrenewed_lease_expires_in_virtual_time() {
    let memory = Memory::new();
    let (here, there) = (memory.locks(), memory.locks());
    let start = Instant::now();
    let lease = here.lease("a").ttl(TTL).renew(false).acquire().await.expect("acquire");
    assert_eq!(lease.lost().await, LossCause::Expired);
    assert!((TTL * 9 / 10..TTL).contains(&start.elapsed()), "the holder knows first: {:?}", start.elapsed());
    let _next = there.lease("a").acquire().await.expect("acquire");
    assert!((TTL..TTL + Duration::from_secs(1)).contains(&start.elapsed()), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn stranger_refuses_tries_and_lets_waiters_wait() {
    let memory = Memory::new();
    let locks = memory.locks();
    assert!(memory.refuse("a").expect("a name"));
    assert!(locks.lease("a").try_acquire().await.expect("try").is_none());
    let mut events = locks.events();
    let waiter = tokio::spawn(locks.lease("a").acquire());
    is_waiting(&mut events).await;
    memory.allow("a").expect("a name");
    let lease = waiter.await.expect("no panic").expect("acquire");
    assert!(!memory.refuse("a").expect("a name"), "a client holds it");
    assert!(lease.is_held());
    lease.release().await.expect("held to the end");
}

#[tokio::test(start_paused = true)]
async fn name_of_ended_holders_is_refused() {
    let memory = Memory::new();
    let locks = memory.locks();
    let permit = locks.semaphore("permits", 2).acquire().await.expect("acquire");
    permit.release().await.expect("held to the end");
    let kept = locks.lease("kept").hold_at_least(TTL).acquire().await.expect("acquire");
    kept.release().await.expect("held to the end");
    let _expired = locks.lease("expired").ttl(TTL).renew(false).acquire().await.expect("acquire");
    assert!(!memory.refuse("kept").expect("a name") && !memory.refuse("expired").expect("a name"));
    sleep(TTL * 2).await;
    for name in ["permits", "kept", "expired"] {
        assert!(memory.refuse(name).expect("a name"), "{name}");
        assert!(locks.lease(name).try_acquire().await.expect("try").is_none(), "{name}");
    }
}

#[tokio::test(start_paused = true)]
async fn wait_for_a_permit_is_an_event() {
    let memory = Memory::new();
    let (here, there) = (memory.locks(), memory.locks());
    let permit = here.semaphore("a", 1).acquire().await.expect("acquire");
    let mut events = there.events();
    let pool = there.semaphore("a", 1);
    let waiter = tokio::spawn(async move { pool.acquire().await });
    is_waiting(&mut events).await;
    permit.release().await.expect("held to the end");
    let _next = waiter.await.expect("no panic").expect("acquire");
}

#[tokio::test(start_paused = true)]
async fn name_taken_after_eviction_is_not_refused() {
    let memory = Memory::new();
    let locks = memory.locks();
    assert!(memory.refuse("a").expect("a name") && memory.refuse("a").expect("a name"));
    assert_eq!(memory.evict("a").expect("a name"), 1);
    let lease = locks.lease("a").acquire().await.expect("acquire");
    assert!(!memory.refuse("a").expect("a name"), "a client holds it");
    lease.release().await.expect("held to the end");
    assert!(memory.refuse("a").expect("a name"));
    assert!(locks.lease("a").try_acquire().await.expect("try").is_none());
}

#[tokio::test(start_paused = true)]
async fn slow_release_does_not_prolong_the_wait() {
    const WAIT: Duration = Duration::from_secs(2);
    let memory = Memory::new();
    let locks = memory.locks();
    assert!(memory.refuse("b").expect("a name"));
    let mut events = locks.events();
    let start = Instant::now();
    let waiter = tokio::spawn(locks.lease_all(["a", "b"]).wait(WAIT).acquire());
    is_waiting(&mut events).await;
    memory.delay(Duration::from_secs(5));
    waiter.await.expect("no panic").expect_err("b is refused");
    assert!((WAIT..WAIT + Duration::from_millis(500)).contains(&start.elapsed()), "{:?}", start.elapsed());
    memory.delay(Duration::ZERO);
    let lease = memory.locks().lease("a").acquire().await.expect("the release goes on");
    lease.release().await.expect("held to the end");
}

#[tokio::test(start_paused = true)]
async fn evicted_holder_learns_within_a_second() {
    let memory = Memory::new();
    let locks = memory.locks();
    let lease = locks.lease("a").ttl(TTL).acquire().await.expect("acquire");
    let permit = locks.semaphore("s", 2).acquire().await.expect("acquire");
    assert_eq!((memory.evict("a").expect("a name"), memory.evict("s").expect("a name")), (1, 1));
    let start = Instant::now();
    assert_eq!((lease.lost().await, permit.lost().await), (LossCause::Superseded, LossCause::Superseded));
    assert!(start.elapsed() <= Duration::from_millis(1500), "{:?}", start.elapsed());
    assert!(matches!(lease.release().await, Err(Error::Lost { cause: LossCause::Superseded, .. })));
    assert_eq!(memory.evict("a").expect("a name"), 0, "nobody holds it");
}

#[tokio::test(start_paused = true)]
async fn released_lease_that_blocks_its_name_is_evicted() {
    let memory = Memory::new();
    let locks = memory.locks();
    for request in [locks.lease("a"), locks.lease("a").shared()] {
        let request = request.ttl(TTL).hold_at_least(TTL);
        request.clone().acquire().await.expect("acquire").release().await.expect("held to the end");
        assert!(!memory.refuse("a").expect("a name"), "the name is kept");
        assert_eq!(memory.evict("a").expect("a name"), 1);
        assert_eq!(memory.evict("a").expect("a name"), 0, "nobody holds it");
        request.acquire().await.expect("acquire").release().await.expect("held to the end");
        sleep(TTL * 2).await;
        assert_eq!(memory.evict("a").expect("a name"), 0, "the time is over");
    }
}

#[tokio::test(start_paused = true)]
async fn asked_holder_learns_within_a_second() {
    let memory = Memory::new();
    let (here, there) = (memory.locks(), memory.locks());
    let lease = here.lease("a").ttl(TTL).acquire().await.expect("acquire");
    let permit = here.semaphore("s", 2).acquire().await.expect("acquire");
    assert_eq!(there.ask_to_release("a").await.expect("ask"), 1);
    assert_eq!(there.ask_to_release("s").await.expect("ask"), 1);
    let start = Instant::now();
    lease.revoke_requested().await;
    permit.revoke_requested().await;
    assert!(start.elapsed() <= Duration::from_millis(1500), "{:?}", start.elapsed());
    lease.release().await.expect("held to the end");
    assert_eq!(there.ask_to_release("a").await.expect("ask"), 0, "nobody holds it");
    let next = here.lease("a").ttl(TTL).acquire().await.expect("acquire");
    tokio::select! {
        () = next.revoke_requested() => panic!("the request came before it"),
        () = tokio::time::sleep(TTL) => {}
    }
}

#[tokio::test(start_paused = true)]
async fn expired_holder_learns_before_the_next_grant() {
    let memory = Memory::new();
    let (here, there) = (memory.locks(), memory.locks());
    let lease = here.lease("a").ttl(TTL).acquire().await.expect("acquire");
    let mut events = there.events();
    let waiter = tokio::spawn(there.lease("a").acquire());
    is_waiting(&mut events).await;
    let start = Instant::now();
    assert_eq!(memory.expire("a").expect("a name"), 1);
    assert_eq!(lease.lost().await, LossCause::Expired);
    assert!(!waiter.is_finished(), "the holder knows first");
    let next = waiter.await.expect("no panic").expect("acquire");
    assert!(next.token() > lease.token());
    assert!(start.elapsed() < TTL + Duration::from_secs(1), "{:?}", start.elapsed());
    // The client that was cut off goes on.
    let other = here.lease("b").ttl(TTL).acquire().await.expect("acquire");
    tokio::time::sleep(TTL * 2).await;
    other.release().await.expect("held to the end");
}

/// A hand-over grants a short lease, which is extended at once to its TTL.
#[tokio::test(start_paused = true)]
async fn lease_that_was_just_handed_over_expires() {
    let memory = Memory::new();
    let (here, there) = (memory.locks(), memory.locks());
    let first = here.lease("a").acquire().await.expect("acquire");
    let waiter = tokio::spawn(there.lease("a").acquire());
    sleep(Duration::from_secs(1)).await;
    first.release().await.expect("held to the end");
    let lease = waiter.await.expect("no panic").expect("acquire");
    assert_eq!(memory.expire("a").expect("a name"), 1);
    assert!(lease.extend(Duration::from_secs(60)).await.is_err());
    assert_eq!(lease.lost().await, LossCause::Expired);
}

#[tokio::test(start_paused = true)]
async fn lease_expires_despite_heartbeat_under_way() {
    let memory = Memory::new();
    memory.delay(Duration::from_millis(100));
    let lease = memory.locks().lease("a").ttl(TTL).acquire().await.expect("acquire");
    // The first heartbeat was sent 1 second after the request, 50 ms ago.
    sleep(Duration::from_millis(950)).await;
    assert_eq!(memory.expire("a").expect("a name"), 1);
    let lost = timeout(Duration::from_secs(40), lease.lost()).await;
    assert_eq!(lost.expect("the lease expires"), LossCause::Expired);
}

#[tokio::test(start_paused = true)]
async fn expiries_of_client_last_as_longest_one() {
    let memory = Memory::new();
    let locks = memory.locks();
    let long = locks.lease("long").ttl(TTL * 4).acquire().await.expect("acquire");
    let short = locks.lease("short").ttl(TTL).acquire().await.expect("acquire");
    let _permits = [
        locks.semaphore("permits", 2).acquire().await.expect("acquire"),
        locks.semaphore("permits", 2).acquire().await.expect("acquire"),
    ];
    for name in ["long", "short", "permits"] {
        assert_eq!(memory.expire(name).expect("a name"), 1, "{name}");
    }
    assert_eq!(short.lost().await, LossCause::Expired);
    assert_eq!(long.lost().await, LossCause::Expired);
}

#[tokio::test(start_paused = true)]
async fn failed_requests_have_no_effect() {
    let memory = Memory::new();
    let locks = memory.locks();
    memory.fail(1);
    assert!(matches!(locks.lease("a").acquire().await, Err(Error::Database { .. })));
    assert!(memory.locks().lease("a").try_acquire().await.expect("try").is_some());
}

#[tokio::test(start_paused = true)]
async fn short_outage_costs_no_lease_and_is_told() {
    let memory = Memory::new();
    let locks = memory.locks();
    let lease = locks.lease("a").ttl(TTL).acquire().await.expect("acquire");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut events = locks.events();
    memory.go_away();
    next!(events, Event::HeartbeatLate { .. });
    assert_eq!(locks.health().heartbeat, Heartbeat::Late);
    assert!(locks.health().unavailable.is_some() && locks.health().connections <= 1);
    next!(events, Event::HeartbeatFailed { .. });
    memory.come_back();
    next!(events, Event::Reconnected);
    next!(events, Event::HeartbeatRestored);
    assert!(locks.health().is_ok() && lease.is_held());
    assert_eq!(locks.health().round_trip, Some(Duration::ZERO), "the clock stands still meanwhile");
    lease.release().await.expect("held to the end");
}

#[tokio::test(start_paused = true)]
async fn long_outage_loses_the_lease_and_fails_requests() {
    let memory = Memory::new();
    let locks = memory.locks();
    let lease = locks.lease("a").ttl(TTL).acquire().await.expect("acquire");
    memory.go_away();
    assert!(matches!(locks.lease("b").try_acquire().await, Err(Error::Unavailable { .. })));
    assert_eq!(lease.lost().await, LossCause::Expired);
    memory.come_back();
    let again = locks.lease("a").acquire().await.expect("acquire");
    assert!(again.token() > lease.token());
}

#[tokio::test(start_paused = true)]
async fn holders_and_waiters_can_be_inspected() {
    let memory = Memory::new();
    let (here, there) = (memory.builder().holder("here").build(), memory.builder().holder("there").build());
    let lease = here.lease("a").label("first").acquire().await.expect("acquire");
    let _reader = here.lease("b").shared().acquire().await.expect("acquire");
    let mut events = there.events();
    let _waiter = tokio::spawn(there.lease("a").label("second").acquire());
    is_waiting(&mut events).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    let listed = there.list("").await.expect("list");
    let answer: Vec<_> =
        listed.iter().map(|info| (info.name.as_str(), &*info.holder, &*info.label, info.waiters)).collect();
    assert_eq!(answer, [("a", "here", "first", 1), ("b", "here", "", 0)]);
    assert_eq!((listed[0].token, listed[0].owner), (lease.token(), Some(lease.owner())));
    let waiters = here.waiters("a").await.expect("waiters");
    assert_eq!(
        waiters.iter().map(|waiter| (&*waiter.holder, &*waiter.label)).collect::<Vec<_>>(),
        [("there", "second")]
    );
}

#[tokio::test(start_paused = true)]
async fn work_without_a_model_is_unsupported() {
    let memory = Memory::new();
    let locks = memory.locks();
    assert!(matches!(locks.session("a").acquire().await, Err(Error::Unsupported { .. })));
    assert_eq!(locks.sweeper().sweep().await.expect("there is nothing to purge"), 0);
    locks.migrate().await.expect("there is nothing to create");
}

#[tokio::test(start_paused = true)]
async fn null_locks_exclude_nobody_and_lose_nothing() {
    let locks = null_locks();
    let (mut held, mut all) = (Vec::new(), Vec::new());
    let now = Instant::now();
    for _ in 0..3 {
        held.push(locks.lease("a").ttl(TTL).acquire().await.expect("acquire"));
        held.push(locks.lease("a").renew(false).try_acquire().await.expect("try").expect("never refused"));
        held.push(locks.lease("a").shared().acquire().await.expect("acquire"));
        held.push(locks.semaphore("a", 1).acquire().await.expect("acquire"));
        all.push(locks.lease_all(["b", "a"]).acquire().await.expect("acquire"));
    }
    assert_eq!(now.elapsed(), Duration::ZERO, "nobody waits");
    held[0].extend(Duration::from_secs(1)).await.expect("extend");
    tokio::time::sleep(Duration::from_secs(2 * 3600)).await;
    assert!(held.iter().all(sqlock::Lease::is_held) && all.iter().all(sqlock::LeaseAll::is_held));
    let last = locks.lease("a").acquire().await.expect("acquire");
    assert!(held.iter().all(|lease| lease.token() < last.token()), "tokens rise");
    for lease in held {
        lease.release().await.expect("held to the end");
    }
    drop(all);
    assert!(last.is_held());
    assert!(locks.drain(Duration::ZERO).await.is_ok_and(|is_drained| !is_drained));
    assert!(!last.is_held());
}

#[tokio::test(start_paused = true)]
async fn exported_null_lock_can_be_resumed() {
    let locks = null_locks();
    for request in [locks.lease("a"), locks.lease("a").shared()] {
        let lease = request.acquire().await.expect("acquire");
        let token = lease.token();
        let exported = lease.export().expect("export").to_string();
        let lease = locks.resume(exported.parse().expect("an exported lease")).await.expect("resume");
        assert_eq!(lease.token(), token);
        lease.release().await.expect("held to the end");
    }
}

#[cfg(feature = "sqlite")]
#[tokio::test]
async fn fence_of_null_lock_changes_nothing() {
    let locks = null_locks();
    let lease = locks.lease("a").acquire().await.expect("acquire");
    let pool = sqlx::SqlitePool::connect("sqlite::memory:").await.expect("connect");
    let mut tx = pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("a fence");
    tx.commit().await.expect("commit");
    assert!(locks.evict("a", lease.token()).await.expect("evict"));
    lease.lost().await;
    let mut tx = pool.begin().await.expect("begin");
    assert!(lease.fence(&mut tx).await.expect_err("the application has evicted it").is_lost());
}

/// Another connection answers after one that was lost.
#[tokio::test(start_paused = true)]
async fn answered_client_forgets_a_lost_connection() {
    let memory = Memory::new();
    let (locks, other) = (memory.locks(), memory.locks());
    let held = other.lease("a").acquire().await.expect("acquire");
    memory.delay(Duration::from_millis(100));
    let both = tokio::join!(locks.list(""), locks.list("b"));
    assert!(both.0.is_ok() && both.1.is_ok() && locks.health().connections == 2);
    memory.delay(Duration::from_secs(10));
    let lost = tokio::spawn({
        let locks = locks.clone();
        async move { locks.list("").await }
    });
    tokio::time::sleep(Duration::from_millis(10)).await;
    memory.delay(Duration::ZERO);
    lost.await.expect("no panic").expect("the other connection answers");
    assert_eq!(locks.health().unavailable, None);
    let refused = locks.lease("a").wait(Duration::from_secs(2)).acquire().await;
    assert!(matches!(&refused, Err(Error::Timeout { .. })), "{refused:?}");
    held.release().await.expect("held to the end");
    locks.shutdown().await.expect("nothing is held");
}

/// The last heartbeat before an outage failed. A later lease has had none.
#[tokio::test(start_paused = true)]
async fn client_is_well_again_after_an_outage() {
    let memory = Memory::new();
    let locks = memory.locks();
    let lease = locks.lease("a").ttl(Duration::from_secs(10)).acquire().await.expect("acquire");
    sleep(Duration::from_secs(1)).await;
    memory.go_away();
    assert_eq!(lease.lost().await, LossCause::Expired);
    assert!(lease.release().await.expect_err("it was lost").is_lost());
    sleep(Duration::from_secs(60)).await;
    assert!(locks.health().unavailable.is_some());
    memory.come_back();
    locks.list("").await.expect("the database answers");
    assert_eq!(locks.health().unavailable, None);
    let lease = locks.lease("b").acquire().await.expect("acquire");
    assert_eq!(locks.health().heartbeat, Heartbeat::Answered);
    lease.release().await.expect("held to the end");
}

#[tokio::test(start_paused = true)]
async fn waiters_of_one_client_are_counted_once() {
    let memory = Memory::new();
    let (ours, theirs) = (memory.locks(), memory.locks());
    let held = theirs.lease("a").acquire().await.expect("acquire");
    let (progress, mut ahead) = tokio::sync::watch::channel(None);
    let first = tokio::spawn(ours.lease("a").acquire());
    sleep(Duration::from_secs(1)).await;
    let second = ours.lease("a").while_waiting(move |waiting| {
        let _ = progress.send(Some(waiting.ahead));
    });
    let second = tokio::spawn(second.acquire());
    ahead.changed().await.expect("the wait is reported");
    assert_eq!(*ahead.borrow(), Some(1));
    held.release().await.expect("held to the end");
    first.await.expect("no panic").expect("acquire").release().await.expect("held to the end");
    second.await.expect("no panic").expect("acquire").release().await.expect("held to the end");
}

/// The answer that grants the name to the waiter comes before that to the resumption.
#[tokio::test(start_paused = true)]
async fn late_resumption_is_lost_beside_a_waiter() {
    let mut lost = 0;
    for offset in (0..1000).step_by(20) {
        let memory = Memory::new();
        let (ours, theirs) = (memory.locks(), memory.locks());
        let lease = ours.lease("a").ttl(Duration::from_secs(2)).acquire().await.expect("acquire");
        let exported = lease.export().expect("it is held");
        memory.delay(Duration::from_millis(100));
        let waiter = tokio::spawn(theirs.lease("a").acquire());
        sleep(Duration::from_millis(1400 + offset)).await;
        match theirs.resume(exported).await {
            Ok(_) => {}
            Err(Error::Lost { .. }) => lost += 1,
            Err(error) => panic!("after {offset} ms: {error:?}"),
        }
        waiter.abort();
    }
    assert!(lost > 0);
}

#[tokio::test(start_paused = true)]
async fn pending_extension_ends_with_cause_of_loss() {
    let memory = Memory::new();
    let locks = memory.locks();
    let lease = locks.lease("a").max_hold(Duration::from_secs(2)).acquire().await.expect("acquire");
    sleep(Duration::from_millis(1900)).await;
    memory.delay(Duration::from_millis(500));
    // The second request waits for the answer to the first, which comes after the end.
    let (_, extended) = tokio::join!(lease.extend(TTL), lease.extend(TTL));
    assert!(matches!(extended, Err(Error::Lost { cause: LossCause::MaxHold, .. })), "{extended:?}");
    assert_eq!(lease.lost().await, LossCause::MaxHold);
}

// ---- tries while the database is away

/// The limit of a try, and a moment to release what it has acquired.
const TRIED_WITHIN: Duration = Duration::from_millis(8_500);

#[tokio::test(start_paused = true)]
async fn tries_end_in_time_without_the_database() {
    for fault in ["away", "silent"] {
        for what in ["a lease", "a permit", "two names"] {
            let memory = Memory::new();
            let locks = memory.locks();
            locks.lease("a").acquire().await.expect("acquire").release().await.expect("held to the end");
            match fault {
                "away" => memory.go_away(),
                _ => memory.delay(Duration::from_secs(60)),
            }
            let start = Instant::now();
            let tried = match what {
                "a lease" => locks.lease("a").try_acquire().await.map(drop),
                "a permit" => locks.semaphore("permits", 2).try_acquire().await.map(drop),
                _ => locks.lease_all(["a", "b"]).try_acquire().await.map(drop),
            };
            let took = start.elapsed();
            assert!(matches!(tried, Err(Error::Unavailable { .. })), "{what}, {fault}: {tried:?}");
            assert!(took <= TRIED_WITHIN, "{what}, {fault}: {took:?}");
        }
    }
}

/// Each statement has an answer in time, and all together have none.
#[tokio::test(start_paused = true)]
async fn statements_of_a_try_share_one_limit() {
    for what in ["an expired name", "three names"] {
        let memory = Memory::new();
        let (dead, locks) = (memory.locks(), memory.locks());
        let expired = dead.lease("a").ttl(Duration::from_secs(1)).renew(false).acquire().await.expect("acquire");
        // No client releases an exported lease.
        let _exported = expired.export().expect("it is held");
        sleep(Duration::from_secs(2)).await;
        memory.delay(Duration::from_secs(3));
        let start = Instant::now();
        let tried = match what {
            "an expired name" => locks.lease("a").try_acquire().await.map(|lease| lease.is_some()),
            _ => locks.lease_all(["b", "c", "d"]).try_acquire().await.map(|all| all.is_some()),
        };
        let took = start.elapsed();
        assert!(matches!(tried, Err(Error::Unavailable { .. })), "{what}: {tried:?}");
        assert!(took <= TRIED_WITHIN, "{what}: {took:?}");
        memory.delay(Duration::ZERO);
        let all = memory.locks().lease_all(["a", "b", "c", "d"]).acquire().await.expect("the releases go on");
        all.release().await.expect("held to the end");
    }
}

// ---- hand-overs in a queue that changes

/// Joins the queue of `a` again and again, and leaves it each time without a grant.
async fn join_and_leave(locks: sqlock::Locks, place: u64) {
    for turn in 0.. {
        let stay = Duration::from_millis(20 + 13 * ((place + turn) % 11));
        if turn % 2 == 0 {
            let left = locks.lease("a").wait(stay).acquire().await;
            assert!(left.expect_err("it is held").is_timeout());
        } else {
            timeout(stay, locks.lease("a").acquire()).await.expect_err("it is held");
        }
    }
}

/// Joins the readers in the queue of `a` again and again, and leaves them when it has waited long.
async fn read_or_leave(locks: sqlock::Locks, place: u64) {
    for turn in 0.. {
        let stay = Duration::from_millis(300 + 13 * ((place + turn) % 11));
        if let Ok(lease) = locks.lease("a").shared().wait(stay).acquire().await {
            lease.release().await.expect("held to the end");
        }
    }
}

/// Spawns a request, and waits until it is the first in the queue.
async fn first_in_queue(request: sqlock::LeaseRequest, observer: &sqlock::Locks) -> Granting {
    let granting = tokio::spawn(request.label("next").acquire());
    let queued = async {
        while observer.waiters("a").await.expect("waiters").first().is_none_or(|first| first.label != "next") {}
    };
    timeout(Duration::from_secs(60), queued).await.expect("the request stands in the queue");
    granting
}

type Granting = tokio::task::JoinHandle<Result<sqlock::Lease, Error>>;

/// How long each answer takes.
const ROUND_TRIP: Duration = Duration::from_millis(20);

/// A release, a read of the queue and a transition, after a statement that is in flight.
const TRANSITION: Duration = Duration::from_millis(20 * 4);

/// The longest time from a grant until the first waiter learns of it: the pause between two polls,
/// and a poll.
const LEARNED_WITHIN: Duration = Duration::from_millis(100 + 20);

#[tokio::test(start_paused = true)]
async fn handover_is_prompt_while_others_join_and_leave() {
    let memory = Memory::new();
    let clients = [memory.locks(), memory.locks()];
    let mut held = clients[1].lease("a").acquire().await.expect("acquire");
    memory.delay(ROUND_TRIP);
    let mut others: JoinSet<_> = (0..4).map(|place| join_and_leave(memory.locks(), place)).collect();
    for turn in 0..20 {
        let request = clients[turn % 2].lease("a");
        let request = if turn % 3 == 0 { request.shared() } else { request };
        let next = first_in_queue(request, &clients[0]).await;
        // The longer the wait, the rarer are the polls. The release meets any moment between two.
        sleep(Duration::from_millis(900 + 7 * turn as u64)).await;
        let released = Instant::now();
        held.release().await.expect("held to the end");
        held = next.await.expect("no panic").expect("acquire");
        let took = released.elapsed();
        assert!(took <= TRANSITION + LEARNED_WITHIN, "{took:?} in turn {turn}");
        assert!(others.try_join_next().is_none(), "another waiter was granted the name");
    }
}

/// A transition fails if one of its readers leaves, and is repeated at once, or after 50 ms if it
/// fails again. In this time, a reader leaves only once.
#[tokio::test(start_paused = true)]
async fn leaving_readers_delay_a_handover_by_one_transition() {
    const READERS: u32 = 2;
    let memory = Memory::new();
    let (writer, reader) = (memory.locks(), memory.locks());
    memory.delay(ROUND_TRIP);
    let mut others: JoinSet<_> = (0..READERS).map(|place| read_or_leave(memory.locks(), place.into())).collect();
    for turn in 0..40 {
        let held = writer.lease("a").acquire().await.expect("acquire");
        let next = first_in_queue(reader.lease("a").shared(), &writer).await;
        sleep(Duration::from_millis(300 + 7 * turn)).await;
        let released = Instant::now();
        held.release().await.expect("held to the end");
        let next = next.await.expect("no panic").expect("acquire");
        let took = released.elapsed();
        let repeated = (TRANSITION + Duration::from_millis(50)) * READERS;
        assert!(took <= TRANSITION + repeated + LEARNED_WITHIN, "{took:?} in turn {turn}");
        next.release().await.expect("held to the end");
        assert!(others.try_join_next().is_none(), "a reader has failed");
    }
}

// ---- shutdown while the database is away

/// How long a shutdown may take, in virtual time.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn shutdown_ends_during_an_outage() {
    for what in ["a waiter", "a cancelled waiter", "a lost lease", "many leases", "a drain"] {
        let memory = Memory::new();
        let (ours, theirs) = (memory.locks(), memory.locks());
        let _held = theirs.lease("a").acquire().await.expect("acquire");
        let mut own = Vec::new();
        for i in 0..if what == "many leases" { 50 } else { 1 } {
            own.push(ours.lease(format!("own/{i}")).ttl(Duration::from_secs(10)).acquire().await.expect("acquire"));
        }
        let waiter = tokio::spawn(ours.lease("a").acquire());
        sleep(Duration::from_secs(1)).await;
        memory.go_away();
        if what == "a cancelled waiter" {
            waiter.abort();
            sleep(Duration::from_secs(20)).await;
        }
        if what == "a lost lease" {
            assert_eq!(own[0].lost().await, LossCause::Expired);
            sleep(Duration::from_secs(20)).await;
        }
        let ended = async {
            match what {
                "a drain" => drop(ours.drain(Duration::from_secs(1)).await),
                _ => drop(ours.shutdown().await),
            }
        };
        timeout(ENDS_WITHIN, ended).await.unwrap_or_else(|_| panic!("{what}: the shutdown goes on"));
    }
}

// ---- quorums

#[tokio::test(start_paused = true)]
async fn failed_quorum_attempt_is_not_kept() {
    let ahead = Memory::new();
    sleep(Duration::from_secs(10)).await;
    let slow = Memory::new();
    let quorum = Quorum::all([ahead.locks(), slow.locks()]);
    slow.delay(Duration::from_secs(1));
    let request = quorum.lease("job").node_timeout(Duration::from_secs(5)).hold_at_least(Duration::from_secs(600));
    let attempt = tokio::spawn(request.try_acquire());
    sleep(Duration::from_millis(500)).await;
    assert_eq!(ahead.evict("job").expect("a name"), 1);
    assert!(!matches!(attempt.await.expect("no panic"), Ok(Some(_))));
    slow.delay(Duration::ZERO);
    sleep(Duration::from_secs(5)).await;
    assert!(slow.locks().lease("job").try_acquire().await.expect("try").is_some());
}

#[tokio::test(start_paused = true)]
async fn evicted_majority_is_not_kept() {
    let (one, two) = (Memory::new(), Memory::new());
    let quorum = Quorum::all([one.locks(), two.locks()]);
    let lease = quorum.lease("job").hold_at_least(Duration::from_secs(600)).acquire().await.expect("acquire");
    one.evict("job").expect("a name");
    assert_eq!(lease.lost().await, LossCause::Superseded);
    sleep(Duration::from_secs(5)).await;
    assert!(two.locks().lease("job").try_acquire().await.expect("try").is_some());
}

#[tokio::test(start_paused = true)]
async fn vote_of_older_database_counts_max_hold_alike() {
    let older = Memory::new();
    sleep(Duration::from_secs(3600)).await;
    let others = [Memory::new(), Memory::new()];
    older.go_away();
    let quorum = Quorum::new([others[0].locks(), others[1].locks(), older.locks()]);
    let lease = quorum.lease("job").max_hold(Duration::from_secs(600)).acquire().await.expect("acquire");
    assert_eq!(lease.votes(), 2);
    older.come_back();
    sleep(Duration::from_secs(30)).await;
    assert_eq!(lease.votes(), 3);
    assert!(lease.remaining() > Duration::ZERO);
}

/// Makes a quorum of databases that are old enough to vote.
async fn quorum_of_old_databases<const N: usize>() -> ([Memory; N], Quorum) {
    let databases = std::array::from_fn(|_| Memory::new());
    sleep(Duration::from_secs(3600)).await;
    let quorum = Quorum::new(databases.iter().map(Memory::locks));
    (databases, quorum)
}

/// Three databases that have joined a lease one after the other have three tokens for it.
#[tokio::test(start_paused = true)]
async fn quorum_evicts_a_lease_with_several_tokens() {
    let (databases, quorum) = quorum_of_old_databases::<3>().await;
    let lease = quorum.lease("job").acquire().await.expect("acquire");
    for database in &databases[1..] {
        sleep(Duration::from_secs(60)).await;
        assert_eq!((lease.votes(), database.evict("job").expect("a name")), (3, 1));
    }
    sleep(Duration::from_secs(60)).await;
    assert_eq!(lease.votes(), 3);
    assert!(quorum.evict("job", lease.token()).await.expect("all are up"));
    assert_eq!(lease.lost().await, LossCause::Superseded);
    assert!(!quorum.evict("job", lease.token()).await.expect("all are up"));
}

/// The fast database refuses again and again, and the slow one decides.
#[tokio::test(start_paused = true)]
async fn slow_database_is_waited_for_after_split_votes() {
    let ([_, refusing, slow], quorum) = quorum_of_old_databases::<3>().await;
    assert!(refusing.refuse("job").expect("a name"));
    slow.delay(Duration::from_millis(100));
    let request = quorum.lease("job").wait(Duration::from_secs(20));
    let lease = request.acquire().await.expect("a majority is free");
    assert_eq!(lease.votes(), 2);
}

/// The subscriber of an application that adds to each line whether the lease is held.
#[derive(Clone, Default)]
struct WithLease {
    lease: Arc<OnceLock<QuorumLease>>,
    /// Whether it was asked after its loss.
    is_known_lost: Arc<AtomicBool>,
}

impl tracing::Subscriber for WithLease {
    fn enabled(&self, about: &tracing::Metadata<'_>) -> bool {
        about.is_event() && about.target().starts_with("sqlock")
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        if self.lease.get().is_some_and(|lease| !lease.is_held()) {
            self.is_known_lost.store(true, Ordering::SeqCst);
        }
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// On a thread of its own, which a deadlock would stop, and in real time: the expiry is found by
/// this question, before a timer reports it.
#[test]
fn subscriber_may_ask_for_lost_majority() {
    let (report, reported) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // While there is one subscriber, a line that another thread reaches first stays disabled.
        let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::new());
        let subscriber = WithLease::default();
        let _guard = tracing::subscriber::set_default(subscriber.clone());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let ttl = Duration::from_secs(1);
            let quorum = Quorum::new([Memory::new(), Memory::new(), Memory::new()].iter().map(Memory::locks));
            sleep(ttl * 2).await;
            let acquired = quorum.lease("job").ttl(ttl).acquire().await.expect("acquire");
            let lease = subscriber.lease.get_or_init(|| acquired);
            std::thread::sleep(ttl * 2);
            let is_held = lease.is_held();
            report.send((is_held, subscriber.is_known_lost.load(Ordering::SeqCst))).expect("the test waits");
        });
    });
    let asked = reported.recv_timeout(Duration::from_secs(60));
    assert_eq!(asked, Ok((false, true)));
}

/// A database that reports an eviction is not asked again at once: the eviction from the others may
/// not be known yet.
#[tokio::test(start_paused = true)]
async fn evicted_majority_stays_lost_whatever_the_moment() {
    for offset in (0..5000).step_by(250) {
        let (databases, quorum) = quorum_of_old_databases::<3>().await;
        // A database is asked again after 1.33 s, and a heartbeat is sent after 1 s.
        let lease = quorum.lease("job").ttl(Duration::from_secs(4)).acquire().await.expect("acquire");
        sleep(Duration::from_millis(2000 + offset)).await;
        for database in &databases[..2] {
            assert_eq!(database.evict("job").expect("a name"), 1);
            // The heartbeats of the clients are not sent at the same moment.
            sleep(Duration::from_millis(400)).await;
        }
        let lost = timeout(Duration::from_secs(10), lease.lost()).await;
        assert_eq!(lost, Ok(LossCause::Superseded), "evicted after {offset} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn request_to_release_reaches_holder_of_a_majority() {
    let (databases, quorum) = quorum_of_old_databases::<3>().await;
    let lease = quorum.lease("job").acquire().await.expect("acquire");
    // The database joins the lease after the call.
    databases[2].evict("job").expect("a name");
    let asked = tokio::spawn(async move {
        lease.revoke_requested().await;
        lease.is_held()
    });
    sleep(Duration::from_secs(60)).await;
    assert!(!asked.is_finished());
    assert_eq!(databases[2].locks().ask_to_release("job").await.expect("ask"), 1);
    assert!(timeout(Duration::from_secs(5), asked).await.expect("the request reaches the holder").expect("no panic"));
}

#[tokio::test(start_paused = true)]
async fn waiters_of_a_quorum_share_an_outage() {
    let (databases, quorum) = quorum_of_old_databases::<2>().await;
    databases.iter().for_each(Memory::go_away);
    let waits = [None, Some(Duration::from_secs(2))].into_iter().cycle().take(20);
    let mut waiters = Vec::new();
    for wait in waits {
        let request = quorum.lease("job");
        waiters.push(tokio::spawn(match wait {
            Some(wait) => request.wait(wait).acquire(),
            None => request.acquire(),
        }));
    }
    let answers = async {
        for waiter in waiters {
            let refused = waiter.await.expect("no panic");
            assert!(matches!(refused, Err(Error::Unavailable { .. })), "{refused:?}");
        }
    };
    timeout(Duration::from_secs(6), answers).await.expect("in time");
}
