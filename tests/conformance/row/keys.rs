//! Keys of rows by their type: each locks its own row, and no other.

use std::fmt::Debug;

use sqlx::types::{Decimal, Uuid};
use sqlx::{Decode, Encode, Type};

use super::*;

/// A key of some type.
trait Key<DB: sqlx::Database>:
    Clone + Debug + Ord + for<'q> Encode<'q, DB> + for<'r> Decode<'r, DB> + Type<DB> + Send + Sync
{
}

impl<DB: sqlx::Database, K> Key<DB> for K where
    K: Clone + Debug + Ord + for<'q> Encode<'q, DB> + for<'r> Decode<'r, DB> + Type<DB> + Send + Sync
{
}

/// The type of a driver for exact numbers.
trait Numeric: sqlx::Database {
    type Number: Key<Self>;

    fn number(cents: i64) -> Self::Number;
}

impl Numeric for sqlx::Postgres {
    type Number = Decimal;

    fn number(cents: i64) -> Decimal {
        Decimal::new(cents, 2)
    }
}

impl Numeric for sqlx::MySql {
    type Number = Decimal;

    fn number(cents: i64) -> Decimal {
        Decimal::new(cents, 2)
    }
}

impl Numeric for sqlx::Sqlite {
    type Number = i64;

    fn number(cents: i64) -> i64 {
        cents
    }
}

