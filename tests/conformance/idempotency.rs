//! Requests that take effect once: in one transaction, and under a lease.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlock::{
    Error, FencingToken, Fingerprint, Idempotency, IdempotencyKey, Locks, Outcome, Retry, RetryError, RowError,
};
use sqlx::{AssertSqlSafe, Transaction};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use super::fence::{Books, add_one, books, levels, run};
use super::network::behind_a_proxy;
use crate::support::{Database, SOON, builder, connect, soon};
use crate::{DATABASE, Sql};

type Tx<'c> = Transaction<'c, Sql>;

/// An error of an application.
#[derive(Debug, thiserror::Error)]
enum AppError {
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Lock(#[from] Error),
    #[error("declined")]
    Declined,
}

/// An application with a counter that counts effects.
struct App {
    books: Books,
    locks: Locks,
    payments: Idempotency,
}

async fn app() -> App {
    app_in(books().await).await
}

async fn app_in(books: Books) -> App {
    let locks = books.db.locks().await;
    let payments = Idempotency::new(&locks).namespace("payments");
    App { books, locks, payments }
}

fn alice(key: &str) -> IdempotencyKey {
    IdempotencyKey::new("alice", key)
}

fn request() -> Fingerprint {
    Fingerprint::of(["charge", "500"])
}

fn another() -> Fingerprint {
    Fingerprint::of(["charge", "501"])
}

impl App {
    /// Another process with the same database.
    async fn other(&self) -> Idempotency {
        Idempotency::new(&self.books.db.locks().await).namespace("payments")
    }

    async fn charge(&self, key: &IdempotencyKey) -> Outcome<i64> {
        self.charge_by(&self.payments, key, &request()).await
    }

    async fn charge_by(&self, by: &Idempotency, key: &IdempotencyKey, request: &Fingerprint) -> Outcome<i64> {
        by.run(&self.books.pool, key, request, effect).await.expect("run")
    }

    async fn begin(&self) -> Tx<'static> {
        begin(&self.books.pool).await
    }

    async fn effects(&self) -> i64 {
        self.books.value(1).await
    }
}

async fn begin(pool: &sqlx::Pool<Sql>) -> Tx<'static> {
    match DATABASE {
        Database::Sqlite => pool.begin_with("BEGIN IMMEDIATE").await.expect("begin"),
        _ => pool.begin().await.expect("begin"),
    }
}

/// Counts, and tells the count.
async fn effect(tx: &mut Tx<'_>) -> Result<i64, AppError> {
    add_one(tx, 1).await?;
    Ok(sqlx::query_scalar("SELECT value FROM counter WHERE id = 1").fetch_one(&mut **tx).await?)
}

#[tokio::test]
async fn first_takes_effect_and_each_further_one_is_told_its_result() {
    let app = app().await;
    assert_eq!(app.charge(&alice("a")).await, Outcome::New(1));
    for _ in 0..3 {
        assert_eq!(app.charge(&alice("a")).await, Outcome::Replay(1));
        assert_eq!(app.charge_by(&app.other().await, &alice("a"), &request()).await, Outcome::Replay(1));
    }
    assert_eq!(app.effects().await, 1);
    assert_eq!(app.charge(&alice("b")).await, Outcome::New(2));
}

#[tokio::test]
async fn keys_are_compared_byte_for_byte_and_belong_to_their_principal_and_namespace() {
    let app = app().await;
    let keys = [
        alice("a"),
        alice("A"),
        alice("a "),
        alice("á"),
        alice("a\u{301}"),
        IdempotencyKey::new("Alice", "a"),
        IdempotencyKey::new("bob", "a"),
        IdempotencyKey::global("a"),
        IdempotencyKey::new("a", "alice"),
    ];
    for (i, key) in (1..).zip(&keys) {
        assert_eq!(app.charge(key).await, Outcome::New(i), "{i}");
    }
    for (i, key) in (1..).zip(&keys) {
        assert_eq!(app.charge(key).await, Outcome::Replay(i), "{i}");
    }
    let refunds = app.other().await.namespace("refunds");
    assert_eq!(app.charge_by(&refunds, &alice("a"), &request()).await, Outcome::New(10));
}

#[tokio::test]
async fn what_fails_leaves_the_key_as_good_as_new() {
    let app = app().await;
    let failed = app
        .payments
        .run(&app.books.pool, &alice("a"), &request(), async |tx| {
            effect(tx).await?;
            Err::<i64, _>(AppError::Declined)
        })
        .await;
    assert!(matches!(failed, Err(RetryError::Failed(AppError::Declined))));
    assert_eq!(app.effects().await, 0);
    assert_eq!(app.payments.inspect(&alice("a")).await.expect("inspect"), None);
    // Also with another request: nothing has happened under this key.
    assert_eq!(app.charge_by(&app.payments, &alice("a"), &another()).await, Outcome::New(1));
}

