//! `sqlock doctor`: checks that read a database and never change it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use serde_json::Value;
use sqlx::{AssertSqlSafe, Executor, Pool};

use super::exit::Guarded;
use crate::conformance::schema::Restricted;
use crate::conformance::security::Role;
use crate::support::command::{ClosedPort, Ended, bare, beside, end, run};
use crate::support::server::{Options, PgBouncer, Server};
use crate::support::{Database, TestDatabase, empty, empty_on};
use crate::{DATABASE, Sql};

// ---- reports

/// The report about one database.
struct Report {
    ended: Ended,
    database: String,
    ok: bool,
    /// By the name of the check: status, found, advice.
    checks: BTreeMap<String, (String, String, String)>,
}

impl Report {
    #[track_caller]
    fn assert(&self, check: &str, status: &str, found: &str) -> &Self {
        let Some(report) = self.checks.get(check) else { panic!("no {check} in {}", self.ended.stdout) };
        assert!(report.0 == status && report.1.contains(found), "{check}: {status}, {found:?}? It is {report:?}");
        assert!(matches!(status, "ok" | "n/a") || !report.2.is_empty(), "{check}: no advice");
        self
    }

    fn statuses(&self) -> Vec<(&str, &str)> {
        self.checks.iter().map(|(check, report)| (&**check, &*report.0)).collect()
    }
}

fn read(report: &Value, ended: Ended) -> Report {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let checks = report["checks"].as_array().expect("checks").iter().map(|check| {
        assert!(check["advice"].is_null() || check["advice"].is_string(), "{check}");
        (text(&check["check"]), (text(&check["status"]), text(&check["found"]), text(&check["advice"])))
    });
    let checks: BTreeMap<_, _> = checks.collect();
    let ok = report["ok"].as_bool().expect("ok");
    assert_eq!(ok, checks.values().all(|report| report.0 != "fail"));
    Report { database: text(&report["database"]), ok, checks, ended }
}

fn reports(ended: &Ended) -> Vec<Value> {
    serde_json::from_str::<Vec<Value>>(&ended.stdout)
        .unwrap_or_else(|e| panic!("{e}: {} {}", ended.stdout, ended.stderr))
}

/// Runs `doctor` on one database and expects this exit code.
async fn doctor(url: &str, code: i32) -> Report {
    let ended = end(bare(&["-D", url, "doctor", "--json"])).await.expect(code);
    assert_eq!(ended.stderr, "");
    let reports = reports(&ended);
    assert_eq!(reports.len(), 1, "{}", ended.stdout);
    let report = read(&reports[0], ended);
    assert_eq!(report.ok, code == 0);
    report
}

async fn execute(pool: &Pool<Sql>, sql: &str) {
    pool.execute(AssertSqlSafe(sql.to_owned())).await.unwrap_or_else(|error| panic!("{sql}: {error}"));
}

/// A database with tables, and a connection that alters them.
async fn migrated() -> (TestDatabase, Pool<Sql>) {
    let db = empty().await;
    run(&db, &["migrate"]).await.expect(0);
    let pool = db.of_the_command().pool_of(1).await;
    (db, pool)
}

/// A server of the test's own, with these settings; SQLite has none.
fn server(settings: &[&str]) -> Option<Server> {
    let settings = settings.iter().map(|&setting| setting.to_owned()).collect();
    DATABASE.server().map(|kind| Server::start_with(kind, Options { durable: true, settings, ..Options::default() }))
}

// ---- nothing to report

