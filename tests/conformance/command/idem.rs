//! `sqlock idem`: lists and shows records, and resolves no record by mistake.

use std::time::Duration;

use serde_json::Value;
use sqlock::idempotency::{Attempt, Fingerprint, Idempotency, IdempotencyKey, Outcome};
use sqlock::{Error, Locks};
use sqlx::{AssertSqlSafe, Pool};

use super::super::fence::run as execute;
use crate::support::command::{Ended, run, sqlock};
use crate::support::{Database, TestDatabase, builder, empty, fresh, soon, until};
use crate::{DATABASE, Sql};

const HOUR: Duration = Duration::from_secs(3600);

/// A database of an application that takes requests. On SQLite, that is not the file with the
/// command's leases.
struct App {
    db: TestDatabase,
    pool: Pool<Sql>,
    locks: Locks,
    payments: Idempotency,
}

async fn app() -> App {
    let db = fresh().await;
    let pool = db.pool().await;
    let locks = builder(pool.clone()).holder("the machine/7").build();
    let payments = Idempotency::new(&locks).namespace("payments");
    App { db, pool, locks, payments }
}

fn alice(key: &str) -> IdempotencyKey {
    IdempotencyKey::new("alice", key)
}

fn request() -> Fingerprint {
    Fingerprint::of(["charge"])
}

impl App {
    /// Completes a request in a transaction.
    async fn done(&self, by: &Idempotency, key: &IdempotencyKey) {
        let done = by.run(&self.pool, key, &request(), async |_| Ok::<_, Error>(1)).await.expect("run");
        assert!(matches!(done, Outcome::New(_)), "{done:?}");
    }

    /// Begins an attempt.
    async fn attempt(&self, key: &IdempotencyKey) -> Attempt {
        match self.payments.attempt(key, &request()).await.expect("attempt") {
            Outcome::New(attempt) => attempt,
            other => panic!("{other:?}"),
        }
    }

    /// Ends an attempt with an unknown outcome, and returns its token.
    async fn unknown(&self, key: &IdempotencyKey) -> String {
        let attempt = self.attempt(key).await;
        attempt.unknown().await.expect("unknown");
        let token = attempt.token().to_string();
        self.leave(attempt, key).await;
        token
    }

    /// Leaves an attempt as if its process had died and its lease had ended.
    async fn leave(&self, attempt: Attempt, key: &IdempotencyKey) {
        let lease = self.payments.inspect(key).await.expect("inspect").expect("a record").lease;
        assert!(self.locks.inspect(&lease).await.expect("inspect").is_some(), "it holds its lease under this name");
        drop(attempt);
        until("the end of its lease", async || self.locks.inspect(&lease).await.expect("inspect").is_none()).await;
    }

    async fn state(&self, key: &IdempotencyKey) -> Option<&'static str> {
        self.payments.inspect(key).await.expect("inspect").map(|record| record.state.as_str())
    }

    async fn count(&self) -> i64 {
        sqlx::query_scalar("SELECT count(*) FROM sqlock_idem").fetch_one(&self.pool).await.expect("count")
    }

    async fn idem(&self, arguments: &[&str]) -> Ended {
        run(&self.db, &[&["idem"], arguments].concat()).await
    }

    async fn json(&self, arguments: &[&str]) -> Value {
        let ended = self.idem(&[arguments, &["--json"]].concat()).await.expect(0);
        serde_json::from_str(&ended.stdout).expect("JSON")
    }

    async fn keys(&self, arguments: &[&str]) -> Vec<String> {
        let listed = self.json(&[&["ls"], arguments].concat()).await;
        let rows = listed.as_array().expect("an array").iter();
        rows.map(|row| row["key"].as_str().expect("a text").to_owned()).collect()
    }
}

