//! The seam between the locks and the databases: what a database must be able to do, in batches.
//!
//! A [`Backend`] opens [`Session`]s; a session is one connection. Each verb of a session takes a batch, names any name at
//! most once, in ascending order of names, and answers in the order of the batch. Every verb may be sent again when its
//! reply was lost: an acquisition is known by its hold, which is chosen before it is sent.
//!
//! No verb waits in the server for another client's transaction.

#[cfg(feature = "mysql")]
pub(crate) mod mysql;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::error::Result;
use crate::name::LockName;
use crate::owner::{Hold, Owner};
use crate::token::FencingToken;

/// A storage operation under way.
pub(crate) type Job<'a, T> = Pin<Box<dyn Future<Output = Result<T, sqlx::Error>> + Send + 'a>>;

/// A database that leases can be kept in.
pub(crate) trait Backend: Send + Sync {
    /// Opens a connection of its own, ready for the verbs.
    fn connect(&self) -> Job<'_, Box<dyn Session>>;

    /// How many connections at most do any good. SQLite has one writer.
    fn useful_connections(&self) -> usize;

    /// Whether an acquisition also fails, rather than wait, when the row of a free name is locked for a moment. SQLite locks
    /// no rows.
    fn skips_locked_rows(&self) -> bool {
        true
    }

    /// Creates the tables or brings them up to date.
    fn migrate(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>>;
}

/// One connection, and the verbs that the pump sends on it.
pub(crate) trait Session: Send {
    /// Takes each name that is free. `None`: it is not.
    fn acquire<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>>;

    /// Adds a hold to each name that the claim's owner holds already. `None`: it does not.
    fn join<'a>(&'a mut self, claims: &'a [Claim]) -> Job<'a, Vec<Option<FencingToken>>>;

    /// Moves the expiry. `false`: the holding was not found as named.
    fn renew<'a>(&'a mut self, renewals: &'a [Renewal]) -> Job<'a, Vec<bool>>;

    /// Ends the hold; the last one frees the name. `false`: the holding was not found as named.
    fn release<'a>(&'a mut self, releases: &'a [Release]) -> Job<'a, Vec<bool>>;

    /// Ends a holding and gives the name to the claim, in one step. `None`: nothing was changed.
    fn hand_off<'a>(&'a mut self, hand_offs: &'a [HandOff]) -> Job<'a, Vec<Option<FencingToken>>>;

    /// Reads the rows of the names, without locking anything. A name without a row is left out.
    fn look<'a>(&'a mut self, names: &'a [LockName]) -> Job<'a, Vec<Row>>;

    /// Reads the rows of all names that begin with `prefix` and are held, in order of names.
    fn list<'a>(&'a mut self, prefix: &'a str) -> Job<'a, Vec<Row>>;

    /// Ends the holding with that token, whoever has it. `false`: that token does not hold.
    fn evict<'a>(&'a mut self, name: &'a LockName, token: FencingToken) -> Job<'a, bool>;

    /// Deletes up to `limit` rows that have been free, and whose token was overtaken by the clock, for `retention`.
    fn sweep(&mut self, retention: Duration, limit: u32) -> Job<'_, u64>;

    /// Ends the connection in order.
    fn close(self: Box<Self>) -> Job<'static, ()>;
}

/// A request for a name.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) hold: Hold,
    pub(crate) ttl: Duration,
    /// The holder in words, for people.
    pub(crate) holder: Arc<str>,
    pub(crate) label: Arc<str>,
}

/// One hold of one owner on a name.
#[derive(Clone, Debug)]
pub(crate) struct Holding {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) hold: Hold,
    pub(crate) token: FencingToken,
}

#[derive(Clone, Debug)]
pub(crate) struct Renewal {
    pub(crate) holding: Holding,
    pub(crate) ttl: Duration,
}

#[derive(Clone, Debug)]
pub(crate) struct Release {
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) hold: Hold,
    /// `None` undoes an acquisition whose reply never came.
    pub(crate) token: Option<FencingToken>,
    /// The name stays taken, by nobody, until it has been held so long. Zero: it is free at once.
    pub(crate) hold_at_least: Duration,
}

#[derive(Clone, Debug)]
pub(crate) struct HandOff {
    pub(crate) from: Holding,
    pub(crate) to: Claim,
}

/// What stands in the table about a name.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) owner: String,
    pub(crate) holds: String,
    pub(crate) token: i64,
    pub(crate) holder: String,
    pub(crate) label: String,
    /// Microseconds since the Unix epoch, as `expires_at` and `now`: all by the database's clock.
    pub(crate) acquired_at: i64,
    pub(crate) expires_at: i64,
    pub(crate) now: i64,
}

