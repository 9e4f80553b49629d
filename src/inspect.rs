//! Who holds and who waits for a name: for people and their tools.
//!
//! ```
//! # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
//! for lease in locks.list("invoice/").await? {
//!     println!("{} is held by {}, {} wait", lease.name, lease.holder, lease.waiters);
//! }
//! # Ok(())
//! # }
//! ```

use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::backend::{Listed, Names, Waiter};
use crate::client::Client;
use crate::error::Result;
use crate::name::LockName;
use crate::operation::List;
use crate::owner::Owner;
use crate::protocol;
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
    pub(crate) fn of(mode: protocol::Mode) -> Self {
        match mode {
            protocol::Mode::Exclusive => Self::Exclusive,
            protocol::Mode::READ => Self::Shared,
            protocol::Mode::Shared { units, .. } => Self::Permits(units),
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
    /// How many clients the owner holds the name by. Within one client it enters again without the database.
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
    /// How many wait for the name, of those that [`Locks::waiters`](crate::Locks::waiters) tells of.
    pub waiters: u64,
}

impl LeaseInfo {
    /// `None` when the row tells of no holding.
    pub(crate) fn of(listed: Listed) -> Option<Self> {
        let remaining = u64::try_from(listed.expires_at - listed.now).ok().filter(|us| *us > 0)?;
        Some(Self {
            name: LockName::new(listed.name).ok()?,
            mode: Mode::of(listed.mode),
            holder: listed.holder,
            owner: listed.owner,
            holds: listed.owner.map_or(0, |_| usize::try_from(listed.acquisitions).unwrap_or(1)),
            token: FencingToken::new(listed.token)?,
            label: listed.label,
            acquired_at: DateTime::from_timestamp_micros(listed.acquired_at)?,
            expires_at: DateTime::from_timestamp_micros(listed.expires_at)?,
            remaining: Duration::from_micros(remaining),
            waiters: u64::try_from(listed.waiters).unwrap_or(0),
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
    pub(crate) fn of(ahead: usize, entry: Waiter) -> Option<Self> {
        Some(Self {
            ahead,
            mode: Mode::of(entry.mode),
            holder: entry.holder,
            label: entry.label,
            since: DateTime::from_timestamp_micros(entry.arrived_at)?,
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

/// All who hold a name, in the order in which they came.
pub(crate) async fn holders(client: &Client, name: &str) -> Result<Vec<LeaseInfo>> {
    let rows = client.run(List(Names::Just(LockName::new(name)?))).await?;
    Ok(rows.into_iter().filter_map(LeaseInfo::of).collect())
}
