//! The layer, which reads the key and the request before the handler runs.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::OriginalUri;
use axum::http::request::Parts;
use axum::http::{HeaderName, Method, Request, StatusCode};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tower_layer::Layer;
use tower_service::Service;

use super::super::{Attempt, Fingerprint, Idempotency, IdempotencyKey, Resumed};
use super::answer::Policy;
use super::idempotent::{Prepared, Slot, release_attempt, resume_work};
use super::key_header::{self, Reading};
use super::problem::Problem;

/// Reads the `Idempotency-Key` of requests, for handlers that take effect once. See the [module](super).
///
/// Whose key it is must be told: by a closure that finds whoever was authenticated in the request, so the layer belongs
/// inside of the one that authenticates. [`global`](Self::global) says that keys are the same for everybody.
#[derive(Clone)]
#[must_use = "a layer does nothing until it is put around a handler"]
pub struct IdempotencyLayer(Settings);

type PrincipalOf = dyn Fn(&Parts) -> Option<String> + Send + Sync;
type FingerprintOf = dyn Fn(&Parts, &Bytes) -> Fingerprint + Send + Sync;

#[derive(Clone)]
struct Settings {
    store: Idempotency,
    key_scope: KeyScope,
    methods: Vec<Method>,
    required: bool,
    leased: bool,
    reading: Reading,
    mismatch: StatusCode,
    request_limit: usize,
    fingerprint: FingerprintRule,
    policy: Policy,
}

/// Whose the keys are.
#[derive(Clone)]
enum KeyScope {
    Global,
    Principal(Arc<PrincipalOf>),
    /// The keys are tokens that were issued to them.
    Issued(Arc<PrincipalOf>),
}

/// What of the body makes the request another one.
#[derive(Clone)]
enum FingerprintRule {
    Bytes,
    Json,
    Fields(Vec<String>),
    Custom(Arc<FingerprintOf>),
}

impl IdempotencyLayer {
    /// Keys belong to principals: the closure tells who sends a request. `None`: nobody who is known, and a request that
    /// comes with a key is answered with [`principal-missing`](super#principal-missing).
    pub fn new(store: Idempotency, principal: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self::with_scope(store, KeyScope::Principal(Arc::new(principal)))
    }

    /// Keys are the same whoever sends them, and **whoever knows one is told the response**: for the identifiers of events that
    /// a provider sends, say.
    pub fn global(store: Idempotency) -> Self {
        Self::with_scope(store, KeyScope::Global)
    }

    /// Keys are tokens that were [issued](Idempotency::issue) to the principal; others, and those of others, are answered with
    /// [`token-not-valid`](super#token-not-valid).
    pub fn issued(store: Idempotency, principal: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self::with_scope(store, KeyScope::Issued(Arc::new(principal)))
    }

    /// As Stripe's API v1 behaves, as far as it is [documented](https://docs.stripe.com/api/idempotent_requests):
    ///
    /// - requests with the method POST may have a key, of up to 255 characters, all of which count (quotes, too);
    /// - once the handler has run, its response is stored whatever its status, failures included (whose transaction is
    ///   rolled back nevertheless), and told for 24 hours with the header `Idempotent-Replayed: true`;
    /// - another request with the same key is answered with 400, one while the first is in progress with 409.
    ///
    /// Not as there: problems are `application/problem+json`, a key belongs to whoever sends it, and a request that met
    /// [`conflict`](super#conflict)s until it gave up is not stored.
    pub fn stripe_v1(store: Idempotency, principal: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        let mut layer = Self::new(store.retention(Duration::from_secs(24 * 60 * 60)), principal);
        layer.0.methods = vec![Method::POST];
        layer.0.reading = Reading::Literal;
        layer.0.mismatch = StatusCode::BAD_REQUEST;
        layer.store_if(|_| true)
    }

    fn with_scope(store: Idempotency, key_scope: KeyScope) -> Self {
        Self(Settings {
            store,
            key_scope,
            methods: vec![Method::POST, Method::PATCH],
            required: false,
            leased: false,
            reading: Reading::Draft,
            mismatch: StatusCode::UNPROCESSABLE_ENTITY,
            request_limit: 1 << 20,
            fingerprint: FingerprintRule::Bytes,
            policy: Policy::new(),
        })
    }

    /// Requests without a key are answered with [`key-missing`](super#key-missing). By default they reach the handler.
    pub fn required(mut self) -> Self {
        self.0.required = true;
        self
    }

