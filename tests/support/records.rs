//! The time of operations on idempotency records, with many finished records in the table, next to
//! an empty table; and the plans of their statements.
//!
//! Times are only printed. An operation fails if it reads the whole table, according to the plan of
//! a statement or the number of rows that the server has read.

#[path = "records/plans.rs"]
mod plans;

use std::time::{Duration, Instant};

use sqlock::Error;
use sqlock::idempotency::{Attempt, Fingerprint, Idempotency, IdempotencyKey, Outcome, RecordState};
use sqlx::Row as _;

use super::any_pool::{AnyPool, on_pool};
use super::{Database, Place};

/// The rows of a batch of a purge.
const BATCH: usize = 500;

/// The records with an unknown outcome in the table.
const UNKNOWN: usize = 100;

/// The operations, in the order in which they are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Claim,
    Replay,
    ListUnknown,
    ResumeOne,
    PurgeBatch,
    PurgeNothing,
}

impl Operation {
    const ALL: [Self; 6] =
        [Self::Claim, Self::Replay, Self::ListUnknown, Self::ResumeOne, Self::PurgeBatch, Self::PurgeNothing];

    fn title(self) -> &'static str {
        match self {
            Self::Claim => "claim of a new key",
            Self::Replay => "replay of a finished one",
            Self::ListUnknown => "list of 100 unknown",
            Self::ResumeOne => "resume of one",
            Self::PurgeBatch => "purge of one batch of 500",
            Self::PurgeNothing => "purge that finds nothing",
        }
    }

    /// Returns the number of measurements.
    fn samples(self) -> usize {
        if matches!(self, Self::PurgeBatch | Self::PurgeNothing) { 10 } else { 300 }
    }
}

/// The cost of an operation.
struct Cost {
    p50: Duration,
    p99: Duration,
    /// The rows of all tables that the server has read for one operation, if it counts them.
    rows: Option<f64>,
}

/// Returns whether no operation reads the whole table.
pub(super) async fn soak(place: &Place, count: usize) -> bool {
    let pool = AnyPool::open(&place.url, 4);
    let locks = pool.builder().build();
    locks.migrate().await.expect("migrate");
    let records = Idempotency::new(&locks);
    let measuring = Measuring { place, pool, records };
    let empty = measuring.measure("empty").await;
    let start = Instant::now();
    place.database.fill_records(count).await;
    println!("  {count} finished records, stored in {:.0} s", start.elapsed().as_secs_f64());
    let filled = measuring.measure("filled").await;

    println!(
        "    {:<27}{:>33}   {:>33}",
        "",
        "empty: p50, p99, rows read",
        format!("{count} records: p50, p99, rows read")
    );
    let mut violations = Vec::new();
    for ((operation, empty), filled) in Operation::ALL.iter().zip(&empty).zip(&filled) {
        println!("    {:<27}{}   {}", operation.title(), empty.row(), filled.row());
        // A reading of the counters counts as some rows.
        let whole = (count as f64 / 2.0).max(10_000.0);
        if filled.rows.is_some_and(|rows| rows > whole) {
            violations.push(format!("{} reads the whole table", operation.title()));
        }
    }
    let id = place.database.id_of_a_record().await;
    for statement in plans::statements(&place.database, &id) {
        let plan = place.database.plan(&statement.sql).await;
        println!("    {}, {}", statement.operation.title(), statement.what);
        for line in &plan {
            println!("      {}", line.text);
        }
        if plan.iter().any(|line| line.reads_all) {
            violations.push(format!(
                "{}, {}: the plan reads the whole table",
                statement.operation.title(),
                statement.what
            ));
        }
    }
    for violation in &violations {
        println!("    VIOLATION {violation}");
    }
    let _ = locks.shutdown().await;
    violations.is_empty()
}

impl Cost {
    /// Creates the cost from measured times and the difference of the counters.
    fn of(mut times: Vec<Duration>, rows: Option<i64>) -> Self {
        times.sort_unstable();
        let at = |percent: usize| times[(times.len() - 1) * percent / 100];
        Self { p50: at(50), p99: at(99), rows: rows.map(|rows| rows as f64 / times.len() as f64) }
    }

