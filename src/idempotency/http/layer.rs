//! The layer, and its settings.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::request::Parts;
use axum::http::{HeaderName, Method, StatusCode};
use axum::response::IntoResponse;
use tower_layer::Layer;

use super::super::handle::REQUEST_LIMIT;
use super::super::key::check_pointer;
use super::super::{Attempt, Fingerprint, Idempotency, Resumed};
use super::answer::Policy;
use super::comparison::{BodyRule, Comparison};
use super::idempotent::resume_work;
use super::key_header::{self, Reading};
use super::service::{IdempotencyService, KeyScope, Settings};

/// Reads the `Idempotency-Key` of requests, for handlers that take effect once. See the
/// [module](super).
///
/// A closure finds the authenticated principal of a request, so place the layer inside the layer
/// that authenticates. With [`global`](Self::global), keys belong to no principal.
#[derive(Clone)]
#[must_use = "a layer does nothing until it is put around a handler"]
pub struct IdempotencyLayer(Settings);

impl IdempotencyLayer {
    /// Creates a layer whose keys belong to principals: the closure returns the sender of a
    /// request. When it returns `None`, a request with a key is answered with
    /// [`principal-missing`](super#principal-missing).
    pub fn new(idempotency: Idempotency, principal: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self::with_scope(idempotency, KeyScope::Principal(Arc::new(principal)))
    }

    /// Creates a layer whose keys belong to no principal: **every client that knows a key receives
    /// its response**. For example, for the identifiers of events that a provider sends.
    pub fn global(idempotency: Idempotency) -> Self {
        Self::with_scope(idempotency, KeyScope::Global)
    }

    /// Creates a layer whose keys are tokens that were [issued](Idempotency::issue) to the
    /// principal; other tokens are answered with [`token-not-valid`](super#token-not-valid).
    pub fn issued(
        idempotency: Idempotency,
        principal: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        Self::with_scope(idempotency, KeyScope::Issued(Arc::new(principal)))
    }

    /// Creates a layer that behaves like Stripe's API v1, as far as it is
    /// [documented](https://docs.stripe.com/api/idempotent_requests):
    ///
    /// - requests with the method POST may have a key, of up to 255 characters, all of which count
    ///   (quotes, too);
    /// - once the handler has run, its response is stored with any status, even of a failure (whose
    ///   transaction is rolled back), and replayed for 24 hours with the header
    ///   `Idempotent-Replayed: true`;
    /// - a different request with the same key is answered with 400, a request while the first is
    ///   in progress with 409.
    ///
    /// Differences: problems are `application/problem+json`, a key belongs to its sender, a request
    /// that ended with [`conflict`](super#conflict) is not stored, and under a lease an error is
    /// stored only if it is a [refusal](Self::refusals).
    pub fn stripe_v1(
        idempotency: Idempotency,
        principal: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        let mut layer = Self::new(idempotency.retention(Duration::from_secs(24 * 60 * 60)), principal);
        layer.0.methods = vec![Method::POST];
        layer.0.reading = Reading::Literal;
        layer.0.mismatch = StatusCode::BAD_REQUEST;
        layer.store_if(|_| true)
    }

    fn with_scope(idempotency: Idempotency, key_scope: KeyScope) -> Self {
        Self(Settings {
            idempotency,
            key_scope,
            methods: vec![Method::POST, Method::PATCH],
            required: false,
            leased: false,
            detached: false,
            stores_request: false,
            header: key_header::IDEMPOTENCY_KEY,
            reading: Reading::Draft,
            mismatch: StatusCode::UNPROCESSABLE_ENTITY,
            request_limit: REQUEST_LIMIT,
            comparison: Comparison::new(),
            policy: Policy::new(),
        })
    }

    /// Requires a key: requests without one are answered with [`key-missing`](super#key-missing).
    /// By default, requests without a key reach the handler.
    ///
    /// A request with a key and a method that is neither safe nor one of [those](Self::methods) is
    /// answered with [`key-not-supported`](super#key-not-supported). A handler that succeeds
    /// without the extractor [`Idempotent`](super::Idempotent) has ignored the key: this is logged,
    /// and answered with [`not-set-up`](super#not-set-up).
    pub fn required(mut self) -> Self {
        self.0.required = true;
        self
    }

    /// Sets the request header with the key: `Idempotency-Key` by default.
    pub fn header(mut self, name: HeaderName) -> Self {
        self.0.header = name;
        self
    }

