//! How long a holding lasts, as far as its client knows.

use std::time::Duration;

use super::GrantTerms;
use super::heartbeat::{Epoch, Heartbeat};
use crate::clock::{Moment, reliance};
use crate::mutation::{Mutation, is_on};

/// The time a holding has in the store.
#[derive(Clone, Debug)]
pub(super) struct Lifetime {
    /// The heartbeat renews the holding, according to its row.
    pub(super) is_renewed: bool,
    /// How long the holding lasts after a heartbeat: the TTL in its row.
    pub(super) ttl: Duration,
    /// Until when the holder may rely on the holding, whatever the heartbeat does.
    deadline: Moment,
    /// The heartbeats of this epoch extend the holding.
    epoch: Epoch,
}

impl Lifetime {
    pub(super) fn new(is_renewed: bool, terms: &GrantTerms) -> Self {
        Self { is_renewed, ttl: terms.ttl, deadline: terms.since + relied_on(terms.lasts), epoch: terms.epoch }
    }

    /// Returns the moment until which the holder may rely on the holding.
    pub(super) fn deadline(&self, heartbeat: &Heartbeat) -> Moment {
        let beat_at = heartbeat.beat_at(self.epoch).filter(|_| self.is_renewed);
        beat_at.map_or(self.deadline, |beat_at| self.deadline.max(beat_at + relied_on(self.ttl)))
    }

    /// Returns whether no heartbeat renews the holding, and it ends by itself until then.
    pub(super) fn ends_alone_by(&self, at: Moment) -> bool {
        !self.is_renewed && self.deadline <= at
    }

    /// Returns how long a holding lasts that no heartbeat renews and that has not ended.
    pub(super) fn lasts_alone(&self, now: Moment) -> Option<Duration> {
        (!self.is_renewed && self.deadline > now).then(|| self.deadline.since(now))
    }

    /// Records that the holding lasts for this time from a moment.
    pub(super) fn extend(&mut self, since: Moment, lasts: Duration) {
        self.deadline = self.deadline.max(since + relied_on(lasts));
    }

    /// Records another TTL in the row.
    pub(super) fn set_ttl(&mut self, heartbeat: &Heartbeat, is_renewed: bool, terms: &GrantTerms) {
        self.fix_deadline(heartbeat);
        self.ttl = terms.ttl;
        self.is_renewed |= is_renewed;
        self.trust(terms.epoch);
        self.extend(terms.since, terms.ttl);
    }

    /// Fixes the deadline reached by the heartbeats so far: heartbeats of a later epoch do not
    /// count.
    pub(super) fn fix_deadline(&mut self, heartbeat: &Heartbeat) {
        self.deadline = self.deadline(heartbeat);
    }

    /// Lets no later heartbeat count before a look has found the holding.
    pub(super) fn doubt(&mut self, heartbeat: &Heartbeat) {
        self.fix_deadline(heartbeat);
        self.epoch = Epoch::default();
    }

    /// Lets the heartbeats of an epoch count, in which the store had the holding.
    pub(super) fn trust(&mut self, epoch: Epoch) {
        self.epoch = self.epoch.max(epoch);
    }

    /// Returns whether the heartbeats of this epoch renew the holding only after a look.
    pub(super) fn is_doubted(&self, epoch: Epoch) -> bool {
        self.is_renewed && self.epoch != epoch && !is_on(Mutation::IgnoreNotice)
    }
}

/// Returns how long a holder may rely on a lease, counted from before its request was sent.
pub(super) fn relied_on(ttl: Duration) -> Duration {
    if is_on(Mutation::NoMargin) { ttl + ttl / 10 } else { reliance(ttl) }
}
