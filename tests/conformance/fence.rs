//! Fenced transactions (promise 6) against a takeover before or after the fence, an eviction, the
//! holder's own release, a second transaction, and workers that overrun their leases.
//!
//! Promises: 6.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use sqlock::lease::FenceError;
use sqlock::{Error, Lease, Locks, LossCause};
use sqlx::{AssertSqlSafe, Executor, Pool, Transaction};
use tokio::time::{sleep, timeout};

use crate::support::{BRIEF, Database, SOON, TestDatabase, connect, fresh, soon, until};
use crate::{DATABASE, Sql};

/// A database with the tables of this crate, and a table of counters.
pub(super) struct Counters {
    pub(super) db: TestDatabase,
    pub(super) pool: Pool<Sql>,
}

pub(super) async fn counters() -> Counters {
    counters_in(fresh().await).await
}

pub(super) async fn counters_in(db: TestDatabase) -> Counters {
    let pool = db.pool().await;
    if DATABASE == Database::Sqlite {
        // In this mode readers block no writer, as on the other databases.
        run(&pool, "PRAGMA journal_mode = WAL").await;
    }
    run(&pool, "CREATE TABLE counter (id INTEGER NOT NULL PRIMARY KEY, value BIGINT NOT NULL)").await;
    run(&pool, "INSERT INTO counter (id, value) VALUES (1, 0), (2, 0)").await;
    Counters { db, pool }
}

impl Counters {
    pub(super) async fn value(&self, id: u8) -> i64 {
        let sql = format!("SELECT value FROM counter WHERE id = {id}");
        sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&self.pool).await.expect("the counter can be read")
    }

    /// Makes a pool with this isolation level.
    pub(super) async fn at(&self, level: &'static str) -> IsolatedPool {
        IsolatedPool::at(&self.db.url, level).await
    }
}

/// Returns the isolation levels of a transaction. SQLite has only the choice of when to take the
/// write lock.
pub(super) fn levels() -> &'static [&'static str] {
    match DATABASE {
        Database::Sqlite => &["DEFERRED", "IMMEDIATE", "EXCLUSIVE"],
        _ => &["READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"],
    }
}

/// An application's pool whose transactions have a certain isolation level.
#[derive(Clone)]
pub(super) struct IsolatedPool {
    pool: Pool<Sql>,
    level: &'static str,
}

impl IsolatedPool {
    pub(super) async fn at(url: &str, level: &'static str) -> Self {
        let set = match DATABASE {
            Database::Postgres => format!("SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL {level}"),
            Database::MySql | Database::MariaDb => format!("SET SESSION TRANSACTION ISOLATION LEVEL {level}"),
            Database::Sqlite => "SELECT 1".into(),
        };
        let lazy = connect(url, 1).await;
        let pool = sqlx::pool::PoolOptions::<Sql>::new()
            .max_connections(10)
            .acquire_timeout(SOON)
            .after_connect(move |conn, _| {
                let set = set.clone();
                Box::pin(async move { conn.execute(AssertSqlSafe(set)).await.map(|_| ()) })
            })
            .connect_lazy_with((*lazy.connect_options()).clone());
        Self { pool, level }
    }

    pub(super) fn pool(&self) -> &Pool<Sql> {
        &self.pool
    }

    pub(super) async fn begin(&self) -> Transaction<'static, Sql> {
        let begun = match DATABASE {
            Database::Sqlite => self.pool.begin_with(AssertSqlSafe(format!("BEGIN {}", self.level))).await,
            _ => self.pool.begin().await,
        };
        begun.unwrap_or_else(|e| panic!("{} begins: {e}", self.level))
    }
}

pub(super) async fn run(pool: &Pool<Sql>, sql: &'static str) {
    pool.execute(sql).await.unwrap_or_else(|e| panic!("{sql}: {e}"));
}

/// Makes a app write.
pub(super) async fn add_one(tx: &mut Transaction<'_, Sql>, id: u8) -> Result<(), sqlx::Error> {
    let sql = format!("UPDATE counter SET value = value + 1 WHERE id = {id}");
    sqlx::query(AssertSqlSafe(sql)).execute(&mut **tx).await.map(|_| ())
}

