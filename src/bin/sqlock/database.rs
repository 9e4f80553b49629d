//! Which database, and a client on it.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

use sqlock::{Error, LeaseInfo, Locks, LocksBuilder};

use crate::exit::Failure;
use crate::options::Global;
use crate::say;

/// The embedded database that is used when none is named.
const DEFAULT_FILE: &str = "sqlock.db";

/// Appended to the name of a SQLite file: where the leases that belong to it are kept.
const SIDECAR: &str = "-sqlock";

/// The kinds of databases, whether or not this binary was built for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    Postgres,
    #[value(alias = "mariadb")]
    Mysql,
    Sqlite,
}

/// A database with our tables, or a place for them.
pub struct Database {
    pub locks: Locks,
    pub pool: Pool,
    may_migrate: bool,
    /// The file, on SQLite.
    file: Option<PathBuf>,
}

/// A pool on the database that was named, or the first of those.
pub enum Pool {
    #[cfg(feature = "postgres")]
    Postgres(sqlx::PgPool),
    #[cfg(feature = "mysql")]
    MySql(sqlx::MySqlPool),
    #[cfg(feature = "sqlite")]
    Sqlite(sqlx::SqlitePool),
}

/// Where the database is, for people.
static PLACE: OnceLock<String> = OnceLock::new();

/// That it cannot be reached, and where it should have been.
pub fn unreachable() -> String {
    format!("cannot reach {}", PLACE.get().map_or("the database", String::as_str))
}

impl Database {
    /// The database that the command line, the environment or `.env` names. Nothing is sent yet.
    pub fn open(global: &Global) -> Result<Self, Failure> {
        Self::open_with(global, File::Beside { create: true })
    }

    /// The same, to look at what is held: a SQLite file that is missing is not made.
    pub fn open_to_read(global: &Global) -> Result<Self, Failure> {
        Self::open_with(global, File::Beside { create: false })
    }

    /// The application's own database, to look at what it keeps there. A SQLite file that is missing is not made.
    pub fn open_of_the_application(global: &Global) -> Result<Self, Failure> {
        Self::open_with(global, File::Itself)
    }

    /// Each of several databases that know nothing of each other. Nothing is sent yet.
    pub fn open_each(global: &Global) -> Result<Vec<Self>, Failure> {
        let urls = Url::find_several(global)?.each()?;
        let all: Vec<Self> = urls
            .into_iter()
            .map(|url| Self::open_at(url, global, File::Beside { create: true }))
            .collect::<Result<_, _>>()?;
        Ok(all)
    }

    fn open_with(global: &Global, file: File) -> Result<Self, Failure> {
        Self::open_at(Url::find(global)?, global, file)
    }

    fn open_at(url: Url, global: &Global, file: File) -> Result<Self, Failure> {
        let urls = LocksBuilder::split_urls(&url.url);
        let (pool, mut place) = url.pool(file)?;
        let file = (url.kind == Kind::Sqlite).then(|| PathBuf::from(&place));
        let locks = if urls.len() > 1 {
            place.push_str(&format!(", or {} more", urls.len() - 1));
            let builder = LocksBuilder::from_urls(&url.url);
            builder
                .map_err(|error| Failure::configuration(format!("the database URLs are not valid: {error}")))?
                .build()
        } else {
            pool.locks()
        };
        let _ = PLACE.set(say::printable_line(&place));
        Ok(Self { locks, pool, may_migrate: !global.no_migrate, file })
    }

