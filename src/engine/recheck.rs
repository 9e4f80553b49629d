//! Names on which an acquisition has ended: they are read again when the store may have been
//! replaced.

use std::time::Duration;

use super::Engine;
use super::name::NameState;
use crate::clock::Moment;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;

/// How far a store may lag behind the store that it replaces. Acquisitions that ended earlier have
/// ended in both.
const LONGEST_LAG: Duration = Duration::from_secs(10);

/// After this time, the engine may forget that an acquisition ended on a name, if it knows more
/// than [`MANY_ENDED`] such names. A client without leases sends no heartbeat, so no answer shows
/// that the store has the end.
const NOTED_FOR: Duration = Duration::from_secs(60);
const MANY_ENDED: usize = 10_000;

/// For how long a name that other clients waited for is expected to be held by one of them.
const PROBABLE_HOLD: Duration = Duration::from_millis(100);

/// The time between two reads when many names are read again, which must not delay other requests.
const RECHECK_EACH: Duration = Duration::from_millis(1);

/// The end of an acquisition.
pub(super) struct Ended {
    pub(super) at: Moment,
    /// Other clients waited for the name.
    pub(super) is_contended: bool,
}

impl Engine {
    /// Records the end of an acquisition on a name that the engine forgets. Drops old records when
    /// there are many.
    pub(super) fn record_end(&mut self, now: Moment, name: &LockName, ended: Ended) {
        if self.ended.len() == self.ended.capacity() {
            let answered_at = self.heartbeat.answered_at();
            let is_many = self.ended.len() > MANY_ENDED;
            self.ended
                .retain(|_, ended| answered_at < ended.at + LONGEST_LAG && !(is_many && ended.at + NOTED_FOR <= now));
        }
        self.ended.insert(name.clone(), ended);
    }

    /// Returns whether another client probably holds a name that this client does not use: it
    /// waited for the name when this client released it, a moment ago.
    pub(super) fn is_probably_held(&self, now: Moment, name: &LockName) -> bool {
        self.ended.get(name).is_some_and(|ended| ended.is_contended && now < ended.at + PROBABLE_HOLD)
    }

    /// Reads each name on which an acquisition has ended since `same_until`, or shortly before. A
    /// store that has missed the end still has the acquisition.
    pub(super) fn recheck_ended(&mut self, now: Moment, same_until: Moment) {
        if is_on(Mutation::ForgetEnded) {
            return;
        }
        for (name, ended) in std::mem::take(&mut self.ended) {
            self.names.entry(name).or_default().ended_at.get_or_insert(ended.at);
        }
        let may_be_missed =
            |state: &&mut Box<NameState>| state.ended_at.is_some_and(|at| same_until < at + LONGEST_LAG);
        let mut read_at = now;
        for name in self.sorted_names() {
            if let Some(state) = self.names.get_mut(&name).filter(may_be_missed) {
                (state.read_at, state.is_rechecked) = (Some(read_at), true);
                read_at = read_at + RECHECK_EACH;
            }
        }
    }
}
