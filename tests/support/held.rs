//! Many leases of one client, held and otherwise left alone: what keeping them costs the server, and whether any is lost.

use std::time::{Duration, Instant};

use sqlock::Lease;
use tokio::task::JoinSet;

use super::{Database, Place};

const TTL: Duration = Duration::from_secs(10);

/// How many tasks acquire and release at the same time.
const TASKS: usize = 256;

/// How often a lease is looked at, each time another one.
const LOOK: Duration = Duration::from_millis(100);

/// Whether every lease was held to the end.
pub(super) async fn soak(place: &Place, count: usize, time: Duration) -> bool {
    let locks = place.database.locks().build();
    locks.migrate().await.expect("migrate");
    let start = Instant::now();
    let mut acquired = JoinSet::new();
    for task in 0..TASKS {
        let locks = locks.clone();
        acquired.spawn(async move {
            let mut leases = Vec::new();
            for i in (task..count).step_by(TASKS) {
                leases.push(locks.lease(format!("held/{i}")).ttl(TTL).acquire().await.expect("acquire"));
            }
            leases
        });
    }
    let leases: Vec<Vec<Lease>> = acquired.join_all().await;
    println!("  {count} leases of one client, TTL {TTL:?}: acquired in {:.1} s", start.elapsed().as_secs_f64());
    // Leases of the first second are looked up once, when the client has registered.
    tokio::time::sleep(TTL).await;
    let (before, start) = (place.database.work().await, Instant::now());
    let all: Vec<&Lease> = leases.iter().flatten().collect();
    let mut shortest = TTL;
    for i in 0.. {
        if start.elapsed() >= time {
            break;
        }
        shortest = shortest.min(all[i * 7919 % all.len()].remaining());
        tokio::time::sleep(LOOK).await;
    }
    let work = place.database.work().await.zip(before);
    let lost = all.iter().filter(|lease| !lease.is_held()).count();
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "    held for {seconds:.0} s, {lost} lost; the shortest time that was left {:.1} s",
        shortest.as_secs_f64()
    );
    match work {
        Some(((statements, bytes), (statements_before, bytes_before))) => println!(
            "    the server saw {:.2} statements and wrote {:.0} bytes of log a second",
            (statements - statements_before) as f64 / seconds,
            (bytes - bytes_before) as f64 / seconds
        ),
        None => println!("    (this database counts no statements)"),
    }
    let start = Instant::now();
    let mut released = JoinSet::new();
    for leases in leases {
        released.spawn(async move {
            let mut errors = 0;
            for lease in leases {
                errors += usize::from(lease.release().await.is_err());
            }
            errors
        });
    }
    let errors: usize = released.join_all().await.into_iter().sum();
    println!("    released in {:.1} s, {errors} with an error", start.elapsed().as_secs_f64());
    locks.shutdown().await.expect("shutdown");
    lost + errors == 0
}

impl Database {
    /// How many statements the server has carried out, and how many bytes of its log it has written.
    async fn work(&self) -> Option<(i64, i64)> {
        match self {
            Self::Postgres(pool) => {
                let work = "SELECT xact_commit, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint
                              FROM pg_stat_database WHERE datname = current_database()";
                // Each session reports what it has done about once a second.
                tokio::time::sleep(Duration::from_secs(2)).await;
                Some(sqlx::query_as(work).fetch_one(pool).await.expect("statistics"))
            }
            Self::MySql(pool) => {
                let status = async |name: &str| -> i64 {
                    let status = "SHOW GLOBAL STATUS WHERE Variable_name = ?";
                    let (_, value): (String, String) =
                        sqlx::query_as(status).bind(name).fetch_one(pool).await.expect("statistics");
                    value.parse().expect("a number")
                };
                Some((status("Questions").await, status("Innodb_os_log_written").await))
            }
            Self::Sqlite(_) => None,
        }
    }
}
