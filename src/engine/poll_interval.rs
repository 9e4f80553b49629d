//! How often a client polls a name for which it waits.

use std::time::Duration;

use crate::clock::Moment;

/// The longest intervals at which the first waiter and the other waiters poll the name without a
/// notification.
pub(super) const POLL_FIRST: Duration = Duration::from_millis(100);
const POLL_OTHERS: Duration = Duration::from_millis(250);

/// The shortest poll interval of a client that is never notified and is the first in the queue. Each
/// place further back adds twice as much.
pub(super) const POLL_SOONEST: Duration = Duration::from_millis(1);

/// The first client in the queue, if it is never notified, polls again after this fraction of the
/// time for which a holder has the name: it finds a grant late by that fraction at most. A place
/// further back multiplies the interval.
const POLL_PART: u32 = 8;

/// Returns the interval of a client that is notified of grants. `ahead`: the entries before its
/// first entry.
pub(super) fn longest_interval(ahead: u32) -> Duration {
    if ahead == 0 { POLL_FIRST } else { POLL_OTHERS }
}

/// How fast the queue before the first entry of this client moves, as far as polls have shown.
///
/// An interval in proportion to the whole wait would slow a long queue down: the wait of each entry
/// contains the late grants of all entries before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueuePace {
    joined_at: Moment,
    /// When a poll last showed fewer entries ahead.
    moved_at: Moment,
    /// The entries ahead at the last poll.
    ahead: u32,
    /// By how many entries the queue has moved since the first poll.
    moves: u32,
}

impl QueuePace {
    pub(super) fn new(now: Moment) -> Self {
        Self { joined_at: now, moved_at: now, ahead: 0, moves: 0 }
    }

    /// Handles the result of a poll.
    pub(super) fn on_polled(&mut self, now: Moment, ahead: u32) {
        let moves = self.ahead.saturating_sub(ahead);
        if moves > 0 {
            self.moves = self.moves.saturating_add(moves);
            self.moved_at = now;
        }
        self.ahead = ahead;
    }

    /// Returns the interval until the next poll of a client that is never notified.
    pub(super) fn interval(&self, now: Moment) -> Duration {
        let mean = now.since(self.joined_at) / self.moves.saturating_add(1);
        let turn = mean.max(now.since(self.moved_at));
        let shortest = POLL_SOONEST * self.ahead.saturating_mul(2).saturating_add(1);
        let interval = (turn / POLL_PART) * self.ahead.saturating_add(1);
        interval.max(shortest).min(longest_interval(self.ahead))
    }
}
