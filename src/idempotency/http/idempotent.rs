//! What a handler takes to run its effect once.

use std::convert::Infallible;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use axum::extract::{FromRequestParts, OptionalFromRequestParts};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use sqlx::{Pool, Transaction};

use super::super::{Attempt, Fingerprint, Idempotency, IdempotencyKey, Outcome};
use super::answer::{Answer, Policy};
use super::problem::Problem;
use crate::backend::Database;
use crate::error::Error;
use crate::lease::run::while_held;
use crate::transaction::retry::RetryError;

/// A request that came with a key: a handler takes it to run its effect once, and answers what [`run`](Self::run) or
/// [`run_leased`](Self::run_leased) gives it. An extractor; the [layer](super::IdempotencyLayer) must be around the handler.
///
/// As `Option<Idempotent>` it is `None` where the request came without a key. Otherwise such a request is rejected with
/// [`key-missing`](super#key-missing). Where there is no layer, or one that [runs the handler under a
/// lease](super::IdempotencyLayer::leased), both forms are rejected with [`not-set-up`](super#not-set-up).
#[must_use = "the request takes effect in run, or run_leased"]
pub struct Idempotent(Arc<Prepared>);

/// What the layer has found out about a request.
pub(super) struct Prepared {
    pub(super) store: Idempotency,
    pub(super) policy: Policy,
    pub(super) mismatch: StatusCode,
    pub(super) key: IdempotencyKey,
    pub(super) fingerprint: Fingerprint,
}

/// What the layer leaves for the extractors.
#[derive(Clone)]
pub(super) enum Slot {
    NoKey,
    Key(Arc<Prepared>),
    /// The layer itself is at work on the key.
    Leased,
}

impl Idempotent {
    /// Does the work in a transaction, once, and makes the response to everybody who comes with this key: the work's own, or
    /// what was [stored](super#what-is-stored) of it before, or a [problem](super#problems).
    ///
    /// The claim on the key, what the work writes in the transaction, and its response are committed together, as by
    /// [`Idempotency::run`]; what a closure must keep to is told [there](crate::retry::Retry). When the work returns an error, or a
    /// response that is not to be stored, the transaction is rolled back, the response is passed on, and the key is as good as
    /// new. (Where [`store_if`](super::IdempotencyLayer::store_if) asks for failures to be stored, they are: by themselves, after
    /// the transaction has been rolled back.)
    ///
    /// # Cancel safety
    ///
    /// Dropping the future, as when the client has gone, rolls back what was not committed. Who asks again with the same key is
    /// told what became of it.
    ///
    /// # Panics
    ///
    /// When the closure does; the transaction is rolled back then.
    pub async fn run<DB, R, E, F>(self, pool: &Pool<DB>, work: F) -> Response
    where
        DB: Database,
        R: IntoResponse,
        E: IntoResponse + StdError + 'static,
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<R, E> + Clone,
    {
        let this = &*self.0;
        let transaction = async move |tx: &mut Transaction<'_, DB>| this.run_in_transaction(tx, work).await;
        match this.unbounded().run(pool, &this.key, &this.fingerprint, transaction).await {
            Ok(outcome) => this.outcome_response(outcome),
            // Only a failure is told again: whatever else it looks like, nothing took effect.
            Err(RetryError::Failed(RollbackReason::Work(error))) => match error.into_response() {
                response if is_failure(response.status()) => this.store_failure(pool, response).await,
                response => response,
            },
            Err(RetryError::Failed(RollbackReason::Answered(response))) => this.store_failure(pool, *response).await,
            Err(error) => run_problem(error).into_response(),
        }
    }

