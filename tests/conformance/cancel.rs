//! Every public future may be dropped at any await point.
//!
//! Promises: 9.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use sqlock::{Lease, Locks, Owner};
use sqlx::Pool;

use super::connection_counter::ConnectionCounter;
use crate::support::{Database, LONG, SOON, TestDatabase, empty, fresh, soon, until};
use crate::{DATABASE, Sql};

/// More polls than any future here needs.
const ENOUGH: usize = 500;

/// The point at which a future is dropped: after a number of polls, at once or when it has been
/// woken for the next poll.
#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    polls: usize,
    woken: bool,
}

/// Drops a future at a point. `Some`: the future completed before.
pub(super) async fn drop_at<F: Future>(point: Point, future: F) -> Option<F::Output> {
    let mut future = Box::pin(future);
    let mut polls = 0;
    let polled = poll_fn(|cx| {
        if polls == point.polls {
            return Poll::Ready(None);
        }
        polls += 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if polls == point.polls && !point.woken => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    });
    soon("the next wake-up", polled).await
}

/// Runs a case for every point at which its future can be dropped, until the future completes
/// before.
pub(super) async fn everywhere(mut case: impl AsyncFnMut(Point) -> bool) {
    for polls in 0..ENOUGH {
        let done = case(Point { polls, woken: false }).await;
        let done_too = case(Point { polls, woken: true }).await;
        if done && done_too {
            assert!(polls > 0, "it must be polled to be done");
            return;
        }
    }
    panic!("not done after {ENOUGH} polls");
}

pub(super) struct CancelFixture {
    pub(super) db: TestDatabase,
    counter: ConnectionCounter,
    /// The client whose futures are dropped, and the application's pool that it was made from.
    pub(super) ours: Locks,
    pub(super) pool: Pool<Sql>,
    pub(super) theirs: Locks,
}

impl CancelFixture {
    pub(super) async fn new() -> Self {
        let mut db = fresh().await;
        let counter = ConnectionCounter::of(&mut db).await;
        let pool = db.pool_of(2).await;
        let ours = crate::support::builder(pool.clone()).build();
        let theirs = db.locks().await;
        Self { ours, theirs, pool, counter, db }
    }

    /// Checks that nothing is left: the name is free, has no waiters, no transaction is open, and
    /// the pool works.
    pub(super) async fn is_clean(&self) {
        let lease = soon("the name", self.theirs.lease("a").ttl(LONG).acquire()).await.expect("acquire");
        lease.release().await.expect("release");
        self.nothing_is_held().await;
        self.counter.no_transactions().await;
        self.pool_works().await;
    }

    async fn nothing_is_held(&self) {
        // A grant without a receiver is released a moment later.
        until("the end of all leases", async || self.theirs.list("").await.expect("list").is_empty()).await;
    }

    async fn pool_works(&self) {
        let mut one = self.pool.begin().await.expect("begin");
        let mut two = self.pool.begin().await.expect("begin");
        for tx in [&mut one, &mut two] {
            sqlx::query("SELECT 1").execute(&mut **tx).await.expect("select");
        }
        one.commit().await.expect("commit");
        two.commit().await.expect("commit");
    }

    async fn lease(&self) -> Lease {
        soon("the grant", self.ours.lease("a").ttl(LONG).acquire()).await.expect("acquire")
    }
}

#[tokio::test]
async fn dropped_acquire_leaves_nothing_behind() {
    let fixture = CancelFixture::new().await;
    everywhere(async |point| {
        let done = drop_at(point, fixture.ours.lease("a").ttl(LONG).acquire()).await;
        let done = done.map(|lease| lease.expect("acquire")).is_some();
        fixture.is_clean().await;
        done
    })
    .await;
}

#[tokio::test]
async fn dropped_acquire_by_owner_keeps_outer_hold() {
    let fixture = CancelFixture::new().await;
    let owner = Owner::random();
    everywhere(async |point| {
        let done = drop_at(point, fixture.ours.lease("a").ttl(LONG).owner(owner).acquire()).await;
        let done = done.map(|lease| lease.expect("acquire")).is_some();
        fixture.is_clean().await;
        done
    })
    .await;
    // Entering again leaves the outer hold intact; it ends with its own release.
    everywhere(async |point| {
        let outer = fixture.ours.lease("a").ttl(LONG).owner(owner).acquire().await.expect("acquire");
        let done = drop_at(point, fixture.ours.lease("a").ttl(LONG).owner(owner).acquire()).await;
        let done = done.map(|lease| lease.expect("acquire")).is_some();
        outer.extend(LONG).await.expect("still held");
        outer.release().await.expect("ours to the end");
        fixture.is_clean().await;
        done
    })
    .await;
}

