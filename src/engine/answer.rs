//! How the engine handles the store's answers.

use std::time::Duration;

use super::action::{Action, Answer, Refusal, SharedError, Verdict, WaiterId};
use super::heartbeat::Epoch;
use super::holding::{EXTEND_AFTER, Holding, HoldingState};
use super::name::UNREACHABLE_AFTER;
use super::step::Step;
use super::waiter::WaiterState;
use super::{Engine, GrantTerms, InFlight};
use crate::clock::Moment;
use crate::error::LossCause;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::timing::HEARTBEAT_INTERVAL;
use crate::protocol::{
    AcquisitionId, ChangeOutcome, ClientChange, JoinOutcome, Polled, Presence, Release, Request, RequestId, Response,
};
use crate::token::FencingToken;

/// How often the request for an exported lease is repeated when the store does not know the lease,
/// after pauses that double: for 0.75 seconds.
const MAX_UNKNOWN_ANSWERS: u32 = 4;

/// A client that has had no answer for longer does not know whether the store was interrupted.
const LONGEST_GAP: Duration = HEARTBEAT_INTERVAL.saturating_mul(2);

/// The pause before an unanswered look at a holding is repeated.
const LOOK_RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The pause before a statement that met a locked row is repeated.
pub(super) const LOCKED_ROW_PAUSE: Duration = Duration::from_millis(50);

impl Engine {
    pub(super) fn on_answered(&mut self, now: Moment, request: RequestId, answer: Answer) {
        self.record_steadiness(now, request, &answer);
        if self.heartbeat.is_beat(request) {
            return self.on_heartbeat_answered(now, answer);
        }
        let Some(InFlight { name, step, body, epoch, beat_at }) = self.in_flight.remove(&request) else {
            debug_assert!(false, "each request has one answer");
            return;
        };
        if let Some(state) = self.names.get_mut(&name).filter(|_| !matches!(step, Step::Look(_))) {
            state.sent = None;
        }
        let Answer { sent_at, may_linger, is_repeated, result } = answer;
        let sent_at = if is_on(Mutation::CountFromAnswer) { now } else { sent_at };
        if may_linger {
            self.mark_lingering(now, &name, &body);
        }
        if may_linger || is_repeated {
            self.record_repetition(&name, &step);
        }
        let terms =
            |token, ttl| GrantTerms { token, since: sent_at, lasts: ttl, ttl, epoch, may_linger, is_joined: false };
        match (result, step, &*body) {
            (Err(error), step, body) => self.on_failed(now, &name, step, body, error),
            (Ok(Response::Acquired(Ok(token))), Step::Acquire(id), Request::Acquire(claim)) => {
                self.on_granted(now, &name, id, terms(token, claim.ttl));
            }
            (Ok(Response::Acquired(Err(holder))), Step::Acquire(id), _) => {
                self.on_refused(now, &name, id, sent_at, holder)
            }
            (Ok(Response::Joined(joined)), Step::Join(id), Request::Join(claim)) => {
                self.on_joined(now, &name, id, joined, |token| terms(token, claim.ttl));
            }
            (Ok(Response::Enqueued(holder)), Step::Enqueue, Request::Enqueue(entries)) => {
                let ids: Vec<AcquisitionId> = entries.iter().map(|entry| entry.claim.id).collect();
                self.on_enqueued(now, &name, &ids, sent_at, holder);
            }
            (Ok(Response::Released(released)), Step::Release(id), Request::Release(release)) => {
                let next = release.next.as_ref().map(|claim| (claim.id, claim.ttl));
                self.on_released(now, &name, id, next, released, terms);
            }
            (Ok(Response::Withdrawn(withdrawn)), Step::Withdraw(id), _) => self.on_withdrawn(now, &name, id, withdrawn),
            (Ok(Response::Polled(polled)), Step::Poll, Request::Poll { ids, .. }) => {
                self.on_polled(now, &name, ids, sent_at, epoch, polled);
            }
            (Ok(Response::Polled(polled)), Step::Look(id), _) => {
                self.on_looked(now, &name, id, (epoch, beat_at), polled)
            }
            (Ok(Response::Read(queue)), Step::Read { given_up }, _) => {
                self.on_read(now, &name, given_up, sent_at, epoch, queue)
            }
            (Ok(Response::Transitioned(granted)), Step::Transition { given_up }, Request::Transition(transition)) => {
                self.on_transitioned(now, &name, given_up, transition, granted, terms);
            }
            (Ok(Response::Extended(extended)), Step::Extend(id), Request::Extend(extension)) => {
                let is_renewed = matches!(extension.client_change, ClientChange::Set(_));
                self.on_extended(now, &name, id, is_renewed, terms(extension.token, extension.lasts), extended);
            }
            (Ok(Response::Extended(a) | Response::Downgraded(a) | Response::Raised(a)), Step::Amend(id), _) => {
                self.on_amended(now, &name, id, sent_at, a);
            }
            (Ok(Response::Extended(amended)), Step::Detach(id), _) => self.on_detached(now, &name, id, Some(amended)),
            (Ok(response), step, _) => debug_assert!(false, "{response:?} does not answer {step:?}"),
        }
        self.advance(now, &name);
    }

