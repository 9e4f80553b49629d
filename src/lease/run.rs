//! Runs work while a lease is held.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

use crate::error::{LossCause, Result};

/// Runs two futures until one of them completes; the first wins a tie.
pub(crate) async fn race<A: Future, B: Future>(a: Pin<&mut A>, b: Pin<&mut B>) -> Result<A::Output, B::Output> {
    tokio::select! {
        biased;
        a = a => Ok(a),
        b = b => Err(b),
    }
}

/// Waits for the first of several futures. Pending for ever without futures.
pub(crate) async fn first<F: Future>(futures: impl IntoIterator<Item = F>) -> F::Output {
    let mut all: Vec<_> = futures.into_iter().map(Box::pin).collect();
    std::future::poll_fn(|context| {
        let ready = all.iter_mut().map(|future| future.as_mut().poll(context)).find(Poll::is_ready);
        ready.unwrap_or(Poll::Pending)
    })
    .await
}

/// Returns the result of work whose lease was released, unless the lease was lost before. When only
/// the release failed, the name is free after its TTL.
pub(crate) fn unless_lost<T>(done: T, released: Result<()>) -> Result<T> {
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
