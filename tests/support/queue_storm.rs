//! A storm on the queue: processes wait for random names, cancel, are stopped and are killed, while
//! each of them also takes names of its own and sweeps; then a check of all their records.
//!
//! No two holders may believe in one name, tokens rise, no caller waits for long while the name is
//! free, and no row is left in the end. The cycles and grants of each minute are printed.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::Read;
use std::ops::Bound;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Signal, kill_process, set_parent_process_death_signal};
use sqlock::{Error, Lease, Locks};
use tokio::time::{Instant, sleep, timeout};

use super::history::{Event, History, Op, Outcome, Recorder, Residue, Rules, Violation, boot_ns, read_dir};
use super::process::Process;
use super::{Database, Place, random, traffic};

const PROCESSES: usize = 6;
const TASKS: usize = 4;
const NAMES: usize = 3;

const TTL: Duration = Duration::from_secs(4);

/// How long a grant lasts without a confirmation.
const CLAIM: Duration = Duration::from_secs(3);

/// The longest stop of a process, during which its leases and its entries expire.
const PAUSE: Duration = Duration::from_secs(5);

/// How long a name may seem free to a waiter: in the worst case, a holder is killed before it has
/// recorded its grant, two stopped processes are granted the name, and the machine is busy.
const BOUND: Duration = Duration::from_secs(4 + 3 + 3 + 4);

/// How long a free name is kept, and how often each process sweeps.
const RETENTION: Duration = Duration::from_secs(10);

/// The events of the line and the cycles beside it, in the folder of the record.
const EVENTS: &str = "events";
const CYCLES: &str = "cycles";

fn up_to(most: Duration) -> Duration {
    Duration::from_micros(random(most.as_micros() as usize) as u64)
}

// ---- observer

/// Returns whether no violation was found.
pub(super) async fn soak(place: &Place, time: Duration) -> bool {
    let locks = place.database.locks().build();
    locks.migrate().await.expect("migrate");
    let record = tempfile::tempdir().expect("a temporary directory");
    let cycles = record.path().join(CYCLES);
    std::fs::create_dir(record.path().join(EVENTS)).expect("a folder");
    traffic::create(&cycles);
    let mut processes: Vec<Process> = (0..PROCESSES).map(|_| start_stander(&place.url, record.path())).collect();
    let (mut kills, mut pauses) = (0, 0);
    let mut asleep = Vec::new();
    let (start, started_at) = (Instant::now(), boot_ns());
    while start.elapsed() < time {
        sleep(Duration::from_secs(2) + up_to(Duration::from_secs(4))).await;
        let i = random(PROCESSES);
        if random(5) < 2 {
            processes[i].kill();
            kills += 1;
            processes[i] = start_stander(&place.url, record.path());
        } else {
            processes[i].signal(Signal::STOP);
            pauses += 1;
            let pid = processes[i].pid();
            asleep.push(tokio::spawn(async move {
                sleep(up_to(PAUSE)).await;
                // The process may be dead by now.
                let _ = kill_process(pid, Signal::CONT);
            }));
        }
    }
    for asleep in asleep {
        asleep.await.expect("no panic");
    }
    let ended_at = boot_ns();
    let mut clean = true;
    let mut said = BTreeMap::new();
    for process in &mut processes {
        drop(process.child.stdin.take());
    }
    for process in processes {
        clean &= process.end(&mut said).await;
    }
    // The leases of killed processes expire, and the next request deletes their entries.
    sleep(TTL + CLAIM).await;
    for i in 0..NAMES {
        match timeout(Duration::from_secs(30), locks.lease(name(i)).acquire()).await {
            Ok(Ok(lease)) => lease.release().await.expect("release"),
            other => {
                println!("    a name cannot be acquired when all have gone: {other:?}");
                clean = false;
            }
        }
    }
    // Processes were killed in cycles beside the line: nobody asks for these names again.
    locks.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep");
    let rows = place.database.leftovers().await;
    println!(
        "  the line: {PROCESSES} processes of {TASKS} tasks, {NAMES} names, {:.0} s",
        start.elapsed().as_secs_f64()
    );
    println!("    {:<34} {kills}\n    {:<34} {pauses}", "processes killed", "processes stopped for a while");
    for (what, count) in &said {
        println!("    {what:<34} {count}");
        clean &= !what.starts_with("ERROR");
    }
    println!("    {:<34} {rows}", "rows left behind");
    let history =
        History { events: read_dir(&record.path().join(EVENTS)), residue: Residue::default(), ..History::default() };
    let (ok, figures) = judge(&history);
    print!("{figures}");
    let grants = grants(&history).map(|grant| grant.return_ns);
    print!("{}", traffic::by_minute(&cycles, started_at, ended_at, grants));
    let _ = locks.shutdown().await;
    clean && ok && rows == 0
}

