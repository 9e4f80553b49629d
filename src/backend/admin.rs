//! Lists of holders and waiters, and the purge of unused names.

use std::time::Duration;

use crate::error::Result;
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{LeaseId, Mode};

/// Which names to list.
#[derive(Clone, Debug)]
pub(crate) enum Names {
    BeginningWith(String),
    Just(LockName),
}

/// A holder as it is listed. Moments are microseconds since the Unix epoch, by the database's clock.
#[derive(Clone, Debug)]
pub(crate) struct Listed {
    pub(crate) name: String,
    pub(crate) mode: Mode,
    /// `None`: it was released, and is kept from others.
    pub(crate) owner: Option<Owner>,
    /// How many acquisitions of the owner hold together.
    pub(crate) acquisitions: i64,
    pub(crate) token: i64,
    pub(crate) holder: String,
    pub(crate) label: String,
    pub(crate) acquired_at: i64,
    /// By its expiry and the heartbeat of its client.
    pub(crate) expires_at: i64,
    pub(crate) now: i64,
    pub(crate) waiters: i64,
}

/// An entry that waits, as it is listed.
#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    pub(crate) id: LeaseId,
    pub(crate) mode: Mode,
    pub(crate) holder: String,
    pub(crate) label: String,
    pub(crate) arrived_at: i64,
}

/// A range of names to be purged.
#[derive(Clone, Debug)]
pub(crate) struct SweepRange {
    /// It begins behind this name. Empty: with the first name.
    pub(crate) after: String,
    /// So many names are looked at.
    pub(crate) limit: u32,
    pub(crate) retention: Duration,
}

/// What came of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Swept {
    /// How many names were purged.
    pub(crate) purged: u64,
    /// The last name of the range. `None`: there are no more names.
    pub(crate) last: Option<String>,
}

/// The first text behind all that begin with a prefix, in the order of their bytes. `None`: there is none.
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

/// The rows that can be read. One that cannot costs the others nothing.
pub(crate) fn readable<T>(rows: impl Iterator<Item = Result<T, sqlx::Error>>) -> impl Iterator<Item = T> {
    rows.filter_map(|row| row.inspect_err(|error| tracing::warn!(%error, "left out a row that cannot be read")).ok())
}
