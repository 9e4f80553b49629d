//! Applies the [decision](super::decision) about a name and its queue as read.

use std::time::Duration;

use super::action::{Action, Refusal, Verdict, WaiterId};
use super::decision::{Decision, decide, decide_beside_expired, shares_again};
use super::heartbeat::Epoch;
use super::name::NameState;
use super::poll_interval::POLL_FIRST;
use super::step::Step;
use super::waiter::{Waiter, WaiterState};
use super::{Engine, GrantTerms};
use crate::clock::Moment;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{
    AcquisitionId, EntryRow, EntryState, GivenUp, Granted, Holder, HolderChange, Mode, Presence, Queue, Request,
    Transition,
};
use crate::token::FencingToken;

/// How often a try reads a name that is free but was not granted to it: for half a second, because
/// the commit of another client may take that long.
const MAX_OVERTAKEN: u32 = 7;

/// The longest time that a decision is put off because entries of other clients seem to be dead:
/// several heartbeats.
pub(super) const LONGEST_DELAY: Duration = GRANT_TTL.saturating_mul(2);

/// How the waiters of this client differ from a queue as read.
#[derive(Default)]
struct Differences {
    granted: Vec<(AcquisitionId, FencingToken, Option<Duration>)>,
    /// They need no entry, or the store no longer has it.
    vanished: Vec<AcquisitionId>,
    /// They ask for a name alone that their owner shares.
    converting: Vec<WaiterId>,
}

