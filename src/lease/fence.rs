//! Fencing a transaction with a lease.

use sqlx::Transaction;
use sqlx_core::transaction::TransactionManager;

use super::handle::Lease;
use crate::backend::Database;
use crate::backend::sealed::{Check, Verdict};
use crate::error::{Error, FenceError, LossCause, Result};

impl Lease {
    /// Makes sure that this transaction can commit only while the lease is ours: until it ends, nobody else can be granted
    /// the name. Renewals go on meanwhile.
    ///
    /// Make it the first statement of the transaction, outside any savepoint. What it costs is one statement (a row lock
    /// that is shared with other fences of this lease; on SQLite the write lock, during which no lease in the same file
    /// can be renewed: keep such transactions shorter than the TTL).
    ///
    /// ```
    /// # async fn example(pool: sqlx::SqlitePool, lease: sqlock::Lease) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut tx = pool.begin().await?;
    /// lease.fence(&mut tx).await?;
    /// sqlx::query("UPDATE invoice SET reminded = 1 WHERE id = 42").execute(&mut *tx).await?;
    /// tx.commit().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// On a Galera cluster, where locks are not seen by other nodes, a fence is a write: whoever takes the name over on another node
    /// is not kept waiting, and this transaction cannot commit any more. See the [guide](crate::guide::cluster#galera).
    ///
    /// A fence of a shared lease or of permits keeps out those who want the name for themselves alone, not others who share it:
    /// when a fenced permit ends before its transaction does, another holder may get it meanwhile.
    ///
    /// For data elsewhere, send [`token`](Self::token) along. There, comparing tokens only when writing loses updates:
    /// the receiver must *first* record the token as the highest it has seen, *then* read, then write on condition that the
    /// recorded token is still this one.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the lease has ended: nothing was written. [`Error::Fence`] when the transaction is of another
    /// kind of database, is not open, is inside a savepoint, or reads from before the lease. After an error, roll back.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the transaction as undecided as dropping any of its statements: roll back.
    pub async fn fence<DB: Database>(&self, tx: &mut Transaction<'_, DB>) -> Result<()> {
        if DB::KIND != self.client.kind {
            return Err(Error::Fence(FenceError::OtherDatabase));
        }
        match DB::TransactionManager::get_transaction_depth(tx) {
            0 => return Err(Error::Fence(FenceError::NoTransaction)),
            1 => {}
            _ => return Err(Error::Fence(FenceError::InSavepoint)),
        }
        let held = self.held()?;
        let check = Check {
            name: self.name().as_str().to_owned(),
            id: held.id().to_string(),
            token: self.token().get(),
            by_writing: self.client.backend.is_one_of_many_writers(),
        };
        match DB::fence(tx, &check).await {
            Ok(Verdict::Fenced) => Ok(()),
            Ok(Verdict::Superseded) => {
                // The lease is looked up at once, so that its other users hear of the loss.
                held.doubt();
                Err(self.loss_error(LossCause::Superseded))
            }
            Ok(Verdict::StaleSnapshot) => Err(Error::Fence(FenceError::StaleSnapshot)),
            Err(error) => Err(Error::from_sqlx("fence a transaction", error)),
        }
    }
}
