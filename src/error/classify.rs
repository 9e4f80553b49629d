//! Classifies errors: which calls may be repeated, and which requests an error concerns.

use std::fmt;
use std::time::Duration;

use super::fault::copy;
use super::{Error, Fault, FenceError, Result, RowError, report};

impl Error {
    /// Returns the messages of the error and of all its sources in one line, each once.
    ///
    /// ```
    /// # let error = sqlock::Error::from(sqlx::Error::PoolClosed);
    /// eprintln!("{}", error.report());
    /// ```
    pub fn report(&self) -> impl fmt::Display {
        report(self)
    }

    /// Returns whether the limit set with `wait` was reached.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout { .. })
    }

    /// Returns whether the lease or session lock ended before its release.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::SessionLost { .. })
    }

    /// Returns whether the client is [drained](crate::Locks::drain) or shut down: nothing was done.
    pub fn is_closed(&self) -> bool {
        matches!(self, Self::Closed)
    }

    /// Returns whether the transaction met a concurrent change and must be rerun from its
    /// beginning, which [`Retry`](crate::retry::Retry) does.
    ///
    /// A lock wait timeout is not a conflict, unless the database rolled the transaction back to
    /// break a deadlock.
    pub fn is_conflict(&self) -> bool {
        match self {
            Self::Fence { cause, .. } => *cause == FenceError::StaleSnapshot,
            Self::Row { cause, .. } => *cause == RowError::StaleSnapshot,
            Self::Conflict { .. } => true,
            Self::Database { source, .. } => Fault::from_error(source) == Fault::RolledBack,
            _ => false,
        }
    }

    /// Returns whether the same call may succeed later.
    ///
    /// `true` for [`Timeout`](Self::Timeout), [`Unavailable`](Self::Unavailable),
    /// [`PoolExhausted`](Self::PoolExhausted), [conflicts](Self::is_conflict), and lock waits that
    /// timed out. After the last two, run a transaction of your own again from its beginning. After
    /// `Unavailable`, a write may have taken effect: read before you repeat a call that is no
    /// acquisition.
    ///
    /// `false` for all others: after [`Lost`](Self::Lost), acquire again; after
    /// [`Unknown`](Self::Unknown) and [`CommitUnknown`](Self::CommitUnknown), read first; after
    /// [`Closed`](Self::Closed), a new client is needed.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Timeout { .. } | Self::Unavailable { .. } | Self::PoolExhausted { .. })
            || self.is_conflict()
            || self.is_blocked()
    }

    /// Returns whether a statement waited too long for another transaction's lock, or was
    /// cancelled.
    pub(crate) fn is_blocked(&self) -> bool {
        let Self::Database { source, .. } = self else {
            return false;
        };
        matches!(Fault::from_error(source), Fault::Blocked | Fault::Cancelled)
    }

    /// Returns an error if a duration is out of range.
    pub(crate) fn check_range(what: &'static str, given: Duration, min: Duration, max: Duration) -> Result<()> {
        if given < min || given > max {
            return Err(Self::OutOfRange { what, given, min, max });
        }
        Ok(())
    }

    /// Returns whether the error would be the same for every request to this database.
    pub(crate) fn concerns_all(&self) -> bool {
        matches!(
            self,
            Self::Unavailable { .. }
                | Self::Access { .. }
                | Self::PoolExhausted { .. }
                | Self::NotMigrated { .. }
                | Self::Closed
                | Self::Unsupported { .. }
        )
    }

    /// Copies the error for another caller whose request ends with it.
    pub(crate) fn repeated(&self) -> Self {
        match self {
            Self::Unavailable { attempted, reason, .. } => {
                Self::Unavailable { attempted, reason: reason.clone(), source: None }
            }
            Self::Access { attempted, cause, source } => {
                Self::Access { attempted, cause: *cause, source: copy(source) }
            }
            Self::PoolExhausted { attempted } => Self::PoolExhausted { attempted },
            Self::NotMigrated { source } => Self::NotMigrated { source: copy(source) },
            Self::Database { attempted, source } => Self::Database { attempted, source: copy(source) },
            Self::Unsupported { what, reason } => Self::Unsupported { what, reason },
            // No other error ends the requests of several callers.
            _ => Self::Closed,
        }
    }
}
