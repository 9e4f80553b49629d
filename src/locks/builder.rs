//! The options of a client.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::url;
use crate::backend::failover::Failover;
use crate::backend::{Backend, DatabasePool, Kind, PoolBackend};
use crate::client::{Client, Settings};
use crate::clock::CENTURY;
use crate::error::{Error, Result};
use crate::measure::Meter;

/// The options of a [`Locks`](crate::Locks) client.
#[must_use = "a builder does nothing until build is called"]
pub struct LocksBuilder {
    backend: Arc<dyn Backend>,
    kind: Kind,
    connections: usize,
    ttl: RangeInclusive<Duration>,
    holder: Option<String>,
    meter: Meter,
    is_null: bool,
}

impl LocksBuilder {
    pub(super) fn from_pool(pool: impl DatabasePool) -> Self {
        let PoolBackend(backend, kind) = pool.into_backend();
        Self::from_backend(backend.into(), kind)
    }

    pub(crate) fn from_backend(backend: Arc<dyn Backend>, kind: Kind) -> Self {
        Self {
            backend,
            kind,
            connections: 2,
            ttl: Duration::from_secs(1)..=Duration::from_secs(24 * 3600),
            holder: None,
            meter: Meter::default(),
            is_null: false,
        }
    }

    /// Creates a builder for the servers of a list of URLs, as
    /// [`Locks::connect`](crate::Locks::connect). Sends nothing yet.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidUrl`]; [`Error::Unsupported`] for a database whose feature is not enabled.
    pub fn from_urls(urls: &str) -> Result<Self> {
        let (kind, mut servers) = url::servers(urls)?;
        let backend = match servers.len() {
            1 => servers.remove(0),
            _ => Arc::new(Failover::new(servers)),
        };
        Ok(Self::from_backend(backend, kind))
    }

    /// Splits a list of URLs. A comma is a separator if a URL follows it. (Other commas may belong
    /// to a password or to a file's name.)
    #[doc(hidden)]
    pub fn split_urls(urls: &str) -> Vec<&str> {
        url::split(urls)
    }

    /// Requires a synchronous standby, on PostgreSQL only. Every grant, renewal and release, and
    /// every beginning and outcome of an attempt under a lease, is acknowledged only when a
    /// synchronous standby has it as well, so none is lost when the primary fails and that standby
    /// takes over. A server is used only if a synchronous standby is connected to it (the user
    /// needs the right to see the standby: `pg_monitor`).
    ///
    /// While the standby does not answer, requests end in
    /// [`Error::Unavailable`](crate::Error::Unavailable), and leases expire because they cannot be
    /// renewed. Every request takes an additional round trip to the standby.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] on other databases.
    pub fn synchronous(mut self) -> Result<Self> {
        if Arc::get_mut(&mut self.backend).is_some_and(|backend| backend.require_synchronous()) {
            return Ok(self);
        }
        Err(Error::Unsupported {
            what: "an acknowledgement by a synchronous standby",
            reason: "only PostgreSQL has it; on other databases take a quorum of independent servers, or a Galera cluster",
        })
    }

    /// Sets the number of connections for requests: 1 or 2, and the nearer of them for any other
    /// value. By default 2. Heartbeats have a connection of their own. SQLite has one writer, so it
    /// always uses one.
    pub fn connections(mut self, connections: usize) -> Self {
        self.connections = connections.clamp(1, 2);
        self
    }

    /// Sets the TTLs that a lease may request: 1 second to 24 hours by default. With a shorter TTL,
    /// one slow reply loses the lease. The greatest possible TTL is 100 years. With an empty range,
    /// every request is [`Error::OutOfRange`](crate::Error::OutOfRange).
    pub fn ttl_range(mut self, range: RangeInclusive<Duration>) -> Self {
        let (min, max) = range.into_inner();
        self.ttl = min..=max.min(CENTURY);
        self
    }

    /// Sets the holder that [`Locks::list`](crate::Locks::list) shows. By default the host's name
    /// and the process id. Truncated at 255 bytes.
    pub fn holder(mut self, holder: impl Into<String>) -> Self {
        self.holder = Some(holder.into());
        self
    }

    /// Adds the label `name` to the metrics of leases: the function maps the name of each lease to
    /// a label. Without the function, names are no labels. Attempts of requests with a key are
    /// leases whose names begin with `sqlock-idem/`.
    ///
    /// A recorder keeps one series for each value of a label, for ever, so a label with an
    /// unlimited number of values exhausts its memory. Therefore the function returns constants of
    /// the program. It runs a few times for each lease and must be fast.
    ///
    /// ```
    /// # fn example(pool: sqlx::SqlitePool) {
    /// let locks = sqlock::Locks::builder(pool)
    ///     .metrics_label(|name| match name.split_once('/') {
    ///         Some(("invoice", _)) => "invoice",
    ///         Some(("report", _)) => "report",
    ///         _ => "other",
    ///     })
    ///     .build();
    /// # }
    /// ```
    #[cfg(feature = "metrics")]
    pub fn metrics_label(mut self, label: impl Fn(&str) -> &'static str + Send + Sync + 'static) -> Self {
        self.meter = Meter::with_label(label);
        self
    }

    /// Makes every lease shared and endless, so that no lease excludes another.
    #[cfg(feature = "testing")]
    pub(crate) fn null(mut self) -> Self {
        self.is_null = true;
        self
    }

    /// Makes the client. Sends nothing yet.
    pub(super) fn into_client(self) -> Arc<Client> {
        let mut holder = self.holder.unwrap_or_else(this_process);
        holder.truncate(holder.floor_char_boundary(255));
        let holder = holder.replace('\0', "\u{fffd}");
        let (min_ttl, max_ttl) = self.ttl.into_inner();
        let settings = Settings { min_ttl, max_ttl, holder: holder.into(), meter: self.meter, is_null: self.is_null };
        Client::new(self.backend, self.kind, settings, self.connections)
    }
}

impl fmt::Debug for LocksBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocksBuilder")
            .field("kind", &self.kind)
            .field("connections", &self.connections)
            .field("ttl", &self.ttl)
            .finish_non_exhaustive()
    }
}

/// Returns `host/pid`.
fn this_process() -> String {
    #[cfg(unix)]
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    #[cfg(not(unix))]
    let host = std::env::var("COMPUTERNAME").unwrap_or_else(|_| "host".into());
    format!("{host}/{}", std::process::id())
}
