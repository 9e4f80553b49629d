//! Row locks in the caller's own transaction: of rows that stand for names, and of rows of the
//! caller's own tables.

mod keys;
mod several;
mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use sqlock::retry::Retry;
use sqlock::row::RowError;
use sqlock::{Error, Locks};
use sqlx::{AssertSqlSafe, Executor as _, Pool, Row as _, Transaction};
use tokio::sync::Barrier;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};

use super::fence::{Counters, IsolatedPool, add_one, counters, keeps_to_snapshots, levels, run};
use crate::support::{Database, SOON, connect, soon, until};
use crate::{DATABASE, Sql};

/// Long enough for the answer of a statement that does not wait.
const A_WHILE: Duration = Duration::from_millis(300);

/// Begins a transaction for locks, as an application does.
async fn begin(pool: &Pool<Sql>) -> Transaction<'static, Sql> {
    let begun = match DATABASE {
        Database::Sqlite => pool.begin_with("BEGIN IMMEDIATE").await,
        _ => pool.begin().await,
    };
    begun.expect("begin")
}

/// Another process: a client and a pool of its own.
struct Rival {
    locks: Locks,
    pool: Pool<Sql>,
}

impl Rival {
    async fn on(counters: &Counters) -> Self {
        Self { locks: counters.db.locks().await, pool: impatient(&counters.db.url).await }
    }

    /// Returns whether the rival would get the lock on the name at once.
    async fn finds_free(&self, name: &str) -> bool {
        if DATABASE == Database::Sqlite {
            return self.gets_the_file().await;
        }
        let mut tx = begin(&self.pool).await;
        let locked = self.locks.row(name).try_lock(&mut tx).await.expect("try");
        tx.rollback().await.expect("rollback");
        locked
    }

    /// The same for a row of the counters.
    async fn finds_free_row(&self, id: i64) -> bool {
        if DATABASE == Database::Sqlite {
            return self.gets_the_file().await;
        }
        let mut tx = begin(&self.pool).await;
        let locked = self.locks.row_of("counter", "id", id).try_lock(&mut tx).await.expect("try");
        tx.rollback().await.expect("rollback");
        locked
    }

    async fn gets_the_file(&self) -> bool {
        match self.pool.begin_with("BEGIN IMMEDIATE").await {
            Ok(tx) => tx.rollback().await.is_ok(),
            Err(sqlx::Error::Database(e)) if e.code().as_deref() == Some("5") => false,
            Err(e) => panic!("{e}"),
        }
    }
}

/// Creates a pool whose connections do not wait for SQLite's write lock, to see whether the lock is
/// free.
async fn impatient(url: &str) -> Pool<Sql> {
    let set = if DATABASE == Database::Sqlite { "PRAGMA busy_timeout = 0" } else { "SELECT 1" };
    sqlx::pool::PoolOptions::<Sql>::new()
        .after_connect(move |conn, _| Box::pin(async move { conn.execute(set).await.map(|_| ()) }))
        .connect_lazy_with((*connect(url, 1).await.connect_options()).clone())
}

