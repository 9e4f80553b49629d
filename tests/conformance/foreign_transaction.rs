//! Transactions of another kind of database than the client's. The suite of SQLite opens one on
//! PostgreSQL and the others open one on SQLite, so these tests need both features.

use std::sync::atomic::{AtomicU32, Ordering};

use sqlock::Error;
use sqlock::lease::FenceError;
use sqlock::row::RowError;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::DATABASE;
use crate::support::{Database, fresh, soon};

#[tokio::test]
async fn row_lock_in_foreign_transaction_is_refused() {
    let locks = fresh().await.locks().await;
    let refused = if DATABASE == Database::Sqlite {
        let pool = sqlx::PgPool::connect_lazy(&postgres_that_only_begins().await).expect("a URL");
        let mut tx = soon("the transaction", pool.begin()).await.expect("begin");
        locks.row("a").lock(&mut tx).await
    } else {
        let pool = sqlx::SqlitePool::connect("sqlite::memory:").await.expect("a database in memory");
        let mut tx = pool.begin().await.expect("begin");
        locks.row("a").lock(&mut tx).await
    };
    let error = refused.expect_err("the transaction is of another kind of database");
    assert!(matches!(error, Error::Row { cause: RowError::OtherDatabase, .. }), "{error}");
}

#[tokio::test]
async fn fence_of_foreign_transaction_is_refused() {
    let db = fresh().await;
    let lease = db.locks().await.lease("a").acquire().await.expect("acquire");
    let refused = if DATABASE == Database::Sqlite {
        let pool = sqlx::PgPool::connect_lazy(&postgres_that_only_begins().await).expect("a URL");
        let mut tx = soon("the transaction", pool.begin()).await.expect("begin");
        lease.fence(&mut tx).await
    } else {
        let pool = sqlx::SqlitePool::connect("sqlite::memory:").await.expect("a database in memory");
        let mut tx = pool.begin().await.expect("begin");
        lease.fence(&mut tx).await
    };
    let error = refused.expect_err("the transaction is of another kind of database");
    assert!(matches!(error, Error::Fence { cause: FenceError::OtherDatabase, .. }), "{error}");
    assert!(lease.is_held());
}

/// Starts a stand-in for PostgreSQL that accepts connections and transactions, and returns its URL.
async fn postgres_that_only_begins() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("the port").port();
    tokio::spawn(async move {
        let (mut client, _) = listener.accept().await.expect("a client");
        let mut buffer = [0; 4096];
        let mut greeting = true;
        while client.read(&mut buffer).await.is_ok_and(|length| length > 0) {
            // AuthenticationOk or CommandComplete, then ReadyForQuery.
            let answer: &[u8] =
                if greeting { b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I" } else { b"C\0\0\0\x0aBEGIN\0Z\0\0\0\x05T" };
            greeting = false;
            if client.write_all(answer).await.is_err() {
                return;
            }
        }
    });
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let user = SERIAL.fetch_add(1, Ordering::Relaxed);
    format!("postgres://u{user}@127.0.0.1:{port}/x?sslmode=disable")
}
