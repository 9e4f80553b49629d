//! The handle, and the way to every primitive.

mod builder;
mod url;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::backend::Names;
use crate::backoff::Backoff;
use crate::client::Client;
use crate::error::{Error, Result};
use crate::inspect::{self, LeaseInfo, WaiterInfo};
use crate::lease::ExportedLease;
use crate::lease::all::LeaseAllRequest;
use crate::lease::election::Election;
use crate::lease::handle::Lease;
use crate::lease::request::LeaseRequest;
use crate::lease::semaphore::Semaphore;
use crate::name::LockName;
use crate::operation::{List, Operation, Reach, Waiters};
use crate::protocol::{Amended, Extension, Keeper, Request, Response};
use crate::session::SessionRequest;
use crate::sweeper::Sweeper;
use crate::token::FencingToken;
use crate::transaction::row::{RowLock, RowOf, RowsOf, RowsWhere};

pub use builder::LocksBuilder;

/// How long an operator's change waits for transactions that the holder has fenced.
const LOCKED_FOR: Duration = Duration::from_secs(10);

/// A client for locks in one database. Cloning is cheap; clones share connections and waiting lines.
///
/// It is made from the application's sqlx pool and opens at most three connections of its own with that pool's connect
/// options, when they are first needed, however many leases are held or waited for: one for heartbeats alone, and two for
/// everything else (SQLite: one). All [session locks](Self::session) live on one more, while there are any. Hooks of the
/// pool, such as `after_connect`, do not run on them: put what matters, a `search_path` say, into the connect options. A
/// SQLite database in memory exists in the pool's own connections only; there, one is borrowed for each statement.
///
/// Like a pool, a client belongs to the tokio runtime on which it is first used; when that has ended, calls fail with
/// [`Error::Closed`](crate::Error::Closed). Used outside of a runtime, its methods panic as tokio's do.
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
pub struct Locks {
    client: Arc<Client>,
}

impl Locks {
    /// A client on the database of a `PgPool`, `MySqlPool` or `SqlitePool`. Nothing is sent yet.
    pub fn new(pool: impl Into<LocksBuilder>) -> Self {
        Self::builder(pool).build()
    }

    /// As [`new`](Self::new), with choices.
    pub fn builder(pool: impl Into<LocksBuilder>) -> LocksBuilder {
        pool.into()
    }

