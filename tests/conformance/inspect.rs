//! Listing and inspecting leases, and an operator's eviction and extension by token.
//!
//! Promises: 5.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::TimeDelta;
use sqlock::inspect::LeaseInfo;
use sqlock::{Error, FencingToken, Lease, Locks, LossCause};
use tokio::task::JoinSet;

use crate::DATABASE;
use crate::support::{Database, LONG, fresh, soon, until, until_waiters};

#[tokio::test]
async fn inspect_reports_holder_token_and_expiry() {
    let db = fresh().await;
    let ours = db.builder().await.holder("the worker on the left").build();
    let theirs = db.locks().await;
    assert_eq!(theirs.inspect("a").await.expect("inspect"), None, "a name that nobody ever asked for");

    let lease = ours.lease("a").ttl(LONG).label("Ünïcode, \"quoted\"").acquire().await.expect("acquire");
    let info = theirs.inspect("a").await.expect("inspect").expect("held");
    assert_eq!(info.name, *lease.name());
    assert_eq!(info.holder, "the worker on the left");
    assert_eq!(info.owner, Some(lease.owner()));
    assert_eq!(info.holds, 1);
    assert_eq!(info.token, lease.token());
    assert_eq!(info.label, "Ünïcode, \"quoted\"");
    // The two clocks are read in one statement, a moment apart.
    let ttl = info.expires_at - info.acquired_at;
    assert!(ttl >= TimeDelta::seconds(600) && ttl < TimeDelta::seconds(605), "{ttl}");
    assert!(info.remaining <= LONG && info.remaining > LONG / 2);
    let drift = (info.token.get() - info.acquired_at.timestamp_micros()).abs();
    assert!(drift < 5_000_000, "a token is a clock, and differs by {drift} µs");
    assert_eq!(ours.inspect("a").await.expect("inspect").expect("held").token, info.token);

    lease.release().await.expect("release");
    assert_eq!(theirs.inspect("a").await.expect("inspect"), None);
}

/// On MySQL and MariaDB, the character set of the caller's pool does not change what is stored.
#[tokio::test]
async fn label_ignores_character_set_of_pool() {
    const LABEL: &str = "Ünïcode, 日本語";
    let db = fresh().await;
    let url = match DATABASE {
        Database::MySql | Database::MariaDb => {
            format!("{}{}charset=latin1", db.url, if db.url.contains('?') { '&' } else { '?' })
        }
        // They have no such option.
        Database::Postgres | Database::Sqlite => db.url.clone(),
    };
    let (locks, second) = (Locks::connect(&url).await.expect("connect"), Locks::connect(&url).await.expect("connect"));
    let theirs = db.locks().await;
    let alone = locks.lease("alone").label(LABEL).acquire().await.expect("acquire");
    let several: JoinSet<_> = (0..20).map(|i| locks.lease(format!("several/{i}")).label(LABEL).acquire()).collect();
    let several: Vec<_> = several.join_all().await.into_iter().map(|lease| lease.expect("acquire")).collect();
    let waiting = tokio::spawn(second.lease("alone").label(LABEL).acquire());
    until_waiters(&theirs, "alone", 1).await;
    let waiters = theirs.waiters("alone").await.expect("waiters");
    assert_eq!(waiters[0].label, LABEL);
    let listed = theirs.list("").await.expect("list");
    assert_eq!(listed.len(), 21);
    assert!(listed.iter().all(|info| info.label == LABEL), "{listed:?}");
    alone.release().await.expect("release");
    let next = soon("the hand-over", waiting).await.expect("no panic").expect("acquire");
    drop((several, next));
}

