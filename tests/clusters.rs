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
#[allow(dead_code, reason = "the rest is for other tests")]
#[path = "support/wait.rs"]
mod wait;

use server::Server;
use sqlock::{Error, LocksBuilder};
use wait::{soon, until};

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
