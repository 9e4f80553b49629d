//! Several rows at once: queues, limits, conditions, and the order in which they are locked.

use super::*;

#[tokio::test]
async fn skip_locked_workers_share_a_queue() {
    let counters = counters().await;
    run(&counters.pool, "CREATE TABLE job (id BIGINT PRIMARY KEY, tenant BIGINT NOT NULL, done BIGINT NOT NULL)").await;
    for id in 0..60 {
        let sql = format!("INSERT INTO job VALUES ({id}, {}, 0)", id % 2);
        sqlx::query(AssertSqlSafe(sql)).execute(&counters.pool).await.expect("a job");
    }
    let mut workers = JoinSet::new();
    for _ in 0..4 {
        let (pool, locks) = (counters.at(levels()[1]).await, counters.db.locks().await);
        workers.spawn(async move {
            let mut most = 0;
            loop {
                let mut tx = pool.begin().await;
                let ready = locks.rows_where("job", "id").skip_locked().limit(3);
                let jobs: Vec<i64> = ready
                    .lock(&mut tx, |sql| {
                        sql.push("done = 0 AND tenant = ").push_bind(1_i64).push(" ORDER BY id");
                    })
                    .await
                    .expect("jobs");
                most = most.max(jobs.len());
                if jobs.is_empty() {
                    return most;
                }
                for id in jobs {
                    let sql = format!("UPDATE job SET done = done + 1 WHERE id = {id}");
                    sqlx::query(AssertSqlSafe(sql)).execute(&mut *tx).await.expect("the job");
                }
                tx.commit().await.expect("commit");
            }
        });
    }
    let most = soon("all jobs", workers.join_all()).await;
    assert_eq!(most.into_iter().max(), Some(3), "the limit");
    let rows = sqlx::query("SELECT tenant, done, COUNT(*) FROM job GROUP BY tenant, done ORDER BY tenant")
        .fetch_all(&counters.pool)
        .await
        .expect("counts");
    let counts: Vec<(i64, i64, i64)> = rows.iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    assert_eq!(counts, [(0, 0, 30), (1, 1, 30)], "each job of the tenant once, and no other");
}

#[tokio::test]
async fn limit_counts_rows_that_are_not_locked() {
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    let mut holder = begin(&counters.pool).await;
    ours.row_of("counter", "id", 1_i64).lock(&mut holder).await.expect("lock");
    if DATABASE == Database::Sqlite {
        let two: Vec<i64> =
            ours.rows_of("counter", "id", [2_i64, 1]).skip_locked().limit(1).lock(&mut holder).await.expect("lock");
        assert_eq!(two, [1], "nobody else has any, and the limit counts in order");
        return;
    }
    let mut tx = begin(&counters.pool).await;
    let free = theirs.rows_of("counter", "id", [1_i64, 2]).skip_locked().limit(1).lock(&mut tx).await.expect("lock");
    assert_eq!(free, [2]);
    let none: Vec<i64> =
        theirs.rows_of("counter", "id", Vec::<i64>::new()).lock(&mut tx).await.expect("nothing to lock");
    assert!(none.is_empty());
}

#[tokio::test]
async fn shared_row_locks_exclude_exclusive_ones() {
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    let mut first = begin(&counters.pool).await;
    if DATABASE == Database::Sqlite {
        for outcome in [
            ours.row("a").shared().lock(&mut first).await,
            ours.row_of("counter", "id", 1_i64).shared().lock(&mut first).await,
        ] {
            assert!(matches!(outcome, Err(Error::Unsupported { .. })), "{outcome:?}");
        }
        return;
    }
    let mut second = begin(&counters.pool).await;
    ours.row("a").shared().lock(&mut first).await.expect("lock");
    assert!(theirs.row("a").shared().try_lock(&mut second).await.expect("try"), "shared with the first");
    theirs.row_of("counter", "id", 1_i64).shared().lock(&mut first).await.expect("lock");
    let shared = theirs.row_of("counter", "id", 1_i64).shared().wait(SOON);
    soon("a shared lock", shared.lock(&mut second)).await.expect("lock");
    let found = theirs.rows_of("counter", "id", [1_i64]).shared().skip_locked().lock(&mut second).await.expect("lock");
    assert_eq!(found, [1]);
    let rival = Rival::on(&counters).await;
    assert!(!rival.finds_free("a").await && !rival.finds_free_row(1).await);
    first.commit().await.expect("commit");
    assert!(!rival.finds_free("a").await, "one is left");
    second.commit().await.expect("commit");
    assert!(rival.finds_free("a").await);
}

#[tokio::test]
async fn condition_ending_in_a_comment_locks() {
    let counters = counters().await;
    let (locks, rival) = (counters.db.locks().await, Rival::on(&counters).await);
    let mut tx = begin(&counters.pool).await;
    let rows = locks.rows_where("counter", "id").limit(1);
    let found: Vec<i32> = rows
        .lock(&mut tx, |sql| {
            sql.push("value = 0 ORDER BY id -- the first one");
        })
        .await
        .expect("lock");
    assert_eq!(found, [1], "the limit counts");
    assert!(!rival.finds_free_row(1).await);
}

