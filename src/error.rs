//! What can go wrong, and which of the four different things it is: refused, timed out, lost, or no database.

use std::time::Duration;

use sqlx::error::DatabaseError;

use crate::name::LockName;
use crate::token::FencingToken;

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
///
/// Contention is not among the reasons: [`try_acquire`](crate::LeaseRequest::try_acquire) answers `Ok(None)`.
/// No message contains a credential.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The time given with [`wait`](crate::LeaseRequest::wait) ran out while somebody else held the name.
    #[error("timed out after {waited:?} waiting for \"{name}\"")]
    Timeout {
        /// The name that was waited for.
        name: LockName,
        /// How long the call waited.
        waited: Duration,
    },

    /// The lease ended before its holder gave it back.
    #[error("lost the lease on \"{name}\" (token {token}): {cause}")]
    Lost {
        /// The name that was held.
        name: LockName,
        /// The token of the holding that ended.
        token: FencingToken,
        /// How it ended.
        cause: LossCause,
    },

    /// The session lock ended before its holder gave it back.
    #[error("lost the session lock on \"{name}\": {cause}")]
    SessionLost {
        /// The name that was held.
        name: LockName,
        /// How it ended.
        cause: LossCause,
    },

    /// The database did not answer, or not in time. Nothing is said about who holds the name.
    #[error("the database is unavailable while trying to {attempted}: {reason}")]
    Unavailable {
        /// What was being done.
        attempted: &'static str,
        /// What happened, in words.
        reason: String,
        /// The error of the driver, where there was one.
        #[source]
        source: Option<sqlx::Error>,
    },

    /// The caller's pool had no connection to lend. Leases need one of it only where the database is a SQLite one in memory.
    #[error("the pool had no connection to lend while trying to {attempted}")]
    PoolExhausted {
        /// What was being done.
        attempted: &'static str,
    },

    /// The request was sent, the reply never came, and it could not be found out whether it took effect.
    #[error("it is not known whether the attempt to {attempted} \"{name}\" took effect")]
    Unknown {
        /// What was being done.
        attempted: &'static str,
        /// The name concerned.
        name: LockName,
    },

    /// The tables do not exist in the database (or not in the schema that the connection sees).
    #[error("the sqlock tables are missing: call Locks::migrate() once, with the right to create tables")]
    NotMigrated {
        /// The error of the driver.
        #[source]
        source: sqlx::Error,
    },

    /// The tables could not be created or brought up to date.
    #[error("could not migrate the sqlock tables: {0}")]
    Migrate(#[source] sqlx::migrate::MigrateError),

    /// The database refused a statement for a reason that trying again will not cure.
    #[error("the database refused the attempt to {attempted}: {source}")]
    Database {
        /// What was being done.
        attempted: &'static str,
        /// The error of the driver.
        source: sqlx::Error,
    },

    /// [`Locks::shutdown`](crate::Locks::shutdown) was called, or the runtime that served this client has gone.
    #[error("this client has been shut down, or the runtime that it ran on has ended")]
    Closed,

    /// Not a name: see [`LockName`].
    #[error("{name:?} cannot be the name of a lock: {reason}")]
    InvalidName {
        /// The beginning of the text that was given.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// Not an owner: it must be 32 hexadecimal digits, as an [`Owner`](crate::Owner) prints itself.
    #[error("that is not an owner: expected 32 hexadecimal digits")]
    InvalidOwner,

    /// Not an exported lease: see [`ExportedLease`](crate::lease::ExportedLease).
    #[error("that is not an exported lease: {reason}")]
    InvalidExport {
        /// What is wrong with it.
        reason: &'static str,
    },

    /// Not the name of a table or column.
    #[error("{name:?} cannot be the name of a table or column: {reason}")]
    InvalidIdentifier {
        /// What was given.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// A duration is outside what is allowed. Nothing is clamped silently.
    #[error("{what} of {given:?} is out of range: it must be between {min:?} and {max:?}")]
    OutOfRange {
        /// Which duration.
        what: &'static str,
        /// What was given.
        given: Duration,
        /// The least that is allowed.
        min: Duration,
        /// The most that is allowed.
        max: Duration,
    },

    /// So many permits cannot be taken: at least one, and at most as many as there are.
    #[error("cannot take {asked} of {permits} permits of \"{name}\"")]
    Permits {
        /// The name of the semaphore.
        name: LockName,
        /// How many were asked for.
        asked: u32,
        /// How many there are.
        permits: u32,
    },

    /// So many names cannot be taken together: at least one, and not too many.
    #[error("cannot take {given} names together: it must be between 1 and {most}")]
    Names {
        /// How many different names were given.
        given: usize,
        /// The most that are allowed.
        most: usize,
    },

    /// A lease cannot be turned into another kind of lease.
    #[error("the lease on \"{name}\" cannot be converted: {reason}")]
    Conversion {
        /// The name that is held.
        name: LockName,
        /// Why not, and what to do instead.
        reason: &'static str,
    },

    /// A label is longer than 255 bytes.
    #[error("a label may be 255 bytes long; this one has {bytes}")]
    LabelTooLong {
        /// The length of the label given.
        bytes: usize,
    },

    /// A label contains a NUL character.
    #[error("a label must not contain a NUL character")]
    NulInLabel,

    /// The transaction cannot be fenced.
    #[error("cannot fence this transaction: {0}")]
    Fence(#[source] FenceError),

    /// The rows cannot be locked, or changed, in this transaction.
    #[error("cannot lock or change rows of {table}: {cause}")]
    Row {
        /// The table, as it was named.
        table: String,
        /// Why not, and what to do instead.
        #[source]
        cause: RowError,
    },

    /// The row is not as it was read: see [`Versioned`](crate::version::Versioned). Nothing was written.
    #[error("a row of {table} has changed: {}", versions(*expected, *found))]
    Conflict {
        /// The table, as it was named.
        table: String,
        /// The version that the row was expected to have; `None`: it was expected not to exist.
        expected: Option<i64>,
        /// The version that it has; `None`: there is no such row.
        found: Option<i64>,
        /// What stands behind it, also where an error of the application's own is transparent for this one.
        #[source]
        cause: Overtaken,
    },

    /// Not a key of a request, a principal, a namespace or the name of a step: 1 to 255 bytes of UTF-8 without NUL.
    #[error("{what} cannot be like that: {reason}")]
    InvalidKey {
        /// What was given. (Which one is not told: keys are nobody else's business.)
        what: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },

    /// A request, or a result, is not JSON, or a stored result is not of the type that was asked for.
    #[error("{what} cannot be written or read as JSON: {source}")]
    Json {
        /// What it was about.
        what: &'static str,
        /// The error of serde_json.
        source: serde_json::Error,
    },

    /// A result is longer than what may be [stored](crate::idempotency::Idempotency::result_limit). Nothing took effect.
    #[error("the result has {bytes} bytes, and {limit} may be stored")]
    ResultTooLarge {
        /// Its length.
        bytes: usize,
        /// The longest that may be stored.
        limit: usize,
    },

    /// This claim cannot be completed in this transaction: the result was stored already, it is another transaction, or a deadlock
    /// whose error was ignored has rolled the claim back.
    #[error(
        "there is nothing to be completed in this transaction: the result is stored already, it is another one, or a deadlock has \
         rolled the claim back"
    )]
    NotClaimed,

    /// This attempt was completed before, with another result, and that one stays. Nothing was written.
    #[error("the attempt was completed with another result before, which is kept")]
    AlreadyCompleted,

    /// A response with this status leaves open whether something was done, so it cannot count as a
    /// [refusal](crate::idempotency::http::IdempotencyLayer::refusals).
    #[cfg(feature = "axum")]
    #[error("a response with status {status} leaves open whether something was done: it cannot count as a refusal")]
    NoRefusal {
        /// The status that was given.
        status: u16,
    },

    /// Not the URL of a database, nor a list of URLs: see [`Locks::connect`](crate::Locks::connect).
    #[error("that is not the URL of a database, nor a list of them: {reason}")]
    InvalidUrl {
        /// What is wrong with it. (The URL is not told: there may be a password in it.)
        reason: &'static str,
    },

    /// This database, or the way to it, does not have what was asked for.
    #[error("{what} cannot be had here: {reason}")]
    Unsupported {
        /// What was asked for.
        what: &'static str,
        /// Why it cannot be had, and what to take instead.
        reason: &'static str,
    },
}

/// What stands behind an [`Error::Conflict`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("somebody else has written, or deleted, or inserted it")]
#[non_exhaustive]
pub struct Overtaken;

fn versions(expected: Option<i64>, found: Option<i64>) -> String {
    let name = |version: Option<i64>| version.map_or("no row".to_owned(), |version| format!("version {version}"));
    format!("expected {}, found {}", name(expected), name(found))
}

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

impl Error {
    /// The time given with `wait` ran out.
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout { .. })
    }

    /// The lease, or the session lock, is not, or no longer, ours.
    pub fn is_lost(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::SessionLost { .. })
    }

    /// The transaction met a concurrent change and must be rerun from its beginning, which [`Retry`](crate::retry::Retry) does.
    ///
    /// A lock that was waited for in vain is none, unless the database rolled the transaction back to end a deadlock.
    pub fn is_conflict(&self) -> bool {
        match self {
            Self::Fence(cause) => *cause == FenceError::StaleSnapshot,
            Self::Row { cause, .. } => *cause == RowError::StaleSnapshot,
            Self::Conflict { .. } => true,
            Self::Database { source, .. } => Fault::of(source) == Fault::Again,
            _ => false,
        }
    }

    /// The same call may succeed later without anything being changed.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Timeout { .. } | Self::Unavailable { .. } | Self::PoolExhausted { .. })
            || self.is_conflict()
            || self.is_blocked()
    }

    /// Somebody else's lock was in the way for too long.
    pub(crate) fn is_blocked(&self) -> bool {
        matches!(self, Self::Database { source, .. } if Fault::of(source) == Fault::Blocked)
    }

    /// Refuses a duration that is out of range.
    pub(crate) fn check_range(what: &'static str, given: Duration, min: Duration, max: Duration) -> Result<()> {
        if given < min || given > max {
            return Err(Self::OutOfRange { what, given, min, max });
        }
        Ok(())
    }

    /// Whether it concerns whatever is asked of the database alike.
    pub(crate) fn concerns_all(&self) -> bool {
        matches!(self, Self::Unavailable { .. } | Self::PoolExhausted { .. } | Self::Closed | Self::Unsupported { .. })
    }

    /// The same error for another caller whom it concerns as well.
    pub(crate) fn repeated(&self) -> Self {
        let again = |source: &sqlx::Error| sqlx::Error::Protocol(reason(source));
        match self {
            Self::Unavailable { attempted, reason, .. } => {
                Self::Unavailable { attempted, reason: reason.clone(), source: None }
            }
            Self::PoolExhausted { attempted } => Self::PoolExhausted { attempted },
            Self::NotMigrated { source } => Self::NotMigrated { source: again(source) },
            Self::Database { attempted, source } => Self::Database { attempted, source: again(source) },
            Self::Unsupported { what, reason } => Self::Unsupported { what, reason },
            _ => Self::Closed,
        }
    }

    /// The error of a statement that failed for good.
    pub(crate) fn from_sqlx(attempted: &'static str, source: sqlx::Error) -> Self {
        match Fault::of(&source) {
            Fault::NoTable => Self::NotMigrated { source },
            Fault::Exhausted if matches!(source, sqlx::Error::PoolTimedOut) => Self::PoolExhausted { attempted },
            Fault::Severed | Fault::Exhausted => {
                Self::Unavailable { attempted, reason: reason(&source), source: Some(source) }
            }
            Fault::Again if is_sqlite_busy(&source) => Self::Unavailable {
                attempted,
                reason: "another connection is writing to the SQLite file".into(),
                source: Some(source),
            },
            Fault::Again | Fault::Blocked | Fault::Race | Fault::ReadOnly | Fault::Final => {
                Self::Database { attempted, source }
            }
        }
    }

    /// The error of a statement on the caller's own tables, or on the caller's own connection.
    pub(crate) fn of_caller(attempted: &'static str, source: sqlx::Error) -> Self {
        match Fault::of(&source) {
            Fault::Exhausted if matches!(source, sqlx::Error::PoolTimedOut) => Self::PoolExhausted { attempted },
            Fault::Severed | Fault::Exhausted => {
                Self::Unavailable { attempted, reason: reason(&source), source: Some(source) }
            }
            _ => Self::Database { attempted, source },
        }
    }
}

