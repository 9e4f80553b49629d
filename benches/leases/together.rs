//! M. Several names at once, next to the same names one after the other.

use std::time::{Duration, Instant};

use sqlock::{Lease, Locks};
use tokio::task::JoinSet;

use crate::measure::{Aim, Line, Pace, median};
use crate::place::Place;

const CLIENTS: usize = 8;
const NAMES: usize = 20;

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let clients: Vec<Locks> = (0..CLIENTS).map(|_| place.locks()).collect();
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for round in 0..=pace.rounds {
        let together = visits(&clients, true, pace.turn * 2).await;
        let in_turn = visits(&clients, false, pace.turn * 2).await;
        if round > 0 {
            ours.push(together);
            floor.push(in_turn);
        }
    }
    for locks in clients {
        locks.shutdown().await.expect("shutdown");
    }
    vec![Line {
        database: place.title.clone(),
        metric: 'M',
        what: format!("2 to 4 of {NAMES} names at once"),
        unit: "visits/s",
        ours: median(&ours),
        floor: Some(median(&floor)),
        ratios: ours.iter().zip(&floor).map(|(ours, floor)| ours / floor).collect(),
        aim: Some(Aim::AtLeast(1.0)),
        note: format!("{CLIENTS} clients; the floor is the same names in turn"),
        ..Line::default()
    }]
}

/// Returns how many times a second the clients held all names that they wanted.
async fn visits(clients: &[Locks], together: bool, time: Duration) -> f64 {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for (client, locks) in clients.iter().cloned().enumerate() {
        running.spawn(async move {
            let mut visits = 0;
            while start.elapsed() < time {
                let names = choice(client, visits);
                if together {
                    let all = locks.lease_all(names).acquire().await.expect("acquire");
                    all.release().await.expect("release");
                } else {
                    let mut held: Vec<Lease> = Vec::new();
                    for name in names {
                        held.push(locks.lease(name).acquire().await.expect("acquire"));
                    }
                    for lease in held {
                        lease.release().await.expect("release");
                    }
                }
                visits += 1;
            }
            visits
        });
    }
    let visits: usize = running.join_all().await.into_iter().sum();
    visits as f64 / start.elapsed().as_secs_f64()
}

/// Returns two to four different names in their order, which depend on the client and its visit
/// only.
fn choice(client: usize, visit: usize) -> Vec<String> {
    let mut state = (client * 1_000_003 + visit * 7_919 + 1) as u64;
    let mut next = |below: usize| {
        // SplitMix64.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((mixed ^ (mixed >> 27)) % below as u64) as usize
    };
    let count = 2 + next(3);
    let mut names = Vec::new();
    while names.len() < count {
        let name = format!("seat/{:02}", next(NAMES));
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.sort();
    names
}
