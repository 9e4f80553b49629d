//! Requests that attempts store with their records, for the attempts that take them up.

use sqlx::QueryBuilder;

use super::Records;
use super::claim::Claiming;
use super::record::State;

/// The request of a new record. Only an attempt is ever taken up.
pub(super) fn push<DB: Records>(query: &mut QueryBuilder<DB>, claim: &Claiming, state: State) {
    match claim.request.as_ref().filter(|_| state == State::Started) {
        Some(request) => DB::push_bytes(query, request),
        None => {
            query.push("NULL");
        }
    }
}

/// Reads the stored request of a record.
pub(super) async fn read<DB: Records>(
    conn: &mut DB::Connection,
    id: &str,
    begun: i64,
) -> Result<Option<Vec<u8>>, sqlx::Error> {
    let mut query = QueryBuilder::new("SELECT request FROM sqlock_idem WHERE id = ");
    DB::push_text(&mut query, id);
    query.push(" AND created_at = ");
    DB::push_integer(&mut query, begun);
    let rows = DB::fetch(conn, &mut query).await?;
    rows.first().map_or(Ok(None), |row| DB::bytes(row, 0))
}
