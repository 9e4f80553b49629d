//! L. One name that several clients want, next to the least queue of each database, and next to
//! ZooKeeper, with as many users.
//!
//! On PostgreSQL the queue is a list in the row: a release hands over to its first user and
//! notifies that user. On MySQL and MariaDB it is the server's own lock, under which the row is
//! written. SQLite has none: each user tries every millisecond. There is no expiry, no renewal and no
//! recovery.
//!
//! The queue has a database of its own: PostgreSQL wakes all listeners of a database for each
//! notification, also those that do not take part.

use std::time::Duration;

use sqlock::Locks;
use sqlx::mysql::MySqlConnection;
use sqlx::postgres::PgConnection;
use sqlx::{Executor as _, Row as _};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::cpu::{Meter, Started, Usage};
use crate::floor::{Bare, Held, NotificationListener};
use crate::measure::{Aim, Line, Pace, median};
use crate::place::{Kind, Options, Place};
use crate::worker::{Contender, Worker, turns_of_each};
use crate::zookeeper::{WARM_UP, ZooKeeper, ZooKeeperLock};

/// How often a user tries without a queue.
const TRY: Duration = Duration::from_millis(1);

/// A user of a queue, with connections of its own.
pub(crate) enum User {
    Postgres { conn: PgConnection, listener: Box<NotificationListener>, id: String },
    MySql(MySqlConnection),
    Sqlite { bare: Bare, id: String, held: Option<Held> },
    ZooKeeper(Box<ZooKeeperLock>),
}

const CREATE: &str = "CREATE TABLE IF NOT EXISTS bench_queue
    (name VARCHAR(64) PRIMARY KEY, owner VARCHAR(32) NOT NULL, token BIGINT NOT NULL, waiters text)";

// $1 id. Returns whether the name was free.
const TAKE: &str = "
UPDATE bench_queue SET owner = CASE WHEN owner = '' THEN $1 ELSE owner END, token = token + 1,
       waiters = CASE WHEN owner = '' THEN waiters ELSE waiters || $1 || ',' END
 WHERE name = 'hot' RETURNING owner = $1";
// The first waiter becomes the owner.
const PASS_ON: &str = "
WITH passed AS (UPDATE bench_queue SET owner = split_part(waiters, ',', 1), token = token + 1,
                       waiters = substr(waiters, length(split_part(waiters, ',', 1)) + 2)
                 WHERE name = 'hot' RETURNING owner, token)
SELECT CASE WHEN owner <> '' THEN pg_notify('queue_' || owner, token::text) END FROM passed";

impl User {
    pub(crate) async fn connect(options: &Options, id: &str) -> Self {
        match options.connect().await {
            Bare::Postgres(mut conn) => {
                conn.execute(CREATE).await.expect("CREATE TABLE");
                let insert = "INSERT INTO bench_queue VALUES ('hot', '', 0, '') ON CONFLICT DO NOTHING";
                conn.execute(insert).await.expect("INSERT");
                let listener = options.listener(&format!("queue_{id}")).await.expect("PostgreSQL has notifications");
                Self::Postgres { conn, listener: Box::new(listener), id: id.into() }
            }
            Bare::MySql(mut conn) => {
                conn.execute(CREATE).await.expect("CREATE TABLE");
                conn.execute("INSERT IGNORE INTO bench_queue VALUES ('hot', '', 0, '')").await.expect("INSERT");
                Self::MySql(conn)
            }
            bare @ Bare::Sqlite(_) => Self::Sqlite { bare, id: id.into(), held: None },
        }
    }

    pub(crate) async fn of_zookeeper(port: u16) -> Self {
        Self::ZooKeeper(Box::new(ZooKeeperLock::connect(port, "hot").await))
    }

    /// Creates the tables, so that several users can connect at the same time.
    async fn prepare(options: &Options) {
        Self::connect(options, "first").await;
    }

    /// Returns the token of the holder, if the rival has one.
    pub(crate) async fn acquire(&mut self) -> Option<i64> {
        match self {
            Self::Postgres { conn, listener, id } => {
                let taken = sqlx::query(TAKE).bind(&*id).fetch_one(conn).await.expect("an update");
                if !taken.get::<bool, _>(0) {
                    listener.receive().await;
                }
            }
            Self::MySql(conn) => {
                let locked = sqlx::query_scalar("SELECT CAST(GET_LOCK('hot', 60) AS SIGNED)");
                assert_eq!(locked.fetch_one(&mut *conn).await.ok(), Some(1_i64), "GET_LOCK");
                write(conn, "UPDATE bench_queue SET owner = 'me', token = token + 1 WHERE name = 'hot'").await;
            }
            Self::Sqlite { bare, id, held } => loop {
                *held = bare.try_acquire("queue", id).await;
                if held.is_some() {
                    break;
                }
                sleep(TRY).await;
            },
            Self::ZooKeeper(lock) => return Some(lock.acquire().await),
        }
        None
    }

