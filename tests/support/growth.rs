//! How the time of a lease grows with what is in the database: names in a table of many, with a
//! sweep beside them; waiters for one name; clients with leases; and a snapshot that is held open.
//! Times are only printed. With `SOAK_JSON=FILE`, each row is also appended to the file, as a line of
//! JSON for `scripts/charts --growth`.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sqlock::{Lease, Locks};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::sleep;

use super::any_pool::{AnyPool, on_pool};
use super::fill::{DIGITS, NameState};
use super::{Database, Place};

/// The smallest table of names. Each next one has ten times as many.
const FEWEST_NAMES: usize = 10_000;

/// The names of the measured cycles. They lie between those that fill the table.
const OWN_NAMES: usize = 1_000;

/// For how long the cycles of a row are measured.
const WINDOW: Duration = Duration::from_secs(5);

/// How long a name must have been free before it is swept. The names of the cycles have not.
const RETENTION: Duration = Duration::from_secs(3600);

const WAITERS: [usize; 4] = [10, 100, 1_000, 10_000];
const WAITING_CLIENTS: usize = 4;
const CLIENTS: [usize; 3] = [1, 10, 100];
const LEASES_OF_A_CLIENT: usize = 100;

/// The longest time for the cycles beside a snapshot, and their greatest number.
const SNAPSHOT: Duration = Duration::from_secs(60);
const CYCLES: usize = 200_000;

/// The same on SQLite, whose log grows until the snapshot ends.
const CYCLES_ON_SQLITE: usize = 20_000;

/// Measures with up to `count` names in the table.
pub(super) async fn soak(place: &Place, count: usize) -> bool {
    let locks = place.database.locks().build();
    locks.migrate().await.expect("migrate");
    println!("    {:<33}{:^22}{:^33}", "", "new name", "known name");
    println!("    {:<33}{:>11}{:>11}{:>11}{:>11}{:>11}", "names in the table", "p50", "p99", "p50", "p99", "longest");
    names(place, &locks, 0, NameState::Free).await;
    for state in [NameState::Free, NameState::Held, NameState::Expired] {
        let sizes = std::iter::successors(Some(FEWEST_NAMES), |size| size.checked_mul(10));
        for size in sizes.take_while(|size| *size <= count) {
            names(place, &locks, size, state).await;
        }
    }
    locks.shutdown().await.expect("shutdown");
    place.database.fill_names(0, NameState::Free).await;

    println!("    {:<33}{:>11}{:>14}{:>14}", "waiters for one name", "queued", "hand-overs/s", "bytes each");
    for count in WAITERS {
        waiters(place, count).await;
    }
    println!("    {:<33}{:>14}{:>16}", "clients with 100 leases each", "statements/s", "server's CPU, %");
    for count in CLIENTS {
        clients(place, count).await;
    }
    snapshot(place).await;
    true
}

/// Appends a row to the file of `SOAK_JSON`.
async fn record(place: &Place, what: &str, count: usize, mut row: Value) {
    let Some(file) = std::env::var_os("SOAK_JSON") else {
        return;
    };
    row["database"] = place.database.version().await.into();
    row["what"] = what.into();
    row["count"] = count.into();
    let mut file = OpenOptions::new().create(true).append(true).open(file).expect("the file of SOAK_JSON");
    writeln!(file, "{row}").expect("a line");
}

/// The times of cycles: an acquisition and a release.
struct Times(Vec<Duration>);

impl Times {
    /// Returns microseconds.
    fn json(&self) -> Value {
        let micros = |part| self.at(part).as_secs_f64() * 1e6;
        json!({ "p50": micros(0.5), "p99": micros(0.99), "longest": micros(1.0) })
    }

    /// Returns an element of the sorted times.
    fn at(&self, part: f64) -> Duration {
        let last = self.0.len().saturating_sub(1);
        self.0.get((last as f64 * part) as usize).copied().unwrap_or_default()
    }
}

