//! `sqlock unlock --ask`, and the reaction of `sqlock run`.

use sqlock::Locks;

use crate::support::command::{beside, held, run};
use crate::support::command_fixture::CommandFixture;
use crate::support::{LONG, empty, soon, until};

/// A command that ends after an order.
const OBEDIENT: &str = r#"echo up >&3; read go <"$ORDERS""#;

/// A command that reports SIGTERM and ends.
const TRAPPING: &str = r#"trap 'echo TERM >&3; exit 7' TERM; echo up >&3; while :; do sleep 0.05; done"#;

/// Waits until the client that holds a name has sent a heartbeat.
async fn until_heartbeat(locks: &Locks, name: &str) {
    let is_sent = async || held(locks, name).await.is_some_and(|held| held.heartbeat_age.is_some());
    until("a heartbeat", is_sent).await;
}

#[tokio::test]
async fn unlock_ask_informs_holders_and_takes_nothing() {
    let db = empty().await;
    let locks = beside(&db).await;
    let lease = locks.lease("job").ttl(LONG).acquire().await.expect("acquire");
    until_heartbeat(&locks, "job").await;
    let ended = run(&db, &["unlock", "job", "--ask"]).await.expect(0);
    assert_eq!((&*ended.stdout, &*ended.stderr), ("", "sqlock: asked 1 holder to release \"job\"\n"));
    soon("the request", lease.revoke_requested()).await;
    assert_eq!(held(&locks, "job").await.expect("held").token, lease.token());
    let _second = locks.lease("files").ttl(LONG).shared().acquire().await.expect("acquire");
    let _third = locks.lease("files").ttl(LONG).shared().acquire().await.expect("acquire");
    until_heartbeat(&locks, "files").await;
    let ended = run(&db, &["unlock", "--ask", "files"]).await.expect(0);
    assert_eq!(ended.stderr, "sqlock: asked 2 holders to release \"files\"\n");
}

#[tokio::test]
async fn unlock_ask_names_holders_without_renewal() {
    let db = empty().await;
    let locks = beside(&db).await;
    run(&db, &["acquire", "job"]).await.expect(0);
    let ended = run(&db, &["unlock", "job", "--ask"]).await.expect(0);
    let unaware = "may not learn of it without a heartbeat: a lease of \"sqlock acquire\" sends none";
    assert_eq!(ended.stderr, format!("sqlock: asked 1 holder to release \"job\"; it {unaware}\n"));
    let _renewed = locks.lease("files").ttl(LONG).shared().acquire().await.expect("acquire");
    until_heartbeat(&locks, "files").await;
    run(&db, &["acquire", "--shared", "files"]).await.expect(0);
    let ended = run(&db, &["unlock", "--ask", "files"]).await.expect(0);
    assert_eq!(ended.stderr, format!("sqlock: asked 2 holders to release \"files\"; 1 of them {unaware}\n"));
}

#[tokio::test]
async fn unlock_ask_fails_when_nobody_holds() {
    let db = empty().await;
    let locks = beside(&db).await;
    let lease = locks.lease("job").hold_at_least(LONG).label("nightly").acquire().await.expect("acquire");
    lease.release().await.expect("release");
    let ended = run(&db, &["unlock", "job", "--ask"]).await.expect(79);
    assert!(ended.stderr.contains("\"job\" has no holder: it is released by"), "{}", ended.stderr);
    let ended = run(&db, &["unlock", "free", "--ask"]).await.expect(79);
    assert!(ended.stderr.contains("\"free\" has no holder: it is free"), "{}", ended.stderr);
    let ended = run(&db, &["unlock", "job"]).await.expect(64);
    assert!(ended.stderr.contains("<--token <N>|--ask>"), "{}", ended.stderr);
    run(&db, &["unlock", "job", "--quorum"]).await.expect(64);
    run(&db, &["unlock", "job", "--ask", "--token", "1"]).await.expect(64);
}

#[tokio::test]
async fn request_ends_command_when_run_allows_it() {
    let fixture = CommandFixture::new().await;
    let mut holder = fixture.start(&["--release-on-request", "a"], TRAPPING).up().await;
    run(&fixture.db, &["unlock", "a", "--ask"]).await.expect(0);
    assert_eq!(holder.report.line().await, "TERM");
    let ended = holder.end().await.expect(7);
    assert!(ended.stderr.contains("release requested: \"a\"; stopping the command"), "{}", ended.stderr);
    assert!(fixture.is_free("a").await);
}

#[tokio::test]
async fn request_sends_the_chosen_signal() {
    let fixture = CommandFixture::new().await;
    let script = TRAPPING.replace("TERM", "USR1");
    let mut holder = fixture.start(&["--release-on-request", "--signal", "USR1", "a"], &script).up().await;
    run(&fixture.db, &["unlock", "a", "--ask"]).await.expect(0);
    assert_eq!(holder.report.line().await, "USR1");
    holder.end().await.expect(7);
}

#[tokio::test]
async fn request_only_prints_note_by_default() {
    let fixture = CommandFixture::new().await;
    let holder = fixture.start(&["a"], OBEDIENT).up().await;
    run(&fixture.db, &["unlock", "a", "--ask"]).await.expect(0);
    holder.stderr.shows("release requested: \"a\"; the command goes on").await;
    assert!(!fixture.is_free("a").await);
    holder.order("go");
    // A signal would have killed it.
    holder.end().await.expect(0);
}
