//! Writes times as RFC 3339, to the millisecond.

use chrono::{DateTime, Datelike as _, Timelike as _, Utc};
use serde::Serializer;

pub(crate) fn serialize<S: Serializer>(at: &DateTime<Utc>, to: S) -> Result<S::Ok, S::Error> {
    let millis = at.nanosecond() / 1_000_000;
    to.collect_str(&format_args!(
        "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{millis:03}Z",
        at.year(),
        at.month(),
        at.day(),
        at.hour(),
        at.minute(),
        at.second()
    ))
}
