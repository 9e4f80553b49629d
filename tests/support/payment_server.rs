//! Processes for tests to kill: a server that makes charges, each once under its key, and a
//! provider.
//!
//! `payment_server URL [PROVIDER_PORT]` reads requests from its standard input, one a line, and
//! answers in any order.
//!
//! | request             | answer                                                                           |
//! |---------------------|----------------------------------------------------------------------------------|
//! | `N once KEY`        | `N new RECEIPT`, `N replay RECEIPT`, `N in-progress` …, `N error …`: in one transaction |
//! | `N leased KEY`      | the same, under a lease: the charge is made at the provider, and written down here |
//! | `N ordered KEY PORT` | as `leased`; the charge is made at PORT, as soon as that sends a line              |
//! | `N resume`          | `N resumed DONE FAILED`                                                           |
//!
//! `payment_server provider` prints its port. It charges once for each key, and answers with the
//! receipt.
//!
//! | command | answer                                                      |
//! |---------|-------------------------------------------------------------|
//! | `hold`  | `held`: charges are made, but not answered any more          |
//! | `go`    | `gone`                                                       |
//! | `count` | how many charges were made, and how often it was asked       |

#![allow(clippy::expect_used, clippy::panic, reason = "a program for tests")]

#[path = "any_pool.rs"]
mod any_pool;

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Signal, set_parent_process_death_signal};
use sqlock::Error;
use sqlock::idempotency::{Attempt, Fingerprint, Idempotency, IdempotencyKey, Outcome};
use sqlx::AssertSqlSafe;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use any_pool::{AnyPool, on_pool};

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    set_parent_process_death_signal(Some(Signal::KILL)).expect("the parent-death signal");
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().expect("usage: payment_server URL [PROVIDER_PORT]");
    if url == "provider" {
        return provide().await;
    }
    let port = arguments.next().map(|port| port.parse().expect("a port"));
    let server = Arc::new(PaymentServer::open(&url, port));
    let (requests, mut inbox) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let _ = requests.send(line.expect("requests are text"));
        }
    });
    while let Some(request) = inbox.recv().await {
        let server = Arc::clone(&server);
        tokio::spawn(async move {
            let words: Vec<&str> = request.split(' ').collect();
            let answer = match words[..] {
                [n, "once", key] => format!("{n} {}", reply(server.once(key).await)),
                [n, "leased", key] => format!("{n} {}", reply(server.leased(key).await)),
                [n, "ordered", key, port] => {
                    format!("{n} {}", reply(server.ordered(key, port.parse().expect("a port")).await))
                }
                [n, "resume"] => match server.resume().await {
                    Ok((done, failed)) => format!("{n} resumed {done} {failed}"),
                    Err(error) => format!("{n} error {error}"),
                },
                _ => panic!("{request}?"),
            };
            say(&answer);
        });
    }
}

fn say(answer: &str) {
    let mut out = std::io::stdout().lock();
    // A missing reader means that the process is about to end.
    let _ = writeln!(out, "{}", answer.replace('\n', " ")).and_then(|()| out.flush());
}

fn reply(outcome: Result<Outcome<String>, String>) -> String {
    match outcome {
        Ok(Outcome::New(receipt)) => format!("new {receipt}"),
        Ok(Outcome::Replay(receipt)) => format!("replay {receipt}"),
        Ok(Outcome::InProgress) => "in-progress".into(),
        Ok(Outcome::Unknown) => "unknown".into(),
        Ok(other) => format!("refused {other:?}"),
        Err(error) => format!("error {error}"),
    }
}

struct PaymentServer {
    pool: AnyPool,
    payments: Idempotency,
    provider: Option<u16>,
}

impl PaymentServer {
    fn open(url: &str, provider: Option<u16>) -> Self {
        let pool = AnyPool::open(url, 6);
        let locks = pool.builder().build();
        // The TTL is so short that a test sees it run out, and a busy machine renews it in time.
        let payments = Idempotency::new(&locks).namespace("payments").lease(Duration::from_secs(3));
        Self { pool, payments, provider }
    }

    async fn once(&self, key: &str) -> Result<Outcome<String>, String> {
        let (alice, request) = (IdempotencyKey::new("alice", key), Fingerprint::of([key]));
        let receipt = uuid::Uuid::new_v4().simple().to_string();
        let write = format!("INSERT INTO charge (request_key, receipt) VALUES ('{key}', '{receipt}')");
        let done: Result<_, Error> = on_pool!(&self.pool, pool => {
            self.payments.run(pool, &alice, &request, async |tx| {
                sqlx::raw_sql(AssertSqlSafe(write.clone())).execute(&mut **tx).await?;
                // The work takes time, so that the process can be killed in the middle.
                tokio::time::sleep(Duration::from_millis(3)).await;
                Ok(receipt.clone())
            }).await
        });
        done.map_err(|error| error.report().to_string())
    }

