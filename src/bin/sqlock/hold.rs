//! What a holding looks like to people, and as JSON.

use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use sqlock::inspect::{LeaseInfo, Mode, WaiterInfo};

use crate::durations;
use crate::say::printable_line;

/// `held by host/17 ("deploy 42") for 3m 20s; its lease ends in 24s unless it is renewed`. Of several, the one who came first:
/// `shared by 3, first: host/17 …`. `None`: nobody holds it.
pub fn describe(holders: &[LeaseInfo]) -> Option<String> {
    let held = holders.first()?;
    let label = if held.label.is_empty() { String::new() } else { format!(" (\"{}\")", printable_line(&held.label)) };
    let holder = format!("{}{label}", printable_line(&held.holder));
    let left = durations::show(held.remaining);
    if held.owner.is_none() {
        return Some(format!("given back by {holder}, and kept taken for another {left}"));
    }
    let by = match held.mode {
        Mode::Shared => "shared by",
        _ => "held by",
    };
    let first = match holders.len() {
        1 => String::new(),
        several => format!("{several}, first: "),
    };
    let age = durations::show(age(held));
    Some(format!("{by} {first}{holder} for {age}; its lease ends in {left} unless it is renewed"))
}

/// `exclusive`, `shared`, `2 permits`.
pub fn mode(mode: Mode) -> String {
    match mode {
        Mode::Permits(1) => "1 permit".into(),
        Mode::Permits(permits) => format!("{permits} permits"),
        mode => kind(mode).into(),
    }
}

/// The same in one word, and how many permits, for programs.
fn kind(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Permits(_) => "permits",
        _ => "other",
    }
}

fn permits(mode: Mode) -> Option<u32> {
    match mode {
        Mode::Permits(permits) => Some(permits),
        _ => None,
    }
}

/// How long it has been held, by the database's clock alone.
pub fn age(held: &LeaseInfo) -> Duration {
    let whole = held.expires_at - held.acquired_at;
    whole.to_std().unwrap_or_default().saturating_sub(held.remaining)
}

/// RFC 3339, to the millisecond.
pub fn time(at: DateTime<Utc>) -> String {
    let since_epoch = Duration::from_micros(u64::try_from(at.timestamp_micros()).unwrap_or(0));
    humantime::format_rfc3339_millis(SystemTime::UNIX_EPOCH + since_epoch).to_string()
}

/// As `acquire` and `renew` print it.
pub fn json_of_steps(held: &LeaseInfo) -> Value {
    json!({
        "name": held.name.as_str(),
        "token": held.token.get(),
        "owner": held.owner.map(|owner| owner.to_string()),
        "expires_at": time(held.expires_at),
    })
}

/// As `ls --json` has it.
pub fn json(held: &LeaseInfo) -> Value {
    json!({
        "name": held.name.as_str(),
        "mode": kind(held.mode),
        "permits": permits(held.mode),
        "holder": held.holder,
        "owner": held.owner.map(|owner| owner.to_string()),
        "token": held.token.get(),
        "acquired_at": time(held.acquired_at),
        "expires_at": time(held.expires_at),
        "waiters": held.waiters,
        "label": held.label,
    })
}

/// As `show --json` has it: the first holder, the others, and who waits.
pub fn json_with_line(holders: &[LeaseInfo], line: &[WaiterInfo]) -> Value {
    let Some((first, others)) = holders.split_first() else {
        return Value::Null;
    };
    let mut shown = json(first);
    shown["other_holders"] = others.iter().map(json).collect();
    shown["waiters_in_line"] = line.iter().map(json_of_waiter).collect();
    shown
}

fn json_of_waiter(waiter: &WaiterInfo) -> Value {
    json!({
        "position": waiter.ahead + 1,
        "mode": kind(waiter.mode),
        "permits": permits(waiter.mode),
        "holder": waiter.holder,
        "since": time(waiter.since),
        "label": waiter.label,
    })
}

/// When a lease ends unless it is renewed, by this host's clock.
pub fn expiry(remaining: Duration) -> String {
    humantime::format_rfc3339_millis(SystemTime::now() + remaining).to_string()
}
