//! `sqlock run --quorum`: a command under a lease on a majority of independent databases.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use sqlock::Locks;

use crate::DATABASE;
use crate::support::command::{ClosedPort, Running, bare, beside, end, held, run};
use crate::support::{Database, Fresh, empty};

/// Two databases that are there, and one that is not.
struct Three {
    there: [Fresh; 2],
    _not_there: ClosedPort,
    urls: String,
}

impl Three {
    async fn with_one_down() -> Self {
        let (there, down) = ([fresh_for_the_command().await, fresh_for_the_command().await], ClosedPort::reserve());
        let urls = format!("{},postgres://nobody:secret@127.0.0.1:{}/x,{}", there[0].url, down.number(), there[1].url);
        Self { there, _not_there: down, urls }
    }

    fn arguments<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        [&["-D", &self.urls, "run", "--quorum"], more].concat()
    }

    async fn locks(&self) -> [Locks; 2] {
        [beside(&self.there[0]).await, beside(&self.there[1]).await]
    }
}

/// A database with the tables of the command.
async fn fresh_for_the_command() -> Fresh {
    let db = empty().await;
    run(&db, &["migrate"]).await.expect(0);
    db
}

#[tokio::test]
async fn quorum_refuses_a_database_without_tables() {
    let (one, two, lost) = (fresh_for_the_command().await, fresh_for_the_command().await, empty().await);
    let urls = format!("{},{},{}", one.url, two.url, lost.url);
    let arguments = ["-D", &urls, "run", "--quorum", "job", "--", "echo", "it ran"];
    let ended = end(bare(&arguments)).await.expect(78);
    assert_eq!(ended.stdout, "");
    for words in ["database 3 of 3", "has no sqlock tables", "sqlock migrate"] {
        assert!(ended.stderr.contains(words), "no {words}: {}", ended.stderr);
    }
    // It was asked, and not changed.
    run(&lost, &["--no-migrate", "acquire", "job"]).await.expect(78);
    run(&lost, &["migrate"]).await.expect(0);
    assert_eq!(end(bare(&arguments)).await.expect(0).stdout, "it ran\n");
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
    let refused = end(bare(&three.arguments(&["-w", "0.2", "job", "--", "true"]))).await.expect(75);
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
    let mut running = Running::start(bare(&three.arguments(&["--ttl", "3s", "job", "--", "sh", "-c", script])));
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
