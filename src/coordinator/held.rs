//! A lease that its holder has received.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::Span;
use tracing::field::Empty;

use super::Coordinator;
use super::report::end_span;
use super::state::{LeaseSignals, Outbox, State};
use crate::clock::{CLOCK_CHECK_INTERVAL, Moment};
use crate::engine::{Amendment, Exported, Grant, HoldTime, Input, LeaseId, NotAmended, Verdict};
use crate::error::{Error, LossCause, Result, no_answer_within};
use crate::executor::OperationAnswer;
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{AcquisitionId, Mode, Presence, Request, Response};
use crate::token::FencingToken;

/// How long the database may take to say whether it has a lease.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);

/// A lease that its holder has received. A lease that is dropped instead of released has reached no
/// caller: it is released in the background, and its name is not kept.
pub(crate) struct HeldLease {
    coordinator: Arc<Coordinator>,
    grant: Grant,
    owner: Owner,
    signals: Arc<LeaseSignals>,
    /// The exported lease that this lease resumes, until the caller has received it.
    resumes: Option<Exported>,
    has_ended: bool,
    /// The tracing span of the holding.
    span: Span,
    since: Moment,
}

impl HeldLease {
    pub(super) fn new(
        coordinator: Arc<Coordinator>,
        grant: Grant,
        owner: Owner,
        signals: Arc<LeaseSignals>,
        resumes: Option<Exported>,
    ) -> Self {
        let (span, since) = (Span::none(), coordinator.now());
        Self { coordinator, grant, owner, signals, resumes, has_ended: false, span, since }
    }

    /// Begins the span of the holding, which may outlive the request and its span.
    pub(super) fn trace(&mut self, request: &Span) {
        let (name, token) = (self.name(), self.token());
        self.span =
            tracing::info_span!(parent: None, "hold", name = name.as_str(), %token, held = Empty, outcome = Empty);
        self.span.follows_from(request);
    }

    /// Ends the span.
    fn end_span(&mut self, outcome: &str) {
        let held = self.coordinator.now().since(self.since);
        end_span(&mut self.span, "held", held, outcome);
    }

    /// Confirms that the caller has received the lease.
    pub(crate) fn deliver(&mut self) {
        if let Some(exported) = self.resumes.take() {
            let lease = self.lease_id();
            self.coordinator.feed(Input::Delivered { lease, exported });
        }
    }

    pub(crate) fn name(&self) -> &LockName {
        &self.grant.name
    }

    pub(crate) fn acquisition_id(&self) -> AcquisitionId {
        self.grant.id
    }

    pub(crate) fn token(&self) -> FencingToken {
        self.grant.token
    }

    pub(crate) fn mode(&self) -> Mode {
        self.grant.mode
    }

    pub(crate) fn owner(&self) -> Owner {
        self.owner
    }

    fn lease_id(&self) -> LeaseId {
        self.grant.lease
    }

    /// Returns the time until which the holder may rely on the lease. `None`: the lease has ended.
    /// Reads the clock and does no I/O.
    fn deadline(&self) -> Option<Moment> {
        let deadline = self.coordinator.state().engine.deadline(self.lease_id());
        deadline.filter(|deadline| *deadline > self.coordinator.now())
    }

    /// Returns for how long the holder may rely on the lease. Zero: the lease has ended.
    pub(crate) fn remaining(&self) -> Duration {
        self.deadline().map_or(Duration::ZERO, |deadline| deadline.since(self.coordinator.now()))
    }

    pub(crate) fn is_held(&self) -> bool {
        self.deadline().is_some()
    }

    /// Returns a function that returns why the lease ended, if it has ended, and reports that.
    pub(crate) fn loss_reader(&self) -> impl FnOnce() -> Option<LossCause> + use<> {
        let (coordinator, signals) = (Arc::clone(&self.coordinator), Arc::clone(&self.signals));
        let is_held = self.is_held();
        move || {
            if !is_held {
                coordinator.feed(Input::Tick);
            }
            signals.cause.get().copied()
        }
    }

    /// Completes when the lease is lost, with the reason.
    ///
    /// # Cancel safety
    ///
    /// No loss is missed when the future is dropped.
    pub(crate) fn loss_future(&self) -> impl Future<Output = LossCause> + Send + use<> {
        let (coordinator, lease, signals) = (Arc::clone(&self.coordinator), self.lease_id(), Arc::clone(&self.signals));
        async move {
            loop {
                let ended = signals.ended.notified();
                let mut ended = std::pin::pin!(ended);
                ended.as_mut().enable();
                if let Some(cause) = signals.cause.get() {
                    return *cause;
                }
                // The timer reports the loss. If the timer has ended with its runtime, the clock
                // shows it.
                let deadline = coordinator.state().engine.deadline(lease);
                if deadline.is_none_or(|deadline| deadline <= coordinator.now()) {
                    coordinator.feed(Input::Tick);
                    return signals.cause.get().copied().unwrap_or(LossCause::Expired);
                }
                let pause = deadline
                    .map_or(CLOCK_CHECK_INTERVAL, |deadline| deadline.since(coordinator.now()))
                    .min(CLOCK_CHECK_INTERVAL);
                let _ = timeout(pause, ended).await;
            }
        }
    }

