//! A `sqlock run` seen from outside: its processes, the reports of its command, and the death of
//! the last process; and faults between sqlock and its database.
//!
//! A script that runs under sqlock has file descriptor 3 open on a FIFO and writes lines for the
//! test there. The end of the file shows the death of the last process that inherited the
//! descriptor. Orders arrive on another FIFO.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use sqlx::{AssertSqlSafe, Pool};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::captured_output::CapturedOutput;
use super::command::{Ended, run, sqlock};
use super::process_table::{children, name, pid_of, poll_for, poll_until, shell_of, state};
use super::proxy::{Direction, Proxy};
use super::server::Server;
use super::worker::Worker;
use super::{TestDatabase, empty, empty_on, held, soon};
use crate::{DATABASE, Sql};

/// A database with sqlock's tables, the path to it, and a directory for the test's files.
pub struct CommandFixture {
    /// The database, without the faults of the network.
    pub db: TestDatabase,
    /// The URL for the processes under test.
    url: String,
    leases: Pool<Sql>,
    dir: tempfile::TempDir,
    proxy: Option<Proxy>,
    server: Option<Server>,
    /// On SQLite, the process that keeps the write lock of the sidecar file.
    writer: Option<Worker>,
}

/// A row of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub owner: String,
    pub id: String,
    pub token: i64,
    /// In microseconds since the epoch, as [`now`].
    pub acquired_at: i64,
    pub expires_at: i64,
}

/// Returns the wall clock in microseconds: the database's clock, because the database is on this
/// host.
pub fn now() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970");
    i64::try_from(now.as_micros()).expect("a time of this era")
}

impl CommandFixture {
    pub async fn new() -> Self {
        Self::on(empty().await, None, None).await
    }

    /// Creates a fixture whose network can be cut.
    pub async fn with_proxy() -> Self {
        let db = empty().await;
        let proxy = DATABASE.server().map(|_| Proxy::start(port(&db.url)));
        Self::on(db, proxy, None).await
    }

    /// Creates a fixture with its own server, to be killed and frozen.
    pub async fn with_server() -> Self {
        let server = DATABASE.server().map(Server::start);
        let db = match &server {
            Some(server) => empty_on(&server.url()).await,
            None => empty().await,
        };
        Self::on(db, None, server).await
    }

    async fn on(db: TestDatabase, proxy: Option<Proxy>, server: Option<Server>) -> Self {
        let url = match &proxy {
            Some(proxy) => with_port(&db.url, proxy.port()),
            None => db.url.clone(),
        };
        run(&db, &["migrate"]).await.expect(0);
        let leases = db.of_the_command().pool_of(1).await;
        let dir = tempfile::tempdir().expect("a temporary directory");
        Self { db, url, leases, dir, proxy, server, writer: None }
    }

    /// Returns the URL that leads through the faulty network.
    pub fn url(&self) -> &str {
        &self.url
    }

    // ---- the command

    /// Returns `sqlock ARGUMENTS` on the faulty network.
    pub fn sqlock(&self, arguments: &[&str]) -> Command {
        let mut command = sqlock(&self.db, arguments);
        command.env("DATABASE_URL", &self.url);
        command
    }

    /// Starts `sqlock run ARGUMENTS -- sh -c SCRIPT`.
    pub fn start(&self, arguments: &[&str], script: &str) -> Run {
        self.start_as(self.sqlock(&self.call(arguments)), script)
    }

    /// Starts `sqlock run ARGUMENTS -- sh -c SCRIPT` without the faults of the network.
    pub fn start_beside(&self, arguments: &[&str], script: &str) -> Run {
        self.start_as(sqlock(&self.db, &self.call(arguments)), script)
    }

