//! The payment provider: a process with its own ledger. It charges once for each key, and does not
//! always confirm the charge.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::time::sleep;

use super::http;
use super::order::{Order, ProviderBehaviour};
use super::server::PROVIDER_TIMEOUT;
use crate::process::Process;
use crate::random;

/// The answers that leave open whether the provider has charged.
const AMBIGUOUS: [StatusCode; 6] = [
    StatusCode::REQUEST_TIMEOUT,
    StatusCode::CONFLICT,
    StatusCode::TOO_MANY_REQUESTS,
    StatusCode::INTERNAL_SERVER_ERROR,
    StatusCode::BAD_GATEWAY,
    StatusCode::SERVICE_UNAVAILABLE,
];

#[derive(Clone, Deserialize, Serialize)]
pub(super) struct Charge {
    pub(super) order: String,
    pub(super) receipt: String,
}

/// The storm's handle to the provider.
pub(super) struct Provider {
    pub(super) port: u16,
    _process: Process,
}

impl Provider {
    pub(super) fn start() -> Self {
        let mut process = Process::start(["provider"]);
        Self { port: process.read_line().parse().expect("the port"), _process: process }
    }

    /// Ends the faults of the provider: from now on it refuses the orders that it always refuses,
    /// and charges all others.
    pub(super) async fn stop_faults(&self) {
        http::post(self.port, "/stop-faults", "-", "").await.expect("the provider answers");
    }

    pub(super) async fn charges(&self) -> Vec<Charge> {
        let answer = http::get(self.port, "/charges").await.expect("the provider answers");
        serde_json::from_str(&answer.body).expect("the ledger")
    }
}

/// Asks for a charge, and returns its receipt.
pub(super) async fn ask(port: u16, key: &str, order: &str) -> Result<String, StatusCode> {
    match tokio::time::timeout(PROVIDER_TIMEOUT, http::post(port, "/charges", key, order)).await {
        Ok(Ok(answer)) if answer.status == StatusCode::OK.as_u16() => Ok(answer.body),
        Ok(Ok(answer)) => Err(StatusCode::from_u16(answer.status).unwrap_or(StatusCode::BAD_GATEWAY)),
        Ok(Err(_)) => Err(StatusCode::BAD_GATEWAY),
        Err(_) => Err(StatusCode::GATEWAY_TIMEOUT),
    }
}

#[derive(Clone, Default)]
struct Ledger {
    /// The charges by the provider's key.
    charges: Arc<Mutex<HashMap<String, Charge>>>,
    has_stopped_faults: Arc<AtomicBool>,
}

/// `soak provider`: prints its port.
pub(crate) async fn provide() {
    set_parent_process_death_signal(Some(Signal::KILL)).expect("the parent-death signal is set");
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    println!("{}", listener.local_addr().expect("an address").port());
    let app = Router::new()
        .route("/charges", post(charge))
        .route("/charges", get(async |State(ledger): State<Ledger>| Json(ledger.charges())))
        .route(
            "/stop-faults",
            post(async |State(ledger): State<Ledger>| ledger.has_stopped_faults.store(true, Ordering::Relaxed)),
        )
        .with_state(Ledger::default());
    axum::serve(listener, app).await.expect("the provider serves");
}

impl Ledger {
    fn charges(&self) -> Vec<Charge> {
        self.charges.lock().expect("no panic").values().cloned().collect()
    }

    /// Charges unless this key has a charge already. Returns the receipt.
    fn charge(&self, key: &str, order: &str) -> String {
        let new = || Charge { order: order.to_owned(), receipt: uuid::Uuid::new_v4().simple().to_string() };
        self.charges.lock().expect("no panic").entry(key.to_owned()).or_insert_with(new).receipt.clone()
    }
}

async fn charge(State(ledger): State<Ledger>, headers: HeaderMap, order: String) -> Response {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok()).expect("a key");
    let ambiguous = || AMBIGUOUS[random(AMBIGUOUS.len())].into_response();
    let has_stopped_faults = ledger.has_stopped_faults.load(Ordering::Relaxed);
    match (Order::provider_behaviour(&order), random(100)) {
        (ProviderBehaviour::Refused, _) => StatusCode::PAYMENT_REQUIRED.into_response(),
        (ProviderBehaviour::Uncharged, _) if !has_stopped_faults => ambiguous(),
        (ProviderBehaviour::Unconfirmed, _) | (ProviderBehaviour::Charged, 0..4) if !has_stopped_faults => {
            ledger.charge(key, &order);
            ambiguous()
        }
        (ProviderBehaviour::Charged, 4..8) if !has_stopped_faults => ambiguous(),
        (ProviderBehaviour::Charged, 8..11) if !has_stopped_faults => {
            let receipt = ledger.charge(key, &order);
            sleep(2 * PROVIDER_TIMEOUT).await;
            receipt.into_response()
        }
        _ => ledger.charge(key, &order).into_response(),
    }
}
