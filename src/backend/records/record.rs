//! The record of a request.

use std::fmt;

use serde::Serialize;
use sqlx::QueryBuilder;

use super::RecordDialect;
use super::key::FullKey;

/// A record as it is stored.
#[derive(Clone)]
pub(crate) struct Record {
    pub(crate) key: FullKey,
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) state: RecordState,
    pub(crate) token: i64,
    pub(crate) attempts: i64,
    pub(crate) permanent: bool,
    pub(crate) result: Option<Vec<u8>>,
    /// Microseconds since the Unix epoch, as `expires_at` and `now`: all by the database's clock.
    pub(crate) created_at: i64,
    pub(crate) expires_at: i64,
    pub(crate) now: i64,
}

impl Record {
    pub(crate) fn is_expired(&self) -> bool {
        self.expires_at <= self.now
    }

    /// Returns whether the key counts as new.
    pub(crate) fn is_key_new(&self) -> bool {
        self.state == RecordState::Done && self.is_expired() && !self.permanent
    }
}

/// The state of the record of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum RecordState {
    /// The key is a token that a client may use once, and was not used yet.
    Issued,
    /// An attempt under a lease has begun and has not ended. It is in progress while its lease is
    /// held; otherwise it has died.
    Started,
    /// The effect may have happened.
    Unknown,
    /// The request took effect, and its result is stored.
    Done,
    /// The request took effect, its result is purged, and the key is
    /// [refused](crate::idempotency::AfterRetention::Refuse).
    Expired,
}

impl RecordState {
    pub(crate) const ALL: [Self; 5] = [Self::Issued, Self::Started, Self::Unknown, Self::Done, Self::Expired];

    /// Returns the state as one word in lower case.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Issued => "issued",
            Self::Started => "started",
            Self::Unknown => "unknown",
            Self::Done => "done",
            Self::Expired => "expired",
        }
    }

    pub(crate) fn parse(text: &str) -> Result<Self, sqlx::Error> {
        Self::ALL
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| sqlx::Error::Decode(format!("{text:?} is not a state of a record").into()))
    }
}

/// Writes the state as [`as_str`](RecordState::as_str) returns it.
impl fmt::Display for RecordState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The columns of [`decode`], except the current time, which follows them.
pub(super) const COLUMNS: &str = "id, namespace, principal, request_key, fingerprint, state, token, attempts, permanent, \
     result, created_at, expires_at, ";

/// Reads a record. `clause` is empty, or a clause of the SELECT, such as one that reads the latest
/// committed record instead of the snapshot.
pub(crate) async fn read<DB: RecordDialect>(
    conn: &mut DB::Connection,
    id: &str,
    clause: &str,
) -> Result<Option<Record>, sqlx::Error> {
    let mut query = QueryBuilder::new("SELECT ");
    query.push(COLUMNS).push(DB::NOW).push(" FROM sqlock_idem WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(clause);
    DB::fetch(conn, &mut query).await?.first().map(decode::<DB>).transpose()
}

/// Reads a record from [`COLUMNS`] and the current time.
pub(super) fn decode<DB: RecordDialect>(row: &DB::Row) -> Result<Record, sqlx::Error> {
    Ok(Record {
        key: FullKey {
            id: DB::read_text(row, 0)?,
            namespace: DB::read_text(row, 1)?,
            principal: DB::read_text(row, 2)?,
            key: DB::read_text(row, 3)?,
        },
        fingerprint: DB::read_bytes(row, 4)?.unwrap_or_default(),
        state: RecordState::parse(&DB::read_text(row, 5)?)?,
        token: DB::integer(row, 6)?,
        attempts: DB::integer(row, 7)?,
        permanent: DB::integer(row, 8)? != 0,
        result: DB::read_bytes(row, 9)?,
        created_at: DB::integer(row, 10)?,
        expires_at: DB::integer(row, 11)?,
        now: DB::integer(row, 12)?,
    })
}
