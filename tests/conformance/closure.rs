//! The error types that closures may return, and how they differ from the errors of this crate.

use std::error::Error as StdError;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use sqlock::Error;
use sqlock::idempotency::{Fingerprint, Idempotency, IdempotencyKey, Outcome, ResumePolicy};
use sqlock::quorum::Quorum;
use sqlock::retry::{Retry, WorkError};
use sqlx::Executor;

use super::version::bank;
use crate::DATABASE;
use crate::support::connect;

type BoxError = Box<dyn StdError + Send + Sync>;

/// The error of an application that has a variant for this crate, and none for sqlx.
#[derive(Debug, thiserror::Error)]
enum AppError {
    #[error(transparent)]
    Lock(#[from] Error),
    #[error("sold out")]
    SoldOut,
}

/// How a test uses one type of error.
struct Usage<E> {
    sold_out: fn() -> E,
    sqlock: fn(&E) -> Option<&Error>,
}

const OWN: Usage<AppError> = Usage {
    sold_out: || AppError::SoldOut,
    sqlock: |error| match error {
        AppError::Lock(error) => Some(error),
        AppError::SoldOut => None,
    },
};
const ANYHOW: Usage<anyhow::Error> =
    Usage { sold_out: || anyhow::anyhow!("sold out"), sqlock: |error| error.downcast_ref() };
const BOXED: Usage<BoxError> = Usage { sold_out: || "sold out".into(), sqlock: |error| error.downcast_ref() };

async fn lease_closures_may_fail_with<E: fmt::Display + fmt::Debug>(usage: Usage<E>) {
    let bank = bank().await;
    let locks = bank.db.locks().await;
    locks.migrate().await.expect("migrate");
    let quorum = Quorum::new([locks.clone()]);
    let now = Duration::ZERO;
    for taken in [false, true] {
        // The semaphore has the same name.
        let _lease = if taken { Some(locks.lease("a").acquire().await.expect("free")) } else { None };
        let failed = || Err::<(), E>((usage.sold_out)());
        let ends = [
            locks.lease("a").wait(now).run(async |_| failed()).await,
            locks.lease_all(["a", "b"]).wait(now).run(async |_| failed()).await,
            locks.semaphore("a", 2).wait(now).run(async |_| failed()).await,
            quorum.lease("a").wait(now).run(async |_| failed()).await,
        ];
        for (i, end) in ends.into_iter().enumerate() {
            match end {
                Ok(end) => {
                    assert_eq!((taken, end.expect_err("sold out").to_string()), (false, "sold out".into()), "{i}")
                }
                Err(error) => assert!(taken && error.is_timeout(), "{i}: {error:?}"),
            }
        }
    }
}

#[tokio::test]
async fn lease_closures_may_fail_with_own_errors() {
    lease_closures_may_fail_with(OWN).await;
}

#[tokio::test]
async fn lease_closures_may_fail_with_anyhow() {
    lease_closures_may_fail_with(ANYHOW).await;
}

#[tokio::test]
async fn lease_closures_may_fail_with_boxed_errors() {
    lease_closures_may_fail_with(BOXED).await;
}

async fn transactions_may_fail_with<E, Marker: ?Sized>(usage: Usage<E>)
where
    E: From<Error> + WorkError<Marker> + fmt::Display + fmt::Debug,
{
    let bank = bank().await;
    let (accounts, runs) = (&bank.accounts, AtomicU32::new(0));
    let sold_out = |error: E| {
        assert!((usage.sqlock)(&error).is_none(), "{error:?}");
        assert_eq!(error.to_string(), "sold out");
    };

    // A conflict inside the closure's error is rerun.
    let done = Retry::new().run(&bank.pool, async |tx| {
        // The second attempt expects the current version of the row.
        let outdated = i64::from(runs.fetch_add(1, Ordering::SeqCst) == 0);
        accounts.update(&mut *tx, 1, 1 + outdated, |_| {}).await?;
        Ok::<_, E>(())
    });
    done.await.expect("the second attempt");
    assert_eq!(runs.load(Ordering::SeqCst), 2);

    // The closure's own error, and the last conflict, are returned unchanged.
    let done = Retry::new().run(&bank.pool, async |tx| {
        accounts.update(&mut *tx, 1, 2, |_| {}).await?;
        Err::<(), E>((usage.sold_out)())
    });
    sold_out(done.await.expect_err("sold out"));
    let done = Retry::new().attempts(1).run(&bank.pool, async |tx| {
        accounts.update(&mut *tx, 1, 7, |_| {}).await?;
        Ok::<_, E>(())
    });
    let error = done.await.expect_err("another version");
    assert!((usage.sqlock)(&error).is_some_and(Error::is_conflict), "{error:?}");
    assert_eq!(bank.row(1).await.map(|row| row.1), Some(2), "the others were rolled back");

    // Errors of this crate.
    let closed = connect(&bank.db.url, 1).await;
    closed.close().await;
    let error = Retry::new().run(&closed, async |_| Ok::<_, E>(())).await.expect_err("closed");
    assert!(matches!((usage.sqlock)(&error), Some(Error::Unavailable { .. })), "{error:?}");
    if DATABASE.is_mysql() {
        let done = Retry::new().run(&bank.pool, async |tx| {
            tx.execute("COMMIT").await.map_err(Error::from)?;
            Ok::<_, E>(())
        });
        let error = done.await.expect_err("committed inside");
        assert!(matches!((usage.sqlock)(&error), Some(Error::CommitUnknown { .. })), "{error:?}");
    }
}

#[tokio::test]
async fn transactions_may_fail_with_own_errors() {
    transactions_may_fail_with(OWN).await;
}

#[tokio::test]
async fn transactions_may_fail_with_anyhow() {
    transactions_may_fail_with(ANYHOW).await;
}

#[tokio::test]
async fn transactions_may_fail_with_boxed_errors() {
    transactions_may_fail_with(BOXED).await;
}

/// Helpers that send statements often return nothing else.
#[tokio::test]
async fn transactions_may_fail_with_errors_of_sqlx() {
    let bank = bank().await;
    let missing = Retry::new().run(&bank.pool, async |tx| tx.execute("SELECT a FROM nowhere").await.map(|_| ()));
    assert!(matches!(missing.await, Err(sqlx::Error::Database(_))));
    let closed = connect(&bank.db.url, 1).await;
    closed.close().await;
    let error = Retry::new().run(&closed, async |_| Ok::<_, sqlx::Error>(())).await.expect_err("closed");
    assert!(matches!(error, sqlx::Error::PoolClosed), "{error:?}");
    if DATABASE.is_mysql() {
        let done = Retry::new().run(&bank.pool, async |tx| tx.execute("COMMIT").await.map(|_| ()));
        let error = done.await.expect_err("committed inside");
        let source = error.source().and_then(|source| source.downcast_ref());
        assert!(matches!(source, Some(Error::CommitUnknown { .. })), "{error:?}");
    }
}

async fn requests_may_fail_with<E, Marker: ?Sized>(usage: Usage<E>)
where
    E: From<Error> + WorkError<Marker> + fmt::Display + fmt::Debug,
{
    let bank = bank().await;
    let locks = bank.db.locks().await;
    locks.migrate().await.expect("migrate");
    let payments = Idempotency::new(&locks).namespace("payments");
    let (accounts, request) = (&bank.accounts, Fingerprint::of(["charge"]));
    let [first, refused, leased] = ["a", "b", "c"].map(|key| IdempotencyKey::new("alice", key));
    let sold_out = |error: E| {
        assert!((usage.sqlock)(&error).is_none(), "{error:?}");
        assert_eq!(error.to_string(), "sold out");
    };

    let failed = payments.run(&bank.pool, &first, &request, async |tx| {
        accounts.update(&mut *tx, 1, 1, |_| {}).await?;
        Err::<i64, E>((usage.sold_out)())
    });
    sold_out(failed.await.expect_err("sold out"));
    let runs = AtomicU32::new(0);
    let done = payments.run(&bank.pool, &first, &request, async |tx| {
        let outdated = i64::from(runs.fetch_add(1, Ordering::SeqCst) == 0);
        accounts.update(&mut *tx, 1, 1 + outdated, |_| {}).await.map_err(E::from)
    });
    assert_eq!(done.await.expect("the second attempt"), Outcome::New(2));
    let odd = payments.clone().retention(Duration::ZERO);
    let error = odd.run(&bank.pool, &refused, &request, async |_| Ok::<_, E>(1)).await.expect_err("out of range");
    assert!(matches!((usage.sqlock)(&error), Some(Error::OutOfRange { .. })), "{error:?}");

    let failed = payments.run_leased(&leased, &request, async |attempt| {
        attempt.step("card", async || Err::<i64, E>((usage.sold_out)())).await
    });
    sold_out(failed.await.expect_err("sold out"));
    let error = odd.run_leased(&refused, &request, async |_| Ok::<_, E>(1)).await.expect_err("out of range");
    assert!(matches!((usage.sqlock)(&error), Some(Error::OutOfRange { .. })), "{error:?}");
    let policy = ResumePolicy::new().parallel(1);
    let resumed = payments.clone().resume_policy(policy).resume(async |_| Err::<i64, E>((usage.sold_out)())).await;
    assert_eq!(resumed.expect("resume").failed, 1);
}

#[tokio::test]
async fn requests_may_fail_with_own_errors() {
    requests_may_fail_with(OWN).await;
}

#[tokio::test]
async fn requests_may_fail_with_anyhow() {
    requests_may_fail_with(ANYHOW).await;
}

#[tokio::test]
async fn requests_may_fail_with_boxed_errors() {
    requests_may_fail_with(BOXED).await;
}
