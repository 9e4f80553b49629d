//! Holders that are asked to release a name.

use std::time::Duration;

use sqlock::events::Event;
use sqlock::{Error, Lease, Owner};
use tokio::time::timeout;

use crate::DATABASE;
use crate::support::{Database, LONG, fresh, soon, until, until_waiters};

/// Waits until the holder has received the request.
async fn is_asked(lease: &Lease) {
    soon("the request", lease.revoke_requested()).await;
}

/// Returns whether the holder has received a request so far.
async fn was_asked(lease: &Lease) -> bool {
    timeout(Duration::ZERO, lease.revoke_requested()).await.is_ok()
}

#[tokio::test]
async fn asked_holder_learns_and_keeps_the_lease() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert!(!was_asked(&lease).await, "nobody has asked");
    assert_eq!(theirs.ask_to_release("a").await.expect("ask"), 1);
    is_asked(&lease).await;
    assert!(was_asked(&lease).await, "a later call completes at once");
    assert!(lease.is_held());
    lease.extend(LONG).await.expect("still held");
    lease.release().await.expect("held to the end");
}

#[tokio::test]
async fn free_name_has_nobody_to_ask() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    assert_eq!(theirs.ask_to_release("a").await.expect("ask"), 0, "nobody ever held it");
    ours.lease("a").acquire().await.expect("acquire").release().await.expect("release");
    assert_eq!(theirs.ask_to_release("a").await.expect("ask"), 0, "it was released");
    let kept = ours.lease("a").hold_at_least(LONG).acquire().await.expect("acquire");
    kept.release().await.expect("release");
    assert_eq!(theirs.ask_to_release("a").await.expect("ask"), 0, "it only stays taken");
    let expired = ours.lease("b").ttl(Duration::from_millis(200)).renew(false).acquire().await.expect("acquire");
    soon("the loss", expired.lost()).await;
    until("the expiry", async || theirs.inspect("b").await.expect("inspect").is_none()).await;
    assert_eq!(theirs.ask_to_release("b").await.expect("ask"), 0, "its holder has expired");
    assert!(theirs.ask_to_release("").await.is_err(), "no name");
}

#[tokio::test]
async fn request_concerns_only_present_holder() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let first = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert_eq!(theirs.ask_to_release("a").await.expect("ask"), 1);
    let other = ours.lease("b").ttl(LONG).acquire().await.expect("acquire");
    is_asked(&first).await;
    first.release().await.expect("release");
    let next = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    // The next request shows that every heartbeat and look for an earlier one has passed.
    assert_eq!(theirs.ask_to_release("b").await.expect("ask"), 1);
    is_asked(&other).await;
    assert!(!was_asked(&next).await);
    next.release().await.expect("release");
    other.release().await.expect("release");
}

#[tokio::test]
async fn holder_of_same_client_learns_as_well() {
    let db = fresh().await;
    let locks = db.locks().await;
    let mut events = locks.events();
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert_eq!(locks.ask_to_release("a").await.expect("ask"), 1);
    is_asked(&lease).await;
    let told = soon("the event", async {
        loop {
            if let Event::ReleaseRequested { name, token } = events.next().await.expect("the stream goes on") {
                break (name, token);
            }
        }
    });
    let (name, token) = told.await;
    assert_eq!((name.as_str(), token), ("a", lease.token()));
    lease.release().await.expect("release");
}

#[tokio::test]
async fn all_sharing_holders_are_asked() {
    let db = fresh().await;
    let (one, two, theirs) = (db.locks().await, db.locks().await, db.locks().await);
    let readers = [
        one.lease("a").ttl(LONG).shared().acquire().await.expect("acquire"),
        one.lease("a").ttl(LONG).shared().acquire().await.expect("acquire"),
        two.lease("a").ttl(LONG).shared().acquire().await.expect("acquire"),
    ];
    assert_eq!(theirs.ask_to_release("a").await.expect("ask"), 3);
    let late = two.lease("a").ttl(LONG).shared().acquire().await.expect("acquire");
    for reader in &readers {
        is_asked(reader).await;
    }
    assert!(!was_asked(&late).await, "it came after the request");

    let permits = [
        one.semaphore("s", 3).ttl(LONG).acquire_many(2).await.expect("acquire"),
        two.semaphore("s", 3).ttl(LONG).acquire().await.expect("acquire"),
    ];
    assert_eq!(theirs.ask_to_release("s").await.expect("ask"), 2);
    for permit in &permits {
        is_asked(permit).await;
    }
}

