//! The records of requests that must take effect once: the statements that are alike on all
//! databases, in the caller's transactions and on connections of the client. The statements of a
//! single database are in its own `records.rs`.

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

pub(crate) use attempt::{Ending, end, hold_up};
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) use claim::push_or_anew;
pub(crate) use claim::{Claimed, Claiming, Rival};
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub(crate) use claim::{INTO, push_consume, push_values};
pub(crate) use claim::{complete, mark_unknown};
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub(crate) use command::carry;
pub(crate) use command::{Errand, Findings};
pub(crate) use key::FullKey;
pub(crate) use key::{MAX_BYTES, digest};
pub(crate) use list::{Place, Selection};
pub(crate) use record::{Record, State, read};
pub(crate) use resolution::{Resolved, Resolving};
pub(crate) use step::{Step, put_step};

/// The part of [`Database`](super::Database) that knows of records. Nobody's business outside.
pub trait Records: Dialect {
    /// This moment, by the database's clock, in microseconds.
    const NOW: &'static str;
    /// What makes an INSERT leave alone what is there already: what stands before and what behind.
    const INSERT_NEW: (&'static str, &'static str);
    /// What makes a SELECT lock what it finds, and pass over what others have locked.
    const SKIPPING: &'static str = "";
    /// Whether a DELETE may have such a SELECT in it. Otherwise one goes before it, in a
    /// transaction.
    const SKIPS_IN_DELETE: bool = false;
    /// What makes a SELECT from the records use the index by expiry, and lock nothing else.
    const BY_EXPIRY: &'static str = "";
    /// The name of a step, to be read as text.
    const STEP: &'static str;
    /// Whether a claim may wait for one that is not committed yet, so that another connection looks
    /// for that first.
    const PEEKS: bool;

    /// Selects a text that differs between databases, as far as the servers can tell: not between
    /// nodes of one cluster.
    const IDENTITY: &'static str;

    /// What that text stands for. `None`: for nothing that could be compared.
    fn identify(text: String) -> Option<String> {
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
    fn text(row: &Self::Row, column: usize) -> Result<String, sqlx::Error>;

    /// Reads bytes.
    fn bytes(row: &Self::Row, column: usize) -> Result<Option<Vec<u8>>, sqlx::Error>;

    /// Claims a key in the caller's transaction. Does not wait for a rival, as far as the database
    /// can do that.
    fn claim<'a>(conn: &'a mut Self::Connection, claim: &'a Claiming) -> StoreFuture<'a, Claimed>;

    /// Who has claimed a key in a transaction that is still open, where that is not told by reading
    /// the record.
    fn rival<'a>(conn: &'a mut Self::Connection, claim: &'a Claiming) -> StoreFuture<'a, Option<Rival>> {
        let _ = (conn, claim);
        Box::pin(async { Ok(None) })
    }
}

/// How a text and bytes are bound and read: the same words for each database, whose types are its
/// own.
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
macro_rules! as_usual {
    () => {
        fn push_text(query: &mut QueryBuilder<Self>, text: &str) {
            query.push_bind(text.to_owned());
        }

        fn push_bytes(query: &mut QueryBuilder<Self>, bytes: &[u8]) {
            query.push_bind(bytes.to_vec());
        }

        fn text(row: &Self::Row, column: usize) -> Result<String, sqlx::Error> {
            row.try_get(column)
        }

        fn bytes(row: &Self::Row, column: usize) -> Result<Option<Vec<u8>>, sqlx::Error> {
            row.try_get(column)
        }
    };
}
#[cfg(any(feature = "postgres", feature = "mysql", feature = "sqlite"))]
pub(super) use as_usual;

/// Tells which database the records are in. `None`: that cannot be said.
pub(crate) async fn identity<DB: Records>(conn: &mut DB::Connection) -> Result<Option<String>, sqlx::Error> {
    let found = texts::<DB>(conn, &mut QueryBuilder::new(DB::IDENTITY)).await?;
    Ok(found.into_iter().next().and_then(DB::identify))
}

/// The texts in the first column.
async fn texts<DB: Records>(
    conn: &mut DB::Connection,
    query: &mut QueryBuilder<DB>,
) -> Result<Vec<String>, sqlx::Error> {
    DB::fetch(conn, query).await?.iter().map(|row| DB::text(row, 0)).collect()
}
