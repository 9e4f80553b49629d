//! Inspection of the records: for operators and their tools.

use std::fmt;

use serde::ser::SerializeStruct as _;
use serde::{Serialize, Serializer};

use super::handle::{Idempotency, lease_name};
use super::key::{self, IdempotencyKey};
use crate::backend::records::{FullKey, Record, RecordCommand, RecordState, Selection};
use crate::error::Result;
use crate::token::FencingToken;

impl Idempotency {
    /// Lists records of this namespace that have not ended, or whose outcome is unknown, in order of
    /// creation, at most `limit`: attempts [under a lease](Self::attempt), including those in
    /// progress, and requests whose transaction was [ended by their work](Self::run).
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
    pub async fn unfinished(&self, limit: u32) -> Result<Vec<RecordInfo>> {
        self.list(Selection { states: Selection::UNFINISHED.into(), limit, ..Selection::default() }).await
    }

    /// Lists the dead letters of this namespace, in order of creation, at most `limit`: records
    /// that have not ended, or whose outcome is unknown, after
    /// [the most attempts](crate::idempotency::ResumePolicy::max_attempts), so that
    /// [`resume`](Self::resume) passes them over. An operator [resolves](Self::resolve) them. The
    /// last attempt may still be in progress.
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
    pub async fn dead_letters(&self, limit: u32) -> Result<Vec<RecordInfo>> {
        let min_attempts = self.resume_policy.max_attempts;
        self.list(Selection { states: Selection::UNFINISHED.into(), min_attempts, limit, ..Selection::default() }).await
    }

    /// Lists the records of this namespace, in order of creation, at most `limit`.
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
    pub async fn records(&self, limit: u32) -> Result<Vec<RecordInfo>> {
        self.list(Selection { limit, ..Selection::default() }).await
    }

    /// Lists the records of one namespace or of all, in one [state](RecordInfo::state) or in any,
    /// in order of creation, at most `limit`.
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
    pub async fn records_in(
        &self,
        namespace: Option<&str>,
        state: Option<RecordState>,
        limit: u32,
    ) -> Result<Vec<RecordInfo>> {
        if let Some(namespace) = namespace {
            key::check("namespace", namespace)?;
        }
        let (namespace, states) = (namespace.map(str::to_owned), state.into_iter().collect());
        let found =
            self.send(RecordCommand::List(Selection { namespace, states, limit, ..Selection::default() })).await?;
        Ok(found.records.into_iter().map(RecordInfo::from_record).collect())
    }

    /// Finds the key named by an operator, who may know only its digest.
    pub(super) async fn find_key(&self, key: &IdempotencyKey) -> Result<FullKey> {
        let plain = key.in_namespace(&self.namespace)?;
        let Some(long) = key.as_digest(&self.namespace) else {
            return Ok(plain);
        };
        let found = self.send(RecordCommand::Read(plain.clone())).await?.records;
        Ok(if found.is_empty() { long } else { plain })
    }

    async fn list(&self, selection: Selection) -> Result<Vec<RecordInfo>> {
        Ok(self.select(selection).await?.into_iter().map(RecordInfo::from_record).collect())
    }

    /// Reads records of this namespace.
    pub(super) async fn select(&self, selection: Selection) -> Result<Vec<Record>> {
        key::check("namespace", &self.namespace)?;
        let selection = Selection { namespace: Some(self.namespace.clone()), ..selection };
        Ok(self.send(RecordCommand::List(selection)).await?.records)
    }

    /// Deletes the expired records of all namespaces, in batches, and returns their number: results
    /// after their retention, and expired tokens. A record that has not ended does not expire. The
    /// [sweeper](crate::sweeper::Sweeper) deletes expired records as well.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable),
    /// [`Error::NotMigrated`](crate::Error::NotMigrated).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends the purge after the current batch.
    pub async fn purge(&self) -> Result<u64> {
        crate::sweeper::purge_records(&self.client, crate::sweeper::BATCH).await
    }

