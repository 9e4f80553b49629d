//! Recognizes a database that refuses a client until its set-up, the URL or the user's rights change.

use sqlx::error::DatabaseError;

/// Why a database cannot be used as it is set up, or with this user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The server refused the user, the password, or the host of the client.
    #[error("the server refused the user or the password")]
    Credentials,
    /// The database does not exist, or the file cannot be opened as one.
    #[error("the database does not exist or cannot be opened")]
    NoDatabase,
    /// The user lacks a right for this operation.
    #[error("the user lacks a right")]
    MissingPrivilege,
    /// A pooler between client and server refuses the connection, or mixes up prepared statements.
    #[error("a pooler in between is not set up for this client")]
    Pooler,
    /// The server's certificate is not trusted, or is for another host, or the server has no TLS
    /// and the URL demands it.
    #[error("no trusted TLS connection to the server is possible")]
    Tls,
    /// The server has a role or mode in which its locks would not exclude all clients.
    #[error("the server cannot be used as it is set up")]
    Setup,
}

impl AccessError {
    /// Classifies an error of sqlx. `None`: the error has another cause, or is temporary.
    pub(crate) fn from_error(error: &sqlx::Error) -> Option<Self> {
        match error {
            sqlx::Error::Configuration(cause) if cause.is::<Unusable>() => Some(Self::Setup),
            sqlx::Error::Database(error) => Self::from_database(error.as_ref()),
            sqlx::Error::Io(error) if is_certificate_error(error) => Some(Self::Tls),
            sqlx::Error::Io(error) if error.get_ref().is_some_and(|cause| cause.is::<Forbidden>()) => {
                Some(Self::MissingPrivilege)
            }
            sqlx::Error::Tls(error) => is_tls_refusal(error.as_ref()).then_some(Self::Tls),
            _ => None,
        }
    }

    /// Classifies the error of a connection that could not be opened. `None`: the error has another
    /// cause, or is temporary.
    pub(crate) fn from_connect(error: &sqlx::Error) -> Option<Self> {
        // CANTOPEN. On an open connection, SQLite cannot open a journal at the moment.
        #[cfg(feature = "sqlite")]
        if let sqlx::Error::Database(error) = error
            && let Some(error) = error.try_downcast_ref::<sqlx::sqlite::SqliteError>()
            && sqlite_code(error) & 0xff == 14
        {
            return Some(Self::NoDatabase);
        }
        Self::from_error(error)
    }

    pub(crate) fn from_database(error: &dyn DatabaseError) -> Option<Self> {
        #[cfg(feature = "postgres")]
        if let Some(error) = error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>() {
            return Self::from_postgres(error.code(), error.message());
        }
        #[cfg(feature = "mysql")]
        if let Some(error) = error.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
            return Self::from_mysql(error.number());
        }
        #[cfg(feature = "sqlite")]
        if let Some(error) = error.try_downcast_ref::<sqlx::sqlite::SqliteError>() {
            return Self::from_sqlite(sqlite_code(error));
        }
        let _ = error;
        None
    }

    /// <https://www.postgresql.org/docs/current/errcodes-appendix.html>
    #[cfg(feature = "postgres")]
    fn from_postgres(code: &str, message: &str) -> Option<Self> {
        match code {
            // Poolers answer most requests that they do not pass on with protocol_violation.
            "08P01" if message.starts_with("unsupported startup parameter") => Some(Self::Pooler),
            "08P01" if message.starts_with("no such database") => Some(Self::NoDatabase),
            "08P01" if message.starts_with("no such user") => Some(Self::Credentials),
            // invalid_sql_statement_name, duplicate_prepared_statement: a transaction pooler that
            // does not follow prepared statements.
            "26000" | "42P05" => Some(Self::Pooler),
            c if c.starts_with("28") => Some(Self::Credentials),
            // invalid_catalog_name.
            "3D000" => Some(Self::NoDatabase),
            // insufficient_privilege.
            "42501" => Some(Self::MissingPrivilege),
            _ => None,
        }
    }

    /// <https://dev.mysql.com/doc/mysql-errors/9.0/en/server-error-reference.html>
    /// <https://mariadb.com/kb/en/mariadb-error-code-reference/>
    #[cfg(feature = "mysql")]
    fn from_mysql(number: u16) -> Option<Self> {
        match number {
            // Access denied, host not allowed, no such login method, access denied without a
            // password, password expired, account locked (on MySQL, on MariaDB).
            1045 | 1130 | 1251 | 1698 | 1820 | 1862 | 3118 | 4151 => Some(Self::Credentials),
            1049 => Some(Self::NoDatabase),
            // Connections without TLS are prohibited.
            3159 => Some(Self::Tls),
            // Denied: a database, a command on a table, on a column, a global right, a routine.
            1044 | 1142 | 1143 | 1227 | 1370 => Some(Self::MissingPrivilege),
            _ => None,
        }
    }

    /// <https://www.sqlite.org/rescode.html>
    #[cfg(feature = "sqlite")]
    fn from_sqlite(code: u32) -> Option<Self> {
        match code & 0xff {
            // READONLY_DBMOVED: a new connection opens the file that is at the path now.
            8 if code == 1032 => None,
            // PERM, READONLY.
            3 | 8 => Some(Self::MissingPrivilege),
            // NOTADB.
            26 => Some(Self::NoDatabase),
            _ => None,
        }
    }
}

