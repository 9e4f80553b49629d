//! Choice of the database, and creation of its tables.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use sqlx::{AssertSqlSafe, Executor, Pool};
use tokio::process::Command;
use tokio::task::JoinSet;

use crate::conformance::schema::Restricted;
use crate::support::command::{ClosedPort, Ended, Running, bare, beside, end, held, path, program, run, sqlock};
use crate::support::process_table::poll_for;
use crate::support::server::{Options, Server};
use crate::support::{Database, LONG, TestDatabase, empty, empty_on, soon};
use crate::{DATABASE, Sql};

// ---- choice of the database

/// Creates a directory with these lines in `.env`, and with `a/b`.
fn directory(dotenv: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a temporary directory");
    fs::create_dir_all(directory.path().join("a/b")).expect("the directory is ours to write");
    fs::write(directory.path().join(".env"), dotenv).expect("the directory is ours to write");
    directory
}

/// Returns a command that runs in a directory, which also has the user's state.
fn started_in(directory: &Path, arguments: &[&str]) -> Command {
    let mut command = bare(arguments);
    command.current_dir(directory).env("XDG_STATE_HOME", directory.join("state"));
    command
}

async fn is_taken(db: &TestDatabase, name: &str) -> bool {
    held(&beside(db).await, name).await.is_some()
}

#[tokio::test]
async fn dotenv_of_the_current_directory_names_the_database() {
    let db = empty().await;
    let directory =
        directory(&format!("# secrets\nOTHER=\"of the file\"\nDATABASE_URL={}\nexport MORE='of it'\n", db.url));
    let script = "echo \"${OTHER-none} ${MORE-none}\"; \"$SQLOCK\" acquire inner >&2";
    let mut command = started_in(directory.path(), &["run", "job", "--", "sh", "-c", script]);
    command.env("SQLOCK", program());
    let ended = end(command).await.expect(0);
    assert_eq!(ended.stdout, "none none\n", "the other variables there are not for the command");
    assert!(is_taken(&db, "inner").await, "it is found inside the command, too");

    // Of the two variables, sqlock's own takes precedence.
    let other = empty().await;
    let lines = format!("DATABASE_URL={}\nSQLOCK_DATABASE_URL=\"{}\"\n", db.url, other.url);
    fs::write(directory.path().join(".env"), lines).expect("a file");
    end(started_in(directory.path(), &["acquire", "own"])).await.expect(0);
    assert!(is_taken(&other, "own").await && !is_taken(&db, "own").await);
}

#[tokio::test]
async fn doctor_passes_without_an_embedded_database() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    end(started_in(directory.path(), &["doctor"])).await.expect(0);
    assert!(!directory.path().join("state").exists());
}

#[tokio::test]
async fn dotenv_error_names_file_and_line() {
    let db = empty().await;
    let directory = directory(&format!("# secrets\nOTHER=1\ns3cret is no assignment\nDATABASE_URL={}\n", db.url));
    let ended = end(started_in(directory.path(), &["acquire", "job"])).await.expect(78);
    let file = directory.path().canonicalize().expect("the directory").join(".env");
    assert!(ended.stderr.contains(&format!("{}: syntax error in line 3", file.display())), "{}", ended.stderr);
    assert!(!ended.stderr.contains("s3cret"), "{}", ended.stderr);

    fs::write(directory.path().join(".env"), format!("\u{feff}DATABASE_URL={}\n", db.url)).expect("a file");
    end(started_in(directory.path(), &["acquire", "job"])).await.expect(0);
    assert!(is_taken(&db, "job").await);
    fs::write(directory.path().join(".env"), b"DATABASE_URL=\xff\n").expect("a file");
    let ended = end(started_in(directory.path(), &["acquire", "job"])).await.expect(78);
    assert!(ended.stderr.contains("/.env: "), "{}", ended.stderr);
}

/// A container tool makes a directory where the file to be mounted is missing.
#[tokio::test]
async fn dotenv_directory_is_ignored() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    fs::create_dir(directory.path().join(".env")).expect("a directory");
    let ended = end(started_in(directory.path(), &["acquire", "job"])).await.expect(0);
    assert!(ended.stderr.contains("no database is named"), "{}", ended.stderr);
}

