//! Runs work once, in a transaction of its own.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::{Pool, Transaction};
use tokio::time::Instant;

use super::handle::Idempotency;
use super::in_flight::Duplicate;
use super::key::{Fingerprint, IdempotencyKey};
use super::outcome::{Outcome, decode_outcome, encode_legibly};
use crate::backend::records::ClaimRequest;
use crate::backend::{Database, Kind};
use crate::backoff::Backoff;
use crate::error::{Error, Result, report};
use crate::transaction::retry::{AttemptEnd, Attempts};
use crate::transaction::work_error::{RunError, WorkError};

/// The pauses while a duplicate is in progress.
const IN_PROGRESS_BACKOFF: Backoff = Backoff::between(Duration::from_millis(5), Duration::from_millis(100));

/// The reason in [`Error::CommitUnknown`] after a statement of the work, or SQLite by itself, has
/// ended the transaction.
const ENDED_BEFORE_RESULT: &str = "the transaction ended before the result was stored, so later statements of the work may \
                                  have committed by themselves";

impl Idempotency {
    /// Runs the work once, in a transaction of its own, and replays its result to every later
    /// request with this key.
    ///
    /// The claim on the key is the transaction's first statement, the work's own follow, then the
    /// result is stored as JSON, and the transaction commits. When the work fails, everything is
    /// rolled back and the key is free, unless one of its statements has ended the transaction (see
    /// below). After a concurrent change, or a lost connection during the commit, the transaction
    /// is run again from the claim, which shows whether the work has taken effect
    /// ([`retry`](Self::retry) limits the attempts; the closure follows the [rules of
    /// `Retry`](crate::retry::Retry)).
    ///
    /// A statement of the work can end the transaction early. On MySQL and MariaDB, DDL and
    /// TRUNCATE commit it: the outcome is then [unknown](Outcome::Unknown). If the work fails after
    /// that, the call returns its error (unless that is a concurrent change), and later requests
    /// receive `Unknown`. On SQLite, a conflict of `INSERT OR ROLLBACK` or a full disk rolls it
    /// back, and later statements commit by themselves: the outcome is unknown, too, unless the
    /// work returns an error with which SQLite ends a transaction by itself (a full disk, an I/O
    /// error).
    ///
    /// The call costs two statements: the claim and the result. (Before the first use of a pool,
    /// two more compare its database with that of the client; on MySQL and MariaDB they compare
    /// only the names of the databases.) On MySQL and MariaDB another connection first looks for a
    /// duplicate in progress, because a claim would wait for the duplicate (on MySQL it waits for a
    /// duplicate of the same moment). On SQLite writers wait for each other, and fail after the
    /// busy timeout; within one process a duplicate is reported at once.
    ///
    /// # Errors
    ///
    /// The work's own error, unchanged, or an error of this crate in the work's [type](WorkError):
    /// [`Error::Unavailable`], [`Error::Access`], [`Error::NotMigrated`], [`Error::Database`],
    /// [`Error::Closed`], [`Error::InvalidKey`], [`Error::OutOfRange`], [`Error::ResultTooLarge`],
    /// [`Error::RequestTooLarge`], [`Error::Json`] when the result cannot be read back,
    /// [`Error::Sealed`] when it cannot be sealed, [`Error::Row`] with
    /// [`RowError::OtherPool`](crate::row::RowError::OtherPool) when the pool belongs to another
    /// database than the client; on MySQL and MariaDB [`Error::NotClaimed`] when a deadlock whose
    /// error the work ignored has rolled the claim back. Nothing took effect, unless a statement of
    /// the work has ended the transaction (see above). (Also [`Error::Json`] when a stored result
    /// is not of the requested type, and [`Error::Sealed`] when it cannot be opened: that request
    /// did take effect.) [`Error::CommitUnknown`] when the outcome could not be determined in time:
    /// send the request again with the same key.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future rolls back an uncommitted transaction. To find out whether it was
    /// committed, send the request again with the same key.
    ///
    /// # Panics
    ///
    /// When the closure panics; the transaction is rolled back.
    pub async fn run<DB, T, E, F, Marker>(
        &self,
        pool: &Pool<DB>,
        key: &IdempotencyKey,
        request: &Fingerprint,
        work: F,
    ) -> Result<Outcome<T>, E>
    where
        DB: Database,
        T: Serialize + DeserializeOwned,
        E: From<Error> + WorkError<Marker>,
        Marker: ?Sized,
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<T, E> + Clone,
    {
        let work = async move |tx: &mut Transaction<'_, DB>| work(tx).await.map_err(RunError::from_work);
        self.run_once(pool, key, request, work).await.map(Outcome::measured).map_err(RunEnd::into_error)
    }

