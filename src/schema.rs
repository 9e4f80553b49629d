//! The tables: embedded migrations with a history of their own.
//!
//! sqlx's migrator does the work, with three corrections. The history lives in
//! `_sqlock_migrations`, so that an application's own migrations and those of this crate do not
//! interfere. sqlx's advisory lock stays off: on PostgreSQL it survives a failed migration and is
//! stranded by a transaction pooler, on MariaDB it does not exclude other migrations. Instead every
//! step may fail because of another process, and is then retried. If the tables are up to date,
//! nothing is created, so the rights to read and write suffice from then on.

use std::borrow::Cow;
use std::time::Duration;

use sqlx::migrate::{Migrate, MigrateError, Migration, MigrationType, Migrator};
#[cfg(any(feature = "postgres", feature = "mysql"))]
use sqlx::{ConnectOptions, Connection as _};
use sqlx::{Database, Pool, SqlStr};
use tokio::time::Instant;

use crate::error::{Error, Fault, Result};

/// The table in which sqlx records the applied migrations of this crate.
const HISTORY: &str = "_sqlock_migrations";

/// How long a migration waits for another process that migrates the same database.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(30);

/// The versions of a generation. A migration only adds to the tables of its generation, so programs
/// that know different versions of one generation can use the tables together. A migration that is
/// incompatible with earlier programs begins the next generation: 1000, 2000, …
const GENERATION: i64 = 1000;

type Files = &'static [(i64, &'static str, &'static str)];

#[cfg(feature = "postgres")]
pub(crate) const POSTGRES: Files = &[
    (1, "lease", include_str!("../migrations/postgres/0001_lease.sql")),
    (2, "row", include_str!("../migrations/postgres/0002_row.sql")),
    (3, "idem", include_str!("../migrations/postgres/0003_idem.sql")),
    (4, "idem step", include_str!("../migrations/postgres/0004_idem_step.sql")),
    (5, "holders", include_str!("../migrations/postgres/0005_holders.sql")),
];

#[cfg(feature = "mysql")]
pub(crate) const MYSQL: Files = &[
    // DDL commits by itself on MySQL: each file is one table, or tables that can be created again.
    (1, "client", include_str!("../migrations/mysql/0001_client.sql")),
    (2, "lease", include_str!("../migrations/mysql/0002_lease.sql")),
    (3, "entry", include_str!("../migrations/mysql/0003_entry.sql")),
    (4, "row", include_str!("../migrations/mysql/0004_row.sql")),
    (5, "idem", include_str!("../migrations/mysql/0005_idem.sql")),
    (6, "idem step", include_str!("../migrations/mysql/0006_idem_step.sql")),
    (7, "holders", include_str!("../migrations/mysql/0007_holders.sql")),
];

#[cfg(feature = "sqlite")]
pub(crate) const SQLITE: Files = &[
    (1, "lease", include_str!("../migrations/sqlite/0001_lease.sql")),
    (2, "idem", include_str!("../migrations/sqlite/0002_idem.sql")),
    (3, "holders", include_str!("../migrations/sqlite/0003_holders.sql")),
];

/// Applies the missing migrations, even while other processes do the same. A migration that has not
/// finished runs in another process, or was interrupted: `clear` deletes the record of an
/// interrupted one.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
pub(crate) async fn migrate<DB>(
    pool: &Pool<DB>,
    files: Files,
    clear: impl AsyncFn(&Pool<DB>) -> Result<(), sqlx::Error>,
) -> Result<()>
where
    DB: Database,
    DB::Connection: Migrate,
{
    let (migrator, clear) = (&migrator(files), &clear);
    retry(|| async move {
        if is_current(pool, migrator).await? {
            return Ok(());
        }
        let migrated = migrator.run(pool).await;
        if let Err(MigrateError::Dirty(_)) = migrated {
            clear(pool).await?;
        }
        migrated
    })
    .await
}