    /// Records a late or failed answer. Other clients may have missed heartbeats for the same
    /// reason: they get the time of one heartbeat before their entries count as dead. An error
    /// about one name does not concern them.
    fn record_steadiness(&mut self, now: Moment, request: RequestId, answer: &Answer) {
        if self.answered_at.is_none_or(|at| now.since(at) > LONGEST_GAP) {
            self.gap_free_from = now + HEARTBEAT_INTERVAL;
        }
        self.answered_at = Some(now);
        let is_beat = self.heartbeat.is_beat(request);
        let has_failed = answer.result.as_ref().is_err_and(|error| is_beat || error.0.concerns_all());
        if answer.may_linger || has_failed || now.since(answer.sent_at) >= UNREACHABLE_AFTER {
            self.steady_at = now + HEARTBEAT_INTERVAL;
        }
    }

    /// Records that a request was sent more than once: the first one may have ended its holding.
    fn record_repetition(&mut self, name: &LockName, step: &Step) {
        self.heartbeat.repeated();
        let ended = match step {
            Step::Release(id) | Step::Transition { given_up: Some(id) } => Some(*id),
            _ => None,
        };
        if let Some(holding) = ended.and_then(|id| self.names.get_mut(name)?.holding(id)) {
            holding.may_have_ended = true;
        }
    }

    fn on_joined(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        joined: JoinOutcome,
        terms: impl Fn(FencingToken) -> GrantTerms,
    ) {
        match joined {
            JoinOutcome::Done(token) => {
                if self.joined_as_exported(now, name, id, token) {
                    self.on_granted(now, name, id, GrantTerms { is_joined: true, ..terms(token) });
                }
            }
            JoinOutcome::Locked => {
                if let Some(waiter) = self.names.get_mut(name).and_then(|state| state.waiter(id)) {
                    waiter.retry_at = now + LOCKED_ROW_PAUSE;
                }
            }
            JoinOutcome::NotHeld => self.on_not_joined(now, name, id),
        }
    }

    /// Handles the answer to a heartbeat.
    pub(super) fn on_heartbeat_answered(&mut self, now: Moment, answer: Answer) {
        if answer.may_linger || answer.is_repeated || answer.result.is_err() {
            self.heartbeat.on_interrupted();
        }
        let response = answer.result.ok();
        let sent_at = if is_on(Mutation::CountFromAnswer) { now } else { answer.sent_at };
        if response.as_ref().is_some_and(|response| self.heartbeat.is_news(response)) {
            for holding in self.names.values_mut().flat_map(|state| &mut state.holdings) {
                holding.lifetime.fix_deadline(&self.heartbeat);
            }
        }
        let shortest = self.shortest();
        let interrupted_since = self.heartbeat.interrupted_since();
        if self.heartbeat.on_answered(sent_at, now, shortest, response) {
            if let Some(since) = interrupted_since {
                self.recheck_ended(now, since);
            }
            for name in self.sorted_names() {
                self.advance(now, &name);
            }
        }
    }

