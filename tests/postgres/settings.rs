//! Settings of the server and of the role, which the client's own sessions replace.
//!
//! Promises: 14.

use crate::support::{builder, connect, fresh};

/// A request is one statement at any default isolation level: a transaction of several commands
/// would keep rows of other clients locked while its client is stopped between two of them.
#[tokio::test]
async fn request_is_one_statement_at_any_default_isolation() {
    let db = fresh().await;
    let url = format!("{}%20-cdefault_transaction_isolation%3Dserializable", db.url);
    let pool = connect(&url, 1).await;
    let level: String = sqlx::query_scalar("SHOW transaction_isolation").fetch_one(&pool).await.expect("a level");
    assert_eq!(level, "serializable");
    let locks = builder(pool).build();
    let lease = locks.lease("a").acquire().await.expect("acquire");
    // The last statement of each idle session, apart from this one.
    let commits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ILIKE 'COMMIT%'";
    let commits: i64 = sqlx::query_scalar(commits).fetch_one(&connect(&db.url, 1).await).await.expect("sessions");
    assert_eq!(commits, 0);
    lease.release().await.expect("release");
}
