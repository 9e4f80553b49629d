//! Fences: a check of a holding within the caller's transaction.

use super::Kind;
use super::store::StoreFuture;

/// Fences a transaction. Part of the sealed [`Database`](super::Database).
pub trait Fence: sqlx::Database {
    /// The kind of backend that the transaction must belong to.
    const KIND: Kind;

    /// Checks a holding and keeps it from ending until the transaction ends.
    fn fence<'a>(conn: &'a mut Self::Connection, check: &'a FenceCheck) -> StoreFuture<'a, FenceOutcome>;

    /// Returns whether a holding that the database has is newer than the snapshot of the
    /// transaction, after [`FenceOutcome::Superseded`]. Otherwise the transaction belongs to another
    /// database.
    fn is_newer<'a>(_: &'a mut Self::Connection, _: &'a FenceCheck) -> StoreFuture<'a, bool> {
        Box::pin(std::future::ready(Ok(false)))
    }
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
    /// The transaction sees no such holding.
    Superseded,
    /// The snapshot of the transaction is older than the holding.
    StaleSnapshot,
    /// The transaction had ended.
    NoTransaction,
}
