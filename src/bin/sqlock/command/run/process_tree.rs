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
pub struct Quarry {
    pub group: Pid,
    /// In the environment of each of them, also of one that has left the process group.
    pub mark: String,
}

impl Quarry {
    /// The variable that has the marks.
    pub const MARK: &str = "SQLOCK_RUN";

    pub fn new_mark() -> String {
        Owner::random().to_string()
    }

    /// With those of the runs around this one, which must find its processes too.
    pub fn marks_with(mark: &str) -> String {
        std::env::var(Self::MARK).map_or_else(|_| mark.to_owned(), |outer| format!("{outer},{mark}"))
    }

    /// Kills all of them.
    pub fn kill(&self) {
        let _ = killpg(self.group, Signal::SIGKILL);
        // Those that made themselves a session of their own. They may be starting others just now: until none is seen
        // twice in a row, but not for ever.
        let (mut unseen, give_up) = (0, now().saturating_add(nanos(Duration::from_secs(5))));
        while unseen < 2 && now() < give_up {
            let strays = self.strays();
            unseen = if strays.is_empty() { unseen + 1 } else { 0 };
            for stray in strays {
                let _ = kill(stray, Signal::SIGKILL);
            }
        }
    }

    /// Whether the group has processes and all of them are zombies. `false` where that cannot be known.
    #[cfg(target_os = "linux")]
    pub fn is_of_zombies(&self) -> bool {
        // A process that ends after it has started another may hide the new one from a single look.
        knows_our_pids() && self.all_are_zombies() && self.all_are_zombies()
    }

    #[cfg(target_os = "linux")]
    fn all_are_zombies(&self) -> bool {
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
    pub fn is_of_zombies(&self) -> bool {
        false
    }

    /// Living processes with the mark that are not in the group.
    #[cfg(target_os = "linux")]
    fn strays(&self) -> Vec<Pid> {
        let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let marked = processes.filter_map(|process| {
            let pid = Pid::from_raw(process.file_name().to_str()?.parse().ok()?);
            let environment = std::fs::read(process.path().join("environ")).ok()?;
            let has_mark = environment.split(|byte| *byte == 0).any(|variable| {
                let marks = variable.strip_prefix(Self::MARK.as_bytes()).and_then(|value| value.strip_prefix(b"="));
                marks.is_some_and(|marks| marks.split(|byte| *byte == b',').any(|mark| mark == self.mark.as_bytes()))
            });
            (has_mark && nix::unistd::getpgid(Some(pid)) != Ok(self.group)).then_some(pid)
        });
        marked.collect()
    }

    #[cfg(not(target_os = "linux"))]
    fn strays(&self) -> Vec<Pid> {
        Vec::new()
    }
}

/// Whether `/proc` has all processes of this PID namespace: a container may have been given that of another one, and it may hide
/// the processes of other users.
#[cfg(target_os = "linux")]
fn knows_our_pids() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    ids.is_some_and(|ids| ids.trim() == getpid().to_string()) && std::fs::metadata("/proc/1/stat").is_ok()
}
