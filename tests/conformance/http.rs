//! Requests over HTTP that take effect once: through a real server, with a real client, row by row
//! of the table that the documentation of `sqlock::idempotency::http` has.

mod late_start;
mod layers;
mod leased;
mod rules;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Extension, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::middleware::Next;
use axum::response::{AppendHeaders, IntoResponse, Response};
use axum::{Router, routing::post};
use sqlock::idempotency::http::{IdempotencyLayer, Idempotent};
use sqlock::idempotency::{AfterRetention, Attempt, Fingerprint, Idempotency, IdempotencyKey, RecordState, Resolution};
use sqlock::retry::Retry;
use sqlock::row::RowError;
use sqlock::version::Versioned;
use sqlock::{Error, Locks};
use sqlx::{Pool, Transaction};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::timeout;
use tracing::Level;

use super::fence::{Counters, add_one, counters, run};
use super::idempotency::refuse_results;
use super::network::behind_a_proxy;
use crate::support::blocked::block_past;
use crate::support::log::Log;
use crate::support::{Database, SOON, TestDatabase, builder, soon};
use crate::{DATABASE, Sql};

/// An error of an application.
#[derive(Debug, thiserror::Error)]
enum AppError {
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Lock(#[from] Error),
    #[error("declined")]
    Declined,
    #[error("nobody knows")]
    Timeout,
    #[error("somewhere else")]
    Elsewhere,
}

impl IntoResponse for AppError {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Lock(Error::Conflict { .. }) => StatusCode::CONFLICT,
            Self::Declined => StatusCode::PAYMENT_REQUIRED,
            Self::Timeout => StatusCode::BAD_GATEWAY,
            Self::Elsewhere => StatusCode::SEE_OTHER,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, self.to_string()).into_response()
    }
}

/// A value that JSON cannot represent.
fn unwritable() -> BTreeMap<(u8, u8), ()> {
    BTreeMap::from([((0, 0), ())])
}

/// The state of the handlers of one process.
#[derive(Clone)]
struct AppState {
    pool: Pool<Sql>,
    /// The number of begun runs of the work.
    begun: Arc<AtomicU32>,
    inside: Arc<Notify>,
    go_on: Arc<Notify>,
    /// The keys with which the provider was called, each with the number of the attempt.
    provider: Arc<Mutex<Vec<(String, u32)>>>,
    /// How often work was polled that blocks its thread.
    polls: Arc<AtomicU32>,
}

impl AppState {
    /// Works in a transaction, depending on the path.
    async fn work(&self, tx: &mut Transaction<'_, Sql>, what: &str) -> Result<Response, AppError> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        add_one(tx, 1).await?;
        let count: i64 = sqlx::query_scalar("SELECT value FROM counter WHERE id = 1").fetch_one(&mut **tx).await?;
        match what {
            "outdated" => {
                Versioned::table("counter").version("value").update(&mut *tx, 1_i64, 99, |_| {}).await?;
            }
            "ignorant" => {
                let _ = sqlx::query("SELECT 1 / 0").execute(&mut **tx).await;
            }
            "dangling" => {
                sqlx::query("INSERT INTO visit (counter) VALUES (9)").execute(&mut **tx).await?;
            }
            _ => return self.answer(what, count).await,
        }
        Ok(count.to_string().into_response())
    }

    /// At a provider, under a lease.
    async fn call(&self, attempt: &Attempt, what: &str) -> Result<Response, AppError> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.provider.lock().expect("no panic").push((attempt.provider_key("charge"), attempt.number()));
        match what {
            "nothing" => attempt.forget().await?,
            "charge-declined" => attempt.step("charge", async || Err(AppError::Declined)).await?,
            "charge-unsaved" => {
                attempt.step("charge", async || Ok::<_, Error>(unwritable())).await.expect_err("no JSON");
                return Err(AppError::Declined);
            }
            "charge-dropped" => {
                let charge = attempt.step("charge", std::future::pending::<Result<(), Error>>);
                timeout(Duration::from_millis(10), charge).await.expect_err("it has no end");
                return Err(AppError::Declined);
            }
            "incomplete" => {
                attempt.complete(&unwritable()).await.expect_err("no JSON");
                return Err(AppError::Declined);
            }
            "block" => {
                block_past(|| attempt.lease().remaining(), &self.polls).await;
                return Ok("charged late".into_response());
            }
            "block-in-body" => {
                let (remaining, polls) = (attempt.lease().remaining(), Arc::clone(&self.polls));
                let work = async move { block_past(|| remaining, &polls).await };
                return Ok(Body::new(Late(Some(Box::pin(work)))).into_response());
            }
            _ => {}
        }
        self.answer(what, attempt.number().into()).await
    }

    async fn answer(&self, what: &str, count: i64) -> Result<Response, AppError> {
        let receipt = format!("receipt {count}");
        Ok(match what {
            "receipt" => {
                let headers = AppendHeaders([
                    ("content-type", "text/plain; charset=utf-8"),
                    ("link", "</b>; rel=next"),
                    ("location", "/charges/1"),
                    ("www-authenticate", "Bearer"),
                    ("set-cookie", "session=secret"),
                    ("link", "</a>; rel=prev"),
                    ("x-internal", "7"),
                    ("x-kept", "8"),
                ]);
                (StatusCode::CREATED, headers, receipt).into_response()
            }
            "picture" => {
                let title = HeaderValue::from_bytes(b"title=\"\xe9\"").expect("a header's value");
                ([("link", title)], vec![0xff, 0x00, b'"', 0xfe]).into_response()
            }
            "wait" => {
                self.inside.notify_one();
                self.go_on.notified().await;
                receipt.into_response()
            }
            "wait-once" if self.begun.load(Ordering::Relaxed) == 1 => {
                self.inside.notify_one();
                self.go_on.notified().await;
                receipt.into_response()
            }
            "wait-once" => receipt.into_response(),
            "large" => "x".repeat(1001).into_response(),
            "chunked" => Body::new(Chunked(vec![Ok(Bytes::from(receipt))])).into_response(),
            "endless" => Body::new(Chunked(vec![Ok(Bytes::from(vec![b'x'; 600])); 3])).into_response(),
            "stream" => Body::new(Chunked(vec![Err("broken off"), Ok(Bytes::from(receipt))])).into_response(),
            "teapot" | "nothing" => (StatusCode::IM_A_TEAPOT, receipt).into_response(),
            "declined" => return Err(AppError::Declined),
            "elsewhere" => return Err(AppError::Elsewhere),
            "timeout" => return Err(AppError::Timeout),
            status if status.starts_with(|c: char| c.is_ascii_digit()) => {
                let status = status.parse::<u16>().expect("a number");
                (StatusCode::from_u16(status).expect("a status"), receipt).into_response()
            }
            "conflict" => {
                return Err(Error::Row { table: "counter".into(), cause: RowError::StaleSnapshot }.into());
            }
            other => panic!("{other}?"),
        })
    }
}

