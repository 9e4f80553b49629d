//! E. A name that is repeatedly acquired and released: neither its table nor its time may grow.

use std::time::Instant;

use crate::measure::{Aim, Line, Pace, median};
use crate::place::Place;

/// The cycles between two readings of the clock.
const LAP: usize = 1000;

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let locks = place.locks();
    let mut meter = place.bare().await;
    meter.clear().await;
    locks.lease("worn").acquire().await.expect("acquire").release().await.expect("release");
    let before = meter.size().await;
    let (cycles, at_most) = (pace.cycles, pace.at_most);
    let laps = tokio::spawn(async move {
        let start = Instant::now();
        let mut laps = Vec::new();
        while laps.len() < cycles / LAP && start.elapsed() < at_most {
            let lap = Instant::now();
            for _ in 0..LAP {
                locks.lease("worn").acquire().await.expect("acquire").release().await.expect("release");
            }
            laps.push(lap.elapsed().as_secs_f64() * 1e3);
        }
        locks.shutdown().await.expect("shutdown");
        laps
    });
    let laps = laps.await.expect("no panic");
    let after = meter.size().await;
    meter.close().await;

    let tenth = (laps.len() / 10).max(1);
    let (first, last) = (median(&laps[..tenth]), median(&laps[laps.len() - tenth..]));
    let done = laps.len() * LAP;
    let line = |what: &str, unit, ours: f64, floor: f64, aim, note| Line {
        database: place.title.clone(),
        metric: 'E',
        what: what.into(),
        unit,
        ours,
        floor: Some(floor),
        ratios: vec![ours / floor],
        aim,
        note,
        ..Line::default()
    };
    vec![
        line("1000 cycles: at the end, start", "ms", last, first, None, format!("{done} cycles on one name")),
        line(
            "table size: at the end, start",
            "kB",
            after as f64 / 1024.0,
            before as f64 / 1024.0,
            Some(Aim::AtMost(2.0)),
            format!("{} kB more", (after - before) / 1024),
        ),
    ]
}
