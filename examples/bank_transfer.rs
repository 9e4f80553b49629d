//! 8 clerks transfer money between accounts at the same time, in opposite directions. The example
//! compares four strategies: row locks on both accounts, version columns, serializable
//! transactions, and conditional updates. How fast is each, how many transactions are run again,
//! and which strategies deadlock?
//!
//! In a deadlock two transactions wait for each other's rows. Row locks and version columns avoid
//! it: they lock or write both rows in one order. Only row locks also need no further run. The
//! conditional updates lock in the direction of the money. (PostgreSQL looks for deadlocks after
//! `deadlock_timeout`, a second, so each deadlock takes that long.)
//!
//! No strategy loses an update: the balances keep their sum, none is negative, and each equals the
//! transfers in the ledger.
//!
//! ```text
//! cargo run --example bank_transfer
//! cargo run --example bank_transfer -- --without-lock               # shows the lost updates
//! DATABASE_URL=postgres://… cargo run --all-features --example bank_transfer
//! ```

mod shared;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use shared::*;
use sqlock::retry::Retry;
use sqlock::version::Versioned;
use sqlx::Transaction;
use tokio::sync::Barrier;

const ACCOUNTS: i64 = 4;
const OPENING: i64 = 100;
const CLERKS: i64 = 8;
const ORDERS: i64 = 25;

/// The time between reading the balances and booking.
const THINKING: Duration = Duration::from_millis(1);

/// The strategies. Each has accounts of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Strategy {
    /// Locks both rows before reading, in one order for both directions.
    RowLocks,
    /// Locks nothing; a transfer that finds a changed version begins again.
    Versions,
    /// Lets the database reject transactions that could not have run one after the other.
    Serializable,
    /// Puts the condition into the UPDATE, which locks one row, and then the other.
    Conditional,
    /// For `--without-lock`.
    Nothing,
}

impl Strategy {
    const ALL: [Self; 4] = [Self::RowLocks, Self::Versions, Self::Serializable, Self::Conditional];

    fn name(self) -> &'static str {
        match self {
            Self::RowLocks => "row locks (rows_of)",
            Self::Versions => "version columns",
            Self::Serializable => "serializable",
            Self::Conditional => "conditional updates",
            Self::Nothing => "nothing",
        }
    }
}

/// An order to a clerk.
#[derive(Clone, Copy)]
struct Order {
    number: i64,
    from: i64,
    to: i64,
    amount: i64,
}

impl Order {
    /// Clerks work in pairs: one transfers from A to B, and the other from B to A.
    fn of(clerk: i64, nth: i64) -> Self {
        let (a, b) = (nth % ACCOUNTS + 1, (nth + 1 + clerk / 2 % (ACCOUNTS - 1)) % ACCOUNTS + 1);
        let (from, to) = if clerk % 2 == 0 { (a, b) } else { (b, a) };
        Self { number: clerk * ORDERS + nth, from, to, amount: 1 + (clerk * 7 + nth * 5) % 40 }
    }
}

