//! A customer clicks "Pay" twice, or a client sends a payment again when no answer came, or the
//! server dies in the middle. How is each payment made once, and how does every request receive the
//! same receipt?
//!
//! The server, an application of axum, is a process of its own. It charges in `Idempotent::run`:
//! the claim on the key, the charge and the answer are one transaction. Its clients send each
//! payment with an `Idempotency-Key`, and again with the same key until they are answered. The
//! server is killed with `kill -9` twice: once when it has charged and not yet committed, once when
//! it has committed and not yet answered.
//!
//! Two payments are charged by a provider, in `Idempotent::run_leased`. During the first one the
//! server is stopped for longer than its lease lasts, another server continues, and the first one
//! wakes up. The provider charges the second payment, and does not answer in time (408): its
//! outcome is unknown until the next server resumes it. In the end the ledger has the charges of
//! the provider, and no others.
//!
//! ```text
//! cargo run --features axum --example payment_handler
//! cargo run --features axum --example payment_handler -- --without-key   # without idempotency
//! cargo run --features axum --example payment_handler -- --new-key       # another key for each call of the provider
//! DATABASE_URL=postgres://… cargo run --all-features --example payment_handler
//! ```

#[path = "payment_handler/client.rs"]
mod client;
#[path = "payment_handler/provider.rs"]
mod provider;
mod shared;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, request::Parts};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing::post};
use client::{Answer, Shop};
use provider::{Charge, FROZEN, LATE, Provider};
use serde::{Deserialize, Serialize};
use shared::*;
use sqlock::idempotency::http::{IdempotencyLayer, Idempotent};
use sqlock::idempotency::{Attempt, Idempotency};
use sqlock::retry::Retry;
use sqlx::Transaction;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// A payment as it is sent.
#[derive(Clone, Deserialize, Serialize)]
struct Payment {
    order: String,
    cents: i64,
}

/// The receipt of a charge. No two charges have the same number.
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
enum PaymentError {
    #[error("the payment failed: {0}")]
    Database(#[from] sqlx::Error),
    #[error("the payment failed: {0}")]
    Lock(#[from] sqlock::Error),
    #[error("{0}")]
    Provider(String),
}

impl IntoResponse for PaymentError {
    fn into_response(self) -> Response {
        let status = match self {
            // The provider may have charged.
            Self::Provider(_) => StatusCode::REQUEST_TIMEOUT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, self.to_string()).into_response()
    }
}

/// The TTL of an attempt: how long a stopped server keeps its payments.
const LEASE: Duration = Duration::from_secs(2);

/// The header with the sender. In an application, the session has it, never the client.
fn customer(headers: &HeaderMap) -> Option<String> {
    Some(headers.get("x-customer")?.to_str().ok()?.to_owned())
}

/// The charge and the point at which the server is killed. The later ones wait for that too, so
/// that payments are left for the next server.
#[derive(Clone, Copy)]
enum Death {
    BeforeCommit(usize),
    BeforeAnswer(usize),
}

impl Death {
    fn of(words: &[String]) -> Result<Option<Self>> {
        Ok(match words {
            [_, place, at] if place == "before-commit" => Some(Self::BeforeCommit(at.parse()?)),
            [_, place, at] if place == "before-answer" => Some(Self::BeforeAnswer(at.parse()?)),
            _ => None,
        })
    }

    /// Prints a line for the parent process, which kills this one.
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
        /// The address of the provider.
        provider: String,
        charged: Arc<AtomicUsize>,
        committed: Arc<AtomicUsize>,
    }

    impl Till {
        /// Writes a charge into the ledger, which does not prevent a second one.
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
            if matches!(self.death, Some(Death::BeforeCommit(at)) if charged >= at) {
                Death::wait().await;
            }
            Ok(())
        }

        /// Charges at the provider and writes the charge into the ledger, each once, as long as the
        /// provider keeps its keys (Stripe: 24 hours). An application that resumes older requests
        /// first asks the provider for the charge.
        async fn charge_at_provider(
            &self,
            attempt: &Attempt,
            payment: &Payment,
        ) -> Result<(StatusCode, Json<Receipt>), PaymentError> {
            let key = match asked_for("--new-key") {
                true => uuid::Uuid::new_v4().to_string(),
                false => attempt.provider_key("charge"),
            };
            let ask = async || provider::ask(&self.provider, &key, payment).await.map_err(PaymentError::Provider);
            let number = attempt.step("charge", ask).await?;
            let receipt = Receipt { number, ..Receipt::new(attempt.principal().map(str::to_owned), payment) };
            if attempt.recall::<()>("ledger").await?.is_none() {
                let mut tx = self.pool.begin().await?;
                self.charge(&mut tx, &receipt).await?;
                attempt.record_step(&mut tx, "ledger", &()).await?;
                tx.commit().await?;
            }
            Ok((StatusCode::CREATED, Json(receipt)))
        }

        async fn committed(&self) {
            let committed = self.committed.fetch_add(1, Ordering::Relaxed) + 1;
            if matches!(self.death, Some(Death::BeforeAnswer(at)) if committed >= at) {
                Death::wait().await;
            }
        }
    }

