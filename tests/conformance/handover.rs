//! Export and resumption of a held lease, and the shutdown of a client.

use std::time::Duration;

use sqlock::lease::ExportedLease;
use sqlock::{Error, FencingToken, LossCause};

use crate::support::{LONG, SOON, exported, fresh, renewed_twice, soon, until};

const SHORT: Duration = Duration::from_millis(500);

fn is_shutdown(error: &Error) -> bool {
    matches!(error, Error::Lost { cause: LossCause::Shutdown, .. })
}

// ---- export and resume

#[tokio::test]
async fn exported_lease_continues_in_another_process() {
    let db = fresh().await;
    let (ours, theirs, others) = (db.locks().await, db.locks().await, db.locks().await);
    let lease = ours.lease("a:b").ttl(Duration::from_secs(6)).label("on the road").acquire().await.expect("acquire");
    let (token, owner) = (lease.token(), lease.owner());
    let text = lease.export().expect("export").to_string();
    assert!(others.lease("a:b").try_acquire().await.expect("try").is_none(), "held by the next client");

    let exported: ExportedLease = text.parse().expect("what was printed can be read");
    assert_eq!((exported.name().as_str(), exported.token()), ("a:b", token));
    let lease = theirs.resume(exported).await.expect("resume");
    assert_eq!((lease.name().as_str(), lease.token(), lease.owner()), ("a:b", token, owner));
    // The lease is renewed there, although the first process has ended.
    ours.shutdown().await.expect("shutdown");
    let info = renewed_twice(&others, "a:b").await;
    assert!(lease.is_held());
    assert_eq!((info.token, info.holds, info.label.as_str()), (token, 1, "on the road"));
    lease.release().await.expect("ours to the end");
    let next = others.lease("a:b").try_acquire().await.expect("try").expect("free");
    assert!(next.token() > token);
    next.release().await.expect("release");
}

#[tokio::test]
async fn exported_lease_can_return_to_its_process() {
    let db = fresh().await;
    let pool = db.pool().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let token = lease.token();
    let exported = lease.export().expect("export");
    assert!(ours.lease("a").try_acquire().await.expect("try").is_none());
    let lease = ours.resume(exported).await.expect("resume");
    assert_eq!(lease.token(), token);
    let mut tx = pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    tx.commit().await.expect("commit");
    // A waiter of this process is next in line.
    let mut next = std::pin::pin!(ours.lease("a").acquire());
    tokio::time::timeout(Duration::from_millis(30), &mut next).await.expect_err("held");
    lease.release().await.expect("ours to the end");
    let next = soon("the turn", next).await.expect("acquire");
    assert!(next.token() > token);
    next.release().await.expect("release");
    assert!(theirs.list("").await.expect("list").is_empty());
}

#[tokio::test]
async fn dropped_resumed_lease_is_released() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let exported = lease.export().expect("export");
    drop(theirs.resume(exported).await.expect("resume"));
    let next = soon("the name", ours.lease("a").acquire()).await.expect("acquire");
    next.release().await.expect("release");
}

#[tokio::test]
async fn ended_lease_cannot_be_resumed() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let exported = async |name, ttl| exported(&ours, name, ttl).await;
    // Expired, and not acquired since.
    let late = exported("late", SHORT).await;
    // Expired and taken over.
    let taken = exported("taken", SHORT).await;
    // Evicted, with or without a successor.
    let evicted = exported("evicted", LONG).await;
    let replaced = exported("replaced", LONG).await;
    // Resumed by one, and released; then by another.
    let twice = exported("twice", LONG).await;

    let successor = soon("the name", theirs.lease("taken").ttl(LONG).acquire()).await.expect("acquire");
    for exported in [&evicted, &replaced] {
        assert!(theirs.evict(exported.name().as_str(), exported.token()).await.expect("evict"));
    }
    let second = theirs.lease("replaced").ttl(LONG).acquire().await.expect("acquire");
    theirs.resume(twice.clone()).await.expect("resume").release().await.expect("release");
    until("the expiry", async || theirs.inspect("late").await.expect("inspect").is_none()).await;

    for exported in [late, taken, evicted, replaced, twice] {
        let (name, token) = (exported.name().clone(), exported.token());
        for locks in [&ours, &theirs] {
            match locks.resume(exported.clone()).await {
                Err(Error::Lost { name: n, token: t, .. }) => assert_eq!((n, t), (name.clone(), token)),
                other => panic!("{name}: {other:?}"),
            }
        }
    }
    for lease in [successor, second] {
        lease.extend(LONG).await.expect("untouched");
        lease.release().await.expect("ours to the end");
    }
}

