//! Storms, to find errors that should not reach callers. `soak [SECONDS]` runs two, each for that
//! time (60) and with
//!
//! - 64 clients that all wait for one name;
//! - 64 clients that take several of 64 names at once, each in its own random order. The names
//!   change every few seconds, so that rows are continually created, and swept as soon as they are
//!   free.
//!
//! Each client has its own connections, like a process. In `soak line [SECONDS]` (600), real
//! processes queue, beside traffic and sweeps, and are killed and stopped: see `queue_storm.rs`. In `soak
//! many [COUNT]` (10000) they take several names at once: see `many.rs`. `soak held [COUNT]
//! [SECONDS]` (100000, 120) keeps leases of one client: see `held.rs`. `soak neighbours [RUNS]`
//! (20) makes faults beside leases: see `neighbours.rs`. In `soak payments [SECONDS]` (1200),
//! servers charge once for each key while they are killed and stopped: see `payments.rs`. `soak
//! records [COUNT]` (5000000) measures operations on a table with that many records: see
//! `records.rs`. `soak growth [COUNT]` (1000000) measures leases beside up to that many names: see
//! `growth.rs`.
//!
//! The database is that of `DATABASE_URL` (otherwise SQLite in a temporary file). The storm prints
//! its counts and those of the server; it fails if an error surfaced or two clients held one name.

#![allow(clippy::expect_used, clippy::panic, reason = "a program for tests")]

#[path = "any_pool.rs"]
mod any_pool;
#[path = "critical_section.rs"]
mod critical_section;
#[path = "fill.rs"]
mod fill;
#[path = "gather.rs"]
mod gather;
#[path = "growth.rs"]
mod growth;
#[path = "held.rs"]
mod held;
#[path = "history.rs"]
mod history;
#[path = "many.rs"]
mod many;
#[path = "neighbours.rs"]
mod neighbours;
#[path = "payments.rs"]
mod payments;
#[path = "process.rs"]
mod process;
#[path = "proxy.rs"]
#[allow(dead_code, reason = "tests use the rest")]
mod proxy;
#[path = "queue_storm.rs"]
mod queue_storm;
#[path = "records.rs"]
mod records;
#[path = "traffic.rs"]
mod traffic;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::process::exit;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sqlock::{Error, Lease, Locks, LocksBuilder};
use sqlx::mysql::{MySqlConnectOptions, MySqlPoolOptions};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{AssertSqlSafe, Executor, MySqlPool, PgPool, Row, SqlitePool};
use tokio::task::JoinSet;
use uuid::Uuid;

const CLIENTS: usize = 64;
const NAMES: usize = 64;

/// The most names that one client holds.
const AT_ONCE: usize = 4;

/// How long a client that holds some names waits for another name: not long, because another client
/// may wait in the opposite order.
const SHORT_WAIT: Duration = Duration::from_millis(500);

/// How long the names of the second storm are in use.
const GENERATION: Duration = Duration::from_secs(5);