#[tokio::test]
async fn dotenv_of_a_parent_directory_is_ignored() {
    let db = empty().await;
    let directory = directory(&format!("DATABASE_URL={}\n", db.url));
    let ended = end(started_in(&directory.path().join("a/b"), &["acquire", "job"])).await.expect(0);
    assert!(ended.stderr.contains("no database is named"), "{}", ended.stderr);
    assert!(!is_taken(&db, "job").await);
}

#[tokio::test]
async fn first_source_naming_a_database_wins() {
    let [option, own, environment, file] = [empty().await, empty().await, empty().await, empty().await];
    let directory = directory(&format!("DATABASE_URL={}\n", file.url));
    let acquire = |name: &str, options: &[&str], variables: &[(&str, &str)]| {
        let mut command = started_in(directory.path(), &[&["acquire", name], options].concat());
        command.envs(variables.iter().copied());
        end(command)
    };
    let both = [("SQLOCK_DATABASE_URL", &*own.url), ("DATABASE_URL", &*environment.url)];
    acquire("by option", &["-D", &option.url], &both).await.expect(0);
    acquire("by own variable", &[], &both).await.expect(0);
    acquire("by variable", &[], &both[1..]).await.expect(0);
    acquire("by file", &[], &[]).await.expect(0);
    for (name, place) in
        [("by option", &option), ("by own variable", &own), ("by variable", &environment), ("by file", &file)]
    {
        for db in [&option, &own, &environment, &file] {
            assert_eq!(is_taken(db, name).await, std::ptr::eq(db, place), "{name}");
        }
    }
    // An empty variable is a mistake; it does not count as absent.
    for variable in ["SQLOCK_DATABASE_URL", "DATABASE_URL"] {
        let ended = acquire("nowhere", &[], &[(variable, "")]).await.expect(78);
        assert!(ended.stderr.contains(&format!("{variable} is empty")), "{}", ended.stderr);
    }
    acquire("nowhere", &["-D", ""], &both).await.expect(78);
}

#[tokio::test]
async fn database_url_is_read_from_a_file() {
    let db = empty().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    fs::write(directory.path().join("url"), format!("{}\n", db.url)).expect("a file");
    end(started_in(directory.path(), &["-D", "@url", "acquire", "job"])).await.expect(0);
    assert!(is_taken(&db, "job").await);
    let ended = end(started_in(directory.path(), &["-D", "@missing", "acquire", "job"])).await.expect(78);
    assert!(ended.stderr.contains("missing"), "{}", ended.stderr);

    fs::write(directory.path().join("marked"), format!("\u{feff}{}\n", db.url)).expect("a file");
    end(started_in(directory.path(), &["-D", "@marked", "acquire", "-n", "job"])).await.expect(75);
    fs::write(directory.path().join("two"), format!("{}\n# s3cret\n", db.url)).expect("a file");
    let ended = end(started_in(directory.path(), &["-D", "@two", "acquire", "job"])).await.expect(78);
    assert!(ended.stderr.contains("the file two has more than one line"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("s3cret"), "{}", ended.stderr);
}

#[tokio::test]
async fn default_database_excludes_across_directories() {
    let directory = directory("");
    let acquire = |place: &str, options: &[&str]| {
        let mut command = started_in(&directory.path().join(place), &[&["acquire", "job"], options].concat());
        command.env("XDG_STATE_HOME", directory.path().join("state"));
        end(command)
    };
    for (place, options, code) in [("a", &["-q"][..], 0), ("a/b", &["-n"], 75), ("a/b", &["-n", "-q"], 75)] {
        let ended = acquire(place, options).await.expect(code);
        for words in ["no database is named", "this user on this host only", "state/sqlock/"] {
            assert!(ended.stderr.contains(words), "{options:?}: no {words}: {}", ended.stderr);
        }
    }
    assert_eq!(fs::read_dir(directory.path().join("a/b")).expect("the directory").count(), 0, "nothing is left there");
    let mode = fs::metadata(directory.path().join("state/sqlock")).expect("the directory").permissions();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o700);
}

#[tokio::test]
async fn ls_does_not_create_the_default_database() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    end(started_in(directory.path(), &["ls"])).await.expect(0);
    assert!(!directory.path().join("state").exists());
}

