//! What the tables should be like, which is read from the SQL that `sqlock schema` prints, and what is different.

use std::collections::BTreeSet;

use sqlx::SqlStr;
use sqlx::migrate::{Migration, MigrationType};

use super::Rows;
use super::report::{Check, Status};
use crate::migrations;
use crate::url::Kind;

/// Where it stands which migrations were applied.
pub const HISTORY: &str = "_sqlock_migrations";

/// A table: as it should be, or as it was found.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Table {
    pub name: String,
    pub columns: Vec<Column>,
    pub indexes: Vec<Index>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Column {
    pub name: String,
    /// In lower case, as the database spells it.
    pub kind: String,
    /// Empty: it has none, or it was not asked for.
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
    pub fn of(columns: &str, unique: bool) -> Self {
        Self { columns: columns.split(',').map(|column| column.trim().to_owned()).collect(), unique }
    }
}

/// The tables that all migrations make.
pub fn expected(kind: Kind) -> Vec<Table> {
    let mut tables = Vec::new();
    for file in migrations::migrations(kind) {
        let uncommented: Vec<&str> = file.lines().filter_map(|line| line.split("--").next()).collect();
        for statement in uncommented.join("\n").split(';').map(str::trim).filter(|statement| !statement.is_empty()) {
            read(statement, &mut tables);
        }
    }
    tables
}

/// The names, for a condition: `'a', 'b'`.
#[cfg_attr(not(any(feature = "postgres", feature = "mysql")), allow(dead_code, reason = "SQLite is on this host"))]
pub fn quoted(tables: &[Table]) -> String {
    let names: Vec<String> = tables.iter().map(|table| format!("'{}'", table.name)).collect();
    names.join(", ")
}

/// Reads a statement of a migration: one column or key a line, as they are written here.
fn read(statement: &str, tables: &mut Vec<Table>) {
    let (head, body) = statement.split_once('(').unwrap_or((statement, ""));
    let words: Vec<&str> = head.split_whitespace().collect();
    match words[..] {
        ["CREATE", "TABLE", "IF", "NOT", "EXISTS", name] => {
            let mut table = Table { name: name.into(), ..Table::default() };
            for line in body.lines().map(|line| line.trim().trim_end_matches(',')) {
                table.read(line);
            }
            tables.push(table);
        }
        ["CREATE", "INDEX", "IF", "NOT", "EXISTS", _, "ON", name] => {
            let columns = body.split(')').next().unwrap_or_default();
            if let Some(table) = tables.iter_mut().find(|table| table.name == name) {
                table.indexes.push(Index::of(columns, false));
            }
        }
        _ => debug_assert!(false, "nobody has taught the doctor to read {statement}"),
    }
}

impl Table {
    fn read(&mut self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let key = || line.split(['(', ')']).nth(1).unwrap_or_default();
        match words[..] {
            [] | [")", ..] => {}
            ["PRIMARY", "KEY", ..] => self.indexes.push(Index::of(key(), true)),
            ["KEY", ..] => self.indexes.push(Index::of(key(), false)),
            [name, kind, ..] => {
                let after = |word| words.iter().position(|w| *w == word).and_then(|at| words.get(at + 1));
                if line.contains("PRIMARY KEY") {
                    self.indexes.push(Index::of(name, true));
                }
                self.columns.push(Column {
                    name: name.into(),
                    kind: kind.to_lowercase(),
                    collation: after("COLLATE").map(|collation| collation.trim_matches('"').into()).unwrap_or_default(),
                    not_null: line.contains("NOT NULL"),
                    has_default: line.contains("DEFAULT"),
                });
            }
            _ => debug_assert!(false, "nobody has taught the doctor to read {line}"),
        }
    }

    fn column(&self, name: &str) -> Option<&Column> {
        self.columns.iter().find(|column| column.name.eq_ignore_ascii_case(name))
    }

    /// Whether a column identifies rows, or helps to.
    fn is_key(&self, column: &str) -> bool {
        self.indexes.iter().any(|index| index.unique && index.columns.iter().any(|c| c == column))
    }
}

/// What was found beside the tables themselves.
pub struct Found {
    pub tables: Vec<Table>,
    /// The rows of the history: version, whether it succeeded, checksum in hex. `None`: there is none.
    pub history: Option<Rows>,
    /// Where they are: `in the schema "public"`.
    pub place: String,
}

