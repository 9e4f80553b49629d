//! Idempotency records as text and JSON.

use serde_json::{Value, json};
use sqlock::FencingToken;
use sqlock::idempotency::{RecordInfo, RecordState, ResolutionInfo};
use sqlock::inspect::LeaseInfo;

use crate::describe::format_time;
use crate::stderr::escape_line;
use crate::stdout;

pub fn format_records(records: &[RecordInfo], held: &[LeaseInfo]) -> String {
    let rows: Vec<Vec<String>> = records
        .iter()
        .map(|record| {
            vec![
                escape_line(&record.namespace),
                format_principal(record),
                escape_line(&record.key),
                record.state.to_string(),
                record.attempts.to_string(),
                record.token.map_or_else(|| "-".into(), |token| token.to_string()),
                format_time(record.created_at),
                format_expiry(record).unwrap_or_else(|| "never".into()),
                find_worker(record, held).map_or_else(String::new, |held| escape_line(&held.holder)),
            ]
        })
        .collect();
    let heading = ["NAMESPACE", "PRINCIPAL", "KEY", "STATE", "ATTEMPTS", "TOKEN", "CREATED AT", "EXPIRES AT", "WHO"];
    stdout::format_table(&heading, &rows)
}

/// Finds the lease of the running attempt.
pub fn find_worker<'h>(record: &RecordInfo, held: &'h [LeaseInfo]) -> Option<&'h LeaseInfo> {
    held.iter().find(|held| record.state == RecordState::Started && held.name.as_str() == record.lease)
}

/// Returns whether an attempt was in progress, and holds no lease any more.
pub fn has_died(record: &RecordInfo, held: &[LeaseInfo]) -> bool {
    record.state == RecordState::Started && find_worker(record, held).is_none()
}

/// Formats the expiry. `None`: never, because the request has not ended, or its key is refused.
fn format_expiry(record: &RecordInfo) -> Option<String> {
    matches!(record.state, RecordState::Done | RecordState::Issued).then(|| format_time(record.expires_at))
}

fn format_principal(record: &RecordInfo) -> String {
    record.principal.as_deref().map_or_else(|| "(global)".into(), escape_line)
}

/// Makes an object of `ls --json`.
pub fn record_to_json(record: &RecordInfo, held: Option<&LeaseInfo>) -> Value {
    json!({
        "namespace": record.namespace,
        "principal": record.principal,
        "key": record.key,
        "state": record.state,
        "token": record.token.map(FencingToken::get),
        "attempts": record.attempts,
        "created_at": format_time(record.created_at),
        "expires_at": format_expiry(record),
        "holder": held.map(|held| &held.holder),
    })
}

pub fn format_resolution(resolution: &ResolutionInfo) -> String {
    let ResolutionInfo { outcome, token, by, note, at, .. } = resolution;
    let token = token.map_or_else(String::new, |token| format!(", token {token}"));
    let note = if note.is_empty() { String::new() } else { format!(": {}", escape_line(note)) };
    format!("resolved     {outcome} by {}, {}{token}{note}\n", escape_line(by), format_time(*at))
}

fn format_token(record: &RecordInfo) -> String {
    match record.token {
        Some(token) => token.to_string(),
        None if record.state == RecordState::Issued => "none".into(),
        None => "none: in one transaction".into(),
    }
}

/// Formats what is stored by its length alone.
fn format_bytes(bytes: Option<usize>) -> String {
    bytes.map_or_else(|| "none".into(), |bytes| format!("{bytes} bytes"))
}

pub fn format_record(record: &RecordInfo, held: Option<&LeaseInfo>) -> String {
    let state = match (record.state, held) {
        (RecordState::Issued, _) => "issued: not used yet".into(),
        (RecordState::Started, Some(held)) => format!("started: held by {}", escape_line(&held.holder)),
        (RecordState::Started, None) => "started: the attempt has died".into(),
        (RecordState::Unknown, _) => "unknown: the effect may have happened".into(),
        (RecordState::Expired, _) => "expired: the key is refused".into(),
        (state, _) => state.to_string(),
    };
    let never = if record.state == RecordState::Expired { "never" } else { "never, since it has not ended" };
    let lines = [
        ("namespace", escape_line(&record.namespace)),
        ("principal", format_principal(record)),
        ("key", escape_line(&record.key)),
        ("state", state),
        ("attempts", record.attempts.to_string()),
        ("token", format_token(record)),
        ("request", format_bytes(record.request_bytes)),
        ("result", format_bytes(record.result_bytes)),
        ("steps done", escape_line(&record.steps.join(", "))),
        ("created at", format_time(record.created_at)),
        ("expires at", format_expiry(record).unwrap_or_else(|| never.into())),
    ];
    let lines = lines.iter().filter(|(_, value)| !value.is_empty());
    lines.map(|(what, value)| format!("{what:<11}  {value}\n")).collect()
}
