//! Tasks that repeatedly take several names at once, each in its own order, and check that they are
//! alone in the critical sections of these names.

#![allow(dead_code, unreachable_pub, reason = "included by several tests")]

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use sqlock::Locks;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::critical_section::{AccessMode, CriticalSection, Visits};

/// The number of names taken together.
const FEWEST: usize = 2;
const MOST: usize = 4;

/// How several names are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// By one request for all of them, in random order.
    Together,
    /// One after the other, in the order of names that all tasks follow.
    InTurn,
}

impl Strategy {
    pub fn of(word: &str) -> Self {
        match word {
            "together" => Self::Together,
            "in-turn" => Self::InTurn,
            _ => panic!("{word} is no way to take names"),
        }
    }

    pub fn word(self) -> &'static str {
        match self {
            Self::Together => "together",
            Self::InTurn => "in-turn",
        }
    }
}

/// Runs tasks that take some of the names and visit their critical sections, `count` times each.
/// The directory has a critical section for each name.
pub async fn gather(
    locks: &Locks,
    how: Strategy,
    names: usize,
    tasks: usize,
    count: usize,
    dir: &Path,
) -> Result<Visits, String> {
    let mut all = JoinSet::new();
    for _ in 0..tasks {
        let (locks, dir) = (locks.clone(), dir.to_owned());
        all.spawn(async move {
            let mut visits = Visits::default();
            for _ in 0..count {
                let wanted = some_of(names);
                let came = Instant::now();
                let held = take(&locks, how, &wanted).await.map_err(|error| format!("error {error}"))?;
                visits.longest_wait = visits.longest_wait.max(came.elapsed());
                visits.count += 1;
                let enter = |name: &String| CriticalSection::of(dir.join(name)).enter(AccessMode::Alone);
                let inside = wanted.iter().map(enter).collect::<Result<Vec<_>, _>>()?;
                drop(inside);
                held.release().await.map_err(|error| format!("error {error}"))?;
            }
            Ok::<_, String>(visits)
        });
    }
    let mut visits = Visits::default();
    while let Some(ended) = all.join_next().await {
        visits = visits.and(ended.expect("a task does not panic")?);
    }
    Ok(visits)
}

/// A directory for each name.
pub fn make_room(dir: &Path, names: usize) {
    for i in 0..names {
        std::fs::create_dir(dir.join(name(i))).expect("a directory");
    }
}

enum Held {
    Together(sqlock::LeaseAll),
    InTurn(Vec<sqlock::Lease>),
}

impl Held {
    async fn release(self) -> sqlock::Result<()> {
        match self {
            Self::Together(all) => all.release().await,
            Self::InTurn(leases) => {
                for lease in leases {
                    lease.release().await?;
                }
                Ok(())
            }
        }
    }
}

async fn take(locks: &Locks, how: Strategy, wanted: &[String]) -> sqlock::Result<Held> {
    const TTL: Duration = Duration::from_secs(600);
    if how == Strategy::Together {
        let all = locks.lease_all(wanted.iter().cloned()).ttl(TTL).acquire().await?;
        assert_eq!(all.tokens().len(), wanted.len());
        return Ok(Held::Together(all));
    }
    let mut held = Vec::new();
    for name in wanted.iter().collect::<BTreeSet<_>>() {
        held.push(locks.lease(name).ttl(TTL).acquire().await?);
    }
    Ok(Held::InTurn(held))
}

fn name(i: usize) -> String {
    format!("n{i:02}")
}

/// Some names, in random order.
fn some_of(names: usize) -> Vec<String> {
    let mut wanted = Vec::new();
    let many = FEWEST + random(MOST - FEWEST + 1);
    while wanted.len() < many {
        let name = name(random(names));
        if !wanted.contains(&name) {
            wanted.push(name);
        }
    }
    wanted
}

fn random(below: usize) -> usize {
    (Uuid::new_v4().as_u128() % below as u128) as usize
}