impl Engine {
    /// Handles a name and its queue as read.
    pub(super) fn on_read(
        &mut self,
        now: Moment,
        name: &LockName,
        given_up: Option<AcquisitionId>,
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
            self.note_release_requests(name, queue.row.asked);
        }
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        state.withdraw_forgotten(now, client, &queue.row, &queue.entries);
        state.is_contended = queue.waiting().any(|entry| entry.client != Some(client));
        let Differences { granted, vanished, converting } = state.compare_with(&queue);
        for id in vanished {
            self.requeue(now, name, id, WaiterState::Refused, false);
        }
        for (id, token, remaining) in granted {
            self.on_granted_by_other(now, name, id, token, (sent_at, remaining), epoch);
        }
        for waiter in converting {
            self.leave(now, waiter, Some(Refusal::Conversion { name: name.clone() }));
        }
        self.apply_decision(now, name, given_up, &queue);
    }

    /// Handles a name without a row: it was swept, or the store has lost it.
    pub(super) fn without_row(&mut self, name: &LockName, given_up: Option<AcquisitionId>) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        if let Some(holding) = given_up.and_then(|id| state.holding(id)) {
            holding.release_by_transition(false);
            // There are no entries.
            holding.is_queue_checked = true;
        }
        for waiter in &mut state.waiters {
            waiter.state = match waiter.state {
                WaiterState::Queued | WaiterState::Refused => WaiterState::New,
                state => state,
            };
        }
        (state.is_contended, state.put_off_since) = (false, None);
    }

    /// Decides who is next, and sends the transition or sets when the name is looked at again.
    fn apply_decision(&mut self, now: Moment, name: &LockName, given_up: Option<AcquisitionId>, queue: &Queue) {
        if self.puts_off_decision(now, name, queue) {
            return;
        }
        let client = self.heartbeat.client;
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
        if let Some(holding) = given_up.and_then(|id| state.holding(id)) {
            holding.is_queue_checked = true;
        }
        // A try whose owner shares the name becomes a waiter: its entry may share the name past
        // other entries.
        let others_wait = queue.waiting().next().is_some() || state.waiters.len() > 1;
        if others_wait && owner_shares {
            if let Some(waiter) = tries {
                state.begin_to_wait(waiter);
            }
            return;
        }
        let is_held_here = state.is_taken(Mode::Exclusive) && giving.is_none() && queue.row.remaining.is_some();
        let beside = state.may_be_fenced.then(|| decide_beside_expired(name, queue, client, giving, claim.as_ref()));
        match beside.flatten().unwrap_or_else(|| decide(name, queue, client, giving, claim.as_ref())) {
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
                self.grant_nothing(now, name, given_up, queue, &decision);
                if let Some(waiter) = tries {
                    self.leave(now, waiter, Some(Refusal::Taken));
                }
            }
        }
    }

    /// Puts the decision off, and returns `true`, while entries of other clients seem to be dead
    /// after an interruption: those clients may have been cut off like this one, and get the time
    /// for a heartbeat before their entries are passed over. A client that has asked the store
    /// nothing for a while does not know whether there was an interruption. A store that stays slow
    /// does not put the decision off for longer than [`LONGEST_DELAY`].
    fn puts_off_decision(&mut self, now: Moment, name: &LockName, queue: &Queue) -> bool {
        let client = self.heartbeat.client;
        let is_silent = |entry: &EntryRow| entry.client != Some(client) && entry.remaining.is_none();
        let may_be_cut_off = !self.is_steady(now) || now < self.gap_free_from;
        let is_unsure = may_be_cut_off && queue.waiting().any(is_silent);
        let retry_at = self.steady_at.max(self.gap_free_from).max(now + POLL_FIRST);
        let Some(state) = self.names.get_mut(name) else {
            return false;
        };
        let since = state.put_off_since.unwrap_or(now);
        if !is_unsure || now.since(since) >= LONGEST_DELAY {
            state.put_off_since = None;
            return false;
        }
        state.put_off_since = Some(since);
        state.read_at = Some(retry_at);
        state.holdings.iter_mut().filter(|holding| !holding.is_held()).for_each(|h| h.retry_at = retry_at);
        let tries = state.candidate().filter(|waiter| waiter.tries()).map(|waiter| waiter.id);
        state.waiters.iter_mut().filter(|w| Some(w.id) == tries).for_each(|waiter| waiter.retry_at = retry_at);
        true
    }

    /// Handles a decision that grants nothing: sets when the name is read again.
    fn grant_nothing(
        &mut self,
        now: Moment,
        name: &LockName,
        given_up: Option<AcquisitionId>,
        queue: &Queue,
        decision: &Decision,
    ) {
        let client = self.heartbeat.client;
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let mut remaining = None;
        if let Decision::Wait(at_most) = decision {
            remaining = *at_most;
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
        let ahead = queue.waiting().take_while(|entry| entry.client != Some(client)).count();
        self.poll_later(now, name, u32::try_from(ahead).unwrap_or(u32::MAX), remaining);
    }

    /// Handles the answer to a transition. `granted` is `None` if it was not carried out.
    pub(super) fn on_transitioned(
        &mut self,
        now: Moment,
        name: &LockName,
        given_up: Option<AcquisitionId>,
        transition: &Transition,
        granted: Option<Vec<Granted>>,
        terms: impl Fn(FencingToken, Duration) -> GrantTerms,
    ) {
        let Some(granted) = granted else {
            return self.on_overtaken(now, name, given_up, !transition.expired.is_empty());
        };
        let ttl_of = |id| match &transition.change {
            HolderChange::Exclusive(grantee) => grantee.ttl,
            HolderChange::Shared(grantees) => grantees.iter().find(|g| g.id == id).map_or(GRANT_TTL, |g| g.ttl),
            HolderChange::Claim(claim) => claim.ttl,
            HolderChange::None | HolderChange::Free => GRANT_TTL,
        };
        self.conclude(now, name, given_up, Verdict::Held);
        if let Some(state) = self.names.get_mut(name) {
            (state.overtaken, state.may_be_fenced) = (0, false);
            state.is_contended = !transition.is_last;
            // Entries that were not read follow those that have expired.
            if granted.is_empty() && !transition.expired.is_empty() && !transition.is_last {
                state.read_at = Some(now);
            }
        }
        // Without a change, other holders keep the name.
        if !granted.is_empty() || matches!(transition.change, HolderChange::None) {
            self.report_waits_behind(name, &granted);
        }
        if !granted.is_empty() && transition.takes_over() {
            self.actions.push(Action::TakenOver { name: name.clone() });
        }
        self.poll_later(now, name, 0, None);
        for grant in granted {
            self.on_granted(now, name, grant.id, terms(grant.token, ttl_of(grant.id)));
        }
    }

    /// Reports the waits of this client, except those that were granted the name.
    fn report_waits_behind(&mut self, name: &LockName, granted: &[Granted]) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        for waiter in state.foremost_mut() {
            let is_granted = granted.iter().any(|grant| grant.id == waiter.claim.id);
            if waiter.is_queued() && !is_granted && waiter.report_wait() {
                self.actions.push(Action::Waits { waiter: waiter.id });
            }
        }
    }

    /// Handles a decision that was not carried out: the name has changed, or a row was locked.
    /// `ends_entries`: the decision was to end expired entries.
    pub(super) fn on_overtaken(
        &mut self,
        now: Moment,
        name: &LockName,
        given_up: Option<AcquisitionId>,
        ends_entries: bool,
    ) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        state.may_be_fenced = ends_entries;
        let pause = state.count_overtaken();
        if let Some(holding) = given_up.and_then(|id| state.holding(id)) {
            // The holding may be fenced: the answer to the plain release shows that.
            holding.release_by_transition(false);
            return holding.retry_after(now, pause);
        }
        state.read_at = Some(now + pause);
        if state.overtaken > MAX_OVERTAKEN
            && let Some(waiter) = state.candidate().filter(|waiter| waiter.tries()).map(|waiter| waiter.id)
        {
            self.leave(now, waiter, Some(Refusal::Taken));
        }
    }
}

