//! Reports the events of a client to the log.

use std::time::Duration;

use tracing::{Span, debug, info, warn};

use crate::engine::Refusal;
use crate::error::{Error, LossCause};
use crate::events::{Event, RefusalReason};
use crate::measure::{self, Meter};
use crate::panics;

/// An event with the fields that only the log has.
pub(super) struct Report {
    pub(super) event: Event,
    /// The kind of the request, if the event is about one.
    pub(super) kind: &'static str,
    /// Whether this application has evicted the holder.
    pub(super) is_eviction: bool,
    /// Whether the application has given its work some time to finish.
    pub(super) is_drain: bool,
}

impl Report {
    /// Writes the log. Runs code of the application, so no lock may be held.
    pub(super) fn write(&self, meter: &Meter) {
        // A subscriber that panics must not end a task of the client.
        let _ = panics::caught(|| self.log());
        self.measure(meter);
    }

    /// Returns whether the application itself has ended the lease.
    fn is_ordered(&self, cause: LossCause) -> bool {
        cause.is_ordered() || self.is_eviction
    }

    fn measure(&self, meter: &Meter) {
        match &self.event {
            Event::Acquired { name, waited, .. } => meter.count_grant(name, self.kind, *waited),
            Event::Refused { name, reason, .. } => meter.count_refusal(name, self.kind, *reason),
            Event::Released { name, held, .. } | Event::Exported { name, held, .. } => meter.count_end(name, *held),
            Event::Lost { name, held, cause, .. } => {
                meter.count_end(name, *held);
                meter.count_loss(name, *cause);
            }
            Event::TakenOver { name } => meter.count_takeover(name),
            Event::HeartbeatLate { .. } => measure::count_late_heartbeat(),
            _ => {}
        }
    }

    fn log(&self) {
        match &self.event {
            Event::Waiting { name } => debug!(name = name.as_str(), "waiting for a lease"),
            Event::Acquired { name, token, waited } => {
                debug!(name = name.as_str(), %token, ?waited, "acquired a lease")
            }
            Event::Refused { name, reason, waited } => {
                debug!(name = name.as_str(), %reason, ?waited, "did not get a lease")
            }
            Event::TakenOver { name } => info!(name = name.as_str(), "took a name over from a dead holder"),
            Event::Released { name, token, held, is_confirmed: true } => {
                debug!(name = name.as_str(), %token, ?held, "released a lease");
            }
            Event::Released { name, token, held, is_confirmed: false } => {
                info!(name = name.as_str(), %token, ?held, "the database did not confirm a release: the name is free after its TTL");
            }
            Event::Lost { name, token, held, cause: LossCause::Shutdown } if self.is_drain => {
                info!(name = name.as_str(), %token, ?held, "cut off the work under a lease at the end of a drain");
            }
            Event::Lost { name, token, held, cause: LossCause::Shutdown } => {
                debug!(name = name.as_str(), %token, ?held, "released a lease at shutdown");
            }
            Event::Lost { name, token, held, cause } if self.is_ordered(*cause) => {
                info!(name = name.as_str(), %token, ?held, %cause, "a lease has ended");
            }
            Event::Lost { name, token, held, cause } => {
                warn!(name = name.as_str(), %token, ?held, %cause, "lost a lease")
            }
            Event::ReleaseRequested { name, token } => {
                info!(name = name.as_str(), %token, "was asked to release a lease")
            }
            Event::Exported { name, token, held } => debug!(name = name.as_str(), %token, ?held, "exported a lease"),
            Event::HeartbeatLate { unanswered_for } => warn!(?unanswered_for, "a heartbeat is late"),
            Event::HeartbeatFailed { reason } => warn!(reason, "a heartbeat failed; leases are lost if none succeeds"),
            Event::HeartbeatRestored => info!("heartbeats are answered again"),
            // The executor logs its connections.
            Event::Reconnected | Event::Missed { .. } => {}
        }
    }
}

/// Ends a span and records its duration and outcome.
pub(super) fn end_span(span: &mut Span, time: &'static str, took: Duration, outcome: &str) {
    // A subscriber that panics must not keep a lease from its release.
    let _ = panics::caught(|| {
        let span = std::mem::replace(span, Span::none());
        span.record(time, tracing::field::debug(took));
        span.record("outcome", outcome);
    });
}

/// Returns why a request ended. `is_unavailable`: the database is unavailable now.
pub(super) fn refusal_reason(refusal: &Refusal, is_unavailable: bool) -> RefusalReason {
    match refusal {
        // By an answer of the database, or by a lease of this client.
        Refusal::Taken => RefusalReason::Held,
        // Without an answer of the database, no holder of the name is known.
        Refusal::Timeout if is_unavailable => RefusalReason::Unavailable,
        Refusal::Timeout => RefusalReason::TimedOut,
        Refusal::NoAnswer | Refusal::TooLate => RefusalReason::Unavailable,
        Refusal::Closed => RefusalReason::Closed,
        Refusal::Conversion { .. } | Refusal::Lost => RefusalReason::Failed,
        Refusal::Failed(error) => match *error.0 {
            Error::Unavailable { .. } | Error::PoolExhausted { .. } => RefusalReason::Unavailable,
            Error::Closed => RefusalReason::Closed,
            _ => RefusalReason::Failed,
        },
    }
}
