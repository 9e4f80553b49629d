//! A. Uncontended acquire and release by one task, next to the server's own lock, a statement that
//! does nothing, and ZooKeeper.

use std::time::{Duration, Instant};

use sqlock::Locks;

use crate::cpu::{Meter, Usage};
use crate::floor::Bare;
use crate::measure::{Aim, Line, Pace, median, percentile};
use crate::peer::ServerLock;
use crate::place::{Kind, Place};
use crate::zookeeper::{ZooKeeper, ZooKeeperLock};

/// Contender and floor take turns after this many cycles, so that they meet the same noise.
const TURN: usize = 25;

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let locks = place.locks();
    let peer = ServerLock::on(place.bare().await);
    let peer_name = peer.as_ref().map(ServerLock::name);
    let meter = place.meter().await;
    let keeper = ZooKeeper::start().await;
    let keeper_lock = match &keeper {
        Some(keeper) => Some(ZooKeeperLock::connect(keeper.port(), "cycle").await),
        None => None,
    };
    let mut parties = Parties { locks, bare: place.bare().await, peer, keeper_lock };
    let (rounds, turn) = (pace.rounds, pace.turn);
    // The cycles run in a task, as in an application, because the main thread is no worker of the
    // runtime.
    let measured = tokio::spawn(async move {
        parties.take_turns(Duration::from_millis(200)).await;
        let mut measured = Vec::new();
        for _ in 0..rounds {
            measured.push(parties.take_turns(turn * 2).await);
        }
        let cpu = (parties.usage(&meter, turn * 2, false).await, parties.usage(&meter, turn * 2, true).await);
        parties.locks.shutdown().await.expect("shutdown");
        parties.bare.close().await;
        (measured, cpu)
    });
    let (rounds, cpu) = measured.await.expect("no panic");

    let p50_aim = match place.kind() {
        Kind::SqliteFull | Kind::SqliteNormal => Aim::AtMost(1.05),
        Kind::Postgres | Kind::MySql => Aim::AtMost(1.2),
    };
    type Times<'a> = &'a dyn Fn(&Round) -> Vec<Duration>;
    let compare = |what: &str, ours: Times<'_>, theirs: Times<'_>, percent, aim| {
        let of_rounds = |times: Times<'_>| -> Vec<f64> {
            rounds.iter().map(|round| percentile(&micros(times(round).into_iter()), percent)).collect()
        };
        let (ours, theirs) = (of_rounds(ours), of_rounds(theirs));
        Line {
            database: place.title.clone(),
            metric: 'A',
            what: what.into(),
            unit: "µs",
            ours: median(&ours),
            floor: Some(median(&theirs)),
            ratios: ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs).collect(),
            aim,
            ..Line::default()
        }
    };
    let line = |what: &str, of: fn(&Cycle) -> Duration, percent, aim| {
        let times = |cycles: &[Cycle]| cycles.iter().map(of).collect();
        compare(what, &|round| times(&round.ours), &|round| times(&round.floor), percent, aim)
    };
    let beside = |what: &str, peer, percent, of: fn(&Round) -> &Vec<Duration>| {
        let theirs: Vec<f64> =
            rounds.iter().map(|round| percentile(&micros(of(round).iter().copied()), percent)).collect();
        Line {
            database: place.title.clone(),
            metric: 'A',
            what: what.into(),
            peer: Some(peer),
            unit: "µs",
            ours: median(&theirs),
            ..Line::default()
        }
    };
    let mut lines = vec![
        line("acquire + release, p50", |c| c.acquire + c.release, 50, Some(p50_aim)),
        line("acquire + release, p99", |c| c.acquire + c.release, 99, None),
        line("acquire, p50", |c| c.acquire, 50, None),
        line("acquire, p99", |c| c.acquire, 99, None),
        line("release, p50", |c| c.release, 50, None),
        beside("a statement, p50", "SELECT 1", 50, |round| &round.pings),
    ];
    lines[0].cpu = Some(cpu);
    if let Some(peer) = peer_name {
        for percent in [50, 99] {
            lines.push(beside(&format!("acquire + release, p{percent}"), peer, percent, |round| &round.peer));
        }
    }
    if let Some(keeper) = keeper {
        keeper.end().await;
        let ours = |round: &Round| round.ours.iter().map(|c| c.acquire + c.release).collect();
        let theirs = |round: &Round| round.keeper.clone();
        let aim = (place.kind() == Kind::Postgres).then_some(Aim::AtMost(0.5));
        lines.push(compare("acquire + release, p50, next to ZooKeeper", &ours, &theirs, 50, aim));
    }
    lines
}

/// The measurements of one round.
#[derive(Default)]
struct Round {
    ours: Vec<Cycle>,
    floor: Vec<Cycle>,
    peer: Vec<Duration>,
    pings: Vec<Duration>,
    keeper: Vec<Duration>,
}

struct Cycle {
    acquire: Duration,
    release: Duration,
}

fn micros(times: impl Iterator<Item = Duration>) -> Vec<f64> {
    times.map(|time| time.as_secs_f64() * 1e6).collect()
}

struct Parties {
    locks: Locks,
    bare: Bare,
    peer: Option<ServerLock>,
    keeper_lock: Option<ZooKeeperLock>,
}

impl Parties {
    async fn take_turns(&mut self, time: Duration) -> Round {
        let Self { locks, bare, peer, keeper_lock } = self;
        let start = Instant::now();
        let mut round = Round::default();
        while start.elapsed() < time {
            for _ in 0..TURN {
                round.ours.push(cycle(locks).await);
            }
            for _ in 0..TURN {
                round.floor.push(bare_cycle(bare).await);
            }
            for _ in 0..TURN {
                let start = Instant::now();
                bare.ping().await;
                round.pings.push(start.elapsed());
            }
            if let Some(peer) = peer {
                for _ in 0..TURN {
                    let start = Instant::now();
                    peer.acquire_and_release().await;
                    round.peer.push(start.elapsed());
                }
            }
            if let Some(lock) = keeper_lock {
                for _ in 0..TURN {
                    let start = Instant::now();
                    lock.acquire().await;
                    lock.release().await;
                    round.keeper.push(start.elapsed());
                }
            }
        }
        round
    }
    /// Measures the processor time of cycles, of sqlock or of the floor.
    async fn usage(&mut self, meter: &Meter, time: Duration, of_floor: bool) -> Usage {
        let (start, clock, mut cycles) = (meter.start(), Instant::now(), 0.0);
        while clock.elapsed() < time {
            if of_floor {
                bare_cycle(&mut self.bare).await
            } else {
                cycle(&self.locks).await
            };
            cycles += 1.0;
        }
        let mut usage = Usage::default();
        usage.add(meter, &start, cycles / clock.elapsed().as_secs_f64());
        usage
    }
}

async fn cycle(locks: &Locks) -> Cycle {
    let start = Instant::now();
    let lease = locks.lease("cycle").acquire().await.expect("acquire");
    let acquired = Instant::now();
    lease.release().await.expect("release");
    Cycle { acquire: acquired - start, release: acquired.elapsed() }
}

async fn bare_cycle(bare: &mut Bare) -> Cycle {
    let start = Instant::now();
    let held = bare.acquire("cycle", "0123456789abcdef0123456789abcdef").await;
    let acquired = Instant::now();
    bare.release(&held).await;
    Cycle { acquire: acquired - start, release: acquired.elapsed() }
}
