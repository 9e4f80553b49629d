//! The processes that must die with the lease: the command and all processes that it has started.

use std::time::Duration;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
#[cfg(target_os = "linux")]
use nix::unistd::getpid;
use sqlock::Owner;

use super::schedule::{nanos, now};

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

    /// Kills all processes.
    pub fn kill(&self) {
        let _ = killpg(self.group, Signal::SIGKILL);
        // Detached processes may be starting others: look again until none is seen twice in a row,
        // for 5 seconds at most.
        let (mut unseen, give_up) = (0, now().saturating_add(nanos(Duration::from_secs(5))));
        while unseen < 2 && now() < give_up {
            let detached = self.find_detached();
            unseen = if detached.is_empty() { unseen + 1 } else { 0 };
            for pid in detached {
                let _ = kill(pid, Signal::SIGKILL);
            }
        }
    }

    /// Returns whether the group has processes and all of them are zombies. `false` if this is
    /// unknown.
    #[cfg(target_os = "linux")]
    pub fn is_defunct(&self) -> bool {
        // A single look can miss a process whose parent ends at the same time.
        can_see_all_processes() && self.has_only_zombies() && self.has_only_zombies()
    }

    #[cfg(target_os = "linux")]
    fn has_only_zombies(&self) -> bool {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let stats = processes.filter_map(|process| std::fs::read_to_string(process.path().join("stat")).ok());
        // In `stat`, the state, the parent and the group follow the name in parentheses; the 18th
        // field is the number of threads. A process whose first thread has ended looks like a
        // zombie while others run.
        let mut zombies = stats.filter_map(|stat| {
            let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
            let is_zombie = matches!(*fields.first()?, "Z" | "X") && matches!(*fields.get(17)?, "0" | "1");
            (fields.get(2)?.parse() == Ok(self.group.as_raw())).then_some(is_zombie)
        });
        zombies.next() == Some(true) && zombies.all(|is_zombie| is_zombie)
    }

    #[cfg(not(target_os = "linux"))]
    pub fn is_defunct(&self) -> bool {
        false
    }

    /// Finds living processes with the marker that are not in the group.
    #[cfg(target_os = "linux")]
    fn find_detached(&self) -> Vec<Pid> {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let marked = processes.filter_map(|process| {
            let pid = Pid::from_raw(process.file_name().to_str()?.parse().ok()?);
            let environment = std::fs::read(process.path().join("environ")).ok()?;
            let has_marker = environment.split(|byte| *byte == 0).any(|variable| {
                let markers =
                    variable.strip_prefix(Self::MARKER_VARIABLE.as_bytes()).and_then(|value| value.strip_prefix(b"="));
                markers.is_some_and(|markers| {
                    markers.split(|byte| *byte == b',').any(|marker| marker == self.marker.as_bytes())
                })
            });
            (has_marker && nix::unistd::getpgid(Some(pid)) != Ok(self.group)).then_some(pid)
        });
        marked.collect()
    }

    #[cfg(not(target_os = "linux"))]
    fn find_detached(&self) -> Vec<Pid> {
        Vec::new()
    }
}

/// Returns whether `/proc` shows all processes of this PID namespace: a container may have the
/// `/proc` of another one, and `/proc` may hide the processes of other users.
#[cfg(target_os = "linux")]
fn can_see_all_processes() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    ids.is_some_and(|ids| ids.trim() == getpid().to_string()) && std::fs::metadata("/proc/1/stat").is_ok()
}