impl From<&[Duration]> for Times {
    fn from(times: &[Duration]) -> Self {
        let mut times = times.to_vec();
        times.sort_unstable();
        Self(times)
    }
}

/// The median and the 99th percentile; with `#`, also the longest time.
impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = if f.alternate() { &[0.5, 0.99, 1.0][..] } else { &[0.5, 0.99] };
        parts.iter().try_for_each(|part| write!(f, "{:>11}", format!("{:.1?}", self.at(*part))))
    }
}

/// Runs one cycle after another, at least one with each name, until the task has ended.
async fn cycles<T>(locks: &Locks, names: &[String], until: &JoinHandle<T>) -> Vec<Duration> {
    let mut times = Vec::new();
    for name in names.iter().cycle() {
        if times.len() >= names.len() && until.is_finished() {
            break;
        }
        let start = Instant::now();
        locks.lease(name.as_str()).acquire().await.expect("acquire").release().await.expect("release");
        times.push(start.elapsed());
    }
    times
}

/// Cycles on names of a table with `count` others, alone and beside a sweep.
async fn names(place: &Place, locks: &Locks, count: usize, state: NameState) {
    place.database.fill_names(count, state).await;
    let own: Vec<String> =
        (0..OWN_NAMES).map(|i| format!("{:0DIGITS$}/own", i * count.max(OWN_NAMES) / OWN_NAMES)).collect();
    let times = cycles(locks, &own, &tokio::spawn(sleep(WINDOW))).await;
    let (new, known) = times.split_at(OWN_NAMES);
    println!("    {:<33}{}{:#}", format!("{count} {state:?}"), Times::from(new), Times::from(known));
    record(place, &format!("{state:?}"), count, Times::from(known).json()).await;
    if count == 0 {
        return;
    }
    let before = place.database.work().await;
    let sweeper = place.database.locks().build();
    let sweep = tokio::spawn(async move {
        let start = Instant::now();
        let purged = sweeper.sweeper().retention(RETENTION).sweep().await.expect("sweep");
        let time = start.elapsed();
        sweeper.shutdown().await.expect("shutdown");
        (purged, time)
    });
    let times = cycles(locks, &own[..1], &sweep).await;
    let (purged, time) = sweep.await.expect("no panic");
    let written = place.database.work().await.zip(before).map(|((_, after), (_, before))| after - before);
    let mut row = Times::from(&times[..]).json();
    (row["purged"], row["seconds"], row["log"]) = (purged.into(), time.as_secs_f64().into(), written.into());
    record(place, &format!("Sweep of {state:?}"), count, row).await;
    let written = written.map_or(String::new(), |bytes| format!(", {} MB of log", bytes / 1_000_000));
    println!(
        "    {:<33}{:22}{:#}   {purged} purged in {:.1} s{written}",
        "  beside a sweep",
        "",
        Times::from(&times[..]),
        time.as_secs_f64()
    );
}

/// Waiters in four clients: the time until all wait, and the rate at which all of them get
/// the name in turn.
async fn waiters(place: &Place, count: usize) {
    let clients: Vec<Locks> = (0..WAITING_CLIENTS).map(|_| place.database.locks().build()).collect();
    let holder = clients[0].lease("queue").acquire().await.expect("acquire");
    let (memory, start) = (resident(), Instant::now());
    let mut waiting = JoinSet::new();
    for i in 0..count {
        let locks = clients[i % WAITING_CLIENTS].clone();
        waiting.spawn(async move {
            locks.lease("queue").acquire().await.expect("acquire").release().await.expect("release");
        });
    }
    // Of the waiters of a client, only the first has an entry in the database. The client of the
    // holder may need none.
    while clients.iter().map(|client| client.health().waiting).sum::<usize>() < count
        || clients[0].waiters("queue").await.expect("waiters").len() < WAITING_CLIENTS - 1
    {
        assert!(waiting.try_join_next().is_none(), "a waiter has ended");
        sleep(Duration::from_millis(20)).await;
    }
    let (queued, memory) = (start.elapsed(), resident().saturating_sub(memory) / count);
    let start = Instant::now();
    holder.release().await.expect("release");
    waiting.join_all().await;
    let rate = (count + 1) as f64 / start.elapsed().as_secs_f64();
    println!("    {count:<33}{:>11}{rate:>14.0}{memory:>14}", format!("{:.2} s", queued.as_secs_f64()));
    let row = json!({ "queued": queued.as_secs_f64(), "rate": rate, "bytes": memory });
    record(place, "waiters", count, row).await;
    for client in clients {
        client.shutdown().await.expect("shutdown");
    }
}

