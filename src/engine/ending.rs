//! How holdings end, and which waiter is next.

use std::time::Duration;

use super::action::{Action, Failure, NotAmended, Refusal, Verdict};
use super::heartbeat::Epoch;
use super::holding::HoldingState;
use super::pace::POLL_FIRST;
use super::policy::{Decision, decide, shares_again};
use super::step::Step;
use super::waiter::{Waiter, WaiterState};
use super::{Engine, Granting, TRIES};
use crate::clock::Moment;
use crate::error::LossCause;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::timing::GRANT;
use crate::protocol::{EntryRow, GivenUp, Holder, LeaseId, Mode, Presence, Queue, Released, Request, Withdrawn};
use crate::token::FencingToken;

/// How long a closing client repeats a release that meets a row lock, such as a fence's.
const CLOSES_WITHIN: Duration = Duration::from_secs(3);

impl Engine {
    pub(super) fn released(
        &mut self,
        now: Moment,
        name: &LockName,
        id: LeaseId,
        next: Option<(LeaseId, Duration)>,
        released: Released,
        granting: impl Fn(FencingToken, Duration) -> Granting,
    ) {
        let gives_up = self.gives_up(now);
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some(holding) = state.holding(id) else {
            // The holding expired meanwhile and is being withdrawn, but the grant to its successor
            // is valid.
            match (released, next) {
                (Released::ToNext(token), Some((next, ttl))) => self.granted(now, name, next, granting(token, ttl)),
                (Released::ToEntry(grant), _) => self.handed_over(now, name, grant.id, grant.token, &granting),
                _ => {}
            }
            return;
        };
        let token = holding.token.get();
        match released {
            Released::Ended { awaited } => {
                if awaited {
                    (state.is_wanted, state.read_at) = (true, Some(now));
                }
                self.conclude(now, name, Some(id), Verdict::Kept);
            }
            Released::ToNext(token) => {
                self.conclude(now, name, Some(id), Verdict::Kept);
                if let Some((next, ttl)) = next {
                    self.granted(now, name, next, granting(token, ttl));
                }
            }
            Released::ToEntry(grant) => {
                state.is_wanted = true;
                self.conclude(now, name, Some(id), Verdict::Kept);
                self.handed_over(now, name, grant.id, grant.token, &granting);
            }
            Released::Awaited if holding.is_ignored() => {
                self.conclude(now, name, Some(id), Verdict::Failed(Failure::no_effect()));
            }
            Released::Awaited => {
                holding.release_by_transition(next.is_none());
                state.is_wanted = true;
            }
            Released::Locked if gives_up => {
                let failure = Failure::locked(name);
                self.conclude(now, name, Some(id), Verdict::Failed(failure));
            }
            Released::Locked => {
                holding.put_off(now);
                if let HoldingState::Releasing { lease, .. } = &mut holding.state
                    && let Some(lease) = lease.take()
                {
                    self.actions.push(Action::Released { lease, verdict: Verdict::Kept });
                }
            }
            // The token was raised by a request whose answer was lost.
            Released::NotHeld { token: latest, .. } if holding.is_being_raised_to(latest) => {
                holding.token = FencingToken::new(latest).unwrap_or(holding.token);
                holding.again_at = now;
            }
            Released::NotHeld { lost, token: latest } => {
                let verdict = if is_on(Mutation::TrustRelease) || (lost < token && latest >= token) {
                    Verdict::Kept
                } else if !holding.may_have_ended || lost == token {
                    // No request of this client can have ended the holding.
                    Verdict::Lost(LossCause::Superseded)
                } else {
                    // The store knows only the last of several holdings that were taken away, and
                    // nothing of a swept name.
                    Verdict::Unknown
                };
                // A store that has missed the grant may still have the waiting entry.
                state.withdraw(id, now, false);
                self.conclude(now, name, Some(id), verdict);
            }
        }
    }

    /// Handles a release that granted the name to an entry, perhaps of this client.
    pub(super) fn handed_over(
        &mut self,
        now: Moment,
        name: &LockName,
        id: LeaseId,
        token: FencingToken,
        granting: &impl Fn(FencingToken, Duration) -> Granting,
    ) {
        let Some(waiter) = self.names.get_mut(name).and_then(|state| state.waiter(id)) else {
            return;
        };
        if !waiter.claim.is_kept {
            waiter.state = WaiterState::Granted(token);
            return;
        }
        let ttl = waiter.claim.ttl.min(GRANT);
        self.granted(now, name, id, granting(token, ttl));
    }

