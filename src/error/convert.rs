//! Converts errors of sqlx into those of this crate, and back.

use super::fault::is_sqlite_busy;
use super::{AccessError, Error, Fault, reason};

impl Error {
    /// Makes the error of a statement on the sqlock tables.
    pub(crate) fn from_sqlx(attempted: &'static str, source: sqlx::Error) -> Self {
        if let Some(cause) = AccessError::from_error(&source) {
            return Self::Access { attempted, cause, source };
        }
        match Fault::from_error(&source) {
            Fault::NoTable => Self::NotMigrated { source },
            Fault::Exhausted if matches!(source, sqlx::Error::PoolTimedOut) => Self::PoolExhausted { attempted },
            Fault::Severed | Fault::Exhausted => {
                Self::Unavailable { attempted, reason: reason(&source), source: Some(source) }
            }
            Fault::RolledBack if is_sqlite_busy(&source) => Self::Unavailable {
                attempted,
                reason: "another connection is writing to the SQLite file".into(),
                source: Some(source),
            },
            Fault::RolledBack | Fault::Blocked | Fault::Race | Fault::ReadOnly | Fault::Final => {
                Self::Database { attempted, source }
            }
        }
    }

    /// Makes the error of a statement on the caller's own tables or connection.
    pub(crate) fn from_caller(attempted: &'static str, source: sqlx::Error) -> Self {
        match Fault::from_error(&source) {
            Fault::Exhausted if matches!(source, sqlx::Error::PoolTimedOut) => Self::PoolExhausted { attempted },
            Fault::Severed | Fault::Exhausted => {
                Self::Unavailable { attempted, reason: reason(&source), source: Some(source) }
            }
            _ => Self::Database { attempted, source },
        }
    }
}

/// Lets statements of the caller use `?` beside calls of this crate, in a function or in a
/// [`Retry`](crate::retry::Retry).
impl From<sqlx::Error> for Error {
    fn from(source: sqlx::Error) -> Self {
        Self::from_caller("run a statement", source)
    }
}

/// Lets a closure of a [`Retry`](crate::retry::Retry) return the errors of its statements alone. An
/// error of a driver is returned without the message of this crate. Any other error, such as
/// [`Error::CommitUnknown`], is the source of an [`sqlx::Error::AnyDriverError`].
impl From<Error> for sqlx::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Database { source, .. }
            | Error::Access { source, .. }
            | Error::Unavailable { source: Some(source), .. } => source,
            Error::PoolExhausted { .. } => Self::PoolTimedOut,
            error => Self::AnyDriverError(Box::new(error)),
        }
    }
}