#[tokio::test]
async fn require_database_refuses_the_default() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let by_option = started_in(directory.path(), &["--require-database", "run", "job", "--", "echo", "it ran"]);
    let mut by_variable = started_in(directory.path(), &["run", "job", "--", "echo", "it ran"]);
    by_variable.env("SQLOCK_REQUIRE_DATABASE", "1");
    for command in [by_option, by_variable] {
        let ended = end(command).await.expect(78);
        assert_eq!(ended.stdout, "");
        assert!(ended.stderr.contains("no database is named"), "{}", ended.stderr);
    }
    assert!(!directory.path().join("state").exists());
}

#[tokio::test]
async fn global_options_stand_before_or_after_the_subcommand() {
    let db = empty().await;
    let other = empty().await;
    for arguments in [
        &["-D", &db.url, "-q", "--no-dotenv", "run", "job", "--", "true"][..],
        &["run", "-D", &db.url, "-q", "--no-dotenv", "job", "--", "true"],
        &["run", "job", "--quiet", "--no-dotenv", "--database-url", &db.url, "--", "true"],
        &["-D", &db.url, "ls"],
        &["ls", "-D", &db.url],
    ] {
        run(&other, arguments).await.expect(0);
    }
    for arguments in [&["--no-migrate", "acquire", "job"][..], &["acquire", "job", "--no-migrate"]] {
        run(&other, arguments).await.expect(78);
    }
    let lease = beside(&db).await.lease("job").ttl(LONG).acquire().await.expect("acquire");
    for arguments in [&["-q", "acquire", "-n", "job"][..], &["acquire", "-n", "job", "-q"]] {
        assert_eq!(run(&db, arguments).await.expect(75).stderr, "", "quiet");
    }
    lease.release().await.expect("ours to the end");
}

/// The process that writes into the pipe may never come.
#[tokio::test]
async fn signal_ends_a_blocked_read_of_dotenv() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let fifo = directory.path().join(".env");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO can be made");
    for arguments in [&["run", "job", "--", "true"][..], &["acquire", "job"], &["ls"], &["bench"]] {
        for quorum in [false, true] {
            if quorum && arguments[0] == "bench" {
                continue;
            }
            let quorum = if quorum { &["--quorum"][..] } else { &[] };
            let arguments = [&arguments[..1], quorum, &arguments[1..]].concat();
            let sqlock = Running::start(started_in(directory.path(), &arguments));
            // Opening for writing fails until sqlock opens the FIFO for reading.
            let mut options = fs::OpenOptions::new();
            let options = options.write(true).custom_flags(nix::fcntl::OFlag::O_NONBLOCK.bits());
            let writer = poll_for("the read", || options.open(&fifo).ok()).await;
            sqlock.signal(Signal::TERM);
            let ended = sqlock.end().await;
            assert_eq!(ended.status.signal(), Some(Signal::TERM.as_raw()), "{arguments:?}: {}", ended.stderr);
            drop(writer);
        }
    }
}

// ---- the tables

#[tokio::test]
async fn concurrent_first_runs_create_tables_and_exclude() {
    let db = empty().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let inside = path(directory.path(), "inside");
    let script = "mkdir \"$0\" || exit 1; echo in >>\"$0.log\"; rmdir \"$0\"";
    let mut runs = JoinSet::new();
    for _ in 0..8 {
        runs.spawn(end(sqlock(&db, &["run", "job", "--", "sh", "-c", script, &inside])));
    }
    for ended in soon("the end of all", runs.join_all()).await {
        let ended = ended.expect(0);
        assert!(ended.stderr.is_empty() || ended.stderr.contains("waiting for"), "{}", ended.stderr);
    }
    assert_eq!(fs::read_to_string(directory.path().join("inside.log")).expect("the log").lines().count(), 8);
}

#[tokio::test]
async fn subcommands_that_grant_nothing_create_no_tables() {
    let db = empty().await;
    let token = ["--token", "1"];
    for (arguments, code) in [
        (&["ls"][..], 0),
        (&["show", "job"], 0),
        (&["sweep"], 0),
        (&["release", "job", token[0], token[1]], 79),
        (&["renew", "job", token[0], token[1]], 79),
        (&["unlock", "job", token[0], token[1]], 79),
    ] {
        run(&db, arguments).await.expect(code);
    }
    run(&db, &["--no-migrate", "acquire", "job"]).await.expect(78);
    if DATABASE == Database::Sqlite {
        let file = db.of_the_command().url.replace("sqlite://", "").replace("?mode=rwc", "");
        fs::remove_file(&file).expect("acquire has made it");
        run(&db, &["ls"]).await.expect(0);
        assert!(!fs::exists(&file).expect("it can be looked for"));
    }
}

