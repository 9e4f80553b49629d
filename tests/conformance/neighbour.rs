//! A fault beside the leases of a client costs none of these leases. `scripts/soak neighbours`
//! makes each fault twenty times, with the shortest TTL.
//!
//! Promises: 17.

use std::time::Duration;

use sqlock::{Lease, Locks};
use sqlx::AssertSqlSafe;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::network;
use crate::DATABASE;
use crate::support::worker::Worker;
use crate::support::{Database, LONG, TestDatabase, builder, connect, fresh, soon, until, until_waiters};

/// The number of leases held during the fault, and their TTL. Deaf connections are found by the
/// silence of the server: a third of the TTL, and four seconds without the suspicion. A busy
/// machine needs the rest.
const LEASES: usize = 50;
const TTL: Duration = Duration::from_secs(6);

/// The number of names that are handed over at the same time.
const HANDOVERS: usize = 300;

/// How long a row stays locked. SQLite has one lock for all rows, which stops heartbeats as well.
const LOCKED_FOR: Duration =
    if matches!(DATABASE, Database::Sqlite) { Duration::from_secs(1) } else { Duration::from_secs(7) };

async fn acquire_all(locks: &Locks, prefix: &str, count: usize, ttl: Duration) -> Vec<Lease> {
    let mut acquired = JoinSet::new();
    for i in 0..count {
        acquired.spawn(locks.lease(format!("{prefix}/{i}")).ttl(ttl).acquire());
    }
    acquired.join_all().await.into_iter().map(|lease| lease.expect("acquire")).collect()
}

async fn release_all(leases: Vec<Lease>) {
    let mut released = JoinSet::new();
    for lease in leases {
        released.spawn(lease.release());
    }
    // A release fails if the lease was lost.
    released.join_all().await.into_iter().for_each(|released| released.expect("release"));
}

async fn neighbours(locks: &Locks, ttl: Duration) -> Vec<Lease> {
    acquire_all(locks, "neighbour", LEASES, ttl).await
}

#[tokio::test]
async fn handovers_at_once_cost_no_lease() {
    let db = fresh().await;
    let (locks, other) = (db.locks().await, db.locks().await);
    let leases = neighbours(&locks, TTL).await;
    let held = acquire_all(&locks, "handover", HANDOVERS, LONG).await;
    let waiting = tokio::spawn(async move { acquire_all(&other, "handover", HANDOVERS, LONG).await });
    for i in 0..HANDOVERS {
        until_waiters(&locks, &format!("handover/{i}"), 1).await;
    }
    release_all(held).await;
    release_all(soon("the hand-overs", waiting).await.expect("no panic")).await;
    release_all(leases).await;
}

#[tokio::test]
async fn locked_row_costs_no_other_lease() {
    let db = fresh().await;
    let locks = db.locks().await;
    let leases = neighbours(&locks, TTL).await;
    let locked = locks.lease("locked").acquire().await.expect("acquire");
    let stranger = locked_row(&db).await;
    drop(locked);
    let wanted = tokio::spawn(locks.lease("locked").acquire());
    sleep(LOCKED_FOR).await;
    drop(stranger);
    let wanted = soon("the lease", wanted).await.expect("no panic").expect("acquire");
    wanted.release().await.expect("release");
    release_all(leases).await;
}

/// A transaction that locks the row of the name `locked`, on a pool of its own.
async fn locked_row(db: &TestDatabase) -> sqlx::Transaction<'static, crate::Sql> {
    let pool = connect(&db.url, 1).await;
    if DATABASE == Database::Sqlite {
        return pool.begin_with("BEGIN IMMEDIATE").await.expect("the write lock");
    }
    let mut transaction = pool.begin().await.expect("begin");
    let lock = AssertSqlSafe("SELECT token FROM sqlock_lease WHERE name = 'locked' FOR UPDATE".to_owned());
    sqlx::query(lock).fetch_one(&mut *transaction).await.expect("a row lock");
    transaction
}

#[tokio::test]
async fn silent_connections_cost_no_lease() {
    if DATABASE == Database::Sqlite {
        return; // It has no connections over a network.
    }
    let db = fresh().await;
    let (proxy, url) = network::behind_a_proxy(&db.url);
    let locks = builder(connect(&url, 1).await).build();
    let leases = neighbours(&locks, TTL).await;
    // The heartbeat is on its connection.
    until("a heartbeat", async || locks.health().last_heartbeat.is_some()).await;
    proxy.swallow_all();
    sleep(TTL + Duration::from_secs(2)).await;
    release_all(leases).await;
}

#[tokio::test]
async fn dead_waiter_costs_no_other_lease() {
    let db = fresh().await;
    let locks = db.locks().await;
    let leases = neighbours(&locks, TTL).await;
    let lease = locks.lease("dead").acquire().await.expect("acquire");
    let mut waiter = Worker::start(&db.url);
    assert_eq!(waiter.ask(&format!("wait dead {}", LONG.as_millis())).await, "waiting");
    until_waiters(&locks, "dead", 1).await;
    waiter.kill();
    lease.release().await.expect("release");
    let next = soon("the lease", locks.lease("dead").acquire()).await.expect("acquire");
    next.release().await.expect("release");
    release_all(leases).await;
}
