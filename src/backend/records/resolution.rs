//! Outcomes that an operator resolves: unknown ones, and those of attempts that have died. A
//! resolution stays in a table of its own when the record is deleted.

use sqlx::QueryBuilder;

use super::RecordDialect;
use super::attempt::{forget, push_if_unfinished};

/// A request to resolve the outcome of the attempt with this token.
pub(crate) struct ResolveRequest {
    pub(crate) id: String,
    pub(crate) token: i64,
    /// The result, if the request took effect.
    pub(crate) result: Option<Vec<u8>>,
    pub(crate) by: String,
    pub(crate) note: String,
}

impl ResolveRequest {
    pub(crate) fn outcome(&self) -> &'static str {
        if self.result.is_some() { DONE } else { FAILED }
    }
}

/// The request took effect.
const DONE: &str = "done";

/// Nothing took effect.
const FAILED: &str = "failed";

/// A resolution as it is stored.
pub(crate) struct StoredResolution {
    pub(crate) token: i64,
    pub(crate) outcome: &'static str,
    pub(crate) by: String,
    pub(crate) note: String,
    /// Microseconds since the Unix epoch, by the database's clock.
    pub(crate) at: i64,
}

/// Ends a record that has no outcome, or an unknown one, and stores the resolution. The caller
/// begins and commits the transaction of these statements.
pub(super) async fn resolve<DB: RecordDialect>(
    conn: &mut DB::Connection,
    request: &ResolveRequest,
) -> Result<u64, sqlx::Error> {
    let ResolveRequest { id, token, result, by, note } = request;
    let changed = match result {
        Some(result) => store_result::<DB>(conn, id, *token, result).await?,
        None => forget::<DB>(conn, id, *token).await?,
    };
    if changed > 0 {
        let mut query = QueryBuilder::new(
            "INSERT INTO sqlock_idem_resolution (id, resolved_at, token, outcome, resolved_by, note) VALUES (",
        );
        DB::push_text(&mut query, id);
        query.push(", ").push(DB::NOW).push(", ");
        DB::push_integer(&mut query, *token);
        query.push(", '").push(request.outcome()).push("', ");
        DB::push_text(&mut query, by);
        query.push(", ");
        DB::push_text(&mut query, note);
        query.push(")");
        DB::execute(conn, &mut query).await?;
    }
    Ok(changed)
}

/// Stores the result of a request that took effect. Until its end, the expiry of a record is its
/// creation time and the retention, so their difference is the retention.
async fn store_result<DB: RecordDialect>(
    conn: &mut DB::Connection,
    id: &str,
    token: i64,
    result: &[u8],
) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET state = 'done', request = NULL, result = ");
    DB::push_bytes(&mut query, result);
    query.push(", expires_at = ").push(DB::NOW).push(" + expires_at - created_at");
    push_if_unfinished(&mut query, id, token);
    DB::execute(conn, &mut query).await
}

/// Reads the resolutions of a key, the oldest first.
pub(super) async fn list<DB: RecordDialect>(
    conn: &mut DB::Connection,
    id: &str,
) -> Result<Vec<StoredResolution>, sqlx::Error> {
    let mut query = QueryBuilder::new(
        "SELECT token, outcome, resolved_by, note, resolved_at FROM sqlock_idem_resolution WHERE id = ",
    );
    DB::push_text(&mut query, id);
    query.push(" ORDER BY resolved_at, token");
    let rows = DB::fetch(conn, &mut query).await?;
    rows.iter().map(decode::<DB>).collect()
}

fn decode<DB: RecordDialect>(row: &DB::Row) -> Result<StoredResolution, sqlx::Error> {
    let outcome = match DB::read_text(row, 1)?.as_str() {
        DONE => DONE,
        FAILED => FAILED,
        other => return Err(sqlx::Error::Decode(format!("{other:?} is not an outcome of a request").into())),
    };
    Ok(StoredResolution {
        token: DB::integer(row, 0)?,
        outcome,
        by: DB::read_text(row, 2)?,
        note: DB::read_text(row, 3)?,
        at: DB::integer(row, 4)?,
    })
}
