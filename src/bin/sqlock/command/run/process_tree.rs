//! The processes that must die with the lease: the command and all processes that it has started.

use std::time::Duration;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, getpgid};
use sqlock::Owner;

use super::schedule::{nanos, now};
use crate::process_list;

/// The process group of the command, and the processes that have left it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessTree {
    pub group: Pid,
    /// A text in the environment of each process, even of a process that has left the group.
    pub marker: String,
}

impl ProcessTree {
    /// The variable that has the markers, separated by commas.
    pub const MARKER_VARIABLE: &str = "SQLOCK_RUN";

    pub fn new_marker() -> String {
        Owner::random().to_string()
    }

    /// Appends a marker to the markers of enclosing runs, which must find the processes too.
    pub fn join_markers(marker: &str) -> String {
        std::env::var(Self::MARKER_VARIABLE).map_or_else(|_| marker.to_owned(), |outer| format!("{outer},{marker}"))
    }

    /// Kills all processes. `sqlock` is the process that has started the command.
    pub fn kill(&self, sqlock: Pid) {
        let _ = killpg(self.group, Signal::SIGKILL);
        // sqlock adopts the command's orphans, so its descendants are killed first: reading all
        // processes takes long on a busy machine.
        self.kill_detached(process_list::descendants(sqlock));
        // Detached processes may be starting others: look again until none is seen twice in a row,
        // for 5 seconds at most.
        let (mut unseen, give_up) = (0, now().saturating_add(nanos(Duration::from_secs(5))));
        while unseen < 2 && now() < give_up {
            unseen = if self.kill_detached(process_list::ids()) { 0 } else { unseen + 1 };
        }
    }

    /// Kills the living processes with the marker that are not in the group. Returns whether there
    /// were any.
    fn kill_detached(&self, processes: impl Iterator<Item = Pid>) -> bool {
        let mut found = false;
        // The PID that is shown can be that of an unrelated process here.
        for pid in processes.filter(|shown| self.has_marker(*shown)).filter_map(process_list::local_pid) {
            if getpgid(Some(pid)) != Ok(self.group) {
                found = true;
                let _ = kill(pid, Signal::SIGKILL);
            }
        }
        found
    }

    /// Returns whether the group has processes and all of them are zombies. `false` if this is
    /// unknown.
    pub fn is_defunct(&self) -> bool {
        // A single look can miss a process whose parent ends at the same time.
        process_list::is_complete() && self.has_only_zombies() && self.has_only_zombies()
    }

    fn has_only_zombies(&self) -> bool {
        let processes = process_list::list();
        let mut group = processes.iter().filter(|process| process.group == self.group).peekable();
        group.peek().is_some() && group.all(|process| process.is_zombie)
    }

    /// Returns whether a process of the list has the marker in its environment.
    fn has_marker(&self, shown: Pid) -> bool {
        let environment = std::fs::read(format!("/proc/{shown}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|variable| {
            let markers =
                variable.strip_prefix(Self::MARKER_VARIABLE.as_bytes()).and_then(|value| value.strip_prefix(b"="));
            markers.is_some_and(|markers| {
                markers.split(|byte| *byte == b',').any(|marker| marker == self.marker.as_bytes())
            })
        })
    }
}
