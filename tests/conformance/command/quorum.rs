//! `sqlock run --quorum`: a command under a lease on a majority of independent databases; and the
//! steps of a script that share such a lease.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use sqlock::Locks;
use sqlx::{AssertSqlSafe, SqlitePool};

use crate::DATABASE;
use crate::support::command::{ClosedPort, Ended, Running, bare, beside, end, held, path, run};
use crate::support::{Database, TestDatabase, empty};

/// A database of the kind under test, a SQLite file, and a port where nothing listens.
pub(super) struct Three {
    one: TestDatabase,
    pub(super) two: LeaseFile,
    _not_there: ClosedPort,
    pub(super) urls: String,
}

/// A SQLite file for leases only.
pub(super) struct LeaseFile {
    _directory: tempfile::TempDir,
    pub(super) url: String,
}

impl LeaseFile {
    pub(super) async fn with_tables() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let url = format!("sqlite://{}?mode=rwc", path(directory.path(), "sqlock.db"));
        let file = Self { _directory: directory, url };
        file.locks().await.migrate().await.expect("migrate");
        let make_old = "UPDATE _sqlock_migrations SET installed_on = datetime(installed_on, '-1 year')";
        sqlx::query(make_old).execute(&file.pool().await).await.expect("the record of the migrations");
        file
    }

    pub(super) async fn pool(&self) -> SqlitePool {
        SqlitePool::connect(&self.url).await.expect("the file is there")
    }

    pub(super) async fn locks(&self) -> Locks {
        Locks::new(self.pool().await)
    }
}

impl Three {
    pub(super) async fn with_one_down() -> Self {
        let (one, two, down) = (fresh_for_the_command().await, LeaseFile::with_tables().await, ClosedPort::reserve());
        let urls = format!("{},postgres://nobody:secret@127.0.0.1:{}/x,{}", one.url, down.number(), two.url);
        Self { one, two, _not_there: down, urls }
    }

    fn arguments<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        [&["-D", &self.urls, "run", "--quorum"], more].concat()
    }

    async fn locks(&self) -> [Locks; 2] {
        [beside(&self.one).await, self.two.locks().await]
    }
}

/// A database with the tables of the command, which are old enough to vote.
pub(super) async fn fresh_for_the_command() -> TestDatabase {
    let db = empty().await;
    run(&db, &["migrate"]).await.expect(0);
    make_old(&db).await;
    db
}

pub(super) async fn make_old(db: &TestDatabase) {
    let ago = match DATABASE {
        Database::Postgres => "installed_on - interval '1 year'",
        Database::MySql | Database::MariaDb => "installed_on - INTERVAL 1 YEAR",
        Database::Sqlite => "datetime(installed_on, '-1 year')",
    };
    let sql = AssertSqlSafe(format!("UPDATE _sqlock_migrations SET installed_on = {ago}"));
    sqlx::query(sql).execute(&db.of_the_command().pool_of(1).await).await.expect("the record of the migrations");
}

#[tokio::test]
async fn hold_limits_apply_to_a_majority() {
    let three = Three::with_one_down().await;
    let ended = end(bare(&three.arguments(&["--max-hold", "5s", "job", "--", "sleep", "600"]))).await.expect(79);
    assert!(ended.stderr.contains("reached its maximum holding time"), "{}", ended.stderr);
    end(bare(&three.arguments(&["--hold-at-least", "10m", "job", "--", "/nonexistent/command"]))).await.expect(127);
    end(bare(&three.arguments(&["--hold-at-least", "10m", "job", "--", "true"]))).await.expect(0);
    end(bare(&three.arguments(&["-n", "job", "--", "true"]))).await.expect(75);
}

