//! D. Keeping ten thousand leases; the round trip of a heartbeat with fewer of them.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sqlock::{Lease, Locks};
use tokio::task::JoinSet;

use crate::floor::{Bare, Held};
use crate::measure::{Aim, Line, Pace, median};
use crate::place::{Kind, Place};

const LEASES: usize = 10_000;

/// A TTL that outlasts every measurement.
const LONG: Duration = Duration::from_secs(3600);

/// The numbers of leases with which heartbeats are measured.
const HELD: [usize; 3] = [1, 100, LEASES];

/// The TTL of leases that are renewed in the background, at a third of it: long after they were
/// acquired.
const TTL: Duration = Duration::from_secs(18);

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let mut meter = place.bare().await;
    meter.clear().await;
    let locks = place.locks();
    let empty = meter.size().await;
    let leases = acquire(&locks, 0..LEASES, LONG).await;
    let full = meter.size().await;
    meter.close().await;
    let mut floor = place.floor(LEASES).await;
    let connections = floor.len();
    let mut held = acquire_one_by_one(&mut floor).await;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..pace.rounds.min(5) {
        ours.push(extend_all(&leases).await.as_secs_f64() * 1e3);
        theirs.push(renew_one_by_one(&mut floor, &mut held, LEASES).await.as_secs_f64() * 1e3);
    }
    let statements = statements_to_extend(&leases, place).await;
    locks.shutdown().await.expect("shutdown");
    drop(leases);
    let most = match place.kind() {
        Kind::Postgres => 1.0 / 15.0,
        Kind::MySql => 1.0 / 10.0,
        Kind::SqliteFull | Kind::SqliteNormal => 1.0 / 40.0,
    };
    let mut lines = vec![Line {
        database: place.title.clone(),
        metric: 'D',
        what: format!("renew {LEASES} leases, floor of {connections}"),
        unit: "ms",
        ours: median(&ours),
        floor: Some(median(&theirs)),
        ratios: ours.iter().zip(&theirs).map(|(ours, floor)| ours / floor).collect(),
        aim: Some(Aim::AtMost(most)),
        note: statements.map_or(String::new(), |n| format!("{n} statements when extended by {LEASES} tasks")),
        ..Line::default()
    }];
    lines.push(Line {
        database: place.title.clone(),
        metric: 'D',
        what: format!("size of {LEASES} names"),
        unit: "B each",
        ours: (full - empty) as f64 / LEASES as f64,
        ..Line::default()
    });
    lines.extend(heartbeats(place, pace, &mut floor, &mut held).await);
    if let Some(background) = statements_in_background(place).await {
        lines.push(background);
    }
    lines
}

/// Measures the round trip of a heartbeat, next to a statement for each lease.
async fn heartbeats(place: &Place, pace: &Pace, floor: &mut Vec<Bare>, held: &mut Vec<Vec<Held>>) -> Vec<Line> {
    let locks = place.locks();
    let mut leases = Vec::new();
    let mut lines = Vec::new();
    for count in HELD {
        leases.extend(acquire(&locks, leases.len()..count, LONG).await);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..pace.rounds.min(5) {
            ours.push(next_heartbeat(&locks).await.as_secs_f64() * 1e6);
            theirs.push(renew_one_by_one(floor, held, count).await.as_secs_f64() * 1e6);
        }
        lines.push(Line {
            database: place.title.clone(),
            metric: 'D',
            what: format!("heartbeat with {count} leases"),
            unit: "µs",
            ours: median(&ours),
            floor: Some(median(&theirs)),
            ratios: ours.iter().zip(&theirs).map(|(ours, floor)| ours / floor).collect(),
            ..Line::default()
        });
    }
    locks.shutdown().await.expect("shutdown");
    lines
}

/// Waits for a heartbeat that is sent after this call, and returns its round trip.
async fn next_heartbeat(locks: &Locks) -> Duration {
    let start = Instant::now();
    loop {
        tokio::time::sleep(Duration::from_millis(5)).await;
        let health = locks.health();
        if let (Some(ago), Some(round_trip)) = (health.last_heartbeat, health.round_trip)
            && ago < start.elapsed()
        {
            return round_trip;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "no heartbeat is answered");
    }
}

