//! Taking, keeping and giving back.

use std::time::Duration;

use crate::support::{fresh, soon};

#[tokio::test]
async fn a_lease_excludes_others_until_it_is_released() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").acquire().await.expect("acquire");
    assert!(lease.is_held());
    assert!(theirs.lease("a").try_acquire().await.expect("try").is_none());
    assert!(theirs.lease("b").try_acquire().await.expect("try").is_some());
    let token = lease.token();
    lease.release().await.expect("release");
    let next = theirs.lease("a").try_acquire().await.expect("try").expect("free");
    assert!(next.token() > token);
    next.release().await.expect("release");
}

#[tokio::test]
async fn waiters_of_one_process_are_served_in_order() {
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

#[tokio::test]
async fn a_lease_is_renewed_beyond_its_ttl() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(Duration::from_secs(1)).acquire().await.expect("acquire");
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(lease.is_held());
    assert!(theirs.lease("a").try_acquire().await.expect("try").is_none());
    let info = theirs.inspect("a").await.expect("inspect").expect("held");
    assert_eq!(info.token, lease.token());
    lease.release().await.expect("release");
}

#[tokio::test]
async fn a_fence_keeps_others_out_until_the_transaction_ends() {
    let db = fresh().await;
    let pool = db.pool().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(Duration::from_millis(600)).renew(false).acquire().await.expect("acquire");
    let token = lease.token();
    let mut tx = pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    // It expires, and still nobody gets in.
    lease.lost().await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let next = theirs.lease("a").wait(Duration::from_secs(20)).acquire();
    let mut next = std::pin::pin!(next);
    tokio::time::timeout(Duration::from_millis(700), &mut next).await.expect_err("fenced");
    tx.commit().await.expect("commit");
    let next = next.await.expect("acquire");
    assert!(next.token() > token);
    next.release().await.expect("release");
}
