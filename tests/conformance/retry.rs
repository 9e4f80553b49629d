//! Transactions that are rerun: which errors rerun them, how they end, and that a dropped one
//! leaves nothing.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlock::Error;
use sqlock::retry::Retry;
use sqlock::row::RowError;
use sqlx::{AssertSqlSafe, Connection, Executor, Pool, QueryBuilder, Transaction};
use tokio::sync::{Barrier, Notify};
use tokio::time::{Instant, sleep};

use super::cancel::{drop_at, everywhere};
use super::fence::{Counters, IsolatedPool, add_one, counters, run};
use super::network::behind_a_proxy;
use super::version::bank;
use crate::support::{Database, SOON, connect, soon, until};
use crate::{DATABASE, Sql};

type Tx<'c> = Transaction<'c, Sql>;

/// Returns a retry with unlimited attempts, which the test ends.
fn patiently() -> Retry {
    Retry::new().attempts(u32::MAX).within(SOON * 4)
}

/// An error type of an application, with transparent variants only.
#[derive(Debug, thiserror::Error)]
enum AppError {
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Lock(#[from] Error),
    #[error("sold out")]
    SoldOut,
}

async fn value(tx: &mut Tx<'_>, id: u8) -> Result<i64, sqlx::Error> {
    let sql = format!("SELECT value FROM counter WHERE id = {id}");
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut **tx).await
}

fn count(counter: &AtomicU32) -> u32 {
    counter.load(Ordering::SeqCst)
}