#[tokio::test]
async fn no_migrate_uses_tables_but_never_creates_them() {
    let db = empty().await;
    for arguments in [&["run", "job", "--", "echo", "it ran"][..], &["acquire", "job"], &["bench", "--time", "100ms"]] {
        let ended = run(&db, &[&["--no-migrate"], arguments].concat()).await.expect(78);
        assert_eq!(ended.stdout, "");
        assert!(ended.stderr.contains("sqlock migrate") && ended.stderr.contains("sqlock schema"), "{}", ended.stderr);
    }
    let ended = run(&db, &["migrate"]).await.expect(0);
    assert_eq!((&*ended.stdout, &*ended.stderr), ("", "sqlock: the tables are up to date\n"));
    run(&db, &["--no-migrate", "run", "job", "--", "true"]).await.expect(0);
    run(&db, &["migrate"]).await.expect(0);
}

#[tokio::test]
async fn migrate_with_no_migrate_is_refused() {
    let db = empty().await;
    let ended = run(&db, &["--no-migrate", "migrate"]).await.expect(64);
    assert!(ended.stderr.contains("--no-migrate forbids it"), "{}", ended.stderr);
    run(&db, &["--no-migrate", "acquire", "job"]).await.expect(78);
}

#[tokio::test]
async fn printed_schema_creates_the_tables() {
    let db = empty().await;
    let printed = run(&db, &["schema", "--db", DATABASE.scheme()]).await.expect(0);
    assert_eq!(printed.stderr, "");
    assert_eq!(run(&db, &["schema"]).await.expect(0).stdout, printed.stdout, "of the database that is configured");
    // Printing the schema created nothing.
    run(&db, &["--no-migrate", "acquire", "job"]).await.expect(78);

    // The whole text at once, as a user pastes it.
    let pool = db.of_the_command().pool_of(1).await;
    sqlx::raw_sql(AssertSqlSafe(printed.stdout)).execute(&pool).await.expect("SQL");
    let ended = run(&db, &["--no-migrate", "run", "job", "--", "sh", "-c", "echo $SQLOCK_TOKEN"]).await.expect(0);
    assert_eq!(ended.stderr, "");
    let acquired = run(&db, &["--no-migrate", "acquire", "job"]).await.expect(0);
    let token = serde_json::from_str::<Value>(&acquired.stdout).expect("JSON")["token"].to_string();
    // The tables are those of `migrate`: it finds nothing to change, and nothing is lost.
    run(&db, &["migrate"]).await.expect(0);
    run(&db, &["--no-migrate", "release", "job", "--token", &token]).await.expect(0);
    let recorded = "SELECT max(version) FROM _sqlock_migrations";
    let recorded: i64 = sqlx::query_scalar(recorded).fetch_one(&pool).await.expect("the record of the migrations");
    assert_eq!(recorded, latest_version(&run(&db, &["schema"]).await.stdout));
}

/// The version in the last comment of a printed schema.
fn latest_version(printed: &str) -> i64 {
    let mut versions = printed.lines().filter_map(|line| line.strip_prefix("-- sqlock schema version "));
    versions.next_back().and_then(|version| version.parse().ok()).expect("a version")
}

#[tokio::test]
async fn schema_from_a_version_upgrades_its_tables() {
    let db = empty().await;
    let all = run(&db, &["schema"]).await.expect(0).stdout;
    let latest = latest_version(&all);
    let pool = db.of_the_command().pool_of(1).await;
    // By the application's own migrations, release by release.
    let mut rest = all.as_str();
    for version in 0..latest {
        let printed = run(&db, &["schema", "--from", &version.to_string()]).await.expect(0);
        assert_eq!((printed.stdout.as_str(), printed.stderr.as_str()), (rest, ""));
        let next = rest[1..].find("-- sqlock schema version ").map_or(rest.len(), |at| at + 1);
        let (step, later) = rest.split_at(next);
        sqlx::raw_sql(AssertSqlSafe(step.to_owned())).execute(&pool).await.expect("SQL");
        rest = later;
    }
    run(&db, &["--no-migrate", "run", "job", "--", "true"]).await.expect(0);
    run(&db, &["migrate"]).await.expect(0);

    let current = run(&db, &["schema", "--from", &latest.to_string()]).await.expect(0);
    assert_eq!(current.stdout, "");
    assert!(current.stderr.contains("is the latest"), "{}", current.stderr);
    let unknown = run(&db, &["schema", "--from", &(latest + 1).to_string()]).await.expect(64);
    assert!(unknown.stderr.contains("a later version needs a later sqlock"), "{}", unknown.stderr);
}

