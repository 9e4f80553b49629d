//! A version column: a row that was changed meanwhile is not overwritten, inside and outside of the
//! caller's transaction, on tables and columns of any name and type.

use sqlock::Error;
use sqlock::row::RowError;
use sqlock::version::Versioned;
use sqlx::{AssertSqlSafe, Executor, FromRow, Pool, Row as _};

use super::fence::{IsolatedPool, levels, run};
use crate::support::{Database, SOON, TestDatabase, connect, empty, soon};
use crate::{DATABASE, Sql};

/// All columns of an account: its id, version, owner and balance.
type Row = (i64, i64, String, i64);

/// A row that is read by the names of columns, like a struct with a derived `FromRow`.
struct Named<T>(T);

impl<'r, T> FromRow<'r, <Sql as sqlx::Database>::Row> for Named<T>
where
    T: sqlx::Decode<'r, Sql> + sqlx::Type<Sql>,
{
    fn from_row(row: &'r <Sql as sqlx::Database>::Row) -> Result<Self, sqlx::Error> {
        row.try_get("balance").map(Self)
    }
}

/// A database with accounts, of which the first is Ann's: 100, at version 1.
pub(super) struct Bank {
    pub(super) db: TestDatabase,
    pub(super) pool: Pool<Sql>,
    pub(super) accounts: Versioned,
}

pub(super) async fn bank() -> Bank {
    let db = empty().await;
    let pool = db.pool().await;
    if DATABASE == Database::Sqlite {
        // In this mode readers block no writer, as on the other databases.
        run(&pool, "PRAGMA journal_mode = WAL").await;
    }
    run(
        &pool,
        "CREATE TABLE accounts (id BIGINT NOT NULL PRIMARY KEY, version BIGINT NOT NULL,
                                owner VARCHAR(40) NOT NULL UNIQUE, balance BIGINT NOT NULL)",
    )
    .await;
    let bank = Bank { db, pool, accounts: Versioned::table("accounts") };
    bank.open(1, "ann").await.expect("insert");
    bank
}

impl Bank {
    pub(super) async fn open(&self, id: i64, owner: &str) -> sqlock::Result<()> {
        let opening = self.accounts.insert(&self.pool, id, &["owner", "balance"], |row| {
            row.push_bind(owner).push_bind(100_i64);
        });
        opening.await
    }

    pub(super) async fn row(&self, id: i64) -> Option<Row> {
        let read = self.accounts.read::<_, Row>(&self.pool, id).await.expect("read")?;
        assert_eq!(read.version, read.value.1, "the version that was read is that of the row");
        Some(read.value)
    }

    pub(super) async fn balance(&self, id: i64) -> i64 {
        self.row(id).await.expect("there is such an account").3
    }

    /// Writes as another client.
    async fn disturb(&self, id: i64, expected: i64) -> sqlock::Result<i64> {
        let update = self.accounts.update(&self.pool, id, expected, |set| {
            set.push("balance = ").push_bind(-1_i64);
        });
        update.await
    }
}

/// Returns the versions of a conflict. Panics for any other error.
fn versions(error: &Error) -> (Option<i64>, Option<i64>) {
    match error {
        Error::Conflict { table, expected, found, .. } => {
            assert_eq!(table, "accounts");
            assert!(error.is_conflict() && error.is_retryable());
            (*expected, *found)
        }
        error => panic!("not a conflict: {error:?}"),
    }
}

#[tokio::test]
async fn row_is_updated_by_the_version_read() {
    let bank = bank().await;
    assert_eq!(bank.row(2).await, None);
    assert_eq!(bank.row(1).await, Some((1, 1, "ann".into(), 100)));

    let rich = "ann the rich".to_owned();
    let update = bank.accounts.update(&bank.pool, 1, 1, |set| {
        set.push("owner = ").push_bind(&rich).push(", balance = balance * ").push_bind(3_i64);
    });
    assert_eq!(update.await.expect("update"), 2);
    assert_eq!(bank.row(1).await, Some((1, 2, rich, 300)));
    let read = bank.accounts.read::<_, Named<i64>>(&bank.pool, 1).await.expect("read").expect("it is there");
    assert_eq!((read.version, read.value.0), (2, 300));
}

