//! The messages and levels of the log, and the spans of requests and holdings.

use std::time::Duration;

use sqlock::events::Event;
use tracing::Level;

use crate::support::log::Log;
use crate::support::{LONG, exported, fresh, soon, until};

#[tokio::test]
async fn orderly_life_and_shutdown_leave_a_quiet_log() {
    let db = fresh().await;
    let (log, _guard) = Log::capture();
    let locks = db.locks().await;
    locks.lease("a").acquire().await.expect("acquire").release().await.expect("held to the end");
    let _held = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert!(locks.lease("a").try_acquire().await.expect("try").is_none());
    let mut events = locks.events();
    let waiter = tokio::spawn(locks.lease("a").acquire());
    assert!(matches!(soon("the wait", events.next()).await, Some(Event::Waiting { .. })));
    locks.shutdown().await.expect("shutdown");
    waiter.await.expect("no panic").expect_err("the client was shut down");

    assert_eq!(log.messages(Level::INFO), ["started a client for locks"]);
    assert!(log.messages(Level::DEBUG).len() > 5, "{:?}", log.messages(Level::DEBUG));
}

#[tokio::test]
async fn loss_warns_unless_the_application_ordered_it() {
    let db = fresh().await;
    let (log, _guard) = Log::capture();
    let (locks, operator) = (db.locks().await, db.locks().await);
    let mut events = locks.events();
    let lost = async |events: &mut sqlock::events::Events| {
        soon("the loss", async { while !matches!(events.next().await, Some(Event::Lost { .. })) {} }).await;
    };

    // A heartbeat may learn of the loss before the eviction is answered.
    let own = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert!(locks.evict("a", own.token()).await.expect("evict"));
    lost(&mut events).await;
    let bounded = Duration::from_secs(3);
    let _bounded = locks.lease("b").ttl(LONG).max_hold(bounded).acquire().await.expect("acquire");
    lost(&mut events).await;
    assert!(log.messages(Level::WARN).is_empty(), "{:?}", log.messages(Level::WARN));

    let evicted = locks.lease("c").ttl(LONG).acquire().await.expect("acquire");
    assert!(operator.evict("c", evicted.token()).await.expect("evict"));
    evicted.lost().await;
    // The line is written after the holder has its answer.
    soon("the line", async {
        while log.messages(Level::WARN).is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(log.messages(Level::WARN), ["lost a lease"]);
}

/// Waits until a line is in the log, and returns whether it is a warning.
async fn is_warning(log: &Log, line: &str) -> bool {
    let has = |level| log.messages(level).iter().any(|message| message == line);
    until(line, async || has(Level::TRACE)).await;
    assert!(has(Level::INFO), "{line}");
    has(Level::WARN)
}

#[tokio::test]
async fn late_and_failed_heartbeats_warn() {
    let db = fresh().await;
    let (log, _guard) = Log::capture();
    let locks = db.locks().await;
    let _lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    until("the first heartbeat", async || locks.health().last_heartbeat.is_some()).await;
    let pool = db.pool_of(1).await;
    let mut stranger = pool.begin().await.expect("begin");
    // Locks the row of the client, or the whole file.
    sqlx::query("UPDATE sqlock_client SET notice = notice").execute(&mut *stranger).await.expect("update");
    assert!(is_warning(&log, "a heartbeat is late").await);
    stranger.rollback().await.expect("rollback");
    assert!(!is_warning(&log, "heartbeats are answered again").await);

    sqlx::query("ALTER TABLE sqlock_client RENAME TO away").execute(&pool).await.expect("rename");
    assert!(is_warning(&log, "a heartbeat failed; leases are lost if none succeeds").await);
    sqlx::query("ALTER TABLE away RENAME TO sqlock_client").execute(&pool).await.expect("rename");
}

#[tokio::test]
async fn takeover_and_sweep_are_no_warnings() {
    let db = fresh().await;
    let (log, _guard) = Log::capture();
    let (dead, locks) = (db.locks().await, db.locks().await);
    let _exported = exported(&dead, "a", Duration::from_millis(200)).await;
    let lease = soon("the grant", locks.lease("a").ttl(LONG).acquire()).await.expect("acquire");
    assert!(!is_warning(&log, "took a name over from a dead holder").await);

    lease.release().await.expect("held to the end");
    let _sweeping = locks.sweeper().retention(Duration::ZERO).every(Duration::from_millis(10)).start();
    assert!(!is_warning(&log, "swept").await);
}

#[tokio::test]
async fn spans_tell_name_mode_wait_and_outcome() {
    let db = fresh().await;
    let (log, _guard) = Log::capture();
    let locks = db.locks().await;
    let held = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert!(locks.lease("a").shared().try_acquire().await.expect("try").is_none());
    let mut events = locks.events();
    let permit = locks.semaphore("a", 2).request(1).expect("one permit");
    let waiter = tokio::spawn(permit.acquire());
    assert!(matches!(soon("the wait", events.next()).await, Some(Event::Waiting { .. })));
    waiter.abort();
    waiter.await.expect_err("it was cancelled");
    held.release().await.expect("held to the end");

    let requests = log.spans("acquire");
    let answer: Vec<_> = requests.iter().map(|span| (&*span["mode"], &*span["outcome"])).collect();
    assert_eq!(answer, [("exclusive", "acquired"), ("shared", "held"), ("permits", "cancelled")]);
    assert!(requests.iter().all(|span| span["name"] == "a" && span.contains_key("waited")), "{requests:?}");
    let holds = log.spans("hold");
    assert_eq!(holds.len(), 1);
    assert_eq!((&*holds[0]["name"], &*holds[0]["outcome"]), ("a", "released"));
    assert!(holds[0].contains_key("held") && holds[0].contains_key("token"), "{holds:?}");
}
