//! The records of requests that must take effect once: the statements common to all databases, in
//! the caller's transactions and on connections of the client. The statements of a single database
//! are in its own `records.rs`.

mod attempt;
mod claim;
mod command;
mod key;
mod list;
mod purge;
mod record;
mod request;
mod resolution;
mod step;

use sqlx::QueryBuilder;

use super::StoreFuture;
use super::dialect::Dialect;

pub(crate) use attempt::{AttemptEnding, end, lock_attempt};
pub(crate) use claim::complete;
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) use claim::push_replace_expired;
pub(crate) use claim::{ClaimOutcome, ClaimRequest, Rival};
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub(crate) use claim::{INTO, push_use_token, push_values};
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub(crate) use command::execute_command;
pub(crate) use command::{RecordCommand, RecordResponse};
pub(crate) use key::{FullKey, MAX_BYTES};
pub(crate) use list::{Position, Selection};
pub use record::RecordState;
pub(crate) use record::{Record, read};
pub(crate) use resolution::{ResolveRequest, StoredResolution};
pub(crate) use step::{Step, store_step};

/// The syntax and the behaviour of statements on records. Part of the sealed
/// [`Database`](super::Database).
pub trait RecordDialect: Dialect {
    /// The current time by the database's clock, in microseconds.
    const NOW: &'static str;
    /// The beginning and the end of an INSERT that skips existing rows.
    const INSERT_NEW: (&'static str, &'static str);
    /// The clause with which a SELECT locks its rows and skips rows that other transactions have
    /// locked.
    const SKIP_LOCKED: &'static str = "";
    /// Whether a DELETE can contain such a SELECT. Otherwise the SELECT runs before it, in the same
    /// transaction.
    const SKIPS_LOCKED_IN_DELETE: bool = false;
    /// The hint with which a SELECT reads the index by expiry, and locks no other rows.
    const EXPIRY_INDEX_HINT: &'static str = "";
    /// The hint with which a statement reads the primary key, and locks no other rows.
    const KEY_INDEX_HINT: &'static str = "";
    /// Whether texts that differ by trailing spaces are equal.
    const IGNORES_TRAILING_SPACES: bool = false;
    /// The column with the name of a step, as text.
    const STEP_COLUMN: &'static str;
    /// Whether a claim may wait for another, uncommitted claim. Another connection then looks for
    /// such a claim first.
    const CLAIM_MAY_WAIT: bool;
    /// The assignment of an UPDATE that writes a record only to lock it.
    const REWRITE: &'static str = "token = token";
    /// Whether some statements commit the transaction in which they are sent, and a claim with it.
    const COMMITS_IMPLICITLY: bool = false;

    /// Selects a text that identifies the database: the same on all nodes of a cluster, and
    /// different on other databases, as far as the server has such a text.
    const SELECT_IDENTITY: &'static str;

    /// Converts the text of [`SELECT_IDENTITY`](Self::SELECT_IDENTITY) to a comparable text.
    /// `None`: the database has no identity.
    fn parse_identity(text: String) -> Option<String> {
        Some(text)
    }

    /// Binds a text.
    fn push_text(query: &mut QueryBuilder<Self>, text: &str);

    /// Binds the name of a step.
    fn push_step(query: &mut QueryBuilder<Self>, name: &str) {
        Self::push_text(query, name);
    }

    /// Binds bytes.
    fn push_bytes(query: &mut QueryBuilder<Self>, bytes: &[u8]);

    /// Reads a text.
    fn read_text(row: &Self::Row, column: usize) -> Result<String, sqlx::Error>;

    /// Reads bytes.
    fn read_bytes(row: &Self::Row, column: usize) -> Result<Option<Vec<u8>>, sqlx::Error>;

    /// Claims a key in the caller's transaction. Does not wait for another transaction with a claim
    /// on the key, if the database can avoid the wait.
    fn claim<'a>(conn: &'a mut Self::Connection, claim: &'a ClaimRequest) -> StoreFuture<'a, ClaimOutcome>;

    /// Returns the open transaction that has claimed a key, on databases where reading the record
    /// does not show it.
    fn rival<'a>(conn: &'a mut Self::Connection, claim: &'a ClaimRequest) -> StoreFuture<'a, Option<Rival>> {
        let _ = (conn, claim);
        Box::pin(async { Ok(None) })
    }
}

/// Implements the binding and reading of texts and bytes, with the types of each database.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
macro_rules! text_and_bytes {
    () => {
        fn push_text(query: &mut QueryBuilder<Self>, text: &str) {
            query.push_bind(text.to_owned());
        }

        fn push_bytes(query: &mut QueryBuilder<Self>, bytes: &[u8]) {
            query.push_bind(bytes.to_vec());
        }

        fn read_text(row: &Self::Row, column: usize) -> Result<String, sqlx::Error> {
            row.try_get(column)
        }

        fn read_bytes(row: &Self::Row, column: usize) -> Result<Option<Vec<u8>>, sqlx::Error> {
            row.try_get(column)
        }
    };
}
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub(super) use text_and_bytes;

/// Returns the identity of the database. `None`: it has none.
pub(crate) async fn identity<DB: RecordDialect>(conn: &mut DB::Connection) -> Result<Option<String>, sqlx::Error> {
    let found = fetch_texts::<DB>(conn, &mut QueryBuilder::new(DB::SELECT_IDENTITY)).await?;
    Ok(found.into_iter().next().and_then(DB::parse_identity))
}

/// Fetches the texts in the first column.
async fn fetch_texts<DB: RecordDialect>(
    conn: &mut DB::Connection,
    query: &mut QueryBuilder<DB>,
) -> Result<Vec<String>, sqlx::Error> {
    DB::fetch(conn, query).await?.iter().map(|row| DB::read_text(row, 0)).collect()
}