/// Longer than any lease of a storm lasts, so that two holders of a name are a mistake and not an
/// expiry.
const TTL: Duration = Duration::from_secs(300);

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let what = match &arguments[..] {
        ["stand", url, record] => return queue_storm::stand(url, Path::new(record)).await,
        ["gather", url, how, count, dir] => return many::gather(url, how, count, Path::new(dir)).await,
        ["wait", url, name] => return neighbours::wait(url, name).await,
        ["pay", url, port, provider] => {
            return payments::server::serve(url, number(port), number(provider), false).await;
        }
        ["pay", url, port, provider, "full"] => {
            return payments::server::serve(url, number(port), number(provider), true).await;
        }
        ["provider"] => return payments::provider::provide().await,
        ["line"] => Soak::Line(600),
        ["line", seconds] => Soak::Line(number(seconds)),
        ["many"] => Soak::Many(10_000),
        ["many", count] => Soak::Many(number(count)),
        ["held"] => Soak::Held(100_000, 120),
        ["held", count] => Soak::Held(number(count), 120),
        ["held", count, seconds] => Soak::Held(number(count), number(seconds)),
        ["neighbours"] => Soak::Neighbours(20),
        ["neighbours", runs] => Soak::Neighbours(number(runs)),
        ["payments"] => Soak::Payments(1200),
        ["payments", seconds] => Soak::Payments(number(seconds)),
        ["records"] => Soak::Records(5_000_000),
        ["records", count] => Soak::Records(number(count)),
        ["growth"] => Soak::Growth(1_000_000),
        ["growth", count] => Soak::Growth(number(count)),
        [] => Soak::Storms(60),
        [seconds] => Soak::Storms(number(seconds)),
        _ => usage(),
    };
    let journal = Arc::new(Journal::default());
    tracing_to(&journal);
    let url = std::env::var("DATABASE_URL").ok().filter(|url| !url.is_empty());
    let place = Place::make(url.as_deref()).await;
    println!("{}", place.database.version().await);
    let soak = async {
        match what {
            Soak::Storms(seconds) => storms(&place, &journal, Duration::from_secs(seconds)).await,
            Soak::Line(seconds) => queue_storm::soak(&place, Duration::from_secs(seconds)).await,
            Soak::Many(count) => many::soak(&place, usize::try_from(count).unwrap_or(usize::MAX)).await,
            Soak::Held(count, seconds) => {
                let count = usize::try_from(count).unwrap_or(usize::MAX);
                held::soak(&place, count, Duration::from_secs(seconds)).await
            }
            Soak::Neighbours(runs) => neighbours::soak(&place, runs).await,
            Soak::Payments(seconds) => payments::soak(&place, Duration::from_secs(seconds)).await,
            Soak::Records(count) => records::soak(&place, usize::try_from(count).unwrap_or(usize::MAX)).await,
            Soak::Growth(count) => growth::soak(&place, usize::try_from(count).unwrap_or(usize::MAX)).await,
        }
    };
    let clean = tokio::select! {
        clean = soak => clean,
        _ = tokio::signal::ctrl_c() => false,
    };
    place.remove().await;
    exit(i32::from(!clean))
}

enum Soak {
    Storms(u64),
    Line(u64),
    Many(u64),
    Held(u64, u64),
    Neighbours(u64),
    Payments(u64),
    Records(u64),
    Growth(u64),
}

fn number<N: FromStr>(text: &str) -> N {
    text.parse().unwrap_or_else(|_| usage())
}

fn usage() -> ! {
    eprintln!(
        "usage: soak [SECONDS] | soak line [SECONDS] | soak many [COUNT] | soak held [COUNT] [SECONDS] \
         | soak neighbours [RUNS] | soak payments [SECONDS] | soak records [COUNT] | soak growth [COUNT]"
    );
    exit(2)
}

/// Runs both storms, and returns whether no violation was found.
async fn storms(place: &Place, journal: &Arc<Journal>, time: Duration) -> bool {
    place.database.locks().build().migrate().await.expect("migrate");
    let mut clean = true;
    for storm in [Storm::OneName, Storm::ManyNames] {
        let deadlocks = place.database.deadlocks().await;
        journal.0.lock().expect("no panic").clear();
        let report = Arc::new(Report::default());
        let mut clients = JoinSet::new();
        let start = Instant::now();
        for _ in 0..CLIENTS {
            let client = Client { locks: place.database.locks().build(), start, time, report: Arc::clone(&report) };
            clients.spawn(async move {
                let sweeping = client.locks.sweeper().retention(GENERATION / 5).every(GENERATION / 2).start();
                match storm {
                    Storm::OneName => client.take_turns().await,
                    Storm::ManyNames => client.take_several().await,
                }
                drop(sweeping);
                if let Err(error) = client.locks.shutdown().await {
                    client.report.error(&error);
                }
            });
        }
        clients.join_all().await;
        let deadlocks = place.database.deadlocks().await.zip(deadlocks).map(|(after, before)| after - before);
        let title = match storm {
            Storm::OneName => format!("{CLIENTS} clients, 1 name"),
            Storm::ManyNames => format!("{CLIENTS} clients, {NAMES} names in random order"),
        };
        println!("  {title}, {:.0} s", start.elapsed().as_secs_f64());
        println!("{report}");
        match deadlocks {
            Some(deadlocks) => println!("    deadlocks that the server saw      {deadlocks}"),
            None => println!("    deadlocks                          (this database has none)"),
        }
        println!("{journal}");
        clean &= report.is_clean();
    }
    clean
}

