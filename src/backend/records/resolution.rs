//! Unknown outcomes that an operator resolves. What was found out is kept in a table of its own, also when the record is deleted.

use sqlx::QueryBuilder;

use super::Records;
use super::attempt::forget;
use super::record::State;

/// What an operator has found out about the attempt with this token.
pub(crate) struct Resolving {
    pub(crate) id: String,
    pub(crate) token: i64,
    /// The result, if the request took effect.
    pub(crate) result: Option<Vec<u8>>,
    pub(crate) by: String,
    pub(crate) note: String,
}

impl Resolving {
    pub(crate) fn outcome(&self) -> &'static str {
        if self.result.is_some() { DONE } else { FAILED }
    }
}

/// The request took effect.
const DONE: &str = "done";

/// Nothing took effect.
const FAILED: &str = "failed";

/// A resolution as it stands in its table.
pub(crate) struct Resolved {
    pub(crate) token: i64,
    pub(crate) outcome: &'static str,
    pub(crate) by: String,
    pub(crate) note: String,
    /// Microseconds since the Unix epoch, by the database's clock.
    pub(crate) at: i64,
}

/// Ends a record whose outcome is unknown, and keeps who says so: in one transaction, which the caller begins.
pub(super) async fn resolve<DB: Records>(conn: &mut DB::Connection, resolving: &Resolving) -> Result<u64, sqlx::Error> {
    let Resolving { id, token, result, by, note } = resolving;
    let changed = match result {
        Some(result) => done::<DB>(conn, id, *token, result).await?,
        None => forget::<DB>(conn, id, &[State::Unknown], *token).await?,
    };
    if changed > 0 {
        let mut query = QueryBuilder::new(
            "INSERT INTO sqlock_idem_resolution (id, resolved_at, token, outcome, resolved_by, note) VALUES (",
        );
        DB::push_text(&mut query, id);
        query.push(", ").push(DB::NOW).push(", ");
        DB::push_integer(&mut query, *token);
        query.push(", '").push(resolving.outcome()).push("', ");
        DB::push_text(&mut query, by);
        query.push(", ");
        DB::push_text(&mut query, note);
        query.push(")");
        DB::execute(conn, &mut query).await?;
    }
    Ok(changed)
}

/// Until its end, a record has the time at which a result of its creation would expire: so the retention is known.
async fn done<DB: Records>(conn: &mut DB::Connection, id: &str, token: i64, result: &[u8]) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new("UPDATE sqlock_idem SET state = 'done', request = NULL, result = ");
    DB::push_bytes(&mut query, result);
    query.push(", expires_at = ").push(DB::NOW).push(" + expires_at - created_at WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(" AND state = 'unknown' AND token = ");
    DB::push_integer(&mut query, token);
    DB::execute(conn, &mut query).await
}

/// Reads how the outcomes of a key were resolved, in order.
pub(super) async fn list<DB: Records>(conn: &mut DB::Connection, id: &str) -> Result<Vec<Resolved>, sqlx::Error> {
    let mut query = QueryBuilder::new(
        "SELECT token, outcome, resolved_by, note, resolved_at FROM sqlock_idem_resolution WHERE id = ",
    );
    DB::push_text(&mut query, id);
    query.push(" ORDER BY resolved_at, token");
    let rows = DB::fetch(conn, &mut query).await?;
    rows.iter().map(resolved::<DB>).collect()
}

fn resolved<DB: Records>(row: &DB::Row) -> Result<Resolved, sqlx::Error> {
    let outcome = match DB::text(row, 1)?.as_str() {
        DONE => DONE,
        FAILED => FAILED,
        other => return Err(sqlx::Error::Decode(format!("{other:?} is no outcome of a request").into())),
    };
    Ok(Resolved {
        token: DB::integer(row, 0)?,
        outcome,
        by: DB::text(row, 2)?,
        note: DB::text(row, 3)?,
        at: DB::integer(row, 4)?,
    })
}
