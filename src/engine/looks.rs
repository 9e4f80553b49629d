//! When the engine asks the store whether a holding still exists.

use super::action::LeaseId;
use crate::clock::Moment;

/// The looks at a holding, and the leases that wait for one.
#[derive(Clone, Debug, Default)]
pub(super) struct Looks {
    /// A caller suspects that the holding has ended.
    is_suspected: bool,
    /// When to repeat an unanswered look.
    pub(super) retry_at: Option<Moment>,
    /// Leases that were released while other leases share the holding. Their verdict follows when
    /// the store answers that the holding still exists.
    leaving: Vec<LeaseId>,
    /// A look is in flight, for this many of the leases in `leaving`.
    in_flight_for: Option<usize>,
}

impl Looks {
    /// Asks for a look, even if one is in flight.
    pub(super) fn suspect(&mut self) {
        self.is_suspected = true;
    }

    pub(super) fn is_suspected(&self) -> bool {
        self.is_suspected
    }

    /// Adds a released lease, which waits for a look.
    pub(super) fn leave(&mut self, lease: LeaseId) {
        self.leaving.push(lease);
    }

    pub(super) fn has_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    pub(super) fn is_in_flight(&self) -> bool {
        self.in_flight_for.is_some()
    }

    pub(super) fn is_due(&self, now: Moment) -> bool {
        self.retry_at.is_none_or(|at| at <= now)
    }

    /// Records that a look is in flight.
    pub(super) fn begin(&mut self) {
        self.in_flight_for = Some(self.leaving.len());
        self.retry_at = None;
        // A suspicion that comes while this look is in flight needs another one.
        self.is_suspected = false;
    }

    /// Records the end of the look in flight. Returns the number of leases that it decides about,
    /// for [`take`](Self::take).
    pub(super) fn end(&mut self) -> usize {
        self.in_flight_for.take().unwrap_or(0)
    }

    /// Takes the first leases that wait for a look.
    pub(super) fn take(&mut self, count: usize) -> Vec<LeaseId> {
        self.leaving.drain(..count).collect()
    }

    /// Takes all leases that wait for a look. The one in flight, if any, decides about none of them.
    pub(super) fn take_all(&mut self) -> Vec<LeaseId> {
        self.in_flight_for = self.in_flight_for.map(|_| 0);
        std::mem::take(&mut self.leaving)
    }
}
