//! The events of a client.

use std::time::Duration;

use sqlock::LossCause;
use sqlock::events::{Event, Events, RefusalReason};

use crate::support::{LONG, exported, fresh, soon, until};

/// Returns the next event of this kind, and skips earlier ones.
macro_rules! next {
    ($events:expr, $event:pat) => {
        soon(stringify!($event), async {
            while !matches!($events.next().await.expect("the stream goes on"), $event) {}
        })
        .await
    };
    ($events:expr, $event:pat => $found:expr) => {
        soon(stringify!($event), async {
            loop {
                match $events.next().await {
                    Some($event) => break $found,
                    Some(_) => {}
                    None => panic!("the stream has ended before {}", stringify!($event)),
                }
            }
        })
        .await
    };
}

async fn next(events: &mut Events) -> Event {
    soon("an event", events.next()).await.expect("the stream goes on")
}

#[tokio::test]
async fn wait_acquisition_and_release_come_in_order() {
    let db = fresh().await;
    let (first, second) = (db.locks().await, db.locks().await);
    let held = first.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut events = second.events();
    let waiter = tokio::spawn(second.lease("a").ttl(LONG).acquire());
    assert!(matches!(next(&mut events).await, Event::Waiting { name } if name.as_str() == "a"));

    held.release().await.expect("held to the end");
    let lease = waiter.await.expect("no panic").expect("acquire");
    match next(&mut events).await {
        Event::Acquired { name, token, waited } => {
            assert_eq!((name.as_str(), token), ("a", lease.token()));
            assert!(waited > Duration::ZERO);
        }
        other => panic!("{other:?}"),
    }
    let token = lease.token();
    lease.release().await.expect("held to the end");
    match next(&mut events).await {
        Event::Released { name, token: of, is_confirmed, .. } => {
            assert_eq!((name.as_str(), of, is_confirmed), ("a", token, true));
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn wait_behind_own_client_is_reported() {
    let db = fresh().await;
    let locks = db.locks().await;
    let held = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut events = locks.events();
    let waiter = tokio::spawn(locks.lease("a").ttl(LONG).acquire());
    assert!(matches!(next(&mut events).await, Event::Waiting { .. }));
    held.release().await.expect("held to the end");
    waiter.await.expect("no panic").expect("acquire").release().await.expect("held to the end");
}

#[tokio::test]
async fn refusal_tells_why_the_request_ended() {
    let db = fresh().await;
    let (holder, locks) = (db.locks().await, db.locks().await);
    let _held = holder.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut events = locks.events();

    assert!(locks.lease("a").try_acquire().await.expect("try").is_none());
    assert_eq!(next!(events, Event::Refused { reason, .. } => reason), RefusalReason::Held);

    let wait = Duration::from_millis(20);
    locks.lease("a").wait(wait).acquire().await.expect_err("it is held");
    let (reason, waited) = next!(events, Event::Refused { reason, waited, .. } => (reason, waited));
    assert_eq!(reason, RefusalReason::TimedOut);
    assert!(waited >= wait, "{waited:?}");

    let waiter = tokio::spawn(locks.lease("a").acquire());
    next!(events, Event::Waiting { .. });
    waiter.abort();
    assert_eq!(next!(events, Event::Refused { reason, .. } => reason), RefusalReason::Cancelled);

    let _waiter = tokio::spawn(locks.lease("a").acquire());
    next!(events, Event::Waiting { .. });
    locks.shutdown().await.expect("shutdown");
    assert_eq!(next!(events, Event::Refused { reason, .. } => reason), RefusalReason::Closed);
    assert!(soon("the end", events.next()).await.is_none());
}

#[tokio::test]
async fn loss_tells_its_cause() {
    let db = fresh().await;
    let (locks, operator) = (db.locks().await, db.locks().await);
    let mut events = locks.events();

    let evicted = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert!(operator.evict("a", evicted.token()).await.expect("evict"));
    let (token, cause) = next!(events, Event::Lost { token, cause, .. } => (token, cause));
    assert_eq!((token, cause), (evicted.token(), LossCause::Superseded));

    let at_most = Duration::from_secs(3);
    let _bounded = locks.lease("b").ttl(LONG).max_hold(at_most).acquire().await.expect("acquire");
    let (held, cause) = next!(events, Event::Lost { held, cause, .. } => (held, cause));
    assert_eq!(cause, LossCause::MaxHold);
    assert!(held >= at_most, "{held:?}");

    let _held = locks.lease("c").ttl(LONG).acquire().await.expect("acquire");
    locks.shutdown().await.expect("shutdown");
    assert_eq!(next!(events, Event::Lost { cause, .. } => cause), LossCause::Shutdown);
    assert!(soon("the end", events.next()).await.is_none());
}

#[tokio::test]
async fn takeover_from_an_expired_holder_is_reported() {
    let db = fresh().await;
    let (dead, locks) = (db.locks().await, db.locks().await);
    let mut exports = dead.events();
    let _exported = exported(&dead, "a", Duration::from_millis(200)).await;
    next!(exports, Event::Exported { .. });

    let mut events = locks.events();
    let lease = soon("the grant", locks.lease("a").ttl(LONG).acquire()).await.expect("acquire");
    assert_eq!(next!(events, Event::TakenOver { name } => name).as_str(), "a");
    assert_eq!(next!(events, Event::Acquired { token, .. } => token), lease.token());
    lease.release().await.expect("held to the end");

    let again = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    match next(&mut events).await {
        Event::Released { .. } => {}
        other => panic!("{other:?}"),
    }
    assert!(matches!(next(&mut events).await, Event::Acquired { .. }), "nothing was taken over from a release");
    again.release().await.expect("held to the end");
}

#[tokio::test]
async fn blocked_heartbeat_is_late_until_it_is_answered() {
    let db = fresh().await;
    let locks = db.locks().await;
    let mut events = locks.events();
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let pool = db.pool_of(1).await;
    let mut stranger = pool.begin().await.expect("begin");
    // A heartbeat that is answered in time causes no event.
    until("the first heartbeat", async || locks.health().last_heartbeat.is_some()).await;
    // Locks the row of the client, or the whole file.
    sqlx::query("UPDATE sqlock_client SET notice = notice").execute(&mut *stranger).await.expect("update");
    let unanswered_for = next!(events, Event::HeartbeatLate { unanswered_for } => unanswered_for);
    assert!(unanswered_for >= Duration::from_secs(1), "{unanswered_for:?}");
    assert!(!locks.health().is_ok());

    stranger.rollback().await.expect("rollback");
    next!(events, Event::HeartbeatRestored);
    assert!(locks.health().is_ok());
    lease.release().await.expect("held to the end");
}

#[tokio::test]
async fn failed_heartbeat_is_reported_with_its_reason() {
    let db = fresh().await;
    let locks = db.locks().await;
    let mut events = locks.events();
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let pool = db.pool_of(1).await;
    sqlx::query("ALTER TABLE sqlock_client RENAME TO away").execute(&pool).await.expect("rename");
    let reason = next!(events, Event::HeartbeatFailed { reason } => reason);
    assert!(reason.contains("migrate"), "{reason}");

    sqlx::query("ALTER TABLE away RENAME TO sqlock_client").execute(&pool).await.expect("rename");
    next!(events, Event::HeartbeatRestored);
    lease.release().await.expect("held to the end");
}
