//! Fences: a check of a holding within the caller's transaction.

use super::Kind;
use super::store::StoreFuture;

/// Fences a transaction. Part of the sealed [`Database`](super::Database).
pub trait Fence: sqlx::Database {
    /// The kind of backend that the transaction must belong to.
    const KIND: Kind;

    /// Checks a holding and keeps it from ending until the transaction ends.
    fn fence<'a>(conn: &'a mut Self::Connection, check: &'a FenceCheck) -> StoreFuture<'a, FenceOutcome>;
}

/// The holding to check, as in its row.
#[derive(Debug)]
pub struct FenceCheck {
    pub name: String,
    pub id: String,
    pub token: i64,
    /// The fence must write the row, because other servers do not see its lock: see
    /// [`Backend`](super::Backend::is_multi_primary).
    pub is_multi_primary: bool,
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FenceOutcome {
    /// The holding lasts until the transaction ends.
    Fenced,
    /// The holding has ended.
    Superseded,
    /// The snapshot of the transaction is older than the holding.
    StaleSnapshot,
    /// The transaction had ended.
    NoTransaction,
}
