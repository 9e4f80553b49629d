//! Metrics for the facade `metrics`. Without the feature of that name, this module counts nothing.
//!
//! Names of locks are labels only through a function of the application, which maps names to
//! constants, so every label has few values.

#![cfg_attr(not(feature = "metrics"), allow(dead_code, unused_variables, reason = "nothing is measured"))]

use std::sync::Arc;
use std::time::Duration;

use crate::error::LossCause;
use crate::events::RefusalReason;
use crate::name::LockName;

/// Whether metrics are enabled.
pub(crate) const IS_ON: bool = cfg!(feature = "metrics");

/// Runs code of the application's recorder, whose panics must not end a task of the client.
macro_rules! record {
    ($($statement:stmt;)+) => {
        #[cfg(feature = "metrics")]
        let _ = crate::panics::caught(|| {
            $($statement)+
        });
    };
}

/// Describes every metric to the recorder.
pub(crate) fn describe() {
    record! {
        metrics::describe_counter!("sqlock_acquire_total", "Requests for leases that ended, by kind and outcome.");
        metrics::describe_histogram!("sqlock_wait_seconds", metrics::Unit::Seconds, "From the request to the lease.");
        metrics::describe_histogram!("sqlock_hold_seconds", metrics::Unit::Seconds, "From the lease to its end.");
        metrics::describe_gauge!("sqlock_held", "Leases that are held.");
        metrics::describe_gauge!("sqlock_waiting", "Requests for leases that are under way.");
        metrics::describe_counter!("sqlock_lost_total", "Leases that ended before their release, by cause.");
        metrics::describe_counter!("sqlock_taken_over_total", "Leases taken over from dead holders.");
        metrics::describe_histogram!("sqlock_heartbeat_seconds", metrics::Unit::Seconds, "Round trips of heartbeats.");
        metrics::describe_counter!("sqlock_heartbeat_late_total", "Heartbeats without an answer for a second.");
        metrics::describe_counter!("sqlock_heartbeat_failed_total", "Heartbeats that failed.");
        metrics::describe_counter!("sqlock_statements_total", "Requests to the database, by what they do.");
        metrics::describe_histogram!("sqlock_batch_size", "Operations in one request to the database.");
        metrics::describe_counter!("sqlock_idempotency_total", "Requests with an idempotency key, by outcome.");
        metrics::describe_gauge!(
            "sqlock_idempotency_oldest_unknown_seconds",
            metrics::Unit::Seconds,
            "Age of the oldest request with a key that has not ended or whose outcome is unknown, as of the last sweep."
        );
        metrics::counter!("sqlock_heartbeat_late_total").increment(0);
        metrics::counter!("sqlock_heartbeat_failed_total").increment(0);
        metrics::counter!("sqlock_idempotency_total", "outcome" => "unknown").increment(0);
    }
}

/// The causes of losses that need a person. Their counts begin at 0: the increase of a count that
/// appears with its first loss does not show that loss.
const ALARMING: [LossCause; 2] = [LossCause::Expired, LossCause::Superseded];

/// Maps the names of a client's locks to values of a label.
pub(crate) type NameLabel = dyn Fn(&str) -> &'static str + Send + Sync;

/// Measures the leases of one client.
#[derive(Clone, Default)]
pub(crate) struct Meter {
    label: Option<Arc<NameLabel>>,
}

impl Meter {
    #[cfg(feature = "metrics")]
    pub(crate) fn with_label(label: impl Fn(&str) -> &'static str + Send + Sync + 'static) -> Self {
        Self { label: Some(Arc::new(label)) }
    }

    pub(crate) fn count_request(&self, name: &LockName, kind: &'static str) {
        record! {
            metrics::gauge!("sqlock_waiting", self.labels(name, [])).increment(1);
            self.takeovers(name).increment(0);
            self.requests(name, kind, RefusalReason::Unavailable.as_str()).increment(0);
        }
    }