#[tokio::test]
async fn ls_shows_state_and_holder_of_each_request() {
    let app = app().await;
    let heading = "NAMESPACE  PRINCIPAL  KEY  STATE  ATTEMPTS  TOKEN  CREATED AT  EXPIRES AT  WHO\n";
    assert_eq!(app.idem(&["ls"]).await.expect(0).stdout, heading);
    assert_eq!(app.json(&["ls"]).await, Value::Array(Vec::new()));

    let events = Idempotency::new(&app.locks).namespace("events");
    app.done(&events, &IdempotencyKey::global("evt_1")).await;
    let token = app.unknown(&alice("order-1")).await;
    let attempt = app.attempt(&alice("order-2")).await;
    let issued = app.payments.issue("bob", HOUR).await.expect("issue");

    let listed = app.json(&["ls"]).await;
    let rows = listed.as_array().expect("an array");
    let known = ["attempts", "created_at", "expires_at", "holder", "key", "namespace", "principal", "state", "token"];
    assert_eq!(rows[0].as_object().expect("an object").keys().collect::<Vec<_>>(), known);
    // In order of creation, but SQLite's clock may have made some of them at the same moment.
    let row = |key: &str| rows.iter().find(|row| row["key"] == key).unwrap_or_else(|| panic!("{key}: {listed}"));
    let done = row("evt_1");
    assert_eq!((&done["namespace"], &done["principal"]), (&"events".into(), &Value::Null));
    assert_eq!((&done["state"], &done["token"], &done["attempts"]), (&"done".into(), &Value::Null, &0.into()));
    let unknown = row("order-1");
    assert_eq!((&unknown["namespace"], &unknown["principal"]), (&"payments".into(), &"alice".into()));
    assert_eq!((&unknown["state"], &unknown["attempts"]), (&"unknown".into(), &1.into()));
    assert_eq!(unknown["token"].to_string(), token);
    assert_eq!((&unknown["expires_at"], &unknown["holder"]), (&Value::Null, &Value::Null));
    let started = row("order-2");
    assert_eq!((&started["state"], &started["holder"]), (&"started".into(), &"the machine/7".into()));
    assert_eq!(started["token"], attempt.token().get());
    assert_eq!(row(&issued)["state"], "issued");
    for (key, record) in [
        ("evt_1", events.inspect(&IdempotencyKey::global("evt_1")).await),
        (&issued, { app.payments.inspect(&IdempotencyKey::issued("bob", &issued)).await }),
    ] {
        let record = record.expect("inspect").expect("a record");
        for (shown, time) in [("created_at", record.created_at), ("expires_at", record.expires_at)] {
            let shown = row(key)[shown].as_str().expect("a text");
            let shown = chrono::DateTime::parse_from_rfc3339(shown).expect("RFC 3339");
            assert_eq!(shown.timestamp_millis(), time.timestamp_millis());
        }
    }

    let table = app.idem(&["ls", "--state", "started"]).await.expect(0).stdout;
    let lines: Vec<&str> = table.lines().collect();
    let [heading, row] = lines[..] else { panic!("{table}") };
    assert!(row.starts_with("payments   alice      order-2  started  1         "), "{row}");
    assert!(row.ends_with("  never       the machine/7"), "{row}");
    assert_eq!(row.find("the machine"), heading.find("WHO"), "columns are aligned");

    assert_eq!(app.keys(&["--namespace", "events"]).await, ["evt_1"]);
    assert_eq!(app.keys(&["--namespace", "Events"]).await, [""; 0]);
    assert_eq!(app.keys(&["--state", "done"]).await, ["evt_1"]);
    assert_eq!(app.keys(&["--state", "unknown"]).await, ["order-1"]);
    assert_eq!(app.keys(&["--state", "issued", "--namespace", "payments"]).await, [issued]);
    assert_eq!(app.keys(&["--state", "issued", "--namespace", "events"]).await, [""; 0]);
    app.idem(&["ls", "--state", "lost"]).await.expect(64);
    app.idem(&["ls", "--namespace", ""]).await.expect(64);

    // The record stays, and no attempt is in progress.
    app.leave(attempt, &alice("order-2")).await;
    assert_eq!(app.json(&["ls", "--state", "started"]).await[0]["holder"], Value::Null);
}

