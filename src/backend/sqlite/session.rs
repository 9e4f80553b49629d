//! Session locks: locks on files beside the database, which end with the process.
//!
//! Each name has a file. The last holder deletes it on release. Every holder opens the file
//! separately, so that clients of one process exclude each other as well. (SQLite's own locks are
//! on the whole database.) Every user who may write the database may lock the files, as with the
//! other files of SQLite.

#[cfg(target_os = "linux")]
mod proc_locks;

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection};

use crate::backend::session::{SessionHolder, SessionLocks, session_key};
use crate::backend::{StoreFuture, hex};
use crate::error::{Error, Result, file_error};
use crate::name::LockName;

/// How long another process may take to create a file and to set its mode.
const MAX_CREATION_TIME: Duration = Duration::from_secs(1);

/// Finds the directory for the files, and creates it when it is missing.
pub(super) async fn open(options: &SqliteConnectOptions) -> Result<Box<dyn SessionLocks>> {
    let database = find_database(options).await?;
    let locks = SqliteSessionLocks { directory: directory(&database), database, held: HashMap::new() };
    let (directory, database) = (locks.directory.clone(), locks.database.clone());
    run_blocking(move || create_directory(&directory, &database)).await.map_err(directory_error)?;
    Ok(Box::new(locks))
}

fn directory_error(error: sqlx::Error) -> Error {
    Error::from_connect("find the directory of session locks", error)
}

/// Reads which processes have locked the file of a name.
#[cfg(target_os = "linux")]
pub(super) async fn holders(options: &SqliteConnectOptions, name: &LockName) -> Result<Vec<SessionHolder>> {
    let path = directory(&find_database(options).await?).join(file_name(name));
    let read = run_blocking(move || proc_locks::holders(&path));
    read.await.map_err(|error| Error::from_sqlx("list the holders of a session lock", error))
}

/// Reads which processes have locked the file of a name.
#[cfg(not(target_os = "linux"))]
pub(super) async fn holders(_: &SqliteConnectOptions, _: &LockName) -> Result<Vec<SessionHolder>> {
    Err(Error::Unsupported {
        what: "a list of the holders of a session lock",
        reason: "on SQLite they are locks on files, and only Linux tells which process has locked one",
    })
}

/// Finds the file of the database.
async fn find_database(options: &SqliteConnectOptions) -> Result<PathBuf> {
    let options = options.clone().busy_timeout(Duration::from_secs(2)).disable_statement_logging();
    let mut conn = options.connect().await.map_err(directory_error)?;
    let file = super::file_of(&mut conn).await.map_err(directory_error)?;
    conn.close().await.map_err(directory_error)?;
    if file.is_empty() {
        return Err(Error::Unsupported {
            what: "a session lock",
            reason: "a database in memory is private to this process; use a lock of the language, such as tokio's Mutex",
        });
    }
    run_blocking(move || Path::new(&file).canonicalize()).await.map_err(directory_error)
}

/// Returns the directory for the files of a database.
fn directory(database: &Path) -> PathBuf {
    let mut directory = database.as_os_str().to_owned();
    directory.push("-sqlock-session");
    directory.into()
}

struct SqliteSessionLocks {
    database: PathBuf,
    directory: PathBuf,
    held: HashMap<LockName, Arc<File>>,
}

impl SqliteSessionLocks {
    fn path(&self, name: &LockName) -> PathBuf {
        self.directory.join(file_name(name))
    }
}

fn file_name(name: &LockName) -> String {
    hex(&session_key("", name))
}

impl SessionLocks for SqliteSessionLocks {
    fn session_timeout(&self) -> Option<Duration> {
        None
    }

    fn try_lock<'a>(&'a mut self, name: &'a LockName, shared: bool) -> StoreFuture<'a, bool> {
        let (path, database) = (self.path(name), self.database.clone());
        Box::pin(async move {
            let file = run_blocking(move || lock(&path, &database, shared)).await?;
            let taken = file.is_some();
            self.held.extend(file.map(|file| (name.clone(), Arc::new(file))));
            Ok(taken)
        })
    }

    fn unlock<'a>(&'a mut self, name: &'a LockName, _shared: bool) -> StoreFuture<'a, bool> {
        let path = self.path(name);
        Box::pin(async move {
            let Some(file) = self.held.remove(name) else {
                return Ok(false);
            };
            run_blocking(move || unlock(&path, &file)).await
        })
    }

    /// A deleted file stays locked but excludes no other client: others create a new file.
    fn ping(&mut self) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let held: Vec<_> = self.held.iter().map(|(name, file)| (Arc::clone(file), self.path(name))).collect();
            run_blocking(move || {
                for (file, path) in held {
                    if !is_at(&file, &path)? {
                        return Err(io::ErrorKind::NotFound.into());
                    }
                }
                Ok(())
            })
            .await
        })
    }

    fn close(mut self: Box<Self>) -> StoreFuture<'static, ()> {
        Box::pin(async move {
            let held = std::mem::take(&mut self.held);
            let held: Vec<_> = held.into_iter().map(|(name, file)| (self.path(&name), file)).collect();
            run_blocking(move || {
                // The lock ends with its file, which is closed.
                held.iter().for_each(|(path, file)| drop(unlock(path, file)));
                Ok(())
            })
            .await
        })
    }
}

