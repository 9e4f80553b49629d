//! The request header that carries the key.

use axum::http::{HeaderMap, HeaderName};

/// The default header of a layer.
pub(super) const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// The longest key, in bytes.
const MAX_BYTES: usize = 255;

/// The syntax of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// A string of structured fields (RFC 9651), whose parameters do not count, or the same without
    /// quotes.
    Draft,
    /// The whole value is the key, including quotes.
    Literal,
}

/// Reads the key, without the quotes. Returns `None` without the header.
///
/// # Errors
///
/// The fault of the header.
pub(super) fn read(headers: &HeaderMap, name: &HeaderName, reading: Reading) -> Result<Option<String>, &'static str> {
    let mut lines = headers.get_all(name).iter();
    let Some(line) = lines.next() else {
        return Ok(None);
    };
    if lines.next().is_some() {
        return Err("the header occurs more than once");
    }
    let text = line.to_str().map_err(|_| "it contains characters other than visible ASCII")?;
    let key = match text.strip_prefix('"') {
        Some(rest) if reading == Reading::Draft => {
            let (key, parameters) = unquote(rest)?;
            check_parameters(parameters)?;
            key
        }
        _ => bare(text, reading)?.to_owned(),
    };
    match key.len() {
        0 => Err("it is empty"),
        1..=MAX_BYTES => Ok(Some(key)),
        _ => Err("it is longer than 255 characters"),
    }
}

/// Reads the text behind the opening quote. Returns it with what follows the closing quote.
fn unquote(rest: &str) -> Result<(String, &str), &'static str> {
    let mut key = String::new();
    let mut chars = rest.chars();
    loop {
        match chars.next() {
            Some('"') => return Ok((key, chars.as_str())),
            Some('\\') => match chars.next() {
                Some(escaped @ ('"' | '\\')) => key.push(escaped),
                _ => return Err("a backslash may precede only a quote or a backslash"),
            },
            Some(plain @ ' '..='~') => key.push(plain),
            Some(_) => return Err("it contains control characters"),
            None => return Err("the closing quote is missing"),
        }
    }
}

/// Checks the parameters of a string: `;v=1;w`.
fn check_parameters(mut rest: &str) -> Result<(), &'static str> {
    const REASON: &str = "only parameters may follow the closing quote";
    while !rest.is_empty() {
        let parameter = rest.strip_prefix(';').ok_or(REASON)?.trim_start_matches(' ');
        let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-.*".contains(c);
        let (name, behind) = parameter.split_at(parameter.find(|c| !is_name(c)).unwrap_or(parameter.len()));
        if !name.starts_with(|c: char| c.is_ascii_lowercase() || c == '*') {
            return Err(REASON);
        }
        rest = match behind.strip_prefix('=') {
            None => behind,
            Some(text) if text.starts_with('"') => unquote(&text[1..])?.1,
            Some(item) => {
                let (item, behind) = item.split_at(item.find(';').unwrap_or(item.len()));
                if item.is_empty() || !item.bytes().all(|byte| byte.is_ascii_graphic() && !b"\",".contains(&byte)) {
                    return Err(REASON);
                }
                behind
            }
        };
    }
    Ok(())
}

fn bare(text: &str, reading: Reading) -> Result<&str, &'static str> {
    if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err("without quotes it may have no spaces");
    }
    if reading == Reading::Draft && text.contains(['"', ',', ';']) {
        return Err("without quotes it may have no quotes, commas, semicolons or parameters");
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
        read(&headers, &IDEMPOTENCY_KEY, reading)
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
            (r#""a";v=1"#, "a"),
            (r#""a"; v=1;w; *x="a;\"b";y=:YQ==:;z=?1"#, "a"),
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
            r#""a"v=1"#,
            r#""a";"#,
            r#""a";=1"#,
            r#""a";V=1"#,
            r#""a";v="#,
            r#""a";v="b"#,
            r#""a";v=1,"b""#,
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