/// The third database may vote after the majority, with a higher token.
#[tokio::test]
async fn unstartable_command_frees_the_name_on_all_databases() {
    let (one, two, three) =
        (fresh_for_the_command().await, LeaseFile::with_tables().await, LeaseFile::with_tables().await);
    let earlier = three.locks().await.lease("job").acquire().await.expect("acquire");
    earlier.release().await.expect("ours to the end");
    let ahead = "UPDATE sqlock_lease SET token = token + 3600000000";
    sqlx::query(ahead).execute(&three.pool().await).await.expect("a clock ahead");
    let urls = format!("{},{},{}", one.url, two.url, three.url);
    let unstartable = ["--hold-at-least", "10m", "job", "--", "/nonexistent/command"];
    end(bare(&[&["-D", &urls, "run", "--quorum"][..], &unstartable].concat())).await.expect(127);
    for locks in [beside(&one).await, two.locks().await, three.locks().await] {
        assert_eq!(held(&locks, "job").await, None);
    }
}

#[tokio::test]
async fn database_without_tables_has_no_vote() {
    let (lost, two, three) = (empty().await, LeaseFile::with_tables().await, LeaseFile::with_tables().await);
    let urls = format!("{},{},{}", two.url, three.url, lost.url);
    let script = "echo it runs; exec sleep 600";
    let mut running = Running::start(bare(&["-D", &urls, "run", "--quorum", "job", "--", "sh", "-c", script]));
    running.prints("it runs").await;
    let warning = running.says("has no sqlock tables").await;
    assert!(warning.contains("database 3 of 3") && warning.contains("sqlock migrate"), "{warning}");
    running.signal(Signal::TERM);
    running.end().await.expect(143);

    // Two of three are needed.
    let down = ClosedPort::reserve();
    let urls = format!("{},postgres://u@127.0.0.1:{}/x,{}", two.url, down.number(), lost.url);
    let ended =
        end(bare(&["-D", &urls, "run", "--quorum", "-w", "2s", "job", "--", "echo", "it ran"])).await.expect(69);
    assert_eq!(ended.stdout, "");
    // The database that is down may come back and make a majority.
    for words in ["1 of 3 databases answered, and 2 must", "database 2 of 3"] {
        assert!(ended.stderr.contains(words), "no {words}: {}", ended.stderr);
    }
    // The database was queried, and not changed.
    run(&lost, &["--no-migrate", "acquire", "job"]).await.expect(78);
}

#[tokio::test]
async fn majority_without_tables_is_a_configuration_error() {
    let (lost, one) = (empty().await, LeaseFile::with_tables().await);
    let urls = format!("{},{}", one.url, lost.url);
    let ended = end(bare(&["-D", &urls, "run", "--quorum", "job", "--", "echo", "it ran"])).await.expect(78);
    assert_eq!(ended.stdout, "");
    for words in ["database 2 of 2", "has no sqlock tables", "sqlock migrate"] {
        assert!(ended.stderr.contains(words), "no {words}: {}", ended.stderr);
    }
}

#[tokio::test]
async fn database_with_young_tables_has_no_vote() {
    let (young, old) = (empty().await, LeaseFile::with_tables().await);
    run(&young, &["migrate"]).await.expect(0);
    let urls = format!("{},{}", young.url, old.url);
    let arguments = ["-D", &urls, "run", "--quorum", "-n", "--ttl", "10m", "job", "--", "echo", "it ran"];
    let ended = end(bare(&arguments)).await.expect(69);
    assert_eq!(ended.stdout, "");
    assert!(ended.stderr.contains("votes after") && ended.stderr.contains("database 1 of 2"), "{}", ended.stderr);
    make_old(&young).await;
    assert_eq!(end(bare(&arguments)).await.expect(0).stdout, "it ran\n");
}

#[tokio::test]
async fn one_server_twice_is_no_quorum() {
    let (one, other) = (fresh_for_the_command().await, fresh_for_the_command().await);
    // Another database of the same server; on SQLite, the same file.
    let other = if DATABASE == Database::Sqlite { &one } else { &other };
    let urls = format!("{},{}", one.url, other.url);
    let ended = end(bare(&["-D", &urls, "run", "--quorum", "job", "--", "echo", "it ran"])).await.expect(78);
    assert_eq!(ended.stdout, "");
    assert!(ended.stderr.contains("on one server"), "{}", ended.stderr);
}