    fn call<'a>(&self, arguments: &[&'a str]) -> Vec<&'a str> {
        [&["run"], arguments].concat()
    }

    /// Starts `COMMAND -- sh -c SCRIPT`.
    pub fn start_as(&self, mut command: Command, script: &str) -> Run {
        let (lines, orders) = (self.fifo("lines"), self.fifo("orders"));
        let report = Report::of(lines.clone());
        command
            .args(["--", "sh", "-c", &format!("exec 3>\"$LINES_FIFO\"\n{script}")])
            .env("LINES_FIFO", &lines)
            .env("ORDERS", &orders)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut sqlock = command.spawn().expect("sqlock can be started");
        let pid = pid_of(&sqlock);
        let stdout = CapturedOutput::of_pipe(sqlock.stdout.take().expect("a pipe was asked for"));
        let stderr = CapturedOutput::of_pipe(sqlock.stderr.take().expect("a pipe was asked for"));
        Run { sqlock, pid, report, orders, stdout, stderr }
    }

    /// Creates a FIFO.
    pub fn fifo(&self, name: &str) -> PathBuf {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let path = self.dir.path().join(format!("{name}-{}", SERIAL.fetch_add(1, Ordering::Relaxed)));
        mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR).expect("a FIFO can be made");
        path
    }

    /// Returns the path of a file of the test.
    pub fn path(&self, name: &str) -> String {
        super::command::path(self.dir.path(), name)
    }

    // ---- rows

    pub async fn try_row(&self, name: &str) -> Result<Option<Row>, sqlx::Error> {
        let sql = held("l.owner, l.id, l.token, l.acquired_at", name);
        let row: Option<(String, String, i64, i64, i64)> =
            sqlx::query_as(AssertSqlSafe(sql)).fetch_optional(&self.leases).await?;
        Ok(row.map(|(owner, id, token, acquired_at, expires_at)| Row { owner, id, token, acquired_at, expires_at }))
    }

    /// Reads the row of a name that was taken before. Repeats the query while a restarted database
    /// is not ready.
    pub async fn row(&self, name: &str) -> Row {
        let read = async {
            loop {
                match self.try_row(name).await {
                    Ok(row) => return row.expect("the name was taken before"),
                    Err(_) => sleep(Duration::from_millis(10)).await,
                }
            }
        };
        soon("a look at the row", read).await
    }

    /// Waits for a row that satisfies `like`.
    pub async fn row_when(&self, what: &str, name: &str, like: impl Fn(&Row) -> bool) -> Row {
        let seen = async {
            loop {
                if let Ok(Some(row)) = self.try_row(name).await
                    && like(&row)
                {
                    return row;
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        soon(what, seen).await
    }

    /// Waits for the next renewal of the current holding.
    pub async fn renewed(&self, name: &str) -> Row {
        let held = self.row(name).await;
        let later = |row: &Row| row.token == held.token && row.expires_at > held.expires_at;
        self.row_when("a renewal", name, later).await
    }

    /// Returns whether `sqlock run -n` acquires the name.
    pub async fn is_free(&self, name: &str) -> bool {
        match run(&self.db, &["run", "-n", name, "--", "true"]).await {
            ended if ended.code() == 75 => false,
            ended => {
                ended.expect(0);
                true
            }
        }
    }

    // ---- faults. SQLite has neither network nor server: there, another process keeps the
    // write lock of the sidecar file.

    /// Swallows all bytes of the connections, without an error.
    pub async fn cut(&mut self) {
        match &self.proxy {
            Some(proxy) => proxy.blackhole(Direction::Both),
            None => self.lock_file().await,
        }
    }

    pub async fn mend(&mut self) {
        match &self.proxy {
            Some(proxy) => {
                proxy.pass();
                proxy.reset();
            }
            None => self.unlock_file().await,
        }
    }

    /// Loses the next reply together with its connection.
    pub async fn cut_a_reply(&mut self) {
        match &self.proxy {
            Some(proxy) => soon("a reply to cut", proxy.cut_next_reply().happened()).await,
            // The pause is long enough for a statement to be refused and sent again.
            None => {
                self.lock_file().await;
                sleep(Duration::from_millis(2300)).await;
                self.unlock_file().await;
            }
        }
    }

    pub async fn crash(&mut self) {
        match &mut self.server {
            Some(server) => server.kill(),
            None => self.lock_file().await,
        }
    }

    pub fn restart(&mut self) {
        match &mut self.server {
            Some(server) => server.restart(),
            None => self.writer.take().expect("the file is seized").kill(),
        }
    }

    pub async fn freeze(&mut self) {
        match &self.server {
            Some(server) => server.pause(),
            None => {
                self.lock_file().await;
                self.writer.as_ref().expect("the file is seized").stop();
            }
        }
    }

    pub async fn thaw(&mut self) {
        match &self.server {
            Some(server) => server.resume(),
            None => {
                self.writer.as_ref().expect("the file is seized").resume();
                self.unlock_file().await;
            }
        }
    }

    async fn lock_file(&mut self) {
        let mut writer = Worker::start(&self.db.of_the_command().url);
        assert_eq!(writer.ask("seize").await, "seized");
        self.writer = Some(writer);
    }

    async fn unlock_file(&mut self) {
        let mut writer = self.writer.take().expect("the file is seized");
        assert_eq!(writer.ask("yield").await, "yielded");
    }

    pub fn server(&self) -> Option<&Server> {
        self.server.as_ref()
    }

    /// Sets the URL for the processes started from now on.
    pub fn set_url(&mut self, url: String) {
        self.url = url;
    }
}

fn port(url: &str) -> u16 {
    let authority = url.split_once("://").and_then(|(_, rest)| rest.split_once('/')).expect("a URL of a server").0;
    let default = if DATABASE.is_mysql() { 3306 } else { 5432 };
    authority.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(default)
}

fn with_port(url: &str, port: u16) -> String {
    let (scheme, rest) = url.split_once("://").expect("a URL has a scheme");
    let (authority, path) = rest.split_once('/').expect("a URL names a database");
    let user = authority.rsplit_once('@').map_or(String::new(), |(user, _)| format!("{user}@"));
    format!("{scheme}://{user}127.0.0.1:{port}/{path}")
}

/// A `sqlock run`. Dropping it kills sqlock and so the command.
pub struct Run {
    sqlock: Child,
    pid: Pid,
    pub report: Report,
    orders: PathBuf,
    pub stdout: CapturedOutput,
    pub stderr: CapturedOutput,
}

impl Run {
    /// Returns the PID of sqlock itself.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Waits until the watchdog has set its name, and returns its PID.
    pub async fn watchdog(&self) -> Pid {
        self.watchdog_after(None).await
    }

    /// Waits for the watchdog that replaces another one.
    pub async fn watchdog_after(&self, first: Option<Pid>) -> Pid {
        let is_one = |child: &Pid| name(*child) == "lease-watchdog" && Some(*child) != first;
        poll_for("the watchdog", || children(self.pid).into_iter().find(is_one)).await
    }

    /// Waits for the command, a shell, and returns its PID.
    pub async fn command(&self) -> Pid {
        shell_of(self.pid).await
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid, signal).expect("sqlock can be signalled");
    }

    /// Stops the process, and waits until all its threads have stopped.
    pub async fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        poll_until("sqlock stops", || state(self.pid) == Some('T')).await;
    }

    /// Waits until the command reports its start.
    pub async fn up(mut self) -> Self {
        assert_eq!(self.report.line().await, "up", "{}", self.stderr.text());
        self
    }

    /// Sends an order, which the command reads with `read … <"$ORDERS"`.
    pub fn order(&self, word: &str) {
        let (orders, word) = (self.orders.clone(), format!("{word}\n"));
        // Opening blocks until a reader opens the FIFO.
        thread::spawn(move || {
            let _ = OpenOptions::new().write(true).open(orders).and_then(|mut fifo| fifo.write_all(word.as_bytes()));
        });
    }

    pub async fn end(mut self) -> Ended {
        let status = soon("the end of sqlock", self.sqlock.wait()).await.expect("sqlock is ours to wait for");
        let (stdout, stderr) = (self.stdout.closed().await, self.stderr.closed().await);
        Ended { status, stdout, stderr }
    }
}