    /// To which methods all this applies: POST and PATCH by default. Others pass, key or not.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.0.methods = methods.into_iter().collect();
        self
    }

    /// Runs all that is inside of the layer under a lease, as [`Idempotent::run_leased`](super::Idempotent::run_leased) does,
    /// without the handler's knowing. It may take the attempt as `Extension<Arc<Attempt>>`, and must when it calls a provider,
    /// whose [key](crate::idempotency::Attempt::provider_key) is there.
    pub fn leased(mut self) -> Self {
        self.0.leased = true;
        self
    }

    /// As [`Idempotency::resume`], for what came over HTTP under a lease: takes up what has not ended, and stores the response that
    /// the work makes, which is told to those who come with the key. One whose status [is not stored](Self::store_if), or an
    /// error, leaves it unknown.
    ///
    /// # Errors
    ///
    /// As [`Idempotency::resume`].
    ///
    /// # Cancel safety
    ///
    /// As [`Idempotency::resume`].
    pub async fn resume<R, E, F>(&self, work: F) -> crate::Result<Resumed>
    where
        R: IntoResponse,
        E: std::error::Error + 'static,
        F: AsyncFnOnce(&Attempt) -> Result<R, E> + Clone,
    {
        let policy = &self.0.policy;
        let store = self.0.store.clone().result_limit(usize::MAX);
        store.resume(async move |attempt: &Attempt| resume_work(policy, attempt, work).await).await
    }

    /// How many bytes the body of a request with a key may have, which is held in memory: 1 MiB by default. A longer one is
    /// answered with [`request-too-large`](super#request-too-large), before anything is claimed.
    pub fn request_limit(mut self, bytes: usize) -> Self {
        self.0.request_limit = bytes;
        self
    }

    /// How many bytes the body of a response may have that is to be stored: 1 MiB by default.
    /// [A longer one](super#response-too-large) undoes the effect.
    pub fn response_limit(mut self, bytes: usize) -> Self {
        self.0.policy.limit = bytes;
        self
    }

    /// Which responses are stored, by their status: 200 to 399 by default.
    pub fn store_if(mut self, stores: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> Self {
        self.0.policy.store_if = Arc::new(stores);
        self
    }

    /// Under a lease, which responses say that nothing was done, by their status, so that the key is free again. By default 400 to 406,
    /// 410 to 417, 422, 428 and 431. The outcome of a request with any other response that is not [stored](Self::store_if) is
    /// [unknown](super#outcome-unknown).
    ///
    /// # Errors
    ///
    /// [`Error::NoRefusal`](crate::Error::NoRefusal) for a status outside 400 to 499, and for 408, 409, 425, 429 and 499: a handler
    /// that timed out, or passes on what a provider answered, may have taken effect.
    pub fn refusals(mut self, statuses: impl IntoIterator<Item = StatusCode>) -> crate::Result<Self> {
        self.0.policy.set_refusals(statuses)?;
        Ok(self)
    }

    /// Stores one more header of responses, [beside these](super#what-is-stored). `Set-Cookie` never is.
    pub fn keep_header(mut self, name: HeaderName) -> Self {
        self.0.policy.headers.push(name);
        self
    }

    /// Bodies that mean the same as JSON are the same, as [`Fingerprint::and_json`] has it. One that is no JSON counts by its
    /// bytes, as all do by default.
    pub fn json(mut self) -> Self {
        self.0.fingerprint = FingerprintRule::Json;
        self
    }

    /// Of bodies only these parts count, each given as a JSON Pointer: see [`Fingerprint::and_json_fields`]. One that is no
    /// JSON counts by its bytes.
    pub fn json_fields<P: Into<String>>(mut self, pointers: impl IntoIterator<Item = P>) -> Self {
        self.0.fingerprint = FingerprintRule::Fields(pointers.into_iter().map(Into::into).collect());
        self
    }

    /// What makes a request another one, in place of its method, its path and query, and its body.
    pub fn fingerprint(mut self, rule: impl Fn(&Parts, &Bytes) -> Fingerprint + Send + Sync + 'static) -> Self {
        self.0.fingerprint = FingerprintRule::Custom(Arc::new(rule));
        self
    }
}

impl fmt::Debug for IdempotencyLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("store", &self.0.store)
            .field("methods", &self.0.methods)
            .field("required", &self.0.required)
            .field("leased", &self.0.leased)
            .finish_non_exhaustive()
    }
}

impl<S> Layer<S> for IdempotencyLayer {
    type Service = IdempotencyService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        IdempotencyService { settings: Arc::new(self.0.clone()), inner }
    }
}

/// A service inside an [`IdempotencyLayer`].
#[derive(Clone)]
pub struct IdempotencyService<S> {
    settings: Arc<Settings>,
    inner: S,
}

