//! The identity of a request: its key and its fingerprint.

use std::fmt;

use sha2::{Digest, Sha256};

use super::json::Json;
use crate::backend::records::{FullKey, MAX_BYTES};
use crate::error::{Error, Result};

/// The key that a client chose for a request, and the principal of the key.
///
/// Equal keys of two principals are independent: neither receives the other's result. A key that
/// does not belong to a principal, such as the identifier of an event, is [`global`](Self::global).
/// Keys are compared byte for byte and may be of any length but 0, without NUL; the length is
/// checked on use. A key or a principal longer than 255 bytes is stored and shown to operators as a
/// digest, `sha256:` and 64 digits, by which operators may name the record. `Debug` does not show
/// the key.
#[derive(Clone, PartialEq, Eq)]
pub struct IdempotencyKey {
    principal: Option<String>,
    key: String,
    issued: bool,
}

impl IdempotencyKey {
    /// Makes a key of an authenticated principal.
    pub fn new(principal: impl Into<String>, key: impl Into<String>) -> Self {
        Self { principal: Some(principal.into()), key: key.into(), issued: false }
    }

    /// Makes a key without a principal. Every sender that knows the key receives the result.
    pub fn global(key: impl Into<String>) -> Self {
        Self { principal: None, key: key.into(), issued: false }
    }

    /// Makes a key of a token, which must have been
    /// [issued](crate::idempotency::Idempotency::issue) to this principal.
    pub fn issued(principal: impl Into<String>, token: impl Into<String>) -> Self {
        Self { issued: true, ..Self::new(principal, token) }
    }

    pub(crate) fn is_issued(&self) -> bool {
        self.issued
    }

    /// Checks the key, and adds the namespace.
    pub(crate) fn in_namespace(&self, namespace: &str) -> Result<FullKey> {
        check("namespace", namespace)?;
        if let Some(principal) = &self.principal {
            check_text("principal", principal)?;
        }
        check_text("key", &self.key)?;
        let principal = self.principal.clone().unwrap_or_default();
        Ok(FullKey::new(namespace.to_owned(), principal, self.key.clone()))
    }
}

impl IdempotencyKey {
    /// Returns the long key that an operator names by its digest, if this text can be a digest.
    pub(super) fn as_digest(&self, namespace: &str) -> Option<FullKey> {
        FullKey::from_digests(namespace.to_owned(), self.principal.clone().unwrap_or_default(), self.key.clone())
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyKey").field("issued", &self.issued).finish_non_exhaustive()
    }
}

/// Checks a text that is stored unchanged.
pub(super) fn check(what: &'static str, text: &str) -> Result<()> {
    if text.len() > MAX_BYTES {
        return Err(Error::InvalidKey { what, reason: "it is longer than 255 bytes" });
    }
    check_text(what, text)
}

fn check_text(what: &'static str, text: &str) -> Result<()> {
    let reason = match text {
        "" => "it is empty",
        text if text.contains('\0') => "it contains a NUL character",
        _ => return Ok(()),
    };
    Err(Error::InvalidKey { what, reason })
}

/// A digest of a request: SHA-256 over its parts, each with its length before it, so different
/// lists of parts differ. A repeated key with another fingerprint is
/// [refused](crate::idempotency::Outcome::Mismatch).
///
/// Include the parts that identify the request, and leave out parts that may differ when it is sent
/// again (a time stamp, a trace identifier). When an application changes the parts, stored
/// fingerprints no longer match.
///
/// ```
/// # fn main() -> sqlock::Result<()> {
/// use sqlock::idempotency::Fingerprint;
///
/// let one = Fingerprint::of(["POST", "/charges"]).and_json(br#"{"amount": 5, "currency": "EUR"}"#)?;
/// let other = Fingerprint::of(["POST", "/charges"]).and_json(br#"{"currency":"EUR","amount":5}"#)?;
/// assert_eq!(one, other);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Fingerprint {
    hash: Sha256,
    pub(super) request: Option<Vec<u8>>,
}

/// The first byte of a fingerprint, which names the way of making the digest.
const VERSION: u8 = 1;

