//! Requests that attempts store with their records, for attempts that resume them.

use sqlx::QueryBuilder;

use super::RecordDialect;
use super::claim::ClaimRequest;
use super::record::RecordState;

/// Adds the stored request of a new record, or NULL. Only attempts are resumed.
pub(super) fn push<DB: RecordDialect>(query: &mut QueryBuilder<DB>, claim: &ClaimRequest, state: RecordState) {
    match claim.request.as_ref().filter(|_| state == RecordState::Started) {
        Some(request) => DB::push_bytes(query, request),
        None => {
            query.push("NULL");
        }
    }
}

/// Reads the stored request of a record.
pub(super) async fn read<DB: RecordDialect>(
    conn: &mut DB::Connection,
    id: &str,
    begun: i64,
) -> Result<Option<Vec<u8>>, sqlx::Error> {
    let mut query = QueryBuilder::new("SELECT request FROM sqlock_idem WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(" AND created_at = ");
    DB::push_integer(&mut query, begun);
    let rows = DB::fetch(conn, &mut query).await?;
    rows.first().map_or(Ok(None), |row| DB::read_bytes(row, 0))
}