impl<S> fmt::Debug for IdempotencyService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyService").field("store", &self.settings.store).finish_non_exhaustive()
    }
}

impl<S> Service<Request<Body>> for IdempotencyService<S>
where
    S: Service<Request<Body>, Response = Response> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
{
    type Response = Response;
    type Error = S::Error;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // The one that is ready is used up, and a clone waits for its turn.
        let clone = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, clone);
        Box::pin(handle(Arc::clone(&self.settings), inner, request))
    }
}

async fn handle<S>(settings: Arc<Settings>, mut inner: S, request: Request<Body>) -> Result<Response, S::Error>
where
    S: Service<Request<Body>, Response = Response>,
{
    let (mut parts, body) = request.into_parts();
    let key = match settings.read_key(&parts) {
        Ok(Some(key)) => key,
        Ok(None) => {
            parts.extensions.insert(Slot::NoKey);
            return inner.call(Request::from_parts(parts, body)).await;
        }
        Err(problem) => return Ok(problem.into_response()),
    };
    let body = match settings.read_body(body).await {
        Ok(body) => body,
        Err(problem) => return Ok(problem.into_response()),
    };
    let prepared = Arc::new(Prepared {
        fingerprint: settings.fingerprint_of(&parts, &body),
        key,
        store: settings.store.clone(),
        policy: settings.policy.clone(),
        mismatch: settings.mismatch,
    });
    if !settings.leased {
        parts.extensions.insert(Slot::Key(prepared));
        return inner.call(Request::from_parts(parts, body.into())).await;
    }
    let attempt = match prepared.attempt().await {
        Ok(attempt) => attempt,
        Err(response) => return Ok(response),
    };
    parts.extensions.insert(Slot::Leased);
    parts.extensions.insert(Arc::clone(&attempt));
    let answered = inner.call(Request::from_parts(parts, body.into()));
    // Whether it succeeded, its status tells.
    let answered = async { answered.await.map(|response| (response, true)) };
    let answered = prepared.record(&attempt, answered).await;
    release_attempt(attempt).await;
    answered
}

impl Settings {
    /// The key of a request. `None`: all this does not apply to it.
    fn read_key(&self, parts: &Parts) -> Result<Option<IdempotencyKey>, Problem> {
        if !self.methods.contains(&parts.method) {
            return Ok(None);
        }
        let Some(key) = key_header::read(&parts.headers, self.reading).map_err(Problem::KeyMalformed)? else {
            return if self.required { Err(Problem::KeyMissing) } else { Ok(None) };
        };
        let find_principal = |principal: &PrincipalOf| {
            principal(parts).filter(|principal| !principal.is_empty()).ok_or(Problem::PrincipalMissing)
        };
        Ok(Some(match &self.key_scope {
            KeyScope::Global => IdempotencyKey::global(key),
            KeyScope::Principal(principal) => IdempotencyKey::new(find_principal(&**principal)?, key),
            KeyScope::Issued(principal) => IdempotencyKey::issued(find_principal(&**principal)?, key),
        }))
    }

    /// Reads a body to its end.
    async fn read_body(&self, body: Body) -> Result<Bytes, Problem> {
        // Who says so beforehand need not send it.
        if body.size_hint().lower() > self.request_limit as u64 {
            return Err(Problem::RequestTooLarge);
        }
        match Limited::new(body, self.request_limit).collect().await {
            Ok(read) => Ok(read.to_bytes()),
            Err(error) if is_too_long(&*error) => Err(Problem::RequestTooLarge),
            Err(_) => Err(Problem::RequestIncomplete),
        }
    }

    fn fingerprint_of(&self, parts: &Parts, body: &Bytes) -> Fingerprint {
        // As the client has sent it, wherever the handler is nested.
        let uri = parts.extensions.get().map_or(&parts.uri, |OriginalUri(uri)| uri);
        let target = uri.path_and_query().map_or("/", |target| target.as_str());
        let digest = |form: &str| Fingerprint::of([parts.method.as_str(), target, form]);
        let by_json = match &self.fingerprint {
            FingerprintRule::Custom(rule) => return rule(parts, body),
            FingerprintRule::Bytes => None,
            FingerprintRule::Json => digest("json").and_json(body).ok(),
            FingerprintRule::Fields(pointers) => {
                digest("fields").and_json_fields(body, pointers.iter().map(String::as_str)).ok()
            }
        };
        by_json.unwrap_or_else(|| digest("bytes").and(body))
    }
}

/// Whether it was this layer's limit, or that of one around it.
fn is_too_long(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(|error| error.is::<LengthLimitError>())
}
