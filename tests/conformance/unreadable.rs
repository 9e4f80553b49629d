//! Rows that cannot be read, or whose token cannot be incremented: each affects its own name only.
//!
//! Promises: 17.

use std::time::Duration;

use sqlock::{Error, Locks};
use sqlx::{AssertSqlSafe, Pool};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::support::{Database, fresh, soon, until_waiters};
use crate::{DATABASE, Sql};

/// How long to wait for a name that may never be granted.
const WAIT: Duration = Duration::from_secs(3);

/// Long enough to be renewed in time on a busy machine.
const TTL: Duration = Duration::from_secs(9);

/// Values that an operator, a restored dump or an overflow may leave in a row. Only SQLite keeps a
/// value of another type than the column's.
fn damages() -> &'static [&'static str] {
    match DATABASE {
        Database::Sqlite => &[
            "token = 9223372036854775807",
            "token = 9.3e18",
            "token = 9.3e18, id = '0123456789abcdef0123456789abcdef', expires_at = 9e15",
            "token = 'text', id = '0123456789abcdef0123456789abcdef', expires_at = 9000000000000000",
            "expires_at = 'text', id = '0123456789abcdef0123456789abcdef'",
            "ttl = 'text'",
            "ttl = 9.3e18",
            "acquired_at = 1e300",
            "id = x'ff'",
            "holder = x'ff', label = 1.5, id = '0123456789abcdef0123456789abcdef', expires_at = 9000000000000000",
        ],
        Database::Postgres => &[
            "token = 9223372036854775807",
            "expires_at = 9223372036854775807",
            "waiting = 9223372036854775807",
            "ttl = 9223372036854775807",
        ],
        _ => &["token = 9223372036854775807", "expires_at = 9223372036854775807", "ttl = 9223372036854775807"],
    }
}

async fn damage(pool: &Pool<Sql>, name: &str, damage: &str) {
    let sql = format!("UPDATE sqlock_lease SET {damage} WHERE name = '{name}'");
    let done = sqlx::query(AssertSqlSafe(sql)).execute(pool).await.expect("damaged");
    assert_eq!(done.rows_affected(), 1, "{damage}");
}

/// Returns whether nobody can be granted the name of a damaged row: there is no higher token, or the
/// row names a holder.
fn prevents_grants(damage: &str) -> bool {
    damage == "token = 9223372036854775807" || damage.contains("id = '0") && damage.contains("expires_at = 9")
}

/// Returns the answer to a request that met the damaged row, or checks that its error reports the
/// row.
fn answered<T>(damage: &str, outcome: Result<T, Error>) -> Option<T> {
    match outcome {
        Ok(answer) => Some(answer),
        Err(Error::Database { .. } | Error::Unavailable { .. }) => None,
        Err(error) => panic!("{damage}: {error}"),
    }
}

/// Checks a wait for the damaged name, which may also end at its limit.
fn waited<T>(damage: &str, outcome: Result<T, Error>) {
    if !matches!(outcome, Err(Error::Timeout { .. })) {
        let is_granted = answered(damage, outcome).is_some();
        assert!(!is_granted || !prevents_grants(damage), "{damage}: granted after a wait");
    }
}

#[tokio::test]
async fn unreadable_row_costs_only_its_own_name() {
    let mut all: JoinSet<()> = damages().iter().map(|damage_done| costs_only_its_own_name(damage_done)).collect();
    while let Some(done) = all.join_next().await {
        done.expect("no panic");
    }
}