    /// Ends a holding that was being released, and reports the verdict to its holder.
    pub(super) fn conclude(&mut self, now: Moment, name: &LockName, id: Option<LeaseId>, verdict: Verdict) {
        let (Some(state), Some(id)) = (self.names.get_mut(name), id) else {
            return;
        };
        let Some(i) = state.holdings.iter().position(|holding| holding.id() == id) else {
            return;
        };
        let holding = state.holdings.remove(i);
        state.ended_at = Some(now);
        if holding.lingers || matches!(verdict, Verdict::Failed(_)) {
            state.withdraw(id, now, true);
        }
        if let (Verdict::Failed(failure), true) = (&verdict, self.closing_since.is_some()) {
            self.unreleased = Some(failure.clone());
        }
        let last = if let HoldingState::Releasing { lease, .. } = holding.state { lease } else { None };
        for lease in holding.leaving.into_iter().chain(last) {
            self.actions.push(Action::Released { lease, verdict: verdict.clone() });
        }
        for amending in holding.amendments {
            let result = Err(NotAmended::Lost(LossCause::Superseded));
            self.actions.push(Action::Amended { lease: amending.lease, result });
        }
    }

    pub(super) fn withdrawn(&mut self, now: Moment, name: &LockName, id: LeaseId, withdrawn: Withdrawn) {
        self.refuse_timed_out(now, name, Some(id));
        let (closes, gives_up) = (self.is_closing(), self.gives_up(now));
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some(i) = state.withdrawals.iter().position(|withdrawal| withdrawal.id == id) else {
            return;
        };
        let withdrawal = &mut state.withdrawals[i];
        // An entry that joins late delays other waiters until it is withdrawn again.
        withdrawal.put_off(now, GRANT);
        match withdrawn {
            Withdrawn::Gone { awaited } => {
                // A client that closes repeats nothing.
                if closes || withdrawal.until.is_none_or(|until| until <= now) {
                    state.withdrawals.remove(i);
                }
                state.ended_at = Some(now);
                if awaited {
                    state.read_at = Some(now);
                }
            }
            Withdrawn::Locked if gives_up => {
                state.withdrawals.remove(i);
            }
            Withdrawn::Locked => {}
        }
    }

    /// Whether the client closes and no longer repeats statements that meet a row lock.
    pub(super) fn gives_up(&self, now: Moment) -> bool {
        self.closing_since.is_some_and(|since| since + CLOSES_WITHIN <= now)
    }

    pub(super) fn read(
        &mut self,
        now: Moment,
        name: &LockName,
        given_up: Option<LeaseId>,
        sent_at: Moment,
        epoch: Epoch,
        queue: Option<Queue>,
    ) {
        let client = self.heartbeat.client;
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        (state.read_at, state.is_rechecked) = (None, false);
        let Some(queue) = queue else {
            self.without_row(name, given_up);
            return;
        };
        if !is_on(Mutation::ForgetAskedGrant) {
            self.note_asked(name, queue.row.asked);
        }
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        state.withdraw_forgotten(now, client, &queue.row, &queue.entries);
        state.is_wanted = queue.waiting().any(|entry| entry.client != Some(client));
        let mut granted = Vec::new();
        let mut vanished = Vec::new();
        let mut converting = Vec::new();
        for waiter in state.foremost_mut() {
            let id = waiter.claim.id;
            let entry = queue.entries.iter().find(|entry| entry.id == id);
            let presence = Presence::of(id, &queue.row, entry.map(|entry| (entry.state, entry.remaining)), 0);
            let is_queued = waiter.is_queued();
            match presence {
                Presence::Holding { token, remaining } if is_queued => granted.push((id, token, remaining)),
                Presence::None if is_queued && !queue.is_cut_off => vanished.push(id),
                _ => {}
            }
            if waiter.reenters {
                let own = Some(waiter.claim.owner);
                let shares = queue.holding().any(|e| e.owner == own && e.mode == Mode::READ && e.remaining.is_some());
                let holds = queue.row.owner == own && queue.row.holder != Holder::Nobody;
                if shares && waiter.claim.mode == Mode::Exclusive {
                    converting.push(waiter.id);
                } else if holds && (queue.row.remaining.is_some() || queue.row.holder == Holder::Entries) {
                    waiter.may_join = true;
                    if is_queued && !matches!(presence, Presence::Holding { .. }) {
                        vanished.push(id);
                    }
                }
            }
        }
        for id in vanished {
            self.requeue(now, name, id, WaiterState::Refused, false);
        }
        for (id, token, remaining) in granted {
            self.granted_by_other(now, name, id, token, (sent_at, remaining), epoch);
        }
        for waiter in converting {
            self.leave(now, waiter, Some(Refusal::Conversion { name: name.clone() }));
        }
        self.decide(now, name, given_up, &queue);
    }

