//! A customer clicks twice, or ten times: how many charges result with axum-idempotent, and with
//! sqlock?
//!
//! In each round the same request is sent several times at once, over HTTP, with one key, and once
//! more after all answers. The handler works for 10 ms and enters a charge into a ledger, a table
//! of SQLite without any unique constraint. Each crate is set up as its documentation shows.
//! According to the documentation of axum-idempotent, concurrent requests can both reach the
//! handler; this program measures how often.
//!
//! Run by `scripts/contrast`.

use std::collections::HashSet;
use std::error::Error;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, request::Parts};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::post};
use axum_idempotent::{IdempotentLayer, IdempotentOptions};
use ruts::store::Ttl;
use ruts::store::moka::MokaStore;
use ruts::{CookieOptions, Session, SessionLayer};
use sqlock::Locks;
use sqlock::idempotency::Idempotency;
use sqlock::idempotency::http::{IdempotencyLayer, Idempotent};
use sqlx::SqlitePool;
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tower_cookies::CookieManagerLayer;

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const ROUNDS: usize = 50;

/// Returns the clicks of a round: two to twenty.
fn clicks(round: usize) -> usize {
    2 + round % 19
}

#[tokio::main]
async fn main() -> ExitCode {
    match contrast().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("FAILED: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn contrast() -> Result<()> {
    println!("{ROUNDS} rounds of 2 to 20 simultaneous requests with one key, and one later; the handler takes 10 ms\n");
    println!("{:<22} {:>8} {:>5} {:>8} {:>14}", "", "requests", "keys", "effects", "answers a key");
    with_axum_idempotent().await?.print("axum-idempotent 0.6");
    let ours = with_sqlock().await?;
    ours.print("sqlock");
    if ours.effects != ROUNDS || ours.most_answers != 1 || ours.answers != ROUNDS {
        return Err("with sqlock, a key is to have one effect and one answer".into());
    }
    Ok(())
}

/// The ledger of one shop, in a file of its own.
async fn ledger(directory: &tempfile::TempDir) -> Result<SqlitePool> {
    let file = SqliteConnectOptions::new()
        .filename(directory.path().join("ledger.db"))
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal);
    let pool = SqlitePool::connect_with(file).await?;
    sqlx::query("CREATE TABLE charge (order_id TEXT NOT NULL, receipt TEXT NOT NULL)").execute(&pool).await?;
    Ok(pool)
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct AppError(#[from] sqlx::Error);

impl IntoResponse for AppError {
    fn into_response(self) -> Response {
        (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
    }
}

/// The effect, which is the same for both: 10 ms of work and a row. The answer is its receipt.
async fn charge(conn: &mut SqliteConnection, order: &str) -> Result<String, AppError> {
    tokio::time::sleep(Duration::from_millis(10)).await;
    let receipt = uuid::Uuid::new_v4().to_string();
    let row = sqlx::query("INSERT INTO charge (order_id, receipt) VALUES (?, ?)").bind(order).bind(&receipt);
    row.execute(conn).await?;
    Ok(receipt)
}

/// Runs axum-idempotent, which stores its answers in the customer's session. The session exists
/// before the first click.
async fn with_axum_idempotent() -> Result<Tally> {
    async fn pay(State(pool): State<SqlitePool>, order: String) -> Result<String, AppError> {
        charge(&mut *pool.acquire().await?, &order).await
    }

    async fn log_in(session: Session<MokaStore>) -> Result<(), StatusCode> {
        let an_hour = Ttl::new(3600).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
        let set = session.set("user", &"alice".to_owned(), an_hour, None).await;
        set.map(drop).map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)
    }

    let directory = tempfile::tempdir()?;
    let pool = ledger(&directory).await?;
    let options =
        IdempotentOptions::default().use_idempotency_key_header(Some("Idempotency-Key"), true).expire_after(60 * 5);
    let store = Arc::new(MokaStore::builder().build());
    let app = Router::new()
        .route("/payments", post(pay))
        .layer(IdempotentLayer::<MokaStore>::new(options))
        .route("/session", post(log_in))
        .layer(
            SessionLayer::new(store)
                .with_cookie_options(CookieOptions::build().name("session").max_age(3600).path("/")),
        )
        .layer(CookieManagerLayer::new())
        .with_state(pool.clone());
    let address = serve(app).await?;
    let session = send(address, "/session", "", "").await?;
    let cookie = session.cookie.ok_or("no session")?;
    Tally::of(address, &format!("Cookie: {cookie}\r\n"), &pool).await
}

async fn with_sqlock() -> Result<Tally> {
    async fn pay(State(pool): State<SqlitePool>, idempotent: Idempotent, order: String) -> Response {
        idempotent.run(&pool, async |tx| charge(tx, &order).await).await
    }

    fn user(parts: &Parts) -> Option<String> {
        let headers: &HeaderMap = &parts.headers;
        Some(headers.get("x-user")?.to_str().ok()?.to_owned())
    }

    let directory = tempfile::tempdir()?;
    let pool = ledger(&directory).await?;
    let locks = Locks::new(pool.clone());
    locks.migrate().await?;
    let payments = Idempotency::new(&locks).namespace("payments").wait(Duration::from_secs(60));
    let app = Router::new()
        .route("/payments", post(pay))
        .layer(IdempotencyLayer::new(payments, user).required())
        .with_state(pool.clone());
    let address = serve(app).await?;
    Tally::of(address, "X-User: alice\r\n", &pool).await
}

async fn serve(app: Router) -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(address)
}

/// The results of all rounds.
struct Tally {
    requests: usize,
    effects: usize,
    /// The number of different answers for a key: in total, and at most for one key.
    answers: usize,
    most_answers: usize,
}

impl Tally {
    async fn of(address: SocketAddr, who: &str, pool: &SqlitePool) -> Result<Self> {
        let mut tally = Self { requests: 0, effects: 0, answers: 0, most_answers: 0 };
        for round in 0..ROUNDS {
            let (order, mut customers) = (format!("order-{round}"), JoinSet::new());
            for _ in 0..clicks(round) {
                let (headers, order) = (format!("{who}Idempotency-Key: {order}\r\n"), order.clone());
                customers.spawn(async move { send(address, "/payments", &headers, &order).await });
            }
            let mut told = HashSet::new();
            while let Some(answer) = customers.join_next().await {
                let answer = answer??;
                if answer.status != 200 {
                    return Err(format!("a click was answered with {}: {}", answer.status, answer.body).into());
                }
                told.insert(answer.body);
            }
            // Each crate recognizes a later request: otherwise it would be set up wrongly.
            let headers = format!("{who}Idempotency-Key: {order}\r\n");
            let later = send(address, "/payments", &headers, &order).await?;
            if !told.contains(&later.body) {
                return Err(format!("a click that came later was answered anew: {}", later.body).into());
            }
            tally.requests += clicks(round) + 1;
            tally.answers += told.len();
            tally.most_answers = tally.most_answers.max(told.len());
        }
        let effects: i64 = sqlx::query_scalar("SELECT count(*) FROM charge").fetch_one(pool).await?;
        Ok(Self { effects: usize::try_from(effects)?, ..tally })
    }

    fn print(&self, name: &str) {
        let Self { requests, effects, answers, most_answers } = self;
        let each = *answers as f64 / ROUNDS as f64;
        println!("{name:<22} {requests:>8} {ROUNDS:>5} {effects:>8} {each:>5.1}, up to {most_answers}");
    }
}

struct Answer {
    status: u16,
    cookie: Option<String>,
    body: String,
}

/// A request over HTTP/1.1.
async fn send(address: SocketAddr, path: &str, headers: &str, body: &str) -> Result<Answer> {
    let length = body.len();
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: shop\r\nConnection: close\r\n{headers}Content-Length: {length}\r\n\r\n{body}"
    );
    let mut connection = TcpStream::connect(address).await?;
    connection.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    connection.read_to_string(&mut answer).await?;
    let (head, body) = answer.split_once("\r\n\r\n").ok_or("no answer")?;
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).ok_or("no status")?.parse()?;
    let cookie =
        lines.filter_map(|line| line.split_once(": ")).find(|(name, _)| name.eq_ignore_ascii_case("set-cookie"));
    let cookie = cookie.and_then(|(_, value)| Some(value.split(';').next()?.to_owned()));
    Ok(Answer { status, cookie, body: body.to_owned() })
}