fn name(i: usize) -> String {
    format!("line/{i}")
}

fn start_stander(url: &str, record: &Path) -> Process {
    Process::start([OsStr::new("stand"), OsStr::new(url), record.as_os_str()])
}

impl Process {
    /// Waits for the end of the process and adds its counts. Returns `false` if it did not end or
    /// could not be read.
    async fn end(mut self, said: &mut BTreeMap<String, u64>) -> bool {
        let patience = Instant::now() + Duration::from_secs(60);
        while !matches!(self.child.try_wait(), Ok(Some(_))) {
            if Instant::now() > patience {
                println!("    a process does not come to its end");
                self.kill();
                return false;
            }
            sleep(Duration::from_millis(20)).await;
        }
        let mut text = String::new();
        let stdout = self.child.stdout.take().map(|mut stdout| stdout.read_to_string(&mut text));
        for (count, what) in text.lines().filter_map(|line| line.split_once(' ')) {
            *said.entry(what.to_owned()).or_default() += count.parse::<u64>().unwrap_or(1);
        }
        stdout.is_some_and(|read| read.is_ok())
    }
}

fn grants(history: &History) -> impl Iterator<Item = &Event> {
    history.events.iter().filter(|e| e.op == Op::Acquire && e.outcome == Outcome::Ok)
}

fn judge(history: &History) -> (bool, String) {
    let violations = history.check(&Rules { client_exclusion: true, liveness: Some(BOUND) });
    let grants: BTreeMap<(&str, Option<u64>), &Event> =
        grants(history).map(|grant| ((grant.name.as_str(), grant.token), grant)).collect();
    let mut text = format!("    {:<34} {}\n", "grants on record", grants.len());
    // The times from the call of a release to the next grant, for requests that came before the
    // release.
    let mut hand_overs = Vec::new();
    for release in history.events.iter().filter(|e| e.op == Op::Release && e.outcome == Outcome::Ok) {
        let name = release.name.as_str();
        let later = (Bound::Excluded((name, release.token)), Bound::Included((name, Some(u64::MAX))));
        if let Some((_, next)) = grants.range(later).next()
            && next.invoke_ns < release.invoke_ns
        {
            hand_overs.push(next.return_ns.saturating_sub(release.invoke_ns));
        }
    }
    hand_overs.sort_unstable();
    if let Some(last) = hand_overs.len().checked_sub(1) {
        let [median, p99, max] = [last / 2, last * 99 / 100, last].map(|i| Duration::from_nanos(hand_overs[i]));
        text +=
            &format!("    {:<34} {} (median {median:.1?}, p99 {p99:.1?}, longest {max:.1?})\n", "hand-overs", last + 1);
    }
    for bound in [1, 2, 4, 7, 10].map(Duration::from_secs) {
        let found = history.check(&Rules { client_exclusion: false, liveness: Some(bound) });
        let starved = found.iter().filter(|v| matches!(v, Violation::Starved(..))).count();
        text += &format!("    {:<34} {starved}\n", format!("waited with the name free > {bound:?}"));
    }
    text += &format!("    {:<34} {}\n", "violations", violations.len());
    for violation in violations.iter().take(10) {
        text += &format!("      {violation}\n");
    }
    (violations.is_empty() && !grants.is_empty(), text)
}

// ---- waiters

/// `soak stand URL RECORD`: until its standard input ends.
pub(super) async fn stand(url: &str, record: &Path) {
    // A stopped process would not notice the end of its parent.
    set_parent_process_death_signal(Some(Signal::KILL)).expect("the parent-death signal is set");
    let proc = std::process::id().to_string();
    let process = Arc::new(WaitingProcess {
        locks: Database::open(url).locks().build(),
        // Process ids are reused.
        recorder: Recorder::create(&record.join(EVENTS), &format!("{proc}-{}", boot_ns())),
        proc,
        over: AtomicBool::new(false),
        said: std::sync::Mutex::default(),
    });
    let tasks: Vec<_> = (0..TASKS)
        .map(|_| {
            let process = Arc::clone(&process);
            tokio::spawn(async move {
                while !process.over.load(Ordering::Relaxed) {
                    process.take_a_turn().await;
                }
            })
        })
        .collect();
    let sweeping = process.locks.sweeper().retention(RETENTION).every(RETENTION).start();
    let traffic = tokio::spawn({
        let (process, cycles) = (Arc::clone(&process), record.join(CYCLES));
        async move {
            traffic::run(&process.locks, &cycles, &process.over, TTL, |error| process.failure(error)).await;
        }
    });
    let end = tokio::task::spawn_blocking(|| std::io::stdin().read_to_end(&mut Vec::new()));
    let _ = end.await;
    process.over.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.expect("no panic");
    }
    traffic.await.expect("no panic");
    drop(sweeping);
    if let Err(error) = process.locks.shutdown().await {
        process.error(&error);
    }
    for (what, count) in &*process.said.lock().expect("no panic") {
        println!("{count} {what}");
    }
}

