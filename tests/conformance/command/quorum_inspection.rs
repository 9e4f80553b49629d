//! `sqlock doctor --quorum` and `sqlock show --quorum`: several databases checked and shown as one.

use serde_json::Value;

use super::quorum::{LeaseFile, Three, fresh_for_the_command, json, make_old};
use crate::DATABASE;
use crate::conformance::schema::Restricted;
use crate::support::command::{ClosedPort, Ended, bare, beside, end, path, run};
use crate::support::{Database, LONG, empty};

// ---- doctor

/// The reports of `doctor --quorum`. The last one is about the databases together.
struct Reports(Vec<Value>);

impl Reports {
    /// Runs `doctor --quorum` on these databases and expects this exit code.
    async fn of(urls: &[&str], code: i32) -> Self {
        let ended = end(bare(&["-D", &urls.join(","), "doctor", "--quorum", "--json"])).await.expect(code);
        let Value::Array(reports) = json(&ended) else { panic!("{}", ended.stdout) };
        assert_eq!(reports.len(), urls.len() + 1, "{}", ended.stdout);
        for (i, report) in reports[..urls.len()].iter().enumerate() {
            let name = format!("database {} of {} (", i + 1, urls.len());
            assert!(report["database"].as_str().is_some_and(|database| database.starts_with(&name)), "{report}");
        }
        assert_eq!(reports[urls.len()]["database"], format!("a majority of {} databases", urls.len()));
        assert_eq!(reports.iter().all(|report| report["ok"] == true), code == 0, "{}", ended.stdout);
        Self(reports)
    }

    /// Fails the test unless a check of a report has this status, and a finding with these words.
    #[track_caller]
    fn assert(&self, report: usize, name: &str, status: &str, words: &[&str]) -> &Self {
        let checks = self.0[report]["checks"].as_array().expect("checks");
        let check = checks.iter().find(|check| check["check"] == name).unwrap_or_else(|| panic!("no {name}"));
        assert_eq!(check["status"], status, "{check}");
        let found = check["found"].as_str().expect("a text");
        assert!(words.iter().all(|words| found.contains(words)), "{words:?}: {check}");
        assert!(status == "ok" || check["advice"].is_string(), "no advice: {check}");
        self
    }
}

#[tokio::test]
async fn doctor_passes_three_healthy_databases() {
    let (one, two, three) =
        (fresh_for_the_command().await, LeaseFile::with_tables().await, LeaseFile::with_tables().await);
    let reports = Reports::of(&[&one.url, &two.url, &three.url], 0).await;
    let found = "3 of 3 databases answer, 3 can vote, and 2 make a majority";
    reports.assert(3, "majority", "ok", &[found]).assert(3, "servers", "ok", &[]);
    reports.assert(3, "age", "ok", &["the default TTL, 30s"]).assert(3, "versions", "ok", &["the same version"]);
    if DATABASE != Database::Sqlite {
        reports.assert(1, "clocks", "ok", &["database 1 of 3"]);
    }
    // The same as text.
    let urls = format!("{},{},{}", one.url, two.url, three.url);
    let text = end(bare(&["-D", &urls, "doctor", "--quorum"])).await.expect(0).stdout;
    let headings: Vec<&str> = text.lines().filter(|line| !line.starts_with(' ') && !line.is_empty()).collect();
    let [_, _, third, together] = headings[..] else { panic!("{text}") };
    assert!(third.starts_with("database 3 of 3 (SQLite, the file "), "{third}");
    assert_eq!(together, "a majority of 3 databases");
    assert!(text.lines().any(|line| line.split_whitespace().take(2).eq(["ok", "majority"])), "{text}");
}

#[tokio::test]
async fn doctor_warns_of_a_minority_out_of_reach() {
    let (one, two, down) = (fresh_for_the_command().await, LeaseFile::with_tables().await, ClosedPort::reserve());
    let down = format!("postgres://nobody:secret@127.0.0.1:{}/x", down.number());
    let reports = Reports::of(&[&down, &one.url, &two.url], 0).await;
    let found = "2 of 3 databases answer, 2 can vote, and 2 make a majority";
    reports.assert(3, "majority", "warn", &[found, "database 1 of 3 (PostgreSQL at 127.0.0.1:", "out of reach"]);
    reports.assert(0, "reachable", "warn", &["no: "]).assert(2, "reachable", "ok", &[]);
    assert!(reports.0.iter().all(|report| !report.to_string().contains("secret")));
    if DATABASE != Database::Sqlite {
        reports.assert(2, "clocks", "ok", &["database 2 of 3"]);
    }
}

