//! Ten buyers want the last item in stock at the same moment: one gets it, and nine find it sold
//! out.
//!
//! ```text
//! cargo run --example stock_of_one
//! cargo run --example stock_of_one -- --without-lock                # shows the overselling
//! DATABASE_URL=mysql://… cargo run --all-features --example stock_of_one
//! ```

mod shared;

use std::sync::Arc;

use shared::*;
use tokio::sync::Barrier;

const BUYERS: usize = 10;

any_database! {
    /// Buys the item. Returns `false` if it is sold out.
    async fn buy(pool: &Pool<Db>, locks: &Locks) -> Result<bool> {
        let lease = locks.lease("stock/last-item").acquire().await?; // waits in the queue
        let mut tx = pool.begin().await?;
        lease.fence(&mut tx).await?; // this transaction cannot commit if another owner got the lease
        let bought = look_then_take(&mut tx).await?;
        tx.commit().await?;
        drop(lease); // released in the background: the item is sold, whatever becomes of the release
        Ok(bought)
    }

    /// Reads the stock, and sells the item if it is there. The caller must have the lock: without it,
    /// all buyers that read before the first sale find the item.
    async fn look_then_take(conn: &mut Connection) -> Result<bool> {
        let stock: i64 = sqlx::query_scalar("SELECT stock FROM sqlock_example_last_item").fetch_one(&mut *conn).await?;
        if stock == 0 {
            return Ok(false);
        }
        tokio::time::sleep(Duration::from_millis(200)).await; // the buyer pays
        sqlx::query("UPDATE sqlock_example_last_item SET stock = stock - 1").execute(conn).await?;
        Ok(true)
    }

    async fn buy_without_lock(pool: &Pool<Db>) -> Result<bool> {
        look_then_take(&mut *pool.acquire().await?).await
    }

    /// Runs the buyers, each with a client of its own, as on different hosts.
    async fn buyer(pool: Pool<Db>, at_once: Arc<Barrier>) -> Result<bool> {
        let locks = Locks::new(pool.clone());
        at_once.wait().await;
        let bought =
            if asked_for("--without-lock") { buy_without_lock(&pool).await? } else { buy(&pool, &locks).await? };
        locks.shutdown().await?;
        Ok(bought)
    }

    async fn example(pool: Pool<Db>, _: &Database) -> Result<()> {
        let locks = Locks::new(pool.clone());
        let turn = take_turns(&locks, "stock_of_one").await?;
        sqlx::query("DROP TABLE IF EXISTS sqlock_example_last_item").execute(&pool).await?;
        sqlx::query("CREATE TABLE sqlock_example_last_item (stock BIGINT NOT NULL)").execute(&pool).await?;
        sqlx::query("INSERT INTO sqlock_example_last_item (stock) VALUES (1)").execute(&pool).await?;

        let at_once = Arc::new(Barrier::new(BUYERS));
        let buyers: Vec<_> =
            (0..BUYERS).map(|_| tokio::spawn(buyer(pool.clone(), Arc::clone(&at_once)))).collect();
        let mut bought = Vec::new();
        for buyer in buyers {
            bought.push(buyer.await??);
        }

        let stock: i64 = sqlx::query_scalar("SELECT stock FROM sqlock_example_last_item").fetch_one(&pool).await?;
        sqlx::query("DROP TABLE sqlock_example_last_item").execute(&pool).await?;
        turn.release().await?;
        locks.shutdown().await?;
        check(&bought, stock)
    }
}

/// Prints and checks the result.
fn check(bought: &[bool], stock: i64) -> Result<()> {
    println!("One item in stock, {BUYERS} buyers at the same moment:\n");
    for (buyer, bought) in (1..).zip(bought) {
        println!("  buyer {buyer:2}  {}", if *bought { "bought it" } else { "sold out, sorry" });
    }
    let buyers = bought.iter().filter(|bought| **bought).count();
    println!("\n{buyers} bought it, {} found it sold out, {stock} left in stock.", BUYERS - buyers);
    if (buyers, stock) != (1, 0) {
        return Err("there was one item for one buyer".into());
    }
    Ok(())
}
