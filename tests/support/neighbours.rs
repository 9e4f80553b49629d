//! Faults beside the leases of a client, and whether the client loses one of these leases to them.

use std::fmt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use sqlock::{Lease, Locks};
use sqlx::{AssertSqlSafe, Executor as _};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::proxy::Proxy;
use super::{Database, Place};

/// The number of leases held during the fault.
const LEASES: usize = 100;

/// The number of names that are handed over at the same time.
const HANDOVERS: usize = 1_000;

/// The lowest TTL that a client takes by default.
const TTL: Duration = Duration::from_secs(1);

/// How long a row stays locked, and a connection stays silent. SQLite has one lock for all rows,
/// which stops heartbeats as well.
fn length_of_fault(database: &Database) -> Duration {
    if matches!(database, Database::Sqlite(_)) { TTL / 2 } else { 3 * TTL }
}

#[derive(Clone, Copy)]
enum Fault {
    /// A thousand names go to another client at once.
    Handovers,
    /// A foreign transaction has locked the row of a name that is released and requested.
    LockedRow,
    /// All open connections of the client swallow their traffic.
    SilentConnections,
    /// A process that waits at the head is killed.
    DeadWaiter,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Handovers => write!(f, "{HANDOVERS} hand-overs at once"),
            Self::LockedRow => f.write_str("a locked row"),
            Self::SilentConnections => f.write_str("silent connections"),
            Self::DeadWaiter => f.write_str("a dead waiter"),
        }
    }
}

/// Returns whether no lease was lost.
pub(super) async fn soak(place: &Place, runs: u64) -> bool {
    let locks = place.database.locks().build();
    locks.migrate().await.expect("migrate");
    println!("  {LEASES} leases of TTL {TTL:?} beside a fault, {runs} times each");
    let mut lost_ever = 0;
    for fault in [Fault::Handovers, Fault::LockedRow, Fault::SilentConnections, Fault::DeadWaiter] {
        if matches!((fault, &place.database), (Fault::SilentConnections, Database::Sqlite(_))) {
            continue;
        }
        let (mut lost, start) = (0, Instant::now());
        for _ in 0..runs {
            lost += run(place, fault).await;
        }
        let each = start.elapsed() / u32::try_from(runs.max(1)).unwrap_or(u32::MAX);
        println!("    {:<26} {lost} lost; {each:.1?} a run", fault.to_string());
        lost_ever += lost;
    }
    let _ = locks.shutdown().await;
    lost_ever == 0
}

/// Returns the number of lost leases.
async fn run(place: &Place, fault: Fault) -> usize {
    let proxy = matches!(fault, Fault::SilentConnections).then(|| place.behind_a_proxy());
    let locks = match &proxy {
        Some((_, url)) => Database::open(url).locks().build(),
        None => place.database.locks().build(),
    };
    let names = (0..LEASES).map(|i| format!("neighbour/{i}"));
    let leases = acquire_all(&locks, names, TTL).await;
    match fault {
        Fault::Handovers => hand_over(place, &locks).await,
        Fault::LockedRow => lock_row(place, &locks).await,
        Fault::SilentConnections => {
            let (proxy, _) = proxy.as_ref().expect("made for this fault");
            // The heartbeat is among the connections that are open.
            sleep(TTL).await;
            proxy.swallow_all();
            sleep(length_of_fault(&place.database)).await;
        }
        Fault::DeadWaiter => kill_waiter(place, &locks).await,
    }
    let mut lost = 0;
    for lease in leases {
        lost += usize::from(!lease.is_held() || lease.release().await.is_err());
    }
    locks.shutdown().await.expect("shutdown");
    lost
}

async fn acquire_all(locks: &Locks, names: impl Iterator<Item = String>, ttl: Duration) -> Vec<Lease> {
    let mut acquired = JoinSet::new();
    for name in names {
        let request = locks.lease(name).ttl(ttl);
        acquired.spawn(async move { request.acquire().await.expect("acquire") });
    }
    acquired.join_all().await
}