#[tokio::test]
async fn doctor_fails_without_a_majority() {
    let (one, down) = (fresh_for_the_command().await, ClosedPort::reserve());
    let directory = tempfile::tempdir().expect("a temporary directory");
    let missing = path(directory.path(), "sqlock.db");
    let down = format!("mysql://u@127.0.0.1:{}/x", down.number());
    let reports = Reports::of(&[&one.url, &down, &format!("sqlite://{missing}?mode=rwc")], 1).await;
    let found = "1 of 3 databases answer, 1 can vote, and 2 make a majority";
    reports.assert(3, "majority", "fail", &[found, "database 2 of 3", "database 3 of 3"]);
    reports.assert(1, "reachable", "fail", &["no: "]).assert(2, "reachable", "fail", &["no such file"]);
    assert!(!std::fs::exists(&missing).expect("the directory is there"), "nothing is created");
}

#[tokio::test]
async fn doctor_counts_no_database_without_tables() {
    let (lost, two, three) = (empty().await, LeaseFile::with_tables().await, LeaseFile::with_tables().await);
    let reports = Reports::of(&[&lost.url, &two.url, &three.url], 0).await;
    reports.assert(3, "majority", "warn", &["2 can vote", "database 1 of 3"]);
    let check = if DATABASE == Database::Sqlite { "reachable" } else { "tables" };
    reports.assert(0, check, "warn", &["there "]);
    // The database was queried, and not changed.
    run(&lost, &["--no-migrate", "acquire", "job"]).await.expect(78);
}

#[tokio::test]
async fn doctor_refuses_one_server_twice() {
    let (one, other, third) =
        (fresh_for_the_command().await, fresh_for_the_command().await, LeaseFile::with_tables().await);
    // Another database of the same server; on SQLite, the same file.
    let other = if DATABASE == Database::Sqlite { &one } else { &other };
    let reports = Reports::of(&[&one.url, &third.url, &other.url], 1).await;
    reports.assert(3, "servers", "fail", &["database 1 of 3", "database 3 of 3", "on one server"]);
}

#[tokio::test]
async fn doctor_names_tables_younger_than_the_ttl() {
    let (young, two, three) = (empty().await, LeaseFile::with_tables().await, LeaseFile::with_tables().await);
    run(&young, &["migrate"]).await.expect(0);
    let urls = [&*young.url, &two.url, &three.url];
    // The longest TTL is that of a lease on any of the databases.
    let locks = two.locks().await;
    let lease = locks.lease("job").ttl(LONG).acquire().await.expect("acquire");
    let reports = Reports::of(&urls, 0).await;
    reports.assert(3, "age", "warn", &["database 1 of 3", "the longest TTL in use, 10m"]);
    reports.assert(3, "majority", "warn", &["3 of 3 databases answer, 2 can vote", "database 1 of 3"]);
    make_old(&young).await;
    Reports::of(&urls, 0).await.assert(3, "age", "ok", &["10m"]).assert(3, "majority", "ok", &[]);
    lease.release().await.expect("ours to the end");
}

#[tokio::test]
async fn doctor_names_older_tables_than_the_others() {
    let (one, two, three) =
        (fresh_for_the_command().await, LeaseFile::with_tables().await, LeaseFile::with_tables().await);
    let forget = "DELETE FROM _sqlock_migrations WHERE version = (SELECT max(version) FROM _sqlock_migrations)";
    sqlx::query(forget).execute(&two.pool().await).await.expect("the record of the migrations");
    let reports = Reports::of(&[&one.url, &two.url, &three.url], 0).await;
    reports.assert(3, "versions", "warn", &["database 2 of 3", "older"]).assert(1, "tables", "warn", &["not applied"]);
}

/// The library reads the age of the tables there before it counts a vote.
#[tokio::test]
async fn doctor_counts_no_vote_without_migration_record() {
    if DATABASE == Database::Sqlite {
        return; // SQLite has no users.
    }
    let user = Restricted::on(fresh_for_the_command().await).await;
    for table in ["client", "lease", "entry", "note", "row", "idem", "idem_step", "idem_resolution"] {
        user.grant_on("SELECT, INSERT, UPDATE, DELETE", &format!("sqlock_{table}")).await;
    }
    let (two, three) = (LeaseFile::with_tables().await, LeaseFile::with_tables().await);
    let reports = Reports::of(&[&user.url, &two.url, &three.url], 1).await;
    reports.assert(0, "rights", "fail", &["no SELECT on _sqlock_migrations"]);
    reports.assert(3, "majority", "warn", &["2 can vote"]);
    user.drop().await;
}

// ---- show

fn first_line(ended: &Ended) -> &str {
    ended.stdout.lines().next().unwrap_or_default()
}

