//! Catches panics, so that they end only the work that caused them.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

/// Runs a function. Returns the message of a panic as an error.
pub(crate) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| message(&*panic))
}

/// Runs a future, and does not poll it again after a panic. Returns the message of the panic as an
/// error.
pub(crate) async fn caught_in<F: Future>(work: F) -> Result<F::Output, String> {
    let mut work = pin!(work);
    std::future::poll_fn(|cx| match caught(|| work.as_mut().poll(cx)) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}

/// Returns the reason of a request whose code has panicked with this message.
pub(crate) fn reason(message: &str) -> String {
    format!("the code of the request panicked: {message}")
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message").to_owned()
}