    pub(crate) async fn release(&mut self) {
        match self {
            Self::Postgres { conn, .. } => {
                sqlx::query(PASS_ON).fetch_one(conn).await.expect("an update");
            }
            Self::MySql(conn) => {
                write(conn, "UPDATE bench_queue SET owner = '' WHERE name = 'hot'").await;
                let released = sqlx::query_scalar("SELECT CAST(RELEASE_LOCK('hot') AS SIGNED)");
                assert_eq!(released.fetch_one(conn).await.ok(), Some(1_i64), "RELEASE_LOCK");
            }
            Self::Sqlite { bare, held, .. } => {
                bare.release(&held.take().expect("it is held")).await;
                // It would take the name again before another user tries.
                sleep(TRY).await;
            }
            Self::ZooKeeper(lock) => lock.release().await,
        }
    }
}

async fn write(conn: &mut MySqlConnection, sql: &'static str) {
    assert_eq!(sqlx::query(sql).execute(conn).await.expect("an update").rows_affected(), 1);
}

/// What has users beside our clients.
enum Rival<'a> {
    /// The queue in this database.
    Queue(&'a Place),
    ZooKeeper(u16),
}

impl Rival<'_> {
    fn name(&self) -> &'static str {
        match self {
            Self::Queue(_) => "a queue",
            Self::ZooKeeper(_) => "ZooKeeper",
        }
    }

    fn aim(&self, kind: Kind) -> Option<Aim> {
        Some(Aim::AtLeast(match (self, kind) {
            (Self::Queue(_), Kind::Postgres) => 1.0,
            (Self::Queue(_), Kind::MySql) => 0.5,
            (Self::Queue(_), Kind::SqliteFull | Kind::SqliteNormal) => 5.0,
            (Self::ZooKeeper(_), Kind::Postgres) => 1.25,
            (Self::ZooKeeper(_), _) => return None,
        }))
    }

    async fn user(&self, id: usize) -> User {
        match self {
            Self::Queue(beside) => User::connect(beside.options(), &id.to_string()).await,
            Self::ZooKeeper(port) => User::of_zookeeper(*port).await,
        }
    }

    /// Starts a process with one user.
    async fn worker(&self, place: &Place) -> Worker {
        match self {
            Self::Queue(beside) => Worker::start(beside, 1, Duration::ZERO, Contender::Queue).await,
            Self::ZooKeeper(port) => Worker::start(place, 1, Duration::ZERO, Contender::ZooKeeper(*port)).await,
        }
    }
}

pub(crate) async fn measure(place: &Place, pace: &Pace) -> Vec<Line> {
    let beside = place.beside().await;
    User::prepare(beside.options()).await;
    let mut lines = next_to(&Rival::Queue(&beside), place, pace).await;
    beside.clean_up().await;
    if let Some(server) = ZooKeeper::start().await {
        let rival = Rival::ZooKeeper(server.port());
        warm_up(&rival).await;
        lines.extend(next_to(&rival, place, pace).await);
        server.end().await;
    }
    lines
}

/// Lets the rival compile what it needs.
async fn warm_up(rival: &Rival<'_>) {
    let mut users = Vec::new();
    for i in 0..8 {
        users.push(Party::User(rival.user(i).await));
    }
    take_turns(users.into_iter(), WARM_UP).await;
}

async fn next_to(rival: &Rival<'_>, place: &Place, pace: &Pace) -> Vec<Line> {
    let mut lines = vec![of_clients(place, rival, pace, 8).await];
    for count in [8, 16] {
        lines.push(of_processes(place, rival, pace, count).await);
    }
    lines
}

/// Clients of this process, next to users of the rival.
async fn of_clients(place: &Place, rival: &Rival<'_>, pace: &Pace, count: usize) -> Line {
    let clients: Vec<Locks> = (0..count).map(|_| place.locks()).collect();
    let mut users = Vec::new();
    for i in 0..count {
        users.push(rival.user(i).await);
    }
    let meter = place.meter().await;
    let mut comparison = Comparison::default();
    for round in 0..=pace.rounds {
        let start = meter.start();
        let (turns, rate) = take_turns(clients.iter().cloned().map(Party::Client), pace.turn).await.0;
        comparison.ours(&meter, &start, round, &turns, rate);
        let start = meter.start();
        let ((_, rate), parties) = take_turns(users.drain(..).map(Party::User), pace.turn).await;
        comparison.floor(&meter, &start, round, rate);
        users.extend(parties.into_iter().filter_map(|party| match party {
            Party::User(user) => Some(user),
            Party::Client(_) => None,
        }));
    }
    for locks in clients {
        locks.shutdown().await.expect("shutdown");
    }
    comparison.line(place, rival, format!("{count} clients"))
}