#[tokio::test]
async fn lost_lease_cannot_be_exported() {
    let db = fresh().await;
    let locks = db.locks().await;
    let lease = locks.lease("a").ttl(SHORT).renew(false).acquire().await.expect("acquire");
    soon("the loss", lease.lost()).await;
    assert!(lease.export().expect_err("lost").is_lost());
}

#[tokio::test]
async fn invalid_export_text_is_refused() {
    let db = fresh().await;
    let locks = db.locks().await;
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let text = lease.export().expect("export").to_string();
    let parts: Vec<&str> = text.splitn(6, ':').collect();
    assert_eq!(parts.len(), 6);
    let with = |i: usize, part: &str| {
        let mut parts = parts.clone();
        parts[i] = part;
        parts.join(":")
    };
    let long = "x".repeat(256);
    let wrong = [
        String::new(),
        "plain".into(),
        parts[..5].join(":"),
        with(0, "sqlock0"),
        with(1, "me"),
        with(2, "a hold"),
        with(3, "0"),
        with(3, "-1"),
        with(3, "1.5"),
        with(4, "-1"),
        with(4, "soon"),
        with(5, ""),
        with(5, "a\0"),
        with(5, &long),
    ];
    for text in wrong {
        let error = text.parse::<ExportedLease>().expect_err(&text);
        let is_named = matches!(error, Error::InvalidExport { .. } | Error::InvalidOwner | Error::InvalidName { .. });
        assert!(is_named && !error.is_retryable(), "{text:?}: {error}");
    }
    let lease = locks.resume(text.parse().expect("the right one")).await.expect("resume");
    lease.release().await.expect("ours to the end");
}

/// The TTL range of the client also applies to a TTL that was altered in the exported text.
#[tokio::test]
async fn resume_refuses_a_ttl_out_of_range() {
    let db = fresh().await;
    let locks = db.locks().await;
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let text = lease.export().expect("export").to_string();
    let parts: Vec<&str> = text.splitn(6, ':').collect();
    for ttl in ["0", "1", "99999999999999"] {
        let text = [parts[0], parts[1], parts[2], parts[3], ttl, parts[5]].join(":");
        let error = match text.parse::<ExportedLease>() {
            Ok(exported) => locks.resume(exported).await.expect_err("out of range"),
            Err(error) => error,
        };
        assert!(matches!(error, Error::OutOfRange { .. } | Error::InvalidExport { .. }), "{ttl}: {error}");
    }
    let lease = locks.resume(text.parse().expect("the right one")).await.expect("resume");
    lease.release().await.expect("ours to the end");
}

// ---- shutdown

#[tokio::test]
async fn shutdown_releases_every_lease() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let mut leases = Vec::new();
    for i in 0..20 {
        leases.push(ours.lease(format!("name/{i}")).ttl(LONG).acquire().await.expect("acquire"));
    }
    let kept = theirs.lease("theirs").ttl(LONG).acquire().await.expect("acquire");
    soon("the shutdown", ours.shutdown()).await.expect("shutdown");
    // The leases end at once, although no handle is dropped.
    let listed = theirs.list("").await.expect("list");
    assert_eq!(listed.iter().map(|info| info.name.as_str()).collect::<Vec<_>>(), ["theirs"]);
    for lease in leases {
        assert!(!lease.is_held());
        assert_eq!(soon("the loss", lease.lost()).await, LossCause::Shutdown);
        assert!(is_shutdown(&lease.extend(LONG).await.expect_err("lost")));
        assert!(is_shutdown(&lease.release().await.expect_err("lost")));
    }
    kept.extend(LONG).await.expect("not touched");
    kept.release().await.expect("ours to the end");
}

#[tokio::test]
async fn calls_after_shutdown_return_closed() {
    let db = fresh().await;
    let pool = db.pool().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lease = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let exported = theirs.lease("b").ttl(LONG).acquire().await.expect("acquire").export().expect("export");
    let clone = ours.clone();
    soon("the shutdown", ours.shutdown()).await.expect("shutdown");
    for locks in [&ours, &clone] {
        let owner = sqlock::Owner::random();
        let answers = [
            soon("an answer", locks.lease("c").acquire()).await.map(|_| ()),
            soon("an answer", locks.lease("c").try_acquire()).await.map(|_| ()),
            soon("an answer", locks.lease("c").owner(owner).acquire()).await.map(|_| ()),
            soon("an answer", locks.lease("a").wait(SOON).acquire()).await.map(|_| ()),
            soon("an answer", locks.lease("c").run(async |_| panic!("nothing was acquired"))).await,
            soon("an answer", locks.list("")).await.map(|_| ()),
            soon("an answer", locks.inspect("a")).await.map(|_| ()),
            soon("an answer", locks.evict("a", FencingToken::new(1).expect("a token"))).await.map(|_| ()),
            soon("an answer", locks.sweeper().sweep()).await.map(|_| ()),
            soon("an answer", locks.resume(exported.clone())).await.map(|_| ()),
        ];
        for answer in answers {
            let error = answer.expect_err("closed");
            assert!(matches!(error, Error::Closed), "{error}");
            assert!(!error.is_retryable() && !error.is_lost() && !error.is_timeout());
        }
    }
    let mut tx = pool.begin().await.expect("begin");
    assert!(is_shutdown(&lease.fence(&mut tx).await.expect_err("lost")));
    tx.rollback().await.expect("rollback");
    soon("a second shutdown", clone.shutdown()).await.expect("there is nothing left to do");
    theirs.resume(exported).await.expect("untouched by all this").release().await.expect("release");
}

