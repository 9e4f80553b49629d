//! Row locks in the caller's own transaction, until it ends: of a row that stands for a name ([`RowLock`]), and of rows of the
//! caller's own tables ([`RowOf`], [`RowsOf`], [`RowsWhere`]).
//!
//! Each type has an example. Which one when: [the table of calls](crate#which-call).

pub(crate) mod known;

use std::sync::Arc;
use std::time::Duration;

use sqlx::{Decode, Encode, QueryBuilder, Row as _, Transaction, Type, TypeInfo as _};
use sqlx_core::transaction::TransactionManager as _;

use crate::backend::Database;
use crate::backend::sealed::{Catalogued, Column, Locking, Refusal, Unique, Wait};
use crate::backend::table::{Identifier, Table};
use crate::client::Client;
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::name::LockName;
use crate::operation::{ColumnOf, Ensure};

pub use crate::error::RowError;

/// The table of the rows that stand for names.
const NAMED: &str = "sqlock_row";

/// By how much a server may end a wait early, by our clock.
const CLOCKS: Duration = Duration::from_millis(20);

/// A row lock by name: `SELECT … FOR UPDATE` (on PostgreSQL `FOR NO KEY UPDATE`) on a row that is there for this and nothing else,
/// created when it is missing. Made with [`Locks::row`](crate::Locks::row).
///
/// It is held until the transaction ends, by commit or rollback, and by nothing else: it needs no TTL and no renewal, and the
/// database ends it when it loses the connection. (What is locked inside a savepoint is given back, on PostgreSQL, when that is
/// rolled back.) The same transaction may lock a name again. Rows are given in the order that the database has for those who
/// wait; nothing is promised about it.
///
/// ```
/// # async fn example(pool: sqlx::SqlitePool, locks: sqlock::Locks) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;      // on SQLite; elsewhere pool.begin()
/// locks.row("stock/shirts").lock(&mut tx).await?;
/// // … whoever else locks "stock/shirts" waits …
/// tx.commit().await?;
/// # Ok(())
/// # }
/// ```
///
/// It costs one statement in the transaction, and about once a minute one of the client's own that makes sure of the row. Two
/// transactions that lock two names in opposite order deadlock, as with any rows: the database ends one of them with an error
/// for which [`is_conflict`](crate::Error::is_conflict) holds. Lock in one order, or [run it again](crate::retry::Retry).
///
/// **At isolation levels above READ COMMITTED** a transaction goes on to read as of its first statement. PostgreSQL takes the lock for
/// that statement: whoever has waited for another such transaction is refused with [`RowError::StaleSnapshot`] and is to be run
/// again (the lock writes its row there, which costs one more statement). InnoDB counts from the first plain SELECT, so lock before
/// you read. Use one level for all who lock a name.
///
/// **On SQLite the write lock is the row lock**, and there is one of it: the transaction must have been begun with
/// `BEGIN IMMEDIATE`, which is where it waits. One that was begun otherwise is refused with [`RowError::Deferred`] when it
/// cannot have the write lock, or has read what is not true any more. **On a Galera cluster** a row that is only read is not
/// locked on the other nodes: the loser's commit fails there if both write.
#[derive(Clone)]
#[must_use = "a row is locked when lock or try_lock is called"]
pub struct RowLock {
    client: Arc<Client>,
    name: String,
    shared: bool,
    wait: Option<Duration>,
}

impl RowLock {
    pub(crate) fn new(client: Arc<Client>, name: String) -> Self {
        Self { client, name, shared: false, wait: None }
    }

