//! The task that calls the engine when a timer is due.

use std::sync::Weak;
use std::time::Duration;

use tokio::time::timeout;

use super::Coordinator;
use crate::clock::CLOCK_CHECK_INTERVAL;
use crate::engine::Input;

/// How long a client without handles tries to release its leases while the store does not answer.
/// The remaining leases end with their TTL.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(60);

/// Ends the client when its timer task ends first: with its runtime, or by a panic.
pub(super) struct AbandonOnDrop(pub(super) Weak<Coordinator>);

impl Drop for AbandonOnDrop {
    fn drop(&mut self) {
        if let Some(coordinator) = self.0.upgrade() {
            coordinator.abandon();
        }
    }
}

/// Calls the engine when a timer is due, while the coordinator has handles, or has leases to
/// release and a store that answers. The argument also ends the client if the runtime drops this
/// future before its first poll.
pub(super) async fn run_timer(coordinator: AbandonOnDrop) {
    let mut kept = None;
    loop {
        let Some(strong) = kept.take().or_else(|| coordinator.0.upgrade()) else {
            return;
        };
        let now = strong.now();
        let until = {
            let mut state = strong.state();
            let until = state.engine.wakes_at().unwrap_or(now + CLOCK_CHECK_INTERVAL).min(now + CLOCK_CHECK_INTERVAL);
            state.asleep_until = Some(until);
            until
        };
        let pause = until.since(now);
        let _ = timeout(pause, strong.rearmed.notified()).await;
        strong.feed(Input::Tick);
        let is_releasing = {
            let state = strong.state();
            !state.engine.is_settled() && strong.now() < state.answered_at + RELEASE_TIMEOUT
        };
        kept = is_releasing.then_some(strong);
    }
}
