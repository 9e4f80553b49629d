//! Connections that are refused, frozen and reset.
//!
//! Promises: 3, 9, 12, 18.

use sqlock::health::Heartbeat;

use super::*;
use crate::support::until;

#[tokio::test]
async fn lease_survives_refused_connections_within_ttl() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_secs(12);
    let lease = locks.lease("a").ttl(ttl).acquire().await.expect("acquire");
    let acquired = Instant::now();
    network.strike(Fault::Refused).await;
    sleep(Duration::from_secs(2)).await; // a renewal in flight may come through
    let granted = network.row("a").await.expect("the row");
    sleep(ttl / 2).await; // the heartbeats, one a second, fail
    assert_eq!(network.row("a").await.expect("the row").expires_at, granted.expires_at, "a renewal came through");
    assert!(lease.is_held());
    network.mend().await;
    network.until("a renewal", "a", |row| row.expires_at > granted.expires_at).await;
    let lost = timeout((acquired + ttl + ttl / 3).saturating_duration_since(Instant::now()), lease.lost()).await;
    assert!(lost.is_err(), "lost: {lost:?}");
    assert!(lease.is_held());
    assert!(rival.lease("a").try_acquire().await.expect("try").is_none());
    lease.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// The verdict on a lease whose owner has entered again needs a look at the row.
#[tokio::test]
async fn release_of_inner_lease_fails_without_the_database() {
    if DATABASE == Database::Sqlite {
        return; // A locked file can be read.
    }
    let mut network = NetworkFixture::new().await;
    let locks = network.locks().await;
    let owner = sqlock::Owner::random();
    let enter = || locks.lease("a").ttl(Duration::from_secs(600)).owner(owner).acquire();
    let (outer, inner) = (enter().await.expect("acquire"), enter().await.expect("acquire"));
    network.strike(Fault::Refused).await;
    network.kill_idle();
    let error = soon("a verdict", inner.release()).await.expect_err("no database");
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(outer.is_held());
    network.mend().await;
    outer.release().await.expect("release");
    network.assert_nothing_left(vec![locks]).await;
}

/// Interrupts the heartbeat of a client that holds this lease.
async fn interrupt(network: &mut NetworkFixture, locks: &Locks, lease: &Lease) {
    network.strike(Fault::Refused).await;
    network.kill_idle();
    until("a late heartbeat", async || locks.health().heartbeat == Heartbeat::Late).await;
    sleep(REFUSED_ONCE).await;
    assert!(lease.is_held(), "nothing has been heard");
    network.mend().await;
}

/// After a failover to a copy with the client and without the lease, the heartbeats of the client
/// are still answered.
#[tokio::test]
async fn lease_missing_after_interruption_is_lost() {
    let mut network = NetworkFixture::new().await;
    let locks = network.locks().await;
    let lease = locks.lease("a").acquire().await.expect("acquire");
    registered(&lease).await;
    network.direct.execute("DELETE FROM sqlock_lease WHERE name = 'a'").await.expect("delete");
    interrupt(&mut network, &locks, &lease).await;
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Superseded);
    let _ = lease.release().await;
    network.assert_nothing_left(vec![locks]).await;
}

