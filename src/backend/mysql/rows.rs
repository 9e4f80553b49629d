//! Statements on the caller's own tables, in the caller's own transactions.
//!
//! A wait is bounded by the statement itself, in the way that each of the two has. No setting of the session is touched, so
//! none has to be restored, even when a future is dropped in the middle.

use std::time::Duration;

use sqlx::mysql::MySqlTypeInfo;
use sqlx::{AssertSqlSafe, MySql, MySqlConnection, QueryBuilder, Row as _, SqlSafeStr as _, SqlStr, TypeInfo as _};

use super::store::{is_timeout, number};
use crate::backend::sealed::{Catalogued, Clauses, Column, Dialect, Ended, Ending, Locking, Refusal, Unique, Wait};
use crate::backend::table::Table;
use crate::backend::{Job, NOTED, hex, micros};
use crate::name::LockName;

/// A deadlock rolls the whole transaction back, and what follows would be committed statement by statement. So nothing is, until the
/// transaction has ended; the session's own setting is kept in a variable meanwhile.
const TURN_AUTOCOMMIT_OFF: &str = "SET @sqlock_autocommit = @@autocommit, autocommit = 0";

/// Whatever ends the transaction takes the savepoint with it: a deadlock, but also a statement with an implicit commit.
/// <https://dev.mysql.com/doc/refman/8.4/en/savepoint.html>
const SET_SAVEPOINT: &str = "SAVEPOINT sqlock";

/// In one packet, of which the server carries out nothing after a statement that fails.
const COMMIT_FROM_SAVEPOINT: &str = "RELEASE SAVEPOINT sqlock; COMMIT; SET autocommit = @sqlock_autocommit";

const ROLL_BACK: &str = "ROLLBACK; SET autocommit = @sqlock_autocommit";

impl Dialect for MySql {
    const QUOTE: char = '`';
    const INTEGER: &'static str = "SIGNED";
    const PRESENT: &'static str = " LOCK IN SHARE MODE";
    const BEGIN: Option<&'static str> = Some("BEGIN");
    const ABORTS: bool = false;
    const LOCKS_ROWS: bool = true;
    // Of a small table, or for many keys, it scans the index, and locks what it looks at.
    const LOOKS_UP_SEVERAL: bool = false;

    fn begin(sql: SqlStr) -> SqlStr {
        let begin = sql.as_str().trim_end_matches(|c: char| c == ';' || c.is_whitespace());
        // On a line of its own, for the text may end with a comment.
        AssertSqlSafe(format!("{TURN_AUTOCOMMIT_OFF}; {begin}\n; {SET_SAVEPOINT}")).into_sql_str()
    }