/// As after a partial restore.
#[tokio::test]
async fn dropped_table_is_reported_by_migrate_and_ls() {
    let db = empty().await;
    run(&db, &["migrate"]).await.expect(0);
    let pool = db.of_the_command().pool_of(1).await;
    for sql in ["DROP VIEW sqlock_holders", "DROP TABLE sqlock_lease", "DROP TABLE sqlock_idem_step"] {
        pool.execute(sql).await.expect(sql);
    }
    let ended = run(&db, &["migrate"]).await.expect(78);
    assert!(ended.stderr.contains(": sqlock_lease, sqlock_idem_step. "), "{}", ended.stderr);
    assert!(ended.stderr.contains("sqlock schema"), "{}", ended.stderr);
    for arguments in [&["ls"][..], &["show", "job"], &["run", "job", "--", "true"]] {
        let ended = run(&db, arguments).await.expect(78);
        assert!(ended.stderr.contains("tables are missing"), "{}", ended.stderr);
    }
    let printed = run(&db, &["schema"]).await.expect(0);
    sqlx::raw_sql(AssertSqlSafe(printed.stdout)).execute(&pool).await.expect("SQL");
    run(&db, &["migrate"]).await.expect(0);
    run(&db, &["ls"]).await.expect(0);
}

#[tokio::test]
async fn migrate_refuses_tables_of_a_later_generation() {
    let db = empty().await;
    run(&db, &["migrate"]).await.expect(0);
    let pool = db.of_the_command().pool_of(1).await;
    let later = "UPDATE _sqlock_migrations SET version = 1000 WHERE version = 1";
    sqlx::query(later).execute(&pool).await.expect("the record of the migrations");
    let ended = run(&db, &["migrate"]).await.expect(78);
    assert!(ended.stderr.contains("version 1000") && ended.stderr.contains("update sqlock"), "{}", ended.stderr);
}

#[tokio::test]
async fn user_without_create_right_needs_existing_tables() {
    if DATABASE == Database::Sqlite {
        // SQLite has only the rights of the file system. A file that cannot be created is the
        // counterpart.
        let directory = tempfile::tempdir().expect("a temporary directory");
        fs::create_dir(directory.path().join("app.db-sqlock")).expect("the directory is ours to write");
        let url = format!("sqlite://{}/app.db", directory.path().display());
        let ended = end(bare(&["-D", &url, "run", "job", "--", "echo", "it ran"])).await.expect(78);
        assert_eq!(ended.stdout, "");
        return;
    }
    let user = Restricted::on(empty().await).await;
    if DATABASE.is_mysql() {
        // On these servers, a user without any right to a database does not see it.
        user.grant("SELECT").await;
    }
    let as_user = |arguments: &[&str]| {
        let mut command = bare(arguments);
        command.env("DATABASE_URL", &user.url);
        end(command)
    };
    for arguments in [&["run", "job", "--", "echo", "it ran"][..], &["acquire", "job"], &["migrate"]] {
        let ended = as_user(arguments).await.expect(78);
        assert_eq!(ended.stdout, "", "{arguments:?}");
        for advice in ["sqlock migrate", "sqlock schema", "denied"] {
            assert!(ended.stderr.contains(advice), "{arguments:?}: {}", ended.stderr);
        }
    }
    // Another process creates them.
    run(&user.db, &["migrate"]).await.expect(0);
    user.grant("SELECT, INSERT, UPDATE, DELETE").await;
    let ended = as_user(&["run", "job", "--", "echo", "it ran"]).await.expect(0);
    assert_eq!((&*ended.stdout, &*ended.stderr), ("it ran\n", ""));
    let acquired = as_user(&["acquire", "job"]).await.expect(0);
    let token = serde_json::from_str::<Value>(&acquired.stdout).expect("JSON")["token"].to_string();
    as_user(&["renew", "job", "--token", &token]).await.expect(0);
    as_user(&["release", "job", "--token", &token]).await.expect(0);
    as_user(&["migrate"]).await.expect(0);
    as_user(&["bench", "--time", "100ms", "--tasks", "2"]).await.expect(0);
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(as_user(&["sweep", "--retention", "0s"]).await.expect(0).stdout, "purged 1 names and requests\n");
    user.drop().await;
}

