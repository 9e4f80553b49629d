//! Several servers that stand for one: the first that can be written is the database, until it is not any more.
//!
//! Which one can be written, each says itself when a connection is opened: a replica refuses. Whoever loses its connection, or
//! finds that the server has become a replica, connects anew, and so comes to the next one.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::timeout;

use super::{Anchoring, Backend, Job, Session};
use crate::error::{Error, Result, not_writable, reason};
use crate::protocol::timing::CONNECT_WITHIN;

/// What is left of the time for connecting when every server has had its share.
const REST: Duration = Duration::from_millis(200);

/// The servers of one database, of which one can be written at a time, or any.
pub(crate) struct Failover {
    servers: Vec<Arc<dyn Backend>>,
    /// The one that could be written last.
    chosen: AtomicUsize,
}

impl Failover {
    pub(crate) fn new(servers: Vec<Arc<dyn Backend>>) -> Self {
        Self { servers, chosen: AtomicUsize::new(0) }
    }

    fn chosen(&self) -> &dyn Backend {
        &*self.servers[self.chosen.load(Ordering::Relaxed)]
    }

    /// Asks one server after the other, beginning with the one that could be written last. Each has its share of the time for
    /// connecting.
    async fn connect_with<'a>(
        &'a self,
        connect: impl Fn(&'a dyn Backend) -> Job<'a, Box<dyn Session>>,
    ) -> Result<Box<dyn Session>, sqlx::Error> {
        let count = self.servers.len();
        let within = CONNECT_WITHIN.saturating_sub(REST) / u32::try_from(count).unwrap_or(u32::MAX);
        let mut reasons = Vec::with_capacity(count);
        let first = self.chosen.load(Ordering::Relaxed);
        for i in (first..count).chain(0..first) {
            let server = &*self.servers[i];
            let place = server.place();
            match timeout(within, connect(server)).await {
                Ok(Ok(session)) => {
                    if self.chosen.swap(i, Ordering::Relaxed) != i {
                        tracing::info!(server = place, "writing here from now on");
                    }
                    return Ok(session);
                }
                Ok(Err(error)) => {
                    let told = reason(&error);
                    reasons.push(if told.contains(&place) { told } else { format!("{place}: {told}") });
                }
                Err(_) => reasons.push(format!("{place}: no connection within {within:?}")),
            }
        }
        Err(not_writable(format!("none of the {count} servers can be written: {}", reasons.join("; "))))
    }

    /// Makes sure that the chosen one can be written at present.
    async fn choose(&self) -> Result<&dyn Backend, sqlx::Error> {
        let session = self.connect().await?;
        // That it ends in order is worth nothing to us.
        let _ = timeout(REST, session.close()).await;
        Ok(self.chosen())
    }
}

impl Backend for Failover {
    fn place(&self) -> String {
        self.servers.iter().map(|server| server.place()).collect::<Vec<_>>().join(", ")
    }

    fn synchronous(&mut self) -> bool {
        self.servers.iter_mut().all(|server| Arc::get_mut(server).is_some_and(Backend::synchronous))
    }

    fn is_one_of_many_writers(&self) -> bool {
        // Of one cluster, whichever of its nodes has said so.
        self.servers.iter().any(|server| server.is_one_of_many_writers())
    }

    fn connect(&self) -> Job<'_, Box<dyn Session>> {
        Box::pin(self.connect_with(|server| server.connect()))
    }

    fn can_notify(&self) -> bool {
        self.chosen().can_notify()
    }

    fn connect_for_heartbeats(&self) -> Job<'_, Box<dyn Session>> {
        Box::pin(self.connect_with(|server| server.connect_for_heartbeats()))
    }

    fn useful_connections(&self) -> usize {
        self.chosen().useful_connections()
    }

    fn longest_batch(&self) -> usize {
        self.chosen().longest_batch()
    }

    fn migrate(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
        Box::pin(async move {
            let chosen = timeout(CONNECT_WITHIN, self.choose()).await;
            let chosen =
                chosen.unwrap_or_else(|_| Err(sqlx::Error::PoolTimedOut)).map_err(crate::schema::unconnected)?;
            chosen.migrate().await
        })
    }

    fn anchor(&self) -> Anchoring<'_> {
        Box::pin(async move {
            let failed = |error| Error::from_sqlx("open a connection for session locks", error);
            self.choose().await.map_err(failed)?.anchor().await
        })
    }
}
