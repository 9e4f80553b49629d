//! The seam between the locks and the databases: what a database must be able to do.
//!
//! A [`Backend`] opens [`Session`]s; a session is one connection. Whatever is asked of it may be asked again when the answer was lost.

#[cfg(test)]
#[allow(clippy::expect_used, clippy::panic, clippy::print_stdout, dead_code, reason = "tests")]
pub(crate) mod differential;
pub(crate) mod failover;
#[cfg(any(test, feature = "testing"))]
pub(crate) mod memory;
#[cfg(feature = "mysql")]
pub(crate) mod mysql;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
pub(crate) mod records;
#[cfg(feature = "sqlite")]
pub(crate) mod sqlite;
pub(crate) mod stored;
pub(crate) mod table;

use std::pin::Pin;
use std::time::Duration;

use crate::clock::{CENTURY, Clock};
use crate::error::Result;
use crate::name::LockName;
use crate::owner::Owner;
use crate::protocol::{Batch, LeaseId, Mode, Request, Response};
use crate::token::FencingToken;

/// A storage operation under way.
pub(crate) type Job<'a, T> = Pin<Box<dyn Future<Output = Result<T, sqlx::Error>> + Send + 'a>>;

/// A database that leases can be kept in.
pub(crate) trait Backend: Send + Sync {
    /// Opens a connection of its own, ready for the verbs.
    fn connect(&self) -> Job<'_, Box<dyn Session>>;

    /// The clock that its clients keep their deadlines on.
    fn clock(&self) -> Clock {
        Clock::Host
    }

    /// How many connections at most do any good. SQLite has one writer.
    fn useful_connections(&self) -> usize;

    /// Whether connections for heartbeats hear of grants by other clients, as far as is known.
    fn can_notify(&self) -> bool {
        false
    }

    /// Opens a connection for heartbeats, which hears of grants by other clients where the database can tell.
    fn connect_for_heartbeats(&self) -> Job<'_, Box<dyn Session>> {
        self.connect()
    }

    /// How many requests its connections carry out together, in a [`Batch`].
    fn longest_batch(&self) -> usize;

    /// Where it is, for people: never with a credential.
    fn place(&self) -> String;

    /// Makes all connections wait until a second server has what the first has done. `false`: here is no such thing.
    fn synchronous(&mut self) -> bool {
        false
    }

    /// Whether other servers take writes as well, and know nothing of the locks of transactions here.
    fn is_one_of_many_writers(&self) -> bool {
        false
    }

    /// Creates the tables or brings them up to date.
    fn migrate(&self) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>>;

    /// Opens what session locks live on, or says why they would be a lie here.
    fn anchor(&self) -> Anchoring<'_>;
}

/// An [`Anchor`] that is being opened.
pub(crate) type Anchoring<'a> = Pin<Box<dyn Future<Output = Result<Box<dyn Anchor>>> + Send + 'a>>;

/// What session locks live on, and end with: one connection that is used for nothing else, or the open files of this process.
///
/// Nothing waits in the server. A lock of one name is taken once, and given back before it is taken again.
pub(crate) trait Anchor: Send {
    /// For how long it outlives the last statement that the server has received: then, and after any error that is not the
    /// server's own word on one lock, nothing is known of the others. `None`: it ends with this process and no sooner.
    fn outlives_silence(&self) -> Option<Duration>;

    /// Takes a lock that is free. `false`: it is not.
    fn take<'a>(&'a mut self, name: &'a LockName, shared: bool) -> Job<'a, bool>;

    /// Gives a lock back. `false`: it was not held.
    fn give_back<'a>(&'a mut self, name: &'a LockName, shared: bool) -> Job<'a, bool>;

    /// Asks whether it is still what it was; an error says that it is not.
    fn prove(&mut self) -> Job<'_, ()>;

    /// Gives every lock back and ends.
    fn close(self: Box<Self>) -> Job<'static, ()>;
}

