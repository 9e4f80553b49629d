//! A lease on a majority of independent databases.
//!
//! [`Quorum`] has an example, and says what it buys and what not. Which one when: [the table of calls](crate#which-call).

// A request asks all databases at once (`Round`). What is held (`Held`) is counted by the clocks of the leases on the single
// databases, and tended by a task as long as it is a majority.
mod lease;
mod majority;
mod nodes;
mod request;
mod round;

use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::locks::Locks;
use nodes::Nodes;

pub use lease::QuorumLease;
pub use request::QuorumRequest;

/// Several independent databases, a majority of which decides who holds a name: it can be taken, and is kept, while any
/// minority of them is down. Cloning is cheap.
///
/// The databases may be of different kinds. Each is a [`Locks`] client of its own, on a server of its own that shares nothing
/// with the others: no disk, no replication. Everybody who uses a name must use the same ones.
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
/// # What it buys
///
/// Of three databases one may be down, paused, cut off or restarted, and names are taken, kept and given back as before, with
/// no failover to wait for. One database with a *synchronous* standby survives the loss of a server as well, and for most it is
/// the better choice: it costs one round trip instead of two or three, its queue is fair, and its
/// [fence](crate::Lease::fence) protects data. Choose a quorum where there is no such cluster, or where the time of its failover is too long,
/// or where the lock must not depend on any one kind of database.
///
/// # What it does not
///
/// - **No fence.** A fence keeps others from the name on *one* database until a transaction there has ended, and a majority of
///   the others may grant the name meanwhile. So data is protected by [tokens](QuorumLease::token): whoever receives them must
///   *first* record the token as the highest it has seen (and refuse a lower one), *then* read, then write.
/// - **No queue.** Who waits asks again, at random intervals. Of one process, those who wait with the same quorum (or a clone)
///   come in order; between processes there is no order.
/// - **No re-entrance.** Inside an [`Owner::scope`](crate::Owner::scope), too, a second request for a name waits for the first.
/// - **It trusts clocks to run at about the same rate**, as every lease does: one percent of the TTL is held back.
/// - **It costs** two statements on each database to acquire, one after the other, as late as the slowest of the faster half;
///   a renewal on each, and a release on each.
///
/// # The token
///
/// The token is the highest that the majority granted, *T*, and it is written back: each of the databases that granted a lower one has it
/// raised to *T* in the row, and only when a majority has *T* (or more) there, durably, the name counts as held.
///
/// So tokens only rise: two majorities have a database in common. There the row had at least *T* when the earlier holder's
/// lease ended, and a row's token only rises, so the later holder was granted more than *T* there, and its own token is the highest of
/// what it was granted. Without the second round this fails: with *a* far ahead of *b* and *c*, tokens 100 (from *a* and *b*) and then 7 (from
/// *b* and *c*) would be told.
///
/// A database that has *lost* its rows (its disk was replaced, or commits were lost) can break this, as it can break exclusion:
/// what it forgot it may grant again. Rows are durable, so a restart forgets nothing. Where a database runs with relaxed durability,
/// give it time to let all that it may have forgotten run out: [`rejoin_after`](Self::rejoin_after). One that was set up anew must
/// stay away for the longest TTL in use, and its tokens are above all earlier ones if its clock is right.
#[derive(Clone)]
pub struct Quorum {
    nodes: Arc<Nodes>,
}

impl Quorum {
    /// A majority of these: two of three, three of four or five. With an even number one is as good as with one less.
    pub fn new(nodes: impl IntoIterator<Item = Locks>) -> Self {
        Self::with_nodes(nodes, false)
    }

    /// Every one of these: for a name that must be held in several databases at once. It is lost as soon as it is lost in any of them,
    /// and cannot be had while any is out of reach.
    pub fn all(nodes: impl IntoIterator<Item = Locks>) -> Self {
        Self::with_nodes(nodes, true)
    }

    fn with_nodes(nodes: impl IntoIterator<Item = Locks>, all: bool) -> Self {
        let locks = nodes.into_iter().collect();
        Self { nodes: Arc::new(Nodes { locks, all, rejoin_after: None, turns: Mutex::default() }) }
    }

    /// A database whose server has been up for less than this does not vote: for servers that may forget what they have
    /// granted when they crash (`fsync = off` on PostgreSQL, `innodb_flush_log_at_trx_commit` other than 1 on MySQL and
    /// MariaDB). Make it longer than the longest TTL in use.
    ///
    /// The server is asked for its uptime with each acquisition, which its wall clock tells: a clock that jumps ahead makes it
    /// too long. It says nothing about SQLite, where there is no server: a file with `synchronous = OFF` has no place here.
    pub fn rejoin_after(self, up: Duration) -> Self {
        let Nodes { locks, all, .. } = &*self.nodes;
        let nodes = Nodes { locks: locks.clone(), all: *all, rejoin_after: Some(up), turns: Mutex::default() };
        Self { nodes: Arc::new(nodes) }
    }

    /// A request for the lease on a name: 1 to 255 bytes of UTF-8 without NUL.
    pub fn lease(&self, name: impl Into<String>) -> QuorumRequest {
        QuorumRequest::new(Arc::clone(&self.nodes), name.into())
    }
}

impl fmt::Debug for Quorum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Nodes { locks, rejoin_after, .. } = &*self.nodes;
        f.debug_struct("Quorum")
            .field("nodes", locks)
            .field("needed", &self.nodes.needed())
            .field("rejoin_after", rejoin_after)
            .finish()
    }
}
