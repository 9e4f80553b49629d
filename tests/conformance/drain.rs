//! The orderly end of a client whose work may finish.

use std::time::Duration;

use sqlock::events::Event;
use sqlock::{Error, LossCause};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::Level;

use crate::support::log::Log;
use crate::support::{LONG, SOON, fresh, soon};

#[tokio::test]
async fn drain_refuses_requests_and_lets_leases_finish() {
    let db = fresh().await;
    let (log, _guard) = Log::capture();
    let (locks, other) = (db.locks().await, db.locks().await);
    let held = locks.lease("held").ttl(LONG).acquire().await.expect("acquire");
    let theirs = other.lease("theirs").ttl(LONG).acquire().await.expect("acquire");
    let mut events = locks.events();
    let waiter = tokio::spawn(locks.lease("theirs").acquire());
    let behind = tokio::spawn(locks.lease("held").acquire());
    for _ in 0..2 {
        assert!(matches!(soon("the waits", events.next()).await, Some(Event::Waiting { .. })));
    }

    let draining = tokio::spawn({
        let locks = locks.clone();
        async move { locks.drain(LONG).await }
    });
    for waiter in [waiter, behind] {
        let refused = soon("the refusal", waiter).await.expect("no panic");
        assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
    }
    for request in [locks.lease("new"), locks.lease("held").owner(held.owner())] {
        let refused = soon("the refusal", request.acquire()).await;
        assert!(matches!(refused, Err(Error::Closed)), "{refused:?}");
    }
    assert!(held.is_held() && !draining.is_finished());
    theirs.release().await.expect("held to the end");
    // The entry of the waiter is withdrawn in the background.
    let free = soon("the name", other.lease("theirs").acquire()).await.expect("acquire");
    free.release().await.expect("held to the end");

    held.release().await.expect("held to the end");
    assert!(soon("the drain", draining).await.expect("no panic").expect("shutdown"), "everything was released in time");
    assert_eq!(locks.health().connections, 0, "the client is shut down");
    assert!(log.messages(Level::WARN).is_empty(), "{:?}", log.messages(Level::WARN));
}

#[tokio::test]
async fn drain_ends_at_its_timeout_without_a_warning() {
    let db = fresh().await;
    let (log, _guard) = Log::capture();
    let locks = db.locks().await;
    let held = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut events = locks.events();
    let timeout = Duration::from_millis(50);
    assert!(!soon("the drain", locks.drain(timeout)).await.expect("shutdown"), "a lease was held to the end");
    assert_eq!(held.lost().await, LossCause::Shutdown);
    let cause = match soon("the loss", events.next()).await {
        Some(Event::Lost { cause, .. }) => cause,
        other => panic!("{other:?}"),
    };
    assert_eq!(cause, LossCause::Shutdown);
    assert!(log.messages(Level::WARN).is_empty(), "{:?}", log.messages(Level::WARN));
    let cut_off = "cut off the work under a lease at the end of a drain";
    let informed = log.messages(Level::INFO);
    let expected = ["draining: new requests are refused", cut_off, "drained"];
    assert!(informed.iter().rev().take(3).rev().eq(expected), "{informed:?}");
    let other = db.locks().await;
    assert!(other.lease("a").try_acquire().await.expect("try").is_some(), "the name is free");
}

#[tokio::test]
async fn closed_completes_at_drain_and_shutdown() {
    let db = fresh().await;
    for drains in [true, false] {
        let locks = db.locks().await;
        let held = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
        let closed = tokio::spawn({
            let locks = locks.clone();
            async move { locks.closed().await }
        });
        tokio::task::yield_now().await;
        assert!(!closed.is_finished());
        let ending = tokio::spawn({
            let locks = locks.clone();
            async move { if drains { locks.drain(LONG).await.map(drop) } else { locks.shutdown().await } }
        });
        soon("the notice", closed).await.expect("no panic");
        assert_eq!(held.is_held(), drains, "a drain lets the work finish");
        drop(held);
        soon("the end", ending).await.expect("no panic").expect("shutdown");
        soon("the notice afterwards", locks.closed()).await;
    }
}

