//! A payment service delivers events at least once, again if no answer came, and in no order. How
//! does each event take effect once, with several instances, one of which dies in the middle?
//!
//! The identifier of an event is the key of its effect, an entry in the ledger. `mallory` is killed
//! with `kill -9` after it has written an entry and before it commits. Its unacknowledged events
//! are delivered again, to `carol`, while `alice` receives the same events in another order, some
//! of them twice.
//!
//! ```text
//! cargo run --example webhook_consumer
//! cargo run --example webhook_consumer -- --without-lock            # remembers what was done, as it is often written
//! DATABASE_URL=postgres://… cargo run --all-features --example webhook_consumer
//! ```

mod shared;

use std::collections::VecDeque;

use shared::*;
use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome};
use sqlock::retry::Retry;
use sqlx::Transaction;

const EVENTS: i64 = 40;

/// The instance that is killed, and at which of its deliveries.
const UNLUCKY: &str = "mallory";
const AT: usize = 7;

/// An event of the sender.
#[derive(Clone)]
struct Event {
    id: String,
    number: i64,
    cents: i64,
}

impl Event {
    /// Returns an event. `run` distinguishes the events of this run from those of earlier runs.
    fn of(run: &str, number: i64) -> Self {
        Self { id: format!("evt_{run}_{number}"), number, cents: 100 + number * 17 % 90 }
    }

    fn body(&self) -> String {
        format!("{{\"type\": \"paid\", \"cents\": {}}}", self.cents)
    }
}

/// The deliveries to an instance, in this order: all events, every third one twice.
fn deliveries(instance: &str, run: &str) -> VecDeque<Event> {
    let step = if instance == UNLUCKY { 13 } else { 7 };
    let mut all: VecDeque<Event> = (0..EVENTS).map(|i| Event::of(run, i * step % EVENTS + 1)).collect();
    let again: Vec<Event> = all.iter().step_by(3).cloned().collect();
    all.extend(again);
    // The events that the dead instance has not acknowledged.
    if instance == "carol" {
        all = deliveries(UNLUCKY, run).into_iter().skip(AT).collect();
    }
    all
}