#[tokio::test]
async fn conflict_names_both_versions_and_writes_nothing() {
    let bank = bank().await;
    for expected in 1..=3 {
        bank.accounts.update(&bank.pool, 1, expected, |_| {}).await.expect("update");
    }
    let before = bank.row(1).await;
    for stale in [0, 1, 3, 5] {
        let error = bank.disturb(1, stale).await.expect_err("another version");
        assert_eq!(versions(&error), (Some(stale), Some(4)));
        let error = bank.accounts.delete(&bank.pool, 1, stale).await.expect_err("another version");
        assert_eq!(versions(&error), (Some(stale), Some(4)));
    }
    let error = bank.disturb(2, 1).await.expect_err("no such row");
    assert_eq!(versions(&error), (Some(1), None));
    assert_eq!(error.to_string(), "a row of accounts has changed: expected version 1, found no row");
    let error = bank.accounts.delete(&bank.pool, 2, 1).await.expect_err("no such row");
    assert_eq!(versions(&error), (Some(1), None));
    assert_eq!(bank.row(1).await, before);
}

#[tokio::test]
async fn one_of_many_stale_writers_wins() {
    let bank = bank().await;
    let mut writers = tokio::task::JoinSet::new();
    for writer in 1..=8 {
        let (pool, accounts) = (bank.pool.clone(), bank.accounts.clone());
        writers.spawn(async move {
            let update = accounts.update(&pool, 1, 1, |set| {
                set.push("balance = ").push_bind(writer);
            });
            update.await.map(|version| (version, writer))
        });
    }
    let done = soon("their end", writers.join_all()).await;
    let won: Vec<_> = done.iter().flatten().collect();
    let [(2, winner)] = won.as_slice() else { panic!("one wins: {done:?}") };
    for error in done.iter().flat_map(|done| done.as_ref().err()) {
        assert_eq!(versions(error), (Some(1), Some(2)));
    }
    assert_eq!(bank.row(1).await, Some((1, 2, "ann".into(), *winner)));
}

#[tokio::test]
async fn nothing_set_raises_the_version_alone() {
    let bank = bank().await;
    assert_eq!(bank.accounts.update(&bank.pool, 1, 1, |_| {}).await.expect("update"), 2);
    assert_eq!(bank.row(1).await, Some((1, 2, "ann".into(), 100)));
}

#[tokio::test]
async fn row_is_deleted_only_as_read() {
    let bank = bank().await;
    bank.disturb(1, 1).await.expect("update");
    let error = bank.accounts.delete(&bank.pool, 1, 1).await.expect_err("changed since");
    assert_eq!(versions(&error), (Some(1), Some(2)));
    bank.accounts.delete(&bank.pool, 1, 2).await.expect("delete");
    assert_eq!(bank.row(1).await, None);
}

#[tokio::test]
async fn row_is_inserted_once_at_version_one() {
    let bank = bank().await;
    bank.disturb(1, 1).await.expect("update");
    let error = bank.open(1, "bob").await.expect_err("it exists");
    assert_eq!(versions(&error), (None, Some(2)));
    assert_eq!(error.to_string(), "a row of accounts has changed: expected no row, found version 2");
    assert_eq!(bank.row(1).await, Some((1, 2, "ann".into(), -1)));
    bank.open(2, "bob").await.expect("insert");
    assert_eq!(bank.row(2).await, Some((2, 1, "bob".into(), 100)));

    // Another unique column than the key: no conflict, for another version would not help.
    let error = bank.open(3, "bob").await.expect_err("there is another bob");
    assert!(!error.is_conflict() && !error.is_retryable());
    let Error::Database { source: sqlx::Error::Database(source), .. } = &error else { panic!("{error:?}") };
    assert!(source.is_unique_violation(), "{source}");
    assert_eq!(bank.row(3).await, None);
}

