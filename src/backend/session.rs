//! Session locks: locks that end with the connection or the process that holds them.

use std::time::Duration;

use serde::Serialize;

use super::store::StoreFuture;
use super::stored::digest;
use crate::name::LockName;

/// The session locks of one client: a dedicated connection, or the open files of this process.
///
/// No operation waits in the server. A lock of one name is taken once, and released before it is
/// taken again.
pub(crate) trait SessionLocks: Send {
    /// Returns for how long the server keeps the session after the last statement that it received.
    /// After that time, and after any error other than the server's refusal of one lock, the state
    /// of all locks is unknown. `None`: the locks end with this process, not earlier.
    fn session_timeout(&self) -> Option<Duration>;

    /// Takes a lock if it is free. Returns whether it was.
    fn try_lock<'a>(&'a mut self, name: &'a LockName, shared: bool) -> StoreFuture<'a, bool>;

    /// Releases a lock. Returns whether it was held.
    fn unlock<'a>(&'a mut self, name: &'a LockName, shared: bool) -> StoreFuture<'a, bool>;

    /// Checks that the session still exists, and that its locks exclude the clients of the primary.
    /// Returns an error otherwise.
    fn ping(&mut self) -> StoreFuture<'_, ()>;

    /// Releases all locks and ends the session.
    fn close(self: Box<Self>) -> StoreFuture<'static, ()>;
}

/// The session that holds a session lock, as the server knows it. Returned by
/// [`SessionRequest::holders`](crate::session::SessionRequest::holders).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SessionHolder {
    /// The id of the session: the process id of the backend on PostgreSQL, the id of the connection
    /// on MySQL and MariaDB. On SQLite the id of the process that has locked the file.
    pub id: i64,
    /// Whether the lock is shared.
    pub shared: bool,
    /// The user of the database. `None`: unknown, as on SQLite, or invisible to this user.
    pub user: Option<String>,
    /// The address of the client, as the server knows it. `None`: unknown, or a local connection.
    pub address: Option<String>,
    /// The `application_name` of the session, on PostgreSQL.
    pub application: Option<String>,
}

/// How long the server keeps a session without statements, where it can be configured.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const SESSION_TIMEOUT: Duration = Duration::from_secs(15);

/// Hashes a name within its scope (a schema, a database) for databases whose locks have numbers,
/// short names, or names without case.
pub(crate) fn session_key(scope: &str, name: &LockName) -> [u8; 32] {
    digest(b"sqlock/session/1", [scope.as_bytes(), name.as_str().as_bytes()])
}

/// Makes the error of a statement that a pooler passed to another session, or whose server has
/// become a replica.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) fn another_session() -> sqlx::Error {
    sqlx::Error::Protocol("the statement was answered by another session, or by a read-only server".into())
}
