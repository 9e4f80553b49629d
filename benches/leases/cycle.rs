//! A. Uncontended acquire and release by one task.

use std::time::{Duration, Instant};

use sqlock::Locks;

use crate::floor::Bare;
use crate::measure::{Aim, Line, Pace, median, percentile};
use crate::place::{Kind, Place};

/// Contender and floor take turns after so many cycles, so that they meet the same noise.
const TURN: usize = 25;

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let locks = place.locks();
    let mut bare = place.bare().await;
    let (rounds, turn) = (pace.rounds, pace.turn);
    // In a task, as an application would: the main thread is none of the runtime's workers.
    let sides = tokio::spawn(async move {
        let mut sides = (Vec::new(), Vec::new());
        take_turns(&locks, &mut bare, Duration::from_millis(200)).await;
        for _ in 0..rounds {
            let (ours, floor) = take_turns(&locks, &mut bare, turn * 2).await;
            sides.0.push(ours);
            sides.1.push(floor);
        }
        locks.shutdown().await.expect("shutdown");
        bare.close().await;
        sides
    });
    let (ours, floor) = sides.await.expect("no panic");

    let p50_aim = match place.kind() {
        Kind::SqliteFull | Kind::SqliteNormal => Aim::AtMost(1.05),
        Kind::Postgres | Kind::MySql => Aim::AtMost(1.2),
    };
    let line = |what: &str, of: fn(&Cycle) -> Duration, percent, aim| {
        let of_round = |round: &Vec<Cycle>| percentile(&times(round, of), percent);
        let ours: Vec<f64> = ours.iter().map(of_round).collect();
        let floor: Vec<f64> = floor.iter().map(of_round).collect();
        Line {
            database: place.title.clone(),
            metric: 'A',
            what: what.into(),
            unit: "µs",
            ours: median(&ours),
            floor: Some(median(&floor)),
            ratios: ours.iter().zip(&floor).map(|(ours, floor)| ours / floor).collect(),
            aim,
            note: String::new(),
        }
    };
    vec![
        line("acquire + release, p50", |c| c.acquire + c.release, 50, Some(p50_aim)),
        line("acquire + release, p99", |c| c.acquire + c.release, 99, None),
        line("acquire, p50", |c| c.acquire, 50, None),
        line("acquire, p99", |c| c.acquire, 99, None),
        line("release, p50", |c| c.release, 50, None),
    ]
}

struct Cycle {
    acquire: Duration,
    release: Duration,
}

fn times(cycles: &[Cycle], of: fn(&Cycle) -> Duration) -> Vec<f64> {
    cycles.iter().map(|cycle| of(cycle).as_secs_f64() * 1e6).collect()
}

async fn take_turns(locks: &Locks, bare: &mut Bare, time: Duration) -> (Vec<Cycle>, Vec<Cycle>) {
    let start = Instant::now();
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    while start.elapsed() < time {
        for _ in 0..TURN {
            let start = Instant::now();
            let lease = locks.lease("cycle").acquire().await.expect("acquire");
            let acquired = Instant::now();
            lease.release().await.expect("release");
            ours.push(Cycle { acquire: acquired - start, release: acquired.elapsed() });
        }
        for _ in 0..TURN {
            let start = Instant::now();
            let held = bare.acquire("cycle", "0123456789abcdef0123456789abcdef").await;
            let acquired = Instant::now();
            bare.release(&held).await;
            floor.push(Cycle { acquire: acquired - start, release: acquired.elapsed() });
        }
    }
    (ours, floor)
}
