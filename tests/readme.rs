//! The Rust examples of the README. Each stands here word for word, inside a function that runs it
//! on SQLite, so that the README itself has no lines that only the compiler needs.
#![allow(clippy::expect_used, clippy::unwrap_used)]

use sqlx::SqlitePool;

const README: &str = include_str!("../README.md");
const THIS_FILE: &str = include_str!("readme.rs");

type Result = std::result::Result<(), Box<dyn std::error::Error>>;

#[test]
fn every_rust_block_is_run_by_this_file() {
    let this_file = unindented(THIS_FILE);
    let blocks: Vec<&str> = README.split("\n```rust\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    assert_eq!(blocks.len(), README.matches("```rust").count(), "a block says more than `rust` on its first line");
    assert_eq!(blocks.len(), 4);
    for block in blocks {
        assert!(
            this_file.contains(&unindented(block)),
            "tests/readme.rs does not run this block of the README:\n{block}"
        );
    }
}

fn unindented(text: &str) -> String {
    text.lines().map(|line| format!("{}\n", line.trim_start())).collect()
}

#[tokio::test]
async fn first_example_writes_in_a_fenced_transaction() -> Result {
    let directory = tempfile::tempdir()?;
    let file = directory.path().join("app.db");
    let pool = connect(&file, "CREATE TABLE invoice (id INTEGER PRIMARY KEY, reminded INTEGER)").await;
    sqlx::query("INSERT INTO invoice VALUES (42, 0)").execute(&pool).await?;
    // The example names the file without a directory. No other test here looks at the current one.
    std::env::set_current_dir(directory.path())?;
    remind().await?;
    let reminded: i64 = sqlx::query_scalar("SELECT reminded FROM invoice").fetch_one(&pool).await?;
    assert_eq!(reminded, 1);
    Ok(())
}

#[rustfmt::skip]
async fn remind() -> Result {
    use sqlock::Locks;
    use std::time::Duration;

    let pool = sqlx::SqlitePool::connect("sqlite://app.db?mode=rwc").await?;  // or a PgPool, a MySqlPool
    let locks = Locks::new(pool.clone());
    locks.migrate().await?;                  // creates the tables of sqlock; your migrations are unaffected

    // Waits in a queue. The lease is a row with an expiry, renewed until it is released or dropped.
    let lease = locks.lease("invoice/42").ttl(Duration::from_secs(30)).acquire().await?;

    let mut tx = pool.begin().await?;
    lease.fence(&mut tx).await?;             // this transaction cannot commit if another owner got the lease
    sqlx::query("UPDATE invoice SET reminded = 1 WHERE id = 42").execute(&mut *tx).await?;
    tx.commit().await?;

    lease.release().await?;                  // Ok: it was held to the end. Err(Lost): it was not.
    Ok(())
}

#[tokio::test]
async fn vocabulary_example_leaves_every_name_free() -> Result {
    let directory = tempfile::tempdir()?;
    let pool = connect(&directory.path().join("app.db"), "").await;
    let locks = sqlock::Locks::new(pool);
    locks.migrate().await?;
    take_in_every_way(locks.clone()).await?;
    for name in ["invoice/42", "invoice/43", "report/daily"] {
        locks.lease(name).acquire().await?.release().await?;
    }
    Ok(())
}

async fn build_report() -> String {
    "the report".into()
}

#[rustfmt::skip]
async fn take_in_every_way(locks: sqlock::Locks) -> sqlock::Result<()> {
    use std::time::Duration;

    let Some(lease) = locks.lease("invoice/42").try_acquire().await? else {
        return Ok(());                       // another client holds it: contention is not an error
    };
    lease.token();                           // a fencing token: greater than the token of every earlier holder
    lease.is_held();                         // reads a local clock, no I/O: false before another owner can get the lease
    tokio::select! {
        cause = lease.lost() => println!("lost: {cause}"),
        report = build_report() => println!("{report}"),
    }

    let lease = locks.lease("invoice/43").wait(Duration::from_secs(5)).acquire().await?;  // Err(Timeout) after 5 s
    drop(lease);                             // dropping releases too, in the background; `locks.shutdown().await` waits for it

    // The work is dropped as soon as the lease is lost.
    let report = locks.lease("report/daily").run(async |_lease| build_report().await).await?;
    assert_eq!(report, "the report");
    Ok(())
}

#[tokio::test]
async fn transaction_example_updates_one_version() -> Result {
    let directory = tempfile::tempdir()?;
    let schema = "CREATE TABLE accounts (id INTEGER PRIMARY KEY, version INTEGER NOT NULL, balance INTEGER NOT NULL)";
    let pool = connect(&directory.path().join("app.db"), schema).await;
    sqlx::query("INSERT INTO accounts VALUES (3, 1, 100), (7, 1, 100)").execute(&pool).await?;
    let locks = sqlock::Locks::new(pool.clone());
    locks.migrate().await?;
    lock_and_update(pool.clone(), locks).await?;
    let rows: Vec<(i64, i64, i64)> = sqlx::query_as("SELECT * FROM accounts ORDER BY id").fetch_all(&pool).await?;
    assert_eq!(rows, [(3, 1, 100), (7, 2, 95)]);
    Ok(())
}

#[rustfmt::skip]
async fn lock_and_update(pool: SqlitePool, locks: sqlock::Locks) -> Result {
    use sqlock::Error;
    use sqlock::retry::Retry;
    use sqlock::version::Versioned;

    // Locks both rows in the order of their keys: opposite transfers do not deadlock.
    let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?; // on SQLite; elsewhere pool.begin()
    locks.rows_of("accounts", "id", [7, 3]).lock(&mut tx).await?;
    // … read, decide, write …
    tx.commit().await?;

    // Optimistic: nothing is locked, and a late writer reads and writes again.
    let accounts = Versioned::table("accounts");
    Retry::new()
        .run(&pool, async |tx| {
            let read = accounts.read::<_, (i64, i64, i64)>(&mut *tx, 7).await?.expect("an account");
            accounts.update(&mut *tx, 7, read.version, |set| {
                set.push("balance = ").push_bind(read.value.2 - 5);
            }).await?;
            Ok::<_, Error>(())
        })
        .await?;
    Ok(())
}

#[tokio::test]
async fn charge_example_charges_once_when_run_twice() -> Result {
    let directory = tempfile::tempdir()?;
    let pool = connect(&directory.path().join("app.db"), "CREATE TABLE charge (customer TEXT, cents INTEGER)").await;
    let locks = sqlock::Locks::new(pool.clone());
    locks.migrate().await?;
    charge(pool.clone(), locks.clone()).await?;
    charge(pool.clone(), locks).await?;
    let charges: Vec<(String, i64)> = sqlx::query_as("SELECT * FROM charge").fetch_all(&pool).await?;
    assert_eq!(charges, [("alice".to_owned(), 500)]);
    Ok(())
}

#[rustfmt::skip]
async fn charge(pool: SqlitePool, locks: sqlock::Locks) -> Result {
    use sqlock::Error;
    use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome};

    let payments = Idempotency::new(&locks).namespace("payments");
    let key = IdempotencyKey::new("alice", "order-17");          // the principal, and the key that the client sent
    let request = Fingerprint::of(["charge", "500", "EUR"]);     // the request
    let outcome = payments
        .run(&pool, &key, &request, async |tx| {
            sqlx::query("INSERT INTO charge (customer, cents) VALUES ('alice', 500)").execute(&mut **tx).await?;
            Ok::<_, Error>("receipt 4711".to_owned())
        })
        .await?;
    match outcome {
        Outcome::New(receipt) | Outcome::Replay(receipt) => println!("{receipt}"), // the same receipt for every repetition
        Outcome::InProgress => println!("try again later"),           // or payments.wait(duration)
        Outcome::Mismatch => println!("that key was used for something else"),
        other => println!("{other:?}"),
    }
    Ok(())
}

/// A pool on a new file with this table in it.
async fn connect(file: &std::path::Path, schema: &str) -> SqlitePool {
    let pool = SqlitePool::connect(&format!("sqlite://{}?mode=rwc", file.display())).await.expect("a file");
    sqlx::raw_sql(sqlx::AssertSqlSafe(schema)).execute(&pool).await.expect("a table");
    pool
}
