//! The tables in a database of MySQL or MariaDB, and the rights of this user on them.

use sqlx::error::DatabaseError;
use sqlx::mysql::MySqlDatabaseError;
use sqlx::{AssertSqlSafe, Error, MySql, MySqlConnection};

use crate::command::doctor::definitions::{MissingTables, report_denied, report_unreadable_history};
use crate::command::doctor::probe::{Rows, first_cell, query};
use crate::command::doctor::report::Check;
use crate::command::doctor::table::{self, Catalog, HISTORY, Table};

/// The statements, formatted for readability.
#[rustfmt::skip]
mod sql {
pub(super) const TABLES: &str = "
SELECT TABLE_NAME, TABLE_TYPE, COALESCE(ENGINE, '') FROM information_schema.TABLES
 WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({names})
 ORDER BY 1";

pub(super) const COLUMNS: &str = "
SELECT TABLE_NAME, COLUMN_NAME, LOWER(COLUMN_TYPE), COALESCE(COLLATION_NAME, ''), IS_NULLABLE = 'NO',
       COLUMN_DEFAULT IS NOT NULL OR EXTRA LIKE '%auto_increment%' OR EXTRA LIKE '%GENERATED%'
  FROM information_schema.COLUMNS
 WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({names})";

// Visible with a right to it only.
pub(super) const VIEW: &str = "
SELECT TABLE_NAME FROM information_schema.TABLES WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = 'sqlock_holders'";

// A prefix of a column gets another name here, so that it does not match.
pub(super) const INDEXES: &str = "
SELECT TABLE_NAME, NON_UNIQUE = 0,
       GROUP_CONCAT(CONCAT(COLUMN_NAME, IF(SUB_PART IS NULL, '', CONCAT('(', SUB_PART, ')'))) ORDER BY SEQ_IN_INDEX)
  FROM information_schema.STATISTICS
 WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME IN ({names})
 GROUP BY TABLE_NAME, INDEX_NAME, 2";

// Visible with the right TRIGGER only. A statement that fires a trigger does not return the value
// of LAST_INSERT_ID(expression), from which sqlock reads the results of writes to the named tables.
pub(super) const HOOKS: &str = "
SELECT EVENT_OBJECT_TABLE,
       IF(ACTION_TIMING = 'AFTER' AND EVENT_MANIPULATION <> 'DELETE'
          AND EVENT_OBJECT_TABLE IN ('sqlock_client', 'sqlock_lease', 'sqlock_entry'), 'hiding', ACTION_TIMING),
       TRIGGER_NAME
  FROM information_schema.TRIGGERS
 WHERE EVENT_OBJECT_SCHEMA = DATABASE() AND EVENT_OBJECT_TABLE IN ({names})
 ORDER BY 1, 3";

// The record has whole seconds, rounded down.
pub(super) const READ_HISTORY: &str = "SELECT version FROM _sqlock_migrations LIMIT 1";

pub(super) const HISTORY: &str = "
SELECT version, success, HEX(checksum), TIMESTAMPDIFF(MICROSECOND, installed_on, SYSDATE(6)) / 1000000 - 1
  FROM _sqlock_migrations
 ORDER BY version";

// EXPLAIN needs the rights of the statement and does not run it. SHOW GRANTS returns roles and
// wildcards, which would have to be resolved; a statement that is rolled back also fails for other
// reasons, for instance on a read-only server. https://dev.mysql.com/doc/refman/8.4/en/explain.html
pub(super) const RIGHTS: [(&str, &str); 4] = [
    ("SELECT", "EXPLAIN SELECT * FROM {table} WHERE FALSE"),
    ("INSERT", "EXPLAIN INSERT INTO {table} ({column}) VALUES ('')"),
    ("UPDATE", "EXPLAIN UPDATE {table} SET {column} = '' WHERE FALSE"),
    ("DELETE", "EXPLAIN DELETE FROM {table} WHERE FALSE"),
];

// EXPLAIN does not support CREATE. Rights of a role are not listed here. The name of a database may
// be a pattern in a grant.
pub(super) const MAY_CREATE: &str = "
SELECT COUNT(DISTINCT PRIVILEGE_TYPE) = 7 FROM (
    SELECT GRANTEE, PRIVILEGE_TYPE FROM information_schema.USER_PRIVILEGES
     UNION ALL
    SELECT GRANTEE, PRIVILEGE_TYPE FROM information_schema.SCHEMA_PRIVILEGES WHERE DATABASE() LIKE TABLE_SCHEMA) AS p
 WHERE PRIVILEGE_TYPE IN ('CREATE', 'CREATE VIEW', 'DROP', 'SELECT', 'INSERT', 'UPDATE', 'DELETE')
   AND GRANTEE = CONCAT('''', LEFT(CURRENT_USER(), CHAR_LENGTH(CURRENT_USER())
                                                   - CHAR_LENGTH(SUBSTRING_INDEX(CURRENT_USER(), '@', -1)) - 1),
                        '''@''', SUBSTRING_INDEX(CURRENT_USER(), '@', -1), '''')";
pub(super) const ROLE: &str = "SELECT COALESCE(CURRENT_ROLE(), 'NONE')";
}

/// Queries the tables and the record of migrations: name, type, engine.
pub async fn query_tables(conn: &mut MySqlConnection, expected: &[Table]) -> Result<Rows, Error> {
    query::<MySql>(conn, with_table_names(sql::TABLES, expected)).await
}

fn with_table_names(sql: &str, expected: &[Table]) -> AssertSqlSafe<String> {
    AssertSqlSafe(sql.replace("{names}", &format!("{}, '{HISTORY}'", table::quote_names(expected))))
}

pub async fn read_catalog(
    conn: &mut MySqlConnection,
    expected: &[Table],
    table_rows: &Rows,
    database: Option<&str>,
) -> Result<Catalog, Error> {
    let mut tables = table::from_rows(table_rows);
    table::add_columns(&mut tables, &query::<MySql>(conn, with_table_names(sql::COLUMNS, expected)).await?);
    table::add_indexes(&mut tables, &query::<MySql>(conn, with_table_names(sql::INDEXES, expected)).await?);
    let history = match table_rows.iter().any(|row| row[0] == HISTORY) {
        true => match query::<MySql>(conn, sql::HISTORY).await {
            Ok(rows) => Some(rows),
            // Without the right to read the record, the tables themselves are compared.
            Err(Error::Database(_)) => None,
            Err(error) => return Err(error),
        },
        false => None,
    };
    let place = match database {
        Some(name) => format!("in the database {name}"),
        None => "here: the URL names no database".into(),
    };
    let has_view = !query::<MySql>(conn, sql::VIEW).await?.is_empty();
    Ok(Catalog { tables, history, has_view, place })
}

/// Queries triggers: table, time or "hiding", name.
pub async fn query_hooks(conn: &mut MySqlConnection, expected: &[Table]) -> Result<Rows, Error> {
    query::<MySql>(conn, with_table_names(sql::HOOKS, expected)).await
}

/// Checks that the tables are tables, and of InnoDB.
pub fn check_table_kinds(table_rows: &Rows, mut check: Check) -> Check {
    for row in table_rows {
        let (name, kind, engine) = (&row[0], &row[1], &row[2]);
        if kind != "BASE TABLE" {
            check = check.fail(format!("{name} is not a table"), "Rename it, or keep sqlock in a database of its own.");
        } else if !engine.eq_ignore_ascii_case("InnoDB") {
            let advice = format!("ALTER TABLE {name} ENGINE = InnoDB: other engines neither lock rows nor roll back.");
            check = check.fail(format!("{name} has the engine {engine}"), advice);
        }
    }
    check
}

/// Returns whether the server has denied a right: to the database, the table, the column or the
/// server.
fn is_denied(error: &dyn DatabaseError) -> bool {
    let error = error.try_downcast_ref::<MySqlDatabaseError>();
    error.is_some_and(|error| matches!(error.number(), 1044 | 1142 | 1143 | 1227))
}

pub async fn check_rights(
    conn: &mut MySqlConnection,
    found: &[Table],
    missing: bool,
    missing_tables: MissingTables,
) -> Result<Check, Error> {
    let mut check = Check::new("rights");
    // Without any right to it, the catalogue does not show it.
    if let Err(Error::Database(error)) = query::<MySql>(conn, sql::READ_HISTORY).await
        && is_denied(&*error)
    {
        check = report_unreadable_history(check, missing_tables);
    }
    for table in found {
        let Some(column) = table.columns.first() else { continue };
        let mut denied = Vec::new();
        for (right, sql) in sql::RIGHTS {
            let sql = sql.replace("{table}", &table.name).replace("{column}", &column.name);
            match query::<MySql>(conn, AssertSqlSafe(sql)).await {
                Ok(_) => {}
                Err(Error::Database(error)) if is_denied(&*error) => denied.push(right),
                Err(Error::Database(error)) => {
                    check = check.unknown(format!("{right} on {}: {}", table.name, error.message()), "");
                }
                Err(error) => return Err(error),
            }
        }
        if table.name != HISTORY {
            check = report_denied(check, &table.name, &denied);
        }
    }
    if missing && first_cell(&query::<MySql>(conn, sql::MAY_CREATE).await?) == "0" {
        check = match first_cell(&query::<MySql>(conn, sql::ROLE).await?) {
            "NONE" => {
                let advice = "GRANT CREATE, CREATE VIEW, DROP, SELECT, INSERT, UPDATE, DELETE on the database, or run \
                              \"sqlock migrate\" as a user with these rights.";
                check.fail("no CREATE, or not all rights that creating tables needs, and tables are missing", advice)
            }
            role => check.unknown(format!("the right to create tables depends on the role {role}"), ""),
        };
    }
    Ok(check.or_ok(if missing { "tables can be created" } else { "all rights that sqlock needs" }))
}