#[tokio::test]
async fn drain_of_an_idle_client_ends_at_once() {
    let db = fresh().await;
    let locks = db.locks().await;
    assert!(soon("the drain", locks.drain(LONG)).await.expect("shutdown"));
    assert!(soon("the drain", locks.drain(LONG)).await.expect("it can be repeated"));
    assert!(matches!(locks.lease("a").acquire().await, Err(Error::Closed)));
}

#[tokio::test]
async fn drain_waits_for_session_locks() {
    let db = fresh().await;
    let (locks, other) = (db.locks().await, db.locks().await);
    let held = locks.session("held").acquire().await.expect("acquire");
    let theirs = other.session("theirs").acquire().await.expect("acquire");
    let waiter = tokio::spawn(locks.session("theirs").acquire());
    let mut draining = std::pin::pin!(locks.drain(LONG));
    let pending = tokio::time::timeout(Duration::from_millis(1), &mut draining).await;
    assert!(pending.is_err(), "a session lock is held");
    assert!(matches!(soon("the refusal", waiter).await.expect("no panic"), Err(Error::Closed)));
    assert!(matches!(soon("the refusal", locks.session("new").acquire()).await, Err(Error::Closed)));
    assert!(held.is_held());
    held.release().await.expect("held to the end");
    assert!(soon("the drain", draining).await.expect("shutdown"), "everything was released in time");
    theirs.release().await.expect("held to the end");
}

#[tokio::test]
async fn drain_beside_open_fence_ends_with_error() {
    let db = fresh().await;
    let (log, _guard) = Log::capture();
    let locks = db.locks().await;
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let pool = db.pool_of(1).await;
    let mut fenced = pool.begin().await.expect("begin");
    lease.fence(&mut fenced).await.expect("fence");
    let drained = soon("the drain", locks.drain(Duration::from_millis(50))).await;
    assert!(matches!(&drained, Err(Error::Unavailable { attempted: "release", .. })), "{drained:?}");
    let informed = log.messages(Level::INFO);
    assert!(informed.iter().any(|message| message == "drained"), "{informed:?}");
    assert!(!lease.is_held());
    fenced.rollback().await.expect("rollback");
}

/// The tasks of a client live in the runtime in which it was used first.
#[test]
fn client_of_an_ended_runtime_is_closed() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let first = runtime();
    let (db, locks, lease, held) = first.block_on(async {
        let db = fresh().await;
        let locks = db.locks().await;
        let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
        let held = locks.lease("b").ttl(LONG).acquire().await.expect("acquire");
        (db, locks, lease, held)
    });
    let waiting = first.spawn(locks.lease("a").acquire());
    drop(first);
    runtime().block_on(async move {
        let waited = soon("the end of the wait", waiting).await;
        assert!(waited.is_err_and(|ended| ended.is_cancelled()));
        let acquired = soon("an answer", locks.lease("c").acquire()).await;
        assert!(matches!(&acquired, Err(Error::Closed)), "{acquired:?}");
        let listed = soon("an answer", locks.list("")).await;
        assert!(matches!(&listed, Err(Error::Closed)), "{listed:?}");
        let extended = soon("an answer", lease.extend(LONG)).await;
        assert!(matches!(&extended, Err(Error::Lost { .. })), "{extended:?}");
        let released = soon("an answer", lease.release()).await;
        assert!(matches!(&released, Err(Error::Unknown { .. })), "{released:?}");
        let drained = soon("the drain", locks.drain(LONG)).await;
        assert!(matches!(&drained, Err(Error::Closed)), "{drained:?}");
        drop((held, db));
    });
}

/// Each release fails as soon as it is submitted, and then the next one is. The stack would not
/// hold them all at a time.
#[test]
fn runtime_ends_while_many_leases_are_released() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (db, locks) = runtime.block_on(async {
        let db = fresh().await;
        let locks = db.locks().await;
        let mut acquiring = JoinSet::new();
        for _ in 0..500 {
            acquiring.spawn(locks.lease("a").shared().ttl(LONG).acquire());
        }
        // Each of them is a statement of its own.
        for lease in timeout(SOON * 4, acquiring.join_all()).await.expect("the leases") {
            drop(lease.expect("acquire"));
        }
        (db, locks)
    });
    drop(runtime);
    assert_eq!(locks.health().held, 0);
    drop(db);
}
