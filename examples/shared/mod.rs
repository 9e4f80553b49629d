//! The code that the examples share. An application does not need it, because it has one database
//! and knows its type.

#![allow(dead_code, unused_imports, unused_macros, unreachable_pub, reason = "each example uses its part")]

pub use std::error::Error;
pub use std::process::ExitCode;
pub use std::time::{Duration, Instant};

pub use sqlock::{Lease, Locks};
pub use sqlx::{Pool, QueryBuilder};
pub use tokio::task::JoinSet;

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

pub type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

/// Compiles the code once for each database (`Db` is sqlx's type for it), and makes a `main` that
/// opens a pool on the database of `DATABASE_URL`, or else on a SQLite file of its own, and calls
/// `example(pool, database)`.
macro_rules! any_database {
    (@one $feature:literal $module:ident $db:ty: $($code:item)*) => {
        #[cfg(feature = $feature)]
        mod $module {
            use super::*;

            pub(super) type Db = $db;
            #[allow(dead_code)]
            type Connection = <Db as sqlx::Database>::Connection;

            pub(super) async fn on(database: &shared::Database) -> Result<()> {
                let connected = tokio::time::timeout(Duration::from_secs(10), shared::$module(&database.url));
                let pool = connected.await.map_err(|_| "no connection to the database within 10 seconds")??;
                let done = example(pool.clone(), database).await;
                pool.close().await;
                done
            }

            $($code)*
        }
    };
    ($($code:item)*) => {
        any_database!(@one "sqlite" sqlite sqlx::Sqlite: $($code)*);
        any_database!(@one "postgres" postgres sqlx::Postgres: $($code)*);
        any_database!(@one "mysql" mysql sqlx::MySql: $($code)*);

        #[tokio::main]
        async fn main() -> ExitCode {
            let database = match shared::Database::choose(env!("CARGO_CRATE_NAME")) {
                Ok(database) => database,
                Err(error) => return shared::failed(error),
            };
            let done = match database.kind() {
                #[cfg(feature = "sqlite")]
                "sqlite" => sqlite::on(&database).await,
                #[cfg(feature = "postgres")]
                "postgres" => postgres::on(&database).await,
                #[cfg(feature = "mysql")]
                "mysql" => mysql::on(&database).await,
                kind => Err(shared::not_built_in(kind)),
            };
            match done {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => shared::failed(error),
            }
        }
    };
}
pub(crate) use any_database;

/// The database an example runs on.
pub struct Database {
    pub url: String,
    /// The directory of this run's file, deleted at its end.
    _file: Option<tempfile::TempDir>,
}

impl Database {
    pub fn choose(example: &str) -> Result<Self> {
        let quiet = arguments().is_some();
        if let Ok(url) = std::env::var("DATABASE_URL") {
            if !quiet {
                println!("Database: {} (as DATABASE_URL says)\n", without_credentials(&url));
            }
            return Ok(Self { url, _file: None });
        }
        if cfg!(not(feature = "sqlite")) {
            return Err("this example was built without sqlite: set DATABASE_URL".into());
        }
        let directory = tempfile::tempdir()?;
        let file = directory.path().join(format!("{example}.db"));
        println!("Database: SQLite in {}, deleted afterwards. Set DATABASE_URL for another.\n", file.display());
        Ok(Self { url: format!("sqlite://{}", file.display()), _file: Some(directory) })
    }

    pub fn kind(&self) -> &str {
        match self.url.split(':').next().unwrap_or_default() {
            "postgresql" => "postgres",
            "mariadb" => "mysql",
            scheme => scheme,
        }
    }
}

pub fn not_built_in(kind: &str) -> Box<dyn Error + Send + Sync> {
    match kind {
        "sqlite" | "postgres" | "mysql" => {
            format!("this example was built without {kind}: add `--features {kind}` (or `--all-features`)").into()
        }
        _ => "DATABASE_URL must begin with postgres://, mysql:// (also for MariaDB) or sqlite://".into(),
    }
}

pub fn failed(error: Box<dyn Error + Send + Sync>) -> ExitCode {
    eprintln!("FAILED: {error}");
    ExitCode::FAILURE
}

/// Shortens `scheme://user:password@host/database?…` to `scheme://host/database`.
fn without_credentials(url: &str) -> String {
    let url = url.split('?').next().unwrap_or_default();
    match (url.split_once("://"), url.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, place))) => format!("{scheme}://{place}"),
        _ => url.to_owned(),
    }
}

