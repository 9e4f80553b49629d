//! Attempts under a lease, for effects elsewhere.

use super::*;

#[tokio::test]
async fn running_attempt_is_in_progress_and_then_replayed() {
    let app = app().await;
    let other = app.other().await;
    let first = attempt(app.payments.attempt(&alice("a"), &request()).await).await;
    assert_eq!((first.number(), first.key(), first.principal()), (1, "a", Some("alice")));
    for by in [&app.payments, &other] {
        assert!(matches!(by.attempt(&alice("a"), &request()).await.expect("attempt"), Outcome::InProgress));
        assert!(matches!(by.attempt(&alice("a"), &another()).await.expect("attempt"), Outcome::Mismatch));
    }
    let waiting = tokio::spawn({
        let other = other.clone().wait(SOON);
        async move { other.run_leased(&alice("a"), &request(), async |_| Ok::<_, Error>(9)).await }
    });
    first.complete(&7).await.expect("complete");
    drop(first);
    let reply = soon("the replay", waiting).await.expect("no panic").expect("run");
    assert_eq!(reply, Outcome::Replay(7));
    let reply = other.attempt(&alice("a"), &another()).await.expect("attempt");
    assert!(matches!(reply, Outcome::Mismatch));
    assert_eq!(state(&app, "a").await, Some(("done", 1)));
    assert!(app.payments.unfinished(10).await.expect("list").is_empty());
}

