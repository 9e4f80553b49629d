//! Row locks in the caller's own transaction: of rows that stand for names, and of rows of the
//! caller's own tables.

mod keys;

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

use super::fence::{Books, Business, add_one, books, levels, run};
use crate::support::{Database, SOON, connect, soon};
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
    async fn on(books: &Books) -> Self {
        Self { locks: books.db.locks().await, pool: impatient(&books.db.url).await }
    }

    /// Whether the rival would get the lock on the name at once.
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
fn locks_when_it_can(books: &Books, locks: &Locks, name: &'static str) -> JoinHandle<Transaction<'static, Sql>> {
    let (pool, locks) = (books.pool.clone(), locks.clone());
    tokio::spawn(async move {
        let mut tx = begin(&pool).await;
        locks.row(name).lock(&mut tx).await.expect("lock");
        tx
    })
}

#[tokio::test]
async fn named_row_is_locked_until_commit_or_rollback() {
    let books = books().await;
    let (ours, rival) = (books.db.locks().await, Rival::on(&books).await);
    for commits in [true, false] {
        let mut tx = begin(&books.pool).await;
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
    let books = books().await;
    let (ours, theirs) = (books.db.locks().await, books.db.locks().await);
    let mut tx = begin(&books.pool).await;
    ours.row("a").lock(&mut tx).await.expect("lock");
    add_one(&mut tx, 1).await.expect("write");
    let mut next = locks_when_it_can(&books, &theirs, "a");
    timeout(A_WHILE, &mut next).await.expect_err("it is taken");
    tx.commit().await.expect("commit");
    let mut tx = soon("the next one's turn", next).await.expect("no panic");
    let seen: i64 =
        sqlx::query_scalar("SELECT value FROM counter WHERE id = 1").fetch_one(&mut *tx).await.expect("read");
    assert_eq!(seen, 1, "it sees what the one before has written");
}

#[tokio::test]
async fn concurrent_creators_of_a_row_take_turns() {
    let books = books().await;
    let mut creators = JoinSet::new();
    for _ in 0..8 {
        let (locks, pool) = (books.db.locks().await, books.pool.clone());
        creators.spawn(async move {
            for name in ["new/1", "new/2", "new/3"] {
                let mut tx = begin(&pool).await;
                locks.row(name).lock(&mut tx).await.expect("no deadlock, no duplicate");
                let value: i64 = sqlx::query_scalar("SELECT value FROM counter WHERE id = 1")
                    .fetch_one(&mut *tx)
                    .await
                    .expect("read");
                let sql = format!("UPDATE counter SET value = {} WHERE id = 2", value + 1);
                sqlx::query(AssertSqlSafe(sql)).execute(&mut *tx).await.expect("write");
                tx.commit().await.expect("commit");
            }
        });
    }
    soon("all creators", creators.join_all()).await;
}

#[tokio::test]
async fn missing_row_hinders_nobody_who_wants_another_name() {
    if DATABASE == Database::Sqlite {
        return one_writer_locks_everything().await;
    }
    let books = books().await;
    for level in levels() {
        let (ours, theirs) = (books.db.locks().await, books.db.locks().await);
        let business = books.at(level).await;
        let mut first = business.begin().await;
        ours.row(format!("m/{level}")).lock(&mut first).await.expect("lock");
        // At REPEATABLE READ, InnoDB would lock the gap in which a row was looked for and not
        // found.
        for name in ["a", "l", "m", "n", "z"] {
            let mut second = business.begin().await;
            let lock = theirs.row(format!("{name}/{level}/other")).wait(SOON);
            soon("another name", lock.lock(&mut second)).await.unwrap_or_else(|e| panic!("{level}, {name}: {e}"));
            second.commit().await.expect("commit");
        }
        first.commit().await.expect("commit");
    }
}

/// Checks the documented behaviour of SQLite.
async fn one_writer_locks_everything() {
    let books = books().await;
    let (ours, rival) = (books.db.locks().await, Rival::on(&books).await);
    let mut tx = begin(&books.pool).await;
    ours.row("a").lock(&mut tx).await.expect("lock");
    assert!(!rival.finds_free("another").await, "there is one write lock");
}

/// The four names of the contract, and long ones that differ at their end.
#[tokio::test]
async fn names_of_rows_are_compared_byte_for_byte() {
    let books = books().await;
    let ours = books.db.locks().await;
    let long = "x".repeat(254);
    let mut tx = begin(&books.pool).await;
    ours.row("a").lock(&mut tx).await.expect("lock");
    ours.row(format!("{long}1")).lock(&mut tx).await.expect("lock");
    if DATABASE != Database::Sqlite {
        let rival = Rival::on(&books).await;
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
    let books = books().await;
    let (ours, theirs) = (books.db.locks().await, books.db.locks().await);
    let mut holder = begin(&books.pool).await;
    ours.row("a").lock(&mut holder).await.expect("lock");
    ours.row_of("counter", "id", 1_i64).lock(&mut holder).await.expect("lock");
    if DATABASE == Database::Sqlite {
        // The refused transaction cannot even begin.
        assert!(!Rival::on(&books).await.finds_free("a").await);
        return;
    }
    for level in levels() {
        let business = books.at(level).await;
        let mut tx = business.begin().await;
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
    assert_eq!(books.value(2).await, 2 * i64::try_from(levels().len()).expect("few"), "all was committed");
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
    let books = books().await;
    let (ours, theirs) = (books.db.locks().await, books.db.locks().await);
    let mut holder = begin(&books.pool).await;
    ours.row("a").lock(&mut holder).await.expect("lock");
    ours.row_of("counter", "id", 1_i64).lock(&mut holder).await.expect("lock");
    let at_most = Duration::from_millis(1300);
    if DATABASE == Database::Sqlite {
        // BEGIN IMMEDIATE is where a transaction waits, as long as its pool says.
        assert!(!Rival::on(&books).await.finds_free("a").await);
        let before = settings(&mut holder).await;
        ours.row("b").wait(at_most).lock(&mut holder).await.expect("it has the write lock");
        assert_eq!(settings(&mut holder).await, before);
        return;
    }
    let mut tx = begin(&books.pool).await;
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
    theirs.row("b").wait(at_most).lock(&mut tx).await.expect("free");
    assert_eq!(settings(&mut tx).await, before, "after a wait that succeeded");
    add_one(&mut tx, 2).await.expect("after");
    tx.commit().await.expect("commit");
    assert_eq!(books.value(2).await, 2, "all of the transaction was committed");
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
    let books = books().await;
    let (ours, theirs) = (books.db.locks().await, books.db.locks().await);
    let mut holder = begin(&books.pool).await;
    ours.row("a").lock(&mut holder).await.expect("lock");
    let pool = books.pool.clone();
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
        theirs.row("a").wait(SOON).lock(&mut tx).await.expect("we waited longer");
    });
    sleep(Duration::from_millis(3500)).await;
    assert!(!waiter.is_finished());
    holder.commit().await.expect("commit");
    soon("the waiter's turn", waiter).await.expect("no panic");
}

#[tokio::test]
async fn opposite_lock_orders_do_not_deadlock() {
    let books = books().await;
    let locks = books.db.locks().await;
    let mut transfers = JoinSet::new();
    for task in 0..6_u8 {
        let (pool, locks) = (books.pool.clone(), locks.clone());
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
    assert_eq!((books.value(1).await, books.value(2).await), (150, 150));
}

/// Two transactions lock two names in opposite order. The database ends one of them, with an error
/// that another attempt may avoid.
#[tokio::test]
async fn deadlock_is_a_conflict() {
    if DATABASE == Database::Sqlite {
        return one_writer_locks_everything().await;
    }
    let books = books().await;
    let (ours, theirs) = (books.db.locks().await, books.db.locks().await);
    let mut first = begin(&books.pool).await;
    let mut second = begin(&books.pool).await;
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
    let books = books().await;
    let (ours, theirs) = (books.db.locks().await, books.db.locks().await);
    let one = books.db.pool_of(1).await;
    let mut tx = begin(&one).await;
    ours.row("a").lock(&mut tx).await.expect("lock");
    let next = locks_when_it_can(&books, &theirs, "a");
    match DATABASE {
        Database::Postgres => {
            let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *tx).await.expect("a pid");
            let sql = format!("SELECT pg_terminate_backend({pid})");
            sqlx::query(AssertSqlSafe(sql)).execute(&books.pool).await.expect("terminate");
        }
        Database::MySql | Database::MariaDb => {
            let id: i64 =
                sqlx::query_scalar("SELECT CAST(CONNECTION_ID() AS SIGNED)").fetch_one(&mut *tx).await.expect("an id");
            sqlx::raw_sql(AssertSqlSafe(format!("KILL {id}"))).execute(&books.pool).await.expect("kill");
        }
        // Only its process can end a connection there.
        Database::Sqlite => drop(tx.rollback().await),
    }
    soon("the next one's turn", next).await.expect("no panic");
}

#[tokio::test]
async fn pool_of_one_connection_is_enough() {
    let books = books().await;
    let one = books.db.pool_of(1).await;
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
async fn increment(business: &Business, locks: &Locks, named: bool) {
    loop {
        let mut tx = business.begin().await;
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
        // PostgreSQL above READ COMMITTED: the snapshot is older than the wait, and the write is
        // refused.
        let again = |e: &sqlx::Error| e.as_database_error().is_some_and(|e| e.code().as_deref() == Some("40001"));
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
    let books = books().await;
    let mut expected = 0;
    for level in levels() {
        let business = books.at(level).await;
        for named in [true, false] {
            let mut tasks = JoinSet::new();
            for _ in 0..4 {
                let (business, locks) = (business.clone(), books.db.locks().await);
                tasks.spawn(async move {
                    for _ in 0..10 {
                        increment(&business, &locks, named).await;
                    }
                });
            }
            soon("all increments", tasks.join_all()).await;
            expected += 40;
            assert_eq!(books.value(1).await, expected, "{level}, named: {named}");
        }
    }
}

#[tokio::test]
async fn row_lock_spares_neighbouring_rows() {
    let books = books().await;
    let (ours, rival) = (books.db.locks().await, Rival::on(&books).await);
    for level in levels() {
        let business = books.at(level).await;
        let mut tx = business.begin().await;
        ours.row_of("counter", "id", 1_i64).lock(&mut tx).await.expect("lock");
        assert!(!rival.finds_free_row(1).await, "{level}");
        if DATABASE != Database::Sqlite {
            assert!(rival.finds_free_row(2).await, "{level}");
            // Nor is a gap beside it.
            let mut other = begin(&rival.pool).await;
            let insert = sqlx::query("INSERT INTO counter (id, value) VALUES (0, 0), (3, 0)").execute(&mut *other);
            soon("an insert beside the row", insert).await.expect("insert");
            other.rollback().await.expect("rollback");
        }
        tx.rollback().await.expect("rollback");
        assert!(rival.finds_free_row(1).await, "{level}");
    }
}

fn cause(error: &Error) -> &RowError {
    match error {
        Error::Row { cause, .. } => cause,
        error => panic!("{error}"),
    }
}

#[tokio::test]
async fn column_without_unique_index_is_refused() {
    let books = books().await;
    run(&books.pool, "CREATE TABLE seat (id INTEGER PRIMARY KEY, hall INTEGER NOT NULL, place INTEGER NOT NULL, code VARCHAR(20) NOT NULL)").await;
    run(&books.pool, "CREATE INDEX seat_hall ON seat (hall)").await;
    run(&books.pool, "CREATE UNIQUE INDEX seat_place ON seat (hall, place)").await;
    run(&books.pool, "CREATE UNIQUE INDEX seat_code ON seat (code)").await;
    run(&books.pool, "INSERT INTO seat VALUES (1, 1, 1, 'a'), (2, 1, 2, 'b')").await;
    let locks = books.db.locks().await;
    let mut tx = begin(&books.pool).await;
    for column in ["hall", "place"] {
        for _ in 0..2 {
            let error = locks.row_of("seat", column, 1_i32).lock(&mut tx).await.expect_err("not unique");
            assert_eq!(cause(&error), &RowError::NotUnique { column: column.into() });
            assert!(!error.is_retryable());
        }
    }
    locks.row_of("seat", "code", "a".to_owned()).lock(&mut tx).await.expect("a unique index will do");
    locks.row_of("seat", "id", 2_i32).lock(&mut tx).await.expect("the primary key will do");
    let error = locks.row_of("seat", "row", 1_i32).lock(&mut tx).await.expect_err("no such column");
    assert_eq!(cause(&error), &RowError::NoSuchColumn { column: "row".into() });
    let error = locks.row_of("chair", "id", 1_i32).lock(&mut tx).await.expect_err("no such table");
    assert_eq!(cause(&error), &RowError::NoSuchColumn { column: "id".into() });
    let error = locks.row_of("", "id", 1_i32).lock(&mut tx).await.expect_err("no name");
    assert!(matches!(error, Error::InvalidIdentifier { .. }), "{error}");
    let error = locks.row_of("seat", "id", 9_i32).lock(&mut tx).await.expect_err("no such row");
    assert_eq!(cause(&error), &RowError::NoSuchRow);
    let error = locks.row_of("seat", "id", 9_i32).try_lock(&mut tx).await.expect_err("no such row");
    assert_eq!(cause(&error), &RowError::NoSuchRow);
    tx.commit().await.expect("after all these errors the transaction is usable");
}

/// InnoDB compares a text column with a number by converting each row: it would lock them all.
#[tokio::test]
async fn key_that_cannot_use_the_index_is_refused() {
    let books = books().await;
    run(&books.pool, "CREATE TABLE voucher (code VARCHAR(20) PRIMARY KEY)").await;
    run(&books.pool, "INSERT INTO voucher VALUES ('1'), ('2')").await;
    let locks = books.db.locks().await;
    let mut tx = begin(&books.pool).await;
    let outcome = locks.row_of("voucher", "code", 1_i64).lock(&mut tx).await;
    match DATABASE {
        Database::MySql | Database::MariaDb => {
            let error = outcome.expect_err("all rows would be locked");
            assert!(matches!(cause(&error), RowError::KeyType { .. }), "{error}");
            locks.row_of("voucher", "code", "1".to_owned()).lock(&mut tx).await.expect("text is right");
        }
        // It refuses to compare text with a number.
        Database::Postgres => assert!(matches!(outcome, Err(Error::Database { .. })), "{outcome:?}"),
        // The column's affinity makes text of it.
        Database::Sqlite => outcome.expect("found"),
    }
}

/// Twenty vouchers, of ids 0 to 19, with a column of each class.
async fn vouchers(books: &Books) {
    let table = match DATABASE {
        Database::Postgres => {
            "CREATE TABLE voucher (id BIGINT PRIMARY KEY, code TEXT NOT NULL UNIQUE, tag BYTEA NOT NULL UNIQUE,
                                   price NUMERIC(9, 2) NOT NULL UNIQUE)"
        }
        Database::Sqlite => {
            "CREATE TABLE voucher (id INTEGER PRIMARY KEY, code TEXT NOT NULL UNIQUE, tag BLOB NOT NULL UNIQUE,
                                   price NUMERIC NOT NULL UNIQUE)"
        }
        _ => {
            "CREATE TABLE voucher (id BIGINT PRIMARY KEY, code VARCHAR(20) NOT NULL UNIQUE, tag VARBINARY(20) NOT NULL UNIQUE,
                                   price DECIMAL(9, 2) NOT NULL UNIQUE)"
        }
    };
    run(&books.pool, table).await;
    for id in 0..20 {
        let tag = match DATABASE {
            Database::Postgres => format!("'tag{id}'::bytea"),
            Database::Sqlite => format!("CAST('tag{id}' AS BLOB)"),
            _ => format!("'tag{id}'"),
        };
        let sql = format!("INSERT INTO voucher (id, code, tag, price) VALUES ({id}, 'code{id}', {tag}, {id}.5)");
        sqlx::query(AssertSqlSafe(sql)).execute(&books.pool).await.expect("a voucher");
    }
}

/// Returns the number of vouchers that another session could lock.
async fn free_vouchers(books: &Books) -> usize {
    let mut other = books.pool.begin().await.expect("begin");
    let free = other.fetch_all("SELECT id FROM voucher FOR UPDATE SKIP LOCKED").await.expect("rows");
    other.rollback().await.expect("rollback");
    free.len()
}

/// Asserts that a key is refused before it locks anything.
async fn assert_refused<K>(books: &Books, locks: &Locks, column: &str, key: K)
where
    K: std::fmt::Debug + for<'q> sqlx::Encode<'q, Sql> + sqlx::Type<Sql> + Send + Sync,
{
    let what = format!("{key:?} in {column}");
    let mut tx = begin(&books.pool).await;
    let error = locks.row_of("voucher", column, key).lock(&mut tx).await.expect_err(&what);
    match DATABASE {
        Database::MySql | Database::MariaDb => {
            assert!(matches!(cause(&error), RowError::KeyType { .. }), "{what}: {error}");
            assert_eq!(free_vouchers(books).await, 20, "{what}");
        }
        // It compares no values of different types.
        Database::Postgres => {
            assert!(matches!(error, Error::Database { .. }), "{what}: {error}");
            assert_eq!(free_vouchers(books).await, 20, "{what}");
        }
        // A value of another class is equal to none.
        Database::Sqlite => assert_eq!(cause(&error), &RowError::NoSuchRow, "{what}"),
    }
}

#[tokio::test]
async fn key_of_another_class_locks_no_row() {
    let books = books().await;
    vouchers(&books).await;
    let locks = books.db.locks().await;
    for key in ["7abc", "abc", "", "0x7"] {
        assert_refused(&books, &locks, "id", key.to_owned()).await;
        assert_refused(&books, &locks, "price", key.to_owned()).await;
    }
    assert_refused(&books, &locks, "code", 7_i64).await;
    assert_refused(&books, &locks, "code", 7.5_f64).await;
    assert_refused(&books, &locks, "tag", 7_i64).await;
    assert_refused(&books, &locks, "code", b"code7".to_vec()).await;
}

#[tokio::test]
async fn key_of_the_columns_class_locks_one_row() {
    let books = books().await;
    vouchers(&books).await;
    let locks = books.db.locks().await;
    if DATABASE == Database::Sqlite {
        let mut tx = begin(&books.pool).await;
        locks.row_of("voucher", "tag", b"tag7".to_vec()).lock(&mut tx).await.expect("bytes");
        locks.row_of("voucher", "code", "code7".to_owned()).lock(&mut tx).await.expect("text");
        drop(tx);
        return one_writer_locks_everything().await;
    }
    macro_rules! assert_locks_one {
        ($column:literal, $key:expr) => {
            let mut tx = begin(&books.pool).await;
            locks.row_of("voucher", $column, $key).lock(&mut tx).await.unwrap_or_else(|e| panic!("{}: {e}", $column));
            assert_eq!(free_vouchers(&books).await, 19, "{}", $column);
            tx.rollback().await.expect("rollback");
        };
    }
    assert_locks_one!("id", 7_i64);
    assert_locks_one!("id", 7_i32);
    assert_locks_one!("id", 7_i16);
    assert_locks_one!("code", "code7".to_owned());
    assert_locks_one!("tag", b"tag7".to_vec());
}

/// Each statement makes a unique index that does not lead to one row alone, or that the database
/// does not use.
#[tokio::test]
async fn unique_index_that_cannot_be_used_is_refused() {
    let books = books().await;
    vouchers(&books).await;
    let (tables, reason): (&[&'static str], &[&str]) = match DATABASE {
        Database::MySql => (
            &[
                "CREATE TABLE a (id SERIAL PRIMARY KEY, code VARCHAR(20) NOT NULL, UNIQUE KEY by_code (code) INVISIBLE)",
                "CREATE TABLE b (code VARCHAR(20) NOT NULL, UNIQUE KEY by_code (code(6)))",
            ],
            &["invisible", "part of the column"],
        ),
        Database::MariaDb => (
            &[
                "CREATE TABLE a (id SERIAL PRIMARY KEY, code VARCHAR(20) NOT NULL, UNIQUE KEY by_code (code) IGNORED)",
                "CREATE TABLE b (code VARCHAR(20) NOT NULL, UNIQUE KEY by_code (code(6)))",
                "CREATE TABLE c (code TEXT NOT NULL, UNIQUE KEY by_code (code))",
            ],
            &["ignored", "part of the column", "hash"],
        ),
        Database::Postgres => (
            &[
                "CREATE TABLE a (code TEXT NOT NULL UNIQUE DEFERRABLE)",
                "CREATE TABLE b (code TEXT NOT NULL); CREATE UNIQUE INDEX b_code ON b (lower(code))",
                "CREATE TABLE c (code TEXT NOT NULL); CREATE UNIQUE INDEX c_code ON c (code) WHERE code > 'm'",
            ],
            &["no unique index"; 3],
        ),
        Database::Sqlite => (
            &[
                "CREATE TABLE a (code TEXT NOT NULL); CREATE UNIQUE INDEX a_code ON a (lower(code))",
                "CREATE TABLE b (code TEXT NOT NULL); CREATE UNIQUE INDEX b_code ON b (code) WHERE code > 'm'",
            ],
            &["no unique index"; 2],
        ),
    };
    let locks = books.db.locks().await;
    for ((sql, reason), table) in tables.iter().zip(reason).zip(["a", "b", "c"]) {
        sqlx::raw_sql(*sql).execute(&books.pool).await.expect(sql);
        let copy = format!("INSERT INTO {table} (code) SELECT code FROM voucher");
        sqlx::query(AssertSqlSafe(copy)).execute(&books.pool).await.expect("rows");
        let mut tx = begin(&books.pool).await;
        let error = locks.row_of(table, "code", "code7".to_owned()).lock(&mut tx).await.expect_err(sql);
        assert!(cause(&error).to_string().contains(reason), "{sql}: {error}");
    }
}

/// MyISAM accepts the statement and locks nothing.
#[tokio::test]
async fn table_whose_engine_locks_no_rows_is_refused() {
    let books = books().await;
    let locks = books.db.locks().await;
    if !DATABASE.is_mysql() {
        // All tables have row locks there, except views.
        run(&books.pool, "CREATE VIEW counted AS SELECT id, value FROM counter").await;
        let mut tx = begin(&books.pool).await;
        let error = locks.row_of("counted", "id", 1_i64).lock(&mut tx).await.expect_err("a view has no index");
        assert_eq!(cause(&error), &RowError::NotUnique { column: "id".into() });
        return;
    }
    run(&books.pool, "CREATE TABLE old (id BIGINT PRIMARY KEY) ENGINE = MyISAM").await;
    let mut tx = begin(&books.pool).await;
    let error = locks.row_of("old", "id", 1_i64).lock(&mut tx).await.expect_err("it locks tables only");
    assert_eq!(cause(&error), &RowError::NoRowLocks { engine: "MyISAM".into() });
}

#[tokio::test]
async fn odd_names_of_tables_and_columns_are_quoted() {
    let books = books().await;
    let (table, column) = ("the \"odd` 'one", "or`d\"er");
    let quote = |name: &str| match DATABASE {
        Database::MySql | Database::MariaDb => format!("`{}`", name.replace('`', "``")),
        _ => format!("\"{}\"", name.replace('"', "\"\"")),
    };
    let (t, c) = (quote(table), quote(column));
    for sql in [format!("CREATE TABLE {t} ({c} BIGINT PRIMARY KEY)"), format!("INSERT INTO {t} VALUES (1), (2)")] {
        sqlx::query(AssertSqlSafe(sql)).execute(&books.pool).await.expect("an odd table");
    }
    let locks = books.db.locks().await;
    let mut tx = begin(&books.pool).await;
    locks.row_of(table, column, 1_i64).lock(&mut tx).await.expect("lock");
    let found: Vec<i64> = locks.rows_of(table, column, [2_i64, 1, 7]).lock(&mut tx).await.expect("lock");
    assert_eq!(found, [1, 2]);
    let schema: String = match DATABASE {
        Database::Postgres => {
            sqlx::query_scalar("SELECT current_schema()::text").fetch_one(&mut *tx).await.expect("a schema")
        }
        Database::Sqlite => "main".into(),
        _ => sqlx::query_scalar("SELECT CAST(DATABASE() AS CHAR)").fetch_one(&mut *tx).await.expect("a schema"),
    };
    locks.row_of(format!("{schema}.counter"), "id", 1_i64).lock(&mut tx).await.expect("with its schema");
}

#[tokio::test]
async fn skip_locked_workers_share_a_queue() {
    let books = books().await;
    run(&books.pool, "CREATE TABLE job (id BIGINT PRIMARY KEY, tenant BIGINT NOT NULL, done BIGINT NOT NULL)").await;
    for id in 0..60 {
        let sql = format!("INSERT INTO job VALUES ({id}, {}, 0)", id % 2);
        sqlx::query(AssertSqlSafe(sql)).execute(&books.pool).await.expect("a job");
    }
    let mut workers = JoinSet::new();
    for _ in 0..4 {
        let (pool, locks) = (books.at(levels()[1]).await, books.db.locks().await);
        workers.spawn(async move {
            let mut most = 0;
            loop {
                let mut tx = pool.begin().await;
                let ready = locks.rows_where("job", "id").skip_locked().limit(3);
                let jobs: Vec<i64> = ready
                    .lock(&mut tx, |sql| {
                        sql.push("done = 0 AND tenant = ").push_bind(1_i64).push(" ORDER BY id");
                    })
                    .await
                    .expect("jobs");
                most = most.max(jobs.len());
                if jobs.is_empty() {
                    return most;
                }
                for id in jobs {
                    let sql = format!("UPDATE job SET done = done + 1 WHERE id = {id}");
                    sqlx::query(AssertSqlSafe(sql)).execute(&mut *tx).await.expect("the job");
                }
                tx.commit().await.expect("commit");
            }
        });
    }
    let most = soon("all jobs", workers.join_all()).await;
    assert_eq!(most.into_iter().max(), Some(3), "the limit");
    let rows = sqlx::query("SELECT tenant, done, COUNT(*) FROM job GROUP BY tenant, done ORDER BY tenant")
        .fetch_all(&books.pool)
        .await
        .expect("counts");
    let counts: Vec<(i64, i64, i64)> = rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    assert_eq!(counts, [(0, 0, 30), (1, 1, 30)], "each job of the tenant once, and no other");
}

#[tokio::test]
async fn limit_counts_rows_that_are_not_locked() {
    let books = books().await;
    let (ours, theirs) = (books.db.locks().await, books.db.locks().await);
    let mut holder = begin(&books.pool).await;
    ours.row_of("counter", "id", 1_i64).lock(&mut holder).await.expect("lock");
    if DATABASE == Database::Sqlite {
        let two: Vec<i64> =
            ours.rows_of("counter", "id", [2_i64, 1]).skip_locked().limit(1).lock(&mut holder).await.expect("lock");
        assert_eq!(two, [1], "nobody else has any, and the limit counts in order");
        return;
    }
    let mut tx = begin(&books.pool).await;
    let free = theirs.rows_of("counter", "id", [1_i64, 2]).skip_locked().limit(1).lock(&mut tx).await.expect("lock");
    assert_eq!(free, [2]);
    let none: Vec<i64> =
        theirs.rows_of("counter", "id", Vec::<i64>::new()).lock(&mut tx).await.expect("nothing to lock");
    assert!(none.is_empty());
}

#[tokio::test]
async fn shared_row_locks_exclude_exclusive_ones() {
    let books = books().await;
    let (ours, theirs) = (books.db.locks().await, books.db.locks().await);
    let mut first = begin(&books.pool).await;
    if DATABASE == Database::Sqlite {
        for outcome in [
            ours.row("a").shared().lock(&mut first).await,
            ours.row_of("counter", "id", 1_i64).shared().lock(&mut first).await,
        ] {
            assert!(matches!(outcome, Err(Error::Unsupported { .. })), "{outcome:?}");
        }
        return;
    }
    let mut second = begin(&books.pool).await;
    ours.row("a").shared().lock(&mut first).await.expect("lock");
    assert!(theirs.row("a").shared().try_lock(&mut second).await.expect("try"), "shared with the first");
    theirs.row_of("counter", "id", 1_i64).shared().lock(&mut first).await.expect("lock");
    let shared = theirs.row_of("counter", "id", 1_i64).shared().wait(SOON);
    soon("a shared lock", shared.lock(&mut second)).await.expect("lock");
    let found = theirs.rows_of("counter", "id", [1_i64]).shared().skip_locked().lock(&mut second).await.expect("lock");
    assert_eq!(found, [1]);
    let rival = Rival::on(&books).await;
    assert!(!rival.finds_free("a").await && !rival.finds_free_row(1).await);
    first.commit().await.expect("commit");
    assert!(!rival.finds_free("a").await, "one is left");
    second.commit().await.expect("commit");
    assert!(rival.finds_free("a").await);
}

/// On SQLite a transaction has to begin as a writing one. On other databases, the counterpart is a
/// snapshot older than the row's last change.
#[tokio::test]
async fn transaction_that_reads_from_before_is_refused() {
    let books = books().await;
    let locks = books.db.locks().await;
    let level = if DATABASE == Database::Sqlite { "DEFERRED" } else { "REPEATABLE READ" };
    let business = books.at(level).await;
    let mut tx = business.begin().await;
    let _: i64 = sqlx::query_scalar("SELECT value FROM counter WHERE id = 1").fetch_one(&mut *tx).await.expect("read");
    run(&books.pool, "UPDATE counter SET value = 5 WHERE id = 1").await;
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
            let mut tx = business.begin().await;
            let _: i64 =
                sqlx::query_scalar("SELECT value FROM counter WHERE id = 1").fetch_one(&mut *tx).await.expect("read");
            let error = locks.row("younger").lock(&mut tx).await.expect_err("its row cannot be seen");
            assert_eq!(cause(&error), &RowError::StaleSnapshot);
            tx.rollback().await.expect("rollback");
            let mut tx = business.begin().await;
            locks.row("younger").lock(&mut tx).await.expect("run again");
        }
        // A locking read sees the present there.
        Database::MySql | Database::MariaDb => outcome.expect("lock"),
    }
}

