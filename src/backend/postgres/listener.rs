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
use sqlx::{Acquire as _, ConnectOptions as _, Connection as _, PgConnection, PgPool};
use uuid::Uuid;

use super::settings::started_at;
use crate::backend::{BoxFuture, Notification};
use crate::protocol::ClientId;
use crate::protocol::timing::CONNECT_TIMEOUT;

/// The setting that marks a session as one that listens.
macro_rules! mark {
    () => {
        "current_setting('sqlock.session', true)"
    };
}
pub(super) use mark;

/// A connection. The heartbeat's connection may begin to listen.
pub(super) enum StoreConnection {
    Plain(PgConnection),
    /// A connection that listens is about to replace the plain one.
    Upgrading(BoxFuture<'static, Result<Self, sqlx::Error>>),
    Listening(Listener),
    /// The connection is closed or lost.
    Lost,
}

/// The state that a connection needs to begin to listen.
#[derive(Clone)]
pub(super) struct Upgrade {
    pub(super) options: PgConnectOptions,
    /// `false`: a session was found to be shared.
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

impl StoreConnection {
    /// Returns the connection for statements.
    pub(super) async fn connection(&mut self) -> Result<&mut PgConnection, sqlx::Error> {
        self.connection_and_mark().await.map(|(connection, _)| connection)
    }

    /// Returns the connection and the mark of its session, if it listens.
    pub(super) async fn connection_and_mark(&mut self) -> Result<(&mut PgConnection, Option<&str>), sqlx::Error> {
        self.finish_upgrade().await?;
        match self {
            Self::Plain(connection) => Ok((connection, None)),
            Self::Listening(Listener { listener, mark, .. }) => Ok((listener.acquire().await?, Some(mark))),
            Self::Upgrading(_) | Self::Lost => Err(lost_connection()),
        }
    }

    /// Waits for the next grant. A plain connection begins to listen after its first answered
    /// heartbeat.
    ///
    /// If the future is dropped meanwhile, the next statement waits until the connection listens.
    pub(super) async fn notified(&mut self, upgrade: &Upgrade) -> Result<Notification, sqlx::Error> {
        if let Some(client) = upgrade.client.filter(|_| upgrade.can_listen.load(Ordering::Relaxed)) {
            *self = match std::mem::replace(self, Self::Lost) {
                Self::Plain(plain) => Self::Upgrading(Box::pin(upgrade.clone().listen(plain, client))),
                other => other,
            };
        }
        self.finish_upgrade().await?;
        let Self::Listening(Listener { listener, .. }) = self else {
            return std::future::pending().await;
        };
        match listener.try_recv().await {
            Ok(Some(notification)) => Ok(Notification::Name(notification.payload().to_owned())),
            failed => {
                // The listener would open another connection, on which the heartbeat would not
                // notice the interruption.
                *self = Self::Lost;
                Err(failed.err().unwrap_or_else(lost_connection))
            }
        }
    }

    async fn finish_upgrade(&mut self) -> Result<(), sqlx::Error> {
        if let Self::Upgrading(upgrade) = self {
            let upgraded = upgrade.await;
            *self = Self::Lost;
            *self = upgraded?;
        }
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
            Self::Upgrading(_) | Self::Lost => Ok(()),
        }
    }
}

impl Upgrade {
    /// Replaces a plain connection by one that listens, if its session is not shared. Closes the
    /// plain connection first, and fails if the new one reaches another server.
    async fn listen(self, mut plain: PgConnection, client: ClientId) -> Result<StoreConnection, sqlx::Error> {
        let server = started_at(&mut plain).await?;
        plain.close().await?;
        let mut replacement = match Listener::connect(&self.options, client).await? {
            Some(listener) => StoreConnection::Listening(listener),
            None => {
                self.can_listen.store(false, Ordering::Relaxed);
                StoreConnection::Plain(self.options.connect().await?)
            }
        };
        if started_at(replacement.connection().await?).await? != server {
            return Err(lost_connection());
        }
        Ok(replacement)
    }
}

#[rustfmt::skip]
const IS_MARKED: &str = concat!("SELECT coalesce(", mark!(), " = $1, false)");

// $1 client, $2 mark
#[rustfmt::skip]
const LISTENS: &str = concat!("
UPDATE sqlock_client SET listens = true WHERE id = $1 AND ", mark!(), " = $2");

impl Listener {
    /// Opens a connection that listens for the grants of a client. `None`: its session may be
    /// shared.
    async fn connect(options: &PgConnectOptions, client: ClientId) -> Result<Option<Self>, sqlx::Error> {
        let mark = Uuid::new_v4().simple().to_string();
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(CONNECT_TIMEOUT)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            .connect_lazy_with(options.clone().options([("sqlock.session", &mark)]));
        let mut listener = match PgListener::connect_with(&pool).await {
            // A pooler refuses a setting in the startup packet.
            Err(sqlx::Error::Database(error)) if !is_temporary(&*error) => return Ok(None),
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
        // If the update fails, the next heartbeat marks the client.
        let noted = sqlx::query(LISTENS).bind(client.to_string()).bind(&mark).execute(&mut listener).await;
        if let Err(error @ sqlx::Error::Io(_)) = noted {
            return Err(error);
        }
        Ok(Some(Self { listener, pool, mark }))
    }
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
