//! The rights that the guide lists for each task, and rows that another user has written by hand.

use std::time::Duration;

use sqlock::database::AccessError;
use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome, Resolution};
use sqlock::{Error, Locks};
use sqlx::Pool;

use super::schema::Restricted;
use crate::support::{Database, LONG, builder, connect, empty, fresh, soon, until_waiters};
use crate::{DATABASE, Sql};

const GUIDE: &str = include_str!("../../src/guide/security.rs");

/// A user with the rights that the guide lists for some tasks, and a client as that user.
pub(super) struct Role {
    pub(super) user: Restricted,
    pool: Pool<Sql>,
    locks: Locks,
}

impl Role {
    pub(super) async fn for_tasks(tasks: &[&str]) -> Self {
        let user = Restricted::on(empty().await).await;
        user.db.locks().await.migrate().await.expect("migrate");
        for task in tasks {
            let rows = documented_rights(task);
            assert!(!rows.is_empty(), "the guide has no rights for {task}");
            for (tables, rights) in rows {
                for table in tables {
                    user.grant_on(&rights, &table).await;
                }
            }
        }
        let pool = connect(&user.url, 3).await;
        let locks = builder(pool.clone()).build();
        Self { user, pool, locks }
    }

    pub(super) async fn end(self) {
        self.locks.shutdown().await.expect("shutdown");
        self.pool.close().await;
        self.user.drop().await;
    }
}

/// Returns the tables and rights in the guide's rows for a task.
fn documented_rights(task: &str) -> Vec<(Vec<String>, String)> {
    let rows = GUIDE.lines().filter_map(|line| line.strip_prefix("//! | ")?.strip_suffix(" |"));
    let rows = rows.filter_map(|row| {
        let [described, tables, rights] = row.split(" | ").collect::<Vec<_>>()[..] else { return None };
        let tables = tables.split(", ").map(|table| table.trim_matches('`').to_owned()).collect();
        described.starts_with(task).then(|| (tables, rights.to_owned()))
    });
    rows.collect()
}

fn assert_refused<T: std::fmt::Debug>(answer: Result<T, Error>) {
    let error = answer.expect_err("the right is missing");
    assert!(matches!(error, Error::Access { cause: AccessError::MissingPrivilege, .. }), "{error:?}");
}

/// Takes, shares, hands over, fences, extends and evicts.
async fn use_leases(role: &Role) {
    let Role { locks, pool, .. } = role;
    let lease = locks.lease("a").ttl(LONG).label("a label").acquire().await.expect("acquire");
    lease.extend(LONG).await.expect("extend");
    lease.set_note("half done").await.expect("note");
    assert_eq!(locks.ask_to_release("a").await.expect("ask"), 1);
    let mut tx = pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    tx.commit().await.expect("commit");
    let other = builder(connect(&role.user.url, 2).await).build();
    let waiter = tokio::spawn({
        let other = other.clone();
        async move { other.lease("a").ttl(LONG).acquire().await }
    });
    until_waiters(locks, "a", 1).await;
    lease.release().await.expect("release");
    let next = soon("the hand-over", waiter).await.expect("no panic").expect("acquire");
    assert!(locks.evict("a", next.token()).await.expect("evict"));
    soon("the loss", next.lost()).await;
    let shared = [locks, &other].map(|client| client.lease("b").shared().ttl(LONG).acquire());
    let [one, two] = shared;
    let (one, two) = (one.await.expect("a share"), two.await.expect("a share"));
    one.release().await.expect("release");
    two.release().await.expect("release");
    let permit = locks.semaphore("c", 2).acquire().await.expect("a permit");
    permit.release().await.expect("release");
    other.shutdown().await.expect("shutdown");
}

#[tokio::test]
async fn documented_rights_suffice_for_leases() {
    // SQLite has no users.
    if DATABASE == Database::Sqlite {
        return;
    }
    let role = Role::for_tasks(&["leases"]).await;
    use_leases(&role).await;
    assert_refused(role.locks.sweeper().retention(Duration::ZERO).sweep().await);
    let payments = Idempotency::new(&role.locks);
    let key = IdempotencyKey::new("alice", "k");
    assert_refused(payments.attempt(&key, &Fingerprint::of(["a"])).await);
    role.end().await;
}

