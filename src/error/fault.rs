//! Classifies the errors of databases and drivers.

use sqlx::error::DatabaseError;

use super::access::{AccessError, Unusable};

/// What a driver's error means for the sender of the statement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The connection is lost. The statement may have taken effect.
    ConnectionLost,
    /// The server or the pool has no free connection, or the system has no disk space or no file
    /// descriptor for SQLite. Nothing was done.
    Exhausted,
    /// The statement was rolled back because of concurrent transactions. It may be sent again in a
    /// new transaction.
    RolledBack,
    /// The wait for another transaction's lock timed out. The statement may be sent again.
    Blocked,
    /// The server cancelled the statement, as an operator or a time limit demanded. It may be sent
    /// again.
    #[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite cancels nothing"))]
    Cancelled,
    /// Another process created the same table, or recorded the same migration, first.
    Race,
    /// The table does not exist.
    NoTable,
    /// The server or the transaction is read-only. Nothing was done.
    ReadOnly,
    /// Any other error.
    Final,
}

impl Fault {
    pub(crate) fn from_error(error: &sqlx::Error) -> Self {
        match error {
            sqlx::Error::Database(error) => Self::from_database(error.as_ref()),
            error if AccessError::from_error(error).is_some() => Self::Final,
            sqlx::Error::Io(error) => Copied::find(error).map_or(Self::ConnectionLost, |copied| copied.fault),
            sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) | sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => {
                Self::ConnectionLost
            }
            sqlx::Error::PoolTimedOut => Self::Exhausted,
            _ => Self::Final,
        }
    }

    fn from_database(error: &dyn DatabaseError) -> Self {
        Self::from_driver(error).unwrap_or(Self::Final)
    }

    /// Returns whether a transaction may be committed in spite of this error of its COMMIT.
    pub(crate) fn is_doubtful_commit(error: &sqlx::Error) -> bool {
        match error {
            // Class 08 has transaction_resolution_unknown; a session that is shut down while a
            // standby confirms has committed.
            sqlx::Error::Database(source) => {
                let source = source.as_ref();
                Self::from_error(error) == Self::ConnectionLost
                    || ends_session(source)
                    || is_sqlite_io_error(source)
                    || is_interrupted(source)
            }
            _ => true,
        }
    }

    /// Returns whether PostgreSQL has refused a connection because of an option in the URL.
    pub(crate) fn is_refused_option(error: &sqlx::Error) -> bool {
        #[cfg(feature = "postgres")]
        if let sqlx::Error::Database(error) = error
            && let Some(error) = error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>()
        {
            // invalid_parameter_value, undefined_object.
            return matches!(error.code(), "22023" | "42704");
        }
        let _ = error;
        false
    }

    /// Classifies an error of sqlx, of a database or of a driver. Returns `None` for any other
    /// error.
    pub(crate) fn from_any(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        if let Some(error) = error.downcast_ref::<sqlx::Error>() {
            return Some(Self::from_error(error));
        }
        // The source of an error of sqlx.
        if let Some(error) = error.downcast_ref::<Box<dyn DatabaseError>>() {
            return Some(Self::from_database(error.as_ref()));
        }
        Self::from_driver(error)
    }

    fn from_driver(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        #[cfg(feature = "postgres")]
        if let Some(error) = error.downcast_ref::<sqlx::postgres::PgDatabaseError>() {
            return Some(match AccessError::from_database(error) {
                // A pooler uses the class of lost connections for requests that it will refuse
                // again.
                Some(_) => Self::Final,
                None => Self::from_postgres(error.code(), ends_session(error)),
            });
        }
        #[cfg(feature = "mysql")]
        if let Some(error) = error.downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
            return Some(Self::from_mysql(error.number()));
        }
        #[cfg(feature = "sqlite")]
        if let Some(error) = error.downcast_ref::<sqlx::sqlite::SqliteError>() {
            return Some(Self::from_sqlite(error.code().as_deref().unwrap_or_default(), error.message()));
        }
        let _ = error;
        None
    }

    /// <https://www.postgresql.org/docs/current/errcodes-appendix.html>
    #[cfg(feature = "postgres")]
    fn from_postgres(code: &str, ends_session: bool) -> Self {
        match code {
            // internal_error. With it, Pgpool-II ends a session whose server it has lost, also
            // during a COMMIT.
            "XX000" if ends_session => Self::ConnectionLost,
            // admin_shutdown, crash_shutdown, cannot_connect_now, database_dropped,
            // idle_session_timeout, idle_in_transaction_session_timeout, transaction_timeout; class
            // 08 is connection_exception.
            "57P01" | "57P02" | "57P03" | "57P04" | "57P05" | "25P03" | "25P04" => Self::ConnectionLost,
            c if c.starts_with("08") => Self::ConnectionLost,
            // disk_full, out_of_memory, too_many_connections.
            "53100" | "53200" | "53300" => Self::Exhausted,
            // serialization_failure, deadlock_detected.
            "40001" | "40P01" => Self::RolledBack,
            // lock_not_available.
            "55P03" => Self::Blocked,
            // query_canceled.
            "57014" => Self::Cancelled,
            // unique_violation, duplicate_table, duplicate_object; XX000 is "tuple concurrently
            // updated".
            "23505" | "42P07" | "42710" | "XX000" => Self::Race,
            "42P01" => Self::NoTable,
            // read_only_sql_transaction: on a standby there are no others.
            "25006" => Self::ReadOnly,
            _ => Self::Final,
        }
    }

    /// <https://dev.mysql.com/doc/mysql-errors/9.0/en/server-error-reference.html>, and MariaDB
    /// where it differs.
    #[cfg(feature = "mysql")]
    fn from_mysql(number: u16) -> Self {
        match number {
            // Server shutdown in progress, connection killed, client was disconnected by the server
            // because of inactivity, server in offline mode; error during COMMIT (a Galera node has
            // lost its cluster: the others may have it or not).
            1053 | 1927 | 3169 | 4031 | 3032 | 1180 => Self::ConnectionLost,
            // Unknown prepared statement: a proxy has moved the session to another server. A new
            // connection prepares its statements again.
            1243 => Self::ConnectionLost,
            // A proxy passes on an error of its own client library, such as 2013, or one of ProxySQL:
            // it has lost its server, which may have executed the statement.
            2000..=2999 | 9000..=9999 => Self::ConnectionLost,
            // The server runs with --read-only (or another option that forbids the statement), the
            // transaction is read-only, the server is read-only, InnoDB is read-only; a Galera node
            // has no cluster ("has not yet prepared node for application use").
            1290 | 1792 | 1836 | 1874 | 1047 => Self::ReadOnly,
            // Too many connections (three limits), no thread, too many prepared statements, disk full,
            // table full, out of memory (two).
            1040 | 1203 | 1226 | 1135 | 1461 | 1021 | 1114 | 1037 | 1041 => Self::Exhausted,
            // Deadlock (on Galera also another node's commit), record has changed since last read,
            // rolled back during commit (Group Replication, for another member's commit).
            1213 | 1020 | 3101 => Self::RolledBack,
            // Lock wait timeout (on MariaDB also NOWAIT), NOWAIT.
            1205 | 3572 => Self::Blocked,
            // KILL QUERY, max_statement_time, max_execution_time; a prepared statement whose tables
            // change, or leave the server's cache, again and again.
            1317 | 1969 | 3024 | 1615 => Self::Cancelled,
            // Table exists, duplicate entry.
            1050 | 1062 => Self::Race,
            1146 => Self::NoTable,
            _ => Self::Final,
        }
    }

    /// <https://www.sqlite.org/rescode.html>
    #[cfg(feature = "sqlite")]
    fn from_sqlite(code: &str, message: &str) -> Self {
        match code.parse::<u32>().unwrap_or_default() {
            // The low byte is the primary code: BUSY and LOCKED with all their kinds, and PROTOCOL: others
            // took the lock of the WAL too often in a row.
            c if matches!(c & 0xff, 5 | 6 | 15) => Self::RolledBack,
            // SCHEMA: twice, another connection has changed the schema while the statement was
            // compiled, as concurrent migrations do. The message may call a new table missing.
            17 => Self::RolledBack,
            // READONLY_DBMOVED: the file at the path is another one than the connection has open.
            1032 => Self::ConnectionLost,
            // FULL, CANTOPEN: the file is open, so a journal cannot be opened.
            c if matches!(c & 0xff, 13 | 14) => Self::Exhausted,
            // CONSTRAINT_PRIMARYKEY, CONSTRAINT_UNIQUE.
            1555 | 2067 => Self::Race,
            1 if message.starts_with("no such table") => Self::NoTable,
            1 if message.contains("already exists") => Self::Race,
            _ => Self::Final,
        }
    }
}

