//! Waits abandoned by their callers: no entry stays in the queue.
//!
//! Promises: 7, 9.

use std::sync::mpsc;
use std::thread;

use sqlock::Owner;
use tokio::sync::mpsc as orders;

use super::*;

/// A client on a thread of its own, which can be blocked: to other clients it looks like a stopped
/// process.
struct Stoppable {
    orders: orders::UnboundedSender<Order>,
    thread: Option<thread::JoinHandle<()>>,
}

enum Order {
    Wait {
        name: &'static str,
        times: usize,
    },
    /// Do nothing at all until the other end is dropped.
    Stop(mpsc::Receiver<()>),
    GiveUp,
}

impl Stoppable {
    async fn new(db: &TestDatabase) -> Self {
        let builder = db.builder().await;
        let (orders, mut inbox) = orders::unbounded_channel();
        let work = move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async {
                let locks = builder.build();
                let mut waits: Vec<Waiting> = Vec::new();
                while let Some(order) = inbox.recv().await {
                    match order {
                        Order::Wait { name, times } => {
                            // Readers of one client queue together.
                            let request = || locks.lease(name).ttl(LONG).shared();
                            waits.extend((0..times).map(|_| tokio::spawn(request().acquire())));
                        }
                        Order::Stop(until) => drop(until.recv()),
                        Order::GiveUp => waits.drain(..).for_each(|wait| wait.abort()),
                    }
                }
            });
        };
        Self { orders, thread: Some(thread::spawn(work)) }
    }

    fn order(&self, order: Order) {
        assert!(self.orders.send(order).is_ok(), "the client is alive");
    }
}

impl Drop for Stoppable {
    fn drop(&mut self) {
        let (orders, _) = orders::unbounded_channel();
        self.orders = orders;
        let _ = self.thread.take().map(thread::JoinHandle::join);
    }
}

/// The entries of a stopped process expire and are purged; when it continues, its waiters queue
/// again, and must still be able to leave the queue.
#[tokio::test]
async fn waits_abandoned_after_a_stall_are_removed() {
    let db = fresh().await;
    let (client, rival) = (Stoppable::new(&db).await, db.locks().await);
    let holder = rival.lease("a").ttl(LONG).acquire().await.expect("acquire");
    client.order(Order::Wait { name: "a", times: 10 });
    until_waiters(&rival, "a", 10).await;
    let (go_on, stopped) = mpsc::channel();
    client.order(Order::Stop(stopped));
    until_waiters(&rival, "a", 0).await;
    // A release without a live waiter purges the entries.
    holder.release().await.expect("release");
    let holder = soon("the name", rival.lease("a").ttl(LONG).acquire()).await.expect("acquire");
    drop(go_on);
    until_waiters(&rival, "a", 10).await;
    client.order(Order::GiveUp);
    until_waiters(&rival, "a", 0).await;
    holder.release().await.expect("release");
}

/// A request of a given owner first asks whether the owner holds the name. A request dropped during
/// that question must not queue when the answer arrives.
#[tokio::test]
async fn owner_request_dropped_at_once_is_not_queued() {
    let db = fresh().await;
    let (locks, rival) = (db.locks().await, db.locks().await);
    let holder = rival.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let owner = Owner::random();
    for _ in 0..5 {
        let mut acquiring = Box::pin(locks.lease("a").ttl(LONG).owner(owner).shared().acquire());
        let polled = std::future::poll_fn(|cx| std::task::Poll::Ready(acquiring.as_mut().poll(cx).is_pending())).await;
        assert!(polled, "the database cannot have answered yet");
    }
    // Whatever follows from those questions comes before this on the client's connections.
    for _ in 0..10 {
        locks.lease("b").ttl(LONG).acquire().await.expect("acquire").release().await.expect("release");
        assert!(rival.waiters("a").await.expect("waiters").is_empty(), "no entry");
    }
    holder.release().await.expect("release");
}