#[tokio::test]
async fn reentrant_leases_are_all_informed() {
    let db = fresh().await;
    let (ours, elsewhere, theirs) = (db.locks().await, db.locks().await, db.locks().await);
    let owner = Owner::random();
    let outer = ours.lease("a").ttl(LONG).owner(owner).acquire().await.expect("acquire");
    let inner = ours.lease("a").ttl(LONG).owner(owner).acquire().await.expect("acquire");
    let joined = elsewhere.lease("a").ttl(LONG).owner(owner).acquire().await.expect("acquire");
    assert_eq!(theirs.ask_to_release("a").await.expect("ask"), 1, "one owner is one holder");
    for lease in [&outer, &inner, &joined] {
        is_asked(lease).await;
    }
    let late = ours.lease("a").ttl(LONG).owner(owner).acquire().await.expect("acquire");
    assert!(was_asked(&late).await, "it has entered a holding that was asked for");
    // A client that enters later receives the next request.
    let other = db.locks().await;
    let late = other.lease("a").ttl(LONG).owner(owner).acquire().await.expect("acquire");
    assert_eq!(theirs.ask_to_release("a").await.expect("ask"), 1);
    is_asked(&late).await;
}

#[tokio::test]
async fn lease_without_renewal_is_not_informed() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let unrenewed = ours.lease("a").ttl(LONG).renew(false).acquire().await.expect("acquire");
    let renewed = ours.lease("b").ttl(LONG).acquire().await.expect("acquire");
    assert_eq!(theirs.ask_to_release("a").await.expect("ask"), 1, "it holds the name");
    assert_eq!(theirs.ask_to_release("b").await.expect("ask"), 1);
    is_asked(&renewed).await;
    assert!(!was_asked(&unrenewed).await, "no heartbeat renews it");
    unrenewed.release().await.expect("release");
}

#[tokio::test]
async fn downgraded_and_resumed_leases_are_asked() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let mut lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    lease.downgrade().await.expect("downgrade");
    assert_eq!(theirs.ask_to_release("a").await.expect("ask"), 1);
    is_asked(&lease).await;

    let exported = ours.lease("b").ttl(LONG).acquire().await.expect("acquire").export().expect("export");
    let resumed = theirs.resume(exported).await.expect("resume");
    assert_eq!(ours.ask_to_release("b").await.expect("ask"), 1);
    is_asked(&resumed).await;
    resumed.release().await.expect("release");
}

#[tokio::test]
async fn one_of_several_leases_is_asked() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let both = ours.lease_all(["a", "b"]).ttl(LONG).acquire().await.expect("acquire");
    assert!(timeout(Duration::ZERO, both.revoke_requested()).await.is_err(), "nobody has asked");
    assert_eq!(theirs.ask_to_release("b").await.expect("ask"), 1);
    soon("the request", both.revoke_requested()).await;
    both.release().await.expect("release");
    let leader = ours.election("e").ttl(LONG).campaign().await.expect("elected");
    assert_eq!(theirs.ask_to_release("e").await.expect("ask"), 1);
    is_asked(&leader).await;
    leader.resign().await.expect("resign");
}

#[tokio::test]
async fn successor_of_asked_holder_gets_the_name() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let next = tokio::spawn(theirs.lease("a").ttl(LONG).acquire());
    until_waiters(&theirs, "a", 1).await;
    assert_eq!(theirs.ask_to_release("a").await.expect("ask"), 1);
    is_asked(&lease).await;
    lease.release().await.expect("release");
    let next = soon("the hand-over", next).await.expect("no panic").expect("acquire");
    assert!(!was_asked(&next).await);
    assert_eq!(ours.ask_to_release("a").await.expect("ask"), 1);
    is_asked(&next).await;
    next.release().await.expect("release");
}

#[tokio::test]
async fn request_behind_a_long_fence_times_out() {
    if !DATABASE.is_mysql() {
        return; // PostgreSQL lets the request pass. On SQLite the fence locks the whole file.
    }
    let db = fresh().await;
    let (ours, theirs, pool) = (db.locks().await, db.locks().await, db.pool().await);
    let lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut tx = pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    let error = soon("the limit", theirs.ask_to_release("a")).await.expect_err("fenced");
    assert!(matches!(error, Error::Timeout { .. }), "{error:?}");
    tx.rollback().await.expect("rollback");
    lease.release().await.expect("release");
}

#[tokio::test]
async fn request_passes_or_awaits_open_fence() {
    let db = fresh().await;
    let (ours, theirs, pool) = (db.locks().await, db.locks().await, db.pool().await);
    let lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut tx = pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    let asking = tokio::spawn(async move { theirs.ask_to_release("a").await });
    if DATABASE == Database::Postgres {
        is_asked(&lease).await;
    }
    tx.commit().await.expect("commit");
    assert_eq!(soon("the request", asking).await.expect("no panic").expect("ask"), 1);
    is_asked(&lease).await;
    lease.release().await.expect("release");
}