    /// Charges once: the claim on the key, the charge and the answer are committed together.
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

    async fn pay_by_provider(
        State(till): State<Till>,
        idempotent: Idempotent,
        Json(payment): Json<Payment>,
    ) -> Response {
        idempotent.run_leased(async |attempt| till.charge_at_provider(attempt, &payment).await).await
    }

    /// Charges for every request, without a key.
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

    async fn serve(pool: Pool<Db>, death: Option<Death>, words: &[String]) -> Result<()> {
        let locks = Locks::new(pool.clone());
        // On SQLite, writers wait for each other.
        let patiently = Retry::new().attempts(u32::MAX).within(Duration::from_secs(60));
        // The second click waits for the first one, and receives the same answer.
        let payments = Idempotency::new(&locks).namespace("payments").wait(Duration::from_secs(5)).retry(patiently);
        let (task, provider) = match words {
            [_, task, provider] if death.is_none() => (task.as_str(), provider.clone()),
            _ => ("", String::new()),
        };
        let till = Till { pool, death, provider, charged: Arc::default(), committed: Arc::default() };
        let customer_of = |parts: &Parts| customer(&parts.headers);
        let charged_elsewhere = payments.clone().namespace("provider payments").lease(LEASE);
        let by_provider = IdempotencyLayer::new(charged_elsewhere, customer_of).required().store_request();
        if task == "resume" {
            // Resumes the payments of a dead server.
            let work = async |attempt: &Attempt| {
                let payment = attempt.json_request::<Payment>()?.ok_or(PaymentError::Provider("no request".into()))?;
                till.charge_at_provider(attempt, &payment).await
            };
            by_provider.resume(work).await?;
        }
        let route = if asked_for("--without-key") {
            Router::new().route("/payments", post(pay_again))
        } else {
            let layer = IdempotencyLayer::new(payments, customer_of).required();
            Router::new().route("/payments", post(pay)).layer(layer)
        };
        let by_provider = Router::new().route("/provider", post(pay_by_provider)).layer(by_provider);
        let app = route.merge(by_provider).with_state(till);
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("listening on {}", listener.local_addr()?);
        tokio::select! {
            served = async { axum::serve(listener, app).await } => Ok(served?),
            () = until_stdin_ends() => Ok(()),
        }
    }

