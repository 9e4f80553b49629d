//! Which keys a client is at work on.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::backend::records::Claiming;

/// The keys at which this client is at work, with what for: a duplicate in the same process needs no connection to be told.
#[derive(Default)]
pub(crate) struct InFlight(Mutex<HashMap<String, Vec<u8>>>);

/// Another task of this client is at work on the same key.
pub(super) struct Duplicate {
    pub(super) is_same_request: bool,
}

impl InFlight {
    pub(super) fn insert(&self, claim: &Claiming) -> Result<InFlightGuard<'_>, Duplicate> {
        let mut keys = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match keys.get(&claim.key.id) {
            Some(fingerprint) => Err(Duplicate { is_same_request: *fingerprint == claim.fingerprint }),
            None => {
                keys.insert(claim.key.id.clone(), claim.fingerprint.clone());
                Ok(InFlightGuard { in_flight: self, id: claim.key.id.clone() })
            }
        }
    }
}

/// At work on a key.
pub(super) struct InFlightGuard<'a> {
    in_flight: &'a InFlight,
    id: String,
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.in_flight.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}
