//! Notifications of PostgreSQL: a client learns at once of a grant by another one.
//!
//! Promises: 7, 14.

use std::time::Duration;

use sqlock::Error;
use sqlx::postgres::PgListener;
use sqlx::{AssertSqlSafe, PgPool};
use tokio::time::sleep;
use uuid::Uuid;

use crate::DATABASE;
use crate::conformance::network::behind_a_reading_proxy;
use crate::support::{builder, connect, fresh, fresh_on, soon};

/// Waits until a query returns true.
async fn until_query(what: &str, pool: &PgPool, query: &'static str) {
    let holds = async {
        while !sqlx::query_scalar::<_, bool>(query).fetch_one(pool).await.expect("an answer") {
            sleep(Duration::from_millis(20)).await;
        }
    };
    soon(what, holds).await;
}

/// A waiting client listens, and a release that hands the name over notifies that client only.
#[tokio::test]
async fn release_notifies_the_client_that_is_next() {
    let db = fresh().await;
    let (locks, waiter) = (db.locks().await, db.locks().await);
    let pool = connect(&db.url, 2).await;
    let lease = locks.lease("a").acquire().await.expect("acquire");
    let next = tokio::spawn(waiter.lease("a").acquire());
    // Both clients beat, and listen after their first heartbeat.
    let listening = async {
        loop {
            let clients: Vec<String> = sqlx::query_scalar("SELECT id FROM sqlock_client WHERE listens")
                .fetch_all(&pool)
                .await
                .expect("clients");
            if clients.len() == 2 {
                return clients;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let clients = soon("two clients that listen", listening).await;
    let waits = "
        SELECT e.client, e.id, c.notice
          FROM sqlock_entry AS e JOIN sqlock_client AS c ON c.id = e.client
         WHERE e.name = 'a' AND e.token = 0";
    let (client, id, notice): (String, String, i64) = sqlx::query_as(waits).fetch_one(&pool).await.expect("an entry");
    let mut listener = PgListener::connect_with(&pool).await.expect("a listener");
    let channels: Vec<String> = clients.iter().map(|client| format!("sqlock_{client}")).collect();
    listener.listen_all(channels.iter().map(String::as_str)).await.expect("listen");
    lease.release().await.expect("release");
    let heard = soon("the notification", listener.recv()).await.expect("connected");
    let lease = soon("the lease", next).await.expect("no panic").expect("acquire");
    let grant = format!("{id} {} {notice} a", lease.token());
    assert_eq!((heard.channel(), heard.payload()), (&*format!("sqlock_{client}"), &*grant));
    // A release without a waiter sends no notification.
    lease.release().await.expect("release");
    sqlx::query("SELECT pg_notify($1, 'end')").bind(&channels[0]).execute(&pool).await.expect("notify");
    let heard = soon("the end", listener.recv()).await.expect("connected");
    assert_eq!(heard.payload(), "end");
}

/// A server that refuses the listening connection for a while is no pooler: the client listens
/// later.
#[tokio::test]
async fn client_listens_after_a_temporary_refusal() {
    client_listens_after("ALTER DATABASE {} ALLOW_CONNECTIONS false", "ALTER DATABASE {} ALLOW_CONNECTIONS true").await;
}

/// As while a password is replaced.
#[tokio::test]
async fn client_listens_after_a_refused_login() {
    client_listens_after("ALTER ROLE {} NOLOGIN", "ALTER ROLE {} LOGIN").await;
}

/// In the statements, `{}` is the name of the database and of the role that connects.
async fn client_listens_after(refuse: &str, allow: &str) {
    let shared = DATABASE.shared_url();
    let server = connect(&shared, 1).await;
    let run = async |sql: String| {
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&server).await.expect("a statement");
    };
    let database = format!("refusing_{}", Uuid::new_v4().simple());
    run(format!("CREATE DATABASE {database}")).await;
    run(format!("CREATE ROLE {database} SUPERUSER LOGIN")).await;
    let (address, query) = shared.split_once('?').unwrap_or((&shared, ""));
    let (address, _) = address.rsplit_once('/').expect("a URL names a database");
    let (_, host) = address.rsplit_once('@').expect("a URL names a user");
    let db = fresh_on(&format!("postgres://{database}@{host}/{database}?{query}")).await;
    let locks = db.locks().await;
    let pool = connect(&db.url, 2).await;
    let mut stranger = pool.begin().await.expect("begin");
    sqlx::raw_sql("LOCK TABLE sqlock_client IN EXCLUSIVE MODE").execute(&mut *stranger).await.expect("lock");
    let lease = locks.lease("a").acquire().await.expect("acquire");
    const BEATS: &str =
        "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'sqlock_client'::regclass AND NOT granted)";
    until_query("a heartbeat that waits", &pool, BEATS).await;
    run(refuse.replace("{}", &database)).await;
    stranger.rollback().await.expect("rollback");
    let refused = async {
        while locks.health().unavailable.is_none() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    soon("a refused connection", refused).await;
    run(allow.replace("{}", &database)).await;
    until_query("a client that listens", &pool, "SELECT bool_or(listens) FROM sqlock_client").await;
    lease.release().await.expect("the lease was held to the end");
    run(format!("DROP DATABASE {database} WITH (FORCE)")).await;
    run(format!("DROP ROLE {database}")).await;
}

/// A connection that listens replaces the other one between two heartbeats, each of which a short
/// lease needs in time.
#[tokio::test]
async fn client_listens_over_a_slow_network() {
    let db = fresh().await;
    let (proxy, url) = behind_a_reading_proxy(&db.url);
    let locks = builder(connect(&url, 1).await).build();
    let lease = locks.lease("a").ttl(Duration::from_secs(3)).acquire().await.expect("acquire");
    proxy.delay_replies(Duration::from_millis(150));
    let pool = connect(&db.url, 1).await;
    until_query("a client that listens", &pool, "SELECT coalesce(bool_or(listens), false) FROM sqlock_client").await;
    lease.release().await.expect("the lease was held to the end");
}

/// A statement that is given up while it waits for a lock would take effect later.
#[tokio::test]
async fn statement_waits_for_no_lock_after_its_caller() {
    let db = fresh().await;
    let pool = connect(&db.url, 2).await;
    let mark = if db.url.contains('?') { '&' } else { '?' };
    let locks = builder(connect(&format!("{}{mark}application_name=gives_up", db.url), 1).await).build();
    locks.lease("a").acquire().await.expect("acquire").release().await.expect("release");
    let mut stranger = pool.begin().await.expect("begin");
    sqlx::query("SELECT FROM sqlock_lease FOR UPDATE").execute(&mut *stranger).await.expect("a row lock");
    let tried = soon("an answer", locks.lease("a").try_acquire()).await;
    assert!(matches!(&tried, Err(Error::Unavailable { .. })), "{tried:?}");
    const NONE_WAITS: &str = "SELECT NOT EXISTS (SELECT FROM pg_stat_activity
        WHERE application_name = 'gives_up' AND wait_event_type = 'Lock')";
    until_query("no statement that waits", &pool, NONE_WAITS).await;
    stranger.rollback().await.expect("rollback");
    let lease = soon("the lease", locks.lease("a").acquire()).await.expect("acquire");
    lease.release().await.expect("the lease was held to the end");
}
