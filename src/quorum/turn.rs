//! The waiters of one process for a name: they take turns, and tell each other of an outage.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::time::Instant;

use crate::backoff::OUTAGE_TOLERANCE;
use crate::error::Error;
use crate::name::LockName;

/// The turns for each name with waiters.
#[derive(Default)]
pub(super) struct Turns(Mutex<HashMap<LockName, Weak<Turn>>>);

/// The turn to ask for a name.
#[derive(Default)]
pub(super) struct Turn {
    /// Held by the waiter that asks.
    pub(super) lock: tokio::sync::Mutex<()>,
    outage: Mutex<Option<Outage>>,
}

/// Too few databases have answered, in every attempt since a moment.
struct Outage {
    since: Instant,
    /// When the last attempt failed.
    failed_at: Instant,
    error: Error,
}

impl Turns {
    /// Returns the turn for a name, which all its waiters share.
    pub(super) fn get(&self, name: &LockName) -> Arc<Turn> {
        let mut turns = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| turn.strong_count() > 0);
        let turn = turns.get(name).and_then(Weak::upgrade).unwrap_or_default();
        turns.insert(name.clone(), Arc::downgrade(&turn));
        turn
    }
}

impl Turn {
    /// Records that enough databases have answered.
    pub(super) fn answered(&self) {
        *self.outage() = None;
    }

    /// Records that an attempt that began at `begun_at` failed. Returns since when attempts have
    /// failed.
    pub(super) fn failed(&self, begun_at: Instant, error: &Error) -> Instant {
        let mut outage = self.outage();
        let since = outage.as_ref().map_or(begun_at, |outage| outage.since);
        *outage = Some(Outage { since, failed_at: Instant::now(), error: error.repeated() });
        since
    }

    /// Returns the error of the last attempt, unless enough databases have answered since.
    pub(super) fn failure(&self) -> Option<Error> {
        self.outage().as_ref().map(|outage| outage.error.repeated())
    }

    /// Returns the error for a waiter whose whole wait, since `start`, was an outage of some
    /// seconds. `None`: the waiter must ask.
    pub(super) fn failure_throughout(&self, start: Instant) -> Option<Error> {
        let outage = self.outage();
        let lasts = |outage: &&Outage| outage.failed_at.saturating_duration_since(outage.since.max(start));
        outage.as_ref().filter(|outage| lasts(outage) >= OUTAGE_TOLERANCE).map(|outage| outage.error.repeated())
    }

    fn outage(&self) -> MutexGuard<'_, Option<Outage>> {
        self.outage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
