//! `sqlock ls`, `show`, `unlock` and `sweep`: output as text and as JSON.

use std::process::Stdio;
use std::time::Duration;

use chrono::DateTime;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use sqlock::Locks;
use tokio::io::AsyncReadExt;

use crate::support::command::{Ended, Running, beside, held, run, sqlock, start};
use crate::support::{LONG, builder, empty, soon, until_waiters};

/// A text that would control a terminal: colours, a title, the bell, C1 codes, a newline.
const NASTY: &str = "a\u{1b}[31mb\u{1b}]0;title\u{7}c\u{9b}31md\u{7f}e\r\nf\u{8}\u{202e}g\u{200b}\u{feff}";

fn parse(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).expect("JSON")
}

fn names(ended: &Ended) -> Vec<String> {
    let listed = parse(ended);
    let rows = listed.as_array().expect("an array").iter();
    rows.map(|row| row["name"].as_str().expect("a text").to_owned()).collect()
}

/// Checks that a text has no characters that control a terminal, apart from the ends of lines.
#[track_caller]
fn assert_harmless(text: &str) {
    let acts = |c: char| (c.is_control() && c != '\n') || ['\u{202e}', '\u{200b}', '\u{feff}'].contains(&c);
    assert!(!text.chars().any(acts), "{text:?}");
}

#[tokio::test]
async fn ls_shows_holder_token_and_expiry() {
    let db = empty().await;
    let locks = builder(db.of_the_command().pool_of(2).await).holder("the machine/7").build();
    locks.migrate().await.expect("migrate");
    let ended = run(&db, &["ls"]).await.expect(0);
    assert_eq!(ended.stdout, "NAME  HOLDER  MODE  WAITERS  HELD FOR  EXPIRES IN  TOKEN  LABEL\n");
    assert_eq!(parse(&run(&db, &["ls", "--json"]).await.expect(0)), Value::Array(Vec::new()));

    // No heartbeat moves its expiry.
    let lease = locks.lease("job/1").ttl(LONG).renew(false).label("deploy 42").acquire().await.expect("acquire");
    let info = held(&locks, "job/1").await.expect("held");
    let ended = run(&db, &["ls"]).await.expect(0);
    let lines: Vec<&str> = ended.stdout.lines().collect();
    let [heading, row] = lines[..] else { panic!("{}", ended.stdout) };
    assert!(heading.starts_with("NAME   HOLDER "), "{heading}");
    assert!(row.starts_with("job/1  the machine/7  exclusive  0        "), "{row}");
    assert!(row.ends_with(&format!("  {}  deploy 42", lease.token())), "{row}");
    assert_eq!(row.find(&lease.token().to_string()), heading.find("TOKEN"), "columns are aligned");

    let listed = parse(&run(&db, &["ls", "--json"]).await.expect(0));
    let [row] = listed.as_array().expect("an array").as_slice() else { panic!("{listed}") };
    let mut keys: Vec<&str> = row.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    let known = [
        "acquired_at",
        "expires_at",
        "holder",
        "label",
        "mode",
        "name",
        "note",
        "owner",
        "permits",
        "token",
        "waiters",
    ];
    assert_eq!(keys, known);
    assert_eq!((&row["permits"], &row["waiters"]), (&Value::Null, &Value::from(0)));
    assert_eq!(row["name"], "job/1");
    assert_eq!(row["mode"], "exclusive");
    assert_eq!(row["holder"], "the machine/7");
    assert_eq!(row["owner"], lease.owner().to_string());
    assert_eq!(row["token"], lease.token().get());
    assert_eq!(row["label"], "deploy 42");
    let time = |key: &str| DateTime::parse_from_rfc3339(row[key].as_str().expect("a text")).expect("RFC 3339");
    assert_eq!(time("acquired_at").timestamp_millis(), info.acquired_at.timestamp_millis());
    assert_eq!(time("expires_at").timestamp_millis(), info.expires_at.timestamp_millis());
    lease.release().await.expect("ours to the end");
}

