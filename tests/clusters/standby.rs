//! PostgreSQL: a primary and standbys that may be promoted.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use sqlock::{Error, Lease, Locks, LossCause};
use sqlx::{AssertSqlSafe, PgPool};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::server::{Kind, Options, Server};
use super::wait::LONG;
use super::{on, soon, unavailable, until, urls};

/// Far longer than a failover takes here.
const TTL: Duration = Duration::from_secs(120);

/// A primary, a standby of it, and one of that, which follows it when it takes over.
struct Cluster {
    a: Server,
    b: Server,
    _c: Server,
}

impl Cluster {
    /// With a synchronous standby, whichever of the two is the primary.
    async fn synchronous() -> Self {
        // A standby is copied from a standby only if that knows whole pages.
        let whole = vec!["full_page_writes=on".into()];
        let a = Server::start_with(Kind::Postgres, Options { settings: whole, ..Options::default() });
        let settings = vec!["synchronous_standby_names=c".into()];
        let b = Server::standby_of(&a, "b", Options { settings, ..Options::default() });
        let c = Server::standby_of(&b, "c", Options::default());
        let cluster = Self { a, b, _c: c };
        execute(&cluster.a, "ALTER SYSTEM SET synchronous_standby_names = 'b'").await;
        execute(&cluster.a, "SELECT pg_reload_conf()").await;
        confirmed(&cluster.a).await;
        cluster
    }

    /// The client of an application that wants no grant to be lost.
    async fn locks(&self) -> Locks {
        on(&urls([&self.a, &self.b])).synchronous().expect("PostgreSQL has it").connect().await.expect("a client")
    }
}

async fn pool(server: &Server) -> PgPool {
    sqlx::postgres::PgPoolOptions::new().max_connections(1).connect_lazy(&server.url()).expect("a URL")
}

async fn execute(server: &Server, sql: &str) {
    let pool = pool(server).await;
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&pool).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
    pool.close().await;
}

async fn number(pool: &PgPool, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(pool).await.unwrap_or_else(|e| panic!("{sql}: {e}"))
}

/// Returns when a standby confirms what is committed here.
async fn confirmed(primary: &Server) {
    let pool = pool(primary).await;
    let sql = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync' AND state = 'streaming'";
    until("a synchronous standby", async || number(&pool, sql).await == 1).await;
}

async fn promote(standby: &Server) {
    execute(standby, "SELECT pg_promote(true, 60)").await;
}

/// The answers to the clients.
#[derive(Default)]
struct Answers {
    /// The grants that are not released.
    held: Mutex<HashMap<String, i64>>,
    /// The greatest token of the name that all want.
    greatest: AtomicI64,
    grants: AtomicU64,
    /// When something was granted first that was asked for after the primary was killed.
    killed: Mutex<Option<Instant>>,
    first: Mutex<Option<Duration>>,
    over: AtomicBool,
}

impl Answers {
    fn granted(&self, asked: Instant) {
        self.grants.fetch_add(1, Ordering::Relaxed);
        if let Some(killed) = *self.killed.lock().unwrap()
            && asked > killed
        {
            self.first.lock().unwrap().get_or_insert_with(|| killed.elapsed());
        }
    }
}

