//! The responses of a store.

use std::time::Duration;

use super::{AcquisitionId, EntryState, Holder, LeaseRow, Queue};
use crate::name::LockName;
use crate::owner::Owner;
use crate::token::FencingToken;

/// The answer to a [`Request`](super::Request) that took effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Response {
    /// The latest notice.
    Registered(i64),
    /// The latest notice: a number that rises with every lease that is taken away from the client or
    /// that the client is asked to release. The first one of a row is the time. `None`: the client
    /// has no row.
    Beat(Option<i64>),
    Acquired(Result<FencingToken, CurrentHolder>),
    Joined(JoinOutcome),
    Enqueued(CurrentHolder),
    Released(ReleaseOutcome),
    Withdrawn(WithdrawalOutcome),
    /// `None`: the name has no row.
    Polled(Option<Polled>),
    /// `None`: the name has no row.
    Read(Option<Queue>),
    /// `None`: nothing was changed, because the name differed from what was seen, or a row was
    /// locked.
    Transitioned(Option<Vec<Granted>>),
    Extended(ChangeOutcome),
    Downgraded(ChangeOutcome),
    Raised(ChangeOutcome),
    Evicted(ChangeOutcome),
    Asked(AskOutcome),
}

/// The outcome of a request to add an acquisition to a holding.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite locks no rows"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JoinOutcome {
    Done(FencingToken),
    /// The row is locked.
    Locked,
    /// The owner does not hold the name exclusively.
    NotHeld,
}

/// The outcome of a withdrawal, which deletes the rows of an acquisition.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite locks no rows"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WithdrawalOutcome {
    /// The store has no trace of the acquisition. `awaited`: entries wait for the name.
    Gone { awaited: bool },
    /// A row of the acquisition is locked, by a transaction that it has fenced or by a foreign one.
    Locked,
}

/// The outcome of a change of a holding.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite locks no rows"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChangeOutcome {
    Done,
    /// The holding is unchanged: its row is locked.
    Locked,
    /// The holding does not exist, has another state, or has expired and cannot be extended.
    NotHeld,
}

/// The outcome of a request that asks the holders of a name to release it.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite locks no rows"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AskOutcome {
    /// The number of holders that were asked. Zero: the name has no valid holder, and nothing was
    /// changed.
    Holders(u32),
    /// No holder was asked: a row is locked.
    Locked,
}

/// What a refusal says about the current holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CurrentHolder {
    /// The store did not look.
    Unknown,
    /// The name is free, or its holder has expired: the first waiter may have it.
    Vacant,
    /// A valid holder.
    Valid { owner: Option<Owner>, remaining: Duration },
}

/// The outcome of a release.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite locks no rows"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReleaseOutcome {
    /// The holding ended. `awaited`: entries wait, and a transition must grant them the name.
    Ended { awaited: bool },
    /// The holding ended, and the given claim holds the name.
    ToNext(FencingToken),
    /// The holding ended, and this waiting entry holds the name for [`GRANT_TTL`](super::timing::GRANT_TTL)
    /// or its TTL, whichever is shorter.
    ToEntry(Granted),
    /// The holding is unchanged: entries wait, and a transition must decide.
    Awaited,
    /// The holding is unchanged: its row is locked, by a transaction that it has fenced or by a
    /// foreign one.
    Locked,
    /// The holding does not exist. `lost`: the highest token of this name that was taken away from
    /// its holder; `token`: the latest token.
    NotHeld { lost: i64, token: i64 },
}

/// A granted name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granted {
    pub(crate) id: AcquisitionId,
    pub(crate) token: FencingToken,
}

/// A notification that a name was granted to this client, or may have been.
#[cfg_attr(
    not(all(feature = "postgres", feature = "sqlite")),
    allow(dead_code, reason = "a database has one kind, or none")
)]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Notification {
    /// An entry of the client was granted this name. `notice`: the client's latest notice before
    /// the grant.
    Granted { name: LockName, granted: Granted, notice: i64 },
    /// One of the names for which the client waits may have been granted.
    AnyName,
}

/// The state of acquisitions in a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Polled {
    pub(crate) row: LeaseRow,
    /// In the order of the request.
    pub(crate) presences: Vec<Presence>,
}

/// The state of one acquisition in a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    None,
    /// The entry of the acquisition waits behind `ahead` live entries.
    Waiting {
        ahead: u32,
    },
    /// The acquisition holds the name, alone or with others, for `remaining` according to its
    /// expiry and the heartbeat of its client. `None`: it has expired.
    Holding {
        token: FencingToken,
        remaining: Option<Duration>,
    },
}

impl Presence {
    /// Returns the state of an acquisition according to the row of the name and its entry, if it
    /// has one.
    pub(crate) fn from_rows(
        id: AcquisitionId,
        row: &LeaseRow,
        entry: Option<(EntryState, Option<Duration>)>,
        ahead: u32,
    ) -> Self {
        let (token, remaining) = match entry {
            _ if row.holder == Holder::Lease(id) => (row.token, row.remaining),
            Some((EntryState::Holding(token), remaining)) => (token, remaining),
            Some((EntryState::Waiting, _)) => return Self::Waiting { ahead },
            None => return Self::None,
        };
        FencingToken::new(token).map_or(Self::None, |token| Self::Holding { token, remaining })
    }
}