/// A transaction of another client that locks the name as soon as it can, and reports it.
fn locks_when_it_can(counters: &Counters, locks: &Locks, name: &'static str) -> JoinHandle<Transaction<'static, Sql>> {
    let (pool, locks) = (counters.pool.clone(), locks.clone());
    tokio::spawn(async move {
        let mut tx = begin(&pool).await;
        locks.row(name).lock(&mut tx).await.expect("lock");
        tx
    })
}

#[tokio::test]
async fn named_row_is_locked_until_commit_or_rollback() {
    let counters = counters().await;
    let (ours, rival) = (counters.db.locks().await, Rival::on(&counters).await);
    for commits in [true, false] {
        let mut tx = begin(&counters.pool).await;
        ours.row("a").lock(&mut tx).await.expect("lock");
        ours.row("a").lock(&mut tx).await.expect("the same transaction may lock it again");
        assert!(!rival.finds_free("a").await, "while the transaction is open");
        if commits {
            tx.commit().await.expect("commit");
        } else {
            tx.rollback().await.expect("rollback");
        }
        assert!(rival.finds_free("a").await, "after its end");
    }
}

#[tokio::test]
async fn waiter_gets_named_row_when_holder_commits() {
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    let mut tx = begin(&counters.pool).await;
    ours.row("a").lock(&mut tx).await.expect("lock");
    add_one(&mut tx, 1).await.expect("write");
    let mut next = locks_when_it_can(&counters, &theirs, "a");
    timeout(A_WHILE, &mut next).await.expect_err("it is taken");
    tx.commit().await.expect("commit");
    let mut tx = soon("the next one's turn", next).await.expect("no panic");
    let seen: i64 =
        sqlx::query_scalar("SELECT value FROM counter WHERE id = 1").fetch_one(&mut *tx).await.expect("read");
    assert_eq!(seen, 1, "it sees what the one before has written");
}

#[tokio::test]
async fn concurrent_creators_of_a_row_take_turns() {
    const CREATORS: u32 = 8;
    // Each name protects a counter.
    const NAMES: [(&str, u8); 3] = [("new/1", 1), ("new/2", 2), ("new/3", 3)];
    let counters = counters().await;
    run(&counters.pool, "INSERT INTO counter (id, value) VALUES (3, 0)").await;
    let mut creators = JoinSet::new();
    for _ in 0..CREATORS {
        let (locks, pool) = (counters.db.locks().await, counters.pool.clone());
        creators.spawn(async move {
            for (name, id) in NAMES {
                let mut tx = begin(&pool).await;
                locks.row(name).lock(&mut tx).await.expect("no deadlock, no duplicate");
                let read = format!("SELECT value FROM counter WHERE id = {id}");
                let value: i64 = sqlx::query_scalar(AssertSqlSafe(read)).fetch_one(&mut *tx).await.expect("read");
                let write = format!("UPDATE counter SET value = {} WHERE id = {id}", value + 1);
                sqlx::query(AssertSqlSafe(write)).execute(&mut *tx).await.expect("write");
                tx.commit().await.expect("commit");
            }
        });
    }
    soon("all creators", creators.join_all()).await;
    for (name, id) in NAMES {
        assert_eq!(counters.value(id).await, i64::from(CREATORS), "{name}: an update was lost");
    }
}

#[tokio::test]
async fn missing_row_does_not_block_other_names() {
    if DATABASE == Database::Sqlite {
        return one_writer_locks_everything().await;
    }
    let counters = counters().await;
    for level in levels() {
        let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
        let app = counters.at(level).await;
        let mut first = app.begin().await;
        ours.row(format!("m/{level}")).lock(&mut first).await.expect("lock");
        // At REPEATABLE READ, InnoDB would lock the gap in which a row was looked for and not
        // found.
        for name in ["a", "l", "m", "n", "z"] {
            let mut second = app.begin().await;
            let lock = theirs.row(format!("{name}/{level}/other")).wait(SOON);
            soon("another name", lock.lock(&mut second)).await.unwrap_or_else(|e| panic!("{level}, {name}: {e}"));
            second.commit().await.expect("commit");
        }
        first.commit().await.expect("commit");
    }
}

/// Checks the documented behaviour of SQLite.
async fn one_writer_locks_everything() {
    let counters = counters().await;
    let (ours, rival) = (counters.db.locks().await, Rival::on(&counters).await);
    let mut tx = begin(&counters.pool).await;
    ours.row("a").lock(&mut tx).await.expect("lock");
    assert!(!rival.finds_free("another").await, "there is one write lock");
}

/// The four names of the contract, and long ones that differ at their end.
#[tokio::test]
async fn names_of_rows_are_compared_byte_for_byte() {
    let counters = counters().await;
    let ours = counters.db.locks().await;
    let long = "x".repeat(254);
    let mut tx = begin(&counters.pool).await;
    ours.row("a").lock(&mut tx).await.expect("lock");
    ours.row(format!("{long}1")).lock(&mut tx).await.expect("lock");
    if DATABASE != Database::Sqlite {
        let rival = Rival::on(&counters).await;
        for name in ["A", "a ", "á", &format!("{long}2"), "it's \\ \"quoted\" `so`"] {
            assert!(rival.finds_free(name).await, "{name:?} is another name");
        }
        assert!(!rival.finds_free("a").await);
    }
    let error = ours.row("").lock(&mut tx).await.expect_err("not a name");
    assert!(matches!(error, Error::InvalidName { .. }), "{error}");
}

#[tokio::test]
async fn refused_try_leaves_the_transaction_as_it_was() {
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    let mut holder = begin(&counters.pool).await;
    ours.row("a").lock(&mut holder).await.expect("lock");
    ours.row_of("counter", "id", 1_i64).lock(&mut holder).await.expect("lock");
    if DATABASE == Database::Sqlite {
        // The refused transaction cannot even begin.
        assert!(!Rival::on(&counters).await.finds_free("a").await);
        return;
    }
    for level in levels() {
        let app = counters.at(level).await;
        let mut tx = app.begin().await;
        assert!(!theirs.row("a").try_lock(&mut tx).await.expect("try"), "{level}");
        add_one(&mut tx, 2).await.expect("before");
        assert!(!theirs.row("a").try_lock(&mut tx).await.expect("try"), "{level}");
        assert!(!theirs.row_of("counter", "id", 1_i64).try_lock(&mut tx).await.expect("try"), "{level}");
        let error = theirs.row_of("counter", "id", 1_i64).nowait().lock(&mut tx).await.expect_err("taken");
        assert!(error.is_timeout(), "{level}: {error}");
        let error = theirs.rows_of("counter", "id", [2_i64, 1]).nowait().lock(&mut tx).await.expect_err("taken");
        assert!(error.is_timeout(), "{level}: {error}");
        add_one(&mut tx, 2).await.expect("after");
        tx.commit().await.unwrap_or_else(|e| panic!("{level}: {e}"));
    }
    assert_eq!(counters.value(2).await, 2 * i64::try_from(levels().len()).expect("few"), "all was committed");
}

/// Reads the settings of the session that a wait may change.
async fn settings(tx: &mut Transaction<'static, Sql>) -> Vec<String> {
    let names: &[&str] = match DATABASE {
        Database::Postgres => &["SHOW statement_timeout", "SHOW lock_timeout"],
        Database::MySql => {
            &["SELECT CAST(@@innodb_lock_wait_timeout AS CHAR)", "SELECT CAST(@@max_execution_time AS CHAR)"]
        }
        Database::MariaDb => {
            &["SELECT CAST(@@innodb_lock_wait_timeout AS CHAR)", "SELECT CAST(@@max_statement_time AS CHAR)"]
        }
        Database::Sqlite => &["SELECT CAST(timeout AS TEXT) FROM pragma_busy_timeout"],
    };
    let mut settings = Vec::new();
    for sql in names {
        settings.push(sqlx::query_scalar(*sql).fetch_one(&mut **tx).await.expect("a setting"));
    }
    settings
}

#[tokio::test]
async fn bounded_wait_leaves_transaction_and_settings_intact() {
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    let mut holder = begin(&counters.pool).await;
    ours.row("a").lock(&mut holder).await.expect("lock");
    ours.row_of("counter", "id", 1_i64).lock(&mut holder).await.expect("lock");
    let at_most = Duration::from_millis(1300);
    if DATABASE == Database::Sqlite {
        // BEGIN IMMEDIATE is where a transaction waits, as long as its pool says.
        assert!(!Rival::on(&counters).await.finds_free("a").await);
        let before = settings(&mut holder).await;
        ours.row("b").wait(at_most).lock(&mut holder).await.expect("it has the write lock");
        assert_eq!(settings(&mut holder).await, before);
        return;
    }
    let mut tx = begin(&counters.pool).await;
    if DATABASE == Database::Postgres {
        run_in(&mut tx, "SET LOCAL statement_timeout = '31s'").await;
    }
    let before = settings(&mut tx).await;
    add_one(&mut tx, 2).await.expect("before");
    let start = std::time::Instant::now();
    let error = soon("the end of the wait", theirs.row("a").wait(at_most).lock(&mut tx)).await.expect_err("taken");
    assert!(matches!(&error, Error::Timeout { name, .. } if name.as_str() == "a"), "{error}");
    assert!(start.elapsed() >= at_most, "it has waited");
    assert_eq!(settings(&mut tx).await, before, "after a wait that ran out");
    let error =
        soon("the end", theirs.row_of("counter", "id", 1_i64).wait(at_most).lock(&mut tx)).await.expect_err("taken");
    assert!(error.is_timeout() && !error.is_conflict(), "{error}");
    let error = soon("the end", theirs.rows_of("counter", "id", [2_i64, 1]).wait(at_most).lock(&mut tx))
        .await
        .expect_err("taken");
    assert!(error.is_timeout(), "{error}");
    theirs.row("b").wait(SOON).lock(&mut tx).await.expect("free");
    assert_eq!(settings(&mut tx).await, before, "after a wait that succeeded");
    add_one(&mut tx, 2).await.expect("after");
    tx.commit().await.expect("commit");
    assert_eq!(counters.value(2).await, 2, "all of the transaction was committed");
}

async fn run_in(tx: &mut Transaction<'static, Sql>, sql: &'static str) {
    sqlx::query(sql).execute(&mut **tx).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
}

/// The session's own limit of a wait is shorter than the requested one.
#[tokio::test]
async fn wait_goes_on_past_the_sessions_own_limit() {
    if DATABASE == Database::Sqlite {
        return one_writer_locks_everything().await;
    }
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    let mut holder = begin(&counters.pool).await;
    ours.row("a").lock(&mut holder).await.expect("lock");
    let pool = counters.pool.clone();
    let (begins, begun) = tokio::sync::oneshot::channel();
    let waiter = tokio::spawn(async move {
        let mut tx = begin(&pool).await;
        let limit = match DATABASE {
            Database::Postgres => "SET LOCAL lock_timeout = '500ms'",
            _ => "SET SESSION innodb_lock_wait_timeout = 1",
        };
        run_in(&mut tx, limit).await;
        let error =
            theirs.row("a").lock(&mut tx).await.expect_err("without a wait of ours it is the session's that counts");
        assert!(error.is_timeout(), "{error}");
        tx.rollback().await.expect("rollback");
        let mut tx = begin(&pool).await;
        run_in(&mut tx, limit).await;
        begins.send(()).expect("it is awaited");
        theirs.row("a").wait(SOON).lock(&mut tx).await.expect("we waited longer");
    });
    soon("the second wait", begun).await.expect("no panic");
    // Longer than the session's limit.
    sleep(Duration::from_millis(2500)).await;
    assert!(!waiter.is_finished());
    holder.commit().await.expect("commit");
    soon("the waiter's turn", waiter).await.expect("no panic");
}

#[tokio::test]
async fn opposite_lock_orders_do_not_deadlock() {
    let counters = counters().await;
    let locks = counters.db.locks().await;
    let mut transfers = JoinSet::new();
    for task in 0..6_u8 {
        let (pool, locks) = (counters.pool.clone(), locks.clone());
        transfers.spawn(async move {
            for _ in 0..25 {
                let keys = if task % 2 == 0 { [1_i64, 2] } else { [2, 1] };
                let mut tx = begin(&pool).await;
                let found: Vec<i64> = locks.rows_of("counter", "id", keys).lock(&mut tx).await.expect("no deadlock");
                assert_eq!(found, [1, 2], "in order of keys");
                add_one(&mut tx, 1).await.expect("write");
                add_one(&mut tx, 2).await.expect("write");
                tx.commit().await.expect("commit");
            }
        });
    }
    soon("all transfers", transfers.join_all()).await;
    assert_eq!((counters.value(1).await, counters.value(2).await), (150, 150));
}

/// Two transactions lock two names in opposite order. The database ends one of them, with an error
/// that another attempt may avoid.
#[tokio::test]
async fn deadlock_is_a_conflict() {
    if DATABASE == Database::Sqlite {
        return one_writer_locks_everything().await;
    }
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    let mut first = begin(&counters.pool).await;
    let mut second = begin(&counters.pool).await;
    ours.row("a").lock(&mut first).await.expect("lock");
    theirs.row("b").lock(&mut second).await.expect("lock");
    let crossing = tokio::spawn(async move {
        let outcome = theirs.row("a").lock(&mut second).await;
        second.rollback().await.expect("rollback");
        outcome
    });
    let outcome = soon("an end of the deadlock", ours.row("b").lock(&mut first)).await;
    first.rollback().await.expect("rollback");
    let other = soon("the other's end", crossing).await.expect("no panic");
    let errors: Vec<Error> = [outcome, other].into_iter().filter_map(Result::err).collect();
    assert_eq!(errors.len(), 1, "one of them is the victim: {errors:?}");
    assert!(errors[0].is_conflict() && errors[0].is_retryable(), "{}", errors[0]);
}

#[tokio::test]
async fn lock_ends_with_the_holders_connection() {
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    let one = counters.db.pool_of(1).await;
    let mut tx = begin(&one).await;
    ours.row("a").lock(&mut tx).await.expect("lock");
    let next = locks_when_it_can(&counters, &theirs, "a");
    match DATABASE {
        Database::Postgres => {
            let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *tx).await.expect("a pid");
            let sql = format!("SELECT pg_terminate_backend({pid})");
            sqlx::query(AssertSqlSafe(sql)).execute(&counters.pool).await.expect("terminate");
        }
        Database::MySql | Database::MariaDb => {
            let id: i64 =
                sqlx::query_scalar("SELECT CAST(CONNECTION_ID() AS SIGNED)").fetch_one(&mut *tx).await.expect("an id");
            sqlx::raw_sql(AssertSqlSafe(format!("KILL {id}"))).execute(&counters.pool).await.expect("kill");
        }
        // Only its process can end a connection there.
        Database::Sqlite => drop(tx.rollback().await),
    }
    soon("the next one's turn", next).await.expect("no panic");
}

