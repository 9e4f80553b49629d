//! A lease on a majority of three independent servers: PostgreSQL, MySQL and MariaDB, each behind a
//! proxy that can refuse connections and drop requests or replies.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic)]

#[path = "support/blocked.rs"]
mod blocked;
#[allow(dead_code, reason = "the rest is for other tests")]
#[path = "support/proxy.rs"]
mod proxy;
#[allow(dead_code, reason = "the rest is for other tests")]
#[path = "support/server.rs"]
mod server;
#[allow(dead_code, reason = "the rest is for other tests")]
#[path = "support/wait.rs"]
mod wait;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use blocked::block_past;
use proxy::{Direction, Proxy};
use server::{Kind, Options, Server};
use sqlock::quorum::{Quorum, QuorumLease, QuorumRequest};
use sqlock::{Error, Locks, LossCause};
use sqlx::{AssertSqlSafe, MySqlPool, PgPool, SqlitePool};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::{sleep, timeout};
use wait::{LONG, SOON, soon, until};

/// How long one database may take: no test fails because the machine is busy.
const PATIENT: Duration = Duration::from_secs(15);

// ---- servers

/// A database on one of the servers, and the proxy before it.
struct Node {
    kind: Kind,
    url: String,
    port: u16,
    proxy: Proxy,
}

/// One on each server.
struct Trio {
    nodes: Vec<Node>,
}

impl Trio {
    /// On the servers that all tests share.
    async fn shared() -> Self {
        let from_env = |variable: &str| {
            std::env::var(variable).unwrap_or_else(|_| {
                panic!(
                    "{variable} is not set: run scripts/test, which starts throwaway servers, or point it at one of yours"
                )
            })
        };
        Self::on([
            (Kind::Postgres, from_env("SQLOCK_TEST_POSTGRES_URL")),
            (Kind::MySql, from_env("SQLOCK_TEST_MYSQL_URL")),
            (Kind::MariaDb, from_env("SQLOCK_TEST_MARIADB_URL")),
        ])
        .await
    }

    async fn on(servers: [(Kind, String); 3]) -> Self {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        static START: LazyLock<u128> =
            LazyLock::new(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis()));
        let name = format!("q{}_{}_{}", *START, std::process::id(), SERIAL.fetch_add(1, Ordering::Relaxed));
        let mut nodes = Vec::new();
        for (kind, server) in servers {
            let url = match kind {
                Kind::Postgres => {
                    execute(kind, &server, &format!("CREATE SCHEMA {name}")).await;
                    let mark = if server.contains('?') { '&' } else { '?' };
                    format!("{server}{mark}options=-csearch_path%3D{name}")
                }
                Kind::MySql | Kind::MariaDb => {
                    execute(kind, &server, &format!("CREATE DATABASE {name}")).await;
                    let (server, query) = server.split_once('?').unwrap_or((&server, ""));
                    let base = server.rsplit_once('/').map_or(server, |(base, _)| base);
                    format!("{base}/{name}?{query}")
                }
            };
            client(kind, &url).migrate().await.expect("migrate");
            execute(kind, &url, make_old(kind)).await;
            let authority =
                server.split("://").nth(1).and_then(|rest| rest.split(['/', '?']).next()).unwrap_or_default();
            let port = authority.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).expect("a URL with a port");
            nodes.push(Node { kind, url, port, proxy: Proxy::start(port) });
        }
        Self { nodes }
    }

    /// As another process would have it: with clients of its own.
    fn quorum(&self) -> Quorum {
        Quorum::new(self.nodes.iter().map(Node::locks))
    }

    /// Returns the tokens of the holders of a name, on each database.
    async fn tokens(&self, name: &str) -> Vec<Option<i64>> {
        let mut tokens = Vec::new();
        for node in &self.nodes {
            let held = node.direct().inspect(name).await.expect("the server answers");
            tokens.push(held.map(|held| held.token.get()));
        }
        tokens
    }

    /// Evicts the holder of a name from two of the three.
    async fn evict_from_two(&self, name: &str) {
        for node in &self.nodes[1..] {
            let held = node.direct().inspect(name).await.expect("the server answers").expect("it is held there");
            assert!(node.direct().evict(name, held.token).await.expect("the server answers"));
        }
    }

    async fn becomes_free(&self, name: &str) {
        until("everything is given back", async || self.tokens(name).await == [None; 3]).await;
    }
}

impl Node {
    /// A client through the proxy.
    fn locks(&self) -> Locks {
        self.locks_through(&self.proxy)
    }

