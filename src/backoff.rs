//! Growing, jittered pauses between attempts.

use std::time::Duration;

use uuid::Uuid;

/// Returns a random duration between a half and the whole of `duration`.
pub(crate) fn jittered(duration: Duration) -> Duration {
    // The crate needs randomness only here and for ids, so it uses the generator of ids.
    let random = Uuid::new_v4().as_u64_pair().0 as u32;
    duration.mul_f64(0.5 + f64::from(random) / f64::from(u32::MAX) / 2.0)
}

/// How long a request is repeated while the database is unavailable, before its caller receives the
/// error.
pub(crate) const OUTAGE_TOLERANCE: Duration = Duration::from_secs(3);

/// A wait as short as a round trip says nothing about the database.
pub(crate) const ROUND_TRIP: Duration = Duration::from_millis(100);

/// Doubling steps between two bounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    next: Duration,
    most: Duration,
}

impl Backoff {
    pub(crate) const fn between(least: Duration, most: Duration) -> Self {
        Self { next: least, most }
    }

    /// Returns the next pause, jittered.
    pub(crate) fn step(&mut self) -> Duration {
        let step = jittered(self.next);
        self.next = (self.next * 2).min(self.most);
        step
    }
}
