//! Settings of the server and of the role, which the client's own sessions replace.
//!
//! Promises: 14.

use uuid::Uuid;

use crate::support::{builder, connect, fresh};

/// A request is one statement at any default isolation level: a transaction of several commands
/// would keep rows of other clients locked while its client is stopped between two of them.
#[tokio::test]
async fn request_is_one_statement_at_any_default_isolation() {
    let db = fresh().await;
    let mark = Uuid::new_v4();
    let url = format!("{}%20-cdefault_transaction_isolation%3Dserializable&application_name={mark}", db.url);
    let pool = connect(&url, 1).await;
    let level: String = sqlx::query_scalar("SHOW transaction_isolation").fetch_one(&pool).await.expect("a level");
    assert_eq!(level, "serializable");
    let locks = builder(pool).build();
    let lease = locks.lease("a").acquire().await.expect("acquire");
    // The last statement of each session: this pool has one, the client has others.
    let last: Vec<String> = sqlx::query_scalar("SELECT query FROM pg_stat_activity WHERE application_name = $1::text")
        .bind(mark)
        .fetch_all(&connect(&db.url, 1).await)
        .await
        .expect("sessions");
    assert!(last.len() > 1, "{last:?}");
    assert!(!last.iter().any(|query| query.starts_with("COMMIT")), "{last:?}");
    lease.release().await.expect("release");
}
