//! Receives notifications of grants, on the connection of the heartbeat.
//!
//! LISTEN belongs to a session of the server. Behind a pooler that shares sessions, the LISTEN
//! would stay with a session of other clients. So a connection listens only if its session has a
//! setting that only the startup packet of this connection can have made. Every heartbeat checks
//! that setting before it marks the client as listening.
//!
//! The first connection is plain, because a listener hides why it cannot connect. No heartbeat can
//! be sent while the listener replaces the plain connection, so this takes as few round trips as
//! possible, and does not count as time of the next heartbeat. Then each step until the client
//! listens is one round trip: on a slow network, the next heartbeat interrupts a longer one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use sqlx::error::DatabaseError;
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{
    Acquire as _, AssertSqlSafe, ConnectOptions as _, Connection as _, Executor as _, PgConnection, PgPool, Row as _,
};
use uuid::Uuid;

use super::settings::started_at;
use crate::backend::{BoxFuture, IsWaiting};
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

/// A connection. The heartbeat's connection may begin to listen.
pub(super) enum StoreConnection {
    Plain(PgConnection),
    /// A connection that can listen is about to replace the plain one.
    Upgrading(BoxFuture<'static, Result<Self, sqlx::Error>>),
    Listener(Listener),
    /// The connection is closed or lost.
    Lost,
}

/// The state that a connection needs to begin to listen.
#[derive(Clone)]
pub(super) struct Upgrade {
    pub(super) options: PgConnectOptions,
    /// `false`: a session was found to be shared.
    pub(super) can_listen: Arc<AtomicBool>,
    pub(super) is_waiting: IsWaiting,
    /// The client whose heartbeat was answered.
    pub(super) client: Option<ClientId>,
}

/// A connection that can listen.
pub(super) struct Listener {
    listener: PgListener,
    /// The listener keeps its connection in a pool of one.
    pool: PgPool,
    mark: String,
    state: ListenerState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ListenerState {
    /// Nothing is known about the session yet.
    Connected,
    /// The session is this connection's own.
    Marked,
    Listening,
    /// The session may be shared, and must not listen.
    Shared,
}

impl StoreConnection {
    /// Returns the connection for statements.
    pub(super) async fn connection(&mut self) -> Result<&mut PgConnection, sqlx::Error> {
        self.connection_and_mark().await.map(|(connection, _)| connection)
    }

    /// Returns the connection and the mark of its session, if it listens.
    pub(super) async fn connection_and_mark(&mut self) -> Result<(&mut PgConnection, Option<&str>), sqlx::Error> {
        self.finish_replacement().await?;
        match self {
            Self::Plain(connection) => Ok((connection, None)),
            Self::Listener(Listener { listener, mark, state, .. }) => {
                let mark = (*state == ListenerState::Listening).then_some(mark.as_str());
                Ok((listener.acquire().await?, mark))
            }
            Self::Upgrading(_) | Self::Lost => Err(lost_connection()),
        }
    }

    /// Waits for the next grant. A plain connection is replaced after its first answered heartbeat,
    /// and the new one listens when the client waits for a name.
    ///
    /// If the future is dropped meanwhile, the next statement waits until the plain connection is
    /// replaced, and the next call goes on with the step that was interrupted.
    pub(super) async fn notified(&mut self, upgrade: &Upgrade) -> Result<Notification, sqlx::Error> {
        let notified = self.next_notification(upgrade).await;
        if notified.is_err() {
            // A listener would open another connection, on which the heartbeat would not notice the
            // interruption.
            *self = Self::Lost;
        }
        notified
    }

    async fn next_notification(&mut self, upgrade: &Upgrade) -> Result<Notification, sqlx::Error> {
        let Some(client) = upgrade.client else {
            return std::future::pending().await;
        };
        if let Self::Plain(plain) = self
            && upgrade.can_listen.load(Ordering::Relaxed)
        {
            let server = started_at(plain).await?;
            if let Self::Plain(plain) = std::mem::replace(self, Self::Lost) {
                *self = Self::Upgrading(Box::pin(upgrade.clone().replace(plain, server)));
            }
        }
        self.finish_replacement().await?;
        let Self::Listener(listener) = self else {
            return std::future::pending().await;
        };
        if matches!(listener.state, ListenerState::Connected | ListenerState::Marked) {
            // A notification wakes each session of the database that listens, for any channel, so a
            // client that has never waited does not listen.
            if upgrade.is_waiting.clone().wait_for(|is_waiting| *is_waiting).await.is_err() {
                return std::future::pending().await;
            }
            listener.listen(client).await?;
        }
        if listener.state == ListenerState::Shared {
            upgrade.can_listen.store(false, Ordering::Relaxed);
            return std::future::pending().await;
        }
        let notification = listener.listener.try_recv().await?.ok_or_else(lost_connection)?;
        Ok(parsed(notification.payload()).unwrap_or(Notification::AnyName))
    }

