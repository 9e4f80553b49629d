//! Row locks on tables that consist of several.

use sqlock::row::RowError;
use sqlock::{Error, Locks};
use sqlx::{AssertSqlSafe, PgPool, Row as _};

use crate::support::{TestDatabase, connect, fresh};

async fn tables(statements: &[&'static str]) -> (TestDatabase, PgPool, Locks) {
    let db = fresh().await;
    let pool = connect(&db.url, 4).await;
    for sql in statements {
        sqlx::raw_sql(*sql).execute(&pool).await.expect(sql);
    }
    let locks = db.locks().await;
    (db, pool, locks)
}

/// The ids that another session could lock.
async fn free(pool: &PgPool, table: &str) -> Vec<i64> {
    let mut tx = pool.begin().await.expect("begin");
    let sql = AssertSqlSafe(format!("SELECT id FROM {table} FOR UPDATE SKIP LOCKED"));
    let rows = sqlx::query(sql).fetch_all(&mut *tx).await.expect("rows");
    tx.rollback().await.expect("rollback");
    let mut ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    ids.sort_unstable();
    ids
}

#[tokio::test]
async fn row_of_a_partitioned_table_is_locked() {
    let (_db, pool, locks) = tables(&[
        "CREATE TABLE seat (id BIGINT PRIMARY KEY, day INT NOT NULL) PARTITION BY RANGE (id)",
        "CREATE TABLE seat_low PARTITION OF seat FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE seat_high PARTITION OF seat FOR VALUES FROM (10) TO (20)",
        "INSERT INTO seat SELECT id, 1 FROM generate_series(8, 12) AS id",
        "CREATE TABLE daily (id BIGINT NOT NULL, day INT NOT NULL, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
    ])
    .await;
    let mut tx = pool.begin().await.expect("begin");
    locks.row_of("seat", "id", 9_i64).lock(&mut tx).await.expect("lock");
    assert_eq!(free(&pool, "seat").await, [8, 10, 11, 12]);
    let found: Vec<i64> = locks.rows_of("seat", "id", [11_i64, 8, 99]).lock(&mut tx).await.expect("lock");
    assert_eq!(found, [8, 11]);
    assert_eq!(free(&pool, "seat").await, [10, 12]);
    // By the name of a partition, too.
    locks.row_of("seat_high", "id", 12_i64).lock(&mut tx).await.expect("lock");
    assert_eq!(free(&pool, "seat").await, [10]);
    let mut rival = pool.begin().await.expect("begin");
    assert!(!locks.row_of("seat", "id", 12_i64).try_lock(&mut rival).await.expect("try"));
    // The key of partitions by another column is not unique by itself.
    let error = locks.row_of("daily", "id", 9_i64).lock(&mut tx).await.expect_err("not unique");
    assert!(matches!(error, Error::Row { cause: RowError::NotUnique { .. }, .. }), "{error}");
}

/// The index of the parent does not keep a child from having the same key.
#[tokio::test]
async fn row_of_an_inherited_table_is_refused() {
    let (_db, pool, locks) = tables(&[
        "CREATE TABLE account (id BIGINT PRIMARY KEY)",
        "CREATE TABLE savings (PRIMARY KEY (id)) INHERITS (account)",
        "INSERT INTO account VALUES (1), (2)",
        "INSERT INTO savings VALUES (2), (3)",
    ])
    .await;
    for _ in 0..2 {
        let mut tx = pool.begin().await.expect("begin");
        let error = locks.row_of("account", "id", 2_i64).lock(&mut tx).await.expect_err("two rows have it");
        assert!(matches!(error, Error::Row { cause: RowError::UnusableIndex { .. }, .. }), "{error}");
        let error = locks.rows_of("account", "id", [1_i64, 2]).lock(&mut tx).await.expect_err("as well");
        assert!(error.report().to_string().contains("inherit from this one"), "{error}");
        assert_eq!(free(&pool, "account").await, [1, 2, 2, 3], "nothing is locked");
        locks.row_of("savings", "id", 2_i64).lock(&mut tx).await.expect("nothing inherits from it");
        assert_eq!(free(&pool, "account").await, [1, 2, 3]);
        tx.rollback().await.expect("rollback");
    }
}

/// A policy that shows the row to a SELECT, and not to a lock, is no concurrent change.
#[tokio::test]
async fn row_that_a_policy_keeps_unlocked_is_missing() {
    let (_db, pool, locks) = tables(&[
        "CREATE TABLE seat (id BIGINT PRIMARY KEY)",
        "INSERT INTO seat VALUES (1), (2)",
        "ALTER TABLE seat ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY shown ON seat FOR SELECT USING (true)",
        "CREATE POLICY changed ON seat FOR UPDATE USING (id = 1)",
        "GRANT SELECT, UPDATE ON seat TO pg_monitor",
        "DO $$ BEGIN EXECUTE format('GRANT USAGE ON SCHEMA %I TO pg_monitor', current_schema()); END $$",
    ])
    .await;
    let mut tx = pool.begin().await.expect("begin");
    sqlx::query("SET LOCAL ROLE pg_monitor").execute(&mut *tx).await.expect("a role");
    let found: Vec<i64> = locks.rows_of("seat", "id", [1_i64, 2]).lock(&mut tx).await.expect("lock");
    assert_eq!(found, [1]);
    let error = locks.row_of("seat", "id", 2_i64).lock(&mut tx).await.expect_err("it cannot be locked");
    assert!(matches!(error, Error::Row { cause: RowError::NoSuchRow, .. }), "{error}");
}
