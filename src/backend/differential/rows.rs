//! Rows of the tables, as the model has them.

use crate::backend::memory::{Client, Entry, Lease};
use crate::backend::stored::{TableRow, holder, parse_id};
use crate::protocol::{AcquisitionId, EntryState, Mode};

/// Reads a row of `sqlock_client`.
pub(crate) fn read_client(row: &impl TableRow) -> Result<Client, sqlx::Error> {
    Ok(Client { beat_at: row.number("beat_at")?, notice: row.number("notice")? })
}

/// Reads a row of `sqlock_lease` without a mark for waiters.
pub(crate) fn read_lease(row: &impl TableRow) -> Result<Lease, sqlx::Error> {
    Ok(Lease {
        holder: holder(&row.text("id")?)?,
        owner: parse_id(&row.text("owner")?)?,
        client: parse_id(&row.text("client")?)?,
        token: row.number("token")?,
        ttl: row.number("ttl")?,
        expires_at: row.number("expires_at")?,
        waiting: 0,
        lost: row.number("lost")?,
        asked: row.number("asked")?,
    })
}

/// Reads a row of `sqlock_entry`. `is_renewed`: the column that has the value of `is_renewed` as an
/// integer.
pub(crate) fn read_entry(row: &impl TableRow, is_renewed: &str) -> Result<(AcquisitionId, Entry), sqlx::Error> {
    let entry = Entry {
        client: parse_id(&row.text("client")?)?,
        owner: parse_id(&row.text("owner")?)?,
        is_renewed: row.number(is_renewed)? != 0,
        mode: Mode::from_stored(row.number("units")?, row.number("permits")?),
        state: EntryState::from_token(row.number("token")?),
        arrived: row.number("arrived_at")?,
        ttl: row.number("ttl")?,
        expires_at: row.number("expires_at")?,
    };
    Ok((parse_id(&row.text("id")?)?.ok_or(sqlx::Error::RowNotFound)?, entry))
}
