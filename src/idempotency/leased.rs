//! Runs work with effects elsewhere once, under a lease on the key.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::attempt::Attempt;
use super::handle::Idempotency;
use super::key::{Fingerprint, IdempotencyKey};
use super::outcome::{Outcome, Stored, decode_outcome};
use crate::backend::records::{ClaimRequest, Record, RecordCommand, RecordState};
use crate::error::{Error, Result};
use crate::lease::handle::Lease;

impl Idempotency {
    /// Claims a key under a lease, for an effect elsewhere.
    ///
    /// The lease is renewed until the attempt has ended. `New` means that this caller must do the
    /// work: as the first attempt, or ([`number()`](Attempt::number) > 1) continuing one whose
    /// process died, however long ago. The provider recognizes the repeated call only while it
    /// [keeps its keys](Attempt::provider_key). Requests with the key of an attempt with an
    /// [unknown](Attempt::unknown) outcome receive [`Outcome::Unknown`]; [`resume`](Self::resume)
    /// continues the attempt.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`], [`Error::OutOfRange`], [`Error::RequestTooLarge`], [`Error::Sealed`],
    /// [`Error::Unavailable`], [`Error::NotMigrated`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future releases the lease. The next attempt continues from the record, if there
    /// is one.
    pub async fn attempt(&self, key: &IdempotencyKey, request: &Fingerprint) -> Result<Outcome<Attempt, Stored>> {
        self.begin_attempt(key, request).await.map(Outcome::measured)
    }

    async fn begin_attempt(&self, key: &IdempotencyKey, request: &Fingerprint) -> Result<Outcome<Attempt, Stored>> {
        let claim = self.claim_request(key, request)?;
        if let Some(known) = self.read_outcome(&claim).await? {
            return Ok(known);
        }
        let lease = self.lease_request(&claim.key);
        let lease = if self.wait.is_zero() {
            lease.try_acquire().await?
        } else {
            match lease.wait(self.wait).acquire().await {
                Err(Error::Timeout { .. }) => None,
                acquired => Some(acquired?),
            }
        };
        let Some(lease) = lease else {
            // The holder may have begun since, so its fingerprint is compared again.
            return Ok(self.read_outcome(&claim).await?.unwrap_or(Outcome::InProgress));
        };
        self.start(claim, lease, false).await
    }

    /// Reads the outcome of a key without a lease. Returns `None` when the key may be claimed.
    pub(super) async fn read_outcome<N>(&self, claim: &ClaimRequest) -> Result<Option<Outcome<N, Stored>>> {
        let found = self.send(RecordCommand::Read(claim.key.clone())).await?;
        Ok(match found.records.into_iter().next() {
            None => claim.issued.then_some(Outcome::Expired),
            // The lease shows whether the attempt is in progress or has died.
            Some(record) if record.state == RecordState::Started && record.fingerprint == claim.fingerprint => None,
            Some(record) => self.recorded_outcome(claim, record)?,
        })
    }

    pub(super) async fn start(
        &self,
        claim: ClaimRequest,
        lease: Lease,
        resume: bool,
    ) -> Result<Outcome<Attempt, Stored>> {
        let fingerprint = claim.fingerprint.clone();
        let issued = claim.issued;
        let request = claim.request.clone();
        let token = lease.token().get();
        let answer = self.client.run_with_answer(RecordCommand::Start { claim, token, resume }).await;
        let Some(record) = answer.result?.records.into_iter().next() else {
            return Ok(if issued { Outcome::Expired } else { Outcome::InProgress });
        };
        if record.state == RecordState::Started && record.token == token {
            let request = self.request_of(&record, request).await;
            let mut attempt = Attempt::new(self.clone(), record, lease, answer.may_linger);
            match request {
                Ok(request) => attempt.request = request,
                // The work has not begun, so the next request with the key continues the attempt.
                Err(error) => {
                    if resume {
                        attempt.unknown().await?;
                    }
                    attempt.release().await;
                    return Err(error);
                }
            }
            return Ok(Outcome::New(attempt));
        }
        let claim = ClaimRequest { fingerprint, issued, ..ClaimRequest::for_key(record.key.clone()) };
        Ok(self.recorded_outcome(&claim, record)?.unwrap_or(Outcome::InProgress))
    }

    /// Returns the request of a started record, for whose first attempt it is at hand.
    async fn request_of(&self, record: &Record, first: Option<Vec<u8>>) -> Result<Option<Vec<u8>>> {
        let column = if record.attempts == 1 { first } else { self.read_request(record).await? };
        column.map(|column| self.decode_request(&record.key.id, column)).transpose()
    }

    /// Runs the work [under a lease](Self::attempt), and replays its result to every later request
    /// with this key.
    ///
    /// When the work succeeds, its result is stored. When it fails without a call of
    /// [`forget`](Attempt::forget), its effect is unknown, and the record says so:
    /// [`Outcome::Unknown`]. The same holds for a result that cannot be stored, or that was
    /// [completed](Attempt::complete_in) in an uncommitted transaction. When the lease is lost, the
    /// work is dropped. Work that panics, or is dropped, counts as dead: the next attempt continues
    /// it.
    ///
    /// # Errors
    ///
    /// The work's own error, unchanged, or an error of this crate in the work's type:
    /// [`Error::Lost`] when another attempt has taken over, or the error with which the database
    /// refused the end of the attempt. The outcome is then unknown or, if that could not be
    /// recorded either (as after [`Error::Unavailable`]), the attempt counts as dead. Otherwise as
    /// [`attempt`](Self::attempt).
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the attempt counts as dead: the next one continues it.
    pub async fn run_leased<T, E, F>(
        &self,
        key: &IdempotencyKey,
        request: &Fingerprint,
        work: F,
    ) -> Result<Outcome<T>, E>
    where
        T: Serialize + DeserializeOwned,
        E: From<Error>,
        F: AsyncFnOnce(&Attempt) -> Result<T, E>,
    {
        match self.attempt(key, request).await? {
            Outcome::New(attempt) => Ok(Outcome::New(attempt.run_work(work).await?)),
            known => Ok(decode_outcome(known.without_new())?),
        }
    }
}
