//! Holders and waiters that are killed together.
//!
//! Promises: 7, 8.

use super::*;

/// The entries of the dead expire while the first of them has the name, or before their holder's
/// lease does.
#[tokio::test]
async fn dead_waiters_are_passed_over_together() {
    for holder_dies in [false, true] {
        let queue = WaitQueue::new().await;
        let mut holder = Worker::start(&queue.db.url);
        let token = holder.hold("a", Duration::from_secs(6)).await;
        let mut dead = waiting_workers(&queue, 5).await;
        let client = queue.client().await;
        let next = queue.join(client.lease("a"), "next").await;
        for waiter in &mut dead {
            waiter.kill();
        }
        if holder_dies {
            holder.kill();
        } else {
            assert_eq!(holder.ask("release").await, "released");
        }
        let mut tokens = BTreeSet::new();
        let next = tokio::select! {
            next = turn(next) => next,
            () = record_tokens(&queue.table, &mut tokens) => unreachable!("it has no end"),
        };
        let to_the_dead = tokens.iter().filter(|seen| **seen > token && **seen < next.token().get()).count();
        assert!(to_the_dead <= 1, "{to_the_dead} grants to dead waiters: {tokens:?}");
        next.release().await.expect("held to the end");
        queue.assert_empty().await;
    }
}
