//! The keys of records.

use crate::backend::{digest, hex};

/// The longest text in a column of a record, in bytes.
pub(crate) const MAX_BYTES: usize = 255;

/// A key with its namespace and its principal.
#[derive(Clone)]
pub struct FullKey {
    pub namespace: String,
    /// Empty: the key is global. A principal that is too long for its column is a digest.
    pub principal: String,
    /// A key that is too long for its column is a digest.
    pub key: String,
    /// SHA-256 over namespace, principal and key.
    pub id: String,
}

impl FullKey {
    pub(crate) fn new(namespace: String, principal: String, key: String) -> Self {
        Self::from_columns(namespace, StoredText::new(principal), StoredText::new(key))
    }

    /// Makes the key whose columns have these texts, if one of them looks like a digest. Only for
    /// operators, who know a long text by its digest: a client cannot use a long key by its digest.
    pub(crate) fn from_digests(namespace: String, principal: String, key: String) -> Option<Self> {
        let (principal, key) = (StoredText::from_shown(principal), StoredText::from_shown(key));
        let is_digest = matches!(principal, StoredText::Digest(_)) || matches!(key, StoredText::Digest(_));
        is_digest.then(|| Self::from_columns(namespace, principal, key))
    }

    fn from_columns(namespace: String, principal: StoredText, key: StoredText) -> Self {
        let id = {
            let (of_principal, principal) = principal.domain_and_text();
            let (of_key, key) = key.domain_and_text();
            let domain = [&b"sqlock/idem/1"[..], b"/principal", of_principal, b"/key", of_key].concat();
            hex(&digest(&domain, [namespace.as_bytes(), principal.as_bytes(), key.as_bytes()]))
        };
        Self { namespace, principal: principal.into_text(), key: key.into_text(), id }
    }
}

/// A text of any length, as it is stored in a column.
enum StoredText {
    Text(String),
    /// The digest of a text that is too long.
    Digest(String),
}

impl StoredText {
    const DIGEST: &str = "sha256:";

    fn new(text: String) -> Self {
        use sha2::{Digest, Sha256};
        if text.len() <= MAX_BYTES {
            return Self::Text(text);
        }
        Self::Digest(format!("{}{}", Self::DIGEST, hex(&Sha256::digest(text))))
    }

    fn from_shown(text: String) -> Self {
        let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
        match text.strip_prefix(Self::DIGEST) {
            Some(digits) if digits.len() == 64 && digits.bytes().all(is_digit) => Self::Digest(text),
            _ => Self::new(text),
        }
    }

    /// Returns the part of the hash domain that separates digests from texts, and the stored text.
    fn domain_and_text(&self) -> (&'static [u8], &str) {
        match self {
            Self::Text(text) => (b"", text),
            Self::Digest(text) => (b"/digest", text),
        }
    }

    fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Digest(text) => text,
        }
    }
}
