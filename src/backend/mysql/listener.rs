//! Wakes a client that another one grants a name, on the connection of the heartbeat.
//!
//! MySQL has no notifications. While a client waits, the session of its heartbeat has a user lock
//! with the name of the client and sleeps in short statements. A client that grants it a name
//! interrupts the statement of the session that has the lock. An account may interrupt its own
//! sessions without further rights.
//!
//! A session that ends loses its lock, so the interruption reaches the session that listens or
//! none. Behind a pooler that shares sessions, the
//! lock would stay with a session of other clients: every statement makes sure that the lock is
//! this session's, and every heartbeat marks the client as one that listens only if it is. An
//! interrupted heartbeat is sent again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection as _, MySqlConnection};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use super::store::number;
use crate::backend::IsWaiting;
use crate::protocol::ClientId;

/// How long one statement sleeps, in seconds. A heartbeat that becomes due waits for its end.
macro_rules! nap {
    () => {
        "0.1"
    };
}

/// The pause before a lock is asked for again that another session has, such as an earlier one of
/// this client that the server has not ended yet.
const PAUSE: Duration = Duration::from_millis(500);

/// The user lock of a client.
pub(super) fn lock_of(client: ClientId) -> String {
    format!("sqlock_{client}")
}

/// Returns whether a statement was interrupted by another session.
pub(super) fn is_woken(error: &sqlx::Error) -> bool {
    number(error) == Some(1317)
}

/// A connection, which may listen for the grants of a client.
pub(super) struct Listener {
    connection: State,
    /// `None`: the connection is not for heartbeats, or no heartbeat was answered yet.
    client: Option<ClientId>,
    is_waiting: Option<IsWaiting>,
    /// `false`: a session was found to be shared, or the server has no user locks.
    can_listen: Arc<AtomicBool>,
    /// The session has the lock of the client.
    has_lock: bool,
    /// The session was woken, and the notification was not passed on yet.
    is_woken: bool,
    lock_at: Instant,
}

/// What the connection does.
enum State {
    Idle(MySqlConnection),
    Sleeping(JoinHandle<(MySqlConnection, Result<Wake, sqlx::Error>)>),
    Lost,
}

/// How a statement ended that sleeps.
enum Wake {
    Woken,
    TimeOver,
    /// The session has not got the lock.
    NoLock,
    /// The session had the lock, and has lost it: sessions are shared.
    LockLost,
}

impl Listener {
    /// A connection that does not listen.
    pub(super) fn new(connection: MySqlConnection) -> Self {
        Self {
            connection: State::Idle(connection),
            client: None,
            is_waiting: None,
            can_listen: Arc::default(),
            has_lock: false,
            is_woken: false,
            lock_at: Instant::now(),
        }
    }

    /// A connection for heartbeats.
    pub(super) fn for_heartbeats(mut self, is_waiting: IsWaiting, can_listen: Arc<AtomicBool>) -> Self {
        self.is_waiting = Some(is_waiting);
        self.can_listen = can_listen;
        self
    }

    /// Notes that the heartbeat of a client was answered.
    pub(super) fn set_client(&mut self, client: ClientId) {
        self.client = Some(client);
    }

    /// Returns the connection for statements, once it sleeps no more.
    ///
    /// # Cancel safety
    ///
    /// The connection goes on sleeping when the future is dropped.
    pub(super) async fn connection(&mut self) -> Result<&mut MySqlConnection, sqlx::Error> {
        self.end_nap().await?;
        match &mut self.connection {
            State::Idle(connection) => Ok(connection),
            State::Sleeping(_) | State::Lost => Err(lost_connection()),
        }
    }

    /// Waits until another client may have granted a name to this one.
    ///
    /// # Cancel safety
    ///
    /// No notification is missed when the future is dropped.
    pub(super) async fn notified(&mut self) -> Result<(), sqlx::Error> {
        loop {
            self.end_nap().await?;
            if std::mem::take(&mut self.is_woken) {
                return Ok(());
            }
            let (Some(client), Some(is_waiting)) = (self.client, &mut self.is_waiting) else {
                return std::future::pending().await;
            };
            if !self.can_listen.load(Ordering::Relaxed) || is_waiting.wait_for(|is_waiting| *is_waiting).await.is_err()
            {
                return std::future::pending().await;
            }
            sleep_until(self.lock_at).await;
            if let State::Idle(connection) = std::mem::replace(&mut self.connection, State::Lost) {
                self.connection = State::Sleeping(tokio::spawn(nap(connection, client, self.has_lock)));
            }
        }
    }