#[tokio::test]
async fn ls_lists_names_with_the_prefix() {
    let db = empty().await;
    let locks = beside(&db).await;
    let mut leases = Vec::new();
    for name in ["job/1", "job/2", "jobs", "other", "JOB/3", "100%"] {
        leases.push(locks.lease(name).ttl(LONG).acquire().await.expect("acquire"));
    }
    assert_eq!(names(&run(&db, &["ls", "--json", "job/"]).await.expect(0)), ["job/1", "job/2"]);
    assert_eq!(names(&run(&db, &["list", "job", "--json"]).await.expect(0)), ["job/1", "job/2", "jobs"]);
    assert_eq!(names(&run(&db, &["ls", "--json", "%"]).await.expect(0)), [""; 0], "not a pattern");
    assert_eq!(names(&run(&db, &["ls", "--json"]).await.expect(0)).len(), 6);
    let ended = run(&db, &["ls", "job/"]).await.expect(0);
    assert_eq!(ended.stdout.lines().count(), 3, "{}", ended.stdout);
    locks.shutdown().await.expect("shutdown");
}

#[tokio::test]
async fn watch_repeats_the_list_until_interrupted() {
    let db = empty().await;
    let locks = beside(&db).await;
    let mut watching = Running::start(sqlock(&db, &["ls", "--watch", "--json"]));
    assert_eq!(watching.prints("").await, "[]\n");
    let lease = locks.lease("job").ttl(LONG).acquire().await.expect("acquire");
    let line = watching.prints("\"job\"").await;
    assert_eq!(serde_json::from_str::<Value>(&line).expect("a line is an array")[0]["name"], "job");
    lease.release().await.expect("ours to the end");
    loop {
        if watching.prints("").await == "[]\n" {
            break;
        }
    }
    watching.signal(Signal::INT);
    let ended = watching.end().await.expect(130);
    assert_eq!(ended.stderr, "");

    let mut table = Running::start(sqlock(&db, &["ls", "--watch"]));
    for _ in 0..2 {
        assert!(table.prints("NAME").await.starts_with("NAME  HOLDER"));
    }
    table.signal(Signal::TERM);
    assert_harmless(&table.end().await.expect(143).stdout);
}

/// The exit code of a program that SIGPIPE ended: 128 + 13.
const SIGPIPE: i32 = 141;

#[tokio::test]
async fn closed_stdout_ends_command_silently() {
    let db = empty().await;
    let mut watching = Running::start(sqlock(&db, &["ls", "--watch"]));
    watching.prints("NAME").await;
    watching.close_stdout();
    assert_eq!(watching.end().await.expect(SIGPIPE).stderr, "");

    // As `sqlock ls | head -1`.
    for arguments in [&["ls"][..], &["ls", "--json"], &["show", "job"], &["schema"], &["man"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = sqlock(&db, arguments);
        let child = command.stdout(writer).stderr(Stdio::piped()).spawn().expect("sqlock can be started");
        drop(command);
        let output = soon("the end of sqlock", child.wait_with_output()).await.expect("its end");
        assert_eq!(output.status.code(), Some(SIGPIPE), "{arguments:?}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{arguments:?}");
    }
}

#[tokio::test]
async fn signal_ends_ls_whose_reader_stops_reading() {
    let db = empty().await;
    let locks = beside(&db).await;
    // JSON shows the character as six others, so a pipe is too short for the list.
    let label = "\u{1}".repeat(255);
    let mut leases = Vec::new();
    for i in 0..48 {
        let request = locks.lease(format!("job/{i}")).ttl(LONG).label(label.as_str());
        leases.push(request.acquire().await.expect("acquire"));
    }
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        for arguments in [&["ls", "--json"][..], &["ls", "--json", "--watch"]] {
            let mut listing = start(sqlock(&db, arguments));
            let pid = listing.id().and_then(|pid| Pid::from_raw(pid.cast_signed())).expect("it was not waited for");
            let mut unread = listing.stdout.take().expect("a pipe was asked for");
            soon("the beginning of the list", unread.read_u8()).await.expect("a byte");
            kill_process(pid, signal).expect("it can be sent a signal");
            let status = soon("the end of ls", listing.wait()).await.expect("it can be waited for");
            assert_eq!(status.code(), Some(code), "{arguments:?}");
        }
    }
    locks.shutdown().await.expect("shutdown");
}