/// No column but the key and the version.
#[tokio::test]
async fn a_row_may_consist_of_key_and_version() {
    let bank = bank().await;
    run(&bank.pool, "CREATE TABLE bare (id VARCHAR(20) NOT NULL PRIMARY KEY, version BIGINT NOT NULL)").await;
    let bare = Versioned::table("bare");
    bare.insert(&bank.pool, "a", &[], |_| {}).await.expect("insert");
    assert!(bare.insert(&bank.pool, "a", &[], |_| {}).await.expect_err("it exists").is_conflict());
    assert_eq!(bare.update(&bank.pool, String::from("a"), 1, |_| {}).await.expect("update"), 2);
}

#[tokio::test]
async fn changes_are_rolled_back_with_the_callers_transaction() {
    let bank = bank().await;
    bank.open(2, "bob").await.expect("insert");
    for commit in [false, true] {
        let mut tx = bank.pool.begin().await.expect("begin");
        let update = bank.accounts.update(&mut tx, 1, 1, |set| {
            set.push("balance = ").push_bind(1_i64);
        });
        assert_eq!(update.await.expect("update"), 2);
        bank.accounts.delete(&mut *tx, 2, 1).await.expect("delete");
        let insert = bank.accounts.insert(&mut tx, 3, &["owner", "balance"], |row| {
            row.push_bind("cid").push_bind(0_i64);
        });
        insert.await.expect("insert");
        let seen = bank.accounts.read::<_, Row>(&mut tx, 1).await.expect("read").expect("it is there");
        assert_eq!((seen.version, seen.value.3), (2, 1), "it sees its own");
        if commit {
            tx.commit().await.expect("commit");
        } else {
            tx.rollback().await.expect("rollback");
        }
        let rows = (bank.row(1).await, bank.row(2).await, bank.row(3).await);
        let expected = if commit {
            (Some((1, 2, "ann".into(), 1)), None, Some((3, 1, "cid".into(), 0)))
        } else {
            (Some((1, 1, "ann".into(), 100)), Some((2, 1, "bob".into(), 100)), None)
        };
        assert_eq!(rows, expected, "commit: {commit}");
    }
}

/// On PostgreSQL, any error of the database would have ended it.
#[tokio::test]
async fn a_conflict_leaves_the_callers_transaction_usable() {
    let bank = bank().await;
    let mut tx = bank.pool.begin().await.expect("begin");
    let error = bank.accounts.update(&mut tx, 1, 7, |_| {}).await.expect_err("another version");
    assert_eq!(versions(&error), (Some(7), Some(1)));
    let error = bank.accounts.delete(&mut tx, 2, 1).await.expect_err("no such row");
    assert_eq!(versions(&error), (Some(1), None));
    let insert = bank.accounts.insert(&mut tx, 1, &["owner", "balance"], |row| {
        row.push_bind("bob").push_bind(0_i64);
    });
    assert_eq!(versions(&insert.await.expect_err("it exists")), (None, Some(1)));
    let update = bank.accounts.update(&mut tx, 1, 1, |set| {
        set.push("balance = ").push_bind(5_i64);
    });
    assert_eq!(update.await.expect("the transaction goes on"), 2);
    tx.commit().await.expect("commit");
    assert_eq!(bank.row(1).await, Some((1, 2, "ann".into(), 5)));
}