    fn locks_through(&self, proxy: &Proxy) -> Locks {
        client(self.kind, &self.url.replacen(&format!(":{}", self.port), &format!(":{}", proxy.port()), 1))
    }

    /// A client that no fault of the proxy concerns.
    fn direct(&self) -> Locks {
        client(self.kind, &self.url)
    }

    async fn execute(&self, sql: &str) {
        execute(self.kind, &self.url, sql).await;
    }
}

/// Makes the tables older than every TTL.
fn make_old(kind: Kind) -> &'static str {
    match kind {
        Kind::Postgres => "UPDATE _sqlock_migrations SET installed_on = installed_on - interval '1 year'",
        Kind::MySql | Kind::MariaDb => "UPDATE _sqlock_migrations SET installed_on = installed_on - INTERVAL 1 YEAR",
    }
}

fn client(kind: Kind, url: &str) -> Locks {
    let builder = match kind {
        Kind::Postgres => Locks::builder(PgPool::connect_lazy(url).expect("a URL")),
        Kind::MySql | Kind::MariaDb => Locks::builder(MySqlPool::connect_lazy(url).expect("a URL")),
    };
    builder.ttl_range(Duration::from_millis(100)..=Duration::from_secs(86_400)).build()
}

async fn execute(kind: Kind, url: &str, sql: &str) {
    let sql = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()));
    match kind {
        Kind::Postgres => {
            let pool = PgPool::connect(url).await.expect("the server answers");
            sql.execute(&pool).await.expect("the statement is carried out");
            pool.close().await;
        }
        Kind::MySql | Kind::MariaDb => {
            let pool = MySqlPool::connect(url).await.expect("the server answers");
            sql.execute(&pool).await.expect("the statement is carried out");
            pool.close().await;
        }
    }
}

fn patient(quorum: &Quorum, name: &str) -> QuorumRequest {
    quorum.lease(name).ttl(LONG).node_timeout(PATIENT).wait(SOON)
}

// ---- promises

#[tokio::test]
async fn majority_excludes_others_until_full_release() {
    let trio = Trio::shared().await;
    let (ours, others) = (trio.quorum(), trio.quorum());
    let lease = patient(&ours, "a").label("first").acquire().await.expect("all are up");
    assert!(lease.is_held() && lease.votes() >= 2 && lease.remaining() > LONG / 2);
    assert!(others.lease("a").node_timeout(PATIENT).try_acquire().await.expect("all are up").is_none());

    until("the third has voted too", async || lease.votes() == 3).await;
    let token = lease.token().get();
    let tokens = trio.tokens("a").await;
    assert!(tokens.iter().all(|there| there.is_some_and(|there| there >= token)), "{tokens:?}, told {token}");
    assert!(
        tokens.iter().filter(|there| **there == Some(token)).count() >= 2 || tokens.iter().any(|t| *t > Some(token))
    );
    lease.release().await.expect("it was ours to the end");
    trio.becomes_free("a").await;

    let next = patient(&others, "a").acquire().await.expect("it is free");
    assert!(next.token().get() > token);
    next.release().await.expect("it was ours to the end");
}

#[tokio::test]
async fn one_database_may_be_down_but_not_two() {
    let trio = Trio::shared().await;
    for down in 0..3 {
        trio.nodes[down].proxy.refuse();
        let quorum = trio.quorum();
        let lease = patient(&quorum, "a").acquire().await.expect("two are enough");
        assert_eq!(lease.votes(), 2);
        lease.release().await.expect("two can confirm it");
        trio.nodes[down].proxy.pass();
        trio.becomes_free("a").await;
    }
    trio.nodes[0].proxy.refuse();
    trio.nodes[1].proxy.refuse();
    let quorum = trio.quorum();
    let refused = [
        patient(&quorum, "a").acquire().await.expect_err("one is no majority"),
        patient(&quorum, "a").wait(Duration::from_secs(5)).acquire().await.expect_err("one is no majority"),
        patient(&quorum, "a").try_acquire().await.expect_err("one is no majority"),
    ];
    for error in refused {
        assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains("1 of 3")), "{error}");
    }
    trio.becomes_free("a").await;
}