#[tokio::test]
async fn show_prints_every_detail_of_a_name() {
    let db = empty().await;
    let locks = beside(&db).await;
    assert_eq!(run(&db, &["show", "job"]).await.expect(0).stdout, "\"job\" is free\n");
    let free = parse(&run(&db, &["show", "--json", "job"]).await.expect(0));
    assert_eq!((&free["name"], &free["token"], &free["note"]), (&"job".into(), &Value::Null, &Value::Null));

    let lease = locks.lease("job").ttl(LONG).label("deploy 42").acquire().await.expect("acquire");
    lease.set_note("step 2\nof 3").await.expect("note");
    let ended = run(&db, &["show", "job"]).await.expect(0);
    let value = |key: &str| {
        let line = ended.stdout.lines().find_map(|line| line.strip_prefix(key));
        line.unwrap_or_else(|| panic!("no {key}: {}", ended.stdout)).trim().to_owned()
    };
    let info = held(&locks, "job").await.expect("held");
    assert_eq!(value("name"), "job");
    assert_eq!(value("holder"), info.holder);
    assert_eq!(value("label"), "deploy 42");
    assert_eq!(value("note"), "step 2\\nof 3");
    assert_eq!(value("owner"), lease.owner().to_string());
    assert_eq!(value("token"), lease.token().to_string());
    assert!(value("acquired at").ends_with(" ago)"), "{}", ended.stdout);
    assert!(value("expires at").contains("unless it is renewed"), "{}", ended.stdout);

    let mut shown = parse(&run(&db, &["show", "--json", "job"]).await.expect(0));
    let mut listed = parse(&run(&db, &["ls", "--json"]).await.expect(0));
    let shown = shown.as_object_mut().expect("an object");
    for more in ["other_holders", "queue"] {
        assert_eq!(shown.remove(more), Some(Value::Array(Vec::new())), "nobody else");
    }
    let listed = listed[0].as_object_mut().expect("an object");
    // A heartbeat in between moves it.
    for object in [&mut *shown, &mut *listed] {
        assert!(object.remove("expires_at").is_some_and(|at| at.is_string()));
    }
    assert_eq!(shown, listed, "the object that ls has for it");
    assert_eq!(shown["note"], "step 2\nof 3");
    lease.release().await.expect("ours to the end");
    let ended = run(&db, &["show", "job"]).await.expect(0);
    assert_eq!(ended.stdout, "\"job\" is free\nlast note    step 2\\nof 3\n");
    let free = parse(&run(&db, &["show", "--json", "job"]).await.expect(0));
    assert_eq!((&free["token"], &free["note"]), (&Value::Null, &"step 2\nof 3".into()));
}