    async fn example(pool: Pool<Db>, database: &Database) -> Result<()> {
        if let Some(words) = arguments() {
            return serve(pool, Death::of(&words)?, &words).await;
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
        let shop = Shop { at, path: "/payments", run: turn.token().to_string() };
        let mut told = vec![
            double_click(&shop).await?,
            crowd(&shop).await?,
            other_customer(&shop).await?,
            other_amount(&shop).await?,
        ];
        server.kill().await?;
        told.push(killed(&shop, database, &serving).await?);
        let shop = Shop { path: "/provider", ..shop };
        let provider = Provider::default();
        told.push(charged_elsewhere(&shop, database, &serving, &provider, &locks).await?);

        let ledger = sqlx::query_as("SELECT receipt, customer, order_id, cents FROM sqlock_example_charge");
        let ledger: Vec<(String, String, String, i64)> = ledger.fetch_all(&pool).await?;
        sqlx::query("DROP TABLE sqlock_example_charge").execute(&pool).await?;
        turn.release().await?;
        locks.shutdown().await?;
        let receipt = |(number, customer, order, cents)| Receipt { number, customer, order, cents };
        let ledger: Vec<_> = ledger.into_iter().map(receipt).collect();
        check(&ledger, &told)?;
        check_provider(&ledger, &provider.charges())
    }
}

/// Starts a server, and returns its address.
async fn started(database: &Database, arguments: &str) -> Result<(Conversation, String)> {
    let mut server = database.conversation(arguments)?;
    let address = server.hears("listening on ").await?;
    Ok((server, address))
}

/// The payments of the clients, and the answers.
struct Told {
    what: &'static str,
    orders: usize,
    answers: Vec<Answer>,
}

/// Clicks twice. The second click comes before or after the answer to the first.
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

/// Sends one key for two customers: keys belong to customers, so neither receives the other's
/// receipt.
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
async fn killed(shop: &Shop, database: &Database, serving: &watch::Sender<String>) -> Result<Told> {
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

/// A provider charges: a server is stopped for longer than its lease, a charge is not confirmed, a
/// server is replaced.
async fn charged_elsewhere(
    shop: &Shop,
    database: &Database,
    serving: &watch::Sender<String>,
    provider: &Provider,
    locks: &Locks,
) -> Result<Told> {
    let at = provider.start().await?;
    let (first, first_address) = started(database, &format!("serve charge {at}")).await?;
    let frozen = shop.payment(FROZEN, 7_000);
    let cut_off = tokio::spawn({
        let (shop, frozen) = (shop.clone(), frozen.clone());
        async move { shop.sends(&first_address, "erin", &frozen).await }
    });
    provider.called.notified().await;
    stop(&first, locks).await?;
    let (second, address) = started(database, &format!("serve charge {at}")).await?;
    serving.send_replace(address.clone());
    provider.go_on.notify_one();
    let mut answers = vec![shop.pays("erin", &frozen).await?];
    // The first server has the provider's answer now, and no lease.
    first.signal("CONT").await?;
    let woken = cut_off.await??;
    if woken.status != 409 {
        return Err(format!("a server without a lease answered {}: {}", woken.status, woken.body).into());
    }
    answers.push(shop.pays("erin", &frozen).await?);
    first.kill().await?;

    let late = shop.payment(LATE, 9_000);
    for (times, expected) in [("the first time", 408), ("the second time", 409)] {
        let answer = shop.sends(&address, "erin", &late).await?;
        if answer.status != expected {
            return Err(format!("an unknown charge was answered with {} {times}", answer.status).into());
        }
    }
    second.kill().await?;
    let (third, address) = started(database, &format!("serve resume {at}")).await?;
    serving.send_replace(address);
    answers.push(shop.pays("erin", &late).await?);
    third.kill().await?;
    Ok(Told { what: "a provider: freeze, 408, restart", orders: 2, answers })
}

/// Stops a server. On SQLite the stopped server may block all writers: then it continues for a
/// moment.
async fn stop(server: &Conversation, locks: &Locks) -> Result<()> {
    loop {
        server.signal("STOP").await?;
        let probe = locks.lease("example/payment_handler/probe").acquire();
        if let Ok(Ok(lease)) = tokio::time::timeout(Duration::from_secs(3), probe).await {
            return Ok(lease.release().await?);
        }
        server.signal("CONT").await?;
    }
}

impl Answer {
    fn receipt(&self) -> Option<Receipt> {
        serde_json::from_str(&self.body).ok()
    }
}

/// Checks that each order was charged once, and that every answer has the receipt of that charge.
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

/// Checks that the ledger has the charges of the provider, and no others.
fn check_provider(ledger: &[Receipt], charges: &[Charge]) -> Result<()> {
    let is_elsewhere = |receipt: &&Receipt| receipt.customer == "erin";
    let entry = |receipt: &Receipt| (receipt.number.clone(), receipt.order.clone(), receipt.cents);
    let entries: HashSet<Charge> = ledger.iter().filter(is_elsewhere).map(entry).collect();
    if entries != charges.iter().cloned().collect() {
        return Err(format!("the provider has charged {charges:?}, and the ledger says {entries:?}").into());
    }
    println!("The provider has charged {} of them, as the ledger says.", charges.len());
    Ok(())
}
