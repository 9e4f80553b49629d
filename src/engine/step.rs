//! Chooses the next statement about a name.

use std::time::Duration;

use super::action::Amendment;
use super::heartbeat::Epoch;
use super::holding::{Holding, HoldingState};
use super::name::{MAX_ENTRIES, NameState};
use super::waiter::{Waiter, WaiterState};
use crate::clock::Moment;
use crate::mutation::{Mutation, is_on};
use crate::name::LockName;
use crate::protocol::{AcquisitionId, ClientChange, Enqueue, Extension, Mode, Release, Request};
use crate::token::FencingToken;

/// How many waiting entries are read to decide which one is next.
const READ_LIMIT: u32 = 32;

/// Why the next statement is sent.
#[derive(Clone, Debug)]
pub(super) enum Step {
    Acquire(AcquisitionId),
    Join(AcquisitionId),
    Enqueue,
    Release(AcquisitionId),
    Withdraw(AcquisitionId),
    /// Reads the state of this client's entries.
    Poll,
    /// Reads whether a holding still exists, if [`Holding::needs_look`] says so. Sent as
    /// [`Request::Poll`].
    Look(AcquisitionId),
    /// Reads which entry is next. `given_up`: a holding that is being released.
    Read {
        given_up: Option<AcquisitionId>,
    },
    Transition {
        given_up: Option<AcquisitionId>,
    },
    Extend(AcquisitionId),
    /// Makes a change that a caller requested.
    Amend(AcquisitionId),
    /// Takes the heartbeat away from an exported lease.
    Detach(AcquisitionId),
}

impl NameState {
    /// Returns the next statement, if one is due. `is_steady`: expired entries are dead.
    ///
    /// Of several, the first of:
    ///
    /// 1. a look at a holding, which need not wait for the answer to another statement;
    /// 2. the release of a holding;
    /// 3. a change of a holding that a caller requested;
    /// 4. the withdrawal of an acquisition;
    /// 5. the end of the renewal of an exported lease;
    /// 6. a read of the queue, to grant the name to the next entry;
    /// 7. what the waiters need;
    /// 8. the extension of a holding.
    ///
    /// Statements 2, 3, 4 and 6 may grant the name to another client. Waiters of this client that
    /// came earlier get entries first, so that they keep their places.
    pub(super) fn next(
        &mut self,
        name: &LockName,
        now: Moment,
        epoch: Epoch,
        is_steady: bool,
    ) -> Option<(Step, Request)> {
        // A look changes nothing, and must not wait for a statement that meets a locked row.
        let is_due = |holding: &&mut Holding| holding.looks.is_due(now);
        if let Some(holding) = self.holdings.iter_mut().filter(is_due).find(|holding| holding.needs_look(epoch)) {
            holding.begin_look();
            let id = holding.id();
            return Some((Step::Look(id), Request::Poll { name: name.clone(), ids: vec![id] }));
        }
        if self.is_busy() {
            return None;
        }
        if std::mem::take(&mut self.is_notified) {
            self.poll_at = Some(now);
        }
        if let Some(holding) = self.holdings.iter().find(|holding| !holding.is_held() && holding.retry_at <= now) {
            return Some(self.release_statement(name, now, is_steady, holding));
        }
        let amendable = self.holdings.iter().filter(|holding| holding.retry_at <= now);
        let amendment = amendable.filter_map(|h| Some((h.id(), h.token, h.next_amendment()?))).next();
        if let Some((id, token, amendment)) = amendment {
            // Of the changes, only a downgrade lets other clients in.
            if amendment == Amendment::Downgrade
                && let Some(enqueue) = self.enqueue(now)
            {
                return Some(enqueue);
            }
            return Some((Step::Amend(id), amend(name, id, token, amendment)));
        }
        let serves =
            self.read_at.is_some_and(|due| due <= now) || self.withdrawals.iter().any(|other| other.due <= now);
        if serves && let Some(enqueue) = self.enqueue(now) {
            return Some(enqueue);
        }
        let due = self.withdrawals.iter().filter(|withdrawal| withdrawal.due <= now);
        if let Some(withdrawal) = due.min_by_key(|withdrawal| withdrawal.due) {
            let id = withdrawal.id;
            let except = withdrawal.except;
            return Some((Step::Withdraw(id), Request::Withdraw { name: name.clone(), id, except }));
        }
        if let Some(detachment) = self.detachments.iter().find(|detachment| detachment.due <= now) {
            return Some((Step::Detach(detachment.id), detachment.request(name)));
        }
        if self.read_at.is_some_and(|due| due <= now) {
            return Some(read_request(name, None));
        }
        if let Some(step) = self.next_for_waiters(name, now) {
            return Some(step);
        }
        let due = |holding: &&Holding| holding.extend_at.is_some_and(|at| at.max(holding.retry_at) <= now);
        self.holdings.iter().find(due).map(|holding| {
            (Step::Extend(holding.id()), Request::Extend(Extension::to_claim(&holding.claim, holding.token)))
        })
    }

