//! A wait for a lease.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use tokio::sync::oneshot;

use super::{Coordinator, HeldLease, State};
use crate::engine::{Event, Refusal, WaiterId};
use crate::protocol::LeaseId;

/// A wait for a lease. Dropped, it leaves the queue; a grant that is on its way is given back.
pub(crate) struct Acquisition {
    coordinator: Arc<Coordinator>,
    waiter: WaiterId,
    answer: oneshot::Receiver<Result<HeldLease, Refusal>>,
    is_answered: bool,
}

impl Acquisition {
    pub(super) fn new(
        coordinator: Arc<Coordinator>,
        waiter: WaiterId,
        answer: oneshot::Receiver<Result<HeldLease, Refusal>>,
    ) -> Self {
        Self { coordinator, waiter, answer, is_answered: false }
    }
}

impl Acquisition {
    /// The identity of its claim, and how many wait before it in this process.
    pub(crate) fn position(&self) -> Option<(LeaseId, usize)> {
        self.coordinator.state().engine.position(self.waiter)
    }
}

impl Future for Acquisition {
    type Output = Result<HeldLease, Refusal>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.answer).poll(context).map(|answer| {
            self.is_answered = true;
            answer.unwrap_or(Err(Refusal::Closed))
        })
    }
}

impl Drop for Acquisition {
    fn drop(&mut self) {
        if !self.is_answered {
            let waiter = self.waiter;
            self.answer.close();
            // In one step: a grant in between would reach neither the caller nor the engine's waiter.
            let mut waiting = None;
            let cancel = |state: &mut State| {
                waiting = state.waiters.remove(&waiter);
                Event::Cancel { waiter }
            };
            self.coordinator.feed_with(cancel, |_| ());
        }
    }
}
