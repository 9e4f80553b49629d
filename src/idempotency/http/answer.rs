//! A response as it is stored and replayed.

use std::sync::Arc;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{self, HeaderName, HeaderValue};
use axum::http::{StatusCode, response};
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::super::handle::RESULT_LIMIT;
use super::problem::Problem;
use crate::error::Error;

/// The header that marks a replayed response.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// The headers that are stored by default.
const STORED_HEADERS: [HeaderName; 14] = [
    header::ALLOW,
    header::CONTENT_DISPOSITION,
    header::CONTENT_ENCODING,
    header::CONTENT_LANGUAGE,
    header::CONTENT_LOCATION,
    header::CONTENT_RANGE,
    header::CONTENT_TYPE,
    header::ETAG,
    header::LAST_MODIFIED,
    header::LINK,
    header::LOCATION,
    header::RETRY_AFTER,
    header::VARY,
    header::WWW_AUTHENTICATE,
];

/// The statuses that mean that the handler did nothing, by default.
const REFUSALS: [StatusCode; 18] = [
    StatusCode::BAD_REQUEST,
    StatusCode::UNAUTHORIZED,
    StatusCode::PAYMENT_REQUIRED,
    StatusCode::FORBIDDEN,
    StatusCode::NOT_FOUND,
    StatusCode::METHOD_NOT_ALLOWED,
    StatusCode::NOT_ACCEPTABLE,
    StatusCode::GONE,
    StatusCode::LENGTH_REQUIRED,
    StatusCode::PRECONDITION_FAILED,
    StatusCode::PAYLOAD_TOO_LARGE,
    StatusCode::URI_TOO_LONG,
    StatusCode::UNSUPPORTED_MEDIA_TYPE,
    StatusCode::RANGE_NOT_SATISFIABLE,
    StatusCode::EXPECTATION_FAILED,
    StatusCode::UNPROCESSABLE_ENTITY,
    StatusCode::PRECONDITION_REQUIRED,
    StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
];

/// Client errors that do not prove that nothing was done: a timeout, a conflict (another attempt,
/// perhaps at the provider), too early, too many requests, and a client that has disconnected (as
/// nginx logs it).
const AMBIGUOUS: [u16; 5] = [408, 409, 425, 429, 499];

/// The responses and the headers that are stored.
#[derive(Clone)]
pub(super) struct Policy {
    pub(super) store_if: Arc<dyn Fn(StatusCode) -> bool + Send + Sync>,
    pub(super) headers: Vec<HeaderName>,
    pub(super) limit: usize,
    refusals: Vec<StatusCode>,
}

impl Policy {
    pub(super) fn new() -> Self {
        let store_if = |status: StatusCode| status.is_success() || status.is_redirection();
        Self {
            store_if: Arc::new(store_if),
            headers: STORED_HEADERS.to_vec(),
            limit: RESULT_LIMIT,
            refusals: REFUSALS.to_vec(),
        }
    }

    pub(super) fn stores(&self, status: StatusCode) -> bool {
        (self.store_if)(status)
    }

    /// Returns whether the response of work under a lease is stored. An error that is no refusal
    /// does not say whether the work took effect, and a stored record expires.
    pub(super) fn stores_leased(&self, status: StatusCode) -> bool {
        self.stores(status) && (!is_failure(status) || self.is_refusal(status))
    }

    /// Sets the statuses that mean that the handler did nothing.
    pub(super) fn set_refusals(&mut self, statuses: impl IntoIterator<Item = StatusCode>) -> Result<(), Error> {
        let statuses: Vec<StatusCode> = statuses.into_iter().collect();
        let ambiguous = |status: &&StatusCode| !status.is_client_error() || AMBIGUOUS.contains(&status.as_u16());
        if let Some(status) = statuses.iter().find(ambiguous) {
            return Err(Error::NoRefusal { status: status.as_u16() });
        }
        self.refusals = statuses;
        Ok(())
    }

    pub(super) fn is_refusal(&self, status: StatusCode) -> bool {
        self.refusals.contains(&status)
    }

    /// Returns whether a header is stored. Cookies never are, because a replay may go to another
    /// session.
    fn keeps(&self, name: &HeaderName) -> bool {
        *name != header::SET_COOKIE && self.headers.contains(name)
    }
}

