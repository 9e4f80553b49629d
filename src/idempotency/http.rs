//! Requests over HTTP that take effect once: a layer and extractors for
//! [axum](https://docs.rs/axum).
//!
//! A client puts a key of its choice into the header
//! [`Idempotency-Key`](https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/)
//! and sends the request again, with the same key, when no response came. The first request takes
//! effect. Each further one receives the same response, with `Idempotent-Replayed: true`.
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
//! /// The user, as found by the layer that authenticates.
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
//! **The layer claims nothing by itself.** It reads the key and the request; the handler's work in
//! [`Idempotent::run`] or [`Idempotent::run_leased`] takes effect once. The exception is a
//! [`leased`](IdempotencyLayer::leased) layer, which runs the services inside it under a lease.
//!
//! # Which requests are the same
//!
//! There must be exactly one header `Idempotency-Key` (or [another](IdempotencyLayer::header)): a
//! string of structured fields, `"8e03978e"`, whose parameters do not count (`"8e03978e";v=1`), or
//! the same without quotes, which is the same key; 1 to 255 characters of ASCII. Keys of different
//! [principals](IdempotencyLayer::new) are independent.
//!
//! A repeated request must be equal to the first: the method, the path and query as the client sent
//! them, and the body byte for byte ([`json`](IdempotencyLayer::json),
//! [`json_fields`](IdempotencyLayer::json_fields) and
//! [`fingerprint`](IdempotencyLayer::fingerprint) change that). Otherwise it is answered with
//! [`key-reused`](#key-reused), also while the first is in progress.
//!
//! The [host](IdempotencyLayer::compare_host) and [headers](IdempotencyLayer::compare_header), such
//! as the content type or the version of an API, count where the layer says so.
//!
//! # What is stored
//!
//! A response with a status of 200 to 399 is stored if and only if the effect is committed (other
//! statuses as [selected](IdempotencyLayer::store_if)): the status, the body, and these headers, in
//! their order and with repetitions: `Allow`, `Content-Disposition`, `Content-Encoding`,
//! `Content-Language`, `Content-Location`, `Content-Range`, `Content-Type`, `ETag`,
//! `Last-Modified`, `Link`, `Location`, `Retry-After`, `Vary`, `WWW-Authenticate`, and those
//! [added](IdempotencyLayer::keep_header). `Set-Cookie` is never stored. The first response has all
//! headers of the handler. A body is read to its end before it is sent, up to the
//! [limit](IdempotencyLayer::response_limit), in the transaction or under the lease of its request.
//! The body of another response, such as a refusal, is sent after the key is free, so it must have
//! no effect. Trailers, of requests with a key and of stored responses, are dropped: do not put the
//! layer around gRPC.
//!
//! # Problems
//!
//! Responses that do not come from the handler are `application/problem+json` ([RFC
//! 9457](https://www.rfc-editor.org/rfc/rfc9457)), with a `type` that names one of these headings.
//! None contains a key, a principal, or a message of the database, which is logged.
//!
//! ## key-missing
//! 400: the route [requires](IdempotencyLayer::required) a key, or the handler does, or the method
//! is not one of [those](IdempotencyLayer::methods) for which keys are read.
//! ## key-malformed
//! 400: the header is not a valid key, or occurs twice.
//! ## key-not-supported
//! 400: the route [requires](IdempotencyLayer::required) keys, and the request has one with a
//! method for which keys are not [read](IdempotencyLayer::methods), such as PUT or DELETE.
//! ## principal-missing
//! 401: the request has a key and no known principal. The layer that authenticates sets the header
//! `WWW-Authenticate`.
//! ## request-incomplete
//! 400: the body of the request ended before it was complete. Nothing was claimed.
//! ## request-too-large
//! 413: the body is longer than the [limit](IdempotencyLayer::request_limit). Nothing was claimed.
//! ## in-progress
//! 409, `Retry-After: 1`: another request with this key is in progress, or this one was cut off
//! when its lease was lost, as at the end of a [drain](crate::Locks::drain). A repetition continues
//! it.
//! ## outcome-unknown
//! 409, `Retry-After: 30`: an attempt under a lease has ended, and its effect is unknown, or its
//! outcome could not be recorded: it must be [resumed](IdempotencyLayer::resume), or
//! [resolved](crate::idempotency::Idempotency::resolve). Or a statement of the handler had ended its
//! transaction: it must be resolved.
//! (A request that is resolved as done, with null as its result, is answered with 204.)
//! ## key-reused
//! 422: the key was used for another request before. (400 with
//! [`stripe_v1`](IdempotencyLayer::stripe_v1).)
//! ## token-not-valid
//! 422: the key is not a token that was [issued](IdempotencyLayer::issued) to this principal and is
//! still valid.
//! ## key-expired
//! 422: the key was used, its response has expired, and used keys are
//! [refused](crate::idempotency::AfterRetention::Refuse).
//! ## store-unavailable
//! 503, `Retry-After: 5`: the database does not answer, or refuses, or this process is draining.
//! The handler's work took no effect: it is never run without a claim.
//! ## conflict
//! 503, `Retry-After: 1`: every attempt at the transaction met a concurrent change. Nothing took
//! effect. (A [version conflict](crate::Error::Conflict) is answered by the handler.)
//! ## commit-unknown
//! 503, `Retry-After: 1`: the connection was lost during the commit, SQLite met an I/O error in it,
//! or MySQL or MariaDB interrupted it. A request with the same key receives the outcome.
//! ## response-not-storable
//! 500: the handler's response ended before it was complete. The transaction was rolled back; under
//! a lease the outcome is unknown.
//! ## response-too-large
//! 500: the handler's response is longer than the [limit](IdempotencyLayer::response_limit). The
//! transaction was rolled back; under a lease the outcome is unknown.
//! ## not-set-up
//! 500: there is no layer around the handler, or the transaction is not one of the database that
//! has the records, or, on SQLite, it was begun without BEGIN IMMEDIATE and met another writer, or
//! what is stored cannot be [opened](crate::idempotency::Idempotency::seal). Or the handler has
//! ignored the key, and succeeded, where one is [required](IdempotencyLayer::required): a repeated
//! request would take effect again. Or the handler went on after a deadlock had rolled its
//! transaction back or, on PostgreSQL, after a statement had failed, or a deferred constraint
//! refused the commit, so nothing took effect.
//!
//! # Rules met
//!
//! Of the [draft](https://datatracker.ietf.org/doc/draft-ietf-httpapi-idempotency-key-header/) of the
//! IETF:
//!
//! | rule | met |
//! |---|---|
//! | the key is a string of structured fields, sent once | yes; also without quotes |
//! | keys expire as published | yes, after the [retention](crate::idempotency::Idempotency::retention) |
//! | another request with the key: 422 | yes |
//! | a completed request with the key: its result | a success, yes; an error no, because nothing took effect: the request runs again |
//! | a concurrent request with the key: 409 | yes |
//! | no key where one is required: 400 | yes, with [`required`](IdempotencyLayer::required) |
//! | errors are problem details that link to a description | yes |
//! | keys count together with their client | yes; not with [`global`](IdempotencyLayer::global) |
//! | keys are checked against a published format, such as UUIDs | no: the layer takes every string |
//!
//! Of [Stripe's](https://docs.stripe.com/api/idempotent_requests), with
//! [`stripe_v1`](IdempotencyLayer::stripe_v1):
//!
//! | rule | met |
//! |---|---|
//! | the first result is replayed, also a failure and a 500 | yes, after the failed transaction was rolled back; under a lease, only a [refusal](IdempotencyLayer::refusals), because another failure leaves the outcome unknown |
//! | keys have up to 255 characters | yes |
//! | keys are kept for at least 24 hours, and are new after that | yes |
//! | other parameters with the key are an error | yes, 400 |
//! | a refusal before the work, or because of a concurrent request, is not saved | yes, if it does not come from the work |
//! | keys have no effect on GET and DELETE | yes; [`required`](IdempotencyLayer::required) refuses them with DELETE |
//! | errors have Stripe's format | no: they are problem details |
//!
//! # Other layers
//!
//! Layers that compress belong around a [`leased`](IdempotencyLayer::leased) layer. Inside, the
//! compressed response is stored, and replayed to clients that did not ask for it. Around handlers
//! with [`Idempotent`] their place does not matter.
//!
//! A timeout drops the handler as a disconnecting client does. Inside a leased layer, its status
//! leaves the outcome unknown: it must be 408 or 504, not one that is stored or counts as a
//! refusal.
//!
//! # When the client disconnects
//!
//! The handler is dropped, and its transaction is rolled back, unless it was committing; under a
//! lease, the lease is released. In both cases the client may send the request again with the same
//! key. With [`detached`](IdempotencyLayer::detached), the handler goes on to its end.

mod answer;
mod comparison;
mod idempotent;
mod key_header;
mod layer;
mod problem;
mod rollback;
mod service;

pub use idempotent::Idempotent;
pub use layer::IdempotencyLayer;
pub use service::IdempotencyService;
