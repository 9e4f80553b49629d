//! What stands in the records: for operators and their tools.

use std::fmt;

use super::handle::{Idempotency, lease_name};
use super::key::{self, IdempotencyKey};
use crate::backend::records::{Errand, Record, State};
use crate::error::Result;
use crate::token::FencingToken;

impl Idempotency {
    /// What has not ended, or of which nobody knows how it has, in order of creation, at most `limit`: attempts
    /// [under a lease](Self::attempt), those at work included.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable), [`Error::NotMigrated`](crate::Error::NotMigrated).
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn unfinished(&self, limit: u32) -> Result<Vec<RecordInfo>> {
        let mut all = self.list(Some(State::Started), limit).await?;
        all.extend(self.list(Some(State::Unknown), limit).await?);
        all.sort_by_key(|record| record.created_at);
        all.truncate(limit as usize);
        Ok(all)
    }

    /// The records of this namespace, in order of creation, at most `limit`.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable), [`Error::NotMigrated`](crate::Error::NotMigrated).
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn records(&self, limit: u32) -> Result<Vec<RecordInfo>> {
        self.list(None, limit).await
    }

    /// For those who look after all of them: the records of some namespace, or of all, in some [state](RecordInfo::state), or
    /// in any, in order of creation, at most `limit`. In a state that there is not, there are none.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`](crate::Error::InvalidKey), [`Error::Unavailable`](crate::Error::Unavailable), [`Error::NotMigrated`](crate::Error::NotMigrated).
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn records_in(
        &self,
        namespace: Option<&str>,
        state: Option<&str>,
        limit: u32,
    ) -> Result<Vec<RecordInfo>> {
        if let Some(namespace) = namespace {
            key::check("namespace", namespace)?;
        }
        let Ok(state) = state.map(State::parse).transpose() else {
            return Ok(Vec::new());
        };
        let found = self.send(Errand::List { namespace: namespace.map(str::to_owned), state, limit }).await?;
        Ok(found.records.into_iter().map(RecordInfo::of).collect())
    }

    async fn list(&self, state: Option<State>, limit: u32) -> Result<Vec<RecordInfo>> {
        self.records_in(Some(&self.namespace), state.map(State::as_str), limit).await
    }

    /// Deletes the records of all namespaces whose time has run out, in batches, and tells how many: results that are not told
    /// any more, and tokens that are not good any more. What has not ended has no such time. The [sweeper](crate::sweeper::Sweeper)
    /// does it as well.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable), [`Error::NotMigrated`](crate::Error::NotMigrated).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends it after the batch under way.
    pub async fn purge(&self) -> Result<u64> {
        crate::sweeper::purge_records(&self.client, crate::sweeper::BATCH).await
    }

    /// What stands under a key. `None`: nothing, or nothing that has been committed.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`](crate::Error::InvalidKey), [`Error::Unavailable`](crate::Error::Unavailable), [`Error::NotMigrated`](crate::Error::NotMigrated).
    ///
    /// # Cancel safety
    ///
    /// It only reads.
    pub async fn inspect(&self, key: &IdempotencyKey) -> Result<Option<RecordInfo>> {
        let found = self.send(Errand::Read(key.within(&self.namespace)?)).await?;
        let Some(record) = found.records.into_iter().next() else {
            return Ok(None);
        };
        let steps = self.send(Errand::Steps { id: record.key.id.clone(), begun: record.created_at }).await?.steps;
        Ok(Some(RecordInfo { steps, ..RecordInfo::of(record) }))
    }

    /// Deletes the record of an attempt that has not ended well, so that the key is as good as new (a token that was issued, as
    /// good as before): for an operator who has
    /// found out that nothing took effect. The token says which attempt is meant: `false` when it is not the latest, or the
    /// request is done.
    ///
    /// One that is at work is not stopped, but it cannot store its result any more.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidKey`](crate::Error::InvalidKey), [`Error::Unavailable`](crate::Error::Unavailable), [`Error::NotMigrated`](crate::Error::NotMigrated).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves open whether it is deleted. It can be repeated.
    pub async fn forget(&self, key: &IdempotencyKey, token: FencingToken) -> Result<bool> {
        let key = key.within(&self.namespace)?;
        let command = Errand::Forget { id: key.id.clone(), token: token.get() };
        let answer = self.client.ask(command).await;
        // Sent again after a reply that was lost, it finds nothing any more.
        let gone = answer.may_linger && self.send(Errand::Read(key)).await?.records.is_empty();
        Ok(answer.result?.changed > 0 || gone)
    }
}

/// What stands under a key, as [`Idempotency::inspect`] tells it.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecordInfo {
    /// The namespace that it is in.
    pub namespace: String,
    /// Whose key it is. `None`: everybody's.
    pub principal: Option<String>,
    /// The key.
    pub key: String,
    /// How far it has come: `issued`, `started`, `unknown` or `done`.
    pub state: &'static str,
    /// The token of the latest attempt. `None`: it was done in one transaction.
    pub token: Option<FencingToken>,
    /// How many attempts were made under a lease.
    pub attempts: u32,
    /// Under what name its attempts hold their lease: `sqlock-idem/` and a digest of the key. While it is
    /// [held](crate::Locks::inspect), somebody is at work.
    pub lease: String,
    /// How many bytes the stored result has. `None`: there is none, or it was not asked for.
    pub result_bytes: Option<usize>,
    /// The names of the steps that are done. Empty in a list.
    pub steps: Vec<String>,
    /// When it was made, by the database's clock.
    pub created_at: chrono::DateTime<chrono::Utc>,
    /// Until when the result is told, or the token is good, by the database's clock. What has not ended has no such time:
    /// it is that which it would have if it were done.
    pub expires_at: chrono::DateTime<chrono::Utc>,
}

impl RecordInfo {
    fn of(record: Record) -> Self {
        let at = |micros| chrono::DateTime::from_timestamp_micros(micros).unwrap_or_default();
        Self {
            lease: lease_name(&record.key),
            namespace: record.key.namespace,
            principal: Some(record.key.principal).filter(|principal| !principal.is_empty()),
            key: record.key.key,
            state: record.state.as_str(),
            token: crate::backend::token(record.token),
            attempts: u32::try_from(record.attempts).unwrap_or(0),
            result_bytes: record.result.map(|result| result.len()),
            steps: Vec::new(),
            created_at: at(record.created_at),
            expires_at: at(record.expires_at),
        }
    }
}

/// Without the key, which is nobody else's business.
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
