//! Layers of tower-http around this layer, and inside it.

use tower_http::compression::CompressionLayer;
use tower_http::compression::predicate::SizeAbove;
use tower_http::timeout::TimeoutLayer;

use super::*;

/// The four positions of a layer: around the handlers in a transaction and under a lease, outside
/// and inside.
async fn sandwiched(counters: &Counters, add: impl Fn(Router<AppState>) -> Router<AppState>) -> Server {
    let (locks, pool) = (counters.db.locks().await, counters.db.pool().await);
    let plain = || Router::new().route("/charge/{what}", post(charge)).route("/provider/{what}", post(provider));
    let leased = || Router::new().route("/layered/{what}", post(layered));
    Server::routed(locks, pool, |payments| {
        let layer = || IdempotencyLayer::new(payments.clone(), user);
        let outside = plain().layer(layer()).merge(leased().layer(layer().leased()));
        let inside = add(plain()).layer(layer()).merge(add(leased()).layer(layer().leased()));
        Router::new().nest("/outside", add(outside)).nest("/inside", inside)
    })
    .await
}

const GZIP: (&str, &str) = ("Accept-Encoding", "gzip");

#[tokio::test]
async fn compressed_answers_are_stored_and_replayed() {
    let counters = counters().await;
    let compress = |router: Router<AppState>| router.layer(CompressionLayer::new().compress_when(SizeAbove::new(0)));
    let server = sandwiched(&counters, compress).await;
    for place in ["/outside", "/inside"] {
        for mode in ["charge", "provider", "layered"] {
            let path = format!("{place}/{mode}/large");
            let headers = [("X-User", "alice"), ("Idempotency-Key", &path), GZIP];
            let first = server.send("POST", &path, &headers, "500").await;
            assert_eq!((first.status, first.header("content-encoding")), (200, Some("gzip")), "{path}");
            let again = server.send("POST", &path, &headers, "500").await;
            assert!(again.is_replay(), "{path}");
            assert_eq!(again.header("content-encoding"), Some("gzip"), "{path}");
            assert!(again.header("vary").is_some(), "{path}");
            // A leased layer stores the answer as changed by the layers inside.
            let plain = server.send("POST", &path, &headers[..2], "500").await;
            assert!(plain.is_replay(), "{path}");
            assert_eq!(plain.header("content-encoding").is_none(), path != "/inside/layered/large", "{path}");
        }
    }
    assert_eq!(server.begun(), 6);
}

/// The answer to a request in time, from a process that waits for its handlers.
async fn next_answer(counters: &Counters, path: &str) -> (u16, bool, u32) {
    let patient = sandwiched(counters, |router| router).await;
    patient.state.go_on.notify_one();
    let answer = soon("the next one", until_not_in_progress(&patient, path, path)).await;
    (answer.status, answer.is_replay(), patient.begun())
}

fn limit(router: Router<AppState>) -> Router<AppState> {
    router.layer(TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_millis(500)))
}

#[tokio::test]
async fn timeout_outside_leaves_the_key_to_the_next() {
    let counters = counters().await;
    for path in ["/outside/charge/wait", "/outside/provider/wait", "/outside/layered/wait"] {
        let server = sandwiched(&counters, limit).await;
        assert_eq!(server.post(path, path).await.status, 408, "{path}");
        assert_eq!(next_answer(&counters, path).await, (200, false, 1), "{path}");
    }
    assert_eq!(counters.value(1).await, 1);
}

#[tokio::test]
async fn timeout_inside_is_unknown_to_a_leased_layer() {
    let counters = counters().await;
    // The handler is dropped, with its transaction or its attempt.
    for path in ["/inside/charge/wait", "/inside/provider/wait"] {
        let server = sandwiched(&counters, limit).await;
        assert_eq!(server.post(path, path).await.status, 408, "{path}");
        assert_eq!(next_answer(&counters, path).await, (200, false, 1), "{path}");
    }
    assert_eq!(counters.value(1).await, 1);
    // The layer sees the status alone, and the provider may have charged.
    let server = sandwiched(&counters, limit).await;
    assert_eq!(server.post("/inside/layered/wait", "a").await.status, 408);
    server.post("/inside/layered/wait", "a").await.is(409, "outcome-unknown");
}
