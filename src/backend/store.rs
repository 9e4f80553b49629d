//! The capabilities of a connection to the tables, one trait for each.

use std::pin::Pin;
use std::time::Duration;

use tokio::sync::watch;

use super::admin::{ClientRange, ListedHolder, ListedWaiter, Names, Origin, SweepRange, Swept};
use super::dialect::Column;
use super::note::NoteStore;
use super::records::{RecordCommand, RecordResponse};
use crate::name::LockName;
use crate::protocol::{Batch, Notification, Request, Response};

/// A boxed future.
pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The future of an operation on a database.
pub(crate) type StoreFuture<'a, T> = BoxFuture<'a, Result<T, sqlx::Error>>;

/// One connection to the tables.
pub(crate) trait Store: LeaseStore + AdminStore + NoteStore + RowStore + RecordStore {
    /// Closes the connection in order.
    fn close(self: Box<Self>) -> StoreFuture<'static, ()>;
}

/// Whether the client waits for a name that another client may grant it.
pub(crate) type IsWaiting = watch::Receiver<bool>;

/// Carries out requests about leases.
pub(crate) trait LeaseStore: Send {
    /// Carries out a request.
    fn execute<'a>(&'a mut self, request: &'a Request) -> StoreFuture<'a, Response>;

    /// Carries out the requests of a batch. Returns the responses in the order of the requests.
    /// `None`: the request changed nothing and must be sent alone.
    fn execute_batch<'a>(&'a mut self, batch: &'a Batch) -> StoreFuture<'a, Vec<Option<Response>>> {
        let _ = batch;
        Box::pin(async { Ok(Vec::new()) })
    }

    /// Waits until the connection can carry out a request at once.
    ///
    /// # Cancel safety
    ///
    /// The next call goes on.
    fn wait_until_ready(&mut self) -> StoreFuture<'_, ()> {
        Box::pin(async { Ok(()) })
    }

    /// Waits until another client may have granted a name to this one. An error means that the
    /// connection is lost.
    ///
    /// # Cancel safety
    ///
    /// No notification is missed when the future is dropped.
    fn notified(&mut self) -> StoreFuture<'_, Notification> {
        Box::pin(std::future::pending())
    }
}

/// Lists holders and waiters, and purges unused names.
pub(crate) trait AdminStore: Send {
    /// Reads the holders of names, in the order of names.
    fn list<'a>(&'a mut self, names: &'a Names) -> StoreFuture<'a, Vec<ListedHolder>>;

    /// Reads the live entries that wait for a name, in the order of their arrival.
    fn waiters<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, Vec<ListedWaiter>>;

    /// Purges one range of names. A name is purged if it had no holder and no waiter during the
    /// retention, and if its token is older than the retention by the clock. Entries that expired
    /// before the retention are purged as well.
    fn sweep<'a>(&'a mut self, range: &'a SweepRange) -> StoreFuture<'a, Swept>;

    /// Purges one range of clients without a heartbeat during the retention. Returns the last
    /// client of the range. `None`: there are no more clients.
    fn sweep_clients<'a>(&'a mut self, range: &'a ClientRange) -> StoreFuture<'a, Option<String>>;

    /// Reads for how long the server has been up, by its own clock. `None`: there is no server.
    fn uptime(&mut self) -> StoreFuture<'_, Option<Duration>> {
        Box::pin(async { Ok(None) })
    }

    /// Reads the identity of the server, and for how long the tables have existed there.
    fn origin(&mut self) -> StoreFuture<'_, Origin> {
        Box::pin(async { Ok(Origin::default()) })
    }
}

/// Prepares row locks.
pub(crate) trait RowStore: Send {
    /// Creates the row of a name if it is missing. Does not wait for a transaction that has locked
    /// the row. Does nothing if the database locks no rows.
    fn ensure<'a>(&'a mut self, name: &'a LockName) -> StoreFuture<'a, ()> {
        let _ = name;
        Box::pin(async { Ok(()) })
    }

    /// Looks up a column by schema, table, and itself with the other columns of its key, for
    /// databases whose transactions [cannot](super::dialect::ColumnLookup::ElsewhereInSchema) look
    /// it up themselves.
    fn column<'a>(&'a mut self, path: &'a (String, String, Vec<String>)) -> StoreFuture<'a, Option<Column>> {
        let _ = path;
        Box::pin(async { Ok(None) })
    }
}

/// Maintains the records of idempotent requests.
pub(crate) trait RecordStore: Send {
    /// Runs a maintenance command.
    fn execute_command<'a>(&'a mut self, command: &'a RecordCommand) -> StoreFuture<'a, RecordResponse>;
}

/// How long the row of a name stays without use. Clients ensure a row that they use every
/// [`ENSURED_FOR`](crate::transaction::row_cache::ENSURED_FOR), and write its time of use every
/// [`ROW_TOUCH_INTERVAL`].
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const ROW_RETENTION: Duration = Duration::from_secs(3600);

/// How old the time of use of a row may be. It is written rarely, because each write makes the
/// snapshots of other transactions stale.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const ROW_TOUCH_INTERVAL: Duration = Duration::from_secs(600);
