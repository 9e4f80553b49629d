//! Errors: a timeout, a loss, an unavailable database and bad input are different variants.

mod access;
mod cause;
mod classify;
mod convert;
mod fault;
mod report;
#[cfg(feature = "axum")]
mod response;

use std::time::Duration;

use crate::name::LockName;
use crate::token::FencingToken;

pub use access::AccessError;
#[cfg(feature = "sqlite")]
pub(crate) use access::file_error;
#[cfg(feature = "mysql")]
pub(crate) use access::unusable;
pub use cause::{ConcurrentChange, FenceError, LossCause, RowError};
pub(crate) use fault::{Fault, if_exists, not_writable, reason};
pub(crate) use report::{no_answer_within, report, rounded};

/// The result of every fallible call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call failed.
///
/// Contention is not an error: [`try_acquire`](crate::LeaseRequest::try_acquire) returns
/// `Ok(None)`. No message contains a credential.
///
/// A message does not repeat the message of its [source](std::error::Error::source): print both
/// with [`report`](Self::report), or as `anyhow` does with `{:#}`, which may repeat messages of
/// other crates.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The limit set with [`wait`](crate::LeaseRequest::wait), or that of a row lock or a session
    /// lock, was reached while the name or the row was held, or others waited for it. A change of
    /// the holder waits for a transaction that the holder has fenced.
    #[error("timed out after {:?} waiting for {:?}", rounded(*.waited), .name.as_str())]
    Timeout {
        /// The requested name.
        name: LockName,
        /// How long the call waited.
        waited: Duration,
    },

    /// The lease ended before its holder released it.
    #[error("lost the lease on {:?} (token {token}): {cause}", .name.as_str())]
    Lost {
        /// The name that was held.
        name: LockName,
        /// The token of the holding that ended.
        token: FencingToken,
        /// How it ended.
        cause: LossCause,
    },

    /// The session lock ended before its holder released it.
    #[error("lost the session lock on {:?}: {cause}", .name.as_str())]
    SessionLost {
        /// The name that was held.
        name: LockName,
        /// How it ended.
        cause: LossCause,
    },

    /// The database did not answer, or not in time, or SQLite has no disk space. On SQLite also a
    /// file that another connection keeps locked. The holder of the name is unknown.
    #[error("the database is unavailable while trying to {attempted}{}", unless_repeated(reason, source.as_ref()))]
    Unavailable {
        /// The operation that failed.
        attempted: &'static str,
        /// What happened.
        reason: String,
        /// The error of the driver, if there is one.
        #[source]
        source: Option<sqlx::Error>,
    },

    /// The database refuses this client, or cannot be used, until an operator changes the URL, the
    /// rights of the user, or the set-up of the server.
    #[error("cannot {attempted}: {cause}")]
    Access {
        /// The operation that failed.
        attempted: &'static str,
        /// The kind of refusal.
        cause: AccessError,
        /// The error of the driver.
        source: sqlx::Error,
    },

    /// The caller's pool had no free connection. Leases use that pool only for a SQLite database in
    /// memory.
    #[error("the pool had no free connection while trying to {attempted}")]
    PoolExhausted {
        /// The operation that failed.
        attempted: &'static str,
    },

    /// The request was sent, its reply was lost, and a later look at the database did not show
    /// whether it took effect. Or the outcome of the attempt with this idempotency key is recorded
    /// as unknown.
    #[error("it is not known whether the attempt to {attempted} {:?} took effect", .name.as_str())]
    Unknown {
        /// The operation that failed.
        attempted: &'static str,
        /// The name concerned.
        name: LockName,
    },

    /// The connection was lost during the commit of a [`Retry`](crate::retry::Retry) or of an
    /// [`Idempotency::run`](crate::idempotency::Idempotency::run), or SQLite met an I/O error in
    /// the commit, or, on MySQL or SQLite, a statement of the closure had ended the transaction, or
    /// a savepoint of the closure had failed or was dropped. The transaction may have taken effect:
    /// read the data before running it again.
    #[error("it is not known whether the transaction was committed")]
    CommitUnknown {
        /// The error of the driver.
        source: sqlx::Error,
    },

    /// The tables do not exist in the database, or not in the schema that the connection sees.
    ///
    /// The client opens connections of its own with the connect options of the pool. Hooks of the
    /// pool do not run on them: a `search_path` (PostgreSQL) that `after_connect` sets does not
    /// apply to them. Put it into the options, as `PgConnectOptions::options([("search_path",
    /// "app")])` or as `?options=-csearch_path%3Dapp` in the URL.
    #[error(
        "the sqlock tables are missing: call Locks::migrate() once, with the right to create tables \
         (put a search_path into the connect options: after_connect does not run on these connections)"
    )]
    NotMigrated {
        /// The error of the driver.
        #[source]
        source: sqlx::Error,
    },

    /// The tables could not be created or brought up to date.
    #[error("could not migrate the sqlock tables")]
    Migrate {
        /// The error of the migration.
        #[source]
        source: sqlx::migrate::MigrateError,
    },

    /// A later version of this crate has made tables that this version cannot work with.
    #[error(
        "the sqlock tables have version {found}, and this program works with versions up to {supported}: update sqlock in \
         this program"
    )]
    NewerSchema {
        /// The version in the record of the migrations.
        found: i64,
        /// The latest version that this program can work with.
        supported: i64,
    },

    /// The database refused a statement. A repeated attempt fails the same way, unless the error is
    /// [retryable](Self::is_retryable) or a [conflict](Self::is_conflict), as after a deadlock.
    #[error("the database refused the attempt to {attempted}")]
    Database {
        /// The operation that failed.
        attempted: &'static str,
        /// The error of the driver.
        source: sqlx::Error,
    },

    /// [`Locks::drain`](crate::Locks::drain) or [`Locks::shutdown`](crate::Locks::shutdown) was
    /// called, or the runtime of this client has ended.
    #[error("this client is drained or shut down, or the runtime that it ran on has ended")]
    Closed,

    /// The text is not a valid [`LockName`].
    #[error("invalid lock name {name:?}: {reason}")]
    InvalidName {
        /// The beginning of the given text.
        name: String,
        /// What is wrong.
        reason: &'static str,
    },

    /// The text is not an [`Owner`](crate::Owner): 32 hexadecimal digits.
    #[error("invalid owner: expected 32 hexadecimal digits")]
    InvalidOwner,

    /// The text is not an [`ExportedLease`](crate::lease::ExportedLease).
    #[error("invalid exported lease: {reason}")]
    InvalidExport {
        /// What is wrong.
        reason: &'static str,
    },

    /// The text is not a valid name of a table or column.
    #[error("invalid name of a table or column {name:?}: {reason}")]
    InvalidIdentifier {
        /// The given text.
        name: String,
        /// What is wrong.
        reason: &'static str,
    },

    /// A duration is out of range.
    #[error("{what} of {given:?} is out of range: it must be {}", range(*min, *max))]
    OutOfRange {
        /// The kind of duration.
        what: &'static str,
        /// The given duration.
        given: Duration,
        /// The shortest allowed duration.
        min: Duration,
        /// The longest allowed duration.
        max: Duration,
    },

    /// The number of permits is zero, or greater than that of the semaphore.
    #[error("cannot take {asked} of {permits} permits of {:?}", .name.as_str())]
    Permits {
        /// The name of the semaphore.
        name: LockName,
        /// The number of requested permits.
        asked: u32,
        /// The number of permits of the semaphore.
        permits: u32,
    },

    /// The number of names is zero, or too great.
    #[error("cannot take {given} names together: the number must be between 1 and {most}")]
    Names {
        /// The number of different names in the request.
        given: usize,
        /// The greatest allowed number.
        most: usize,
    },

    /// A lease cannot be converted to another kind, be exported, or hold a name in two modes.
    #[error("cannot {attempted} {:?}: {reason}", .name.as_str())]
    Conversion {
        /// The attempted operation, such as "downgrade".
        attempted: &'static str,
        /// The name of the lease.
        name: LockName,
        /// Why, and what to do instead.
        reason: &'static str,
    },

    /// A label is longer than 255 bytes.
    #[error("the label is too long: {bytes} bytes, at most 255 are allowed")]
    LabelTooLong {
        /// The length of the label given.
        bytes: usize,
    },

    /// A label contains a NUL character.
    #[error("the label contains a NUL character")]
    NulInLabel,

    /// A note is longer than 4096 bytes.
    #[error("the note is too long: {bytes} bytes, at most 4096 are allowed")]
    NoteTooLong {
        /// The length of the note given.
        bytes: usize,
    },

    /// A note contains a NUL character.
    #[error("the note contains a NUL character")]
    NulInNote,

    /// The transaction cannot be fenced.
    #[error("the lease on {:?} cannot fence this transaction", .name.as_str())]
    Fence {
        /// The name of the lease.
        name: LockName,
        /// Why, and what to do instead.
        #[source]
        cause: FenceError,
    },

    /// Rows cannot be locked, or changed, in this transaction.
    #[error("cannot lock or change rows of {table}")]
    Row {
        /// The table, as the caller named it.
        table: String,
        /// Why, and what to do instead.
        #[source]
        cause: RowError,
    },

    /// The row has changed since it was read: see [`Versioned`](crate::version::Versioned). Nothing
    /// was written.
    #[error("a row of {table} has changed: {}", versions(*expected, *found))]
    Conflict {
        /// The table, as the caller named it.
        table: String,
        /// The expected version; `None`: the row was expected not to exist.
        expected: Option<i64>,
        /// The version in the database; `None`: the row does not exist.
        found: Option<i64>,
        /// The cause, which a transparent error of an application shows as its source.
        #[source]
        cause: ConcurrentChange,
    },

    /// A key, principal, namespace or step name is empty or contains a NUL character, or a
    /// namespace or step name is longer than 255 bytes.
    #[error("invalid {what}: {reason}")]
    InvalidKey {
        /// The kind of text. (The text itself may be a secret.)
        what: &'static str,
        /// What is wrong.
        reason: &'static str,
    },

    /// A request or a result is not JSON, or a stored result is not of the requested type.
    #[error("cannot read or write {what} as JSON")]
    Json {
        /// The value that was read or written.
        what: &'static str,
        /// The error of serde_json.
        source: serde_json::Error,
    },

    /// The result is longer than the [limit](crate::idempotency::Idempotency::result_limit).
    /// A transaction took no effect. Effects of an attempt under a lease, or of a step, stay.
    #[error("the result is too large: {bytes} bytes, at most {limit} are stored")]
    ResultTooLarge {
        /// The length of the result.
        bytes: usize,
        /// The limit.
        limit: usize,
    },

    /// The request that is to be [stored](crate::idempotency::Fingerprint::with_request) is longer
    /// than the [limit](crate::idempotency::Idempotency::request_limit). Nothing was claimed.
    #[error("the request is too large: {bytes} bytes, at most {limit} are stored")]
    RequestTooLarge {
        /// The length of the request.
        bytes: usize,
        /// The limit.
        limit: usize,
    },

    /// A stored result, the result of a step or a stored request cannot be [sealed or
    /// opened](crate::idempotency::Idempotency::seal). Content that cannot be opened stays, and the
    /// request is not run again.
    #[error("cannot {attempted} {what}")]
    Sealed {
        /// `seal` or `open`.
        attempted: &'static str,
        /// The stored content.
        what: &'static str,
        /// The error of the caller's function.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// The claim cannot be completed in this transaction: the result is stored already, the claim
    /// was made in another transaction, or a deadlock whose error was ignored has rolled it back.
    #[error(
        "this transaction holds no open claim: the result is stored already, the claim was made in another transaction, or a \
         deadlock has rolled it back"
    )]
    NotClaimed,

    /// The attempt was completed before with another result, which stays. Nothing was written.
    #[error("the attempt was completed before with another result, which stays")]
    AlreadyCompleted,

    /// The result of the step is stored already. Roll the transaction back, and
    /// [recall](crate::idempotency::Attempt::recall) the result.
    #[error("the step is recorded already: roll this transaction back, and recall its result")]
    StepRecorded,

    /// A response with this status does not prove that nothing was done, so it cannot count as a
    /// [refusal](crate::idempotency::http::IdempotencyLayer::refusals).
    #[cfg(feature = "axum")]
    #[error("status {status} cannot count as a refusal: it does not prove that nothing was done")]
    NoRefusal {
        /// The given status.
        status: u16,
    },

    /// The text is not the URL of a database, or a list of URLs, for
    /// [`Locks::connect`](crate::Locks::connect).
    #[error("invalid database URL: {reason}")]
    InvalidUrl {
        /// What is wrong. (The URL itself may contain a password.)
        reason: &'static str,
    },

    /// The database, or the connection to it, does not support a feature.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// The feature.
        what: &'static str,
        /// Why, and what to use instead.
        reason: &'static str,
    },
}

fn range(min: Duration, max: Duration) -> String {
    if max == Duration::MAX { format!("at least {min:?}") } else { format!("between {min:?} and {max:?}") }
}

fn versions(expected: Option<i64>, found: Option<i64>) -> String {
    let name = |version: Option<i64>| version.map_or("no row".to_owned(), |version| format!("version {version}"));
    format!("expected {}, found {}", name(expected), name(found))
}

/// Returns the reason, unless the source says the same.
fn unless_repeated(reason: &str, source: Option<&sqlx::Error>) -> String {
    match source {
        Some(source) if source.to_string().ends_with(reason) => String::new(),
        _ => format!(": {reason}"),
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_in_messages() {
        let name = LockName::new("a\n\u{1b}[31m\u{202e}").expect("a name");
        let message = Error::Timeout { name, waited: Duration::from_secs(1) }.to_string();
        assert_eq!(message, r#"timed out after 1s waiting for "a\n\u{1b}[31m\u{202e}""#);
    }
}
