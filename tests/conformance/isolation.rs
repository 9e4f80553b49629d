//! Isolation levels and other defaults set by the database or the user (promise 14), and fences at
//! every isolation level of a transaction (promise 6).
//!
//! Promises: 6, 14.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlock::lease::FenceError;
use sqlock::{Error, LeaseRequest, Locks, LossCause};
use sqlx::{AssertSqlSafe, Executor};
use sqlx_core::transaction::TransactionManager;
use tokio::time::{Instant, sleep};

use super::fence::{
    Counters, IsolatedPool, add_one, assert_kept_out, counters, counters_in, keeps_to_snapshots, levels, run,
    spawn_waiter, until_expired,
};
use crate::support::server::{Options, Server};
use crate::support::{Database, SOON, builder, connect, fresh, fresh_on, renewed_twice, soon, until, until_waiters};
use crate::{DATABASE, Sql};

// ---- defaults

/// Several clients and many tasks, with a common name and names of their own.
async fn storm(url: &str) {
    let inside = Arc::new(AtomicBool::new(false));
    let mut tasks = tokio::task::JoinSet::new();
    for client in 0..4 {
        let locks = builder(connect(url, 1).await).build();
        for task in 0..4 {
            let (locks, inside) = (locks.clone(), Arc::clone(&inside));
            tasks.spawn(async move {
                let mut last = None;
                for round in 0..8 {
                    let hot = locks.lease("hot").wait(SOON).acquire().await.expect("no error surfaces");
                    assert!(!inside.swap(true, Ordering::SeqCst), "two holders");
                    assert!(Some(hot.token()) > last, "tokens only rise");
                    last = Some(hot.token());
                    tokio::task::yield_now().await;
                    inside.store(false, Ordering::SeqCst);
                    hot.release().await.expect("no error surfaces");
                    let own = format!("{client}/{task}/{round}");
                    let own = locks.lease(own).try_acquire().await.expect("no error surfaces").expect("nobody else's");
                    own.extend(SOON).await.expect("no error surfaces");
                    if let Some(hot) = locks.lease("hot").try_acquire().await.expect("no error surfaces") {
                        assert!(!inside.swap(true, Ordering::SeqCst), "two holders");
                        inside.store(false, Ordering::SeqCst);
                        drop(hot);
                    }
                    own.release().await.expect("no error surfaces");
                }
            });
        }
    }
    let all = async {
        while let Some(task) = tasks.join_next().await {
            task.expect("no task panics");
        }
    };
    tokio::time::timeout(SOON * 4, all).await.expect("the storm ends");
    verbs(&builder(connect(url, 1).await).build()).await;
}

/// Runs the operations that a storm does not use.
async fn verbs(locks: &Locks) {
    let renewed = locks.lease("verbs/renewed").ttl(Duration::from_secs(6)).acquire().await.expect("acquire");
    let evicted = locks.lease("verbs/evicted").acquire().await.expect("acquire");
    assert_eq!(locks.list("verbs/").await.expect("list").len(), 2);
    assert!(locks.evict("verbs/evicted", evicted.token()).await.expect("evict"));
    assert!(locks.inspect("verbs/evicted").await.expect("inspect").is_none());
    locks.sweeper().retention(Duration::from_secs(3600)).sweep().await.expect("sweep");
    renewed_twice(locks, "verbs/renewed").await;
    assert!(renewed.is_held());
    renewed.release().await.expect("release");
}

/// Reads the default of the application's connections.
async fn default_isolation(url: &str) -> String {
    let sql = match DATABASE {
        Database::Postgres => "SELECT upper(current_setting('default_transaction_isolation'))",
        Database::MySql => "SELECT replace(@@transaction_isolation, '-', ' ')",
        Database::MariaDb => "SELECT replace(@@tx_isolation, '-', ' ')",
        Database::Sqlite => "PRAGMA journal_mode",
    };
    sqlx::query_scalar(sql).fetch_one(&connect(url, 1).await).await.expect("settings can be read")
}

