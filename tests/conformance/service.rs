//! The example `service`, as a process: scraped under load and under a fault, and ended by SIGTERM.

use std::io;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use sqlx::{Pool, Transaction};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

use super::examples::example;
use super::network::behind_a_reading_proxy;
use crate::support::proxy::{Direction, Proxy};
use crate::support::{Database, TestDatabase, empty, soon};
use crate::{DATABASE, Sql};

struct Service {
    process: Child,
    address: String,
}

/// A request of which the head was sent, and not yet the body.
struct Upload {
    stream: TcpStream,
    body: &'static str,
}

impl Service {
    async fn start(url: &str) -> Self {
        let mut process = Command::new(example("service"))
            .env("DATABASE_URL", url)
            .env("ADDRESS", "127.0.0.1:0")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the example starts");
        let mut lines = BufReader::new(process.stdout.as_mut().expect("a pipe")).lines();
        let line = soon("the start", lines.next_line()).await.expect("text").expect("a line");
        let address = line.strip_prefix("listening on ").expect("an address").to_owned();
        Self { process, address }
    }

    /// Begins to store a document.
    async fn upload(&self, document: &str, body: &'static str) -> Upload {
        let mut stream = TcpStream::connect(&self.address).await.expect("connect");
        let head = format!(
            "PUT /documents/{document} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.expect("send");
        Upload { stream, body }
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).await.expect("connect");
        let head = format!("GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).await.expect("send");
        response(stream).await.expect("a response")
    }

    /// The value of a metric, if it is shown.
    async fn metric(&self, metric: &str) -> Option<f64> {
        let (status, text) = self.get("/metrics").await;
        assert_eq!(status, 200);
        let value = text.lines().find_map(|line| line.strip_prefix(metric)?.strip_prefix(' '));
        value.map(|value| value.parse().expect("a number"))
    }

    async fn metric_reaches(&self, metric: &str, value: f64) {
        soon(metric, async {
            while self.metric(metric).await.is_none_or(|now| now < value) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
    }

    async fn health_becomes(&self, status: u16) -> String {
        soon("the health", async {
            loop {
                let (now, body) = self.get("/healthz").await;
                if now == status {
                    return body;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
    }
}

impl Upload {
    async fn finish(mut self) -> (u16, String) {
        self.stream.write_all(self.body.as_bytes()).await.expect("send");
        self.response().await
    }

    async fn response(self) -> (u16, String) {
        soon("a response", response(self.stream)).await.expect("a response")
    }
}

/// Reads a response to its end: its status and its body.
async fn response(mut stream: TcpStream) -> io::Result<(u16, String)> {
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or(io::ErrorKind::UnexpectedEof)?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.ok_or(io::ErrorKind::InvalidData)?, body.to_owned()))
}

/// A path to the database that can be blocked: a proxy, or on SQLite the only writer.
struct Way {
    url: String,
    proxy: Option<Proxy>,
    writer: Pool<Sql>,
    writing: Option<Transaction<'static, Sql>>,
}

impl Way {
    async fn to(db: &TestDatabase) -> Self {
        let (proxy, url) = match DATABASE {
            Database::Sqlite => (None, db.url.clone()),
            _ => {
                let (proxy, url) = behind_a_reading_proxy(&db.url);
                (Some(proxy), url)
            }
        };
        Self { url, proxy, writer: db.pool_of(1).await, writing: None }
    }

    async fn block(&mut self) {
        match &self.proxy {
            Some(proxy) => proxy.blackhole(Direction::Both),
            None => self.writing = Some(self.writer.begin_with("BEGIN IMMEDIATE").await.expect("begin")),
        }
    }

    async fn open(&mut self) {
        match self.writing.take() {
            Some(writing) => writing.rollback().await.expect("rollback"),
            None => self.proxy.iter().for_each(Proxy::pass),
        }
    }
}

#[tokio::test]
async fn service_shows_load_and_faults_and_drains() {
    let db = empty().await;
    let mut way = Way::to(&db).await;
    let mut service = Service::start(&way.url).await;
    service.metric_reaches("sqlock_hold_seconds_count{name=\"report\"}", 1.0).await;
    let idle = service.health_becomes(200).await;
    assert!(idle.contains("\"heartbeat\":\"idle\""), "{idle}");

    // Load: four versions of each of five documents.
    let mut uploads = JoinSet::new();
    for i in 0..20 {
        let upload = service.upload(&format!("load-{}", i % 5), "text").await;
        uploads.spawn(upload.finish());
    }
    for (status, body) in uploads.join_all().await {
        assert_eq!((status, body.as_str()), (200, "stored 4 bytes\n"));
    }
    let acquired = "sqlock_acquire_total{kind=\"exclusive\",outcome=\"acquired\",name=\"document\"}";
    assert_eq!(service.metric(acquired).await, Some(20.0));
    assert_eq!(service.metric("sqlock_held{name=\"document\"}").await, Some(0.0));
    assert_eq!(service.metric("sqlock_hold_seconds_count{name=\"document\"}").await, Some(20.0));
    let bucket = "sqlock_wait_seconds_bucket{kind=\"exclusive\",name=\"document\",le=\"+Inf\"}";
    assert_eq!(service.metric(bucket).await, Some(20.0), "the dashboard needs buckets");

    // A fault: the heartbeat of a held lease stays without an answer.
    let holder = service.upload("plan", "four").await;
    service.metric_reaches("sqlock_held{name=\"document\"}", 1.0).await;
    way.block().await;
    let sick = service.health_becomes(503).await;
    assert!(sick.contains("\"heartbeat\":\"late\""), "{sick}");
    service.metric_reaches("sqlock_heartbeat_late_total", 1.0).await;
    way.open().await;
    service.health_becomes(200).await;

    // The end: holders finish, waiters are refused.
    let waiter = service.upload("plan", "more").await;
    service.metric_reaches("sqlock_waiting{name=\"document\"}", 1.0).await;
    let pid = service.process.id().and_then(|pid| Pid::from_raw(pid.cast_signed())).expect("it runs");
    kill_process(pid, Signal::TERM).expect("signal");
    let (status, body) = waiter.response().await;
    assert_eq!(status, 503, "{body}");
    assert_eq!(holder.finish().await, (200, "stored 4 bytes\n".into()), "what is held finishes");
    let status = soon("the end", service.process.wait()).await.expect("a status");
    assert!(status.success(), "{status}");
    let lease = db.locks().await.lease("document/plan").try_acquire().await.expect("try");
    assert!(lease.is_some(), "the service has released it");
}
