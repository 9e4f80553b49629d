//! An eviction by this application.

use std::sync::Arc;

use super::Coordinator;
use crate::engine::Input;
use crate::name::LockName;
use crate::token::FencingToken;

/// An eviction in progress. While it exists, the loss that it causes is logged as intended.
pub(crate) struct Eviction {
    pub(super) coordinator: Arc<Coordinator>,
    pub(super) name: LockName,
    pub(super) token: FencingToken,
}

impl Eviction {
    /// Ends the lease in this client, after the database has ended it.
    pub(crate) fn confirm(self) {
        self.coordinator.feed(Input::Evicted { name: self.name.clone(), token: self.token });
    }
}

impl Drop for Eviction {
    fn drop(&mut self) {
        let mut state = self.coordinator.state();
        let is_this = |(name, token): &(LockName, FencingToken)| (name, token) == (&self.name, &self.token);
        if let Some(i) = state.evictions.iter().position(is_this) {
            state.evictions.swap_remove(i);
        }
    }
}