#[tokio::test]
async fn doctor_reports_ok_as_text_and_json() {
    let server = server(&[]);
    let db = match &server {
        Some(server) => empty_on(&server.url()).await,
        None => empty().await,
    };
    run(&db, &["migrate"]).await.expect(0);
    let report = doctor(&db.url, 0).await;
    let of_all = ["clock", "definitions", "durability", "reachable", "rights", "server", "tables"];
    let mut expected: BTreeSet<&str> = of_all.into();
    if DATABASE != Database::Sqlite {
        expected.extend(["pooler", "replication", "role", "settings", "tls"]);
    }
    if DATABASE.is_mysql() {
        expected.insert("cluster");
    }
    assert_eq!(report.statuses(), expected.into_iter().map(|check| (check, "ok")).collect::<Vec<_>>());
    report.assert("reachable", "ok", " ms").assert("tables", "ok", "up to date");
    let name = match DATABASE {
        Database::Postgres => "PostgreSQL",
        Database::MySql => "MySQL",
        Database::MariaDb => "MariaDB",
        Database::Sqlite => "SQLite",
    };
    assert!(report.database.starts_with(name), "{}", report.database);
    report.assert("server", "ok", server.as_ref().map_or("3.", Server::version));

    let text = run(&db, &["doctor"]).await.expect(0);
    assert_eq!(text.stderr, "");
    assert!(text.stdout.starts_with(&format!("{}\n", report.database)), "{}", text.stdout);
    assert!(text.stdout.ends_with("everything that sqlock needs is in order\n"), "{}", text.stdout);
    for (check, (status, found, _)) in &report.checks {
        // Two measurements differ.
        let found = if matches!(&**check, "reachable" | "clock") { "" } else { found };
        let line = |line: &&str| line.split_whitespace().take(2).eq([&**status, &**check]) && line.ends_with(found);
        assert!(text.stdout.lines().any(|l| line(&l)), "{check}:\n{}", text.stdout);
    }
}

#[tokio::test]
async fn missing_tables_are_a_warning_and_stay_missing() {
    let db = empty().await;
    let report = doctor(&db.url, 0).await;
    let check = if DATABASE == Database::Sqlite { "reachable" } else { "tables" };
    report.assert(check, "warn", "there").assert("rights", "ok", "");
    let advice = &report.checks[check].2;
    assert!(advice.contains("first use") && advice.contains("sqlock migrate"), "{advice}");
    // If the tables may not be created later either, nothing works.
    let ended = run(&db, &["--no-migrate", "doctor"]).await.expect(1);
    assert!(ended.stdout.contains("1 check failed"), "{}", ended.stdout);
    run(&db, &["--no-migrate", "acquire", "job"]).await.expect(78);
}

#[tokio::test]
async fn printed_schema_passes_every_check() {
    let db = empty().await;
    let pool = db.of_the_command().pool_of(1).await;
    let printed = run(&db, &["schema"]).await.expect(0);
    sqlx::raw_sql(AssertSqlSafe(printed.stdout)).execute(&pool).await.expect("SQL");
    doctor(&db.url, 0).await.assert("tables", "ok", "without").assert("definitions", "ok", "");
    // The tables are those of `migrate`, which finds nothing to change.
    run(&db, &["migrate"]).await.expect(0);
    doctor(&db.url, 0).await.assert("tables", "ok", "up to date").assert("definitions", "ok", "");
}

// ---- tables

#[tokio::test]
async fn wrong_table_definition_is_named_with_its_fault() {
    let (db, pool) = migrated().await;
    let drop_index = match DATABASE.is_mysql() {
        true => "DROP INDEX sqlock_entry_in_order ON sqlock_entry",
        false => "DROP INDEX sqlock_entry_in_order",
    };
    execute(&pool, drop_index).await;
    doctor(&db.url, 1).await.assert(
        "definitions",
        "fail",
        "sqlock_entry has no index on (name, token, arrived_at, id)",
    );

    // The view would prevent the change.
    execute(&pool, "DROP VIEW sqlock_holders").await;
    doctor(&db.url, 1).await.assert("tables", "warn", "the view sqlock_holders is missing");
    execute(&pool, "ALTER TABLE sqlock_lease DROP COLUMN label").await;
    doctor(&db.url, 1).await.assert("definitions", "fail", "sqlock_lease.label is missing");
    execute(&pool, "ALTER TABLE sqlock_lease DROP COLUMN ttl").await;
    doctor(&db.url, 1).await.assert("definitions", "fail", "sqlock_lease.ttl is missing");

    let drop_key: &[&str] = match DATABASE {
        Database::Postgres => &["ALTER TABLE sqlock_idem_step DROP CONSTRAINT sqlock_idem_step_pkey"],
        Database::MySql | Database::MariaDb => &["ALTER TABLE sqlock_idem_step DROP PRIMARY KEY"],
        Database::Sqlite => &[
            "DROP TABLE sqlock_idem_step",
            "CREATE TABLE sqlock_idem_step (id TEXT NOT NULL, begun INTEGER NOT NULL, step TEXT NOT NULL, result BLOB NOT NULL)",
        ],
    };
    for sql in drop_key {
        execute(&pool, sql).await;
    }
    doctor(&db.url, 1).await.assert("definitions", "fail", "sqlock_idem_step has no primary key on (id, begun, step)");

    execute(&pool, "ALTER TABLE sqlock_lease ADD COLUMN mine INT NOT NULL DEFAULT 7").await;
    assert!(!doctor(&db.url, 1).await.checks["definitions"].1.contains("mine"), "it is in nobody's way");

    execute(&pool, "DROP TABLE sqlock_idem").await;
    let report = doctor(&db.url, 1).await;
    report.assert("tables", "fail", "sqlock_idem");
    let text = run(&db, &["doctor"]).await.expect(1).stdout;
    assert!(text.contains("2 checks failed"), "{text}");
}

