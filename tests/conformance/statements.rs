//! The number of statements of each operation, as the database counts them.
//!
//! PostgreSQL logs every statement, and the test reads the log. MySQL and MariaDB count the
//! statements of clients (`Questions`). On SQLite the driver counts: for a database in memory,
//! sqlock's statements run on the caller's connections, whose statement log is on. On a file, the
//! cost of an operation is its commits, which the file counts in its header.
//!
//! Promises: 2, 16.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey};
use sqlock::retry::Retry;
use sqlock::{Error, Lease, Locks};
use sqlx::{AssertSqlSafe, Executor, Pool, Row, Transaction};
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::support::server::{Options, Server};
use crate::support::{Database, LONG, SOON, builder, connect, fresh, fresh_on, soon};
use crate::{DATABASE, Sql};

/// How often an operation is measured. Heartbeats also come once a second, so the minimum counts.
const ROUNDS: usize = 5;

/// The number of heartbeats to wait for.
const BEATS: u64 = 3;

/// The costs of the operations.
#[derive(Clone, Copy, Debug, Default)]
struct Bill {
    acquire_known: u64,
    acquire_new: u64,
    refused_try: u64,
    release: u64,
    hand_over: u64,
    /// The statements of `BEATS` heartbeats of a client that holds a thousand leases.
    beats: u64,
}

#[tokio::test]
async fn operations_cost_the_promised_statements() {
    if DATABASE == Database::Sqlite && !is_alone() {
        return alone("conformance::statements::operations_cost_the_promised_statements");
    }
    let meter = Meter::new().await;
    let bill = bill(&meter).await;
    println!("{DATABASE:?}: statements: {bill:?}");
    assert_eq!(bill.acquire_known, 1);
    assert_eq!(bill.release, 1);
    assert_eq!(bill.hand_over, 1);
    // One for each, and perhaps one more in flight.
    assert!((BEATS..=BEATS + 1).contains(&bill.beats), "{bill:?}");
    let (new, refused) = match DATABASE {
        // An update that matches nothing, and an insert.
        Database::Postgres => (2, 1),
        // A look, and an insert.
        Database::MySql | Database::MariaDb => (2, 1),
        // One text for all cases.
        Database::Sqlite => (1, 1),
    };
    assert_eq!(bill.acquire_new, new);
    assert_eq!(bill.refused_try, refused);
}

/// A refused request commits nothing, and no operation needs two commits.
#[tokio::test]
async fn operations_cost_one_file_commit_each() {
    if DATABASE != Database::Sqlite {
        // Each statement is a commit, because the servers run them in autocommit, according to the
        // application's settings.
        let db = fresh().await;
        let lease = db.locks().await.lease("a").acquire().await.expect("acquire");
        let seen: i64 = sqlx::query_scalar("SELECT count(*) FROM sqlock_lease WHERE id <> ''")
            .fetch_one(&db.pool_of(1).await)
            .await
            .expect("another connection can read");
        assert_eq!(seen, 1, "a grant is committed when it is handed out");
        return lease.release().await.expect("release");
    }
    let meter = Meter::on_a_file().await;
    let bill = bill(&meter).await;
    println!("{DATABASE:?}: commits: {bill:?}");
    assert_eq!((bill.acquire_known, bill.acquire_new, bill.refused_try), (1, 1, 0));
    assert_eq!((bill.release, bill.hand_over), (1, 1));
    assert!((BEATS..=BEATS + 1).contains(&bill.beats), "{bill:?}");
}

