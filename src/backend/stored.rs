//! The format of rows, common to all databases.

use std::str::FromStr;
use std::time::Duration;

use foldhash::{HashMap, HashSet};
use sqlx::{ColumnIndex, Decode, Type};

use super::admin::{ListedHolder, ListedWaiter};
use crate::clock::CENTURY;
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{AcquisitionId, ClientId, CurrentHolder, EntryRow, EntryState, Holder, LeaseRow, Mode, Response};
use crate::token::FencingToken;

/// The value of `sqlock_lease.id` for a released name that stays unavailable until it expires.
pub(crate) const KEPT: &str = "kept";

/// The value of `sqlock_lease.id` while the entries of the name hold it.
pub(crate) const ENTRIES: &str = "entries";

/// The empty value of every column with an id.
pub(crate) const NO_ID: &str = "";

/// A row of any database.
pub(crate) trait TableRow: sqlx::Row {
    fn number(&self, column: &str) -> Result<i64, sqlx::Error>;
    fn text(&self, column: &str) -> Result<String, sqlx::Error>;
    /// Reads a text that may be NULL.
    fn optional_text(&self, column: &str) -> Result<Option<String>, sqlx::Error>;
}

impl<R> TableRow for R
where
    R: sqlx::Row,
    for<'a> &'a str: ColumnIndex<R>,
    for<'a> i64: Decode<'a, R::Database> + Type<R::Database>,
    for<'a> String: Decode<'a, R::Database> + Type<R::Database>,
{
    fn number(&self, column: &str) -> Result<i64, sqlx::Error> {
        self.try_get(column)
    }

    fn text(&self, column: &str) -> Result<String, sqlx::Error> {
        self.try_get(column)
    }

    fn optional_text(&self, column: &str) -> Result<Option<String>, sqlx::Error> {
        self.try_get(column)
    }
}

/// Parses an id. Empty: there is none.
pub(crate) fn parse_id<T: FromStr>(text: &str) -> Result<Option<T>, sqlx::Error>
where
    T::Err: std::error::Error + Send + Sync + 'static,
{
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|error| sqlx::Error::Decode(Box::new(error)))
}

/// Converts a remaining time from microseconds. `None`: it has passed.
pub(crate) fn remaining(us: i64) -> Option<Duration> {
    u64::try_from(us).ok().filter(|us| *us > 0).map(Duration::from_micros)
}

pub(crate) fn holder(id: &str) -> Result<Holder, sqlx::Error> {
    Ok(match id {
        KEPT => Holder::Kept,
        ENTRIES => Holder::Entries,
        id => parse_id(id)?.map_or(Holder::Nobody, Holder::Lease),
    })
}

pub(crate) fn holder_text(holder: Holder) -> String {
    match holder {
        Holder::Nobody => NO_ID.into(),
        Holder::Kept => KEPT.into(),
        Holder::Entries => ENTRIES.into(),
        Holder::Lease(id) => id.to_string(),
    }
}

/// Formats the client whose heartbeat renews a row.
pub(crate) fn client_text(client: Option<ClientId>) -> String {
    client.map_or_else(String::new, |client| client.to_string())
}

impl Mode {
    /// Returns the columns `units` and `permits`.
    pub(crate) fn stored(self) -> (i64, i64) {
        match self {
            Self::Exclusive => (0, 0),
            Self::Shared { units, permits } => (units.into(), permits.into()),
        }
    }

    pub(crate) fn from_stored(units: i64, permits: i64) -> Self {
        let number = |n: i64| u32::try_from(n).unwrap_or(u32::MAX);
        if units <= 0 { Self::Exclusive } else { Self::Shared { units: number(units), permits: number(permits) } }
    }
}

/// Reads the columns `id, owner, client, token, remaining, waiting, lost, asked`. `remaining`
/// depends on the expiry and the heartbeat.
pub(crate) fn read_lease(row: &impl TableRow) -> Result<LeaseRow, sqlx::Error> {
    let holder = holder(&row.text("id")?)?;
    let counts = matches!(holder, Holder::Lease(_) | Holder::Kept);
    Ok(LeaseRow {
        holder,
        owner: parse_id::<Owner>(&row.text("owner")?)?,
        client: parse_id(&row.text("client")?)?,
        token: row.number("token")?,
        remaining: remaining(row.number("remaining")?).filter(|_| counts),
        waiting: row.number("waiting")?,
        lost: row.number("lost")?,
        asked: row.number("asked")?,
    })
}