#[tokio::test]
async fn name_column_that_conflates_names_fails() {
    let (db, pool) = migrated().await;
    let (fold, found): (&[&str], &str) = match DATABASE {
        Database::Postgres => (
            &[
                "CREATE COLLATION fold (provider = icu, locale = 'und-u-ks-level2', deterministic = false)",
                "ALTER TABLE sqlock_lease ALTER COLUMN name TYPE text COLLATE fold",
            ],
            "sqlock_lease.name treats different names as equal",
        ),
        Database::MySql | Database::MariaDb => (
            &["ALTER TABLE sqlock_lease MODIFY name VARCHAR(255) CHARACTER SET ascii NOT NULL"],
            "sqlock_lease.name is varchar(255) and should be varbinary(255)",
        ),
        Database::Sqlite => (
            &[
                "CREATE TABLE other (name TEXT NOT NULL PRIMARY KEY COLLATE NOCASE, owner TEXT NOT NULL, holds TEXT NOT NULL,
                                     token INTEGER NOT NULL, holder TEXT NOT NULL, label TEXT NOT NULL,
                                     acquired_at INTEGER NOT NULL, expires_at INTEGER NOT NULL,
                                     waiting INTEGER NOT NULL DEFAULT 0)",
                "DROP TABLE sqlock_lease",
                "ALTER TABLE other RENAME TO sqlock_lease",
            ],
            "sqlock_lease has no primary key on (name)",
        ),
    };
    execute(&pool, "DROP VIEW sqlock_holders").await;
    for sql in fold {
        execute(&pool, sql).await;
    }
    doctor(&db.url, 1).await.assert("definitions", "fail", found);
}

#[tokio::test]
async fn unexpected_migration_history_is_a_failure() {
    let (db, pool) = migrated().await;
    for (version, exit, status) in [(999, 0, "ok"), (1_000, 1, "fail")] {
        let copy = format!(
            "INSERT INTO _sqlock_migrations (version, description, installed_on, success, checksum, execution_time)
             SELECT {version}, description, installed_on, success, checksum, execution_time FROM _sqlock_migrations
              WHERE version = 1"
        );
        execute(&pool, &copy).await;
        let found = format!("migration {version} is newer than this program");
        doctor(&db.url, exit).await.assert("tables", status, &found);
    }
    execute(&pool, "DELETE FROM _sqlock_migrations WHERE version IN (2, 999, 1000)").await;
    doctor(&db.url, 1).await.assert("tables", "fail", "migration 2 not applied");
    run(&db, &["migrate"]).await.expect(0);
    doctor(&db.url, 0).await.assert("tables", "ok", "up to date");

    execute(&pool, "UPDATE _sqlock_migrations SET success = FALSE WHERE version = 1").await;
    let report = doctor(&db.url, 1).await;
    report.assert("tables", "fail", "migration 1 was interrupted");
    let advice = if DATABASE.is_mysql() { "it continues" } else { "\"sqlock migrate\" refuses it" };
    assert!(report.checks["tables"].2.contains(advice), "{:?}", report.checks["tables"]);
    let other = if DATABASE == Database::Postgres { "'\\x00'" } else { "X'00'" };
    execute(&pool, &format!("UPDATE _sqlock_migrations SET success = TRUE, checksum = {other} WHERE version = 1"))
        .await;
    doctor(&db.url, 1).await.assert("tables", "fail", "migration 1 differs from the one in this program");

    execute(&pool, "DROP VIEW sqlock_holders").await;
    for table in
        ["sqlock_lease", "sqlock_note", "sqlock_entry", "sqlock_idem", "sqlock_idem_step", "sqlock_idem_resolution"]
    {
        execute(&pool, &format!("DROP TABLE {table}")).await;
    }
    let report = doctor(&db.url, 1).await;
    report.assert("tables", "fail", "sqlock_entry");
    assert!(report.checks["tables"].2.contains("sqlock schema"), "migrate would find nothing to do");
}