#[tokio::test]
async fn versioned_retries_lose_no_update() {
    const TASKS: i64 = 8;
    const ROUNDS: i64 = 25;
    let bank = bank().await;
    let runs = Arc::new(AtomicU32::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..TASKS {
        let (pool, accounts, runs) = (bank.pool.clone(), bank.accounts.clone(), Arc::clone(&runs));
        tasks.spawn(async move {
            for _ in 0..ROUNDS {
                let done = patiently().run(&pool, async |tx| {
                    runs.fetch_add(1, Ordering::SeqCst);
                    let read = accounts.read::<_, (i64, i64, String, i64)>(&mut *tx, 1).await?;
                    let read = read.ok_or(AppError::SoldOut)?;
                    tokio::task::yield_now().await;
                    let update = accounts.update(&mut *tx, 1, read.version, |set| {
                        set.push("balance = ").push_bind(read.value.3 + 1);
                    });
                    Ok::<_, AppError>(update.await?)
                });
                done.await.expect("it gets there in the end");
            }
        });
    }
    tokio::time::timeout(SOON * 4, tasks.join_all()).await.expect("all updates are made");
    let total = TASKS * ROUNDS;
    assert_eq!(bank.row(1).await.map(|row| (row.1, row.3)), Some((1 + total, 100 + total)));
    let reruns = i64::from(count(&runs)) - total;
    println!("{DATABASE:?}: {total} updates, {reruns} reruns");
    match DATABASE {
        // A transaction that begins with the write lock meets no conflict.
        Database::Sqlite => assert_eq!(reruns, 0),
        _ => assert!(reruns > 0, "nobody met anybody: this proves nothing"),
    }
}

/// Two transfers in opposite directions. SQLite, with its one writer, knows no deadlock: there they
/// run one after the other.
#[tokio::test]
async fn a_deadlock_is_rerun_and_both_get_through() {
    let counters = counters().await;
    let (runs, met) = (Arc::new(AtomicU32::new(0)), Arc::new(Barrier::new(2)));
    let transfer = |from: u8, to: u8| {
        let (pool, runs, met) = (counters.pool.clone(), Arc::clone(&runs), Arc::clone(&met));
        async move {
            let first = AtomicBool::new(true);
            let done = patiently().run(&pool, async |tx| {
                runs.fetch_add(1, Ordering::SeqCst);
                add_one(tx, from).await?;
                if first.swap(false, Ordering::SeqCst) && DATABASE != Database::Sqlite {
                    // Both have locked one row, and now request the other's.
                    met.wait().await;
                }
                add_one(tx, to).await?;
                Ok::<_, AppError>(())
            });
            done.await
        }
    };
    let both = async { tokio::join!(tokio::spawn(transfer(1, 2)), tokio::spawn(transfer(2, 1))) };
    let (one, other) = soon("the end of the deadlock", both).await;
    one.expect("no panic").expect("it gets through");
    other.expect("no panic").expect("it gets through");
    assert_eq!((counters.value(1).await, counters.value(2).await), (2, 2));
    let runs = count(&runs);
    assert!(if DATABASE == Database::Sqlite { runs == 2 } else { runs > 2 }, "{runs} runs");
}

/// Makes a statement fail in a transaction that has changed row 1, and ignores the error: on MySQL
/// and MariaDB a deadlock, which rolls the transaction back; on PostgreSQL any error, after which
/// it can only be rolled back; on SQLite, which has no deadlocks and keeps the transaction, a
/// constraint.
pub(super) async fn fail_and_go_on(counters: &Counters, tx: &mut Tx<'_>) {
    let sql = match DATABASE {
        Database::Postgres => "SELECT 1 / 0",
        Database::Sqlite => "INSERT INTO counter (id, value) VALUES (1, 0)",
        _ => "UPDATE counter SET value = value + 1 WHERE id = 2",
    };
    let mut rival = None;
    if DATABASE.is_mysql() {
        let mut crossing = counters.pool.begin().await.expect("begin");
        add_one(&mut crossing, 2).await.expect("write");
        // The database ends the transaction that has changed fewer rows.
        let rows: Vec<String> = (100..200).map(|id| format!("({id}, 0)")).collect();
        let weight = format!("INSERT INTO counter (id, value) VALUES {}", rows.join(", "));
        crossing.execute(AssertSqlSafe(weight)).await.expect("write");
        rival = Some(tokio::spawn(async move {
            add_one(&mut crossing, 1).await.expect("the other one is ended");
            crossing.rollback().await.expect("rollback");
        }));
    }
    let failed = tx.execute(sql).await.expect_err("it fails");
    if let Some(rival) = rival {
        let sqlx::Error::Database(failed) = failed else { panic!("{failed:?}") };
        assert_eq!(code(failed.as_ref()), "1213", "{failed}");
        soon("the end of the rival", rival).await.expect("no panic");
    }
}

#[tokio::test]
async fn ignored_deadlock_is_not_reported_as_committed() {
    let counters = counters().await;
    let runs = AtomicU32::new(0);
    let done = Retry::new().run(&counters.pool, async |tx| {
        runs.fetch_add(1, Ordering::SeqCst);
        add_one(tx, 1).await?;
        fail_and_go_on(&counters, tx).await;
        let _ = add_one(tx, 2).await;
        Ok::<_, AppError>(())
    });
    let done = soon("the answer", done).await;
    let kept = match DATABASE {
        Database::Sqlite => {
            done.expect("the error ended no transaction");
            1
        }
        Database::Postgres => {
            assert!(matches!(done, Err(AppError::Lock(Error::Database { .. }))), "{done:?}");
            0
        }
        _ => {
            assert!(matches!(done, Err(AppError::Lock(Error::CommitUnknown { .. }))), "{done:?}");
            0
        }
    };
    assert_eq!((counters.value(1).await, counters.value(2).await, count(&runs)), (kept, kept, 1));
    // The connection is usable: every statement commits by itself.
    run(&counters.pool, "UPDATE counter SET value = 7 WHERE id = 1").await;
    counters.pool.close().await;
    assert_eq!(Counters { pool: counters.db.pool().await, ..counters }.value(1).await, 7);
}

/// Two doctors on call, of whom one may leave: each sees that there are two.
#[tokio::test]
async fn serialization_failure_is_rerun_without_write_skew() {
    let counters = counters().await;
    let (app, retry) = match DATABASE {
        Database::Postgres => (counters.pool.clone(), patiently().begin_with("BEGIN ISOLATION LEVEL SERIALIZABLE")),
        // A snapshot, and the write lock only when it writes.
        Database::Sqlite => (counters.pool.clone(), patiently().begin_with("BEGIN DEFERRED")),
        _ => (IsolatedPool::at(&counters.db.url, "SERIALIZABLE").await.pool().clone(), patiently()),
    };
    let (runs, met) = (Arc::new(AtomicU32::new(0)), Arc::new(Barrier::new(2)));
    let mut doctors = tokio::task::JoinSet::new();
    for id in [1, 2] {
        let (app, retry, runs, met) = (app.clone(), retry.clone(), Arc::clone(&runs), Arc::clone(&met));
        doctors.spawn(async move {
            let first = AtomicBool::new(true);
            let leave = retry.run(&app, async |tx| {
                runs.fetch_add(1, Ordering::SeqCst);
                let away = value(tx, 1).await? + value(tx, 2).await?;
                if first.swap(false, Ordering::SeqCst) {
                    met.wait().await;
                }
                if away > 0 {
                    return Ok::<_, sqlx::Error>(false);
                }
                add_one(tx, id).await.map(|()| true)
            });
            leave.await.expect("it gets through")
        });
    }
    let left = soon("their end", doctors.join_all()).await;
    assert_eq!(left.iter().filter(|left| **left).count(), 1, "one leaves and one stays");
    assert_eq!(counters.value(1).await + counters.value(2).await, 1);
    assert!(count(&runs) > 2, "somebody was run again");
}

/// Another transaction commits between its read and its write. At this level only MySQL accepts the
/// write.
#[tokio::test]
async fn a_snapshot_that_was_overtaken_is_rerun() {
    let counters = counters().await;
    let app = match DATABASE {
        Database::Sqlite => counters.pool.clone(),
        Database::MariaDb => connect(&counters.db.url, 1).await,
        _ => IsolatedPool::at(&counters.db.url, "REPEATABLE READ").await.pool().clone(),
    };
    if DATABASE == Database::MariaDb {
        // The default since version 11.6, as REPEATABLE READ has always been.
        run(&app, "SET SESSION innodb_snapshot_isolation = ON").await;
    }
    let retry = if DATABASE == Database::Sqlite { patiently().begin_with("BEGIN DEFERRED") } else { patiently() };
    let (runs, errors) = (AtomicU32::new(0), Mutex::new(Vec::new()));
    let done = retry.run(&app, async |tx| {
        let seen = value(tx, 1).await?;
        if runs.fetch_add(1, Ordering::SeqCst) == 0 {
            run(&counters.pool, "UPDATE counter SET value = 10 WHERE id = 1").await;
        }
        let written = add_one(tx, 1).await;
        if let Err(sqlx::Error::Database(error)) = &written {
            errors.lock().expect("no panic").push(code(error.as_ref()));
        }
        Ok::<_, AppError>(written.map(|()| seen)?)
    });
    let seen = done.await.expect("it gets through");
    let errors = errors.into_inner().expect("no panic");
    match DATABASE {
        Database::MySql => assert_eq!((seen, count(&runs), errors.as_slice()), (0, 1, [].as_slice())),
        _ => {
            let expected = match DATABASE {
                Database::Postgres => "40001",
                Database::MariaDb => "1020",
                _ => "517",
            };
            assert_eq!((seen, count(&runs), errors), (10, 2, vec![expected.to_owned()]));
        }
    }
    assert_eq!(counters.value(1).await, 11);
}

/// Returns the code of a database error: the numbers of MySQL say more than its states.
fn code(error: &dyn sqlx::error::DatabaseError) -> String {
    #[cfg(feature = "mysql")]
    if let Some(error) = error.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
        return error.number().to_string();
    }
    error.code().unwrap_or_default().into_owned()
}