/// How long the server keeps a session from which nothing is heard, where it can be told.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const SILENCE: Duration = Duration::from_secs(15);

/// What stands for a name within a place (a schema, a database) where names are numbers, or short, or know no case.
pub(crate) fn session_key(place: &str, name: &LockName) -> [u8; 32] {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    hash.update(b"sqlock/session/1");
    for part in [place, name.as_str()] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// Two digits for each byte.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The session is not the one that it was: something between us and the server passes statements on to another.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) fn another_session() -> sqlx::Error {
    sqlx::Error::Protocol("the statement was answered by another session".into())
}

/// The connection was lost while it was idle.
#[cfg(feature = "postgres")]
pub(crate) fn lost_connection() -> sqlx::Error {
    sqlx::Error::Io(std::io::ErrorKind::ConnectionReset.into())
}

/// One connection of the executor.
pub(crate) trait Session: Send {
    /// Carries out a request about leases.
    fn execute<'a>(&'a mut self, request: &'a Request) -> Job<'a, Response>;

    /// Carries out the requests of a batch, and answers in their order. `None`: nothing has come of a request, and it is to be sent
    /// alone.
    fn execute_batch<'a>(&'a mut self, batch: &'a Batch) -> Job<'a, Vec<Option<Response>>> {
        let _ = batch;
        Box::pin(async { Ok(Vec::new()) })
    }

    /// Waits until another client has granted this one a name, which is returned. An error says that the connection is lost.
    ///
    /// # Cancel safety
    ///
    /// Nothing is missed when the future is dropped.
    fn notified(&mut self) -> Job<'_, String> {
        Box::pin(std::future::pending())
    }

    /// Reads who holds which names, in order of names.
    fn list<'a>(&'a mut self, names: &'a Names) -> Job<'a, Vec<Listed>>;

    /// Reads the live entries that wait for a name, in the order of their arrival.
    fn waiters<'a>(&'a mut self, name: &'a LockName) -> Job<'a, Vec<Waiter>>;

    /// Purges the names of one range: those that nobody has held or waited for since the retention, and whose token the clock has
    /// overtaken by then; and with them their entries that expired as long ago. After the last range, also the clients of as long ago
    /// that nothing names.
    fn sweep<'a>(&'a mut self, range: &'a SweepRange) -> Job<'a, Swept>;

    /// For how long the server has been up, by its own clock. `None`: there is no server.
    fn uptime(&mut self) -> Job<'_, Option<Duration>> {
        Box::pin(async { Ok(None) })
    }

    /// Makes sure that a row stands for the name, to be locked by others. Waits for nobody who has locked it. Where a database
    /// locks no rows, there is nothing to do.
    fn ensure<'a>(&'a mut self, name: &'a LockName) -> Job<'a, ()> {
        let _ = name;
        Box::pin(async { Ok(()) })
    }

    /// Runs a maintenance command on records of requests.
    fn record<'a>(&'a mut self, errand: &'a records::Errand) -> Job<'a, records::Findings>;

    /// What the catalogue says about a column, for those whose transactions [cannot ask](sealed::Catalogued::Elsewhere) themselves:
    /// of a schema, a table, a column.
    fn column<'a>(&'a mut self, of: &'a (String, String, String)) -> Job<'a, Option<sealed::Column>> {
        let _ = of;
        Box::pin(async { Ok(None) })
    }

    /// Ends the connection in order.
    fn close(self: Box<Self>) -> Job<'static, ()>;
}

/// How long the row of a name stays that nobody asks for, to be locked. Whoever asks for it makes sure of it every
/// [`ENSURED_FOR`](crate::transaction::row_cache::ENSURED_FOR) and notes that down every [`NOTED`].
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const UNSEEN: Duration = Duration::from_secs(3600);

/// How old the note may get that a row is in use. Writing it makes others' snapshots stale, so it is written seldom.
#[cfg(any(feature = "postgres", feature = "mysql"))]
pub(crate) const NOTED: Duration = Duration::from_secs(600);