#[tokio::test]
async fn returning_database_votes_again() {
    let trio = Trio::shared().await;
    let away = &trio.nodes[1];
    away.proxy.refuse();
    let lease = patient(&trio.quorum(), "a").acquire().await.expect("two are enough");
    assert_eq!((lease.votes(), trio.tokens("a").await[1]), (2, None));
    away.proxy.pass();
    until("it votes", async || lease.votes() == 3).await;
    let there = trio.tokens("a").await[1].expect("it is held there");
    assert!(there >= lease.token().get());

    // One that has evicted it likewise, long before a third of the TTL.
    let token = away.direct().inspect("a").await.expect("the server answers").expect("it is held there").token;
    assert!(away.direct().evict("a", token).await.expect("the server answers"));
    until("it has noticed, and votes again", async || {
        let now = trio.tokens("a").await[1];
        now.is_some_and(|now| now > there) && lease.votes() == 3
    })
    .await;
    assert!(lease.is_held());
    lease.release().await.expect("it was ours to the end");
    trio.becomes_free("a").await;
}

#[tokio::test]
async fn holder_knows_majority_loss_before_next_grant() {
    let trio = Trio::shared().await;
    let lease = patient(&trio.quorum(), "a").ttl(Duration::from_secs(5)).acquire().await.expect("all are up");
    for node in &trio.nodes[..2] {
        node.proxy.blackhole(Direction::Both);
    }
    let rival = Quorum::new(trio.nodes.iter().map(Node::direct));
    let theirs = patient(&rival, "a").acquire().await.expect("the lease runs out");
    assert!(!lease.is_held(), "two have it");
    assert!(theirs.is_held());
    assert!(theirs.token() > lease.token());
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Expired);
    assert_eq!((lease.remaining(), lease.votes()), (Duration::ZERO, 0));
    // Neither does it come back, nor does it take anything from the other, when the two are back.
    for node in &trio.nodes {
        node.proxy.pass();
    }
    let error = lease.release().await.expect_err("it had ended");
    assert!(error.is_lost(), "{error}");
    assert!(theirs.is_held());
    theirs.release().await.expect("it was theirs to the end");
}

/// A rival needs the vote that the holder still has. The time after the deadline is at least two
/// percent of the TTL, also when the machine is busy.
#[tokio::test]
async fn expired_majority_keeps_its_votes_for_a_pause() {
    let trio = Trio::shared().await;
    let [never, silent, kept] = &trio.nodes[..] else { panic!("there are three") };
    never.proxy.refuse();
    let ttl = Duration::from_secs(10);
    let lease = patient(&trio.quorum(), "a").ttl(ttl).acquire().await.expect("two are enough");
    silent.proxy.blackhole(Direction::Both);
    let now = Instant::now();
    let deadline = now + lease.remaining();
    let rival = Quorum::new([never.direct(), kept.direct()]);
    let request = patient(&rival, "a").ttl(Duration::from_secs(2));
    let (theirs, cause) = tokio::join!(request.acquire(), async {
        let cause = soon("the loss", lease.lost()).await;
        drop(lease);
        cause
    });
    let theirs = theirs.expect("the vote is discarded");
    assert!(Instant::now() >= deadline + ttl / 50, "granted too early");
    assert_eq!(cause, LossCause::Expired);
    drop(theirs);
}

#[tokio::test]
async fn eviction_from_a_majority_is_a_loss() {
    let trio = Trio::shared().await;
    let lease =
        patient(&trio.quorum(), "a").ttl(Duration::from_secs(15)).renew(false).acquire().await.expect("all are up");
    until("the third has voted too", async || lease.votes() == 3).await;
    trio.evict_from_two("a").await;
    let error = lease.extend(LONG).await.expect_err("one is no majority");
    assert!(error.is_lost(), "{error}");
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Superseded);
    drop(lease);
    trio.becomes_free("a").await;
}

#[tokio::test]
async fn release_after_an_eviction_names_the_cause() {
    let trio = Trio::shared().await;
    let lease = patient(&trio.quorum(), "a").renew(false).acquire().await.expect("all are up");
    until("the third has voted too", async || lease.votes() == 3).await;
    trio.evict_from_two("a").await;
    let error = lease.release().await.expect_err("one is no majority");
    assert!(matches!(error, Error::Lost { cause: LossCause::Superseded, .. }), "{error:?}");
    trio.becomes_free("a").await;
}