/// No other transaction can write between the read and the write, where a write locks the whole
/// file.
#[tokio::test]
async fn transaction_begins_with_write_lock_on_sqlite() {
    let counters = counters().await;
    let other = connect(&counters.db.url, 1).await;
    if DATABASE == Database::Sqlite {
        run(&other, "PRAGMA busy_timeout = 0").await;
    }
    let done = Retry::new().run(&counters.pool, async |tx| {
        assert_eq!(value(tx, 1).await?, 0);
        Ok::<_, sqlx::Error>(other.execute("UPDATE counter SET value = 7 WHERE id = 1").await.map(|_| ()))
    });
    let between = done.await.expect("commit");
    match DATABASE {
        Database::Sqlite => assert!(between.expect_err("locked").to_string().contains("locked")),
        _ => between.expect("nothing is locked"),
    }
}

#[tokio::test]
async fn permanent_error_ends_the_run_at_once() {
    let counters = counters().await;
    let runs = AtomicU32::new(0);

    // The application's own reasons.
    let done = patiently().run(&counters.pool, async |tx| {
        runs.fetch_add(1, Ordering::SeqCst);
        add_one(tx, 1).await?;
        Err::<(), _>(AppError::SoldOut)
    });
    assert!(matches!(done.await, Err(AppError::SoldOut)));
    assert_eq!((count(&runs), counters.value(1).await), (1, 0), "rolled back, and not run again");

    // A constraint.
    let done = patiently().run(&counters.pool, async |tx| {
        runs.fetch_add(1, Ordering::SeqCst);
        tx.execute("INSERT INTO counter (id, value) VALUES (3, 0)").await?;
        tx.execute("INSERT INTO counter (id, value) VALUES (1, 0)").await?;
        Ok::<_, sqlx::Error>(())
    });
    let error = done.await.expect_err("it exists");
    assert!(matches!(&error, sqlx::Error::Database(error) if error.is_unique_violation()));
    assert_eq!(count(&runs), 2);

    // Errors of this crate that are not conflicts, and their sources.
    let done = patiently().run(&counters.pool, async |_| {
        runs.fetch_add(1, Ordering::SeqCst);
        Err::<(), _>(AppError::Lock(Error::from(sqlx::Error::PoolTimedOut)))
    });
    assert!(matches!(done.await, Err(AppError::Lock(Error::PoolExhausted { .. }))));
    assert_eq!(count(&runs), 3);

    // A connection that cannot be opened.
    let closed = connect(&counters.db.url, 1).await;
    closed.close().await;
    let done = patiently().run(&closed, async |_| {
        runs.fetch_add(1, Ordering::SeqCst);
        Ok::<_, Error>(())
    });
    assert!(matches!(done.await, Err(Error::Unavailable { .. })));
    assert_eq!(count(&runs), 3, "it never began");
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM counter").fetch_one(&counters.pool).await.expect("count");
    assert_eq!(rows, 2);
}

