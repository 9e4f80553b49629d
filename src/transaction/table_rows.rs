//! Locks on rows of the caller's own tables.

use std::sync::Arc;
use std::time::Duration;

use sqlx::{Decode, Encode, QueryBuilder, Transaction, Type, TypeInfo as _};

use super::key::RowKey;
use super::select::{
    check_missing, no_wait, read_keys, row_error, row_exists, select, statement_error, timeout_of_table, wait_mode,
};
use super::target::{Target, check_transaction, read_column, take_write_lock};
use crate::backend::Database;
use crate::backend::dialect::{Column, Locking, Unique, Wait};
use crate::backend::table::{Identifier, Table};
use crate::client::Client;
use crate::clock::Moment;
use crate::error::{Error, Result, RowError};

/// The most parameters of a statement, which the protocols of the servers count in 16 bits.
const MAX_LISTED_KEYS: usize = u16::MAX as usize;

/// Locks one row of the caller's own table. Made with [`Locks::row_of`](crate::Locks::row_of).
///
/// As [`RowLock`](crate::row::RowLock), except that the row must exist, and a unique index must
/// cover the column, or the columns of the key, and no others: without such an index a database
/// locks other rows as well. The transaction checks this, at most once a minute for a client. On
/// MySQL and MariaDB the index must be visible and a B-tree, and the key of the column's class: a
/// number for a number, text for text. On PostgreSQL the table may be partitioned, but no other
/// table may inherit from it, because the index does not cover the rows of the inheriting table.
///
/// **On PostgreSQL, use READ COMMITTED.** At a level above it a transaction reads as of its first
/// statement, which may be this lock. A transaction that waited for another one is refused only if
/// that one has written the locked row; otherwise it does not see what that one has committed.
///
/// The statement is `SELECT … FOR UPDATE`, on PostgreSQL `SELECT … FOR NO KEY UPDATE`: other
/// transactions may insert rows that refer to this row by a foreign key, unless
/// [`key_update`](Self::key_update) is set.
///
/// ```
/// # async fn example(pool: sqlx::SqlitePool, locks: sqlock::Locks) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;      // on SQLite; elsewhere pool.begin()
/// locks.row_of("accounts", "id", 7).lock(&mut tx).await?;
/// sqlx::query("UPDATE accounts SET balance = balance - 5 WHERE id = 7").execute(&mut *tx).await?;
/// tx.commit().await?;
/// # Ok(())
/// # }
/// ```
///
/// A dot in the name of the table separates the schema from the table. Each part is quoted, so
/// write it as in the catalogue.
#[derive(Clone)]
#[must_use = "a row is locked when lock or try_lock is called"]
pub struct RowOf<K, const N: usize = 1> {
    rows: RowsOf<K>,
    columns: Vec<String>,
}

impl<K, const N: usize> RowOf<K, N> {
    pub(crate) fn new(client: Arc<Client>, table: String, columns: Vec<String>, key: K) -> Self {
        let all = columns.join(", ");
        Self { rows: RowsOf::new(client, table, all, vec![key]), columns }
    }

    /// As [`RowLock::shared`](crate::row::RowLock::shared).
    pub fn shared(mut self) -> Self {
        self.rows = self.rows.shared();
        self
    }

    /// Locks the key of the row as well: `FOR UPDATE` on PostgreSQL, where `FOR NO KEY UPDATE` is
    /// the default. Until the transaction ends, no row that refers to this row can be inserted. Use
    /// it in transactions that delete the row or change its key. A transaction that inserts such a
    /// row and then locks the key deadlocks with others that do the same. The other databases
    /// always lock the key, so this has no effect there.
    pub fn key_update(mut self) -> Self {
        self.rows = self.rows.key_update();
        self
    }

