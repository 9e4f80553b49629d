//! The guard: a process beside sqlock that kills the command in time, whatever becomes of sqlock.
//!
//! sqlock may be stopped (`kill -STOP`), killed, or busy with a database that does not answer; the watchdog has nothing to do
//! but to wait for a clock. It is told the deadline anew after each renewal, over a socket. When the deadline comes near,
//! it stops the command; when the socket closes without a goodbye, sqlock has died, and it kills the command at once.
//!
//! The clock is CLOCK_BOOTTIME, which goes on while the machine sleeps, and so does the timer.

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
use super::schedule::KillSchedule;
use crate::exit::Failure;
use message::{ARGUMENT, Instructions, KILLED, SIGNALED};

/// The watchdog, as sqlock sees it.
pub struct Watchdog {
    pid: Pid,
    socket: UnixStream,
}

/// What the watchdog has done to the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Intervention {
    Signaled,
    Killed,
}

impl Watchdog {
    pub fn start() -> Result<Self, Failure> {
        Self::spawn().map_err(|error| Failure::system(format!("the watchdog does not start: {error}")))
    }

    fn spawn() -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        // Should the watchdog be stopped, what it is told would pile up; it is not waited for.
        socket.set_nonblocking(true)?;
        // On Linux also after this program was replaced by a newer one.
        let program = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
        let watchdog = Command::new(program)
            .arg0(format!("lease-guard of {}", getpid()))
            .arg(ARGUMENT)
            // It needs nothing of that, and must not have the marker of an enclosing run: it dies after its command, not before.
            .env_clear()
            // Out of reach of the terminal's signals, and of those sent to our group.
            .process_group(0)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { pid: Pid::from_raw(watchdog.id().cast_signed()), socket })
    }

    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// For the command to tell the watchdog of itself.
    pub fn registration(&self, marker: &str, schedule: KillSchedule) -> io::Result<Registration> {
        let process_tree = ProcessTree { group: Pid::from_raw(0), marker: marker.into() };
        Ok(Registration { socket: self.socket.try_clone()?, bytes: Instructions { process_tree, schedule }.to_bytes() })
    }

    /// What is to be done from now on. A watchdog that was told to stop the command already goes on with that.
    pub fn update(&mut self, process_tree: &ProcessTree, schedule: &KillSchedule) {
        let instructions = Instructions { process_tree: process_tree.clone(), schedule: *schedule };
        match self.socket.write_all(&instructions.to_bytes()) {
            // It was stopped so long ago that there is no room for more: a new one is better.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                let _ = kill(self.pid, Signal::SIGKILL);
            }
            // When it has died, we learn of it as of any child.
            _ => {}
        }
    }

    /// Sends it home, and tells what it has done.
    pub fn stop(mut self) -> Option<Intervention> {
        let _ = self.socket.write_all(&[Instructions::SHUTDOWN; Instructions::BYTES]);
        let _ = self.socket.shutdown(Shutdown::Write);
        let mut reports = Vec::new();
        let _ = self.socket.set_nonblocking(false);
        let _ = self.socket.set_read_timeout(Some(Duration::from_millis(500)));
        if self.socket.read_to_end(&mut reports).is_err() {
            // It was stopped, and would have nothing to do any more.
            let _ = kill(self.pid, Signal::SIGKILL);
        }
        match reports.last() {
            Some(&KILLED) => Some(Intervention::Killed),
            Some(&SIGNALED) => Some(Intervention::Signaled),
            _ => None,
        }
    }
}

/// The first instructions, but for the process group, which is known only when the process is there.
pub struct Registration {
    socket: UnixStream,
    bytes: Vec<u8>,
}

impl Registration {
    /// Sends it as the leader of a process group. It allocates nothing.
    pub fn send(&mut self) -> io::Result<()> {
        let group = getpid().as_raw().to_le_bytes();
        for (byte, group) in self.bytes.iter_mut().zip(group) {
            *byte = group;
        }
        self.socket.write_all(&self.bytes)
    }
}
