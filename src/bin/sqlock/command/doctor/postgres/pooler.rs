//! The check for a pooler in front of PostgreSQL.

use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{ConnectOptions, Connection, Error, PgConnection, Postgres};
use tokio::time::timeout;

use crate::command::doctor::probe::{CLOSE_TIMEOUT, POOLER_ROUNDS, TIMEOUT, first_cell, query};
use crate::command::doctor::report::Check;

/// The statements, formatted for readability.
#[rustfmt::skip]
mod sql {
pub(super) const SESSION: &str = "
SELECT pg_backend_pid(), coalesce((SELECT extract(epoch FROM clock_timestamp() - backend_start)
                                     FROM pg_stat_activity WHERE pid = pg_backend_pid()), 0)";
pub(super) const PID: &str = "SELECT pg_backend_pid()";
}

/// How long a pooler may take to answer while another connection is in a transaction. A pooler that
/// has no other session does not answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// Checks whether this connection has a session of its own, and receives notifications.
pub async fn check_pooler(
    conn: &mut PgConnection,
    options: &PgConnectOptions,
    is_standby: bool,
) -> Result<Check, Error> {
    let check = Check::new("pooler");
    let session = query::<Postgres>(conn, sql::SESSION).await?;
    let age: f64 = session.first().and_then(|row| row.get(1)).and_then(|age| age.parse().ok()).unwrap_or(0.0);
    if !has_own_session(conn, options, first_cell(&session)).await? {
        return Ok(check.warn(
            "a transaction pooler: each transaction runs in any free session of the server",
            "Leases work. Waiters poll up to 10 times a second instead of being notified, and session locks are refused: bypass \
             the pooler for both.",
        ));
    }
    // The earlier checks have taken less time than this limit.
    let check = match age > (TIMEOUT * 3).as_secs_f64() {
        true => check.warn(
            "a session pooler: the session is older than the connection",
            "Leases work. Session locks are refused: bypass the pooler for them.",
        ),
        false => check,
    };
    if is_standby {
        return Ok(check.or_ok("none"));
    }
    Ok(match receives_notifications(options).await {
        true => check.or_ok("none; LISTEN works"),
        false => check.warn(
            "notifications do not arrive (LISTEN, NOTIFY)",
            "Leases work. Waiters poll up to 10 times a second instead of being notified.",
        ),
    })
}

/// Returns whether this connection keeps its session while another connection is in a transaction:
/// a pooler would give it another session.
async fn has_own_session(conn: &mut PgConnection, options: &PgConnectOptions, pid: &str) -> Result<bool, Error> {
    let mut other = options.connect().await?;
    let mut is_direct = true;
    for _ in 0..POOLER_ROUNDS {
        let other_pid = query::<Postgres>(&mut other, "BEGIN; SELECT pg_backend_pid()").await?;
        let own_pid = timeout(ANSWER_TIMEOUT, query::<Postgres>(&mut *conn, sql::PID)).await;
        query::<Postgres>(&mut other, "ROLLBACK").await?;
        is_direct = first_cell(&other_pid) != pid && matches!(&own_pid, Ok(Ok(rows)) if first_cell(rows) == pid);
        if !is_direct {
            break;
        }
    }
    let _ = timeout(CLOSE_TIMEOUT, other.close()).await;
    Ok(is_direct)
}

/// Returns whether a notification arrives, on a channel of its own. The commit waits neither for
/// the disk nor for a standby.
async fn receives_notifications(options: &PgConnectOptions) -> bool {
    let heard = async {
        let one = PgPoolOptions::new().max_connections(1).connect_with(options.clone()).await?;
        let mut listener = PgListener::connect_with(&one).await?;
        let channel = format!("sqlock_doctor_{}", std::process::id());
        listener.listen(&channel).await?;
        sqlx::query("SELECT pg_notify($1, ''), set_config('synchronous_commit', 'off', true)")
            .bind(&channel)
            .execute(&mut listener)
            .await?;
        listener.recv().await?;
        Ok::<_, Error>(())
    };
    matches!(timeout(Duration::from_secs(2), heard).await, Ok(Ok(())))
}
