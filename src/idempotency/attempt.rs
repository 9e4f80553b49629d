//! An attempt with an effect outside the database: a lease on the key, and a record of its
//! progress.

mod step;

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::Transaction;

use super::handle::{Idempotency, STORE_RESULT, record_error, stale_snapshot_error};
use super::outcome::{encode, encode_legibly};
use super::seal::Content;
use crate::backend::records::{self, AttemptEnding, Record, RecordCommand, RecordState};
use crate::backend::{Database, Kind, digest, hex, micros};
use crate::error::{Error, LossCause, Result};
use crate::lease::handle::Lease;
use crate::lease::run::while_held;
use crate::name::LockName;
use crate::token::FencingToken;

/// An attempt at a request, under a lease. Made by [`Idempotency::attempt`].
///
/// End it with [`complete`](Self::complete), [`forget`](Self::forget) or
/// [`unknown`](Self::unknown). A dropped attempt counts as dead: its lease is released, and the
/// next attempt continues it.
#[must_use = "an attempt that is dropped counts as dead"]
pub struct Attempt {
    idempotency: Idempotency,
    record: Record,
    pub(super) request: Option<Vec<u8>>,
    lease: Lease,
    token: FencingToken,
    /// Whether a statement that creates the record may still arrive at the database.
    #[cfg_attr(not(feature = "axum"), allow(dead_code, reason = "only requests over HTTP are refused"))]
    start_may_linger: bool,
    /// How many steps have begun and have not failed, and how many completions were tried: after
    /// any of them, the request may have had an effect.
    possible_effects: AtomicU32,
    conclusion: Mutex<Conclusion>,
}

/// Whether the work has recorded its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conclusion {
    Open,
    /// The outcome is recorded in a transaction of the work, which may not be committed.
    InTransaction,
    Recorded,
}

impl Attempt {
    pub(super) fn new(idempotency: Idempotency, record: Record, lease: Lease, start_may_linger: bool) -> Self {
        let (token, conclusion) = (lease.token(), Mutex::new(Conclusion::Open));
        let possible_effects = AtomicU32::new(0);
        Self { idempotency, record, request: None, lease, token, start_may_linger, possible_effects, conclusion }
    }

    /// Returns the principal, or the [digest](crate::idempotency::IdempotencyKey) of a long one.
    /// `None`: the key is global.
    pub fn principal(&self) -> Option<&str> {
        Some(self.record.key.principal.as_str()).filter(|principal| !principal.is_empty())
    }

    /// Returns the key, or the [digest](crate::idempotency::IdempotencyKey) of a long one.
    pub fn key(&self) -> &str {
        &self.record.key.key
    }

    /// Returns the number of this attempt at the request, from 1.
    pub fn number(&self) -> u32 {
        u32::try_from(self.record.attempts).unwrap_or(u32::MAX)
    }

    /// Returns the fencing token, greater than that of every earlier attempt.
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// Returns the lease: check it before an effect, or wait for its loss.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Returns a key for the provider's own idempotency: a digest of the namespace, the principal,
    /// the key and the step. 64 digits.
    ///
    /// Every attempt with this key has the same provider key, even after a failover or a restored
    /// backup has lost the record, after a refusal has freed the key, and after the retention. So
    /// the provider recognizes a repeated call, for as long as it keeps keys (Stripe: 24 hours).
    /// A later attempt at an older request must ask the provider for the charge instead.
    ///
    /// A provider that stores refusals, as version 1 of Stripe's API does, answers the next attempt
    /// with the first refusal: after a declined card, the client needs a new key.
    ///
    /// The provider also mistakes a new request with a reused key for the old one. For clients that
    /// reuse keys, put a generation into the namespace or the step (`"charge/2026-11"`), the same
    /// in every attempt at a request.
    ///
    /// `step` tells several calls of one attempt apart, which need different keys.
    pub fn provider_key(&self, step: &str) -> String {
        let parts = [self.record.key.id.as_bytes(), step.as_bytes()];
        hex(&digest(b"sqlock/idem/provider/2", parts))
    }

