//! Rows of the application's tables: which keys and indexes lock one row.

use super::*;

#[tokio::test]
async fn row_lock_spares_neighbouring_rows() {
    let counters = counters().await;
    let (ours, rival) = (counters.db.locks().await, Rival::on(&counters).await);
    for level in levels() {
        let app = counters.at(level).await;
        let mut tx = app.begin().await;
        ours.row_of("counter", "id", 1_i64).lock(&mut tx).await.expect("lock");
        assert!(!rival.finds_free_row(1).await, "{level}");
        if DATABASE != Database::Sqlite {
            assert!(rival.finds_free_row(2).await, "{level}");
            // Nor is a gap beside it.
            let mut other = begin(&rival.pool).await;
            let insert = sqlx::query("INSERT INTO counter (id, value) VALUES (0, 0), (3, 0)").execute(&mut *other);
            soon("an insert beside the row", insert).await.expect("insert");
            other.rollback().await.expect("rollback");
        }
        tx.rollback().await.expect("rollback");
        assert!(rival.finds_free_row(1).await, "{level}");
    }
}

#[tokio::test]
async fn column_without_unique_index_is_refused() {
    let counters = counters().await;
    run(&counters.pool, "CREATE TABLE seat (id INTEGER PRIMARY KEY, hall INTEGER NOT NULL, place INTEGER NOT NULL, code VARCHAR(20) NOT NULL)").await;
    run(&counters.pool, "CREATE INDEX seat_hall ON seat (hall)").await;
    run(&counters.pool, "CREATE UNIQUE INDEX seat_place ON seat (hall, place)").await;
    run(&counters.pool, "CREATE UNIQUE INDEX seat_code ON seat (code)").await;
    run(&counters.pool, "INSERT INTO seat VALUES (1, 1, 1, 'a'), (2, 1, 2, 'b')").await;
    let locks = counters.db.locks().await;
    let mut tx = begin(&counters.pool).await;
    for column in ["hall", "place"] {
        for _ in 0..2 {
            let error = locks.row_of("seat", column, 1_i32).lock(&mut tx).await.expect_err("not unique");
            assert_eq!(cause(&error), &RowError::NotUnique { column: column.into() });
            assert!(!error.is_retryable());
        }
    }
    locks.row_of("seat", "code", "a".to_owned()).lock(&mut tx).await.expect("a unique index will do");
    locks.row_of("seat", "id", 2_i32).lock(&mut tx).await.expect("the primary key will do");
    let error = locks.row_of("seat", "row", 1_i32).lock(&mut tx).await.expect_err("no such column");
    assert_eq!(cause(&error), &RowError::NoSuchColumn { column: "row".into() });
    let error = locks.row_of("chair", "id", 1_i32).lock(&mut tx).await.expect_err("no such table");
    assert_eq!(cause(&error), &RowError::NoSuchColumn { column: "id".into() });
    let error = locks.row_of("", "id", 1_i32).lock(&mut tx).await.expect_err("no name");
    assert!(matches!(error, Error::InvalidIdentifier { .. }), "{error}");
    let error = locks.row_of("seat", "id", 9_i32).lock(&mut tx).await.expect_err("no such row");
    assert_eq!(cause(&error), &RowError::NoSuchRow);
    let error = locks.row_of("seat", "id", 9_i32).try_lock(&mut tx).await.expect_err("no such row");
    assert_eq!(cause(&error), &RowError::NoSuchRow);
    tx.commit().await.expect("after all these errors the transaction is usable");
}

