//! Replies that never come.
//!
//! Promises: 9, 18.

use super::*;
use crate::support::until;

#[tokio::test]
async fn acquire_with_lost_reply_yields_one_lease() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    // The row exists, so that the first statement is the one that grants.
    network.strike(Fault::Mute).await;
    let asking = tokio::spawn(locks.lease("a").ttl(LONG).acquire());
    let mut granted = None;
    if network.proxy.is_some() {
        network.until("the grant", "a", |row| !row.id.is_empty()).await;
        granted = network.row("a").await.map(|row| row.token);
    }
    network.cut_when("a", |row| !row.id.is_empty()).await;
    let lease = soon("the lease", asking).await.expect("no panic").expect("acquire");
    assert!(lease.is_held());
    let row = network.row("a").await.expect("the row");
    assert_eq!(row.token, lease.token().get());
    if let Some(granted) = granted {
        assert_eq!(row.token, granted, "the holding that was committed first, not a second one");
    }
    assert_eq!(row.id.len(), 32, "one lease: {}", row.id);
    assert!(rival.lease("a").try_acquire().await.expect("try").is_none());
    lease.release().await.expect("release");
    let next = rival.lease("a").try_acquire().await.expect("try").expect("no orphan keeps it");
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn renewal_with_lost_reply_keeps_the_lease() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_secs(9);
    let lease = locks.lease("a").ttl(ttl).acquire().await.expect("acquire");
    // When two heartbeats were answered, their connection is open and their statements are
    // prepared.
    let deadline = || Instant::now() + lease.remaining();
    for _ in 0..2 {
        let before = deadline();
        until("a heartbeat", async || deadline() > before + ttl / 20).await;
    }
    let (acquired, granted) = (Instant::now(), network.row("a").await.expect("the row"));
    network.strike(Fault::Mute).await;
    if network.proxy.is_none() {
        sleep(Duration::from_millis(1200)).await; // a heartbeat is due once a second
    }
    network.cut_when("a", |row| row.expires_at > granted.expires_at).await;
    let lost = timeout((acquired + ttl + ttl / 3).saturating_duration_since(Instant::now()), lease.lost()).await;
    assert!(lost.is_err(), "lost: {lost:?}");
    assert!(lease.is_held());
    let row = network.row("a").await.expect("the row");
    assert_eq!((row.token, row.id), (granted.token, granted.id));
    assert!(rival.lease("a").try_acquire().await.expect("try").is_none());
    lease.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn release_with_lost_reply_succeeds() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    network.strike(Fault::Mute).await;
    let releasing = tokio::spawn(lease.release());
    network.cut_when("a", |row| row.id.is_empty()).await;
    soon("the release", releasing).await.expect("no panic").expect("it was ours to the end");
    let next = rival.lease("a").try_acquire().await.expect("try").expect("free");
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// The release is sent again when another client holds the name; it still succeeds and does not
/// touch the successor's lease.
#[tokio::test]
async fn repeated_release_succeeds_and_spares_the_successor() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let token = lease.token().get();
    network.strike(Fault::Mute).await;
    let releasing = tokio::spawn(lease.release());
    if network.proxy.is_some() {
        // Without a waiter it is one statement, whose answer is not needed.
        network.until("the release", "a", |row| row.id.is_empty()).await;
    }
    let taking = tokio::spawn(rival.lease("a").wait(SOON).acquire());
    network.cut_when("a", |row| !row.id.is_empty() && row.token > token).await;
    soon("the release", releasing).await.expect("no panic").expect("it was ours to the end");
    let next = soon("the successor", taking).await.expect("no panic").expect("acquire");
    let row = network.row("a").await.expect("the row");
    assert_eq!(row.token, next.token().get());
    assert!(!row.id.is_empty());
    next.release().await.expect("the successor's is its own");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn handover_with_lost_reply_grants_the_waiter_once() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let first = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let token = first.token();
    let waiting = tokio::spawn(locks.lease("a").ttl(LONG).acquire());
    yield_to_others().await;
    network.strike(Fault::Mute).await;
    let releasing = tokio::spawn(first.release());
    let mut handed = None;
    if network.proxy.is_some() {
        network.until("the hand-over", "a", |row| row.token > token.get()).await;
        handed = network.row("a").await.map(|row| row.token);
    }
    network.cut_when("a", |row| row.token > token.get()).await;
    soon("the release", releasing).await.expect("no panic").expect("it was ours to the end");
    let second = soon("the turn", waiting).await.expect("no panic").expect("acquire");
    assert!(second.is_held());
    assert!(second.token() > token);
    if let Some(handed) = handed {
        assert_eq!(second.token().get(), handed, "the holding that was committed first, not another one");
    }
    assert!(rival.lease("a").try_acquire().await.expect("try").is_none());
    second.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn extension_with_lost_reply_counts() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_secs(60);
    let lease = locks.lease("a").ttl(ttl).renew(false).acquire().await.expect("acquire");
    let granted = network.row("a").await.expect("the row");
    network.strike(Fault::Mute).await;
    let extending = async {
        let extended = lease.extend(LONG).await;
        (extended, lease.remaining())
    };
    let cutting = network.cut_when("a", |row| row.expires_at > granted.expires_at);
    let ((extended, remaining), ()) = soon("the extension", async { tokio::join!(extending, cutting) }).await;
    extended.expect("extend");
    assert!(remaining > ttl, "{remaining:?}");
    let row = network.row("a").await.expect("the row");
    assert_eq!((row.token, row.id), (granted.token, granted.id));
    lease.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// Every operation of every round loses one reply, including operations on new names and new
/// connections.
#[tokio::test]
async fn many_lost_replies_leave_nothing_behind() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.cold_locks().await, network.rival().await);
    let mut last = None;
    let rounds = if network.proxy.is_some() { 15 } else { 1 };
    for round in 0..rounds {
        let fresh_name = format!("n{round}");
        let new = network.losing_a_reply(locks.lease(&fresh_name).ttl(LONG).acquire()).await.expect("a new name");
        let first = network.losing_a_reply(locks.lease("a").ttl(LONG).acquire()).await.expect("a known name");
        assert!(Some(first.token()) > last);
        let second = tokio::spawn(locks.lease("a").ttl(LONG).acquire());
        yield_to_others().await;
        network.losing_a_reply(first.extend(LONG)).await.expect("extend");
        network.losing_a_reply(first.release()).await.expect("it was ours to the end");
        let second = soon("the turn", second).await.expect("no panic").expect("acquire");
        let held = rival.inspect("a").await.expect("inspect").expect("held");
        assert_eq!(held.token, second.token());
        last = Some(second.token());
        network.losing_a_reply(second.release()).await.expect("it was ours to the end");
        network.losing_a_reply(new.release()).await.expect("it was ours to the end");
        assert!(rival.inspect("a").await.expect("inspect").is_none());
        assert!(rival.inspect(&fresh_name).await.expect("inspect").is_none());
    }
    network.assert_nothing_left(vec![locks, rival]).await;
}

impl NetworkFixture {
    /// Runs a call whose first reply is lost together with the connection.
    async fn losing_a_reply<T>(&mut self, call: impl Future<Output = T>) -> T {
        let Some(proxy) = &self.proxy else {
            self.strike(Fault::Mute).await;
            let (outcome, ()) = soon("a call", async { tokio::join!(call, self.cut_when("", |_| true)) }).await;
            return outcome;
        };
        let cut = proxy.cut_next_reply();
        let outcome = soon("a call whose reply was lost", call).await;
        assert!(cut.has_happened(), "the call did without an answer");
        outcome
    }
}