#[tokio::test]
async fn dead_attempt_is_continued_with_its_steps() {
    let app = app().await;
    let first = attempt(app.payments.attempt(&alice("a"), &request()).await).await;
    let charged = first.step("charge", async || Ok::<_, Error>("receipt".to_owned())).await.expect("step");
    let (key, other_key) = (first.provider_key("charge"), first.provider_key("refund"));
    assert_ne!(key, other_key);
    let token = first.token();
    drop(first);
    let other = app.other().await.wait(SOON);
    let second = attempt(soon("the takeover", other.attempt(&alice("a"), &request())).await).await;
    assert_eq!(second.number(), 2);
    assert!(second.token() > token);
    assert_eq!(second.provider_key("charge"), key);
    let again = second.step("charge", async || -> Result<String, Error> { panic!("it is done") }).await.expect("step");
    assert_eq!(again, charged);
    assert_eq!(second.recall::<String>("mail").await.expect("recall"), None);
    let info = app.payments.inspect(&alice("a")).await.expect("inspect").expect("a record");
    assert_eq!((info.state.as_str(), info.steps), ("started", vec!["charge".to_owned()]));
    second.complete(&charged).await.expect("complete");
    drop(second);
    // A reused key begins without steps. The provider's key is the same.
    run(&app.counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    let third = attempt(soon("the lease", other.attempt(&alice("a"), &request())).await).await;
    assert_eq!(third.number(), 1);
    assert_eq!(third.recall::<String>("charge").await.expect("recall"), None);
    assert_eq!(third.provider_key("charge"), key);
    third.forget().await.expect("forget");
    assert_eq!(state(&app, "a").await, None);
    let steps: i64 =
        sqlx::query_scalar("SELECT count(*) FROM sqlock_idem_step").fetch_one(&app.counters.pool).await.expect("count");
    assert_eq!(steps, 0);
}

/// Covers a failover to a replica that missed the record, and a restored older backup.
#[tokio::test]
async fn provider_key_survives_the_loss_of_its_record() {
    let (before, restored) = (app().await, app().await);
    let provider_key = async |app: &App, namespace: &str, key: &IdempotencyKey| {
        let attempt = attempt(app.payments.clone().namespace(namespace).attempt(key, &request()).await).await;
        attempt.provider_key("charge")
    };
    let key = provider_key(&before, "payments", &alice("a")).await;
    assert_eq!(provider_key(&restored, "payments", &alice("a")).await, key);
    let others = [
        provider_key(&restored, "refunds", &alice("a")).await,
        provider_key(&restored, "payments", &alice("b")).await,
        provider_key(&restored, "payments", &IdempotencyKey::new("bob", "a")).await,
        provider_key(&restored, "payments", &IdempotencyKey::global("a")).await,
    ];
    assert_eq!(BTreeSet::from_iter(others.iter().chain([&key])).len(), 5);
}

#[tokio::test]
async fn stored_result_stays_when_an_attempt_completes_again() {
    let app = app().await;
    let first = attempt(app.payments.attempt(&alice("a"), &request()).await).await;
    let refused = |result: Result<(), Error>| assert!(matches!(&result, Err(Error::AlreadyCompleted)), "{result:?}");
    first.complete("receipt").await.expect("complete");
    first.complete("receipt").await.expect("an equal result");
    refused(first.complete("another").await);
    refused(first.unknown().await);
    first.forget().await.expect("nothing to forget");
    let mut tx = app.begin().await;
    first.complete_in(&mut tx, "receipt").await.expect("an equal result");
    refused(first.complete_in(&mut tx, "another").await);
    tx.commit().await.expect("commit");
    drop(first);
    let again = async |_: &Attempt| Ok::<_, Error>("again".to_owned());
    let reply = app.payments.clone().wait(SOON).run_leased(&alice("a"), &request(), again).await.expect("run");
    assert_eq!(reply, Outcome::Replay("receipt".to_owned()));
}

/// Steps that stay in the table although their record has been deleted.
#[tokio::test]
async fn steps_without_record_are_purged_in_batches() {
    let app = app().await;
    let count = async || -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM sqlock_idem_step").fetch_one(&app.counters.pool).await.expect("count")
    };
    let live = attempt(app.payments.attempt(&alice("a"), &request()).await).await;
    live.step("charge", async || Ok::<_, Error>(1)).await.expect("step");
    run(
        &app.counters.pool,
        "INSERT INTO sqlock_idem_step (id, begun, step, result) SELECT id, begun - 1, step, result FROM sqlock_idem_step",
    )
    .await;
    let steps: Vec<String> = (0..1200).map(|i| format!("('{i:064x}', 1, 'charge', '1')")).collect();
    let insert = format!("INSERT INTO sqlock_idem_step (id, begun, step, result) VALUES {}", steps.join(", "));
    sqlx::query(AssertSqlSafe(insert)).execute(&app.counters.pool).await.expect("insert");
    assert_eq!(count().await, 1202);
    // A purge looks at a part of the table.
    assert_eq!(app.payments.purge().await.expect("purge"), 0);
    assert!((600..1000).contains(&count().await));
    for _ in 0..3 {
        app.payments.purge().await.expect("purge");
    }
    assert_eq!(count().await, 1);
    assert_eq!(live.recall("charge").await.expect("recall"), Some(1));
    live.complete(&1).await.expect("complete");
}

#[tokio::test]
async fn names_of_steps_are_compared_byte_for_byte() {
    let app = app().await;
    let first = attempt(app.payments.attempt(&alice("a"), &request()).await).await;
    for (i, name) in ["a", "A", "a ", "á"].into_iter().enumerate() {
        assert_eq!(first.step(name, async || Ok::<_, Error>(i)).await.expect("step"), i);
    }
    assert_eq!(first.step("a", async || Ok::<_, Error>(9)).await.expect("step"), 0);
    assert!(matches!(first.recall::<i64>("").await, Err(Error::InvalidKey { .. })));
    first.forget().await.expect("forget");
}

