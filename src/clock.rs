//! The local clock on which deadlines are kept.
//!
//! [`std::time::Instant`] stands still while a Linux machine sleeps (it is `CLOCK_MONOTONIC`), so a
//! laptop would wake up with a lease that ended hours ago. `CLOCK_BOOTTIME` goes on counting.
//! Neither counts a pause of a virtual machine whose host stops its clock, as QEMU does.

use std::time::Duration;

/// A moment on the clock that counts suspend.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Moment(u64);

impl Moment {
    #[cfg(unix)]
    pub(crate) fn now() -> Self {
        use rustix::time::{ClockId, clock_gettime};
        // On other systems, CLOCK_MONOTONIC counts suspend (macOS) or is the best available clock.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        const CLOCK: ClockId = ClockId::Boottime;
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        const CLOCK: ClockId = ClockId::Monotonic;
        let t = clock_gettime(CLOCK);
        Self(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
    }

    #[cfg(not(unix))]
    pub(crate) fn now() -> Self {
        // Windows: Instant is the performance counter, which goes on through sleep.
        use std::sync::OnceLock;
        use std::time::Instant;
        static START: OnceLock<Instant> = OnceLock::new();
        Self(START.get_or_init(Instant::now).elapsed().as_nanos() as u64 + 1)
    }

    pub(crate) const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    pub(crate) const fn nanos(self) -> u64 {
        self.0
    }

    /// Returns the time from now until this moment; zero when it has passed.
    pub(crate) fn remaining(self) -> Duration {
        self.since(Self::now())
    }

    /// Returns the time from `earlier` until this moment; zero when `earlier` is later.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    pub(crate) fn is_past(self) -> bool {
        Self::now() >= self
    }
}

/// The clock of a client.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) enum Clock {
    /// The host's clock that counts suspend.
    #[default]
    Host,
    /// tokio's clock, which a test may pause and advance, from this moment on.
    #[cfg(feature = "testing")]
    Tokio(tokio::time::Instant),
}

impl Clock {
    pub(crate) fn now(self) -> Moment {
        match self {
            Self::Host => Moment::now(),
            #[cfg(feature = "testing")]
            Self::Tokio(start) => Moment(0) + START + start.elapsed(),
        }
    }
}

/// The first moment of a tokio clock: later than the default moment, which means never.
#[cfg(feature = "testing")]
const START: Duration = Duration::from_secs(24 * 60 * 60);

/// How often a waiting task reads the clock: timers stand still while the machine sleeps.
pub(crate) const CLOCK_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// The longest counted duration: 100 years. Longer durations count as unlimited.
pub(crate) const CENTURY: Duration = Duration::from_secs(100 * 366 * 24 * 60 * 60);

impl std::ops::Add<Duration> for Moment {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

/// Returns how much earlier than the database a holder counts its lease as ended: one percent,
/// because two clocks may run at different rates, and a little for the scheduler.
pub(crate) fn margin(ttl: Duration) -> Duration {
    ttl / 100 + (ttl / 20).min(MARGIN)
}

/// The part of the margin for the scheduler.
pub(crate) const MARGIN: Duration = Duration::from_millis(10);

/// Returns for how long a client that has lost a lease by its expiry does not end the lease in the
/// store. The holder has the margin to stop its work before another client is granted the name.
/// After twice the margin, the expiry in the store has passed, unless the client has sent a
/// heartbeat.
pub(crate) fn pause_after_expiry(ttl: Duration) -> Duration {
    2 * margin(ttl)
}

/// Returns how long a holder may rely on a lease, from the moment before its request was sent.
pub(crate) fn reliance(ttl: Duration) -> Duration {
    ttl.saturating_sub(margin(ttl))
}