#[cfg(feature = "sqlite")]
fn sqlite_code(error: &sqlx::sqlite::SqliteError) -> u32 {
    error.code().and_then(|code| code.parse().ok()).unwrap_or_default()
}

/// Returns whether rustls has refused the certificate of the server. An interrupted handshake is
/// another error, and may succeed later.
fn is_certificate_error(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::InvalidData && error.to_string().starts_with("invalid peer certificate")
}

/// Returns whether the driver has refused the server: its certificate, or the lack of TLS.
fn is_tls_refusal(error: &(dyn std::error::Error + 'static)) -> bool {
    let message = error.to_string();
    message.contains("certificate") || message.contains("does not support TLS")
}

/// A server cannot be used as it is set up.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Unusable(String);

/// Makes the error of a connection to a server that cannot be used as it is set up.
#[cfg(feature = "mysql")]
pub(crate) fn unusable(reason: String) -> sqlx::Error {
    sqlx::Error::Configuration(Box::new(Unusable(reason)))
}

/// The system does not let this user open or create a file.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Forbidden(std::io::Error);

/// Makes the error of an operation on a file. (The driver's errors of sockets differ: a firewall
/// may refuse a connection for a while.)
#[cfg(feature = "sqlite")]
pub(crate) fn file_error(error: std::io::Error) -> sqlx::Error {
    use std::io::ErrorKind;

    sqlx::Error::Io(match error.kind() {
        kind @ (ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) => {
            std::io::Error::new(kind, Forbidden(error))
        }
        _ => error,
    })
}

#[cfg(all(test, any(feature = "postgres", feature = "sqlite")))]
mod tests {
    use super::*;

    #[cfg(feature = "postgres")]
    #[test]
    fn pooler_refusals_differ_from_lost_connections() {
        let of = AccessError::from_postgres;
        assert_eq!(of("08P01", "unsupported startup parameter: extra_float_digits"), Some(AccessError::Pooler));
        assert_eq!(of("08P01", "no such user: app"), Some(AccessError::Credentials));
        assert_eq!(of("08P01", "server conn crashed?"), None);
        assert_eq!(of("26000", "prepared statement \"sqlx_s_1\" does not exist"), Some(AccessError::Pooler));
        assert_eq!(of("57P03", "the database system is starting up"), None);
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn moved_file_is_no_missing_right() {
        // READONLY, READONLY_DIRECTORY.
        for code in [8, 1544] {
            assert_eq!(AccessError::from_sqlite(code), Some(AccessError::MissingPrivilege), "{code}");
        }
        assert_eq!(AccessError::from_sqlite(1032), None);
    }
}
