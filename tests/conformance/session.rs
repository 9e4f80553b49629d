//! Session locks: each client holds them on one connection, and they end with it.
//!
//! Session locks need no tables, so nothing is migrated here. On SQLite, which has no connection
//! that could be cut, the locks are on files, and the tests assert that only the end of the process
//! ends them.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sqlock::session::SessionLock;
use sqlock::{Error, Locks, LossCause};
use sqlx::{AssertSqlSafe, Pool};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::connection_counter::ConnectionCounter;
use super::network::behind_a_proxy;
use crate::support::proxy::Direction;
use crate::support::server::{Options, PgBouncer, Server};
use crate::support::worker::Worker;
use crate::support::{Database, TestDatabase, builder, connect, empty, query_processes, soon, until};
use crate::{DATABASE, Sql};

async fn hold(locks: &Locks, name: &str) -> SessionLock {
    soon("the lock", locks.session(name).acquire()).await.expect("acquire")
}

async fn is_free(locks: &Locks, name: &str) -> bool {
    let lock = soon("an answer", locks.session(name).try_acquire()).await.expect("try");
    let free = lock.is_some();
    if let Some(lock) = lock {
        lock.release().await.expect("ours to the end");
    }
    free
}

async fn comes_free(locks: &Locks, name: &str) {
    hold(locks, name).await.release().await.expect("ours to the end");
}

#[track_caller]
fn assert_unsupported<T>(outcome: Result<T, Error>, says: &str) {
    match outcome {
        Err(error @ Error::Unsupported { .. }) => {
            assert!(error.to_string().contains(says), "{error}");
            assert!(!error.is_retryable());
        }
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("granted"),
    }
}

// ---- inspection

#[tokio::test]
async fn holders_of_a_session_lock_are_listed() {
    let db = empty().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    assert_eq!(ours.session("a").holders().await.expect("read"), []);
    let lock = hold(&ours, "a").await;
    let other = hold(&ours, "b").await;
    let held = theirs.session("a").holders().await.expect("read");
    let [holder] = &held[..] else { panic!("{held:?}") };
    assert!(!holder.shared);
    if DATABASE == Database::Sqlite {
        assert_eq!(holder.id, i64::from(std::process::id()));
    } else {
        assert_ne!(holder.id, 0);
        assert!(holder.user.is_some() && holder.address.is_some(), "{holder:?}");
    }
    let all = ours.session("b").holders().await.expect("read");
    assert_eq!(all.iter().map(|other| other.id).collect::<Vec<_>>(), [holder.id], "one session of one client");
    lock.release().await.expect("ours to the end");
    assert_eq!(theirs.session("a").holders().await.expect("read"), []);
    other.release().await.expect("ours to the end");

    if !DATABASE.is_mysql() {
        let one = ours.session("a").shared().acquire().await.expect("acquire");
        let two = theirs.session("a").shared().acquire().await.expect("acquire");
        let held = theirs.session("a").holders().await.expect("read");
        assert!(held.iter().all(|holder| holder.shared), "{held:?}");
        let sessions = if DATABASE == Database::Sqlite { 1 } else { 2 };
        assert_eq!(held.len(), sessions, "{held:?}");
        drop((one, two));
    }
}

// ---- exclusion

#[tokio::test]
async fn session_lock_excludes_other_clients_and_tasks() {
    let db = empty().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lock = hold(&ours, "a").await;
    assert_eq!(lock.name().as_str(), "a");
    assert!(lock.is_held());
    // A server would grant the lock to the same session any number of times.
    assert!(!is_free(&ours, "a").await);
    assert!(!is_free(&theirs, "a").await);
    assert!(is_free(&ours, "b").await);
    assert!(is_free(&theirs, "b").await);
    lock.release().await.expect("ours to the end");
    assert!(is_free(&theirs, "a").await);
    let lock = hold(&theirs, "a").await;
    assert!(!is_free(&ours, "a").await);
    drop(lock);
    comes_free(&ours, "a").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_lock_has_one_holder_under_load() {
    let db = empty().await;
    let inside = Arc::new(AtomicUsize::new(0));
    let mut tasks = JoinSet::new();
    for _ in 0..3 {
        let locks = db.locks().await;
        for _ in 0..4 {
            let (locks, inside) = (locks.clone(), Arc::clone(&inside));
            tasks.spawn(async move {
                for _ in 0..10 {
                    let lock = hold(&locks, "a").await;
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "somebody is inside");
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    lock.release().await.expect("ours to the end");
                }
            });
        }
    }
    assert_eq!(soon("all visits", tasks.join_all()).await.len(), 12);
}

