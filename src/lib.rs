//! Distributed locks, leases and fenced transactions on the SQL database you already run:
//! PostgreSQL, MySQL, MariaDB, and SQLite as the embedded default.
//!
//! Several instances of an application share one database and must not do the same thing twice. A
//! *lease* is a row in that database, with an owner and an expiry: acquired in one statement,
//! renewed by a heartbeat in the background, free again when its holder releases it or dies. A
//! *fence* keeps a transaction from committing if another owner got the lease. No other server is
//! needed.
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
//! locks.migrate().await?;                                     // creates tables beside yours
//!
//! let lease = locks.lease("invoice/42").wait(Duration::from_secs(5)).acquire().await?;
//! let mut tx = pool.begin().await?;
//! lease.fence(&mut tx).await?;                                // no commit if another owner got the lease
//! sqlx::query("UPDATE invoice SET sent = 1 WHERE id = 42").execute(&mut *tx).await?;
//! tx.commit().await?;
//! lease.release().await?;                                     // Ok: it was held to the end
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "sqlite"))]
//! # fn main() {}
//! ```
//!
//! # Which call?
//!
//! | task | call |
//! |---|---|
//! | wait for a name, for some time or without a limit | [`LeaseRequest::acquire`], with [`wait`](LeaseRequest::wait) |
//! | run a job only if no other instance runs it (a nightly job) | [`LeaseRequest::try_acquire`], with [`hold_at_least`](LeaseRequest::hold_at_least) |
//! | many readers or one writer | [`LeaseRequest::shared`], [`Lease::downgrade`] |
//! | acquire several names, all or none | [`Locks::lease_all`] |
//! | limit how many run at a time | [`Locks::semaphore`] |
//! | show how many wait ahead | [`LeaseRequest::while_waiting`], [`Locks::waiters`] |
//! | note the progress of the work, for people and successors | [`Lease::set_note`], [`Locks::last_note`] |
//! | cancel the work when the lease is lost | [`LeaseRequest::run`]; with [`wait`](LeaseRequest::wait) of zero, a held name is [`Error::Timeout`] at once |
//! | end a loop in the background with the process | [`Locks::closed`], and [`Locks::drain`] |
//! | limit how long a worker that hangs holds the name | [`LeaseRequest::max_hold`] |
//! | elect one leader among many instances | [`Locks::election`] |
//! | write data in this database that only the holder may write | [`Lease::fence`] |
//! | have effects elsewhere that only the holder may have | [`Lease::token`], checked by the receiver |
//! | lock something within one transaction | [`Locks::row`] by name; [`Locks::row_of`], [`Locks::rows_of`] for rows of your tables |
//! | take jobs from a table, each worker different ones | [`Locks::rows_where`] with [`skip_locked`](row::RowsWhere::skip_locked) |
//! | write a row only if it is unchanged since it was read, without a lock | [`Versioned`] |
//! | run a transaction again after a concurrent change | [`Retry`] |
//! | let a request take effect once, however often it is sent | [`Idempotency::run`]; for effects elsewhere [`Idempotency::run_leased`]; over HTTP [`idempotency`]`::http` |
//! | re-enter a held lease | [`Owner::scope`], or [`LeaseRequest::owner`] |
//! | hand a held lease to another process | [`Lease::export`], [`Locks::resume`] |
//! | prolong a lease by its token | [`Locks::extend`] |
//! | learn of acquisitions, losses and late heartbeats as they happen | [`Locks::events`] |
//! | answer a readiness probe, show figures | [`Locks::health`] |
//! | ask a holder to release a name | [`Locks::ask_to_release`], [`Lease::revoke_requested`] |
//! | list holders, or evict one | [`Locks::list`], [`Locks::inspect`], [`Locks::evict`] |
//! | hold a lock that writes nothing and ends with its connection | [`Locks::session`] |
//! | purge unused names | [`Locks::sweeper`] |
//! | survive the loss of a server, on a majority of independent ones | [`Quorum`] |
//! | shut down gracefully | [`Locks::drain`] lets what is held finish, [`Locks::shutdown`] does not wait |
//!
//! The [`guide`] compares the calls, lists their costs, and uses them together.
//!
//! # What is promised
//!
//! Mutual exclusion is decided by the database's clock alone. The holder knows first:
//! [`Lease::is_held`] turns false, and [`Lease::lost`] completes, before the database could grant
//! the name to another owner, even after the process was stopped or the machine slept. After
//! [`Locks::evict`], the holder knows at its next heartbeat. [Fencing tokens](FencingToken) only
//! rise. Waiters are served in the order of their arrival, from every task, process and host. A
//! dropped request leaves no lease and no queue entry; after a dropped call on a transaction, roll
//! the transaction back. However many leases are held or waited for, a client opens at most three
//! connections, one of them for heartbeats alone (on SQLite two; and one more for all [session
//! locks](session::SessionLock)).
//!
//! An unavailable database ([`Error::Unavailable`]), a lost lease ([`Error::Lost`]), a timeout
//! ([`Error::Timeout`]), a refusal (`Ok(None)`) and a database that refuses this user or is set up
//! wrongly ([`Error::Access`]) are five different answers.
//!
//! [`guide::limits`] lists what is not promised: pauses longer than the TTL without a fence,
//! effects elsewhere, asynchronous replicas, jumps of the database host's clock.
//!
//! # Features
//!
//! `sqlite` (default), `postgres`, `mysql` (also MariaDB) enable the sqlx drivers of those names.
//! The application chooses TLS, and everything else about connecting, through its own features of
//! sqlx.
//!
//! `axum` adds [`idempotency`]`::http`: requests over HTTP that take effect once, as a layer and
//! extractors for axum. It also makes [`Error`] a response.
//!
//! `metrics` counts and measures with the facade of that name: [`guide::observability`] lists the
//! metrics.
//!
//! `testing` adds `testing::Memory`: locks without a database, in virtual time, for the tests of
//! applications.
//!
//! `cli` builds the command `sqlock`, which holds a lease around any command (`sqlock run migrate
//! -- sqlx migrate run`), for the databases whose features are also enabled. The command includes
//! TLS.
//!
//! # How it is built
//!
//! ```text
//! Locks, Lease ──▶ coordinator ──Input──▶ engine        decides; no I/O, no clock, no tasks
//!                      │ ◀────Action─────────┘
//!                      ▼
//!                  executor ──▶ backend/{postgres,mysql,sqlite}    carries out requests
//! ```
//!
//! `protocol` is the requests about leases and their responses. `engine` is the state machine of
//! one client: what each lease and each waiter needs next. `coordinator` feeds the engine and
//! carries out its actions; `executor` sends its requests on a few connections, one of which is for
//! heartbeats alone. `lease` has the types that users hold: the request, the handle, and its forms:
//! several leases, permits and the leadership. Under `backend`, the files of the databases have the
//! same names: `store` carries out a request, with `acquire`, `change`, `release`, `queue`,
//! `transition`, `heartbeat` and `batch`; `fence`, `rows`, `session`, `note`, `admin` and `records`
//! serve the rest. `backend/memory` is a model of the databases: tests compare the
//! databases with the model, and run whole clients on it in `simulation`.
//!
//! `transaction` has the features inside the caller's own transactions: row locks, versions and
//! their retry. `session` has the task that owns the connection of session locks. `quorum/round`
//! asks a majority of databases, `quorum/tally` decides when the answers suffice, and
//! `quorum/majority` counts their leases. `idempotency` has one
//! file per mode, and its statements are in `backend/records`. The command is `bin/sqlock`, its
//! subcommands are in `bin/sqlock/command`.
//!
//! [`Idempotency::run`]: idempotency::Idempotency::run
//! [`Idempotency::run_leased`]: idempotency::Idempotency::run_leased
//! [`Quorum`]: quorum::Quorum
//! [`Retry`]: retry::Retry
//! [`Versioned`]: version::Versioned
#![forbid(unsafe_code)]
#![cfg_attr(docsrs, feature(doc_cfg))]
// Without a database feature no client can be constructed, and much code is unused.
#![cfg_attr(not(any(feature = "postgres", feature = "mysql", feature = "sqlite")), allow(dead_code, unused))]