#[tokio::test]
async fn hold_limits_count_from_the_majority() {
    let trio = Trio::shared().await;
    let (quorum, others) = (trio.quorum(), trio.quorum());
    let at_most = Duration::from_secs(5);
    let start = Instant::now();
    let lease = patient(&quorum, "a").max_hold(at_most).acquire().await.expect("all are up");
    assert!(lease.remaining() <= at_most);
    assert_eq!(soon("the end", lease.lost()).await, LossCause::MaxHold);
    assert!(start.elapsed() >= at_most, "{:?}", start.elapsed());
    trio.becomes_free("a").await;

    // A vote of a failed attempt is not kept.
    let mut taken = Vec::new();
    for node in &trio.nodes[1..] {
        taken.push(node.direct().lease("a").ttl(LONG).acquire().await.expect("it is free"));
    }
    let keeping = || patient(&quorum, "a").hold_at_least(LONG);
    assert!(keeping().try_acquire().await.expect("all are up").is_none());
    until("the vote was released", async || trio.tokens("a").await[0].is_none()).await;
    for lease in taken {
        lease.release().await.expect("it was theirs to the end");
    }

    let lease = keeping().acquire().await.expect("all are up");
    until("the third has voted too", async || lease.votes() == 3).await;
    lease.release().await.expect("it was ours to the end");
    assert!(others.lease("a").node_timeout(PATIENT).try_acquire().await.expect("all are up").is_none());
    assert!(trio.tokens("a").await.iter().all(Option::is_some));
}

#[tokio::test]
async fn failed_attempt_releases_unanswered_votes() {
    let trio = Trio::shared().await;
    let quorum = trio.quorum();
    // So that connections are open, and what is swallowed is an answer.
    let warm = patient(&quorum, "a").acquire().await.expect("all are up");
    until("the third has voted too", async || warm.votes() == 3).await;
    warm.release().await.expect("it was ours to the end");
    trio.becomes_free("a").await;

    let mut taken = Vec::new();
    for node in &trio.nodes[1..] {
        taken.push(node.direct().lease("a").ttl(LONG).acquire().await.expect("it is free"));
    }
    trio.nodes[0].proxy.blackhole(Direction::Down);
    let refused = quorum.lease("a").ttl(LONG).node_timeout(PATIENT).try_acquire().await;
    assert!(refused.expect("two have answered").is_none());
    until("it was granted where the answer was swallowed", async || trio.tokens("a").await[0].is_some()).await;
    trio.nodes[0].proxy.pass();
    until("what nobody heard of was given back", async || trio.tokens("a").await[0].is_none()).await;
    for lease in taken {
        lease.release().await.expect("it was theirs to the end");
    }
}

/// The first majority has the token of a clock that is one hour ahead, and the second majority
/// lacks that database: only the second round of a grant keeps the tokens rising.
#[tokio::test]
async fn token_rises_across_different_majorities() {
    let trio = Trio::shared().await;
    let ahead = &trio.nodes[0];
    ahead.direct().lease("a").acquire().await.expect("it is free").release().await.expect("it was ours");
    ahead.execute("UPDATE sqlock_lease SET token = token + 3600000000").await;
    let mut last = None;
    for round in 0..6 {
        let down = &trio.nodes[[2, 0, 1][round % 3]];
        down.proxy.refuse();
        let lease = patient(&trio.quorum(), "a").acquire().await.expect("two are enough");
        assert!(Some(lease.token()) > last, "{} after {last:?}", lease.token());
        last = Some(lease.token());
        // The token is in the rows: an ordinary lease on any of the two has a higher one.
        assert!(trio.tokens("a").await.iter().filter(|there| **there >= Some(lease.token().get())).count() >= 2);
        lease.release().await.expect("it was ours to the end");
        down.proxy.pass();
        trio.becomes_free("a").await;
    }
}

/// Each quorum has two files, and one file is in both.
#[tokio::test]
async fn sqlite_files_form_a_quorum() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let url = |file: &str| format!("sqlite://{}?mode=rwc", directory.path().join(file).display());
    let file = async |name: &str| {
        let pool = SqlitePool::connect(&url(name)).await.expect("a file");
        let locks = Locks::new(pool.clone());
        locks.migrate().await.expect("migrate");
        let make_old = "UPDATE _sqlock_migrations SET installed_on = datetime(installed_on, '-1 year')";
        sqlx::query(make_old).execute(&pool).await.expect("the record of the migrations");
        (locks, pool)
    };
    let ((a, pool), (b, _), (c, _)) = (file("a.db").await, file("b.db").await, file("c.db").await);
    a.lease("a").acquire().await.expect("it is free").release().await.expect("it was ours");
    sqlx::query("UPDATE sqlock_lease SET token = token + 3600000000").execute(&pool).await.expect("a clock ahead");

    let first = patient(&Quorum::new([a, b.clone()]), "a").acquire().await.expect("it is free");
    let there = b.inspect("a").await.expect("it can be read").expect("it is held there");
    assert_eq!(there.token, first.token(), "it was written back");
    let token = first.token();
    first.release().await.expect("it was ours, under the token that it was raised to");
    let second = patient(&Quorum::new([b, c]), "a").acquire().await.expect("it is free");
    assert!(second.token() > token);
    second.release().await.expect("it was ours");
}