/// The caller has set the limit of the wait. On SQLite this is the busy timeout for the only write
/// lock: there, a timeout is worth another attempt.
#[tokio::test]
async fn lock_wait_timeout_is_not_retried() {
    let counters = counters().await;
    let mut rival = counters.pool.begin_with(begin_to_write()).await.expect("begin");
    add_one(&mut rival, 1).await.expect("write");
    let rival = Mutex::new(Some(rival));
    let runs = AtomicU32::new(0);
    if DATABASE == Database::Sqlite {
        let hasty = connect(&counters.db.url, 1).await;
        run(&hasty, "PRAGMA busy_timeout = 0").await;
        let done = patiently().begin_with("BEGIN").run(&hasty, async |tx| {
            if runs.fetch_add(1, Ordering::SeqCst) == 1 {
                let rival = rival.lock().expect("no panic").take().expect("still there");
                rival.commit().await?;
            }
            add_one(tx, 1).await
        });
        done.await.expect("it gets through");
        assert_eq!((count(&runs), counters.value(1).await), (2, 2));
        return;
    }
    for (sql, codes) in [
        ("SELECT value FROM counter WHERE id = 1 FOR UPDATE NOWAIT", ["55P03", "3572", "1205"]),
        ("SELECT value FROM counter WHERE id = 1 FOR UPDATE", ["55P03", "1205", "1205"]),
    ] {
        let done = patiently().run(&counters.pool, async |tx| {
            runs.fetch_add(1, Ordering::SeqCst);
            tx.execute(match DATABASE {
                Database::Postgres => "SET LOCAL lock_timeout = '100ms'",
                _ => "SET SESSION innodb_lock_wait_timeout = 1",
            })
            .await?;
            tx.execute(sql).await?;
            Ok::<_, Error>(())
        });
        let error = done.await.expect_err("locked");
        assert!(!error.is_conflict() && error.is_retryable(), "{error:?}");
        let Error::Database { source: sqlx::Error::Database(source), .. } = &error else { panic!("{error:?}") };
        let nth = match DATABASE {
            Database::Postgres => 0,
            Database::MySql => 1,
            _ => 2,
        };
        assert_eq!(code(source.as_ref()), codes[nth], "{source}");
    }
    assert_eq!(count(&runs), 2);
}

/// Returns the begin statement of a transaction that is not under test.
fn begin_to_write() -> &'static str {
    if DATABASE == Database::Sqlite { "BEGIN IMMEDIATE" } else { "BEGIN" }
}

#[tokio::test]
async fn bounded_attempts_return_the_last_error() {
    let bank = bank().await;
    let runs = AtomicU32::new(0);
    let in_vain = async |tx: &mut Tx<'_>| {
        runs.fetch_add(1, Ordering::SeqCst);
        sqlx::query("UPDATE accounts SET balance = 0").execute(&mut **tx).await?;
        bank.accounts.update(&mut *tx, 1, 7, |_| {}).await
    };
    let mut total = 0;
    for (retry, least, most) in [
        (Retry::new().attempts(3), 3, 3),
        (Retry::new().attempts(1), 1, 1),
        (Retry::new().attempts(0), 1, 1),
        (Retry::new().within(Duration::ZERO), 1, 1),
        (Retry::new(), 1, 10),
        // Only the time limit ends this case.
        (Retry::new().attempts(u32::MAX).within(Duration::from_millis(300)), 1, u32::MAX),
    ] {
        let start = Instant::now();
        let error = soon("the end", retry.clone().run(&bank.pool, in_vain)).await.expect_err("always a conflict");
        let attempts = count(&runs) - total;
        total += attempts;
        assert!((least..=most).contains(&attempts), "{retry:?}: {attempts}");
        assert!(matches!(error, Error::Conflict { expected: Some(7), found: Some(1), .. }), "{error:?}");
        // A pause of at least half a millisecond before each attempt but the first.
        assert!(start.elapsed() >= Duration::from_micros(500) * (attempts - 1), "{attempts}");
    }
    assert_eq!(bank.balance(1).await, 100, "all were rolled back");
}

