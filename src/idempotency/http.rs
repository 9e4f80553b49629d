//! Requests over HTTP that take effect once: a layer and extractors for [axum](https://docs.rs/axum).
//!
//! A client puts a key of its choice into the header [`Idempotency-Key`](https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/)
//! and sends the request again, with the same key, when no response came. The first one takes effect. Each further one is told
//! the same response, with `Idempotent-Replayed: true`.
//!
//! ```no_run
//! # #[cfg(feature = "sqlite")]
//! # mod app {
//! use axum::extract::State;
//! use axum::http::{StatusCode, request::Parts};
//! use axum::response::{IntoResponse, Response};
//! use axum::{Router, routing::post};
//! use sqlock::Locks;
//! use sqlock::idempotency::Idempotency;
//! use sqlock::idempotency::http::{IdempotencyLayer, Idempotent};
//! use sqlx::SqlitePool;                                        // or PgPool, MySqlPool
//!
//! /// Whom the layer that authenticates has found.
//! #[derive(Clone)]
//! struct User(String);
//!
//! # #[derive(Debug, thiserror::Error)]
//! #[error("{0}")]
//! struct AppError(#[from] sqlx::Error);
//!
//! impl IntoResponse for AppError {
//!     fn into_response(self) -> Response {
//!         StatusCode::INTERNAL_SERVER_ERROR.into_response()
//!     }
//! }
//!
//! async fn charge(State(pool): State<SqlitePool>, idempotent: Idempotent, cents: String) -> Response {
//!     idempotent
//!         .run(&pool, async |tx| {
//!             sqlx::query("INSERT INTO charge (cents) VALUES (?)").bind(&cents).execute(&mut **tx).await?;
//!             Ok::<_, AppError>((StatusCode::CREATED, "charged"))
//!         })
//!         .await
//! }
//!
//! fn app(pool: SqlitePool, locks: &Locks) -> Router {
//!     let payments = Idempotency::new(locks).namespace("payments");
//!     let user = |parts: &Parts| parts.extensions.get::<User>().map(|user| user.0.clone());
//!     Router::new()
//!         .route("/charges", post(charge))
//!         .layer(IdempotencyLayer::new(payments, user).required())
//!         .with_state(pool)
//!     // … and around it the layer that authenticates
//! }
//! # }
//! ```
//!
//! **The layer claims nothing by itself.** It reads the key and the request; what takes effect once is what the handler does in
//! [`Idempotent::run`] or [`Idempotent::run_leased`]. The exception is a layer that is [`leased`](IdempotencyLayer::leased), which
//! runs all that is inside of it under a lease.
//!
//! # What makes a request the same one
//!
//! There must be exactly one header `Idempotency-Key`: a string of structured fields, `"8e03978e"`, or the same without
//! quotes, which is the same key; 1 to 255 characters of ASCII. Keys of different [principals](IdempotencyLayer::new) do not
//! meet.
//!
//! What came with the key first must come with it again: the method, the path and query as the client sent them, and the body
//! byte for byte ([`json`](IdempotencyLayer::json), [`json_fields`](IdempotencyLayer::json_fields) and
//! [`fingerprint`](IdempotencyLayer::fingerprint) change that). Otherwise it is [`key-reused`](#key-reused), also while the first one
//! is in progress.
//!
//! # What is stored
//!
//! Of a response with a status of 200 to 399, which is to say: if and only if the effect is committed, the status, the body, and
//! these headers, in their order and as often as they are there: `Content-Disposition`, `Content-Encoding`,
//! `Content-Language`, `Content-Location`, `Content-Type`, `ETag`, `Last-Modified`, `Link`, `Location`, `Retry-After`, `Vary`, and
//! those [named](IdempotencyLayer::keep_header). `Set-Cookie` never is. The first response has all headers that the handler has
//! set. A body must have a length that is known before it is read, and that is not over the
//! [limit](IdempotencyLayer::response_limit).
//!
//! # Problems
//!
//! What the handler does not answer is answered as `application/problem+json`
//! ([RFC 9457](https://www.rfc-editor.org/rfc/rfc9457)), with a `type` that names one of these headings. None contains a key, a
//! principal, or what the database said; that is logged.
//!
//! ## key-missing
//! 400: the route [requires](IdempotencyLayer::required) a key, or the handler does, or the method is not one of
//! [those](IdempotencyLayer::methods) for which keys are read.
//! ## key-malformed
//! 400: the header is not a key, or there are two.
//! ## principal-missing
//! 401: it came with a key, and it is not known whose. The header `WWW-Authenticate` is the business of whoever authenticates.
//! ## request-incomplete
//! 400: the body broke off. Nothing was claimed.
//! ## request-too-large
//! 413: the body is longer than the [limit](IdempotencyLayer::request_limit). Nothing was claimed.
//! ## in-progress
//! 409, `Retry-After: 1`: another one with this key is at work.
//! ## outcome-unknown
//! 409, `Retry-After: 30`: an attempt under a lease has ended, and nobody knows whether it took effect. It will have to be
//! [resumed](IdempotencyLayer::resume), or [forgotten](crate::idempotency::Idempotency::forget).
//! ## key-reused
//! 422: the key came with another request before. (400 with [`stripe_v1`](IdempotencyLayer::stripe_v1).)
//! ## token-not-valid
//! 422: the key is not a token that was [issued](IdempotencyLayer::issued) to this principal and is still good.
//! ## store-unavailable
//! 503, `Retry-After: 5`: the database does not answer, or refuses. The handler's work is never run without a claim.
//! ## conflict
//! 503, `Retry-After: 1`: the transaction was run again and again, since it met concurrent changes, and was given up. Nothing took
//! effect.
//! ## commit-unknown
//! 503, `Retry-After: 1`: the connection was lost while the transaction committed. The same key finds out.
//! ## response-not-storable
//! 500: the handler's response is a stream, or broke off. The transaction was rolled back; under a lease nobody knows.
//! ## response-too-large
//! 500: the handler's response is longer than the [limit](IdempotencyLayer::response_limit). The transaction was rolled back; under
//! a lease nobody knows.
//! ## not-set-up
//! 500: there is no layer around the handler, or the transaction is not one of the database that has the records.
//!
//! # When the client goes away
//!
//! The handler is dropped, and its transaction is rolled back, unless it was committing; under a lease, the lease is given
//! back. Either way the client may send the request again with the same key.

mod answer;
mod idempotent;
mod key_header;
mod layer;
mod problem;

pub use idempotent::Idempotent;
pub use layer::{IdempotencyLayer, IdempotencyService};
