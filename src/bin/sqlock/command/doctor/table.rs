//! Tables, columns and indexes, from the SQL that `sqlock schema` prints or from the catalog of a
//! database.

use std::collections::BTreeSet;
use std::time::Duration;

use super::probe::Rows;
use super::report::Record;
use crate::migrations;
use crate::url::Kind;

/// The table that records the migrations.
pub const HISTORY: &str = "_sqlock_migrations";

/// A table, as it should be or as it was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Table {
    pub name: String,
    pub columns: Vec<Column>,
    pub indexes: Vec<Index>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Column {
    pub name: String,
    /// The type in lower case, as the database spells it.
    pub kind: String,
    /// Empty: none, or not queried.
    pub collation: String,
    pub not_null: bool,
    pub has_default: bool,
}

/// An index that covers all rows.
#[derive(Debug, PartialEq, Eq)]
pub struct Index {
    pub columns: Vec<String>,
    pub unique: bool,
}

impl Index {
    pub fn new(columns: &str, unique: bool) -> Self {
        Self { columns: columns.split(',').map(|column| column.trim().to_owned()).collect(), unique }
    }
}

/// Reads the tables that the migrations create.
pub fn expected_tables(kind: Kind) -> Vec<Table> {
    let mut tables = Vec::new();
    for file in migrations::list(kind) {
        let uncommented: Vec<&str> = file.lines().filter_map(|line| line.split("--").next()).collect();
        for statement in uncommented.join("\n").split(';').map(str::trim).filter(|statement| !statement.is_empty()) {
            parse_statement(statement, &mut tables);
        }
    }
    tables
}

/// Quotes the names for a condition: `'a', 'b'`.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite is on this host"))]
pub fn quote_names(tables: &[Table]) -> String {
    let names: Vec<String> = tables.iter().map(|table| format!("'{}'", table.name)).collect();
    names.join(", ")
}

/// Parses a statement of a migration, which has one column or key on each line.
fn parse_statement(statement: &str, tables: &mut Vec<Table>) {
    let (head, body) = statement.split_once('(').unwrap_or((statement, ""));
    let words: Vec<&str> = head.split_whitespace().collect();
    match words[..] {
        ["CREATE", "TABLE", "IF", "NOT", "EXISTS", name] => {
            let mut table = Table { name: name.into(), ..Table::default() };
            for line in body.lines().map(|line| line.trim().trim_end_matches(',')) {
                table.parse_line(line);
            }
            tables.push(table);
        }
        ["CREATE", "INDEX", "IF", "NOT", "EXISTS", _, "ON", name] => {
            let columns = body.split(')').next().unwrap_or_default();
            if let Some(table) = tables.iter_mut().find(|table| table.name == name) {
                table.indexes.push(Index::new(columns, false));
            }
        }
        // Only people read the view.
        ["CREATE", ..] if words.contains(&"VIEW") => {}
        _ => debug_assert!(false, "a statement that the doctor cannot parse: {statement}"),
    }
}

impl Table {
    fn parse_line(&mut self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let key = || line.split(['(', ')']).nth(1).unwrap_or_default();
        match words[..] {
            [] | [")", ..] => {}
            ["PRIMARY", "KEY", ..] => self.indexes.push(Index::new(key(), true)),
            ["KEY", ..] => self.indexes.push(Index::new(key(), false)),
            [name, kind, ..] => {
                let after = |word| words.iter().position(|w| *w == word).and_then(|at| words.get(at + 1));
                if line.contains("PRIMARY KEY") {
                    self.indexes.push(Index::new(name, true));
                }
                self.columns.push(Column {
                    name: name.into(),
                    kind: kind.to_lowercase(),
                    collation: after("COLLATE").map(|collation| collation.trim_matches('"').into()).unwrap_or_default(),
                    not_null: line.contains("NOT NULL"),
                    has_default: line.contains("DEFAULT"),
                });
            }
            _ => debug_assert!(false, "a line that the doctor cannot parse: {line}"),
        }
    }

    pub fn column(&self, name: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.name.eq_ignore_ascii_case(name))
    }

    /// Returns whether a column is part of a key.
    pub fn is_key(&self, column: &str) -> bool {
        self.indexes.iter().any(|index| index.unique && index.columns.iter().any(|c| c == column))
    }

    /// Returns whether there is a unique index on exactly these columns, in any order.
    pub fn has_key(&self, columns: &[String]) -> bool {
        let wanted: BTreeSet<&String> = columns.iter().collect();
        self.indexes.iter().any(|index| index.unique && index.columns.iter().collect::<BTreeSet<_>>() == wanted)
    }

    /// Returns whether there is an index that begins with these columns.
    pub fn has_index(&self, columns: &[String]) -> bool {
        self.indexes.iter().any(|index| index.columns.starts_with(columns))
    }
}

