//! The connection pool of a database URL.

use std::path::Path;

use sqlock::{FencingToken, Locks};
#[cfg(feature = "mysql")]
use sqlx::mysql::MySqlConnectOptions;
#[cfg(feature = "postgres")]
use sqlx::postgres::PgConnectOptions;
#[cfg(feature = "sqlite")]
use sqlx::sqlite::SqliteConnectOptions;

#[cfg(feature = "sqlite")]
use crate::environment;
use crate::exit::Failure;
use crate::global::Global;
#[cfg(feature = "sqlite")]
use crate::sqlite_file::{
    check_link, create_parent, create_sidecar, find_file, has_tables, holds_only_leases, lease_file_options,
    list_leases, sidecar_path,
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
#[cfg_attr(not(feature = "sqlite"), allow(dead_code, reason = "SQLite alone has a file"))]
pub enum FileUse<'a> {
    /// The file with the leases that `filter` selects. `create`: create a missing file. `announce`:
    /// print a note if the file is a sidecar.
    Leases { create: bool, announce: bool, filter: LeaseFilter<'a> },
    /// The file that the URL names.
    Application,
}

/// The leases for which a file is opened. While any of them is in the sidecar, the sidecar is used.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "sqlite"), allow(dead_code, reason = "SQLite alone has a file"))]
pub enum LeaseFilter<'a> {
    All,
    Name(&'a str),
    Holding(&'a str, FencingToken),
}

/// Whether a lease that is granted in a file counts. A sidecar is replaced by the application's
/// file when that gets tables, perhaps during a wait in the sidecar.
///
/// The roles keep two commands from holding a name, one in each file: a command writes its lease to
/// the sidecar before it looks for tables again, and a command that uses the application's file
/// has found tables before it looks for leases in the sidecar. So one of the two sees the other.
/// After that look, no new lease in the sidecar counts.
#[derive(Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(feature = "sqlite"), allow(dead_code, reason = "SQLite alone has a file"))]
pub enum FileRole {
    /// A lease counts.
    Final,
    /// A sidecar. A lease counts if, after the grant, the application's file has no tables, or an
    /// enclosing run holds the name in the sidecar.
    Provisional,
    /// A sidecar with leases from before the application's file had tables. An exclusive lease
    /// shows that they have ended, and does not count.
    Draining,
}

/// Opens the database with the leases without creating anything. On SQLite, the application's own
/// file follows if it is a different file.
pub async fn open_for_checks(url: &Url, global: &Global) -> Result<Vec<Pool>, Failure> {
    let file_use = FileUse::Leases { create: false, announce: false, filter: LeaseFilter::All };
    let (pool, location, _) = open(url, global, file_use).await?;
    let mut pools = vec![pool];
    if url.kind() == Kind::Sqlite {
        let (application, file, _) = open(url, global, FileUse::Application).await?;
        pools.extend(
            Path::new(&file).canonicalize().is_ok_and(|file| file != Path::new(&location)).then_some(application),
        );
    }
    Ok(pools)
}

/// Opens a pool that connects when it is used, and returns its location and the role of its file.
#[cfg_attr(not(feature = "sqlite"), allow(unused_variables, reason = "SQLite alone has a file"))]
pub async fn open(url: &Url, global: &Global, file_use: FileUse<'_>) -> Result<(Pool, String, FileRole), Failure> {
    match url.kind() {
        #[cfg(feature = "postgres")]
        Kind::Postgres => {
            let options: PgConnectOptions = url.parse_options()?;
            let location = format!("PostgreSQL at {}", postgres_address(&options));
            let pool = sqlx::pool::PoolOptions::new().max_connections(2).connect_lazy_with(options);
            Ok((Pool::Postgres(pool), location, FileRole::Final))
        }
        #[cfg(feature = "mysql")]
        Kind::Mysql => {
            let options: MySqlConnectOptions = url.parse_options()?;
            let server = if url.url.starts_with("mariadb") { "MariaDB" } else { "MySQL" };
            let location = format!("{server} at {}", mysql_address(&options));
            let pool = sqlx::pool::PoolOptions::new().max_connections(2).connect_lazy_with(options);
            Ok((Pool::MySql(pool), location, FileRole::Final))
        }
        #[cfg(feature = "sqlite")]
        Kind::Sqlite => {
            let (options, role) = match (file_use, &url.default_file) {
                (FileUse::Leases { create: true, .. }, Some(file)) => {
                    create_parent(file)?;
                    (lease_file_options(file, true), FileRole::Final)
                }
                (_, Some(file)) => (lease_file_options(file, false), FileRole::Final),
                (FileUse::Leases { create, announce, filter }, None) => {
                    choose_lease_file(url, global, create, announce, filter).await?
                }
                (FileUse::Application, None) => {
                    let options: SqliteConnectOptions = url.parse_options()?;
                    let file = find_file(&options)?;
                    (options.filename(file).create_if_missing(false), FileRole::Final)
                }
            };
            let location = options.get_filename().display().to_string();
            let pool = sqlx::pool::PoolOptions::new().max_connections(2).connect_lazy_with(options);
            Ok((Pool::Sqlite(pool), location, role))
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

/// Returns the address of a server: the host and the port, or the directory of its Unix socket and
/// the port, which is a part of the file's name.
#[cfg(feature = "postgres")]
pub fn postgres_address(options: &PgConnectOptions) -> String {
    let port = options.get_port();
    match options.get_socket() {
        Some(directory) => format!("{}:{port}", directory.display()),
        None => format!("{}:{port}", options.get_host()),
    }
}

/// Returns the address of a server: the host and the port, or the path of its Unix socket.
#[cfg(feature = "mysql")]
pub fn mysql_address(options: &MySqlConnectOptions) -> String {
    match options.get_socket() {
        Some(socket) => socket.display().to_string(),
        None => format!("{}:{}", options.get_host(), options.get_port()),
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
    filter: LeaseFilter<'_>,
) -> Result<(SqliteConnectOptions, FileRole), Failure> {
    let options: SqliteConnectOptions = url.parse_options()?;
    let file = find_file(&options)?;
    if holds_only_leases(&file) {
        return Ok((lease_file_options(&file, create), FileRole::Final));
    }
    let sidecar = sidecar_path(&file);
    check_link(&sidecar)?;
    let role_of_sidecar = if global.same_file {
        None
    } else if global.sidecar {
        Some(FileRole::Final)
    } else if has_tables(&options, &file).await? {
        find_role_beside_tables(&sidecar, filter).await?
    } else {
        Some(FileRole::Provisional)
    };
    let Some(role) = role_of_sidecar else {
        return Ok((options.filename(&file).create_if_missing(create), FileRole::Final));
    };
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
    Ok((lease_file_options(&sidecar, create), role))
}

/// Finds the role of the sidecar of a file that has tables. `None`: the sidecar is not used.
///
/// Leases in the sidecar count until they end, because the application may have created its tables
/// after they were acquired.
#[cfg(feature = "sqlite")]
async fn find_role_beside_tables(sidecar: &Path, filter: LeaseFilter<'_>) -> Result<Option<FileRole>, Failure> {
    let mut leases = match filter {
        LeaseFilter::All => list_leases(sidecar, "").await?,
        LeaseFilter::Name(name) | LeaseFilter::Holding(name, _) => list_leases(sidecar, name).await?,
    };
    leases.retain(|held| match filter {
        LeaseFilter::All => true,
        LeaseFilter::Name(name) => held.name.as_str() == name,
        LeaseFilter::Holding(name, token) => held.name.as_str() == name && held.token == token,
    });
    let enclosing_owners = environment::enclosing_owners();
    let is_enclosing = leases.iter().any(|held| environment::is_owned_by(&enclosing_owners, held));
    Ok(match leases.is_empty() {
        true => None,
        false if is_enclosing => Some(FileRole::Provisional),
        false => Some(FileRole::Draining),
    })
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
