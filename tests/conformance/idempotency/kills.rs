//! Storms of requests to processes that are killed.

use super::*;
use crate::support::until;

/// Creates tables of the application that do not prevent a doubled effect.
async fn ledger() -> App {
    let counters = counters_in(fresh().await).await;
    run(&counters.pool, "CREATE TABLE charge (request_key VARCHAR(64) NOT NULL, receipt VARCHAR(64) NOT NULL)").await;
    app_in(counters).await
}

impl App {
    /// The receipts of each key.
    async fn charges(&self) -> BTreeMap<String, Vec<String>> {
        let rows: Vec<(String, String)> = sqlx::query_as("SELECT request_key, receipt FROM charge")
            .fetch_all(&self.counters.pool)
            .await
            .expect("charges");
        let mut charges: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (key, receipt) in rows {
            charges.entry(key).or_default().push(receipt);
        }
        charges
    }
}

/// Payment servers are killed at random and started again, and every request is repeated until it
/// is answered.
async fn storm_of_kills(mode: &str, provider: Option<&str>) -> (App, u32) {
    const KEYS: usize = 50;
    const DUPLICATES: usize = 20;
    let app = ledger().await;
    let mut kills = 0;
    let mut open: BTreeSet<usize> = (0..KEYS * DUPLICATES).collect();
    let mut receipts: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
    let deadline = tokio::time::Instant::now() + SOON * 20;
    while !open.is_empty() {
        assert!(tokio::time::Instant::now() < deadline, "{} requests are not answered; {kills} kills", open.len());
        // Two servers, so that duplicates meet in different processes as well.
        let mut servers = [
            Worker::payment_server(&app.counters.db.url, provider),
            Worker::payment_server(&app.counters.db.url, provider),
        ];
        for request in &open {
            // First all keys once, then all of them again.
            servers[request % 2].tell(&format!("{request} {mode} {}", request / DUPLICATES));
        }
        // So that slow machines make progress, too.
        let patience = Duration::from_millis(60 + u64::from(kills * kills) * 2);
        let until = tokio::time::Instant::now() + patience.min(SOON);
        for server in &mut servers {
            while let Ok(Some(answer)) = tokio::time::timeout_at(until, server.next_answer()).await {
                let (request, reply) = answer.split_once(' ').expect("an answer to a request");
                let request: usize = request.parse().expect("a number");
                match reply.split_once(' ') {
                    Some(("new" | "replay", receipt)) => {
                        receipts.entry(request / DUPLICATES).or_default().insert(receipt.to_owned());
                        open.remove(&request);
                    }
                    _ if reply == "in-progress" => {}
                    other => assert!(reply.starts_with("error"), "{other:?}"),
                }
            }
        }
        kills += 1;
        for server in &mut servers {
            server.kill();
        }
    }
    let charges = app.charges().await;
    assert_eq!(charges.len(), KEYS);
    for (key, reply) in &receipts {
        let charged = &charges[&key.to_string()];
        assert_eq!(charged.len(), 1, "{key} was charged {} times", charged.len());
        assert_eq!(reply.iter().collect::<Vec<_>>(), charged.iter().collect::<Vec<_>>(), "{key}");
    }
    println!("{DATABASE:?}, {mode}: {KEYS} keys, {} requests, {kills} kills", KEYS * DUPLICATES);
    (app, kills)
}

#[tokio::test]
async fn killed_servers_apply_each_key_once() {
    let (app, kills) = storm_of_kills("once", None).await;
    assert!(kills > 3, "{kills} kills prove nothing");
    assert!(app.payments.unfinished(10).await.expect("list").is_empty());
}

#[tokio::test]
async fn killed_servers_charge_each_key_once() {
    let (mut provider, port) = Worker::provider().await;
    let (app, _) = storm_of_kills("leased", Some(&port)).await;
    let count = provider.ask("count").await;
    assert_eq!(count.split(' ').next(), Some("50"), "{count}");
    assert!(app.payments.unfinished(10).await.expect("list").is_empty());
}

#[tokio::test]
async fn charge_without_record_is_found_by_repetition() {
    let app = ledger().await;
    let (mut provider, port) = Worker::provider().await;
    let mut server = Worker::payment_server(&app.counters.db.url, Some(&port));
    assert_eq!(provider.ask("hold").await, "held");
    server.tell("1 leased a");
    until("the charge", async || provider.ask("count").await == "1 1").await;
    server.kill();
    assert_eq!(provider.ask("go").await, "gone");
    assert_eq!(state(&app, "a").await, Some(("started", 1)));
    assert!(app.charges().await.is_empty());
    let mut server = Worker::payment_server(&app.counters.db.url, Some(&port));
    soon("the resumption", async {
        // Its lease has to run out.
        while server.ask("2 resume").await != "2 resumed 1 0" {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    assert_eq!(provider.ask("count").await, "1 2");
    assert_eq!(state(&app, "a").await, Some(("done", 2)));
    let charges = app.charges().await;
    assert_eq!(charges["a"].len(), 1);
    assert_eq!(server.ask("3 leased a").await, format!("3 replay {}", charges["a"][0]));
    assert_eq!(provider.ask("count").await, "1 2");
}
