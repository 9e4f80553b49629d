//! Outcomes that an operator resolves.

use serde::Serialize;

use super::handle::{Idempotency, lease_name};
use super::inspect::time_of_micros;
use super::key::{self, IdempotencyKey};
use super::outcome::encode;
use super::seal::Content;
use crate::backend::records::{FullKey, RecordCommand, RecordState, ResolveRequest, StoredResolution};
use crate::error::{Error, Result};
use crate::token::FencingToken;

/// The longest note, in bytes.
const MAX_NOTE: usize = 1000;

/// The outcome found out by an operator, for example in the provider's books.
///
/// ```
/// # async fn example(payments: sqlock::idempotency::Idempotency) -> sqlock::Result<()> {
/// use sqlock::idempotency::{IdempotencyKey, Resolution};
///
/// let key = IdempotencyKey::new("alice", "order-17");
/// if let Some(token) = payments.inspect(&key).await?.and_then(|record| record.token) {
///     let found = Resolution::done(&"receipt 17")?.by("ann").note("charge ch_17 in the provider's books");
///     payments.resolve(&key, token, found).await?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "an outcome is resolved by Idempotency::resolve"]
pub struct Resolution {
    result: Option<Vec<u8>>,
    by: String,
    note: String,
}

impl Resolution {
    /// The request took effect. Later requests with the key receive this result.
    ///
    /// # Errors
    ///
    /// [`Error::Json`]: the result is not JSON.
    pub fn done<T: Serialize + ?Sized>(result: &T) -> Result<Self> {
        Ok(Self::new(Some(encode(result, usize::MAX)?)))
    }

    /// The request certainly had no effect. Its key is free, and an issued token valid again.
    pub fn failed() -> Self {
        Self::new(None)
    }

    fn new(result: Option<Vec<u8>>) -> Self {
        Self { result, by: String::new(), note: String::new() }
    }

    /// Sets the operator who found out the outcome: 1 to 255 bytes, required.
    pub fn by(mut self, operator: impl Into<String>) -> Self {
        self.by = operator.into();
        self
    }

    /// Adds how the outcome was found out: at most 1000 bytes.
    pub fn note(mut self, text: impl Into<String>) -> Self {
        self.note = text.into();
        self
    }
}

/// Omits the result, which may be a secret.
impl std::fmt::Debug for Resolution {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resolution")
            .field("is_done", &self.result.is_some())
            .field("by", &self.by)
            .field("note", &self.note)
            .finish_non_exhaustive()
    }
}

impl Idempotency {
    /// Resolves an outcome that an operator has found out: an
    /// [unknown](crate::idempotency::Outcome::Unknown) one, or that of an attempt that has died
    /// without recording one. Records the operator. The token names the attempt. Returns `false`,
    /// and changes nothing, when the attempt is not the latest or in progress, or the request is
    /// done. An attempt is in progress while it holds its lease.
    ///
    /// A result is replayed from now on for the retention of the request.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`](crate::Error::InvalidKey), also for the operator's name and the note;
    /// [`Error::ResultTooLarge`](crate::Error::ResultTooLarge),
    /// [`Error::Sealed`](crate::Error::Sealed),
    /// [`Error::Unavailable`](crate::Error::Unavailable),
    /// [`Error::NotMigrated`](crate::Error::NotMigrated).
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the outcome may be resolved;
    /// [`resolutions`](Self::resolutions) shows it.
    pub async fn resolve(&self, key: &IdempotencyKey, token: FencingToken, resolution: Resolution) -> Result<bool> {
        let Resolution { result, by, note } = resolution;
        key::check("operator", &by)?;
        check_note(&note)?;
        if let Some(bytes) = result.as_ref().map(Vec::len).filter(|bytes| *bytes > self.result_limit) {
            return Err(Error::ResultTooLarge { bytes, limit: self.result_limit });
        }
        let key = self.find_key(key).await?;
        if self.is_in_progress(&key, token).await? {
            return Ok(false);
        }
        let id = key.id;
        let result = result.map(|result| self.seal.seal(Content::Result, &id, result)).transpose()?;
        let request = ResolveRequest { id: id.clone(), token: token.get(), result, by: by.clone(), note: note.clone() };
        let outcome = request.outcome();
        let answer = self.client.run_with_answer(RecordCommand::Resolve(request)).await;
        let changed = answer.result?.changed > 0;
        if changed || !answer.may_linger {
            return Ok(changed);
        }
        // A command that is repeated after a lost reply finds its own resolution.
        let is_own = |found: &StoredResolution| {
            found.token == token.get() && found.outcome == outcome && found.by == by && found.note == note
        };
        let found = self.send(RecordCommand::ListResolutions { id }).await?.resolutions;
        Ok(found.last().is_some_and(is_own))
    }

    /// Returns whether the attempt with this token has not ended and holds its lease. A lease that
    /// has ended is never held again under the same token.
    async fn is_in_progress(&self, key: &FullKey, token: FencingToken) -> Result<bool> {
        let found = self.send(RecordCommand::Read(key.clone())).await?.records;
        if !found.iter().any(|record| record.state == RecordState::Started && record.token == token.get()) {
            return Ok(false);
        }
        let holders = crate::inspect::holders(&self.client, &lease_name(key)).await?;
        Ok(holders.iter().any(|holder| holder.token == token))
    }

    /// Lists the resolutions of a key, the oldest first, even if its record is deleted.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`](crate::Error::InvalidKey),
    /// [`Error::Unavailable`](crate::Error::Unavailable),
    /// [`Error::NotMigrated`](crate::Error::NotMigrated).
    ///
    /// # Cancel safety
    ///
    /// The call only reads.
    pub async fn resolutions(&self, key: &IdempotencyKey) -> Result<Vec<ResolutionInfo>> {
        let id = self.find_key(key).await?.id;
        let found = self.send(RecordCommand::ListResolutions { id }).await?.resolutions;
        Ok(found.into_iter().map(ResolutionInfo::from_stored).collect())
    }
}

fn check_note(note: &str) -> Result<()> {
    let reason = match note {
        note if note.len() > MAX_NOTE => "it is longer than 1000 bytes",
        note if note.contains('\0') => "it contains a NUL character",
        _ => return Ok(()),
    };
    Err(Error::InvalidKey { what: "note", reason })
}

/// The resolution of an outcome by an operator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ResolutionInfo {
    /// The outcome: `done` or `failed`.
    pub outcome: &'static str,
    /// The token of the attempt.
    pub token: Option<FencingToken>,
    /// The operator who resolved the outcome.
    pub by: String,
    /// How the outcome was found out. May be empty.
    pub note: String,
    /// When the outcome was resolved, by the database's clock.
    #[serde(with = "crate::rfc3339")]
    pub at: chrono::DateTime<chrono::Utc>,
}

impl ResolutionInfo {
    fn from_stored(stored: StoredResolution) -> Self {
        Self {
            outcome: stored.outcome,
            token: crate::backend::token(stored.token),
            by: stored.by,
            note: stored.note,
            at: time_of_micros(stored.at),
        }
    }
}
