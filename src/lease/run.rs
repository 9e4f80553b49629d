//! Runs work while a lease is held.

use std::task::Poll;

use crate::error::{LossCause, Result};

/// Returns the result of work whose lease was released, unless the lease was lost before. When only
/// the release failed, the name is free after its TTL.
pub(crate) fn result_unless_lost<T>(done: T, released: Result<()>) -> Result<T> {
    match released {
        Err(error) if error.is_lost() => Err(error),
        _ => Ok(done),
    }
}

/// Runs the work while a lease is held. Returns the cause if the lease is lost first.
///
/// Every poll of the work checks the lease first: when the process was stopped, or its thread
/// blocked, past the deadline, the work is dropped without another poll.
pub(crate) async fn while_held<T>(
    work: impl Future<Output = T>,
    is_held: impl Fn() -> bool,
    lost: impl Future<Output = LossCause>,
) -> Result<T, LossCause> {
    let (mut work, mut lost) = (std::pin::pin!(work), std::pin::pin!(lost));
    std::future::poll_fn(|cx| {
        if is_held()
            && let Poll::Ready(done) = work.as_mut().poll(cx)
        {
            return Poll::Ready(Ok(done));
        }
        lost.as_mut().poll(cx).map(Err)
    })
    .await
}