#[tokio::test]
async fn deferred_transaction_takes_a_free_write_lock() {
    let books = books().await;
    let (ours, rival) = (books.db.locks().await, Rival::on(&books).await);
    let business = books.at(levels()[0]).await; // DEFERRED, or READ UNCOMMITTED
    let mut tx = business.begin().await;
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
    let books = books().await;
    let locks = books.db.locks().await;
    for name in ["old", "locked", "young"] {
        let mut tx = begin(&books.pool).await;
        locks.row(name).lock(&mut tx).await.expect("lock");
        tx.commit().await.expect("commit");
    }
    run(&books.pool, "UPDATE sqlock_row SET seen_at = 1 WHERE name IN ('old', 'locked')").await;
    let mut holder = begin(&books.pool).await;
    locks.row("locked").lock(&mut holder).await.expect("lock");
    locks.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep");
    let left: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM sqlock_row").fetch_one(&books.pool).await.expect("count");
    assert_eq!(left, 2, "locked and young");
    // The client assumes that the row exists. It finds out the truth, and the next attempt creates
    // the row again.
    let mut tx = begin(&books.pool).await;
    let error = locks.row("old").lock(&mut tx).await.expect_err("purged");
    assert!(error.is_conflict(), "{error}");
    tx.rollback().await.expect("rollback");
    let mut tx = begin(&books.pool).await;
    locks.row("old").lock(&mut tx).await.expect("created again");
    holder.commit().await.expect("commit");
}