#[tokio::test]
async fn serializable_default_isolation_changes_nothing() {
    let Some(server) = DATABASE.server() else {
        // SQLite has only one level. The journal mode of the file can differ.
        let db = empty().await;
        beside(&db).await;
        let pool = db.of_the_command().pool_of(1).await;
        pool.execute("PRAGMA journal_mode = DELETE").await.expect("the file is there");
        pool.close().await;
        return works_for_four_at_once(&db).await;
    };
    let setting = match DATABASE {
        Database::Postgres => "default_transaction_isolation=serializable",
        _ => "--transaction-isolation=SERIALIZABLE",
    };
    let server = Server::start_with(server, Options { settings: vec![setting.into()], ..Options::default() });
    let db = empty_on(&server.url()).await;
    let level = match DATABASE {
        Database::Postgres => "SHOW default_transaction_isolation",
        Database::MariaDb => "SELECT @@tx_isolation",
        _ => "SELECT @@transaction_isolation",
    };
    let level: String = sqlx::query_scalar(level).fetch_one(&db.pool_of(1).await).await.expect("the setting");
    assert_eq!(level.to_lowercase(), "serializable");
    works_for_four_at_once(&db).await;
}

/// Runs in a database with or without tables.
async fn works_for_four_at_once(db: &TestDatabase) {
    let mut clients = JoinSet::new();
    for client in 0..4 {
        let verb = |arguments: &[&str]| end(sqlock(db, arguments));
        let own = format!("own/{client}");
        let (runs, acquire) = (verb(&["run", "job", "--", "echo", "it ran"]), verb(&["acquire", &own]));
        let url = db.url.clone();
        clients.spawn(async move {
            let ended = runs.await.expect(0);
            assert_eq!(ended.stdout, "it ran\n");
            assert!(ended.stderr.is_empty() || ended.stderr.contains("waiting for"), "{}", ended.stderr);
            let acquired = acquire.await.expect(0);
            let token = serde_json::from_str::<Value>(&acquired.stdout).expect("JSON")["token"].to_string();
            for verb in ["renew", "release"] {
                run(&TestDatabase::at(url.clone()), &[verb, &own, "--token", &token]).await.expect(0);
            }
        });
    }
    for client in soon("the end of all", async { clients.join_all().await }).await {
        let () = client;
    }
    assert_eq!(run(db, &["ls", "--json"]).await.expect(0).stdout, "[]\n");
}

// ---- place of the tables

#[tokio::test]
async fn application_transaction_does_not_block_a_run() {
    let db = empty().await;
    let pool = db.pool_of(1).await;
    pool.execute("CREATE TABLE app (id INT PRIMARY KEY)").await.expect("a table");
    let begin = if DATABASE == Database::Sqlite { "BEGIN IMMEDIATE" } else { "BEGIN" };
    let mut migration = pool.begin_with(begin).await.expect("begin");
    migration.execute("INSERT INTO app VALUES (1)").await.expect("insert");
    // A transaction that writes blocks a SQLite file. There the run is longer than the TTL, so that
    // the lease must be renewed.
    let seconds = if DATABASE == Database::Sqlite { "9" } else { "1" };
    let ended = run(&db, &["run", "--ttl", "8s", "--kill-after", "0", "job", "--", "sleep", seconds]).await.expect(0);
    assert_eq!(ended.stderr, "");
    migration.commit().await.expect("commit");
}

