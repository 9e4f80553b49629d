//! A payment provider: it charges once for each key, and does not always answer in time.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing::post};
use tokio::net::TcpListener;
use tokio::sync::Notify;

use super::shared::Result;
use super::{Payment, client};

/// The order during which the server of the shop is stopped.
pub(super) const FROZEN: &str = "frozen";

/// The order whose first call is charged and not answered in time.
pub(super) const LATE: &str = "late";

/// A charge: its number, the order and the amount.
pub(super) type Charge = (String, String, i64);

#[derive(Clone, Default)]
pub(super) struct Provider {
    /// The charges by the provider's key.
    charges: Arc<Mutex<HashMap<String, Charge>>>,
    pub(super) called: Arc<Notify>,
    pub(super) go_on: Arc<Notify>,
}

impl Provider {
    /// Starts the provider, and returns its address.
    pub(super) async fn start(&self) -> Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?.to_string();
        let app = Router::new().route("/charges", post(charge)).with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        Ok(address)
    }

    /// Returns the charges.
    pub(super) fn charges(&self) -> Vec<Charge> {
        self.charges.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Charges unless this key has a charge already. Returns the number of the charge, and whether
    /// it is the first for the order.
    fn charge(&self, key: &str, payment: &Payment) -> (String, bool) {
        let mut charges = self.charges.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((number, ..)) = charges.get(key) {
            return (number.clone(), false);
        }
        let (number, is_first) =
            (uuid::Uuid::new_v4().to_string(), !charges.values().any(|(_, order, _)| *order == payment.order));
        charges.insert(key.to_owned(), (number.clone(), payment.order.clone(), payment.cents));
        (number, is_first)
    }
}

async fn charge(State(provider): State<Provider>, headers: HeaderMap, Json(payment): Json<Payment>) -> Response {
    let key = headers.get("idempotency-key").and_then(|key| key.to_str().ok()).unwrap_or_default();
    if payment.order.starts_with(FROZEN) && provider.charges().is_empty() {
        provider.called.notify_one();
        provider.go_on.notified().await;
    }
    match provider.charge(key, &payment) {
        (_, true) if payment.order.starts_with(LATE) => StatusCode::REQUEST_TIMEOUT.into_response(),
        (number, _) => Json(number).into_response(),
    }
}

/// Asks for a charge. Returns its number.
pub(super) async fn ask(address: &str, key: &str, payment: &Payment) -> Result<String, String> {
    let body = serde_json::to_string(payment).map_err(|error| error.to_string())?;
    let answer = client::post((address, "/charges"), "shop", key, &body).await.map_err(|error| error.to_string())?;
    match answer.status {
        200 => serde_json::from_str(&answer.body).map_err(|error| error.to_string()),
        status => Err(format!("the provider answered {status}")),
    }
}
