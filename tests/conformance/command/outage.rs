//! `-w` bounds a whole wait, both for the name and for an unreachable database. On SQLite, another
//! process holds the write lock of the file instead.

use std::time::{Duration, Instant};

use crate::DATABASE;
use crate::support::Database;
use crate::support::command_fixture::CommandFixture;

/// A command that reports its start, and ends on an order.
const OBEDIENT: &str = r#"echo up >&3; read go <"$ORDERS"; echo "$go" >&3"#;

/// A TTL within which no test ends.
const LONG: [&str; 2] = ["--ttl", "10m"];

/// Ends a wait during which the database became unavailable. A SQLite file can still be read, and
/// shows the holder.
fn ends_with(code: i32) -> bool {
    code == 69 || (code == 75 && DATABASE == Database::Sqlite)
}

#[tokio::test]
async fn timeout_bounds_wait_cut_off_from_database() {
    let mut fixture = CommandFixture::with_proxy().await;
    let holder = fixture.start_beside(&[LONG[0], LONG[1], "a"], OBEDIENT).up().await;
    let waiter = fixture.start(&[LONG[0], LONG[1], "-w", "8s", "a"], "echo it ran");
    waiter.stderr.shows("waiting for").await;
    fixture.cut().await;
    let ended = waiter.end().await;
    assert!(ends_with(ended.code()), "{}: {}", ended.code(), ended.stderr);
    assert_eq!(ended.stdout, "");
    fixture.mend().await;
    holder.order("go");
    holder.end().await.expect(0);
}

/// The command ended under a lease that was held, so its exit code counts.
#[tokio::test]
async fn outage_after_command_end_keeps_its_exit_code() {
    let mut fixture = CommandFixture::with_server().await;
    let holder = fixture.start(&["--ttl", "5", "a"], &format!("{OBEDIENT}; exit 7")).up().await;
    fixture.renewed("a").await;
    fixture.freeze().await;
    holder.order("go");
    let ended = holder.end().await.expect(7);
    assert!(ended.stderr.contains("cannot release the lease on \"a\""), "{}", ended.stderr);
    fixture.thaw().await;
}

#[tokio::test]
async fn timeout_bounds_wait_after_server_is_killed() {
    let mut fixture = CommandFixture::with_server().await;
    let _holder = fixture.start(&[LONG[0], LONG[1], "a"], OBEDIENT).up().await;
    let waiter = fixture.start(&[LONG[0], LONG[1], "-w", "8s", "a"], "echo it ran");
    waiter.stderr.shows("waiting for").await;
    fixture.crash().await;
    let ended = waiter.end().await;
    assert!(ends_with(ended.code()), "{}: {}", ended.code(), ended.stderr);
    assert_eq!(ended.stdout, "");
}

#[tokio::test]
async fn wait_with_timeout_survives_database_outage() {
    let mut fixture = CommandFixture::with_server().await;
    fixture.crash().await;
    let waiter = fixture.start(&["-w", "10m", "a"], OBEDIENT);
    waiter.stderr.shows("still waiting").await;
    fixture.restart();
    let waiter = waiter.up().await;
    waiter.order("go");
    waiter.end().await.expect(0);
}

#[tokio::test]
async fn timeout_runs_out_before_unreachable_is_reported() {
    const WAIT: Duration = Duration::from_secs(7);
    let mut fixture = CommandFixture::with_server().await;
    fixture.crash().await;
    let start = Instant::now();
    let ended = fixture.start(&["-w", "7s", "a"], "echo it ran").end().await.expect(69);
    assert!(start.elapsed() >= WAIT, "it gave up after {:?}: {}", start.elapsed(), ended.stderr);
    assert_eq!(ended.stdout, "");
}

/// As during VACUUM FULL or ALTER TABLE.
#[tokio::test]
async fn wait_with_timeout_survives_a_locked_table() {
    let (lock, unlock) = match DATABASE {
        Database::Postgres => ("BEGIN; LOCK TABLE sqlock_lease IN ACCESS EXCLUSIVE MODE", "ROLLBACK"),
        Database::MySql | Database::MariaDb => ("LOCK TABLES sqlock_lease WRITE", "UNLOCK TABLES"),
        // It locks files only, as the other tests do.
        Database::Sqlite => return,
    };
    let fixture = CommandFixture::new().await;
    fixture.db.locks().await.migrate().await.expect("migrate");
    let mut conn = fixture.db.pool_of(1).await.acquire().await.expect("a connection");
    sqlx::raw_sql(lock).execute(&mut *conn).await.expect("locked");
    let waiter = fixture.start(&["-w", "10m", "a"], OBEDIENT);
    waiter.stderr.shows("still waiting").await;
    sqlx::raw_sql(unlock).execute(&mut *conn).await.expect("unlocked");
    let waiter = waiter.up().await;
    waiter.order("go");
    waiter.end().await.expect(0);
}
