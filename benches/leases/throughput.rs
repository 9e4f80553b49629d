//! B. Cycles per second on distinct names.

use std::time::{Duration, Instant};

use sqlock::Locks;
use tokio::task::JoinSet;

use crate::floor::Bare;
use crate::measure::{Aim, Line, Pace, median};
use crate::place::{Kind, Place};

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let locks = place.locks();
    let mut lines = Vec::new();
    for tasks in [1, 64, 1024] {
        let mut floor = place.floor(tasks).await;
        let connections = floor.len();
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        // The first round creates the rows and warms up.
        for round in 0..=pace.rounds {
            let rate = cycles_of_tasks(&locks, tasks, pace.turn).await;
            let floor_rate = cycles_of_connections(&mut floor, tasks, pace.turn).await;
            if round > 0 {
                ours.push(rate);
                theirs.push(floor_rate);
            }
        }
        for bare in floor {
            bare.close().await;
        }
        lines.push(Line {
            database: place.title.clone(),
            metric: 'B',
            what: format!("{tasks} tasks, floor of {connections}"),
            unit: "cycles/s",
            ours: median(&ours),
            floor: Some(median(&theirs)),
            ratios: ours.iter().zip(&theirs).map(|(ours, floor)| ours / floor).collect(),
            aim: aim(place.kind(), tasks),
            ..Line::default()
        });
    }
    locks.shutdown().await.expect("shutdown");
    lines
}

fn aim(kind: Kind, tasks: usize) -> Option<Aim> {
    let least = match (kind, tasks) {
        (Kind::Postgres, 64) => 4.5,
        (Kind::MySql, 64) => 2.7,
        (Kind::SqliteFull, 64) => 10.0,
        (Kind::SqliteNormal, 64) => 5.0,
        (Kind::Postgres, 1024) => 8.0,
        (Kind::MySql, 1024) => 4.0,
        (Kind::SqliteFull, 1024) => 12.0,
        _ => return None,
    };
    Some(Aim::AtLeast(least))
}

/// Measures tasks that each acquire and release a name of their own.
async fn cycles_of_tasks(locks: &Locks, tasks: usize, time: Duration) -> f64 {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for task in 0..tasks {
        let locks = locks.clone();
        running.spawn(async move {
            let name = format!("name/{task}");
            let mut cycles = 0;
            while start.elapsed() < time {
                let lease = locks.lease(&name).acquire().await.expect("acquire");
                lease.release().await.expect("release");
                cycles += 1;
            }
            cycles
        });
    }
    let cycles: u32 = running.join_all().await.into_iter().sum();
    f64::from(cycles) / start.elapsed().as_secs_f64()
}

/// Measures connections that each serve their share of the names, one after the other.
async fn cycles_of_connections(floor: &mut Vec<Bare>, tasks: usize, time: Duration) -> f64 {
    let start = Instant::now();
    let connections = floor.len();
    let mut running = JoinSet::new();
    for (i, mut bare) in floor.drain(..).enumerate() {
        running.spawn(async move {
            let names: Vec<String> = (i..tasks).step_by(connections).map(|task| format!("name/{task}")).collect();
            let mut cycles = 0;
            while start.elapsed() < time {
                let held =
                    bare.acquire(&names[cycles as usize % names.len()], "0123456789abcdef0123456789abcdef").await;
                bare.release(&held).await;
                cycles += 1;
            }
            (bare, cycles)
        });
    }
    let mut total = 0_u32;
    for (bare, cycles) in running.join_all().await {
        floor.push(bare);
        total += cycles;
    }
    f64::from(total) / start.elapsed().as_secs_f64()
}
