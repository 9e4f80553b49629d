//! A service of axum that works under leases, with what its operator needs: `/metrics` for Prometheus, `/healthz` for
//! a probe, and an orderly end at SIGTERM, which lets held leases finish and refuses the requests that wait.
//!
//! ```text
//! cargo run --features axum,metrics --example service
//! curl --upload-file plan.txt http://127.0.0.1:8080/documents/plan
//! curl http://127.0.0.1:8080/metrics
//! DATABASE_URL=postgres://… cargo run --all-features --example service
//! ```

use std::error::Error;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Json, Response};
use axum::routing::{get, put};
use metrics_exporter_prometheus::PrometheusBuilder;
use sqlock::{Locks, LocksBuilder};
use tokio::net::TcpListener;

/// How long a request waits for its turn before it is answered with 503.
const WAIT: Duration = Duration::from_secs(30);

/// How long the work in progress may take after SIGTERM. Kubernetes kills after 30 seconds.
const DRAIN: Duration = Duration::from_secs(25);

const MAX_DOCUMENT_BYTES: usize = 10 << 20;

/// The histograms of the dashboard need buckets: without these the exporter makes summaries.
const BUCKETS: [f64; 9] = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0];

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Before the first lease, so that no metric is missed.
    let metrics = PrometheusBuilder::new().set_buckets(&BUCKETS)?.install_recorder()?;

    let url = std::env::var("DATABASE_URL").unwrap_or_else(|_| "sqlite://service.db?mode=rwc".into());
    let locks = LocksBuilder::from_urls(&url)?.metrics_label(kind_of).connect().await?;
    locks.migrate().await?;
    let _sweeping = locks.sweeper().start();

    let app = Router::new()
        .route("/documents/{name}", put(store))
        .route("/healthz", get(health))
        .route("/metrics", get(async move || metrics.render()))
        .with_state(locks.clone());
    let address = std::env::var("ADDRESS").unwrap_or_else(|_| "127.0.0.1:8080".into());
    let listener = TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);

    // Both at once: the server waits for its requests, and the requests that wait for a lease end by the drain.
    let server = axum::serve(listener, app).with_graceful_shutdown(terminated());
    let drain = async {
        terminated().await;
        locks.drain(DRAIN).await
    };
    let (served, drained) = tokio::join!(server.into_future(), drain);
    served?;
    println!("{}", if drained? { "everything was finished" } else { "some work was cut off" });
    Ok(())
}

/// Stores a document. Of each, one version is written at a time, by all instances of this service.
async fn store(State(locks): State<Locks>, Path(name): Path<String>, body: Body) -> Result<String, Response> {
    let document = locks
        .lease(format!("document/{name}"))
        .wait(WAIT)
        // An application writes here, in a transaction that begins with `lease.fence(&mut tx)`.
        .run(async |_lease| to_bytes(body, MAX_DOCUMENT_BYTES).await)
        .await
        .map_err(IntoResponse::into_response)? // 503 if the wait is too long, the database is away, or the service ends
        .map_err(|error| (StatusCode::BAD_REQUEST, error.to_string()).into_response())?;
    Ok(format!("stored {} bytes\n", document.len()))
}

/// For a readiness probe. A liveness probe must not restart the service because the database is away.
async fn health(State(locks): State<Locks>) -> impl IntoResponse {
    let health = locks.health();
    let status = if health.is_ok() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(health))
}

/// The label of a lock in the metrics: a few constants, never the name itself.
fn kind_of(name: &str) -> &'static str {
    if name.starts_with("document/") { "document" } else { "other" }
}

/// Completes when the process is asked to end.
async fn terminated() {
    #[cfg(unix)]
    if let Ok(mut terminate) = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
        return;
    }
    let _ = tokio::signal::ctrl_c().await;
}
