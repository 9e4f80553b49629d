//! Waits for the first of several futures.

use std::pin::Pin;
use std::task::Poll;

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
