//! Statements on the caller's own tables, in the caller's own transactions.
//!
//! The statement itself limits a wait, in the syntax of each server. No setting of the session
//! changes, so none has to be restored when a future is dropped.

use std::time::Duration;

use sqlx::mysql::MySqlTypeInfo;
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, QueryBuilder, Row as _, SqlSafeStr as _, SqlStr, TypeInfo as _};

use super::store::{MySqlQuery, is_timeout, number};
use crate::backend::dialect::{
    Clauses, Column, ColumnLookup, Dialect, EndOutcome, Ending, LockFailure, Locking, Unique, Wait,
};
use crate::backend::store::ROW_TOUCH_INTERVAL;
use crate::backend::table::Table;
use crate::backend::{StoreFuture, hex, micros};
use crate::name::LockName;

/// A deadlock rolls the whole transaction back, and autocommit would commit each later statement.
/// So autocommit is off until the transaction ends; a variable holds the setting of the session.
const TURN_AUTOCOMMIT_OFF: &str = "SET @sqlock_autocommit = @@autocommit, autocommit = 0";

/// Every end of the transaction removes the savepoint: a deadlock, and also a statement with an
/// implicit commit. <https://dev.mysql.com/doc/refman/8.4/en/savepoint.html>
const SET_SAVEPOINT: &str = "SAVEPOINT sqlock";

/// Sent in one packet: the server carries out nothing after a statement that fails. With Galera,
/// the second statement fails ([`COMMIT_ALONE`]): MariaDB does not report that another node's
/// commit has aborted a transaction between two statements of one packet.
const COMMIT_FROM_SAVEPOINT: &str = "RELEASE SAVEPOINT sqlock;
SET @sqlock_galera = /*M! IF(@@wsrep_on, (SELECT 1 UNION ALL SELECT 2), 0) + */ 0;
COMMIT; SET autocommit = @sqlock_autocommit";

/// Commits after [`COMMIT_FROM_SAVEPOINT`] has failed with one of these errors: more than one row,
/// or a server without Galera, which does not know the variable.
const COMMIT_ALONE: [u16; 2] = [1242, 1193];

const ROLL_BACK_FROM_SAVEPOINT: &str = "ROLLBACK TO SAVEPOINT sqlock; ROLLBACK; SET autocommit = @sqlock_autocommit";

const ROLL_BACK: &str = "ROLLBACK; SET autocommit = @sqlock_autocommit";

impl Dialect for MySql {
    const QUOTE: char = '`';
    const INTEGER: &'static str = "SIGNED";
    const CURRENT_READ: &'static str = " LOCK IN SHARE MODE";
    const BEGIN: Option<&'static str> = Some("BEGIN");
    const ERRORS_ABORT: bool = false;
    const LOCKS_ROWS: bool = true;
    // The server scans the index of a small table, or for many keys, and locks every row that it
    // reads.
    const LOCKS_LISTED_KEYS_ONLY: bool = false;

    fn begin_sql(sql: SqlStr) -> SqlStr {
        let begin = sql.as_str().trim_end_matches(|c: char| c == ';' || c.is_whitespace());
        // On a line of its own, since the text may end with a comment.
        AssertSqlSafe(format!("{TURN_AUTOCOMMIT_OFF}; {begin}\n; {SET_SAVEPOINT}")).into_sql_str()
    }