/// The tables of these rows: name.
pub fn of_rows(rows: &Rows) -> Vec<Table> {
    rows.iter().filter_map(|row| row.first()).map(|name| Table { name: name.clone(), ..Table::default() }).collect()
}

/// Adds columns to them: table, name, type, collation, whether it is NOT NULL, whether it has a default.
pub fn add_columns(tables: &mut [Table], rows: &Rows) {
    for row in rows {
        let [table, name, kind, collation, not_null, has_default] = &row[..] else { continue };
        if let Some(table) = tables.iter_mut().find(|t| t.name == *table) {
            table.columns.push(Column {
                name: name.clone(),
                kind: kind.clone(),
                collation: collation.clone(),
                not_null: is_true(not_null),
                has_default: is_true(has_default),
            });
        }
    }
}

/// Adds indexes: table, whether it is unique, columns with commas in between.
pub fn add_indexes(tables: &mut [Table], rows: &Rows) {
    for row in rows {
        let [table, unique, columns] = &row[..] else { continue };
        if let Some(table) = tables.iter_mut().find(|t| t.name == *table) {
            table.indexes.push(Index::of(columns, is_true(unique)));
        }
    }
}

/// As databases write it.
pub fn is_true(text: &str) -> bool {
    matches!(text, "t" | "true" | "1" | "YES" | "ON" | "on")
}

/// Whether the tables are there, and the migrations that make them were applied.
pub fn presence(kind: Kind, expected: &[Table], found: &Found, may_migrate: bool) -> Check {
    let check = Check::new("tables");
    let is_there = |table: &&Table| found.tables.iter().any(|there| there.name == table.name);
    let missing: Vec<&str> = expected.iter().filter(|table| !is_there(table)).map(|table| &*table.name).collect();
    let history = found.history.as_deref().unwrap_or_default();
    if missing.len() == expected.len() && history.is_empty() {
        let found = format!("there are none {}", found.place);
        return if may_migrate {
            check.warn(
                found,
                "They are created on first use; or run \"sqlock migrate\", or what \"sqlock schema\" prints.",
            )
        } else {
            check.fail(
                found,
                "Run \"sqlock migrate\", or what \"sqlock schema\" prints: --no-migrate forbids others to.",
            )
        };
    }
    let mut check = check;
    if !missing.is_empty() {
        let advice = if history.is_empty() {
            "Run \"sqlock migrate\", or what \"sqlock schema\" prints: it leaves alone what is there."
        } else {
            "Run \"sqlock migrate\". If it finds nothing to do, they were dropped: run what \"sqlock schema\" prints."
        };
        check = check.fail(format!("missing {}: {}", found.place, missing.join(", ")), advice);
    }
    if found.history.is_some() {
        check = migrations(check, kind, history);
    }
    check.or_ok(match found.history {
        Some(_) => format!("{} {}, up to date", expected.len(), found.place),
        None => format!("{} {}, made without \"sqlock migrate\"", expected.len(), found.place),
    })
}

/// Compares the history with what this program would apply.
fn migrations(mut check: Check, kind: Kind, history: &[Vec<String>]) -> Check {
    let known: Vec<String> = migrations::migrations(kind).iter().map(|sql| checksum(sql)).collect();
    let mut applied = BTreeSet::new();
    for row in history {
        let [version, success, checksum] = &row[..] else { continue };
        let version: usize = version.parse().unwrap_or(0);
        applied.insert(version);
        match version.checked_sub(1).and_then(|index| known.get(index)) {
            None => {
                let advice = "A newer sqlock has made these tables: update this one.";
                check = check.fail(format!("migration {version} is newer than this program"), advice);
            }
            Some(_) if !is_true(success) => {
                let advice = "Run \"sqlock migrate\": it takes up where another one was interrupted.";
                check = check.fail(format!("migration {version} was interrupted"), advice);
            }
            Some(known) if !known.eq_ignore_ascii_case(checksum) => {
                let advice = "Another version of sqlock has made these tables, or somebody has changed the record: compare them \
                              with what \"sqlock schema\" prints.";
                check = check.fail(format!("migration {version} is not the one that this program knows"), advice);
            }
            Some(_) => {}
        }
    }
    let missing: Vec<String> = (1..=known.len()).filter(|v| !applied.contains(v)).map(|v| v.to_string()).collect();
    if !missing.is_empty() {
        let what = if missing.len() == 1 { "migration" } else { "migrations" };
        let advice = "Run \"sqlock migrate\", with the right to create tables.";
        check = check.fail(format!("{what} {} not applied", missing.join(", ")), advice);
    }
    check
}