#[tokio::test]
async fn documented_rights_suffice_for_other_tasks() {
    if DATABASE == Database::Sqlite {
        return;
    }
    let role = Role::for_tasks(&["leases", "row locks", "idempotency", "sweeping", "migrating"]).await;
    role.locks.migrate().await.expect("there is nothing to do");
    let mut tx = role.pool.begin().await.expect("begin");
    role.locks.row("r").lock(&mut tx).await.expect("row lock");
    tx.commit().await.expect("commit");

    let payments = Idempotency::new(&role.locks);
    let key = |key| IdempotencyKey::new("alice", key);
    let request = Fingerprint::of(["charge", "500"]);
    for expected in [Outcome::New(7), Outcome::Replay(7)] {
        let outcome = payments.run(&role.pool, &key("a"), &request, async |_| Ok::<_, Error>(7)).await;
        assert_eq!(outcome.expect("run"), expected);
    }
    let Outcome::New(attempt) = payments.attempt(&key("b"), &request).await.expect("attempt") else {
        panic!("nobody has asked before");
    };
    attempt.step("charge", async || Ok::<_, Error>(1)).await.expect("step");
    attempt.complete(&1).await.expect("complete");
    let Outcome::New(lost) = payments.attempt(&key("c"), &request).await.expect("attempt") else {
        panic!("nobody has asked before");
    };
    let token = lost.token();
    lost.unknown().await.expect("unknown");
    let done = Resolution::done(&1).expect("JSON").by("ann").note("in the books");
    assert!(payments.resolve(&key("c"), token, done).await.expect("resolve"));
    assert_eq!(payments.resolutions(&key("c")).await.expect("list").len(), 1);

    tokio::time::sleep(Duration::from_millis(5)).await;
    role.locks.sweeper().retention(Duration::ZERO).sweep().await.expect("sweep");
    role.end().await;
}

#[tokio::test]
async fn inspection_needs_the_right_to_read_alone() {
    if DATABASE == Database::Sqlite {
        return;
    }
    let role = Role::for_tasks(&["inspection"]).await;
    let owner = role.user.db.locks().await;
    let lease = owner.lease("a").ttl(LONG).acquire().await.expect("acquire");
    assert_eq!(role.locks.list("").await.expect("list").len(), 1);
    assert_eq!(role.locks.holders("a").await.expect("holders").len(), 1);
    assert_eq!(role.locks.waiters("a").await.expect("waiters").len(), 0);
    assert_refused(role.locks.lease("b").try_acquire().await);
    assert_refused(role.locks.evict("a", lease.token()).await);
    lease.release().await.expect("ours to the end");
    role.end().await;
}

/// Another user has written the row by hand: the lease is not the holder's any more, or "for ever".
#[tokio::test]
async fn forged_row_neither_prolongs_nor_passes_a_fence() {
    let db = fresh().await;
    let (pool, locks) = (db.pool().await, db.locks().await);
    let run = async |sql: &'static str| {
        sqlx::query(sql).execute(&pool).await.expect(sql);
    };
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    run("UPDATE sqlock_lease SET id = '00000000000000000000000000000001', token = token + 1 WHERE name = 'a'").await;
    let mut tx = pool.begin().await.expect("begin");
    let error = lease.fence(&mut tx).await.expect_err("the row is another's");
    assert!(error.is_lost(), "{error:?}");
    drop(tx);
    soon("the loss", lease.lost()).await;

    let brief = locks.lease("b").ttl(Duration::from_secs(4)).renew(false).acquire().await.expect("acquire");
    run("UPDATE sqlock_lease SET expires_at = 9000000000000000 WHERE name = 'b'").await;
    soon("the end by the holder's clock", brief.lost()).await;
    assert!(!brief.is_held());
}