    fn end_transaction(conn: &mut MySqlConnection, ending: Ending) -> StoreFuture<'_, EndOutcome> {
        Box::pin(async move {
            let from_savepoint = match ending {
                Ending::Commit => COMMIT_FROM_SAVEPOINT,
                Ending::Rollback => ROLL_BACK_FROM_SAVEPOINT,
            };
            match sqlx::raw_sql(from_savepoint).execute(&mut *conn).await {
                Ok(_) => Ok(EndOutcome::Done),
                // The savepoint does not exist.
                Err(error) if number(&error) == Some(1305) => {
                    sqlx::raw_sql(ROLL_BACK).execute(conn).await?;
                    Ok(EndOutcome::EndedBefore)
                }
                Err(error) if number(&error).is_some_and(|number| COMMIT_ALONE.contains(&number)) => {
                    sqlx::raw_sql("COMMIT").execute(&mut *conn).await?;
                    sqlx::raw_sql("SET autocommit = @sqlock_autocommit").execute(conn).await?;
                    Ok(EndOutcome::Done)
                }
                Err(error) => Err(error),
            }
        })
    }

    fn fetch<'a>(conn: &'a mut MySqlConnection, query: &'a mut QueryBuilder<Self>) -> StoreFuture<'a, Vec<Self::Row>> {
        let sql = query.sql();
        if sql.as_str().contains('?') {
            return Box::pin(query.build().fetch_all(conn));
        }
        // Not prepared: a future that is dropped while sqlx prepares leaves a connection that never
        // answers again, with a transaction that never ends.
        Box::pin(sqlx::raw_sql(sql).fetch_all(conn))
    }

    fn execute<'a>(conn: &'a mut MySqlConnection, query: &'a mut QueryBuilder<Self>) -> StoreFuture<'a, u64> {
        Box::pin(async move { Ok(query.build().execute(conn).await?.rows_affected()) })
    }

    fn clauses(Locking { shared, wait, .. }: Locking) -> Clauses {
        // /*M! … */ is for MariaDB, /*!80001 … */ for MySQL: MariaDB skips comments for MySQL
        // versions that it never had. https://mariadb.com/kb/en/comment-syntax/
        let after = match (shared, wait) {
            (false, Wait::Unbounded | Wait::AtMost(_)) => " FOR UPDATE",
            (false, Wait::Never) => " FOR UPDATE NOWAIT",
            (false, Wait::SkipLocked) => " FOR UPDATE SKIP LOCKED",
            (true, Wait::Unbounded | Wait::AtMost(_)) => " LOCK IN SHARE MODE",
            (true, Wait::Never) => " /*M! LOCK IN SHARE MODE */ /*!80001 FOR SHARE */ NOWAIT",
            (true, Wait::SkipLocked) => " /*M! LOCK IN SHARE MODE */ /*!80001 FOR SHARE */ SKIP LOCKED",
        };
        let Wait::AtMost(within) = wait else {
            return Clauses { after: after.into(), ..Clauses::default() };
        };
        // The server's own limit, innodb_lock_wait_timeout, counts seconds. Zero would mean no
        // limit.
        // https://dev.mysql.com/doc/refman/8.4/en/optimizer-hints.html#optimizer-hints-execution-time
        // https://mariadb.com/kb/en/set-statement/
        let within = within.clamp(Duration::from_millis(1), Duration::from_millis(u32::MAX.into()));
        Clauses {
            before: format!("/*M! SET STATEMENT max_statement_time = {:.6} FOR */ ", within.as_secs_f64()),
            hint: format!("/*+ MAX_EXECUTION_TIME({}) */ ", within.as_micros().div_ceil(1000)),
            after: after.into(),
        }
    }

    /// Without a strict sql_mode the server cuts off a greater number without an error.
    fn greatest_integer<'a>(
        conn: &'a mut MySqlConnection,
        table: &'a Table,
        column: &'a str,
    ) -> StoreFuture<'a, Option<i64>> {
        Box::pin(async move {
            let query = sqlx::query(COLUMN_TYPE).bind(table.schema()).bind(table.name()).bind(column);
            let row = query.fetch_optional(conn).await?;
            let name: Option<String> = row.map(|row| row.try_get(0)).transpose()?;
            Ok(name.as_deref().and_then(greatest_of))
        })
    }

    fn push_named_row(query: &mut QueryBuilder<Self>, name: &str) {
        query.push("1 FROM sqlock_row WHERE name = X'").push(hex(name.as_bytes())).push("'");
    }

    fn lock_failure(error: &sqlx::Error) -> Option<LockFailure> {
        match number(error)? {
            // Lock wait timeout, which MariaDB also returns for NOWAIT; MySQL's error for NOWAIT.
            1205 | 3572 => Some(LockFailure::Locked),
            // MAX_EXECUTION_TIME, max_statement_time.
            3024 | 1969 => Some(LockFailure::Timeout),
            // MariaDB with innodb_snapshot_isolation: the row has changed since the snapshot.
            1020 => Some(LockFailure::StaleSnapshot),
            _ => None,
        }
    }

    fn has_rolled_back<'a>(conn: &'a mut MySqlConnection, error: &'a sqlx::Error) -> StoreFuture<'a, bool> {
        Box::pin(async move {
            if number(error) != Some(1205) {
                return Ok(false);
            }
            // https://dev.mysql.com/doc/refman/8.4/en/innodb-parameters.html#sysvar_innodb_rollback_on_timeout
            let row = sqlx::raw_sql("SELECT @@innodb_rollback_on_timeout").fetch_one(conn).await?;
            Ok(row.try_get::<i64, _>(0)? != 0)
        })
    }

    /// MySQL's catalogue consists of InnoDB tables. At REPEATABLE READ, reading it would begin the
    /// snapshot, which must begin when the row is locked.
    fn column<'a>(
        conn: &'a mut MySqlConnection,
        table: &'a Table,
        _columns: &'a [String],
    ) -> StoreFuture<'a, ColumnLookup> {
        Box::pin(async move {
            if let Some(schema) = table.schema() {
                return Ok(ColumnLookup::ElsewhereInSchema(schema.into()));
            }
            let row = sqlx::raw_sql("SELECT CAST(DATABASE() AS CHAR)").fetch_one(conn).await?;
            let schema: Option<String> = row.try_get(0)?;
            Ok(schema.map_or(ColumnLookup::NotFound, ColumnLookup::ElsewhereInSchema))
        })
    }

    /// A comparison converts the key to the class of the column, or the column to that of the key:
    /// the text '7abc' is equal to the number 7, and 'abc' to 0. For a number every text is
    /// converted, so that all rows are locked.
    /// https://dev.mysql.com/doc/refman/8.4/en/type-conversion.html
    fn can_look_up(key: &MySqlTypeInfo, column: &Column) -> bool {
        match (Class::from_type(key.name()), Class::from_type(&column.type_name)) {
            (Class::Text | Class::Bytes, Class::Parsed) => true,
            (key, column) => key == column,
        }
    }

    fn integer(row: &Self::Row, column: usize) -> Result<i64, sqlx::Error> {
        row.try_get(column)
    }

    fn push_integer(query: &mut QueryBuilder<Self>, value: i64) {
        query.push_bind(value);
    }
}