impl Fingerprint {
    /// Makes the fingerprint of these parts, in this order.
    pub fn of<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        parts.into_iter().fold(Self { hash: Sha256::new(), request: None }, Self::and)
    }

    /// Adds a part.
    pub fn and(mut self, part: impl AsRef<[u8]>) -> Self {
        let part = part.as_ref();
        self.hash.update((part.len() as u64).to_be_bytes());
        self.hash.update(part);
        self
    }

    /// Adds a JSON text. White space and the order of members do not count; of a duplicate member
    /// the last one counts. Numbers are compared as written: 1 and 1.0 differ.
    ///
    /// # Errors
    ///
    /// [`Error::Json`]: the text is not JSON, or nested more than 127 deep.
    pub fn and_json(self, text: &[u8]) -> Result<Self> {
        Ok(self.and(parse(text)?.to_string()))
    }

    /// Adds parts of a JSON text, each by its JSON Pointer (RFC 6901): `/amount`. A missing part
    /// differs from a null.
    ///
    /// # Errors
    ///
    /// As [`and_json`](Self::and_json); [`Error::InvalidKey`]: a text that is not a JSON Pointer.
    pub fn and_json_fields<'p>(self, text: &[u8], pointers: impl IntoIterator<Item = &'p str>) -> Result<Self> {
        let value = parse(text)?;
        pointers.into_iter().try_fold(self, |fingerprint, pointer| {
            let field = find(&value, pointer)?.map(Json::to_string);
            Ok(fingerprint.and(pointer).and(field.unwrap_or_default()))
        })
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION];
        bytes.extend(self.hash.clone().finalize());
        bytes
    }
}

impl PartialEq for Fingerprint {
    fn eq(&self, other: &Self) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for Fingerprint {}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({})", crate::backend::hex(&self.bytes()))
    }
}

/// Reads a JSON text.
fn parse(text: &[u8]) -> Result<Json<'_>> {
    Json::parse(text).map_err(|source| Error::Json { what: "the request", source })
}

/// Checks that a text is a JSON Pointer.
pub(super) fn check_pointer(text: &str) -> Result<()> {
    let is_escaped = text.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
    if is_escaped && (text.is_empty() || text.starts_with('/')) {
        return Ok(());
    }
    let reason = "a JSON Pointer is empty or begins with a slash, and `~` is followed by 0 or 1";
    Err(Error::InvalidKey { what: "JSON Pointer", reason })
}

/// Returns the part at a JSON Pointer, if it exists.
fn find<'j, 't>(value: &'j Json<'t>, pointer: &str) -> Result<Option<&'j Json<'t>>> {
    check_pointer(pointer)?;
    let mut value = Some(value);
    for token in pointer.split('/').skip(1) {
        let token = token.replace("~1", "/").replace("~0", "~");
        value = match value {
            Some(Json::Object(members)) => members.get(&token),
            Some(Json::Array(items)) => parse_index(&token).and_then(|i| items.get(i)),
            _ => None,
        };
    }
    Ok(value)
}

