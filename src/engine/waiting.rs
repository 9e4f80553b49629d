//! How waiters arrive and leave.

use std::time::Duration;

use super::action::{Action, LeaseSpec, Refusal, WaitMode, WaiterId};
use super::holding::Holding;
use super::name::NameState;
use super::waiter::Waiter;
use super::{Engine, ReentryTerms};
use crate::clock::Moment;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, Claim, Mode};

/// How long the engine waits for the withdrawal of a timed-out waiter before it refuses the waiter.
const WITHDRAWAL_TIMEOUT: Duration = Duration::from_millis(250);

impl Engine {
    /// Adds a waiter.
    pub(super) fn acquire(&mut self, now: Moment, id: WaiterId, spec: LeaseSpec) {
        if self.is_closing() {
            return self.refuse(id, Refusal::Closed);
        }
        let claim_id = self.new_id();
        let client = self.heartbeat.client;
        let LeaseSpec { name, owner, reenters, mode, ttl, is_renewed, hold_time, label, wait_mode } = spec;
        let is_try = matches!(wait_mode, WaitMode::Try(_));
        // A waiter gets an entry at once, without the request that would be refused.
        let is_contended = !is_try && mode == Mode::Exclusive && self.is_probably_held(now, &name);
        let state = self.names.entry(name.clone()).or_insert_with(|| Box::new(NameState::new(is_contended)));
        // No waiter enters a holding that no heartbeat renews and that is about to end.
        let lasts = |h: &Holding| !h.lifetime.ends_alone_by(now + ttl.min(h.lifetime.ttl) / 4);
        let entered = state.holdings.iter_mut().find(|h| h.is_held() && h.claim.owner == owner && lasts(h));
        // No waiter enters a holding that is being converted: its mode is not known yet.
        let is_converting = entered.as_ref().is_some_and(|holding| holding.is_converting());
        if reenters && let Some(holding) = entered.filter(|_| !is_converting) {
            match (holding.claim.mode, mode) {
                (Mode::Exclusive, _) | (Mode::READ, Mode::READ) => {
                    let holding = holding.id();
                    self.enter_holding(now, &name, holding, id, ReentryTerms { ttl, is_renewed, hold_time });
                    return self.advance(now, &name);
                }
                (Mode::READ, Mode::Exclusive) => return self.refuse(id, Refusal::Conversion { name }),
                _ => {}
            }
        }
        let has_waiters = state.has_waiters();
        let is_excluded =
            is_try && !is_converting && (state.is_held_alone() || (!reenters && state.excludes_try(mode)));
        if is_excluded && !state.is_silent(now) {
            return self.refuse(id, Refusal::Taken);
        }
        let holder = self.holder.clone();
        let claim = Claim { name: name.clone(), id: claim_id, owner, client, is_renewed, mode, ttl, holder, label };
        let mut waiter = Waiter {
            reenters,
            // The first waiter's refusal shows the owner.
            may_join: reenters && !state.waiters.is_empty(),
            ..Waiter::new(id, claim, hold_time, wait_mode, now)
        };
        if is_excluded {
            self.timeouts.add(&waiter);
            state.undecided.push(waiter);
            self.waiters.insert(id, name);
            return;
        }
        // A reader may share the name with the reader ahead of it, unless that one waits as well.
        let blocks = |waiter: &Waiter| waiter.claim.mode == Mode::Exclusive || waiter.is_reported;
        let last = || state.waiters.iter().rfind(|waiter| !waiter.tries());
        let must_wait = if mode == Mode::Exclusive { has_waiters } else { last().is_some_and(blocks) };
        if (state.is_taken(mode) || must_wait) && waiter.report_wait() {
            self.actions.push(Action::Waits { waiter: id });
        }
        self.timeouts.add(&waiter);
        state.push_waiter(waiter);
        self.waiters.insert(id, name.clone());
        self.advance(now, &name);
    }

    /// Decides tries that waited for the answer to the first waiter. They are refused if this client
    /// now holds the name in a mode that excludes them, or still waits for it; else they ask the
    /// store themselves.
    pub(super) fn decide_tries(&mut self, name: &LockName) {
        let Some(state) = self.names.get_mut(name).filter(|state| !state.undecided.is_empty() && !state.is_unknown())
        else {
            return;
        };
        for waiter in std::mem::take(&mut state.undecided) {
            if state.excludes_try(waiter.claim.mode) {
                self.waiters.remove(&waiter.id);
                self.timeouts.remove(&waiter);
                self.actions.push(Action::Refused { waiter: waiter.id, refusal: Refusal::Taken });
            } else {
                state.push_waiter(waiter);
            }
        }
    }

    /// Removes a waiter, and refuses its caller if there is a reason. The caller must advance the
    /// name afterwards.
    pub(super) fn leave(&mut self, now: Moment, id: WaiterId, refusal: Option<Refusal>) {
        let Some(name) = self.waiters.remove(&id) else {
            return;
        };
        if let Some(undecided) = self.names.get_mut(&name).and_then(|state| state.remove_undecided(id)) {
            self.timeouts.remove(&undecided);
        } else if let Some(state) = self.names.get_mut(&name)
            && let Some(i) = state.waiters.iter().position(|waiter| waiter.id == id)
            && let Some(waiter) = state.remove_waiter(i)
            && !is_on(Mutation::LeaveEntry)
        {
            self.timeouts.remove(&waiter);
            match waiter.resumes {
                // Another process may resume the lease.
                Some(exported) if waiter.adopts() => {
                    let lingers = waiter.lingers || state.is_busy();
                    state.detach(&waiter.claim, exported.token, Some(exported.id), now, lingers);
                }
                _ if state.may_know(&waiter) => {
                    state.withdraw(waiter.claim.id, now, waiter.lingers);
                    // The caller is refused once its entry delays no other waiter.
                    if let (Some(Refusal::Timeout), Some(withdrawal)) = (&refusal, state.withdrawals.last_mut()) {
                        withdrawal.timed_out = Some((id, now + WITHDRAWAL_TIMEOUT));
                        return;
                    }
                }
                _ => {}
            }
        }
        if let Some(refusal) = refusal {
            self.refuse(id, refusal);
        }
    }

    /// Refuses timed-out waiters: the waiter of the withdrawn acquisition, and waiters whose
    /// withdrawals take too long.
    pub(super) fn refuse_timed_out(&mut self, now: Moment, name: &LockName, withdrawn: Option<AcquisitionId>) {
        for withdrawal in self.names.get_mut(name).into_iter().flat_map(|state| &mut state.withdrawals) {
            let is_over = |(_, at): &mut (WaiterId, Moment)| withdrawn == Some(withdrawal.id) || *at <= now;
            if let Some((waiter, _)) = withdrawal.timed_out.take_if(is_over) {
                self.actions.push(Action::Refused { waiter, refusal: Refusal::Timeout });
            }
        }
    }

    pub(super) fn refuse(&mut self, waiter: WaiterId, refusal: Refusal) {
        self.actions.push(Action::Refused { waiter, refusal });
    }
}