#[tokio::test]
async fn show_quorum_names_token_and_owner_of_majority() {
    let three = Three::with_one_down().await;
    let acquired =
        json(&three.run(&["acquire", "--quorum", "job", "--ttl", "10m", "--label", "a step"]).await.expect(0));
    let (token, owner) = (acquired["token"].to_string(), acquired["owner"].as_str().expect("an owner"));

    let ended = three.run(&["show", "--quorum", "job"]).await.expect(0);
    let verdict = format!("\"job\" is held by a majority, 2 of 3 databases, with token {token} by ");
    assert!(first_line(&ended).starts_with(&verdict) && first_line(&ended).ends_with(owner), "{}", ended.stdout);
    let lines: Vec<&str> = ended.stdout.lines().skip(2).collect();
    let [heading, one, down, two] = lines[..] else { panic!("{}", ended.stdout) };
    assert!(heading.starts_with("DATABASE "), "{heading}");
    for (i, row) in [(1, one), (3, two)] {
        assert!(row.starts_with(&format!("database {i} of 3 (")), "{row}");
        assert!(row.contains(&token) && row.contains(owner) && row.ends_with("a step"), "{row}");
    }
    assert!(down.starts_with("database 2 of 3 (PostgreSQL at 127.0.0.1:") && down.ends_with("(unknown)"), "{down}");
    assert!(ended.stderr.contains("database 2 of 3") && !ended.stderr.contains("secret"), "{}", ended.stderr);

    let shown = json(&three.run(&["show", "--quorum", "--json", "job"]).await.expect(0));
    assert_eq!((&shown["name"], &shown["state"]), (&Value::from("job"), &Value::from("held")));
    assert_eq!((&shown["majority"]["token"], &shown["majority"]["owner"]), (&acquired["token"], &acquired["owner"]));
    assert_eq!(shown["databases"][0]["holders"][0]["token"], acquired["token"]);
    assert_eq!(shown["databases"][1]["holders"], Value::Null);
}

#[tokio::test]
async fn show_quorum_tells_that_the_holder_has_released() {
    let three = Three::with_one_down().await;
    three.run(&["run", "--quorum", "--hold-at-least", "10m", "job", "--", "true"]).await.expect(0);
    let ended = three.run(&["show", "--quorum", "job"]).await.expect(0);
    let line = first_line(&ended);
    assert!(line.starts_with("\"job\" was released by "), "{line}");
    assert!(line.contains("it stays taken on 2 of 3 databases for another "), "{line}");
}

#[tokio::test]
async fn show_quorum_tells_split_and_free_names_apart() {
    let (one, two, three) =
        (fresh_for_the_command().await, LeaseFile::with_tables().await, LeaseFile::with_tables().await);
    let urls = format!("{},{},{}", one.url, two.url, three.url);
    let show = || end(bare(&["-D", &urls, "show", "--quorum", "job"]));
    let shown_as = async || json(&end(bare(&["-D", &urls, "show", "--quorum", "--json", "job"])).await.expect(0));

    let (first, second) = (beside(&one).await, two.locks().await);
    let first = first.lease("job").ttl(LONG).acquire().await.expect("acquire");
    let second = second.lease("job").ttl(LONG).acquire().await.expect("acquire");
    let ended = show().await.expect(0);
    assert!(first_line(&ended).starts_with("\"job\" is split, and no majority holds it: "), "{}", ended.stdout);
    assert!(ended.stdout.contains("1 of 3 databases") && ended.stdout.contains("(free)"), "{}", ended.stdout);
    let shown = shown_as().await;
    assert_eq!((&shown["state"], &shown["majority"]), (&Value::from("split"), &Value::Null));
    assert_eq!(shown["databases"][1]["holders"][0]["token"], second.token().get());
    assert_eq!(shown["databases"][2]["holders"], Value::Array(Vec::new()));

    first.release().await.expect("ours to the end");
    second.release().await.expect("ours to the end");
    assert_eq!(first_line(&show().await.expect(0)), "\"job\" is free on 3 of 3 databases");
    assert_eq!(shown_as().await["state"], "free");
}

#[tokio::test]
async fn show_quorum_reports_unknown_state_without_answers() {
    let three = Three::with_one_down().await;
    let locks = three.two.locks().await;
    let lease = locks.lease("job").ttl(LONG).acquire().await.expect("acquire");
    let ended = three.run(&["show", "--quorum", "job"]).await.expect(0);
    assert!(first_line(&ended).starts_with("\"job\" may be held by a majority: "), "{}", ended.stdout);
    assert_eq!(json(&three.run(&["show", "--quorum", "job", "--json"]).await.expect(0))["state"], "unknown");
    lease.release().await.expect("ours to the end");

    let down = ClosedPort::reserve();
    let urls = format!("{},mysql://u@127.0.0.1:{}/x", three.two.url, down.number());
    let ended = end(bare(&["-D", &urls, "show", "--quorum", "job"])).await.expect(69);
    assert!(ended.stdout.is_empty() && ended.stderr.contains("1 of 2"), "{} {}", ended.stdout, ended.stderr);
}
