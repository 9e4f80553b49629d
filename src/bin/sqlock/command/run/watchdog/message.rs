//! The messages between sqlock and its watchdog, as bytes on a socket.

use nix::unistd::Pid;

use crate::command::run::process_tree::ProcessTree;
use crate::command::run::schedule::KillSchedule;

/// The first argument that makes this program a watchdog.
pub const ARGUMENT: &str = "__watchdog";

/// The name of the process in `ps`, at most 15 bytes.
pub const PROCESS_NAME: &str = "lease-watchdog";

/// The report of the watchdog that it has sent the signal.
pub const SIGNALED: u8 = b'T';

/// The report of the watchdog that it has killed the command.
pub const KILLED: u8 = b'K';

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instructions {
    pub process_tree: ProcessTree,
    pub schedule: KillSchedule,
}

impl Instructions {
    const MARKER_BYTES: usize = 32;
    pub const BYTES: usize = 4 + 4 + 8 + 8 + Self::MARKER_BYTES;

    /// Fills a shutdown message: no process group has this number.
    pub const SHUTDOWN: u8 = 0xff;

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend(self.process_tree.group.as_raw().to_le_bytes());
        bytes.extend(self.schedule.signal.to_le_bytes());
        bytes.extend(self.schedule.signal_at.to_le_bytes());
        bytes.extend(self.schedule.kill_at.to_le_bytes());
        bytes.extend(self.process_tree.marker.as_bytes());
        bytes
    }

    /// Reads a message. `None`: shutdown.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (group, bytes) = bytes.split_first_chunk()?;
        let (signal, bytes) = bytes.split_first_chunk()?;
        let (signal_at, bytes) = bytes.split_first_chunk()?;
        let (kill_at, marker) = bytes.split_first_chunk()?;
        let group = i32::from_le_bytes(*group);
        let schedule = KillSchedule {
            signal: i32::from_le_bytes(*signal),
            signal_at: u64::from_le_bytes(*signal_at),
            kill_at: u64::from_le_bytes(*kill_at),
        };
        let marker = String::from_utf8(marker.to_vec()).ok()?;
        (group > 0).then(|| Self { process_tree: ProcessTree { group: Pid::from_raw(group), marker }, schedule })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_survive_the_socket() {
        let schedule = KillSchedule { signal: 15, signal_at: 7, kill_at: 8 };
        let instructions = Instructions {
            process_tree: ProcessTree { group: Pid::from_raw(42), marker: ProcessTree::new_marker() },
            schedule,
        };
        let bytes = instructions.to_bytes();
        assert_eq!(bytes.len(), Instructions::BYTES);
        assert_eq!(Instructions::from_bytes(&bytes), Some(instructions));
        assert_eq!(Instructions::from_bytes(&[Instructions::SHUTDOWN; Instructions::BYTES]), None);
    }
}
