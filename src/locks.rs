//! The client handle.

mod builder;
mod inspect;
mod url;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::DatabasePool;
use crate::client::Client;
use crate::error::Result;
use crate::events::Events;
use crate::health::Health;
use crate::lease::ExportedLease;
use crate::lease::all::LeaseAllRequest;
use crate::lease::election::Election;
use crate::lease::handle::Lease;
use crate::lease::request::LeaseRequest;
use crate::lease::semaphore::Semaphore;
use crate::operation::Connect;
use crate::session::SessionRequest;
use crate::sweeper::Sweeper;
use crate::transaction::row::{KeyColumns, RowLock, RowOf, RowsOf, RowsWhere};

pub use builder::LocksBuilder;

/// A client for locks in one database. Cloning is cheap; clones share connections and queues.
///
/// A client is made from the application's sqlx pool. It opens at most three connections of its own
/// with that pool's connect options, when they are first needed, however many leases it holds or
/// waits for: one for heartbeats alone, and two for everything else (on SQLite one). All [session
/// locks](Self::session) live on one more connection, which is closed 5 seconds after the last of
/// them (opening it takes a second one on PostgreSQL). Hooks of the pool, such as `after_connect`,
/// do not run on these connections: put required settings, such as a `search_path`, into the
/// connect options. On PostgreSQL and MySQL, later connections have the options of
/// [`Pool::set_connect_options`](sqlx::Pool::set_connect_options), such as a new password. A SQLite
/// database in memory exists in the pool's own connections only, so the client borrows one for each
/// statement.
///
/// Like a pool, a client belongs to the tokio runtime on which it is first used; after the end of
/// that runtime, calls fail with [`Error::Closed`](crate::Error::Closed). Outside of a runtime, its
/// methods panic like tokio's.
///
/// ```
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let pool = sqlx::SqlitePool::connect("sqlite://app.db?mode=rwc").await?;
/// let locks = sqlock::Locks::new(pool);
/// locks.migrate().await?;
/// let lease = locks.lease("invoice/42").acquire().await?;
/// lease.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[doc(alias = "mutex")]
pub struct Locks {
    client: Arc<Client>,
}

impl Locks {
    /// Creates a client on the database of a `PgPool`, `MySqlPool` or `SqlitePool`. Sends nothing
    /// yet.
    pub fn new(pool: impl DatabasePool) -> Self {
        Self::builder(pool).build()
    }

    /// Returns the builder of a client, to set options.
    pub fn builder(pool: impl DatabasePool) -> LocksBuilder {
        LocksBuilder::from_pool(pool)
    }

