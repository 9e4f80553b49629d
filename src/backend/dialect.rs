//! The dialects of SQL: statements on the caller's own tables, in the caller's own transactions.

use std::time::Duration;

use super::store::StoreFuture;
use super::table::Table;

/// The syntax and the behaviour of statements on the caller's own tables. Part of the sealed
/// [`Database`](super::Database).
pub trait Dialect: sqlx::Database {
    /// The quote around names of tables and columns. It is doubled inside a name.
    const QUOTE: char;
    /// The type to which integers of any width are cast: `CAST(… AS …)`.
    const INTEGER: &'static str;
    /// The clause with which a SELECT reads the latest committed rows instead of the snapshot.
    const CURRENT_READ: &'static str;
    /// The statement that begins a transaction that will write. `None`: the driver's default.
    const BEGIN: Option<&'static str>;
    /// Whether an error of a statement aborts the transaction.
    const ERRORS_ABORT: bool;
    /// Whether the database locks single rows. Otherwise it locks all rows at once.
    const LOCKS_ROWS: bool;
    /// Whether a statement with several keys of a unique index locks only their rows.
    const LOCKS_LISTED_KEYS_ONLY: bool;

    /// Returns the statements that begin a transaction, given the caller's own.
    fn begin_sql(sql: sqlx::SqlStr) -> sqlx::SqlStr {
        sql
    }

    /// Ends a transaction that began with [`begin_sql`](Self::begin_sql), unless the driver can end
    /// it.
    fn end_transaction(conn: &mut Self::Connection, ending: Ending) -> StoreFuture<'_, EndOutcome> {
        let _ = (conn, ending);
        Box::pin(async { Ok(EndOutcome::StillOpen) })
    }

    /// Runs a statement and returns its rows.
    fn fetch<'a>(
        conn: &'a mut Self::Connection,
        query: &'a mut sqlx::QueryBuilder<Self>,
    ) -> StoreFuture<'a, Vec<Self::Row>>;

    /// Runs a `SELECT *`, whose columns may change between two runs, and returns its rows.
    fn fetch_all_columns<'a>(
        conn: &'a mut Self::Connection,
        query: &'a mut sqlx::QueryBuilder<Self>,
    ) -> StoreFuture<'a, Vec<Self::Row>> {
        Self::fetch(conn, query)
    }

    /// Ends an unfinished transaction before the connection is reused. Returns `false` if the
    /// connection must be closed instead.
    fn reset(conn: &mut Self::Connection) -> StoreFuture<'_, bool> {
        let _ = conn;
        Box::pin(async { Ok(false) })
    }

    /// Reads a column that was cast to [`INTEGER`](Self::INTEGER).
    fn integer(row: &Self::Row, column: usize) -> Result<i64, sqlx::Error>;

    /// Binds an integer.
    fn push_integer(query: &mut sqlx::QueryBuilder<Self>, value: i64);

    /// Returns the greatest number of an integer column, if the catalogue has it.
    fn greatest_integer<'a>(
        conn: &'a mut Self::Connection,
        table: &'a Table,
        column: &'a str,
    ) -> StoreFuture<'a, Option<i64>> {
        let _ = (conn, table, column);
        Box::pin(async { Ok(None) })
    }

    /// Runs a statement and returns how many rows it matched.
    fn execute<'a>(conn: &'a mut Self::Connection, query: &'a mut sqlx::QueryBuilder<Self>) -> StoreFuture<'a, u64>;

    /// Returns the clauses with which a SELECT locks its rows.
    fn clauses(locking: Locking) -> Clauses;

    /// Adds the selection of the row of a name, up to the clauses.
    fn push_named_row(query: &mut sqlx::QueryBuilder<Self>, name: &str);

    /// Writes the locked row of a name if other transactions would not notice the lock otherwise.
    fn touch_row<'a>(conn: &'a mut Self::Connection, locked: &'a Self::Row, name: &'a str) -> StoreFuture<'a, ()> {
        let _ = (conn, locked, name);
        Box::pin(async { Ok(()) })
    }

    /// Returns why a statement that locks rows failed, if the error is about the lock.
    fn lock_failure(error: &sqlx::Error) -> Option<LockFailure>;

    /// Returns whether the server rolled back the transaction on this error. The error usually ends
    /// only the statement.
    fn has_rolled_back<'a>(conn: &'a mut Self::Connection, error: &'a sqlx::Error) -> StoreFuture<'a, bool> {
        let _ = (conn, error);
        Box::pin(async { Ok(false) })
    }

    /// Sets a savepoint before a statement whose error would [abort](Self::ERRORS_ABORT) the
    /// transaction, and limits the time of the statement. Returns the previous settings.
    fn set_savepoint(conn: &mut Self::Connection, within: Option<Duration>) -> StoreFuture<'_, String> {
        let _ = (conn, within);
        Box::pin(async { Ok(String::new()) })
    }

    /// Releases the savepoint of [`set_savepoint`](Self::set_savepoint), or rolls back to it if the
    /// statement failed, and restores the settings.
    fn end_savepoint<'a>(conn: &'a mut Self::Connection, settings: &'a str, succeeded: bool) -> StoreFuture<'a, ()> {
        let _ = (conn, settings, succeeded);
        Box::pin(async { Ok(()) })
    }

    /// Takes the lock on the whole database if it does not [lock rows](Self::LOCKS_ROWS).
    fn lock_database<'a>(conn: &'a mut Self::Connection, table: &'a str) -> StoreFuture<'a, ()> {
        let _ = (conn, table);
        Box::pin(async { Ok(()) })
    }

    /// Looks up the first of these columns in the catalogue, and a unique index on all of them.
    fn column<'a>(
        conn: &'a mut Self::Connection,
        table: &'a Table,
        columns: &'a [String],
    ) -> StoreFuture<'a, ColumnLookup>;

    /// Adds the selection of a key column so that it can be read as a key of that type.
    fn push_column(query: &mut sqlx::QueryBuilder<Self>, column: &str, key: &Self::TypeInfo) {
        let _ = key;
        query.push(column);
    }

    /// Returns whether an index on the column can look up keys of this type.
    fn can_look_up(key: &Self::TypeInfo, column: &Column) -> bool {
        let _ = (key, column);
        true
    }
}

