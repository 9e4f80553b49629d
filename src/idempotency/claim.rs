//! Claiming a key in a transaction.

use std::convert::Infallible;
use std::time::Duration;

use serde::Serialize;
use sqlx::Transaction;

use super::handle::{Idempotency, claim_error};
use super::key::{Fingerprint, IdempotencyKey};
use super::outcome::{Outcome, Stored, encode, recorded_outcome};
use crate::backend::Database;
use crate::backend::records::{self, Claimed, Claiming, Errand, State};
use crate::error::{Error, Result};

/// How often a claim is looked at that stands one way now and another way then.
const MAX_READS: u32 = 10;

impl Idempotency {
    /// Claims a key in a transaction of the caller's own. `New` is to be followed by the effect, by
    /// [`complete`](Claim::complete) and by the commit; after anything else, nothing is to be done in this transaction.
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
    /// Call it once in a transaction: a second time, before the result is stored, is told in-progress or null. It may be called at
    /// any time in the transaction, but what was done before it is done again by a duplicate. A rival that is at work is told at
    /// once, [except as said](Self::run); [`wait`](Self::wait) has no meaning here.
    ///
    /// At REPEATABLE READ and SERIALIZABLE a rival that has committed since this transaction began to read is told by
    /// [`RowError::StaleSnapshot`](crate::row::RowError::StaleSnapshot) on PostgreSQL (and on MariaDB with `innodb_snapshot_isolation`): run the transaction again.
    ///
    /// # Errors
    ///
    /// [`Error::Row`] when this transaction cannot be used for it, or reads from before; [`Error::InvalidKey`],
    /// [`Error::OutOfRange`]; [`Error::Database`], [`Error::Unavailable`], [`Error::NotMigrated`]. Roll back after any.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the transaction as undecided as dropping any of its statements: roll back.
    pub async fn begin<DB: Database>(
        &self,
        tx: &mut Transaction<'_, DB>,
        key: &IdempotencyKey,
        request: &Fingerprint,
    ) -> Result<Outcome<Claim, Stored>> {
        let claim = self.claim_request(key, request)?;
        if DB::PEEKS
            && let Some(outcome) = self.peek(&claim).await?
        {
            return Ok(outcome.without_new());
        }
        self.claim_key(tx, &claim).await
    }

    pub(super) async fn claim_key<DB: Database>(
        &self,
        tx: &mut Transaction<'_, DB>,
        claim: &Claiming,
    ) -> Result<Outcome<Claim, Stored>> {
        self.check_transaction(tx)?;
        let mut rival = None;
        for read_outcome in 0..MAX_READS {
            if read_outcome > 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let claimed = DB::claim(tx, claim).await.map_err(claim_error::<DB>)?;
            if claimed == Claimed::Ours {
                return Ok(Outcome::New(Claim { id: claim.key.id.clone(), limit: self.limit }));
            }
            if claimed == Claimed::Not {
                let record = records::read::<DB>(tx, &claim.key.id, DB::PRESENT).await.map_err(claim_error::<DB>)?;
                if let Some(record) = record {
                    if let Some(known) = recorded_outcome(claim, record) {
                        return Ok(known);
                    }
                } else if claim.issued {
                    return Ok(Outcome::Expired);
                }
                let before = rival;
                rival = DB::rival(tx, claim).await.map_err(claim_error::<DB>)?;
                match rival {
                    Some(found) if found.same => return Ok(Outcome::InProgress),
                    // One that is ending may have let go of one lock and not of the other.
                    found if found.is_some() && found == before => return Ok(Outcome::Mismatch),
                    _ => {}
                }
            }
            if DB::PEEKS
                && let Some(outcome) = self.peek(claim).await?
            {
                return Ok(outcome.without_new());
            }
        }
        Ok(Outcome::InProgress)
    }

    /// What another connection sees before the key is claimed. `None`: nothing stands in the way.
    pub(super) async fn peek(&self, claim: &Claiming) -> Result<Option<Outcome<Infallible, Stored>>> {
        let mut found = self.send(Errand::Peek(claim.key.clone())).await?;
        // Who has the record locked, and has not claimed it as one can see, is at it for a moment: the sweeper, say.
        let mut looks = 1;
        while found.busy && found.fingerprint.is_none() && looks < MAX_READS {
            tokio::time::sleep(Duration::from_millis(5)).await;
            found = self.send(Errand::Peek(claim.key.clone())).await?;
            looks += 1;
        }
        if found.busy {
            let same = found.fingerprint.is_none_or(|fingerprint| fingerprint == claim.fingerprint);
            return Ok(Some(if same { Outcome::InProgress } else { Outcome::Mismatch }));
        }
        match found.records.into_iter().next() {
            None if claim.issued => Ok(Some(Outcome::Expired)),
            None => Ok(None),
            Some(record) if record.is_expired() && record.state == State::Done && !claim.issued => {
                self.send(Errand::Bury(claim.key.clone())).await?;
                Ok(None)
            }
            Some(record) => Ok(recorded_outcome(claim, record)),
        }
    }
}

/// A key that a transaction has claimed. Made by [`Idempotency::begin`].
#[derive(Debug)]
#[must_use = "a claim that is committed without its result is replayed as null"]
pub struct Claim {
    id: String,
    limit: usize,
}

impl Claim {
    /// Stores the result, as JSON, for those who come again. Then commit.
    ///
    /// # Errors
    ///
    /// [`Error::NotClaimed`] in another transaction; [`Error::ResultTooLarge`], [`Error::Json`]; those of any statement.
    ///
    /// # Cancel safety
    ///
    /// As any statement of a transaction.
    pub async fn complete<DB: Database, T: Serialize + ?Sized>(
        self,
        tx: &mut Transaction<'_, DB>,
        result: &T,
    ) -> Result<()> {
        let result = encode(result, self.limit)?;
        self.store(tx, &result).await
    }

    pub(super) async fn store<DB: Database>(self, tx: &mut Transaction<'_, DB>, result: &[u8]) -> Result<()> {
        if records::complete::<DB>(tx, &self.id, result).await.map_err(claim_error::<DB>)? {
            return Ok(());
        }
        Err(Error::NotClaimed)
    }
}