    fn end(conn: &mut MySqlConnection, ending: Ending) -> Job<'_, Ended> {
        Box::pin(async move {
            if ending == Ending::Commit {
                match sqlx::raw_sql(COMMIT_FROM_SAVEPOINT).execute(&mut *conn).await {
                    Ok(_) => return Ok(Ended::AsAsked),
                    // There is no such savepoint.
                    Err(error) if number(&error) == Some(1305) => {}
                    Err(error) => return Err(error),
                }
            }
            sqlx::raw_sql(ROLL_BACK).execute(conn).await?;
            Ok(if ending == Ending::Commit { Ended::Before } else { Ended::AsAsked })
        })
    }

    fn fetch<'a>(conn: &'a mut MySqlConnection, query: &'a mut QueryBuilder<Self>) -> Job<'a, Vec<Self::Row>> {
        let sql = query.sql();
        if sql.as_str().contains('?') {
            return Box::pin(query.build().fetch_all(conn));
        }
        // Not prepared: a future that is dropped while sqlx prepares leaves a connection that never answers again, and with
        // it a transaction that never ends.
        Box::pin(sqlx::raw_sql(sql).fetch_all(conn))
    }

    fn execute<'a>(conn: &'a mut MySqlConnection, query: &'a mut QueryBuilder<Self>) -> Job<'a, u64> {
        Box::pin(async move { Ok(query.build().execute(conn).await?.rows_affected()) })
    }

    fn clauses(Locking { shared, wait, .. }: Locking) -> Clauses {
        // /*M! … */ is for MariaDB's eyes, /*!80001 … */ for MySQL's: MariaDB leaves out what is for a MySQL that it never was.
        // https://mariadb.com/kb/en/comment-syntax/
        let after = match (shared, wait) {
            (false, Wait::Unbounded | Wait::AtMost(_)) => " FOR UPDATE",
            (false, Wait::Refuse) => " FOR UPDATE NOWAIT",
            (false, Wait::Skip) => " FOR UPDATE SKIP LOCKED",
            (true, Wait::Unbounded | Wait::AtMost(_)) => " LOCK IN SHARE MODE",
            (true, Wait::Refuse) => " /*M! LOCK IN SHARE MODE */ /*!80001 FOR SHARE */ NOWAIT",
            (true, Wait::Skip) => " /*M! LOCK IN SHARE MODE */ /*!80001 FOR SHARE */ SKIP LOCKED",
        };
        let Wait::AtMost(within) = wait else {
            return Clauses { after: after.into(), ..Clauses::default() };
        };
        // The server's own bound, innodb_lock_wait_timeout, counts seconds. Zero would be no bound.
        // https://dev.mysql.com/doc/refman/8.4/en/optimizer-hints.html#optimizer-hints-execution-time
        // https://mariadb.com/kb/en/set-statement/
        let within = within.clamp(Duration::from_millis(1), Duration::from_millis(u32::MAX.into()));
        Clauses {
            before: format!("/*M! SET STATEMENT max_statement_time = {:.6} FOR */ ", within.as_secs_f64()),
            hint: format!("/*+ MAX_EXECUTION_TIME({}) */ ", within.as_micros().div_ceil(1000)),
            after: after.into(),
        }
    }

    /// Without a strict sql_mode a greater number is cut off, and no error is told.
    fn greatest_integer<'a>(conn: &'a mut MySqlConnection, table: &'a Table, column: &'a str) -> Job<'a, Option<i64>> {
        Box::pin(async move {
            let query = sqlx::query(COLUMN_TYPE).bind(table.schema()).bind(table.name()).bind(column);
            let row = query.fetch_optional(conn).await?;
            let name: Option<String> = row.map(|row| row.try_get(0)).transpose()?;
            Ok(name.as_deref().and_then(greatest_of))
        })
    }

    fn push_named(query: &mut QueryBuilder<Self>, name: &str) {
        query.push("1 FROM sqlock_row WHERE name = X'").push(hex(name.as_bytes())).push("'");
    }

    fn refusal(error: &sqlx::Error) -> Option<Refusal> {
        match number(error)? {
            // Lock wait timeout, also MariaDB's answer to NOWAIT; MySQL's answer to it.
            1205 | 3572 => Some(Refusal::Taken),
            // MAX_EXECUTION_TIME, max_statement_time.
            3024 | 1969 => Some(Refusal::Cut),
            // MariaDB with innodb_snapshot_isolation: the row has changed since the snapshot.
            1020 => Some(Refusal::Stale),
            _ => None,
        }
    }

    fn has_rolled_back<'a>(conn: &'a mut MySqlConnection, error: &'a sqlx::Error) -> Job<'a, bool> {
        Box::pin(async move {
            if number(error) != Some(1205) {
                return Ok(false);
            }
            // https://dev.mysql.com/doc/refman/8.4/en/innodb-parameters.html#sysvar_innodb_rollback_on_timeout
            let row = sqlx::raw_sql("SELECT @@innodb_rollback_on_timeout").fetch_one(conn).await?;
            Ok(row.try_get::<i64, _>(0)? != 0)
        })
    }

    /// MySQL's catalogue is made of InnoDB tables. To read it at REPEATABLE READ would be the beginning of the snapshot, which is
    /// to begin when the row is locked.
    fn column<'a>(conn: &'a mut MySqlConnection, table: &'a Table, _column: &'a str) -> Job<'a, Catalogued> {
        Box::pin(async move {
            if let Some(schema) = table.schema() {
                return Ok(Catalogued::Elsewhere(schema.into()));
            }
            let row = sqlx::raw_sql("SELECT CAST(DATABASE() AS CHAR)").fetch_one(conn).await?;
            let schema: Option<String> = row.try_get(0)?;
            Ok(schema.map_or(Catalogued::Unknown, Catalogued::Elsewhere))
        })
    }

    /// What a column is compared with is converted to its class, or the column to that of the key: the text '7abc' is equal to the
    /// number 7, 'abc' to 0, and for a number every text is converted, so that all rows are locked.
    /// https://dev.mysql.com/doc/refman/8.4/en/type-conversion.html
    fn suits(key: &MySqlTypeInfo, column: &Column) -> bool {
        match (Class::of(key.name()), Class::of(&column.type_name)) {
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

/// Of a type as the catalogue calls it: `int(10) unsigned`. Of one that holds more than an i64, that of an i64.
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

// One row for each unique index that is on this column alone, the best one first; or one row without an index. An index on an
// expression has no column. MySQL hides an index as INVISIBLE, MariaDB as IGNORED. Bind order: schema and table twice, column.
// https://dev.mysql.com/doc/refman/8.4/en/invisible-indexes.html, https://mariadb.com/kb/en/ignored-indexes/
#[rustfmt::skip]
const COLUMN: &str = "
SELECT CAST(c.DATA_TYPE AS CHAR), CAST(t.ENGINE AS CHAR), CAST(i.name AS CHAR), CAST(i.obstacle AS CHAR),
       CAST(c.CHARACTER_SET_NAME AS CHAR), CAST(c.COLLATION_NAME AS CHAR)
  FROM information_schema.COLUMNS AS c
  JOIN information_schema.TABLES AS t ON t.TABLE_SCHEMA = c.TABLE_SCHEMA AND t.TABLE_NAME = c.TABLE_NAME
  LEFT JOIN (SELECT s.TABLE_SCHEMA AS place, s.TABLE_NAME AS home, s.INDEX_NAME AS name, MAX(s.COLUMN_NAME) AS part,
                    CASE WHEN MAX(s.SUB_PART) IS NOT NULL THEN 'it is on a part of the column'
                         WHEN MAX(s.INDEX_TYPE) <> 'BTREE' THEN CONCAT('it is a ', LOWER(MAX(s.INDEX_TYPE)), ' index')
                         /*!80000 WHEN MAX(s.IS_VISIBLE) = 'NO' THEN 'it is invisible' */
                         /*M!100600 WHEN MAX(s.IGNORED) = 'YES' THEN 'it is ignored' */
                    END AS obstacle
               FROM information_schema.STATISTICS AS s
              WHERE s.NON_UNIQUE = 0 AND s.TABLE_SCHEMA = ? AND s.TABLE_NAME = ?
              GROUP BY s.TABLE_SCHEMA, s.TABLE_NAME, s.INDEX_NAME
             HAVING COUNT(*) = 1) AS i
    ON i.place = c.TABLE_SCHEMA AND i.home = c.TABLE_NAME AND i.part = c.COLUMN_NAME
 WHERE c.TABLE_SCHEMA = ? AND c.TABLE_NAME = ? AND c.COLUMN_NAME = ?
 ORDER BY i.obstacle IS NOT NULL, i.name <> 'PRIMARY'
 LIMIT 1";

/// What the catalogue says about a column of a schema and a table.
pub(super) async fn column(
    conn: &mut MySqlConnection,
    (schema, table, column): &(String, String, String),
) -> Result<Option<Column>, sqlx::Error> {
    let query = sqlx::query(COLUMN).bind(schema).bind(table).bind(schema).bind(table).bind(column);
    let Some(row) = query.fetch_optional(conn).await? else {
        return Ok(None);
    };
    let engine: Option<String> = row.try_get(1)?;
    let (index, obstacle): (Option<String>, _) = (row.try_get(2)?, row.try_get(3)?);
    let (charset, collation): (Option<String>, Option<String>) = (row.try_get(4)?, row.try_get(5)?);
    Ok(Some(Column {
        type_name: row.try_get(0)?,
        unique: index.map(|name| Unique { name, obstacle }),
        rowless: engine.filter(|engine| !engine.eq_ignore_ascii_case("InnoDB")),
        collated: charset
            .zip(collation)
            .map(|(charset, collation)| format!("CONVERT(k.k USING {charset}) COLLATE {collation}")),
    }))
}

// Whether there is a row, and whether it is time to note down that it is in use. Bind order: how old the note may get, name.
#[rustfmt::skip]
const SEEN: &str = concat!("SELECT seen_at < ", now!(), " - ? FROM sqlock_row WHERE name = ?");

// Bind order: name.
#[rustfmt::skip]
const CREATE: &str = concat!("INSERT IGNORE INTO sqlock_row (name, seen_at) VALUES (?, ", now!(), ")");

// A row that is locked is not waited for. Bind order: name.
#[rustfmt::skip]
const NOTE: &str = concat!("
UPDATE (SELECT s.name FROM sqlock_row AS s WHERE s.name = ? LIMIT 1 FOR UPDATE SKIP LOCKED) AS q
       STRAIGHT_JOIN sqlock_row AS r ON r.name = q.name
   SET r.seen_at = ", now!());

/// Makes sure that a row stands for a name.
pub(super) async fn ensure(conn: &mut MySqlConnection, name: &LockName) -> Result<(), sqlx::Error> {
    let name = name.as_str().as_bytes();
    let seen = sqlx::query(SEEN).bind(micros(NOTED)).bind(name).fetch_optional(&mut *conn).await?;
    let done = match seen.map(|row| row.try_get(0)).transpose()? {
        Some(false) => return Ok(()),
        Some(true) => sqlx::query(NOTE).bind(name).execute(conn).await,
        None => sqlx::query(CREATE).bind(name).execute(conn).await,
    };
    match done {
        // Another connection has created the row meanwhile, and has locked it.
        Err(error) if is_timeout(&error) => Ok(()),
        done => done.map(drop),
    }
}

/// Types whose values are compared without a conversion that loses something, or the index.
#[derive(Debug, PartialEq, Eq)]
enum Class {
    Exact,
    Approximate,
    Text,
    Bytes,
    Date,
    Time,
    Moment,
    /// MariaDB's own types, for which it parses text and bytes before it looks them up.
    Parsed,
    /// Any other, by its name.
    Other(String),
}

impl Class {
    /// Of a type, as the catalogue or sqlx calls it.
    fn of(name: &str) -> Self {
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
