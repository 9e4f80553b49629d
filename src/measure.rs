//! Metrics for the facade `metrics`. Without the feature of that name, nothing is counted.
//!
//! No name of a lock is a label: the values of every label are few.

#![cfg_attr(not(feature = "metrics"), allow(unused_variables, reason = "nothing is measured"))]

use std::time::Duration;

use crate::error::LossCause;
use crate::events::RefusalReason;

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
        metrics::describe_histogram!("sqlock_heartbeat_seconds", metrics::Unit::Seconds, "Round trips of heartbeats.");
        metrics::describe_counter!("sqlock_heartbeat_late_total", "Heartbeats without an answer for a second.");
        metrics::describe_counter!("sqlock_statements_total", "Requests to the database, by what they do.");
        metrics::describe_histogram!("sqlock_batch_size", "Leases in one request to the database.");
        metrics::describe_counter!("sqlock_idempotency_total", "Requests with an idempotency key, by outcome.");
    }
}

pub(crate) fn requested() {
    record! { metrics::gauge!("sqlock_waiting").increment(1); }
}

pub(crate) fn acquired(kind: &'static str, waited: Duration) {
    record! {
        metrics::gauge!("sqlock_waiting").decrement(1);
        metrics::gauge!("sqlock_held").increment(1);
        metrics::counter!("sqlock_acquire_total", "kind" => kind, "outcome" => "acquired").increment(1);
        metrics::histogram!("sqlock_wait_seconds", "kind" => kind).record(waited);
    }
}

pub(crate) fn refused(kind: &'static str, reason: RefusalReason) {
    record! {
        metrics::gauge!("sqlock_waiting").decrement(1);
        metrics::counter!("sqlock_acquire_total", "kind" => kind, "outcome" => reason.as_str()).increment(1);
    }
}

/// Counts a lease that has ended, or was exported.
pub(crate) fn ended(held: Duration) {
    record! {
        metrics::gauge!("sqlock_held").decrement(1);
        metrics::histogram!("sqlock_hold_seconds").record(held);
    }
}

pub(crate) fn lost(cause: LossCause) {
    record! { metrics::counter!("sqlock_lost_total", "cause" => cause.as_str()).increment(1); }
}

pub(crate) fn heartbeat(round_trip: Duration) {
    record! { metrics::histogram!("sqlock_heartbeat_seconds").record(round_trip); }
}

pub(crate) fn heartbeat_late() {
    record! { metrics::counter!("sqlock_heartbeat_late_total").increment(1); }
}

/// Counts a statement, and the operations in it.
pub(crate) fn statement(verb: &'static str, operations: usize) {
    record! {
        metrics::counter!("sqlock_statements_total", "verb" => verb).increment(1);
        metrics::histogram!("sqlock_batch_size").record(operations as f64);
    }
}

/// Counts the outcome of a request with an idempotency key.
pub(crate) fn idempotency(outcome: &'static str) {
    record! { metrics::counter!("sqlock_idempotency_total", "outcome" => outcome).increment(1); }
}
