//! Promise 11: one owner may enter several times.
//!
//! Promises: 11.

use std::time::{Duration, Instant};

use sqlock::{Error, Lease, Locks, Owner};

use crate::support::{LONG, SOON, fresh, is_free, soon, times_out};

const SHORT: Duration = Duration::from_millis(500);

async fn enter(locks: &Locks, name: &str, owner: Owner) -> Lease {
    let lease = locks.lease(name).ttl(LONG).owner(owner).acquire();
    soon("the entry", lease).await.expect("acquire")
}

async fn holds(locks: &Locks, name: &str) -> usize {
    locks.inspect(name).await.expect("inspect").map_or(0, |info| info.holds)
}

#[tokio::test]
async fn owner_reenters_inside_its_scope() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let owner = Owner::random();
    assert_eq!(Owner::current(), None);
    owner
        .scope(async {
            assert_eq!(Owner::current(), Some(owner));
            let outer = soon("the entry", ours.lease("a").ttl(LONG).acquire()).await.expect("acquire");
            let inner = soon("the entry", ours.lease("a").ttl(LONG).acquire()).await.expect("acquire");
            let tried = ours.lease("a").ttl(LONG).try_acquire().await.expect("try").expect("the same owner");
            for lease in [&outer, &inner, &tried] {
                assert_eq!((lease.owner(), lease.token()), (owner, outer.token()));
            }
            let info = theirs.inspect("a").await.expect("inspect").expect("held");
            // Within one client the owner enters again without the database.
            assert_eq!((info.owner, info.holds, info.token), (Some(owner), 1, outer.token()));
            for (lease, left) in [(tried, 1), (inner, 1), (outer, 0)] {
                assert!(!is_free(&theirs, "a").await);
                lease.release().await.expect("release");
                assert_eq!(holds(&theirs, "a").await, left);
            }
        })
        .await;
    assert_eq!(Owner::current(), None);
    assert!(is_free(&theirs, "a").await);
}

#[tokio::test]
async fn shared_lease_inside_exclusive_can_be_downgraded() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let owner = Owner::random();
    let outer = enter(&ours, "a", owner).await;
    let request = ours.lease("a").ttl(LONG).owner(owner).shared().acquire();
    let mut inner = soon("the entry", request).await.expect("acquire");
    outer.release().await.expect("release");
    assert!(theirs.lease("a").shared().try_acquire().await.expect("try").is_none());
    inner.downgrade().await.expect("downgrade");
    let reader = theirs.lease("a").shared().try_acquire().await.expect("try").expect("it is shared now");
    reader.release().await.expect("release");
    inner.release().await.expect("release");
}

#[tokio::test]
async fn leases_without_owner_exclude_each_other() {
    let db = fresh().await;
    let locks = db.locks().await;
    let first = locks.lease("a").acquire().await.expect("acquire");
    assert!(locks.lease("a").try_acquire().await.expect("try").is_none());
    assert!(locks.lease("a").owner(Owner::random()).try_acquire().await.expect("try").is_none());
    // A scope covers only the requests inside it.
    let inside = Owner::random().scope(async { locks.lease("b").acquire().await.expect("acquire") }).await;
    assert!(locks.lease("b").try_acquire().await.expect("try").is_none());
    inside.release().await.expect("release");
    first.release().await.expect("release");
}

#[tokio::test]
async fn owner_reenters_from_another_process() {
    let db = fresh().await;
    let (ours, theirs, others) = (db.locks().await, db.locks().await, db.locks().await);
    let outer = enter(&ours, "a", Owner::random()).await;
    // One process prints the owner and the other reads it.
    let owner: Owner = outer.owner().to_string().parse().expect("an owner");
    assert_eq!(owner, outer.owner());
    let inner = enter(&theirs, "a", owner).await;
    let again = theirs.lease("a").owner(owner).ttl(LONG).try_acquire().await.expect("try").expect("the same owner");
    assert_eq!((inner.token(), again.token()), (outer.token(), outer.token()));
    assert_eq!(holds(&others, "a").await, 2);
    // In any order.
    outer.release().await.expect("release");
    assert_eq!(holds(&others, "a").await, 1);
    assert!(!is_free(&others, "a").await);
    drop(inner);
    again.extend(LONG).await.expect("still held");
    assert!(!is_free(&others, "a").await);
    again.release().await.expect("release");
    let next = soon("the turn", others.lease("a").acquire()).await.expect("acquire");
    next.release().await.expect("release");
}

#[tokio::test]
async fn inner_hold_never_shortens_the_outer() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let owner = Owner::random();
    let outer = enter(&ours, "a", owner).await;
    let left = async || theirs.inspect("a").await.expect("inspect").expect("held").remaining;
    assert!(left().await > LONG / 2);
    let inner = theirs.lease("a").owner(owner).ttl(SOON).renew(false).acquire().await.expect("acquire");
    assert!(left().await > LONG / 2, "not by entering");
    inner.extend(SOON).await.expect("extend");
    assert!(left().await > LONG / 2, "not by renewing");
    inner.release().await.expect("release");
    assert!(left().await > LONG / 2, "not by leaving");
    // Not by expiry either: the inner lease has ended, and the outer one lasts.
    let inner = theirs.lease("a").owner(owner).ttl(SHORT).renew(false).acquire().await.expect("acquire");
    soon("the loss", inner.lost()).await;
    drop(inner);
    assert!(left().await > LONG / 2);
    outer.extend(LONG).await.expect("still held");
    outer.release().await.expect("release");
    let next = soon("the turn", theirs.lease("a").acquire()).await.expect("acquire");
    next.release().await.expect("release");
}

