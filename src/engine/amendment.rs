//! Changes of a held lease: a longer TTL, shared instead of exclusive mode, a higher token.

use std::time::Duration;

use super::Engine;
use super::action::{Action, Amendment, HoldTime, LeaseId, NotAmended, SharedError};
use super::holding::{Amending, AmendmentState, HoldingState, LocalLease};
use crate::clock::Moment;
use crate::error::LossCause;
use crate::name::LockName;
use crate::protocol::{AcquisitionId, ChangeOutcome, Mode};
use crate::token::FencingToken;

/// How long a change that meets a row lock is repeated. The holder itself may have locked the row,
/// in a transaction that the lease fences and that ends only after the change.
const LOCKED_TIMEOUT: Duration = Duration::from_secs(10);

impl Engine {
    pub(super) fn amend(&mut self, now: Moment, lease: LeaseId, amendment: Amendment) {
        let Some((name, id)) = self.leases.get(&lease).cloned() else {
            return self.on_not_amended(lease, NotAmended::Lost(LossCause::Superseded));
        };
        let Some(holding) = self.names.get_mut(&name).and_then(|state| state.holding(id)) else {
            return;
        };
        if amendment == Amendment::Downgrade && holding.claim.mode == Mode::READ {
            return self.actions.push(Action::Amended { lease, result: Ok(()) });
        }
        let is_refused = amendment.is_conversion() && !holding.is_only(lease);
        if is_refused && holding.amendments.is_empty() {
            return self.on_not_amended(lease, NotAmended::EnteredAgain);
        }
        // Answers keep the order of the requests.
        let state = if is_refused { AmendmentState::Refused } else { AmendmentState::Pending };
        holding.amendments.push_back(Amending { lease, amendment, state, locked_since: None, lingers: false });
        self.advance(now, &name);
    }

    /// Sets the hold time of a lease, counted from now on.
    pub(super) fn start_hold_time(&mut self, now: Moment, lease: LeaseId, hold_time: HoldTime) {
        let Some((name, id)) = self.leases.get(&lease).cloned() else {
            return;
        };
        if let Some(holding) = self.names.get_mut(&name).and_then(|state| state.holding(id))
            && let HoldingState::Held(leases) = &mut holding.state
        {
            let limited = leases.iter_mut().filter(|other| other.id == lease);
            limited.for_each(|other| *other = LocalLease::new(lease, now, hold_time));
        }
        self.advance(now, &name);
    }

    fn on_not_amended(&mut self, lease: LeaseId, reason: NotAmended) {
        self.actions.push(Action::Amended { lease, result: Err(reason) });
    }

    /// Handles the answer to the first pending amendment.
    pub(super) fn on_amended(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        sent_at: Moment,
        amended: ChangeOutcome,
    ) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some(holding) = state.holding(id) else {
            return;
        };
        match amended {
            ChangeOutcome::Locked => self.on_amendment_locked(now, name, id),
            ChangeOutcome::Done => self.conclude_amendment(now, name, id, sent_at),
            ChangeOutcome::NotHeld => match holding.amendments.front_mut() {
                Some(amending) if !amending.amendment.is_conversion() => {
                    self.lose(now, name, id, LossCause::Superseded);
                }
                // The lease was taken away, or its owner holds it elsewhere as well: the next look
                // decides.
                Some(amending) => {
                    amending.state = AmendmentState::Refused;
                    holding.lifetime.doubt(&self.heartbeat);
                }
                None => {}
            },
        }
    }

    /// Repeats the first amendment, or gives it up if a row lock has prevented it for too long.
    fn on_amendment_locked(&mut self, now: Moment, name: &LockName, id: AcquisitionId) {
        let Some(holding) = self.names.get_mut(name).and_then(|state| state.holding(id)) else {
            return;
        };
        holding.put_off(now);
        let Some(first) = holding.amendments.front_mut() else {
            return;
        };
        let since = *first.locked_since.get_or_insert(now);
        if since + LOCKED_TIMEOUT <= now {
            self.give_up_amendment(now, name, id, NotAmended::Locked);
        }
    }

    /// Ends the first amendment, which had no effect. If an earlier attempt of it may still convert
    /// the holding, the lease is lost, because its mode or token would be unknown.
    fn give_up_amendment(&mut self, now: Moment, name: &LockName, id: AcquisitionId, reason: NotAmended) {
        let Some(holding) = self.names.get_mut(name).and_then(|state| state.holding(id)) else {
            return;
        };
        if holding.amendments.front().is_some_and(|first| first.lingers) {
            holding.lingers = true;
            return self.lose(now, name, id, LossCause::Superseded);
        }
        if let Some(given_up) = holding.amendments.pop_front() {
            self.on_not_amended(given_up.lease, reason);
            self.admit(now, name, id);
        }
    }

    /// Concludes the first amendment, which took effect after `sent_at`.
    fn conclude_amendment(&mut self, now: Moment, name: &LockName, id: AcquisitionId, sent_at: Moment) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some((holding, done)) = state.holding(id).and_then(|h| h.amendments.pop_front().map(|done| (h, done)))
        else {
            return;
        };
        match done.amendment {
            Amendment::Extend(lasts) => holding.lifetime.extend(sent_at, lasts),
            Amendment::Raise(token) => {
                let former = std::mem::replace(&mut holding.token, token);
                holding.former_tokens.push(former);
            }
            Amendment::Downgrade => {
                holding.claim.mode = Mode::READ;
                // Other readers may share the name from now on.
                state.read_at = Some(now);
            }
        }
        self.actions.push(Action::Amended { lease: done.lease, result: Ok(()) });
        self.admit(now, name, id);
    }

    /// Answers an amendment that the store refused, after a look: the holding still exists, with
    /// this token.
    pub(super) fn answer_refused_amendment(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        token: FencingToken,
    ) {
        let Some(holding) = self.names.get_mut(name).and_then(|state| state.holding(id)) else {
            return;
        };
        let Some(first) = holding.amendments.front().copied().filter(|a| a.state == AmendmentState::LookingUp) else {
            return;
        };
        if first.amendment == Amendment::Raise(token) {
            // An earlier request took effect, and the owner has entered elsewhere since.
            return self.conclude_amendment(now, name, id, now);
        }
        self.give_up_amendment(now, name, id, NotAmended::EnteredAgain);
    }

    /// Answers the changes of a holding that has ended.
    pub(super) fn lose_amendments(&mut self, amendments: impl IntoIterator<Item = Amending>, cause: LossCause) {
        for amending in amendments {
            self.on_not_amended(amending.lease, NotAmended::Lost(cause));
        }
    }

    /// Handles the failure of the first amendment. After a conversion, the state of the lease is
    /// unknown.
    pub(super) fn on_amendment_failed(&mut self, now: Moment, name: &LockName, id: AcquisitionId, error: SharedError) {
        let Some(holding) = self.names.get_mut(name).and_then(|state| state.holding(id)) else {
            return;
        };
        let Some(failed) = holding.amendments.pop_front() else {
            return;
        };
        let is_known = !failed.amendment.is_conversion();
        holding.lingers |= !is_known;
        self.on_not_amended(failed.lease, NotAmended::Failed(error));
        if !is_known {
            self.lose(now, name, id, LossCause::Superseded);
        }
    }
}

impl super::Holding {
    /// Returns whether this lease alone has the holding.
    pub(super) fn is_only(&self, lease: LeaseId) -> bool {
        let has_one_lease =
            matches!(&self.state, HoldingState::Held(leases) if matches!(&leases[..], [only] if only.id == lease));
        has_one_lease && !self.looks.has_leaving()
    }
}