/// Makes a table with these keys, and asserts that each locks its own row.
async fn assert_each_locks_its_row<K: Key<Sql>>(r#type: &str, keys: [K; 4]) {
    let counters = counters().await;
    let create = format!("CREATE TABLE thing (id {}, place BIGINT NOT NULL)", r#type);
    sqlx::query(AssertSqlSafe(create)).execute(&counters.pool).await.expect("a table");
    let insert = if DATABASE == Database::Postgres { "VALUES ($1, $2)" } else { "VALUES (?, ?)" };
    for (place, key) in (0_i64..).zip(&keys) {
        let insert = AssertSqlSafe(format!("INSERT INTO thing (id, place) {insert}"));
        sqlx::query(insert).bind(key.clone()).bind(place).execute(&counters.pool).await.expect("a row");
    }
    assert_keys_lock(&counters, keys).await;
}

/// Asserts that the first key locks the first row alone, and the last three the others.
async fn assert_keys_lock<K: Key<Sql>>(counters: &Counters, keys: [K; 4]) {
    let locks = counters.db.locks().await;
    let [first, others @ ..] = keys;
    let mut tx = begin(&counters.pool).await;
    locks.row_of("thing", "id", first.clone()).lock(&mut tx).await.unwrap_or_else(|e| panic!("{first:?}: {e}"));
    assert_free(counters, &[1, 2, 3]).await;
    tx.rollback().await.expect("rollback");
    let mut tx = begin(&counters.pool).await;
    let found = locks.rows_of("thing", "id", others.clone()).lock(&mut tx).await;
    assert_eq!(found.unwrap_or_else(|e| panic!("{others:?}: {e}")).len(), 3);
    assert_free(counters, &[0]).await;
    tx.rollback().await.expect("rollback");
}

/// Asserts which rows another session could lock, by their index. SQLite has no row locks.
async fn assert_free(counters: &Counters, expected: &[i64]) {
    if DATABASE == Database::Sqlite {
        return assert!(!Rival::on(counters).await.gets_the_file().await);
    }
    let mut other = counters.pool.begin().await.expect("begin");
    let rows = other.fetch_all("SELECT place FROM thing FOR UPDATE SKIP LOCKED").await.expect("rows");
    other.rollback().await.expect("rollback");
    let mut places: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    places.sort_unstable();
    assert_eq!(places, expected);
}

#[tokio::test]
async fn uuid_key_locks_its_row() {
    let keys = [3, 1, 2, u128::MAX].map(Uuid::from_u128);
    let r#type = match DATABASE {
        Database::Postgres => "UUID PRIMARY KEY",
        Database::Sqlite => "BLOB PRIMARY KEY",
        _ => "BINARY(16) PRIMARY KEY",
    };
    assert_each_locks_its_row(r#type, keys).await;
}

/// MariaDB has a type for it, which is looked up by text; others have the text.
#[tokio::test]
async fn uuid_in_text_locks_its_row() {
    let keys = [3, 1, 2, u128::MAX].map(|number| Uuid::from_u128(number).to_string());
    let r#type = if DATABASE == Database::MariaDb { "UUID PRIMARY KEY" } else { "VARCHAR(36) PRIMARY KEY" };
    assert_each_locks_its_row(r#type, keys).await;
}

#[tokio::test]
async fn numeric_key_locks_its_row() {
    let keys = [750, -1, 0, 12_345_678_901_234].map(<Sql as Numeric>::number);
    assert_each_locks_its_row("NUMERIC(30, 2) PRIMARY KEY", keys).await;
}

#[tokio::test]
async fn binary_key_locks_its_row() {
    let keys = [&[0, 1][..], &[0], &[0xff, 0x27, 0x5c], b"a"].map(<[u8]>::to_vec);
    let r#type = match DATABASE {
        Database::Postgres => "BYTEA PRIMARY KEY",
        Database::Sqlite => "BLOB PRIMARY KEY",
        _ => "VARBINARY(20) PRIMARY KEY",
    };
    assert_each_locks_its_row(r#type, keys).await;
}

/// In the collation of a column, keys may be equal that differ in their bytes.
#[tokio::test]
async fn text_key_locks_what_its_collation_means() {
    let exact = match DATABASE {
        Database::Postgres => "TEXT COLLATE \"C\" PRIMARY KEY",
        Database::Sqlite => "TEXT COLLATE BINARY PRIMARY KEY",
        _ => "VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY",
    };
    assert_each_locks_its_row(exact, ["a", "A", "\u{e4}", "b "].map(str::to_owned)).await;

    let counters = counters().await;
    let folding = match DATABASE {
        Database::Postgres => {
            let folding =
                "CREATE COLLATION folding (provider = icu, locale = 'und-u-ks-level2', deterministic = false)";
            run(&counters.pool, folding).await;
            "CREATE TABLE thing (id TEXT COLLATE folding PRIMARY KEY, place BIGINT NOT NULL)"
        }
        Database::Sqlite => "CREATE TABLE thing (id TEXT COLLATE NOCASE PRIMARY KEY, place BIGINT NOT NULL)",
        _ => {
            "CREATE TABLE thing (id VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci PRIMARY KEY,
                                 place BIGINT NOT NULL)"
        }
    };
    run(&counters.pool, folding).await;
    run(&counters.pool, "INSERT INTO thing VALUES ('alice', 0), ('Bob', 1), ('carol', 2), ('DAVE', 3)").await;
    assert_keys_lock(&counters, ["ALICE", "dave", "BOB", "Carol"].map(str::to_owned)).await;
}

/// A unique index on all columns of a key, and on no others, leads to one row.
#[tokio::test]
async fn composite_key_locks_its_row() {
    let counters = counters().await;
    run(&counters.pool, "CREATE TABLE thing (id BIGINT NOT NULL, name VARCHAR(20) NOT NULL, day BIGINT NOT NULL, place BIGINT PRIMARY KEY)")
        .await;
    run(&counters.pool, "CREATE UNIQUE INDEX thing_name ON thing (name, id)").await;
    run(&counters.pool, "CREATE UNIQUE INDEX thing_day ON thing (id, name, day)").await;
    run(&counters.pool, "INSERT INTO thing VALUES (1, 'a', 5, 0), (1, 'b', 5, 1), (2, 'a', 5, 2), (2, 'b', 5, 3)")
        .await;
    let locks = counters.db.locks().await;
    let mut tx = begin(&counters.pool).await;
    locks.row_of("thing", ("id", "name"), (2_i64, "a".to_owned())).lock(&mut tx).await.expect("lock");
    assert_free(&counters, &[0, 1, 3]).await;
    locks.row_of("thing", ("name", "id"), ("b", 1_i32)).lock(&mut tx).await.expect("in any order, of any width");
    assert_free(&counters, &[0, 3]).await;
    locks.row_of("thing", ("id", "name", "day"), (2_i64, "b", 5_i64)).lock(&mut tx).await.expect("three columns");
    assert_free(&counters, &[0]).await;
    if DATABASE != Database::Sqlite {
        let mut rival = begin(&counters.pool).await;
        let mut is_free = async |id: i64, name: &'static str| {
            locks.row_of("thing", ("id", "name"), (id, name)).try_lock(&mut rival).await.expect("try")
        };
        assert_eq!((is_free(2, "b").await, is_free(1, "a").await), (false, true));
        rival.rollback().await.expect("rollback");
    }
    let refused = |result: Result<(), Error>, expected: RowError| {
        assert_eq!(cause(&result.expect_err("refused")), &expected);
    };
    let missing = locks.row_of("thing", ("id", "name"), (3_i64, "a")).lock(&mut tx).await;
    refused(missing, RowError::NoSuchRow);
    let other_columns = locks.row_of("thing", ("id", "day"), (1_i64, 5_i64)).lock(&mut tx).await;
    refused(other_columns, RowError::NotUnique { column: "id, day".into() });
    let twice = locks.row_of("thing", ("place", "place"), (1_i64, 1_i64)).lock(&mut tx).await;
    refused(twice, RowError::NotUnique { column: "place, place".into() });
    let unknown = locks.row_of("thing", ("id", "size"), (1_i64, 5_i64)).lock(&mut tx).await;
    refused(unknown, RowError::NoSuchColumn { column: "size".into() });
    if DATABASE.is_mysql() {
        let error = locks.row_of("thing", ("id", "name"), (1_i64, 7_i64)).lock(&mut tx).await.expect_err("all rows");
        assert!(matches!(cause(&error), RowError::KeyType { .. }), "{error}");
    }
}
