//! Rows as they are read. Durations are what is left by the database's clock at the moment of
//! reading.

use std::time::Duration;

use super::{ClientId, LeaseId};
use crate::owner::Owner;

/// How a name is wanted or held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// By one alone.
    Exclusive,
    /// Together with other holders: `units` of `permits`.
    Shared { units: u32, permits: u32 },
}

impl Mode {
    /// A shared lease: one unit of more than there can be.
    pub(crate) const READ: Self = Self::Shared { units: 1, permits: u32::MAX };

    /// One word for people and dashboards.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::READ => "shared",
            Self::Shared { .. } => "permits",
        }
    }
}

/// The holder of a name, as its row in `sqlock_lease` tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    Nobody,
    /// Released, and reserved until its `hold_at_least` is over.
    Kept,
    /// One lease of one client.
    Lease(LeaseId),
    /// The entries of the name that hold.
    Entries,
}

/// The row of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaseRow {
    pub(crate) holder: Holder,
    pub(crate) owner: Option<Owner>,
    /// Whose heartbeat keeps the holder.
    pub(crate) client: Option<ClientId>,
    /// The token of the latest holding.
    pub(crate) token: i64,
    /// How long the holder may keep the name, by its expiry and the heartbeat of its client.
    /// `None`: it has expired, or the entries tell.
    pub(crate) remaining: Option<Duration>,
    /// The mark of waiting entries, where the store sets one. It rises with every entry that joins;
    /// zero: no entry waits.
    pub(crate) waiting: i64,
    /// The highest token whose holding was taken away: expired and taken over, or evicted.
    pub(crate) lost: i64,
    /// The holders of tokens up to this one were asked to release the name.
    pub(crate) asked: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryState {
    Waiting,
    /// With this token.
    Holding(i64),
}

/// An entry of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EntryRow {
    pub(crate) id: LeaseId,
    /// `None`: it has no heartbeat, and lasts until its expiry.
    pub(crate) client: Option<ClientId>,
    pub(crate) owner: Option<Owner>,
    /// The heartbeat of its client keeps what it is granted.
    pub(crate) is_kept: bool,
    pub(crate) mode: Mode,
    pub(crate) state: EntryState,
    pub(crate) ttl: Duration,
    /// When it arrived, in microseconds of the database's clock.
    pub(crate) arrived: i64,
    /// `None`: it has expired.
    pub(crate) remaining: Option<Duration>,
}

/// A name with its holding entries and the first of its waiting entries, in the order of their
/// arrival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Queue {
    pub(crate) row: LeaseRow,
    pub(crate) entries: Vec<EntryRow>,
    /// More may wait than were read.
    pub(crate) is_cut_off: bool,
}

impl Queue {
    pub(crate) fn holding(&self) -> impl Iterator<Item = &EntryRow> {
        self.entries.iter().filter(|entry| matches!(entry.state, EntryState::Holding(_)))
    }

    pub(crate) fn waiting(&self) -> impl Iterator<Item = &EntryRow> {
        self.entries.iter().filter(|entry| entry.state == EntryState::Waiting)
    }
}

impl Mode {
    /// How much of the permits it takes.
    pub(crate) fn units(self) -> u64 {
        match self {
            Self::Exclusive => 0,
            Self::Shared { units, .. } => units.into(),
        }
    }
}
