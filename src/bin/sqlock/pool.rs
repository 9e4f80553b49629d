//! The connection pool of a database URL.

use std::path::Path;

use sqlock::Locks;
#[cfg(feature = "sqlite")]
use sqlx::sqlite::SqliteConnectOptions;

use crate::exit::Failure;
use crate::global::Global;
#[cfg(feature = "sqlite")]
use crate::sqlite_file::{
    check_link, create_parent, create_sidecar, find_file, has_leases, has_tables, holds_only_leases,
    lease_file_options, sidecar_path,
};
#[cfg(feature = "sqlite")]
use crate::stderr;
use crate::url::{Kind, Url};

/// A pool on the database of a URL, or on the first of several servers.
pub enum Pool {
    #[cfg(feature = "postgres")]
    Postgres(sqlx::PgPool),
    #[cfg(feature = "mysql")]
    MySql(sqlx::MySqlPool),
    #[cfg(feature = "sqlite")]
    Sqlite(sqlx::SqlitePool),
}

/// The SQLite file to open.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
pub enum FileUse {
    /// The file with the leases. `create`: create a missing file. `announce`: print a note if the
    /// file is a sidecar.
    Leases { create: bool, announce: bool },
    /// The file that the URL names.
    Application,
}

/// Opens the database with the leases without creating anything. On SQLite, the application's own
/// file follows if it is a different file.
pub async fn open_for_checks(url: &Url, global: &Global) -> Result<Vec<Pool>, Failure> {
    let (pool, location) = open(url, global, FileUse::Leases { create: false, announce: false }).await?;
    let mut pools = vec![pool];
    if url.kind() == Kind::Sqlite {
        let (application, file) = open(url, global, FileUse::Application).await?;
        pools.extend(
            Path::new(&file).canonicalize().is_ok_and(|file| file != Path::new(&location)).then_some(application),
        );
    }
    Ok(pools)
}

/// Opens a pool that connects when it is used, and returns its location.
#[cfg_attr(not(feature = "sqlite"), allow(unused_variables))]
pub async fn open(url: &Url, global: &Global, file_use: FileUse) -> Result<(Pool, String), Failure> {
    match url.kind() {
        #[cfg(feature = "postgres")]
        Kind::Postgres => {
            let options: sqlx::postgres::PgConnectOptions = url.parse_options()?;
            let location = format!("PostgreSQL at {}:{}", options.get_host(), options.get_port());
            Ok((Pool::Postgres(sqlx::pool::PoolOptions::new().max_connections(2).connect_lazy_with(options)), location))
        }
        #[cfg(feature = "mysql")]
        Kind::Mysql => {
            let options: sqlx::mysql::MySqlConnectOptions = url.parse_options()?;
            let server = if url.url.starts_with("mariadb") { "MariaDB" } else { "MySQL" };
            let location = format!("{server} at {}:{}", options.get_host(), options.get_port());
            Ok((Pool::MySql(sqlx::pool::PoolOptions::new().max_connections(2).connect_lazy_with(options)), location))
        }
        #[cfg(feature = "sqlite")]
        Kind::Sqlite => {
            let options = match (file_use, &url.default_file) {
                (FileUse::Leases { create: true, .. }, Some(file)) => {
                    create_parent(file)?;
                    lease_file_options(file, true)
                }
                (_, Some(file)) => lease_file_options(file, false),
                (FileUse::Leases { create, announce }, None) => {
                    choose_lease_file(url, global, create, announce).await?
                }
                (FileUse::Application, None) => {
                    let options: SqliteConnectOptions = url.parse_options()?;
                    let file = find_file(&options)?;
                    options.filename(file).create_if_missing(false)
                }
            };
            let location = options.get_filename().display().to_string();
            Ok((Pool::Sqlite(sqlx::pool::PoolOptions::new().max_connections(2).connect_lazy_with(options)), location))
        }
        #[allow(unreachable_patterns, reason = "not in a binary with all databases")]
        missing => {
            let missing = format!("{missing:?}").to_lowercase();
            let built = [("postgres", cfg!(feature = "postgres")), ("mysql", cfg!(feature = "mysql"))];
            let built = built.iter().filter(|(_, built)| *built).map(|(feature, _)| format!(",{feature}"));
            Err(Failure::configuration(format!(
                "this sqlock was built without {missing}: cargo install sqlock --features cli{},{missing}",
                built.collect::<String>()
            )))
        }
    }
}

/// Chooses the SQLite file for leases: the file of the URL if it has the tables of sqlock,
/// otherwise the sidecar.
#[cfg(feature = "sqlite")]
async fn choose_lease_file(
    url: &Url,
    global: &Global,
    create: bool,
    announce: bool,
) -> Result<SqliteConnectOptions, Failure> {
    let options: SqliteConnectOptions = url.parse_options()?;
    let file = find_file(&options)?;
    if holds_only_leases(&file) {
        return Ok(lease_file_options(&file, create));
    }
    let sidecar = sidecar_path(&file);
    check_link(&sidecar)?;
    // Leases in the sidecar count until they end, because the application may have created its
    // tables after they were acquired.
    let is_same_file =
        global.same_file || (!global.sidecar && has_tables(&options, &file).await? && !has_leases(&sidecar).await);
    if is_same_file {
        return Ok(options.filename(&file).create_if_missing(create));
    }
    if announce && !global.sidecar {
        stderr::print_note(&format!(
            "the leases are in {}, which does not exclude programs with leases in {} (--sidecar, --same-file)",
            sidecar.display(),
            file.display()
        ));
    }
    if create {
        create_sidecar(&file, &sidecar);
    }
    Ok(lease_file_options(&sidecar, create))
}

impl Pool {
    pub fn locks(&self) -> Locks {
        match self {
            #[cfg(feature = "postgres")]
            Self::Postgres(pool) => Locks::new(pool.clone()),
            #[cfg(feature = "mysql")]
            Self::MySql(pool) => Locks::new(pool.clone()),
            #[cfg(feature = "sqlite")]
            Self::Sqlite(pool) => Locks::new(pool.clone()),
        }
    }
}
