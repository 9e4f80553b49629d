//! Requests whose effect runs under a lease, outside of the transaction.

use super::*;

#[tokio::test]
async fn leased_handler_is_not_polled_after_deadline() {
    for path in ["/provider/block", "/layered/block", "/provider/block-in-body", "/layered/block-in-body"] {
        let (_books, server) = shop().await;
        server.post(path, "a").await.is(409, "in-progress");
        assert_eq!(server.state.polls.load(Ordering::SeqCst), 2, "{path}");
    }
}

#[tokio::test]
async fn leased_answer_decides_the_state_of_key() {
    for mode in ["provider", "layered"] {
        let (_books, server) = shop().await;
        let path = |what| format!("/{mode}/{what}");
        let calls = || server.state.provider.lock().expect("no panic").clone();
        let first = server.post(&path("receipt"), "done").await;
        assert_eq!((first.status, first.text().as_str()), (201, "receipt 1"));
        let replay = server.post(&path("receipt"), "done").await;
        assert!(replay.is_replay());
        assert_eq!(replay.replayed_parts(&["link", "location"]), first.replayed_parts(&["link", "location"]));
        server.post_as("alice", &path("receipt"), "done", "501").await.is(422, "key-reused");
        assert_eq!(calls().len(), 1);

        // A refusal leaves no record to resume, and the key is new, also for another request.
        for cents in ["500", "500", "501"] {
            assert_eq!(server.post_as("alice", &path("declined"), "refused", cents).await.status, 402);
            assert_eq!(calls().last().map(|(_, number)| *number), Some(1));
            assert!(is_new(&server, "refused").await);
        }
        for _ in 0..2 {
            assert_eq!(server.post(&path("nothing"), "nothing").await.status, 418);
            assert_eq!(calls().last().map(|(_, number)| *number), Some(1));
            assert!(is_new(&server, "nothing").await);
        }
        let before = calls().len();
        for (what, status) in [("timeout", 502), ("large", 500), ("stream", 500)] {
            assert_eq!(server.post(&path(what), what).await.status, status);
            server.post(&path(what), what).await.is(409, "outcome-unknown");
            let kept = server.payments.inspect(&alice(what)).await.expect("inspect").expect("it is kept");
            assert_eq!(kept.state, RecordState::Unknown);
        }
        assert_eq!(calls().len(), before + 3);

        // The response of a resumed request is replayed as any other.
        let layer = usual(server.payments.clone());
        let resumed =
            layer.resume(async |attempt: &Attempt| Ok::<_, AppError>((StatusCode::CREATED, attempt.key().to_owned())));
        let resumed = soon("the resumption", resumed).await.expect("resume");
        assert_eq!((resumed.done, resumed.failed), (3, 0), "{resumed:?}");
        for what in ["timeout", "large", "stream"] {
            let replay = server.post(&path(what), what).await;
            assert_eq!((replay.status, replay.is_replay(), replay.text().as_str()), (201, true, what));
        }
    }
}

#[tokio::test]
async fn answer_that_cannot_be_opened_is_500() {
    let (counters, server) = shop_with(|payments| {
        let mirror = |_: &[u8], bytes: &[u8]| Ok::<_, String>(bytes.iter().map(|byte| !byte).collect());
        usual(payments.seal(mirror, mirror))
    })
    .await;
    for path in ["/charge/receipt", "/provider/receipt", "/layered/receipt"] {
        assert_eq!(server.post(path, path).await.status, 201);
        assert!(server.post(path, path).await.is_replay());
    }
    let without = Server::on(&counters.db, usual).await;
    for path in ["/charge/receipt", "/provider/receipt", "/layered/receipt"] {
        without.post(path, path).await.is(500, "not-set-up");
    }
    assert_eq!((without.begun(), counters.value(1).await), (0, 1));
}

#[tokio::test]
async fn stored_body_reaches_the_resumed_attempt() {
    let (counters, server) = shop_with(|payments| usual(payments.request_limit(1)).store_request()).await;
    for (mode, body) in [("provider", "500"), ("layered", "\0{5")] {
        assert_eq!(server.post_as("alice", &format!("/{mode}/timeout"), mode, body).await.status, 502);
    }
    let layer = usual(server.payments.clone());
    let work = async |attempt: &Attempt| Ok::<_, AppError>(attempt.request().expect("the body").to_vec());
    assert_eq!(soon("the resumption", layer.resume(work)).await.expect("resume").done, 2);
    for (mode, body) in [("provider", "500"), ("layered", "\0{5")] {
        let replay = server.post_as("alice", &format!("/{mode}/timeout"), mode, body).await;
        assert_eq!((replay.is_replay(), replay.text().as_str()), (true, body));
    }
    // Requests that an application stores itself keep the limit of the store.
    let own = |_: &Parts, body: &Bytes| Fingerprint::of([body]).with_request("a\nb");
    let own =
        Server::on(&counters.db, |payments| usual(payments.request_limit(2)).store_request().fingerprint(own)).await;
    own.post("/provider/receipt", "own").await.is(413, "request-too-large");
    assert_eq!(own.begun(), 0);
}

/// A timeout layer inside, or a provider's answer that is passed on, says nothing about the charge.
#[tokio::test]
async fn leased_ambiguous_statuses_are_unknown() {
    for mode in ["provider", "layered"] {
        let (_books, server) = shop().await;
        for status in [408, 409, 423, 425, 429, 499, 500, 502, 503, 504] {
            let (path, key) = (format!("/{mode}/{status}"), status.to_string());
            assert_eq!(server.post(&path, &key).await.status, status);
            server.post(&path, &key).await.is(409, "outcome-unknown");
        }
        assert_eq!(server.begun(), 10, "{mode}: each was called once");
    }
}