    /// Sets the methods with keys: POST and PATCH by default. Requests with other methods pass
    /// unchanged.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.0.methods = methods.into_iter().collect();
        self
    }

    /// Runs the services inside the layer under a lease, as
    /// [`Idempotent::run_leased`](super::Idempotent::run_leased) does. The handler finds the
    /// attempt as `Extension<Arc<Attempt>>`, and a call of a provider needs its
    /// [key](crate::idempotency::Attempt::provider_key).
    pub fn leased(mut self) -> Self {
        self.0.leased = true;
        self
    }

    /// Finishes a request with a key even if the client disconnects: from the claim on, the request
    /// runs in a task of its own. By default the services inside the layer are dropped with the
    /// connection, and their open transactions are rolled back.
    ///
    /// The task does not keep the process alive: let the server end before its runtime does.
    /// Task-local values, such as the scope of an [`Owner`](crate::Owner), are not passed on; the
    /// `tracing` span is.
    pub fn detached(mut self) -> Self {
        self.0.detached = true;
        self
    }

    /// Resumes requests that came over HTTP under a lease, as [`Idempotency::resume`], and stores
    /// the response of the work, which later requests with the key receive. After a status that [is
    /// not stored](Self::store_if), a client or server error that is no [refusal](Self::refusals),
    /// or an error of the work, the outcome stays unknown.
    ///
    /// # Errors
    ///
    /// As [`Idempotency::resume`].
    ///
    /// # Cancel safety
    ///
    /// As [`Idempotency::resume`].
    pub async fn resume<R, E, F>(&self, work: F) -> crate::error::Result<Resumed>
    where
        R: IntoResponse,
        E: std::fmt::Display,
        F: AsyncFnOnce(&Attempt) -> Result<R, E> + Clone,
    {
        let policy = &self.0.policy;
        let idempotency = self.0.idempotency.clone().result_limit(usize::MAX);
        idempotency.resume(async move |attempt: &Attempt| resume_work(policy, attempt, work).await).await
    }

    /// Stores the body of each request under a lease with its record, so that
    /// [`resume`](Self::resume) gives it to the [attempt](Attempt::request). The body is deleted
    /// once the request has ended. If a [fingerprint](Self::fingerprint) of your own
    /// [stores](Fingerprint::with_request) another request, that one is stored instead.
    pub fn store_request(mut self) -> Self {
        self.0.stores_request = true;
        self
    }

    /// Limits the body of a request with a key, which is read into memory: 1 MiB by default. A
    /// longer body is answered with [`request-too-large`](super#request-too-large), before anything
    /// is claimed.
    pub fn request_limit(mut self, bytes: usize) -> Self {
        self.0.request_limit = bytes;
        self
    }

    /// Limits the body of a stored response: 1 MiB by default. [A longer
    /// body](super#response-too-large) rolls the effect back.
    pub fn response_limit(mut self, bytes: usize) -> Self {
        self.0.policy.limit = bytes;
        self
    }

    /// Sets the statuses of responses that are stored: 200 to 399 by default. Under a lease, a
    /// client or server error is stored only if it is a [refusal](Self::refusals) too, because any
    /// other leaves the outcome [unknown](super#outcome-unknown). So store 402 if a card that was
    /// declined stays declined: repeated requests receive that answer, also after a
    /// [step](crate::idempotency::Attempt::step).
    pub fn store_if(mut self, stores: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> Self {
        self.0.policy.store_if = Arc::new(stores);
        self
    }

    /// Sets, for requests under a lease, the statuses that mean that nothing was done, so the key
    /// is free again, or the refusal is [stored](Self::store_if). By default 400 to 406, 410 to
    /// 417, 422, 428 and 431. The outcome of a request with any other error, or with another
    /// response that is not stored, is [unknown](super#outcome-unknown).
    ///
    /// The next request with a key that is free again has the same [provider
    /// key](crate::idempotency::Attempt::provider_key), so a provider that stores refusals answers
    /// with the first refusal: after a declined card, the client needs a new key.
    ///
    /// # Errors
    ///
    /// [`Error::NoRefusal`](crate::Error::NoRefusal) for a status outside 400 to 499, and for 408,
    /// 409, 425, 429 and 499: a handler that timed out, or passes on a provider's response, may
    /// have had an effect.
    pub fn refusals(mut self, statuses: impl IntoIterator<Item = StatusCode>) -> crate::error::Result<Self> {
        self.0.policy.set_refusals(statuses)?;
        Ok(self)
    }

    /// Stores one more header of responses, besides [these](super#what-is-stored). `Set-Cookie` is
    /// never stored.
    pub fn keep_header(mut self, name: HeaderName) -> Self {
        self.0.policy.headers.push(name);
        self
    }

    /// Compares bodies as JSON, as [`Fingerprint::and_json`]. A body that is not JSON counts by its
    /// bytes, as by default.
    pub fn json(mut self) -> Self {
        self.0.comparison.body = BodyRule::Json;
        self
    }

    /// Compares only these parts of JSON bodies, each given as a JSON Pointer: see
    /// [`Fingerprint::and_json_fields`]. A body that is not JSON counts by its bytes.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`](crate::Error::InvalidKey): a text that is not a JSON Pointer.
    pub fn json_fields<P: Into<String>>(mut self, pointers: impl IntoIterator<Item = P>) -> crate::error::Result<Self> {
        let pointers: Vec<String> = pointers.into_iter().map(Into::into).collect();
        pointers.iter().try_for_each(|pointer| check_pointer(pointer))?;
        self.0.comparison.body = BodyRule::Fields(pointers);
        Ok(self)
    }

    /// Compares the host of requests as well. By default, requests to different host names of the
    /// server are equal.
    pub fn compare_host(mut self) -> Self {
        self.0.comparison.host = true;
        self
    }

    /// Compares a header of requests as well, byte for byte: for example `Content-Type`, or the
    /// version of the API that a client asks for.
    pub fn compare_header(mut self, name: HeaderName) -> Self {
        self.0.comparison.headers.push(name);
        self
    }

    /// Sets the fingerprint of a request, which replaces the method, path and query, body, host and
    /// headers.
    pub fn fingerprint(mut self, rule: impl Fn(&Parts, &Bytes) -> Fingerprint + Send + Sync + 'static) -> Self {
        self.0.comparison.custom = Some(Arc::new(rule));
        self
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("idempotency", &self.0.idempotency)
            .field("methods", &self.0.methods)
            .field("required", &self.0.required)
            .field("leased", &self.0.leased)
            .field("detached", &self.0.detached)
            .finish_non_exhaustive()
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotencyService::new(Arc::new(self.0.clone()), inner)
    }
}
