//! The process of the command: a process group of its own that does not outlive the lease.

use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::{Pid, getpid};
use sqlock::Owner;

use super::process_tree::ProcessTree;
use super::reaper::{Change, Reaper};
use super::schedule::{KillSchedule, KillTerms};
use super::watchdog::{Registration, Watchdog};
use crate::describe;
use crate::environment::{NAME_VARIABLE, OUTER_OWNERS_VARIABLE, OWNER_VARIABLE, enclosing_owners};
use crate::exit::{self, Failure};
use crate::lease::HeldLease;
use crate::process_list;
use crate::stderr::{self, quote};

/// The command while it runs.
pub struct Child {
    pid: Pid,
    process_tree: ProcessTree,
    /// Whether the system has refused a signal to all processes of the group.
    is_out_of_reach: AtomicBool,
}

/// A change of the state of a process.
pub enum ChildEvent {
    Exited(u8),
    /// By the signal with this number.
    Killed(i32),
    /// By the signal with this number.
    Stopped(i32),
    /// Another child has exited: the watchdog, or an orphan of the command.
    OtherExited(Pid),
    OtherStopped,
    /// Children can no longer be reaped.
    ReaperEnded,
}

impl Child {
    /// Starts the command under a watchdog, unless the lease has run out meanwhile.
    pub fn start(
        words: &[OsString],
        lease: &HeldLease,
        reaper: &Reaper,
        watchdog: &Watchdog,
        terms: &KillTerms,
    ) -> Result<Self, Failure> {
        let Some((program, arguments)) = words.split_first() else {
            return Err(Failure::usage("no command is given"));
        };
        let outer = enclosing_owners().iter().map(Owner::to_string).collect::<Vec<_>>().join(",");
        let marker = ProcessTree::new_marker();
        let mut command = Command::new(program);
        command
            .args(arguments)
            .process_group(0)
            .env(NAME_VARIABLE, lease.name().as_str())
            .env("SQLOCK_TOKEN", lease.token().to_string())
            .env(OWNER_VARIABLE, lease.owner().to_string())
            .env("SQLOCK_EXPIRES_AT", describe::format_expiry(lease.remaining()))
            .env(ProcessTree::MARKER_VARIABLE, ProcessTree::join_markers(&marker));
        // With this name, an operator finds the sessions of a killed command in pg_stat_activity. It
        // replaces the one that the enclosing run has set.
        let given = std::env::var_os("PGAPPNAME");
        if given.is_none() || given == std::env::var_os(NAME_VARIABLE).map(|name| session_name(&name)) {
            command.env("PGAPPNAME", session_name(lease.name().as_str().as_ref()));
        }
        if !outer.is_empty() {
            command.env(OUTER_OWNERS_VARIABLE, outer);
        }
        let schedule = KillSchedule::for_lease(lease, terms);
        let registration = watchdog.registration(&marker, schedule).map_err(|e| Failure::system(e.to_string()))?;
        prepare_exec(&mut command, registration, schedule);
        let pid = match reaper.spawn(&mut command) {
            Ok(pid) => pid,
            Err(_) if schedule.is_kill_due() => {
                let name = quote(lease.name().as_str());
                return Err(Failure::new(
                    exit::LOST,
                    format!("the lease on {name} ran out before the command could start"),
                ));
            }
            Err(error) => return Err(start_failure(program, &error)),
        };
        Ok(Self { pid, process_tree: ProcessTree { group: pid, marker }, is_out_of_reach: AtomicBool::new(false) })
    }

    /// Returns the process group of the command.
    pub fn group(&self) -> Pid {
        self.pid
    }

    /// Returns the processes that must die with the command.
    pub fn process_tree(&self) -> &ProcessTree {
        &self.process_tree
    }

    /// Returns what a change of a child means for the command. `None`: the reaper has ended.
    pub fn event(&self, change: Option<Change>) -> ChildEvent {
        let Some((pid, status)) = change else { return ChildEvent::ReaperEnded };
        match (status.exit_status(), status.terminating_signal(), status.stopping_signal()) {
            (Some(code), ..) if pid == self.pid => ChildEvent::Exited(code as u8),
            (_, Some(signal), _) if pid == self.pid => ChildEvent::Killed(signal),
            (.., Some(signal)) if pid == self.pid => ChildEvent::Stopped(signal),
            (.., Some(_)) => ChildEvent::OtherStopped,
            _ => ChildEvent::OtherExited(pid),
        }
    }

