//! The tables: created by the first client, beside the application's own, with the fewest rights.

use std::borrow::Cow;
use std::process::{Command, Stdio};
use std::time::Duration;

use sqlock::{Error, FencingToken};
use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::{AssertSqlSafe, Pool, SqlStr};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::connection_counter::ConnectionCounter;
use crate::support::server::Server;
use crate::support::{Database, SOON, TestDatabase, builder, connect, empty, fresh, soon, until};
use crate::{DATABASE, Sql};

/// Where a process of [`concurrent_migrations_create_the_tables_once`] finds its database.
const URL: &str = "SQLOCK_TEST_MIGRATE";

async fn works(locks: &sqlock::Locks) {
    let lease = soon("the grant", locks.lease("a").acquire()).await.expect("acquire");
    lease.release().await.expect("release");
}

#[tokio::test]
async fn concurrent_migrations_create_the_tables_once() {
    let db = empty().await;
    let mut processes: Vec<_> = (0..4)
        .map(|_| {
            Command::new(std::env::current_exe().expect("this program"))
                .args(["--exact", "conformance::schema::separate_process_migrates"])
                .env(URL, &db.url)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::inherit())
                .spawn()
                .expect("a process")
        })
        .collect();
    let mut clients = JoinSet::new();
    for _ in 0..12 {
        let locks = db.locks().await;
        clients.spawn(async move {
            locks.migrate().await.expect("migrate");
            works(&locks).await;
        });
    }
    // They wait for each other, which takes time on a busy machine.
    timeout(SOON * 4, clients.join_all()).await.expect("every migration ends");
    for process in &mut processes {
        assert!(process.wait().expect("the process's end").success());
    }
    let pool = db.pool().await;
    let applied: i64 =
        sqlx::query_scalar("SELECT count(*) FROM _sqlock_migrations").fetch_one(&pool).await.expect("the history");
    assert_eq!(applied, migrations());
}

/// Returns the number of migrations.
fn migrations() -> i64 {
    match DATABASE {
        Database::Postgres => 5,
        Database::MySql | Database::MariaDb => 7,
        Database::Sqlite => 3,
    }
}

/// Migrates a database of its own, unless `concurrent_migrations_create_the_tables_once` started
/// the process.
#[tokio::test]
async fn separate_process_migrates() {
    let locks = match std::env::var(URL) {
        Ok(url) => builder(connect(&url, 1).await).build(),
        Err(_) => {
            let db = empty().await;
            let locks = db.locks().await;
            locks.migrate().await.expect("migrate");
            works(&locks).await;
            return;
        }
    };
    locks.migrate().await.expect("migrate");
    works(&locks).await;
}

#[tokio::test]
async fn repeated_migration_changes_nothing() {
    let db = empty().await;
    let locks = db.locks().await;
    for _ in 0..3 {
        locks.migrate().await.expect("migrate");
    }
    let lease = locks.lease("a").acquire().await.expect("acquire");
    locks.migrate().await.expect("migrate");
    lease.extend(Duration::from_secs(60)).await.expect("still held");
    lease.release().await.expect("ours to the end");
}

/// An application's migrations, with the default history table and the same version numbers as
/// ours.
fn application(migrations: usize) -> Migrator {
    const FILES: [&str; 2] = ["CREATE TABLE application (id INT)", "ALTER TABLE application ADD COLUMN note TEXT"];
    let migrations = (1..)
        .zip(FILES)
        .take(migrations)
        .map(|(version, sql)| {
            let sql = SqlStr::from_static(sql);
            Migration::new(version, Cow::Borrowed("application"), MigrationType::Simple, sql, false)
        })
        .collect();
    Migrator::with_migrations(migrations)
}

