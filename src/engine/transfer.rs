//! The transfer of a lease from one process to another.

use super::action::{Action, Exported, LeaseId, LeaseSpec, Refusal, WaiterId};
use super::waiter::{Waiter, WaiterState};
use super::withdrawal::{Detachment, FIRST_PAUSE, LATE_EFFECT};
use super::{Engine, ReentryTerms};
use crate::clock::Moment;
use crate::error::LossCause;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, ChangeOutcome, Claim, Mode};
use crate::token::FencingToken;

impl Engine {
    /// Exports a lease to another process: the heartbeat of this client no longer renews it.
    /// `renamed`: the new identity of the lease.
    pub(super) fn export(&mut self, now: Moment, lease: LeaseId, renamed: Option<AcquisitionId>) {
        let Some((name, id)) = self.leases.get(&lease).cloned() else {
            return self.actions.push(Action::Exported { lease, exported: None });
        };
        let Some(state) = self.names.get_mut(&name) else {
            return;
        };
        let Some(i) = state.holdings.iter().position(|holding| holding.id() == id && holding.is_only(lease)) else {
            return self.actions.push(Action::Exported { lease, exported: None });
        };
        let holding = state.holdings.remove(i);
        let lingers = holding.lingers || state.is_busy();
        // A holding without a heartbeat lasts until its own expiry.
        if holding.lifetime.is_renewed || lingers || renamed.is_some() {
            state.detach(&holding.claim, holding.token, renamed, now, lingers);
        }
        if lingers {
            state.withdraw_others(id, holding.token, now);
        }
        self.leases.remove(&lease);
        self.lose_amendments(holding.amendments, LossCause::Superseded);
        let exported = Exported { id: renamed.unwrap_or(id), token: holding.token };
        self.actions.push(Action::Exported { lease, exported: Some(exported) });
        self.advance(now, &name);
    }

    /// Takes over a lease that a process has exported. An exclusive lease is entered as the same
    /// owner, and the exported holding is withdrawn after that: the lease can be resumed again as
    /// long as no caller has it. A shared lease changes its client.
    pub(super) fn resume(&mut self, now: Moment, id: WaiterId, spec: LeaseSpec, exported: Exported) {
        if self.is_closing() {
            return self.refuse(id, Refusal::Closed);
        }
        let (claim_id, client, holder) = (self.new_id(), self.heartbeat.client, self.holder.clone());
        let state = self.names.entry(spec.name.clone()).or_default();
        let LeaseSpec { name, owner, mode, ttl, is_renewed, hold_time, label, wait_mode, .. } = spec;
        let is_exclusive = mode == Mode::Exclusive;
        let held = state.holdings.iter_mut().find(|h| h.can_be_entered() && h.claim.owner == owner && is_exclusive);
        if let Some(holding) = held {
            if holding.token != exported.token {
                return self.refuse(id, Refusal::Lost);
            }
            let holding = holding.id();
            self.enter_holding(now, &name, holding, id, ReentryTerms { ttl, is_renewed, hold_time });
            return self.advance(now, &name);
        }
        let waiter_state = if is_exclusive { WaiterState::New } else { WaiterState::Granted(exported.token) };
        let claim = Claim { name: name.clone(), id: claim_id, owner, client, is_renewed, mode, ttl, holder, label };
        let waiter = Waiter {
            reenters: true,
            state: waiter_state,
            may_join: is_exclusive,
            resumes: Some(exported),
            is_reported: true,
            ..Waiter::new(id, claim, hold_time, wait_mode, now)
        };
        self.timeouts.add(&waiter);
        state.push_waiter(waiter);
        self.waiters.insert(id, name.clone());
        self.advance(now, &name);
    }

    /// Checks that the holding joined by a resuming waiter is the exported one, and refuses the
    /// waiter otherwise.
    pub(super) fn joined_as_exported(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        token: FencingToken,
    ) -> bool {
        let Some(state) = self.names.get_mut(name) else {
            return false;
        };
        let Some(waiter) = state.waiter(id) else {
            return true;
        };
        let waiter_id = waiter.id;
        match waiter.resumes {
            Some(exported) if exported.token != token => {
                state.withdraw(id, now, false);
                self.leave(now, waiter_id, Some(Refusal::Lost));
                false
            }
            _ => true,
        }
    }

    /// Withdraws the exported holding, after the resumed lease that joined it has reached its
    /// caller.
    pub(super) fn on_delivered(&mut self, now: Moment, lease: LeaseId, exported: Exported) {
        let Some((name, id)) = self.leases.get(&lease).cloned() else {
            return;
        };
        if let Some(state) = self.names.get_mut(&name).filter(|_| id != exported.id) {
            state.withdraw(exported.id, now, false);
        }
        self.advance(now, &name);
    }

    /// Undoes the resumption of a lease that no caller received. A joined lease is released, and
    /// the exported lease stays; an adopted lease becomes the exported lease again.
    pub(super) fn hand_back(&mut self, now: Moment, lease: LeaseId, exported: Exported) {
        let known = self.leases.get(&lease).and_then(|(name, id)| self.names.get_mut(name)?.holding(*id));
        match known {
            Some(holding) if holding.is_adopted && holding.is_only(lease) => self.export(now, lease, Some(exported.id)),
            _ => self.release(now, lease, false),
        }
    }

    /// Handles the answer to the detachment of an exported lease.
    pub(super) fn on_detached(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        amended: Option<ChangeOutcome>,
    ) {
        let (closes, stops_repeating) = (self.is_closing(), self.stops_repeating(now));
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        match amended {
            Some(ChangeOutcome::Done | ChangeOutcome::NotHeld) => {
                state.detachments.iter_mut().filter(|other| other.id == id).for_each(|other| other.is_done = true);
                // A client that closes repeats nothing.
                let is_repeated = |other: &Detachment| !closes && other.until.is_some_and(|until| until > now);
                state.detachments.retain(|other| other.id != id || is_repeated(other));
            }
            Some(ChangeOutcome::Locked) if stops_repeating => state.detachments.retain(|other| other.id != id),
            // Without the heartbeat of a closed client, the lease ends after its TTL at the latest.
            None if closes => state.detachments.clear(),
            Some(ChangeOutcome::Locked) | None => {}
        }
        state.detachments.iter_mut().filter(|d| d.id == id).for_each(|detachment| detachment.put_off(now));
    }
}

impl super::name::NameState {
    /// Takes the heartbeat of this client away from a lease that the client no longer holds.
    pub(super) fn detach(
        &mut self,
        claim: &Claim,
        token: FencingToken,
        renamed: Option<AcquisitionId>,
        now: Moment,
        lingers: bool,
    ) {
        if is_on(Mutation::KeepExported) {
            return;
        }
        let (until, pause) = (lingers.then(|| now + LATE_EFFECT), FIRST_PAUSE);
        let Claim { id, client, ttl, .. } = *claim;
        self.detachments.push(Detachment { id, renamed, token, client, ttl, due: now, pause, until, is_done: false });
        self.ended_at = Some(now);
    }

    /// Withdraws what a late request creates for an exported acquisition, but not the exported
    /// holding.
    fn withdraw_others(&mut self, id: AcquisitionId, exported: FencingToken, now: Moment) {
        self.withdraw(id, now, true);
        self.withdrawals.iter_mut().filter(|other| other.id == id).for_each(|other| other.except = Some(exported));
    }
}
