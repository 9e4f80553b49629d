//! JSON texts in canonical form, with numbers as they were written.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

/// A JSON value, without its white space, the order of its members, and the notation of its texts.
pub(super) enum Json<'t> {
    /// A number, `true`, `false` or `null`, as written: parsing a number could change it.
    Literal(&'t str),
    Text(String),
    Array(Vec<Self>),
    /// The last value of a duplicate member counts.
    Object(BTreeMap<String, Self>),
}

impl<'t> Json<'t> {
    /// Reads a JSON text that is nested at most 127 deep.
    pub(super) fn parse(text: &'t [u8]) -> serde_json::Result<Self> {
        // Checks the text and its depth. The code below reads a valid text.
        serde_json::from_slice::<Value>(text)?;
        let text = std::str::from_utf8(text).map_err(serde::de::Error::custom)?;
        Reader { rest: text }.value()
    }
}

/// Writes the canonical text.
impl fmt::Display for Json<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Literal(text) => f.write_str(text),
            Self::Text(text) => write_text(f, text),
            Self::Array(items) => {
                f.write_str("[")?;
                for item in items {
                    write!(f, "{item},")?;
                }
                f.write_str("]")
            }
            Self::Object(members) => {
                f.write_str("{")?;
                for (name, value) in members {
                    write_text(f, name)?;
                    write!(f, ":{value},")?;
                }
                f.write_str("}")
            }
        }
    }
}

fn write_text(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    f.write_str(&serde_json::to_string(text).map_err(|_| fmt::Error)?)
}

/// The rest of a text.
struct Reader<'t> {
    rest: &'t str,
}

impl<'t> Reader<'t> {
    fn value(&mut self) -> serde_json::Result<Json<'t>> {
        if self.skip('[') {
            let mut items = Vec::new();
            while !self.skip(']') {
                items.push(self.value()?);
                self.skip(',');
            }
            return Ok(Json::Array(items));
        }
        if self.skip('{') {
            let mut members = BTreeMap::new();
            while !self.skip('}') {
                let name = self.text()?;
                self.skip(':');
                members.insert(name, self.value()?);
                self.skip(',');
            }
            return Ok(Json::Object(members));
        }
        if self.rest.starts_with('"') {
            return self.text().map(Json::Text);
        }
        let is_end = |c: char| c.is_ascii_whitespace() || matches!(c, ',' | ']' | '}');
        match self.take(self.rest.find(is_end).unwrap_or(self.rest.len())) {
            "" => Err(incomplete()),
            literal => Ok(Json::Literal(literal)),
        }
    }

    fn text(&mut self) -> serde_json::Result<String> {
        let mut is_escaped = false;
        let end = self.rest.bytes().skip(1).position(|byte| {
            let is_end = byte == b'"' && !is_escaped;
            is_escaped = byte == b'\\' && !is_escaped;
            is_end
        });
        let quoted = self.take(end.ok_or_else(incomplete)? + 2);
        serde_json::from_str(quoted)
    }

    /// Skips white space, and this character if it comes next.
    fn skip(&mut self, next: char) -> bool {
        self.rest = self.rest.trim_ascii_start();
        let behind = self.rest.strip_prefix(next);
        self.rest = behind.map_or(self.rest, str::trim_ascii_start);
        behind.is_some()
    }

    fn take(&mut self, bytes: usize) -> &'t str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        taken
    }
}

fn incomplete() -> serde_json::Error {
    serde::de::Error::custom("the text ends too early")
}