#[tokio::test]
async fn tables_coexist_with_application_migrations() {
    for ours_first in [false, true] {
        let db = empty().await;
        let pool = db.pool_of(2).await;
        let locks = builder(pool.clone()).build();
        if ours_first {
            locks.migrate().await.expect("migrate");
        }
        application(1).run(&pool).await.expect("the application's first migration");
        locks.migrate().await.expect("migrate");
        application(2).run(&pool).await.expect("the application's second migration");
        locks.migrate().await.expect("migrate");
        application(2).run(&pool).await.expect("nothing left to do");
        sqlx::query("INSERT INTO application (id, note) VALUES (1, 'x')").execute(&pool).await.expect("insert");
        works(&locks).await;
        for (history, expected) in [("_sqlx_migrations", 2), ("_sqlock_migrations", migrations())] {
            let count = AssertSqlSafe(format!("SELECT count(*) FROM {history}"));
            let applied: i64 = sqlx::query_scalar(count).fetch_one(&pool).await.expect("the history");
            assert_eq!(applied, expected, "{history}");
        }
    }
}

/// A second set of tables in another schema would hide the first from some of its users.
#[tokio::test]
async fn tables_later_in_search_path_are_not_repeated() {
    if DATABASE != Database::Postgres {
        return; // Their tables are in the one database of the URL.
    }
    let db = fresh().await;
    let (locks, pool) = (db.locks().await, db.pool().await);
    let schema: String = sqlx::query_scalar("SELECT current_schema()::text").fetch_one(&pool).await.expect("a schema");
    let first = format!("{schema}_first");
    sqlx::query(AssertSqlSafe(format!("CREATE SCHEMA {first}"))).execute(&pool).await.expect("a schema");
    let url = db.url.replace(&format!("search_path%3D{schema}"), &format!("search_path%3D{first}%2C{schema}"));
    let other = builder(connect(&url, 1).await).build();
    for damage in ["DELETE FROM _sqlock_migrations WHERE version > 1", "DROP TABLE _sqlock_migrations"] {
        sqlx::query(damage).execute(&pool).await.expect("damaged");
        other.migrate().await.expect("migrate");
        let held = locks.lease("a").acquire().await.expect("acquire");
        assert!(other.lease("a").try_acquire().await.expect("try").is_none(), "{damage}");
        held.release().await.expect("held to the end");
    }
}

/// PostgreSQL locks a table before it finds that an index exists.
#[tokio::test]
async fn repeated_migration_does_not_stop_requests() {
    if DATABASE != Database::Postgres {
        return;
    }
    let db = fresh().await;
    let (pool, locks) = (db.pool().await, db.locks().await);
    // The tables were created by the application's own migrations.
    run(&pool, "DROP TABLE _sqlock_migrations").await;
    let mut handler = pool.begin().await.expect("begin");
    sqlx::query("LOCK TABLE sqlock_idem IN ROW EXCLUSIVE MODE").execute(&mut *handler).await.expect("a lock");
    let other = db.locks().await;
    let migration = tokio::spawn(async move { other.migrate().await });
    let waits = "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'sqlock_idem'::regclass)";
    until("the migration waits", async || sqlx::query_scalar(waits).fetch_one(&pool).await.expect("the locks")).await;
    let share = soon("the grant", locks.lease("a").shared().acquire()).await.expect("acquire");
    share.release().await.expect("held to the end");
    handler.rollback().await.expect("rollback");
    soon("the migration", migration).await.expect("no panic").expect("migrate");
}

#[tokio::test]
async fn missing_tables_are_reported_as_not_migrated() {
    let db = empty().await;
    let locks = db.locks().await;
    let answers = [
        soon("an answer", locks.lease("a").acquire()).await.map(|_| ()),
        soon("an answer", locks.lease("a").try_acquire()).await.map(|_| ()),
        soon("an answer", locks.lease("a").owner(sqlock::Owner::random()).acquire()).await.map(|_| ()),
        soon("an answer", locks.lease("a").run(async |_| panic!("nothing was acquired"))).await,
        soon("an answer", locks.list("")).await.map(|_| ()),
        soon("an answer", locks.inspect("a")).await.map(|_| ()),
        soon("an answer", locks.evict("a", FencingToken::new(1).expect("a token"))).await.map(|_| ()),
        soon("an answer", locks.sweeper().sweep()).await.map(|_| ()),
    ];
    for answer in answers {
        let error = answer.expect_err("there are no tables");
        assert!(matches!(error, Error::NotMigrated { .. }), "{error:?}");
        assert!(error.to_string().contains("migrate"), "it says what to do: {error}");
        assert!(error.to_string().contains("search_path"), "it names the usual trap: {error}");
        assert!(!error.is_retryable());
    }
    // All at once, so that they fail in a batch.
    let mut many = JoinSet::new();
    for i in 0..20 {
        many.spawn(locks.lease(format!("name/{i}")).acquire());
    }
    for answer in soon("the answers", many.join_all()).await {
        assert!(matches!(answer, Err(Error::NotMigrated { .. })), "{answer:?}");
    }
    // The client stays usable.
    locks.migrate().await.expect("migrate");
    works(&locks).await;
}

