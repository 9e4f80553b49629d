//! The comparison of repeated requests.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::OriginalUri;
use axum::http::header::HOST;
use axum::http::request::Parts;
use axum::http::{HeaderName, Uri};

use super::super::Fingerprint;

pub(super) type FingerprintOf = dyn Fn(&Parts, &Bytes) -> Fingerprint + Send + Sync;

/// The parts of a request that are digested.
#[derive(Clone)]
pub(super) struct Comparison {
    pub(super) body: BodyRule,
    pub(super) host: bool,
    pub(super) headers: Vec<HeaderName>,
    /// The application's own digest, instead of all others.
    pub(super) custom: Option<Arc<FingerprintOf>>,
}

/// The digested form of a body.
#[derive(Clone)]
pub(super) enum BodyRule {
    Bytes,
    Json,
    /// The parts at these JSON Pointers.
    Fields(Vec<String>),
}

impl Comparison {
    pub(super) fn new() -> Self {
        Self { body: BodyRule::Bytes, host: false, headers: Vec::new(), custom: None }
    }

    pub(super) fn fingerprint_of(&self, parts: &Parts, body: &Bytes) -> Fingerprint {
        if let Some(custom) = &self.custom {
            return custom(parts, body);
        }
        // The URI as sent by the client, also in a nested router.
        let uri = parts.extensions.get().map_or(&parts.uri, |OriginalUri(uri)| uri);
        let target = uri.path_and_query().map_or("/", |target| target.as_str());
        let digest = |form: &str| self.add_head(Fingerprint::of([parts.method.as_str(), target, form]), parts, uri);
        let by_json = match &self.body {
            BodyRule::Bytes => None,
            BodyRule::Json => digest("json").and_json(body).ok(),
            BodyRule::Fields(pointers) => {
                digest("fields").and_json_fields(body, pointers.iter().map(String::as_str)).ok()
            }
        };
        by_json.unwrap_or_else(|| digest("bytes").and(body))
    }

    /// Adds the host and the headers, each with its name and the number of its values.
    fn add_head(&self, mut fingerprint: Fingerprint, parts: &Parts, uri: &Uri) -> Fingerprint {
        if self.host {
            let header = || parts.headers.get(HOST).map(|host| host.as_bytes());
            let host = uri.authority().map(|host| host.as_str().as_bytes()).or_else(header);
            // Host names are case-insensitive.
            fingerprint = fingerprint.and("host").and(host.unwrap_or_default().to_ascii_lowercase());
        }
        for name in &self.headers {
            let values = parts.headers.get_all(name);
            fingerprint = fingerprint.and(name.as_str()).and(values.iter().count().to_string());
            fingerprint = values.iter().fold(fingerprint, |fingerprint, value| fingerprint.and(value.as_bytes()));
        }
        fingerprint
    }
}