/// Counts the statements, on SQLite the commits, of concurrent requests of one client for different
/// names.
#[tokio::test]
async fn concurrent_requests_for_many_names_are_batched() {
    const NAMES: u64 = 64;
    let meter = if DATABASE == Database::Sqlite { Meter::on_a_file().await } else { Meter::new().await };
    let locks = meter.locks().await;
    let acquire = async || {
        let mut tasks = JoinSet::new();
        for i in 0..NAMES {
            let request = locks.lease(format!("{i}"));
            tasks.spawn(async move { request.acquire().await.expect("free") });
        }
        tasks.join_all().await
    };
    let extend = async |leases: Vec<Lease>| {
        let mut tasks = JoinSet::new();
        for lease in leases {
            tasks.spawn(async move {
                lease.extend(LONG).await.expect("held");
                lease
            });
        }
        tasks.join_all().await
    };
    let release = async |leases: Vec<Lease>| {
        let mut tasks = JoinSet::new();
        for lease in leases {
            tasks.spawn(async move { lease.release().await.expect("ours to the end") });
        }
        tasks.join_all().await;
    };
    release(acquire().await).await;
    let mut bill = [u64::MAX; 3];
    for _ in 0..ROUNDS {
        let (leases, acquired) = meter.cost(acquire()).await;
        let (leases, extended) = meter.cost(extend(leases)).await;
        let ((), released) = meter.cost(release(leases)).await;
        bill = [bill[0].min(acquired), bill[1].min(extended), bill[2].min(released)];
    }
    println!("{DATABASE:?}: {NAMES} names at once: {bill:?}");
    // Up to seven statements for a batch there.
    let most = if DATABASE.is_mysql() { NAMES / 2 } else { NAMES / 4 };
    assert!(bill.iter().all(|statements| *statements <= most), "{bill:?} for {NAMES} names");
}

/// The comparison is a transaction with the same effect and nothing else.
#[tokio::test]
async fn idempotent_effect_costs_two_more_statements() {
    if DATABASE == Database::Sqlite && !is_alone() {
        return alone("conformance::statements::idempotent_effect_costs_two_more_statements");
    }
    let meter = Meter::new().await;
    let pool = meter.ours.clone();
    pool.execute("CREATE TABLE counter (id INTEGER NOT NULL PRIMARY KEY, value BIGINT NOT NULL)")
        .await
        .expect("a table");
    pool.execute("INSERT INTO counter (id, value) VALUES (1, 0)").await.expect("a row");
    let locks = meter.locks().await;
    let payments = Idempotency::new(&locks);
    let effect = async |tx: &mut Transaction<'_, Sql>| {
        sqlx::query("UPDATE counter SET value = value + 1 WHERE id = 1").execute(&mut **tx).await?;
        Ok::<_, Error>(())
    };
    let bare = async || {
        let begin = if DATABASE == Database::Sqlite { "BEGIN IMMEDIATE" } else { "BEGIN" };
        let mut tx = pool.begin_with(begin).await.expect("begin");
        effect(&mut tx).await.expect("an effect");
        tx.commit().await.expect("commit");
    };
    let settled = async || {
        if DATABASE.is_mysql() {
            // The pool has one connection, which it lends again when nothing is on its way there
            // any more.
            drop(pool.acquire().await.expect("the connection"));
        }
    };
    let retried = async || {
        Retry::new().run(&pool, effect).await.expect("commit");
        settled().await;
    };
    let once = async |key: &str| {
        let (key, request) = (IdempotencyKey::global(key), Fingerprint::of(["pay"]));
        let replayed = payments.run(&pool, &key, &request, effect).await.expect("run").is_replay();
        settled().await;
        replayed
    };
    // The first run prepares the statements.
    bare().await;
    retried().await;
    assert!(!once("warm").await);
    assert!(once("warm").await);
    let ((), floor) = meter.cost(bare()).await;
    let ((), guarded) = meter.cost(retried()).await;
    let (replayed, first) = meter.cost(once("a")).await;
    assert!(!replayed);
    let (replayed, replay) = meter.cost(once("a")).await;
    assert!(replayed);
    println!("{DATABASE:?}: statements: bare {floor}, once {first}, replay {replay}");
    // On MySQL and MariaDB another connection looks for a rival, and finds completed requests.
    let looks = u64::from(DATABASE.is_mysql());
    // These databases also set and restore autocommit, set and release a savepoint, and look for
    // Galera, in the packets of BEGIN and COMMIT. The driver's later ROLLBACK finds no transaction,
    // and no call waits for it.
    let guards = if DATABASE.is_mysql() { 6 } else { 0 };
    assert_eq!(first, floor + 2 + looks + guards);
    // Compared with a plain `Retry`, the transaction adds only the claim and the result.
    assert!(first <= guarded + 2 + looks, "{first} for {guarded}");
    // The claim and a look at the record, between BEGIN and COMMIT (which the driver does not
    // count).
    let around = if DATABASE == Database::Postgres { 2 } else { 0 };
    assert_eq!(replay, if looks > 0 { looks } else { 2 + around });
}