/// Opens the file and locks it if it is free.
fn lock(path: &Path, database: &Path, shared: bool) -> io::Result<Option<File>> {
    loop {
        let file = match create(path, database) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                match OpenOptions::new().write(true).open(path) {
                    // Its last holder has deleted it.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    // Its creator has not yet set the mode, and is about to lock it.
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied && is_new(path) => return Ok(None),
                    file => file?,
                }
            }
            file => file?,
        };
        match if shared { file.try_lock_shared() } else { file.try_lock() } {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // The file may have been deleted since it was opened: its lock would exclude no other
        // client.
        if is_at(&file, path)? {
            return Ok(Some(file));
        }
    }
}

/// Creates the file of a name, and the directory if it is missing.
fn create(path: &Path, database: &Path) -> io::Result<File> {
    let open = || OpenOptions::new().write(true).create_new(true).open(path);
    let file = match (open(), path.parent()) {
        (Err(error), Some(directory)) if error.kind() == io::ErrorKind::NotFound => {
            create_directory(directory, database)?;
            open()?
        }
        (file, _) => file?,
    };
    copy_access(database, path, &file);
    Ok(file)
}

/// Creates the directory if it is missing.
fn create_directory(directory: &Path, database: &Path) -> io::Result<()> {
    match std::fs::create_dir(directory) {
        Ok(()) => {
            if let Ok(created) = File::open(directory) {
                copy_access(database, directory, &created);
            }
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Gives a new file or directory the owner and the mode of the database. Errors are ignored: a user
/// without the right to open the file gets an error when it opens the file.
#[cfg(unix)]
fn copy_access(database: &Path, path: &Path, created: &File) {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};

    let (Ok(model), Ok(own), Ok(current)) = (database.metadata(), created.metadata(), path.symlink_metadata()) else {
        return;
    };
    // Another user may have put a link in the place of the directory before it was opened.
    if (own.dev(), own.ino()) != (current.dev(), current.ino()) {
        return;
    }
    // Only root may change the owner; a member of the group may set the group.
    let _ = fchown(created, None, Some(model.gid()));
    let _ = fchown(created, Some(model.uid()), None);
    // The owner can always lock. A user who may read a file may also enter its directory.
    let mode = (model.mode() & 0o666) | 0o600;
    let mode = if own.is_dir() { mode | ((mode & 0o444) >> 2) } else { mode };
    let _ = created.set_permissions(PermissionsExt::from_mode(mode));
}

#[cfg(not(unix))]
fn copy_access(_database: &Path, _path: &Path, _created: &File) {}

/// Returns whether a file was created a moment ago.
fn is_new(path: &Path) -> bool {
    let modified = std::fs::metadata(path).and_then(|file| file.modified());
    modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age < MAX_CREATION_TIME))
}

/// Deletes the file if no other client has locked it. Returns whether it was there: a deleted file
/// excludes no other client. The lock ends when the file is closed.
fn unlock(path: &Path, file: &File) -> io::Result<bool> {
    let was_there = is_at(file, path)?;
    // Another client may delete the file while the lock becomes exclusive.
    if cfg!(unix) && file.try_lock().is_ok() && is_at(file, path)? {
        // After a failure an empty file stays, which is harmless.
        let _ = std::fs::remove_file(path);
    }
    Ok(was_there)
}

#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let own = file.metadata()?;
    match std::fs::metadata(path) {
        Ok(current) => Ok((own.dev(), own.ino()) == (current.dev(), current.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Files are deleted on Unix only.
#[cfg(not(unix))]
fn is_at(_file: &File, _path: &Path) -> io::Result<bool> {
    Ok(true)
}

/// Runs file operations outside the runtime's threads. None of these calls waits for a lock.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, sqlx::Error> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(file_error),
        Err(ended) => Err(sqlx::Error::Io(ended.into())),
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::error::AccessError;

    #[tokio::test]
    async fn forbidden_file_is_an_access_error() {
        for kind in [io::ErrorKind::PermissionDenied, io::ErrorKind::ReadOnlyFilesystem] {
            let refused = run_blocking(move || Err::<(), _>(kind.into())).await.expect_err("refused");
            let error = Error::from_sqlx("acquire a session lock", refused);
            assert!(matches!(error, Error::Access { cause: AccessError::MissingPrivilege, .. }), "{error}");
        }
        let full = run_blocking(|| Err::<(), _>(io::ErrorKind::StorageFull.into())).await.expect_err("refused");
        assert!(Error::from_sqlx("acquire a session lock", full).is_retryable());
    }
}