#[cfg(feature = "sqlite")]
pub async fn sqlite(url: &str) -> Result<sqlx::SqlitePool> {
    use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
    // WAL: readers do not block writers.
    let file: SqliteConnectOptions = url.parse()?;
    let file = file.create_if_missing(true).journal_mode(SqliteJournalMode::Wal);
    let pool = SqlitePoolOptions::new().max_connections(4);
    loop {
        match pool.clone().connect_with(file.clone()).await {
            // Another process switches the new file to WAL, and SQLite does not wait for the
            // switch.
            Err(sqlx::Error::Database(error)) if error.code().is_some_and(|code| code == "5") => {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            connected => return Ok(connected?),
        }
    }
}

#[cfg(feature = "postgres")]
pub async fn postgres(url: &str) -> Result<sqlx::PgPool> {
    Ok(sqlx::postgres::PgPoolOptions::new().max_connections(4).connect(url).await?)
}

#[cfg(feature = "mysql")]
pub async fn mysql(url: &str) -> Result<sqlx::MySqlPool> {
    let url = url.replacen("mariadb:", "mysql:", 1);
    Ok(sqlx::mysql::MySqlPoolOptions::new().max_connections(4).connect(&url).await?)
}

/// Makes the runs of one example, which share its tables, take turns. (A lease separates them.)
pub async fn take_turns(locks: &Locks, example: &str) -> Result<Lease> {
    locks.migrate().await?;
    let turn = locks.lease(format!("example/{example}")).ttl(Duration::from_secs(10));
    if let Some(lease) = turn.clone().try_acquire().await? {
        return Ok(lease);
    }
    println!("Another run of this example is using this database: waiting for it to end.\n");
    Ok(turn.acquire().await?)
}

impl Database {
    /// Starts this example again as another process on this database. It ends with the handle, and
    /// can be ended by closing its stdin.
    pub fn process(&self, arguments: &str) -> Result<Child> {
        Ok(self.again(arguments)?.spawn()?)
    }

    fn again(&self, arguments: &str) -> Result<Command> {
        if self.url.contains(":memory:") {
            return Err("other processes cannot share a database in memory: name a file".into());
        }
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(arguments.split(' '))
            .args(std::env::args().filter(|argument| argument.starts_with("--")))
            .env("DATABASE_URL", &self.url)
            .stdin(Stdio::piped())
            .kill_on_drop(true);
        Ok(command)
    }

    /// Starts this example again as another process on this database, for a conversation. The
    /// process waits for [`begin`](Conversation::begin).
    pub fn conversation(&self, arguments: &str) -> Result<Conversation> {
        let mut child = self.again(arguments)?.stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take().ok_or("no stdout")?;
        Ok(Conversation { child, output: BufReader::new(output).lines() })
    }

    /// Runs this example again as other processes on this database, one for each line of arguments.
    /// They begin at the same moment, and their output is printed here.
    pub async fn processes(&self, lines: impl IntoIterator<Item = String>) -> Result<()> {
        let mut ready = Vec::new();
        for line in lines {
            ready.push(self.conversation(&line)?);
        }
        for process in &mut ready {
            process.is_ready().await?;
        }
        for process in &mut ready {
            process.go().await?;
        }
        let mut running = JoinSet::new();
        for process in ready {
            running.spawn(process.ends());
        }
        running.join_all().await.into_iter().collect()
    }
}

/// Another process that runs this example, and its output.
pub struct Conversation {
    child: Child,
    output: Lines<BufReader<ChildStdout>>,
}

impl Conversation {
    async fn is_ready(&mut self) -> Result<()> {
        self.output.next_line().await?.ok_or("a process ended before it began")?;
        Ok(())
    }

    async fn go(&mut self) -> Result<()> {
        Ok(self.child.stdin.as_mut().ok_or("no stdin")?.write_all(b"go\n").await?)
    }

    /// Lets the process begin.
    pub async fn begin(&mut self) -> Result<()> {
        self.is_ready().await?;
        self.go().await
    }

    /// Waits for a line with this beginning, and returns the rest of the line.
    pub async fn hears(&mut self, beginning: &str) -> Result<String> {
        let says = async {
            while let Some(line) = self.output.next_line().await? {
                if let Some(rest) = line.strip_prefix(beginning) {
                    return Ok(rest.to_owned());
                }
            }
            Err(format!("a process ended before it said {beginning:?}").into())
        };
        let told = tokio::time::timeout(Duration::from_secs(60), says).await;
        told.map_err(|_| format!("a process has not said {beginning:?} for a minute"))?
    }

    /// Sends a signal to the process, as `kill -STOP` does.
    pub async fn signal(&self, signal: &str) -> Result<()> {
        let process = self.child.id().ok_or("the process has ended")?;
        let sent = Command::new("kill").arg(format!("-{signal}")).arg(process.to_string()).status().await?;
        if sent.success() { Ok(()) } else { Err(format!("could not send {signal}").into()) }
    }

    /// Kills the process with `kill -9`.
    pub async fn kill(mut self) -> Result<()> {
        Ok(self.child.kill().await?)
    }

    /// Waits for the end of the process, and prints its remaining output.
    pub async fn ends(mut self) -> Result<()> {
        while let Some(line) = self.output.next_line().await? {
            println!("{line}");
        }
        if self.child.wait().await?.success() { Ok(()) } else { Err("one of the processes failed".into()) }
    }
}

/// Returns the arguments of such a process.
pub fn arguments() -> Option<Vec<String>> {
    let words: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    (!words.is_empty()).then_some(words)
}

/// Waits, in such a process, until all the others are ready, too.
pub async fn all_are_ready() -> Result<()> {
    println!("ready");
    let mut go = String::new();
    match BufReader::new(tokio::io::stdin()).read_line(&mut go).await? {
        0 => Err("nobody said go".into()),
        _ => Ok(()),
    }
}

/// Completes, in such a process, when its stdin ends together with the other process.
pub async fn until_stdin_ends() {
    let _ = tokio::io::copy(&mut tokio::io::stdin(), &mut tokio::io::sink()).await;
}

/// Returns the statement that begins a transaction with row locks. At REPEATABLE READ, the default
/// of MySQL and MariaDB, it would lock more rows than needed, and read an old row after a wait.
pub fn begin_with_row_locks<DB: sqlx::Database>() -> &'static str {
    match DB::NAME {
        "MySQL" => "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; BEGIN",
        "SQLite" => "BEGIN IMMEDIATE",
        _ => "BEGIN",
    }
}

/// Returns whether the command line has this option.
pub fn asked_for(option: &str) -> bool {
    std::env::args().any(|argument| argument == option)
}
