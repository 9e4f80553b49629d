//! Who holds what: for people and their tools.

use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::backend::{self, Listed, Place};
use crate::name::LockName;
use crate::owner::Owner;
use crate::token::FencingToken;

/// How a name is held, or wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// By one alone.
    Exclusive,
    /// Together with others who only want that nobody has it for himself.
    Shared,
    /// So many permits of a [semaphore](crate::Semaphore).
    Permits(u32),
}

impl Mode {
    pub(crate) fn of(mode: backend::Mode) -> Self {
        match mode {
            backend::Mode::Exclusive | backend::Mode::Joint => Self::Exclusive,
            backend::Mode::READ => Self::Shared,
            backend::Mode::Shared { units, .. } => Self::Permits(units),
        }
    }
}

/// A lease as it stands in the database.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseInfo {
    /// The name that is held.
    pub name: LockName,
    /// How it is held. A name that is not held exclusively may be held by several.
    pub mode: Mode,
    /// The holder in words: host and process id, unless the builder said otherwise.
    pub holder: String,
    /// The identity of the holder. `None` while the name is kept by nobody, after the release of a lease with
    /// [`hold_at_least`](crate::LeaseRequest::hold_at_least).
    pub owner: Option<Owner>,
    /// How many times the owner has entered.
    pub holds: usize,
    /// The token of the holding, also the nonce for [`Locks::evict`](crate::Locks::evict).
    pub token: FencingToken,
    /// The note that the holder gave, or empty.
    pub label: String,
    /// When the holding began, by the database's clock.
    pub acquired_at: DateTime<Utc>,
    /// When it ends unless it is renewed, by the database's clock.
    pub expires_at: DateTime<Utc>,
    /// How long that is from now, without looking at two clocks.
    pub remaining: Duration,
    /// How many wait for the name in line. (Waiters of the holder's own process join that line only when somebody else
    /// does.)
    pub waiters: u64,
}

impl LeaseInfo {
    /// `None` when the row tells of no holding.
    pub(crate) fn of(listed: Listed) -> Option<Self> {
        let Listed { row, mode, waiters } = listed;
        let remaining = row.held_for()?;
        let holds = row.holds.matches(';').count();
        Some(Self {
            name: LockName::new(row.name).ok()?,
            mode: Mode::of(mode),
            holder: row.holder,
            owner: (holds > 0).then(|| row.owner.parse().ok()).flatten(),
            holds,
            token: FencingToken::new(row.token)?,
            label: row.label,
            acquired_at: DateTime::from_timestamp_micros(row.acquired_at)?,
            expires_at: DateTime::from_timestamp_micros(row.expires_at)?,
            remaining,
            waiters: u64::try_from(waiters).unwrap_or(0),
        })
    }
}

/// Somebody who waits in line.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WaiterInfo {
    /// How many stand before it.
    pub ahead: usize,
    /// How it wants the name.
    pub mode: Mode,
    /// Who waits, in words: host and process id, unless the builder said otherwise.
    pub holder: String,
    /// The note that it gave, or empty.
    pub label: String,
    /// Since when it waits, by the database's clock.
    pub since: DateTime<Utc>,
}

impl WaiterInfo {
    pub(crate) fn of(ahead: usize, place: Place) -> Option<Self> {
        Some(Self {
            ahead,
            mode: Mode::of(place.mode),
            holder: place.holder,
            label: place.label,
            since: DateTime::from_timestamp_micros(place.place)?,
        })
    }
}

/// How far a wait has come: what [`LeaseRequest::while_waiting`](crate::LeaseRequest::while_waiting) tells.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// How many stand before this waiter.
    pub ahead: usize,
    /// Who holds the name; of several, the one who came first. `None`: it is on its way to somebody.
    pub holder: Option<LeaseInfo>,
    /// For how long it has waited.
    pub waited: Duration,
}
