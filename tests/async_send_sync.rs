//! Types and futures that may cross threads. Compiling is most of the proof; nothing runs against a
//! database.
#![allow(clippy::expect_used)]

use std::time::Duration;

use sqlock::election::{Changes, Election, Leadership};
use sqlock::events::{Event, Events};
use sqlock::health::Health;
use sqlock::idempotency::{Attempt, Claim, Fingerprint, Idempotency, IdempotencyKey};
use sqlock::inspect::LeaseInfo;
use sqlock::lease::{ExportedLease, FenceError};
use sqlock::quorum::{Quorum, QuorumLease, QuorumRequest};
use sqlock::retry::Retry;
use sqlock::session::{SessionLock, SessionRequest};
use sqlock::sweeper::{Sweeper, Sweeping};
use sqlock::version::{Versioned, VersionedRow};
use sqlock::{Error, FencingToken, Lease, LeaseRequest, LockName, Locks, LocksBuilder, LossCause, Owner};
use sqlx::{Sqlite, SqliteConnection, SqlitePool, Transaction};

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
        Event,
        Events,
        ExportedLease,
        FenceError,
        FencingToken,
        Health,
        Leadership,
        Lease,
        LeaseInfo,
        LeaseRequest,
        LockName,
        Locks,
        LossCause,
        Owner,
        Quorum,
        QuorumLease,
        QuorumRequest,
        Retry,
        SessionLock,
        SessionRequest,
        Sweeper,
        Sweeping,
        Versioned,
        VersionedRow<String>,
        sqlock::Result<Option<Lease>>,
    ];
    #[cfg(feature = "testing")]
    anywhere![sqlock::testing::Memory];
    // A builder is used once, by one.
    is_send::<LocksBuilder>();
    is_unpin::<LocksBuilder>();
}

#[test]
fn handles_are_clone_and_guards_are_not() {
    is_clone::<Locks>();
    is_clone::<LeaseRequest>();
    is_clone::<SessionRequest>();
    is_clone::<Election>();
    is_clone::<Sweeper>();
    is_clone::<ExportedLease>();
    is_clone::<LeaseInfo>();
    is_clone::<Event>();
    is_clone::<Health>();
    is_clone::<LockName>();
    is_clone::<Owner>();
    is_clone::<FencingToken>();
    is_clone::<Quorum>();
    is_clone::<QuorumRequest>();
    is_clone::<Retry>();
    is_clone::<Versioned>();

    // Ambiguous, and so an error, for a type that is Clone.
    trait NotClone<A> {
        fn check() {}
    }
    impl<T: ?Sized> NotClone<()> for T {}
    impl<T: Clone> NotClone<u8> for T {}
    <Lease as NotClone<_>>::check();
    <Leadership as NotClone<_>>::check();
    <QuorumLease as NotClone<_>>::check();
    <SessionLock as NotClone<_>>::check();
    <Sweeping as NotClone<_>>::check();
}

/// Makes each future with the values of a caller. Never called.
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
    is_send_value(&locks.drain(Duration::ZERO));
    is_send_value(&locks.events().next());
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

/// Never called. The same for a majority.
#[allow(dead_code)]
async fn every_future_of_a_quorum_may_be_sent(quorum: Quorum, lease: QuorumLease) {
    is_send_value(&quorum.lease("a").acquire());
    is_send_value(&quorum.lease("a").try_acquire());
    is_send_value(&quorum.lease("a").run(async |lease| lease.is_held()));
    is_send_value(&lease.lost());
    is_send_value(&lease.extend(Duration::ZERO));
    is_send_value(&lease.release());
}

/// Makes the futures on the caller's transaction, pool or connection. Never called.
#[allow(dead_code)]
async fn every_future_on_rows_may_be_sent(
    pool: SqlitePool,
    mut tx: Transaction<'static, Sqlite>,
    conn: &mut SqliteConnection,
    accounts: Versioned,
) {
    let key = String::from("borrowed");
    is_send_value(&accounts.read::<_, (i64, String)>(&pool, &key));
    is_send_value(&accounts.read::<_, (i64, String)>(&mut tx, 7));
    is_send_value(&accounts.update(&pool, key.as_str(), 1, |set| {
        set.push("balance = ").push_bind(&key);
    }));
    is_send_value(&accounts.update(&mut *tx, 7, 1, |_| {}));
    is_send_value(&accounts.delete(&mut tx, 7, 1));
    is_send_value(&accounts.delete(&mut *conn, 7, 1));
    is_send_value(&accounts.insert(conn, key.clone(), &["balance"], |row| {
        row.push_bind(&key);
    }));
    is_send_value(&Retry::new().run(&pool, async |tx| accounts.delete(tx, 7, 1).await));
}

/// Never called. The same for requests that take effect once.
#[allow(dead_code)]
async fn every_future_of_a_request_may_be_sent(
    pool: SqlitePool,
    mut tx: Transaction<'static, Sqlite>,
    payments: Idempotency,
    attempt: Attempt,
    claim: Claim,
) {
    let (key, request, text) = (IdempotencyKey::global("a"), Fingerprint::of(["a"]), String::from("captured"));
    is_send_value(&payments.run(&pool, &key, &request, async |tx| {
        sqlx::query("SELECT 1").execute(&mut **tx).await?;
        Ok::<_, Error>(text.clone())
    }));
    is_send_value(&payments.begin(&mut tx, &key, &request));
    is_send_value(&claim.complete(&mut tx, &text));
    is_send_value(&payments.attempt(&key, &request));
    is_send_value(
        &payments
            .run_leased(&key, &request, async |attempt| attempt.step("a", async || Ok::<_, Error>(text.clone())).await),
    );
    is_send_value(&payments.resume(async |attempt: &Attempt| Ok::<_, Error>(attempt.key().to_owned() + &text)));
    is_send_value(&payments.issue("a", Duration::ZERO));
    is_send_value(&attempt.step("a", async || Ok::<_, Error>(1)));
    is_send_value(&attempt.complete(&1));
    is_send_value(&attempt.complete_in(&mut tx, &1));
}

