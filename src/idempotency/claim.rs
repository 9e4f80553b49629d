//! Claims a key in a transaction.

use std::convert::Infallible;
use std::time::Duration;

use serde::Serialize;
use sqlx::Transaction;
use tokio::time::Instant;

use super::handle::{Idempotency, STORE_RESULT, record_error, stale_snapshot_error};
use super::key::{Fingerprint, IdempotencyKey};
use super::outcome::{Outcome, Stored, encode};
use super::seal::{Content, Seal};
use crate::backend::records::{self, ClaimOutcome, ClaimRequest, RecordCommand, RecordState};
use crate::backend::{Database, Kind};
use crate::error::{Error, Result};

/// How often a claim is read while its state keeps changing.
const MAX_READS: u32 = 10;

/// How long a lock on a record without a visible claim may last, such as that of the sweeper on a
/// busy machine.
const SHORT_LOCK: Duration = Duration::from_secs(1);

impl Idempotency {
    /// Claims a key in a transaction of the caller's own. After `New`, write the effect, call
    /// [`complete`](Claim::complete) and commit; after any other outcome, write nothing in this
    /// transaction.
    ///
    /// ```
    /// # use sqlock::Error;
    /// # use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome};
    /// # async fn charge(tx: &mut sqlx::Transaction<'_, sqlx::Sqlite>) -> Result<String, Error> { Ok(String::new()) }
    /// # async fn example(pool: sqlx::SqlitePool, payments: Idempotency) -> Result<(), Box<dyn std::error::Error>> {
    /// let key = IdempotencyKey::new("alice", "order-17");
    /// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;      // on SQLite; elsewhere pool.begin()
    /// let receipt: String = match payments.begin(&mut tx, &key, &Fingerprint::of(["500"])).await? {
    ///     Outcome::New(claim) => {
    ///         let receipt = charge(&mut tx).await?;
    ///         claim.complete(&mut tx, &receipt).await?;
    ///         tx.commit().await?;
    ///         receipt
    ///     }
    ///     Outcome::Replay(stored) => stored.get()?,
    ///     other => return Err(format!("refused: {other:?}").into()),
    /// };
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A claim that is committed without its result counts as done, with `null` as its result; on
    /// MySQL and MariaDB, where DDL commits it, as [`Outcome::Unknown`].
    ///
    /// Call it once in a transaction: a second call, before the result is stored, returns another
    /// outcome than `New`. The call may come at any point of the
    /// transaction, but a duplicate repeats the statements before it. A duplicate in progress is
    /// reported at once, [with the exceptions of `run`](Self::run); [`wait`](Self::wait) has no
    /// effect here.
    ///
    /// At REPEATABLE READ and SERIALIZABLE, a duplicate that committed after this transaction began
    /// to read causes [`RowError::StaleSnapshot`](crate::row::RowError::StaleSnapshot) on
    /// PostgreSQL (and on MariaDB with `innodb_snapshot_isolation`): run the transaction again. So
    /// does an expired record on MySQL and MariaDB that another transaction has locked.
    ///
    /// # Errors
    ///
    /// [`Error::Row`] when the transaction cannot be used, or reads an older snapshot;
    /// [`Error::InvalidKey`], [`Error::OutOfRange`], [`Error::Sealed`]; [`Error::Database`],
    /// [`Error::Unavailable`], [`Error::NotMigrated`]. Roll back after any error.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the transaction in an unknown state, as with any of its
    /// statements: roll back.
    pub async fn begin<DB: Database>(
        &self,
        tx: &mut Transaction<'_, DB>,
        key: &IdempotencyKey,
        request: &Fingerprint,
    ) -> Result<Outcome<Claim, Stored>> {
        let claim = self.transaction_claim::<DB>(key, request)?;
        if DB::CLAIM_MAY_WAIT
            && let Some(outcome) = self.peek(&claim).await?
        {
            return Ok(outcome.without_new().measured());
        }
        Ok(self.claim_key(tx, &claim).await?.measured())
    }