#[tokio::test]
async fn sqlite_leases_live_in_a_sidecar_file() {
    let db = empty().await;
    let pool = db.pool_of(1).await;
    pool.execute("CREATE TABLE app (id INT PRIMARY KEY)").await.expect("a table");
    pool.close().await;
    let file = db.url.strip_prefix("sqlite://").map(|rest| rest.trim_end_matches("?mode=rwc"));
    let before = file.map(contents);
    run(&db, &["run", "job", "--", "true"]).await.expect(0);
    run(&db, &["acquire", "job"]).await.expect(0);
    let ours: Result<i64, sqlx::Error> =
        sqlx::query_scalar("SELECT count(*) FROM sqlock_lease").fetch_one(&db.pool_of(1).await).await;
    let Some(file) = file else {
        assert_eq!(ours.expect("our table"), 1);
        return;
    };
    ours.expect_err("there is no table of ours in the application's file");
    assert_eq!(Some(contents(file)), before, "it is not touched");
    assert!(Path::new(&format!("{file}-sqlock")).exists());
    assert!(is_taken(&db, "job").await);

    // Another path or a link leads to the same file; a missing file is not created.
    let directory = Path::new(file).parent().expect("a directory");
    std::os::unix::fs::symlink(file, directory.join("link.db")).expect("a link");
    for name in ["test.db", "./test.db", "link.db", "test.db-sqlock"] {
        let mut command = bare(&["acquire", "-n", "job", "-D", &format!("sqlite://{name}")]);
        command.current_dir(directory);
        end(command).await.expect(75);
    }
    let mut command = bare(&["run", "job", "-D", "sqlite:missing.db", "--", "true"]);
    command.current_dir(directory);
    end(command).await.expect(0);
    assert!(!directory.join("missing.db").exists() && directory.join("missing.db-sqlock").exists());
}

fn contents(file: &str) -> (Vec<u8>, std::time::SystemTime) {
    let modified = fs::metadata(file).and_then(|about| about.modified()).expect("the file is there");
    (fs::read(file).expect("the file can be read"), modified)
}

// ---- bench

/// Counts the rows of names, held or free.
async fn rows(pool: &Pool<Sql>) -> i64 {
    let mut rows = 0;
    let tables: &[&'static str] = match DATABASE {
        Database::Sqlite => &["SELECT count(*) FROM sqlock_lease"],
        _ => &["SELECT count(*) FROM sqlock_lease", "SELECT count(*) FROM sqlock_entry"],
    };
    for &count in tables {
        rows += sqlx::query_scalar::<_, i64>(count).fetch_one(pool).await.expect("our table");
    }
    rows
}

#[tokio::test]
async fn bench_measures_and_leaves_nothing_behind() {
    let db = empty().await;
    let ended = run(&db, &["bench", "--time", "100ms", "--tasks", "4", "--json"]).await.expect(0);
    assert_eq!(ended.stderr, "");
    let lines: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    let lines = lines.as_array().expect("an array");
    assert!(lines.len() >= 5, "{lines:?}");
    for line in lines {
        let mut keys: Vec<&str> = line.as_object().expect("an object").keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, ["ratio", "unit", "value", "what"]);
        assert!(line["value"].as_f64().expect("a number") > 0.0, "{line}");
    }
    let pool = db.of_the_command().pool_of(1).await;
    assert_eq!(rows(&pool).await, 0);

    let table = run(&db, &["bench", "--time", "100ms", "--tasks", "4"]).await.expect(0).stdout;
    assert_eq!(table.lines().count(), lines.len() + 1, "{table}");
    assert_eq!(rows(&pool).await, 0);
}

#[tokio::test]
async fn bench_of_several_servers_is_refused() {
    let db = empty().await;
    let urls = format!("{},{}://u@127.0.0.1:1/x", db.url, DATABASE.scheme());
    let ended = end(bare(&["-D", &urls, "bench", "--time", "100ms"])).await.expect(78);
    assert!(DATABASE == Database::Sqlite || ended.stderr.contains("one server"), "{}", ended.stderr);
}

#[tokio::test]
async fn interrupted_bench_leaves_nothing_behind() {
    let db = empty().await;
    let locks = beside(&db).await;
    let ours = locks.lease("sqlock-bench").ttl(LONG).acquire().await.expect("acquire");
    let pool = db.of_the_command().pool_of(1).await;
    let before = rows(&pool).await;
    // Interrupted at the first row, which the bare write changes, and among those of all tasks.
    for (signal, written) in [(Signal::INT, 1), (Signal::TERM, 1), (Signal::INT, 8), (Signal::TERM, 8)] {
        let bench = Running::start(sqlock(&db, &["bench", "--time", "500ms", "--tasks", "8"]));
        let at_work = async { while rows(&pool).await < before + written {} };
        soon("rows of the bench", at_work).await;
        bench.signal(signal);
        let ended: Ended = bench.end().await.expect(if signal == Signal::INT { 130 } else { 143 });
        assert_eq!(ended.stdout, "");
        assert_eq!(rows(&pool).await, before, "{}", ended.stderr);
    }
    ours.release().await.expect("not touched");
}

