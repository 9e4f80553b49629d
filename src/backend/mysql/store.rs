//! Carries out requests on one connection to MySQL or MariaDB.
//!
//! Most requests are single statements in autocommit mode. LAST_INSERT_ID returns why a statement
//! changed nothing: the OK packet of an UPDATE carries the latest value of
//! LAST_INSERT_ID(expression), also when its WHERE clause matched no row. Rare requests are a
//! [`Script`](super::script::Script) of several statements, which goes to the server as one text
//! where that is safe.
//!
//! The kind of the statement decides which reads lock rows. At READ COMMITTED the subqueries of a
//! one-table UPDATE, of an INSERT … SELECT and of a SELECT are consistent reads. Those of a DELETE
//! and of an UPDATE of several tables lock the rows that they read, and wait for them; in such
//! statements here, every subquery has its own locking clause, or reads rows that other clients
//! lock only for a moment.

use sqlx::mysql::{MySqlArguments, MySqlDatabaseError};
use sqlx::query::Query;
use sqlx::{MySql, MySqlConnection};

use super::script::Sending;
use super::{acquire, change, heartbeat, queue, release, transition};
use crate::protocol::timing::GRANT_TTL;
use crate::protocol::{Request, Response};
use crate::token::FencingToken;

pub(super) type MySqlQuery<'q> = Query<'q, MySql, MySqlArguments>;

/// The two kinds of server, which differ in some statements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavor {
    MySql,
    MariaDb,
}

/// Microseconds since the epoch; the session's time zone is UTC. SYSDATE is evaluated when the row
/// is locked, NOW when the statement begins.
/// <https://dev.mysql.com/doc/refman/8.4/en/date-and-time-functions.html#function_sysdate>
macro_rules! now {
    () => {
        "CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)"
    };
}

/// [`GRANT_TTL`] in microseconds.
macro_rules! grant {
    () => {
        "3000000"
    };
}

const _: () = assert!(GRANT_TTL.as_micros() == 3_000_000, "grant! says the same");

/// When a row of `sqlock_lease` expires: at its `expires_at`, or one TTL after the last heartbeat
/// of its client, whichever is later.
#[rustfmt::skip]
macro_rules! lease_until {
    ($row:literal) => {
        concat!("GREATEST(", $row, ".expires_at, COALESCE((SELECT b.beat_at FROM sqlock_client AS b WHERE b.id = ", $row, ".client)
                 + ", $row, ".ttl, 0))")
    };
}

/// The same for a row of `sqlock_entry`.
#[rustfmt::skip]
macro_rules! entry_until {
    ($row:literal) => {
        concat!("GREATEST(", $row, ".expires_at, COALESCE((SELECT b.beat_at FROM sqlock_client AS b WHERE b.id = ", $row, ".client)
                 + IF(", $row, ".token = 0, ", grant!(), ", ", $row, ".ttl), 0))")
    };
}

/// Whether an entry waits for the name of a row. The subquery depends on the row, so its snapshot
/// is normally opened after the row is locked. Only if the statement had to wait for the row may
/// the snapshot be older: an entry added meanwhile is then missed, and its client reads the row
/// itself (`READ_ROW_AFTER_INSERT`).
#[rustfmt::skip]
macro_rules! is_awaited {
    ($row:literal) => {
        concat!("EXISTS (SELECT 1 FROM sqlock_entry AS w FORCE INDEX (sqlock_entry_in_order)
                          WHERE w.name = ", $row, ".name AND w.token = 0)")
    };
}

/// Whether one lease of one client holds the name.
macro_rules! is_held_alone {
    ($row:literal) => {
        concat!($row, ".id NOT IN ('', 'kept', 'entries')")
    };
}

/// The columns of [`read_lease`](crate::backend::stored::read_lease).
#[rustfmt::skip]
macro_rules! lease_columns {
    ($row:literal) => {
        concat!($row, ".id, ", $row, ".owner, ", $row, ".client, ", $row, ".token, ",
                lease_until!($row), " - ", now!(), " AS remaining,
       0 AS waiting, ", $row, ".lost, ", $row, ".asked")
    };
}

/// A statement that never waits for a locked row, in the syntax of each server. MariaDB can limit
/// the wait of a statement. On MySQL, a subquery locks the row; it is evaluated first, because it
/// provides the key.
pub(super) struct Nowait {
    pub(super) mysql: &'static str,
    pub(super) mariadb: &'static str,
}

impl Nowait {
    pub(super) fn sql(&self, flavor: Flavor) -> &'static str {
        match flavor {
            Flavor::MySql => self.mysql,
            Flavor::MariaDb => self.mariadb,
        }
    }
}

