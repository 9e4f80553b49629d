//! What becomes of a request, and its stored result.

use std::convert::Infallible;
use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::backend::records::{Claiming, Record, State};
use crate::error::{Error, Result};

/// What becomes of a request that comes with a key. `N`: what there is when it is the first one; `R`: what is told to others.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "whether the request took effect, now or before, is told by this"]
#[non_exhaustive]
pub enum Outcome<N, R = N> {
    /// It was the first one with this key.
    New(N),
    /// Another one with this key has taken effect before; this is its result.
    Replay(R),
    /// Another one with this key is at work.
    InProgress,
    /// Another one with this key, at work or done, asked for something else. Whoever sent it uses keys wrongly.
    Mismatch,
    /// It came with a token that is not good: expired, or issued to somebody else, or never.
    Expired,
    /// Another one with this key has ended, and nobody knows whether it took effect. It will have to be
    /// [resumed](crate::idempotency::Idempotency::resume), or [forgotten](crate::idempotency::Idempotency::forget).
    Unknown,
}

impl<T> Outcome<T> {
    /// The result, of this request or of the first one. `None`: there is none.
    pub fn into_value(self) -> Option<T> {
        match self {
            Self::New(value) | Self::Replay(value) => Some(value),
            _ => None,
        }
    }
}

impl<N, R> Outcome<N, R> {
    /// Whether the result is that of a request that came before.
    pub fn is_replay(&self) -> bool {
        matches!(self, Self::Replay(_))
    }

    /// The same for whoever could have got something else for a new one. (A new one is not; it would be told as in progress.)
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

/// What is told of a request that was not the first one.
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

/// What a record says to one who comes with a key. `None`: it says nothing, the key can be claimed.
pub(super) fn recorded_outcome<N>(claim: &Claiming, record: Record) -> Option<Outcome<N, Stored>> {
    let expired = record.is_expired();
    match record.state {
        // Whether it has expired, or was never claimed, or is not meant to be claimed like this.
        State::Issued if claim.issued && !expired => None,
        State::Issued => Some(Outcome::Expired),
        State::Done if expired && claim.issued => Some(Outcome::Expired),
        State::Done if expired => None,
        _ if record.fingerprint != claim.fingerprint => Some(Outcome::Mismatch),
        State::Done => Some(Outcome::Replay(Stored { bytes: record.result })),
        State::Started => Some(Outcome::InProgress),
        State::Unknown => Some(Outcome::Unknown),
    }
}

/// The stored result of a request that has taken effect.
#[derive(Clone, PartialEq, Eq)]
pub struct Stored {
    pub(super) bytes: Option<Vec<u8>>,
}

impl Stored {
    /// The result. Where a claim was committed without one, it is null.
    ///
    /// # Errors
    ///
    /// [`Error::Json`]: it is not of this type.
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

/// What cannot be read again as what it was (no number, too deeply nested) is not stored.
pub(super) fn encode_legibly<T: Serialize + DeserializeOwned>(result: &T, limit: usize) -> Result<Vec<u8>> {
    let bytes = encode(result, limit)?;
    decode::<T>(Some(&bytes))?;
    Ok(bytes)
}

pub(super) fn decode<T: DeserializeOwned>(bytes: Option<&[u8]>) -> Result<T> {
    serde_json::from_slice(bytes.unwrap_or(b"null")).map_err(|source| Error::Json { what: "the stored result", source })
}
