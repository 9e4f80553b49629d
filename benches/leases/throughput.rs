//! B. Cycles per second on distinct names.

use std::time::{Duration, Instant};

use sqlock::Locks;
use tokio::task::JoinSet;

use crate::batching::{Batching, Sender};
use crate::cpu::Usage;
use crate::floor::Bare;
use crate::measure::{Aim, Line, Pace, median};
use crate::place::{Kind, Place};
use crate::redis::{Redis, RedisClient};

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let locks = place.locks();
    let meter = place.meter().await;
    let batching = Batching::start(place).await;
    let redis = Redis::start().await;
    let mut lines = Vec::new();
    for tasks in [1, 64, 1024] {
        let mut floor = place.floor(tasks).await;
        let connections = floor.len();
        let (mut ours, mut theirs, mut batched, mut of_redis) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut cpu, mut floor_cpu, mut batched_cpu) = (Usage::default(), Usage::default(), Usage::default());
        // The first round creates the rows and warms up.
        for round in 0..=pace.rounds {
            let start = meter.start();
            let client = locks.clone();
            let rate = cycles_of_tasks(tasks, pace.turn, move |name| cycle(client.clone(), name)).await;
            if round > 0 {
                cpu.add(&meter, &start, rate);
                ours.push(rate);
            }
            let start = meter.start();
            let rate = cycles_of_connections(&mut floor, tasks, pace.turn).await;
            if round > 0 {
                floor_cpu.add(&meter, &start, rate);
                theirs.push(rate);
            }
            let start = meter.start();
            let sender = batching.sender();
            let rate = cycles_of_tasks(tasks, pace.turn, move |name| batched_cycle(sender.clone(), name)).await;
            if round > 0 {
                batched_cpu.add(&meter, &start, rate);
                batched.push(rate);
            }
            if let Some(redis) = &redis {
                let client = redis.client();
                let rate = cycles_of_tasks(tasks, pace.turn, move |name| redis_cycle(client.clone(), name)).await;
                if round > 0 {
                    of_redis.push(rate);
                }
            }
        }
        for bare in floor {
            bare.close().await;
        }
        let line = |peer, rates: &[f64]| Line {
            database: place.title.clone(),
            metric: 'B',
            what: format!("{tasks} tasks, floor of {connections}"),
            peer,
            unit: "cycles/s",
            ours: median(rates),
            floor: Some(median(&theirs)),
            ratios: rates.iter().zip(&theirs).map(|(rate, floor)| rate / floor).collect(),
            ..Line::default()
        };
        let note = format!("batches only: CPU {batched_cpu} µs");
        lines.push(Line { aim: aim(place.kind(), tasks), cpu: Some((cpu, floor_cpu)), note, ..line(None, &ours) });
        lines.push(line(Some("batches only"), &batched));
        if redis.is_some() {
            let aim = (place.kind() == Kind::Postgres && tasks == 1024).then_some(Aim::AtLeast(1.3));
            lines.push(Line {
                what: format!("next to Redis, {tasks} tasks"),
                floor: Some(median(&of_redis)),
                ratios: ours.iter().zip(&of_redis).map(|(ours, redis)| ours / redis).collect(),
                aim,
                ..line(None, &ours)
            });
        }
    }
    if let Some(redis) = redis {
        redis.end().await;
    }
    batching.end().await;
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

async fn cycle(locks: Locks, name: String) {
    let lease = locks.lease(name).acquire().await.expect("acquire");
    lease.release().await.expect("release");
}

async fn batched_cycle(sender: Sender, name: String) {
    sender.acquire_and_release(&name).await;
}

async fn redis_cycle(client: RedisClient, name: String) {
    client.acquire_and_release(&name).await;
}

/// Measures tasks that each acquire and release a name of their own.
async fn cycles_of_tasks<F>(tasks: usize, time: Duration, cycle: impl Fn(String) -> F + Clone + Send + 'static) -> f64
where
    F: Future<Output = ()> + Send,
{
    let start = Instant::now();
    let mut running = JoinSet::new();
    for task in 0..tasks {
        let cycle = cycle.clone();
        running.spawn(async move {
            let mut cycles = 0;
            while start.elapsed() < time {
                cycle(format!("name/{task}")).await;
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
