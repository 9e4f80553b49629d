//! D. Keeping ten thousand leases.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sqlock::{Lease, Locks};
use tokio::task::JoinSet;

use crate::floor::{Bare, Held};
use crate::measure::{Aim, Line, Pace, median};
use crate::place::{Kind, Place};

const LEASES: usize = 10_000;

/// All are renewed in the background at a third of this: long after they were acquired.
const TTL: Duration = Duration::from_secs(18);

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let locks = place.locks();
    let mut floor = place.floor(LEASES).await;
    let connections = floor.len();
    let mut held = acquire_one_by_one(&mut floor).await;
    let leases = acquire_all(&locks, Duration::from_secs(3600)).await;
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..pace.rounds.min(5) {
        ours.push(extend_all(&leases).await.as_secs_f64() * 1e3);
        theirs.push(renew_one_by_one(&mut floor, &mut held).await.as_secs_f64() * 1e3);
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
    }];
    if let Some(background) = statements_in_background(place).await {
        lines.push(background);
    }
    lines
}

async fn acquire_all(locks: &Locks, ttl: Duration) -> Vec<Arc<Lease>> {
    let mut running = JoinSet::new();
    for i in 0..LEASES {
        let request = locks.lease(format!("many/{i}")).ttl(ttl);
        running.spawn(async move { Arc::new(request.acquire().await.expect("acquire")) });
    }
    running.join_all().await
}

/// The time until every lease is confirmed for longer, each by a task that holds it.
async fn extend_all(leases: &[Arc<Lease>]) -> Duration {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for lease in leases {
        let lease = Arc::clone(lease);
        running.spawn(async move { lease.extend(Duration::from_secs(3600)).await.expect("extend") });
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

/// How many statements the keeper needs to renew all leases once.
async fn statements_in_background(place: &Place) -> Option<Line> {
    let mut counter = place.bare().await;
    let locks = place.locks();
    let leases = acquire_all(&locks, TTL).await;
    let acquired = Instant::now();
    let before = counter.statements().await?;
    let remaining: Vec<Duration> = leases.iter().map(|lease| lease.remaining()).collect();
    let read = Instant::now();
    assert!(acquired.elapsed() < TTL / 4, "this machine is too slow for so many leases");
    let mut left: Vec<usize> = (0..LEASES).collect();
    while !left.is_empty() {
        tokio::time::sleep(Duration::from_millis(20)).await;
        // Renewed is what has more time left than a clock that only runs down would show.
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
        note: String::new(),
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

/// The time until every row was updated, each connection with its share.
async fn renew_one_by_one(floor: &mut Vec<Bare>, held: &mut Vec<Vec<Held>>) -> Duration {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for (mut bare, held) in floor.drain(..).zip(held.drain(..)) {
        running.spawn(async move {
            for held in &held {
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