    pub(super) async fn claim_key<DB: Database>(
        &self,
        tx: &mut Transaction<'_, DB>,
        claim: &ClaimRequest,
    ) -> Result<Outcome<Claim, Stored>> {
        self.check_transaction(tx)?;
        let failed = record_error::<DB>("claim a key");
        let mut rival = None;
        for attempt in 0..MAX_READS {
            if attempt > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let claimed = DB::claim(tx, claim).await.map_err(failed)?;
            if claimed == ClaimOutcome::Claimed {
                let (id, seal) = (claim.key.id.clone(), self.seal.clone());
                let open_state = claim.open_state();
                return Ok(Outcome::New(Claim {
                    id,
                    open_state,
                    retention_micros: claim.retention_micros,
                    result_limit: self.result_limit,
                    seal,
                }));
            }
            if claimed == ClaimOutcome::RecordExists {
                let record = records::read::<DB>(tx, &claim.key.id, DB::CURRENT_READ).await.map_err(failed)?;
                if let Some(record) = record {
                    match self.recorded_outcome(claim, record)? {
                        // An issued token may expire while its request is in progress.
                        Some(Outcome::Expired) if claim.issued => {
                            let running = DB::rival(tx, claim).await.map_err(failed)?;
                            let is_same = running.is_some_and(|running| running.is_same_request);
                            return Ok(if is_same { Outcome::InProgress } else { Outcome::Expired });
                        }
                        Some(known) => return Ok(known),
                        // This transaction has locked the expired record, so no connection deletes it.
                        None if DB::CLAIM_MAY_WAIT => return Err(stale_snapshot_error()),
                        None => {}
                    }
                } else if claim.issued {
                    // On PostgreSQL above READ COMMITTED, a transaction does not see a token that
                    // was issued after its first statement.
                    if DB::KIND != Kind::Postgres {
                        return Ok(Outcome::Expired);
                    }
                    let outcome = self.peek(claim).await?;
                    return outcome.map(Outcome::without_new).ok_or_else(stale_snapshot_error);
                }
                let before = rival;
                rival = DB::rival(tx, claim).await.map_err(failed)?;
                match rival {
                    Some(found) if found.is_same_request => return Ok(Outcome::InProgress),
                    // A rival that is ending may have released one lock and not the other.
                    found if found.is_some() && found == before => return Ok(Outcome::Mismatch),
                    _ => {}
                }
            }
            if DB::CLAIM_MAY_WAIT
                && let Some(outcome) = self.peek(claim).await?
            {
                return Ok(outcome.without_new());
            }
        }
        Ok(Outcome::InProgress)
    }

    /// Reads the record on another connection before the claim. Returns `None` when the key can be
    /// claimed.
    pub(super) async fn peek(&self, claim: &ClaimRequest) -> Result<Option<Outcome<Infallible, Stored>>> {
        let mut found = self.send(RecordCommand::Peek(claim.key.clone())).await?;
        let start = Instant::now();
        while found.is_locked && found.fingerprint.is_none() && start.elapsed() < SHORT_LOCK {
            tokio::time::sleep(Duration::from_millis(5)).await;
            found = self.send(RecordCommand::Peek(claim.key.clone())).await?;
        }
        if found.is_locked {
            let same = found.fingerprint.is_none_or(|fingerprint| fingerprint == claim.fingerprint);
            return Ok(Some(if same { Outcome::InProgress } else { Outcome::Mismatch }));
        }
        match found.records.into_iter().next() {
            None if claim.issued => Ok(Some(Outcome::Expired)),
            None => Ok(None),
            Some(record) if record.is_key_new() && !claim.issued => {
                self.send(RecordCommand::DeleteExpired(claim.key.clone())).await?;
                Ok(None)
            }
            Some(record) => self.recorded_outcome(claim, record),
        }
    }
}

/// A key that the caller's transaction has claimed. Made by [`Idempotency::begin`].
#[derive(Debug)]
#[must_use = "a claim that is committed without its result is replayed as null, or unknown"]
pub struct Claim {
    id: String,
    /// The state of the record until the result is stored.
    open_state: RecordState,
    retention_micros: i64,
    result_limit: usize,
    seal: Seal,
}

impl Claim {
    /// Stores the result, as JSON, for later requests. Then commit.
    ///
    /// # Errors
    ///
    /// [`Error::NotClaimed`] in another transaction; [`Error::ResultTooLarge`], [`Error::Json`],
    /// [`Error::Sealed`]; the errors of any statement.
    ///
    /// # Cancel safety
    ///
    /// As any statement of a transaction.
    pub async fn complete<DB: Database, T: Serialize + ?Sized>(
        self,
        tx: &mut Transaction<'_, DB>,
        result: &T,
    ) -> Result<()> {
        let result = encode(result, self.result_limit)?;
        self.store(tx, result).await
    }

    pub(super) async fn store<DB: Database>(self, tx: &mut Transaction<'_, DB>, result: Vec<u8>) -> Result<()> {
        let result = self.seal.seal(Content::Result, &self.id, result)?;
        let stored = records::complete::<DB>(tx, &self.id, self.open_state, &result, self.retention_micros).await;
        if stored.map_err(record_error::<DB>(STORE_RESULT))? { Ok(()) } else { Err(Error::NotClaimed) }
    }
}