    /// Completes the request: stores the result, if no other attempt has taken over. A second call
    /// with an equal result changes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when another attempt has taken over; [`Error::AlreadyCompleted`] when
    /// another result is stored, which stays; [`Error::Unknown`] when the outcome is recorded as
    /// unknown. An error that [may go away](Error::is_retryable), such as [`Error::Unavailable`]:
    /// call again, or record that the outcome is [unknown](Self::unknown). After any other error,
    /// such as [`Error::Json`], [`Error::ResultTooLarge`], [`Error::Sealed`], or a result that the
    /// database refuses, the outcome is recorded as unknown. If that fails too, as after
    /// [`Error::Closed`], the next attempt continues.
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the result may be stored. Otherwise the next attempt
    /// continues.
    pub async fn complete<T: Serialize + ?Sized>(&self, result: &T) -> Result<()> {
        self.complete_within(result, self.idempotency.result_limit).await
    }

    async fn complete_within<T: Serialize + ?Sized>(&self, result: &T, limit: usize) -> Result<()> {
        self.possible_effects.fetch_add(1, Ordering::Relaxed);
        let completed = match encode(result, limit).and_then(|bytes| self.done_ending(bytes)) {
            Ok(ending) => self.end(ending).await,
            Err(error) => Err(error),
        };
        match completed {
            Ok(()) => self.set_conclusion(Conclusion::Recorded),
            Err(Error::Lost { .. } | Error::AlreadyCompleted | Error::Unknown { .. }) => {}
            Err(ref error) if error.is_retryable() => {}
            // Every further call would fail. The attempt has recorded no result, whatever the work
            // returns, so its conclusion stays open.
            Err(_) => self.end(AttemptEnding::Unknown).await?,
        }
        completed
    }

    /// Completes the request as [`complete`](Self::complete), in a transaction of the caller's own,
    /// atomically with its writes. This call or the commit fails when another attempt has taken
    /// over.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], [`Error::AlreadyCompleted`], [`Error::Unknown`], [`Error::Json`],
    /// [`Error::ResultTooLarge`], [`Error::Sealed`], [`Error::Row`], a
    /// [conflict](Error::is_conflict) if the transaction began before the attempt on PostgreSQL
    /// above READ COMMITTED, and the errors of any statement. After an error, nothing is recorded.
    ///
    /// # Cancel safety
    ///
    /// As any statement of a transaction.
    pub async fn complete_in<DB: Database, T: Serialize + ?Sized>(
        &self,
        tx: &mut Transaction<'_, DB>,
        result: &T,
    ) -> Result<()> {
        self.idempotency.check_transaction(tx)?;
        let ending = self.done_ending(encode(result, self.idempotency.result_limit)?)?;
        let (id, failed) = (&self.record.key.id, record_error::<DB>(STORE_RESULT));
        let ended = records::end::<DB>(tx, id, self.token.get(), &ending).await.map_err(failed)?;
        if ended == 0 {
            let found = records::read::<DB>(tx, id, DB::CURRENT_READ).await.map_err(failed)?;
            self.check_snapshot::<DB>(found.as_ref()).await?;
            self.check_ending(&ending, found.as_ref())?;
        }
        self.set_conclusion(Conclusion::InTransaction);
        Ok(())
    }

