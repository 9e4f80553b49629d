//! The processes of this host, as `/proc` lists them.

use std::fs;
use std::time::Duration;

use nix::unistd::Pid;
use tokio::process::Child;
use tokio::time::sleep;

use super::soon;

pub(super) fn pid_of(child: &Child) -> Pid {
    let pid = child.id().expect("the process was not waited for");
    Pid::from_raw(i32::try_from(pid).expect("a process id"))
}

/// Polls until a condition holds.
pub async fn poll_until(what: &str, is_so: impl Fn() -> bool) {
    let wait = async {
        while !is_so() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    soon(what, wait).await;
}

/// Polls until a value is found.
pub async fn poll_for<T>(what: &str, find: impl Fn() -> Option<T>) -> T {
    let wait = async {
        loop {
            if let Some(found) = find() {
                return found;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    soon(what, wait).await
}

/// Finds the shell that runs as the command of a sqlock.
pub async fn shell_of(sqlock: Pid) -> Pid {
    poll_for("the command", || children(sqlock).into_iter().find(|child| name(*child) == "sh")).await
}

/// Reads the fields of `/proc/PID/stat` after the name: the state, the parent, the process group, …
fn stat(pid: Pid) -> Option<Vec<String>> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    Some(stat.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect())
}

/// Returns the state of a process: `R`, `S`, `T` (stopped), `Z` (a zombie), …; `None`: the process
/// does not exist.
pub fn state(pid: Pid) -> Option<char> {
    stat(pid)?.first()?.chars().next()
}

pub fn parent(pid: Pid) -> Option<Pid> {
    stat(pid)?.get(1)?.parse().ok().map(Pid::from_raw)
}

pub fn group(pid: Pid) -> Option<Pid> {
    stat(pid)?.get(2)?.parse().ok().map(Pid::from_raw)
}

pub fn name(pid: Pid) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

pub fn children(of: Pid) -> Vec<Pid> {
    let processes = fs::read_dir("/proc").expect("there is a /proc").flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok().map(Pid::from_raw));
    pids.filter(|pid| parent(*pid) == Some(of)).collect()
}