#[tokio::test]
async fn release_admits_local_waiters_in_order() {
    let db = empty().await;
    let locks = db.locks().await;
    let first = hold(&locks, "a").await;
    let (order, mut came) = tokio::sync::mpsc::unbounded_channel();
    let mut waiting = JoinSet::new();
    for i in 0..5 {
        let (request, order) = (locks.session("a").acquire(), order.clone());
        waiting.spawn(async move {
            let lock = request.await.expect("acquire");
            order.send(i).expect("somebody listens");
            lock.release().await
        });
        // One poll adds the request to the queue.
        tokio::task::yield_now().await;
    }
    first.release().await.expect("ours to the end");
    for expected in 0..5 {
        assert_eq!(soon("a turn", came.recv()).await, Some(expected));
    }
    soon("their releases", waiting.join_all()).await;
}

#[tokio::test]
async fn remote_release_admits_the_waiter() {
    let db = empty().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lock = hold(&theirs, "a").await;
    let waiting = tokio::spawn(ours.session("a").acquire());
    sleep(Duration::from_millis(200)).await;
    assert!(!waiting.is_finished());
    lock.release().await.expect("ours to the end");
    let next = soon("the turn", waiting).await.expect("no panic").expect("acquire");
    assert!(!is_free(&theirs, "a").await);
    next.release().await.expect("ours to the end");
}

/// A round of requests for all contended names takes longer than a try may take.
#[tokio::test]
async fn try_is_answered_while_many_names_are_contended() {
    const DELAY: Duration = Duration::from_millis(100);
    const NAMES: usize = 200;
    let db = empty().await;
    if DATABASE == Database::Sqlite {
        // A file answers at once.
        return comes_free(&db.locks().await, "a").await;
    }
    let (proxy, url) = behind_a_proxy(&db.url);
    let (ours, theirs) = (builder(connect(&url, 1).await).build(), db.locks().await);
    let mut held = Vec::new();
    for i in 0..NAMES {
        held.push(hold(&theirs, &format!("name/{i}")).await);
    }
    let own = hold(&ours, "own").await;
    let mut waiting = JoinSet::new();
    for i in 0..NAMES {
        waiting.spawn(ours.session(format!("name/{i}")).acquire());
    }
    tokio::task::yield_now().await;
    // The answer to the last request: the others wait.
    assert!(is_free(&ours, "a").await);
    proxy.delay_replies(DELAY);
    for _ in 0..2 {
        // A try without an answer fails after 10 s.
        assert!(is_free(&ours, "a").await);
    }
    own.release().await.expect("ours to the end");
    proxy.pass();
    drop(held);
    for lock in soon("their turns", waiting.join_all()).await {
        lock.expect("acquire").release().await.expect("ours to the end");
    }
}

/// The loss schedules the name of the try, which no caller waits for any more.
#[tokio::test]
async fn try_on_lost_connection_delays_no_other_name() {
    let db = empty().await;
    if DATABASE == Database::Sqlite {
        // There is no network between.
        return comes_free(&db.locks().await, "a").await;
    }
    let (proxy, url) = behind_a_proxy(&db.url);
    let (ours, theirs) = (builder(connect(&url, 1).await).build(), db.locks().await);
    let (_a, b) = (hold(&theirs, "a").await, hold(&theirs, "b").await);
    assert!(!is_free(&ours, "a").await);
    proxy.reset();
    assert!(!is_free(&ours, "a").await);
    let waiting = tokio::spawn(ours.session("b").acquire());
    tokio::task::yield_now().await;
    // The answer to the last request: the other one waits.
    assert!(is_free(&ours, "c").await);
    b.release().await.expect("ours to the end");
    let granted = soon("the grant", waiting).await.expect("no panic").expect("acquire");
    granted.release().await.expect("ours to the end");
}

#[tokio::test]
async fn wait_times_out_at_its_limit() {
    let db = empty().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let lock = hold(&ours, "a").await;
    const WAIT: Duration = Duration::from_secs(2);
    // The connection is open, so that the time is that of waiting, not of connecting.
    assert!(!is_free(&theirs, "a").await);
    for locks in [&ours, &theirs] {
        let start = Instant::now();
        let error = soon("the end", locks.session("a").wait(WAIT).acquire()).await.expect_err("held");
        assert!(
            matches!(&error, Error::Timeout { name, waited } if name.as_str() == "a" && *waited >= WAIT),
            "{error}"
        );
        assert!(error.is_timeout() && start.elapsed() >= WAIT);
        let error = soon("the end", locks.session("a").wait(Duration::ZERO).acquire()).await.expect_err("held");
        assert!(error.is_timeout(), "{error}");
    }
    // Cancelled requests block no other request.
    lock.release().await.expect("ours to the end");
    assert!(is_free(&theirs, "a").await);
    assert!(is_free(&ours, "a").await);
    let lock = soon("the lock", theirs.session("a").wait(Duration::ZERO).acquire()).await.expect("free");
    lock.release().await.expect("ours to the end");
}