/// The third database accepts a connection and does not answer. Of ten starts, at least one must
/// not have waited for it: a start that waits needs four seconds.
#[tokio::test]
async fn start_does_not_wait_for_a_silent_minority() {
    let (one, two) = (fresh_for_the_command().await, LeaseFile::with_tables().await);
    let silent = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let port = silent.local_addr().expect("it is bound").port();
    let urls = format!("{},postgres://u@127.0.0.1:{port}/x,{}", one.url, two.url);
    let mut took = Vec::new();
    for _ in 0..10 {
        let start = Instant::now();
        let script = "echo it runs; exec sleep 600";
        let mut running = Running::start(bare(&["-D", &urls, "run", "--quorum", "job", "--", "sh", "-c", script]));
        running.prints("it runs").await;
        took.push(start.elapsed());
        running.signal(Signal::TERM);
        running.end().await.expect(143);
        if took.last().is_some_and(|took| *took < Duration::from_millis(3500)) {
            return;
        }
    }
    panic!("every start waited: {took:?}");
}

#[tokio::test]
async fn command_runs_while_one_database_is_down() {
    let three = Three::with_one_down().await;
    let script = "echo token $SQLOCK_TOKEN; exec sleep 600";
    let mut running = Running::start(bare(&three.arguments(&["--ttl", "60s", "job", "--", "sh", "-c", script])));
    let token = running.prints("token ").await;
    let token: i64 = token.trim_start_matches("token ").trim().parse().expect("a token");
    for locks in three.locks().await {
        assert_eq!(held(&locks, "job").await.expect("held there").token.get(), token);
    }

    let refused = end(bare(&three.arguments(&["-n", "job", "--", "true"]))).await.expect(75);
    assert!(refused.stderr.contains("not obtained"), "{}", refused.stderr);
    let refused = end(bare(&three.arguments(&["-w", "3", "job", "--", "true"]))).await.expect(75);
    assert!(!refused.stderr.contains("secret"), "{}", refused.stderr);

    running.signal(Signal::TERM);
    let ended = running.end().await.expect(143);
    assert!(!ended.stderr.contains("secret"), "{}", ended.stderr);
    let after = end(bare(&three.arguments(&["-n", "job", "--", "true"]))).await.expect(0);
    assert!(DATABASE == Database::Sqlite || after.stderr.is_empty(), "{}", after.stderr);
}

#[tokio::test]
async fn command_stops_when_the_majority_is_lost() {
    let three = Three::with_one_down().await;
    let script = "echo started; sleep 600";
    let mut running = Running::start(bare(&three.arguments(&["job", "--", "sh", "-c", script])));
    running.prints("started").await;
    let [one, _] = three.locks().await;
    let token = held(&one, "job").await.expect("held there").token;
    assert!(one.evict("job", token).await.expect("evict"));
    running.end().await.expect(79);
}

#[tokio::test]
async fn one_database_of_three_is_no_majority() {
    let (one, down) = (fresh_for_the_command().await, ClosedPort::reserve());
    let urls = format!("postgres://u@127.0.0.1:{0}/x,{1},mysql://u@127.0.0.1:{0}/x", down.number(), one.url);
    let ended = end(bare(&["-D", &urls, "run", "--quorum", "job", "--", "true"])).await.expect(69);
    assert!(ended.stderr.contains("1 of 3"), "{}", ended.stderr);
    assert!(held(&beside(&one).await, "job").await.is_none());
}

#[tokio::test]
async fn timeout_covers_the_outage_of_a_majority() {
    const WAIT: Duration = Duration::from_secs(12);
    let (one, down) = (fresh_for_the_command().await, ClosedPort::reserve());
    let urls = format!("postgres://u@127.0.0.1:{0}/x,{1},mysql://u@127.0.0.1:{0}/x", down.number(), one.url);
    let start = Instant::now();
    let ended = end(bare(&["-D", &urls, "run", "--quorum", "-w", "12s", "job", "--", "true"])).await.expect(69);
    assert!(start.elapsed() >= WAIT, "it gave up after {:?}: {}", start.elapsed(), ended.stderr);
}

