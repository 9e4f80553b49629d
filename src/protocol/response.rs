//! What a store answers.

use std::time::Duration;

use super::{EntryState, Holder, LeaseId, LeaseRow, Queue};
use crate::owner::Owner;
use crate::token::FencingToken;

/// The answer to a [`Request`](super::Request) that took effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Response {
    /// With the number of notices so far.
    Registered(i64),
    /// The number of notices. It rises with everything that is taken away from the client, or that
    /// it is asked to release. `None`: the client has no row.
    Beat(Option<i64>),
    Acquired(Result<FencingToken, HolderNow>),
    Joined(Joined),
    Enqueued(HolderNow),
    Released(Released),
    Withdrawn(Withdrawn),
    /// `None`: the name has no row.
    Polled(Option<Polled>),
    /// `None`: the name has no row.
    Read(Option<Queue>),
    /// `None`: nothing was changed, since something was different from what was seen, or was
    /// locked.
    Transitioned(Option<Vec<Granted>>),
    Extended(Amended),
    Downgraded(Amended),
    Raised(Amended),
    Evicted(Amended),
    Asked(Asked),
}

impl Response {
    /// Whether a transition has granted the name.
    pub(crate) fn is_grant(&self) -> bool {
        matches!(self, Self::Transitioned(Some(granted)) if !granted.is_empty())
    }
}

/// What has become of an acquisition that was to be added to a holding.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite locks no rows"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joined {
    Done(FencingToken),
    /// The row is locked.
    Locked,
    /// The owner does not hold the name exclusively.
    NotHeld,
}

/// The outcome of a withdrawal, which deletes the rows of an acquisition.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite locks no rows"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Withdrawn {
    /// Nothing of it is there. `awaited`: entries wait for the name.
    Gone { awaited: bool },
    /// A row of it is locked, by a transaction that it has fenced or by a stranger.
    Locked,
}

/// The outcome of a change of a holding.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite locks no rows"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Amended {
    Done,
    /// It stands as before: its row is locked.
    Locked,
    /// It does not stand, or stands otherwise, or cannot be extended since it has expired.
    NotHeld,
}

/// What has become of the request to the holders of a name that they release it.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite locks no rows"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// So many holders were asked. Zero: the name has no valid holder, and nothing was changed.
    Holders(u32),
    /// Nobody was asked: a row is locked.
    Locked,
}

/// What a refusal tells of the present holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HolderNow {
    /// The store did not look.
    Unknown,
    /// The name is free, or its holder has expired: the first waiter may have it.
    Vacant,
    /// A valid holder.
    Valid { owner: Option<Owner>, remaining: Duration },
}

/// What has become of a holding that was to end.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite locks no rows"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Released {
    /// It ended. `awaited`: entries wait, and a transition is to grant them the name.
    Ended { awaited: bool },
    /// It ended, and the given claim holds the name.
    ToNext(FencingToken),
    /// It ended, and this waiting entry holds the name for [`GRANT`](super::timing::GRANT) or its
    /// TTL, whichever is shorter.
    ToEntry(Granted),
    /// It stands as before: entries wait, and a transition must decide.
    Awaited,
    /// It stands as before: its row is locked, by a transaction that it has fenced or by a
    /// stranger.
    Locked,
    /// It does not stand. `lost`: the highest token of this name that was taken away from its
    /// holder; `token`: the latest.
    NotHeld { lost: i64, token: i64 },
}

/// A granted name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    pub(crate) id: LeaseId,
    pub(crate) token: FencingToken,
}

/// How acquisitions stand in a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Polled {
    pub(crate) row: LeaseRow,
    /// In the order in which they were asked for.
    pub(crate) presences: Vec<Presence>,
}

/// How one acquisition stands in a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    None,
    /// Its entry waits behind so many live ones.
    Waiting {
        ahead: u32,
    },
    /// It holds the name, alone or with others, for so long by its expiry and the heartbeat of its
    /// client. `None`: it has expired.
    Holding {
        token: FencingToken,
        remaining: Option<Duration>,
    },
}

impl Presence {
    /// What the row of a name and the entry of an acquisition, if it has one, say of it.
    pub(crate) fn of(id: LeaseId, row: &LeaseRow, entry: Option<(EntryState, Option<Duration>)>, ahead: u32) -> Self {
        let (token, remaining) = match entry {
            _ if row.holder == Holder::Lease(id) => (row.token, row.remaining),
            Some((EntryState::Holding(token), remaining)) => (token, remaining),
            Some((EntryState::Waiting, _)) => return Self::Waiting { ahead },
            None => return Self::None,
        };
        FencingToken::new(token).map_or(Self::None, |token| Self::Holding { token, remaining })
    }
}
