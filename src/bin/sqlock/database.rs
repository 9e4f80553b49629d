//! Which database, and a client on it.

use std::path::{Path, PathBuf};
use std::str::FromStr;
#[cfg(feature = "sqlite")]
use std::time::Duration;

use sqlock::{Error, Locks, LocksBuilder};
#[cfg(feature = "sqlite")]
use sqlx::sqlite::SqliteConnectOptions;

use crate::exit::{self, Failure};
use crate::global::Global;
use crate::stderr;

/// The variables that name the database, in the environment and in `.env`: the first that is there.
const VARIABLES: [&str; 2] = ["SQLOCK_DATABASE_URL", "DATABASE_URL"];

/// What forbids the embedded database when it is set, as --require-database does.
const REQUIRE: &str = "SQLOCK_REQUIRE_DATABASE";

/// The name of a file that holds nothing but leases, such as the embedded database that is used when none is named.
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
    /// Where it is, for people.
    pub place: String,
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
        let (pool, mut place) = url.pool(global, file).await?;
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

/// Which file, on SQLite.
#[derive(Clone, Copy)]
#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
enum File {
    /// The one that leases are kept in. `create`: if it is missing. `told`: if it is a sidecar, that is said.
    OfLeases { create: bool, told: bool },
    /// The one that is named.
    OfTheApplication,
}

