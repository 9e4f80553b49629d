//! Several servers of one database: requests go to the first that accepts writes, while it does.
//!
//! A replica refuses a new connection. A client reconnects when it loses its connection or finds
//! that the server has become a replica, and so reaches the next server.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::timeout;

use super::{Backend, BoxFuture, IsWaiting, SessionHolder, SessionLocks, Store, StoreFuture};
use crate::error::{AccessError, Error, Result, not_writable, reason};
use crate::name::LockName;
use crate::protocol::timing::CONNECT_TIMEOUT;

/// The part of the time for connecting that is not divided among the servers.
const RESERVE: Duration = Duration::from_millis(200);

/// The servers of one database. One accepts writes at a time, or all do.
pub(crate) struct Failover {
    servers: Vec<Arc<dyn Backend>>,
    /// The index of the server that accepted writes last.
    chosen: AtomicUsize,
    /// The index of the server that is tried first.
    first: AtomicUsize,
}

impl Failover {
    pub(crate) fn new(servers: Vec<Arc<dyn Backend>>) -> Self {
        Self { servers, chosen: AtomicUsize::new(0), first: AtomicUsize::new(0) }
    }

    fn chosen(&self) -> &dyn Backend {
        &*self.servers[self.chosen.load(Ordering::Relaxed)]
    }

    /// Connects to one server after the other, beginning with the one that accepted writes last.
    /// The time for connecting is divided equally. A caller that has less time drops the future
    /// while a server does not answer. The next call then begins with the server after that one,
    /// or, if others were tried before it, with that one: it had the rest of the time only.
    async fn connect_with<'a>(
        &'a self,
        connect: impl Fn(&'a dyn Backend) -> StoreFuture<'a, Box<dyn Store>>,
    ) -> Result<Box<dyn Store>, sqlx::Error> {
        let count = self.servers.len();
        let within = CONNECT_TIMEOUT.saturating_sub(RESERVE) / u32::try_from(count).unwrap_or(u32::MAX);
        let (mut reasons, mut refusals) = (Vec::with_capacity(count), Vec::new());
        let first = self.first.load(Ordering::Relaxed);
        for i in (first..count).chain(0..first) {
            let server = &*self.servers[i];
            let address = server.address();
            let next = if i == first { (i + 1) % count } else { i };
            let mut abandoned = NextIfAbandoned { first: &self.first, next: Some(next) };
            let connected = timeout(within, connect(server)).await;
            abandoned.next = None;
            match connected {
                Ok(Ok(store)) => {
                    self.first.store(i, Ordering::Relaxed);
                    if self.chosen.swap(i, Ordering::Relaxed) != i {
                        tracing::info!(server = address, "writing here from now on");
                    }
                    return Ok(store);
                }
                Ok(Err(error)) => {
                    let reason = reason(&error);
                    reasons.push(if reason.contains(&address) { reason } else { format!("{address}: {reason}") });
                    refusals.extend(AccessError::from_connect(&error).map(|_| error));
                }
                Err(_) => reasons.push(format!("{address}: no connection within {within:?}")),
            }
        }
        // Another attempt would fail in the same way only if all servers have refused this client.
        if refusals.len() == count {
            return Err(refusals.swap_remove(0));
        }
        Err(not_writable(format!("none of the {count} servers accepts writes: {}", reasons.join("; "))))
    }

    /// Connects to a server that accepts writes, and returns it.
    async fn choose(&self) -> Result<&dyn Backend, sqlx::Error> {
        let store = self.connect().await?;
        // An error on closing does not matter: the server has accepted the connection.
        let _ = timeout(RESERVE, store.close()).await;
        Ok(self.chosen())
    }
}

/// Stores which server is tried first after a future was dropped during an attempt.
struct NextIfAbandoned<'a> {
    first: &'a AtomicUsize,
    /// `None` after an answer.
    next: Option<usize>,
}

impl Drop for NextIfAbandoned<'_> {
    fn drop(&mut self) {
        if let Some(next) = self.next {
            self.first.store(next, Ordering::Relaxed);
        }
    }
}

impl Backend for Failover {
    fn address(&self) -> String {
        self.servers.iter().map(|server| server.address()).collect::<Vec<_>>().join(", ")
    }

    fn require_synchronous(&mut self) -> bool {
        self.servers.iter_mut().all(|server| Arc::get_mut(server).is_some_and(Backend::require_synchronous))
    }

    fn is_multi_primary(&self) -> bool {
        // The servers are nodes of one cluster, so the report of one is enough.
        self.servers.iter().any(|server| server.is_multi_primary())
    }

    fn connect(&self) -> StoreFuture<'_, Box<dyn Store>> {
        Box::pin(self.connect_with(|server| server.connect()))
    }

    fn can_notify(&self) -> bool {
        self.chosen().can_notify()
    }

    fn connect_for_heartbeats(&self, is_waiting: IsWaiting) -> StoreFuture<'_, Box<dyn Store>> {
        Box::pin(self.connect_with(move |server| server.connect_for_heartbeats(is_waiting.clone())))
    }

    fn max_connections_used(&self) -> usize {
        self.chosen().max_connections_used()
    }

    fn max_batch_len(&self) -> usize {
        self.chosen().max_batch_len()
    }

    fn migrate(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let chosen = timeout(CONNECT_TIMEOUT, self.choose()).await;
            let chosen =
                chosen.unwrap_or_else(|_| Err(sqlx::Error::PoolTimedOut)).map_err(crate::schema::connect_error)?;
            chosen.migrate().await
        })
    }

    fn open_session_locks(&self) -> BoxFuture<'_, Result<Box<dyn SessionLocks>>> {
        Box::pin(async move {
            let failed = |error| Error::from_sqlx("open a connection for session locks", error);
            self.choose().await.map_err(failed)?.open_session_locks().await
        })
    }

    fn session_holders<'a>(&'a self, name: &'a LockName) -> BoxFuture<'a, Result<Vec<SessionHolder>>> {
        Box::pin(async move {
            let failed = |error| Error::from_sqlx("list the holders of a session lock", error);
            self.choose().await.map_err(failed)?.session_holders(name).await
        })
    }
}

#[cfg(all(test, feature = "testing"))]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use tokio::time::{Instant, sleep};

    use super::*;
    use crate::backend::memory::connection::MemoryBackend;
    use crate::backend::memory::server::MemoryServer;

    const CONNECTING: Duration = Duration::from_millis(300);

    /// Connects to a server, unless it is the first, which is silent.
    fn connect<'a>(servers: &'a Failover) -> impl Fn(&'a dyn Backend) -> StoreFuture<'a, Box<dyn Store>> {
        move |server| {
            let is_silent = std::ptr::addr_eq(server, &*servers.servers[0]);
            Box::pin(async move {
                sleep(if is_silent { Duration::MAX } else { CONNECTING }).await;
                server.connect().await
            })
        }
    }

    /// Of the caller's two seconds, the share of the first server takes all but a tenth.
    #[tokio::test(start_paused = true)]
    async fn server_with_the_rest_of_the_time_is_tried_again() {
        const LIMIT: Duration = Duration::from_secs(2);
        let server = || Arc::new(MemoryBackend(MemoryServer::new())) as Arc<dyn Backend>;
        let servers = Failover::new(vec![server(), server()]);
        let start = Instant::now();
        assert!(timeout(LIMIT, servers.connect_with(connect(&servers))).await.is_err(), "the first server is silent");
        timeout(LIMIT, servers.connect_with(connect(&servers))).await.expect("in time").expect("connect");
        assert_eq!(start.elapsed(), LIMIT + CONNECTING);
    }
}
