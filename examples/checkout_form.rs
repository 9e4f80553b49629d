//! A customer sends a checkout form twice, or again after an error, or hours after it was shown.
//! How does each form lead to one order?
//!
//! The form contains a token, which was issued to the customer when the form was rendered. The
//! transaction that takes the order uses the token. After a rollback the token is valid again;
//! after the commit, a repeated form receives the same order. A token that has expired, belongs to
//! another customer, or was never issued is refused.
//!
//! ```text
//! cargo run --example checkout_form
//! cargo run --example checkout_form -- --without-token              # shows the double order
//! DATABASE_URL=postgres://… cargo run --all-features --example checkout_form
//! ```

mod shared;

use shared::*;
use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome};
use sqlock::retry::Retry;
use sqlx::Transaction;

/// How long a form can be sent.
const FORM: Duration = Duration::from_secs(600);

/// The outcome of a form.
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

    /// Takes the order, and returns its number. The card is checked last, after the order is
    /// written. (Two orders at the same moment would share their number, the count of orders. An
    /// application lets the database generate it.)
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
        // The customer comes from the session, never from the form.
        let key = IdempotencyKey::issued(form.customer, form.token);
        let request = Fingerprint::of(["order", form.item, form.card]);
        shop.run(pool, &key, &request, async |tx: &mut Transaction<'_, Db>| order(tx, &form).await).await
    }

    async fn count(pool: &Pool<Db>) -> Result<i64> {
        Ok(orders(&mut *pool.acquire().await?).await?)
    }

    /// Sends a form twice at the same moment, to two servers, and once more from another tab.
    async fn double_click(pool: &Pool<Db>, servers: &[Idempotency; 2]) -> Result<()> {
        let token = servers[0].issue("alice", FORM).await?;
        let form = || Form { customer: "alice", token: &token, item: "book", card: "full" };
        let [first, second] = servers;
        let (one, other) = tokio::join!(submit(pool, first, form()), submit(pool, second, form()));
        let (one, other) = (one?, other?);
        println!("sent twice at once:             {} and {}", said(&one), said(&other));
        let later = submit(pool, second, form()).await?;
        println!("sent once more:                 {}", said(&later));
        expect("one order for all", (count(pool).await?, one.into_value(), other.into_value()), (1, Some(1), Some(1)))?;
        expect("the same order", later, Outcome::Replay(1))
    }

    /// Sends a form that the bank refuses, and again with another card: the rollback has freed the
    /// token.
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
        expect("the token is valid again", again, Outcome::New(2))?;
        let changed = submit(pool, shop, form("another")).await?;
        println!("sent again, and it was changed: {}", said(&changed));
        expect("a form is not two", changed, Outcome::Mismatch)
    }

    /// Sends invalid tokens. The answers do not show whether a token exists.
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

/// Formats the page for the customer.
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
