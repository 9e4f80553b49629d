//! Many processes and tasks on one name, with and without faults; a checker reads the histories
//! that they record.
//!
//! Promises: 1, 7.

use std::time::Duration;

use sqlock::Locks;
use sqlx::Pool;
use tokio::time::{Instant, timeout};

use crate::support::history::{Event, History, Op, Residue, Rules};
use crate::support::server::Server;
use crate::support::worker::{Guarded, Worker};
use crate::support::{Database, SLACK, SOON, TestDatabase, fresh, fresh_on, query_processes};
use crate::{DATABASE, Sql};

/// How long a grant to a process that does not confirm it keeps the name.
const UNCONFIRMED: Duration = Duration::from_secs(3);

const PROCESSES: usize = 4;
const TASKS: usize = 16;
const CYCLES: usize = 6;
const NAME: &str = "a";

#[tokio::test]
async fn storm_of_processes_keeps_mutual_exclusion() {
    // A separate server, whose deadlocks are those of the storm.
    let server = DATABASE.server().map(Server::start);
    let db = match &server {
        Some(server) => fresh_on(&server.url()).await,
        None => fresh().await,
    };
    let guarded = Guarded::create(&db, &[NAME]).await;
    let locks = db.locks().await;
    let deadlocks = deadlocks(guarded.pool()).await;

    let record = tempfile::tempdir().expect("a temporary directory");
    let mut workers = storm(&db, &record, CYCLES, Duration::from_secs(60));
    for worker in &mut workers {
        assert_eq!(end(worker).await, "done 0");
    }
    drop(workers);

    let mut history = guarded.history(record.path(), NAME).await;
    history.residue = residue(&locks, guarded.pool(), Duration::ZERO).await;
    history.assert_clean(&Rules { client_exclusion: true, liveness: Some(UNCONFIRMED + SLACK) });
    assert_eq!(history.counters[NAME], (PROCESSES * TASKS * CYCLES) as u64);
    assert!(contended(&history) > history.audit.len() / 4, "only {} grants had a rival", contended(&history));
    assert_eq!(self::deadlocks(guarded.pool()).await, deadlocks);
}

#[tokio::test]
async fn storm_with_killed_holders_breaks_no_promise() {
    const TTL: Duration = Duration::from_millis(1500);
    let db = fresh().await;
    let guarded = Guarded::create(&db, &[NAME]).await;
    let locks = db.locks().await;

    let record = tempfile::tempdir().expect("a temporary directory");
    let mut workers = storm(&db, &record, CYCLES, TTL);
    written(&guarded, 20, &mut workers).await;
    // The current holder.
    let victim = stop_the_holder(&locks, &workers).await;
    workers[victim].kill();
    workers.remove(victim);
    let at_the_kill = guarded.value(NAME).await;
    written(&guarded, at_the_kill + 20, &mut workers).await;
    let sleeper = stop_the_holder(&locks, &workers).await;
    tokio::time::sleep(TTL * 2).await;
    workers[sleeper].resume();
    let mut lost = 0;
    for worker in &mut workers {
        let answer = end(worker).await;
        let its: usize =
            answer.strip_prefix("done ").and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("{answer}"));
        lost += its;
    }
    drop(workers);

    let mut history = guarded.history(record.path(), NAME).await;
    history.residue = residue(&locks, guarded.pool(), TTL).await;
    history.assert_clean(&Rules { client_exclusion: false, liveness: Some(TTL + UNCONFIRMED + SLACK) });
    let due = (PROCESSES - 1) * TASKS * CYCLES - lost;
    assert!(history.audit.len() >= due, "{} of {due}", history.audit.len());
}

/// Starts the processes together.
fn storm(db: &TestDatabase, record: &tempfile::TempDir, cycles: usize, ttl: Duration) -> Vec<Worker> {
    let mut workers: Vec<Worker> = (0..PROCESSES).map(|_| Worker::start(&db.url)).collect();
    let dir = record.path().display();
    for worker in &mut workers {
        worker.tell(&format!("storm {NAME} {TASKS} {cycles} {dir} {}", ttl.as_millis()));
    }
    workers
}

/// Waits for the end of a process in the storm: a few seconds, or many on a busy machine.
async fn end(worker: &mut Worker) -> String {
    timeout(SOON * 4, worker.answer_some_time()).await.expect("the storm ends")
}

