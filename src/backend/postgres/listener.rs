//! Receives notifications of grants, on the connection of the heartbeat.
//!
//! LISTEN belongs to a session of the server. Behind a pooler that shares sessions, the LISTEN
//! would stay with a session of other clients. So a connection listens only if its session has a
//! setting that only the startup packet of this connection can have made. Every heartbeat checks
//! that setting before it marks the client as listening.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sqlx::error::DatabaseError;
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{Acquire as _, AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool, Row as _};
use uuid::Uuid;

use crate::backend::IsWaiting;
use crate::name::LockName;
use crate::protocol::timing::CONNECT_TIMEOUT;
use crate::protocol::{ClientId, Granted, Notification};
use crate::token::FencingToken;

/// The setting that marks a session as one that listens.
macro_rules! mark {
    () => {
        "current_setting('sqlock.session', true)"
    };
}
pub(super) use mark;

/// A connection for statements.
pub(super) enum StoreConnection {
    Plain(PgConnection),
    Listener(Listener),
    /// The connection is closed or lost.
    Lost,
}

/// A connection that can listen for the grants of a client.
pub(super) struct Listener {
    listener: PgListener,
    /// The listener keeps its connection in a pool of one.
    pool: PgPool,
    mark: String,
    /// The client whose heartbeat was answered.
    pub(super) client: Option<ClientId>,
    is_waiting: IsWaiting,
    /// `false`: a session was found to be shared.
    can_listen: Arc<AtomicBool>,
    is_listening: bool,
}

impl StoreConnection {
    /// Returns the connection for statements.
    pub(super) async fn connection(&mut self) -> Result<&mut PgConnection, sqlx::Error> {
        self.connection_and_mark().await.map(|(connection, _)| connection)
    }

    /// Returns the connection and the mark of its session, if it listens.
    pub(super) async fn connection_and_mark(&mut self) -> Result<(&mut PgConnection, Option<&str>), sqlx::Error> {
        match self {
            Self::Plain(connection) => Ok((connection, None)),
            Self::Listener(Listener { listener, mark, is_listening, .. }) => {
                Ok((listener.acquire().await?, is_listening.then_some(mark)))
            }
            Self::Lost => Err(lost_connection()),
        }
    }

    /// Waits for the next grant. A connection that can listen does so after its first answered
    /// heartbeat, once the client waits for a name.
    ///
    /// If the future is dropped meanwhile, the next call begins to listen anew.
    pub(super) async fn notified(&mut self) -> Result<Notification, sqlx::Error> {
        let Self::Listener(listener) = self else {
            return std::future::pending().await;
        };
        let notified = listener.notified().await;
        if notified.is_err() {
            // A listener would open another connection, on which the heartbeat would not notice the
            // interruption.
            *self = Self::Lost;
        }
        notified
    }

    pub(super) async fn close(self) -> Result<(), sqlx::Error> {
        match self {
            Self::Plain(connection) => connection.close().await,
            Self::Listener(Listener { listener, pool, .. }) => {
                drop(listener);
                pool.close().await;
                Ok(())
            }
            Self::Lost => Ok(()),
        }
    }
}

// $1 client, $2 mark
#[rustfmt::skip]
const LISTENS: &str = concat!("
UPDATE sqlock_client SET listens = true WHERE id = $1 AND ", mark!(), " = $2");

impl Listener {
    /// Opens a connection that can listen. `None`: a pooler refuses it.
    pub(super) async fn connect(
        options: PgConnectOptions,
        can_listen: Arc<AtomicBool>,
        is_waiting: IsWaiting,
    ) -> Result<Option<Self>, sqlx::Error> {
        let mark = Uuid::new_v4().simple().to_string();
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(CONNECT_TIMEOUT)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            .connect_lazy_with(options.options([("sqlock.session", &mark)]));
        let mut listener = match PgListener::connect_with(&pool).await {
            // A pooler refuses a setting in the startup packet.
            Err(sqlx::Error::Database(error)) if may_refuse_settings(&*error) => {
                can_listen.store(false, Ordering::Relaxed);
                return Ok(None);
            }
            other => other?,
        };
        listener.ignore_pool_close_event(true);
        listener.eager_reconnect(false);
        Ok(Some(Self { listener, pool, mark, client: None, is_waiting, can_listen, is_listening: false }))
    }

    pub(super) async fn connection(&mut self) -> Result<&mut PgConnection, sqlx::Error> {
        self.listener.acquire().await
    }

    async fn notified(&mut self) -> Result<Notification, sqlx::Error> {
        if !self.is_listening {
            let Some(client) = self.client else {
                return std::future::pending().await;
            };
            // A notification wakes each session of the database that listens, for any channel, so a
            // client that has never waited does not listen.
            let is_closed = self.is_waiting.wait_for(|is_waiting| *is_waiting).await.is_err();
            if is_closed || !self.can_listen.load(Ordering::Relaxed) {
                return std::future::pending().await;
            }
            self.listen(client).await?;
        }
        let notification = self.listener.try_recv().await?.ok_or_else(lost_connection)?;
        Ok(parsed(notification.payload()).unwrap_or(Notification::AnyName))
    }

    /// Begins to listen for the grants of a client, unless the session may be shared.
    async fn listen(&mut self, client: ClientId) -> Result<(), sqlx::Error> {
        // One round trip, without a prepared statement: the next heartbeat interrupts several ones, on
        // a slow network again and again.
        let is_marked = format!(concat!("coalesce(", mark!(), " = '{}', false)"), self.mark);
        let listen =
            format!("DO $$BEGIN IF {is_marked} THEN LISTEN \"sqlock_{client}\"; END IF; END$$; SELECT {is_marked}");
        if !self.listener.fetch_one(AssertSqlSafe(listen)).await?.try_get(0)? {
            self.can_listen.store(false, Ordering::Relaxed);
            return std::future::pending().await;
        }
        self.is_listening = true;
        // If the update fails, the next heartbeat marks the client.
        let noted = sqlx::query(LISTENS).bind(client.to_string()).bind(&self.mark).execute(&mut self.listener).await;
        match noted {
            Err(error @ sqlx::Error::Io(_)) => Err(error),
            _ => Ok(()),
        }
    }
}

/// Parses what [`notify`](super::store::notify) sends: id, token, notice and name.
fn parsed(payload: &str) -> Option<Notification> {
    let mut parts = payload.splitn(4, ' ');
    let mut next = || parts.next();
    let id = next()?.parse().ok()?;
    let token = FencingToken::new(next()?.parse().ok()?)?;
    let notice = next()?.parse().ok()?;
    let name = LockName::new(next()?).ok()?;
    Some(Notification::Granted { name, granted: Granted { id, token }, notice })
}

/// Returns whether a server that refuses a connection may accept the next one: it has too few
/// resources, its database does not take connections at present, or it stops, starts or fails.
fn is_temporary(error: &dyn DatabaseError) -> bool {
    let code = error.code().unwrap_or_default();
    ["53", "55", "57", "58"].iter().any(|class| code.starts_with(class))
}

/// Returns whether a server that refuses a connection may accept one without settings: a pooler
/// refuses them with codes of its own. A wrong password (class 28) or database (3D) stays wrong.
pub(super) fn may_refuse_settings(error: &dyn DatabaseError) -> bool {
    let code = error.code().unwrap_or_default();
    !is_temporary(error) && !["28", "3D"].iter().any(|class| code.starts_with(class))
}

/// Makes the error of a connection that was lost while idle.
fn lost_connection() -> sqlx::Error {
    sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())
}