/// How to end a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Commit,
    Rollback,
}

/// The result of ending a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndOutcome {
    /// The transaction is open: the driver must end it.
    StillOpen,
    /// The transaction ended as requested, and the settings of the session are restored.
    Done,
    /// One of its statements had already committed or rolled back the transaction.
    EndedBefore,
}

/// How to lock rows.
#[derive(Clone, Copy, Debug)]
pub struct Locking {
    pub shared: bool,
    /// Whether the lock also excludes transactions that insert references to the row.
    pub key_update: bool,
    pub wait: Wait,
}

/// The handling of rows that other transactions have locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Wait as long as the settings of the session allow.
    Unbounded,
    /// Wait no longer than this.
    AtMost(Duration),
    /// Fail.
    Never,
    /// Skip these rows.
    SkipLocked,
}

/// The parts of a locking SELECT: before the keyword, directly after it, and at the end.
#[derive(Debug, Default)]
pub struct Clauses {
    pub before: String,
    pub hint: String,
    pub after: String,
}

/// Why a row was not locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockFailure {
    /// Another transaction has locked the row.
    Locked,
    /// The statement reached its time limit.
    Timeout,
    /// The row has changed since the snapshot of the transaction.
    StaleSnapshot,
    /// The transaction has begun without the write lock and cannot get it.
    Deferred,
}

/// The result of looking up a column.
#[derive(Debug)]
pub enum ColumnLookup {
    Found(Column),
    /// The table or the column does not exist.
    NotFound,
    /// The lookup would begin the snapshot of the transaction. Another connection must look the
    /// column up, in this schema.
    ElsewhereInSchema(String),
}

/// A column in the catalogue.
#[derive(Clone, Debug)]
pub struct Column {
    /// The database's name of its type.
    pub type_name: String,
    /// A unique index on this column and the others of its key alone, preferably a usable one.
    pub unique: Option<Unique>,
    /// The storage engine of the table, if it does not lock rows.
    pub engine_without_row_locks: Option<String>,
    /// The expression that sorts a text `k.k` as the column sorts, if the column does not sort by
    /// bytes.
    pub collated: Option<String>,
}

/// A unique index.
#[derive(Clone, Debug)]
pub struct Unique {
    pub name: String,
    /// Why the database cannot look up a single row in this index.
    pub obstacle: Option<String>,
}

impl Unique {
    /// Makes a usable index.
    #[cfg(feature = "sqlite")]
    pub fn usable(name: String) -> Self {
        Self { name, obstacle: None }
    }
}