#[tokio::test]
async fn shared_session_locks_exclude_an_exclusive_one() {
    let db = empty().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let share = async |locks: &Locks| soon("an answer", locks.session("a").shared().try_acquire()).await;
    if DATABASE.is_mysql() {
        assert_unsupported(share(&ours).await, "take a shared lease");
        assert_unsupported(ours.session("a").shared().acquire().await, "take a shared lease");
        return;
    }
    let here = share(&ours).await.expect("try").expect("free");
    let here_too = share(&ours).await.expect("try").expect("shared");
    let there = share(&theirs).await.expect("try").expect("shared");
    assert!(!is_free(&ours, "a").await);
    assert!(!is_free(&theirs, "a").await);
    here.release().await.expect("ours to the end");
    there.release().await.expect("ours to the end");
    assert!(!is_free(&theirs, "a").await, "one of two that share through one client is still in");
    let alone = tokio::spawn(ours.session("a").acquire());
    tokio::task::yield_now().await;
    // A later request does not overtake an earlier one.
    assert!(share(&ours).await.expect("try").is_none());
    let later = tokio::spawn(ours.session("a").shared().acquire());
    tokio::task::yield_now().await;
    here_too.release().await.expect("ours to the end");
    let alone = soon("the turn", alone).await.expect("no panic").expect("acquire");
    assert!(share(&theirs).await.expect("try").is_none());
    assert!(!later.is_finished());
    alone.release().await.expect("ours to the end");
    let later = soon("the turn", later).await.expect("no panic").expect("acquire");
    let with_it = share(&theirs).await.expect("try").expect("shared");
    later.release().await.expect("ours to the end");
    with_it.release().await.expect("ours to the end");
    assert!(is_free(&ours, "a").await);
}

#[tokio::test]
async fn dropped_waiter_blocks_nobody() {
    let db = empty().await;
    let locks = db.locks().await;
    if DATABASE.is_mysql() {
        // Without sharing, only the next waiter can be granted the name.
        let lock = hold(&locks, "a").await;
        let dropped = tokio::spawn(locks.session("a").acquire());
        tokio::task::yield_now().await;
        let next = tokio::spawn(locks.session("a").acquire());
        tokio::task::yield_now().await;
        dropped.abort();
        lock.release().await.expect("ours to the end");
        return drop(soon("the turn", next).await.expect("no panic").expect("acquire"));
    }
    let reader = soon("the lock", locks.session("a").shared().acquire()).await.expect("acquire");
    let writer = tokio::spawn(locks.session("a").acquire());
    tokio::task::yield_now().await;
    let later = tokio::spawn(locks.session("a").shared().acquire());
    sleep(Duration::from_millis(100)).await;
    assert!(!later.is_finished(), "it stands behind the writer");
    writer.abort();
    let later = soon("the turn", later).await.expect("no panic").expect("acquire");
    assert!(reader.is_held() && later.is_held());
}

#[tokio::test]
async fn names_are_bytes() {
    let db = empty().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let long = |last| format!("{}{last}", "x".repeat(254));
    let names = ["a", "A", "a ", "á", "a\u{301}", &long('y'), &long('z')];
    let mut held = Vec::new();
    for name in names {
        held.push(soon("an answer", ours.session(name).try_acquire()).await.expect("try").expect(name));
    }
    for name in names {
        assert!(!is_free(&theirs, name).await, "{name}");
    }
    for bad in [String::new(), "x".repeat(256), "a\0b".into()] {
        assert!(matches!(ours.session(bad.clone()).acquire().await, Err(Error::InvalidName { .. })));
        assert!(matches!(ours.session(bad).try_acquire().await, Err(Error::InvalidName { .. })));
    }
}

#[tokio::test]
async fn names_are_separate_per_schema_or_database() {
    let (here, there) = (empty().await, empty().await);
    let (ours, theirs, others) = (here.locks().await, here.locks().await, there.locks().await);
    let lock = hold(&ours, "a").await;
    assert!(is_free(&others, "a").await);
    assert!(!is_free(&theirs, "a").await);
    let other = hold(&others, "a").await;
    assert!(lock.is_held() && other.is_held());
}

