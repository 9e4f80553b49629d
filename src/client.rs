//! The state that all clones of a [`Locks`](crate::Locks) handle share.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{Backend, Kind};
use crate::clock::Moment;
use crate::coordinator::Coordinator;
use crate::error::{Error, Result};
use crate::events::Publisher;
use crate::executor::{Executor, OperationAnswer};
use crate::health::Health;
use crate::idempotency::in_flight::InFlight;
use crate::measure::Meter;
use crate::operation::Operation;
use crate::session::manager::SessionManager;
use crate::transaction::row_cache::RowCache;

/// The options that the builder sets.
pub(crate) struct Settings {
    pub(crate) min_ttl: Duration,
    pub(crate) max_ttl: Duration,
    pub(crate) holder: Arc<str>,
    pub(crate) meter: Meter,
    /// Whether every lease is granted at once and no lease is lost.
    pub(crate) is_null: bool,
}

impl Settings {
    /// Returns an error if a TTL is out of range.
    pub(crate) fn check_ttl(&self, what: &'static str, ttl: Duration) -> Result<()> {
        Error::check_range(what, ttl, self.min_ttl, self.max_ttl)
    }
}

pub(crate) struct Client {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) kind: Kind,
    pub(crate) settings: Settings,
    pub(crate) coordinator: Arc<Coordinator>,
    pub(crate) sessions: SessionManager,
    pub(crate) row_cache: RowCache,
    pub(crate) in_flight: InFlight,
}

impl Client {
    pub(crate) fn new(backend: Arc<dyn Backend>, kind: Kind, settings: Settings, connections: usize) -> Arc<Self> {
        let connections = connections.min(backend.max_connections_used()).max(1);
        let publisher = Arc::<Publisher>::default();
        let executor = Executor::new(Arc::clone(&backend), connections, Arc::clone(&publisher));
        Arc::new(Self {
            coordinator: Coordinator::new(executor, publisher, Arc::clone(&settings.holder), settings.meter.clone()),
            backend,
            kind,
            settings,
            sessions: SessionManager::default(),
            row_cache: RowCache::default(),
            in_flight: InFlight::default(),
        })
    }

    /// Returns the time of the client's clock.
    pub(crate) fn now(&self) -> Moment {
        self.backend.clock().now()
    }

    /// Runs an operation on the connections of the client.
    ///
    /// # Cancel safety
    ///
    /// The operation runs to its end when the future is dropped.
    pub(crate) async fn run<O: Operation>(&self, operation: O) -> Result<O::Output> {
        self.run_with_answer(operation).await.result
    }

    /// Runs an operation, and returns the whole answer.
    pub(crate) async fn run_with_answer<O: Operation>(&self, operation: O) -> OperationAnswer<O::Output> {
        self.coordinator.start();
        self.coordinator.executor().run(operation).await
    }

    /// Ends every wait and refuses every request, waits until no lease is held, and shuts down.
    /// Returns `false` if the time runs out first.
    pub(crate) async fn drain(&self, within: Duration) -> Result<bool> {
        let Health { held, waiting, .. } = self.coordinator.health();
        tracing::info!(held, waiting, "draining: new requests are refused");
        let (leases, sessions) = (self.coordinator.drain(), self.sessions.drain());
        let drained = async {
            leases.await;
            sessions.await;
        };
        let is_drained = tokio::time::timeout(within, drained).await.is_ok();
        let outcome = self.shutdown().await;
        tracing::info!(is_drained, "drained");
        outcome.map(|()| is_drained)
    }

    /// Completes when the client takes no more requests.
    pub(crate) async fn closed(&self) {
        self.coordinator.closed().await;
    }

    /// Releases every lease, ends every wait, and closes the connections.
    pub(crate) async fn shutdown(&self) -> Result<()> {
        let sessions = self.sessions.close();
        let outcome = self.coordinator.close().await;
        sessions.await;
        outcome
    }
}
