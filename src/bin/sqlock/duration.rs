//! Durations of options and messages: `90` (seconds), `1.5`, `90s`, `1m30s`.

use std::time::Duration;

/// The longest duration: 100 years. A time plus a longer duration could overflow.
const MAX: Duration = Duration::from_secs(100 * 366 * 24 * 60 * 60);

/// Parses the value of an option.
pub fn parse(text: &str) -> Result<Duration, String> {
    let duration = parse_unlimited(text)?;
    if duration > MAX { Err("longer than 100 years".into()) } else { Ok(duration) }
}

fn parse_unlimited(text: &str) -> Result<Duration, String> {
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        let seconds: f64 = text.parse().map_err(|_| format!("invalid number {text:?}"))?;
        return Duration::try_from_secs_f64(seconds).map_err(|_| "too long".into());
    }
    humantime::parse_duration(text).map_err(|error| format!("{error}; write 90, 1.5, 90s, 1m30s or 2h"))
}

/// Formats a duration to the second, `1m 30s`; below ten seconds to the tenth, `1.5s`.
pub fn format(duration: Duration) -> String {
    if duration < Duration::from_secs(10) {
        return format!("{:.1}s", duration.as_secs_f64());
    }
    format_exact(Duration::from_secs(duration.as_secs()))
}

pub fn format_exact(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_accepts_seconds_and_units() {
        let ms = |text| parse(text).map(|d| d.as_millis());
        assert_eq!(ms("90"), Ok(90_000));
        assert_eq!(ms("1.5"), Ok(1_500));
        assert_eq!(ms("90s"), Ok(90_000));
        assert_eq!(ms("1m30s"), Ok(90_000));
        assert_eq!(ms("250ms"), Ok(250));
        assert_eq!(ms("0"), Ok(0));
        assert_eq!(ms("2h"), Ok(7_200_000));
    }

    #[test]
    fn parse_refuses_other_texts() {
        for text in [
            "",
            ".",
            "1..5",
            "-1",
            "inf",
            "NaN",
            "1e3",
            "5 parsecs",
            "101years",
            "1000000000000000000",
            "99999999999999999999999",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
