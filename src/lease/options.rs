//! The options of a lease: one type, with the same methods on each kind of request.

use std::time::Duration;

use crate::client::Settings;
use crate::engine::HoldTime;
use crate::error::{Error, Result};

/// The TTL of a lease unless [`LeaseOptions::ttl`] sets it.
const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// The longest label.
const MAX_LABEL_BYTES: usize = 255;

/// How much longer than `max_hold` a lease lasts in the database. The holder ends the lease
/// earlier, with the cause `MaxHold`, even if an answer takes long.
const AFTER_MAX_HOLD: Duration = Duration::from_secs(1);

/// The options of a lease, to be shared by several requests of any kind.
///
/// Each request has the methods of this type too, and `options` to set all of them at once.
///
/// ```
/// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
/// use sqlock::lease::LeaseOptions;
/// use std::time::Duration;
///
/// let options = LeaseOptions::new().ttl(Duration::from_secs(10)).label("nightly import");
/// let import = locks.lease("import").options(options.clone()).acquire().await?;
/// let permit = locks.semaphore("uploads", 3).options(options).wait(Duration::from_secs(5)).acquire().await?;
/// # permit.release().await?;
/// # import.release().await
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "options do nothing until a request has them"]
pub struct LeaseOptions {
    pub(crate) ttl: Duration,
    pub(crate) wait: Option<Duration>,
    pub(crate) renew: bool,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) hold_at_least: Duration,
    pub(crate) label: String,
}

impl Default for LeaseOptions {
    fn default() -> Self {
        Self {
            ttl: DEFAULT_TTL,
            wait: None,
            renew: true,
            max_hold: None,
            hold_at_least: Duration::ZERO,
            label: String::new(),
        }
    }
}

impl LeaseOptions {
    /// Returns the defaults: a TTL of 30 seconds, renewal, and no limits.
    pub fn new() -> Self {
        Self::default()
    }

    fn options_mut(&mut self) -> &mut Self {
        self
    }

    pub(crate) fn check(&self, settings: &Settings) -> Result<()> {
        settings.check_ttl("a TTL", self.ttl)?;
        if let Some(max_hold) = self.max_hold {
            Error::check_range("max_hold", max_hold, settings.min_ttl, Duration::MAX)?;
        }
        Error::check_range("hold_at_least", self.hold_at_least, Duration::ZERO, settings.max_ttl)?;
        if self.label.len() > MAX_LABEL_BYTES {
            return Err(Error::LabelTooLong { bytes: self.label.len() });
        }
        if self.label.contains('\0') {
            return Err(Error::NulInLabel);
        }
        Ok(())
    }

    /// Returns the options of one of several leases that are held together: the limits of the
    /// holding begin when all are held.
    pub(crate) fn without_limits(&self) -> Self {
        let ttl = bounded_ttl(self.ttl, self.max_hold, Duration::ZERO);
        Self { ttl, max_hold: None, hold_at_least: Duration::ZERO, ..self.clone() }
    }

    pub(crate) fn hold_time(&self) -> HoldTime {
        HoldTime { at_least: self.hold_at_least, at_most: self.max_hold }
    }
}

/// Bounds the TTL of a lease that was already held for some time, so that the name is free soon
/// after `max_hold` if the holder dies.
pub(crate) fn bounded_ttl(ttl: Duration, max_hold: Option<Duration>, held_for: Duration) -> Duration {
    match max_hold {
        Some(max_hold) => ttl.min(max_hold.saturating_sub(held_for).saturating_add(AFTER_MAX_HOLD)),
        None => ttl,
    }
}

