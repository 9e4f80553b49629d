//! The extractor with which a handler runs its effect once.

use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::http::request::Parts;
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use sqlx::{Pool, Transaction};

use super::super::run::RunEnd;
use super::super::{Attempt, Fingerprint, Idempotency, IdempotencyKey, Outcome};
use super::answer::{Answer, Policy, is_failure};
use super::problem::Problem;
use super::rollback::RollbackReason;
use crate::backend::Database;
use crate::lease::run::while_held;
use crate::transaction::work_error::{RunError, WorkError, is_version_conflict};

/// Extracts a request with a key. The handler runs its effect with [`run`](Self::run) or
/// [`run_leased`](Self::run_leased), and returns their response. The
/// [layer](super::IdempotencyLayer) must be around the handler.
///
/// `Option<Idempotent>` is `None` for a request without a key; `Idempotent` rejects such a request
/// with [`key-missing`](super#key-missing). Without a layer, or with one that [runs the handler
/// under a lease](super::IdempotencyLayer::leased), both forms are rejected with
/// [`not-set-up`](super#not-set-up).
#[must_use = "the request takes effect in run, or run_leased"]
pub struct Idempotent(Arc<Prepared>);

/// A request with a key, as the layer has read it.
pub(super) struct Prepared {
    pub(super) idempotency: Idempotency,
    pub(super) policy: Policy,
    pub(super) mismatch: StatusCode,
    pub(super) key: IdempotencyKey,
    pub(super) fingerprint: Fingerprint,
    /// Whether the handler has extracted the request.
    pub(super) is_extracted: AtomicBool,
}

/// The request extension that the layer inserts for the extractors.
#[derive(Clone)]
pub(super) enum Slot {
    /// The request has no key in this header.
    NoKey(HeaderName),
    Key(Arc<Prepared>),
    /// The layer itself runs the request under a lease.
    Leased,
}

impl Idempotent {
    /// Runs the work once, in a transaction, and returns the response for this key: that of the
    /// work, the [stored](super#what-is-stored) one, or a [problem](super#problems).
    ///
    /// The claim on the key, the work's writes in the transaction, and its response are committed
    /// together, as by [`Idempotency::run`]; the closure follows the [rules of
    /// `Retry`](crate::retry::Retry). When the work returns an error, or a response that is not
    /// stored, the transaction is rolled back, the response is returned, and the key is free,
    /// unless a statement of the work [has ended the transaction](Idempotency::run) before.
    /// (Failures that [`store_if`](super::IdempotencyLayer::store_if) selects are stored in a
    /// separate transaction, after the rollback.)
    ///
    /// A concurrent change in every attempt is answered with [`conflict`](super#conflict), except a
    /// [version conflict](crate::Error::Conflict): the version may be the client's, so the response
    /// of the work is returned, and is not stored.
    ///
    /// The error is of a [type that shows its sources](crate::retry::WorkError), because the
    /// sources decide what is rerun. A wrapper of `anyhow::Error` shows them with [`AsRef`]:
    ///
    /// ```
    /// use axum::http::StatusCode;
    /// use axum::response::{IntoResponse, Response};
    ///
    /// struct AppError(anyhow::Error);
    ///
    /// impl<E: Into<anyhow::Error>> From<E> for AppError {
    ///     fn from(error: E) -> Self {
    ///         Self(error.into())
    ///     }
    /// }
    ///
    /// impl IntoResponse for AppError {
    ///     fn into_response(self) -> Response {
    ///         StatusCode::INTERNAL_SERVER_ERROR.into_response()
    ///     }
    /// }
    ///
    /// impl AsRef<dyn std::error::Error + Send + Sync> for AppError {
    ///     fn as_ref(&self) -> &(dyn std::error::Error + Send + Sync + 'static) {
    ///         self.0.as_ref()
    ///     }
    /// }
    ///
    /// # #[cfg(feature = "sqlite")]
    /// async fn charge(pool: sqlx::SqlitePool, idempotent: sqlock::idempotency::http::Idempotent) -> Response {
    ///     idempotent
    ///         .run(&pool, async |tx| {
    ///             sqlx::query("INSERT INTO charge (cents) VALUES (500)").execute(&mut **tx).await?;
    ///             Ok::<_, AppError>(StatusCode::CREATED)
    ///         })
    ///         .await
    /// }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Dropping the future, as when the client disconnects, rolls back an uncommitted transaction.
    /// A repeated request with the same key receives the outcome.
    ///
    /// # Panics
    ///
    /// When the closure panics; the transaction is rolled back.
    pub async fn run<DB, R, E, F, Marker>(self, pool: &Pool<DB>, work: F) -> Response
    where
        DB: Database,
        R: IntoResponse,
        E: IntoResponse + WorkError<Marker>,
        Marker: ?Sized,
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<R, E> + Clone,
    {
        let this = &*self.0;
        let transaction = async move |tx: &mut Transaction<'_, DB>| this.run_in_transaction(tx, work).await;
        match this.unbounded().run_once(pool, &this.key, &this.fingerprint, transaction).await {
            Ok(outcome) => this.outcome_response(outcome),
            Err(RunEnd::Failed(RunError::Work { error, .. })) => match error {
                // Only a failure may be replayed, because nothing took effect.
                RollbackReason::Work(error) => match error.into_response() {
                    response if is_failure(response.status()) => this.store_failure(pool, response).await,
                    response => response,
                },
                RollbackReason::Answered(response) => this.store_failure(pool, *response).await,
                RollbackReason::NotStorable(problem) => problem.into_response(),
                RollbackReason::Sqlock(error) => Problem::from_error(&error).into_response(),
            },
            // The client may have sent the version, so the handler answers.
            Err(RunEnd::Exhausted(RunError::Work { error: RollbackReason::Work(error), .. }))
                if is_version_conflict(error.as_error()) =>
            {
                error.into_response()
            }
            Err(error) => run_problem(error).into_response(),
        }
    }

