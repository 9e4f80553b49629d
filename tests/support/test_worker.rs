//! A process for tests to kill and stop: it holds leases and writes the rows that they guard.
//!
//! `test_worker URL` takes commands on its standard input, one a line, and answers each with one
//! line on its standard output. (`queue` is `wait` and `turn` in one, and answers with two.)
//!
//! | command                                   | answer                                                         |
//! |-------------------------------------------|----------------------------------------------------------------|
//! | `hold NAME TTL_MS`                        | `token N`, when it has the lease                               |
//! | `queue NAME TTL_MS`                       | `waiting` once it is in the queue, and then as `hold`          |
//! | `wait NAME TTL_MS [AT_MOST_MS]`           | `waiting` once it is in the queue                              |
//! | `turn`                                    | as `hold`, when that wait has ended                            |
//! | `cancel`                                  | `cancelled`: that wait was given up                            |
//! | `try NAME TTL_MS`                         | `token N` or `taken`                                           |
//! | `as MANNER NAME TTL_MS`                   | as `hold`: `alone`, `shared`, or `2/3` of the permits          |
//! | `visit NAME MANNER TASKS STAY_MS DIR`     | `visits COUNT LONGEST_WAIT_MS TOGETHER`, when DIR is closed    |
//! | `status`                                  | `held AT` or `gone AT`: the boot clock when it last was held   |
//! | `lost`                                    | `expired`, `superseded`, …, when the lease is lost             |
//! | `fenced`                                  | `committed`: one more in the guarded counter                   |
//! | `release`                                 | `released`                                                     |
//! | `run NAME TTL_MS PORT`                    | `ran`: under a lease, it wrote `effect` to PORT on an order     |
//! | `inspect NAME`                            | `free`, or the token and the milliseconds that remain          |
//! | `clock`                                   | milliseconds since 1970, as this process sees it               |
//! | `seize`                                   | `seized`: SQLite's write lock, in mid-transaction              |
//! | `yield`                                   | `yielded`: that transaction is rolled back                     |
//! | `session NAME`                            | `locked`, when it has the session lock                         |
//! | `session-try NAME`                        | `locked` or `taken`                                            |
//! | `session-release`                         | `released`                                                     |
//! | `gather NAME,… TTL_MS`                    | `gathered`, when it has the leases on all of them              |
//! | `gather HOW NAMES TASKS COUNT DIR`        | as `visit`, when each task has had some of the names so often  |
//! | `storm NAME TASKS CYCLES DIR TTL_MS`      | `done N`: N cycles ended in a loss or without a confirmation   |
//!
//! What fails answers `lost`, `unavailable`, `unknown`, `timeout` or `error`, and why.

#![allow(clippy::expect_used, clippy::panic, reason = "a program for tests")]

#[path = "any_pool.rs"]
mod any_pool;
#[path = "critical_section.rs"]
mod critical_section;
#[path = "gather.rs"]
mod gather;
#[path = "history.rs"]
mod history;

use std::collections::hash_map::RandomState;
use std::fmt::Display;
use std::hash::BuildHasher;
use std::io::{BufRead, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime};

use rustix::process::{Signal, set_parent_process_death_signal};
use sqlock::session::SessionLock;
use sqlock::{Error, Lease, LeaseRequest, Locks};
use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{AssertSqlSafe, Connection, SqliteConnection};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use any_pool::{AnyPool, on_pool};
use critical_section::{AccessMode, CriticalSection, Visits};
use gather::Strategy;
use history::{Event, Op, Outcome, Recorder, boot_ns};

fn main() {
    // A stopped worker would not notice that its standard input has ended.
    set_parent_process_death_signal(Some(Signal::KILL)).expect("the parent-death signal is set");
    let url = std::env::args().nth(1).expect("usage: test_worker URL");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime can be built");
    let pool = {
        let _inside = runtime.enter();
        AnyPool::open(&url, 4)
    };
    let mut worker = Worker {
        locks: pool.builder().ttl_range(Duration::from_millis(100)..=Duration::from_secs(86_400)).build(),
        pool,
        runtime,
        url,
        waiting: None,
        held: None,
        locked: None,
        seized: None,
        gathered: None,
    };
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("commands are text");
        let words: Vec<&str> = line.split(' ').collect();
        let answer = worker.execute(&words).unwrap_or_else(|failure| failure);
        say(&answer);
    }
}

