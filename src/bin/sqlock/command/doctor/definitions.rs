//! What is different between the tables that there should be and those that were found.

use std::collections::BTreeSet;

use sqlx::SqlStr;
use sqlx::migrate::{Migration, MigrationType};

use super::report::{Check, Status};
use super::table::{Catalog, Table, parse_bool};
use crate::migrations;
use crate::url::Kind;

/// Whether the tables are there, and the migrations that make them were applied.
pub fn check_presence(kind: Kind, expected: &[Table], found: &Catalog, may_migrate: bool) -> Check {
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
        check = check_migrations(check, kind, history);
    }
    check.or_ok(match found.history {
        Some(_) => format!("{} {}, up to date", expected.len(), found.place),
        None => format!("{} {}, made without \"sqlock migrate\"", expected.len(), found.place),
    })
}

/// Compares the history with what this program would apply.
fn check_migrations(mut check: Check, kind: Kind, history: &[Vec<String>]) -> Check {
    let known: Vec<String> = migrations::list(kind).iter().map(|sql| hex_checksum(sql)).collect();
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
            Some(_) if !parse_bool(success) => {
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
fn hex_checksum(sql: &'static str) -> String {
    let migration = Migration::new(0, "".into(), MigrationType::Simple, SqlStr::from_static(sql), false);
    migration.checksum.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Whether the tables that are there are as they should be: they may have been made by hand. Further remarks in `check`.
pub fn check_definitions(kind: Kind, expected: &[Table], found: &[Table], check: Check) -> Check {
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
            if !is_compatible(&there.kind, &column.kind) {
                check = check.fail(format!("{what} is {} and should be {}", there.kind, column.kind), advice);
            } else if let Some((status, how)) =
                check_collation(kind, &column.collation, &there.collation, wanted.is_key(&column.name))
            {
                check = check.add(status, format!("{what} {how}"), advice);
            }
            if column.has_default && !there.has_default {
                check = check.fail(format!("{what} has no default"), advice);
            }
        }
        let unknown = found.columns.iter().filter(|there| wanted.column(&there.name).is_none());
        for unknown in unknown.filter(|column| column.not_null && !column.has_default) {
            let advice = "Give it a default, or drop it.";
            check = check.fail(format!("{name}.{} is not ours and must be given a value", unknown.name), advice);
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

/// Whether a column of one type can be used in the place of another: the same, or the same for longer values.
fn is_compatible(there: &str, wanted: &str) -> bool {
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
fn check_collation(kind: Kind, wanted: &str, there: &str, is_key: bool) -> Option<(Status, String)> {
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
    use crate::command::doctor::table::expected_tables;

    const KINDS: [Kind; 3] = [Kind::Postgres, Kind::Mysql, Kind::Sqlite];

    #[test]
    fn what_is_as_it_should_be_is_ok_and_every_table_is_needed() {
        for kind in KINDS {
            let tables = expected_tables(kind);
            assert_eq!(
                check_definitions(kind, &tables, &expected_tables(kind), Check::new("definitions")).status,
                Status::Ok
            );
            let mut found = Catalog { tables: expected_tables(kind), history: None, place: "here".into() };
            assert_eq!(check_presence(kind, &tables, &found, false).status, Status::Ok);
            let dropped = found.tables.pop().map(|table| table.name).unwrap_or_default();
            let check = check_presence(kind, &tables, &found, true);
            assert_eq!((check.status, check.found()), (Status::Fail, format!("missing here: {dropped}")));
            found.tables.clear();
            assert_eq!(check_presence(kind, &tables, &found, true).status, Status::Warn);
            assert_eq!(check_presence(kind, &tables, &found, false).status, Status::Fail);
        }
    }

    #[test]
    fn a_type_may_be_longer_and_nothing_else() {
        assert!(is_compatible("bigint(20)", "bigint") && is_compatible("varchar(64)", "varchar(32)"));
        assert!(is_compatible("character varying", "text"));
        assert!(!is_compatible("varchar(16)", "varchar(32)") && !is_compatible("character varying(20)", "text"));
        assert!(!is_compatible("varchar(255)", "varbinary(255)") && !is_compatible("integer", "bigint"));
        assert!(!is_compatible("bigint(20) unsigned", "varchar(20)"));
    }

    #[test]
    fn collations_that_fold_names_are_failures() {
        let of = |kind, wanted, there, is_key| check_collation(kind, wanted, there, is_key).map(|(status, _)| status);
        assert_eq!(of(Kind::Postgres, "C", "C", true), None);
        assert_eq!(of(Kind::Postgres, "C", "default", true), Some(Status::Warn));
        assert_eq!(of(Kind::Postgres, "C", "!ignore_case", true), Some(Status::Fail));
        assert_eq!(of(Kind::Mysql, "ascii_bin", "utf8mb4_bin", true), None);
        assert_eq!(of(Kind::Mysql, "ascii_bin", "utf8mb4_general_ci", true), Some(Status::Fail));
        assert_eq!(of(Kind::Mysql, "utf8mb4_bin", "utf8mb4_general_ci", false), Some(Status::Warn));
        assert_eq!(of(Kind::Sqlite, "BINARY", "NOCASE", true), Some(Status::Fail));
    }
}