/// A [`Nowait`] of a row `l` of `sqlock_lease`. Bind order: parameters of `set`, name, parameters
/// of `condition`.
#[rustfmt::skip]
macro_rules! update_lease {
    (set: [$($set:tt)*], condition: [$($condition:tt)*]) => {
        $crate::backend::mysql::store::Nowait {
            mysql: concat!("UPDATE sqlock_lease AS l SET ", $($set)*, "
 WHERE l.name = (SELECT q.name FROM (SELECT s.name FROM sqlock_lease AS s WHERE s.name = ? LIMIT 1 FOR UPDATE NOWAIT) AS q)
   AND ", $($condition)*),
            mariadb: concat!("SET STATEMENT innodb_lock_wait_timeout = 0 FOR
UPDATE sqlock_lease AS l SET ", $($set)*, "
 WHERE l.name = ?
   AND ", $($condition)*),
        }
    };
}

/// A [`Nowait`] of a row `e` of `sqlock_entry`. Bind order: parameters of `set`, name, name, two
/// ids, of which one may exist, parameters of `condition`.
#[rustfmt::skip]
macro_rules! update_entry {
    (set: [$($set:tt)*], condition: [$($condition:tt)*]) => {
        $crate::backend::mysql::store::Nowait {
            mysql: concat!("UPDATE sqlock_entry AS e SET ", $($set)*, "
 WHERE e.name = ?
   AND e.id = (SELECT q.id FROM (SELECT s.id FROM sqlock_entry AS s FORCE INDEX (PRIMARY)
                                  WHERE s.name = ? AND s.id IN (?, ?) LIMIT 1 FOR UPDATE NOWAIT) AS q)
   AND ", $($condition)*),
            mariadb: concat!("SET STATEMENT innodb_lock_wait_timeout = 0 FOR
UPDATE sqlock_entry AS e FORCE INDEX (PRIMARY) SET ", $($set)*, "
 WHERE e.name = ? AND e.name = ? AND e.id IN (?, ?)
   AND ", $($condition)*),
        }
    };
}

/// The result of a [`Nowait`], with the value of LAST_INSERT_ID. Zero: the row does not exist.
pub(super) enum Attempt {
    Done(u64),
    Refused(u64),
    Locked,
}

/// Runs a [`Nowait`].
pub(super) async fn attempt(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    query: MySqlQuery<'_>,
) -> Result<Attempt, sqlx::Error> {
    match query.execute(conn).await {
        Ok(done) if done.rows_affected() > 0 => Ok(Attempt::Done(done.last_insert_id())),
        Ok(done) => Ok(Attempt::Refused(done.last_insert_id())),
        Err(error) if is_locked(flavor, &error) => Ok(Attempt::Locked),
        Err(error) => Err(error),
    }
}

/// Returns the number of a server error.
pub(super) fn number(error: &sqlx::Error) -> Option<u16> {
    let error = error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>()?;
    Some(error.number())
}

/// Returns whether a [`Nowait`] found the row locked.
pub(super) fn is_locked(flavor: Flavor, error: &sqlx::Error) -> bool {
    let refusal = match flavor {
        Flavor::MySql => 3572,
        Flavor::MariaDb => 1205,
    };
    number(error) == Some(refusal)
}

/// Returns whether a statement failed with a lock wait timeout.
pub(super) fn is_timeout(error: &sqlx::Error) -> bool {
    number(error) == Some(1205)
}

/// The columns of an entry that an INSERT names, in the order of the selected values.
macro_rules! entry_columns {
    () => {
        "name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at, acquired_at, holder, label"
    };
}

/// Reads a token from LAST_INSERT_ID.
pub(super) fn token(insert_id: u64) -> Result<FencingToken, sqlx::Error> {
    let token = i64::try_from(insert_id).ok().and_then(FencingToken::new);
    token.ok_or_else(|| sqlx::Error::Protocol(format!("invalid token {insert_id}")))
}

/// Carries out a request.
///
/// An error leaves no transaction open. A dropped future may leave one: the connection must be
/// closed.
pub(crate) async fn execute(
    conn: &mut MySqlConnection,
    flavor: Flavor,
    sending: Sending,
    request: &Request,
) -> Result<Response, sqlx::Error> {
    match request {
        Request::Register { client } => heartbeat::register(conn, *client).await.map(Response::Registered),
        Request::Beat { client } => heartbeat::beat(conn, *client).await.map(Response::Beat),
        Request::Acquire(claim) => acquire::acquire(conn, sending, claim).await.map(Response::Acquired),
        Request::Join(claim) => acquire::join(conn, sending, claim).await.map(Response::Joined),
        Request::Enqueue(entries) => queue::enqueue(conn, entries).await.map(Response::Enqueued),
        Request::Release(request) => release::release(conn, flavor, request).await.map(Response::Released),
        Request::Withdraw { name, id, except } => {
            release::withdraw(conn, sending, name, *id, *except).await.map(Response::Withdrawn)
        }
        Request::Poll { name, ids } => queue::poll(conn, name, ids).await.map(Response::Polled),
        Request::Read { name, limit } => queue::read(conn, name, *limit).await.map(Response::Read),
        Request::Transition(transition) => {
            transition::transition(conn, sending, transition).await.map(Response::Transitioned)
        }
        Request::Extend(extension) => change::extend(conn, flavor, sending, extension).await.map(Response::Extended),
        Request::Downgrade { name, id, token } => {
            change::downgrade(conn, sending, name, *id, *token).await.map(Response::Downgraded)
        }
        Request::Raise { name, id, token, to } => {
            change::raise(conn, flavor, name, *id, *token, *to).await.map(Response::Raised)
        }
        Request::Evict { name, token } => release::evict(conn, sending, name, *token).await.map(Response::Evicted),
        Request::Ask { name } => change::ask(conn, sending, name).await.map(Response::Asked),
    }
}
