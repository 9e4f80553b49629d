//! Processor time: of this process with its children, and of a server on this machine.
//!
//! Unlike wall-clock time, it hardly depends on what else the machine does.

use std::fmt;
use std::ops::Sub;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::floor::Bare;

/// The unit of processor time in /proc, on every Linux of today.
const TICKS_PER_SECOND: f64 = 100.0;

/// Reads processor time.
pub(crate) struct Meter {
    /// The process of the server. `None`: SQLite, or a server on another machine.
    server: Option<u32>,
}

#[derive(Clone, Copy)]
struct Spent {
    client: Duration,
    server: Option<Duration>,
}

impl Sub for Spent {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        let server = self.server.zip(earlier.server).map(|(now, earlier)| now.saturating_sub(earlier));
        Self { client: self.client.saturating_sub(earlier.client), server }
    }
}

/// The begin of a measurement.
pub(crate) struct Started {
    spent: Spent,
    at: Instant,
}

impl Meter {
    pub(crate) async fn on(bare: &mut Bare) -> Self {
        let file = bare.process_file().await.and_then(|file| std::fs::read_to_string(file).ok());
        let server = file.and_then(|file| file.lines().next()?.trim().parse().ok());
        Self { server }
    }

    pub(crate) fn start(&self) -> Started {
        Started { spent: self.read(), at: Instant::now() }
    }

    fn read(&self) -> Spent {
        Spent { client: of_process(std::process::id()), server: self.server.map(of_process) }
    }
}

/// Returns the processor time of a process and its children, also of those that have ended.
fn of_process(id: u32) -> Duration {
    let directory = format!("/proc/{id}");
    let ticks = std::fs::read_to_string(Path::new(&directory).join("stat")).map_or(0, |stat| {
        // The fields after the name, which is in parentheses: utime, stime, cutime and cstime.
        let fields = stat.rsplit_once(") ").map_or("", |(_, fields)| fields).split(' ').skip(11).take(4);
        fields.filter_map(|field| field.parse::<u64>().ok()).sum::<u64>()
    });
    let threads = std::fs::read_dir(Path::new(&directory).join("task")).into_iter().flatten().flatten();
    let children = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let of_children: Duration = children
        .flat_map(|ids| ids.split_whitespace().filter_map(|id| id.parse().ok()).map(of_process).collect::<Vec<_>>())
        .sum();
    Duration::from_secs_f64(ticks as f64 / TICKS_PER_SECOND) + of_children
}

/// Processor time over several rounds.
#[derive(Default)]
pub(crate) struct Usage {
    client: Duration,
    server: Option<Duration>,
    operations: f64,
}

impl Usage {
    /// Adds what was spent since the start, during which there were so many operations a second.
    pub(crate) fn add(&mut self, meter: &Meter, start: &Started, rate: f64) {
        let spent = meter.read() - start.spent;
        self.client += spent.client;
        self.server = spent.server.map(|spent| spent + self.server.unwrap_or_default());
        self.operations += rate * start.at.elapsed().as_secs_f64();
    }

    /// Returns the microseconds of an operation: of the client, and of the server.
    fn of_one(&self) -> (f64, Option<f64>) {
        let micros = |time: Duration| time.as_secs_f64() * 1e6 / self.operations;
        (micros(self.client), self.server.map(micros))
    }

    pub(crate) fn json(&self) -> Value {
        let (client, server) = self.of_one();
        json!({ "client": client, "server": server })
    }
}

/// The microseconds of an operation: of the client and the server.
impl fmt::Display for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.of_one() {
            (client, Some(server)) => write!(f, "{client:.0} + {server:.0}"),
            (client, None) => write!(f, "{client:.0}"),
        }
    }
}
