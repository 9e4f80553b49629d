//! C. One name that many tasks of a process want.

use std::time::{Duration, Instant};

use sqlock::Locks;
use tokio::task::JoinSet;

use crate::cpu::Usage;
use crate::floor::Bare;
use crate::measure::{Aim, Line, Pace, median};
use crate::place::Place;

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let locks = place.locks();
    let mut bare = place.bare().await;
    let mut counter = place.bare().await;
    let meter = place.meter().await;
    let mut lines = Vec::new();
    for tasks in [8, 64, 128] {
        let (mut cpu, mut floor_cpu) = (Usage::default(), Usage::default());
        let (mut ours, mut floor, mut fairness) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..pace.rounds {
            let start = meter.start();
            let turns = turns(&locks, tasks, pace.turn).await;
            cpu.add(&meter, &start, turns.rate);
            ours.push(turns.rate);
            fairness.push(turns.fairness);
            let start = meter.start();
            let rate = updates(&mut bare, tasks, pace.turn).await;
            floor_cpu.add(&meter, &start, rate);
            floor.push(rate);
        }
        let statements = statements(&locks, tasks, pace.turn, &mut counter).await;
        lines.push(Line {
            database: place.title.clone(),
            metric: 'C',
            what: format!("{tasks} tasks on one name"),
            unit: "hand-overs/s",
            ours: median(&ours),
            floor: Some(median(&floor)),
            ratios: ours.iter().zip(&floor).map(|(ours, floor)| ours / floor).collect(),
            // No queue can beat a chain of bare updates.
            aim: Some(Aim::AtLeast(0.8)),
            cpu: Some((cpu, floor_cpu)),
            note: format!(
                "fairness {:.2}{}",
                median(&fairness),
                statements.map_or(String::new(), |n| format!(", {n:.2} statements each")),
            ),
            ..Line::default()
        });
    }
    locks.shutdown().await.expect("shutdown");
    lines
}

struct Turns {
    count: u32,
    rate: f64,
    /// The ratio of the fewest turns of a task to the most.
    fairness: f64,
}

async fn turns(locks: &Locks, tasks: usize, time: Duration) -> Turns {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for _ in 0..tasks {
        let locks = locks.clone();
        running.spawn(async move {
            let mut turns = 0;
            while start.elapsed() < time {
                let lease = locks.lease("hot").acquire().await.expect("acquire");
                turns += 1;
                lease.release().await.expect("release");
            }
            turns
        });
    }
    let turns: Vec<u32> = running.join_all().await;
    let count: u32 = turns.iter().sum();
    let fewest = turns.iter().min().copied().unwrap_or_default();
    let most = turns.iter().max().copied().unwrap_or_default();
    Turns {
        count,
        rate: f64::from(count) / start.elapsed().as_secs_f64(),
        fairness: f64::from(fewest) / f64::from(most),
    }
}

/// Passes a row from owner to owner, without waiters.
async fn updates(bare: &mut Bare, tasks: usize, time: Duration) -> f64 {
    let owners: Vec<String> = (0..tasks).map(|task| format!("{task:032x}")).collect();
    let start = Instant::now();
    let mut held = bare.acquire("hot", &owners[0]).await;
    let mut updates = 0;
    while start.elapsed() < time {
        updates += 1;
        held = bare.hand_over(held, &owners[updates as usize % tasks]).await;
    }
    bare.release(&held).await;
    f64::from(updates) / start.elapsed().as_secs_f64()
}

/// Measures the statements per hand-over, as the server counts them.
async fn statements(locks: &Locks, tasks: usize, time: Duration, counter: &mut Bare) -> Option<f64> {
    let before = counter.statements().await?;
    let turns = turns(locks, tasks, time).await;
    let after = counter.statements().await?;
    Some((after - before) as f64 / f64::from(turns.count))
}
