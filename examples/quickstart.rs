//! The example of the README, complete.
//!
//! ```text
//! cargo run --example quickstart
//! DATABASE_URL=postgres://… cargo run --all-features --example quickstart
//! ```

mod shared;

use shared::*;

any_database! {
    async fn example(pool: Pool<Db>, _: &Database) -> Result<()> {
        let locks = Locks::new(pool.clone());
        locks.migrate().await?; // creates the tables of sqlock; your migrations are unaffected
        let turn = prepare(&pool, &locks).await?;

        // Waits in the queue. The lease is renewed in the background until it is released or
        // dropped.
        let lease = locks.lease("invoice/42").ttl(Duration::from_secs(30)).acquire().await?;
        println!("We hold {}, with the fencing token {}.", lease.name(), lease.token());

        // Another client, which does not wait. Contention is not an error.
        let elsewhere = Locks::new(pool.clone());
        if elsewhere.lease("invoice/42").try_acquire().await?.is_some() {
            return Err("two hold the name at the same time".into());
        }
        println!("Another client finds it taken.");

        let mut tx = pool.begin().await?;
        lease.fence(&mut tx).await?; // this transaction cannot commit if another owner got the lease
        sqlx::query("UPDATE sqlock_example_invoice SET reminders = reminders + 1").execute(&mut *tx).await?;
        tx.commit().await?;
        println!("The reminder was written in a fenced transaction.");

        let token = lease.token();
        lease.release().await?; // Ok: it was held to the end. Err(Lost): it was not.
        println!("Released; it was held to the end.");

        // Or let sqlock hold the lease around the work, which is dropped when the lease is lost.
        let next = elsewhere.lease("invoice/42").run(async |lease| lease.token()).await?;
        println!("The other client had its turn, with the greater token {next}.");

        let reminders: i64 =
            sqlx::query_scalar("SELECT reminders FROM sqlock_example_invoice").fetch_one(&pool).await?;
        if reminders != 1 || next <= token {
            return Err("that is not what was promised".into());
        }
        clean_up(&pool, turn).await?;
        elsewhere.shutdown().await?;
        Ok(locks.shutdown().await?)
    }

    async fn prepare(pool: &Pool<Db>, locks: &Locks) -> Result<Lease> {
        let turn = take_turns(locks, "quickstart").await?;
        sqlx::query("DROP TABLE IF EXISTS sqlock_example_invoice").execute(pool).await?;
        sqlx::query("CREATE TABLE sqlock_example_invoice (reminders BIGINT NOT NULL)").execute(pool).await?;
        sqlx::query("INSERT INTO sqlock_example_invoice (reminders) VALUES (0)").execute(pool).await?;
        Ok(turn)
    }

    async fn clean_up(pool: &Pool<Db>, turn: Lease) -> Result<()> {
        sqlx::query("DROP TABLE sqlock_example_invoice").execute(pool).await?;
        Ok(turn.release().await?)
    }
}