/// Runs a storm at the server's own default. SQLite has no choice of isolation levels: its journal
/// mode determines how transactions exclude each other.
async fn storm_at_the_servers_default(level: &str, journal: &'static str) {
    let Some(kind) = DATABASE.server() else {
        let db = fresh().await;
        run(&db.pool_of(1).await, journal).await;
        assert!(journal.to_lowercase().ends_with(&default_isolation(&db.url).await));
        return storm(&db.url).await;
    };
    let setting = match DATABASE {
        Database::Postgres => format!("default_transaction_isolation={}", level.to_lowercase()),
        _ => format!("--transaction-isolation={}", level.replace(' ', "-")),
    };
    let server = Server::start_with(kind, Options { settings: vec![setting], ..Options::default() });
    let db = fresh_on(&server.url()).await;
    assert_eq!(default_isolation(&db.url).await, level);
    storm(&db.url).await;
    if DATABASE == Database::Postgres {
        // The default of the role; the server's default differs.
        let admin = connect(&server.url(), 1).await;
        run(&admin, "ALTER SYSTEM SET default_transaction_isolation = 'read committed'").await;
        run(&admin, "SELECT pg_reload_conf()").await;
        run(&admin, "CREATE ROLE strict SUPERUSER LOGIN").await;
        let sql = format!("ALTER ROLE strict SET default_transaction_isolation = '{}'", level.to_lowercase());
        admin.execute(AssertSqlSafe(sql)).await.expect("a setting of the role");
        let url = db.url.replacen("postgres://postgres@", "postgres://strict@", 1);
        assert_eq!(default_isolation(&url).await, level);
        storm(&url).await;
    }
}

#[tokio::test]
async fn storm_succeeds_with_repeatable_read_as_default() {
    storm_at_the_servers_default("REPEATABLE READ", "PRAGMA journal_mode = WAL").await;
}

#[tokio::test]
async fn storm_succeeds_with_serializable_as_default() {
    storm_at_the_servers_default("SERIALIZABLE", "PRAGMA journal_mode = DELETE").await;
}

/// On PostgreSQL, the URL sets the isolation level and two defaults that would refuse or lose
/// writes. On the others, the pool sets up its connections; sqlock's connections do not run these
/// hooks and do not need them.
#[tokio::test]
async fn storm_succeeds_with_defaults_of_the_caller() {
    let db = fresh().await;
    match DATABASE {
        Database::Postgres => {
            for level in ["repeatable read", "serializable"] {
                let url = format!(
                    "{}&options=-cdefault_transaction_isolation%3D{}&options=-cdefault_transaction_read_only%3Don\
                     &options=-csynchronous_commit%3Doff",
                    db.url,
                    level.replace(' ', "%5C%20"),
                );
                assert_eq!(default_isolation(&url).await, level.to_uppercase());
                let read_only: String = sqlx::query_scalar("SHOW default_transaction_read_only")
                    .fetch_one(&connect(&url, 1).await)
                    .await
                    .expect("settings can be read");
                assert_eq!(read_only, "on");
                storm(&url).await;
            }
        }
        _ => {
            for &level in levels() {
                let app = IsolatedPool::at(&db.url, level).await;
                let locks = builder(app.pool().clone()).build();
                let tx = app.begin().await;
                tx.rollback().await.expect("rollback");
                let lease = locks.lease("a").acquire().await.expect("acquire");
                assert!(db.locks().await.lease("a").try_acquire().await.expect("try").is_none());
                lease.release().await.expect("release");
                verbs(&locks).await;
            }
            storm(&db.url).await;
        }
    }
}

