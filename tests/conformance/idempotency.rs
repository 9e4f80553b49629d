//! Requests that take effect once: in one transaction, and under a lease.

mod attempt;
mod kills;
mod resume;
mod stored;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use sqlock::idempotency::{
    AfterRetention, Attempt, Fingerprint, Idempotency, IdempotencyKey, Outcome, RecordState, Resolution, ResumePolicy,
    Resumed,
};
use sqlock::retry::Retry;
use sqlock::row::RowError;
use sqlock::{Error, FencingToken, Locks};
use sqlx::{AssertSqlSafe, Executor as _, Row as _, Transaction};
use tokio::sync::{Barrier, Notify};
use tokio::task::{JoinHandle, JoinSet};

use super::fence::{Counters, add_one, counters, counters_in, levels, run};
use super::network::{behind_a_proxy, behind_a_reading_proxy};
use super::retry::{fail_and_go_on, send, statements_that_end_a_transaction};
use crate::support::blocked::block_past;
use crate::support::worker::Worker;
use crate::support::{Database, SOON, builder, connect, fresh, soon};
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
    counters: Counters,
    locks: Locks,
    payments: Idempotency,
}

async fn app() -> App {
    app_in(counters().await).await
}

async fn app_in(counters: Counters) -> App {
    let locks = counters.db.locks().await;
    let payments = Idempotency::new(&locks).namespace("payments");
    App { counters, locks, payments }
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
    /// Returns the store of another process with the same database.
    async fn other(&self) -> Idempotency {
        Idempotency::new(&self.counters.db.locks().await).namespace("payments")
    }

    async fn charge(&self, key: &IdempotencyKey) -> Outcome<i64> {
        self.charge_by(&self.payments, key, &request()).await
    }

    async fn charge_by(&self, by: &Idempotency, key: &IdempotencyKey, request: &Fingerprint) -> Outcome<i64> {
        by.run(&self.counters.pool, key, request, effect).await.expect("run")
    }

    async fn begin(&self) -> Tx<'static> {
        begin(&self.counters.pool).await
    }

    async fn effects(&self) -> i64 {
        self.counters.value(1).await
    }
}

async fn begin(pool: &sqlx::Pool<Sql>) -> Tx<'static> {
    match DATABASE {
        Database::Sqlite => pool.begin_with("BEGIN IMMEDIATE").await.expect("begin"),
        _ => pool.begin().await.expect("begin"),
    }
}

/// Counts, and returns the count.
async fn effect(tx: &mut Tx<'_>) -> Result<i64, AppError> {
    add_one(tx, 1).await?;
    Ok(sqlx::query_scalar("SELECT value FROM counter WHERE id = 1").fetch_one(&mut **tx).await?)
}