/// The lease of the attempt expired during a delay, and another attempt has taken over.
#[tokio::test]
async fn overtaken_attempt_can_write_nothing() {
    let app = app().await;
    let first = attempt(app.payments.attempt(&alice("a"), &request()).await).await;
    let name = first.lease().name().to_string();
    assert!(app.locks.evict(&name, first.token()).await.expect("evict"));
    let other = app.other().await.wait(SOON);
    let second = attempt(soon("the takeover", other.attempt(&alice("a"), &request())).await).await;
    let lost = |result: Result<(), Error>| assert!(matches!(&result, Err(error) if error.is_lost()), "{result:?}");
    let step = first.step("late", async || -> Result<i64, Error> { Ok(1) }).await;
    lost(step.map(|_| ()));
    lost(first.complete(&1).await);
    lost(first.unknown().await);
    first.forget().await.expect("nothing to forget");
    let mut tx = app.begin().await;
    lost(first.record_step(&mut tx, "late", &1).await);
    lost(first.complete_in(&mut tx, &1).await);
    tx.rollback().await.expect("rollback");
    assert_eq!(second.recall::<i64>("late").await.expect("recall"), None);
    let mut tx = app.begin().await;
    add_one(&mut tx, 1).await.expect("an effect");
    second.record_step(&mut tx, "ledger", &5).await.expect("step");
    second.complete_in(&mut tx, &2).await.expect("complete");
    tx.commit().await.expect("commit");
    assert_eq!(second.recall::<i64>("ledger").await.expect("recall"), Some(5));
    assert_eq!(state(&app, "a").await, Some(("done", 2)));
    let reply = app.payments.run_leased(&alice("a"), &request(), async |_| Ok::<_, Error>(9)).await.expect("run");
    assert_eq!(reply, Outcome::Replay(2));
    assert_eq!(app.effects().await, 1);
}

/// The reply to the commit of the first transaction was lost, and the caller repeats it.
#[tokio::test]
async fn repeated_step_is_refused() {
    let app = app().await;
    let attempt = attempt(app.payments.attempt(&alice("a"), &request()).await).await;
    let mut tx = app.begin().await;
    add_one(&mut tx, 1).await.expect("an effect");
    attempt.record_step(&mut tx, "ledger", &5).await.expect("step");
    tx.commit().await.expect("commit");
    let mut tx = app.begin().await;
    add_one(&mut tx, 1).await.expect("an effect");
    let repeated = attempt.record_step(&mut tx, "ledger", &5).await;
    assert!(matches!(repeated, Err(Error::StepRecorded)), "{repeated:?}");
    tx.rollback().await.expect("rollback");
    assert_eq!(app.effects().await, 1);
}

#[tokio::test]
async fn forgotten_attempt_frees_the_key() {
    let app = app().await;
    let declined = async |attempt: &Attempt| {
        attempt.forget().await?;
        Err::<i64, _>(AppError::Declined)
    };
    let failed = app.payments.run_leased(&alice("a"), &request(), declined).await;
    assert!(matches!(failed, Err(AppError::Declined)));
    assert_eq!(state(&app, "a").await, None);
    let reply = app.payments.run_leased(&alice("a"), &another(), async |_| Ok::<_, AppError>(1)).await.expect("run");
    assert_eq!(reply, Outcome::New(1));
}

#[tokio::test]
async fn issued_token_can_be_used_under_a_lease() {
    let app = app().await;
    let token = app.payments.issue("alice", Duration::from_secs(60)).await.expect("issue");
    let key = IdempotencyKey::issued("alice", token);
    let run = async || app.payments.run_leased(&key, &request(), async |_| Ok::<_, Error>(1)).await.expect("run");
    assert_eq!(run().await, Outcome::New(1));
    assert_eq!(run().await, Outcome::Replay(1));
}

/// The retention of a result does not depend on the duration of its attempt.
#[tokio::test]
async fn result_is_kept_from_when_it_is_there() {
    let app = app().await;
    let fail = async |_: &Attempt| Err::<i64, _>(AppError::Declined);
    let failed = app.payments.run_leased(&alice("a"), &request(), fail).await;
    assert!(matches!(failed, Err(AppError::Declined)));
    run(&app.counters.pool, "UPDATE sqlock_idem SET created_at = 1, expires_at = 2").await;
    let resumed = app.payments.resume(async |_: &Attempt| Ok::<_, AppError>(7)).await.expect("resume");
    assert_eq!(resumed.done, 1);
    app.locks.sweeper().sweep().await.expect("sweep");
    let reply = app.payments.run_leased(&alice("a"), &request(), async |_| Ok::<_, AppError>(8)).await.expect("run");
    assert_eq!(reply, Outcome::Replay(7));
}

