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
//!
//! The types serialize to the objects that the command prints with `--json`.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

use crate::backend::{ListedHolder, ListedWaiter, Names};
use crate::client::Client;
use crate::name::LockName;
use crate::operation::ListHolders;
use crate::owner::Owner;
use crate::protocol;
use crate::token::FencingToken;

/// The mode in which a name is held or requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mode {
    /// Held by one owner.
    Exclusive,
    /// Held together with other shared leases.
    Shared,
    /// A number of permits of a [semaphore](crate::Semaphore).
    Permits(u32),
}

/// Writes `mode` (`exclusive`, `shared`, `permits`) and `permits`, which is null without any.
impl Serialize for Mode {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let (mode, permits) = match self {
            Self::Exclusive => ("exclusive", None),
            Self::Shared => ("shared", None),
            Self::Permits(permits) => ("permits", Some(permits)),
        };
        let mut object = to.serialize_struct("Mode", 2)?;
        object.serialize_field("mode", mode)?;
        object.serialize_field("permits", &permits)?;
        object.end()
    }
}

impl Mode {
    pub(crate) fn from_protocol(mode: protocol::Mode) -> Self {
        match mode {
            protocol::Mode::Exclusive => Self::Exclusive,
            protocol::Mode::READ => Self::Shared,
            protocol::Mode::Shared { units, .. } => Self::Permits(units),
        }
    }
}

/// A lease in the database.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LeaseInfo {
    /// The held name.
    pub name: LockName,
    /// How the name is held. A name that is not held exclusively may have several holders.
    #[serde(flatten)]
    pub mode: Mode,
    /// The description of the holder: host and process id by default.
    pub holder: String,
    /// The owner. `None` while the name stays taken after the release of a lease with
    /// [`hold_at_least`](crate::LeaseRequest::hold_at_least).
    pub owner: Option<Owner>,
    /// The number of clients that hold the name for the owner. Within one client an owner re-enters
    /// without the database.
    #[serde(skip)]
    pub holds: usize,
    /// The fencing token, which [`Locks::evict`](crate::Locks::evict) takes.
    pub token: FencingToken,
    /// The label of the lease, or empty.
    pub label: String,
    /// The [note](crate::Lease::set_note) of the holder.
    pub note: Option<String>,
    /// When the lease was acquired, by the database's clock.
    #[serde(with = "crate::rfc3339")]
    pub acquired_at: DateTime<Utc>,
    /// When the lease expires unless it is renewed, by the database's clock.
    #[serde(with = "crate::rfc3339")]
    pub expires_at: DateTime<Utc>,
    /// The time until `expires_at`, by the same clock.
    #[serde(skip)]
    pub remaining: Duration,
    /// The age of the latest heartbeat of the client that renews the lease, by the database's clock.
    /// `None`: no client renews the lease.
    #[serde(skip)]
    pub heartbeat_age: Option<Duration>,
    /// The number of waiters for the name, as [`Locks::waiters`](crate::Locks::waiters) returns
    /// them.
    pub waiters: u64,
}

impl LeaseInfo {
    /// Returns `None` when the row is not held.
    pub(crate) fn from_listed(listed: ListedHolder) -> Option<Self> {
        let remaining = u64::try_from(listed.expires_at.saturating_sub(listed.now)).ok().filter(|us| *us > 0)?;
        Some(Self {
            name: LockName::new(listed.name).ok()?,
            mode: Mode::from_protocol(listed.mode),
            holder: listed.holder,
            owner: listed.owner,
            holds: listed.owner.map_or(0, |_| usize::try_from(listed.acquisitions).unwrap_or(1)),
            token: FencingToken::new(listed.token)?,
            label: listed.label,
            note: listed.note,
            acquired_at: nearest_time(listed.acquired_at),
            expires_at: nearest_time(listed.expires_at),
            remaining: Duration::from_micros(remaining),
            heartbeat_age: (listed.beat_at > 0)
                .then(|| Duration::from_micros(u64::try_from(listed.now - listed.beat_at).unwrap_or(0))),
            waiters: u64::try_from(listed.waiters).unwrap_or(0),
        })
    }
}

/// Converts microseconds since 1970. A row written by hand may have a time that no `DateTime` has,
/// and still keeps its name.
fn nearest_time(micros: i64) -> DateTime<Utc> {
    let limit = if micros < 0 { DateTime::<Utc>::MIN_UTC } else { DateTime::<Utc>::MAX_UTC };
    DateTime::from_timestamp_micros(micros).unwrap_or(limit)
}

/// A waiter in the queue of a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct WaiterInfo {
    /// How many waiters are ahead. Serialized as `position`: 1 is next.
    #[serde(rename = "position", serialize_with = "serialize_position")]
    pub ahead: usize,
    /// How the waiter requests the name.
    #[serde(flatten)]
    pub mode: Mode,
    /// The description of the waiter: host and process id by default.
    pub holder: String,
    /// The label of the request, or empty.
    pub label: String,
    /// When the wait began, by the database's clock.
    #[serde(with = "crate::rfc3339")]
    pub since: DateTime<Utc>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn serialize_position<S: Serializer>(ahead: &usize, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_u64(*ahead as u64 + 1)
}

impl WaiterInfo {
    pub(crate) fn from_entry(ahead: usize, entry: ListedWaiter) -> Option<Self> {
        Some(Self {
            ahead,
            mode: Mode::from_protocol(entry.mode),
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
    /// The holder of the name, or the first of several. `None`: the name is being handed over.
    pub holder: Option<LeaseInfo>,
    /// How long the call has waited.
    pub waited: Duration,
}

/// Returns all holders of a name, in the order in which they acquired it.
pub(crate) async fn holders(client: &Client, name: &str) -> crate::error::Result<Vec<LeaseInfo>> {
    let rows = client.run(ListHolders(Names::One(LockName::new(name)?))).await?;
    Ok(rows.into_iter().filter_map(LeaseInfo::from_listed).collect())
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn lease_and_waiter_serialize_to_documented_objects() {
        let at = |micros| DateTime::from_timestamp_micros(micros).expect("a time");
        let lease = LeaseInfo {
            name: LockName::new("a").expect("a name"),
            mode: Mode::Permits(2),
            holder: "host/1".into(),
            owner: Some("0123456789abcdef0123456789abcdef".parse().expect("an owner")),
            holds: 1,
            token: FencingToken::new(7).expect("a token"),
            label: String::new(),
            note: Some("page 3".into()),
            acquired_at: at(1_000_999),
            expires_at: at(951_782_400_000_000),
            remaining: Duration::ZERO,
            heartbeat_age: None,
            waiters: 3,
        };
        let expected = json!({
            "name": "a",
            "mode": "permits",
            "permits": 2,
            "holder": "host/1",
            "owner": "0123456789abcdef0123456789abcdef",
            "token": 7,
            "label": "",
            "note": "page 3",
            "acquired_at": "1970-01-01T00:00:01.000Z",
            "expires_at": "2000-02-29T00:00:00.000Z",
            "waiters": 3,
        });
        assert_eq!(json!(lease), expected);
        let waiter =
            WaiterInfo { ahead: 0, mode: Mode::Shared, holder: "host/1".into(), label: "b".into(), since: at(0) };
        let expected = json!({
            "position": 1,
            "mode": "shared",
            "permits": null,
            "holder": "host/1",
            "label": "b",
            "since": "1970-01-01T00:00:00.000Z",
        });
        assert_eq!(json!(waiter), expected);
    }
}