#[tokio::test]
async fn another_request_under_the_same_key_is_a_mismatch_whether_it_is_done_or_in_progress() {
    let app = app().await;
    let other = app.other().await;
    assert_eq!(app.charge(&alice("a")).await, Outcome::New(1));
    for by in [&app.payments, &other] {
        assert_eq!(app.charge_by(by, &alice("a"), &another()).await, Outcome::Mismatch);
    }
    let mut tx = app.begin().await;
    let claim = claimed(app.payments.begin(&mut tx, &alice("b"), &request()).await);
    if DATABASE == Database::Sqlite {
        // There is one writer: whoever comes waits for it, and is told then.
        let waiting = tokio::spawn({
            let (pool, other) = (app.books.pool.clone(), other.clone());
            async move { other.run(&pool, &alice("b"), &another(), effect).await }
        });
        claim.complete(&mut tx, &7).await.expect("complete");
        tx.commit().await.expect("commit");
        let told = soon("the answer", waiting).await.expect("no panic").expect("run");
        assert_eq!(told, Outcome::Mismatch);
        return;
    }
    for by in [&app.payments, &other] {
        let told = soon("the answer", app.charge_by(by, &alice("b"), &another())).await;
        assert_eq!(told, Outcome::Mismatch, "while it is in progress");
        let told = soon("the answer", app.charge_by(by, &alice("b"), &request())).await;
        assert_eq!(told, Outcome::InProgress);
        let mut theirs = app.begin().await;
        let told = soon("the answer", by.begin(&mut theirs, &alice("b"), &another())).await.expect("begin");
        assert!(matches!(told, Outcome::Mismatch), "{told:?}");
        theirs.rollback().await.expect("rollback");
    }
    claim.complete(&mut tx, &7).await.expect("complete");
    tx.commit().await.expect("commit");
    assert_eq!(app.charge_by(&other, &alice("b"), &another()).await, Outcome::Mismatch);
    assert_eq!(app.charge(&alice("b")).await, Outcome::Replay(7));
    assert_eq!(app.effects().await, 1);
}

fn claimed(outcome: Result<Outcome<sqlock::Claim, sqlock::Stored>, Error>) -> sqlock::Claim {
    match outcome.expect("begin") {
        Outcome::New(claim) => claim,
        other => panic!("claimed already: {other:?}"),
    }
}

#[tokio::test]
async fn duplicate_in_the_same_process_is_told_at_once_that_it_is_in_progress() {
    let app = app().await;
    let (inside, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let first = tokio::spawn({
        let (payments, pool) = (app.payments.clone(), app.books.pool.clone());
        let (inside, go_on) = (Arc::clone(&inside), Arc::clone(&go_on));
        async move {
            let work = async |tx: &mut Tx<'_>| {
                let done = effect(tx).await?;
                inside.notify_one();
                go_on.notified().await;
                Ok::<_, AppError>(done)
            };
            payments.run(&pool, &alice("a"), &request(), work).await
        }
    });
    soon("the first one", inside.notified()).await;
    for _ in 0..3 {
        assert_eq!(soon("the answer", app.charge(&alice("a"))).await, Outcome::InProgress);
    }
    let waiting = tokio::spawn({
        let (payments, pool) = (app.payments.clone().wait(SOON), app.books.pool.clone());
        async move { payments.run(&pool, &alice("a"), &request(), effect).await }
    });
    go_on.notify_one();
    assert_eq!(soon("the first one", first).await.expect("no panic").expect("run"), Outcome::New(1));
    assert_eq!(soon("the replay", waiting).await.expect("no panic").expect("run"), Outcome::Replay(1));
    assert_eq!(app.effects().await, 1);
}

#[tokio::test]
async fn of_200_concurrent_duplicates_one_takes_effect_and_all_are_told_the_same() {
    const DUPLICATES: usize = 200;
    let app = app().await;
    let processes = [app.payments.clone(), app.other().await, app.other().await, app.other().await];
    let mut tasks = JoinSet::new();
    for i in 0..DUPLICATES {
        let (payments, pool) = (processes[i % processes.len()].clone().wait(SOON), app.books.pool.clone());
        tasks.spawn(
            async move { payments.run(&pool, &alice("a"), &request(), effect).await.expect("run").into_value() },
        );
    }
    let told = soon("all of them", tasks.join_all()).await;
    assert_eq!(told, vec![Some(1); DUPLICATES]);
    assert_eq!(app.effects().await, 1);
}