// Bind order: schema, or NULL; table, column.
#[rustfmt::skip]
const COLUMN_TYPE: &str = "
SELECT CAST(COLUMN_TYPE AS CHAR) FROM information_schema.COLUMNS
 WHERE TABLE_SCHEMA = COALESCE(?, DATABASE()) AND TABLE_NAME = ? AND COLUMN_NAME = ?";

/// Returns the greatest number of a type by its name in the catalogue, such as `int(10) unsigned`;
/// at most that of an i64.
fn greatest_of(type_name: &str) -> Option<i64> {
    let name = type_name.to_ascii_lowercase();
    let bits = match name.split(['(', ' ']).next()? {
        "tinyint" => 8,
        "smallint" => 16,
        "mediumint" => 24,
        "int" => 32,
        "bigint" => 64,
        _ => return None,
    };
    let signs = if name.contains("unsigned") && bits < 64 { 0 } else { 1 };
    Some(i64::MAX >> (63 + signs - bits))
}

// Returns one row for each unique index on these columns alone, the best one first, or one row
// without an index. {} is a placeholder for each of them. An index on an expression has no column.
// MySQL hides an index as INVISIBLE, MariaDB as IGNORED. Bind order: schema and table, the columns,
// their number twice, schema and table, the first column, schema and table.
//
// Each view of the catalogue gets the schema and the table as values: for a join by these columns,
// MariaDB would open every table of the server.
// https://dev.mysql.com/doc/refman/8.4/en/invisible-indexes.html,
// https://mariadb.com/kb/en/ignored-indexes/
#[rustfmt::skip]
const COLUMN: &str = "
SELECT CAST(c.DATA_TYPE AS CHAR), CAST(t.ENGINE AS CHAR), CAST(i.name AS CHAR), CAST(i.obstacle AS CHAR),
       CAST(c.CHARACTER_SET_NAME AS CHAR), CAST(c.COLLATION_NAME AS CHAR)
  FROM information_schema.COLUMNS AS c
  JOIN information_schema.TABLES AS t
  LEFT JOIN (SELECT s.TABLE_SCHEMA AS place, s.TABLE_NAME AS home, s.INDEX_NAME AS name,
                    CASE WHEN MAX(s.SUB_PART) IS NOT NULL THEN 'it is on a part of the column'
                         WHEN MAX(s.INDEX_TYPE) <> 'BTREE' THEN CONCAT('it is a ', LOWER(MAX(s.INDEX_TYPE)), ' index')
                         /*!80000 WHEN MAX(s.IS_VISIBLE) = 'NO' THEN 'it is invisible' */
                         /*M!100600 WHEN MAX(s.IGNORED) = 'YES' THEN 'it is ignored' */
                    END AS obstacle
               FROM information_schema.STATISTICS AS s
              WHERE s.NON_UNIQUE = 0 AND s.TABLE_SCHEMA = ? AND s.TABLE_NAME = ?
              GROUP BY s.TABLE_SCHEMA, s.TABLE_NAME, s.INDEX_NAME
             HAVING SUM(s.COLUMN_NAME IN ({})) = ? AND COUNT(*) = ?) AS i
    ON i.place = c.TABLE_SCHEMA AND i.home = c.TABLE_NAME
 WHERE c.TABLE_SCHEMA = ? AND c.TABLE_NAME = ? AND c.COLUMN_NAME = ? AND t.TABLE_SCHEMA = ? AND t.TABLE_NAME = ?
 ORDER BY i.obstacle IS NOT NULL, i.name <> 'PRIMARY'
 LIMIT 1";

