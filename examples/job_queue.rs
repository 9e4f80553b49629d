//! How do several workers share a table of jobs, so that each job is done once, even when a worker
//! dies in the middle?
//!
//! 4 worker processes take jobs with `SKIP LOCKED` and do them in the transaction that has locked
//! them. One worker is killed with `kill -9` while it has jobs: its transaction ends, and the other
//! workers take these jobs.
//!
//! ```text
//! cargo run --example job_queue
//! cargo run --example job_queue -- --without-lock                   # shows jobs done twice
//! DATABASE_URL=postgres://… cargo run --all-features --example job_queue
//! ```
//!
//! This needs jobs whose effects are in the same database. For effects elsewhere, see leases and
//! fencing tokens.

mod shared;

use shared::*;
use sqlock::retry::Retry;
use sqlx::Transaction;

const JOBS: i64 = 60;
const BATCH: u32 = 5;
const WORKERS: [&str; 3] = ["alice", "bob", "carol"];

/// The worker that is killed.
const UNLUCKY: &str = "mallory";

any_database! {
    /// Takes the next jobs that no other worker has, does them, and returns their number.
    async fn take_and_do(tx: &mut Transaction<'_, Db>, locks: &Locks, worker: &str) -> Result<usize, sqlock::Error> {
        let ready = locks.rows_where("sqlock_example_job", "id").skip_locked().limit(BATCH);
        let jobs: Vec<i64> = ready
            .lock(tx, |sql| {
                sql.push("state = 'ready' ORDER BY id");
            })
            .await?;
        work_on(tx, &jobs, worker).await?;
        Ok(jobs.len())
    }

    /// Does the same without a lock: reads jobs, does them, and marks them as done.
    async fn look_and_do(conn: &mut Connection, worker: &str) -> Result<usize, sqlx::Error> {
        let jobs: Vec<i64> = QueryBuilder::<Db>::new("SELECT id FROM sqlock_example_job WHERE state = 'ready' ORDER BY id LIMIT ")
            .push(BATCH)
            .build_query_scalar()
            .fetch_all(&mut *conn)
            .await?;
        work_on(conn, &jobs, worker).await?;
        Ok(jobs.len())
    }

    /// Does the jobs: each adds an entry to the journal, which does not prevent duplicates.
    async fn work_on(conn: &mut Connection, jobs: &[i64], worker: &str) -> Result<(), sqlx::Error> {
        for job in jobs {
            tokio::time::sleep(Duration::from_millis(1)).await; // it takes a while
            QueryBuilder::<Db>::new("INSERT INTO sqlock_example_journal (job, worker) ")
                .push_values([job], |mut row, job| {
                    row.push_bind(job).push_bind(worker);
                })
                .build()
                .execute(&mut *conn)
                .await?;
        }
        if worker == UNLUCKY && !jobs.is_empty() {
            say(&format!("holds {jobs:?}"));
            until_stdin_ends().await;
        }
        for job in jobs {
            QueryBuilder::<Db>::new("UPDATE sqlock_example_job SET state = 'done' WHERE id = ")
                .push_bind(job)
                .build()
                .execute(&mut *conn)
                .await?;
        }
        Ok(())
    }

    /// Runs a worker process until all jobs are done.
    async fn worker(pool: Pool<Db>, name: &str) -> Result<()> {
        let locks = Locks::new(pool.clone());
        all_are_ready().await?;
        let patiently = Retry::new().attempts(u32::MAX).within(Duration::from_secs(60));
        let patiently = patiently.begin_with(begin_with_row_locks::<Db>());
        let mut idle = false;
        loop {
            let done = if asked_for("--without-lock") {
                look_and_do(&mut *pool.acquire().await?, name).await?
            } else {
                patiently.clone().run(&pool, async |tx| take_and_do(tx, &locks, name).await).await?
            };
            if done > 0 {
                continue;
            }
            if count(&pool, "SELECT count(*) FROM sqlock_example_job WHERE state = 'ready'").await? == 0 {
                break;
            }
            // Other workers have the remaining jobs.
            if !std::mem::replace(&mut idle, true) {
                say("idle");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(locks.shutdown().await?)
    }

    async fn count(pool: &Pool<Db>, sql: &'static str) -> Result<i64, sqlx::Error> {
        sqlx::query_scalar(sql).fetch_one(pool).await
    }

    async fn example(pool: Pool<Db>, database: &Database) -> Result<()> {
        if let Some([name]) = arguments().as_deref() {
            return worker(pool, name).await;
        }
        let locks = Locks::new(pool.clone());
        let turn = take_turns(&locks, "job_queue").await?;
        for sql in [
            "DROP TABLE IF EXISTS sqlock_example_job",
            "DROP TABLE IF EXISTS sqlock_example_journal",
            "CREATE TABLE sqlock_example_job (id BIGINT NOT NULL PRIMARY KEY, state VARCHAR(10) NOT NULL)",
            // The database also locks examined rows: with this index it examines only ready jobs.
            "CREATE INDEX sqlock_example_job_state ON sqlock_example_job (state, id)",
            "CREATE TABLE sqlock_example_journal (job BIGINT NOT NULL, worker VARCHAR(20) NOT NULL)",
        ] {
            sqlx::query(sql).execute(&pool).await?;
        }
        QueryBuilder::<Db>::new("INSERT INTO sqlock_example_job (id, state) ")
            .push_values(1..=JOBS, |mut row, job| {
                row.push_bind(job).push("'ready'");
            })
            .build()
            .execute(&pool)
            .await?;

        let mut unlucky = database.conversation(UNLUCKY)?;
        unlucky.begin().await?;
        let held = unlucky.hears("holds ").await?;
        println!("{UNLUCKY} holds the jobs {held}");
        let mut workers = Vec::new();
        for name in WORKERS {
            workers.push(database.conversation(name)?);
        }
        for worker in &mut workers {
            worker.begin().await?;
        }
        // On SQLite a worker with jobs locks all jobs, and the others wait.
        if database.kind() != "sqlite" && !asked_for("--without-lock") {
            for worker in &mut workers {
                worker.hears("idle").await?;
            }
            let done = count(&pool, "SELECT count(*) FROM sqlock_example_journal").await?;
            println!("the others have done {done} jobs, all but those, and find no more");
            if done != JOBS - i64::from(BATCH) {
                return Err(format!("{done} jobs were done while {BATCH} of {JOBS} were held").into());
            }
        }
        unlucky.kill().await?; // with -9
        println!("{UNLUCKY} was killed");
        for worker in workers {
            worker.ends().await?;
        }

        let journal: Vec<(i64, String)> =
            sqlx::query_as("SELECT job, worker FROM sqlock_example_journal ORDER BY job, worker").fetch_all(&pool).await?;
        sqlx::query("DROP TABLE sqlock_example_job").execute(&pool).await?;
        sqlx::query("DROP TABLE sqlock_example_journal").execute(&pool).await?;
        turn.release().await?;
        locks.shutdown().await?;
        check(&journal)
    }
}

/// Prints a line for the parent process.
fn say(line: &str) {
    println!("{line}");
}

/// Prints the jobs of each worker, and checks that each job was done once.
fn check(journal: &[(i64, String)]) -> Result<()> {
    println!();
    for name in WORKERS.into_iter().chain([UNLUCKY]) {
        let done = journal.iter().filter(|(_, worker)| worker == name).count();
        println!("  {name:<8} {} {done}", "█".repeat(done));
    }
    println!();
    let times = |job| journal.iter().filter(|(done, _)| *done == job).count();
    let wrong: Vec<_> =
        (1..=JOBS).filter(|job| times(*job) != 1).map(|job| format!("{job} ({}×)", times(job))).collect();
    if !wrong.is_empty() {
        return Err(format!("not done once: the jobs {}", wrong.join(", ")).into());
    }
    println!("{JOBS} jobs were done, each of them once.");
    Ok(())
}
