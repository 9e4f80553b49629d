//! Session locks: locks on files beside the database, which end with the process as a connection does.
//!
//! One file for each name, deleted by whoever gives it back while nobody else can have it. Every holder has opened it for
//! itself, so that clients of one process keep each other out as well. (SQLite's own locks are on the whole database.)

use std::collections::HashMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sqlx::sqlite::SqliteConnectOptions;
use sqlx::{ConnectOptions, Connection};

use crate::backend::session::{SessionLocks, session_key};
use crate::backend::{StoreFuture, hex};
use crate::error::{Error, Result};
use crate::name::LockName;

/// Finds the directory for the files, and creates it when it is missing.
pub(super) async fn open(options: &SqliteConnectOptions) -> Result<Box<dyn SessionLocks>> {
    let failed = |error| Error::from_sqlx("find the place of session locks", error);
    let options = options.clone().busy_timeout(Duration::from_secs(2)).disable_statement_logging();
    let mut conn = options.connect().await.map_err(failed)?;
    let file = super::file_of(&mut conn).await.map_err(failed)?;
    conn.close().await.map_err(failed)?;
    if file.is_empty() {
        return Err(Error::Unsupported {
            what: "a session lock",
            reason: "a database in memory is this process's alone; a lock of the language, such as tokio's Mutex, does",
        });
    }
    let place = blocking(move || {
        let mut place = Path::new(&file).canonicalize()?.into_os_string();
        place.push("-sqlock-session");
        std::fs::create_dir_all(&place)?;
        Ok(PathBuf::from(place))
    });
    let place = place.await.map_err(failed)?;
    Ok(Box::new(SqliteSessionLocks { place, held: HashMap::new() }))
}

struct SqliteSessionLocks {
    place: PathBuf,
    held: HashMap<LockName, Arc<File>>,
}

impl SqliteSessionLocks {
    fn path(&self, name: &LockName) -> PathBuf {
        self.place.join(hex(&session_key("", name)))
    }
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

    /// A file that was deleted is locked still, but nobody else meets us at it: others create a new one.
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

/// Takes the lock if it is free.
fn lock(path: &Path, shared: bool) -> io::Result<Option<File>> {
    loop {
        let open = || OpenOptions::new().create(true).truncate(false).write(true).open(path);
        let file = match (open(), path.parent()) {
            (Err(error), Some(place)) if error.kind() == io::ErrorKind::NotFound => {
                std::fs::create_dir_all(place)?;
                open()?
            }
            (file, _) => file?,
        };
        match if shared { file.try_lock_shared() } else { file.try_lock() } {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // It may have been deleted since it was opened: then others will never meet us at this one.
        if is_at(&file, path)? {
            return Ok(Some(file));
        }
    }
}

/// Gives the lock back. The file goes if nobody else can have it: whoever shared it last, too.
fn unlock(path: &Path, file: &File) {
    if cfg!(unix) && file.try_lock().is_ok() && is_at(file, path).unwrap_or(false) {
        // Should this fail, an empty file is left, and does no harm.
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;
    let ours = file.metadata()?;
    match std::fs::metadata(path) {
        Ok(there) => Ok((ours.dev(), ours.ino()) == (there.dev(), there.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Elsewhere files are not deleted.
#[cfg(not(unix))]
fn is_at(_file: &File, _path: &Path) -> io::Result<bool> {
    Ok(true)
}

/// Files are no business of the runtime's threads, although none of these calls waits for anybody.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> io::Result<T> + Send + 'static) -> Result<T, sqlx::Error> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(sqlx::Error::Io),
        Err(ended) => Err(sqlx::Error::Io(ended.into())),
    }
}
