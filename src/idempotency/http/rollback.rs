//! Why the transaction of a request was rolled back.

use std::error::Error as StdError;
use std::fmt;

use axum::response::Response;

use super::problem::Problem;
use crate::error::Error;
use crate::transaction::work_error::WorkError;

/// Why a transaction was rolled back.
pub(super) enum RollbackReason<E> {
    /// The work failed.
    Work(E),
    /// The response of the work asks for a rollback.
    Answered(Box<Response>),
    /// The response of the work cannot be stored.
    NotStorable(Problem),
    /// A statement of this crate failed.
    Sqlock(Error),
}

impl<E> RollbackReason<E> {
    /// Returns the error whose sources say whether the transaction met a concurrent change.
    pub(super) fn as_error<Marker: ?Sized>(&self) -> &(dyn StdError + 'static)
    where
        E: WorkError<Marker>,
    {
        match self {
            Self::Work(error) => error.as_error(),
            Self::Answered(_) | Self::NotStorable(_) => &NotStored,
            Self::Sqlock(error) => error,
        }
    }
}

/// The response is not stored, so its transaction is rolled back.
#[derive(Debug, thiserror::Error)]
#[error("the response asks for a rollback")]
struct NotStored;

impl<E: fmt::Display> fmt::Display for RollbackReason<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Work(error) => write!(f, "{error}"),
            Self::Answered(response) => write!(f, "answered with {}", response.status()),
            Self::NotStorable(problem) => write!(f, "the response cannot be stored: {problem:?}"),
            Self::Sqlock(error) => write!(f, "{error}"),
        }
    }
}

impl<E> From<Error> for RollbackReason<E> {
    fn from(error: Error) -> Self {
        Self::Sqlock(error)
    }
}
