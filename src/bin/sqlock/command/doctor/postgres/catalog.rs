//! The tables that PostgreSQL has, and what this user may do with them.

use sqlx::{AssertSqlSafe, Error, PgConnection, Postgres};

use crate::command::doctor::probe::{Rows, first_cell, query};
use crate::command::doctor::report::Check;
use crate::command::doctor::table::{self, Catalog, HISTORY, Table, parse_bool};

/// The statements, laid out to be read.
#[rustfmt::skip]
mod sql {
pub(super) const PLACE: &str = "
SELECT coalesce(current_schema(), ''),
       coalesce(has_schema_privilege(current_schema(), 'CREATE'), false)";

// to_regclass finds what the search path leads to, as every statement does, and NULL where there is nothing.
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

// A collation that takes different texts to be equal is marked.
pub(super) const COLUMNS: &str = concat!("
SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod),
       CASE WHEN o.collisdeterministic THEN '' ELSE '!' END || o.collname, a.attnotnull, a.atthasdef
  FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
       LEFT JOIN pg_collation AS o ON o.oid = a.attcollation
 WHERE c.oid IN ", ours!());

// Those that ON CONFLICT can use: of all rows, of plain columns, checked at once, and finished.
// https://www.postgresql.org/docs/current/catalog-pg-index.html
pub(super) const INDEXES: &str = concat!("
SELECT c.relname, i.indisunique AND i.indimmediate, string_agg(a.attname, ',' ORDER BY k.n)
  FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indrelid
       CROSS JOIN unnest(i.indkey::int2[]) WITH ORDINALITY AS k (attnum, n)
       JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
 WHERE c.oid IN ", ours!(), "
   AND i.indisvalid AND i.indisready AND i.indpred IS NULL AND i.indexprs IS NULL AND k.n <= i.indnkeyatts
 GROUP BY i.indexrelid, 1, 2");

pub(super) const HISTORY: &str = "SELECT version, success, encode(checksum, 'hex') FROM _sqlock_migrations ORDER BY 1";
}

/// Where new tables would be made, and whether this user may make them.
pub async fn query_schema(conn: &mut PgConnection) -> Result<Rows, Error> {
    query::<Postgres>(conn, sql::PLACE).await
}

/// With the history, the table, its schema, its kind, whether it is logged, four rights, row-level security.
pub async fn query_tables(conn: &mut PgConnection, expected: &[Table]) -> Result<Rows, Error> {
    query::<Postgres>(conn, with_table_names(sql::TABLES, expected)).await
}

fn with_table_names(sql: &str, expected: &[Table]) -> AssertSqlSafe<String> {
    AssertSqlSafe(sql.replace("{names}", &format!("{}, '{HISTORY}'", table::quote_names(expected))))
}

pub async fn read_catalog(
    conn: &mut PgConnection,
    expected: &[Table],
    about: &Rows,
    place: &str,
) -> Result<Catalog, Error> {
    let mut tables = table::from_rows(about);
    table::add_columns(&mut tables, &query::<Postgres>(conn, with_table_names(sql::COLUMNS, expected)).await?);
    table::add_indexes(&mut tables, &query::<Postgres>(conn, with_table_names(sql::INDEXES, expected)).await?);
    let history = match about.iter().find(|row| row[0] == HISTORY) {
        // Without the right to read it, what the tables are like has to do.
        Some(row) if parse_bool(&row[4]) => Some(query::<Postgres>(conn, sql::HISTORY).await?),
        _ => None,
    };
    // Tables may be further down the search path than new ones would be.
    let schema = about.iter().find(|row| row[0] != HISTORY).map_or(place, |row| &row[1]);
    let place = match schema {
        "" => "in any schema of the search_path".into(),
        schema => format!("in the schema {schema}"),
    };
    Ok(Catalog { tables, history, place })
}

/// What can be wrong with a table of PostgreSQL as a whole.
pub fn check_table_kinds(about: &Rows, mut check: Check) -> Check {
    for row in about {
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

/// has_table_privilege knows of roles, owners and superusers, which no list of grants tells.
pub fn check_rights(about: &Rows, missing: bool, place: &Rows) -> Check {
    let mut check = Check::new("rights");
    for row in about {
        let name = &row[0];
        let rights = ["SELECT", "INSERT", "UPDATE", "DELETE"].iter().zip(&row[4..8]);
        let denied: Vec<&str> = rights.filter(|(_, granted)| !parse_bool(granted)).map(|(right, _)| *right).collect();
        if name == HISTORY {
            if denied.contains(&"SELECT") {
                let advice =
                    format!("GRANT SELECT ON {name} to this user: \"sqlock migrate\" reads it, and nothing else does.");
                check = check.warn(format!("no SELECT on {name}"), advice);
            }
            continue;
        }
        if !denied.is_empty() {
            let advice = "GRANT SELECT, INSERT, UPDATE, DELETE on the tables of sqlock to this user.";
            check = check.fail(format!("no {} on {name}", denied.join(", ")), advice);
        }
        if parse_bool(&row[8]) {
            let advice = format!(
                "ALTER TABLE {name} DISABLE ROW LEVEL SECURITY: who does not see a row takes its name to be free."
            );
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
            let advice = "GRANT CREATE on it, or let somebody who has it run \"sqlock migrate\".";
            check = check.fail(format!("no CREATE on the schema {schema}, where tables are missing"), advice);
        }
    }
    check.or_ok(if missing { "tables can be created" } else { "all that is needed on every table" })
}
