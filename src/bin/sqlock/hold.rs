//! What a holding looks like to people, and as JSON.

use std::time::{Duration, SystemTime};

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use sqlock::{Lease, LeaseInfo};

use crate::durations;
use crate::say::printable_line;

/// `held by host/17 ("deploy 42") for 3m 20s; its lease ends in 24s unless it is renewed`.
pub fn describe(held: &LeaseInfo) -> String {
    let label = if held.label.is_empty() { String::new() } else { format!(" (\"{}\")", printable_line(&held.label)) };
    let holder = format!("{}{label}", printable_line(&held.holder));
    let left = durations::show(held.remaining);
    match held.owner {
        Some(_) => {
            let age = durations::show(age(held));
            format!("held by {holder} for {age}; its lease ends in {left} unless it is renewed")
        }
        None => format!("given back by {holder}, and kept taken for another {left}"),
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

/// As `ls --json` and `show --json` have it.
pub fn json(held: &LeaseInfo) -> Value {
    json!({
        "name": held.name.as_str(),
        "mode": "exclusive",
        "holder": held.holder,
        "owner": held.owner.map(|owner| owner.to_string()),
        "token": held.token.get(),
        "acquired_at": time(held.acquired_at),
        "expires_at": time(held.expires_at),
        "waiters": null,
        "label": held.label,
    })
}

/// When a lease ends unless it is renewed, by this host's clock.
pub fn expiry(lease: &Lease) -> String {
    humantime::format_rfc3339_millis(SystemTime::now() + lease.remaining()).to_string()
}
