//! Fencing a transaction with a lease.

use sqlx::Transaction;
use sqlx_core::transaction::TransactionManager;

use super::handle::Lease;
use crate::backend::Database;
use crate::backend::fence::{FenceCheck, FenceOutcome};
use crate::error::{Error, FenceError, LossCause, Result};

impl Lease {
    /// Fences a transaction: the transaction cannot commit if another owner was granted the name,
    /// and none can be granted it until the transaction ends. Renewals go on meanwhile.
    ///
    /// Make the fence the first statement of the transaction, outside any savepoint. A fence costs
    /// one statement (a row lock that is shared with other fences of this lease; on SQLite the
    /// write lock, during which no lease in the same file can be renewed: keep such transactions
    /// shorter than the TTL). On PostgreSQL and SQLite, another one first checks that the
    /// transaction is open.
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
    /// On a Galera cluster, where nodes do not see each other's locks, a fence is a write: an owner
    /// that takes the name over on another node does not wait, and this transaction can no longer
    /// commit. See the [guide](crate::guide::cluster#galera).
    ///
    /// A fence of a shared lease or of permits keeps out exclusive leases, not other shared ones:
    /// when a fenced permit ends before its transaction does, another holder may acquire it
    /// meanwhile.
    ///
    /// For data elsewhere, send [`token`](Self::token) along. A receiver that compares tokens only
    /// when it writes loses updates: it must *first* record the token as the highest it has seen,
    /// *then* read, then write on condition that the recorded token is still this one.
    ///
    /// # Errors
    ///
    /// [`Error::Lost`] when the lease has ended: nothing was written. [`Error::Fence`] when the
    /// transaction belongs to another database, is not open, is inside a savepoint, or began to
    /// read before the lease: the lease is held as before. [`Error::Unavailable`] and the errors of
    /// any statement: whether the lease is held is unknown. After an error, roll back.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the transaction in an unknown state, as with any of its
    /// statements: roll back.
    pub async fn fence<DB: Database>(&self, tx: &mut Transaction<'_, DB>) -> Result<()> {
        if self.client.settings.is_null {
            return self.held().map(|_| ());
        }
        let refused = |cause| Err(Error::Fence { name: self.name().clone(), cause });
        if DB::KIND != self.client.kind {
            return refused(FenceError::OtherDatabase);
        }
        match DB::TransactionManager::get_transaction_depth(tx) {
            0 => return refused(FenceError::NoTransaction),
            1 => {}
            _ => return refused(FenceError::InSavepoint),
        }
        let held = self.held()?;
        let check = FenceCheck {
            name: self.name().as_str().to_owned(),
            id: held.acquisition_id().to_string(),
            token: self.token().get(),
            is_multi_primary: self.client.backend.is_multi_primary(),
        };
        match DB::fence(tx, &check).await {
            Ok(FenceOutcome::Fenced) => Ok(()),
            Ok(FenceOutcome::Superseded) => {
                // Looks the lease up at once, so that its other users learn of the loss.
                held.look_up();
                match held.is_held_in_database("fence a transaction").await {
                    Ok(true) => match DB::is_newer(tx, &check).await {
                        Ok(true) => refused(FenceError::StaleSnapshot),
                        Ok(false) => refused(FenceError::OtherDatabase),
                        Err(error) => Err(Error::from_sqlx("fence a transaction", error)),
                    },
                    // On SQLite this transaction may keep the file locked.
                    Err(error) if !self.client.backend.is_local() => Err(error),
                    _ => Err(self.loss_error(LossCause::Superseded)),
                }
            }
            Ok(FenceOutcome::StaleSnapshot) => refused(FenceError::StaleSnapshot),
            Ok(FenceOutcome::NoTransaction) => refused(FenceError::NoTransaction),
            Err(error) => Err(Error::from_sqlx("fence a transaction", error)),
        }
    }
}