any_database! {
    async fn balance(conn: &mut Connection, account: i64) -> Result<i64, sqlx::Error> {
        QueryBuilder::<Db>::new("SELECT balance FROM sqlock_example_account WHERE id = ")
            .push_bind(account)
            .build_query_scalar()
            .fetch_one(conn)
            .await
    }

    /// Writes balances that were computed from an earlier read. Correct only if no other
    /// transaction can write in between.
    async fn set_balance(conn: &mut Connection, account: i64, balance: i64) -> Result<(), sqlx::Error> {
        let mut update = QueryBuilder::<Db>::new("UPDATE sqlock_example_account SET balance = ");
        update.push_bind(balance).push(" WHERE id = ").push_bind(account).build().execute(conn).await?;
        Ok(())
    }

    async fn enter(conn: &mut Connection, order: Order) -> Result<(), sqlx::Error> {
        let Order { number, from, to, amount } = order;
        QueryBuilder::<Db>::new("INSERT INTO sqlock_example_ledger (number, source, target, amount) ")
            .push_values([(number, from, to, amount)], |mut row, (number, from, to, amount)| {
                row.push_bind(number).push_bind(from).push_bind(to).push_bind(amount);
            })
            .build()
            .execute(conn)
            .await?;
        Ok(())
    }

    /// Reads the balances and books. Returns `false` if the balance is too low.
    async fn look_then_book(conn: &mut Connection, order: Order) -> Result<bool, sqlx::Error> {
        let (from, to) = (balance(conn, order.from).await?, balance(conn, order.to).await?);
        tokio::time::sleep(THINKING).await;
        if from < order.amount {
            return Ok(false);
        }
        // An UPDATE locks its row as well, so these are in one order, too.
        let mut bookings = [(order.from, from - order.amount), (order.to, to + order.amount)];
        bookings.sort_unstable();
        for (account, balance) in bookings {
            set_balance(conn, account, balance).await?;
        }
        enter(conn, order).await?;
        Ok(true)
    }

    async fn with_rows_locked(tx: &mut Transaction<'_, Db>, locks: &Locks, order: Order) -> Result<bool, sqlock::Error> {
        locks.rows_of("sqlock_example_account", "id", [order.from, order.to]).lock(tx).await?;
        Ok(look_then_book(tx, order).await?)
    }

    async fn with_versions(tx: &mut Transaction<'_, Db>, order: Order) -> Result<bool, sqlock::Error> {
        let accounts = Versioned::table("sqlock_example_account");
        // The columns in their order: id, version, balance.
        let from = accounts.read::<_, (i64, i64, i64)>(&mut *tx, order.from).await?.ok_or(sqlx::Error::RowNotFound)?;
        let to = accounts.read::<_, (i64, i64, i64)>(&mut *tx, order.to).await?.ok_or(sqlx::Error::RowNotFound)?;
        tokio::time::sleep(THINKING).await;
        if from.value.2 < order.amount {
            return Ok(false);
        }
        let mut bookings = [(order.from, from.version, -order.amount), (order.to, to.version, order.amount)];
        bookings.sort_unstable();
        for (account, version, amount) in bookings {
            let booked = accounts.update(&mut *tx, account, version, |set| {
                set.push("balance = balance + ").push_bind(amount);
            });
            booked.await?;
        }
        enter(tx, order).await?;
        Ok(true)
    }

    async fn with_conditions(tx: &mut Transaction<'_, Db>, order: Order) -> Result<bool, sqlock::Error> {
        tokio::time::sleep(THINKING).await;
        let mut draw = QueryBuilder::<Db>::new("UPDATE sqlock_example_account SET balance = balance - ");
        draw.push_bind(order.amount).push(" WHERE id = ").push_bind(order.from);
        draw.push(" AND balance >= ").push_bind(order.amount);
        if draw.build().execute(&mut **tx).await?.rows_affected() == 0 {
            return Ok(false);
        }
        // The UPDATEs follow the direction of the money: the first shows whether the balance
        // suffices.
        let mut credit = QueryBuilder::<Db>::new("UPDATE sqlock_example_account SET balance = balance + ");
        credit.push_bind(order.amount).push(" WHERE id = ").push_bind(order.to).build().execute(&mut **tx).await?;
        enter(tx, order).await?;
        Ok(true)
    }

    /// How a serializable transaction begins. On SQLite they all are.
    fn begin_serializable() -> &'static str {
        match <Db as sqlx::Database>::NAME {
            "PostgreSQL" => "BEGIN ISOLATION LEVEL SERIALIZABLE",
            // This statement applies to the next transaction only.
            "MySQL" => "SET TRANSACTION ISOLATION LEVEL SERIALIZABLE; BEGIN",
            _ => "BEGIN IMMEDIATE",
        }
    }

    async fn transfer(pool: &Pool<Db>, locks: &Locks, by: Strategy, order: Order, tally: &Tally) -> Result<bool> {
        // Retry::run begins each transaction as its database needs it, and runs it again after a
        // conflict.
        let patiently = Retry::new().attempts(u32::MAX).within(Duration::from_secs(60));
        match by {
            // One attempt: row locks in one order cause no conflicts.
            Strategy::RowLocks => {
                let booked = Retry::new().attempts(1).run(pool, async |tx| {
                    tally.attempt(with_rows_locked(tx, locks, order).await)
                });
                Ok(booked.await?)
            }
            // Also on SQLite, no lock is held while the clerk thinks.
            Strategy::Versions => {
                let booked = patiently.begin_with("BEGIN").run(pool, async |tx| {
                    tally.attempt(with_versions(tx, order).await)
                });
                Ok(booked.await?)
            }
            Strategy::Serializable => {
                let booked = patiently.begin_with(begin_serializable()).run(pool, async |tx| {
                    tally.attempt(look_then_book(tx, order).await.map_err(sqlock::Error::from))
                });
                Ok(booked.await?)
            }
            Strategy::Conditional => {
                let booked = patiently.run(pool, async |tx| tally.attempt(with_conditions(tx, order).await));
                Ok(booked.await?)
            }
            Strategy::Nothing => {
                tally.attempts.fetch_add(1, Ordering::Relaxed);
                Ok(look_then_book(&mut *pool.acquire().await?, order).await?)
            }
        }
    }

    /// Carries out orders, and returns how many were covered.
    async fn clerk(pool: Pool<Db>, locks: Locks, by: Strategy, clerk: i64, tally: Arc<Tally>) -> Result<i64> {
        tally.at_once.wait().await;
        let mut booked = 0;
        for nth in 0..ORDERS {
            booked += i64::from(transfer(&pool, &locks, by, Order::of(clerk, nth), &tally).await?);
        }
        Ok(booked)
    }

    async fn day(pool: &Pool<Db>, locks: &Locks, by: Strategy) -> Result<Day> {
        for sql in [
            "DROP TABLE IF EXISTS sqlock_example_account",
            "DROP TABLE IF EXISTS sqlock_example_ledger",
            "CREATE TABLE sqlock_example_account (id BIGINT NOT NULL PRIMARY KEY, version BIGINT NOT NULL, balance BIGINT NOT NULL)",
            "CREATE TABLE sqlock_example_ledger (number BIGINT NOT NULL PRIMARY KEY, source BIGINT NOT NULL,
                                                 target BIGINT NOT NULL, amount BIGINT NOT NULL)",
        ] {
            sqlx::query(sql).execute(pool).await?;
        }
        for account in 1..=ACCOUNTS {
            Versioned::table("sqlock_example_account")
                .insert(pool, account, &["balance"], |row| {
                    row.push_bind(OPENING);
                })
                .await?;
        }
        let tally = Arc::new(Tally::new());
        let start = Instant::now();
        let clerks: JoinSet<_> =
            (0..CLERKS).map(|number| clerk(pool.clone(), locks.clone(), by, number, Arc::clone(&tally))).collect();
        let booked = clerks.join_all().await.into_iter().sum::<Result<i64>>();
        let booked = booked.map_err(|error| format!("{}: {error}", by.name()))?;
        let took = start.elapsed();
        let balances: Vec<(i64, i64)> =
            sqlx::query_as("SELECT id, balance FROM sqlock_example_account ORDER BY id").fetch_all(pool).await?;
        let ledger: Vec<(i64, i64, i64)> =
            sqlx::query_as("SELECT source, target, amount FROM sqlock_example_ledger").fetch_all(pool).await?;
        sqlx::query("DROP TABLE sqlock_example_account").execute(pool).await?;
        sqlx::query("DROP TABLE sqlock_example_ledger").execute(pool).await?;
        let attempts = i64::from(tally.attempts.load(Ordering::Relaxed));
        let deadlocks = tally.deadlocks.load(Ordering::Relaxed);
        Ok(Day { by, booked, reruns: attempts - CLERKS * ORDERS, deadlocks, took, balances, ledger })
    }

    async fn example(pool: Pool<Db>, _: &Database) -> Result<()> {
        let locks = Locks::new(pool.clone());
        let turn = take_turns(&locks, "bank_transfer").await?;
        let strategies = if asked_for("--without-lock") { vec![Strategy::Nothing] } else { Strategy::ALL.to_vec() };
        let mut days = Vec::new();
        for by in strategies {
            days.push(day(&pool, &locks, by).await?);
        }
        turn.release().await?;
        locks.shutdown().await?;
        check(&days)
    }
}