/// A range of names to be purged.
#[derive(Clone, Debug)]
pub(crate) struct SweepRange {
    /// It begins behind this name. Empty: with the first name.
    pub(crate) after: String,
    /// So many names are looked at.
    pub(crate) limit: u32,
    pub(crate) retention: Duration,
}

/// What came of a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Swept {
    /// How many names were purged.
    pub(crate) purged: u64,
    /// The last name of the range. `None`: there are no more names.
    pub(crate) last: Option<String>,
}

/// The first text behind all that begin with a prefix, in the order of their bytes. `None`: there is none.
pub(crate) fn end_of_prefix(prefix: &str) -> Option<String> {
    let mut end: Vec<char> = prefix.chars().collect();
    while let Some(last) = end.pop() {
        if let Some(next) = (u32::from(last) + 1..=u32::from(char::MAX)).find_map(char::from_u32) {
            end.push(next);
            return Some(end.into_iter().collect());
        }
    }
    None
}

/// Which names to list.
#[derive(Clone, Debug)]
pub(crate) enum Names {
    BeginningWith(String),
    Just(LockName),
}

/// A holder as it is listed. Moments are microseconds since the Unix epoch, by the database's clock.
#[derive(Clone, Debug)]
pub(crate) struct Listed {
    pub(crate) name: String,
    pub(crate) mode: Mode,
    /// `None`: it was released, and is kept from others.
    pub(crate) owner: Option<Owner>,
    /// How many acquisitions of the owner hold together.
    pub(crate) acquisitions: i64,
    pub(crate) token: i64,
    pub(crate) holder: String,
    pub(crate) label: String,
    pub(crate) acquired_at: i64,
    /// By its expiry and the heartbeat of its client.
    pub(crate) expires_at: i64,
    pub(crate) now: i64,
    pub(crate) waiters: i64,
}

/// An entry that waits, as it is listed.
#[derive(Clone, Debug)]
pub(crate) struct Waiter {
    pub(crate) id: LeaseId,
    pub(crate) mode: Mode,
    pub(crate) holder: String,
    pub(crate) label: String,
    pub(crate) arrived_at: i64,
}

/// Durations go to the database in microseconds, which are added to the time there: not so many that the sum is no number.
pub(crate) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.min(CENTURY).as_micros()).unwrap_or(i64::MAX)
}

/// The rows that can be read. One that cannot costs the others nothing.
pub(crate) fn readable<T>(rows: impl Iterator<Item = Result<T, sqlx::Error>>) -> impl Iterator<Item = T> {
    rows.filter_map(|row| row.inspect_err(|error| tracing::warn!(%error, "left out a row that cannot be read")).ok())
}

/// A token as read from a row. The tables hold positive ones only; anything else is no grant.
pub(crate) fn token(value: i64) -> Option<FencingToken> {
    FencingToken::new(value)
}

/// The error of a look at what became of a statement that took effect. It counts as if the statement had not been answered: when that is
/// sent again, what it did the first time must not be taken for the work of others.
///
/// A row that cannot be read will not be read the next time either. The executor knows that from the error.
#[cfg(feature = "sqlite")]
pub(crate) fn in_doubt(error: sqlx::Error) -> sqlx::Error {
    if is_unreadable(&error) { error } else { sqlx::Error::Io(std::io::Error::other(error)) }
}

/// Whether a statement was carried out, and its answer has a value in it that is none.
#[cfg(feature = "sqlite")]
pub(crate) fn is_unreadable(error: &sqlx::Error) -> bool {
    matches!(error, sqlx::Error::ColumnDecode { .. } | sqlx::Error::Decode(_))
}

/// The databases whose transactions can be fenced: [`sqlx::Postgres`], [`sqlx::MySql`] (also MariaDB), [`sqlx::Sqlite`].
///
/// Sealed: nobody else can implement it.
pub trait Database: sqlx::Database + sealed::Fence + sealed::Dialect + records::Records {}