/// Releases many names at once for which another client waits.
async fn hand_over(place: &Place, locks: &Locks) {
    let names = || (0..HANDOVERS).map(|i| format!("handover/{i}"));
    // Only the other leases are at risk.
    let long = Duration::from_secs(60);
    let held = acquire_all(locks, names(), long).await;
    let other = place.database.locks().build();
    let waiting = tokio::spawn({
        let other = other.clone();
        async move { acquire_all(&other, names(), long).await }
    });
    for name in names() {
        until_waited_for(locks, &name).await;
    }
    release_all(held).await;
    release_all(waiting.await.expect("no panic")).await;
    other.shutdown().await.expect("shutdown");
}

async fn release_all(leases: Vec<Lease>) {
    let mut released = JoinSet::new();
    for lease in leases {
        released.spawn(lease.release());
    }
    for outcome in released.join_all().await {
        outcome.expect("release");
    }
}

/// Releases a name and requests it again while a foreign transaction has locked its row.
async fn lock_row(place: &Place, locks: &Locks) {
    let lease = locks.lease("locked").acquire().await.expect("acquire");
    let stranger = place.database.lock_row("locked").await;
    drop(lease);
    let wanted = tokio::spawn(locks.lease("locked").acquire());
    sleep(length_of_fault(&place.database)).await;
    stranger.end().await;
    wanted.await.expect("no panic").expect("acquire").release().await.expect("release");
}

/// Kills a waiting process, and lets the next waiter acquire the name.
async fn kill_waiter(place: &Place, locks: &Locks) {
    let lease = locks.lease("dead").acquire().await.expect("acquire");
    let mut waiter = start_waiter(&place.url, "dead");
    until_waited_for(locks, "dead").await;
    waiter.kill().and_then(|()| waiter.wait()).expect("a child can be killed");
    lease.release().await.expect("release");
    locks.lease("dead").acquire().await.expect("acquire").release().await.expect("release");
}

fn start_waiter(url: &str, name: &str) -> Child {
    let this = std::env::current_exe().expect("a program knows where it is");
    Command::new(this).args(["wait", url, name]).spawn().expect("a process can be started")
}

/// Runs the process that waits.
pub(super) async fn wait(url: &str, name: &str) {
    let locks = Database::open(url).locks().build();
    let _lease = locks.lease(name).acquire().await;
}

async fn until_waited_for(locks: &Locks, name: &str) {
    while locks.waiters(name).await.expect("waiters").is_empty() {
        sleep(Duration::from_millis(20)).await;
    }
}

/// A transaction that locks a row.
enum ForeignTransaction {
    Postgres(sqlx::Transaction<'static, sqlx::Postgres>),
    MySql(sqlx::Transaction<'static, sqlx::MySql>),
    Sqlite(sqlx::Transaction<'static, sqlx::Sqlite>),
}

impl ForeignTransaction {
    async fn end(self) {
        let ended = match self {
            Self::Postgres(transaction) => transaction.rollback().await,
            Self::MySql(transaction) => transaction.rollback().await,
            Self::Sqlite(transaction) => transaction.rollback().await,
        };
        ended.expect("rollback");
    }
}

impl Database {
    async fn lock_row(&self, name: &str) -> ForeignTransaction {
        let lock =
            || sqlx::raw_sql(AssertSqlSafe(format!("SELECT token FROM sqlock_lease WHERE name = '{name}' FOR UPDATE")));
        match self {
            Self::Postgres(pool) => {
                let mut transaction = pool.begin().await.expect("begin");
                transaction.execute(lock()).await.expect("a row lock");
                ForeignTransaction::Postgres(transaction)
            }
            Self::MySql(pool) => {
                let mut transaction = pool.begin().await.expect("begin");
                transaction.execute(lock()).await.expect("a row lock");
                ForeignTransaction::MySql(transaction)
            }
            Self::Sqlite(pool) => {
                ForeignTransaction::Sqlite(pool.begin_with("BEGIN IMMEDIATE").await.expect("the write lock"))
            }
        }
    }
}

impl Place {
    /// Starts a proxy in front of the server, and returns it with the URL that leads through it.
    pub(super) fn behind_a_proxy(&self) -> (Proxy, String) {
        let (before, path) = self.url.rsplit_once('/').expect("a URL names a database");
        let (address, port) = before.rsplit_once(':').expect("a URL names a port");
        let proxy = Proxy::start(port.parse().expect("a port is a number"));
        let url = format!("{address}:{}/{path}", proxy.port());
        (proxy, url)
    }
}
