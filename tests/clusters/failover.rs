//! Clients with several URLs use the first server that accepts writes.

use std::time::Duration;

use sqlock::{Error, Locks, LocksBuilder};
use sqlx::{AssertSqlSafe, MySqlPool};

use super::server::{Kind, Options, Server};
use super::{on, soon, unavailable, urls};

async fn execute(server: &Server, sql: &str) {
    let pool = MySqlPool::connect(&server.url()).await.expect("a connection");
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&pool).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
    pool.close().await;
}

/// A user who may not write where it is forbidden, unlike root.
async fn as_application(server: &Server) -> String {
    execute(
        server,
        "CREATE USER app@'127.0.0.1' IDENTIFIED BY 'secret,of/ours'; GRANT ALL ON test.* TO app@'127.0.0.1'",
    )
    .await;
    server.url().replace("root@", "app:secret%2Cof%2Fours@")
}

async fn client_leaves_read_only_server(kind: Kind) {
    let (a, mut b) = (Server::start(kind), Server::start(kind));
    let (url_a, url_b) = (as_application(&a).await, as_application(&b).await);
    for server in [&a, &b] {
        on(&server.url()).build().migrate().await.expect("migrate");
    }
    execute(&b, "SET GLOBAL read_only = 1").await;
    // The second of the two cannot be written, and then the first cannot be any more, on a
    // connection that goes on.
    let locks = Locks::connect(&format!("{url_b},{url_a}")).await.expect("one can be written");
    locks.lease("a").acquire().await.expect("acquired").release().await.expect("held");
    let on_a = on(&a.url()).build();
    assert!(on_a.list("").await.expect("there").is_empty());
    let held = locks.lease("b").acquire().await.expect("acquired");
    assert_eq!(on_a.list("").await.expect("there").len(), 1, "it was written where it can be");
    held.release().await.expect("held");
    execute(&b, "SET GLOBAL read_only = 0").await;
    execute(&a, "SET GLOBAL read_only = 1").await;
    let held = locks.lease("c").acquire().await.expect("elsewhere");
    assert_eq!(on(&b.url()).build().list("").await.expect("there").len(), 1);
    held.release().await.expect("held");

    // A client with one server receives the reason.
    let reason = unavailable(on(&url_a).connect().await);
    assert!(reason.contains("is read-only") && !reason.contains("secret"), "{reason}");
    let reason = unavailable(on(&a.url()).connect().await);
    assert!(reason.contains("is read-only"), "also for a user with the right to write: {reason}");
    b.kill();
    let reason = unavailable(soon("an answer", Locks::connect(&format!("{url_b},{url_a}"))).await);
    assert!(reason.contains("none of the 2") && reason.contains("is read-only"), "{reason}");
    assert!(reason.contains(&b.port().to_string()) && !reason.contains("secret"), "{reason}");
}

#[tokio::test]
async fn client_leaves_read_only_mariadb_server() {
    client_leaves_read_only_server(Kind::MariaDb).await;
}

#[tokio::test]
async fn client_leaves_read_only_mysql_server() {
    client_leaves_read_only_server(Kind::MySql).await;
}

/// The first server accepts connections and does not reply.
#[tokio::test]
async fn connect_skips_unresponsive_server() {
    let (a, b) = (Server::start_with(Kind::Postgres, Options::default()), Server::start(Kind::Postgres));
    a.pause();
    let locks = soon("the other one", Locks::connect(&urls([&a, &b]))).await.expect("it can be reached");
    locks.migrate().await.expect("migrate");
    let lease = locks.lease("a").ttl(Duration::from_secs(10)).acquire().await.expect("acquired");
    lease.release().await.expect("held");
    a.resume();
}

#[tokio::test]
async fn invalid_url_list_is_refused_without_showing_passwords() {
    for (urls, why) in [
        ("", "empty"),
        ("  ", "empty"),
        ("postgres://u:secret@a/x,mysql://u:secret@b/x", "of one kind"),
        ("sqlite://secret.db,sqlite://other.db", "SQLite"),
        ("oracle://u:secret@a/x", "must begin with"),
        ("u:secret@a/x", "must begin with"),
        ("postgres://u:secret@a/x,", "empty"),
        (",postgres://u:secret@a/x", "must begin with"),
        ("postgres://u:secret@a:port/x,postgres://u:secret@b/x", "cannot be parsed"),
    ] {
        let error = match LocksBuilder::from_urls(urls) {
            Err(error @ Error::InvalidUrl { .. }) => error.to_string(),
            other => panic!("{urls}: {other:?}"),
        };
        assert!(error.contains(why) && !error.contains("secret"), "{urls}: {error}");
    }
    // A comma in a password, or in a file's name, separates nothing.
    for urls in ["postgres://u:a,b@h/x,postgres://u:a,b@i/x", "mysql://u:a,b@h/x , mariadb://u@i/x", "sqlite://a,b.db"]
    {
        let _ = LocksBuilder::from_urls(urls).unwrap_or_else(|e| panic!("{urls}: {e}"));
    }
    let error =
        LocksBuilder::from_urls("mysql://h/x").expect("a URL").synchronous().map(|_| ()).expect_err("no such thing");
    assert!(matches!(error, Error::Unsupported { .. }));
}