/// The closure hides an error. PostgreSQL then rolls back the transaction, and answers the COMMIT
/// without an error.
#[tokio::test]
async fn aborted_transaction_is_not_reported_as_committed() {
    let counters = counters().await;
    let runs = AtomicU32::new(0);
    let done = patiently().run(&counters.pool, async |tx| {
        runs.fetch_add(1, Ordering::SeqCst);
        add_one(tx, 1).await?;
        let _ = tx.execute("INSERT INTO counter (id, value) VALUES (1, 0)").await;
        Ok::<_, sqlx::Error>(())
    });
    let done = done.await;
    let written = counters.value(1).await;
    if DATABASE == Database::Postgres {
        let Err(sqlx::Error::Database(error)) = &done else { panic!("{done:?}") };
        assert_eq!((error.code().as_deref(), written), (Some("25P02"), 0));
    } else {
        // The other databases roll back only the statement.
        done.expect("commit");
        assert_eq!(written, 1);
    }
    assert_eq!(count(&runs), 1);

    // In a savepoint, the error is harmless on every database.
    let done = patiently().run(&counters.pool, async |tx| {
        add_one(tx, 2).await?;
        let mut inner = tx.begin().await?;
        inner.execute("INSERT INTO counter (id, value) VALUES (1, 0)").await.expect_err("it exists");
        inner.rollback().await?;
        Ok::<_, sqlx::Error>(())
    });
    done.await.expect("commit");
    assert_eq!(counters.value(2).await, 1);
}

/// sqlx rolls the whole transaction back when a savepoint fails, or is dropped before it exists.
/// Except on MySQL, later statements then commit by themselves.
#[tokio::test]
async fn transaction_ended_by_savepoint_reports_no_commit() {
    let bank = bank().await;
    bank.open(2, "bob").await.expect("insert");
    let (begun, mut known) = (AtomicU32::new(0), [100, 100]);
    let mut check = async |outcome: Result<(), Error>| {
        let written = [bank.balance(1).await, bank.balance(2).await];
        let begun = begun.swap(0, Ordering::SeqCst);
        match outcome {
            Ok(()) => assert_eq!((written, begun), ([known[0] - 5, known[1] - 7], 1)),
            Err(Error::Conflict { .. }) => assert_eq!((written, begun), (known, 3)),
            // No attempt follows one that was ended, so no part takes effect twice.
            Err(Error::CommitUnknown { .. }) => {
                assert!(written[0] >= known[0] - 5 && written[1] >= known[1] - 7, "{known:?}, {written:?}");
            }
            Err(other) => panic!("{other:?}"),
        }
        known = written;
    };

    let failed = Retry::new().run(&bank.pool, async |tx| {
        begun.fetch_add(1, Ordering::SeqCst);
        tx.execute("UPDATE accounts SET balance = balance - 5 WHERE id = 1").await?;
        let _ = tx.execute("INSERT INTO accounts SELECT * FROM accounts").await;
        let _ = tx.begin().await;
        tx.execute("UPDATE accounts SET balance = balance - 7 WHERE id = 2").await?;
        Ok(())
    });
    check(failed.await).await;

    everywhere(async |point| {
        let exists = AtomicBool::new(false);
        for conflict in [false, true] {
            let dropped = Retry::new().attempts(3).run(&bank.pool, async |tx| {
                begun.fetch_add(1, Ordering::SeqCst);
                tx.execute("UPDATE accounts SET balance = balance - 5 WHERE id = 1").await?;
                if DATABASE == Database::Sqlite {
                    // The connection is still busy with it when the savepoint is dropped.
                    let busy = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 200000)
                                SELECT count(*) FROM n";
                    let _ = tokio::time::timeout(Duration::from_millis(1), tx.execute(busy)).await;
                }
                exists.store(drop_at(point, tx.begin()).await.is_some(), Ordering::SeqCst);
                tx.execute("UPDATE accounts SET balance = balance - 7 WHERE id = 2").await?;
                if conflict { bank.accounts.update(&mut *tx, 1, 7, |_| {}).await.map(|_| ()) } else { Ok(()) }
            });
            check(dropped.await).await;
        }
        exists.into_inner()
    })
    .await;
}

/// MySQL checks every constraint with the statement.
#[tokio::test]
async fn refused_commit_is_reported_as_failed() {
    let counters = counters().await;
    run(
        &counters.pool,
        match DATABASE {
            Database::MySql | Database::MariaDb => {
                "CREATE TABLE part (id INTEGER PRIMARY KEY, whole INTEGER, FOREIGN KEY (whole) REFERENCES counter (id))"
            }
            _ => {
                "CREATE TABLE part (id INTEGER PRIMARY KEY,
                                    whole INTEGER REFERENCES counter (id) DEFERRABLE INITIALLY DEFERRED)"
            }
        },
    )
    .await;
    let (runs, ends) = (AtomicU32::new(0), AtomicU32::new(0));
    let done = patiently().run(&counters.pool, async |tx| {
        runs.fetch_add(1, Ordering::SeqCst);
        tx.execute("INSERT INTO part (id, whole) VALUES (1, 9)").await?;
        ends.fetch_add(1, Ordering::SeqCst);
        Ok::<_, sqlx::Error>(())
    });
    let error = done.await.expect_err("there is no such whole");
    assert!(matches!(&error, sqlx::Error::Database(error) if error.is_foreign_key_violation()), "{error:?}");
    assert_eq!((count(&runs), count(&ends)), (1, u32::from(!DATABASE.is_mysql())));
    let parts: i64 = sqlx::query_scalar("SELECT count(*) FROM part").fetch_one(&counters.pool).await.expect("count");
    assert_eq!(parts, 0);
}

