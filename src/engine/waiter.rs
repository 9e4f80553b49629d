//! A caller that wants a name, and how its claim stands in the store.

use super::action::{Exported, HoldTime, Patience, WaiterId};
use super::heartbeat::Epoch;
use crate::clock::Moment;
use crate::protocol::{Claim, Extension, Mode};
use crate::token::FencingToken;

/// How the claim of a waiter stands in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaiterState {
    /// It has not asked.
    New,
    /// It was refused: it is to get an entry, or, if it only tries, the name is to be read.
    Refused,
    /// Its entry waits.
    Queued,
    /// The store granted it the name with this token. The grant must be confirmed before the caller
    /// hears of it.
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
    pub(super) patience: Patience,
    pub(super) state: WaiterState,
    /// A request about its claim may take effect late.
    pub(super) lingers: bool,
    /// Its owner may hold the name elsewhere: the store is asked before it is refused.
    pub(super) may_join: bool,
    /// The exported lease that it takes over.
    pub(super) resumes: Option<Exported>,
    /// The epoch in which its grant by another client was read.
    pub(super) granted_in: Option<Epoch>,
    /// It met a locked row, and is not asked for before.
    pub(super) ask_at: Moment,
    /// How often the store has not known the lease that it takes over.
    pub(super) unknown: u32,
    /// The wait was reported to the caller.
    pub(super) is_reported: bool,
}

impl Waiter {
    /// Returns whether to report the wait to the caller: once, and not for a try.
    pub(super) fn report_wait(&mut self) -> bool {
        !self.tries() && !std::mem::replace(&mut self.is_reported, true)
    }

    pub(super) fn tries(&self) -> bool {
        matches!(self.patience, Patience::Try(_))
    }

    pub(super) fn ends_at(&self) -> Option<Moment> {
        match self.patience {
            Patience::Try(until) => Some(until),
            Patience::Wait(until) => until,
        }
    }

    /// It stands in the queue from now on.
    pub(super) fn begin_to_wait(&mut self) {
        self.patience = Patience::Wait(self.ends_at());
    }

    /// Whether its owner, if it shares the name, may share it again past waiting entries.
    pub(super) fn may_share_again(&self) -> bool {
        self.reenters && self.claim.mode == Mode::READ
    }

    /// Whether it can be handed the name by the release of a lease of this client.
    pub(super) fn can_follow(&self) -> bool {
        self.claim.mode == Mode::Exclusive && matches!(self.state, WaiterState::New | WaiterState::Refused)
    }

    /// Whether the store may know of it.
    pub(super) fn leaves_traces(&self) -> bool {
        self.lingers || matches!(self.state, WaiterState::Queued | WaiterState::Granted(_))
    }

    /// The statement that makes a grant what the caller has asked for.
    pub(super) fn confirmation(&self, token: FencingToken) -> Extension {
        let extension = Extension::to_claim(&self.claim, token);
        match self.resumes {
            // It becomes an acquisition of this client.
            Some(exported) => Extension { id: Some(exported.id), renamed: Some(self.claim.id), ..extension },
            None => extension,
        }
    }

    /// Whether it takes over the very holding that was exported, instead of joining it.
    pub(super) fn adopts(&self) -> bool {
        self.resumes.is_some() && self.claim.mode != Mode::Exclusive
    }

    pub(super) fn is_queued(&self) -> bool {
        self.state == WaiterState::Queued
    }
}