/// The counters of all clerks.
struct Tally {
    at_once: Barrier,
    attempts: AtomicU32,
    deadlocks: AtomicU32,
}

impl Tally {
    fn new() -> Self {
        Self { at_once: Barrier::new(CLERKS as usize), attempts: AtomicU32::new(0), deadlocks: AtomicU32::new(0) }
    }

    /// Counts the outcome of a transaction.
    fn attempt<T>(&self, went: Result<T, sqlock::Error>) -> Result<T, sqlock::Error> {
        self.attempts.fetch_add(1, Ordering::Relaxed);
        if went.as_ref().is_err_and(is_deadlock) {
            self.deadlocks.fetch_add(1, Ordering::Relaxed);
        }
        went
    }
}

/// Returns whether the error is a deadlock. PostgreSQL has a code for deadlocks, and 40001 for
/// serialization failures; MySQL has 40001 for deadlocks alone.
fn is_deadlock(error: &sqlock::Error) -> bool {
    let sqlock::Error::Database { source: sqlx::Error::Database(error), .. } = error else {
        return false;
    };
    error.code().is_some_and(|code| code == "40P01") || error.message().starts_with("Deadlock")
}

/// The result of a strategy.
struct Day {
    by: Strategy,
    booked: i64,
    reruns: i64,
    deadlocks: u32,
    took: Duration,
    /// The id and the balance of each account.
    balances: Vec<(i64, i64)>,
    /// The source, target and amount of each transfer.
    ledger: Vec<(i64, i64, i64)>,
}

