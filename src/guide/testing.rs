//! Testing an application that locks: refusals, losses and outages on demand, in virtual time.
//!
//! Code that takes a [`Locks`](crate::Locks) accepts the client of a
//! [`testing::Memory`](crate::testing::Memory), with the feature `testing` among the development
//! dependencies:
//!
//! ```toml
//! [dev-dependencies]
//! sqlock = { version = "0.1", features = ["testing"] }
//! tokio = { version = "1", features = ["macros", "rt", "test-util"] }
//! ```
//!
//! The features of both sections add up: where the dependency has `default-features = false`, write
//! it here too, or tests build SQLite.
//!
//! Each example below is the body of a test. With `#[tokio::test(start_paused = true)]`, tokio's
//! clock jumps to the next timer when every task waits, and the leases follow that clock: a TTL of
//! thirty seconds passes in less than a millisecond.
//!
//! # Another client holds the name
//!
//! A try is refused at once; a bounded wait ends in a timeout.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> sqlock::Result<()> {
//! use std::time::Duration;
//!
//! let memory = sqlock::testing::Memory::new();
//! let locks = memory.locks();
//! assert!(memory.refuse("report/daily")?);
//! assert!(locks.lease("report/daily").try_acquire().await?.is_none());
//! let waited = locks.lease("report/daily").wait(Duration::from_secs(5)).acquire().await;
//! assert!(waited.is_err_and(|error| error.is_timeout()));
//! memory.allow("report/daily")?;
//! assert!(locks.lease("report/daily").try_acquire().await?.is_some());
//! # Ok(())
//! # }
//! ```
//!
//! # The lease is lost while the work runs
//!
//! [`run`](crate::LeaseRequest::run) drops the work; code with a [`Lease`](crate::Lease) of its own
//! must look at [`lost`](crate::Lease::lost). [`evict`](crate::testing::Memory::evict) ends it as
//! an operator does.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> sqlock::Result<()> {
//! let memory = sqlock::testing::Memory::new();
//! let locks = memory.locks();
//! let work = locks.lease("import").run(async |_lease| {
//!     memory.evict("import")?;
//!     std::future::pending::<sqlock::Result<()>>().await
//! });
//! assert!(work.await.is_err_and(|error| error.is_lost()));
//! assert!(locks.lease("import").try_acquire().await?.is_some(), "another can do it again");
//! # Ok(())
//! # }
//! ```
//!
//! # The holder is asked to release
//!
//! A long job looks at [`revoke_requested`](crate::Lease::revoke_requested) between its steps, or
//! beside them. Another client of the same memory asks.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> sqlock::Result<()> {
//! let memory = sqlock::testing::Memory::new();
//! let (here, there) = (memory.locks(), memory.locks());
//! let lease = here.lease("import").acquire().await?;
//! assert_eq!(there.ask_to_release("import").await?, 1, "one holder");
//! tokio::select! {
//!     () = std::future::pending() => unreachable!("the work goes on for ever"),
//!     () = lease.revoke_requested() => lease.release().await?,
//! }
//! assert!(there.lease("import").try_acquire().await?.is_some());
//! # Ok(())
//! # }
//! ```
//!
//! # The lease expires
//!
//! As if the process had been stopped or cut off for longer than the TTL. Another client then takes
//! the name over, with a greater token. The holder knows first: for a moment a try is still
//! refused. Wait with [`acquire`](crate::LeaseRequest::acquire), or sleep a second and a fiftieth of
//! the TTL before the try.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> sqlock::Result<()> {
//! let memory = sqlock::testing::Memory::new();
//! let (here, there) = (memory.locks(), memory.locks());
//! let lease = here.lease("import").acquire().await?;
//! memory.expire("import")?;
//! assert_eq!(lease.lost().await, sqlock::LossCause::Expired);
//! let next = there.lease("import").acquire().await?;
//! assert!(next.token() > lease.token() && !lease.is_held());
//! # Ok(())
//! # }
//! ```
//!
//! # Another instance takes its turn
//!
//! Each client of one memory acts as a process of its own.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = sqlock::testing::Memory::new();
//! let (here, there) = (memory.locks(), memory.locks());
//! let first = here.lease("migrate").acquire().await?;
//! let mut events = there.events();
//! let second = tokio::spawn(there.lease("migrate").acquire());
//! events.next().await; // it waits
//! assert!(!second.is_finished());
//! first.release().await?;
//! assert!(second.await??.is_held());
//! # Ok(())
//! # }
//! ```
//!
//! # The database is slow
//!
//! A request that takes too long ends in an error, and heartbeats that take too long lose leases.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> sqlock::Result<()> {
//! use std::time::Duration;
//!
//! let memory = sqlock::testing::Memory::new();
//! let locks = memory.locks();
//! memory.delay(Duration::from_millis(300));
//! let start = tokio::time::Instant::now();
//! let lease = locks.lease("a").acquire().await?;
//! assert!(start.elapsed() >= Duration::from_millis(300));
//! memory.delay(Duration::from_secs(60));
//! assert_eq!(lease.lost().await, sqlock::LossCause::Expired);
//! # Ok(())
//! # }
//! ```
//!
//! # The database refuses a statement
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> sqlock::Result<()> {
//! let memory = sqlock::testing::Memory::new();
//! let locks = memory.locks();
//! memory.fail(1);
//! let failed = locks.lease("a").acquire().await;
//! assert!(matches!(failed, Err(sqlock::Error::Database { .. })));
//! assert!(locks.lease("a").acquire().await?.is_held(), "the next request succeeds");
//! # Ok(())
//! # }
//! ```
//!
//! # The database is away
//!
//! A request fails after some seconds, with an error, not a refusal. A short outage loses no lease.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> sqlock::Result<()> {
//! let memory = sqlock::testing::Memory::new();
//! let locks = memory.locks();
//! let held = locks.lease("held").acquire().await?;
//! memory.go_away();
//! let failed = locks.lease("a").try_acquire().await;
//! assert!(matches!(failed, Err(sqlock::Error::Unavailable { .. })));
//! assert!(!locks.health().is_ok());
//! memory.come_back();
//! held.release().await?; // Ok: it was held to the end
//! # Ok(())
//! # }
//! ```
//!
//! # The process is asked to end
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> sqlock::Result<()> {
//! use std::time::Duration;
//!
//! let memory = sqlock::testing::Memory::new();
//! let locks = memory.locks();
//! let lease = locks.lease("a").acquire().await?;
//! let work = async {
//!     tokio::time::sleep(Duration::from_secs(2)).await;
//!     lease.release().await
//! };
//! let (drained, released) = tokio::join!(locks.drain(Duration::from_secs(20)), work);
//! assert!(drained?, "the work finished in time");
//! released
//! # }
//! ```
//!
//! # What needs a database
//!
//! A fence, a row lock, a version and a request with a key run in a transaction of a real database:
//! test such code on a SQLite file in a temporary directory, or on a throwaway PostgreSQL or MySQL
//! if it names the pool's type. Keep the call of a payment provider in a function of the request
//! and the provider's key, which needs neither. Code that takes its work as an argument can be
//! tested here, without the fence that the work begins with.
//!
//! ```
//! use std::time::Duration;
//! use sqlock::{Lease, Locks};
//!
//! /// Returns whether the report was written here: another instance may be at it.
//! async fn nightly(locks: &Locks, work: impl AsyncFnOnce(&Lease) -> sqlock::Result<()>) -> sqlock::Result<bool> {
//!     match locks.lease("report").wait(Duration::ZERO).run(work).await {
//!         Err(error) if error.is_timeout() => Ok(false),
//!         done => done?.map(|()| true),
//!     }
//! }
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> sqlock::Result<()> {
//! let memory = sqlock::testing::Memory::new();
//! let locks = memory.locks();
//! assert!(nightly(&locks, async |_| Ok(())).await?);
//! let lost = nightly(&locks, async |_| {
//!     memory.evict("report")?;
//!     std::future::pending().await
//! });
//! assert!(lost.await.is_err_and(|error| error.is_lost()));
//! memory.refuse("report")?;
//! assert!(!nightly(&locks, async |_| panic!("another instance is at it")).await?);
//! # Ok(())
//! # }
//! ```
