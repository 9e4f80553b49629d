//! Other processes: started, commanded, killed, stopped and put under another clock. Their program
//! is `test_worker.rs`.

#![allow(unreachable_pub, reason = "included by several tests")]

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use sqlx::{AssertSqlSafe, Pool};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::ChildStdout;

use super::history::{Audit, History, read_dir};
use super::{TestDatabase, soon};
use crate::Sql;

/// A process that holds leases on command. Dropping it kills the process.
///
/// Start it from the body of a test, because it ends with the thread that started it.
pub struct Worker {
    child: Child,
    commands: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    pub fn start(url: &str) -> Self {
        Self::launch(Command::new(program("test_worker")).arg(url))
    }

    /// Starts a payment server: see `payment_server.rs`.
    pub fn payment_server(url: &str, provider: Option<&str>) -> Self {
        Self::launch(Command::new(program("payment_server")).arg(url).args(provider))
    }

    /// Starts a provider of charges, and returns it with its port.
    pub async fn provider() -> (Self, String) {
        let mut provider = Self::launch(Command::new(program("payment_server")).arg("provider"));
        let port = provider.answer().await;
        (provider, port)
    }

    /// Waits for the next answer. `None`: the process is dead.
    pub async fn next_answer(&mut self) -> Option<String> {
        soon("an answer of the worker", self.answers.next_line()).await.expect("the worker can be read")
    }

    /// Starts a process whose wall clock is set by the test. Its monotonic clock is not changed.
    pub fn start_under(clock: &Clock, url: &str) -> Self {
        let library = std::env::var("SQLOCK_FAKETIME")
            .unwrap_or_else(|_| panic!("SQLOCK_FAKETIME is not set: run scripts/test, or eval \"$(scripts/servers)\""));
        Self::launch(
            Command::new(program("test_worker"))
                .arg(url)
                .env("LD_PRELOAD", library)
                .env("FAKETIME_TIMESTAMP_FILE", clock.file())
                .env("FAKETIME_NO_CACHE", "1")
                .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
                .env("FAKETIME_FORCE_MONOTONIC_FIX", "0"),
        )
    }

    fn launch(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("a worker can be started");
        let commands = child.stdin.take().expect("a pipe was asked for");
        let answers = child.stdout.take().expect("a pipe was asked for");
        let answers = ChildStdout::from_std(answers).expect("a pipe can be read asynchronously");
        Self { child, commands, answers: BufReader::new(answers).lines() }
    }

    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    // ---- commands

    /// Sends a command without waiting for the answer.
    pub fn tell(&mut self, command: &str) {
        writeln!(self.commands, "{command}").expect("the worker takes commands");
    }

    /// Waits for the next answer.
    pub async fn answer(&mut self) -> String {
        soon("an answer of the worker", self.answer_some_time()).await
    }

    /// Waits for an answer that may take a long time.
    pub async fn answer_some_time(&mut self) -> String {
        let answer = self.answers.next_line().await;
        answer.expect("the worker can be read").expect("the worker is alive")
    }

    pub async fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.answer().await
    }

    /// Acquires the lease, and returns the token.
    pub async fn hold(&mut self, name: &str, ttl: Duration) -> i64 {
        token(&self.ask(&format!("hold {name} {}", ttl.as_millis())).await)
    }

    /// Tries to acquire the lease, and returns the token. `None`: taken.
    pub async fn try_hold(&mut self, name: &str, ttl: Duration) -> Option<i64> {
        let answer = self.ask(&format!("try {name} {}", ttl.as_millis())).await;
        (answer != "taken").then(|| token(&answer))
    }

    /// Returns whether the lease is held, and when it was last held, by the boot clock.
    pub async fn status(&mut self) -> (bool, u64) {
        let answer = self.ask("status").await;
        let (held, last) = answer.split_once(' ').unwrap_or_else(|| panic!("status: {answer}"));
        (held == "held", last.parse().unwrap_or_else(|_| panic!("status: {answer}")))
    }

    /// Returns the token of the holder, and its remaining time.
    pub async fn inspect(&mut self, name: &str) -> Option<(i64, Duration)> {
        let answer = self.ask(&format!("inspect {name}")).await;
        if answer == "free" {
            return None;
        }
        let numbers = answer.split_once(' ').and_then(|(t, ms)| Some((t.parse().ok()?, ms.parse().ok()?)));
        let (token, ms) = numbers.unwrap_or_else(|| panic!("inspect: {answer}"));
        Some((token, Duration::from_millis(ms)))
    }

    // ---- signals

    /// Kills the process with `kill -9`, and waits for its end.
    pub fn kill(&mut self) {
        // The process may have been killed before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits until all threads of the process sleep, so that its work is blocked.
    pub async fn until_it_sleeps(&self) {
        let tasks = format!("/proc/{}/task", self.pid().as_raw_nonzero());
        let sleeps = |task: std::io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.expect("a task").path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('S'))
        };
        let all_sleep = async {
            while !std::fs::read_dir(&tasks).expect("the worker has threads").all(sleeps) {
                tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            }
        };
        crate::support::soon("a moment in which the worker sleeps", all_sleep).await;
    }

    /// Stops the process, and waits until all its threads have stopped.
    pub fn stop(&self) {
        kill_process(self.pid(), Signal::STOP).expect("the worker can be stopped");
        waitid(WaitId::Pid(self.pid()), WaitIdOptions::STOPPED).expect("the worker stops");
    }

    /// Ends [`Worker::stop`].
    pub fn resume(&self) {
        kill_process(self.pid(), Signal::CONT).expect("the worker can be resumed");
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.kill();
        // libfaketime's shared memory, if it had some.
        let pid = self.pid();
        for name in [format!("faketime_shm_{pid}"), format!("sem.faketime_sem_{pid}")] {
            let _ = fs::remove_file(Path::new("/dev/shm").join(name));
        }
    }
}