/// A SQLite file that another process writes can be read, and grants nothing.
#[tokio::test]
async fn wait_without_timeout_lasts_through_an_outage() {
    let three = Three::with_one_down().await;
    // The first command sets the mode of the file that lets readers pass a writer.
    end(bare(&three.arguments(&["job", "--", "true"]))).await.expect(0);
    let pool = three.two.pool().await;
    let writer = pool.begin_with("BEGIN IMMEDIATE").await.expect("the only writer");
    let mut waiting = Running::start(bare(&three.arguments(&["job", "--", "true"])));
    waiting.says("still waiting").await;
    writer.rollback().await.expect("the end of the outage");
    let ended = waiting.end().await.expect(0);
    // The database that is down may have a vote of a holder.
    assert!(!ended.stderr.contains("no process holds"), "{}", ended.stderr);
}

#[tokio::test]
async fn nested_quorum_run_is_refused_as_deadlock() {
    let three = Three::with_one_down().await;
    let program = crate::support::command::program();
    let inner = format!("exec {program} -D '{}' run --quorum job -- true", three.urls);
    let ended = end(bare(&three.arguments(&["job", "--", "sh", "-c", &inner]))).await.expect(64);
    assert!(ended.stderr.contains("would wait for ever"), "{}", ended.stderr);
}

#[tokio::test]
async fn unreachable_server_list_is_no_configuration_error() {
    let down = ClosedPort::reserve();
    let urls = format!("postgres://u:secret@127.0.0.1:{0}/x,postgres://u:secret@127.0.0.1:{0}/y", down.number());
    let ended = end(bare(&["-D", &urls, "acquire", "-n", "job"])).await.expect(69);
    assert!(!ended.stderr.contains("secret"), "{}", ended.stderr);
    let ended = end(bare(&["-D", &format!("{urls},"), "acquire", "-n", "job"])).await.expect(78);
    assert!(ended.stderr.contains("one of them is empty"), "{}", ended.stderr);
}

// ---- across the steps of a script

impl Three {
    /// `sqlock ARGUMENTS` on all three.
    pub(super) async fn run(&self, arguments: &[&str]) -> Ended {
        end(bare(&[&["-D", &self.urls], arguments].concat())).await
    }
}

pub(super) fn json(ended: &Ended) -> Value {
    serde_json::from_str(&ended.stdout).expect("JSON")
}

#[tokio::test]
async fn steps_share_a_lease_on_a_majority() {
    let three = Three::with_one_down().await;
    let step = ["acquire", "--quorum", "job", "--ttl", "60s", "--label", "a step"];
    let acquired = json(&three.run(&step).await.expect(0));
    let keys: Vec<&String> = acquired.as_object().expect("an object").keys().collect();
    assert_eq!(keys, ["expires_at", "name", "owner", "token"]);
    let token = acquired["token"].to_string();
    // The process has ended.
    for locks in three.locks().await {
        let info = held(&locks, "job").await.expect("held there");
        assert_eq!((info.token.to_string(), &*info.label), (token.clone(), "a step"));
    }
    three.run(&["acquire", "--quorum", "-n", "job"]).await.expect(75);
    end(bare(&three.arguments(&["-n", "job", "--", "true"]))).await.expect(75);

    let renewed = json(&three.run(&["renew", "--quorum", "job", "--token", &token, "--ttl", "120s"]).await.expect(0));
    for key in ["name", "token", "owner"] {
        assert_eq!(renewed[key], acquired[key], "{key}");
    }
    assert!(renewed["expires_at"].as_str() > acquired["expires_at"].as_str(), "{renewed} {acquired}");
    for locks in three.locks().await {
        let info = held(&locks, "job").await.expect("held there");
        assert!(info.remaining > Duration::from_secs(60), "{info:?}");
    }
    let other = (acquired["token"].as_i64().expect("a number") - 1).to_string();
    for verb in ["renew", "release", "unlock"] {
        let refused = three.run(&[verb, "--quorum", "job", "--token", &other]).await.expect(79);
        assert!(refused.stderr.contains("on a majority"), "{}", refused.stderr);
    }

    three.run(&["release", "--quorum", "job", "--token", &token]).await.expect(0);
    for locks in three.locks().await {
        assert_eq!(held(&locks, "job").await, None);
    }
    three.run(&["release", "--quorum", "job", "--token", &token]).await.expect(79);
}