/// The columns of [`Row`], in the order in which every backend selects them.
macro_rules! row_columns {
    () => {
        "name, owner, holds, token, holder, label, acquired_at, expires_at"
    };
}
pub(crate) use row_columns;

impl Row {
    /// How long it is still held; `None` when it is free.
    pub(crate) fn held_for(&self) -> Option<Duration> {
        let left = u64::try_from(self.expires_at - self.now).ok().filter(|us| *us > 0)?;
        (!self.holds.is_empty()).then(|| Duration::from_micros(left))
    }

    /// What has become of a holding.
    pub(crate) fn standing(&self, owner: Owner, hold: Hold, token: Option<FencingToken>) -> Standing {
        if self.owner != owner.to_string() || token.is_some_and(|t| t.get() != self.token) {
            Standing::Superseded
        } else if self.holds.contains(&hold.mark()) {
            Standing::Held
        } else {
            Standing::Released
        }
    }
}

/// What has become of a holding, as far as its row tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It stands as named.
    Held,
    /// It was given back, and nobody has come since.
    Released,
    /// Another holding stands there, or none of ours ever did.
    Superseded,
    /// It stands as named, yet an update that named it did not match: nothing was done.
    Unsettled,
}

/// Durations go to the database in microseconds.
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// A token as read from a row. The tables hold positive ones only; anything else is no grant.
pub(crate) fn token(value: i64) -> Option<FencingToken> {
    FencingToken::new(value)
}

/// Brings answers that came in any order into the order of the batch.
#[cfg(any(feature = "postgres", feature = "sqlite"))]
pub(crate) fn in_order<T, A: Clone>(
    batch: &[T],
    name: impl Fn(&T) -> &LockName,
    answers: impl IntoIterator<Item = (String, A)>,
) -> Vec<Option<A>> {
    let answers: std::collections::HashMap<String, A> = answers.into_iter().collect();
    batch.iter().map(|item| answers.get(name(item).as_str()).cloned()).collect()
}

/// Which holdings of a batch an update matched, where the database tells only how many. When that leaves a doubt, the rows
/// tell: `after` is how a holding stands that was matched.
#[cfg(any(feature = "mysql", feature = "sqlite"))]
pub(crate) async fn matched(
    session: &mut dyn Session,
    affected: u64,
    batch: &[(&LockName, Owner, Hold, Option<FencingToken>)],
    after: Standing,
) -> Result<Vec<bool>, sqlx::Error> {
    if affected == 0 || affected == batch.len() as u64 {
        return Ok(vec![affected > 0; batch.len()]);
    }
    let names: Vec<LockName> = batch.iter().map(|(name, ..)| (*name).clone()).collect();
    let rows = session.look(&names).await?;
    Ok(batch
        .iter()
        .map(|&(name, owner, hold, token)| {
            let row = rows.iter().find(|row| row.name == name.as_str());
            row.is_some_and(|row| row.standing(owner, hold, token) == after)
        })
        .collect())
}

/// For the verbs whose answer is that a row was found.
#[cfg(feature = "postgres")]
pub(crate) fn found(answers: Vec<Option<()>>) -> Vec<bool> {
    answers.into_iter().map(|answer| answer.is_some()).collect()
}

/// The databases whose transactions can be fenced: [`sqlx::Postgres`], [`sqlx::MySql`] (also MariaDB), [`sqlx::Sqlite`].
///
/// Sealed: nobody else can implement it.
pub trait Database: sqlx::Database + sealed::Fence {}

pub(crate) mod sealed {
    use std::pin::Pin;

    /// A holding in the words of its row.
    #[derive(Debug)]
    pub struct Check {
        pub name: String,
        pub owner: String,
        pub mark: String,
        pub token: i64,
    }

    /// What the row says to a transaction that wants to be fenced.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Verdict {
        /// Nobody else can be granted the name until this transaction has ended.
        Fenced,
        /// The holding has ended.
        Superseded,
        /// The transaction reads from before the holding.
        StaleSnapshot,
    }

    /// The part of [`Database`](super::Database) that is nobody's business outside.
    pub trait Fence: sqlx::Database {
        /// Which kind of backend the transaction must belong to.
        const KIND: super::Kind;

        /// Checks the holding and keeps everybody else from it until the transaction ends.
        fn fence<'a>(
            conn: &'a mut Self::Connection,
            check: &'a Check,
        ) -> Pin<Box<dyn Future<Output = Result<Verdict, sqlx::Error>> + Send + 'a>>;
    }
}

/// The kinds of database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Kind {
    Postgres,
    MySql,
    Sqlite,
}