impl NameState {
    /// Compares the waiters with the queue as read.
    fn compare_with(&mut self, queue: &Queue) -> Differences {
        let mut found = Differences::default();
        let holder = self.exclusive_owner();
        for waiter in self.foremost_mut() {
            let id = waiter.claim.id;
            let entry = queue.entries.iter().find(|entry| entry.id == id);
            let presence = Presence::from_rows(id, &queue.row, entry.map(|entry| (entry.state, entry.remaining)), 0);
            let is_queued = waiter.is_queued();
            let is_refused = waiter.state == WaiterState::Refused && waiter.resumes.is_none();
            match presence {
                // An earlier attempt of a refused request may have taken effect late.
                Presence::Holding { token, remaining } if is_queued || is_refused => {
                    found.granted.push((id, token, remaining));
                    continue;
                }
                Presence::None if is_queued && !queue.is_cut_off => found.vanished.push(id),
                _ => {}
            }
            if !waiter.reenters {
                continue;
            }
            let own = Some(waiter.claim.owner);
            let shares = queue.holding().any(|e| e.owner == own && e.mode == Mode::READ && e.remaining.is_some());
            let is_live = |e: &EntryRow| {
                let is_holder = e.state == EntryState::Holding(queue.row.token) && e.mode == Mode::Exclusive;
                is_holder && e.owner == own && e.remaining.is_some()
            };
            let holds = match queue.row.holder {
                Holder::Nobody => false,
                Holder::Lease(_) | Holder::Kept => queue.row.owner == own && queue.row.remaining.is_some(),
                // The entries of released leases, which keep the name, have no owner.
                Holder::Entries => queue.holding().any(is_live),
            };
            if shares && waiter.claim.mode == Mode::Exclusive {
                found.converting.push(waiter.id);
            } else if holds && !is_on(Mutation::WaitForOneself) {
                waiter.may_join = true;
                if is_queued && waiter.can_join(holder) {
                    found.vanished.push(id);
                }
            }
        }
        found
    }
}
