//! Computes when the command is signaled and killed, on a clock that counts suspend.

use std::time::Duration;

use nix::sys::signal::Signal;
use nix::time::{ClockId, clock_gettime};

use crate::lease::HeldLease;

/// The rule for stopping the command before the lease ends.
#[derive(Clone, Copy)]
pub struct KillTerms {
    /// How long the process group has to end after a signal has ended the command.
    pub kill_after: Duration,
    /// How long before the deadline the command gets the signal, or KILL if there is no signal.
    pub signal_lead: Duration,
    /// How long before the deadline the command is killed: the kernel of a busy machine needs time
    /// for the kill.
    kill_lead: Duration,
    /// The signal that asks the command to stop.
    pub signal: Signal,
}

impl KillTerms {
    pub fn new(ttl: Duration, kill_after: Duration, signal: Signal) -> Self {
        let kill_lead = (ttl / 10).min(Duration::from_secs(1));
        // A heartbeat goes out each third of the TTL at the latest, and its answer may take another
        // third. A longer lead would stop commands whose lease is about to be renewed.
        let signal_lead = kill_after.min(ttl / 3).max(kill_lead);
        Self { kill_after, signal_lead, kill_lead, signal }
    }
}

/// The signal, and when it and KILL are sent: nanoseconds of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KillSchedule {
    pub signal: i32,
    pub signal_at: u64,
    pub kill_at: u64,
}

impl KillSchedule {
    pub fn for_lease(lease: &HeldLease, terms: &KillTerms) -> Self {
        // The clock is read before the remaining time: a pause in between only makes the deadline
        // earlier.
        let now = now();
        Self::before_deadline(now.saturating_add(nanos(lease.remaining())), terms)
    }

    fn before_deadline(deadline: u64, terms: &KillTerms) -> Self {
        let at = |before| deadline.saturating_sub(nanos(before));
        Self { signal: terms.signal as i32, signal_at: at(terms.signal_lead), kill_at: at(terms.kill_lead) }
    }

    /// Returns whether it is time for the signal.
    pub fn is_signal_due(&self) -> bool {
        now() >= self.signal_at
    }

    /// Returns whether it is time for KILL.
    pub fn is_kill_due(&self) -> bool {
        now() >= self.kill_at
    }
}

pub fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(target_os = "linux")]
const CLOCK: ClockId = ClockId::CLOCK_BOOTTIME;
#[cfg(not(target_os = "linux"))]
const CLOCK: ClockId = ClockId::CLOCK_MONOTONIC;

pub fn now() -> u64 {
    // The clock exists wherever it is compiled in. Without a clock, no deadline could be kept, so
    // everything counts as overdue.
    clock_gettime(CLOCK).map_or(u64::MAX, |t| t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn command_is_signaled_then_killed_before_the_deadline() {
        let terms = KillTerms::new(Duration::from_secs(30), Duration::from_secs(10), Signal::SIGTERM);
        let schedule = KillSchedule::before_deadline(100 * SECOND, &terms);
        assert_eq!((schedule.signal_at, schedule.kill_at), (90 * SECOND, 99 * SECOND));
    }

    #[test]
    fn signal_comes_no_earlier_than_third_of_ttl() {
        let terms = KillTerms::new(Duration::from_secs(3), Duration::from_secs(10), Signal::SIGTERM);
        let schedule = KillSchedule::before_deadline(100 * SECOND, &terms);
        assert_eq!((schedule.signal_at, schedule.kill_at), (99 * SECOND, 99 * SECOND + 700_000_000));
        assert_eq!(terms.kill_after, Duration::from_secs(10));
    }

    #[test]
    fn zero_kill_after_kills_without_a_signal() {
        let terms = KillTerms::new(Duration::from_secs(30), Duration::ZERO, Signal::SIGTERM);
        let schedule = KillSchedule::before_deadline(100 * SECOND, &terms);
        assert_eq!(schedule.signal_at, schedule.kill_at);
    }
}
