//! The requests to a store.

use std::sync::Arc;
use std::time::Duration;

use super::{AcquisitionId, ClientId, Holder, Mode};
use crate::name::LockName;
use crate::owner::Owner;
use crate::token::FencingToken;

/// One step of a store.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    /// Create the row of a client, or write its heartbeat. Answer:
    /// [`Registered`](super::Response::Registered).
    Register { client: ClientId },
    /// Write the heartbeat of a client. Answer: [`Beat`](super::Response::Beat).
    Beat { client: ClientId },
    /// Take a name that has no holder and no waiting entry. Answer:
    /// [`Acquired`](super::Response::Acquired).
    Acquire(Claim),
    /// Add an acquisition to an exclusive holding of the same owner. Answer:
    /// [`Joined`](super::Response::Joined).
    Join(Claim),
    /// Add waiting entries to a name. Existing entries stay. Answer:
    /// [`Enqueued`](super::Response::Enqueued).
    Enqueue(Vec<Enqueue>),
    /// End a holding: hand the name to the first live entry, to a given claim if no entry waits, or
    /// free it. Answer:
    /// [`Released`](super::Response::Released).
    Release(Release),
    /// Delete every trace of an acquisition: its waiting entry, and its holding unless it has the
    /// token `except`. Answer: [`Withdrawn`](super::Response::Withdrawn).
    Withdraw { name: LockName, id: AcquisitionId, except: Option<FencingToken> },
    /// Read the row of a name and the state of some acquisitions in it. Answer:
    /// [`Polled`](super::Response::Polled).
    Poll { name: LockName, ids: Vec<AcquisitionId> },
    /// Read a name and its entries: all that hold, and the first `limit` that wait. Answer:
    /// [`Read`](super::Response::Read).
    Read { name: LockName, limit: u32 },
    /// Change the holder of a name if the name is still as it was read. Answer:
    /// [`Transitioned`](super::Response::Transitioned).
    Transition(Transition),
    /// Move the end of a valid holding forward, never back, because its holder may rely on the
    /// current end, and change whose heartbeat renews the holding. Answer:
    /// [`Extended`](super::Response::Extended).
    Extend(Extension),
    /// Convert an exclusive holding of one lease to shared mode, with the same token. Answer:
    /// [`Downgraded`](super::Response::Downgraded).
    Downgrade { name: LockName, id: AcquisitionId, token: FencingToken },
    /// Raise the token of an exclusive holding of one lease. Answer:
    /// [`Raised`](super::Response::Raised).
    Raise { name: LockName, id: AcquisitionId, token: FencingToken, to: FencingToken },
    /// End the holding with this token, and give its clients a notice. Answer:
    /// [`Evicted`](super::Response::Evicted).
    Evict { name: LockName, token: FencingToken },
    /// Record that every holder of a name is asked to release it, and give their clients a notice.
    /// Answer: [`Asked`](super::Response::Asked).
    Ask { name: LockName },
}

impl Request {
    /// Returns the acquisitions that the request may create or grant under their own identity.
    pub(crate) fn created(&self) -> impl Iterator<Item = AcquisitionId> {
        let (claim, entries) = match self {
            Self::Acquire(claim) | Self::Join(claim) => (Some(claim), &[][..]),
            Self::Enqueue(entries) => (None, &entries[..]),
            Self::Release(release) => (release.next.as_ref(), &[][..]),
            Self::Transition(Transition { change: HolderChange::Claim(claim), .. }) => (Some(&**claim), &[][..]),
            _ => (None, &[][..]),
        };
        claim.into_iter().chain(entries.iter().map(|entry| &entry.claim)).map(|claim| claim.id)
    }

    /// Returns whether the store may come to know an acquisition by the request.
    pub(crate) fn may_create(&self, id: AcquisitionId) -> bool {
        let is_renamed = matches!(self, Self::Extend(extension) if extension.renamed == Some(id));
        is_renamed || self.created().any(|created| created == id)
    }
}

/// Requests of one kind, which some stores carry out in one statement: each as it would be carried
/// out alone, or not at all. Requests that write are about different names.
#[derive(Clone, Debug)]
pub(crate) enum Batch {
    /// Exclusive claims.
    Acquire(Vec<Claim>),
    /// Releases that free the name at once.
    Release(Vec<Release>),
    /// Extensions of exclusive holdings of one lease, which change nothing else.
    Extend(Vec<Extension>),
    /// Polls of one acquisition each.
    Poll(Vec<(LockName, AcquisitionId)>),
}

impl Batch {
    /// Creates a batch of one request. `None`: the request must be sent alone.
    pub(crate) fn from_request(request: &Request) -> Option<Self> {
        let mut batch = match request {
            Request::Acquire(_) => Self::Acquire(Vec::new()),
            Request::Release(_) => Self::Release(Vec::new()),
            Request::Extend(_) => Self::Extend(Vec::new()),
            Request::Poll { .. } => Self::Poll(Vec::new()),
            _ => return None,
        };
        batch.add(request).then_some(batch)
    }

    /// Adds a request. `false`: the request is of another kind, or must be sent alone.
    pub(crate) fn add(&mut self, request: &Request) -> bool {
        match (self, request) {
            (Self::Acquire(claims), Request::Acquire(claim)) if claim.mode == Mode::Exclusive => {
                claims.push(claim.clone())
            }
            (Self::Release(releases), Request::Release(release)) if release.is_plain() => {
                releases.push(release.clone())
            }
            (Self::Extend(extensions), Request::Extend(extension)) if extension.is_plain() => {
                extensions.push(extension.clone());
            }
            (Self::Poll(polls), Request::Poll { name, ids }) if ids.len() == 1 => polls.push((name.clone(), ids[0])),
            _ => return false,
        }
        true
    }
}

