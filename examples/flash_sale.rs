//! 16 buyers buy from a stock of 100 items until it is sold out. The example compares five
//! strategies: reading and then writing oversells; a row lock, a version column, a conditional
//! update and a lease do not.
//!
//! ```text
//! cargo run --example flash_sale
//! DATABASE_URL=postgres://… cargo run --all-features --example flash_sale
//! ```

mod shared;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use shared::*;
use sqlock::retry::Retry;
use sqlock::version::Versioned;
use tokio::sync::Barrier;

const STOCK: i64 = 100;
const BUYERS: usize = 16;

/// The time between reading the stock and buying.
const THINKING: Duration = Duration::from_millis(1);

/// The strategies. Each has a stock of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Strategy {
    Naive,
    RowLock,
    Version,
    Conditional,
    Lease,
}

impl Strategy {
    const ALL: [Self; 5] = [Self::Naive, Self::RowLock, Self::Version, Self::Conditional, Self::Lease];

    fn name(self) -> &'static str {
        match self {
            Self::Naive => "look, then write",
            Self::RowLock => "row lock",
            Self::Version => "version column",
            Self::Conditional => "conditional update",
            Self::Lease => "lease and fence",
        }
    }
}

any_database! {
    /// Reads the stock.
    async fn stock(conn: &mut Connection) -> Result<i64, sqlx::Error> {
        sqlx::query_scalar("SELECT stock FROM sqlock_example_item WHERE id = 1").fetch_one(conn).await
    }

    /// Writes a stock that was computed from an earlier read. Correct only if no other transaction
    /// can write in between.
    async fn set_stock(conn: &mut Connection, stock: i64) -> Result<(), sqlx::Error> {
        let mut update = QueryBuilder::<Db>::new("UPDATE sqlock_example_item SET stock = ");
        update.push_bind(stock).push(" WHERE id = 1").build().execute(conn).await?;
        Ok(())
    }

    async fn look_then_write(conn: &mut Connection) -> Result<bool, sqlx::Error> {
        let stock = stock(conn).await?;
        if stock <= 0 {
            return Ok(false);
        }
        tokio::time::sleep(THINKING).await;
        set_stock(conn, stock - 1).await?;
        Ok(true)
    }

    /// Sells one item. Returns `false` if it is sold out.
    async fn sell(pool: &Pool<Db>, locks: &Locks, by: Strategy, attempts: &AtomicU32) -> Result<bool> {
        // Retry::run begins each transaction as its database needs it, and runs it again after a
        // conflict.
        let patiently = Retry::new().attempts(u32::MAX).within(Duration::from_secs(60));
        match by {
            Strategy::Naive => {
                attempts.fetch_add(1, Ordering::Relaxed);
                Ok(look_then_write(&mut *pool.acquire().await?).await?)
            }
            // On SQLite, BEGIN IMMEDIATE polls for the write lock every 1 to 100 ms. A pool of one
            // connection for writes would be faster, because its waiters wait in the pool instead.
            Strategy::RowLock => {
                let sold = patiently.run(pool, async |tx| {
                    attempts.fetch_add(1, Ordering::Relaxed);
                    locks.row_of("sqlock_example_item", "id", 1_i64).lock(tx).await?;
                    Ok::<_, sqlock::Error>(look_then_write(&mut *tx).await?)
                });
                Ok(sold.await?)
            }
            Strategy::Version => {
                let items = Versioned::table("sqlock_example_item");
                let sold = patiently.begin_with("BEGIN").run(pool, async |tx| {
                    attempts.fetch_add(1, Ordering::Relaxed);
                    let item = items.read::<_, (i64, i64, i64)>(&mut *tx, 1_i64).await?.ok_or(sqlx::Error::RowNotFound)?;
                    let (_, _, stock) = item.value;
                    if stock == 0 {
                        return Ok(false);
                    }
                    tokio::time::sleep(THINKING).await;
                    let update = items.update(&mut *tx, 1_i64, item.version, |set| {
                        set.push("stock = ").push_bind(stock - 1);
                    });
                    update.await?;
                    Ok::<_, sqlock::Error>(true)
                });
                Ok(sold.await?)
            }
            Strategy::Conditional => {
                attempts.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(THINKING).await;
                let sql = "UPDATE sqlock_example_item SET stock = stock - 1 WHERE id = 1 AND stock > 0";
                Ok(sqlx::query(sql).execute(pool).await?.rows_affected() == 1)
            }
            Strategy::Lease => {
                attempts.fetch_add(1, Ordering::Relaxed);
                let lease = locks.lease("flash_sale/item").acquire().await?; // waits its turn
                let mut tx = pool.begin().await?;
                lease.fence(&mut tx).await?;
                let sold = look_then_write(&mut tx).await?;
                tx.commit().await?;
                drop(lease); // released in the background: it is sold, whatever becomes of the release
                Ok(sold)
            }
        }
    }

    /// Buys until it is sold out, and returns the number of items.
    async fn buyer(pool: Pool<Db>, locks: Locks, by: Strategy, tally: Arc<Tally>) -> Result<i64> {
        tally.at_once.wait().await;
        let mut bought = 0;
        while sell(&pool, &locks, by, &tally.attempts).await? {
            bought += 1;
        }
        Ok(bought)
    }

    async fn sale(pool: &Pool<Db>, locks: &Locks, by: Strategy) -> Result<Sale> {
        sqlx::query("DROP TABLE IF EXISTS sqlock_example_item").execute(pool).await?;
        sqlx::query(
            "CREATE TABLE sqlock_example_item (id BIGINT NOT NULL PRIMARY KEY, version BIGINT NOT NULL, stock BIGINT NOT NULL)",
        )
        .execute(pool)
        .await?;
        Versioned::table("sqlock_example_item")
            .insert(pool, 1_i64, &["stock"], |row| {
                row.push_bind(STOCK);
            })
            .await?;
        let tally = Arc::new(Tally { at_once: Barrier::new(BUYERS), attempts: AtomicU32::new(0) });
        let start = Instant::now();
        let buyers: JoinSet<_> =
            (0..BUYERS).map(|_| buyer(pool.clone(), locks.clone(), by, Arc::clone(&tally))).collect();
        let sold = buyers.join_all().await.into_iter().sum::<Result<i64>>()?;
        let took = start.elapsed();
        let left = stock(&mut *pool.acquire().await?).await?;
        sqlx::query("DROP TABLE sqlock_example_item").execute(pool).await?;
        // All attempts but the sales, and the last one of each buyer, which finds no stock.
        let attempts = i64::from(tally.attempts.load(Ordering::Relaxed));
        let retries = (attempts - sold - BUYERS as i64).max(0);
        Ok(Sale { by, sold, left, retries, took })
    }

    async fn example(pool: Pool<Db>, _: &Database) -> Result<()> {
        let locks = Locks::new(pool.clone());
        let turn = take_turns(&locks, "flash_sale").await?;
        let mut sales = Vec::new();
        for by in Strategy::ALL {
            sales.push(sale(&pool, &locks, by).await?);
        }
        turn.release().await?;
        locks.shutdown().await?;
        check(&sales)
    }
}

