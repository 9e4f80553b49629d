//! Distributed locks, leases and fenced transactions on the SQL database you already run: PostgreSQL, MySQL, MariaDB, and
//! SQLite as the embedded default.
//!
//! Several instances of an application share one database and must not do the same thing twice. A *lease* is a row there,
//! with an owner and an expiry: taken in one statement, kept by a heartbeat in the background, free again when its holder
//! gives it back or dies. A *fence* makes a transaction commit only while the lease is held. No other server is needed.
//!
//! ```
//! use std::time::Duration;
//!
//! # #[cfg(feature = "sqlite")]
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let url = format!("sqlite://{}?mode=rwc", directory.path().join("app.db").display());
//! let pool = sqlx::SqlitePool::connect(&url).await?;          // or PgPool, MySqlPool
//! # sqlx::query("CREATE TABLE invoice (id INTEGER, sent INTEGER)").execute(&pool).await?;
//! let locks = sqlock::Locks::new(pool.clone());
//! locks.migrate().await?;                                     // its own tables, beside yours
//!
//! let lease = locks.lease("invoice/42").wait(Duration::from_secs(5)).acquire().await?;
//! let mut tx = pool.begin().await?;
//! lease.fence(&mut tx).await?;                                // commits only while the lease is ours
//! sqlx::query("UPDATE invoice SET sent = 1 WHERE id = 42").execute(&mut *tx).await?;
//! tx.commit().await?;
//! lease.release().await?;                                     // Ok: it was ours to the end
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "sqlite"))]
//! # fn main() {}
//! ```
//!
//! # Which call?
//!
//! | you want | call |
//! |---|---|
//! | to wait for your turn, for some time or for as long as it takes | [`LeaseRequest::acquire`], with [`wait`](LeaseRequest::wait) |
//! | to do it only if nobody else is at it (a nightly job) | [`LeaseRequest::try_acquire`], with [`hold_at_least`](LeaseRequest::hold_at_least) |
//! | many readers or one writer | [`LeaseRequest::shared`], [`Lease::downgrade`] |
//! | several names at once, all or none | [`Locks::lease_all`] |
//! | at most so many at a time | [`Locks::semaphore`] |
//! | to know how many are ahead | [`LeaseRequest::while_waiting`], [`Locks::waiters`] |
//! | the work to be cancelled when the lease is lost | [`LeaseRequest::run`] |
//! | one of many instances to lead, and the others to stand by | [`Locks::election`] |
//! | to write data in this database that only the holder may write | [`Lease::fence`] |
//! | to lock something within one transaction of yours | [`Locks::row`] by name; [`Locks::row_of`], [`Locks::rows_of`] your own rows |
//! | to take jobs from a table, each worker others | [`Locks::rows_where`] with [`skip_locked`](row::RowsWhere::skip_locked) |
//! | to write a row only if it is still as it was read, without a lock in between | [`Versioned`] |
//! | a request to take effect once, however often it is sent | [`Idempotency::run`]; for effects elsewhere [`Idempotency::run_leased`]; over HTTP the feature `axum` |
//! | a transaction to be run again when it met a concurrent change | [`Retry`] |
//! | to have effects elsewhere that only the holder may have | [`Lease::token`], checked by the receiver |
//! | to enter again while you are inside | [`Owner::scope`], or [`LeaseRequest::owner`] |
//! | to hand a held lease to another process | [`Lease::export`], [`Locks::resume`] |
//! | to prolong a lease of which you know the token only | [`Locks::extend`] |
//! | to see who holds what, or to take it away | [`Locks::list`], [`Locks::inspect`], [`Locks::evict`] |
//! | a lock that writes nothing and ends with its connection | [`Locks::session`] |
//! | to purge names that are not used any more | [`Locks::sweeper`] |
//! | the lock to survive the loss of a server: a majority of independent ones | [`Quorum`] |
//! | to hang without holding for ever | [`LeaseRequest::max_hold`] |
//! | to end in order | [`Locks::shutdown`] |
//!
//! The [`guide`] says which one when, what each costs, and uses them together.
//!
//! # What is promised
//!
//! Mutual exclusion is decided by the database's clock alone. The holder knows first: [`Lease::is_held`] turns false, and
//! [`Lease::lost`] completes, before the database could grant the name to another, also after the process was stopped or the
//! machine slept. [Fencing tokens](FencingToken) only rise. Those who wait are served in the order in which they came, from
//! whichever task, process or host, and nobody comes in between. Every future may be dropped at any await point; nothing is left
//! behind. However many leases are held or waited for, a client opens at most three connections, one of them for heartbeats alone
//! (on SQLite two; and one more for all [session locks](session::SessionLock)).
//!
//! Losing the database ([`Error::Unavailable`]), losing the lease ([`Error::Lost`]), waiting too long ([`Error::Timeout`])
//! and being refused (`Ok(None)`) are four different answers.
//!
//! # What is not
//!
//! - A process that is paused for longer than the TTL may act, before it looks at its lease, while another holds the name.
//!   Inside this database a fence prevents the harm; elsewhere the receiver must check tokens.
//! - A grant is as durable as the database's commits. An asynchronous replica that is promoted may not know it; the tokens
//!   and the fence still protect the data: see [`guide::cluster`].
//! - The database host's clock may be wrong, but a *jump* by more than the TTL ends leases early, or late.
//! - A waiter that has died is noticed after 3 seconds. So is a new holder that died before it knew; with several of them, all
//!   in the same 3 seconds. A lease that was handed over by another process therefore lasts 3 seconds at first, and its TTL 0.2
//!   seconds later.
//! - [`Locks::lease_all`] holds the names that it has got while it waits for the next.
//! - The order of those who wait is that of the database's clock, which may jump.
//! - In a SQLite file there is one writer: while a transaction writes, no lease in that file can be taken, kept or
//!   released. Keep such transactions shorter than the TTL.
//!
//! # Features
//!
//! `sqlite` (default), `postgres`, `mysql` (also MariaDB) enable the sqlx drivers of those names. TLS, and everything else
//! about connecting, is the application's choice, through its own features of sqlx.
//!
//! `axum` adds [`idempotency`]`::http`: requests over HTTP that take effect once, as a layer and extractors for axum.
//!
//! `cli` builds the command `sqlock`, which holds a lease around any command (`sqlock run migrate -- sqlx migrate run`), for
//! the databases whose features are enabled beside it; it brings TLS along.
//!
//! # How it is built
//!
//! ```text
//! Locks, Lease ──▶ coordinator ──Event──▶ engine        decides; no I/O, no clock, no tasks
//!                      │ ◀────Action─────────┘
//!                      ▼
//!                  executor ──▶ backend/{postgres,mysql,sqlite}    carries out requests
//! ```
//!
//! `protocol` says what a database is asked about leases, and what it answers. `engine` is the state machine of one client: what each
//! lease and each waiter needs next. `coordinator` feeds it and carries out its actions; `executor` sends them on a few connections,
//! one of which is for heartbeats alone. Under `backend`, each database has the same files: `heartbeat`, `lease`, `queue`, `fence`,
//! `admin`, `records`. `backend/memory` is a database that is a model: tests compare the others with it, and run whole clients on it
//! in `simulation`.
//!
//! Session locks have a connection and a task of their own: `session`. A majority of databases is asked in `quorum/round` and counted
//! in `quorum/held`. Requests that take effect once: `idempotency`, their statements in `backend/records`. The command is
//! `bin/sqlock`, one file per subcommand.
//!
//! [`Idempotency::run`]: idempotency::Idempotency::run
//! [`Idempotency::run_leased`]: idempotency::Idempotency::run_leased
//! [`Quorum`]: quorum::Quorum
//! [`Retry`]: retry::Retry
//! [`Versioned`]: version::Versioned
#![forbid(unsafe_code)]
// Without a database there is nothing to construct, and much that nobody calls.
#![cfg_attr(not(any(feature = "postgres", feature = "mysql", feature = "sqlite")), allow(dead_code, unused))]

