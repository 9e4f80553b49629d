//! The file that a connection has open, and the file at its path.
//!
//! SQLite compares the two only before it creates a rollback journal. In WAL mode, a connection
//! goes on with a file that was replaced, where its locks exclude no client of the new file.

use std::path::{Path, PathBuf};

/// A path, and the file that was there when a connection was opened.
///
/// The file is never opened here: SQLite's locks on a file end when its process closes the file
/// elsewhere. <https://www.sqlite.org/howtocorrupt.html>
#[derive(PartialEq, Eq)]
pub(super) struct DatabaseFile {
    path: PathBuf,
    /// `None`: no file was there.
    identity: Option<(u64, u64)>,
}

impl DatabaseFile {
    /// Looks for the file with this name. The path keeps its symbolic links, because a new
    /// connection would follow them again.
    pub(super) fn named(name: &Path) -> Self {
        Self::at(std::path::absolute(name).unwrap_or_else(|_| name.to_owned()))
    }

    /// Looks for the file at a path.
    pub(super) fn at(path: PathBuf) -> Self {
        Self { identity: identity(&path), path }
    }

    /// Returns whether a file was at the path.
    pub(super) fn exists(&self) -> bool {
        self.identity.is_some()
    }

    /// Returns an error if another file is at the path by now. The error severs the connection, and
    /// the client opens the other file.
    ///
    /// A missing file is not an error: as long as it is missing, no client can open another one.
    pub(super) fn check(&self) -> Result<(), sqlx::Error> {
        match identity(&self.path) {
            Some(found) if self.identity != Some(found) => {
                let reason = format!("another file has replaced {}", self.path.display());
                Err(sqlx::Error::Io(std::io::Error::other(reason)))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the device and the inode of the file at a path.
#[cfg(unix)]
fn identity(path: &Path) -> Option<(u64, u64)> {
    use std::os::unix::fs::MetadataExt as _;
    let file = std::fs::metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

/// An open file can be replaced on Unix only.
#[cfg(not(unix))]
fn identity(_path: &Path) -> Option<(u64, u64)> {
    Some((0, 0))
}

#[cfg(all(test, unix))]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use std::fs::{remove_file, rename, write};

    use super::*;
    use crate::error::Fault;

    #[test]
    fn replaced_file_severs_the_connection() {
        let directory = tempfile::tempdir().expect("a directory");
        let [path, other] = ["store.db", "other.db"].map(|name| directory.path().join(name));
        for file in [&path, &other] {
            write(file, "").expect("a file");
        }
        let file = DatabaseFile::named(&path);
        file.check().expect("the same file");
        rename(&other, &path).expect("replaced");
        assert_eq!(Fault::from_error(&file.check().expect_err("another file")), Fault::ConnectionLost);

        let file = DatabaseFile::named(&path);
        remove_file(&path).expect("deleted");
        file.check().expect("no other file");
        let missing = DatabaseFile::named(&path);
        missing.check().expect("no other file");
        write(&path, "").expect("a file");
        assert_eq!(Fault::from_error(&missing.check().expect_err("another file")), Fault::ConnectionLost);
    }
}