pub(crate) mod sealed {
    use std::pin::Pin;

    /// A holding in the words of its row.
    #[derive(Debug)]
    pub struct Check {
        pub name: String,
        pub id: String,
        pub token: i64,
        /// Locks are not seen by others who may write: see [`Backend`](super::Backend::is_one_of_many_writers).
        pub by_writing: bool,
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

    /// What statements on the caller's own tables are made of. Part of [`Database`](super::Database) that is nobody's business
    /// outside.
    pub trait Dialect: sqlx::Database {
        /// Encloses the name of a table or column; doubled inside.
        const QUOTE: char;
        /// As what a whole number of any width is read: `CAST(… AS …)`.
        const INTEGER: &'static str;
        /// Makes a SELECT read what is there now, not what was there when the transaction began to read.
        const PRESENT: &'static str;
        /// How a transaction begins that is going to write. `None`: as any other.
        const BEGIN: Option<&'static str>;
        /// Whether an error leaves a transaction unusable.
        const ABORTS: bool;
        /// Whether rows are locked one by one, or all at once with the database.
        const LOCKS_ROWS: bool;
        /// Whether a statement with several keys of a unique index locks only their rows.
        const LOOKS_UP_SEVERAL: bool;

        /// The statements with which a transaction begins, made from the one that the caller would have.
        fn begin(sql: sqlx::SqlStr) -> sqlx::SqlStr {
            sql
        }

        /// Ends a transaction that began with [these](Self::begin), where the driver does not do that as well.
        fn end(conn: &mut Self::Connection, ending: Ending) -> super::Job<'_, Ended> {
            let _ = (conn, ending);
            Box::pin(async { Ok(Ended::ByDriver) })
        }

        /// The rows that a statement returns.
        fn fetch<'a>(
            conn: &'a mut Self::Connection,
            query: &'a mut sqlx::QueryBuilder<Self>,
        ) -> super::Job<'a, Vec<Self::Row>>;