#[tokio::test]
async fn lease_and_session_lock_are_independent() {
    let db = crate::support::fresh().await;
    let locks = db.locks().await;
    let lock = hold(&locks, "a").await;
    let lease = locks.lease("a").try_acquire().await.expect("try").expect("free");
    lock.release().await.expect("ours to the end");
    lease.release().await.expect("ours to the end");
}

// ---- the connection

#[tokio::test]
async fn many_session_locks_share_one_connection() {
    let mut db = empty().await;
    let counter = ConnectionCounter::of(&mut db).await;
    let locks = db.locks().await;
    let mut taken = JoinSet::new();
    for i in 0..200 {
        let request = locks.session(format!("name/{i}"));
        taken.spawn(async move { soon("the lock", request.acquire()).await.expect("acquire") });
    }
    let held = taken.join_all().await;
    // On SQLite the database itself is not even open.
    let one = i64::from(DATABASE != Database::Sqlite);
    // The server may still end the connection of a check.
    until("one connection", async || counter.connections().await == one).await;
    for _ in 0..5 {
        assert_eq!(counter.connections().await, one);
        sleep(Duration::from_millis(300)).await;
    }
    assert!(held.iter().all(SessionLock::is_held));
    if DATABASE == Database::Postgres {
        assert_eq!(counter.advisory_locks().await, 200);
    }
    let mut released = JoinSet::new();
    for lock in held {
        released.spawn(lock.release());
    }
    for verdict in soon("all releases", released.join_all()).await {
        verdict.expect("ours to the end");
    }
    if DATABASE == Database::Postgres {
        assert_eq!(counter.advisory_locks().await, 0);
    }
    until("the end of the connection", async || counter.connections().await == 0).await;
}

#[tokio::test]
async fn busy_application_pool_does_not_matter() {
    let db = empty().await;
    let pool = db.pool_of(1).await;
    let locks = builder(pool.clone()).build();
    let mut app = pool.begin().await.expect("begin");
    sqlx::query("SELECT 1").execute(&mut *app).await.expect("select");
    let lock = hold(&locks, "a").await;
    assert!(!is_free(&locks, "a").await);
    lock.release().await.expect("ours to the end");
    sqlx::query("SELECT 1").execute(&mut *app).await.expect("select");
    app.rollback().await.expect("rollback");
}

#[tokio::test]
async fn session_lock_outlives_the_dropped_client_handle() {
    let mut db = empty().await;
    let counter = ConnectionCounter::of(&mut db).await;
    let ours = db.locks().await;
    let lock = hold(&ours, "a").await;
    drop(ours);
    let rival = db.locks().await;
    // Over several confirmations.
    sleep(Duration::from_millis(2500)).await;
    assert!(lock.is_held());
    assert!(!is_free(&rival, "a").await);
    lock.release().await.expect("ours to the end");
    comes_free(&rival, "a").await;
    drop(rival);
    until("the end of all connections", async || counter.connections().await == 0).await;
}

#[tokio::test]
async fn shutdown_ends_session_locks_and_waits() {
    let db = empty().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let (a, b) = (hold(&ours, "a").await, hold(&ours, "b").await);
    let waiting = tokio::spawn(ours.session("a").acquire());
    tokio::task::yield_now().await;
    soon("the shutdown", ours.shutdown()).await.expect("shutdown");
    assert!(is_free(&theirs, "a").await);
    assert!(is_free(&theirs, "b").await);
    assert!(!a.is_held());
    assert_eq!(soon("the loss", a.lost()).await, LossCause::Shutdown);
    let error = a.release().await.expect_err("lost");
    assert!(
        matches!(&error, Error::SessionLost { name, cause: LossCause::Shutdown } if name.as_str() == "a"),
        "{error}"
    );
    assert!(error.is_lost() && !error.is_retryable());
    drop(b);
    assert!(matches!(soon("the refusal", waiting).await.expect("no panic"), Err(Error::Closed)));
    assert!(matches!(ours.session("c").acquire().await, Err(Error::Closed)));
    assert!(matches!(ours.session("c").try_acquire().await, Err(Error::Closed)));
    // A client that was never used, too.
    let unused = db.locks().await;
    unused.shutdown().await.expect("shutdown");
    assert!(matches!(unused.session("c").try_acquire().await, Err(Error::Closed)));
}

// ---- loss