/// A grant must not be lost to an asynchronous commit: after a crash, two clients would hold the
/// name.
#[tokio::test]
async fn grant_survives_a_crash_with_asynchronous_commits() {
    if DATABASE != Database::Postgres {
        // MySQL and MariaDB have no such setting of a session or user; SQLite's `synchronous` is
        // the caller's, and a process that dies loses nothing by it. The test checks instead that a
        // grant is committed when it is returned.
        let db = fresh().await;
        let lease = db.locks().await.lease("a").acquire().await.expect("acquire");
        let seen = db.locks().await.inspect("a").await.expect("inspect").expect("held");
        assert_eq!(seen.token, lease.token());
        return;
    }
    let settings = ["synchronous_commit=off", "wal_writer_delay=10s", "wal_writer_flush_after=1GB"];
    let settings = settings.map(String::from).to_vec();
    let options = Options { settings, ..Options::default() };
    let mut server = Server::start_with(crate::support::server::Kind::Postgres, options);
    let db = fresh_on(&server.url()).await;
    let pool = db.pool_of(1).await;
    run(&pool, "CREATE TABLE async (id INTEGER NOT NULL PRIMARY KEY)").await;
    let locks = db.locks().await;
    let lease = locks.lease("a").ttl(Duration::from_secs(600)).acquire().await.expect("acquire");
    run(&pool, "INSERT INTO async (id) VALUES (1)").await;
    server.kill();
    server.restart();
    let pool = db.pool_of(1).await;
    let seen = db.locks().await.inspect("a").await.expect("inspect").expect("the grant has survived");
    assert_eq!(seen.token, lease.token());
    // The control: without the setting, commits after the grant are lost.
    let kept: i64 = sqlx::query_scalar("SELECT count(*) FROM async").fetch_one(&pool).await.expect("count");
    assert_eq!(kept, 0, "this crash loses nothing, so it proves nothing");
}

// ---- fences

#[tokio::test]
async fn fence_works_at_every_isolation_level() {
    let counters = counters().await;
    let (ours, theirs, others) = (counters.db.locks().await, counters.db.locks().await, counters.db.locks().await);
    for (i, &level) in levels().iter().enumerate() {
        let app = counters.at(level).await;
        let lease = ours.lease(level).ttl(Duration::from_secs(5)).renew(false).acquire().await.expect("acquire");
        let mut tx = app.begin().await;
        lease.fence(&mut tx).await.unwrap_or_else(|e| panic!("{level}: {e}"));
        add_one(&mut tx, 1).await.expect("write");
        let next = spawn_waiter(&theirs, level);
        soon("the expiry", lease.lost()).await;
        until_expired(&others, level).await;
        assert_kept_out(&others, level).await;
        assert!(!next.is_finished(), "{level}: somebody got in before the fenced transaction had ended");
        tx.commit().await.unwrap_or_else(|e| panic!("{level}: {e}"));
        let next = soon("the takeover", next).await.expect("no panic");
        assert!(next.token() > lease.token());
        assert_eq!(counters.value(1).await, i as i64 + 1);

        // After the loss of the lease, the fence fails.
        assert!(others.evict(level, next.token()).await.expect("evict"));
        let mut tx = app.begin().await;
        let error = next.fence(&mut tx).await.expect_err("evicted");
        assert!(matches!(error, Error::Lost { cause: LossCause::Superseded, .. }), "{level}: {error}");
        tx.rollback().await.expect("rollback");
    }
}

/// Checks that a fence locks no gap of a table: clients acquire and wait for names before and after
/// the fenced one while no other entry waits.
async fn fence_at_any_isolation_level_stops_no_other_name(request: fn(&Locks, &str) -> LeaseRequest) {
    if DATABASE == Database::Sqlite {
        // A transaction that writes keeps all other writers waiting.
        return;
    }
    for &level in levels() {
        let counters = counters().await;
        let (ours, theirs, others) = (counters.db.locks().await, counters.db.locks().await, counters.db.locks().await);
        let app = counters.at(level).await;
        let fenced = request(&ours, "fenced").acquire().await.expect("acquire");
        let held = theirs.lease_all(["before", "g"]).acquire().await.expect("acquire");
        let mut tx = app.begin().await;
        fenced.fence(&mut tx).await.unwrap_or_else(|e| panic!("{level}: {e}"));
        let waiting = ["before", "g"].map(|name| spawn_waiter(&others, name));
        for name in ["before", "g"] {
            until_waiters(&theirs, name, 1).await;
        }
        for name in ["a", "z"] {
            let lease = others.lease(name).acquire().await.unwrap_or_else(|e| panic!("{level}, {name}: {e}"));
            lease.release().await.expect("release");
        }
        held.release().await.expect("release");
        for next in waiting {
            soon("the hand-over", next).await.expect("no panic").release().await.expect("release");
        }
        tx.rollback().await.expect("rollback");
        fenced.release().await.expect("release");
    }
}