    /// Waits until the connection that can listen has replaced the plain one.
    pub(super) async fn finish_replacement(&mut self) -> Result<(), sqlx::Error> {
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
            Self::Listener(Listener { listener, pool, .. }) => {
                drop(listener);
                pool.close().await;
                Ok(())
            }
            Self::Upgrading(_) | Self::Lost => Ok(()),
        }
    }
}

impl Upgrade {
    /// Replaces a plain connection by one that can listen. Closes the plain connection first, and
    /// fails if the new one does not reach the server that was started at `server`.
    async fn replace(self, plain: PgConnection, server: i64) -> Result<StoreConnection, sqlx::Error> {
        plain.close().await?;
        let listener = || async { Listener::connect(&self.options).await.map(StoreConnection::Listener) };
        let mut replacement = connect_or_plain(listener, &self.options, &self.can_listen).await?;
        if started_at(replacement.connection().await?).await? != server {
            return Err(lost_connection());
        }
        Ok(replacement)
    }
}

// $1 client, $2 mark
#[rustfmt::skip]
const LISTENS: &str = concat!("
UPDATE sqlock_client SET listens = true WHERE id = $1 AND ", mark!(), " = $2");

impl Listener {
    /// Opens a connection that can listen.
    async fn connect(options: &PgConnectOptions) -> Result<Self, sqlx::Error> {
        let mark = Uuid::new_v4().simple().to_string();
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(CONNECT_TIMEOUT)
            .idle_timeout(None)
            .max_lifetime(None)
            .test_before_acquire(false)
            .connect_lazy_with(options.clone().options([("sqlock.session", &mark)]));
        let mut listener = PgListener::connect_with(&pool).await?;
        listener.ignore_pool_close_event(true);
        listener.eager_reconnect(false);
        Ok(Self { listener, pool, mark, state: ListenerState::Connected })
    }

    /// Begins to listen for the grants of a client, unless the session may be shared.
    async fn listen(&mut self, client: ClientId) -> Result<(), sqlx::Error> {
        if self.state == ListenerState::Connected {
            // Without a prepared statement, which takes two round trips.
            let is_marked = format!(concat!("SELECT coalesce(", mark!(), " = '{}', false)"), self.mark);
            let is_marked = self.listener.fetch_one(AssertSqlSafe(is_marked)).await?.try_get(0)?;
            self.state = if is_marked { ListenerState::Marked } else { ListenerState::Shared };
        }
        if self.state == ListenerState::Shared {
            return Ok(());
        }
        self.listener.listen(&format!("sqlock_{client}")).await?;
        self.state = ListenerState::Listening;
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
fn may_refuse_settings(error: &sqlx::Error) -> bool {
    let sqlx::Error::Database(error) = error else { return false };
    let code = error.code().unwrap_or_default();
    !is_temporary(&**error) && !["28", "3D"].iter().any(|class| code.starts_with(class))
}

/// Connects with settings in the startup packet, or without them if the server refuses the
/// connection. If it refuses them again then, stores that it does not accept them; the first time,
/// it may have had another reason.
pub(super) async fn connect_or_plain<F: Future<Output = Result<StoreConnection, sqlx::Error>>>(
    with_settings: impl Fn() -> F,
    plain: &PgConnectOptions,
    accepts_settings: &AtomicBool,
) -> Result<StoreConnection, sqlx::Error> {
    match with_settings().await {
        Err(error) if may_refuse_settings(&error) => {}
        connected => return connected,
    }
    let plain = plain.connect().await?;
    match with_settings().await {
        Ok(connection) => {
            plain.close().await?;
            return Ok(connection);
        }
        Err(error) if may_refuse_settings(&error) => accepts_settings.store(false, Ordering::Relaxed),
        Err(_) => {}
    }
    Ok(StoreConnection::Plain(plain))
}

/// Makes the error of a connection that was lost while idle.
fn lost_connection() -> sqlx::Error {
    sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())
}