/// The rival's write comes between the read and the write, or waits for their end if the read has
/// locked the row.
#[tokio::test]
async fn one_of_two_writers_wins_at_every_isolation() {
    for &level in levels() {
        let bank = bank().await;
        let app = IsolatedPool::at(&bank.db.url, level).await;
        let mut tx = app.begin().await;
        let read = bank.accounts.read::<_, Row>(&mut tx, 1).await.expect("read").expect("it is there");
        let rival = tokio::spawn({
            let (pool, accounts) = (app.pool().clone(), bank.accounts.clone());
            async move {
                let update = accounts.update(&pool, 1, 1, |set| {
                    set.push("balance = ").push_bind(-1_i64);
                });
                update.await
            }
        });
        let rival_waits = matches!((DATABASE, level), (Database::Sqlite, "IMMEDIATE" | "EXCLUSIVE"))
            || (DATABASE.is_mysql() && level == "SERIALIZABLE");
        let rival = if rival_waits { Err(rival) } else { Ok(soon("the rival", rival).await.expect("no panic")) };
        let update = bank.accounts.update(&mut tx, 1, read.version, |set| {
            set.push("balance = ").push_bind(1_i64);
        });
        let ours = update.await;
        match ours {
            Ok(_) => tx.commit().await.expect("commit"),
            Err(_) => tx.rollback().await.expect("rollback"),
        }
        let rival = match rival {
            Ok(done) => done,
            Err(waiting) => soon("the rival", waiting).await.expect("no panic"),
        };
        let (loser, balance) = match (&ours, &rival) {
            (Ok(2), Err(error)) => (error, 1),
            (Err(error), Ok(2)) => (error, -1),
            both => panic!("{level}: {both:?}"),
        };
        assert!(loser.is_conflict() && loser.is_retryable(), "{level}: {loser:?}");
        let by_version = matches!(loser, Error::Conflict { expected: Some(1), found: Some(2), .. });
        match (DATABASE, level) {
            (_, "READ UNCOMMITTED" | "READ COMMITTED") => assert!(by_version, "{level}: {loser:?}"),
            (Database::Postgres, _) => assert_eq!(code(loser), "40001", "{level}"),
            (Database::MySql, "REPEATABLE READ") => assert!(by_version, "{level}: {loser:?}"),
            (Database::Sqlite, "DEFERRED") => assert_eq!(code(loser), "517", "SQLITE_BUSY_SNAPSHOT"),
            _ => {}
        }
        assert_eq!(bank.row(1).await, Some((1, 2, "ann".into(), balance)), "{level}");
    }
}

/// The same for a row that both want to create.
#[tokio::test]
async fn one_of_two_inserts_wins_at_every_isolation() {
    for &level in levels() {
        let bank = bank().await;
        let app = IsolatedPool::at(&bank.db.url, level).await;
        let mut tx = app.begin().await;
        // In transactions with a snapshot, this read takes it.
        assert!(bank.accounts.read::<_, Row>(&mut tx, 1).await.expect("read").is_some());
        let create = |owner: &'static str| {
            let (pool, accounts) = (app.pool().clone(), bank.accounts.clone());
            async move {
                let insert = accounts.insert(&pool, 2, &["owner", "balance"], |row| {
                    row.push_bind(owner).push_bind(0_i64);
                });
                insert.await
            }
        };
        let rival_waits = matches!((DATABASE, level), (Database::Sqlite, "IMMEDIATE" | "EXCLUSIVE"));
        let rival = tokio::spawn(create("rival"));
        let rival = if rival_waits { Err(rival) } else { Ok(soon("the rival", rival).await.expect("no panic")) };
        let insert = bank.accounts.insert(&mut tx, 2, &["owner", "balance"], |row| {
            row.push_bind("ours").push_bind(0_i64);
        });
        let ours = insert.await;
        match ours {
            Ok(()) => tx.commit().await.expect("commit"),
            Err(_) => tx.rollback().await.expect("rollback"),
        }
        let rival = match rival {
            Ok(done) => done,
            Err(waiting) => soon("the rival", waiting).await.expect("no panic"),
        };
        let (loser, owner) = match (&ours, &rival) {
            (Ok(()), Err(error)) => (error, "ours"),
            (Err(error), Ok(())) => (error, "rival"),
            both => panic!("{level}: {both:?}"),
        };
        assert!(loser.is_conflict(), "{level}: {loser:?}");
        let by_version = matches!(loser, Error::Conflict { expected: None, found: Some(1), .. });
        match (DATABASE, level) {
            (_, "READ UNCOMMITTED" | "READ COMMITTED") | (Database::MySql, _) => assert!(by_version, "{loser:?}"),
            (Database::Postgres, _) => assert_eq!(code(loser), "40001", "{level}"),
            (Database::Sqlite, "DEFERRED") => assert_eq!(code(loser), "517", "SQLITE_BUSY_SNAPSHOT"),
            _ => {}
        }
        assert_eq!(bank.row(2).await, Some((2, 1, owner.into(), 0)), "{level}");
    }
}

