//! 100 tickets, sold by 30 workers in 4 processes: every ticket is sold, and none is sold twice.
//!
//! ```text
//! cargo run --example ticket_sale
//! cargo run --example ticket_sale -- --without-lock                 # shows the double sales
//! DATABASE_URL=postgres://… cargo run --all-features --example ticket_sale
//! ```

mod shared;

use shared::*;

const TICKETS: i64 = 100;
const WORKERS: [usize; 4] = [8, 8, 7, 7];

any_database! {
    /// Sells the next ticket. Returns `None` if all are sold.
    async fn sell(pool: &Pool<Db>, locks: &Locks, seller: i64) -> Result<Option<i64>> {
        let lease = locks.lease("ticket_sale").acquire().await?; // waits in the queue
        let mut tx = pool.begin().await?;
        lease.fence(&mut tx).await?; // this transaction cannot commit if another owner got the lease
        let ticket = look_then_sell(&mut tx, seller).await?;
        tx.commit().await?; // sold, whatever becomes of the lease, which is released when it is dropped
        Ok(ticket)
    }

    /// Reads how many tickets are sold, and sells the next one. The caller must have the lock: without
    /// it, two workers that read before either of them writes sell the same ticket.
    async fn look_then_sell(conn: &mut Connection, seller: i64) -> Result<Option<i64>> {
        let sold: i64 = sqlx::query_scalar("SELECT count(*) FROM sqlock_example_sale").fetch_one(&mut *conn).await?;
        if sold >= TICKETS {
            return Ok(None);
        }
        tokio::time::sleep(Duration::from_millis(1)).await; // the customer pays
        QueryBuilder::<Db>::new("INSERT INTO sqlock_example_sale (ticket, seller) ")
            .push_values([(sold + 1, seller)], |mut row, (ticket, seller)| {
                row.push_bind(ticket).push_bind(seller);
            })
            .build()
            .execute(conn)
            .await?;
        Ok(Some(sold + 1))
    }

    async fn sell_without_lock(pool: &Pool<Db>, seller: i64) -> Result<Option<i64>> {
        look_then_sell(&mut *pool.acquire().await?, seller).await
    }

    /// Runs a worker, which serves one customer after the other until all tickets are sold.
    async fn worker(pool: Pool<Db>, locks: Locks, seller: i64) -> Result<()> {
        loop {
            let sold = if asked_for("--without-lock") {
                sell_without_lock(&pool, seller).await?
            } else {
                match sell(&pool, &locks, seller).await {
                    // The process was stopped for too long, and nothing was sold.
                    Err(error) if error.downcast_ref().is_some_and(sqlock::Error::is_lost) => continue,
                    sold => sold?,
                }
            };
            let Some(ticket) = sold else {
                return Ok(());
            };
            let pause = 50 + ticket.unsigned_abs() * 37 % 150; // until the next customer comes in
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
    }

    /// Runs a seller process. Its workers share a pool of 4 connections; waiting workers need none.
    async fn seller(pool: Pool<Db>, seller: i64, workers: usize) -> Result<()> {
        let locks = Locks::new(pool.clone());
        all_are_ready().await?;
        let workers: JoinSet<_> = (0..workers).map(|_| worker(pool.clone(), locks.clone(), seller)).collect();
        workers.join_all().await.into_iter().collect::<Result<()>>()?;
        Ok(locks.shutdown().await?)
    }

    async fn example(pool: Pool<Db>, database: &Database) -> Result<()> {
        if let Some([number, workers]) = arguments().as_deref() {
            return seller(pool, number.parse()?, workers.parse()?).await;
        }
        let locks = Locks::new(pool.clone());
        let turn = take_turns(&locks, "ticket_sale").await?;
        sqlx::query("DROP TABLE IF EXISTS sqlock_example_sale").execute(&pool).await?;
        sqlx::query("CREATE TABLE sqlock_example_sale (ticket BIGINT NOT NULL, seller BIGINT NOT NULL)")
            .execute(&pool)
            .await?;

        let start = Instant::now();
        database.processes((1..).zip(WORKERS).map(|(number, workers)| format!("{number} {workers}"))).await?;
        let took = start.elapsed();

        let sales: Vec<(i64, i64)> =
            sqlx::query_as("SELECT ticket, seller FROM sqlock_example_sale ORDER BY ticket").fetch_all(&pool).await?;
        sqlx::query("DROP TABLE sqlock_example_sale").execute(&pool).await?;
        turn.release().await?;
        locks.shutdown().await?;
        check(&sales, took)
    }
}

/// Prints the seller of each ticket, and checks the result.
fn check(sales: &[(i64, i64)], took: Duration) -> Result<()> {
    println!("The hall. Each seat shows which seller sold it:\n");
    let mut sold_once = 0;
    for ticket in 1..=TICKETS {
        let mut sellers = sales.iter().filter(|(sold, _)| *sold == ticket).map(|(_, seller)| seller.to_string());
        let seat = match (sellers.next(), sellers.next()) {
            (None, _) => "_".to_owned(),
            (Some(seller), None) => {
                sold_once += 1;
                seller
            }
            (Some(_), Some(_)) => "*".to_owned(), // more than once
        };
        print!("  {seat}{}", if ticket % 20 == 0 { "\n" } else { "" });
    }
    println!();
    for (seller, workers) in (1..).zip(WORKERS) {
        let sold = sales.iter().filter(|sale| sale.1 == seller).count();
        println!("  seller {seller}, {workers} workers  {} {sold}", "█".repeat(sold.div_ceil(2)));
    }
    println!();
    if sales.len() == sold_once && sold_once == TICKETS as usize {
        println!("Sold {TICKETS} tickets in {took:.1?}, each of them once.");
        return Ok(());
    }
    println!("Sold {} tickets in {took:.1?} for a hall of {TICKETS} seats; {sold_once} were sold once.", sales.len());
    Err("the hall is oversold: the seats with a * were sold more than once".into())
}
