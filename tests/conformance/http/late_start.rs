//! The statement that creates the record of an attempt, when it arrives after the attempt's end.

use super::super::network::behind_a_reading_proxy;
use super::*;
use crate::support::connect;

/// Only the statement that creates a record contains the key itself.
const KEY: &str = "held-by-the-network";

/// The client gives the statement up after some seconds, and sends it again on another connection.
#[tokio::test]
async fn refused_request_stays_unknown_despite_late_start() {
    if DATABASE == Database::Sqlite {
        return; // There is no network between.
    }
    let counters = counters().await;
    let (proxy, url) = behind_a_reading_proxy(&counters.db.url);
    let pool = connect(&url, 2).await;
    let server = Server::with(builder(pool.clone()).build(), pool, usual).await;
    let held = proxy.hold_request_with(KEY);
    assert_eq!(server.post("/provider/declined", KEY).await.status, 402);
    assert!(held.is_held());
    let record = async || server.payments.inspect(&alice(KEY)).await.expect("inspect");
    let before = record().await;
    assert_eq!(before.as_ref().map(|record| (record.state.as_str(), record.attempts)), Some(("unknown", 1)));
    soon("the late statement", held.deliver()).await;
    assert_eq!(record().await, before);
    server.post("/provider/declined", KEY).await.is(409, "outcome-unknown");
    assert_eq!(server.begun(), 1);
}