#[derive(Clone, Copy)]
enum Storm {
    OneName,
    ManyNames,
}

/// One simulated process.
struct Client {
    locks: Locks,
    start: Instant,
    time: Duration,
    report: Arc<Report>,
}

impl Client {
    fn goes_on(&self) -> bool {
        self.start.elapsed() < self.time
    }

    /// Repeatedly waits for the one name and holds it for a moment.
    async fn take_turns(&self) {
        while self.goes_on() {
            match self.locks.lease("the one").ttl(TTL).wait(self.time).acquire().await {
                Ok(lease) => {
                    let presence = self.report.enter(&lease);
                    tokio::time::sleep(Duration::from_micros(random(1000) as u64)).await;
                    self.give_back(lease, presence).await;
                }
                Err(error) if error.is_timeout() => self.report.count("timed out"),
                Err(error) => self.report.error(&error),
            }
        }
    }

    /// Acquires some names in random order, with a short wait for each, and releases them in
    /// another order.
    async fn take_several(&self) {
        while self.goes_on() {
            let generation = self.start.elapsed().as_secs() / GENERATION.as_secs();
            let mut held = Vec::new();
            for _ in 0..=random(AT_ONCE) {
                let name = format!("{generation}/{}", random(NAMES));
                if held.iter().any(|(lease, _): &(Lease, _)| lease.name().as_str() == name) {
                    continue;
                }
                let request = self.locks.lease(name).ttl(TTL);
                let taken = match random(3) {
                    0 => request.wait(SHORT_WAIT).acquire().await.map(Some),
                    _ => request.try_acquire().await,
                };
                match taken {
                    Ok(Some(lease)) => {
                        let presence = self.report.enter(&lease);
                        held.push((lease, presence));
                    }
                    Ok(None) => self.report.count("refused"),
                    Err(error) if error.is_timeout() => self.report.count("timed out"),
                    // The database was too busy for such a short limit. Any other failure has
                    // another reason.
                    Err(Error::Unavailable { reason, .. }) if reason.starts_with("no answer came within 5") => {
                        self.report.count("had no answer in time");
                    }
                    Err(error) => self.report.error(&error),
                }
            }
            while !held.is_empty() {
                let (lease, presence) = held.swap_remove(random(held.len()));
                self.give_back(lease, presence).await;
            }
        }
    }

    async fn give_back(&self, lease: Lease, presence: Presence) {
        drop(presence);
        if random(8) == 0 {
            // The release runs in the background, as when a future is dropped.
            return drop(lease);
        }
        if let Err(error) = lease.release().await {
            self.report.error(&error);
        }
    }
}

fn random(below: usize) -> usize {
    (Uuid::new_v4().as_u128() % below as u128) as usize
}

/// The observations of the clients.
#[derive(Default)]
struct Report {
    counts: Mutex<BTreeMap<&'static str, u64>>,
    errors: Mutex<BTreeMap<String, u64>>,
    occupied: Mutex<BTreeMap<String, Arc<AtomicBool>>>,
}

/// A client believes that it holds a name.
struct Presence(Arc<AtomicBool>);

impl Drop for Presence {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

impl Report {
    fn count(&self, what: &'static str) {
        *self.counts.lock().expect("no panic").entry(what).or_default() += 1;
    }

    fn error(&self, error: &Error) {
        *self.errors.lock().expect("no panic").entry(error.report().to_string()).or_default() += 1;
    }

