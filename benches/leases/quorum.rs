//! K. A lease on a majority of three servers, next to one on each of them alone.

use std::time::{Duration, Instant};

use sqlock::Locks;
use sqlock::quorum::Quorum;

use crate::measure::{Line, Pace, median, percentile};
use crate::place::{Kind, Place};

/// After this many cycles, the compared parties take turns, so that they meet the same noise.
const TURN: usize = 10;

const SERVERS: [&str; 3] = ["SQLOCK_TEST_POSTGRES_URL", "SQLOCK_TEST_MYSQL_URL", "SQLOCK_TEST_MARIADB_URL"];

/// The measurements of one round, in microseconds.
#[derive(Default)]
struct Round {
    quorum: Vec<f64>,
    /// The times of each database.
    alone: [Vec<f64>; 3],
}

impl Round {
    /// Returns the percentile of the slowest database in this round.
    fn slowest(&self, percent: usize) -> f64 {
        self.alone.iter().map(|times| percentile(times, percent)).fold(0.0, f64::max)
    }
}

/// Measures once, beside PostgreSQL, and only if all three servers exist.
pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let urls: Vec<String> = SERVERS.iter().filter_map(|variable| std::env::var(variable).ok()).collect();
    if place.kind() != Kind::Postgres || urls.len() != SERVERS.len() {
        return Vec::new();
    }
    let mut places = Vec::new();
    for url in urls {
        places.extend(Place::all(Some(url)).await);
    }
    let locks: Vec<Locks> = places.iter().map(Place::locks).collect();
    let (count, turn) = (pace.rounds, pace.turn);
    // The rounds run in a task, as in an application, because the main thread is no worker of the
    // runtime.
    let rounds = tokio::spawn(async move {
        let quorum = Quorum::new(locks.clone());
        // New tables vote when they are older than the TTL.
        let first = quorum.lease("quorum").wait(Duration::from_secs(90)).acquire().await.expect("old enough");
        first.release().await.expect("release");
        take_turns(&quorum, &locks, Duration::from_millis(200)).await;
        let mut rounds = Vec::new();
        for _ in 0..count {
            rounds.push(take_turns(&quorum, &locks, turn * 4).await);
        }
        for locks in &locks {
            locks.shutdown().await.expect("shutdown");
        }
        rounds
    });
    let rounds = rounds.await.expect("no panic");
    for place in &places {
        place.clean_up().await;
    }
    let line = |percent| {
        let ours: Vec<f64> = rounds.iter().map(|round| percentile(&round.quorum, percent)).collect();
        let floor: Vec<f64> = rounds.iter().map(|round| round.slowest(percent)).collect();
        let each = |node: usize| {
            median(&rounds.iter().map(|round| percentile(&round.alone[node], percent)).collect::<Vec<_>>())
        };
        Line {
            database: "a majority of three".into(),
            metric: 'K',
            what: format!("quorum: acquire + release, p{percent}"),
            unit: "µs",
            ours: median(&ours),
            floor: Some(median(&floor)),
            ratios: ours.iter().zip(&floor).map(|(ours, floor)| ours / floor).collect(),
            note: format!("PostgreSQL {:.0}, MySQL {:.0}, MariaDB {:.0}", each(0), each(1), each(2)),
            ..Line::default()
        }
    };
    vec![line(50), line(95)]
}

async fn take_turns(quorum: &Quorum, alone: &[Locks], time: Duration) -> Round {
    let mut round = Round::default();
    let start = Instant::now();
    while start.elapsed() < time {
        for _ in 0..TURN {
            let start = Instant::now();
            let lease = quorum.lease("quorum").acquire().await.expect("acquire");
            lease.release().await.expect("release");
            round.quorum.push(start.elapsed().as_secs_f64() * 1e6);
        }
        for (locks, times) in alone.iter().zip(&mut round.alone) {
            for _ in 0..TURN {
                let start = Instant::now();
                let lease = locks.lease("alone").acquire().await.expect("acquire");
                lease.release().await.expect("release");
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
        }
    }
    round
}
