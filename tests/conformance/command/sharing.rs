//! `--shared` and `--permits`: several holders of one name, and one queue for all waiters.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::Value;
use sqlock::inspect::Mode;
use sqlock::{FencingToken, Locks};

use crate::support::command::{Ended, Running, beside, end, program, run, sqlock};
use crate::support::command_fixture::{CommandFixture, now};
use crate::support::{LONG, TestDatabase, empty, until, until_waiters};

/// A command that reports its start, and ends on an order; TERM ends it with another exit code.
const OBEDIENT: &str = r#"trap 'exit 9' TERM; echo up >&3; read go <"$ORDERS"; echo "$go" >&3"#;

async fn tokens(locks: &Locks, name: &str) -> Vec<FencingToken> {
    locks.holders(name).await.expect("holders").iter().map(|held| held.token).collect()
}

// ---- run

#[tokio::test]
async fn exclusive_run_waits_for_all_shared_runs() {
    let fixture = CommandFixture::new().await;
    let locks = beside(&fixture.db).await;
    let first = fixture.start(&["--shared", "a"], OBEDIENT).up().await;
    let second = fixture.start(&["-s", "a"], OBEDIENT).up().await;
    assert!(locks.holders("a").await.expect("holders").iter().all(|held| held.mode == Mode::Shared));

    let mut writer = fixture.start(&["a"], OBEDIENT);
    until_waiters(&locks, "a", 1).await;
    // A new reader would overtake it.
    run(&fixture.db, &["run", "-n", "--shared", "a", "--", "true"]).await.expect(75);
    let reader = fixture.start(&["--shared", "a"], OBEDIENT);
    until_waiters(&locks, "a", 2).await;

    first.order("go");
    first.end().await.expect(0);
    assert_eq!(tokens(&locks, "a").await.len(), 1);
    until_waiters(&locks, "a", 2).await;
    assert_eq!(writer.report.so_far(), [""; 0]);
    second.order("go");
    second.end().await.expect(0);

    let writer = writer.up().await;
    let held = locks.holders("a").await.expect("holders");
    assert_eq!(held.iter().map(|held| held.mode).collect::<Vec<_>>(), [Mode::Exclusive]);
    until_waiters(&locks, "a", 1).await;
    writer.order("go");
    writer.end().await.expect(0);
    let reader = reader.up().await;
    reader.order("go");
    reader.end().await.expect(0);
    assert!(fixture.is_free("a").await);
}

#[tokio::test]
async fn permits_bound_the_number_of_concurrent_runs() {
    let fixture = CommandFixture::new().await;
    let locks = beside(&fixture.db).await;
    let log = fixture.path("log");
    let script = format!("echo in >>'{log}'; {OBEDIENT}; echo out >>'{log}'");
    let options = ["--permits", "2", "a"];
    let first = fixture.start(&options, &script).up().await;
    let second = fixture.start(&options, &script).up().await;
    let others: Vec<_> = (0..4).map(|_| fixture.start(&options, &script)).collect();
    until_waiters(&locks, "a", 4).await;
    assert_eq!(tokens(&locks, "a").await.len(), 2);
    run(&fixture.db, &["run", "-n", "--permits", "2", "a", "--", "true"]).await.expect(75);
    // Each continues once it has started.
    let all: Vec<_> = [first, second].into_iter().chain(others).collect();
    for one in &all {
        one.order("go");
    }
    for one in all {
        one.end().await.expect(0);
    }

    let log = std::fs::read_to_string(log).expect("they have written");
    let mut at_work = 0;
    let counts = log.lines().map(|line| {
        at_work += if line == "in" { 1 } else { -1 };
        at_work
    });
    let counts: Vec<i32> = counts.collect();
    assert_eq!((counts.len(), counts.iter().max(), counts.last()), (12, Some(&2), Some(&0)), "{log}");
    assert!(fixture.is_free("a").await);
}