    /// Completes when the holder is asked to release the lease.
    ///
    /// # Cancel safety
    ///
    /// No request is missed when the future is dropped.
    pub(crate) fn release_requested(&self) -> impl Future<Output = ()> + Send + use<> {
        let signals = Arc::clone(&self.signals);
        async move { signals.release_requested().await }
    }

    /// Polls the holdings of the name, because the lease may have been lost.
    pub(crate) fn look_up(&self) {
        self.coordinator.look_up(self.name().clone());
    }

    /// Asks the database whether it has the lease. `attempted` names the operation in an error.
    pub(crate) async fn is_held_in_database(&self, attempted: &'static str) -> Result<bool> {
        let (reply, answer) = oneshot::channel();
        let look = Arc::new(Request::Poll { name: self.name().clone(), ids: vec![self.acquisition_id()] });
        self.coordinator.executor().submit_urgent(look, LOOK_TIMEOUT, |answer: OperationAnswer<Response>| {
            let _ = reply.send(answer.result);
        });
        let is_held = |presence: &Presence| matches!(presence, Presence::Holding { remaining: Some(_), .. });
        match timeout(LOOK_TIMEOUT, answer).await {
            Ok(Ok(Ok(Response::Polled(polled)))) => Ok(polled.iter().flat_map(|p| &p.presences).any(is_held)),
            Ok(Ok(Err(error))) => Err(error),
            _ => Err(Error::Unavailable { attempted, reason: no_answer_within(LOOK_TIMEOUT), source: None }),
        }
    }

    /// Sets the hold time of the lease, counted from now on.
    pub(crate) fn start_hold_time(&self, hold_time: HoldTime) {
        let lease = self.lease_id();
        self.coordinator.feed(Input::StartHoldTime { lease, hold_time });
    }

    /// Changes the lease.
    ///
    /// # Cancel safety
    ///
    /// The change takes place even if the future is dropped before its first poll.
    pub(crate) fn amend(&self, amendment: Amendment) -> impl Future<Output = Result<(), NotAmended>> + Send + use<> {
        let (reply, answer) = oneshot::channel();
        let (lease, signals) = (self.lease_id(), Arc::clone(&self.signals));
        let amend = |state: &mut State, _: &mut Outbox| {
            if !state.is_abandoned {
                state.amendment_replies.entry(lease).or_default().push_back(reply);
            }
            Input::Amend { lease, amendment }
        };
        self.coordinator.feed_with(amend, |_| ());
        async move {
            let amended = answer.await.unwrap_or(Err(NotAmended::Lost(LossCause::Shutdown)));
            amended.map_err(|reason| match reason {
                // The cause that was reported before, if there is one.
                NotAmended::Lost(cause) => NotAmended::Lost(signals.cause.get().copied().unwrap_or(cause)),
                reason => reason,
            })
        }
    }

    /// Exports the lease, for another process to resume it. `Err`: the lease is not held, or its
    /// owner has entered more than once.
    pub(crate) fn export(mut self) -> Result<Exported, Box<Self>> {
        let lease = self.lease_id();
        let exported = self.coordinator.feed_with(
            |_, _| Input::Export { lease },
            |state| {
                let exported = state.exported.take().filter(|(key, _)| *key == lease).map(|(_, exported)| exported);
                if exported.is_some() {
                    state.forget(lease);
                }
                exported
            },
        );
        match exported {
            Some(exported) => {
                self.has_ended = true;
                self.end_span("exported");
                Ok(exported)
            }
            None => Err(Box::new(self)),
        }
    }

    /// Releases the lease. The name stays taken until the end of its `hold_at_least`.
    ///
    /// # Cancel safety
    ///
    /// The lease is released even if the future is dropped.
    pub(crate) fn release(mut self) -> impl Future<Output = Verdict> + Send + use<> {
        let (reply, answer) = oneshot::channel();
        self.has_ended = true;
        let lost = self.loss_reader()();
        self.end_span(if lost.is_some() { "lost" } else { "released" });
        let lease = self.lease_id();
        let release = |state: &mut State, _: &mut Outbox| {
            if !state.is_abandoned {
                state.release_replies.insert(lease, reply);
            }
            Input::Release { lease }
        };
        self.coordinator.feed_with(release, |state| state.forget(lease));
        async move {
            match lost {
                Some(cause) => Verdict::Lost(cause),
                None => answer.await.unwrap_or(Verdict::Unknown),
            }
        }
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        if !self.has_ended {
            self.end_span("dropped");
            let lease = self.lease_id();
            let input = match self.resumes {
                Some(exported) => Input::HandBack { lease, exported },
                None => Input::Discard { lease },
            };
            self.coordinator.feed_with(|_, _| input, |state| state.forget(lease));
        }
    }
}
