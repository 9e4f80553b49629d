//! When the engine must be called again, what ends then, and which names need the heartbeat.

use std::time::Duration;

use super::Engine;
use super::action::Refusal;
use super::heartbeat::Heartbeat;
use super::holding::{Holding, HoldingState};
use super::name::{NameState, Needs};
use crate::clock::Moment;
use crate::name::LockName;

/// The lower and upper bound of the time that the answer to a heartbeat may take.
pub(super) const SHORTEST_TIMEOUT: Duration = Duration::from_millis(100);
pub(super) const LONGEST_TIMEOUT: Duration = Duration::from_secs(4);

impl Engine {
    /// Returns when [`handle`](Self::handle) must be called again, if no input comes earlier.
    pub(crate) fn wakes_at(&self) -> Option<Moment> {
        let timer = self.timers.first().map(|(at, _)| *at);
        timer.into_iter().chain(self.timeouts.next()).chain(self.poll_all_at).chain(self.heartbeat.due()).min()
    }

    /// Ends the holdings, leases and waits whose time is over.
    pub(super) fn expire(&mut self, now: Moment) {
        let mut due = Vec::new();
        while self.timers.first().is_some_and(|(at, _)| *at <= now) {
            due.extend(self.timers.pop_first());
        }
        for (_, name) in due {
            if let Some(state) = self.names.get_mut(&name) {
                state.timer = None;
            }
            self.end_overdue(now, &name);
            self.refuse_timed_out(now, &name, None);
            self.advance(now, &name);
        }
        while let Some(waiter) = self.timeouts.pop_due(now) {
            if let Some(name) = self.waiters.get(&waiter).cloned() {
                let is_unanswered = self.names.get(&name).is_some_and(|state| state.is_unanswered(waiter, now));
                let refusal = if is_unanswered { Refusal::NoAnswer } else { Refusal::Timeout };
                self.leave(now, waiter, Some(refusal));
                self.advance(now, &name);
            }
        }
    }

    /// Returns how long the answer to a heartbeat may take: a third of the shortest TTL. The first
    /// third passes before the beat is sent, and the last must suffice for another beat.
    pub(crate) fn heartbeat_timeout(&self) -> Duration {
        self.shortest().map_or(LONGEST_TIMEOUT, |ttl| (ttl / 3).clamp(SHORTEST_TIMEOUT, LONGEST_TIMEOUT))
    }

    /// Returns the shortest TTL that the heartbeat renews. `None`: no heartbeat is needed.
    pub(super) fn shortest(&self) -> Option<Duration> {
        self.ttls.first_key_value().map(|(ttl, _)| *ttl)
    }

    /// Replaces the counted needs of a name.
    fn count(&mut self, before: Needs, after: Needs) {
        if let Some(ttl) = after.ttl {
            *self.ttls.entry(ttl).or_default() += 1;
        }
        if let Some(ttl) = before.ttl
            && let Some(count) = self.ttls.get_mut(&ttl)
        {
            *count -= 1;
            if *count == 0 {
                self.ttls.remove(&ttl);
            }
        }
        self.unsettled += usize::from(after.is_unsettled);
        self.unsettled -= usize::from(before.is_unsettled);
    }

    /// Sets the timer of a name, or forgets a name without work.
    pub(super) fn reschedule(&mut self, now: Moment, name: &LockName) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let is_idle = state.is_idle();
        let needs = if is_idle { Needs::default() } else { state.needs_now() };
        let due = if is_idle { None } else { state.due(now, &self.heartbeat) };
        let needs_before = std::mem::replace(&mut state.needs, needs);
        let due_before = std::mem::replace(&mut state.timer, due);
        if due != due_before {
            if let Some(at) = due_before {
                self.timers.remove(&(at, name.clone()));
            }
            if let Some(at) = due {
                self.timers.insert((at, name.clone()));
            }
        }
        if needs != needs_before {
            self.count(needs_before, needs);
        }
        match (needs_before.awaits_grant, needs.awaits_grant) {
            (false, true) => drop(self.queued.insert(name.clone())),
            (true, false) => drop(self.queued.remove(name)),
            _ => {}
        }
        if is_idle && let Some(ended) = self.names.remove(name).and_then(|state| state.ended()) {
            self.record_end(now, name, ended);
        }
    }
}

impl NameState {
    /// Returns when the name needs attention next.
    fn due(&self, now: Moment, heartbeat: &Heartbeat) -> Option<Moment> {
        let of_holding = |holding: &Holding| match &holding.state {
            HoldingState::Held(leases) => {
                [Some(holding.lifetime.deadline(heartbeat)), leases.iter().filter_map(|lease| lease.ends).min()]
            }
            HoldingState::Releasing { .. } => [None, None],
        };
        let deadlines = self.holdings.iter().flat_map(of_holding).flatten();
        // Overdue work waits for another input.
        deadlines.chain(self.wakes_at()).filter(|at| *at > now).min()
    }
}