/// The fence finds no holding in the transaction, which stays open.
#[tokio::test]
async fn failed_fence_stops_no_other_name() {
    if DATABASE == Database::Sqlite {
        // The transaction reads, and its fence writes nothing.
        return;
    }
    for &level in levels() {
        let counters = counters().await;
        let (ours, theirs, others) = (counters.db.locks().await, counters.db.locks().await, counters.db.locks().await);
        let app = counters.at(level).await;
        let evicted = ours.lease("fenced").renew(false).acquire().await.expect("acquire");
        assert!(theirs.evict("fenced", evicted.token()).await.expect("evict"));
        let mut tx = app.begin().await;
        let error = evicted.fence(&mut tx).await.expect_err("evicted");
        assert!(error.is_lost(), "{level}: {error}");
        // At SERIALIZABLE, every read of a transaction locks the row that it finds.
        let own = (level != "SERIALIZABLE").then_some("fenced");
        for name in ["a", "z"].into_iter().chain(own) {
            let held = theirs.lease(name).acquire().await.unwrap_or_else(|e| panic!("{level}, {name}: {e}"));
            let next = spawn_waiter(&others, name);
            until_waiters(&theirs, name, 1).await;
            held.release().await.expect("release");
            soon("the hand-over", next).await.expect("no panic").release().await.expect("release");
        }
        tx.rollback().await.expect("rollback");
    }
}

#[tokio::test]
async fn fence_stops_no_other_name_at_any_isolation() {
    fence_at_any_isolation_level_stops_no_other_name(|locks, name| locks.lease(name)).await;
}

#[tokio::test]
async fn shared_fence_stops_no_other_name_at_any_isolation() {
    fence_at_any_isolation_level_stops_no_other_name(|locks, name| locks.lease(name).shared()).await;
}

