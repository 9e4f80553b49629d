//! Functions that wait for an event, and fail the test if it does not happen in time.

#![allow(unreachable_pub, reason = "included by several programs")]

use std::time::Duration;

use tokio::time::{sleep, timeout};

/// The longest time that an expected event may take before a test fails. A machine that runs other
/// programs may need most of it.
pub const SOON: Duration = Duration::from_secs(60);

/// Longer than any test lasts: a name with this TTL that becomes free was released, and a leaked
/// lease is still held when a test times out.
pub const LONG: Duration = Duration::from_secs(600);

/// Waits for a future, and fails the test if it takes longer than [`SOON`].
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(SOON, future).await.unwrap_or_else(|_| panic!("{what} did not happen within {SOON:?}"))
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