#[tokio::test]
async fn ls_and_show_include_all_holders_and_waiters() {
    let db = empty().await;
    let clients = ["one/1", "two/2", "three/3", "four/4"];
    let mut all = Vec::new();
    for holder in clients {
        let locks = builder(db.of_the_command().pool_of(2).await).holder(holder).build();
        locks.migrate().await.expect("migrate");
        all.push(locks);
    }
    let [one, two, three, four] = all.as_slice() else { unreachable!("there are four") };
    let permit = one.semaphore("job", 3).ttl(LONG).label("first").acquire().await.expect("acquire");
    let permits = two.semaphore("job", 3).ttl(LONG).acquire_many(2).await.expect("acquire");
    let alone = tokio::spawn(three.lease("job").label("alone").acquire());
    until_waiters(one, "job", 1).await;
    let shared = tokio::spawn(four.lease("job").shared().acquire());
    until_waiters(one, "job", 2).await;

    let ended = run(&db, &["ls"]).await.expect(0);
    let lines: Vec<Vec<&str>> = ended.stdout.lines().map(|line| line.split("  ").collect()).collect();
    let cells = |line: usize| -> Vec<&str> {
        let cells = lines[line].iter().map(|cell| cell.trim()).filter(|cell| !cell.is_empty());
        cells.take(4).collect()
    };
    assert_eq!(lines.len(), 3, "{}", ended.stdout);
    assert_eq!(cells(0), ["NAME", "HOLDER", "MODE", "WAITERS"]);
    assert_eq!(cells(1), ["job", "one/1", "1 permit", "2"]);
    assert_eq!(cells(2), ["job", "two/2", "2 permits", "2"]);

    let listed = parse(&run(&db, &["ls", "--json"]).await.expect(0));
    let told =
        |row: &Value| (row["mode"].clone(), row["permits"].clone(), row["waiters"].clone(), row["token"].clone());
    assert_eq!(told(&listed[0]), ("permits".into(), 1.into(), 2.into(), permit.token().get().into()));
    assert_eq!(told(&listed[1]), ("permits".into(), 2.into(), 2.into(), permits.token().get().into()));

    let ended = run(&db, &["show", "job"]).await.expect(0);
    let blocks: Vec<&str> = ended.stdout.split("\n\n").collect();
    let [first, second, line] = blocks.as_slice() else { panic!("{}", ended.stdout) };
    assert!(first.contains("one/1") && first.contains("1 permit\n") && first.contains("first"), "{first}");
    assert!(second.contains("two/2") && second.contains("2 permits\n"), "{second}");
    let waiters: Vec<&str> = line.lines().collect();
    assert_eq!(waiters.len(), 3, "{line}");
    assert!(waiters[1].starts_with("1         three/3  exclusive  2") && waiters[1].ends_with("  alone"), "{line}");
    assert!(waiters[2].starts_with("2         four/4   shared     2"), "{line}");

    let shown = parse(&run(&db, &["show", "--json", "job"]).await.expect(0));
    assert_eq!(shown["holder"], "one/1");
    let others = shown["other_holders"].as_array().expect("an array");
    assert_eq!(others.iter().map(told).collect::<Vec<_>>(), [told(&listed[1])]);
    let waiting = one.waiters("job").await.expect("waiters");
    let row = |i: usize| &shown["queue"][i];
    for (i, (holder, mode, label)) in
        [("three/3", "exclusive", "alone"), ("four/4", "shared", "")].into_iter().enumerate()
    {
        assert_eq!(row(i)["position"], i + 1);
        assert_eq!((&row(i)["holder"], &row(i)["mode"]), (&holder.into(), &mode.into()));
        assert_eq!((&row(i)["label"], &row(i)["permits"]), (&label.into(), &Value::Null));
        let since = DateTime::parse_from_rfc3339(row(i)["since"].as_str().expect("a text")).expect("RFC 3339");
        assert_eq!(since.timestamp_millis(), waiting[i].since.timestamp_millis());
    }
    assert_eq!(row(2), &Value::Null);

    permit.release().await.expect("ours to the end");
    permits.release().await.expect("ours to the end");
    let alone = soon("its turn", alone).await.expect("no panic").expect("acquire");
    assert_eq!(parse(&run(&db, &["ls", "--json"]).await.expect(0))[0]["waiters"], 1);
    alone.release().await.expect("ours to the end");
    let shared = soon("its turn", shared).await.expect("no panic").expect("acquire");
    let listed = parse(&run(&db, &["ls", "--json"]).await.expect(0));
    assert_eq!((&listed[0]["mode"], &listed[0]["waiters"]), (&"shared".into(), &0.into()));
    shared.release().await.expect("ours to the end");
}

#[tokio::test]
async fn show_tells_that_released_name_stays_taken() {
    let db = empty().await;
    run(&db, &["run", "--hold-at-least", "10m", "job", "--", "true"]).await.expect(0);
    let ended = run(&db, &["show", "job"]).await.expect(0);
    assert!(ended.stdout.contains("released; the name stays taken"), "{}", ended.stdout);
    assert_eq!(parse(&run(&db, &["show", "--json", "job"]).await.expect(0))["owner"], Value::Null);
    let ended = run(&db, &["run", "-n", "job", "--", "true"]).await.expect(75);
    assert!(
        ended.stderr.contains("released by") && ended.stderr.contains("stays taken for another"),
        "{}",
        ended.stderr
    );
}

