//! Database servers that crash or freeze.
//!
//! SQLite has no server. A process that keeps the only write lock takes the place of a fault there,
//! and a crash leaves the half-written transaction of that process to be repaired.
//!
//! Promises: 1, 4, 8, 12.

use std::time::Duration;

use sqlock::{Error, Lease, LeaseRequest, Locks, LossCause};
use tokio::time::{Instant, sleep_until};

use crate::DATABASE;
use crate::support::server::Server;
use crate::support::worker::Worker;
use crate::support::{BRIEF, LONG, TestDatabase, fresh, fresh_on, soon, until, until_waiters};

/// A database of a single test, with faults on demand.
enum ServerFixture {
    Server(Server, TestDatabase),
    File(TestDatabase, Option<Worker>),
}

impl ServerFixture {
    async fn start() -> Self {
        match DATABASE.server().map(Server::start) {
            Some(server) => {
                let db = fresh_on(&server.url()).await;
                Self::Server(server, db)
            }
            None => Self::File(fresh().await, None),
        }
    }

    fn db(&self) -> &TestDatabase {
        match self {
            Self::Server(_, db) | Self::File(db, _) => db,
        }
    }

    /// Crashes the database, or blocks all writes to the file.
    async fn crash(&mut self) {
        match self {
            Self::Server(server, _) => server.kill(),
            Self::File(db, writer) => *writer = Some(seize(db).await),
        }
    }

    /// Restarts the database, which recovers.
    fn revive(&mut self) {
        match self {
            Self::Server(server, _) => server.restart(),
            Self::File(_, writer) => writer.as_mut().expect("it has crashed").kill(),
        }
    }

    /// Stops the processes of the database until [`thaw`](Self::thaw).
    async fn freeze(&mut self) {
        match self {
            Self::Server(server, _) => server.pause(),
            Self::File(db, writer) => {
                let process = seize(db).await;
                process.stop();
                *writer = Some(process);
            }
        }
    }

    async fn thaw(&mut self) {
        match self {
            Self::Server(server, _) => server.resume(),
            Self::File(_, writer) => {
                let process = writer.as_mut().expect("it is frozen");
                process.resume();
                assert_eq!(process.ask("yield").await, "yielded");
            }
        }
    }
}

