//! Cycles of a process on names that no other process uses, counted for each second.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlock::{Error, Locks};

use super::history::boot_ns;

const SECOND: u64 = 1_000_000_000;
const MINUTE: u64 = 60 * SECOND;

/// Between two cycles of a process.
const PAUSE: Duration = Duration::from_millis(2);

/// Acquires and releases one new name after another, and appends the count of each second to a
/// file, until `over`. `failed` gets the errors.
pub(super) async fn run(locks: &Locks, cycles: &Path, over: &AtomicBool, ttl: Duration, failed: impl Fn(&Error)) {
    let process = boot_ns();
    let mut file = OpenOptions::new().append(true).open(cycles).expect("the file of the observer");
    let (mut second, mut count) = (process / SECOND, 0_u64);
    for i in 0_u64.. {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let lease = locks.lease(format!("traffic/{process}/{i}")).ttl(ttl).acquire().await;
        match async { lease?.release().await }.await {
            Ok(()) => count += 1,
            Err(error) => failed(&error),
        }
        let now = boot_ns() / SECOND;
        if now > second {
            // One write, so that the lines of several processes do not mix.
            file.write_all(format!("{second} {count}\n").as_bytes()).expect("the count can be written");
            (second, count) = (now, 0);
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Creates the file for the counts of all processes.
pub(super) fn create(cycles: &Path) {
    File::create_new(cycles).expect("a file of this run");
}

/// Describes the cycles and the grants of each whole minute. `grants` are moments of grants.
pub(super) fn by_minute(cycles: &Path, start: u64, end: u64, grants: impl Iterator<Item = u64>) -> String {
    let minute_of = |at: u64| at.checked_sub(start).map(|since| since / MINUTE);
    let mut counts: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
    for line in fs::read_to_string(cycles).expect("the file of this run").lines() {
        let (second, count) = line.split_once(' ').expect("a second and a count");
        let at = second.parse::<u64>().expect("a number") * SECOND;
        if let Some(minute) = minute_of(at) {
            counts.entry(minute).or_default().0 += count.parse::<u64>().expect("a number");
        }
    }
    for minute in grants.filter_map(minute_of) {
        counts.entry(minute).or_default().1 += 1;
    }
    let mut text = String::new();
    for (minute, (cycles, grants)) in counts.range(..minute_of(end).unwrap_or(0)) {
        let _ =
            writeln!(text, "    minute {:<3} {cycles:>8} cycles beside the line {grants:>6} grants in it", minute + 1);
    }
    text
}