/// Looks up a column by schema, table, and itself with the others of its key.
pub(super) async fn column(
    conn: &mut MySqlConnection,
    path: &(String, String, Vec<String>),
) -> Result<Option<Column>, sqlx::Error> {
    let query = bind_path(COLUMN, path);
    let Some(row) = query.fetch_optional(conn).await? else {
        return Ok(None);
    };
    let engine: Option<String> = row.try_get(1)?;
    let (index, obstacle): (Option<String>, _) = (row.try_get(2)?, row.try_get(3)?);
    let (charset, collation): (Option<String>, Option<String>) = (row.try_get(4)?, row.try_get(5)?);
    Ok(Some(Column {
        type_name: row.try_get(0)?,
        unique: index.map(|name| Unique { name, obstacle }),
        engine_without_row_locks: engine.filter(|engine| !engine.eq_ignore_ascii_case("InnoDB")),
        collated: charset
            .zip(collation)
            .map(|(charset, collation)| format!("CONVERT(k.k USING {charset}) COLLATE {collation}")),
    }))
}

/// Binds the parameters of [`COLUMN`].
fn bind_path<'q>(sql: &str, (schema, table, columns): &'q (String, String, Vec<String>)) -> MySqlQuery<'q> {
    let sql = sql.replace("{}", &vec!["?"; columns.len()].join(", "));
    let query = sqlx::query(AssertSqlSafe(sql)).bind(schema).bind(table);
    let query = columns.iter().fold(query, |query, column| query.bind(column));
    let number = i64::try_from(columns.len()).unwrap_or(i64::MAX);
    query.bind(number).bind(number).bind(schema).bind(table).bind(columns.first()).bind(schema).bind(table)
}

