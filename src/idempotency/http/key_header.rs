//! The request header that carries the key.

use std::borrow::Cow;

use axum::http::{HeaderMap, HeaderName};

/// The header.
pub(super) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The longest key, in bytes.
const MAX_BYTES: usize = 255;

/// How the header is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// A string of structured fields (RFC 9651), or the same without quotes.
    Draft,
    /// The whole value is the key, including quotes.
    Literal,
}

/// Reads the key, without the quotes. Returns `None` without the header.
///
/// # Errors
///
/// What is wrong with the header.
pub(super) fn read(headers: &HeaderMap, reading: Reading) -> Result<Option<String>, &'static str> {
    let mut lines = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(line) = lines.next() else {
        return Ok(None);
    };
    if lines.next().is_some() {
        return Err("there is more than one of this header");
    }
    let text = line.to_str().map_err(|_| "it has other characters than those of ASCII")?;
    let key = match text.strip_prefix('"') {
        Some(rest) if reading == Reading::Draft => unquote(rest)?,
        _ => bare(text, reading)?.into(),
    };
    match key.len() {
        0 => Err("it is empty"),
        1..=MAX_BYTES => Ok(Some(key.into_owned())),
        _ => Err("it is longer than 255 characters"),
    }
}

/// Reads the text behind the opening quote, up to the closing quote, which must be the end.
fn unquote(rest: &str) -> Result<Cow<'_, str>, &'static str> {
    let mut key = String::new();
    let mut chars = rest.chars();
    loop {
        match chars.next() {
            Some('"') if chars.as_str().is_empty() => return Ok(key.into()),
            Some('"') => return Err("something follows the closing quote"),
            Some('\\') => match chars.next() {
                Some(escaped @ ('"' | '\\')) => key.push(escaped),
                _ => return Err("only quotes and backslashes may stand behind a backslash"),
            },
            Some(plain @ ' '..='~') => key.push(plain),
            Some(_) => return Err("it has characters that cannot be seen"),
            None => return Err("the closing quote is missing"),
        }
    }
}

fn bare(text: &str, reading: Reading) -> Result<&str, &'static str> {
    if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("without quotes it may have no spaces");
    }
    if reading == Reading::Draft && text.contains(['"', ',', ';']) {
        return Err("without quotes it may have no quotes, commas or semicolons, and parameters are not known");
    }
    Ok(text)
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn key(lines: &[&str], reading: Reading) -> Result<Option<String>, &'static str> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(IDEMPOTENCY_KEY, HeaderValue::from_bytes(line.as_bytes()).expect("a header's value"));
        }
        read(&headers, reading)
    }

    #[test]
    fn quoted_and_bare_are_the_same_key() {
        for (line, expected) in [
            ("8e03978e-40d5-43dd", "8e03978e-40d5-43dd"),
            (r#""8e03978e-40d5-43dd""#, "8e03978e-40d5-43dd"),
            (r#""a\"b\\c""#, r#"a"b\c"#),
            (r"b\c", r"b\c"),
            (r#""a, b;c""#, "a, b;c"),
            (r#"" a""#, " a"),
        ] {
            assert_eq!(key(&[line], Reading::Draft), Ok(Some(expected.to_owned())), "{line}");
        }
        assert_eq!(key(&[], Reading::Draft), Ok(None));
        assert_eq!(key(&[&"k".repeat(255)], Reading::Draft), Ok(Some("k".repeat(255))));
        assert_eq!(key(&[r#""a";b"#], Reading::Literal), Ok(Some(r#""a";b"#.to_owned())));
    }

    #[test]
    fn invalid_keys_are_malformed() {
        for line in [
            "",
            r#""""#,
            "a b",
            "a,b",
            "a;v=1",
            r#""a";v=1"#,
            r#""a", "b""#,
            r#""a"#,
            r#"a""#,
            r#""a\"#,
            r#""a\b""#,
            "\"a\tb\"",
            "á",
            "\"á\"",
            &"k".repeat(256),
        ] {
            assert!(key(&[line], Reading::Draft).is_err(), "{line}");
        }
        assert!(key(&["a", "a"], Reading::Draft).is_err());
        for line in ["", "a b", "á", &"k".repeat(256)] {
            assert!(key(&[line], Reading::Literal).is_err(), "{line}");
        }
    }
}