#[tokio::test]
async fn killed_holder_frees_the_name() {
    let db = empty().await;
    let locks = db.locks().await;
    let mut holder = Worker::start(&db.url);
    assert_eq!(holder.ask("session a").await, "locked");
    assert!(!is_free(&locks, "a").await);
    let waiting = tokio::spawn(locks.session("a").acquire());
    sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished());
    holder.kill();
    let lock = soon("the turn", waiting).await.expect("no panic").expect("acquire");
    let mut other = Worker::start(&db.url);
    assert_eq!(other.ask("session-try a").await, "taken");
    lock.release().await.expect("ours to the end");
    assert_eq!(other.ask("session-try a").await, "locked");
    assert_eq!(other.ask("session-release").await, "released");
}

/// Ends the connection of a client that has locked something, from outside. On MySQL all others in
/// this database, too.
async fn end_the_connection(pool: &Pool<Sql>) {
    let (find, end) = match DATABASE {
        Database::Postgres => (
            "SELECT DISTINCT a.pid::bigint FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
              WHERE l.locktype = 'advisory' AND a.application_name = current_schema()",
            "SELECT pg_terminate_backend",
        ),
        _ => (
            "SELECT CAST(id AS SIGNED) FROM information_schema.processlist
              WHERE db = DATABASE() AND id <> CONNECTION_ID()",
            "KILL ",
        ),
    };
    let found: Vec<i64> = query_processes(async || sqlx::query_scalar(find).fetch_all(pool).await).await;
    assert!(!found.is_empty(), "there is a connection");
    for id in found {
        let end = if DATABASE == Database::Postgres { format!("{end}({id})") } else { format!("{end}{id}") };
        sqlx::raw_sql(AssertSqlSafe(end)).execute(pool).await.expect("ended");
    }
}

/// Session locks live on a connection or, on SQLite, on files in a directory beside the database.
#[tokio::test]
async fn lock_is_lost_with_its_directory_or_connection() {
    let mut db = empty().await;
    let _witness = ConnectionCounter::of(&mut db).await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let (alone, shared) = (hold(&ours, "a").await, hold(&ours, "b").await);
    match DATABASE {
        Database::Sqlite => std::fs::remove_dir_all(place(&db)).expect("deleted"),
        _ => end_the_connection(&connect(&db.url, 1).await).await,
    }
    let taken = soon("the name", theirs.session("a").acquire()).await.expect("acquire");
    for lock in [&alone, &shared] {
        assert_eq!(soon("the loss", lock.lost()).await, LossCause::Disconnected);
        assert!(!lock.is_held());
    }
    assert!(taken.is_held());
    assert!(!is_free(&ours, "a").await, "our own next lock is a new one");
    let error = alone.release().await.expect_err("lost");
    assert!(matches!(&error, Error::SessionLost { cause: LossCause::Disconnected, .. }) && error.is_lost(), "{error}");
    drop(shared);
    assert!(!is_free(&ours, "a").await, "lost locks have not freed the lock of another client");
    taken.release().await.expect("ours to the end");
    comes_free(&ours, "a").await;
    comes_free(&theirs, "b").await;
}

#[tokio::test]
async fn run_returns_result_and_releases_session_lock() {
    let db = empty().await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    let work = async |lock: &SessionLock| {
        assert!(lock.is_held() && !is_free(&theirs, "a").await);
        7
    };
    assert_eq!(ours.session("a").run(work).await.expect("ours to the end"), 7);
    assert!(is_free(&theirs, "a").await);
}

#[tokio::test]
async fn run_drops_work_when_session_lock_is_lost() {
    let mut db = empty().await;
    let _witness = ConnectionCounter::of(&mut db).await;
    let locks = db.locks().await;
    let pool = connect(&db.url, 1).await;
    let work = async |_: &SessionLock| {
        match DATABASE {
            Database::Sqlite => std::fs::remove_dir_all(place(&db)).expect("deleted"),
            _ => end_the_connection(&pool).await,
        }
        std::future::pending::<()>().await;
    };
    let error = soon("the loss", locks.session("a").run(work)).await.expect_err("lost");
    assert!(matches!(error, Error::SessionLost { cause: LossCause::Disconnected, .. }), "{error}");
}

#[tokio::test]
async fn release_of_a_lost_lock_reports_the_loss() {
    let mut db = empty().await;
    let _witness = ConnectionCounter::of(&mut db).await;
    let locks = db.locks().await;
    let lock = hold(&locks, "a").await;
    match DATABASE {
        Database::Sqlite => std::fs::remove_dir_all(place(&db)).expect("deleted"),
        _ => end_the_connection(&connect(&db.url, 1).await).await,
    }
    // The release comes before any check of the lock.
    let error = lock.release().await.expect_err("lost");
    assert!(matches!(error, Error::SessionLost { .. }), "{error}");
    comes_free(&locks, "a").await;
}