/// Returns the code of the database's error.
fn code(error: &Error) -> String {
    match error {
        Error::Database { source: sqlx::Error::Database(source), .. } => source.code().unwrap_or_default().into_owned(),
        error => panic!("not of the database: {error:?}"),
    }
}

#[tokio::test]
async fn tables_and_columns_may_have_any_name() {
    let bank = bank().await;
    let quote = if DATABASE.is_mysql() { '`' } else { '"' };
    // The quote itself, the end of a statement, and SQL keywords.
    let table = format!("it{quote}s; DROP TABLE accounts --");
    let quoted = format!("{quote}it{quote}{quote}s; DROP TABLE accounts --{quote}");
    let sql = format!(
        "CREATE TABLE {quoted} ({quote}select{quote} BIGINT NOT NULL PRIMARY KEY, {quote}ver{quote}{quote}sion{quote} BIGINT,
                                {quote}order{quote} BIGINT)"
    );
    bank.pool.execute(AssertSqlSafe(sql)).await.expect("a table of that name");
    let odd = Versioned::table(table).key("select").version(format!("ver{quote}sion"));
    let insert = odd.insert(&bank.pool, 1, &["order"], |row| {
        row.push_bind(5_i64);
    });
    insert.await.expect("insert");
    let update = odd.update(&bank.pool, 1, 1, |set| {
        set.push(format_args!("{quote}order{quote} = ")).push_bind(6_i64);
    });
    assert_eq!(update.await.expect("update"), 2);
    let read = odd.read::<_, (i64, i64, i64)>(&bank.pool, 1).await.expect("read").expect("it is there");
    assert_eq!((read.version, read.value), (2, (1, 2, 6)));
    odd.delete(&bank.pool, 1, 2).await.expect("delete");
    assert!(bank.row(1).await.is_some());

    // In a schema of its own, where that of the connection has no such table.
    let schema = match DATABASE {
        Database::Sqlite => "main".to_owned(),
        Database::Postgres => {
            sqlx::query_scalar("SELECT current_schema()::text").fetch_one(&bank.pool).await.expect("a schema")
        }
        _ => sqlx::query_scalar("SELECT DATABASE()").fetch_one(&bank.pool).await.expect("a database"),
    };
    let other = match DATABASE {
        Database::Sqlite => bank.pool.clone(),
        _ => {
            let elsewhere = empty().await;
            connect(&elsewhere.url, 1).await
        }
    };
    let accounts = Versioned::table(format!("{schema}.accounts"));
    assert_eq!(accounts.update(&other, 1, 1, |_| {}).await.expect("update"), 2);
    let error = accounts.update(&other, 1, 1, |_| {}).await.expect_err("another version");
    assert!(error.to_string().contains(&format!("{schema}.accounts")), "{error}");
}

#[tokio::test]
async fn invalid_names_are_refused_before_any_statement() {
    let pool = connect(&empty().await.url, 1).await;
    pool.close().await;
    for (odd, name) in [
        (Versioned::table(""), ""),
        (Versioned::table("a\0b"), "a\0b"),
        (Versioned::table(".b"), ""),
        (Versioned::table("a.b.c"), "a.b.c"),
        (Versioned::table("a").key(""), ""),
        (Versioned::table("a").version("\0"), "\0"),
    ] {
        let is_named = |error: &Error| matches!(error, Error::InvalidIdentifier { name: given, .. } if given == name);
        let error = odd.read::<_, Row>(&pool, 1).await.expect_err("no name");
        assert!(is_named(&error) && !error.is_retryable(), "{error:?}");
        assert!(is_named(&odd.update(&pool, 1, 1, |_| {}).await.expect_err("no name")));
        assert!(is_named(&odd.delete(&pool, 1, 1).await.expect_err("no name")));
        assert!(is_named(&odd.insert(&pool, 1, &[], |_| {}).await.expect_err("no name")));
    }
    let error = Versioned::table("a").insert(&pool, 1, &["b", ""], |_| {}).await.expect_err("no name");
    assert!(matches!(&error, Error::InvalidIdentifier { name, .. } if name.is_empty()), "{error:?}");
}

