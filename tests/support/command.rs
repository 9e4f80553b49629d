//! The `sqlock` command, started as its users start it.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Once;

use rustix::process::{Pid, Signal, kill_process};
use sqlock::Locks;
use sqlock::inspect::LeaseInfo;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdout, Command};
use tokio::signal::unix::{SignalKind, signal};

use super::{TestDatabase, soon};
use crate::DATABASE;

/// The output and the exit status of a command.
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// Returns the exit code. Panics if a signal has killed sqlock itself.
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| panic!("sqlock was killed: {:?}\n{}", self.status, self.stderr))
    }

    /// Fails the test unless the command ended with this code.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code(), code, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }
}

/// Returns the program, which cargo builds for these tests. Signals reach it from now on.
pub fn program() -> &'static str {
    stop_ignoring_signals();
    env!("CARGO_BIN_EXE_sqlock")
}

/// Returns `sqlock ARGUMENTS` on a database, without the other variables of this process that
/// sqlock reads.
///
/// On SQLite the leases are in the sidecar file. An option chooses it, so that sqlock prints no
/// note about it.
pub fn sqlock(db: &TestDatabase, arguments: &[&str]) -> Command {
    let arguments = match DATABASE {
        super::Database::Sqlite => [&["--sidecar"], arguments].concat(),
        _ => arguments.to_vec(),
    };
    let mut command = bare(&arguments);
    command.env("DATABASE_URL", &db.url);
    command
}

/// `sqlock ARGUMENTS` without a database.
pub fn bare(arguments: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    // With CI set, a terminal counts as one that can show colours, whatever TERM says.
    for variable in ["CI", "NO_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "DATABASE_URL"] {
        command.env_remove(variable);
    }
    for variable in ["SQLOCK_NAME", "SQLOCK_OWNER", "SQLOCK_OUTER_OWNERS"] {
        command.env_remove(variable);
    }
    for variable in ["SQLOCK_DATABASE_URL", "SQLOCK_REQUIRE_DATABASE"] {
        command.env_remove(variable);
    }
    command
}

/// Handles SIGINT and SIGQUIT if they are ignored, as in a shell's background job. Children inherit
/// that a signal is ignored, and sqlock then ignores it too; one with a handler here has its
/// default effect there.
fn stop_ignoring_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
        let mask = mask.map_or(0, |hex| u64::from_str_radix(hex.trim(), 16).expect("a mask"));
        for ignored in [Signal::INT, Signal::QUIT] {
            if mask & (1 << (ignored.as_raw() - 1)) != 0 {
                drop(signal(SignalKind::from_raw(ignored.as_raw())).expect("it can be handled"));
            }
        }
    });
}

/// Runs a command to its end.
pub async fn end(mut command: Command) -> Ended {
    let output = soon("the end of sqlock", command.output()).await.expect("sqlock can be started");
    let text = |bytes| String::from_utf8(bytes).expect("sqlock speaks UTF-8");
    Ended { status: output.status, stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Runs `sqlock ARGUMENTS` on a database to its end.
pub async fn run(db: &TestDatabase, arguments: &[&str]) -> Ended {
    end(sqlock(db, arguments)).await
}

/// Starts a command with pipes on stdout and stderr.
pub fn start(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("sqlock can be started")
}

/// A running `sqlock`, with both output streams to wait on.
pub struct Running {
    child: Child,
    stdout: Stream<ChildStdout>,
    stderr: Stream<ChildStderr>,
}

impl Running {
    pub fn start(command: Command) -> Self {
        let mut child = start(command);
        let stdout = Stream::of(child.stdout.take().expect("a pipe was asked for"));
        let stderr = Stream::of(child.stderr.take().expect("a pipe was asked for"));
        Self { child, stdout, stderr }
    }

    pub fn pid(&self) -> Pid {
        let pid = self.child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
        pid.expect("it was not waited for")
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("it can be sent a signal");
    }

    /// Reads stdout up to a line that contains `part`, and returns the line.
    pub async fn prints(&mut self, part: &str) -> String {
        self.stdout.line_with(part).await
    }

    /// Reads stderr up to a line that contains `part`, and returns the line.
    pub async fn says(&mut self, part: &str) -> String {
        self.stderr.line_with(part).await
    }

    /// Closes stdout, as a reader that ends early.
    pub fn close_stdout(&mut self) {
        self.stdout.reader = None;
    }

    /// Waits for the end of the command.
    pub async fn end(mut self) -> Ended {
        let all = async { tokio::join!(self.stdout.rest(), self.stderr.rest(), self.child.wait()) };
        let ((), (), status) = soon("the end of sqlock", all).await;
        let status = status.expect("it can be waited for");
        Ended { status, stdout: self.stdout.read, stderr: self.stderr.read }
    }
}

/// The output of a process, and the position of the reader.
struct Stream<R> {
    reader: Option<BufReader<R>>,
    read: String,
}

impl<R: AsyncRead + Unpin> Stream<R> {
    fn of(reader: R) -> Self {
        Self { reader: Some(BufReader::new(reader)), read: String::new() }
    }

    async fn line_with(&mut self, part: &str) -> String {
        let reader = self.reader.as_mut().expect("it was not closed");
        let line = async {
            loop {
                let start = self.read.len();
                if reader.read_line(&mut self.read).await.expect("sqlock speaks UTF-8") == 0 {
                    panic!("it ended without {part:?}:\n{}", self.read);
                }
                if self.read[start..].contains(part) {
                    return self.read[start..].to_owned();
                }
            }
        };
        soon(part, line).await
    }

    async fn rest(&mut self) {
        if let Some(reader) = &mut self.reader {
            reader.read_to_string(&mut self.read).await.expect("sqlock speaks UTF-8");
        }
    }
}

/// A port without a listener, reserved until this is dropped.
pub struct ClosedPort(tokio::net::TcpSocket);

impl ClosedPort {
    pub fn reserve() -> Self {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.bind(([127, 0, 0, 1], 0).into()).expect("a port is free");
        Self(socket)
    }

    pub fn number(&self) -> u16 {
        self.0.local_addr().expect("it is bound").port()
    }
}

/// Creates a client on the database in which the command keeps its leases, with the tables.
pub async fn beside(db: &TestDatabase) -> Locks {
    let locks = db.of_the_command().locks().await;
    locks.migrate().await.expect("migrate");
    locks
}

/// Reads the holder of a name.
pub async fn held(locks: &Locks, name: &str) -> Option<LeaseInfo> {
    locks.inspect(name).await.expect("inspect")
}

impl TestDatabase {
    /// Returns the database with the command's leases, to inspect them with the library: on SQLite
    /// the sidecar file, otherwise the same database.
    pub fn of_the_command(&self) -> TestDatabase {
        match DATABASE {
            super::Database::Sqlite => TestDatabase { url: self.url.replace("test.db", "test.db-sqlock"), _file: None },
            _ => TestDatabase { url: self.url.clone(), _file: None },
        }
    }
}

/// Returns the path of a file in a test's directory, as text for a command line.
pub fn path(directory: &Path, name: &str) -> String {
    let path: PathBuf = directory.join(name);
    path.into_os_string().into_string().expect("temporary directories have plain names")
}
