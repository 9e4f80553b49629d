//! The service inside the layer: it reads the key and the body of a request before the handler
//! runs, and stores the response.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::request::Parts;
use axum::http::{HeaderName, Method, Request, StatusCode};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::task::JoinError;
use tower_service::Service;
use tracing::Instrument as _;

use super::super::{Idempotency, IdempotencyKey};
use super::answer::Policy;
use super::comparison::Comparison;
use super::idempotent::{Prepared, Slot, release_attempt};
use super::key_header::{self, Reading};
use super::problem::Problem;

type PrincipalOf = dyn Fn(&Parts) -> Option<String> + Send + Sync;

/// The settings of a layer.
#[derive(Clone)]
pub(super) struct Settings {
    pub(super) idempotency: Idempotency,
    pub(super) key_scope: KeyScope,
    pub(super) methods: Vec<Method>,
    pub(super) required: bool,
    pub(super) leased: bool,
    pub(super) detached: bool,
    pub(super) stores_request: bool,
    pub(super) header: HeaderName,
    pub(super) reading: Reading,
    pub(super) mismatch: StatusCode,
    pub(super) request_limit: usize,
    pub(super) comparison: Comparison,
    pub(super) policy: Policy,
}

/// The principals that keys belong to.
#[derive(Clone)]
pub(super) enum KeyScope {
    Global,
    Principal(Arc<PrincipalOf>),
    /// The keys are tokens that were issued to the principal.
    Issued(Arc<PrincipalOf>),
}

/// A service inside an [`IdempotencyLayer`](super::IdempotencyLayer).
#[derive(Clone)]
pub struct IdempotencyService<S> {
    settings: Arc<Settings>,
    inner: S,
}

impl<S> IdempotencyService<S> {
    pub(super) fn new(settings: Arc<Settings>, inner: S) -> Self {
        Self { settings, inner }
    }
}

impl<S> fmt::Debug for IdempotencyService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyService").field("idempotency", &self.settings.idempotency).finish_non_exhaustive()
    }
}

impl<S> Service<Request<Body>> for IdempotencyService<S>
where
    S: Service<Request<Body>, Response = Response> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
{
    type Response = Response;
    type Error = S::Error;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // Calls the service that is ready, and leaves a clone in its place.
        let clone = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, clone);
        Box::pin(handle(Arc::clone(&self.settings), inner, request))
    }
}

async fn handle<S>(settings: Arc<Settings>, mut inner: S, request: Request<Body>) -> Result<Response, S::Error>
where
    S: Service<Request<Body>, Response = Response> + Send + 'static,
    S::Future: Send,
    S::Error: Send + 'static,
{
    let (mut parts, body) = request.into_parts();
    let key = match settings.read_key(&parts) {
        Ok(Some(key)) => key,
        Ok(None) => {
            parts.extensions.insert(Slot::NoKey(settings.header.clone()));
            return inner.call(Request::from_parts(parts, body)).await;
        }
        Err(problem) => return Ok(problem.into_response_about(&settings.header)),
    };
    let body = match settings.read_body(body).await {
        Ok(body) => body,
        Err(problem) => return Ok(problem.into_response()),
    };
    let (mut idempotency, mut fingerprint) =
        (settings.idempotency.clone(), settings.comparison.fingerprint_of(&parts, &body));
    if settings.stores_request && fingerprint.request.is_none() {
        fingerprint = fingerprint.with_request(body.clone());
        // The layer limits the body itself.
        idempotency = idempotency.request_limit(usize::MAX);
    }
    let prepared = Arc::new(Prepared {
        fingerprint,
        key,
        idempotency,
        policy: settings.policy.clone(),
        mismatch: settings.mismatch,
        is_extracted: AtomicBool::new(false),
    });
    let request = Request::from_parts(parts, Body::from(body));
    let is_detached = settings.detached;
    let answered = answer(settings, inner, request, prepared);
    if !is_detached {
        return answered.await;
    }
    match tokio::spawn(answered.in_current_span()).await.map_err(JoinError::try_into_panic) {
        Ok(answered) => answered,
        Err(Ok(panic)) => std::panic::resume_unwind(panic),
        // The runtime is ending.
        Err(Err(_)) => Ok(Problem::CommitUnknown.into_response()),
    }
}

/// Calls the service, under a lease if the layer says so.
async fn answer<S>(
    settings: Arc<Settings>,
    mut inner: S,
    mut request: Request<Body>,
    prepared: Arc<Prepared>,
) -> Result<Response, S::Error>
where
    S: Service<Request<Body>, Response = Response>,
{
    if !settings.leased {
        request.extensions_mut().insert(Slot::Key(Arc::clone(&prepared)));
        let response = inner.call(request).await?;
        return Ok(match settings.required && prepared.is_ignored_by(&response) {
            true => Problem::key_ignored().into_response(),
            false => response,
        });
    }
    let attempt = match prepared.attempt().await {
        Ok(attempt) => attempt,
        Err(response) => return Ok(response),
    };
    request.extensions_mut().insert(Slot::Leased);
    request.extensions_mut().insert(Arc::clone(&attempt));
    let answered = inner.call(request);
    // The status says whether the handler succeeded.
    let answered = async { answered.await.map(|response| (response, true)) };
    let answered = prepared.record(&attempt, answered).await;
    release_attempt(attempt).await;
    answered
}

impl Settings {
    /// Returns the key of a request, if there is one.
    fn read_key(&self, parts: &Parts) -> Result<Option<IdempotencyKey>, Problem> {
        if !self.methods.contains(&parts.method) {
            let is_meant = self.required && !parts.method.is_safe() && parts.headers.contains_key(&self.header);
            return if is_meant { Err(Problem::KeyNotSupported) } else { Ok(None) };
        }
        let key = key_header::read(&parts.headers, &self.header, self.reading).map_err(Problem::KeyMalformed)?;
        let Some(key) = key else {
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
        // A body that announces its length need not be read.
        if body.size_hint().lower() > self.request_limit as u64 {
            return Err(Problem::RequestTooLarge);
        }
        match Limited::new(body, self.request_limit).collect().await {
            Ok(read) => Ok(read.to_bytes()),
            Err(error) if is_too_long(&*error) => Err(Problem::RequestTooLarge),
            Err(_) => Err(Problem::RequestIncomplete),
        }
    }
}

/// Returns whether this layer's limit, or that of an outer layer, was exceeded.
fn is_too_long(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source()).any(|error| error.is::<LengthLimitError>())
}