#[tokio::test]
async fn versions_and_keys_have_many_types() {
    let bank = bank().await;
    let mut types = vec!["SMALLINT", "INTEGER", "BIGINT"];
    match DATABASE {
        Database::MySql | Database::MariaDb => types.extend(["TINYINT", "INTEGER UNSIGNED", "BIGINT UNSIGNED"]),
        Database::Postgres => types.push("NUMERIC(10)"),
        Database::Sqlite => types.push("TINYINT"),
    }
    for (n, r#type) in types.into_iter().enumerate() {
        let table = format!("typed{n}");
        let sql =
            format!("CREATE TABLE {table} (id VARCHAR(20) PRIMARY KEY, version {type} NOT NULL, balance VARCHAR(9))");
        bank.pool.execute(AssertSqlSafe(sql)).await.expect("a table");
        let typed = Versioned::table(&table);
        let insert = typed.insert(&bank.pool, "key", &["balance"], |row| {
            row.push_bind("a");
        });
        insert.await.unwrap_or_else(|e| panic!("{type}: {e}"));
        let version = typed.update(&bank.pool, "key", 1, |set| {
            set.push("balance = ").push_bind("b");
        });
        assert_eq!(version.await.unwrap_or_else(|e| panic!("{type}: {e}")), 2);
        let read = typed.read::<_, Named<String>>(&bank.pool, "key").await.unwrap_or_else(|e| panic!("{type}: {e}"));
        let read = read.expect("it is there");
        assert_eq!((read.version, &*read.value.0), (2, "b"), "{type}");
        let error = typed.delete(&bank.pool, "key", 1).await.expect_err("another version");
        assert!(matches!(error, Error::Conflict { found: Some(2), .. }), "{type}: {error:?}");
        typed.delete(&bank.pool, "key", 2).await.unwrap_or_else(|e| panic!("{type}: {e}"));
    }
}

/// Creates a pool whose server truncates too great numbers, if there is such a server.
async fn lenient(url: &str) -> Pool<Sql> {
    let set = if DATABASE.is_mysql() { "SET SESSION sql_mode = ''" } else { "SELECT 1" };
    sqlx::pool::PoolOptions::<Sql>::new()
        .after_connect(move |conn, _| Box::pin(async move { conn.execute(set).await.map(drop) }))
        .connect_lazy_with((*connect(url, 1).await.connect_options()).clone())
}

