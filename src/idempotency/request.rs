//! Requests that are stored with the records of attempts, for `resume`.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::attempt::Attempt;
use super::handle::Idempotency;
use super::key::Fingerprint;
use super::seal::Content;
use crate::backend::records::{Record, RecordCommand};
use crate::error::{Error, Result};

/// The first byte of a request that is not sealed. Any bytes may follow.
const PLAIN: u8 = 1;

impl Fingerprint {
    /// Stores these bytes with the record of an attempt, for
    /// [`resume`](crate::idempotency::Idempotency::resume): the request, or as much of it as the
    /// handler needs. The bytes do not count for the fingerprint.
    ///
    /// The [attempts](Attempt::request) under a lease receive the bytes, which are deleted once the
    /// request has ended. A request [in one transaction](crate::idempotency::Idempotency::run)
    /// stores none, because a crash leaves nothing to resume.
    pub fn with_request(mut self, request: impl Into<Vec<u8>>) -> Self {
        self.request = Some(request.into());
        self
    }

    /// Stores a value as JSON, as [`with_request`](Self::with_request).
    ///
    /// # Errors
    ///
    /// [`Error::Json`]: the value is not JSON.
    pub fn with_json_request<T: Serialize + ?Sized>(self, request: &T) -> Result<Self> {
        let bytes = serde_json::to_vec(request).map_err(|source| Error::Json { what: "the request", source })?;
        Ok(self.with_request(bytes))
    }
}

impl Attempt {
    /// Returns the request that the first attempt has [stored](Fingerprint::with_request).
    pub fn request(&self) -> Option<&[u8]> {
        self.request.as_deref()
    }

    /// Returns the value that the first attempt has stored [as
    /// JSON](Fingerprint::with_json_request).
    ///
    /// # Errors
    ///
    /// [`Error::Json`]: the stored request is not of this type.
    pub fn json_request<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        let parse =
            |bytes| serde_json::from_slice(bytes).map_err(|source| Error::Json { what: "the stored request", source });
        self.request().map(parse).transpose()
    }
}

impl Idempotency {
    /// Returns a request as it is stored.
    pub(super) fn encode_request(&self, id: &str, request: &[u8]) -> Result<Vec<u8>> {
        let (bytes, limit) = (request.len(), self.request_limit);
        if bytes > limit {
            return Err(Error::RequestTooLarge { bytes, limit });
        }
        self.seal.seal(Content::Request, id, [&[PLAIN], request].concat())
    }

    /// Returns the request in a stored column.
    pub(super) fn decode_request(&self, id: &str, column: Vec<u8>) -> Result<Vec<u8>> {
        let mut request = self.seal.open(Content::Request, id, column)?;
        Ok(request.split_off(request.len().min(1)))
    }

    /// Reads the stored request of a record, without opening it.
    pub(super) async fn read_request(&self, record: &Record) -> Result<Option<Vec<u8>>> {
        let command = RecordCommand::ReadRequest { id: record.key.id.clone(), begun: record.created_at };
        Ok(self.send(command).await?.result)
    }
}
