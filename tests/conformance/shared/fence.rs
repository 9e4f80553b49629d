//! Fences of shared leases.
//!
//! Promises: 6.

use super::*;

#[tokio::test]
async fn reader_fence_blocks_writers_until_commit() {
    let counters = counters().await;
    let (ours, theirs, others) = (counters.db.locks().await, counters.db.locks().await, counters.db.locks().await);
    for first in [true, false] {
        // Of the first holder, and of one that joined it.
        let beside = if first { None } else { Some(taken(reading(&ours).ttl(BRIEF).renew(false)).await) };
        let reader = taken(reading(&ours).ttl(BRIEF).renew(false)).await;
        let mut tx = counters.pool.begin().await.expect("begin");
        reader.fence(&mut tx).await.expect("fence");
        add_one(&mut tx, 1).await.expect("write");
        let writer = tokio::spawn(writing(&theirs).wait(SOON * 2).acquire());
        soon("its end", reader.lost()).await;
        until_expired(&others, "a").await;
        assert_kept_out(&others, "a").await;
        assert!(!writer.is_finished(), "let in before the fenced transaction had ended");
        tx.commit().await.expect("who is fenced may commit");
        let writer = soon("its turn", writer).await.expect("no panic").expect("acquire");
        assert!(writer.token() > reader.token());
        writer.release().await.expect("ours to the end");
        drop((reader, beside));
        assert_nothing_is_left(&counters.db).await;
    }
    assert_eq!(counters.value(1).await, 2);
}

#[tokio::test]
async fn evicted_reader_cannot_fence_but_open_fence_holds() {
    let counters = counters().await;
    let (ours, theirs, operator) = (counters.db.locks().await, counters.db.locks().await, counters.db.locks().await);
    let reader = taken(reading(&ours).renew(false)).await;
    assert!(operator.evict("a", reader.token()).await.expect("evict"));
    assert!(reader.is_held(), "no heartbeat tells it");
    let mut tx = counters.at(read_committed()).await.begin().await;
    let error = reader.fence(&mut tx).await.expect_err("evicted");
    assert!(matches!(error, Error::Lost { cause: LossCause::Superseded, .. }), "{error:?}");
    tx.rollback().await.expect("rollback");
    drop(reader);

    let reader = taken(reading(&ours)).await;
    let token = reader.token();
    let mut tx = counters.pool.begin().await.expect("begin");
    reader.fence(&mut tx).await.expect("fence");
    add_one(&mut tx, 1).await.expect("write");
    let evicted = tokio::spawn(async move { operator.evict("a", token).await.expect("evict") });
    assert_kept_out(&theirs, "a").await;
    let writer = tokio::spawn(writing(&theirs).acquire());
    assert_kept_out(&counters.db.locks().await, "a").await;
    assert!(!writer.is_finished());
    tx.commit().await.expect("who is fenced may commit");
    assert!(soon("the eviction", evicted).await.expect("no panic"));
    let writer = soon("its turn", writer).await.expect("no panic").expect("acquire");
    assert!(writer.token() > token);
    drop((reader, writer));
    assert_nothing_is_left(&counters.db).await;
}

/// On SQLite, a transaction that takes the write lock when it first writes.
fn read_committed() -> &'static str {
    if DATABASE == Database::Sqlite { "DEFERRED" } else { "READ COMMITTED" }
}

/// The levels at which a transaction reads the latest rows, and a snapshot.
fn two_levels() -> &'static [&'static str] {
    if DATABASE == Database::Sqlite { &["DEFERRED"] } else { &["READ COMMITTED", "REPEATABLE READ"] }
}

#[tokio::test]
async fn reader_cannot_fence_after_a_writer() {
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    for &level in two_levels() {
        // When the name is free again, when the writer still has it, and when others share it.
        for since in ["free", "held", "shared"] {
            for began_before in [false, true] {
                // Without a heartbeat, which would report the eviction.
                let reader = taken(reading(&ours).renew(false)).await;
                let mut tx = counters.at(level).await.begin().await;
                if began_before {
                    let read = "SELECT value FROM counter WHERE id = 1";
                    let _: i64 = sqlx::query_scalar(read).fetch_one(&mut *tx).await.expect("read");
                }
                assert!(theirs.evict("a", reader.token()).await.expect("evict"));
                let writer = taken(writing(&theirs)).await;
                let mut between = counters.pool.begin().await.expect("begin");
                writer.fence(&mut between).await.expect("fence");
                add_one(&mut between, 1).await.expect("write");
                between.commit().await.expect("commit");
                let (mut writer, mut other) = (Some(writer), None);
                if since != "held" {
                    writer.take().expect("it is there").release().await.expect("ours to the end");
                }
                if since == "shared" {
                    other = Some(taken(reading(&theirs)).await);
                }
                let what = format!("{level}, {since}, began before: {began_before}");
                assert!(reader.is_held(), "by its own clock");
                let error = reader.fence(&mut tx).await.expect_err(&what);
                if !began_before && level != "REPEATABLE READ" {
                    assert!(matches!(error, Error::Lost { cause: LossCause::Superseded, .. }), "{what}: {error:?}");
                }
                assert!(error.is_lost() || error.is_conflict(), "{what}: {error:?}");
                tx.rollback().await.expect("rollback");
                drop((reader, writer, other));
                assert_nothing_is_left(&counters.db).await;
            }
        }
    }
}

