//! MySQL Group Replication: a member grants leases while it is the only writer of its group.

use sqlock::Error;
use sqlock::database::AccessError;
use sqlx::{AssertSqlSafe, MySqlPool};

use super::server::Server;
use super::{on, unavailable, until};

async fn pool(server: &Server) -> MySqlPool {
    MySqlPool::connect(&server.url()).await.expect("a connection")
}

async fn execute(pool: &MySqlPool, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(pool).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
}

/// The first member of a group, once it accepts writes.
async fn member(single_primary: bool) -> (Server, MySqlPool) {
    let mode = if single_primary { "ON" } else { "OFF" };
    let server = Server::group_member(&[&format!("--group-replication-single-primary-mode={mode}")]);
    let pool = pool(&server).await;
    let online = "SELECT COUNT(*) FROM performance_schema.replication_group_members
                   WHERE MEMBER_STATE = 'ONLINE' AND NOT @@GLOBAL.super_read_only";
    until("the member is online", async || sqlx::query_scalar(online).fetch_one(&pool).await.ok() == Some(1_i64)).await;
    (server, pool)
}

/// Returns the error about a member with the wrong settings.
#[track_caller]
fn refused<T>(outcome: Result<T, Error>) -> String {
    match outcome {
        Err(error @ Error::Access { cause: AccessError::Setup, .. }) => {
            assert!(!error.is_retryable());
            error.report().to_string()
        }
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("it was accepted"),
    }
}

#[tokio::test]
async fn single_primary_member_grants_only_while_online() {
    let (server, pool) = member(true).await;
    let locks = on(&server.url()).connect().await.expect("it is the primary");
    locks.migrate().await.expect("migrate");
    let lease = locks.lease("a").acquire().await.expect("acquired");
    let mut tx = pool.begin().await.expect("a transaction");
    lease.fence(&mut tx).await.expect("held");
    tx.commit().await.expect("committed");
    lease.release().await.expect("held");

    let limited = server.url().replace("root@", "app@");
    execute(&pool, "CREATE USER app@'127.0.0.1'; GRANT ALL ON test.* TO app@'127.0.0.1'").await;
    let reason = refused(on(&limited).connect().await);
    assert!(reason.contains("GRANT SELECT ON performance_schema.replication_group_members"), "{reason}");
    let session = on(&limited).build().session("a").try_acquire().await;
    assert!(matches!(session, Err(Error::Unsupported { .. })), "{session:?}");
    execute(&pool, "GRANT SELECT ON performance_schema.replication_group_members TO app@'127.0.0.1'").await;
    on(&limited).connect().await.expect("it may read the state");

    // An operator lets it be written although the group does not get the writes.
    execute(&pool, "STOP GROUP_REPLICATION").await;
    execute(&pool, "SET GLOBAL super_read_only = 0; SET GLOBAL read_only = 0").await;
    let reason = unavailable(on(&server.url()).connect().await);
    assert!(reason.contains("OFFLINE in its replication group"), "{reason}");
}

#[tokio::test]
async fn multi_primary_member_is_refused() {
    let (server, _pool) = member(false).await;
    let reason = refused(on(&server.url()).connect().await);
    assert!(reason.contains("multi-primary mode") && reason.contains("single-primary"), "{reason}");
    refused(on(&server.url()).build().lease("a").try_acquire().await);
}