/// The server commits, and its answer is lost.
#[tokio::test]
async fn commit_with_lost_reply_is_not_rerun() {
    let counters = counters().await;
    if DATABASE == Database::Sqlite {
        return commit_that_waits_for_readers_is_run_again(&counters).await;
    }
    let (proxy, url) = behind_a_proxy(&counters.db.url);
    let far = connect(&url, 1).await;
    let runs = AtomicU32::new(0);
    // On PostgreSQL the commit can be made to wait until the test has seen it.
    let mut gate = counters.pool.acquire().await.expect("a connection");
    if DATABASE == Database::Postgres {
        for sql in [
            "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS
                $$ BEGIN PERFORM pg_advisory_xact_lock(hashtext(current_schema())); RETURN NULL; END $$",
            "CREATE CONSTRAINT TRIGGER wait AFTER UPDATE ON counter DEFERRABLE INITIALLY DEFERRED
                FOR EACH ROW EXECUTE FUNCTION wait()",
            "SELECT pg_advisory_lock(hashtext(current_schema()))",
        ] {
            gate.execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
        }
    }
    let running = patiently().run(&far, async |tx| {
        runs.fetch_add(1, Ordering::SeqCst);
        add_one(tx, 1).await?;
        if DATABASE != Database::Postgres {
            // Nothing but the COMMIT comes after this.
            proxy.cut_next_reply();
        }
        Ok::<_, Error>(())
    });
    let cut = async {
        if DATABASE == Database::Postgres {
            let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity AS a JOIN pg_locks AS l USING (pid)
                                         WHERE a.query = 'COMMIT' AND l.locktype = 'advisory' AND NOT l.granted
                                           AND l.objid::bigint = hashtext(current_schema())::bigint & 4294967295)";
            while !sqlx::query_scalar::<_, bool>(waits).fetch_one(&counters.pool).await.expect("activity") {
                sleep(Duration::from_millis(20)).await;
            }
            proxy.reset();
        }
    };
    let (done, ()) = soon("the answer", async { tokio::join!(running, cut) }).await;
    assert!(matches!(&done, Err(Error::CommitUnknown { source: sqlx::Error::Io(_) })), "{done:?}");
    drop(gate.close().await);
    // The transaction was committed; a rerun of the closure would have added another one.
    until("the commit", async || counters.value(1).await > 0).await;
    assert_eq!((counters.value(1).await, count(&runs)), (1, 1));
    proxy.pass();
    // The pool does not reuse the connection.
    assert_eq!(
        soon("another one", sqlx::query_scalar::<_, i32>("SELECT 1").fetch_one(&far)).await.expect("it works"),
        1
    );
}

/// SQLite has no network: its answer to a COMMIT is always known. In a file without a WAL, readers
/// delay a commit for a time.
async fn commit_that_waits_for_readers_is_run_again(counters: &Counters) {
    let db = crate::support::empty().await;
    let pool = db.pool_of(1).await;
    run(&pool, "CREATE TABLE counter (id INTEGER PRIMARY KEY, value BIGINT NOT NULL)").await;
    run(&pool, "INSERT INTO counter (id, value) VALUES (1, 0)").await;
    run(&pool, "PRAGMA busy_timeout = 0").await;
    let other = db.pool_of(1).await;
    let mut reader = other.begin().await.expect("begin");
    assert_eq!(value(&mut reader, 1).await.expect("read"), 0);
    let reader = Mutex::new(Some(reader));
    let runs = AtomicU32::new(0);
    let done = patiently().run(&pool, async |tx| {
        if runs.fetch_add(1, Ordering::SeqCst) == 1 {
            let reader = reader.lock().expect("no panic").take().expect("still there");
            reader.rollback().await?;
        }
        add_one(tx, 1).await
    });
    done.await.expect("commit");
    assert_eq!(count(&runs), 2);
    let mut tx = pool.begin().await.expect("begin");
    assert_eq!(value(&mut tx, 1).await.expect("read"), 1);
    assert_eq!(counters.value(1).await, 0);
}