async fn seize(db: &TestDatabase) -> Worker {
    let mut writer = Worker::start(&db.url);
    assert_eq!(writer.ask("seize").await, "seized");
    writer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_survives_server_crash_within_ttl() {
    const TTL: Duration = Duration::from_secs(120);
    let mut fixture = ServerFixture::start().await;
    let (ours, theirs) = (fixture.db().locks().await, fixture.db().locks().await);
    let lease = ours.lease("a").ttl(TTL).acquire().await.expect("acquire");
    let deadline = deadline(&lease);
    fixture.crash().await;
    assert!(lease.is_held());
    fixture.revive();

    // The lease exists as before, and excludes others.
    let info = theirs.inspect("a").await.expect("inspect").expect("held");
    assert_eq!(info.token, lease.token());
    assert!(theirs.lease("a").try_acquire().await.expect("try").is_none());
    // It is renewed again.
    soon("a renewal", async {
        while self::deadline(&lease) < deadline + Duration::from_secs(1) {
            assert!(lease.is_held());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let info = theirs.inspect("a").await.expect("inspect").expect("held");
    assert_eq!(info.token, lease.token());
    assert!(theirs.lease("a").try_acquire().await.expect("try").is_none());
    let token = lease.token();
    lease.release().await.expect("ours to the end");
    let next = theirs.lease("a").try_acquire().await.expect("try").expect("free");
    assert!(next.token() > token);
}

/// PostgreSQL may not have written the entry to the disk yet. The waiter adds it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiter_survives_server_crash() {
    let mut fixture = ServerFixture::start().await;
    let (ours, theirs) = (fixture.db().locks().await, fixture.db().locks().await);
    let held = ours.lease("a").ttl(LONG).acquire().await.expect("acquire");
    let waiter = tokio::spawn(async move { found_again(|| theirs.lease("a").ttl(LONG)).await });
    until_waiters(&ours, "a", 1).await;
    fixture.crash().await;
    fixture.revive();
    until("the entry", async || ours.inspect("a").await.is_ok_and(|info| info.expect("held").waiters > 0)).await;
    let token = held.token();
    held.release().await.expect("ours to the end");
    let next = waiter.await.expect("no panic");
    assert!(next.token() > token);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_crash_beyond_ttl_ends_lease_on_time() {
    let mut fixture = ServerFixture::start().await;
    let (ours, theirs) = (fixture.db().locks().await, fixture.db().locks().await);
    let lease = ours.lease("a").ttl(BRIEF).acquire().await.expect("acquire");
    assert!(lease.is_held());
    fixture.crash().await;
    ends_within_its_ttl(&lease, Instant::now()).await;
    fixture.revive();

    let next = found_again(|| theirs.lease("a").ttl(LONG)).await;
    assert!(next.token() > lease.token());
    let token = lease.token();
    match lease.release().await {
        Err(Error::Lost { token: lost, cause: LossCause::Expired, .. }) => assert_eq!(lost, token),
        other => panic!("{other:?}"),
    }
    assert!(next.is_held());
    next.release().await.expect("still ours");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn crashed_server_is_unavailable_not_held() {
    let mut fixture = ServerFixture::start().await;
    let clients = Clients::of(fixture.db()).await;
    fixture.crash().await;
    let clients = clients.find_it_unavailable().await;
    fixture.revive();
    all_find_it_back(clients).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frozen_server_is_unavailable_until_it_thaws() {
    let mut fixture = ServerFixture::start().await;
    let clients = Clients::of(fixture.db()).await;
    let ours = fixture.db().locks().await;
    let lease = ours.lease("ours").ttl(BRIEF).acquire().await.expect("acquire");
    assert!(lease.is_held());
    fixture.freeze().await;
    let frozen_at = Instant::now();
    let ((), clients) = tokio::join!(ends_within_its_ttl(&lease, frozen_at), clients.find_it_unavailable());
    fixture.thaw().await;
    all_find_it_back(clients).await;

    let token = lease.token();
    assert!(lease.release().await.expect_err("lost").is_lost());
    let next = found_again(|| ours.lease("ours")).await;
    assert!(next.token() > token);
    next.release().await.expect("release");
}

/// A little before the local deadline.
fn deadline(lease: &Lease) -> Instant {
    Instant::now() + lease.remaining()
}

/// Checks the loss of a lease of [`BRIEF`] that nothing has renewed since `down`: its holder knows
/// when the TTL has passed since then, and not before its deadline.
async fn ends_within_its_ttl(lease: &Lease, down: Instant) {
    // A reply that was not read yet can only move the deadline back.
    let earliest = deadline(lease);
    let expired = async {
        sleep_until(down + BRIEF).await;
        assert!(!lease.is_held(), "held for longer than the TTL");
    };
    let reported = async {
        let cause = soon("the loss", lease.lost()).await;
        assert_eq!(cause, LossCause::Expired);
        assert!(Instant::now() >= earliest, "too early");
    };
    tokio::join!(expired, reported);
}

/// Clients that have used the database and will need it again, one for each call, and one unused
/// client.
struct Clients {
    trying: Locks,
    waiting: Locks,
    looking: Locks,
    releasing: Locks,
    lease: Lease,
    new: Locks,
}

impl Clients {
    async fn of(db: &TestDatabase) -> Self {
        let (trying, waiting, looking) = (db.locks().await, db.locks().await, db.locks().await);
        for known in [&trying, &waiting, &looking] {
            known.lease("free").acquire().await.expect("acquire").release().await.expect("release");
        }
        let releasing = db.locks().await;
        let lease = releasing.lease("held").ttl(LONG).acquire().await.expect("acquire");
        Self { trying, waiting, looking, releasing, lease, new: db.locks().await }
    }

    async fn find_it_unavailable(self) -> [Locks; 5] {
        let Self { trying, waiting, looking, releasing, lease, new } = self;
        let short = Duration::from_millis(300);
        // A frozen server executes pending requests when it thaws, without a waiting client, and
        // only the TTL ends such a lease.
        let ask = |locks: &Locks, name| locks.lease(name).ttl(Duration::from_secs(2));
        let calls = async {
            tokio::join!(
                ask(&trying, "free").try_acquire(),
                ask(&waiting, "free").wait(short).acquire(),
                looking.inspect("free"),
                ask(&new, "free").try_acquire(),
                ask(&new, "other").wait(short).acquire(),
                lease.release(),
            )
        };
        let (tried, waited, looked, tried_first, waited_first, released) = soon("six answers", calls).await;
        for (what, error) in [
            ("try_acquire", tried.err()),
            ("a short wait", waited.err()),
            ("inspect", looked.err()),
            ("the first try_acquire of a client", tried_first.err()),
            ("the first short wait of a client", waited_first.err()),
        ] {
            assert!(matches!(error, Some(Error::Unavailable { .. })), "{what}: {error:?}");
        }
        // The client may not know whether the release took effect before the freeze.
        assert!(matches!(released, Err(Error::Unavailable { .. } | Error::Unknown { .. })), "release: {released:?}");
        [trying, waiting, looking, releasing, new]
    }
}

async fn all_find_it_back(clients: [Locks; 5]) {
    for client in clients {
        found_again(|| client.lease("free")).await.release().await.expect("release");
    }
}

/// Acquires a lease of a server that was away. On a busy machine it may not accept connections in
/// time at first.
async fn found_again(request: impl Fn() -> LeaseRequest) -> Lease {
    let acquired = async {
        loop {
            match request().acquire().await {
                Err(Error::Unavailable { .. }) => {}
                answer => break answer.expect("acquire"),
            }
        }
    };
    soon("the grant", acquired).await
}
