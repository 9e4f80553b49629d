//! How leases end without a release: by time, by eviction, by a store that does not know them.

use std::time::Duration;

use super::Engine;
use super::action::{Action, Verdict};
use super::holding::{Holding, HoldingState};
use crate::clock::{Moment, pause_after_expiry};
use crate::error::LossCause;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::AcquisitionId;
use crate::token::FencingToken;

impl Engine {
    /// Ends the holdings with this token, which the store has ended.
    pub(super) fn on_evicted(&mut self, now: Moment, name: &LockName, token: FencingToken) {
        let held = self.names.get(name).filter(|_| !is_on(Mutation::KeepEvicted)).map(|state| &state.holdings);
        let ended: Vec<AcquisitionId> =
            held.into_iter().flatten().filter(|h| h.is_held() && h.has_token(token)).map(Holding::id).collect();
        for id in ended {
            self.lose(now, name, id, LossCause::Superseded);
        }
        self.advance(now, name);
    }

    /// Looks up every holding of a name.
    pub(super) fn look_up(&mut self, now: Moment, name: &LockName) {
        for holding in self.names.get_mut(name).into_iter().flat_map(|state| &mut state.holdings) {
            holding.suspect(&self.heartbeat);
        }
        self.advance(now, name);
    }

    /// Ends the holdings of a name whose deadline has passed, and the leases whose `max_hold` is
    /// over.
    pub(super) fn end_overdue(&mut self, now: Moment, name: &LockName) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let mut lost = Vec::new();
        for holding in &mut state.holdings {
            let is_overdue = holding.lifetime.deadline(&self.heartbeat) <= now;
            // The store's answer to a release says whether the holding lasted until then.
            let HoldingState::Held(leases) = &mut holding.state else {
                continue;
            };
            if is_overdue {
                lost.push(holding.id());
                continue;
            }
            let ended: Vec<_> = leases.extract_if(.., |lease| lease.ends.is_some_and(|at| at <= now)).collect();
            for lease in &ended {
                self.leases.remove(&lease.id);
                self.actions.push(Action::Lost { lease: lease.id, cause: LossCause::MaxHold });
            }
            if leases.is_empty() {
                holding.begin_release(now, &ended, None, true);
            }
        }
        for id in lost {
            if !is_on(Mutation::ReviveLost) {
                self.lose(now, name, id, LossCause::Expired);
            }
        }
    }

    /// Ends a holding that was not released. It is withdrawn if the store may keep it longer.
    pub(super) fn lose(&mut self, now: Moment, name: &LockName, id: AcquisitionId, cause: LossCause) {
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some(i) = state.holdings.iter().position(|holding| holding.id() == id) else {
            return;
        };
        let mut holding = state.holdings.remove(i);
        let (has_expired, lingers) = (cause == LossCause::Expired, holding.lingers || state.is_busy());
        // A holding without a heartbeat ends in the store by itself; other processes may have
        // extended it there.
        if !has_expired || holding.lifetime.is_renewed || lingers {
            let pause = if has_expired { pause_after_expiry(holding.lifetime.ttl) } else { Duration::ZERO };
            state.withdraw_after(id, now, pause, lingers);
        }
        for lease in holding.looks.take_all() {
            self.actions.push(Action::Released { lease, verdict: Verdict::Lost(cause) });
        }
        self.lose_amendments(holding.amendments, cause);
        match holding.state {
            HoldingState::Held(leases) => {
                for lease in leases {
                    self.leases.remove(&lease.id);
                    if cause != LossCause::Expired || !is_on(Mutation::ExpireInSilence) {
                        self.actions.push(Action::Lost { lease: lease.id, cause });
                    }
                }
            }
            HoldingState::Releasing { lease: Some(lease), .. } => {
                self.actions.push(Action::Released { lease, verdict: Verdict::Lost(cause) });
            }
            HoldingState::Releasing { lease: None, .. } => {}
        }
    }
}
