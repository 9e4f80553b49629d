//! The outcome of a request, and its stored result.

use std::convert::Infallible;
use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::handle::Idempotency;
use super::seal::Content;
use crate::backend::records::{ClaimRequest, Record, RecordState};
use crate::error::{Error, Result};
use crate::measure;

/// The outcome of a request with a key. `N` is the value of the first request; `R` the value of
/// later requests.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "the outcome says whether the request took effect"]
#[non_exhaustive]
pub enum Outcome<N, R = N> {
    /// The request was the first with this key.
    New(N),
    /// An earlier request with this key took effect; this is its result.
    Replay(R),
    /// Another request with this key is in progress.
    InProgress,
    /// Another request with this key, in progress or done, has a different fingerprint. The client
    /// has reused the key.
    Mismatch,
    /// The token of the request is not valid: expired, issued to another principal, or never
    /// issued. Or the key was used, its result has expired, and used keys are
    /// [refused](crate::idempotency::AfterRetention::Refuse).
    Expired,
    /// An earlier request with this key has ended, and its effect is unknown. It must be
    /// [resolved](crate::idempotency::Idempotency::resolve) by an operator; or
    /// [resumed](crate::idempotency::Idempotency::resume), if it was an attempt under a lease.
    Unknown,
}

impl<T> Outcome<T> {
    /// Returns the result of this request or of the first one, if any.
    pub fn into_value(self) -> Option<T> {
        match self {
            Self::New(value) | Self::Replay(value) => Some(value),
            _ => None,
        }
    }
}

impl<N, R> Outcome<N, R> {
    /// Returns whether the result is that of an earlier request.
    pub fn is_replay(&self) -> bool {
        matches!(self, Self::Replay(_))
    }

    /// Counts the outcome for dashboards.
    pub(super) fn measured(self) -> Self {
        measure::count_outcome(match self {
            Self::New(_) => "new",
            Self::Replay(_) => "replay",
            Self::InProgress => "in_progress",
            Self::Mismatch => "mismatch",
            Self::Expired => "expired",
            Self::Unknown => "unknown",
        });
        self
    }

    /// Converts the type of a new request's value. A new request becomes a request in progress.
    pub(super) fn without_new<M>(self) -> Outcome<M, R> {
        match self {
            Self::New(_) | Self::InProgress => Outcome::InProgress,
            Self::Replay(known) => Outcome::Replay(known),
            Self::Mismatch => Outcome::Mismatch,
            Self::Expired => Outcome::Expired,
            Self::Unknown => Outcome::Unknown,
        }
    }
}

/// Decodes the stored result of a request that is not new.
pub(super) fn decode_outcome<T: DeserializeOwned>(known: Outcome<Infallible, Stored>) -> Result<Outcome<T>> {
    Ok(match known {
        Outcome::New(never) => match never {},
        Outcome::Replay(stored) => Outcome::Replay(stored.get()?),
        Outcome::InProgress => Outcome::InProgress,
        Outcome::Mismatch => Outcome::Mismatch,
        Outcome::Expired => Outcome::Expired,
        Outcome::Unknown => Outcome::Unknown,
    })
}

impl Idempotency {
    /// Returns the outcome that a record implies for a request. `None`: the key can be claimed.
    pub(super) fn recorded_outcome<N>(
        &self,
        claim: &ClaimRequest,
        record: Record,
    ) -> Result<Option<Outcome<N, Stored>>> {
        let expired = record.is_expired();
        Ok(match record.state {
            // The token has expired, or the key is a token and the request does not say so.
            RecordState::Issued if claim.issued && !expired => None,
            RecordState::Issued => Some(Outcome::Expired),
            RecordState::Done if record.is_key_new() && !claim.issued => None,
            RecordState::Done if expired => Some(Outcome::Expired),
            RecordState::Expired => Some(Outcome::Expired),
            _ if record.fingerprint != claim.fingerprint => Some(Outcome::Mismatch),
            RecordState::Done => {
                let open = |result| self.seal.open(Content::Result, &record.key.id, result);
                Some(Outcome::Replay(Stored { bytes: record.result.map(open).transpose()? }))
            }
            RecordState::Started => Some(Outcome::InProgress),
            RecordState::Unknown => Some(Outcome::Unknown),
        })
    }
}

/// The stored result of a request that has taken effect.
#[derive(Clone, PartialEq, Eq)]
pub struct Stored {
    pub(super) bytes: Option<Vec<u8>>,
}

impl Stored {
    /// Decodes the result, which is null if a claim was committed without a
    /// result (not on MySQL and MariaDB).
    ///
    /// # Errors
    ///
    /// [`Error::Json`]: the result is not of this type.
    pub fn get<T: DeserializeOwned>(&self) -> Result<T> {
        decode(self.bytes.as_deref())
    }
}

impl fmt::Debug for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stored").field("bytes", &self.bytes.as_ref().map_or(0, Vec::len)).finish()
    }
}

pub(super) fn encode<T: Serialize + ?Sized>(result: &T, limit: usize) -> Result<Vec<u8>> {
    let bytes = serde_json::to_vec(result).map_err(|source| Error::Json { what: "the result", source })?;
    if bytes.len() > limit {
        return Err(Error::ResultTooLarge { bytes: bytes.len(), limit });
    }
    Ok(bytes)
}

/// Encodes a result that can be read back. (NaN and too deep nesting cannot.)
pub(super) fn encode_legibly<T: Serialize + DeserializeOwned>(result: &T, limit: usize) -> Result<Vec<u8>> {
    let bytes = encode(result, limit)?;
    decode::<T>(Some(&bytes))?;
    Ok(bytes)
}

pub(super) fn decode<T: DeserializeOwned>(bytes: Option<&[u8]>) -> Result<T> {
    serde_json::from_slice(bytes.unwrap_or(b"null")).map_err(|source| Error::Json { what: "the stored result", source })
}
