//! A service of axum that works under leases, with what its operator needs: `/metrics` for
//! Prometheus, `/healthz` for a probe, and an orderly end at SIGTERM, which lets held leases finish
//! and refuses the requests that wait. It runs until then. Without `DATABASE_URL`, it keeps its
//! tables in `service.db` in the current directory.
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
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use sqlock::{Locks, LocksBuilder};
use tokio::net::TcpListener;

/// How long a request waits for its turn before it is answered with 503.
const WAIT: Duration = Duration::from_secs(30);

/// How long the work in progress may take after SIGTERM. Kubernetes kills after 30 seconds, and the
/// releases that follow take up to some 20 while the database does not answer.
const DRAIN: Duration = Duration::from_secs(8);

/// How often the stored documents are reported, by one of all instances.
const REPORT: Duration = Duration::from_secs(15);

/// How much earlier than the last one a tick may come.
const TICK_TOLERANCE: Duration = Duration::from_secs(1);

const MAX_DOCUMENT_BYTES: usize = 10 << 20;

/// The histograms of the dashboard need buckets: without these the exporter makes summaries.
const SECONDS: [f64; 9] = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 600.0];
const OPERATIONS: [f64; 9] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

/// How often the recorder drops the values that histograms no longer need.
const UPKEEP: Duration = Duration::from_secs(5);

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    // Before the first lease, so that no metric is missed.
    let metrics = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &SECONDS)?
        .set_buckets_for_metric(Matcher::Full("sqlock_batch_size".into()), &OPERATIONS)?
        .install_recorder()?;
    let recorder = metrics.clone();
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(UPKEEP).await;
            recorder.run_upkeep();
        }
    });

    let url = std::env::var("DATABASE_URL").unwrap_or_else(|_| "sqlite://service.db?mode=rwc".into());
    let locks = LocksBuilder::from_urls(&url)?.metrics_label(kind_of).connect().await?;
    locks.migrate().await?;
    let _sweeping = locks.sweeper().start();
    let reports = tokio::spawn(report_now_and_then(locks.clone()));

    let app = Router::new()
        .route("/documents/{name}", put(store))
        .route("/healthz", get(health))
        .route("/metrics", get(async move || metrics.render()))
        .with_state(locks.clone());
    let address = std::env::var("ADDRESS").unwrap_or_else(|_| "127.0.0.1:8080".into());
    let listener = TcpListener::bind(address).await?;
    println!("listening on {}", listener.local_addr()?);

    // Both at once: the server waits for its requests, and the requests that wait for a lease end
    // by the drain.
    let server = axum::serve(listener, app).with_graceful_shutdown(terminated());
    let drain = async {
        terminated().await;
        locks.drain(DRAIN).await
    };
    let (served, drained, reported) = tokio::join!(server.into_future(), drain, reports);
    served?;
    reported?;
    match drained {
        Ok(true) => println!("everything was finished"),
        Ok(false) => println!("some work was cut off"),
        // The names are free after their TTL.
        Err(error) => println!("the leases could not be released: {}", error.report()),
    }
    Ok(())
}

/// Reports until the process is asked to end. A report in progress is finished, or cut off at the
/// end of the drain.
async fn report_now_and_then(locks: Locks) {
    let mut ticks = tokio::time::interval(REPORT);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = locks.closed() => return,
        }
        // The name stays taken for most of the period: the other instances, whose ticks come later,
        // do not report again.
        let request = locks.lease("report").wait(Duration::ZERO).hold_at_least(REPORT - TICK_TOLERANCE);
        match request.run(async |lease| lease.token()).await {
            Ok(token) => println!("reported, with token {token}"),
            Err(error) if error.is_timeout() || error.is_closed() => {} // another instance has reported, or this one ends
            Err(error) => println!("no report: {}", error.report()),
        }
    }
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

/// For a readiness probe. A liveness probe must not restart the service because the database is
/// away.
async fn health(State(locks): State<Locks>) -> impl IntoResponse {
    let health = locks.health();
    let status = if health.is_ok() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(health))
}

/// The label of a lock in the metrics: a few constants, never the name itself.
fn kind_of(name: &str) -> &'static str {
    match name {
        "report" => "report",
        name if name.starts_with("document/") => "document",
        _ => "other",
    }
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
