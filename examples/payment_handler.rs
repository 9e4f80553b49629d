//! A customer clicks "Pay" twice, or a client sends a payment again when no answer came, or the server dies in the
//! middle. How is each payment made once, and how is everybody who asked told the same receipt?
//!
//! The server, an application of axum, is a process of its own. It charges in `Idempotent::run`: the claim on the
//! key, the charge and the answer are one transaction. Its clients send each payment with an `Idempotency-Key`, and
//! again with the same key until they are answered. The server is killed with `kill -9` twice: once when it has
//! charged and not yet committed, once when it has committed and not yet answered.
//!
//! ```text
//! cargo run --features axum --example payment_handler
//! cargo run --features axum --example payment_handler -- --without-key   # as it is often written
//! DATABASE_URL=postgres://… cargo run --all-features --example payment_handler
//! ```

mod shared;

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, request::Parts};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing::post};
use serde::{Deserialize, Serialize};
use shared::*;
use sqlock::idempotency::Idempotency;
use sqlock::idempotency::http::{IdempotencyLayer, Idempotent};
use sqlock::retry::Retry;
use sqlx::Transaction;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// A payment as it is sent.
#[derive(Clone, Deserialize, Serialize)]
struct Payment {
    order: String,
    cents: i64,
}

/// What was charged. No two charges have the same number.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
struct Receipt {
    number: String,
    customer: String,
    order: String,
    cents: i64,
}

