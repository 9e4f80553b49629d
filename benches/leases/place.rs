//! The place of a measurement: a database that is created for it and dropped afterwards.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};
use sqlock::Locks;
use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{AssertSqlSafe, ConnectOptions, Executor, MySqlPool, PgPool, SqlitePool};
use tempfile::TempDir;

use crate::cpu::Meter;
use crate::floor::{Bare, NotificationListener};

pub(crate) struct Place {
    pub(crate) title: String,
    options: Options,
    server: Option<Options>,
    name: String,
    /// SQLite's `synchronous` setting.
    synchronous: Option<&'static str>,
    directory: Option<TempDir>,
}

/// How to connect to a place.
#[derive(Clone)]
pub(crate) enum Options {
    Postgres(PgConnectOptions),
    MySql(MySqlConnectOptions),
    Sqlite(SqliteConnectOptions),
}

/// An application's own connections.
pub(crate) enum Pool {
    Postgres(PgPool),
    MySql(MySqlPool),
    Sqlite(SqlitePool),
}

/// The kinds of databases, with different expectations.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Postgres,
    MySql,
    SqliteFull,
    SqliteNormal,
}

impl Place {
    /// Returns the place of a URL; without a URL, two embedded ones.
    pub(crate) async fn all(url: Option<String>) -> Vec<Self> {
        match url {
            Some(url) if !url.starts_with("sqlite:") => vec![Self::on_server(&url).await],
            // For the URL of a file, a new file is created beside it, on the same disk.
            url => {
                let beside = url.as_deref().and_then(directory);
                let full = Self::embedded(beside.as_deref(), "FULL").await;
                vec![full, Self::embedded(beside.as_deref(), "NORMAL").await]
            }
        }
    }

    /// Creates another place of the same kind on the same server.
    pub(crate) async fn beside(&self) -> Self {
        match (&self.server, self.synchronous) {
            (Some(server), _) => Self::on_server(&server.url()).await,
            (None, synchronous) => {
                let beside = self.directory.as_ref().and_then(|own| own.path().parent()).and_then(Path::to_str);
                Self::embedded(beside, synchronous.expect("only SQLite has no server")).await
            }
        }
    }

    async fn embedded(beside: Option<&str>, synchronous: &'static str) -> Self {
        let directory = match beside {
            Some(beside) => tempfile::tempdir_in(beside),
            None => tempfile::tempdir(),
        };
        let directory = directory.expect("a temporary directory");
        let options = Options::sqlite(&directory.path().join("bench.db"), synchronous);
        Self::ready(options, None, String::new(), Some(directory), Some(synchronous)).await
    }

    async fn on_server(url: &str) -> Self {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let name = format!("sqlock_bench_{}_{}", std::process::id(), SERIAL.fetch_add(1, Ordering::Relaxed));
        let create = AssertSqlSafe(format!("CREATE DATABASE {name}"));
        let (server, options) = if url.starts_with("mysql:") || url.starts_with("mariadb:") {
            let options: MySqlConnectOptions = url.parse().expect("a URL");
            let options = options.disable_statement_logging();
            (Options::MySql(options.clone()), Options::MySql(options.database(&name)))
        } else {
            let options: PgConnectOptions = url.parse().expect("a URL");
            let options = options.disable_statement_logging();
            (Options::Postgres(options.clone()), Options::Postgres(options.database(&name)))
        };
        server.connect().await.run(create).await;
        Self::ready(options, Some(server), name, None, None).await
    }

    /// Names the server and its durability, and makes the floor's table.
    async fn ready(
        options: Options,
        server: Option<Options>,
        name: String,
        directory: Option<TempDir>,
        synchronous: Option<&'static str>,
    ) -> Self {
        let mut bare = options.connect().await;
        let settings = synchronous.map_or(String::new(), |synchronous| format!(" synchronous {synchronous}"));
        let title = format!("{}{settings}", bare.version().await);
        bare.create_table().await;
        let place = Self { title, options, server, name, synchronous, directory };
        place.locks().migrate().await.expect("migrate");
        place
    }

    pub(crate) async fn clean_up(&self) {
        let force = if matches!(self.options, Options::Postgres(_)) { " WITH (FORCE)" } else { "" };
        if let Some(server) = &self.server {
            let drop = AssertSqlSafe(format!("DROP DATABASE {}{force}", self.name));
            server.connect().await.run(drop).await;
        }
    }

    pub(crate) fn kind(&self) -> Kind {
        match &self.options {
            Options::Postgres(_) => Kind::Postgres,
            Options::MySql(_) => Kind::MySql,
            Options::Sqlite(_) if self.title.ends_with("FULL") => Kind::SqliteFull,
            Options::Sqlite(_) => Kind::SqliteNormal,
        }
    }

    /// Creates a client, as an application does.
    pub(crate) fn locks(&self) -> Locks {
        self.options.clone().locks()
    }

    /// Creates the pool of an application.
    pub(crate) fn pool(&self) -> Pool {
        self.options.clone().pool()
    }

