//! A minimal batching client: one statement for what many tasks ask for at once, on the floor's
//! table.
//!
//! It shows what batches gain. It has no waiters, no renewal and no recovery of lost replies.

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::json;
use sqlx::{Executor as _, Row as _};
use tokio::sync::{Mutex, mpsc, oneshot};
use tokio::task::JoinSet;

use crate::floor::{Bare, TTL, mysql_now, pg_now, sqlite_now};
use crate::place::Place;

const CONNECTIONS: usize = 2;
const MOST: usize = 256;

struct Order {
    name: String,
    owner: String,
    /// 0 releases.
    ttl: i64,
    token: oneshot::Sender<i64>,
}

pub(crate) struct Batching {
    orders: mpsc::UnboundedSender<Order>,
    connections: JoinSet<()>,
}

/// What a task needs to send orders.
#[derive(Clone)]
pub(crate) struct Sender(mpsc::UnboundedSender<Order>);

impl Batching {
    pub(crate) async fn start(place: &Place) -> Self {
        let (orders, queue) = mpsc::unbounded_channel();
        let queue = Arc::new(Mutex::new(queue));
        let most = place.floor(CONNECTIONS).await;
        let mut connections = JoinSet::new();
        for mut bare in most {
            let queue = Arc::clone(&queue);
            connections.spawn(async move {
                loop {
                    let mut batch: Vec<Order> = Vec::new();
                    if queue.lock().await.recv_many(&mut batch, MOST).await == 0 {
                        return bare.close().await;
                    }
                    let mut tokens = bare.exchange(&batch).await;
                    for order in batch {
                        let token = tokens.remove(order.name.as_bytes()).expect("each name is free or its owner's");
                        order.token.send(token).expect("the task waits");
                    }
                }
            });
        }
        Self { orders, connections }
    }

    pub(crate) fn sender(&self) -> Sender {
        Sender(self.orders.clone())
    }

    pub(crate) async fn end(self) {
        drop(self.orders);
        self.connections.join_all().await;
    }
}

impl Sender {
    pub(crate) async fn acquire_and_release(&self, name: &str) {
        for ttl in [TTL, 0] {
            let (token, answer) = oneshot::channel();
            let order = Order { name: name.into(), owner: "0123456789abcdef0123456789abcdef".into(), ttl, token };
            assert!(self.0.send(order).is_ok(), "the connections are open");
            answer.await.expect("an answer");
        }
    }
}

// $1 names, $2 owners, $3 TTLs
const POSTGRES: &str = concat!(
    "INSERT INTO floor_lease AS l
     SELECT name, owner, ",
    pg_now!(),
    ", ",
    pg_now!(),
    " + ttl FROM unnest($1::text[], $2::text[], $3::bigint[]) AS o (name, owner, ttl) ORDER BY name
         ON CONFLICT (name) DO UPDATE
        SET token = CASE WHEN l.expires_at <= ",
    pg_now!(),
    " THEN greatest(l.token + 1, excluded.token) ELSE l.token END, owner = excluded.owner, expires_at = excluded.expires_at
      WHERE l.expires_at <= ",
    pg_now!(),
    " OR l.owner = excluded.owner
  RETURNING name, token"
);

macro_rules! json_table {
    () => {
        "JSON_TABLE(?, '$[*]' COLUMNS (name VARCHAR(255) PATH '$[0]', owner VARCHAR(32) PATH '$[1]', ttl BIGINT PATH '$[2]')) AS o"
    };
}

// Orders as JSON. Assignments run from left to right.
const MYSQL: &str = concat!(
    "INSERT INTO floor_lease (name, owner, token, expires_at)
     SELECT o.name, o.owner, ",
    mysql_now!(),
    ", ",
    mysql_now!(),
    " + o.ttl FROM ",
    json_table!(),
    " ORDER BY o.name
         ON DUPLICATE KEY UPDATE
            owner = IF(floor_lease.expires_at <= ",
    mysql_now!(),
    ", VALUES(owner), floor_lease.owner),
            token = IF(floor_lease.expires_at <= ",
    mysql_now!(),
    ", GREATEST(floor_lease.token + 1, VALUES(token)), floor_lease.token),
            expires_at = IF(floor_lease.owner = VALUES(owner), VALUES(expires_at), floor_lease.expires_at)"
);
const MYSQL_TOKENS: &str =
    concat!("SELECT l.name, l.token FROM ", json_table!(), " STRAIGHT_JOIN floor_lease AS l ON l.name = o.name");

// ?1 orders as JSON
const SQLITE: &str = concat!(
    "INSERT INTO floor_lease AS l
     SELECT value ->> 0, value ->> 1, ",
    sqlite_now!(),
    ", ",
    sqlite_now!(),
    " + (value ->> 2) FROM json_each(?1) WHERE true ORDER BY 1
         ON CONFLICT (name) DO UPDATE
        SET token = CASE WHEN l.expires_at <= ",
    sqlite_now!(),
    " THEN max(l.token + 1, excluded.token) ELSE l.token END, owner = excluded.owner, expires_at = excluded.expires_at
      WHERE l.expires_at <= ",
    sqlite_now!(),
    " OR l.owner = excluded.owner
  RETURNING name, token"
);

impl Bare {
    /// Carries out orders for different names. Returns the tokens of the names that it changed.
    async fn exchange(&mut self, orders: &[Order]) -> HashMap<Vec<u8>, i64> {
        let json = || json!(orders.iter().map(|o| (&o.name, &o.owner, o.ttl)).collect::<Vec<_>>()).to_string();
        match self {
            Self::Postgres(conn) => {
                let names: Vec<&str> = orders.iter().map(|order| &*order.name).collect();
                let owners: Vec<&str> = orders.iter().map(|order| &*order.owner).collect();
                let ttls: Vec<i64> = orders.iter().map(|order| order.ttl).collect();
                let query = sqlx::query(POSTGRES).bind(names).bind(owners).bind(ttls);
                let rows = query.fetch_all(conn).await.expect("an upsert");
                rows.iter().map(|row| (row.get::<String, _>(0).into_bytes(), row.get(1))).collect()
            }
            Self::MySql(conn) => {
                let json = json();
                conn.execute(sqlx::query(MYSQL).bind(&json)).await.expect("an upsert");
                let rows = sqlx::query(MYSQL_TOKENS).bind(&json).fetch_all(conn).await.expect("tokens");
                rows.iter().map(|row| (row.get(0), row.get(1))).collect()
            }
            Self::Sqlite(conn) => {
                let rows = sqlx::query(SQLITE).bind(json()).fetch_all(conn).await.expect("an upsert");
                rows.iter().map(|row| (row.get::<String, _>(0).into_bytes(), row.get(1))).collect()
            }
        }
    }
}
