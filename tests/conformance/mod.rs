//! The suite, written once, by noun; every database passes it.
//!
//! Which files test which promise of the README. `scripts/promises` checks it.
//!
//! | | promise | files |
//! |---|---|---|
//! | 1 | Mutual exclusion by the database's clock alone | clock, network/idle, server, storm |
//! | 2 | One statement for owner, expiry and token | statements |
//! | 3 | The holder knows first | clock, crash, lease, network, network/late, network/refused |
//! | 4 | Tokens only rise | clock, lease, server, sweeper |
//! | 5 | Only the owner extends or releases | inspect, lease |
//! | 6 | Fenced commits | fence, isolation, shared/fence |
//! | 7 | First come, first served | semaphore, shared, storm, waiting, waiting/abandoned, waiting/dead |
//! | 8 | A crashed holder frees the name after the TTL | crash, server, waiting/dead |
//! | 9 | Cancel-safe | cancel, network, network/refused, network/silent, shared/dropped, waiting/abandoned |
//! | 10 | A bounded number of connections | connections, health |
//! | 11 | Re-entrant for the same owner | owner, shared/owner |
//! | 12 | An unreachable database is not a held lock | network, network/idle, network/refused, server |
//! | 13 | Names are bytes | name |
//! | 14 | Poolers and defaults do not matter | isolation, pooler |
//! | 15 | TTLs have bounds | duration, lease |
//! | 16 | One statement renews all leases | connections, statements |
//! | 17 | Other work does not end a lease | neighbour, network, unreadable |
//! | 18 | Every verdict rests on an answer of the database | network, network/idle, network/late, network/refused, network/silent |

mod cancel;
#[cfg(any(feature = "postgres", feature = "mysql"))]
mod clock;
mod closure;
#[cfg(feature = "cli")]
mod command;
mod connection_counter;
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
mod neighbour;
pub(crate) mod network;
mod note;
mod options;
mod owner;
mod pooler;
mod retry;
mod revoke;
mod row;
mod schema;
mod security;
mod semaphore;
mod server;
#[cfg(all(feature = "axum", feature = "metrics"))]
mod service;
mod session;
mod shared;
mod statements;
mod storm;
mod sweeper;
mod tracing;
mod unreadable;
mod version;
mod view;
mod waiting;
