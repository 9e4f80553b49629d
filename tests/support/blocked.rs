//! Work whose thread is blocked past the deadline of a lease, as in a paused virtual machine or on
//! a slow disk.

#![allow(unreachable_pub, reason = "included by several tests")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

/// Blocks the thread at the second poll for longer than the lease is safe, and completes at the
/// third. Counts the polls.
pub async fn block_past(remaining: impl Fn() -> Duration, polls: &AtomicU32) {
    std::future::poll_fn(|context| {
        match polls.fetch_add(1, Ordering::SeqCst) {
            // Futures that run beside this work are polled before its next poll.
            0 => {}
            1 => std::thread::sleep(remaining() + Duration::from_millis(100)),
            _ => return Poll::Ready(()),
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