    /// Together with others who lock it like this: `SELECT … FOR SHARE`. SQLite has nothing of the kind. (On PostgreSQL those
    /// who want it alone may wait for ever while others take turns in sharing it.)
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// Wait that long at most. By default [`lock`](Self::lock) waits for as long as the session's own settings allow
    /// (`lock_timeout`, 0 unless set; `innodb_lock_wait_timeout`, 50 s unless set). Those are not touched, or are afterwards
    /// as they were.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = Some(at_most);
        self
    }

    /// Locks the row in this transaction, when it is our turn.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] when the wait ran out: the transaction is as good as before, unless it was a limit of the session's own
    /// on PostgreSQL, which aborts it. [`Error::InvalidName`], [`Error::Unsupported`], and [`Error::Row`] when this transaction
    /// cannot lock anything or, at isolation levels from REPEATABLE READ upwards, began to read before the row was created.
    /// [`Error::Database`] when the database ended the transaction, or cut the statement short for a limit of the session's own on
    /// any statement; [`Error::Unavailable`], [`Error::NotMigrated`]. After any other error than a timeout, roll back.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future leaves the transaction as undecided as dropping any of its statements: roll back. The database goes on
    /// waiting for the row, and the connection for its answer, until it has it. So bound a wait with [`wait`](Self::wait), not by
    /// dropping it.
    pub async fn lock<DB: Database>(&self, tx: &mut Transaction<'_, DB>) -> Result<()> {
        let name = LockName::new(&*self.name)?;
        let start = Moment::now();
        if self.hold(tx, &name, patience(self.wait)).await? { Ok(()) } else { Err(waited_for(name, start)) }
    }

    /// Locks the row if nobody else has it: `false` when somebody has, and then the transaction is as good as before.
    ///
    /// # Errors
    ///
    /// As [`lock`](Self::lock), without the timeout.
    ///
    /// # Cancel safety
    ///
    /// As [`lock`](Self::lock).
    pub async fn try_lock<DB: Database>(&self, tx: &mut Transaction<'_, DB>) -> Result<bool> {
        self.hold(tx, &LockName::new(&*self.name)?, without_waiting::<DB>()).await
    }

    async fn hold<DB: Database>(&self, tx: &mut Transaction<'_, DB>, name: &LockName, wait: Wait) -> Result<bool> {
        let table = Table::new(NAMED)?;
        admit(&self.client, tx, &table)?;
        if !DB::LOCKS_ROWS {
            // There is no row to look for. Any table will do to take the write lock.
            let lease = Target { table: Table::new("sqlock_lease")?, column: Identifier::new("name")? };
            lease.seize(tx, self.shared, &table).await?;
            return Ok(true);
        }
        // On a connection of ours and before the transaction looks for it: its snapshot may be taken by that look.
        ensure(&self.client, name).await?;
        let by_name = |query: &mut QueryBuilder<DB>| DB::push_named(query, name.as_str());
        let locking = Locking { shared: self.shared, key_update: false, wait };
        let Some(found) = select(tx, &table, locking, by_name).await? else {
            return Ok(false);
        };
        if let Some(locked) = found.first() {
            if !self.shared {
                DB::mark(tx, locked, name.as_str()).await.map_err(|error| refused::<DB>(&table, error))?;
            }
            return Ok(true);
        }
        if wait == Wait::Skip && exists(tx, by_name).await? {
            return Ok(false);
        }
        // It was created, or purged, in between.
        self.client.rows.forget(name);
        Err(fault(&table, RowError::StaleSnapshot))
    }
}

/// Locks one row of the caller's own table. Made with [`Locks::row_of`](crate::Locks::row_of).
///
/// As [`RowLock`], but for the row: it must exist, and the column must have a unique index on it alone, since a database
/// that cannot look the row up in such an index locks more than this row. That is checked once for each table and client. On MySQL
/// and MariaDB the index must be visible and a B-tree, and the key of the column's class: a number for a number, text for text.
///
/// The statement is `SELECT … FOR UPDATE`, on PostgreSQL `SELECT … FOR NO KEY UPDATE`: others may insert rows that refer to this
/// one by a foreign key, unless [`key_update`](Self::key_update) is set.
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
/// A dot in the name of the table separates its schema from it; each part is quoted, so it is written as the catalogue has it.
#[derive(Clone)]
#[must_use = "a row is locked when lock or try_lock is called"]
pub struct RowOf<K> {
    rows: RowsOf<K>,
}

