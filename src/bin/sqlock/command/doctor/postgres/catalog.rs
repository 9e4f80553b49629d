//! The tables in a database of PostgreSQL, and the rights of this user on them.

use sqlx::{AssertSqlSafe, Error, PgConnection, Postgres};

use crate::command::doctor::definitions::{MissingTables, report_denied, report_unreadable_history};
use crate::command::doctor::probe::{Rows, first_cell, query};
use crate::command::doctor::report::Check;
use crate::command::doctor::table::{self, Catalog, HISTORY, Table, parse_bool};

/// The statements, formatted for readability.
#[rustfmt::skip]
mod sql {
pub(super) const PLACE: &str = "
SELECT coalesce(current_schema(), ''),
       coalesce(has_schema_privilege(current_schema(), 'CREATE'), false)";

// to_regclass follows the search path, as every statement does, and returns NULL for a missing
// table.
macro_rules! ours {
    () => { "(SELECT to_regclass(name)::oid FROM unnest(ARRAY[{names}]) AS n (name))" };
}
pub(super) const TABLES: &str = concat!("
SELECT c.relname, n.nspname, c.relkind, c.relpersistence,
       has_table_privilege(c.oid, 'SELECT'), has_table_privilege(c.oid, 'INSERT'), has_table_privilege(c.oid, 'UPDATE'),
       has_table_privilege(c.oid, 'DELETE'), row_security_active(c.oid)
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.oid IN ", ours!(), "
 ORDER BY 1");

// Marks a collation that treats different texts as equal.
pub(super) const COLUMNS: &str = concat!("
SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod),
       CASE WHEN o.collisdeterministic THEN '' ELSE '!' END || o.collname, a.attnotnull, a.atthasdef OR a.attidentity <> ''
  FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
       LEFT JOIN pg_collation AS o ON o.oid = a.attcollation
 WHERE c.oid IN ", ours!());

// The indexes that ON CONFLICT can use: on all rows, on plain columns, not deferrable, and valid.
// https://www.postgresql.org/docs/current/catalog-pg-index.html
pub(super) const INDEXES: &str = concat!("
SELECT c.relname, i.indisunique AND i.indimmediate, string_agg(a.attname, ',' ORDER BY k.n)
  FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indrelid
       CROSS JOIN unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, n)
       JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
 WHERE c.oid IN ", ours!(), "
   AND i.indisvalid AND i.indisready AND i.indpred IS NULL AND i.indexprs IS NULL AND k.n <= i.indnkeyatts
 GROUP BY i.indexrelid, 1, 2");

// Rules, and triggers with their time: bit 1 of the type is BEFORE, bit 6 is INSTEAD OF. Not those
// that are disabled, or fire on replicas only.
// https://www.postgresql.org/docs/current/catalog-pg-trigger.html
pub(super) const HOOKS: &str = concat!("
SELECT c.relname, CASE WHEN t.tgtype & 64 <> 0 THEN 'instead of' WHEN t.tgtype & 2 <> 0 THEN 'before' ELSE 'after' END,
       t.tgname
  FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
 WHERE NOT t.tgisinternal AND t.tgenabled IN ('O', 'A') AND c.oid IN ", ours!(), "
 UNION ALL
SELECT c.relname, 'rule', r.rulename
  FROM pg_rewrite AS r JOIN pg_class AS c ON c.oid = r.ev_class
 WHERE r.rulename <> '_RETURN' AND r.ev_enabled IN ('O', 'A') AND c.oid IN ", ours!(), "
 ORDER BY 1, 3");

pub(super) const VIEW: &str = "SELECT to_regclass('sqlock_holders') IS NOT NULL";

// Tables of the same names, further down the search path.
pub(super) const NAMESAKES: &str = concat!("
SELECT c.relname, n.nspname
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE c.relname IN ({names}) AND n.nspname = ANY (current_schemas(false)) AND c.relkind IN ('r', 'p', 'v', 'f')
   AND c.oid NOT IN (SELECT o FROM ", ours!(), " AS ours (o) WHERE o IS NOT NULL)
 ORDER BY 1, 2");

pub(super) const HISTORY: &str = "
SELECT version, success, encode(checksum, 'hex'), extract(epoch FROM clock_timestamp() - installed_on)
  FROM _sqlock_migrations
 ORDER BY 1";
}

/// Queries the schema of new tables, and whether this user may create them there.
pub async fn query_schema(conn: &mut PgConnection) -> Result<Rows, Error> {
    query::<Postgres>(conn, sql::PLACE).await
}

/// Queries the tables and the record of migrations: name, schema, kind, whether it is logged, four
/// rights, row-level security.
pub async fn query_tables(conn: &mut PgConnection, expected: &[Table]) -> Result<Rows, Error> {
    query::<Postgres>(conn, with_table_names(sql::TABLES, expected)).await
}

fn with_table_names(sql: &str, expected: &[Table]) -> AssertSqlSafe<String> {
    AssertSqlSafe(sql.replace("{names}", &format!("{}, '{HISTORY}'", table::quote_names(expected))))
}

pub async fn read_catalog(
    conn: &mut PgConnection,
    expected: &[Table],
    table_rows: &Rows,
    place: &str,
) -> Result<Catalog, Error> {
    let mut tables = table::from_rows(table_rows);
    table::add_columns(&mut tables, &query::<Postgres>(conn, with_table_names(sql::COLUMNS, expected)).await?);
    table::add_indexes(&mut tables, &query::<Postgres>(conn, with_table_names(sql::INDEXES, expected)).await?);
    let history = match table_rows.iter().find(|row| row[0] == HISTORY) {
        // Without the right to read the record, the tables themselves are compared.
        Some(row) if parse_bool(&row[4]) => Some(query::<Postgres>(conn, sql::HISTORY).await?),
        _ => None,
    };
    // The tables may be further down the search path than new ones would be.
    let schema = table_rows.iter().find(|row| row[0] != HISTORY).map_or(place, |row| &row[1]);
    let place = match schema {
        "" => "in any schema of the search_path".into(),
        schema => format!("in the schema {schema}"),
    };
    let has_view = parse_bool(first_cell(&query::<Postgres>(conn, sql::VIEW).await?));
    Ok(Catalog { tables, history, has_view, place })
}

/// Queries triggers and rules: table, time or "rule", name.
pub async fn query_hooks(conn: &mut PgConnection, expected: &[Table]) -> Result<Rows, Error> {
    query::<Postgres>(conn, with_table_names(sql::HOOKS, expected)).await
}

/// Queries tables that are hidden by others of the same name: name, schema.
pub async fn query_namesakes(conn: &mut PgConnection, expected: &[Table]) -> Result<Rows, Error> {
    query::<Postgres>(conn, with_table_names(sql::NAMESAKES, expected)).await
}

/// Checks that all tables are in one schema and have no namesakes: users with another search_path
/// would share only some of the tables.
pub fn check_schemas(table_rows: &Rows, namesakes: &Rows, mut check: Check) -> Check {
    let mut schemas: Vec<&str> = table_rows.iter().map(|row| &*row[1]).collect();
    schemas.sort_unstable();
    schemas.dedup();
    if schemas.len() > 1 {
        let found = format!("the tables are in several schemas: {}", schemas.join(", "));
        let advice = "Move them into one schema: with another search_path a user does not see the same leases.";
        check = check.fail(found, advice);
    }
    for row in namesakes {
        let advice = "Drop one of them: with another search_path a user does not see the same leases.";
        check = check.warn(format!("there is another {} in the schema {}", row[0], row[1]), advice);
    }
    check
}

/// Checks that the tables are tables, and logged.
pub fn check_table_kinds(table_rows: &Rows, mut check: Check) -> Check {
    for row in table_rows {
        let name = &row[0];
        if !matches!(&*row[2], "r" | "p") {
            check = check.fail(format!("{name} is not a table"), "Rename it, or keep sqlock in a schema of its own.");
        }
        if row[3] == "u" {
            let advice = format!("ALTER TABLE {name} SET LOGGED: a crash of the server empties it.");
            check = check.warn(format!("{name} is UNLOGGED"), advice);
        }
    }
    check
}

/// Checks the rights of this user, with has_table_privilege, which includes those of roles, owners
/// and superusers.
pub fn check_rights(table_rows: &Rows, missing: bool, missing_tables: MissingTables, place: &Rows) -> Check {
    let mut check = Check::new("rights");
    for row in table_rows {
        let name = &row[0];
        let rights = ["SELECT", "INSERT", "UPDATE", "DELETE"].iter().zip(&row[4..8]);
        let denied: Vec<&str> = rights.filter(|(_, granted)| !parse_bool(granted)).map(|(right, _)| *right).collect();
        if name == HISTORY {
            if denied.contains(&"SELECT") {
                check = report_unreadable_history(check, missing_tables);
            }
            continue;
        }
        check = report_denied(check, name, &denied);
        if parse_bool(&row[8]) {
            let advice =
                format!("ALTER TABLE {name} DISABLE ROW LEVEL SECURITY: a name whose row is hidden looks free.");
            check = check.fail(format!("row-level security hides rows of {name}"), advice);
        }
    }
    if missing {
        let may_create = place.first().and_then(|row| row.get(1)).is_some_and(|granted| parse_bool(granted));
        let schema = first_cell(place);
        if schema.is_empty() {
            check =
                check.fail("no schema of the search_path can be used", "GRANT USAGE on one, or set the search_path.");
        } else if !may_create {
            let advice = "GRANT CREATE on it, or run \"sqlock migrate\" as a user with that right.";
            check = check.fail(format!("no CREATE on the schema {schema}, where tables are missing"), advice);
        }
    }
    check.or_ok(if missing { "tables can be created" } else { "all rights that sqlock needs" })
}
