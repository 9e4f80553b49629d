//! What makes a request the same one: its key, and what it asks for.

use std::fmt;

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::backend::records::FullKey;
use crate::error::{Error, Result};

/// The longest key, principal or namespace, in bytes.
const LONGEST: usize = 255;

/// Under what a request is known: a key that its sender chose, and whose key it is.
///
/// Two principals who choose the same key do not meet: neither is told the other's result. What is the same for everybody, the
/// identifier of an event say, is [`global`](Self::global). All are compared byte for byte and may be 1 to 255 bytes long,
/// without NUL; that is checked where the key is used. `Debug` does not show the key.
#[derive(Clone, PartialEq, Eq)]
pub struct IdempotencyKey {
    principal: Option<String>,
    key: String,
    issued: bool,
}

impl IdempotencyKey {
    /// A key of a principal's: whoever was authenticated.
    pub fn new(principal: impl Into<String>, key: impl Into<String>) -> Self {
        Self { principal: Some(principal.into()), key: key.into(), issued: false }
    }

    /// A key that is the same one whoever sends it. Whoever knows it is told the result.
    pub fn global(key: impl Into<String>) -> Self {
        Self { principal: None, key: key.into(), issued: false }
    }

    /// A token that was [issued](crate::Idempotency::issue) to this principal, and counts only if it was.
    pub fn issued(principal: impl Into<String>, token: impl Into<String>) -> Self {
        Self { issued: true, ..Self::new(principal, token) }
    }

    pub(crate) fn is_issued(&self) -> bool {
        self.issued
    }

    /// With the namespace, checked.
    pub(crate) fn within(&self, namespace: &str) -> Result<FullKey> {
        check("a namespace", namespace)?;
        if let Some(principal) = &self.principal {
            check("a principal", principal)?;
        }
        check("a key", &self.key)?;
        let principal = self.principal.clone().unwrap_or_default();
        Ok(FullKey::new(namespace.to_owned(), principal, self.key.clone()))
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyKey").field("issued", &self.issued).finish_non_exhaustive()
    }
}

pub(super) fn check(what: &'static str, text: &str) -> Result<()> {
    let reason = match text {
        "" => "it is empty",
        text if text.len() > LONGEST => "it is longer than 255 bytes",
        text if text.contains('\0') => "it contains a NUL character",
        _ => return Ok(()),
    };
    Err(Error::InvalidKey { what, reason })
}

/// What a request asks for, as a digest: SHA-256 over its parts, each with its length before it, so that no two lists of parts
/// are alike. A key that comes again with another fingerprint is [refused](crate::Outcome::Mismatch).
///
/// Put in what makes the request another one, and leave out what may differ when it is sent again (a time stamp, a trace
/// identifier). How a fingerprint is made belongs to it: should that ever change, stored ones differ from new ones.
///
/// ```
/// # fn main() -> sqlock::Result<()> {
/// use sqlock::Fingerprint;
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
}

/// Stands before a digest: how it was made.
const VERSION: u8 = 1;