/// Further waiters add no statements between the call of a release and the grant to another
/// process.
#[tokio::test]
async fn handover_cost_is_independent_of_waiter_count() {
    if DATABASE == Database::Sqlite && !is_alone() {
        return alone("conformance::statements::handover_cost_is_independent_of_waiter_count");
    }
    let meter = Meter::new().await;
    // A waiter that PostgreSQL notifies needs no statement to get the lease.
    let promised = if DATABASE == Database::Postgres { 1 } else { u64::MAX };
    let few = cost_of_passing(&meter, "few", 2, promised).await;
    // Without notifications, the next waiter polls at least once.
    let many = cost_of_passing(&meter, "many", 64, few + 2).await;
    println!("{DATABASE:?}: statements of a hand-over with 2 waiting: {few}, with 64: {many}");
    assert!(few > 0 && few <= promised, "{few} with 2 waiting");
    assert!(many <= few + 2, "{few} with 2 waiting, {many} with 64");
}

/// Returns the minimum cost of hand-overs between two clients, in turn, while `waiting` tasks wait.
/// Polls and heartbeats also count in a hand-over that takes long on a busy machine: after the
/// first ten, more are measured until one costs at most `enough`.
async fn cost_of_passing(meter: &Meter, name: &'static str, waiting: usize, enough: u64) -> u64 {
    let clients = [meter.locks().await, meter.locks().await, meter.locks().await];
    // A waiter in the process of the holder has no entry in the database until another process
    // waits.
    let mut lease = clients[2].lease(name).ttl(LONG).acquire().await.expect("acquire");
    let mut line = JoinSet::new();
    let mut least = u64::MAX;
    for turn in 0..100 {
        if turn >= 10 && least <= enough {
            break;
        }
        while line.len() < waiting {
            let client = &clients[(turn + 1 + line.len()) % 2];
            let request = client.lease(name).ttl(LONG).wait(SOON);
            line.spawn(async move { request.acquire().await.expect("acquire") });
            // The first waiter of the other client has an entry; the others wait in their process.
            meter.until_in_line(name, 1).await;
        }
        let passing = async {
            lease.release().await.expect("release");
            line.join_next().await.expect("somebody waits").expect("no panic")
        };
        let cost;
        (lease, cost) = meter.cost(passing).await;
        least = least.min(cost);
    }
    line.shutdown().await;
    for locks in clients {
        locks.shutdown().await.expect("shutdown");
    }
    least
}

