//! The health of a client, for probes and dashboards.

use std::time::Duration;

use serde::{Serialize, Serializer};

/// The health of a client. Made with [`Locks::health`](crate::Locks::health).
///
/// ```
/// # async fn example(locks: sqlock::Locks) -> bool {
/// let health = locks.health();
/// println!("{} held, {} waiting, heartbeat {:?}", health.held, health.waiting, health.round_trip);
/// health.is_ok()
/// # }
/// ```
///
/// It serializes with durations in seconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
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
    #[serde(serialize_with = "serialize_seconds")]
    pub last_heartbeat: Option<Duration>,
    /// How long the answer to that heartbeat took.
    #[serde(serialize_with = "serialize_seconds")]
    pub round_trip: Option<Duration>,
    /// Why the last attempt to reach the database failed, until one succeeds. An idle client makes
    /// no attempts.
    pub unavailable: Option<String>,
}

/// Whether the database answers heartbeats. Serialized as `idle`, `answered` or `late`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Heartbeat {
    /// Nothing is held or waited for, so none is sent.
    Idle,
    /// The latest heartbeat was answered, or has been on its way for less than a second.
    Answered,
    /// The latest heartbeat failed, or has been unanswered for a second. Leases are lost when that lasts
    /// until their TTL has passed.
    Late,
}

#[allow(clippy::ref_option, reason = "serde calls it so")]
fn serialize_seconds<S: Serializer>(duration: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    duration.map(|duration| duration.as_secs_f64()).serialize(to)
}

impl Health {
    /// Returns whether nothing is wrong that concerns a lease: the heartbeat is not
    /// [late](Heartbeat::Late). `true` for an idle client, which knows nothing of the database.
    pub fn is_ok(&self) -> bool {
        self.heartbeat != Heartbeat::Late
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn health_serializes_with_seconds() {
        let health = Health {
            held: 1,
            waiting: 2,
            connections: 3,
            heartbeat: Heartbeat::Late,
            last_heartbeat: Some(Duration::from_millis(1500)),
            round_trip: None,
            unavailable: Some("refused".into()),
        };
        let expected = json!({
            "held": 1,
            "waiting": 2,
            "connections": 3,
            "heartbeat": "late",
            "last_heartbeat": 1.5,
            "round_trip": null,
            "unavailable": "refused",
        });
        assert_eq!(json!(health), expected);
    }
}
