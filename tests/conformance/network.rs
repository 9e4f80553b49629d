//! Network faults at the worst moment: replies that are lost or late, and connections that are cut,
//! refused or frozen (promises 3, 9 and 12).
//!
//! SQLite has no network. Another writer takes the place of every fault there: while it holds the
//! write lock of the file, statements wait, fail after two seconds, and are sent again. The
//! assertions are the same.
//!
//! Promises: 3, 9, 12, 17, 18.

mod idle;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use sqlock::{Error, Lease, Locks, LossCause};
use sqlx::{AssertSqlSafe, Executor, Pool, Transaction};
use tokio::time::{Instant, sleep, timeout};

use crate::support::proxy::{Direction, Proxy};
use crate::support::{Database, Fresh, LONG, SOON, builder, connect, fresh, held, of_processes, soon};
use crate::{DATABASE, Sql};

/// After this time, a statement that waits for SQLite's write lock has been refused once, and waits
/// again.
const REFUSED_ONCE: Duration = Duration::from_millis(2300);

/// A database behind a network that the test controls.
struct NetworkFixture {
    db: Fresh,
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
        let committed = async {
            while !self.row(name).await.is_some_and(|row| done(&row)) {
                sleep(Duration::from_millis(2)).await;
            }
        };
        soon("the server's part", committed).await;
        proxy.pass();
        proxy.reset();
    }

    async fn row(&self, name: &str) -> Option<Row> {
        let sql = held("l.id, l.token", name);
        let row = sqlx::query_as(AssertSqlSafe(sql)).fetch_optional(&self.direct).await.expect("the row can be read");
        row.map(|(id, token, expires_at)| Row { id, token, expires_at })
    }

    async fn until(&self, what: &str, name: &str, holds: impl Fn(&Row) -> bool) {
        let seen = async {
            while !self.row(name).await.is_some_and(|row| holds(&row)) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        soon(what, seen).await;
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
        of_processes(async || {
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
            let closed = async {
                while open_handles(&file) > 0 {
                    sleep(Duration::from_millis(20)).await;
                }
            };
            soon("the end of all handles of the file", closed).await;
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

// ---- replies that never come

#[tokio::test]
async fn acquire_with_lost_reply_yields_one_lease() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    // The row exists, so that the first statement is the one that grants.
    network.strike(Fault::Mute).await;
    let asking = tokio::spawn(locks.lease("a").ttl(LONG).acquire());
    let mut granted = None;
    if network.proxy.is_some() {
        network.until("the grant", "a", |row| !row.id.is_empty()).await;
        granted = network.row("a").await.map(|row| row.token);
    }
    network.cut_when("a", |row| !row.id.is_empty()).await;
    let lease = soon("the lease", asking).await.expect("no panic").expect("acquire");
    assert!(lease.is_held());
    let row = network.row("a").await.expect("the row");
    assert_eq!(row.token, lease.token().get());
    if let Some(granted) = granted {
        assert_eq!(row.token, granted, "the holding that was committed first, not a second one");
    }
    assert_eq!(row.id.len(), 32, "one lease: {}", row.id);
    assert!(rival.lease("a").try_acquire().await.expect("try").is_none());
    lease.release().await.expect("release");
    let next = rival.lease("a").try_acquire().await.expect("try").expect("no orphan keeps it");
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn renewal_with_lost_reply_keeps_the_lease() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_secs(9);
    let lease = locks.lease("a").ttl(ttl).acquire().await.expect("acquire");
    // When two heartbeats were answered, their connection is open and their statements are
    // prepared.
    let deadline = || Instant::now() + lease.remaining();
    for _ in 0..2 {
        let before = deadline();
        let answered = async {
            while deadline() <= before + ttl / 20 {
                sleep(Duration::from_millis(5)).await;
            }
        };
        soon("a heartbeat", answered).await;
    }
    let (acquired, granted) = (Instant::now(), network.row("a").await.expect("the row"));
    network.strike(Fault::Mute).await;
    if network.proxy.is_none() {
        sleep(ttl / 3).await; // until the heartbeat is due
    }
    network.cut_when("a", |row| row.expires_at > granted.expires_at).await;
    let lost = timeout((acquired + ttl + ttl / 3).saturating_duration_since(Instant::now()), lease.lost()).await;
    assert!(lost.is_err(), "lost: {lost:?}");
    assert!(lease.is_held());
    let row = network.row("a").await.expect("the row");
    assert_eq!((row.token, row.id), (granted.token, granted.id));
    assert!(rival.lease("a").try_acquire().await.expect("try").is_none());
    lease.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn release_with_lost_reply_succeeds() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    network.strike(Fault::Mute).await;
    let releasing = tokio::spawn(lease.release());
    network.cut_when("a", |row| row.id.is_empty()).await;
    soon("the release", releasing).await.expect("no panic").expect("it was ours to the end");
    let next = rival.lease("a").try_acquire().await.expect("try").expect("free");
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// The release is sent again when another client holds the name; it still succeeds and does not
/// touch the successor's lease.
#[tokio::test]
async fn repeated_release_succeeds_and_spares_the_successor() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let token = lease.token().get();
    network.strike(Fault::Mute).await;
    let releasing = tokio::spawn(lease.release());
    if network.proxy.is_some() {
        // Without a waiter it is one statement, whose answer is not needed.
        network.until("the release", "a", |row| row.id.is_empty()).await;
    }
    let taking = tokio::spawn(rival.lease("a").wait(SOON).acquire());
    network.cut_when("a", |row| !row.id.is_empty() && row.token > token).await;
    soon("the release", releasing).await.expect("no panic").expect("it was ours to the end");
    let next = soon("the successor", taking).await.expect("no panic").expect("acquire");
    let row = network.row("a").await.expect("the row");
    assert_eq!(row.token, next.token().get());
    assert!(!row.id.is_empty());
    next.release().await.expect("the successor's is its own");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn handover_with_lost_reply_grants_the_waiter_once() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let first = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let token = first.token();
    let waiting = tokio::spawn(locks.lease("a").ttl(LONG).acquire());
    yield_to_others().await;
    network.strike(Fault::Mute).await;
    let releasing = tokio::spawn(first.release());
    let mut handed = None;
    if network.proxy.is_some() {
        network.until("the hand-off", "a", |row| row.token > token.get()).await;
        handed = network.row("a").await.map(|row| row.token);
    }
    network.cut_when("a", |row| row.token > token.get()).await;
    soon("the release", releasing).await.expect("no panic").expect("it was ours to the end");
    let second = soon("the turn", waiting).await.expect("no panic").expect("acquire");
    assert!(second.is_held());
    assert!(second.token() > token);
    if let Some(handed) = handed {
        assert_eq!(second.token().get(), handed, "the holding that was committed first, not another one");
    }
    assert!(rival.lease("a").try_acquire().await.expect("try").is_none());
    second.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn extension_with_lost_reply_counts() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_secs(60);
    let lease = locks.lease("a").ttl(ttl).renew(false).acquire().await.expect("acquire");
    let granted = network.row("a").await.expect("the row");
    network.strike(Fault::Mute).await;
    let extending = async {
        let extended = lease.extend(LONG).await;
        (extended, lease.remaining())
    };
    let cutting = network.cut_when("a", |row| row.expires_at > granted.expires_at);
    let ((extended, remaining), ()) = soon("the extension", async { tokio::join!(extending, cutting) }).await;
    extended.expect("extend");
    assert!(remaining > ttl, "{remaining:?}");
    let row = network.row("a").await.expect("the row");
    assert_eq!((row.token, row.id), (granted.token, granted.id));
    lease.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// Every operation of every round loses one reply, including operations on new names and new
/// connections.
#[tokio::test]
async fn many_lost_replies_leave_nothing_behind() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.cold_locks().await, network.rival().await);
    let mut last = None;
    let rounds = if network.proxy.is_some() { 15 } else { 1 };
    for round in 0..rounds {
        let fresh_name = format!("n{round}");
        let new = network.losing_a_reply(locks.lease(&fresh_name).ttl(LONG).acquire()).await.expect("a new name");
        let first = network.losing_a_reply(locks.lease("a").ttl(LONG).acquire()).await.expect("a known name");
        assert!(Some(first.token()) > last);
        let second = tokio::spawn(locks.lease("a").ttl(LONG).acquire());
        yield_to_others().await;
        network.losing_a_reply(first.extend(LONG)).await.expect("extend");
        network.losing_a_reply(first.release()).await.expect("it was ours to the end");
        let second = soon("the turn", second).await.expect("no panic").expect("acquire");
        let held = rival.inspect("a").await.expect("inspect").expect("held");
        assert_eq!(held.token, second.token());
        last = Some(second.token());
        network.losing_a_reply(second.release()).await.expect("it was ours to the end");
        network.losing_a_reply(new.release()).await.expect("it was ours to the end");
        assert!(rival.inspect("a").await.expect("inspect").is_none());
        assert!(rival.inspect(&fresh_name).await.expect("inspect").is_none());
    }
    network.assert_nothing_left(vec![locks, rival]).await;
}

impl NetworkFixture {
    /// Runs a call whose first reply is lost together with the connection.
    async fn losing_a_reply<T>(&mut self, call: impl Future<Output = T>) -> T {
        let Some(proxy) = &self.proxy else {
            self.strike(Fault::Mute).await;
            let (outcome, ()) = soon("a call", async { tokio::join!(call, self.cut_when("", |_| true)) }).await;
            return outcome;
        };
        let cut = proxy.cut_next_reply();
        let outcome = soon("a call whose reply was lost", call).await;
        assert!(cut.has_happened(), "the call did without an answer");
        outcome
    }
}

// ---- replies that come too late

#[tokio::test]
async fn grant_after_its_deadline_is_refused_and_released() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_millis(700);
    network.strike(Fault::Slow(ttl * 2)).await;
    let trying = tokio::spawn(locks.lease("a").ttl(ttl).try_acquire());
    if network.proxy.is_none() {
        sleep(ttl * 3 / 2).await;
        network.mend().await;
    }
    let error = soon("an answer", trying).await.expect("no panic").expect_err("too late to be a lease");
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(error.is_retryable(), "{error}");
    // An expiry would leave the hold in the row, so the lease was released.
    network.until("the release", "a", |row| row.id.is_empty()).await;
    let next = rival.lease("a").try_acquire().await.expect("try").expect("free");
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn acquire_continues_after_a_late_grant() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_millis(700);
    // The statements of a wait and of its end are prepared.
    let held = rival.lease("b").acquire().await.expect("acquire");
    let waited = locks.lease("b").wait(Duration::from_secs(3)).acquire().await;
    assert!(waited.expect_err("it is held").is_timeout());
    held.release().await.expect("release");
    // Nothing is in flight when the network gets slow, because a connection that is given up then
    // would not be replaced in time.
    locks.lease("b").acquire().await.expect("acquire").release().await.expect("release");
    let before = network.row("a").await.expect("the row").token;
    network.strike(Fault::Slow(ttl * 2)).await;
    let acquiring = tokio::spawn(locks.lease("a").ttl(ttl).acquire());
    let mut late = before;
    if network.proxy.is_some() {
        network.until("the late grant", "a", |row| row.token > before).await;
        late = network.row("a").await.expect("the row").token;
        network.until("its end", "a", |row| row.id.is_empty() || row.token > late).await;
        assert!(!acquiring.is_finished(), "the late grant was handed out");
    } else {
        sleep(ttl * 3 / 2).await;
    }
    network.mend().await;
    let lease = soon("the lease", acquiring).await.expect("no panic").expect("acquire");
    assert!(lease.is_held());
    assert!(lease.token().get() > late, "another holding than the late one");
    lease.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn renewal_after_the_deadline_is_lost() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_millis(1500);
    let lease = locks.lease("a").ttl(ttl).acquire().await.expect("acquire");
    let token = lease.token();
    network.strike(Fault::Slow(ttl * 2)).await;
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Expired);
    assert!(!lease.is_held());
    network.mend().await; // what is delayed arrives now: a confirmation that comes too late
    sleep(ttl / 3).await;
    assert!(!lease.is_held(), "lost is lost");
    let error = lease.release().await.expect_err("it was not ours to the end");
    assert!(matches!(error, Error::Lost { cause: LossCause::Expired, .. }), "{error}");
    let next = soon("the name", rival.lease("a").acquire()).await.expect("acquire");
    assert!(next.token() > token);
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

// ---- connections that are refused, frozen and reset

#[tokio::test]
async fn lease_survives_refused_connections_within_ttl() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_secs(9);
    let lease = locks.lease("a").ttl(ttl).acquire().await.expect("acquire");
    let acquired = Instant::now();
    network.strike(Fault::Refused).await;
    sleep(Duration::from_millis(500)).await; // a renewal in flight may come through
    let granted = network.row("a").await.expect("the row");
    sleep(ttl / 2).await; // the renewal at a third of the TTL fails, and what is tried after it
    assert_eq!(network.row("a").await.expect("the row").expires_at, granted.expires_at, "a renewal came through");
    assert!(lease.is_held());
    network.mend().await;
    network.until("a renewal", "a", |row| row.expires_at > granted.expires_at).await;
    let lost = timeout((acquired + ttl + ttl / 3).saturating_duration_since(Instant::now()), lease.lost()).await;
    assert!(lost.is_err(), "lost: {lost:?}");
    assert!(lease.is_held());
    assert!(rival.lease("a").try_acquire().await.expect("try").is_none());
    lease.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// Waits until the client of a lease is registered: a second heartbeat was answered.
async fn registered(lease: &Lease) {
    let deadline = || Instant::now() + lease.remaining();
    for _ in 0..2 {
        let before = deadline();
        let answered = async {
            while deadline() <= before + Duration::from_millis(500) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        soon("a heartbeat", answered).await;
    }
}

/// Interrupts the heartbeat of a client that holds this lease.
async fn interrupt(network: &mut NetworkFixture, lease: &Lease) {
    network.strike(Fault::Refused).await;
    network.kill_idle();
    // A heartbeat is due once a second.
    sleep(Duration::from_secs(1) + REFUSED_ONCE).await;
    assert!(lease.is_held(), "nothing has been heard");
    network.mend().await;
}

/// After a failover to a copy with the client and without the lease, the heartbeats of the client
/// are still answered.
#[tokio::test]
async fn lease_missing_after_interruption_is_lost() {
    let mut network = NetworkFixture::new().await;
    let locks = network.locks().await;
    let lease = locks.lease("a").acquire().await.expect("acquire");
    registered(&lease).await;
    network.direct.execute("DELETE FROM sqlock_lease WHERE name = 'a'").await.expect("delete");
    interrupt(&mut network, &lease).await;
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Superseded);
    let _ = lease.release().await;
    network.assert_nothing_left(vec![locks]).await;
}

/// After a failover to a copy that missed the release, the heartbeats of the client would keep the
/// lease alive.
#[tokio::test]
async fn restored_lease_is_released_again_after_interruption() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = locks.lease("a").acquire().await.expect("acquire");
    registered(&lease).await;
    let released = locks.lease("b").acquire().await.expect("acquire");
    network.direct.execute("CREATE TABLE copy AS SELECT * FROM sqlock_lease WHERE name = 'b'").await.expect("copy");
    released.release().await.expect("release");
    network.direct.execute("DELETE FROM sqlock_lease WHERE name = 'b'").await.expect("delete");
    network.direct.execute("INSERT INTO sqlock_lease SELECT * FROM copy").await.expect("restore");
    assert!(rival.lease("b").try_acquire().await.expect("answered").is_none(), "it is back");
    interrupt(&mut network, &lease).await;
    let next = soon("the name", rival.lease("b").acquire()).await.expect("acquire");
    next.release().await.expect("release");
    lease.release().await.expect("release");
    network.direct.execute("DROP TABLE copy").await.expect("drop");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn lease_is_lost_when_refusals_outlast_ttl() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = locks.lease("a").ttl(Duration::from_millis(1200)).acquire().await.expect("acquire");
    let token = lease.token();
    network.strike(Fault::Refused).await;
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Expired);
    // The error does not name a holder, because the database could not be asked.
    let error = soon("an answer", locks.lease("b").try_acquire()).await.expect_err("no database");
    assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    assert!(error.is_retryable() && !error.is_timeout() && !error.is_lost(), "{error}");
    network.mend().await;
    let again = soon("the name", locks.lease("a").ttl(LONG).acquire()).await.expect("acquire");
    assert!(again.token() > token);
    let error = lease.release().await.expect_err("it was lost");
    assert!(error.is_lost(), "{error}");
    assert!(again.is_held());
    assert!(rival.lease("a").try_acquire().await.expect("try").is_none(), "the old lease's end touched the new one");
    again.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn frozen_holder_knows_before_another_can_hold() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = locks.lease("a").ttl(Duration::from_millis(1500)).acquire().await.expect("acquire");
    network.strike(Fault::Frozen).await;
    if network.proxy.is_some() {
        let taken = async {
            loop {
                match rival.lease("a").ttl(LONG).try_acquire().await.expect("try") {
                    Some(next) => return next,
                    None => sleep(Duration::from_millis(1)).await,
                }
            }
        };
        let next = soon("the takeover", taken).await;
        assert!(!lease.is_held(), "two holders");
        assert!(next.token() > lease.token());
        assert_eq!(soon("the loss", lease.lost()).await, LossCause::Expired);
        next.release().await.expect("release");
    } else {
        // No client can be granted a name while the file is blocked. The holder notices the loss by
        // the clock.
        assert_eq!(soon("the loss", lease.lost()).await, LossCause::Expired);
        assert!(!lease.is_held());
    }
    network.mend().await;
    drop(lease);
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// Every call ends in bounded time, and a call without a reply reports no result.
#[tokio::test]
async fn calls_into_frozen_network_become_unavailable() {
    let mut network = NetworkFixture::new().await;
    let mut clients = Vec::new();
    for _ in 0..7 {
        clients.push(network.locks().await);
    }
    let [try_a, wait_a, inspects, lists, evicts, releases, extends] = &clients[..] else {
        unreachable!("there are seven");
    };
    let released = releases.lease("r").ttl(LONG).acquire().await.expect("acquire");
    let extended = extends.lease("e").ttl(LONG).acquire().await.expect("acquire");
    let token = extended.token();
    network.strike(Fault::Frozen).await;
    let start = Instant::now();
    let (tried, waited, inspected, listed, evicted, released, prolonged) = soon("an end of every call", async {
        tokio::join!(
            try_a.lease("x").try_acquire(),
            wait_a.lease("x").wait(Duration::from_secs(1)).acquire(),
            inspects.inspect("e"),
            lists.list(""),
            evicts.evict("e", token),
            released.release(),
            extended.extend(LONG),
        )
    })
    .await;
    println!("{DATABASE:?}: all calls ended after {:?}", start.elapsed());
    let unavailable = |what: &str, error: Option<Error>| {
        assert!(matches!(error, Some(Error::Unavailable { .. })), "{what}: {error:?}");
    };
    unavailable("try_acquire", tried.err());
    unavailable("acquire with a limit", waited.err());
    unavailable("evict", evicted.err());
    unavailable("extend", prolonged.err());
    if network.proxy.is_some() {
        unavailable("inspect", inspected.err());
        unavailable("list", listed.err());
    } else {
        // A writer does not stop SQLite's readers.
        assert_eq!(inspected.expect("inspect").expect("held").token, token);
        assert_eq!(listed.expect("list").len(), 2);
    }
    // The release was sent, and may have arrived.
    let error = released.expect_err("no answer");
    assert!(matches!(error, Error::Unknown { .. } | Error::Unavailable { .. }), "release: {error}");
    assert!(extended.is_held(), "extended by the repeated request");
    network.mend().await;
    soon("the release", extended.release()).await.expect("it was ours to the end");
    // The unanswered release never reached the database, so the TTL ends the holding.
    let orphan = network.row("r").await.expect("the row").token;
    let rival = network.rival().await;
    if let Some(left) = rival.inspect("r").await.expect("inspect") {
        assert_eq!(left.token.get(), orphan);
        let is_evicted = rival.evict("r", left.token).await.expect("evict");
        assert!(is_evicted || rival.inspect("r").await.expect("inspect").is_none(), "it has neither ended nor expired");
    }
    clients.push(rival);
    network.assert_nothing_left(clients).await;
}

