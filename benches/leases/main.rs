//! Measures the cost of leases, as ratios to a floor measured in the same run.
//!
//! The floor is the least that any correct lease needs: the simplest SQL, one row at a time,
//! prepared, on bare connections, on the same server with the same durability. Machines differ and
//! are noisy; the ratio of two neighbours in one run is stable. So contender and floor take turns
//! in short rounds, and the table shows the median and the spread of the rounds' ratios.
//!
//! ```text
//! cargo bench --all-features --bench leases -- [--only A,B,…] [--quick] [--json [FILE]]
//! ```
//!
//! It runs on the database that `DATABASE_URL` names, in a database of its own that is dropped
//! afterwards; without one, on SQLite in a temporary file, with `synchronous` FULL and NORMAL.

#![allow(clippy::expect_used, clippy::panic, reason = "a bench that cannot measure has nothing to recover to")]

mod batching;
mod command;
mod cpu;
mod cycle;
mod floor;
mod growth;
mod handover;
mod machine;
mod measure;
mod once;
mod peer;
mod place;
mod processes;
mod queue;
mod quorum;
mod redis;
mod renewal;
mod rows;
mod throughput;
mod together;
mod worker;
mod zookeeper;

use std::time::Instant;

use serde_json::{Value, json};

use measure::{Line, Pace};
use place::Place;

const USAGE: &str = "leases [--only A,B,…,N] [--quick] [--json [FILE]]

A  uncontended acquire and release, one task; next to it the server's own lock, SELECT 1, and ZooKeeper
B  throughput on distinct names: 1, 64, 1024 tasks; next to them Redis
C  hand-over of one name inside a process: 8, 64, 128 tasks
D  renewal of 10 000 held leases; a heartbeat with 1, 100, 10 000; the size of a name
E  200 000 cycles on one name: time and table size at start and end
F  hand-over between two processes: from the release until the other holds the name; next to it ZooKeeper
G  hand-over between processes: 2, 8, 16 that want one name
H  statements per hand-over between processes, with 2 to 1024 waiters
I  row locks and version updates in a transaction, next to the same SQL by hand
J  an effect that must happen once, next to the same transaction without that
K  a lease on a majority of three servers, next to one on the slowest of them (beside PostgreSQL, with all three there)
L  hand-over between clients and between processes, next to the least queue of the database, and to ZooKeeper
M  several names at once, next to the same names in turn
N  the time of `sqlock run`, next to flock

Processor time is that of the client and the server for one operation: CPU 30 + 50 µs.

DATABASE_URL chooses the database; without it, SQLite in a temporary file. Redis and ZooKeeper are left out unless
SQLOCK_REDIS is the program of a server, and SQLOCK_ZOOKEEPER the file zookeeper.jar.";

#[tokio::main]
async fn main() {
    if std::env::args().nth(1).as_deref() == Some(worker::WORKER) {
        return worker::run().await;
    }
    let request = Request::from_arguments().unwrap_or_else(|problem| {
        eprintln!("{problem}\n\n{USAGE}");
        std::process::exit(2)
    });
    let mut run = request.describe();
    let mut interrupted = false;
    for place in Place::all(std::env::var("DATABASE_URL").ok()).await {
        let start = Instant::now();
        let database = place.describe().await;
        let measured = tokio::select! {
            lines = request.measure(&place) => Some(lines),
            _ = tokio::signal::ctrl_c() => None,
        };
        place.clean_up().await;
        let Some(measured) = measured else {
            interrupted = true;
            break;
        };
        add(&mut run["rows"], measured.iter().map(Line::json));
        add(&mut run["databases"], [database]);
        eprintln!("{}: {:.0} s", place.title, start.elapsed().as_secs_f64());
    }
    match &request.json {
        Json::No => {}
        Json::Print => println!("{run:#}"),
        Json::Write(file) => std::fs::write(file, format!("{run:#}\n")).expect("the JSON file"),
    }
    if interrupted {
        std::process::exit(130);
    }
}

fn add(list: &mut Value, values: impl IntoIterator<Item = Value>) {
    list.as_array_mut().expect("a list").extend(values);
}

/// The parsed command line.
struct Request {
    only: Vec<char>,
    pace: Pace,
    json: Json,
}

enum Json {
    No,
    Print,
    Write(String),
}

impl Request {
    fn from_arguments() -> Result<Self, String> {
        let mut request = Self { only: "ABCDEFGHIJKLMN".chars().collect(), pace: Pace::FULL, json: Json::No };
        let mut arguments = std::env::args().skip(1).peekable();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--only" => {
                    let list = arguments.next().ok_or("--only what?")?.to_uppercase();
                    request.only = list.chars().filter(|c| *c != ',').collect();
                    if !request.only.iter().all(|c| ('A'..='N').contains(c)) {
                        return Err(format!("unknown metric in {list}"));
                    }
                }
                "--quick" => request.pace = Pace::QUICK,
                "--json" => {
                    request.json = match arguments.next_if(|next| !next.starts_with('-')) {
                        Some(file) => Json::Write(file),
                        None => Json::Print,
                    };
                }
                "--bench" => {} // from cargo
                other => return Err(format!("unknown argument {other}")),
            }
        }
        Ok(request)
    }

    /// Describes the run as JSON, without databases and rows.
    fn describe(&self) -> Value {
        json!({
            "date": machine::now(),
            "version": env!("CARGO_PKG_VERSION"),
            "commit": machine::commit(),
            "build": if cfg!(debug_assertions) { "debug" } else { "release" },
            "pace": self.pace.name,
            "machine": machine::machine(),
            "databases": [],
            "rows": [],
        })
    }

    /// Runs the requested measurements, and prints each line as soon as it is known.
    async fn measure(&self, place: &Place) -> Vec<Line> {
        let table = !matches!(self.json, Json::Print);
        if table {
            println!("\n{}\n{}", place.title, Line::HEAD);
        }
        let mut lines = Vec::new();
        for metric in &self.only {
            let more = match metric {
                'A' => cycle::measure(place, &self.pace).await,
                'B' => throughput::measure(place, &self.pace).await,
                'C' => handover::measure(place, &self.pace).await,
                'D' => renewal::measure(place, &self.pace).await,
                'E' => growth::measure(place, &self.pace).await,
                'F' => processes::latency(place, &self.pace).await,
                'G' => processes::contention(place, &self.pace).await,
                'H' => processes::statements(place, &self.pace).await,
                'I' => rows::measure(place, &self.pace).await,
                'J' => once::measure(place, &self.pace).await,
                'K' => quorum::measure(place, &self.pace).await,
                'L' => queue::measure(place, &self.pace).await,
                'M' => together::measure(place, &self.pace).await,
                _ => command::measure(place, &self.pace).await,
            };
            if table {
                for line in &more {
                    println!("{line}");
                }
            }
            lines.extend(more);
        }
        lines
    }
}