    /// Who holds a name, once there are tables.
    pub async fn holder_of(&self, name: &str) -> sqlock::Result<Option<LeaseInfo>> {
        match self.locks.inspect(name).await {
            Err(Error::NotMigrated { .. }) if self.may_migrate => self.locks.migrate().await.map(|()| None),
            holder => holder,
        }
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

/// Which file, on SQLite.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
enum File {
    /// The one that leases are kept in. `create`: if it is missing.
    Beside { create: bool },
    /// The one that is named.
    Itself,
}

/// A URL that has been found, and where.
pub struct Url {
    url: String,
    kind: Kind,
}

impl Url {
    /// The database that is named, on one server or on several that take over from each other.
    pub fn find(global: &Global) -> Result<Self, Failure> {
        Self::find_as(global, Self::parse)
    }

    /// Several that are named, of any kinds.
    pub fn find_several(global: &Global) -> Result<Self, Failure> {
        let several = |urls: &str, from: &str| {
            let first = split(urls, from)?.first().copied().unwrap_or_default();
            Ok(Self { url: urls.into(), ..Self::parse_one(first, from)? })
        };
        Self::find_as(global, several)
    }

    fn find_as(global: &Global, parse: impl Fn(&str, &str) -> Result<Self, Failure>) -> Result<Self, Failure> {
        if let Some(url) = &global.database_url {
            return parse(url, "--database-url");
        }
        if let Some(url) = std::env::var_os("DATABASE_URL") {
            let url = url.into_string().map_err(|_| Failure::configuration("DATABASE_URL is not UTF-8"))?;
            return parse(&url, "DATABASE_URL");
        }
        if !global.no_dotenv
            && let Some(url) = from_dotenv()?
        {
            return parse(&url, "DATABASE_URL in .env");
        }
        if !cfg!(feature = "sqlite") {
            return Err(Failure::configuration("no database is named: set DATABASE_URL, or give --database-url"));
        }
        say::note(&format!(
            "no database is named (--database-url, DATABASE_URL, .env): using the file {DEFAULT_FILE} in this directory, \
             which only processes in this directory share"
        ));
        Ok(Self { url: format!("sqlite://{DEFAULT_FILE}"), kind: Kind::Sqlite })
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Each of the URLs, where several are named: `postgres://…,postgres://…`.
    pub fn each(&self) -> Result<Vec<Self>, Failure> {
        LocksBuilder::split_urls(&self.url).into_iter().map(|url| Self::parse_one(url, "each database URL")).collect()
    }

    /// The place where leases are kept, to be looked at: nothing is sent yet, nor made. On SQLite the application's own file
    /// comes after it, where that is another one.
    pub fn pools_to_examine(&self) -> Result<Vec<Pool>, Failure> {
        let (pool, place) = self.pool(File::Beside { create: false })?;
        let mut pools = vec![pool];
        if self.kind == Kind::Sqlite {
            let (own, file) = self.pool(File::Itself)?;
            pools.extend(Path::new(&file).canonicalize().is_ok_and(|file| file != Path::new(&place)).then_some(own));
        }
        Ok(pools)
    }

    /// One, or several of one kind, for failover.
    fn parse(urls: &str, from: &str) -> Result<Self, Failure> {
        let several = split(urls, from)?;
        let mut found = Self::parse_one(several.first().copied().unwrap_or_default(), from)?;
        if let [_, others @ ..] = &*several
            && !others.is_empty()
        {
            for url in others {
                if Self::parse_one(url, from)?.kind != found.kind || found.kind == Kind::Sqlite {
                    return Err(Failure::configuration(format!(
                        "{from} names several databases, which must be PostgreSQL all, or MySQL all: \
                         one takes over from another"
                    )));
                }
            }
            found.url = urls.into();
        }
        Ok(found)
    }

    fn parse_one(url: &str, from: &str) -> Result<Self, Failure> {
        // An empty one is a secret that was not set, in CI for instance. Falling back to a file would exclude nobody.
        if url.trim().is_empty() {
            return Err(Failure::configuration(format!("{from} is empty")));
        }
        let kind = match url.split_once(':').map(|(scheme, _)| scheme) {
            Some("postgres" | "postgresql") => Kind::Postgres,
            Some("mysql" | "mariadb") => Kind::Mysql,
            Some("sqlite") => Kind::Sqlite,
            _ => {
                return Err(Failure::configuration(format!(
                    "{from} must begin with postgres://, mysql://, mariadb:// or sqlite://"
                )));
            }
        };
        let authority = url.split_once("://").and_then(|(_, rest)| rest.split('/').next()).unwrap_or_default();
        if kind != Kind::Sqlite && authority.split_once(['#', '?']).is_some_and(|(_, rest)| rest.contains('@')) {
            return Err(Failure::configuration(format!("in the password in {from}, write # as %23 and ? as %3F")));
        }
        Ok(Self { url: url.into(), kind })
    }

    /// A pool that connects when it is needed, and where to.
    #[cfg_attr(not(feature = "sqlite"), allow(unused_variables))]
    fn pool(&self, file: File) -> Result<(Pool, String), Failure> {
        match self.kind {
            #[cfg(feature = "postgres")]
            Kind::Postgres => {
                let options: sqlx::postgres::PgConnectOptions = self.options()?;
                let place = format!("PostgreSQL at {}:{}", options.get_host(), options.get_port());
                Ok((
                    Pool::Postgres(sqlx::pool::PoolOptions::new().max_connections(2).connect_lazy_with(options)),
                    place,
                ))
            }
            #[cfg(feature = "mysql")]
            Kind::Mysql => {
                let options: sqlx::mysql::MySqlConnectOptions = self.options()?;
                let server = if self.url.starts_with("mariadb") { "MariaDB" } else { "MySQL" };
                let place = format!("{server} at {}:{}", options.get_host(), options.get_port());
                Ok((Pool::MySql(sqlx::pool::PoolOptions::new().max_connections(2).connect_lazy_with(options)), place))
            }
            #[cfg(feature = "sqlite")]
            Kind::Sqlite => {
                let options: sqlx::sqlite::SqliteConnectOptions = self.options()?;
                let beside = sidecar(&self.url, options.get_filename())?;
                let (place, options) = match file {
                    // That file is ours alone, so readers need not wait for writers in it.
                    File::Beside { create } => {
                        let options = sqlx::sqlite::SqliteConnectOptions::new()
                            .filename(&beside)
                            .create_if_missing(create)
                            .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal);
                        (beside.display().to_string(), options)
                    }
                    File::Itself => (options.get_filename().display().to_string(), options.create_if_missing(false)),
                };
                Ok((Pool::Sqlite(sqlx::pool::PoolOptions::new().max_connections(2).connect_lazy_with(options)), place))
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

    /// The first, where there are several.
    fn first(&self) -> &str {
        LocksBuilder::split_urls(&self.url).first().copied().unwrap_or_default()
    }

    /// What is wrong with a URL is told without the URL: there may be a password in it.
    fn options<O: FromStr<Err = sqlx::Error>>(&self) -> Result<O, Failure> {
        let url = self.first();
        url.parse().map_err(|error| {
            let reason = match error {
                sqlx::Error::Configuration(cause) => cause.to_string(),
                _ => "it cannot be read".into(),
            };
            let reason = if reason.contains(url) { "it cannot be read".into() } else { reason };
            let hint = if url.contains(',') { "; several servers are written as several URLs: URL,URL" } else { "" };
            Failure::configuration(format!("the database URL is not valid: {reason}{hint}"))
        })
    }
}

/// The URLs of a list, none of which may be missing: a variable that was not set, for one.
fn split<'a>(urls: &'a str, from: &str) -> Result<Vec<&'a str>, Failure> {
    let several = LocksBuilder::split_urls(urls);
    if several.iter().any(|url| url.is_empty() || url.starts_with(',') || url.ends_with(',')) {
        return Err(Failure::configuration(format!("{from} names several databases, and one of them is empty")));
    }
    Ok(several)
}

impl Pool {
    fn locks(&self) -> Locks {
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

/// `DATABASE_URL` of the nearest `.env`. The other variables there are none of ours, nor are they passed to the command.
fn from_dotenv() -> Result<Option<String>, Failure> {
    let unreadable = |error: dotenvy::Error| match error {
        dotenvy::Error::LineParse(_, at) => {
            Failure::configuration(format!(".env cannot be read, at byte {at} of a line"))
        }
        error => Failure::configuration(format!(".env cannot be read: {error}")),
    };
    let variables = match dotenvy::dotenv_iter() {
        Ok(variables) => variables,
        Err(error) if error.not_found() => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    for variable in variables {
        let (name, value) = variable.map_err(unreadable)?;
        if name == "DATABASE_URL" {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// The file that leases are kept in for a SQLite database: `app.db-sqlock` for `app.db`, one and the same by whatever path
/// or link it is named. A file of our own stands for itself: `sqlock.db`, or a sidecar.
#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
fn sidecar(url: &str, database: &Path) -> Result<PathBuf, Failure> {
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
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    if name == DEFAULT_FILE || name.ends_with(SIDECAR) {
        return Ok(file);
    }
    let mut sidecar = file.into_os_string();
    sidecar.push(SIDECAR);
    Ok(sidecar.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_urls_is_split_where_another_one_begins() {
        let split = LocksBuilder::split_urls;
        assert_eq!(split("postgres://a,postgresql://b/x"), ["postgres://a", "postgresql://b/x"]);
        assert_eq!(split("mysql://u:p,w@a/x, mysql://b"), ["mysql://u:p,w@a/x", "mysql://b"]);
        assert_eq!(split("postgres://u@a:1,b:2/x?options=-cx%3D1,2"), ["postgres://u@a:1,b:2/x?options=-cx%3D1,2"]);
        assert_eq!(split("sqlite://a,b.db"), ["sqlite://a,b.db"]);
    }

    #[test]
    fn a_sidecar_is_the_same_by_whatever_path_it_is_named() -> Result<(), Failure> {
        let directory = tempfile::tempdir().map_err(|e| Failure::system(e.to_string()))?;
        let file = directory.path().join("app.db");
        let missing = sidecar("sqlite://app.db", &file)?;
        assert!(missing.ends_with("app.db-sqlock"), "{}", missing.display());
        std::fs::write(&file, "").map_err(|e| Failure::system(e.to_string()))?;
        let link = directory.path().join("link.db");
        std::os::unix::fs::symlink(&file, &link).map_err(|e| Failure::system(e.to_string()))?;
        assert_eq!(sidecar("sqlite://link.db", &link)?, missing);
        assert_eq!(sidecar("sqlite://app.db-sqlock", &missing)?, missing);
        std::fs::remove_file(&file).map_err(|e| Failure::system(e.to_string()))?;
        assert_eq!(sidecar("sqlite://link.db", &link)?, missing, "a link to a file that is not there yet");
        assert!(sidecar("sqlite::memory:", Path::new("file:sqlx-in-memory-0")).is_err());
        assert!(sidecar("sqlite://nowhere/app.db", &directory.path().join("nowhere/app.db")).is_err());
        Ok(())
    }
}
