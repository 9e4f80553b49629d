//! The lease under which a command runs: in one database, or on a majority of several.

use std::time::Duration;

use sqlock::quorum::QuorumLease;
use sqlock::{FencingToken, Lease, LockName, LossCause, Owner};

pub enum HeldLease {
    Single(Box<Lease>),
    Quorum(QuorumLease),
}

/// Calls the same method of either lease.
macro_rules! delegate {
    ($held:expr, $lease:ident => $work:expr) => {
        match $held {
            HeldLease::Single($lease) => $work,
            HeldLease::Quorum($lease) => $work,
        }
    };
}

impl HeldLease {
    pub fn name(&self) -> &LockName {
        delegate!(self, lease => lease.name())
    }

    pub fn token(&self) -> FencingToken {
        delegate!(self, lease => lease.token())
    }

    pub fn owner(&self) -> Owner {
        delegate!(self, lease => lease.owner())
    }

    pub fn remaining(&self) -> Duration {
        delegate!(self, lease => lease.remaining())
    }

    pub fn is_held(&self) -> bool {
        delegate!(self, lease => lease.is_held())
    }

    pub async fn lost(&self) -> LossCause {
        delegate!(self, lease => lease.lost().await)
    }

    /// Waits until the holder is asked to release the lease. Requests to single databases of a
    /// majority are ignored.
    pub async fn revoke_requested(&self) {
        match self {
            Self::Single(lease) => lease.revoke_requested().await,
            Self::Quorum(_) => std::future::pending().await,
        }
    }

    pub async fn release(self) -> sqlock::Result<()> {
        delegate!(self, lease => lease.release().await)
    }
}
