//! Transaction poolers (promise 14): behind PgBouncer, consecutive transactions of one client run
//! on different server connections, every server connection serves many clients, and session state
//! of one client reaches the next.
//!
//! The other databases have no such pooler here. Their tests do the same work with as many clients,
//! and assert that no session state reaches the application's connections.
//!
//! Promises: 14.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlock::{Error, Lease, Locks};
use sqlx::{Executor, Pool, Row};

use super::fence::{add_one, assert_kept_out, run, spawn_waiter, until_expired};
use crate::support::server::{Kind, Options, PgBouncer, Server};
use crate::support::{Database, SOON, TestDatabase, builder, connect, empty, renewed_twice, soon};
use crate::{DATABASE, Sql};

/// A database behind a pooler, with a direct connection.
struct Pooled {
    /// The URL through the pooler.
    url: String,
    /// A pool that bypasses the pooler.
    direct: Pool<Sql>,
    _bouncer: Option<PgBouncer>,
    _server: Option<Server>,
    _db: Option<TestDatabase>,
}

impl Pooled {
    /// `settings` are the server's, on PostgreSQL.
    async fn new(settings: &[&str]) -> Self {
        if DATABASE != Database::Postgres {
            let db = empty().await;
            let (url, direct) = (db.url.clone(), db.pool_of(4).await);
            return Self { url, direct, _bouncer: None, _server: None, _db: Some(db) };
        }
        let settings = settings.iter().map(|&s| s.to_owned()).collect();
        let server = Server::start_with(Kind::Postgres, Options { settings, ..Options::default() });
        let bouncer = PgBouncer::start(&server);
        let direct = connect(&server.url(), 4).await;
        Self { url: bouncer.url(), direct, _bouncer: Some(bouncer), _server: Some(server), _db: None }
    }

    async fn locks(&self) -> Locks {
        builder(connect(&self.url, 2).await).build()
    }

    /// Reads the settings of the pooler's sessions, or of the application's.
    async fn session_settings(&self) -> Vec<BTreeMap<String, String>> {
        // As many simultaneous transactions as the pooler has server connections, to inspect each
        // of them.
        let pool = connect(&self.url, 4).await;
        let mut open = Vec::new();
        for _ in 0..4 {
            open.push(pool.begin().await.expect("begin"));
        }
        let sql = match DATABASE {
            // Those that PgBouncer itself sets for each client, and the pool of this test with it,
            // are not the test's.
            Database::Postgres => {
                "SELECT name, setting FROM pg_settings
                  WHERE (source = 'session' OR name IN ('default_transaction_isolation', 'lock_timeout',
                                                        'statement_timeout', 'synchronous_commit', 'search_path'))
                    AND name NOT IN ('application_name', 'client_encoding', 'DateStyle', 'TimeZone',
                                     'standard_conforming_strings', 'IntervalStyle', 'extra_float_digits',
                                     'transaction_isolation', 'transaction_read_only', 'transaction_deferrable')"
            }
            Database::MySql | Database::MariaDb => {
                "SHOW SESSION VARIABLES WHERE Variable_name IN
                    ('autocommit', 'innodb_lock_wait_timeout', 'lock_wait_timeout', 'transaction_isolation',
                     'tx_isolation', 'tx_read_only', 'transaction_read_only', 'sql_mode', 'time_zone')"
            }
            Database::Sqlite => "SELECT 'busy_timeout', CAST(timeout AS TEXT) FROM pragma_busy_timeout",
        };
        let mut all = Vec::new();
        for tx in &mut open {
            let rows = tx.fetch_all(sql).await.expect("settings can be read");
            all.push(rows.iter().map(|row| (row.get::<String, _>(0), row.get::<String, _>(1))).collect());
        }
        for tx in open {
            tx.rollback().await.expect("rollback");
        }
        all
    }