impl Receipt {
    fn new(customer: Option<String>, payment: &Payment) -> Self {
        let Payment { order, cents } = payment.clone();
        Self { number: uuid::Uuid::new_v4().to_string(), customer: customer.unwrap_or_default(), order, cents }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the payment failed: {0}")]
struct PaymentError(#[from] sqlx::Error);

impl IntoResponse for PaymentError {
    fn into_response(self) -> Response {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}

/// Who sends a request. In an application it is the session that tells, never the client.
fn customer(headers: &HeaderMap) -> Option<String> {
    Some(headers.get("x-customer")?.to_str().ok()?.to_owned())
}

/// At which charge the server is killed, and where.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Death {
    BeforeCommit(usize),
    BeforeAnswer(usize),
}

impl Death {
    fn of(words: &[String]) -> Result<Option<Self>> {
        let [_, place, at] = words else { return Ok(None) };
        let at = at.parse()?;
        Ok(Some(if place == "before-commit" { Self::BeforeCommit(at) } else { Self::BeforeAnswer(at) }))
    }

    /// Tells the process that has started this one, which kills it.
    async fn wait() {
        println!("in the middle");
        until_stdin_ends().await;
    }
}

any_database! {
    #[derive(Clone)]
    struct Till {
        pool: Pool<Db>,
        death: Option<Death>,
        charged: Arc<AtomicUsize>,
        committed: Arc<AtomicUsize>,
    }

    impl Till {
        /// Nothing here keeps a charge from being made twice.
        async fn charge(&self, conn: &mut Connection, receipt: &Receipt) -> Result<(), PaymentError> {
            QueryBuilder::<Db>::new("INSERT INTO sqlock_example_charge (receipt, customer, order_id, cents) ")
                .push_values([receipt.clone()], |mut row, receipt| {
                    row.push_bind(receipt.number).push_bind(receipt.customer);
                    row.push_bind(receipt.order).push_bind(receipt.cents);
                })
                .build()
                .execute(conn)
                .await?;
            let charged = self.charged.fetch_add(1, Ordering::Relaxed) + 1;
            if self.death == Some(Death::BeforeCommit(charged)) {
                Death::wait().await;
            }
            Ok(())
        }

        async fn committed(&self) {
            let committed = self.committed.fetch_add(1, Ordering::Relaxed) + 1;
            if self.death == Some(Death::BeforeAnswer(committed)) {
                Death::wait().await;
            }
        }
    }

    /// The claim on the key, the charge and the answer are committed together.
    async fn pay(
        State(till): State<Till>,
        headers: HeaderMap,
        idempotent: Idempotent,
        Json(payment): Json<Payment>,
    ) -> Response {
        let receipt = Receipt::new(customer(&headers), &payment);
        let charge = async |tx: &mut Transaction<'_, Db>| {
            till.charge(tx, &receipt).await?;
            Ok::<_, PaymentError>((StatusCode::CREATED, Json(receipt.clone())))
        };
        let answer = idempotent.run(&till.pool, charge).await;
        if answer.status() == StatusCode::CREATED && !answer.headers().contains_key("idempotent-replayed") {
            till.committed().await;
        }
        answer
    }

    /// As it is often done: every request is a payment.
    async fn pay_again(
        State(till): State<Till>,
        headers: HeaderMap,
        Json(payment): Json<Payment>,
    ) -> Result<Response, PaymentError> {
        let receipt = Receipt::new(customer(&headers), &payment);
        till.charge(&mut *till.pool.acquire().await?, &receipt).await?;
        till.committed().await;
        Ok((StatusCode::CREATED, Json(receipt)).into_response())
    }

    async fn serve(pool: Pool<Db>, death: Option<Death>) -> Result<()> {
        let locks = Locks::new(pool.clone());
        // On SQLite whoever writes waits for whoever writes.
        let patiently = Retry::new().attempts(u32::MAX).within(Duration::from_secs(60));
        // The second click waits for the first one, and is told the same.
        let payments = Idempotency::new(&locks).namespace("payments").wait(Duration::from_secs(5)).retry(patiently);
        let route = if asked_for("--without-key") {
            Router::new().route("/payments", post(pay_again))
        } else {
            let layer = IdempotencyLayer::new(payments, |parts: &Parts| customer(&parts.headers)).required();
            Router::new().route("/payments", post(pay)).layer(layer)
        };
        let app = route.with_state(Till { pool, death, charged: Arc::default(), committed: Arc::default() });
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("listening on {}", listener.local_addr()?);
        tokio::select! {
            served = async { axum::serve(listener, app).await } => Ok(served?),
            () = until_stdin_ends() => Ok(()),
        }
    }

    async fn example(pool: Pool<Db>, database: &Database) -> Result<()> {
        if let Some(words) = arguments() {
            return serve(pool, Death::of(&words)?).await;
        }
        let locks = Locks::new(pool.clone());
        let turn = take_turns(&locks, "payment_handler").await?;
        for sql in [
            "DROP TABLE IF EXISTS sqlock_example_charge",
            "CREATE TABLE sqlock_example_charge (receipt VARCHAR(40) NOT NULL, customer VARCHAR(40) NOT NULL,
                                                 order_id VARCHAR(80) NOT NULL, cents BIGINT NOT NULL)",
        ] {
            sqlx::query(sql).execute(&pool).await?;
        }

        let (server, address) = started(database, "serve").await?;
        let (serving, at) = watch::channel(address);
        let shop = Shop { at, run: turn.token().to_string() };
        let mut told = vec![
            double_click(&shop).await?,
            crowd(&shop).await?,
            other_customer(&shop).await?,
            other_amount(&shop).await?,
        ];
        server.kill().await?;
        told.push(killed(&shop, database, serving).await?);

        let ledger = sqlx::query_as("SELECT receipt, customer, order_id, cents FROM sqlock_example_charge");
        let ledger: Vec<(String, String, String, i64)> = ledger.fetch_all(&pool).await?;
        sqlx::query("DROP TABLE sqlock_example_charge").execute(&pool).await?;
        turn.release().await?;
        locks.shutdown().await?;
        let receipt = |(number, customer, order, cents)| Receipt { number, customer, order, cents };
        let ledger: Vec<_> = ledger.into_iter().map(receipt).collect();
        check(&ledger, &told)
    }
}

/// Starts a server, and tells where it listens.
async fn started(database: &Database, arguments: &str) -> Result<(Conversation, String)> {
    let mut server = database.conversation(arguments)?;
    let address = server.hears("listening on ").await?;
    Ok((server, address))
}

/// What clients did, and what they were told.
struct Told {
    what: &'static str,
    orders: usize,
    answers: Vec<Answer>,
}

/// The second click comes when the first one has been answered, or before.
async fn double_click(shop: &Shop) -> Result<Told> {
    let payment = shop.payment("book", 1_999);
    let (first, second) = tokio::try_join!(shop.pays("alice", &payment), shop.pays("alice", &payment))?;
    let third = shop.pays("alice", &payment).await?;
    let replays = [&first, &second, &third].map(|answer| answer.replayed);
    let answers = vec![first, second, third];
    if !asked_for("--without-key") && replays.iter().filter(|replayed| **replayed).count() != 2 {
        return Err(format!("a double click and a third one: Idempotent-Replayed: {replays:?}").into());
    }
    Ok(Told { what: "a double click, and one more", orders: 1, answers })
}

async fn crowd(shop: &Shop) -> Result<Told> {
    let payment = shop.payment("lamp", 4_500);
    Ok(Told { what: "50 duplicates at once", orders: 1, answers: shop.pay_all("bob", &[payment], 50).await? })
}

/// Keys belong to customers: the same key is another one, and nobody is told the receipt of somebody else.
async fn other_customer(shop: &Shop) -> Result<Told> {
    let payment = shop.payment("book", 1_999);
    let answers = vec![shop.pays("carol", &payment).await?, shop.pays("carol", &payment).await?];
    Ok(Told { what: "another customer, the same key", orders: 1, answers })
}

async fn other_amount(shop: &Shop) -> Result<Told> {
    let mut payment = shop.payment("book", 1_999);
    payment.cents = 2_999;
    let answer = shop.pays("alice", &payment).await?;
    if !asked_for("--without-key") && answer.status != 422 {
        return Err(format!("the same key with another amount was answered with {}", answer.status).into());
    }
    Ok(Told { what: "the same key, another amount", orders: 0, answers: vec![answer] })
}

/// The server dies twice while it serves.
async fn killed(shop: &Shop, database: &Database, serving: watch::Sender<String>) -> Result<Told> {
    let (mut server, address) = started(database, "serve before-commit 7").await?;
    serving.send_replace(address);
    let payments: Vec<_> = (1..=20).map(|number| shop.payment(&format!("ticket {number}"), 100 + number)).collect();
    let clients = {
        let (shop, payments) = (shop.clone(), payments.clone());
        tokio::spawn(async move { shop.pay_all("dave", &payments, 4).await })
    };
    for next in ["serve before-answer 4", "serve"] {
        server.hears("in the middle").await?;
        server.kill().await?; // with -9
        let address;
        (server, address) = started(database, next).await?;
        serving.send_replace(address);
    }
    let answers = clients.await??;
    server.kill().await?;
    Ok(Told { what: "the server is killed, twice", orders: payments.len(), answers })
}

/// The shop as its customers know it.
#[derive(Clone)]
struct Shop {
    at: watch::Receiver<String>,
    /// Orders of an earlier run of this example are others.
    run: String,
}

impl Shop {
    fn payment(&self, item: &str, cents: i64) -> Payment {
        Payment { order: format!("{item} ({})", self.run), cents }
    }

