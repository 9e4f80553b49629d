//! `sqlock acquire`, `renew` and `release`: a lease across the steps of a script.

use std::fs::File;
use std::time::Duration;

use chrono::DateTime;
use rustix::process::Signal;
use serde_json::Value;
use sqlock::FencingToken;

use super::super::network::behind_a_reading_proxy;
use crate::DATABASE;
use crate::support::command::{Ended, Running, beside, end, held, program, run, sqlock};
use crate::support::process_table::poll_until;
use crate::support::{Database, TestDatabase, empty, soon};

/// Parses the output: one line, one object.
fn object(ended: &Ended) -> Value {
    assert_eq!(ended.stdout.lines().count(), 1, "{}", ended.stdout);
    serde_json::from_str(&ended.stdout).expect("JSON")
}

fn token(printed: &Value) -> String {
    printed["token"].as_u64().expect("a number").to_string()
}

/// In milliseconds since the epoch.
fn expires_at(printed: &Value) -> i64 {
    let text = printed["expires_at"].as_str().expect("a text");
    DateTime::parse_from_rfc3339(text).expect("RFC 3339").timestamp_millis()
}

async fn acquire(db: &TestDatabase, options: &[&str]) -> Value {
    let ended = run(db, &[&["acquire", "job"], options].concat()).await.expect(0);
    assert_eq!(ended.stderr, "");
    object(&ended)
}

#[tokio::test]
async fn acquire_prints_the_lease_and_leaves_it_held() {
    let db = empty().await;
    let printed = acquire(&db, &["--ttl", "10m", "--label", "a step"]).await;
    let keys: Vec<&String> = printed.as_object().expect("an object").keys().collect();
    assert_eq!(keys, ["expires_at", "name", "owner", "token"]);

    // The process has ended.
    let locks = beside(&db).await;
    let info = held(&locks, "job").await.expect("still held");
    assert_eq!(printed["name"], "job");
    assert_eq!(printed["token"], info.token.get());
    assert_eq!(printed["owner"], info.owner.expect("an owner").to_string());
    let off = expires_at(&printed) - info.expires_at.timestamp_millis();
    assert!(off.abs() < 60_000, "off by {off} ms");
    assert_eq!(info.label, "a step");
    assert_eq!(info.holds, 1);
    assert!(info.remaining > Duration::from_secs(500));
    assert!(locks.lease("job").try_acquire().await.expect("try").is_none());
    run(&db, &["run", "-n", "job", "--", "true"]).await.expect(75);
}

#[tokio::test]
async fn interrupted_acquire_leaves_nothing_held() {
    if DATABASE == Database::Sqlite {
        return; // There is no network between.
    }
    let db = empty().await;
    run(&db, &["migrate"]).await.expect(0);
    let (proxy, url) = behind_a_reading_proxy(&db.url);
    // The query for the lease that was granted.
    let query = proxy.hold_request_with("UNION ALL\nSELECT h.");
    let mut command = sqlock(&db, &["acquire", "--ttl", "10m", "job"]);
    command.env("DATABASE_URL", &url);
    let acquiring = Running::start(command);
    poll_until("the query", || query.is_held()).await;
    acquiring.signal(Signal::TERM);
    let (ended, ()) = tokio::join!(acquiring.end(), query.deliver());
    assert_eq!(ended.expect(143).stdout, "");
    run(&db, &["run", "-n", "job", "--", "true"]).await.expect(0);
}

#[tokio::test]
async fn renew_prolongs_and_never_shortens() {
    let db = empty().await;
    let printed = acquire(&db, &["--ttl", "60s"]).await;
    let (locks, token) = (beside(&db).await, token(&printed));
    let before = held(&locks, "job").await.expect("held");

    let ended = run(&db, &["renew", "job", "--token", &token, "--ttl", "1h"]).await.expect(0);
    let renewed = object(&ended);
    let keys: Vec<&String> = renewed.as_object().expect("an object").keys().collect();
    assert_eq!(keys, ["expires_at", "name", "owner", "token"]);
    assert_eq!((&renewed["token"], &renewed["owner"]), (&printed["token"], &printed["owner"]));
    let after = held(&locks, "job").await.expect("held");
    assert!(after.remaining > Duration::from_secs(3500), "{:?}", after.remaining);
    assert_eq!(expires_at(&renewed), after.expires_at.timestamp_millis());
    assert_eq!((after.token, after.acquired_at, after.holds), (before.token, before.acquired_at, 1));

    run(&db, &["renew", "job", "--token", &token, "--ttl", "5s"]).await.expect(0);
    assert_eq!(held(&locks, "job").await.expect("held").expires_at, after.expires_at, "not shortened");
}