/// As sqlx records it, in hex.
fn checksum(sql: &'static str) -> String {
    let migration = Migration::new(0, "".into(), MigrationType::Simple, SqlStr::from_static(sql), false);
    migration.checksum.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the tables that are there are as they should be: they may have been made by hand. Further remarks in `check`.
pub fn definitions(kind: Kind, expected: &[Table], found: &[Table], check: Check) -> Check {
    let advice = "Make it like what \"sqlock schema\" prints.";
    let mut check = check;
    let mut compared = 0;
    for wanted in expected {
        let Some(found) = found.iter().find(|table| table.name == wanted.name) else { continue };
        compared += 1;
        let name = &wanted.name;
        for column in &wanted.columns {
            let what = format!("{name}.{}", column.name);
            let Some(there) = found.column(&column.name) else {
                check = check.fail(format!("{what} is missing"), advice);
                continue;
            };
            if !does_for(&there.kind, &column.kind) {
                check = check.fail(format!("{what} is {} and should be {}", there.kind, column.kind), advice);
            } else if let Some((status, how)) =
                folds(kind, &column.collation, &there.collation, wanted.is_key(&column.name))
            {
                check = check.and(status, format!("{what} {how}"), advice);
            }
            if column.has_default && !there.has_default {
                check = check.fail(format!("{what} has no default"), advice);
            }
        }
        let strange = found.columns.iter().filter(|there| wanted.column(&there.name).is_none());
        for strange in strange.filter(|column| column.not_null && !column.has_default) {
            let advice = "Give it a default, or drop it.";
            check = check.fail(format!("{name}.{} is not ours and must be given a value", strange.name), advice);
        }
        for index in &wanted.indexes {
            let columns = index.columns.join(", ");
            match index.unique {
                true if !found.has_key(&index.columns) => {
                    check = check.fail(format!("{name} has no primary key on ({columns})"), advice);
                }
                false if !found.has_index(&index.columns) => {
                    check = check.fail(format!("{name} has no index on ({columns})"), advice);
                }
                _ => {}
            }
        }
    }
    match compared {
        0 => check.unknown("there are no tables", ""),
        _ => check.or_ok("columns, keys and indexes are as they should be"),
    }
}

impl Table {
    /// A unique index on just these columns, in whatever order.
    fn has_key(&self, columns: &[String]) -> bool {
        let wanted: BTreeSet<&String> = columns.iter().collect();
        self.indexes.iter().any(|index| index.unique && index.columns.iter().collect::<BTreeSet<_>>() == wanted)
    }

    /// An index that begins with these columns.
    fn has_index(&self, columns: &[String]) -> bool {
        self.indexes.iter().any(|index| index.columns.starts_with(columns))
    }
}

/// Whether a column of one type can be used in the place of another: the same, or the same for longer values.
fn does_for(there: &str, wanted: &str) -> bool {
    let parts = |kind: &str| -> (String, Option<u32>) {
        let (base, length) = kind.split_once('(').unwrap_or((kind, ""));
        // PostgreSQL has two names for one thing. The number behind bigint is one of digits to be shown.
        let base = if base == "character varying" && length.is_empty() { "text" } else { base.trim() };
        (base.into(), length.trim_end_matches(')').parse().ok().filter(|_| base != "bigint"))
    };
    let (there, wanted) = (parts(there), parts(wanted));
    there.0 == wanted.0 && there.1.unwrap_or(u32::MAX) >= wanted.1.unwrap_or(0)
}

/// What is wrong with the order in which a column's values are compared.
fn folds(kind: Kind, wanted: &str, there: &str, is_key: bool) -> Option<(Status, String)> {
    if wanted.is_empty() || there.is_empty() || wanted.eq_ignore_ascii_case(there) {
        return None;
    }
    match kind {
        // It marks those that take different texts to be equal.
        Kind::Postgres if there.starts_with('!') => {
            Some((Status::Fail, format!("takes different names to be equal (collation {})", &there[1..])))
        }
        Kind::Postgres if matches!(there, "POSIX" | "ucs_basic") => None,
        Kind::Postgres => Some((
            Status::Warn,
            format!(
                "has the collation {there} and should have {wanted}: an update of the system's library can corrupt its index"
            ),
        )),
        Kind::Mysql if there.ends_with("_bin") || there == "binary" => None,
        Kind::Mysql if is_key => {
            Some((Status::Fail, format!("takes different names to be equal (collation {there}, should be {wanted})")))
        }
        Kind::Mysql => Some((Status::Warn, format!("has the collation {there} and should have {wanted}"))),
        Kind::Sqlite => Some((Status::Fail, format!("takes different names to be equal (collation {there})"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Kind; 3] = [Kind::Postgres, Kind::Mysql, Kind::Sqlite];

    #[test]
    fn the_tables_are_read_from_the_sql_that_makes_them() {
        for kind in KINDS {
            let tables = expected(kind);
            let entry: Vec<&Table> = tables.iter().filter(|table| table.name == "sqlock_entry").collect();
            assert_eq!(entry.len(), 1, "{tables:#?}");
            assert_eq!(entry[0].columns.len(), 14, "{entry:#?}");
            let in_order = Index::of("name, token, arrived_at, id", false);
            assert_eq!(entry[0].indexes, [Index::of("name, id", true), in_order]);
            // Only PostgreSQL marks in the row of a name that an entry waits.
            let defaults = if kind == Kind::Postgres { &["waiting", "lost"][..] } else { &["lost"] };
            let columns = |name: &str| tables.iter().find(|t| t.name == name).map_or(0, |t| t.columns.len());
            assert_eq!(columns("sqlock_lease"), 10 + defaults.len());
            assert_eq!(columns("sqlock_idem"), 12);
            for table in &tables {
                assert!(table.indexes.first().is_some_and(|key| key.unique), "{table:#?}");
                assert!(table.columns.iter().all(|column| column.not_null || column.name == "result"), "{table:#?}");
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

    #[test]
    fn what_is_as_it_should_be_is_ok_and_every_table_is_needed() {
        for kind in KINDS {
            let tables = expected(kind);
            assert_eq!(definitions(kind, &tables, &expected(kind), Check::new("definitions")).status, Status::Ok);
            let mut found = Found { tables: expected(kind), history: None, place: "here".into() };
            assert_eq!(presence(kind, &tables, &found, false).status, Status::Ok);
            let dropped = found.tables.pop().map(|table| table.name).unwrap_or_default();
            let check = presence(kind, &tables, &found, true);
            assert_eq!((check.status, check.found()), (Status::Fail, format!("missing here: {dropped}")));
            found.tables.clear();
            assert_eq!(presence(kind, &tables, &found, true).status, Status::Warn);
            assert_eq!(presence(kind, &tables, &found, false).status, Status::Fail);
        }
    }

    #[test]
    fn a_type_may_be_longer_and_nothing_else() {
        assert!(does_for("bigint(20)", "bigint") && does_for("varchar(64)", "varchar(32)"));
        assert!(does_for("character varying", "text"));
        assert!(!does_for("varchar(16)", "varchar(32)") && !does_for("character varying(20)", "text"));
        assert!(!does_for("varchar(255)", "varbinary(255)") && !does_for("integer", "bigint"));
        assert!(!does_for("bigint(20) unsigned", "varchar(20)"));
    }

    #[test]
    fn collations_that_fold_names_are_failures() {
        let of = |kind, wanted, there, is_key| folds(kind, wanted, there, is_key).map(|(status, _)| status);
        assert_eq!(of(Kind::Postgres, "C", "C", true), None);
        assert_eq!(of(Kind::Postgres, "C", "default", true), Some(Status::Warn));
        assert_eq!(of(Kind::Postgres, "C", "!ignore_case", true), Some(Status::Fail));
        assert_eq!(of(Kind::Mysql, "ascii_bin", "utf8mb4_bin", true), None);
        assert_eq!(of(Kind::Mysql, "ascii_bin", "utf8mb4_general_ci", true), Some(Status::Fail));
        assert_eq!(of(Kind::Mysql, "utf8mb4_bin", "utf8mb4_general_ci", false), Some(Status::Warn));
        assert_eq!(of(Kind::Sqlite, "BINARY", "NOCASE", true), Some(Status::Fail));
    }
}