#[tokio::test]
async fn pool_of_one_connection_is_enough() {
    let counters = counters().await;
    let one = counters.db.pool_of(1).await;
    let locks = Locks::new(one.clone());
    let mut tx = begin(&one).await;
    soon("a lock", locks.row("never/seen/before").lock(&mut tx))
        .await
        .expect("the row was created on a connection of our own");
    assert!(soon("a lock", locks.row("another").try_lock(&mut tx)).await.expect("try"));
    soon("a lock", locks.row_of("counter", "id", 1_i64).lock(&mut tx)).await.expect("lock");
    tx.commit().await.expect("commit");
}

/// Increments a counter as an application does, and reruns the transaction after a concurrent
/// change.
async fn increment(app: &IsolatedPool, locks: &Locks, named: bool) {
    loop {
        let mut tx = app.begin().await;
        let locked = if named {
            locks.row("counter/1").lock(&mut tx).await
        } else {
            locks.row_of("counter", "id", 1_i64).lock(&mut tx).await
        };
        match locked {
            Ok(()) => {}
            Err(error) if error.is_conflict() => {
                tx.rollback().await.expect("rollback");
                continue;
            }
            Err(Error::Row { cause: RowError::Deferred, .. }) => {
                tx.rollback().await.expect("rollback");
                continue;
            }
            Err(error) => panic!("{error}"),
        }
        let written = async {
            let value: i64 = sqlx::query_scalar("SELECT value FROM counter WHERE id = 1").fetch_one(&mut *tx).await?;
            tokio::task::yield_now().await;
            let sql = format!("UPDATE counter SET value = {} WHERE id = 1", value + 1);
            sqlx::query(AssertSqlSafe(sql)).execute(&mut *tx).await?;
            Ok::<_, sqlx::Error>(())
        };
        // PostgreSQL above READ COMMITTED, and MariaDB with innodb_snapshot_isolation: the snapshot
        // is older than the wait, and the write is refused.
        let again = |e: &sqlx::Error| {
            e.as_database_error()
                .is_some_and(|e| e.code().as_deref() == Some("40001") || e.message().starts_with("Record has changed"))
        };
        match written.await {
            Ok(()) => {}
            Err(error) if again(&error) => {
                tx.rollback().await.expect("rollback");
                continue;
            }
            Err(error) => panic!("{error}"),
        }
        match tx.commit().await {
            Ok(()) => return,
            Err(error) if again(&error) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn row_lock_prevents_lost_updates_at_every_isolation() {
    let counters = counters().await;
    let mut expected = 0;
    for level in levels() {
        let app = counters.at(level).await;
        for named in [true, false] {
            let mut tasks = JoinSet::new();
            for _ in 0..4 {
                let (app, locks) = (app.clone(), counters.db.locks().await);
                tasks.spawn(async move {
                    for _ in 0..10 {
                        increment(&app, &locks, named).await;
                    }
                });
            }
            soon("all increments", tasks.join_all()).await;
            expected += 40;
            assert_eq!(counters.value(1).await, expected, "{level}, named: {named}");
        }
    }
}

fn cause(error: &Error) -> &RowError {
    match error {
        Error::Row { cause, .. } => cause,
        error => panic!("{error}"),
    }
}

/// On SQLite a transaction has to begin as a writing one. On other databases, the counterpart is a
/// snapshot older than the row's last change.
#[tokio::test]
async fn transaction_that_reads_from_before_is_refused() {
    let counters = counters().await;
    let locks = counters.db.locks().await;
    let level = if DATABASE == Database::Sqlite { "DEFERRED" } else { "REPEATABLE READ" };
    let app = counters.at(level).await;
    let mut tx = app.begin().await;
    let _: i64 = sqlx::query_scalar("SELECT value FROM counter WHERE id = 1").fetch_one(&mut *tx).await.expect("read");
    run(&counters.pool, "UPDATE counter SET value = 5 WHERE id = 1").await;
    let outcome = locks.row_of("counter", "id", 1_i64).lock(&mut tx).await;
    match DATABASE {
        Database::Sqlite => {
            let error = outcome.expect_err("it cannot become a writer");
            assert_eq!(cause(&error), &RowError::Deferred);
            assert!(error.report().to_string().contains("BEGIN IMMEDIATE"), "{error:?}");
            let named = locks.row("a").lock(&mut tx).await.expect_err("nor here");
            assert_eq!(cause(&named), &RowError::Deferred);
        }
        Database::Postgres => {
            let error = outcome.expect_err("it reads from before the change");
            assert_eq!(cause(&error), &RowError::StaleSnapshot);
            assert!(error.is_conflict(), "{error}");
            tx.rollback().await.expect("rollback");
            // A new name, whose row is younger than the snapshot.
            let mut tx = app.begin().await;
            let _: i64 =
                sqlx::query_scalar("SELECT value FROM counter WHERE id = 1").fetch_one(&mut *tx).await.expect("read");
            let error = locks.row("younger").lock(&mut tx).await.expect_err("its row cannot be seen");
            assert_eq!(cause(&error), &RowError::StaleSnapshot);
            tx.rollback().await.expect("rollback");
            let mut tx = app.begin().await;
            locks.row("younger").lock(&mut tx).await.expect("run again");
        }
        Database::MySql | Database::MariaDb if keeps_to_snapshots().await => {
            let error = outcome.expect_err("it reads from before the change");
            assert_eq!(cause(&error), &RowError::StaleSnapshot);
        }
        // A locking read sees the present there.
        Database::MySql | Database::MariaDb => outcome.expect("lock"),
    }
}

#[tokio::test]
async fn deferred_transaction_takes_a_free_write_lock() {
    let counters = counters().await;
    let (ours, rival) = (counters.db.locks().await, Rival::on(&counters).await);
    let app = counters.at(levels()[0]).await; // DEFERRED, or READ UNCOMMITTED
    let mut tx = app.begin().await;
    ours.row("a").lock(&mut tx).await.expect("lock");
    assert!(!rival.finds_free("a").await);
    tx.commit().await.expect("commit");
    assert!(rival.finds_free("a").await);
}

#[tokio::test]
async fn sweeper_purges_unused_rows_and_spares_locked() {
    if DATABASE == Database::Sqlite {
        return one_writer_locks_everything().await; // and no rows to purge
    }
    let counters = counters().await;
    let locks = counters.db.locks().await;
    for name in ["old", "locked", "young"] {
        let mut tx = begin(&counters.pool).await;
        locks.row(name).lock(&mut tx).await.expect("lock");
        tx.commit().await.expect("commit");
    }
    run(&counters.pool, "UPDATE sqlock_row SET seen_at = 1 WHERE name IN ('old', 'locked')").await;
    let mut holder = begin(&counters.pool).await;
    locks.row("locked").lock(&mut holder).await.expect("lock");
    locks.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep");
    let left: i64 =
        sqlx::query_scalar("SELECT COUNT(*) FROM sqlock_row").fetch_one(&counters.pool).await.expect("count");
    assert_eq!(left, 2, "locked and young");
    // The client assumes that the row exists. It finds out the truth, and the next attempt creates
    // the row again.
    let mut tx = begin(&counters.pool).await;
    let error = locks.row("old").lock(&mut tx).await.expect_err("purged");
    assert!(error.is_conflict(), "{error}");
    tx.rollback().await.expect("rollback");
    let mut tx = begin(&counters.pool).await;
    locks.row("old").lock(&mut tx).await.expect("created again");
    holder.commit().await.expect("commit");
}

#[tokio::test]
async fn use_of_a_row_is_recorded_without_waiting() {
    if DATABASE == Database::Sqlite {
        return one_writer_locks_everything().await;
    }
    let counters = counters().await;
    let (ours, theirs, others) = (counters.db.locks().await, counters.db.locks().await, counters.db.locks().await);
    let mut holder = begin(&counters.pool).await;
    ours.row("a").lock(&mut holder).await.expect("lock");
    holder.commit().await.expect("commit");
    let seen = async || -> i64 {
        sqlx::query_scalar("SELECT seen_at FROM sqlock_row").fetch_one(&counters.pool).await.expect("a row")
    };
    let first = seen().await;
    let rival = Rival { locks: theirs, pool: counters.db.pool().await };
    assert!(rival.finds_free("a").await);
    assert_eq!(seen().await, first, "nothing was written");
    run(&counters.pool, "UPDATE sqlock_row SET seen_at = 1").await;
    let mut holder = begin(&counters.pool).await;
    ours.row("a").lock(&mut holder).await.expect("lock");
    let rival = Rival { locks: others, pool: counters.db.pool().await };
    assert!(!soon("a try", rival.finds_free("a")).await, "who asks while it is locked does not wait to write");
    holder.commit().await.expect("commit");
    let rival = Rival::on(&counters).await;
    assert!(rival.finds_free("a").await);
    assert!(seen().await > first, "and it is noted down when that is possible");
}

#[tokio::test]
async fn dropped_wait_leaves_no_lock_or_transaction() {
    if DATABASE == Database::Sqlite {
        return one_writer_locks_everything().await;
    }
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    let one = counters.db.pool_of(1).await;
    for wait in [None, Some(SOON)] {
        let mut holder = begin(&counters.pool).await;
        ours.row("a").lock(&mut holder).await.expect("lock");
        let mut tx = begin(&one).await;
        let before = settings(&mut tx).await;
        let mut lock = theirs.row("a");
        if let Some(wait) = wait {
            lock = lock.wait(wait);
        }
        timeout(A_WHILE, lock.lock(&mut tx)).await.expect_err("taken");
        drop(tx);
        holder.commit().await.expect("commit");
        // The same connection again: the statement that was abandoned has ended, and so has its
        // transaction.
        let mut tx = soon("the connection", begin(&one)).await;
        assert_eq!(settings(&mut tx).await, before);
        tx.commit().await.expect("commit");
        let rival = Rival::on(&counters).await;
        assert!(rival.finds_free("a").await, "nobody has the lock");
    }
}

/// The value of [`touched`] before the first write.
async fn before(tx: &mut Transaction<'static, Sql>, table: &str) -> i64 {
    if DATABASE == Database::Postgres { touched(tx, table).await } else { 0 }
}

/// How many rows the transaction has locked, or looked up in the index of a table.
async fn touched(tx: &mut Transaction<'static, Sql>, table: &str) -> i64 {
    if DATABASE == Database::Postgres {
        // The numbers are those of this session since it last reported them, and go up from
        // transaction to transaction.
        let sql = format!(
            "SELECT CASE WHEN seq_scan > 0 THEN -1000 ELSE coalesce(idx_tup_fetch, 0) END
               FROM pg_stat_xact_user_tables WHERE relid = '{table}'::regclass"
        );
        return sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut **tx).await.expect("a count");
    }
    let thread: i64 =
        sqlx::query_scalar("SELECT CAST(CONNECTION_ID() AS SIGNED)").fetch_one(&mut **tx).await.expect("an id");
    let status: String =
        sqlx::raw_sql("SHOW ENGINE INNODB STATUS").fetch_one(&mut **tx).await.expect("a status").get(2);
    let ours = status
        .split("---TRANSACTION ")
        .find(|transaction| transaction.contains(&format!(" thread id {thread},")))
        .expect("a transaction of ours");
    // "2 lock struct(s), heap size 1128, 1 row lock(s)": the lock of the table is the other struct.
    let (before, _) = ours.split_once(" row lock(s)").expect("a number of locks");
    before.rsplit(' ').next().and_then(|number| number.parse().ok()).expect("a number")
}

/// The limit can be reached at any moment, even just after the lock was granted.
#[tokio::test]
async fn shortest_wait_leaves_the_transaction_usable_too() {
    let counters = counters().await;
    let locks = counters.db.locks().await;
    let one = counters.db.pool_of(1).await;
    let mut tx = begin(&one).await;
    let before = settings(&mut tx).await;
    tx.commit().await.expect("commit");
    for _ in 0..300 {
        let mut tx = begin(&one).await;
        let rows = locks.rows_of("counter", "id", [1_i64, 2]).wait(Duration::from_millis(1));
        match rows.lock(&mut tx).await {
            Ok(found) => assert_eq!(found, [1, 2]),
            Err(error) => assert!(error.is_timeout(), "{error}"),
        }
        assert_eq!(settings(&mut tx).await, before, "and its settings are as they were");
        tx.commit().await.expect("commit");
    }
}

/// A transaction must see the writes of the previous holder, or fail.
#[tokio::test]
async fn awaited_row_is_refused_with_older_snapshot() {
    let counters = counters().await;
    for level in levels() {
        run(&counters.pool, "DELETE FROM counter WHERE id > 2").await;
        let app = counters.at(level).await;
        let mut tasks = JoinSet::new();
        for id in 0..6_i64 {
            let (app, locks) = (app.clone(), counters.db.locks().await);
            tasks.spawn(async move {
                loop {
                    let mut tx = app.begin().await;
                    match locks.row("once").lock(&mut tx).await {
                        Err(Error::Row { cause: RowError::StaleSnapshot | RowError::Deferred, .. }) => {
                            tx.rollback().await.expect("rollback");
                            continue;
                        }
                        locked => locked.expect("lock"),
                    }
                    let count =
                        sqlx::query_scalar("SELECT COUNT(*) FROM counter WHERE id > 2").fetch_one(&mut *tx).await;
                    if count.is_ok_and(|count: i64| count == 0) {
                        let sql = format!("INSERT INTO counter (id, value) VALUES ({}, 0)", 10 + id);
                        sqlx::query(AssertSqlSafe(sql)).execute(&mut *tx).await.expect("insert");
                    }
                    // At SERIALIZABLE PostgreSQL may still refuse it.
                    if tx.commit().await.is_ok() {
                        return;
                    }
                }
            });
        }
        soon("all of them", tasks.join_all()).await;
        let count: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM counter WHERE id > 2")
            .fetch_one(&counters.pool)
            .await
            .expect("a count");
        assert_eq!(count, 1, "{level}: done once");
    }
}
