//! The watchdog: a process beside sqlock that kills the command before the lease ends.
//!
//! sqlock may be stopped (`kill -STOP`), killed, or blocked by a database; the watchdog only waits
//! for a clock. sqlock sends the new deadline to the watchdog after each renewal, over a socket.
//! Near the deadline the watchdog stops the command. When the socket closes without a shutdown
//! message, sqlock has died, and the watchdog kills the command at once.
//!
//! The clock and the timer are CLOCK_BOOTTIME, which counts suspend.

mod alarm;
mod message;
pub mod process;

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpid};

use super::process_tree::ProcessTree;
use super::reaper::Reaper;
use super::schedule::KillSchedule;
use crate::exit::Failure;
use message::{ARGUMENT, Instructions, KILLED, PROCESS_NAME, SIGNALED};

/// A handle of the watchdog's process.
pub struct Watchdog {
    pid: Pid,
    socket: UnixStream,
}

/// The watchdog's last action on the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intervention {
    Signaled,
    Killed,
}

impl Watchdog {
    pub fn start(reaper: &Reaper) -> Result<Self, Failure> {
        Self::spawn(reaper).map_err(|error| Failure::system(format!("cannot start the watchdog: {error}")))
    }

    fn spawn(reaper: &Reaper) -> io::Result<Self> {
        let (socket, watchdog_socket) = UnixStream::pair()?;
        // A write to a watchdog that was stopped must not block.
        socket.set_nonblocking(true)?;
        // On Linux this path works even after an update has replaced the program.
        let program = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
        let mut command = Command::new(program);
        command
            // No "sqlock" in the names: a "pkill sqlock" must not end both.
            .arg0(format!("{PROCESS_NAME} of {}", getpid()))
            .arg(ARGUMENT)
            // The environment has no marker of an enclosing run, which would kill the watchdog
            // before the command.
            .env_clear()
            // Signals of the terminal and signals to sqlock's group do not reach the watchdog.
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(watchdog_socket)))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Ok(Self { pid: reaper.spawn(&mut command)?, socket })
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Makes the message with which the command registers itself.
    pub fn registration(&self, marker: &str, schedule: KillSchedule) -> io::Result<Registration> {
        let process_tree = ProcessTree { group: Pid::from_raw(0), marker: marker.into() };
        Ok(Registration { socket: self.socket.try_clone()?, bytes: Instructions { process_tree, schedule }.to_bytes() })
    }

    /// Sends a new schedule. A watchdog that has signaled the command ignores it.
    pub fn update(&mut self, process_tree: &ProcessTree, schedule: &KillSchedule) {
        let instructions = Instructions { process_tree: process_tree.clone(), schedule: *schedule };
        match self.socket.write_all(&instructions.to_bytes()) {
            // The watchdog was stopped, and the socket is full: a new watchdog replaces it.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let _ = kill(self.pid, Signal::SIGKILL);
            }
            // The reaper reports a watchdog that has died.
            _ => {}
        }
    }

    /// Shuts down the watchdog, and returns its last action.
    pub fn stop(mut self) -> Option<Intervention> {
        let _ = self.socket.write_all(&[Instructions::SHUTDOWN; Instructions::BYTES]);
        let _ = self.socket.shutdown(Shutdown::Write);
        let mut reports = Vec::new();
        let _ = self.socket.set_nonblocking(false);
        let _ = self.socket.set_read_timeout(Some(Duration::from_millis(500)));
        if self.socket.read_to_end(&mut reports).is_err() {
            // The watchdog was stopped, and has nothing left to do.
            let _ = kill(self.pid, Signal::SIGKILL);
        }
        match reports.last() {
            Some(&KILLED) => Some(Intervention::Killed),
            Some(&SIGNALED) => Some(Intervention::Signaled),
            _ => None,
        }
    }
}

/// The first instructions. The process group is added by the new process, which knows it.
pub struct Registration {
    socket: UnixStream,
    bytes: Vec<u8>,
}

impl Registration {
    /// Sends the message as the leader of a process group, without allocating.
    pub fn send(&mut self) -> io::Result<()> {
        let group = getpid().as_raw().to_le_bytes();
        for (byte, group) in self.bytes.iter_mut().zip(group) {
            *byte = group;
        }
        self.socket.write_all(&self.bytes)
    }
}
