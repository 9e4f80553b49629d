//! The handle of a lease on a majority.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

use super::majority::Majority;
use crate::error::{Error, LossCause, Result};
use crate::name::LockName;
use crate::owner::Owner;
use crate::token::FencingToken;

/// A lease held on a majority of databases: proof that no other owner holds the name on a majority
/// while [`is_held`](Self::is_held) returns `true`. After an [`evict`](crate::Locks::evict) on a
/// majority, `is_held` turns `false` at the next heartbeats.
///
/// The lease is renewed on each database in the background. A database that was down is asked again
/// every third of the TTL, but at least every 5 seconds, and joins the lease.
/// [`release`](Self::release) says whether the lease was held to the end; dropping the lease
/// releases it in the background.
#[must_use = "a lease that is dropped is released at once"]
pub struct QuorumLease {
    pub(super) majority: Arc<Majority>,
    pub(super) node_timeout: Duration,
}

impl QuorumLease {
    pub(super) fn new(majority: Arc<Majority>, node_timeout: Duration) -> Self {
        Self { majority, node_timeout }
    }

    pub(super) fn loss_error(&self, cause: LossCause) -> Error {
        self.majority.loss_error(cause)
    }

    /// Returns the held name.
    pub fn name(&self) -> &LockName {
        &self.majority.name
    }

    /// Returns the fencing token: greater than that of every earlier lease on the name by a
    /// majority of the same databases, as [`Quorum`](crate::quorum::Quorum) explains. The token
    /// stays the same until the lease ends.
    ///
    /// Send the token along with every effect. The receiver must *first* record the token as the
    /// highest it has seen and refuse a lower one, *then* read, then write on condition that the
    /// token is still the highest.
    pub fn token(&self) -> FencingToken {
        self.majority.token
    }

    /// Returns the owner, which is the same on all databases and shown by
    /// [`Locks::inspect`](crate::Locks::inspect). This owner does not re-enter.
    pub fn owner(&self) -> Owner {
        self.majority.owner
    }

    /// Returns whether the majority is certainly still held. Reads a clock and does no I/O.
    ///
    /// The result turns `false` before a majority could be granted to another owner, even if this
    /// process was stopped or the machine slept in between, and never turns `true` again.
    pub fn is_held(&self) -> bool {
        self.majority.is_held()
    }

    /// Returns how much longer the majority is safe without a renewal. Zero when the majority is
    /// lost.
    pub fn remaining(&self) -> Duration {
        self.majority.remaining()
    }

    /// Returns the number of databases on which the lease is held now. Does no I/O.
    pub fn votes(&self) -> usize {
        self.majority.votes()
    }

    /// Waits until the majority is lost, and returns the cause. Pending for ever while the majority
    /// is held.
    ///
    /// # Cancel safety
    ///
    /// It may be dropped and called again; no loss is missed.
    pub async fn lost(&self) -> LossCause {
        self.majority.lost().await
    }

    /// Waits until the holder is [asked to release](crate::Locks::ask_to_release) the lease on one
    /// of the databases. Pending for ever without a request. The lease stays held.
    ///
    /// # Cancel safety
    ///
    /// It may be dropped and called again; no request is missed.
    pub async fn revoke_requested(&self) {
        self.majority.revoke_requested().await;
    }

    /// Makes the lease last at least `ttl` from now on a majority, without waiting for the next
    /// renewal. A `ttl` above that of the requests for the name needs
    /// [`rejoin_after`](crate::quorum::Quorum::rejoin_after) in all of its clients, as
    /// [`Quorum::extend`](crate::quorum::Quorum::extend) explains.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the lease has ended, [`Error::OutOfRange`], or [`Error::Unavailable`]
    /// when fewer than a majority could be extended: the lease is then unchanged, or longer on some
    /// of them.
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the extension may take place.
    pub async fn extend(&self, ttl: Duration) -> Result<()> {
        let mut extensions = JoinSet::new();
        for extension in self.majority.start_extension(ttl)? {
            let within = self.node_timeout;
            extensions.spawn(async move { timeout(within, extension).await });
        }
        let databases = extensions.len();
        let mut extended = 0;
        while let Some(answer) = extensions.join_next().await {
            extended += usize::from(matches!(answer, Ok(Ok(Ok(())))));
            if extended == self.majority.needed {
                return self.majority.check();
            }
        }
        self.majority.check()?;
        let reason = format!("{extended} of {databases} databases have extended it, and {} must", self.majority.needed);
        Err(Error::Unavailable { attempted: "extend a lease", reason, source: None })
    }

    /// Releases the lease everywhere, and returns an error if the majority was not held to the end.
    /// Returns when a majority has confirmed the release; the others follow in the background.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`]: the lease had already ended. [`Error::Unavailable`]: the release failed on
    /// too many databases; the name is free after the TTL at the latest.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future does not stop the release.
    pub async fn release(self) -> Result<()> {
        let leases = self.majority.take_leases()?;
        let databases = leases.len();
        let mut releases = JoinSet::new();
        for lease in leases {
            releases.spawn(lease.release());
        }
        let (mut confirmed, mut lost, mut cause) = (0, 0, LossCause::Expired);
        while let Some(answer) = releases.join_next().await {
            match answer {
                Ok(Ok(())) => confirmed += 1,
                Ok(Err(Error::Lost { cause: other, .. })) => {
                    lost += 1;
                    cause = if cause == LossCause::Expired { other } else { cause };
                }
                _ => {}
            }
            if confirmed == self.majority.needed {
                releases.detach_all();
                return Ok(());
            }
        }
        if databases - lost < self.majority.needed {
            return Err(self.majority.loss_error(cause));
        }
        let reason =
            format!("{confirmed} of {databases} databases have confirmed it, and {} must", self.majority.needed);
        Err(Error::Unavailable { attempted: "release", reason, source: None })
    }
}

impl Drop for QuorumLease {
    fn drop(&mut self) {
        // Dropping the leases of a held majority releases them.
        drop(self.majority.take_leases());
    }
}

impl fmt::Debug for QuorumLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QuorumLease")
            .field("name", self.name())
            .field("token", &self.token())
            .field("votes", &self.votes())
            .field("needed", &self.majority.needed)
            .finish_non_exhaustive()
    }
}
