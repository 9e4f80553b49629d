//! Network faults at the worst moment: replies that are lost or late, and connections that are cut,
//! refused or frozen.
//!
//! SQLite has no network. Another writer takes the place of every fault there: while it holds the
//! write lock of the file, statements wait, fail after two seconds, and are sent again. The
//! assertions are the same.
//!
//! Promises: 3, 9, 12, 17, 18.

mod idle;
mod late;
mod refused;
mod silent;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use sqlock::{Error, Lease, Locks, LossCause};
use sqlx::{AssertSqlSafe, Executor, Pool, Transaction};
use tokio::time::{Instant, sleep, timeout};

use crate::support::proxy::{Direction, Proxy};
use crate::support::{Database, LONG, SOON, TestDatabase, builder, connect, fresh, held, query_processes, soon, until};
use crate::{DATABASE, Sql};

/// After this time, a statement that waits for SQLite's write lock has been refused once, and waits
/// again.
const REFUSED_ONCE: Duration = Duration::from_millis(2300);

/// A database behind a network that the test controls.
struct NetworkFixture {
    db: TestDatabase,
    /// The URL that leads through the proxy; on SQLite the only URL.
    url: String,
    proxy: Option<Proxy>,
    /// The mark by which the server identifies sessions that came through the proxy.
    mark: String,
    /// A pool of one connection that bypasses the proxy.
    direct: Pool<Sql>,
    blocker: Pool<Sql>,
    blocking: Option<Transaction<'static, Sql>>,
}

/// The faults of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The server's port answers with a reset.
    Refused,
    /// Bytes are swallowed without an error.
    Frozen,
    /// Requests arrive, replies do not.
    Mute,
    /// Replies are delayed by this time.
    Slow(Duration),
}

impl NetworkFixture {
    async fn new() -> Self {
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let db = fresh().await;
        let mark = format!("sqlock-network-{}-{}", std::process::id(), SERIAL.fetch_add(1, Ordering::Relaxed));
        let (proxy, url) = match DATABASE {
            Database::Sqlite => (None, db.url.clone()),
            _ => {
                let (proxy, url) = behind_a_reading_proxy(&db.url);
                let name = if DATABASE == Database::Postgres { format!("&application_name={mark}") } else { "".into() };
                (Some(proxy), format!("{url}{name}"))
            }
        };
        let direct = db.pool_of(1).await;
        let blocker = db.pool_of(1).await;
        Self { db, url, proxy, mark, direct, blocker, blocking: None }
    }

    /// Creates a client behind the faulty network, with both connections open and its statements
    /// prepared.
    async fn locks(&self) -> Locks {
        let locks = self.cold_locks().await;
        for name in ["warm", "a"] {
            let lease = locks.lease(name).acquire().await.expect("acquire");
            lease.extend(LONG).await.expect("extend");
            let next = tokio::spawn(locks.lease(name).acquire());
            yield_to_others().await;
            lease.release().await.expect("hand over");
            let lease = next.await.expect("no panic").expect("acquire");
            lease.release().await.expect("release");
        }
        locks
    }

    async fn cold_locks(&self) -> Locks {
        builder(connect(&self.url, 1).await).build()
    }

    /// Creates a client whose network has no faults.
    async fn rival(&self) -> Locks {
        self.db.locks().await
    }

    async fn strike(&mut self, fault: Fault) {
        let Some(proxy) = &self.proxy else {
            // For every fault, another connection writes.
            let blocking = self.blocker.begin_with("BEGIN IMMEDIATE");
            self.blocking = Some(soon("the write lock", blocking).await.expect("begin"));
            return;
        };
        match fault {
            Fault::Refused => proxy.refuse(),
            Fault::Frozen => proxy.blackhole(Direction::Both),
            Fault::Mute => proxy.blackhole(Direction::Down),
            Fault::Slow(delay) => proxy.delay_replies(delay),
        }
    }

    /// Ends every idle connection, as a restarted server or a pooler does.
    fn kill_idle(&self) {
        if let Some(proxy) = &self.proxy {
            proxy.reset();
        }
    }

    async fn mend(&mut self) {
        if let Some(proxy) = &self.proxy {
            proxy.pass();
        }
        if let Some(blocking) = self.blocking.take() {
            blocking.rollback().await.expect("rollback");
        }
    }