/// A body whose length is not known before it is read, the last piece first.
struct Chunked(Vec<Result<Bytes, &'static str>>);

impl axum::body::HttpBody for Chunked {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.0.pop().map(|piece| piece.map(http_body::Frame::data)))
    }
}

/// A body whose bytes come when this work is done.
struct Late(Option<Pin<Box<dyn Future<Output = ()> + Send>>>);

impl axum::body::HttpBody for Late {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        let Some(work) = &mut self.0 else {
            return Poll::Ready(None);
        };
        std::task::ready!(work.as_mut().poll(context));
        self.0 = None;
        Poll::Ready(Some(Ok(http_body::Frame::data("charged late".into()))))
    }
}

async fn charge(
    State(state): State<AppState>,
    Path(what): Path<String>,
    idempotent: Idempotent,
    _body: String,
) -> Response {
    idempotent.run(&state.pool, async |tx| state.work(tx, &what).await).await
}

async fn maybe(State(state): State<AppState>, Path(what): Path<String>, idempotent: Option<Idempotent>) -> Response {
    match idempotent {
        Some(idempotent) => idempotent.run(&state.pool, async |tx| state.work(tx, &what).await).await,
        None => "without a key".into_response(),
    }
}

async fn provider(State(state): State<AppState>, Path(what): Path<String>, idempotent: Idempotent) -> Response {
    idempotent.run_leased(async |attempt| state.call(attempt, &what).await).await
}

async fn layered(
    State(state): State<AppState>,
    Path(what): Path<String>,
    Extension(attempt): Extension<Arc<Attempt>>,
) -> Result<Response, AppError> {
    state.call(&attempt, &what).await
}

async fn echo(body: String) -> String {
    body
}

/// A process of the application.
struct Server {
    state: AppState,
    payments: Idempotency,
    address: SocketAddr,
    task: AbortHandle,
    _locks: Locks,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Returns the sender named by a header: tests need no passwords.
fn user(parts: &Parts) -> Option<String> {
    Some(parts.headers.get("x-user")?.to_str().ok()?.to_owned())
}

fn usual(payments: Idempotency) -> IdempotencyLayer {
    IdempotencyLayer::new(payments, user).required().response_limit(1000).request_limit(100)
}

fn routes(payments: &Idempotency, layer: impl Fn(Idempotency) -> IdempotencyLayer) -> Router<AppState> {
    let nested = Router::new().route("/charge/{what}", post(charge)).layer(layer(payments.clone()));
    Router::new()
        .route("/charge/{what}", post(charge).patch(charge).put(charge))
        .route("/maybe/{what}", post(maybe).get(maybe))
        .route("/provider/{what}", post(provider))
        .route("/echo", post(echo))
        .layer(layer(payments.clone()))
        .merge(Router::new().route("/layered/{what}", post(layered)).layer(layer(payments.clone()).leased()))
        .merge(Router::new().route("/twice/{what}", post(charge)).layer(layer(payments.clone()).leased()))
        .route("/bare/{what}", post(charge))
        .nest("/one", nested.clone())
        .nest("/two", nested)
}

impl Server {
    async fn on(db: &TestDatabase, layer: impl Fn(Idempotency) -> IdempotencyLayer) -> Self {
        Self::with(db.locks().await, db.pool().await, layer).await
    }

    async fn with(locks: Locks, pool: Pool<Sql>, layer: impl Fn(Idempotency) -> IdempotencyLayer) -> Self {
        Self::routed(locks, pool, |payments| routes(&payments, layer)).await
    }

