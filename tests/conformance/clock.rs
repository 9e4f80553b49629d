//! Clocks that are wrong or jump. libfaketime sets them; it comes with the servers of scripts/test,
//! and a build for SQLite alone runs without it.
//!
//! Promises: 1, 3, 4.

use std::time::{Duration, Instant, SystemTime};

use sqlock::Locks;

use super::crash::held;
use crate::DATABASE;
use crate::support::server::{Options, Server};
use crate::support::worker::{Clock, Guarded, Worker};
use crate::support::{Database, LONG, SLACK, TestDatabase, fresh, fresh_on, renewed, until};

const HOUR: i64 = 3600;

/// Only the server's clock counts; the clock of a client does not matter. SQLite uses the clock of
/// each calling process: with differing clocks, only rising tokens and fences remain of the
/// promises.
#[tokio::test]
async fn client_clock_ahead_by_hour_changes_nothing() {
    client_whose_clock_is_wrong(HOUR).await;
}

#[tokio::test]
async fn client_clock_behind_by_hour_changes_nothing() {
    client_whose_clock_is_wrong(-HOUR).await;
}

async fn client_whose_clock_is_wrong(ahead: i64) {
    let db = fresh().await;
    let locks = db.locks().await;
    let clock = Clock::ahead(ahead);
    let mut wrong = Worker::start_under(&clock, &db.url);
    let its_clock: i64 = wrong.ask("clock").await.parse().expect("a time");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("the clock is past 1970");
    let off = its_clock / 1000 - i64::try_from(now.as_secs()).expect("seconds");
    assert!((off - ahead).abs() < HOUR / 2, "its clock is ahead by {off} s");
    match DATABASE {
        Database::Sqlite if ahead > 0 => sqlite_client_ahead(&db, &locks, &mut wrong).await,
        Database::Sqlite => sqlite_client_behind(&db, &locks, &mut wrong).await,
        _ => client_of_a_server(&locks, &mut wrong).await,
    }
}

async fn client_of_a_server(locks: &Locks, wrong: &mut Worker) {
    const TTL: Duration = Duration::from_secs(5);
    // Its holding begins between two holdings of this process, by the server's clock and in the
    // order of tokens.
    let (_earlier, its_token, _later) = (
        locks.lease("earlier").acquire().await.expect("acquire"),
        wrong.hold("a", TTL).await,
        locks.lease("later").acquire().await.expect("acquire"),
    );
    let (earlier, its, later) = (held(locks, "earlier").await, held(locks, "a").await, held(locks, "later").await);
    assert_eq!(its.token.get(), its_token);
    assert!(earlier.acquired_at <= its.acquired_at && its.acquired_at <= later.acquired_at);
    assert!(earlier.token < its.token && its.token < later.token);
    assert!(its.remaining <= TTL);

    // The worker renews by the right amount.
    let renewed = renewed(locks, &its).await;
    assert_eq!(renewed.token, its.token);
    assert!(renewed.remaining <= TTL);
    assert!(locks.lease("a").try_acquire().await.expect("try").is_none());
    assert!(wrong.status().await.0);
    assert_eq!(wrong.ask("release").await, "released");

    // The worker waits for others for the right time.
    let asked = Instant::now();
    let lease = locks.lease("a").ttl(TTL).renew(false).acquire().await.expect("acquire");
    // The TTL counts from the request for the client, and from the grant for the server.
    let delay = asked.elapsed();
    assert!(lease.token() > its.token);
    let ours = held(locks, "a").await;
    assert_eq!(wrong.try_hold("a", LONG).await, None);
    let next = wrong.hold("a", LONG).await;
    assert!(next > lease.token().get());
    let taken = held(locks, "a").await;
    assert!(taken.acquired_at + delay >= ours.expires_at);
    assert!(taken.acquired_at <= ours.expires_at + SLACK);
    assert!(taken.remaining <= LONG);
    // Another client may have granted it, for a short time at first.
    until("its whole TTL", async || held(locks, "a").await.remaining > LONG - SLACK).await;
}

async fn sqlite_client_ahead(db: &TestDatabase, locks: &Locks, wrong: &mut Worker) {
    let guarded = Guarded::create(db, &["a"]).await;
    let mut right = Worker::start(&db.url);
    // To a clock that is an hour ahead, the lease has expired long ago.
    let first = right.hold("a", Duration::from_secs(6)).await;
    let second = wrong.try_hold("a", LONG).await.expect("expired by its clock");
    assert!(second > first);
    let info = held(locks, "a").await;
    assert!(info.remaining > Duration::from_secs(3000), "by our clock: {:?}", info.remaining);
    // The holder's transaction is refused, and the holder learns of the loss at its next renewal or
    // its deadline.
    let fenced = right.ask("fenced").await;
    assert!(fenced.starts_with("lost"), "{fenced}");
    let cause = right.ask("lost").await;
    assert!(cause == "expired" || cause == "superseded", "{cause}");
    assert_eq!(wrong.ask("fenced").await, "committed");
    assert_eq!(right.try_hold("a", LONG).await, None);
    assert_eq!(wrong.ask("release").await, "released");
    // A release counts by any clock, and the next token is higher although its clock is behind.
    let third = right.try_hold("a", LONG).await.expect("free");
    assert!(third > second);
    assert_eq!(right.ask("fenced").await, "committed");
    assert_eq!(guarded.value("a").await, 2);
}