    /// Sends a signal to the process group, if any process of it is left.
    pub fn signal(&self, signal: Signal) {
        self.record_refusal(killpg(self.pid, signal));
    }

    /// Prints a warning at the first signal that the system refuses.
    fn record_refusal(&self, sent: Result<(), Errno>) {
        let is_refused = sent == Err(Errno::EPERM) && !self.process_tree.is_defunct();
        if is_refused && !self.is_out_of_reach.swap(true, Ordering::Relaxed) {
            stderr::print_warning("no signal can be sent to the command, because it runs as another user");
        }
    }

    /// Returns whether the system has refused a signal to all processes of the group.
    pub fn is_out_of_reach(&self) -> bool {
        self.is_out_of_reach.load(Ordering::Relaxed)
    }

    /// Returns whether any process of the group is alive. Zombies do not count: their parent may
    /// never reap them.
    pub fn has_group(&self) -> bool {
        killpg(self.pid, None) != Err(Errno::ESRCH) && !self.process_tree.is_defunct()
    }

    /// Returns whether the command is stopped: its continuation is not reported. `true` if this is
    /// unknown.
    pub fn is_stopped(&self) -> bool {
        process_list::is_stopped(self.pid)
    }

    /// Kills the command and all processes that it has started.
    pub fn kill(&self) {
        self.process_tree.kill(getpid());
        self.record_refusal(killpg(self.pid, None));
    }
}

/// Returns the name for the database sessions of a command.
fn session_name(lease_name: &OsStr) -> OsString {
    let mut name = OsString::from("sqlock:");
    name.push(lease_name);
    name
}

/// Makes this process the parent of the command's orphans, so that the reaper reaps them. The init
/// of a container may not reap them.
pub fn adopt_orphans() {
    // Available since Linux 3.4. On other systems init is their parent.
    #[cfg(target_os = "linux")]
    let _ = nix::sys::prctl::set_child_subreaper(true);
}

/// Sets what the new process does between fork and exec.
///
/// The new process registers with the watchdog, because sqlock may be stopped right after the fork.
/// It fails if the lease has run out, because sqlock may have been stopped before the fork. On
/// Linux it asks the kernel to kill it when sqlock ends; on other systems only the watchdog does.
fn prepare_exec(command: &mut Command, mut registration: Registration, schedule: KillSchedule) {
    let parent = nix::unistd::getpid();
    let act = move || {
        registration.send()?;
        #[cfg(target_os = "linux")]
        nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
        // The kernel sends no signal for a parent that ended before this call.
        if nix::unistd::getppid() != parent || schedule.is_kill_due() {
            return Err(io::Error::from(ErrorKind::TimedOut));
        }
        Ok(())
    };
    // SAFETY: `act` makes system calls only (getpid, write, prctl, getppid, clock_gettime) and
    // allocates nothing: an error made from an errno or a kind needs no memory.
    #[allow(unsafe_code, reason = "the only way to run code between fork and exec")]
    unsafe {
        command.pre_exec(act);
    }
}

fn start_failure(program: &OsString, error: &io::Error) -> Failure {
    let name = quote(&program.to_string_lossy());
    match error.kind() {
        ErrorKind::NotFound => Failure::new(exit::NOT_FOUND, format!("command not found: {name}")),
        // The system has no process or no memory left.
        ErrorKind::WouldBlock | ErrorKind::OutOfMemory => Failure::system(format!("cannot start {name}: {error}")),
        // From the registration: `execve` has no such error.
        ErrorKind::BrokenPipe => Failure::system(format!("cannot start {name}: its watchdog has ended")),
        _ => Failure::new(exit::NOT_EXECUTABLE, format!("cannot execute {name}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_failure_tells_command_and_system_apart() {
        for (errno, code) in [
            (Errno::ENOENT, exit::NOT_FOUND),
            (Errno::EACCES, exit::NOT_EXECUTABLE),
            (Errno::ENOEXEC, exit::NOT_EXECUTABLE),
            (Errno::EAGAIN, exit::SYSTEM),
            (Errno::ENOMEM, exit::SYSTEM),
            (Errno::EPIPE, exit::SYSTEM),
        ] {
            assert_eq!(start_failure(&"make".into(), &errno.into()).code, code, "{errno}");
        }
        let failure = start_failure(&"make".into(), &Errno::EPIPE.into());
        assert_eq!(failure.message, "cannot start \"make\": its watchdog has ended");
    }
}
