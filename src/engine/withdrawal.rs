//! What remains to be done in the store about acquisitions that have ended here.

use std::time::Duration;

use super::action::WaiterId;
use crate::clock::Moment;
use crate::name::LockName;
use crate::protocol::{ClientId, Extension, Keeper, LeaseId, Request};
use crate::token::FencingToken;

/// The pause before a statement is repeated for the first time.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// For how long a request may take effect after the last attempt to send it was given up.
pub(super) const LATE_EFFECT: Duration = Duration::from_secs(60);

/// An acquisition that is to leave no trace in the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Withdrawal {
    pub(super) id: LeaseId,
    pub(super) due: Moment,
    pub(super) pause: Duration,
    /// A request for it may take effect until then, so it is withdrawn again.
    pub(super) until: Option<Moment>,
    /// The holding with this token was given to another process, and stays.
    pub(super) except: Option<FencingToken>,
    /// The waiter that timed out, and the latest moment of its refusal. The answer to the withdrawal
    /// refuses it earlier.
    pub(super) timed_out: Option<(WaiterId, Moment)>,
}

impl Withdrawal {
    /// Sets when it is repeated: later each time, at most after `longest`.
    pub(super) fn put_off(&mut self, now: Moment, longest: Duration) {
        self.due = now + self.pause;
        self.pause = (self.pause * 2).min(longest);
    }
}

/// An exported lease that the heartbeat of this client still keeps.
#[derive(Clone, Copy, Debug)]
pub(super) struct Detachment {
    pub(super) id: LeaseId,
    /// The identity that it is to have again.
    pub(super) renamed: Option<LeaseId>,
    pub(super) token: FencingToken,
    pub(super) client: ClientId,
    pub(super) ttl: Duration,
    pub(super) due: Moment,
    pub(super) pause: Duration,
    /// A request may make the lease one of this client until then, so the detachment is repeated.
    pub(super) until: Option<Moment>,
    /// The lease has got its last TTL.
    pub(super) is_done: bool,
}

impl Detachment {
    pub(super) fn put_off(&mut self, now: Moment) {
        self.due = now + self.pause;
        self.pause = (self.pause * 2).min(Duration::from_secs(1));
    }

    pub(super) fn request(&self, name: &LockName) -> Request {
        let Self { id, renamed, token, client, ttl, is_done, .. } = *self;
        let (name, keeper) = (name.clone(), Keeper::NotThisClient(client));
        let lasts = if is_done { Duration::ZERO } else { ttl };
        Request::Extend(Extension { name, id: Some(id), renamed, token, lasts, ttl: None, keeper })
    }
}