/// So that what runs beside this crate's calls, in one function or in a [`Retry`](crate::retry::Retry), may use `?` as well.
impl From<sqlx::Error> for Error {
    fn from(source: sqlx::Error) -> Self {
        Self::of_caller("run a statement", source)
    }
}

/// No server was found that can be written, although some may have answered.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct NotWritable(String);

/// The error of a connection to a server that cannot be written, or whose writes are worth less than was asked for.
pub(crate) fn not_writable(reason: String) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::other(NotWritable(reason)))
}

/// What happened, in words.
pub(crate) fn reason(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Io(cause) if cause.get_ref().is_some_and(|cause| cause.is::<NotWritable>()) => cause.to_string(),
        error => error.to_string(),
    }
}

/// What a driver's error means for the one who sent the statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The connection is gone. The statement may or may not have taken effect.
    Severed,
    /// The server or the pool has no connection to give.
    Exhausted,
    /// The statement was rolled back on account of others; it may be sent again, in a transaction that is begun again.
    Again,
    /// Others have locked what the statement needs, for longer than it was to wait. It may be sent again.
    Blocked,
    /// Another process created the same table, or recorded the same migration, first.
    Race,
    /// The table does not exist.
    NoTable,
    /// This server cannot be written, or not at present, or not in this transaction. Nothing was done.
    ReadOnly,
    /// Anything else.
    Final,
}