struct WaitingProcess {
    locks: Locks,
    recorder: Recorder,
    proc: String,
    over: AtomicBool,
    said: std::sync::Mutex<BTreeMap<String, u64>>,
}

impl WaitingProcess {
    async fn take_a_turn(&self) {
        sleep(up_to(Duration::from_millis(400))).await;
        let name = name(random(NAMES));
        let request = self.locks.lease(&name).ttl(TTL);
        let invoked = boot_ns();
        let answer = match random(8) {
            0 => request.try_acquire().await,
            1 => request.wait(up_to(CLAIM)).acquire().await.map(Some),
            2 => match timeout(up_to(Duration::from_secs(1)), request.acquire()).await {
                Ok(answer) => answer.map(Some),
                Err(_) => {
                    self.count("cancelled");
                    Ok(None)
                }
            },
            _ => request.acquire().await.map(Some),
        };
        match answer {
            Ok(Some(lease)) => self.hold(lease, invoked).await,
            // A wait without a grant counts, unless the grant could not be reported.
            Ok(None) => self.waited(&name, invoked),
            Err(Error::Timeout { .. }) => {
                self.count("timed out");
                self.waited(&name, invoked);
            }
            Err(error) => self.failure(&error),
        }
    }

    async fn hold(&self, lease: Lease, invoked: u64) {
        let mut event = self.event(&lease, Op::Acquire, invoked);
        if event.deadline_ns.is_some_and(|deadline| deadline <= event.return_ns) {
            event.outcome = Outcome::Late;
        }
        self.recorder.record(&event);
        self.count("held");
        let most = if random(32) == 0 { TTL } else { Duration::from_millis(30) };
        sleep(up_to(most)).await;
        let mut event = self.event(&lease, Op::Held, boot_ns());
        event.outcome = if lease.is_held() { Outcome::Ok } else { Outcome::Refused };
        // The answer is that of the time of the call: the process may have been stopped since.
        self.recorder.record(&Event { invoke_ns: event.invoke_ns.min(event.return_ns), ..event });
        let mut event = self.event(&lease, Op::Release, boot_ns());
        event.deadline_ns = None;
        event.outcome = Outcome::Unknown;
        // Recorded before the call, because a process that is killed during the call has released
        // the lease as well.
        self.recorder.record(&event);
        if random(8) == 0 {
            drop(lease);
        } else {
            match lease.release().await {
                Ok(()) => event.outcome = Outcome::Ok,
                Err(error) if error.is_lost() => {
                    self.count("lost");
                    event.outcome = Outcome::Refused;
                }
                Err(error) => self.error(&error),
            }
        }
        event.return_ns = boot_ns();
        self.recorder.record(&event);
    }

    fn event(&self, lease: &Lease, op: Op, invoke_ns: u64) -> Event {
        let return_ns = boot_ns();
        // The clock is read first, so that the deadline is rather too early than too late.
        let deadline_ns = boot_ns() + u64::try_from(lease.remaining().as_nanos()).expect("a TTL is short");
        Event {
            proc: self.proc.clone(),
            invoke_ns,
            return_ns,
            op,
            name: lease.name().to_string(),
            owner: lease.owner().to_string(),
            token: u64::try_from(lease.token().get()).ok(),
            deadline_ns: Some(deadline_ns),
            outcome: Outcome::Ok,
        }
    }

    /// Records a wait that ended without a grant.
    fn waited(&self, name: &str, invoke_ns: u64) {
        self.recorder.record(&Event {
            proc: self.proc.clone(),
            invoke_ns,
            return_ns: boot_ns(),
            op: Op::Acquire,
            name: name.into(),
            owner: String::new(),
            token: None,
            deadline_ns: None,
            outcome: Outcome::Refused,
        });
    }

    fn count(&self, what: &str) {
        *self.said.lock().expect("no panic").entry(what.into()).or_default() += 1;
    }

    /// Counts an error that a stop of processes may cause.
    fn failure(&self, error: &Error) {
        match error {
            // This process was stopped, or a stopped process had locked the file.
            Error::Unavailable { reason, .. } if reason.starts_with("no answer came within") => {
                self.count("had no answer in time");
            }
            error if error.is_lost() => self.count("lost"),
            // This process was stopped while it released, and a later holder died.
            Error::Unknown { .. } => self.count("released, or lost before"),
            error => self.error(error),
        }
    }

    fn error(&self, error: &Error) {
        self.count(&format!("ERROR {}", error.report().to_string().replace('\n', " ")));
    }
}
