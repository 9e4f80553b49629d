//! The responses that do not come from the handler.

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use sqlx::error::ErrorKind;

use super::super::Outcome;
use super::key_header::IDEMPOTENCY_KEY;
use crate::error::{Error, RowError};
use crate::transaction::retry::COMMIT;

/// The page that describes the types, each under a heading of its own.
const TYPES: &str = "https://docs.rs/sqlock/latest/sqlock/idempotency/http/index.html#";

/// A problem, which is answered as `application/problem+json` (RFC 9457).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Problem {
    KeyMissing,
    KeyMalformed(&'static str),
    KeyNotSupported,
    PrincipalMissing,
    RequestIncomplete,
    RequestTooLarge,
    InProgress,
    OutcomeUnknown,
    KeyReused(StatusCode),
    TokenNotValid,
    KeyExpired,
    StoreUnavailable,
    Conflict,
    CommitUnknown,
    ResponseNotStorable,
    ResponseTooLarge,
    NotSetUp(&'static str),
}

/// What a response says about a problem.
struct Description {
    /// The end of the type: the heading of its description.
    slug: &'static str,
    status: StatusCode,
    title: &'static str,
    detail: &'static str,
}

impl Problem {
    /// Returns the problem of an outcome for which the handler does not run. `None`: the outcome is
    /// no problem.
    pub(super) fn from_outcome<N, R>(outcome: &Outcome<N, R>, mismatch: StatusCode, is_issued: bool) -> Option<Self> {
        Some(match outcome {
            Outcome::New(_) | Outcome::Replay(_) => return None,
            Outcome::InProgress => Self::InProgress,
            Outcome::Mismatch => Self::KeyReused(mismatch),
            Outcome::Expired if is_issued => Self::TokenNotValid,
            Outcome::Expired => Self::KeyExpired,
            Outcome::Unknown => Self::OutcomeUnknown,
        })
    }

    /// Returns the problem of a handler that has ignored the key.
    pub(super) fn key_ignored() -> Self {
        let detail = "the handler ignores the key, so a repeated request would take effect again";
        tracing::error!(detail, "a handler on a route that requires keys does not extract Idempotent");
        Self::NotSetUp(detail)
    }

    /// Returns the problem of an error of this crate with which a request takes no effect, or its
    /// stored response cannot be read. The message is logged, and not sent to the client.
    pub(super) fn from_error(error: &Error) -> Self {
        let problem = match error {
            Error::Lost { .. } => Self::InProgress,
            Error::RequestTooLarge { .. } => Self::RequestTooLarge,
            Error::Json { .. } => Self::NotSetUp("the stored answer cannot be read"),
            Error::Sealed { .. } => Self::NotSetUp("what is stored cannot be sealed or opened"),
            Error::InvalidKey { .. } => Self::NotSetUp("the namespace or the principal is invalid"),
            Error::OutOfRange { .. } => Self::NotSetUp("a duration is out of range"),
            Error::Row { cause: RowError::Deferred, .. } => {
                Self::NotSetUp("on SQLite, the transaction must begin with BEGIN IMMEDIATE")
            }
            Error::Row { .. } => Self::NotSetUp("the transaction is not one of this database"),
            Error::NotClaimed => Self::NotSetUp("the handler went on after a deadlock had rolled its transaction back"),
            Error::Database { source, .. } if is_after_failure(source) => {
                Self::NotSetUp("the handler went on after a statement of its transaction had failed")
            }
            Error::Database { attempted: COMMIT, source } if violates_constraint(source) => {
                Self::NotSetUp("a deferred constraint refused the commit of the handler's transaction")
            }
            _ => Self::StoreUnavailable,
        };
        match problem {
            Self::InProgress | Self::RequestTooLarge => {}
            Self::StoreUnavailable if error.is_closed() => {
                tracing::debug!(error = %error.report(), "a request with an idempotency key took no effect")
            }
            Self::StoreUnavailable => {
                tracing::warn!(error = %error.report(), "a request with an idempotency key took no effect")
            }
            _ => tracing::error!(error = %error.report(), "a request with an idempotency key cannot be served"),
        }
        problem
    }

    /// Returns the problem of an error of this crate after the work has run under a lease. The
    /// message is logged, and not sent to the client.
    pub(super) fn from_error_after_work(error: &Error) -> Self {
        if error.is_lost() {
            return Self::InProgress;
        }
        tracing::warn!(
            error = %error.report(),
            "a request with an idempotency key was run, and its outcome could not be recorded"
        );
        Self::OutcomeUnknown
    }

    fn describe(self) -> Description {
        match self {
            Self::KeyMissing => Description {
                slug: "key-missing",
                status: StatusCode::BAD_REQUEST,
                title: "An Idempotency-Key is required",
                detail: "Send a key of your choice in the header Idempotency-Key, and the same one when you send this request again.",
            },
            Self::KeyMalformed(reason) => Description {
                slug: "key-malformed",
                status: StatusCode::BAD_REQUEST,
                title: "The Idempotency-Key cannot be read",
                detail: reason,
            },
            Self::KeyNotSupported => Description {
                slug: "key-not-supported",
                status: StatusCode::BAD_REQUEST,
                title: "This method takes no Idempotency-Key",
                detail: "Nothing was done. A request with this method would take effect each time it is sent; send it without a key.",
            },
            Self::PrincipalMissing => Description {
                slug: "principal-missing",
                status: StatusCode::UNAUTHORIZED,
                title: "The sender is not known",
                detail: "A key belongs to its sender: this request needs authentication.",
            },
            Self::RequestIncomplete => Description {
                slug: "request-incomplete",
                status: StatusCode::BAD_REQUEST,
                title: "The request could not be read to its end",
                detail: "Nothing was done. Send it again.",
            },
            Self::RequestTooLarge => Description {
                slug: "request-too-large",
                status: StatusCode::PAYLOAD_TOO_LARGE,
                title: "The request is too large",
                detail: "Nothing was done. A request with an idempotency key must be shorter than this one.",
            },
            Self::InProgress => Description {
                slug: "in-progress",
                status: StatusCode::CONFLICT,
                title: "A request with this key is in progress",
                detail: "Send it again with the same key to receive its result.",
            },
            Self::OutcomeUnknown => Description {
                slug: "outcome-unknown",
                status: StatusCode::CONFLICT,
                title: "It is not known whether a request with this key took effect",
                detail: "Send it again with the same key, and with no other one, until the outcome is resolved.",
            },
            Self::KeyReused(status) => Description {
                slug: "key-reused",
                status,
                title: "This key was used for another request",
                detail: "Use a new key for a new request.",
            },
            Self::TokenNotValid => Description {
                slug: "token-not-valid",
                status: StatusCode::UNPROCESSABLE_ENTITY,
                title: "This token is not valid",
                detail: "It has expired, or it is not one of yours. Request a new one.",
            },
            Self::KeyExpired => Description {
                slug: "key-expired",
                status: StatusCode::UNPROCESSABLE_ENTITY,
                title: "This key cannot be used any more",
                detail: "It was used, and its answer is no longer stored. Use a new key for a new request.",
            },
            Self::StoreUnavailable => Description {
                slug: "store-unavailable",
                status: StatusCode::SERVICE_UNAVAILABLE,
                title: "Requests with a key cannot be served at present",
                detail: "Send it again with the same key.",
            },
            Self::Conflict => Description {
                slug: "conflict",
                status: StatusCode::SERVICE_UNAVAILABLE,
                title: "Concurrent requests changed the same data",
                detail: "Nothing was done. Send it again with the same key.",
            },
            Self::CommitUnknown => Description {
                slug: "commit-unknown",
                status: StatusCode::SERVICE_UNAVAILABLE,
                title: "It is not known yet whether this took effect",
                detail: "Send it again with the same key to find out.",
            },
            Self::ResponseNotStorable => Description {
                slug: "response-not-storable",
                status: StatusCode::INTERNAL_SERVER_ERROR,
                title: "The answer cannot be stored",
                detail: "The response of the handler ended before it was complete.",
            },
            Self::ResponseTooLarge => Description {
                slug: "response-too-large",
                status: StatusCode::INTERNAL_SERVER_ERROR,
                title: "The answer is too large to be stored",
                detail: "It exceeds the limit of this server for stored responses.",
            },
            Self::NotSetUp(detail) => Description {
                slug: "not-set-up",
                status: StatusCode::INTERNAL_SERVER_ERROR,
                title: "Idempotency is not set up on this server",
                detail,
            },
        }
    }

    /// Returns when to send the request again, in seconds.
    fn retry_after(self) -> Option<HeaderValue> {
        Some(HeaderValue::from_static(match self {
            Self::InProgress | Self::Conflict | Self::CommitUnknown => "1",
            Self::StoreUnavailable => "5",
            Self::OutcomeUnknown => "30",
            _ => return None,
        }))
    }
}

/// Returns whether PostgreSQL refused a statement because an earlier one of its transaction had
/// failed.
fn is_after_failure(error: &sqlx::Error) -> bool {
    error.as_database_error().and_then(|error| error.code()).as_deref() == Some("25P02")
}

fn violates_constraint(error: &sqlx::Error) -> bool {
    error.as_database_error().is_some_and(|error| error.kind() != ErrorKind::Other)
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        self.into_response_about(&IDEMPOTENCY_KEY)
    }
}

