//! This program as another process, which a storm stops and kills.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

/// A process. Dropping this kills the process; dropping `stdin` ends its standard input.
pub(super) struct Process {
    pub(super) child: Child,
}

impl Process {
    pub(super) fn start<A: AsRef<OsStr>>(arguments: impl IntoIterator<Item = A>) -> Self {
        let this = std::env::current_exe().expect("a program knows where it is");
        let mut command = Command::new(this);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        Self { child: command.spawn().expect("a process can be started") }
    }

    /// Waits for the next line of the process's standard output.
    pub(super) fn read_line(&mut self) -> String {
        let mut line = String::new();
        let stdout = self.child.stdout.as_mut().expect("it is a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("a line");
        line.trim_end().to_owned()
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("it is ours");
    }

    pub(super) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
