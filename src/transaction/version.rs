//! A version column, to write a row of the caller's own table only if it is unchanged since it was
//! read.
//!
//! [`Versioned`] has an example. To choose, see [the table of calls](crate#which-call).

mod statement;

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use sqlx::query_builder::Separated;
use sqlx::{Acquire, Encode, FromRow, QueryBuilder, Row, Type};

use self::statement::{QuotedNames, is_duplicate, read_version};
use crate::backend::table::Table;
use crate::backend::{Database, Kind};
use crate::error::{Error, Result, RowError};

pub use crate::error::ConcurrentChange;

/// A table of the caller's own whose rows have a version: a number that rises with each update. A
/// write has the version that was read, and fails with [`Error::Conflict`] if the row was written
/// meanwhile. No lock is held between the read and the write, so a user may take all day.
///
/// Pass keys of the column's type: MySQL and MariaDB compare a text with a number by the digits at
/// its beginning, so that `"7abc"` finds row 7.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let pool = sqlx::SqlitePool::connect("sqlite::memory:").await?;
/// # let schema = "CREATE TABLE accounts (
/// #     id INTEGER PRIMARY KEY, version INTEGER NOT NULL, owner TEXT NOT NULL, balance INTEGER NOT NULL)";
/// # sqlx::query(schema).execute(&pool).await?;
/// use sqlock::Error;
/// use sqlock::version::Versioned;
///
/// // The columns in their order: id, version, owner, balance. Or a struct that derives sqlx::FromRow.
/// type Account = (i64, i64, String, i64);
///
/// let accounts = Versioned::table("accounts"); // with the columns "id" and "version"
/// accounts.insert(&pool, 7, &["owner", "balance"], |row| {
///     row.push_bind("ann").push_bind(100);
/// }).await?;
///
/// let read = accounts.read::<_, Account>(&pool, 7).await?.expect("it is there");
/// let (_, _, _, balance) = read.value;
/// assert_eq!((read.version, balance), (1, 100));
/// let version = accounts.update(&pool, 7, read.version, |set| {
///     set.push("balance = ").push_bind(balance - 5);
/// }).await?;
/// assert_eq!(version, 2);
///
/// // A write with an older version fails.
/// let late = accounts.update(&pool, 7, read.version, |set| {
///     set.push("balance = ").push_bind(0);
/// }).await;
/// assert!(matches!(late, Err(Error::Conflict { expected: Some(1), found: Some(2), .. })));
/// # Ok(())
/// # }
/// # #[cfg(not(feature = "sqlite"))]
/// # fn main() {}
/// ```
///
/// # On a pool, or in a transaction
///
/// The first argument is any source of a connection for sqlx: `&pool`, `&mut tx`, or `&mut conn`.
/// On a pool, each call is one statement that takes effect by itself. In a transaction, the call is
/// part of the transaction; a conflict leaves the transaction usable.
/// [`Retry`](crate::retry::Retry) repeats the read and the write.
///
/// # The table
///
/// ```sql
/// CREATE TABLE accounts (
///     id      BIGINT PRIMARY KEY,           -- of any type; it must be unique
///     version BIGINT NOT NULL DEFAULT 1,    -- of any integer type
///     …
/// )
/// ```
///
/// Other statements that write to the table must raise the version as well, or their changes go
/// unnoticed. Do not insert a deleted key again: its version would be 1 again, and a writer that
/// has read version 1 of the deleted row could overwrite the new one. Mark such rows as deleted
/// instead, or let the database generate keys that it never repeats (SQLite: `AUTOINCREMENT`). The
/// names of the table and the columns are quoted, so they may be any text. On PostgreSQL they are
/// in lower case unless the table was created with quoted names. A dot separates a schema from a
/// table.
///
/// # Isolation levels
///
/// Use READ COMMITTED or stricter. At READ UNCOMMITTED, MySQL and MariaDB return versions that are
/// not committed, as SQLite does in a shared cache with `PRAGMA read_uncommitted`. After a rollback
/// another writer can reach the same version, and an update by the version that was read overwrites
/// that writer's change. (PostgreSQL treats READ UNCOMMITTED as READ COMMITTED.)
///
/// At READ COMMITTED a concurrent change is an [`Error::Conflict`]. At the stricter levels the
/// database may notice the change first, and then refuses the statement (PostgreSQL: 40001;
/// MariaDB: 1020; SQLite: `SQLITE_BUSY_SNAPSHOT`, in a transaction that was not begun with `BEGIN
/// IMMEDIATE`) with an [`Error::Database`] that also [is a conflict](Error::is_conflict).
#[derive(Clone, Debug)]
pub struct Versioned {
    table: Arc<str>,
    key: Arc<str>,
    version: Arc<str>,
}

