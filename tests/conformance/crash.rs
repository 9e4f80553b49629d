//! Holders and waiters that die, sleep, or have the wrong time.

use std::time::{Duration, SystemTime};

use sqlock::{LeaseInfo, Locks};

use crate::DATABASE;
use crate::support::history::boot_ns;
use crate::support::worker::{Clock, Guarded, Worker};
use crate::support::{Database, Fresh, SOON, fresh, soon};

/// How late anything may be on a busy machine. Nothing may be early.
const SLACK: Duration = Duration::from_secs(10);

/// A TTL that nobody waits for.
const LONG: Duration = Duration::from_secs(120);

const HOUR: i64 = 3600;

#[tokio::test]
async fn a_killed_holder_keeps_the_name_for_the_ttl_since_its_last_renewal_and_no_longer() {
    const TTL: Duration = Duration::from_millis(1500);
    let db = fresh().await;
    let locks = db.locks().await;
    let mut holder = Worker::start(&db.url);
    let token = holder.hold("a", TTL).await;
    let granted = held(&locks, "a").await;
    assert_eq!(granted.token.get(), token);
    let waiter = tokio::spawn(locks.lease("a").ttl(LONG).acquire());
    // So that there is a last renewal.
    renewed(&locks, &granted).await;
    holder.kill();

    // One that was on its way may still arrive: the last expiry seen is the one that counts.
    let mut last = held(&locks, "a").await;
    let next = soon("the takeover", async {
        loop {
            match locks.inspect("a").await.expect("inspect") {
                Some(now) if now.token.get() != token => break now,
                Some(now) => last = now,
                None => {}
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    let lease = soon("the answer", waiter).await.expect("no panic").expect("acquire");
    assert_eq!(next.token, lease.token());
    assert!(next.token.get() > token);
    assert!(next.acquired_at >= last.expires_at, "granted at {}, held until {}", next.acquired_at, last.expires_at);
    assert!(next.acquired_at <= last.expires_at + SLACK);
    lease.release().await.expect("release");
}

#[tokio::test]
async fn a_holder_that_slept_past_its_ttl_wakes_up_to_lost_and_harms_nobody() {
    const TTL: Duration = Duration::from_millis(1500);
    let db = fresh().await;
    let guarded = Guarded::create(&db, &["a"]).await;
    let locks = db.locks().await;
    let mut sleeper = Worker::start(&db.url);
    let token = sleeper.hold("a", TTL).await;
    assert_eq!(sleeper.ask("fenced").await, "committed");
    assert!(sleeper.status().await.0);

    sleeper.stop();
    let successor = soon("the takeover", locks.lease("a").ttl(LONG).acquire()).await.expect("acquire");
    let taken_over = boot_ns();
    assert!(successor.token().get() > token);
    sleeper.resume();

    let (is_held, last) = sleeper.status().await;
    assert!(!is_held);
    assert!(last > 0 && last < taken_over, "is_held() said yes at {last}, after the takeover at {taken_over}");
    let cause = sleeper.ask("lost").await;
    assert!(cause == "expired" || cause == "superseded", "{cause}");
    let fenced = sleeper.ask("fenced").await;
    assert!(fenced.starts_with("lost"), "{fenced}");
    assert_eq!(guarded.value("a").await, 1);
    let released = sleeper.ask("release").await;
    assert!(released.starts_with("lost"), "{released}");

    // Whatever the sleeper still has to say is said when another command has been answered on its connections.
    assert_eq!(sleeper.try_hold("a", TTL).await, None);
    assert!(successor.is_held());
    assert_eq!(held(&locks, "a").await.token, successor.token());
    successor.release().await.expect("still ours");
}

#[tokio::test]
async fn a_waiter_that_was_killed_delays_nobody() {
    let db = fresh().await;
    let locks = db.locks().await;
    let lease = locks.lease("a").ttl(LONG).acquire().await.expect("acquire");
    // If the name went to one of the dead, it would stay there for the TTL.
    const { assert!(LONG.as_secs() > SOON.as_secs()) };
    let mut waiters: Vec<Worker> = (0..4).map(|_| Worker::start(&db.url)).collect();
    for waiter in &mut waiters {
        waiter.tell(&format!("queue a {}", LONG.as_millis()));
    }
    for waiter in &mut waiters {
        assert_eq!(waiter.answer().await, "waiting");
    }
    // Those who came first as well as those who came last.
    waiters[0].kill();
    waiters[1].kill();
    waiters[3].kill();
    let token = lease.token().get();
    lease.release().await.expect("release");
    let answer = waiters[2].answer().await;
    let next: i64 = answer.strip_prefix("token ").expect("the lease").parse().expect("a token");
    assert!(next > token);
    assert_eq!(waiters[2].ask("release").await, "released");
    // The last of the dead may be let in, and then does not say that it is there.
    soon("the end of its claim", async {
        while locks.inspect("a").await.expect("inspect").is_some() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
}

/// With one clock for all, the server's, nobody's own clock matters. SQLite has no server: its clock is that of the
/// process that asks, and all that remains of the promises then is that tokens rise and fences hold.
#[tokio::test]
async fn a_client_whose_clock_is_an_hour_ahead_changes_nothing() {
    client_whose_clock_is_wrong(HOUR).await;
}

#[tokio::test]
async fn a_client_whose_clock_is_an_hour_behind_changes_nothing() {
    client_whose_clock_is_wrong(-HOUR).await;
}

async fn client_whose_clock_is_wrong(ahead: i64) {
    let db = fresh().await;
    let locks = db.locks().await;
    let clock = Clock::ahead(ahead);
    let mut wrong = Worker::start_under(&clock, &db.url);
    let its_clock: i64 = wrong.ask("clock").await.parse().expect("a time");
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("the clock is past 1970");
    let off = its_clock / 1000 - i64::try_from(now.as_secs()).expect("seconds");
    assert!((off - ahead).abs() < HOUR / 2, "its clock is ahead by {off} s");
    match DATABASE {
        Database::Sqlite if ahead > 0 => sqlite_client_ahead(&db, &locks, &mut wrong).await,
        Database::Sqlite => sqlite_client_behind(&db, &locks, &mut wrong).await,
        _ => client_of_a_server(&locks, &mut wrong).await,
    }
}

async fn client_of_a_server(locks: &Locks, wrong: &mut Worker) {
    const TTL: Duration = Duration::from_millis(1500);
    // Its holding begins between two of ours, by the one clock that counts, and in the order of tokens.
    let (_earlier, its_token, _later) = (
        locks.lease("earlier").acquire().await.expect("acquire"),
        wrong.hold("a", TTL).await,
        locks.lease("later").acquire().await.expect("acquire"),
    );
    let (earlier, its, later) = (held(locks, "earlier").await, held(locks, "a").await, held(locks, "later").await);
    assert_eq!(its.token.get(), its_token);
    assert!(earlier.acquired_at <= its.acquired_at && its.acquired_at <= later.acquired_at);
    assert!(earlier.token < its.token && its.token < later.token);
    assert!(its.remaining <= TTL);

    // It renews, by as much as it should.
    let renewed = renewed(locks, &its).await;
    assert_eq!(renewed.token, its.token);
    assert!(renewed.remaining <= TTL);
    assert!(locks.lease("a").try_acquire().await.expect("try").is_none());
    assert!(wrong.status().await.0);
    assert_eq!(wrong.ask("release").await, "released");

    // It waits for others as long as it should.
    let lease = locks.lease("a").ttl(TTL).renew(false).acquire().await.expect("acquire");
    assert!(lease.token() > its.token);
    let ours = held(locks, "a").await;
    assert_eq!(wrong.try_hold("a", LONG).await, None);
    let next = wrong.hold("a", LONG).await;
    assert!(next > lease.token().get());
    let taken = held(locks, "a").await;
    assert!(taken.acquired_at >= ours.expires_at);
    assert!(taken.acquired_at <= ours.expires_at + SLACK);
    assert!(taken.remaining <= LONG && taken.remaining > LONG - SLACK);
}

async fn sqlite_client_ahead(db: &Fresh, locks: &Locks, wrong: &mut Worker) {
    let guarded = Guarded::create(db, &["a"]).await;
    let mut right = Worker::start(&db.url);
    // The holder's time has run out long ago, for one who lives an hour later.
    let first = right.hold("a", Duration::from_secs(6)).await;
    let second = wrong.try_hold("a", LONG).await.expect("expired by its clock");
    assert!(second > first);
    let info = held(locks, "a").await;
    assert!(info.remaining > Duration::from_secs(3000), "by our clock: {:?}", info.remaining);
    // The holder's transaction is refused, and it learns of the loss at its next renewal or its deadline.
    let fenced = right.ask("fenced").await;
    assert!(fenced.starts_with("lost"), "{fenced}");
    let cause = right.ask("lost").await;
    assert!(cause == "expired" || cause == "superseded", "{cause}");
    assert_eq!(wrong.ask("fenced").await, "committed");
    assert_eq!(right.try_hold("a", LONG).await, None);
    assert_eq!(wrong.ask("release").await, "released");
    // A release is one by any clock, and the next token is higher although the clock that it is made from is behind.
    let third = right.try_hold("a", LONG).await.expect("free");
    assert!(third > second);
    assert_eq!(right.ask("fenced").await, "committed");
    assert_eq!(guarded.value("a").await, 2);
}

async fn sqlite_client_behind(db: &Fresh, locks: &Locks, wrong: &mut Worker) {
    let guarded = Guarded::create(db, &["a"]).await;
    let mut right = Worker::start(&db.url);
    let first = right.hold("a", LONG).await;
    let (token, remaining) = wrong.inspect("a").await.expect("held");
    assert_eq!(token, first);
    assert!(remaining > Duration::from_secs(3000), "by its clock: {remaining:?}");
    assert_eq!(wrong.try_hold("a", LONG).await, None);
    assert_eq!(right.ask("release").await, "released");
    // Its own holding is over as soon as it begins, for all others.
    let second = wrong.try_hold("a", LONG).await.expect("free");
    assert!(second > first);
    assert!(locks.inspect("a").await.expect("inspect").is_none());
    let third = right.try_hold("a", LONG).await.expect("expired by our clock");
    assert!(third > second);
    let fenced = wrong.ask("fenced").await;
    assert!(fenced.starts_with("lost"), "{fenced}");
    assert_eq!(right.ask("fenced").await, "committed");
    assert_eq!(guarded.value("a").await, 1);
    let released = wrong.ask("release").await;
    assert!(released.starts_with("lost"), "{released}");
    assert!(right.status().await.0);
}

async fn held(locks: &Locks, name: &str) -> LeaseInfo {
    locks.inspect(name).await.expect("inspect").expect("held by somebody")
}

/// Waits until the holder has renewed.
async fn renewed(locks: &Locks, before: &LeaseInfo) -> LeaseInfo {
    soon("a renewal", async {
        loop {
            let now = held(locks, before.name.as_str()).await;
            if now.expires_at > before.expires_at {
                break now;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await
}
