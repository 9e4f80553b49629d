//! Clusters of the databases: failovers, losses, and the promises that still hold.
//!
//! Every test has servers of its own, which it kills, stops and promotes.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic)]

#[path = "clusters/failover.rs"]
mod failover;
#[path = "clusters/galera.rs"]
mod galera;
#[path = "clusters/group.rs"]
mod group;
#[allow(dead_code, reason = "the rest is for other tests")]
#[path = "support/server.rs"]
mod server;
#[path = "clusters/standby.rs"]
mod standby;

use std::time::{Duration, Instant};

use server::Server;
use sqlock::{Error, LocksBuilder};

/// The longest that anything which must happen may take here before a test fails.
const SOON: Duration = Duration::from_secs(60);

/// Fails the test, instead of hanging it, when something does not happen.
async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    tokio::time::timeout(SOON, future).await.unwrap_or_else(|_| panic!("{what} did not happen within {SOON:?}"))
}

/// Asks until it is so.
async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !is_so().await {
        assert!(start.elapsed() < SOON, "{what} did not happen within {SOON:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// The URLs of servers, as a client takes them.
fn urls<'a>(servers: impl IntoIterator<Item = &'a Server>) -> String {
    servers.into_iter().map(Server::url).collect::<Vec<_>>().join(",")
}

fn on(urls: &str) -> LocksBuilder {
    LocksBuilder::from_urls(urls).expect("the URLs can be read")
}

/// Returns the error about an unusable database.
#[track_caller]
fn unavailable<T>(outcome: Result<T, Error>) -> String {
    match outcome {
        Err(Error::Unavailable { reason, .. }) => reason,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("it was had"),
    }
}