    /// Handles a name without a row: it was swept, or the store has lost it.
    pub(super) fn without_row(&mut self, name: &LockName, given_up: Option<LeaseId>) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        if let Some(holding) = given_up.and_then(|id| state.holding(id)) {
            holding.release_by_transition(false);
            // There are no entries.
            holding.is_read = true;
        }
        for waiter in &mut state.waiters {
            waiter.state = match waiter.state {
                WaiterState::Queued | WaiterState::Refused => WaiterState::New,
                state => state,
            };
        }
        state.is_wanted = false;
    }

    pub(super) fn decide(&mut self, now: Moment, name: &LockName, given_up: Option<LeaseId>, queue: &Queue) {
        let (client, is_steady) = (self.heartbeat.client, self.is_steady(now));
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        // A holding of this client that is not given up stays.
        let giving = given_up.and_then(|id| state.holding(id)).map(|h| GivenUp { id: h.id(), token: h.token });
        let candidate = state.candidate();
        let is_first = |waiter: &&Waiter| state.first().is_some_and(|first| first.id == waiter.id);
        let claim = candidate.filter(is_first).map(|waiter| waiter.claim.clone());
        let tries = candidate.filter(|waiter| waiter.tries()).map(|waiter| waiter.id);
        let owner_shares = candidate.is_some_and(|waiter| waiter.tries() && shares_again(&waiter.claim, queue));
        // Other clients may have been cut off like this one: they get the time for a heartbeat
        // before their entries are passed over.
        let is_silent = |entry: &EntryRow| entry.client != Some(client) && entry.remaining.is_none();
        if !is_steady && queue.waiting().any(is_silent) {
            let again_at = self.steady_at.max(now + POLL_FIRST);
            state.read_at = Some(again_at);
            state.holdings.iter_mut().filter(|holding| !holding.is_held()).for_each(|h| h.again_at = again_at);
            state.waiters.iter_mut().filter(|w| Some(w.id) == tries).for_each(|waiter| waiter.ask_at = again_at);
            return;
        }
        given_up.and_then(|id| state.holding(id)).into_iter().for_each(|holding| holding.is_read = true);
        // A waiter whose owner shares the name gets its turn at once.
        let others_wait = queue.waiting().next().is_some() || state.waiters.len() > 1;
        if others_wait && owner_shares {
            tries.into_iter().for_each(|waiter| state.begin_to_wait(waiter));
            return;
        }
        let is_held_here = state.is_taken(Mode::Exclusive) && giving.is_none() && queue.row.remaining.is_some();
        match decide(name, queue, client, giving, claim.as_ref()) {
            Decision::Apply(transition) if !is_held_here => {
                // The row does not show the holding: the answer to the plain release decides its
                // verdict.
                if transition.given_up.is_none()
                    && let Some(holding) = given_up.and_then(|id| state.holding(id))
                {
                    holding.release_by_transition(false);
                }
                let given_up = transition.given_up.map(|given| given.id);
                let body = Request::Transition(transition);
                self.send(now, name, Step::Transition { given_up }, body);
            }
            decision => {
                let mut remaining = None;
                if let Decision::Wait(at_most) = decision {
                    remaining = at_most;
                    let has_entry = |waiter: &Waiter| queue.waiting().any(|entry| entry.id == waiter.claim.id);
                    for waiter in state.waiters.iter_mut().filter(|waiter| has_entry(waiter)) {
                        if waiter.report_wait() {
                            self.actions.push(Action::Waits { waiter: waiter.id });
                        }
                    }
                }
                state.overtaken = 0;
                if let Some(holding) = given_up.and_then(|id| state.holding(id)).filter(|holding| !holding.is_held()) {
                    holding.release_by_transition(false);
                    holding.put_off(now);
                }
                self.poll_later(now, name, 0, remaining);
                if let Some(waiter) = tries {
                    self.leave(now, waiter, Some(Refusal::Held));
                }
            }
        }
    }

    /// Handles a decision that was not carried out: the name has changed, or a row was locked.
    pub(super) fn overtaken(&mut self, now: Moment, name: &LockName, given_up: Option<LeaseId>) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let is_repeated = state.overtaken > 0;
        if let Some(holding) = given_up.and_then(|id| state.holding(id)) {
            // The holding may be fenced: the answer to the plain release shows that.
            holding.release_by_transition(false);
            if is_repeated {
                holding.put_off(now);
            }
            state.overtaken += 1;
            return;
        }
        state.read_again(now);
        if state.overtaken > TRIES
            && let Some(waiter) = state.candidate().filter(|waiter| waiter.tries()).map(|waiter| waiter.id)
        {
            self.leave(now, waiter, Some(Refusal::Held));
        }
    }
}
