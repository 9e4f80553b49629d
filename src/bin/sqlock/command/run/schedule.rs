//! When the command is stopped, on a clock that goes on while the machine sleeps.

use std::time::Duration;

use nix::sys::signal::Signal;
use nix::time::{ClockId, clock_gettime};

use crate::lease::HeldLease;

/// How a command is stopped.
#[derive(Clone, Copy)]
pub struct KillTerms {
    /// So long before the deadline it is told to stop,
    pub kill_after: Duration,
    /// and so long before the deadline it is killed: time for the kernel to do it, on a busy machine.
    kill_lead: Duration,
    signal: Signal,
}

impl KillTerms {
    pub fn new(ttl: Duration, kill_after: Duration, signal: Signal) -> Self {
        // Renewals go out at a third of the TTL, the first one at 5/12 at the latest: more than another third would stop
        // commands whose lease is about to be renewed.
        Self { kill_after: kill_after.min(ttl / 3), kill_lead: (ttl / 10).min(Duration::from_secs(1)), signal }
    }

    /// How long before the deadline the command learns of it.
    pub fn signal_lead(&self) -> Duration {
        self.kill_after.max(self.kill_lead)
    }
}

/// What the watchdog does, and when: nanoseconds of the clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KillSchedule {
    pub signal: i32,
    pub signal_at: u64,
    pub kill_at: u64,
}

impl KillSchedule {
    pub fn for_lease(lease: &HeldLease, terms: &KillTerms) -> Self {
        // First the clock, then what remains: a pause in between only makes it earlier.
        let now = now();
        Self::before_deadline(now.saturating_add(nanos(lease.remaining())), terms)
    }

    fn before_deadline(deadline: u64, terms: &KillTerms) -> Self {
        let at = |before| deadline.saturating_sub(nanos(before));
        Self { signal: terms.signal as i32, signal_at: at(terms.signal_lead()), kill_at: at(terms.kill_lead) }
    }

    /// The command has been told to stop, or will be at once.
    pub fn is_signal_due(&self) -> bool {
        now() >= self.signal_at
    }

    /// The command should be dead.
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
    // This clock exists wherever it is compiled in; without it nothing could be promised, so everything is overdue.
    clock_gettime(CLOCK).map_or(u64::MAX, |t| t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn the_command_is_told_and_then_killed_before_the_deadline() {
        let terms = KillTerms::new(Duration::from_secs(30), Duration::from_secs(10), Signal::SIGTERM);
        let schedule = KillSchedule::before_deadline(100 * SECOND, &terms);
        assert_eq!((schedule.signal_at, schedule.kill_at), (90 * SECOND, 99 * SECOND));
    }

    #[test]
    fn a_kill_after_that_is_longer_than_a_third_of_the_ttl_is_shortened() {
        let terms = KillTerms::new(Duration::from_secs(3), Duration::from_secs(10), Signal::SIGTERM);
        let schedule = KillSchedule::before_deadline(100 * SECOND, &terms);
        assert_eq!((schedule.signal_at, schedule.kill_at), (99 * SECOND, 99 * SECOND + 700_000_000));
    }

    #[test]
    fn without_kill_after_it_is_killed_without_being_told() {
        let terms = KillTerms::new(Duration::from_secs(30), Duration::ZERO, Signal::SIGTERM);
        let schedule = KillSchedule::before_deadline(100 * SECOND, &terms);
        assert_eq!(schedule.signal_at, schedule.kill_at);
    }
}
