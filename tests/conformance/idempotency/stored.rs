//! Stored requests, for attempts that resume them, and sealed contents.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use serde::{Deserialize, Serialize};
use sqlock::idempotency::{Attempt, Fingerprint, Idempotency, Outcome, Resolution};
use sqlock::{Error, FencingToken};

use super::{App, AppError, Tx, alice, another, app, attempt, effect, request, run, state};
use crate::DATABASE;
use crate::support::{Database, SOON, soon, until};

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Charge {
    cents: u64,
    card: String,
}

fn charge() -> Charge {
    Charge { cents: 500, card: "4242 \u{1f4b3}".into() }
}

/// Reads a column of a record from the table.
async fn column(app: &App, column: &str) -> Option<Vec<u8>> {
    let sql = sqlx::AssertSqlSafe(format!("SELECT {column} FROM sqlock_idem"));
    sqlx::query_scalar(sql).fetch_one(&app.counters.pool).await.expect("one record")
}

/// Makes an attempt, and releases its lease.
async fn begin(payments: &Idempotency, app: &App, key: &str, request: &Fingerprint) -> FencingToken {
    let begun = attempt(payments.attempt(&alice(key), request).await).await;
    let (name, token) = (begun.lease().name().clone(), begun.token());
    drop(begun);
    let next = app.locks.lease(name.as_str()).wait(SOON).acquire().await.expect("acquire");
    next.release().await.expect("release");
    token
}

#[tokio::test]
async fn resume_gives_the_stored_request_to_the_handler() {
    let app = app().await;
    let bytes: Vec<u8> = (0..=255).collect();
    begin(&app.payments, &app, "bytes", &request().with_request(bytes.clone())).await;
    begin(&app.payments, &app, "empty", &request().with_request([])).await;
    begin(&app.payments, &app, "json", &request().with_json_request(&charge()).expect("JSON")).await;
    begin(&app.payments, &app, "none", &request()).await;
    let work = async |attempt: &Attempt| {
        match attempt.key() {
            "bytes" => assert_eq!(attempt.request(), Some(&bytes[..])),
            "empty" => assert_eq!(attempt.request(), Some(&[][..])),
            "json" => assert_eq!(attempt.json_request::<Charge>().expect("JSON"), Some(charge())),
            _ => assert_eq!((attempt.request(), attempt.json_request::<Charge>().expect("none")), (None, None)),
        }
        assert!(attempt.key() != "json" || matches!(attempt.json_request::<u8>(), Err(Error::Json { .. })));
        Ok::<_, AppError>(attempt.number())
    };
    let resumed = soon("the resumption", app.other().await.resume(work)).await.expect("resume");
    assert_eq!((resumed.done, resumed.failed), (4, 0));
}

#[tokio::test]
async fn continued_attempt_has_the_request_of_the_first() {
    let app = app().await;
    let first = attempt(app.payments.attempt(&alice("a"), &request().with_request("one")).await).await;
    assert_eq!(first.request(), Some(&b"one"[..]));
    drop(first);
    // The stored request does not count for the fingerprint.
    let other = app.other().await.wait(SOON);
    let (key, changed) = (alice("a"), request().with_request("two"));
    let second = attempt(soon("the takeover", other.attempt(&key, &changed)).await).await;
    assert_eq!((second.number(), second.request()), (2, Some(&b"one"[..])));
    let answer = other.attempt(&alice("a"), &another().with_request("one")).await.expect("attempt");
    assert!(matches!(answer, Outcome::Mismatch), "{answer:?}");
}

#[tokio::test]
async fn stored_request_is_deleted_at_the_end() {
    let stored = request().with_request("card 4242");
    let has_request = async |app: &App, key: &str| {
        let shown = app.payments.inspect(&alice(key)).await.expect("inspect").and_then(|info| info.request_bytes);
        assert_eq!(shown, column(app, "request").await.map(|bytes| bytes.len() - 1));
        shown.is_some()
    };
    let app_done = app().await;
    let first = attempt(app_done.payments.attempt(&alice("a"), &stored).await).await;
    assert!(has_request(&app_done, "a").await);
    first.unknown().await.expect("unknown");
    assert!(has_request(&app_done, "a").await, "a resumption needs the request");
    drop(first);
    let one = async |_: &Attempt| Ok::<_, AppError>(1);
    until("the resumption", async || app_done.payments.resume(one).await.expect("resume").done > 0).await;
    assert!(!has_request(&app_done, "a").await);

    let resolved = app().await;
    let unknown = attempt(resolved.payments.attempt(&alice("a"), &stored).await).await;
    unknown.unknown().await.expect("unknown");
    assert!(resolved.resolve(&alice("a"), unknown.token(), Resolution::done(&1).expect("JSON")).await);
    assert!(!has_request(&resolved, "a").await);

    // An unused token has no request either.
    let issued = app().await;
    let token = issued.payments.issue("alice", SOON).await.expect("issue");
    let key = sqlock::idempotency::IdempotencyKey::issued("alice", token.as_str());
    let used = attempt(issued.payments.attempt(&key, &stored).await).await;
    assert!(has_request(&issued, &token).await);
    used.forget().await.expect("forget");
    assert!(!has_request(&issued, &token).await);
    assert_eq!(state(&issued, &token).await, Some(("issued", 0)));
}