    /// Waits for the end of the statement that sleeps, if there is one.
    async fn end_nap(&mut self) -> Result<(), sqlx::Error> {
        let State::Sleeping(nap) = &mut self.connection else {
            return Ok(());
        };
        let ended = nap.await;
        self.connection = State::Lost;
        let (connection, wake) = ended.map_err(|_| lost_connection())?;
        match wake {
            Ok(wake) => {
                self.is_woken |= matches!(wake, Wake::Woken);
                self.has_lock = matches!(wake, Wake::Woken | Wake::TimeOver);
                match wake {
                    Wake::Woken | Wake::TimeOver => {}
                    Wake::NoLock => self.lock_at = Instant::now() + PAUSE,
                    Wake::LockLost => self.can_listen.store(false, Ordering::Relaxed),
                }
            }
            // A server without user locks, or an account without the right to use them.
            Err(sqlx::Error::Database(_)) => self.can_listen.store(false, Ordering::Relaxed),
            Err(error) => return Err(error),
        }
        self.connection = State::Idle(connection);
        Ok(())
    }

    pub(super) async fn close(mut self) -> Result<(), sqlx::Error> {
        self.end_nap().await?;
        match std::mem::replace(&mut self.connection, State::Lost) {
            State::Idle(connection) => connection.close().await,
            State::Sleeping(_) | State::Lost => Ok(()),
        }
    }
}

impl Drop for Listener {
    /// The server may never answer.
    fn drop(&mut self) {
        if let State::Sleeping(nap) = &self.connection {
            nap.abort();
        }
    }
}

// Bind order: lock.
const LOCK: &str = "SELECT CAST(COALESCE(GET_LOCK(?, 0), 0) AS SIGNED)";

// Bind order: client, lock.
const LISTENS: &str = "UPDATE sqlock_client SET listens = TRUE WHERE id = ? AND IS_USED_LOCK(?) <=> CONNECTION_ID()";

// 0: the time is over. 1: interrupted, where that is no error. -1: the lock is not this session's.
// Bind order: lock.
#[rustfmt::skip]
const SLEEP: &str = concat!("SELECT CAST(IF(IS_USED_LOCK(?) <=> CONNECTION_ID(), SLEEP(", nap!(), "), -1) AS SIGNED)");

/// Sleeps in the session for a moment, with the lock of the client.
async fn nap(
    mut conn: MySqlConnection,
    client: ClientId,
    has_lock: bool,
) -> (MySqlConnection, Result<Wake, sqlx::Error>) {
    let wake = match try_nap(&mut conn, client, has_lock).await {
        Err(error) if is_woken(&error) => Ok(Wake::Woken),
        wake => wake,
    };
    (conn, wake)
}

async fn try_nap(conn: &mut MySqlConnection, client: ClientId, has_lock: bool) -> Result<Wake, sqlx::Error> {
    let lock = lock_of(client);
    if !has_lock {
        match sqlx::query_scalar(LOCK).bind(&lock).fetch_one(&mut *conn).await {
            Ok(1) => {}
            Err(error) if !is_woken(&error) => return Err(error),
            _ => return Ok(Wake::NoLock),
        }
        let marked = sqlx::query(LISTENS).bind(client.to_string()).bind(&lock).execute(&mut *conn).await;
        // If the database refuses that, the next heartbeat marks the client.
        if let Err(error @ sqlx::Error::Io(_)) = marked {
            return Err(error);
        }
    }
    Ok(match sqlx::query_scalar(SLEEP).bind(&lock).fetch_one(conn).await? {
        -1 => Wake::LockLost,
        0 => Wake::TimeOver,
        _ => Wake::Woken,
    })
}

/// Wakes the sessions of clients that listen. One that has ended since, or belongs to another
/// account, is not woken: its client polls.
pub(super) async fn wake(conn: &mut MySqlConnection, clients: &[String]) {
    for client in clients.iter().filter_map(|client| client.parse().ok()) {
        // The server evaluates the function when it interrupts the session.
        let text = format!("KILL QUERY IS_USED_LOCK('{}')", lock_of(client));
        if let Err(error) = sqlx::raw_sql(AssertSqlSafe(text)).execute(&mut *conn).await {
            tracing::trace!(%error, "could not wake a client");
        }
    }
}

fn lost_connection() -> sqlx::Error {
    sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())
}

#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, reason = "tests")]
mod tests;