#[tokio::test]
async fn attempt_polls_no_work_after_its_deadline() {
    let app = app().await;
    let brief = app.payments.clone().lease(Duration::from_secs(5));
    for resumed in [false, true] {
        let polls = AtomicU32::new(0);
        let work = async |attempt: &Attempt| {
            block_past(|| attempt.lease().remaining(), &polls).await;
            Ok::<_, AppError>(1)
        };
        if resumed {
            // The lost lease may be in the database for a moment: until then, there is nothing to
            // resume.
            let resumed = soon("the resumption", async {
                loop {
                    let resumed = counts(brief.resume(&work).await.expect("resume"));
                    if resumed != (0, 0, 0) {
                        break resumed;
                    }
                }
            });
            assert_eq!(resumed.await, (0, 1, 0));
        } else {
            let reply = soon("the loss", brief.run_leased(&alice("a"), &request(), &work)).await;
            assert!(matches!(&reply, Err(AppError::Lock(error)) if error.is_lost()), "{reply:?}");
        }
        assert_eq!(polls.into_inner(), 2);
    }
}

/// A lease of the scope's owner is re-entered in that scope. The lease of an attempt is not.
#[tokio::test]
async fn duplicates_of_one_owner_do_not_enter_together() {
    let app = app().await;
    let both = async {
        let first = attempt(app.payments.attempt(&alice("a"), &request()).await).await;
        let reply = app.payments.attempt(&alice("a"), &request()).await.expect("attempt");
        assert!(matches!(reply, Outcome::InProgress), "{reply:?}");
        let resumed = app.payments.resume(async |_: &Attempt| Ok::<_, AppError>(7)).await.expect("resume");
        assert_eq!((resumed.done, resumed.in_progress), (0, 1));
        first.complete(&1).await.expect("complete");
    };
    sqlock::Owner::random().scope(both).await;
}

#[tokio::test]
async fn completed_result_counts_once_committed() {
    let app = app().await;
    for (key, succeeds) in [("a", true), ("b", false)] {
        let (name, asked) = (alice(key), request());
        let rolled_back = app.payments.run_leased(&name, &asked, async |attempt| {
            let mut tx = app.begin().await;
            attempt.complete_in(&mut tx, &1).await?;
            tx.rollback().await?;
            if succeeds { Ok(1) } else { Err(AppError::Declined) }
        });
        let error = rolled_back.await.expect_err("nobody knows");
        assert_eq!(succeeds, matches!(error, AppError::Lock(Error::Unknown { .. })), "{error:?}");
        assert_eq!(state(&app, key).await, Some(("unknown", 1)));
        let reply =
            app.payments.run_leased(&alice(key), &request(), async |_| Ok::<_, AppError>(2)).await.expect("run");
        assert_eq!(reply, Outcome::Unknown);
    }
    let (name, asked) = (alice("c"), request());
    let committed = app.payments.run_leased(&name, &asked, async |attempt| {
        let mut tx = app.begin().await;
        attempt.complete_in(&mut tx, &1).await?;
        tx.commit().await?;
        Err::<i64, _>(AppError::Declined)
    });
    assert!(matches!(committed.await, Err(AppError::Declined)));
    assert_eq!(state(&app, "c").await, Some(("done", 1)), "what is committed stays");
}