#[tokio::test]
async fn longer_inner_hold_extends_the_lease() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let owner = Owner::random();
    let outer = ours.lease("a").owner(owner).ttl(SOON).renew(false).acquire().await.expect("acquire");
    let inner = enter(&theirs, "a", owner).await;
    outer.release().await.expect("release");
    let info = theirs.inspect("a").await.expect("inspect").expect("held");
    assert_eq!(info.holds, 1);
    assert!(info.remaining > LONG / 2);
    inner.release().await.expect("release");
}

#[tokio::test]
async fn reentry_overtakes_waiters() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let owner = Owner::random();
    let outer = enter(&ours, "a", owner).await;
    // A waiter in this process, and one in another.
    let mut here = std::pin::pin!(ours.lease("a").acquire());
    let mut there = std::pin::pin!(theirs.lease("a").acquire());
    tokio::time::timeout(Duration::from_millis(30), &mut here).await.expect_err("held");
    tokio::time::timeout(Duration::from_millis(30), &mut there).await.expect_err("held");
    let inner = enter(&ours, "a", owner).await;
    let elsewhere = enter(&theirs, "a", owner).await;
    assert_eq!((inner.token(), elsewhere.token()), (outer.token(), outer.token()));
    for lease in [outer, elsewhere, inner] {
        let token = lease.token();
        tokio::time::timeout(Duration::from_millis(30), &mut here).await.expect_err("held");
        assert_eq!(theirs.inspect("a").await.expect("inspect").map(|info| info.token), Some(token));
        lease.release().await.expect("release");
    }
    // Now it is their turn, in either order.
    let (here, there) = tokio::join!(async { soon("the turn", here).await.expect("acquire").release().await }, async {
        soon("the turn", there).await.expect("acquire").release().await
    },);
    here.and(there).expect("release");
}

/// Neither entry holds the name when it is requested, and neither releases it before both have it.
#[tokio::test]
async fn concurrent_entries_of_one_owner_both_succeed() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    for (first, second, clients) in [(&ours, &ours, 1), (&ours, &theirs, 2)] {
        for round in 0..10 {
            let name = format!("a{round}");
            let owner = Owner::random();
            let (one, two) = tokio::join!(enter(first, &name, owner), enter(second, &name, owner));
            assert_eq!(one.token(), two.token());
            assert_eq!(holds(&theirs, &name).await, clients);
            one.release().await.expect("release");
            two.release().await.expect("release");
        }
    }
}

#[tokio::test]
async fn expired_lease_cannot_be_reentered() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let owner = Owner::random();
    let start = Instant::now();
    let outer = ours.lease("a").owner(owner).ttl(SHORT).renew(false).acquire().await.expect("acquire");
    soon("the loss", outer.lost()).await;
    // The holder knows first: the database may still count it for a moment.
    tokio::time::sleep(SHORT.saturating_sub(start.elapsed()) + SHORT).await;
    for locks in [&theirs, &ours] {
        let inner = enter(locks, "a", owner).await;
        assert!(inner.token() > outer.token());
        assert_eq!(holds(&theirs, "a").await, 1);
        inner.release().await.expect("release");
    }
    let error = outer.release().await.expect_err("lost");
    assert!(error.is_lost(), "{error}");
}

#[tokio::test]
async fn another_owner_cannot_enter() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = enter(&ours, "a", Owner::random()).await;
    for locks in [&ours, &theirs] {
        let request = locks.lease("a").owner(Owner::random());
        assert!(request.clone().try_acquire().await.expect("try").is_none());
        let error = times_out(request.wait(Duration::from_secs(2))).await;
        assert!(error.is_timeout(), "{error}");
    }
    assert_eq!(holds(&theirs, "a").await, 1);
    lease.release().await.expect("release");
    for text in ["", "me", "0123", "host/1234", "936da01f-9abd-4d9d-80c7-02af85c822a8"] {
        assert!(matches!(text.parse::<Owner>(), Err(Error::InvalidOwner)));
    }
}

#[tokio::test]
async fn eviction_ends_all_holds_of_an_owner() {
    let db = fresh().await;
    let (ours, theirs, others) = (db.locks().await, db.locks().await, db.locks().await);
    let owner = Owner::random();
    let (outer, inner) = (enter(&ours, "a", owner).await, enter(&theirs, "a", owner).await);
    assert!(others.evict("a", outer.token()).await.expect("evict"));
    // From a third process: in the other two, a request waits for a holder that has not noticed its
    // loss.
    let next = enter(&others, "a", owner).await;
    assert!(next.token() > outer.token());
    for lease in [outer, inner] {
        assert!(lease.release().await.expect_err("evicted").is_lost());
    }
    next.extend(LONG).await.expect("still held");
    next.release().await.expect("ours to the end");
}