#[tokio::test]
async fn permit_count_is_set_by_each_request() {
    let fixture = CommandFixture::new().await;
    let first = fixture.start(&["--permits", "1", "a"], OBEDIENT).up().await;
    run(&fixture.db, &["run", "-n", "--permits", "1", "a", "--", "true"]).await.expect(75);
    run(&fixture.db, &["run", "-n", "--permits", "2", "a", "--", "true"]).await.expect(0);
    run(&fixture.db, &["run", "-n", "a", "--", "true"]).await.expect(75);
    first.order("go");
    first.end().await.expect(0);
    run(&fixture.db, &["run", "-n", "a", "--", "true"]).await.expect(0);
}

#[tokio::test]
async fn killed_shared_run_frees_only_its_share() {
    let fixture = CommandFixture::new().await;
    let locks = beside(&fixture.db).await;
    for options in [&["--shared"][..], &["--permits", "2"]] {
        let name = options[0].trim_start_matches('-');
        let start = |ttl| fixture.start(&[options, &["--ttl", ttl, name]].concat(), OBEDIENT);
        let mut killed = start("6").up().await;
        let lasting = start("30").up().await;
        let next = fixture.start(&[name], OBEDIENT);
        until_waiters(&locks, name, 1).await;
        let both = locks.holders(name).await.expect("holders");
        let [_, second] = both.as_slice() else { panic!("{both:?}") };

        killed.signal(Signal::SIGKILL);
        killed.report.gone().await;
        until("the end of what it had", async || tokens(&locks, name).await == [second.token]).await;
        // The other holder continues, and no waiter was granted.
        until_waiters(&locks, name, 1).await;
        lasting.order("go");
        lasting.end().await.expect(0);
        let next = next.up().await;
        next.order("go");
        next.end().await.expect(0);
    }
}

#[tokio::test]
async fn hold_limits_apply_to_shared_runs() {
    let db = empty().await;
    for (options, others) in [(&["--shared"][..], 0), (&["--permits", "1"], 75)] {
        let name = options[0].trim_start_matches('-');
        let kept = [&["run", "--hold-at-least", "10m"], options, &[name, "--", "true"]].concat();
        run(&db, &kept).await.expect(0);
        run(&db, &["run", "-n", name, "--", "true"]).await.expect(75);
        run(&db, &[&["run", "-n"], options, &[name, "--", "true"]].concat()).await.expect(others);
        let max = [&["run", "--max-hold", "2s"], options, &["max", "--", "sleep", "600"]].concat();
        let ended = run(&db, &max).await.expect(79);
        assert!(ended.stderr.contains("maximum holding time"), "{}", ended.stderr);
        run(&db, &["run", "-n", "max", "--", "true"]).await.expect(0);
    }
}

/// A grant by another process lasts only until its new holder confirms it. That short grant is not
/// a lease that cannot be renewed.
#[tokio::test]
async fn command_granted_by_another_process_has_whole_ttl() {
    let fixture = CommandFixture::new().await;
    let locks = beside(&fixture.db).await;
    for options in [&[][..], &["--shared"], &["--permits", "1"]] {
        let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
        let options = [options, &["--ttl", "1000", "--kill-after", "300", "a"]].concat();
        let next = fixture.start(&options, &format!("{OBEDIENT}; echo $SQLOCK_EXPIRES_AT"));
        until_waiters(&locks, "a", 1).await;
        lease.release().await.expect("ours to the end");
        let before = now();
        let next = next.up().await;
        next.order("go");
        let ended = next.end().await.expect(0);
        let answer = chrono::DateTime::parse_from_rfc3339(ended.stdout.trim()).expect("RFC 3339");
        assert!(answer.timestamp_micros() - before > 600_000_000, "{answer}");
    }
}

// ---- queue