#[tokio::test]
async fn first_request_takes_effect_and_others_replay() {
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
async fn keys_are_bytes_of_principal_and_namespace() {
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
async fn failed_work_leaves_the_key_new() {
    let app = app().await;
    let failed = app
        .payments
        .run(&app.counters.pool, &alice("a"), &request(), async |tx| {
            effect(tx).await?;
            Err::<i64, _>(AppError::Declined)
        })
        .await;
    assert!(matches!(failed, Err(AppError::Declined)));
    assert_eq!(app.effects().await, 0);
    assert_eq!(app.payments.inspect(&alice("a")).await.expect("inspect"), None);
    // Even another request is new, because nothing has happened under this key.
    assert_eq!(app.charge_by(&app.payments, &alice("a"), &another()).await, Outcome::New(1));
}

#[tokio::test]
async fn different_request_with_same_key_is_a_mismatch() {
    let app = app().await;
    let other = app.other().await;
    assert_eq!(app.charge(&alice("a")).await, Outcome::New(1));
    for by in [&app.payments, &other] {
        assert_eq!(app.charge_by(by, &alice("a"), &another()).await, Outcome::Mismatch);
    }
    let mut tx = app.begin().await;
    let claim = claimed(app.payments.begin(&mut tx, &alice("b"), &request()).await);
    if DATABASE == Database::Sqlite {
        // SQLite has one writer, for which a request waits.
        let waiting = tokio::spawn({
            let (pool, other) = (app.counters.pool.clone(), other.clone());
            async move { other.run(&pool, &alice("b"), &another(), effect).await }
        });
        claim.complete(&mut tx, &7).await.expect("complete");
        tx.commit().await.expect("commit");
        let reply = soon("the answer", waiting).await.expect("no panic").expect("run");
        assert_eq!(reply, Outcome::Mismatch);
        return;
    }
    for by in [&app.payments, &other] {
        let reply = soon("the answer", app.charge_by(by, &alice("b"), &another())).await;
        assert_eq!(reply, Outcome::Mismatch, "while it is in progress");
        let reply = soon("the answer", app.charge_by(by, &alice("b"), &request())).await;
        assert_eq!(reply, Outcome::InProgress);
        let mut theirs = app.begin().await;
        let reply = soon("the answer", by.begin(&mut theirs, &alice("b"), &another())).await.expect("begin");
        assert!(matches!(reply, Outcome::Mismatch), "{reply:?}");
        theirs.rollback().await.expect("rollback");
    }
    claim.complete(&mut tx, &7).await.expect("complete");
    tx.commit().await.expect("commit");
    assert_eq!(app.charge_by(&other, &alice("b"), &another()).await, Outcome::Mismatch);
    assert_eq!(app.charge(&alice("b")).await, Outcome::Replay(7));
    assert_eq!(app.effects().await, 1);
}

fn claimed(
    outcome: Result<Outcome<sqlock::idempotency::Claim, sqlock::idempotency::Stored>, Error>,
) -> sqlock::idempotency::Claim {
    match outcome.expect("begin") {
        Outcome::New(claim) => claim,
        other => panic!("claimed already: {other:?}"),
    }
}

/// A run whose work has taken effect and waits for `go_on`.
struct RunInProgress {
    run: JoinHandle<Result<Outcome<i64>, AppError>>,
    inside: Arc<Notify>,
    go_on: Arc<Notify>,
}

impl RunInProgress {
    fn start(app: &App, key: IdempotencyKey) -> Self {
        let (inside, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let run = tokio::spawn({
            let (payments, pool) = (app.payments.clone(), app.counters.pool.clone());
            let (inside, go_on) = (Arc::clone(&inside), Arc::clone(&go_on));
            async move {
                let work = async |tx: &mut Tx<'_>| {
                    let done = effect(tx).await?;
                    inside.notify_one();
                    go_on.notified().await;
                    Ok::<_, AppError>(done)
                };
                payments.run(&pool, &key, &request(), work).await
            }
        });
        Self { run, inside, go_on }
    }
}

#[tokio::test]
async fn token_expiring_during_request_is_in_progress() {
    let app = app().await;
    let mut lasts = Duration::from_secs(1);
    let (key, first) = loop {
        let token = app.payments.issue("alice", lasts).await.expect("issue");
        let key = IdempotencyKey::issued("alice", token.as_str());
        let mut first = RunInProgress::start(&app, key.clone());
        tokio::select! {
            () = first.inside.notified() => break (key, first),
            // The token expired before this machine came to its request.
            ended = &mut first.run => assert_eq!(ended.expect("no panic").expect("run"), Outcome::Expired),
        }
        lasts *= 2;
    };
    tokio::time::sleep(lasts).await;
    assert_eq!(app.charge(&key).await, Outcome::InProgress);
    // SQLite has one writer, for which a request in another process waits.
    if DATABASE != Database::Sqlite {
        assert_eq!(app.charge_by(&app.other().await, &key, &request()).await, Outcome::InProgress);
    }
    first.go_on.notify_one();
    assert_eq!(soon("the first one", first.run).await.expect("no panic").expect("run"), Outcome::New(1));
    assert_eq!(app.charge(&key).await, Outcome::Replay(1));
}

#[tokio::test]
async fn local_duplicate_is_in_progress_at_once() {
    let app = app().await;
    let RunInProgress { run: first, inside, go_on } = RunInProgress::start(&app, alice("a"));
    soon("the first one", inside.notified()).await;
    for _ in 0..3 {
        assert_eq!(soon("the answer", app.charge(&alice("a"))).await, Outcome::InProgress);
    }
    let waiting = tokio::spawn({
        let (payments, pool) = (app.payments.clone().wait(SOON), app.counters.pool.clone());
        async move { payments.run(&pool, &alice("a"), &request(), effect).await }
    });
    go_on.notify_one();
    assert_eq!(soon("the first one", first).await.expect("no panic").expect("run"), Outcome::New(1));
    assert_eq!(soon("the replay", waiting).await.expect("no panic").expect("run"), Outcome::Replay(1));
    assert_eq!(app.effects().await, 1);
}

#[tokio::test]
async fn one_of_200_concurrent_duplicates_takes_effect() {
    const DUPLICATES: usize = 200;
    let app = app().await;
    let processes = [app.payments.clone(), app.other().await, app.other().await, app.other().await];
    let mut tasks = JoinSet::new();
    for i in 0..DUPLICATES {
        let (payments, pool) = (processes[i % processes.len()].clone().wait(SOON), app.counters.pool.clone());
        tasks.spawn(
            async move { payments.run(&pool, &alice("a"), &request(), effect).await.expect("run").into_value() },
        );
    }
    let reply = soon("all of them", tasks.join_all()).await;
    assert_eq!(reply, vec![Some(1); DUPLICATES]);
    assert_eq!(app.effects().await, 1);
}

#[tokio::test]
async fn callers_transaction_works_at_every_isolation() {
    for level in levels() {
        let app = app().await;
        let isolated = app.counters.at(level).await;
        // This transaction began to read before a rival committed.
        let mut late = isolated.begin().await;
        if DATABASE == Database::Sqlite && *level != "DEFERRED" {
            late.rollback().await.expect("rollback");
            late = isolated.begin().await;
        } else {
            sqlx::raw_sql("SELECT value FROM counter WHERE id = 2").fetch_all(&mut *late).await.expect("read");
            assert_eq!(app.charge(&alice("a")).await, Outcome::New(1), "{level}");
        }
        let reply = soon("the answer", app.payments.begin(&mut late, &alice("a"), &request())).await;
        match (DATABASE, *level) {
            (Database::Postgres, "REPEATABLE READ" | "SERIALIZABLE") => {
                let stale = Error::Row { table: "sqlock_idem".into(), cause: RowError::StaleSnapshot };
                let error = reply.expect_err("it cannot see what is there");
                assert_eq!(error.report().to_string(), stale.report().to_string(), "{level}");
                assert!(error.is_conflict());
            }
            (Database::Sqlite, "DEFERRED") => {
                let error = reply.expect_err("it has read what is not true any more");
                assert!(matches!(error, Error::Row { cause: RowError::Deferred, .. }), "{error:?}");
            }
            (Database::Sqlite, _) => {
                assert!(matches!(reply.expect("begin"), Outcome::New(_)));
            }
            _ => {
                let Outcome::Replay(stored) = reply.expect("begin") else { panic!("{level}: it was done") };
                assert_eq!(stored.get::<i64>().expect("a number"), 1);
            }
        }
        late.rollback().await.expect("rollback");
        let mut tx = isolated.begin().await;
        let claim = claimed(app.payments.begin(&mut tx, &alice("b"), &request()).await);
        add_one(&mut tx, 1).await.expect("an effect");
        claim.complete(&mut tx, "done").await.expect("complete");
        tx.commit().await.expect("commit");
        let mut tx = isolated.begin().await;
        let reply = app.payments.begin(&mut tx, &alice("b"), &request()).await.expect("begin");
        let Outcome::Replay(stored) = reply else { panic!("{level}: it was done") };
        assert_eq!(stored.get::<String>().expect("a text"), "done");
        tx.rollback().await.expect("rollback");
    }
}

/// Covers every isolation level of the application, whatever the database's default.
#[tokio::test]
async fn duplicates_take_effect_once_at_every_isolation() {
    const KEYS: usize = 6;
    for level in levels() {
        let app = app().await;
        let begin = match (DATABASE, *level) {
            (Database::Sqlite, level) => format!("BEGIN {level}"),
            (Database::Postgres, level) => format!("BEGIN ISOLATION LEVEL {level}"),
            _ => String::new(),
        };
        let isolated = app.counters.at(level).await;
        let mut retry = Retry::new().attempts(u32::MAX).within(SOON);
        if !begin.is_empty() {
            retry = retry.begin_with(AssertSqlSafe(begin));
        }
        let processes = [app.payments.clone(), app.other().await];
        let mut tasks = JoinSet::new();
        for i in 0..KEYS * 5 {
            let payments = processes[i % 2].clone().wait(SOON).retry(retry.clone());
            let pool = isolated.pool().clone();
            tasks.spawn(async move {
                let key = alice(&format!("{}", i / 5));
                let done = payments.run(&pool, &key, &request(), effect).await;
                (i / 5, done.expect("run").into_value().expect("a result"))
            });
        }
        let reply: BTreeSet<_> = soon("all of them", tasks.join_all()).await.into_iter().collect();
        assert_eq!(reply.len(), KEYS, "{level}: {reply:?}");
        assert_eq!(app.effects().await, KEYS as i64, "{level}");
    }
}

#[tokio::test]
async fn transaction_that_cannot_be_used_is_refused() {
    let app = app().await;
    let mut tx = app.begin().await;
    let claim = claimed(app.payments.begin(&mut tx, &alice("a"), &request()).await);
    claim.complete(&mut tx, &1).await.expect("complete");
    tx.commit().await.expect("commit");
    // The claim of a rolled-back transaction has no effect.
    let mut tx = app.begin().await;
    let claim = claimed(app.payments.begin(&mut tx, &alice("b"), &request()).await);
    tx.rollback().await.expect("rollback");
    let mut tx = app.begin().await;
    let error = claim.complete(&mut tx, &1).await.expect_err("another transaction");
    assert!(matches!(error, Error::NotClaimed), "{error:?}");
    tx.rollback().await.expect("rollback");
    for key in [alice(""), alice("a\0"), IdempotencyKey::new("", "a")] {
        let mut tx = app.begin().await;
        let error = app.payments.begin(&mut tx, &key, &request()).await.expect_err("no key");
        assert!(matches!(error, Error::InvalidKey { .. }), "{error:?}");
        tx.rollback().await.expect("rollback");
    }
}

#[tokio::test]
async fn keys_and_principals_may_be_of_any_length() {
    let app = app().await;
    let long = |text: &str, length| text.repeat(length);
    let keys = [
        alice(&long("k", 255)),
        alice(&long("k", 256)),
        alice(&long("k", 257)),
        IdempotencyKey::new(long("p", 255), "a"),
        IdempotencyKey::new(long("p", 256), "a"),
        IdempotencyKey::new(long("p", 100_000), "a"),
        IdempotencyKey::global(long("k", 256)),
    ];
    for (i, key) in (1..).zip(&keys) {
        assert_eq!(app.charge(key).await, Outcome::New(i));
        // An operator names the key by its digest, which a client cannot use.
        let shown = app.payments.inspect(key).await.expect("inspect").expect("a record");
        let by_digest = match &shown.principal {
            Some(principal) => IdempotencyKey::new(principal, &shown.key),
            None => IdempotencyKey::global(&shown.key),
        };
        assert_eq!(app.payments.inspect(&by_digest).await.expect("inspect"), Some(shown));
        if by_digest != *key {
            let mut tx = app.begin().await;
            let _claim = claimed(app.payments.begin(&mut tx, &by_digest, &request()).await);
            tx.rollback().await.expect("rollback");
        }
    }
    for (i, key) in (1..).zip(&keys) {
        assert_eq!(app.charge(key).await, Outcome::Replay(i));
    }
    assert_eq!(app.payments.records(10).await.expect("list").len(), keys.len());
    // A resumption finds the record without the text.
    let key = alice(&long("r", 300));
    app.unknown(&key).await;
    let shown = async |attempt: &Attempt| Ok::<_, AppError>(attempt.key().to_owned());
    assert_eq!(app.payments.resume(shown).await.expect("resume").done, 1);
    let reply = app.payments.run_leased(&key, &request(), shown).await.expect("run").into_value().expect("a result");
    assert!(reply.starts_with("sha256:"), "{reply}");
}

#[tokio::test]
async fn pool_of_another_database_is_refused() {
    let (app, elsewhere) = (app().await, app().await);
    for _ in 0..2 {
        let refused = app.payments.run(&elsewhere.counters.pool, &alice("a"), &request(), effect).await;
        let is_typed = matches!(&refused, Err(AppError::Lock(Error::Row { cause: RowError::OtherPool, .. })));
        assert!(is_typed, "{refused:?}");
    }
    assert_eq!(elsewhere.effects().await, 0);
    // Another pool of the same database works as well.
    let another = app.counters.db.pool().await;
    for (pool, outcome) in [(&another, Outcome::New(1)), (&app.counters.pool, Outcome::Replay(1))] {
        assert_eq!(app.payments.run(pool, &alice("a"), &request(), effect).await.expect("run"), outcome);
    }
}

/// A claim that was committed without its result has taken effect.
#[tokio::test]
async fn claim_committed_without_result_runs_no_work() {
    let app = app().await;
    let mut tx = app.begin().await;
    let _claim = claimed(app.payments.begin(&mut tx, &alice("a"), &request()).await);
    tx.commit().await.expect("commit");
    let reply: Outcome<Option<i64>> = app
        .payments
        .run(&app.counters.pool, &alice("a"), &request(), async |_| Ok::<_, AppError>(Some(1)))
        .await
        .expect("run");
    let committed = if DATABASE.is_mysql() { Outcome::Unknown } else { Outcome::Replay(None) };
    assert_eq!(reply, committed);
}

#[tokio::test]
async fn unstorable_result_is_an_error_without_effect() {
    let app = app().await;
    let small = app.payments.clone().result_limit(10);
    let large = async |tx: &mut Tx<'_>| {
        effect(tx).await?;
        Ok::<_, AppError>("12345678901".to_owned())
    };
    let error = small.run(&app.counters.pool, &alice("a"), &request(), large).await.expect_err("too large");
    assert!(matches!(error, AppError::Lock(Error::ResultTooLarge { bytes: 13, limit: 10 })));
    assert_eq!(app.effects().await, 0);
    assert_eq!(app.charge(&alice("a")).await, Outcome::New(1));
    let error = app.payments.run(&app.counters.pool, &alice("a"), &request(), large).await.expect_err("another type");
    assert!(matches!(error, AppError::Lock(Error::Json { .. })));
    assert_eq!(app.effects().await, 1);
}

#[tokio::test]
async fn key_is_new_after_the_retention() {
    let app = app().await;
    for purged in [false, true] {
        let before = app.effects().await;
        assert_eq!(app.charge(&alice("a")).await, Outcome::New(before + 1));
        run(&app.counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
        if purged {
            app.locks.sweeper().sweep().await.expect("sweep");
            assert_eq!(app.payments.inspect(&alice("a")).await.expect("inspect"), None);
        }
        // Also for another request.
        assert_eq!(app.charge_by(&app.payments, &alice("a"), &another()).await, Outcome::New(before + 2));
        assert_eq!(app.charge_by(&app.payments, &alice("a"), &another()).await, Outcome::Replay(before + 2));
        run(&app.counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    }
    // The retention is that of the running handle.
    let brief = app.payments.clone().retention(Duration::from_secs(3));
    let _ = app.charge_by(&brief, &alice("b"), &request()).await;
    let info = app.payments.inspect(&alice("b")).await.expect("inspect").expect("a record");
    assert!((info.expires_at - info.created_at).num_milliseconds() >= 3000, "{info:?}");
}

/// A transaction of the application has read the record, and locks it, when a request deletes the
/// expired record and claims the key. On the other databases, one statement does both.
#[tokio::test]
async fn expired_record_in_use_does_not_block_its_key() {
    if !matches!(DATABASE, Database::MySql | Database::MariaDb) {
        return;
    }
    let app = app().await;
    assert_eq!(app.charge(&alice("a")).await, Outcome::New(1));
    run(&app.counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    let mut reader = app.counters.pool.begin().await.expect("begin");
    reader.execute("SELECT * FROM sqlock_idem LOCK IN SHARE MODE").await.expect("a lock");
    let charging = async {
        let ended = app.charge(&alice("a")).await;
        assert_eq!(ended, Outcome::New(2));
    };
    let reading = async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        reader.rollback().await.expect("rollback");
    };
    soon("the charge", async { tokio::join!(charging, reading) }).await;
}

/// The sweep of the names fails, because a table is missing.
#[tokio::test]
async fn records_are_purged_when_names_cannot_be_swept() {
    let app = app().await;
    assert_eq!(app.charge(&alice("a")).await, Outcome::New(1));
    run(&app.counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    run(&app.counters.pool, "ALTER TABLE sqlock_note RENAME TO note_elsewhere").await;
    let error = app.locks.sweeper().sweep().await.expect_err("a table is missing");
    assert!(matches!(error, Error::NotMigrated { .. }), "{error:?}");
    assert_eq!(app.payments.inspect(&alice("a")).await.expect("inspect"), None);
}

#[tokio::test]
async fn retention_counts_from_the_end_of_long_work() {
    let app = app().await;
    let payments = app.payments.clone().retention(Duration::from_secs(30));
    let (key, asked) = (alice("a"), request());
    let work = async |tx: &mut Tx<'_>| {
        let done = effect(tx).await?;
        // Longer than the neglected duration.
        tokio::time::sleep(Duration::from_secs(1)).await;
        Ok::<_, AppError>(done)
    };
    assert_eq!(payments.run(&app.counters.pool, &key, &asked, work).await.expect("run"), Outcome::New(1));
    let info = app.payments.inspect(&alice("a")).await.expect("inspect").expect("a record");
    assert!((info.expires_at - info.created_at).num_milliseconds() >= 30_990, "{info:?}");
    assert_eq!(app.charge(&alice("a")).await, Outcome::Replay(1));
}

#[tokio::test]
async fn used_key_is_refused_when_configured() {
    let app = app().await;
    let strict = app.payments.clone().after_retention(AfterRetention::Refuse);
    assert_eq!(app.charge_by(&strict, &alice("a"), &request()).await, Outcome::New(1));
    assert_eq!(app.charge_by(&app.payments, &alice("b"), &request()).await, Outcome::New(2));
    let leased = attempt(strict.attempt(&alice("c"), &request()).await).await;
    leased.step("charge", async || Ok::<_, Error>(1)).await.expect("step");
    leased.complete(&3).await.expect("complete");
    drop(leased);
    let token = strict.issue("alice", Duration::from_secs(600)).await.expect("issue");
    let issued = IdempotencyKey::issued("alice", token);
    assert_eq!(app.charge_by(&strict, &issued, &request()).await, Outcome::New(3));
    assert_eq!(app.charge_by(&strict, &alice("a"), &request()).await, Outcome::Replay(1));
    run(&app.counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    for purged in [false, true] {
        if purged {
            assert_eq!(app.payments.purge().await.expect("purge"), 4);
            assert_eq!(app.payments.purge().await.expect("purge"), 0);
        }
        // The setting of the later request does not matter, and another request is refused as well.
        for by in [&strict, &app.payments, &app.other().await] {
            for key in [alice("a"), issued.clone()] {
                for request in [request(), another()] {
                    assert_eq!(app.charge_by(by, &key, &request).await, Outcome::Expired);
                }
            }
            let mut tx = app.begin().await;
            let reply = by.begin(&mut tx, &alice("c"), &request()).await.expect("begin");
            assert!(matches!(reply, Outcome::Expired), "{reply:?}");
            tx.rollback().await.expect("rollback");
            let again = by.run_leased(&alice("c"), &request(), async |_| Ok::<_, Error>(9)).await.expect("run");
            assert_eq!(again, Outcome::Expired);
        }
    }
    assert_eq!(app.effects().await, 3);
    let info = app.payments.inspect(&alice("c")).await.expect("inspect").expect("a record");
    assert_eq!((info.state.as_str(), info.result_bytes, info.steps.len()), ("expired", None, 0));
    // The other keys are forgotten.
    assert_eq!(state(&app, "b").await, None);
    assert_eq!(app.charge(&alice("b")).await, Outcome::New(4));
}

/// The duration of the use does not matter.
#[tokio::test]
async fn sweeper_skips_expired_keys_in_use() {
    let app = app().await;
    assert_eq!(app.charge(&alice("a")).await, Outcome::New(1));
    assert_eq!(app.charge(&alice("b")).await, Outcome::New(2));
    run(&app.counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    let mut tx = app.begin().await;
    let claim = claimed(app.payments.begin(&mut tx, &alice("a"), &another()).await);
    if DATABASE != Database::Sqlite {
        let start = tokio::time::Instant::now();
        soon("the sweep", app.locks.sweeper().sweep()).await.expect("sweep");
        assert_eq!(app.payments.inspect(&alice("b")).await.expect("inspect"), None);
        // No statement was given up, after 4 seconds, because it waited.
        println!("{DATABASE:?}: swept in {:?}", start.elapsed());
    }
    claim.complete(&mut tx, &7).await.expect("complete");
    tx.commit().await.expect("commit");
    app.locks.sweeper().sweep().await.expect("sweep");
    assert_eq!(app.payments.inspect(&alice("b")).await.expect("inspect"), None);
    assert_eq!(app.charge_by(&app.payments, &alice("a"), &another()).await, Outcome::Replay(7));
}

/// The more records are deleted, the likelier a server reads the whole table.
#[tokio::test]
async fn purge_waits_for_no_claim_in_progress() {
    if DATABASE == Database::Sqlite {
        return; // A transaction that claims holds the only write lock.
    }
    let app = app().await;
    for i in 0..40 {
        assert_eq!(app.charge(&alice(&i.to_string())).await, Outcome::New(i + 1));
    }
    run(&app.counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    let mut tx = app.begin().await;
    let _claim = claimed(app.payments.begin(&mut tx, &alice("new"), &another()).await);
    assert_eq!(soon("the purge", app.payments.purge()).await.expect("purge"), 40);
    tx.rollback().await.expect("rollback");
}

async fn expire(app: &App, key: &str) {
    let sql = format!("UPDATE sqlock_idem SET expires_at = 1 WHERE request_key = '{key}'");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&app.counters.pool).await.expect("update");
}

#[tokio::test]
async fn issued_token_is_consumed_by_the_commit() {
    let app = app().await;
    let token = app.payments.issue("alice", Duration::from_secs(60)).await.expect("issue");
    let key = IdempotencyKey::issued("alice", token.as_str());
    // After the rollback the token is valid, also for another request.
    let mut tx = app.begin().await;
    let _claim = claimed(app.payments.begin(&mut tx, &key, &another()).await);
    tx.rollback().await.expect("rollback");
    assert_eq!(app.charge(&key).await, Outcome::New(1));
    assert_eq!(app.charge(&key).await, Outcome::Replay(1));
    assert_eq!(app.charge_by(&app.other().await, &key, &another()).await, Outcome::Mismatch);
    // Foreign, unknown, plain and expired tokens are refused alike.
    let expired = app.payments.issue("alice", Duration::from_secs(60)).await.expect("issue");
    let fresh = app.payments.issue("alice", Duration::from_secs(60)).await.expect("issue");
    expire(&app, &expired).await;
    for key in [
        IdempotencyKey::issued("alice", expired),
        IdempotencyKey::issued("bob", fresh.as_str()),
        IdempotencyKey::issued("alice", "never"),
        alice(&fresh),
    ] {
        assert_eq!(app.charge(&key).await, Outcome::Expired);
        let mut tx = app.begin().await;
        let reply = app.payments.begin(&mut tx, &key, &request()).await.expect("begin");
        assert!(matches!(reply, Outcome::Expired), "{reply:?}");
        tx.rollback().await.expect("rollback");
        let reply = app.payments.attempt(&key, &request()).await.expect("attempt");
        assert!(matches!(reply, Outcome::Expired), "{reply:?}");
    }
    // A used token whose record is deleted is not valid again.
    expire(&app, &token).await;
    assert_eq!(app.charge(&key).await, Outcome::Expired);
    assert_eq!(app.effects().await, 1);
}

#[tokio::test]
async fn concurrent_uses_of_issued_token_take_effect_once() {
    const TOKENS: usize = 8;
    let app = app().await;
    let processes = [app.payments.clone(), app.other().await];
    let mut tasks = JoinSet::new();
    for i in 0..TOKENS {
        let token = app.payments.issue("alice", Duration::from_secs(600)).await.expect("issue");
        for payments in processes.iter().cycle().take(5) {
            let (payments, pool) = (payments.clone().wait(SOON), app.counters.pool.clone());
            let key = IdempotencyKey::issued("alice", token.as_str());
            tasks.spawn(async move {
                let done = payments.run(&pool, &key, &request(), effect).await.expect("run");
                (i, done.into_value().expect("a result"))
            });
        }
    }
    let reply: BTreeSet<_> = soon("all of them", tasks.join_all()).await.into_iter().collect();
    assert_eq!(reply.len(), TOKENS, "{reply:?}");
    assert_eq!(app.effects().await, TOKENS as i64);
}

#[tokio::test]
async fn dropped_run_leaves_all_or_nothing() {
    let app = app().await;
    for i in 0..60_u64 {
        let key = alice(&i.to_string());
        let before = app.effects().await;
        let brief = Duration::from_micros(i * 150);
        let _ = tokio::time::timeout(brief, app.payments.run(&app.counters.pool, &key, &request(), effect)).await;
        // The interrupted transaction may not have been rolled back yet.
        let done = app.charge_by(&app.payments.clone().wait(SOON), &key, &request()).await;
        assert_eq!(done.into_value(), Some(before + 1), "cut after {brief:?}");
        assert_eq!(app.effects().await, before + 1);
    }
}

/// The connection is lost at any moment, also while it commits.
#[tokio::test]
async fn cut_connections_neither_double_nor_lose_effects() {
    const KEYS: usize = 40;
    let app = app().await;
    let cut = Arc::new(AtomicBool::new(true));
    let (pool, cutting) = if DATABASE == Database::Sqlite {
        // SQLite has no connection to lose. Another writer interferes instead.
        let pool = app.counters.pool.clone();
        let (rival, cut) = (app.counters.db.pool_of(1).await, Arc::clone(&cut));
        let cutting = tokio::spawn(async move {
            while cut.load(Ordering::SeqCst) {
                let tx = rival.begin_with("BEGIN IMMEDIATE").await.expect("begin");
                tokio::time::sleep(Duration::from_millis(5)).await;
                tx.rollback().await.expect("rollback");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        (pool, cutting)
    } else {
        let (proxy, url) = behind_a_proxy(&app.counters.db.url);
        let pool = connect(&url, 6).await;
        let cut = Arc::clone(&cut);
        let cutting = tokio::spawn(async move {
            for i in 0.. {
                if !cut.load(Ordering::SeqCst) {
                    break;
                }
                // At growing intervals, so that slow machines make progress, too.
                tokio::time::sleep(Duration::from_millis(20 + i * 7 % 20 + 2 * i)).await;
                if i % 2 == 0 { proxy.reset() } else { drop(proxy.cut_next_reply()) }
            }
            proxy.pass();
            proxy
        });
        let keep = tokio::spawn(async move {
            let _proxy = cutting.await;
        });
        (pool, keep)
    };
    let mut tasks = JoinSet::new();
    let lost = Arc::new(AtomicU32::new(0));
    for i in 0..KEYS * 3 {
        let (payments, pool, lost) = (app.payments.clone().wait(SOON), pool.clone(), Arc::clone(&lost));
        tasks.spawn(async move {
            let key = alice(&(i / 3).to_string());
            loop {
                match payments.run(&pool, &key, &request(), effect).await.map(Outcome::into_value) {
                    Ok(Some(reply)) => return (i / 3, reply),
                    // Another attempt was in progress during the whole wait.
                    Ok(None) => {}
                    Err(_) => drop(lost.fetch_add(1, Ordering::SeqCst)),
                };
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
    }
    let reply = tokio::time::timeout(SOON * 10, tasks.join_all()).await.expect("all get through");
    cut.store(false, Ordering::SeqCst);
    let reply: BTreeSet<_> = reply.into_iter().collect();
    assert_eq!(reply.len(), KEYS, "{reply:?}");
    assert_eq!(app.effects().await, KEYS as i64);
    println!("{DATABASE:?}: {} errors on the way", lost.load(Ordering::SeqCst));
    soon("the end", cutting).await.expect("no panic");
}

/// The server commits, and the reply is lost. SQLite has no network: its answer to a COMMIT is
/// always true.
#[tokio::test]
async fn run_tells_its_doubt_when_nothing_settles_it() {
    let app = app().await;
    let (key, asked) = (alice("a"), request());
    if DATABASE == Database::Sqlite {
        let part = "CREATE TABLE part (whole INTEGER REFERENCES counter (id) DEFERRABLE INITIALLY DEFERRED)";
        run(&app.counters.pool, part).await;
        let refused = app.payments.run(&app.counters.pool, &key, &asked, async |tx| {
            sqlx::query("INSERT INTO part VALUES (9)").execute(&mut **tx).await?;
            effect(tx).await
        });
        let error = refused.await.expect_err("the COMMIT is refused");
        assert!(!matches!(error, AppError::Lock(Error::CommitUnknown { .. })), "{error:?}");
        assert_eq!(app.effects().await, 0);
        assert_eq!(app.charge(&alice("a")).await, Outcome::New(1));
        return;
    }
    let (proxy, url) = behind_a_reading_proxy(&app.counters.db.url);
    let far = sqlx::pool::PoolOptions::<Sql>::new().max_connections(1).acquire_timeout(Duration::from_secs(3));
    let far = far.connect_lazy(&url).expect("a pool");
    // The first connection may take longer on a busy machine.
    soon("a connection", async { while far.acquire().await.is_err() {} }).await;
    let (payments, begun) = (app.payments.clone().retry(Retry::new().attempts(3)), AtomicU32::new(0));
    let doubtful = payments.run(&far, &key, &asked, async |tx| {
        begun.fetch_add(1, Ordering::SeqCst);
        let done = effect(tx).await?;
        // No other connection is opened: port 1 is closed.
        far.set_connect_options(with_port(&url, 1).parse()?);
        proxy.cut_reply_to("COMMIT");
        Ok::<_, AppError>(done)
    });
    let error = soon("the answer", doubtful).await.expect_err("nobody can know");
    assert!(matches!(error, AppError::Lock(Error::CommitUnknown { .. })), "{error:?}");
    assert_eq!(begun.into_inner(), 1);
    let asked_again = app.payments.clone().wait(SOON);
    assert_eq!(app.charge_by(&asked_again, &alice("a"), &request()).await, Outcome::Replay(1));
    assert_eq!(app.effects().await, 1);
}

/// The URL of another server on this machine.
fn with_port(url: &str, port: u16) -> String {
    let (before, path) = url.rsplit_once('/').expect("a URL names a database");
    let (host, _) = before.rsplit_once(':').expect("a URL of a proxy has a port");
    format!("{host}:{port}/{path}")
}

/// A closure that ignores that its transaction was rolled back, or cannot go on.
#[tokio::test]
async fn error_ignored_by_the_work_doubles_no_effect() {
    let app = app().await;
    let begun = AtomicU32::new(0);
    let (key, asked) = (alice("a"), request());
    let ignoring = async |tx: &mut Tx<'_>| {
        add_one(tx, 1).await?;
        if begun.fetch_add(1, Ordering::SeqCst) == 0 {
            fail_and_go_on(&app.counters, tx).await;
            let _ = add_one(tx, 2).await;
        }
        Ok::<_, AppError>(1)
    };
    let run = async || app.payments.run(&app.counters.pool, &key, &asked, ignoring).await;
    let reply = match run().await {
        // Nothing took effect, and the client asks again.
        Err(error) if DATABASE != Database::Sqlite => {
            assert!(!matches!(error, AppError::Lock(Error::CommitUnknown { .. })), "{error:?}");
            assert_eq!((app.effects().await, app.counters.value(2).await), (0, 0));
            run().await
        }
        reply => reply,
    };
    assert_eq!(reply.expect("run"), Outcome::New(1));
    assert_eq!(run().await.expect("run"), Outcome::Replay(1));
    let other = i64::from(DATABASE == Database::Sqlite);
    assert_eq!((app.effects().await, app.counters.value(2).await), (1, other));
    assert_eq!(begun.load(Ordering::SeqCst), if DATABASE == Database::Sqlite { 1 } else { 2 });
}

/// What the work writes after the end of its transaction commits by itself, except on MySQL and
/// MariaDB.
#[tokio::test]
async fn claim_rolled_back_during_work_is_unknown() {
    let app = app().await;
    let (key, asked, begun) = (alice("a"), request(), AtomicU32::new(0));
    let end = match DATABASE {
        Database::Sqlite => "INSERT OR ROLLBACK INTO counter (id, value) VALUES (1, 0)",
        _ => "ROLLBACK",
    };
    let work = async |tx: &mut Tx<'_>| {
        begun.fetch_add(1, Ordering::SeqCst);
        let done = effect(tx).await?;
        let _ = tx.execute(end).await;
        add_one(tx, 2).await?;
        Ok::<_, AppError>(done)
    };
    let run = async || app.payments.run(&app.counters.pool, &key, &asked, work).await;
    if DATABASE.is_mysql() {
        let error = run().await.expect_err("nothing took effect");
        assert!(matches!(error, AppError::Lock(Error::NotClaimed)), "{error:?}");
        assert_eq!((app.effects().await, app.counters.value(2).await), (0, 0));
        assert_eq!(app.charge(&key).await, Outcome::New(1));
        return;
    }
    for _ in 0..2 {
        assert_eq!(run().await.expect("run"), Outcome::Unknown);
    }
    assert_eq!((app.effects().await, app.counters.value(2).await, begun.load(Ordering::SeqCst)), (0, 1, 1));
    app.resume_nothing().await;
    assert_eq!(run().await.expect("run"), Outcome::Unknown);
    let kept = app.payments.unfinished(10).await.expect("list");
    let token = kept.first().and_then(|info| info.token).expect("a token");
    assert!(app.resolve(&key, token, Resolution::failed()).await);
    assert_eq!(app.charge(&key).await, Outcome::New(1));
}

/// A statement ends the transaction, on PostgreSQL by making it unusable, and the work goes on.
/// What it writes afterwards commits by itself on SQLite.
#[tokio::test]
async fn failing_work_that_outlives_transaction_is_unknown() {
    let end = match DATABASE {
        Database::Sqlite => "INSERT OR ROLLBACK INTO counter (id, value) VALUES (1, 0)",
        Database::Postgres => "INSERT INTO counter (id, value) VALUES (1, 0)",
        _ => "ROLLBACK",
    };
    let stale: fn() -> AppError =
        || AppError::Lock(Error::Row { table: "counter".into(), cause: RowError::StaleSnapshot });
    for error in [|| AppError::Declined, stale] {
        let app = app().await;
        let (key, asked, begun) = (alice("a"), request(), AtomicU32::new(0));
        let payments = app.payments.clone().retry(Retry::new().attempts(3));
        let work = async |tx: &mut Tx<'_>| {
            begun.fetch_add(1, Ordering::SeqCst);
            effect(tx).await?;
            let _ = tx.execute(end).await;
            let _ = add_one(tx, 2).await;
            Err::<i64, _>(error())
        };
        let run = async || payments.run(&app.counters.pool, &key, &asked, work).await;
        if DATABASE == Database::Sqlite {
            for _ in 0..2 {
                assert_eq!(run().await.expect("run"), Outcome::Unknown);
            }
            assert_eq!((app.effects().await, app.counters.value(2).await, begun.into_inner()), (0, 1, 1));
        } else {
            run().await.expect_err("nothing took effect");
            assert_eq!((app.effects().await, app.counters.value(2).await), (0, 0));
            assert_eq!(app.charge(&key).await, Outcome::New(1));
        }
    }
}

/// On MySQL and MariaDB, DDL commits the statements before it, the claim included.
#[tokio::test]
async fn work_committed_by_ddl_is_unknown() {
    let app = app().await;
    let (key, asked) = (alice("a"), request());
    let work = async |tx: &mut Tx<'_>| {
        let done = effect(tx).await?;
        sqlx::raw_sql("CREATE TABLE made_inside (id INTEGER)").execute(&mut **tx).await?;
        Ok::<_, AppError>(done)
    };
    let run = async || app.payments.run(&app.counters.pool, &key, &asked, work).await.expect("run");
    if DATABASE.is_mysql() {
        for _ in 0..2 {
            assert_eq!(run().await, Outcome::Unknown);
        }
        assert_eq!(app.effects().await, 1);
        app.resume_nothing().await;
        let kept = app.payments.unfinished(10).await.expect("list");
        let token = kept.first().and_then(|info| info.token).expect("a token");
        assert!(app.resolve(&key, token, Resolution::done(&1).expect("JSON")).await);
        assert_eq!(app.charge(&key).await, Outcome::Replay(1));
    } else {
        assert_eq!(run().await, Outcome::New(1));
        assert_eq!(run().await, Outcome::Replay(1));
    }
}

/// An operator who repeats an earlier command does not resolve a later request.
#[tokio::test]
async fn unknown_claims_of_a_key_have_different_tokens() {
    let app = app().await;
    let (key, asked, mut earlier) = (alice("a"), request(), None);
    let ends = match DATABASE {
        Database::Sqlite => ["INSERT OR ROLLBACK INTO counter (id, value) VALUES (1, 0)"; 2],
        Database::Postgres => ["ROLLBACK"; 2],
        _ => ["CREATE TABLE made_first (id INTEGER)", "CREATE TABLE made_second (id INTEGER)"],
    };
    for end in ends {
        // SQLite's clock counts in milliseconds: the claims must not be of the same one.
        tokio::time::sleep(Duration::from_millis(5)).await;
        let work = async |tx: &mut Tx<'_>| {
            let done = effect(tx).await?;
            let _ = tx.execute(end).await;
            Ok::<_, AppError>(done)
        };
        let outcome = app.payments.run(&app.counters.pool, &key, &asked, work).await.expect("run");
        assert_eq!(outcome, Outcome::Unknown);
        let kept = app.payments.unfinished(10).await.expect("list");
        let token = kept.first().and_then(|info| info.token).expect("a token");
        if let Some(earlier) = earlier.replace(token) {
            assert!(token > earlier, "{token} after {earlier}");
            assert!(!app.resolve(&key, earlier, Resolution::failed()).await);
        }
        assert!(app.resolve(&key, token, Resolution::failed()).await);
    }
}

/// The error of the work, or a dropped future, cannot say that the claim is committed.
#[tokio::test]
async fn unfinished_work_committed_by_ddl_is_unknown() {
    let app = app().await;
    for (key, ddl) in [
        ("failed", "CREATE TABLE made_by_failed (id INTEGER)"),
        ("once", "CREATE TABLE made_by_once (id INTEGER)"),
        ("dropped", "CREATE TABLE made_by_dropped (id INTEGER)"),
    ] {
        let (name, asked, sent) = (alice(key), request(), Notify::new());
        let payments = app.payments.clone().retry(Retry::new().attempts(1));
        let before = app.effects().await;
        let running = payments.run(&app.counters.pool, &name, &asked, async |tx| {
            let done = effect(tx).await?;
            sqlx::raw_sql(ddl).execute(&mut **tx).await?;
            sent.notify_one();
            match key {
                "failed" => Err(AppError::Declined),
                "once" => Ok(done),
                _ => std::future::pending().await,
            }
        });
        tokio::select! {
            ended = running => match (key, ended) {
                ("failed", Err(AppError::Declined)) => {}
                ("once", Err(AppError::Lock(Error::CommitUnknown { .. }))) if DATABASE.is_mysql() => {}
                ("once", Ok(Outcome::New(_))) if !DATABASE.is_mysql() => {}
                ended => panic!("{ended:?}"),
            },
            () = sent.notified(), if key == "dropped" => {}
        }
        let patient = app.payments.clone().wait(SOON);
        let again = soon("the answer", app.charge_by(&patient, &name, &request())).await;
        match (DATABASE.is_mysql(), key) {
            (true, _) => assert_eq!(again, Outcome::Unknown, "{key}"),
            (false, "once") => assert_eq!(again, Outcome::Replay(before + 1)),
            (false, _) => assert_eq!(again, Outcome::New(before + 1), "{key}"),
        }
        assert_eq!(app.effects().await, before + 1, "{key}");
    }
    let unknown = app.payments.unfinished(10).await.expect("list");
    assert_eq!(unknown.len(), if DATABASE.is_mysql() { 3 } else { 0 });
}

// ---- under a lease

async fn attempt(outcome: Result<Outcome<Attempt, sqlock::idempotency::Stored>, Error>) -> Attempt {
    match outcome.expect("attempt") {
        Outcome::New(attempt) => attempt,
        other => panic!("no attempt: {other:?}"),
    }
}

async fn state(app: &App, key: &str) -> Option<(&'static str, u32)> {
    let info = app.payments.inspect(&alice(key)).await.expect("inspect");
    info.map(|info| (info.state.as_str(), info.attempts))
}

/// Makes the database refuse every stored result.
pub(super) async fn refuse_results(pool: &sqlx::Pool<Sql>) {
    let sql = match DATABASE {
        Database::Sqlite => {
            "CREATE TRIGGER refuse_results BEFORE UPDATE OF result ON sqlock_idem WHEN NEW.result IS NOT NULL
             BEGIN SELECT RAISE(ABORT, 'it is refused'); END"
        }
        _ => "ALTER TABLE sqlock_idem ADD CONSTRAINT refuse_results CHECK (result IS NULL)",
    };
    run(pool, sql).await;
}

fn counts(resumed: Resumed) -> (u64, u64, u64) {
    (resumed.done, resumed.failed, resumed.dead_letters)
}

impl App {
    /// Leaves an attempt with an unknown outcome, and returns its token.
    async fn unknown(&self, key: &IdempotencyKey) -> FencingToken {
        let unknown = attempt(self.payments.clone().wait(SOON).attempt(key, &request()).await).await;
        unknown.unknown().await.expect("unknown");
        self.drop_attempt(unknown).await
    }

    /// Leaves an attempt that has died, and returns its token.
    async fn died(&self, key: &IdempotencyKey) -> FencingToken {
        let died = attempt(self.payments.clone().wait(SOON).attempt(key, &request()).await).await;
        self.drop_attempt(died).await
    }

    /// Drops an attempt, whose lease is released in the background, and returns its token.
    async fn drop_attempt(&self, attempt: Attempt) -> FencingToken {
        let (name, token) = (attempt.lease().name().clone(), attempt.token());
        drop(attempt);
        let next = self.locks.lease(name.as_str()).wait(SOON).acquire().await.expect("acquire");
        next.release().await.expect("release");
        token
    }

    /// Resumes the requests of the namespace, of which none may be attempted again.
    async fn resume_nothing(&self) {
        let work = async |attempt: &Attempt| Ok::<i64, AppError>(i64::from(attempt.number()));
        let resumed = self.payments.resume(work).await.expect("resume");
        assert_eq!(resumed, Resumed::default());
    }

    async fn resolve(&self, key: &IdempotencyKey, token: FencingToken, resolution: Resolution) -> bool {
        self.payments.resolve(key, token, resolution.by("ann").note("in the books")).await.expect("resolve")
    }

    async fn resolutions(&self, key: &IdempotencyKey) -> Vec<(&'static str, Option<FencingToken>, String, String)> {
        let found = self.payments.resolutions(key).await.expect("list");
        found.into_iter().map(|found| (found.outcome, found.token, found.by, found.note)).collect()
    }
}

#[tokio::test]
async fn pool_stays_usable_after_work_ended_transaction() {
    let app = app().await;
    let pool = connect(&app.counters.db.url, 1).await;
    for (nth, &statements) in statements_that_end_a_transaction().iter().enumerate() {
        // Other tests check the outcome of this request.
        let work = async |tx: &mut Tx<'_>| Ok::<_, AppError>(send(tx, statements).await?);
        let _ = app.payments.run(&pool, &alice(&format!("ends/{nth}")), &request(), work).await;
        let (key, request) = (alice(&format!("next/{nth}")), request());
        let next = app.payments.run(&pool, &key, &request, effect);
        let next = soon("the next request", next).await.unwrap_or_else(|e| panic!("after {statements:?}: {e}"));
        assert!(matches!(next, Outcome::New(_)), "{next:?}");
    }
}