    /// A client on the database that a URL names, or the first that can be written of several, which are separated by commas:
    /// a primary and its standbys, the nodes of a cluster. `postgres://…`, `mysql://…` (or `mariadb://…`), all of one kind;
    /// `sqlite:…`, one alone. When this returns, one has been reached.
    ///
    /// When the server is lost, or becomes a replica, the others are asked, beginning with the one that was written last. What
    /// follows when another one takes over is told in the [guide](crate::guide::cluster). A password must not contain a comma
    /// that looks like the beginning of the next URL; percent-encode it.
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
    /// [`Error::InvalidUrl`], [`Error::Unsupported`] for a database whose feature is not enabled, and
    /// [`Error::Unavailable`](crate::Error::Unavailable) when none can be reached that can be written: it tells why, for each.
    ///
    /// # Cancel safety
    ///
    /// Nothing is left behind when the future is dropped.
    pub async fn connect(urls: &str) -> Result<Self> {
        LocksBuilder::from_urls(urls)?.connect().await
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// Creates the tables, or brings them up to date. Any number of processes may do this at once, and when there is
    /// nothing to do, the right to read suffices.
    ///
    /// The history is kept in `_sqlock_migrations`, apart from the application's own `_sqlx_migrations`.
    ///
    /// # Errors
    ///
    /// [`Error::Migrate`](crate::Error::Migrate), [`Error::Unavailable`](crate::Error::Unavailable).
    ///
    /// # Cancel safety
    ///
    /// It can be called again after the future was dropped. No lock is left behind.
    pub async fn migrate(&self) -> Result<()> {
        self.client.backend.migrate().await
    }

    /// A request for the lease on a name: 1 to 255 bytes of UTF-8 without NUL.
    pub fn lease(&self, name: impl Into<String>) -> LeaseRequest {
        LeaseRequest::new(Arc::clone(&self.client), name.into())
    }

    /// A request for the leases on several names, all or none, in whatever order they are named:
    /// `locks.lease_all(["account/3", "account/7"])`. A name that is given twice is taken once.
    pub fn lease_all<N: Into<String>>(&self, names: impl IntoIterator<Item = N>) -> LeaseAllRequest {
        let names = names.into_iter().map(Into::into).collect();
        LeaseAllRequest::new(LeaseRequest::new(Arc::clone(&self.client), String::new()), names)
    }

    /// A semaphore: at most `permits` are held under a name at a time, by any number of processes.
    pub fn semaphore(&self, name: impl Into<String>, permits: u32) -> Semaphore {
        Semaphore::new(self.lease(name), permits)
    }

    /// A request for a session lock on a name: 1 to 255 bytes of UTF-8 without NUL. It lives on a connection and dies with it; what
    /// that is good for, and what not, is told at [`SessionLock`](crate::session::SessionLock). It needs no tables.
    pub fn session(&self, name: impl Into<String>) -> SessionRequest {
        SessionRequest::new(Arc::clone(&self.client), name.into())
    }

    /// An election of one leader among those who campaign under a name.
    pub fn election(&self, name: impl Into<String>) -> Election {
        let name = name.into();
        Election::new(Arc::clone(&self.client), name.clone(), self.lease(name))
    }

    /// A row lock by name, for the caller's own transaction: `locks.row("stock/shirts").lock(&mut tx)`.
    pub fn row(&self, name: impl Into<String>) -> RowLock {
        RowLock::new(Arc::clone(&self.client), name.into())
    }

    /// A lock on the row of the caller's own `table` whose `column`, which must be uniquely indexed, is `key`:
    /// `locks.row_of("accounts", "id", 7).lock(&mut tx)`.
    pub fn row_of<K>(&self, table: impl Into<String>, column: impl Into<String>, key: K) -> RowOf<K> {
        RowOf::new(Arc::clone(&self.client), table.into(), column.into(), key)
    }

    /// Locks on several rows of the caller's own table, by keys, in one order:
    /// `locks.rows_of("accounts", "id", [7, 3]).lock(&mut tx)`.
    pub fn rows_of<K>(
        &self,
        table: impl Into<String>,
        column: impl Into<String>,
        keys: impl IntoIterator<Item = K>,
    ) -> RowsOf<K> {
        RowsOf::new(Arc::clone(&self.client), table.into(), column.into(), keys.into_iter().collect())
    }

    /// Locks on rows of the caller's own table, by a condition: a queue of jobs. What is told of each row is its `column`.
    pub fn rows_where(&self, table: impl Into<String>, column: impl Into<String>) -> RowsWhere {
        RowsWhere::new(Arc::clone(&self.client), table.into(), column.into())
    }

    /// Takes over a lease that another process [exported](Lease::export). It is renewed from here.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`](crate::Error::Lost) when it ended on the way; [`Error::Unavailable`](crate::Error::Unavailable).
    ///
    /// # Cancel safety
    ///
    /// The lease can be resumed again after the future was dropped.
    pub async fn resume(&self, exported: ExportedLease) -> Result<Lease> {
        Lease::resume(&self.client, exported).await
    }

    /// All leases on names that begin with `prefix`, in order of names: one for each holder.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable), [`Error::NotMigrated`](crate::Error::NotMigrated).
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn list(&self, prefix: &str) -> Result<Vec<LeaseInfo>> {
        if prefix.contains('\0') {
            // No name does, and PostgreSQL would refuse the text.
            return Ok(Vec::new());
        }
        let names = Names::BeginningWith(prefix.to_owned());
        let rows = self.client.run(List(names)).await?;
        Ok(rows.into_iter().filter_map(LeaseInfo::of).collect())
    }

    /// Who holds a name. `None`: nobody. Of several who share it, the one who came first: see [`holders`](Self::holders).
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`](crate::Error::InvalidName), and those of [`list`](Self::list).
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn inspect(&self, name: &str) -> Result<Option<LeaseInfo>> {
        Ok(self.holders(name).await?.into_iter().next())
    }

    /// All who hold a name, in the order in which they came.
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn holders(&self, name: &str) -> Result<Vec<LeaseInfo>> {
        inspect::holders(&self.client, name).await
    }

    /// Who waits for a name, in order. Of each client these are the waiters that may be next: up to the first of them that wants the
    /// name for itself alone. The others wait within its process; those of the holder's own, until somebody else waits as well.
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn waiters(&self, name: &str) -> Result<Vec<WaiterInfo>> {
        let name = LockName::new(name)?;
        let places = self.client.run(Waiters(name)).await?;
        Ok(places.into_iter().enumerate().filter_map(|(ahead, place)| WaiterInfo::of(ahead, place)).collect())
    }

    /// Takes a name away from its holder: an operator's way out. The token says which holding is meant, so a newer one is
    /// never ended by mistake: `false` when that token does not hold the name any more.
    ///
    /// The evicted holder learns of it at its next heartbeat (one that holds through this client, at once), and no transaction it
    /// fences from now on can commit. While a transaction that it has fenced is open, the eviction waits; after some seconds of that it
    /// fails with [`Error::Unavailable`](crate::Error::Unavailable) and nothing has changed: end that transaction first.
    ///
    /// # Errors
    ///
    /// As [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves open whether the eviction takes place. It can be repeated.
    pub async fn evict(&self, name: &str, token: FencingToken) -> Result<bool> {
        let name = LockName::new(name)?;
        let evicted = self.amend(Request::Evict { name: name.clone(), token }).await?;
        if evicted {
            self.client.coordinator.evicted(name, token);
        }
        Ok(evicted)
    }

    /// Sends a change of a holding until no transaction stands in its way any more.
    async fn amend(&self, request: Request) -> Result<bool> {
        let attempted = request.attempted();
        let mut backoff = Backoff::between(Duration::from_millis(10), Duration::from_millis(200));
        let start = Instant::now();
        loop {
            match self.client.run(request.clone()).await? {
                Response::Evicted(Amended::Locked) | Response::Extended(Amended::Locked) => {}
                Response::Evicted(amended) | Response::Extended(amended) => return Ok(amended == Amended::Done),
                _ => return Ok(false),
            }
            if start.elapsed() > LOCKED_FOR {
                let reason = "a transaction that it has fenced is open".into();
                return Err(Error::Unavailable { attempted, reason, source: None });
            }
            tokio::time::sleep(backoff.step()).await;
        }
    }

    /// Makes the holding with this token last at least `ttl` from now, whoever holds it and in whichever process: for a
    /// lease that was acquired in one step of a script and is held through others. `false` when that token does not hold
    /// the name any more. It never shortens a lease. (A holder that renews the lease by itself goes on with its own TTL.)
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`](crate::Error::OutOfRange), and as [`inspect`](Self::inspect).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves open whether the lease is extended. It can be repeated.
    pub async fn extend(&self, name: &str, token: FencingToken, ttl: Duration) -> Result<bool> {
        self.client.settings.check_ttl("an extension", ttl)?;
        let name = LockName::new(name)?;
        let (id, renamed, ttl_stays) = (None, None, None);
        let extension = Extension { name, id, renamed, token, lasts: ttl, ttl: ttl_stays, keeper: Keeper::Same };
        self.amend(Request::Extend(extension)).await
    }