/// Drops a waiter everywhere, with and without a limit, while another holder releases the name.
async fn drop_waiter_everywhere(fixture: &CancelFixture, hold: impl AsyncFn() -> Lease) {
    for wait in [None, Some(SOON)] {
        everywhere(async |point| {
            let holder = hold().await;
            let leaves = tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(20)).await;
                holder.release().await
            });
            let request = fixture.ours.lease("a").ttl(LONG);
            let request = if let Some(wait) = wait { request.wait(wait) } else { request };
            let done = drop_at(point, request.acquire()).await;
            let done = done.map(|lease| lease.expect("acquire")).is_some();
            leaves.await.expect("no panic").expect("release");
            fixture.is_clean().await;
            done
        })
        .await;
    }
}

#[tokio::test]
async fn dropped_local_waiter_leaves_nothing_behind() {
    let fixture = CancelFixture::new().await;
    drop_waiter_everywhere(&fixture, async || fixture.lease().await).await;
}

#[tokio::test]
async fn dropped_remote_waiter_leaves_nothing_behind() {
    let fixture = CancelFixture::new().await;
    let hold = async || soon("the grant", fixture.theirs.lease("a").ttl(LONG).acquire()).await.expect("acquire");
    drop_waiter_everywhere(&fixture, hold).await;
}

#[tokio::test]
async fn dropped_timed_acquire_leaves_nothing_behind() {
    let fixture = CancelFixture::new().await;
    everywhere(async |point| {
        let holder = soon("the grant", fixture.theirs.lease("a").ttl(LONG).acquire()).await.expect("acquire");
        let request = fixture.ours.lease("a").ttl(LONG).wait(Duration::from_millis(30));
        let done = drop_at(point, request.acquire()).await;
        let done = done.map(|lease| lease.expect_err("held")).is_some_and(|error| error.is_timeout());
        holder.release().await.expect("release");
        fixture.is_clean().await;
        done
    })
    .await;
}

#[tokio::test]
async fn dropped_try_acquire_leaves_nothing_behind() {
    let fixture = CancelFixture::new().await;
    everywhere(async |point| {
        let done = drop_at(point, fixture.ours.lease("a").ttl(LONG).try_acquire()).await;
        // The request of the call that was dropped before may have held the name for a moment.
        let done = done.is_some_and(|lease| lease.expect("try").is_some());
        fixture.is_clean().await;
        done
    })
    .await;
}

#[tokio::test]
async fn dropped_try_acquire_does_not_disturb_the_holder() {
    let fixture = CancelFixture::new().await;
    everywhere(async |point| {
        let holder = fixture.lease().await;
        let here = drop_at(point, fixture.ours.lease("a").try_acquire()).await;
        let there = drop_at(point, fixture.theirs.lease("a").try_acquire()).await;
        let done = [here, there].map(|tried| tried.map(|lease| assert!(lease.expect("try").is_none())).is_some());
        holder.extend(LONG).await.expect("still held");
        holder.release().await.expect("ours to the end");
        fixture.is_clean().await;
        done == [true, true]
    })
    .await;
}

#[tokio::test]
async fn dropped_run_releases_the_name() {
    let fixture = CancelFixture::new().await;
    everywhere(async |point| {
        let work = fixture.ours.lease("a").ttl(LONG).run(async |lease| {
            tokio::task::yield_now().await;
            lease.extend(LONG).await.expect("extend");
            let tx = fixture.pool.begin().await.expect("begin");
            tokio::task::yield_now().await;
            tx.rollback().await.expect("rollback");
        });
        let done = drop_at(point, work).await.map(|outcome| outcome.expect("run")).is_some();
        // The work's own BEGIN is sqlx's, which may leave a transaction open when it is dropped.
        let lease = soon("the name", fixture.theirs.lease("a").ttl(LONG).acquire()).await.expect("acquire");
        lease.release().await.expect("release");
        fixture.nothing_is_held().await;
        done
    })
    .await;
}