/// Returns `None` for a table that does not exist.
pub(crate) fn if_exists<T>(read: Result<T, sqlx::Error>) -> Result<Option<T>, sqlx::Error> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if Fault::from_error(&error) == Fault::NoTable => Ok(None),
        Err(error) => Err(error),
    }
}

/// A copy of an error of a driver, which cannot be cloned.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
struct Copied {
    reason: String,
    fault: Fault,
}

impl Copied {
    fn find(error: &std::io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}

/// Copies an error of a driver. The copy has the same message and means the same for the sender.
pub(super) fn copy(error: &sqlx::Error) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::other(Copied { reason: reason(error), fault: Fault::from_error(error) }))
}

/// No writable server was found, although some servers may have answered.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct NotWritable(String);

/// Makes the error of a connection to a server that is read-only or cannot write as durably as
/// requested.
pub(crate) fn not_writable(reason: String) -> sqlx::Error {
    sqlx::Error::Io(std::io::Error::other(NotWritable(reason)))
}

/// Describes an error of the driver.
pub(crate) fn reason(error: &sqlx::Error) -> String {
    match error {
        sqlx::Error::Configuration(cause) if cause.is::<Unusable>() => cause.to_string(),
        sqlx::Error::Io(cause)
            if cause.get_ref().is_some_and(|cause| cause.is::<NotWritable>() || cause.is::<Copied>()) =>
        {
            cause.to_string()
        }
        error => error.to_string(),
    }
}

