//! The errors of refused requests.

use tokio::time::Instant;

use crate::client::Client;
use crate::engine::Refusal;
use crate::error::{Error, no_answer_within};
use crate::name::LockName;

/// Why a lease is neither converted nor exported.
pub(super) const ENTERED_AGAIN: &str = "its owner has acquired it more than once; release the other leases first";

/// Makes the error of a request that was not granted.
pub(super) fn refusal_error(client: &Client, refusal: Refusal, name: LockName, start: Instant) -> Error {
    let waited = start.elapsed();
    match refusal {
        // Without an answer of the database, no holder of the name is known.
        Refusal::Taken | Refusal::Timeout => match client.coordinator.executor().failure() {
            Some(reason) => Error::Unavailable { attempted: "acquire", reason, source: None },
            None => Error::Timeout { name, waited },
        },
        Refusal::TooLate => {
            let reason = "the grant arrived after the lease had ended".into();
            Error::Unavailable { attempted: "acquire", reason, source: None }
        }
        Refusal::NoAnswer => {
            // The limit may have interrupted an attempt: the earlier attempt failed for a reason.
            let failure = client.coordinator.executor().last_failure();
            let reason = failure.unwrap_or_else(|| no_answer_within(waited));
            Error::Unavailable { attempted: "acquire", reason, source: None }
        }
        Refusal::Conversion { name } => {
            let reason = "its owner holds a shared lease on it; release that lease first";
            Error::Conversion { attempted: "acquire", name, reason }
        }
        Refusal::Lost | Refusal::Closed => Error::Closed,
        Refusal::Failed(failure) => failure.into_error(),
    }
}