    /// As [`RowLock::wait`](crate::row::RowLock::wait). The last of this and
    /// [`nowait`](Self::nowait) counts.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.rows = self.rows.wait(at_most);
        self
    }

    /// Does not wait: [`lock`](Self::lock) fails with [`Error::Timeout`](crate::Error::Timeout)
    /// when another transaction holds the row.
    pub fn nowait(mut self) -> Self {
        self.rows = self.rows.nowait();
        self
    }

    /// Locks the row in this transaction, and waits for it if necessary.
    ///
    /// # Errors
    ///
    /// As [`RowLock::lock`](crate::row::RowLock::lock); and [`Error::Row`](crate::Error::Row) when
    /// the row, the table, the column or the unique index does not exist. On PostgreSQL,
    /// [`RowError::StaleSnapshot`] also when another transaction inserted the row during the call,
    /// such as after deleting it. Where row level security applies to the table, that row counts as
    /// missing.
    ///
    /// # Cancel safety
    ///
    /// As [`RowLock::lock`](crate::row::RowLock::lock).
    pub async fn lock<DB>(&self, tx: &mut Transaction<'_, DB>) -> Result<()>
    where
        DB: Database,
        K: RowKey<DB, N> + Sync,
    {
        let start = Moment::now();
        let wait = if self.rows.wait == Wait::Never { no_wait::<DB>() } else { self.rows.wait };
        if self.lock_row(tx, wait).await? {
            Ok(())
        } else {
            Err(timeout_of_table(&Table::new(&self.rows.table)?, start))
        }
    }

    /// Locks the row if it is free. Returns `false`, and leaves the transaction usable, when
    /// another transaction holds it.
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock), without the timeout.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock<DB>(&self, tx: &mut Transaction<'_, DB>) -> Result<bool>
    where
        DB: Database,
        K: RowKey<DB, N> + Sync,
    {
        self.lock_row(tx, no_wait::<DB>()).await
    }

    async fn lock_row<DB>(&self, tx: &mut Transaction<'_, DB>, wait: Wait) -> Result<bool>
    where
        DB: Database,
        K: RowKey<DB, N> + Sync,
    {
        let rows = &self.rows;
        let (table, columns) = self.check(tx).await?;
        let push_by_key = |query: &mut QueryBuilder<DB>| {
            query.push("1 FROM ").push(table.quoted::<DB>()).push(" WHERE ");
            rows.keys.iter().for_each(|key| key.push_condition(query, &columns));
        };
        let Some(found) = select(tx, &table, rows.locking(wait), push_by_key).await? else {
            return Ok(false);
        };
        if !found.is_empty() {
            return Ok(true);
        }
        if wait == Wait::SkipLocked {
            if row_exists(tx, &table, push_by_key).await? {
                return Ok(false);
            }
        } else {
            check_missing(tx, &table, 0, push_by_key).await?;
        }
        Err(row_error(&table, RowError::NoSuchRow))
    }

    /// Checks the columns, their index and the types of the key before any row is locked. Returns
    /// the quoted names of the columns.
    async fn check<DB>(&self, tx: &mut Transaction<'_, DB>) -> Result<(Table, Vec<String>)>
    where
        DB: Database,
        K: RowKey<DB, N>,
    {
        let rows = &self.rows;
        let table = Table::new(&rows.table)?;
        let names: Vec<Identifier> = self.columns.iter().map(|name| Identifier::new(name)).collect::<Result<_>>()?;
        check_transaction(&rows.client, tx, &table)?;
        let is_repeated = |(i, name): (usize, &String)| self.columns[..i].contains(name);
        if self.columns.iter().enumerate().any(is_repeated) {
            return Err(row_error(&table, RowError::NotUnique { column: rows.column.clone() }));
        }
        let (mut columns, mut found) = (self.columns.clone(), Vec::new());
        for _ in &self.columns {
            found.push(read_column(&rows.client, tx, &table, &columns).await?);
            columns.rotate_left(1);
        }
        for (column, key) in found.iter().zip(K::types()) {
            check_lookup::<DB>(&table, &rows.column, column, &key)?;
        }
        take_write_lock(tx, rows.shared, &table, &table).await?;
        Ok((table, names.iter().map(Identifier::quoted::<DB>).collect()))
    }
}

/// Checks that a database can look up a single row by a key of this type.
fn check_lookup<DB: Database>(table: &Table, columns: &str, column: &Column, key: &DB::TypeInfo) -> Result<()> {
    let row_error = |cause| Err(row_error(table, cause));
    match &column.unique {
        Some(Unique { obstacle: None, .. }) => {}
        Some(Unique { name, obstacle: Some(reason) }) => {
            let (column, index, reason) = (columns.to_owned(), name.clone(), reason.clone());
            return row_error(RowError::UnusableIndex { column, index, reason });
        }
        None => return row_error(RowError::NotUnique { column: columns.to_owned() }),
    }
    if !DB::can_look_up(key, column) {
        return row_error(RowError::KeyType { key: key.name().to_owned(), column: column.type_name.clone() });
    }
    Ok(())
}

/// Locks several rows of the caller's own table. Made with
/// [`Locks::rows_of`](crate::Locks::rows_of).
///
/// The rows are locked in the order of their keys, in whatever order the caller names them, so two
/// transactions that lock the same rows never deadlock over them. The keys must have an owned type
/// (`String`, not `&str`), the same in all programs. Otherwise these locks work as [`RowOf`].
///
/// ```
/// # async fn example(pool: sqlx::SqlitePool, locks: sqlock::Locks) -> Result<(), Box<dyn std::error::Error>> {
/// let (from, to) = (7, 3);
/// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;      // on SQLite; elsewhere pool.begin()
/// let found: Vec<i64> = locks.rows_of("accounts", "id", [from, to]).lock(&mut tx).await?;
/// assert_eq!(found, [to, from]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "rows are locked when lock is called"]
pub struct RowsOf<K> {
    pub(super) client: Arc<Client>,
    pub(super) table: String,
    pub(super) column: String,
    keys: Vec<K>,
    pub(super) shared: bool,
    key_update: bool,
    pub(super) wait: Wait,
    pub(super) limit: Option<u32>,
}

impl<K> RowsOf<K> {
    pub(crate) fn new(client: Arc<Client>, table: String, column: String, keys: Vec<K>) -> Self {
        Self { client, table, column, keys, shared: false, key_update: false, wait: Wait::Unbounded, limit: None }
    }

    /// As [`RowLock::shared`](crate::row::RowLock::shared).
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// As [`RowOf::key_update`].
    pub fn key_update(mut self) -> Self {
        self.key_update = true;
        self
    }

    /// As [`RowLock::wait`](crate::row::RowLock::wait), for all rows together. The last of this,
    /// [`nowait`](Self::nowait) and [`skip_locked`](Self::skip_locked) counts.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = wait_mode(Some(at_most));
        self
    }

    /// Does not wait: [`lock`](Self::lock) fails with [`Error::Timeout`](crate::Error::Timeout)
    /// when another transaction holds one of the rows.
    pub fn nowait(mut self) -> Self {
        self.wait = Wait::Never;
        self
    }

    /// Skips rows that another transaction holds: `SKIP LOCKED`.
    pub fn skip_locked(mut self) -> Self {
        self.wait = Wait::SkipLocked;
        self
    }

    /// Limits the number of rows, in the order of their keys.
    pub fn limit(mut self, rows: u32) -> Self {
        self.limit = Some(rows);
        self
    }

    /// Locks the rows in this transaction, and returns the keys of the locked rows, in order. Keys
    /// without a row are left out. A key is spelled as in its row on PostgreSQL and SQLite, and as
    /// the caller spelled it on MySQL and MariaDB, where the collation may treat both as equal.
    ///
    /// PostgreSQL and SQLite get one statement for all keys, in the database's order of keys;
    /// PostgreSQL gets another one, which locks nothing, when some key has no row. MySQL and
    /// MariaDB get one statement for each key, because InnoDB may scan, and lock, the whole table
    /// for a statement with several keys. The keys are in their Rust order, and texts in the order
    /// of the column's collation, which one more statement queries. Of several texts that the
    /// collation treats as equal, the first is used.
    ///
    /// At REPEATABLE READ, the default on MySQL and MariaDB, a key without a row locks the gap
    /// where it would be. Two transactions can both lock one gap, and then deadlock when both
    /// insert there: use READ COMMITTED, or insert first, or [`Retry`](crate::retry::Retry).
    ///
    /// # Errors
    ///
    /// As [`RowLock::lock`](crate::row::RowLock::lock); and [`Error::Row`](crate::Error::Row) when
    /// the table, the column or the unique index does not exist, or, on PostgreSQL, as
    /// [`RowOf::lock`] when a row was inserted during the call.
    /// [`Error::Unsupported`](crate::Error::Unsupported): there are more than 65,535 keys, on
    /// PostgreSQL or SQLite (where the build of SQLite may have a lower limit), or more than 65,535
    /// texts, on MySQL or MariaDB. After a timeout on MySQL and MariaDB, the rows locked so far
    /// stay locked until the transaction ends.
    ///
    /// # Cancel safety
    ///
    /// As [`RowLock::lock`](crate::row::RowLock::lock).
    pub async fn lock<DB>(&self, tx: &mut Transaction<'_, DB>) -> Result<Vec<K>>
    where
        DB: Database,
        K: Clone + Ord + for<'q> Encode<'q, DB> + for<'r> Decode<'r, DB> + Type<DB> + Send + Sync,
        usize: sqlx::ColumnIndex<DB::Row>,
    {
        let start = Moment::now();
        let (target, collated) = self.check(tx).await?;
        let mut wanted: Vec<&K> = self.keys.iter().collect();
        wanted.sort();
        wanted.dedup();
        let limit = self.limit.unwrap_or(u32::MAX);
        if wanted.is_empty() || limit == 0 {
            return Ok(Vec::new());
        }
        // One statement has all keys: that of the locks, or the one that sorts texts.
        if (DB::LOCKS_LISTED_KEYS_ONLY || collated.is_some()) && wanted.len() > MAX_LISTED_KEYS {
            return Err(Error::Unsupported {
                what: "a lock on more than 65,535 rows",
                reason: "a statement has no more parameters; lock the rows in several calls, in the order of their keys",
            });
        }
        if DB::LOCKS_LISTED_KEYS_ONLY {
            let locking = self.locking(self.wait);
            let push_by_keys = |query: &mut QueryBuilder<DB>| self.push_keys(query, &target, &wanted);
            return match select(tx, &target.table, locking, push_by_keys).await? {
                Some(found) => {
                    if self.wait != Wait::SkipLocked && found.len() < wanted.len().min(limit as usize) {
                        check_missing(tx, &target.table, found.len(), push_by_keys).await?;
                    }
                    read_keys(&found)
                }
                None => Err(timeout_of_table(&target.table, start)),
            };
        }
        if let Some(collated) = collated.filter(|_| wanted.len() > 1) {
            wanted = sort_collated::<DB, K>(tx, &target.table, &collated, &wanted).await?;
        }
        let mut locked = Vec::new();
        for key in wanted {
            let wait = match self.wait {
                Wait::AtMost(at_most) => wait_mode(Some(at_most.saturating_sub(Moment::now().since(start)))),
                wait => wait,
            };
            let push_by_key = |query: &mut QueryBuilder<DB>| self.push_keys(query, &target, &[key]);
            match select(tx, &target.table, self.locking(wait), push_by_key).await? {
                Some(found) => locked.extend(found.first().map(|_| key.clone())),
                None => return Err(timeout_of_table(&target.table, start)),
            }
            if locked.len() >= limit as usize {
                break;
            }
        }
        Ok(locked)
    }

    pub(super) fn locking(&self, wait: Wait) -> Locking {
        Locking { shared: self.shared, key_update: self.key_update, wait }
    }

    /// Checks the column, its index and the type of the key before any row is locked.
    async fn check<DB>(&self, tx: &mut Transaction<'_, DB>) -> Result<(Target, Option<String>)>
    where
        DB: Database,
        K: Type<DB>,
    {
        let (target, column) = Target::find(&self.client, tx, &self.table, &self.column).await?;
        check_lookup::<DB>(&target.table, &self.column, &column, &K::type_info())?;
        take_write_lock(tx, self.shared, &target.table, &target.table).await?;
        Ok((target, column.collated))
    }

    /// Writes the text between SELECT and FOR UPDATE.
    fn push_keys<DB>(&self, query: &mut QueryBuilder<DB>, target: &Target, keys: &[&K])
    where
        DB: Database,
        K: for<'q> Encode<'q, DB> + Type<DB>,
    {
        let column = target.column.quoted::<DB>();
        DB::push_column(query, &column, &K::type_info());
        query.push(" FROM ").push(target.table.quoted::<DB>()).push(" WHERE ").push(&column);
        if let [key] = keys {
            query.push(" = ").push_bind(*key);
            return;
        }
        let mut list = query.push(" IN (").separated(", ");
        for key in keys {
            list.push_bind(*key);
        }
        query.push(") ORDER BY ").push(&column);
        if let Some(limit) = self.limit {
            query.push(" LIMIT ").push(limit);
        }
    }
}

/// Sorts texts as a column does, and leaves out all but the first of those that the column takes
/// for equal. No table is read, so no snapshot begins.
async fn sort_collated<'k, DB, K>(
    tx: &mut Transaction<'_, DB>,
    table: &Table,
    collated: &str,
    keys: &[&'k K],
) -> Result<Vec<&'k K>>
where
    DB: Database,
    K: for<'q> Encode<'q, DB> + Type<DB> + Sync,
{
    let mut query = QueryBuilder::new("SELECT k.i, CAST(DENSE_RANK() OVER (ORDER BY ");
    query.push(collated).push(") AS SIGNED) FROM (");
    for (i, key) in keys.iter().enumerate() {
        let union = if i > 0 { " UNION ALL " } else { "" };
        query.push(format_args!("{union}SELECT {i} AS i, ")).push_bind(*key).push(" AS k");
    }
    query.push(") AS k ORDER BY 2, 1");
    let rows = DB::fetch(tx, &mut query).await.map_err(|error| statement_error(table, error))?;
    let places = rows.iter().map(|row| Ok::<_, sqlx::Error>((DB::integer(row, 0)?, DB::integer(row, 1)?)));
    let mut places: Vec<(i64, i64)> =
        places.collect::<Result<_, _>>().map_err(|error| statement_error(table, error))?;
    places.dedup_by_key(|(_, rank)| *rank);
    Ok(places.into_iter().filter_map(|(i, _)| keys.get(usize::try_from(i).ok()?).copied()).collect())
}