impl<K> RowOf<K> {
    pub(crate) fn new(client: Arc<Client>, table: String, column: String, key: K) -> Self {
        Self { rows: RowsOf::new(client, table, column, vec![key]) }
    }

    /// As [`RowLock::shared`].
    pub fn shared(mut self) -> Self {
        self.rows = self.rows.shared();
        self
    }

    /// Locks the key of the row as well: `FOR UPDATE` on PostgreSQL, where `FOR NO KEY UPDATE` is the default. Then nobody inserts
    /// a row that refers to this one until the transaction ends. It is for transactions that delete the row or change its key;
    /// one that has inserted such a row, and then locks like this, deadlocks with others that do the same. The other databases
    /// have one strength of lock, which includes the key: there it changes nothing.
    pub fn key_update(mut self) -> Self {
        self.rows = self.rows.key_update();
        self
    }

    /// As [`RowLock::wait`].
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.rows = self.rows.wait(at_most);
        self
    }

    /// Do not wait: [`lock`](Self::lock) fails with [`Error::Timeout`] when somebody else has the row.
    pub fn nowait(mut self) -> Self {
        self.rows = self.rows.nowait();
        self
    }

    /// Locks the row in this transaction, when it is our turn.
    ///
    /// # Errors
    ///
    /// As [`RowLock::lock`]; and [`Error::Row`] when there is no such row, table or column, or no unique index.
    ///
    /// # Cancel safety
    ///
    /// As [`RowLock::lock`].
    pub async fn lock<DB>(&self, tx: &mut Transaction<'_, DB>) -> Result<()>
    where
        DB: Database,
        K: for<'q> Encode<'q, DB> + Type<DB> + Sync,
    {
        let start = Moment::now();
        let wait = if self.rows.wait == Wait::Refuse { without_waiting::<DB>() } else { self.rows.wait };
        if self.hold(tx, wait).await? { Ok(()) } else { Err(timeout(&Table::new(&self.rows.table)?, start)) }
    }

    /// Locks the row if nobody else has it: `false` when somebody has, and then the transaction is as good as before.
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
        K: for<'q> Encode<'q, DB> + Type<DB> + Sync,
    {
        self.hold(tx, without_waiting::<DB>()).await
    }

    async fn hold<DB>(&self, tx: &mut Transaction<'_, DB>, wait: Wait) -> Result<bool>
    where
        DB: Database,
        K: for<'q> Encode<'q, DB> + Type<DB> + Sync,
    {
        let rows = &self.rows;
        let target = rows.enter(tx).await?;
        let by_key =
            |query: &mut QueryBuilder<DB>| rows.push_select(query, &target, &rows.keys.iter().collect::<Vec<_>>());
        let Some(found) = select(tx, &target.table, rows.locking(wait), by_key).await? else {
            return Ok(false);
        };
        if !found.is_empty() {
            return Ok(true);
        }
        if wait == Wait::Skip && exists(tx, by_key).await? {
            return Ok(false);
        }
        Err(fault(&target.table, RowError::NoSuchRow))
    }
}

/// Locks several rows of the caller's own table. Made with [`Locks::rows_of`](crate::Locks::rows_of).
///
/// They are locked in the order of their keys, in whatever order the caller names them, so two transactions that lock the
/// same rows never deadlock over them. Keys are of an owned type (`String`, not `&str`), the same one in all programs. Otherwise
/// as [`RowOf`].
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
    client: Arc<Client>,
    table: String,
    column: String,
    keys: Vec<K>,
    shared: bool,
    key_update: bool,
    wait: Wait,
    limit: Option<u32>,
}

impl<K> RowsOf<K> {
    pub(crate) fn new(client: Arc<Client>, table: String, column: String, keys: Vec<K>) -> Self {
        Self { client, table, column, keys, shared: false, key_update: false, wait: Wait::Unbounded, limit: None }
    }

    /// As [`RowLock::shared`].
    pub fn shared(mut self) -> Self {
        self.shared = true;
        self
    }

    /// As [`RowOf::key_update`].
    pub fn key_update(mut self) -> Self {
        self.key_update = true;
        self
    }

