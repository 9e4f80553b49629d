//! Hears of grants by other clients, on the connection of the heartbeat.
//!
//! LISTEN belongs to a session of the server. Behind a pooler that shares sessions it would stay with one that others use. So a
//! connection listens only if its session has a setting that nothing but the startup packet of this very connection can have made, and
//! every heartbeat looks for that setting before it tells other clients that this one listens.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{Acquire as _, ConnectOptions as _, Connection as _, PgConnection, PgPool};
use uuid::Uuid;

use super::settings::started_at;
use crate::protocol::ClientId;
use crate::protocol::timing::CONNECT_WITHIN;

/// The setting that marks a session as one that listens.
macro_rules! mark {
    () => {
        "current_setting('sqlock.session', true)"
    };
}
pub(super) use mark;

/// A connection that may begin to listen.
pub(super) enum HeartbeatConnection {
    Plain(PgConnection),
    Listening(Listener),
    /// The connection was given up, or is lost.
    Lost,
}

/// What a connection for heartbeats needs to begin to listen.
pub(super) struct Upgrade {
    pub(super) options: PgConnectOptions,
    /// No session has been found to be shared.
    pub(super) can_listen: Arc<AtomicBool>,
    /// The client whose heartbeat was answered.
    pub(super) client: Option<ClientId>,
}

/// A connection that listens.
pub(super) struct Listener {
    listener: PgListener,
    /// The listener keeps its connection in a pool of one.
    pool: PgPool,
    mark: String,
}

impl HeartbeatConnection {
    /// The connection, for statements.
    pub(super) async fn connection(&mut self) -> Result<&mut PgConnection, sqlx::Error> {
        self.connection_and_mark().await.map(|(connection, _)| connection)
    }

    /// The same, with what marks its session as one that listens.
    pub(super) async fn connection_and_mark(&mut self) -> Result<(&mut PgConnection, Option<&str>), sqlx::Error> {
        match self {
            Self::Plain(connection) => Ok((connection, None)),
            Self::Listening(Listener { listener, mark, .. }) => Ok((listener.acquire().await?, Some(mark))),
            Self::Lost => Err(lost_connection()),
        }
    }

    /// Waits for the name of the next grant. A plain connection begins to listen first, once a heartbeat was answered on it.
    ///
    /// The next statement fails if the future is dropped while the connection begins to listen.
    pub(super) async fn notified(&mut self, upgrade: &Upgrade) -> Result<String, sqlx::Error> {
        if let Some(client) = upgrade.client.filter(|_| upgrade.can_listen.load(Ordering::Relaxed)) {
            self.listen(upgrade, client).await?;
        }
        let Self::Listening(Listener { listener, .. }) = self else {
            return std::future::pending().await;
        };
        match listener.try_recv().await {
            Ok(Some(notification)) => Ok(notification.payload().to_owned()),
            failed => {
                // The listener would open another connection, on which the heartbeat would not notice the interruption.
                *self = Self::Lost;
                Err(failed.err().unwrap_or_else(lost_connection))
            }
        }
    }

    /// Replaces a plain connection by one that listens, if its session is its own. There is one connection at a time, and to one server.
    async fn listen(&mut self, upgrade: &Upgrade, client: ClientId) -> Result<(), sqlx::Error> {
        let Self::Plain(_) = self else {
            return Ok(());
        };
        let Self::Plain(mut plain) = std::mem::replace(self, Self::Lost) else {
            return Ok(());
        };
        let server = started_at(&mut plain).await?;
        plain.close().await?;
        let mut replacement = match Listener::connect(&upgrade.options, client).await? {
            Some(listener) => Self::Listening(listener),
            None => {
                upgrade.can_listen.store(false, Ordering::Relaxed);
                Self::Plain(upgrade.options.connect().await?)
            }
        };
        if started_at(replacement.connection().await?).await? != server {
            return Err(lost_connection());
        }
        *self = replacement;
        Ok(())
    }

    pub(super) async fn close(self) -> Result<(), sqlx::Error> {
        match self {
            Self::Plain(connection) => connection.close().await,
            Self::Listening(Listener { listener, pool, .. }) => {
                drop(listener);
                pool.close().await;
                Ok(())
            }
            Self::Lost => Ok(()),
        }
    }
}

#[rustfmt::skip]
const IS_MARKED: &str = concat!("SELECT coalesce(", mark!(), " = $1, false)");

impl Listener {
    /// Opens a connection that listens for what concerns a client. `None`: its session may be shared.
    async fn connect(options: &PgConnectOptions, client: ClientId) -> Result<Option<Self>, sqlx::Error> {
        let mark = Uuid::new_v4().simple().to_string();
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(CONNECT_WITHIN)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            .connect_lazy_with(options.clone().options([("sqlock.session", &mark)]));
        let mut listener = match PgListener::connect_with(&pool).await {
            // A pooler refuses a setting in the startup packet.
            Err(sqlx::Error::Database(_)) => return Ok(None),
            other => other?,
        };
        if !sqlx::query_scalar(IS_MARKED).bind(&mark).fetch_one(&mut listener).await? {
            drop(listener);
            pool.close().await;
            return Ok(None);
        }
        listener.ignore_pool_close_event(true);
        listener.eager_reconnect(false);
        listener.listen(&format!("sqlock_{client}")).await?;
        Ok(Some(Self { listener, pool, mark }))
    }
}

/// The connection was lost while it was idle.
fn lost_connection() -> sqlx::Error {
    sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())
}
