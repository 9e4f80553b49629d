//! A lease on a majority of independent databases.
//!
//! [`Quorum`] has an example, its benefits and its limits. To choose, see [the table of
//! calls](crate#which-call).

// A request asks all databases at once (`Round`). A held majority (`Majority`) counts the leases on
// the single databases by their clocks; a task maintains the majority.
mod detached;
mod lease;
mod majority;
mod nodes;
mod request;
mod round;
mod tally;
mod turn;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::locks::Locks;
use nodes::Nodes;

pub use detached::DetachedLease;
pub use lease::QuorumLease;
pub use request::QuorumRequest;

/// Several independent databases, a majority of which grants a name: leases are acquired and
/// renewed while any minority of them is down. Cloning is cheap.
///
/// The databases may be of different kinds. Each is a [`Locks`] client of its own, on a server of
/// its own that shares nothing with the others: no disk, no replication. All clients of a name must
/// use the same databases.
///
/// ```
/// # async fn example(a: sqlock::Locks, b: sqlock::Locks, c: sqlock::Locks) -> sqlock::Result<()> {
/// use sqlock::quorum::Quorum;
/// use std::time::Duration;
///
/// let quorum = Quorum::new([a, b, c]);
/// let lease = quorum.lease("leader").ttl(Duration::from_secs(10)).wait(Duration::from_secs(5)).acquire().await?;
/// println!("token {}", lease.token());
/// lease.release().await
/// # }
/// ```
///
/// A database votes only when its tables are older than the TTL (see [the token](#the-token)): just
/// after [`migrate`](crate::Locks::migrate), this ends in
/// [`Error::Unavailable`](crate::Error::Unavailable).
///
/// # Benefits
///
/// While one of three databases is down, paused, cut off or restarted, names are acquired, renewed
/// and released as before, without a failover. One database with a *synchronous* standby survives
/// the loss of a server as well, and is usually the better choice: it costs one round trip instead
/// of two to five, its queue is fair, and its [fence](crate::Lease::fence) protects data. Choose a
/// quorum if there is no such cluster, if its failover takes too long, or if the lock must not
/// depend on one kind of database.
///
/// # Limits
///
/// - **No fence.** A fence keeps other owners from the name on *one* database until a transaction
///   there has ended, and a majority of the others may grant the name meanwhile. So the receiver of
///   the data must check the token, as [`QuorumLease::token`] describes.
/// - **No queue.** Waiters ask again, at random intervals. Waiters of one process with the same
///   quorum (or a clone) are served in order; between processes there is no order.
/// - **No re-entrance.** Even inside an [`Owner::scope`](crate::Owner::scope), a second request for
///   a name waits for the first.
/// - **Clocks must run at about the same rate**, as for every lease: the holder counts one percent
///   of the TTL less.
/// - **Cost**: two to five short statements in sequence on each database to acquire, as slow as the
///   slowest database of the majority; a renewal on each, and a release on each.
///
/// # The token
///
/// The token is the highest that the majority granted, *T*, and it is written back: each database
/// that granted a lower token raises it to *T* in the row, and the name counts as held only when a
/// majority has durably stored *T* (or more).
///
/// So tokens only rise: two majorities have a database in common. There the row had at least *T*
/// when the earlier holder's lease ended, and a row's token only rises, so the later holder was
/// granted more than *T* there, and its own token is the highest that it was granted. Without the
/// second round this fails: with *a* far ahead of *b* and *c*, the tokens would be 100 (from *a*
/// and *b*) and then 7 (from *b* and *c*).
///
/// A database that has *lost* rows (its disk was replaced, or commits were lost) can break this, as
/// it can break exclusion: it may grant a lost lease again. Rows are durable, so a restart loses
/// nothing. A database whose tables are younger than the TTL of a request has no vote in it,
/// because it may have replaced a database that has granted the name. So a new quorum grants its
/// first leases a TTL after [`Locks::migrate`](crate::Locks::migrate) has created the tables, and
/// all clients of a name must use one TTL and one `hold_at_least`, or the longest of them in
/// [`rejoin_after`](Self::rejoin_after). The age is that of the record of
/// [`Locks::migrate`](crate::Locks::migrate): tables that the application's own migrations create
/// have no record, and vote at once.
///
/// A new row's first token is the time of its server, and a lost token may be that of another
/// member. So the tokens of a replaced database are above all earlier ones only if no member's
/// clock was ahead of the clock of the new database when the earlier ones were granted.
///
/// A database with relaxed durability, or one restored from a backup (with the old record), must
/// stay out of the quorum until all leases that it may have lost have expired:
/// [`rejoin_after`](Self::rejoin_after).
#[derive(Clone)]
pub struct Quorum {
    nodes: Arc<Nodes>,
}

impl Quorum {
    /// Requires a majority of the databases: two of three, three of four or five. An even number
    /// tolerates no more failures than the odd number below it.
    pub fn new(nodes: impl IntoIterator<Item = Locks>) -> Self {
        let locks: Vec<Locks> = nodes.into_iter().collect();
        let needed = locks.len() / 2 + 1;
        Self { nodes: Arc::new(Nodes::new(locks, needed, None)) }
    }

    /// Requires all of the databases: for a name that must be held in several databases at once.
    /// The lease is lost as soon as it is lost on any database, and cannot be acquired while any is
    /// unavailable.
    pub fn all(nodes: impl IntoIterator<Item = Locks>) -> Self {
        let locks: Vec<Locks> = nodes.into_iter().collect();
        let needed = locks.len();
        Self { nodes: Arc::new(Nodes::new(locks, needed, None)) }
    }

    /// Excludes a database whose tables are younger than this, or whose server has been up for less
    /// than this: for requests with different TTLs, and for servers that may lose commits in a
    /// crash (`fsync = off` on PostgreSQL, `innodb_flush_log_at_trx_commit` other than 1 on MySQL
    /// and MariaDB). Set it to more than the longest TTL in use.
    ///
    /// Each acquisition asks the server for its uptime, which depends on its wall clock, as the age
    /// of the tables does: a clock that jumps ahead makes it too long. SQLite has no server and no
    /// uptime: do not use a file with `synchronous = OFF` in a quorum.
    pub fn rejoin_after(self, up: Duration) -> Self {
        let Nodes { locks, needed, .. } = &*self.nodes;
        Self { nodes: Arc::new(Nodes::new(locks.clone(), *needed, Some(up))) }
    }

    /// Requests the lease on a name: 1 to 255 bytes of UTF-8 without NUL.
    pub fn lease(&self, name: impl Into<String>) -> QuorumRequest {
        QuorumRequest::new(Arc::clone(&self.nodes), name.into())
    }
}

impl fmt::Debug for Quorum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Nodes { locks, rejoin_after, .. } = &*self.nodes;
        f.debug_struct("Quorum")
            .field("nodes", locks)
            .field("needed", &self.nodes.needed)
            .field("rejoin_after", rejoin_after)
            .finish()
    }
}