// Layers, the highest first. A file imports what stands below it, and nothing that stands above; files in one line belong together.
// `scripts/layers` checks it.
//
//   guide - how to use it, for readers
//   quorum - one lock on several databases
//   idempotency - work that takes effect once
//   locks - the handle that users start from
//   lease - a lease in the hands of a user, alone, with others, as a permit or as the leadership
//   session sweeper transaction - locks of connections, rows in transactions, and what goes with them
//   inspect - who holds what
//   client - what stands behind a handle
//   transaction/row_cache idempotency/in_flight session/manager session/task session/connection session/message session/name session/liveness - what a client remembers
//   coordinator - the only part that feeds the engine and runs its actions
//   executor - connections: sends, repeats, reconnects
//   operation - what a connection can be asked to do
//   simulation - engines against the model, in virtual time
//   database - the databases whose transactions are worked in
//   backend - the stores: SQL, and the model that gives each request its meaning
//   engine - who holds and who is next: pure code
//   protocol - what a store is asked and answers: plain data
//   schema - the tables
//   error name owner token clock backoff panics mutation random - values that know nothing of locks

mod backend;
mod backoff;
mod client;
mod clock;
mod coordinator;
pub mod database;
mod engine;
mod error;
mod executor;
pub mod guide;
pub mod idempotency;
pub mod inspect;
pub mod lease;
mod locks;
mod mutation;
mod name;
mod operation;
mod owner;
mod panics;
mod protocol;
pub mod quorum;
#[cfg(test)]
mod random;
mod schema;
pub mod session;
#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, reason = "tests")]
mod simulation;
pub mod sweeper;
mod token;
mod transaction;

pub use error::{Error, LossCause, Result};
pub use lease::all::LeaseAll;
pub use lease::election;
pub use lease::handle::Lease;
pub use lease::request::LeaseRequest;
pub use lease::semaphore::Semaphore;
pub use locks::{Locks, LocksBuilder};
pub use name::LockName;
pub use owner::Owner;
pub use token::FencingToken;
pub use transaction::{retry, row, version};