/// `Locks::migrate` would not create it.
#[tokio::test]
async fn missing_table_of_the_caller_is_named() {
    let counters = counters().await;
    let locks = counters.db.locks().await;
    let mut tx = begin(&counters.pool).await;
    let rows = locks.rows_where("counter", "id");
    let locking = rows.lock::<_, i64>(&mut tx, |sql| {
        sql.push("id IN (SELECT id FROM nowhere)");
    });
    let error = locking.await.expect_err("there is no such table");
    assert!(matches!(error, Error::Database { .. }), "{error:?}");
    assert!(error.report().to_string().contains("nowhere"), "{}", error.report());
}

/// InnoDB may scan a table of which many rows are wanted.
#[tokio::test]
async fn several_row_locks_spare_other_rows() {
    if DATABASE == Database::Sqlite {
        return one_writer_locks_everything().await;
    }
    let counters = counters().await;
    run(&counters.pool, "INSERT INTO counter (id, value) VALUES (3, 0), (4, 0)").await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    for level in levels() {
        let app = counters.at(level).await;
        let (mut first, mut second) = (app.begin().await, app.begin().await);
        let found = ours.rows_of("counter", "id", [2_i64, 1, 2]).lock(&mut first).await.expect("lock");
        assert_eq!(found, [1, 2], "{level}");
        let others = theirs.rows_of("counter", "id", [4_i64, 3, 9]).nowait().lock(&mut second).await;
        assert_eq!(others.unwrap_or_else(|e| panic!("{level}: {e}")), [3, 4]);
        let none =
            theirs.rows_of("counter", "id", [1_i64]).limit(0).lock(&mut second).await.expect("nothing asked for");
        assert!(none.is_empty());
        first.rollback().await.expect("rollback");
        second.rollback().await.expect("rollback");
    }
}

/// The case of the keys must not matter: otherwise two transactions that lock ("a", "B") and ("A",
/// "b") would deadlock.
#[tokio::test]
async fn rows_are_locked_in_collation_order() {
    if !DATABASE.is_mysql() {
        return; // There the statement itself sorts, by the column's collation.
    }
    let counters = counters().await;
    run(&counters.pool, "CREATE TABLE user_name (name VARCHAR(20) PRIMARY KEY) DEFAULT CHARACTER SET latin1").await;
    run(&counters.pool, "INSERT INTO user_name VALUES ('a'), ('b'), ('c')").await;
    let locks = counters.db.locks().await;
    let texts = |keys: [&str; 3]| keys.map(str::to_owned);
    let mut tx = begin(&counters.pool).await;
    let found = locks.rows_of("user_name", "name", texts(["c", "B", "a"])).lock(&mut tx).await.expect("lock");
    assert_eq!(found, ["a", "B", "c"]);
    // Both name one row, which is returned and counted once.
    let twice = locks.rows_of("user_name", "name", ["b", "a", "A"].map(str::to_owned)).limit(2);
    assert_eq!(twice.lock(&mut tx).await.expect("lock"), ["A", "b"]);
    tx.rollback().await.expect("rollback");

    let mut holder = begin(&counters.pool).await;
    locks.row_of("user_name", "name", "b".to_owned()).lock(&mut holder).await.expect("lock");
    let waiting = tokio::spawn({
        let (locks, pool) = (locks.clone(), counters.pool.clone());
        async move {
            let mut tx = begin(&pool).await;
            let locked = locks.rows_of("user_name", "name", texts(["a", "B", "C"])).lock(&mut tx).await;
            tx.rollback().await.expect("rollback");
            locked.expect("lock").len()
        }
    });
    // It waits for "b" when it has "a", and not yet "c".
    let is_free = async |name: &str| {
        let mut tx = begin(&counters.pool).await;
        let locked = locks.row_of("user_name", "name", name.to_owned()).try_lock(&mut tx).await.expect("try");
        tx.rollback().await.expect("rollback");
        locked
    };
    soon("the first row", async {
        while is_free("a").await {
            tokio::time::sleep(A_WHILE / 30).await;
        }
    })
    .await;
    tokio::time::sleep(A_WHILE).await;
    assert!(is_free("c").await);
    holder.commit().await.expect("commit");
    assert_eq!(soon("the other one", waiting).await.expect("no panic"), 3);
}

/// PostgreSQL has all keys in one statement, MySQL and MariaDB have all texts in the one that sorts
/// them, and the build of SQLite sets its limit.
#[tokio::test]
async fn more_rows_than_parameters_are_refused_for_good() {
    if DATABASE == Database::Sqlite {
        return;
    }
    let counters = counters().await;
    run(&counters.pool, "CREATE TABLE thing (id VARCHAR(20) PRIMARY KEY)").await;
    let mut tx = begin(&counters.pool).await;
    let locks = counters.db.locks().await;
    let keys = (0..70_000).map(|i| i.to_string());
    let error = locks.rows_of("thing", "id", keys).lock(&mut tx).await.expect_err("too many keys");
    assert!(matches!(error, Error::Unsupported { .. }) && !error.is_retryable(), "{error}");
}
