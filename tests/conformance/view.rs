//! The view `sqlock_holders`, for people who use SQL.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlock::Locks;
use sqlx::{AssertSqlSafe, Pool};

use crate::support::{Database, LONG, fresh, soon, until};
use crate::{DATABASE, Sql};

/// A row of the view. Times are milliseconds since the epoch.
#[derive(Debug)]
struct Row {
    state: String,
    position: Option<i64>,
    mode: String,
    permits: Option<i64>,
    holder: String,
    owner: Option<String>,
    token: Option<i64>,
    label: String,
    acquired_at: Option<i64>,
    waiting_since: Option<i64>,
    expires_at: i64,
}

impl Row {
    fn place(&self) -> (&str, Option<i64>, &str, Option<i64>) {
        (&self.state, self.position, &self.mode, self.permits)
    }
}

type Columns = (
    String,
    Option<i64>,
    String,
    Option<i64>,
    String,
    Option<String>,
    Option<i64>,
    String,
    Option<i64>,
    Option<i64>,
    i64,
);

async fn rows(pool: &Pool<Sql>, name: &str) -> Vec<Row> {
    let times = ["acquired_at", "waiting_since", "expires_at"].map(|time| match DATABASE {
        Database::Postgres => format!("(extract(epoch FROM {time}) * 1000)::bigint AS {time}"),
        Database::Sqlite => format!("CAST(round((julianday({time}) - 2440587.5) * 86400000) AS INTEGER) AS {time}"),
        _ => format!("CAST(UNIX_TIMESTAMP({time}) * 1000 AS SIGNED) AS {time}"),
    });
    let sql = format!(
        "SELECT state, position, mode, permits, holder, owner, token, label, {} FROM sqlock_holders
          WHERE name = '{name}' ORDER BY position IS NOT NULL, position, token",
        times.join(", ")
    );
    let rows: Vec<Columns> = sqlx::query_as(AssertSqlSafe(sql)).fetch_all(pool).await.expect("the view");
    rows.into_iter()
        .map(|(state, position, mode, permits, holder, owner, token, label, acquired_at, waiting_since, expires_at)| {
            Row { state, position, mode, permits, holder, owner, token, label, acquired_at, waiting_since, expires_at }
        })
        .collect()
}

/// Compares the view with the library's result for a name.
async fn assert_agrees(pool: &Pool<Sql>, locks: &Locks, name: &str) {
    let before = locks.holders(name).await.expect("holders");
    let rows = rows(pool, name).await;
    // A heartbeat may have come between.
    let after = locks.holders(name).await.expect("holders");
    let (held, waiting): (Vec<_>, Vec<_>) = rows.iter().partition(|row| row.position.is_none());
    let near =
        |shown: Option<i64>, answer: DateTime<Utc>| shown.is_some_and(|at| (at - answer.timestamp_millis()).abs() <= 1);
    assert_eq!((held.len(), before.len()), (after.len(), after.len()), "{rows:?}");
    for (row, (before, after)) in held.iter().zip(before.iter().zip(&after)) {
        assert_eq!((row.token, &row.label, &row.holder), (Some(after.token.get()), &after.label, &after.holder));
        assert_eq!(row.owner, after.owner.map(|owner| owner.to_string()));
        assert!(near(row.acquired_at, after.acquired_at) && row.waiting_since.is_none(), "{row:?}");
        let expiry = before.expires_at.timestamp_millis() - 1..=after.expires_at.timestamp_millis() + 1;
        assert!(expiry.contains(&row.expires_at), "{row:?}, {expiry:?}");
    }
    let waiters = locks.waiters(name).await.expect("waiters");
    assert_eq!(waiting.len(), waiters.len(), "{rows:?}");
    for (row, answer) in waiting.iter().zip(&waiters) {
        assert_eq!((row.token, &row.label, &row.holder), (None, &answer.label, &answer.holder));
        assert_eq!((row.position, row.acquired_at), (Some(answer.ahead as i64 + 1), None));
        assert!(near(row.waiting_since, answer.since), "{row:?}, {answer:?}");
    }
}

#[tokio::test]
async fn view_shows_holder_and_its_waiters() {
    let db = fresh().await;
    let (pool, locks) = (db.pool().await, db.locks().await);
    let lease = locks.lease("a").ttl(LONG).renew(false).label("Ünïcode").acquire().await.expect("acquire");
    let mut waiting = Vec::new();
    // Of other clients: a client's own waiters may wait in memory.
    let others = [db.locks().await, db.locks().await];
    let requests = [others[0].lease("a").label("one"), others[1].lease("a").shared()];
    for (i, request) in requests.into_iter().enumerate() {
        waiting.push(tokio::spawn(request.ttl(LONG).acquire()));
        until("the waiter", async || locks.waiters("a").await.expect("waiters").len() > i).await;
    }
    assert_agrees(&pool, &locks, "a").await;
    let rows = rows(&pool, "a").await;
    let places: Vec<_> = rows.iter().map(Row::place).collect();
    assert_eq!(
        places,
        [
            ("held", None, "exclusive", None),
            ("waiting", Some(1), "exclusive", None),
            ("waiting", Some(2), "shared", None),
        ]
    );
    lease.release().await.expect("release");
    for waiting in waiting {
        let lease = soon("the grant", waiting).await.expect("no panic").expect("acquire");
        lease.release().await.expect("release");
    }
    assert_eq!(self::rows(&pool, "a").await.len(), 0);
}

#[tokio::test]
async fn view_shows_each_share_and_permit() {
    let db = fresh().await;
    let (pool, locks) = (db.pool().await, db.locks().await);
    let shared = || locks.lease("a").shared().ttl(LONG).renew(false);
    let leases = [
        shared().acquire().await.expect("a share"),
        shared().acquire().await.expect("a share"),
        locks.semaphore("b", 3).ttl(LONG).acquire_many(2).await.expect("permits"),
    ];
    assert_agrees(&pool, &locks, "a").await;
    assert_agrees(&pool, &locks, "b").await;
    let places = |rows: &[Row]| rows.iter().map(|row| (row.mode.clone(), row.permits)).collect::<Vec<_>>();
    assert_eq!(places(&rows(&pool, "a").await), [("shared".into(), None), ("shared".into(), None)]);
    assert_eq!(places(&rows(&pool, "b").await), [("permits".into(), Some(2))]);
    for lease in leases {
        lease.release().await.expect("release");
    }
}

#[tokio::test]
async fn view_omits_expired_lease_and_shows_kept_name() {
    let db = fresh().await;
    let (pool, locks) = (db.pool().await, db.locks().await);
    let expiring = locks.lease("a").ttl(Duration::from_millis(500)).renew(false).acquire().await.expect("acquire");
    let kept = locks.lease("b").ttl(LONG).hold_at_least(LONG).acquire().await.expect("acquire");
    kept.release().await.expect("release");
    assert_agrees(&pool, &locks, "b").await;
    assert_eq!(rows(&pool, "b").await.iter().map(Row::place).collect::<Vec<_>>(), [("kept", None, "exclusive", None)]);
    expiring.lost().await;
    until("the expiry", async || rows(&pool, "a").await.is_empty()).await;
    assert_agrees(&pool, &locks, "a").await;
}
