//! What may cross threads. Nothing here runs against a database; that it compiles is most of the proof.
#![allow(clippy::expect_used)]

use std::time::Duration;

use sqlock::{
    Changes, Election, Error, ExportedLease, FenceError, FencingToken, Leadership, Lease, LeaseInfo, LeaseRequest,
    LockName, Locks, LocksBuilder, LossCause, Owner, SessionLock, SessionRequest, Sweeper, Sweeping,
};
use sqlx::{Sqlite, SqlitePool, Transaction};

fn is_send<T: Send + ?Sized>() {}
fn is_sync<T: Sync + ?Sized>() {}
fn is_unpin<T: Unpin + ?Sized>() {}
fn is_static<T: 'static + ?Sized>() {}
fn is_clone<T: Clone>() {}

/// Never called: it is enough that it compiles.
fn is_send_value<T: Send>(_: &T) {}

macro_rules! anywhere {
    ($($t:ty),* $(,)?) => { $( is_send::<$t>(); is_sync::<$t>(); is_unpin::<$t>(); is_static::<$t>(); )* };
}

#[test]
fn every_type_may_be_sent_shared_and_moved() {
    anywhere![
        Changes,
        Election,
        Error,
        ExportedLease,
        FenceError,
        FencingToken,
        Leadership,
        Lease,
        LeaseInfo,
        LeaseRequest,
        LockName,
        Locks,
        LossCause,
        Owner,
        SessionLock,
        SessionRequest,
        Sweeper,
        Sweeping,
        sqlock::Result<Option<Lease>>,
    ];
    // A builder is used once, by one.
    is_send::<LocksBuilder>();
    is_unpin::<LocksBuilder>();
}

#[test]
fn handles_and_values_are_clone_and_guards_are_not() {
    is_clone::<Locks>();
    is_clone::<LeaseRequest>();
    is_clone::<SessionRequest>();
    is_clone::<Election>();
    is_clone::<Sweeper>();
    is_clone::<ExportedLease>();
    is_clone::<LeaseInfo>();
    is_clone::<LockName>();
    is_clone::<Owner>();
    is_clone::<FencingToken>();

    // Ambiguous, and so an error, for a type that is Clone.
    trait NotClone<A> {
        fn check() {}
    }
    impl<T: ?Sized> NotClone<()> for T {}
    impl<T: Clone> NotClone<u8> for T {}
    <Lease as NotClone<_>>::check();
    <Leadership as NotClone<_>>::check();
    <SessionLock as NotClone<_>>::check();
    <Sweeping as NotClone<_>>::check();
}

/// Never called. Each future is made with what a caller has in hand.
#[allow(dead_code, unreachable_code, clippy::diverging_sub_expression)]
async fn every_future_may_be_sent(
    locks: Locks,
    lease: Lease,
    exported: ExportedLease,
    lock: SessionLock,
    token: FencingToken,
    mut tx: Transaction<'static, Sqlite>,
) {
    is_send_value(&locks.migrate());
    is_send_value(&locks.resume(exported));
    is_send_value(&locks.list("a"));
    is_send_value(&locks.inspect("a"));
    is_send_value(&locks.evict("a", token));
    is_send_value(&locks.extend("a", token, Duration::ZERO));
    is_send_value(&locks.election("a").campaign());
    is_send_value(&locks.election("a").leader());
    is_send_value(&locks.election("a").changes().next());
    is_send_value(&locks.shutdown());
    is_send_value(&locks.sweeper().sweep());

    is_send_value(&locks.lease("a").acquire());
    is_send_value(&locks.lease("a").wait(Duration::ZERO).acquire());
    is_send_value(&locks.lease("a").try_acquire());
    is_send_value(&Owner::random().scope(locks.lease("a").acquire()));

    is_send_value(&locks.session("a").acquire());
    is_send_value(&locks.session("a").shared().wait(Duration::ZERO).acquire());
    is_send_value(&locks.session("a").try_acquire());
    is_send_value(&lock.lost());
    is_send_value(&lock.release());

    is_send_value(&lease.lost());
    is_send_value(&lease.fence(&mut tx));
    is_send_value(&lease.extend(Duration::ZERO));
    is_send_value(&lease.release());
}

async fn locks_in_memory() -> Locks {
    let pool = sqlx::sqlite::SqlitePoolOptions::new()
        .max_connections(1)
        .min_connections(1)
        .idle_timeout(None)
        .max_lifetime(None)
        .connect("sqlite::memory:")
        .await
        .expect("a database in memory");
    let locks = Locks::new(pool);
    locks.migrate().await.expect("migrate");
    locks
}

/// `run` takes a closure that borrows the lease, which is where futures usually stop being `Send`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_may_be_spawned() {
    let locks = locks_in_memory().await;
    let mut tasks = tokio::task::JoinSet::new();
    for i in 0..4 {
        let locks = locks.clone();
        tasks.spawn(async move {
            let text = format!("captured {i}");
            locks
                .lease("a")
                .run(async |lease| {
                    tokio::task::yield_now().await;
                    assert!(lease.is_held());
                    (lease.token(), text.len())
                })
                .await
                .expect("run")
        });
    }
    let mut tokens: Vec<_> = tasks.join_all().await.into_iter().map(|(token, _)| token).collect();
    tokens.sort_unstable();
    tokens.dedup();
    assert_eq!(tokens.len(), 4);
}

/// The same with what people write: a function that takes the lease, captured values, a fence inside.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_with_a_function_may_be_spawned() {
    async fn build_report(lease: &Lease) -> FencingToken {
        tokio::task::yield_now().await;
        lease.token()
    }
    let locks = locks_in_memory().await;
    let handle = tokio::spawn({
        let locks = locks.clone();
        async move { locks.lease("report").run(async |lease| build_report(lease).await).await }
    });
    let first = handle.await.expect("no panic").expect("run");
    let second = tokio::spawn(async move { locks.lease("report").run(build_report).await });
    assert!(second.await.expect("no panic").expect("run") > first);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_may_be_held_across_an_await_and_dropped_on_another_thread() {
    let locks = locks_in_memory().await;
    let lease = locks.lease("a").acquire().await.expect("acquire");
    let held = tokio::spawn(async move {
        tokio::task::yield_now().await;
        lease.is_held()
    });
    assert!(held.await.expect("no panic"));
    let lease = locks.lease("a").acquire().await.expect("acquire");
    std::thread::spawn(move || drop(lease)).join().expect("outside of any runtime, too");
    let next = tokio::time::timeout(Duration::from_secs(30), locks.lease("a").acquire()).await.expect("released");
    next.expect("acquire").release().await.expect("release");
}

/// A pool is all that is needed, of any kind.
#[test]
fn locks_are_made_from_a_pool() {
    fn from<T: Into<LocksBuilder>>() {}
    from::<SqlitePool>();
    #[cfg(feature = "postgres")]
    from::<sqlx::PgPool>();
    #[cfg(feature = "mysql")]
    from::<sqlx::MySqlPool>();
}
