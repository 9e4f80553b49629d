//! What can go wrong, and which of the four different things it is: refused, timed out, lost, or no database.

mod cause;
mod fault;

use std::time::Duration;

use crate::name::LockName;
use crate::token::FencingToken;

pub use cause::{FenceError, LossCause, Overtaken, RowError};
pub(crate) use fault::{Fault, not_writable, reason};

use fault::is_sqlite_busy;

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

fn versions(expected: Option<i64>, found: Option<i64>) -> String {
    let name = |version: Option<i64>| version.map_or("no row".to_owned(), |version| format!("version {version}"));
    format!("expected {}, found {}", name(expected), name(found))
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
