//! Promise 10: at most three connections (SQLite: two), however many leases and waiters, and none of
//! the application's pool.
//!
//! Promises: 10, 16.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sqlock::inspect::LeaseInfo;
use sqlock::{Error, Locks};
use sqlx::sqlite::SqlitePoolOptions;
use tokio::task::JoinSet;

use super::connection_counter::ConnectionCounter;
#[cfg(any(feature = "postgres", feature = "mysql"))]
use super::network::behind_a_proxy;
use crate::DATABASE;
use crate::support::{Database, LONG, builder, fresh, soon, until};

#[tokio::test]
async fn leases_survive_a_fully_used_application_pool() {
    let db = fresh().await;
    let pool = db.pool_of(1).await;
    if DATABASE == Database::Sqlite {
        // Otherwise one reader would exclude every writer, and no lease in the same file could be
        // renewed.
        sqlx::query("PRAGMA journal_mode = WAL").execute(&pool).await.expect("WAL");
    }
    let (ours, theirs) = (builder(pool.clone()).build(), db.locks().await);
    let ttl = Duration::from_secs(6);

    // The app transaction takes the pool's only connection. It reads and does not write:
    // SQLite has one writer for the whole file, and a write transaction of the application would
    // exclude the client as well.
    let mut app = pool.begin().await.expect("begin");
    sqlx::query("SELECT count(*) FROM sqlock_lease").fetch_one(&mut *app).await.expect("select");
    assert!(pool.try_acquire().is_none(), "nothing is left in the pool");

    let mut taken = JoinSet::new();
    for i in 0..50 {
        let request = ours.lease(format!("name/{i}")).ttl(ttl);
        taken.spawn(async move { soon("the grant", request.acquire()).await.expect("acquire") });
    }
    let mut leases = taken.join_all().await;
    leases.sort_by(|a, b| a.name().cmp(b.name()));

    // Every second name has a waiter, in this process or in another one.
    let arrived = Arc::new(AtomicUsize::new(0));
    let mut waiters = JoinSet::new();
    for (i, lease) in leases.iter().enumerate().filter(|(i, _)| i % 2 == 0) {
        let locks = if i % 4 == 0 { &ours } else { &theirs };
        let request = locks.lease(lease.name().as_str()).ttl(ttl);
        let (token, arrived) = (lease.token(), Arc::clone(&arrived));
        waiters.spawn(async move {
            let lease = request.acquire().await.expect("acquire");
            assert!(lease.token() > token);
            arrived.fetch_add(1, Ordering::SeqCst);
            lease
        });
    }

    let mut listed = theirs.list("name/").await.expect("list");
    for _ in 0..2 {
        listed = soon("a renewal of each lease", all_renewed(&theirs, listed)).await;
    }
    for lease in &leases {
        assert!(lease.is_held(), "{} was lost", lease.name());
    }
    assert_eq!(arrived.load(Ordering::SeqCst), 0, "nobody else got in");
    assert_eq!(listed.len(), 50);
    for (info, lease) in listed.iter().zip(&leases) {
        assert_eq!(info.token, lease.token());
    }

    let mut waited_for = 0;
    let mut kept = Vec::new();
    for (i, lease) in leases.into_iter().enumerate() {
        if i % 2 == 0 {
            lease.release().await.expect("ours to the end");
            waited_for += 1;
        } else {
            kept.push(lease);
        }
    }
    let followers = soon("their turn", waiters.join_all()).await;
    assert_eq!((followers.len(), waited_for), (25, 25));
    for lease in followers.into_iter().chain(kept) {
        lease.release().await.expect("ours to the end");
    }

    // Meanwhile the app transaction was not disturbed.
    sqlx::query("SELECT count(*) FROM sqlock_lease").fetch_one(&mut *app).await.expect("select");
    app.commit().await.expect("commit");
}