#[tokio::test]
async fn dropped_release_still_frees_the_name() {
    let fixture = CancelFixture::new().await;
    everywhere(async |point| {
        let lease = fixture.lease().await;
        let done = drop_at(point, lease.release()).await.map(|verdict| verdict.expect("release")).is_some();
        fixture.is_clean().await;
        done
    })
    .await;
}

#[tokio::test]
async fn dropped_release_still_grants_local_waiter() {
    let fixture = CancelFixture::new().await;
    everywhere(async |point| {
        let lease = fixture.lease().await;
        let mut next = std::pin::pin!(fixture.ours.lease("a").ttl(LONG).acquire());
        tokio::time::timeout(Duration::from_millis(5), &mut next).await.expect_err("held");
        let done = drop_at(point, lease.release()).await.map(|verdict| verdict.expect("release")).is_some();
        let next = soon("the turn", next).await.expect("acquire");
        next.release().await.expect("ours to the end");
        fixture.is_clean().await;
        done
    })
    .await;
}

#[tokio::test]
async fn dropped_extend_and_lost_keep_the_lease() {
    let fixture = CancelFixture::new().await;
    everywhere(async |point| {
        let lease = fixture.lease().await;
        let done = drop_at(point, lease.extend(LONG)).await.map(|extended| extended.expect("extend")).is_some();
        // It stays pending while the lease is held, so it is dropped without waiting for the next
        // wake-up.
        let held = drop_at(Point { woken: false, ..point }, lease.lost());
        let _ = tokio::time::timeout(Duration::from_millis(1), held).await;
        assert!(lease.is_held());
        lease.release().await.expect("ours to the end");
        fixture.is_clean().await;
        done
    })
    .await;
}

#[tokio::test]
async fn dropped_fence_leaves_no_open_transaction() {
    let fixture = CancelFixture::new().await;
    everywhere(async |point| {
        let lease = fixture.lease().await;
        let mut tx = fixture.pool.begin().await.expect("begin");
        let done = drop_at(point, lease.fence(&mut tx)).await.map(|fenced| fenced.expect("fence")).is_some();
        drop(tx);
        lease.release().await.expect("ours to the end");
        fixture.is_clean().await;
        done
    })
    .await;
}

#[tokio::test]
async fn dropped_list_and_inspect_leave_no_transaction() {
    let fixture = CancelFixture::new().await;
    let held = fixture.ours.lease("b").ttl(LONG).acquire().await.expect("acquire");
    everywhere(async |point| {
        let listed = drop_at(point, fixture.ours.list("")).await;
        let inspected = drop_at(point, fixture.ours.inspect("b")).await;
        let done = [
            listed.map(|listed| assert_eq!(listed.expect("list").len(), 1)).is_some(),
            inspected.map(|info| assert!(info.expect("inspect").is_some())).is_some(),
        ];
        held.extend(LONG).await.expect("still held");
        fixture.counter.no_transactions().await;
        fixture.pool_works().await;
        done == [true, true]
    })
    .await;
    held.release().await.expect("release");
    fixture.is_clean().await;
}

#[tokio::test]
async fn dropped_evict_can_be_repeated() {
    let fixture = CancelFixture::new().await;
    everywhere(async |point| {
        let lease = soon("the grant", fixture.theirs.lease("a").ttl(LONG).acquire()).await.expect("acquire");
        let done = drop_at(point, fixture.ours.evict("a", lease.token())).await;
        let done = done.map(|evicted| assert!(evicted.expect("evict"))).is_some();
        // The eviction can be repeated: either this call ends the holding, or the first call has.
        fixture.ours.evict("a", lease.token()).await.expect("evict");
        assert!(lease.release().await.expect_err("evicted").is_lost());
        fixture.is_clean().await;
        done
    })
    .await;
}

#[tokio::test]
async fn dropped_sweep_keeps_held_names() {
    let fixture = CancelFixture::new().await;
    let held = fixture.theirs.lease("b").ttl(LONG).acquire().await.expect("acquire");
    everywhere(async |point| {
        for name in ["c", "d", "e"] {
            let lease = soon("the grant", fixture.theirs.lease(name).acquire()).await.expect("acquire");
            lease.release().await.expect("release");
        }
        let sweeper = fixture.ours.sweeper().retention(Duration::ZERO).batch(1);
        let done = drop_at(point, sweeper.sweep()).await.map(|purged| purged.expect("sweep")).is_some();
        held.extend(LONG).await.expect("still held");
        fixture.counter.no_transactions().await;
        fixture.pool_works().await;
        done
    })
    .await;
    held.release().await.expect("release");
    fixture.is_clean().await;
}

