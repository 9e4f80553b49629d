//! The server: an application of axum that charges once for each key, in a transaction or at the
//! provider.

use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, request::Parts};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing::post};
use rustix::process::{Signal, set_parent_process_death_signal};
use sqlock::Locks;
use sqlock::idempotency::http::{IdempotencyLayer, Idempotent};
use sqlock::idempotency::{Attempt, Idempotency, ResumePolicy, Resumed};
use sqlock::retry::Retry;
use sqlx::AssertSqlSafe;
use sqlx::sqlite::{SqliteConnectOptions, SqlitePoolOptions};
use tokio::net::TcpListener;
use tokio::time::sleep;

use super::order::Mode;
use super::provider;
use crate::any_pool::{AnyPool, on_pool};
use crate::random;

/// The TTL of an attempt: short, so that many run out.
pub(super) const TTL: Duration = Duration::from_secs(2);

/// The longest wait of a server for the provider.
pub(super) const PROVIDER_TIMEOUT: Duration = Duration::from_millis(700);

/// The principal of all keys.
pub(super) const CUSTOMER: &str = "alice";

/// The number of attempts after which an outcome stays unknown, for an operator.
const ATTEMPTS: u32 = 3;

/// Returns the answer to a charge whose outcome an operator has found out, in the stored form.
pub(super) fn stored_answer(receipt: &str) -> serde_json::Value {
    serde_json::json!({"status": StatusCode::CREATED.as_u16(), "headers": [], "body": {"text": receipt}})
}

/// Returns the `INSERT` of a charge into the application's ledger, which does not prevent a second
/// charge.
pub(super) fn entry(mode: Mode, order: &str, receipt: &str) -> String {
    format!("INSERT INTO storm_ledger (mode, order_name, receipt) VALUES ('{}', '{order}', '{receipt}')", mode.name())
}

/// The state of the handlers.
#[derive(Clone)]
pub(super) struct Shop {
    pool: AnyPool,
    pub(super) locks: Locks,
    provider: u16,
}

#[derive(Debug, thiserror::Error)]
enum PaymentError {
    #[error("the payment failed: {0}")]
    Database(#[from] sqlx::Error),
    #[error("the payment failed: {0}")]
    Lock(#[from] sqlock::Error),
    #[error("the provider answered {0}")]
    Provider(StatusCode),
}

impl IntoResponse for PaymentError {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Provider(status) => status,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        (status, self.to_string()).into_response()
    }
}

impl Shop {
    pub(super) fn open(pool: AnyPool, provider: u16) -> Self {
        Self { locks: pool.builder().build(), pool, provider }
    }

    pub(super) fn records(&self, mode: Mode) -> Idempotency {
        Idempotency::new(&self.locks).namespace(mode.name()).lease(TTL)
    }

    fn layer(&self, mode: Mode, policy: ResumePolicy) -> IdempotencyLayer {
        // On SQLite, writers wait for each other.
        let patiently = Retry::new().attempts(u32::MAX).within(Duration::from_secs(10));
        // Some requests wait for another request with their key, others are answered at once.
        let wait = Duration::from_secs(random(2) as u64);
        let records = self.records(mode).wait(wait).retry(patiently).resume_policy(policy);
        IdempotencyLayer::new(records, |_: &Parts| Some(CUSTOMER.to_owned())).required()
    }

    /// Continues dead attempts, and attempts with an unknown outcome.
    pub(super) async fn resume(&self, policy: ResumePolicy) -> sqlock::Result<Resumed> {
        self.layer(Mode::Lease, policy).resume(async |attempt: &Attempt| self.charge(attempt).await).await
    }

    /// Charges at the provider and writes the charge into the ledger, each once.
    async fn charge(&self, attempt: &Attempt) -> Result<(StatusCode, String), PaymentError> {
        let order = attempt.key();
        let ask = async || {
            let key = attempt.provider_key("charge");
            provider::ask(self.provider, &key, order).await.map_err(PaymentError::Provider)
        };
        let receipt = attempt.step("charge", ask).await?;
        if attempt.recall::<()>("ledger").await?.is_none() {
            on_pool!(&self.pool, pool => {
                let mut tx = pool.begin().await?;
                sqlx::raw_sql(AssertSqlSafe(entry(Mode::Lease, order, &receipt))).execute(&mut *tx).await?;
                attempt.record_step(&mut tx, "ledger", &()).await?;
                tx.commit().await?;
            });
        }
        Ok((StatusCode::CREATED, receipt))
    }
}

async fn pay_in_transaction(State(shop): State<Shop>, idempotent: Idempotent, order: String) -> Response {
    let receipt = uuid::Uuid::new_v4().simple().to_string();
    on_pool!(&shop.pool, pool => {
        idempotent.run(pool, async |tx| {
            let entry = entry(Mode::Transaction, &order, &receipt);
            sqlx::raw_sql(AssertSqlSafe(entry)).execute(&mut **tx).await?;
            Ok::<_, PaymentError>((StatusCode::CREATED, receipt.clone()))
        }).await
    })
}

async fn pay_under_lease(State(shop): State<Shop>, idempotent: Idempotent) -> Response {
    idempotent.run_leased(async |attempt| shop.charge(attempt).await).await
}

/// `soak pay URL PORT PROVIDER [full]`: serves until its standard input ends. `full`: its
/// connections to SQLite find the disk full.
pub(crate) async fn serve(url: &str, port: u16, provider: u16, is_full: bool) {
    set_parent_process_death_signal(Some(Signal::KILL)).expect("the parent-death signal is set");
    let pool = if is_full { on_full_disk(url) } else { AnyPool::open(url, 8) };
    let shop = Shop::open(pool, provider);
    let policy = ResumePolicy::new().min_age(TTL).max_attempts(ATTEMPTS);
    let mut under_lease = shop.layer(Mode::Lease, policy);
    if random(2) == 0 {
        under_lease = under_lease.detached();
    }
    let app = Router::new()
        .route(Mode::Transaction.path(), post(pay_in_transaction))
        .layer(shop.layer(Mode::Transaction, policy))
        .merge(Router::new().route(Mode::Lease.path(), post(pay_under_lease)).layer(under_lease))
        .with_state(shop.clone());
    let listener = TcpListener::bind(("127.0.0.1", port)).await.expect("the storm keeps the port");
    let resume = async {
        loop {
            sleep(Duration::from_secs(1)).await;
            // The database may be unavailable, as for requests.
            let _ = shop.resume(policy).await;
        }
    };
    tokio::select! {
        served = async { axum::serve(listener, app).await } => served.expect("the server serves"),
        () = resume => {}
        _ = tokio::task::spawn_blocking(|| std::io::copy(&mut std::io::stdin(), &mut std::io::sink())) => {}
    }
}

/// Creates a pool whose connections add no page to the file: SQLite fails as on a full disk.
fn on_full_disk(url: &str) -> AnyPool {
    let file: SqliteConnectOptions = url.parse().expect("a URL");
    // The lowest limit that SQLite accepts is the current number of pages.
    let file = file.busy_timeout(Duration::from_secs(30)).pragma("max_page_count", "1");
    AnyPool::Sqlite(SqlitePoolOptions::new().max_connections(8).connect_lazy_with(file))
}