impl Problem {
    /// Makes a response whose text names the header of keys.
    pub(super) fn into_response_about(self, header: &HeaderName) -> Response {
        let Description { slug, status, title, detail } = self.describe();
        let named = |text: &str| match *header == IDEMPOTENCY_KEY {
            true => text.to_owned(),
            false => text.replace("Idempotency-Key", header.as_str()),
        };
        let body = serde_json::json!({
            "type": format!("{TYPES}{slug}"),
            "title": named(title),
            "status": status.as_u16(),
            "detail": named(detail),
        });
        let mut response = Response::new(Body::from(body.to_string()));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(seconds) = self.retry_after() {
            response.headers_mut().insert(RETRY_AFTER, seconds);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_claim_is_blamed_on_the_handler() {
        let problem = Problem::from_error(&Error::NotClaimed);
        assert!(matches!(problem, Problem::NotSetUp(detail) if detail.contains("the handler")), "{problem:?}");
    }

    #[test]
    fn deferred_transaction_is_told_how_to_begin() {
        let error = Error::Row { table: "sqlock_idem".into(), cause: RowError::Deferred };
        let problem = Problem::from_error(&error);
        assert!(matches!(problem, Problem::NotSetUp(detail) if detail.contains("BEGIN IMMEDIATE")), "{problem:?}");
    }

    #[test]
    fn every_type_is_documented_with_its_status() {
        let lines: Vec<_> = include_str!("../http.rs").lines().collect();
        for problem in [
            Problem::KeyMissing,
            Problem::KeyMalformed(""),
            Problem::KeyNotSupported,
            Problem::PrincipalMissing,
            Problem::RequestIncomplete,
            Problem::RequestTooLarge,
            Problem::InProgress,
            Problem::OutcomeUnknown,
            Problem::KeyReused(StatusCode::UNPROCESSABLE_ENTITY),
            Problem::TokenNotValid,
            Problem::KeyExpired,
            Problem::StoreUnavailable,
            Problem::Conflict,
            Problem::CommitUnknown,
            Problem::ResponseNotStorable,
            Problem::ResponseTooLarge,
            Problem::NotSetUp(""),
        ] {
            let Description { slug, status, .. } = problem.describe();
            let heading = lines.iter().position(|line| *line == format!("//! ## {slug}"));
            let below = heading.and_then(|at| lines.get(at + 1)).copied().unwrap_or_default();
            let again =
                problem.retry_after().map(|seconds| format!(", `Retry-After: {}`", seconds.to_str().unwrap_or("?")));
            let expected = format!("//! {}{}:", status.as_u16(), again.unwrap_or_default());
            assert!(below.starts_with(&expected), "{slug}: {below}");
        }
    }
}
