//! Purges unused names and expired records. An expired lease can be taken over without a purge.
//!
//! [`Sweeper`] has an example.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::JoinHandle;

use crate::backend::records::{Record, RecordCommand, Selection};
use crate::backend::{ClientRange, SweepRange};
use crate::backoff::jittered;
use crate::client::Client;
use crate::clock::CENTURY;
use crate::error::{Error, Result};
use crate::measure;
use crate::operation::{Sweep, SweepClients};

/// The rows in a batch, unless [`Sweeper::batch`] sets them.
pub(crate) const BATCH: u32 = 500;

const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);

/// Purges the rows of names that have been free for a while, and expired records of requests. Made
/// with [`Locks::sweeper`](crate::Locks::sweeper).
///
/// A sweeper only frees space: an expired lease can be taken over, and an expired key used again,
/// without a sweep. Any number of instances may run at the same time, on any number of hosts. A
/// sweep works in batches, never touches a row that is held, and keeps a row until its token is
/// older than the retention by the database's clock, so that a token never goes back.
///
/// A sweep purges these records of [`Idempotency`](crate::idempotency::Idempotency), with their
/// steps: results older than [their own retention](crate::idempotency::Idempotency::retention), and
/// expired tokens. Records that have not ended, or whose outcome is unknown, stay for ever, and so
/// does a row without a result for each key that is
/// [refused](crate::idempotency::AfterRetention::Refuse) from then on. Steps without a record, left
/// by a process that died while it deleted both, are deleted later: each sweep looks at up to two
/// batches of steps, at a random place. With the feature `metrics`, a sweep also measures the age
/// of the oldest of the records that have not ended.
///
/// ```
/// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
/// let purged = locks.sweeper().sweep().await?;              // once
/// let sweeping = locks.sweeper().start();                   // or in the background, until dropped
/// # drop(sweeping);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "a sweeper does nothing until sweep or start is called"]
pub struct Sweeper {
    client: Arc<Client>,
    every: Duration,
    retention: Duration,
    batch: u32,
}

impl Sweeper {
    pub(crate) fn new(client: Arc<Client>) -> Self {
        Self { client, every: Duration::from_secs(300), retention: Duration::from_secs(3600), batch: BATCH }
    }

    /// Sets the mean time between two sweeps in the background. 5 minutes by default, at least 10
    /// milliseconds and at most 100 years, jittered so that instances spread out.
    pub fn every(mut self, interval: Duration) -> Self {
        self.every = interval.clamp(SHORTEST_INTERVAL, CENTURY);
        self
    }

    /// Sets for how long a name must have been free. One hour by default, at most 100 years.
    /// (Records have their own retention. The rows of [`Locks::row`](crate::Locks::row) stay for an
    /// hour after their last use.)
    ///
    /// Keep the retention well above a minute and above any backward step of the database's clock.
    /// The row of a name has its latest token and its latest loss. If it is purged while a request
    /// about the name is repeated, the next token may be lower, and a release may report a lease
    /// that was lost as held to the end.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// Sets the rows in a batch. 500 by default, at least 1; of records at most 1,000. An
    /// acquisition waits for one batch at most.
    pub fn batch(mut self, rows: u32) -> Self {
        self.batch = rows.max(1);
        self
    }

    /// Sweeps once, and returns how many names of leases, and records, were purged.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], [`Error::Access`], [`Error::NotMigrated`],
    /// [`Error::Database`], [`Error::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends the sweep after the current batch.
    pub async fn sweep(&self) -> Result<u64> {
        sweep(&self.client, self.retention, self.batch).await
    }

