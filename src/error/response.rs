//! Errors as responses of axum.

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};

use super::Error;

/// Makes a response of an error, so that a handler of axum may return the error. The response is
/// `application/problem+json` without a detail: it names no lock, table or server. Log the error if
/// the detail matters. A handler that returns `anyhow::Error` finds this error, and its status,
/// with `downcast::<sqlock::Error>()`.
///
/// | status | errors |
/// |---|---|
/// | 503, `Retry-After: 1` | a wait that timed out, an unavailable database, an exhausted pool, a lost lease or session lock, a row that another transaction keeps locked, a transaction to be rerun, a client that is [drained](crate::Locks::drain) or shut down |
/// | 409 | [`Conflict`](Error::Conflict): the row is not as the caller read it |
/// | 500 | all others |
impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let status = match self {
            Self::Conflict { .. } => StatusCode::CONFLICT,
            Self::Closed => StatusCode::SERVICE_UNAVAILABLE,
            _ if self.is_retryable() || self.is_lost() => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let title = status.canonical_reason().unwrap_or_default();
        let body = serde_json::json!({ "type": "about:blank", "title": title, "status": status.as_u16() });
        let mut response = Response::new(Body::from(body.to_string()));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::error::{ConcurrentChange, LossCause};
    use crate::name::LockName;
    use crate::token::FencingToken;

    #[test]
    fn response_status_follows_the_error() {
        let name = LockName::new("secret").expect("a name");
        let timeout = Error::Timeout { name: name.clone(), waited: Duration::from_secs(5) };
        let away = Error::Unavailable { attempted: "acquire", reason: "secret".into(), source: None };
        let token = FencingToken::new(1).expect("a token");
        let lost = Error::Lost { name, token, cause: LossCause::Expired };
        let conflict =
            Error::Conflict { table: "secret".into(), expected: Some(1), found: Some(2), cause: ConcurrentChange };
        for (error, status, retry_after) in [
            (timeout, 503, Some("1")),
            (away, 503, Some("1")),
            (Error::Closed, 503, Some("1")),
            (lost, 503, Some("1")),
            (conflict, 409, None),
            (Error::NulInLabel, 500, None),
        ] {
            let response = error.into_response();
            assert_eq!(response.status().as_u16(), status);
            let header = response.headers().get(RETRY_AFTER).map(|value| value.to_str().expect("text"));
            assert_eq!(header, retry_after);
        }
    }
}
