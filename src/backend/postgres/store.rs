//! Carries out the requests of the protocol on PostgreSQL.
//!
//! Each request is one statement if possible and needs no session state, so a transaction pooler
//! may be used.
//!
//! The statements rely on these rules:
//! - A statement reads from the snapshot of its start. The server reads a row again after locking
//!   it, and checks the conditions on that row again; other rows stay as old as the snapshot. So a
//!   condition on other rows (the entries of a name) counts only if the locked row of the name is
//!   the version that the snapshot has: `xmin` is equal. Every statement that adds an entry writes
//!   the row of its name, and so changes its `xmin`.
//!   <https://www.postgresql.org/docs/current/transaction-iso.html#XACT-READ-COMMITTED>
//! - A statement that ends a holding locks its row FOR UPDATE, and skips the row if a fence (FOR
//!   KEY SHARE) has locked it. Other statements lock FOR NO KEY UPDATE, as UPDATE does, and pass
//!   fences.
//! - Rows are locked before the clock is read for what is written: `clock_timestamp()`, since
//!   `now()` is the start of the transaction.

use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{PgConnection, Postgres};

use super::settings::Settings;
use super::{acquire, change, heartbeat, queue, release, transition};
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{Request, Response};

/// Microseconds since the Unix epoch.
macro_rules! now {
    () => {
        "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    };
}
pub(super) use now;

/// [`GRANT_TTL`] in microseconds.
macro_rules! grant {
    () => {
        "3000000"
    };
}
pub(super) use grant;

const _: () = assert!(GRANT_TTL.as_micros() == 3_000_000, "grant!() says the same");

/// Gives a notice to each `client` in `loser` if `all_locked` has a row. A client without a row
/// gets one: a registration under way waits for it. Its notices start at the clock, so that they
/// differ from those of an earlier row, which the sweeper has deleted. The order keeps two
/// statements that create the same rows from a deadlock.
macro_rules! notice {
    () => {
        concat!(
            "
    INSERT INTO sqlock_client AS c (id, beat_at, notice)
    SELECT loser.client, 0, ",
            now!(),
            " FROM loser, all_locked ORDER BY loser.client
        ON CONFLICT (id) DO UPDATE SET notice = c.notice + 1"
        )
    };
}
pub(super) use notice;

/// Notifies a listening client that the row `$granted` is a grant of the name `$1` to it. The server
/// sends the notification when the grant commits.
/// <https://www.postgresql.org/docs/current/sql-notify.html>
macro_rules! notify {
    ($granted:literal, $client:literal, $granter:literal) => {
        concat!(
            "(SELECT pg_notify('sqlock_' || n.id, concat_ws(' ', ",
            $granted,
            ".id, ",
            $granted,
            ".token, n.notice, $1))::text
                     FROM sqlock_client AS n WHERE n.id = ",
            $client,
            " AND n.id <> ",
            $granter,
            " AND n.listens)"
        )
    };
}
pub(super) use notify;

/// Lets the transaction end before its commit is on the disk, if `$may`. Is always true.
/// <https://www.postgresql.org/docs/current/wal-async-commit.html>
macro_rules! commit_lazily {
    ($may:literal) => {
        concat!("CASE WHEN ", $may, " THEN set_config('synchronous_commit', 'off', true) IS NOT NULL ELSE true END")
    };
}
pub(super) use commit_lazily;

/// The columns of [`read_lease`](crate::backend::stored::read_lease), of a row `l` and the
/// heartbeat `c` of its client. A client without a row has no heartbeat: `greatest` ignores NULL.
macro_rules! lease_columns {
    () => {
        concat!(
            "l.id, l.owner, l.client, l.token, l.waiting, l.lost, l.asked, greatest(l.expires_at, c.beat_at + l.ttl) - ",
            $crate::backend::postgres::store::now!(),
            " AS remaining"
        )
    };
}
pub(super) use lease_columns;

pub(super) type Query<'q> = sqlx::query::Query<'q, Postgres, PgArguments>;

/// How often a request is tried when a row has changed or was locked briefly.
pub(super) const TRIES: usize = 4;

/// A connection with its settings.
pub(super) struct Connection<'c> {
    pub(super) connection: &'c mut PgConnection,
    pub(super) settings: Settings,
    /// The mark of the session, if it listens.
    pub(super) mark: Option<&'c str>,
}

impl Connection<'_> {
    /// Carries out one statement.
    pub(super) async fn rows(&mut self, query: Query<'_>) -> Result<Vec<PgRow>, sqlx::Error> {
        self.settings.verify(self.connection).await?;
        self.settings.begin(self.connection).await?;
        let rows = query.fetch_all(&mut *self.connection).await;
        self.settings.end(self.connection, rows).await
    }

    /// Carries out a statement that returns at most one row.
    pub(super) async fn row(&mut self, query: Query<'_>) -> Result<Option<PgRow>, sqlx::Error> {
        Ok(self.rows(query).await?.into_iter().next())
    }
}

/// Carries out a request.
pub(super) async fn execute(conn: &mut Connection<'_>, request: &Request) -> Result<Response, sqlx::Error> {
    Ok(match request {
        Request::Register { client } => Response::Registered(heartbeat::register(conn, *client).await?),
        Request::Beat { client } => Response::Beat(heartbeat::beat(conn, *client).await?),
        Request::Acquire(claim) => Response::Acquired(acquire::acquire(conn, claim).await?),
        Request::Join(claim) => Response::Joined(acquire::join(conn, claim).await?),
        Request::Enqueue(entries) => Response::Enqueued(queue::enqueue(conn, entries).await?),
        Request::Release(release) => Response::Released(release::release(conn, release).await?),
        Request::Withdraw { name, id, except } => {
            Response::Withdrawn(release::withdraw(conn, name, *id, *except).await?)
        }
        Request::Poll { name, ids } => Response::Polled(queue::poll(conn, name, ids).await?),
        Request::Read { name, limit } => Response::Read(queue::read(conn, name, *limit).await?),
        Request::Transition(transition) => Response::Transitioned(transition::transition(conn, transition).await?),
        Request::Extend(extension) => Response::Extended(change::extend(conn, extension).await?),
        Request::Downgrade { name, id, token } => {
            Response::Downgraded(change::downgrade(conn, name, *id, *token).await?)
        }
        Request::Raise { name, id, token, to } => Response::Raised(change::raise(conn, name, *id, *token, *to).await?),
        Request::Evict { name, token } => Response::Evicted(release::evict(conn, name, *token).await?),
        Request::Ask { name } => Response::Asked(change::ask(conn, name).await?),
    })
}
