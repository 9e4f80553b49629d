//! Elections: one candidate leads, the others stand by, and every client can read who leads.

use std::time::Duration;

use sqlock::LossCause;

use crate::support::worker::Worker;
use crate::support::{fresh, soon, until_waiters};

const TTL: Duration = Duration::from_secs(2);

#[tokio::test]
async fn resignation_elects_the_next_candidate() {
    let db = fresh().await;
    let (a, b) = (db.locks().await, db.locks().await);
    let first = a.election("e").label("a").campaign().await.expect("a is elected");
    let election = b.election("e").label("b");
    let standing = tokio::spawn({
        let election = election.clone();
        async move { election.campaign().await }
    });
    until_waiters(&a, "e", 1).await;
    let leader = election.leader().await.expect("who leads can be asked").expect("somebody leads");
    assert_eq!((leader.label.as_str(), leader.token), ("a", first.token()));
    let token = first.token();
    first.resign().await.expect("a led to the end");
    let second = soon("the election of b", standing).await.expect("no panic").expect("b is elected");
    assert!(second.token() > token);
    assert_eq!(election.leader().await.expect("asked").expect("somebody leads").label, "b");
}

#[tokio::test]
async fn try_campaign_does_not_wait() {
    let db = fresh().await;
    let (a, b) = (db.locks().await.election("e"), db.locks().await.election("e"));
    let leader = a.try_campaign().await.expect("asked").expect("elected");
    assert!(b.try_campaign().await.expect("asked").is_none());
    leader.resign().await.expect("a led to the end");
    let next = b.try_campaign().await.expect("asked").expect("elected");
    assert!(next.is_held());
}

#[tokio::test]
async fn killed_leader_is_replaced_after_its_ttl() {
    let db = fresh().await;
    let mut leader = Worker::start(&db.url);
    let token = leader.hold("e", TTL).await;
    leader.kill();
    let election = db.locks().await.election("e").ttl(TTL);
    let elected = soon("the election", election.campaign()).await.expect("elected");
    assert!(elected.token().get() > token);
}

#[tokio::test]
async fn deposed_leader_learns_it_and_can_campaign_again() {
    let db = fresh().await;
    let locks = db.locks().await;
    let election = locks.election("e").ttl(TTL * 5);
    let elected = election.campaign().await.expect("elected");
    assert!(locks.evict("e", elected.token()).await.expect("evicted"));
    assert_eq!(soon("the loss", elected.lost()).await, LossCause::Superseded);
    let again = soon("the second election", election.campaign()).await.expect("elected again");
    assert!(again.token() > elected.token());
}

#[tokio::test]
async fn changes_report_each_leader_and_vacancy_once() {
    let db = fresh().await;
    let election = db.locks().await.election("e");
    let mut changes = db.locks().await.election("e").changes().every(Duration::from_millis(10));
    let mut next = async || soon("a change", changes.next()).await.expect("it can be asked").map(|leader| leader.token);
    assert_eq!(next().await, None);
    for _ in 0..2 {
        let leadership = election.campaign().await.expect("elected");
        assert_eq!(next().await, Some(leadership.token()));
        leadership.resign().await.expect("resigned");
        assert_eq!(next().await, None);
    }
    assert!(tokio::time::timeout(Duration::from_millis(100), next()).await.is_err(), "nothing has changed");
}

#[tokio::test]
async fn dropped_campaign_withdraws_the_candidate() {
    let db = fresh().await;
    let (a, b) = (db.locks().await, db.locks().await);
    let first = a.election("e").campaign().await.expect("elected");
    let election = b.election("e");
    let campaign = tokio::spawn(async move { election.campaign().await });
    until_waiters(&a, "e", 1).await;
    campaign.abort();
    assert!(campaign.await.is_err_and(|error| error.is_cancelled()), "it was not over");
    first.resign().await.expect("resigned");
    b.shutdown().await.expect("nothing is left to give back");
    assert_eq!(a.election("e").leader().await.expect("asked"), None);
}