/// As a server refuses a result that is longer than its packets. Otherwise each repeated request
/// would run the work again.
#[tokio::test]
async fn result_refused_by_the_database_is_unknown() {
    let app = app().await;
    refuse_results(&app.counters.pool).await;
    let begun = AtomicU32::new(0);
    for key in ["returned", "passed on", "ignored"] {
        let (name, asked) = (alice(key), request());
        let run = async || {
            let work = async |attempt: &Attempt| {
                begun.fetch_add(1, Ordering::SeqCst);
                match key {
                    "returned" => {}
                    "passed on" => attempt.complete(&1).await?,
                    _ => assert!(attempt.complete(&1).await.is_err()),
                }
                Ok::<_, AppError>(1)
            };
            app.payments.run_leased(&name, &asked, work).await
        };
        let error = run().await.expect_err("nothing is stored");
        let refused = |error: &Error| matches!(error, Error::Database { .. } | Error::Unknown { .. });
        assert!(matches!(&error, AppError::Lock(error) if refused(error)), "{key}: {error:?}");
        assert_eq!(state(&app, key).await, Some(("unknown", 1)), "{key}");
        assert_eq!(run().await.expect("the outcome"), Outcome::Unknown, "{key}");
    }
    assert_eq!(begun.into_inner(), 3, "each was run once");
}

#[tokio::test]
async fn unreadable_result_is_not_stored() {
    let app = app().await;
    let (name, asked) = (alice("a"), request());
    let nan = app.payments.run(&app.counters.pool, &name, &asked, async |tx| {
        effect(tx).await?;
        Ok::<_, AppError>(f64::NAN)
    });
    let error = nan.await.expect_err("it would be null");
    assert!(matches!(error, AppError::Lock(Error::Json { .. })), "{error:?}");
    assert_eq!(app.effects().await, 0);
    let leased = app.payments.run_leased(&alice("b"), &request(), async |_| Ok::<_, AppError>(f64::NAN)).await;
    assert!(matches!(leased, Err(AppError::Lock(Error::Json { .. }))), "{leased:?}");
    assert_eq!(state(&app, "b").await, Some(("unknown", 1)));
}

#[tokio::test]
async fn retention_and_ttl_out_of_range_are_refused() {
    let app = app().await;
    for time in [Duration::ZERO, Duration::from_micros(999), Duration::MAX] {
        let odd = app.payments.clone().retention(time);
        let error = odd.run(&app.counters.pool, &alice("a"), &request(), effect).await.expect_err("out of range");
        assert!(matches!(error, AppError::Lock(Error::OutOfRange { .. })), "{error:?}");
        assert!(matches!(odd.attempt(&alice("a"), &request()).await, Err(Error::OutOfRange { .. })));
        assert!(matches!(app.payments.issue("alice", time).await, Err(Error::OutOfRange { .. })));
    }
    let century = app.payments.clone().retention(Duration::from_secs(100 * 365 * 86_400));
    assert_eq!(app.charge_by(&century, &alice("a"), &request()).await, Outcome::New(1));
    assert_eq!(app.payments.records(10).await.expect("list").len(), 1);
}

/// A repeated request is never a mismatch, whatever the outcome of earlier ones.
#[tokio::test]
async fn contended_issued_token_is_never_a_mismatch() {
    const TOKENS: usize = 12;
    let app = app().await;
    let mut tasks = JoinSet::new();
    for _ in 0..TOKENS {
        let token = app.payments.issue("alice", Duration::from_secs(600)).await.expect("issue");
        for i in 0..6 {
            let (payments, pool) = (app.other().await.wait(SOON), app.counters.pool.clone());
            let key = IdempotencyKey::issued("alice", token.as_str());
            tasks.spawn(async move {
                let work = async |tx: &mut Tx<'_>| {
                    effect(tx).await?;
                    if i < 4 { Err(AppError::Declined) } else { Ok(i) }
                };
                match payments.run(&pool, &key, &request(), work).await {
                    Ok(reply) => assert!(reply.clone().into_value().is_some(), "{reply:?}"),
                    Err(error) => assert!(matches!(error, AppError::Declined), "{error:?}"),
                }
            });
        }
    }
    soon("all of them", tasks.join_all()).await;
    assert_eq!(app.effects().await, TOKENS as i64);
}

