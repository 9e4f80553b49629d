//! Notifications of PostgreSQL: a client learns at once of a grant by another one.
//!
//! Promises: 7, 14.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use sqlock::Error;
use sqlx::postgres::PgListener;
use sqlx::{AssertSqlSafe, PgPool};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;
use uuid::Uuid;

use crate::DATABASE;
use crate::conformance::network::{behind_a_proxy, behind_a_reading_proxy};
use crate::support::{builder, connect, fresh, fresh_on, soon};

const LISTENS: &str = "SELECT coalesce(bool_or(listens), false) FROM sqlock_client";

/// Waits until a query returns true.
async fn until_query(what: &str, pool: &PgPool, query: &'static str) {
    let holds = async {
        while !sqlx::query_scalar::<_, bool>(query).fetch_one(pool).await.expect("an answer") {
            sleep(Duration::from_millis(20)).await;
        }
    };
    soon(what, holds).await;
}

/// A client that waits listens, and one that only holds does not. A release that hands the name over
/// notifies the client that waits.
#[tokio::test]
async fn release_notifies_the_client_that_is_next() {
    let db = fresh().await;
    let (locks, waiter) = (db.locks().await, db.locks().await);
    let pool = connect(&db.url, 2).await;
    let lease = locks.lease("a").acquire().await.expect("acquire");
    let next = tokio::spawn(waiter.lease("a").acquire());
    until_query("two clients", &pool, "SELECT count(*) = 2 FROM sqlock_client").await;
    until_query("a client that listens", &pool, LISTENS).await;
    let clients: Vec<(String, bool)> =
        sqlx::query_as("SELECT id, listens FROM sqlock_client").fetch_all(&pool).await.expect("clients");
    let waits = "
        SELECT e.client, e.id, c.notice
          FROM sqlock_entry AS e JOIN sqlock_client AS c ON c.id = e.client
         WHERE e.name = 'a' AND e.token = 0";
    let (client, id, notice): (String, String, i64) = sqlx::query_as(waits).fetch_one(&pool).await.expect("an entry");
    let mut listener = PgListener::connect_with(&pool).await.expect("a listener");
    let listening = clients.iter().filter(|(_, listens)| *listens).map(|(id, _)| id.as_str());
    assert_eq!((clients.len(), listening.collect::<Vec<_>>()), (2, vec![client.as_str()]));
    let channels: Vec<String> = clients.iter().map(|(client, _)| format!("sqlock_{client}")).collect();
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

/// The code is that of a pooler that refuses a setting, and of any other error in the protocol.
#[tokio::test]
async fn client_listens_after_one_refused_connection() {
    for of_connection in ["lock_timeout", "sqlock.session"] {
        let db = fresh().await;
        let (proxy, url) = behind_a_proxy(&db.url);
        let (port, refused) = refuse_once(proxy.port(), of_connection).await;
        let url = url.replace(&format!(":{}/", proxy.port()), &format!(":{port}/"));
        let locks = builder(connect(&url, 1).await).build();
        let rival = db.locks().await;
        let theirs = rival.lease("a").acquire().await.expect("acquire");
        let waits = tokio::spawn(locks.lease("a").acquire());
        until_query("a client that listens", &connect(&db.url, 1).await, LISTENS).await;
        assert!(refused.load(Ordering::SeqCst), "no connection with {of_connection}");
        theirs.release().await.expect("release");
        soon("the grant", waits).await.expect("no panic").expect("acquire").release().await.expect("release");
        locks.shutdown().await.expect("shutdown");
    }
}

/// Refuses the first connection with this text in its startup packet; passes others on. Returns
/// the port, and whether the connection was refused.
async fn refuse_once(upstream: u16, text: &'static str) -> (u16, Arc<AtomicBool>) {
    const TLS_REQUEST: [u8; 4] = 80_877_103_u32.to_be_bytes();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let port = listener.local_addr().expect("its address").port();
    let refused = Arc::new(AtomicBool::new(false));
    let has_refused = Arc::clone(&refused);
    tokio::spawn(async move {
        loop {
            let (mut client, _) = listener.accept().await.expect("a connection");
            let mut packet = [0; 4096];
            let mut length = client.read(&mut packet).await.expect("a packet");
            if packet[4..8] == TLS_REQUEST {
                client.write_all(b"N").await.expect("no TLS");
                length = client.read(&mut packet).await.expect("a packet");
            }
            let has_text = packet[..length].windows(text.len()).any(|bytes| bytes == text.as_bytes());
            if has_text && !has_refused.swap(true, Ordering::SeqCst) {
                let fields = b"SFATAL\0VFATAL\0C08P01\0Mnot now\0\0";
                let error = [b"E", &(fields.len() as u32 + 4).to_be_bytes()[..], fields].concat();
                client.write_all(&error).await.expect("an error");
                continue;
            }
            tokio::spawn(async move {
                let mut server = TcpStream::connect((Ipv4Addr::LOCALHOST, upstream)).await.expect("the server");
                server.write_all(&packet[..length]).await.expect("a packet");
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    (port, refused)
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
    let rival = db.locks().await;
    let theirs = soon("the lease", rival.lease("b").acquire()).await.expect("acquire");
    let waits = tokio::spawn(locks.lease("b").acquire());
    until_query("a client that listens", &pool, LISTENS).await;
    theirs.release().await.expect("release");
    soon("the grant", waits).await.expect("no panic").expect("acquire").release().await.expect("release");
    lease.release().await.expect("the lease was held to the end");
    run(format!("DROP DATABASE {database} WITH (FORCE)")).await;
    run(format!("DROP ROLE {database}")).await;
}

/// Heartbeats, and looks at other names, fall into the statements before the client listens, and the
/// lease is renewed meanwhile.
#[tokio::test]
async fn client_listens_over_a_slow_network() {
    let db = fresh().await;
    let (proxy, url) = behind_a_reading_proxy(&db.url);
    proxy.delay_replies(Duration::from_millis(400));
    let locks = builder(connect(&url, 1).await).build();
    let lease = locks.lease("a").ttl(Duration::from_secs(6)).acquire().await.expect("acquire");
    let pool = connect(&db.url, 1).await;
    let rival = db.locks().await;
    let mut held = Vec::new();
    let mut waits = JoinSet::new();
    for name in ["b", "c", "d", "e"] {
        held.push(rival.lease(name).acquire().await.expect("acquire"));
        waits.spawn(locks.lease(name).acquire());
    }
    until_query("a client that listens", &pool, LISTENS).await;
    drop(held);
    for granted in soon("the grants", waits.join_all()).await {
        granted.expect("acquire").release().await.expect("release");
    }
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

/// `statement_timeout` cancels the statement that adds the entry of the waiter.
#[tokio::test]
async fn cancelled_statement_is_sent_again() {
    let db = fresh().await;
    let pool = connect(&db.url, 2).await;
    // The search path is in the option that is there already.
    let url = format!("{}%20-cstatement_timeout%3D300", db.url);
    let (ours, theirs) = (db.locks().await, builder(connect(&url, 1).await).build());
    let lease = ours.lease("a").acquire().await.expect("acquire");
    let mut stranger = pool.begin().await.expect("begin");
    sqlx::query("SELECT FROM sqlock_lease FOR UPDATE").execute(&mut *stranger).await.expect("a row lock");
    let waits = tokio::spawn(theirs.lease("a").acquire());
    sleep(Duration::from_millis(1_500)).await;
    assert!(!waits.is_finished(), "refused: {:?}", waits.await);
    stranger.rollback().await.expect("rollback");
    lease.release().await.expect("release");
    soon("the grant", waits).await.expect("no panic").expect("acquire").release().await.expect("release");
}