impl Fault {
    pub(crate) fn of(error: &sqlx::Error) -> Self {
        match error {
            sqlx::Error::Database(error) => Self::of_database(error.as_ref()),
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed => Self::Severed,
            sqlx::Error::PoolTimedOut => Self::Exhausted,
            _ => Self::Final,
        }
    }

    fn of_database(error: &dyn DatabaseError) -> Self {
        Self::of_driver(error).unwrap_or(Self::Final)
    }

    /// Whether an error of COMMIT leaves open what became of the transaction.
    pub(crate) fn is_doubtful_commit(error: &sqlx::Error) -> bool {
        match error {
            // Class 08 has transaction_resolution_unknown; who is shut down while a standby confirms has committed.
            sqlx::Error::Database(_) => Self::of(error) == Self::Severed,
            _ => true,
        }
    }

    /// What any error means that is one of sqlx, of a database or of a driver. `None`: it is none of them.
    pub(crate) fn of_any(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        if let Some(error) = error.downcast_ref::<sqlx::Error>() {
            return Some(Self::of(error));
        }
        // What stands behind one of sqlx.
        if let Some(error) = error.downcast_ref::<Box<dyn DatabaseError>>() {
            return Some(Self::of_database(error.as_ref()));
        }
        Self::of_driver(error)
    }