#[tokio::test]
async fn unlock_requires_the_token_of_the_lease() {
    let db = empty().await;
    let locks = beside(&db).await;
    let lease = locks.lease("job").ttl(LONG).label("the holder").acquire().await.expect("acquire");
    for wrong in [1, lease.token().get() - 1, lease.token().get() + 1] {
        let ended = run(&db, &["unlock", "job", "--token", &wrong.to_string()]).await.expect(79);
        assert!(ended.stderr.contains("the holder"), "it says who holds it: {}", ended.stderr);
        assert!(ended.stderr.contains(&lease.token().to_string()), "and by which token: {}", ended.stderr);
    }
    assert_eq!(held(&locks, "job").await.expect("held").token, lease.token());
    let ended = run(&db, &["unlock", "job", "--token", &lease.token().to_string()]).await.expect(0);
    assert_eq!((&*ended.stdout, &*ended.stderr), ("", "sqlock: \"job\" is free\n"));
    assert_eq!(held(&locks, "job").await, None);
    run(&db, &["unlock", "job", "--token", &lease.token().to_string()]).await.expect(79);
    run(&db, &["run", "-n", "job", "--", "true"]).await.expect(0);
}

#[tokio::test]
async fn sweep_purges_free_names_and_keeps_held_ones() {
    let db = empty().await;
    let locks = beside(&db).await;
    let lease = locks.lease("held").ttl(LONG).acquire().await.expect("acquire");
    for name in ["free/1", "free/2"] {
        locks.lease(name).acquire().await.expect("acquire").release().await.expect("release");
    }
    assert_eq!(run(&db, &["sweep"]).await.expect(0).stdout, "purged 0 names and requests\n", "an hour has not passed");
    // The database's clock counts microseconds, and the releases are behind it.
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(run(&db, &["sweep", "--retention", "0s"]).await.expect(0).stdout, "purged 2 names and requests\n");
    assert_eq!(run(&db, &["sweep", "--retention", "0s"]).await.expect(0).stdout, "purged 0 names and requests\n");
    lease.release().await.expect("ours to the end");
}

async fn hold_nasty(locks: &Locks) -> sqlock::Lease {
    locks.lease(NASTY).ttl(LONG).label(NASTY).acquire().await.expect("acquire")
}

#[tokio::test]
async fn control_characters_never_reach_the_terminal() {
    let db = empty().await;
    let locks = builder(db.of_the_command().pool_of(2).await).holder(NASTY).build();
    locks.migrate().await.expect("migrate");
    let lease = hold_nasty(&locks).await;

    let ended = run(&db, &["ls"]).await.expect(0);
    assert_harmless(&ended.stdout);
    assert_eq!(ended.stdout.lines().count(), 2, "a row is a line: {}", ended.stdout);
    let ended = run(&db, &["show", NASTY]).await.expect(0);
    assert_harmless(&ended.stdout);
    assert_eq!(ended.stdout.lines().count(), 8, "a value is a line: {}", ended.stdout);

    for arguments in [&["ls", "--json"][..], &["show", "--json", NASTY]] {
        let ended = run(&db, arguments).await.expect(0);
        assert_harmless(&ended.stdout);
        let shown = parse(&ended);
        let shown = shown.get(0).unwrap_or(&shown);
        for key in ["name", "label", "holder"] {
            assert_eq!(shown[key], NASTY, "nothing is lost");
        }
    }

    for (code, arguments) in [
        (75, &["run", "-n", NASTY, "--", "true"][..]),
        (75, &["acquire", "-w", "4s", NASTY]),
        (79, &["unlock", NASTY, "--token", "1"]),
        (79, &["renew", NASTY, "--token", "1"]),
        (64, &["renew", NASTY, "--token", NASTY]),
        (64, &["show", &NASTY.repeat(20)]),
        (64, &[NASTY]),
        (127, &["run", "job", "--", NASTY]),
        (78, &["ls", "-D", NASTY]),
        (78, &["ls", "-D", &format!("sqlite://{NASTY}/app.db")]),
    ] {
        let ended = run(&db, arguments).await.expect(code);
        assert_harmless(&ended.stderr);
        assert_eq!(ended.stdout, "");
    }
    let mut waiter = Running::start(sqlock(&db, &["run", NASTY, "--", "true"]));
    assert_harmless(&waiter.says("waiting for").await);
    let token = lease.token().to_string();
    let ended = run(&db, &["unlock", NASTY, "--token", &token]).await.expect(0);
    assert_harmless(&ended.stderr);
    assert_harmless(&waiter.end().await.expect(0).stderr);

    let ended = run(&db, &["acquire", NASTY]).await.expect(0);
    assert_harmless(&ended.stdout);
    assert_eq!(parse(&ended)["name"], NASTY);
}
