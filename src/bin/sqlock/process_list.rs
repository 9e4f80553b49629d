//! The list of all processes: what Linux shows in `/proc`. Empty on other systems.

use std::iter;

use nix::unistd::{Pid, getpgrp, getpid, getsid};

/// A process, as `/proc/PID/stat` shows it.
pub struct Process {
    pub pid: Pid,
    pub parent: Pid,
    pub group: Pid,
    session: Pid,
    pub is_zombie: bool,
    is_stopped: bool,
}

/// Lists all processes that `/proc` shows.
pub fn list() -> Vec<Process> {
    ids().filter_map(read).collect()
}

fn read(pid: Pid) -> Option<Process> {
    parse(pid, &std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Lists the directories of `/proc` that are processes.
pub fn ids() -> impl Iterator<Item = Pid> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| to_pid(entry.file_name().to_str()?))
}

fn to_pid(number: &str) -> Option<Pid> {
    number.parse().ok().map(Pid::from_raw)
}

/// Lists the children of a process, their children, and so on. May miss some while processes start
/// and end, and is empty where the kernel keeps no lists of children.
pub fn descendants(ancestor: Pid) -> impl Iterator<Item = Pid> {
    let (mut found, mut next) = (children(ancestor), 0);
    iter::from_fn(move || {
        let pid = *found.get(next)?;
        next += 1;
        found.extend(children(pid));
        Some(pid)
    })
}

fn children(parent: Pid) -> Vec<Pid> {
    let threads = std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(to_pid).collect::<Vec<_>>()).collect()
}

/// Parses a line of `/proc/PID/stat`. The state, the parent, the group and the session follow the
/// name in parentheses; the 18th field after the name is the number of threads.
fn parse(pid: Pid, stat: &str) -> Option<Process> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let id = |i: usize| to_pid(fields.get(i)?);
    // A process whose first thread has ended looks like a zombie while others run.
    let is_zombie = matches!(*fields.first()?, "Z" | "X") && matches!(*fields.get(17)?, "0" | "1");
    let is_stopped = *fields.first()? == "T";
    Some(Process { pid, parent: id(1)?, group: id(2)?, session: id(3)?, is_zombie, is_stopped })
}

/// Returns the PID of a process in this PID namespace: a container may have the `/proc` of an outer
/// one. `None`: the process is not in this namespace.
pub fn local_pid(shown: Pid) -> Option<Pid> {
    let depth = namespace_pids("self")?.len();
    let namespace = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/pid")).ok();
    let shown = shown.to_string();
    let is_visible = depth == 1 || namespace(&shown)? == namespace("self")?;
    is_visible.then(|| namespace_pids(&shown)?.get(depth - 1).copied()).flatten()
}

/// Returns the PIDs of a process in the namespace of `/proc`, and in each one inside of that up to
/// the namespace of the process.
fn namespace_pids(process: &str) -> Option<Vec<Pid>> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    pids.split_whitespace().map(to_pid).collect()
}

/// Returns whether `/proc` shows all processes of this PID namespace by their PIDs: it may be the
/// `/proc` of another namespace, and it may hide the processes of other users.
pub fn is_complete() -> bool {
    namespace_pids("self").is_some_and(|pids| pids == [getpid()]) && std::fs::metadata("/proc/1/stat").is_ok()
}

/// Returns whether a process is stopped. `true` if this is unknown.
pub fn is_stopped(pid: Pid) -> bool {
    !is_complete() || read(pid).is_some_and(|process| process.is_stopped)
}

/// Returns whether no shell is left that could continue this process's group: no member has a
/// parent in the same session outside of the group. `false` if this is unknown.
pub fn is_own_group_orphaned() -> bool {
    let (group, session) = (getpgrp(), getsid(None));
    let processes = list();
    let is_shell = |parent: Pid| {
        processes
            .iter()
            .any(|process| process.pid == parent && process.group != group && Ok(process.session) == session)
    };
    is_complete() && !processes.iter().any(|process| process.group == group && is_shell(process.parent))
}

#[cfg(test)]
mod tests {
    use std::io::{self, BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn descendants_include_grandchildren() -> io::Result<()> {
        if !cfg!(target_os = "linux") {
            return Ok(());
        }
        let mut shell = Command::new("sh");
        // The shell kills its child when its input ends.
        shell.args(["-c", "sleep 1000 & echo $!; read line; kill $!"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = shell.spawn()?;
        let mut child = String::new();
        if let Some(stdout) = shell.stdout.as_mut() {
            BufReader::new(stdout).read_line(&mut child)?;
        }
        let found: Vec<_> = descendants(getpid()).collect();
        drop(shell.stdin.take());
        shell.wait()?;
        for expected in [Some(Pid::from_raw(shell.id().cast_signed())), to_pid(child.trim())] {
            assert!(expected.is_some_and(|pid| found.contains(&pid)), "{expected:?} is not in {found:?}");
        }
        Ok(())
    }

    #[test]
    fn stat_is_read_after_the_name() {
        let parse = |state: &str, threads: u8| {
            let stat = format!("7 (a) b) {state} 2 3 4 0 -1 0 0 0 0 0 0 0 0 0 20 0 {threads} 0 9");
            parse(Pid::from_raw(7), &stat)
                .map(|p| (p.parent.as_raw(), p.group.as_raw(), p.session.as_raw(), p.is_zombie))
        };
        assert_eq!(parse("S", 1), Some((2, 3, 4, false)));
        assert_eq!(parse("Z", 1), Some((2, 3, 4, true)));
        assert_eq!(parse("Z", 2), Some((2, 3, 4, false)), "another thread runs");
    }
}