#[tokio::test]
async fn extension_requires_a_majority() {
    let trio = Trio::shared().await;
    let lease = patient(&trio.quorum(), "a").ttl(Duration::from_secs(60)).acquire().await.expect("all are up");
    until("the third has voted too", async || lease.votes() == 3).await;
    trio.nodes[2].proxy.refuse();
    lease.extend(LONG).await.expect("two are enough");
    assert!(lease.remaining() > LONG / 2);
    trio.nodes[1].proxy.refuse();
    let error = lease.extend(LONG * 2).await.expect_err("one is no majority");
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(lease.is_held());
    assert!(lease.remaining() < LONG);
    let error = lease.extend(Duration::from_secs(100_000)).await.expect_err("longer than allowed");
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
}

#[tokio::test]
async fn quorum_all_requires_every_database() {
    let trio = Trio::shared().await;
    let quorum = Quorum::all(trio.nodes.iter().map(Node::locks));
    trio.nodes[0].proxy.refuse();
    let error = patient(&quorum, "a").try_acquire().await.expect_err("one is missing");
    assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains("2 of 3")), "{error}");
    trio.becomes_free("a").await;
    trio.nodes[0].proxy.pass();

    let taken = trio.nodes[1].direct().lease("a").ttl(LONG).acquire().await.expect("it is free");
    assert!(quorum.lease("a").ttl(LONG).node_timeout(PATIENT).try_acquire().await.expect("all are up").is_none());
    taken.release().await.expect("it was theirs");

    let lease = patient(&quorum, "a").ttl(Duration::from_secs(15)).acquire().await.expect("all are up");
    assert_eq!(lease.votes(), 3);
    let token = trio.tokens("a").await[2].and_then(sqlock::FencingToken::new).expect("it is held there");
    assert!(trio.nodes[2].direct().evict("a", token).await.expect("the server answers"));
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Superseded);
    assert!(!lease.is_held());
}

#[tokio::test]
async fn dropped_acquire_leaves_nothing_on_any_database() {
    let trio = Trio::shared().await;
    let quorum = trio.quorum();
    for round in 0..40u64 {
        let request = patient(&quorum, "a");
        if let Ok(lease) = timeout(Duration::from_micros(round * 300), request.acquire()).await {
            lease.expect("all are up").release().await.expect("it was ours");
        }
    }
    trio.becomes_free("a").await;
    let lease = patient(&trio.quorum(), "a").acquire().await.expect("it is free");
    drop(lease);
    trio.becomes_free("a").await;
}

#[tokio::test]
async fn wait_limit_covers_every_step() {
    let trio = Trio::shared().await;
    let held = patient(&trio.quorum(), "a").acquire().await.expect("all are up");
    until("the third has voted too", async || held.votes() == 3).await;
    // The limit leaves a busy machine no time to open connections.
    let clients: Vec<Locks> = trio.nodes.iter().map(Node::locks).collect();
    for locks in &clients[..2] {
        locks.lease("b").acquire().await.expect("it is up").release().await.expect("it was ours");
    }
    let quorum = Quorum::new(clients);
    // A database that does not answer has no time of its own beside it.
    trio.nodes[2].proxy.blackhole(Direction::Both);
    let start = Instant::now();
    let mut waiting = JoinSet::new();
    for _ in 0..3 {
        let request = quorum.lease("a").ttl(LONG).node_timeout(LONG).wait(Duration::from_secs(6));
        waiting.spawn(request.acquire());
    }
    while let Some(answer) = waiting.join_next().await {
        let error = answer.expect("no panic").expect_err("it is held");
        assert!(matches!(error, Error::Timeout { waited, .. } if waited >= Duration::from_secs(6)), "{error}");
    }
    assert!(start.elapsed() < SOON);
    let error = quorum.lease("a").ttl(LONG).node_timeout(PATIENT).wait(Duration::ZERO).acquire().await;
    assert!(error.expect_err("it is held").is_timeout());
    held.release().await.expect("two can confirm it");
}

