//! Exclusive leases that become shared ones.

use super::*;

#[tokio::test]
async fn downgrade_admits_next_readers_but_no_writer() {
    let db = fresh().await;
    let (ours, theirs, others) = (db.locks().await, db.locks().await, db.locks().await);
    let mut lease = taken(writing(&ours).label("mine")).await;
    let token = lease.token();
    let readers = [enqueue(reading(&theirs), &others, 0).await, waits_locally(reading(&ours)).await];
    let writer = enqueue(writing(&others), &theirs, 1).await;
    let late = enqueue(reading(&db.locks().await), &theirs, 2).await;
    lease.downgrade().await.expect("downgrade");
    assert!(lease.is_held());
    assert_eq!(lease.token(), token, "it is still the same holding");
    let mut inside = Vec::new();
    for reader in readers {
        inside.push(granted(reader).await);
    }
    assert_closed_to_readers(&theirs, 2).await;
    assert!(!writer.is_finished() && !late.is_finished());
    let listed = holders(&theirs).await;
    assert_eq!(listed.len(), 3);
    assert!(listed.iter().all(|info| info.mode == Mode::Shared));
    let own = listed.iter().find(|info| info.token == token).expect("it shares the name");
    assert_eq!((own.owner, &*own.label), (Some(lease.owner()), "mine"));
    lease.downgrade().await.expect("it is shared already");
    lease.release().await.expect("ours to the end");
    for reader in inside {
        assert!(!writer.is_finished());
        reader.release().await.expect("ours to the end");
    }
    let writer = granted(writer).await;
    assert!(writer.token() > token);
    assert!(!late.is_finished());
    writer.release().await.expect("ours to the end");
    granted(late).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn downgrade_leaves_no_gap_for_a_writer() {
    let db = fresh().await;
    let ours = db.locks().await;
    let rivals = [db.locks().await, db.locks().await, db.locks().await];
    for _ in 0..10 {
        let mut lease = taken(writing(&ours)).await;
        let mut tries = JoinSet::new();
        for rival in rivals.clone() {
            tries.spawn(async move {
                for _ in 0..5 {
                    assert!(writing(&rival).try_acquire().await.expect("try").is_none(), "there was a gap");
                }
            });
        }
        let waits = tokio::spawn(writing(&rivals[0]).acquire());
        lease.downgrade().await.expect("downgrade");
        soon("the tries", async {
            while let Some(tried) = tries.join_next().await {
                tried.expect("no gap")
            }
        })
        .await;
        until_waiters(&ours, "a", 1).await;
        assert!(!waits.is_finished() && lease.is_held());
        lease.release().await.expect("ours to the end");
        soon("its turn", waits).await.expect("no panic").expect("acquire").release().await.expect("ours to the end");
    }
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn downgraded_lease_behaves_like_a_share() {
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    let mut lease = taken(writing(&ours).ttl(BRIEF)).await;
    lease.downgrade().await.expect("downgrade");
    let before = holders(&theirs).await[0].expires_at;
    until("a renewal", async || holders(&theirs).await[0].expires_at > before).await;
    assert!(lease.is_held());
    let mut tx = counters.pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    add_one(&mut tx, 1).await.expect("write");
    tx.commit().await.expect("commit");
    let beside = reading(&theirs).try_acquire().await.expect("try").expect("it is shared");
    assert!(theirs.evict("a", lease.token()).await.expect("evict"));
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Superseded);
    assert!(beside.is_held());
    beside.release().await.expect("ours to the end");
    drop(lease);
    assert_nothing_is_left(&counters.db).await;
}

#[tokio::test]
async fn lease_entered_twice_cannot_be_downgraded() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let owner = Owner::random();
    let mut outer = taken(writing(&ours).owner(owner)).await;
    let inner = taken(writing(&theirs).owner(owner)).await;
    let error = outer.downgrade().await.expect_err("entered twice");
    assert!(matches!(error, Error::Conversion { .. }), "{error}");
    assert!(outer.is_held() && inner.is_held());
    assert!(reading(&theirs).try_acquire().await.expect("try").is_none(), "it is held alone as before");
    inner.release().await.expect("ours to the end");
    outer.downgrade().await.expect("downgrade");
    taken(reading(&theirs)).await.release().await.expect("ours to the end");
    outer.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn lost_lease_cannot_be_downgraded() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let mut expired = taken(writing(&ours).ttl(Duration::from_millis(300)).renew(false)).await;
    soon("its end", expired.lost()).await;
    let error = expired.downgrade().await.expect_err("it has expired");
    assert!(matches!(error, Error::Lost { cause: LossCause::Expired, .. }), "{error}");
    drop(expired);

    let mut evicted = taken(writing(&ours)).await;
    assert!(theirs.evict("a", evicted.token()).await.expect("evict"));
    let error = evicted.downgrade().await.expect_err("it was evicted");
    assert!(matches!(error, Error::Lost { cause: LossCause::Superseded, .. }), "{error}");
    assert!(!evicted.is_held());

    let mut taken_over = taken(writing(&ours)).await;
    assert!(theirs.evict("a", taken_over.token()).await.expect("evict"));
    let next = taken(writing(&theirs)).await;
    let error = taken_over.downgrade().await.expect_err("another has it");
    assert!(matches!(error, Error::Lost { cause: LossCause::Superseded, .. }), "{error}");
    assert!(next.is_held() && holders(&ours).await.len() == 1);
    next.extend(LONG).await.expect("still ours");
    next.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn dropped_downgrade_loses_the_lease() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let mut lease = taken(writing(&ours)).await;
    tokio::select! {
        biased;
        downgraded = lease.downgrade() => panic!("the database has not answered yet: {downgraded:?}"),
        () = std::future::ready(()) => {}
    }
    assert!(!lease.is_held());
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Superseded);
    let extended = lease.extend(LONG).await.expect_err("it is lost");
    assert!(extended.is_lost(), "{extended:?}");
    // The dropped call releases the lease.
    taken(writing(&theirs)).await.release().await.expect("ours to the end");
    let released = lease.release().await.expect_err("it was lost");
    assert!(released.is_lost(), "{released:?}");
    assert_nothing_is_left(&db).await;
}