    async fn routed(locks: Locks, pool: Pool<Sql>, routes: impl FnOnce(Idempotency) -> Router<AppState>) -> Self {
        // The leases are short, to bound the wait for a lease that is released in the background.
        let payments = Idempotency::new(&locks).namespace("payments").lease(Duration::from_secs(5));
        let state = AppState {
            pool,
            begun: Arc::default(),
            inside: Arc::default(),
            go_on: Arc::default(),
            provider: Arc::default(),
            polls: Arc::default(),
        };
        let router = routes(payments.clone()).with_state(state.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("its address");
        let task = tokio::spawn(async move { axum::serve(listener, router).await.expect("it serves") }).abort_handle();
        Self { state, payments, address, task, _locks: locks }
    }

    /// The number of begun runs of the work.
    fn begun(&self) -> u32 {
        self.state.begun.load(Ordering::Relaxed)
    }

    async fn post(&self, path: &str, key: &str) -> TestResponse {
        self.post_as("alice", path, key, "500").await
    }

    async fn post_as(&self, user: &str, path: &str, key: &str, body: &str) -> TestResponse {
        self.send("POST", path, &[("X-User", user), ("Idempotency-Key", key)], body).await
    }

    async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> TestResponse {
        let mut connection = self.begin(method, path, headers, body).await;
        read_response(&mut connection).await
    }

    /// Sends a request, and does not wait for the response.
    async fn begin(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> TcpStream {
        let mut head = format!("{method} {path} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n");
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !headers.iter().any(|(name, _)| *name == "Content-Length" || *name == "Transfer-Encoding") {
            head.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        let mut connection = TcpStream::connect(self.address).await.expect("the server listens");
        connection.write_all(format!("{head}\r\n{body}").as_bytes()).await.expect("it reads");
        connection
    }
}

/// The answer to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
struct TestResponse {
    status: u16,
    headers: Vec<(String, Vec<u8>)>,
    body: Vec<u8>,
}

async fn read_response(connection: &mut TcpStream) -> TestResponse {
    let mut all = Vec::new();
    soon("the response", connection.read_to_end(&mut all)).await.expect("a response");
    let end = all.windows(4).position(|window| window == b"\r\n\r\n").expect("the end of the head");
    let mut lines = all[..end].split(|&byte| byte == b'\n').map(|line| line.trim_ascii());
    let status = lines.next().expect("a status line");
    let status = std::str::from_utf8(&status[9..12]).expect("text").parse().expect("a status");
    let headers = lines.map(|line| {
        let colon = line.iter().position(|&byte| byte == b':').expect("a header");
        (String::from_utf8_lossy(&line[..colon]).to_lowercase(), line[colon + 1..].trim_ascii().to_vec())
    });
    TestResponse { status, headers: headers.collect(), body: all[end + 4..].to_vec() }
}

impl TestResponse {
    fn all(&self, name: &str) -> Vec<&[u8]> {
        self.headers.iter().filter(|(n, _)| n == name).map(|(_, value)| value.as_slice()).collect()
    }

    fn header(&self, name: &str) -> Option<&str> {
        Some(std::str::from_utf8(self.all(name).first()?).expect("text"))
    }

    fn is_replay(&self) -> bool {
        self.header("idempotent-replayed") == Some("true")
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// Returns the parts in which a replay equals the first response.
    fn replayed_parts(&self, names: &[&str]) -> (u16, Vec<u8>, Vec<Vec<&[u8]>>) {
        (self.status, self.body.clone(), names.iter().map(|name| self.all(name)).collect())
    }

    /// Checks that the answer is this problem.
    #[track_caller]
    fn is(&self, status: u16, slug: &str) {
        assert_eq!(self.status, status, "{slug}: {}", self.text());
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        let problem: serde_json::Value = serde_json::from_slice(&self.body).expect("JSON");
        assert_eq!(problem["type"], format!("https://docs.rs/sqlock/latest/sqlock/idempotency/http/index.html#{slug}"));
        assert_eq!(problem["status"], status);
        for text in ["title", "detail"] {
            assert!(problem[text].as_str().is_some_and(|text| !text.is_empty()), "{problem}");
        }
        assert!(!self.is_replay());
        let again = match slug {
            "in-progress" | "conflict" => Some("1"),
            "store-unavailable" => Some("5"),
            "outcome-unknown" => Some("30"),
            _ => None,
        };
        assert_eq!(self.header("retry-after"), again, "{slug}");
    }
}

async fn shop() -> (Counters, Server) {
    shop_with(usual).await
}

async fn shop_with(layer: impl Fn(Idempotency) -> IdempotencyLayer) -> (Counters, Server) {
    let counters = counters().await;
    let server = Server::on(&counters.db, layer).await;
    (counters, server)
}

fn alice(key: &str) -> IdempotencyKey {
    IdempotencyKey::new("alice", key)
}

async fn is_new(server: &Server, key: &str) -> bool {
    server.payments.inspect(&alice(key)).await.expect("inspect").is_none()
}

#[tokio::test]
async fn replay_has_listed_headers_and_no_cookies() {
    let kept = |payments| {
        usual(payments)
            .keep_header(HeaderName::from_static("x-kept"))
            .keep_header(HeaderName::from_static("set-cookie"))
    };
    let (counters, server) = shop_with(kept).await;
    let listed = ["content-type", "link", "location", "www-authenticate", "x-kept"];
    let first = server.post("/charge/receipt", "a").await;
    assert_eq!((first.status, first.text().as_str()), (201, "receipt 1"));
    assert!(!first.is_replay());
    assert_eq!(first.header("set-cookie"), Some("session=secret"));
    assert_eq!(first.header("x-internal"), Some("7"));
    assert_eq!(first.all("link"), [b"</b>; rel=next", b"</a>; rel=prev"]);
    // Also by another process.
    for server in [&server, &Server::on(&counters.db, kept).await] {
        let replay = server.post("/charge/receipt", "a").await;
        assert!(replay.is_replay());
        assert_eq!(replay.replayed_parts(&listed), first.replayed_parts(&listed));
        assert_eq!(replay.header("set-cookie"), None);
        assert_eq!(replay.header("x-internal"), None);
    }
    let first = server.post("/charge/picture", "b").await;
    let replay = server.post("/charge/picture", "b").await;
    assert_eq!(first.body, [0xff, 0x00, b'"', 0xfe]);
    assert_eq!(first.all("link"), [b"title=\"\xe9\""]);
    assert_eq!((first.is_replay(), replay.is_replay()), (false, true));
    assert_eq!(replay.replayed_parts(&listed), first.replayed_parts(&listed));
    assert_eq!(counters.value(1).await, 2);
}

#[tokio::test]
async fn quoted_and_bare_keys_are_the_same_key() {
    let (counters, server) = shop().await;
    assert!(!server.post("/charge/receipt", r#""k-1""#).await.is_replay());
    assert!(server.post("/charge/receipt", "k-1").await.is_replay());
    assert!(!server.post("/charge/receipt", r"k\1").await.is_replay());
    assert!(server.post("/charge/receipt", r#""k\\1""#).await.is_replay());
    assert!(server.post("/charge/receipt", r#""k-1";v=1; by="app""#).await.is_replay());
    assert_eq!(counters.value(1).await, 2);
}

#[tokio::test]
async fn invalid_request_does_not_reach_the_handler() {
    let (counters, server) = shop().await;
    let path = "/charge/receipt";
    for method in ["POST", "PATCH"] {
        server.send(method, path, &[("X-User", "alice")], "500").await.is(400, "key-missing");
    }
    for key in ["", "a b", "a,b", "\"a", "\"a\"v=1", "á", &"k".repeat(256)] {
        server.post(path, key).await.is(400, "key-malformed");
    }
    let two = [("X-User", "alice"), ("Idempotency-Key", "a"), ("Idempotency-Key", "a")];
    server.send("POST", path, &two, "500").await.is(400, "key-malformed");
    server.send("POST", path, &[("Idempotency-Key", "a")], "500").await.is(401, "principal-missing");
    assert_eq!(server.begun(), 0);
    assert_eq!(server.payments.records(10).await.expect("records"), []);
    assert_eq!(server.post(path, &"k".repeat(255)).await.status, 201);
    assert_eq!(counters.value(1).await, 1);
}

#[tokio::test]
async fn request_without_key_passes_unless_required() {
    let (counters, server) = shop_with(|payments| IdempotencyLayer::new(payments, user)).await;
    let nothing = [("X-User", "alice")];
    assert_eq!(server.send("POST", "/maybe/receipt", &nothing, "").await.text(), "without a key");
    assert_eq!(server.send("POST", "/echo", &nothing, "500").await.text(), "500");
    // The handler requires a key.
    server.send("POST", "/charge/receipt", &nothing, "").await.is(400, "key-missing");
    let malformed = [("Idempotency-Key", "a b")];
    assert_eq!(server.send("GET", "/maybe/receipt", &malformed, "").await.text(), "without a key");
    server.send("PUT", "/charge/receipt", &malformed, "").await.is(400, "key-missing");
    assert_eq!(server.begun(), 0);
    assert_eq!(server.post("/maybe/receipt", "a").await.text(), "receipt 1");
    assert!(server.post("/maybe/receipt", "a").await.is_replay());
    // A handler without the extractor receives the same body, and nothing is claimed.
    assert_eq!(server.post("/echo", "b").await.text(), "500");
    assert!(is_new(&server, "b").await);
    // Without a layer, or inside a leased layer, running the effect would not be safe.
    server.post("/bare/receipt", "c").await.is(500, "not-set-up");
    server.post("/twice/receipt", "d").await.is(500, "not-set-up");
    assert_eq!(counters.value(1).await, 1);
}

#[tokio::test]
async fn key_of_another_request_is_422() {
    let (counters, server) = shop().await;
    assert_eq!(server.post("/charge/receipt", "a").await.status, 201);
    server.post_as("alice", "/charge/receipt", "a", "501").await.is(422, "key-reused");
    server.post("/charge/receipt?x=1", "a").await.is(422, "key-reused");
    server.post("/charge/picture", "a").await.is(422, "key-reused");
    let headers = [("X-User", "alice"), ("Idempotency-Key", "a")];
    server.send("PATCH", "/charge/receipt", &headers, "500").await.is(422, "key-reused");

    let headers = [("X-User", "alice"), ("Idempotency-Key", "b")];
    let mut first = server.begin("POST", "/charge/wait", &headers, "500").await;
    soon("the first one", server.state.inside.notified()).await;
    server.post("/charge/wait", "b").await.is(409, "in-progress");
    let mut another = server.begin("POST", "/charge/wait", &headers, "501").await;
    if DATABASE == Database::Sqlite {
        // SQLite has one writer, for which the request waits.
        server.state.go_on.notify_one();
        read_response(&mut another).await.is(422, "key-reused");
    } else {
        read_response(&mut another).await.is(422, "key-reused");
        let other = Server::on(&counters.db, usual).await;
        other.post("/charge/wait", "b").await.is(409, "in-progress");
        other.post_as("alice", "/charge/wait", "b", "501").await.is(422, "key-reused");
        server.state.go_on.notify_one();
    }
    assert_eq!(read_response(&mut first).await.text(), "receipt 2");
    let replay = server.post("/charge/wait", "b").await;
    assert_eq!((replay.is_replay(), replay.text().as_str()), (true, "receipt 2"));
    assert_eq!(counters.value(1).await, 2);
}

#[tokio::test]
async fn principals_have_separate_keys() {
    let (counters, server) = shop().await;
    assert_eq!(server.post_as("alice", "/charge/receipt", "a", "500").await.text(), "receipt 1");
    let bobs = server.post_as("bob", "/charge/receipt", "a", "501").await;
    assert_eq!((bobs.is_replay(), bobs.text().as_str()), (false, "receipt 2"));
    assert_eq!(server.post_as("alice", "/charge/receipt", "a", "500").await.text(), "receipt 1");
    assert_eq!(counters.value(1).await, 2);

    let events = Server::on(&counters.db, |events| IdempotencyLayer::global(events.namespace("events"))).await;
    assert!(!events.post_as("alice", "/charge/receipt", "a", "500").await.is_replay());
    assert!(events.post_as("bob", "/charge/receipt", "a", "500").await.is_replay());
}

#[tokio::test]
async fn oversized_request_is_413_and_claims_nothing() {
    let (counters, server) = shop().await;
    let headers = [("X-User", "alice"), ("Idempotency-Key", "a")];
    let with = |header| [headers[0], headers[1], header];
    // The server does not wait for the body, of which no byte is sent.
    let declared = with(("Content-Length", "101"));
    server.send("POST", "/charge/receipt", &declared, "").await.is(413, "request-too-large");
    let chunked = with(("Transfer-Encoding", "chunked"));
    let (long, right) = (format!("65\r\n{}", "x".repeat(101)), format!("64\r\n{}\r\n0\r\n\r\n", "x".repeat(100)));
    server.send("POST", "/charge/receipt", &chunked, &long).await.is(413, "request-too-large");
    assert!(is_new(&server, "a").await);
    assert_eq!(server.begun(), 0);
    assert_eq!(server.send("POST", "/charge/receipt", &chunked, &right).await.status, 201);
    // The announced length is not part of the request.
    assert!(server.post_as("alice", "/charge/receipt", "a", &"x".repeat(100)).await.is_replay());
    assert_eq!(counters.value(1).await, 1);
}

#[tokio::test]
async fn failed_or_unstorable_answer_undoes_the_effect() {
    let (counters, server) = shop().await;
    server.post("/charge/large", "a").await.is(500, "response-too-large");
    server.post("/charge/endless", "a").await.is(500, "response-too-large");
    server.post("/charge/stream", "b").await.is(500, "response-not-storable");
    for (path, status) in [("/charge/declined", 402), ("/charge/teapot", 418)] {
        for _ in 0..2 {
            let failed = server.post(path, "c").await;
            assert_eq!((failed.status, failed.is_replay()), (status, false));
        }
    }
    assert_eq!(server.begun(), 7);
    assert_eq!(counters.value(1).await, 0);
    for key in ["a", "b", "c"] {
        assert!(is_new(&server, key).await, "{key}");
    }
    assert_eq!(server.post("/charge/receipt", "c").await.text(), "receipt 1");
}

#[tokio::test]
async fn concurrent_changes_without_end_are_503() {
    let thrice = |payments: Idempotency| usual(payments.retry(Retry::new().attempts(3)));
    let (counters, server) = shop_with(thrice).await;
    server.post("/charge/conflict", "a").await.is(503, "conflict");
    assert_eq!(server.begun(), 3, "as often as the retry says");
    assert_eq!(counters.value(1).await, 0);
    assert!(is_new(&server, "a").await);
}

/// The client may have sent the version.
#[tokio::test]
async fn version_conflict_is_answered_by_the_handler() {
    let twice = |payments: Idempotency| usual(payments.retry(Retry::new().attempts(2)));
    let (counters, server) = shop_with(twice).await;
    let reply = server.post("/charge/outdated", "a").await;
    assert_eq!((reply.status, reply.is_replay()), (409, false));
    assert_eq!(reply.text(), "a row of counter has changed: expected version 99, found version 1");
    assert_eq!((server.begun(), counters.value(1).await), (2, 0));
    assert!(is_new(&server, "a").await);
}

/// PostgreSQL refuses every further statement of the transaction.
#[tokio::test]
async fn handler_that_ignores_a_failed_statement_is_500() {
    if DATABASE != Database::Postgres {
        return;
    }
    let (counters, server) = shop().await;
    for _ in 0..2 {
        server.post("/charge/ignorant", "a").await.is(500, "not-set-up");
        assert!(is_new(&server, "a").await);
    }
    assert_eq!((server.begun(), counters.value(1).await), (2, 0));
}

#[tokio::test]
async fn commit_refused_by_a_constraint_is_500() {
    if DATABASE.is_mysql() {
        return; // It has no deferred constraints.
    }
    let (counters, server) = shop().await;
    run(
        &counters.pool,
        "CREATE TABLE visit (counter INTEGER NOT NULL REFERENCES counter (id) DEFERRABLE INITIALLY DEFERRED)",
    )
    .await;
    for _ in 0..2 {
        server.post("/charge/dangling", "a").await.is(500, "not-set-up");
        assert!(is_new(&server, "a").await);
    }
    assert_eq!((server.begun(), counters.value(1).await), (2, 0));
}

#[tokio::test]
async fn without_the_store_nothing_runs() {
    let counters = counters().await;
    let (proxy, server) = if DATABASE == Database::Sqlite {
        let server = Server::on(&counters.db, usual).await;
        run(&counters.pool, "DROP TABLE sqlock_idem").await;
        (None, server)
    } else {
        let (proxy, url) = behind_a_proxy(&counters.db.url);
        let options = sqlx::pool::PoolOptions::<Sql>::new().acquire_timeout(Duration::from_secs(3));
        let pool = options.connect_lazy(&url).expect("a pool");
        // The first connection may take longer on a machine under load.
        soon("a connection", async { while pool.acquire().await.is_err() {} }).await;
        let server = Server::with(builder(pool.clone()).build(), pool, usual).await;
        assert_eq!(server.post("/charge/receipt", "before").await.status, 201);
        proxy.refuse();
        (Some(proxy), server)
    };
    let before = server.begun();
    let (in_transaction, leased, layered) = tokio::join!(
        server.post("/charge/receipt", "a"),
        server.post("/provider/receipt", "b"),
        server.post("/layered/receipt", "c"),
    );
    in_transaction.is(503, "store-unavailable");
    leased.is(503, "store-unavailable");
    layered.is(503, "store-unavailable");
    assert_eq!(server.begun(), before);
    drop(proxy);
}

#[tokio::test]
async fn disconnected_client_leaves_the_key_new() {
    let (counters, server) = shop().await;
    let headers = [("X-User", "alice"), ("Idempotency-Key", "a")];
    let first = server.begin("POST", "/charge/wait-once", &headers, "500").await;
    soon("the first one", server.state.inside.notified()).await;
    drop(first);
    let answer = soon("the retry", until_not_in_progress(&server, "/charge/wait-once", "a")).await;
    assert_eq!((answer.is_replay(), answer.text().as_str()), (false, "receipt 1"));
    assert_eq!(server.begun(), 2);
    assert_eq!(counters.value(1).await, 1);
}

#[tokio::test]
async fn required_route_refuses_keys_on_other_methods() {
    let (counters, server) = shop().await;
    let with_key = [("X-User", "alice"), ("Idempotency-Key", "a")];
    for method in ["PUT", "DELETE"] {
        for key in ["a", "a b"] {
            let with_key = [("X-User", "alice"), ("Idempotency-Key", key)];
            server.send(method, "/charge/receipt", &with_key, "500").await.is(400, "key-not-supported");
        }
    }
    assert_eq!((server.begun(), counters.value(1).await), (0, 0));
    // A safe method does nothing that could be done twice.
    assert_eq!(server.send("GET", "/maybe/receipt", &with_key, "").await.text(), "without a key");
    server.send("PUT", "/charge/receipt", &[("X-User", "alice")], "500").await.is(400, "key-missing");
}

#[tokio::test]
async fn handler_ignoring_a_required_key_is_reported() {
    let (_books, server) = shop().await;
    server.post("/echo", "a").await.is(500, "not-set-up");
    // A handler that is not reached does not count as ignoring the key.
    assert_eq!(server.post("/nowhere", "b").await.status, 404);
    let (_books, optional) = shop_with(|payments| IdempotencyLayer::new(payments, user)).await;
    assert_eq!(optional.post("/echo", "a").await.text(), "500");
}

/// Notifies when it is dropped.
struct NotifyOnDrop(Arc<Notify>);

impl Drop for NotifyOnDrop {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

#[tokio::test]
async fn detached_request_ends_without_its_client() {
    for path in ["/charge/wait", "/provider/wait", "/layered/wait"] {
        let counters = counters().await;
        let dropped = Arc::new(Notify::new());
        // Outside of the detached part: the server drops this future when the client is gone.
        let notify = Arc::clone(&dropped);
        let outside = axum::middleware::from_fn(move |request: Request, next: Next| {
            let guard = NotifyOnDrop(Arc::clone(&notify));
            async move {
                let _guard = guard;
                next.run(request).await
            }
        });
        let server = Server::routed(counters.db.locks().await, counters.db.pool().await, |payments| {
            routes(&payments, |payments| usual(payments).detached()).layer(outside)
        })
        .await;
        let headers = [("X-User", "alice"), ("Idempotency-Key", "a")];
        let first = server.begin("POST", path, &headers, "500").await;
        soon("the first one", server.state.inside.notified()).await;
        drop(first);
        soon("the end of the connection", dropped.notified()).await;
        server.state.go_on.notify_one();
        let answer = soon("the answer", until_not_in_progress(&server, path, "a")).await;
        assert_eq!((answer.is_replay(), answer.text().as_str()), (true, "receipt 1"), "{path}");
        assert_eq!(server.begun(), 1, "{path}");
    }
}

/// Sends a request again as long as the response says so.
async fn until_not_in_progress(server: &Server, path: &str, key: &str) -> TestResponse {
    loop {
        let reply = server.post(path, key).await;
        if reply.status != 409 {
            return reply;
        }
        reply.is(409, "in-progress");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn repeated_request_continues_a_disconnected_attempt() {
    for path in ["/provider/wait-once", "/layered/wait-once"] {
        let (_books, server) = shop().await;
        let headers = [("X-User", "alice"), ("Idempotency-Key", "a")];
        let first = server.begin("POST", path, &headers, "500").await;
        soon("the first one", server.state.inside.notified()).await;
        server.post(path, "a").await.is(409, "in-progress");
        server.post_as("alice", path, "a", "501").await.is(422, "key-reused");
        drop(first);
        let answer = soon("the retry", until_not_in_progress(&server, path, "a")).await;
        assert_eq!((answer.is_replay(), answer.text().as_str()), (false, "receipt 2"));
        let calls = server.state.provider.lock().expect("no panic").clone();
        assert_eq!(calls.iter().map(|(_, number)| *number).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(calls[0].0, calls[1].0, "the provider can tell that it is the same charge");
    }
}

/// Nothing took effect, whatever the response.
#[tokio::test]
async fn error_with_success_status_is_not_stored() {
    let (counters, server) = shop().await;
    for _ in 0..2 {
        let reply = server.post("/charge/elsewhere", "k").await;
        assert_eq!((reply.status, reply.is_replay()), (303, false));
        assert!(is_new(&server, "k").await);
    }
    assert_eq!(counters.value(1).await, 0);
    assert_eq!(server.post("/charge/receipt", "k").await.status, 201);
}

#[tokio::test]
async fn issued_token_is_valid_once_for_its_principal() {
    let (counters, server) = shop_with(|payments| IdempotencyLayer::issued(payments, user)).await;
    let token = server.payments.issue("alice", Duration::from_secs(600)).await.expect("issue");
    server.post_as("bob", "/charge/receipt", &token, "500").await.is(422, "token-not-valid");
    server.post("/charge/receipt", "of-my-own").await.is(422, "token-not-valid");
    assert_eq!(server.post("/charge/declined", &token).await.status, 402);
    assert_eq!(server.post("/charge/receipt", &token).await.text(), "receipt 1");
    assert!(server.post("/charge/receipt", &token).await.is_replay());
    server.post_as("alice", "/charge/receipt", &token, "501").await.is(422, "key-reused");
    let token = server.payments.issue("alice", Duration::from_millis(1)).await.expect("issue");
    tokio::time::sleep(Duration::from_millis(20)).await;
    server.post("/charge/receipt", &token).await.is(422, "token-not-valid");
    assert_eq!(counters.value(1).await, 1);
}

#[tokio::test]
async fn expired_key_is_refused_when_configured() {
    let strict = |payments: Idempotency| usual(payments.after_retention(AfterRetention::Refuse));
    let (counters, server) = shop_with(strict).await;
    assert_eq!(server.post("/charge/receipt", "a").await.status, 201);
    run(&counters.pool, "UPDATE sqlock_idem SET expires_at = 1").await;
    server.post("/charge/receipt", "a").await.is(422, "key-expired");
    assert_eq!(server.begun(), 1);
}

#[tokio::test]
async fn stripe_v1_stores_failures_whose_effect_is_undone() {
    let stripe = |payments| IdempotencyLayer::stripe_v1(payments, user).response_limit(1000);
    let (counters, server) = shop_with(stripe).await;
    for (path, status) in [("/charge/declined", 402), ("/charge/timeout", 502), ("/charge/teapot", 418)] {
        let before = server.begun();
        let first = server.post(path, path).await;
        let replay = server.post(path, path).await;
        assert_eq!((first.status, first.is_replay(), replay.is_replay()), (status, false, true));
        assert_eq!(replay.replayed_parts(&["content-type"]), first.replayed_parts(&["content-type"]));
        server.post_as("alice", path, path, "501").await.is(400, "key-reused");
        assert_eq!(server.begun(), before + 1);
    }
    assert_eq!(counters.value(1).await, 0);
    server.post("/charge/conflict", "k").await.is(503, "conflict");
    assert_eq!(server.post("/charge/receipt", "k").await.status, 201);
    assert!(!server.post("/charge/receipt", "\"k\"").await.is_replay());
    assert!(server.post("/charge/receipt", "\"k\"").await.is_replay());
    assert_eq!(server.send("POST", "/echo", &[], "500").await.text(), "500");
    // PATCH is not among the methods.
    let headers = [("X-User", "alice"), ("Idempotency-Key", "k")];
    server.send("PATCH", "/charge/receipt", &headers, "500").await.is(400, "key-missing");
    assert_eq!(counters.value(1).await, 2);
}

#[tokio::test]
async fn fingerprint_of_requests_can_be_chosen() {
    let (counters, server) = shop_with(|payments| usual(payments).json()).await;
    let post =
        async |server: &Server, key: &str, body: &str| server.post_as("alice", "/charge/receipt", key, body).await;
    assert_eq!(post(&server, "a", r#"{"cents": 5, "to": "bob"}"#).await.status, 201);
    assert!(post(&server, "a", r#"{"to":"bob","cents":5}"#).await.is_replay());
    post(&server, "a", r#"{"to":"bob","cents":6}"#).await.is(422, "key-reused");
    assert_eq!(post(&server, "b", "no json {").await.status, 201);
    assert!(post(&server, "b", "no json {").await.is_replay());
    post(&server, "b", "no json  {").await.is(422, "key-reused");

    let layer = |payments| usual(payments).json_fields(["/cents"]).expect("a pointer");
    let fields = Server::on(&counters.db, layer).await;
    assert_eq!(post(&fields, "c", r#"{"cents": 5, "at": 1}"#).await.status, 201);
    assert!(post(&fields, "c", r#"{"cents": 5, "at": 2}"#).await.is_replay());
    post(&fields, "c", r#"{"cents": 6, "at": 2}"#).await.is(422, "key-reused");

    let own = |payments| usual(payments).fingerprint(|_, body| Fingerprint::of([&body[..1]]));
    let own = Server::on(&counters.db, own).await;
    assert_eq!(post(&own, "d", "5").await.status, 201);
    assert!(post(&own, "d", "55").await.is_replay());

    // The path is that of the client's request, wherever the handler is nested.
    assert_eq!(server.post("/one/charge/receipt", "e").await.status, 201);
    assert!(server.post("/one/charge/receipt", "e").await.is_replay());
    server.post("/two/charge/receipt", "e").await.is(422, "key-reused");
}

#[tokio::test]
async fn layer_refuses_fields_that_are_no_json_pointers() {
    let (_books, server) = shop().await;
    for pointer in ["cents", "cents/", "/a~2b", "/a~"] {
        let refused = usual(server.payments.clone()).json_fields(["/cents", pointer]);
        assert!(matches!(refused, Err(Error::InvalidKey { what: "JSON Pointer", .. })), "{pointer}");
    }
    assert!(usual(server.payments.clone()).json_fields(["", "/", "/a~0b~1c"]).is_ok());
}

#[tokio::test]
async fn host_and_headers_are_compared_where_asked() {
    let versioned = HeaderName::from_static("x-api-version");
    let layer = |payments| {
        let compared = usual(payments).compare_host().compare_header(versioned.clone());
        compared.compare_header(axum::http::header::CONTENT_TYPE)
    };
    let (counters, server) = shop_with(layer).await;
    let post = async |server: &Server, key: &str, more: &[(&str, &str)]| {
        let headers = [&[("X-User", "alice"), ("Idempotency-Key", key)], more].concat();
        server.send("POST", "/charge/receipt", &headers, "500").await
    };
    let head = [("X-Api-Version", "1"), ("Content-Type", "text/plain"), ("X-Trace", "1")];
    assert_eq!(post(&server, "a", &head).await.status, 201);
    assert!(post(&server, "a", &head[..2]).await.is_replay());
    assert_eq!(post(&server, "b", &[]).await.status, 201);
    for other in [
        &[("X-Api-Version", "2"), head[1]][..],
        &[head[0], ("Content-Type", "application/json")],
        &head[..1],
        &[head[0], head[0], head[1]],
        &[("X-Api-Version", ""), head[1]],
    ] {
        post(&server, "a", other).await.is(422, "key-reused");
    }
    post(&server, "b", &[("X-Api-Version", "")]).await.is(422, "key-reused");
    let to = async |server: &Server, host: &str| {
        let mut connection = TcpStream::connect(server.address).await.expect("the server listens");
        let request = format!(
            "POST /charge/receipt HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nX-User: alice\r\n\
             Idempotency-Key: c\r\nContent-Length: 1\r\n\r\n5"
        );
        connection.write_all(request.as_bytes()).await.expect("it reads");
        read_response(&mut connection).await
    };
    assert_eq!(to(&server, "shop.example").await.status, 201);
    assert!(to(&server, "Shop.Example").await.is_replay());
    to(&server, "other.example").await.is(422, "key-reused");
    // By default neither counts.
    let usual = Server::on(&counters.db, usual).await;
    assert_eq!(post(&usual, "d", &head).await.status, 201);
    assert!(post(&usual, "d", &[]).await.is_replay());
}

#[tokio::test]
async fn header_of_the_key_can_be_chosen() {
    let named = |payments| usual(payments).header(HeaderName::from_static("x-request-id"));
    let (_books, server) = shop_with(named).await;
    let send = async |method: &str, name: &str, key: &str| {
        server.send(method, "/charge/receipt", &[("X-User", "alice"), (name, key)], "500").await
    };
    assert_eq!(send("POST", "X-Request-Id", "a").await.status, 201);
    assert!(send("POST", "X-Request-Id", "\"a\"").await.is_replay());
    let missing = send("POST", "Idempotency-Key", "a").await;
    missing.is(400, "key-missing");
    assert!(
        missing.text().contains("x-request-id") && !missing.text().contains("Idempotency-Key"),
        "{}",
        missing.text()
    );
    send("POST", "X-Request-Id", "a b").await.is(400, "key-malformed");
    send("PUT", "X-Request-Id", "a").await.is(400, "key-not-supported");
    assert_eq!(server.begun(), 1);
}

#[tokio::test]
async fn fifty_clicks_charge_once_with_one_receipt() {
    let (counters, one) = shop().await;
    let servers = [Arc::new(one), Arc::new(Server::on(&counters.db, usual).await)];
    for path in ["/charge/receipt", "/provider/receipt"] {
        let mut clicks = JoinSet::new();
        for i in 0..50 {
            let server = Arc::clone(&servers[i % 2]);
            clicks.spawn(async move { until_not_in_progress(&server, path, path).await });
        }
        let reply = tokio::time::timeout(SOON * 2, clicks.join_all()).await.expect("a response to each");
        assert!(reply.iter().all(|reply| (reply.status, reply.text().as_str()) == (201, "receipt 1")), "{path}");
        assert_eq!(reply.iter().filter(|reply| !reply.is_replay()).count(), 1, "{path}");
    }
    assert_eq!(counters.value(1).await, 1);
    let calls: usize = servers.iter().map(|server| server.state.provider.lock().expect("no panic").len()).sum();
    assert_eq!(calls, 1);
}
