//! Several names at once, by many processes: checks that all are granted, and compares the time
//! with taking the same names one after the other in a common order.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::critical_section::Visits;
use super::gather::{self, Strategy};
use super::{Database, Place};

const PROCESSES: usize = 8;
const TASKS: usize = 2;
const NAMES: usize = 20;

/// Returns whether no violation was found.
pub(super) async fn soak(place: &Place, count: usize) -> bool {
    let locks = place.database.locks().build();
    locks.migrate().await.expect("migrate");
    let each = count.div_ceil(PROCESSES * TASKS);
    println!("  {PROCESSES} processes of {TASKS} tasks, 2 to 4 of {NAMES} names, {} times", each * PROCESSES * TASKS);
    let mut clean = true;
    for how in [Strategy::Together, Strategy::InTurn] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        gather::make_room(dir.path(), NAMES);
        let deadlocks = place.database.deadlocks().await;
        let start = Instant::now();
        let this = std::env::current_exe().expect("a program knows where it is");
        let start_one = |_| {
            let mut command = Command::new(&this);
            command.args(["gather", &place.url, how.word(), &each.to_string()]).arg(dir.path());
            command.stdout(Stdio::piped()).spawn().expect("a process can be started")
        };
        let processes: Vec<_> = (0..PROCESSES).map(start_one).collect();
        let mut visits = Visits::default();
        for process in processes {
            let output = tokio::task::spawn_blocking(|| process.wait_with_output()).await.expect("no panic");
            let said = String::from_utf8(output.expect("it has ended").stdout).expect("text");
            if said.starts_with("visits") {
                visits = visits.and(Visits::of_line(said.trim()));
            } else {
                println!("    ERROR {said}");
                clean = false;
            }
        }
        let time = start.elapsed();
        let deadlocks = place.database.deadlocks().await.zip(deadlocks).map(|(after, before)| after - before);
        let left = locks.list("").await.expect("list").len();
        println!(
            "    {:<9} {:6.1} a second, longest wait {:.1} s, deadlocks that the server saw {}, held afterwards {left}",
            how.word(),
            visits.count as f64 / time.as_secs_f64(),
            visits.longest_wait.as_secs_f64(),
            deadlocks.map_or("-".to_owned(), |count| count.to_string()),
        );
        clean &= left == 0 && visits.count == (each * PROCESSES * TASKS) as u64;
    }
    // Some entries are deleted in the background.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let rows = place.database.leftovers().await;
    println!("    rows left behind {rows}");
    let _ = locks.shutdown().await;
    clean && rows == 0
}

/// Runs one of the processes.
pub(super) async fn gather(url: &str, how: &str, count: &str, dir: &Path) {
    let locks = Database::open(url).locks().build();
    let count = count.parse().expect("a number");
    let gathered = gather::gather(&locks, Strategy::of(how), NAMES, TASKS, count, dir).await;
    println!("{}", gathered.map_or_else(|failure| failure, Visits::to_line));
}
