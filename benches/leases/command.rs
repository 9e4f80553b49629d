//! N. The time of `sqlock run NAME -- true`, next to `flock FILE true`.

use std::process::{Command, Stdio};
use std::time::Instant;

use tempfile::NamedTempFile;

use crate::measure::{Line, Pace, median};
use crate::place::{Kind, Place};

/// How often each command runs in a round.
const RUNS: usize = 6;

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let file = NamedTempFile::new().expect("a temporary file");
    let mut flock = Command::new("flock");
    flock.arg(file.path()).arg("true");
    let mut sqlock = Command::new(env!("CARGO_BIN_EXE_sqlock"));
    sqlock.args(["run", "bench", "--database-url", &place.url(), "--", "true"]);
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..pace.rounds {
        ours.push(median(&(0..RUNS).map(|_| millis(&mut sqlock)).collect::<Vec<_>>()));
        floor.push(median(&(0..RUNS).map(|_| millis(&mut flock)).collect::<Vec<_>>()));
    }
    let most = match place.kind() {
        Kind::Postgres => 25.0,
        Kind::MySql if place.title.contains("Maria") => 20.0,
        Kind::MySql => 40.0,
        Kind::SqliteFull | Kind::SqliteNormal => 12.0,
    };
    let time = median(&ours);
    vec![Line {
        database: place.title.clone(),
        metric: 'N',
        what: "sqlock run x -- true, next to flock".into(),
        unit: "ms",
        ours: time,
        floor: Some(median(&floor)),
        ratios: ours.iter().zip(&floor).map(|(ours, floor)| ours / floor).collect(),
        note: format!("at most {most} ms: {}", if time <= most { "met" } else { "MISSED" }),
        ..Line::default()
    }]
}

fn millis(command: &mut Command) -> f64 {
    let start = Instant::now();
    let status = command.stdin(Stdio::null()).status().expect("it starts");
    assert!(status.success(), "{command:?}: {status}");
    start.elapsed().as_secs_f64() * 1e3
}