#[tokio::test]
async fn shutdown_closes_all_waiters() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let here = ours.lease("here").ttl(LONG).acquire().await.expect("acquire");
    let there = theirs.lease("there").ttl(LONG).acquire().await.expect("acquire");
    let mut waiters = tokio::task::JoinSet::new();
    for name in ["here", "here", "there", "there"] {
        for wait in [None, Some(LONG)] {
            let request = ours.lease(name);
            let request = if let Some(wait) = wait { request.wait(wait) } else { request };
            waiters.spawn(request.acquire());
        }
    }
    // Of those behind another process, the first ones have entries.
    until("the waits", async || ours.health().waiting == 8).await;
    until("an entry", async || !theirs.waiters("there").await.expect("waiters").is_empty()).await;
    soon("the shutdown", ours.shutdown()).await.expect("shutdown");
    for waiter in soon("their answers", waiters.join_all()).await {
        assert!(matches!(waiter, Err(Error::Closed)), "{waiter:?}");
    }
    assert!(!here.is_held());
    there.extend(LONG).await.expect("untouched");
    there.release().await.expect("ours to the end");
    for name in ["here", "there"] {
        let next = theirs.lease(name).try_acquire().await.expect("try").expect("free");
        next.release().await.expect("release");
    }
}

/// A request in flight at the shutdown is refused, and its grant is released.
#[tokio::test]
async fn grant_during_shutdown_is_released() {
    let db = fresh().await;
    let theirs = db.locks().await;
    for one in [true, false] {
        for round in 0..10 {
            let ours = db.builder().await.connections(if one { 1 } else { 2 }).build();
            if round % 2 == 0 {
                ours.list("").await.expect("connected");
            }
            let mut acquired = tokio::task::JoinSet::new();
            for i in 0..5 {
                acquired.spawn(ours.lease(format!("name/{i}")).ttl(LONG).acquire());
            }
            for _ in 0..round {
                tokio::task::yield_now().await;
            }
            soon("the shutdown", ours.shutdown()).await.expect("shutdown");
            for lease in soon("their answers", acquired.join_all()).await {
                match lease {
                    Ok(lease) => assert_eq!(soon("the loss", lease.lost()).await, LossCause::Shutdown),
                    Err(error) => assert!(matches!(error, Error::Closed), "{error}"),
                }
            }
            assert_eq!(theirs.list("").await.expect("list"), [], "in round {round}");
        }
    }
}

#[tokio::test]
async fn twice_resumed_lease_needs_both_releases() {
    let db = fresh().await;
    let (ours, second, theirs) = (db.locks().await, db.locks().await, db.locks().await);
    let text = ours.lease("a").acquire().await.expect("acquire").export().expect("export").to_string();
    let first = ours.resume(text.parse().expect("a text")).await.expect("resume");
    let other = second.resume(text.parse().expect("a text")).await.expect("resume");
    assert_eq!(first.token(), other.token());
    other.release().await.expect("release");
    assert!(first.is_held());
    assert!(theirs.lease("a").try_acquire().await.expect("try").is_none());
    first.release().await.expect("release");
    assert!(theirs.lease("a").try_acquire().await.expect("try").is_some());
}

#[tokio::test]
async fn shutdown_racing_reentry_leaves_nothing_held() {
    let db = fresh().await;
    let outside = db.locks().await;
    for i in 0..10_u64 {
        let ours = db.locks().await;
        let owner = sqlock::Owner::random();
        let outer = outside.lease("a").owner(owner).acquire().await.expect("acquire");
        drop(ours.lease("warm").acquire().await.expect("acquire"));
        let entering = ours.clone();
        let inner = tokio::spawn(async move { entering.lease("a").owner(owner).acquire().await });
        tokio::time::sleep(Duration::from_micros(i * 250)).await;
        ours.shutdown().await.expect("shutdown");
        if let Ok(inner) = crate::support::soon("an answer", inner).await.expect("no panic") {
            assert!(!inner.is_held());
        }
        outer.release().await.expect("release");
        let next = outside.lease("a").wait(Duration::from_secs(10)).acquire().await.expect("free");
        next.release().await.expect("release");
    }
}
