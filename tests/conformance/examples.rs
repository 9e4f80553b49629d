//! The examples: each demonstrates its claim, and fails when its protection is turned off.

use std::path::PathBuf;
use std::process::{Output, Stdio};
use std::time::Duration;

use tokio::process::Command;

use crate::support::{TestDatabase, empty};

/// Returns the path of an example beside this test: `target/<profile>/examples/<name>`, which cargo
/// builds with the tests.
pub(super) fn example(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let profile = test.parent().and_then(|deps| deps.parent()).expect("target/<profile>/deps/<test>");
    let path = profile.join("examples").join(name).with_extension(std::env::consts::EXE_EXTENSION);
    assert!(
        path.exists(),
        "{} is missing: build it with `cargo build --examples` and the features of this test",
        path.display()
    );
    path
}

async fn run(db: &TestDatabase, name: &str, options: &[&str]) -> Output {
    let run = Command::new(example(name))
        .args(options)
        .env("DATABASE_URL", &db.url)
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    tokio::time::timeout(Duration::from_secs(120), run).await.expect("the example ends").expect("the example runs")
}

/// Runs an example that must succeed and print `line`.
async fn shows(db: &TestDatabase, name: &str, line: &str) {
    let output = run(db, name, &[]).await;
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name}: {:?}\n{said}\n{complained}", output.status);
    assert!(said.contains(line), "{name} did not say {line:?}:\n{said}");
}

/// Runs an example with its protection off: it must notice, and fail.
async fn notices(db: &TestDatabase, name: &str, option: &str, complaint: &str) {
    let output = run(db, name, &[option]).await;
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{name} {option}:\n{said}\n{complained}");
    assert!(complained.contains(complaint), "{name} {option} did not say {complaint:?}:\n{said}\n{complained}");
}

#[tokio::test]
async fn quickstart_holds_fences_and_releases() {
    shows(&empty().await, "quickstart", "Released; it was held to the end.").await;
}

#[tokio::test]
async fn four_sellers_sell_every_ticket_once() {
    let line = "each of them once.";
    let db = empty().await;
    shows(&db, "ticket_sale", line).await;
    // The rows of the first run do not disturb the next one.
    shows(&db, "ticket_sale", line).await;
}

#[tokio::test]
async fn ticket_sale_notices_when_it_oversells() {
    notices(&empty().await, "ticket_sale", "--without-lock", "the hall is oversold").await;
}

#[tokio::test]
async fn stock_of_one_sells_the_item_once() {
    let line = "1 bought it, 9 found it sold out, 0 left in stock.";
    shows(&empty().await, "stock_of_one", line).await;
}

#[tokio::test]
async fn stock_of_one_notices_when_it_oversells() {
    notices(&empty().await, "stock_of_one", "--without-lock", "there was one item").await;
}

#[tokio::test]
async fn flash_sale_oversells_only_by_the_naive_strategy() {
    let db = empty().await;
    // The example fails if any other way does.
    shows(&db, "flash_sale", "sold what was not there").await;
    shows(&db, "flash_sale", "conditional update      100         0").await;
}

#[tokio::test]
async fn bank_transfer_balances_without_deadlock() {
    let line = "The books are in order";
    let db = empty().await;
    // The example fails if locking both rows in one order has met a deadlock or caused a rerun.
    shows(&db, "bank_transfer", line).await;
    shows(&db, "bank_transfer", line).await;
}

#[tokio::test]
async fn bank_transfer_notices_lost_updates() {
    notices(&empty().await, "bank_transfer", "--without-lock", "FAILED: nothing: ").await;
}

#[tokio::test]
async fn job_queue_redoes_killed_workers_jobs_once() {
    let line = "60 jobs were done, each of them once.";
    let db = empty().await;
    shows(&db, "job_queue", line).await;
    shows(&db, "job_queue", line).await;
}

#[tokio::test]
async fn job_queue_notices_duplicate_jobs() {
    notices(&empty().await, "job_queue", "--without-lock", "not done once").await;
}

#[tokio::test]
async fn webhook_consumer_handles_killed_instances_events_once() {
    let line = "40 events took effect, each of them once: ";
    let db = empty().await;
    shows(&db, "webhook_consumer", line).await;
    shows(&db, "webhook_consumer", line).await;
}

#[tokio::test]
async fn webhook_consumer_notices_duplicate_effects() {
    notices(&empty().await, "webhook_consumer", "--without-lock", "not once: the events").await;
}

#[tokio::test]
async fn red_packet_is_split_exactly_among_recipients() {
    let line = "12 of them have a part, nobody two, and the parts sum to 10000.";
    let db = empty().await;
    shows(&db, "red_packet", line).await;
    shows(&db, "red_packet", line).await;
}

#[tokio::test]
async fn red_packet_notices_a_wrong_split() {
    notices(&empty().await, "red_packet", "--without-lock", "not shared out as it should be").await;
}

#[tokio::test]
async fn checkout_form_leads_to_one_order_at_most() {
    let line = "Each form has led to one order at most.";
    let db = empty().await;
    shows(&db, "checkout_form", line).await;
    shows(&db, "checkout_form", line).await;
}

#[tokio::test]
async fn checkout_form_notices_duplicate_orders() {
    notices(&empty().await, "checkout_form", "--without-token", "one order for all").await;
}

#[cfg(feature = "axum")]
#[tokio::test]
async fn payment_handler_charges_each_order_once() {
    let line = "25 orders were charged";
    let db = empty().await;
    // The example fails if the second click is not reported as a replay, or if another amount with
    // the same key is accepted.
    shows(&db, "payment_handler", line).await;
    shows(&db, "payment_handler", "The provider has charged 2 of them").await;
}

#[cfg(feature = "axum")]
#[tokio::test]
async fn payment_handler_notices_a_second_provider_charge() {
    notices(&empty().await, "payment_handler", "--new-key", "the provider has charged").await;
}

#[cfg(feature = "axum")]
#[tokio::test]
async fn payment_handler_notices_double_charges() {
    notices(&empty().await, "payment_handler", "--without-key", "50 duplicates at once: 50 charges for 1 orders").await;
}

#[tokio::test]
async fn nightly_job_runs_once_a_night() {
    let line = "Reports sent: 1 in the first night, 1 in the second.";
    let db = empty().await;
    shows(&db, "nightly_job", line).await;
    shows(&db, "nightly_job", line).await;
}

#[tokio::test]
async fn nightly_job_notices_when_it_runs_twice() {
    notices(&empty().await, "nightly_job", "--without-hold", "one report a night").await;
}

#[tokio::test]
async fn leader_election_survives_the_death_of_the_leader() {
    shows(&empty().await, "leader_election", "took over after").await;
}

#[tokio::test]
async fn concurrent_runs_of_an_example_take_turns() {
    let db = empty().await;
    tokio::join!(
        shows(&db, "stock_of_one", "1 bought it, 9 found"),
        shows(&db, "stock_of_one", "1 bought it, 9 found"),
    );
}
