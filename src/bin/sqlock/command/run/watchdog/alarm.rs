//! A wait for a time or for the socket, whichever comes first.

#[cfg(target_os = "linux")]
pub use linux::Alarm;
#[cfg(not(target_os = "linux"))]
pub use portable::Alarm;

/// A timer that counts suspend.
#[cfg(target_os = "linux")]
mod linux {
    use std::io;
    use std::os::fd::AsFd;

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use nix::sys::time::TimeSpec;
    use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

    pub struct Alarm(Option<TimerFd>);

    impl Alarm {
        pub fn new() -> Self {
            Self(TimerFd::new(ClockId::CLOCK_BOOTTIME, TimerFlags::TFD_CLOEXEC).ok())
        }

        /// Waits until a time or for a message. May return earlier.
        pub fn wait(&self, until: Option<u64>) {
            let stdin = io::stdin();
            let mut sources = vec![PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
            // Without a timer, poll often.
            let mut timeout = PollTimeout::from(20_u8);
            if let (Some(timer), Some(until)) = (&self.0, until) {
                let at = TimeSpec::new((until / 1_000_000_000) as i64, (until % 1_000_000_000) as i64);
                if timer.set(Expiration::OneShot(at), TimerSetTimeFlags::TFD_TIMER_ABSTIME).is_ok() {
                    sources.push(PollFd::new(timer.as_fd(), PollFlags::POLLIN));
                    timeout = PollTimeout::NONE;
                }
            } else if until.is_none() {
                timeout = PollTimeout::NONE;
            }
            let _ = poll(&mut sources, timeout);
        }
    }
}

/// Polls the clock, because there is no timer that counts suspend.
#[cfg(not(target_os = "linux"))]
mod portable {
    use std::io;
    use std::os::fd::AsFd;

    use nix::poll::{PollFd, PollFlags, poll};

    use crate::command::run::schedule::now;

    pub struct Alarm;

    impl Alarm {
        pub fn new() -> Self {
            Self
        }

        pub fn wait(&self, until: Option<u64>) {
            let stdin = io::stdin();
            let mut sources = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
            let left = until.map_or(100, |until| (until.saturating_sub(now()) / 1_000_000).min(100)) as u8;
            let _ = poll(&mut sources, left);
        }
    }
}