#[tokio::test]
async fn forgotten_attempt_leaves_issued_token_valid() {
    let app = app().await;
    let token = app.payments.issue("alice", Duration::from_secs(600)).await.expect("issue");
    let key = IdempotencyKey::issued("alice", token.as_str());
    for _ in 0..2 {
        let first = attempt(app.payments.clone().wait(SOON).attempt(&key, &another()).await).await;
        assert_eq!(first.number(), 1);
        first.step("charge", async || Ok::<_, Error>(1)).await.expect("step");
        first.forget().await.expect("forget");
        let record = app.payments.inspect(&key).await.expect("inspect").expect("issued");
        assert_eq!((record.token, record.steps.len()), (None, 0));
    }
    let reply = app.payments.clone().wait(SOON).run_leased(&key, &request(), async |_| Ok::<_, Error>(1)).await;
    assert_eq!(reply.expect("run"), Outcome::New(1));
    // The token is no longer valid after its own time.
    let late = app.payments.issue("alice", Duration::from_secs(600)).await.expect("issue");
    let key = IdempotencyKey::issued("alice", late.as_str());
    let first = attempt(app.payments.attempt(&key, &request()).await).await;
    run(&app.counters.pool, "UPDATE sqlock_idem SET issued_until = 1").await;
    first.forget().await.expect("forget");
    assert!(matches!(app.payments.attempt(&key, &request()).await.expect("attempt"), Outcome::Expired));
}

/// Otherwise the next attempt would not see the step that is being written.
#[tokio::test]
async fn attempt_waits_for_step_of_its_predecessor() {
    let app = app().await;
    let first = attempt(app.payments.attempt(&alice("a"), &request()).await).await;
    let mut tx = app.begin().await;
    add_one(&mut tx, 1).await.expect("an effect");
    first.record_step(&mut tx, "ledger", &5).await.expect("step");
    if DATABASE != Database::Sqlite {
        assert!(app.locks.evict(first.lease().name().as_str(), first.token()).await.expect("evict"));
    }
    let next = tokio::spawn({
        let other = app.other().await.wait(SOON);
        async move {
            let next = attempt(other.attempt(&alice("a"), &request()).await).await;
            next.recall::<i64>("ledger").await.expect("recall")
        }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!next.is_finished());
    tx.commit().await.expect("commit");
    drop(first);
    assert_eq!(soon("the next attempt", next).await.expect("no panic"), Some(5));
}

/// A transaction may read as of a moment before the attempt, or before the token was issued. It
/// reports no loss and no expiry then.
#[tokio::test]
async fn older_transaction_reports_no_loss_or_expiry() {
    for level in levels() {
        if DATABASE == Database::Sqlite && *level != "DEFERRED" {
            continue; // No attempt begins beside such a transaction.
        }
        let app = app().await;
        let isolated = app.counters.at(level).await;
        let older = async || {
            let mut tx = isolated.begin().await;
            sqlx::raw_sql("SELECT value FROM counter WHERE id = 2").fetch_all(&mut *tx).await.expect("read");
            tx
        };
        let check = |answer: sqlock::Result<()>| match answer {
            Ok(()) | Err(Error::Row { cause: RowError::StaleSnapshot | RowError::Deferred, .. }) => {}
            Err(error) => panic!("{level}: {}", error.report()),
        };
        for (key, stores_step) in [("a", true), ("b", false)] {
            let mut tx = older().await;
            let attempt = attempt(app.payments.attempt(&alice(key), &request()).await).await;
            check(match stores_step {
                true => attempt.record_step(&mut tx, "charge", &1).await,
                false => attempt.complete_in(&mut tx, &1).await,
            });
            tx.rollback().await.expect("rollback");
        }
        let mut tx = older().await;
        let token = app.payments.issue("alice", Duration::from_secs(60)).await.expect("issue");
        let key = IdempotencyKey::issued("alice", token);
        let begun = app.payments.begin(&mut tx, &key, &request()).await;
        check(begun.map(|outcome| assert!(matches!(outcome, Outcome::New(_)), "{level}: {outcome:?}")));
        tx.rollback().await.expect("rollback");
    }
}