/// The tables of a database and the record of its migrations.
pub struct Catalog {
    pub tables: Vec<Table>,
    /// The rows of the record: version, whether it succeeded, checksum in hex, age in seconds.
    /// `None`: there is no record.
    pub history: Option<Rows>,
    /// Whether the view sqlock_holders exists.
    pub has_view: bool,
    /// Where the tables are: `in the schema public`.
    pub place: String,
}

impl Catalog {
    pub fn record(&self, kind: Kind) -> Option<Record> {
        let applied = self.history.as_ref()?.iter().filter(|row| row.get(1).is_some_and(|success| parse_bool(success)));
        let applied = applied.filter_map(|row| {
            // A clock that was set back makes the tables young.
            let age = row.get(3)?.parse::<f64>().ok()?.max(0.0);
            Some((row.first()?.parse::<usize>().ok()?, Duration::try_from_secs_f64(age).ok()?))
        });
        let newest = |(version, age): (usize, Duration), (other, other_age)| (version.max(other), age.max(other_age));
        let (version, age) = applied.reduce(newest)?;
        Some(Record { age, version, latest: migrations::list(kind).len() })
    }
}

/// Makes tables of rows: name.
pub fn from_rows(rows: &Rows) -> Vec<Table> {
    rows.iter().filter_map(|row| row.first()).map(|name| Table { name: name.clone(), ..Table::default() }).collect()
}

/// Adds columns from rows: table, name, type, collation, whether it is NOT NULL, whether it has a
/// default.
pub fn add_columns(tables: &mut [Table], rows: &Rows) {
    for row in rows {
        let [table, name, kind, collation, not_null, has_default] = &row[..] else { continue };
        if let Some(table) = tables.iter_mut().find(|t| t.name == *table) {
            table.columns.push(Column {
                name: name.clone(),
                kind: kind.clone(),
                collation: collation.clone(),
                not_null: parse_bool(not_null),
                has_default: parse_bool(has_default),
            });
        }
    }
}

/// Adds indexes from rows: table, whether it is unique, columns separated by commas.
pub fn add_indexes(tables: &mut [Table], rows: &Rows) {
    for row in rows {
        let [table, unique, columns] = &row[..] else { continue };
        if let Some(table) = tables.iter_mut().find(|t| t.name == *table) {
            table.indexes.push(Index::new(columns, parse_bool(unique)));
        }
    }
}

/// Parses a boolean, as the databases write it.
pub fn parse_bool(text: &str) -> bool {
    matches!(text, "t" | "true" | "1" | "YES" | "ON" | "on")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_tables_are_read_from_the_migrations() {
        for kind in [Kind::Postgres, Kind::Mysql, Kind::Sqlite] {
            let tables = expected_tables(kind);
            let entry: Vec<&Table> = tables.iter().filter(|table| table.name == "sqlock_entry").collect();
            assert_eq!(entry.len(), 1, "{tables:#?}");
            assert_eq!(entry[0].columns.len(), 14, "{entry:#?}");
            let in_order = Index::new("name, token, arrived_at, id", false);
            assert_eq!(entry[0].indexes, [Index::new("name, id", true), in_order]);
            // Only PostgreSQL marks in the row of a name that an entry waits.
            let defaults = if kind == Kind::Postgres { &["waiting", "lost", "asked"][..] } else { &["lost", "asked"] };
            let columns = |name: &str| tables.iter().find(|t| t.name == name).map_or(0, |t| t.columns.len());
            assert_eq!(columns("sqlock_lease"), 10 + defaults.len());
            assert_eq!(columns("sqlock_idem"), 14);
            for table in &tables {
                assert!(table.indexes.first().is_some_and(|key| key.unique), "{table:#?}");
                let may_be_null = |name: &str| matches!(name, "result" | "request");
                assert!(table.columns.iter().all(|column| column.not_null || may_be_null(&column.name)), "{table:#?}");
            }
            let lease = &tables[tables.iter().position(|table| table.name == "sqlock_lease").unwrap_or(0)];
            assert_eq!(lease.columns.iter().filter(|c| c.has_default).map(|c| &*c.name).collect::<Vec<_>>(), defaults);
            let name = match kind {
                Kind::Postgres => ("text", "C"),
                Kind::Mysql => ("varbinary(255)", ""),
                Kind::Sqlite => ("text", "BINARY"),
            };
            assert_eq!((&*lease.columns[0].kind, &*lease.columns[0].collation), name);
        }
    }
}
