//! Replies that come too late.
//!
//! Promises: 3, 18.

use super::*;

#[tokio::test]
async fn grant_after_its_deadline_is_refused_and_released() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_millis(700);
    let mut stalls = 0;
    let error = loop {
        network.strike(Fault::Slow(ttl * 2)).await;
        let trying = tokio::spawn(locks.lease("a").ttl(ttl).try_acquire());
        if network.proxy.is_none() {
            sleep(ttl * 3 / 2).await;
            network.mend().await;
        }
        match soon("an answer", trying).await.expect("no panic") {
            // If this process stalls, SQLite refuses the statement, and the client sends it again.
            Ok(Some(lease)) if network.proxy.is_none() && stalls < 5 => {
                stalls += 1;
                drop(lease.release().await);
            }
            answer => break answer.expect_err("too late to be a lease"),
        }
    };
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(error.is_retryable(), "{error}");
    // An expiry would leave the hold in the row, so the lease was released.
    network.until("the release", "a", |row| row.id.is_empty()).await;
    let next = rival.lease("a").try_acquire().await.expect("try").expect("free");
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn acquire_continues_after_a_late_grant() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_millis(700);
    // The statements of a wait and of its end are prepared.
    let held = rival.lease("b").acquire().await.expect("acquire");
    let waited = locks.lease("b").wait(Duration::from_secs(3)).acquire().await;
    assert!(waited.expect_err("it is held").is_timeout());
    held.release().await.expect("release");
    // Nothing is in flight when the network gets slow, because a connection that is given up then
    // would not be replaced in time.
    locks.lease("b").acquire().await.expect("acquire").release().await.expect("release");
    let before = network.row("a").await.expect("the row").token;
    network.strike(Fault::Slow(ttl * 2)).await;
    let acquiring = tokio::spawn(locks.lease("a").ttl(ttl).acquire());
    let mut late = before;
    if network.proxy.is_some() {
        network.until("the late grant", "a", |row| row.token > before).await;
        late = network.row("a").await.expect("the row").token;
        network.until("its end", "a", |row| row.id.is_empty() || row.token > late).await;
        assert!(!acquiring.is_finished(), "the late grant was handed out");
    } else {
        sleep(ttl * 3 / 2).await;
    }
    network.mend().await;
    let lease = soon("the lease", acquiring).await.expect("no panic").expect("acquire");
    assert!(lease.token().get() > late, "another holding than the late one");
    // On a busy machine the lease may end before its release.
    if let Err(error) = lease.release().await {
        assert!(error.is_lost(), "{error}");
    }
    let next = soon("the name", rival.lease("a").acquire()).await.expect("acquire");
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn renewal_after_the_deadline_is_lost() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_millis(1500);
    let lease = locks.lease("a").ttl(ttl).acquire().await.expect("acquire");
    let token = lease.token();
    network.strike(Fault::Slow(ttl * 2)).await;
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Expired);
    assert!(!lease.is_held());
    network.mend().await; // what is delayed arrives now: a confirmation that comes too late
    sleep(ttl / 3).await;
    assert!(!lease.is_held(), "lost is lost");
    let error = lease.release().await.expect_err("it was not ours to the end");
    assert!(matches!(error, Error::Lost { cause: LossCause::Expired, .. }), "{error}");
    let next = soon("the name", rival.lease("a").acquire()).await.expect("acquire");
    assert!(next.token() > token);
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}
