//! SQLite files with leases: the embedded database, the file of a URL, or a sidecar of it.

use std::path::{Path, PathBuf};
#[cfg(feature = "sqlite")]
use std::time::Duration;

#[cfg(feature = "sqlite")]
use sqlock::inspect::LeaseInfo;
#[cfg(feature = "sqlite")]
use sqlock::{Error, Locks};
#[cfg(feature = "sqlite")]
use sqlx::sqlite::SqliteConnectOptions;

use crate::exit::Failure;
#[cfg(feature = "sqlite")]
use crate::stderr;

/// The name of the embedded database, which is used when no database is named, and of other files
/// with leases only.
const DEFAULT_FILE_NAME: &str = "sqlock.db";

/// The suffix of a sidecar, the file with the leases that belong to a SQLite file.
const SIDECAR_SUFFIX: &str = "-sqlock";

/// Returns the path of the embedded database of this user on this host. The host is part of the
/// path, because a home directory may be on a network file system, across which the locks of SQLite
/// do not work.
pub fn default_path() -> Result<PathBuf, Failure> {
    let absolute = |path: &PathBuf| path.is_absolute();
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(absolute);
    let state = state.or_else(|| std::env::home_dir().filter(absolute).map(|home| home.join(".local/state")));
    let state = state.ok_or_else(|| {
        Failure::configuration(
            "no database is named, and this user has no home directory for an embedded one: set SQLOCK_DATABASE_URL or \
             DATABASE_URL, or give --database-url",
        )
    })?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let host = host.replace(|c: char| !c.is_ascii_alphanumeric() && !"-_.".contains(c), "_");
    Ok(state.join("sqlock").join(format!("host-{host}")).join(DEFAULT_FILE_NAME))
}

#[cfg(feature = "sqlite")]
pub fn create_parent(file: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt;

    let directory = file.parent().unwrap_or(Path::new("/"));
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|error| {
        Failure::configuration(format!(
            "no database is named, and the directory of the embedded one, {}, cannot be created: {error}",
            directory.display()
        ))
    })
}

/// Returns the options of a file with leases only, in WAL mode, so that readers do not wait for
/// writers.
#[cfg(feature = "sqlite")]
pub fn lease_file_options(file: &Path, create: bool) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(create)
        .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
}

/// How long to wait for other writers when looking for tables.
#[cfg(feature = "sqlite")]
const INSPECT_TIMEOUT: Duration = Duration::from_millis(250);

/// How long to wait for a process that recovers or removes a write-ahead log.
#[cfg(feature = "sqlite")]
const WAL_TIMEOUT: Duration = Duration::from_secs(5);

/// Returns whether a SQLite file has sqlock's tables.
#[cfg(feature = "sqlite")]
pub async fn has_tables(options: &SqliteConnectOptions, file: &Path) -> Result<bool, Failure> {
    use sqlx::{ConnectOptions, Connection};

    if !file.exists() {
        return Ok(false);
    }
    let look = async |options: SqliteConnectOptions| {
        let mut conn = options.connect().await?;
        let sql = "SELECT count(*) > 0 FROM sqlite_master WHERE type = 'table' AND name = 'sqlock_lease'";
        let has_tables: bool = sqlx::query_scalar(sql).fetch_one(&mut conn).await?;
        conn.close().await?;
        Ok(has_tables)
    };
    let options = options.clone().filename(file).create_if_missing(false).busy_timeout(INSPECT_TIMEOUT);
    let looked = match look(options.clone()).await {
        // Another process excludes readers. With WAL, it does so for a moment: when it recovers or
        // removes the log, in which the tables may be. Without, all committed tables are in the
        // file itself.
        Err(sqlx::Error::Database(error)) if is_busy(&*error) => match with_suffix(file, "-wal").exists() {
            true => look(options.busy_timeout(WAL_TIMEOUT)).await,
            false => look(options.read_only(true).immutable(true)).await,
        },
        looked => looked,
    };
    looked.map_err(|error: sqlx::Error| describe_failed_look("tables", file, error.into()))
}

