//! A red packet: users grab random parts of a pot until it is empty. Each user may grab once, and
//! many grab at the same moment, most of them with more than one click. Is the pot shared out to
//! the last cent, and does no user get two parts?
//!
//! Three server processes receive the clicks of all users at once. A grab is a transaction that
//! locks the row of the packet, under the key (user, packet): a second click receives the part of
//! the first one, on every server.
//!
//! ```text
//! cargo run --example red_packet
//! cargo run --example red_packet -- --without-lock                  # shows the double parts
//! DATABASE_URL=postgres://… cargo run --all-features --example red_packet
//! ```

mod shared;

use shared::*;
use sqlock::idempotency::{AfterRetention, Fingerprint, Idempotency, IdempotencyKey, Outcome};
use sqlock::retry::Retry;
use sqlx::Transaction;

const POT: i64 = 10_000;
const PARTS: i64 = 12;
const USERS: i64 = 20;
const SERVERS: i64 = 3;

/// Returns a random part of the rest, which leaves at least a cent for each other part.
fn part_of(left: i64, parts: i64, chance: u64) -> i64 {
    if parts == 1 {
        return left;
    }
    let most = (2 * left / parts).min(left - (parts - 1)).max(1);
    1 + (chance % most.unsigned_abs()).cast_signed()
}