/// A client has one entry in the database, for its first waiter.
#[tokio::test]
async fn waiters_of_one_client_cost_one_entry() {
    if DATABASE == Database::Sqlite && !is_alone() {
        return alone("conformance::statements::waiters_of_one_client_cost_one_entry");
    }
    let meter = Meter::new().await;
    let locks = meter.locks().await;
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    // Others that came before.
    for i in 1..=10 {
        let entry = format!(
            "INSERT INTO sqlock_entry (name, id, owner, client, is_renewed, units, permits, token, ttl, arrived_at, expires_at,
                                       acquired_at, holder, label)
             VALUES ('a', '{i:032x}', '{i:032x}', '', false, 0, 0, 0, 1000000, {i}, 9000000000000000, 0, '', '')"
        );
        meter.monitor.execute(AssertSqlSafe(entry)).await.expect("an entry");
    }
    let waiters = meter.locks().await;
    let mut waiting = JoinSet::new();
    for _ in 0..64 {
        waiting.spawn(waiters.lease("a").ttl(LONG).wait(LONG).acquire());
    }
    meter.until_in_line("a", 11).await;
    let begun = Instant::now();
    let (looks, cost) = meter.cost(meter.beats(BEATS)).await;
    let cost = cost - looks * meter.look;
    let seconds = begun.elapsed().as_secs() + 1;
    println!("{DATABASE:?}: statements of 64 waiters and a holder in {BEATS} heartbeats: {cost}");
    // Every second two heartbeats, and four looks at the entry, which are two statements each on
    // MySQL and MariaDB.
    assert!((BEATS..=10 * seconds + 10).contains(&cost), "{cost} in {seconds} s");
    waiting.shutdown().await;
    lease.release().await.expect("release");
}

async fn bill(meter: &Meter) -> Bill {
    let (ours, theirs) = (meter.locks().await, meter.locks().await);
    // Connections are opened and statements prepared.
    for locks in [&ours, &theirs] {
        for name in ["known", "other"] {
            let lease = locks.lease(name).ttl(LONG).acquire().await.expect("acquire");
            let next = spawn_waiter(locks, name).await;
            lease.release().await.expect("hand over");
            next.await.expect("no panic").release().await.expect("release");
        }
    }
    let mut least: Option<Bill> = None;
    for round in 0..ROUNDS {
        let mut bill = Bill::default();
        let lease;
        (lease, bill.acquire_known) = meter.cost(ours.lease("known").ttl(LONG).acquire()).await;
        let lease = lease.expect("acquire");
        let refused;
        (refused, bill.refused_try) = meter.cost(theirs.lease("known").try_acquire()).await;
        assert!(refused.expect("try").is_none());
        let new;
        (new, bill.acquire_new) = meter.cost(ours.lease(format!("new/{round}")).ttl(LONG).acquire()).await;
        new.expect("acquire").release().await.expect("release");
        let waiting = spawn_waiter(&ours, "known").await;
        let next;
        (next, bill.hand_over) = meter
            .cost(async {
                lease.release().await.expect("release");
                waiting.await.expect("no panic")
            })
            .await;
        let released;
        (released, bill.release) = meter.cost(next.release()).await;
        released.expect("release");
        least = Some(least.map_or(bill, |least| least.with(bill)));
    }
    let mut bill = least.expect("several rounds");
    // Leases acquired before the first heartbeat are looked up after it.
    let lease = ours.lease("known").ttl(LONG).acquire().await.expect("acquire");
    meter.beats(1).await;
    let leases = a_thousand(&ours).await;
    meter.beats(1).await;
    // Two heartbeats between two looks are seen as one, and then the cost is measured again.
    bill.beats = u64::MAX;
    for _ in 0..ROUNDS {
        if bill.beats > BEATS + 1 {
            let (looks, cost) = meter.cost(meter.beats(BEATS)).await;
            bill.beats = bill.beats.min(cost - looks * meter.look);
        }
    }
    assert!(leases.iter().all(Lease::is_held));
    drop((lease, leases));
    bill
}

impl Bill {
    /// Returns the minimum of each cost.
    fn with(self, other: Self) -> Self {
        Self {
            acquire_known: self.acquire_known.min(other.acquire_known),
            acquire_new: self.acquire_new.min(other.acquire_new),
            refused_try: self.refused_try.min(other.refused_try),
            release: self.release.min(other.release),
            hand_over: self.hand_over.min(other.hand_over),
            beats: 0,
        }
    }
}

async fn a_thousand(locks: &Locks) -> Vec<Lease> {
    let mut acquiring = JoinSet::new();
    for i in 0..1000 {
        acquiring.spawn(locks.lease(format!("many/{i}")).ttl(LONG).wait(SOON).acquire());
    }
    let mut leases = Vec::new();
    while let Some(lease) = acquiring.join_next().await {
        leases.push(lease.expect("no panic").expect("acquire"));
    }
    leases
}

