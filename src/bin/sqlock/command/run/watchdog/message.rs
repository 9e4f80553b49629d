//! What sqlock tells its guard, as bytes on a socket.

use nix::unistd::Pid;

use crate::command::run::process_tree::Quarry;
use crate::command::run::schedule::Schedule;

/// The first argument that makes this program a guard.
pub const CALL: &str = "__guard";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orders {
    pub quarry: Quarry,
    pub schedule: Schedule,
}

impl Orders {
    const MARK_BYTES: usize = 32;
    pub const BYTES: usize = 4 + 4 + 8 + 8 + Self::MARK_BYTES;

    /// Fills a message that says goodbye: no process group has such a number.
    pub const GOODBYE: u8 = 0xff;

    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend(self.quarry.group.as_raw().to_le_bytes());
        bytes.extend(self.schedule.signal.to_le_bytes());
        bytes.extend(self.schedule.tell_at.to_le_bytes());
        bytes.extend(self.schedule.kill_at.to_le_bytes());
        bytes.extend(self.quarry.mark.as_bytes());
        bytes
    }

    /// `None`: goodbye.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (group, bytes) = bytes.split_first_chunk()?;
        let (signal, bytes) = bytes.split_first_chunk()?;
        let (tell_at, bytes) = bytes.split_first_chunk()?;
        let (kill_at, mark) = bytes.split_first_chunk()?;
        let group = i32::from_le_bytes(*group);
        let schedule = Schedule {
            signal: i32::from_le_bytes(*signal),
            tell_at: u64::from_le_bytes(*tell_at),
            kill_at: u64::from_le_bytes(*kill_at),
        };
        let mark = String::from_utf8(mark.to_vec()).ok()?;
        (group > 0).then(|| Self { quarry: Quarry { group: Pid::from_raw(group), mark }, schedule })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_survive_the_socket() {
        let schedule = Schedule { signal: 15, tell_at: 7, kill_at: 8 };
        let orders = Orders { quarry: Quarry { group: Pid::from_raw(42), mark: Quarry::new_mark() }, schedule };
        let bytes = orders.to_bytes();
        assert_eq!(bytes.len(), Orders::BYTES);
        assert_eq!(Orders::from_bytes(&bytes), Some(orders));
        assert_eq!(Orders::from_bytes(&[Orders::GOODBYE; Orders::BYTES]), None);
    }
}
