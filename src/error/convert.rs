//! Converts errors of sqlx into those of this crate, and back.

use super::fault::is_sqlite_error;
use super::{AccessError, Error, Fault, reason};

impl Error {
    /// Makes the error of a statement on the sqlock tables.
    pub(crate) fn from_sqlx(attempted: &'static str, source: sqlx::Error) -> Self {
        if let Some(cause) = AccessError::from_error(&source) {
            return Self::Access { attempted, cause, source };
        }
        match Fault::from_error(&source) {
            Fault::NoTable => Self::NotMigrated { source },
            Fault::Exhausted if matches!(source, sqlx::Error::PoolTimedOut) => Self::PoolExhausted { attempted },
            Fault::ConnectionLost | Fault::Exhausted => {
                Self::Unavailable { attempted, reason: reason(&source), source: Some(source) }
            }
            Fault::RolledBack if is_sqlite_error(&source) => Self::Unavailable {
                attempted,
                reason: "another connection is writing to the SQLite file".into(),
                source: Some(source),
            },
            Fault::RolledBack | Fault::Blocked | Fault::Cancelled | Fault::Race | Fault::ReadOnly | Fault::Final => {
                Self::Database { attempted, source }
            }
        }
    }

    /// Makes the error of a connection that could not be opened.
    pub(crate) fn from_connect(attempted: &'static str, source: sqlx::Error) -> Self {
        match AccessError::from_connect(&source) {
            Some(cause) => Self::Access { attempted, cause, source },
            None if Fault::is_refused_option(&source) => Self::Database { attempted, source },
            None => Self::Unavailable { attempted, reason: reason(&source), source: Some(source) },
        }
    }

    /// Makes the error of a statement on the caller's own tables or connection.
    pub(crate) fn from_caller(attempted: &'static str, source: sqlx::Error) -> Self {
        match Fault::from_error(&source) {
            // The caller's pool may have opened a connection for the statement.
            _ if AccessError::from_connect(&source).is_some() => Self::Database { attempted, source },
            Fault::Exhausted if matches!(source, sqlx::Error::PoolTimedOut) => Self::PoolExhausted { attempted },
            Fault::ConnectionLost | Fault::Exhausted => {
                Self::Unavailable { attempted, reason: reason(&source), source: Some(source) }
            }
            _ => Self::Database { attempted, source },
        }
    }
}

/// Lets statements of the caller use `?` beside calls of this crate, in a function or in a
/// [`Retry`](crate::retry::Retry).
impl From<sqlx::Error> for Error {
    fn from(source: sqlx::Error) -> Self {
        Self::from_caller("run a statement", source)
    }
}

/// Lets a closure of a [`Retry`](crate::retry::Retry) return the errors of its statements alone. An
/// error of a driver is returned without the message of this crate. Any other error, such as
/// [`Error::CommitUnknown`], is the source of an [`sqlx::Error::AnyDriverError`].
impl From<Error> for sqlx::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Database { source, .. }
            | Error::Access { source, .. }
            | Error::Unavailable { source: Some(source), .. } => source,
            Error::PoolExhausted { .. } => Self::PoolTimedOut,
            error => Self::AnyDriverError(Box::new(error)),
        }
    }
}

#[cfg(all(test, feature = "sqlite"))]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use sqlx::sqlite::SqliteConnectOptions;
    use sqlx::{ConnectOptions as _, Connection as _, Executor as _, SqliteConnection};

    use super::*;

    #[tokio::test]
    async fn full_disk_of_sqlite_is_an_outage() {
        let mut conn = SqliteConnection::connect("sqlite::memory:").await.expect("a database in memory");
        conn.execute("PRAGMA max_page_count = 1").await.expect("the setting");
        let fill = "CREATE TABLE ballast AS SELECT randomblob(1000000) AS bytes";
        let error = Error::from_sqlx("acquire", conn.execute(fill).await.expect_err("no space"));
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    }

    #[tokio::test]
    async fn missing_file_of_sqlite_is_no_outage() {
        let directory = tempfile::tempdir().expect("a directory");
        let missing = SqliteConnectOptions::new().filename(directory.path().join("missing.db"));
        for make in [Error::from_connect, Error::from_caller] {
            let error = make("acquire", missing.connect().await.expect_err("no file"));
            assert!(!error.is_retryable(), "{error}");
        }
        let error = Error::from_connect("acquire", missing.connect().await.expect_err("no file"));
        assert!(matches!(error, Error::Access { cause: AccessError::NoDatabase, .. }), "{error}");
    }
}