/// A switchover makes the old primary read-only, and closes no connection. PostgreSQL restarts a
/// server that becomes a standby.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only_server_loses_its_session_locks() {
    if !DATABASE.is_mysql() {
        return comes_free(&empty().await.locks().await, "a").await;
    }
    let server = Server::start(DATABASE.server().expect("it has servers"));
    let pool = connect(&server.url(), 1).await;
    let locks = builder(connect(&server.url(), 1).await).build();
    let set = async |read_only: u8| {
        let sql = AssertSqlSafe(format!("SET GLOBAL read_only = {read_only}"));
        sqlx::raw_sql(sql).execute(&pool).await.expect("root may set it");
    };
    let lock = hold(&locks, "a").await;
    set(1).await;
    assert_eq!(soon("the loss", lock.lost()).await, LossCause::Disconnected);
    assert_unsupported(locks.session("a").try_acquire().await, "the primary");
    set(0).await;
    let lock = hold(&locks, "a").await;
    set(1).await;
    // The release may come before any check of the lock.
    let error = lock.release().await.expect_err("lost");
    assert!(matches!(error, Error::SessionLost { .. }), "{error}");
    set(0).await;
    comes_free(&locks, "a").await;
}

#[tokio::test]
async fn unconfirmed_unlock_closes_the_connection() {
    let mut db = empty().await;
    let counter = ConnectionCounter::of(&mut db).await;
    if DATABASE == Database::Sqlite {
        return lock_file_exists_while_name_is_locked(&db).await;
    }
    let (proxy, url) = behind_a_proxy(&db.url);
    let locks = builder(connect(&url, 1).await).build();
    let (a, b) = (hold(&locks, "a").await, hold(&locks, "b").await);
    // The server may still end the connection of a check.
    until("one connection", async || counter.connections().await == 1).await;
    // (Or the reply to the keep-alive is cut, and the release comes too late.)
    let cut = proxy.cut_next_reply();
    let error = soon("the verdict", a.release()).await.expect_err("not known");
    assert!(matches!(error, Error::SessionLost { .. }), "{error}");
    soon("the cut", cut.happened()).await;
    assert!(!b.is_held(), "it hung on the same connection");
    until("the end of the connection", async || counter.connections().await == 0).await;
    comes_free(&locks, "a").await;
    comes_free(&locks, "b").await;
}

/// The directory of session locks on SQLite.
fn place(db: &TestDatabase) -> String {
    let (path, _) = db.url.trim_start_matches("sqlite://").split_once('?').expect("a path");
    format!("{path}-sqlock-session")
}

/// On SQLite, every user who may write the database may lock the files.
#[tokio::test]
async fn lock_files_have_the_mode_of_the_database() {
    let db = empty().await;
    let locks = db.locks().await;
    if DATABASE != Database::Sqlite {
        return comes_free(&locks, "a").await;
    }
    let directory = place(&db);
    let database = directory.trim_end_matches("-sqlock-session");
    std::fs::write(database, "").expect("an empty file is a database");
    std::fs::set_permissions(database, Permissions::from_mode(0o660)).expect("it is ours");
    let lock = hold(&locks, "a").await;
    let mode = |path: &Path| std::fs::metadata(path).expect("it exists").permissions().mode() & 0o777;
    assert_eq!(mode(Path::new(&directory)), 0o770);
    let files = std::fs::read_dir(&directory).expect("it exists");
    let modes: Vec<u32> = files.map(|file| mode(&file.expect("it can be read").path())).collect();
    assert_eq!(modes, [0o660]);
    lock.release().await.expect("ours to the end");
}

/// On SQLite, every unlock is answered. From outside, each locked name is visible as a file.
async fn lock_file_exists_while_name_is_locked(db: &TestDatabase) {
    let files = || std::fs::read_dir(place(db)).map_or(0, Iterator::count);
    let (ours, theirs) = (db.locks().await, db.locks().await);
    assert_eq!(files(), 0);
    let (a, b) = (hold(&ours, "a").await, ours.session("b").shared().acquire().await.expect("acquire"));
    let with_b = theirs.session("b").shared().acquire().await.expect("acquire");
    assert_eq!(files(), 2);
    a.release().await.expect("ours to the end");
    b.release().await.expect("ours to the end");
    assert_eq!(files(), 1, "somebody still shares it");
    with_b.release().await.expect("ours to the end");
    assert_eq!(files(), 0);
    // The locks of a killed process are free.
    let mut killed = Worker::start(&db.url);
    assert_eq!(killed.ask("session a").await, "locked");
    killed.kill();
    assert_eq!(files(), 1);
    comes_free(&ours, "a").await;
    assert_eq!(files(), 0);
}

