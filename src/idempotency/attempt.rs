//! Effects elsewhere: a lease on the key, a record of how far it has come, and no guess about what is not known.

use std::error::Error as StdError;
use std::fmt;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::Transaction;

use super::handle::{Idempotency, claim_error};
use super::outcome::{decode, encode, encode_legibly};
use crate::backend::Database;
use crate::backend::micros;
use crate::backend::records::{self, Ending, Errand, Record, State, Step};
use crate::error::{Error, LossCause, Result};
use crate::lease::handle::Lease;
use crate::lease::run::while_held;
use crate::name::LockName;
use crate::token::FencingToken;

/// One attempt to do what a key stands for, under a lease. Made by [`Idempotency::attempt`].
///
/// End it with [`complete`](Self::complete), [`forget`](Self::forget) or [`unknown`](Self::unknown). One that is dropped counts as
/// died: its lease goes back, and the next one takes it up.
#[must_use = "an attempt that is dropped counts as died"]
pub struct Attempt {
    idempotency: Idempotency,
    record: Record,
    lease: Lease,
    token: FencingToken,
    conclusion: Mutex<Conclusion>,
}

/// Whether the work has recorded how it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Conclusion {
    Open,
    /// In a transaction of the work's own, which may not be committed.
    InTransaction,
    Recorded,
}

impl Attempt {
    pub(super) fn new(idempotency: Idempotency, record: Record, lease: Lease) -> Self {
        let token = lease.token();
        Self { idempotency, record, lease, token, conclusion: Mutex::new(Conclusion::Open) }
    }

    /// Whose key it is. `None`: everybody's.
    pub fn principal(&self) -> Option<&str> {
        Some(self.record.key.principal.as_str()).filter(|principal| !principal.is_empty())
    }

    /// The key.
    pub fn key(&self) -> &str {
        &self.record.key.key
    }

    /// Which attempt it is for this request, from 1.
    pub fn number(&self) -> u32 {
        u32::try_from(self.record.attempts).unwrap_or(u32::MAX)
    }

    /// The fencing token, greater than that of every attempt before.
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// The lease: to be looked at before an effect, or waited for to be lost.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// A key for the provider's own idempotency: a digest of the namespace, the principal, the key and the step. 64 digits.
    ///
    /// Every attempt under this key has the same one, whatever becomes of the record: also after a failover or a restored backup has
    /// lost it, after a refusal has freed the key, and after the retention. So the provider can tell that a call comes again.
    ///
    /// It also takes a new request for the old one that comes under a key used before. For clients that use keys again, put a
    /// generation of theirs into the namespace or the step (`"charge/2026-11"`); the same one in every attempt at a request.
    ///
    /// `step`: for one of several calls; they need different keys.
    pub fn provider_key(&self, step: &str) -> String {
        let parts = [self.record.key.id.as_bytes(), step.as_bytes()];
        crate::backend::hex(&records::digest(b"sqlock/idem/provider/2", parts))
    }

    /// Does a step of the work and stores its result, or, when an earlier attempt has stored one under this name, tells that:
    /// a recovery point. The step itself may be done more than once, when a process dies before its result is stored: so call
    /// providers with a [key](Self::provider_key).
    ///
    /// # Errors
    ///
    /// The step's own; [`Error::Lost`] when another attempt has taken over; [`Error::InvalidKey`], [`Error::Json`],
    /// [`Error::Unavailable`].
    ///
    /// # Cancel safety
    ///
    /// The step may be done without its result being stored.
    pub async fn step<T, E, F>(&self, name: &str, work: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce() -> Result<T, E>,
    {
        if let Some(done) = self.recall(name).await? {
            return Ok(done);
        }
        if !self.lease.is_held() {
            return Err(self.lost_error().into());
        }
        let result = work().await?;
        let bytes = encode_legibly(&result, self.idempotency.limit)?;
        let command = Errand::Step { step: self.step_key(name)?, token: self.token.get(), result: bytes };
        if self.idempotency.send(command).await?.changed == 0 {
            // Sent again after a reply that was lost, it is there already.
            return match self.recall(name).await? {
                Some(done) if self.lease.is_held() => Ok(done),
                _ => Err(self.lost_error().into()),
            };
        }
        Ok(result)
    }

    /// Stores the result of a step in a transaction of the caller's own, with what it has written there, unless one is stored
    /// already. No other attempt begins before that transaction has ended.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step). The transaction is as good as before; roll it back when the attempt was lost.
    ///
    /// # Cancel safety
    ///
    /// As any statement of a transaction.
    pub async fn record_step<DB: Database, T: Serialize + ?Sized>(
        &self,
        tx: &mut Transaction<'_, DB>,
        name: &str,
        result: &T,
    ) -> Result<()> {
        self.idempotency.check_transaction(tx)?;
        let bytes = encode(result, self.idempotency.limit)?;
        let step = self.step_key(name)?;
        // Or another attempt could begin, and not see it, before this transaction commits.
        if !records::hold_up::<DB>(tx, &step.id, self.token.get()).await.map_err(claim_error::<DB>)? {
            return Err(self.lost_error());
        }
        records::put_step::<DB>(tx, &step, self.token.get(), &bytes).await.map_err(claim_error::<DB>)?;
        Ok(())
    }

    /// The result of a step that this attempt, or an earlier one, has stored.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::Json`], [`Error::Unavailable`].
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn recall<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let found = self.idempotency.send(Errand::Recall(self.step_key(name)?)).await?.result;
        found.map(|bytes| decode(Some(&bytes))).transpose()
    }

