//! The longest durations: each setter accepts them, or the request fails with the valid range.
//! Neither panics.
//!
//! Promises: 15.

use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome};
use sqlock::quorum::Quorum;
use sqlock::retry::Retry;
use sqlock::{Error, Locks};

use super::fence::{Counters, add_one, counters};
use crate::support::{Database, soon, until_waiters};
use crate::{DATABASE, Sql};

const LONGEST: [Duration; 3] = [Duration::MAX, Duration::from_secs(u64::MAX / 2), Duration::from_secs(1 << 40)];

/// Counts the panics on this thread, on which the tasks of the library also run. Panics of tasks
/// without an awaiting caller matter here.
fn panics() -> Arc<AtomicUsize> {
    let count = Arc::new(AtomicUsize::new(0));
    let (counted, here, others) = (Arc::clone(&count), std::thread::current().id(), panic::take_hook());
    panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() == here {
            counted.fetch_add(1, Ordering::SeqCst);
        }
        others(info);
    }));
    count
}

async fn unlimited(counters: &Counters) -> Locks {
    let builder = counters.db.builder().await.ttl_range(Duration::from_millis(100)..=Duration::MAX);
    builder.build()
}

/// Checks that the call succeeds or its error has the range.
fn is_in_order<T>(what: &str, outcome: Result<T, Error>) -> Option<T> {
    match outcome {
        Ok(value) => Some(value),
        Err(Error::OutOfRange { .. }) => None,
        Err(error) => panic!("{what}: {error}"),
    }
}

#[tokio::test]
async fn longest_ttl_is_granted_or_out_of_range() {
    let counters = counters().await;
    let panics = panics();
    let locks = unlimited(&counters).await;
    for (nth, long) in LONGEST.into_iter().enumerate() {
        let a = format!("a/{nth}");
        let names = || [format!("b/{nth}"), format!("c/{nth}")];
        for outcome in [
            soon("ttl", locks.lease(&a).ttl(long).try_acquire()).await,
            soon("ttl shared", locks.lease(&a).shared().ttl(long).try_acquire()).await,
            soon("permits", locks.semaphore(&a, 2).ttl(long).try_acquire()).await,
            soon("max_hold", locks.lease(&a).max_hold(long).try_acquire()).await,
            soon("hold_at_least", locks.lease(&a).hold_at_least(long).ttl(long).try_acquire()).await,
        ] {
            if let Some(lease) = is_in_order("a lease", outcome).flatten() {
                assert!(lease.is_held() && lease.remaining() > Duration::ZERO);
                is_in_order("extend", soon("extend", lease.extend(long)).await);
                is_in_order("extend", soon("extend", locks.extend(&a, lease.token(), long)).await);
                soon("release", lease.release()).await.expect("ours to the end");
            }
        }
        let all = locks.lease_all(names()).ttl(long).max_hold(long);
        if let Some(all) = is_in_order("several", soon("several", all.try_acquire()).await).flatten() {
            is_in_order("extend", soon("extend", all.extend(long)).await);
            soon("release", all.release()).await.expect("ours to the end");
        }
        let lease = locks.lease(format!("kept/{nth}")).acquire().await.expect("acquire");
        is_in_order("extend", soon("extend", lease.extend(long)).await);
        soon("release", lease.release()).await.expect("ours to the end");
        let quorum = Quorum::new([locks.clone()]).rejoin_after(Duration::ZERO).lease(format!("q/{nth}"));
        let quorum = soon("a quorum", quorum.ttl(long).node_timeout(long).wait(long).acquire()).await;
        if let Some(lease) = is_in_order("a quorum", quorum) {
            is_in_order("extend", soon("extend", lease.extend(long)).await);
            soon("release", lease.release()).await.expect("ours to the end");
        }
        let election = locks.election(format!("e/{nth}")).ttl(long);
        if let Some(leader) = is_in_order("an election", soon("an election", election.campaign()).await) {
            soon("resign", leader.resign()).await.expect("ours to the end");
        }
    }
    assert_eq!(panics.load(Ordering::SeqCst), 0, "panics");
}

#[tokio::test]
async fn longest_wait_ends_with_the_grant() {
    let counters = counters().await;
    let panics = panics();
    let (locks, others) = (unlimited(&counters).await, unlimited(&counters).await);
    for long in LONGEST {
        let holder = others.lease("a").acquire().await.expect("acquire");
        let waits = tokio::spawn(locks.lease("a").wait(long).acquire());
        until_waiters(&locks, "a", 1).await;
        holder.release().await.expect("ours to the end");
        let lease = soon("the lease", waits).await.expect("no panic").expect("acquire");
        lease.release().await.expect("ours to the end");
        let all = soon("several", locks.lease_all(["a", "b"]).wait(long).acquire()).await.expect("acquire");
        all.release().await.expect("ours to the end");
        let permit = soon("a permit", locks.semaphore("s", 1).wait(long).acquire()).await.expect("acquire");
        permit.release().await.expect("ours to the end");
        let session = soon("a session lock", locks.session("a").wait(long).acquire()).await.expect("acquire");
        session.release().await.expect("ours to the end");
        let mut tx = match DATABASE {
            Database::Sqlite => counters.pool.begin_with("BEGIN IMMEDIATE").await.expect("begin"),
            _ => {
                // A connection of the client ensures the row.
                counters.pool.begin().await.expect("begin")
            }
        };
        soon("a row", locks.row_of("counter", "id", 1_i64).wait(long).lock(&mut tx)).await.expect("lock");
        if DATABASE != Database::Sqlite {
            soon("a named row", locks.row("a").wait(long).lock(&mut tx)).await.expect("lock");
        }
        tx.rollback().await.expect("rollback");
        let retry = Retry::new().within(long).run(&counters.pool, async |tx| add_one(tx, 1).await);
        soon("a transaction", retry).await.expect("commit");
    }
    assert_eq!(panics.load(Ordering::SeqCst), 0, "panics");
}

#[tokio::test]
async fn longest_intervals_and_retentions_do_not_panic() {
    let counters = counters().await;
    let panics = panics();
    let locks = unlimited(&counters).await;
    for (nth, long) in LONGEST.into_iter().enumerate() {
        let sweeping = locks.sweeper().every(long).retention(long).start();
        soon("a sweep", locks.sweeper().retention(long).sweep()).await.expect("a sweep");
        drop(sweeping);
        let mut changes = locks.election("leader").changes().every(long);
        soon("the first look", changes.next()).await.expect("nobody leads");
        let payments = Idempotency::new(&locks).retention(long).lease(long).wait(long);
        let (key, request) = (IdempotencyKey::new("alice", format!("{nth}")), Fingerprint::of(["charge"]));
        is_in_order("issue", soon("issue", payments.issue("alice", long)).await);
        let charge = async |tx: &mut sqlx::Transaction<'_, Sql>| Ok::<_, Error>(add_one(tx, 1).await?);
        let ran = soon("a request", payments.run(&counters.pool, &key, &request, charge)).await;
        if let Err(error) = ran {
            assert!(error.to_string().contains("out of range") || error.to_string().contains("retention"), "{error}");
        }
        let default = Idempotency::new(&locks).lease(long).wait(long);
        if let Some(Outcome::New(attempt)) = is_in_order("begin", soon("begin", default.attempt(&key, &request)).await)
        {
            attempt.forget().await.expect("nothing was done");
        }
    }
    assert_eq!(panics.load(Ordering::SeqCst), 0, "panics");
}
