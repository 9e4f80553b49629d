//! Carries out the requests of the protocol on PostgreSQL.
//!
//! Each request is one statement wherever possible, and needs no session state, so a transaction pooler may stand before the server.
//!
//! What every statement rests on:
//! - A statement reads from the snapshot of its start. A row that it locks is read again as it is once it is locked, and the
//!   conditions on that row are checked again; what it reads of other rows stays as old as the snapshot. So a condition on other
//!   rows (the entries of a name) counts only if the locked row of the name is the version that the snapshot has: `xmin` is equal.
//!   Whatever adds an entry writes the row of its name, and so changes its `xmin`.
//!   <https://www.postgresql.org/docs/current/transaction-iso.html#XACT-READ-COMMITTED>
//! - Everything that ends a holding locks its row FOR UPDATE, which waits for no fence (FOR KEY SHARE) but skips the row. Everything
//!   else locks FOR NO KEY UPDATE, as UPDATE does, and passes fences.
//! - Rows are locked before the clock is read for what is written: `clock_timestamp()`, since `now()` is the start of the transaction.

use sqlx::postgres::{PgArguments, PgRow};
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Postgres, SqlSafeStr as _, SqlStr};

use super::{heartbeat, lease, queue};
use crate::protocol::timing::GRANT;
use crate::protocol::{Request, Response};

/// Microseconds since the Unix epoch.
macro_rules! now {
    () => {
        "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint"
    };
}
pub(super) use now;

/// [`GRANT`] in microseconds.
macro_rules! grant {
    () => {
        "3000000"
    };
}
pub(super) use grant;

const _: () = assert!(GRANT.as_micros() == 3_000_000, "grant!() says the same");

/// Makes a commit wait for no disk and no standby, in the statement's own transaction only. True.
/// <https://www.postgresql.org/docs/current/wal-async-commit.html>
macro_rules! commit_late {
    () => {
        "set_config('synchronous_commit', 'off', true) IS NOT NULL"
    };
}
pub(super) use commit_late;

/// Tells each `client` of `loser` that something was taken from it, once there is a row in `all_locked`. A client without a row gets
/// one: it may be about to register, and then waits for this. In one order, so that two that create the same rows do not deadlock.
macro_rules! notice {
    () => {
        "
    INSERT INTO sqlock_client AS c (id, beat_at, notice)
    SELECT loser.client, 0, 1 FROM loser, all_locked ORDER BY loser.client
        ON CONFLICT (id) DO UPDATE SET notice = c.notice + 1"
    };
}
pub(super) use notice;

/// What [`lease_row`](crate::backend::stored::lease_row) reads, of a row `l` and the heartbeat `c` of its client. A client without a
/// row has no heartbeat: `greatest` leaves NULL out.
macro_rules! lease_columns {
    () => {
        concat!(
            "l.id, l.owner, l.token, l.waiting, l.lost, greatest(l.expires_at, c.beat_at + l.ttl) - ",
            $crate::backend::postgres::store::now!(),
            " AS remaining"
        )
    };
}
pub(super) use lease_columns;

pub(super) type Query<'q> = sqlx::query::Query<'q, Postgres, PgArguments>;

/// How often a request is tried when a row has changed or was locked for a moment.
pub(super) const TRIES: usize = 3;

/// Whether statements need a transaction around them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transaction {
    None,
    /// With a commit that waits for the disk here, and on a synchronous standby.
    Durable,
    /// With a commit as the server has it, which waits for more than that.
    AsConfigured,
}

/// What the defaults of a server make necessary. A SET for the session would stay with a pooled connection, so each statement that
/// needs other settings is put into a transaction of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    transaction: Transaction,
    /// Nothing counts that only one server has, not even a release.
    is_synchronous: bool,
}

const SETTINGS: &str = "
SELECT current_setting('default_transaction_isolation'), current_setting('synchronous_commit'),
       current_setting('default_transaction_read_only')";