/// Reads the columns `entry_id, entry_client, entry_owner, is_renewed, units, permits, entry_token,
/// ttl, arrived_at, entry_remaining`. `is_renewed` is a number. `None`: `entry_id` is empty, because a
/// name without entries is read as one row.
pub(crate) fn read_entry(row: &impl TableRow) -> Result<Option<EntryRow>, sqlx::Error> {
    let Some(id) = parse_id::<AcquisitionId>(&row.text("entry_id")?)? else {
        return Ok(None);
    };
    Ok(Some(EntryRow {
        id,
        client: parse_id(&row.text("entry_client")?)?,
        owner: parse_id(&row.text("entry_owner")?)?,
        is_renewed: row.number("is_renewed")? != 0,
        mode: Mode::from_stored(row.number("units")?, row.number("permits")?),
        state: EntryState::from_token(row.number("entry_token")?),
        ttl: remaining(row.number("ttl")?).unwrap_or_default(),
        arrived: row.number("arrived_at")?,
        remaining: remaining(row.number("entry_remaining")?),
    }))
}

/// Reads the row of a holder in a list of names.
pub(crate) fn read_holder(row: &impl TableRow, name: String) -> Result<ListedHolder, sqlx::Error> {
    Ok(ListedHolder {
        name,
        mode: Mode::from_stored(row.number("units")?, row.number("permits")?),
        owner: parse_id(&row.text("owner")?)?,
        acquisitions: row.number("acquisitions")?,
        token: row.number("token")?,
        holder: row.text("holder")?,
        label: row.text("label")?,
        acquired_at: row.number("acquired_at")?,
        expires_at: row.number("expires_at")?,
        beat_at: row.number("beat_at")?,
        now: row.number("now")?,
        waiters: row.number("waiters")?,
        note: row.optional_text("note")?,
    })
}

/// Reads a waiting entry.
pub(crate) fn read_waiter(row: &impl TableRow) -> Result<ListedWaiter, sqlx::Error> {
    Ok(ListedWaiter {
        id: row.text("id")?.parse().map_err(|error| sqlx::Error::Decode(Box::new(error)))?,
        mode: Mode::from_stored(row.number("units")?, row.number("permits")?),
        holder: row.text("holder")?,
        label: row.text("label")?,
        arrived_at: row.number("arrived_at")?,
    })
}

/// Returns the holder in a row, for a refused claim.
pub(crate) fn current_holder(row: &LeaseRow) -> CurrentHolder {
    match row {
        LeaseRow { holder: Holder::Entries, .. } => CurrentHolder::Unknown,
        LeaseRow { remaining: Some(remaining), owner, .. } => {
            CurrentHolder::Valid { owner: *owner, remaining: *remaining }
        }
        _ => CurrentHolder::Vacant,
    }
}

/// Converts a duration to microseconds for the database, with a limit that keeps sums with a time
/// in range.
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.min(CENTURY).as_micros()).unwrap_or(i64::MAX)
}

/// Makes the answers to a batch from rows with the names whose holding changed.
#[cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    allow(dead_code, reason = "MySQL reads the holdings after the change")
)]
pub(crate) fn answers_by_name<'n>(
    changed: &[impl TableRow],
    names: impl Iterator<Item = &'n LockName>,
    answer: &Response,
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let changed = changed.iter().map(|row| row.text("name")).collect::<Result<HashSet<_>, _>>()?;
    Ok(names.map(|name| changed.contains(name.as_str()).then(|| answer.clone())).collect())
}

/// Returns the tokens of a batch's grants from rows with their ids and tokens.
#[cfg_attr(
    not(any(feature = "postgres", feature = "sqlite")),
    allow(dead_code, reason = "MySQL reads the holdings after the change")
)]
pub(crate) fn tokens_by_id(granted: &[impl TableRow]) -> Result<HashMap<AcquisitionId, FencingToken>, sqlx::Error> {
    let mut tokens = HashMap::default();
    for row in granted {
        if let (Some(id), Some(token)) = (parse_id(&row.text("id")?)?, token(row.number("token")?)) {
            tokens.insert(id, token);
        }
    }
    Ok(tokens)
}

/// Converts a token from a row. The tables hold positive ones only; another value is not a grant.
pub(crate) fn token(value: i64) -> Option<FencingToken> {
    FencingToken::new(value)
}

/// Converts the age of the tables from microseconds. A clock that was set back makes them young.
pub(crate) fn age_from_micros(age: i64) -> Duration {
    Duration::from_micros(u64::try_from(age).unwrap_or(0))
}

/// Hashes parts with their lengths, so that different lists of parts have different digests.
pub(crate) fn digest<'a>(domain: &[u8], parts: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    hash.update(domain);
    for part in parts {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// Formats bytes as hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from(b"0123456789abcdef"[usize::from(value)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 0xf)]).collect()
}