/// As [`migrate`], in one transaction, which begins with statements for its own settings.
#[cfg(feature = "postgres")]
pub(crate) async fn migrate_in_transaction(pool: &sqlx::PgPool, files: Files, settings: &[&'static str]) -> Result<()> {
    let migrator = &migrator(files);
    retry(|| async move {
        if is_current(pool, migrator).await? {
            return Ok(());
        }
        let mut tx = pool.begin().await?;
        for setting in settings {
            sqlx::query(*setting).execute(&mut *tx).await?;
        }
        migrator.run_direct(None, &mut *tx, false).await?;
        Ok(tx.commit().await?)
    })
    .await
}

/// Repeats an attempt until it succeeds or fails for a lasting reason.
async fn retry<F>(attempt: impl Fn() -> F) -> Result<()>
where
    F: Future<Output = Result<(), MigrateError>>,
{
    let start = Instant::now();
    while let Err(error) = attempt().await {
        if start.elapsed() >= retry_limit(&error) {
            return Err(into_error(error));
        }
        pause().await;
    }
    Ok(())
}

/// Returns whether all migrations are applied. Only reads.
async fn is_current<DB>(pool: &Pool<DB>, migrator: &Migrator) -> Result<bool, MigrateError>
where
    DB: Database,
    DB::Connection: Migrate,
{
    let mut conn = pool.acquire().await?;
    let Ok(unfinished) = conn.dirty_version(HISTORY).await else {
        return Ok(false);
    };
    let applied = conn.list_applied_migrations(HISTORY).await?;
    let known = migrator.iter().map(|migration| migration.version).max().unwrap_or_default();
    if let Some(found) = find_incompatible(applied.iter().map(|applied| applied.version), known) {
        return Err(MigrateError::VersionTooNew(found, end_of_generation(known)));
    }
    // An unfinished migration of a later program only adds to the tables.
    let is_finished = unfinished.is_none_or(|version| version > known);
    let mut wanted = migrator.iter();
    Ok(is_finished
        && wanted.all(|wanted| applied.iter().any(|a| a.version == wanted.version && a.checksum == wanted.checksum)))
}

/// Returns the latest version whose generation is later than the known ones.
fn find_incompatible(applied: impl Iterator<Item = i64>, known: i64) -> Option<i64> {
    applied.filter(|version| *version > end_of_generation(known)).max()
}

/// Returns the last version of the generation of a version.
fn end_of_generation(version: i64) -> i64 {
    version / GENERATION * GENERATION + GENERATION - 1
}

fn migrator(files: Files) -> Migrator {
    let migrations = files
        .iter()
        .map(|&(version, description, sql)| {
            let description = Cow::Borrowed(description);
            Migration::new(version, description, MigrationType::Simple, SqlStr::from_static(sql), false)
        })
        .collect();
    let mut migrator = Migrator::with_migrations(migrations);
    migrator.dangerous_set_table_name(HISTORY);
    migrator.set_locking(false);
    // A newer version of this crate may have migrated the database.
    migrator.set_ignore_missing(true);
    migrator
}

/// Runs `open` until it succeeds or fails for a lasting reason. First connections to a new SQLite
/// file can find it locked in spite of the busy timeout, while another connection switches it to
/// WAL.
#[cfg(feature = "sqlite")]
pub(crate) async fn retry_connect<T, F>(open: impl Fn() -> F) -> Result<T>
where
    F: Future<Output = Result<T, sqlx::Error>>,
{
    let until = Instant::now() + MIGRATION_TIMEOUT;
    loop {
        match open().await {
            Ok(opened) => return Ok(opened),
            Err(error) if Fault::from_error(&error) == Fault::RolledBack && Instant::now() < until => pause().await,
            Err(error) => return Err(connect_error(error)),
        }
    }
}

async fn pause() {
    tokio::time::sleep(crate::backoff::jittered(Duration::from_millis(50))).await;
}

/// Returns how long to retry after an error: a race against another migration passes when that
/// migration has finished.
fn retry_limit(error: &MigrateError) -> Duration {
    match error {
        MigrateError::Execute(e) | MigrateError::ExecuteMigration(e, _)
            if matches!(
                Fault::from_error(e),
                Fault::Race | Fault::RolledBack | Fault::Blocked | Fault::Cancelled | Fault::NoTable
            ) =>
        {
            MIGRATION_TIMEOUT
        }
        // MySQL: another process is between its record and its table, or was killed there.
        MigrateError::Dirty(_) => MIGRATION_TIMEOUT / 3,
        _ => Duration::ZERO,
    }
}

/// Opens a connection and closes it, to find the reason of a failure: a pool would only report a
/// timeout, and late.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) async fn check_connection<O>(options: &O, within: Duration) -> Result<()>
where
    O: ConnectOptions<Connection: Sized>,
{
    let until = Instant::now() + within;
    let mut last = None;
    while let Ok(connected) = tokio::time::timeout_at(until, options.connect()).await {
        match connected {
            Ok(conn) => {
                let _ = tokio::time::timeout(within, conn.close()).await;
                return Ok(());
            }
            Err(error) if Fault::from_error(&error) == Fault::ConnectionLost => last = Some(error),
            Err(error) => return Err(connect_error(error)),
        }
        pause().await;
    }
    let silent = || sqlx::Error::Io(std::io::Error::other(format!("no connection within {within:?}")));
    Err(connect_error(last.unwrap_or_else(silent)))
}

/// Makes the error of a connection for the migration that could not be opened.
pub(crate) fn connect_error(error: sqlx::Error) -> Error {
    Error::from_connect("connect for the migration", error)
}

fn into_error(error: MigrateError) -> Error {
    match error {
        MigrateError::Execute(e) | MigrateError::ExecuteMigration(e, _)
            if matches!(Fault::from_error(&e), Fault::ConnectionLost | Fault::Exhausted) =>
        {
            Error::from_sqlx("migrate", e)
        }
        MigrateError::VersionTooNew(found, supported) => Error::NewerSchema { found, supported },
        source => Error::Migrate { source },
    }
}