/// A row with its version at the time of reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VersionedRow<T> {
    /// The row.
    pub value: T,
    /// The version, to be passed to a write of the row.
    pub version: i64,
}

impl Versioned {
    /// Names a table with the key column `id` and the version column `version`. Sends nothing yet.
    pub fn table(name: impl Into<String>) -> Self {
        Self { table: name.into().into(), key: "id".into(), version: "version".into() }
    }

    /// Sets the key column. It must be unique: a primary key, or with a unique index of its own.
    pub fn key(mut self, column: impl Into<String>) -> Self {
        self.key = column.into().into();
        self
    }

    /// Sets the version column.
    pub fn version(mut self, column: impl Into<String>) -> Self {
        self.version = column.into().into();
        self
    }

    /// Reads a row and its version, if the row exists.
    ///
    /// `T` is read from all columns of the table, in their order. Like sqlx's own
    /// [`query_as`](sqlx::query_as), it must be named: `read::<_, Account>(…)`.
    ///
    /// # Errors
    ///
    /// [`Error::Database`], also when the row cannot be read as a `T`, and on PostgreSQL once on
    /// each connection that has read the table before its columns changed: the next call reads it;
    /// [`Error::Unavailable`]; [`Error::PoolExhausted`]; [`Error::Row`] when the key is not unique;
    /// [`Error::InvalidIdentifier`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future changes nothing.
    pub fn read<'c, 'q, DB, T>(
        &self,
        db: impl Acquire<'c, Database = DB>,
        key: impl Encode<'q, DB> + Type<DB>,
    ) -> impl Future<Output = Result<Option<VersionedRow<T>>>> + Send
    where
        DB: Database,
        T: for<'r> FromRow<'r, DB::Row> + Send,
    {
        let connection = db.acquire();
        let statement = self.quote_names::<DB>().map(|names| names.select_row(key));
        let this = self.clone();
        async move {
            let mut query = statement?;
            let mut conn = connection.await.map_err(|e| Error::from_caller("read a row", e))?;
            let rows =
                DB::fetch_all_columns(&mut conn, &mut query).await.map_err(|e| Error::from_caller("read a row", e))?;
            let [row] = rows.as_slice() else {
                return if rows.is_empty() { Ok(None) } else { Err(this.several_rows_error(rows.len() as u64)) };
            };
            let version = DB::integer(row, row.len() - 1);
            let value = T::from_row(row);
            match (version, value) {
                (Ok(version), Ok(value)) => Ok(Some(VersionedRow { value, version })),
                (Err(e), _) | (_, Err(e)) => Err(Error::from_caller("read a row", e)),
            }
        }
    }