/// Spawns a waiter of the same process, which has queued when this returns.
async fn spawn_waiter(locks: &Locks, name: &'static str) -> tokio::task::JoinHandle<Lease> {
    let request = locks.lease(name).ttl(LONG).wait(SOON);
    let waiting = tokio::spawn(async move { request.acquire().await.expect("acquire") });
    for _ in 0..3 {
        tokio::task::yield_now().await; // one thread: it runs
    }
    waiting
}

/// A database of a single test, and the count of the statements of its clients.
struct Meter {
    ours: Pool<Sql>,
    monitor: Pool<Sql>,
    gauge: Gauge,
    /// The statements that one reading of the count, and one check of the heartbeats, add.
    reading: u64,
    look: u64,
    _server: Option<Server>,
    _file: Option<crate::support::TestDatabase>,
}

enum Gauge {
    /// The lines of PostgreSQL's log.
    Log,
    /// The status variable of MySQL and MariaDB.
    Questions,
    /// The driver's own log.
    Driver,
    /// The change counter in the header of an SQLite file.
    Header(String),
}

impl Meter {
    async fn new() -> Self {
        let Some(kind) = DATABASE.server() else {
            tracing::subscriber::set_global_default(DriverLog).expect("this process has no other");
            // A database in memory has one connection, which all clients borrow.
            let ours = connect("sqlite::memory:", 1).await;
            builder(ours.clone()).build().migrate().await.expect("migrate");
            return Self::calibrated(ours.clone(), ours, Gauge::Driver, None, None).await;
        };
        let settings = match DATABASE {
            Database::Postgres => ["logging_collector=on", "log_statement=all", "log_line_prefix=<%a> "].to_vec(),
            _ => Vec::new(),
        };
        let settings = settings.into_iter().map(String::from).collect();
        let server = Server::start_with(kind, Options { settings, ..Options::default() });
        let db = fresh_on(&server.url()).await;
        let (mark, gauge) = match DATABASE {
            Database::Postgres => ("&application_name=counted", Gauge::Log),
            _ => ("", Gauge::Questions),
        };
        let ours = connect(&format!("{}{mark}", db.url), 1).await;
        Self::calibrated(ours, db.pool_of(1).await, gauge, Some(server), None).await
    }

    async fn on_a_file() -> Self {
        let db = fresh().await;
        let path = db.url.trim_start_matches("sqlite://").split('?').next().expect("a path").to_owned();
        let (ours, monitor) = (db.pool_of(1).await, db.pool_of(1).await);
        Self::calibrated(ours, monitor, Gauge::Header(path), None, Some(db)).await
    }

    async fn calibrated(
        ours: Pool<Sql>,
        monitor: Pool<Sql>,
        gauge: Gauge,
        server: Option<Server>,
        file: Option<crate::support::TestDatabase>,
    ) -> Self {
        let mut meter = Self { ours, monitor, gauge, reading: 0, look: 0, _server: server, _file: file };
        meter.count().await;
        let (first, second) = (meter.count().await, meter.count().await);
        meter.reading = second - first;
        meter.latest_beat("").await;
        (_, meter.look) = meter.cost(meter.latest_beat("")).await;
        meter
    }

    async fn locks(&self) -> Locks {
        builder(self.ours.clone()).build()
    }

    /// Runs a future, and returns the statements that the clients sent during it.
    async fn cost<T>(&self, work: impl Future<Output = T>) -> (T, u64) {
        let before = self.count().await;
        let done = soon("what is measured", work).await;
        (done, self.count().await - before - self.reading)
    }

