//! Deletions and detachments in the store that follow the end of an acquisition in this client.

use std::time::Duration;

use super::action::WaiterId;
use crate::clock::Moment;
use crate::name::LockName;
use crate::protocol::{AcquisitionId, ClientChange, ClientId, Extension, Request};
use crate::token::FencingToken;

/// The pause before a statement is repeated for the first time.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// For how long a request may take effect after its last attempt was given up.
pub(super) const LATE_EFFECT: Duration = Duration::from_secs(60);

/// The deletion of every trace of an acquisition from the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Withdrawal {
    pub(super) id: AcquisitionId,
    pub(super) due: Moment,
    pub(super) pause: Duration,
    /// A request for the acquisition may take effect until this moment, so the withdrawal is
    /// repeated.
    pub(super) until: Option<Moment>,
    /// The acquisition keeps its name until the withdrawal is due.
    pub(super) is_kept: bool,
    /// The holding with this token was given to another process, and stays.
    pub(super) except: Option<FencingToken>,
    /// The waiter that timed out, and the latest moment of its refusal. The answer to the
    /// withdrawal refuses it earlier.
    pub(super) timed_out: Option<(WaiterId, Moment)>,
}

impl Withdrawal {
    /// Returns whether the store may be left with what a request for the acquisition does late.
    pub(super) fn may_be_forgotten(&self) -> bool {
        self.until.is_some() && (self.pause > FIRST_PAUSE || self.is_kept)
    }

    /// Puts off the next repetition, longer each time, by at most `longest`.
    pub(super) fn put_off(&mut self, now: Moment, longest: Duration) {
        self.due = now + self.pause;
        self.pause = (self.pause * 2).min(longest);
    }
}

/// An exported lease that the heartbeat of this client still renews.
#[derive(Clone, Copy, Debug)]
pub(super) struct Detachment {
    pub(super) id: AcquisitionId,
    /// The identity to restore.
    pub(super) renamed: Option<AcquisitionId>,
    pub(super) token: FencingToken,
    pub(super) client: ClientId,
    pub(super) ttl: Duration,
    pub(super) due: Moment,
    pub(super) pause: Duration,
    /// A request may give the lease to this client until this moment, so the detachment is
    /// repeated.
    pub(super) until: Option<Moment>,
    /// The lease has received its last TTL.
    pub(super) is_done: bool,
}

impl Detachment {
    pub(super) fn put_off(&mut self, now: Moment) {
        self.due = now + self.pause;
        self.pause = (self.pause * 2).min(Duration::from_secs(1));
    }

    pub(super) fn request(&self, name: &LockName) -> Request {
        let Self { id, renamed, token, client, ttl, is_done, .. } = *self;
        let (name, client_change) = (name.clone(), ClientChange::Remove(client));
        let lasts = if is_done { Duration::ZERO } else { ttl };
        Request::Extend(Extension { name, id: Some(id), renamed, token, lasts, ttl: None, client_change })
    }
}