/// Reads the resident memory of this process, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("there is a /proc");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("the resident memory");
    let kilobytes: usize = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kilobytes * 1024
}

/// The work of the server while clients keep their leases.
async fn clients(place: &Place, count: usize) {
    let mut held: Vec<(Locks, Vec<Lease>)> = Vec::new();
    for client in 0..count {
        // Two connections each: a server allows some hundreds.
        let locks = place.database.locks().connections(1).build();
        let mut leases = Vec::new();
        for i in 0..LEASES_OF_A_CLIENT {
            leases.push(locks.lease(format!("{client}/{i}")).acquire().await.expect("acquire"));
        }
        held.push((locks, leases));
    }
    // Leases of the first second are looked up once, after the client has registered.
    sleep(WINDOW).await;
    let before = (place.database.work().await, place.database.processor_time().await);
    let start = Instant::now();
    sleep(2 * WINDOW).await;
    let (work, processor) = (place.database.work().await, place.database.processor_time().await);
    let seconds = start.elapsed().as_secs_f64();
    let statements = work.zip(before.0).map(|((after, _), (before, _))| (after - before) as f64 / seconds);
    let share = processor.zip(before.1).map(|(after, before)| (after - before).as_secs_f64() / seconds * 100.0);
    let number = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.1}"));
    println!("    {count:<33}{:>14}{:>16}", number(statements), number(share));
    record(place, "clients", count, json!({ "statements": statements, "processor": share })).await;
    for (locks, leases) in held {
        let lost = leases.iter().filter(|lease| !lease.is_held()).count();
        assert_eq!(lost, 0, "a lease was lost");
        drop(leases);
        locks.shutdown().await.expect("shutdown");
    }
}

/// Cycles on one name beside a transaction that keeps its snapshot open.
async fn snapshot(place: &Place) {
    let (begin, most) = match place.database {
        Database::Postgres(_) => ("BEGIN ISOLATION LEVEL REPEATABLE READ", CYCLES),
        Database::MySql(_) => ("START TRANSACTION", CYCLES),
        Database::Sqlite(_) => ("BEGIN", CYCLES_ON_SQLITE),
    };
    let pool = AnyPool::open(&place.url, 1);
    let locks = place.database.locks().build();
    let (mut times, start) = (Vec::new(), Instant::now());
    on_pool!(&pool, pool => {
        let mut snapshot = pool.begin_with(begin).await.expect("begin");
        sqlx::query("SELECT count(*) FROM sqlock_lease").execute(&mut *snapshot).await.expect("a snapshot");
        while times.len() < most && start.elapsed() < SNAPSHOT {
            let start = Instant::now();
            locks.lease("hot").acquire().await.expect("acquire").release().await.expect("release");
            times.push(start.elapsed());
        }
        snapshot.rollback().await.expect("rollback");
    });
    let part = OWN_NAMES.min(times.len());
    for (i, cycles) in times.chunks_exact(part).enumerate() {
        record(place, "snapshot", i * part, Times::from(cycles).json()).await;
    }
    println!("    {:<33}{:>11}{:>11}", "one name, a snapshot held open", "p50", "p99");
    println!("    {:<33}{}", format!("the first {part} cycles"), Times::from(&times[..part]));
    let last = format!("the last {part} of {}", times.len());
    println!("    {last:<33}{}", Times::from(&times[times.len() - part..]));
    locks.shutdown().await.expect("shutdown");
}
