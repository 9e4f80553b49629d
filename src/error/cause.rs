//! The causes that an error carries: of a lost lease, and of a transaction that cannot be fenced,
//! locked or written.

/// The cause of a lost lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LossCause {
    /// The lease expired before a heartbeat succeeded, or before a lease [without
    /// renewal](crate::LeaseRequest::renew) was extended.
    #[error("it expired before it was renewed")]
    Expired,
    /// The database reports that the lease has ended: another owner took it over after it expired,
    /// or an operator evicted it. A conversion that failed or was dropped has this cause, too: the
    /// state of the lease is unknown then.
    #[error("it was taken over or evicted")]
    Superseded,
    /// The lease reached its [`max_hold`](crate::LeaseRequest::max_hold).
    #[error("it reached its maximum holding time")]
    MaxHold,
    /// [`Locks::shutdown`](crate::Locks::shutdown) released the lease.
    #[error("the client was shut down")]
    Shutdown,
    /// The connection of a [session lock](crate::session::SessionLock) has ended, or was silent for
    /// too long.
    #[error("its connection to the database was lost")]
    Disconnected,
}

impl LossCause {
    /// Returns the cause as one word.
    #[cfg(feature = "metrics")]
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Superseded => "superseded",
            Self::MaxHold => "max_hold",
            Self::Shutdown => "shutdown",
            Self::Disconnected => "disconnected",
        }
    }

    /// Returns whether the application itself has ended the lease.
    pub(crate) fn is_ordered(self) -> bool {
        matches!(self, Self::MaxHold | Self::Shutdown)
    }
}

/// Why a transaction cannot be fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FenceError {
    /// The transaction belongs to another database than the lease, or to a copy that does not have
    /// the lease, such as a lagging node.
    #[error("it belongs to a different database than the lease")]
    OtherDatabase,
    /// A fence inside a savepoint would end with it.
    #[error("it is inside a savepoint; fence the outermost transaction, as its first statement")]
    InSavepoint,
    /// No transaction is open on the connection.
    #[error("no transaction is open on this connection")]
    NoTransaction,
    /// The transaction began to read before the lease was granted.
    #[error("it began to read before the lease was granted; make the fence its first statement")]
    StaleSnapshot,
}

/// Why rows cannot be locked in a transaction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RowError {
    /// The transaction belongs to another kind of database than the client.
    #[error("the transaction belongs to a different kind of database than this client")]
    OtherDatabase,
    /// The pool belongs to another database than the client.
    #[error("the pool belongs to a different database than this client; create the client from this pool")]
    OtherPool,
    /// No transaction is open on the connection, so the lock would end at once.
    #[error("no transaction is open on this connection")]
    NoTransaction,
    /// The table does not exist, or has no such column.
    #[error("there is no such table, or it has no column {column}")]
    NoSuchColumn {
        /// The column, as the caller named it.
        column: String,
    },
    /// No unique index covers this column alone, so several rows could be locked.
    #[error("no unique index covers {column} alone, so other rows could be locked as well")]
    NotUnique {
        /// The column, as the caller named it; for a key of several columns, all of them, separated
        /// by commas.
        column: String,
    },
    /// The database cannot look up a single row in the unique index on this column.
    #[error("the unique index {index} on {column} cannot be used: {reason}, so other rows could be locked as well")]
    UnusableIndex {
        /// The column, or the columns, as in [`NotUnique`](Self::NotUnique).
        column: String,
        /// The index.
        index: String,
        /// Why the index cannot be used.
        reason: String,
    },
    /// Several rows have the key and the version, and all of them were changed: roll the
    /// transaction back.
    #[error("{rows} rows with the same {column} were changed: roll back, and make {column} unique")]
    SeveralRows {
        /// The column, as the caller named it.
        column: String,
        /// The number of changed rows.
        rows: u64,
    },
    /// The row still has the expected version, or the inserted row does not exist: a policy of row
    /// level security, or a trigger, kept the statement from writing. Or the row that kept an
    /// insert from writing has been deleted meanwhile.
    #[error(
        "the database did not write the row, and shows no other change of it: look for row-level security or a trigger"
    )]
    NotWritten,
    /// The version has reached the greatest number that its column can hold, and was not raised:
    /// the database might have truncated the next number.
    #[error("{column} has reached {maximum}, the greatest version that its type can hold: give it a wider type")]
    VersionMaximum {
        /// The version column, as the caller named it.
        column: String,
        /// The greatest version.
        maximum: i64,
    },
    /// The database cannot use the column's index with a key of this type, and would lock every
    /// row.
    #[error(
        "a key of type {key} cannot be looked up in the index on a column of type {column}: every row would be locked"
    )]
    KeyType {
        /// The type of the key.
        key: String,
        /// The type of the column.
        column: String,
    },
    /// The storage engine of the table has no row locks.
    #[error("its storage engine {engine} has no row locks: convert it to InnoDB")]
    NoRowLocks {
        /// The storage engine.
        engine: String,
    },
    /// No row has this key.
    #[error("there is no row with this key")]
    NoSuchRow,
    /// The transaction began to read before the latest change of the row.
    #[error("the transaction began to read before the row changed; run it again from its beginning")]
    StaleSnapshot,
    /// On SQLite, the transaction does not have the write lock, which serves as the row lock.
    #[error("on SQLite begin the transaction with BEGIN IMMEDIATE: sqlx's begin_with(\"BEGIN IMMEDIATE\")")]
    Deferred,
}

/// The cause of an [`Error::Conflict`](crate::Error::Conflict).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another transaction has updated, deleted or inserted the row")]
#[non_exhaustive]
pub struct ConcurrentChange;
