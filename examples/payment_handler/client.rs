//! The customers, who speak HTTP/1.1.

use std::io;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::Payment;
use super::shared::Result;

/// The customers' view of the shop.
#[derive(Clone)]
pub(super) struct Shop {
    pub(super) at: watch::Receiver<String>,
    pub(super) path: &'static str,
    /// The mark of this run, which distinguishes its orders from those of earlier runs.
    pub(super) run: String,
}

impl Shop {
    pub(super) fn payment(&self, item: &str, cents: i64) -> Payment {
        Payment { order: format!("{item} ({})", self.run), cents }
    }

    /// Sends all payments at once, each several times.
    pub(super) async fn pay_all(
        &self,
        customer: &'static str,
        payments: &[Payment],
        times: usize,
    ) -> Result<Vec<Answer>> {
        let mut clients = JoinSet::new();
        for payment in (0..times).flat_map(|_| payments) {
            let (shop, payment) = (self.clone(), payment.clone());
            clients.spawn(async move { shop.pays(customer, &payment).await });
        }
        clients.join_all().await.into_iter().collect()
    }

    /// Sends the payment until it is answered, with the same key each time.
    pub(super) async fn pays(&self, customer: &str, payment: &Payment) -> Result<Answer> {
        let start = Instant::now();
        loop {
            let address = self.at.borrow().clone();
            let told = match self.sends(&address, customer, payment).await {
                Ok(answer) if !matches!(answer.status, 409 | 503) => return Ok(answer),
                Ok(answer) => format!("{}: {}", answer.status, answer.body),
                Err(error) => error.to_string(),
            };
            if start.elapsed() > Duration::from_secs(90) {
                return Err(format!("no answer for 90 seconds, but {told}").into());
            }
            // A real client waits for the time of Retry-After.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Sends the payment once. The key is that of the order.
    pub(super) async fn sends(&self, address: &str, customer: &str, payment: &Payment) -> io::Result<Answer> {
        post((address, self.path), customer, &payment.order, &serde_json::to_string(payment)?).await
    }
}

/// An answer to a client.
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) replayed: bool,
    pub(super) body: String,
}

/// Posts JSON with a key, and waits for the answer. The port of a server that has died may belong to
/// a program that never answers.
pub(super) async fn post(url: (&str, &str), customer: &str, key: &str, body: &str) -> io::Result<Answer> {
    let (address, path) = url;
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\nX-Customer: {customer}\r\n\
         Idempotency-Key: \"{key}\"\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len(),
    );
    let answered = async {
        let mut connection = TcpStream::connect(address).await?;
        connection.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await?;
        Ok::<_, io::Error>(answer)
    };
    let answer = tokio::time::timeout(Duration::from_secs(20), answered).await??;
    Answer::parse(&answer).ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "the connection broke"))
}

impl Answer {
    /// Parses an answer. `None`: the answer is incomplete.
    fn parse(answer: &str) -> Option<Self> {
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let mut lines = head.lines();
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let header = |wanted: &str| {
            lines.clone().filter_map(|line| line.split_once(": ")).find(|(name, _)| name.eq_ignore_ascii_case(wanted))
        };
        let length: usize = header("Content-Length")?.1.parse().ok()?;
        let replayed = header("Idempotent-Replayed").is_some_and(|(_, value)| value == "true");
        (body.len() == length).then(|| Self { status, replayed, body: body.to_owned() })
    }
}
