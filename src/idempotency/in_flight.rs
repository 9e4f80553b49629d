//! The keys of a client's requests in progress.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::backend::records::ClaimRequest;

/// The keys in progress, with the fingerprint of each request, to find a duplicate in the same
/// process without a connection.
#[derive(Default)]
pub(crate) struct InFlight(Mutex<HashMap<String, Vec<u8>>>);

/// Another task of this client runs a request with the same key.
pub(super) struct Duplicate {
    pub(super) is_same_request: bool,
}

impl InFlight {
    pub(super) fn insert(&self, claim: &ClaimRequest) -> Result<InFlightGuard<'_>, Duplicate> {
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

/// Removes the key when the request ends.
pub(super) struct InFlightGuard<'a> {
    in_flight: &'a InFlight,
    id: String,
}

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.in_flight.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}