#[tokio::test]
async fn row_is_locked_by_a_generated_column() {
    let counters = counters().await;
    let computed = if DATABASE == Database::Postgres { "STORED" } else { "VIRTUAL" };
    let sql = format!(
        "CREATE TABLE ticket (hall INTEGER NOT NULL, twice INTEGER GENERATED ALWAYS AS (hall * 2) STORED,
                              thrice INTEGER GENERATED ALWAYS AS (hall * 3) {computed})"
    );
    counters.pool.execute(AssertSqlSafe(sql)).await.expect("a table");
    run(&counters.pool, "CREATE UNIQUE INDEX ticket_twice ON ticket (twice)").await;
    run(&counters.pool, "CREATE UNIQUE INDEX ticket_thrice ON ticket (thrice)").await;
    run(&counters.pool, "INSERT INTO ticket (hall) VALUES (1), (2)").await;
    let locks = counters.db.locks().await;
    let mut tx = begin(&counters.pool).await;
    for (column, keys) in [("twice", [2_i32, 4]), ("thrice", [3, 6])] {
        locks.row_of("ticket", column, keys[1]).lock(&mut tx).await.unwrap_or_else(|e| panic!("{column}: {e:?}"));
        let found = locks.rows_of("ticket", column, keys).lock(&mut tx).await.expect("lock");
        assert_eq!(found, keys, "{column}");
    }
}

/// InnoDB compares a text column with a number by converting each row: it would lock them all.
#[tokio::test]
async fn key_that_cannot_use_the_index_is_refused() {
    let counters = counters().await;
    run(&counters.pool, "CREATE TABLE voucher (code VARCHAR(20) PRIMARY KEY)").await;
    run(&counters.pool, "INSERT INTO voucher VALUES ('1'), ('2')").await;
    let locks = counters.db.locks().await;
    let mut tx = begin(&counters.pool).await;
    let outcome = locks.row_of("voucher", "code", 1_i64).lock(&mut tx).await;
    match DATABASE {
        Database::MySql | Database::MariaDb => {
            let error = outcome.expect_err("all rows would be locked");
            assert!(matches!(cause(&error), RowError::KeyType { .. }), "{error}");
            locks.row_of("voucher", "code", "1".to_owned()).lock(&mut tx).await.expect("text is right");
        }
        // It refuses to compare text with a number.
        Database::Postgres => assert!(matches!(outcome, Err(Error::Database { .. })), "{outcome:?}"),
        // The column's affinity makes text of it.
        Database::Sqlite => outcome.expect("found"),
    }
}

/// Twenty vouchers, of ids 0 to 19, with a column of each class.
async fn vouchers(counters: &Counters) {
    let table = match DATABASE {
        Database::Postgres => {
            "CREATE TABLE voucher (id BIGINT PRIMARY KEY, code TEXT NOT NULL UNIQUE, tag BYTEA NOT NULL UNIQUE,
                                   price NUMERIC(9, 2) NOT NULL UNIQUE)"
        }
        Database::Sqlite => {
            "CREATE TABLE voucher (id INTEGER PRIMARY KEY, code TEXT NOT NULL UNIQUE, tag BLOB NOT NULL UNIQUE,
                                   price NUMERIC NOT NULL UNIQUE)"
        }
        _ => {
            "CREATE TABLE voucher (id BIGINT PRIMARY KEY, code VARCHAR(20) NOT NULL UNIQUE, tag VARBINARY(20) NOT NULL UNIQUE,
                                   price DECIMAL(9, 2) NOT NULL UNIQUE)"
        }
    };
    run(&counters.pool, table).await;
    for id in 0..20 {
        let tag = match DATABASE {
            Database::Postgres => format!("'tag{id}'::bytea"),
            Database::Sqlite => format!("CAST('tag{id}' AS BLOB)"),
            _ => format!("'tag{id}'"),
        };
        let sql = format!("INSERT INTO voucher (id, code, tag, price) VALUES ({id}, 'code{id}', {tag}, {id}.5)");
        sqlx::query(AssertSqlSafe(sql)).execute(&counters.pool).await.expect("a voucher");
    }
}

/// Returns the number of vouchers that another session could lock.
async fn free_vouchers(counters: &Counters) -> usize {
    let mut other = counters.pool.begin().await.expect("begin");
    let free = other.fetch_all("SELECT id FROM voucher FOR UPDATE SKIP LOCKED").await.expect("rows");
    other.rollback().await.expect("rollback");
    free.len()
}