    /// All of them at once, each several times.
    async fn pay_all(&self, customer: &'static str, payments: &[Payment], times: usize) -> Result<Vec<Answer>> {
        let mut clients = JoinSet::new();
        for payment in (0..times).flat_map(|_| payments) {
            let (shop, payment) = (self.clone(), payment.clone());
            clients.spawn(async move { shop.pays(customer, &payment).await });
        }
        clients.join_all().await.into_iter().collect()
    }

    /// Sends the payment until it is answered, with the same key each time.
    async fn pays(&self, customer: &str, payment: &Payment) -> Result<Answer> {
        let start = Instant::now();
        loop {
            let address = self.at.borrow().clone();
            let told = match send(&address, customer, payment).await {
                Ok(answer) if !matches!(answer.status, 409 | 503) => return Ok(answer),
                Ok(answer) => format!("{}: {}", answer.status, answer.body),
                Err(error) => error.to_string(),
            };
            if start.elapsed() > Duration::from_secs(90) {
                return Err(format!("no answer for 90 seconds, but {told}").into());
            }
            // A client that has the time waits for as long as Retry-After says.
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// What a client is told.
struct Answer {
    status: u16,
    replayed: bool,
    body: String,
}

/// A request over HTTP/1.1. The key is that of the order.
async fn send(address: &str, customer: &str, payment: &Payment) -> io::Result<Answer> {
    let body = serde_json::to_string(payment)?;
    let request = format!(
        "POST /payments HTTP/1.1\r\nHost: shop\r\nConnection: close\r\nX-Customer: {customer}\r\n\
         Idempotency-Key: \"{}\"\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        payment.order,
        body.len(),
    );
    let mut connection = TcpStream::connect(address).await?;
    connection.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await?;
    Answer::parse(&answer).ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "the connection broke"))
}

impl Answer {
    /// `None`: it is not complete.
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

    fn receipt(&self) -> Option<Receipt> {
        serde_json::from_str(&self.body).ok()
    }
}

/// Whether each order was charged once, and everybody was told the receipt of that charge.
fn check(ledger: &[Receipt], told: &[Told]) -> Result<()> {
    println!("{:<32} answers  orders  charges  receipts", "");
    let mut wrong = Vec::new();
    for Told { what, orders, answers } in told {
        let receipts: HashSet<_> = answers.iter().filter_map(Answer::receipt).collect();
        let whose: HashSet<_> =
            receipts.iter().map(|receipt| (&receipt.customer, &receipt.order, receipt.cents)).collect();
        let charges: Vec<_> = ledger.iter().filter(|of| whose.contains(&(&of.customer, &of.order, of.cents))).collect();
        println!("{what:<32} {:>7} {orders:>7} {:>8} {:>9}", answers.len(), charges.len(), receipts.len());
        let answered = *orders == 0 || answers.iter().all(|answer| answer.status == 201 && answer.receipt().is_some());
        let once = whose.len() == *orders && charges.len() == *orders && receipts.len() == *orders;
        if !answered || !once || !charges.iter().all(|charge| receipts.contains(charge)) {
            wrong.push(format!("{what}: {} charges for {orders} orders", charges.len()));
        }
    }
    if !wrong.is_empty() {
        return Err(wrong.join("; ").into());
    }
    let orders: usize = told.iter().map(|told| told.orders).sum();
    if ledger.len() != orders {
        return Err(format!("{} charges in the ledger, for {orders} orders", ledger.len()).into());
    }
    println!("\n{orders} orders were charged, each of them once, and everybody who asked has its receipt.");
    Ok(())
}
