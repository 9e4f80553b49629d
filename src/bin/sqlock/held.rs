//! What a command runs under: a lease in one database, or on a majority of several.

use std::time::Duration;

use sqlock::quorum::QuorumLease;
use sqlock::{FencingToken, Lease, LockName, LossCause, Owner};

pub enum Held {
    One(Box<Lease>),
    Majority(QuorumLease),
}

/// The same word for each of them.
macro_rules! on {
    ($held:expr, $lease:ident => $work:expr) => {
        match $held {
            Held::One($lease) => $work,
            Held::Majority($lease) => $work,
        }
    };
}

impl Held {
    pub fn name(&self) -> &LockName {
        on!(self, lease => lease.name())
    }

    pub fn token(&self) -> FencingToken {
        on!(self, lease => lease.token())
    }

    pub fn owner(&self) -> Owner {
        on!(self, lease => lease.owner())
    }

    pub fn remaining(&self) -> Duration {
        on!(self, lease => lease.remaining())
    }

    pub fn is_held(&self) -> bool {
        on!(self, lease => lease.is_held())
    }

    pub async fn lost(&self) -> LossCause {
        on!(self, lease => lease.lost().await)
    }

    pub async fn release(self) -> sqlock::Result<()> {
        on!(self, lease => lease.release().await)
    }
}