    /// It is done: stores the result, if no other attempt has taken over. A second call with an equal result changes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when one has; [`Error::AlreadyCompleted`] when another result is stored, which stays;
    /// [`Error::Json`] and [`Error::ResultTooLarge`], and then the record says that nobody knows; [`Error::Unavailable`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves open whether it is stored. If not, the next attempt takes it up.
    pub async fn complete<T: Serialize + ?Sized>(&self, result: &T) -> Result<()> {
        let bytes = match encode(result, self.idempotency.limit) {
            Ok(bytes) => bytes,
            Err(error) => {
                self.unknown().await?;
                return Err(error);
            }
        };
        self.end(self.done_ending(bytes)).await
    }

    /// As [`complete`](Self::complete), in a transaction of the caller's own, with what it has written there: both or
    /// nothing. The commit fails, or this does, when another attempt has taken over.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], [`Error::AlreadyCompleted`], [`Error::Json`], [`Error::ResultTooLarge`], [`Error::Row`], those of any
    /// statement. Nothing is recorded then.
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
        let ending = self.done_ending(encode(result, self.idempotency.limit)?);
        let ended =
            records::end::<DB>(tx, &self.record.key.id, self.token.get(), &ending).await.map_err(claim_error::<DB>)?;
        if ended == 0 {
            let id = &self.record.key.id;
            let found = records::read::<DB>(tx, id, DB::PRESENT).await.map_err(claim_error::<DB>)?;
            self.check_ending(&ending, found.as_ref())?;
        }
        self.set_conclusion(Conclusion::InTransaction);
        Ok(())
    }

    /// Nobody knows whether it took effect: says so in the record, which stays until it is [resumed](Idempotency::resume) or
    /// [forgotten](Idempotency::forget).
    ///
    /// # Errors
    ///
    /// [`Error::Lost`], [`Error::AlreadyCompleted`], [`Error::Unavailable`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves open whether it is recorded. If not, it counts as died.
    pub async fn unknown(&self) -> Result<()> {
        self.end(Ending::Unknown).await
    }

    /// It certainly took no effect: the key is as good as new, and a token that was issued as good as before.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves open whether it is deleted. If not, it counts as died.
    pub async fn forget(&self) -> Result<()> {
        self.set_conclusion(Conclusion::Recorded);
        let id = self.record.key.id.clone();
        self.idempotency.send(Errand::Forget { id, token: self.token.get() }).await?;
        Ok(())
    }

    fn conclusion(&self) -> Conclusion {
        *self.conclusion.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_conclusion(&self, conclusion: Conclusion) {
        *self.conclusion.lock().unwrap_or_else(PoisonError::into_inner) = conclusion;
    }

    fn done_ending(&self, result: Vec<u8>) -> Ending {
        Ending::Done { result, keep: micros(self.idempotency.retention) }
    }

    async fn end(&self, ending: Ending) -> Result<()> {
        self.set_conclusion(Conclusion::Recorded);
        let command = Errand::End { id: self.record.key.id.clone(), token: self.token.get(), ending: ending.clone() };
        if self.idempotency.send(command).await?.changed > 0 {
            return Ok(());
        }
        let found = self.idempotency.send(Errand::Read(self.record.key.clone())).await?;
        self.check_ending(&ending, found.records.first())
    }

    /// Of an attempt that could not be ended: it has ended like this before, or the reason why it does not.
    fn check_ending(&self, ending: &Ending, found: Option<&Record>) -> Result<()> {
        match found.filter(|record| record.token == self.token.get()) {
            Some(record) if ending.is_in(record) => Ok(()),
            Some(record) if record.state == State::Done => Err(Error::AlreadyCompleted),
            _ => Err(self.lost_error()),
        }
    }

    /// Whether the work has said how it ended, and may do nothing more about it.
    #[cfg(feature = "axum")]
    pub(super) async fn has_ended(&self) -> Result<bool> {
        match self.conclusion() {
            Conclusion::Open => Ok(false),
            Conclusion::InTransaction => self.check_committed().await.map(|()| true),
            Conclusion::Recorded => Ok(true),
        }
    }

    /// As [`complete`](Self::complete), whatever the size.
    #[cfg(feature = "axum")]
    pub(super) async fn store<T: Serialize>(&self, result: &T) -> Result<()> {
        self.end(self.done_ending(encode(result, usize::MAX)?)).await
    }

    /// The work says that it was refused: the key is as good as new, unless something was done on the way, or may have been by
    /// an attempt before.
    #[cfg(feature = "axum")]
    pub(super) async fn refuse(&self) -> Result<()> {
        let steps = Errand::Steps { id: self.record.key.id.clone(), begun: self.record.created_at };
        if self.number() == 1 && self.idempotency.send(steps).await?.steps.is_empty() {
            return self.forget().await;
        }
        self.unknown().await
    }

    /// Whether the transaction in which it was completed has been committed. If not, nobody knows what became of the rest.
    async fn check_committed(&self) -> Result<()> {
        let found = self.idempotency.send(Errand::Read(self.record.key.clone())).await?;
        let token = self.token.get();
        if found.records.iter().any(|record| record.state == State::Done && record.token == token) {
            return Ok(());
        }
        self.unknown().await?;
        Err(Error::Unknown { attempted: "commit the result under", name: self.lease.name().clone() })
    }

    /// As [`complete`](Self::complete), for a result that can be read again; of any other nobody knows.
    async fn complete_legibly<T: Serialize + DeserializeOwned>(&self, result: &T) -> Result<()> {
        if let Err(error) = encode_legibly(result, usize::MAX) {
            self.unknown().await?;
            return Err(error);
        }
        self.complete(result).await
    }

    /// Does the work and records how it ended.
    pub(crate) async fn run_work<T, E, F>(self, work: F) -> Result<T, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error> + StdError,
        F: AsyncFnOnce(&Self) -> Result<T, E>,
    {
        let outcome = while_held(work(&self), || self.lease.is_held(), self.lease.lost()).await;
        let conclusion = self.conclusion();
        match outcome {
            Err(_) => Err(self.lost_error().into()),
            Ok(Ok(value)) => {
                let stored = match conclusion {
                    Conclusion::Open => self.complete_legibly(&value).await,
                    Conclusion::InTransaction => self.check_committed().await,
                    Conclusion::Recorded => Ok(()),
                };
                self.release().await;
                stored?;
                Ok(value)
            }
            Ok(Err(error)) => {
                // If that fails as well, it counts as died.
                if conclusion != Conclusion::Recorded
                    && let Err(error) = self.unknown().await
                {
                    tracing::warn!(%error, "it could not be recorded that the outcome of a request is not known");
                }
                self.release().await;
                Err(error)
            }
        }
    }

    /// What has been recorded stands; that the lease is given back is for others to be faster.
    pub(super) async fn release(self) {
        if let Err(error) = self.lease.release().await {
            tracing::debug!(%error, "the lease of an attempt was not given back");
        }
    }

    fn step_key(&self, name: &str) -> Result<Step> {
        super::key::check("step name", name)?;
        Ok(Step { id: self.record.key.id.clone(), begun: self.record.created_at, name: name.to_owned() })
    }

    fn lost_error(&self) -> Error {
        let name: LockName = self.lease.name().clone();
        Error::Lost { name, token: self.token, cause: LossCause::Superseded }
    }
}

/// Without the key, which is nobody else's business.
impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt").field("number", &self.number()).field("token", &self.token).finish_non_exhaustive()
    }
}
