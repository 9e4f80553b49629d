//! Carries out the actions of the engine and publishes the events that they cause.

use std::collections::VecDeque;
use std::sync::Arc;

use super::report::{Report, refusal_reason};
use super::state::{HeartbeatReport, Hold, LeaseSignals, Outbox, Phase, Sending, State, WaitingCaller};
use super::{Coordinator, HeldLease};
use crate::clock::Moment;
use crate::engine::{Action, Grant, HeartbeatStatus, LeaseId, Verdict, WaiterId};
use crate::events::Event;

impl Coordinator {
    /// Publishes an event about a request of this kind, and writes its report at once. The state
    /// must not be locked.
    pub(super) fn publish_request(&self, kind: &'static str, event: Event) {
        self.publisher.publish(&event);
        Report { event, kind, is_eviction: false, is_drain: false }.write(&self.meter);
    }

    /// Publishes an event while the state is locked, so that events keep their order. The report is
    /// written after the state is unlocked.
    pub(super) fn publish_locked(&self, state: &State, outbox: &mut Outbox, event: Event) {
        self.publish_request_locked(state, outbox, "", event);
    }

    /// Publishes an event about a request of this kind while the state is locked.
    pub(super) fn publish_request_locked(&self, state: &State, outbox: &mut Outbox, kind: &'static str, event: Event) {
        self.publisher.publish(&event);
        let is_eviction = state.is_eviction(&event);
        let is_drain = state.phase == Phase::Draining;
        outbox.reports.push(Report { event, kind, is_eviction, is_drain });
    }

    /// Reports a heartbeat that has become late.
    pub(super) fn publish_late_heartbeat(&self, state: &mut State, outbox: &mut Outbox, now: Moment) {
        if let HeartbeatStatus::Late(unanswered_for) = state.engine.heartbeat_status(now)
            && state.heartbeat != HeartbeatReport::Late
        {
            state.heartbeat = HeartbeatReport::Late;
            self.publish_locked(state, outbox, Event::HeartbeatLate { unanswered_for });
        }
    }

    /// Carries out an action of the engine.
    pub(super) fn act(self: &Arc<Self>, state: &mut State, outbox: &mut Outbox, now: Moment, action: Action) {
        match action {
            Action::Send { request, body, is_urgent } => {
                let answer_timeout = state.engine.heartbeat_timeout();
                outbox.sends.push(Sending { request, body, answer_timeout, is_urgent });
            }
            Action::Waits { waiter } => {
                if let Some(WaitingCaller { name, .. }) = state.waiters.get(&waiter) {
                    self.publish_locked(state, outbox, Event::Waiting { name: name.clone() });
                }
            }
            Action::Granted { waiter, grant } => self.deliver_grant(state, outbox, now, waiter, grant),
            Action::Refused { waiter, refusal } => {
                if let Some(waiting) = state.waiters.remove(&waiter) {
                    let reason = refusal_reason(&refusal, self.executor.failure().is_some());
                    self.publish_request_locked(state, outbox, waiting.mode.as_str(), waiting.refused(now, reason));
                    let _ = waiting.reply.send(Err(refusal));
                }
            }
            Action::TakenOver { name } => self.publish_locked(state, outbox, Event::TakenOver { name }),
            Action::Released { lease, verdict } => self.deliver_verdict(state, outbox, now, lease, verdict),
            Action::Lost { lease, cause } => {
                if let Some(Hold { name, token, since }) = state.unreported.remove(&lease) {
                    let held = now.since(since);
                    self.publish_locked(state, outbox, Event::Lost { name, token, held, cause });
                }
                if let Some(signals) = state.signals.remove(&lease) {
                    let _ = signals.cause.set(cause);
                    signals.ended.notify_waiters();
                }
            }
            Action::ReleaseRequested { lease } => {
                if let Some(Hold { name, token, .. }) = state.unreported.get(&lease) {
                    let (name, token) = (name.clone(), *token);
                    self.publish_locked(state, outbox, Event::ReleaseRequested { name, token });
                }
                if let Some(signals) = state.signals.get(&lease) {
                    signals.request_release();
                }
            }
            Action::Amended { lease, result } => {
                if let Some(reply) = state.amendment_replies.get_mut(&lease).and_then(VecDeque::pop_front) {
                    let _ = reply.send(result);
                }
            }
            Action::Exported { lease, exported } => {
                if exported.is_some()
                    && let Some(Hold { name, token, since }) = state.unreported.remove(&lease)
                {
                    let held = now.since(since);
                    self.publish_locked(state, outbox, Event::Exported { name, token, held });
                }
                state.exported = exported.map(|exported| (lease, exported));
            }
            Action::Closed { error } => {
                state.phase = Phase::Closed;
                for reply in std::mem::take(&mut state.close_replies) {
                    let _ = reply.send(error.clone());
                }
            }
        }
    }

    /// Gives a lease to the caller that waits for it.
    fn deliver_grant(
        self: &Arc<Self>,
        state: &mut State,
        outbox: &mut Outbox,
        now: Moment,
        waiter: WaiterId,
        grant: Grant,
    ) {
        let Some(waiting) = state.waiters.remove(&waiter) else {
            debug_assert!(false, "a grant without a waiter");
            return;
        };
        let (name, token, waited) = (grant.name.clone(), grant.token, now.since(waiting.since));
        state.unreported.insert(grant.lease, Hold { name: name.clone(), token, since: now });
        let kind = waiting.mode.as_str();
        self.publish_request_locked(state, outbox, kind, Event::Acquired { name, token, waited });
        let signals = Arc::<LeaseSignals>::default();
        state.signals.insert(grant.lease, Arc::clone(&signals));
        let lease = HeldLease::new(Arc::clone(self), grant, waiting.owner, signals, waiting.resumes);
        outbox.unwanted.extend(waiting.reply.send(Ok(lease)).err());
    }

    /// Tells the caller that releases a lease how its holding ended.
    fn deliver_verdict(&self, state: &mut State, outbox: &mut Outbox, now: Moment, lease: LeaseId, verdict: Verdict) {
        if let Some(Hold { name, token, since }) = state.unreported.remove(&lease) {
            let held = now.since(since);
            let event = match verdict {
                Verdict::Lost(cause) => Event::Lost { name, token, held, cause },
                _ => {
                    let is_confirmed = matches!(verdict, Verdict::Held);
                    Event::Released { name, token, held, is_confirmed }
                }
            };
            self.publish_locked(state, outbox, event);
        }
        if let Some(reply) = state.release_replies.remove(&lease) {
            let _ = reply.send(verdict);
        }
    }
}