/// Returns whether a response reports an error. In a transaction, its effect is rolled back even if
/// the response is stored.
pub(super) fn is_failure(status: StatusCode) -> bool {
    status.is_client_error() || status.is_server_error()
}

/// The stored part of a response. A null stands for a response without content.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(from = "Option<StoredAnswer>")]
pub(super) struct Answer {
    status: u16,
    /// In the order of the response, each byte of a value as one character.
    headers: Vec<(String, String)>,
    body: Content,
    /// The head of the handler's response, for the first request.
    #[serde(skip)]
    fresh: Option<response::Parts>,
}

#[derive(Deserialize)]
struct StoredAnswer {
    status: u16,
    headers: Vec<(String, String)>,
    body: Content,
}

impl From<Option<StoredAnswer>> for Answer {
    fn from(stored: Option<StoredAnswer>) -> Self {
        let empty = || StoredAnswer {
            status: StatusCode::NO_CONTENT.as_u16(),
            headers: Vec::new(),
            body: Content(Bytes::new()),
        };
        let StoredAnswer { status, headers, body } = stored.unwrap_or_else(empty);
        Self { status, headers, body, fresh: None }
    }
}

impl Answer {
    /// Reads a response to its end.
    pub(super) async fn from_response(response: Response, policy: &Policy) -> Result<Self, Problem> {
        let (parts, body) = response.into_parts();
        // A body that announces its length need not be read.
        if body.size_hint().lower() > policy.limit as u64 {
            return Err(Problem::ResponseTooLarge);
        }
        let body = match Limited::new(body, policy.limit).collect().await {
            Ok(read) => read.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => return Err(Problem::ResponseTooLarge),
            Err(_) => return Err(Problem::ResponseNotStorable),
        };
        let headers = parts.headers.iter().filter(|(name, _)| policy.keeps(name));
        let headers =
            headers.map(|(name, value)| (name.to_string(), value.as_bytes().iter().copied().map(char::from).collect()));
        Ok(Self { status: parts.status.as_u16(), headers: headers.collect(), body: Content(body), fresh: Some(parts) })
    }

    /// Returns the response as the handler made it.
    pub(super) fn into_first(mut self) -> Response {
        match self.fresh.take() {
            Some(parts) => Response::from_parts(parts, Body::from(self.body.0)),
            None => self.into_replay(),
        }
    }

    /// Returns the response as it was stored.
    pub(super) fn into_replay(self) -> Response {
        let mut response = Response::new(Body::from(self.body.0));
        // An invalid status or header was written by another version.
        *response.status_mut() = StatusCode::from_u16(self.status).unwrap_or(StatusCode::OK);
        for (name, value) in self.headers {
            let value: Option<Vec<u8>> = value.chars().map(|c| u8::try_from(c).ok()).collect();
            let value = value.and_then(|bytes| HeaderValue::from_bytes(&bytes).ok());
            if let (Ok(name), Some(value)) = (HeaderName::try_from(name), value) {
                response.headers_mut().append(name, value);
            }
        }
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
        response
    }
}

/// Bytes, which are stored as text where they are UTF-8.
#[derive(Clone, Debug)]
struct Content(Bytes);

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Encoded {
    Text(String),
    Base64(String),
}

impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let encoded = match std::str::from_utf8(&self.0) {
            Ok(text) => Encoded::Text(text.to_owned()),
            Err(_) => Encoded::Base64(BASE64_STANDARD.encode(&self.0)),
        };
        encoded.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(match Encoded::deserialize(deserializer)? {
            Encoded::Text(text) => text.into(),
            Encoded::Base64(text) => BASE64_STANDARD.decode(text).map_err(D::Error::custom)?.into(),
        }))
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn every_stored_header_is_documented() {
        let (_, list) = include_str!("../http.rs").split_once("and these headers, in").expect("the list");
        let (list, _) = list.split_once("and those").expect("its end");
        // Every second part is between two backticks.
        let documented: Vec<_> = list.split('`').skip(1).step_by(2).map(str::to_lowercase).collect();
        let stored: Vec<_> = STORED_HEADERS.iter().map(HeaderName::to_string).collect();
        assert_eq!(documented, stored);
    }
}