#[tokio::test]
async fn local_waiters_take_turns() {
    let trio = Trio::shared().await;
    let quorum = trio.quorum();
    let held = patient(&quorum, "a").acquire().await.expect("all are up");
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = JoinSet::new();
    for i in 0..4 {
        let (request, order) = (patient(&quorum, "a"), Arc::clone(&order));
        waiting.spawn(async move {
            let lease = request.acquire().await.expect("it becomes free");
            order.lock().unwrap().push(i);
            lease.release().await.expect("it was ours");
        });
        // It stands behind those before it.
        tokio::task::yield_now().await;
    }
    held.release().await.expect("it was ours");
    soon("all had their turn", async { while waiting.join_next().await.is_some() {} }).await;
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3]);
}

#[tokio::test]
async fn work_is_dropped_on_majority_loss() {
    let trio = Trio::shared().await;
    let done = patient(&trio.quorum(), "a").run(async |lease| lease.votes()).await.expect("it lasted");
    assert!(done >= 2);
    let request = patient(&trio.quorum(), "a").ttl(Duration::from_secs(3));
    let lost = soon(
        "the loss",
        request.run(async |_| {
            for node in &trio.nodes {
                node.proxy.blackhole(Direction::Both);
            }
            std::future::pending::<()>().await;
        }),
    );
    assert!(lost.await.expect_err("it did not last").is_lost());
}

#[tokio::test]
async fn run_polls_no_work_after_majority_deadline() {
    let trio = Trio::shared().await;
    let (request, polls) = (patient(&trio.quorum(), "a").ttl(Duration::from_secs(5)), AtomicU32::new(0));
    let work = request.run(async |lease| block_past(|| lease.remaining(), &polls).await);
    assert!(soon("the loss", work).await.expect_err("it did not last").is_lost());
    assert_eq!(polls.into_inner(), 2);
}

#[tokio::test]
async fn recently_started_server_does_not_vote() {
    let trio = Trio::shared().await;
    let young = trio.quorum().rejoin_after(Duration::from_secs(86_400 * 365));
    let error = young.lease("a").ttl(LONG).node_timeout(PATIENT).try_acquire().await.expect_err("none may vote");
    assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains("votes after")), "{error}");
    trio.becomes_free("a").await;
    let old = trio.quorum().rejoin_after(Duration::ZERO);
    patient(&old, "a").acquire().await.expect("all may vote").release().await.expect("it was ours");
}

/// The second database loses its data while it holds one of two votes of a lease.
#[tokio::test]
async fn recreated_database_votes_after_the_ttl() {
    let trio = Trio::shared().await;
    for lost in 0..3 {
        let (kept, other) = (&trio.nodes[(lost + 1) % 3], &trio.nodes[(lost + 2) % 3]);
        let lost = &trio.nodes[lost];
        // The holder never reaches the third database.
        let closed = Proxy::start(other.port);
        closed.refuse();
        let holder = Quorum::new([kept.direct(), lost.direct(), other.locks_through(&closed)]);
        let lease = patient(&holder, "a").renew(false).acquire().await.expect("two are enough");
        lost.execute("DROP VIEW sqlock_holders").await;
        for table in ["sqlock_client", "sqlock_lease", "sqlock_entry", "_sqlock_migrations"] {
            lost.execute(&format!("DROP TABLE {table}")).await;
        }
        lost.direct().migrate().await.expect("migrate");
        kept.proxy.refuse();
        let rival = trio.quorum();
        let refused = rival.lease("a").ttl(LONG).node_timeout(PATIENT).try_acquire().await;
        let error = refused.expect_err("one of the two has no memory");
        assert!(matches!(&error, Error::Unavailable { reason, .. } if reason.contains("votes after")), "{error}");
        assert!(lease.is_held(), "nobody has taken it away");
        until("the vote is given back", async || lost.direct().inspect("a").await.expect("there").is_none()).await;

        lost.execute(make_old(lost.kind)).await;
        let next = patient(&rival, "a").acquire().await.expect("it votes again");
        next.release().await.expect("held");
        kept.proxy.pass();
        drop(lease);
        trio.becomes_free("a").await;
    }
}