#[tokio::test]
async fn unreachable_database_is_unavailable_not_held() {
    let db = empty().await;
    if DATABASE == Database::Sqlite {
        // A concurrent writer does not matter.
        let pool = db.pool_of(1).await;
        let writing = pool.begin_with("BEGIN EXCLUSIVE").await.expect("begin");
        let locks = db.locks().await;
        let lock = hold(&locks, "a").await;
        assert!(!is_free(&db.locks().await, "a").await);
        lock.release().await.expect("ours to the end");
        return writing.rollback().await.expect("rollback");
    }
    let (proxy, url) = behind_a_proxy(&db.url);
    let client = async || builder(connect(&url, 1).await).build();
    let (used, cold) = (client().await, client().await);
    assert!(is_free(&used, "a").await);
    let rounds: [&dyn Fn(); 2] = [&|| proxy.refuse(), &|| proxy.blackhole(Direction::Both)];
    for strike in rounds {
        strike();
        for locks in [&used, &cold] {
            let tried = locks.session("a").try_acquire();
            let waited = locks.session("b").wait(Duration::from_millis(300)).acquire();
            let (tried, waited) = soon("two answers", async { tokio::join!(tried, waited) }).await;
            for error in [tried.expect_err("no database"), waited.expect_err("no database")] {
                assert!(matches!(error, Error::Unavailable { .. }) && error.is_retryable(), "{error}");
            }
        }
        // A wait of this client does not show that the name is locked.
        let waited = used.session("c").acquire();
        let tried = async {
            sleep(Duration::from_millis(50)).await; // the wait comes first
            used.session("c").try_acquire().await
        };
        let (waited, tried) = soon("two answers", async { tokio::join!(waited, tried) }).await;
        for error in [waited.expect_err("no database"), tried.expect_err("no database")] {
            assert!(matches!(error, Error::Unavailable { .. }), "{error}");
        }
        proxy.pass();
        comes_free(&used, "a").await;
        comes_free(&cold, "b").await;
    }
}

#[tokio::test]
async fn outage_ends_the_waits_for_all_names_together() {
    if DATABASE == Database::Sqlite {
        return; // Its locks are on files.
    }
    let db = empty().await;
    let (proxy, url) = behind_a_proxy(&db.url);
    let locks = builder(connect(&url, 1).await).build();
    assert!(is_free(&locks, "a").await);
    proxy.blackhole(Direction::Both);
    let waiting: JoinSet<_> = (0..30).map(|i| locks.session(format!("name/{i}")).acquire()).collect();
    for answer in soon("the answers", waiting.join_all()).await {
        assert!(matches!(answer, Err(Error::Unavailable { .. })), "{answer:?}");
    }
    soon("the shutdown", locks.shutdown()).await.expect("shutdown");
}

