//! Lists records, in order of creation.

use sqlx::QueryBuilder;

use super::RecordDialect;
use super::record::{COLUMNS, Record, RecordState, decode};

/// The records to list.
#[derive(Clone, Default)]
pub(crate) struct Selection {
    pub(crate) namespace: Option<String>,
    /// Empty: all states.
    pub(crate) states: Vec<RecordState>,
    pub(crate) min_attempts: u32,
    /// Only records after this position.
    pub(crate) after: Option<Position>,
    pub(crate) limit: u32,
}

impl Selection {
    /// The states of a request that has not ended, or whose outcome is unknown.
    pub(crate) const UNFINISHED: [RecordState; 2] = [RecordState::Started, RecordState::Unknown];
}

/// The position of a record in the order: its creation time and its id.
pub(crate) type Position = (i64, String);

impl Record {
    pub(crate) fn position(&self) -> Position {
        (self.created_at, self.key.id.clone())
    }
}

/// Reads the records of each state with a statement of its own, because the index has the state
/// before the time.
pub(super) async fn list<DB: RecordDialect>(
    conn: &mut DB::Connection,
    selection: &Selection,
) -> Result<Vec<Record>, sqlx::Error> {
    let states = if selection.states.is_empty() { &RecordState::ALL[..] } else { &selection.states };
    let mut records = Vec::new();
    for state in states {
        let mut query = QueryBuilder::new("");
        push_select::<DB>(&mut query, selection, *state);
        for row in &DB::fetch(conn, &mut query).await? {
            records.push(decode::<DB>(row)?);
        }
    }
    records.sort_by_cached_key(Record::position);
    records.truncate(selection.limit as usize);
    Ok(records)
}

fn push_select<DB: RecordDialect>(query: &mut QueryBuilder<DB>, selection: &Selection, state: RecordState) {
    let Selection { namespace, min_attempts, after, limit, .. } = selection;
    // The results are left out, because they may be long.
    query.push("SELECT ").push(COLUMNS.replace(" result,", " NULL,")).push(DB::NOW);
    query.push(" FROM sqlock_idem WHERE state = '").push(state.as_str()).push("'");
    if let Some((created_at, id)) = after {
        query.push(" AND created_at >= ");
        DB::push_integer(query, *created_at);
        query.push(" AND (created_at > ");
        DB::push_integer(query, *created_at);
        query.push(" OR id > ");
        DB::push_text(query, id);
        query.push(")");
    }
    if let Some(namespace) = namespace {
        query.push(" AND namespace = ");
        DB::push_text(query, namespace);
        if DB::IGNORES_TRAILING_SPACES {
            query.push(" AND LENGTH(namespace) = ").push(namespace.len());
        }
    }
    if *min_attempts > 0 {
        query.push(" AND attempts >= ").push(min_attempts);
    }
    query.push(" ORDER BY created_at, id LIMIT ").push(limit);
}

#[cfg(all(test, feature = "sqlite"))]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use sqlx::{Connection as _, Executor as _, Row as _, Sqlite, SqliteConnection};

    use super::*;

    /// The plans without statistics, as in most databases. `tests/conformance/idempotency.rs`
    /// checks the plans of the servers.
    #[tokio::test]
    async fn list_of_a_state_uses_the_index() {
        let mut conn = SqliteConnection::connect("sqlite::memory:").await.expect("connect");
        conn.execute(include_str!("../../../migrations/sqlite/0002_idem.sql")).await.expect("tables");
        for after in [None, Some((17, "id".to_owned()))] {
            let namespace = Some("payments".to_owned());
            let selection = Selection { namespace, min_attempts: 3, after, limit: 10, ..Selection::default() };
            let mut query = QueryBuilder::<Sqlite>::new("EXPLAIN QUERY PLAN ");
            push_select::<Sqlite>(&mut query, &selection, RecordState::Unknown);
            let plan = query.build().fetch_all(&mut conn).await.expect("a plan");
            let plan: Vec<String> = plan.iter().map(|row| row.get("detail")).collect();
            assert_eq!(plan.len(), 1, "{plan:?}");
            assert!(plan[0].starts_with("SEARCH sqlock_idem USING INDEX sqlock_idem_by_state (state=?"), "{plan:?}");
        }
    }
}