#[cfg(feature = "sqlite")]
fn describe_failed_look(what: &str, file: &Path, error: Error) -> Failure {
    let (file, reason) = (file.display(), stderr::escape_line(&error.report().to_string()));
    let message = format!(
        "cannot look for the sqlock {what} in {file} (--sidecar and --same-file choose without looking): {reason}"
    );
    Failure::new(Failure::from(error).code, message)
}

/// Returns whether another process excludes this one, by SQLITE_BUSY or an extended code of it,
/// whose last byte is the primary code.
#[cfg(feature = "sqlite")]
pub fn is_busy(error: &dyn sqlx::error::DatabaseError) -> bool {
    const BUSY: u32 = 5;
    error.code().and_then(|code| code.parse::<u32>().ok()).is_some_and(|code| code & 0xff == BUSY)
}

/// Lists the leases in a sidecar on names that begin with `prefix`. A sidecar that is missing or
/// has no tables has none.
#[cfg(feature = "sqlite")]
pub async fn list_leases(sidecar: &Path, prefix: &str) -> Result<Vec<LeaseInfo>, Failure> {
    if !sidecar.exists() {
        return Ok(Vec::new());
    }
    let pool = sqlx::SqlitePool::connect_lazy_with(lease_file_options(sidecar, false));
    let locks = Locks::new(pool);
    let listed = locks.list(prefix).await;
    let _ = locks.shutdown().await;
    match listed {
        Err(Error::NotMigrated { .. }) => Ok(Vec::new()),
        listed => listed.map_err(|error| describe_failed_look("leases", sidecar, error)),
    }
}

/// Creates a sidecar with the owner and mode of the database. SQLite gives its other files the same
/// mode.
#[cfg(feature = "sqlite")]
pub fn create_sidecar(database: &Path, sidecar: &Path) {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};

    let Ok(about) = database.metadata() else {
        return;
    };
    // Opening the sidecar reports an error of these calls again.
    let made = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(sidecar);
    if let Ok(made) = made {
        // Only root may change the owner; a member of the group may set the group.
        let _ = fchown(&made, None, Some(about.gid()));
        let _ = fchown(&made, Some(about.uid()), None);
        let _ = made.set_permissions(about.permissions());
    }
}

/// Refuses a symbolic link that another user has put into a world-writable directory, such as /tmp:
/// the link could lead to any file that this user may write. The rule is that of Linux with
/// fs.protected_symlinks.
pub fn check_link(path: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::MetadataExt;

    let directory = path.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let (Ok(link), Ok(directory)) = (path.symlink_metadata(), directory.metadata()) else {
        return Ok(());
    };
    let this_user = rustix::process::geteuid().as_raw();
    if !link.is_symlink() || may_follow(link.uid(), (directory.uid(), directory.mode()), this_user) {
        return Ok(());
    }
    Err(Failure::configuration(format!(
        "{} is a symbolic link of another user in a directory that everybody may write",
        path.display()
    )))
}

/// Returns whether a user may follow a link, given its owner and the owner and mode of its
/// directory.
fn may_follow(link_owner: u32, (directory_owner, mode): (u32, u32), user: u32) -> bool {
    const STICKY_AND_WRITABLE: u32 = 0o1002;
    mode & STICKY_AND_WRITABLE != STICKY_AND_WRITABLE || link_owner == user || link_owner == directory_owner
}

/// Returns whether a file has leases only and so no sidecar, by its name: `sqlock.db`, or a sidecar
/// itself.
#[cfg_attr(not(feature = "sqlite"), allow(dead_code, reason = "SQLite alone has a file"))]
pub fn holds_only_leases(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name == DEFAULT_FILE_NAME || name.ends_with(SIDECAR_SUFFIX)
}

/// Returns the path of the sidecar: `app.db-sqlock` for `app.db`.
#[cfg_attr(not(feature = "sqlite"), allow(dead_code, reason = "SQLite alone has a file"))]
pub fn sidecar_path(file: &Path) -> PathBuf {
    with_suffix(file, SIDECAR_SUFFIX)
}

