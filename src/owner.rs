//! The owner of a lease: the identity that makes it re-entrant.

use std::fmt;
use std::future::Future;
use std::str::FromStr;

use serde::{Serialize, Serializer};
use uuid::Uuid;

use crate::error::Error;

tokio::task_local! {
    static CURRENT: Owner;
}

/// The identity of an owner.
///
/// By default every lease has an owner of its own, so two leases exclude each other even within one
/// task. Leases with the *same* owner re-enter instead: the second acquisition succeeds at once,
/// and the name is free after the last release. Within one client, the client counts the leases of
/// an owner; the database counts the clients. Set the owner explicitly with
/// [`LeaseRequest::owner`](crate::LeaseRequest::owner), also across processes (as text), or for all
/// requests inside a future with [`Owner::scope`].
///
/// An owner is random, never a host name: two processes of one host are two owners.
///
/// ```
/// use sqlock::Owner;
///
/// let owner = Owner::random();
/// assert_eq!(owner.to_string().parse::<Owner>()?, owner);
/// # Ok::<(), sqlock::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner(Uuid);

impl Owner {
    /// Creates a new, unique owner.
    pub fn random() -> Self {
        Self(Uuid::new_v4())
    }

    /// Returns the owner of the current [`scope`](Owner::scope), if any.
    pub fn current() -> Option<Self> {
        CURRENT.try_with(|owner| *owner).ok()
    }

    /// Runs `work` with this owner: leases that it requests belong to this owner and re-enter each
    /// other.
    ///
    /// The scope covers the future itself, not tasks that it spawns.
    ///
    /// # Cancel safety
    ///
    /// Dropping the returned future drops `work`; nothing else happens.
    pub async fn scope<F: Future>(self, work: F) -> F::Output {
        CURRENT.scope(self, work).await
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.simple().fmt(f)
    }
}

/// Writes the owner as text.
impl Serialize for Owner {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl FromStr for Owner {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        // The parser also accepts longer forms, with hyphens, braces or a prefix.
        Some(text)
            .filter(|text| text.len() == 32)
            .and_then(|text| Uuid::try_parse(text).ok())
            .map(Self)
            .ok_or(Error::InvalidOwner)
    }
}
