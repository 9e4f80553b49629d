//! Choice of the SQLite file for leases: the application's own file if programs use the library on
//! it, else a sidecar. On the other databases, library and command share one database and always
//! exclude each other.

use rustix::process::{Signal, geteuid};
use serde_json::Value;
use sqlock::Locks;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tokio::process::Command;

use super::quorum::{LeaseFile, fresh_for_the_command};
use crate::DATABASE;
use crate::support::command::{Ended, Running, bare, end, program, run};
use crate::support::{Database, LONG, TestDatabase, empty, fresh, soon, until_waiters};

/// Runs the command as a user types it, without a choice of the file.
async fn command(db: &TestDatabase, arguments: &[&str]) -> Ended {
    end(bare(&[&["-D", &db.url], arguments].concat())).await
}

/// Starts the command as a user types it.
fn start(db: &TestDatabase, arguments: &[&str]) -> Running {
    Running::start(bare(&[&["-D", &db.url], arguments].concat()))
}

/// Acquires a name for long, and returns the token.
async fn acquire(db: &TestDatabase, name: &str) -> String {
    let acquired = command(db, &["acquire", name, "--ttl", "10m"]).await.expect(0).stdout;
    serde_json::from_str::<Value>(&acquired).expect("JSON")["token"].to_string()
}

/// Creates the tables in the application's own file, as its library does.
async fn migrated(db: &TestDatabase) -> Locks {
    let locks = db.locks().await;
    locks.migrate().await.expect("migrate");
    locks
}

/// The path of a SQLite file.
fn file(db: &TestDatabase) -> &str {
    db.url.trim_start_matches("sqlite://").trim_end_matches("?mode=rwc")
}

#[tokio::test]
async fn library_keeps_the_command_out() {
    let db = fresh().await;
    let lease = db.locks().await.lease("job").ttl(LONG).acquire().await.expect("acquire");
    let refused = command(&db, &["run", "-n", "job", "--", "echo", "it ran"]).await.expect(75);
    assert_eq!(refused.stdout, "");
    let shown = command(&db, &["show", "job"]).await.expect(0).stdout;
    assert!(shown.contains(&lease.token().to_string()), "{shown}");
    lease.release().await.expect("release");
    let ended = command(&db, &["run", "-n", "job", "--", "echo", "it ran"]).await.expect(0);
    assert_eq!((&*ended.stdout, &*ended.stderr), ("it ran\n", ""));
}

#[tokio::test]
async fn command_keeps_the_library_out() {
    let db = fresh().await;
    let locks = db.locks().await;
    let acquired = command(&db, &["acquire", "job", "--ttl", "10m"]).await.expect(0).stdout;
    assert!(locks.lease("job").try_acquire().await.expect("try").is_none());
    let token = serde_json::from_str::<Value>(&acquired).expect("JSON")["token"].to_string();
    command(&db, &["release", "job", "--token", &token]).await.expect(0);
    assert!(locks.lease("job").try_acquire().await.expect("try").is_some());
}

/// The first program that uses the library on the file creates its tables there; earlier leases
/// still count.
#[tokio::test]
async fn lease_taken_before_the_first_migration_still_counts() {
    let db = empty().await;
    let acquired = command(&db, &["acquire", "job", "--ttl", "10m"]).await.expect(0).stdout;
    db.locks().await.migrate().await.expect("migrate");
    command(&db, &["run", "-n", "job", "--", "echo", "it ran"]).await.expect(75);
    let token = serde_json::from_str::<Value>(&acquired).expect("JSON")["token"].to_string();
    command(&db, &["release", "job", "--token", &token]).await.expect(0);
    let lease = db.locks().await.lease("job").ttl(LONG).try_acquire().await.expect("try").expect("free");
    command(&db, &["run", "-n", "job", "--", "echo", "it ran"]).await.expect(75);
    lease.release().await.expect("release");
}

/// A writer may block all readers of a file without a write-ahead log.
#[tokio::test]
async fn file_locked_by_a_writer_needs_no_wait() {
    let db = empty().await;
    if DATABASE == Database::Sqlite {
        let pool = db.pool_of(1).await;
        sqlx::raw_sql("CREATE TABLE t (x); BEGIN EXCLUSIVE; INSERT INTO t VALUES (1)")
            .execute(&pool)
            .await
            .expect("a writer");
        command(&db, &["run", "-n", "job", "--", "true"]).await.expect(0);
    } else {
        command(&db, &["run", "-n", "job", "--", "true"]).await.expect(0);
    }
}