    fn row(&self) -> String {
        let rows = self.rows.map_or("-".to_owned(), |rows| format!("{rows:.0}"));
        format!("{:>11} {:>11} {rows:>9}", format!("{:.2?}", self.p50), format!("{:.2?}", self.p99))
    }
}

struct Measuring<'a> {
    place: &'a Place,
    pool: AnyPool,
    records: Idempotency,
}

impl Measuring<'_> {
    async fn measure(&self, run: &str) -> Vec<Cost> {
        for i in 0..UNKNOWN {
            self.leave_unknown("unknown", &format!("{run}/{i}")).await;
        }
        let mut costs = Vec::new();
        for operation in Operation::ALL {
            let samples = operation.samples();
            let (mut times, before) = (Vec::new(), self.place.database.rows_read().await);
            for i in 0..samples {
                let key = format!("{run}/{i}");
                match operation {
                    Operation::ResumeOne => self.leave_unknown("resumed", &key).await,
                    Operation::PurgeBatch => self.place.database.insert_expired(&key, BATCH).await,
                    _ => {}
                }
                let start = Instant::now();
                self.run(operation, &key).await;
                times.push(start.elapsed());
            }
            let rows = self.place.database.rows_read().await.zip(before).map(|(after, before)| after - before);
            costs.push(Cost::of(times, rows));
        }
        costs
    }

    async fn run(&self, operation: Operation, key: &str) {
        match operation {
            Operation::Claim => assert_eq!(self.claim(key).await, Outcome::New(17)),
            Operation::Replay => assert_eq!(self.claim(key).await, Outcome::Replay(17)),
            Operation::ListUnknown => {
                let unknown =
                    self.records.records_in(None, Some(RecordState::Unknown), UNKNOWN as u32).await.expect("list");
                assert_eq!(unknown.len(), UNKNOWN);
            }
            Operation::ResumeOne => {
                let records = self.records.clone().namespace("resumed");
                let resumed = records.resume(async |_: &Attempt| Ok::<_, Error>(17)).await.expect("resume");
                assert_eq!(resumed.done, 1);
            }
            Operation::PurgeBatch => assert_eq!(self.records.purge().await.expect("purge"), BATCH as u64),
            Operation::PurgeNothing => assert_eq!(self.records.purge().await.expect("purge"), 0),
        }
    }

    /// Claims a key in a transaction with no other statement.
    async fn claim(&self, key: &str) -> Outcome<i64> {
        let (key, request) = (IdempotencyKey::new("alice", key), Fingerprint::of(["charge"]));
        let claimed: Result<_, Error> = on_pool!(&self.pool, pool => {
            self.records.run(pool, &key, &request, async |_| Ok(17)).await
        });
        claimed.expect("run")
    }

    /// Leaves a record whose outcome is unknown.
    async fn leave_unknown(&self, namespace: &str, key: &str) {
        let records = self.records.clone().namespace(namespace);
        let unanswered = async |_: &Attempt| Err::<i64, _>(Error::from(sqlx::Error::PoolClosed));
        let (key, request) = (IdempotencyKey::new("alice", key), Fingerprint::of(["charge"]));
        records.run_leased(&key, &request, unanswered).await.expect_err("the work has failed");
    }
}

impl Database {
    /// Returns the rows that the server has read so far, by a scan of the table of records or by
    /// one of its indexes; on MySQL and MariaDB, the rows of all tables.
    async fn rows_read(&self) -> Option<i64> {
        match self {
            Self::Postgres(pool) => {
                // Each session reports its work about once a second.
                tokio::time::sleep(Duration::from_secs(2)).await;
                let rows = "SELECT (seq_tup_read + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes AS i
                                                     WHERE i.relid = t.relid))::bigint
                              FROM pg_stat_user_tables AS t WHERE relname = 'sqlock_idem'";
                Some(sqlx::query_scalar(rows).fetch_one(pool).await.expect("statistics"))
            }
            Self::MySql(pool) => {
                let status = sqlx::query("SHOW GLOBAL STATUS LIKE 'Handler_read%'");
                let counters = status.fetch_all(pool).await.expect("the status");
                let count = |row: &sqlx::mysql::MySqlRow| row.get::<String, _>(1).parse::<i64>().expect("a number");
                Some(counters.iter().map(count).sum())
            }
            Self::Sqlite(_) => None,
        }
    }
}
