//! The databases of a quorum, and the options of a lease on each.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;

use crate::error::{Error, Result};
use crate::locks::Locks;
use crate::name::LockName;

/// The state that all clones of a quorum share.
pub(super) struct Nodes {
    pub(super) locks: Vec<Locks>,
    pub(super) all: bool,
    pub(super) rejoin_after: Option<Duration>,
    /// One lock for each name, with which the waiters of this process take turns.
    pub(super) turns: Mutex<HashMap<LockName, Weak<tokio::sync::Mutex<()>>>>,
}

impl Nodes {
    /// Returns how many databases must grant a name.
    pub(super) fn needed(&self) -> usize {
        if self.all { self.locks.len() } else { self.locks.len() / 2 + 1 }
    }

    pub(super) fn check(&self) -> Result<()> {
        let refuse = |reason| Err(Error::Unsupported { what: "a quorum", reason });
        if self.locks.is_empty() {
            return refuse("it has no databases");
        }
        let is_repeated = |(i, locks): (usize, &Locks)| {
            self.locks.iter().skip(i + 1).any(|other| Arc::ptr_eq(locks.client(), other.client()))
        };
        if self.locks.iter().enumerate().any(is_repeated) {
            return refuse("it has the same client twice, which would vote twice");
        }
        Ok(())
    }

    /// Waits until no earlier waiter of this process asks for the name.
    pub(super) async fn turn(&self, name: &LockName) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = self.turns.lock().unwrap_or_else(PoisonError::into_inner);
            turns.retain(|_, turn| turn.strong_count() > 0);
            let turn = turns.get(name).and_then(Weak::upgrade).unwrap_or_default();
            turns.insert(name.clone(), Arc::downgrade(&turn));
            turn
        };
        turn.lock_owned().await
    }
}

/// The options of the lease on each database.
#[derive(Clone)]
pub(super) struct QuorumOptions {
    pub(super) ttl: Duration,
    pub(super) renew: bool,
    pub(super) label: String,
    pub(super) node_timeout: Option<Duration>,
}

impl QuorumOptions {
    /// Returns how long a database may take to answer.
    pub(super) fn node_timeout(&self) -> Duration {
        self.node_timeout.unwrap_or((self.ttl / 6).min(Duration::from_secs(1)))
    }
}
