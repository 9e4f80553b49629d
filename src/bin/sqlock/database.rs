//! The client of a database.

use std::path::PathBuf;
use std::time::Duration;

use sqlock::{Error, Locks, LocksBuilder};
use sqlx::AssertSqlSafe;
use sqlx::error::DatabaseError;
use tokio::time::timeout;

use crate::exit::{self, Failure};
use crate::global::Global;
use crate::migrations;
use crate::pool::{self, FileRole, FileUse, LeaseFilter, Pool};
use crate::stderr;
use crate::url::{Kind, Url};

/// How long the database may take to say whether a table exists.
const LOOK_TIMEOUT: Duration = Duration::from_secs(3);

/// A database that has the tables of sqlock, or in which they can be created.
pub struct Database {
    pub locks: Locks,
    pub pool: Pool,
    /// The location, for messages.
    pub location: String,
    /// Whether a lease that is granted here counts.
    pub role: FileRole,
    /// Whether --database-url names the database.
    pub is_named_by_option: bool,
    url: Url,
    may_migrate: bool,
    /// The file, on SQLite.
    file: Option<PathBuf>,
}

impl Database {
    /// Opens the database that the command line, the environment or `.env` names. Sends nothing to
    /// a server.
    pub async fn open(global: &Global, filter: LeaseFilter<'_>) -> Result<Self, Failure> {
        Self::open_with(global, FileUse::Leases { create: true, announce: true, filter }).await
    }

    /// Opens the database without creating a missing SQLite file.
    pub async fn open_existing(global: &Global, filter: LeaseFilter<'_>) -> Result<Self, Failure> {
        Self::open_with(global, FileUse::Leases { create: false, announce: true, filter }).await
    }

    /// Opens the application's own database without creating a missing SQLite file.
    pub async fn open_application(global: &Global) -> Result<Self, Failure> {
        Self::open_with(global, FileUse::Application).await
    }

    /// Opens each of several independent databases. `create`: whether a missing SQLite file is
    /// created. Sends nothing to a server.
    pub async fn open_each(global: &Global, create: bool, filter: LeaseFilter<'_>) -> Result<Vec<Self>, Failure> {
        let mut all = Vec::new();
        let urls = Url::find_several(global)?.split()?;
        exit::set_location(&format!("a majority of {} databases", urls.len()));
        for url in urls {
            all.push(Self::open_at(url, global, FileUse::Leases { create, announce: true, filter }).await?);
        }
        Ok(all)
    }

    async fn open_with(global: &Global, file_use: FileUse<'_>) -> Result<Self, Failure> {
        let db = Self::open_at(Url::find(global)?, global, file_use).await?;
        exit::set_location(&db.location);
        Ok(db)
    }

    /// Opens the file in which a lease belongs that was granted here. `None`: the lease counts
    /// here.
    pub async fn open_next(&self, global: &Global, name: &str) -> Result<Option<Self>, Failure> {
        let file_use = match self.role {
            FileRole::Final => return Ok(None),
            FileRole::Provisional => FileUse::Leases { create: true, announce: false, filter: LeaseFilter::Name(name) },
            FileRole::Draining => FileUse::Application,
        };
        let next = Self::open_at(self.url.clone(), global, file_use).await?;
        Ok((next.role != FileRole::Provisional).then_some(next))
    }

    async fn open_at(url: Url, global: &Global, file_use: FileUse<'_>) -> Result<Self, Failure> {
        let urls = LocksBuilder::split_urls(&url.url);
        let (pool, mut location, role) = pool::open(&url, global, file_use).await?;
        let file = (url.kind() == Kind::Sqlite).then(|| PathBuf::from(&location));
        let locks = if urls.len() > 1 {
            location.push_str(&format!(", or {} more", urls.len() - 1));
            let builder = LocksBuilder::from_urls(&url.url);
            builder
                .map_err(|error| Failure::configuration(format!("invalid database URLs: {}", error.report())))?
                .build()
        } else {
            pool.locks()
        };
        let location = stderr::escape_line(&location);
        Ok(Self {
            locks,
            pool,
            location,
            role,
            is_named_by_option: global.database_url.is_some(),
            url,
            may_migrate: !global.no_migrate,
            file,
        })
    }

    /// Returns whether there are several servers. The pool leads to the first, which may be a
    /// standby.
    pub fn has_several_servers(&self) -> bool {
        LocksBuilder::split_urls(&self.url.url).len() > 1
    }

    /// Shuts the client down, in a bounded time if the database does not answer.
    pub async fn shutdown(&self) {
        let _ = timeout(Duration::from_secs(1), self.locks.shutdown()).await;
    }

    /// Runs an operation that needs the tables, and creates them if they are missing.
    pub async fn with_tables<T>(&self, operation: impl AsyncFn() -> sqlock::Result<T>) -> sqlock::Result<T> {
        match operation().await {
            Err(Error::NotMigrated { .. }) if self.may_migrate => {
                self.locks.migrate().await?;
                operation().await
            }
            outcome => outcome,
        }
    }

    /// Returns the tables that do not exist. A table that cannot be looked for counts as existing,
    /// and so do all if the database does not answer.
    pub async fn missing_tables(&self) -> Vec<&'static str> {
        let mut missing = Vec::new();
        for table in migrations::table_names(self.url.kind()) {
            match timeout(LOOK_TIMEOUT, self.pool.look_into(table)).await {
                Ok(Err(sqlx::Error::Database(error))) if is_missing_table(&*error) => missing.push(table),
                Ok(_) => {}
                Err(_) => return Vec::new(),
            }
        }
        missing
    }

    /// Returns whether no table exists: nothing is held. If only some are missing, they were
    /// dropped.
    pub async fn has_no_tables(&self) -> bool {
        self.missing_tables().await.len() == migrations::table_names(self.url.kind()).count()
    }

    /// Runs an operation that reads, which finds nothing if there are no tables.
    pub async fn read<T: Default>(&self, operation: impl AsyncFn() -> sqlock::Result<T>) -> sqlock::Result<T> {
        match operation().await {
            Err(Error::NotMigrated { .. }) if self.has_no_tables().await => Ok(T::default()),
            Err(Error::Unavailable { .. } | Error::Access { .. })
                if self.file.as_ref().is_some_and(|file| !file.exists()) =>
            {
                Ok(T::default())
            }
            outcome => outcome,
        }
    }
}

impl Pool {
    /// Runs a statement that fails if the table does not exist.
    async fn look_into(&self, table: &str) -> Result<(), sqlx::Error> {
        let sql = sqlx::raw_sql(AssertSqlSafe(format!("SELECT 1 FROM {table} WHERE 1 = 0")));
        match self {
            #[cfg(feature = "postgres")]
            Self::Postgres(pool) => sql.execute(pool).await.map(drop),
            #[cfg(feature = "mysql")]
            Self::MySql(pool) => sql.execute(pool).await.map(drop),
            #[cfg(feature = "sqlite")]
            Self::Sqlite(pool) => sql.execute(pool).await.map(drop),
        }
    }
}

/// Returns whether a table does not exist, by the SQLSTATE of PostgreSQL or of MySQL, or by the
/// message of SQLite.
fn is_missing_table(error: &dyn DatabaseError) -> bool {
    error.code().is_some_and(|code| code == "42P01" || code == "42S02") || error.message().starts_with("no such table")
}
