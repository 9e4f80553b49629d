//! Plans of PostgreSQL that outlive the size of the table for which they were made.

use std::time::Duration;

use sqlx::PgPool;
use tokio::task::JoinSet;

use crate::support::{LONG, connect, fresh, soon};

/// How many names are acquired together.
const NAMES: usize = 100;

/// Acquires the names together, and releases them together.
async fn cycle(locks: &sqlock::Locks) {
    let names = (0..NAMES).map(|i| locks.lease(format!("name/{i}")).ttl(LONG).acquire());
    let leases = soon("the grants", names.collect::<JoinSet<_>>().join_all()).await;
    let releases: JoinSet<_> = leases.into_iter().map(|lease| lease.expect("acquire").release()).collect();
    soon("the releases", releases.join_all()).await.into_iter().for_each(|ended| ended.expect("release"));
}

async fn whole_reads(pool: &PgPool) -> i64 {
    // Sessions report their statistics a second after a statement at the latest.
    tokio::time::sleep(Duration::from_secs(2)).await;
    let reads = "SELECT seq_scan FROM pg_stat_user_tables WHERE relid = to_regclass('sqlock_lease')";
    sqlx::query_scalar(reads).fetch_one(pool).await.expect("statistics")
}

/// The statistics of a small table make a sequential scan the cheapest plan, which a session keeps
/// while the table grows.
#[tokio::test]
async fn statements_for_small_table_read_no_whole_table() {
    let db = fresh().await;
    let (pool, locks) = (connect(&db.url, 1).await, db.locks().await);
    cycle(&locks).await;
    sqlx::query("VACUUM ANALYZE sqlock_lease").execute(&pool).await.expect("vacuum");
    let before = whole_reads(&pool).await;
    // A session plans a statement for good after five executions.
    for _ in 0..8 {
        cycle(&locks).await;
    }
    // An idle session reports its statistics with its next statement.
    locks.lease("last").try_acquire().await.expect("try");
    let reads = whole_reads(&pool).await - before;
    assert!(reads < NAMES as i64 / 2, "{reads} sequential scans");
}
