//! What is stored with a record: the request, for those that resume it.

use serde::{Deserialize, Serialize};
use sqlock::idempotency::{Attempt, Fingerprint, Idempotency, Outcome, Resolution};
use sqlock::{Error, FencingToken};

use super::{App, AppError, alice, another, app, attempt, effect, request, run, state};
use crate::support::{SOON, soon};

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Charge {
    cents: u64,
    card: String,
}

fn charge() -> Charge {
    Charge { cents: 500, card: "4242 \u{1f4b3}".into() }
}

/// What stands in the column of a record, whoever reads the table.
async fn column(app: &App, column: &str) -> Option<Vec<u8>> {
    let sql = sqlx::AssertSqlSafe(format!("SELECT {column} FROM sqlock_idem"));
    sqlx::query_scalar(sql).fetch_one(&app.books.pool).await.expect("one record")
}

/// Makes an attempt, and gives its lease back.
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
    // It does not count for the fingerprint.
    let other = app.other().await.wait(SOON);
    let (key, changed) = (alice("a"), request().with_request("two"));
    let second = attempt(soon("the takeover", other.attempt(&key, &changed)).await).await;
    assert_eq!((second.number(), second.request()), (2, Some(&b"one"[..])));
    let told = other.attempt(&alice("a"), &another().with_request("one")).await.expect("attempt");
    assert!(matches!(told, Outcome::Mismatch), "{told:?}");
}

#[tokio::test]
async fn stored_request_is_deleted_once_the_request_has_ended() {
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
    assert!(has_request(&app_done, "a").await, "who resumes it needs it");
    drop(first);
    let one = async |_: &Attempt| Ok::<_, AppError>(1);
    soon("the resumption", async { while app_done.payments.resume(one).await.expect("resume").done == 0 {} }).await;
    assert!(!has_request(&app_done, "a").await);

    let resolved = app().await;
    let unknown = attempt(resolved.payments.attempt(&alice("a"), &stored).await).await;
    unknown.unknown().await.expect("unknown");
    assert!(resolved.resolve(&alice("a"), unknown.token(), Resolution::done(&1).expect("JSON")).await);
    assert!(!has_request(&resolved, "a").await);

    // A token that nobody has used has no request either.
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
    let told = app.charge_by(&app.payments, &alice("a"), &request().with_request("card 4242")).await;
    assert_eq!(told, Outcome::New(1));
    assert_eq!(column(&app, "request").await, None);
    // After its retention the key is used anew, under a lease.
    run(&app.books.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    begin(&app.payments, &app, "a", &request().with_request("card 4343")).await;
    assert_eq!(column(&app, "request").await.map(|bytes| bytes[1..].to_vec()), Some(b"card 4343".to_vec()));
}

#[tokio::test]
async fn request_over_the_limit_is_refused_unclaimed() {
    let app = app().await;
    let payments = app.payments.clone().request_limit(3);
    let refused = payments.attempt(&alice("a"), &request().with_request("1234")).await;
    assert!(matches!(refused, Err(Error::RequestTooLarge { bytes: 4, limit: 3 })), "{refused:?}");
    let refused = payments.run(&app.books.pool, &alice("a"), &request().with_request("1234"), effect).await;
    assert!(refused.is_err());
    assert_eq!(state(&app, "a").await, None);
    begin(&payments, &app, "a", &request().with_request("123")).await;
    assert_eq!(state(&app, "a").await, Some(("started", 1)));
}