    /// Describes this place for a run.
    pub(crate) async fn describe(&self) -> Value {
        let mut bare = self.bare().await;
        let max_connections = bare.max_connections().await;
        bare.close().await;
        json!({ "title": self.title, "max_connections": max_connections })
    }

    /// Returns the address of this place for another process.
    pub(crate) fn address(&self) -> Value {
        match &self.options {
            Options::Postgres(options) => json!({ "url": options.to_url_lossy().as_str() }),
            Options::MySql(options) => json!({ "url": options.to_url_lossy().as_str() }),
            Options::Sqlite(options) => json!({ "file": options.get_filename(), "synchronous": self.synchronous }),
        }
    }

    /// Returns the URL of this place for the command.
    pub(crate) fn url(&self) -> String {
        self.options.url()
    }

    /// Returns how to connect to this place.
    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// Listens to a channel, if the database supports notifications.
    pub(crate) async fn listener(&self, channel: &str) -> Option<NotificationListener> {
        self.options.listener(channel).await
    }

    /// Returns what measures processor time.
    pub(crate) async fn meter(&self) -> Meter {
        let mut bare = self.bare().await;
        let meter = Meter::on(&mut bare).await;
        bare.close().await;
        meter
    }

    /// Opens a connection to the server outside of the place, which does not affect its counts.
    pub(crate) async fn monitor(&self) -> Option<Bare> {
        match &self.server {
            Some(server) => Some(server.connect().await),
            None => None,
        }
    }

    /// Returns the name of the place on its server.
    pub(crate) fn database(&self) -> &str {
        &self.name
    }

    /// Opens a connection without a pool.
    pub(crate) async fn bare(&self) -> Bare {
        self.options.connect().await
    }

    /// Opens the floor's connections for `tasks` tasks: at most 16, or SQLite's one writer.
    pub(crate) async fn floor(&self, tasks: usize) -> Vec<Bare> {
        let most = if matches!(self.options, Options::Sqlite(_)) { 1 } else { 16 };
        let mut floor = Vec::new();
        for _ in 0..tasks.min(most) {
            floor.push(self.bare().await);
        }
        floor
    }
}

impl Options {
    /// Reads an address.
    pub(crate) fn at(address: &Value) -> Self {
        let text = |key: &str| address[key].as_str().expect("a text");
        match address["url"].as_str() {
            Some(url) if url.starts_with("postgres") => {
                Self::Postgres(url.parse::<PgConnectOptions>().expect("a URL").disable_statement_logging())
            }
            Some(url) => Self::MySql(url.parse::<MySqlConnectOptions>().expect("a URL").disable_statement_logging()),
            None => Self::sqlite(Path::new(text("file")), text("synchronous")),
        }
    }

    fn url(&self) -> String {
        match self {
            Self::Postgres(options) => options.to_url_lossy().to_string(),
            Self::MySql(options) => options.to_url_lossy().to_string(),
            Self::Sqlite(options) => format!("sqlite://{}", options.get_filename().display()),
        }
    }

    pub(crate) async fn listener(&self, channel: &str) -> Option<NotificationListener> {
        match self.clone() {
            Self::Postgres(options) => {
                let one = PgPoolOptions::new().max_connections(1).connect_lazy_with(options);
                Some(NotificationListener::on(&one, channel).await)
            }
            _ => None,
        }
    }

    fn sqlite(file: &Path, synchronous: &str) -> Self {
        let synchronous = if synchronous == "FULL" { SqliteSynchronous::Full } else { SqliteSynchronous::Normal };
        let options = SqliteConnectOptions::new()
            .filename(file)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(synchronous)
            .disable_statement_logging();
        Self::Sqlite(options)
    }

    fn pool(self) -> Pool {
        match self {
            Self::Postgres(options) => Pool::Postgres(PgPoolOptions::new().connect_lazy_with(options)),
            Self::MySql(options) => Pool::MySql(MySqlPoolOptions::new().connect_lazy_with(options)),
            Self::Sqlite(options) => Pool::Sqlite(SqlitePoolOptions::new().connect_lazy_with(options)),
        }
    }

    /// Creates a client, as an application does.
    pub(crate) fn locks(self) -> Locks {
        match self.pool() {
            Pool::Postgres(pool) => Locks::new(pool),
            Pool::MySql(pool) => Locks::new(pool),
            Pool::Sqlite(pool) => Locks::new(pool),
        }
    }

    pub(crate) async fn connect(&self) -> Bare {
        match self {
            Self::Postgres(options) => Bare::Postgres(options.connect().await.expect("connect")),
            Self::MySql(options) => {
                let mut conn = options.connect().await.expect("connect");
                // The level of sqlock's own connections.
                conn.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await.expect("SET");
                Bare::MySql(conn)
            }
            Self::Sqlite(options) => Bare::Sqlite(options.connect().await.expect("connect")),
        }
    }
}

fn directory(url: &str) -> Option<String> {
    let file = url.trim_start_matches("sqlite:").trim_start_matches("//").split('?').next()?;
    let directory = std::path::Path::new(file).parent()?;
    let directory = if directory.as_os_str().is_empty() { std::path::Path::new(".") } else { directory };
    (!file.contains(":memory:")).then(|| directory.display().to_string())
}