    /// Runs the work [under a lease](Idempotency::attempt), and returns the response for this key,
    /// as [`run`](Self::run) does. For effects elsewhere, such as at a payment provider. They
    /// cannot be rolled back, so the status of the response decides about the key, unless the work
    /// has [recorded the outcome](Attempt::forget):
    ///
    /// - a status that [is stored](super::IdempotencyLayer::store_if), and is no error or a
    ///   [refusal](super::IdempotencyLayer::refusals): the request is done, and later requests
    ///   receive the response;
    /// - a refusal that is not stored: the request had no effect, and the key is free. After a
    ///   [step](Attempt::step), in a later attempt, or when the database did not answer the first
    ///   statement of the attempt at once, the outcome is unknown;
    /// - any other status (408, 409, 425, 429, 499 and 500 to 599 always, whatever is stored), and
    ///   an error with the status of a success: the outcome is [unknown](Attempt::unknown), and
    ///   later requests receive [`outcome-unknown`](super#outcome-unknown) until the request is
    ///   [resumed](Idempotency::resume). The same holds for a response that cannot be stored.
    ///
    /// The work must not [complete](Attempt::complete) the attempt, because the response is its
    /// result. When the lease is lost, the work is dropped, and the response is
    /// [`in-progress`](super#in-progress); work that panics counts as dead. A repeated request
    /// continues both.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future, as when the client disconnects, releases the lease. A repeated request
    /// with the same key continues.
    pub async fn run_leased<R, E, F>(self, work: F) -> Response
    where
        R: IntoResponse,
        E: IntoResponse,
        F: AsyncFnOnce(&Attempt) -> Result<R, E>,
    {
        let attempt = match self.0.attempt().await {
            Ok(attempt) => attempt,
            Err(response) => return response,
        };
        let answered = async {
            Ok::<_, Infallible>(match work(&attempt).await {
                Ok(response) => (response.into_response(), true),
                Err(error) => (error.into_response(), false),
            })
        };
        let response = self.0.record(&attempt, answered).await;
        release_attempt(attempt).await;
        match response {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}

/// Runs the work of [`IdempotencyLayer::resume`](super::IdempotencyLayer::resume), and returns its
/// response for the record.
pub(super) async fn resume_work<R, E, F>(
    policy: &Policy,
    attempt: &Attempt,
    work: F,
) -> Result<Answer, RollbackReason<E>>
where
    R: IntoResponse,
    F: AsyncFnOnce(&Attempt) -> Result<R, E>,
{
    let response = work(attempt).await.map_err(RollbackReason::Work)?.into_response();
    if !policy.stores_leased(response.status()) {
        return Err(RollbackReason::Answered(Box::new(response)));
    }
    Answer::from_response(response, policy)
        .await
        .map_err(|problem| RollbackReason::Answered(Box::new(problem.into_response())))
}

/// Omits the key, which may be a secret.
impl fmt::Debug for Idempotent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotent").field("idempotency", &self.0.idempotency).finish_non_exhaustive()
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Idempotent {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Response> {
        slot(parts)?.ok_or_else(|| match parts.extensions.get() {
            Some(Slot::NoKey(header)) => Problem::KeyMissing.into_response_about(header),
            _ => Problem::KeyMissing.into_response(),
        })
    }
}

impl<S: Send + Sync> OptionalFromRequestParts<S> for Idempotent {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Option<Self>, Response> {
        slot(parts)
    }
}

#[allow(clippy::result_large_err, reason = "as a rejection is")]
fn slot(parts: &Parts) -> Result<Option<Idempotent>, Response> {
    let detail = match parts.extensions.get() {
        Some(Slot::Key(prepared)) => {
            prepared.is_extracted.store(true, Ordering::Relaxed);
            return Ok(Some(Idempotent(Arc::clone(prepared))));
        }
        Some(Slot::NoKey(_)) => return Ok(None),
        Some(Slot::Leased) => "the handler runs under a lease already",
        None => "no layer is around the handler",
    };
    tracing::error!(detail, "an idempotent request cannot be extracted");
    Err(Problem::NotSetUp(detail).into_response())
}

impl Prepared {
    /// Returns the handle without a limit of its own; the policy limits the body of a response.
    fn unbounded(&self) -> Idempotency {
        self.idempotency.clone().result_limit(usize::MAX)
    }

    /// Returns whether a handler has succeeded without extracting the key.
    pub(super) fn is_ignored_by(&self, response: &Response) -> bool {
        !self.is_extracted.load(Ordering::Relaxed) && !is_failure(response.status())
    }

    /// Runs the work, and encodes its response for the record.
    async fn run_in_transaction<DB, R, E, F, Marker>(
        &self,
        tx: &mut Transaction<'_, DB>,
        work: F,
    ) -> Result<Answer, RunError<RollbackReason<E>>>
    where
        DB: Database,
        R: IntoResponse,
        E: WorkError<Marker>,
        Marker: ?Sized,
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<R, E>,
    {
        let rolled_back = |error| RunError::Work { error, as_error: RollbackReason::as_error };
        let response = work(tx).await.map_err(|error| rolled_back(RollbackReason::Work(error)))?.into_response();
        if is_failure(response.status()) || !self.policy.stores(response.status()) {
            return Err(rolled_back(RollbackReason::Answered(Box::new(response))));
        }
        Answer::from_response(response, &self.policy).await.map_err(|problem| {
            tracing::error!(?problem, "rolled back a transaction, because its response cannot be stored");
            rolled_back(RollbackReason::NotStorable(problem))
        })
    }

    /// Stores a failure after its transaction was rolled back, if the policy says so.
    async fn store_failure<DB: Database>(&self, pool: &Pool<DB>, response: Response) -> Response {
        if !self.policy.stores(response.status()) {
            return response;
        }
        let answer = match Answer::from_response(response, &self.policy).await {
            Ok(answer) => answer,
            Err(problem) => return problem.into_response(),
        };
        // The transaction has no other writes.
        let answer = &answer;
        let nothing = async move |_: &mut Transaction<'_, DB>| Ok::<_, RunError<Infallible>>(answer.clone());
        match self.unbounded().run_once(pool, &self.key, &self.fingerprint, nothing).await {
            Ok(outcome) => self.outcome_response(outcome),
            Err(error) => run_problem(error).into_response(),
        }
    }

    fn problem_of<N, R>(&self, outcome: &Outcome<N, R>) -> Option<Problem> {
        Problem::from_outcome(outcome, self.mismatch, self.key.is_issued())
    }

    /// Counts the outcome of a request in one transaction, and returns its response.
    fn outcome_response(&self, outcome: Outcome<Answer>) -> Response {
        let outcome = outcome.measured();
        match (self.problem_of(&outcome), outcome) {
            (Some(problem), _) => problem.into_response(),
            (None, Outcome::New(answer)) => answer.into_first(),
            (None, Outcome::Replay(answer)) => answer.into_replay(),
            (None, _) => Problem::InProgress.into_response(),
        }
    }

    /// Begins an attempt, or returns the response without one.
    #[allow(clippy::result_large_err, reason = "it is what is answered")]
    pub(super) async fn attempt(&self) -> Result<Arc<Attempt>, Response> {
        match self.idempotency.attempt(&self.key, &self.fingerprint).await {
            Ok(Outcome::New(attempt)) => Ok(Arc::new(attempt)),
            Ok(Outcome::Replay(stored)) => Err(match stored.get::<Answer>() {
                Ok(answer) => answer.into_replay(),
                Err(error) => Problem::from_error(&error).into_response(),
            }),
            Ok(other) => Err(self.problem_of(&other).unwrap_or(Problem::InProgress).into_response()),
            Err(error) => Err(Problem::from_error(&error).into_response()),
        }
    }

    /// Waits, while the lease is held, for the response and whether the work succeeded, and records
    /// the outcome of the attempt.
    pub(super) async fn record<X>(
        &self,
        attempt: &Attempt,
        answered: impl Future<Output = Result<(Response, bool), X>>,
    ) -> Result<Response, X> {
        let lease = attempt.lease();
        let (response, succeeded) = match while_held(answered, || lease.is_held(), lease.lost()).await {
            Ok(Ok(answered)) => answered,
            Ok(Err(error)) => {
                attempt.mark_unknown().await;
                return Err(error);
            }
            // The new holder of the lease continues the request.
            Err(_lost) => return Ok(Problem::InProgress.into_response()),
        };
        let status = response.status();
        match attempt.has_ended().await {
            Ok(true) => return Ok(response),
            Ok(false) => {}
            Err(error) => {
                attempt.mark_unknown().await;
                return Ok(Problem::from_error_after_work(&error).into_response());
            }
        }
        if !self.policy.stores_leased(status) || !(succeeded || is_failure(status)) {
            if !self.policy.is_refusal(status) {
                attempt.mark_unknown().await;
            } else if let Err(error) = attempt.refuse().await {
                tracing::warn!(error = %error.report(), "could not record that a request was refused");
            }
            return Ok(response);
        }
        // A streamed body is work of the handler.
        let answer = Answer::from_response(response, &self.policy);
        Ok(match while_held(answer, || lease.is_held(), lease.lost()).await {
            Ok(Ok(answer)) => match attempt.store(&answer).await {
                Ok(()) => answer.into_first(),
                Err(error) => {
                    attempt.mark_unknown().await;
                    Problem::from_error_after_work(&error).into_response()
                }
            },
            Err(_lost) => Problem::InProgress.into_response(),
            Ok(Err(problem)) => {
                tracing::error!(
                    ?problem,
                    "the outcome of a request is recorded as unknown, because its response cannot be stored"
                );
                attempt.mark_unknown().await;
                problem.into_response()
            }
        })
    }
}

/// Releases the lease, unless the handler still has the attempt, whose drop releases the lease.
pub(super) async fn release_attempt(attempt: Arc<Attempt>) {
    if let Some(attempt) = Arc::into_inner(attempt) {
        attempt.release().await;
    }
}

fn run_problem<E>(error: RunEnd<E>) -> Problem {
    match error {
        RunEnd::Exhausted(_) => Problem::Conflict,
        RunEnd::CommitUnknown(_) => Problem::CommitUnknown,
        RunEnd::Failed(RunError::Sqlock(error)) => Problem::from_error(&error),
        RunEnd::Failed(RunError::Work { .. }) => Problem::StoreUnavailable,
    }
}