    /// Updates a row if it still has the expected version, and returns its new version, which is
    /// the next number.
    ///
    /// `set` is called with a statement that ends in `SET`, and adds the columns that change,
    /// separated by commas. If it adds nothing, only the version rises. As everywhere in sqlx, bind
    /// a column's values with one type wherever the same text is built: PostgreSQL prepares it
    /// once, and after `push_bind(5_i32)` refuses `push_bind(5_i64)`.
    ///
    /// ```
    /// # async fn example(pool: sqlx::SqlitePool, accounts: sqlock::version::Versioned) -> sqlock::Result<()> {
    /// let mut tx = pool.begin().await?;
    /// accounts.update(&mut tx, 7, 1, |set| {
    ///     set.push("balance = balance - ").push_bind(5).push(", owner = ").push_bind("bob");
    /// }).await?;
    /// tx.commit().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Conflict`]: the row has another version or does not exist, and nothing was written.
    /// The reported version is read afterwards, and may have changed again. [`Error::Row`] with
    /// [`RowError::SeveralRows`]: the key is not unique, and several rows were changed; roll back;
    /// with [`RowError::VersionMaximum`]: the column's type has no next number, and nothing was
    /// written; with [`RowError::NotWritten`]: the row has the expected version, and the database
    /// kept the statement from writing it. Otherwise as [`read`](Self::read).
    ///
    /// # Cancel safety
    ///
    /// After the future was dropped, the row may be written, as with any statement: in a
    /// transaction, roll back; on a pool, read the row.
    pub fn update<'c, 'q, DB, K>(
        &self,
        db: impl Acquire<'c, Database = DB>,
        key: K,
        expected: i64,
        set: impl FnOnce(&mut QueryBuilder<DB>),
    ) -> impl Future<Output = Result<i64>> + Send
    where
        DB: Database,
        K: Encode<'q, DB> + Type<DB> + Send,
    {
        let statement = self.quote_names::<DB>().map(|names| (names.update(&key, expected, set), names));
        let change = self.change("update a row", db, key, expected, statement, Raises::Yes);
        async move { change.await.map(|()| expected.saturating_add(1)) }
    }

    /// Deletes a row if it still has the expected version.
    ///
    /// # Errors
    ///
    /// As [`update`](Self::update).
    ///
    /// # Cancel safety
    ///
    /// As [`update`](Self::update).
    pub fn delete<'c, 'q, DB, K>(
        &self,
        db: impl Acquire<'c, Database = DB>,
        key: K,
        expected: i64,
    ) -> impl Future<Output = Result<()>> + Send
    where
        DB: Database,
        K: Encode<'q, DB> + Type<DB> + Send,
    {
        let statement = self.quote_names::<DB>().map(|names| (names.delete(&key, expected), names));
        self.change("delete a row", db, key, expected, statement, Raises::No)
    }

    /// Inserts a row with version 1. `columns` are the columns besides the key and the version;
    /// `values` adds their values, in the same order.
    ///
    /// ```
    /// # async fn example(pool: sqlx::SqlitePool, accounts: sqlock::version::Versioned) -> sqlock::Result<()> {
    /// accounts.insert(&pool, 8, &["owner", "balance"], |row| {
    ///     row.push_bind("bob").push_bind(0);
    /// }).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Conflict`]: there is a row with this key already, and nothing was written. The
    /// transaction stays usable, on PostgreSQL too. A duplicate in another unique column is an
    /// [`Error::Database`]. [`Error::Row`] with [`RowError::NotWritten`]: the database kept the
    /// statement from inserting the row, or there was a row that has been deleted meanwhile.
    /// Otherwise as [`read`](Self::read).
    ///
    /// # Cancel safety
    ///
    /// As [`update`](Self::update).
    pub fn insert<'c, 'q, DB, K>(
        &self,
        db: impl Acquire<'c, Database = DB>,
        key: K,
        columns: &[&str],
        values: impl FnOnce(&mut Separated<'_, DB, &'static str>),
    ) -> impl Future<Output = Result<()>> + Send
    where
        DB: Database,
        K: Encode<'q, DB> + Type<DB> + Send,
    {
        let statement = self.quote_names::<DB>().and_then(|names| Ok((names.insert(&key, columns, values)?, names)));
        let connection = db.acquire();
        let this = self.clone();
        async move {
            let (mut query, names) = statement?;
            let mut conn = connection.await.map_err(|e| Error::from_caller("insert a row", e))?;
            let error = match DB::execute(&mut conn, &mut query).await {
                Ok(0) => None,
                Ok(_) => return Ok(()),
                // MySQL reports a duplicate without its index; the key's may be meant.
                Err(e) if DB::KIND == Kind::MySql && is_duplicate(&e) => Some(e),
                Err(e) => return Err(Error::from_caller("insert a row", e)),
            };
            match (read_version::<DB>(&mut conn, names.select_version(key)).await?, error) {
                (None, Some(e)) => Err(Error::from_caller("insert a row", e)),
                (found, _) => Err(this.unwritten_error(None, found)),
            }
        }
    }