/// A stored record is forgotten after its retention, so it must not hold a doubtful outcome.
#[tokio::test]
async fn stripe_v1_keeps_leased_failures_as_unknown() {
    for mode in ["provider", "layered"] {
        let stripe = |payments| IdempotencyLayer::stripe_v1(payments, user);
        let (_books, server) = shop_with(stripe).await;
        for status in [408, 409, 418, 429, 500, 504] {
            let (path, key) = (format!("/{mode}/{status}"), status.to_string());
            assert_eq!(server.post(&path, &key).await.status, status);
            server.post(&path, &key).await.is(409, "outcome-unknown");
        }
        assert_eq!(server.payments.unfinished(10).await.expect("list").len(), 6, "{mode}");
        for (what, status) in [("402", 402), ("receipt", 201)] {
            let path = format!("/{mode}/{what}");
            for is_replay in [false, true] {
                let reply = server.post(&path, what).await;
                assert_eq!((reply.status, reply.is_replay()), (status, is_replay), "{path}");
            }
        }
        assert_eq!(server.begun(), 8, "{mode}: each was called once");
        let again = stripe(server.payments.clone());
        let late = again.resume(async |_: &Attempt| Ok::<_, AppError>(StatusCode::GATEWAY_TIMEOUT)).await;
        assert_eq!(late.expect("resume").failed, 6, "{mode}");
        let refused = again.resume(async |_: &Attempt| Ok::<_, AppError>(StatusCode::PAYMENT_REQUIRED)).await;
        assert_eq!(refused.expect("resume").done, 6, "{mode}");
    }
}

/// The provider was called, so neither the client nor the log may hear that nothing was done.
#[tokio::test]
async fn leased_work_without_recorded_outcome_is_unknown() {
    for mode in ["provider", "layered"] {
        let (log, _guard) = Log::capture();
        let (counters, server) = shop().await;
        refuse_results(&counters.pool).await;
        let path = format!("/{mode}/receipt");
        server.post(&path, "a").await.is(409, "outcome-unknown");
        let lines = log.messages(Level::WARN);
        let about: Vec<_> = lines.iter().filter(|line| line.contains("idempotency key")).collect();
        assert_eq!(about, ["a request with an idempotency key was run, and its outcome could not be recorded"]);
        server.post(&path, "a").await.is(409, "outcome-unknown");
        assert_eq!(server.begun(), 1, "{mode}");
    }
}

#[tokio::test]
async fn request_resolved_as_done_is_answered_without_content() {
    let (_books, server) = shop().await;
    assert_eq!(server.post("/provider/timeout", "a").await.status, 502);
    let record = server.payments.inspect(&alice("a")).await.expect("inspect").expect("a record");
    let done = Resolution::done(&()).expect("JSON").by("ann");
    assert!(server.payments.resolve(&alice("a"), record.token.expect("a token"), done).await.expect("resolve"));
    let reply = until_not_in_progress(&server, "/provider/timeout", "a").await;
    assert_eq!((reply.status, reply.is_replay(), reply.text().as_str()), (204, true, ""));
}

#[tokio::test]
async fn under_a_lease_named_refusals_free_the_key() {
    let (_books, server) = shop().await;
    for status in [400, 401, 402, 403, 404, 405, 406, 410, 411, 412, 413, 414, 415, 416, 417, 422, 428, 431] {
        let (path, key) = (format!("/provider/{status}"), status.to_string());
        for _ in 0..2 {
            assert_eq!(server.post(&path, &key).await.status, status);
            assert!(is_new(&server, &key).await, "{status}");
        }
    }
    let teapots = |payments| usual(payments).refusals([StatusCode::IM_A_TEAPOT]).expect("a refusal");
    let (_books, server) = shop_with(teapots).await;
    assert_eq!(server.post("/provider/418", "a").await.status, 418);
    assert!(is_new(&server, "a").await);
    assert_eq!(server.post("/provider/402", "b").await.status, 402);
    server.post("/provider/402", "b").await.is(409, "outcome-unknown");
}

/// A handler that answers with the status of a refusal after an effect cannot free the key.
#[tokio::test]
async fn refusal_after_possible_effect_is_unknown() {
    for mode in ["provider", "layered"] {
        let (_books, server) = shop().await;
        for what in ["charge-unsaved", "charge-dropped", "incomplete"] {
            let path = format!("/{mode}/{what}");
            assert_eq!(server.post(&path, what).await.status, 402, "{path}");
            server.post(&path, what).await.is(409, "outcome-unknown");
        }
        assert_eq!(server.post(&format!("/{mode}/charge-declined"), "a").await.status, 402);
        assert!(is_new(&server, "a").await, "{mode}");
    }
}

#[tokio::test]
async fn ambiguous_statuses_cannot_be_named_as_refusals() {
    let (_books, server) = shop().await;
    for status in [100, 200, 303, 408, 409, 425, 429, 499, 500, 503] {
        let named = [StatusCode::NOT_FOUND, StatusCode::from_u16(status).expect("a status")];
        let refused = usual(server.payments.clone()).refusals(named);
        assert!(matches!(refused, Err(Error::NoRefusal { status: reply }) if reply == status), "{status}");
    }
}
