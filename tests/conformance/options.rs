//! The options of a lease are the same ones for each kind of request.

use std::pin::Pin;
use std::time::Duration;

use sqlock::lease::LeaseOptions;
use sqlock::{Locks, LossCause, Owner};

use crate::support::{LONG, fresh, soon};

/// Acquires a name with the options, in each way, and checks what `check` says about the handle.
/// The names are those of the kinds.
macro_rules! for_each_kind {
    ($locks:expr, $options:expr, $held:ident => $check:expr) => {{
        let (locks, options): (&Locks, LeaseOptions) = ($locks, $options);
        let $held = locks.lease("exclusive").options(options.clone()).acquire().await.expect("acquire");
        $check;
        let $held = locks.lease("shared").shared().options(options.clone()).acquire().await.expect("acquire");
        $check;
        let $held = locks.semaphore("permit", 1).options(options.clone()).acquire().await.expect("acquire");
        $check;
        let $held = locks.lease_all(["several"]).options(options.clone()).acquire().await.expect("acquire");
        $check;
        let $held = locks.election("elected").options(options.clone()).campaign().await.expect("campaign");
        $check;
    }};
}

const NAMES: [&str; 5] = ["elected", "exclusive", "permit", "several", "shared"];

#[tokio::test]
async fn options_hold_for_requests_of_each_kind() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let options = LeaseOptions::new().ttl(LONG).label("the same").hold_at_least(LONG);
    let mut held = Vec::new();
    for_each_kind!(&ours, options, lease => {
        assert!(lease.remaining() > LONG / 2);
        held.push(Box::new(lease) as Box<dyn std::any::Any>)
    });
    let listed = theirs.list("").await.expect("list");
    let described: Vec<_> = listed.iter().map(|info| (info.name.as_str(), info.label.as_str())).collect();
    assert_eq!(described, NAMES.map(|name| (name, "the same")));
    drop(held);
    soon("the releases", ours.shutdown()).await.expect("shutdown");
    for name in NAMES {
        assert!(theirs.lease(name).try_acquire().await.expect("try").is_none(), "{name} is kept");
    }
}

#[tokio::test]
async fn max_hold_and_owner_hold_for_each_kind() {
    let db = fresh().await;
    let locks = db.locks().await;
    let options = LeaseOptions::new().ttl(LONG).max_hold(Duration::from_secs(3));
    let mut held: Vec<Pin<Box<dyn Future<Output = LossCause>>>> = Vec::new();
    for_each_kind!(&locks, options, lease => held.push(Box::pin(async move { lease.lost().await })));
    for lost in held {
        assert_eq!(soon("the end", lost).await, LossCause::MaxHold);
    }
    let owner = Owner::random();
    let owners = [
        locks.lease("a").owner(owner).acquire().await.expect("acquire").owner(),
        locks.semaphore("b", 1).owner(owner).acquire().await.expect("acquire").owner(),
        locks.lease_all(["c"]).owner(owner).acquire().await.expect("acquire").owner(),
        locks.election("d").owner(owner).campaign().await.expect("campaign").owner(),
    ];
    assert_eq!(owners, [owner; 4]);
}

#[tokio::test]
async fn later_options_replace_earlier_ones() {
    let db = fresh().await;
    let locks = db.locks().await;
    let brief = LeaseOptions::new().ttl(Duration::from_secs(5));
    let lease =
        locks.lease("a").ttl(LONG).label("before").options(brief.label("all")).acquire().await.expect("acquire");
    assert!(lease.remaining() < LONG / 2);
    assert_eq!(locks.inspect("a").await.expect("inspect").expect("held").label, "all");
    lease.release().await.expect("release");
}