#[tokio::test]
async fn waiter_reports_its_position_when_it_changes() {
    let db = empty().await;
    let locks = beside(&db).await;
    let lease = locks.lease("job").ttl(LONG).label("the holder").acquire().await.expect("acquire");
    let start = Instant::now();
    let wait = |options: &[&str]| Running::start(sqlock(&db, &[&["run"], options, &["job", "--", "true"]].concat()));
    let mut first = wait(&[]);
    let said = first.says("waiting for \"job\"").await;
    assert!(said.contains("waiting for \"job\", next in the queue, held by ") && said.contains("the holder"), "{said}");
    let mut second = wait(&["--shared"]);
    let said = second.says("waiting for \"job\"").await;
    assert!(said.contains("waiting for \"job\", 1 ahead in the queue, held by "), "{said}");
    let mut third = wait(&["--permits", "3"]);
    let said = third.says("waiting for \"job\"").await;
    assert!(said.contains("waiting for \"job\", 2 ahead in the queue, held by "), "{said}");

    second.signal(rustix::process::Signal::INT);
    second.end().await.expect(130);
    let said = third.says("waiting for \"job\"").await;
    assert!(said.contains("waiting for \"job\", 1 ahead in the queue, held by "), "{said}");
    lease.release().await.expect("ours to the end");
    let ended = first.end().await.expect(0);
    third.end().await.expect(0);
    // Nothing has changed for the first waiter; it prints its note once, and then once a minute.
    let times = ended.stderr.matches("waiting for").count() as u64;
    assert!(times <= 1 + start.elapsed().as_secs() / 60, "{}", ended.stderr);
}

#[tokio::test]
async fn hint_names_the_option_of_the_database() {
    let db = empty().await;
    let locks = beside(&db).await;
    let mut holders = Vec::new();
    for part in ["sqlock unlock --token", "sqlock show job, and sqlock unlock"] {
        holders.push(locks.lease("job").shared().ttl(LONG).acquire().await.expect("acquire"));
        for (arguments, is_named) in [(&["run"][..], false), (&["-D", &db.url, "run"], true)] {
            let mut waiter = Running::start(sqlock(&db, &[arguments, &["job", "--", "true"]].concat()));
            let hint = waiter.says(part).await;
            assert_eq!(hint.ends_with(" (with the same -D)\n"), is_named, "{hint}");
            waiter.signal(rustix::process::Signal::INT);
            waiter.end().await.expect(130);
        }
    }
}

#[tokio::test]
async fn waiter_reports_the_number_of_holders() {
    let db = empty().await;
    let locks = beside(&db).await;
    let first = locks.lease("job").shared().ttl(LONG).label("the first").acquire().await.expect("acquire");
    let second = locks.lease("job").shared().ttl(LONG).acquire().await.expect("acquire");
    let ended = run(&db, &["run", "-n", "job", "--", "true"]).await.expect(75);
    assert!(ended.stderr.contains("\"job\" not obtained: shared by 2, first: "), "{}", ended.stderr);
    let mut waiter = Running::start(sqlock(&db, &["run", "job", "--", "true"]));
    let said = waiter.says("waiting for \"job\"").await;
    assert!(said.contains("next in the queue, shared by 2, first: ") && said.contains("(\"the first\")"), "{said}");
    first.release().await.expect("ours to the end");
    let said = waiter.says("waiting for \"job\"").await;
    assert!(said.contains("next in the queue, shared by ") && !said.contains("first:"), "{said}");
    second.release().await.expect("ours to the end");
    waiter.end().await.expect(0);

    let semaphore = locks.semaphore("job", 3).ttl(LONG);
    let permits = [semaphore.acquire().await.expect("acquire"), semaphore.acquire_many(2).await.expect("acquire")];
    let ended = run(&db, &["run", "-n", "job", "--", "true"]).await.expect(75);
    assert!(ended.stderr.contains("\"job\" not obtained: held by 2, first: "), "{}", ended.stderr);
    for permit in permits {
        permit.release().await.expect("ours to the end");
    }
}

// ---- nested runs

/// `sqlock run OUTER job -- sqlock run INNER job -- echo in`.
fn nested(db: &TestDatabase, outer: &[&str], inner: &[&str]) -> tokio::process::Command {
    sqlock(db, &[&["run"], outer, &["job", "--", program(), "run"], inner, &["job", "--", "echo", "in"]].concat())
}

