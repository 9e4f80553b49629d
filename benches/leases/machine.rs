//! The machine and the build of a run.

use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use chrono::DateTime;
use serde_json::{Value, json};

pub(crate) fn machine() -> Value {
    let uname = rustix::system::uname();
    json!({
        "cpu": field("/proc/cpuinfo", "model name"),
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "memory": field("/proc/meminfo", "MemTotal"),
        "kernel": format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy()),
    })
}

/// Reads the first value of a field in a file of lines `field : value`.
fn field(file: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    let (_, value) = text.lines().filter_map(|line| line.split_once(':')).find(|(field, _)| field.trim() == name)?;
    Some(value.trim().into())
}

/// Returns the commit of the sources, with `-dirty` if they were changed since.
pub(crate) fn commit() -> Option<String> {
    let describe = ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"];
    let git = Command::new("git").args(describe).current_dir(env!("CARGO_MANIFEST_DIR")).output().ok()?;
    git.status.success().then(|| String::from_utf8_lossy(&git.stdout).trim().into())
}

pub(crate) fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    DateTime::from_timestamp(since.as_secs().cast_signed(), 0).map_or(String::new(), |now| format!("{now:?}"))
}