/// The reports of the command and its children, and the death of the last of them.
pub struct Report(mpsc::UnboundedReceiver<Event>);

enum Event {
    Line(String),
    /// All processes have ended at this time of the wall clock, or a little earlier.
    Gone(i64),
}

impl Report {
    pub fn of(fifo: PathBuf) -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        // Opening blocks until a writer opens the FIFO. A separate thread reads it, so that the
        // time is exact and no runtime waits.
        thread::spawn(move || {
            let mut lines = BufReader::new(File::open(fifo).expect("the FIFO can be read")).lines();
            while let Some(Ok(line)) = lines.next() {
                let _ = sender.send(Event::Line(line));
            }
            let _ = sender.send(Event::Gone(now()));
        });
        Self(events)
    }

    pub async fn line(&mut self) -> String {
        match soon("a line of the command", self.0.recv()).await {
            Some(Event::Line(line)) => line,
            _ => panic!("the command is dead"),
        }
    }

    /// Returns the lines received so far.
    pub fn so_far(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        while let Ok(Event::Line(line)) = self.0.try_recv() {
            lines.push(line);
        }
        lines
    }

    /// Waits until all processes have ended. Returns the time, and the lines up to then.
    pub async fn gone(&mut self) -> (i64, Vec<String>) {
        let mut lines = Vec::new();
        let end = async {
            loop {
                match self.0.recv().await.expect("the end comes once") {
                    Event::Line(line) => lines.push(line),
                    Event::Gone(at) => return at,
                }
            }
        };
        let at = soon("the end of the command and its children", end).await;
        (at, lines)
    }
}
