//! Where it is measured: a database of its own, made and dropped again.

use std::sync::atomic::{AtomicU32, Ordering};

use sqlock::Locks;
use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{AssertSqlSafe, ConnectOptions, Executor};
use tempfile::TempDir;

use crate::floor::Bare;

pub(crate) struct Place {
    pub(crate) title: String,
    options: Options,
    server: Option<Options>,
    name: String,
    _file: Option<TempDir>,
}

#[derive(Clone)]
enum Options {
    Postgres(PgConnectOptions),
    MySql(MySqlConnectOptions),
    Sqlite(SqliteConnectOptions),
}

/// The databases, where what can be expected of them differs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Postgres,
    MySql,
    SqliteFull,
    SqliteNormal,
}

impl Place {
    /// The place that a URL names; without one, two embedded ones.
    pub(crate) async fn all(url: Option<String>) -> Vec<Self> {
        match url {
            Some(url) if !url.starts_with("sqlite:") => vec![Self::on_server(&url).await],
            // Also with the URL of a file a new one is made: beside it, on the same disk.
            url => {
                let beside = url.as_deref().and_then(directory);
                let full = Self::embedded(beside.as_deref(), SqliteSynchronous::Full, "FULL").await;
                vec![full, Self::embedded(beside.as_deref(), SqliteSynchronous::Normal, "NORMAL").await]
            }
        }
    }

    async fn embedded(beside: Option<&str>, synchronous: SqliteSynchronous, title: &str) -> Self {
        let directory = match beside {
            Some(beside) => tempfile::tempdir_in(beside),
            None => tempfile::tempdir(),
        };
        let directory = directory.expect("a temporary directory");
        let options = SqliteConnectOptions::new()
            .filename(directory.path().join("bench.db"))
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(synchronous)
            .disable_statement_logging();
        let options = Options::Sqlite(options);
        Self::ready(options, None, String::new(), Some(directory), &format!("synchronous {title}")).await
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
        Self::ready(options, Some(server), name, None, "").await
    }

    /// Names the server and its durability, and makes the floor's table.
    async fn ready(
        options: Options,
        server: Option<Options>,
        name: String,
        file: Option<TempDir>,
        settings: &str,
    ) -> Self {
        let mut bare = options.connect().await;
        let title = format!("{} {settings}", bare.version().await);
        bare.create_table().await;
        let place = Self { title: title.trim().into(), options, server, name, _file: file };
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

    /// A client as an application makes it.
    pub(crate) fn locks(&self) -> Locks {
        match self.options.clone() {
            Options::Postgres(options) => Locks::new(PgPoolOptions::new().connect_lazy_with(options)),
            Options::MySql(options) => Locks::new(MySqlPoolOptions::new().connect_lazy_with(options)),
            Options::Sqlite(options) => Locks::new(SqlitePoolOptions::new().connect_lazy_with(options)),
        }
    }

    /// A connection without a pool.
    pub(crate) async fn bare(&self) -> Bare {
        self.options.connect().await
    }

    /// As many connections as the floor may have for so many tasks: 16, or SQLite's one writer.
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
    async fn connect(&self) -> Bare {
        match self {
            Self::Postgres(options) => Bare::Postgres(options.connect().await.expect("connect")),
            Self::MySql(options) => {
                let mut conn = options.connect().await.expect("connect");
                // As sqlock's own connections have it.
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