/// Asserts that a key is refused before it locks anything.
async fn assert_refused<K>(counters: &Counters, locks: &Locks, column: &str, key: K)
where
    K: std::fmt::Debug + for<'q> sqlx::Encode<'q, Sql> + sqlx::Type<Sql> + Send + Sync,
{
    let what = format!("{key:?} in {column}");
    let mut tx = begin(&counters.pool).await;
    let error = locks.row_of("voucher", column, key).lock(&mut tx).await.expect_err(&what);
    match DATABASE {
        Database::MySql | Database::MariaDb => {
            assert!(matches!(cause(&error), RowError::KeyType { .. }), "{what}: {error}");
            assert_eq!(free_vouchers(counters).await, 20, "{what}");
        }
        // It compares no values of different types.
        Database::Postgres => {
            assert!(matches!(error, Error::Database { .. }), "{what}: {error}");
            assert_eq!(free_vouchers(counters).await, 20, "{what}");
        }
        // A value of another class is equal to none.
        Database::Sqlite => assert_eq!(cause(&error), &RowError::NoSuchRow, "{what}"),
    }
}

#[tokio::test]
async fn key_of_another_class_locks_no_row() {
    let counters = counters().await;
    vouchers(&counters).await;
    let locks = counters.db.locks().await;
    for key in ["7abc", "abc", "", "0x7"] {
        assert_refused(&counters, &locks, "id", key.to_owned()).await;
        assert_refused(&counters, &locks, "price", key.to_owned()).await;
    }
    assert_refused(&counters, &locks, "code", 7_i64).await;
    assert_refused(&counters, &locks, "code", 7.5_f64).await;
    assert_refused(&counters, &locks, "tag", 7_i64).await;
    assert_refused(&counters, &locks, "code", b"code7".to_vec()).await;
}

#[tokio::test]
async fn key_of_the_columns_class_locks_one_row() {
    let counters = counters().await;
    vouchers(&counters).await;
    let locks = counters.db.locks().await;
    if DATABASE == Database::Sqlite {
        let mut tx = begin(&counters.pool).await;
        locks.row_of("voucher", "tag", b"tag7".to_vec()).lock(&mut tx).await.expect("bytes");
        locks.row_of("voucher", "code", "code7".to_owned()).lock(&mut tx).await.expect("text");
        drop(tx);
        return one_writer_locks_everything().await;
    }
    macro_rules! assert_locks_one {
        ($column:literal, $key:expr) => {
            let mut tx = begin(&counters.pool).await;
            locks.row_of("voucher", $column, $key).lock(&mut tx).await.unwrap_or_else(|e| panic!("{}: {e}", $column));
            assert_eq!(free_vouchers(&counters).await, 19, "{}", $column);
            tx.rollback().await.expect("rollback");
        };
    }
    assert_locks_one!("id", 7_i64);
    assert_locks_one!("id", 7_i32);
    assert_locks_one!("id", 7_i16);
    assert_locks_one!("code", "code7".to_owned());
    assert_locks_one!("tag", b"tag7".to_vec());
}