#[tokio::test]
async fn wait_survives_the_loss_of_its_connection() {
    let mut db = empty().await;
    let counter = ConnectionCounter::of(&mut db).await;
    let holder = db.locks().await;
    let lock = hold(&holder, "a").await;
    let (waiting, proxy) = if DATABASE == Database::Sqlite {
        (tokio::spawn(db.locks().await.session("a").acquire()), None)
    } else {
        let (proxy, url) = behind_a_proxy(&db.url);
        let locks = builder(connect(&url, 1).await).build();
        (tokio::spawn(locks.session("a").acquire()), Some(proxy))
    };
    if let Some(proxy) = &proxy {
        until("the wait", async || counter.connections().await >= 2).await;
        proxy.reset();
    }
    sleep(Duration::from_millis(200)).await;
    assert!(!waiting.is_finished());
    lock.release().await.expect("ours to the end");
    let next = soon("the turn", waiting).await.expect("no panic").expect("acquire");
    assert!(!is_free(&holder, "a").await);
    drop(next);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropped_futures_leave_no_session_lock() {
    let mut db = empty().await;
    let counter = ConnectionCounter::of(&mut db).await;
    let (ours, theirs) = (db.locks().await, db.locks().await);
    for i in 0..200_u64 {
        let name = format!("name/{}", i % 4);
        let request = (if i % 8 < 4 { &ours } else { &theirs }).session(name);
        // From before the first poll to after the grant.
        let cut = Duration::from_micros(i * 37 % 2000);
        if i % 3 == 0 {
            drop(timeout(cut, request.try_acquire()).await);
        } else {
            drop(timeout(cut, request.acquire()).await);
        }
    }
    for name in (0..4).map(|i| format!("name/{i}")) {
        comes_free(&ours, &name).await;
        comes_free(&theirs, &name).await;
    }
    if DATABASE == Database::Postgres {
        assert_eq!(counter.advisory_locks().await, 0);
    }
}

// ---- refusals

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_lock_is_refused_on_pooler_or_standby() {
    match DATABASE {
        Database::Postgres => {
            behind_pgbouncer().await;
            let standby = Server::start_with(
                crate::support::server::Kind::Postgres,
                Options { standby: true, ..Options::default() },
            );
            let locks = builder(connect(&standby.url(), 1).await).build();
            assert_unsupported(locks.session("a").try_acquire().await, "connect to the primary");
        }
        Database::MySql | Database::MariaDb => {
            let kind = DATABASE.server().expect("it has servers");
            let settings = vec!["--read-only=ON".into()];
            let replica = Server::start_with(kind, Options { settings, ..Options::default() });
            let locks = builder(connect(&replica.url(), 1).await).build();
            assert_unsupported(locks.session("a").try_acquire().await, "the primary");
        }
        Database::Sqlite => {
            let locks = builder(connect("sqlite::memory:", 1).await).build();
            assert_unsupported(locks.session("a").try_acquire().await, "in memory");
            assert_unsupported(locks.session("a").acquire().await, "in memory");
        }
    }
}

async fn behind_pgbouncer() {
    let server = Server::start(crate::support::server::Kind::Postgres);
    let direct = builder(connect(&server.url(), 1).await).build();
    comes_free(&direct, "a").await;
    // An idle pooler, whose first session is as young as our connection; then one whose sessions
    // are not.
    for _ in 0..3 {
        let bouncer = PgBouncer::start(&server);
        for _ in 0..3 {
            let locks = builder(connect(&bouncer.url(), 1).await).build();
            assert_unsupported(locks.session("a").try_acquire().await, "a lease");
            assert_unsupported(locks.session("a").acquire().await, "a lease");
        }
    }
    // A pooler that is busy with other clients from the beginning.
    for _ in 0..3 {
        let bouncer = PgBouncer::start(&server);
        let app = connect(&bouncer.url(), 3).await;
        let mut others = JoinSet::new();
        for _ in 0..3 {
            let app = app.clone();
            others.spawn(async move {
                loop {
                    sqlx::raw_sql("SELECT 1").execute(&app).await.expect("select");
                }
            });
        }
        let mut ours = JoinSet::new();
        for _ in 0..5 {
            let locks = builder(connect(&bouncer.url(), 1).await).build();
            ours.spawn(async move { locks.session("a").acquire().await });
        }
        while let Some(outcome) = soon("a refusal", ours.join_next()).await {
            assert_unsupported(outcome.expect("no panic"), "a lease");
        }
        others.abort_all();
        while others.join_next().await.is_some() {}
    }
    // The shared sessions keep no trace of the probe, once the server has seen that it has ended.
    let pool = connect(&server.url(), 1).await;
    let is_clean = async || {
        let left = sqlx::query_as::<Sql, (i64, i64)>(LEFT_BEHIND).fetch_one(&pool).await.expect("left");
        left == (0, 0)
    };
    until("no trace", is_clean).await;
    assert!(is_free(&direct, "a").await);
}

/// Advisory locks, and transactions.
const LEFT_BEHIND: &str = "
    SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'),
           (SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%')";

/// Only MariaDB has Galera clusters.
#[tokio::test]
async fn session_lock_is_refused_on_galera() {
    if DATABASE != Database::MariaDb {
        return comes_free(&empty().await.locks().await, "a").await;
    }
    let kind = DATABASE.server().expect("it has servers");
    let node = Server::start_with(kind, Options { galera: true, ..Options::default() });
    let pool = connect(&node.url(), 1).await;
    until("the node to be ready", async || sqlx::raw_sql("SELECT 1").execute(&pool).await.is_ok()).await;
    let locks = builder(pool).build();
    for _ in 0..3 {
        assert_unsupported(locks.session("a").try_acquire().await, "take a lease");
        assert_unsupported(locks.session("a").acquire().await, "take a lease");
    }
}