enum Party {
    Client(Locks),
    User(User),
}

/// Returns the turns of each party, their number in a second, and the parties.
async fn take_turns(parties: impl Iterator<Item = Party>, time: Duration) -> ((Vec<u64>, f64), Vec<Party>) {
    let start = Instant::now();
    let mut running = JoinSet::new();
    for mut party in parties {
        running.spawn(async move {
            let mut turns = 0;
            while start.elapsed() < time {
                match &mut party {
                    Party::Client(locks) => {
                        let lease = locks.lease("hot").acquire().await.expect("acquire");
                        lease.release().await.expect("release");
                    }
                    Party::User(user) => {
                        user.acquire().await;
                        user.release().await;
                    }
                }
                turns += 1;
            }
            (turns, party)
        });
    }
    let (turns, parties): (Vec<u64>, Vec<Party>) = running.join_all().await.into_iter().unzip();
    let rate = turns.iter().sum::<u64>() as f64 / start.elapsed().as_secs_f64();
    ((turns, rate), parties)
}

/// Processes with one client each, next to processes with one user of the rival each.
async fn of_processes(place: &Place, rival: &Rival<'_>, pace: &Pace, count: usize) -> Line {
    let (mut workers, mut users) = (Vec::new(), Vec::new());
    for _ in 0..count {
        workers.push(Worker::start(place, 1, Duration::ZERO, Contender::Sqlock).await);
        users.push(rival.worker(place).await);
    }
    let meter = place.meter().await;
    let mut comparison = Comparison::default();
    for round in 0..=pace.rounds {
        let start = meter.start();
        let (turns, rate) = turns_of_workers(&mut workers, pace.turn).await;
        comparison.ours(&meter, &start, round, &turns, rate);
        let start = meter.start();
        let (_, rate) = turns_of_workers(&mut users, pace.turn).await;
        comparison.floor(&meter, &start, round, rate);
    }
    for worker in workers.into_iter().chain(users) {
        worker.end().await;
    }
    comparison.line(place, rival, format!("{count} processes"))
}

/// Returns the turns of each worker, and their number in a second.
async fn turns_of_workers(workers: &mut [Worker], time: Duration) -> (Vec<u64>, f64) {
    let start = Instant::now();
    let turns = turns_of_each(Worker::take_turns(workers, time).await);
    let rate = turns.iter().sum::<u64>() as f64 / start.elapsed().as_secs_f64();
    (turns, rate)
}

/// The rounds of both sides. The first round warms up.
#[derive(Default)]
struct Comparison {
    ours: Vec<f64>,
    floor: Vec<f64>,
    fairness: Vec<f64>,
    cpu: Usage,
    floor_cpu: Usage,
}

impl Comparison {
    fn ours(&mut self, meter: &Meter, start: &Started, round: usize, turns: &[u64], rate: f64) {
        if round > 0 {
            self.cpu.add(meter, start, rate);
            self.ours.push(rate);
            let (fewest, most) = (turns.iter().min().copied(), turns.iter().max().copied());
            self.fairness.push(fewest.unwrap_or_default() as f64 / most.unwrap_or_default().max(1) as f64);
        }
    }

    fn floor(&mut self, meter: &Meter, start: &Started, round: usize, rate: f64) {
        if round > 0 {
            self.floor_cpu.add(meter, start, rate);
            self.floor.push(rate);
        }
    }

    fn line(self, place: &Place, rival: &Rival<'_>, who: String) -> Line {
        // The meter does not see the processor time of another server.
        let cpu = matches!(rival, Rival::Queue(_)).then_some((self.cpu, self.floor_cpu));
        Line {
            database: place.title.clone(),
            metric: 'L',
            what: format!("{who}, next to {}", rival.name()),
            unit: "hand-overs/s",
            ours: median(&self.ours),
            floor: Some(median(&self.floor)),
            ratios: self.ours.iter().zip(&self.floor).map(|(ours, floor)| ours / floor).collect(),
            aim: rival.aim(place.kind()),
            cpu,
            note: format!("fairness {:.2}", median(&self.fairness)),
            ..Line::default()
        }
    }
}