/// Requests that are ready together go in one batch.
#[tokio::test]
async fn names_acquired_together_keep_their_own_values() {
    const NAMES: u64 = 100;
    let db = fresh().await;
    let locks = db.locks().await;
    let name = |nth| if nth % 3 == 0 { format!("{nth}'\\é") } else { format!("name/{nth}") };
    // New names first, then known ones.
    for round in 0..2 {
        let mut acquired = JoinSet::new();
        for nth in 0..NAMES {
            let request = locks.lease(name(nth)).ttl(LONG + Duration::from_secs(nth)).label(format!("{round}/{nth}"));
            acquired.spawn(async move { (nth, request.acquire().await.expect("acquire")) });
        }
        let mut leases: BTreeMap<u64, Lease> = acquired.join_all().await.into_iter().collect();
        for kept in [NAMES, 0] {
            let listed = locks.list("").await.expect("list");
            assert_eq!(listed.len(), leases.len());
            for (nth, lease) in &leases {
                let info = listed.iter().find(|info| info.name == *lease.name()).expect("listed");
                assert_eq!(info.name.as_str(), name(*nth));
                assert_eq!((info.token, info.owner), (lease.token(), Some(lease.owner())));
                assert_eq!(info.label, format!("{round}/{nth}"));
                // The clock is read twice.
                let ttl = info.expires_at - info.acquired_at + TimeDelta::seconds(1);
                assert!(ttl > TimeDelta::seconds(600 + *nth as i64), "{ttl} for {nth}");
            }
            let released = leases.extract_if(.., |nth, _| kept == 0 || nth % 2 == 0).map(|(_, lease)| lease.release());
            for outcome in released.collect::<JoinSet<_>>().join_all().await {
                outcome.expect("ours to the end");
            }
        }
        assert_eq!(locks.list("").await.expect("list"), []);
    }
}

#[tokio::test]
async fn holder_defaults_to_host_and_process() {
    let db = fresh().await;
    let locks = db.locks().await;
    let lease = locks.lease("a").acquire().await.expect("acquire");
    let info = locks.inspect("a").await.expect("inspect").expect("held");
    let pid = std::process::id().to_string();
    let (host, process) = info.holder.rsplit_once('/').expect("host and process");
    assert!(!host.is_empty());
    assert_eq!(process, pid);
    lease.release().await.expect("release");

    // Longer than the column: cut between two characters.
    let locks = db.builder().await.holder("é".repeat(200)).build();
    let lease = locks.lease("a").acquire().await.expect("acquire");
    let info = locks.inspect("a").await.expect("inspect").expect("held");
    assert_eq!(info.holder, "é".repeat(127));
    lease.release().await.expect("release");
}

#[tokio::test]
async fn list_shows_only_held_names() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let mut held = Vec::new();
    for name in ["job/2", "job/10", "job", "jobs", "other"] {
        // No heartbeat moves an expiry between the list and an inspection.
        held.push(ours.lease(name).ttl(LONG).renew(false).acquire().await.expect("acquire"));
    }
    let released = ours.lease("job/1").acquire().await.expect("acquire");
    released.release().await.expect("release");
    let expired = ours.lease("job/3").ttl(Duration::from_millis(200)).renew(false).acquire().await.expect("acquire");
    // The holder knows first.
    soon("the loss", expired.lost()).await;
    until("the expiry", async || theirs.inspect("job/3").await.expect("inspect").is_none()).await;

    let names = async |prefix: &str| {
        let listed = theirs.list(prefix).await.expect("list");
        listed.into_iter().map(|info| info.name.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names("").await, ["job", "job/10", "job/2", "jobs", "other"]);
    assert_eq!(names("job").await, ["job", "job/10", "job/2", "jobs"]);
    assert_eq!(names("job/").await, ["job/10", "job/2"]);
    assert_eq!(names("job/2").await, ["job/2"]);
    assert_eq!(names("nothing").await, [""; 0]);

    // The list has the same entries as single inspections.
    for mut info in theirs.list("").await.expect("list") {
        let inspected = theirs.inspect(info.name.as_str()).await.expect("inspect").expect("held");
        info.remaining = inspected.remaining;
        info.heartbeat_age = inspected.heartbeat_age;
        assert_eq!(info, inspected);
    }
    for lease in held {
        lease.release().await.expect("release");
    }
    assert_eq!(names("").await, [""; 0]);
    drop(expired);
}

#[tokio::test]
async fn heartbeat_age_is_that_of_the_renewing_client() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let renewed = ours.lease("renewed").ttl(LONG).acquire().await.expect("acquire");
    let shared = ours.lease("shared").ttl(LONG).shared().acquire().await.expect("acquire");
    let unrenewed = ours.lease("unrenewed").ttl(LONG).renew(false).acquire().await.expect("acquire");
    let age = async |name| theirs.inspect(name).await.expect("inspect").expect("held").heartbeat_age;
    for name in ["renewed", "shared"] {
        // The heartbeats of a client begin with its first lease.
        let known = async {
            loop {
                if let Some(age) = age(name).await {
                    return age;
                }
            }
        };
        let age = soon("a heartbeat", known).await;
        assert!(age < LONG / 2, "{name}: {age:?}");
    }
    assert_eq!(age("unrenewed").await, None);
    for lease in [renewed, shared, unrenewed] {
        lease.release().await.expect("release");
    }
}

