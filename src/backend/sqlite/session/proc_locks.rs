//! Reads `/proc/locks`, where Linux lists the locks on files.
//!
//! A line is `1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF`: kind, mode, process, and the device
//! and inode of the file. <https://man7.org/linux/man-pages/man5/proc_locks.5.html>

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::backend::SessionHolder;

/// How often the list is read. Linux returns it in pieces of 4096 bytes, and a read misses a lock
/// that moves forward in the list between two pieces, because other locks end.
const READS: usize = 4;

/// Returns the processes that have locked a file.
pub(super) fn holders(path: &Path) -> io::Result<Vec<SessionHolder>> {
    let inode = match std::fs::metadata(path) {
        Ok(file) => file.ino(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut holders: Vec<SessionHolder> = Vec::new();
    for _ in 0..READS {
        let locks = std::fs::read_to_string("/proc/locks")?;
        for holder in locks.lines().filter_map(|line| holder(line, inode)) {
            // A process has as many locks as it has clients that share the name.
            if !holders.contains(&holder) {
                holders.push(holder);
            }
        }
    }
    Ok(holders)
}

/// Parses a line. `None`: the lock is on another file, or a process waits for it. The device is not
/// compared, because some file systems show another device to programs.
fn holder(line: &str, inode: u64) -> Option<SessionHolder> {
    let mut words = line.split_ascii_whitespace().skip(1);
    if words.next()? != "FLOCK" {
        return None;
    }
    let shared = words.nth(1)? == "READ";
    let id = words.next()?.parse().ok()?;
    let (_, found) = words.next()?.rsplit_once(':')?;
    let is_meant = found.parse() == Ok(inode);
    is_meant.then_some(SessionHolder { id, shared, user: None, address: None, application: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_holders_of_the_file_are_parsed() {
        let parse = |line| holder(line, 5678).map(|holder| (holder.id, holder.shared));
        assert_eq!(parse("1: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF"), Some((1234, false)));
        assert_eq!(parse("12: FLOCK  ADVISORY  READ 1 00:2f:5678 0 EOF"), Some((1, true)));
        assert_eq!(parse("1: FLOCK  ADVISORY  WRITE 1234 fe:00:56789 0 EOF"), None);
        assert_eq!(parse("2: POSIX  ADVISORY  READ 1234 fe:00:5678 128 128"), None);
        assert_eq!(parse("3: -> FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF"), None);
        assert_eq!(parse(""), None);
    }
}