    /// Runs the work once, as [`run`](Self::run).
    pub(super) async fn run_once<DB, T, E, F>(
        &self,
        pool: &Pool<DB>,
        key: &IdempotencyKey,
        request: &Fingerprint,
        work: F,
    ) -> Result<Outcome<T>, RunEnd<E>>
    where
        DB: Database,
        T: Serialize + DeserializeOwned,
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<T, RunError<E>> + Clone,
    {
        let claim = self.transaction_claim::<DB>(key, request)?;
        self.check_pool(pool).await?;
        let start = Instant::now();
        let (mut pauses, doubt) = (IN_PROGRESS_BACKOFF, CommitDoubt::default());
        loop {
            let outcome = match self.client.in_flight.insert(&claim) {
                Err(Duplicate { is_same_request: true }) => match self.read_outcome(&claim).await {
                    // An issued token may expire while its request is in progress.
                    Ok(None | Some(Outcome::Expired)) => Ok(Outcome::InProgress),
                    Ok(Some(found)) => decode_outcome(found),
                    Err(error) => Err(error),
                }
                .map_err(RunEnd::from),
                // The database decides which of two different requests is refused.
                _guard => self.run_until_decided(pool, &claim, &work, &doubt).await,
            };
            let outcome = outcome.map_err(|error| doubt.replace_error(error))?;
            // The transaction whose commit is in doubt has claimed the token before it expired.
            if matches!(outcome, Outcome::Expired)
                && let Some(source) = doubt.take()
            {
                return Err(RunEnd::CommitUnknown(source));
            }
            let pause = pauses.step();
            if !matches!(outcome, Outcome::InProgress) || start.elapsed() + pause > self.wait {
                return Ok(outcome);
            }
            tokio::time::sleep(pause).await;
        }
    }

    /// Runs the transaction until it commits or its outcome is decided otherwise.
    async fn run_until_decided<DB, T, E, F>(
        &self,
        pool: &Pool<DB>,
        claim: &ClaimRequest,
        work: &F,
        doubt: &CommitDoubt,
    ) -> Result<Outcome<T>, RunEnd<E>>
    where
        DB: Database,
        T: Serialize + DeserializeOwned,
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<T, RunError<E>> + Clone,
    {
        let (mut attempts, mut peeks) = (self.retry.start_attempts(), DB::CLAIM_MAY_WAIT);
        loop {
            if peeks && let Some(outcome) = self.peek(claim).await? {
                return Ok(decode_outcome(outcome)?);
            }
            let work = work.clone();
            let transaction =
                async |tx: &mut Transaction<'_, DB>| self.run_in_transaction(tx, claim, work, doubt).await;
            match self.retry.attempt(pool, transaction).await {
                Ok(outcome) => return Ok(outcome),
                Err(AttemptEnd::Conflict(last)) => attempts.next_attempt(last).await.map_err(RunEnd::Exhausted)?,
                // Except on MySQL and MariaDB, where autocommit is off until the attempt has ended,
                // later statements of the work have committed by themselves.
                Err(AttemptEnd::EndedByWork(source)) if DB::KIND != Kind::MySql => {
                    doubt.record(source);
                    return self.record_unknown(pool, claim, attempts, doubt).await;
                }
                // The next attempt reads the claim, which shows the outcome. Without a next attempt
                // the caller gets `CommitUnknown`.
                Err(AttemptEnd::EndedByWork(source) | AttemptEnd::CommitUnknown(source)) => {
                    doubt.record(source);
                    attempts.next_attempt(RunError::Sqlock(Error::NotClaimed)).await.map_err(RunEnd::Exhausted)?;
                }
                // On MySQL and MariaDB autocommit is off until the attempt has ended.
                Err(AttemptEnd::Final(RunError::Sqlock(Error::NotClaimed))) if DB::KIND != Kind::MySql => {
                    doubt.record(sqlx::Error::Protocol(ENDED_BEFORE_RESULT.into()));
                    return self.record_unknown(pool, claim, attempts, doubt).await;
                }
                Err(AttemptEnd::Final(error)) if doubt.is_open() => {
                    if !attempts.try_next(&report(error.as_error())).await {
                        return Err(RunEnd::Failed(error));
                    }
                }
                Err(AttemptEnd::Final(error)) => return Err(RunEnd::Failed(error)),
            }
            // Otherwise the claim itself shows whether the earlier attempt was committed.
            peeks = DB::CLAIM_MAY_WAIT && !doubt.is_open();
        }
    }