// Whether the row exists, and whether its time of use must be written. Bind order: how old the time
// of use may be, name.
#[rustfmt::skip]
const SEEN: &str = concat!("SELECT seen_at < ", now!(), " - ? FROM sqlock_row WHERE name = ?");

// Bind order: name.
#[rustfmt::skip]
const CREATE: &str = concat!("INSERT IGNORE INTO sqlock_row (name, seen_at) VALUES (?, ", now!(), ")");

// Does not wait for a locked row. Bind order: name.
#[rustfmt::skip]
const TOUCH: &str = concat!("
UPDATE (SELECT s.name FROM sqlock_row AS s WHERE s.name = ? LIMIT 1 FOR UPDATE SKIP LOCKED) AS q
       STRAIGHT_JOIN sqlock_row AS r ON r.name = q.name
   SET r.seen_at = ", now!());

/// Creates the row of a name if it is missing, or writes its time of use.
pub(super) async fn ensure(conn: &mut MySqlConnection, name: &LockName) -> Result<(), sqlx::Error> {
    let name = name.as_str().as_bytes();
    let seen = sqlx::query(SEEN).bind(micros(ROW_TOUCH_INTERVAL)).bind(name).fetch_optional(&mut *conn).await?;
    let done = match seen.map(|row| row.try_get(0)).transpose()? {
        Some(false) => return Ok(()),
        Some(true) => sqlx::query(TOUCH).bind(name).execute(conn).await,
        None => sqlx::query(CREATE).bind(name).execute(conn).await,
    };
    match done {
        // Another connection has created and locked the row meanwhile.
        Err(error) if is_timeout(&error) => Ok(()),
        done => done.map(drop),
    }
}

/// Classes of types whose values can be compared without a lossy conversion and with an index.
#[derive(Debug, PartialEq, Eq)]
enum Class {
    Exact,
    Approximate,
    Text,
    Bytes,
    Date,
    Time,
    Moment,
    /// MariaDB's own types: it parses text and bytes before the lookup.
    Parsed,
    /// Any other type, by its name.
    Other(String),
}

impl Class {
    /// Classifies a type by its name in the catalogue or in sqlx.
    fn from_type(name: &str) -> Self {
        let name = name.to_ascii_lowercase();
        match name.trim_end_matches(" unsigned") {
            "boolean" | "tinyint" | "smallint" | "mediumint" | "int" | "bigint" | "decimal" | "bit" | "year" => {
                Self::Exact
            }
            "float" | "double" => Self::Approximate,
            "char" | "varchar" | "tinytext" | "text" | "mediumtext" | "longtext" | "enum" | "set" => Self::Text,
            "binary" | "varbinary" | "tinyblob" | "blob" | "mediumblob" | "longblob" => Self::Bytes,
            "uuid" | "inet4" | "inet6" => Self::Parsed,
            "date" => Self::Date,
            "time" => Self::Time,
            "datetime" | "timestamp" => Self::Moment,
            _ => Self::Other(name),
        }
    }
}

#[cfg(test)]
#[allow(clippy::expect_used, reason = "tests")]
mod tests {
    use sqlx::Connection as _;

    use super::*;

    #[tokio::test]
    async fn lookup_of_a_column_opens_one_table() {
        let url = std::env::var("SQLOCK_TEST_MARIADB_URL").expect("the tests run by scripts/test");
        let mut conn = MySqlConnection::connect(&url).await.expect("a connection");
        let path = ("test".to_owned(), "orders".to_owned(), vec!["id".to_owned()]);
        let plan = bind_path(&format!("EXPLAIN {COLUMN}"), &path).fetch_all(&mut conn).await.expect("a plan");
        for row in plan {
            let extra: String = row.try_get("Extra").expect("a text");
            assert!(!extra.contains("all databases"), "{extra}");
        }
    }
}