        /// Ends what is left of a transaction on a connection that another is to use. `false`: only closing the connection does.
        fn settle(conn: &mut Self::Connection) -> super::Job<'_, bool> {
            let _ = conn;
            Box::pin(async { Ok(false) })
        }

        /// What stands in a column that was read as [`INTEGER`](Self::INTEGER).
        fn integer(row: &Self::Row, column: usize) -> Result<i64, sqlx::Error>;

        /// Binds a whole number.
        fn push_integer(query: &mut sqlx::QueryBuilder<Self>, value: i64);

        /// How many rows a statement has matched.
        fn execute<'a>(conn: &'a mut Self::Connection, query: &'a mut sqlx::QueryBuilder<Self>) -> super::Job<'a, u64>;

        /// What makes a SELECT lock its rows.
        fn clauses(locking: Locking) -> Clauses;

        /// What to select for the row that stands for a name, up to the clauses.
        fn push_named(query: &mut sqlx::QueryBuilder<Self>, name: &str);

        /// Does what has to be done once that row is locked, so that others notice.
        fn mark<'a>(conn: &'a mut Self::Connection, locked: &'a Self::Row, name: &'a str) -> super::Job<'a, ()> {
            let _ = (conn, locked, name);
            Box::pin(async { Ok(()) })
        }

        /// What an error of a statement that locks rows says about the lock.
        fn refusal(error: &sqlx::Error) -> Option<Refusal>;

        /// Whether that error has ended the transaction although it looks like one that does not.
        fn has_rolled_back<'a>(conn: &'a mut Self::Connection, error: &'a sqlx::Error) -> super::Job<'a, bool> {
            let _ = (conn, error);
            Box::pin(async { Ok(false) })
        }

        /// Where an error [would](Self::ABORTS), keeps the next statement from ending the transaction, and bounds its time.
        /// What is returned restores the settings.
        fn guard(conn: &mut Self::Connection, within: Option<std::time::Duration>) -> super::Job<'_, String> {
            let _ = (conn, within);
            Box::pin(async { Ok(String::new()) })
        }

        /// After [`guard`](Self::guard), once the statement has succeeded or failed.
        fn unguard<'a>(conn: &'a mut Self::Connection, settings: &'a str, succeeded: bool) -> super::Job<'a, ()> {
            let _ = (conn, settings, succeeded);
            Box::pin(async { Ok(()) })
        }

        /// Where [no single rows](Self::LOCKS_ROWS) are locked, makes sure that the transaction has the lock on them all.
        fn seize<'a>(conn: &'a mut Self::Connection, table: &'a str) -> super::Job<'a, ()> {
            let _ = (conn, table);
            Box::pin(async { Ok(()) })
        }

        /// What the catalogue says about a column. `None`: it knows no such table, or no such column in it.
        fn column<'a>(
            conn: &'a mut Self::Connection,
            table: &'a crate::backend::table::Table,
            column: &'a str,
        ) -> super::Job<'a, Catalogued>;

        /// What to select for the key of a row, so that it can be read as a key of that type.
        fn push_column(query: &mut sqlx::QueryBuilder<Self>, column: &str, key: &Self::TypeInfo) {
            let _ = key;
            query.push(column);
        }

        /// Whether keys of a type can be looked up in an index on such a column.
        fn suits(key: &Self::TypeInfo, column: &Column) -> bool {
            let _ = (key, column);
            true
        }
    }

    /// How a transaction is to end.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Ending {
        Commit,
        Rollback,
    }

    /// What came of the end of a transaction.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Ended {
        /// It is still open: the driver is to end it.
        ByDriver,
        /// It ended as it was to, and the session is as it was before.
        AsAsked,
        /// It had ended before it was to be committed: rolled back, or committed, by one of its own statements.
        Before,
    }

    /// How rows are to be locked.
    #[derive(Clone, Copy, Debug)]
    pub struct Locking {
        pub shared: bool,
        /// Also against those who only refer to the row by its key.
        pub key_update: bool,
        pub wait: Wait,
    }

    /// What to do about rows that others have locked.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Wait {
        /// Wait, as long as the session's own settings allow.
        Unbounded,
        /// Wait, but not longer.
        AtMost(std::time::Duration),
        /// Fail.
        Refuse,
        /// Leave them out.
        Skip,
    }

    /// What stands before a SELECT, right behind the word, and at its end.
    #[derive(Debug, Default)]
    pub struct Clauses {
        pub before: String,
        pub hint: String,
        pub after: String,
    }

    /// Why a row was not locked.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Refusal {
        /// Somebody else has it.
        Taken,
        /// The statement ran into a bound on its time.
        Cut,
        /// The transaction reads from before the row became what it is.
        Stale,
        /// The transaction cannot get the lock on the database.
        Deferred,
    }

    /// An answer of the catalogue.
    #[derive(Debug)]
    pub enum Catalogued {
        Known(Column),
        /// There is no such table, or it has no such column.
        Unknown,
        /// To look into it would be the beginning of what the transaction reads. Another connection can, in this schema.
        Elsewhere(String),
    }

    /// What the catalogue says about a column.
    #[derive(Clone, Debug)]
    pub struct Column {
        /// Its type, as the database calls it.
        pub type_name: String,
        /// A unique index on this column alone, if possible one without an obstacle.
        pub unique: Option<Unique>,
        /// The engine that keeps the table, if it locks no rows.
        pub rowless: Option<String>,
    }

    /// A unique index.
    #[derive(Clone, Debug)]
    pub struct Unique {
        pub name: String,
        /// Why the database would not look a single row up in it.
        pub obstacle: Option<String>,
    }

    impl Unique {
        /// An index that can be used.
        #[cfg(any(feature = "postgres", feature = "sqlite"))]
        pub fn usable(name: String) -> Self {
            Self { name, obstacle: None }
        }
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
    #[cfg(feature = "testing")]
    Memory,
}
