//! Unknown outcomes: resumed, listed, resolved by an operator.

use super::*;

#[tokio::test]
async fn unknown_outcome_stays_until_resumed_or_resolved() {
    let app = app().await;
    let fail = async |_: &Attempt| Err::<i64, _>(AppError::Declined);
    let failed = app.payments.run_leased(&alice("a"), &request(), fail).await;
    assert!(matches!(failed, Err(AppError::Declined)));
    for by in [&app.payments, &app.other().await] {
        let reply = by.run_leased(&alice("a"), &request(), fail).await.expect("run");
        assert_eq!(reply, Outcome::Unknown);
        assert!(matches!(by.attempt(&alice("a"), &another()).await.expect("attempt"), Outcome::Mismatch));
    }
    let kept = app.payments.unfinished(10).await.expect("list");
    assert_eq!(
        kept.iter().map(|info| (info.key.as_str(), info.state.as_str())).collect::<Vec<_>>(),
        [("a", "unknown")]
    );
    // An unknown outcome does not expire.
    run(&app.counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    app.locks.sweeper().sweep().await.expect("sweep");
    assert_eq!(state(&app, "a").await, Some(("unknown", 1)));
    let resumed = app.payments.resume(async |_: &Attempt| Err::<i64, _>(AppError::Declined)).await.expect("resume");
    assert_eq!((resumed.done, resumed.failed, resumed.in_progress), (0, 1, 0));
    assert_eq!(state(&app, "a").await, Some(("unknown", 2)));
    let resumed =
        app.payments.resume(async |attempt: &Attempt| Ok::<_, AppError>(attempt.number())).await.expect("resume");
    assert_eq!((resumed.done, resumed.failed), (1, 0));
    assert_eq!(state(&app, "a").await, Some(("done", 3)));

    // An operator knows that nothing happened.
    let failed = app.payments.run_leased(&alice("b"), &request(), fail).await;
    assert!(matches!(failed, Err(AppError::Declined)));
    let info = app.payments.inspect(&alice("b")).await.expect("inspect").expect("a record");
    let token = info.token.expect("a token");
    let other = FencingToken::new(token.get() - 1).expect("positive");
    assert!(!app.resolve(&alice("b"), other, Resolution::failed()).await, "another attempt");
    assert!(app.resolve(&alice("b"), token, Resolution::failed()).await);
    assert!(!app.resolve(&alice("b"), token, Resolution::failed()).await, "there is nothing any more");
    let reply = app.payments.run_leased(&alice("b"), &request(), async |_| Ok::<_, AppError>(1)).await.expect("run");
    assert_eq!(reply, Outcome::New(1));
    let done = app.payments.inspect(&alice("b")).await.expect("inspect").expect("a record").token.expect("a token");
    assert!(!app.resolve(&alice("b"), done, Resolution::failed()).await, "it has taken effect");
}

#[tokio::test]
async fn unknown_outcome_is_resolved_by_its_token() {
    let app = app().await;
    let done = || Resolution::done("receipt").expect("JSON");
    let by_ann = |outcome, token| (outcome, Some(token), "ann".to_owned(), "in the books".to_owned());
    let replay = async |key: &IdempotencyKey| {
        let again = async |_: &Attempt| Ok::<_, Error>("again".to_owned());
        app.payments.clone().wait(SOON).run_leased(key, &request(), again).await.expect("run")
    };

    let first = app.unknown(&alice("a")).await;
    let newer = FencingToken::new(first.get() + 1).expect("positive");
    assert!(!app.resolve(&alice("a"), newer, done()).await, "another attempt");
    assert!(app.resolutions(&alice("a")).await.is_empty());
    assert!(app.resolve(&alice("a"), first, Resolution::failed()).await);
    assert_eq!(state(&app, "a").await, None);
    assert!(!app.resolve(&alice("a"), first, done()).await, "there is no record");
    // The key is free, even for another request, and the resolution is kept.
    let second = app.unknown(&alice("a")).await;
    assert!(app.resolve(&alice("a"), second, done()).await);
    assert!(!app.resolve(&alice("a"), second, Resolution::failed()).await, "it is done");
    assert_eq!(app.resolutions(&alice("a")).await, [by_ann("failed", first), by_ann("done", second)]);
    assert_eq!(replay(&alice("a")).await, Outcome::Replay("receipt".to_owned()));
    let info = app.payments.inspect(&alice("a")).await.expect("inspect").expect("a record");
    assert!((info.expires_at - info.created_at).num_hours() >= 24, "kept from now on");

    // In progress: its lease is held.
    let working = attempt(app.payments.attempt(&alice("b"), &request()).await).await;
    for resolution in [done(), Resolution::failed()] {
        assert!(!app.resolve(&alice("b"), working.token(), resolution).await);
    }
    working.complete("receipt").await.expect("complete");
    assert!(!app.resolve(&alice("b"), working.token(), Resolution::failed()).await);
    assert!(app.resolutions(&alice("b")).await.is_empty());

    let token = app.payments.issue("alice", Duration::from_secs(600)).await.expect("issue");
    let issued = IdempotencyKey::issued("alice", token);
    let unknown = app.unknown(&issued).await;
    assert!(app.resolve(&issued, unknown, Resolution::failed()).await);
    assert_eq!(replay(&issued).await, Outcome::New("again".to_owned()), "the token is valid again");

    for unnamed in [Resolution::failed(), Resolution::failed().by("ann").note("x".repeat(1001))] {
        let refused = app.payments.resolve(&alice("a"), second, unnamed).await;
        assert!(matches!(refused, Err(Error::InvalidKey { .. })), "{refused:?}");
    }
}

/// The provider's counters show the charge of a process that has died.
#[tokio::test]
async fn dead_attempt_is_resolved_by_its_token() {
    let app = app().await;
    let done = || Resolution::done(&7).expect("JSON");
    let key = alice("a");
    let first = app.died(&key).await;
    let newer = FencingToken::new(first.get() + 1).expect("positive");
    assert!(!app.resolve(&key, newer, done()).await, "another attempt");
    assert_eq!(state(&app, "a").await, Some(("started", 1)));
    assert!(app.resolve(&key, first, Resolution::failed()).await);
    assert_eq!(state(&app, "a").await, None);
    // The letter is dead for resume.
    let second = app.died(&key).await;
    let payments = app.payments.clone().resume_policy(ResumePolicy::new().max_attempts(1));
    assert_eq!(payments.dead_letters(10).await.expect("list").len(), 1);
    assert!(app.resolve(&key, second, done()).await);
    assert!(payments.dead_letters(10).await.expect("list").is_empty());
    let again = app.payments.run_leased(&key, &request(), async |_| Ok::<_, Error>(8)).await;
    assert_eq!(again.expect("run"), Outcome::Replay(7));
    let outcomes: Vec<_> =
        app.resolutions(&key).await.into_iter().map(|(outcome, token, ..)| (outcome, token)).collect();
    assert_eq!(outcomes, [("failed", Some(first)), ("done", Some(second))]);
}

/// The reply to the command is lost: it is repeated, and finds its own resolution.
#[tokio::test]
async fn resolution_whose_reply_was_lost_is_recorded_once() {
    if DATABASE == Database::Sqlite {
        return; // There is no network between.
    }
    let app = app().await;
    let (proxy, url) = behind_a_reading_proxy(&app.counters.db.url);
    let locks = builder(connect(&url, 2).await).build();
    let far = Idempotency::new(&locks).namespace("payments");
    let done = Resolution::done(&7).expect("JSON");
    for (name, resolution, left) in [("a", done, Some(("done", 1))), ("b", Resolution::failed(), None)] {
        let key = alice(name);
        let token = app.unknown(&key).await;
        proxy.cut_reply_to("COMMIT");
        assert!(soon("the resolution", far.resolve(&key, token, resolution.by("ann"))).await.expect("resolve"));
        assert_eq!(app.resolutions(&key).await.len(), 1);
        assert_eq!(state(&app, name).await, left);
    }
}

/// The resolution cannot be stored, as for a user without the right to write it.
#[tokio::test]
async fn unrecorded_resolution_changes_no_record() {
    let app = app().await;
    let token = app.unknown(&alice("a")).await;
    run(&app.counters.pool, "ALTER TABLE sqlock_idem_resolution RENAME TO elsewhere").await;
    for resolution in [Resolution::failed(), Resolution::done(&7).expect("JSON")] {
        let resolved = app.payments.resolve(&alice("a"), token, resolution.by("ann")).await;
        assert!(resolved.is_err(), "{resolved:?}");
        assert_eq!(state(&app, "a").await, Some(("unknown", 1)));
    }
}

#[tokio::test]
async fn lists_compare_namespaces_byte_by_byte() {
    let app = app().await;
    app.unknown(&alice("a")).await;
    let padded = app.payments.clone().namespace("payments ");
    assert_eq!(padded.unfinished(10).await.expect("list"), []);
    assert_eq!(app.payments.unfinished(10).await.expect("list").len(), 1);
}

#[tokio::test]
async fn resume_continues_after_panic_and_error() {
    let app = app().await;
    for key in ["panics", "fails", "b", "c"] {
        app.unknown(&alice(key)).await;
    }
    let one_by_one = app.payments.clone().resume_policy(ResumePolicy::new().parallel(1));
    let work = async |attempt: &Attempt| match attempt.key() {
        "panics" => panic!("this one always panics"),
        "fails" => Err(AppError::Declined),
        _ => Ok(attempt.number()),
    };
    assert_eq!(counts(one_by_one.resume(work).await.expect("resume")), (2, 2, 0));
    for (key, is) in [("panics", "started"), ("fails", "unknown"), ("b", "done"), ("c", "done")] {
        assert_eq!(state(&app, key).await, Some((is, 2)), "{key}");
    }
    // Its lease was released, so the request is resumed again.
    let (mut done, succeed) = (0, async |_: &Attempt| Ok::<_, AppError>(1));
    soon("the resumption", async {
        while done < 2 {
            done += one_by_one.resume(succeed).await.expect("resume").done;
        }
    })
    .await;
}

#[tokio::test]
async fn resume_bounds_parallel_requests() {
    let app = app().await;
    for key in ["a", "b", "c", "d", "e", "f"] {
        app.unknown(&alice(key)).await;
    }
    let three = app.payments.clone().resume_policy(ResumePolicy::new().parallel(3));
    let (together, at_work, most) = (Barrier::new(3), AtomicU32::new(0), AtomicU32::new(0));
    let work = async |_: &Attempt| {
        most.fetch_max(at_work.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        together.wait().await;
        at_work.fetch_sub(1, Ordering::SeqCst);
        Ok::<_, AppError>(1)
    };
    let resumed = soon("three at a time", three.resume(work)).await.expect("resume");
    assert_eq!((counts(resumed), most.into_inner()), ((6, 0, 0), 3));
}

#[tokio::test]
async fn resume_skips_young_and_exhausted_requests() {
    let app = app().await;
    for key in ["old", "young"] {
        app.unknown(&alice(key)).await;
    }
    run(&app.counters.pool, "UPDATE sqlock_idem SET created_at = 1 WHERE request_key = 'old'").await;
    let policy = ResumePolicy::new().min_age(Duration::from_secs(3600)).max_attempts(3);
    let payments = app.payments.clone().resume_policy(policy);
    let fail = async |_: &Attempt| Err::<i64, _>(AppError::Declined);
    for expected in [(0, 1, 0), (0, 1, 0), (0, 0, 1), (0, 0, 1)] {
        assert!(expected.2 == 1 || payments.dead_letters(10).await.expect("list").is_empty());
        assert_eq!(counts(payments.resume(fail).await.expect("resume")), expected);
    }
    let dead = payments.dead_letters(10).await.expect("list");
    let dead: Vec<_> = dead.iter().map(|info| (info.key.as_str(), info.state.as_str(), info.attempts)).collect();
    assert_eq!(dead, [("old", "unknown", 3)]);
    assert_eq!(state(&app, "young").await, Some(("unknown", 1)));
}

/// Writes records as applications do.
async fn fill(app: &App, state: &str, count: usize) {
    for rows in (0..count).collect::<Vec<_>>().chunks(500) {
        let zero = if DATABASE == Database::Postgres { "'\\x00'" } else { "X'00'" };
        let row = |i: &usize| {
            let now = 1_700_000_000_000_000_u64 + *i as u64;
            format!("('{state}{i}', 'payments', 'alice', '{state}{i}', {zero}, '{state}', 9, 5, 0, 0, {now}, {now}0)")
        };
        let rows = rows.iter().map(row).collect::<Vec<_>>().join(", ");
        let insert = format!(
            "INSERT INTO sqlock_idem (id, namespace, principal, request_key, fingerprint, state, token, attempts,
                                      permanent, issued_until, created_at, expires_at) VALUES {rows}"
        );
        sqlx::raw_sql(AssertSqlSafe(insert)).execute(&app.counters.pool).await.expect("insert");
    }
}

#[tokio::test]
async fn unfinished_records_are_listed_in_pages() {
    let app = app().await;
    fill(&app, "done", 4000).await;
    fill(&app, "unknown", 1100).await;
    fill(&app, "started", 70).await;
    let payments = app.payments.clone().resume_policy(ResumePolicy::new().max_attempts(5));
    let never = async |_: &Attempt| -> Result<i64, AppError> { panic!("all of them were tried too often") };
    assert_eq!(counts(payments.resume(never).await.expect("resume")), (0, 0, 1170));
    let first = payments.unfinished(3).await.expect("list");
    let keys: Vec<_> = first.iter().map(|info| info.key.as_str()).collect();
    assert_eq!(keys, ["started0", "unknown0", "started1"]);
    assert_eq!(payments.records_in(None, Some(RecordState::Done), 9).await.expect("list").len(), 9);

    let explain = match DATABASE {
        Database::Postgres => "EXPLAIN",
        Database::Sqlite => "EXPLAIN QUERY PLAN",
        Database::MySql | Database::MariaDb => "EXPLAIN FORMAT=JSON",
    };
    run(&app.counters.pool, if DATABASE.is_mysql() { "ANALYZE TABLE sqlock_idem" } else { "ANALYZE" }).await;
    for state in ["unknown", "done"] {
        // As src/backend/records/list.rs makes it.
        let sql = format!(
            "{explain} SELECT id, principal FROM sqlock_idem WHERE state = '{state}' AND created_at >= 1700000000000500
               AND (created_at > 1700000000000500 OR id > 'a') AND namespace = 'payments' AND attempts >= 5
             ORDER BY created_at, id LIMIT 100"
        );
        let rows = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_all(&app.counters.pool).await.expect("a plan");
        let column = if DATABASE == Database::Sqlite { 3 } else { 0 };
        let plan: String = rows.iter().map(|row| row.get::<String, _>(column)).collect();
        assert!(plan.contains("sqlock_idem_by_state"), "{plan}");
        for sort in ["Sort", "TEMP B-TREE", "\"using_filesort\": true", "\"filesort\":"] {
            assert!(!plan.contains(sort), "{plan}");
        }
    }
}