    /// As [`RowLock::wait`], for all of them together.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.wait = patience(Some(at_most));
        self
    }

    /// Do not wait: [`lock`](Self::lock) fails with [`Error::Timeout`] when somebody else has one of the rows.
    pub fn nowait(mut self) -> Self {
        self.wait = Wait::Refuse;
        self
    }

    /// Leave out those that somebody else has: `SKIP LOCKED`.
    pub fn skip_locked(mut self) -> Self {
        self.wait = Wait::Skip;
        self
    }

    /// So many at most, the first ones in the order of their keys.
    pub fn limit(mut self, rows: u32) -> Self {
        self.limit = Some(rows);
        self
    }

    /// Locks the rows in this transaction and tells the keys of those it has locked, in order. Keys without a row are left out.
    ///
    /// On PostgreSQL and SQLite it is one statement for all, in the database's order of keys. On MySQL and MariaDB it is one for
    /// each key, in the order that they have in Rust: InnoDB may take a statement with several keys for a reason to look at, and
    /// lock, the whole table.
    ///
    /// # Errors
    ///
    /// As [`RowLock::lock`]; and [`Error::Row`] when there is no such table or column, or no unique index. After a timeout on
    /// MySQL and MariaDB, rows that were locked before the one that was waited for stay locked until the transaction ends.
    ///
    /// # Cancel safety
    ///
    /// As [`RowLock::lock`].
    pub async fn lock<DB>(&self, tx: &mut Transaction<'_, DB>) -> Result<Vec<K>>
    where
        DB: Database,
        K: Clone + Ord + for<'q> Encode<'q, DB> + for<'r> Decode<'r, DB> + Type<DB> + Send + Sync,
        usize: sqlx::ColumnIndex<DB::Row>,
    {
        let start = Moment::now();
        let target = self.enter(tx).await?;
        let mut wanted: Vec<&K> = self.keys.iter().collect();
        wanted.sort();
        wanted.dedup();
        let limit = self.limit.unwrap_or(u32::MAX);
        if wanted.is_empty() || limit == 0 {
            return Ok(Vec::new());
        }
        if DB::LOOKS_UP_SEVERAL {
            let locking = self.locking(self.wait);
            let by_keys = |query: &mut QueryBuilder<DB>| self.push_select(query, &target, &wanted);
            return match select(tx, &target.table, locking, by_keys).await? {
                Some(found) => keys(&found),
                None => Err(timeout(&target.table, start)),
            };
        }
        let mut locked = Vec::new();
        for key in wanted {
            let wait = match self.wait {
                Wait::AtMost(at_most) => patience(Some(at_most.saturating_sub(Moment::now().since(start)))),
                wait => wait,
            };
            let by_key = |query: &mut QueryBuilder<DB>| self.push_select(query, &target, &[key]);
            match select(tx, &target.table, self.locking(wait), by_key).await? {
                Some(found) => locked.extend(found.first().map(|_| key.clone())),
                None => return Err(timeout(&target.table, start)),
            }
            if locked.len() >= limit as usize {
                break;
            }
        }
        Ok(locked)
    }

    fn locking(&self, wait: Wait) -> Locking {
        Locking { shared: self.shared, key_update: self.key_update, wait }
    }

    /// Checks what can be checked before anything is locked.
    async fn enter<DB>(&self, tx: &mut Transaction<'_, DB>) -> Result<Target>
    where
        DB: Database,
        K: Type<DB>,
    {
        let (target, column) = Target::find(self, tx).await?;
        let fault = |cause| Err(fault(&target.table, cause));
        match column.unique {
            Some(Unique { obstacle: None, .. }) => {}
            Some(Unique { name: index, obstacle: Some(reason) }) => {
                return fault(RowError::UnusableIndex { column: self.column.clone(), index, reason });
            }
            None => return fault(RowError::NotUnique { column: self.column.clone() }),
        }
        let key = K::type_info();
        if !DB::suits(&key, &column) {
            return fault(RowError::KeyType { key: key.name().to_owned(), column: column.type_name });
        }
        target.seize(tx, self.shared, &target.table).await?;
        Ok(target)
    }

    /// What comes between SELECT and FOR UPDATE.
    fn push_select<DB>(&self, query: &mut QueryBuilder<DB>, target: &Target, keys: &[&K])
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

/// Locks rows of the caller's own table that fulfil a condition: what a queue of jobs is made of. Made with
/// [`Locks::rows_where`](crate::Locks::rows_where).
///
/// ```
/// # async fn example(pool: sqlx::SqlitePool, locks: sqlock::Locks) -> Result<(), Box<dyn std::error::Error>> {
/// let mut tx = pool.begin_with("BEGIN IMMEDIATE").await?;      // on SQLite; elsewhere pool.begin()
/// let ready = locks.rows_where("job", "id").skip_locked().limit(10);
/// let jobs: Vec<i64> = ready
///     .lock(&mut tx, |sql| {
///         sql.push("state = 'ready' AND tenant = ").push_bind(7).push(" ORDER BY priority");
///     })
///     .await?;
/// // … do them in this transaction: should it end without a commit, somebody else finds them …
/// # Ok(())
/// # }
/// ```
///
/// The rows that the database has to look at are those it locks: give it an index to find them in, and on MySQL and MariaDB READ
/// COMMITTED, since at REPEATABLE READ InnoDB keeps the locks also of rows that did not fulfil the condition, and of the gaps
/// between them.
#[derive(Clone)]
#[must_use = "rows are locked when lock is called"]
pub struct RowsWhere {
    rows: RowsOf<()>,
}

impl RowsWhere {
    pub(crate) fn new(client: Arc<Client>, table: String, column: String) -> Self {
        Self { rows: RowsOf::new(client, table, column, Vec::new()) }
    }

    /// As [`RowLock::shared`].
    pub fn shared(mut self) -> Self {
        self.rows = self.rows.shared();
        self
    }

    /// As [`RowOf::key_update`].
    pub fn key_update(mut self) -> Self {
        self.rows = self.rows.key_update();
        self
    }

    /// As [`RowLock::wait`], for all of them together.
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.rows = self.rows.wait(at_most);
        self
    }

    /// As [`RowsOf::nowait`].
    pub fn nowait(mut self) -> Self {
        self.rows = self.rows.nowait();
        self
    }

    /// As [`RowsOf::skip_locked`].
    pub fn skip_locked(mut self) -> Self {
        self.rows = self.rows.skip_locked();
        self
    }

    /// So many at most, the first ones in the order that the condition ends with.
    pub fn limit(mut self, rows: u32) -> Self {
        self.rows = self.rows.limit(rows);
        self
    }

    /// Locks the rows in this transaction and tells the values of the column in those it has locked.
    ///
    /// The closure writes what stands between `WHERE` and `LIMIT`: the condition and, if there is to be one, the order. It may be
    /// called more than once.
    ///
    /// # Errors
    ///
    /// As [`RowsOf::lock`]; a unique index is not asked for.
    ///
    /// # Cancel safety
    ///
    /// As [`RowLock::lock`].
    pub async fn lock<DB, K>(
        &self,
        tx: &mut Transaction<'_, DB>,
        condition: impl Fn(&mut QueryBuilder<DB>) + Sync,
    ) -> Result<Vec<K>>
    where
        DB: Database,
        K: for<'r> Decode<'r, DB> + Type<DB>,
        usize: sqlx::ColumnIndex<DB::Row>,
    {
        let start = Moment::now();
        let rows = &self.rows;
        let (target, _) = Target::find(rows, tx).await?;
        target.seize(tx, rows.shared, &target.table).await?;
        let Target { table, column } = &target;
        let by_condition = |query: &mut QueryBuilder<DB>| {
            query.push(column.quoted::<DB>()).push(" FROM ").push(table.quoted::<DB>()).push(" WHERE ");
            condition(query);
            // It may end in a comment.
            query.push("\n");
            if let Some(limit) = rows.limit {
                query.push(" LIMIT ").push(limit);
            }
        };
        match select(tx, table, rows.locking(rows.wait), by_condition).await? {
            Some(found) => keys(&found),
            None => Err(timeout(table, start)),
        }
    }
}

/// Where rows are to be locked.
struct Target {
    table: Table,
    column: Identifier,
}

impl Target {
    /// Checks what can be checked before anything is locked.
    async fn find<DB: Database, K>(rows: &RowsOf<K>, tx: &mut Transaction<'_, DB>) -> Result<(Self, Column)> {
        let (table, column) = (Table::new(&rows.table)?, Identifier::new(&rows.column)?);
        admit(&rows.client, tx, &table)?;
        let known = column_of(&rows.client, tx, &table, &rows.column).await?;
        Ok((Self { table, column }, known))
    }

    /// Where no single rows are locked, locks them all.
    async fn seize<DB: Database>(&self, tx: &mut Transaction<'_, DB>, shared: bool, meant: &Table) -> Result<()> {
        if DB::LOCKS_ROWS {
            return Ok(());
        }
        if shared {
            return Err(Error::Unsupported {
                what: "a shared row lock",
                reason: "SQLite has one write lock and no row locks; take a shared lease, or lock it for yourself alone",
            });
        }
        match DB::seize(tx, &self.table.quoted::<DB>()).await {
            Err(error) if DB::refusal(&error) == Some(Refusal::Deferred) => Err(fault(meant, RowError::Deferred)),
            done => done.map_err(failed),
        }
    }
}

/// Makes sure that the row of a name is there.
async fn ensure(client: &Client, name: &LockName) -> Result<()> {
    if client.rows.is_ensured(name) {
        return Ok(());
    }
    let answer = client.ask(Ensure(name.clone())).await;
    answer.result?;
    client.rows.ensured(name, answer.sent_at);
    Ok(())
}

/// What the catalogue says about a column in which rows can be locked.
async fn column_of<DB: Database>(
    client: &Client,
    tx: &mut Transaction<'_, DB>,
    table: &Table,
    column: &str,
) -> Result<Column> {
    let key = (table.to_string(), column.to_owned());
    if let Some(column) = client.rows.column(&key) {
        return Ok(column);
    }
    // In the caller's transaction, which sees the tables that it means, and those that it has just created.
    let found = DB::column(tx, table, column).await.map_err(|e| Error::from_sqlx("look a table up", e))?;
    let found = match found {
        Catalogued::Known(column) => Some(column),
        Catalogued::Unknown => None,
        Catalogued::Elsewhere(schema) => {
            let of = (schema, table.name().to_owned(), column.to_owned());
            client.run(ColumnOf(of)).await?
        }
    };
    let Some(found) = found else {
        return Err(fault(table, RowError::NoSuchColumn { column: column.to_owned() }));
    };
    if let Some(engine) = found.rowless {
        return Err(fault(table, RowError::NoRowLocks { engine }));
    }
    client.rows.found(key, found.clone());
    Ok(found)
}

fn patience(wait: Option<Duration>) -> Wait {
    match wait {
        None => Wait::Unbounded,
        Some(Duration::ZERO) => Wait::Refuse,
        Some(at_most) => Wait::AtMost(at_most),
    }
}

/// How a single row is tried: in the way that leaves the transaction usable.
fn without_waiting<DB: Database>() -> Wait {
    if DB::ABORTS { Wait::Skip } else { Wait::Refuse }
}

fn waited_for(name: LockName, start: Moment) -> Error {
    Error::Timeout { name, waited: Moment::now().since(start) }
}

/// What was waited for is a row of a table.
fn timeout(table: &Table, start: Moment) -> Error {
    match LockName::new(table.to_string()) {
        Ok(name) => waited_for(name, start),
        Err(error) => error,
    }
}

pub(crate) fn fault(table: &Table, cause: RowError) -> Error {
    Error::Row { table: table.to_string(), cause }
}

/// Refuses a transaction in which nothing can be locked.
pub(crate) fn admit<DB: Database>(client: &Client, tx: &Transaction<'_, DB>, table: &Table) -> Result<()> {
    if DB::KIND != client.kind {
        return Err(fault(table, RowError::OtherDatabase));
    }
    if DB::TransactionManager::get_transaction_depth(tx) == 0 {
        return Err(fault(table, RowError::NoTransaction));
    }
    Ok(())
}

/// Runs a SELECT that locks what it finds. `None`: somebody else had it for as long as was to be waited.
async fn select<DB: Database>(
    conn: &mut Transaction<'_, DB>,
    table: &Table,
    locking: Locking,
    what: impl Fn(&mut QueryBuilder<DB>) + Sync,
) -> Result<Option<Vec<DB::Row>>> {
    let start = Moment::now();
    let mut now = locking;
    loop {
        let clauses = DB::clauses(now);
        let mut query = QueryBuilder::new(clauses.before);
        query.push("SELECT ").push(clauses.hint);
        what(&mut query);
        query.push(clauses.after);
        let error = match guarded::<DB>(conn, &mut query, now.wait).await {
            Ok(found) => return Ok(Some(found)),
            Err(error) => error,
        };
        let left = match locking.wait {
            Wait::AtMost(at_most) => at_most.saturating_sub(Moment::now().since(start)),
            _ => Duration::ZERO,
        };
        match DB::refusal(&error) {
            Some(Refusal::Stale) => return Err(refused::<DB>(table, error)),
            Some(Refusal::Taken) if DB::has_rolled_back(conn, &error).await.map_err(failed)? => {
                return Err(failed(error));
            }
            // The session has a lower limit for each single wait.
            Some(Refusal::Taken) if left > CLOCKS => now.wait = Wait::AtMost(left),
            Some(Refusal::Cut) if left > CLOCKS || !matches!(locking.wait, Wait::AtMost(_)) => {
                return Err(failed(error));
            }
            Some(Refusal::Taken | Refusal::Cut) => {
                tokio::time::sleep(left).await;
                return Ok(None);
            }
            _ => return Err(failed(error)),
        }
    }
}

/// Sends a statement that may fail without harm to the transaction.
async fn guarded<DB: Database>(
    conn: &mut DB::Connection,
    query: &mut QueryBuilder<DB>,
    wait: Wait,
) -> Result<Vec<DB::Row>, sqlx::Error> {
    let within = match wait {
        Wait::AtMost(within) => Some(within),
        Wait::Refuse => None,
        Wait::Unbounded | Wait::Skip => return DB::fetch(conn, query).await,
    };
    let settings = DB::guard(conn, within).await?;
    let found = DB::fetch(conn, query).await;
    let unguarded = DB::unguard(conn, &settings, found.is_ok()).await;
    let found = found?;
    unguarded?;
    Ok(found)
}

/// Whether there is anything to lock, whoever has it.
async fn exists<DB: Database>(conn: &mut Transaction<'_, DB>, what: impl Fn(&mut QueryBuilder<DB>)) -> Result<bool> {
    let mut query = QueryBuilder::new("SELECT ");
    what(&mut query);
    let found = DB::fetch(conn, &mut query).await.map_err(failed)?;
    Ok(!found.is_empty())
}

fn keys<DB, K>(found: &[DB::Row]) -> Result<Vec<K>>
where
    DB: Database,
    K: for<'r> Decode<'r, DB> + Type<DB>,
    usize: sqlx::ColumnIndex<DB::Row>,
{
    let keys: Result<_, sqlx::Error> = found.iter().map(|row| row.try_get(0)).collect();
    keys.map_err(|error| Error::from_sqlx("read the keys of locked rows", error))
}

fn refused<DB: Database>(table: &Table, error: sqlx::Error) -> Error {
    match DB::refusal(&error) {
        Some(Refusal::Stale) => fault(table, RowError::StaleSnapshot),
        _ => failed(error),
    }
}

fn failed(error: sqlx::Error) -> Error {
    Error::from_sqlx("lock rows", error)
}