#[tokio::test]
async fn eviction_requires_the_token_of_the_lease() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let token = |token| FencingToken::new(token).expect("a token");
    assert!(!theirs.evict("a", token(1)).await.expect("evict"), "nobody ever held it");
    let earlier = ours.lease("a").acquire().await.expect("acquire");
    let stale = earlier.token();
    earlier.release().await.expect("release");
    assert!(!theirs.evict("a", stale).await.expect("evict"), "nobody holds it");

    let lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    for wrong in [stale, token(1), token(lease.token().get() - 1), token(lease.token().get() + 1)] {
        assert!(!theirs.evict("a", wrong).await.expect("evict"));
    }
    lease.extend(LONG).await.expect("nothing has changed");
    assert!(theirs.evict("a", lease.token()).await.expect("evict"));
    assert_eq!(theirs.inspect("a").await.expect("inspect"), None);
    assert!(!theirs.evict("a", lease.token()).await.expect("evict"), "only once");
    let next = theirs.lease("a").try_acquire().await.expect("try").expect("free");
    assert!(next.token() > lease.token());
    next.release().await.expect("release");
}

#[tokio::test]
async fn evicted_holder_learns_it_at_next_renewal() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(Duration::from_secs(6)).acquire().await.expect("acquire");
    assert!(theirs.evict("a", lease.token()).await.expect("evict"));
    // The holder learns from the renewal, not from the end of the TTL.
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Superseded);
    assert!(!lease.is_held());
    assert!(lease.release().await.expect_err("evicted").is_lost());
}

#[tokio::test]
async fn evicted_holder_cannot_extend_or_fence() {
    let db = fresh().await;
    let pool = db.pool().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert!(theirs.evict("a", lease.token()).await.expect("evict"));
    let mut tx = pool.begin().await.expect("begin");
    let error = lease.fence(&mut tx).await.expect_err("evicted");
    assert!(matches!(error, Error::Lost { cause: LossCause::Superseded, .. }), "{error}");
    tx.rollback().await.expect("rollback");
    let error = lease.extend(LONG).await.expect_err("evicted");
    assert!(matches!(error, Error::Lost { cause: LossCause::Superseded, .. }), "{error}");
    assert!(!lease.is_held(), "now it knows");
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Superseded);
}

#[tokio::test]
async fn name_kept_after_release_can_be_evicted() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").hold_at_least(LONG).acquire().await.expect("acquire");
    let token = lease.token();
    lease.release().await.expect("release");
    assert!(theirs.lease("a").try_acquire().await.expect("try").is_none());
    assert!(theirs.evict("a", token).await.expect("evict"));
    let next = theirs.lease("a").try_acquire().await.expect("try").expect("free");
    assert!(next.token() > token);
    next.release().await.expect("release");
}

async fn held(locks: &Locks) -> LeaseInfo {
    locks.inspect("a").await.expect("inspect").expect("held")
}

#[tokio::test]
async fn lease_is_extended_by_token_from_other_client() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(Duration::from_secs(60)).renew(false).acquire().await.expect("acquire");
    let before = held(&theirs).await;
    assert!(theirs.extend("a", lease.token(), LONG).await.expect("extend"));
    let after = held(&theirs).await;
    assert!(after.remaining > LONG / 2, "{:?}", after.remaining);
    // The holding is the same, without a hold of the other client.
    assert_eq!((after.token, after.owner, after.holds), (before.token, before.owner, 1));
    assert_eq!((after.acquired_at, &after.holder, &after.label), (before.acquired_at, &before.holder, &before.label));
    for _ in 0..3 {
        assert!(theirs.extend("a", lease.token(), LONG).await.expect("extend"));
    }
    assert_eq!(held(&theirs).await.holds, 1);
    lease.release().await.expect("ours to the end");
    assert_eq!(theirs.inspect("a").await.expect("inspect"), None, "nothing keeps it");
}

#[tokio::test]
async fn extended_lease_outlives_its_first_holders_deadline() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(Duration::from_secs(4)).renew(false).acquire().await.expect("acquire");
    assert!(theirs.extend("a", lease.token(), LONG).await.expect("extend"));
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Expired);
    // Longer than the first holder's client waits before it withdraws an expired holding.
    tokio::time::sleep(Duration::from_secs(3)).await;
    ours.shutdown().await.expect("shutdown");
    assert_eq!(held(&theirs).await.token, lease.token());
}