#[cfg_attr(not(feature = "sqlite"), allow(dead_code, reason = "SQLite alone has a file"))]
fn with_suffix(file: &Path, suffix: &str) -> PathBuf {
    let mut path = file.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

/// Returns the canonical path of the file of a URL. Refuses options with which other processes do
/// not see the file, or may not be excluded.
#[cfg(feature = "sqlite")]
pub fn find_file(options: &SqliteConnectOptions) -> Result<PathBuf, Failure> {
    use sqlx::ConnectOptions;

    // sqlx shows the options only as a URL. Not every path can be a part of one.
    let parsed = options.clone().filename("file").to_url_lossy();
    for (name, value) in parsed.query_pairs() {
        match (&*name, &*value) {
            ("mode", "memory") => {
                return Err(Failure::configuration("no other process sees a database in memory: name a file"));
            }
            ("vfs", _) => {
                return Err(Failure::configuration(
                    "vfs in the SQLite URL is not supported: files of another VFS may not be locked between processes",
                ));
            }
            _ => {}
        }
    }
    resolve_path(options.get_filename())
}

/// Returns the canonical path of a SQLite file: one path for all links to a file.
#[cfg_attr(not(feature = "sqlite"), allow(dead_code, reason = "SQLite alone has a file"))]
fn resolve_path(database: &Path) -> Result<PathBuf, Failure> {
    // A link to a missing file is resolved too, because it will lead there once the file exists.
    let mut database = database.to_path_buf();
    for _ in 0..40 {
        let Ok(target) = database.read_link() else {
            break;
        };
        check_link(&database)?;
        database = database.parent().unwrap_or(Path::new("")).join(target);
    }
    let file = match database.canonicalize() {
        Ok(file) => file,
        // The file need not exist yet, but its directory must.
        Err(_) => {
            let directory = database.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let name = database.file_name().ok_or_else(|| Failure::configuration("the SQLite URL names no file"))?;
            let directory = directory.canonicalize().map_err(|error| {
                Failure::configuration(format!("the directory of the SQLite file, {}: {error}", directory.display()))
            })?;
            if !directory.is_dir() {
                let directory = directory.display();
                return Err(Failure::configuration(format!("{directory} is no directory for a SQLite file")));
            }
            directory.join(name)
        }
    };
    if file.is_dir() {
        return Err(Failure::configuration(format!("{} is a directory, not a SQLite file", file.display())));
    }
    if file.exists() && !file.is_file() {
        return Err(Failure::configuration(format!("{} is not a regular file: it cannot be locked", file.display())));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_link_in_sticky_directory_is_refused() {
        let (me, other, root) = (1000, 1001, 0);
        assert!(!may_follow(other, (root, 0o41777), me));
        assert!(may_follow(me, (root, 0o41777), me) && may_follow(root, (root, 0o41777), me));
        assert!(may_follow(other, (me, 0o40755), me));
    }

    #[test]
    fn resolved_path_is_the_same_through_links() -> Result<(), Failure> {
        let directory = tempfile::tempdir().map_err(|e| Failure::system(e.to_string()))?;
        let file = directory.path().join("app.db");
        let missing = resolve_path(&file)?;
        std::fs::write(&file, "").map_err(|e| Failure::system(e.to_string()))?;
        let link = directory.path().join("link.db");
        std::os::unix::fs::symlink(&file, &link).map_err(|e| Failure::system(e.to_string()))?;
        assert_eq!(resolve_path(&link)?, missing);
        std::fs::remove_file(&file).map_err(|e| Failure::system(e.to_string()))?;
        assert_eq!(resolve_path(&link)?, missing, "a link to a file that is not there yet");
        assert!(resolve_path(&directory.path().join("nowhere/app.db")).is_err());
        let sidecar = sidecar_path(&missing);
        assert!(sidecar.ends_with("app.db-sqlock"), "{}", sidecar.display());
        assert!(holds_only_leases(&sidecar) && !holds_only_leases(&missing));
        Ok(())
    }
}
