//! A listening session on real servers.

use std::time::Duration;

use sqlx::mysql::MySqlConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions as _};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::*;
use crate::backend::mysql::heartbeat;

const CLIENT: ClientId = ClientId::from_u128(7);

/// Longer than any step takes.
const SOON: Duration = Duration::from_secs(30);

/// A server, with a table of clients in a database of its own.
struct Server {
    options: MySqlConnectOptions,
    own: MySqlConnection,
}

impl Server {
    async fn new(variable: &str, database: &str) -> Self {
        let url = std::env::var(variable).unwrap_or_else(|_| {
            panic!("{variable} is not set: run the tests by scripts/test, which starts the servers")
        });
        let options: MySqlConnectOptions = url.parse().expect("a URL");
        let database = format!("sqlock_{database}_{}", std::process::id());
        let table = include_str!("../../../../migrations/mysql/0001_client.sql");
        let create = format!("DROP DATABASE IF EXISTS {database}; CREATE DATABASE {database}; USE {database}; {table}");
        let mut own = options.connect().await.expect("a connection");
        sqlx::raw_sql(AssertSqlSafe(create)).execute(&mut own).await.expect("the table");
        Self { options: options.database(&database), own }
    }

    /// The connection of a client that has registered and waits.
    async fn listener(&self, is_waiting: &watch::Sender<bool>, can_listen: &Arc<AtomicBool>) -> Listener {
        let connection = self.options.connect().await.expect("a connection");
        let mut listener = Listener::new(connection).for_heartbeats(is_waiting.subscribe(), Arc::clone(can_listen));
        heartbeat::register(listener.connection().await.expect("idle"), CLIENT).await.expect("registered");
        listener.set_client(CLIENT);
        listener
    }

    async fn listens(&mut self) -> bool {
        sqlx::query_scalar("SELECT listens FROM sqlock_client").fetch_one(&mut self.own).await.expect("a row")
    }

    async fn until_listens(&mut self) {
        let listens = async {
            while !self.listens().await {
                sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(SOON, listens).await.expect("a session that listens");
    }

    async fn end(mut self) {
        let drop = format!("DROP DATABASE {}", self.options.get_database().expect("its own"));
        sqlx::raw_sql(AssertSqlSafe(drop)).execute(&mut self.own).await.expect("dropped");
    }
}

async fn waiting_client_is_woken_by_a_grant(variable: &str) {
    let mut server = Server::new(variable, "listener").await;
    let (is_waiting, can_listen) = (watch::Sender::new(false), Arc::new(AtomicBool::new(true)));
    let mut listener = server.listener(&is_waiting, &can_listen).await;

    timeout(Duration::from_millis(300), listener.notified()).await.expect_err("it does not wait");
    assert!(!server.listens().await);

    is_waiting.send_replace(true);
    tokio::select! {
        _ = listener.notified() => panic!("nothing was granted"),
        () = server.until_listens() => {}
    }

    let waking = async {
        loop {
            wake(&mut server.own, &[CLIENT.to_string()]).await;
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        woken = timeout(SOON, listener.notified()) => woken.expect("a notification").expect("a connection"),
        () = waking => {}
    }

    // A heartbeat ends the sleep, and says that the session listens.
    let beat = heartbeat::beat(listener.connection().await.expect("idle"), CLIENT).await;
    assert_eq!(beat.expect("a heartbeat"), Some(0));
    assert!(server.listens().await);
    listener.close().await.expect("closed");
    server.end().await;
}

#[tokio::test]
async fn waiting_client_is_woken_by_a_grant_on_mysql() {
    waiting_client_is_woken_by_a_grant("SQLOCK_TEST_MYSQL_URL").await;
}

#[tokio::test]
async fn waiting_client_is_woken_by_a_grant_on_mariadb() {
    waiting_client_is_woken_by_a_grant("SQLOCK_TEST_MARIADB_URL").await;
}

async fn listener_without_its_lock_stops_listening(variable: &str) {
    let mut server = Server::new(variable, "shared").await;
    let (is_waiting, can_listen) = (watch::Sender::new(true), Arc::new(AtomicBool::new(true)));
    let mut listener = server.listener(&is_waiting, &can_listen).await;
    tokio::select! {
        _ = listener.notified() => panic!("nothing was granted"),
        () = server.until_listens() => {}
    }
    assert!(can_listen.load(Ordering::Relaxed));

    // As behind a pooler whose next session is another one.
    let conn = listener.connection().await.expect("idle");
    sqlx::query("DO RELEASE_LOCK(?)").bind(lock_of(CLIENT)).execute(conn).await.expect("released");
    let stopped = async {
        while can_listen.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::select! {
        _ = listener.notified() => panic!("nothing was granted"),
        stopped = timeout(SOON, stopped) => stopped.expect("the end of listening"),
    }
    heartbeat::beat(listener.connection().await.expect("idle"), CLIENT).await.expect("a heartbeat");
    assert!(!server.listens().await);
    server.end().await;
}

#[tokio::test]
async fn listener_without_its_lock_stops_listening_on_mysql() {
    listener_without_its_lock_stops_listening("SQLOCK_TEST_MYSQL_URL").await;
}

#[tokio::test]
async fn listener_without_its_lock_stops_listening_on_mariadb() {
    listener_without_its_lock_stops_listening("SQLOCK_TEST_MARIADB_URL").await;
}