    /// Cuts the connections after the server has executed the request and the reply was swallowed:
    /// `done` checks the row.
    async fn cut_when(&mut self, name: &str, done: impl Fn(&Row) -> bool) {
        let Some(proxy) = &self.proxy else {
            // SQLite has no reply to lose. Instead a statement has to be sent again.
            sleep(REFUSED_ONCE).await;
            self.mend().await;
            return;
        };
        until("the server's part", async || self.row(name).await.is_some_and(|row| done(&row))).await;
        proxy.pass();
        proxy.reset();
    }

    async fn row(&self, name: &str) -> Option<Row> {
        let sql = held("l.id, l.token", name);
        let row = sqlx::query_as(AssertSqlSafe(sql)).fetch_optional(&self.direct).await.expect("the row can be read");
        row.map(|(id, token, expires_at)| Row { id, token, expires_at })
    }

    async fn until(&self, what: &str, name: &str, holds: impl Fn(&Row) -> bool) {
        until(what, async || self.row(name).await.is_some_and(|row| holds(&row))).await;
    }

    /// Returns the number of sessions on the server for clients behind the proxy, and how many of
    /// them are in a transaction.
    async fn sessions(&self) -> (i64, i64) {
        let sql = match DATABASE {
            Database::Postgres => format!(
                "SELECT count(*), count(*) FILTER (WHERE state LIKE 'idle in transaction%')
                   FROM pg_stat_activity WHERE application_name = '{}'",
                self.mark
            ),
            Database::MySql | Database::MariaDb => "SELECT count(*), count(t.trx_id)
                   FROM information_schema.processlist AS p
                   LEFT JOIN information_schema.innodb_trx AS t ON t.trx_mysql_thread_id = p.id
                  WHERE p.db = DATABASE() AND p.id <> CONNECTION_ID()"
                .into(),
            // The process's own handles of the file are counted instead, below.
            Database::Sqlite => "SELECT 0, 0".into(),
        };
        query_processes(async || {
            sqlx::query_as::<Sql, (i64, i64)>(AssertSqlSafe(sql.clone())).fetch_one(&self.direct).await
        })
        .await
    }

    /// Checks that no connection, no transaction and no held name is left in the end.
    async fn assert_nothing_left(mut self, clients: Vec<Locks>) {
        self.mend().await;
        for locks in clients {
            // This check ignores a failed release; the name is checked below.
            let _ = soon("the end of a client", locks.shutdown()).await;
        }
        self.blocker.close().await;
        let gone = async {
            loop {
                let (sessions, in_transaction) = self.sessions().await;
                if sessions == 0 && in_transaction == 0 && self.proxy.as_ref().is_none_or(|p| p.connections() == 0) {
                    return;
                }
                sleep(Duration::from_millis(20)).await;
            }
        };
        soon("the end of all sessions", gone).await;
        let held: i64 = sqlx::query_scalar(
            "SELECT count(*) + (SELECT count(*) FROM sqlock_entry) FROM sqlock_lease WHERE id NOT IN ('', 'entries')",
        )
        .fetch_one(&self.direct)
        .await
        .expect("rows can be counted");
        assert_eq!(held, 0, "a name is still held");
        if DATABASE == Database::Sqlite {
            self.direct.close().await;
            let file = self.url.trim_start_matches("sqlite://").split('?').next().expect("the path").to_owned();
            until("the end of all handles of the file", async || open_handles(&file) == 0).await;
        }
    }
}

/// A row of the table.
struct Row {
    id: String,
    token: i64,
    expires_at: i64,
}

/// A proxy in front of a server on this machine, and the URL that leads through it.
pub(crate) fn behind_a_proxy(url: &str) -> (Proxy, String) {
    let (scheme, rest) = url.split_once("://").expect("a URL has a scheme");
    let (authority, path) = rest.split_once('/').expect("a URL names a database");
    let (user, host) = authority.rsplit_once('@').map_or(("", authority), |(user, host)| (user, host));
    let default = if DATABASE == Database::Postgres { 5432 } else { 3306 };
    let upstream = host.rsplit_once(':').map_or(default, |(_, port)| port.parse().expect("a port is a number"));
    let proxy = Proxy::start(upstream);
    let at = if user.is_empty() { "" } else { "@" };
    let url = format!("{scheme}://{user}{at}127.0.0.1:{}/{path}", proxy.port());
    (proxy, url)
}