/// A claim to a name.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) name: LockName,
    pub(crate) id: AcquisitionId,
    pub(crate) owner: Owner,
    pub(crate) client: ClientId,
    /// Whether the heartbeat of the client renews the lease. Otherwise the lease ends with its TTL.
    pub(crate) is_renewed: bool,
    pub(crate) mode: Mode,
    pub(crate) ttl: Duration,
    /// The client's description for people.
    pub(crate) holder: Arc<str>,
    pub(crate) label: Arc<str>,
}

/// A waiting entry to add.
#[derive(Clone, Debug)]
pub(crate) struct Enqueue {
    pub(crate) claim: Claim,
    /// How long ago the claim arrived.
    pub(crate) age: Duration,
}

/// The end of a holding by its holder.
#[derive(Clone, Debug)]
pub(crate) struct Release {
    pub(crate) name: LockName,
    pub(crate) id: AcquisitionId,
    pub(crate) token: FencingToken,
    /// How long the name stays reserved.
    pub(crate) keep_for: Duration,
    /// The claim that gets the name if no entry waits in the store.
    pub(crate) next: Option<Claim>,
}

impl Release {
    /// Returns whether the release frees the name at once.
    fn is_plain(&self) -> bool {
        self.keep_for.is_zero() && self.next.is_none()
    }
}

/// A change of the holder of a name. The change is decided from a [`Queue`](super::Queue) and
/// carried out only if [`Seen`] still matches.
#[derive(Clone, Debug)]
pub(crate) struct Transition {
    pub(crate) name: LockName,
    pub(crate) seen: Seen,
    /// The current holder of the row gives the name up. Without it, a holder must have expired,
    /// also when the transition is carried out.
    pub(crate) given_up: Option<GivenUp>,
    /// Expired entries to delete. Each must still be expired.
    pub(crate) expired: Vec<AcquisitionId>,
    pub(crate) change: HolderChange,
    /// No live entry remains waiting: the mark of waiting entries is removed.
    pub(crate) is_last: bool,
}

impl Transition {
    /// Returns whether the transition is carried out only if the holder of the row has expired.
    pub(crate) fn takes_over(&self) -> bool {
        matches!(self.seen.holder, Holder::Lease(_)) && self.given_up.is_none()
    }
}

/// The state on which a decision depends. Every grant raises the token; every entry that joins
/// raises the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) holder: Holder,
    pub(crate) token: i64,
    pub(crate) waiting: i64,
}

/// A holding that its holder gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GivenUp {
    pub(crate) id: AcquisitionId,
    pub(crate) token: FencingToken,
}

/// The holder of the name from now on.
#[derive(Clone, Debug)]
pub(crate) enum HolderChange {
    /// The holder stays.
    None,
    Free,
    /// One exclusive entry, which is deleted.
    Exclusive(Grantee),
    /// These entries, in addition to the entries that already hold the name.
    Shared(Vec<Grantee>),
    /// A claim without an entry.
    Claim(Box<Claim>),
}

impl HolderChange {
    /// Returns the waiting entries that get the name.
    pub(crate) fn grantees(&self) -> &[Grantee] {
        match self {
            Self::Exclusive(grantee) => std::slice::from_ref(grantee),
            Self::Shared(grantees) => grantees,
            Self::None | Self::Free | Self::Claim(_) => &[],
        }
    }

    /// Returns the acquisitions that get the name, in the order of their tokens.
    #[cfg(any(feature = "mysql", feature = "sqlite"))]
    pub(crate) fn granted_ids(&self) -> Vec<AcquisitionId> {
        match self {
            Self::Claim(claim) => vec![claim.id],
            _ => self.grantees().iter().map(|grantee| grantee.id).collect(),
        }
    }
}

/// A waiting entry that gets the name, and how long its grant lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grantee {
    pub(crate) id: AcquisitionId,
    pub(crate) ttl: Duration,
}

impl Extension {
    /// Creates an extension that gives a holding the properties of its claim.
    pub(crate) fn to_claim(claim: &Claim, token: FencingToken) -> Self {
        let Claim { name, id, client, ttl, is_renewed, .. } = claim.clone();
        let client_change = if is_renewed { ClientChange::Set(client) } else { ClientChange::None };
        Self { name, id: Some(id), renamed: None, token, lasts: ttl, ttl: Some(ttl), client_change }
    }

    /// Returns whether the extension moves the end of one acquisition and changes nothing else.
    fn is_plain(&self) -> bool {
        self.id.is_some() && self.renamed.is_none() && self.ttl.is_none() && self.client_change == ClientChange::None
    }
}

/// The earliest new end for a holding.
#[derive(Clone, Debug)]
pub(crate) struct Extension {
    pub(crate) name: LockName,
    /// `None`: any acquisition that holds with this token.
    pub(crate) id: Option<AcquisitionId>,
    /// The new identity of the holding. An earlier request may have set it already.
    pub(crate) renamed: Option<AcquisitionId>,
    pub(crate) token: FencingToken,
    /// The least time that the holding lasts from now on without a heartbeat.
    pub(crate) lasts: Duration,
    /// The least time that the holding lasts after a heartbeat. `None`: the TTL stays as it is.
    pub(crate) ttl: Option<Duration>,
    pub(crate) client_change: ClientChange,
}

/// How an extension changes the client whose heartbeat renews the holding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientChange {
    None,
    Set(ClientId),
    /// Another client that has taken the holding over since stays.
    Remove(ClientId),
}

impl ClientChange {
    /// Returns the new client and the removed client.
    pub(crate) fn clients(self) -> (Option<ClientId>, Option<ClientId>) {
        match self {
            Self::None => (None, None),
            Self::Set(client) => (Some(client), None),
            Self::Remove(client) => (None, Some(client)),
        }
    }
}