async fn pool_in_memory() -> SqlitePool {
    sqlx::sqlite::SqlitePoolOptions::new()
        .max_connections(1)
        .min_connections(1)
        .idle_timeout(None)
        .max_lifetime(None)
        .connect("sqlite::memory:")
        .await
        .expect("a database in memory")
}

async fn locks_in_memory() -> Locks {
    let locks = Locks::new(pool_in_memory().await);
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

/// The same with what people write: a function that takes the lease, captured values, a fence
/// inside.
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
async fn lease_may_be_dropped_on_another_thread() {
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

/// Transactions are rerun in tasks of their own: with a closure that captures, with one that
/// borrows what the task owns, and with a function of the application's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retry_and_versions_may_be_spawned() {
    async fn deposit(tx: &mut Transaction<'_, Sqlite>, accounts: &Versioned, amount: i64) -> Result<i64, Error> {
        let read = accounts.read::<_, (i64, i64, i64)>(&mut *tx, 1).await?.expect("an account");
        tokio::task::yield_now().await;
        sqlx::query("SELECT 1").execute(&mut **tx).await?;
        let (_, _, balance) = read.value;
        accounts
            .update(&mut *tx, 1, read.version, |set| {
                set.push("balance = ").push_bind(balance + amount);
            })
            .await
    }
    async fn close(tx: &mut Transaction<'_, Sqlite>) -> Result<(), Error> {
        Versioned::table("accounts").delete(tx, 1, 9).await
    }
    let pool = pool_in_memory().await;
    let accounts = Versioned::table("accounts");
    sqlx::query("CREATE TABLE accounts (id INTEGER PRIMARY KEY, version INTEGER, balance INTEGER)")
        .execute(&pool)
        .await
        .expect("a table");
    let opening = tokio::spawn({
        let (pool, accounts) = (pool.clone(), accounts.clone());
        async move {
            let columns = ["balance".to_owned()];
            accounts
                .insert(&pool, 1, &[columns[0].as_str()], |row| {
                    row.push_bind(0);
                })
                .await
        }
    });
    opening.await.expect("no panic").expect("insert");
    let mut tasks = tokio::task::JoinSet::new();
    for i in 1..=4 {
        let (pool, accounts) = (pool.clone(), accounts.clone());
        tasks.spawn(async move {
            let mut tx = pool.begin().await.expect("begin");
            deposit(&mut tx, &accounts, i).await.expect("a version that nobody else can have");
            tx.commit().await.expect("commit");
            let text = format!("captured {i}");
            let retry = Retry::new();
            retry
                .run(&pool, async |tx| {
                    let version = deposit(tx, &accounts, i).await?;
                    Ok::<_, Error>((version, text.len()))
                })
                .await
                .expect("run")
        });
    }
    let done = tasks.join_all().await;
    assert_eq!(done.len(), 4);
    let read = accounts.read::<_, (i64, i64, i64)>(&pool, 1).await.expect("read").expect("it is there");
    assert_eq!((read.version, read.value.2), (9, 20));
    let closed = tokio::spawn(async move { Retry::new().run(&pool, close).await });
    closed.await.expect("no panic").expect("run");
}

/// A pool is all that is needed, of any kind.
#[test]
fn locks_are_made_from_a_pool() {
    fn from<T: sqlock::database::DatabasePool>() {}
    from::<SqlitePool>();
    #[cfg(feature = "postgres")]
    from::<sqlx::PgPool>();
    #[cfg(feature = "mysql")]
    from::<sqlx::MySqlPool>();
}

/// Handlers with what people write: a function of the application's, captured values, both modes.
/// That they are handlers proves that their futures are Send.
#[cfg(feature = "axum")]
#[allow(dead_code)]
fn work_with_one_effect_runs_in_handlers(idempotency: sqlock::idempotency::Idempotency) -> axum::Router<SqlitePool> {
    use axum::extract::State;
    use axum::response::{IntoResponse, Response};
    use sqlock::idempotency::http::{IdempotencyLayer, IdempotencyService, Idempotent};

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct AppError(#[from] Error);
    impl From<sqlx::Error> for AppError {
        fn from(error: sqlx::Error) -> Self {
            Self(error.into())
        }
    }
    impl IntoResponse for AppError {
        fn into_response(self) -> Response {
            axum::http::StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
    async fn effect(tx: &mut Transaction<'_, Sqlite>) -> Result<&'static str, sqlx::Error> {
        sqlx::query("SELECT 1").execute(&mut **tx).await?;
        Ok("done")
    }
    async fn in_transaction(State(pool): State<SqlitePool>, idempotent: Idempotent, body: String) -> Response {
        idempotent
            .run(&pool, async |tx| {
                let done = effect(tx).await?;
                Ok::<_, AppError>(format!("{done} {body}"))
            })
            .await
    }
    async fn leased(idempotent: Option<Idempotent>, body: String) -> Response {
        let Some(idempotent) = idempotent else { return "no key".into_response() };
        idempotent
            .run_leased(async |attempt| {
                let step = attempt.step("charge", async || Ok::<_, AppError>(body.len())).await?;
                Ok::<_, AppError>(step.to_string())
            })
            .await
    }
    anywhere![Idempotent, IdempotencyLayer, IdempotencyService<axum::routing::Route>];
    is_clone::<IdempotencyLayer>();
    axum::Router::new()
        .route("/charge", axum::routing::post(in_transaction).patch(leased))
        .layer(IdempotencyLayer::global(idempotency))
}
