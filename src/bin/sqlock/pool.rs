//! A pool on a database that a URL names.

use std::path::Path;

use sqlock::Locks;
#[cfg(feature = "sqlite")]
use sqlx::sqlite::SqliteConnectOptions;

use crate::exit::Failure;
use crate::global::Global;
#[cfg(feature = "sqlite")]
use crate::sqlite_file::{
    create_parent, create_sidecar, has_leases, has_tables, holds_only_leases, lease_file_options, resolve_path,
    sidecar_path,
};
#[cfg(feature = "sqlite")]
use crate::stderr;
use crate::url::{Kind, Url};

/// A pool on the database that was named, or the first of those.
pub enum Pool {
    #[cfg(feature = "postgres")]
    Postgres(sqlx::PgPool),
    #[cfg(feature = "mysql")]
    MySql(sqlx::MySqlPool),
    #[cfg(feature = "sqlite")]
    Sqlite(sqlx::SqlitePool),
}

/// Which file, on SQLite.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
pub enum FileUse {
    /// The one that leases are kept in. `create`: if it is missing. `announce`: if it is a sidecar, that is said.
    Leases { create: bool, announce: bool },
    /// The one that is named.
    Application,
}

/// The place where leases are kept, to be looked at: nothing is sent to a server yet, nor made. On SQLite the application's
/// own file comes after it, where that is another one.
pub async fn open_for_checks(url: &Url, global: &Global) -> Result<Vec<Pool>, Failure> {
    let (pool, place) = open(url, global, FileUse::Leases { create: false, announce: false }).await?;
    let mut pools = vec![pool];
    if url.kind() == Kind::Sqlite {
        let (own, file) = open(url, global, FileUse::Application).await?;
        pools.extend(Path::new(&file).canonicalize().is_ok_and(|file| file != Path::new(&place)).then_some(own));
    }
    Ok(pools)
}

/// A pool that connects when it is needed, and where to.
#[cfg_attr(not(feature = "sqlite"), allow(unused_variables))]
pub async fn open(url: &Url, global: &Global, file_use: FileUse) -> Result<(Pool, String), Failure> {
    match url.kind() {
        #[cfg(feature = "postgres")]
        Kind::Postgres => {
            let options: sqlx::postgres::PgConnectOptions = url.parse_options()?;
            let place = format!("PostgreSQL at {}:{}", options.get_host(), options.get_port());
            Ok((Pool::Postgres(sqlx::pool::PoolOptions::new().max_connections(2).connect_lazy_with(options)), place))
        }
        #[cfg(feature = "mysql")]
        Kind::Mysql => {
            let options: sqlx::mysql::MySqlConnectOptions = url.parse_options()?;
            let server = if url.url.starts_with("mariadb") { "MariaDB" } else { "MySQL" };
            let place = format!("{server} at {}:{}", options.get_host(), options.get_port());
            Ok((Pool::MySql(sqlx::pool::PoolOptions::new().max_connections(2).connect_lazy_with(options)), place))
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
                    resolve_path(&url.url, options.get_filename())?;
                    options.create_if_missing(false)
                }
            };
            let place = options.get_filename().display().to_string();
            Ok((Pool::Sqlite(sqlx::pool::PoolOptions::new().max_connections(2).connect_lazy_with(options)), place))
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

/// The SQLite file that leases are kept in: the one that is named, if programs that use the library keep theirs there, else
/// the sidecar.
#[cfg(feature = "sqlite")]
async fn choose_lease_file(
    url: &Url,
    global: &Global,
    create: bool,
    announce: bool,
) -> Result<SqliteConnectOptions, Failure> {
    let options: SqliteConnectOptions = url.parse_options()?;
    let file = resolve_path(&url.url, options.get_filename())?;
    if holds_only_leases(&file) {
        return Ok(lease_file_options(&file, create));
    }
    let sidecar = sidecar_path(&file);
    // The application may have made its tables since leases were taken in the sidecar: as long as these last, they count.
    let shared = !global.sidecar && has_tables(&options, &file).await? && !has_leases(&sidecar).await;
    if global.same_file || shared {
        return Ok(options.filename(&file).create_if_missing(create));
    }
    if announce && !global.sidecar {
        stderr::print_note(&format!(
            "the leases are kept in {}: programs that lock in {} itself are not excluded (--sidecar, --same-file)",
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
