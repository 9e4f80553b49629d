//! The name of a lock, checked once.

use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};

use crate::error::{Error, Result};

/// The longest name, in bytes of UTF-8.
pub(crate) const MAX_BYTES: usize = 255;

/// The name of a lock: 1 to 255 bytes of UTF-8 without NUL, compared byte for byte.
///
/// `a`, `A`, `a ` and `á` are four names on every database, whatever its collation. Cloning is
/// cheap.
///
/// ```
/// use sqlock::LockName;
///
/// let name = LockName::new("invoice/42")?;
/// assert_eq!(name.as_str(), "invoice/42");
/// assert!(LockName::new("").is_err());
/// # Ok::<(), sqlock::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LockName(Arc<str>);

impl LockName {
    /// Parses a name.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidName`] when it is empty, longer than 255 bytes, or contains a NUL.
    pub fn new(name: impl Into<Arc<str>>) -> Result<Self> {
        let name = name.into();
        let reason = if name.is_empty() {
            "it is empty"
        } else if name.len() > MAX_BYTES {
            "it is longer than 255 bytes"
        } else if name.contains('\0') {
            "it contains a NUL character"
        } else {
            return Ok(Self(name));
        };
        Err(Error::InvalidName { name: name.chars().take(64).collect(), reason })
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for LockName {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.serialize_str(&self.0)
    }
}

impl AsRef<str> for LockName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl std::str::FromStr for LockName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded_in_bytes_not_characters() {
        assert!(LockName::new("x".repeat(255)).is_ok());
        assert!(LockName::new("x".repeat(256)).is_err());
        assert!(LockName::new("á".repeat(127)).is_ok());
        assert!(LockName::new("á".repeat(128)).is_err());
        assert!(LockName::new("a\0b").is_err());
    }
}
