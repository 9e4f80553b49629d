//! Every host starts a nightly job, in case one host is down: one instance runs it, and the others
//! skip it.
//!
//! In the first night, two instances start at the same moment: the lease is held when the second
//! one tries. In the second night the clock of one host is late, and the job has ended before that
//! host starts it. The lease is released by then, and the late host skips the job because of
//! `hold_at_least`.
//!
//! ```text
//! cargo run --example nightly_job
//! cargo run --example nightly_job -- --without-hold                 # shows the second run
//! DATABASE_URL=postgres://… cargo run --all-features --example nightly_job
//! ```

mod shared;

use shared::*;

const JOB: &str = "nightly_job/report";

any_database! {
    /// Runs on every host at 2 o'clock.
    async fn instance(pool: Pool<Db>, host: &str) -> Result<()> {
        let locks = Locks::new(pool.clone());
        all_are_ready().await?;
        let mut request = locks.lease(JOB).label(format!("host {host}"));
        if !asked_for("--without-hold") {
            // Longer than the clocks of the hosts differ, shorter than the time until the next run.
            request = request.hold_at_least(Duration::from_secs(60));
        }
        let Some(lease) = request.try_acquire().await? else {
            println!("  {host} skips: {}", who_has_it(&locks).await?);
            return Ok(locks.shutdown().await?);
        };
        println!("  {host} runs the report");
        tokio::time::sleep(Duration::from_millis(300)).await; // the work
        let mut tx = pool.begin().await?;
        lease.fence(&mut tx).await?;
        sqlx::query("UPDATE sqlock_example_report SET sent = sent + 1").execute(&mut *tx).await?;
        tx.commit().await?;
        drop(lease); // released by the shutdown: the report is sent, whatever becomes of the release
        Ok(locks.shutdown().await?)
    }

    async fn who_has_it(locks: &Locks) -> Result<String> {
        Ok(match locks.inspect(JOB).await? {
            Some(lease) if lease.holds > 0 => format!("{} is at it", lease.label),
            Some(lease) => format!("{} has done it, and keeps the name for {:.0?}", lease.label, lease.remaining),
            None => "another host has just done it".to_owned(),
        })
    }

    /// Lets a day pass, after which the name is free. The example evicts the holder, as an operator
    /// does, to save the wait.
    async fn a_day_passes(pool: &Pool<Db>, locks: &Locks) -> Result<()> {
        if let Some(kept) = locks.inspect(JOB).await? {
            locks.evict(JOB, kept.token).await?;
        }
        sqlx::query("UPDATE sqlock_example_report SET sent = 0").execute(pool).await?;
        Ok(())
    }

    async fn sent(pool: &Pool<Db>) -> Result<i64> {
        Ok(sqlx::query_scalar("SELECT sent FROM sqlock_example_report").fetch_one(pool).await?)
    }

    async fn example(pool: Pool<Db>, database: &Database) -> Result<()> {
        if let Some([host]) = arguments().as_deref() {
            return instance(pool, host).await;
        }
        let locks = Locks::new(pool.clone());
        let turn = take_turns(&locks, "nightly_job").await?;
        sqlx::query("DROP TABLE IF EXISTS sqlock_example_report").execute(&pool).await?;
        sqlx::query("CREATE TABLE sqlock_example_report (sent BIGINT NOT NULL)").execute(&pool).await?;
        sqlx::query("INSERT INTO sqlock_example_report (sent) VALUES (0)").execute(&pool).await?;

        a_day_passes(&pool, &locks).await?; // in case an earlier run of this example was killed
        println!("First night. Both hosts start the job at the same moment:");
        database.processes(["alpha".into(), "beta".into()]).await?;
        let first_night = sent(&pool).await?;

        a_day_passes(&pool, &locks).await?;
        println!("\nSecond night. The clock of beta is late; alpha has finished when beta starts:");
        database.processes(["alpha".into()]).await?;
        database.processes(["beta".into()]).await?;
        let second_night = sent(&pool).await?;

        a_day_passes(&pool, &locks).await?;
        sqlx::query("DROP TABLE sqlock_example_report").execute(&pool).await?;
        turn.release().await?;
        locks.shutdown().await?;
        println!("\nReports sent: {first_night} in the first night, {second_night} in the second.");
        if (first_night, second_night) != (1, 1) {
            return Err("there should have been one report a night".into());
        }
        Ok(())
    }
}
