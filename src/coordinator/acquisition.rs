//! A wait for a lease.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::oneshot;
use tracing::Span;

use super::report::{end_span, refusal_reason};
use super::state::{Outbox, State};
use super::{Coordinator, HeldLease};
use crate::clock::Moment;
use crate::engine::{Input, Refusal, WaiterId};
use crate::events::RefusalReason;
use crate::protocol::AcquisitionId;

/// A wait for a lease. Dropping the wait leaves the queue and releases a grant in transit.
pub(crate) struct PendingAcquisition {
    coordinator: Arc<Coordinator>,
    waiter: WaiterId,
    /// The tracing span of the request.
    span: Span,
    since: Moment,
    answer: oneshot::Receiver<Result<HeldLease, Refusal>>,
    is_answered: bool,
}

impl PendingAcquisition {
    pub(super) fn new(
        coordinator: Arc<Coordinator>,
        waiter: WaiterId,
        span: Span,
        answer: oneshot::Receiver<Result<HeldLease, Refusal>>,
    ) -> Self {
        let since = coordinator.now();
        Self { coordinator, waiter, span, since, answer, is_answered: false }
    }

    /// Ends the span.
    fn end_span(&mut self, outcome: &str) {
        let waited = self.coordinator.now().since(self.since);
        end_span(&mut self.span, "waited", waited, outcome);
    }
}

impl PendingAcquisition {
    /// Returns the id of the claim, and the number of waiters of this client without an entry that
    /// are ahead.
    pub(crate) fn position(&self) -> Option<(AcquisitionId, usize)> {
        self.coordinator.state().engine.position(self.waiter)
    }
}

impl Future for PendingAcquisition {
    type Output = Result<HeldLease, Refusal>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.answer).poll(context).map(|answer| {
            self.is_answered = true;
            let mut answer = answer.unwrap_or(Err(Refusal::Closed));
            match &mut answer {
                Ok(held) => {
                    held.trace(&self.span);
                    self.end_span("acquired");
                }
                Err(refusal) => {
                    let is_unavailable = self.coordinator.executor.failure().is_some();
                    self.end_span(refusal_reason(refusal, is_unavailable).as_str());
                }
            }
            answer
        })
    }
}

impl Drop for PendingAcquisition {
    fn drop(&mut self) {
        if !self.is_answered {
            let waiter = self.waiter;
            self.answer.close();
            // Under one lock: a grant in between would reach neither the caller nor the engine's
            // waiter.
            let mut waiting = None;
            self.end_span(RefusalReason::Cancelled.as_str());
            let cancel = |state: &mut State, _: &mut Outbox| {
                waiting = state.waiters.remove(&waiter);
                Input::Cancel { waiter }
            };
            self.coordinator.feed_with(cancel, |_| ());
            if let Some(waiting) = waiting {
                let event = waiting.refused(self.coordinator.now(), RefusalReason::Cancelled);
                self.coordinator.publish_request(waiting.mode.as_str(), event);
            }
        }
    }
}
