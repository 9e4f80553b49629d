//! Fences: a check within the caller's transaction.

use std::pin::Pin;

/// The part of [`Database`](super::Database) that is nobody's business outside.
pub trait Fence: sqlx::Database {
    /// Which kind of backend the transaction must belong to.
    const KIND: super::Kind;

    /// Checks the holding and keeps everybody else from it until the transaction ends.
    fn fence<'a>(
        conn: &'a mut Self::Connection,
        check: &'a Check,
    ) -> Pin<Box<dyn Future<Output = Result<Verdict, sqlx::Error>> + Send + 'a>>;
}

/// A holding in the words of its row.
#[derive(Debug)]
pub struct Check {
    pub name: String,
    pub id: String,
    pub token: i64,
    /// Locks are not seen by others who may write: see [`Backend`](super::Backend::is_one_of_many_writers).
    pub by_writing: bool,
}

/// What the row says to a transaction that wants to be fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nobody else can be granted the name until this transaction has ended.
    Fenced,
    /// The holding has ended.
    Superseded,
    /// The transaction reads from before the holding.
    StaleSnapshot,
}
