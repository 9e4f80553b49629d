//! Idle connections that die, and requests that are sent twice: neither changes the holder of a
//! name. SQLite has no connection that could die; the assertions are the same there.
//!
//! Promises: 1, 12, 18.

use super::*;

/// Checks that a client keeps holdings that it acquired over a dead connection.
async fn assert_stays_held(
    acquire: impl AsyncFnOnce(&Locks) -> sqlock::Result<Lease>,
    is_taken: impl AsyncFnOnce(&Locks) -> sqlock::Result<bool>,
) {
    let network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    network.kill_idle();
    let held = soon("the lease", acquire(&locks)).await.expect("acquire");
    // The client's statements after the acquisition precede this release on the same connection.
    locks.lease("other").acquire().await.expect("acquire").release().await.expect("release");
    assert!(is_taken(&rival).await.expect("try"), "a second holder was let in");
    held.release().await.expect("held to the end");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn permit_taken_over_a_dead_connection_is_kept() {
    let acquire = async |locks: &Locks| locks.semaphore("s", 1).ttl(LONG).acquire().await;
    assert_stays_held(acquire, async |rival| Ok(rival.semaphore("s", 1).try_acquire().await?.is_none())).await;
}

#[tokio::test]
async fn share_taken_over_a_dead_connection_is_kept() {
    let acquire = async |locks: &Locks| locks.lease("s").ttl(LONG).shared().acquire().await;
    assert_stays_held(acquire, async |rival| Ok(rival.lease("s").try_acquire().await?.is_none())).await;
}

#[tokio::test]
async fn release_after_eviction_is_lost_on_reconnect() {
    let network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert!(rival.evict("a", lease.token()).await.expect("evict"));
    let next = rival.lease("a").ttl(LONG).acquire().await.expect("acquire");
    network.kill_idle();
    let verdict = soon("the verdict", lease.release()).await;
    assert!(matches!(verdict, Err(Error::Lost { cause: LossCause::Superseded, .. })), "{verdict:?}");
    next.release().await.expect("the successor held to the end");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn release_of_evicted_permit_is_lost_on_reconnect() {
    let network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let permit = locks.semaphore("s", 2).ttl(LONG).acquire().await.expect("acquire");
    assert!(rival.evict("s", permit.token()).await.expect("evict"));
    network.kill_idle();
    let verdict = soon("the verdict", permit.release()).await;
    assert!(matches!(verdict, Err(Error::Lost { cause: LossCause::Superseded, .. })), "{verdict:?}");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// The row of a name records only the last eviction. A lease ended by an earlier eviction must not
/// count as released.
#[tokio::test]
async fn release_fails_after_two_evictions() {
    let network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let permits = [
        locks.semaphore("s", 2).ttl(LONG).acquire().await.expect("acquire"),
        locks.semaphore("s", 2).ttl(LONG).acquire().await.expect("acquire"),
    ];
    for permit in permits.iter().rev() {
        assert!(rival.evict("s", permit.token()).await.expect("evict"));
    }
    network.kill_idle();
    for permit in permits {
        let verdict = soon("the verdict", permit.release()).await;
        assert!(matches!(verdict, Err(Error::Lost { .. } | Error::Unknown { .. })), "{verdict:?}");
    }
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// The reply to a wait request is lost, the name is granted, and the request is repeated much
/// later: the waiter must count its lease from before the grant, not from the repeated request.
#[tokio::test]
async fn lease_granted_before_repeated_request_ends_on_time() {
    const LABEL: &str = "a text to be found in the request";
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let holder = rival.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let cut = network.proxy.as_ref().map(|proxy| proxy.cut_reply_to_and_freeze(LABEL));
    let waiting = tokio::spawn(locks.lease("a").ttl(Duration::from_secs(8)).label(LABEL).shared().acquire());
    if let Some(cut) = cut {
        soon("the cut", cut.happened()).await;
        holder.release().await.expect("release");
        // A grant that its waiter does not confirm lasts 3 s. A count from the second request would
        // be wrong by that much; after its end the waiter has to ask anew, which is also correct.
        sleep(Duration::from_millis(1_500)).await;
        // The connection with the notifications has died as well, so the waiter must poll.
        network.kill_idle();
        network.mend().await;
        let lease = soon("the lease", waiting).await.expect("no panic").expect("acquire");
        // From here on the client reaches no server: the database's clock alone decides when the
        // name is free.
        network.strike(Fault::Frozen).await;
        let taking = async {
            loop {
                if let Some(lease) = rival.lease("a").ttl(LONG).try_acquire().await.expect("try") {
                    return lease;
                }
                sleep(Duration::from_millis(5)).await;
            }
        };
        let next = soon("the successor", taking).await;
        assert!(!lease.is_held(), "held by two");
        next.release().await.expect("release");
    } else {
        // No reply of SQLite can be lost.
        holder.release().await.expect("release");
        soon("the lease", waiting).await.expect("no panic").expect("acquire").release().await.expect("release");
    }
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// A subscriber of `tracing` that panics once, inside a task of this crate.
struct PanicsOnce(Arc<AtomicBool>);

impl tracing::Subscriber for PanicsOnce {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let is_ours = event.metadata().target().starts_with("sqlock");
        assert!(!is_ours || self.0.swap(true, Ordering::SeqCst), "a panic that the test asked for");
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[tokio::test]
async fn panic_in_client_task_costs_no_lease() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let kept = locks.lease("kept").ttl(LONG).acquire().await.expect("acquire");
    network.strike(Fault::Refused).await;
    let panicked = Arc::new(AtomicBool::new(false));
    {
        let _subscriber = tracing::subscriber::set_default(PanicsOnce(Arc::clone(&panicked)));
        // A repeated request is an event. A test on another thread, without a subscriber, may have
        // logged it first, and `tracing` caches that no subscriber is interested: the cache must be
        // rebuilt.
        let panic = async {
            while !panicked.load(Ordering::SeqCst) {
                tracing::callsite::rebuild_interest_cache();
                let asked = locks.lease("b").try_acquire().await;
                assert!(!matches!(asked, Err(Error::Closed)), "{asked:?}");
            }
        };
        soon("the panic", panic).await;
    }
    network.mend().await;
    let next = soon("the next lease", locks.lease("c").acquire()).await.expect("acquire");
    next.release().await.expect("release");
    assert!(kept.is_held());
    assert!(rival.lease("kept").try_acquire().await.expect("try").is_none());
    soon("the release", kept.release()).await.expect("held to the end");
    network.assert_nothing_left(vec![locks, rival]).await;
}
