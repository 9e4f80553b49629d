//! A checkout form is sent twice, or sent again after an error, or long after it was shown. How does each form lead to one order?
//!
//! The form carries a token that was issued to the customer when it was rendered. The token is used up in the transaction that
//! takes the order: when that is rolled back, it is as good as before; when it has committed, whoever sends the form again is told
//! the same order. A token that has expired, that somebody else was given, or that nobody was, are all refused alike.
//!
//! ```text
//! cargo run --example checkout_form
//! cargo run --example checkout_form -- --without-token              # to see what the token is good for
//! DATABASE_URL=postgres://… cargo run --all-features --example checkout_form
//! ```

mod shared;

use shared::*;
use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome};
use sqlock::retry::Retry;
use sqlx::Transaction;

/// For how long a form can be sent.
const FORM: Duration = Duration::from_secs(600);

/// What the shop makes of a form.
#[derive(Debug, thiserror::Error)]
enum OrderError {
    #[error(transparent)]
    Database(#[from] sqlx::Error),
    #[error(transparent)]
    Idempotency(#[from] sqlock::Error),
    #[error("the card was declined")]
    Declined,
}

/// A form as it is sent.
struct Form<'f> {
    customer: &'f str,
    token: &'f str,
    item: &'f str,
    card: &'f str,
}

any_database! {
    async fn orders(conn: &mut Connection) -> Result<i64, sqlx::Error> {
        sqlx::query_scalar("SELECT count(*) FROM sqlock_example_order").fetch_one(conn).await
    }

    /// Takes the order, and tells its number. The card is looked at last, when the order has been written.
    async fn order(conn: &mut Connection, form: &Form<'_>) -> Result<i64, OrderError> {
        QueryBuilder::<Db>::new("INSERT INTO sqlock_example_order (customer, item) ")
            .push_values([form], |mut row, form| {
                row.push_bind(form.customer.to_owned()).push_bind(form.item.to_owned());
            })
            .build()
            .execute(&mut *conn)
            .await?;
        if form.card == "empty" { Err(OrderError::Declined) } else { Ok(orders(conn).await?) }
    }

    async fn submit(pool: &Pool<Db>, shop: &Idempotency, form: Form<'_>) -> Result<Outcome<i64>, OrderError> {
        if asked_for("--without-token") {
            let number = Retry::new().run(pool, async |tx: &mut Transaction<'_, Db>| order(tx, &form).await).await?;
            return Ok(Outcome::New(number));
        }
        // Who it is comes from the session, never from the form.
        let key = IdempotencyKey::issued(form.customer, form.token);
        let request = Fingerprint::of(["order", form.item, form.card]);
        shop.run(pool, &key, &request, async |tx: &mut Transaction<'_, Db>| order(tx, &form).await).await
    }

    async fn count(pool: &Pool<Db>) -> Result<i64> {
        Ok(orders(&mut *pool.acquire().await?).await?)
    }

    /// Sent twice at the same moment, to two servers, and once more from a tab that was left open.
    async fn double_click(pool: &Pool<Db>, servers: &[Idempotency; 2]) -> Result<()> {
        let token = servers[0].issue("alice", FORM).await?;
        let form = || Form { customer: "alice", token: &token, item: "book", card: "full" };
        let [first, second] = servers;
        let (one, other) = tokio::join!(submit(pool, first, form()), submit(pool, second, form()));
        let (one, other) = (one?, other?);
        println!("sent twice at once:             {} and {}", said(&one), said(&other));
        let later = submit(pool, second, form()).await?;
        println!("sent once more:                 {}", said(&later));
        expect("one order, told to all", (count(pool).await?, one.into_value(), other.into_value()), (1, Some(1), Some(1)))?;
        expect("the same order", later, Outcome::Replay(1))
    }

    /// Refused by the bank, and sent again with another card: the transaction was rolled back, and the token's use with it.
    async fn declined(pool: &Pool<Db>, shop: &Idempotency) -> Result<()> {
        let token = shop.issue("bob", FORM).await?;
        let form = |card| Form { customer: "bob", token: &token, item: "lamp", card };
        let failed = submit(pool, shop, form("empty")).await;
        let Err(OrderError::Declined) = failed else {
            return Err(format!("an empty card was taken: {failed:?}").into());
        };
        println!("sent with an empty card:        {}", OrderError::Declined);
        expect("no order without money", count(pool).await?, 1)?;
        let again = submit(pool, shop, form("full")).await?;
        println!("sent again with another card:   {}", said(&again));
        expect("the token is as good as before", again, Outcome::New(2))?;
        let changed = submit(pool, shop, form("another")).await?;
        println!("sent again, and it was changed: {}", said(&changed));
        expect("a form is not two", changed, Outcome::Mismatch)
    }

    /// None of these tells whether there is such a token.
    async fn refused(pool: &Pool<Db>, shop: &Idempotency) -> Result<()> {
        let (old, foreign) = (shop.issue("carol", Duration::from_millis(1)).await?, shop.issue("dave", FORM).await?);
        tokio::time::sleep(Duration::from_millis(50)).await;
        for (what, token) in [("an old form", &*old), ("somebody else's", &*foreign), ("an invented one", "12345")] {
            let form = Form { customer: "carol", token, item: "bell", card: "full" };
            let outcome = submit(pool, shop, form).await?;
            println!("{:<31} {}", format!("{what}:"), said(&outcome));
            expect("refused", outcome, Outcome::Expired)?;
        }
        let form = Form { customer: "dave", token: &foreign, item: "bell", card: "full" };
        expect("still good for whose it is", submit(pool, shop, form).await?, Outcome::New(3))?;
        expect("nothing else was ordered", count(pool).await?, 3)
    }

    async fn example(pool: Pool<Db>, _: &Database) -> Result<()> {
        let locks = Locks::new(pool.clone());
        let turn = take_turns(&locks, "checkout_form").await?;
        for sql in [
            "DROP TABLE IF EXISTS sqlock_example_order",
            "CREATE TABLE sqlock_example_order (customer VARCHAR(20) NOT NULL, item VARCHAR(20) NOT NULL)",
        ] {
            sqlx::query(sql).execute(&pool).await?;
        }
        let other = Locks::new(pool.clone());
        let servers = [&locks, &other]
            .map(|locks| Idempotency::new(locks).namespace("checkout").wait(Duration::from_secs(60)));
        let went = async {
            double_click(&pool, &servers).await?;
            declined(&pool, &servers[0]).await?;
            refused(&pool, &servers[0]).await
        };
        let went = went.await;
        sqlx::query("DROP TABLE sqlock_example_order").execute(&pool).await?;
        turn.release().await?;
        other.shutdown().await?;
        locks.shutdown().await?;
        went?;
        println!("\nEach form has led to one order at most.");
        Ok(())
    }
}

/// What the customer is shown.
fn said(outcome: &Outcome<i64>) -> String {
    match outcome {
        Outcome::New(number) => format!("thank you, this is order {number}"),
        Outcome::Replay(number) => format!("it is order {number} already"),
        Outcome::Expired => "this form is not good any more: here is a new one".into(),
        Outcome::Mismatch => "this form was sent before, with something else in it".into(),
        other => format!("{other:?}"),
    }
}

fn expect<T: PartialEq + std::fmt::Debug>(what: &str, is: T, should: T) -> Result<()> {
    if is == should { Ok(()) } else { Err(format!("{what}: {is:?}, not {should:?}").into()) }
}