/// Checks that no other client acquires the name. A server refuses at once; on SQLite, where the
/// fenced transaction has the only write lock, the answer may come only after its end.
pub(super) async fn assert_kept_out(rival: &Locks, name: &str) {
    let request = rival.lease(name).try_acquire();
    if DATABASE == Database::Sqlite {
        let answer = timeout(Duration::from_millis(300), request).await;
        assert!(matches!(answer, Err(_) | Ok(Ok(None))), "granted in spite of the write lock: {answer:?}");
    } else {
        let answer = soon("a refusal", request).await;
        assert!(matches!(answer, Ok(None)), "the name should be taken: {answer:?}");
    }
}

/// Waits until no holder of a name is valid by the database's clock, which is later than the holder
/// itself counts: from then on, only an open fence keeps the name.
pub(super) async fn until_expired(locks: &Locks, name: &str) {
    until("the expiry in the database", async || locks.inspect(name).await.expect("inspect").is_none()).await;
}

/// Spawns a waiter of another client.
pub(super) fn spawn_waiter(rival: &Locks, name: &'static str) -> tokio::task::JoinHandle<Lease> {
    let request = rival.lease(name).wait(SOON);
    tokio::spawn(async move { request.acquire().await.expect("the next one gets the lease") })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Commit,
    Rollback,
}

async fn takeover_after_the_fence_waits_for(end: End) {
    let counters = counters().await;
    let (ours, theirs, others) = (counters.db.locks().await, counters.db.locks().await, counters.db.locks().await);
    let lease = ours.lease("a").ttl(BRIEF).renew(false).acquire().await.expect("acquire");
    let token = lease.token();
    let mut tx = counters.pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    add_one(&mut tx, 1).await.expect("write");
    let next = spawn_waiter(&theirs, "a");
    assert_eq!(soon("the expiry", lease.lost()).await, LossCause::Expired);
    until_expired(&others, "a").await;
    assert_kept_out(&others, "a").await;
    assert!(!next.is_finished(), "somebody got in before the fenced transaction had ended");
    match end {
        End::Commit => tx.commit().await.expect("commit"),
        End::Rollback => tx.rollback().await.expect("rollback"),
    }
    let next = soon("the takeover", next).await.expect("no panic");
    assert!(next.token() > token, "tokens only rise");
    assert_eq!(counters.value(1).await, i64::from(end == End::Commit));
}

#[tokio::test]
async fn takeover_after_the_fence_waits_for_the_commit() {
    takeover_after_the_fence_waits_for(End::Commit).await;
}

#[tokio::test]
async fn takeover_after_the_fence_waits_for_the_rollback() {
    takeover_after_the_fence_waits_for(End::Rollback).await;
}

/// The holder does not know of the takeover: its lease has expired only by the database's clock.
#[tokio::test]
async fn fence_fails_after_a_takeover() {
    let counters = counters().await;
    let (ours, theirs) = (counters.db.locks().await, counters.db.locks().await);
    let lease = ours.lease("a").ttl(Duration::from_secs(600)).renew(false).acquire().await.expect("acquire");
    run(&counters.pool, "UPDATE sqlock_lease SET expires_at = 1").await;
    let next = theirs.lease("a").try_acquire().await.expect("try").expect("expired");
    assert!(next.token() > lease.token());

    assert!(lease.is_held(), "by its own clock: only the database can tell");
    let mut tx = counters.pool.begin().await.expect("begin");
    let error = lease.fence(&mut tx).await.expect_err("taken over");
    assert!(matches!(error, Error::Lost { cause: LossCause::Superseded, .. }), "{error}");
    tx.rollback().await.expect("rollback");
    assert_eq!(counters.value(1).await, 0);

    let mut tx = counters.pool.begin().await.expect("begin");
    next.fence(&mut tx).await.expect("the new holder's transaction is fenced");
    add_one(&mut tx, 1).await.expect("write");
    tx.commit().await.expect("commit");
    assert_eq!(counters.value(1).await, 1);
}