    fn enter(&self, lease: &Lease) -> Presence {
        self.count("granted");
        let name = lease.name().as_str().to_owned();
        let occupied = Arc::clone(self.occupied.lock().expect("no panic").entry(name).or_default());
        if occupied.swap(true, Ordering::SeqCst) {
            self.count("TWO HOLDERS");
        }
        Presence(occupied)
    }

    fn is_clean(&self) -> bool {
        let counts = self.counts.lock().expect("no panic");
        self.errors.lock().expect("no panic").is_empty()
            && !counts.contains_key("TWO HOLDERS")
            && counts.contains_key("granted")
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, count) in &*self.counts.lock().expect("no panic") {
            writeln!(f, "    {what:<34} {count}")?;
        }
        let errors = self.errors.lock().expect("no panic");
        write!(f, "    errors that surfaced               {}", errors.values().sum::<u64>())?;
        for (error, count) in &*errors {
            write!(f, "\n      {count} × {error}")?;
        }
        Ok(())
    }
}

/// The events of sqlock, counted: how often it retried, and why.
#[derive(Default)]
struct Journal(Mutex<BTreeMap<String, u64>>);

impl fmt::Display for Journal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let events = self.0.lock().expect("no panic");
        write!(f, "    warnings, and what was tried again {}", events.values().sum::<u64>())?;
        for (event, count) in &*events {
            write!(f, "\n      {count} × {event}")?;
        }
        Ok(())
    }
}

fn tracing_to(journal: &Arc<Journal>) {
    tracing::subscriber::set_global_default(EventCounter(Arc::clone(journal))).expect("the only subscriber");
}

/// A subscriber that keeps no spans and counts the events of sqlock.
struct EventCounter(Arc<Journal>);

impl tracing::Subscriber for EventCounter {
    fn enabled(&self, event: &tracing::Metadata<'_>) -> bool {
        event.target().starts_with("sqlock") && event.is_event()
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let mut words = Words::default();
        event.record(&mut words);
        let warning = *event.metadata().level() <= tracing::Level::WARN;
        if warning || words.message == "trying again" {
            let text = format!("{}{}", words.message, words.rest);
            *self.0.0.lock().expect("no panic").entry(text).or_default() += 1;
        }
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[derive(Default)]
struct Words {
    message: String,
    rest: String,
}

impl tracing::field::Visit for Words {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            // These fields differ from event to event.
            "name" | "token" => {}
            name => self.rest += &format!(" {name}={value:?}"),
        }
    }
}

/// The database of this run.
struct Place {
    database: Database,
    url: String,
    remove: Option<(Database, String)>,
    _file: Option<tempfile::TempDir>,
}

/// A pool opens connections when they are needed, so a pool that only provides its options costs
/// nothing.
enum Database {
    Postgres(PgPool),
    MySql(MySqlPool),
    Sqlite(SqlitePool),
}

impl Place {
    async fn make(server: Option<&str>) -> Self {
        let name = format!("sqlock_soak_{}", std::process::id());
        match server {
            Some(server) if !server.starts_with("sqlite:") => {
                let (address, query) = server.split_once('?').unwrap_or((server, ""));
                let (scheme, rest) = address.split_once("://").expect("a URL");
                let authority = rest.split('/').next().unwrap_or(rest);
                let url = format!("{scheme}://{authority}/{name}?{query}");
                let server = Database::open(server);
                server.run(format!("CREATE DATABASE {name}")).await;
                Self { database: Database::open(&url), url, remove: Some((server, name)), _file: None }
            }
            _ => {
                let directory = tempfile::tempdir().expect("a temporary directory");
                let url = format!("sqlite://{}", directory.path().join("soak.db").display());
                Self { database: Database::open(&url), url, remove: None, _file: Some(directory) }
            }
        }
    }

    async fn remove(&self) {
        if let Some((server, name)) = &self.remove {
            let force = if matches!(server, Database::Postgres(_)) { " WITH (FORCE)" } else { "" };
            server.run(format!("DROP DATABASE {name}{force}")).await;
        }
    }
}

