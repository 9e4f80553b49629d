//! `sqlock show --quorum`: a name on several databases.

use std::time::Duration;

use serde_json::Value;

use super::quorum::{LeaseFile, Three, fresh_for_the_command, json};
use crate::support::command::{ClosedPort, Ended, bare, beside, end};

const LONG: Duration = Duration::from_secs(600);

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
async fn show_quorum_admits_what_it_cannot_know() {
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