#[tokio::test]
async fn request_in_one_transaction_is_not_stored() {
    let app = app().await;
    let answer = app.charge_by(&app.payments, &alice("a"), &request().with_request("card 4242")).await;
    assert_eq!(answer, Outcome::New(1));
    assert_eq!(column(&app, "request").await, None);
    // After its retention the key is used anew, under a lease.
    run(&app.counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    begin(&app.payments, &app, "a", &request().with_request("card 4343")).await;
    assert_eq!(column(&app, "request").await.map(|bytes| bytes[1..].to_vec()), Some(b"card 4343".to_vec()));
}

#[tokio::test]
async fn request_over_the_limit_is_refused_unclaimed() {
    let app = app().await;
    let payments = app.payments.clone().request_limit(3);
    let refused = payments.attempt(&alice("a"), &request().with_request("1234")).await;
    assert!(matches!(refused, Err(Error::RequestTooLarge { bytes: 4, limit: 3 })), "{refused:?}");
    let refused = payments.run(&app.counters.pool, &alice("a"), &request().with_request("1234"), effect).await;
    assert!(refused.is_err());
    assert_eq!(state(&app, "a").await, None);
    begin(&payments, &app, "a", &request().with_request("123")).await;
    assert_eq!(state(&app, "a").await, Some(("started", 1)));
}

/// A stand-in for encryption, which only shows whether bytes, key and context came back.
fn sealed(payments: &Idempotency, key: u8) -> Idempotency {
    static NONCE: AtomicU8 = AtomicU8::new(0);
    // Never zero, so that no text stays as it is.
    let mask = |key: u8, nonce: u8| (key ^ nonce) | 0x80;
    let seal = move |context: &[u8], bytes: &[u8]| {
        let nonce = NONCE.fetch_add(1, Ordering::Relaxed);
        let all = [&[context.len() as u8], context, bytes].concat();
        let all = all.iter().map(|byte| byte ^ mask(key, nonce));
        Ok::<_, &str>([nonce].into_iter().chain(all).collect::<Vec<u8>>())
    };
    let open = move |context: &[u8], sealed: &[u8]| {
        let (nonce, all) = sealed.split_first().ok_or("it is empty")?;
        let all: Vec<u8> = all.iter().map(|byte| byte ^ mask(key, *nonce)).collect();
        let all = all.strip_prefix(&[context.len() as u8]).ok_or("another key")?;
        Ok::<_, &str>(all.strip_prefix(context).ok_or("another key or context")?.to_vec())
    };
    payments.clone().seal(seal, open)
}

fn is_sealed<T>(result: Result<T, Error>) {
    assert!(matches!(&result, Err(Error::Sealed { .. })), "{:?}", result.err());
}

/// Reads the stored columns of all records and steps from the tables.
async fn columns(app: &App) -> Vec<Vec<u8>> {
    let sql = "SELECT result FROM sqlock_idem WHERE result IS NOT NULL
               UNION ALL SELECT request FROM sqlock_idem WHERE request IS NOT NULL
               UNION ALL SELECT result FROM sqlock_idem_step";
    sqlx::query_scalar(sql).fetch_all(&app.counters.pool).await.expect("columns")
}

#[tokio::test]
async fn sealed_contents_are_replayed_and_not_readable() {
    let app = app().await;
    let payments = sealed(&app.payments, 7);
    let receipt = async |tx: &mut Tx<'_>| effect(tx).await.map(|count| format!("receipt {count}"));
    for is_replay in [false, true] {
        let answer = payments.run(&app.counters.pool, &alice("a"), &request(), receipt).await.expect("run");
        assert_eq!((answer.is_replay(), answer.into_value().as_deref()), (is_replay, Some("receipt 1")));
    }
    let stored = request().with_request("receipt for a card");
    let first = attempt(payments.attempt(&alice("b"), &stored).await).await;
    assert_eq!(first.request(), Some(&b"receipt for a card"[..]));
    let step = async || Ok::<_, Error>("receipt 2".to_owned());
    assert_eq!(first.step("charge", step).await.expect("step"), "receipt 2");
    let mut tx = app.begin().await;
    first.record_step(&mut tx, "ledger", "receipt 3").await.expect("step");
    tx.commit().await.expect("commit");
    first.unknown().await.expect("unknown");
    drop(first);
    let read = columns(&app).await;
    assert_eq!(read.len(), 4);
    assert!(!read.iter().any(|bytes| bytes.windows(7).any(|window| window == b"receipt")));

    // Another process with the same functions.
    let other = sealed(&app.other().await, 7);
    let resumed = soon("the resumption", async {
        loop {
            let work = async |attempt: &Attempt| {
                assert_eq!(attempt.request(), Some(&b"receipt for a card"[..]));
                let recalled = (attempt.recall("charge").await?, attempt.recall("ledger").await?);
                assert_eq!(recalled, (Some("receipt 2".to_owned()), Some("receipt 3".to_owned())));
                attempt.complete("receipt 4").await?;
                attempt.complete("receipt 4").await.expect("an equal result, sealed anew");
                assert!(matches!(attempt.complete("receipt 5").await, Err(Error::AlreadyCompleted)));
                Ok::<_, AppError>("receipt 4".to_owned())
            };
            let resumed = other.resume(work).await.expect("resume");
            if resumed.in_progress == 0 {
                break resumed;
            }
        }
    })
    .await;
    assert_eq!((resumed.done, resumed.failed), (1, 0));
    let answer = payments.attempt(&alice("b"), &request()).await.expect("attempt");
    let Outcome::Replay(answer) = answer else { panic!("it is done: {answer:?}") };
    assert_eq!(answer.get::<String>().expect("a text"), "receipt 4");
}

#[tokio::test]
async fn result_that_cannot_be_opened_runs_nothing() {
    let app = app().await;
    let payments = sealed(&app.payments, 7);
    assert_eq!(app.charge_by(&payments, &alice("a"), &request()).await, Outcome::New(1));
    begin(&payments, &app, "b", &request().with_request("card")).await;
    let unknown = attempt(payments.attempt(&alice("b"), &request()).await).await;
    unknown.unknown().await.expect("unknown");
    let lease = unknown.lease().name().clone();
    drop(unknown);
    app.locks.lease(lease.as_str()).wait(SOON).acquire().await.expect("acquire").release().await.expect("release");
    let never = async |_: &Attempt| -> Result<i64, AppError> { panic!("it must not run") };
    for by in [app.payments.clone(), sealed(&app.other().await, 8)] {
        let answer = by.run(&app.counters.pool, &alice("a"), &request(), effect).await;
        assert!(matches!(&answer, Err(AppError::Lock(Error::Sealed { .. }))), "{answer:?}");
        let mut tx = app.begin().await;
        is_sealed(by.begin(&mut tx, &alice("a"), &request()).await);
        tx.rollback().await.expect("rollback");
        is_sealed(by.attempt(&alice("a"), &request()).await);
        let answer = by.run_leased(&alice("a"), &request(), never).await;
        assert!(matches!(answer, Err(AppError::Lock(Error::Sealed { .. }))), "{answer:?}");
        // A resumed request cannot be done without its stored request.
        assert_eq!(by.resume(never).await.expect("resume").failed, 1);
        assert_eq!(state(&app, "b").await.map(|(state, _)| state), Some("unknown"));
        // Another request under the key is still a mismatch.
        assert_eq!(app.charge_by(&by, &alice("a"), &another()).await, Outcome::Mismatch);
    }
    assert_eq!(app.effects().await, 1);
    assert_eq!(app.charge_by(&payments, &alice("a"), &request()).await, Outcome::Replay(1));

    // Content stored under another key cannot be opened.
    assert_eq!(app.charge_by(&payments, &alice("c"), &request()).await, Outcome::New(2));
    let theirs: Vec<u8> = sqlx::query_scalar("SELECT result FROM sqlock_idem WHERE request_key = 'a'")
        .fetch_one(&app.counters.pool)
        .await
        .expect("a result");
    let swap = if DATABASE == Database::Postgres { "$1" } else { "?" };
    let swap = format!("UPDATE sqlock_idem SET result = {swap} WHERE request_key = 'c'");
    sqlx::query(sqlx::AssertSqlSafe(swap)).bind(theirs).execute(&app.counters.pool).await.expect("swap");
    is_sealed(payments.attempt(&alice("c"), &request()).await);
}

#[tokio::test]
async fn result_that_cannot_be_sealed_is_not_stored() {
    let app = app().await;
    let broken = app.payments.clone().seal(|_, _| Err("no key"), |_, _| Err("no key"));
    let answer = broken.run(&app.counters.pool, &alice("a"), &request(), effect).await;
    let Err(AppError::Lock(error)) = answer else { panic!("it cannot be sealed: {answer:?}") };
    assert_eq!(error.report().to_string(), "cannot seal the stored result: no key");
    assert_eq!((app.effects().await, state(&app, "a").await), (0, None), "nothing took effect");
    is_sealed(broken.attempt(&alice("a"), &request().with_request("card")).await);
    assert_eq!(state(&app, "a").await, None);
    let first = attempt(broken.attempt(&alice("a"), &request()).await).await;
    is_sealed(first.complete(&1).await);
    assert_eq!(state(&app, "a").await, Some(("unknown", 1)));
}

#[tokio::test]
async fn attempt_whose_request_cannot_be_opened_is_continued() {
    let app = app().await;
    let request = request().with_request("card");
    let broken = app.payments.clone().seal(|_, bytes| Ok::<_, &str>(bytes.to_vec()), |_, _| Err("no key"));
    is_sealed(broken.attempt(&alice("a"), &request).await);
    assert_eq!(state(&app, "a").await, Some(("started", 1)));
    let mended =
        app.payments.clone().seal(|_, bytes| Ok::<_, &str>(bytes.to_vec()), |_, bytes| Ok::<_, &str>(bytes.to_vec()));
    let next = attempt(mended.wait(SOON).attempt(&alice("a"), &request).await).await;
    assert_eq!(next.number(), 2);
}

#[tokio::test]
async fn plain_results_still_replay_with_a_seal() {
    let app = app().await;
    assert_eq!(app.charge(&alice("before")).await, Outcome::New(1));
    let token = app.unknown(&alice("resolved")).await;
    // As `sqlock idem resolve` does, which has no functions.
    assert!(app.resolve(&alice("resolved"), token, Resolution::done(&2).expect("JSON")).await);
    let payments = sealed(&app.payments, 7);
    assert_eq!(app.charge_by(&payments, &alice("before"), &request()).await, Outcome::Replay(1));
    assert_eq!(app.charge_by(&payments, &alice("resolved"), &request()).await, Outcome::Replay(2));
    // An application's own resolution is sealed.
    let token = app.unknown(&alice("sealed")).await;
    let done = Resolution::done(&3).expect("JSON").by("ann");
    assert!(payments.resolve(&alice("sealed"), token, done).await.expect("resolve"));
    assert_eq!(app.charge_by(&payments, &alice("sealed"), &request()).await, Outcome::Replay(3));
    is_sealed(app.payments.attempt(&alice("sealed"), &request()).await);
}

#[tokio::test]
async fn panic_while_opening_request_stops_no_other() {
    let app = app().await;
    let broken = Arc::new(AtomicBool::new(false));
    let is_broken = Arc::clone(&broken);
    let open = move |_: &[u8], sealed: &[u8]| {
        assert!(!(sealed.ends_with(b"bad") && is_broken.load(Ordering::SeqCst)), "it is too short");
        Ok::<_, &str>(sealed.to_vec())
    };
    let payments = app.payments.clone().seal(|_, bytes| Ok::<_, &str>(bytes.to_vec()), open);
    for (key, text) in [("a", "bad"), ("b", "good")] {
        let first = attempt(payments.attempt(&alice(key), &request().with_request(text)).await).await;
        first.unknown().await.expect("unknown");
    }
    broken.store(true, Ordering::SeqCst);
    let work = async |attempt: &Attempt| Ok::<_, AppError>(attempt.number());
    until("the resumption", async || payments.resume(work).await.expect("resume").done > 0).await;
    assert_eq!(state(&app, "a").await.map(|(state, _)| state), Some("unknown"));
    assert_eq!(state(&app, "b").await, Some(("done", 2)));
}