fn say(answer: &str) {
    let mut out = std::io::stdout().lock();
    // A missing reader means that the process is about to end.
    let _ = writeln!(out, "{}", answer.replace('\n', " ")).and_then(|()| out.flush());
}

impl AnyPool {
    /// Adds one to the counter that the lease guards, and a line to the audit, in a fenced
    /// transaction. The counter is read and written back: a write in between would be lost.
    async fn write(&self, lease: &Lease, proc: &str, log: impl Fn(Op, u64, Outcome)) -> Result<(), Failure> {
        let (name, token) = (lease.name(), lease.token());
        on_pool!(self, pool => {
            let invoked = boot_ns();
            let mut tx = pool.begin().await.map_err(Failure::of)?;
            let fenced = lease.fence(&mut tx).await;
            log(Op::FencedBegin, invoked, outcome(&fenced));
            if let Err(error) = fenced {
                let _ = tx.rollback().await;
                return Err(error.into());
            }
            let invoked = boot_ns();
            let written = async {
                let read = format!("SELECT value FROM guarded WHERE name = '{name}'");
                let value: i64 = sqlx::query_scalar(AssertSqlSafe(read)).fetch_one(&mut *tx).await?;
                let value = value + 1;
                // Not prepared, because each text is different, and closing an unused statement
                // costs MySQL 40 ms.
                let write = format!("UPDATE guarded SET value = {value} WHERE name = '{name}'");
                sqlx::raw_sql(AssertSqlSafe(write)).execute(&mut *tx).await?;
                let audit = format!("INSERT INTO audit VALUES ('{name}', {value}, {token}, '{proc}')");
                sqlx::raw_sql(AssertSqlSafe(audit)).execute(&mut *tx).await?;
                Ok(())
            };
            if let Err(error) = written.await {
                log(Op::FencedCommit, invoked, Outcome::Refused);
                let _ = tx.rollback().await;
                return Err(Failure::of::<sqlx::Error>(error));
            }
            let committed = tx.commit().await;
            log(Op::FencedCommit, invoked, if committed.is_ok() { Outcome::Ok } else { Outcome::Unknown });
            committed.map_err(Failure::of)
        })
    }
}

/// Why a fenced write failed.
struct Failure {
    lost: bool,
    text: String,
}

impl Failure {
    fn of<E: Display>(error: E) -> Self {
        Self { lost: false, text: format!("error {error}") }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { lost: error.is_lost(), text: failed(error) }
    }
}

/// Formats an error as an answer to the parent.
fn failed(error: Error) -> String {
    let word = match error {
        Error::Lost { .. } | Error::SessionLost { .. } => "lost",
        Error::Unavailable { .. } => "unavailable",
        Error::Unknown { .. } => "unknown",
        Error::Timeout { .. } => "timeout",
        _ => "error",
    };
    format!("{word} {error}")
}

/// Converts a result to an outcome of the record.
fn outcome<T>(result: &Result<T, Error>) -> Outcome {
    match result {
        Ok(_) => Outcome::Ok,
        Err(error) if error.is_lost() => Outcome::Refused,
        Err(_) => Outcome::Unknown,
    }
}

type Waiting = tokio::task::JoinHandle<Result<Lease, Error>>;

struct Worker {
    locks: Locks,
    pool: AnyPool,
    runtime: Runtime,
    url: String,
    waiting: Option<Waiting>,
    held: Option<Held>,
    locked: Option<SessionLock>,
    seized: Option<SqliteConnection>,
    /// Kept until the process ends.
    gathered: Option<sqlock::LeaseAll>,
}