#[tokio::test]
async fn sidecar_is_named_when_file_has_no_tables() {
    let db = empty().await;
    let ended = command(&db, &["run", "job", "--", "true"]).await.expect(0);
    assert_eq!(ended.stderr.contains("test.db-sqlock"), DATABASE == Database::Sqlite, "{}", ended.stderr);
    assert_eq!(command(&db, &["--quiet", "run", "job", "--", "true"]).await.expect(0).stderr, "");
}

/// The two options change nothing on the other databases.
#[tokio::test]
async fn sidecar_and_same_file_choose_the_place() {
    let db = fresh().await;
    let _lease = db.locks().await.lease("job").ttl(LONG).acquire().await.expect("acquire");
    let apart = if DATABASE == Database::Sqlite { 0 } else { 75 };
    command(&db, &["--sidecar", "run", "-n", "job", "--", "true"]).await.expect(apart);
    command(&db, &["--same-file", "run", "-n", "job", "--", "true"]).await.expect(75);
    command(&db, &["--same-file", "--sidecar", "ls"]).await.expect(64);

    // A file that is chosen at first use has the tables from then on.
    let new = empty().await;
    assert_eq!(command(&new, &["--same-file", "acquire", "job"]).await.expect(0).stderr, "");
    assert!(new.locks().await.lease("job").try_acquire().await.expect("try").is_none());
    command(&new, &["acquire", "-n", "job"]).await.expect(75);
}

/// A database on a server has no file mode; there, the test only checks that the command succeeds.
#[tokio::test]
async fn sidecar_has_the_mode_of_its_database() {
    for mode in [0o600, 0o660, 0o644] {
        let db = empty().await;
        if DATABASE == Database::Sqlite {
            fs::write(file(&db), "").expect("a file");
            fs::set_permissions(file(&db), fs::Permissions::from_mode(mode)).expect("it is ours");
        }
        run(&db, &["acquire", "job"]).await.expect(0);
        if DATABASE == Database::Sqlite {
            let sidecar = fs::metadata(format!("{}-sqlock", file(&db))).expect("the sidecar");
            assert_eq!(sidecar.permissions().mode() & 0o777, mode);
        }
    }
}

/// A waiter whose name the library holds meanwhile, in the file that has the tables since.
#[tokio::test]
async fn waiter_follows_when_the_file_gets_tables() {
    let waiters: [&[&str]; 5] = [
        &["run", "job", "--", "true"],
        &["run", "--hold-at-least", "10m", "job", "--", "true"],
        &["run", "--shared", "job", "--", "true"],
        &["run", "--permits", "2", "job", "--", "true"],
        &["acquire", "job"],
    ];
    for waiter in waiters {
        let db = empty().await;
        let token = acquire(&db, "job").await;
        let mut waiter = start(&db, waiter);
        until_waiters(&db.of_the_command().locks().await, "job", 1).await;
        let locks = migrated(&db).await;
        if DATABASE == Database::Sqlite {
            let lease = locks.lease("job").ttl(LONG).try_acquire().await.expect("try").expect("free");
            command(&db, &["release", "job", "--token", &token]).await.expect(0);
            waiter.says("test.db has the sqlock tables").await;
            until_waiters(&locks, "job", 1).await;
            lease.release().await.expect("release");
        } else {
            command(&db, &["release", "job", "--token", &token]).await.expect(0);
        }
        waiter.end().await.expect(0);
    }
}

/// The application's file cannot be read when the name is granted, so that nothing tells whether
/// the lease counts.
#[tokio::test]
async fn waiter_with_unreadable_file_keeps_no_hold_time() {
    let db = empty().await;
    let token = acquire(&db, "job").await;
    let waiter = start(&db, &["run", "--hold-at-least", "10m", "job", "--", "echo", "it ran"]);
    until_waiters(&db.of_the_command().locks().await, "job", 1).await;
    if DATABASE == Database::Sqlite {
        fs::write(file(&db), "no database, but long enough for a header ".repeat(100)).expect("the directory is ours");
        run(&db, &["release", "job", "--token", &token]).await.expect(0);
        assert_eq!(waiter.end().await.expect(78).stdout, "");
        run(&db, &["run", "-n", "job", "--", "true"]).await.expect(0);
    } else {
        command(&db, &["release", "job", "--token", &token]).await.expect(0);
        assert_eq!(waiter.end().await.expect(0).stdout, "it ran\n");
    }
}

