//! Why a request was not answered, and what that means for the next attempt.

use std::time::Duration;

use crate::error::{AccessError, Error, Fault, no_answer_within};
use crate::panics;

/// Why a request was not answered.
pub(super) enum RequestError {
    Refused(sqlx::Error),
    NoAnswer {
        within: Duration,
    },
    /// No connection could be opened. `None`: the attempt took too long.
    Unconnected(Option<sqlx::Error>),
    Panic(String),
}

impl RequestError {
    pub(super) fn fault(&self) -> Fault {
        match self {
            Self::Refused(error) => match Fault::from_error(error) {
                // The server was writable when the connection was opened. A writable server may
                // exist by now, at this address or another.
                Fault::ReadOnly => Fault::ConnectionLost,
                // The statements of this crate are short: a cancelled one has probably waited for a
                // lock.
                Fault::Cancelled => Fault::Blocked,
                fault => fault,
            },
            Self::NoAnswer { .. } | Self::Unconnected(None) => Fault::ConnectionLost,
            Self::Unconnected(Some(error)) => match Fault::from_error(error) {
                Fault::Final => Fault::Final,
                _ if AccessError::from_connect(error).is_some() => Fault::Final,
                _ => Fault::ConnectionLost,
            },
            Self::Panic(_) => Fault::Final,
        }
    }

    /// Returns whether the request may have been received, and may take effect.
    pub(super) fn may_linger(&self) -> bool {
        match self {
            Self::Refused(error) => Fault::from_error(error) == Fault::ConnectionLost,
            Self::NoAnswer { .. } | Self::Panic(_) => true,
            Self::Unconnected(_) => false,
        }
    }

    pub(super) fn reason(&self) -> String {
        match self {
            Self::Refused(error) | Self::Unconnected(Some(error)) => crate::error::reason(error),
            Self::NoAnswer { within } => no_answer_within(*within),
            Self::Unconnected(None) => "no connection could be opened in time".into(),
            Self::Panic(message) => panics::reason(message),
        }
    }

    pub(super) fn into_error(self, attempted: &'static str) -> Error {
        let reason = self.reason();
        match self {
            Self::Refused(error) if Fault::from_error(&error) == Fault::ReadOnly => {
                Error::Unavailable { attempted, reason, source: Some(error) }
            }
            Self::Refused(error) => Error::from_sqlx(attempted, error),
            Self::NoAnswer { .. } => Error::Unavailable { attempted, reason, source: None },
            Self::Unconnected(Some(error)) => Error::from_connect(attempted, error),
            Self::Unconnected(None) => Error::Unavailable { attempted, reason, source: None },
            Self::Panic(_) => Error::Database { attempted, source: sqlx::Error::Protocol(reason) },
        }
    }
}