/// On SQLite the fence takes the only write lock of the file, so no lease can be renewed meanwhile:
/// the lease expires, its holder knows, and the name is not granted before the transaction ends.
#[tokio::test]
async fn renewals_continue_during_a_long_fenced_transaction() {
    let counters = counters().await;
    let ttl = Duration::from_secs(6);
    if DATABASE == Database::Sqlite {
        for &level in levels() {
            let ttl = ttl / 2;
            let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
            let lease = ours.lease(level).ttl(ttl).acquire().await.expect("acquire");
            let app = counters.at(level).await;
            let mut tx = app.begin().await;
            lease.fence(&mut tx).await.expect("fence");
            assert_eq!(soon("the loss", lease.lost()).await, LossCause::Expired);
            let next = spawn_waiter(&theirs, level);
            sleep(ttl / 3).await;
            assert!(!next.is_finished());
            add_one(&mut tx, 1).await.expect("write");
            tx.commit().await.expect("who is fenced may commit");
            let next = soon("the takeover", next).await.expect("no panic");
            assert!(next.token() > lease.token());
        }
        return;
    }
    let at_once = levels().iter().map(|&level| {
        let counters = &counters;
        async move {
            let locks = counters.db.locks().await;
            let lease = locks.lease(level).ttl(ttl).acquire().await.expect("acquire");
            let mut tx = counters.at(level).await.begin().await;
            lease.fence(&mut tx).await.unwrap_or_else(|e| panic!("{level}: {e}"));
            let deadline = Instant::now() + lease.remaining();
            renewed_twice(&locks, level).await;
            let is_later = async || Instant::now() + lease.remaining() > deadline + Duration::from_millis(500);
            until("a renewal that the holder knows of", is_later).await;
            assert!(lease.is_held(), "{level}: lost during its own transaction");
            tx.commit().await.unwrap_or_else(|e| panic!("{level}: {e}"));
            assert!(lease.is_held());
            lease.release().await.unwrap_or_else(|e| panic!("{level}: {e}"));
        }
    });
    let mut at_once: Vec<_> = at_once.map(Box::pin).collect();
    // All levels run together, as a join of their futures.
    std::future::poll_fn(|cx| {
        at_once.retain_mut(|one| one.as_mut().poll(cx).is_pending());
        if at_once.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

/// The answer of a fence to a transaction whose snapshot is older than the lease, with a write in
/// between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// The transaction reads the latest rows.
    Fenced,
    /// The transaction reads its snapshot.
    Stale,
    /// The open transaction blocks writes to the rows that it has read.
    Excludes,
}

fn answer_at(level: &str) -> Answer {
    match (DATABASE, level) {
        (Database::Sqlite, "DEFERRED") => Answer::Stale,
        (Database::Sqlite, _) => Answer::Excludes,
        (_, "READ UNCOMMITTED" | "READ COMMITTED") => Answer::Fenced,
        // InnoDB's SERIALIZABLE locks what it reads.
        (Database::MySql | Database::MariaDb, "SERIALIZABLE") => Answer::Excludes,
        _ => Answer::Stale,
    }
}

/// The previous holder writes after our transaction has begun to read: at the levels with a
/// snapshot, our write would overwrite it. `new`: the name was never locked before.
async fn transaction_that_read_before_the_grant(counters: &Counters, level: &'static str, name: &str, new: bool) {
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    if !new {
        let lease = ours.lease(name).acquire().await.expect("acquire");
        lease.release().await.expect("release");
    }
    let mut tx = counters.at(level).await.begin().await;
    let read = "SELECT value FROM counter WHERE id = 1";
    let seen: i64 = sqlx::query_scalar(read).fetch_one(&mut *tx).await.expect("read");
    if answer_at(level) == Answer::Excludes {
        let writing = counters.pool.clone();
        let mut writing = tokio::spawn(async move {
            let mut tx = writing.begin().await.expect("begin");
            add_one(&mut tx, 1).await.expect("write");
            tx.commit().await.expect("commit");
        });
        tokio::time::timeout(Duration::from_millis(300), &mut writing).await.expect_err("what was read is locked");
        if DATABASE == Database::Sqlite {
            // Not even a lease can be granted.
            assert_kept_out(&ours, name).await;
            tx.rollback().await.expect("rollback");
        } else {
            let lease = ours.lease(name).acquire().await.expect("acquire");
            match lease.fence(&mut tx).await {
                // The row of the lease is newer than the snapshot.
                Err(Error::Fence { cause: FenceError::StaleSnapshot, .. }) if keeps_to_snapshots().await => {}
                fenced => fenced.unwrap_or_else(|e| panic!("{level}: what it has read is still so: {e}")),
            }
            tx.rollback().await.expect("rollback");
            lease.release().await.expect("release");
        }
        soon("the writer's turn", writing).await.expect("no panic");
        return;
    }
    let theirs = theirs.lease(name).acquire().await.expect("acquire");
    let mut their_tx = counters.pool.begin().await.expect("begin");
    theirs.fence(&mut their_tx).await.expect("fence");
    add_one(&mut their_tx, 1).await.expect("write");
    their_tx.commit().await.expect("commit");
    theirs.release().await.expect("release");

    let lease = ours.lease(name).acquire().await.expect("acquire");
    let fenced = lease.fence(&mut tx).await;
    if answer_at(level) == Answer::Fenced {
        fenced.unwrap_or_else(|e| panic!("{level}: {e}"));
        let now: i64 = sqlx::query_scalar(read).fetch_one(&mut *tx).await.expect("read");
        assert_eq!(now, seen + 1, "{level}: after the fence it reads what is");
        tx.commit().await.expect("commit");
    } else {
        let error = fenced.expect_err("it reads from before the lease");
        assert!(
            matches!(error, Error::Fence { cause: FenceError::StaleSnapshot, .. }),
            "{level}, new name {new}: {error:?}"
        );
        assert!(error.is_conflict() && error.is_retryable() && !error.is_lost());
        tx.rollback().await.expect("rollback");
        // As the error advises, the transaction runs again with the fence first.
        let mut tx = counters.at(level).await.begin().await;
        lease.fence(&mut tx).await.unwrap_or_else(|e| panic!("{level}: {e}"));
        let now: i64 = sqlx::query_scalar(read).fetch_one(&mut *tx).await.expect("read");
        assert_eq!(now, seen + 1);
        tx.commit().await.expect("commit");
    }
    lease.release().await.expect("release");
}

#[tokio::test]
async fn fence_refuses_a_stale_snapshot() {
    let counters = counters().await;
    for &level in levels() {
        transaction_that_read_before_the_grant(&counters, level, &format!("old/{level}"), false).await;
        transaction_that_read_before_the_grant(&counters, level, &format!("new/{level}"), true).await;
    }
}

/// MariaDB can refuse a locking read of a row that changed since the snapshot; the fence returns
/// the same error.
#[tokio::test]
async fn fence_refuses_stale_snapshot_with_innodb_snapshot_isolation() {
    if DATABASE != Database::MariaDb {
        // The other databases have one behaviour, which the test above checks.
        assert!(!DATABASE.is_mysql() || !keeps_to_snapshots().await);
        return;
    }
    let server = Server::start_with(
        crate::support::server::Kind::MariaDb,
        Options { settings: vec!["--innodb-snapshot-isolation=ON".into()], ..Options::default() },
    );
    let counters = counters_in(fresh_on(&server.url()).await).await;
    for new in [false, true] {
        let name = format!("new {new}");
        transaction_that_read_before_the_grant(&counters, "REPEATABLE READ", &name, new).await;
    }
    storm(&counters.db.url).await;
}

#[tokio::test]
async fn fence_inside_a_savepoint_is_refused() {
    let counters = counters().await;
    let locks = counters.db.locks().await;
    let lease = locks.lease("a").acquire().await.expect("acquire");
    let mut tx = counters.pool.begin().await.expect("begin");
    {
        use sqlx::Acquire;
        let mut inner = tx.begin().await.expect("a savepoint");
        let error = lease.fence(&mut inner).await.expect_err("it would end with the savepoint");
        assert!(matches!(error, Error::Fence { cause: FenceError::InSavepoint, .. }), "{error}");
        inner.rollback().await.expect("rollback");
    }
    // The transaction itself stays usable.
    lease.fence(&mut tx).await.expect("fence");
    tx.commit().await.expect("commit");
    lease.release().await.expect("release");
}

#[tokio::test]
async fn fence_outside_a_transaction_is_refused() {
    let counters = counters().await;
    let locks = counters.db.locks().await;
    let lease = locks.lease("a").acquire().await.expect("acquire");
    let mut tx = counters.pool.begin().await.expect("begin");
    <Sql as sqlx::Database>::TransactionManager::rollback(&mut tx).await.expect("an end behind its back");
    let error = lease.fence(&mut tx).await.expect_err("there is nothing to fence");
    assert!(matches!(error, Error::Fence { cause: FenceError::NoTransaction, .. }), "{error}");
    drop(tx);
    lease.release().await.expect("release");
}

/// sqlx still counts the transaction.
#[tokio::test]
async fn fence_after_a_commit_by_hand_is_refused() {
    let counters = counters().await;
    let locks = counters.db.locks().await;
    let lease = locks.lease("a").acquire().await.expect("acquire");
    let mut tx = counters.pool.begin().await.expect("begin");
    sqlx::query("COMMIT").execute(&mut *tx).await.expect("an end behind its back");
    let error = lease.fence(&mut tx).await.expect_err("there is nothing to fence");
    assert!(matches!(error, Error::Fence { cause: FenceError::NoTransaction, .. }), "{error}");
    drop(tx);
    lease.release().await.expect("release");
}
