//! The identities by which rows are compared.

use std::fmt;
use std::str::FromStr;

use uuid::Uuid;

/// Identifies one client: one set of locks with one heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ClientId(Uuid);

/// Identifies one acquisition. Chosen before the first request, so a request whose answer was lost
/// can be repeated or undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct AcquisitionId(Uuid);

/// Identifies a request of one client on its way to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct RequestId(pub(crate) u64);

macro_rules! identifier {
    ($type:ident) => {
        impl $type {
            pub(crate) const fn from_u128(number: u128) -> Self {
                Self(Uuid::from_u128(number))
            }
        }

        /// 32 lower-case hexadecimal digits, as stored in the tables.
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.simple().fmt(f)
            }
        }

        impl FromStr for $type {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, uuid::Error> {
                Uuid::try_parse(text).map(Self)
            }
        }
    };
}
identifier!(ClientId);
identifier!(AcquisitionId);

impl AcquisitionId {
    /// Returns the identity of the next acquisition of the client: this one plus one, wrapping.
    pub(crate) fn next(self) -> Self {
        Self(Uuid::from_u128(self.0.as_u128().wrapping_add(1)))
    }
}
