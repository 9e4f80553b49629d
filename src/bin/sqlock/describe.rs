//! Describes holders and waiters, as text and as JSON.

use std::time::{Duration, SystemTime};

use chrono::{DateTime, Timelike, Utc};
use serde_json::{Value, json};
use sqlock::inspect::{LeaseInfo, Mode, WaiterInfo};
use sqlock::{FencingToken, Owner};

use crate::duration;
use crate::stderr::escape_line;

/// Describes the holders: `held by host/17 ("deploy 42") for 3m 20s; its lease ends in 24s unless
/// it is renewed`. Several holders are described by the first: `shared by 3, first: host/17 …`.
/// `None`: the name is free.
pub fn describe_holders(holders: &[LeaseInfo]) -> Option<String> {
    let held = holders.first()?;
    let label = if held.label.is_empty() { String::new() } else { format!(" (\"{}\")", escape_line(&held.label)) };
    let holder = format!("{}{label}", escape_line(&held.holder));
    let left = duration::format(held.remaining);
    if held.owner.is_none() {
        return Some(format!("released by {holder}; the name stays taken for another {left}"));
    }
    let by = match held.mode {
        Mode::Shared => "shared by",
        _ => "held by",
    };
    let first = match holders.len() {
        1 => String::new(),
        several => format!("{several}, first: "),
    };
    let age = duration::format(held_for(held));
    Some(format!("{by} {first}{holder} for {age}; its lease ends in {left} unless it is renewed"))
}

/// Formats a mode: `exclusive`, `shared`, `2 permits`.
pub fn format_mode(mode: Mode) -> String {
    match mode {
        Mode::Exclusive => "exclusive".into(),
        Mode::Shared => "shared".into(),
        Mode::Permits(1) => "1 permit".into(),
        Mode::Permits(permits) => format!("{permits} permits"),
        _ => "other".into(),
    }
}

/// Returns how long the name has been held, by the database's clock alone.
pub fn held_for(held: &LeaseInfo) -> Duration {
    let whole = held.expires_at - held.acquired_at;
    whole.to_std().unwrap_or_default().saturating_sub(held.remaining)
}

/// Formats a time as RFC 3339, to the millisecond. A year above 9999 is written with all its
/// digits.
pub fn format_time(at: DateTime<Utc>) -> String {
    let time = at.time();
    let (date, millis) = (at.date_naive(), time.nanosecond() / 1_000_000);
    format!("{date}T{:02}:{:02}:{:02}.{millis:03}Z", time.hour(), time.minute(), time.second())
}

/// Makes the object that `acquire` and `renew` print.
pub fn grant_to_json(held: &LeaseInfo) -> Value {
    json!({
        "name": held.name.as_str(),
        "token": held.token.get(),
        "owner": held.owner.map(|owner| owner.to_string()),
        "expires_at": format_time(held.expires_at),
    })
}

/// Makes the object that `acquire` and `renew` print for a lease that is not read from one database,
/// with the expiry by this host's clock.
pub fn estimated_grant_to_json(name: &str, token: FencingToken, owner: Option<Owner>, expires_at: &str) -> Value {
    json!({
        "name": name,
        "token": token.get(),
        "owner": owner.map(|owner| owner.to_string()),
        "expires_at": expires_at,
    })
}

/// Makes the object of `show --json`: the first holder, the other holders and the waiters. A free
/// name has the note of its last holder.
pub fn name_to_json(name: &str, holders: &[LeaseInfo], queue: &[WaiterInfo], last_note: Option<&str>) -> Value {
    let (mut shown, others) = match holders.split_first() {
        Some((first, others)) => (json!(first), others),
        None => (json!({ "name": name, "holder": null, "owner": null, "token": null, "note": last_note }), holders),
    };
    shown["other_holders"] = json!(others);
    shown["queue"] = json!(queue);
    shown
}

/// Formats when a lease ends unless it is renewed, by this host's clock.
pub fn format_expiry(remaining: Duration) -> String {
    humantime::format_rfc3339_millis(SystemTime::now() + remaining).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_in_every_year() {
        let written = |micros| DateTime::from_timestamp_micros(micros).map(format_time);
        assert_eq!(written(1_700_000_000_123_456).as_deref(), Some("2023-11-14T22:13:20.123Z"));
        assert_eq!(written(1_000_000_000_000_000_000).as_deref(), Some("+33658-09-27T01:46:40.000Z"));
    }
}