/// The connection is lost before the COMMIT is sent: it is known that nothing was written.
#[tokio::test]
async fn connection_lost_before_commit_is_a_failure() {
    let counters = counters().await;
    let runs = AtomicU32::new(0);
    if DATABASE == Database::Sqlite {
        // SQLite has no connection to lose, only the closure itself.
        let pool = counters.pool.clone();
        let running = tokio::spawn(async move {
            let panics = Retry::new().run(&pool, async |tx| {
                add_one(tx, 1).await?;
                if value(tx, 1).await? == 1 {
                    panic!("as expected");
                }
                Ok::<_, sqlx::Error>(())
            });
            panics.await
        });
        assert!(running.await.expect_err("a panic goes through").is_panic());
        assert_eq!(counters.value(1).await, 0);
        return;
    }
    let (proxy, url) = behind_a_proxy(&counters.db.url);
    let far = connect(&url, 1).await;
    let done = patiently().run(&far, async |tx| {
        runs.fetch_add(1, Ordering::SeqCst);
        add_one(tx, 1).await?;
        proxy.reset();
        add_one(tx, 2).await?;
        Ok::<_, Error>(())
    });
    let done = soon("the answer", done).await;
    assert!(matches!(&done, Err(Error::Unavailable { .. })), "{done:?}");
    assert_eq!((count(&runs), counters.value(1).await, counters.value(2).await), (1, 0, 0));
}

#[tokio::test]
async fn dropped_future_rolls_back_at_once() {
    let counters = counters().await;
    let small = connect(&counters.db.url, 1).await;
    let inside = Arc::new(Notify::new());
    let running = tokio::spawn({
        let (small, inside) = (small.clone(), Arc::clone(&inside));
        async move {
            let done = Retry::new().run(&small, async |tx| {
                add_one(tx, 1).await?;
                inside.notify_one();
                std::future::pending::<Result<(), sqlx::Error>>().await
            });
            done.await
        }
    });
    soon("the transaction", inside.notified()).await;
    running.abort();
    assert!(running.await.expect_err("aborted").is_cancelled());
    // The row is free, and as it was.
    soon("the end of the transaction", run(&counters.pool, "UPDATE counter SET value = value + 10 WHERE id = 1")).await;
    assert_eq!(counters.value(1).await, 10);
    soon("the pool", run(&small, "UPDATE counter SET value = value + 10 WHERE id = 1")).await;
}

/// At every point of a drop, even while a statement is prepared, the pool gets its connection back,
/// no transaction is left open, and writes are complete.
#[tokio::test]
async fn run_may_be_dropped_anywhere() {
    let counters = counters().await;
    let pool = connect(&counters.db.url, 1).await;
    let (done, begun) = (AtomicU32::new(0), AtomicU32::new(0));
    everywhere(async |point| {
        let transfer = Retry::new().run(&pool, async |tx| {
            begun.fetch_add(1, Ordering::SeqCst);
            // Prepared anew each time, as on a connection that is new, with parameters and columns
            // to be told of.
            let mut update = QueryBuilder::<Sql>::new(format!("UPDATE counter /* {point:?} */ SET value = value + "));
            update.push_bind(1_i64).push(" WHERE id = ").push_bind(1_i32).build().execute(&mut **tx).await?;
            let mut look =
                QueryBuilder::<Sql>::new(format!("SELECT id, value /* {point:?} */ FROM counter WHERE id = "));
            look.push_bind(1_i32).build().fetch_one(&mut **tx).await?;
            add_one(tx, 2).await
        });
        let outcome = drop_at(point, transfer).await;
        let is_done = outcome.is_some();
        if let Some(outcome) = outcome {
            outcome.expect("nobody is in the way");
            done.fetch_add(1, Ordering::SeqCst);
        }
        free(&pool, &counters.pool).await;
        let (one, two) = (counters.value(1).await, counters.value(2).await);
        assert_eq!(one, two, "{point:?}: half a transaction");
        assert!(one >= i64::from(count(&done)), "{point:?}: {one}");
        // A commit that was dropped may have been carried out.
        assert!(one <= i64::from(count(&begun)), "{point:?}: {one}");
        is_done
    })
    .await;
    assert!(count(&done) > 0);
}

/// A database in memory keeps its tables in one connection, which must not be closed.
async fn pools_of_one(counters: &Counters) -> Vec<Pool<Sql>> {
    let mut pools = vec![connect(&counters.db.url, 1).await];
    if DATABASE == Database::Sqlite {
        let memory = connect("sqlite::memory:", 1).await;
        run(&memory, "CREATE TABLE counter (id INTEGER PRIMARY KEY, value BIGINT NOT NULL)").await;
        run(&memory, "INSERT INTO counter (id, value) VALUES (1, 0), (2, 0)").await;
        pools.push(memory);
    }
    pools
}

/// Statements that end the transaction they are sent in: `ROLLBACK` and `COMMIT` by hand, and on
/// SQLite also a conflict clause and a full disk.
pub(super) fn statements_that_end_a_transaction() -> &'static [&'static [&'static str]] {
    match DATABASE {
        Database::Sqlite => &[
            &["ROLLBACK"],
            &["COMMIT"],
            &["INSERT OR ROLLBACK INTO counter (id, value) VALUES (1, 0)"],
            &["PRAGMA max_page_count = 1", "CREATE TABLE ballast AS SELECT randomblob(10000000) AS bytes"],
        ],
        _ => &[&["ROLLBACK"], &["COMMIT"]],
    }
}