#[tokio::test]
async fn use_of_a_row_is_recorded_without_waiting() {
    if DATABASE == Database::Sqlite {
        return one_writer_locks_everything().await;
    }
    let books = books().await;
    let (ours, theirs, others) = (books.db.locks().await, books.db.locks().await, books.db.locks().await);
    let mut holder = begin(&books.pool).await;
    ours.row("a").lock(&mut holder).await.expect("lock");
    holder.commit().await.expect("commit");
    let seen = async || -> i64 {
        sqlx::query_scalar("SELECT seen_at FROM sqlock_row").fetch_one(&books.pool).await.expect("a row")
    };
    let first = seen().await;
    let rival = Rival { locks: theirs, pool: books.db.pool().await };
    assert!(rival.finds_free("a").await);
    assert_eq!(seen().await, first, "nothing was written");
    run(&books.pool, "UPDATE sqlock_row SET seen_at = 1").await;
    let mut holder = begin(&books.pool).await;
    ours.row("a").lock(&mut holder).await.expect("lock");
    let rival = Rival { locks: others, pool: books.db.pool().await };
    assert!(!soon("a try", rival.finds_free("a")).await, "who asks while it is locked does not wait to write");
    holder.commit().await.expect("commit");
    let rival = Rival::on(&books).await;
    assert!(rival.finds_free("a").await);
    assert!(seen().await > first, "and it is noted down when that is possible");
}