#[tokio::test]
async fn lease_lost_on_a_majority_is_not_renewed() {
    let (one, two, three) =
        (fresh_for_the_command().await, LeaseFile::with_tables().await, LeaseFile::with_tables().await);
    let urls = format!("{},{},{}", one.url, two.url, three.url);
    let step = |arguments: &[&str]| end(bare(&[&["-D", &urls], arguments].concat()));
    let acquired = json(&step(&["acquire", "--quorum", "job", "--ttl", "10m"]).await.expect(0));
    let token = acquired["token"].to_string();
    // A majority holds the name, or all databases do.
    let mut holders = Vec::new();
    for locks in [beside(&one).await, two.locks().await, three.locks().await] {
        if let Some(held) = held(&locks, "job").await {
            holders.push((locks, held.token));
        }
    }
    let lose = async |(locks, token): (Locks, _)| assert!(locks.evict("job", token).await.expect("evict"));
    if holders.len() == 3 {
        lose(holders.remove(0)).await;
    }
    step(&["renew", "--quorum", "job", "--token", &token]).await.expect(0);
    lose(holders.remove(0)).await;
    step(&["renew", "--quorum", "job", "--token", &token]).await.expect(79);
    step(&["release", "--quorum", "job", "--token", &token]).await.expect(79);
}

#[tokio::test]
async fn renewal_says_that_the_databases_disagree() {
    let three = Three::with_one_down().await;
    let acquired = json(&three.run(&["acquire", "--quorum", "job", "--ttl", "10m"]).await.expect(0));
    let token = acquired["token"].to_string();
    let locks = three.two.locks().await;
    let part = held(&locks, "job").await.expect("held there");
    assert!(locks.evict("job", part.token).await.expect("evict"));
    // One database confirms the lease, one refuses, and one does not answer.
    let ended = three.run(&["renew", "--quorum", "job", "--token", &token]).await.expect(69);
    assert!(ended.stderr.contains("2 of 3 databases answered, and they disagree; "), "{}", ended.stderr);
}

#[tokio::test]
async fn ls_joins_the_lists_of_all_databases() {
    let three = Three::with_one_down().await;
    three.run(&["acquire", "--quorum", "job/1", "--ttl", "10m", "--label", "a step"]).await.expect(0);
    // A name on one database alone.
    let part = three.two.locks().await.lease("job/2").ttl(Duration::from_secs(600)).acquire().await.expect("acquire");

    let ended = three.run(&["ls", "--quorum", "job/"]).await.expect(0);
    let lines: Vec<&str> = ended.stdout.lines().collect();
    let [heading, whole, minority] = lines[..] else { panic!("{}", ended.stdout) };
    assert!(heading.starts_with("NAME   HOLDER "), "{heading}");
    assert!(whole.starts_with("job/1 ") && whole.contains("  2 of 3  ") && whole.ends_with("a step"), "{whole}");
    assert!(minority.starts_with("job/2 ") && minority.contains("  1 of 3, no majority  "), "{minority}");
    assert!(ended.stderr.contains("database 2 of 3 (PostgreSQL at 127.0.0.1:"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("secret"), "{}", ended.stderr);

    let listed = json(&three.run(&["ls", "--quorum", "--json"]).await.expect(0));
    assert_eq!((&listed[0]["databases"], &listed[0]["has_majority"]), (&Value::from(2), &Value::from(true)));
    assert_eq!((&listed[1]["databases"], &listed[1]["has_majority"]), (&Value::from(1), &Value::from(false)));
    part.release().await.expect("ours to the end");

    let down = ClosedPort::reserve();
    let urls = format!("{},mysql://u@127.0.0.1:{}/x", three.two.url, down.number());
    let ended = end(bare(&["-D", &urls, "ls", "--quorum"])).await.expect(69);
    assert!(ended.stderr.contains("database 2 of 2") && ended.stderr.contains("1 of 2"), "{}", ended.stderr);
}