    async fn count(&self) -> u64 {
        match &self.gauge {
            Gauge::Log => self.count_log().await,
            Gauge::Questions => {
                let row = self.monitor.fetch_one("SHOW GLOBAL STATUS LIKE 'Questions'").await.expect("status");
                row.get::<String, _>(1).parse().expect("a number")
            }
            Gauge::Driver => DRIVEN.load(Ordering::SeqCst),
            // https://www.sqlite.org/fileformat2.html#file_change_counter
            Gauge::Header(path) => {
                let header = std::fs::read(path).expect("the file can be read");
                u64::from(u32::from_be_bytes(header[24..28].try_into().expect("four bytes")))
            }
        }
    }

    /// The log is written by a process of its own, in order: what precedes our mark is complete
    /// when the mark is there.
    async fn count_log(&self) -> u64 {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let mark = format!("mark {}.", SERIAL.fetch_add(1, Ordering::SeqCst));
        let marked = format!("SELECT '{mark}'");
        self.monitor.execute(AssertSqlSafe(marked)).await.expect("a statement to look for");
        let written = async {
            loop {
                let log: String = sqlx::query_scalar("SELECT pg_read_file(pg_current_logfile())")
                    .fetch_one(&self.monitor)
                    .await
                    .expect("the log can be read");
                if let Some((before, _)) = log.split_once(&mark) {
                    let ours = ["<counted> LOG:  execute ", "<counted> LOG:  statement: "];
                    return before.lines().filter(|line| ours.iter().any(|of_ours| line.starts_with(of_ours))).count();
                }
                sleep(Duration::from_millis(10)).await;
            }
        };
        soon("the log", written).await as u64
    }

    /// Waits until a name has this number of waiters.
    async fn until_in_line(&self, name: &str, many: i64) {
        let standing = async {
            let sql = format!("SELECT count(*) FROM sqlock_entry WHERE name = '{name}' AND token = 0");
            let count = || sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql.clone())).fetch_one(&self.monitor);
            while count().await.expect("entries can be read") < many {
                sleep(Duration::from_millis(1)).await;
            }
        };
        soon("an entry", standing).await;
    }

    /// Waits for that many heartbeats of the client that beat last. Returns how often it looked.
    async fn beats(&self, many: u64) -> u64 {
        let (mut client, mut latest) = self.latest_beat("").await;
        let (mut seen, mut looks) = (0, 1);
        while client.is_empty() {
            sleep(Duration::from_millis(20)).await;
            (client, latest) = self.latest_beat("").await;
            looks += 1;
        }
        while seen < many {
            sleep(Duration::from_millis(20)).await;
            let (_, beat) = self.latest_beat(&format!("WHERE id = '{client}'")).await;
            looks += 1;
            if beat > latest {
                (latest, seen) = (beat, seen + 1);
            }
        }
        looks
    }

    async fn latest_beat(&self, of: &str) -> (String, i64) {
        let sql = format!("SELECT id, beat_at FROM sqlock_client {of} ORDER BY beat_at DESC LIMIT 1");
        let beat =
            sqlx::query_as(AssertSqlSafe(sql)).fetch_optional(&self.monitor).await.expect("heartbeats can be read");
        beat.unwrap_or_default()
    }
}

/// Statements that the driver has logged in this process.
static DRIVEN: AtomicU64 = AtomicU64::new(0);

/// Counts the events that sqlx reports its statements with.
struct DriverLog;

impl tracing::Subscriber for DriverLog {
    fn enabled(&self, about: &tracing::Metadata<'_>) -> bool {
        about.target() == "sqlx::query"
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        DRIVEN.fetch_add(1, Ordering::SeqCst);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

const ALONE: &str = "SQLOCK_TEST_ALONE";

fn is_alone() -> bool {
    std::env::var_os(ALONE).is_some()
}

/// Runs one test of this program in a process of its own, because the count covers the whole
/// process.
fn alone(test: &str) {
    let program = std::env::current_exe().expect("this program has a path");
    let output = std::process::Command::new(program)
        .args(["--exact", test, "--nocapture"])
        .env(ALONE, "1")
        .output()
        .expect("it can be started again");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
}