#[tokio::test]
async fn trigger_or_rule_on_the_tables_is_named() {
    let (db, pool) = migrated().await;
    let trigger = |name: &str, time: &str| match DATABASE {
        Database::Postgres => {
            format!("CREATE TRIGGER {name} {time} INSERT ON sqlock_lease FOR EACH ROW EXECUTE FUNCTION swallow()")
        }
        Database::MySql | Database::MariaDb => {
            format!("CREATE TRIGGER {name} {time} INSERT ON sqlock_lease FOR EACH ROW SET @seen = 1")
        }
        // The body does not matter.
        Database::Sqlite => {
            format!("CREATE TRIGGER {name}\n{time} INSERT ON sqlock_lease BEGIN SELECT 1 -- after release\n; END")
        }
    };
    if DATABASE == Database::Postgres {
        let function = "CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'";
        execute(&pool, function).await;
    }
    // MySQL has no prepared CREATE TRIGGER.
    let create = async |sql: String| sqlx::raw_sql(AssertSqlSafe(sql)).execute(&pool).await.expect("a trigger");
    create(trigger("audit", "AFTER")).await;
    if DATABASE.is_mysql() {
        doctor(&db.url, 1).await.assert("definitions", "fail", "sqlock_lease has the trigger audit, which hides");
    } else {
        doctor(&db.url, 0).await.assert("definitions", "warn", "sqlock_lease has the trigger audit");
    }
    create(trigger("swallows", "BEFORE")).await;
    doctor(&db.url, 1).await.assert("definitions", "fail", "sqlock_lease has the trigger swallows, which runs before");
    if DATABASE == Database::Postgres {
        execute(&pool, "DROP TRIGGER swallows ON sqlock_lease").await;
        execute(&pool, "CREATE RULE ignored AS ON UPDATE TO sqlock_entry DO INSTEAD NOTHING").await;
        doctor(&db.url, 1).await.assert("definitions", "fail", "sqlock_entry has the rule ignored");
    }
}

/// The other databases have one schema for tables.
#[tokio::test]
async fn tables_in_several_schemas_are_a_failure() {
    let (db, pool) = migrated().await;
    if DATABASE != Database::Postgres {
        return drop(doctor(&db.url, 0).await);
    }
    let (schema,): (String,) = sqlx::query_as("SELECT current_schema()::text").fetch_one(&pool).await.expect("one");
    let other = format!("{schema}_other");
    execute(&pool, &format!("CREATE SCHEMA {other}")).await;
    let both = db.url.replace(&schema, &format!("{schema},{other}"));
    execute(&pool, &format!("CREATE TABLE {other}.sqlock_row (LIKE sqlock_row INCLUDING ALL)")).await;
    doctor(&both, 0).await.assert("definitions", "warn", &format!("another sqlock_row in the schema {other}"));
    execute(&pool, "DROP TABLE sqlock_row").await;
    doctor(&both, 1).await.assert("definitions", "fail", "several schemas");
    execute(&pool, &format!("DROP SCHEMA {other} CASCADE")).await;
}

#[tokio::test]
async fn lease_ahead_of_the_clock_is_a_warning() {
    let (db, pool) = migrated().await;
    let lease = beside(&db).await.lease("job").acquire().await.expect("acquire");
    doctor(&db.url, 0).await.assert("clock", "ok", "");
    execute(&pool, "UPDATE sqlock_lease SET acquired_at = acquired_at + 3600000000").await;
    doctor(&db.url, 0).await.assert("clock", "warn", "1 leases or heartbeats are up to");
    lease.release().await.expect("release");
    doctor(&db.url, 0).await.assert("clock", "ok", "");
}

// ---- rights