pub(super) async fn send(tx: &mut Tx<'_>, statements: &'static [&'static str]) -> Result<(), sqlx::Error> {
    for sql in statements {
        tx.execute(*sql).await?;
    }
    Ok(())
}

#[tokio::test]
async fn transaction_begun_with_a_comment_is_committed() {
    let counters = counters().await;
    Retry::new()
        .begin_with("BEGIN -- for the report")
        .run(&counters.pool, async |tx| add_one(tx, 1).await)
        .await
        .expect("committed");
    let mut tx = counters.pool.begin().await.expect("begin");
    assert_eq!(value(&mut tx, 1).await.expect("the value"), 1);
}

/// On SQLite, what the closure writes after the end of its transaction commits by itself.
#[tokio::test]
async fn closure_outliving_its_transaction_has_unknown_outcome() {
    let end = match DATABASE {
        Database::Sqlite => "INSERT OR ROLLBACK INTO counter (id, value) VALUES (1, 0)",
        Database::Postgres => "INSERT INTO counter (id, value) VALUES (1, 0)",
        _ => "ROLLBACK",
    };
    let stale: fn() -> Result<(), AppError> =
        || Err(AppError::Lock(Error::Row { table: "counter".into(), cause: RowError::StaleSnapshot }));
    for result in [|| Ok(()), || Err(AppError::SoldOut), stale] {
        let (counters, begun) = (counters().await, AtomicU32::new(0));
        let outcome = Retry::new().attempts(3).run(&counters.pool, async |tx| {
            begun.fetch_add(1, Ordering::SeqCst);
            let _ = tx.execute(end).await;
            let _ = add_one(tx, 2).await;
            result()
        });
        let error = outcome.await.expect_err("the transaction has ended");
        if DATABASE == Database::Sqlite {
            assert!(matches!(error, AppError::Lock(Error::CommitUnknown { .. })), "{error:?}");
            assert_eq!((counters.value(2).await, count(&begun)), (1, 1));
        } else {
            assert_eq!(counters.value(2).await, 0);
        }
    }
}

/// On MySQL and MariaDB, DDL commits what the closure has written before.
#[tokio::test]
async fn part_committed_by_ddl_is_not_repeated() {
    let (bank, begun) = (bank().await, AtomicU32::new(0));
    let outcome = Retry::new().attempts(3).run(&bank.pool, async |tx| {
        begun.fetch_add(1, Ordering::SeqCst);
        tx.execute("UPDATE accounts SET balance = balance - 5").await?;
        tx.execute("CREATE TABLE IF NOT EXISTS aside (id INTEGER)").await?;
        bank.accounts.update(&mut *tx, 1, 7, |_| {}).await
    });
    let error = outcome.await.expect_err("always a conflict");
    let expected = if DATABASE.is_mysql() { (true, 1, 95) } else { (false, 3, 100) };
    let is_unknown = matches!(error, Error::CommitUnknown { .. });
    let balance = bank.row(1).await.map_or(0, |row| row.3);
    assert_eq!((is_unknown, count(&begun), balance), expected, "{error:?}");
}

#[tokio::test]
async fn pool_stays_usable_after_statement_ended_transaction() {
    let counters = counters().await;
    for pool in pools_of_one(&counters).await {
        for &statements in statements_that_end_a_transaction() {
            // Other tests check the outcome of this run.
            let _ = Retry::new().run(&pool, async |tx| send(tx, statements).await).await;
            let _ = Retry::new()
                .run(&pool, async |tx| {
                    let mut savepoint = tx.begin().await?;
                    send(&mut savepoint, statements).await
                })
                .await;
            run_dropped_after(&pool, statements).await;
            if DATABASE == Database::Sqlite {
                run(&pool, "PRAGMA max_page_count = 1000000").await;
            }
            let next = Retry::new().run(&pool, async |tx| add_one(tx, 2).await);
            soon("the next run", next).await.unwrap_or_else(|error| panic!("after {statements:?}: {error}"));
            free(&pool, &pool).await;
        }
    }
}

/// Drops a run that has sent these statements and does nothing more.
async fn run_dropped_after(pool: &Pool<Sql>, statements: &'static [&'static str]) {
    let sent = Notify::new();
    let running = Retry::new().run(pool, async |tx| {
        let _ = send(tx, statements).await;
        sent.notify_one();
        std::future::pending::<Result<(), sqlx::Error>>().await
    });
    tokio::select! {
        ended = running => panic!("after {statements:?}: {ended:?}"),
        () = sent.notified() => {}
    }
}

/// Checks that the pool of one has its connection again, and that its writes are not part of an
/// abandoned transaction: others can write the same row at once.
async fn free(pool: &Pool<Sql>, others: &Pool<Sql>) {
    let write = "UPDATE counter SET value = value";
    soon("a connection that is free", run(pool, write)).await;
    soon("rows that are free", run(others, write)).await;
}
