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
    /// The number of leases that this client holds, including shared leases and permits, without
    /// session locks and row locks.
    pub held: usize,
    /// The number of requests for leases in progress.
    pub waiting: usize,
    /// The number of open connections for leases. [Session locks](crate::Locks::session) have one
    /// more.
    pub connections: usize,
    /// Whether the database answers heartbeats.
    pub heartbeat: Heartbeat,
    /// How long ago the last answered heartbeat was sent. `None`: no heartbeat was answered yet. A
    /// client without leases and waits sends no heartbeats, so this value grows while the client is
    /// idle.
    #[serde(serialize_with = "serialize_seconds")]
    pub last_heartbeat: Option<Duration>,
    /// How long the answer to that heartbeat took.
    #[serde(serialize_with = "serialize_seconds")]
    pub round_trip: Option<Duration>,
    /// Why the last attempt to reach the database failed, until an attempt succeeds. An idle client
    /// makes no attempts.
    pub unavailable: Option<String>,
}

/// Whether the database answers heartbeats. Serialized as `idle`, `answered` or `late`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Heartbeat {
    /// The client renews no lease and has no place in a queue, so it sends no heartbeats.
    Idle,
    /// The latest heartbeat was answered, or has been in flight for less than a second.
    Answered,
    /// The latest heartbeat failed, or has been unanswered for a second. A lease is lost if no
    /// heartbeat is answered before its TTL has passed.
    Late,
}

#[allow(clippy::ref_option, reason = "serde calls it so")]
fn serialize_seconds<S: Serializer>(duration: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
    duration.map(|duration| duration.as_secs_f64()).serialize(to)
}

impl Health {
    /// Returns whether no lease is at risk: the heartbeat is not [late](Heartbeat::Late). `true`
    /// for an idle client, also when its last attempt to connect has failed: look at
    /// [`unavailable`](Self::unavailable) as well if the next request matters.
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