#[tokio::test]
async fn storm_of_resets_loses_no_lease() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let ttl = Duration::from_secs(10);
    let mut leases: Vec<Lease> = Vec::new();
    for i in 0..50 {
        leases.push(locks.lease(format!("s{i:02}")).ttl(ttl).acquire().await.expect("acquire"));
    }
    let until = Instant::now() + ttl * 3 / 2;
    let mut storms = 0;
    while Instant::now() < until {
        if let Some(proxy) = &network.proxy {
            proxy.reset();
            // A busy machine opens a connection in this time.
            sleep(Duration::from_millis(300)).await;
        } else {
            network.strike(Fault::Refused).await;
            sleep(Duration::from_millis(150)).await;
            network.mend().await;
            sleep(Duration::from_millis(50)).await;
        }
        storms += 1;
        for lease in &leases {
            assert!(lease.is_held(), "{} was lost after {storms} resets", lease.name());
        }
    }
    let listed = rival.list("s").await.expect("list");
    let tokens: Vec<_> = listed.iter().map(|info| info.token).collect();
    assert_eq!(tokens, leases.iter().map(Lease::token).collect::<Vec<_>>());
    for lease in leases {
        soon("a release", lease.release()).await.expect("it was ours to the end");
    }
    network.assert_nothing_left(vec![locks, rival]).await;
}