#[tokio::test]
async fn ls_reports_when_its_limit_is_reached() {
    let app = app().await;
    for key in ["a", "b", "c"] {
        app.done(&app.payments, &alice(key)).await;
        // For SQLite, whose clock counts milliseconds.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let ended = app.idem(&["ls", "--limit", "2"]).await.expect(0);
    assert_eq!(ended.stdout.lines().count(), 3, "{}", ended.stdout);
    assert_eq!(ended.stderr, "sqlock: only the first 2 are shown: --limit shows more\n");
    assert_eq!(app.keys(&["--limit", "2"]).await, ["a", "b"]);
    let ended = app.idem(&["ls", "--limit", "3"]).await.expect(0);
    assert_eq!((ended.stdout.lines().count(), &*ended.stderr), (4, ""));
    app.idem(&["ls", "--limit", "0"]).await.expect(64);
}

#[tokio::test]
async fn show_prints_one_key_of_one_principal() {
    let app = app().await;
    let key = ["show", "order-1", "--namespace", "payments", "--principal"];
    let of = |who| [&key[..], &[who]].concat();
    assert_eq!(app.idem(&of("alice")).await.expect(0).stdout, "\"order-1\" has no record\n");
    assert_eq!(app.json(&of("alice")).await, Value::Null);

    let attempt = app.attempt(&alice("order-1")).await;
    attempt.step("reserve", async || Ok::<_, Error>(1)).await.expect("step");
    let shown = app.json(&of("alice")).await;
    assert_eq!(shown["request_bytes"], Value::Null);
    assert_eq!((&shown["state"], &shown["holder"]), (&"started".into(), &"the machine/7".into()));
    assert_eq!((&shown["result_bytes"], &shown["steps"]), (&Value::Null, &Value::from(vec!["reserve"])));
    let text = app.idem(&of("alice")).await.expect(0).stdout;
    assert!(text.contains("state        started: held by the machine/7\n"), "{text}");
    assert!(text.contains("steps done   reserve\n") && text.contains("result       none\n"), "{text}");
    attempt.complete(&"receipt").await.expect("complete");
    let shown = app.json(&of("alice")).await;
    // The lease of the attempt may still exist.
    assert_eq!((&shown["state"], &shown["holder"]), (&"done".into(), &Value::Null));
    assert_eq!(shown["result_bytes"], r#""receipt""#.len());

    assert_eq!(shown["resolutions"], Value::Array(Vec::new()));

    // Shows that a request is stored, but not its content.
    let stored = request().with_request("card 4242");
    let attempt = app.payments.attempt(&alice("order-2"), &stored).await.expect("attempt");
    let of_two = ["show", "order-2", "--namespace", "payments", "--principal", "alice"];
    assert_eq!(app.json(&of_two).await["request_bytes"], "card 4242".len());
    let text = app.idem(&of_two).await.expect(0).stdout;
    assert!(text.contains("request      9 bytes\n") && !text.contains("4242"), "{text}");
    drop(attempt);

    // A key of another principal, a global key, and a key in another namespace are different keys.
    assert_eq!(app.json(&of("bob")).await, Value::Null);
    assert_eq!(app.json(&["show", "order-1", "--namespace", "payments", "--global"]).await, Value::Null);
    assert_eq!(app.json(&["show", "order-1", "--principal", "alice"]).await, Value::Null);
    app.done(&Idempotency::new(&app.locks), &IdempotencyKey::global("evt_1")).await;
    assert_eq!(app.json(&["show", "evt_1", "--global"]).await["state"], "done", "in the default namespace");
    // The principal must be given, and only once.
    app.idem(&["show", "order-1"]).await.expect(64);
    app.idem(&["show", "order-1", "--global", "--principal", "alice"]).await.expect(64);
    app.idem(&["show", "", "--global"]).await.expect(64);
}

#[tokio::test]
async fn resolve_requires_the_token_of_latest_attempt() {
    let app = app().await;
    let resolve_for = async |principal: &[&str], key: &str, token: &str, code: i32| {
        let rest = ["--namespace", "payments", "--failed", "--token", token];
        app.idem(&[&["resolve", key], principal, &rest].concat()).await.expect(code).stderr
    };
    let resolve =
        async |key: &str, token: &str, code: i32| resolve_for(&["--principal", "alice"], key, token, code).await;
    assert!(resolve("order-1", "17", 79).await.contains("it has no record"));
    let token = app.unknown(&alice("order-1")).await;
    let latest = format!("it is unknown, by token {token}");
    assert!(resolve("order-1", "17", 79).await.contains(&latest));
    assert_eq!(app.state(&alice("order-1")).await, Some("unknown"));
    // The key of another principal is a different key.
    resolve_for(&["--principal", "bob"], "order-1", &token, 79).await;
    resolve_for(&["--global"], "order-1", &token, 79).await;
    assert_eq!(app.state(&alice("order-1")).await, Some("unknown"));

    assert_eq!(resolve("order-1", &token, 0).await, "sqlock: \"order-1\" is new again\n");
    assert_eq!(app.state(&alice("order-1")).await, None);
    assert_eq!(app.attempt(&alice("order-1")).await.number(), 1);

    // A done request stays, and so does an unused token.
    app.done(&app.payments, &alice("order-2")).await;
    assert!(resolve("order-2", "17", 79).await.contains("it is done"));
    let attempt = app.attempt(&alice("order-3")).await;
    attempt.complete(&()).await.expect("complete");
    assert!(resolve("order-3", &attempt.token().to_string(), 79).await.contains("it is done"));
    let issued = app.payments.issue("alice", HOUR).await.expect("issue");
    assert!(resolve(&issued, "17", 79).await.contains("it is not used yet"));
    for key in [alice("order-2"), alice("order-3")] {
        assert_eq!(app.state(&key).await, Some("done"));
    }
    assert_eq!(app.state(&alice(&issued)).await, Some("issued"));
}

#[tokio::test]
async fn resolve_spares_newer_attempt_in_progress() {
    let app = app().await;
    let stale = app.unknown(&alice("order-1")).await;
    let resolve = ["resolve", "order-1", "--namespace", "payments", "--principal", "alice", "--failed", "--token"];
    // Another attempt has resumed it since the operator read the record.
    let at_work = std::sync::Arc::new(tokio::sync::Notify::new());
    let (payments, entered) = (app.payments.clone(), at_work.clone());
    let resuming = tokio::spawn(async move {
        let work = async |attempt: &Attempt| {
            entered.notify_one();
            let _ = attempt;
            std::future::pending::<Result<(), Error>>().await
        };
        payments.resume(work).await.map(|_| ())
    });
    soon("the attempt", at_work.notified()).await;
    app.idem(&[&resolve[..], &[&stale]].concat()).await.expect(79);
    let record = app.payments.inspect(&alice("order-1")).await.expect("inspect").expect("a record");
    let latest = record.token.expect("a token").to_string();
    let said = app.idem(&[&resolve[..], &[&latest]].concat()).await.expect(79).stderr;
    assert!(said.contains("its attempt is in progress"), "{said}");
    let kept = app.payments.inspect(&alice("order-1")).await.expect("inspect").expect("a record");
    assert_eq!((kept.state.as_str(), kept.attempts, kept.token), ("started", 2, record.token));
    resuming.abort();
}

#[tokio::test]
async fn resolve_ends_unknown_outcome_and_show_names_operator() {
    let app = app().await;
    let of = ["--namespace", "payments", "--principal", "alice"];
    let resolve = async |key: &str, token: &str, rest: &[&str], code: i32| {
        let arguments = [&["resolve", key, "--token", token][..], &of, rest].concat();
        app.idem(&arguments).await.expect(code).stderr
    };
    let show = async |key: &str| app.json(&[&["show", key][..], &of].concat()).await;

    let token = app.unknown(&alice("order-1")).await;
    let newer = (token.parse::<i64>().expect("a number") + 1).to_string();
    let said = resolve("order-1", &newer, &["--done", "--result", "1"], 79).await;
    assert!(said.contains(&format!("does not resolve \"order-1\": it is unknown, by token {token}")), "{said}");
    // A number with more digits than a float has.
    let receipt = "12345678901234567890123.50";
    let found = ["--done", "--result", receipt, "--by", "ann", "--note", "charge ch_1"];
    assert_eq!(resolve("order-1", &token, &found, 0).await, "sqlock: \"order-1\" is done\n");
    let shown = show("order-1").await;
    let resolution = &shown["resolutions"][0];
    assert_eq!((&shown["state"], &shown["result_bytes"]), (&"done".into(), &receipt.len().into()));
    assert_eq!((&resolution["outcome"], &resolution["by"]), (&"done".into(), &"ann".into()));
    assert_eq!((&resolution["note"], resolution["token"].to_string()), (&"charge ch_1".into(), token.clone()));
    let text = app.idem(&[&["show", "order-1"][..], &of].concat()).await.expect(0).stdout;
    assert!(text.contains("resolved     done by ann, "), "{text}");
    assert!(text.ends_with(&format!(", token {token}: charge ch_1\n")), "{text}");
    assert!(resolve("order-1", &token, &["--failed"], 79).await.contains("it is done"));

    let token = app.unknown(&alice("order-2")).await;
    assert_eq!(resolve("order-2", &token, &["--failed"], 0).await, "sqlock: \"order-2\" is new again\n");
    assert_eq!(app.state(&alice("order-2")).await, None);
    let shown = show("order-2").await;
    assert_eq!((&shown["state"], &shown["resolutions"][0]["outcome"]), (&Value::Null, &"failed".into()));
    assert!(shown["resolutions"][0]["by"].as_str().is_some_and(|by| by.contains('@')), "{shown}");

    // An attempt in progress cannot be resolved.
    let attempt = app.attempt(&alice("order-3")).await;
    let token = attempt.token().to_string();
    assert!(resolve("order-3", &token, &["--done", "--result", "1"], 79).await.contains("its attempt is in progress"));
    assert!(resolve("order-4", "17", &["--done", "--result", "1"], 79).await.contains("it has no record"));
    // The last text cannot be read as a string.
    for wrong in [
        "",
        "--done",
        "--done --failed --result 1",
        "--failed --result 1",
        "--done --result {",
        "--done --result \"\\ud800\"",
    ] {
        let wrong: Vec<&str> = wrong.split_whitespace().collect();
        resolve("order-3", &token, &wrong, 64).await;
    }
    assert_eq!(app.state(&alice("order-3")).await, Some("started"));
}

#[tokio::test]
async fn purge_takes_only_what_has_expired() {
    let app = app().await;
    for key in ["old/1", "old/2", "new"] {
        app.done(&app.payments, &alice(key)).await;
    }
    app.unknown(&alice("unknown")).await;
    let attempt = app.attempt(&alice("started")).await;
    for _ in 0..2 {
        app.payments.issue("alice", HOUR).await.expect("issue");
    }
    assert_eq!(app.idem(&["purge"]).await.expect(0).stdout, "purged 0 requests\n");
    assert_eq!(app.count().await, 7);
    execute(&app.pool, "UPDATE sqlock_idem SET expires_at = 1 WHERE request_key <> 'new'").await;
    assert_eq!(app.idem(&["purge"]).await.expect(0).stdout, "purged 4 requests\n");
    assert_eq!(app.count().await, 3);
    for (key, state) in [("new", "done"), ("unknown", "unknown"), ("started", "started")] {
        assert_eq!(app.state(&alice(key)).await, Some(state));
    }
    attempt.complete(&()).await.expect("it was not touched");
    assert_eq!(app.idem(&["purge"]).await.expect(0).stdout, "purged 0 requests\n", "its result is kept from now on");
    execute(&app.pool, "UPDATE sqlock_idem SET expires_at = 1 WHERE request_key <> 'new'").await;
    assert_eq!(app.idem(&["purge"]).await.expect(0).stdout, "purged 1 requests\n", "it has ended, and is old");
}

/// `idem` reads the application's own file, and creates nothing there.
#[tokio::test]
async fn idem_makes_neither_tables_nor_files() {
    let db = empty().await;
    let key = ["k", "--global"];
    let look = async || {
        for (arguments, code) in [
            (&["ls"][..], 0),
            (&["show", key[0], key[1]], 0),
            (&["resolve", key[0], key[1], "--token", "1", "--done", "--result", "1"], 79),
            (&["purge"], 0),
        ] {
            run(&db, &[&["idem"], arguments].concat()).await.expect(code);
        }
    };
    look().await;
    if DATABASE == Database::Sqlite {
        for url in [&db.url, &db.of_the_command().url] {
            let file = url.replace("sqlite://", "").replace("?mode=rwc", "");
            assert!(!std::fs::exists(&file).expect("it can be looked for"), "{file}");
        }
    }
    // With a table of the application, and none of this crate.
    let pool = db.pool().await;
    execute(&pool, "CREATE TABLE counter (id INTEGER NOT NULL PRIMARY KEY)").await;
    look().await;
    let ours = sqlx::query(AssertSqlSafe("SELECT count(*) FROM sqlock_idem".to_owned())).fetch_one(&pool).await;
    assert!(ours.is_err(), "it has made tables");
    if DATABASE == Database::Sqlite {
        let file = db.of_the_command().url.replace("sqlite://", "").replace("?mode=rwc", "");
        assert!(!std::fs::exists(&file).expect("it can be looked for"), "{file}");
    }
}

#[tokio::test]
async fn control_characters_of_keys_are_escaped() {
    let app = app().await;
    let nasty = "a\u{1b}[31mb\u{1b}]0;title\u{7}c\u{9b}31md\u{7f}e\r\nf\u{8}";
    let by = Idempotency::new(&app.locks).namespace(nasty);
    app.done(&by, &IdempotencyKey::new(nasty, nasty)).await;
    let of = [nasty, "--namespace", nasty, "--principal", nasty];
    for arguments in [
        &["ls"][..],
        &["ls", "--json"],
        &[&["show"], &of[..]].concat(),
        &[&["show", "--json"], &of[..]].concat(),
        &[&["resolve", "--failed", "--token", "17"], &of[..]].concat(),
    ] {
        let mut command = sqlock(&app.db, &["idem"]);
        command.args(arguments);
        let ended = crate::support::command::end(command).await;
        let said = [ended.stdout, ended.stderr].concat();
        assert!(!said.chars().any(|c| c.is_control() && c != '\n'), "{said:?}");
        assert!(said.contains("title"), "{said:?}");
    }
    assert_eq!(app.json(&[&["show"], &of[..]].concat()).await["key"], nasty, "JSON has the text itself");
}
