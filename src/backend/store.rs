//! What a connection to the tables can do, one trait for each capability.

use std::pin::Pin;
use std::time::Duration;

use super::admin::{Listed, Names, SweepRange, Swept, Waiter};
use super::{dialect, records};
use crate::name::LockName;
use crate::protocol::{Batch, Request, Response};

/// A storage operation under way.
pub(crate) type Job<'a, T> = Pin<Box<dyn Future<Output = Result<T, sqlx::Error>> + Send + 'a>>;

/// One connection of the executor.
pub(crate) trait Session: LeaseStore + AdminStore + RowStore + RecordStore {
    /// Ends the connection in order.
    fn close(self: Box<Self>) -> Job<'static, ()>;
}

/// Requests about leases.
pub(crate) trait LeaseStore: Send {
    /// Carries out a request about leases.
    fn execute<'a>(&'a mut self, request: &'a Request) -> Job<'a, Response>;

    /// Carries out the requests of a batch, and answers in their order. `None`: nothing has come of a request, and it is to be sent
    /// alone.
    fn execute_batch<'a>(&'a mut self, batch: &'a Batch) -> Job<'a, Vec<Option<Response>>> {
        let _ = batch;
        Box::pin(async { Ok(Vec::new()) })
    }

    /// Waits until another client has granted this one a name, which is returned. An error says that the connection is lost.
    ///
    /// # Cancel safety
    ///
    /// Nothing is missed when the future is dropped.
    fn notified(&mut self) -> Job<'_, String> {
        Box::pin(std::future::pending())
    }
}

/// Holders, waiters and the purge.
pub(crate) trait AdminStore: Send {
    /// Reads who holds which names, in order of names.
    fn list<'a>(&'a mut self, names: &'a Names) -> Job<'a, Vec<Listed>>;

    /// Reads the live entries that wait for a name, in the order of their arrival.
    fn waiters<'a>(&'a mut self, name: &'a LockName) -> Job<'a, Vec<Waiter>>;

    /// Purges the names of one range: those that nobody has held or waited for since the retention, and whose token the clock has
    /// overtaken by then; and with them their entries that expired as long ago. After the last range, also the clients of as long ago
    /// that nothing names.
    fn sweep<'a>(&'a mut self, range: &'a SweepRange) -> Job<'a, Swept>;

    /// For how long the server has been up, by its own clock. `None`: there is no server.
    fn uptime(&mut self) -> Job<'_, Option<Duration>> {
        Box::pin(async { Ok(None) })
    }
}

/// Rows for row locks.
pub(crate) trait RowStore: Send {
    /// Makes sure that a row stands for the name, to be locked by others. Waits for nobody who has locked it. Where a database
    /// locks no rows, there is nothing to do.
    fn ensure<'a>(&'a mut self, name: &'a LockName) -> Job<'a, ()> {
        let _ = name;
        Box::pin(async { Ok(()) })
    }

    /// What the catalogue says about a column, for those whose transactions [cannot ask](dialect::Catalogued::Elsewhere) themselves:
    /// of a schema, a table, a column.
    fn column<'a>(&'a mut self, of: &'a (String, String, String)) -> Job<'a, Option<dialect::Column>> {
        let _ = of;
        Box::pin(async { Ok(None) })
    }
}

/// Records of requests.
pub(crate) trait RecordStore: Send {
    /// Runs a maintenance command on records of requests.
    fn record<'a>(&'a mut self, errand: &'a records::Errand) -> Job<'a, records::Findings>;
}

/// How long the row of a name stays that nobody asks for, to be locked. Whoever asks for it makes sure of it every
/// [`ENSURED_FOR`](crate::transaction::row_cache::ENSURED_FOR) and notes that down every [`NOTED`].
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const UNSEEN: Duration = Duration::from_secs(3600);

/// How old the note may get that a row is in use. Writing it makes others' snapshots stale, so it is written seldom.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const NOTED: Duration = Duration::from_secs(600);