/// A URL that has been found, and where.
#[derive(Clone)]
pub struct Url {
    url: String,
    kind: Kind,
    /// The embedded database, when none is named.
    #[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
    default_file: Option<PathBuf>,
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
            let Some(path) = url.strip_prefix('@') else {
                return parse(url, "--database-url");
            };
            let from = format!("the file {}", stderr::printable_line(path));
            let url = std::fs::read_to_string(path)
                .map_err(|error| Failure::configuration(format!("{from} of --database-url cannot be read: {error}")))?;
            return parse(url.trim(), &from);
        }
        for variable in VARIABLES {
            if let Some(url) = std::env::var_os(variable) {
                let not_text = |_| Failure::configuration(format!("{variable} is not UTF-8"));
                return parse(&url.into_string().map_err(not_text)?, variable);
            }
        }
        if !global.no_dotenv
            && let Some((variable, url)) = from_dotenv()?
        {
            return parse(&url, &format!("{variable} in .env"));
        }
        let is_required = std::env::var_os(REQUIRE).is_some_and(|set| !set.is_empty() && set != "0");
        if global.require_database || is_required || !cfg!(feature = "sqlite") {
            return Err(Failure::configuration(
                "no database is named: set SQLOCK_DATABASE_URL or DATABASE_URL, or give --database-url",
            ));
        }
        let file = default_file()?;
        stderr::notice(&format!(
            "no database is named (--database-url, SQLOCK_DATABASE_URL, DATABASE_URL, .env): using the file {}, which \
             excludes other commands of this user on this host only",
            file.display()
        ));
        Ok(Self { url: "sqlite:".into(), kind: Kind::Sqlite, default_file: Some(file) })
    }

    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Each of the URLs, where several are named: `postgres://…,postgres://…`.
    pub fn each(&self) -> Result<Vec<Self>, Failure> {
        if self.default_file.is_some() {
            return Ok(vec![self.clone()]);
        }
        LocksBuilder::split_urls(&self.url).into_iter().map(|url| Self::parse_one(url, "each database URL")).collect()
    }

    /// The place where leases are kept, to be looked at: nothing is sent to a server yet, nor made. On SQLite the application's
    /// own file comes after it, where that is another one.
    pub async fn pools_to_examine(&self, global: &Global) -> Result<Vec<Pool>, Failure> {
        let (pool, place) = self.pool(global, File::OfLeases { create: false, told: false }).await?;
        let mut pools = vec![pool];
        if self.kind == Kind::Sqlite {
            let (own, file) = self.pool(global, File::OfTheApplication).await?;
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
        Ok(Self { url: url.into(), kind, default_file: None })
    }

    /// A pool that connects when it is needed, and where to.
    #[cfg_attr(not(feature = "sqlite"), allow(unused_variables))]
    async fn pool(&self, global: &Global, file: File) -> Result<(Pool, String), Failure> {
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
                let options = match (file, &self.default_file) {
                    (File::OfLeases { create: true, .. }, Some(file)) => {
                        make_directory_of(file)?;
                        lease_file(file, true)
                    }
                    (_, Some(file)) => lease_file(file, false),
                    (File::OfLeases { create, told }, None) => self.file_of_leases(global, create, told).await?,
                    (File::OfTheApplication, None) => {
                        let options: SqliteConnectOptions = self.options()?;
                        resolve(&self.url, options.get_filename())?;
                        options.create_if_missing(false)
                    }
                };
                let place = options.get_filename().display().to_string();
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

    /// The SQLite file that leases are kept in: the one that is named, if programs that use the library keep theirs there, else
    /// the sidecar.
    #[cfg(feature = "sqlite")]
    async fn file_of_leases(&self, global: &Global, create: bool, told: bool) -> Result<SqliteConnectOptions, Failure> {
        let options: SqliteConnectOptions = self.options()?;
        let file = resolve(&self.url, options.get_filename())?;
        if holds_nothing_but_leases(&file) {
            return Ok(lease_file(&file, create));
        }
        let sidecar = sidecar(&file);
        // The application may have made its tables since leases were taken in the sidecar: as long as these last, they count.
        let shared = !global.sidecar && has_tables(&options, &file).await? && !has_leases(&sidecar).await;
        if global.same_file || shared {
            return Ok(options.filename(&file).create_if_missing(create));
        }
        if told && !global.sidecar {
            stderr::note(&format!(
                "the leases are kept in {}: programs that lock in {} itself are not excluded (--sidecar, --same-file)",
                sidecar.display(),
                file.display()
            ));
        }
        if create {
            make_with_mode_of(&file, &sidecar);
        }
        Ok(lease_file(&sidecar, create))
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

/// The URL in the `.env` of this directory, and its variable. That of a directory above may belong to another project. The other
/// variables there are none of ours, nor are they passed to the command.
fn from_dotenv() -> Result<Option<(&'static str, String)>, Failure> {
    let unreadable = |error: dotenvy::Error| match error {
        dotenvy::Error::LineParse(_, at) => {
            Failure::configuration(format!(".env cannot be read, at byte {at} of a line"))
        }
        error => Failure::configuration(format!(".env cannot be read: {error}")),
    };
    let variables = match dotenvy::from_path_iter(".env") {
        Ok(variables) => variables.collect::<Result<Vec<_>, _>>().map_err(unreadable)?,
        Err(error) if error.not_found() => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    let value = |wanted| variables.iter().find(|(name, _)| name == wanted).map(|(_, value)| (wanted, value.clone()));
    Ok(VARIABLES.into_iter().find_map(value))
}

/// The embedded database of this user on this host. The host is part of the path: a home directory may be on a network, across
/// which the locks of SQLite do not work.
fn default_file() -> Result<PathBuf, Failure> {
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
    Ok(state.join("sqlock").join(format!("host-{host}")).join(DEFAULT_FILE))
}

#[cfg(feature = "sqlite")]
fn make_directory_of(file: &Path) -> Result<(), Failure> {
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
fn lease_file(file: &Path, create: bool) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(create)
        .journal_mode(sqlx::sqlite::SqliteJournalMode::Wal)
}

/// How long the look at a file that others write to may take.
#[cfg(feature = "sqlite")]
const PATIENCE_TO_LOOK: Duration = Duration::from_millis(250);

/// Whether a SQLite file has sqlock's tables.
#[cfg(feature = "sqlite")]
async fn has_tables(options: &SqliteConnectOptions, file: &Path) -> Result<bool, Failure> {
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
    let options = options.clone().filename(file).create_if_missing(false).busy_timeout(PATIENCE_TO_LOOK);
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
async fn has_leases(sidecar: &Path) -> bool {
    if !sidecar.exists() {
        return false;
    }
    let pool = sqlx::SqlitePool::connect_lazy_with(lease_file(sidecar, false));
    let locks = Locks::new(pool);
    let held = locks.list("").await.is_ok_and(|held| !held.is_empty());
    let _ = locks.shutdown().await;
    held
}

/// Makes a sidecar that those can read and write who can do so with the database. SQLite gives its other files the same mode.
#[cfg(feature = "sqlite")]
fn make_with_mode_of(database: &Path, sidecar: &Path) {
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
pub fn holds_nothing_but_leases(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name == DEFAULT_FILE || name.ends_with(SIDECAR)
}

/// `app.db-sqlock` for `app.db`.
#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
fn sidecar(file: &Path) -> PathBuf {
    let mut sidecar = file.as_os_str().to_owned();
    sidecar.push(SIDECAR);
    sidecar.into()
}

/// The SQLite file that a URL names, one and the same by whatever path or link it is named.
#[cfg_attr(not(feature = "sqlite"), allow(dead_code))]
fn resolve(url: &str, database: &Path) -> Result<PathBuf, Failure> {
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
    fn a_list_of_urls_is_split_where_another_one_begins() {
        let split = LocksBuilder::split_urls;
        assert_eq!(split("postgres://a,postgresql://b/x"), ["postgres://a", "postgresql://b/x"]);
        assert_eq!(split("mysql://u:p,w@a/x, mysql://b"), ["mysql://u:p,w@a/x", "mysql://b"]);
        assert_eq!(split("postgres://u@a:1,b:2/x?options=-cx%3D1,2"), ["postgres://u@a:1,b:2/x?options=-cx%3D1,2"]);
        assert_eq!(split("sqlite://a,b.db"), ["sqlite://a,b.db"]);
    }

    #[test]
    fn a_file_is_the_same_by_whatever_path_it_is_named() -> Result<(), Failure> {
        let directory = tempfile::tempdir().map_err(|e| Failure::system(e.to_string()))?;
        let file = directory.path().join("app.db");
        let missing = resolve("sqlite://app.db", &file)?;
        std::fs::write(&file, "").map_err(|e| Failure::system(e.to_string()))?;
        let link = directory.path().join("link.db");
        std::os::unix::fs::symlink(&file, &link).map_err(|e| Failure::system(e.to_string()))?;
        assert_eq!(resolve("sqlite://link.db", &link)?, missing);
        std::fs::remove_file(&file).map_err(|e| Failure::system(e.to_string()))?;
        assert_eq!(resolve("sqlite://link.db", &link)?, missing, "a link to a file that is not there yet");
        assert!(resolve("sqlite::memory:", Path::new("file:sqlx-in-memory-0")).is_err());
        assert!(resolve("sqlite://nowhere/app.db", &directory.path().join("nowhere/app.db")).is_err());
        let sidecar = sidecar(&missing);
        assert!(sidecar.ends_with("app.db-sqlock"), "{}", sidecar.display());
        assert!(holds_nothing_but_leases(&sidecar) && !holds_nothing_but_leases(&missing));
        Ok(())
    }
}
