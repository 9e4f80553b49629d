//! The results of steps.

use sqlx::QueryBuilder;

use super::{RecordDialect, fetch_texts};

/// The primary key of a step.
#[derive(Clone)]
pub(crate) struct Step {
    pub(crate) id: String,
    /// The creation time of the record.
    pub(crate) begun: i64,
    pub(crate) name: String,
}

/// Stores the result of a step, if the attempt with this token is the latest. A stored result is
/// not changed.
pub(crate) async fn store_step<DB: RecordDialect>(
    conn: &mut DB::Connection,
    step: &Step,
    token: i64,
    result: &[u8],
) -> Result<u64, sqlx::Error> {
    let mut query = QueryBuilder::new(DB::INSERT_NEW.0);
    query.push("sqlock_idem_step (id, begun, step, result) SELECT id, created_at, ");
    DB::push_step(&mut query, &step.name);
    query.push(", ");
    DB::push_bytes(&mut query, result);
    query.push(" FROM sqlock_idem WHERE id = ");
    DB::push_text(&mut query, &step.id);
    query.push(" AND state = 'started' AND token = ");
    DB::push_integer(&mut query, token);
    query.push(" AND created_at = ");
    DB::push_integer(&mut query, step.begun);
    query.push(DB::INSERT_NEW.1);
    DB::execute(conn, &mut query).await
}

/// Reads the result of a step.
pub(super) async fn read_step<DB: RecordDialect>(
    conn: &mut DB::Connection,
    step: &Step,
) -> Result<Option<Vec<u8>>, sqlx::Error> {
    let mut query = QueryBuilder::new("SELECT result FROM sqlock_idem_step WHERE id = ");
    DB::push_text(&mut query, &step.id);
    query.push(" AND begun = ");
    DB::push_integer(&mut query, step.begun);
    query.push(" AND step = ");
    DB::push_step(&mut query, &step.name);
    let rows = DB::fetch(conn, &mut query).await?;
    rows.first().map_or(Ok(None), |row| DB::read_bytes(row, 0))
}

/// Reads the names of the steps of a record.
pub(super) async fn list_steps<DB: RecordDialect>(
    conn: &mut DB::Connection,
    id: &str,
    begun: i64,
) -> Result<Vec<String>, sqlx::Error> {
    let mut query = QueryBuilder::new("SELECT ");
    query.push(DB::STEP_COLUMN).push(" FROM sqlock_idem_step WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(" AND begun = ");
    DB::push_integer(&mut query, begun);
    query.push(" ORDER BY step");
    fetch_texts::<DB>(conn, &mut query).await
}
