//! The keys of records.

use crate::backend::hex;

/// The longest text that a column of the records takes, in bytes.
pub(crate) const MAX_BYTES: usize = 255;

/// A key with all that makes it one of its own.
#[derive(Clone)]
pub struct FullKey {
    pub namespace: String,
    /// Empty: everybody's.
    pub principal: String,
    /// This and the principal: their digests, where they are too long for their columns.
    pub key: String,
    /// SHA-256 of these.
    pub id: String,
}

impl FullKey {
    pub(crate) fn new(namespace: String, principal: String, key: String) -> Self {
        Self::of_columns(namespace, Column::of(principal), Column::of(key))
    }

    /// The key whose principal and key stand in their columns like this, if one of them looks like
    /// a digest: for an operator, who knows a long text by its digest only. A client never gets at
    /// a long key by its digest.
    pub(crate) fn of_digests(namespace: String, principal: String, key: String) -> Option<Self> {
        let (principal, key) = (Column::as_shown(principal), Column::as_shown(key));
        let is_digest = matches!(principal, Column::Digest(_)) || matches!(key, Column::Digest(_));
        is_digest.then(|| Self::of_columns(namespace, principal, key))
    }

    fn of_columns(namespace: String, principal: Column, key: Column) -> Self {
        let id = {
            let (of_principal, principal) = principal.part();
            let (of_key, key) = key.part();
            let domain = [&b"sqlock/idem/1"[..], b"/principal", of_principal, b"/key", of_key].concat();
            hex(&digest(&domain, [namespace.as_bytes(), principal.as_bytes(), key.as_bytes()]))
        };
        Self { namespace, principal: principal.into_text(), key: key.into_text(), id }
    }
}

/// What stands in a column for a text of any length.
enum Column {
    Text(String),
    /// Of a text that is too long.
    Digest(String),
}

impl Column {
    const DIGEST: &str = "sha256:";

    fn of(text: String) -> Self {
        use sha2::{Digest, Sha256};
        if text.len() <= MAX_BYTES {
            return Self::Text(text);
        }
        Self::Digest(format!("{}{}", Self::DIGEST, hex(&Sha256::digest(text))))
    }

    fn as_shown(text: String) -> Self {
        let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
        match text.strip_prefix(Self::DIGEST) {
            Some(digits) if digits.len() == 64 && digits.bytes().all(is_digit) => Self::Digest(text),
            _ => Self::of(text),
        }
    }

    /// What tells a text from a digest, and either.
    fn part(&self) -> (&'static [u8], &str) {
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

/// SHA-256 over parts with their lengths, so that no two lists of parts are alike.
pub(crate) fn digest<'a>(domain: &[u8], parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    hash.update(domain);
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}