#[tokio::test]
async fn nested_run_gets_its_own_share() {
    let db = empty().await;
    for (outer, inner) in [
        (&["--shared"][..], &["--shared"][..]),
        (&[], &["--shared"]),
        (&["--permits", "2"], &["--permits", "2"]),
        (&["--permits", "2"], &["--shared"]),
        (&["--shared"], &["--permits", "2"]),
    ] {
        let ended = end(nested(&db, outer, &[&["-n"], inner].concat())).await.expect(0);
        assert_eq!(ended.stdout, "in\n", "{inner:?} in {outer:?}: {}", ended.stderr);
        run(&db, &["run", "-n", "job", "--", "true"]).await.expect(0);
    }
}

#[tokio::test]
async fn nested_reader_overtakes_a_waiting_writer() {
    let fixture = CommandFixture::new().await;
    let locks = beside(&fixture.db).await;
    let script =
        format!(r#"echo up >&3; read go <"$ORDERS"; exec {} run --shared a -- sh -c 'echo in >&3'"#, program());
    let mut reader = fixture.start(&["--shared", "a"], &script).up().await;
    let writer = fixture.start(&["a"], OBEDIENT);
    until_waiters(&locks, "a", 1).await;
    reader.order("go");
    assert_eq!(reader.report.line().await, "in");
    reader.end().await.expect(0);
    let writer = writer.up().await;
    writer.order("go");
    writer.end().await.expect(0);
}

#[tokio::test]
async fn self_deadlock_is_refused_with_64() {
    let db = empty().await;
    for (outer, inner, why) in [
        (&["--shared"][..], &[][..], "shares it; this one would wait for ever to hold it alone"),
        (&["--permits", "2"], &[], "has a permit of it; this one would wait for ever to hold it alone"),
        (&[], &["--permits", "2"], "holds it alone; this one would wait for ever to take a permit"),
    ] {
        let ended = end(nested(&db, outer, inner)).await.expect(64);
        assert_eq!(ended.stdout, "");
        assert!(ended.stderr.contains(why), "{inner:?} in {outer:?}: {}", ended.stderr);
        run(&db, &["run", "-n", "job", "--", "true"]).await.expect(0);
    }
}

/// Both leases have one token.
#[tokio::test]
async fn unstartable_nested_command_keeps_the_outer_lease() {
    let db = empty().await;
    let script = "\"$0\" run --hold-at-least 10m job -- /nonexistent/command; [ $? = 127 ] && echo in";
    let ended = run(&db, &["run", "job", "--", "sh", "-c", script, program()]).await.expect(0);
    assert_eq!(ended.stdout, "in\n");
}

#[tokio::test]
async fn nested_wait_for_only_permit_is_reported() {
    let db = empty().await;
    end(nested(&db, &["--permits", "1"], &["-n", "--permits", "1"])).await.expect(75);
    let mut waiting = Running::start(nested(&db, &["--permits", "1"], &["--permits", "1"]));
    waiting.says("waiting for \"job\", next in the queue, held by ").await;
    let hint = waiting.says("Give up with Ctrl-C").await;
    assert!(hint.contains("The enclosing sqlock run is one of the holders"), "{hint}");
    waiting.signal(rustix::process::Signal::INT);
    assert_eq!(waiting.end().await.expect(130).stdout, "");
    run(&db, &["run", "-n", "job", "--", "true"]).await.expect(0);
}

// ---- acquire, renew, release, unlock

fn object(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).expect("JSON")
}

/// Acquires a new part of the name, and returns the token.
async fn part(db: &TestDatabase, options: &[&str]) -> FencingToken {
    let printed = object(&run(db, &[&["acquire", "-n", "job"], options].concat()).await.expect(0));
    FencingToken::new(printed["token"].as_i64().expect("a number")).expect("a token")
}

