//! Many held leases of one client: the cost of keeping them, and whether any is lost.

use std::path::Path;
use std::time::{Duration, Instant};

use sqlock::Lease;
use tokio::task::JoinSet;

use super::{Database, Place};

const TTL: Duration = Duration::from_secs(10);

/// The number of tasks that acquire and release.
const TASKS: usize = 256;

/// The interval at which another lease is checked.
const LOOK: Duration = Duration::from_millis(100);

/// Returns whether every lease was held to the end.
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
    // Leases of the first second are looked up once, after the client has registered.
    tokio::time::sleep(TTL).await;
    let (before, processor, start) =
        (place.database.work().await, place.database.processor_time().await, Instant::now());
    let all: Vec<&Lease> = leases.iter().flatten().collect();
    let mut shortest = TTL;
    let mut round_trips = Vec::new();
    for i in 0.. {
        if start.elapsed() >= time {
            break;
        }
        shortest = shortest.min(all[i * 7919 % all.len()].remaining());
        // Two heartbeats with the same round trip, to the nanosecond, are the same.
        round_trips.extend(locks.health().round_trip);
        round_trips.dedup();
        tokio::time::sleep(LOOK).await;
    }
    let work = place.database.work().await.zip(before);
    let processor = place.database.processor_time().await.zip(processor);
    round_trips.sort_unstable();
    let lost = all.iter().filter(|lease| !lease.is_held()).count();
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "    held for {seconds:.0} s, {lost} lost; the shortest time that was left {:.1} s",
        shortest.as_secs_f64()
    );
    if let (Some(longest), Some(middle)) = (round_trips.last(), round_trips.get(round_trips.len() / 2)) {
        let late = round_trips[round_trips.len() * 99 / 100];
        println!("    {} heartbeats: p50 {middle:.1?}, p99 {late:.1?}, longest {longest:.1?}", round_trips.len());
    }
    if let Some((after, before)) = processor {
        let share = (after - before).as_secs_f64() / seconds;
        println!("    the server used {:.2} % of one processor", share * 100.0);
    }
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
    /// The processor time of the server, which runs on this machine, since it started.
    pub(super) async fn processor_time(&self) -> Option<Duration> {
        let (query, file) = match self {
            Self::Postgres(_) => ("SHOW data_directory", "/postmaster.pid"),
            Self::MySql(_) => ("SELECT @@pid_file", ""),
            Self::Sqlite(_) => return None,
        };
        let path: String = match self {
            Self::Postgres(pool) => sqlx::query_scalar(query).fetch_one(pool).await.expect("a setting"),
            Self::MySql(pool) => sqlx::query_scalar(query).fetch_one(pool).await.expect("a setting"),
            Self::Sqlite(_) => return None,
        };
        let file = std::fs::read_to_string(path + file).expect("the server's file of its process");
        let server: u32 = file.lines().next()?.trim().parse().expect("a process id");
        let processes = std::fs::read_dir("/proc").expect("there is a /proc").flatten();
        let ticks: u64 = processes.filter_map(|process| ticks_of(&process.path(), server)).sum();
        Some(Duration::from_secs_f64(ticks as f64 / TICKS_PER_SECOND))
    }

    /// Reads the number of executed statements, and of bytes written to the log.
    pub(super) async fn work(&self) -> Option<(i64, i64)> {
        match self {
            Self::Postgres(pool) => {
                let work = "SELECT xact_commit, pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint
                              FROM pg_stat_database WHERE datname = current_database()";
                // Each session reports its work about once a second.
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

/// The unit of processor time in /proc, on every Linux of today.
const TICKS_PER_SECOND: f64 = 100.0;

/// The processor time of a process, if it is the server or a child of it.
fn ticks_of(process: &Path, server: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(process.join("stat")).ok()?;
    // The name, in parentheses, may contain anything.
    let (id, rest) = (stat.split(' ').next()?, stat.rsplit_once(") ")?.1);
    let fields: Vec<&str> = rest.split(' ').collect();
    let is_server = id.parse() == Ok(server);
    let is_child = fields[1].parse() == Ok(server);
    // The process's own times in user and kernel mode, and for the server those of ended children.
    let times = if is_server { &fields[11..15] } else { &fields[11..13] };
    (is_server || is_child).then(|| times.iter().filter_map(|time| time.parse::<u64>().ok()).sum())
}
