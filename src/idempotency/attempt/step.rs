//! The steps of an attempt, whose results later attempts reuse.

use std::sync::atomic::Ordering;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::Transaction;

use super::Attempt;
use crate::backend::Database;
use crate::backend::records::{self, RecordCommand, Step};
use crate::error::{Error, Result};
use crate::idempotency::handle::record_error;
use crate::idempotency::outcome::{decode, encode, encode_legibly};
use crate::idempotency::seal::Content;

impl Attempt {
    /// Runs a step of the work and stores its result, or returns the result that an earlier attempt
    /// has stored under this name: a recovery point. The step runs again if a process dies before
    /// its result is stored: so call providers with a [key](Self::provider_key).
    ///
    /// # Errors
    ///
    /// The step's own errors; [`Error::Lost`] when another attempt has taken over;
    /// [`Error::InvalidKey`], [`Error::Json`], [`Error::Sealed`], [`Error::Unavailable`].
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the step may have run without its result being stored.
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
            return Err(self.lease.loss_error(self.lease.loss_cause()).into());
        }
        // Also counts a step whose future is dropped, and one whose result cannot be stored.
        self.possible_effects.fetch_add(1, Ordering::Relaxed);
        let result = work().await.inspect_err(|_| {
            self.possible_effects.fetch_sub(1, Ordering::Relaxed);
        })?;
        let bytes = self.seal(Content::Step(name), encode_legibly(&result, self.idempotency.result_limit)?)?;
        let command = RecordCommand::StoreStep { step: self.step_key(name)?, token: self.token.get(), result: bytes };
        if self.idempotency.send(command).await?.changed == 0 {
            // A command that is repeated after a lost reply finds its result stored.
            return match self.recall(name).await? {
                Some(done) if self.lease.is_held() => Ok(done),
                Some(_) => Err(self.lease.loss_error(self.lease.loss_cause()).into()),
                None => Err(self.lost_error().into()),
            };
        }
        Ok(result)
    }

    /// Stores the result of a step, together with its writes, in a transaction of the caller's own.
    /// No other attempt begins before that transaction has ended.
    ///
    /// # Errors
    ///
    /// As [`step`](Self::step), and [`Error::StepRecorded`] when a result is stored already, by an
    /// earlier attempt or by a transaction whose commit was unknown. After an error, roll the
    /// transaction back: otherwise its other writes take effect.
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
        let bytes = self.seal(Content::Step(name), encode(result, self.idempotency.result_limit)?)?;
        let (step, failed) = (self.step_key(name)?, record_error::<DB>("record a step"));
        // Without this, another attempt could begin before this transaction commits, and not see
        // the step.
        if !records::lock_attempt::<DB>(tx, &step.id, self.token.get()).await.map_err(failed)? {
            self.check_snapshot::<DB>(None).await?;
            return Err(self.lost_error());
        }
        match records::store_step::<DB>(tx, &step, self.token.get(), &bytes).await.map_err(failed)? {
            0 => Err(Error::StepRecorded),
            _ => Ok(()),
        }
    }

    /// Returns the result of a step that this attempt, or an earlier one, has stored.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::Json`], [`Error::Sealed`], [`Error::Unavailable`].
    ///
    /// # Cancel safety
    ///
    /// The call only reads.
    pub async fn recall<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let found = self.idempotency.send(RecordCommand::ReadStep(self.step_key(name)?)).await?.result;
        let Some(column) = found else {
            return Ok(None);
        };
        let bytes = self.idempotency.seal.open(Content::Step(name), &self.record.key.id, column)?;
        decode(Some(&bytes)).map(Some)
    }

    fn step_key(&self, name: &str) -> Result<Step> {
        crate::idempotency::key::check("step name", name)?;
        Ok(Step { id: self.record.key.id.clone(), begun: self.record.created_at, name: name.to_owned() })
    }
}
