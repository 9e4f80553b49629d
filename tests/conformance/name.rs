//! Promise 13: names are bytes, on every database.
//!
//! Promises: 13.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use sqlock::{Error, Lease, Locks};
use tokio::task::JoinSet;

use crate::DATABASE;
use crate::support::{Database, LONG, builder, connect, fresh, soon};

/// Returns fifty names that a collation, a pattern, a parser or a protocol might confuse.
fn odd_names() -> Vec<String> {
    let mut names: Vec<String> = [
        // Case, and letters that have none in ASCII.
        "a",
        "A",
        "straße",
        "STRASSE",
        "strasse",
        "STRAẞE",
        "i",
        "I",
        "ı",
        "İ",
        // Trailing and leading space, which PAD SPACE collations ignore.
        "a ",
        "a  ",
        " a",
        "a\t",
        "a\u{a0}",
        "a\u{200b}",
        "a\n",
        "a\r\n",
        "\n",
        // Accents, and the same letter composed and decomposed.
        "á",
        "a\u{301}",
        "Á",
        "ä",
        "ae",
        "æ",
        "ﬁ",
        "fi",
        // Wildcards, quotes, escapes.
        "%",
        "_",
        "a%",
        "a_",
        "a%b",
        "a_b",
        "axb",
        "'",
        "''",
        "\"",
        "`",
        "\\",
        "\\\\",
        "\\n",
        "a\\",
        "a'; --",
        // Words of parsers.
        "null",
        "NULL",
        "[1,\"2\"]",
        "{}",
        "$1",
        "?",
        // Beyond the Basic Multilingual Plane.
        "🔒",
        "🔓",
    ]
    .map(String::from)
    .into();
    names.push("x".repeat(255));
    names.push("x".repeat(254));
    names.push("x".repeat(254) + "y");
    names.push("é".repeat(127));
    names.push("é".repeat(127) + " ");
    names.push("🔒".repeat(63) + "abc");
    names
}

/// Takes all of them at once, so that they travel in batches.
async fn take_all(locks: &Locks, names: &[String]) -> BTreeMap<String, Lease> {
    let mut taken = JoinSet::new();
    for name in names {
        let request = locks.lease(name).ttl(LONG).label(name.chars().take(60).collect::<String>());
        let name = name.clone();
        taken.spawn(async move { (name, soon("the grant", request.acquire()).await.expect("acquire")) });
    }
    taken.join_all().await.into_iter().collect()
}

#[tokio::test]
async fn names_are_compared_byte_for_byte() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let names = odd_names();
    assert_eq!(names.iter().collect::<BTreeSet<_>>().len(), names.len());
    assert!(names.len() >= 50);

    // Twice: the first time the rows do not exist, the second time they do.
    let mut last = BTreeMap::new();
    for _ in 0..2 {
        // All are granted although all are held at once: no two names are equal.
        let leases = take_all(&ours, &names).await;
        assert_eq!(leases.len(), names.len());
        for (name, lease) in &leases {
            assert_eq!(lease.name().as_str(), name);
            assert!(last.insert(name.clone(), lease.token()) < Some(lease.token()), "{name:?}");
        }

        // In the order of their bytes, each with its own token.
        let listed = theirs.list("").await.expect("list");
        let expected: Vec<_> = leases.iter().map(|(name, lease)| (name.as_str(), lease.token())).collect();
        let found: Vec<_> = listed.iter().map(|info| (info.name.as_str(), info.token)).collect();
        assert_eq!(found, expected);
        for info in &listed {
            assert!(info.name.as_str().starts_with(&info.label), "{info:?}");
        }

        for (name, lease) in &leases {
            let info = theirs.inspect(name).await.expect("inspect").expect("held");
            assert_eq!((info.name.as_str(), info.token), (name.as_str(), lease.token()));
            assert!(theirs.lease(name).try_acquire().await.expect("try").is_none(), "{name:?}");
        }

        // One renewal and one release for all.
        let mut extended = JoinSet::new();
        for (name, lease) in leases {
            extended.spawn(async move {
                lease.extend(LONG * 2).await.expect("extend");
                (name, lease)
            });
        }
        let mut released = JoinSet::new();
        for (name, lease) in extended.join_all().await {
            let left = theirs.inspect(&name).await.expect("inspect").expect("held").remaining;
            assert!(left > LONG, "{name:?} is renewed");
            released.spawn(lease.release());
        }
        for verdict in released.join_all().await {
            verdict.expect("release");
        }
        assert_eq!(theirs.list("").await.expect("list"), []);
    }

    // A name is purged when the database's clock has gone on since its release.
    let mut purged = 0;
    soon("the purge", async {
        while purged < names.len() as u64 {
            purged += theirs.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep");
        }
    })
    .await;
    assert_eq!(purged, names.len() as u64);
}