#[tokio::test]
async fn share_fence_refuses_a_stale_snapshot() {
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    for &level in two_levels() {
        for first in [true, false] {
            let what = format!("{level}, first: {first}");
            let mut tx = counters.at(level).await.begin().await;
            let read = "SELECT value FROM counter WHERE id = 1";
            let seen: i64 = sqlx::query_scalar(read).fetch_one(&mut *tx).await.expect("read");
            let writer = taken(writing(&theirs)).await;
            let mut between = counters.pool.begin().await.expect("begin");
            writer.fence(&mut between).await.expect("fence");
            add_one(&mut between, 1).await.expect("write");
            between.commit().await.expect("commit");
            writer.release().await.expect("ours to the end");
            let beside = if first { None } else { Some(taken(reading(&theirs)).await) };
            let reader = taken(reading(&ours)).await;
            let fenced = reader.fence(&mut tx).await;
            if level == "READ COMMITTED" {
                fenced.unwrap_or_else(|e| panic!("{what}: {e}"));
                let now: i64 = sqlx::query_scalar(read).fetch_one(&mut *tx).await.expect("read");
                assert_eq!(now, seen + 1, "after the fence it reads what is");
                tx.commit().await.expect("commit");
            } else {
                let error = fenced.expect_err("it reads from before the share");
                assert!(matches!(error, Error::Fence { cause: FenceError::StaleSnapshot, .. }), "{what}: {error:?}");
                assert!(error.is_conflict() && error.is_retryable());
                tx.rollback().await.expect("rollback");
                let mut tx = counters.at(level).await.begin().await;
                reader.fence(&mut tx).await.unwrap_or_else(|e| panic!("{what}: {e}"));
                let now: i64 = sqlx::query_scalar(read).fetch_one(&mut *tx).await.expect("read");
                assert_eq!(now, seen + 1);
                tx.commit().await.expect("commit");
            }
            drop((reader, beside));
            assert_nothing_is_left(&counters.db).await;
        }
    }
}

#[tokio::test]
async fn two_readers_can_fence_at_once() {
    let counters = counters().await;
    let (ours, theirs, others) = (counters.db.locks().await, counters.db.locks().await, counters.db.locks().await);
    let one = taken(reading(&ours)).await;
    let mut first = counters.pool.begin().await.expect("begin");
    one.fence(&mut first).await.expect("fence");
    if DATABASE == Database::Sqlite {
        // One writer: not even a share is granted.
        add_one(&mut first, 1).await.expect("write");
        timeout(Duration::from_millis(300), reading(&theirs).acquire()).await.expect_err("the write lock is taken");
        first.commit().await.expect("commit");
        let two = taken(reading(&theirs)).await;
        let mut second = counters.pool.begin().await.expect("begin");
        two.fence(&mut second).await.expect("fence");
        add_one(&mut second, 2).await.expect("write");
        second.commit().await.expect("commit");
        drop((one, two));
        return assert_nothing_is_left(&counters.db).await;
    }
    // A share from before the first fence can be fenced; a share granted while the fence is open
    // must not wait for it either.
    let two = taken(reading(&theirs)).await;
    let mut second = counters.pool.begin().await.expect("begin");
    soon("the second fence", two.fence(&mut second)).await.expect("fence");
    add_one(&mut first, 1).await.expect("write");
    add_one(&mut second, 2).await.expect("write");
    one.release().await.expect("ours to the end");
    two.release().await.expect("ours to the end");
    let writer = tokio::spawn(writing(&theirs).acquire());
    assert_kept_out(&others, "a").await;
    first.commit().await.expect("commit");
    assert_kept_out(&others, "a").await;
    assert!(!writer.is_finished(), "the second transaction is still open");
    second.commit().await.expect("commit");
    let writer = soon("its turn", writer).await.expect("no panic").expect("acquire");
    writer.release().await.expect("ours to the end");
    assert_eq!((counters.value(1).await, counters.value(2).await), (1, 1));
    assert_nothing_is_left(&counters.db).await;
}
