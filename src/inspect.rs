//! Who holds what: for people and their tools.

use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::backend::Row;
use crate::name::LockName;
use crate::owner::Owner;
use crate::token::FencingToken;

/// A lease as it stands in the database.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseInfo {
    /// The name that is held.
    pub name: LockName,
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
}

impl LeaseInfo {
    /// `None` when the row tells of no holding.
    pub(crate) fn of(row: Row) -> Option<Self> {
        let remaining = row.held_for()?;
        let holds = row.holds.matches(';').count();
        Some(Self {
            name: LockName::new(row.name).ok()?,
            holder: row.holder,
            owner: (holds > 0).then(|| row.owner.parse().ok()).flatten(),
            holds,
            token: FencingToken::new(row.token)?,
            label: row.label,
            acquired_at: DateTime::from_timestamp_micros(row.acquired_at)?,
            expires_at: DateTime::from_timestamp_micros(row.expires_at)?,
            remaining,
        })
    }
}