impl Fingerprint {
    /// Of these parts, in this order.
    pub fn of<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        parts.into_iter().fold(Self { hash: Sha256::new() }, Self::and)
    }

    /// And of this part.
    pub fn and(mut self, part: impl AsRef<[u8]>) -> Self {
        let part = part.as_ref();
        self.hash.update((part.len() as u64).to_be_bytes());
        self.hash.update(part);
        self
    }

    /// And of this JSON text. White space and the order of members do not count; of a member that is there twice the last
    /// one does. Whole numbers differ from numbers with a fraction, even one of zero.
    ///
    /// # Errors
    ///
    /// [`Error::Json`]: it is no JSON text, or has a number that cannot be told from others when it is read as a 64-bit integer
    /// or floating-point number: send such as text.
    pub fn and_json(self, text: &[u8]) -> Result<Self> {
        let value = serde_json::from_slice(text).map_err(|source| Error::Json { what: "the request", source })?;
        let canonical = canonical(&value)?;
        Ok(self.and(canonical))
    }

    /// And of these parts of this JSON text, each by its JSON Pointer (RFC 6901): `/amount`. A part that is not there differs
    /// from one that is null.
    ///
    /// # Errors
    ///
    /// As [`and_json`](Self::and_json).
    pub fn and_json_fields<'p>(self, text: &[u8], pointers: impl IntoIterator<Item = &'p str>) -> Result<Self> {
        let value: Value =
            serde_json::from_slice(text).map_err(|source| Error::Json { what: "the request", source })?;
        pointers.into_iter().try_fold(self, |fingerprint, pointer| {
            let field = value.pointer(pointer).map(canonical).transpose()?;
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

/// One text for all that mean the same, with the members of objects in order.
fn canonical(value: &Value) -> Result<String> {
    let mut text = String::new();
    write(value, &mut text)?;
    Ok(text)
}

fn write(value: &Value, text: &mut String) -> Result<()> {
    match value {
        Value::Array(items) => {
            text.push('[');
            for item in items {
                write(item, text)?;
                text.push(',');
            }
            text.push(']');
        }
        Value::Object(members) => {
            // Of the order in the map nothing is known: other crates may have it keep that of the text.
            let mut members: Vec<_> = members.iter().collect();
            members.sort_by_key(|(name, _)| *name);
            text.push('{');
            for (name, value) in members {
                text.push_str(&Value::String(name.clone()).to_string());
                text.push(':');
                write(value, text)?;
                text.push(',');
            }
            text.push('}');
        }
        Value::Number(number) if number.is_f64() && number.as_f64().is_none_or(|n| n.abs() >= EXACT) => {
            use serde::de::Error as _;
            let source = serde_json::Error::custom("a number is too large to be told from others: send it as text");
            return Err(Error::Json { what: "the request", source });
        }
        other => text.push_str(&other.to_string()),
    }
    Ok(())
}

/// From here on not every whole number is a floating-point number.
const EXACT: f64 = 9_007_199_254_740_992.0;

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_differ_wherever_requests_do() {
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

    #[test]
    fn fields_that_are_left_out_do_not_count() {
        let of = |text: &str| {
            Fingerprint::of([""; 0]).and_json_fields(text.as_bytes(), ["/amount", "/to/iban"]).expect("json")
        };
        let one = of(r#"{"amount":5,"to":{"iban":"X","name":"A"},"sent_at":1}"#);
        assert_eq!(one, of(r#"{"sent_at":2,"to":{"iban":"X"},"amount":5}"#));
        assert_ne!(one, of(r#"{"amount":5,"to":{"iban":"Y"}}"#));
        assert_ne!(of(r#"{"amount":null}"#), of("{}"));
    }

    #[test]
    fn a_number_that_could_be_another_one_is_refused() {
        for text in ["18446744073709551617", "1e300", "[-1e17]", "9007199254740993.0"] {
            let refused = Fingerprint::of([""; 0]).and_json(text.as_bytes());
            assert!(matches!(refused, Err(Error::Json { .. })), "{text}");
        }
        assert!(Fingerprint::of([""; 0]).and_json(b"{").is_err());
    }

    #[test]
    fn parts_of_a_key_do_not_flow_into_each_other() {
        let id = |key: IdempotencyKey, namespace: &str| key.within(namespace).expect("a key").id;
        let ids = [
            id(IdempotencyKey::new("ab", "c"), "n"),
            id(IdempotencyKey::new("a", "bc"), "n"),
            id(IdempotencyKey::global("abc"), "n"),
            id(IdempotencyKey::new("b", "c"), "na"),
            id(IdempotencyKey::new("ab", "c "), "n"),
            id(IdempotencyKey::new("AB", "c"), "n"),
        ];
        let distinct: std::collections::BTreeSet<_> = ids.iter().collect();
        assert_eq!(distinct.len(), ids.len());
        for key in [IdempotencyKey::new("", "k"), IdempotencyKey::global(""), IdempotencyKey::global("a\0")] {
            assert!(matches!(key.within("n"), Err(Error::InvalidKey { .. })));
        }
        assert!(IdempotencyKey::global("k").within(&"n".repeat(256)).is_err());
        assert!(!format!("{:?}", IdempotencyKey::new("alice", "secret")).contains("secret"));
    }
}
