//! Holders and waiters that are killed or paused.
//!
//! Promises: 3, 8.

use std::io::ErrorKind;
use std::time::Duration;

use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome};
use sqlock::inspect::LeaseInfo;
use sqlock::{Error, Locks};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

use crate::support::history::boot_ns;
use crate::support::worker::{Guarded, Worker};
use crate::support::{LONG, SLACK, SOON, fresh, renewed, soon, until};

#[tokio::test]
async fn killed_holder_keeps_name_until_ttl_ends() {
    const TTL: Duration = Duration::from_secs(5);
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

    // A renewal in flight may still arrive, so the last expiry seen counts.
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
async fn paused_holder_finds_its_lease_lost() {
    const TTL: Duration = Duration::from_secs(5);
    let db = fresh().await;
    let guarded = Guarded::create(&db, &["a"]).await;
    let locks = db.locks().await;
    let mut sleeper = Worker::start(&db.url);
    let token = sleeper.hold("a", TTL).await;
    assert_eq!(sleeper.ask("fenced").await, "committed");
    // The thread of the process that watches the lease has seen it held.
    until("a held lease", async || matches!(sleeper.status().await, (true, 1..))).await;

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

    // All late statements of the sleeper have been sent when another command was answered on its
    // connections.
    assert_eq!(sleeper.try_hold("a", TTL).await, None);
    assert!(successor.is_held());
    assert_eq!(held(&locks, "a").await.token, successor.token());
    successor.release().await.expect("still ours");
}

/// The order to continue arrives while the process is stopped, so its work could continue as soon
/// as the process runs.
#[tokio::test]
async fn work_stopped_past_its_ttl_takes_no_effect() {
    let db = fresh().await;
    let locks = db.locks().await;
    let orders = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = orders.local_addr().expect("its address").port();
    let mut sleeper = Worker::start(&db.url);
    sleeper.tell(&format!("run a 1500 {port}"));
    let work = Ordered::accept(&orders).await;
    sleeper.until_it_sleeps().await;
    sleeper.stop();
    let successor = soon("the takeover", locks.lease("a").ttl(LONG).acquire()).await.expect("acquire");
    let effect = work.go_on().await;
    sleeper.resume();
    let answer = sleeper.answer().await;
    assert!(answer.starts_with("lost"), "{answer}");
    assert_eq!(effect.read().await, "");
    successor.release().await.expect("still ours");
}

/// The same for work under an idempotency key.
#[tokio::test]
async fn attempt_stopped_past_its_lease_takes_no_effect() {
    let db = fresh().await;
    let payments = Idempotency::new(&db.locks().await).namespace("payments").wait(SOON);
    let orders = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = orders.local_addr().expect("its address").port();
    let mut sleeper = Worker::payment_server(&db.url, None);
    sleeper.tell(&format!("1 ordered a {port}"));
    let work = Ordered::accept(&orders).await;
    sleeper.until_it_sleeps().await;
    sleeper.stop();
    let (key, request) = (IdempotencyKey::new("alice", "a"), Fingerprint::of(["a"]));
    let takeover = payments.run_leased(&key, &request, async |_| Ok::<_, Error>("charged".to_owned()));
    let outcome = soon("the takeover", takeover).await.expect("run");
    assert_eq!(outcome, Outcome::New("charged".to_owned()));
    let effect = work.go_on().await;
    sleeper.resume();
    let answer = sleeper.answer().await;
    assert!(answer.starts_with("1 error"), "{answer}");
    assert_eq!(effect.read().await, "");
}

/// The connection on which work waits for its order, and takes effect.
struct Ordered(BufReader<TcpStream>);

impl Ordered {
    async fn accept(orders: &TcpListener) -> Self {
        let (stream, _) = soon("the work", orders.accept()).await.expect("a connection");
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        soon("the work", stream.read_line(&mut line)).await.expect("a line");
        assert_eq!(line, "ready\n");
        Self(stream)
    }

    async fn go_on(mut self) -> Self {
        self.0.write_all(b"go on\n").await.expect("the order");
        self
    }

    /// Reads all bytes until the work ends. Work that is dropped before it has read its order
    /// resets the connection.
    async fn read(mut self) -> String {
        let mut effect = Vec::new();
        match soon("the end of the work", self.0.read_to_end(&mut effect)).await {
            Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{error}"),
            _ => String::from_utf8(effect).expect("text"),
        }
    }
}

#[tokio::test]
async fn killed_waiters_are_passed_over() {
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
    // The first workers as well as the last ones.
    waiters[0].kill();
    waiters[1].kill();
    waiters[3].kill();
    let token = lease.token().get();
    lease.release().await.expect("release");
    let answer = waiters[2].answer().await;
    let next: i64 = answer.strip_prefix("token ").expect("the lease").parse().expect("a token");
    assert!(next > token);
    assert_eq!(waiters[2].ask("release").await, "released");
    // The last dead waiter may be granted the name, and then does not report it.
    until("the end of its claim", async || locks.inspect("a").await.expect("inspect").is_none()).await;
}

pub(super) async fn held(locks: &Locks, name: &str) -> LeaseInfo {
    locks.inspect(name).await.expect("inspect").expect("held by somebody")
}