/// The tables of this crate are in both databases, and the lease is in one of them.
#[tokio::test]
async fn fence_in_another_database_loses_nothing() {
    let (counters, elsewhere) = (counters().await, counters().await);
    let ours = counters.db.locks().await;
    let requests = [ours.lease("a"), ours.lease("b").shared(), ours.semaphore("c", 3).request(1).expect("a permit")];
    for request in requests {
        let lease = soon("the grant", request.acquire()).await.expect("acquire");
        let mut tx = elsewhere.pool.begin().await.expect("begin");
        let error = soon("the answer", lease.fence(&mut tx)).await.expect_err("another database");
        assert!(matches!(error, Error::Fence { cause: FenceError::OtherDatabase, .. }), "{error}");
        tx.rollback().await.expect("rollback");
        assert!(lease.is_held());
        let mut tx = counters.pool.begin().await.expect("begin");
        lease.fence(&mut tx).await.expect("its own database");
        tx.rollback().await.expect("rollback");
        lease.release().await.expect("it was held to the end");
    }
}

#[tokio::test]
async fn fence_fails_after_the_deadline() {
    let counters = counters().await;
    let ours = counters.db.locks().await;
    let lease = ours.lease("a").ttl(Duration::from_millis(200)).renew(false).acquire().await.expect("acquire");
    soon("the expiry", lease.lost()).await;
    let mut tx = counters.pool.begin().await.expect("begin");
    let error = lease.fence(&mut tx).await.expect_err("expired, though nobody has come yet");
    assert!(matches!(error, Error::Lost { cause: LossCause::Expired, .. }), "{error}");
}

#[tokio::test]
async fn evicted_holder_cannot_fence() {
    let counters = counters().await;
    let (ours, operator) = (counters.db.locks().await, counters.db.locks().await);
    let lease = ours.lease("a").ttl(Duration::from_secs(600)).renew(false).acquire().await.expect("acquire");
    assert!(operator.evict("a", lease.token()).await.expect("evict"));
    assert!(lease.is_held(), "no heartbeat tells it");
    let mut tx = counters.pool.begin().await.expect("begin");
    let error = lease.fence(&mut tx).await.expect_err("evicted");
    assert!(matches!(error, Error::Lost { cause: LossCause::Superseded, .. }), "{error}");
    tx.rollback().await.expect("rollback");
    let error = lease.release().await.expect_err("it was not ours to the end");
    assert!(error.is_lost(), "{error}");
}

#[tokio::test]
async fn eviction_waits_for_the_open_fence() {
    let counters = counters().await;
    let (ours, theirs, operator) = (counters.db.locks().await, counters.db.locks().await, counters.db.locks().await);
    let lease = ours.lease("a").ttl(Duration::from_secs(600)).acquire().await.expect("acquire");
    let token = lease.token();
    let mut tx = counters.pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    add_one(&mut tx, 1).await.expect("write");
    let mut evicted = tokio::spawn(async move { operator.evict("a", token).await.expect("evict") });
    timeout(Duration::from_millis(500), &mut evicted).await.expect_err("it waits for the fenced transaction");
    assert_kept_out(&theirs, "a").await;
    let next = spawn_waiter(&theirs, "a");
    tx.commit().await.expect("who is fenced may commit");
    assert!(soon("the eviction", &mut evicted).await.expect("no panic"));
    let next = soon("the takeover", next).await.expect("no panic");
    assert!(next.token() > token, "tokens only rise");
    assert!(lease.release().await.expect_err("evicted").is_lost());
    assert_eq!(counters.value(1).await, 1);
}

#[tokio::test]
async fn release_during_open_fence_grants_nobody() {
    let counters = counters().await;
    let (ours, theirs, others) = (counters.db.locks().await, counters.db.locks().await, counters.db.locks().await);
    let lease = ours.lease("a").acquire().await.expect("acquire");
    let token = lease.token();
    let mut tx = counters.pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    add_one(&mut tx, 1).await.expect("write");
    let mut released = tokio::spawn(lease.release());
    if DATABASE != Database::Sqlite {
        soon("the release", &mut released).await.expect("no panic").expect("it was ours");
    }
    let next = spawn_waiter(&theirs, "a");
    assert_kept_out(&others, "a").await;
    assert!(!next.is_finished(), "somebody got in before the fenced transaction had ended");
    tx.commit().await.expect("commit");
    if DATABASE == Database::Sqlite {
        // The release is a write like any other, and comes after the fenced transaction.
        soon("the release", &mut released).await.expect("no panic").expect("it was ours");
    }
    let next = soon("the next one's turn", next).await.expect("no panic");
    assert!(next.token() > token, "tokens only rise");
    assert_eq!(counters.value(1).await, 1);
}