    /// No lock that outlives a transaction is left in the server.
    async fn assert_no_session_locks(&self) {
        match DATABASE {
            Database::Postgres => {
                let advisory: i64 = sqlx::query_scalar("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
                    .fetch_one(&self.direct)
                    .await
                    .expect("locks can be read");
                assert_eq!(advisory, 0, "advisory locks are left");
                let open: i64 = sqlx::query_scalar(
                    "SELECT count(*) FROM pg_stat_activity
                      WHERE state LIKE 'idle in transaction%' AND pid <> pg_backend_pid()",
                )
                .fetch_one(&self.direct)
                .await
                .expect("sessions can be read");
                assert_eq!(open, 0, "transactions are left open");
            }
            Database::MySql | Database::MariaDb => {
                let count = "SELECT count(*) FROM information_schema.innodb_trx AS t
                               JOIN information_schema.processlist AS p ON p.id = t.trx_mysql_thread_id
                              WHERE p.db = DATABASE() AND p.id <> CONNECTION_ID()";
                // MySQL cannot show a statement of another test while that has bytes in it that are
                // no text.
                let read = async || loop {
                    match sqlx::query_scalar::<_, i64>(count).fetch_one(&self.direct).await {
                        Err(error) if error.to_string().contains("Cannot convert string") => {}
                        open => break open.expect("transactions can be read"),
                    }
                };
                assert_eq!(soon("a readable list", read()).await, 0, "transactions are left open");
            }
            // The write lock is free at once.
            Database::Sqlite => {
                let tx = self.direct.begin_with("BEGIN IMMEDIATE").await.expect("nobody has the write lock");
                tx.rollback().await.expect("rollback");
            }
        }
    }
}

/// Runs all operations of a lease, one after the other.
async fn all_verbs(pooled: &Pooled) {
    let (ours, theirs) = (pooled.locks().await, pooled.locks().await);
    ours.migrate().await.expect("migrate");
    theirs.migrate().await.expect("again");
    let lease = ours.lease("a").ttl(Duration::from_secs(6)).label("pooled").acquire().await.expect("acquire");
    assert!(theirs.lease("a").try_acquire().await.expect("try").is_none());
    let error = theirs.lease("a").wait(Duration::from_secs(3)).acquire().await.expect_err("held");
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    renewed_twice(&theirs, "a").await;
    assert!(lease.is_held());
    if DATABASE == Database::Postgres {
        let listening = "SELECT count(*) FROM sqlock_client WHERE listens";
        let listening: i64 = sqlx::query_scalar(listening).fetch_one(&pooled.direct).await.expect("clients");
        assert_eq!(listening, 0, "a session that others use listens");
    }
    lease.extend(Duration::from_secs(60)).await.expect("extend");
    let listed = theirs.list("").await.expect("list");
    assert_eq!(listed.len(), 1);
    assert_eq!((listed[0].token, &*listed[0].label), (lease.token(), "pooled"));
    assert_eq!(theirs.inspect("a").await.expect("inspect").expect("held").token, lease.token());

    let app = connect(&pooled.url, 2).await;
    run(&app, "CREATE TABLE counter (id INTEGER NOT NULL PRIMARY KEY, value BIGINT NOT NULL)").await;
    run(&app, "INSERT INTO counter (id, value) VALUES (1, 0)").await;
    let mut tx = app.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    add_one(&mut tx, 1).await.expect("write");
    let waiting = tokio::spawn(theirs.lease("a").wait(SOON).acquire());
    tx.commit().await.expect("commit");

    let token = lease.token();
    lease.release().await.expect("release");
    let next = soon("the next one's turn", waiting).await.expect("no panic").expect("acquire");
    assert!(next.token() > token);
    assert!(ours.evict("a", next.token()).await.expect("evict"));
    let mut tx = app.begin().await.expect("begin");
    let error = next.fence(&mut tx).await.expect_err("evicted");
    assert!(error.is_lost(), "{error}");
    tx.rollback().await.expect("rollback");
    assert!(next.release().await.expect_err("evicted").is_lost());
    ours.sweeper().sweep().await.expect("sweep");
    ours.shutdown().await.expect("shutdown");
    theirs.shutdown().await.expect("shutdown");
}

/// Acquires a lease although other clients may use all connections of the pooler for some seconds,
/// which is an outage.
async fn acquire_behind_others(locks: &Locks, name: &str) -> Lease {
    loop {
        match locks.lease(name).ttl(SOON).acquire().await {
            Ok(lease) => return lease,
            Err(error) => assert!(matches!(error, Error::Unavailable { .. }), "acquire: {error}"),
        }
    }
}

/// Runs twenty clients with a common name and a name of their own each.
async fn twenty_clients(pooled: &Pooled) {
    let inside = Arc::new(AtomicBool::new(false));
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..20 {
        let (locks, inside) = (pooled.locks().await, Arc::clone(&inside));
        clients.spawn(async move {
            let own = acquire_behind_others(&locks, &format!("own/{client}")).await;
            let mut last = None;
            for _ in 0..4 {
                let hot = acquire_behind_others(&locks, "hot").await;
                assert!(!inside.swap(true, Ordering::SeqCst), "two holders");
                assert!(Some(hot.token()) > last, "tokens only rise");
                last = Some(hot.token());
                tokio::task::yield_now().await;
                inside.store(false, Ordering::SeqCst);
                // A grant by another client lasts 3 seconds at first. The release may wait for a
                // connection of the pooler for longer, or get none.
                if let Err(error) = hot.release().await {
                    let is_unanswered = matches!(error, Error::Unavailable { .. } | Error::Unknown { .. });
                    assert!(error.is_lost() || is_unanswered, "release: {error}");
                }
            }
            assert!(own.is_held());
            own.release().await.expect("release");
            locks.shutdown().await.expect("shutdown");
        });
    }
    let all = async {
        while let Some(client) = clients.join_next().await {
            client.expect("no client panics");
        }
    };
    tokio::time::timeout(SOON * 4, all).await.expect("everybody gets a turn");
}

async fn everything_behind_a_pooler(settings: &[&str]) {
    let pooled = Pooled::new(settings).await;
    let before = pooled.session_settings().await;
    all_verbs(&pooled).await;
    twenty_clients(&pooled).await;
    assert_eq!(pooled.session_settings().await, before, "a setting of ours is left in a session");
    pooled.assert_no_session_locks().await;
}

#[tokio::test]
async fn transaction_pooler_keeps_no_session_state() {
    everything_behind_a_pooler(&[]).await;
}

/// The settings that sqlock needs for its own transactions must not reach other clients.
#[tokio::test]
async fn transaction_pooler_works_with_unusual_server_defaults() {
    if DATABASE != Database::Postgres {
        // The poolers of the other databases share one server, with its own settings.
        return;
    }
    everything_behind_a_pooler(&[
        "default_transaction_isolation=serializable",
        "default_transaction_read_only=off",
        "synchronous_commit=off",
        "lock_timeout=7s",
    ])
    .await;
}

/// The fence holds on whichever server connections the pooler runs the transactions of the holder
/// and its rivals.
#[tokio::test]
async fn fence_holds_behind_a_transaction_pooler() {
    let pooled = Pooled::new(&[]).await;
    let locks = pooled.locks().await;
    locks.migrate().await.expect("migrate");
    let rival = pooled.locks().await;
    let app = connect(&pooled.url, 1).await;
    let lease = locks.lease("a").ttl(Duration::from_secs(8)).renew(false).acquire().await.expect("acquire");
    let mut tx = app.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    let next = spawn_waiter(&rival, "a");
    soon("the expiry", lease.lost()).await;
    until_expired(&locks, "a").await;
    assert_kept_out(&locks, "a").await;
    assert!(!next.is_finished(), "somebody got in before the fenced transaction had ended");
    tx.commit().await.expect("commit");
    let next = soon("the takeover", next).await.expect("no panic");
    assert!(next.token() > lease.token());
}

/// The tables are not in the first schema of the search path: a migration sets another path for its
/// own transaction only.
#[tokio::test]
async fn migration_behind_a_pooler_changes_no_search_path() {
    let pooled = Pooled::new(&[]).await;
    let locks = pooled.locks().await;
    locks.migrate().await.expect("migrate");
    if DATABASE == Database::Postgres {
        run(&pooled.direct, "CREATE SCHEMA AUTHORIZATION CURRENT_USER").await;
    }
    run(&pooled.direct, "DELETE FROM _sqlock_migrations WHERE version > 1").await;
    let before = pooled.session_settings().await;
    locks.migrate().await.expect("migrate again");
    assert_eq!(pooled.session_settings().await, before);
    if DATABASE == Database::Postgres {
        let tables = "SELECT count(*) FROM pg_class WHERE relname IN ('sqlock_lease', '_sqlock_migrations')";
        let tables: i64 = sqlx::query_scalar(tables).fetch_one(&pooled.direct).await.expect("the catalog");
        assert_eq!(tables, 2, "no second set of tables");
    }
}
