//! The SQLite file that leases are kept in: the embedded one, the one that is named, or a sidecar of that.

use std::path::{Path, PathBuf};
#[cfg(feature = "sqlite")]
use std::time::Duration;

#[cfg(feature = "sqlite")]
use sqlock::{Error, Locks};
#[cfg(feature = "sqlite")]
use sqlx::sqlite::SqliteConnectOptions;

use crate::exit::Failure;

/// The name of a file that holds nothing but leases, such as the embedded database that is used when none is named.
const DEFAULT_FILE_NAME: &str = "sqlock.db";

/// Appended to the name of a SQLite file: where the leases that belong to it are kept.
const SIDECAR_SUFFIX: &str = "-sqlock";

/// The embedded database of this user on this host. The host is part of the path: a home directory may be on a network, across
/// which the locks of SQLite do not work.
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
            "no database is named, and the directory of the embedded one, {}, cannot be made: {error}",
            directory.display()
        ))
    })
}

/// A file that holds nothing but leases, so that readers need not wait for writers in it.
#[cfg(feature = "sqlite")]
pub fn lease_file_options(file: &Path, create: bool) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(create)
        .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
}

/// How long the look at a file that others write to may take.
#[cfg(feature = "sqlite")]
const INSPECT_TIMEOUT: Duration = Duration::from_millis(250);

/// Whether a SQLite file has sqlock's tables.
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
        // Somebody keeps readers out, as it can be without a write-ahead log. Then all committed tables are in the file itself.
        Err(sqlx::Error::Database(error)) if error.code().is_some_and(|code| code == "5") => {
            look(options.read_only(true).immutable(true)).await
        }
        looked => looked,
    };
    looked.map_err(|error: sqlx::Error| {
        let failure = Failure::from(Error::from(error));
        Failure::new(
            failure.code,
            format!(
                "cannot tell whether {} has the sqlock tables (--sidecar and --same-file choose without a look): {}",
                file.display(),
                failure.message
            ),
        )
    })
}

/// Whether somebody holds a name in a sidecar. One that cannot be read is none.
#[cfg(feature = "sqlite")]
pub async fn has_leases(sidecar: &Path) -> bool {
    if !sidecar.exists() {
        return false;
    }
    let pool = sqlx::SqlitePool::connect_lazy_with(lease_file_options(sidecar, false));
    let locks = Locks::new(pool);
    let held = locks.list("").await.is_ok_and(|held| !held.is_empty());
    let _ = locks.shutdown().await;
    held
}

/// Makes a sidecar that those can read and write who can do so with the database. SQLite gives its other files the same mode.
#[cfg(feature = "sqlite")]
pub fn create_sidecar(database: &Path, sidecar: &Path) {
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};

    let Ok(about) = database.metadata() else {
        return;
    };
    // An error here shows again when the sidecar is opened.
    let made = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(sidecar);
    if let Ok(made) = made {
        // Only root may give a file away.
        let _ = fchown(&made, Some(about.uid()), Some(about.gid()));
        let _ = made.set_permissions(about.permissions());
    }
}

/// A file of our own stands for itself: `sqlock.db`, or a sidecar.
#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
pub fn holds_only_leases(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name == DEFAULT_FILE_NAME || name.ends_with(SIDECAR_SUFFIX)
}

/// `app.db-sqlock` for `app.db`.
#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
pub fn sidecar_path(file: &Path) -> PathBuf {
    let mut sidecar = file.as_os_str().to_owned();
    sidecar.push(SIDECAR_SUFFIX);
    sidecar.into()
}

/// The SQLite file that a URL names, one and the same by whatever path or link it is named.
#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
pub fn resolve_path(url: &str, database: &Path) -> Result<PathBuf, Failure> {
    if url.contains(":memory:") || url.contains("mode=memory") {
        return Err(Failure::configuration("no other process can see a database in memory: name a file"));
    }
    // A link to a file that is not there yet stands for that file, as it will when it is there.
    let mut database = database.to_path_buf();
    for _ in 0..40 {
        let Ok(target) = database.read_link() else {
            break;
        };
        database = database.parent().unwrap_or(Path::new("")).join(target);
    }
    let file = match database.canonicalize() {
        Ok(file) => file,
        // It need not exist yet, but its directory must.
        Err(_) => {
            let directory = database.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let name = database.file_name().ok_or_else(|| Failure::configuration("the SQLite URL names no file"))?;
            let directory = directory.canonicalize().map_err(|error| {
                Failure::configuration(format!("the directory of the SQLite file, {}: {error}", directory.display()))
            })?;
            directory.join(name)
        }
    };
    if file.is_dir() {
        return Err(Failure::configuration(format!("{} is a directory, not a SQLite file", file.display())));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_the_same_by_whatever_path_it_is_named() -> Result<(), Failure> {
        let directory = tempfile::tempdir().map_err(|e| Failure::system(e.to_string()))?;
        let file = directory.path().join("app.db");
        let missing = resolve_path("sqlite://app.db", &file)?;
        std::fs::write(&file, "").map_err(|e| Failure::system(e.to_string()))?;
        let link = directory.path().join("link.db");
        std::os::unix::fs::symlink(&file, &link).map_err(|e| Failure::system(e.to_string()))?;
        assert_eq!(resolve_path("sqlite://link.db", &link)?, missing);
        std::fs::remove_file(&file).map_err(|e| Failure::system(e.to_string()))?;
        assert_eq!(resolve_path("sqlite://link.db", &link)?, missing, "a link to a file that is not there yet");
        assert!(resolve_path("sqlite::memory:", Path::new("file:sqlx-in-memory-0")).is_err());
        assert!(resolve_path("sqlite://nowhere/app.db", &directory.path().join("nowhere/app.db")).is_err());
        let sidecar = sidecar_path(&missing);
        assert!(sidecar.ends_with("app.db-sqlock"), "{}", sidecar.display());
        assert!(holds_only_leases(&sidecar) && !holds_only_leases(&missing));
        Ok(())
    }
}
