//! What a store is asked.

use std::sync::Arc;
use std::time::Duration;

use super::{ClientId, Holder, LeaseId, Mode};
use crate::name::LockName;
use crate::owner::Owner;
use crate::token::FencingToken;

/// One step of a store.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    /// Create the row of a client, or write its heartbeat. Answer: [`Registered`](super::Response::Registered).
    Register { client: ClientId, holder: Arc<str> },
    /// Write the heartbeat of a client. Answer: [`Beat`](super::Response::Beat).
    Beat { client: ClientId },
    /// Take a name if nobody holds it and nobody waits. Answer: [`Acquired`](super::Response::Acquired).
    Acquire(Claim),
    /// Add an acquisition to an exclusive holding of the same owner. Answer: [`Joined`](super::Response::Joined).
    Join(Claim),
    /// Add waiting entries to a name. Entries that are there already stay. Answer: [`Enqueued`](super::Response::Enqueued).
    Enqueue(Vec<Enqueue>),
    /// End a holding: hand the name to the first live entry, to a given claim if nobody waits, or free it. Answer:
    /// [`Released`](super::Response::Released).
    Release(Release),
    /// Delete every trace of an acquisition: its waiting entry, and its holding. Answer: [`Withdrawn`](super::Response::Withdrawn).
    Withdraw { name: LockName, id: LeaseId },
    /// Read the row of a name and how some acquisitions stand in it. Answer: [`Polled`](super::Response::Polled).
    Poll { name: LockName, ids: Vec<LeaseId> },
    /// Read a name and its entries: all that hold, and the first `limit` that wait. Answer: [`Read`](super::Response::Read).
    Read { name: LockName, limit: u32 },
    /// Change who holds a name, if it still stands as it was read. Answer: [`Transitioned`](super::Response::Transitioned).
    Transition(Transition),
    /// Move the end of a valid holding, or give it to another client. Answer: [`Extended`](super::Response::Extended).
    Extend(Extension),
}

/// A wish for a name.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) name: LockName,
    pub(crate) id: LeaseId,
    pub(crate) owner: Owner,
    pub(crate) client: ClientId,
    /// The heartbeat of the client keeps the lease. Otherwise it ends with its TTL.
    pub(crate) is_kept: bool,
    pub(crate) mode: Mode,
    pub(crate) ttl: Duration,
    pub(crate) label: Arc<str>,
}

/// A waiting entry to be added.
#[derive(Clone, Debug)]
pub(crate) struct Enqueue {
    pub(crate) claim: Claim,
    /// How long ago it arrived.
    pub(crate) age: Duration,
}

/// The end of a holding by its holder.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    pub(crate) name: LockName,
    pub(crate) id: LeaseId,
    pub(crate) token: FencingToken,
    /// The name stays kept from others for so long.
    pub(crate) keep_for: Duration,
    /// Gets the name if nobody waits in the store.
    pub(crate) next: Option<Claim>,
}

/// A change of the holder of a name. It is decided from a [`Queue`](super::Queue) and carried out only if nothing that it rests on
/// has changed since.
#[derive(Clone, Debug)]
pub(crate) struct Transition {
    pub(crate) name: LockName,
    pub(crate) seen: Seen,
    /// The present holder of the row gives the name up. Otherwise a holder must have expired, also when this is carried out.
    pub(crate) given_up: Option<GivenUp>,
    /// Expired entries to delete. Each must have expired still.
    pub(crate) expired: Vec<LeaseId>,
    pub(crate) change: HolderChange,
    /// No live entry goes on waiting: the mark that somebody waits is taken away.
    pub(crate) is_last: bool,
}

/// What a decision rests on. Every grant raises the token; every entry that joins raises the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) holder: Holder,
    pub(crate) token: i64,
    pub(crate) waiting: i64,
}

/// A holding that its holder gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GivenUp {
    pub(crate) id: LeaseId,
    pub(crate) token: FencingToken,
}

/// Who holds the name from now on.
#[derive(Clone, Debug)]
pub(crate) enum HolderChange {
    /// The holder stays.
    None,
    Free,
    /// One exclusive entry, which is deleted.
    Exclusive(Grantee),
    /// These entries, beside those that hold already.
    Shared(Vec<Grantee>),
    /// A claim that has no entry.
    Claim(Box<Claim>),
}

/// A waiting entry that gets the name, and how long its grant lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grantee {
    pub(crate) id: LeaseId,
    pub(crate) ttl: Duration,
}

impl Extension {
    /// Gives a holding what its claim asks for.
    pub(crate) fn to_claim(claim: &Claim, token: FencingToken) -> Self {
        let Claim { name, id, client, ttl, is_kept, .. } = claim.clone();
        Self { name, id, token, ttl, client: is_kept.then_some(client) }
    }
}

/// A new end for a holding.
#[derive(Clone, Debug)]
pub(crate) struct Extension {
    pub(crate) name: LockName,
    pub(crate) id: LeaseId,
    pub(crate) token: FencingToken,
    pub(crate) ttl: Duration,
    /// Whose heartbeat keeps the holding from now on. `None`: that stays as it is.
    pub(crate) client: Option<ClientId>,
}
