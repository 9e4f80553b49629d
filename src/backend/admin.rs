//! Lists of holders and waiters, and the purge of unused names.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{AcquisitionId, Mode};

/// The names to list.
#[derive(Clone, Debug)]
pub(crate) enum Names {
    WithPrefix(String),
    One(LockName),
}

/// A holder in a list. Times are microseconds since the Unix epoch, by the database's clock.
#[derive(Clone, Debug)]
pub(crate) struct ListedHolder {
    pub(crate) name: String,
    pub(crate) mode: Mode,
    /// `None`: the holder released the name, which stays unavailable until `expires_at`.
    pub(crate) owner: Option<Owner>,
    /// The number of acquisitions of the owner that hold the name together.
    pub(crate) acquisitions: i64,
    pub(crate) token: i64,
    pub(crate) holder: String,
    pub(crate) label: String,
    pub(crate) acquired_at: i64,
    /// The later of the row's own expiry and the one by the client's heartbeat.
    pub(crate) expires_at: i64,
    /// The latest heartbeat of the client that renews the holding. 0: no heartbeat renews it.
    pub(crate) beat_at: i64,
    pub(crate) now: i64,
    pub(crate) waiters: i64,
    pub(crate) note: Option<String>,
}

/// A waiting entry in a list.
#[derive(Clone, Debug)]
pub(crate) struct ListedWaiter {
    pub(crate) id: AcquisitionId,
    pub(crate) mode: Mode,
    pub(crate) holder: String,
    pub(crate) label: String,
    pub(crate) arrived_at: i64,
}

/// A range of names to purge.
#[derive(Clone, Debug)]
pub(crate) struct SweepRange {
    /// The range begins after this name. Empty: the range begins with the first name.
    pub(crate) after: String,
    /// The number of names in the range.
    pub(crate) limit: u32,
    pub(crate) retention: Duration,
}

/// The result of purging a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Swept {
    /// The number of purged names.
    pub(crate) purged: u64,
    /// The last name of the range. `None`: there are no more names.
    pub(crate) last: Option<String>,
    /// The clients of the leases and entries in the range.
    pub(crate) clients: Vec<String>,
}

/// A range of clients to purge.
#[derive(Clone, Debug)]
pub(crate) struct ClientRange {
    /// The range begins after this identity. Empty: the range begins with the first client.
    pub(crate) after: String,
    /// The number of clients in the range.
    pub(crate) limit: u32,
    pub(crate) retention: Duration,
    /// The clients that stay, because leases or entries name them.
    pub(crate) named: Arc<HashSet<String>>,
}

impl ClientRange {
    /// Returns the clients to purge, of those that have sent no heartbeat during the retention.
    pub(crate) fn unnamed<'c>(&self, stale: &'c [String]) -> Vec<&'c str> {
        stale.iter().map(String::as_str).filter(|id| !self.named.contains(*id)).collect()
    }
}

/// Selects the clients of the leases and entries of some names, on PostgreSQL and SQLite.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
#[rustfmt::skip]
macro_rules! named_clients {
    ($names:literal) => {
        concat!("
SELECT client FROM sqlock_lease WHERE ", $names, " AND client <> ''
 UNION
SELECT client FROM sqlock_entry WHERE ", $names, " AND client <> ''")
    };
}

// $1 the name before the first, $2 the last name
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) const NAMED_CLIENTS: &str = named_clients!("name > $1 AND name <= $2");

// $1 the name before the first
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) const LAST_NAMED_CLIENTS: &str = named_clients!("name > $1");

/// The server and the tables behind a vote of a quorum.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The server, as it identifies itself on every connection. `None`: nothing distinguishes it
    /// from other servers.
    pub(crate) server: Option<String>,
    /// For how long the tables have existed, by the database's clock. `None`: the migrations have
    /// no record.
    pub(crate) age: Option<Duration>,
}

/// Returns the first text after all texts with a prefix, in the order of their bytes. `None`: no
/// text comes after them.
pub(crate) fn end_of_prefix(prefix: &str) -> Option<String> {
    let mut end: Vec<char> = prefix.chars().collect();
    while let Some(last) = end.pop() {
        if let Some(next) = (u32::from(last) + 1..=u32::from(char::MAX)).find_map(char::from_u32) {
            end.push(next);
            return Some(end.into_iter().collect());
        }
    }
    None
}

/// Leaves out the rows that cannot be read, with a warning.
pub(crate) fn skip_unreadable<T>(rows: impl Iterator<Item = Result<T, sqlx::Error>>) -> impl Iterator<Item = T> {
    rows.filter_map(|row| row.inspect_err(|error| tracing::warn!(%error, "left out a row that cannot be read")).ok())
}