    /// Does the work [under a lease](Idempotency::attempt), and makes the response to everybody who comes with this key, as
    /// [`run`](Self::run) does. For effects elsewhere, at a payment provider say, which nothing here can roll back. So it depends
    /// on the response's status what becomes of the key, unless the work has [said so itself](Attempt::forget):
    ///
    /// - one that [is to be stored](super::IdempotencyLayer::store_if): it is done, and the response is told to all that follow;
    /// - one of the [refusals](super::IdempotencyLayer::refusals): the work says that it did nothing. The key is as good as new, unless
    ///   a [step](Attempt::step) was done, or it was not the first attempt: then nobody knows.
    /// - any other one (408, 409, 425, 429, 499 and 500 to 599 always), and an error that looks like a success: [nobody knows](Attempt::unknown), and all that follow are told [`outcome-unknown`](super#outcome-unknown)
    ///   until it is [resumed](Idempotency::resume). The same holds for a response that is to be stored and cannot be.
    ///
    /// The work must not [complete](Attempt::complete) the attempt: what is stored is the response. When the lease is lost, the
    /// work is dropped; work that panics counts as died, and whoever sends the request again takes it up.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future, as when the client has gone, gives the lease back. Who asks again with the same key takes it up.
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

/// The work of [`IdempotencyLayer::resume`](super::IdempotencyLayer::resume): its response, as it is stored.
pub(super) async fn resume_work<R, E, F>(
    policy: &Policy,
    attempt: &Attempt,
    work: F,
) -> Result<Answer, RollbackReason<E>>
where
    R: IntoResponse,
    E: StdError + 'static,
    F: AsyncFnOnce(&Attempt) -> Result<R, E>,
{
    let response = work(attempt).await.map_err(RollbackReason::Work)?.into_response();
    if !policy.stores(response.status()) {
        return Err(RollbackReason::Answered(Box::new(response)));
    }
    Answer::of(response, policy).await.map_err(|problem| RollbackReason::Answered(Box::new(problem.into_response())))
}

/// Without the key, which is nobody else's business.
impl fmt::Debug for Idempotent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotent").field("store", &self.0.store).finish_non_exhaustive()
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Idempotent {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Response> {
        slot(parts)?.ok_or_else(|| Problem::KeyMissing.into_response())
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
        Some(Slot::Key(prepared)) => return Ok(Some(Idempotent(Arc::clone(prepared)))),
        Some(Slot::NoKey) => return Ok(None),
        Some(Slot::Leased) => "the handler runs under a lease already",
        None => "no layer is around the handler",
    };
    tracing::error!(detail, "an idempotent request cannot be extracted");
    Err(Problem::NotSetUp(detail).into_response())
}

impl Prepared {
    /// The store, without a bound of its own: that on the body of a response is the policy's.
    fn unbounded(&self) -> Idempotency {
        self.store.clone().result_limit(usize::MAX)
    }

    /// What happens in the transaction.
    async fn run_in_transaction<DB, R, E, F>(
        &self,
        tx: &mut Transaction<'_, DB>,
        work: F,
    ) -> Result<Answer, RollbackReason<E>>
    where
        DB: Database,
        R: IntoResponse,
        E: StdError + 'static,
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<R, E>,
    {
        let response = work(tx).await.map_err(RollbackReason::Work)?.into_response();
        if is_failure(response.status()) || !self.policy.stores(response.status()) {
            return Err(RollbackReason::Answered(Box::new(response)));
        }
        Answer::of(response, &self.policy).await.map_err(|problem| {
            tracing::error!(?problem, "a transaction was rolled back, since its response cannot be stored");
            RollbackReason::Answered(Box::new(problem.into_response()))
        })
    }

    /// What is answered when the transaction was rolled back on account of this response.
    async fn store_failure<DB: Database>(&self, pool: &Pool<DB>, response: Response) -> Response {
        if !self.policy.stores(response.status()) {
            return response;
        }
        let answer = match Answer::of(response, &self.policy).await {
            Ok(answer) => answer,
            Err(problem) => return problem.into_response(),
        };
        // In a transaction in which nothing else happens.
        let answer = &answer;
        let nothing = async move |_: &mut Transaction<'_, DB>| Ok::<_, RollbackReason<Infallible>>(answer.clone());
        match self.unbounded().run(pool, &self.key, &self.fingerprint, nothing).await {
            Ok(outcome) => self.outcome_response(outcome),
            Err(error) => run_problem(error).into_response(),
        }
    }

    fn outcome_response(&self, outcome: Outcome<Answer>) -> Response {
        match (Problem::of_outcome(&outcome, self.mismatch), outcome) {
            (Some(problem), _) => problem.into_response(),
            (None, Outcome::New(answer)) => answer.into_first(),
            (None, Outcome::Replay(answer)) => answer.into_replay(),
            (None, _) => Problem::InProgress.into_response(),
        }
    }

