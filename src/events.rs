//! The events of a client, as a stream.
//!
//! ```
//! use sqlock::events::Event;
//!
//! # async fn example(locks: sqlock::Locks) {
//! let mut events = locks.events();
//! while let Some(event) = events.next().await {
//!     match event {
//!         Event::Lost { name, cause, .. } => println!("lost {name}: {cause}"),
//!         Event::Missed { count } => println!("{count} events were dropped"),
//!         _ => {}
//!     }
//! }
//! # }
//! ```

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::error::LossCause;
use crate::name::LockName;
use crate::token::FencingToken;

/// The number of events that a reader may be behind.
const CAPACITY: usize = 1024;

/// An event of a lease or a connection of a client.
///
/// Shared leases, permits and the members of [`lease_all`](crate::Locks::lease_all) are leases,
/// too. Session locks and row locks have no events.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A request waits behind another holder or waiter. The event comes at most once for each
    /// request, and never for [`try_acquire`](crate::LeaseRequest::try_acquire).
    Waiting {
        /// The requested name.
        name: LockName,
    },
    /// A lease was acquired.
    Acquired {
        /// The held name.
        name: LockName,
        /// The token of the lease.
        token: FencingToken,
        /// The time since the request.
        waited: Duration,
    },
    /// A request ended without a lease.
    Refused {
        /// The requested name.
        name: LockName,
        /// Why the request ended.
        reason: RefusalReason,
        /// The time since the request.
        waited: Duration,
    },
    /// This client granted a name whose holder had died, or had lost its connection for longer than
    /// its TTL. The name may be granted to a waiter of another client. Expired shared leases and
    /// permits cause no event.
    TakenOver {
        /// The name that was taken over.
        name: LockName,
    },
    /// A lease was released. With `is_confirmed`, it was held to the end; otherwise that is not
    /// known.
    Released {
        /// The name that was held.
        name: LockName,
        /// The token of the lease.
        token: FencingToken,
        /// The time since it was acquired.
        held: Duration,
        /// Whether the database confirmed the release. Otherwise the name is free after the TTL at
        /// the latest.
        is_confirmed: bool,
    },
    /// A lease ended before it was released.
    Lost {
        /// The name that was held.
        name: LockName,
        /// The token of the lease.
        token: FencingToken,
        /// The time since it was acquired.
        held: Duration,
        /// Why it ended.
        cause: LossCause,
    },
    /// The holder of a lease was [asked to release it](crate::Locks::ask_to_release).
    ReleaseRequested {
        /// The name that is held.
        name: LockName,
        /// The token of the lease.
        token: FencingToken,
    },
    /// A lease was [exported](crate::Lease::export) to another process.
    Exported {
        /// The name that is held.
        name: LockName,
        /// The token of the lease.
        token: FencingToken,
        /// The time since it was acquired.
        held: Duration,
    },
    /// A heartbeat has been unanswered for a second. The event comes once for each such heartbeat.
    HeartbeatLate {
        /// The time since the heartbeat was sent.
        unanswered_for: Duration,
    },
    /// A heartbeat failed: after some seconds of attempts, or at once if the database refused it.
    /// The next one follows after a tenth of a second; if it fails for the same reason, no event
    /// comes.
    HeartbeatFailed {
        /// The error.
        reason: String,
    },
    /// A heartbeat was answered, after an earlier one was late or had failed.
    HeartbeatRestored,
    /// A connection was opened to replace a lost one.
    Reconnected,
    /// The reader was too slow, and events were dropped before the next one.
    Missed {
        /// The number of dropped events.
        count: u64,
    },
}

/// Why a request ended without a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RefusalReason {
    /// Another caller holds the name or waits for it, and the request did not wait.
    Held,
    /// The request reached the limit of its wait.
    TimedOut,
    /// The caller dropped the request.
    Cancelled,
    /// The client was shut down or drained.
    Closed,
    /// The database did not answer, or not in time.
    Unavailable,
    /// The request failed for another reason: see its error.
    Failed,
}

impl RefusalReason {
    /// Returns the reason as one word in lower case.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Closed => "closed",
            Self::Unavailable => "unavailable",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for RefusalReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A stream of the events of a client. Made with [`Locks::events`](crate::Locks::events).
///
/// A reader never delays the client: a reader that is more than 1024 events behind misses the
/// oldest, and receives their number as [`Event::Missed`]. A stream does not keep the client alive.
#[derive(Debug)]
pub struct Events {
    receiver: broadcast::Receiver<Event>,
}

impl Events {
    /// Waits for the next event. Returns `None` when the client has been shut down, or its last
    /// handle and lease have been dropped, and every event has been returned.
    ///
    /// # Cancel safety
    ///
    /// No event is lost when the future is dropped.
    pub async fn next(&mut self) -> Option<Event> {
        match self.receiver.recv().await {
            Ok(event) => Some(event),
            Err(RecvError::Lagged(count)) => Some(Event::Missed { count }),
            Err(RecvError::Closed) => None,
        }
    }
}

/// Passes events to all readers. Costs next to nothing without readers.
#[derive(Default)]
pub(crate) struct Publisher {
    channel: Mutex<Channel>,
}

#[derive(Default)]
enum Channel {
    /// There has been no reader yet.
    #[default]
    Unused,
    Open(broadcast::Sender<Event>),
    Closed,
}

impl Publisher {
    pub(crate) fn subscribe(&self) -> Events {
        let mut channel = self.channel();
        let receiver = match &*channel {
            Channel::Open(sender) => sender.subscribe(),
            Channel::Unused => {
                let (sender, receiver) = broadcast::channel(CAPACITY);
                *channel = Channel::Open(sender);
                receiver
            }
            Channel::Closed => broadcast::channel(1).1,
        };
        Events { receiver }
    }

    pub(crate) fn publish(&self, event: &Event) {
        if let Channel::Open(sender) = &*self.channel() {
            // An error means that there is no reader at present.
            let _ = sender.send(event.clone());
        }
    }

    /// Ends the stream of every reader after the published events.
    pub(crate) fn close(&self) {
        *self.channel() = Channel::Closed;
    }

    fn channel(&self) -> MutexGuard<'_, Channel> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn late(seconds: u64) -> Event {
        Event::HeartbeatLate { unanswered_for: Duration::from_secs(seconds) }
    }

    #[tokio::test]
    async fn slow_reader_receives_number_of_missed_events() {
        let publisher = Publisher::default();
        publisher.publish(&late(0));
        let mut events = publisher.subscribe();
        for i in 1..=CAPACITY as u64 + 3 {
            publisher.publish(&late(i));
        }
        publisher.close();
        assert!(matches!(events.next().await, Some(Event::Missed { count: 3 })));
        let mut rest = Vec::new();
        while let Some(Event::HeartbeatLate { unanswered_for }) = events.next().await {
            rest.push(unanswered_for.as_secs());
        }
        assert_eq!(rest, (4..=CAPACITY as u64 + 3).collect::<Vec<_>>());
        assert!(publisher.subscribe().next().await.is_none(), "it is closed");
    }
}
