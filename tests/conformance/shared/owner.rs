//! Re-entrance of owners that share a name.
//!
//! Promises: 11.

use super::*;

#[tokio::test]
async fn sharing_owner_reenters_past_waiting_writer() {
    let db = fresh().await;
    let (ours, theirs, others) = (db.locks().await, db.locks().await, db.locks().await);
    let owner = Owner::random();
    let outer = taken(reading(&ours).owner(owner)).await;
    let writer = enqueue(writing(&theirs), &ours, 0).await;
    let stranger = enqueue(reading(&others), &ours, 1).await;
    // From the same process, from another one, and without waiting.
    let inner = taken(reading(&ours).owner(owner)).await;
    let elsewhere = taken(reading(&others).owner(owner)).await;
    let tried = reading(&theirs).owner(owner).try_acquire().await.expect("try").expect("its owner shares it");
    let scoped = owner.scope(async { taken(reading(&ours)).await }).await;
    let inside = holders(&ours).await;
    assert!(inside.iter().all(|info| info.owner == Some(owner) && info.mode == Mode::Shared), "{inside:?}");
    assert_eq!((inner.token(), scoped.token()), (outer.token(), outer.token()), "of one process, one acquisition");
    assert!([&outer, &inner, &elsewhere, &tried, &scoped].into_iter().all(Lease::is_held));
    until_waiters(&ours, "a", 2).await;
    assert!(!writer.is_finished() && !stranger.is_finished());
    for lease in [outer, elsewhere, scoped, tried] {
        lease.release().await.expect("ours to the end");
        assert_closed_to_readers(&theirs, 2).await;
    }
    assert!(!writer.is_finished(), "its owner has one left");
    inner.release().await.expect("ours to the end");
    granted(writer).await.release().await.expect("ours to the end");
    granted(stranger).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

/// The client has a waiting writer already; behind that writer, the owner would wait for itself.
#[tokio::test]
async fn sharing_owner_reenters_through_client_of_waiter() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let owner = Owner::random();
    let outer = taken(reading(&ours).owner(owner)).await;
    let writer = enqueue(writing(&theirs), &ours, 0).await;
    let inner = taken(reading(&theirs).owner(owner)).await;
    assert!(!writer.is_finished() && outer.is_held() && inner.is_held());
    outer.release().await.expect("ours to the end");
    assert_closed_to_readers(&ours, 1).await;
    assert!(!writer.is_finished(), "its owner has one left");
    inner.release().await.expect("ours to the end");
    granted(writer).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

/// The waiting writer of the client does not change the refusal.
#[tokio::test]
async fn upgrade_is_refused_through_client_of_waiter() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let owner = Owner::random();
    let share = taken(reading(&ours).owner(owner)).await;
    let writer = enqueue(writing(&theirs), &ours, 0).await;
    assert!(is_conversion(soon("a refusal", writing(&theirs).owner(owner).acquire()).await));
    let tried = soon("a refusal", writing(&theirs).owner(owner).try_acquire()).await;
    assert!(is_conversion(tried.map(|lease| lease.expect("not merely taken"))));
    share.release().await.expect("ours to the end");
    granted(writer).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

/// Behind any waiter, the owner would wait for itself.
#[tokio::test]
async fn sharing_owner_reenters_past_forty_waiters() {
    const CROWD: usize = 40;
    // This many readers of one client may queue at once.
    const OF_ONE_CLIENT: usize = 13;
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let owner = Owner::random();
    let outer = taken(reading(&ours).owner(owner)).await;
    let mut crowd = JoinSet::new();
    crowd.spawn(writing(&theirs).acquire());
    until_waiters(&ours, "a", 1).await;
    for _ in 0..(CROWD - 1) / OF_ONE_CLIENT {
        let others = db.locks().await;
        for _ in 0..OF_ONE_CLIENT {
            crowd.spawn(reading(&others).acquire());
        }
    }
    until_waiters(&ours, "a", CROWD).await;
    let inner = taken(reading(&ours).owner(owner)).await;
    until_waiters(&ours, "a", CROWD).await;
    crowd.shutdown().await;
    inner.release().await.expect("ours to the end");
    outer.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

#[tokio::test]
async fn exclusive_owner_may_also_share_the_name() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let owner = Owner::random();
    let alone = taken(writing(&ours).owner(owner)).await;
    let here = taken(reading(&ours).owner(owner)).await;
    let elsewhere = taken(reading(&theirs).owner(owner)).await;
    let tried = reading(&ours).owner(owner).try_acquire().await.expect("try").expect("its owner has it");
    assert_eq!([&here, &elsewhere, &tried].map(Lease::token), [alone.token(); 3]);
    assert!(reading(&theirs).try_acquire().await.expect("try").is_none(), "strangers do not come in with it");
    let waits = enqueue(reading(&db.locks().await), &ours, 0).await;
    for lease in [alone, elsewhere, tried] {
        lease.release().await.expect("ours to the end");
        assert!(writing(&theirs).try_acquire().await.expect("try").is_none());
    }
    assert!(!waits.is_finished(), "its owner has one hold left");
    here.release().await.expect("ours to the end");
    granted(waits).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}

/// The reader asked before its owner held the name, and would otherwise wait for its own owner.
#[tokio::test]
async fn waiting_reader_enters_with_its_exclusive_owner() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    for reader_is_elsewhere in [false, true] {
        let owner = Owner::random();
        let holder = taken(writing(&theirs)).await;
        let alone = enqueue(writing(&ours).owner(owner), &theirs, 0).await;
        let read = if reader_is_elsewhere {
            enqueue(reading(&db.locks().await).owner(owner), &theirs, 1).await
        } else {
            waits_locally(reading(&ours).owner(owner)).await
        };
        holder.release().await.expect("ours to the end");
        let alone = granted(alone).await;
        let read = granted(read).await;
        assert_eq!(read.token(), alone.token());
        alone.release().await.expect("ours to the end");
        assert!(writing(&theirs).try_acquire().await.expect("try").is_none());
        read.release().await.expect("ours to the end");
        assert_nothing_is_left(&db).await;
    }
}

