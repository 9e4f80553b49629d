//! Notifications of PostgreSQL: a client hears at once that another one has granted it a name. Promises: 7, 14.

use std::time::Duration;

use sqlx::postgres::PgListener;
use tokio::time::sleep;

use crate::support::{connect, fresh, soon};

/// The client that waits tells that it listens, and a release that hands the name over to it notifies it and nobody else.
#[tokio::test]
async fn release_notifies_the_client_that_is_next() {
    let db = fresh().await;
    let (locks, waiter) = (db.locks().await, db.locks().await);
    let pool = connect(&db.url, 2).await;
    let lease = locks.lease("a").acquire().await.expect("acquire");
    let next = tokio::spawn(waiter.lease("a").acquire());
    // Both clients beat, and listen from their second heartbeat on.
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
    let asks = "SELECT client FROM sqlock_entry WHERE name = 'a' AND token = 0";
    let waits: String = sqlx::query_scalar(asks).fetch_one(&pool).await.expect("an entry");
    let mut listener = PgListener::connect_with(&pool).await.expect("a listener");
    let channels: Vec<String> = clients.iter().map(|client| format!("sqlock_{client}")).collect();
    listener.listen_all(channels.iter().map(String::as_str)).await.expect("listen");
    lease.release().await.expect("release");
    let heard = soon("the notification", listener.recv()).await.expect("connected");
    assert_eq!((heard.channel(), heard.payload()), (&*format!("sqlock_{waits}"), "a"));
    let lease = soon("the lease", next).await.expect("no panic").expect("acquire");
    // A release that nobody waits for notifies nobody.
    lease.release().await.expect("release");
    sqlx::query("SELECT pg_notify($1, 'end')").bind(&channels[0]).execute(&pool).await.expect("notify");
    let heard = soon("the end", listener.recv()).await.expect("connected");
    assert_eq!(heard.payload(), "end");
}
