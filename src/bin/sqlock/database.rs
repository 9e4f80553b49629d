//! Which database, and a client on it.

use std::path::PathBuf;

use sqlock::{Error, Locks, LocksBuilder};

use crate::exit::{self, Failure};
use crate::global::Global;
use crate::pool::{self, FileUse, Pool};
use crate::stderr;
use crate::url::{Kind, Url};

/// A database with our tables, or a place for them.
pub struct Database {
    pub locks: Locks,
    pub pool: Pool,
    /// Where it is, for people.
    pub location: String,
    may_migrate: bool,
    /// The file, on SQLite.
    file: Option<PathBuf>,
}

impl Database {
    /// The database that the command line, the environment or `.env` names. Nothing is sent to a server yet.
    pub async fn open(global: &Global) -> Result<Self, Failure> {
        Self::open_with(global, FileUse::Leases { create: true, announce: true }).await
    }

    /// The same, to look at what is held: a SQLite file that is missing is not made.
    pub async fn open_existing(global: &Global) -> Result<Self, Failure> {
        Self::open_with(global, FileUse::Leases { create: false, announce: true }).await
    }

    /// The application's own database, to look at what it keeps there. A SQLite file that is missing is not made.
    pub async fn open_application(global: &Global) -> Result<Self, Failure> {
        Self::open_with(global, FileUse::Application).await
    }

    /// Each of several databases that know nothing of each other. Nothing is sent to a server yet.
    pub async fn open_each(global: &Global) -> Result<Vec<Self>, Failure> {
        let mut all = Vec::new();
        for url in Url::find_several(global)?.split()? {
            all.push(Self::open_at(url, global, FileUse::Leases { create: true, announce: true }).await?);
        }
        Ok(all)
    }

    async fn open_with(global: &Global, file_use: FileUse) -> Result<Self, Failure> {
        Self::open_at(Url::find(global)?, global, file_use).await
    }

    async fn open_at(url: Url, global: &Global, file_use: FileUse) -> Result<Self, Failure> {
        let urls = LocksBuilder::split_urls(&url.url);
        let (pool, mut location) = pool::open(&url, global, file_use).await?;
        let file = (url.kind() == Kind::Sqlite).then(|| PathBuf::from(&location));
        let locks = if urls.len() > 1 {
            location.push_str(&format!(", or {} more", urls.len() - 1));
            let builder = LocksBuilder::from_urls(&url.url);
            builder
                .map_err(|error| Failure::configuration(format!("the database URLs are not valid: {error}")))?
                .build()
        } else {
            pool.locks()
        };
        let location = stderr::escape_line(&location);
        exit::set_location(&location);
        Ok(Self { locks, pool, location, may_migrate: !global.no_migrate, file })
    }

    /// Does something that needs the tables, and creates them when they are missing.
    pub async fn with_tables<T>(&self, operation: impl AsyncFn() -> sqlock::Result<T>) -> sqlock::Result<T> {
        match operation().await {
            Err(Error::NotMigrated { .. }) if self.may_migrate => {
                self.locks.migrate().await?;
                operation().await
            }
            outcome => outcome,
        }
    }

    /// Looks at what is held: nothing, where there are no tables.
    pub async fn read<T: Default>(&self, operation: impl AsyncFn() -> sqlock::Result<T>) -> sqlock::Result<T> {
        match operation().await {
            Err(Error::NotMigrated { .. }) => Ok(T::default()),
            Err(Error::Unavailable { .. }) if self.file.as_ref().is_some_and(|file| !file.exists()) => Ok(T::default()),
            outcome => outcome,
        }
    }
}
