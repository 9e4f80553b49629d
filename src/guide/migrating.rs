//! Moving to sqlock from Redis locks, ShedLock, advisory locks and hand-written tables: code before
//! and after.
//!
//! # During the rollout
//!
//! The old and the new lock do not exclude each other, and for some minutes both versions of the
//! application run. In the first release take both locks, the old one first; remove the old one in
//! the next release. A job that may run twice during the rollout needs no such step.
//!
//! # From a Redis lock
//!
//! Before, as most applications have it: a key with a random value and an expiry, and a script that
//! deletes the key if it still has that value.
//!
//! ```text
//! SET lock:invoice:42 <random> NX PX 30000      -- again every 100 ms until it answers OK
//! … work, for 30 seconds at most …
//! EVAL "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end" …
//! ```
//!
//! After. The lease is renewed while the process lives, waiters have a queue, and the transaction
//! cannot commit if another owner got the lease:
//!
//! ```
//! # use std::time::Duration;
//! # async fn example(pool: sqlx::SqlitePool, locks: sqlock::Locks) -> Result<(), Box<dyn std::error::Error>> {
//! let lease = locks.lease("invoice/42").wait(Duration::from_secs(5)).acquire().await?;
//! let mut tx = pool.begin().await?;
//! lease.fence(&mut tx).await?;
//! // … writes …
//! tx.commit().await?;
//! lease.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! | Redis | sqlock |
//! |---|---|
//! | `PX 30000` | [`ttl`](crate::LeaseRequest::ttl): how long a dead holder blocks the name, no limit for the work. A limit is [`max_hold`](crate::LeaseRequest::max_hold) |
//! | the random value | owner and token, compared in each statement |
//! | a watchdog or `extend` | the heartbeat, unless [`renew(false)`](crate::LeaseRequest::renew) |
//! | `tryLock(wait, lease)` of Redisson | [`wait`](crate::LeaseRequest::wait), [`try_acquire`](crate::LeaseRequest::try_acquire) |
//! | fair lock, read-write lock, semaphore | every lease is fair; [`shared`](crate::LeaseRequest::shared), [`Locks::semaphore`](crate::Locks::semaphore) |
//! | multi-lock | [`Locks::lease_all`](crate::Locks::lease_all) |
//! | Redlock on five servers | [`Quorum`](crate::quorum::Quorum) |
//!
//! What gets slower: a grant is a durable commit, some tenths of a millisecond on the database
//! instead of a write to memory. If a lock may be lost and guards no data (a rate limit, a cache
//! that is built twice at worst), leave it in Redis.
//!
//! # From ShedLock
//!
//! Before, in Java:
//!
//! ```text
//! @Scheduled(cron = "0 0 3 * * *")
//! @SchedulerLock(name = "report", lockAtMostFor = "PT1H", lockAtLeastFor = "PT5M")
//! void report() { … }
//! ```
//!
//! After, in the task that the scheduler starts:
//!
//! ```
//! # use std::time::Duration;
//! # async fn build_report() {}
//! # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
//! let request = locks.lease("report").hold_at_least(Duration::from_secs(300));
//! let Some(lease) = request.try_acquire().await? else {
//!     return Ok(()); // another instance does it
//! };
//! tokio::select! {
//!     () = build_report() => lease.release().await?,
//!     cause = lease.lost() => println!("stopped: {cause}"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! | ShedLock | sqlock |
//! |---|---|
//! | `lockAtMostFor`, longer than the longest run | [`ttl`](crate::LeaseRequest::ttl), 30 seconds: the lease is renewed, so a crash blocks the job for seconds instead of an hour |
//! | `lockAtLeastFor` | [`hold_at_least`](crate::LeaseRequest::hold_at_least) |
//! | `LockExtender` | not needed; [`Lease::extend`](crate::Lease::extend) |
//! | `LockAssert` | pass the [`Lease`](crate::Lease) to the code that needs it |
//! | `usingDbTime()` | always |
//! | table `shedlock` | [`Locks::migrate`](crate::Locks::migrate) creates its own; drop the old one later |
//!
//! A job of another language, or of cron, runs under `sqlock run --nonblock --skip-ok
//! --hold-at-least 5m report -- ./report`.
//!
//! # From advisory locks
//!
//! Before:
//!
//! ```text
//! SELECT pg_advisory_lock(42);         -- on some connection of a pool; GET_LOCK('report', 10) on MySQL
//! … work …
//! SELECT pg_advisory_unlock(42);       -- on the same connection, or it stays locked
//! ```
//!
//! After, with the same properties but without the traps: a connection of its own, a loss that is
//! noticed, and a refusal behind a pooler:
//!
//! ```
//! # use std::time::Duration;
//! # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
//! let lock = locks.session("report").wait(Duration::from_secs(10)).acquire().await?;
//! // … short work …
//! lock.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! Take a [lease](crate::Locks::lease) instead if the work outlives a connection, must be fenced,
//! or goes through a transaction pooler. Names replace numbers. A session lock and
//! `pg_advisory_lock` of your own do not exclude each other. `pg_advisory_xact_lock` becomes
//! `locks.row("report").lock(&mut tx)`.
//!
//! # From a hand-written table
//!
//! Before:
//!
//! ```text
//! INSERT INTO locks (name, owner, expires_at) VALUES ('report', 'host-7', now() + interval '5 min');
//! -- on a duplicate key: wait and try again, or
//! UPDATE locks SET owner = 'host-8', expires_at = … WHERE name = 'report' AND expires_at < now();
//! DELETE FROM locks WHERE name = 'report';
//! ```
//!
//! The usual faults: the `DELETE` does not compare the owner, so a slow holder deletes the lock of
//! the next one; `expires_at` comes from the clients' clocks; the lock is never renewed; and
//! nothing stops a holder that was paused. After:
//!
//! ```
//! # async fn build_report() -> anyhow::Result<()> { Ok(()) }
//! # async fn example(locks: sqlock::Locks) -> anyhow::Result<()> {
//! locks.lease("report").run(async |_lease| build_report().await).await??;
//! # Ok(())
//! # }
//! ```
//!
//! A row that exists only to be locked with `SELECT … FOR UPDATE` becomes a name, without the row
//! that must be inserted first:
//!
//! ```
//! # async fn example(pool: sqlx::SqlitePool, locks: sqlock::Locks) -> Result<(), Box<dyn std::error::Error>> {
//! let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?; // on SQLite; elsewhere `begin()`
//! locks.row("stock/shirts").lock(&mut tx).await?;
//! // … read and write …
//! tx.commit().await?;
//! # Ok(())
//! # }
//! ```
//!
//! A column `status = 'running'` that a crashed worker leaves behind becomes
//! [`rows_where`](crate::Locks::rows_where) with `skip_locked` for jobs that fit a transaction, and
//! a lease on the job's name for longer ones. A table of request ids that is read before the effect
//! and written after it becomes [`Idempotency`](crate::idempotency::Idempotency).