    /// Returns the committed record of a key, if there is one.
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
    pub async fn inspect(&self, key: &IdempotencyKey) -> Result<Option<RecordInfo>> {
        let found = self.send(RecordCommand::Read(self.find_key(key).await?)).await?;
        let Some(record) = found.records.into_iter().next() else {
            return Ok(None);
        };
        let steps =
            self.send(RecordCommand::ListSteps { id: record.key.id.clone(), begun: record.created_at }).await?.steps;
        let request_bytes = match Selection::UNFINISHED.contains(&record.state) {
            // The length without the byte of the format.
            true => self.read_request(&record).await?.map(|request| request.len().saturating_sub(1)),
            false => None,
        };
        Ok(Some(RecordInfo { steps, request_bytes, ..RecordInfo::from_record(record) }))
    }
}

/// The record of a key.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordInfo {
    /// The namespace.
    pub namespace: String,
    /// The principal, or the [digest](crate::idempotency::IdempotencyKey) of a long one. `None`:
    /// the key is global.
    pub principal: Option<String>,
    /// The key, or the [digest](crate::idempotency::IdempotencyKey) of a long one.
    pub key: String,
    /// The state.
    pub state: RecordState,
    /// The token of the latest attempt; for a request in one transaction whose outcome is unknown,
    /// the token by which it is [resolved](Idempotency::resolve). `None`: any other request in one
    /// transaction, or a token that was not used yet.
    pub token: Option<FencingToken>,
    /// The number of attempts under a lease.
    pub attempts: u32,
    /// The name of the lease of its attempts: `sqlock-idem/` and a digest of the key. While it is
    /// [held](crate::Locks::inspect), an attempt is in progress.
    pub lease: String,
    /// The bytes of the stored result. `None`: no result is stored, or it was not read.
    pub result_bytes: Option<usize>,
    /// The bytes of the [stored request](crate::idempotency::Fingerprint::with_request). `None`: no
    /// request is stored, or no longer, or it was not read, as in a list.
    pub request_bytes: Option<usize>,
    /// The names of the finished steps. Empty in a list.
    pub steps: Vec<String>,
    /// When the record was created, by the database's clock.
    pub created_at: chrono::DateTime<chrono::Utc>,
    /// When the result or the token expires, by the database's clock. A record that has not ended
    /// does not expire; its time is that of a result stored at its creation. The time of an expired
    /// record is the end of the year 9999.
    pub expires_at: chrono::DateTime<chrono::Utc>,
}

impl RecordInfo {
    fn from_record(record: Record) -> Self {
        Self {
            lease: lease_name(&record.key),
            namespace: record.key.namespace,
            principal: Some(record.key.principal).filter(|principal| !principal.is_empty()),
            key: record.key.key,
            state: record.state,
            token: crate::backend::token(record.token),
            attempts: u32::try_from(record.attempts).unwrap_or(u32::MAX),
            result_bytes: record.result.map(|result| result.len()),
            request_bytes: None,
            steps: Vec::new(),
            created_at: time_of_micros(record.created_at),
            expires_at: time_of_micros(record.expires_at),
        }
    }
}

pub(super) fn time_of_micros(micros: i64) -> chrono::DateTime<chrono::Utc> {
    chrono::DateTime::from_timestamp_micros(micros).unwrap_or_default()
}

/// Writes the fields but `request_bytes` under their names, and times as RFC 3339. `expires_at` is
/// null for a record that has not ended, or is expired.
impl Serialize for RecordInfo {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Time<'a>(#[serde(with = "crate::rfc3339")] &'a chrono::DateTime<chrono::Utc>);
        let expires = matches!(self.state, RecordState::Done | RecordState::Issued);
        let mut object = to.serialize_struct("RecordInfo", 11)?;
        object.serialize_field("namespace", &self.namespace)?;
        object.serialize_field("principal", &self.principal)?;
        object.serialize_field("key", &self.key)?;
        object.serialize_field("state", &self.state)?;
        object.serialize_field("token", &self.token)?;
        object.serialize_field("attempts", &self.attempts)?;
        object.serialize_field("lease", &self.lease)?;
        object.serialize_field("result_bytes", &self.result_bytes)?;
        object.serialize_field("steps", &self.steps)?;
        object.serialize_field("created_at", &Time(&self.created_at))?;
        object.serialize_field("expires_at", &expires.then_some(Time(&self.expires_at)))?;
        object.end()
    }
}

/// Omits the key, which may be a secret.
impl fmt::Debug for RecordInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordInfo")
            .field("namespace", &self.namespace)
            .field("state", &self.state)
            .field("token", &self.token)
            .field("attempts", &self.attempts)
            .finish_non_exhaustive()
    }
}