#[tokio::test]
async fn dropped_wait_leaves_no_lock_or_transaction() {
    if DATABASE == Database::Sqlite {
        return one_writer_locks_everything().await;
    }
    let books = books().await;
    let (ours, theirs) = (books.db.locks().await, books.db.locks().await);
    let one = books.db.pool_of(1).await;
    for wait in [None, Some(SOON)] {
        let mut holder = begin(&books.pool).await;
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
        let rival = Rival::on(&books).await;
        assert!(rival.finds_free("a").await, "nobody has the lock");
    }
}

/// A lock of one row reads one row, by the unique index, and locks no other: the counters of the
/// server show it.
#[tokio::test]
async fn row_lock_uses_the_unique_index() {
    let books = books().await;
    if DATABASE == Database::Sqlite {
        // The plan shows which rows are read.
        let plan = sqlx::query("EXPLAIN QUERY PLAN SELECT id FROM counter WHERE id = 1").fetch_one(&books.pool).await;
        let plan: String = plan.expect("a plan").get("detail");
        assert!(plan.starts_with("SEARCH counter USING INTEGER PRIMARY KEY"), "{plan}");
        return;
    }
    let rows = match DATABASE {
        Database::Postgres => "SELECT 'n/' || i AS name, i AS id FROM generate_series(10, 20000) AS i",
        _ => {
            "SELECT CONCAT('n/', i.a * 1000 + j.a) AS name, i.a * 1000 + j.a AS id
               FROM JSON_TABLE(CONCAT('[', REPEAT('0,', 18), '0]'), '$[*]' COLUMNS (a FOR ORDINALITY)) AS i
               JOIN JSON_TABLE(CONCAT('[', REPEAT('0,', 998), '0]'), '$[*]' COLUMNS (a FOR ORDINALITY)) AS j"
        }
    };
    for insert in [
        format!("INSERT INTO counter (id, value) SELECT id, 0 FROM ({rows}) AS r"),
        format!("INSERT INTO sqlock_row (name, seen_at) SELECT name, 9000000000000000 FROM ({rows}) AS r"),
    ] {
        sqlx::query(AssertSqlSafe(insert)).execute(&books.pool).await.expect("many rows");
    }
    let analyze = if DATABASE == Database::Postgres {
        "ANALYZE counter, sqlock_row"
    } else {
        "ANALYZE TABLE counter, sqlock_row"
    };
    run(&books.pool, analyze).await;
    let locks = books.db.locks().await;
    for level in levels() {
        let business = books.at(level).await;
        // Once, so that the catalogue has been asked.
        locks.row_of("counter", "id", 1_i64).lock(&mut business.begin().await).await.expect("lock");
        let mut tx = business.begin().await;
        let before = self::before(&mut tx, "counter").await;
        locks.row_of("counter", "id", 1010_i64).lock(&mut tx).await.expect("lock");
        assert_eq!(touched(&mut tx, "counter").await, before + 1, "{level}: by key");
        tx.rollback().await.expect("rollback");
        let mut tx = business.begin().await;
        let before = self::before(&mut tx, "sqlock_row").await;
        locks.row("n/1010").lock(&mut tx).await.expect("lock");
        // At levels where PostgreSQL would not report an earlier holder to waiters, the lock also
        // writes the row.
        let marked = DATABASE == Database::Postgres && ["REPEATABLE READ", "SERIALIZABLE"].contains(level);
        assert_eq!(touched(&mut tx, "sqlock_row").await, before + 1 + i64::from(marked), "{level}: by name");
        tx.rollback().await.expect("rollback");
        let mut tx = business.begin().await;
        let before = self::before(&mut tx, "counter").await;
        let found = locks.rows_of("counter", "id", [5005_i64, 1010, 3003]).lock(&mut tx).await.expect("lock");
        assert_eq!(found, [1010, 3003, 5005]);
        assert_eq!(touched(&mut tx, "counter").await, before + 3, "{level}: by three keys");
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
    let books = books().await;
    let locks = books.db.locks().await;
    let one = books.db.pool_of(1).await;
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
    let books = books().await;
    for level in levels() {
        run(&books.pool, "DELETE FROM counter WHERE id > 2").await;
        let business = books.at(level).await;
        let mut tasks = JoinSet::new();
        for id in 0..6_i64 {
            let (business, locks) = (business.clone(), books.db.locks().await);
            tasks.spawn(async move {
                loop {
                    let mut tx = business.begin().await;
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
            .fetch_one(&books.pool)
            .await
            .expect("a count");
        assert_eq!(count, 1, "{level}: done once");
    }
}

#[tokio::test]
async fn condition_ending_in_a_comment_locks() {
    let books = books().await;
    let (locks, rival) = (books.db.locks().await, Rival::on(&books).await);
    let mut tx = begin(&books.pool).await;
    let rows = locks.rows_where("counter", "id").limit(1);
    let found: Vec<i32> = rows
        .lock(&mut tx, |sql| {
            sql.push("value = 0 ORDER BY id -- the first one");
        })
        .await
        .expect("lock");
    assert_eq!(found, [1], "the limit counts");
    assert!(!rival.finds_free_row(1).await);
}

/// InnoDB may scan a table of which many rows are wanted.
#[tokio::test]
async fn several_row_locks_spare_other_rows() {
    if DATABASE == Database::Sqlite {
        return one_writer_locks_everything().await;
    }
    let books = books().await;
    run(&books.pool, "INSERT INTO counter (id, value) VALUES (3, 0), (4, 0)").await;
    let (ours, theirs) = (books.db.locks().await, books.db.locks().await);
    for level in levels() {
        let business = books.at(level).await;
        let (mut first, mut second) = (business.begin().await, business.begin().await);
        let found = ours.rows_of("counter", "id", [2_i64, 1, 2]).lock(&mut first).await.expect("lock");
        assert_eq!(found, [1, 2], "{level}");
        let others = theirs.rows_of("counter", "id", [4_i64, 3, 9]).nowait().lock(&mut second).await;
        assert_eq!(others.unwrap_or_else(|e| panic!("{level}: {e}")), [3, 4]);
        let none =
            theirs.rows_of("counter", "id", [1_i64]).limit(0).lock(&mut second).await.expect("nothing asked for");
        assert!(none.is_empty());
        first.rollback().await.expect("rollback");
        second.rollback().await.expect("rollback");
    }
}

/// What the catalogue said is remembered.
#[tokio::test]
async fn index_that_was_renamed_is_found_again() {
    let books = books().await;
    run(&books.pool, "CREATE TABLE seat (id BIGINT NOT NULL, note BIGINT)").await;
    run(&books.pool, "CREATE UNIQUE INDEX first_name ON seat (id)").await;
    run(&books.pool, "INSERT INTO seat (id) VALUES (1), (2)").await;
    let locks = books.db.locks().await;
    let lock = async || -> Vec<i64> {
        let mut tx = begin(&books.pool).await;
        let found = locks.rows_of("seat", "id", [2_i64, 1]).lock(&mut tx).await.expect("lock");
        locks.row_of("seat", "id", 1_i64).lock(&mut tx).await.expect("lock");
        tx.commit().await.expect("commit");
        found
    };
    assert_eq!(lock().await, [1, 2]);
    run(&books.pool, "CREATE UNIQUE INDEX second_name ON seat (id)").await;
    run(&books.pool, if DATABASE.is_mysql() { "DROP INDEX first_name ON seat" } else { "DROP INDEX first_name" }).await;
    assert_eq!(lock().await, [1, 2]);
}

/// A parent and its children, as an order and its items.
async fn orders(books: &Books) {
    run(&books.pool, "CREATE TABLE orders (id BIGINT PRIMARY KEY, items BIGINT NOT NULL)").await;
    run(&books.pool, "CREATE TABLE item (id BIGINT PRIMARY KEY, order_id BIGINT NOT NULL, FOREIGN KEY (order_id) REFERENCES orders (id))")
        .await;
    run(&books.pool, "INSERT INTO orders VALUES (1, 0)").await;
}

/// The insert of a child locks its parent against a change of the key. MySQL and MariaDB have no
/// lock on a row that leaves room for that: there the transactions deadlock, and are run again.
#[tokio::test]
async fn parent_lock_after_child_insert_does_not_deadlock() {
    const TASKS: i64 = 8;
    let books = books().await;
    orders(&books).await;
    let locks = books.db.locks().await;
    let (runs, inserted) = (Arc::new(AtomicU32::new(0)), Arc::new(Barrier::new(TASKS as usize)));
    let mut tasks = JoinSet::new();
    for id in 0..TASKS {
        let (pool, locks, runs, inserted) =
            (books.pool.clone(), locks.clone(), Arc::clone(&runs), Arc::clone(&inserted));
        tasks.spawn(async move {
            let first = AtomicBool::new(true);
            let retry = Retry::new().attempts(u32::MAX).within(SOON);
            let done = retry.run(&pool, async |tx| {
                runs.fetch_add(1, Ordering::SeqCst);
                let item = format!("INSERT INTO item VALUES ({id}, 1)");
                sqlx::query(AssertSqlSafe(item)).execute(&mut **tx).await?;
                if first.swap(false, Ordering::SeqCst) && DATABASE != Database::Sqlite {
                    // All have inserted, and none has locked.
                    inserted.wait().await;
                }
                locks.row_of("orders", "id", 1_i64).lock(&mut *tx).await?;
                sqlx::query("UPDATE orders SET items = items + 1 WHERE id = 1").execute(&mut **tx).await?;
                Ok::<_, Error>(())
            });
            done.await.expect("it gets through");
        });
    }
    soon("all orders", tasks.join_all()).await;
    let items: i64 = sqlx::query_scalar("SELECT items FROM orders").fetch_one(&books.pool).await.expect("a count");
    assert_eq!(items, TASKS);
    let runs = i64::from(runs.load(Ordering::SeqCst));
    if DATABASE.is_mysql() {
        assert!(runs > TASKS, "no deadlock: this proves nothing");
    } else {
        assert_eq!(runs, TASKS, "deadlocks");
    }
}

#[tokio::test]
async fn key_update_keeps_children_out() {
    let books = books().await;
    orders(&books).await;
    let locks = books.db.locks().await;
    let pool = impatient(&books.db.url).await;
    let adds_item = async || {
        let mut conn = pool.acquire().await.expect("a connection");
        let bound = match DATABASE {
            Database::Postgres => "SET lock_timeout = '200ms'",
            Database::Sqlite => "SELECT 1",
            _ => "SET innodb_lock_wait_timeout = 1",
        };
        conn.execute(bound).await.expect(bound);
        conn.execute("INSERT INTO item SELECT COUNT(*), 1 FROM item").await.is_ok()
    };
    assert!(adds_item().await, "nobody has locked the order");
    for key_update in [false, true] {
        let mut tx = begin(&books.pool).await;
        let row = locks.row_of("orders", "id", 1_i64);
        let row = if key_update { row.key_update() } else { row };
        row.lock(&mut tx).await.expect("lock");
        assert_eq!(adds_item().await, DATABASE == Database::Postgres && !key_update, "{key_update}");
        let found = match key_update {
            false => locks.rows_of("orders", "id", [1_i64]).nowait().lock(&mut tx).await,
            true => locks.rows_of("orders", "id", [1_i64]).key_update().nowait().lock(&mut tx).await,
        };
        assert_eq!(found.expect("ours"), [1]);
        let mut rival = pool.begin().await.expect("begin");
        let rows = locks.rows_where("orders", "id").key_update().skip_locked();
        let found: Result<Vec<i64>, Error> = rows
            .lock(&mut rival, |sql| {
                sql.push("id = 1");
            })
            .await;
        assert!(found.is_ok_and(|found| found.is_empty()) != (DATABASE == Database::Sqlite), "the row is taken");
        drop(rival);
        tx.commit().await.expect("commit");
    }
}

/// The case of the keys must not matter: otherwise two transactions that lock ("a", "B") and ("A",
/// "b") would deadlock.
#[tokio::test]
async fn rows_are_locked_in_collation_order() {
    if !DATABASE.is_mysql() {
        return; // There the statement itself sorts, by the column's collation.
    }
    let books = books().await;
    run(&books.pool, "CREATE TABLE user_name (name VARCHAR(20) PRIMARY KEY) DEFAULT CHARACTER SET latin1").await;
    run(&books.pool, "INSERT INTO user_name VALUES ('a'), ('b'), ('c')").await;
    let locks = books.db.locks().await;
    let texts = |keys: [&str; 3]| keys.map(str::to_owned);
    let mut tx = begin(&books.pool).await;
    let found = locks.rows_of("user_name", "name", texts(["c", "B", "a"])).lock(&mut tx).await.expect("lock");
    assert_eq!(found, ["a", "B", "c"]);
    tx.rollback().await.expect("rollback");

    let mut holder = begin(&books.pool).await;
    locks.row_of("user_name", "name", "b".to_owned()).lock(&mut holder).await.expect("lock");
    let waiting = tokio::spawn({
        let (locks, pool) = (locks.clone(), books.pool.clone());
        async move {
            let mut tx = begin(&pool).await;
            let locked = locks.rows_of("user_name", "name", texts(["a", "B", "C"])).lock(&mut tx).await;
            tx.rollback().await.expect("rollback");
            locked.expect("lock").len()
        }
    });
    // It waits for "b" when it has "a", and not yet "c".
    let is_free = async |name: &str| {
        let mut tx = begin(&books.pool).await;
        let locked = locks.row_of("user_name", "name", name.to_owned()).try_lock(&mut tx).await.expect("try");
        tx.rollback().await.expect("rollback");
        locked
    };
    soon("the first row", async {
        while is_free("a").await {
            tokio::time::sleep(A_WHILE / 30).await;
        }
    })
    .await;
    tokio::time::sleep(A_WHILE).await;
    assert!(is_free("c").await);
    holder.commit().await.expect("commit");
    assert_eq!(soon("the other one", waiting).await.expect("no panic"), 3);
}