impl Worker {
    fn execute(&mut self, words: &[&str]) -> Result<String, String> {
        Ok(match words {
            ["hold", name, ttl] => self.hold(self.request(name, ttl)),
            ["queue", name, ttl] => {
                say(&self.wait(name, self.request(name, ttl)));
                self.turn()?
            }
            ["wait", name, ttl] => self.wait(name, self.request(name, ttl)),
            ["wait", name, ttl, at_most] => self.wait(name, self.request(name, ttl).wait(millis(at_most))),
            ["turn"] => self.turn()?,
            ["cancel"] => {
                let waiting = self.waiting.take().ok_or("error nobody waits")?;
                waiting.abort();
                match self.runtime.block_on(waiting) {
                    Err(end) if end.is_cancelled() => "cancelled".into(),
                    other => format!("error too late: {other:?}"),
                }
            }
            ["try", name, ttl] => match self.runtime.block_on(self.request(name, ttl).try_acquire()) {
                Ok(Some(lease)) => self.keep(lease),
                Ok(None) => "taken".into(),
                Err(error) => failed(error),
            },
            ["as", manner, name, ttl] => {
                let manner: AccessMode = manner.parse()?;
                match self.runtime.block_on(manner.acquire(&self.locks, name, millis(ttl))) {
                    Ok(lease) => self.keep(lease),
                    Err(error) => failed(error),
                }
            }
            ["visit", name, manner, tasks, stay, dir] => {
                let manner = manner.parse()?;
                self.runtime.block_on(visit(&self.locks, name, manner, number(tasks), millis(stay), dir))?
            }
            ["status"] => self.held()?.status(),
            ["lost"] => {
                let lease = Arc::clone(&self.held()?.lease);
                format!("{:?}", self.runtime.block_on(lease.lost())).to_lowercase()
            }
            ["fenced"] => {
                let proc = proc();
                let write = self.pool.write(&self.held()?.lease, &proc, |_, _, _| {});
                match self.runtime.block_on(write) {
                    Ok(()) => "committed".into(),
                    Err(failure) => failure.text,
                }
            }
            ["release"] => {
                let lease = self.held.take().ok_or("error nothing is held")?.end();
                match self.runtime.block_on(lease.release()) {
                    Ok(()) => "released".into(),
                    Err(error) => failed(error),
                }
            }
            ["run", name, ttl, port] => {
                let port = number(port);
                let work = self.request(name, ttl).run(async |_| wait_and_write(port).await);
                match self.runtime.block_on(work) {
                    Ok(Ok(())) => "ran".into(),
                    Ok(Err(error)) => format!("error {error}"),
                    Err(error) => failed(error),
                }
            }
            ["inspect", name] => match self.runtime.block_on(self.locks.inspect(name)) {
                Ok(Some(info)) => format!("{} {}", info.token, info.remaining.as_millis()),
                Ok(None) => "free".into(),
                Err(error) => failed(error),
            },
            ["clock"] => {
                let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("the clock is past 1970");
                now.as_millis().to_string()
            }
            ["seize"] => {
                self.seized = Some(self.runtime.block_on(seize(&self.url)).map_err(|e| format!("error {e}"))?);
                "seized".into()
            }
            ["yield"] => {
                let mut conn = self.seized.take().ok_or("error nothing is seized")?;
                let rolled_back = self.runtime.block_on(sqlx::raw_sql("ROLLBACK").execute(&mut conn));
                rolled_back.map_or_else(|e| format!("error {e}"), |_| "yielded".into())
            }
            ["session", name] => match self.runtime.block_on(self.locks.session(*name).acquire()) {
                Ok(lock) => self.lock(Some(lock)),
                Err(error) => failed(error),
            },
            ["session-try", name] => match self.runtime.block_on(self.locks.session(*name).try_acquire()) {
                Ok(lock) => self.lock(lock),
                Err(error) => failed(error),
            },
            ["session-release"] => {
                let lock = self.locked.take().ok_or("error nothing is locked")?;
                self.runtime.block_on(lock.release()).map_or_else(failed, |()| "released".into())
            }
            ["gather", how, names, tasks, count, dir] => {
                let dir = Path::new(dir);
                let (names, tasks, count) = (number(names), number(tasks), number(count));
                let gathering = gather::gather(&self.locks, Strategy::of(how), names, tasks, count, dir);
                self.runtime.block_on(gathering).map_or_else(|failure| failure, Visits::to_line)
            }
            ["gather", all, ttl] => {
                let names = all.split(',');
                match self.runtime.block_on(self.locks.lease_all(names).ttl(millis(ttl)).acquire()) {
                    Ok(all) => {
                        self.gathered = Some(all);
                        "gathered".into()
                    }
                    Err(error) => failed(error),
                }
            }
            ["storm", name, tasks, cycles, dir, ttl] => {
                let storm = Storm::new(self, name, Path::new(dir), millis(ttl));
                self.runtime.block_on(storm.run(number(tasks), number(cycles)))
            }
            _ => "error no such command".into(),
        })
    }

    fn request(&self, name: &str, ttl: &str) -> LeaseRequest {
        self.locks.lease(name).ttl(millis(ttl))
    }

