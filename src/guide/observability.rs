//! What an operator sees: the log, events, health, and metrics.
//!
//! # The log
//!
//! The crate logs with `tracing`. A client without faults logs one line at INFO, each sweep
//! that purges something one, and a drain two.
//!
//! | level | line | what to do |
//! |---|---|---|
//! | INFO | `started a client for locks` | nothing; it says who the holder is and where |
//! | INFO | `draining: new requests are refused`, `drained` | nothing; how much was held and waited, and whether all of it was finished |
//! | INFO | `cut off the work under a lease at the end of a drain` | look at what the work had done; give the drain more time |
//! | INFO | `took a name over from a dead holder` | see [dead holders](super::runbook#dead-holders), if it comes often |
//! | INFO | `a lease has ended` | nothing; `max_hold` was reached, or this client evicted it |
//! | INFO | `was asked to release a lease` | nothing; the holder decides |
//! | INFO | `the database did not confirm a release…` | nothing; the name is free after its TTL |
//! | INFO | `reconnected to the database`, `heartbeats are answered again` | nothing |
//! | INFO | `swept` | nothing |
//! | INFO | `writing here from now on` | nothing; of several servers, this one is the writable one now |
//! | INFO | `a lease on a majority has ended` | nothing; `max_hold` was reached, or the clients were shut down |
//! | WARN | `a heartbeat is late`, `a heartbeat failed…` | look at the database and the network: leases are lost when the TTL has passed |
//! | WARN | `lost a lease`, `lost the majority for a lease` | read the cause: `it expired before it was renewed` after a pause or an outage, or because a lease without renewal was not extended in time; `it was taken over or evicted` by another client or an operator; `held` counts until the holder noticed |
//! | WARN | `lost the connection that session locks live on` | look at the server and the network; all session locks of the client are lost |
//! | WARN | `left out a row that cannot be read` | look at the row: it was written by hand or damaged |
//! | WARN | `a name cannot be read: later names are not swept` | correct or delete that row by hand: the names after it are never purged |
//! | WARN | `a sweep failed; the next one may succeed` | look at the database, if it comes often |
//! | WARN | `it is not known whether a transaction was committed; its claim shows it` | read the reason; the next attempt finds the outcome, or the caller gets an error that says so |
//! | WARN | `a request with an idempotency key took no effect` | nothing was done; read the error |
//! | WARN | `a request that was resumed failed`, `could not record that the outcome…`, `could not record that a request was refused`, `a request with an idempotency key was run, and its outcome could not be recorded` | read the error; see [an unknown outcome](super::runbook#an-unknown-outcome) |
//! | WARN | `these locks exclude nobody: every lease is granted at once` | only tests and demonstrations use `null_locks` |
//! | ERROR | from the layer for HTTP: a request that shows a mistake in the application | read the message |
//! | DEBUG | each wait, acquisition, refusal and release; a request that a drain has ended | |
//!
//! Two spans at INFO: `acquire` (name, mode, waited, outcome) in the span of its caller, and `hold`
//! (name, token, held, outcome), which may outlive that span, and follows from `acquire`.
//!
//! # Events and health
//!
//! [`Locks::events`] informs the application as events happen, and [`Locks::health`] answers a
//! probe without a statement. [`is_ok`] is false while heartbeats are late or fail: use it for an
//! alert and a readiness probe. A client that neither holds a renewed lease nor waits sends no heartbeat, and its `is_ok` is
//! true even if its last attempt to connect has failed: see `unavailable`. A liveness probe
//! that restarts every process while the database is away makes the outage worse.
//!
//! ```
//! # #[cfg(feature = "testing")]
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> sqlock::Result<()> {
//! use sqlock::events::Event;
//!
//! # let memory = sqlock::testing::Memory::new();
//! # let locks = memory.locks();
//! let mut events = locks.events();
//! let lease = locks.lease("invoice/42").acquire().await?;
//! assert!(matches!(events.next().await, Some(Event::Acquired { .. })));
//! assert_eq!(locks.health().held, 1);
//! lease.release().await?;
//! assert!(matches!(events.next().await, Some(Event::Released { is_confirmed: true, .. })));
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "testing"))]
//! # fn main() {}
//! ```
//!
//! # In SQL
//!
//! The view `sqlock_holders` shows holders and waiters, by the database's clock: one row for each.
//!
//! | column | |
//! |---|---|
//! | `name` | |
//! | `state` | `held`, `kept` (released under [`hold_at_least`]) or `waiting` |
//! | `position` | of a waiter: 1 is next |
//! | `mode`, `permits` | `exclusive`, `shared` or `permits`, and how many |
//! | `holder`, `label`, `owner` | the client, the label, the owner |
//! | `token` | of a holder: the fencing token |
//! | `acquired_at`, `waiting_since` | of a holder; of a waiter |
//! | `note` | of a holder: what it has [written](crate::Lease::set_note) |
//! | `expires_at` | when the holding, or the place in the queue, ends without a further heartbeat |
//!
//! ```sql
//! SELECT name, holder, acquired_at FROM sqlock_holders WHERE state = 'held' ORDER BY acquired_at LIMIT 10;
//! SELECT name, count(*) AS waiters, min(waiting_since) FROM sqlock_holders WHERE state = 'waiting' GROUP BY name;
//! ```
//!
//! Times are `timestamptz` on PostgreSQL, in the session's time zone on MySQL and MariaDB, and text
//! in UTC on SQLite. On PostgreSQL a reader needs SELECT on the view alone, elsewhere on the tables
//! too. Drop the view before you alter the tables by hand; `sqlock schema` prints it.
//!
//! # Metrics
//!
//! The feature `metrics` feeds the recorder that the application installs. Names of locks are no
//! labels unless [`LocksBuilder::metrics_label`](crate::LocksBuilder) maps them to a few constants:
//! the metrics marked with * then have the label `name` as well. Names that begin with
//! `sqlock-idem/` are attempts of requests with a key.
//!
//! | metric | kind | labels |
//! |---|---|---|
//! | `sqlock_acquire_total` * | counter | `kind`: `exclusive`, `shared`, `permits`; `outcome`: `acquired`, `held`, `timed_out`, `cancelled`, `closed`, `unavailable`, `failed`; a `wait` of zero that is refused counts as `held` |
//! | `sqlock_wait_seconds` * | histogram, from the request to the lease | `kind` |
//! | `sqlock_hold_seconds` * | histogram, from the lease to its end | |
//! | `sqlock_held`, `sqlock_waiting` * | gauges | |
//! | `sqlock_lost_total` * | counter | `cause`: `expired`, `superseded`, `max_hold`, `shutdown` |
//! | `sqlock_taken_over_total` * | counter of leases whose holder was dead | |
//! | `sqlock_heartbeat_seconds` | histogram of round trips | |
//! | `sqlock_heartbeat_late_total` | counter | |
//! | `sqlock_heartbeat_failed_total` | counter, also of heartbeats that the database refused at once, which are not late | |
//! | `sqlock_statements_total` | counter of requests to the database | `verb`: what they do |
//! | `sqlock_batch_size` | histogram of operations in one request | |
//! | `sqlock_idempotency_total` | counter of requests with a key | `outcome`: `new`, `replay`, `in_progress`, `mismatch`, `expired`, `unknown` |
//! | `sqlock_idempotency_oldest_unknown_seconds` | gauge: the age of the oldest request with a key that has not ended, or whose outcome is unknown, of all namespaces, as of the last sweep; 0 if there is none. A process that sweeps several databases has the value of the latest sweep | |
//!
//! The last metric is read at the end of each sweep of a [`Sweeper`] of this client, every 5
//! minutes by default, with one read of an index: take the maximum of all processes that sweep. The
//! metric includes attempts in progress, so set an alarm above the time that a handler takes.
//!
//! In one transaction, `sqlock_idempotency_total` counts a request when its outcome is stored or
//! found; under a lease, `new` counts the beginning of an attempt, and `unknown` the requests that
//! find an unknown outcome.
//!
//! A database of a [`Quorum`](crate::quorum::Quorum) that is away for longer than the TTL ends its
//! vote: that counts, and is logged, as a lost lease, although the lease on the majority is held.
//! The loss of a majority is logged as `lost the majority for a lease`.
//!
//! The dashboard reads the histograms as buckets, which the exporter must be told to make, as in
//! `examples/service.rs`. `examples/observability` has it, for Grafana, and alerts for Prometheus;
//! [`runbook`](super::runbook) says what to do when one fires.
//!
//! [`Locks::events`]: crate::Locks::events
//! [`Locks::health`]: crate::Locks::health
//! [`Sweeper`]: crate::sweeper::Sweeper
//! [`hold_at_least`]: crate::LeaseRequest::hold_at_least
//! [`is_ok`]: crate::health::Health::is_ok