/// Its tables may be younger than the TTL.
#[tokio::test]
async fn database_with_unreadable_history_does_not_vote() {
    let trio = Trio::shared().await;
    for (i, node) in trio.nodes.iter().enumerate() {
        let (server, place) = node.url.rsplit_once('/').expect("a database");
        let host = server.rsplit(['@', '/']).next().expect("a host");
        let (database, query) = place.split_once('?').unwrap_or((place, ""));
        let name = query.rsplit_once("%3D").map_or(database, |(_, schema)| schema);
        let (user, create) = match node.kind {
            Kind::Postgres => (
                name.to_owned(),
                format!("CREATE ROLE {name} LOGIN PASSWORD 'secret'; GRANT USAGE ON SCHEMA {name} TO {name}"),
            ),
            Kind::MySql | Kind::MariaDb => (format!("{name}@'%'"), format!("CREATE USER {name}@'%'")),
        };
        node.execute(&create).await;
        for table in ["sqlock_client", "sqlock_lease", "sqlock_entry"] {
            node.execute(&format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {user}")).await;
        }
        let scheme = node.url.split("://").next().expect("a scheme");
        // MySQL has no password here, because this test is not about authentication without TLS.
        let password = if node.kind == Kind::Postgres { ":secret" } else { "" };
        let limited = client(node.kind, &format!("{scheme}://{name}{password}@{host}/{place}"));
        let quorum = Quorum::new([limited, trio.nodes[(i + 1) % 3].direct()]);
        let refused = quorum.lease("a").ttl(LONG).node_timeout(PATIENT).try_acquire().await;
        let error = refused.expect_err("one vote is missing").report().to_string();
        assert!(error.contains("_sqlock_migrations"), "{error}");
        trio.becomes_free("a").await;
        node.execute(&match node.kind {
            Kind::Postgres => format!("DROP OWNED BY {name}; DROP ROLE {name}"),
            Kind::MySql | Kind::MariaDb => format!("DROP USER {user}"),
        })
        .await;
    }
}

#[tokio::test]
async fn two_databases_on_one_server_are_refused() {
    let trio = Trio::shared().await;
    for node in &trio.nodes {
        let twice = Quorum::new([node.direct(), trio.nodes[0].locks(), node.direct()]);
        let error = twice.lease("a").try_acquire().await.expect_err("it would vote twice");
        assert!(matches!(&error, Error::Unsupported { reason, .. } if reason.contains("one server")), "{error}");
        // MariaDB has no name of its own by which another address would be recognised.
        if node.kind != Kind::MariaDb {
            let hidden = Quorum::new([node.direct(), node.locks()]);
            // A try says "taken" when the second answer comes late.
            until("another address is recognized", async || {
                match hidden.lease("a").node_timeout(PATIENT).try_acquire().await {
                    Ok(answer) => {
                        assert!(answer.is_none(), "it has voted twice");
                        false
                    }
                    Err(Error::Unsupported { reason, .. }) if reason.contains("one server") => true,
                    Err(error) => panic!("{error}"),
                }
            })
            .await;
        }
        trio.becomes_free("a").await;
    }
}

#[tokio::test]
async fn invalid_quorum_is_refused() {
    let none = Quorum::new([]).lease("a").try_acquire().await.expect_err("nobody can vote");
    assert!(matches!(none, Error::Unsupported { .. }), "{none}");
    let trio = Trio::shared().await;
    let (a, b) = (trio.nodes[0].locks(), trio.nodes[1].locks());
    let twice = Quorum::new([a.clone(), b, a]).lease("a").acquire().await.expect_err("one would vote twice");
    assert!(matches!(twice, Error::Unsupported { .. }), "{twice}");
    let error = trio.quorum().lease("").acquire().await.expect_err("no name");
    assert!(matches!(error, Error::InvalidName { .. }), "{error}");
    let error = trio.quorum().lease("a").ttl(Duration::from_micros(1)).acquire().await.expect_err("no TTL");
    assert!(matches!(error, Error::OutOfRange { .. }), "{error}");
}

// ---- faults

/// The resource that the lease guards, outside of the databases. A holder claims first, then reads,
/// then writes.
#[derive(Default)]
struct Resource {
    state: Mutex<State>,
    grants: AtomicUsize,
}

#[derive(Default)]
struct State {
    highest: i64,
    value: u64,
    /// The current holders.
    inside: HashMap<usize, Arc<QuorumLease>>,
    faults: Vec<String>,
}

impl Resource {
    /// `None`: refused.
    fn claim(&self, who: usize, lease: &Arc<QuorumLease>) -> Option<u64> {
        let mut state = self.state.lock().unwrap();
        let others: Vec<usize> =
            state.inside.iter().filter(|(_, other)| other.is_held()).map(|(other, _)| *other).collect();
        let token = lease.token().get();
        let too_low = token <= state.highest;
        // Both were held at the moment when the others were looked at.
        if lease.is_held() && (!others.is_empty() || too_low) {
            let fault = format!("{who} with {token} after {}, beside {others:?}", state.highest);
            state.faults.push(fault);
        }
        if too_low {
            return None;
        }
        state.highest = token;
        state.inside.insert(who, Arc::clone(lease));
        self.grants.fetch_add(1, Ordering::SeqCst);
        Some(state.value)
    }

    fn write(&self, lease: &QuorumLease, value: u64) -> bool {
        let mut state = self.state.lock().unwrap();
        let is_highest = state.highest == lease.token().get();
        if is_highest {
            state.value = value;
        }
        is_highest
    }

    fn leave(&self, who: usize) {
        self.state.lock().unwrap().inside.remove(&who);
    }

    async fn goes_on(&self, what: &str) {
        let before = self.grants.load(Ordering::SeqCst);
        until(what, async || self.grants.load(Ordering::SeqCst) >= before + 5).await;
    }
}

async fn contend(who: usize, quorum: Quorum, resource: Arc<Resource>, end: Arc<AtomicBool>) -> u64 {
    let mut written = 0;
    while !end.load(Ordering::SeqCst) {
        let request = quorum.lease("a").ttl(Duration::from_secs(3)).node_timeout(Duration::from_secs(1));
        let lease = match request.wait(Duration::from_secs(5)).acquire().await {
            Ok(lease) => Arc::new(lease),
            Err(Error::Timeout { .. } | Error::Unavailable { .. }) => continue,
            Err(error) => panic!("{error}"),
        };
        if let Some(value) = resource.claim(who, &lease) {
            sleep(Duration::from_millis(5)).await;
            written += u64::from(resource.write(&lease, value + 1));
            resource.leave(who);
        }
        let lease = Arc::into_inner(lease).expect("nobody else has it now");
        // Where a database is out of reach the others confirm it, and a lease that was lost is
        // lost.
        if let Err(error) = lease.release().await {
            assert!(error.is_lost() || matches!(error, Error::Unavailable { .. }), "{error}");
        }
    }
    written
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn single_server_faults_keep_mutual_exclusion() {
    let mut servers = [Kind::Postgres, Kind::MySql, Kind::MariaDb]
        .map(|kind| Server::start_with(kind, Options { durable: true, ..Options::default() }));
    let [a, b, c] = &servers;
    let urls = [(Kind::Postgres, a.url()), (Kind::MySql, b.url()), (Kind::MariaDb, c.url())];
    let trio = Trio::on(urls).await;
    let (resource, end) = (Arc::new(Resource::default()), Arc::new(AtomicBool::new(false)));
    let mut contenders = JoinSet::new();
    for who in 0..4 {
        contenders.spawn(contend(who, trio.quorum(), Arc::clone(&resource), Arc::clone(&end)));
    }
    resource.goes_on("with all of them").await;
    for node in 0..3 {
        block_in_place(|| servers[node].kill());
        resource.goes_on("with one killed").await;
        block_in_place(|| servers[node].restart());
        resource.goes_on("with one restarted").await;

        let paused = (node + 1) % 3;
        block_in_place(|| servers[paused].pause());
        resource.goes_on("with one paused").await;
        block_in_place(|| servers[paused].resume());
        resource.goes_on("with one resumed").await;

        let cut_off = &trio.nodes[(node + 2) % 3].proxy;
        cut_off.blackhole(Direction::Both);
        resource.goes_on("with one cut off").await;
        cut_off.pass();
    }
    // Two at once: the holder may finish, and no request is granted until one database is back.
    block_in_place(|| servers[0].kill());
    trio.nodes[2].proxy.blackhole(Direction::Both);
    sleep(Duration::from_secs(4)).await;
    let before = resource.grants.load(Ordering::SeqCst);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(resource.grants.load(Ordering::SeqCst), before, "one is no majority");
    trio.nodes[2].proxy.pass();
    resource.goes_on("with two again").await;
    block_in_place(|| servers[0].restart());
    resource.goes_on("with all of them again").await;

    end.store(true, Ordering::SeqCst);
    let mut written = 0;
    while let Some(done) = soon("the contenders end", contenders.join_next()).await {
        written += done.expect("no panic");
    }
    {
        let state = resource.state.lock().unwrap();
        assert!(state.faults.is_empty(), "{:#?}", state.faults);
        assert_eq!(state.value, written);
    }
    trio.becomes_free("a").await;
}
