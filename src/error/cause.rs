//! What stands behind an error: how a lease was lost, and why a transaction cannot be fenced, locked in or written.

/// How a lease was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LossCause {
    /// Its time ran out before a heartbeat came through.
    #[error("its time ran out before it was renewed")]
    Expired,
    /// The database says that the holding has ended: it expired and was taken over, or an operator evicted it.
    #[error("it was taken over or evicted")]
    Superseded,
    /// It reached its [`max_hold`](crate::LeaseRequest::max_hold).
    #[error("it reached its maximum holding time")]
    MaxHold,
    /// [`Locks::shutdown`](crate::Locks::shutdown) released it.
    #[error("the client was shut down")]
    Shutdown,
    /// The connection that a [session lock](crate::session::SessionLock) lived on has ended, or was silent for too long.
    #[error("its connection to the database was lost")]
    Disconnected,
}

/// Why a transaction cannot be fenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FenceError {
    /// The transaction is one of another kind of database than the lease.
    #[error("it belongs to another kind of database than the lease")]
    OtherDatabase,
    /// A fence inside a savepoint would end with it.
    #[error("it is inside a savepoint; fence the outermost transaction, as its first statement")]
    InSavepoint,
    /// There is no transaction open on the connection.
    #[error("no transaction is open on this connection")]
    NoTransaction,
    /// The transaction has read already, and what it read is older than the lease.
    #[error("it began to read before the lease was granted; make the fence its first statement")]
    StaleSnapshot,
}

/// Why rows cannot be locked in a transaction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RowError {
    /// The transaction is one of another kind of database than the client.
    #[error("the transaction belongs to another kind of database than this client")]
    OtherDatabase,
    /// There is no transaction open on the connection, so the lock would end at once.
    #[error("no transaction is open on this connection")]
    NoTransaction,
    /// The database does not know the table, or it has no such column.
    #[error("there is no such table, or it has no column {column}")]
    NoSuchColumn {
        /// The column, as it was named.
        column: String,
    },
    /// No unique index is on this column alone: more rows than one could be locked.
    #[error("no unique index is on {column} alone, so more than the row that is meant could be locked")]
    NotUnique {
        /// The column, as it was named.
        column: String,
    },
    /// The unique index on this column is none in which the database looks a single row up.
    #[error(
        "the unique index {index} on {column} cannot be used: {reason}, so more than the row that is meant could be locked"
    )]
    UnusableIndex {
        /// The column, as it was named.
        column: String,
        /// The index.
        index: String,
        /// What is the matter with it.
        reason: String,
    },
    /// More rows than one have the key and the version, and all of them were changed: roll the transaction back.
    #[error("{rows} rows have this {column}, and all were changed: roll back, and make {column} unique")]
    SeveralRows {
        /// The column, as it was named.
        column: String,
        /// How many there are.
        rows: u64,
    },
    /// The key is of a type with which the database cannot use the column's index, and would lock every row.
    #[error(
        "a key of type {key} cannot be looked up in the index on a column of type {column}: every row would be locked"
    )]
    KeyType {
        /// The type of the key given.
        key: String,
        /// The type of the column.
        column: String,
    },
    /// The engine that keeps the table locks no single rows.
    #[error("it is kept by {engine}, which locks no rows: convert it to InnoDB")]
    NoRowLocks {
        /// The engine, as the database calls it.
        engine: String,
    },
    /// There is no row with this key, so there is nothing to lock.
    #[error("there is no row with this key")]
    NoSuchRow,
    /// The transaction has read already, and what it read is older than what the lock would protect.
    #[error("the transaction began to read before the row became what it is; run it again from its beginning")]
    StaleSnapshot,
    /// On SQLite, the transaction does not have the write lock, which is the row lock there.
    #[error("on SQLite begin the transaction with BEGIN IMMEDIATE: sqlx's begin_with(\"BEGIN IMMEDIATE\")")]
    Deferred,
}

/// What stands behind an [`Error::Conflict`](crate::Error::Conflict).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("somebody else has written, or deleted, or inserted it")]
#[non_exhaustive]
pub struct Overtaken;