    /// An attempt of ours, or what is answered if there is to be none.
    #[allow(clippy::result_large_err, reason = "it is what is answered")]
    pub(super) async fn attempt(&self) -> Result<Arc<Attempt>, Response> {
        match self.store.attempt(&self.key, &self.fingerprint).await {
            Ok(Outcome::New(attempt)) => Ok(Arc::new(attempt)),
            Ok(Outcome::Replay(stored)) => Err(match stored.get::<Answer>() {
                Ok(answer) => answer.into_replay(),
                Err(error) => Problem::of_error(&error).into_response(),
            }),
            Ok(other) => Err(Problem::of_outcome(&other, self.mismatch).unwrap_or(Problem::InProgress).into_response()),
            Err(error) => Err(Problem::of_error(&error).into_response()),
        }
    }

    /// Waits for the response, and whether the work has succeeded, while the lease is held, and records how the attempt ended.
    pub(super) async fn record<X>(
        &self,
        attempt: &Attempt,
        answered: impl Future<Output = Result<(Response, bool), X>>,
    ) -> Result<Response, X> {
        let lease = attempt.lease();
        let (response, succeeded) = match while_held(answered, || lease.is_held(), lease.lost()).await {
            Ok(Ok(answered)) => answered,
            Ok(Err(error)) => {
                mark_unknown(attempt).await;
                return Err(error);
            }
            // Whoever has it now is at work, or will be.
            Err(_lost) => return Ok(Problem::InProgress.into_response()),
        };
        let status = response.status();
        match attempt.has_ended().await {
            Ok(true) => return Ok(response),
            Ok(false) => {}
            Err(error) => return Ok(Problem::of_error(&error).into_response()),
        }
        if !self.policy.stores(status) || !(succeeded || is_failure(status)) {
            if !self.policy.is_refusal(status) {
                mark_unknown(attempt).await;
            } else if let Err(error) = attempt.refuse().await {
                tracing::warn!(%error, "it could not be recorded that a request was refused");
            }
            return Ok(response);
        }
        Ok(match Answer::of(response, &self.policy).await {
            Ok(answer) => match attempt.store(&answer).await {
                Ok(()) => answer.into_first(),
                Err(error) => Problem::of_error(&error).into_response(),
            },
            Err(problem) => {
                tracing::error!(
                    ?problem,
                    "what became of a request is kept as unknown, since its response cannot be stored"
                );
                mark_unknown(attempt).await;
                problem.into_response()
            }
        })
    }
}

/// If that fails as well, it counts as died.
async fn mark_unknown(attempt: &Attempt) {
    if let Err(error) = attempt.unknown().await {
        tracing::warn!(%error, "it could not be recorded that the outcome of a request is not known");
    }
}

/// Unless the handler has kept the attempt: then the lease goes back when that is dropped.
pub(super) async fn release_attempt(attempt: Arc<Attempt>) {
    if let Some(attempt) = Arc::into_inner(attempt) {
        attempt.release().await;
    }
}

/// The effect of what is answered like this never commits, whether or not the answer is stored.
fn is_failure(status: StatusCode) -> bool {
    status.is_client_error() || status.is_server_error()
}

fn run_problem<E: StdError + 'static>(error: RetryError<RollbackReason<E>>) -> Problem {
    match error {
        RetryError::Exhausted { .. } => Problem::Conflict,
        RetryError::CommitUnknown { .. } => Problem::CommitUnknown,
        RetryError::Failed(RollbackReason::Sqlock(error)) => Problem::of_error(&error),
        RetryError::Failed(_) => Problem::StoreUnavailable,
    }
}

/// Why a transaction was rolled back.
#[derive(Debug)]
pub(super) enum RollbackReason<E> {
    /// The work failed.
    Work(E),
    /// The work was done, and its response says that it is to be undone.
    Answered(Box<Response>),
    /// Something of this crate's own failed.
    Sqlock(Error),
}

impl<E: StdError> fmt::Display for RollbackReason<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work(error) => write!(f, "{error}"),
            Self::Answered(response) => write!(f, "answered with {}", response.status()),
            Self::Sqlock(error) => write!(f, "{error}"),
        }
    }
}

impl<E: StdError + 'static> StdError for RollbackReason<E> {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Work(error) => Some(error),
            Self::Answered(_) => None,
            Self::Sqlock(error) => Some(error),
        }
    }
}

impl<E> From<sqlx::Error> for RollbackReason<E> {
    fn from(error: sqlx::Error) -> Self {
        Self::Sqlock(error.into())
    }
}

impl<E> From<Error> for RollbackReason<E> {
    fn from(error: Error) -> Self {
        Self::Sqlock(error)
    }
}