    fn hold(&mut self, request: LeaseRequest) -> String {
        match self.runtime.block_on(request.acquire()) {
            Ok(lease) => self.keep(lease),
            Err(error) => failed(error),
        }
    }

    /// Waits in the queue, and reports when it has joined.
    fn wait(&mut self, name: &str, request: LeaseRequest) -> String {
        let waiting = self.runtime.spawn(request.acquire());
        let us = format!("/{}", std::process::id());
        loop {
            match self.runtime.block_on(self.locks.waiters(name)) {
                Ok(line) if line.iter().any(|waiter| waiter.holder.ends_with(&us)) => break,
                Ok(_) if waiting.is_finished() => break,
                Ok(_) => thread::sleep(Duration::from_millis(20)),
                Err(error) => return failed(error),
            }
        }
        self.waiting = Some(waiting);
        "waiting".into()
    }

    fn turn(&mut self) -> Result<String, String> {
        let waiting = self.waiting.take().ok_or("error nobody waits")?;
        Ok(match self.runtime.block_on(waiting).expect("a wait does not panic") {
            Ok(lease) => self.keep(lease),
            Err(error) => failed(error),
        })
    }

    fn lock(&mut self, lock: Option<SessionLock>) -> String {
        let answer = if lock.is_some() { "locked" } else { "taken" };
        self.locked = lock.or(self.locked.take());
        answer.into()
    }

    fn keep(&mut self, lease: Lease) -> String {
        let token = lease.token();
        self.held = Some(Held::begin(lease));
        format!("token {token}")
    }

    fn held(&self) -> Result<&Held, String> {
        self.held.as_ref().ok_or("error nothing is held".into())
    }
}

/// Runs many tasks that visit a critical section.
async fn visit(
    locks: &Locks,
    name: &str,
    manner: AccessMode,
    tasks: usize,
    stay: Duration,
    dir: &str,
) -> Result<String, String> {
    let mut all = JoinSet::new();
    for _ in 0..tasks {
        all.spawn(CriticalSection::of(dir).come_and_go(locks.clone(), name.into(), manner, stay));
    }
    let mut visits = Visits::default();
    while let Some(ended) = all.join_next().await {
        visits = visits.and(ended.expect("a task does not panic")?);
    }
    Ok(visits.to_line())
}

fn millis(text: &str) -> Duration {
    Duration::from_millis(number(text))
}

fn number<N: std::str::FromStr>(text: &str) -> N {
    text.parse().unwrap_or_else(|_| panic!("{text} is not a number"))
}

fn proc() -> String {
    std::process::id().to_string()
}

/// A lease, and a thread that polls it continually: the thread knows when `is_held` was last true,
/// even if all threads were stopped in between and nothing else has run since.
struct Held {
    lease: Arc<Lease>,
    last: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    watch: JoinHandle<()>,
}

impl Held {
    fn begin(lease: Lease) -> Self {
        let (lease, last, over) = (Arc::new(lease), Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let watch = {
            let (lease, last, over) = (Arc::clone(&lease), Arc::clone(&last), Arc::clone(&over));
            thread::spawn(move || {
                while !over.load(Ordering::Relaxed) {
                    let asked = boot_ns();
                    if lease.is_held() {
                        last.store(asked, Ordering::Relaxed);
                    }
                    thread::sleep(Duration::from_micros(500));
                }
            })
        };
        Self { lease, last, over, watch }
    }

    fn status(&self) -> String {
        let held = if self.lease.is_held() { "held" } else { "gone" };
        format!("{held} {}", self.last.load(Ordering::Relaxed))
    }

    fn end(self) -> Lease {
        self.over.store(true, Ordering::Relaxed);
        self.watch.join().expect("looking does not panic");
        Arc::into_inner(self.lease).expect("nobody looks any more")
    }
}

/// Reports its start, waits for an order, and takes effect, on one connection, so that nothing
/// delays the effect after the order.
async fn wait_and_write(port: u16) -> std::io::Result<()> {
    let mut stream = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await?);
    stream.write_all(b"ready\n").await?;
    stream.read_line(&mut String::new()).await?;
    stream.write_all(b"effect\n").await
}