#[tokio::test]
async fn prefix_is_compared_byte_for_byte() {
    let db = fresh().await;
    let locks = db.locks().await;
    let names = odd_names();
    let leases = take_all(&locks, &names).await;
    for prefix in
        ["", "a", "A", "a ", "á", "a\u{301}", "%", "_", "a%", "a_", "\\", "'", "\"", "\n", "🔒", "x", "str", "?", "zz"]
    {
        let mut expected: Vec<&str> = names.iter().map(String::as_str).filter(|n| n.starts_with(prefix)).collect();
        expected.sort_unstable();
        let listed = locks.list(prefix).await.expect("list");
        let found: Vec<&str> = listed.iter().map(|info| info.name.as_str()).collect();
        assert_eq!(found, expected, "{prefix:?}");
    }
    // No name is that long or contains a NUL, so no name has such a prefix.
    for prefix in ["x".repeat(256), "a\0".into()] {
        assert_eq!(locks.list(&prefix).await.expect("list"), [], "{prefix:?}");
    }
    drop(leases);
}

#[tokio::test]
async fn eviction_and_purge_spare_similar_names() {
    let db = fresh().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    for (name, other) in [("a", "A"), ("a", "a "), ("á", "a\u{301}"), ("a%", "a_"), ("\\", "\\\\")] {
        let held = ours.lease(name).ttl(LONG).acquire().await.expect("acquire");
        // On SQLite, two names that are acquired in one millisecond have the same token.
        tokio::time::sleep(Duration::from_millis(2)).await;
        let untouched = ours.lease(other).ttl(LONG).acquire().await.expect("acquire");
        assert!(!theirs.evict(other, held.token()).await.expect("evict"), "that token holds {name:?}, not {other:?}");
        assert!(theirs.evict(name, held.token()).await.expect("evict"));
        theirs.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep");
        untouched.extend(LONG).await.expect("still held");
        untouched.release().await.expect("ours to the end");
        assert!(held.release().await.expect_err("evicted").is_lost());
    }
}

#[tokio::test]
async fn invalid_name_is_refused_before_sending() {
    // No server answers here: a sent statement would fail differently, and only after some seconds.
    let nowhere = match DATABASE {
        Database::Postgres => "postgres://nobody@127.0.0.1:1/nothing",
        Database::MySql | Database::MariaDb => "mysql://nobody@127.0.0.1:1/nothing",
        Database::Sqlite => "sqlite:///nonexistent/directory/file.db",
    };
    let locks = builder(connect(nowhere, 1).await).build();
    let long = "x".repeat(256);
    let long_in_bytes = "é".repeat(128);
    for name in ["", "\0", "a\0", "\0a", long.as_str(), long_in_bytes.as_str()] {
        let answers = [
            locks.lease(name).acquire().await.map(|_| ()),
            locks.lease(name).try_acquire().await.map(|_| ()),
            locks.lease(name).run(async |_| panic!("nothing was acquired")).await,
            locks.inspect(name).await.map(|_| ()),
            locks.evict(name, sqlock::FencingToken::new(1).expect("a token")).await.map(|_| ()),
            sqlock::LockName::new(name).map(|_| ()),
        ];
        for answer in answers {
            let error = answer.expect_err("not a name");
            assert!(matches!(error, Error::InvalidName { .. }), "{error}");
            assert!(!error.is_retryable());
            assert!(error.to_string().len() < 400, "a message is not the place for the whole of it");
        }
    }
}
