//! The durations that several layers must agree on.

use std::time::Duration;

/// How long a grant to another client lasts by itself, and a waiting entry without a heartbeat of its client.
///
/// Both are the same: when the grant to a client that has died runs out, its other waiting entries have run out as well.
pub(crate) const GRANT: Duration = Duration::from_secs(3);

/// The longest interval between two heartbeats of a client that holds or waits for something.
pub(crate) const BEAT: Duration = Duration::from_secs(1);

/// How much earlier than the database the holder counts its lease as ended: one percent, since two clocks need not run at the
/// same rate, and at most 10 ms for the scheduler.
pub(crate) fn margin(ttl: Duration) -> Duration {
    ttl / 100 + (ttl / 20).min(Duration::from_millis(10))
}

/// How long a holder may rely on a lease, counted from the moment before the request was sent.
pub(crate) fn reliance(ttl: Duration) -> Duration {
    ttl.saturating_sub(margin(ttl))
}