any_database! {
    /// Reads the rest of the packet, and its number of parts.
    async fn left(conn: &mut Connection, packet: i64) -> Result<(i64, i64), sqlx::Error> {
        QueryBuilder::<Db>::new("SELECT cents, parts FROM sqlock_example_packet WHERE id = ")
            .push_bind(packet)
            .build_query_as()
            .fetch_one(conn)
            .await
    }

    /// Returns a user's part. `None`: the packet is empty.
    async fn grab(conn: &mut Connection, packet: i64, user: i64) -> Result<Option<i64>, sqlx::Error> {
        let (cents, parts) = left(conn, packet).await?;
        if parts == 0 {
            return Ok(None);
        }
        let part = part_of(cents, parts, chance());
        tokio::time::sleep(Duration::from_millis(1)).await; // it takes a while
        let mut take = QueryBuilder::<Db>::new("UPDATE sqlock_example_packet SET cents = ");
        take.push_bind(cents - part).push(", parts = ").push_bind(parts - 1);
        take.push(" WHERE id = ").push_bind(packet).build().execute(&mut *conn).await?;
        note(conn, "INSERT INTO sqlock_example_grab (customer, cents) ", user, part).await?;
        Ok(Some(part))
    }

    async fn note(conn: &mut Connection, into: &'static str, user: i64, cents: i64) -> Result<(), sqlx::Error> {
        QueryBuilder::<Db>::new(into)
            .push_values([(user, cents)], |mut row, (user, cents)| {
                row.push_bind(user).push_bind(cents);
            })
            .build()
            .execute(conn)
            .await?;
        Ok(())
    }

    async fn grab_once(pool: Pool<Db>, locks: Locks, packet: i64, user: i64) -> Result<Option<i64>> {
        let patiently = Retry::new().attempts(u32::MAX).within(Duration::from_secs(60));
        let patiently = patiently.begin_with(begin_with_row_locks::<Db>());
        // A packet may live longer than a result is kept: a used key never counts as new.
        let grabs = Idempotency::new(&locks).namespace("packets").after_retention(AfterRetention::Refuse);
        let grabs = grabs.wait(Duration::from_secs(60)).retry(patiently);
        let key = IdempotencyKey::new(format!("user {user}"), format!("packet {packet}"));
        let request = Fingerprint::of(["grab"]);
        let grabbed = grabs.run(&pool, &key, &request, async |tx: &mut Transaction<'_, Db>| {
            locks.row_of("sqlock_example_packet", "id", packet).lock(tx).await?;
            Ok::<_, sqlock::Error>(grab(tx, packet, user).await?)
        });
        match grabbed.await? {
            Outcome::New(part) | Outcome::Replay(part) => Ok(part),
            other => Err(format!("user {user}: {other:?}").into()),
        }
    }

    /// Does the same without locks: checks whether the user has grabbed, and grabs if not.
    async fn look_and_grab(pool: Pool<Db>, packet: i64, user: i64) -> Result<Option<i64>> {
        let mut conn = pool.acquire().await?;
        let mut grabbed = QueryBuilder::<Db>::new("SELECT cents FROM sqlock_example_grab WHERE customer = ");
        match grabbed.push_bind(user).build_query_scalar().fetch_optional(&mut *conn).await? {
            Some(part) => Ok(Some(part)),
            None => Ok(grab(&mut conn, packet, user).await?),
        }
    }

    /// Carries out a click, and notes the answer.
    async fn click(pool: Pool<Db>, locks: Locks, packet: i64, user: i64) -> Result<()> {
        let part = if asked_for("--without-lock") {
            look_and_grab(pool.clone(), packet, user).await?
        } else {
            grab_once(pool.clone(), locks, packet, user).await?
        };
        let mut conn = pool.acquire().await?;
        Ok(note(&mut conn, "INSERT INTO sqlock_example_told (customer, cents) ", user, part.unwrap_or(0)).await?)
    }

    /// Runs a server process. All clicks reach it at once; those of every other user twice.
    async fn server(pool: Pool<Db>, packet: i64) -> Result<()> {
        let locks = Locks::new(pool.clone());
        all_are_ready().await?;
        let mut clicks = JoinSet::new();
        for user in 1..=USERS {
            for _ in 0..=user % 2 {
                clicks.spawn(click(pool.clone(), locks.clone(), packet, user));
            }
        }
        clicks.join_all().await.into_iter().collect::<Result<()>>()?;
        Ok(locks.shutdown().await?)
    }

    async fn example(pool: Pool<Db>, database: &Database) -> Result<()> {
        if let Some([_, packet]) = arguments().as_deref() {
            return server(pool, packet.parse()?).await;
        }
        let locks = Locks::new(pool.clone());
        let turn = take_turns(&locks, "red_packet").await?;
        // Each run has a new packet.
        let packet = turn.token().get();
        for sql in [
            "DROP TABLE IF EXISTS sqlock_example_packet",
            "DROP TABLE IF EXISTS sqlock_example_grab",
            "DROP TABLE IF EXISTS sqlock_example_told",
            "CREATE TABLE sqlock_example_packet (id BIGINT NOT NULL PRIMARY KEY, cents BIGINT NOT NULL, parts BIGINT NOT NULL)",
            "CREATE TABLE sqlock_example_grab (customer BIGINT NOT NULL, cents BIGINT NOT NULL)",
            "CREATE TABLE sqlock_example_told (customer BIGINT NOT NULL, cents BIGINT NOT NULL)",
        ] {
            sqlx::query(sql).execute(&pool).await?;
        }
        QueryBuilder::<Db>::new("INSERT INTO sqlock_example_packet (id, cents, parts) ")
            .push_values([packet], |mut row, packet| {
                row.push_bind(packet).push_bind(POT).push_bind(PARTS);
            })
            .build()
            .execute(&pool)
            .await?;
        database.processes((0..SERVERS).map(|number| format!("server{number} {packet}"))).await?;

        let grabbed: Vec<(i64, i64)> =
            sqlx::query_as("SELECT customer, cents FROM sqlock_example_grab ORDER BY customer").fetch_all(&pool).await?;
        let told: Vec<(i64, i64)> =
            sqlx::query_as("SELECT customer, cents FROM sqlock_example_told").fetch_all(&pool).await?;
        for sql in ["DROP TABLE sqlock_example_packet", "DROP TABLE sqlock_example_grab", "DROP TABLE sqlock_example_told"] {
            sqlx::query(sql).execute(&pool).await?;
        }
        turn.release().await?;
        locks.shutdown().await?;
        for (user, cents) in &grabbed {
            println!("  user {user:>2} {cents:>6} {}", "█".repeat((cents / 100).clamp(1, 60) as usize));
        }
        println!();
        check(&grabbed, &told).map_err(|problem| format!("the packet was not shared out as it should be: {problem}"))?;
        println!(
            "{} clicks by {USERS} users: {PARTS} of them have a part, nobody two, and the parts sum to {POT}.",
            told.len()
        );
        Ok(())
    }
}

/// Returns a random number, good enough for an example: each process and each hash has its own
/// seed.
fn chance() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(())
}

fn check(grabbed: &[(i64, i64)], told: &[(i64, i64)]) -> Result<(), String> {
    for user in 1..=USERS {
        let parts: Vec<i64> = grabbed.iter().filter(|(who, _)| *who == user).map(|(_, cents)| *cents).collect();
        if parts.len() > 1 {
            return Err(format!("user {user} has {} parts", parts.len()));
        }
        let part = parts.first().copied().unwrap_or(0);
        if let Some((_, other)) = told.iter().find(|(who, cents)| *who == user && *cents != part) {
            return Err(format!("user {user} has {part} and was told {other}"));
        }
    }
    let sum: i64 = grabbed.iter().map(|(_, cents)| cents).sum();
    if sum != POT || grabbed.len() as i64 != PARTS || grabbed.iter().any(|(_, cents)| *cents < 1) {
        return Err(format!("{} parts sum to {sum}, not {PARTS} to {POT}", grabbed.len()));
    }
    Ok(())
}