    /// Records that a request about these acquisitions may take effect late.
    pub(super) fn mark_lingering(&mut self, now: Moment, name: &LockName, body: &Request) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        match body {
            Request::Extend(extension) => {
                if let Some(waiter) = extension.renamed.and_then(|id| state.waiter(id)) {
                    waiter.lingers = true;
                }
                if let Some(holding) = extension.id.and_then(|id| state.holding(id)) {
                    holding.lingers = true;
                }
            }
            Request::Downgrade { id, .. } | Request::Raise { id, .. } => {
                if let Some(first) = state.holding(*id).and_then(|holding| holding.amendments.front_mut()) {
                    first.lingers = true;
                }
            }
            _ => {}
        }
        for id in body.created() {
            if let Some(waiter) = state.waiter(id) {
                waiter.lingers = true;
            } else if !is_on(Mutation::ForgetUnknown) {
                state.withdraw(id, now, true);
            }
        }
    }

    /// Handles the answer to a look at a holding.
    pub(super) fn on_looked(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        (epoch, beat_at): (Epoch, Option<Moment>),
        polled: Option<Polled>,
    ) {
        let Some(holding) = self.names.get_mut(name).and_then(|state| state.holding(id)) else {
            return;
        };
        let decided = holding.looks.end();
        // The answer to its release, which is in flight, decides.
        if !holding.is_held() {
            return;
        }
        let found = match polled.as_ref().map(|polled| &polled.presences[..]) {
            Some([Presence::Holding { token, .. }]) => Some(*token),
            _ => None,
        };
        let Some(token) = found.filter(|token| holding.has_token(*token)) else {
            return self.lose(now, name, id, LossCause::Superseded);
        };
        // The store refused an extension of the holding that this look has found.
        if holding.extend_at.is_none() && holding.wants_more() {
            holding.extend_at = Some(now + EXTEND_AFTER);
        }
        // A change may have been answered in a later epoch. A new suspicion needs another look.
        if !holding.looks.is_suspected() {
            holding.lifetime.trust(epoch);
        }
        // If a later epoch has begun, another look follows. The beats before this look have extended
        // the holding all the same: otherwise frequent notices would let it expire.
        let extended_at =
            beat_at.filter(|_| holding.lifetime.is_renewed && self.heartbeat.is_uninterrupted_since(epoch));
        if let Some(extended_at) = extended_at {
            holding.lifetime.extend(extended_at, holding.lifetime.ttl);
        }
        let requested_up_to = polled.map_or(0, |polled| polled.row.asked);
        for lease in holding.looks.take(decided) {
            self.actions.push(Action::Released { lease, verdict: Verdict::Held });
        }
        self.answer_refused_amendment(now, name, id, token);
        self.note_release_requests(name, requested_up_to);
    }

    /// Records that the holders of tokens up to this one were asked to release the name.
    pub(super) fn note_release_requests(&mut self, name: &LockName, token: i64) {
        let Some(state) = self.names.get_mut(name).filter(|_| !is_on(Mutation::ForgetAsked)) else {
            return;
        };
        state.release_requested_up_to = state.release_requested_up_to.max(token);
        let is_meant = |holding: &&mut Holding| !holding.is_release_requested && holding.first_token().get() <= token;
        for holding in state.holdings.iter_mut().filter(is_meant) {
            holding.is_release_requested = true;
            if let HoldingState::Held(leases) = &holding.state {
                self.actions.extend(leases.iter().map(|lease| Action::ReleaseRequested { lease: lease.id }));
            }
        }
    }

    pub(super) fn on_extended(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        is_renewed: bool,
        terms: GrantTerms,
        extended: ChangeOutcome,
    ) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        if state.waiter(id).is_some() {
            return self.on_extended_before_grant(now, name, id, terms, extended);
        }
        let Some(holding) = state.holding(id) else {
            return;
        };
        holding.extend_at = None;
        match extended {
            ChangeOutcome::Done => {
                holding.lifetime.set_ttl(&self.heartbeat, is_renewed, &terms);
                if is_renewed {
                    self.heartbeat.schedule_for(terms.since, terms.ttl);
                }
                // A lease that has entered meanwhile may want more.
                holding.extend_at = holding.wants_more().then_some(now);
            }
            ChangeOutcome::Locked => {
                holding.put_off(now);
                holding.extend_at = Some(holding.retry_at);
            }
            // The holding was taken away, or was about to expire: a look decides.
            ChangeOutcome::NotHeld => holding.suspect(&self.heartbeat),
        }
    }

    /// Handles the answer to an extension that comes before its waiter gets the lease.
    fn on_extended_before_grant(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        terms: GrantTerms,
        extended: ChangeOutcome,
    ) {
        let Some(waiter) = self.names.get_mut(name).and_then(|state| state.waiter(id)) else {
            return;
        };
        match extended {
            ChangeOutcome::Done => {
                // A notice since the grant was read requires a look.
                let epoch = waiter.granted_in.unwrap_or(terms.epoch);
                self.on_granted(now, name, id, GrantTerms { epoch, ..terms });
            }
            ChangeOutcome::Locked => waiter.retry_at = now + LOCKED_ROW_PAUSE,
            ChangeOutcome::NotHeld if waiter.resumes.is_none() => {
                self.requeue(now, name, id, WaiterState::Refused, false)
            }
            // An abandoned resumption may be about to restore the identity of the lease, once its
            // row is no longer locked.
            ChangeOutcome::NotHeld if waiter.unknown_answers < MAX_UNKNOWN_ANSWERS => {
                waiter.retry_at = now + LOCKED_ROW_PAUSE * (1 << waiter.unknown_answers);
                waiter.unknown_answers += 1;
            }
            ChangeOutcome::NotHeld => {
                let waiter = waiter.id;
                self.leave(now, waiter, Some(Refusal::Lost));
            }
        }
    }

    /// Handles a request that was not answered.
    pub(super) fn on_failed(&mut self, now: Moment, name: &LockName, step: Step, body: &Request, error: SharedError) {
        // This request may still take effect. Earlier ones were answered, so the acquisitions of
        // this one alone are withdrawn again.
        self.mark_lingering(now, name, body);
        let closes = self.is_closing();
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let mut refused: Vec<WaiterId> = Vec::new();
        match (step, body) {
            // The other waiters would fail in the same way, one after the other.
            (Step::Acquire(_) | Step::Join(_), _) if error.0.concerns_all() => {
                refused.extend(state.waiters.iter().chain(&state.undecided).map(|waiter| waiter.id));
            }
            (Step::Acquire(id) | Step::Join(id), _) => refused.extend(state.waiter(id).map(|waiter| waiter.id)),
            (Step::Withdraw(id), _) => self.on_withdrawal_failed(now, name, id),
            (Step::Release(id), body) => {
                if let Request::Release(Release { next: Some(next), .. }) = body {
                    // The waiter may have been granted the name.
                    self.requeue(now, name, next.id, WaiterState::New, true);
                }
                self.on_release_failed(now, name, id, &error);
            }
            (Step::Amend(id), _) => self.on_amendment_failed(now, name, id, error.clone()),
            (Step::Detach(id), _) => self.on_detached(now, name, id, None),
            (Step::Look(id), _) => {
                if let Some(holding) = state.holding(id) {
                    holding.looks.retry_at = Some(now + LOOK_RETRY_PAUSE);
                    holding.looks.suspect();
                    let decided = holding.looks.end();
                    for lease in holding.looks.take(decided) {
                        self.actions.push(Action::Released { lease, verdict: Verdict::Failed(error.clone()) });
                    }
                }
            }
            (Step::Extend(id), _) => {
                if let Some(holding) = state.holding(id) {
                    holding.put_off(now);
                } else {
                    refused.extend(state.waiter(id).map(|waiter| waiter.id));
                }
            }
            // These statements serve all waiters, which would fail in the same way.
            (Step::Enqueue | Step::Poll | Step::Read { given_up: None } | Step::Transition { given_up: None }, _) => {
                state.put_off_since = None;
                state.read_at = (state.is_rechecked && !closes).then(|| now + HEARTBEAT_INTERVAL);
                refused.extend(state.waiters.iter().map(|waiter| waiter.id));
            }
            (Step::Read { given_up: Some(id) } | Step::Transition { given_up: Some(id) }, _) => {
                state.put_off_since = None;
                self.on_release_failed(now, name, id, &error);
            }
        }
        for waiter in refused {
            self.leave(now, waiter, Some(Refusal::Failed(error.clone())));
        }
    }

    fn on_withdrawal_failed(&mut self, now: Moment, name: &LockName, id: AcquisitionId) {
        self.refuse_timed_out(now, name, Some(id));
        let closes = self.is_closing();
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        if closes {
            // The remaining acquisitions end with their expiry.
            state.withdrawals.clear();
        }
        if let Some(withdrawal) = state.withdrawals.iter_mut().find(|withdrawal| withdrawal.id == id) {
            withdrawal.put_off(now, Duration::from_secs(1));
        }
        if is_on(Mutation::WithdrawOnce) {
            state.withdrawals.retain(|withdrawal| withdrawal.id != id);
        }
    }
}