#[tokio::test]
async fn rights_beyond_those_for_leases_are_named() {
    // SQLite has no users.
    if DATABASE == Database::Sqlite {
        return;
    }
    let role = Role::for_tasks(&["leases"]).await;
    // MySQL and MariaDB hide the other tables from this user: they are missing for all it can see.
    let (code, status) = if DATABASE.is_mysql() { (1, "fail") } else { (0, "warn") };
    doctor(&role.user.url, code).await.assert("rights", status, "no DELETE on sqlock_lease, which leases do not need");
    role.end().await;
}

#[tokio::test]
async fn missing_rights_are_named_with_their_table() {
    if DATABASE == Database::Sqlite {
        // Another writer blocks writes there.
        let (db, pool) = migrated().await;
        let writing = pool.begin_with("BEGIN IMMEDIATE").await.expect("the file is there");
        doctor(&db.url, 0).await.assert("rights", "warn", "another process has been writing");
        writing.rollback().await.expect("rollback");
        doctor(&db.url, 0).await.assert("rights", "ok", "can be written");
        return;
    }
    let user = Restricted::on(empty().await).await;
    if DATABASE.is_mysql() {
        // On these servers, a user without any right to a database does not see it.
        user.grant("SELECT").await;
    }
    let report = doctor(&user.url, 1).await;
    report.assert("tables", "warn", "none").assert("rights", "fail", "CREATE");
    run(&user.db, &["migrate"]).await.expect(0);
    user.grant("SELECT").await;
    let report = doctor(&user.url, 1).await;
    report.assert("tables", "ok", "up to date");
    report.assert("rights", "fail", "no INSERT, UPDATE on sqlock_lease");
    for table in
        ["sqlock_note", "sqlock_entry", "sqlock_row", "sqlock_idem", "sqlock_idem_step", "sqlock_idem_resolution"]
    {
        report.assert("rights", "fail", &format!("no INSERT, UPDATE, DELETE on {table}"));
    }
    user.grant("INSERT, DELETE").await;
    doctor(&user.url, 1).await.assert("rights", "fail", "no UPDATE on sqlock_lease");
    user.grant("UPDATE").await;
    doctor(&user.url, 0).await.assert("rights", "ok", "");
    // The rights were checked, and not used.
    assert!(beside(&user.db).await.list("").await.expect("list").is_empty());
    user.drop().await;
}

// ---- missing and read-only databases

#[tokio::test]
async fn unreachable_database_fails_without_showing_the_password() {
    let mut tried = Vec::new();
    let directory = tempfile::tempdir().expect("a temporary directory");
    let _port;
    match DATABASE.server() {
        Some(_) => {
            let port = ClosedPort::reserve();
            tried.push(format!("{}://u:s3cret@127.0.0.1:{}/x", DATABASE.scheme(), port.number()));
            _port = port;
        }
        None => {
            let file = directory.path().join("app.db-sqlock");
            fs::write(&file, "this is not a SQLite file, but long enough for the header of one".repeat(100))
                .expect("the directory is ours to write");
            tried.push(format!("sqlite://{}/app.db", directory.path().display()));
            fs::copy(&file, directory.path().join("junk.db")).expect("a file");
            fs::copy(&file, directory.path().join("sqlock.db")).expect("a file");
            for name in ["junk.db", "sqlock.db", "missing/app.db"] {
                tried.push(format!("sqlite://{}/{name}", directory.path().display()));
            }
        }
    }
    let db = empty().await;
    let guarded = match DATABASE {
        Database::Sqlite => None,
        _ => Some(Guarded::start(&db).await),
    };
    if let Some(guarded) = &guarded {
        assert!(doctor(&guarded.url("s3cret"), 0).await.ok);
        tried.push(guarded.url("s3cret-not"));
    }
    let frozen = server(&[]);
    if let Some(server) = &frozen {
        server.pause();
        tried.push(server.url());
    }
    for url in &tried {
        let report = doctor(url, 1).await;
        report.assert("reachable", "fail", "no: ");
        assert_eq!(report.checks.len(), 1, "more checks than one: {}", report.ended.stdout);
        let advice = if DATABASE == Database::Sqlite { "is a SQLite database" } else { "Check the host" };
        assert!(report.checks["reachable"].2.contains(advice), "{:?}", report.checks);
        let text = end(bare(&["-D", url, "doctor"])).await.expect(1);
        for said in [&report.ended.stdout, &text.stdout, &text.stderr] {
            assert!(!said.contains("s3cret"), "{said}");
        }
    }
    if let Some(server) = &frozen {
        server.resume();
    }
    if let Some(guarded) = guarded {
        guarded.drop().await;
    }
    // A URL that cannot be tried is a mistake in the configuration, as for every subcommand.
    end(bare(&["-D", "oracle://u:s3cret@127.0.0.1/x", "doctor"])).await.expect(78);
}