/// Gives a type with an `options_mut` the methods that set single options.
macro_rules! option_setters {
    ($request:ty) => {
        impl $request {
            /// Sets how long the lease outlives the last heartbeat: the longest time for which a
            /// crashed holder blocks others. 30 seconds by default; between 1 second and 24 hours
            /// unless the [builder](crate::LocksBuilder::ttl_range) says otherwise. A lease whose
            /// TTL is shorter than ten round trips to the database may be lost without a fault.
            ///
            /// A lease that another client's release granted lasts for at most 3 seconds at first;
            /// about 0.2 seconds later the client extends it to the TTL.
            pub fn ttl(mut self, ttl: std::time::Duration) -> Self {
                self.options_mut().ttl = ttl;
                self
            }

            /// Limits the wait; at the limit, the acquisition fails with
            /// [`Error::Timeout`](crate::Error::Timeout), or, if the limit is 100 milliseconds or
            /// more and the database has not answered yet, with
            /// [`Error::Unavailable`](crate::Error::Unavailable). Zero tries once. Without a limit,
            /// the acquisition waits for as long as it takes. A `try_acquire` never waits.
            pub fn wait(mut self, at_most: std::time::Duration) -> Self {
                self.options_mut().wait = Some(at_most);
                self
            }

            /// Sets whether the lease is renewed in the background, by the client's heartbeat.
            /// `true` by default. With `false`, the lease ends after its TTL unless it is extended.
            #[doc(alias = "heartbeat")]
            pub fn renew(mut self, renew: bool) -> Self {
                self.options_mut().renew = renew;
                self
            }

            /// Ends the lease after this time, even while it is renewed, so that a worker that
            /// hangs does not hold the name for ever. The lease is then lost with
            /// [`LossCause::MaxHold`](crate::LossCause::MaxHold), and `run` drops the work. At
            /// least the shortest allowed TTL.
            pub fn max_hold(mut self, at_most: std::time::Duration) -> Self {
                self.options_mut().max_hold = Some(at_most);
                self
            }

            /// Keeps the name taken for at least this long after the acquisition, even if the lease
            /// is released earlier, as by a shutdown or at `max_hold`: for jobs that are shorter
            /// than the differences between the clocks that start them. A lease that is evicted or
            /// expires, as when its process dies, frees the name earlier. Of several acquisitions
            /// of one owner by one client, the one that is released last decides; of several
            /// clients, the longest. At most the longest allowed TTL.
            pub fn hold_at_least(mut self, at_least: std::time::Duration) -> Self {
                self.options_mut().hold_at_least = at_least;
                self
            }

            /// Sets the label, a text for people, shown by [`Locks::list`](crate::Locks::list). At
            /// most 255 bytes.
            pub fn label(mut self, label: impl Into<String>) -> Self {
                self.options_mut().label = label.into();
                self
            }
        }
    };
}

/// Gives a type with an `options_mut` the method that sets all options, and the methods that set
/// one.
macro_rules! request_setters {
    ($request:ty) => {
        crate::lease::options::option_setters!($request);

        impl $request {
            /// Sets all options at once, replacing earlier ones.
            pub fn options(mut self, options: crate::lease::options::LeaseOptions) -> Self {
                *self.options_mut() = options;
                self
            }
        }
    };
}

/// Gives a type with a `request_mut`, the [`LeaseRequest`](crate::LeaseRequest) behind it, the
/// methods of requests that wait in the queue of one database.
macro_rules! queue_setters {
    ($request:ty) => {
        impl $request {
            /// Sets the owner, and re-enters when this owner already holds the name, in any
            /// process. By default the owner is that of the [`Owner::scope`](crate::Owner::scope)
            /// in which this value was made, or else a new one for each lease. Permits are not
            /// re-entered: each of them counts.
            pub fn owner(mut self, owner: crate::owner::Owner) -> Self {
                self.request_mut().set_owner(owner);
                self
            }

            /// Calls `callback` during the wait: at its beginning, and whenever the position of the
            /// request or the holder changes. The reports cost two `SELECT`s a second.
            ///
            /// ```
            /// # async fn example(locks: sqlock::Locks) -> sqlock::Result<()> {
            /// let lease = locks
            ///     .lease("deploy")
            ///     .while_waiting(|waiting| println!("{} ahead of us", waiting.ahead))
            ///     .acquire()
            ///     .await?;
            /// # lease.release().await
            /// # }
            /// ```
            pub fn while_waiting(
                mut self,
                callback: impl Fn(&crate::inspect::Waiting) + Send + Sync + 'static,
            ) -> Self {
                self.request_mut().set_progress_callback(callback);
                self
            }
        }
    };
}

option_setters!(LeaseOptions);

pub(crate) use {option_setters, queue_setters, request_setters};