/// After a failover to a copy that missed the release, the heartbeats of the client would keep the
/// lease alive.
#[tokio::test]
async fn restored_lease_is_released_again_after_interruption() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = locks.lease("a").acquire().await.expect("acquire");
    registered(&lease).await;
    let released = locks.lease("b").acquire().await.expect("acquire");
    network.direct.execute("CREATE TABLE copy AS SELECT * FROM sqlock_lease WHERE name = 'b'").await.expect("copy");
    released.release().await.expect("release");
    network.direct.execute("DELETE FROM sqlock_lease WHERE name = 'b'").await.expect("delete");
    network.direct.execute("INSERT INTO sqlock_lease SELECT * FROM copy").await.expect("restore");
    assert!(rival.lease("b").try_acquire().await.expect("answered").is_none(), "it is back");
    interrupt(&mut network, &locks, &lease).await;
    let next = soon("the name", rival.lease("b").acquire()).await.expect("acquire");
    next.release().await.expect("release");
    lease.release().await.expect("release");
    network.direct.execute("DROP TABLE copy").await.expect("drop");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn lease_is_lost_when_refusals_outlast_ttl() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = locks.lease("a").ttl(Duration::from_millis(1200)).acquire().await.expect("acquire");
    let token = lease.token();
    network.strike(Fault::Refused).await;
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Expired);
    // The error does not name a holder, because the database could not be asked.
    let error = soon("an answer", locks.lease("b").try_acquire()).await.expect_err("no database");
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(error.is_retryable() && !error.is_timeout() && !error.is_lost(), "{error}");
    network.mend().await;
    let again = soon("the name", locks.lease("a").ttl(LONG).acquire()).await.expect("acquire");
    assert!(again.token() > token);
    let error = lease.release().await.expect_err("it was lost");
    assert!(error.is_lost(), "{error}");
    assert!(again.is_held());
    assert!(rival.lease("a").try_acquire().await.expect("try").is_none(), "the old lease's end touched the new one");
    again.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn frozen_holder_knows_before_another_can_hold() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = locks.lease("a").ttl(Duration::from_millis(1500)).acquire().await.expect("acquire");
    network.strike(Fault::Frozen).await;
    if network.proxy.is_some() {
        let taken = async {
            loop {
                match rival.lease("a").ttl(LONG).try_acquire().await.expect("try") {
                    Some(next) => return next,
                    None => sleep(Duration::from_millis(1)).await,
                }
            }
        };
        let next = soon("the takeover", taken).await;
        assert!(!lease.is_held(), "two holders");
        assert!(next.token() > lease.token());
        assert_eq!(soon("the loss", lease.lost()).await, LossCause::Expired);
        next.release().await.expect("release");
    } else {
        // No client can be granted a name while the file is blocked. The holder notices the loss by
        // the clock.
        assert_eq!(soon("the loss", lease.lost()).await, LossCause::Expired);
        assert!(!lease.is_held());
    }
    network.mend().await;
    drop(lease);
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// Every call ends in bounded time, and a call without a reply reports no result.
#[tokio::test]
async fn calls_into_frozen_network_become_unavailable() {
    let mut network = NetworkFixture::new().await;
    let mut clients = Vec::new();
    for _ in 0..7 {
        clients.push(network.locks().await);
    }
    let [try_a, wait_a, inspects, lists, evicts, releases, extends] = &clients[..] else {
        unreachable!("there are seven");
    };
    let released = releases.lease("r").ttl(LONG).acquire().await.expect("acquire");
    let extended = extends.lease("e").ttl(LONG).acquire().await.expect("acquire");
    let token = extended.token();
    network.strike(Fault::Frozen).await;
    let start = Instant::now();
    let (tried, waited, inspected, listed, evicted, released, prolonged) = soon("an end of every call", async {
        tokio::join!(
            try_a.lease("x").try_acquire(),
            wait_a.lease("x").wait(Duration::from_secs(1)).acquire(),
            inspects.inspect("e"),
            lists.list(""),
            evicts.evict("e", token),
            released.release(),
            extended.extend(LONG),
        )
    })
    .await;
    println!("{DATABASE:?}: all calls ended after {:?}", start.elapsed());
    let unavailable = |what: &str, error: Option<Error>| {
        assert!(matches!(error, Some(Error::Unavailable { .. })), "{what}: {error:?}");
    };
    unavailable("try_acquire", tried.err());
    unavailable("acquire with a limit", waited.err());
    unavailable("evict", evicted.err());
    unavailable("extend", prolonged.err());
    if network.proxy.is_some() {
        unavailable("inspect", inspected.err());
        unavailable("list", listed.err());
    } else {
        // A writer does not stop SQLite's readers.
        assert_eq!(inspected.expect("inspect").expect("held").token, token);
        assert_eq!(listed.expect("list").len(), 2);
    }
    // The release was sent, and may have arrived.
    let error = released.expect_err("no answer");
    assert!(matches!(error, Error::Unknown { .. } | Error::Unavailable { .. }), "release: {error}");
    assert!(extended.is_held(), "extended by the repeated request");
    network.mend().await;
    soon("the release", extended.release()).await.expect("it was ours to the end");
    // The unanswered release never reached the database, so the TTL ends the holding.
    let orphan = network.row("r").await.expect("the row").token;
    let rival = network.rival().await;
    if let Some(left) = rival.inspect("r").await.expect("inspect") {
        assert_eq!(left.token.get(), orphan);
        let is_evicted = rival.evict("r", left.token).await.expect("evict");
        assert!(is_evicted || rival.inspect("r").await.expect("inspect").is_none(), "it has neither ended nor expired");
    }
    clients.push(rival);
    network.assert_nothing_left(clients).await;
}