#[tokio::test]
async fn extension_by_token_never_shortens_a_lease() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(Duration::from_secs(60)).acquire().await.expect("acquire");
    lease.extend(LONG).await.expect("extend");
    let renewed = held(&theirs).await;
    for ttl in [Duration::from_secs(1), Duration::from_secs(60)] {
        assert!(theirs.extend("a", lease.token(), ttl).await.expect("extend"));
        let after = held(&theirs).await;
        assert_eq!((after.expires_at, after.holds), (renewed.expires_at, 1));
    }
    // Many at once, beside the renewals of the holder.
    let mut extending = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (locks, token) = (theirs.clone(), lease.token());
        extending.spawn(async move { locks.extend("a", token, Duration::from_secs(1)).await });
    }
    lease.extend(LONG).await.expect("extend");
    for extended in soon("the extensions", extending.join_all()).await {
        assert!(extended.expect("extend"));
    }
    lease.extend(LONG).await.expect("extend");
    let after = held(&theirs).await;
    assert!(after.expires_at >= renewed.expires_at);
    assert_eq!(after.holds, 1);
    lease.release().await.expect("ours to the end");
    assert_eq!(theirs.inspect("a").await.expect("inspect"), None);
}

#[tokio::test]
async fn extension_requires_the_token_of_the_lease() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let token = |token| FencingToken::new(token).expect("a token");
    assert!(!theirs.extend("a", token(1), LONG).await.expect("extend"), "nobody ever held it");
    let earlier = ours.lease("a").acquire().await.expect("acquire");
    let stale = earlier.token();
    earlier.release().await.expect("release");
    assert!(!theirs.extend("a", stale, LONG).await.expect("extend"), "it is free");
    assert_eq!(theirs.inspect("a").await.expect("inspect"), None, "and stays so");

    // No heartbeat moves its expiry.
    let lease = ours.lease("a").ttl(Duration::from_secs(60)).renew(false).acquire().await.expect("acquire");
    let before = held(&theirs).await;
    for wrong in [stale, token(1), token(lease.token().get() - 1), token(lease.token().get() + 1)] {
        assert!(!theirs.extend("a", wrong, LONG).await.expect("extend"));
    }
    let after = held(&theirs).await;
    assert_eq!((after.token, after.expires_at, after.holds), (before.token, before.expires_at, 1));
    lease.release().await.expect("ours to the end");

    // A released name has no holding that could be extended.
    let kept = ours.lease("b").hold_at_least(LONG).acquire().await.expect("acquire");
    let token = kept.token();
    kept.release().await.expect("release");
    assert!(!theirs.extend("b", token, LONG).await.expect("extend"));
}

/// A step of a script does this: its process ends as soon as it has the answer.
#[tokio::test]
async fn extension_by_ended_process_leaves_nothing_behind() {
    let db = fresh().await;
    let (ours, rival) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(Duration::from_secs(60)).acquire().await.expect("acquire");
    let (builder, token) = (db.builder().await, lease.token());
    let extend = move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async { builder.build().extend("a", token, LONG).await })
    };
    assert!(std::thread::spawn(extend).join().expect("no panic").expect("extend"));
    let info = rival.inspect("a").await.expect("inspect").expect("held");
    assert!(info.remaining > Duration::from_secs(300), "{info:?}");
    lease.release().await.expect("ours to the end");
    let next = rival.lease("a").try_acquire().await.expect("try").expect("the extension went with the lease");
    assert!(!rival.extend("a", token, LONG).await.expect("extend"), "that holding has ended");
    next.release().await.expect("release");
}

#[tokio::test]
async fn extension_out_of_range_is_refused() {
    let db = fresh().await;
    let (locks, long) = (db.locks().await, Duration::from_secs(86_401));
    let lease = locks.lease("a").acquire().await.expect("acquire");
    for ttl in [Duration::ZERO, Duration::from_millis(99), long] {
        let error = locks.extend("a", lease.token(), ttl).await.expect_err("out of range");
        assert!(matches!(error, Error::OutOfRange { given, .. } if given == ttl), "{error}");
    }
    let error = locks.extend("", lease.token(), LONG).await.expect_err("not a name");
    assert!(matches!(error, Error::InvalidName { .. }), "{error}");
    lease.release().await.expect("ours to the end");
}