async fn sqlite_client_behind(db: &TestDatabase, locks: &Locks, wrong: &mut Worker) {
    let guarded = Guarded::create(db, &["a"]).await;
    let mut right = Worker::start(&db.url);
    let first = right.hold("a", LONG).await;
    let (token, remaining) = wrong.inspect("a").await.expect("held");
    assert_eq!(token, first);
    assert!(remaining > Duration::from_secs(3000), "by its clock: {remaining:?}");
    assert_eq!(wrong.try_hold("a", LONG).await, None);
    assert_eq!(right.ask("release").await, "released");
    // For all other clients, its holding ends as soon as it begins.
    let second = wrong.try_hold("a", LONG).await.expect("free");
    assert!(second > first);
    assert!(locks.inspect("a").await.expect("inspect").is_none());
    let third = right.try_hold("a", LONG).await.expect("expired by our clock");
    assert!(third > second);
    let fenced = wrong.ask("fenced").await;
    assert!(fenced.starts_with("lost"), "{fenced}");
    assert_eq!(right.ask("fenced").await, "committed");
    assert_eq!(guarded.value("a").await, 1);
    let released = wrong.ask("release").await;
    assert!(released.starts_with("lost"), "{released}");
    assert!(right.status().await.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_rise_and_fences_hold_across_clock_jumps() {
    const TTL: Duration = Duration::from_secs(6);
    let host = Host::start();
    let db = host.database().await;
    let guarded = Guarded::create(&db, &["a"]).await;
    let (mut first, mut second) = (host.worker(&db), host.worker(&db));
    let mut tokens = vec![first.hold("a", TTL).await];
    assert_eq!(first.ask("fenced").await, "committed");

    // An hour forward: the lease has expired. (Unless it is renewed at this moment, before another
    // client asks.)
    let mut ahead = 0;
    let token = loop {
        ahead += HOUR;
        assert!(ahead < 10 * HOUR, "nobody can take over");
        host.jump(ahead);
        if let Some(token) = second.try_hold("a", TTL).await {
            break token;
        }
    };
    tokens.push(token);
    // The first holder does not know of the loss yet, and its fence fails. It notices soon.
    let fenced = first.ask("fenced").await;
    assert!(fenced.starts_with("lost"), "{fenced}");
    assert_eq!(second.ask("fenced").await, "committed");
    let cause = first.ask("lost").await;
    assert!(cause == "superseded" || cause == "expired", "{cause}");
    let released = first.ask("release").await;
    assert!(released.starts_with("lost"), "{released}");

    // An hour back: the lease is held.
    host.jump(ahead - HOUR);
    assert_eq!(second.inspect("a").await.expect("held").0, token);
    assert!(second.status().await.0);
    assert_eq!(second.ask("fenced").await, "committed");
    assert_eq!(first.try_hold("a", TTL).await, None);
    assert_eq!(second.ask("release").await, "released");
    tokens.push(first.try_hold("a", TTL).await.expect("free"));
    assert_eq!(first.ask("fenced").await, "committed");

    // Earlier than the clock has ever been.
    host.jump(-HOUR);
    assert_eq!(first.ask("release").await, "released");
    tokens.push(second.try_hold("a", TTL).await.expect("free"));
    assert_eq!(second.ask("fenced").await, "committed");
    assert_eq!(second.ask("release").await, "released");

    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    assert_eq!(guarded.value("a").await, 5);
    let written: Vec<i64> = guarded.audit().await.iter().map(|row| row.token.cast_signed()).collect();
    assert_eq!(written, [tokens[0], tokens[1], tokens[1], tokens[2], tokens[3]]);
}

/// The host of the clock that measures leases and can be set.
enum Host {
    Server(Server),
    Workers(Clock),
}

impl Host {
    fn start() -> Self {
        match DATABASE.server() {
            Some(kind) => Self::Server(Server::start_with(kind, Options { faketime: true, ..Options::default() })),
            None => Self::Workers(Clock::ahead(0)),
        }
    }

    async fn database(&self) -> TestDatabase {
        match self {
            Self::Server(server) => fresh_on(&server.url()).await,
            Self::Workers(_) => fresh().await,
        }
    }

    fn worker(&self, db: &TestDatabase) -> Worker {
        match self {
            Self::Server(_) => Worker::start(&db.url),
            Self::Workers(clock) => Worker::start_under(clock, &db.url),
        }
    }

    fn jump(&self, seconds: i64) {
        match self {
            Self::Server(server) => server.jump_clock(seconds),
            Self::Workers(clock) => clock.jump(seconds),
        }
    }
}