#[tokio::test]
async fn renew_does_not_shorten_a_running_lease() {
    let db = empty().await;
    let script = "echo $SQLOCK_TOKEN; exec sleep 600";
    let mut holder = Running::start(sqlock(&db, &["run", "--ttl", "1h", "job", "--", "sh", "-c", script]));
    let token = holder.prints("").await;
    let locks = beside(&db).await;
    let before = held(&locks, "job").await.expect("held");
    run(&db, &["renew", "job", "--token", token.trim(), "--ttl", "5s"]).await.expect(0);
    let after = held(&locks, "job").await.expect("held");
    // Its heartbeat moves the end, too.
    assert!(after.expires_at >= before.expires_at && after.holds == 1, "{before:?}, {after:?}");
    // The holder continues as before.
    holder.signal(rustix::process::Signal::TERM);
    holder.end().await.expect(143);
    assert_eq!(held(&locks, "job").await, None);
}

#[tokio::test]
async fn release_grants_the_name_to_next_waiter() {
    let db = empty().await;
    let first = token(&acquire(&db, &[]).await);
    let mut next = Running::start(sqlock(&db, &["run", "job", "--", "sh", "-c", "echo $SQLOCK_TOKEN"]));
    next.says("waiting for \"job\"").await;
    let ended = run(&db, &["release", "job", "--token", &first]).await.expect(0);
    assert_eq!((&*ended.stdout, &*ended.stderr), ("", ""));
    let second: i64 = next.end().await.expect(0).stdout.trim().parse().expect("a token");
    assert!(second > first.parse().expect("a token"));
    run(&db, &["release", "job", "--token", &first]).await.expect(79);
    run(&db, &["renew", "job", "--token", &first]).await.expect(79);
}

#[tokio::test]
async fn stale_token_renews_and_releases_nothing() {
    let db = empty().await;
    let old = token(&acquire(&db, &[]).await);
    run(&db, &["release", "job", "--token", &old]).await.expect(0);
    let new = token(&acquire(&db, &["--ttl", "60s"]).await);
    let locks = beside(&db).await;
    let before = held(&locks, "job").await.expect("held");
    for verb in ["renew", "release", "unlock"] {
        let ended = run(&db, &[verb, "job", "--token", &old]).await.expect(79);
        assert_eq!(ended.stdout, "");
        assert!(ended.stderr.contains(&new), "{verb} names the token that holds it: {}", ended.stderr);
    }
    let after = held(&locks, "job").await.expect("held");
    assert_eq!((after.token, after.expires_at), (before.token, before.expires_at));
}

#[tokio::test]
async fn acquire_with_unwritable_output_holds_nothing() {
    let db = empty().await;
    let mut closed = sqlock(&db, &["acquire", "job"]);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    closed.stdout(writer);
    let mut full = sqlock(&db, &["acquire", "job"]);
    full.stdout(File::create("/dev/full").expect("/dev/full"));
    let locks = beside(&db).await;
    for (mut command, code) in [(closed, 141), (full, 74)] {
        command.stderr(std::process::Stdio::null());
        let status = soon("the end of sqlock", command.status()).await.expect("sqlock can be started");
        assert_eq!(status.code(), Some(code));
        assert_eq!(held(&locks, "job").await, None);
    }
}

#[tokio::test]
async fn acquire_waits_unless_limited_by_option() {
    let db = empty().await;
    let first = token(&acquire(&db, &["--ttl", "10m"]).await);
    let ended = run(&db, &["acquire", "-n", "job"]).await.expect(75);
    assert_eq!(ended.stdout, "");
    assert!(ended.stderr.contains("\"job\" not obtained: held by"), "{}", ended.stderr);
    let ended = run(&db, &["acquire", "-w", "5s", "job"]).await.expect(75);
    assert_eq!(ended.stdout, "");
    assert!(ended.stderr.contains("\"job\" not obtained within 5s: held by"), "{}", ended.stderr);

    let mut waiter = Running::start(sqlock(&db, &["acquire", "-w", "10m", "job"]));
    waiter.says("waiting for \"job\"").await;
    run(&db, &["release", "job", "--token", &first]).await.expect(0);
    let second = object(&waiter.end().await.expect(0));
    assert_eq!(second["token"], held(&beside(&db).await, "job").await.expect("held").token.get());
}

#[tokio::test]
async fn acquire_inside_run_of_same_name_reenters() {
    let db = empty().await;
    let script = "\"$SQLOCK\" acquire -n --ttl 10m job && \"$SQLOCK\" acquire -n other";
    let mut command = sqlock(&db, &["run", "job", "--", "sh", "-c", script]);
    command.env("SQLOCK", program());
    let ended = end(command).await.expect(0);
    let printed: Vec<Value> = ended.stdout.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let [job, other] = printed.as_slice() else { panic!("{}", ended.stdout) };
    // The lease was acquired to outlast the step that acquired it, and here also the run around it.
    let locks = beside(&db).await;
    let info = held(&locks, "job").await.expect("still held");
    assert_eq!((info.token.get(), info.holds), (job["token"].as_i64().expect("a number"), 1));
    assert_ne!(job["owner"], other["owner"], "another name is no reason to share an owner");
    run(&db, &["release", "job", "--token", &token(job)]).await.expect(0);
    assert_eq!(held(&locks, "job").await, None);
    let still = held(&locks, "other").await.expect("held");
    assert_eq!(Some(still.token), other["token"].as_i64().and_then(FencingToken::new));
}