/// Waits until every listed lease has been renewed.
async fn all_renewed(locks: &Locks, before: Vec<LeaseInfo>) -> Vec<LeaseInfo> {
    loop {
        let now = locks.list("name/").await.expect("list");
        assert_eq!(now.len(), before.len());
        if now.iter().zip(&before).all(|(now, before)| now.expires_at > before.expires_at) {
            return now;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn connections_stay_few_with_200_leases_and_waiters() {
    let mut db = fresh().await;
    let counter = ConnectionCounter::of(&mut db).await;
    // One connection for heartbeats and those for work.
    let most = if DATABASE == Database::Sqlite { 2 } else { 3 };
    let locks = db.locks().await;
    assert_eq!(counter.connections().await, 0, "none until one is needed");

    let mut taken = JoinSet::new();
    for i in 0..200 {
        let request = locks.lease(format!("name/{i}")).ttl(LONG);
        taken.spawn(async move { soon("the grant", request.acquire()).await.expect("acquire") });
    }
    let mut leases = taken.join_all().await;
    let mut waiters = JoinSet::new();
    for i in 0..50 {
        // Several waiters in one queue, too.
        let request = locks.lease(format!("name/{}", i % 40)).ttl(LONG);
        waiters.spawn(async move { request.acquire().await.expect("acquire").release().await });
    }
    // Through a round of renewals, or two.
    for _ in 0..25 {
        let open = counter.connections().await;
        assert!((1..=most).contains(&open), "{open} connections");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(leases.iter().all(|lease| lease.is_held()));
    let mut released = JoinSet::new();
    for lease in leases.drain(..) {
        released.spawn(lease.release());
    }
    for verdict in released.join_all().await {
        verdict.expect("ours to the end");
    }
    for verdict in soon("their turn", waiters.join_all()).await {
        verdict.expect("ours to the end");
    }
    let open = counter.connections().await;
    assert!((1..=most).contains(&open), "{open} connections");
    locks.shutdown().await.expect("shutdown");
    closed(&counter).await;
}

#[tokio::test]
async fn one_connection_suffices() {
    let mut db = fresh().await;
    let counter = ConnectionCounter::of(&mut db).await;
    let locks = db.builder().await.connections(1).build();
    let mut taken = JoinSet::new();
    for i in 0..50 {
        let request = locks.lease(format!("name/{i}")).ttl(LONG);
        taken.spawn(async move {
            let lease = soon("the grant", request.acquire()).await.expect("acquire");
            lease.extend(LONG).await.expect("extend");
            lease
        });
    }
    let leases = taken.join_all().await;
    // One connection for the work. A heartbeat, which comes after a second, has its own.
    let open = counter.connections().await;
    assert!((1..=2).contains(&open), "{open} connections");
    for lease in leases {
        lease.release().await.expect("ours to the end");
    }
    let open = counter.connections().await;
    assert!((1..=2).contains(&open), "{open} connections");
}

#[tokio::test]
async fn connections_close_with_the_last_handle() {
    let mut db = fresh().await;
    let counter = ConnectionCounter::of(&mut db).await;
    let locks = db.locks().await;
    let clone = locks.clone();
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    drop(locks);
    drop(clone);
    // The lease is a handle, too.
    assert!(counter.connections().await > 0);
    lease.extend(LONG).await.expect("still held");
    lease.release().await.expect("ours to the end");
    closed(&counter).await;
}

#[tokio::test]
async fn application_pool_is_not_used() {
    let db = fresh().await;
    let pool = db.pool_of(4).await;
    let locks = builder(pool.clone()).build();
    locks.migrate().await.expect("migrate");
    let lease = locks.lease("a").acquire().await.expect("acquire");
    locks.list("").await.expect("list");
    locks.sweeper().sweep().await.expect("sweep");
    lease.release().await.expect("release");
    assert_eq!(pool.size(), 0, "not one of its connections was opened");
    // Even a closed pool does not matter, because the client takes only its options.
    pool.close().await;
    let lease = locks.lease("a").acquire().await.expect("acquire");
    lease.release().await.expect("release");
}

/// Options for a SQLite database in memory, which exists on one connection only.
fn in_memory() -> SqlitePoolOptions {
    SqlitePoolOptions::new().max_connections(1).min_connections(1).idle_timeout(None).max_lifetime(None)
}

/// The only connection of a database in memory is borrowed for one statement at a time. The suite of
/// every database runs this test.
#[tokio::test]
async fn in_memory_database_borrows_the_pool_connection() {
    let pool = in_memory().connect("sqlite::memory:").await.expect("a database in memory");
    let locks = Locks::new(pool.clone());
    locks.migrate().await.expect("migrate");
    let lease = locks.lease("a").acquire().await.expect("acquire");
    assert!(locks.lease("a").try_acquire().await.expect("try").is_none());
    let held: String = sqlx::query_scalar("SELECT name FROM sqlock_lease WHERE id <> ''")
        .fetch_one(&pool)
        .await
        .expect("the application sees the row in its own database");
    assert_eq!(held, "a");

    let mut tx = pool.begin().await.expect("it was given back");
    lease.fence(&mut tx).await.expect("fence");
    sqlx::query("CREATE TABLE app (id INTEGER)").execute(&mut *tx).await.expect("create");
    tx.commit().await.expect("commit");
    assert_eq!(pool.size(), 1);
    let token = lease.token();
    lease.release().await.expect("release");
    let next = locks.lease("a").acquire().await.expect("acquire");
    assert!(next.token() > token);
    next.release().await.expect("release");
    locks.shutdown().await.expect("shutdown");
    sqlx::query("SELECT id FROM app").fetch_all(&pool).await.expect("the pool lives on");
}

/// A name that nobody holds does not look held when the application uses the only connection.
#[tokio::test]
async fn busy_in_memory_connection_exhausts_the_pool() {
    let options = in_memory().acquire_timeout(Duration::from_secs(3));
    let pool = options.connect("sqlite::memory:").await.expect("a database in memory");
    let locks = Locks::new(pool.clone());
    locks.migrate().await.expect("migrate");
    // The client has used the connection before.
    locks.lease("a").acquire().await.expect("acquire").release().await.expect("release");
    let tx = pool.begin().await.expect("it was given back");
    let error = soon("an answer", locks.lease("a").try_acquire()).await.expect_err("no connection is free");
    assert!(matches!(error, Error::PoolExhausted { .. }), "{error}");
    tx.commit().await.expect("commit");
    let lease = locks.lease("a").try_acquire().await.expect("try").expect("free");
    lease.release().await.expect("release");
}

async fn closed(counter: &ConnectionCounter) {
    until("the end of the connections", async || counter.connections().await == 0).await;
}

/// As after a new password, or the address of a new server.
#[cfg(any(feature = "postgres", feature = "mysql"))]
#[tokio::test]
async fn new_connect_options_of_the_pool_are_used() {
    if DATABASE == Database::Sqlite {
        return;
    }
    let db = fresh().await;
    let ((first, first_url), (second, second_url)) = (behind_a_proxy(&db.url), behind_a_proxy(&db.url));
    let pool = crate::support::connect(&first_url, 1).await;
    let locks = builder(pool.clone()).build();
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    pool.set_connect_options(second_url.parse().expect("a URL"));
    first.refuse();
    until("a connection with the new options", async || second.connections() > 0).await;
    let other = soon("the grant", locks.lease("b").acquire()).await.expect("acquire");
    other.release().await.expect("release");
    lease.release().await.expect("the lease was held to the end");
}
