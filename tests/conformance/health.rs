//! The health of a client, for probes.
//!
//! Promises: 10.

use std::time::Duration;

use sqlock::events::Event;
use sqlock::health::Heartbeat;

use crate::support::{LONG, fresh, soon};

#[tokio::test]
async fn health_counts_holds_waiters_and_connections() {
    let db = fresh().await;
    let (locks, other) = (db.locks().await, db.locks().await);
    let idle = locks.health();
    assert_eq!((idle.held, idle.waiting, idle.connections), (0, 0, 0));
    assert_eq!((idle.heartbeat, idle.last_heartbeat, idle.round_trip), (Heartbeat::Idle, None, None));
    assert!(idle.is_ok(), "an idle client is well");

    let theirs = other.lease("theirs").ttl(LONG).acquire().await.expect("acquire");
    let one = locks.lease("one").ttl(LONG).acquire().await.expect("acquire");
    let two = locks.semaphore("two", 2).ttl(LONG).acquire().await.expect("acquire");
    let mut events = locks.events();
    let waiter = tokio::spawn(locks.lease("theirs").acquire());
    assert!(matches!(soon("the wait", events.next()).await, Some(Event::Waiting { .. })));
    let busy = locks.health();
    assert_eq!((busy.held, busy.waiting), (2, 1));
    assert!((1..=3).contains(&busy.connections), "{} connections", busy.connections);
    assert_eq!(busy.unavailable, None);

    theirs.release().await.expect("held to the end");
    waiter.await.expect("no panic").expect("acquire").release().await.expect("held to the end");
    one.release().await.expect("held to the end");
    assert_eq!((locks.health().held, locks.health().waiting), (1, 0));
    drop(two);
    assert_eq!(locks.health().held, 0, "a dropped lease is no longer held");

    locks.shutdown().await.expect("shutdown");
    let closed = locks.health();
    assert_eq!((closed.held, closed.waiting, closed.connections), (0, 0, 0));
}

#[tokio::test]
async fn health_tells_of_the_last_heartbeat() {
    let db = fresh().await;
    let locks = db.locks().await;
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let health = soon("a heartbeat", async {
        loop {
            let health = locks.health();
            if health.last_heartbeat.is_some() {
                return health;
            }
            // A heartbeat that is answered in time causes no event.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!(health.heartbeat, Heartbeat::Answered);
    assert!(health.round_trip.expect("it was answered") > Duration::ZERO);
    lease.release().await.expect("held to the end");
    assert_eq!(locks.health().heartbeat, Heartbeat::Idle, "nothing is held");
}