fn token(answer: &str) -> i64 {
    let token = answer.strip_prefix("token ").and_then(|token| token.parse().ok());
    token.unwrap_or_else(|| panic!("no token: {answer}"))
}

/// Returns the path of a program, which cargo puts beside the directory of the test.
fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test knows where it is");
    let profile = test.ancestors().nth(2).expect("tests are in target/PROFILE/deps");
    let program = profile.join("examples").join(name);
    assert!(
        program.exists(),
        "{} is missing: build it with `cargo build --examples` and the features of this test",
        program.display()
    );
    program
}

/// A wall clock for workers, ahead of the real one or behind it.
pub struct Clock(tempfile::TempDir);

impl Clock {
    pub fn ahead(seconds: i64) -> Self {
        let clock = Self(tempfile::tempdir().expect("a temporary directory"));
        clock.jump(seconds);
        clock
    }

    /// Sets the clock ahead of (or behind) the real one.
    pub fn jump(&self, seconds: i64) {
        let new = self.0.path().join("new");
        fs::write(&new, format!("{seconds:+}\n")).expect("the clock can be set");
        fs::rename(new, self.file()).expect("the clock can be set");
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("clock")
    }
}

/// The tables that workers write in fenced transactions: a counter for each name, and its writers.
pub struct Guarded {
    pool: Pool<Sql>,
}

impl Guarded {
    pub async fn create(db: &TestDatabase, names: &[&str]) -> Self {
        let pool = db.pool_of(1).await;
        for sql in [
            "CREATE TABLE guarded (name VARCHAR(64) PRIMARY KEY, value BIGINT NOT NULL)",
            "CREATE TABLE audit (name VARCHAR(64), seq BIGINT, token BIGINT NOT NULL, worker VARCHAR(64) NOT NULL,
                                 PRIMARY KEY (name, seq))",
        ] {
            sqlx::query(sql).execute(&pool).await.expect("a table");
        }
        for name in names {
            let sql = format!("INSERT INTO guarded VALUES ('{name}', 0)");
            sqlx::query(AssertSqlSafe(sql)).execute(&pool).await.expect("a counter");
        }
        Self { pool }
    }

    pub async fn value(&self, name: &str) -> i64 {
        let sql = format!("SELECT value FROM guarded WHERE name = '{name}'");
        sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&self.pool).await.expect("the counter")
    }

    pub async fn audit(&self) -> Vec<Audit> {
        let rows: Vec<(String, i64, i64, String)> =
            sqlx::query_as("SELECT name, seq, token, worker FROM audit ORDER BY name, seq")
                .fetch_all(&self.pool)
                .await
                .expect("the audit");
        let audit = |(name, seq, token, proc)| {
            let token = u64::try_from(token).expect("tokens are positive");
            Audit { seq, name, token, proc }
        };
        rows.into_iter().map(audit).collect()
    }

    /// Reads the records of the workers in a directory, and their writes under a name.
    pub async fn history(&self, dir: &Path, name: &str) -> History {
        let value = u64::try_from(self.value(name).await).expect("the counter counts up");
        History {
            events: read_dir(dir),
            audit: self.audit().await,
            counters: [(name.to_owned(), value)].into(),
            ..History::default()
        }
    }

    pub fn pool(&self) -> &Pool<Sql> {
        &self.pool
    }
}
