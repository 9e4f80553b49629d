//! The `sqlock` command, started as its users start it.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};

use tokio::process::{Child, Command};

use super::{Fresh, soon};
use crate::DATABASE;

/// What it has said and how it ended.
pub struct Ended {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    /// The exit code; it panics when a signal has killed sqlock itself.
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| panic!("sqlock was killed: {:?}\n{}", self.status, self.stderr))
    }

    /// Fails the test unless it ended with this code.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.code(), code, "stdout:\n{}\nstderr:\n{}", self.stdout, self.stderr);
        self
    }
}

/// The program, which cargo builds for these tests.
pub fn program() -> &'static str {
    env!("CARGO_BIN_EXE_sqlock")
}

/// `sqlock ARGUMENTS` on a database, with nothing else of this process's environment that it looks at.
pub fn sqlock(db: &Fresh, arguments: &[&str]) -> Command {
    let mut command = bare(arguments);
    command.env("DATABASE_URL", &db.url);
    command
}

/// `sqlock ARGUMENTS` without a database.
pub fn bare(arguments: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    for variable in ["DATABASE_URL", "NO_COLOR", "CLICOLOR_FORCE", "SQLOCK_NAME", "SQLOCK_OWNER", "SQLOCK_OUTER_OWNERS"]
    {
        command.env_remove(variable);
    }
    command
}

/// Runs it to its end.
pub async fn end(mut command: Command) -> Ended {
    let output = soon("the end of sqlock", command.output()).await.expect("sqlock can be started");
    let text = |bytes| String::from_utf8(bytes).expect("sqlock speaks UTF-8");
    Ended { status: output.status, stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Runs `sqlock ARGUMENTS` on a database to its end.
pub async fn run(db: &Fresh, arguments: &[&str]) -> Ended {
    end(sqlock(db, arguments)).await
}

/// Starts it with pipes on stdout and stderr.
pub fn start(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("sqlock can be started")
}

impl Fresh {
    /// The place behind a URL, which somebody else looks after.
    pub fn at(url: String) -> Fresh {
        Fresh { url, _file: None }
    }

    /// The place where the command keeps its leases: on SQLite the sidecar file, else the same. For looking at them with
    /// the library.
    pub fn of_the_command(&self) -> Fresh {
        match DATABASE {
            super::Database::Sqlite => Fresh { url: self.url.replace("test.db", "test.db-sqlock"), _file: None },
            _ => Fresh { url: self.url.clone(), _file: None },
        }
    }
}

/// A file in a directory that a test has made, as text for a command line.
pub fn path(directory: &Path, name: &str) -> String {
    let path: PathBuf = directory.join(name);
    path.into_os_string().into_string().expect("temporary directories have plain names")
}
