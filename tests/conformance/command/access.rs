//! A database that cannot be used: five answers, by the library and by the command.

use sqlock::database::AccessError;
use sqlock::{Error, Locks};

use super::exit::Guarded;
use crate::DATABASE;
use crate::conformance::schema::Restricted;
use crate::support::command::{ClosedPort, bare, end, path, run};
use crate::support::server::{PgBouncer, Server};
use crate::support::{Database, empty};

/// Returns the error of the library's first request.
pub(super) async fn answer(url: &str) -> Error {
    let asked = async {
        let locks = Locks::connect(url).await?;
        locks.lease("job").try_acquire().await
    };
    asked.await.expect_err("it cannot be used")
}

/// Asks library and command; the command must end with this code and say these words.
async fn assert_answer(url: &str, cause: AccessError, words: &[&str]) {
    let error = answer(url).await;
    assert!(matches!(&error, Error::Access { cause: found, .. } if *found == cause), "{error:?}");
    assert!(!error.is_retryable(), "{error}");
    for arguments in [&["run", "job", "--", "echo", "it ran"][..], &["acquire", "-n", "job"], &["ls"]] {
        let mut command = bare(arguments);
        command.env("DATABASE_URL", url);
        let ended = end(command).await.expect(78);
        assert_eq!(ended.stdout, "", "{arguments:?}");
        for word in words {
            assert!(ended.stderr.contains(word), "{arguments:?}: no {word}: {}", ended.stderr);
        }
        assert!(!ended.stderr.contains("cannot reach"), "{arguments:?}: {}", ended.stderr);
        assert!(!ended.stderr.contains("s3cret"), "{arguments:?}: {}", ended.stderr);
    }
}

#[tokio::test]
async fn refused_password_is_no_outage() {
    let db = empty().await;
    if DATABASE == Database::Sqlite {
        // A file has no password; a file that cannot be opened is the counterpart.
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = path(directory.path(), "sqlock.db");
        std::fs::write(&file, "this is not a SQLite file, but long enough for the header of one".repeat(100))
            .expect("the directory is ours to write");
        assert_answer(&format!("sqlite://{file}"), AccessError::NoDatabase, &["file is not a database"]).await;
        return;
    }
    let guarded = Guarded::start(&db).await;
    assert_answer(&guarded.url("s3cret-not"), AccessError::Credentials, &["the user or the password", "Check"]).await;
    let missing = guarded.url("s3cret");
    let (base, _) = missing.rsplit_once('/').expect("a URL names a database");
    let cause = if DATABASE == Database::Postgres { AccessError::NoDatabase } else { AccessError::MissingPrivilege };
    assert_answer(&format!("{base}/sqlock_missing"), cause, &["sqlock_missing"]).await;
    guarded.drop().await;
}

#[tokio::test]
async fn missing_database_is_no_outage() {
    let db = empty().await;
    if DATABASE == Database::Sqlite {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let file = path(directory.path(), "missing.db");
        assert!(matches!(
            answer(&format!("sqlite://{file}")).await,
            Error::Access { cause: AccessError::NoDatabase, .. }
        ));
        // A plain file replaces its directory.
        std::fs::write(&file, "").expect("the directory is ours to write");
        for arguments in [&["ls"][..], &["run", "job", "--", "true"]] {
            let url = format!("sqlite://{file}/app.db");
            end(bare(&[&["-D", &url], arguments].concat())).await.expect(78);
        }
        return;
    }
    let (before, query) = db.url.split_once('?').unwrap_or((&db.url, ""));
    let (base, _) = before.rsplit_once('/').expect("a URL names a database");
    let url = format!("{base}/sqlock_missing?{query}");
    assert_answer(&url, AccessError::NoDatabase, &["sqlock_missing", "does not exist"]).await;
}

#[tokio::test]
async fn missing_rights_are_no_outage() {
    if DATABASE == Database::Sqlite {
        let db = empty().await;
        run(&db, &["migrate"]).await.expect(0);
        let reader = db.of_the_command().url.replace("mode=rwc", "mode=ro");
        let error = answer(&reader).await;
        assert!(matches!(error, Error::Access { cause: AccessError::MissingPrivilege, .. }), "{error:?}");
        return;
    }
    let user = Restricted::on(empty().await).await;
    run(&user.db, &["migrate"]).await.expect(0);
    if DATABASE.is_mysql() {
        // On these servers, a user without any right to a database does not see it.
        user.grant("SHOW VIEW").await;
    }
    assert_answer(&user.url, AccessError::MissingPrivilege, &["lacks a right", "denied", "sqlock doctor"]).await;
    user.drop().await;
}

#[tokio::test]
async fn unreachable_database_and_missing_tables_differ() {
    let db = empty().await;
    let error = answer(&db.of_the_command().url).await;
    assert!(matches!(error, Error::NotMigrated { .. }) && !error.is_retryable(), "{error:?}");
    if DATABASE != Database::Sqlite {
        let port = ClosedPort::reserve();
        let url = format!("{}://u@127.0.0.1:{}/x", DATABASE.scheme(), port.number());
        let error = answer(&url).await;
        assert!(matches!(error, Error::Unavailable { .. }) && error.is_retryable(), "{error:?}");
        let locks = sqlock::LocksBuilder::from_urls(&url).expect("a URL").build();
        let error = locks.migrate().await.expect_err("nothing listens");
        assert!(matches!(&error, Error::Unavailable { .. }), "{error:?}");
        let reason = error.report().to_string();
        assert!(reason.contains("refused"), "it says why: {reason}");
    }
}

#[tokio::test]
async fn changed_migration_is_not_a_missing_table() {
    let db = empty().await;
    run(&db, &["migrate"]).await.expect(0);
    let pool = db.of_the_command().pool_of(1).await;
    let other = if DATABASE == Database::Postgres { "'\\x00'" } else { "X'00'" };
    let sql = sqlx::AssertSqlSafe(format!("UPDATE _sqlock_migrations SET checksum = {other} WHERE version = 1"));
    sqlx::query(sql).execute(&pool).await.expect("the record of the migrations");
    let ended = run(&db, &["migrate"]).await.expect(78);
    assert!(ended.stderr.contains("migration 1 of the sqlock tables"), "{}", ended.stderr);
    assert!(!ended.stderr.contains("cannot be created"), "{}", ended.stderr);
}

/// The other databases have no pooler that refuses startup parameters.
#[tokio::test]
async fn misconfigured_pooler_is_no_outage() {
    if DATABASE != Database::Postgres {
        return;
    }
    let server = Server::start(DATABASE.server().expect("a server"));
    let pooler = PgBouncer::start_with(&server, "ignore_startup_parameters = options");
    assert_answer(&pooler.url(), AccessError::Pooler, &["pooler", "ignore_startup_parameters"]).await;
}