// Layers, the highest first. A file imports layers below its own, and none above; files in one line
// form one layer. `scripts/layers` checks it.
//
//   guide - how to use it, for readers
//   testing - a database in memory, for the tests of applications
//   quorum - one lock on several databases
//   idempotency - requests that take effect once
//   locks - the client handle and its builder
//   session - session locks
//   lease - the request, the handle, and what is made of leases: all of several names, semaphores, elections
//   sweeper transaction - the purge, and work in the caller's transactions
//   inspect - holders and waiters
//   client - the state that all handles of a client share
//   transaction/row_cache idempotency/in_flight - the caches of a client
//   session/manager session/task session/connection session/message session/name session/liveness - the session task
//   coordinator - the only part that feeds the engine and runs its actions
//   executor - connections: sends, repeats, reconnects
//   operation - the operations of a connection
//   simulation engine/tests - engines against the model, in virtual time, and in single dialogues
//   database - the bounds for the caller's transactions and pools
//   backend - the stores: SQL, and the model that gives each request its meaning
//   engine - decides the next holder and the next statement: pure code
//   protocol - the requests to a store and their responses: plain data
//   schema - the tables
//   measure - counts for dashboards
//   events health - observation of a client: plain data, and a channel
//   error name owner token clock backoff panics race mutation random rfc3339 - values

mod backend;
mod backoff;
mod client;
mod clock;
mod coordinator;
pub mod database;
mod engine;
mod error;
pub mod events;
mod executor;
pub mod guide;
pub mod health;
pub mod idempotency;
pub mod inspect;
pub mod lease;
mod locks;
mod measure;
mod mutation;
mod name;
mod operation;
mod owner;
mod panics;
mod protocol;
pub mod quorum;
mod race;
#[cfg(test)]
mod random;
mod rfc3339;
mod schema;
pub mod session;
#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, reason = "tests")]
mod simulation;
pub mod sweeper;
#[cfg(feature = "testing")]
pub mod testing;
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
