//! Simulated runs in virtual time, from a seed: several engines, one model of a store, callers, and
//! faults of all kinds.
//!
//! `scripts/simulate SEED` replays a seed and prints its story. A failing run prints the shortest
//! command to repeat it.

mod checker;
mod profile;
mod world;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use crate::mutation::{self, Mutation};
use profile::Profile;
use world::World;

/// Runs one seed. `Err`: the violated invariant.
fn run(seed: u64, mutation: Option<Mutation>, tells: bool) -> Result<world::Summary, String> {
    mutation::activate(mutation);
    let result = World::new(seed, Profile::from_seed(seed), tells).run();
    mutation::activate(None);
    result
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// The number of seeds in the unit tier. `SQLOCK_SEEDS` sets another number, `SQLOCK_FIRST_SEED`
/// another first seed.
#[test]
fn seeds_violate_nothing() {
    let first = number("SQLOCK_FIRST_SEED").unwrap_or(0);
    let count = number("SQLOCK_SEEDS").unwrap_or(1_000);
    let next = AtomicU64::new(first);
    let failed = AtomicBool::new(false);
    let started = Instant::now();
    let total = std::sync::Mutex::new(world::Summary::default());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut sum = world::Summary::default();
                while !failed.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        break;
                    }
                    let ended = std::panic::catch_unwind(|| run(seed, None, false));
                    match ended.unwrap_or_else(|_| Err("a panic".to_owned())) {
                        Ok(summary) => sum.add(&summary),
                        Err(violation) => {
                            failed.store(true, Ordering::Relaxed);
                            println!("seed {seed}: {violation}\nrepeat: scripts/simulate {seed}");
                        }
                    }
                }
                total.lock().expect("no panic").add(&sum);
            });
        }
    });
    let minutes = started.elapsed().as_secs_f64() / 60.0;
    println!("{count} seeds, {:.0} a minute; {}", count as f64 / minutes, total.lock().expect("no panic"));
    assert!(!failed.load(Ordering::Relaxed), "a seed violates a promise: see above");
}

/// A seed must give the same run each time, so that a failing seed can be replayed.
#[test]
fn seed_repeats_its_run_exactly() {
    // Outages choose among open transactions, so their order must be the same each time.
    for seed in (0..1_000).filter(|seed| Profile::from_seed(*seed).outages > 0) {
        assert_eq!(run(seed, None, false), run(seed, None, false), "seed {seed}");
    }
}

/// Prints the story of the seed in `SQLOCK_SEED`.
#[test]
#[ignore = "scripts/simulate runs it"]
fn story_of_a_seed() {
    let seed = number("SQLOCK_SEED").expect("SQLOCK_SEED");
    let name = std::env::var("SQLOCK_MUTATION").ok();
    let mutation = mutation::ALL.iter().copied().find(|m| name.as_deref() == Some(&format!("{m:?}")));
    match run(seed, mutation, true) {
        Ok(summary) => println!("nothing violated: {summary}"),
        Err(violation) => panic!("{violation}"),
    }
}

/// Each known mistake must be found within a limited number of seeds.
#[test]
#[ignore = "scripts/simulate mutations runs it"]
fn mutations_are_found() {
    let most = number("SQLOCK_SEEDS").unwrap_or(100_000);
    let only = std::env::var("SQLOCK_MUTATION").ok();
    let mut missed = Vec::new();
    for mutation in mutation::ALL {
        if only.as_deref().is_some_and(|only| only != format!("{mutation:?}")) {
            continue;
        }
        let found =
            (0..most).find_map(|seed| run(seed, Some(*mutation), false).err().map(|violation| (seed, violation)));
        match found {
            Some((seed, violation)) => {
                println!("{:<28} after {:>5} seeds: {violation}", format!("{mutation:?}"), seed + 1)
            }
            None => {
                println!("{:<28} NOT FOUND in {most} seeds", format!("{mutation:?}"));
                missed.push(mutation);
            }
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