/// Takes the only write lock, excludes readers as well, and writes so much that a part of it
/// reaches the file.
async fn seize(url: &str) -> sqlx::Result<SqliteConnection> {
    let options: SqliteConnectOptions = url.parse()?;
    let mut conn = SqliteConnection::connect_with(&options.busy_timeout(Duration::from_secs(20))).await?;
    let statements = "
        PRAGMA cache_size = 4;
        BEGIN EXCLUSIVE;
        UPDATE sqlock_lease SET owner = '', id = '', client = '', token = 1;
        CREATE TABLE spilt (junk BLOB);
        WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200)
        INSERT INTO spilt SELECT randomblob(4000) FROM n;";
    sqlx::raw_sql(statements).execute(&mut conn).await?;
    Ok(conn)
}

/// Many tasks that want one name, and the record of their observations.
struct Storm {
    locks: Locks,
    pool: AnyPool,
    name: String,
    ttl: Duration,
    proc: String,
    recorder: Recorder,
}

impl Storm {
    fn new(worker: &Worker, name: &str, dir: &Path, ttl: Duration) -> Arc<Self> {
        Arc::new(Self {
            locks: worker.locks.clone(),
            pool: worker.pool.clone(),
            name: name.into(),
            ttl,
            proc: proc(),
            recorder: Recorder::create(dir, &proc()),
        })
    }

    async fn run(self: Arc<Self>, tasks: usize, cycles: usize) -> String {
        let mut all = JoinSet::new();
        for _ in 0..tasks {
            let storm = Arc::clone(&self);
            all.spawn(async move {
                let mut lost = 0;
                for _ in 0..cycles {
                    // The pause is long enough that the local queue of this process is sometimes
                    // empty, and the name is granted to another process.
                    tokio::time::sleep(up_to(Duration::from_millis(500))).await;
                    lost += usize::from(storm.cycle().await?);
                }
                Ok(lost)
            });
        }
        let mut lost = 0;
        while let Some(ended) = all.join_next().await {
            match ended.expect("a task does not panic") {
                Ok(its) => lost += its,
                Err(failure) => return failure,
            }
        }
        format!("done {lost}")
    }

    /// Acquires, writes and releases. Returns whether the lease was lost meanwhile, or nothing has
    /// confirmed its release.
    async fn cycle(&self) -> Result<bool, String> {
        let invoked = boot_ns();
        let lease = self.locks.lease(&self.name).ttl(self.ttl).acquire().await.map_err(failed)?;
        self.record(&lease, Op::Acquire, invoked, Outcome::Ok);
        tokio::time::sleep(up_to(Duration::from_millis(2))).await;
        let invoked = boot_ns();
        let held = if lease.is_held() { Outcome::Ok } else { Outcome::Refused };
        self.record(&lease, Op::Held, invoked, held);
        let log = |op, invoked, outcome| self.record(&lease, op, invoked, outcome);
        let mut lost = match self.pool.write(&lease, &self.proc, log).await {
            Ok(()) => false,
            Err(failure) if failure.lost => true,
            Err(failure) => return Err(failure.text),
        };
        let invoked = boot_ns();
        let mut event = self.event(&lease, Op::Release, invoked, Outcome::Ok);
        let released = lease.release().await;
        event.outcome = outcome(&released);
        event.return_ns = boot_ns();
        event.deadline_ns = None;
        self.recorder.record(&event);
        match released {
            Ok(()) => {}
            Err(error) if error.is_lost() => lost = true,
            Err(Error::Unavailable { .. } | Error::Unknown { .. }) => lost = true,
            Err(error) => return Err(failed(error)),
        }
        Ok(lost)
    }

    fn record(&self, lease: &Lease, op: Op, invoked: u64, outcome: Outcome) {
        self.recorder.record(&self.event(lease, op, invoked, outcome));
    }

    fn event(&self, lease: &Lease, op: Op, invoke_ns: u64, outcome: Outcome) -> Event {
        let return_ns = boot_ns();
        // The clock is read first, so that the deadline is rather too early than too late.
        let deadline_ns = boot_ns() + u64::try_from(lease.remaining().as_nanos()).expect("a TTL is short");
        Event {
            proc: self.proc.clone(),
            invoke_ns,
            return_ns,
            op,
            name: self.name.clone(),
            owner: lease.owner().to_string(),
            token: u64::try_from(lease.token().get()).ok(),
            deadline_ns: Some(deadline_ns),
            outcome,
        }
    }
}

/// Returns a random time.
fn up_to(most: Duration) -> Duration {
    let random = RandomState::new().hash_one(0_u8);
    Duration::from_nanos(random % u64::try_from(most.as_nanos()).expect("a short time"))
}