#[tokio::test]
async fn local_handover_waits_for_the_fenced_transaction() {
    let counters = counters().await;
    let (ours, others) = (counters.db.locks().await, counters.db.locks().await);
    let lease = ours.lease("a").acquire().await.expect("acquire");
    let token = lease.token();
    let mut tx = counters.pool.begin().await.expect("begin");
    lease.fence(&mut tx).await.expect("fence");
    let next = spawn_waiter(&ours, "a");
    // On this runtime of one thread, it has joined the queue when this task runs again.
    tokio::task::yield_now().await;
    let mut released = tokio::spawn(lease.release());
    if DATABASE != Database::Sqlite {
        soon("the release", &mut released).await.expect("no panic").expect("it was ours");
    }
    assert_kept_out(&others, "a").await;
    assert!(!next.is_finished(), "handed over in spite of the fence");
    add_one(&mut tx, 1).await.expect("write");
    tx.commit().await.expect("commit");
    if DATABASE == Database::Sqlite {
        soon("the release", &mut released).await.expect("no panic").expect("it was ours");
    }
    let next = soon("the hand-over", next).await.expect("no panic");
    assert!(next.token() > token, "tokens only rise");
    next.release().await.expect("release");
}

#[tokio::test]
async fn takeover_waits_for_both_fenced_transactions() {
    let counters = counters().await;
    let (ours, theirs, others) = (counters.db.locks().await, counters.db.locks().await, counters.db.locks().await);
    let lease = Arc::new(ours.lease("a").ttl(BRIEF).renew(false).acquire().await.expect("acquire"));
    let mut first = counters.pool.begin().await.expect("begin");
    let mut second = counters.pool.begin().await.expect("begin");
    lease.fence(&mut first).await.expect("fence");
    let also = Arc::clone(&lease);
    let mut fencing = tokio::spawn(async move {
        also.fence(&mut second).await.expect("fence beside the first one");
        add_one(&mut second, 2).await.expect("write");
        second
    });
    if DATABASE == Database::Sqlite {
        // One writer: the second begins when the first has ended.
        timeout(Duration::from_millis(200), &mut fencing).await.expect_err("the first has the write lock");
    }
    add_one(&mut first, 1).await.expect("write");
    let second = if DATABASE == Database::Sqlite {
        first.commit().await.expect("commit");
        soon("the second fence", fencing).await.expect("no panic")
    } else {
        let second = soon("the second fence", fencing).await.expect("no panic");
        first.commit().await.expect("commit");
        second
    };
    let next = spawn_waiter(&theirs, "a");
    soon("the expiry", lease.lost()).await;
    until_expired(&others, "a").await;
    assert_kept_out(&others, "a").await;
    assert!(!next.is_finished(), "the second transaction is still open");
    second.commit().await.expect("commit");
    let next = soon("the takeover", next).await.expect("no panic");
    assert!(next.token() > lease.token());
    assert_eq!((counters.value(1).await, counters.value(2).await), (1, 1));
}

// ---- late workers

/// The TTL is so short that every pause is a risk.
const TINY: Duration = Duration::from_millis(40);
const WORKERS: usize = 6;

/// The counts of a storm.
#[derive(Default)]
struct Tally {
    commits: AtomicU64,
    /// Fences that failed because the lease was lost.
    refused: AtomicU64,
    /// Transactions that the database itself refused.
    conflicts: AtomicU64,
    /// How often a worker met another worker between the fence and the commit.
    overlaps: AtomicU64,
    inside: AtomicUsize,
}

impl Tally {
    fn count(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::SeqCst)
    }
}

/// Read, think, write: with the fence or, as a control, without.
struct Stress {
    app: IsolatedPool,
    tally: Tally,
    fenced: bool,
    id: u8,
}