/// Waits until the counter has reached a value, or fails with the answers of the processes.
async fn written(guarded: &Guarded, value: i64, workers: &mut [Worker]) {
    let start = Instant::now();
    while guarded.value(NAME).await < value {
        if start.elapsed() > SOON * 4 {
            let mut said = Vec::new();
            for worker in workers {
                said.push(timeout(Duration::from_millis(100), worker.answer_some_time()).await.ok());
            }
            panic!("the storm does not get on: {} of {value}, {said:?}", guarded.value(NAME).await);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Stops a process that holds the name, and returns which.
async fn stop_the_holder(locks: &Locks, workers: &[Worker]) -> usize {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < SOON, "nobody holds for long enough to be stopped");
        let Some(worker) = holder(locks, workers).await else { continue };
        workers[worker].stop();
        // Statements in flight finish soon. A process that still holds the name then keeps it while
        // it is stopped. (If no answer comes, it was stopped while it had locked the whole SQLite
        // file, which would end the storm.)
        tokio::time::sleep(Duration::from_millis(20)).await;
        if let Ok(holder) = timeout(Duration::from_secs(1), holder(locks, workers)).await
            && holder == Some(worker)
        {
            return worker;
        }
        workers[worker].resume();
    }
}

async fn holder(locks: &Locks, workers: &[Worker]) -> Option<usize> {
    let info = locks.inspect(NAME).await.expect("inspect")?;
    let pid: i32 = info.holder.rsplit('/').next()?.parse().ok()?;
    workers.iter().position(|worker| worker.pid().as_raw_pid() == pid)
}

/// The number of grants during which a request of another process waited.
fn contended(history: &History) -> usize {
    let grants: Vec<&Event> = history.events.iter().filter(|e| e.op == Op::Acquire).collect();
    let has_rival = |grant: &&&Event| {
        let at = grant.return_ns;
        grants.iter().any(|rival| rival.proc != grant.proc && rival.invoke_ns < at && at < rival.return_ns)
    };
    grants.iter().filter(has_rival).count()
}

/// Returns the rows that are left when all clients have ended, and the leases of killed ones have
/// expired.
async fn residue(locks: &Locks, pool: &Pool<Sql>, ttl: Duration) -> Residue {
    let patience = Instant::now() + ttl + Duration::from_secs(10);
    loop {
        let live_leases = locks.list("").await.expect("list").len() as u64;
        let residue = Residue { live_leases, open_transactions: open_transactions(pool).await };
        if residue == Residue::default() || Instant::now() > patience {
            return residue;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns the number of other open transactions in this database.
async fn open_transactions(pool: &Pool<Sql>) -> u64 {
    let sql = match DATABASE {
        Database::Postgres => {
            "SELECT count(DISTINCT l.pid) FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
               JOIN pg_namespace AS n ON n.oid = c.relnamespace
              WHERE n.nspname = current_schema() AND l.pid <> pg_backend_pid()"
        }
        Database::MySql | Database::MariaDb => {
            "SELECT count(*) FROM information_schema.innodb_trx AS t
               JOIN information_schema.processlist AS p ON p.id = t.trx_mysql_thread_id
              WHERE p.db = DATABASE() AND p.id <> CONNECTION_ID()"
        }
        Database::Sqlite => {
            let mut conn = pool.acquire().await.expect("a connection");
            let alone = sqlx::raw_sql("PRAGMA busy_timeout = 0; BEGIN EXCLUSIVE; ROLLBACK").execute(&mut *conn).await;
            return u64::from(alone.is_err());
        }
    };
    let count = query_processes(async || sqlx::query_scalar::<Sql, i64>(sql).fetch_one(pool).await).await;
    count.unsigned_abs()
}

/// Returns the number of deadlocks that the server has counted. SQLite has none.
async fn deadlocks(pool: &Pool<Sql>) -> i64 {
    let sql = match DATABASE {
        Database::Postgres => "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()",
        Database::MySql | Database::MariaDb => {
            "SELECT CAST(count AS SIGNED) FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'"
        }
        Database::Sqlite => return 0,
    };
    sqlx::query_scalar(sql).fetch_one(pool).await.expect("a count")
}
