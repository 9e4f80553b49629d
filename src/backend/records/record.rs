//! A record as it stands in its table.

use sqlx::QueryBuilder;

use super::Records;
use super::key::FullKey;

/// A record as it stands in its table.
#[derive(Clone)]
pub(crate) struct Record {
    pub(crate) key: FullKey,
    pub(crate) fingerprint: Vec<u8>,
    pub(crate) state: State,
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

    /// Whether the key is new again.
    pub(crate) fn is_forgotten(&self) -> bool {
        self.state == State::Done && self.is_expired() && !self.permanent
    }
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Issued,
    Started,
    Unknown,
    Done,
    Expired,
}

impl State {
    pub(crate) const ALL: [Self; 5] = [Self::Issued, Self::Started, Self::Unknown, Self::Done, Self::Expired];

    pub(crate) fn as_str(self) -> &'static str {
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
            .ok_or_else(|| sqlx::Error::Decode(format!("{text:?} is no state of a record").into()))
    }
}

pub(super) const COLUMNS: &str = "id, namespace, principal, request_key, fingerprint, state, token, attempts, permanent, result, created_at, \
     expires_at, ";

/// Reads a record; `present`: as it is now, not as it was when the transaction began to read.
pub(crate) async fn read<DB: Records>(
    conn: &mut DB::Connection,
    id: &str,
    present: &str,
) -> Result<Option<Record>, sqlx::Error> {
    let mut query = QueryBuilder::new("SELECT ");
    query.push(COLUMNS).push(DB::NOW).push(" FROM sqlock_idem WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(present);
    DB::fetch(conn, &mut query).await?.first().map(record::<DB>).transpose()
}

pub(super) fn record<DB: Records>(row: &DB::Row) -> Result<Record, sqlx::Error> {
    Ok(Record {
        key: FullKey {
            id: DB::text(row, 0)?,
            namespace: DB::text(row, 1)?,
            principal: DB::text(row, 2)?,
            key: DB::text(row, 3)?,
        },
        fingerprint: DB::bytes(row, 4)?.unwrap_or_default(),
        state: State::parse(&DB::text(row, 5)?)?,
        token: DB::integer(row, 6)?,
        attempts: DB::integer(row, 7)?,
        permanent: DB::integer(row, 8)? != 0,
        result: DB::bytes(row, 9)?,
        created_at: DB::integer(row, 10)?,
        expires_at: DB::integer(row, 11)?,
        now: DB::integer(row, 12)?,
    })
}
