//! Session locks: locks on files beside the database, which end with the process.
//!
//! Each name has a file. The last holder deletes it on release. Every holder opens the file
//! separately, so that clients of one process exclude each other as well. (SQLite's own locks are
//! on the whole database.)

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
use crate::error::{Error, Result};
use crate::name::LockName;

/// Finds the directory for the files, and creates it when it is missing.
pub(super) async fn open(options: &SqliteConnectOptions) -> Result<Box<dyn SessionLocks>> {
    let directory = directory(options).await?;
    let create = directory.clone();
    blocking(move || std::fs::create_dir_all(create)).await.map_err(not_found)?;
    Ok(Box::new(SqliteSessionLocks { directory, held: HashMap::new() }))
}

fn not_found(error: sqlx::Error) -> Error {
    Error::from_sqlx("find the directory of session locks", error)
}

/// Reads which processes have locked the file of a name.
#[cfg(target_os = "linux")]
pub(super) async fn holders(options: &SqliteConnectOptions, name: &LockName) -> Result<Vec<SessionHolder>> {
    let path = directory(options).await?.join(file_name(name));
    let read = blocking(move || proc_locks::holders(&path));
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

/// Finds the directory for the files. The directory need not exist.
async fn directory(options: &SqliteConnectOptions) -> Result<PathBuf> {
    let options = options.clone().busy_timeout(Duration::from_secs(2)).disable_statement_logging();
    let mut conn = options.connect().await.map_err(not_found)?;
    let file = super::file_of(&mut conn).await.map_err(not_found)?;
    conn.close().await.map_err(not_found)?;
    if file.is_empty() {
        return Err(Error::Unsupported {
            what: "a session lock",
            reason: "a database in memory is private to this process; use a lock of the language, such as tokio's Mutex",
        });
    }
    let directory = blocking(move || {
        let mut directory = Path::new(&file).canonicalize()?.into_os_string();
        directory.push("-sqlock-session");
        Ok(PathBuf::from(directory))
    });
    directory.await.map_err(not_found)
}

struct SqliteSessionLocks {
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
        let path = self.path(name);
        Box::pin(async move {
            let file = blocking(move || lock(&path, shared)).await?;
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
            blocking(move || {
                unlock(&path, &file);
                Ok(true)
            })
            .await
        })
    }

    /// A deleted file stays locked but excludes no other client: others create a new file.
    fn ping(&mut self) -> StoreFuture<'_, ()> {
        Box::pin(async move {
            let held: Vec<_> = self.held.iter().map(|(name, file)| (Arc::clone(file), self.path(name))).collect();
            blocking(move || {
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
            blocking(move || {
                held.iter().for_each(|(path, file)| unlock(path, file));
                Ok(())
            })
            .await
        })
    }
}

/// Opens the file and locks it if it is free.
fn lock(path: &Path, shared: bool) -> io::Result<Option<File>> {
    loop {
        let open = || OpenOptions::new().create(true).truncate(false).write(true).open(path);
        let file = match (open(), path.parent()) {
            (Err(error), Some(directory)) if error.kind() == io::ErrorKind::NotFound => {
                std::fs::create_dir_all(directory)?;
                open()?
            }
            (file, _) => file?,
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

/// Releases the lock. Deletes the file if no other client has locked it.
fn unlock(path: &Path, file: &File) {
    if cfg!(unix) && file.try_lock().is_ok() && is_at(file, path).unwrap_or(false) {
        // After a failure an empty file stays, which is harmless.
        let _ = std::fs::remove_file(path);
    }
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
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T, sqlx::Error> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(sqlx::Error::Io),
        Err(ended) => Err(sqlx::Error::Io(ended.into())),
    }
}
