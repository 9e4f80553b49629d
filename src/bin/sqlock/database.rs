//! Which database, and a client on it.

use std::path::PathBuf;

use sqlock::{Error, Locks, LocksBuilder};

use crate::exit::{self, Failure};
use crate::global::Global;
use crate::pool::{self, File, Pool};
use crate::stderr;
use crate::url::{Kind, Url};

/// A database with our tables, or a place for them.
pub struct Database {
    pub locks: Locks,
    pub pool: Pool,
    /// Where it is, for people.
    pub place: String,
    may_migrate: bool,
    /// The file, on SQLite.
    file: Option<PathBuf>,
}

impl Database {
    /// The database that the command line, the environment or `.env` names. Nothing is sent to a server yet.
    pub async fn open(global: &Global) -> Result<Self, Failure> {
        Self::open_with(global, File::OfLeases { create: true, told: true }).await
    }

    /// The same, to look at what is held: a SQLite file that is missing is not made.
    pub async fn open_to_read(global: &Global) -> Result<Self, Failure> {
        Self::open_with(global, File::OfLeases { create: false, told: true }).await
    }

    /// The application's own database, to look at what it keeps there. A SQLite file that is missing is not made.
    pub async fn open_of_the_application(global: &Global) -> Result<Self, Failure> {
        Self::open_with(global, File::OfTheApplication).await
    }

    /// Each of several databases that know nothing of each other. Nothing is sent to a server yet.
    pub async fn open_each(global: &Global) -> Result<Vec<Self>, Failure> {
        let mut all = Vec::new();
        for url in Url::find_several(global)?.each()? {
            all.push(Self::open_at(url, global, File::OfLeases { create: true, told: true }).await?);
        }
        Ok(all)
    }

    async fn open_with(global: &Global, file: File) -> Result<Self, Failure> {
        Self::open_at(Url::find(global)?, global, file).await
    }

    async fn open_at(url: Url, global: &Global, file: File) -> Result<Self, Failure> {
        let urls = LocksBuilder::split_urls(&url.url);
        let (pool, mut place) = pool::open(&url, global, file).await?;
        let file = (url.kind() == Kind::Sqlite).then(|| PathBuf::from(&place));
        let locks = if urls.len() > 1 {
            place.push_str(&format!(", or {} more", urls.len() - 1));
            let builder = LocksBuilder::from_urls(&url.url);
            builder
                .map_err(|error| Failure::configuration(format!("the database URLs are not valid: {error}")))?
                .build()
        } else {
            pool.locks()
        };
        let place = stderr::printable_line(&place);
        exit::set_place(&place);
        Ok(Self { locks, pool, place, may_migrate: !global.no_migrate, file })
    }

    /// Does something that needs the tables, and creates them when they are missing.
    pub async fn with_tables<T>(&self, verb: impl AsyncFn() -> sqlock::Result<T>) -> sqlock::Result<T> {
        match verb().await {
            Err(Error::NotMigrated { .. }) if self.may_migrate => {
                self.locks.migrate().await?;
                verb().await
            }
            outcome => outcome,
        }
    }

    /// Looks at what is held: nothing, where there are no tables.
    pub async fn read<T: Default>(&self, verb: impl AsyncFn() -> sqlock::Result<T>) -> sqlock::Result<T> {
        match verb().await {
            Err(Error::NotMigrated { .. }) => Ok(T::default()),
            Err(Error::Unavailable { .. }) if self.file.as_ref().is_some_and(|file| !file.exists()) => Ok(T::default()),
            outcome => outcome,
        }
    }
}