#[tokio::test]
async fn share_is_renewed_and_released_by_its_token() {
    let db = empty().await;
    let locks = beside(&db).await;
    for options in [&["--shared"][..], &["--permits", "2"]] {
        let options = [options, &["--ttl", "60s"]].concat();
        let (first, second) = (part(&db, &options).await, part(&db, &options).await);
        assert_eq!(tokens(&locks, "job").await, [first, second]);
        run(&db, &["acquire", "-n", "job"]).await.expect(75);

        // The token of the second holder, because an inspection of the name shows the first.
        let before = locks.holders("job").await.expect("holders");
        let renewed = run(&db, &["renew", "job", "--token", &second.to_string(), "--ttl", "1h"]).await.expect(0);
        assert_eq!(object(&renewed)["token"], second.get());
        let after = locks.holders("job").await.expect("holders");
        assert_eq!(after[0].expires_at, before[0].expires_at);
        assert!(after[1].remaining > Duration::from_secs(3500), "{:?}", after[1].remaining);
        run(&db, &["renew", "job", "--token", &second.to_string(), "--ttl", "5s"]).await.expect(0);
        let never_shorter = locks.holders("job").await.expect("holders")[1].expires_at;
        assert!(never_shorter >= after[1].expires_at);

        let ended = run(&db, &["release", "job", "--token", &second.to_string()]).await.expect(0);
        assert_eq!((&*ended.stdout, &*ended.stderr), ("", ""));
        assert_eq!(tokens(&locks, "job").await, [first]);
        for verb in ["renew", "release", "unlock"] {
            let ended = run(&db, &[verb, "job", "--token", &second.to_string()]).await.expect(79);
            assert!(
                ended.stderr.contains(&first.to_string()),
                "{verb} names the token that holds it: {}",
                ended.stderr
            );
        }
        run(&db, &["release", "job", "--token", &first.to_string()]).await.expect(0);
        run(&db, &["run", "-n", "job", "--", "true"]).await.expect(0);
    }
}

#[tokio::test]
async fn unlock_of_one_share_keeps_the_others() {
    let fixture = CommandFixture::new().await;
    let locks = beside(&fixture.db).await;
    let options = ["--shared", "a"];
    let first = fixture.start(&options, OBEDIENT).up().await;
    let second = fixture.start(&options, OBEDIENT).up().await;
    let next = fixture.start(&["a"], OBEDIENT);
    until_waiters(&locks, "a", 1).await;
    let both = tokens(&locks, "a").await;
    let [one, other] = both.as_slice() else { panic!("{both:?}") };

    let ended = run(&fixture.db, &["unlock", "a", "--token", &other.to_string()]).await.expect(0);
    assert_eq!(ended.stdout, "");
    let said = format!("sqlock: token {other} does not hold \"a\" any more: it is shared by ");
    assert!(ended.stderr.starts_with(&said), "{}", ended.stderr);
    assert_eq!(tokens(&locks, "a").await, [*one]);
    let ended = second.end().await.expect(79);
    assert!(ended.stderr.contains("the command was stopped"), "{}", ended.stderr);
    // The first holder is unchanged, and no waiter was granted.
    until_waiters(&locks, "a", 1).await;
    first.order("go");
    first.end().await.expect(0);
    let next = next.up().await;
    next.order("go");
    next.end().await.expect(0);
}

#[tokio::test]
async fn waited_acquire_prints_the_end_of_its_lease() {
    let db = empty().await;
    let locks = beside(&db).await;
    for options in [&[][..], &["--shared"]] {
        let lease = locks.lease("job").ttl(LONG).acquire().await.expect("acquire");
        let waiter = Running::start(sqlock(&db, &[&["acquire", "--ttl", "1h", "job"], options].concat()));
        until_waiters(&locks, "job", 1).await;
        lease.release().await.expect("ours to the end");
        let printed = object(&waiter.end().await.expect(0));
        let held = locks.inspect("job").await.expect("inspect").expect("held");
        assert!(held.remaining > Duration::from_secs(3000), "{:?}", held.remaining);
        let printed_end = chrono::DateTime::parse_from_rfc3339(printed["expires_at"].as_str().expect("a text"));
        // The printed time is truncated to milliseconds, and the clock of the database is read a
        // second time.
        let apart = printed_end.expect("RFC 3339").timestamp_millis() - held.expires_at.timestamp_millis();
        assert!(apart.abs() <= 1, "{apart} ms apart");
        run(&db, &["release", "job", "--token", &held.token.to_string()]).await.expect(0);
    }
}