    /// Records that the effect is unknown. The record stays until it is
    /// [resumed](Idempotency::resume) or [resolved](Idempotency::resolve).
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], [`Error::AlreadyCompleted`], [`Error::Unavailable`].
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the outcome may be recorded. Otherwise the attempt counts as
    /// died.
    pub async fn unknown(&self) -> Result<()> {
        self.end(AttemptEnding::Unknown).await?;
        self.set_conclusion(Conclusion::Recorded);
        Ok(())
    }

    /// Records that the effect is unknown, unless the record has another ending or belongs to
    /// another attempt. After a failure to record it, the attempt counts as dead.
    pub(super) async fn mark_unknown(&self) {
        match self.unknown().await {
            Ok(()) | Err(Error::Lost { .. } | Error::AlreadyCompleted) => {}
            Err(error) => {
                tracing::warn!(error = %error.report(), "could not record that the outcome of a request is unknown");
            }
        }
    }

    /// Deletes the record, because the request certainly had no effect: the key is free, and an
    /// issued token valid again. If this attempt is not the latest any more, or the request is
    /// done, the call changes nothing and returns `Ok`.
    ///
    /// The record can come back after a network fault: when the statement that created it was sent
    /// twice, because the first was not answered, the first may arrive after the deletion. The
    /// attempt then counts as dead. [`unknown`](Self::unknown) has no such gap.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`].
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the record may be deleted. Otherwise the attempt counts as
    /// dead.
    pub async fn forget(&self) -> Result<()> {
        let id = self.record.key.id.clone();
        self.idempotency.send(RecordCommand::Forget { id, token: self.token.get() }).await?;
        self.set_conclusion(Conclusion::Recorded);
        Ok(())
    }

    fn conclusion(&self) -> Conclusion {
        *self.conclusion.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_conclusion(&self, conclusion: Conclusion) {
        *self.conclusion.lock().unwrap_or_else(PoisonError::into_inner) = conclusion;
    }

    fn done_ending(&self, result: Vec<u8>) -> Result<AttemptEnding> {
        let result = self.seal(Content::Result, result)?;
        Ok(AttemptEnding::Done { result, retention_micros: micros(self.idempotency.retention) })
    }

    fn seal(&self, content: Content<'_>, bytes: Vec<u8>) -> Result<Vec<u8>> {
        self.idempotency.seal.seal(content, &self.record.key.id, bytes)
    }

    fn open_result(&self, column: &[u8]) -> Result<Vec<u8>> {
        self.idempotency.seal.open(Content::Result, &self.record.key.id, column.to_vec())
    }

    async fn end(&self, ending: AttemptEnding) -> Result<()> {
        let command =
            RecordCommand::End { id: self.record.key.id.clone(), token: self.token.get(), ending: ending.clone() };
        if self.idempotency.send(command).await?.changed > 0 {
            return Ok(());
        }
        let found = self.idempotency.send(RecordCommand::Read(self.record.key.clone())).await?;
        self.check_ending(&ending, found.records.first())
    }

    /// Returns an error if a transaction of the caller cannot see this attempt, as it read the
    /// record, although the attempt is the latest. On PostgreSQL above READ COMMITTED, a transaction
    /// reads as of its first statement, which may be earlier than the attempt. (The other databases
    /// read the latest record, or refuse the statement.)
    async fn check_snapshot<DB: Database>(&self, found: Option<&Record>) -> Result<()> {
        let is_ours = |record: &Record| record.token == self.token.get();
        if DB::KIND != Kind::Postgres || found.is_some_and(is_ours) {
            return Ok(());
        }
        let latest = self.idempotency.send(RecordCommand::Read(self.record.key.clone())).await?;
        if latest.records.first().is_some_and(is_ours) { Err(stale_snapshot_error()) } else { Ok(()) }
    }

    /// Returns an error unless the attempt has ended in this way before.
    fn check_ending(&self, ending: &AttemptEnding, found: Option<&Record>) -> Result<()> {
        let Some(record) = found.filter(|record| record.token == self.token.get()) else {
            return Err(self.lost_error());
        };
        match (ending, record.state, &record.result) {
            (AttemptEnding::Unknown, RecordState::Unknown, _) => Ok(()),
            // Equal results may be sealed differently.
            (AttemptEnding::Done { result, .. }, RecordState::Done, Some(found))
                if result == found || self.open_result(result)? == self.open_result(found)? =>
            {
                Ok(())
            }
            (_, RecordState::Done, _) => Err(Error::AlreadyCompleted),
            (_, RecordState::Unknown, _) => Err(self.unknown_error("complete the request under")),
            _ => Err(self.lost_error()),
        }
    }

    /// Returns whether the work has recorded its outcome.
    #[cfg(feature = "axum")]
    pub(super) async fn has_ended(&self) -> Result<bool> {
        match self.conclusion() {
            Conclusion::Open => Ok(false),
            Conclusion::InTransaction => self.check_committed().await.map(|()| true),
            Conclusion::Recorded => Ok(true),
        }
    }

    /// Completes the request as [`complete`](Self::complete) does, without a limit of size.
    #[cfg(feature = "axum")]
    pub(super) async fn store<T: Serialize>(&self, result: &T) -> Result<()> {
        self.complete_within(result, usize::MAX).await
    }

    /// Frees the key of a refused request, unless a step, a completed effect or an earlier attempt
    /// may have taken effect. The record also stays while a late statement could create it again as
    /// that of an attempt that has died.
    #[cfg(feature = "axum")]
    pub(super) async fn refuse(&self) -> Result<()> {
        if self.number() > 1 || self.start_may_linger || self.possible_effects.load(Ordering::Relaxed) > 0 {
            return self.unknown().await;
        }
        let steps = RecordCommand::ListSteps { id: self.record.key.id.clone(), begun: self.record.created_at };
        match self.idempotency.send(steps).await?.steps.is_empty() {
            true => self.forget().await,
            false => self.unknown().await,
        }
    }

    /// Checks that the transaction of [`complete_in`](Self::complete_in) was committed. Otherwise
    /// records that the effect is unknown.
    async fn check_committed(&self) -> Result<()> {
        let found = self.idempotency.send(RecordCommand::Read(self.record.key.clone())).await?;
        let token = self.token.get();
        if found.records.iter().any(|record| record.state == RecordState::Done && record.token == token) {
            return Ok(());
        }
        match self.unknown().await {
            // The commit has ended in the meantime.
            Err(Error::AlreadyCompleted) => Ok(()),
            ended => ended.and_then(|()| Err(self.unknown_error("commit the result under"))),
        }
    }

    /// Completes the request if the result can be read back. Otherwise records that the effect is
    /// unknown.
    async fn complete_legibly<T: Serialize + DeserializeOwned>(&self, result: &T) -> Result<()> {
        if let Err(error) = encode_legibly(result, usize::MAX) {
            self.unknown().await?;
            return Err(error);
        }
        self.complete(result).await
    }

    /// Runs the work and records its outcome.
    pub(crate) async fn run_work<T, E, F>(self, work: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&Self) -> Result<T, E>,
    {
        let outcome = while_held(work(&self), || self.lease.is_held(), self.lease.lost()).await;
        let conclusion = self.conclusion();
        match outcome {
            Err(cause) => Err(self.lease.loss_error(cause).into()),
            Ok(Ok(value)) => {
                let stored = match conclusion {
                    Conclusion::Open => self.complete_legibly(&value).await,
                    Conclusion::InTransaction => self.check_committed().await,
                    Conclusion::Recorded => Ok(()),
                };
                if stored.is_err() {
                    self.mark_unknown().await;
                }
                self.release().await;
                stored?;
                Ok(value)
            }
            Ok(Err(error)) => {
                if conclusion != Conclusion::Recorded {
                    self.mark_unknown().await;
                }
                self.release().await;
                Err(error)
            }
        }
    }

    /// Releases the lease early. The record is complete without the lease.
    pub(super) async fn release(self) {
        if let Err(error) = self.lease.release().await {
            tracing::debug!(error = %error.report(), "could not release the lease of an attempt");
        }
    }

    fn lost_error(&self) -> Error {
        let name: LockName = self.lease.name().clone();
        Error::Lost { name, token: self.token, cause: LossCause::Superseded }
    }

    fn unknown_error(&self, attempted: &'static str) -> Error {
        Error::Unknown { attempted, name: self.lease.name().clone() }
    }
}

/// Omits the key, which may be a secret.
impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt").field("number", &self.number()).field("token", &self.token).finish_non_exhaustive()
    }
}