    /// The purge of names that have long been free, and of requests whose time has run out.
    pub fn sweeper(&self) -> Sweeper {
        Sweeper::new(Arc::clone(&self.client))
    }

    /// Gives back every lease and session lock of this client, refuses its waiters, and closes its connections. Those still in
    /// somebody's hands are lost with [`LossCause::Shutdown`](crate::LossCause::Shutdown).
    ///
    /// For the orderly end of a process: dropping everything releases too, but nobody waits for it, and a runtime that
    /// stops right away leaves the names to their TTL.
    ///
    /// # Errors
    ///
    /// That of the last release that did not get through, after all were tried.
    ///
    /// # Cancel safety
    ///
    /// After the first poll the leases are on their way back; dropping the future only ends the waiting.
    pub async fn shutdown(&self) -> Result<()> {
        self.client.shutdown().await
    }
}

impl fmt::Debug for Locks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locks").field("kind", &self.client.kind).finish_non_exhaustive()
    }
}

impl<T: Into<LocksBuilder>> From<T> for Locks {
    fn from(pool: T) -> Self {
        Self::new(pool)
    }
}

impl LocksBuilder {
    /// The client, once the server has been reached.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable).
    ///
    /// # Cancel safety
    ///
    /// Nothing is left behind when the future is dropped.
    pub async fn connect(self) -> Result<Locks> {
        let locks = self.build();
        locks.client.run(Reach).await?;
        Ok(locks)
    }

    /// The client. Nothing is sent yet.
    pub fn build(self) -> Locks {
        Locks { client: self.into_client() }
    }
}
