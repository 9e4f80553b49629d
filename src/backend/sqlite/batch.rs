//! Carries out requests about several names in one transaction. Each has the same effect as alone,
//! or none.

use sqlx::{Executor as _, SqliteConnection};

use super::acquire::bind_claim;
use super::queue::poll;
use super::store::OpenTransaction;
use crate::backend::stored::TableRow as _;
use crate::backend::token;
use crate::name::LockName;
use crate::protocol::{Batch, LeaseId, Release, Released, Response};

// A name without holder and waiter. $1 name, $2 id, $3 owner, $4 client, $5 ttl, $6 holder, $7
// label.
#[rustfmt::skip]
const ACQUIRE: &str = concat!(grant_vacant!(), "
RETURNING token");

const RELEASE: &str = free_unawaited!();

/// Carries out the requests of a batch. `None`: the request changed nothing.
///
/// # Cancel safety
///
/// A dropped batch takes effect completely or not at all.
pub(super) async fn execute(conn: &mut SqliteConnection, batch: &Batch) -> Result<Vec<Option<Response>>, sqlx::Error> {
    if let Batch::Poll(polls) = batch {
        return poll_many(conn, polls).await;
    }
    let open = OpenTransaction::new(conn);
    let answers = transaction(open.conn, batch).await;
    open.finish(answers).await
}

async fn transaction(conn: &mut SqliteConnection, batch: &Batch) -> Result<Vec<Option<Response>>, sqlx::Error> {
    conn.execute("BEGIN IMMEDIATE").await?;
    let mut answers = Vec::new();
    match batch {
        Batch::Acquire(claims) => {
            for claim in claims {
                let row = bind_claim(ACQUIRE, claim).fetch_optional(&mut *conn).await?;
                let token = row.map(|row| row.number("token")).transpose()?.and_then(token);
                answers.push(token.map(|token| Response::Acquired(Ok(token))));
            }
        }
        Batch::Release(releases) => {
            for Release { name, id, token, .. } in releases {
                let query = sqlx::query(RELEASE).bind(name.as_str()).bind(id.to_string()).bind(token.get());
                let is_ended = query.execute(&mut *conn).await?.rows_affected() > 0;
                answers.push(is_ended.then_some(Response::Released(Released::Ended { awaited: false })));
            }
        }
        // Needs no transaction.
        Batch::Poll(_) => {}
    }
    conn.execute("COMMIT").await?;
    Ok(answers)
}

/// Polls one name after the other. A transaction would save nothing.
async fn poll_many(
    conn: &mut SqliteConnection,
    polls: &[(LockName, LeaseId)],
) -> Result<Vec<Option<Response>>, sqlx::Error> {
    let mut answers = Vec::with_capacity(polls.len());
    for (name, id) in polls {
        answers.push(Some(Response::Polled(poll(conn, name, &[*id]).await?)));
    }
    Ok(answers)
}