#[tokio::test]
async fn acquire_dropped_without_reply_leaves_nothing() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let before = network.row("a").await.expect("the row").token;
    // The request arrives, the reply does not.
    network.strike(Fault::Mute).await;
    let acquiring = tokio::spawn(locks.lease("a").ttl(LONG).acquire());
    if network.proxy.is_some() {
        network.until("the grant", "a", |row| !row.id.is_empty()).await;
    } else {
        sleep(Duration::from_millis(300)).await;
    }
    acquiring.abort();
    assert!(acquiring.await.expect_err("it was dropped").is_cancelled());
    network.mend().await;
    // Its TTL is long, so it was released.
    network.until("the grant and its release", "a", |row| row.token > before && row.id.is_empty()).await;
    let next = rival.lease("a").try_acquire().await.expect("try").expect("free");
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// Neither the request nor the reply arrives.
#[tokio::test]
async fn acquire_dropped_before_arrival_takes_nothing() {
    let mut network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    network.strike(Fault::Frozen).await;
    let acquiring = tokio::spawn(locks.lease("a").ttl(LONG).acquire());
    sleep(Duration::from_millis(200)).await;
    acquiring.abort();
    assert!(acquiring.await.expect_err("it was dropped").is_cancelled());
    network.mend().await;
    // The client works again, and this request follows all statements that it still sent for the
    // dropped one.
    let lease = soon("an answer", async {
        loop {
            match locks.lease("a").ttl(LONG).acquire().await {
                Ok(lease) => return lease,
                Err(error) => assert!(matches!(error, Error::Unavailable { .. }), "{error}"),
            }
        }
    })
    .await;
    assert_eq!(network.row("a").await.expect("the row").token, lease.token().get());
    lease.release().await.expect("release");
    let next = rival.lease("a").try_acquire().await.expect("try").expect("free");
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// The caller sees the cut of its own transaction; the lease continues on its own connections.
#[tokio::test]
async fn cut_fenced_transaction_writes_nothing() {
    let network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    network.direct.execute("CREATE TABLE work (id INTEGER NOT NULL PRIMARY KEY)").await.expect("a table");
    let app = connect(&network.url, 1).await;
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let mut tx = app.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    sqlx::query("INSERT INTO work (id) VALUES (1)").execute(&mut *tx).await.expect("write");
    match &network.proxy {
        Some(proxy) => {
            proxy.reset();
            let committed = tx.commit().await;
            assert!(committed.is_err(), "the connection was gone");
        }
        // A connection to a file is not cut but dropped.
        None => drop(tx),
    }
    app.close().await;
    lease.release().await.expect("the lease had its own connections");
    let next = soon("the name", rival.lease("a").acquire()).await.expect("acquire");
    let rows: i64 = sqlx::query_scalar("SELECT count(*) FROM work").fetch_one(&network.direct).await.expect("count");
    assert_eq!(rows, 0);
    next.release().await.expect("release");
    network.assert_nothing_left(vec![locks, rival]).await;
}

/// The name is free afterwards, so that the caller cannot find out who has ended the lease.
#[tokio::test]
async fn eviction_with_lost_reply_is_never_denied() {
    const NAME: &str = "name-of-the-evicted";
    let network = NetworkFixture::new().await;
    let (locks, rival) = (network.locks().await, network.rival().await);
    let lease = rival.lease(NAME).ttl(LONG).acquire().await.expect("acquire");
    let cut = network.proxy.as_ref().map(|proxy| proxy.cut_reply_to(NAME));
    let evicted = soon("the answer", locks.evict(NAME, lease.token())).await;
    if let Some(cut) = cut {
        assert!(cut.has_happened());
    }
    assert!(matches!(evicted, Ok(true) | Err(Error::Unknown { .. })), "{evicted:?}");
    assert_eq!(soon("the loss", lease.lost()).await, LossCause::Superseded);
    let again = locks.evict(NAME, lease.token()).await;
    assert!(matches!(again, Ok(false)), "{again:?}");
}