/// Returns whether MySQL or MariaDB interrupted the statement: KILL QUERY, or MariaDB's
/// max_statement_time. Neither documents that an interrupted COMMIT has not taken effect.
fn is_interrupted(error: &dyn DatabaseError) -> bool {
    #[cfg(feature = "mysql")]
    if let Some(error) = error.try_downcast_ref::<sqlx::mysql::MySqlDatabaseError>() {
        return matches!(error.number(), 1317 | 1969);
    }
    let _ = error;
    false
}

/// Returns whether PostgreSQL, or a pooler in front of it, has ended the session with this error.
fn ends_session(error: &dyn DatabaseError) -> bool {
    #[cfg(feature = "postgres")]
    if let Some(error) = error.try_downcast_ref::<sqlx::postgres::PgDatabaseError>() {
        use sqlx::postgres::PgSeverity;
        return matches!(error.severity(), PgSeverity::Fatal | PgSeverity::Panic);
    }
    let _ = error;
    false
}

/// Returns whether SQLite could not read, write or sync a file. A COMMIT may fail so after its
/// commit point: the journal is deleted and its directory cannot be synced, or the end of the
/// database file cannot be cut off; or the commit stands in the WAL and cannot be synced, where a
/// recovery finds it.
/// <https://www.sqlite.org/atomiccommit.html#_deleting_the_rollback_journal>
fn is_sqlite_io_error(error: &dyn DatabaseError) -> bool {
    #[cfg(feature = "sqlite")]
    if let Some(error) = error.try_downcast_ref::<sqlx::sqlite::SqliteError>() {
        return is_io_error(error.code().as_deref().unwrap_or_default());
    }
    let _ = error;
    false
}

/// The low byte is the primary code: IOERR with all its kinds.
#[cfg(feature = "sqlite")]
fn is_io_error(code: &str) -> bool {
    code.parse::<u32>().is_ok_and(|code| code & 0xff == 10)
}

pub(super) fn is_sqlite_error(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(error) = error else {
        return false;
    };
    let _ = error;
    #[cfg(feature = "sqlite")]
    return error.try_downcast_ref::<sqlx::sqlite::SqliteError>().is_some();
    #[cfg(not(feature = "sqlite"))]
    return false;
}

#[cfg(all(test, any(feature = "postgres", feature = "mysql", feature = "sqlite")))]
mod tests {
    use super::*;

    #[cfg(feature = "postgres")]
    #[test]
    fn internal_error_that_ends_session_is_no_race() {
        assert_eq!(Fault::from_postgres("XX000", false), Fault::Race);
        assert_eq!(Fault::from_postgres("XX000", true), Fault::ConnectionLost);
    }

    /// SQLITE_IOERR, SQLITE_IOERR_FSYNC, SQLITE_IOERR_DIR_FSYNC, SQLITE_IOERR_TRUNCATE; and
    /// SQLITE_BUSY, SQLITE_FULL, SQLITE_CONSTRAINT_FOREIGNKEY.
    #[cfg(feature = "sqlite")]
    #[test]
    fn io_errors_of_sqlite_have_many_codes() {
        assert!(["10", "1034", "1290", "1546"].into_iter().all(is_io_error));
        assert!(!["5", "13", "787"].into_iter().any(is_io_error));
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn each_kind_of_read_only_server_is_recognized() {
        for number in [1290, 1792, 1836, 1874] {
            assert_eq!(Fault::from_mysql(number), Fault::ReadOnly, "{number}");
        }
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn proxy_without_its_server_is_no_refusal() {
        for number in [2003, 2013, 9001, 1243] {
            assert_eq!(Fault::from_mysql(number), Fault::ConnectionLost, "{number}");
        }
    }

    #[cfg(feature = "mysql")]
    #[test]
    fn cancelled_statement_of_mysql_is_no_final_refusal() {
        for number in [1317, 1615, 1969, 3024] {
            assert_eq!(Fault::from_mysql(number), Fault::Cancelled, "{number}");
        }
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn table_that_is_being_created_is_not_missing() {
        assert_eq!(Fault::from_sqlite("17", "no such table: sqlock_lease"), Fault::RolledBack);
        assert_eq!(Fault::from_sqlite("15", "locking protocol"), Fault::RolledBack);
        assert_eq!(Fault::from_sqlite("1", "no such table: sqlock_lease"), Fault::NoTable);
    }

    #[cfg(feature = "sqlite")]
    #[test]
    fn moved_sqlite_file_severs_the_connection() {
        let moved = Fault::from_sqlite("1032", "attempt to write a readonly database");
        assert_eq!(moved, Fault::ConnectionLost);
    }
}