#[tokio::test]
async fn storm_of_resets_loses_no_lease() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_secs(10);
    let mut leases: Vec<Lease> = Vec::new();
    for i in 0..50 {
        leases.push(locks.lease(format!("s{i:02}")).ttl(ttl).acquire().await.expect("acquire"));
    }
    let end = Instant::now() + ttl * 3 / 2;
    let mut storms = 0;
    while Instant::now() < end || storms < 20 {
        // A busy machine may renew no lease between two resets.
        let is_late = |lease: &Lease| lease.is_held() && lease.remaining() < ttl / 2;
        until("a renewal", async || !leases.iter().any(is_late)).await;
        if let Some(proxy) = &network.proxy {
            proxy.reset();
            // A busy machine opens a connection in this time.
            sleep(Duration::from_millis(300)).await;
        } else {
            network.strike(Fault::Refused).await;
            sleep(Duration::from_millis(150)).await;
            network.mend().await;
            sleep(Duration::from_millis(50)).await;
        }
        storms += 1;
        for lease in &leases {
            assert!(lease.is_held(), "{} was lost after {storms} resets", lease.name());
        }
    }
    let listed = rival.list("s").await.expect("list");
    let tokens: Vec<_> = listed.iter().map(|info| info.token).collect();
    assert_eq!(tokens, leases.iter().map(Lease::token).collect::<Vec<_>>());
    for lease in leases {
        soon("a release", lease.release()).await.expect("it was ours to the end");
    }
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn acquire_dropped_without_reply_leaves_nothing() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let before = network.row("a").await.expect("the row").token;
    // The request arrives, the reply does not.
    network.strike(Fault::Mute).await;
    let acquiring = tokio::spawn(locks.lease("a").ttl(LONG).acquire());
    if network.proxy.is_some() {
        network.until("the grant", "a", |row| !row.id.is_empty()).await;
    } else {
        sleep(Duration::from_millis(300)).await;
    }
    acquiring.abort();
    assert!(acquiring.await.expect_err("it was dropped").is_cancelled());
    network.mend().await;
    // Its TTL is long, so it was released.
    network.until("the grant and its release", "a", |row| row.token > before && row.id.is_empty()).await;
    let next = rival.lease("a").try_acquire().await.expect("try").expect("free");
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// Neither the request nor the reply arrives.
#[tokio::test]
async fn acquire_dropped_before_arrival_takes_nothing() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    network.strike(Fault::Frozen).await;
    let acquiring = tokio::spawn(locks.lease("a").ttl(LONG).acquire());
    sleep(Duration::from_millis(200)).await;
    acquiring.abort();
    assert!(acquiring.await.expect_err("it was dropped").is_cancelled());
    network.mend().await;
    // The client works again, and this request follows all statements that it still sent for the
    // dropped one.
    let lease = soon("an answer", async {
        loop {
            match locks.lease("a").ttl(LONG).acquire().await {
                Ok(lease) => return lease,
                Err(error) => assert!(matches!(error, Error::Unavailable { .. }), "{error}"),
            }
        }
    })
    .await;
    assert_eq!(network.row("a").await.expect("the row").token, lease.token().get());
    lease.release().await.expect("release");
    let next = rival.lease("a").try_acquire().await.expect("try").expect("free");
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// The caller sees the cut of its own transaction; the lease continues on its own connections.
#[tokio::test]
async fn cut_fenced_transaction_writes_nothing() {
    let network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    network.direct.execute("CREATE TABLE work (id INTEGER NOT NULL PRIMARY KEY)").await.expect("a table");
    let app = connect(&network.url, 1).await;
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut tx = app.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    sqlx::query("INSERT INTO work (id) VALUES (1)").execute(&mut *tx).await.expect("write");
    match &network.proxy {
        Some(proxy) => {
            proxy.reset();
            let committed = tx.commit().await;
            assert!(committed.is_err(), "the connection was gone");
        }
        // A connection to a file is not cut but dropped.
        None => drop(tx),
    }
    app.close().await;
    lease.release().await.expect("the lease had its own connections");
    let next = soon("the name", rival.lease("a").acquire()).await.expect("acquire");
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM work").fetch_one(&network.direct).await.expect("count");
    assert_eq!(rows, 0);
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// The name is free afterwards, so that the caller cannot find out who has ended the lease.
#[tokio::test]
async fn eviction_with_lost_reply_is_never_denied() {
    const NAME: &str = "name-of-the-evicted";
    let network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = rival.lease(NAME).ttl(LONG).acquire().await.expect("acquire");
    let cut = network.proxy.as_ref().map(|proxy| proxy.cut_reply_to(NAME));
    let evicted = soon("the answer", locks.evict(NAME, lease.token())).await;
    if let Some(cut) = cut {
        assert!(cut.has_happened());
    }
    assert!(matches!(evicted, Ok(true) | Err(Error::Unknown { .. })), "{evicted:?}");
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Superseded);
    let again = locks.evict(NAME, lease.token()).await;
    assert!(matches!(again, Ok(false)), "{again:?}");
}
