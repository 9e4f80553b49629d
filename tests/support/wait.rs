//! Functions that wait for an event, and fail the test if it does not happen in time.

#![allow(unreachable_pub, reason = "included by several programs")]

use std::time::Duration;

use sqlock::{Error, LeaseRequest};
use tokio::time::{sleep, timeout};

/// The longest time that an expected event may take before a test fails. A machine that runs other
/// programs may need most of it.
pub const SOON: Duration = Duration::from_secs(60);

/// Longer than any test lasts: a name with this TTL that becomes free was released, and a leaked
/// lease is still held when a test times out.
pub const LONG: Duration = Duration::from_secs(600);

/// Long enough to do something while it lasts on a busy machine, short enough to wait for its end.
pub const BRIEF: Duration = Duration::from_secs(6);

/// How late anything may be on a busy machine. Nothing may be early.
pub const SLACK: Duration = Duration::from_secs(10);

/// Waits for a future, and fails the test if it takes longer than [`SOON`].
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(SOON, future).await.unwrap_or_else(|_| panic!("{what} did not happen within {SOON:?}"))
}

/// Returns the error of a wait that reaches its limit. If the server or this process stalls at that
/// moment, the wait ends with [`Error::Unavailable`], and is repeated.
pub async fn times_out(request: LeaseRequest) -> Error {
    let waits = async {
        loop {
            match request.clone().acquire().await {
                Err(Error::Unavailable { .. }) => {}
                answer => return answer.expect_err("a lease that was held"),
            }
        }
    };
    soon("a timeout", waits).await
}

/// Polls until a condition holds.
pub async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let holds = async {
        while !condition().await {
            sleep(Duration::from_millis(20)).await;
        }
    };
    soon(what, holds).await;
}