#[tokio::test]
async fn dropped_resume_can_be_repeated() {
    let fixture = CancelFixture::new().await;
    everywhere(async |point| {
        let lease = soon("the grant", fixture.theirs.lease("a").ttl(LONG).acquire()).await.expect("acquire");
        let exported = lease.export().expect("export");
        let done = drop_at(point, fixture.ours.resume(exported.clone())).await;
        match done {
            Some(lease) => lease.expect("resume").release().await.expect("ours to the end"),
            // The lease can be resumed again.
            None => {
                let lease = fixture.ours.resume(exported).await.expect("resume");
                lease.release().await.expect("ours to the end");
                fixture.is_clean().await;
                return false;
            }
        }
        fixture.is_clean().await;
        true
    })
    .await;
}

#[tokio::test]
async fn dropped_shutdown_still_releases_leases() {
    let fixture = CancelFixture::new().await;
    everywhere(async |point| {
        let locks = fixture.db.locks().await;
        let lease = soon("the grant", locks.lease("a").ttl(LONG).acquire()).await.expect("acquire");
        let other = soon("the grant", locks.lease("b").ttl(LONG).acquire()).await.expect("acquire");
        let done = drop_at(point, locks.shutdown()).await.map(|outcome| outcome.expect("shutdown")).is_some();
        if point.polls > 0 {
            // The releases have started although the handles still exist.
            let next = soon("the name", fixture.theirs.lease("b").ttl(LONG).acquire()).await.expect("acquire");
            next.release().await.expect("release");
        }
        drop((lease, other));
        fixture.is_clean().await;
        done
    })
    .await;
}

#[tokio::test]
async fn dropped_migrate_can_be_repeated() {
    let mut db = empty().await;
    let counter = ConnectionCounter::of(&mut db).await;
    let pool = db.pool_of(2).await;
    everywhere(async |point| {
        let done = drop_at(point, crate::support::builder(pool.clone()).build().migrate()).await;
        let done = done.map(|migrated| migrated.expect("migrate")).is_some();
        counter.no_transactions().await;
        assert_eq!(counter.advisory_locks().await, 0);
        if DATABASE.is_mysql() {
            // A client takes over an interrupted migration when it is too old to be running.
            let older = "UPDATE _sqlock_migrations SET installed_on = installed_on - INTERVAL 1 MINUTE";
            let _ = sqlx::query(older).execute(&pool).await; // the table may not exist
        }
        // Any client can call it again.
        let again = db.locks().await;
        soon("the migration", again.migrate()).await.expect("migrate");
        again.lease("a").acquire().await.expect("acquire").release().await.expect("release");
        again.shutdown().await.expect("shutdown");
        for table in TABLES {
            let count = sqlx::AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
            sqlx::query(count).execute(&pool).await.unwrap_or_else(|e| panic!("{table}: {e}"));
        }
        if !done {
            drop_tables(&pool).await;
        }
        done
    })
    .await;
}

const TABLES: &[&str] = match DATABASE {
    Database::Sqlite => &[
        "sqlock_client",
        "sqlock_lease",
        "sqlock_entry",
        "sqlock_note",
        "sqlock_idem",
        "sqlock_idem_step",
        "sqlock_idem_resolution",
    ],
    _ => &[
        "sqlock_client",
        "sqlock_lease",
        "sqlock_entry",
        "sqlock_note",
        "sqlock_row",
        "sqlock_idem",
        "sqlock_idem_step",
        "sqlock_idem_resolution",
    ],
};

async fn drop_tables(pool: &Pool<Sql>) {
    sqlx::query("DROP VIEW IF EXISTS sqlock_holders").execute(pool).await.expect("drop the view");
    let tables = [TABLES, &["_sqlock_migrations"]].concat();
    // A statement of SQLite drops one table.
    let at_once = if DATABASE == Database::Sqlite { 1 } else { tables.len() };
    for tables in tables.chunks(at_once) {
        let drop = sqlx::AssertSqlSafe(format!("DROP TABLE IF EXISTS {}", tables.join(", ")));
        sqlx::query(drop).execute(pool).await.expect("drop the tables");
    }
}
