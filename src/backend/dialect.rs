//! The dialects of SQL: statements on the caller's own tables, in the caller's own transactions.

use std::time::Duration;

use super::store::Job;
use super::table::Table;

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
    fn end(conn: &mut Self::Connection, ending: Ending) -> Job<'_, Ended> {
        let _ = (conn, ending);
        Box::pin(async { Ok(Ended::ByDriver) })
    }

    /// The rows that a statement returns.
    fn fetch<'a>(conn: &'a mut Self::Connection, query: &'a mut sqlx::QueryBuilder<Self>) -> Job<'a, Vec<Self::Row>>;

    /// Ends what is left of a transaction on a connection that another is to use. `false`: only closing the connection does.
    fn settle(conn: &mut Self::Connection) -> Job<'_, bool> {
        let _ = conn;
        Box::pin(async { Ok(false) })
    }

    /// What stands in a column that was read as [`INTEGER`](Self::INTEGER).
    fn integer(row: &Self::Row, column: usize) -> Result<i64, sqlx::Error>;

    /// Binds a whole number.
    fn push_integer(query: &mut sqlx::QueryBuilder<Self>, value: i64);

    /// How many rows a statement has matched.
    fn execute<'a>(conn: &'a mut Self::Connection, query: &'a mut sqlx::QueryBuilder<Self>) -> Job<'a, u64>;

    /// What makes a SELECT lock its rows.
    fn clauses(locking: Locking) -> Clauses;

    /// What to select for the row that stands for a name, up to the clauses.
    fn push_named(query: &mut sqlx::QueryBuilder<Self>, name: &str);

    /// Does what has to be done once that row is locked, so that others notice.
    fn mark<'a>(conn: &'a mut Self::Connection, locked: &'a Self::Row, name: &'a str) -> Job<'a, ()> {
        let _ = (conn, locked, name);
        Box::pin(async { Ok(()) })
    }

    /// What an error of a statement that locks rows says about the lock.
    fn refusal(error: &sqlx::Error) -> Option<Refusal>;

    /// Whether that error has ended the transaction although it looks like one that does not.
    fn has_rolled_back<'a>(conn: &'a mut Self::Connection, error: &'a sqlx::Error) -> Job<'a, bool> {
        let _ = (conn, error);
        Box::pin(async { Ok(false) })
    }

    /// Where an error [would](Self::ABORTS), keeps the next statement from ending the transaction, and bounds its time.
    /// What is returned restores the settings.
    fn guard(conn: &mut Self::Connection, within: Option<Duration>) -> Job<'_, String> {
        let _ = (conn, within);
        Box::pin(async { Ok(String::new()) })
    }

    /// After [`guard`](Self::guard), once the statement has succeeded or failed.
    fn unguard<'a>(conn: &'a mut Self::Connection, settings: &'a str, succeeded: bool) -> Job<'a, ()> {
        let _ = (conn, settings, succeeded);
        Box::pin(async { Ok(()) })
    }

    /// Where [no single rows](Self::LOCKS_ROWS) are locked, makes sure that the transaction has the lock on them all.
    fn seize<'a>(conn: &'a mut Self::Connection, table: &'a str) -> Job<'a, ()> {
        let _ = (conn, table);
        Box::pin(async { Ok(()) })
    }

    /// What the catalogue says about a column. `None`: it knows no such table, or no such column in it.
    fn column<'a>(conn: &'a mut Self::Connection, table: &'a Table, column: &'a str) -> Job<'a, Catalogued>;

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
    AtMost(Duration),
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
