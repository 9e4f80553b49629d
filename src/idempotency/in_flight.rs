//! Which keys a client is at work on.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::backend::records::Claiming;

/// The keys at which this client is at work, with what for: a duplicate in the same process needs no connection to be told.
#[derive(Default)]
pub(crate) struct Duplicates(Mutex<HashMap<String, Vec<u8>>>);

/// Another task of this client is at work on the same key.
pub(super) struct Duplicate {
    pub(super) same: bool,
}

impl Duplicates {
    pub(super) fn enter(&self, claim: &Claiming) -> Result<Entered<'_>, Duplicate> {
        let mut keys = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match keys.get(&claim.key.id) {
            Some(fingerprint) => Err(Duplicate { same: *fingerprint == claim.fingerprint }),
            None => {
                keys.insert(claim.key.id.clone(), claim.fingerprint.clone());
                Ok(Entered { duplicates: self, id: claim.key.id.clone() })
            }
        }
    }
}

/// At work on a key.
pub(super) struct Entered<'a> {
    duplicates: &'a Duplicates,
    id: String,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.duplicates.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}