#[tokio::test]
async fn read_only_server_fails_unless_another_is_writable() {
    let Some(kind) = DATABASE.server() else {
        // A file is not a replica. Of several files, each is checked.
        let (one, two) = (empty().await, empty().await);
        run(&one, &["migrate"]).await.expect(0);
        let ended = end(bare(&["-D", &format!("{},{}", one.url, two.url), "doctor", "--json"])).await.expect(0);
        assert_eq!(reports(&ended).len(), 2);
        return;
    };
    let standby = Server::start_with(kind, Options { standby: DATABASE == Database::Postgres, ..Options::default() });
    let read_only = TestDatabase::at(standby.url());
    if DATABASE.is_mysql() {
        run(&read_only, &["migrate"]).await.expect(0);
        let pool = read_only.pool_of(1).await;
        execute(&pool, "SET GLOBAL read_only = 1").await;
    }
    doctor(&read_only.url, 1).await.assert("role", "fail", "read");

    let (primary, _) = migrated().await;
    for urls in [format!("{},{}", primary.url, read_only.url), format!("{},{}", read_only.url, primary.url)] {
        let ended = end(bare(&["-D", &urls, "doctor", "--json"])).await.expect(0);
        let reports = reports(&ended);
        assert_eq!(reports.len(), 2);
        let roles: Vec<&Value> = reports.iter().map(|report| &report["checks"][2]["status"]).collect();
        assert_eq!(roles, ["ok", "ok"], "{}", ended.stdout);
    }
    // None of them can be written.
    end(bare(&["-D", &format!("{0},{0}", read_only.url), "doctor"])).await.expect(1);
    let gone = ClosedPort::reserve();
    let gone = format!("{}://127.0.0.1:{}/x", DATABASE.scheme(), gone.number());
    let ended = end(bare(&["-D", &format!("{},{gone}", primary.url), "doctor"])).await.expect(1);
    assert!(ended.stdout.contains("in order") && ended.stdout.contains("1 check failed"), "{}", ended.stdout);
}

#[tokio::test]
async fn two_writable_servers_are_not_one_database() {
    let Some(kind) = DATABASE.server() else {
        // Files are no servers, and their list is read above.
        return;
    };
    let (one, _) = migrated().await;
    let server = Server::start(kind);
    let code = if DATABASE == Database::Postgres { 1 } else { 0 };
    let ended = end(bare(&["-D", &format!("{},{}", one.url, server.url()), "doctor", "--json"])).await.expect(code);
    let all = reports(&ended);
    assert_eq!(all.len(), 2, "{}", ended.stdout);
    let status = if code == 1 { "fail" } else { "warn" };
    read(&all[1], ended).assert("failover", status, "this server accepts writes, and so does");
    // It is the same server.
    let ended = end(bare(&["-D", &format!("{0},{0}", one.url), "doctor"])).await.expect(0);
    assert!(!ended.stdout.contains("failover"), "{}", ended.stdout);
}

#[tokio::test]
async fn read_only_transaction_default_is_a_warning() {
    if DATABASE != Database::Postgres {
        // On the other databases, only read_only is read, as above.
        doctor(&empty().await.url, 0).await;
        return;
    }
    let db = empty().await;
    let read_only = TestDatabase::at(format!("{}%20-cdefault_transaction_read_only%3Don", db.url));
    doctor(&read_only.url, 1).await.assert("tables", "fail", "cannot be created").assert("role", "warn", "read_only");
    run(&db, &["migrate"]).await.expect(0);
    doctor(&read_only.url, 0).await.assert("tables", "ok", "").assert("role", "warn", "read_only");
    run(&read_only, &["run", "job", "--", "true"]).await.expect(0);
}

// ---- clusters, poolers, clocks, settings

#[tokio::test]
async fn primary_without_synchronous_standby_is_a_failure() {
    if DATABASE != Database::Postgres {
        return doctor(&empty().await.url, 0).await.assert_no_replicas();
    }
    let server = server(&["synchronous_standby_names=b"]).expect("a server");
    let report = doctor(&server.url(), 1).await;
    report.assert("replication", "fail", "no standby of synchronous_standby_names (b)").assert(
        "pooler",
        "ok",
        "LISTEN works",
    );
}

