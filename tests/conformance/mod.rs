//! Written once, by noun; every database passes it.

mod cancel;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod clock;
#[cfg(feature = "cli")]
mod command;
mod connections;
mod crash;
mod drain;
mod duration;
mod election;
mod events;
mod examples;
mod fence;
#[cfg(all(feature = "postgres", feature = "sqlite"))]
mod foreign_transaction;
mod handover;
mod health;
#[cfg(feature = "axum")]
mod http;
mod idempotency;
mod inspect;
mod isolation;
mod lease;
mod multi;
mod name;
mod network;
mod owner;
mod pooler;
mod retry;
mod row;
mod schema;
mod semaphore;
mod server;
mod session;
mod shared;
mod statements;
mod storm;
mod sweeper;
mod tracing;
mod unreadable;
mod version;
mod waiting;
mod witness;
