//! Rows as read from a store. Durations are remaining times by the database's clock at the time of
//! reading.

use std::time::Duration;

use super::{AcquisitionId, ClientId};
use crate::owner::Owner;

/// The mode in which a name is wanted or held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// One holder alone.
    Exclusive,
    /// Together with other holders: `units` of `permits`.
    Shared { units: u32, permits: u32 },
}

impl Mode {
    /// A shared lease: one unit of more permits than there can be leases.
    pub(crate) const READ: Self = Self::Shared { units: 1, permits: u32::MAX };

    /// Returns the mode in one word, for people and dashboards.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::READ => "shared",
            Self::Shared { .. } => "permits",
        }
    }
}

/// The holder of a name, according to its row in `sqlock_lease`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    Nobody,
    /// A released lease, which reserves the name until its `hold_at_least` is over.
    Kept,
    /// One lease of one client.
    Lease(AcquisitionId),
    /// The holding entries of the name.
    Entries,
}

/// The row of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LeaseRow {
    pub(crate) holder: Holder,
    pub(crate) owner: Option<Owner>,
    /// The client whose heartbeat renews the holder.
    pub(crate) client: Option<ClientId>,
    /// The token of the latest holding.
    pub(crate) token: i64,
    /// How long the holder may keep the name, by its expiry and the heartbeat of its client.
    /// `None`: the holder has expired, or entries hold the name.
    pub(crate) remaining: Option<Duration>,
    /// The mark of waiting entries, where the store sets one. The mark rises with every entry that
    /// joins; zero: no entry waits.
    pub(crate) waiting: i64,
    /// The highest token whose holding was taken away: expired and taken over, or evicted.
    pub(crate) lost: i64,
    /// The highest token whose holder was asked to release the name.
    pub(crate) asked: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryState {
    Waiting,
    /// The entry holds the name with this token.
    Holding(i64),
}

impl EntryState {
    /// Returns the state of an entry whose row has this token. Zero: the entry waits.
    pub(crate) fn from_token(token: i64) -> Self {
        match token {
            0 => Self::Waiting,
            token => Self::Holding(token),
        }
    }
}

/// An entry of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EntryRow {
    pub(crate) id: AcquisitionId,
    /// `None`: no heartbeat renews the entry, which lasts until its expiry.
    pub(crate) client: Option<ClientId>,
    pub(crate) owner: Option<Owner>,
    /// Whether the heartbeat of the client renews the lease after the grant.
    pub(crate) is_renewed: bool,
    pub(crate) mode: Mode,
    pub(crate) state: EntryState,
    pub(crate) ttl: Duration,
    /// When the entry arrived, in microseconds of the database's clock.
    pub(crate) arrived: i64,
    /// `None`: the entry has expired.
    pub(crate) remaining: Option<Duration>,
}

/// A name with its holding entries and the first of its waiting entries, in the order of their
/// arrival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Queue {
    pub(crate) row: LeaseRow,
    pub(crate) entries: Vec<EntryRow>,
    /// Whether more entries may wait than were read.
    pub(crate) is_cut_off: bool,
}

impl Queue {
    /// Creates a queue from entries in order, the holding ones first, without the waiting entries
    /// above the limit. The first of these shows that the queue is cut off, so a store reads one
    /// waiting entry more than the limit.
    pub(crate) fn limited(row: LeaseRow, mut entries: Vec<EntryRow>, limit: u32) -> Self {
        let holding = entries.iter().filter(|entry| entry.state != EntryState::Waiting).count();
        let most = holding + limit as usize;
        let is_cut_off = entries.len() > most;
        entries.truncate(most);
        Self { row, entries, is_cut_off }
    }

    pub(crate) fn holding(&self) -> impl Iterator<Item = &EntryRow> {
        self.entries.iter().filter(|entry| matches!(entry.state, EntryState::Holding(_)))
    }

    pub(crate) fn waiting(&self) -> impl Iterator<Item = &EntryRow> {
        self.entries.iter().filter(|entry| entry.state == EntryState::Waiting)
    }
}

impl Mode {
    /// Returns the number of permits that the mode takes.
    pub(crate) fn units(self) -> u64 {
        match self {
            Self::Exclusive => 0,
            Self::Shared { units, .. } => units.into(),
        }
    }
}