impl Report {
    fn assert_no_replicas(self) {
        if DATABASE != Database::Sqlite {
            self.assert("replication", "ok", "none").assert("cluster", "ok", "none");
        }
    }
}

#[tokio::test]
async fn galera_node_is_reported_as_cluster_member() {
    if DATABASE != Database::MariaDb {
        return doctor(&empty().await.url, 0).await.assert_no_cluster();
    }
    let kind = DATABASE.server().expect("MariaDB has servers");
    let node = Server::start_with(kind, Options { galera: true, ..Options::default() });
    let report = crate::support::soon("the node to be ready", async {
        loop {
            let report = end(bare(&["-D", &node.url(), "doctor", "--json"])).await;
            if report.code() == 0 {
                break read(&reports(&report)[0], report);
            }
        }
    });
    let report = report.await;
    report.assert("cluster", "warn", "Galera, 1 nodes, component Primary, this node Synced");
    report.assert("cluster", "warn", "it is the only node").assert("replication", "ok", "that of the cluster");
}

impl Report {
    fn assert_no_cluster(self) {
        match DATABASE.is_mysql() {
            true => drop(self.assert("cluster", "ok", "none").ok),
            false => assert!(!self.checks.contains_key("cluster")),
        }
    }
}

#[tokio::test]
async fn transaction_pooler_is_reported() {
    if DATABASE != Database::Postgres {
        let report = doctor(&empty().await.url, 0).await;
        if DATABASE.is_mysql() {
            report.assert("pooler", "ok", "none");
        }
        return;
    }
    let server = server(&[]).expect("a server");
    doctor(&server.url(), 0).await.assert("pooler", "ok", "none; LISTEN works");
    let bouncer = PgBouncer::start(&server);
    for _ in 0..3 {
        doctor(&bouncer.url(), 0).await.assert("pooler", "warn", "a transaction pooler");
    }
    run(&TestDatabase::at(bouncer.url()), &["run", "job", "--", "true"]).await.expect(0);
}

#[tokio::test]
async fn clock_check_reports_offset_and_ignores_time_zone() {
    let zone = match DATABASE {
        Database::Postgres => "timezone=Asia/Tokyo",
        Database::MySql | Database::MariaDb => "--default-time-zone=+09:00",
        Database::Sqlite => return drop(doctor(&empty().await.url, 0).await),
    };
    let kind = DATABASE.server().expect("it has servers");
    let settings = vec![zone.to_owned()];
    let server = Server::start_with(kind, Options { faketime: true, settings, ..Options::default() });
    doctor(&server.url(), 0).await.assert("clock", "ok", "this host");
    for (jump, found) in [(3600, "ahead of this host's"), (-60, "behind this host's")] {
        server.jump_clock(jump);
        doctor(&server.url(), 0).await.assert("clock", "warn", found);
    }
    // The clock is compared with another database, in both orders.
    let on_time = empty().await;
    for (urls, found) in [
        (format!("{},{}", on_time.url, server.url()), "60.0 s behind"),
        (format!("{},{}", server.url(), on_time.url), "60.0 s ahead of"),
    ] {
        // Two primaries of PostgreSQL are not one database.
        let code = i32::from(DATABASE == Database::Postgres);
        let ended = end(bare(&["-D", &urls, "doctor", "--json"])).await.expect(code);
        let all = reports(&ended);
        assert_eq!(all.len(), 2, "{}", ended.stdout);
        let second = read(&all[1], ended);
        let report = &second.checks["clocks"];
        let near = found.replace("60.0", "59.9");
        assert!(report.0 == "warn" && (report.1.contains(found) || report.1.contains(&near)), "{report:?}");
    }
}