/// Each statement makes a unique index that does not lead to one row alone, or that the database
/// does not use.
#[tokio::test]
async fn unique_index_that_cannot_be_used_is_refused() {
    let counters = counters().await;
    vouchers(&counters).await;
    let (tables, reason): (&[&'static str], &[&str]) = match DATABASE {
        Database::MySql => (
            &[
                "CREATE TABLE a (id SERIAL PRIMARY KEY, code VARCHAR(20) NOT NULL, UNIQUE KEY by_code (code) INVISIBLE)",
                "CREATE TABLE b (code VARCHAR(20) NOT NULL, UNIQUE KEY by_code (code(6)))",
            ],
            &["invisible", "part of the column"],
        ),
        Database::MariaDb => (
            &[
                "CREATE TABLE a (id SERIAL PRIMARY KEY, code VARCHAR(20) NOT NULL, UNIQUE KEY by_code (code) IGNORED)",
                "CREATE TABLE b (code VARCHAR(20) NOT NULL, UNIQUE KEY by_code (code(6)))",
                "CREATE TABLE c (code TEXT NOT NULL, UNIQUE KEY by_code (code))",
            ],
            &["ignored", "part of the column", "hash"],
        ),
        Database::Postgres => (
            &[
                "CREATE TABLE a (code TEXT NOT NULL UNIQUE DEFERRABLE)",
                "CREATE TABLE b (code TEXT NOT NULL); CREATE UNIQUE INDEX b_code ON b (lower(code))",
                "CREATE TABLE c (code TEXT NOT NULL); CREATE UNIQUE INDEX c_code ON c (code) WHERE code > 'm'",
            ],
            &["no unique index"; 3],
        ),
        Database::Sqlite => (
            &[
                "CREATE TABLE a (code TEXT NOT NULL); CREATE UNIQUE INDEX a_code ON a (lower(code))",
                "CREATE TABLE b (code TEXT NOT NULL); CREATE UNIQUE INDEX b_code ON b (code) WHERE code > 'm'",
            ],
            &["no unique index"; 2],
        ),
    };
    let locks = counters.db.locks().await;
    for ((sql, reason), table) in tables.iter().zip(reason).zip(["a", "b", "c"]) {
        sqlx::raw_sql(*sql).execute(&counters.pool).await.expect(sql);
        let copy = format!("INSERT INTO {table} (code) SELECT code FROM voucher");
        sqlx::query(AssertSqlSafe(copy)).execute(&counters.pool).await.expect("rows");
        let mut tx = begin(&counters.pool).await;
        let error = locks.row_of(table, "code", "code7".to_owned()).lock(&mut tx).await.expect_err(sql);
        assert!(cause(&error).to_string().contains(reason), "{sql}: {error}");
    }
}

/// MyISAM accepts the statement and locks nothing.
#[tokio::test]
async fn table_whose_engine_locks_no_rows_is_refused() {
    let counters = counters().await;
    let locks = counters.db.locks().await;
    if !DATABASE.is_mysql() {
        // All tables have row locks there, except views.
        run(&counters.pool, "CREATE VIEW counted AS SELECT id, value FROM counter").await;
        let mut tx = begin(&counters.pool).await;
        let error = locks.row_of("counted", "id", 1_i64).lock(&mut tx).await.expect_err("a view has no index");
        assert_eq!(cause(&error), &RowError::NotUnique { column: "id".into() });
        return;
    }
    run(&counters.pool, "CREATE TABLE old (id BIGINT PRIMARY KEY) ENGINE = MyISAM").await;
    let mut tx = begin(&counters.pool).await;
    let error = locks.row_of("old", "id", 1_i64).lock(&mut tx).await.expect_err("it locks tables only");
    assert_eq!(cause(&error), &RowError::NoRowLocks { engine: "MyISAM".into() });
}

#[tokio::test]
async fn odd_names_of_tables_and_columns_are_quoted() {
    let counters = counters().await;
    let (table, column) = ("the \"odd` 'one", "or`d\"er");
    let quote = |name: &str| match DATABASE {
        Database::MySql | Database::MariaDb => format!("`{}`", name.replace('`', "``")),
        _ => format!("\"{}\"", name.replace('"', "\"\"")),
    };
    let (t, c) = (quote(table), quote(column));
    for sql in [format!("CREATE TABLE {t} ({c} BIGINT PRIMARY KEY)"), format!("INSERT INTO {t} VALUES (1), (2)")] {
        sqlx::query(AssertSqlSafe(sql)).execute(&counters.pool).await.expect("an odd table");
    }
    let locks = counters.db.locks().await;
    let mut tx = begin(&counters.pool).await;
    locks.row_of(table, column, 1_i64).lock(&mut tx).await.expect("lock");
    let found: Vec<i64> = locks.rows_of(table, column, [2_i64, 1, 7]).lock(&mut tx).await.expect("lock");
    assert_eq!(found, [1, 2]);
    let schema: String = match DATABASE {
        Database::Postgres => {
            sqlx::query_scalar("SELECT current_schema()::text").fetch_one(&mut *tx).await.expect("a schema")
        }
        Database::Sqlite => "main".into(),
        _ => sqlx::query_scalar("SELECT CAST(DATABASE() AS CHAR)").fetch_one(&mut *tx).await.expect("a schema"),
    };
    locks.row_of(format!("{schema}.counter"), "id", 1_i64).lock(&mut tx).await.expect("with its schema");
}

/// A lock of one row reads one row, by the unique index, and locks no other: the counters of the
/// server show it.
#[tokio::test]
async fn row_lock_uses_the_unique_index() {
    let counters = counters().await;
    if DATABASE == Database::Sqlite {
        // The plan shows which rows are read.
        let plan =
            sqlx::query("EXPLAIN QUERY PLAN SELECT id FROM counter WHERE id = 1").fetch_one(&counters.pool).await;
        let plan: String = plan.expect("a plan").get("detail");
        assert!(plan.starts_with("SEARCH counter USING INTEGER PRIMARY KEY"), "{plan}");
        return;
    }
    let rows = match DATABASE {
        Database::Postgres => "SELECT 'n/' || i AS name, i AS id FROM generate_series(10, 20000) AS i",
        _ => {
            "SELECT CONCAT('n/', i.a * 1000 + j.a) AS name, i.a * 1000 + j.a AS id
               FROM JSON_TABLE(CONCAT('[', REPEAT('0,', 18), '0]'), '$[*]' COLUMNS (a FOR ORDINALITY)) AS i
               JOIN JSON_TABLE(CONCAT('[', REPEAT('0,', 998), '0]'), '$[*]' COLUMNS (a FOR ORDINALITY)) AS j"
        }
    };
    for insert in [
        format!("INSERT INTO counter (id, value) SELECT id, 0 FROM ({rows}) AS r"),
        format!("INSERT INTO sqlock_row (name, seen_at) SELECT name, 9000000000000000 FROM ({rows}) AS r"),
    ] {
        sqlx::query(AssertSqlSafe(insert)).execute(&counters.pool).await.expect("many rows");
    }
    let analyze = if DATABASE == Database::Postgres {
        "ANALYZE counter, sqlock_row"
    } else {
        "ANALYZE TABLE counter, sqlock_row"
    };
    run(&counters.pool, analyze).await;
    let locks = counters.db.locks().await;
    for level in levels() {
        let app = counters.at(level).await;
        // Once, so that the catalogue has been asked.
        locks.row_of("counter", "id", 1_i64).lock(&mut app.begin().await).await.expect("lock");
        let mut tx = app.begin().await;
        let before = self::before(&mut tx, "counter").await;
        locks.row_of("counter", "id", 1010_i64).lock(&mut tx).await.expect("lock");
        assert_eq!(touched(&mut tx, "counter").await, before + 1, "{level}: by key");
        tx.rollback().await.expect("rollback");
        let mut tx = app.begin().await;
        let before = self::before(&mut tx, "sqlock_row").await;
        locks.row("n/1010").lock(&mut tx).await.expect("lock");
        // At levels where PostgreSQL would not report an earlier holder to waiters, the lock also
        // writes the row.
        let marked = DATABASE == Database::Postgres && ["REPEATABLE READ", "SERIALIZABLE"].contains(level);
        assert_eq!(touched(&mut tx, "sqlock_row").await, before + 1 + i64::from(marked), "{level}: by name");
        tx.rollback().await.expect("rollback");
        let mut tx = app.begin().await;
        let before = self::before(&mut tx, "counter").await;
        let found = locks.rows_of("counter", "id", [5005_i64, 1010, 3003]).lock(&mut tx).await.expect("lock");
        assert_eq!(found, [1010, 3003, 5005]);
        assert_eq!(touched(&mut tx, "counter").await, before + 3, "{level}: by three keys");
    }
}

/// What the catalogue said is remembered.
#[tokio::test]
async fn index_that_was_renamed_is_found_again() {
    let counters = counters().await;
    run(&counters.pool, "CREATE TABLE seat (id BIGINT NOT NULL, note BIGINT)").await;
    run(&counters.pool, "CREATE UNIQUE INDEX first_name ON seat (id)").await;
    run(&counters.pool, "INSERT INTO seat (id) VALUES (1), (2)").await;
    let locks = counters.db.locks().await;
    let lock = async || -> Vec<i64> {
        let mut tx = begin(&counters.pool).await;
        let found = locks.rows_of("seat", "id", [2_i64, 1]).lock(&mut tx).await.expect("lock");
        locks.row_of("seat", "id", 1_i64).lock(&mut tx).await.expect("lock");
        tx.commit().await.expect("commit");
        found
    };
    assert_eq!(lock().await, [1, 2]);
    run(&counters.pool, "CREATE UNIQUE INDEX second_name ON seat (id)").await;
    run(&counters.pool, if DATABASE.is_mysql() { "DROP INDEX first_name ON seat" } else { "DROP INDEX first_name" })
        .await;
    assert_eq!(lock().await, [1, 2]);
}

/// A parent and its children, as an order and its items.
async fn orders(counters: &Counters) {
    run(&counters.pool, "CREATE TABLE orders (id BIGINT PRIMARY KEY, items BIGINT NOT NULL)").await;
    run(&counters.pool, "CREATE TABLE item (id BIGINT PRIMARY KEY, order_id BIGINT NOT NULL, FOREIGN KEY (order_id) REFERENCES orders (id))")
        .await;
    run(&counters.pool, "INSERT INTO orders VALUES (1, 0)").await;
}

/// The insert of a child locks its parent against a change of the key. MySQL and MariaDB have no
/// lock on a row that leaves room for that: there the transactions deadlock, and are run again.
#[tokio::test]
async fn parent_lock_after_child_insert_does_not_deadlock() {
    const TASKS: i64 = 8;
    let counters = counters().await;
    orders(&counters).await;
    let locks = counters.db.locks().await;
    let (runs, inserted) = (Arc::new(AtomicU32::new(0)), Arc::new(Barrier::new(TASKS as usize)));
    let mut tasks = JoinSet::new();
    for id in 0..TASKS {
        let (pool, locks, runs, inserted) =
            (counters.pool.clone(), locks.clone(), Arc::clone(&runs), Arc::clone(&inserted));
        tasks.spawn(async move {
            let first = AtomicBool::new(true);
            let retry = Retry::new().attempts(u32::MAX).within(SOON);
            let done = retry.run(&pool, async |tx| {
                runs.fetch_add(1, Ordering::SeqCst);
                let item = format!("INSERT INTO item VALUES ({id}, 1)");
                sqlx::query(AssertSqlSafe(item)).execute(&mut **tx).await?;
                if first.swap(false, Ordering::SeqCst) && DATABASE != Database::Sqlite {
                    // All have inserted, and none has locked.
                    inserted.wait().await;
                }
                locks.row_of("orders", "id", 1_i64).lock(&mut *tx).await?;
                sqlx::query("UPDATE orders SET items = items + 1 WHERE id = 1").execute(&mut **tx).await?;
                Ok::<_, Error>(())
            });
            done.await.expect("it gets through");
        });
    }
    soon("all orders", tasks.join_all()).await;
    let items: i64 = sqlx::query_scalar("SELECT items FROM orders").fetch_one(&counters.pool).await.expect("a count");
    assert_eq!(items, TASKS);
    let runs = i64::from(runs.load(Ordering::SeqCst));
    if DATABASE.is_mysql() {
        assert!(runs > TASKS, "no deadlock: this proves nothing");
    } else {
        assert_eq!(runs, TASKS, "deadlocks");
    }
}

#[tokio::test]
async fn key_update_keeps_children_out() {
    let counters = counters().await;
    orders(&counters).await;
    let locks = counters.db.locks().await;
    let pool = impatient(&counters.db.url).await;
    let adds_item = async || {
        let mut conn = pool.acquire().await.expect("a connection");
        let bound = match DATABASE {
            Database::Postgres => "SET lock_timeout = '200ms'",
            Database::Sqlite => "SELECT 1",
            _ => "SET innodb_lock_wait_timeout = 1",
        };
        conn.execute(bound).await.expect(bound);
        conn.execute("INSERT INTO item SELECT COUNT(*), 1 FROM item").await.is_ok()
    };
    assert!(adds_item().await, "nobody has locked the order");
    for key_update in [false, true] {
        let mut tx = begin(&counters.pool).await;
        let row = locks.row_of("orders", "id", 1_i64);
        let row = if key_update { row.key_update() } else { row };
        row.lock(&mut tx).await.expect("lock");
        assert_eq!(adds_item().await, DATABASE == Database::Postgres && !key_update, "{key_update}");
        let found = match key_update {
            false => locks.rows_of("orders", "id", [1_i64]).nowait().lock(&mut tx).await,
            true => locks.rows_of("orders", "id", [1_i64]).key_update().nowait().lock(&mut tx).await,
        };
        assert_eq!(found.expect("ours"), [1]);
        let mut rival = pool.begin().await.expect("begin");
        let rows = locks.rows_where("orders", "id").key_update().skip_locked();
        let found: Result<Vec<i64>, Error> = rows
            .lock(&mut rival, |sql| {
                sql.push("id = 1");
            })
            .await;
        assert!(found.is_ok_and(|found| found.is_empty()) != (DATABASE == Database::Sqlite), "the row is taken");
        drop(rival);
        tx.commit().await.expect("commit");
    }
}

/// On PostgreSQL the inserted row is not in the snapshot of the statement that waits.
#[tokio::test]
async fn replaced_row_is_locked_or_a_conflict() {
    let counters = counters().await;
    let locks = counters.db.locks().await;
    let mut replacing = begin(&counters.pool).await;
    for sql in ["DELETE FROM counter", "INSERT INTO counter (id, value) VALUES (1, 7), (2, 7)"] {
        run_in(&mut replacing, sql).await;
    }
    let one = tokio::spawn({
        let (pool, locks) = (counters.pool.clone(), locks.clone());
        async move {
            let mut tx = begin(&pool).await;
            let locked = locks.row_of("counter", "id", 1_i64).lock(&mut tx).await;
            tx.rollback().await.expect("rollback");
            locked.map(|()| vec![1])
        }
    });
    let several = tokio::spawn({
        let (pool, locks) = (counters.pool.clone(), locks.clone());
        async move {
            let mut tx = begin(&pool).await;
            let locked = locks.rows_of("counter", "id", [2_i64, 9]).lock(&mut tx).await;
            tx.rollback().await.expect("rollback");
            locked
        }
    });
    if DATABASE == Database::Postgres {
        let pid: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut *replacing).await.expect("a pid");
        let waiters = format!("SELECT count(*) FROM pg_stat_activity WHERE {pid} = ANY (pg_blocking_pids(pid))");
        until("both wait", async || {
            let waiting = sqlx::query_scalar(AssertSqlSafe(waiters.as_str())).fetch_one(&counters.pool).await;
            waiting.is_ok_and(|waiting: i64| waiting == 2)
        })
        .await;
    }
    replacing.commit().await.expect("commit");
    for (waiter, key) in [(one, 1), (several, 2)] {
        match soon("the end of the wait", waiter).await.expect("no panic") {
            Ok(found) => assert_eq!(found, [key]),
            Err(error) => assert!(error.is_conflict(), "{error}"),
        }
    }
}