#[tokio::test]
async fn maximum_version_is_not_raised() {
    let bank = bank().await;
    let pool = lenient(&bank.db.url).await;
    let mut types = vec![("BIGINT", i64::MAX)];
    match DATABASE {
        Database::MySql | Database::MariaDb => types.extend([
            ("TINYINT", 127),
            ("TINYINT UNSIGNED", 255),
            ("SMALLINT", 32_767),
            ("MEDIUMINT", 8_388_607),
            ("MEDIUMINT UNSIGNED", 16_777_215),
            ("INTEGER", 2_147_483_647),
            ("INTEGER UNSIGNED", 4_294_967_295),
            ("BIGINT UNSIGNED", i64::MAX),
        ]),
        Database::Postgres => types.extend([("SMALLINT", 32_767), ("INTEGER", 2_147_483_647)]),
        Database::Sqlite => {}
    }
    for (n, (r#type, greatest)) in types.into_iter().enumerate() {
        let table = format!("full{n}");
        let sql = format!("CREATE TABLE {table} (id BIGINT PRIMARY KEY, version {type} NOT NULL, balance BIGINT)");
        pool.execute(AssertSqlSafe(sql)).await.expect("a table");
        let sql = format!("INSERT INTO {table} (id, version, balance) VALUES (1, {}, 0)", greatest - 1);
        pool.execute(AssertSqlSafe(sql)).await.expect("a row");
        let full = Versioned::table(&table);
        assert_eq!(full.update(&pool, 1, greatest - 1, |_| {}).await.expect(r#type), greatest);
        for _ in 0..2 {
            let update = full.update(&pool, 1, greatest, |set| {
                set.push("balance = balance + 1");
            });
            let error = update.await.expect_err("there is no next version");
            let Error::Row { cause: RowError::VersionMaximum { column, maximum }, .. } = &error else {
                panic!("{type}: {error:?}")
            };
            assert_eq!((column.as_str(), *maximum), ("version", greatest), "{type}");
        }
        let read = full.read::<_, Named<i64>>(&pool, 1).await.expect("read").expect("a row");
        assert_eq!((read.version, read.value.0), (greatest, 0), "{type}");
        full.delete(&pool, 1, greatest).await.expect("a row may go at any version");
    }
    // In a wider type this is an ordinary number.
    run(&pool, "UPDATE accounts SET version = 32767").await;
    assert_eq!(bank.accounts.update(&pool, 1, 32_767, |_| {}).await.expect("update"), 32_768);
}

#[tokio::test]
async fn ambiguous_key_is_reported_before_the_commit() {
    let bank = bank().await;
    run(&bank.pool, "CREATE TABLE twins (id BIGINT, version BIGINT)").await;
    run(&bank.pool, "INSERT INTO twins (id, version) VALUES (1, 1), (1, 1)").await;
    let twins = Versioned::table("twins");
    let mut tx = bank.pool.begin().await.expect("begin");
    for error in [
        twins.read::<_, (i64, i64)>(&mut tx, 1).await.expect_err("two"),
        twins.update(&mut tx, 1, 1, |_| {}).await.expect_err("two"),
        twins.delete(&mut tx, 1, 2).await.expect_err("two"),
    ] {
        let Error::Row { table, cause: RowError::SeveralRows { column, rows: 2 } } = &error else {
            panic!("{error:?}")
        };
        assert_eq!((&**table, &**column), ("twins", "id"));
        assert!(!error.is_conflict() && !error.is_retryable());
    }
    tx.rollback().await.expect("rollback");
    let left: i64 =
        sqlx::query_scalar("SELECT count(*) FROM twins WHERE version = 1").fetch_one(&bank.pool).await.expect("count");
    assert_eq!(left, 2);
}

/// PostgreSQL prepares statements for the types of their parameters, sqlx for their text alone.
#[tokio::test]
async fn one_connection_takes_keys_of_several_types() {
    let bank = bank().await;
    let mut conn = bank.pool.acquire().await.expect("a connection");
    for round in 0..3 {
        let version = 1 + 3 * round;
        assert!(bank.accounts.read::<_, Row>(&mut *conn, 1_i16).await.expect("read").is_some());
        assert!(bank.accounts.read::<_, Row>(&mut *conn, 1_i32).await.expect("read").is_some());
        assert!(bank.accounts.read::<_, Row>(&mut *conn, 1_i64).await.expect("read").is_some());
        assert!(bank.accounts.update(&mut *conn, 1_i16, version, |_| {}).await.is_ok());
        assert!(bank.accounts.update(&mut *conn, 1_i32, version + 1, |_| {}).await.is_ok());
        assert!(bank.accounts.update(&mut *conn, 1_i64, version + 2, |_| {}).await.is_ok());
        assert!(bank.accounts.delete(&mut *conn, 1_i32, 0).await.expect_err("another version").is_conflict());
        assert!(bank.accounts.delete(&mut *conn, 1_i64, 0).await.expect_err("another version").is_conflict());
    }
}

#[tokio::test]
async fn read_works_after_the_columns_have_changed() {
    let bank = bank().await;
    let (one, other) = (bank.db.pool_of(1).await, bank.db.pool_of(1).await);
    let read = async || bank.accounts.read::<_, Named<i64>>(&one, 1).await;
    assert_eq!(read().await.expect("read").expect("a row").value.0, 100);
    for change in ["ALTER TABLE accounts ADD COLUMN more BIGINT", "ALTER TABLE accounts DROP COLUMN more"] {
        run(&other, change).await;
        let mut found = read().await;
        if DATABASE == Database::Postgres {
            assert!(matches!(found, Err(Error::Database { .. })), "{change}: the statement is prepared anew");
            found = read().await;
        }
        let row = found.unwrap_or_else(|e| panic!("{change}: {e}")).expect("a row");
        assert_eq!((row.value.0, row.version), (100, 1), "{change}");
    }
}

/// None of them is reported as a missing table of this crate.
#[tokio::test]
async fn database_errors_are_not_retryable_conflicts() {
    let bank = bank().await;
    let error = Versioned::table("nowhere").read::<_, Row>(&bank.pool, 1).await.expect_err("no such table");
    assert!(matches!(error, Error::Database { .. }) && !error.is_retryable(), "{error:?}");
    let error = bank.accounts.clone().version("nothing").update(&bank.pool, 1, 1, |_| {}).await.expect_err("no column");
    assert!(matches!(error, Error::Database { .. }) && !error.is_retryable(), "{error:?}");
    // A row that does not convert to the requested type.
    let error = bank.accounts.read::<_, (i64, i64, i64)>(&bank.pool, 1).await.expect_err("a name is no number");
    assert!(matches!(error, Error::Database { .. }) && !error.is_retryable(), "{error:?}");

    let small = sqlx::pool::PoolOptions::<Sql>::new()
        .max_connections(1)
        .acquire_timeout(SOON / 300)
        .connect_lazy_with((*bank.pool.connect_options()).clone());
    let taken = loop {
        // The first connection may take longer on a busy machine.
        if let Ok(taken) = small.acquire().await {
            break taken;
        }
    };
    let error = bank.accounts.read::<_, Row>(&small, 1).await.expect_err("none left");
    assert!(matches!(error, Error::PoolExhausted { .. }) && error.is_retryable(), "{error:?}");
    drop(taken);
    small.close().await;
    let error = bank.accounts.delete(&small, 1, 1).await.expect_err("closed");
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
}

/// Otherwise a retry would run the transaction again for ever.
#[tokio::test]
async fn row_kept_by_trigger_is_no_conflict() {
    let skip = match DATABASE {
        Database::Postgres => {
            "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
             CREATE TRIGGER skip BEFORE INSERT OR UPDATE OR DELETE ON accounts FOR EACH ROW EXECUTE FUNCTION skip()"
        }
        Database::Sqlite => {
            "CREATE TRIGGER skip_insert BEFORE INSERT ON accounts BEGIN SELECT RAISE(IGNORE); END;
             CREATE TRIGGER skip_update BEFORE UPDATE ON accounts BEGIN SELECT RAISE(IGNORE); END;
             CREATE TRIGGER skip_delete BEFORE DELETE ON accounts BEGIN SELECT RAISE(IGNORE); END"
        }
        Database::MySql | Database::MariaDb => return, // Their triggers cannot skip a row.
    };
    let bank = bank().await;
    run(&bank.pool, skip).await;
    let refused = |outcome: sqlock::Result<()>| {
        let error = outcome.expect_err("nothing was written");
        assert!(matches!(&error, Error::Row { .. }) && !error.is_conflict() && !error.is_retryable(), "{error:?}");
    };
    refused(bank.accounts.update(&bank.pool, 1, 1, |_| {}).await.map(|_| ()));
    refused(bank.accounts.delete(&bank.pool, 1, 1).await);
    refused(bank.open(2, "bob").await);
    let stale = bank.accounts.update(&bank.pool, 1, 7, |_| {}).await;
    assert!(matches!(stale, Err(Error::Conflict { expected: Some(7), found: Some(1), .. })), "{stale:?}");
}

/// SQLite takes an unknown name in quotes for a text, which no row equals.
#[tokio::test]
async fn unknown_column_is_an_error_and_no_conflict() {
    let bank = bank().await;
    for accounts in [Versioned::table("accounts").key("idd"), Versioned::table("accounts").version("revision")] {
        let updated = accounts.update(&bank.pool, 1, 1, |set| {
            set.push("balance = 0");
        });
        let updated = updated.await;
        assert!(matches!(updated, Err(Error::Database { .. })), "{updated:?}");
        let deleted = accounts.delete(&bank.pool, 1, 1).await;
        assert!(matches!(deleted, Err(Error::Database { .. })), "{deleted:?}");
    }
}