/// Takes names, keeps some and gives some back, until it is over.
async fn work(locks: Locks, answers: Arc<Answers>, who: usize) -> Vec<Lease> {
    let mut kept = Vec::new();
    for i in 0.. {
        if answers.over.load(Ordering::Relaxed) {
            break;
        }
        let asked = Instant::now();
        if i % 4 == 0 {
            // All clients request this name.
            let Ok(lease) = locks.lease("hot").ttl(TTL).acquire().await else { continue };
            answers.granted(asked);
            let token = lease.token().get();
            let before = answers.greatest.fetch_max(token, Ordering::Relaxed);
            assert!(token > before, "token {token} after {before}");
            let _ = lease.release().await;
            continue;
        }
        let name = format!("{who}/{i}");
        let Ok(lease) = locks.lease(&name).ttl(TTL).acquire().await else { continue };
        answers.granted(asked);
        if i % 4 == 1 {
            let _ = lease.release().await;
        } else {
            answers.held.lock().unwrap().insert(name, lease.token().get());
            kept.push(lease);
        }
    }
    kept
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_lease_survives_failover_to_synchronous_standby() {
    let mut cluster = Cluster::synchronous().await;
    let answers = Arc::new(Answers::default());
    let mut tasks = JoinSet::new();
    cluster.locks().await.migrate().await.expect("migrate");
    for client in 0..3 {
        let locks = cluster.locks().await;
        for task in 0..4 {
            tasks.spawn(work(locks.clone(), Arc::clone(&answers), client * 10 + task));
        }
    }
    until("some work", async || answers.grants.load(Ordering::Relaxed) >= 300).await;

    cluster.a.kill();
    let killed = Instant::now();
    *answers.killed.lock().unwrap() = Some(killed);
    let held = answers.held.lock().unwrap().clone();
    let grants = answers.grants.load(Ordering::Relaxed);
    promote(&cluster.b).await;
    let promoted = killed.elapsed();

    // Nothing that was acknowledged before has gone.
    let direct = on(&cluster.b.url()).connect().await.expect("the standby has taken over");
    for (name, token) in &held {
        let info = direct.inspect(name).await.expect("it can be looked at");
        assert_eq!(info.map(|info| info.token.get()), Some(*token), "the lease on {name} that was acknowledged");
    }
    // The work goes on. (The workers check that tokens rise.)
    let before = answers.grants.load(Ordering::Relaxed);
    until("more work", async || answers.grants.load(Ordering::Relaxed) >= before + 100).await;
    answers.over.store(true, Ordering::Relaxed);
    let mut kept = Vec::new();
    while let Some(ended) = soon("the end of the work", tasks.join_next()).await {
        kept.extend(ended.expect("nobody has seen a token go back"));
    }
    assert!(kept.len() >= held.len());
    for lease in kept {
        let name = lease.name().to_string();
        lease.release().await.unwrap_or_else(|e| panic!("{name} was ours to the end: {e}"));
    }
    println!(
        "{grants} grants before the primary was killed, {} held, none lost; the standby had taken over after {promoted:.1?}, \
         the first new grant came after {:.1?}",
        held.len(),
        answers.first.lock().unwrap().expect("there was one"),
    );
}

#[tokio::test]
async fn standby_is_refused_alone_and_skipped_in_list() {
    let a = Server::start(Kind::Postgres);
    let b = Server::standby_of(&a, "b", Options::default());
    Locks::connect(&a.url()).await.expect("the primary").migrate().await.expect("migrate");

    let alone = on(&b.url()).build();
    let reason = unavailable(alone.lease("a").try_acquire().await);
    assert!(reason.contains("is a standby"), "{reason}");
    let reason = unavailable(Locks::connect(&urls([&b, &b])).await);
    assert!(reason.contains("none of the 2 servers accepts writes") && reason.contains("is a standby"), "{reason}");

    let locks = Locks::connect(&urls([&b, &a])).await.expect("one of them can be written");
    locks.migrate().await.expect("there");
    let lease = locks.lease("a").try_acquire().await.expect("there").expect("it is free");
    lease.release().await.expect("held");
    let lock = locks.session("a").try_acquire().await.expect("there").expect("it is free");
    lock.release().await.expect("held");
}

#[tokio::test]
async fn synchronous_client_is_refused_without_synchronous_standby() {
    let a = Server::start(Kind::Postgres);
    let insist = |url: String| async move { on(&url).synchronous().expect("PostgreSQL").connect().await };
    let reason = unavailable(insist(a.url()).await);
    assert!(reason.contains("synchronous_standby_names is empty"), "{reason}");

    execute(&a, "ALTER SYSTEM SET synchronous_standby_names = 'b'").await;
    execute(&a, "SELECT pg_reload_conf()").await;
    let pool = pool(&a).await;
    let set = "SELECT (current_setting('synchronous_standby_names') = 'b')::int::bigint";
    until("the setting", async || number(&pool, set).await == 1).await;
    let reason = unavailable(insist(a.url()).await);
    assert!(reason.contains("no synchronous standby is connected"), "{reason}");

    let _b = Server::standby_of(&a, "b", Options::default());
    confirmed(&a).await;
    insist(a.url()).await.expect("now there is one");
    execute(&a, "CREATE USER nobody_special").await;
    let reason = unavailable(insist(a.url().replace("postgres@", "nobody_special@")).await);
    assert!(reason.contains("GRANT pg_monitor"), "{reason}");
}

/// Removing the standby from the configuration closes no connection.
#[tokio::test]
async fn synchronous_client_is_refused_once_standby_is_unconfigured() {
    let cluster = Cluster::synchronous().await;
    let locks = cluster.locks().await;
    locks.migrate().await.expect("migrate");
    let held = soon("the lease", locks.lease("before").acquire()).await.expect("acquire");
    execute(&cluster.a, "ALTER SYSTEM SET synchronous_standby_names = ''").await;
    execute(&cluster.a, "SELECT pg_reload_conf()").await;
    until("the refusal", async || {
        let tried = locks.lease("after").try_acquire().await;
        matches!(tried, Err(Error::Unavailable { .. }))
    })
    .await;
    drop(held);
}

#[tokio::test]
async fn acquire_is_unavailable_while_synchronous_standby_is_paused() {
    let cluster = Cluster::synchronous().await;
    let locks = cluster.locks().await;
    locks.migrate().await.expect("migrate");
    let lease = locks.lease("a").ttl(TTL).acquire().await.expect("acquired");
    let first = lease.token();
    lease.release().await.expect("held");

    cluster.b.pause();
    let ttl = Duration::from_secs(3);
    for _ in 0..2 {
        let reason = unavailable(soon("an answer", locks.lease("a").ttl(ttl).try_acquire()).await);
        assert!(!reason.contains("standby"), "it is there, and says nothing: {reason}");
    }
    cluster.b.resume();
    // An unanswered request may be granted now, and expires.
    let lease = soon("the lease", locks.lease("a").ttl(TTL).acquire()).await.expect("the standby is back");
    assert!(lease.token() > first);
    lease.release().await.expect("held");
}

/// The primary has stored some of the grants, which last longer than the test, and commits them
/// when the standby is back.
#[tokio::test]
async fn unanswered_requests_leave_no_name_held() {
    const NAMES: [&str; 4] = ["one", "two", "three", "four"];
    let cluster = Cluster::synchronous().await;
    let locks = cluster.locks().await;
    locks.migrate().await.expect("migrate");
    locks.lease("one").acquire().await.expect("acquired").release().await.expect("held");
    let admin = pool(&cluster.a).await;

    cluster.b.pause();
    let single = |name: &str| locks.lease(name).ttl(LONG).wait(Duration::from_secs(10)).acquire();
    let several = locks.lease_all([NAMES[2], NAMES[3]]).ttl(LONG).try_acquire();
    let all = async { tokio::join!(single(NAMES[0]), single(NAMES[1]), several) };
    let (one, two, several) = soon("the answers", all).await;
    assert!(one.is_err() && two.is_err(), "granted without the standby: {one:?}, {two:?}");
    // No name was seen held.
    unavailable(several);
    cluster.b.resume();
    let commits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    until("the late commits", async || number(&admin, commits).await == 0).await;

    let others = cluster.locks().await;
    until("the end of the late grants", async || {
        let mut held = 0;
        for name in NAMES {
            held += usize::from(others.inspect(name).await.expect("the standby is back").is_some());
        }
        held == 0
    })
    .await;
    let all = others.lease_all(NAMES).try_acquire().await.expect("the standby is back").expect("all are free");
    all.release().await.expect("held");
}

/// The primary has stored the grant and would return it on a retry; a failover would lose it.
#[tokio::test]
async fn retried_grant_is_not_acknowledged_before_standby_confirms() {
    let cluster = Cluster::synchronous().await;
    let locks = cluster.locks().await;
    locks.migrate().await.expect("migrate");
    locks.lease("a").acquire().await.expect("acquired").release().await.expect("held");
    let admin = pool(&cluster.a).await;
    let stands = async |but: i64| -> i64 {
        let sql =
            "SELECT coalesce(max(pid), 0)::bigint FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND pid <> $1";
        sqlx::query_scalar(sql).bind(but).fetch_one(&admin).await.expect("the sessions of the server")
    };

    cluster.b.pause();
    let asked = tokio::spawn(locks.lease("a").ttl(TTL).try_acquire());
    let mut pid = 0;
    until("a commit that waits", async || {
        pid = stands(0).await;
        pid > 0
    })
    .await;
    // The session ends, and with it the wait: committed here, and nowhere else.
    let terminate = format!("SELECT pg_terminate_backend({pid})");
    sqlx::raw_sql(AssertSqlSafe(terminate)).execute(&admin).await.expect("it can be ended");
    until("the same, asked again", async || stands(pid).await > 0).await;
    assert_eq!(
        number(&admin, "SELECT count(*) FROM sqlock_lease WHERE name = 'a' AND id <> ''").await,
        1,
        "it is there"
    );
    sleep(Duration::from_millis(300)).await;
    assert!(!asked.is_finished(), "acknowledged, although only the primary has it");
    cluster.b.resume();
    let lease = soon("the answer", asked).await.expect("no panic").expect("the standby is back").expect("it was free");
    lease.release().await.expect("held");
}

#[tokio::test]
async fn leases_lost_in_asynchronous_failover_stay_fenced() {
    let mut a = Server::start(Kind::Postgres);
    let b = Server::standby_of(&a, "b", Options::default());
    let locks = Locks::connect(&urls([&a, &b])).await.expect("a client");
    locks.migrate().await.expect("migrate");
    execute(&a, "CREATE TABLE account (balance int); INSERT INTO account VALUES (0)").await;
    let early = locks.lease("early").ttl(TTL).acquire().await.expect("acquired");
    for name in ["known/0", "known/1"] {
        locks.lease(name).acquire().await.expect("acquired").release().await.expect("held");
    }
    let released = locks.lease("released").ttl(TTL).acquire().await.expect("acquired");
    let (pool_a, pool_b) = (pool(&a).await, pool(&b).await);
    let account = "SELECT count(*) FROM pg_class WHERE relname = 'account'";
    until("the standby to have the tables", async || number(&pool_b, account).await == 1).await;
    // A release is confirmed before it is on the disk of the standby.
    until("the standby to have that", async || {
        let sql =
            "SELECT (SELECT count(*) FROM sqlock_lease WHERE name LIKE 'known/%' AND id = '' OR name = 'released')
                          + (SELECT count(*) FROM sqlock_client)";
        number(&pool_b, sql).await == 4
    })
    .await;

    // The standby receives nothing any more, and the primary does not notice.
    execute(&b, "ALTER SYSTEM SET primary_conninfo = ''").await;
    execute(&b, "SELECT pg_reload_conf()").await;
    until("the cut", async || number(&pool_b, "SELECT count(*) FROM pg_stat_wal_receiver").await == 0).await;
    until("its end there", async || number(&pool_a, "SELECT count(*) FROM pg_stat_replication").await == 0).await;
    let mut lost = Vec::new();
    for name in ["known/0", "known/1", "new/0", "new/1"] {
        lost.push(locks.lease(name).ttl(TTL).acquire().await.expect("acquired"));
    }
    released.release().await.expect("released where the standby does not hear it");
    pool_a.close().await;
    a.kill();
    promote(&b).await;

    // Another client, as if on another host.
    let others = Locks::connect(&urls([&a, &b])).await.expect("the standby has taken over");
    let missing =
        lost.iter().map(Lease::name).map(async |name| others.inspect(name.as_str()).await.expect("there").is_none());
    let mut count = 0;
    for is_missing in missing {
        count += u32::from(is_missing.await);
    }
    println!("{count} of {} leases were lost that the standby had missed; 1 of 1 that it had not was kept", lost.len());
    assert_eq!(count, 4, "all that it has missed");
    for lease in &lost {
        assert_eq!(
            soon("the loss", lease.lost()).await,
            LossCause::Superseded,
            "the heartbeat goes on, the lease does not"
        );
        assert!(!lease.is_held());
    }
    assert!(early.is_held());
    // The standby has the lease still, and its client is alive.
    soon("the name", others.lease("released").acquire()).await.expect("acquired").release().await.expect("held");
    let info = others.inspect("early").await.expect("there").expect("what the standby had is kept");
    assert_eq!(info.token, early.token());
    for lease in &lost {
        let mut tx = pool_b.begin().await.expect("a transaction");
        let fenced = lease.fence(&mut tx).await;
        assert!(fenced.is_err_and(|e| e.is_lost()), "before anybody else has it");
        tx.rollback().await.expect("rolled back");
        let next = others.lease(lease.name().as_str()).try_acquire().await.expect("there").expect("it is free");
        assert!(next.token() > lease.token(), "{} after {}", next.token(), lease.token());
        let mut tx = pool_b.begin().await.expect("a transaction");
        assert!(lease.fence(&mut tx).await.is_err_and(|e| e.is_lost()), "while somebody else has it");
        tx.rollback().await.expect("rolled back");
        let mut tx = pool_b.begin().await.expect("a transaction");
        next.fence(&mut tx).await.expect("the new holder is the holder");
        sqlx::query("UPDATE account SET balance = balance + 1").execute(&mut *tx).await.expect("written");
        tx.commit().await.expect("committed");
    }
    let mut tx = pool_b.begin().await.expect("a transaction");
    early.fence(&mut tx).await.expect("it goes on there");
    tx.commit().await.expect("committed");
    assert_eq!(number(&pool_b, "SELECT balance::bigint FROM account").await, 4);
}