/// A user of the shared server for one test.
pub(super) struct Restricted {
    name: String,
    pub(super) db: TestDatabase,
    admin: Pool<Sql>,
    /// The URL of the restricted user.
    pub(super) url: String,
}

impl Restricted {
    /// Creates a user that may only connect.
    pub(super) async fn on(db: TestDatabase) -> Self {
        let admin = db.pool_of(1).await;
        let place = if DATABASE == Database::Postgres { "SELECT current_schema()" } else { "SELECT DATABASE()" };
        let place: String = sqlx::query_scalar(place).fetch_one(&admin).await.expect("the test's own place");
        let name = format!("u{place}");
        if DATABASE == Database::Postgres {
            run(&admin, &format!("CREATE ROLE {name} LOGIN PASSWORD '{name}'")).await;
            run(&admin, &format!("GRANT USAGE ON SCHEMA {place} TO {name}")).await;
        } else {
            // No password, because this test is not about authentication over TCP without TLS.
            run(&admin, &format!("CREATE USER {name}@'%'")).await;
        }
        let (scheme, rest) = db.url.split_once("://").expect("a URL");
        let host = rest.split_once('@').map_or(rest, |(_, host)| host);
        let password = if DATABASE == Database::Postgres { format!(":{name}") } else { String::new() };
        let url = format!("{scheme}://{name}{password}@{host}");
        Self { name, db, admin, url }
    }

    pub(super) async fn grant(&self, rights: &str) {
        let Self { name, admin, .. } = self;
        if DATABASE == Database::Postgres {
            let place: String =
                sqlx::query_scalar("SELECT current_schema()").fetch_one(admin).await.expect("the schema");
            run(admin, &format!("GRANT {rights} ON ALL TABLES IN SCHEMA {place} TO {name}")).await;
        } else {
            let place: String = sqlx::query_scalar("SELECT DATABASE()").fetch_one(admin).await.expect("the database");
            run(admin, &format!("GRANT {rights} ON {place}.* TO {name}@'%'")).await;
        }
    }

    pub(super) async fn grant_on(&self, rights: &str, table: &str) {
        let Self { name, admin, .. } = self;
        let user = if DATABASE == Database::Postgres { name.clone() } else { format!("{name}@'%'") };
        run(admin, &format!("GRANT {rights} ON {table} TO {user}")).await;
    }

    pub(super) async fn drop(self) {
        let Self { name, admin, .. } = self;
        if DATABASE == Database::Postgres {
            run(&admin, &format!("DROP OWNED BY {name}")).await;
            run(&admin, &format!("DROP ROLE {name}")).await;
        } else {
            run(&admin, &format!("DROP USER {name}@'%'")).await;
        }
    }
}

async fn run(pool: &Pool<Sql>, sql: &str) {
    sqlx::query(AssertSqlSafe(sql.to_owned())).execute(pool).await.expect(sql);
}