    /// Records that the outcome is unknown, after the claim was rolled back during the work. If
    /// that fails, the doubt stays.
    async fn record_unknown<DB, T, E>(
        &self,
        pool: &Pool<DB>,
        claim: &ClaimRequest,
        mut attempts: Attempts<'_>,
        doubt: &CommitDoubt,
    ) -> Result<Outcome<T>, RunEnd<E>>
    where
        DB: Database,
    {
        let claim = &ClaimRequest { is_unknown_until_done: true, ..claim.clone() };
        loop {
            let transaction =
                async |tx: &mut Transaction<'_, DB>| self.claim_key(tx, claim).await.map_err(RunError::<E>::Sqlock);
            match self.retry.attempt(pool, transaction).await {
                // The claim is committed without a result.
                Ok(Outcome::New(_)) => {
                    doubt.clear();
                    return Ok(Outcome::Unknown);
                }
                // Another request has claimed the key meanwhile.
                Ok(_) => return Err(RunEnd::from(Error::NotClaimed)),
                Err(AttemptEnd::Conflict(last)) => attempts.next_attempt(last).await.map_err(RunEnd::Exhausted)?,
                Err(AttemptEnd::Final(error)) => return Err(RunEnd::Failed(error)),
                Err(AttemptEnd::EndedByWork(source) | AttemptEnd::CommitUnknown(source)) => {
                    return Err(RunEnd::CommitUnknown(source));
                }
            }
        }
    }

    /// Claims the key, runs the work and stores its result.
    async fn run_in_transaction<DB, T, E, F>(
        &self,
        tx: &mut Transaction<'_, DB>,
        claim: &ClaimRequest,
        work: F,
        doubt: &CommitDoubt,
    ) -> Result<Outcome<T>, RunError<E>>
    where
        DB: Database,
        T: Serialize + DeserializeOwned,
        F: AsyncFnOnce(&mut Transaction<'_, DB>) -> Result<T, RunError<E>>,
    {
        let outcome = self.claim_key(tx, claim).await.map_err(RunError::Sqlock)?;
        match &outcome {
            // The transaction whose commit is in doubt may be in progress.
            Outcome::InProgress | Outcome::Expired => {}
            // This server may have to catch up with the one that has committed.
            Outcome::New(_) if self.client.backend.is_multi_primary() => {}
            _ => doubt.clear(),
        }
        match outcome {
            Outcome::New(claim) => {
                let value = work(tx).await?;
                let result = encode_legibly(&value, self.result_limit).map_err(RunError::Sqlock)?;
                claim.store(tx, result).await.map_err(RunError::Sqlock)?;
                Ok(Outcome::New(value))
            }
            known => decode_outcome(known.without_new()).map_err(RunError::Sqlock),
        }
    }
}

/// Why a run did not, or may not, have taken effect.
pub(super) enum RunEnd<E> {
    Failed(RunError<E>),
    /// Every attempt met a concurrent change and was rolled back.
    Exhausted(RunError<E>),
    CommitUnknown(sqlx::Error),
}

impl<E> From<Error> for RunEnd<E> {
    fn from(error: Error) -> Self {
        Self::Failed(RunError::Sqlock(error))
    }
}

impl<E: From<Error>> RunEnd<E> {
    fn into_error(self) -> E {
        match self {
            Self::Failed(error) | Self::Exhausted(error) => error.into_error(),
            Self::CommitUnknown(source) => Error::CommitUnknown { source }.into(),
        }
    }
}

/// The first commit of a call whose outcome is unknown, until a later attempt has read the claim.
#[derive(Default)]
struct CommitDoubt(Mutex<Option<sqlx::Error>>);

impl CommitDoubt {
    fn record(&self, source: sqlx::Error) {
        let reason = report(&source);
        tracing::warn!(reason, "it is not known whether a transaction was committed; its claim shows it");
        self.lock().get_or_insert(source);
    }

    fn take(&self) -> Option<sqlx::Error> {
        self.lock().take()
    }

    fn clear(&self) {
        drop(self.take());
    }

    fn is_open(&self) -> bool {
        self.lock().is_some()
    }

    /// Replaces an error that says that nothing took effect, while the doubt is open.
    fn replace_error<E>(&self, error: RunEnd<E>) -> RunEnd<E> {
        self.take().map_or(error, RunEnd::CommitUnknown)
    }

    fn lock(&self) -> MutexGuard<'_, Option<sqlx::Error>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