impl Stress {
    /// Runs one worker with its own client until `enough`. If a statement takes longer than the
    /// TTL, grants and fences are late: the worker then asks for longer leases, and is late in
    /// proportion.
    async fn work(&self, locks: Locks, mut random: Random, enough: impl Fn(&Tally) -> bool) {
        let mut ttl = TINY;
        let mut late = 0;
        while !enough(&self.tally) {
            let longer = (ttl * 2).min(SOON);
            let lease = match locks.lease("counter").ttl(ttl).renew(false).wait(ttl * 100).acquire().await {
                Ok(lease) => lease,
                Err(Error::Timeout { .. } | Error::Unavailable { .. }) => {
                    ttl = longer;
                    continue;
                }
                Err(error) => panic!("acquire: {error}"),
            };
            if self.fenced {
                random.pause(ttl).await;
            }
            late = if self.read_modify_write(&lease, ttl, &mut random).await { 0 } else { late + 1 };
            if late == 4 {
                (ttl, late) = (longer, 0);
            }
            match lease.release().await {
                Err(error) if !error.is_lost() => panic!("release: {error}"),
                _ => {}
            }
        }
    }

    /// Returns whether the write came in time. Without the fence, it comes after the end of the
    /// lease.
    async fn read_modify_write(&self, lease: &Lease, ttl: Duration, random: &mut Random) -> bool {
        let mut tx = self.app.begin().await;
        if self.fenced
            && let Err(error) = lease.fence(&mut tx).await
        {
            assert!(error.is_lost() || error.is_conflict(), "fence: {error}");
            self.tally.refused.fetch_add(1, Ordering::SeqCst);
            tx.rollback().await.expect("rollback");
            return false;
        }
        if self.tally.inside.fetch_add(1, Ordering::SeqCst) > 0 {
            self.tally.overlaps.fetch_add(1, Ordering::SeqCst);
        }
        let written = async {
            let value: i64 =
                sqlx::query_scalar(AssertSqlSafe(format!("SELECT value FROM counter WHERE id = {}", self.id)))
                    .fetch_one(&mut *tx)
                    .await?;
            if self.fenced {
                random.pause(TINY * 2).await;
            } else {
                sleep(ttl * 2).await;
            }
            sqlx::query(AssertSqlSafe(format!("UPDATE counter SET value = {} WHERE id = {}", value + 1, self.id)))
                .execute(&mut *tx)
                .await
        }
        .await;
        self.tally.inside.fetch_sub(1, Ordering::SeqCst);
        let ended = match written {
            Ok(_) => tx.commit().await,
            Err(error) => Err(error),
        };
        match ended {
            Ok(()) => self.tally.commits.fetch_add(1, Ordering::SeqCst),
            // Without the fence, some databases detect the collision at some levels.
            Err(error) if !self.fenced => {
                assert!(matches!(error, sqlx::Error::Database(_)), "{error}");
                self.tally.conflicts.fetch_add(1, Ordering::SeqCst)
            }
            Err(error) => panic!("what is fenced collides with nobody: {error}"),
        };
        true
    }