    pub(crate) fn count_grant(&self, name: &LockName, kind: &'static str, waited: Duration) {
        record! {
            metrics::gauge!("sqlock_waiting", self.labels(name, [])).decrement(1);
            metrics::gauge!("sqlock_held", self.labels(name, [])).increment(1);
            self.requests(name, kind, "acquired").increment(1);
            metrics::histogram!("sqlock_wait_seconds", self.labels(name, [("kind", kind)])).record(waited);
            ALARMING.into_iter().for_each(|cause| self.losses(name, cause).increment(0));
        }
    }

    pub(crate) fn count_refusal(&self, name: &LockName, kind: &'static str, reason: RefusalReason) {
        record! {
            metrics::gauge!("sqlock_waiting", self.labels(name, [])).decrement(1);
            self.requests(name, kind, reason.as_str()).increment(1);
        }
    }

    /// Counts a lease that ended or was exported.
    pub(crate) fn count_end(&self, name: &LockName, held: Duration) {
        record! {
            metrics::gauge!("sqlock_held", self.labels(name, [])).decrement(1);
            metrics::histogram!("sqlock_hold_seconds", self.labels(name, [])).record(held);
        }
    }

    pub(crate) fn count_loss(&self, name: &LockName, cause: LossCause) {
        record! { self.losses(name, cause).increment(1); }
    }

    pub(crate) fn count_takeover(&self, name: &LockName) {
        record! { self.takeovers(name).increment(1); }
    }

    #[cfg(feature = "metrics")]
    fn requests(&self, name: &LockName, kind: &'static str, outcome: &'static str) -> metrics::Counter {
        metrics::counter!("sqlock_acquire_total", self.labels(name, [("kind", kind), ("outcome", outcome)]))
    }

    #[cfg(feature = "metrics")]
    fn takeovers(&self, name: &LockName) -> metrics::Counter {
        metrics::counter!("sqlock_taken_over_total", self.labels(name, []))
    }

    #[cfg(feature = "metrics")]
    fn losses(&self, name: &LockName, cause: LossCause) -> metrics::Counter {
        metrics::counter!("sqlock_lost_total", self.labels(name, [("cause", cause.as_str())]))
    }

    /// Returns the labels of a metric, with the label of the name if the application has one.
    #[cfg(feature = "metrics")]
    fn labels<const N: usize>(
        &self,
        name: &LockName,
        labels: [(&'static str, &'static str); N],
    ) -> Vec<metrics::Label> {
        let name = self.label.as_ref().map(|label| ("name", label(name.as_str())));
        labels.into_iter().chain(name).map(|(key, value)| metrics::Label::from_static_parts(key, value)).collect()
    }
}

pub(crate) fn record_heartbeat(round_trip: Duration) {
    record! { metrics::histogram!("sqlock_heartbeat_seconds").record(round_trip); }
}

pub(crate) fn count_late_heartbeat() {
    record! { metrics::counter!("sqlock_heartbeat_late_total").increment(1); }
}

pub(crate) fn count_failed_heartbeat() {
    record! { metrics::counter!("sqlock_heartbeat_failed_total").increment(1); }
}

/// Counts a statement, and the operations in it.
pub(crate) fn count_statement(verb: &'static str, operations: usize) {
    record! {
        metrics::counter!("sqlock_statements_total", "verb" => verb).increment(1);
        metrics::histogram!("sqlock_batch_size").record(operations as f64);
    }
}

/// Counts the outcome of a request with an idempotency key.
pub(crate) fn count_outcome(outcome: &'static str) {
    record! { metrics::counter!("sqlock_idempotency_total", "outcome" => outcome).increment(1); }
}

/// Records the age of the oldest record that has not ended or whose outcome is unknown. `None`:
/// there is no such record.
pub(crate) fn set_oldest_unknown(age: Option<Duration>) {
    record! { metrics::gauge!("sqlock_idempotency_oldest_unknown_seconds").set(age.unwrap_or_default()); }
}