// ---- passwords

#[tokio::test]
async fn password_never_appears_in_output() {
    let port = ClosedPort::reserve();
    let closed = port.number();
    let mut urls: Vec<String> = Vec::new();
    // Unknown, misspelt or missing schemes are read before the kind of database is known.
    for bad in ["oracle://u:s3cret@127.0.0.1/x", "postgre://u:s3cret@127.0.0.1/x", "u:s3cret@127.0.0.1", "s3cret"] {
        urls.push(bad.into());
    }
    let scheme = DATABASE.scheme();
    for rest in [
        &*format!("127.0.0.1:{closed}/x"),
        "127.0.0.1:port/x",
        "127.0.0.1:99999/x",
        "[::1/x",
        "no such host/x",
        "nosuch.invalid/x",
        "127.0.0.1:1/x?sslmode=bogus&ssl-mode=bogus&mode=bogus",
    ] {
        urls.push(format!("{scheme}://u:s3cret@{rest}"));
        urls.push(format!("{scheme}://u:s3cret%FF@{rest}"));
        urls.push(format!("{scheme}://u:s3cret/x@{rest}"));
    }
    let mut attempts: Vec<Command> = Vec::new();
    for url in &urls {
        let mut by_variable = bare(&["run", "-n", "job", "--", "true"]);
        by_variable.env("DATABASE_URL", url);
        attempts.push(by_variable);
    }
    let url = format!("{scheme}://u:s3cret@127.0.0.1:{closed}/x");
    let (short, assigned) = (format!("-D{url}"), format!("--database-url={url}"));
    let misspelt = format!("--databaseurl={url}");
    for arguments in [
        &["ls", "-D", &url][..],
        &["migrate", "-D", &url],
        &["bench", "--time", "100ms", "-D", &url],
        &[&short, "ls"],
        &[&assigned, "ls", "--frobnicate"],
        &["ls", "-D", &url, "-D", &url],
        // In the wrong place, as a user's mistake.
        &[&misspelt, "ls"],
        &[&url, "ls"],
        &["ls", "job", &url],
        &["run", "job", "-D", "--", &url],
        &["run", "job", &url, "--", "true"],
        &["schema", "--db", &url],
        &["bench", "--time", &url],
        &["renew", "job", "--token", &url],
        &["run", "--signal", &url, "job", "--", "true"],
        &["completions", &url],
    ] {
        attempts.push(bare(arguments));
    }
    let directory = directory("");
    for (text, how) in [
        (format!("DATABASE_URL=\"{url}\n"), "a quote that is not closed"),
        (format!("DATABASE_URL={url} and more\n"), "a space"),
        (format!("{url}\n"), "no variable"),
        (format!("DATABASE_URL={url}\n"), "a database that is not there"),
    ] {
        let place = directory.path().join(how);
        fs::create_dir(&place).expect("the directory is ours to write");
        fs::write(place.join(".env"), text).expect("the directory is ours to write");
        let mut command = bare(&["ls"]);
        command.current_dir(place);
        attempts.push(command);
    }
    let mut running = JoinSet::new();
    for mut command in attempts {
        // These variables may reveal more output.
        command.env("RUST_BACKTRACE", "1").env("RUST_LOG", "trace");
        running.spawn(async move {
            let shown = format!("{:?}", command.as_std());
            (shown, end(command).await)
        });
    }
    for (attempt, ended) in soon("the end of all", running.join_all()).await {
        assert!(ended.code() != 0 || DATABASE == Database::Sqlite, "{attempt}");
        for text in [&ended.stdout, &ended.stderr] {
            // SQLite has no passwords: a text that looks like one is the name of a file, and is
            // shown.
            assert!(!text.contains("s3cret") || DATABASE == Database::Sqlite, "{attempt}: {text}");
        }
    }
}
