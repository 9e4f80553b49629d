//! Locks without a database, for the tests of applications.
//!
//! [`Memory`] is the model of a database: it stores leases as the databases do, and fails on
//! demand. The [chapter on testing](crate::guide::testing) has an example for each of its faults.
//! [`null_locks`] makes locks that exclude no other holder.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::Kind;
use crate::backend::memory::connection::MemoryBackend;
use crate::backend::memory::server::MemoryServer;
use crate::error::Result;
use crate::locks::{Locks, LocksBuilder};
use crate::name::LockName;

/// A database in memory, for leases alone. Clones share the database.
///
/// Its clients are the same as for a real database, on a store that uses tokio's clock: in a test
/// with `#[tokio::test(start_paused = true)]`, a TTL passes at once. The clients support leases
/// with all options, shared leases, semaphores, [`lease_all`](Locks::lease_all), elections and
/// inspection. There are no tables to migrate. Features on a transaction or a connection of their
/// own need a database, and are refused: fences, row locks, session locks and idempotency, whose
/// lists are empty.
///
/// ```
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> sqlock::Result<()> {
/// let memory = sqlock::testing::Memory::new();
/// let (here, there) = (memory.locks(), memory.locks());
/// let lease = here.lease("invoice/42").acquire().await?;
/// assert!(there.lease("invoice/42").try_acquire().await?.is_none());
/// lease.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Memory {
    server: Arc<MemoryServer>,
}

impl Memory {
    /// Creates an empty database, whose clock starts now.
    #[allow(clippy::new_without_default, reason = "it reads the clock of the runtime")]
    pub fn new() -> Self {
        Self { server: MemoryServer::new() }
    }

    /// Returns a new client, which acts as another process.
    pub fn locks(&self) -> Locks {
        self.builder().build()
    }

    /// Returns the builder of a new client, for its options.
    pub fn builder(&self) -> LocksBuilder {
        LocksBuilder::from_backend(Arc::new(MemoryBackend(Arc::clone(&self.server))), Kind::Memory)
    }

    /// Makes another owner hold the name until [`allow`](Self::allow): tries are refused, and
    /// requests wait. Returns `false`, and changes nothing, when a client holds the name or waits
    /// for it.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`](crate::Error::InvalidName).
    pub fn refuse(&self, name: &str) -> Result<bool> {
        Ok(self.server.refuse(&LockName::new(name)?))
    }

    /// Releases a [refused](Self::refuse) name. The first waiter acquires it within 0.1 seconds.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`](crate::Error::InvalidName).
    pub fn allow(&self, name: &str) -> Result<()> {
        self.server.allow(&LockName::new(name)?);
        Ok(())
    }

    /// Evicts every holder of the name. Each loses its lease with its next heartbeat, within a
    /// second, by [`LossCause::Superseded`](crate::LossCause::Superseded); the holder of a lease
    /// without renewal learns of the eviction from its release. A lease that was released and
    /// blocks the name for the rest of its [`hold_at_least`](crate::LeaseRequest::hold_at_least) is
    /// evicted as well, as by [`Locks::evict`]. Returns the number of evicted holders.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`](crate::Error::InvalidName).
    pub fn evict(&self, name: &str) -> Result<usize> {
        Ok(self.server.evict(&LockName::new(name)?))
    }

    /// Cuts off the clients that hold the name until their leases on it have expired, as a pause of
    /// the process or the network does: their heartbeats stay unanswered for up to the TTL. Their
    /// other leases with a TTL as short are lost as well, all by
    /// [`LossCause::Expired`](crate::LossCause::Expired). Returns how many clients are cut off. A
    /// lease without renewal expires by itself, and its client does not count.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`](crate::Error::InvalidName).
    pub fn expire(&self, name: &str) -> Result<usize> {
        Ok(self.server.expire(&LockName::new(name)?))
    }

    /// Sets how long each answer takes from now on. Zero at first.
    pub fn delay(&self, delay: Duration) {
        self.server.delay(delay);
    }

    /// Makes the next requests fail with [`Error::Database`](crate::Error::Database), without an
    /// effect. Heartbeats and polls of waiters count as well.
    pub fn fail(&self, requests: u32) {
        self.server.fail(requests);
    }

    /// Severs all connections and refuses new ones, until [`come_back`](Self::come_back). Requests
    /// fail with [`Error::Unavailable`](crate::Error::Unavailable) after some seconds, and leases
    /// expire. Stored leases stay.
    pub fn go_away(&self) {
        self.server.go_away();
    }

    /// Accepts connections again.
    pub fn come_back(&self) {
        self.server.come_back();
    }
}

/// Creates locks that exclude no other holder, in this process or another: for an application that
/// needs no locks, such as a demonstration on a laptop. **Do not use them in production, nor in a
/// test of two tasks that must exclude each other**: use [`Memory`] there.
///
/// Every lease is granted at once, without I/O, however many holders the name has, and is held
/// until it is released: no TTL ends it, and permits never run out. Tokens rise. [`Lease::fence`]
/// does nothing. [`max_hold`], [`Locks::evict`] and a shutdown still end a lease, because the
/// application requests these. Leases are shown as shared. As on a `Memory`, there are no row
/// locks, session locks or records of requests.
///
/// The call logs a warning, to make its use visible.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> sqlock::Result<()> {
/// let locks = sqlock::testing::null_locks();
/// let one = locks.lease("invoice/42").acquire().await?;
/// let two = locks.lease("invoice/42").acquire().await?; // at the same time
/// assert!(one.is_held() && two.is_held() && two.token() > one.token());
/// # Ok(())
/// # }
/// ```
///
/// [`Lease::fence`]: crate::Lease::fence
/// [`max_hold`]: crate::LeaseRequest::max_hold
pub fn null_locks() -> Locks {
    tracing::warn!("these locks exclude nobody: every lease is granted at once");
    Memory::new().builder().null().build()
}

impl std::fmt::Debug for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Memory").finish_non_exhaustive()
    }
}
