//! The errors that end a transaction: of the closure, in any type of the application, or of this
//! crate.

use std::error::Error as StdError;

use sqlx::error::DatabaseError;

use crate::error::{ConcurrentChange, Error, Fault, FenceError, RowError};

/// An error that the closure of a transaction may return: its [sources](StdError::source) decide
/// [what is rerun](crate::retry::Retry#what-is-rerun).
///
/// Errors of this crate are returned in the closure's type, which therefore also implements
/// `From<sqlock::Error>`. This trait is implemented for
///
/// - every [`std::error::Error`] type, such as [`Error`] itself, `sqlx::Error`, or an application's
///   own enum with a variant `#[from] sqlock::Error`;
/// - `anyhow::Error`, `eyre::Report` and `Box<dyn std::error::Error + Send + Sync>`: types that are
///   no `std::error::Error`, but can be borrowed as one with [`AsRef`].
///
/// `Marker` separates the two, and is inferred.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> anyhow::Result<()> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # sqlx::query("CREATE TABLE seats (id INTEGER PRIMARY KEY, taken INTEGER)").execute(&pool).await?;
/// use anyhow::Context as _;
/// use sqlock::retry::Retry;
///
/// let booked = Retry::new().run(&pool, async |tx| {
///     let seat = sqlx::query("UPDATE seats SET taken = 1 WHERE id = 7 AND taken = 0");
///     let booked = seat.execute(&mut **tx).await.context("cannot book the seat")?;
///     anyhow::ensure!(booked.rows_affected() == 1, "the seat is taken");
///     Ok(())
/// });
/// let error = booked.await.unwrap_err();
/// match error.downcast_ref::<sqlock::Error>() {
///     Some(sqlock::Error::CommitUnknown { .. }) => println!("read whether the seat is booked"),
///     Some(_) => println!("nothing happened: {error}"),
///     None => assert_eq!(error.to_string(), "the seat is taken"),
/// }
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "sqlite"))]
/// # fn main() {}
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the error of a transaction",
    label = "the closure returns this error",
    note = "the error must implement `std::error::Error + 'static`, or `AsRef<dyn std::error::Error + Send + Sync>`",
    note = "for example `sqlock::Error`, `anyhow::Error`, or an enum with a variant `#[from] sqlock::Error`"
)]
pub trait WorkError<Marker: ?Sized> {
    /// Returns the error as one whose sources can be read.
    fn as_error(&self) -> &(dyn StdError + 'static);
}

impl<E: StdError + 'static> WorkError<()> for E {
    fn as_error(&self) -> &(dyn StdError + 'static) {
        self
    }
}

impl<E: AsRef<dyn StdError + Send + Sync>> WorkError<dyn StdError + Send + Sync> for E {
    fn as_error(&self) -> &(dyn StdError + 'static) {
        self.as_ref()
    }
}

/// The error that ended a transaction: of this crate, or of the work.
pub(crate) enum RunError<E> {
    Sqlock(Error),
    Work { error: E, as_error: fn(&E) -> &(dyn StdError + 'static) },
}

impl<E> RunError<E> {
    /// Makes the error of the work.
    pub(crate) fn from_work<Marker: ?Sized>(error: E) -> Self
    where
        E: WorkError<Marker>,
    {
        Self::Work { error, as_error: E::as_error }
    }

    pub(crate) fn as_error(&self) -> &(dyn StdError + 'static) {
        match self {
            Self::Sqlock(error) => error,
            Self::Work { error, as_error } => as_error(error),
        }
    }

    /// Returns the error in the type of the work.
    pub(crate) fn into_error(self) -> E
    where
        E: From<Error>,
    {
        match self {
            Self::Sqlock(error) => error.into(),
            Self::Work { error, .. } => error,
        }
    }
}

impl<E> From<sqlx::Error> for RunError<E> {
    fn from(error: sqlx::Error) -> Self {
        Self::Sqlock(error.into())
    }
}

/// Returns whether an error, or one of its sources, is a concurrent change.
pub(super) fn is_conflict_error(error: &(dyn StdError + 'static)) -> bool {
    is_conflict_of_server(error)
        || with_sources(error).any(|error| {
            error.downcast_ref::<Error>().is_some_and(Error::is_conflict) || error.is::<ConcurrentChange>()
        })
}

/// Returns whether an error, or one of its sources, is a concurrent change that the server has
/// found. MySQL and MariaDB have rolled the transaction back then.
pub(super) fn is_conflict_of_server(error: &(dyn StdError + 'static)) -> bool {
    // A transparent error of the caller around an error of this crate shows only the source of that
    // error.
    with_sources(error).any(|error| {
        error.downcast_ref() == Some(&RowError::StaleSnapshot)
            || error.downcast_ref() == Some(&FenceError::StaleSnapshot)
            || Fault::from_any(error) == Some(Fault::RolledBack)
    })
}

/// Returns whether an error, or one of its sources, is a version conflict, and none is a concurrent
/// change that the server has found.
#[cfg(feature = "axum")]
pub(crate) fn is_version_conflict(error: &(dyn StdError + 'static)) -> bool {
    with_sources(error).any(|error| error.is::<ConcurrentChange>()) && !is_conflict_of_server(error)
}

/// Returns whether SQLite may have ended the transaction with an error, or one of its sources: no
/// memory, an interruption, an I/O error, a full disk.
/// <https://www.sqlite.org/lang_transaction.html#response_to_errors_within_a_transaction>
pub(super) fn may_end_transaction(error: &(dyn StdError + 'static)) -> bool {
    let code = |error: &(dyn StdError + 'static)| {
        let error = error.downcast_ref::<Box<dyn DatabaseError>>()?;
        error.code()?.parse::<u32>().ok()
    };
    with_sources(error).filter_map(code).any(|code| matches!(code & 0xff, 7 | 9 | 10 | 13))
}

fn with_sources<'e>(error: &'e (dyn StdError + 'static)) -> impl Iterator<Item = &'e (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |error| (**error).source())
}