impl Database {
    fn open(url: &str) -> Self {
        const URL: &str = "a URL";
        match url.split(':').next() {
            Some("sqlite") => {
                let file: SqliteConnectOptions = url.parse().expect(URL);
                let options = file.create_if_missing(true).journal_mode(SqliteJournalMode::Wal);
                Self::Sqlite(SqlitePoolOptions::new().max_connections(1).connect_lazy_with(options))
            }
            Some("mysql" | "mariadb") => {
                let options: MySqlConnectOptions = url.parse().expect(URL);
                Self::MySql(MySqlPoolOptions::new().max_connections(1).connect_lazy_with(options))
            }
            _ => {
                let options: PgConnectOptions = url.parse().expect(URL);
                Self::Postgres(PgPoolOptions::new().max_connections(1).connect_lazy_with(options))
            }
        }
    }

    /// Counts the rows of holders and waiters.
    async fn leftovers(&self) -> i64 {
        const ROWS: &str = "SELECT (SELECT count(*) FROM sqlock_entry)
                                 + (SELECT count(*) FROM sqlock_lease WHERE id <> '')";
        let count = match self {
            Self::Postgres(pool) => sqlx::query_scalar(ROWS).fetch_one(pool).await,
            Self::MySql(pool) => sqlx::query_scalar(ROWS).fetch_one(pool).await,
            Self::Sqlite(pool) => sqlx::query_scalar(ROWS).fetch_one(pool).await,
        };
        count.expect("rows can be counted")
    }

    /// Returns the builder of a client with its own connections.
    fn locks(&self) -> LocksBuilder {
        match self {
            Self::Postgres(pool) => Locks::builder(pool.clone()),
            Self::MySql(pool) => Locks::builder(pool.clone()),
            Self::Sqlite(pool) => Locks::builder(pool.clone()),
        }
    }

    async fn run(&self, sql: String) {
        let sql = sqlx::raw_sql(AssertSqlSafe(sql));
        match self {
            Self::Postgres(pool) => drop(pool.execute(sql).await.expect("a statement")),
            Self::MySql(pool) => drop(pool.execute(sql).await.expect("a statement")),
            Self::Sqlite(pool) => drop(pool.execute(sql).await.expect("a statement")),
        }
    }

    async fn version(&self) -> String {
        match self {
            Self::Postgres(pool) => {
                let version = sqlx::query_scalar("SHOW server_version").fetch_one(pool).await;
                format!("PostgreSQL {}", version.unwrap_or_else(|error| error.to_string()))
            }
            Self::MySql(pool) => {
                let version: String =
                    sqlx::query_scalar("SELECT VERSION()").fetch_one(pool).await.expect("the version");
                format!("{} {version}", if version.contains("Maria") { "MariaDB" } else { "MySQL" })
            }
            Self::Sqlite(pool) => {
                let version = sqlx::query_scalar("SELECT sqlite_version()").fetch_one(pool).await;
                format!("SQLite {}", version.unwrap_or_else(|error| error.to_string()))
            }
        }
    }

    /// Returns the deadlocks that the server has counted: on PostgreSQL in this database, on the
    /// others in all databases.
    async fn deadlocks(&self) -> Option<i64> {
        match self {
            Self::Postgres(pool) => {
                let sql = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
                Some(sqlx::query_scalar(sql).fetch_one(pool).await.expect("pg_stat_database"))
            }
            Self::MySql(pool) => {
                let mariadb = sqlx::raw_sql("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'").fetch_optional(pool).await;
                if let Some(row) = mariadb.expect("the status") {
                    return Some(row.get::<String, _>(1).parse().expect("a number"));
                }
                let sql =
                    "SELECT CAST(count AS SIGNED) FROM information_schema.innodb_metrics WHERE name = 'lock_deadlocks'";
                Some(sqlx::query_scalar(sql).fetch_one(pool).await.expect("innodb_metrics"))
            }
            Self::Sqlite(_) => None,
        }
    }
}