/// Waits until the client of a lease is registered: a second heartbeat was answered.
async fn registered(lease: &Lease) {
    let deadline = || Instant::now() + lease.remaining();
    for _ in 0..2 {
        let before = deadline();
        until("a heartbeat", async || deadline() > before + Duration::from_millis(500)).await;
    }
}

/// The first heartbeat needs a connection, which takes four round trips or more to be opened.
#[tokio::test]
async fn lease_lasts_ten_round_trips() {
    if DATABASE == Database::Sqlite {
        return; // It has no network.
    }
    const ROUND_TRIP: Duration = Duration::from_millis(500);
    let db = fresh().await;
    let (proxy, url) = behind_a_proxy(&db.url);
    proxy.delay_replies(ROUND_TRIP);
    let locks = soon("a client", Locks::connect(&url)).await.expect("connect");
    let ttl = 10 * ROUND_TRIP;
    let lease = soon("the lease", locks.lease("a").ttl(ttl).acquire()).await.expect("acquire");
    let lost = timeout(ttl + ttl / 2, lease.lost()).await;
    assert!(lost.is_err(), "the lease was lost: {lost:?}");
    lease.release().await.expect("the lease was held to the end");
}

/// The lease ends before the time for connecting to the silent server, four seconds, is over.
#[tokio::test]
async fn short_lease_survives_silence_of_one_server() {
    if DATABASE == Database::Sqlite {
        return; // It has no servers.
    }
    let db = fresh().await;
    let ((first, first_url), (_second, second_url)) = (behind_a_proxy(&db.url), behind_a_proxy(&db.url));
    let locks = soon("a client", Locks::connect(&format!("{first_url},{second_url}"))).await.expect("connect");
    let lease = locks.lease("a").ttl(Duration::from_secs(6)).acquire().await.expect("acquire");
    registered(&lease).await;
    first.blackhole(Direction::Both);
    let token = lease.token();
    let lost = timeout(Duration::from_secs(8), lease.lost()).await;
    assert!(lost.is_err() && lease.is_held(), "{lost:?}");
    assert_eq!(db.locks().await.inspect("a").await.expect("an answer").map(|held| held.token), Some(token));
    lease.release().await.expect("the lease was held to the end");
}

/// A server that refuses connections takes none of the time of the next one.
#[tokio::test]
async fn short_lease_survives_refusal_by_two_of_three_servers() {
    if DATABASE == Database::Sqlite {
        return; // It has no servers.
    }
    let db = fresh().await;
    let (mut proxies, mut urls) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let (proxy, url) = behind_a_proxy(&db.url);
        proxies.push(proxy);
        urls.push(url);
    }
    let locks = soon("a client", Locks::connect(&urls.join(","))).await.expect("connect");
    let lease = locks.lease("a").ttl(Duration::from_secs(3)).acquire().await.expect("acquire");
    registered(&lease).await;
    proxies[..2].iter().for_each(Proxy::refuse);
    registered(&lease).await;
    lease.release().await.expect("the lease was held to the end");
}

/// As [`behind_a_proxy`], without TLS, so that the proxy can read the bytes.
pub(crate) fn behind_a_reading_proxy(url: &str) -> (Proxy, String) {
    let (proxy, url) = behind_a_proxy(url);
    let plain = if DATABASE == Database::Postgres { "sslmode=disable" } else { "ssl-mode=DISABLED" };
    (proxy, format!("{url}{}{plain}", if url.contains('?') { '&' } else { '?' }))
}

fn open_handles(file: &str) -> usize {
    let handles = std::fs::read_dir("/proc/self/fd").expect("there is a /proc");
    handles
        .flatten()
        .filter_map(|handle| std::fs::read_link(handle.path()).ok())
        .filter(|target| target.to_str().is_some_and(|target| target.starts_with(file)))
        .count()
}

/// Lets the tasks of this runtime run as far as they can without an answer from outside.
async fn yield_to_others() {
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
}