    /// Returns the statement that ends a holding.
    fn release_statement(&self, name: &LockName, now: Moment, is_steady: bool, holding: &Holding) -> (Step, Request) {
        let (id, token) = (holding.id(), holding.token);
        let keep_for = match holding.state {
            // The statement would pass over entries that only seem to be dead.
            _ if !is_steady && !holding.keeps_name(now) && holding.may_pass_over_entries() => {
                return read_request(name, Some(id));
            }
            HoldingState::Releasing { .. } if is_on(Mutation::ForgetHoldTime) => Duration::ZERO,
            HoldingState::Releasing { by_transition: false, keeps_until, .. } => keeps_until.since(now),
            _ => return read_request(name, Some(id)),
        };
        let can_hand_on = holding.claim.mode == Mode::Exclusive && self.holdings.len() == 1 && keep_for.is_zero();
        let first = self.waiters.iter().find(|waiter| !waiter.tries());
        let hands_on = can_hand_on && !self.is_contended && !holding.is_joined;
        let next = first.filter(|waiter| hands_on && waiter.can_follow());
        // The entry of this client's next waiter takes its turn among the entries of other clients.
        if can_hand_on
            && next.is_none()
            && let Some(enqueue) = self.enqueue(now)
        {
            return enqueue;
        }
        let next = next.map(|waiter| waiter.claim.clone());
        (Step::Release(id), Request::Release(Release { name: name.clone(), id, token, keep_for, next }))
    }

    /// Returns the statement that the waiters need.
    fn next_for_waiters(&mut self, name: &LockName, now: Moment) -> Option<(Step, Request)> {
        // Confirming a grant and joining a holding of the same owner come before earlier waiters.
        let confirmed = self.foremost().filter(|waiter| waiter.retry_at <= now).find_map(|waiter| match waiter.state {
            WaiterState::Granted(token) => Some((waiter.claim.id, waiter.confirmation(token))),
            _ => None,
        });
        if let Some((id, extension)) = confirmed {
            return Some((Step::Extend(id), Request::Extend(extension)));
        }
        let holder = self.exclusive_owner();
        let joins = |waiter: &&Waiter| waiter.can_join(holder) && !waiter.is_queued() && waiter.retry_at <= now;
        if let Some(waiter) = self.foremost().find(joins) {
            return Some((Step::Join(waiter.claim.id), Request::Join(waiter.claim.clone())));
        }
        // After an overtaken decision, the next read waits for its pause.
        let pauses = self.overtaken > 0 && self.read_at.is_some();
        let tries = self.candidate().is_some_and(|waiter| waiter.tries() && waiter.retry_at <= now);
        if tries && !pauses && !self.is_held_alone() {
            self.read_at = Some(now);
            return Some(read_request(name, None));
        }
        let first = self.first().filter(|first| !first.can_join(holder) || first.is_queued())?;
        let (id, claim) = (first.claim.id, first.claim.clone());
        // The first waiter behind an exclusive lease of this client needs no entry: the release of
        // that lease grants the name to it. A waiter behind a share has an entry, because the share
        // may be the last one when another client releases its own.
        if self.is_held_alone() {
            return if self.is_contended { self.enqueue(now) } else { None };
        }
        match first.state {
            WaiterState::New if self.is_contended && !first.tries() => self.enqueue(now),
            WaiterState::New => Some((Step::Acquire(id), Request::Acquire(claim))),
            WaiterState::Refused => self.enqueue(now),
            WaiterState::Granted(_) => None,
            WaiterState::Queued => {
                if let Some(enqueue) = self.enqueue(now) {
                    return Some(enqueue);
                }
                let due = self.poll_at.is_some_and(|due| due <= now) && !is_on(Mutation::NeverPoll);
                let most = if is_on(Mutation::PollFirstOnly) { 1 } else { usize::MAX };
                let queued = self.foremost().take(most).filter(|waiter| waiter.is_queued());
                due.then(|| {
                    (Step::Poll, Request::Poll { name: name.clone(), ids: queued.map(|w| w.claim.id).collect() })
                })
            }
        }
    }

    /// Adds entries for the waiters that may be granted the name together with the first, for the
    /// next waiter behind them, which keeps later readers of other clients out, and for waiters
    /// whose owner may share the name again.
    fn enqueue(&self, now: Moment) -> Option<(Step, Request)> {
        let mut entries = Vec::new();
        let mut open = MAX_ENTRIES;
        // A waiter whose owner may hold the name elsewhere joins that holding, and needs no entry.
        let holder = self.exclusive_owner();
        for waiter in self.queue().filter(|waiter| !waiter.can_join(holder)) {
            if open == 0 && self.reentering == 0 {
                break;
            }
            if open == 0 && !waiter.may_share_again() {
                continue;
            }
            if matches!(waiter.state, WaiterState::New | WaiterState::Refused) {
                entries.push(Enqueue { claim: waiter.claim.clone(), age: now.since(waiter.since) });
            }
            let is_last = waiter.claim.mode == Mode::Exclusive;
            open = if is_last { 0 } else { open.saturating_sub(1) };
        }
        (!entries.is_empty()).then_some((Step::Enqueue, Request::Enqueue(entries)))
    }
}

fn amend(name: &LockName, id: AcquisitionId, token: FencingToken, amendment: Amendment) -> Request {
    let name = name.clone();
    match amendment {
        Amendment::Extend(lasts) => {
            let (id, client_change) = (Some(id), ClientChange::None);
            Request::Extend(Extension { name, id, renamed: None, token, lasts, ttl: None, client_change })
        }
        Amendment::Downgrade => Request::Downgrade { name, id, token },
        Amendment::Raise(to) => Request::Raise { name, id, token, to },
    }
}

fn read_request(name: &LockName, given_up: Option<AcquisitionId>) -> (Step, Request) {
    (Step::Read { given_up }, Request::Read { name: name.clone(), limit: READ_LIMIT })
}
