//! How a client is, for probes and dashboards.

use std::time::Duration;

/// How a client is. Made with [`Locks::health`](crate::Locks::health).
///
/// ```
/// # async fn example(locks: sqlock::Locks) -> bool {
/// let health = locks.health();
/// println!("{} held, {} waiting, heartbeat {:?}", health.held, health.waiting, health.round_trip);
/// health.is_ok()
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Health {
    /// How many leases this client holds: shared leases and permits as well, session locks and row
    /// locks not.
    pub held: usize,
    /// How many requests for leases are under way.
    pub waiting: usize,
    /// How many connections for leases are open. [Session locks](crate::Locks::session) have one
    /// more.
    pub connections: usize,
    /// Whether the database answers heartbeats.
    pub heartbeat: Heartbeat,
    /// How long ago the last heartbeat was sent that was answered. `None`: there was none. A client
    /// that holds nothing and waits for nothing sends none, so this grows while it is idle.
    pub last_heartbeat: Option<Duration>,
    /// How long the answer to that heartbeat took.
    pub round_trip: Option<Duration>,
    /// Why the last attempt to reach the database failed, until one succeeds. An idle client makes
    /// no attempts.
    pub unavailable: Option<String>,
}

/// Whether the database answers heartbeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Heartbeat {
    /// Nothing is held or waited for, so none is sent.
    Idle,
    /// The latest heartbeat was answered, or is on its way for less than a second.
    Answered,
    /// The latest heartbeat failed, or is unanswered for a second. Leases are lost when that lasts
    /// until their TTL has passed.
    Late,
}

impl Health {
    /// Returns whether nothing is wrong that concerns a lease: the heartbeat is not
    /// [late](Heartbeat::Late). `true` for an idle client, which knows nothing of the database.
    pub fn is_ok(&self) -> bool {
        self.heartbeat != Heartbeat::Late
    }
}
