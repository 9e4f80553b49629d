//! How holdings end by a release or a withdrawal.

use std::time::Duration;

use super::action::{Action, SharedError, Verdict};
use super::waiter::WaiterState;
use super::{Engine, GrantTerms};
use crate::clock::Moment;
use crate::error::LossCause;
use crate::name::LockName;
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{AcquisitionId, ReleaseOutcome, WithdrawalOutcome};
use crate::token::FencingToken;

/// A row lock that a release meets for this long is a fence's. A statement of another client keeps
/// its locks until its commit, which takes less.
pub(super) const FENCED_AFTER: Duration = Duration::from_millis(500);

/// How long a closing client repeats a release that meets a row lock, such as a fence's.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

impl Engine {
    pub(super) fn on_released(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        next: Option<(AcquisitionId, Duration)>,
        released: ReleaseOutcome,
        terms: impl Fn(FencingToken, Duration) -> GrantTerms,
    ) {
        let stops_repeating = self.stops_repeating(now);
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some(holding) = state.holding(id) else {
            // The holding expired meanwhile and is being withdrawn, but the grant to its successor
            // is valid.
            return self.grant_to_successor(now, name, next, released, &terms);
        };
        match released {
            ReleaseOutcome::Ended { awaited } => {
                if awaited {
                    (state.is_contended, state.read_at) = (true, Some(now));
                }
                state.overtaken = 0;
                self.conclude(now, name, Some(id), Verdict::Held);
            }
            ReleaseOutcome::ToNext(_) | ReleaseOutcome::ToEntry(_) => {
                state.is_contended |= matches!(released, ReleaseOutcome::ToEntry(_));
                state.overtaken = 0;
                self.conclude(now, name, Some(id), Verdict::Held);
                self.grant_to_successor(now, name, next, released, &terms);
            }
            ReleaseOutcome::Awaited if holding.count_ineffective_release() => {
                self.conclude(now, name, Some(id), Verdict::Failed(SharedError::no_effect()));
            }
            ReleaseOutcome::Awaited => {
                holding.release_by_transition(next.is_none());
                state.is_contended = true;
            }
            ReleaseOutcome::Locked if stops_repeating => {
                let error = SharedError::locked(name);
                self.conclude(now, name, Some(id), Verdict::Failed(error));
            }
            ReleaseOutcome::Locked => {
                let locked_for = holding.put_off_release(now);
                let ends_by_itself = !holding.lifetime.is_renewed;
                // The transaction of a fence may wait for this answer. The holding exists, as its row
                // is locked; one that no heartbeat renews may end before the transaction.
                if ends_by_itself || locked_for >= FENCED_AFTER {
                    for lease in holding.take_leaving() {
                        self.actions.push(Action::Released { lease, verdict: Verdict::Held });
                    }
                }
                // The holding may end before its release, so its next waiter needs an entry.
                state.is_contended |= ends_by_itself;
            }
            // The token was raised by a request whose answer was lost.
            ReleaseOutcome::NotHeld { token: latest, .. } if holding.is_being_raised_to(latest) => {
                holding.token = FencingToken::new(latest).unwrap_or(holding.token);
                holding.retry_at = now;
            }
            ReleaseOutcome::NotHeld { lost, token: latest } => {
                let verdict = holding.judge_end(lost, latest);
                // A store that has missed the grant may still have the waiting entry.
                state.withdraw(id, now, false);
                self.conclude(now, name, Some(id), verdict);
            }
        }
    }

    /// Handles a release that was not answered, or refused. While the holding keeps its name, the
    /// release is repeated: a withdrawal would free the name too early.
    pub(super) fn on_release_failed(&mut self, now: Moment, name: &LockName, id: AcquisitionId, error: &SharedError) {
        let verdict = Verdict::Failed(error.clone());
        let closes = self.is_closing();
        match self.names.get_mut(name).and_then(|state| state.holding(id)) {
            Some(holding) if !closes && holding.keeps_name(now) => {
                holding.put_off(now);
                for lease in holding.take_leaving() {
                    self.actions.push(Action::Released { lease, verdict: verdict.clone() });
                }
            }
            _ => self.conclude(now, name, Some(id), verdict),
        }
    }