    /// Connects to the database of a URL, or to the first writable one of several URLs, which are
    /// separated by commas: a primary and its standbys, or the nodes of a cluster. `postgres://…`
    /// or `mysql://…` (also `mariadb://…`), all of one kind; `sqlite:…`, a single one. The returned
    /// client has reached a server.
    ///
    /// When the server is lost, or becomes a replica, the client tries the others, beginning with
    /// the last one that accepted writes. The [guide](crate::guide::cluster) describes a failover.
    /// Percent-encode a comma in a password if the text after the comma looks like a URL.
    ///
    /// ```no_run
    /// # async fn example() -> sqlock::Result<()> {
    /// let locks = sqlock::Locks::connect("postgres://app@db1/app,postgres://app@db2/app").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidUrl`](crate::Error::InvalidUrl),
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a database whose feature is not
    /// enabled, [`Error::Access`](crate::Error::Access) when each server refuses this client,
    /// and [`Error::Unavailable`](crate::Error::Unavailable), with a reason for each server, when
    /// no writable server can be reached.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind.
    pub async fn connect(urls: &str) -> Result<Self> {
        LocksBuilder::from_urls(urls)?.connect().await
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// Creates the tables, or brings them up to date. Any number of processes may do this at once.
    /// When the tables are up to date, the right to read suffices. Otherwise the right to create
    /// tables is needed, and on MySQL and MariaDB `CREATE`, `CREATE VIEW`, `DROP` (to replace the
    /// view), `SELECT`, `INSERT`, `UPDATE` and `DELETE`.
    ///
    /// The view `sqlock_holders` shows people and dashboards the [holders and waiters](Self::list)
    /// of all names with their times.
    ///
    /// A migration waits up to 30 seconds for another process that migrates the same database.
    ///
    /// The history is in `_sqlock_migrations`, apart from the application's own `_sqlx_migrations`.
    ///
    /// # Errors
    ///
    /// [`Error::Migrate`](crate::Error::Migrate),
    /// [`Error::NewerSchema`](crate::Error::NewerSchema), [`Error::Access`](crate::Error::Access),
    /// [`Error::Unavailable`](crate::Error::Unavailable).
    ///
    /// # Cancel safety
    ///
    /// A dropped future leaves no lock behind, and `migrate` can be called again.
    pub async fn migrate(&self) -> Result<()> {
        self.client.backend.migrate().await
    }

    /// Requests the lease on a name: 1 to 255 bytes of UTF-8 without NUL.
    #[doc(alias = "lock")]
    #[doc(alias = "mutex")]
    pub fn lease(&self, name: impl Into<String>) -> LeaseRequest {
        LeaseRequest::new(Arc::clone(&self.client), name.into())
    }

    /// Requests the leases on several names, all or none, in any order:
    /// `locks.lease_all(["account/3", "account/7"])`. At most 64 different names; a repeated name
    /// counts once. Names to [share](LeaseAllRequest::shared) and
    /// [permits](LeaseAllRequest::permits), which add up, can be added, but not one name in two
    /// modes.
    pub fn lease_all<N: Into<String>>(&self, names: impl IntoIterator<Item = N>) -> LeaseAllRequest {
        LeaseAllRequest::new(self.lease(""), names)
    }

    /// Returns a semaphore: at most `permits`, 1 to 2 147 483 647, are held under a name at a time,
    /// by any number of processes. With another number, requests for permits fail with
    /// [`Error::Permits`](crate::Error::Permits).
    pub fn semaphore(&self, name: impl Into<String>, permits: u32) -> Semaphore {
        Semaphore::new(self.lease(name), permits)
    }

    /// Requests a session lock on a name: 1 to 255 bytes of UTF-8 without NUL. The lock lives on a
    /// connection, ends with that connection, and needs no tables.
    /// [`SessionLock`](crate::session::SessionLock) describes its limits.
    #[doc(alias = "advisory lock")]
    #[doc(alias = "pg_advisory_lock")]
    #[doc(alias = "GET_LOCK")]
    pub fn session(&self, name: impl Into<String>) -> SessionRequest {
        SessionRequest::new(Arc::clone(&self.client), name.into())
    }

    /// Returns an election of one leader among the candidates for a name.
    #[doc(alias = "leader")]
    pub fn election(&self, name: impl Into<String>) -> Election {
        let name = name.into();
        Election::new(Arc::clone(&self.client), name.clone(), self.lease(name))
    }

    /// Returns a row lock by name, for the caller's own transaction:
    /// `locks.row("stock/shirts").lock(&mut tx)`.
    #[doc(alias = "FOR UPDATE")]
    pub fn row(&self, name: impl Into<String>) -> RowLock {
        RowLock::new(Arc::clone(&self.client), name.into())
    }

    /// Returns a lock on the row of the caller's own `table` whose `column`, which must be uniquely
    /// indexed, is `key`: `locks.row_of("accounts", "id", 7).lock(&mut tx)`. A key may have several
    /// columns: `locks.row_of("seats", ("hall", "place"), (1, "A7"))`.
    pub fn row_of<C, K, const N: usize>(&self, table: impl Into<String>, columns: C, key: K) -> RowOf<K, N>
    where
        C: KeyColumns<N>,
    {
        RowOf::new(Arc::clone(&self.client), table.into(), columns.into_names(), key)
    }

    /// Returns a lock on several rows of the caller's own table, by keys, in one order:
    /// `locks.rows_of("accounts", "id", [7, 3]).lock(&mut tx)`.
    pub fn rows_of<K>(
        &self,
        table: impl Into<String>,
        column: impl Into<String>,
        keys: impl IntoIterator<Item = K>,
    ) -> RowsOf<K> {
        RowsOf::new(Arc::clone(&self.client), table.into(), column.into(), keys.into_iter().collect())
    }

    /// Returns a lock on rows of the caller's own table, by a condition: a queue of jobs. Locking
    /// returns the `column` of each row.
    pub fn rows_where(&self, table: impl Into<String>, column: impl Into<String>) -> RowsWhere {
        RowsWhere::new(Arc::clone(&self.client), table.into(), column.into())
    }

    /// Takes over a lease that another process [exported](Lease::export), and renews it from now
    /// on.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`](crate::Error::Lost) when the lease has already ended;
    /// [`Error::OutOfRange`](crate::Error::OutOfRange) when this client does not allow its TTL;
    /// [`Error::Closed`](crate::Error::Closed); [`Error::Unavailable`](crate::Error::Unavailable).
    ///
    /// # Cancel safety
    ///
    /// The lease can be resumed again after the future was dropped.
    pub async fn resume(&self, exported: ExportedLease) -> Result<Lease> {
        Lease::resume(&self.client, exported).await
    }

    /// Returns the events of this client from now on. A slow reader never delays the client: the
    /// reader misses events, and receives their number.
    pub fn events(&self) -> Events {
        self.client.coordinator.events()
    }

    /// Returns the health of this client: its leases, and whether the database answers its
    /// heartbeats. Reads memory and does no I/O, so a probe may call this method at any rate.
    pub fn health(&self) -> Health {
        self.client.coordinator.health()
    }

    /// Returns the sweeper, which purges unused names and expired records of requests.
    pub fn sweeper(&self) -> Sweeper {
        Sweeper::new(Arc::clone(&self.client))
    }

    /// Lets the work in progress finish, and [shuts down](Self::shutdown): for a process that is
    /// asked to end. From the call on, no lease is granted, and no session lock is asked for, and
    /// every request and every wait ends with [`Error::Closed`](crate::Error::Closed). Held leases
    /// and locks stay held, and leases are renewed, until they are released or `timeout` has
    /// passed. Returns whether all of them had ended by then, by a release or a loss; the others
    /// are lost with [`LossCause::Shutdown`](crate::LossCause::Shutdown).
    ///
    /// ```
    /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
    /// use std::time::Duration;
    ///
    /// if !locks.drain(Duration::from_secs(20)).await? {
    ///     println!("some work did not finish in time");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`shutdown`](Self::shutdown).
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, requests stay refused. The shutdown may not have begun, or not
    /// have ended: call [`shutdown`](Self::shutdown) or `drain` again.
    pub async fn drain(&self, timeout: Duration) -> Result<bool> {
        self.client.drain(timeout).await
    }

    /// Completes when this client takes no more requests: from the call of [`drain`](Self::drain)
    /// or [`shutdown`](Self::shutdown) on, or when the runtime of its tasks has ended. For a loop
    /// in the background that must end with the process.
    ///
    /// ```
    /// # async fn report(locks: &sqlock::Locks) -> sqlock::Result<()> { Ok(()) }
    /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
    /// let mut nights = tokio::time::interval(std::time::Duration::from_secs(86_400));
    /// loop {
    ///     tokio::select! {
    ///         _ = nights.tick() => report(&locks).await?,
    ///         () = locks.closed() => break Ok(()),
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Dropping the future has no effect.
    pub async fn closed(&self) {
        self.client.closed().await;
    }

    /// Releases every lease and session lock of this client, refuses its waiters, and closes its
    /// connections. Locks that the application still holds are lost with
    /// [`LossCause::Shutdown`](crate::LossCause::Shutdown).
    ///
    /// For the orderly end of a process: dropping every handle also releases the locks, but does
    /// not wait for the releases, and a runtime that stops at once leaves the names taken until
    /// their TTL has passed. While the database does not answer, the shutdown takes up to some 20
    /// seconds; while a row stays locked, 3 seconds. Leases that were not released by then end with
    /// their TTL.
    ///
    /// # Errors
    ///
    /// The error of the last failed release, after all releases were tried.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future after its first poll does not stop the releases.
    pub async fn shutdown(&self) -> Result<()> {
        self.client.shutdown().await
    }
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locks").field("kind", &self.client.kind).finish_non_exhaustive()
    }
}

impl<P: DatabasePool> From<P> for Locks {
    fn from(pool: P) -> Self {
        Self::new(pool)
    }
}

impl LocksBuilder {
    /// Connects to the server and returns the client.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable) and
    /// [`Error::Access`](crate::Error::Access), with a reason for each server.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves nothing behind.
    pub async fn connect(self) -> Result<Locks> {
        let locks = self.build();
        locks.client.run(Connect).await?;
        Ok(locks)
    }

    /// Creates the client. Sends nothing yet.
    pub fn build(self) -> Locks {
        Locks { client: self.into_client() }
    }
}