    /// Runs all workers, and an operator that evicts the holder, so that fences also fail in the
    /// database.
    async fn run(
        self: Arc<Self>,
        db: &TestDatabase,
        enough: impl Fn(&Tally) -> bool + Copy + Send + Sync + 'static,
    ) -> u64 {
        let mut workers = tokio::task::JoinSet::new();
        for seed in 0..WORKERS {
            let locks = Locks::builder(db.pool_of(1).await).ttl_range(TINY..=SOON).build();
            let stress = Arc::clone(&self);
            workers.spawn(async move { stress.work(locks, Random(seed as u64 + 1), enough).await });
        }
        let operator = db.locks().await;
        let evictions = Arc::new(AtomicU64::new(0));
        let (evicted, stress) = (Arc::clone(&evictions), Arc::clone(&self));
        let operating = tokio::spawn(async move {
            let mut ended = 0;
            loop {
                sleep(Duration::from_millis(70)).await;
                // On a busy machine no transaction would end between one eviction and the next.
                let now = Tally::count(&stress.tally.commits) + Tally::count(&stress.tally.conflicts);
                if now == ended {
                    continue;
                }
                ended = now;
                if let Some(held) = operator.inspect("counter").await.expect("inspect")
                    && operator.evict("counter", held.token).await.expect("evict")
                {
                    evicted.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        timeout(SOON * 4, async {
            while let Some(worker) = workers.join_next().await {
                worker.expect("no worker panics");
            }
        })
        .await
        .expect("the workers get there in the end");
        operating.abort();
        evictions.load(Ordering::SeqCst)
    }
}

/// A small random number generator, so that a run can be repeated.
struct Random(u64);

impl Random {
    async fn pause(&mut self, most: Duration) {
        // Constants of Knuth's MMIX.
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        sleep(most.mul_f64((self.0 >> 11) as f64 / (1u64 << 53) as f64)).await;
    }
}

async fn no_update_is_lost(level: &'static str, control: &'static str, control_loses: bool) {
    let counters = counters().await;

    let stress = |app, fenced, id| Arc::new(Stress { app, tally: Tally::default(), fenced, id });
    let free = stress(counters.at(control).await, false, 2);
    let evictions = Arc::clone(&free)
        .run(&counters.db, move |tally| {
            let lost = i64::try_from(Tally::count(&tally.commits)).is_ok_and(|commits| commits >= 40);
            Tally::count(&tally.overlaps) >= 10 && (lost || !control_loses)
        })
        .await;
    let (commits, value) = (Tally::count(&free.tally.commits), counters.value(2).await.cast_unsigned());
    println!(
        "{DATABASE:?} {control}, without the fence: {} lost of {commits} commits, {} overlaps, {} conflicts, {evictions} evictions",
        commits - value,
        Tally::count(&free.tally.overlaps),
        Tally::count(&free.tally.conflicts),
    );
    if control_loses {
        assert!(value < commits, "the control lost nothing: this stress proves nothing");
    }

    let fenced = stress(counters.at(level).await, true, 1);
    let start = Instant::now();
    let evictions = Arc::clone(&fenced)
        .run(&counters.db, move |tally| {
            // A busy machine may be too slow for that many within the time of a test.
            Tally::count(&tally.commits) >= if start.elapsed() < SOON { 150 } else { 20 }
        })
        .await;
    let (commits, value) = (Tally::count(&fenced.tally.commits), counters.value(1).await.cast_unsigned());
    println!(
        "{DATABASE:?} {level}, fenced: {} lost of {commits} commits, {} fences refused, {evictions} evictions",
        commits - value,
        Tally::count(&fenced.tally.refused),
    );
    assert_eq!(value, commits, "updates were lost");
    assert_eq!(Tally::count(&fenced.tally.overlaps), 0, "two were inside at once");
    assert!(Tally::count(&fenced.tally.refused) > 0, "nobody was ever too late: this stress proves nothing");
}

/// On SQLite, the transaction takes the write lock at its first write.
#[tokio::test]
async fn stress_loses_no_update_at_read_committed() {
    match DATABASE {
        // Without the fence, SQLite admits several transactions, but only one of them can write.
        Database::Sqlite => no_update_is_lost("DEFERRED", "DEFERRED", false).await,
        _ => no_update_is_lost("READ COMMITTED", "READ COMMITTED", true).await,
    }
}

/// On SQLite, the transaction takes the write lock at its beginning.
#[tokio::test]
async fn stress_loses_no_update_at_repeatable_read() {
    match DATABASE {
        // BEGIN IMMEDIATE excludes others with or without a fence, so the control uses another
        // begin.
        Database::Sqlite => no_update_is_lost("IMMEDIATE", "DEFERRED", false).await,
        // PostgreSQL detects the collisions, which are counted.
        Database::Postgres => no_update_is_lost("REPEATABLE READ", "REPEATABLE READ", false).await,
        // A server with innodb_snapshot_isolation may detect them too.
        _ => no_update_is_lost("REPEATABLE READ", "REPEATABLE READ", !keeps_to_snapshots().await).await,
    }
}

/// Returns whether InnoDB refuses to write a row that is newer than the snapshot: a setting of
/// MariaDB.
pub(super) async fn keeps_to_snapshots() -> bool {
    let db = crate::support::empty().await;
    let row: Option<(String, String)> = sqlx::query_as("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'")
        .fetch_optional(&db.pool().await)
        .await
        .expect("settings can be read");
    row.is_some_and(|(_, value)| value == "ON")
}