/// The counters of all buyers.
struct Tally {
    at_once: Barrier,
    attempts: AtomicU32,
}

/// The result of a strategy.
struct Sale {
    by: Strategy,
    sold: i64,
    /// The stock in the table after the sale.
    left: i64,
    retries: i64,
    took: Duration,
}

/// Prints and checks the results.
fn check(sales: &[Sale]) -> Result<()> {
    println!("{STOCK} items in stock, {BUYERS} buyers who come back until they are sold out:\n");
    println!("  {:<20} {:>6} {:>9} {:>8} {:>8}", "strategy", "sold", "oversold", "sales/s", "retries");
    for sale in sales {
        let rate = sale.sold as f64 / sale.took.as_secs_f64();
        let oversold = sale.sold - STOCK;
        println!("  {:<20} {:>6} {oversold:>9} {rate:>8.0} {:>8}", sale.by.name(), sale.sold, sale.retries);
    }
    println!();
    for sale in sales.iter().filter(|sale| sale.by != Strategy::Naive) {
        if (sale.sold, sale.left) != (STOCK, 0) {
            return Err(format!("{}: {} sold of {STOCK}, {} left", sale.by.name(), sale.sold, sale.left).into());
        }
    }
    let oversold: i64 = sales.iter().map(|sale| sale.sold - STOCK).sum();
    match oversold {
        0 => println!("No strategy sold what was not there. (Reading and then writing can: here no two buyers met.)"),
        _ => println!("Reading and then writing sold what was not there: {oversold} items too many."),
    }
    Ok(())
}