    /// Handles the grant of a release.
    fn grant_to_successor(
        &mut self,
        now: Moment,
        name: &LockName,
        next: Option<(AcquisitionId, Duration)>,
        released: ReleaseOutcome,
        terms: &impl Fn(FencingToken, Duration) -> GrantTerms,
    ) {
        match (released, next) {
            (ReleaseOutcome::ToNext(token), Some((next, ttl))) => {
                self.on_granted(now, name, next, terms(token, ttl));
            }
            (ReleaseOutcome::ToEntry(grant), _) => self.on_handed_over(now, name, grant.id, grant.token, terms),
            _ => {}
        }
    }

    /// Handles a release that granted the name to an entry, perhaps of this client.
    pub(super) fn on_handed_over(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        token: FencingToken,
        terms: &impl Fn(FencingToken, Duration) -> GrantTerms,
    ) {
        let Some(waiter) = self.names.get_mut(name).and_then(|state| state.waiter(id)) else {
            return;
        };
        if !waiter.claim.is_renewed {
            waiter.state = WaiterState::Granted(token);
            return;
        }
        let ttl = waiter.claim.ttl.min(GRANT_TTL);
        self.on_granted(now, name, id, terms(token, ttl));
    }

    /// Ends a holding that was being released, and reports the verdict to its holder.
    pub(super) fn conclude(&mut self, now: Moment, name: &LockName, id: Option<AcquisitionId>, verdict: Verdict) {
        let (Some(state), Some(id)) = (self.names.get_mut(name), id) else {
            return;
        };
        let Some(i) = state.holdings.iter().position(|holding| holding.id() == id) else {
            return;
        };
        let mut holding = state.holdings.remove(i);
        state.ended_at = Some(now);
        match (&verdict, holding.kept_until(now)) {
            // A holding that keeps its name ends with its TTL instead.
            (Verdict::Failed(_), Some(_)) => {}
            (Verdict::Held, Some(until)) if holding.lingers => state.withdraw_kept(id, now, until),
            (Verdict::Failed(_), None) => state.withdraw(id, now, true),
            _ if holding.lingers => state.withdraw(id, now, true),
            _ => {}
        }
        if let (Verdict::Failed(error), true) = (&verdict, self.closing_since.is_some()) {
            self.unreleased = Some(error.clone());
        }
        for lease in holding.take_leaving() {
            self.actions.push(Action::Released { lease, verdict: verdict.clone() });
        }
        self.lose_amendments(holding.amendments, LossCause::Superseded);
    }

    pub(super) fn on_withdrawn(
        &mut self,
        now: Moment,
        name: &LockName,
        id: AcquisitionId,
        withdrawn: WithdrawalOutcome,
    ) {
        self.refuse_timed_out(now, name, Some(id));
        let (closes, stops_repeating) = (self.is_closing(), self.stops_repeating(now));
        let Some(state) = self.names.get_mut(name) else {
            return;
        };
        let Some(i) = state.withdrawals.iter().position(|withdrawal| withdrawal.id == id) else {
            return;
        };
        let withdrawal = &mut state.withdrawals[i];
        // An entry that joins late delays other waiters until it is withdrawn again.
        withdrawal.put_off(now, GRANT_TTL);
        match withdrawn {
            WithdrawalOutcome::Gone { awaited } => {
                // A client that closes repeats nothing.
                if closes || withdrawal.until.is_none_or(|until| until <= now) {
                    state.withdrawals.remove(i);
                }
                state.ended_at = Some(now);
                if awaited {
                    state.read_at = Some(now);
                }
            }
            WithdrawalOutcome::Locked if stops_repeating => {
                state.withdrawals.remove(i);
            }
            WithdrawalOutcome::Locked => {}
        }
    }

    /// Returns whether the client closes and no longer repeats statements that meet a row lock.
    pub(super) fn stops_repeating(&self, now: Moment) -> bool {
        self.closing_since.is_some_and(|since| since + CLOSE_TIMEOUT <= now)
    }
}
