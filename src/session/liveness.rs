//! How long the locks of one connection are safe.
//!
//! As with a lease, the deadline counts from the moment *before* the answered statement was sent,
//! on a clock that counts suspend, and ends before the server gives up a silent session. So the
//! holder notices the loss first.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::{CLOCK_CHECK_INTERVAL, Moment, reliance};
use crate::error::LossCause;

/// The state that all locks of one connection share, because they are lost together.
pub(super) struct Liveness {
    /// How long the session outlives silence. `None`: for ever.
    max_silence: Option<Duration>,
    /// Nanoseconds of a [`Moment`].
    deadline: AtomicU64,
    cause: OnceLock<LossCause>,
    ended: Notify,
}

impl Liveness {
    /// Starts with the answer to a statement that was sent at `sent_at`.
    pub(super) fn new(max_silence: Option<Duration>, sent_at: Moment) -> Arc<Self> {
        let deadline = AtomicU64::new(if max_silence.is_none() { u64::MAX } else { 0 });
        let liveness = Self { max_silence, deadline, cause: OnceLock::new(), ended: Notify::new() };
        liveness.confirm(sent_at);
        Arc::new(liveness)
    }

    /// Counts the answer to a statement that was sent at `sent_at`.
    pub(super) fn confirm(&self, sent_at: Moment) {
        if let Some(max_silence) = self.max_silence {
            let until = sent_at + reliance(max_silence);
            self.deadline.fetch_max(until.nanos(), Ordering::AcqRel);
        }
    }

    /// Returns the cause of the loss, as of now.
    pub(super) fn loss(&self) -> Option<LossCause> {
        if self.deadline().is_past() {
            self.end(LossCause::Disconnected);
        }
        self.cause.get().copied()
    }

    /// Ends the locks. The first cause counts.
    pub(super) fn end(&self, cause: LossCause) {
        if self.cause.set(cause).is_ok() {
            self.ended.notify_waiters();
        }
    }

    /// Completes when the locks are lost.
    pub(super) async fn lost(&self) -> LossCause {
        loop {
            let ended = self.ended.notified();
            tokio::pin!(ended);
            // From here on no end is missed, not even between the check and the wait.
            ended.as_mut().enable();
            if let Some(cause) = self.loss() {
                return cause;
            }
            let _ = tokio::time::timeout(self.remaining().min(CLOCK_CHECK_INTERVAL), ended).await;
        }
    }

    /// Returns for how long the locks are safe without another answer.
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

    const MAX_SILENCE: Duration = Duration::from_secs(15);

    fn ago(duration: Duration) -> Moment {
        Moment::from_nanos(Moment::now().nanos() - u64::try_from(duration.as_nanos()).unwrap_or(0))
    }

    #[test]
    fn paused_process_knows_of_the_loss_first() {
        // The server cannot have received the statement before it was sent.
        let sent_at = ago(reliance(MAX_SILENCE));
        let liveness = Liveness::new(Some(MAX_SILENCE), sent_at);
        assert_eq!(liveness.loss(), Some(LossCause::Disconnected), "although no task has run");
        assert!((sent_at + MAX_SILENCE).remaining() > Duration::ZERO, "and the server has not ended it yet");
    }

    #[test]
    fn late_answer_does_not_revive_a_lost_lock() {
        let liveness = Liveness::new(Some(MAX_SILENCE), ago(MAX_SILENCE));
        assert!(liveness.loss().is_some());
        liveness.confirm(Moment::now());
        assert!(liveness.loss().is_some());
        liveness.end(LossCause::Shutdown);
        assert_eq!(liveness.loss(), Some(LossCause::Disconnected));
    }

    #[test]
    fn deadline_counts_from_sending_and_never_moves_back() {
        let liveness = Liveness::new(Some(MAX_SILENCE), Moment::now());
        let most = liveness.remaining();
        assert!(most <= reliance(MAX_SILENCE));
        liveness.confirm(ago(Duration::from_secs(5)));
        assert!(liveness.remaining() > most - Duration::from_secs(4));
    }

    #[test]
    fn locks_on_files_have_no_deadline() {
        let liveness = Liveness::new(None, Moment::now());
        assert!(liveness.remaining() > Duration::from_secs(3600 * 24 * 365));
        assert_eq!(liveness.loss(), None);
    }
}
