//! The table of rules in the documentation of `sqlock::idempotency::http`: one test for each row,
//! by its name.

use super::*;

const KEY: (&str, &str) = ("X-User", "alice");

async fn stripe() -> (Counters, Server) {
    shop_with(|payments| IdempotencyLayer::stripe_v1(payments, user).response_limit(1000)).await
}

async fn post_lines(server: &Server, lines: &[&str]) -> TestResponse {
    let headers: Vec<_> = [KEY].into_iter().chain(lines.iter().map(|line| ("Idempotency-Key", *line))).collect();
    server.send("POST", "/charge/receipt", &headers, "500").await
}

#[tokio::test]
async fn draft_key_is_a_string_item() {
    let (_books, server) = shop().await;
    assert_eq!(post_lines(&server, &["\"8e03978e\";v=1"]).await.status, 201);
    assert!(post_lines(&server, &["\"8e03978e\""]).await.is_replay());
    for lines in [&["\"a\", \"b\""][..], &["\"a"], &["(\"a\")\"b\""], &["\"a\"", "\"a\""]] {
        post_lines(&server, lines).await.is(400, "key-malformed");
    }
    // An addition to the draft: the same key without quotes.
    assert!(post_lines(&server, &["8e03978e"]).await.is_replay());
}

#[tokio::test]
async fn draft_key_expires_as_published() {
    let (counters, server) = shop_with(|payments| usual(payments.retention(Duration::from_secs(3600)))).await;
    assert_eq!(server.post("/charge/receipt", "a").await.status, 201);
    let record = server.payments.inspect(&alice("a")).await.expect("inspect").expect("a record");
    assert_eq!((record.expires_at - record.created_at).num_minutes(), 60);
    run(&counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    assert!(!server.post("/charge/receipt", "a").await.is_replay());
}

#[tokio::test]
async fn draft_fingerprint_is_compared() {
    let (_books, server) = shop().await;
    assert_eq!(server.post("/charge/receipt", "a").await.status, 201);
    server.post_as("alice", "/charge/receipt", "a", "501").await.is(422, "key-reused");
    server.post("/charge/receipt?x=1", "a").await.is(422, "key-reused");
}

#[tokio::test]
async fn draft_completed_request_is_replayed() {
    let (counters, server) = shop().await;
    let first = server.post("/charge/receipt", "a").await;
    let again = server.post("/charge/receipt", "a").await;
    assert_eq!(
        again.replayed_parts(&["content-type", "location"]),
        first.replayed_parts(&["content-type", "location"])
    );
    assert!(again.is_replay());
    assert_eq!(counters.value(1).await, 1);
}

/// Not met: the draft replays errors as well. Here an error means that nothing took effect.
#[tokio::test]
async fn draft_error_is_not_replayed() {
    let (_books, server) = shop().await;
    assert_eq!(server.post("/charge/declined", "a").await.status, 402);
    assert_eq!(server.post("/charge/receipt", "a").await.status, 201);
}

#[tokio::test]
async fn draft_concurrent_request_is_a_conflict() {
    let (_books, server) = shop().await;
    let headers = [KEY, ("Idempotency-Key", "a")];
    let mut first = server.begin("POST", "/charge/wait", &headers, "500").await;
    soon("the first one", server.state.inside.notified()).await;
    server.post("/charge/wait", "a").await.is(409, "in-progress");
    server.state.go_on.notify_one();
    assert_eq!(read_response(&mut first).await.status, 200);
}

#[tokio::test]
async fn draft_missing_key_is_a_bad_request() {
    let (_books, server) = shop().await;
    server.send("POST", "/charge/receipt", &[KEY], "500").await.is(400, "key-missing");
    assert_eq!(server.begun(), 0);
}

#[tokio::test]
async fn draft_key_counts_with_its_client() {
    let (counters, server) = shop().await;
    for user in ["alice", "bob"] {
        assert!(!server.post_as(user, "/charge/receipt", "a", "500").await.is_replay(), "{user}");
    }
    server.send("POST", "/charge/receipt", &[("Idempotency-Key", "a")], "500").await.is(401, "principal-missing");
    assert_eq!(counters.value(1).await, 2);
}

#[tokio::test]
async fn stripe_result_is_saved_whatever_its_status() {
    let (_books, server) = stripe().await;
    for (path, status) in [("/charge/receipt", 201), ("/charge/declined", 402), ("/charge/timeout", 502)] {
        for is_replay in [false, true] {
            let answer = server.post(path, path).await;
            assert_eq!((answer.status, answer.is_replay()), (status, is_replay));
        }
    }
}

/// It is the layer's answer, not that of the handler, whose effect was rolled back.
#[tokio::test]
async fn stripe_rules_do_not_save_unsavable_results() {
    let (_books, server) = stripe().await;
    for path in ["/charge/stream", "/charge/large"] {
        for _ in 0..2 {
            let answer = server.post(path, path).await;
            assert_eq!((answer.status, answer.is_replay()), (500, false), "{path}");
        }
    }
    assert_eq!(server.begun(), 4);
}

#[tokio::test]
async fn stripe_keys_have_up_to_255_characters() {
    let (_books, server) = stripe().await;
    assert_eq!(server.post("/charge/receipt", &"k".repeat(255)).await.status, 201);
    server.post("/charge/receipt", &"k".repeat(256)).await.is(400, "key-malformed");
}

#[tokio::test]
async fn stripe_keys_are_kept_for_a_day() {
    let (counters, server) =
        shop_with(|payments| IdempotencyLayer::stripe_v1(payments.retention(Duration::from_secs(1)), user)).await;
    assert_eq!(server.post("/charge/receipt", "a").await.status, 201);
    let record = server.payments.inspect(&alice("a")).await.expect("inspect").expect("a record");
    assert_eq!((record.expires_at - record.created_at).num_hours(), 24);
    run(&counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    assert!(!server.post("/charge/receipt", "a").await.is_replay(), "a reused key is new after that");
}

#[tokio::test]
async fn stripe_other_parameters_are_an_error() {
    let (_books, server) = stripe().await;
    assert_eq!(server.post("/charge/receipt", "a").await.status, 201);
    server.post_as("alice", "/charge/receipt", "a", "501").await.is(400, "key-reused");
}

#[tokio::test]
async fn stripe_result_before_the_work_is_not_saved() {
    let (_books, server) = shop_with(|payments| IdempotencyLayer::stripe_v1(payments, user).request_limit(10)).await;
    server.post_as("alice", "/charge/receipt", "a", "more than ten").await.is(413, "request-too-large");
    assert!(is_new(&server, "a").await);
    let headers = [KEY, ("Idempotency-Key", "b")];
    let mut first = server.begin("POST", "/charge/wait", &headers, "500").await;
    soon("the first one", server.state.inside.notified()).await;
    server.post("/charge/wait", "b").await.is(409, "in-progress");
    server.state.go_on.notify_one();
    assert_eq!(read_response(&mut first).await.status, 200);
    assert!(server.post("/charge/wait", "b").await.is_replay(), "the conflict was not saved");
}

#[tokio::test]
async fn stripe_keys_have_no_effect_on_other_methods() {
    let (_books, server) = stripe().await;
    for key in ["a", "not a key"] {
        let answer = server.send("GET", "/maybe/receipt", &[KEY, ("Idempotency-Key", key)], "").await;
        assert_eq!(answer.text(), "without a key");
    }
    assert_eq!(server.send("POST", "/maybe/receipt", &[KEY, ("Idempotency-Key", "a")], "").await.status, 201);
}
