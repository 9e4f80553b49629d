//! Names on which an acquisition has ended: they are read again when the store may have been
//! replaced.

use super::{Engine, LONGEST_LAG, NOTED_FOR};
use crate::clock::Moment;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;

impl Engine {
    /// Records when an acquisition ended on a name that the engine forgets. Drops old records when
    /// there are many.
    pub(super) fn note_end(&mut self, now: Moment, name: &LockName, ended_at: Moment) {
        if self.ended.len() == self.ended.capacity() {
            let answered_at = self.heartbeat.answered_at();
            self.ended.retain(|_, at| answered_at < *at + LONGEST_LAG && now < *at + NOTED_FOR);
        }
        self.ended.insert(name.clone(), ended_at);
    }

    /// Reads each name on which an acquisition has ended since `same_until`, or shortly before. A
    /// store that has missed the end still has the acquisition.
    pub(super) fn recheck_ended(&mut self, now: Moment, same_until: Moment) {
        if is_on(Mutation::ForgetEnded) {
            return;
        }
        for (name, ended_at) in std::mem::take(&mut self.ended) {
            self.names.entry(name).or_default().ended_at.get_or_insert(ended_at);
        }
        for state in self.names.values_mut() {
            if state.ended_at.is_some_and(|ended_at| same_until < ended_at + LONGEST_LAG) {
                (state.read_at, state.is_rechecked) = (Some(now), true);
            }
        }
    }
}