    fn of_driver(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        #[cfg(feature = "postgres")]
        if let Some(error) = error.downcast_ref::<sqlx::postgres::PgDatabaseError>() {
            return Some(Self::of_postgres(error.code()));
        }
        #[cfg(feature = "mysql")]
        if let Some(error) = error.downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
            return Some(Self::of_mysql(error.number()));
        }
        #[cfg(feature = "sqlite")]
        if let Some(error) = error.downcast_ref::<sqlx::sqlite::SqliteError>() {
            return Some(Self::of_sqlite(error.code().as_deref().unwrap_or_default(), error.message()));
        }
        let _ = error;
        None
    }

    /// <https://www.postgresql.org/docs/current/errcodes-appendix.html>
    #[cfg(feature = "postgres")]
    fn of_postgres(code: &str) -> Self {
        match code {
            // admin_shutdown, crash_shutdown, cannot_connect_now, idle_session_timeout, idle_in_transaction_session_timeout; class
            // 08 is connection_exception.
            "57P01" | "57P02" | "57P03" | "57P05" | "25P03" => Self::Severed,
            c if c.starts_with("08") => Self::Severed,
            "53300" => Self::Exhausted,
            // serialization_failure, deadlock_detected.
            "40001" | "40P01" => Self::Again,
            // lock_not_available.
            "55P03" => Self::Blocked,
            // unique_violation, duplicate_table, duplicate_object; XX000 is "tuple concurrently updated".
            "23505" | "42P07" | "42710" | "XX000" => Self::Race,
            "42P01" => Self::NoTable,
            // read_only_sql_transaction: on a standby there are no others.
            "25006" => Self::ReadOnly,
            _ => Self::Final,
        }
    }

    /// <https://dev.mysql.com/doc/mysql-errors/9.0/en/server-error-reference.html>, and MariaDB where it differs.
    #[cfg(feature = "mysql")]
    fn of_mysql(number: u16) -> Self {
        match number {
            // Server shutdown in progress, connection killed, client was disconnected by the server because of inactivity; error
            // during COMMIT (a Galera node has lost its cluster: the others may have it or not).
            1053 | 1927 | 3169 | 4031 | 1180 => Self::Severed,
            // The server runs with --read-only (or another option that forbids it), the transaction is read-only, the server is;
            // a Galera node has no cluster ("has not yet prepared node for application use").
            1290 | 1792 | 1836 | 1047 => Self::ReadOnly,
            1040 | 1203 | 1226 => Self::Exhausted,
            // Deadlock (on Galera also another node's commit), record has changed since last read, rolled back during commit
            // (Group Replication, for another member's commit).
            1213 | 1020 | 3101 => Self::Again,
            // Lock wait timeout (on MariaDB also NOWAIT), NOWAIT.
            1205 | 3572 => Self::Blocked,
            // Table exists, duplicate entry.
            1050 | 1062 => Self::Race,
            1146 => Self::NoTable,
            _ => Self::Final,
        }
    }

    /// <https://www.sqlite.org/rescode.html>
    #[cfg(feature = "sqlite")]
    fn of_sqlite(code: &str, message: &str) -> Self {
        match code.parse::<u32>().unwrap_or_default() {
            // The low byte is the primary code: BUSY and LOCKED with all their kinds.
            c if matches!(c & 0xff, 5 | 6) => Self::Again,
            // CONSTRAINT_PRIMARYKEY, CONSTRAINT_UNIQUE.
            1555 | 2067 => Self::Race,
            1 if message.starts_with("no such table") => Self::NoTable,
            1 if message.contains("already exists") => Self::Race,
            _ => Self::Final,
        }
    }
}

fn is_sqlite_busy(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(error) = error else {
        return false;
    };
    let _ = error;
    #[cfg(feature = "sqlite")]
    return error.try_downcast_ref::<sqlx::sqlite::SqliteError>().is_some();
    #[cfg(not(feature = "sqlite"))]
    return false;
}