/// No command has run under the lease.
#[tokio::test]
async fn interrupted_look_for_tables_keeps_no_hold_time() {
    let db = empty().await;
    acquire(&db, "job").await;
    let waiter = start(&db, &["run", "--hold-at-least", "10m", "job", "--", "sleep", "600"]);
    let locks = db.of_the_command().locks().await;
    until_waiters(&locks, "job", 1).await;
    let writer = db.pool_of(1).await;
    if DATABASE == Database::Sqlite {
        let lock = "PRAGMA journal_mode = WAL; PRAGMA locking_mode = EXCLUSIVE; CREATE TABLE t (x INTEGER)";
        sqlx::raw_sql(lock).execute(&writer).await.expect("a writer");
    }
    let first = locks.inspect("job").await.expect("inspect").expect("held").token;
    assert!(locks.evict("job", first).await.expect("evict"));
    let granted = async {
        while locks.inspect("job").await.expect("inspect").is_none_or(|held| held.owner.is_none()) {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    soon("the grant", granted).await;
    waiter.signal(Signal::INT);
    waiter.end().await.expect(130);
    if DATABASE == Database::Sqlite {
        assert_eq!(locks.inspect("job").await.expect("inspect"), None);
    }
}

#[tokio::test]
async fn timeout_counts_from_the_first_wait() {
    let db = empty().await;
    let token = acquire(&db, "job").await;
    let waiter = start(&db, &["run", "-w", "5", "job", "--", "echo", "it ran"]);
    until_waiters(&db.of_the_command().locks().await, "job", 1).await;
    if DATABASE == Database::Sqlite {
        let _lease = migrated(&db).await.lease("job").ttl(LONG).try_acquire().await.expect("try").expect("free");
        command(&db, &["release", "job", "--token", &token]).await.expect(0);
        assert_eq!(waiter.end().await.expect(75).stdout, "");
    } else {
        assert_eq!(waiter.end().await.expect(75).stdout, "");
    }
}

/// A command that held the name before the tables were there acquires it again.
#[tokio::test]
async fn candidate_follows_when_the_file_gets_tables() {
    let db = empty().await;
    let elect =
        ["run", "--elect", "--ttl", "6", "--kill-after", "2", "job", "--", "sh", "-c", "echo up; exec sleep 1000"];
    let mut candidate = start(&db, &elect);
    candidate.prints("up").await;
    let locks = migrated(&db).await;
    let held = db.of_the_command().locks().await.inspect("job").await.expect("inspect").expect("held");
    let unlock = ["unlock", "job", "--token", &held.token.to_string()];
    if DATABASE == Database::Sqlite {
        let lease = locks.lease("job").ttl(LONG).try_acquire().await.expect("try").expect("free");
        command(&db, &unlock).await.expect(0);
        candidate.says("test.db has the sqlock tables").await;
        until_waiters(&locks, "job", 1).await;
        lease.release().await.expect("release");
    } else {
        command(&db, &unlock).await.expect(0);
    }
    candidate.prints("up").await;
    candidate.signal(Signal::TERM);
    candidate.end().await.expect(143);
}

/// Waiters for a majority have no place in a queue that they could keep.
#[tokio::test]
async fn waiter_for_majority_ends_when_tables_appear() {
    for (options, code) in [(&[][..], 75), (&["-E", "9"], 9), (&["--skip-ok"], 0)] {
        let (db, two) = (fresh_for_the_command().await, LeaseFile::with_tables().await);
        let both = TestDatabase::at(format!("{},{}", db.url, two.url));
        let acquired = command(&both, &["acquire", "--quorum", "job", "--ttl", "10m"]).await.expect(0).stdout;
        let token = serde_json::from_str::<Value>(&acquired).expect("JSON")["token"].to_string();
        let mut waiter = start(&both, &[&["run", "--quorum"], options, &["job", "--", "echo", "it ran"]].concat());
        waiter.says("waiting for").await;
        migrated(&db).await;
        command(&both, &["release", "--quorum", "job", "--token", &token]).await.expect(0);
        if DATABASE == Database::Sqlite {
            let ended = waiter.end().await.expect(code);
            assert_eq!(ended.stdout, "");
            assert!(ended.stderr.contains("start again"), "{}", ended.stderr);
        } else {
            assert_eq!(waiter.end().await.expect(0).stdout, "it ran\n");
        }
    }
}

/// The sidecar is used for the names that are held there, not for others, which the library may
/// hold.
#[tokio::test]
async fn other_name_in_the_sidecar_changes_nothing() {
    let db = empty().await;
    let other = acquire(&db, "other").await;
    let lease = migrated(&db).await.lease("job").ttl(LONG).acquire().await.expect("acquire");
    command(&db, &["run", "-n", "job", "--", "echo", "it ran"]).await.expect(75);
    lease.release().await.expect("release");
    let token = acquire(&db, "job").await;
    assert!(db.locks().await.lease("job").try_acquire().await.expect("try").is_none());
    command(&db, &["release", "job", "--token", &token]).await.expect(0);
    command(&db, &["release", "other", "--token", &other]).await.expect(0);
}

#[tokio::test]
async fn nested_run_enters_after_the_file_gets_tables() {
    let db = empty().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let go = directory.path().join("go");
    let script = format!(
        "echo up; until [ -e '{}' ]; do sleep 0.05; done; exec '{}' -D '{}' run -n job -- echo nested",
        go.display(),
        program(),
        db.url
    );
    let mut outer = start(&db, &["run", "job", "--", "sh", "-c", &script]);
    outer.prints("up").await;
    migrated(&db).await;
    fs::write(&go, "").expect("the directory is ours");
    assert_eq!(outer.end().await.expect(0).stdout, "up\nnested\n");
}

#[tokio::test]
async fn unreadable_sidecar_is_not_taken_for_empty() {
    let db = fresh().await;
    if DATABASE == Database::Sqlite {
        let sidecar = format!("{}-sqlock", file(&db));
        fs::write(&sidecar, "").expect("the directory is ours");
        command(&db, &["run", "-n", "job", "--", "true"]).await.expect(0);
        fs::write(&sidecar, "no database, but long enough for a header ".repeat(100)).expect("the directory is ours");
        let ended = command(&db, &["run", "-n", "job", "--", "echo", "it ran"]).await.expect(78);
        assert_eq!(ended.stdout, "");
        assert!(ended.stderr.contains("test.db-sqlock"), "{}", ended.stderr);
    }
    command(&db, &["--same-file", "run", "-n", "job", "--", "true"]).await.expect(0);
}

/// The log of a file may have the tables, although the file has none.
#[tokio::test]
async fn file_locked_with_its_log_is_not_empty() {
    let db = empty().await;
    if DATABASE == Database::Sqlite {
        let pool = db.pool_of(1).await;
        let lock = "PRAGMA journal_mode = WAL; PRAGMA locking_mode = EXCLUSIVE; CREATE TABLE sqlock_lease (name TEXT)";
        sqlx::raw_sql(lock).execute(&pool).await.expect("a writer");
        let ended = command(&db, &["run", "-n", "job", "--", "echo", "it ran"]).await.expect(69);
        assert_eq!(ended.stdout, "");
    } else {
        command(&db, &["run", "-n", "job", "--", "true"]).await.expect(0);
    }
}

#[tokio::test]
async fn file_that_excludes_nobody_is_refused() {
    let db = fresh().await;
    if DATABASE == Database::Sqlite {
        let file = file(&db);
        for url in [
            format!("sqlite://{file}?vfs=memdb"),
            format!("sqlite://{file}?mode=rwc&vfs=unix-none"),
            format!("sqlite://{file}?mode=%6demory"),
            "sqlite:///dev/null".into(),
        ] {
            for option in ["--same-file", "--sidecar", "--quiet"] {
                let ended = end(bare(&["-D", &url, option, "run", "job", "--", "echo", "it ran"])).await.expect(78);
                assert_eq!(ended.stdout, "", "{url}");
            }
        }
    }
    command(&db, &["run", "job", "--", "true"]).await.expect(0);
}

#[tokio::test]
async fn directory_without_write_permission_is_named() {
    let db = empty().await;
    if DATABASE == Database::Sqlite {
        fs::write(file(&db), "").expect("a file");
        let directory = Path::new(file(&db)).parent().expect("a directory");
        let set_mode = |mode| fs::set_permissions(directory, fs::Permissions::from_mode(mode)).expect("it is ours");
        set_mode(0o555);
        let mut command = Command::new("setpriv");
        if geteuid().is_root() {
            // Without its capabilities, root needs the permission, too.
            command.args(["--bounding-set=-all", "--inh-caps=-all"]);
        }
        command.args(["--", program(), "-D", &db.url, "run", "job", "--", "echo", "it ran"]);
        let ended = end(command).await;
        set_mode(0o755);
        let ended = ended.expect(78);
        assert_eq!(ended.stdout, "");
        assert!(ended.stderr.contains("may create files in its directory"), "{}", ended.stderr);
    } else {
        command(&db, &["run", "job", "--", "true"]).await.expect(0);
    }
}