any_database! {
    /// Enters an event into the ledger, without preventing duplicates.
    async fn enter(conn: &mut Connection, event: &Event) -> Result<(), sqlx::Error> {
        QueryBuilder::<Db>::new("INSERT INTO sqlock_example_receipt (event, cents) ")
            .push_values([event], |mut row, event| {
                row.push_bind(event.number).push_bind(event.cents);
            })
            .build()
            .execute(conn)
            .await?;
        Ok(())
    }

    /// Consumes an event. Returns `None` if the event must be sent again.
    async fn consume(pool: &Pool<Db>, events: &Idempotency, event: &Event, dies: bool) -> Result<Option<bool>> {
        let key = IdempotencyKey::global(&event.id);
        let body = Fingerprint::of([event.body()]);
        let consumed = events.run(pool, &key, &body, async |tx: &mut Transaction<'_, Db>| {
            enter(tx, event).await?;
            if dies {
                wait_for_death().await;
            }
            Ok::<_, sqlock::Error>(())
        });
        match consumed.await? {
            Outcome::New(()) => Ok(Some(true)),
            Outcome::Replay(()) => Ok(Some(false)),
            Outcome::InProgress => Ok(None),
            other => Err(format!("event {}: {other:?}", event.number).into()),
        }
    }

    /// Does the same without locks: checks whether the event is known, takes effect, and stores the
    /// event.
    async fn look_and_consume(pool: &Pool<Db>, event: &Event, dies: bool) -> Result<Option<bool>> {
        let mut conn = pool.acquire().await?;
        let mut seen = QueryBuilder::<Db>::new("SELECT count(*) FROM sqlock_example_seen WHERE event = ");
        let seen: i64 = seen.push_bind(event.number).build_query_scalar().fetch_one(&mut *conn).await?;
        if seen > 0 {
            return Ok(Some(false));
        }
        enter(&mut conn, event).await?;
        if dies {
            wait_for_death().await;
        }
        let mut remember = QueryBuilder::<Db>::new("INSERT INTO sqlock_example_seen (event) VALUES (");
        remember.push_bind(event.number).push(")").build().execute(&mut *conn).await?;
        Ok(Some(true))
    }

    /// Runs an instance process, which answers each delivery.
    async fn instance(pool: Pool<Db>, name: &str, run: &str) -> Result<()> {
        let locks = Locks::new(pool.clone());
        // On SQLite, writers wait for each other.
        let patiently = Retry::new().attempts(u32::MAX).within(Duration::from_secs(60));
        // Longer than the sender repeats an event, also by hand: later, a key counts as new.
        let retention = Duration::from_secs(30 * 86_400);
        let events = Idempotency::new(&locks).namespace("webhooks").retention(retention).retry(patiently);
        all_are_ready().await?;
        let (mut inbox, mut delivered, mut effects, start) = (deliveries(name, run), 0, 0, Instant::now());
        while let Some(event) = inbox.pop_front() {
            let dies = name == UNLUCKY && delivered == AT;
            let consumed = if asked_for("--without-lock") {
                look_and_consume(&pool, &event, dies).await?
            } else {
                consume(&pool, &events, &event, dies).await?
            };
            match consumed {
                Some(new) => effects += usize::from(new),
                None => {
                    println!("in progress: {}", event.number);
                    inbox.push_back(event);
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
            delivered += 1;
            if start.elapsed() > Duration::from_secs(60) {
                return Err("an event was not acknowledged within a minute".into());
            }
        }
        println!("{name:<8} {effects:>2} took effect, of {delivered} that were delivered");
        Ok(locks.shutdown().await?)
    }

    async fn example(pool: Pool<Db>, database: &Database) -> Result<()> {
        if let Some([name, run]) = arguments().as_deref() {
            return instance(pool, name, run).await;
        }
        let locks = Locks::new(pool.clone());
        let turn = take_turns(&locks, "webhook_consumer").await?;
        let run = turn.token();
        for sql in [
            "DROP TABLE IF EXISTS sqlock_example_receipt",
            "DROP TABLE IF EXISTS sqlock_example_seen",
            "CREATE TABLE sqlock_example_receipt (event BIGINT NOT NULL, cents BIGINT NOT NULL)",
            "CREATE TABLE sqlock_example_seen (event BIGINT NOT NULL)",
        ] {
            sqlx::query(sql).execute(&pool).await?;
        }

        let mut unlucky = database.conversation(&format!("{UNLUCKY} {run}"))?;
        unlucky.begin().await?;
        unlucky.hears("in the middle").await?;
        println!("{UNLUCKY} has done {AT} and is in the middle of the next one");
        let mut alice = database.conversation(&format!("alice {run}"))?;
        alice.begin().await?;
        if database.kind() != "sqlite" && !asked_for("--without-lock") {
            let number = alice.hears("in progress: ").await?;
            println!("alice was sent event {number} as well: not now, send it again");
        }
        unlucky.kill().await?; // with -9
        println!("{UNLUCKY} was killed: what it has not acknowledged is sent to carol\n");
        let mut carol = database.conversation(&format!("carol {run}"))?;
        carol.begin().await?;
        alice.ends().await?;
        carol.ends().await?;

        let ledger: Vec<(i64, i64)> =
            sqlx::query_as("SELECT event, cents FROM sqlock_example_receipt ORDER BY event").fetch_all(&pool).await?;
        for sql in ["DROP TABLE sqlock_example_receipt", "DROP TABLE sqlock_example_seen"] {
            sqlx::query(sql).execute(&pool).await?;
        }
        turn.release().await?;
        locks.shutdown().await?;
        check(&ledger)
    }
}

/// Prints a line for the parent process, which kills this one.
async fn wait_for_death() {
    println!("in the middle");
    until_stdin_ends().await;
}

/// Checks that each event has taken effect once.
fn check(ledger: &[(i64, i64)]) -> Result<()> {
    let times = |number| ledger.iter().filter(|(event, _)| *event == number).count();
    let wrong: Vec<_> = (1..=EVENTS)
        .filter(|number| times(*number) != 1)
        .map(|number| format!("{number} ({}×)", times(number)))
        .collect();
    if !wrong.is_empty() {
        return Err(format!("not once: the events {}", wrong.join(", ")).into());
    }
    let total: i64 = (1..=EVENTS).map(|number| Event::of("", number).cents).sum();
    let balance: i64 = ledger.iter().map(|(_, cents)| cents).sum();
    if balance != total {
        return Err(format!("the balance is {balance}, of {total} that were paid").into());
    }
    println!("\n{EVENTS} events took effect, each of them once: {balance} cents.");
    Ok(())
}
