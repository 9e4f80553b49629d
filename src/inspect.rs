//! Inspection of holders and waiters: for people and their tools.
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

use crate::backend::{ListedHolder, ListedWaiter, Names};
use crate::client::Client;
use crate::error::Result;
use crate::name::LockName;
use crate::operation::ListHolders;
use crate::owner::Owner;
use crate::protocol;
use crate::token::FencingToken;

/// How a name is held or requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// By one owner.
    Exclusive,
    /// Together with other shared leases.
    Shared,
    /// A number of permits of a [semaphore](crate::Semaphore).
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

/// A lease in the database.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaseInfo {
    /// The name that is held.
    pub name: LockName,
    /// How the name is held. A name that is not held exclusively may have several holders.
    pub mode: Mode,
    /// The description of the holder: host and process id by default.
    pub holder: String,
    /// The owner. `None` while the name stays taken after the release of a lease with
    /// [`hold_at_least`](crate::LeaseRequest::hold_at_least).
    pub owner: Option<Owner>,
    /// How many clients hold the name for the owner. Within one client an owner re-enters without
    /// the database.
    pub holds: usize,
    /// The fencing token, which [`Locks::evict`](crate::Locks::evict) takes.
    pub token: FencingToken,
    /// The label of the lease, or empty.
    pub label: String,
    /// When the lease was acquired, by the database's clock.
    pub acquired_at: DateTime<Utc>,
    /// When the lease expires unless it is renewed, by the database's clock.
    pub expires_at: DateTime<Utc>,
    /// The time until then, by the same clock.
    pub remaining: Duration,
    /// How many of the waiters that [`Locks::waiters`](crate::Locks::waiters) returns wait for the
    /// name.
    pub waiters: u64,
}

impl LeaseInfo {
    /// Returns `None` when the row is not held.
    pub(crate) fn of(listed: ListedHolder) -> Option<Self> {
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

/// A waiter in the queue of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WaiterInfo {
    /// How many waiters are ahead.
    pub ahead: usize,
    /// How the waiter requests the name.
    pub mode: Mode,
    /// The description of the waiter: host and process id by default.
    pub holder: String,
    /// The label of the request, or empty.
    pub label: String,
    /// When the wait began, by the database's clock.
    pub since: DateTime<Utc>,
}

impl WaiterInfo {
    pub(crate) fn of(ahead: usize, entry: ListedWaiter) -> Option<Self> {
        Some(Self {
            ahead,
            mode: Mode::of(entry.mode),
            holder: entry.holder,
            label: entry.label,
            since: DateTime::from_timestamp_micros(entry.arrived_at)?,
        })
    }
}

/// The progress of a wait, for the callback of
/// [`LeaseRequest::while_waiting`](crate::LeaseRequest::while_waiting).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Waiting {
    /// How many waiters are ahead.
    pub ahead: usize,
    /// The holder of the name; of several, the first. `None`: the name is being handed over.
    pub holder: Option<LeaseInfo>,
    /// How long the call has waited.
    pub waited: Duration,
}

/// Returns all holders of a name, in the order in which they acquired it.
pub(crate) async fn holders(client: &Client, name: &str) -> Result<Vec<LeaseInfo>> {
    let rows = client.run(ListHolders(Names::One(LockName::new(name)?))).await?;
    Ok(rows.into_iter().filter_map(LeaseInfo::of).collect())
}