impl Settings {
    /// Reads the defaults. REPEATABLE READ would end most attempts on a busy name in an error, and an asynchronous commit would lose
    /// grants in a crash.
    pub(crate) async fn read(connection: &mut PgConnection, is_synchronous: bool) -> Result<Self, sqlx::Error> {
        let (isolation, commit, read_only): (String, String, String) =
            sqlx::query_as(SETTINGS).fetch_one(connection).await?;
        let waits = if is_synchronous { matches!(&*commit, "on" | "remote_apply") } else { commit != "off" };
        let transaction = if isolation == "read committed" && waits && read_only == "off" {
            Transaction::None
        } else if commit == "remote_apply" {
            Transaction::AsConfigured
        } else {
            Transaction::Durable
        };
        Ok(Self { transaction, is_synchronous })
    }
}

/// A connection with its settings.
pub(super) struct Session<'c> {
    connection: &'c mut PgConnection,
    settings: Settings,
}

impl Session<'_> {
    /// Carries out one statement.
    pub(super) async fn rows(&mut self, query: Query<'_>) -> Result<Vec<PgRow>, sqlx::Error> {
        let begin = match self.settings.transaction {
            Transaction::None => return query.fetch_all(&mut *self.connection).await,
            Transaction::Durable => {
                "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SET LOCAL synchronous_commit = on"
            }
            Transaction::AsConfigured => "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE",
        };
        self.connection.execute(begin).await?;
        let rows = query.fetch_all(&mut *self.connection).await;
        self.connection.execute(if rows.is_ok() { "COMMIT" } else { "ROLLBACK" }).await?;
        rows
    }

    /// Carries out a statement that has one row at most.
    pub(super) async fn row(&mut self, query: Query<'_>) -> Result<Option<PgRow>, sqlx::Error> {
        Ok(self.rows(query).await?.into_iter().next())
    }

    /// A statement that [commits late](commit_late), unless its commit must wait for a standby.
    pub(super) fn releasing(&self, sql: &'static str) -> SqlStr {
        if self.settings.is_synchronous {
            return AssertSqlSafe(sql.replace("'off'", "current_setting('synchronous_commit')")).into_sql_str();
        }
        SqlStr::from_static(sql)
    }
}

/// Carries out a request.
pub(crate) async fn execute(
    connection: &mut PgConnection,
    settings: Settings,
    request: &Request,
) -> Result<Response, sqlx::Error> {
    let session = &mut Session { connection, settings };
    Ok(match request {
        Request::Register { client } => Response::Registered(heartbeat::register(session, *client).await?),
        Request::Beat { client } => Response::Beat(heartbeat::beat(session, *client).await?),
        Request::Acquire(claim) => Response::Acquired(lease::acquire(session, claim).await?),
        Request::Join(claim) => Response::Joined(lease::join(session, claim).await?),
        Request::Enqueue(entries) => Response::Enqueued(queue::enqueue(session, entries).await?),
        Request::Release(release) => Response::Released(lease::release(session, release).await?),
        Request::Withdraw { name, id, except } => {
            Response::Withdrawn(lease::withdraw(session, name, *id, *except).await?)
        }
        Request::Poll { name, ids } => Response::Polled(queue::poll(session, name, ids).await?),
        Request::Read { name, limit } => Response::Read(queue::read(session, name, *limit).await?),
        Request::Transition(transition) => Response::Transitioned(queue::transition(session, transition).await?),
        Request::Extend(extension) => Response::Extended(lease::extend(session, extension).await?),
        Request::Downgrade { name, id, token } => {
            Response::Downgraded(lease::downgrade(session, name, *id, *token).await?)
        }
        Request::Raise { name, id, token, to } => {
            Response::Raised(lease::raise(session, name, *id, *token, *to).await?)
        }
        Request::Evict { name, token } => Response::Evicted(lease::evict(session, name, *token).await?),
    })
}