impl Day {
    /// Compares the balances with the ledger.
    fn audit(&self) -> Result<(), String> {
        let total: i64 = self.balances.iter().map(|(_, balance)| balance).sum();
        if total != ACCOUNTS * OPENING {
            return Err(format!("there were {} in all accounts together, now there are {total}", ACCOUNTS * OPENING));
        }
        if self.ledger.len() as i64 != self.booked {
            return Err(format!("{} transfers were booked, the ledger has {}", self.booked, self.ledger.len()));
        }
        for &(account, balance) in &self.balances {
            let moved: i64 = self
                .ledger
                .iter()
                .map(|&(from, to, amount)| i64::from(to == account) * amount - i64::from(from == account) * amount)
                .sum();
            if balance != OPENING + moved {
                return Err(format!("account {account} has {balance}, by the ledger it is {}", OPENING + moved));
            }
            if balance < 0 {
                return Err(format!("account {account} is overdrawn by {}", -balance));
            }
        }
        if self.by == Strategy::RowLocks && (self.reruns, self.deadlocks) != (0, 0) {
            return Err(format!("{} reruns, {} deadlocks, where none can be", self.reruns, self.deadlocks));
        }
        Ok(())
    }
}

/// Prints and checks the results.
fn check(days: &[Day]) -> Result<()> {
    println!("{CLERKS} clerks with {ORDERS} orders each, {ACCOUNTS} accounts, in opposite directions:\n");
    println!("  {:<20} {:>6} {:>12} {:>7} {:>10}", "strategy", "booked", "transfers/s", "reruns", "deadlocks");
    for Day { by, booked, reruns, deadlocks, took, .. } in days {
        let rate = (CLERKS * ORDERS) as f64 / took.as_secs_f64();
        println!("  {:<20} {booked:>6} {rate:>12.0} {reruns:>7} {deadlocks:>10}", by.name());
    }
    println!();
    for day in days {
        day.audit().map_err(|problem| format!("{}: {problem}", day.by.name()))?;
    }
    println!("The books are in order: every balance is what the ledger says, and no money was made or lost.");
    Ok(())
}