    async fn leased(&self, key: &str) -> Result<Outcome<String>, String> {
        let (alice, request) = (IdempotencyKey::new("alice", key), Fingerprint::of([key]));
        let done = self.payments.run_leased(&alice, &request, async |attempt| self.charge(attempt).await).await;
        done.map_err(|error: Error| error.report().to_string())
    }

    /// Charges on one connection, so that nothing delays the charge after the order.
    async fn ordered(&self, key: &str, port: u16) -> Result<Outcome<String>, String> {
        let (alice, request) = (IdempotencyKey::new("alice", key), Fingerprint::of([key]));
        let charge = async || {
            let mut provider = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await?);
            provider.write_all(b"ready\n").await?;
            provider.read_line(&mut String::new()).await?;
            provider.write_all(b"effect\n").await
        };
        let done = self.payments.run_leased(&alice, &request, async |_| {
            charge().await.map_err(|error| Error::from(sqlx::Error::Io(error)))?;
            Ok("charged".to_owned())
        });
        done.await.map_err(|error: Error| error.report().to_string())
    }

    async fn resume(&self) -> Result<(u64, u64), String> {
        let resumed = self.payments.resume(async |attempt: &Attempt| self.charge(attempt).await).await;
        resumed.map(|resumed| (resumed.done, resumed.failed)).map_err(|error: Error| error.report().to_string())
    }

    /// Charges at the provider, and stores the receipt with the result.
    async fn charge(&self, attempt: &Attempt) -> Result<String, Error> {
        let port = self.provider.expect("the port of the provider");
        let receipt: String = attempt
            .step("charge", async || {
                let answer = ask(port, &attempt.provider_key("charge")).await;
                answer.map_err(|error| Error::from(sqlx::Error::Io(error)))
            })
            .await?;
        let write = format!("INSERT INTO charge (request_key, receipt) VALUES ('{}', '{receipt}')", attempt.key());
        on_pool!(&self.pool, pool => {
            let mut tx = pool.begin().await?;
            sqlx::raw_sql(AssertSqlSafe(write)).execute(&mut *tx).await?;
            attempt.complete_in(&mut tx, &receipt).await?;
            tx.commit().await?;
        });
        Ok(receipt)
    }
}

async fn ask(port: u16, key: &str) -> std::io::Result<String> {
    let mut provider = BufReader::new(TcpStream::connect(("127.0.0.1", port)).await?);
    provider.write_all(format!("{key}\n").as_bytes()).await?;
    provider.lines().next_line().await?.ok_or_else(|| std::io::ErrorKind::UnexpectedEof.into())
}

/// The receipts by key, and the number of requests.
#[derive(Default)]
struct Ledger {
    receipts: BTreeMap<String, String>,
    asked: u64,
}

async fn provide() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let ledger = Arc::new(Mutex::new(Ledger::default()));
    let (holding, held) = watch::channel(false);
    say(&listener.local_addr().expect("an address").port().to_string());
    let commands = Arc::clone(&ledger);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            match line.expect("commands are text").as_str() {
                "hold" => say(if holding.send(true).is_ok() { "held" } else { "?" }),
                "go" => say(if holding.send(false).is_ok() { "gone" } else { "?" }),
                _ => {
                    let ledger = commands.lock().expect("nobody panics with it");
                    say(&format!("{} {}", ledger.receipts.len(), ledger.asked));
                }
            }
        }
    });
    loop {
        let (client, _) = listener.accept().await.expect("a client");
        let (ledger, mut held) = (Arc::clone(&ledger), held.clone());
        tokio::spawn(async move {
            let mut client = BufReader::new(client);
            let mut key = String::new();
            if !matches!(client.read_line(&mut key).await, Ok(1..)) {
                return;
            }
            let receipt = {
                let mut ledger = ledger.lock().expect("nobody panics with it");
                ledger.asked += 1;
                let new = || uuid::Uuid::new_v4().simple().to_string();
                ledger.receipts.entry(key).or_insert_with(new).clone()
            };
            tokio::time::sleep(Duration::from_millis(3)).await;
            let _ = held.wait_for(|held| !held).await;
            let _ = client.write_all(format!("{receipt}\n").as_bytes()).await;
        });
    }
}
