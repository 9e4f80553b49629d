//! The command and what it has started: all that must die with it.

use std::time::Duration;

use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
#[cfg(target_os = "linux")]
use nix::unistd::getpid;
use sqlock::Owner;

use super::schedule::{nanos, now};

/// The command and what it has started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessTree {
    pub group: Pid,
    /// In the environment of each of them, also of one that has left the process group.
    pub marker: String,
}

impl ProcessTree {
    /// The variable that has the markers.
    pub const MARKER_VARIABLE: &str = "SQLOCK_RUN";

    pub fn new_marker() -> String {
        Owner::random().to_string()
    }

    /// With those of the runs around this one, which must find its processes too.
    pub fn join_markers(marker: &str) -> String {
        std::env::var(Self::MARKER_VARIABLE).map_or_else(|_| marker.to_owned(), |outer| format!("{outer},{marker}"))
    }

    /// Kills all of them.
    pub fn kill(&self) {
        let _ = killpg(self.group, Signal::SIGKILL);
        // Those that made themselves a session of their own. They may be starting others just now: until none is seen
        // twice in a row, but not for ever.
        let (mut unseen, give_up) = (0, now().saturating_add(nanos(Duration::from_secs(5))));
        while unseen < 2 && now() < give_up {
            let find_detached = self.find_detached();
            unseen = if find_detached.is_empty() { unseen + 1 } else { 0 };
            for process in find_detached {
                let _ = kill(process, Signal::SIGKILL);
            }
        }
    }

    /// Whether the group has processes and all of them are zombies. `false` where that cannot be known.
    #[cfg(target_os = "linux")]
    pub fn is_defunct(&self) -> bool {
        // A process that ends after it has started another may hide the new one from a single look.
        can_see_all_processes() && self.has_only_zombies() && self.has_only_zombies()
    }

    #[cfg(target_os = "linux")]
    fn has_only_zombies(&self) -> bool {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let stats = processes.filter_map(|process| std::fs::read_to_string(process.path().join("stat")).ok());
        // Whether each process of the group is a zombie. After the name, in parentheses, come the state, the parent and the group; the
        // eighteenth is the number of threads. A process whose first thread has ended looks like a zombie, but others may go on.
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

    /// Living processes with the marker that are not in the group.
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

/// Whether `/proc` has all processes of this PID namespace: a container may have been given that of another one, and it may hide
/// the processes of other users.
#[cfg(target_os = "linux")]
fn can_see_all_processes() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    ids.is_some_and(|ids| ids.trim() == getpid().to_string()) && std::fs::metadata("/proc/1/stat").is_ok()
}
