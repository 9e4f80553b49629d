//! The clients: several for each order. Each sends the order until it is answered, and again later.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::http::{self, Answer};
use super::order::Order;
use crate::random;

/// The pause between two new orders: 50 a second.
const EVERY: Duration = Duration::from_millis(20);

/// The most orders sent at the same time. More orders would only wait.
const AT_ONCE: usize = 1000;

/// The longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(5);

/// The time after which a client gives up.
const MAX_WAIT: Duration = Duration::from_secs(15);

/// The number of answers with an unknown outcome after which a client gives up.
const UNKNOWN: usize = 3;

/// The number of equal parts of the time in which requests are counted.
const PARTS: usize = 5;

/// The answers to the clients of an order.
#[derive(Clone, Default)]
pub(super) struct Heard {
    pub(super) receipts: BTreeSet<String>,
    pub(super) is_refused: bool,
}

pub(super) struct Clients {
    /// The ports of the servers.
    ports: Vec<u16>,
    start: Instant,
    time: Duration,
    heard: Mutex<BTreeMap<Order, Heard>>,
    requests: [AtomicU64; PARTS],
    /// Requests after the end of the storm.
    late_requests: AtomicU64,
    replays: AtomicU64,
    /// The number of answers by status. 0: no answer.
    answers: Mutex<BTreeMap<u16, u64>>,
}

impl Clients {
    pub(super) fn new(ports: Vec<u16>, time: Duration) -> Self {
        Self {
            ports,
            start: Instant::now(),
            time,
            heard: Mutex::default(),
            requests: Default::default(),
            late_requests: AtomicU64::new(0),
            replays: AtomicU64::new(0),
            answers: Mutex::default(),
        }
    }

    /// Sends new orders during the storm. Ends when no client sends any longer.
    pub(super) async fn send_orders(self: Arc<Self>) {
        let (mut ticks, mut sent) = (interval(EVERY), JoinSet::new());
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let places = Arc::new(Semaphore::new(AT_ONCE));
        for number in 0.. {
            ticks.tick().await;
            let place = Arc::clone(&places).acquire_owned().await.expect("the semaphore stays open");
            if self.start.elapsed() >= self.time {
                break;
            }
            let (clients, order) = (Arc::clone(&self), Order::numbered(number));
            clients.heard.lock().expect("no panic").insert(order.clone(), Heard::default());
            sent.spawn(async move {
                clients.send(&order).await;
                drop(place);
            });
            while let Some(ended) = sent.try_join_next() {
                ended.expect("no panic");
            }
        }
        sent.join_all().await;
    }

    /// Sends an order from two or three clients at the same time, and from one or two later.
    async fn send(self: &Arc<Self>, order: &Order) {
        let mut together = JoinSet::new();
        for _ in 0..2 + random(2) {
            let (clients, order) = (Arc::clone(self), order.clone());
            together.spawn(async move { clients.send_until_answered(&order).await });
        }
        together.join_all().await;
        for _ in 0..1 + random(2) {
            sleep(Duration::from_millis(random(3000) as u64)).await;
            self.send_until_answered(order).await;
        }
    }

    async fn send_until_answered(&self, order: &Order) {
        let (start, mut unknown) = (Instant::now(), 0);
        while start.elapsed() < MAX_WAIT && unknown < UNKNOWN {
            let port = self.ports[random(self.ports.len())];
            let answer = self.ask(port, order).await.ok();
            self.count(answer.as_ref());
            let mut pause = Duration::from_millis(100 + random(300) as u64);
            if let Some(answer) = answer {
                match StatusCode::from_u16(answer.status) {
                    Ok(StatusCode::CREATED) => {
                        self.hear(order, |heard| heard.receipts.insert(answer.body));
                        return;
                    }
                    Ok(StatusCode::PAYMENT_REQUIRED) => {
                        self.hear(order, |heard| std::mem::replace(&mut heard.is_refused, true));
                        return;
                    }
                    _ if answer.body.contains("outcome-unknown") => {
                        unknown += 1;
                        pause *= 4;
                    }
                    _ => {}
                }
            }
            sleep(pause).await;
        }
    }

    /// Sends an order once.
    pub(super) async fn ask(&self, port: u16, order: &Order) -> io::Result<Answer> {
        timeout(ANSWER, http::post(port, order.mode.path(), &order.name, &order.name)).await?
    }

    fn hear(&self, order: &Order, note: impl FnOnce(&mut Heard) -> bool) {
        note(self.heard.lock().expect("no panic").entry(order.clone()).or_default());
    }

    fn count(&self, answer: Option<&Answer>) {
        let part = self.start.elapsed().as_nanos() * PARTS as u128 / self.time.as_nanos().max(1);
        self.requests.get(part as usize).unwrap_or(&self.late_requests).fetch_add(1, Ordering::Relaxed);
        self.replays.fetch_add(u64::from(answer.is_some_and(|answer| answer.is_replay)), Ordering::Relaxed);
        let status = answer.map_or(0, |answer| answer.status);
        *self.answers.lock().expect("no panic").entry(status).or_default() += 1;
    }

    /// Returns all orders that were sent, with the answers to their clients.
    pub(super) fn heard(&self) -> BTreeMap<Order, Heard> {
        self.heard.lock().expect("no panic").clone()
    }

    /// Returns the statuses that neither a handler nor a fault explains.
    pub(super) fn unexpected_answers(&self) -> Vec<u16> {
        let is_expected = |status: u16| matches!(status, 0 | 201 | 402 | 408 | 409 | 429 | 500..);
        self.answers.lock().expect("no panic").keys().copied().filter(|status| !is_expected(*status)).collect()
    }

    pub(super) fn summary(&self) -> String {
        let requests: u64 = self.requests.iter().chain([&self.late_requests]).map(|n| n.load(Ordering::Relaxed)).sum();
        let keys = self.heard.lock().expect("no panic").len();
        format!("{keys} keys, {requests} requests, {} replays", self.replays.load(Ordering::Relaxed))
    }

    /// Formats the requests per second in the parts of the time.
    pub(super) fn rates(&self) -> String {
        let length = self.time.as_secs_f64() / PARTS as f64;
        let rates = self.requests.iter().map(|count| count.load(Ordering::Relaxed) as f64 / length);
        rates.map(|rate| format!("{rate:.0}")).collect::<Vec<_>>().join(" ")
    }

    /// Formats the number of answers by status.
    pub(super) fn answers(&self) -> String {
        format!("{:?}", self.answers.lock().expect("no panic"))
    }
}
