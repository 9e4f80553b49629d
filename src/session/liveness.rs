//! How long the locks of one connection are safe.
//!
//! As for a lease, the deadline was taken *before* the statement that the server has answered, on a clock that counts suspend,
//! and ends earlier than the time after which the server gives a silent session up. So the holder knows first.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::{Moment, reliance};
use crate::error::LossCause;

/// How often a clock is looked at, should nobody get to run who wakes us.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// What all locks of one connection share: they are lost together.
pub(crate) struct Bond {
    /// For how long the connection outlives silence. `None`: for ever.
    lasts: Option<Duration>,
    /// Nanoseconds of a [`Moment`].
    deadline: AtomicU64,
    severed: OnceLock<LossCause>,
    ended: Notify,
}

impl Bond {
    /// A bond that stands on the answer to a statement which was sent at `sent_at`.
    pub(super) fn new(lasts: Option<Duration>, sent_at: Moment) -> Arc<Self> {
        let deadline = AtomicU64::new(if lasts.is_none() { u64::MAX } else { 0 });
        let bond = Self { lasts, deadline, severed: OnceLock::new(), ended: Notify::new() };
        bond.confirm(sent_at);
        Arc::new(bond)
    }

    /// A statement that was sent at `sent_at` has been answered.
    pub(super) fn confirm(&self, sent_at: Moment) {
        if let Some(lasts) = self.lasts {
            let until = sent_at + reliance(lasts);
            self.deadline.fetch_max(until.nanos(), Ordering::AcqRel);
        }
    }

    /// How it was lost, up to this moment.
    pub(super) fn loss(&self) -> Option<LossCause> {
        if self.deadline().is_past() {
            self.sever(LossCause::Disconnected);
        }
        self.severed.get().copied()
    }

    /// Ends it, unless it had ended before.
    pub(super) fn sever(&self, cause: LossCause) {
        if self.severed.set(cause).is_ok() {
            self.ended.notify_waiters();
        }
    }

    /// Completes when it is lost.
    pub(super) async fn lost(&self) -> LossCause {
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            // From here on no end is missed, also one between the check and the wait.
            ended.as_mut().enable();
            if let Some(cause) = self.loss() {
                return cause;
            }
            let _ = tokio::time::timeout(self.remaining().min(HEARTBEAT), ended).await;
        }
    }

    /// How long it can be relied upon without another answer.
    pub(super) fn remaining(&self) -> Duration {
        self.deadline().remaining()
    }

    fn deadline(&self) -> Moment {
        Moment::from_nanos(self.deadline.load(Ordering::Acquire))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LASTS: Duration = Duration::from_secs(15);

    fn ago(duration: Duration) -> Moment {
        Moment::from_nanos(Moment::now().nanos() - u64::try_from(duration.as_nanos()).unwrap_or(0))
    }

    #[test]
    fn a_process_that_stood_still_knows_of_the_loss_before_the_server_ends_the_session() {
        // The server cannot have heard of us before this.
        let sent_at = ago(reliance(LASTS));
        let bond = Bond::new(Some(LASTS), sent_at);
        assert_eq!(bond.loss(), Some(LossCause::Disconnected), "although no task has run");
        assert!((sent_at + LASTS).remaining() > Duration::ZERO, "and the server has not ended it yet");
    }

    #[test]
    fn what_was_lost_stays_lost_whatever_answer_comes_late() {
        let bond = Bond::new(Some(LASTS), ago(LASTS));
        assert!(bond.loss().is_some());
        bond.confirm(Moment::now());
        assert!(bond.loss().is_some());
        bond.sever(LossCause::Shutdown);
        assert_eq!(bond.loss(), Some(LossCause::Disconnected));
    }

    #[test]
    fn a_deadline_counts_from_the_sending_and_is_never_moved_back() {
        let bond = Bond::new(Some(LASTS), Moment::now());
        let most = bond.remaining();
        assert!(most <= reliance(LASTS));
        bond.confirm(ago(Duration::from_secs(5)));
        assert!(bond.remaining() > most - Duration::from_secs(4));
    }

    #[test]
    fn the_locks_on_files_are_safe_for_ever() {
        let bond = Bond::new(None, Moment::now());
        assert!(bond.remaining() > Duration::from_secs(3600 * 24 * 365));
        assert_eq!(bond.loss(), None);
    }
}
