//! A caller that wants a name, and the state of its claim in the store.

use std::collections::BTreeSet;

use super::action::{Exported, HoldTime, Refusal, WaitMode, WaiterId};
use super::heartbeat::Epoch;
use crate::clock::Moment;
use crate::mutation::{Mutation, is_on};
use crate::owner::Owner;
use crate::protocol::{Claim, Extension, Mode};
use crate::token::FencingToken;

/// The state of a waiter's claim in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaiterState {
    /// The waiter has not asked the store.
    New,
    /// The store refused the claim: a waiter that only tries needs a read of the name, any other an
    /// entry.
    Refused,
    /// The entry of the claim waits.
    Queued,
    /// The store granted the name with this token. The grant must be confirmed before it is
    /// reported.
    Granted(FencingToken),
}

/// A caller that wants the name.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    pub(super) id: WaiterId,
    pub(super) claim: Claim,
    pub(super) reenters: bool,
    pub(super) hold_time: HoldTime,
    pub(super) since: Moment,
    pub(super) wait_mode: WaitMode,
    pub(super) state: WaiterState,
    /// A request about its claim may take effect late.
    pub(super) lingers: bool,
    /// The owner may hold the name elsewhere: the store is asked before the waiter is refused.
    pub(super) may_join: bool,
    /// The exported lease that the waiter takes over.
    pub(super) resumes: Option<Exported>,
    /// The epoch in which the client learned of a grant.
    pub(super) granted_in: Option<Epoch>,
    /// When to ask the store again, after a locked row.
    pub(super) retry_at: Moment,
    /// How often the store did not know the lease that the waiter takes over.
    pub(super) unknown_answers: u32,
    /// Whether the wait was reported to the caller.
    pub(super) is_reported: bool,
}

impl Waiter {
    /// Makes a waiter whose claim is not in the store yet.
    pub(super) fn new(id: WaiterId, claim: Claim, hold_time: HoldTime, wait_mode: WaitMode, now: Moment) -> Self {
        Self {
            id,
            claim,
            reenters: false,
            hold_time,
            since: now,
            wait_mode,
            state: WaiterState::New,
            lingers: false,
            may_join: false,
            resumes: None,
            granted_in: None,
            retry_at: now,
            unknown_answers: 0,
            is_reported: false,
        }
    }

    /// Returns whether to report the wait to the caller: once, and not for a try.
    pub(super) fn report_wait(&mut self) -> bool {
        if self.tries() || is_on(Mutation::WaitInSilence) {
            return false;
        }
        !std::mem::replace(&mut self.is_reported, true) || is_on(Mutation::ReportWaitsAgain)
    }

    pub(super) fn tries(&self) -> bool {
        matches!(self.wait_mode, WaitMode::Try(_))
    }

    pub(super) fn ends_at(&self) -> Option<Moment> {
        match self.wait_mode {
            WaitMode::Try(until) => Some(until),
            WaitMode::Wait(until) => until,
        }
    }

    /// Puts a try into the queue.
    pub(super) fn begin_to_wait(&mut self) {
        self.wait_mode = WaitMode::Wait(self.ends_at());
    }

    /// Returns whether the owner, if it shares the name, may share it again past waiting entries.
    pub(super) fn may_share_again(&self) -> bool {
        self.reenters && self.claim.mode == Mode::READ
    }

    /// Returns whether the waiter's owner may hold the name. `holder`: the owner of an exclusive
    /// holding of this client, beside which no other owner holds it. A resumed lease is refused by
    /// the answer.
    pub(super) fn can_join(&self, holder: Option<Owner>) -> bool {
        self.may_join && (self.resumes.is_some() || holder.is_none_or(|holder| holder == self.claim.owner))
    }

    /// Returns whether the release of a lease of this client can grant the name to the waiter.
    pub(super) fn can_follow(&self) -> bool {
        self.claim.mode == Mode::Exclusive && matches!(self.state, WaiterState::New | WaiterState::Refused)
    }

    /// Returns whether the store may know the waiter's claim.
    pub(super) fn leaves_traces(&self) -> bool {
        self.lingers || self.has_entry()
    }

    /// Returns whether the claim has an entry in the store.
    pub(super) fn has_entry(&self) -> bool {
        matches!(self.state, WaiterState::Queued | WaiterState::Granted(_))
    }

    /// Returns the statement that gives a grant the requested properties.
    pub(super) fn confirmation(&self, token: FencingToken) -> Extension {
        let extension = Extension::to_claim(&self.claim, token);
        match self.resumes {
            // The lease becomes an acquisition of this client.
            Some(exported) => Extension { id: Some(exported.id), renamed: Some(self.claim.id), ..extension },
            None => extension,
        }
    }

    /// Returns whether the waiter takes over the exported holding itself, instead of joining it.
    pub(super) fn adopts(&self) -> bool {
        self.resumes.is_some() && self.claim.mode != Mode::Exclusive
    }

    /// Returns the refusal of a try while another caller holds the name.
    pub(super) fn refusal(&self) -> Refusal {
        if self.resumes.is_some() { Refusal::Lost } else { Refusal::Taken }
    }

    pub(super) fn is_queued(&self) -> bool {
        self.state == WaiterState::Queued
    }
}

/// The moments at which waiters give up.
#[derive(Default)]
pub(super) struct Timeouts(BTreeSet<(Moment, WaiterId)>);

impl Timeouts {
    pub(super) fn add(&mut self, waiter: &Waiter) {
        self.0.extend(waiter.ends_at().map(|at| (at, waiter.id)));
    }

    pub(super) fn remove(&mut self, waiter: &Waiter) {
        if let Some(at) = waiter.ends_at() {
            self.0.remove(&(at, waiter.id));
        }
    }

    /// Returns the next moment.
    pub(super) fn next(&self) -> Option<Moment> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Removes a waiter that gives up by now.
    pub(super) fn pop_due(&mut self, now: Moment) -> Option<WaiterId> {
        let is_due = self.next().is_some_and(|at| at <= now);
        is_due.then(|| self.0.pop_first()).flatten().map(|(_, waiter)| waiter)
    }
}