#[tokio::test]
async fn existing_tables_need_no_create_right() {
    if DATABASE == Database::Sqlite {
        // SQLite has no users; a read-only connection is the closest. Reading suffices to find that
        // nothing is to do.
        let db = empty().await;
        db.locks().await.migrate().await.expect("migrate");
        let url = db.url.replace("mode=rwc", "mode=ro");
        assert_ne!(url, db.url);
        let reader = builder(connect(&url, 1).await).build();
        reader.migrate().await.expect("there is nothing to do");
        assert_eq!(reader.list("").await.expect("list"), []);
        return;
    }
    let user = Restricted::on(empty().await).await;
    let admin = user.db.locks().await;
    admin.migrate().await.expect("migrate");

    user.grant("SELECT").await;
    let pool = connect(&user.url, 2).await;
    builder(pool.clone()).build().migrate().await.expect("there is nothing to do, and reading finds that out");

    user.grant("INSERT, UPDATE, DELETE").await;
    let locks = builder(pool.clone()).build();
    locks.migrate().await.expect("migrate");
    let lease = locks.lease("a").acquire().await.expect("acquire");
    let mut tx = pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    tx.commit().await.expect("commit");
    lease.extend(Duration::from_secs(60)).await.expect("extend");
    let token = lease.token();
    assert_eq!(locks.list("").await.expect("list").len(), 1);
    assert!(locks.evict("a", token).await.expect("evict"));
    drop(lease);
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(locks.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep"), 1);
    works(&locks).await;
    locks.shutdown().await.expect("shutdown");
    pool.close().await;
    user.drop().await;
}

#[tokio::test]
async fn failed_migration_leaves_no_lock_behind() {
    let mut db = empty().await;
    let counter = ConnectionCounter::of(&mut db).await;
    if DATABASE == Database::Sqlite {
        db.pool().await.acquire().await.expect("the file exists now");
        let reader = builder(connect(&db.url.replace("mode=rwc", "mode=ro"), 1).await).build();
        let error = soon("the failure", reader.migrate()).await.expect_err("read only");
        assert!(matches!(error, Error::Migrate { .. }), "{error:?}");
        counter.no_transactions().await;
        db.locks().await.migrate().await.expect("nobody is in the way");
        return;
    }
    let user = Restricted::on(db).await;
    // On MySQL a user without any right to a database does not see it.
    if DATABASE.is_mysql() {
        user.grant("SELECT").await;
    }
    let pool = connect(&user.url, 2).await;
    let locks = builder(pool.clone()).build();
    for _ in 0..3 {
        let error = soon("the failure", locks.migrate()).await.expect_err("no right to create tables");
        assert!(matches!(error, Error::Migrate { .. }), "{error:?}");
        assert!(!error.report().to_string().contains("://"), "{error:?}");
    }
    assert_eq!(counter.advisory_locks().await, 0);
    counter.no_transactions().await;
    // Users with the right can migrate, with sqlx's migrations or those of this crate.
    let admin = user.db.pool_of(1).await;
    soon("the application's migration", application(2).run(&admin)).await.expect("nobody holds the migrator's lock");
    let admin = user.db.locks().await;
    soon("the migration", admin.migrate()).await.expect("migrate");
    works(&admin).await;
    assert_eq!(counter.advisory_locks().await, 0);
    pool.close().await;
    user.drop().await;
}

#[tokio::test]
async fn interrupted_migration_is_repaired() {
    let db = empty().await;
    let pool = db.pool().await;
    let locks = db.locks().await;
    locks.migrate().await.expect("migrate");
    if DATABASE.is_mysql() {
        // The state after a migrator was killed between its record and its table: DDL commits
        // implicitly.
        run(&pool, "DROP TABLE sqlock_entry").await;
        run(
            &pool,
            "UPDATE _sqlock_migrations SET success = FALSE, installed_on = NOW() - INTERVAL 1 MINUTE WHERE version = 3",
        )
        .await;
    } else {
        // Record and table are one transaction, so both exist or neither.
        run(&pool, "DROP VIEW sqlock_holders").await;
        run(&pool, "DROP TABLE sqlock_lease").await;
        run(&pool, "DELETE FROM _sqlock_migrations").await;
    }
    assert!(matches!(locks.lease("a").acquire().await, Err(Error::NotMigrated { .. })));
    // Two migrate at once, because all processes restart after an incident.
    let other = db.locks().await;
    let (one, two) = soon("the repair", async { tokio::join!(locks.migrate(), other.migrate()) }).await;
    one.and(two).expect("migrate");
    works(&locks).await;
    let unfinished = if DATABASE.is_mysql() { "NOT success" } else { "success = false" };
    let unfinished = AssertSqlSafe(format!("SELECT count(*) FROM _sqlock_migrations WHERE {unfinished}"));
    let unfinished: i64 = sqlx::query_scalar(unfinished).fetch_one(&pool).await.expect("the history");
    assert_eq!(unfinished, 0);
}

/// Settings of MySQL and MariaDB that change the effect of sqlx's own statements.
#[tokio::test]
async fn migration_works_whatever_the_server_settings() {
    let Some(kind) = DATABASE.server().filter(|_| DATABASE.is_mysql()) else {
        return;
    };
    let server = Server::start(kind);
    let db = TestDatabase::at(server.url());
    let admin = db.pool_of(1).await;
    for setting in ["sql_select_limit = 2", "sql_safe_updates = 1", "completion_type = 1"] {
        run(&admin, &format!("SET GLOBAL {setting}")).await;
    }
    for _ in 0..2 {
        let locks = db.locks().await;
        soon("the migration", locks.migrate()).await.expect("migrate");
        works(&locks).await;
    }
}

#[tokio::test]
async fn older_schema_is_brought_up_to_date() {
    let db = empty().await;
    let (pool, locks) = (db.pool().await, db.locks().await);
    locks.migrate().await.expect("migrate");
    // The state after a release without the view.
    run(&pool, "DROP VIEW sqlock_holders").await;
    run(&pool, &format!("DELETE FROM _sqlock_migrations WHERE version = {}", migrations())).await;
    let lease = locks.lease("a").acquire().await.expect("acquire");
    locks.migrate().await.expect("migrate");
    let seen: i64 =
        sqlx::query_scalar("SELECT count(*) FROM sqlock_holders").fetch_one(&pool).await.expect("the view is back");
    assert_eq!(seen, 1);
    lease.release().await.expect("ours to the end");
    let applied: i64 =
        sqlx::query_scalar("SELECT count(*) FROM _sqlock_migrations").fetch_one(&pool).await.expect("the history");
    assert_eq!(applied, migrations());
}

/// Records a migration that this release does not know.
async fn record(pool: &Pool<Sql>, version: i64) {
    let columns = "description, installed_on, success, checksum, execution_time";
    let sql = format!(
        "INSERT INTO _sqlock_migrations (version, {columns}) SELECT {version}, {columns} FROM _sqlock_migrations WHERE version = 1"
    );
    run(pool, &sql).await;
}

/// A rolling upgrade: programs of two releases use the tables, and the earlier one is started
/// again.
#[tokio::test]
async fn later_schema_of_one_generation_is_accepted() {
    let db = empty().await;
    let (pool, locks) = (db.pool().await, db.locks().await);
    locks.migrate().await.expect("migrate");
    record(&pool, 999).await;
    locks.migrate().await.expect("nothing to do");
    works(&locks).await;
    // The migration of the later program is still running.
    run(&pool, "UPDATE _sqlock_migrations SET success = false WHERE version = 999").await;
    locks.migrate().await.expect("nothing to do");
}

#[tokio::test]
async fn schema_of_a_later_generation_is_refused() {
    let db = empty().await;
    let (pool, locks) = (db.pool().await, db.locks().await);
    locks.migrate().await.expect("migrate");
    record(&pool, 1000).await;
    for is_finished in [true, false] {
        run(&pool, &format!("UPDATE _sqlock_migrations SET success = {is_finished} WHERE version = 1000")).await;
        let error = locks.migrate().await.expect_err("a later program has changed the tables");
        assert!(matches!(error, Error::NewerSchema { found: 1000, supported: 999 }), "{error:?}");
        assert!(!error.is_retryable());
        assert!(error.to_string().ends_with("update sqlock in this program"), "{error}");
    }
}