fn is_conversion(outcome: Result<Lease, Error>) -> bool {
    match outcome {
        Err(Error::Conversion { name, .. }) => name.as_str() == "a",
        other => panic!("not a conversion: {other:?}"),
    }
}

#[tokio::test]
async fn upgrade_of_a_share_is_refused_at_once() {
    let db = fresh().await;
    let (ours, theirs, others) = (db.locks().await, db.locks().await, db.locks().await);
    let owner = Owner::random();
    let share = taken(reading(&ours).owner(owner)).await;
    let refused = async || {
        for locks in [&ours, &theirs] {
            let asked = || writing(locks).owner(owner);
            assert!(is_conversion(soon("a refusal", asked().acquire()).await));
            assert!(is_conversion(soon("a refusal", asked().wait(LONG).acquire()).await));
            let tried = soon("a refusal", asked().try_acquire()).await;
            assert!(is_conversion(tried.map(|lease| lease.expect("not merely taken"))));
            let scoped = owner.scope(async { writing(locks).acquire().await });
            assert!(is_conversion(soon("a refusal", scoped).await));
        }
    };
    refused().await;
    // The request leaves no entry, and other clients see the name as held.
    until_waiters(&others, "a", 0).await;
    assert!(writing(&theirs).try_acquire().await.expect("try").is_none());
    // Beside other readers, and behind a writer that waits.
    let beside = taken(reading(&theirs)).await;
    refused().await;
    let writer = enqueue(writing(&others), &others, 0).await;
    refused().await;
    until_waiters(&others, "a", 1).await;
    assert!(share.is_held() && beside.is_held() && !writer.is_finished());
    share.release().await.expect("ours to the end");
    beside.release().await.expect("ours to the end");
    granted(writer).await.release().await.expect("ours to the end");
    // The released name can be acquired exclusively.
    taken(writing(&ours).owner(owner)).await.release().await.expect("ours to the end");
    assert_nothing_is_left(&db).await;
}