/// Reads an index of a JSON Pointer: digits, without a leading zero.
fn parse_index(token: &str) -> Option<usize> {
    let is_index = token == "0" || !token.starts_with(['0', '+']);
    is_index.then(|| token.parse().ok()).flatten()
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_of_different_requests_differ() {
        let json = |text: &str| Fingerprint::of(["a"]).and_json(text.as_bytes()).expect("json");
        assert_eq!(json(r#"{"a": [1, {"c":null, "b": "x"}]}"#), json(r#"{"a":[1,{"b":"x","c":null}]}"#));
        let texts = [
            "1",
            "1.0",
            "\"1\"",
            "[1]",
            "[]",
            "{}",
            "null",
            r#"{"a":1}"#,
            r#"{"a":"1"}"#,
            r#"{"a":1,"b":2}"#,
            r#"["a",1]"#,
            r#"{"a":{"b":2}}"#,
            r#"["a","b"]"#,
            r#"["a,b"]"#,
            r#"["a",["b"]]"#,
            "[[],[]]",
            "[[[]]]",
            "9007199254740993",
            "9007199254740992",
        ];
        for (i, one) in texts.iter().enumerate() {
            for other in &texts[..i] {
                assert_ne!(json(one), json(other), "{one} {other}");
            }
        }
        assert_ne!(Fingerprint::of(["ab", "c"]), Fingerprint::of(["a", "bc"]));
        assert_ne!(Fingerprint::of(["ab"]), Fingerprint::of(["ab", ""]));
        assert_ne!(Fingerprint::of([""; 0]), Fingerprint::of([""]));
    }

    /// Regression: each level was read once for every level around it, which took seconds for a
    /// text of this size.
    #[test]
    fn deep_text_is_read_once() {
        let deep = |inner: &str| "[".repeat(126) + inner + &"]".repeat(126);
        let text = deep(&format!("\"{}\"", "x".repeat(1 << 20)));
        let start = std::time::Instant::now();
        let one = Fingerprint::of([""; 0]).and_json(text.as_bytes()).expect("json");
        // The limit suits a debug build on a busy machine.
        assert!(start.elapsed() < std::time::Duration::from_secs(5), "{:?}", start.elapsed());
        assert_ne!(one, Fingerprint::of([""; 0]).and_json(deep("\"x\"").as_bytes()).expect("json"));
    }

    #[test]
    fn same_text_in_another_notation_is_the_same() {
        let json = |text: &str| Fingerprint::of([""; 0]).and_json(text.as_bytes()).expect("json");
        for (one, other) in [
            (r#"["\u0061\/\"\\"]"#, r#"["a/\"\\"]"#),
            (r#"{"\u0062":1,"a":[]}"#, "{ \"a\" : [ ] ,\n\"b\" : 1 }"),
            (r#"["\ud83d\ude00", {}]"#, "[\"\u{1f600}\",{}]"),
            (r#"{"a":1,"a":[2]}"#, r#"{"a":[2]}"#),
            (" [true ,false,null,-1.5e+3] ", "[true,false,null,-1.5e+3]"),
        ] {
            assert_eq!(json(one), json(other), "{one}");
        }
    }

    #[test]
    fn other_fields_do_not_count() {
        let of = |text: &str| {
            Fingerprint::of([""; 0]).and_json_fields(text.as_bytes(), ["/amount", "/to/iban"]).expect("json")
        };
        let one = of(r#"{"amount":5,"to":{"iban":"X","name":"A"},"sent_at":1}"#);
        assert_eq!(one, of(r#"{"sent_at":2,"to":{"iban":"X"},"amount":5}"#));
        assert_ne!(one, of(r#"{"amount":5,"to":{"iban":"Y"}}"#));
        assert_ne!(of(r#"{"amount":null}"#), of("{}"));
    }

    #[test]
    fn numbers_are_compared_as_written() {
        let json = |text: &str| Fingerprint::of([""; 0]).and_json(text.as_bytes()).expect("json");
        for (one, other) in [
            ("0.1", "0.10000000000000000001"),
            ("4503599627370496.75", "4503599627370497.25"),
            ("18446744073709551616", "18446744073709551617"),
            ("[1e-400]", "[0.0]"),
        ] {
            assert_ne!(json(one), json(other));
            assert_eq!(json(one), json(&format!(" {one} ")));
        }
    }

    #[test]
    fn invalid_json_and_pointers_are_refused() {
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        for text in ["", "{", "nul", "[1,]", deep.as_str()] {
            assert!(matches!(Fingerprint::of([""; 0]).and_json(text.as_bytes()), Err(Error::Json { .. })));
        }
        let fields =
            |pointer| Fingerprint::of([""; 0]).and_json_fields(br#"{"amount":5,"a/b":[1,{"~":2}]}"#, [pointer]);
        assert!(matches!(fields("amount"), Err(Error::InvalidKey { .. })));
        assert!(matches!(fields("x/amount"), Err(Error::InvalidKey { .. })));
        assert!(matches!(fields("/a~2b"), Err(Error::InvalidKey { .. })));
        assert_eq!(fields("/a~1b/1/~0").expect("a pointer"), Fingerprint::of(["/a~1b/1/~0", "2"]));
        for missing in ["/a~1b/7", "/a~1b/01", "/a~1b/+1", "/a~1b/-"] {
            assert_eq!(fields(missing).expect("a pointer"), Fingerprint::of([missing, ""]));
        }
    }

    #[test]
    fn parts_of_a_key_are_delimited() {
        let id = |key: IdempotencyKey, namespace: &str| key.in_namespace(namespace).expect("a key").id;
        let ids = [
            id(IdempotencyKey::new("ab", "c"), "n"),
            id(IdempotencyKey::new("a", "bc"), "n"),
            id(IdempotencyKey::global("abc"), "n"),
            id(IdempotencyKey::new("b", "c"), "na"),
            id(IdempotencyKey::new("ab", "c "), "n"),
            id(IdempotencyKey::new("AB", "c"), "n"),
            id(IdempotencyKey::new("ab", "c".repeat(256)), "n"),
            id(IdempotencyKey::new("ab", "c".repeat(257)), "n"),
        ];
        let distinct: std::collections::BTreeSet<_> = ids.iter().collect();
        assert_eq!(distinct.len(), ids.len());
        for key in [IdempotencyKey::new("", "k"), IdempotencyKey::global(""), IdempotencyKey::global("a\0")] {
            assert!(matches!(key.in_namespace("n"), Err(Error::InvalidKey { .. })));
        }
        assert!(IdempotencyKey::global("k").in_namespace(&"n".repeat(256)).is_err());
        assert!(!format!("{:?}", IdempotencyKey::new("alice", "secret")).contains("secret"));
    }
}