async fn acquire(locks: &Locks, names: Range<usize>, ttl: Duration) -> Vec<Arc<Lease>> {
    let mut running = JoinSet::new();
    for i in names {
        let request = locks.lease(format!("many/{i}")).ttl(ttl);
        running.spawn(async move { Arc::new(request.acquire().await.expect("acquire")) });
    }
    running.join_all().await
}

/// Measures the time until every lease is extended, each by the task that holds it.
async fn extend_all(leases: &[Arc<Lease>]) -> Duration {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for lease in leases {
        let lease = Arc::clone(lease);
        running.spawn(async move { lease.extend(LONG).await.expect("extend") });
    }
    running.join_all().await;
    start.elapsed()
}

async fn statements_to_extend(leases: &[Arc<Lease>], place: &Place) -> Option<i64> {
    let mut counter = place.bare().await;
    let before = counter.statements().await?;
    extend_all(leases).await;
    Some(counter.statements().await? - before)
}

/// Measures the number of background statements to renew all leases once.
async fn statements_in_background(place: &Place) -> Option<Line> {
    let mut counter = place.bare().await;
    let locks = place.locks();
    let leases = acquire(&locks, 0..LEASES, TTL).await;
    let acquired = Instant::now();
    let before = counter.statements().await?;
    let remaining: Vec<Duration> = leases.iter().map(|lease| lease.remaining()).collect();
    let read = Instant::now();
    assert!(acquired.elapsed() < TTL / 4, "this machine is too slow for so many leases");
    let mut left: Vec<usize> = (0..LEASES).collect();
    while !left.is_empty() {
        tokio::time::sleep(Duration::from_millis(20)).await;
        // A lease is renewed if it has more time left than it would have without a renewal.
        left.retain(|&i| leases[i].remaining() + read.elapsed() < remaining[i] + TTL / 10);
        assert!(acquired.elapsed() < TTL, "not renewed in time");
    }
    let statements = counter.statements().await? - before;
    locks.shutdown().await.expect("shutdown");
    Some(Line {
        database: place.title.clone(),
        metric: 'D',
        what: format!("renew {LEASES} in the background"),
        unit: "statements",
        ours: statements as f64,
        floor: Some(LEASES as f64),
        ratios: vec![statements as f64 / LEASES as f64],
        aim: Some(Aim::AtMost(0.001)),
        ..Line::default()
    })
}

async fn acquire_one_by_one(floor: &mut Vec<Bare>) -> Vec<Vec<Held>> {
    let connections = floor.len();
    let mut running = JoinSet::new();
    for (i, mut bare) in floor.drain(..).enumerate() {
        running.spawn(async move {
            let mut held = Vec::new();
            for name in (i..LEASES).step_by(connections) {
                held.push(bare.acquire(&format!("many/{name}"), "0123456789abcdef0123456789abcdef").await);
            }
            (bare, held)
        });
    }
    let done = running.join_all().await;
    let (bare, held): (Vec<Bare>, Vec<Vec<Held>>) = done.into_iter().unzip();
    *floor = bare;
    held
}

/// Measures the time until `count` rows were updated, each connection with its share.
async fn renew_one_by_one(floor: &mut Vec<Bare>, held: &mut Vec<Vec<Held>>, count: usize) -> Duration {
    let start = Instant::now();
    let connections = floor.len();
    let mut running = JoinSet::new();
    for (i, (mut bare, held)) in floor.drain(..).zip(held.drain(..)).enumerate() {
        let share = (count + connections - 1 - i) / connections;
        running.spawn(async move {
            for held in held.iter().take(share) {
                bare.renew(held).await;
            }
            (bare, held)
        });
    }
    let done = running.join_all().await;
    let elapsed = start.elapsed();
    (*floor, *held) = done.into_iter().unzip();
    elapsed
}