async fn costs_only_its_own_name(damage_done: &'static str) {
    let db = fresh().await;
    let (locks, others, pool) = (db.locks().await, db.locks().await, db.pool().await);
    let bad = locks.lease("bad").acquire().await.expect("acquire");
    bad.release().await.expect("release");
    let kept = locks.lease("kept").ttl(TTL).acquire().await.expect("acquire");
    let acquired = Instant::now();
    let theirs = others.lease("line").acquire().await.expect("acquire");
    let waiter = tokio::spawn(locks.lease("line").acquire());
    until_waiters(&others, "line", 1).await;
    // A lease whose row is damaged while it is held, released together with others.
    let spoiled = locks.lease("spoiled").acquire().await.expect("acquire");
    let mut whole = Vec::new();
    for nth in 0..3 {
        whole.push(locks.lease(format!("whole/{nth}")).acquire().await.expect("acquire"));
    }
    damage(&pool, "bad", damage_done).await;
    damage(&pool, "spoiled", damage_done).await;
    let mut releases: JoinSet<_> = whole.into_iter().map(|lease| lease.release()).collect();
    let spoiled = tokio::spawn(spoiled.release());
    while let Some(released) = soon("the releases", releases.join_next()).await {
        released.expect("no panic").unwrap_or_else(|error| panic!("{damage_done}: a release beside it: {error}"));
    }
    if let Err(error) = soon("the release", spoiled).await.expect("no panic") {
        assert!(!error.is_timeout(), "{damage_done}: {error}");
    }

    // In one batch with good ones, tried and waited for, by itself and together with others.
    let mut good = JoinSet::new();
    let mut tries = JoinSet::new();
    for round in 0..3 {
        for nth in 0..5 {
            let lease = locks.lease(format!("good/{round}/{nth}"));
            good.spawn(async move { lease.acquire().await?.release().await });
        }
        tries.spawn(locks.lease("bad").try_acquire());
    }
    let waits = tokio::spawn(locks.lease("bad").wait(WAIT).acquire());
    let shared = tokio::spawn(locks.lease("bad").shared().wait(WAIT).acquire());
    let both = tokio::spawn(locks.lease_all(["bad", "with"]).wait(WAIT).acquire());
    for outcome in soon("the good ones", good.join_all()).await {
        outcome.unwrap_or_else(|error| panic!("{damage_done}: a name beside it: {error}"));
    }
    for outcome in soon("the bad ones", tries.join_all()).await {
        let is_granted = answered(damage_done, outcome).flatten().is_some();
        assert!(!is_granted || !prevents_grants(damage_done), "{damage_done}: granted");
    }
    waited(damage_done, soon("the wait", waits).await.expect("no panic"));
    waited(damage_done, soon("the shared wait", shared).await.expect("no panic"));
    waited(damage_done, soon("several", both).await.expect("no panic"));
    answered(damage_done, soon("a look", locks.inspect("bad")).await);
    answered(damage_done, soon("a look", locks.waiters("bad")).await);

    // The other requests of this client continue.
    let listed = soon("a list", locks.list("")).await.unwrap_or_else(|e| panic!("{damage_done}: {e}"));
    assert!(listed.iter().any(|lease| lease.name.as_str() == "kept"), "{damage_done}: {listed:?}");
    theirs.release().await.expect("release");
    let next = soon("the turn of the waiter", waiter).await.expect("no panic");
    let next = next.unwrap_or_else(|error| panic!("{damage_done}: the waiter of another name: {error}"));
    next.release().await.expect("ours to the end");
    // The wait lasts until the lease must have been renewed.
    let renewed = async {
        while acquired.elapsed() < TTL {
            assert!(kept.is_held(), "{damage_done}: lost");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    renewed.await;
    kept.release().await.expect("ours to the end");
    answered(damage_done, soon("a sweep", locks.sweeper().retention(Duration::ZERO).sweep()).await);
    soon("the end", locks.shutdown()).await.expect("shut down");
}

/// The next range of names begins after a name that is not UTF-8, and is read as another one.
#[tokio::test]
async fn sweep_ends_at_name_that_is_no_text() {
    if !DATABASE.is_mysql() {
        return; // The other databases store no name that is not UTF-8.
    }
    let db = fresh().await;
    let (locks, pool) = (db.locks().await, db.pool().await);
    locks.lease("bad").acquire().await.expect("acquire").release().await.expect("release");
    damage(&pool, "bad", "name = X'FF'").await;
    soon("a sweep", locks.sweeper().retention(Duration::from_secs(3600)).sweep()).await.expect("sweep");
}

#[tokio::test]
async fn overflowing_token_is_a_typed_error() {
    let db = fresh().await;
    let (locks, pool) = (db.locks().await, db.pool().await);
    locks.lease("bad").acquire().await.expect("acquire").release().await.expect("release");
    damage(&pool, "bad", "token = 9223372036854775807").await;
    for outcome in [
        soon("a try", overflown(&locks).await.try_acquire()).await.map(|_| ()),
        soon("a wait", overflown(&db.locks().await).await.wait(WAIT).acquire()).await.map(|_| ()),
    ] {
        let error = outcome.expect_err("there is no higher token");
        assert!(matches!(error, Error::Database { .. }) && !error.is_retryable(), "{error}");
    }
    locks.lease("good").acquire().await.expect("acquire").release().await.expect("release");
}

async fn overflown(locks: &Locks) -> sqlock::LeaseRequest {
    locks.lease("bad").ttl(Duration::from_millis(100))
}