    /// Sends a change of the row with that key and version, and checks how many rows it changed.
    fn change<'c, 'q, DB, K>(
        &self,
        attempted: &'static str,
        db: impl Acquire<'c, Database = DB>,
        key: K,
        expected: i64,
        statement: Result<(QueryBuilder<DB>, QuotedNames)>,
        raises: Raises,
    ) -> impl Future<Output = Result<()>> + Send
    where
        DB: Database,
        K: Encode<'q, DB> + Type<DB> + Send,
    {
        let connection = db.acquire();
        let this = self.clone();
        async move {
            let (mut query, names) = statement?;
            let mut conn = connection.await.map_err(|e| Error::from_caller(attempted, e))?;
            if raises == Raises::Yes && may_be_greatest(expected) {
                this.check_maximum::<DB>(&mut conn, expected).await?;
            }
            match DB::execute(&mut conn, &mut query).await.map_err(|e| Error::from_caller(attempted, e))? {
                0 => {
                    let found = read_version::<DB>(&mut conn, names.select_version(key)).await?;
                    Err(this.unwritten_error(Some(expected), found))
                }
                1 => Ok(()),
                rows => Err(this.several_rows_error(rows)),
            }
        }
    }

    /// Returns an error if the column cannot hold the next version.
    async fn check_maximum<DB: Database>(&self, conn: &mut DB::Connection, expected: i64) -> Result<()> {
        let table = Table::new(&self.table)?;
        let greatest = DB::greatest_integer(conn, &table, &self.version).await;
        let greatest = greatest.map_err(|e| Error::from_caller("look for the type of a version", e))?;
        let maximum = greatest.unwrap_or(i64::MAX);
        if expected < maximum {
            return Ok(());
        }
        let cause = RowError::VersionMaximum { column: self.version.as_ref().into(), maximum };
        Err(Error::Row { table: self.table.as_ref().into(), cause })
    }

    fn quote_names<DB: Database>(&self) -> Result<QuotedNames> {
        QuotedNames::new::<DB>(&self.table, &self.key, &self.version)
    }

    /// Makes the error of a statement that wrote no row, given the version found afterwards.
    fn unwritten_error(&self, expected: Option<i64>, found: Option<i64>) -> Error {
        let table = self.table.as_ref().into();
        if found == expected {
            return Error::Row { table, cause: RowError::NotWritten };
        }
        Error::Conflict { table, expected, found, cause: ConcurrentChange }
    }

    fn several_rows_error(&self, rows: u64) -> Error {
        let cause = RowError::SeveralRows { column: self.key.as_ref().into(), rows };
        Error::Row { table: self.table.as_ref().into(), cause }
    }
}

impl fmt::Display for Versioned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.table)
    }
}

/// Whether a statement raises the version.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Raises {
    Yes,
    No,
}

/// Returns whether a version is the greatest number of some integer type: only then the column's
/// type is looked up.
fn may_be_greatest(version: i64) -> bool {
    [7, 8, 15, 16, 23, 24, 31, 32, 63].into_iter().any(|bits| version == i64::MAX >> (63 - bits))
}