    /// Sweeps in the background until the returned guard, or the last handle and lease of its
    /// client, is dropped.
    ///
    /// The first sweep comes after a pause as between two sweeps. A process that lives for less than
    /// [`every`](Self::every) may never sweep: call [`sweep`](Self::sweep) there.
    ///
    /// # Panics
    ///
    /// When called outside of a tokio runtime.
    pub fn start(self) -> Sweeping {
        let Self { client, every, retention, batch } = self;
        // A weak reference, so that sweeping alone does not keep the client and its connections.
        let client: Weak<Client> = Arc::downgrade(&client);
        let task = tokio::spawn(async move {
            loop {
                // A jittered pause is between a half and the whole, so the average is `every`.
                tokio::time::sleep(jittered(every.mul_f64(4.0 / 3.0))).await;
                let Some(client) = client.upgrade() else {
                    return;
                };
                match sweep(&client, retention, batch).await {
                    Ok(0) => tracing::debug!("swept, and nothing was purged"),
                    Ok(purged) => tracing::info!(purged, "swept"),
                    Err(Error::Closed) => return,
                    Err(error) => tracing::warn!(error = %error.report(), "a sweep failed; the next one may succeed"),
                }
            }
        });
        Sweeping { task }
    }
}

/// Sweeps all names, and then the records, also when a range of names cannot be swept.
async fn sweep(client: &Arc<Client>, retention: Duration, limit: u32) -> Result<u64> {
    let names = sweep_names(client, retention, limit).await;
    let records = purge_records(client, limit).await;
    let purged = names? + records?;
    if measure::IS_ON {
        measure_oldest_unknown(client).await;
    }
    Ok(purged)
}

/// Sweeps all names, range by range, and then the clients that no lease or entry names.
async fn sweep_names(client: &Arc<Client>, retention: Duration, limit: u32) -> Result<u64> {
    let mut range = SweepRange { after: String::new(), limit, retention };
    let (mut purged, mut named) = (0, HashSet::new());
    loop {
        let swept = client.run(Sweep(range.clone())).await?;
        purged += swept.purged;
        named.extend(swept.clients);
        match swept.last {
            // The database orders the names by its own encoding.
            Some(last) if last != range.after => range.after = last,
            Some(last) => {
                // A name that is not UTF-8, which this crate does not write, is read as another
                // one.
                tracing::warn!(after = ?last, "a name cannot be read: later names are not swept");
                return Ok(purged);
            }
            None => break,
        }
    }
    sweep_clients(client, ClientRange { after: String::new(), limit, retention, named: Arc::new(named) }).await?;
    Ok(purged)
}

/// Purges clients, range by range.
///
/// A client that was named after the sweep had read the range of the name has sent a heartbeat
/// since, or sends one before it depends on it: it stays, or registers again.
async fn sweep_clients(client: &Arc<Client>, mut range: ClientRange) -> Result<()> {
    while let Some(last) = client.run(SweepClients(range.clone())).await? {
        range.after = last;
    }
    Ok(())
}

/// Measures the age of the oldest record that has not ended or whose outcome is unknown. An index
/// gives the oldest record first.
async fn measure_oldest_unknown(client: &Arc<Client>) {
    let selection = Selection { states: Selection::UNFINISHED.into(), limit: 1, ..Selection::default() };
    // The sweep has succeeded even if this read fails.
    if let Ok(found) = client.run(RecordCommand::List(selection)).await {
        let age = |record: &Record| u64::try_from(record.now - record.created_at).unwrap_or(0);
        measure::set_oldest_unknown(found.records.first().map(|record| Duration::from_micros(age(record))));
    }
}

/// Purges expired records, batch by batch.
pub(crate) async fn purge_records(client: &Arc<Client>, limit: u32) -> Result<u64> {
    let mut purged = 0;
    loop {
        let batch = client.run(RecordCommand::Purge { limit }).await?.changed;
        purged += batch;
        if batch == 0 {
            return Ok(purged);
        }
    }
}

impl fmt::Debug for Sweeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sweeper")
            .field("every", &self.every)
            .field("retention", &self.retention)
            .field("batch", &self.batch)
            .finish_non_exhaustive()
    }
}

/// A sweeper in the background, which stops when this guard is dropped.
#[derive(Debug)]
#[must_use = "the sweeper stops when this is dropped"]
pub struct Sweeping {
    task: JoinHandle<()>,
}

impl Drop for Sweeping {
    fn drop(&mut self) {
        self.task.abort();
    }
}