#[tokio::test]
async fn harmful_settings_are_reported() {
    match DATABASE {
        Database::Postgres => {
            let db = empty().await;
            let with = |options: &str| format!("{}%20-c{}", db.url, options.replace('=', "%3D"));
            let report = doctor(&with("statement_timeout=200"), 0).await;
            report.assert("settings", "warn", "statement_timeout is 200 ms");
            let version = "SELECT current_setting('server_version_num')::INT4";
            let version: i32 = sqlx::query_scalar(version).fetch_one(&db.pool_of(1).await).await.expect("a version");
            if version >= 140_000 {
                let report = doctor(&with("idle_session_timeout=3s"), 0).await;
                report.assert("settings", "warn", "idle_session_timeout is 3.0 s");
            }
            let report = doctor(&with("default_transaction_isolation=serializable"), 0).await;
            report.assert("settings", "ok", "default_transaction_isolation is serializable");
            doctor(&with("synchronous_commit=off"), 0).await.assert("durability", "warn", "fsync is off");
        }
        Database::MySql | Database::MariaDb => {
            let settings =
                ["--log-bin=log", "--server-id=1", "--binlog-format=STATEMENT", "--sysdate-is-now", "--wait-timeout=5"];
            let server = server(&settings).expect("a server");
            let report = doctor(&server.url(), 1).await;
            report.assert("settings", "fail", "binlog_format is STATEMENT").assert(
                "settings",
                "fail",
                "wait_timeout is 5 s",
            );
            report.assert("clock", "warn", "stands still").assert("replication", "ok", "no replica");
            // The failure is real: the command does not work either.
            assert_ne!(run(&TestDatabase::at(server.url()), &["run", "job", "--", "true"]).await.code(), 0);
        }
        Database::Sqlite => {
            let (db, own) = (empty().await, tempfile::tempdir().expect("a temporary directory"));
            drop(own);
            // A program that uses the library keeps its leases in the application's file.
            db.locks().await.migrate().await.expect("migrate");
            for (option, number) in [("--quiet", 1), ("--sidecar", 2)] {
                let ended = end(bare(&["-D", &db.url, option, "doctor", "--json"])).await.expect(0);
                let reports = reports(&ended);
                assert_eq!(reports.len(), number, "{}", ended.stdout);
                let application = read(&reports[number - 1], ended);
                assert!(application.database.ends_with("/test.db"), "{}", application.database);
                application.assert("tables", "ok", "up to date").assert("durability", "warn", "journal_mode delete");
            }
        }
    }
}

// ---- leftovers

#[tokio::test]
async fn doctor_changes_nothing_and_leaves_nothing() {
    if DATABASE != Database::Sqlite {
        let (db, pool) = migrated().await;
        run(&db, &["acquire", "job"]).await.expect(0);
        let before = run(&db, &["show", "job", "--json"]).await.expect(0).stdout;
        doctor(&db.url, 0).await;
        assert_eq!(run(&db, &["show", "job", "--json"]).await.expect(0).stdout, before);
        let tables = "SELECT CAST(count(*) AS CHAR(10)) FROM information_schema.tables WHERE table_schema = ";
        let here = if DATABASE == Database::Postgres { "current_schema()" } else { "DATABASE()" };
        let tables = AssertSqlSafe(format!("{tables}{here}"));
        let count: String = sqlx::query_scalar(tables).fetch_one(&pool).await.expect("a count");
        assert_eq!(count.trim(), "10", "eight, the view and the history");
        return;
    }
    let listed = |directory: &Path| -> BTreeMap<String, Vec<u8>> {
        let entries = fs::read_dir(directory).expect("it is there").flatten();
        entries
            .map(|entry| (entry.file_name().display().to_string(), fs::read(entry.path()).expect("a file")))
            .collect()
    };
    let directory = tempfile::tempdir().expect("a temporary directory");
    let db = TestDatabase::at(format!("sqlite://{}/test.db?mode=rwc", directory.path().display()));
    doctor(&db.url, 0).await.assert("reachable", "warn", "no such file");
    assert_eq!(listed(directory.path()), BTreeMap::new());

    // The journal mode of the file does not matter.
    for mode in ["WAL", "DELETE"] {
        run(&db, &["acquire", mode]).await.expect(0);
        let pool = db.of_the_command().pool_of(1).await;
        execute(&pool, &format!("PRAGMA journal_mode = {mode}")).await;
        pool.close().await;
        let before = listed(directory.path());
        assert_eq!(before.len(), 1, "{:?}", before.keys());
        doctor(&db.url, 0).await.assert("durability", "ok", &format!("journal_mode {}", mode.to_lowercase()));
        let after = listed(directory.path());
        assert!(before == after, "{:?}", after.keys());
    }
}
